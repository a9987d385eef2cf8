# SPDX-License-Identifier: Apache-2.0
"""A stretch of the cache as plain keys and values in a small paged buffer, for a prefill to attend with FlashAttention.

Reading INT2 pages inside an attention kernel costs instructions per query; a long chunk pays them thousands of times
over. Written out once per step in the model's dtype, through a buffer whose size does not depend on the history, the
same pages run at FlashAttention's own speed::

    page p of request r  ->  buffer page r * span + (p - first)     key = mean + (scale * (code - 1.5)) @ key_query^T
    sink tokens          ->  copied from their window blocks        value = (scale * code + zero) @ value_rotation^T

What is rounded to the model's dtype here is what an unquantized cache would round, too.
"""

import triton
import triton.language as tl
from torch import Tensor

from triton_ops.attend_prefill import _fragment, _key_tile, _metadata, _value_tile
from triton_ops.codec import BATCH_ARGUMENTS, LayerCodec
from triton_ops.layout import PAGE_TOKENS, PageLayout


@triton.jit
def _project(rows, matrix, offset, sink_rows, in_sink, target, column_step: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Store ``rows @ matrix^T + offset`` at ``target`` [tokens, d], rows of the sink replaced by ``sink_rows``."""
    slot = tl.arange(0, HEAD_SIZE)
    for first in tl.static_range(0, HEAD_SIZE, column_step):
        column = first + tl.arange(0, column_step)
        part = tl.load(matrix + column[None, :] * HEAD_SIZE + slot[:, None])  # [d, columns]
        out = tl.dot(rows, part, input_precision="tf32") + tl.load(offset + column).to(tl.float32)[None, :]
        plain = tl.load(sink_rows[:, None] + column[None, :], mask=in_sink[:, None], other=0.0).to(tl.float32)
        out = tl.where(in_sink[:, None], plain, out)
        tl.store(target[:, None] + column[None, :], out.to(target.dtype.element_ty))


@triton.jit(do_not_specialize=["first_page", "span", "sink", "num_pages", *BATCH_ARGUMENTS])
def _dequantize_kernel(
    pages,
    windows,
    page_table,
    window_table,
    num_pages,
    key_query,
    key_mean,
    value_rotation,
    value_mean,
    key_out,
    value_out,
    first_page,
    span,
    sink,
    page_stride_block,
    page_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    page_table_stride,
    window_table_stride,
    out_stride_token,
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
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    request = place // span
    page = first_page + place % span
    if page < tl.load(num_pages + request):
        block = tl.load(page_table + request.to(tl.int64) * page_table_stride + page).to(tl.int64)
        page_bytes = pages + block * page_stride_block + head * page_stride_head
        for half in tl.static_range(128 // BLOCK_N):
            inside = half * BLOCK_N + tl.arange(0, BLOCK_N)
            token = page * 128 + inside
            in_sink = token < sink
            window = window_table + request.to(tl.int64) * window_table_stride + token // WINDOW_BLOCK
            window = tl.load(window, mask=in_sink, other=0).to(tl.int64)
            plain = windows + window * window_stride_block + head * window_stride_head
            plain += token % WINDOW_BLOCK * window_stride_token
            row = (place.to(tl.int64) * 128 + inside) * out_stride_token + head * HEAD_SIZE
            if tl.program_id(2) == 0:
                scale = _metadata(page_bytes + KEY_SCALE, half, BLOCK_N).to(tl.float32)
                rows = _key_tile(page_bytes, half, HEAD_SIZE, BLOCK_N, ZERO_PAGE, ASM).to(tl.float32) * scale[:, None]
                if ZERO_PAGE:
                    mean = (page_bytes + KEY_ZERO).to(tl.pointer_type(tl.float16))
                else:
                    rows += _metadata(page_bytes + KEY_ZERO, half, BLOCK_N).to(tl.float32)[:, None]
                    mean = key_mean + head * HEAD_SIZE
                matrix = key_query + head * HEAD_SIZE * HEAD_SIZE
                _project(rows, matrix, mean, plain, in_sink, key_out + row, COLUMNS, HEAD_SIZE)
            else:
                scale = _metadata(page_bytes + VALUE_SCALE, half, BLOCK_N).to(tl.float32)
                zero = _metadata(page_bytes + VALUE_ZERO, half, BLOCK_N).to(tl.float32)
                codes = _fragment(tl.load(page_bytes + VALUE_CODES + tl.arange(0, 32 * HEAD_SIZE)), HEAD_SIZE)
                codes = _value_tile(codes, half, HEAD_SIZE, BLOCK_N, ASM).trans(1, 0)  # [tokens, d]
                rows = codes.to(tl.float32) * scale[:, None] + zero[:, None]
                matrix = value_rotation + head * HEAD_SIZE * HEAD_SIZE
                offset = value_mean + head * HEAD_SIZE
                _project(rows, matrix, offset, plain + HEAD_SIZE, in_sink, value_out + row, COLUMNS, HEAD_SIZE)


def dequantize(
    *,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    num_pages: Tensor,
    first_page: int,
    span: int,
    codec: LayerCodec,
    layout: PageLayout,
    sink: int,
    key: Tensor,
    value: Tensor,
) -> None:
    """Write pages ``first_page`` to ``first_page + span - 1`` of every request as plain keys and values.

    Args:
        pages: [N, H, page_bytes] uint8.
        windows: [N, H, block_size, 2 d]: where the sink tokens come from.
        page_table: [R, max_pages] int32.
        window_table: [R, max_blocks] int32.
        num_pages: [R] int32: pages from this one on are left out; the buffer keeps what it held there.
        first_page: index of the first page in every sequence.
        span: pages per request.
        codec: the layer's codec on the same device.
        layout: the page layout; ``zero`` as the codec's.
        sink: sink tokens, at most 128.
        key: [at least R * span, 128, H, d], written in its dtype; page i of request r is at ``r * span + i``.
        value: likewise, with the same strides.

    Raises:
        ValueError: the buffers or the codec do not fit.

    """
    requests, d, heads = page_table.shape[0], layout.head_size, codec.num_kv_heads
    for name, buffer in (("key", key), ("value", value)):
        if buffer.shape[0] < requests * span or buffer.shape[1:] != (PAGE_TOKENS, heads, d) or buffer.stride(2) != d:
            raise ValueError(
                f"{name} buffer {tuple(buffer.shape)} with strides {buffer.stride()} does not hold {requests} x {span} "
                f"pages of [{PAGE_TOKENS}, {heads}, {d}]"
            )
    if key.stride() != value.stride() or key.stride(0) != PAGE_TOKENS * key.stride(1):
        raise ValueError("key and value buffers must have the same strides, pages one after the other")
    if codec.zero != layout.zero or codec.head_size != d:
        raise ValueError(f"a codec of size {codec.head_size} and zero={codec.zero!r} does not fit the pages {layout}")
    if requests * span == 0:
        return
    _dequantize_kernel[(requests * span, heads, 2)](
        pages,
        windows,
        page_table,
        window_table,
        num_pages,
        codec.key_query,
        codec.key_mean,
        codec.value_rotation,
        codec.value_mean,
        key,
        value,
        first_page,
        span,
        sink,
        pages.stride(0),
        pages.stride(1),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        page_table.stride(0),
        window_table.stride(0),
        key.stride(1),
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
