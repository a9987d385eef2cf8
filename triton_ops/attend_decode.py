# SPDX-License-Identifier: Apache-2.0
"""Decode attention over INT2 pages and BF16 windows: split over keys in one launch, merged in a second.

`attend_decode` launches two kernels. The first runs one warp per program; a program reads its split of a request's
work list (schedule.py) for one KV head and writes partial results. The second merges a row's partials, un-rotates the
history part and adds the windows' part.

**A page** (128 tokens; layout.py). The query's slot weights are INT8 (high, low) halves (prepare.py), codes come from
memory as the fragments of an MMA. With raw sums x = sum f n c::

    logit   S_t = u * (x_t - 1.5 sum f n) * s_t + q . mu                  zero="page", the offset starts the sum
            S_t = u * (x_t * s_t + z_t * sum f n) + q . key_mean          zero="token"
    weight  p_t = 2 ** (S_t - reference)
    output  O  += sum_t (p_t * scale_t) c_t + sum_t p_t * zero_t

Integers are exact; sums stay below 2**24 but for ``zero="token"`` or head size 256, where they round to 24 bits.

*Up to 4 rows* keys are the A operand and both halves of the rows fill an MMA's 8 columns. The reference is the page's
maximum; p_t * scale_t is quantized to 15 bits against the page's largest value scale, so it cannot overflow whatever
the scales are, and enters the second INT8 MMA as (high, low) columns too.

*From 8 rows* the query is the A operand, both halves of 8 rows or one half of 16. Then a lane has the logits of pairs
of tokens of one row, which is how the second MMA wants its B operand: nothing moves between lanes. That one multiplies
float16 and adds to the float32 output. A code masked in place, plane j of a byte of a 16-bit word, is the float16
subnormal c 4**j 2**-24: tensor cores take it exactly, nothing is converted, and 4**-j goes into the weight. Sums of p_t
and of p_t * zero_t are MMAs too. Logits and value scales are relative to references that change only when a page
exceeds them, the logits by more than 8; scales then to a power of two at least twice the page's largest. So most pages
need no maximum across lanes and no rescaling, and 2**7 p_t and its product with a scale stay below 2**15.

Which tokens a query reads as BF16 and which from pages is the rule of `reference.attend` with ``prefill="exact"``,
token by token, but only pages at the edges of history pay for a mask.

Partials: per (slot, KV head, row block) ``rows`` x d float32, unnormalized, dimension x at (x & 7) * (d / 8) + (x >> 3)
so that a lane stores 16 bytes at a time; and the maximum (base 2) and sum per row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_ops.codec import LayerCodec
from triton_ops.layout import PageLayout
from triton_ops.prepare import LOG2_E, PreparedQuery, prefetch, supports_pdl
from triton_ops.schedule import (
    ENTRY_FIELDS,
    REQUEST_FIELDS,
    WINDOW_TILE,
    DecodeGrid,
    DecodeSchedule,
    decode_grid,
    register_limit,
)
from triton_ops.soft_cap import capped, soft_cap_log2

MERGE_WARPS = 8
"""Warps of a merge program."""
_MAX_WEIGHT = 32512.0  # 127 * 256, the largest quantized p * scale


def prefetches_pages(rows: int, capability: tuple[int, int]) -> bool:
    """Whether programs bring the page after the one they read to the L2 cache, by default.

    A program has one page in shared memory and asks for the next one when it has read it. With 4 rows sixteen programs
    per multiprocessor hide that wait, with more rows there are eight or twelve.

    Args:
        rows: rows of a program.
        capability: compute capability.

    """
    return rows >= 8 and capability >= (9, 0)


# Triton joins tuples with + only. Its interpreter knows no inline assembly and multiplies the bit patterns of bfloat16:
# COMPILED = False avoids both.


@triton.jit
def _dot(a, b, acc, COMPILED: tl.constexpr):
    """acc + a @ b of 16-bit floats."""
    if not COMPILED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _unpack(codes, COMPILED: tl.constexpr):
    """Planes of packed codes, as int8: c, 4 c, c, 4 c."""
    if COMPILED:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 upper;
            shr.u32 upper, $4, 4;
            and.b32 $0, $4, 0x03030303;
            and.b32 $1, $4, 0x0C0C0C0C;
            and.b32 $2, upper, 0x03030303;
            and.b32 $3, upper, 0x0C0C0C0C;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        upper = codes >> 4
        p0, p1, p2, p3 = codes & 3, codes & 12, upper & 3, upper & 12
    return p0, p1, p2, p3


@triton.jit
def _unpack_float16(codes, COMPILED: tl.constexpr):
    """Planes 0..3 of the low, then of the high bytes of int16 words, as float16 numbers c 4**plane 2**-24."""
    if COMPILED:
        e0, e1, e2, e3, o0, o1, o2, o3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 odd;
            shr.u32 odd, $8, 8;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000C000C;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00C000C0;
            and.b32 $4, odd, 0x00030003;
            and.b32 $5, odd, 0x000C000C;
            and.b32 $6, odd, 0x00300030;
            and.b32 $7, odd, 0x00C000C0;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        odd = codes >> 8
        e0, e1 = (codes & 3).to(tl.float16, bitcast=True), (codes & 12).to(tl.float16, bitcast=True)
        e2, e3 = (codes & 48).to(tl.float16, bitcast=True), (codes & 192).to(tl.float16, bitcast=True)
        o0, o1 = (odd & 3).to(tl.float16, bitcast=True), (odd & 12).to(tl.float16, bitcast=True)
        o2, o3 = (odd & 48).to(tl.float16, bitcast=True), (odd & 192).to(tl.float16, bitcast=True)
    return e0, e1, e2, e3, o0, o1, o2, o3


@triton.jit
def _prefetch_page(table, pages, stride, BYTES: tl.constexpr):
    """Bring BYTES, a multiple of 16, of the page whose index is at ``table`` to the L2 cache. From sm_90.

    All addresses and ``stride``, in bytes, are int64. Returns nothing of use.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 lane, index;
        .reg .b64 page;
        .reg .pred first;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first ld.global.s32 index, [$1];
        cvt.s64.s32 page, index;
        mad.lo.s64 page, page, $3, $2;
        @first cp.async.bulk.prefetch.L2.global [page], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,l,l,r",
        [table, pages, stride, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_words(pointer, ROWS: tl.constexpr):
    """Rows of a code section in fragment order, [ROWS, 16] int16: of a row, word 8 b + 2 a + i starts at column
    16 b + 4 a + 2 i."""
    x = tl.load(pointer + tl.arange(0, ROWS * 16)).to(tl.int16, bitcast=True)
    return x.reshape([ROWS // 16, 8, 4, 2, 2, 2]).trans(0, 4, 1, 3, 2, 5).reshape([ROWS, 16])


@triton.jit
def _load_codes(pointer, ROWS: tl.constexpr):
    """Rows of a code section in fragment order, [ROWS, 32] int8."""
    x = tl.load(pointer + tl.arange(0, ROWS * 32))
    return x.reshape([ROWS // 16, 8, 4, 2, 2, 4]).trans(0, 4, 1, 3, 2, 5).reshape([ROWS, 32])


@triton.jit
def _load_key_rows(pointer, ROWS: tl.constexpr):
    """64 or 128 rows of key codes, [ROWS, 32] int8, rows as in `_row_token`: the A operand of an MMA."""
    x = tl.load(pointer + tl.arange(0, ROWS * 32))
    x = x.reshape([ROWS // 64, 2, 2, 2, 2, 2, 4, 2, 2, 4]).trans(0, 2, 5, 8, 1, 3, 4, 7, 6, 9)
    return x.reshape([ROWS, 32])


@triton.jit
def _row_token():
    """Token of each row of the logits, [128]: a lane's rows 8, 16 and 24 apart are columns of one word of values."""
    row = tl.arange(0, 128)
    token = row % 4 * 2 + row // 4 % 2 * 32 + row // 8 % 2 * 8 + row // 16 % 2
    return token + row // 32 % 2 * 16 + row // 64 * 64


@triton.jit
def _load_metadata(pointer, BY_ROW: tl.constexpr):
    """A metadata vector, [128] float16 in the order of tokens or, with BY_ROW, of `_row_token`."""
    x = tl.load(pointer + tl.arange(0, 128))
    if BY_ROW:
        x = x.reshape([2, 2, 2, 2, 2, 2, 2]).trans(2, 4, 6, 5, 3, 0, 1)
    else:
        x = x.reshape([4, 16, 2]).trans(1, 0, 2)
    return x.reshape([128])


@triton.jit
def _load_fragment(pointer, COLUMNS: tl.constexpr):
    """One plane of the query's halves, [32 slots, COLUMNS] int8."""
    x = tl.load(pointer + tl.arange(0, 32 * COLUMNS))
    return x.reshape([COLUMNS, 4, 2, 4]).trans(2, 1, 3, 0).reshape([32, COLUMNS])


@triton.jit
def _load_rows(pointer, ROWS: tl.constexpr):
    """One plane of the query, [16, 32 slots] int8: of 8 rows the high above the low halves, of 16 rows one half."""
    at = tl.arange(0, 512)
    source = at // 32 % 8 * 64 + at // 256 * (32 if ROWS == 8 else 512) + at % 32
    # Eight bytes a lane, not sixteen: then lanes hold what the MMA wants of them.
    x = tl.load(pointer + tl.max_contiguous(source, [8]))
    return x.reshape([16, 4, 2, 4]).trans(0, 2, 1, 3).reshape([16, 32])


@triton.jit
def _join_halves(x, M: tl.constexpr, ROWS: tl.constexpr):
    """[M, 2 ROWS] integer sums of (high, low) columns to [M, ROWS] float32."""
    high, low = tl.split(x.reshape([M, ROWS, 2]))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def _stack(lower, upper, ROWS: tl.constexpr):
    """[64, ROWS] above [64, ROWS]."""
    lower = tl.broadcast_to(lower.reshape([1, 64, ROWS]), [2, 64, ROWS])
    upper = tl.broadcast_to(upper.reshape([1, 64, ROWS]), [2, 64, ROWS])
    return tl.where((tl.arange(0, 2) == 0)[:, None, None], lower, upper).reshape([128, ROWS])


@triton.jit
def _key_sums(codes_ptr, fragments, start, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr, COMPILED: tl.constexpr):
    """Raw sums of one page, [128, ROWS] float32, rows as in `_row_token`.

    ``fragments``: planes of (high, low) columns. ``start``, [2 ROWS] int32, is what the sums start from.
    """
    if HEAD_SIZE == 64:
        k0, k1, k2, k3 = _unpack(_load_key_rows(codes_ptr, 64), COMPILED)
        initial = tl.broadcast_to(start[None, :], [64, 2 * ROWS])
        x = tl.dot(k0, fragments[0], initial, out_dtype=tl.int32)
        x = tl.dot(k1, fragments[1], x, out_dtype=tl.int32)
        lower = _join_halves(x, 64, ROWS)
        x = tl.dot(k2, fragments[0], initial, out_dtype=tl.int32)
        x = tl.dot(k3, fragments[1], x, out_dtype=tl.int32)
        x = _stack(lower, _join_halves(x, 64, ROWS), ROWS)
    else:
        x = tl.broadcast_to(start[None, :], [128, 2 * ROWS])
        for part in tl.static_range(HEAD_SIZE // 128):
            k0, k1, k2, k3 = _unpack(_load_key_rows(codes_ptr + part * 4096, 128), COMPILED)
            x = tl.dot(k0, fragments[4 * part], x, out_dtype=tl.int32)
            x = tl.dot(k1, fragments[4 * part + 1], x, out_dtype=tl.int32)
            x = tl.dot(k2, fragments[4 * part + 2], x, out_dtype=tl.int32)
            x = tl.dot(k3, fragments[4 * part + 3], x, out_dtype=tl.int32)
        x = _join_halves(x, 128, ROWS)
    return x


@triton.jit
def _dot_planes(fragments, planes, start, at: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """256 times the products of the query's high halves with COUNT planes, plus ``start`` and those of the low ones."""
    TOKENS: tl.constexpr = planes[at].shape[0]
    x = tl.dot(fragments[0], tl.trans(planes[at]), out_dtype=tl.int32)
    for plane in tl.static_range(1, COUNT):
        x = tl.dot(fragments[plane], tl.trans(planes[at + plane]), x, out_dtype=tl.int32)
    if ROWS == 8:
        high, low = tl.split(x.reshape([2, 8, TOKENS]).trans(1, 2, 0))
        x = high * 256 + (low + start[:, None])
    else:
        x = x * 256 + start[:, None]
        for plane in tl.static_range(COUNT):
            x = tl.dot(fragments[COUNT + plane], tl.trans(planes[at + plane]), x, out_dtype=tl.int32)
    return x.to(tl.float32)


@triton.jit
def _key_sums_by_rows(
    codes_ptr, fragments, start, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr, COMPILED: tl.constexpr
):
    """As `_key_sums`, but [ROWS, 128], tokens in order: keys are the B operand.

    ``fragments``: planes of the high above the low halves or, with 16 rows, of the high and then of the low ones.
    ``start``: [ROWS] int32.
    """
    if HEAD_SIZE == 64:
        planes = _unpack(_load_codes(codes_ptr, 64), COMPILED)
        lower = _dot_planes(fragments, planes, start, 0, 2, ROWS)
        upper = _dot_planes(fragments, planes, start, 2, 2, ROWS)
        x = tl.join(lower, upper).trans(0, 2, 1).reshape([ROWS, 128])
    else:
        planes = ()
        for part in tl.static_range(HEAD_SIZE // 128):
            planes = planes + _unpack(_load_codes(codes_ptr + part * 4096, 128), COMPILED)
        x = _dot_planes(fragments, planes, start, 0, HEAD_SIZE // 32, ROWS)
    return x


@triton.jit
def _planes(x, COLUMNS: tl.constexpr):
    """[128, COLUMNS], rows as in `_row_token`, to what each plane of values meets, four times [32, COLUMNS]."""
    x = x.reshape([2, 2, 2, 2, 2, 2, 2, COLUMNS]).trans(1, 5, 6, 2, 3, 7, 0, 4)  # from bits 6 4 0 3 5 2 1 of the token
    even, odd = tl.split(x.reshape([32, COLUMNS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _weight_halves(weights, ROWS: tl.constexpr):
    """Round [128, ROWS] weights below 2**15 to (high, low) INT8 columns: a B operand [32, 2 ROWS] for each plane."""
    # Adding 2**23 leaves the rounded integer in the low bits; 128 more makes the low byte signed, but for its sign bit.
    bits = (weights + 8388736.0).to(tl.int32, bitcast=True)
    pair = tl.broadcast_to(bits.reshape([128, ROWS, 1]), [128, ROWS, 2])
    high = (tl.arange(0, 2) == 0)[None, None, :]
    pair = tl.where(high, pair >> 8, pair ^ 128).to(tl.int8).reshape([128, 2 * ROWS])
    return _planes(pair, 2 * ROWS)


@triton.jit
def _token_planes(x, ROWS: tl.constexpr):
    """[ROWS, 128] to a B operand [16, ROWS] for each tensor of `_unpack_float16`.

    Bits 4, 2, 1, 0 of the token are the row, bit 3 the byte of a word, bits 6 and 5 the plane.
    """
    x = x.reshape([ROWS, 2, 2, 2, 2, 4, 2]).trans(3, 5, 6, 0, 2, 1, 4)
    even, odd = tl.split(x.reshape([16, ROWS, 2, 2, 2]))
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    return tl.split(even_low) + tl.split(even_high) + tl.split(odd_low) + tl.split(odd_high)


@triton.jit
def _offset_planes(zeros):
    """[128] float16 to an A operand [16, 16] for each plane: eight equal rows for the low bytes, eight for the high."""
    x = zeros.reshape([2, 2, 2, 2, 8]).trans(3, 2, 4, 1, 0).reshape([2, 16, 2, 2])
    even, odd = tl.split(x)
    x0, x1 = tl.split(even)
    x2, x3 = tl.split(odd)
    x0 = tl.broadcast_to(x0[:, None, :], [2, 8, 16]).reshape([16, 16])
    x1 = tl.broadcast_to(x1[:, None, :], [2, 8, 16]).reshape([16, 16])
    x2 = tl.broadcast_to(x2[:, None, :], [2, 8, 16]).reshape([16, 16])
    x3 = tl.broadcast_to(x3[:, None, :], [2, 8, 16]).reshape([16, 16])
    return x0, x1, x2, x3


@triton.jit
def _by_lane(x, ROWS: tl.constexpr):
    """[ROWS, 128] by what a lane of the logits holds: [ROWS, 4, 32]."""
    return x.reshape([ROWS, 16, 4, 2]).trans(0, 2, 1, 3).reshape([ROWS, 4, 32])


@triton.jit
def _by_token(x, ROWS: tl.constexpr):
    """Inverse of `_by_lane`."""
    return x.reshape([ROWS, 4, 16, 2]).trans(0, 2, 1, 3).reshape([ROWS, 128])


@triton.jit
def _multiply(x, y, COMPILED: tl.constexpr):
    """x * y of float16, pairs together."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        x = x * y
    return x


@triton.jit(do_not_specialize=["page_table_ptr", "window_table_ptr", "page_table_stride", "window_table_stride"])
def _attend_kernel(
    query_ptr,
    fragments_ptr,
    plain_ptr,
    factors_ptr,
    sums_ptr,
    codes_ptr,
    metadata_ptr,
    windows_ptr,
    page_table_ptr,
    window_table_ptr,
    entries_ptr,
    partial_ptr,
    stats_ptr,
    query_stride_token,
    query_stride_head,
    page_stride,
    page_stride_head,
    window_stride,
    window_stride_head,
    window_stride_token,
    page_table_stride,
    window_table_stride,
    scale_log2,
    sink,
    recent,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    TOKEN_ZERO: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    MAX_WEIGHT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Dimensions of values whose sums are one tensor.
    VALUE_CHUNK: tl.constexpr = 64 if HEAD_SIZE == 64 else 128
    # From 8 rows: queries times keys, not keys times queries, and values in float16.
    FLOAT16: tl.constexpr = ROWS >= 8
    if PDL:
        gdc_launch_dependents()
    entry = entries_ptr + tl.program_id(0) * ENTRY_FIELDS
    request = tl.load(entry)
    head = tl.program_id(1) // ROW_BLOCKS
    row_block = tl.program_id(1) % ROW_BLOCKS
    first = tl.load(entry + 1)
    queries = tl.load(entry + 2)
    step = tl.load(entry + 3)
    begin = tl.load(entry + 4)
    end = tl.load(entry + 5)
    window_slot = tl.load(entry + 6).to(tl.int64)
    history_slot = tl.load(entry + 7).to(tl.int64)
    sink_tiles = tl.load(entry + 8)
    recent_tile = tl.load(entry + 9)
    window_tiles = tl.load(entry + 10)
    first_page = tl.load(entry + 11)
    whole_end = tl.load(entry + 12)
    if request < 0:
        if PDL:
            gdc_wait()
        return
    page_table = page_table_ptr + request.to(tl.int64) * page_table_stride
    window_table = window_table_ptr + request.to(tl.int64) * window_table_stride
    blocks = tl.num_programs(1)
    out_row = tl.arange(0, ROWS)

    # No token may be read before the wait, not even an old one: a prompt may hit a page whose last token another
    # request appends in this step.
    if begin < window_tiles:
        if PDL:
            gdc_wait()
        COLUMNS: tl.constexpr = 8 if ROWS < 8 else ROWS
        dim = tl.arange(0, HEAD_SIZE)
        column = tl.arange(0, COLUMNS)
        row = row_block * ROWS + column
        valid = (column < ROWS) & (row < queries * GROUP)
        source = (first + row // GROUP).to(tl.int64) * query_stride_token
        source += (head * GROUP + row % GROUP) * query_stride_head
        q = tl.load(query_ptr + source[None, :] + dim[:, None], mask=valid[None, :], other=0.0)
        position = step + row // GROUP
        m = tl.full([COLUMNS], -1.0e30, tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        acc = tl.zeros([HEAD_SIZE, COLUMNS], tl.float32)
        for i in tl.range(begin, tl.minimum(end, window_tiles), num_stages=3):
            tile = tl.where(i < sink_tiles, i, recent_tile + i - sink_tiles) * TILE
            block = tl.load(window_table + tile // BLOCK).to(tl.int64)
            token = tile + tl.arange(0, TILE)
            readable = token < tl.where(block != 0, step + queries, 0)
            base = windows_ptr + block * window_stride + head * window_stride_head
            pointer = base + (tile % BLOCK + tl.arange(0, TILE))[:, None] * window_stride_token + dim[None, :]
            k = tl.load(pointer, mask=readable[:, None], other=0.0)
            v = tl.load(pointer + HEAD_SIZE, mask=readable[:, None], other=0.0)
            bf16 = (token < sink)[:, None] | (token[:, None] > position[None, :] - recent)
            use = readable[:, None] & (token[:, None] <= position[None, :]) & bf16
            s = _dot(k, q, tl.zeros([TILE, COLUMNS], tl.float32), COMPILED) * scale_log2
            if SOFT_CAP > 0:
                s = capped(s, SOFT_CAP)
            s = tl.where(use, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 0))
            p = tl.exp2(s - m_new[None, :])
            keep = tl.exp2(m - m_new)
            m = m_new
            total = total * keep + tl.sum(p, 0)
            high = p.to(v.dtype)
            low = (p - high.to(tl.float32)).to(v.dtype)
            acc = _dot(tl.trans(v), high, acc * keep[None, :], COMPILED)
            acc = _dot(tl.trans(v), low, acc, COMPILED)
        slot = window_slot * blocks + tl.program_id(1)
        o = acc.reshape([HEAD_SIZE // 8, 8, COLUMNS]).trans(2, 1, 0)
        target = partial_ptr + slot * (ROWS * HEAD_SIZE) + column[:, None, None] * HEAD_SIZE
        target += tl.arange(0, 8)[None, :, None] * (HEAD_SIZE // 8) + tl.arange(0, HEAD_SIZE // 8)[None, None, :]
        tl.store(target, o, mask=(column < ROWS)[:, None, None])
        tl.store(stats_ptr + slot * (2 * ROWS) + column, m, mask=column < ROWS)
        tl.store(stats_ptr + slot * (2 * ROWS) + ROWS + column, total, mask=column < ROWS)

    start = tl.maximum(begin - window_tiles, 0) + first_page
    if PDL:
        if end > window_tiles:
            # While tokens are written and queries prepared, the first page comes as far as the L2 cache.
            page = tl.load(page_table + start).to(tl.int64) * page_stride + head * page_stride_head
            prefetch((codes_ptr + page + tl.minimum(tl.arange(0, HEAD_SIZE) * 128, PAGE_BYTES - 1)).to(tl.int64))
        gdc_wait()
    if end > window_tiles:
        prepared = (request * ROW_BLOCKS + row_block).to(tl.int64) * HEADS + head
        fragments = ()
        for half in tl.static_range(2 if ROWS == 16 else 1):
            for plane in tl.static_range(HEAD_SIZE // 32):
                source = fragments_ptr + prepared * (2 * ROWS * HEAD_SIZE) + plane * (64 * ROWS) + half * 32
                if FLOAT16:
                    operand = _load_rows(source, ROWS)
                else:
                    operand = _load_fragment(source, 2 * ROWS)
                fragments = fragments + (operand,)  # type: ignore[assignment]  # noqa: RUF005
        factor = tl.load(factors_ptr + prepared * (2 * ROWS) + out_row)
        mean_factor = tl.load(factors_ptr + prepared * (2 * ROWS) + ROWS + out_row)
        pair = tl.arange(0, 2 * ROWS)
        if TOKEN_ZERO:
            integers = tl.load(sums_ptr + prepared * ROWS + out_row).to(tl.float32)
            first_sum = tl.zeros([ROWS if FLOAT16 else 2 * ROWS], tl.int32)
        elif FLOAT16:
            first_sum = -((3 * tl.load(sums_ptr + prepared * ROWS + out_row)) >> 1)
        else:
            integers = tl.load(sums_ptr + prepared * ROWS + pair // 2)
            first_sum = tl.where(pair % 2 == 1, -((3 * integers) >> 1), 0)
        if not TOKEN_ZERO:
            # q . mu: rows of A and columns of B each hold one half of the dimensions; equal halves count.
            half = tl.arange(0, HEAD_SIZE // 2)
            same = tl.arange(0, 2)[:, None] == tl.arange(0, 2)[None, :]
            if FLOAT16:
                plain_at = (pair % ROWS * 2 + pair // ROWS)[:, None] * (HEAD_SIZE // 2) + half[None, :]
                same = same[:, None, None, :]
            else:
                plain_at = pair[None, :] * (HEAD_SIZE // 2) + half[:, None]
                same = same[:, None, None, :]
            plain = tl.load(plain_ptr + prepared * (ROWS * HEAD_SIZE) + plain_at)
        position = step + (row_block * ROWS + out_row) // GROUP

        m = tl.full([ROWS], -1.0e30, tl.float32)
        if FLOAT16:
            largest = 1.0 / 32768
            inverse = 32768.0
            total = tl.zeros([16, ROWS], tl.float32)  # equal rows: the second MMA sums these too
            zeros = tl.zeros([16, ROWS], tl.float32)
            other_zeros = tl.zeros([16, ROWS], tl.float32)
        else:
            plane_weight = tl.where((_row_token() // 32) % 2 == 1, 0.25, 1.0) * MAX_WEIGHT
            total = tl.zeros([8, ROWS], tl.float32)
            zeros = tl.zeros([8, ROWS], tl.float32)
        acc = ()
        for _ in tl.static_range(HEAD_SIZE // VALUE_CHUNK):
            acc = acc + (tl.zeros([VALUE_CHUNK, ROWS], tl.float32),)  # noqa: RUF005
        last_page = end - window_tiles + first_page - 1
        for i in tl.range(start, last_page + 1, num_stages=3):
            page = tl.load(page_table + i).to(tl.int64) * page_stride + head * page_stride_head
            meta = metadata_ptr + page // 2
            if PREFETCH:
                following = (page_table + tl.minimum(i + 1, last_page)).to(tl.int64)
                pages = (codes_ptr + head * page_stride_head).to(tl.int64)
                _prefetch_page(following, pages, page_stride.to(tl.int64), PAGE_BYTES)
            key_scale = _load_metadata(meta + KEY_SCALE // 2, not FLOAT16).to(tl.float32)
            if FLOAT16:
                s = _key_sums_by_rows(codes_ptr + page, fragments, first_sum, HEAD_SIZE, ROWS, COMPILED)
                s = s * key_scale[None, :]
            else:
                s = _key_sums(codes_ptr + page, fragments, first_sum, HEAD_SIZE, ROWS, COMPILED) * key_scale[:, None]
            # What all of a page's logits share: [ROWS] or, with FLOAT16, the same for each of 4 lanes, [ROWS, 4].
            if TOKEN_ZERO:
                key_zero = _load_metadata(meta + KEY_ZERO // 2, not FLOAT16).to(tl.float32)
                if FLOAT16:
                    s += key_zero[None, :] * integers[:, None]
                    shared = tl.broadcast_to(mean_factor[:, None], [ROWS, 4])
                else:
                    s += key_zero[:, None] * integers[None, :]
                    shared = mean_factor
            else:
                mean = tl.load(meta + KEY_ZERO // 2 + tl.arange(0, HEAD_SIZE))
                if FLOAT16:
                    mean = mean.reshape([2, HEAD_SIZE // 2]).trans(1, 0)[:, None, :]
                    mean = tl.broadcast_to(mean, [HEAD_SIZE // 2, 4, 2]).reshape([HEAD_SIZE // 2, 8])
                    products = tl.dot(plain, mean).reshape([2, ROWS, 4, 2])
                    shared = tl.sum(tl.sum(tl.where(same, products, 0.0), 3), 0) * mean_factor[:, None]
                else:
                    mean = mean.reshape([2, 1, HEAD_SIZE // 2])
                    mean = tl.broadcast_to(mean, [2, 8, HEAD_SIZE // 2]).reshape([16, HEAD_SIZE // 2])
                    products = tl.dot(mean, plain)
                    products = tl.sum(tl.where(same, products.reshape([2, 8, ROWS, 2]), 0.0), 3)
                    shared = tl.max(tl.sum(products, 0), 0) * mean_factor
            amplitude = factor
            if SOFT_CAP > 0:
                # Then the logits themselves, not what is missing a factor and a term.
                if FLOAT16:
                    s = _by_token(_by_lane(s, ROWS) * factor[:, None, None] + shared[:, :, None], ROWS)
                else:
                    s = s * factor[None, :] + shared[None, :]
                s = capped(s, SOFT_CAP)
                amplitude = tl.full([ROWS], 1.0, tl.float32)
                shared = tl.zeros_like(shared)
            value_scale = _load_metadata(meta + VALUE_SCALE // 2, not FLOAT16)
            value_zero = _load_metadata(meta + VALUE_ZERO // 2, not FLOAT16)
            if not FLOAT16:
                value_scale = value_scale.to(tl.float32)
                value_zero = value_zero.to(tl.float32)
            # A page was written whole, its sink tokens too: what is not read has p = 0 and finite scales and zeros.
            if (i >= whole_end) | (i * 128 < sink):
                token = i * 128
                if FLOAT16:
                    token += tl.arange(0, 128)
                else:
                    token += _row_token()
                missing = (tl.load(window_table + token // BLOCK) == 0) & (token < step)
                stored = token >= sink
                if FLOAT16:
                    read = (token[None, :] <= position[:, None] - recent) | missing[None, :]
                    read = stored[None, :] & (token[None, :] <= position[:, None]) & read
                else:
                    read = (token[:, None] <= position[None, :] - recent) | missing[:, None]
                    read = stored[:, None] & (token[:, None] <= position[None, :]) & read
                s = tl.where(read, s, float("-inf"))
            if FLOAT16:
                s = _by_lane(s, ROWS)
                top = tl.maximum(tl.max(s, 2), -1.0e30) * amplitude[:, None] + shared
                rises = tl.max((top > m[:, None] + 8.0).to(tl.int32).reshape([4 * ROWS]), 0)
                widens = tl.max((value_scale.to(tl.float32) > largest).to(tl.int32), 0)
                if (rises | widens) != 0:
                    m_new = tl.maximum(m, tl.max(top, 1))
                    keep = tl.exp2(m - m_new)
                    m = m_new
                    # A power of two, so that scales are divided by it exactly, whose inverse float16 can hold. It may
                    # be lower than before: where the new page takes over, its own scales are what counts.
                    twice = tl.maximum(2 * tl.max(value_scale.to(tl.float32), 0), 1.0 / 32768)
                    bits = (twice.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
                    shrink = keep * largest
                    largest = bits.to(tl.float32, bitcast=True)
                    inverse = 1.0 / largest
                    shrink *= inverse
                    total *= keep[None, :]
                    zeros *= keep[None, :]
                    other_zeros *= keep[None, :]
                    rescaled = ()
                    for chunk in tl.static_range(HEAD_SIZE // VALUE_CHUNK):
                        rescaled = rescaled + (acc[chunk] * shrink[None, :],)  # type: ignore[assignment]  # noqa: RUF005
                    acc = rescaled
                # 2**7 times the weights: what is left of float16's range above and below.
                p = tl.exp2(s * amplitude[:, None, None] - (m[:, None] - 7.0 - shared)[:, :, None])
                p = _token_planes(_by_token(p, ROWS), ROWS)
                scales = _token_planes(tl.broadcast_to(value_scale[None, :], [ROWS, 128]), ROWS)
                offsets = _offset_planes(value_zero)
                ones = tl.full([16, 16], 1.0, tl.float16)
                weights = ()
                for plane in tl.static_range(4):
                    low, high = p[plane].to(tl.float16), p[4 + plane].to(tl.float16)
                    total = tl.dot(ones, low, total)
                    total = tl.dot(ones, high, total)
                    zeros = tl.dot(offsets[plane], low, zeros)
                    other_zeros = tl.dot(offsets[plane], high, other_zeros)
                for plane in tl.static_range(8):
                    scale = tl.full([16, ROWS], 1.0, tl.float16) * (inverse * 0.25 ** (plane % 4)).to(tl.float16)
                    scale = _multiply(scales[plane], scale, COMPILED)
                    scaled = _multiply(p[plane].to(tl.float16), scale, COMPILED)
                    weights = weights + (scaled,)  # type: ignore[assignment]  # noqa: RUF005
            else:
                top = tl.maximum(tl.max(s, 0), -1.0e30) * amplitude
                p = tl.exp2(s * amplitude[None, :] - top[None, :])
                largest = tl.maximum(tl.max(value_scale, 0), 1.0e-7)
                weight = value_scale * (plane_weight * (1.0 / largest))
                weights = _weight_halves(p * weight[:, None], ROWS)
                m_page = top + shared
                m_new = tl.maximum(m, m_page)
                keep = tl.exp2(m - m_new)
                gain = tl.exp2(m_page - m_new)
                m = m_new
                total = total * keep[None, :] + gain[None, :] * tl.sum(p.reshape([16, 8, ROWS]), 0)
                zero_part = tl.sum((p * value_zero[:, None]).reshape([16, 8, ROWS]), 0)
                zeros = zeros * keep[None, :] + gain[None, :] * zero_part
                gain *= largest * (1.0 / MAX_WEIGHT)
            new = ()
            for chunk in tl.static_range(HEAD_SIZE // VALUE_CHUNK):
                if FLOAT16:
                    words = _load_words(meta + VALUE_CODES // 2 + chunk * VALUE_CHUNK * 16, VALUE_CHUNK)
                    values = _unpack_float16(words, COMPILED)
                    x = acc[chunk]
                    for plane in tl.static_range(8):
                        x = tl.dot(values[plane], weights[plane], x)
                else:
                    codes = _load_codes(codes_ptr + page + VALUE_CODES + chunk * VALUE_CHUNK * 32, VALUE_CHUNK)
                    values = _unpack(codes, COMPILED)
                    x = tl.dot(values[0], weights[0], out_dtype=tl.int32)
                    x = tl.dot(values[1], weights[1], x, out_dtype=tl.int32)
                    x = tl.dot(values[2], weights[2], x, out_dtype=tl.int32)
                    x = tl.dot(values[3], weights[3], x, out_dtype=tl.int32)
                    x = acc[chunk] * keep[None, :] + _join_halves(x, VALUE_CHUNK, ROWS) * gain[None, :]
                new = new + (x,)  # type: ignore[assignment]  # noqa: RUF005
            acc = new
        slot = history_slot * blocks + tl.program_id(1)
        if FLOAT16:
            total = tl.max(total, 0) * 0.0078125  # 2**-7
            of_low_bytes = (tl.arange(0, 16) < 8)[:, None]
            zeros = tl.sum(tl.where(of_low_bytes, zeros, other_zeros), 0) * (0.0078125 / 8)
        else:
            total = tl.sum(total, 0)
            zeros = tl.sum(zeros, 0)
        for chunk in tl.static_range(HEAD_SIZE // VALUE_CHUNK):
            o = acc[chunk]
            if FLOAT16:
                o *= largest * 131072.0  # 2**24 over the reference weight
            o += zeros[None, :]
            o = o.reshape([VALUE_CHUNK // 8, 8, ROWS]).trans(2, 1, 0)
            low = tl.arange(0, VALUE_CHUNK // 8) + chunk * (VALUE_CHUNK // 8)
            target = partial_ptr + slot * (ROWS * HEAD_SIZE) + out_row[:, None, None] * HEAD_SIZE
            tl.store(target + tl.arange(0, 8)[None, :, None] * (HEAD_SIZE // 8) + low[None, None, :], o)
        tl.store(stats_ptr + slot * (2 * ROWS) + out_row, m)
        tl.store(stats_ptr + slot * (2 * ROWS) + ROWS + out_row, total)


@triton.jit
def _pin(x):
    """x, computed here and not where it is used."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def _add_partials(
    at,
    m,
    total,
    mass,
    window,
    history,
    partial_row,
    stats_row,
    count,
    windows,
    stride,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add partials ``at`` to ``at + SLOTS`` of some rows to their sums."""
    k = at + tl.arange(0, SLOTS)
    here = k[None, :] < count[:, None]
    offset = k[None, :] * stride
    source = partial_row[:, None] + offset * HEAD_SIZE
    part = tl.load(source[:, :, None] + tl.arange(0, HEAD_SIZE)[None, None, :], mask=here[:, :, None], other=0.0)
    stats = stats_row[:, None] + offset * 2
    m_part = tl.load(stats, mask=here, other=-1.0e30)
    total_part = tl.load(stats + ROWS, mask=here, other=0.0)
    m_new = tl.maximum(m, tl.max(m_part, 1))
    weight = tl.exp2(m_part - m_new[:, None])
    keep = tl.exp2(m - m_new)
    from_window = tl.where(k[None, :] < windows[:, None], weight, 0.0)
    from_history = weight - from_window
    total = total * keep + tl.sum(total_part * weight, 1)
    mass = mass * keep + tl.sum(total_part * from_history, 1)
    window = window * keep[:, None] + tl.sum(part * from_window[:, :, None], 1)
    history = history * keep[:, None] + tl.sum(part * from_history[:, :, None], 1)
    return m_new, total, mass, window, history


@triton.jit(do_not_specialize=["query_start_ptr", "seq_lens_ptr", "num_requests", "lse_stride"])
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    requests_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rotation_ptr,
    mean_ptr,
    output_ptr,
    lse_ptr,
    output_stride_token,
    output_stride_head,
    lse_stride,
    num_requests,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    REQUEST_FIELDS: tl.constexpr,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    TAIL: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Everything the attend kernel does not write is on its way before the wait: no load below depends on another but
    # for the partials, whose number is in the request's record.
    head = tl.program_id(0)
    dim = tl.arange(0, HEAD_SIZE)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(1) * M + tl.arange(0, M)
    block = r // ROWS
    request = block // ROW_BLOCKS
    row_block = block % ROW_BLOCKS
    row = row_block * ROWS + r % ROWS
    exists = request < num_requests
    record = requests_ptr + request * REQUEST_FIELDS
    slot = tl.load(record, mask=exists, other=0)
    windows = tl.load(record + 1, mask=exists, other=0)
    count = tl.load(record + 2, mask=exists, other=0)
    first = tl.load(query_start_ptr + request, mask=exists, other=0)
    queries = tl.load(query_start_ptr + request + 1, mask=exists, other=0) - first
    seq_len = tl.load(seq_lens_ptr + request, mask=exists, other=0)
    mean = tl.load(mean_ptr + head * HEAD_SIZE + column)
    rotation = tl.load(rotation_ptr + (head * HEAD_SIZE + column[:, None]) * HEAD_SIZE + dim[None, :])
    high = rotation.to(tl.float16)
    low = (rotation - high.to(tl.float32)).to(tl.float16)
    if COMPILED and HEAD_SIZE == 128:
        high, low = _pin(high), _pin(low)
    if PDL:
        gdc_wait()

    index = slot.to(tl.int64) * (HEADS * ROW_BLOCKS) + head * ROW_BLOCKS + row_block
    stats_row = stats_ptr + index * (2 * ROWS) + r % ROWS
    partial_row = partial_ptr + index * (ROWS * HEAD_SIZE) + (r % ROWS) * HEAD_SIZE
    m = tl.full([M], -1.0e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    mass = tl.zeros([M], tl.float32)
    window = tl.zeros([M, HEAD_SIZE], tl.float32)
    history = tl.zeros([M, HEAD_SIZE], tl.float32)
    # Whole tiles of SLOTS; what is left of a tile, if little, in tiles of TAIL.
    most = tl.max(count, 0)
    whole = most
    stride = HEADS * ROW_BLOCKS * ROWS
    if TAIL:
        whole = (most + SLOTS - TAIL - 1) // SLOTS * SLOTS
    for at in tl.range(0, tl.minimum(most, whole), SLOTS, num_stages=1):
        m, total, mass, window, history = _add_partials(
            at, m, total, mass, window, history, partial_row, stats_row, count, windows, stride, ROWS, HEAD_SIZE, SLOTS
        )
    if TAIL:
        for at in tl.range(whole, most, TAIL, num_stages=1):
            m, total, mass, window, history = _add_partials(
                at,
                m,
                total,
                mass,
                window,
                history,
                partial_row,
                stats_row,
                count,
                windows,
                stride,
                ROWS,
                HEAD_SIZE,
                TAIL,
            )
    valid = row < tl.minimum(queries, seq_len) * GROUP
    total = tl.where(total > 0, total, 1.0)  # nothing is read in a dummy batch, whose windows are null blocks
    inverse = 1.0 / total

    # Dimension x lies at (x & 7) * (d / 8) + x // 8. Un-rotate on the tensor cores, rows repeated up to an MMA's M and
    # both factors as pairs of float16, 22 bits.
    COPIES: tl.constexpr = 16 // M
    history = history.reshape([M, 8, HEAD_SIZE // 8]).trans(0, 2, 1).reshape([M, HEAD_SIZE])
    window = window.reshape([M, 8, HEAD_SIZE // 8]).trans(0, 2, 1).reshape([M, HEAD_SIZE // COLUMNS, COLUMNS])
    if HEAD_SIZE > COLUMNS:
        mine = (tl.arange(0, HEAD_SIZE // COLUMNS) == tl.program_id(2))[None, :, None]
        window = tl.where(mine, window, 0.0)
    peak = tl.maximum(tl.max(tl.abs(history), 1), 1.0e-30)
    wide = history / peak[:, None]
    wide = tl.broadcast_to(wide[:, None, :], [M, COPIES, HEAD_SIZE]).reshape([16, HEAD_SIZE])
    wide_high = wide.to(tl.float16)
    wide_low = (wide - wide_high.to(tl.float32)).to(tl.float16)
    rotated = tl.dot(wide_low, tl.trans(high))
    rotated = tl.dot(wide_high, tl.trans(low), rotated)
    rotated = tl.dot(wide_high, tl.trans(high), rotated)
    rotated = tl.max(rotated.reshape([M, COPIES, COLUMNS]), 1) * peak[:, None]
    o = (rotated + tl.sum(window, 1) + mass[:, None] * mean[None, :]) * inverse[:, None]
    target = output_ptr + (first + row // GROUP).to(tl.int64) * output_stride_token
    target += (head * GROUP + row % GROUP) * output_stride_head
    tl.store(target[:, None] + column[None, :], o.to(output_ptr.dtype.element_ty), mask=valid[:, None])
    if HAS_LSE:
        lse = (m + tl.log2(total)) * 0.6931471805599453
        target = lse_ptr + (head * GROUP + row % GROUP) * lse_stride + first + row // GROUP
        tl.store(target, lse, mask=valid)


@dataclass(frozen=True)
class MergeOptions:
    """Launch choices of the merge kernel.

    Attributes:
        rows: query rows of a program, 1..16.
        slots: partials of each row a program reads at a time.
        tail: partials of each row read at a time where at most that many are left, or 0.

    """

    rows: int
    slots: int
    tail: int


def merge_columns(head_size: int) -> int:
    """Output dimensions of a merge program: as much of the un-rotation matrix as 64 KiB hold.

    Small batches gain nothing from more programs with half the columns each: measured on an H200, 1 x 32k tokens,
    7.7 us against 10.9.
    """
    return min(head_size, 16384 // head_size)


def merge_options(*, grid: DecodeGrid, num_kv_heads: int, head_size: int, multiprocessors: int) -> MergeOptions:
    """One wave of programs, each with as many loads in flight as its registers hold.

    The un-rotation matrix is read once per program, so a program takes as few rows as still make one wave, and all
    partials of its rows at a time where an even share of the splits allows.

    Args:
        grid: from `triton_ops.schedule.decode_grid`.
        num_kv_heads: KV heads.
        head_size: d.
        multiprocessors: multiprocessors of the GPU.

    """
    rows = grid.requests * grid.row_blocks * grid.rows
    programs = num_kv_heads * (head_size // merge_columns(head_size))
    tile = 1
    while tile < 16 and programs * -(-rows // tile) > multiprocessors:
        tile *= 2
    partials = -(-grid.entries // grid.requests) + 1  # one split may write two
    held = 16384 if head_size == 256 else 32768
    slots = max(1, min(held // (head_size * tile), triton.next_power_of_2(partials)))
    # The grid allows for many partials, a short request has few.
    return MergeOptions(tile, slots, tail=64 if head_size == 128 and slots == 256 else 0)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of the decode kernels, shared by all layers of one shape. Holds nothing between layers.

    Attributes:
        prepared: the prepared queries.
        partial: float32 partial outputs, flat.
        stats: float32 maxima and sums, flat.
        multiprocessors: of the device the grids are made for.
        capability: its compute capability.

    """

    prepared: PreparedQuery
    partial: Tensor
    stats: Tensor
    multiprocessors: int
    capability: tuple[int, int]

    @classmethod
    def allocate(
        cls,
        *,
        max_requests: int,
        max_query_len: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        multiprocessors: int | None = None,
        capability: tuple[int, int] | None = None,
    ) -> "DecodeWorkspace":
        """Allocate for every batch of up to ``max_requests`` requests of up to ``max_query_len`` query tokens.

        The partials dominate: (programs + requests) * rows * head size * 4 bytes. For 32 query and 8 KV heads of size
        128 and single-token queries on an H200 4 MiB and 16 KiB per request up to 264 requests, then 80 KiB each.

        Args:
            max_requests: most requests of a batch, padding included.
            max_query_len: most query tokens of a request, 1..16.
            num_query_heads: query heads.
            num_kv_heads: KV heads.
            head_size: 64, 128 or 256.
            device: where.
            multiprocessors: default: the device's.
            capability: default: the device's.

        """
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        if capability is None:
            capability = torch.cuda.get_device_capability(device)
        partials, prepared = 0, (0, 4)
        for queries in range(1, max_query_len + 1):
            for requests in range(1, max_requests + 1):
                grid = decode_grid(
                    num_requests=requests,
                    max_query_len=queries,
                    num_query_heads=num_query_heads,
                    num_kv_heads=num_kv_heads,
                    head_size=head_size,
                    multiprocessors=multiprocessors,
                    capability=capability,
                )
                partials = max(partials, (grid.entries + requests) * grid.row_blocks * grid.rows)
                prepared = max(prepared, (requests * grid.row_blocks, grid.rows), key=lambda size: size[0] * size[1])
        return cls(
            PreparedQuery(blocks=prepared[0] * num_kv_heads, rows=prepared[1], head_size=head_size, device=device),
            torch.empty(partials * num_kv_heads * head_size, dtype=torch.float32, device=device),
            torch.empty(partials * num_kv_heads * 2, dtype=torch.float32, device=device),
            multiprocessors,
            capability,
        )

    def grid(
        self, *, num_requests: int, max_query_len: int, num_query_heads: int, num_kv_heads: int, head_size: int
    ) -> DecodeGrid:
        """`decode_grid` for this device."""
        return decode_grid(
            num_requests=num_requests,
            max_query_len=max_query_len,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            multiprocessors=self.multiprocessors,
            capability=self.capability,
        )


def attend_partials(
    *,
    query: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    codec: LayerCodec,
    layout: PageLayout,
    scale: float,
    sink: int,
    recent: int,
    schedule: DecodeSchedule,
    workspace: DecodeWorkspace,
    soft_cap: float = 0.0,
    launch_pdl: bool | None = None,
    prefetch_pages: bool | None = None,
) -> Any:
    """First launch of `attend_decode`: fill ``workspace.partial``. Returns Triton's compiled kernel."""
    heads, d, grid = codec.num_kv_heads, codec.head_size, schedule.grid
    if query.dtype != windows.dtype or query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"query ({query.dtype}) and windows ({windows.dtype}) must both be bfloat16 or float16")
    if pages.stride(2) != 1 or pages.stride(0) % 16 or pages.stride(1) % 16 or pages.shape[2] != layout.page_bytes:
        raise ValueError(
            f"pages of shape {tuple(pages.shape)} and strides {pages.stride()} must have {layout.page_bytes} "
            "contiguous bytes that start at multiples of 16"
        )
    if windows.stride(3) != 1 or windows.shape[2] % WINDOW_TILE or windows.shape[3] != 2 * d:
        raise ValueError(
            f"windows of shape {tuple(windows.shape)} and strides {windows.stride()} must be [N, H, 16 k, {2 * d}] "
            "with a contiguous last axis"
        )
    partials = (grid.entries + grid.requests) * heads * grid.row_blocks * grid.rows
    if partials * d > workspace.partial.numel():
        raise ValueError(
            f"the workspace holds {workspace.partial.numel() // d} partial rows, this step needs {partials}"
        )
    prepared = workspace.prepared
    launch_pdl = supports_pdl(query.device) if launch_pdl is None else launch_pdl
    launch = {"launch_pdl": True} if launch_pdl else {}
    if prefetch_pages is None:
        prefetch_pages = prefetches_pages(grid.rows, workspace.capability)
    return _attend_kernel[(grid.entries, heads * grid.row_blocks)](
        query,
        prepared.fragments,
        prepared.plain,
        prepared.factors,
        prepared.sums,
        pages.view(torch.int8),
        pages.view(torch.float16),
        windows,
        page_table,
        window_table,
        schedule.entries,
        workspace.partial,
        workspace.stats,
        query.stride(0),
        query.stride(1),
        pages.stride(0),
        pages.stride(1),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        page_table.stride(0),
        window_table.stride(0),
        scale * LOG2_E,
        sink,
        recent,
        HEADS=heads,
        GROUP=query.shape[1] // heads,
        HEAD_SIZE=d,
        ROWS=grid.rows,
        ROW_BLOCKS=grid.row_blocks,
        TOKEN_ZERO=layout.zero == "token",
        VALUE_CODES=layout.value_codes,
        KEY_SCALE=layout.key_scale,
        VALUE_SCALE=layout.value_scale,
        VALUE_ZERO=layout.value_zero,
        KEY_ZERO=layout.key_zero,
        PAGE_BYTES=layout.page_bytes,
        TILE=WINDOW_TILE,
        BLOCK=windows.shape[2],
        ENTRY_FIELDS=ENTRY_FIELDS,
        MAX_WEIGHT=_MAX_WEIGHT,
        SOFT_CAP=soft_cap_log2(soft_cap),
        PREFETCH=prefetch_pages and not triton.knobs.runtime.interpret,
        COMPILED=not triton.knobs.runtime.interpret,
        PDL=launch_pdl,
        num_warps=1,
        maxnreg=register_limit(grid.rows, d),
        **launch,
    )


def merge_partials(
    *,
    codec: LayerCodec,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    schedule: DecodeSchedule,
    workspace: DecodeWorkspace,
    output: Tensor,
    lse: Tensor | None = None,
    launch_pdl: bool | None = None,
) -> Any:
    """Second launch of `attend_decode`: merge ``workspace.partial`` into ``output`` and ``lse``. Returns the kernel."""
    heads, d, grid = codec.num_kv_heads, codec.head_size, schedule.grid
    options = merge_options(grid=grid, num_kv_heads=heads, head_size=d, multiprocessors=workspace.multiprocessors)
    columns = merge_columns(d)
    launch_pdl = supports_pdl(output.device) if launch_pdl is None else launch_pdl
    tiles = triton.cdiv(grid.requests * grid.row_blocks * grid.rows, options.rows)
    launch = {"launch_pdl": True} if launch_pdl else {}
    return _merge_kernel[(heads, tiles, d // columns)](
        workspace.partial,
        workspace.stats,
        schedule.requests,
        query_start_loc,
        seq_lens,
        codec.value_rotation,
        codec.value_mean,
        output,
        lse,
        output.stride(0),
        output.stride(1),
        0 if lse is None else lse.stride(0),
        grid.requests,
        HEADS=heads,
        GROUP=output.shape[1] // heads,
        HEAD_SIZE=d,
        ROWS=grid.rows,
        ROW_BLOCKS=grid.row_blocks,
        REQUEST_FIELDS=REQUEST_FIELDS,
        M=options.rows,
        SLOTS=options.slots,
        TAIL=options.tail,
        COLUMNS=columns,
        HAS_LSE=lse is not None,
        COMPILED=not triton.knobs.runtime.interpret,
        PDL=launch_pdl,
        num_warps=MERGE_WARPS,
        **launch,
    )


def attend_decode(
    *,
    query: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    layout: PageLayout,
    scale: float,
    sink: int,
    recent: int,
    schedule: DecodeSchedule,
    workspace: DecodeWorkspace,
    output: Tensor,
    lse: Tensor | None = None,
    soft_cap: float = 0.0,
    launch_pdl: bool | None = None,
    prefetch_pages: bool | None = None,
) -> None:
    """Causal attention of short queries over sink, history and recent; after `append`, `demote` and `prepare_query`.

    Two launches, CUDA-graph safe. Rows of ``output`` and ``lse`` that belong to no request are left alone.

    Args:
        query: [T, H * G, d] bfloat16 or float16, as given to `prepare_query`; its dtype is the windows'.
        pages: [N, H, page_bytes] uint8; the last axis is contiguous, a page starts at a multiple of 16 bytes.
        windows: [N, H, block_size, 2 d] key, then value, block_size a multiple of 16; the last axis is contiguous.
        page_table: [R, max_pages] int32 history block of each page.
        window_table: [R, max_blocks] int32 window block of each ``block_size`` tokens, 0 = null block.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32.
        codec: the layer's codec, on the device.
        layout: the page layout.
        scale: softmax scale.
        sink: sink tokens, as in ``schedule``.
        recent: recent tokens, as in ``schedule``.
        schedule: updated for this step.
        workspace: filled by `prepare_query` for this layer.
        output: [T, H * G, d], written; the last axis is contiguous.
        lse: [H * G, T] float32, written: natural log of the sum of exponentials.
        soft_cap: c > 0 turns every scaled logit x into c tanh(x / c) (Gemma 2); 0 leaves logits as they are.
        launch_pdl: start each launch before the preceding kernel has ended; default: where the GPU can. The kernel
            before must then be `prepare_query` with the same choice (prepare.py says why that is safe).
        prefetch_pages: bring each next page to the L2 cache early (compute capability 9.0 or newer); default:
            `prefetches_pages`.

    Raises:
        ValueError: dtypes or strides the kernels cannot read, a workspace that is too small, or a negative cap.

    """
    if schedule.grid.requests == 0:
        return
    attend_partials(
        query=query,
        pages=pages,
        windows=windows,
        page_table=page_table,
        window_table=window_table,
        codec=codec,
        layout=layout,
        scale=scale,
        sink=sink,
        recent=recent,
        schedule=schedule,
        workspace=workspace,
        soft_cap=soft_cap,
        launch_pdl=launch_pdl,
        prefetch_pages=prefetch_pages,
    )
    merge_partials(
        codec=codec,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        schedule=schedule,
        workspace=workspace,
        output=output,
        lse=lse,
        launch_pdl=launch_pdl,
    )
