# SPDX-License-Identifier: Apache-2.0
"""Query preparation for decode: slot weights as INT8 halves in the MMA's fragment order, once per step and layer.

Pages are read as raw codes, so everything that is not a code is moved to the query side. For query row q of KV head h
(natural units; c are codes 0..3, s_t and z_t the token's scale and zero, mu the page's mean key)::

    weights   w = q @ key_query[h]                       [d], 22 bits: offsets cancel, so 11 alone are not enough
    integers  n_slot = floor(w_slot / (u * f_slot) + 1/2), u = max |w / f| / 32500, f_slot = 1 or 4
    logit     page:  s_t * u * (sum f n c - 1.5 sum f n) + q . mu
              token: u * (s_t * sum f n c + z_t * sum f n) + q . key_mean[h]

f = 4 for slots in planes 1 and 3 of a byte, whose codes the reader extracts in place, that is times 4. The offset uses
the sum of the quantized weights, so the mid-levels cancel to half a unit. n = 256 * high + low, both INT8. All logits
are in base-2 units (times softmax scale times log2 e), folded into the row factors.

Rows are query heads of query tokens: row = token * G + head, grouped by request into blocks of ``rows``. The workspace
holds, for every (request, row block, KV head)::

    fragments  int8 [planes, 2 rows, 32]: column 2 r = high, 2 r + 1 = low halves of row r; slot 32 plane + 16 b + 4 a
               + i lies at a * 8 + b * 4 + i (a 0..3, b 0..1, i 0..3), a lane's B operand of mma.m16n8k32.s8
    plain      float16 [rows, d]: the query times the power of two that brings it below 2048, so that bfloat16 values
               stay exact, for q . mu  (``zero="page"`` only)
    sums       int32 [rows]: sum f n
    factors    float32 [2, rows]: logit factor u, then the factor of q . mu (or q . key_mean itself)

Programmatic dependent launch. The three decode kernels (prepare, or the launch that also writes the step's tokens,
attend, merge) may start before the kernel in front of them has ended; a kernel's wait returns when that kernel has
ended and its writes are visible. Why this is safe in any stream, whatever comes before and after:

* In front of prepare, any kernel. Before its wait prepare reads only the codec and the step's metadata, which were
  written many ordinary launches earlier; everything else follows the wait. It lets attend start after the wait.
* So when attend starts, everything before prepare has ended. Before its own wait it reads only the step's metadata, and
  brings pages to the L2 cache, which is where prepare's writes go; windows, pages and queries are read after it.
* Attend lets merge start at once. Before its wait merge reads only the codec, the step's metadata and the schedule.
* Merge does not let its successor start early, and every program of attend and merge waits: when merge has ended,
  attend and prepare have, as a successor that knows nothing of this expects.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_ops.codec import LayerCodec
from triton_ops.schedule import MAX_QUERY_LEN, DecodeGrid

MAX_INTEGER = 32500.0
"""Largest |n|: 127 * 256 less what rounding may add."""
PROGRAM_ROWS = 16
"""Rows one program prepares: the M of an MMA."""
WARPS = 8
"""Warps of a program."""
LOG2_E = math.log2(math.e)


def matrix_step(head_size: int) -> int:
    """Rows of the matrix a program multiplies with at a time: all of them up to head size 128."""
    return head_size if head_size <= 128 else 32


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels launch by programmatic dependent launch by default: compute capability 9.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class PreparedQuery:
    """Workspace of prepared queries; see the module's docstring for what it holds.

    Args:
        blocks: row blocks, (requests * row blocks of a request) * KV heads.
        rows: rows of a block.
        head_size: d.
        device: where.

    """

    def __init__(self, *, blocks: int, rows: int, head_size: int, device: torch.device | str) -> None:
        self.fragments = torch.empty(blocks, 2 * rows * head_size, dtype=torch.int8, device=device)
        self.plain = torch.empty(blocks, rows * head_size, dtype=torch.float16, device=device)
        self.sums = torch.empty(blocks, rows, dtype=torch.int32, device=device)
        self.factors = torch.empty(blocks, 2 * rows, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class QueryMatrix:
    """A codec's ``key_query`` as sums of two float16 matrices, 22 bits, made once per layer.

    Attributes:
        halves: [H, 2, d, d] float16, the high, then the low parts of ``key_query / unit``.
        unit: [H, d] float32, the power of two that brings a column's largest element to 1024..2048.

    """

    halves: Tensor
    unit: Tensor

    @classmethod
    def of(cls, codec: LayerCodec) -> "QueryMatrix":
        """The matrix of a codec, on its device."""
        largest = codec.key_query.abs().amax(1).clamp(min=1e-20)
        unit = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 11)
        scaled = codec.key_query / unit[:, None]
        high = scaled.half()
        return cls(torch.stack([high, (scaled - high.float()).half()], 1), unit)

    def copy_(self, other: "QueryMatrix") -> None:
        """Take the values of another matrix, in place."""
        self.halves.copy_(other.halves)
        self.unit.copy_(other.unit)


@triton.jit
def prefetch(address):
    """Bring the lines at ``address`` (int64) to the L2 cache; returns nothing of use."""
    return tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prepare_rows(
    head,
    program,
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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    TOKEN_ZERO: tl.constexpr,
    MAX_INTEGER: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows ``program * PROGRAM_ROWS`` and on, counted over blocks, of one KV head; waits before it reads the query."""
    m = tl.arange(0, PROGRAM_ROWS)
    block = program * (PROGRAM_ROWS // ROWS) + m // ROWS
    request = block // ROW_BLOCKS
    row = (block % ROW_BLOCKS) * ROWS + m % ROWS
    exists = request < num_requests
    first = tl.load(query_start_ptr + request, mask=exists, other=0)
    queries = tl.load(query_start_ptr + request + 1, mask=exists, other=0) - first
    queries = tl.minimum(queries, tl.load(seq_lens_ptr + request, mask=exists, other=0))
    slot = tl.arange(0, HEAD_SIZE)
    k = tl.arange(0, STEP)
    halves = halves_ptr + head * 2 * HEAD_SIZE * HEAD_SIZE
    if PDL:
        # The matrix comes as far as the L2 cache meanwhile.
        prefetch((halves + tl.arange(0, HEAD_SIZE * HEAD_SIZE // 32) * 64).to(tl.int64))
        gdc_wait()
        gdc_launch_dependents()
    valid = row < queries * GROUP
    source = query_ptr + (first + row // GROUP).to(tl.int64) * query_stride_token
    source += (head * GROUP + row % GROUP) * query_stride_head
    q = tl.load(source[:, None] + slot[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1.0e-20)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.0009765625
    plain = (q / power[:, None]).to(tl.float16)
    halves += k[:, None] * HEAD_SIZE + slot[None, :]
    if STEP == HEAD_SIZE:
        high = tl.load(halves)
        low = tl.load(halves + HEAD_SIZE * HEAD_SIZE)
        weights = tl.dot(plain, high, tl.dot(plain, low))
    else:
        weights = tl.zeros([PROGRAM_ROWS, HEAD_SIZE], tl.float32)
        for at in tl.range(0, HEAD_SIZE, STEP):
            x = tl.load(source[:, None] + (at + k)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            x = (x / power[:, None]).to(tl.float16)
            weights = tl.dot(x, tl.load(halves + (HEAD_SIZE + at) * HEAD_SIZE), weights)
            weights = tl.dot(x, tl.load(halves + at * HEAD_SIZE), weights)
    weights *= power[:, None] * tl.load(unit_ptr + head * HEAD_SIZE + slot)[None, :]

    plane = slot // 32
    weight = tl.where(plane % 2 == 1, 4, 1)
    unit = tl.maximum(tl.max(tl.abs(weights) / weight[None, :], 1), 1.0e-20) / MAX_INTEGER
    n = tl.floor(weights / (unit[:, None] * weight[None, :]) + 0.5).to(tl.int32)
    high = (n + 128) >> 8
    low = n - high * 256
    column = slot % 32
    within = ((column // 4) % 4) * 8 + (column // 16) * 4 + column % 4
    target = (block * HEADS + head).to(tl.int64)
    at = target[:, None] * (2 * ROWS * HEAD_SIZE) + (plane * (64 * ROWS) + within)[None, :]
    at += (m % ROWS)[:, None] * 64
    stored = exists[:, None] & (slot >= 0)[None, :]
    tl.store(fragments_ptr + at, high.to(tl.int8), mask=stored)
    tl.store(fragments_ptr + at + 32, low.to(tl.int8), mask=stored)

    tl.store(sums_ptr + target * ROWS + m % ROWS, tl.sum(n * weight[None, :], 1), mask=exists)
    factors = factors_ptr + target * (2 * ROWS) + m % ROWS
    tl.store(factors, unit * scale_log2, mask=exists)
    if TOKEN_ZERO:
        mean = tl.load(key_mean_ptr + head * HEAD_SIZE + slot)
        tl.store(factors + ROWS, tl.sum(q * mean[None, :], 1) * scale_log2, mask=exists)
    else:
        tl.store(factors + ROWS, power * scale_log2, mask=exists)
        at = target[:, None] * (ROWS * HEAD_SIZE) + (m % ROWS)[:, None] * HEAD_SIZE + slot[None, :]
        tl.store(plain_ptr + at, plain, mask=stored)


@triton.jit(do_not_specialize=["query_start_ptr", "seq_lens_ptr", "num_requests"])
def _prepare_kernel(
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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    TOKEN_ZERO: tl.constexpr,
    MAX_INTEGER: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    prepare_rows(
        tl.program_id(0), tl.program_id(1), query_ptr, halves_ptr, unit_ptr, key_mean_ptr, query_start_ptr,
        seq_lens_ptr, fragments_ptr, plain_ptr, sums_ptr, factors_ptr, query_stride_token, query_stride_head,
        num_requests, scale_log2,
        GROUP, HEADS, HEAD_SIZE, ROWS, ROW_BLOCKS, TOKEN_ZERO, MAX_INTEGER, PROGRAM_ROWS, STEP, PDL,
    )  # fmt: skip


@dataclass(frozen=True)
class PrepareLaunch:
    """How a launch prepares queries: programs for each KV head, then the kernel's arguments."""

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def prepare_launch(
    *,
    query: Tensor,
    codec: LayerCodec,
    matrix: QueryMatrix,
    grid: DecodeGrid,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    prepared: PreparedQuery,
) -> PrepareLaunch:
    """Check `prepare_query`'s arguments and put them in the order of `prepare_rows`, behind head and program."""
    heads, d = codec.num_kv_heads, codec.head_size
    group, rest = divmod(query.shape[1], heads)
    if rest or query.shape[2] != d or query.stride(2) != 1:
        raise ValueError(
            f"query {tuple(query.shape)} with strides {query.stride()} does not fit {heads} KV heads of size {d}"
        )
    if grid.row_blocks * grid.rows < group or grid.row_blocks * grid.rows >= MAX_QUERY_LEN * group + grid.rows:
        raise ValueError(f"the grid {grid} is not for {group} query heads per KV head")
    blocks = grid.requests * grid.row_blocks
    needed = blocks * heads * grid.rows * d
    if needed > prepared.plain.numel():
        raise ValueError(f"the workspace holds {prepared.plain.numel()} elements, this step needs {needed}")
    arguments = (
        query,
        matrix.halves,
        matrix.unit,
        codec.key_mean,
        query_start_loc,
        seq_lens,
        prepared.fragments,
        prepared.plain,
        prepared.sums,
        prepared.factors,
        query.stride(0),
        query.stride(1),
        grid.requests,
        scale * LOG2_E,
    )
    constants = {
        "GROUP": group,
        "HEADS": heads,
        "HEAD_SIZE": d,
        "ROWS": grid.rows,
        "ROW_BLOCKS": grid.row_blocks,
        "TOKEN_ZERO": codec.zero == "token",
        "MAX_INTEGER": MAX_INTEGER,
        "PROGRAM_ROWS": PROGRAM_ROWS,
        "STEP": matrix_step(d),
    }
    return PrepareLaunch(triton.cdiv(blocks * grid.rows, PROGRAM_ROWS), arguments, constants)


def prepare_query(
    *,
    query: Tensor,
    codec: LayerCodec,
    matrix: QueryMatrix,
    grid: DecodeGrid,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    prepared: PreparedQuery,
    launch_pdl: bool | None = None,
) -> None:
    """Fill ``prepared`` for one layer: one launch, CUDA-graph safe.

    Args:
        query: [T, H * G, d] bfloat16 or float16 after RoPE, any strides with a contiguous last axis.
        codec: the layer's codec, on the same device.
        matrix: `QueryMatrix.of` this codec; products with a query are exact, sums float32.
        grid: from `triton_ops.schedule.decode_grid`.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32.
        scale: softmax scale.
        prepared: allocated for at least this grid.
        launch_pdl: start before the preceding kernel has ended; default: where the GPU can.

    Raises:
        ValueError: the query's shape does not fit the codec, or ``prepared`` is too small.

    """
    launch = prepare_launch(
        query=query,
        codec=codec,
        matrix=matrix,
        grid=grid,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=scale,
        prepared=prepared,
    )
    if launch.programs == 0:
        return
    pdl = supports_pdl(query.device) if launch_pdl is None else launch_pdl
    options = {"launch_pdl": True} if pdl else {}
    _prepare_kernel[(codec.num_kv_heads, launch.programs)](
        *launch.arguments, **launch.constants, PDL=pdl, num_warps=WARPS, **options
    )
