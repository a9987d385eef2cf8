# SPDX-License-Identifier: Apache-2.0
"""A sequence's keys and values as plain rows, wherever they are kept, for a prefill to attend with FlashAttention.

Reading INT2 pages inside an attention kernel costs instructions for every query; a long chunk pays them thousands of
times over. Written out once per step in the model's dtype, the same tokens are read at FlashAttention's own speed. The
buffer is bounded, whatever the history's length: it holds a *span* of every request at a time, the last one with the
step's own tokens, so that the usual causal mask fits it. `GatherPlan` says which tokens::

    |<---- span 1 ---->|<---- span 0: FlashAttention, causal ---->|
    | not causal       |                             | own tokens |
    0                                                q0           seq_len

A row comes from (`reference.attend`, "exact")

    token >= q0                            the step's own key and value
    token < sink, or token > q0 - recent   its window block, where that is not null
    otherwise                              its page:   key = mean + (scale * (code - 1.5)) @ key_query^T
                                                       value = (scale * code + zero) @ value_rotation^T

What is rounded to the model's dtype here is what an unquantized cache would round, too. FlashAttention loads whole
tiles and multiplies the values behind the last key by zero, so the rows that follow must hold numbers: they are zeroed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops.attend_prefill import _fragment, _key_tile, _metadata, _value_tile
from triton_ops.codec import BATCH_ARGUMENTS, LayerCodec, check_cache
from triton_ops.demote import value_token
from triton_ops.layout import PAGE_TOKENS, PageLayout

PADDING_ROWS = 256
"""Rows behind the last token that are zeroed, at least FlashAttention's largest tile of keys."""


@dataclass(frozen=True)
class Span:
    """What the buffer holds of every request at a time: packed rows, request after request.

    Attributes:
        first_page: [R] int32 page of each request's first row.
        start_loc: [R + 1] int32 first row of each request; FlashAttention's ``cu_seqlens_k``.
        max_tokens: most rows of a request, or a bound.

    """

    first_page: Tensor
    start_loc: Tensor
    max_tokens: int


@dataclass(frozen=True)
class GatherPlan:
    """The spans of a step's requests, the causal one first. The same for every layer.

    Attributes:
        spans: their tokens; together all tokens of every request, each once.
        request: [pages of the buffer] int32 whose page each is.
        index: [pages of the buffer] int32 which of that request's.

    """

    spans: list[Span]
    request: Tensor
    index: Tensor

    @property
    def rows(self) -> int:
        """Rows that a buffer needs."""
        return self.request.shape[0] * PAGE_TOKENS + PADDING_ROWS


def plan_gather(
    *, query_lens: Sequence[int], max_seq_lens: Sequence[int], seq_lens: Tensor, buffer_pages: int
) -> GatherPlan | None:
    """Divide a buffer among a step's requests. Waits for no device.

    Args:
        query_lens: tokens of each request in the step.
        max_seq_lens: tokens of each request, this step's included, or a bound: decides the number of spans.
        seq_lens: [R] int32, the same exactly, on the device.
        buffer_pages: room, in pages.

    Returns:
        The plan, or None if the step's own tokens do not fit.

    """
    # Own tokens begin and end anywhere in a page: one page more than they fill holds them all.
    own = [triton.cdiv(n, PAGE_TOKENS) + 1 for n in query_lens]
    spare = (buffer_pages - sum(own)) // len(own)
    if spare < 0:
        return None
    most = [max(1, triton.cdiv(n, PAGE_TOKENS)) for n in max_seq_lens]
    room = [min(n + spare, m) for n, m in zip(own, most, strict=True)]
    count = max(triton.cdiv(m, n) for n, m in zip(room, most, strict=True))
    offsets = [0, *accumulate(room)]
    places = torch.empty(2, offsets[-1], dtype=torch.int32, pin_memory=seq_lens.is_cuda)
    for r, (begin, pages) in enumerate(zip(offsets, room, strict=False)):
        places[0, begin : begin + pages] = r
        torch.arange(pages, out=places[1, begin : begin + pages])
    sizes = torch.tensor(room, dtype=torch.int32, pin_memory=seq_lens.is_cuda)
    places, sizes = (x.to(seq_lens.device, non_blocking=True) for x in (places, sizes))

    pages = (seq_lens + (PAGE_TOKENS - 1)) // PAGE_TOKENS
    before = torch.arange(count + 1, dtype=torch.int32, device=seq_lens.device)[:, None] * sizes
    edges = (pages - before).clamp_min(0).int()  # [count + 1, R]: the pages before each span's end
    tokens = torch.minimum(edges * PAGE_TOKENS, seq_lens)
    start_loc = torch.zeros(count, len(room) + 1, dtype=torch.int32, device=seq_lens.device)
    start_loc[:, 1:] = (tokens[:-1] - tokens[1:]).cumsum(1)
    spans = [Span(edges[i + 1], start_loc[i], max(room) * PAGE_TOKENS) for i in range(count)]
    return GatherPlan(spans, places[0], places[1])


