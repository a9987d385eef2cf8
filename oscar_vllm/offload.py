# SPDX-License-Identifier: Apache-2.0
"""Offloading to CPU memory: vLLM's ``SimpleCPUOffloadConnector``, taught where windows lie.

That connector copies whole blocks of the pool, whatever they hold, and asks the managers of the cache groups for hits.
Two of its assumptions do not hold for windows, and :class:`OscarOffloadConnector` corrects them:

* It looks up what follows the local hit as if that were the start of the sequence. A window group must not look for
  sinks there: the store's group has none, and sinks are asked for here, by their own hashes.
* It copies to the blocks of the request's table. The window manager has real blocks there only for what it is told to
  expect, so that a block whose content is nowhere stored is null and its tokens are read from their pages.

    local hit        none                          L tokens (sinks included)
    pages            all from the store            up to L local, then from the store
    sinks            from the store, or no hit     local
    recent tail      what the store has            what both have
    not to be had    read from pages, as in any prefix hit; with ``prefill="invariant"`` the hit ends where all is there

Blocks are stored while the pool still has them but no request does (``lazy_offload``): by then the hash of every window
that no later request can use is gone. The other mode would store each window block as it fills, eight for every page.
In this mode a store that is smaller than the pool would be overwritten without end, so its size is checked.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from oscar_vllm.cache_manager import SinkWindowManager
from oscar_vllm.cache_spec import SinkWindowSpec
from oscar_vllm.errors import OscarConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class OscarOffloadConnector(SimpleCPUOffloadConnector):
    """Keeps blocks that leave the pool in CPU memory, and brings them back with the windows of their prefix.

    Takes what ``SimpleCPUOffloadConnector`` takes in ``kv_connector_extra_config``, but always offloads lazily.

    Raises:
        OscarConfigError: the store holds fewer blocks than the pool.

    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        assert vllm_config.kv_transfer_config is not None
        vllm_config.kv_transfer_config.kv_connector_extra_config["lazy_offload"] = True
        super().__init__(vllm_config, role, _without_sinks(kv_cache_config))
        self._windows: list[SinkWindowManager] = []
        if self.scheduler_manager is not None:
            _check_size(self.scheduler_manager.num_cpu_blocks, kv_cache_config, vllm_config.parallel_config.world_size)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        self._windows = [manager for manager in managers if isinstance(manager, SinkWindowManager)]
        for manager in self._windows:
            manager.has_store = True

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the store holds behind the local hit, and whether they are loaded asynchronously."""
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        store = self.scheduler_manager
        hit = store._pending_cpu_hits.get(request.request_id) if store is not None else None
        if store is not None and hit is not None and num_computed_tokens == 0 and not self._add_sinks(request, hit[0]):
            store._free_pending_cpu_hit(store._pending_cpu_hits.pop(request.request_id))
            found, hit = (0, False), None
        for manager in self._windows:
            first = num_computed_tokens // manager.block_size
            blocks = hit[0][manager.kv_cache_group_id] if hit is not None else []
            loads = (first + index for index, block in enumerate(blocks) if not block.is_null)
            manager.expect_load(request.request_id, loads)
        return found

    def _add_sinks(self, request: "Request", hit: "tuple[list[KVCacheBlock], ...]") -> bool:
        """Pin the sinks of a hit at the start of the sequence and enter them in it; False if one is not stored."""
        assert self.scheduler_manager is not None
        pool = self.scheduler_manager.cpu_block_pool
        sinks = []
        for manager in self._windows:
            hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, manager.block_size)
            group = manager.kv_cache_group_id
            for index in range(manager.kv_cache_spec.sink_blocks):
                stored = pool.get_cached_block(hashes[index], [group])
                if stored is None:
                    return False
                if hit[group][index].is_null:  # A short prefix may have it as a recent block.
                    sinks.append((group, index, stored[0]))
        pool.touch([block for _, _, block in sinks])
        for group, index, block in sinks:
            hit[group][index] = block
        return True


def _check_size(stored_blocks: int, kv_cache_config: "KVCacheConfig", ranks: int) -> None:
    """Refuse a store that holds fewer blocks than the pool of ``kv_cache_config``.

    Once every block that no request holds was copied and none of the copies was overwritten, nothing is left to do.
    """
    if stored_blocks < kv_cache_config.num_blocks:
        pool_bytes = kv_cache_config.kv_cache_tensors[0].size  # every tensor has the size of all
        needed = math.ceil(100 * ranks * pool_bytes / 2**30) / 100
        raise OscarConfigError(
            f"--kv-offloading-size holds {stored_blocks} blocks, fewer than the {kv_cache_config.num_blocks} of the "
            f"GPU's own cache, which would be copied over and over; set it to {needed} GiB (all ranks together) or "
            "more, or lower --kv-cache-memory-bytes"
        )


def _without_sinks(kv_cache_config: "KVCacheConfig") -> "KVCacheConfig":
    """The cache configuration whose window groups ask for recent tokens only."""
    groups = [
        replace(group, kv_cache_spec=replace(group.kv_cache_spec, sink=0))
        if isinstance(group.kv_cache_spec, SinkWindowSpec)
        else group
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups)
