# SPDX-License-Identifier: Apache-2.0
"""Quantize and pack every page completed in the step (`reference.demote`), one launch for all requests of a layer.

A program makes the codes of some tokens of one page, for one KV head, keys or values:

    gather     a token of this step from the step's tensors, an earlier one from its window block
    project    keys: (k - page mean) @ key_encode; values: (v - value_mean) @ value_rotation      float32
    scale      row scale (and zero) rounded to float16 first, then used
    code       clamp(floor(x / scale + offset)), round half up; keys with ``zero="page"`` keep their slot's digit
    pack       sixteen 2-bit codes to a 32-bit word of the page (layout.py); words and scales are all it writes

Columns of the matrix (keys) or tokens (values) are loaded in such an order that the sixteen codes of a word lie next
to each other. Division and square root are IEEE and nothing is contracted to fused multiply-adds, so that equal
projections give equal bytes on every device.

The grid is fixed by the numbers of tokens and requests (CUDA graphs): a program finds its page on the device and
ends at once if there is none.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from triton_ops.append import key_value_arguments
from triton_ops.codec import BATCH_ARGUMENTS, LayerCodec, Quantizer, check_cache
from triton_ops.layout import PAGE_TOKENS, PageLayout

MIN_SCALE = tl.constexpr(2.0**-14)
MAX_SCALE = tl.constexpr(65504.0)
TINY = tl.constexpr(1e-30)
PART_TOKENS = 32
"""Tokens of a page per program where few pages are expected: least latency."""


@triton.jit
def value_token(index):
    """Token whose codes stand at ``index`` of a row of values, by plane and then by byte column (layout.py)."""
    return (index & ~15) + 8 * (index & 1) + ((index >> 1) & 7)


@triton.jit
def _metadata_position(token):
    """`layout.metadata_position` in a kernel."""
    return ((token >> 1) & 3) * 32 + (token >> 3) * 2 + (token & 1)


@triton.jit
def completed_page(query_start_loc, seq_lens, num_requests, index, BLOCK_REQUESTS: tl.constexpr):
    """(request, page) number ``index`` of the pages completed in the step; request -1 past the last."""
    request = -1
    page = 0
    before = 0
    for start in range(0, num_requests, BLOCK_REQUESTS):
        r = start + tl.arange(0, BLOCK_REQUESTS)
        valid = r < num_requests
        length = tl.load(seq_lens + r, mask=valid, other=0)
        begin = tl.load(query_start_loc + r, mask=valid, other=0)
        end = tl.load(query_start_loc + r + 1, mask=valid, other=0)
        first = (length - (end - begin)) // 128
        count = length // 128 - first
        upto = before + tl.cumsum(count)
        here = (upto > index) & (upto - count <= index)
        request += tl.sum(tl.where(here, r + 1, 0))
        page += tl.sum(tl.where(here, first + index - (upto - count), 0))
        before += tl.sum(count)
    return request, page


@triton.jit
def _gather(step, windows, step_offset, in_step, window_offset, dims):
    """[tokens, dims] float32 of the step's tensor where ``in_step``, of the window blocks elsewhere."""
    mask = in_step[:, None] & (dims >= 0)[None, :]
    new = tl.load(step + step_offset[:, None] + dims[None, :], mask=mask, other=0.0)
    mask = (in_step == 0)[:, None] & (dims >= 0)[None, :]
    old = tl.load(windows + window_offset[:, None] + dims[None, :], mask=mask, other=0.0)
    # A token passes through the window's type whichever way it comes.
    return tl.where(in_step[:, None], new.to(windows.dtype.element_ty), old).to(tl.float32)


