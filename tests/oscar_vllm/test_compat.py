# SPDX-License-Identifier: Apache-2.0
"""The patches: each takes effect, none is applied twice, and an unsupported vLLM is named."""

import subprocess
import sys
import typing
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import oscar_vllm
from oscar_vllm import compat
from oscar_vllm.config import OscarConfig
from oscar_vllm.errors import OscarUnsupportedError


@pytest.fixture(autouse=True, scope="module")
def registered_with_vllm():
    oscar_vllm.register()


def patched() -> list:
    platform = type(current_platform)
    return [
        Attention.__init__,
        Attention.get_kv_cache_spec,
        EngineArgs.create_engine_config,
        platform.get_attn_backend_cls.__func__,
        platform.update_block_size_for_backend.__func__,
    ]


def test_registering_again_changes_nothing():
    before = patched()
    assert all(getattr(function, "__oscar_patch__", False) for function in before)
    oscar_vllm.register()
    assert patched() == before


@pytest.mark.parametrize("name", ["oscar_int2", "oscar"])
def test_dtype_names_are_valid_everywhere(name):
    from vllm.config import CacheConfig
    from vllm.config.cache import CacheDType

    assert name in typing.get_args(CacheDType)
    assert STR_DTYPE_TO_TORCH_DTYPE[name] is torch.uint8
    assert CacheConfig(cache_dtype=name).cache_dtype == name


def test_wrong_dtype_names_are_still_refused():
    from vllm.config import CacheConfig

    with pytest.raises(ValueError, match="cache_dtype"):
        CacheConfig(cache_dtype="oscar_int3")


def test_the_command_line_offers_the_dtype():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--kv-cache-dtype", "oscar_int2"]).kv_cache_dtype == "oscar_int2"


def test_backend_is_an_enum_member_with_our_path():
    assert AttentionBackendEnum["OSCAR_INT2"].get_path() == compat.BACKEND_PATH
    assert AttentionBackendEnum["OSCAR_INT2"].get_class().get_name() == "OSCAR_INT2"


def test_a_fresh_process_keeps_managers_for_vllms_own_specs():
    """Registering first used to leave vLLM's specs unregistered: its registry fills itself only while empty."""
    code = (
        "import oscar_vllm; oscar_vllm.register()\n"
        "import torch\n"
        "from vllm.v1.kv_cache_interface import FullAttentionSpec\n"
        "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry as registry\n"
        "spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)\n"
        "from oscar_vllm.cache_spec import SinkWindowSpec\n"
        "ours = SinkWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8, sink=0, recent=128)\n"
        "print(registry.get_manager_class(spec).__name__, registry.get_manager_class(ours).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["FullAttentionManager", "SinkWindowManager"]


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.4+cpu", True),
        ("0.33.1.dev3", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("dev", False),
    ],
)
def test_version_range(monkeypatch, version, supported):
    monkeypatch.setattr(vllm, "__version__", version)
    problem = compat.version_problem()
    assert (problem is None) == supported
    if problem:
        assert f"supports vLLM 0.32.x and 0.33.x, found {version}" in problem
        assert "\n" not in problem


@pytest.mark.parametrize("dtype", ["oscar_int2", "oscar", "auto"])
def test_an_unsupported_version_stops_only_engines_that_ask_for_our_dtype(monkeypatch, dtype):
    class Arguments:
        kv_cache_dtype = dtype

        def create_engine_config(self):
            return "config"

    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", Arguments)
    compat.refuse_in_other_versions("too new")
    if dtype == "auto":
        assert Arguments().create_engine_config() == "config"
    else:
        with pytest.raises(OscarUnsupportedError, match="too new"):
            Arguments().create_engine_config()


# ---- which backend a layer gets -------------------------------------------------------------------------------------


def select(**changes) -> str:
    config = AttentionSelectorConfig(
        **({"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "oscar_int2", "block_size": None} | changes)
    )
    return current_platform.get_attn_backend_cls(None, attn_selector_config=config)


def test_backend_follows_the_layers_dtype():
    assert select() == compat.BACKEND_PATH
    assert select(kv_cache_dtype="auto") != compat.BACKEND_PATH


@pytest.mark.parametrize("changes", [{"head_size": 80}, {"head_size": 192}, {"has_sink": True}], ids=str)
def test_padded_heads_and_learned_sinks_are_served(changes):
    assert select(**changes) == compat.BACKEND_PATH


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 320}, "head_size not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_dcp": True}, "DCP not supported"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_served_is_refused_with_the_reason(changes, reason):
    with pytest.raises(OscarUnsupportedError, match=reason) as caught:
        select(**changes)
    assert "\n" not in str(caught.value)
    assert "--kv-cache-dtype-skip-layers" in str(caught.value)


