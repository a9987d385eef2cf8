# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused before serving, in one line that names the value and the way out."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from oscar_vllm.artifact import CONFIG_FILE, TENSOR_FILE, Artifact, hadamard_codecs, model_geometry
from tests.engine.conftest import OSCAR, Engines
from tests.engine.models import VOCABULARY, Geometry

QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)
ONE_KV_HEAD = Geometry("qwen3", head_size=64, kv_heads=1, query_heads_per_kv_head=4)
HADAMARD = {"rotation": "hadamard"}

DECODER = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
# Architectures by the reason for which they are refused; configurations only, no weights are read.
UNSUPPORTED_MODELS = {
    "latent-attention": (
        DECODER
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        "latent attention",
    ),
    "alibi": (
        {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "hidden_size": 256,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "seq_length": 4096,
            "torch_dtype": "bfloat16",
        },
        "ALiBi",
    ),
    "attention-free": (
        {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "state_size": 16,
            "vocab_size": VOCABULARY,
            "torch_dtype": "bfloat16",
        },
        "no attention layers",
    ),
    "encoder": (
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1024,
            "torch_dtype": "bfloat16",
        },
        "encoder or cross attention",
    ),
    "sliding-window-only": (
        DECODER
        | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512, "head_dim": 64},
        "sliding window",
    ),
    "head-size-320": (
        DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 320},
        "head size 320.*multiples of 8 up to 256",
    ),
}

ENGINE_OPTIONS = {
    "no-hybrid-manager": ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
    "kv-connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config",
    ),
    "kv-offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size|--kv-transfer-config"),
    "context-parallel": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "--decode-context-parallel-size",
    ),
    "block-size-16": ({"block_size": 16}, "--block-size 16.*128"),
    "block-size-256": ({"block_size": 256}, "--block-size 256.*128"),
}

OPTIONS = {
    "unknown-option": ({"rotations": "hadamard"}, "'rotations'.*did you mean 'rotation'"),
    "unknown-value": ({"rotation": "fourier"}, "rotation='fourier'.*'hadamard'"),
    "recent-too-small": ({"rotation": "hadamard", "recent": 64}, "recent=64.*128"),
    "sink-not-16": ({"rotation": "hadamard", "sink": 60}, "sink=60.*multiple of 16"),
    "two-sources": ({"rotation": "hadamard", "artifact": "somewhere"}, "exclude each other"),
    "no-artifact": ({}, "python -m calib --model"),
    "artifact-missing": ({"artifact": "./nowhere"}, "nowhere"),
}