@triton.jit
def _locate(
    token,
    position,
    first_position,
    first_token,
    window_row,
    window_stride_block,
    window_stride_token,
    step_stride_token,
    WINDOW_BLOCK: tl.constexpr,
):
    """Of the page's tokens: is it in the step, its offset in the step's tensor, its offset in the windows."""
    where = position + token
    in_step = where >= first_position
    block = tl.load(window_row + where // WINDOW_BLOCK, mask=in_step == 0, other=0).to(tl.int64)
    step_offset = (first_token + where - first_position).to(tl.int64) * step_stride_token
    window_offset = block * window_stride_block + (where % WINDOW_BLOCK) * window_stride_token
    return in_step, step_offset, window_offset


@triton.jit
def _kth_smallest(x, kth):
    """[rows] the kth (0-based) smallest of the non-negative [rows, columns] float32, exactly, by its bit pattern."""
    bits = x.to(tl.int32, bitcast=True)
    found = tl.zeros([x.shape[0]], tl.int32)
    for i in tl.static_range(31):
        low = 1 << (30 - i)
        below = tl.sum((bits < (found + low)[:, None]).to(tl.int32), 1)
        found = tl.where(below <= kth, found + low, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _affine(x, constant, kth, GAUSS: tl.constexpr, CLIP: tl.constexpr):
    """Codes [rows, d] float32 0..3, scale and zero [rows] float16 of rows [rows, d] (`reference._affine`)."""
    d: tl.constexpr = x.shape[1]
    if GAUSS:
        mean = tl.sum(x, 1) / d
        centred = x - mean[:, None]
        energy = tl.sum(centred * centred, 1)
        step = tl.maximum(constant * tl.sqrt_rn(energy / d), MIN_SCALE)
        level = tl.div_rn(centred, step[:, None] + tl.zeros_like(x)) + 2.0
        level = tl.minimum(tl.maximum(tl.floor(level), 0.0), 3.0)
        covered = tl.maximum(tl.sum(centred * (level - 1.5), 1), TINY)
        scale = tl.minimum(tl.maximum(tl.div_rn(energy, covered), MIN_SCALE), MAX_SCALE).to(tl.float16)
        zero = (mean - 1.5 * scale.to(tl.float32)).to(tl.float16)
    else:
        if CLIP:
            limit = _kth_smallest(tl.abs(x), kth)[:, None]
            x = tl.minimum(tl.maximum(x, -limit), limit)
        low = tl.min(x, 1)
        step = tl.div_rn(tl.max(x, 1) - low, 3.0)
        scale = tl.minimum(tl.maximum(step, MIN_SCALE), MAX_SCALE).to(tl.float16)
        zero = low.to(tl.float16)
        level = tl.div_rn(x - zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None] + tl.zeros_like(x))
        level = tl.minimum(tl.maximum(tl.floor(level + 0.5), 0.0), 3.0)
    return level, scale, zero


@triton.jit
def _word_index(row, group):
    """32-bit word of a code section that holds byte columns 4 * group to 4 * group + 3 of a row (layout.py)."""
    return (row >> 4) * 128 + (row & 7) * 16 + (group & 3) * 4 + (group >> 2) * 2 + ((row >> 3) & 1)


@triton.jit
def _demote_keys(
    key,
    windows,
    page_bytes,
    position,
    first_position,
    first_token,
    window_row,
    window_stride_block,
    window_stride_token,
    step_stride_token,
    encode,
    levels,
    digit,
    weight,
    mean,
    constant,
    kth,
    sink,
    part,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    GAUSS: tl.constexpr,
    CLIP: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr,
):
    # Rows: this part's tokens. Head size 64 packs tokens t and t + 64 into one word: they are neighbouring rows.
    row = tl.arange(0, TOKENS)
    token = part * TOKENS + row
    if HEAD_SIZE == 64:
        token = part * (TOKENS // 2) + (row >> 1) + 64 * (row & 1)
    # Columns: the slots in the order (group of 128 slots, byte column / 4, plane, byte column % 4).
    column = tl.arange(0, HEAD_SIZE)
    if HEAD_SIZE == 64:
        slot = 32 * ((column >> 2) & 1) + 4 * (column >> 3) + (column & 3)
    else:
        slot = (column & -128) + 32 * ((column >> 2) & 3) + 4 * ((column >> 4) & 7) + (column & 3)

    in_step, step_offset, window_offset = _locate(
        token, position, first_position, first_token, window_row, window_stride_block, window_stride_token,
        step_stride_token, WINDOW_BLOCK,
    )  # fmt: skip
    stored = position + token >= sink
    WHOLE: tl.constexpr = TOKENS == 128 and HEAD_SIZE != 64  # the rows are the page's tokens in order
    if ZERO_PAGE:
        every = tl.arange(0, 128)
        all_in_step, all_step_offset, all_window_offset = _locate(
            every, position, first_position, first_token, window_row, window_stride_block, window_stride_token,
            step_stride_token, WINDOW_BLOCK,
        )  # fmt: skip
        all_stored = position + every >= sink
        count = tl.maximum(tl.minimum(128, position + 128 - sink), 1).to(tl.float32)

    x = tl.zeros([TOKENS, HEAD_SIZE], tl.float32)
    for start in range(0, HEAD_SIZE, BLOCK_K):
        dims = start + tl.arange(0, BLOCK_K)
        rows = _gather(key, windows, step_offset, in_step, window_offset, dims)  # [TOKENS, BLOCK_K]
        if ZERO_PAGE:
            if WHOLE:
                page = rows
            else:
                page = _gather(key, windows, all_step_offset, all_in_step, all_window_offset, dims)
            total = tl.sum(tl.where(all_stored[:, None], page, 0.0), 0)
            centre16 = tl.div_rn(total, count + tl.zeros_like(total)).to(tl.float16)
            if part == 0:
                tl.store((page_bytes + KEY_ZERO).to(tl.pointer_type(tl.float16)) + dims, centre16)
            centre = centre16.to(tl.float32)
        else:
            centre = tl.load(mean + dims)
        rows = tl.where(stored[:, None], rows - centre[None, :], 0.0)
        matrix = tl.load(encode + dims[:, None] * HEAD_SIZE + slot[None, :])  # [BLOCK_K, d]
        x = tl.dot(rows, matrix, x, input_precision=PRECISION)

    place = _metadata_position(token)
    if ZERO_PAGE:
        w = tl.load(weight + slot)
        spread = tl.sqrt_rn(tl.sum(w[None, :] * (x * x), 1))
        scale = tl.minimum(tl.maximum(spread, MIN_SCALE), MAX_SCALE).to(tl.float16)
        n = tl.load(levels + slot).to(tl.float32)
        level = tl.div_rn(x, scale.to(tl.float32)[:, None] + tl.zeros_like(x)) + (n * 0.5)[None, :]
        level = tl.minimum(tl.maximum(tl.floor(level), 0.0), (n - 1.0)[None, :])
        code = (level.to(tl.int32) >> (2 * tl.load(digit + slot))[None, :]) & 3
    else:
        level, scale, zero = _affine(x, constant, kth, GAUSS, CLIP)
        code = level.to(tl.int32)
        tl.store((page_bytes + KEY_ZERO).to(tl.pointer_type(tl.float16)) + place, zero)
    tl.store((page_bytes + KEY_SCALE).to(tl.pointer_type(tl.float16)) + place, scale)

    words = page_bytes.to(tl.pointer_type(tl.int32))
    if HEAD_SIZE == 64:  # plane = 2 * (token >> 6) + (slot >> 5)
        shift = 8 * (column & 3) + 2 * ((column >> 2) & 1)
        code = code << (shift[None, :] + (4 * (row & 1))[:, None])
        word = tl.sum(tl.sum(code.reshape([TOKENS // 2, 2, 8, 8]), 3), 1)  # [TOKENS / 2, 8]
        at = _word_index((part * (TOKENS // 2) + tl.arange(0, TOKENS // 2))[:, None], tl.arange(0, 8)[None, :])
    else:
        code = code << (8 * (column & 3) + 2 * ((column >> 2) & 3))[None, :]
        word = tl.sum(code.reshape([TOKENS, HEAD_SIZE // 16, 16]), 2)  # [TOKENS, d / 16]
        group = tl.arange(0, HEAD_SIZE // 16)
        at = _word_index(token[:, None] + (128 * (group >> 3))[None, :], (group & 7)[None, :])
    tl.store(words + at, word)


@triton.jit
def _demote_values(
    value,
    windows,
    page_bytes,
    position,
    first_position,
    first_token,
    window_row,
    window_stride_block,
    window_stride_token,
    step_stride_token,
    rotation,
    mean,
    constant,
    kth,
    sink,
    part,
    HEAD_SIZE: tl.constexpr,
    GAUSS: tl.constexpr,
    CLIP: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
):
    # Rows: this part's tokens in the order (byte column / 4, plane, byte column % 4); a row's bytes are one dim.
    row = tl.arange(0, TOKENS)
    byte = 4 * (part * (TOKENS // 16) + (row >> 4)) + (row & 3)
    token = 32 * ((row >> 2) & 3) + value_token(byte)
    in_step, step_offset, window_offset = _locate(
        token, position, first_position, first_token, window_row, window_stride_block, window_stride_token,
        step_stride_token, WINDOW_BLOCK,
    )  # fmt: skip
    stored = position + token >= sink
    column = tl.arange(0, HEAD_SIZE)
    x = tl.zeros([TOKENS, HEAD_SIZE], tl.float32)
    for start in range(0, HEAD_SIZE, BLOCK_K):
        dims = start + tl.arange(0, BLOCK_K)
        rows = _gather(value, windows + HEAD_SIZE, step_offset, in_step, window_offset, dims)  # [TOKENS, BLOCK_K]
        rows = tl.where(stored[:, None], rows - tl.load(mean + dims)[None, :], 0.0)
        matrix = tl.load(rotation + dims[:, None] * HEAD_SIZE + column[None, :])  # [BLOCK_K, d]
        x = tl.dot(rows, matrix, x, input_precision=PRECISION)

    level, scale, zero = _affine(x, constant, kth, GAUSS, CLIP)
    place = _metadata_position(token)
    tl.store((page_bytes + VALUE_SCALE).to(tl.pointer_type(tl.float16)) + place, scale)
    tl.store((page_bytes + VALUE_ZERO).to(tl.pointer_type(tl.float16)) + place, zero)
    code = level.to(tl.int32) << (8 * (row & 3) + 2 * ((row >> 2) & 3))[:, None]
    word = tl.sum(code.reshape([TOKENS // 16, 16, HEAD_SIZE]), 1)  # [TOKENS / 16, d]
    group = part * (TOKENS // 16) + tl.arange(0, TOKENS // 16)
    words = (page_bytes + VALUE_CODES).to(tl.pointer_type(tl.int32))
    tl.store(words + _word_index(column[None, :], group[:, None]), word)


@triton.jit
def demote_part(
    index,
    head,
    request,
    page,
    key,
    value,
    windows,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    pages,
    page_table,
    window_table,
    query_start_loc,
    seq_lens,
    key_encode,
    key_levels,
    key_digit,
    key_weight,
    key_mean,
    value_rotation,
    value_mean,
    key_constant,
    key_kth,
    value_constant,
    value_kth,
    sink,
    page_stride_block,
    page_stride_head,
    page_table_stride,
    window_table_stride,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    KEY_GAUSS: tl.constexpr,
    KEY_CLIP: tl.constexpr,
    VALUE_GAUSS: tl.constexpr,
    VALUE_CLIP: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
):
    """Part ``index`` of a completed page for one KV head: parts of its tokens, keys then values."""
    PARTS: tl.constexpr = 128 // TOKENS
    part = index % PARTS
    first_token = tl.load(query_start_loc + request)
    new = tl.load(query_start_loc + request + 1) - first_token
    first_position = tl.load(seq_lens + request) - new
    block = tl.load(page_table + request.to(tl.int64) * page_table_stride + page).to(tl.int64)
    page_bytes = pages + block * page_stride_block + head * page_stride_head
    window_row = window_table + request.to(tl.int64) * window_table_stride
    windows += head * window_stride_head
    if index < PARTS:
        _demote_keys(
            key + head * key_stride_head, windows, page_bytes, page * 128, first_position, first_token, window_row,
            window_stride_block, window_stride_token, key_stride_token,
            key_encode + head * (HEAD_SIZE * HEAD_SIZE), key_levels + head * HEAD_SIZE,
            key_digit + head * HEAD_SIZE, key_weight + head * HEAD_SIZE, key_mean + head * HEAD_SIZE,
            key_constant, key_kth, sink, part,
            HEAD_SIZE, ZERO_PAGE, KEY_GAUSS, KEY_CLIP, WINDOW_BLOCK, TOKENS, BLOCK_K, PRECISION,
            KEY_SCALE, KEY_ZERO,
        )  # fmt: skip
    else:
        _demote_values(
            value + head * value_stride_head, windows, page_bytes, page * 128, first_position, first_token,
            window_row, window_stride_block, window_stride_token, value_stride_token,
            value_rotation + head * (HEAD_SIZE * HEAD_SIZE), value_mean + head * HEAD_SIZE,
            value_constant, value_kth, sink, part,
            HEAD_SIZE, VALUE_GAUSS, VALUE_CLIP, WINDOW_BLOCK, TOKENS, BLOCK_K, PRECISION,
            VALUE_CODES, VALUE_SCALE, VALUE_ZERO,
        )  # fmt: skip


@triton.jit(do_not_specialize=["key_kth", "value_kth", "num_requests", "sink", *BATCH_ARGUMENTS])
def _demote_kernel(
    key,
    value,
    windows,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    pages,
    page_table,
    window_table,
    query_start_loc,
    seq_lens,
    key_encode,
    key_levels,
    key_digit,
    key_weight,
    key_mean,
    value_rotation,
    value_mean,
    key_constant,
    key_kth,
    value_constant,
    value_kth,
    sink,
    page_stride_block,
    page_stride_head,
    page_table_stride,
    window_table_stride,
    num_requests,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    KEY_GAUSS: tl.constexpr,
    KEY_CLIP: tl.constexpr,
    VALUE_GAUSS: tl.constexpr,
    VALUE_CLIP: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    # Axis 0: parts of a page's tokens, keys then values. Axis 1: KV heads. Axis 2: pages completed in the step.
    request, page = completed_page(query_start_loc, seq_lens, num_requests, tl.program_id(2), BLOCK_REQUESTS)
    if request >= 0:
        demote_part(
            tl.program_id(0), tl.program_id(1).to(tl.int64), request, page,
            key, value, windows, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
            window_stride_block, window_stride_head, window_stride_token,
            pages, page_table, window_table, query_start_loc, seq_lens, key_encode, key_levels, key_digit, key_weight,
            key_mean, value_rotation, value_mean, key_constant, key_kth, value_constant, value_kth, sink,
            page_stride_block, page_stride_head, page_table_stride, window_table_stride,
            HEAD_SIZE, ZERO_PAGE, KEY_GAUSS, KEY_CLIP, VALUE_GAUSS, VALUE_CLIP, WINDOW_BLOCK, TOKENS, BLOCK_K,
            PRECISION, VALUE_CODES, KEY_SCALE, VALUE_SCALE, VALUE_ZERO, KEY_ZERO,
        )  # fmt: skip


def page_bound(*, num_tokens: int, num_requests: int, max_query_len: int) -> int:
    """Most pages a step can complete: what the grid covers.

    A request of n tokens completes at most ceil(n / 128) pages, hence at most one while n <= 128.
    """
    if max_query_len <= PAGE_TOKENS:
        return num_requests
    return min(num_tokens, (num_tokens + (PAGE_TOKENS - 1) * num_requests) // PAGE_TOKENS)


def launch_shape(*, bound: int, max_query_len: int, num_heads: int, head_size: int) -> tuple[int, int]:
    """(tokens per program, warps): small parts where few pages are expected, for their latency.

    Every part of a page sums the whole page's keys for the mean. While decoding, one request in 128 completes a page.
    Measured on an H200 at 8 heads of size 128: one page takes 22 us in parts of 32 and 39 us whole, 64 pages take 358
    us and 278 us.
    """
    if head_size == 256:
        return PART_TOKENS, 8
    return (PART_TOKENS, 4) if max_query_len <= PAGE_TOKENS or bound * num_heads <= 128 else (128, 8)


def quantile_index(quantizer: Quantizer, head_size: int) -> int:
    """0-based rank of \\|x\\| at which ``"minmax"`` clips (`reference._affine`)."""
    return min(int(quantizer.constant * head_size), head_size - 1) if quantizer.kind == "minmax" else 0


def demote_arguments(
    *,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    layout: PageLayout,
    sink: int,
    tokens: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check `demote`'s arguments; those of `demote_part` that follow keys, values and windows, and its constants."""
    _, heads, d = key.shape
    if key.shape != value.shape or codec.num_kv_heads != heads or codec.head_size != d or layout.head_size != d:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, a codec of {codec.num_kv_heads} heads of size "
            f"{codec.head_size} and pages of head size {layout.head_size} do not agree"
        )
    check_cache(pages=pages, windows=windows, codec=codec, layout=layout)
    if key.stride(2) != 1 or value.stride(2) != 1 or windows.stride(3) != 1 or pages.stride(2) != 1:
        raise ValueError("the last axis of key, value, windows and pages must be contiguous")
    if pages.stride(0) % 4 or pages.stride(1) % 4:
        raise ValueError(f"pages have strides {pages.stride()}; they must be multiples of 4 bytes")
    arguments = (
        pages,
        page_table,
        window_table,
        query_start_loc,
        seq_lens,
        codec.key_encode,
        codec.key_levels,
        codec.key_digit,
        codec.key_weight,
        codec.key_mean,
        codec.value_rotation,
        codec.value_mean,
        codec.key_quantizer.constant,
        quantile_index(codec.key_quantizer, d),
        codec.value_quantizer.constant,
        quantile_index(codec.value_quantizer, d),
        sink,
        *pages.stride()[:2],
        page_table.stride(0),
        window_table.stride(0),
    )
    constants = {
        "HEAD_SIZE": d,
        "ZERO_PAGE": codec.zero == "page",
        "KEY_GAUSS": codec.key_quantizer.kind == "gauss",
        "KEY_CLIP": codec.key_quantizer.constant < 1.0,
        "VALUE_GAUSS": codec.value_quantizer.kind == "gauss",
        "VALUE_CLIP": codec.value_quantizer.constant < 1.0,
        "WINDOW_BLOCK": windows.shape[2],
        "TOKENS": tokens,
        "BLOCK_K": 32,
        "VALUE_CODES": layout.value_codes,
        "KEY_SCALE": layout.key_scale,
        "VALUE_SCALE": layout.value_scale,
        "VALUE_ZERO": layout.value_zero,
        "KEY_ZERO": layout.key_zero,
    }
    return arguments, constants


def demote(
    *,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    layout: PageLayout,
    sink: int,
    num_tokens: int,
    num_requests: int,
    max_query_len: int,
    precision: str = "tf32x3",
    tokens_per_program: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 2,
) -> None:
    """Quantize and pack every page whose last token is in the step; independent of `append` in the same step.

    Args:
        key: [T, H, d] the step's keys as the model produced them; last axis contiguous.
        value: [T, H, d], likewise.
        pages: [N, H, page_bytes] uint8, written in place; the last axis contiguous, strides multiples of 4 bytes.
        windows: [N, H, block_size, 2 d], the tokens of earlier steps.
        page_table: [R, max_pages] int32 history block of each page.
        window_table: [R, max_blocks] int32 window block of each ``block_size`` tokens.
        query_start_loc: [R + 1] int32 first token of each request in the step.
        seq_lens: [R] int32 tokens of each request, this step's included.
        codec: the layer's codec on the same device, contiguous (`LayerCodec.to`).
        layout: the page layout; ``zero`` as the codec's.
        sink: sink tokens; they stay out of page 0's mean and scales.
        num_tokens: T or, in a padded batch, an upper bound of the tokens.
        num_requests: R; surplus rows must have equal neighbours in query_start_loc.
        max_query_len: longest request of the step, in tokens, or an upper bound.
        precision: ``"tf32x3"`` or ``"ieee"``: how the projections multiply.
        tokens_per_program: 32, 64 or 128 tokens of a page per program; by default `launch_shape`.
        num_warps: warps per program; by default `launch_shape`.
        num_stages: depth of the pipeline over the projection's inner dimension.

    Raises:
        ValueError: shapes, strides or codec do not agree.

    """
    bound = page_bound(num_tokens=num_tokens, num_requests=num_requests, max_query_len=max_query_len)
    heads, d = key.shape[1:]
    tokens, warps = launch_shape(bound=bound, max_query_len=max_query_len, num_heads=heads, head_size=d)
    tokens = tokens_per_program or tokens
    cache = {"pages": pages, "windows": windows, "page_table": page_table, "window_table": window_table}
    batch = {"query_start_loc": query_start_loc, "seq_lens": seq_lens}
    arguments, constants = demote_arguments(
        key=key, value=value, **cache, **batch, codec=codec, layout=layout, sink=sink, tokens=tokens
    )
    if bound == 0:
        return
    _demote_kernel[(2 * PAGE_TOKENS // tokens, heads, bound)](
        *key_value_arguments(key=key, value=value, windows=windows),
        *arguments,
        num_requests,
        **constants,
        PRECISION=precision,
        BLOCK_REQUESTS=256,
        num_warps=num_warps or warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
    )
