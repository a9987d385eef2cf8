# SPDX-License-Identifier: Apache-2.0
"""Which program of the decode kernels reads which part of which request, decided on the device once per step.

The work of a request and KV head is a list of *units* of nearly equal bytes: first its window tiles (16 BF16
tokens), then its history pages. A list is cut into equal *splits*, one per program. All requests share one unit
count per split, the smallest with which the splits of the whole batch fit the grid, so a skewed batch is as
balanced as an even one::

    units      w w w w w w | p p p p p p p p p p p p        w = window tile, p = page
    splits     0 0 0 0 1 1   1 1 2 2 2 2 3 3 3 3 4 ...

The grid (`decode_grid`) depends only on what a CUDA graph fixes: number of requests, query length and model shape. It
is one wave of one-warp programs when the batch is small enough: 9 % more than a wave costs 25 % of time.

A split that holds windows and pages writes two partial results, because windows are plain and pages rotated: partial
``window_slot`` and partial ``history_slot``. A request's partials are consecutive: ``windows`` of them, then history's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops.layout import PAGE_TOKENS

WINDOW_TILE = 16
"""Tokens of a window work unit; a multiple of it is the window block size."""
MAX_QUERY_LEN = 16
"""Longest query, in tokens, the decode kernels take (speculative verification)."""

ENTRY_FIELDS = 16
"""int32 fields of a schedule entry, one entry per split: request (-1 = unused), first query token, query tokens,
position of the first query token, first unit, end unit, window slot, history slot, sink tiles, first recent tile,
window tiles, first history page, end of the pages that every query of the request reads whole; three unused."""
REQUEST_FIELDS = 4
"""int32 fields of a request: first partial, window partials, partials in all; one unused."""

_ENTRIES_PER_PROGRAM = 32

# Registers a thread of the attend kernel may use, by (query rows of a program, head size): attend_decode compiles with
# these limits, where next to nothing spills (tests/triton_ops/test_compile_decode.py).
_REGISTERS = {
    (4, 64): 128,
    (4, 128): 128,
    (4, 256): 168,
    (8, 64): 128,
    (8, 128): 168,
    (8, 256): 255,
    (16, 64): 255,
    (16, 128): 255,
}
# Resident blocks and KiB of shared memory of one multiprocessor, by compute capability. All have 64 Ki registers.
_MULTIPROCESSOR = {
    (8, 0): (32, 164),
    (8, 6): (16, 100),
    (8, 9): (24, 100),
    (9, 0): (32, 228),
    (10, 0): (32, 228),
    (12, 0): (24, 100),
}


def register_limit(rows: int, head_size: int) -> int:
    """Registers per thread the attend kernel is compiled for."""
    return _REGISTERS[rows, head_size]


def shared_bytes(*, rows: int, head_size: int) -> int:
    """Upper bound of the attend kernel's shared memory (a page in flight, the query, weights) and 1 KiB of CUDA's."""
    return 64 * head_size + (2 * head_size + 256) * rows + 1284 + 1024


def resident_programs(*, rows: int, head_size: int, capability: tuple[int, int]) -> int:
    """One-warp programs of the attend kernel that fit one multiprocessor at a time.

    Registers are handed out per scheduler: four of them, 16 Ki registers each. Unknown capabilities take the values of
    the closest older one.
    """
    known = max((c for c in _MULTIPROCESSOR if c <= capability), default=(8, 0))
    blocks, shared_kib = _MULTIPROCESSOR[known]
    by_registers = 4 * (16384 // (32 * register_limit(rows, head_size)))
    by_shared = shared_kib * 1024 // shared_bytes(rows=rows, head_size=head_size)
    return min(blocks, by_registers, by_shared)


@dataclass(frozen=True)
class DecodeGrid:
    """Sizes of the decode launches; all that a CUDA graph fixes.

    Attributes:
        requests: requests of the batch, padding included.
        rows: query rows (a query head of a query token) one program works on: 4, 8 or 16.
        row_blocks: programs it takes for the rows of one request and KV head.
        entries: splits there is room for, at least one per request.

    """

    requests: int
    rows: int
    row_blocks: int
    entries: int


def decode_grid(
    *,
    num_requests: int,
    max_query_len: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    multiprocessors: int,
    capability: tuple[int, int],
) -> DecodeGrid:
    """Choose the grid.

    Args:
        num_requests: requests of the batch, padding included.
        max_query_len: longest query of the batch, 1..`MAX_QUERY_LEN`.
        num_query_heads: query heads, a multiple of ``num_kv_heads``, at most 16 times as many.
        num_kv_heads: KV heads.
        head_size: 64, 128 or 256.
        multiprocessors: multiprocessors of the GPU.
        capability: compute capability, such as (9, 0).

    Raises:
        ValueError: a query is longer than the kernels take, or the head counts do not fit.

    """
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ValueError(f"decode takes queries of 1..{MAX_QUERY_LEN} tokens, not {max_query_len}; use attend_prefill")
    group, rest = divmod(num_query_heads, num_kv_heads)
    if rest or not 1 <= group <= 16:
        raise ValueError(f"{num_query_heads} query heads over {num_kv_heads} KV heads: need a whole ratio of 1..16")
    needed = max_query_len * group
    rows = 4 if needed <= 4 else 8 if needed <= 8 or head_size == 256 else 16
    row_blocks = -(-needed // rows)
    programs = multiprocessors * resident_programs(rows=rows, head_size=head_size, capability=capability)
    entries = max(1, programs // (num_kv_heads * row_blocks))
    if num_requests > entries:
        entries = 4 * num_requests  # several waves: splits fine enough that the last one is short
    return DecodeGrid(num_requests, rows, row_blocks, entries)


@triton.jit
def _request_work(
    request,
    active,
    query_start_ptr,
    seq_lens_ptr,
    window_table_ptr,
    window_table_stride,
    sink,
    recent,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Work of requests [N]: (first token, queries, step, sink tiles, recent tile, window tiles, page, end of whole
    pages, pages)."""
    first = tl.load(query_start_ptr + request, mask=active, other=0)
    queries = tl.load(query_start_ptr + request + 1, mask=active, other=0) - first
    seq_len = tl.load(seq_lens_ptr + request, mask=active, other=0)
    queries = tl.minimum(queries, seq_len)
    step = seq_len - queries

    # Window blocks of the recent tokens: a leading run of null blocks is not worth a tile, and every token of a null
    # block is read from its page.
    oldest = tl.maximum(step - recent + 1, sink)
    block = (oldest // BLOCK)[:, None] + tl.arange(0, SPAN)[None, :]
    start = block * BLOCK
    inside = active[:, None] & (start < step[:, None])
    pointer = window_table_ptr + request.to(tl.int64)[:, None] * window_table_stride + block
    present = tl.load(pointer, mask=inside, other=0) != 0
    first_present = tl.min(tl.where(inside & present, start, step[:, None]), 1)
    null_end = tl.max(tl.where(inside & (present == 0), tl.minimum(start + BLOCK, step[:, None]), 0), 1)

    sink_tiles = tl.cdiv(tl.minimum(sink, seq_len), TILE)
    recent_tile = tl.maximum(tl.maximum(first_present, tl.maximum(oldest, 0)) // TILE, sink_tiles)
    recent_tile = tl.minimum(recent_tile, tl.maximum(step // TILE, sink_tiles))
    window_tiles = sink_tiles + tl.maximum(tl.cdiv(seq_len, TILE) - recent_tile, 0)
    page = sink // PAGE
    history_end = tl.maximum(seq_len - recent, null_end)
    page_end = tl.minimum(tl.cdiv(tl.maximum(history_end, 0), PAGE), seq_len // PAGE)
    whole_end = tl.maximum(step - recent + 1, 0) // PAGE
    working = active & (queries > 0)
    window_tiles = tl.where(working, window_tiles, 0)
    pages = tl.where(working, tl.maximum(page_end - page, 0), 0)
    return first, queries, step, sink_tiles, recent_tile, window_tiles, page, whole_end, pages


@triton.jit
def _units_per_split(units, num_entries, num_requests):
    """Smallest number of units per split with which the splits of all requests, ``units`` [N], fit the grid."""
    total = tl.sum(units, 0)
    low = tl.maximum(tl.cdiv(total, num_entries), 1)
    # Rounding up adds less than a split per request.
    high = tl.where(num_entries > num_requests, tl.cdiv(total, tl.maximum(num_entries - num_requests, 1)), total)
    high = tl.maximum(high, low)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(units, middle), 0) <= num_entries
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit(
    do_not_specialize=[
        "query_start_ptr",
        "seq_lens_ptr",
        "window_table_ptr",
        "window_table_stride",
        "num_requests",
        "num_entries",
    ]
)
def _schedule_kernel(
    query_start_ptr,
    seq_lens_ptr,
    window_table_ptr,
    entries_ptr,
    requests_ptr,
    window_table_stride,
    num_requests,
    num_entries,
    sink,
    recent,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    REQUESTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    REQUEST_FIELDS: tl.constexpr,
):
    request = tl.arange(0, REQUESTS)
    active = request < num_requests
    _, _, _, _, _, window_tiles, _, _, pages = _request_work(
        request, active, query_start_ptr, seq_lens_ptr, window_table_ptr, window_table_stride, sink, recent,
        TILE, PAGE, BLOCK, SPAN,
    )  # fmt: skip
    units = window_tiles + pages
    unit = _units_per_split(units, num_entries, num_requests)
    splits = tl.cdiv(units, unit)
    split_end = tl.cumsum(splits, 0)
    if tl.program_id(0) == 0:
        window_splits = tl.cdiv(window_tiles * splits, tl.maximum(units, 1))
        window_splits = tl.where(splits > 0, window_splits, 0)
        mixed = window_splits * units // tl.maximum(splits, 1) > window_tiles
        record = requests_ptr + request * REQUEST_FIELDS
        tl.store(record, split_end - splits + request, mask=active)
        tl.store(record + 1, window_splits, mask=active)
        tl.store(record + 2, splits + tl.where(mixed & (splits > 0), 1, 0), mask=active)

    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    before = split_end[None, :] <= entry[:, None]
    owner = tl.sum(tl.where(before & active[None, :], 1, 0), 1)
    start = tl.sum(tl.where(before & active[None, :], splits[None, :], 0), 1)
    used = owner < num_requests
    first, queries, step, sink_tiles, recent_tile, window_tiles, page, whole_end, pages = _request_work(
        owner, used, query_start_ptr, seq_lens_ptr, window_table_ptr, window_table_stride, sink, recent,
        TILE, PAGE, BLOCK, SPAN,
    )  # fmt: skip
    units = window_tiles + pages
    splits = tl.maximum(tl.cdiv(units, unit), 1)
    split = entry - start
    window_splits = tl.cdiv(window_tiles * splits, tl.maximum(units, 1))
    mixed = window_splits * units // splits > window_tiles
    slot = start + owner + split
    record = entries_ptr + entry * ENTRY_FIELDS
    stored = entry < num_entries
    tl.store(record, tl.where(used, owner, -1), mask=stored)
    tl.store(record + 1, first, mask=stored)
    tl.store(record + 2, queries, mask=stored)
    tl.store(record + 3, step, mask=stored)
    tl.store(record + 4, split * units // splits, mask=stored)
    tl.store(record + 5, (split + 1) * units // splits, mask=stored)
    tl.store(record + 6, slot, mask=stored)
    tl.store(record + 7, slot + tl.where(mixed, 1, 0), mask=stored)
    tl.store(record + 8, sink_tiles, mask=stored)
    tl.store(record + 9, recent_tile, mask=stored)
    tl.store(record + 10, window_tiles, mask=stored)
    tl.store(record + 11, page, mask=stored)
    tl.store(record + 12, whole_end, mask=stored)


def request_block(requests: int) -> int:
    """Requests a program of the schedule kernel looks at: one size for all small batches, because each is compiled."""
    return max(64, triton.next_power_of_2(requests))


@dataclass
class DecodeSchedule:
    """Schedule of one step for all layers that share page and window tables. Its tensors stay where they are, so
    CUDA graphs may read them.

    Attributes:
        entries: [max_entries, 16] int32, see `ENTRY_FIELDS`.
        requests: [max_requests, 4] int32, see `REQUEST_FIELDS`.
        grid: sizes of the current step's launches.

    """

    entries: Tensor
    requests: Tensor
    grid: DecodeGrid

    @classmethod
    def allocate(cls, *, max_requests: int, multiprocessors: int, device: torch.device | str) -> "DecodeSchedule":
        """Buffers for up to ``max_requests`` requests: 64 bytes for each program of a KV head, 16 for each request."""
        max_entries = max(4 * max_requests, 32 * multiprocessors)
        return cls(
            torch.zeros(max_entries, ENTRY_FIELDS, dtype=torch.int32, device=device),
            torch.zeros(max_requests, REQUEST_FIELDS, dtype=torch.int32, device=device),
            DecodeGrid(0, 4, 1, 0),
        )

    def update(
        self,
        *,
        grid: DecodeGrid,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        window_table: Tensor,
        window_block_size: int,
        sink: int,
        recent: int,
    ) -> None:
        """Compute the schedule of a step: one launch, no synchronisation.

        Args:
            grid: from `decode_grid`.
            query_start_loc: [R + 1] int32, R = ``grid.requests``; requests without query tokens get no work.
            seq_lens: [R] int32, this step's tokens included.
            window_table: [R, max_blocks] int32 window block of each ``window_block_size`` tokens, 0 = null block.
            window_block_size: a multiple of 16.
            sink: sink tokens, a multiple of 16, at most 128.
            recent: recent tokens, a multiple of 16, at least 128.

        Raises:
            ValueError: more requests or splits than were allocated, or sizes outside the ranges above.

        """
        if grid.requests > self.requests.shape[0] or grid.entries > self.entries.shape[0]:
            raise ValueError(
                f"{grid.requests} requests and {grid.entries} splits do not fit a schedule allocated for "
                f"{self.requests.shape[0]} and {self.entries.shape[0]}"
            )
        if window_block_size % WINDOW_TILE:
            raise ValueError(f"window block size {window_block_size} is no multiple of {WINDOW_TILE}")
        if sink % 16 or not 0 <= sink <= PAGE_TOKENS or recent % 16 or recent < PAGE_TOKENS:
            raise ValueError(f"sink={sink} must be 0, 16, ... 128 and recent={recent} 128, 144, ...")
        self.grid = grid
        if grid.requests == 0:
            return
        requests = request_block(grid.requests)
        _schedule_kernel[(triton.cdiv(grid.entries, _ENTRIES_PER_PROGRAM),)](
            query_start_loc,
            seq_lens,
            window_table,
            self.entries,
            self.requests,
            window_table.stride(0),
            grid.requests,
            grid.entries,
            sink,
            recent,
            TILE=WINDOW_TILE,
            PAGE=PAGE_TOKENS,
            BLOCK=window_block_size,
            SPAN=triton.next_power_of_2(recent // window_block_size + 2),
            REQUESTS=requests,
            ENTRIES=_ENTRIES_PER_PROGRAM,
            ENTRY_FIELDS=ENTRY_FIELDS,
            REQUEST_FIELDS=REQUEST_FIELDS,
            num_warps=4 if requests <= 64 else 8,
        )
