# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the window cache: which blocks a request holds, shares and leaves behind.

A request's block table has one entry per 16 tokens. Real blocks stand at the sinks and at the recent tail; everything
between is the null block. During a prefill chunk the middle of the chunk is null from the start, because attention
inside a step uses the step's own keys and values.

    entry       0..3     4 ... 60    61 ... 76      (sink 64, recent 256, 1,216 tokens computed)
    block       sinks    null        recent tail

Prefix caching: every full block is hashed while it is held, so that a continuation of this sequence finds its recent
tokens. When a block leaves the recent tail of its last owner, its hash is dropped unless the block is a sink or lies in
the tail of a *boundary*, a position where later requests resume: the end of the prompt, the position of this request's
own prefix hit, the place where prompts that begin alike part, or its last page at the end. Blocks without a hash are
the first that the pool hands out again, so windows that have served never push INT2 pages out of the pool.

Where prompts part (a shared system prompt, say) nobody's tail lay, so the recent blocks there are null. The first
request that finds out computes that tail again, holds and hashes it (:func:`resume_with_own_tail`); later ones hit it.

A prefix that a connector loads from outside the pool has real blocks where the connector brings their content, which
it tells in advance (:meth:`SinkWindowManager.expect_load`), and null blocks elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from vllm.utils.math_utils import cdiv, round_down, round_up
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from oscar_vllm.cache_spec import SinkWindowSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager


class SinkWindowManager(SingleTypeKVCacheManager):
    """Allocates, shares and frees the blocks of one :class:`~oscar_vllm.cache_spec.SinkWindowSpec` group.

    Positions and lengths are in tokens, indices in blocks of the request's table.
    """

    supports_fine_grained_hash_lookup: ClassVar[bool] = False
    kv_cache_spec: SinkWindowSpec

    def __init__(self, kv_cache_spec: SinkWindowSpec, *args, **kwargs) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.max_admission_blocks_per_request = kv_cache_spec.max_blocks_per_request
        # Per request: first index that may still hold a recent block, and the boundaries whose tails stay hashed.
        self._scan_from: dict[str, int] = {}
        self._boundaries: dict[str, set[int]] = {}
        self._junctions: dict[str, int] = {}
        self._expected_loads: dict[str, frozenset[int]] = {}
        self.has_store = False  # whether a connector looks elsewhere for what follows a hit

    # ---- which blocks are held -------------------------------------------------------------------------------------

    def _held(self, start: int, end: int, position: int) -> Iterator[int]:
        """The indices from ``start`` to ``end`` that are held while the next query stands at ``position`` or later.

        Not one call per index: a table has thousands of entries, and all but some twenty are null.
        """
        sinks = self.kv_cache_spec.sink_blocks
        yield from range(start, min(end, sinks))
        yield from range(max(start, sinks, self.kv_cache_spec.first_held_block(position)), end)

    def expect_junction(self, request_id: str, position: int) -> None:
        """Say where a waiting request's prompt parts from what others have cached; 0: nowhere.

        When the request gets slots across that position, the recent tail there is held until it has been processed.
        """
        self._junctions.pop(request_id, None)
        if position:
            self._junctions[request_id] = round_down(position, self.cache_hit_alignment_tokens)

    def _held_at_junction(self, request_id: str, start: int, end: int, position: int) -> range:
        """The indices from ``start`` to ``end`` that `_held` leaves out and the junction's tail needs."""
        spec, junction = self.kv_cache_spec, self._junctions.get(request_id, 0)
        first = max(start, spec.sink_blocks, spec.first_recent_block(junction))
        return range(first, max(first, min(end, spec.first_held_block(position), junction // self.block_size)))

    def _next_position(self, num_tokens_main_model: int) -> int:
        """Lowest position at which the next query can stand once this step has computed so many tokens."""
        return max(0, num_tokens_main_model - self.kv_cache_spec.rollback_tokens)

    def _retained_hits(self, blocks: Sequence[KVCacheBlock], total_computed_tokens: int) -> list[KVCacheBlock]:
        """The blocks of a prefix hit that the request holds; a hit's other entries are null."""
        held = self._held(0, len(blocks), total_computed_tokens)
        return [blocks[index] for index in held if not blocks[index].is_null]

    def holds_tail(self, blocks: Sequence[KVCacheBlock], length: int) -> bool:
        """Whether a hit of ``length`` tokens has the recent blocks of its end, but for up to a page of the oldest ones.

        Those are missing where the hit is the last page of a longer request that held its own recent tokens only.
        """
        farthest = length + self.cache_hit_alignment_tokens - 1
        first = max(self.kv_cache_spec.sink_blocks, self.kv_cache_spec.first_recent_block(farthest))
        return not any(block.is_null for block in blocks[first : length // self.block_size])

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that leave the pool when the request gets slots for ``num_tokens`` tokens.

        With ``apply_admission_cap`` the question is whether the whole sequence will fit, over all its chunks.
        """
        start, num_loaded = len(self.req_to_blocks.get(request_id, ())), 0
        if start == 0:
            start = len(new_computed_blocks)
            if total_computed_tokens > num_local_computed_tokens:
                loaded = self._loads(request_id, start, total_computed_tokens)
                start, num_loaded = cdiv(total_computed_tokens, self.block_size), len(loaded)
        end = cdiv(num_tokens, self.block_size)
        retained = self._retained_hits(new_computed_blocks, total_computed_tokens)
        if apply_admission_cap:
            num_new = max(0, end - start) + num_loaded
            num_new = min(num_new, max(0, self.max_admission_blocks_per_request - len(retained)))
        else:
            position = self._next_position(num_tokens_main_model)
            num_new = num_loaded + sum(1 for _ in self._held(start, end, position))
            tail = len(self._held_at_junction(request_id, start, end, position))
            # A tail that only later requests need is not worth waiting for. ``end`` is more than all groups ask for.
            if tail and num_new + tail + end > self.block_pool.get_num_free_blocks():
                del self._junctions[request_id]
                tail = 0
            num_new += tail
        return num_new + self._get_num_evictable_blocks(retained)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Extend the table to ``num_tokens`` tokens; returns the new entries, null blocks included."""
        blocks = self.req_to_blocks[request_id]
        position = self._next_position(num_tokens_main_model)
        end = cdiv(num_tokens, self.block_size)
        held = [
            *self._held(len(blocks), end, position),
            *self._held_at_junction(request_id, len(blocks), end, position),
        ]
        return self._extend(blocks, end, held, record_for_zeroing=True)

    def _extend(
        self, blocks: list[KVCacheBlock], end: int, held: list[int], record_for_zeroing: bool
    ) -> list[KVCacheBlock]:
        """Append null blocks up to index ``end``, new blocks at the indices ``held``; returns the new entries."""
        taken, first = self.block_pool.get_new_blocks(len(held)), len(blocks)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in taken)
        blocks.extend([self._null_block] * (end - first))
        for index, block in zip(held, taken, strict=True):
            blocks[index] = block
        return blocks[first:]

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the table of a request with its prefix hit and hold the hit's sinks and recent tail."""
        blocks = self.req_to_blocks[request_id]
        assert not blocks, "a prefix hit is only added to a request without blocks"
        position = num_local_computed_tokens + num_external_computed_tokens
        self.block_pool.touch(self._retained_hits(new_computed_blocks, position))
        blocks.extend([self._null_block] * len(new_computed_blocks))
        for index in self._held(0, len(blocks), position):
            blocks[index] = new_computed_blocks[index]
        self.num_cached_block[request_id] = len(blocks)
        if blocks:
            self._boundaries.setdefault(request_id, set()).add(num_local_computed_tokens)

    def expect_load(self, request_id: str, indices: Iterable[int]) -> None:
        """Say which blocks a connector will bring if the request is admitted with the hit just found for it.

        Replaces what was said of an earlier hit of the request; no indices: nothing will be brought.

        Args:
            request_id: a waiting request.
            indices: of the blocks in the request's table.

        """
        self._expected_loads[request_id] = frozenset(indices)

    def _loads(self, request_id: str, start: int, total_computed_tokens: int) -> list[int]:
        """The blocks from ``start`` to the end of an external hit that will be loaded and are held."""
        expected = self._expected_loads.get(request_id, frozenset())
        held = self._held(start, cdiv(total_computed_tokens, self.block_size), total_computed_tokens)
        return [index for index in held if index in expected]

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Continue the table with blocks that a connector fills; entries of what it does not bring are null."""
        blocks = self.req_to_blocks[request_id]
        total = num_local_computed_tokens + num_external_computed_tokens
        loads = self._loads(request_id, len(blocks), total)
        self._extend(blocks, max(len(blocks), cdiv(total, self.block_size)), loads, record_for_zeroing)
        self._expected_loads.pop(request_id, None)
        self._boundaries.setdefault(request_id, set()).add(total)

    # ---- which blocks are given back -------------------------------------------------------------------------------

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Always 0: what is skipped lies between the sinks and the tail, never at the start."""
        return 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no query from ``processed_computed_tokens`` on can read."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        first = self._scan_from.get(request_id, self.kv_cache_spec.sink_blocks)
        last = min(self.kv_cache_spec.first_held_block(processed_computed_tokens), len(blocks))
        if last <= first:
            return
        freed = []
        for index in range(last - 1, first - 1, -1):  # Newest first: the pool evicts in the order of this list.
            if not blocks[index].is_null:
                freed.append((index, blocks[index]))
                blocks[index] = self._null_block
        self._scan_from[request_id] = last
        self._drop_useless_hashes(freed, self._boundaries.get(request_id, set()))
        self.block_pool.free_blocks([block for _, block in freed])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request and return its blocks, oldest first; hashes stay where a later request can resume."""
        boundaries = self._boundaries.pop(request_id, set())
        self._scan_from.pop(request_id, None)
        self._junctions.pop(request_id, None)
        self._expected_loads.pop(request_id, None)
        alignment = self.cache_hit_alignment_tokens
        last_page = round_down(self.num_cached_block.get(request_id, 0) * self.block_size, alignment)
        boundaries |= {last_page, max(0, last_page - alignment)} if self.use_eagle else {last_page}
        held = [
            (index, block) for index, block in enumerate(self.req_to_blocks.get(request_id, ())) if not block.is_null
        ]
        self._drop_useless_hashes(held, boundaries)
        super().pop_blocks_for_free(request_id)
        return [block for _, block in held]

    def _drop_useless_hashes(self, freed: Sequence[tuple[int, KVCacheBlock]], boundaries: set[int]) -> None:
        """Take the hash of blocks that only this request holds, unless they are sinks or in a boundary's tail."""
        if not self.enable_caching:
            return
        useless = {
            block.block_id
            for index, block in freed
            if block.ref_cnt == 1 and block.block_hash is not None and not self._in_a_tail(index, boundaries)
        }
        self.block_pool.evict_blocks(useless)

    def _in_a_tail(self, index: int, boundaries: set[int]) -> bool:
        return index < self.kv_cache_spec.sink_blocks or any(
            self.kv_cache_spec.first_recent_block(boundary) <= index < boundary // self.block_size
            for boundary in boundaries
        )

    # ---- prefix caching --------------------------------------------------------------------------------------------

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Hash the blocks that ``num_tokens`` computed tokens have filled and that are still held."""
        request_id = request.request_id
        num_hashed_tokens = len(request.block_hashes) * self.block_pool.hash_block_size
        num_full = min(num_tokens, num_hashed_tokens) // self.block_size
        num_cached = self.num_cached_block.get(request_id, 0)
        if num_cached >= num_full:
            return
        resume_at = [*replay_boundaries]
        if not self.use_eagle:
            resume_at.append(request.num_prompt_tokens)  # A longer prompt resumes at its end if that ends a page.
        if request.shared_prefix_boundary:
            resume_at.append(request.shared_prefix_boundary)
        self._boundaries.setdefault(request_id, set()).update(
            round_down(position, self.cache_hit_alignment_tokens) for position in resume_at
        )
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request_id],
            num_cached_blocks=num_cached,
            num_full_blocks=num_full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request_id] = num_full

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The hit at ``max_length`` if its sinks are cached, with those recent blocks that are cached too.

        Recent tokens that are missing are read from their pages, so they shorten a hit only if the spec requires
        them: then the hit is the longest whose whole recent tail is cached. Without the sinks there is no hit.
        """
        assert isinstance(kv_cache_spec, SinkWindowSpec)
        assert dcp_world_size == pcp_world_size == 1, "context parallelism is refused at start-up"
        spec, block_size = kv_cache_spec, kv_cache_spec.block_size
        if drop_eagle_block:  # The caller asked for one block more than the hit, to be dropped.
            max_length = max(0, max_length - block_size)
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)

        def cached(index: int) -> list[KVCacheBlock] | None:
            return block_pool.get_cached_block(hashes[index], kv_cache_group_ids)

        def blocks_at(length: int) -> dict[int, list[KVCacheBlock]] | None:
            """Cached blocks of a hit of ``length`` tokens by index; None if one is missing that it requires."""
            end = length // block_size
            sinks = range(min(spec.sink_blocks, end))
            recents = range(max(spec.first_recent_block(length), len(sinks)), end)
            found = {}
            for index in chain(sinks, reversed(recents)):
                if (blocks := cached(index)) is not None:
                    found[index] = blocks
                elif index in sinks or spec.require_recent:
                    return None
            return found

        length = round_down(min(max_length, len(hashes) * block_size), alignment_tokens)
        found = blocks_at(length)
        while found is None and spec.require_recent:
            length -= alignment_tokens
            found = blocks_at(length)
        if found is None:
            return tuple([] for _ in kv_cache_group_ids), 0
        hits = tuple([block_pool.null_block] * (length // block_size) for _ in kv_cache_group_ids)
        for index, blocks in found.items():
            for hit, block in zip(hits, blocks, strict=True):
                hit[index] = block
        return hits, length


def resume_with_own_tail(
    cache: "KVCacheManager", request: Request, hit: "tuple[KVCacheBlocks, int, int]"
) -> "tuple[KVCacheBlocks, int, int]":
    """A hit whose recent tail is not cached, shortened by that tail: it is computed again, and held for later requests.

    Otherwise its tokens would be read from pages for as long as they are recent, by every request that resumes there.
    The hit stays as it is where the shortened one is not to be had (a recurrent state is missing there), and with a
    connector's store, which may hold what follows the hit but not what the pool has before its end.

    Args:
        cache: the scheduler's.
        request: a waiting request.
        hit: what ``KVCacheManager.get_computed_blocks`` found for it: blocks by group, their tokens, and where the
            prompt parts from what other groups have cached, 0 for nowhere.

    """
    blocks, length, junction = hit
    windows = [m for m in cache.coordinator.single_type_managers if isinstance(m, SinkWindowManager)]
    if not windows:
        return hit
    whole = all(m.has_store or m.holds_tail(blocks.blocks[m.kv_cache_group_id], length) for m in windows)
    if length and not junction and not whole:
        alignment = windows[0].cache_hit_alignment_tokens
        shorter = max(0, length - round_up(windows[0].kv_cache_spec.recent - 1, alignment))
        found, found_length, _ = cache.coordinator.find_longest_cache_hit(request.block_hashes, shorter)
        if found_length > shorter - 2 * alignment:  # an EAGLE-like drafter gives up a page
            blocks, length, junction = cache.create_kv_cache_blocks(found), found_length, length
    for manager in windows:
        manager.expect_junction(request.request_id, junction)
    return blocks, length, junction
