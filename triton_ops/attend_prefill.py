# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk's queries over everything older than the chunk, straight from INT2 pages and BF16 windows.

The result is partial: (output, lse), to be merged with causal attention over the chunk's own keys
(`reference.attend` is the sum of both). Per query at position q, with q0 the chunk's first position, and a = q0 for
``exact``, a = q for ``invariant``:

    token t < q0     its window block if t < sink or t > a - recent, and the block is not null; else its page
    token t >= q0    ``exact``: not here. ``invariant``: its page if sink <= t <= q - recent, its window block if
                     t < sink and t <= q - recent; the rest is the caller's attention with a sliding window of `recent`

Two launches. `_prepare_kernel` computes the slots' weights q_hat = q @ key_query, float16 with a power of two per row.
`_attend_kernel` runs flash attention for a tile of (token, query head of one KV head) rows:

    page       S = q_hat . s_k (c - 1.5) + q . mean                  keys and values become float16 in registers
               O += p (s_v c + z_v)                                  in the value's rotated basis
    un-rotate  O = O @ value_rotation^T + value_mean sum(p)          once, with float16 halves of both factors
    window     S = q . k, O += p v                                   BF16 keys and values as the model made them

Pages wholly visible to every row of the tile run unmasked; the page with the sink, and pages that some rows read as
BF16, run the same code with a mask. A page is dequantized in registers, so a long history needs no memory.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops.codec import BATCH_ARGUMENTS, LayerCodec, check_cache
from triton_ops.demote import value_token
from triton_ops.layout import PageLayout
from triton_ops.prepare import LOG2_E
from triton_ops.soft_cap import capped, soft_cap_log2

LOWEST = tl.constexpr(-1.0e30)
"""Running maximum before the first key: finite, so that nothing subtracts infinity from infinity."""


@triton.jit
def _tile(query_start_loc, num_requests, index, TILE: tl.constexpr, BLOCK_REQUESTS: tl.constexpr):
    """(request, tile within it) number ``index`` of the tiles of TILE tokens; request -1 past the last."""
    request = -1
    tile = 0
    before = 0
    for start in range(0, num_requests, BLOCK_REQUESTS):
        r = start + tl.arange(0, BLOCK_REQUESTS)
        valid = r < num_requests
        begin = tl.load(query_start_loc + r, mask=valid, other=0)
        end = tl.load(query_start_loc + r + 1, mask=valid, other=0)
        count = (end - begin + TILE - 1) // TILE
        upto = before + tl.cumsum(count)
        here = (upto > index) & (upto - count <= index)
        request += tl.sum(tl.where(here, r + 1, 0))
        tile += tl.sum(tl.where(here, index - (upto - count), 0))
        before += tl.sum(count)
    return request, tile


# ------------------------------------------------------------------------------------------ codes to float16


def _unpack_assembly(high: bool, centred: bool) -> str:
    """PTX for `_planes`: one 32-bit register of four code bytes in $4, two planes of four float16 in $0 to $3.

    A code's two bits become the lowest mantissa bits of a float16 whose exponent makes them count 1 and 2: 256 + c at
    bits 2 and 3, 64 + c at bits 4 and 5, 16 + c at bits 6 and 7. Subtracting that base, and 1.5, is exact.
    """
    bases = {2: 0x5C00, 4: 0x5400, 6: 0x4C00}  # float16 256, 64, 16: their last mantissa bits are 1/4, 1/16, 1/64

    def plane(bit: int, first: int) -> str:
        base = bases[bit] * 0x10001
        shift = base + (3 << (bit - 1)) * 0x10001 * centred
        steps = [
            f"lop3.b32 {x}, {x0}, {(3 << bit) * 0x10001:#x}, {base:#x}, 0xEA;" for x, x0 in (("x", "a"), ("y", "b"))
        ]
        steps += [f"mov.b32 m, {shift:#x};", f"sub.f16x2 ${first}, x, m;", f"sub.f16x2 ${first + 1}, y, m;"]
        return "\n".join(steps)

    spread = "prmt.b32 a, $4, 0, 0x4140;\nprmt.b32 b, $4, 0, 0x4342;\n"  # a byte to each 16 bits
    if high:
        body = plane(4, 0) + plane(6, 2)
    else:
        body = plane(2, 2) + "shl.b32 a, a, 2;\nshl.b32 b, b, 2;\n" + plane(2, 0)
    return "{\n.reg .b32 a, b, m, x, y;\n" + spread + body + "\n}"


