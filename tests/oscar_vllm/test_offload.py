# SPDX-License-Identifier: Apache-2.0
"""What the connector adds to vLLM's: sinks of a hit in the store, and what the window manager is told to expect."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

import oscar_vllm
from oscar_vllm.offload import OscarOffloadConnector, _without_sinks
from tests.oscar_vllm.test_cache_manager import BLOCK, HISTORY, WINDOWS, Engine, prompt, window_spec


class Store:
    """The scheduler's side of vLLM's connector as far as ours reads it: the whole prompt is found, recents included."""

    def __init__(self, request, hit: int, computed: int) -> None:
        self.request, self.hit, self.computed = request, hit, computed
        self.cpu_block_pool = BlockPool(200, enable_caching=True, hash_block_size=BLOCK)
        self._pending_cpu_hits: dict = {}

    def keep(self, group: int, index: int):
        """Store the block that holds the tokens from ``index * BLOCK`` on."""
        (block,) = self.cpu_block_pool.get_new_blocks(1)
        key = make_block_hash_with_group_id(self.request.block_hashes[index], group)
        self.cpu_block_pool._insert_block_hash(key, block, num_tokens=None)
        self.cpu_block_pool.free_blocks([block])
        return block

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        windows = [self.cpu_block_pool.null_block] * (self.hit // BLOCK)
        for index in range(len(windows) - 2, len(windows)):
            windows[index] = self.keep(WINDOWS, num_computed_tokens // BLOCK + index)
        self.cpu_block_pool.touch(windows)
        self._pending_cpu_hits[request.request_id] = ((windows, []), self.hit, num_computed_tokens)
        return self.hit, True

    def _free_pending_cpu_hit(self, pending) -> None:
        self.cpu_block_pool.free_blocks(block for group in pending[0] for block in group)


@pytest.fixture
def engine() -> Engine:
    return Engine(window_spec())


def connector(engine: Engine, store: Store) -> OscarOffloadConnector:
    made = OscarOffloadConnector.__new__(OscarOffloadConnector)
    made.scheduler_manager = store
    made._windows = [engine.windows]
    return made


def expected(engine: Engine, request) -> list[int]:
    return sorted(engine.windows._expected_loads[request.request_id])


def test_a_hit_at_the_start_brings_its_sinks(engine):
    request = engine.request(prompt(700))
    store = Store(request, hit=640, computed=0)
    sinks = [store.keep(WINDOWS, index) for index in range(4)]
    assert connector(engine, store).get_num_new_matched_tokens(request, 0) == (640, True)
    assert expected(engine, request) == [0, 1, 2, 3, 38, 39]
    assert store._pending_cpu_hits[request.request_id][0][0][:4] == sinks
    assert [block.ref_cnt for block in sinks] == [1, 1, 1, 1], "pinned until they are copied"


@pytest.mark.parametrize("lost", range(4))
def test_without_a_sink_there_is_no_hit(engine, lost):
    request = engine.request(prompt(700))
    store = Store(request, hit=640, computed=0)
    for index in {0, 1, 2, 3} - {lost}:
        store.keep(WINDOWS, index)
    store.keep(HISTORY, lost)  # another group's block of the same tokens does not count
    engine.windows.expect_load(request.request_id, [0, 1])
    assert connector(engine, store).get_num_new_matched_tokens(request, 0) == (0, False)
    assert expected(engine, request) == []
    assert store._pending_cpu_hits == {}
    assert store.cpu_block_pool.get_num_free_blocks() == 199


def test_a_sink_that_is_recent_too_is_pinned_once(engine):
    request = engine.request(prompt(200))
    store = Store(request, hit=64, computed=0)
    for index in range(2):
        store.keep(WINDOWS, index)
    assert connector(engine, store).get_num_new_matched_tokens(request, 0) == (64, True)
    assert expected(engine, request) == [0, 1, 2, 3]
    assert [block.ref_cnt for block in store._pending_cpu_hits[request.request_id][0][0]] == [1, 1, 1, 1]


def test_behind_a_local_hit_no_sinks_are_asked_for(engine):
    request = engine.request(prompt(700))
    store = Store(request, hit=384, computed=256)
    assert connector(engine, store).get_num_new_matched_tokens(request, 256) == (384, True)
    assert expected(engine, request) == [38, 39]


def test_the_stores_own_windows_have_no_sinks():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    oscar_vllm.register()
    spec = window_spec()
    history = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=128, dtype=spec.dtype)
    groups = [KVCacheGroupSpec(["w"], spec), KVCacheGroupSpec(["h"], history)]
    config = KVCacheConfig(num_blocks=10, kv_cache_tensors=[SimpleNamespace(size=1)], kv_cache_groups=groups)
    changed = _without_sinks(config)
    assert [group.layer_names for group in changed.kv_cache_groups] == [["w"], ["h"]]
    assert changed.kv_cache_groups[0].kv_cache_spec.sink_blocks == 0
    assert changed.kv_cache_groups[1].kv_cache_spec == history
    assert config.kv_cache_groups[0].kv_cache_spec == spec, "the pool's own keeps them"