def write_config(directory: Path, config: dict) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def refusals(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All cases in one process: none of them gets as far as an engine."""
    directory = tmp_path_factory.mktemp("refusals")
    model = engines.model(QWEN3)
    cases = []

    def add(name: str, engine: dict, oscar: dict = HADAMARD, model: str | Path = model) -> None:
        options = {"additional_config": {"oscar": oscar}} if oscar else {}
        cases.append({"name": name, "model": str(model), "engine": {"dtype": "auto", **OSCAR, **options, **engine}})

    for name, (engine, _) in ENGINE_OPTIONS.items():
        # vLLM itself allows context parallelism only where ranks outnumber KV heads.
        add(name, engine, model=engines.model(ONE_KV_HEAD) if name == "context-parallel" else model)
    for name, (options, _) in OPTIONS.items():
        add(name, {}, oscar=options)
    for name, (config, _) in UNSUPPORTED_MODELS.items():
        add(name, {"load_format": "dummy"}, model=write_config(directory / name, config))
    for name, (spoil, _) in BAD_ARTIFACTS.items():
        folder = directory / f"artifact-{name}"
        spoil(engines, folder)
        add(name, {}, oscar={"artifact": str(folder)})
    return engines.refusals(cases)


# ------------------------------------------------------------------------------------------ spoiled artifacts


def artifact(engines: Engines, geometry: Geometry = QWEN3) -> Artifact:
    """A valid artifact without calibration for the random model of ``geometry``."""
    config = AutoConfig.from_pretrained(engines.model(geometry))
    return Artifact(
        layers={
            layer: hadamard_codecs(1, geometry.kv_heads, geometry.head_size)[0] for layer in range(geometry.layers)
        },
        geometry=model_geometry(config),
        model=geometry.name,
    )


def saved(engines: Engines, folder: Path) -> Path:
    return artifact(engines).save(folder)


def truncated(engines: Engines, folder: Path) -> None:
    tensors = saved(engines, folder) / TENSOR_FILE
    tensors.write_bytes(tensors.read_bytes()[:-1000])


def changed_byte(engines: Engines, folder: Path) -> None:
    tensors = saved(engines, folder) / TENSOR_FILE
    content = bytearray(tensors.read_bytes())
    content[-100] ^= 1
    tensors.write_bytes(content)


def wrong_schema(engines: Engines, folder: Path) -> None:
    path = saved(engines, folder) / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 999}))


def not_json(engines: Engines, folder: Path) -> None:
    path = saved(engines, folder) / CONFIG_FILE
    path.write_text(path.read_text()[:-50])


def wrong_model(engines: Engines, folder: Path) -> None:
    artifact(engines, replace(QWEN3, kv_heads=1, query_heads_per_kv_head=8)).save(folder)


def saved_with(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Callable[[Engines, Path], None]:
    """A spoiler that changes tensor ``name`` of layer 1 and saves without the validation that would stop it."""

    def spoil(engines: Engines, folder: Path) -> None:
        good = artifact(engines)
        codec = good.layers[1]
        layers = {**good.layers, 1: replace(codec, **{name: change(getattr(codec, name).clone())})}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Artifact, "validate", lambda self: None)
            replace(good, layers=layers).save(folder)

    return spoil


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = torch.nan
    return tensor


BAD_ARTIFACTS = {
    "artifact-truncated": (truncated, "damaged"),
    "artifact-changed": (changed_byte, "changed or damaged"),
    "artifact-wrong-schema": (wrong_schema, "schema version 999"),
    "artifact-not-json": (not_json, "damaged"),
    "artifact-wrong-model": (wrong_model, "does not fit this model.*num_key_value_heads"),
    "artifact-not-orthogonal": (saved_with(lambda tensor: 1.01 * tensor, "value_rotation"), "layer 1.*not orthogonal"),
    "artifact-not-inverse": (saved_with(lambda tensor: 1.01 * tensor, "key_query"), "layer 1.*not inverse"),
    "artifact-nan": (saved_with(with_nan, "value_mean"), "layer 1: value_mean holds non-finite"),
}

EXPECTED = {
    **{name: ("OscarUnsupportedError", pattern) for name, (_, pattern) in ENGINE_OPTIONS.items()},
    "block-size-16": ("OscarConfigError", ENGINE_OPTIONS["block-size-16"][1]),
    "block-size-256": ("OscarConfigError", ENGINE_OPTIONS["block-size-256"][1]),
    **{name: ("OscarConfigError", pattern) for name, (_, pattern) in OPTIONS.items()},
    "no-artifact": ("OscarArtifactError", OPTIONS["no-artifact"][1]),
    "artifact-missing": ("OscarArtifactError", OPTIONS["artifact-missing"][1]),
    **{name: ("OscarUnsupportedError", pattern) for name, (_, pattern) in UNSUPPORTED_MODELS.items()},
    **{name: ("OscarArtifactError", pattern) for name, (_, pattern) in BAD_ARTIFACTS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPECTED)
def test_refused_in_one_line(refusals: dict, case: str) -> None:
    error, (expected, pattern) = refusals[case], EXPECTED[case]
    assert error["types"], error["message"]
    assert error["types"][0] == expected, error
    assert "\n" not in error["message"].strip()
    assert re.search(pattern, error["message"]), error["message"]