UNPACK_LOW = tl.constexpr(_unpack_assembly(False, False))
UNPACK_LOW_CENTRED = tl.constexpr(_unpack_assembly(False, True))
UNPACK_HIGH = tl.constexpr(_unpack_assembly(True, False))
UNPACK_HIGH_CENTRED = tl.constexpr(_unpack_assembly(True, True))


@triton.jit
def _unpack(x, assembly: tl.constexpr):
    return tl.inline_asm_elementwise(
        assembly, "=&r,=&r,=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def _planes(x, HIGH: tl.constexpr, CENTRED: tl.constexpr, ASM: tl.constexpr):
    """Two planes of code bytes as float16 c, or c - 1.5 with CENTRED: planes 0 and 1, or with HIGH 2 and 3."""
    if ASM:
        if HIGH:
            if CENTRED:
                return _unpack(x, UNPACK_HIGH_CENTRED)
            else:
                return _unpack(x, UNPACK_HIGH)
        else:
            if CENTRED:
                return _unpack(x, UNPACK_LOW_CENTRED)
            else:
                return _unpack(x, UNPACK_LOW)
    else:
        shift: tl.constexpr = 4 if HIGH else 0
        centre: tl.constexpr = 1.5 if CENTRED else 0.0
        low = ((x >> shift) & 3).to(tl.float16) - centre
        high = ((x >> (shift + 2)) & 3).to(tl.float16) - centre
        return low, high


@triton.jit
def _fragment(x, ROWS: tl.constexpr):
    """[ROWS, 32] (row, byte column) of a code section's bytes in memory order (layout.py)."""
    return x.reshape([ROWS // 16, 8, 4, 2, 2, 4]).trans(0, 4, 1, 3, 2, 5).reshape([ROWS, 32])


@triton.jit
def _key_fragment(x, ROWS: tl.constexpr):
    """`_fragment` of keys, rows in the order of `value_token`."""
    return x.reshape([ROWS // 16, 8, 4, 2, 2, 4]).trans(0, 1, 4, 3, 2, 5).reshape([ROWS, 32])


@triton.jit
def _key_tile(
    page_bytes,
    HALF: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CENTRED: tl.constexpr,
    ASM: tl.constexpr,
):
    """[BLOCK_N, d] float16 codes of the page's tokens from BLOCK_N * HALF on, in the order of `value_token`;
    columns are slots."""
    if HEAD_SIZE == 64:  # a byte holds slots c, 32 + c of tokens row, row + 64
        x = _key_fragment(tl.load(page_bytes + tl.arange(0, 2048)), 64)
        if BLOCK_N == 64:
            low, high = _planes(x, HALF == 1, CENTRED, ASM)
            return tl.join(low, high).trans(0, 2, 1).reshape([64, 64])
        else:
            a, b = _planes(x, False, CENTRED, ASM)
            c, e = _planes(x, True, CENTRED, ASM)
            tile = tl.join(tl.join(a, c), tl.join(b, e))  # [row, column, token >> 6, slot >> 5]
            return tile.trans(2, 0, 3, 1).reshape([128, 64])
    else:
        # d / 128 sections of 128 rows; this tile takes BLOCK_N rows of each.
        i = tl.arange(0, BLOCK_N * HEAD_SIZE // 4)
        at = i // (BLOCK_N * 32) * 4096 + HALF * (BLOCK_N * 32) + i % (BLOCK_N * 32)
        x = _key_fragment(tl.load(page_bytes + at), BLOCK_N * HEAD_SIZE // 128)
        a, b = _planes(x, False, CENTRED, ASM)
        c, e = _planes(x, True, CENTRED, ASM)
        tile = tl.join(tl.join(a, c), tl.join(b, e)).reshape([HEAD_SIZE // 128, BLOCK_N, 32, 4])
        return tile.trans(1, 0, 3, 2).reshape([BLOCK_N, HEAD_SIZE])


@triton.jit
def _value_tile(x, HALF: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr):
    """[d, BLOCK_N] float16 codes of the page's tokens from BLOCK_N * HALF on, in the order of `value_token`, from
    [d, 32] bytes."""
    if BLOCK_N == 64:
        low, high = _planes(x, HALF == 1, False, ASM)
        return tl.join(low, high).trans(0, 2, 1).reshape([HEAD_SIZE, 64])
    else:
        a, b = _planes(x, False, False, ASM)
        c, e = _planes(x, True, False, ASM)
        tile = tl.join(tl.join(a, c), tl.join(b, e)).reshape([HEAD_SIZE, 32, 4])
        return tile.trans(0, 2, 1).reshape([HEAD_SIZE, 128])


@triton.jit
def _metadata(page_bytes, HALF: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] float16 of a metadata vector, tokens from BLOCK_N * HALF on, in the order of `value_token`."""
    EACH: tl.constexpr = BLOCK_N // 4
    i = tl.arange(0, BLOCK_N)
    x = tl.load(page_bytes.to(tl.pointer_type(tl.float16)) + i // EACH * 32 + HALF * EACH + i % EACH)
    return x.reshape([4, EACH // 4, 2, 2]).trans(1, 0, 3, 2).reshape([BLOCK_N])


# ------------------------------------------------------------------------------------------ queries


@triton.jit(do_not_specialize=["num_tokens", "factor_stride"])
def _prepare_kernel(
    query,
    query_hat,
    factors,
    key_query,
    key_mean,
    scale_log2,
    num_tokens,
    query_stride_token,
    query_stride_head,
    hat_stride_token,
    factor_stride,
    GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < num_tokens * GROUPS
    token = (row // GROUPS).to(tl.int64)
    q_head = head * GROUPS + row % GROUPS
    q_row = query + token * query_stride_token + q_head * query_stride_head
    slot = tl.arange(0, HEAD_SIZE)
    hat = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    shared = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, HEAD_SIZE, BLOCK_K):
        dims = start + tl.arange(0, BLOCK_K)
        q = tl.load(q_row[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        matrix = tl.load(key_query + (head * HEAD_SIZE + dims)[:, None] * HEAD_SIZE + slot[None, :])
        hat = tl.dot(q, matrix, hat, input_precision="tf32x3")
        if ZERO_PAGE == 0:
            shared += tl.sum(q * tl.load(key_mean + head * HEAD_SIZE + dims)[None, :], 1)
    # The power of two that brings the row's largest weight into [2^14, 2^15): float16 then loses nothing that counts.
    largest = tl.maximum(tl.max(tl.abs(hat), 1), 1.0e-20)
    unit = ((largest.to(tl.int32, bitcast=True) & 0x7F800000) - (14 << 23)).to(tl.float32, bitcast=True)
    inverse = 1.0 / unit
    target = query_hat + token * hat_stride_token + q_head * HEAD_SIZE
    tl.store(target[:, None] + slot[None, :], (hat * inverse[:, None]).to(tl.float16), mask=valid[:, None])
    factor = factors + token * (NUM_HEADS * GROUPS) + q_head
    tl.store(factor, unit * scale_log2, mask=valid)
    tl.store(factor + factor_stride, shared * scale_log2, mask=valid)


# ------------------------------------------------------------------------------------------ pages


@triton.jit
def _softmax(acc, m, total, s, amplitude, offset, SOFT_CAP: tl.constexpr):
    """One online softmax step: probabilities of logits ``amplitude * s + offset``, and the state rescaled to them."""
    if SOFT_CAP > 0:
        # -inf is a key that is not seen.
        logit = capped(s * amplitude[:, None] + offset[:, None], SOFT_CAP)
        s = tl.where(s == float("-inf"), s, logit)
        amplitude = tl.full(amplitude.shape, 1.0, tl.float32)
        offset = tl.zeros_like(offset)
    new_m = tl.maximum(m, tl.max(s, 1) * amplitude + offset)
    p = tl.math.exp2(s * amplitude[:, None] + (offset - new_m)[:, None])
    alpha = tl.math.exp2(m - new_m)
    return p, acc * alpha[:, None], new_m, total * alpha + tl.sum(p, 1)


@triton.jit
def _history(
    acc,
    m,
    total,
    query,
    query_valid,
    query_hat,
    amplitude,
    offset,
    pages,
    page_row,
    page_stride_block,
    window_row,
    anchor,
    first_position,
    first_page,
    skip_from,
    skip,
    num_pages,
    sink,
    recent,
    limit,
    scale_log2,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Add ``num_pages`` pages to the state; number i is page first_page + i, plus ``skip`` from ``skip_from`` on."""
    BLOCK_M: tl.constexpr = query_hat.shape[0]
    dims = tl.arange(0, HEAD_SIZE)
    # The mean keys of 16 pages are multiplied with the queries at a time.
    member = tl.arange(0, 16)
    means = tl.zeros([BLOCK_M, 16], tl.float32)
    for i in tl.range(0, num_pages, num_stages=STAGES):
        if ZERO_PAGE:
            if i % 16 == 0:
                number = i + member
                number = first_page + number + tl.where(number >= skip_from, skip, 0)
                block = tl.load(page_row + number, mask=i + member < num_pages, other=0).to(tl.int64)
                mean = (pages + block * page_stride_block + KEY_ZERO).to(tl.pointer_type(tl.float16))
                mean = tl.load(mean[:, None] + dims[None, :], mask=(i + member < num_pages)[:, None], other=0.0)
                q = tl.load(query, mask=query_valid, other=0.0).to(tl.float16)  # again, to keep registers free
                means = tl.dot(q, mean.trans(1, 0)) * scale_log2  # [BLOCK_M, 16] logits of the mean keys
            offset = tl.sum(tl.where((member == i % 16)[None, :], means, 0.0), 1)
        page = first_page + i + tl.where(i >= skip_from, skip, 0)
        page_bytes = pages + tl.load(page_row + page).to(tl.int64) * page_stride_block
        value_bytes = _fragment(tl.load(page_bytes + VALUE_CODES + tl.arange(0, 32 * HEAD_SIZE)), HEAD_SIZE)  # [d, 32]
        for half in tl.static_range(128 // BLOCK_N):
            scale = _metadata(page_bytes + KEY_SCALE, half, BLOCK_N)
            key = _key_tile(page_bytes, half, HEAD_SIZE, BLOCK_N, ZERO_PAGE, ASM) * scale[:, None]  # [BLOCK_N, d]
            if ZERO_PAGE == 0:
                key += _metadata(page_bytes + KEY_ZERO, half, BLOCK_N)[:, None]
            s = tl.dot(query_hat, key.trans(1, 0))
            if MASKED:
                token = page * 128 + half * BLOCK_N + value_token(tl.arange(0, BLOCK_N))
                old = (token < first_position) & (token >= sink)
                missing = old & (tl.load(window_row + token // WINDOW_BLOCK, mask=old, other=1) == 0)
                inside = (token >= sink) & (token < limit)
                far = token[None, :] <= anchor[:, None] - recent
                s = tl.where(inside[None, :] & (far | missing[None, :]), s, float("-inf"))
            p, acc, m, total = _softmax(acc, m, total, s, amplitude, offset, SOFT_CAP)
            scale = _metadata(page_bytes + VALUE_SCALE, half, BLOCK_N)
            zero = _metadata(page_bytes + VALUE_ZERO, half, BLOCK_N)
            value = _value_tile(value_bytes, half, HEAD_SIZE, BLOCK_N, ASM) * scale[None, :] + zero[None, :]
            acc = tl.dot(p.to(tl.float16), value.trans(1, 0), acc)  # value: [d, BLOCK_N]
    return acc, m, total


@triton.jit
def _halves(x):
    """float32 as the sum of two float16, 22 bits of mantissa."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _unrotate_columns(high, low, rotation, FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """COUNT columns from FIRST on of (high + low) @ rotation^T, rotation [d, d] float32."""
    dims = tl.arange(0, HEAD_SIZE)
    column = FIRST + tl.arange(0, COUNT)
    r_high, r_low = _halves(tl.load(rotation + column[None, :] * HEAD_SIZE + dims[:, None]))  # [d, COUNT]
    out = tl.dot(high, r_high)
    out = tl.dot(low, r_high, out)
    return tl.dot(high, r_low, out)


@triton.jit
def _unrotate(history, rotation, HEAD_SIZE: tl.constexpr):
    """history @ rotation^T for [rows, d] float32 of ordinary size; error about 2^-21 relative."""
    high, low = _halves(history)
    if HEAD_SIZE <= 128:
        return _unrotate_columns(high, low, rotation, 0, HEAD_SIZE, HEAD_SIZE)
    else:  # by 64 columns, for a whole matrix does not fit in shared memory
        a = _unrotate_columns(high, low, rotation, 0, 64, HEAD_SIZE)
        b = _unrotate_columns(high, low, rotation, 64, 64, HEAD_SIZE)
        c = _unrotate_columns(high, low, rotation, 128, 64, HEAD_SIZE)
        e = _unrotate_columns(high, low, rotation, 192, 64, HEAD_SIZE)
        out = tl.join(tl.join(a, c), tl.join(b, e))  # [rows, 64, column >> 7, (column >> 6) & 1]
        return out.trans(0, 2, 3, 1).reshape([history.shape[0], HEAD_SIZE])


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    """acc + a @ b with float32 sums; the interpreter multiplies bfloat16 only after widening it."""
    if ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _windows(
    acc,
    m,
    total,
    query,
    amplitude,
    windows,
    window_row,
    window_stride_block,
    window_stride_token,
    anchor,
    first_position,
    begin,
    end,
    sink,
    recent,
    HEAD_SIZE: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INVARIANT: tl.constexpr,
    ASM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Add the BF16 tokens begin <= t < end to the state."""
    dims = tl.arange(0, HEAD_SIZE)
    for start in tl.range(begin, end, BLOCK_W, num_stages=1):
        token = start + tl.arange(0, BLOCK_W)
        block = tl.load(window_row + token // WINDOW_BLOCK, mask=token < end, other=0).to(tl.int64)
        here = (token < end) & (block != 0)
        at = windows + block * window_stride_block + token % WINDOW_BLOCK * window_stride_token
        k = tl.load(at[:, None] + dims[None, :], mask=here[:, None], other=0.0)
        v = tl.load(at[:, None] + (HEAD_SIZE + dims)[None, :], mask=here[:, None], other=0.0)
        s = _dot(query, k.trans(1, 0), tl.zeros([query.shape[0], BLOCK_W], tl.float32), ASM)
        far = token[None, :] <= anchor[:, None] - recent
        near = (far == 0) | (token < sink)[None, :]
        if INVARIANT:  # a token of the step is read here only when the caller's sliding window no longer holds it
            near = near & (far | (token < first_position)[None, :])
        s = tl.where(here[None, :] & near, s, float("-inf"))
        p, acc, m, total = _softmax(acc, m, total, s, amplitude, tl.zeros_like(m), SOFT_CAP)
        # Two bfloat16 halves of a probability: these few tokens carry much of the mass, a second product costs little.
        high = p.to(v.dtype)
        acc = _dot(high, v, acc, ASM)
        acc = _dot((p - high.to(tl.float32)).to(v.dtype), v, acc, ASM)
    return acc, m, total


@triton.jit(do_not_specialize=["num_requests", "sink", "recent", "factor_stride", "lse_stride_head", *BATCH_ARGUMENTS])
def _attend_kernel(
    query,
    query_hat,
    factors,
    out,
    lse,
    pages,
    windows,
    page_table,
    window_table,
    query_start_loc,
    seq_lens,
    value_rotation,
    value_mean,
    scale_log2,
    num_requests,
    sink,
    recent,
    query_stride_token,
    query_stride_head,
    hat_stride_token,
    factor_stride,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    page_stride_block,
    page_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    page_table_stride,
    window_table_stride,
    GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    INVARIANT: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    # Axis 0: tiles of tokens of all requests. Axis 1: KV heads. Neighbouring programs read the same pages.
    TILE: tl.constexpr = BLOCK_M // GROUPS
    request, tile = _tile(query_start_loc, num_requests, tl.program_id(0), TILE, BLOCK_REQUESTS)
    if request >= 0:
        head = tl.program_id(1)
        first_token = tl.load(query_start_loc + request)
        new = tl.load(query_start_loc + request + 1) - first_token
        length = tl.load(seq_lens + request)
        first_position = length - new

        row = tl.arange(0, BLOCK_M)
        index = tile * TILE + row // GROUPS  # of the token in the chunk
        valid = (row < TILE * GROUPS) & (index < new)
        highest = tl.minimum(first_position + (tile + 1) * TILE, length) - 1
        # `anchor` is the position from which a row counts its recent tokens, `lowest` the tile's lowest.
        if INVARIANT:
            anchor = first_position + index
            lowest = first_position + tile * TILE
        else:
            anchor = first_position + tl.zeros([BLOCK_M], tl.int32)
            lowest = first_position
        token = (first_token + index).to(tl.int64)
        q_head = head * GROUPS + row % GROUPS
        dims = tl.arange(0, HEAD_SIZE)

        # History holds tokens below `limit`: of earlier steps, of complete pages; every row reads pages below `whole`.
        limit = first_position
        if INVARIANT:
            limit = tl.maximum(limit, highest - recent + 1)
        limit = tl.minimum(limit, length // 128 * 128)
        first_whole = (sink + 127) // 128
        first_page = sink // 128
        whole = tl.maximum(tl.minimum(limit, lowest - recent + 1) // 128, first_whole)
        before = first_whole - first_page
        after = tl.maximum((limit + 127) // 128 - whole, 0)
        before = tl.where(limit > sink, before, 0)

        factor = factors + token * (NUM_HEADS * GROUPS) + q_head
        amplitude = tl.load(factor, mask=valid, other=1.0)
        offset = tl.load(factor + factor_stride, mask=valid, other=0.0)  # q . key_mean; overwritten by page means
        hat = tl.load(
            query_hat + (token * hat_stride_token + q_head * HEAD_SIZE)[:, None] + dims[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        q = query + (token * query_stride_token + q_head * query_stride_head)[:, None] + dims[None, :]

        page_row = page_table + request.to(tl.int64) * page_table_stride
        window_row = window_table + request.to(tl.int64) * window_table_stride
        pages += head.to(tl.int64) * page_stride_head
        windows += head.to(tl.int64) * window_stride_head

        acc = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        m = tl.full([BLOCK_M], LOWEST, tl.float32)
        acc, m, total = _history(
            acc, m, total, q, valid[:, None], hat, amplitude, offset, pages, page_row, page_stride_block, window_row,
            anchor, first_position, first_whole, 0, 0, whole - first_whole, sink, recent, limit, scale_log2,
            HEAD_SIZE, ZERO_PAGE, False, WINDOW_BLOCK, BLOCK_N, STAGES, ASM,
            VALUE_CODES, KEY_SCALE, VALUE_SCALE, VALUE_ZERO, KEY_ZERO, SOFT_CAP,
        )  # fmt: skip
        acc, m, total = _history(
            acc, m, total, q, valid[:, None], hat, amplitude, offset, pages, page_row, page_stride_block, window_row,
            anchor, first_position, first_whole - before, before, whole - first_whole, before + after,
            sink, recent, limit, scale_log2,
            HEAD_SIZE, ZERO_PAGE, True, WINDOW_BLOCK, BLOCK_N, 1, ASM,
            VALUE_CODES, KEY_SCALE, VALUE_SCALE, VALUE_ZERO, KEY_ZERO, SOFT_CAP,
        )  # fmt: skip

        # Normalised for the rotation, so that it has the size of a value whatever the history's length.
        inverse = 1.0 / tl.where(total > 0, total, 1.0)
        acc = _unrotate(acc * inverse[:, None], value_rotation + head * HEAD_SIZE * HEAD_SIZE, HEAD_SIZE)
        acc = (acc + tl.load(value_mean + head * HEAD_SIZE + dims)[None, :]) * total[:, None]

        q = tl.load(q, mask=valid[:, None], other=0.0)
        unit = tl.full([BLOCK_M], 1.0, tl.float32) * scale_log2
        limit = first_position
        if INVARIANT:
            limit = length
        acc, m, total = _windows(
            acc, m, total, q, unit, windows, window_row, window_stride_block, window_stride_token, anchor,
            first_position, 0, tl.minimum(sink, limit), sink, recent,
            HEAD_SIZE, WINDOW_BLOCK, BLOCK_W, INVARIANT, ASM, SOFT_CAP,
        )  # fmt: skip
        acc, m, total = _windows(
            acc, m, total, q, unit, windows, window_row, window_stride_block, window_stride_token, anchor,
            first_position, tl.maximum(sink, lowest - recent + 1), first_position, sink, recent,
            HEAD_SIZE, WINDOW_BLOCK, BLOCK_W, INVARIANT, ASM, SOFT_CAP,
        )  # fmt: skip

        seen = total > 0
        total = tl.where(seen, total, 1.0)
        acc = acc * (1.0 / total)[:, None]
        at = out + (token * out_stride_token + q_head * out_stride_head)[:, None] + dims[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=valid[:, None])
        natural = tl.where(seen, (m + tl.math.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + q_head.to(tl.int64) * lse_stride_head + token, natural, mask=valid)


# ------------------------------------------------------------------------------------------ launchers


def tile_bound(*, num_tokens: int, num_requests: int, tile: int) -> int:
    """Most tiles of ``tile`` tokens that the requests of a step can have: what the grid covers."""
    return min(num_tokens, (num_tokens + (tile - 1) * num_requests) // tile)


def launch_shape(*, head_size: int, groups: int) -> tuple[int, int, int]:
    """(rows per program, tokens per inner step, warps). A row is one query head of one token.

    Two programs of four warps share a multiprocessor, so that one multiplies while the other dequantizes.
    """
    if head_size == 256:
        return 64, 64, 8
    return max(64, triton.next_power_of_2(groups)), 128, 4


def workspace_shapes(
    *, num_tokens: int, num_query_heads: int, head_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two workspaces: float16 slot weights, float32 row factors."""
    return (num_tokens, num_query_heads, head_size), (2, num_tokens, num_query_heads)


def attend_prefill(
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
    num_tokens: int,
    num_requests: int,
    prefill: Literal["exact", "invariant"] = "exact",
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: tuple[Tensor, Tensor] | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 1,
    max_registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to everything older than the chunk; `append` and `demote` of the step come first.

    Args:
        query: [T, H * G, d] bfloat16 or float16, last axis contiguous.
        pages: [N, H, page_bytes] uint8.
        windows: [N, H, block_size, 2 d] in the query's dtype.
        page_table: [R, max_pages] int32.
        window_table: [R, max_blocks] int32, 0 = null block.
        query_start_loc: [R + 1] int32 first token of each request in the step.
        seq_lens: [R] int32 tokens of each request, this step's included.
        codec: the layer's codec on the same device, contiguous (`LayerCodec.to`).
        layout: the page layout; ``zero`` as the codec's.
        scale: softmax scale.
        sink: tokens kept in BF16 at the start, at most 128.
        recent: tokens kept in BF16 at the end, at least 128.
        num_tokens: T, or an upper bound; rows of no request are left untouched.
        num_requests: R.
        prefill: the rule for tokens of the same step (module docstring).
        soft_cap: c > 0 turns every scaled logit x into c tanh(x / c) (Gemma 2); 0 leaves logits as they are.
        out: [T, H * G, d] float32, float16 or bfloat16 to write to; by default a new float32 tensor.
        lse: [H * G, T] float32 to write to; by default a new tensor.
        workspace: float16 and float32 tensors of `workspace_shapes`; by default new ones.
        block_m: rows per program, a power of two of at least 16; by default `launch_shape`, as the next three.
        block_n: tokens of a page per inner step, 64 or 128.
        num_warps: warps per program.
        num_stages: pipeline depth of the loop over pages.
        max_registers: cap on registers per thread.

    Returns:
        (out, lse): partial attention, natural-log lse; 0 and -inf for queries that see nothing older.

    Raises:
        ValueError: shapes, dtypes or codec do not agree, or the segment lengths are out of range.

    """
    _, q_heads, d = query.shape
    heads = codec.num_kv_heads
    if q_heads % heads or codec.head_size != d or layout.head_size != d:
        raise ValueError(
            f"query {tuple(query.shape)}, a codec of {heads} heads of size {codec.head_size} and pages of head size "
            f"{layout.head_size} do not agree"
        )
    check_cache(pages=pages, windows=windows, codec=codec, layout=layout)
    if query.dtype not in (torch.bfloat16, torch.float16) or windows.dtype != query.dtype:
        raise ValueError(f"query is {query.dtype} and windows {windows.dtype}; both must be bfloat16 or both float16")
    if query.stride(2) != 1 or windows.stride(3) != 1 or pages.stride(2) != 1:
        raise ValueError("the last axis of query, windows and pages must be contiguous")
    if not 0 <= sink <= 128 or recent < 128:
        raise ValueError(f"sink={sink} must be at most 128 and recent={recent} at least 128")
    groups = q_heads // heads
    if out is None:
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if lse is None:
        lse = torch.empty(q_heads, query.shape[0], dtype=torch.float32, device=query.device)
    if workspace is None:
        shapes = workspace_shapes(num_tokens=num_tokens, num_query_heads=q_heads, head_size=d)
        workspace = (
            torch.empty(shapes[0], dtype=torch.float16, device=query.device),
            torch.empty(shapes[1], dtype=torch.float32, device=query.device),
        )
    query_hat, factors = workspace
    if num_tokens == 0 or num_requests == 0:
        return out, lse
    chosen = launch_shape(head_size=d, groups=groups)
    block_m, block_n, warps = (mine or rule for mine, rule in zip((block_m, block_n, num_warps), chosen, strict=True))
    if block_m < groups:
        raise ValueError(f"block_m={block_m} rows cannot hold the {groups} query heads of one token")
    zero_page = codec.zero == "page"
    _prepare_kernel[(triton.cdiv(num_tokens * groups, 64), heads)](
        query,
        query_hat,
        factors,
        codec.key_query,
        codec.key_mean,
        scale * LOG2_E,
        num_tokens,
        query.stride(0),
        query.stride(1),
        query_hat.stride(0),
        factors.stride(0),
        GROUPS=groups,
        NUM_HEADS=heads,
        HEAD_SIZE=d,
        ZERO_PAGE=zero_page,
        BLOCK_M=64,
        BLOCK_K=32,
        num_warps=8 if d == 256 else 4,
        num_stages=2,
    )
    options = {} if max_registers is None else {"maxnreg": max_registers}
    tiles = tile_bound(num_tokens=num_tokens, num_requests=num_requests, tile=block_m // groups)
    _attend_kernel[(tiles, heads)](
        query,
        query_hat,
        factors,
        out,
        lse,
        pages,
        windows,
        page_table,
        window_table,
        query_start_loc,
        seq_lens,
        codec.value_rotation,
        codec.value_mean,
        scale * LOG2_E,
        num_requests,
        sink,
        recent,
        query.stride(0),
        query.stride(1),
        query_hat.stride(0),
        factors.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        pages.stride(0),
        pages.stride(1),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        page_table.stride(0),
        window_table.stride(0),
        GROUPS=groups,
        NUM_HEADS=heads,
        HEAD_SIZE=d,
        ZERO_PAGE=zero_page,
        INVARIANT=prefill == "invariant",
        WINDOW_BLOCK=windows.shape[2],
        BLOCK_REQUESTS=256,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_W=64,
        STAGES=num_stages,
        ASM=query.is_cuda,
        VALUE_CODES=layout.value_codes,
        KEY_SCALE=layout.key_scale,
        VALUE_SCALE=layout.value_scale,
        VALUE_ZERO=layout.value_zero,
        KEY_ZERO=layout.key_zero,
        SOFT_CAP=soft_cap_log2(soft_cap),
        num_warps=warps,
        num_stages=num_stages,
        **options,
    )
    return out, lse