@triton.jit
def _store(
    rows, matrix, offset, step, in_step, window, in_window, target, keep, COLUMNS: tl.constexpr, HEAD_SIZE: tl.constexpr
):  # fmt: skip
    """Store ``rows @ matrix^T + offset`` [tokens, d], but the row at ``step`` or ``window`` where a token has one."""
    slot = tl.arange(0, HEAD_SIZE)
    for first in tl.static_range(0, HEAD_SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        part = tl.load(matrix + column[None, :] * HEAD_SIZE + slot[:, None])  # [d, columns]
        out = tl.dot(rows, part, input_precision="tf32") + tl.load(offset + column).to(tl.float32)[None, :]
        own = tl.load(step[:, None] + column[None, :], mask=in_step[:, None], other=0.0).to(tl.float32)
        old = tl.load(window[:, None] + column[None, :], mask=in_window[:, None], other=0.0).to(tl.float32)
        out = tl.where(in_step[:, None], own, tl.where(in_window[:, None], old, out))
        tl.store(target[:, None] + column[None, :], out.to(target.dtype.element_ty), mask=keep[:, None])


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "sink",
        "recent",
        "request_of",
        "index_of",
        "first_page",
        "start_loc",
        *BATCH_ARGUMENTS,
    ]
)
def _gather_kernel(
    key,
    value,
    pages,
    windows,
    page_table,
    window_table,
    query_start_loc,
    seq_lens,
    request_of,
    index_of,
    first_page,
    start_loc,
    key_query,
    key_mean,
    value_rotation,
    value_mean,
    key_out,
    value_out,
    num_requests,
    sink,
    recent,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    page_stride_block,
    page_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    page_table_stride,
    window_table_stride,
    out_stride_token,
    PADDING: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ZERO_PAGE: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    KEY_ZERO: tl.constexpr,
):
    # Axis 0: pages of the buffer. Axis 1: KV heads. Axis 2: keys, values.
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        padding = (tl.load(start_loc + num_requests) + tl.arange(0, PADDING)).to(tl.int64) * out_stride_token
        padding = padding[:, None] + (head * HEAD_SIZE + tl.arange(0, HEAD_SIZE))[None, :]
        zeros = tl.zeros([PADDING, HEAD_SIZE], key_out.dtype.element_ty)
        if tl.program_id(2) == 0:
            tl.store(key_out + padding, zeros)
        else:
            tl.store(value_out + padding, zeros)
    request = tl.load(request_of + tl.program_id(0)).to(tl.int64)
    index = tl.load(index_of + tl.program_id(0))
    first_row = tl.load(start_loc + request)
    count = tl.load(start_loc + request + 1) - first_row
    if index * 128 < count:
        page = tl.load(first_page + request) + index
        first_token = tl.load(query_start_loc + request)
        own = tl.load(seq_lens + request) - (tl.load(query_start_loc + request + 1) - first_token)  # first position
        window_row = window_table + request * window_table_stride
        # A page of the step's own tokens may not exist yet: what is decoded then is not used.
        block = tl.load(page_table + request * page_table_stride + page).to(tl.int64)
        page_bytes = pages + block * page_stride_block + head * page_stride_head
        for half in tl.static_range(128 // BLOCK_N):
            inside = half * BLOCK_N + value_token(tl.arange(0, BLOCK_N))
            token = page * 128 + inside
            keep = index * 128 + inside < count
            in_step = keep & (token >= own)
            in_window = keep & (token < own) & ((token < sink) | (token > own - recent))
            block = tl.load(window_row + token // WINDOW_BLOCK, mask=in_window, other=0).to(tl.int64)
            in_window = in_window & (block != 0)
            window = windows + block * window_stride_block + head * window_stride_head
            window += token % WINDOW_BLOCK * window_stride_token
            step = (first_token + token - own).to(tl.int64)
            row = (first_row + index * 128 + inside).to(tl.int64) * out_stride_token + head * HEAD_SIZE
            if tl.program_id(2) == 0:
                scale = _metadata(page_bytes + KEY_SCALE, half, BLOCK_N).to(tl.float32)
                rows = _key_tile(page_bytes, half, HEAD_SIZE, BLOCK_N, ZERO_PAGE, ASM).to(tl.float32) * scale[:, None]
                if ZERO_PAGE:
                    offset = (page_bytes + KEY_ZERO).to(tl.pointer_type(tl.float16))
                else:
                    rows += _metadata(page_bytes + KEY_ZERO, half, BLOCK_N).to(tl.float32)[:, None]
                    offset = key_mean + head * HEAD_SIZE
                own_key = key + step * key_stride_token + head * key_stride_head
                matrix = key_query + head * HEAD_SIZE * HEAD_SIZE
                _store(
                    rows, matrix, offset, own_key, in_step, window, in_window, key_out + row, keep, COLUMNS, HEAD_SIZE
                )  # fmt: skip
            else:
                scale = _metadata(page_bytes + VALUE_SCALE, half, BLOCK_N).to(tl.float32)
                zero = _metadata(page_bytes + VALUE_ZERO, half, BLOCK_N).to(tl.float32)
                codes = _fragment(tl.load(page_bytes + VALUE_CODES + tl.arange(0, 32 * HEAD_SIZE)), HEAD_SIZE)
                codes = _value_tile(codes, half, HEAD_SIZE, BLOCK_N, ASM).trans(1, 0)  # [tokens, d]
                rows = codes.to(tl.float32) * scale[:, None] + zero[:, None]
                own_value = value + step * value_stride_token + head * value_stride_head
                matrix = value_rotation + head * HEAD_SIZE * HEAD_SIZE
                mean = value_mean + head * HEAD_SIZE
                window += HEAD_SIZE
                _store(
                    rows, matrix, mean, own_value, in_step, window, in_window, value_out + row, keep, COLUMNS, HEAD_SIZE
                )  # fmt: skip


def gather(
    *,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    plan: GatherPlan,
    span: Span,
    codec: LayerCodec,
    layout: PageLayout,
    sink: int,
    recent: int,
    key_out: Tensor,
    value_out: Tensor,
) -> None:
    """Write a span of every request as plain keys and values; `demote` of the step comes first.

    Args:
        key: [T, H, d] the step's keys as the model produced them, last axis contiguous.
        value: [T, H, d], likewise.
        pages: [N, H, page_bytes] uint8.
        windows: [N, H, block_size, 2 d].
        page_table: [R, max_pages] int32.
        window_table: [R, max_blocks] int32, 0 = null block.
        query_start_loc: [R + 1] int32 first token of each request in the step.
        seq_lens: [R] int32 tokens of each request, this step's included.
        plan: the division of the buffer.
        span: which of its spans.
        codec: the layer's codec on the same device.
        layout: the page layout; ``zero`` as the codec's.
        sink: sink tokens, at most 128.
        recent: recent tokens, at least 128.
        key_out: [at least plan.rows, H, d] contiguous; written in its dtype.
        value_out: likewise.

    Raises:
        ValueError: the buffers or the cache do not fit.

    """
    _, heads, d = key.shape
    check_cache(pages=pages, windows=windows, codec=codec, layout=layout)
    if key.shape != value.shape or heads != codec.num_kv_heads or d != codec.head_size:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit {codec.num_kv_heads} heads of size "
            f"{codec.head_size}"
        )
    if not 0 <= sink <= PAGE_TOKENS or recent < PAGE_TOKENS:
        raise ValueError(f"sink={sink} must be at most 128 and recent={recent} at least 128")
    rows = plan.rows
    for name, buffer in (("key", key_out), ("value", value_out)):
        if buffer.shape[0] < rows or buffer.shape[1:] != (heads, d) or not buffer.is_contiguous():
            raise ValueError(f"{name} buffer {tuple(buffer.shape)} must be contiguous [at least {rows}, {heads}, {d}]")
    _gather_kernel[(plan.request.shape[0], heads, 2)](
        key,
        value,
        pages,
        windows,
        page_table,
        window_table,
        query_start_loc,
        seq_lens,
        plan.request,
        plan.index,
        span.first_page,
        span.start_loc,
        codec.key_query,
        codec.key_mean,
        codec.value_rotation,
        codec.value_mean,
        key_out,
        value_out,
        span.first_page.shape[0],
        sink,
        recent,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.stride(0),
        pages.stride(1),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        page_table.stride(0),
        window_table.stride(0),
        key_out.stride(0),
        PADDING=PADDING_ROWS,
        HEAD_SIZE=d,
        ZERO_PAGE=layout.zero == "page",
        WINDOW_BLOCK=windows.shape[2],
        BLOCK_N=64 if d == 256 else 128,
        COLUMNS=32 if d == 256 else 64,
        ASM=pages.is_cuda,
        VALUE_CODES=layout.value_codes,
        KEY_SCALE=layout.key_scale,
        VALUE_SCALE=layout.value_scale,
        VALUE_ZERO=layout.value_zero,
        KEY_ZERO=layout.key_zero,
        num_warps=8,
        num_stages=1,
    )
