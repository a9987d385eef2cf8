# SPDX-License-Identifier: Apache-2.0
"""The checks of a finished engine configuration: what is completed, what is refused, what is announced."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig

import oscar_vllm
from oscar_vllm import plugin
from oscar_vllm.artifact import Artifact
from oscar_vllm.errors import OscarArtifactError, OscarConfigError, OscarUnsupportedError
from oscar_vllm.rotation import engine_settings

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def config(folder):
    """A configuration as vLLM builds it, before `prepare`; tests change a field of it."""
    from vllm.engine.arg_utils import EngineArgs

    oscar_vllm.register()
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        additional_config={"oscar": {"rotation": "hadamard"}},
        max_model_len=2048,
    )
    vllm_config = arguments.create_engine_config()
    vllm_config.cache_config.cache_dtype = "oscar_int2"
    return vllm_config


def change(target, path: str, value) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    object.__setattr__(target, name, value)


def test_an_ordinary_configuration_is_described_in_one_line(config):
    line = plugin.validate_vllm_config(config)
    assert "\n" not in line
    for part in (
        "2.25 bits per element",
        f"{2 * 2 * 72} bytes per token (2 layers, 2 KV heads of size 128)",
        "the first 64 and last 256 tokens stay bfloat16",
        "prefill exact",
        "data-free Hadamard rotation",
    ):
        assert part in line


def test_prepare_logs_the_summary_once(config, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("oscar_vllm"), "parent", logging.getLogger())
    with caplog.at_level(logging.INFO, logger="oscar_vllm"):
        plugin.prepare(config)
    assert [record.message.startswith("OSCAR KV cache: 2.25 bits") for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("method", "calibration", "warned"),
    [
        ("spectral", {"max_position": 500}, 500),
        ("spectral", {"max_length": 300}, 300),  # written before positions were looked at
        ("spectral", {"max_position": 100_000}, None),
        ("uniform", {"max_position": 500}, None),
    ],
)
def test_contexts_beyond_the_calibrated_ones_are_warned_of(config, monkeypatch, caplog, method, calibration, warned):
    artifact = Artifact({}, {}, "m", method={"allocation": method}, calibration=calibration)
    settings = replace(engine_settings(config), artifact=artifact)
    monkeypatch.setattr("oscar_vllm.rotation.engine_settings", lambda _: settings)
    message = plugin.beyond_calibration(config)
    if warned is None:
        assert message is None
        return
    longest = config.model_config.max_model_len
    assert f"--max-model-len {longest}: the artifact was calibrated for contexts of up to {warned} tokens" in message
    assert f"--max-position {longest}" in message
    monkeypatch.setattr(plugin, "validate_vllm_config", lambda _: "summary")
    monkeypatch.setattr(logging.getLogger("oscar_vllm"), "parent", logging.getLogger())
    with caplog.at_level(logging.INFO, logger="oscar_vllm"):
        plugin.prepare(config)
    assert [(record.levelname, record.message) for record in caplog.records][1:] == [("WARNING", message)]


def test_log_records_reach_vllms_handlers():
    oscar_vllm.register()
    assert logging.getLogger("oscar_vllm").parent is logging.getLogger("vllm")
    assert plugin.logger.hasHandlers()


REFUSED = {
    "no hybrid manager": (
        "scheduler_config.disable_hybrid_kv_cache_manager",
        True,
        "--disable-hybrid-kv-cache-manager",
    ),
    "connector": ("kv_transfer_config", KVTransferConfig("ExampleConnector", kv_role="kv_both"), "ExampleConnector"),
    "decode context parallel": ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size 2"),
    "prefill context parallel": (
        "parallel_config.prefill_context_parallel_size",
        2,
        "--prefill-context-parallel-size",
    ),
    "dual batch overlap": ("parallel_config.enable_dbo", True, "--enable-dbo"),
    "fast prefill": ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    "hisparse": ("attention_config.hisparse_config", SimpleNamespace(), "HiSparse"),
    "alibi": ("model_config.hf_text_config.alibi", True, "ALiBi"),
    "alibi by position embedding": ("model_config.hf_text_config.position_embedding_type", "alibi", "ALiBi"),
    "alibi in attn_config": ("model_config.hf_text_config.attn_config", {"alibi": True}, "ALiBi"),
    "sliding window only": ("cache_config.sliding_window", 512, "nothing to compress"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_why_and_what_instead_in_one_line(config, case):
    path, value, message = REFUSED[case]
    change(config, path, value)
    with pytest.raises(OscarUnsupportedError) as caught:
        plugin.validate_vllm_config(config)
    text = str(caught.value)
    assert message in text
    assert text.startswith("--kv-cache-dtype oscar_int2 ")
    assert "\n" not in text
    assert "use --kv-cache-dtype auto" in text


def offloading(**changes) -> KVTransferConfig:
    """Our connector as the engine tests have it, with copies for a CPU."""
    fields = {"kv_connector": "CPUOffloadConnector", "kv_connector_module_path": "tests.engine.offload"}
    return KVTransferConfig(**{"kv_role": "kv_both", **fields, **changes})


@pytest.mark.parametrize(
    ("connector", "size", "backend", "ours"),
    [
        ("OffloadingConnector", 8.0, "native", True),  # what vLLM makes of --kv-offloading-size
        ("SimpleCPUOffloadConnector", 8.0, "native", True),
        ("SimpleCPUOffloadConnector", None, "native", True),
        ("OffloadingConnector", None, "native", False),
        ("LMCacheMPConnector", 8.0, "lmcache", False),
    ],
)
def test_offloading_to_cpu_memory_is_handed_to_our_connector(config, connector, size, backend, ours):
    config.kv_transfer_config = KVTransferConfig(connector, kv_role="kv_both")
    config.cache_config.kv_offloading_size, config.cache_config.kv_offloading_backend = size, backend
    plugin.offload_with_windows(config)
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == ("OscarOffloadConnector" if ours else connector)
    assert transfer.kv_connector_module_path == ("oscar_vllm.offload" if ours else None)


def test_offloading_is_described_or_refused_by_what_else_is_asked_for(config):
    config.kv_transfer_config = offloading()
    plugin.validate_vllm_config(config)
    refused = {
        "NVIDIA GPUs only": offloading(
            kv_connector="OscarOffloadConnector", kv_connector_module_path="oscar_vllm.offload"
        ),
        "set kv_role to kv_both": offloading(kv_role="kv_producer"),
        "not to disk; drop kv_offload_backend": offloading(kv_connector_extra_config={"kv_offload_backend": "disk"}),
    }
    for message, transfer in refused.items():
        config.kv_transfer_config = transfer
        with pytest.raises(OscarUnsupportedError, match=message):
            plugin.validate_vllm_config(config)
    config.kv_transfer_config = offloading()
    change(config, "parallel_config.pipeline_parallel_size", 2)
    with pytest.raises(OscarUnsupportedError, match="pipeline parallelism"):
        plugin.validate_vllm_config(config)


def test_offloading_of_recurrent_states_is_refused(config, monkeypatch):
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    config.kv_transfer_config = offloading()
    with pytest.raises(OscarUnsupportedError, match="recurrent states"):
        plugin.validate_vllm_config(config)


def test_speculation_in_hybrid_models_is_refused_on_a_cpu(config, monkeypatch):
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform

    config.speculative_config = SimpleNamespace(num_speculative_tokens=3, method="ngram")
    assert list(plugin._unsupported_engine(config)) == []
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    (problem,) = plugin._unsupported_engine(config)
    assert "hybrid models on a CPU" in problem
    assert "drop --speculative-config" in problem
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert list(plugin._unsupported_engine(config)) == []


@pytest.mark.parametrize(
    ("options", "field", "value", "message"),
    [
        (
            {"payload": "float"},
            None,
            None,
            r"payload='float', ops='auto' run the PyTorch reference.*add --enforce-eager",
        ),
        ({"ops": "reference", "rotation": "hadamard"}, None, None, "ops='reference' run the PyTorch reference"),
        (
            {"rotation": "hadamard"},
            "model_config.dtype",
            torch.float32,
            "needs --dtype bfloat16 or float16, not torch.float32",
        ),
        (
            {"rotation": "hadamard"},
            "speculative_config",
            SimpleNamespace(num_speculative_tokens=16, method="ngram", parallel_drafting=False),
            "at most 16 tokens of a request a step, num_speculative_tokens=16 asks for 17",
        ),
        (
            {"rotation": "hadamard"},
            "speculative_config",
            SimpleNamespace(num_speculative_tokens=8, method="eagle", parallel_drafting=True),
            "num_speculative_tokens=8 asks for 17",
        ),
    ],
)
def test_what_a_gpu_needs(config, monkeypatch, options, field, value, message):
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    config.additional_config = {"oscar": options}
    change(config, "compilation_config.cudagraph_mode", CUDAGraphMode.FULL)
    if field:
        change(config, field, value)
    plugin._check_gpu(config, plugin.OscarConfig.from_options(options))  # nothing to say on a CPU
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    with pytest.raises((OscarConfigError, OscarUnsupportedError), match=message):
        plugin._check_gpu(config, plugin.OscarConfig.from_options(options))


MODEL_KINDS = {
    "latent attention": ("use_mla", True, "latent attention"),
    "attention free": ("is_attention_free", True, "no attention layers"),
    "encoder decoder": ("is_encoder_decoder", True, "encoder or cross attention"),
    "encoder only": ("attn_type", "encoder_only", "encoder or cross attention"),
    "image prefix": ("is_mm_prefix_lm", True, "bidirectional attention"),
    "chunked local attention": ("attention_chunk_size", 8192, "chunked local attention"),
}


def served(model_type: str, **changes) -> SimpleNamespace:
    """What `plugin._unsupported_model` reads of a configuration: a decoder that it serves, but for ``changes``."""
    model = {
        "hf_text_config": SimpleNamespace(model_type=model_type), "use_mla": False, "is_attention_free": False,
        "is_encoder_decoder": False, "attn_type": "decoder", "is_mm_prefix_lm": False, "attention_chunk_size": None,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | changes), cache_config=SimpleNamespace(sliding_window=None)
    )


def test_hybrid_models_are_not_cut_into_stages(config, monkeypatch):
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    assert list(plugin._unsupported_engine(config)) == []
    config.parallel_config.pipeline_parallel_size = 2
    (problem,) = plugin._unsupported_engine(config)
    assert "use --tensor-parallel-size instead" in problem


def test_attention_blocks_shared_by_layers_are_refused():
    (problem,) = plugin._unsupported_model(served("zamba2", attn_type="hybrid"))
    assert "several layers share (zamba2)" in problem


@pytest.mark.parametrize("case", MODEL_KINDS)
def test_kinds_of_models_that_are_refused(case):
    name, value, message = MODEL_KINDS[case]
    assert list(plugin._unsupported_model(served("some"))) == []
    (problem,) = plugin._unsupported_model(served("some", **{name: value}))
    assert message in problem
    assert problem.endswith("use --kv-cache-dtype auto")


@pytest.mark.parametrize(
    ("stated", "kinds"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, ["", "full"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding", "full"]),
        ({"layer_types": ["mamba", "attention"]}, ["", "full"]),
        ({"layers_block_type": ["mamba", "moe", "attention", "hybrid"]}, ["", "", "full", "full"]),
        ({"attn_type_list": [0, 1]}, ["", "full"]),
        ({"num_hidden_layers": 2}, ["full", "full"]),
    ],
    ids=["linear", "sliding", "mamba", "blocks", "codes", "plain"],
)
def test_kinds_of_layers(stated, kinds):
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**stated)))
    assert plugin._layer_kinds(config) == kinds


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_block_sizes_other_than_a_page_are_refused(config, block_size):
    config.cache_config.user_specified_block_size = True
    config.cache_config.block_size = block_size
    with pytest.raises(OscarConfigError, match=f"--block-size {block_size}: .* pages hold 128 tokens"):
        plugin.validate_vllm_config(config)
    config.cache_config.block_size = 128
    plugin.validate_vllm_config(config)


@pytest.mark.parametrize("head_size", [100, 320])
def test_head_sizes_that_fit_no_page_are_refused(config, monkeypatch, head_size):
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda self: head_size)
    message = f"oscar_int2: head size {head_size} fits no INT2 page; multiples of 8 up to 256 are served; use --kv-ca"
    with pytest.raises(OscarUnsupportedError, match=message):
        plugin.validate_vllm_config(config)


@pytest.mark.parametrize(
    ("head_size", "payload", "said"),
    [
        # Bits of the model's own elements: 72 bytes per token, head and layer hold 2 * 80, or 2 * 96, of them.
        (80, "int2", "3.6 bits per element in pages of 128 tokens, 288 bytes per token"),
        (96, "int2", "3 bits per element in pages of 128 tokens, 288 bytes per token"),
        (112, "int2", "2.57 bits per element"),
        (192, "int2", "2.88 bits per element in pages of 128 tokens, 552 bytes per token"),
        (80, "float", "25.6 bits per element in pages of 128 tokens, 2,048 bytes per token"),
    ],
)
def test_padded_heads_are_announced_with_their_true_size(config, monkeypatch, head_size, payload, said):
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda self: head_size)
    config.additional_config["oscar"]["payload"] = payload
    line = plugin.validate_vllm_config(config)
    assert said in line
    assert f"2 KV heads of size {head_size}, padded to {128 if head_size < 128 else 256})" in line


def test_batch_invariant_mode_is_refused_with_our_own_alternative(config, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(OscarUnsupportedError, match='"prefill": "invariant"'):
        plugin.validate_vllm_config(config)


def test_an_engine_without_artifact_is_refused(config, folder):
    config.additional_config["oscar"] = {}
    with pytest.raises(OscarArtifactError, match=f"python -m calib --model {folder}"):
        plugin.validate_vllm_config(config)


def test_an_unknown_option_is_refused(config):
    config.additional_config["oscar"] = {"rotatoin": "hadamard"}
    with pytest.raises(OscarConfigError, match="did you mean 'rotation'"):
        plugin.validate_vllm_config(config)


# ---- what is completed ----------------------------------------------------------------------------------------------


def test_sliding_window_layers_are_skipped_and_not_counted(config):
    change(config, "model_config.hf_text_config.layer_types", ["sliding_attention", "full_attention"])
    config.cache_config.kv_cache_dtype_skip_layers = ["7"]
    plugin.keep_sliding_window_layers(config)
    plugin.keep_sliding_window_layers(config)
    assert config.cache_config.kv_cache_dtype_skip_layers == ["7", "sliding_window"]
    assert "(1 layers, 2 KV heads" in plugin.validate_vllm_config(config)


def test_models_without_sliding_windows_skip_nothing(config):
    plugin.keep_sliding_window_layers(config)
    assert config.cache_config.kv_cache_dtype_skip_layers == []


def test_a_cache_that_several_layers_read_is_skipped_with_its_readers(config):
    """Gemma 3n: the last layers read the caches of the last sliding and the last full layer that have one."""
    kinds = ["sliding_attention", "full_attention"] * 4
    change(config, "model_config.hf_text_config.layer_types", kinds)
    change(config, "model_config.hf_text_config.num_kv_shared_layers", 3)
    config.cache_config.kv_cache_dtype_skip_layers = ["1"]
    plugin.keep_shared_layers(config)
    plugin.keep_shared_layers(config)
    assert config.cache_config.kv_cache_dtype_skip_layers == ["1", "3", "5", "7"]
    change(config, "model_config.hf_text_config.num_kv_shared_layers", 0)
    plugin.keep_shared_layers(config)
    assert config.cache_config.kv_cache_dtype_skip_layers == ["1", "3", "5", "7"]


def speculative(method: str, kv_cache_dtype: str | None = None):
    return SimpleNamespace(
        method=method,
        kv_cache_dtype=kv_cache_dtype,
        use_eagle=lambda: method in ("eagle", "eagle3", "mtp"),
        uses_draft_model=lambda: method == "draft_model",
    )


@pytest.mark.parametrize(("method", "dtype"), [("eagle3", "auto"), ("draft_model", "auto"), ("ngram", None)])
def test_draft_layers_keep_the_draft_models_dtype(method, dtype):
    vllm_config = SimpleNamespace(speculative_config=speculative(method), use_v2_model_runner=False)
    plugin.keep_draft_dtype(vllm_config)
    assert vllm_config.speculative_config.kv_cache_dtype == dtype


def test_an_explicit_draft_dtype_is_kept_unless_it_is_ours():
    vllm_config = SimpleNamespace(speculative_config=speculative("eagle3", "fp8"), use_v2_model_runner=False)
    plugin.keep_draft_dtype(vllm_config)
    assert vllm_config.speculative_config.kv_cache_dtype == "fp8"
    vllm_config.speculative_config.kv_cache_dtype = "oscar_int2"
    with pytest.raises(OscarUnsupportedError, match="draft layers keep the draft model's dtype"):
        plugin.keep_draft_dtype(vllm_config)


def test_no_speculation_nothing_to_keep():
    plugin.keep_draft_dtype(SimpleNamespace(speculative_config=None))


def test_an_artifact_for_another_model_is_refused(config, tmp_path):
    from transformers import AutoConfig

    from oscar_vllm.artifact import Artifact, hadamard_codecs, model_geometry

    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 4}))
    other = Artifact(
        layers={layer: hadamard_codecs(1, 4, 128)[0] for layer in range(2)},
        geometry=model_geometry(AutoConfig.from_pretrained(tmp_path)),
        model="another",
    )
    config.additional_config["oscar"] = {"artifact": str(other.save(tmp_path / "artifact"))}
    with pytest.raises(OscarArtifactError, match="fitted on another and does not fit this model"):
        plugin.validate_vllm_config(config)


def test_the_summary_names_the_artifact_and_takes_its_windows(config, tmp_path):
    from oscar_vllm.artifact import Artifact, hadamard_codecs, model_geometry

    artifact = Artifact(
        layers={layer: hadamard_codecs(1, 2, 128)[0] for layer in range(2)},
        geometry=model_geometry(config.model_config.hf_config),
        model="this one",
        sink=32,
        recent=512,
    )
    config.additional_config["oscar"] = {"artifact": str(artifact.save(tmp_path / "artifact"))}
    line = plugin.validate_vllm_config(config)
    assert f"artifact {artifact.artifact_id}, fitted on this one" in line
    assert "the first 32 and last 512 tokens" in line
    assert torch.bfloat16 == config.model_config.dtype