# ---- windows --------------------------------------------------------------------------------------------------------


def layer(name="model.layers.0.self_attn.attn", **changes):
    from oscar_vllm.backend import OscarBackend

    attached = []
    fields = {
        "layer_name": name,
        "kv_cache_dtype": "oscar_int2",
        "attn_backend": OscarBackend,
        "impl": SimpleNamespace(
            settings=SimpleNamespace(options=OscarConfig().resolved()), attach=attached.append, attached=attached
        ),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 128,
        "head_size_v": 128,
        "is_draft_layer": False,
        "kv_sharing_target_layer_name": None,
    }
    return SimpleNamespace(**(fields | changes))


def engine(*layers):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={item.layer_name: item for item in layers}),
        model_config=SimpleNamespace(dtype=torch.bfloat16, is_hybrid=False),
        cache_config=SimpleNamespace(
            cache_dtype="oscar_int2", block_size=16, kv_cache_dtype_skip_layers=[], skip_page_size_padded=None
        ),
    )


def test_the_window_stands_before_its_layer():
    ours = layer()
    config = engine(SimpleNamespace(layer_name="first"), ours)
    compat._attach_window_cache(ours, config)
    names = list(config.compilation_config.static_forward_context)
    assert names == ["first", "model.layers.0.self_attn.attn.oscar_window", "model.layers.0.self_attn.attn"]
    assert ours.impl.attached == ["model.layers.0.self_attn.attn"]


def test_a_draft_models_layers_stand_first_in_their_order():
    """The V1 runner gives a draft model the block table of group 0; windows there were overwritten by the drafter."""
    target, draft = layer(), [layer(f"draft_model.model.layers.{i}.self_attn.attn") for i in range(2)]
    config = engine(target)
    compat._attach_window_cache(target, config)
    for item in draft:
        config.compilation_config.static_forward_context[item.layer_name] = item
        compat._put_draft_model_first(config)
    names = list(config.compilation_config.static_forward_context)
    assert names == [*(item.layer_name for item in draft), target.layer_name + ".oscar_window", target.layer_name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_backend": SimpleNamespace(get_name=lambda: "LOCAL")}, r"brings its own attention \(LOCAL\)"),
        ({"head_size_v": 64}, "keys of 128 and values of 64 elements"),
        ({"kv_sharing_target_layer_name": "other"}, "reads the cache of other, which oscar_int2 does not"),
    ],
    ids=["own backend", "unequal sizes", "shared cache"],
)
def test_layers_without_a_possible_window_are_refused(changes, message):
    ours = layer(**changes)
    with pytest.raises(OscarUnsupportedError, match=message):
        compat._attach_window_cache(ours, engine(ours))


def test_the_block_size_is_one_page():
    ours = layer()
    config = engine(ours)
    compat._attach_window_cache(ours, config)
    current_platform.update_block_size_for_backend(config)
    assert (config.cache_config.block_size, config.cache_config.skip_page_size_padded) == (128, None)
    config.cache_config.kv_cache_dtype_skip_layers = ["sliding_window"]
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.skip_page_size_padded == 2 * 9216


# ---- hybrid models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "state_block"), [("none", 4096), ("align", 3 * 128)])
def test_a_block_of_a_hybrid_model_holds_a_state(monkeypatch, mode, state_block):
    ours = layer()
    config = engine(ours)
    compat._attach_window_cache(ours, config)
    config.model_config.is_hybrid = True
    vars(config.cache_config).update(mamba_cache_mode=mode, mamba_block_size=4096, mamba_page_size_padded=None)
    monkeypatch.setattr("oscar_vllm.cache_spec._state_bytes", lambda _: [5 * 9216])
    monkeypatch.setattr(compat, "state_block_alignment", lambda _: 1)
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == 3 * 128
    assert config.cache_config.mamba_page_size_padded == 3 * 2 * 9216
    assert config.cache_config.mamba_block_size == state_block


