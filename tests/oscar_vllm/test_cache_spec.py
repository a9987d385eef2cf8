# SPDX-License-Identifier: Apache-2.0
"""Block sizes, page bytes and block counts of the two caches of a layer."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import oscar_vllm
from oscar_vllm.cache_spec import (
    DTYPE,
    SinkWindowSpec,
    WindowCache,
    fit_to_shared_page,
    history_layout,
    pages_per_block,
    shared_page_bytes,
    window_block_size,
)
from oscar_vllm.config import OscarConfig
from oscar_vllm.errors import OscarUnsupportedError
from triton_ops.layout import PageLayout

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def registered_with_vllm():
    oscar_vllm.register()


def spec(**changes) -> SinkWindowSpec:
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.uint8, "sink": 64, "recent": 256}
    return SinkWindowSpec(**(fields | {"state_content_bytes": 512, "page_size_padded": 73728} | changes))


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_size", "dtype", "block"),
    [(64, BF16, 16), (128, BF16, 16), (256, BF16, 16), (64, torch.float32, 8), (128, torch.float32, 8)],
    ids=str,
)
def test_a_window_block_fits_in_a_page_and_twice_as_many_tokens_do_not(head_size, dtype, block):
    page = PageLayout(head_size).page_bytes
    assert window_block_size(head_size, dtype, page) == block
    token = 2 * head_size * dtype.itemsize
    assert block * token <= page
    assert block == 16 or 2 * block * token > page


def test_history_layout_follows_the_options():
    assert history_layout(OscarConfig().resolved(), 128, BF16).page_bytes == 9216
    assert history_layout(OscarConfig(zero="token").resolved(), 64, BF16).page_bytes == 5120
    assert history_layout(OscarConfig(payload="float").resolved(), 128, BF16).page_bytes == 128 * 2 * 128 * 2
    with pytest.raises(ValueError, match="head size 320"):
        history_layout(OscarConfig().resolved(), 320, BF16)


@pytest.mark.parametrize(("head_size", "page"), [(80, 9216), (96, 9216), (112, 9216), (192, 17664)])
def test_padded_heads_have_the_page_and_the_window_of_their_padded_size(head_size, page):
    assert history_layout(OscarConfig().resolved(), head_size, BF16).page_bytes == page
    config = model(Layer("0", DTYPE, heads=2, head_size=head_size))
    engine = {"speculative_config": None, "num_speculative_tokens": 0, "num_lookahead_tokens": 0}
    vars(config).update(engine | {"max_concurrent_batches": 1, "max_in_flight_tokens": 0})
    made = config.compilation_config.static_forward_context["0.oscar_window"].get_kv_cache_spec(config)
    padded = 128 if head_size < 128 else 256
    assert (made.head_size, made.block_size, made.state_content_bytes) == (padded, 16, 2 * padded * 2)
    assert made.page_size_bytes == 2 * page


# ---- the spec in vLLM's planning ------------------------------------------------------------------------------------


def vllm_config(max_model_len=32768):
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


def history(**changes) -> FullAttentionSpec:
    fields = {"block_size": 128, "num_kv_heads": 8, "head_size": 128, "dtype": torch.uint8, "state_content_bytes": 72}
    return FullAttentionSpec(**(fields | changes))


def tokens_that_fit(window: SinkWindowSpec, page_bytes: int, layers: int = 4, memory: int = 2**30) -> int:
    """What vLLM prints as "KV cache size" for a cache of ``memory`` bytes."""
    config = vllm_config()
    specs = {f"{i}.w": window for i in range(layers)} | {f"{i}": history() for i in range(layers)}
    groups = get_kv_cache_groups(config, specs)
    assert [type(group.kv_cache_spec).__name__ for group in groups] == ["SinkWindowSpec", "FullAttentionSpec"]
    blocks = memory // (layers * page_bytes)
    return get_kv_cache_capacity(config, KVCacheConfig(blocks, [], groups))[0]


@pytest.mark.parametrize("batches", [1, 2], ids=["one batch in flight", "async scheduling"])
def test_capacity_at_32k_is_at_least_5_8_times_that_of_bfloat16(batches):
    bf16 = 2**30 // (4 * 8 * 2 * 128 * 2)
    window = spec(concurrent_batches=batches, in_flight_tokens=8192 * batches)
    capacity = tokens_that_fit(window, 73728)
    print(f"{capacity:,} tokens, {capacity / bf16:.2f}x")
    assert capacity >= 5.8 * bf16


def test_specs_of_windows_and_pages_are_never_taken_for_uniform():
    window = spec()
    assert window.is_uniform_with_collection({"a": window, "b": replace(window)})
    assert not window.is_uniform_with_collection({"a": window, "b": history()})
    assert not window.is_uniform_with_collection({"a": window, "b": replace(window, recent=512)})


def test_a_spec_survives_the_way_to_another_process():
    assert pickle.loads(pickle.dumps(spec())) == spec()


# ---- block counts ---------------------------------------------------------------------------------------------------


@given(
    position=st.integers(0, 5000),
    recent=st.sampled_from([128, 256, 512]),
    block=st.sampled_from([8, 16]),
    replay=st.sampled_from([0, 128]),
)
def test_held_blocks_cover_the_recent_tokens_and_waste_less_than_a_block(position, recent, block, replay):
    window = spec(recent=recent, block_size=block, replay_tokens=replay)
    oldest = max(0, position - recent + 1)
    assert window.first_recent_block(position) == oldest // block
    assert window.first_held_block(position) == max(0, position - replay - recent + 1) // block
    assert (position - 1) // block - window.first_held_block(position) + 1 <= window.tail_blocks


@given(end=st.integers(1, 5000), drafts=st.integers(0, 8), lookahead=st.integers(0, 8), batches=st.integers(1, 3))
def test_tail_blocks_bound_the_tail_of_a_step(end, drafts, lookahead, batches):
    window = spec(speculative_tokens=drafts, lookahead_tokens=lookahead, concurrent_batches=batches)
    first = window.first_held_block(max(0, end - window.rollback_tokens))
    assert (end + lookahead - 1) // 16 - first + 1 <= window.tail_blocks


def test_short_steps_in_flight_are_bounded_by_their_tokens():
    window = spec(concurrent_batches=2, in_flight_tokens=64)
    assert window.max_blocks_per_request == 4 + (255 + 64 - 1 + 15) // 16 + 1
    assert spec(concurrent_batches=2).max_blocks_per_request == 4 + 3 * 17


def test_memory_is_never_more_than_the_longest_sequence():
    assert spec().max_memory_usage_bytes(vllm_config(max_model_len=160)) == 10 * 73728
    assert spec().max_memory_usage_bytes(vllm_config()) == (4 + 2 * 17) * 73728


# ---- layers of another dtype beside ours ----------------------------------------------------------------------------


class Layer:
    """The attributes of an attention layer that page sizes depend on."""

    attn_type = "decoder"
    kv_sharing_target_layer_name = None
    is_draft_layer = False
    impl = None

    def __init__(self, name, dtype_name="auto", heads=8, head_size=128, base=16):
        self.layer_name, self.kv_cache_dtype = name, dtype_name
        self.num_heads, self.num_kv_heads = 2 * heads, heads
        self.head_size = self.head_size_v = head_size
        self.kv_cache_torch_dtype = BF16
        self.attn_backend = SimpleNamespace(get_supported_kernel_block_sizes=lambda spec=None: [MultipleOf(base)])

    def get_attn_backend(self):
        return self.attn_backend


def model(*layers: Layer):
    context = {}
    for layer in layers:
        if layer.kv_cache_dtype == DTYPE:
            window = WindowCache(layer, OscarConfig().resolved(), BF16)
            context[window.layer_name] = window
        context[layer.layer_name] = layer
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def full(layer: Layer) -> FullAttentionSpec:
    dtype = torch.uint8 if layer.kv_cache_dtype == DTYPE else BF16
    return FullAttentionSpec(block_size=128, num_kv_heads=layer.num_kv_heads, head_size=layer.head_size, dtype=dtype)


def test_a_skip_layer_takes_blocks_that_fit_in_a_page():
    ours, skipped = Layer("0", DTYPE), Layer("1")
    config = model(ours, skipped)
    assert shared_page_bytes(config) == 73728
    fitted = fit_to_shared_page(skipped, full(skipped), config)
    assert (fitted.block_size, fitted.page_size_bytes) == (16, 73728)
    assert fit_to_shared_page(ours, full(ours), config) == full(ours)


def test_a_sliding_window_layer_with_fewer_heads_takes_larger_blocks_that_divide_128():
    ours, sliding = Layer("0", DTYPE), Layer("1", heads=2)
    fitted = fit_to_shared_page(
        sliding,
        SlidingWindowSpec(block_size=48, num_kv_heads=2, head_size=128, dtype=BF16, sliding_window=512),
        model(ours, sliding),
    )
    assert (fitted.block_size, fitted.page_size_bytes) == (64, 73728)


def test_the_page_grows_only_to_the_smallest_block_of_another_layer():
    ours, wide = Layer("0", DTYPE, heads=2), Layer("1", heads=8)
    config = model(ours, wide)
    assert shared_page_bytes(config) == 16 * 8 * 512
    assert fit_to_shared_page(ours, full(ours), config).page_size_padded == 65536
    assert fit_to_shared_page(wide, full(wide), config).block_size == 16


def test_layers_with_unequal_heads_share_the_largest_page():
    large, small = Layer("0", DTYPE, heads=8), Layer("1", DTYPE, heads=4)
    config = model(large, small)
    window = config.compilation_config.static_forward_context["1.oscar_window"]
    assert window.history_page_bytes == 36864
    assert fit_to_shared_page(small, full(small), config).page_size_padded == 73728


def test_layers_without_a_cache_of_their_own_do_not_count():
    ours, shared, encoder = Layer("0", DTYPE), Layer("1", heads=64), Layer("2", heads=64)
    shared.kv_sharing_target_layer_name, encoder.attn_type = "0", "encoder_only"
    assert shared_page_bytes(model(ours, shared, encoder)) == 73728


def test_models_without_our_layers_are_left_alone():
    layer = Layer("0")
    assert fit_to_shared_page(layer, full(layer), model(layer)) == full(layer)


# ---- recurrent states beside ours -----------------------------------------------------------------------------------


class States(MambaBase):
    """A layer with one recurrent state of so many bytes."""

    mamba_type = MambaAttentionBackendEnum.MAMBA2

    def __init__(self, name, state_bytes):
        self.layer_name, self.state_bytes = name, state_bytes

    def get_state_shape(self):
        return ((self.state_bytes // 4,),)

    def get_state_dtype(self):
        return (torch.float32,)


def hybrid(state_bytes, attention=1, states=3, mode="none", max_model_len=32768):
    """So many attention layers, and so many state layers for each; attention as in Qwen3-Next (d=256, 2 heads)."""
    config, engine = model(*[Layer(f"{i}", DTYPE, heads=2, head_size=256) for i in range(attention)]), vllm_config()
    context = config.compilation_config.static_forward_context
    context |= {f"s{i}": States(f"s{i}", state_bytes) for i in range(attention * states)}
    engine.compilation_config, engine.model_config.max_model_len = config.compilation_config, max_model_len
    vars(engine.cache_config).update(
        mamba_block_size=max_model_len, mamba_page_size_padded=None, mamba_cache_mode=mode, use_replayssm=False
    )
    lengths = {"num_speculative_tokens": 0, "num_lookahead_tokens": 0, "max_concurrent_batches": 1}
    vars(engine).update(lengths | {"max_in_flight_tokens": 8192})
    return engine


PAGE = 2 * 17664


@pytest.mark.parametrize(("state_bytes", "pages"), [(1000, 1), (PAGE, 1), (PAGE + 4, 2), (2146304, 61)])
def test_a_block_holds_as_many_pages_as_cover_a_state(state_bytes, pages):
    config = hybrid(state_bytes)
    assert pages_per_block(config) == pages
    assert shared_page_bytes(config) == pages * PAGE
    window = config.compilation_config.static_forward_context["0.oscar_window"].get_kv_cache_spec(config)
    assert (window.block_size, window.page_size_bytes) == (16 * pages, pages * PAGE)
    ours = Layer("0", DTYPE, heads=2, head_size=256)
    fitted = fit_to_shared_page(ours, full(ours), config)
    assert (fitted.block_size, fitted.page_size_padded) == (128 * pages, None)


def test_a_skip_layer_in_a_hybrid_model_takes_blocks_that_fill_the_shared_one():
    config, skipped = hybrid(2146304), Layer("1", heads=2, head_size=256)
    config.compilation_config.static_forward_context["1"] = skipped
    fitted = fit_to_shared_page(skipped, full(skipped), config)
    assert (fitted.block_size, fitted.page_size_bytes) == (1024, 61 * PAGE)


def test_pages_of_unequal_size_are_refused_where_a_block_holds_several():
    config, small = hybrid(2 * PAGE), Layer("1", DTYPE, heads=1, head_size=256)
    window = WindowCache(small, OscarConfig().resolved(), BF16)
    config.compilation_config.static_forward_context |= {window.layer_name: window, "1": small}
    with pytest.raises(OscarUnsupportedError, match="layer 1 has another page size"):
        fit_to_shared_page(small, full(small), config)


def test_the_capacity_of_a_hybrid_model_counts_states_and_windows():
    """Qwen3-Next: 12 attention layers, 36 states of 2.1 MB; a request of 32k holds 3 + 3 + 5 blocks per layer."""
    config = hybrid(2146304, attention=12)
    layers = config.compilation_config.static_forward_context
    config.cache_config.mamba_page_size_padded = shared_page_bytes(config)
    specs = {
        name: fit_to_shared_page(layer, replace(full(layer), state_content_bytes=138), config)
        if isinstance(layer, Layer)
        else layer.get_kv_cache_spec(config)
        for name, layer in layers.items()
    }
    groups = get_kv_cache_groups(config, specs)
    assert {(len(group.layer_names), group.kv_cache_spec.page_size_bytes) for group in groups} == {(12, 61 * PAGE)}
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    assert sorted(kinds) == ["FullAttentionSpec", "MambaSpec", "MambaSpec", "MambaSpec", "SinkWindowSpec"]
    window = next(group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, SinkWindowSpec))
    per_request = 3 + window.max_blocks_per_request + 5
    capacity = get_kv_cache_capacity(config, KVCacheConfig(1000 * per_request, [], groups))[0]
    assert capacity == 1000 * 32768


def test_the_window_takes_its_spec_from_the_engine_configuration():
    config = model(Layer("0", DTYPE))
    vars(config).update(
        speculative_config=None,
        num_speculative_tokens=3,
        num_lookahead_tokens=2,
        max_concurrent_batches=2,
        max_in_flight_tokens=4096,
    )
    window = config.compilation_config.static_forward_context["0.oscar_window"]
    made = window.get_kv_cache_spec(config)
    assert made == spec(
        speculative_tokens=3, lookahead_tokens=2, concurrent_batches=2, in_flight_tokens=4096, require_recent=False
    )
    window.options = OscarConfig(prefill="invariant").resolved()
    assert window.get_kv_cache_spec(config).replay_tokens == 128
    assert window.get_kv_cache_spec(config).require_recent
    config.speculative_config = SimpleNamespace(use_eagle=lambda: True)
    assert window.get_kv_cache_spec(config).replay_tokens == 256


def test_a_bound_window_is_viewed_in_the_models_dtype():
    window = WindowCache(Layer("0", DTYPE, heads=2), OscarConfig().resolved(), BF16)
    blocks = torch.zeros(3, 73728 // 4, dtype=torch.uint8)
    raw = blocks.as_strided((3, 2, 16, 512), (73728 // 4, 16 * 512, 512, 1))
    window.bind_kv_cache(raw)
    assert window.kv_cache.shape == (3, 2, 16, 256)
    window.kv_cache[2, 1, 15, 0] = 1.0
    assert raw[2, 1, 15, :2].view(BF16).item() == 1.0
