# SPDX-License-Identifier: Apache-2.0
"""What a decode step does before it attends, in one launch: `append`, `demote` and `prepare_query`.

The three do not depend on each other: requests of short queries complete a page only with tokens that their windows
hold, or that the step brings. Programs, in the order in which they start: the queries' rows, the step's tokens, and as
many programs for completed pages as there are multiprocessors, which end at once in most steps.

Steps with longer queries take the three launches instead: they complete many pages, for which `demote` has a launch of
another shape.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_ops.append import append_token, check_append, key_value_arguments
from triton_ops.codec import BATCH_ARGUMENTS, LayerCodec
from triton_ops.demote import PART_TOKENS, completed_page, demote_arguments, demote_part
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import WARPS, PreparedQuery, QueryMatrix, prepare_launch, prepare_rows, supports_pdl
from triton_ops.schedule import DecodeGrid


@triton.jit(
    do_not_specialize=[
        "num_requests", "prepare_programs", "num_tokens", "key_kth", "value_kth", "sink", "slot_mapping",
        "query_start_ptr", "seq_lens_ptr", *BATCH_ARGUMENTS,
    ]
)  # fmt: skip
def _write_and_prepare_kernel(
    query_ptr,
    halves_ptr,
    unit_ptr,
    key_mean_ptr,
    query_start_ptr,
    seq_lens_ptr,
    fragments_ptr,
    plain_ptr,
    sums_ptr,
    factors_ptr,
    query_stride_token,
    query_stride_head,
    num_requests,
    scale_log2,
    prepare_programs,
    num_tokens,
    slot_mapping,
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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    TOKEN_ZERO: tl.constexpr,
    MAX_INTEGER: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    STEP: tl.constexpr,
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if program < prepare_programs:
        prepare_rows(
            program % HEADS,
            program // HEADS,
            query_ptr,
            halves_ptr,
            unit_ptr,
            key_mean_ptr,
            query_start_ptr,
            seq_lens_ptr,
            fragments_ptr,
            plain_ptr,
            sums_ptr,
            factors_ptr,
            query_stride_token,
            query_stride_head,
            num_requests,
            scale_log2,
            GROUP,
            HEADS,
            HEAD_SIZE,
            ROWS,
            ROW_BLOCKS,
            TOKEN_ZERO,
            MAX_INTEGER,
            PROGRAM_ROWS,
            STEP,
            PDL,
        )
    elif program < prepare_programs + num_tokens:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        append_token(
            (program - prepare_programs).to(tl.int64),
            slot_mapping,
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
            HEADS,
            HEAD_SIZE,
            WINDOW_BLOCK,
            BLOCK_HEADS,
        )
    else:
        ITEMS: tl.constexpr = HEADS * (256 // TOKENS)
        first = prepare_programs + num_tokens
        item = program - first
        request, page = completed_page(query_start_loc, seq_lens, num_requests, item // ITEMS, BLOCK_REQUESTS)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        while request >= 0:
            demote_part(
                item % (256 // TOKENS),
                (item // (256 // TOKENS) % HEADS).to(tl.int64),
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
                HEAD_SIZE,
                ZERO_PAGE,
                KEY_GAUSS,
                KEY_CLIP,
                VALUE_GAUSS,
                VALUE_CLIP,
                WINDOW_BLOCK,
                TOKENS,
                BLOCK_K,
                PRECISION,
                VALUE_CODES,
                KEY_SCALE,
                VALUE_SCALE,
                VALUE_ZERO,
                KEY_ZERO,
            )
            item += tl.num_programs(0) - first
            request, page = completed_page(query_start_loc, seq_lens, num_requests, item // ITEMS, BLOCK_REQUESTS)


def write_and_prepare(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    matrix: QueryMatrix,
    layout: PageLayout,
    sink: int,
    grid: DecodeGrid,
    scale: float,
    prepared: PreparedQuery,
    num_tokens: int,
    multiprocessors: int,
    launch_pdl: bool | None = None,
) -> None:
    """Append the step's tokens, demote the pages they complete and prepare the queries; CUDA-graph safe.

    Args:
        query: [T, H * G, d] as for `prepare_query`.
        key: [T, H, d] as for `append` and `demote`.
        value: [T, H, d], likewise.
        slot_mapping: [T] int64 as for `append`.
        pages: [N, H, page_bytes] uint8, written in place.
        windows: [N, H, block_size, 2 d], written in place.
        page_table: [R, max_pages] int32.
        window_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, this step's tokens included.
        codec: the layer's codec on the same device.
        matrix: `QueryMatrix.of` this codec.
        layout: the page layout.
        sink: sink tokens.
        grid: of the decode step; every request of the step is in it, and none has more than 128 tokens in the step.
        scale: softmax scale.
        prepared: where prepared queries go.
        num_tokens: T or, in a padded batch, an upper bound of the tokens.
        multiprocessors: of the device; most programs that look for completed pages.
        launch_pdl: start before the preceding kernel has ended; default: where the GPU can.

    Raises:
        ValueError: shapes, strides or codec do not agree.

    """
    heads = codec.num_kv_heads
    batch = {"query_start_loc": query_start_loc, "seq_lens": seq_lens}
    prepare = prepare_launch(
        query=query, codec=codec, matrix=matrix, grid=grid, scale=scale, prepared=prepared, **batch
    )
    check_append(key=key, value=value, slot_mapping=slot_mapping, windows=windows, num_tokens=num_tokens)
    cache = {"pages": pages, "windows": windows, "page_table": page_table, "window_table": window_table}
    arguments, constants = demote_arguments(
        key=key, value=value, **cache, **batch, codec=codec, layout=layout, sink=sink, tokens=PART_TOKENS
    )
    if grid.requests == 0:
        return
    prepare_programs = heads * prepare.programs
    parts = grid.requests * heads * (2 * PAGE_TOKENS // PART_TOKENS)
    pdl = supports_pdl(query.device) if launch_pdl is None else launch_pdl
    options = {"launch_pdl": True} if pdl else {}
    _write_and_prepare_kernel[(prepare_programs + num_tokens + min(parts, multiprocessors),)](
        *prepare.arguments,
        prepare_programs,
        num_tokens,
        slot_mapping,
        *key_value_arguments(key=key, value=value, windows=windows),
        *arguments,
        **{**prepare.constants, **constants},
        BLOCK_HEADS=triton.next_power_of_2(heads),
        PRECISION="tf32x3",
        BLOCK_REQUESTS=256,
        PDL=pdl,
        num_warps=WARPS,
        num_stages=2,
        enable_fp_fusion=False,
        **options,
    )