@pytest.mark.parametrize(("dtype", "expected"), [("oscar_int2", 384), ("auto", 48)])
def test_prefills_are_split_where_states_end(monkeypatch, dtype, expected):
    import vllm.v1.core.sched.scheduler as scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

    class Scheduler:
        need_mamba_block_aligned_split = True

        def __init__(self, cache_config, kv_cache_config):
            self.cache_config, self.kv_cache_config = cache_config, kv_cache_config

    monkeypatch.setattr(scheduler, "Scheduler", Scheduler)
    compat.split_prefills_at_state_blocks()
    specs = [
        FullAttentionSpec(block_size=48, num_kv_heads=1, head_size=8, dtype=torch.uint8),
        MambaSpec(block_size=384, shapes=((1,),), dtypes=(torch.float32,)),
    ]
    groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
    made = Scheduler(SimpleNamespace(cache_dtype=dtype, block_size=48), SimpleNamespace(kv_cache_groups=groups))
    assert made.cache_config.block_size == expected


@pytest.mark.parametrize("ours", [True, False])
def test_hits_end_with_blocks_where_there_are_windows(monkeypatch, ours):
    import vllm.v1.core.kv_cache_coordinator as coordinator

    from oscar_vllm.cache_spec import SinkWindowSpec

    class HybridKVCacheCoordinator:
        def __init__(self, kv_cache_config, allow_partial_hash_hits=True):
            self.allowed = allow_partial_hash_hits

    monkeypatch.setattr(coordinator, "HybridKVCacheCoordinator", HybridKVCacheCoordinator)
    compat.hit_whole_blocks()
    spec = SinkWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.uint8, sink=64, recent=256)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec if ours else object())])
    assert HybridKVCacheCoordinator(config).allowed is not ours


@pytest.mark.parametrize("mixed", [True, False])
def test_the_cpu_runner_zeroes_whole_blocks_of_other_layers(monkeypatch, mixed):
    """Blocks of two kernel blocks; without our layers the runner's own method is called."""
    import vllm.v1.worker.cpu_model_runner as runner
    from vllm.v1.kv_cache_interface import KVCacheConfig

    originally = []

    class CPUModelRunner:
        def __init__(self, config, layers):
            self.kv_cache_config = config
            self.compilation_config = SimpleNamespace(static_forward_context=layers)

        def _zero_block_ids(self, block_ids):
            originally.append(block_ids)

    monkeypatch.setattr(runner, "CPUModelRunner", CPUModelRunner)
    compat.zero_no_pages_on_cpu()
    dtypes = {"ours": "oscar_int2" if mixed else "fp8", "skipped": "auto", "sliding": "auto"}
    layers = {name: SimpleNamespace(kv_cache_dtype=x, kv_cache=torch.ones(8, 3)) for name, x in dtypes.items()}
    layers |= {
        "ours.oscar_window": SimpleNamespace(kv_cache=torch.ones(8, 3)),
        "state": SimpleNamespace(kv_cache_dtype="auto", kv_cache=(torch.ones(4, 3), torch.ones(4, 3))),
    }
    config = KVCacheConfig(4, [], [SimpleNamespace(layer_names=[name]) for name in layers])
    CPUModelRunner(config, layers)._zero_block_ids([0, 3])
    assert originally == ([] if mixed else [[0, 3]])
    for name, layer in layers.items():
        for cache in layer.kv_cache if isinstance(layer.kv_cache, tuple) else (layer.kv_cache,):
            zeroed = name in ("skipped", "sliding") and mixed
            assert cache[:, 0].tolist() == ([0, 0, 1, 1, 1, 1, 0, 0] if zeroed else [1] * len(cache))


# ---- configuration checks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "prepared"), [("oscar", True), ("oscar_int2", True), ("auto", False)])
def test_engine_configurations_of_our_dtype_are_prepared_and_the_alias_is_spelled_out(monkeypatch, given, prepared):
    class Arguments:
        kv_cache_dtype = given

        def create_engine_config(self):
            return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=self.kv_cache_dtype))

    seen = []
    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", Arguments)
    compat.check_engine_config(seen.append)
    config = Arguments().create_engine_config()
    assert seen == ([config] if prepared else [])
    assert config.cache_config.cache_dtype == ("oscar_int2" if prepared else "auto")
