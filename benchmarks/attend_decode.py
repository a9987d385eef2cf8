# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer: INT2 pages and BF16 windows, against FlashAttention-3 in the same process.

`run(device)` checks the shipped launch against the reference, refuses to time a wrong one, then times by replaying
CUDA graphs that walk through several caches, so that no run finds its data in the L2 cache. Traffic counts the bytes a
step must read: pages and windows. ``python -m benchmarks.attend_decode`` prints the table and appends it to
``benchmarks/results/attend_decode.csv``; with ``--variants`` other launch choices are compared with the shipped one
instead (`run_variants`).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import results
from triton_ops import reference
from triton_ops.attend_decode import (
    DecodeWorkspace,
    attend_decode,
    attend_partials,
    merge_partials,
)
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import QueryMatrix, prepare_query
from triton_ops.schedule import DecodeSchedule

HEAD_SIZE, KV_HEADS, SINK, RECENT, BLOCK = 128, 8, 64, 256, 16
SHAPES = [(b, n) for b in (1, 8, 32) for n in (4096, 32768, 100352)]
VARIANT_SHAPES = {
    4: [(1, 4096), (1, 32768), (1, 100352), (8, 32768), (8, 100352), (32, 32768)],
    8: [(1, 32768), (32, 32768)],
    16: [(1, 32768), (32, 32768)],
}
"""Requests and tokens of each on which variants are compared, by query heads per KV head; those of 8 and 16 are timed
with the shipped launch too."""
CHECK_LENGTHS = [1000, 1, 320, 5000, 129, 40000]
COLD_BYTES = 400_000_000
"""Bytes a graph walks through before it comes back to the same cache; several times the L2."""
MAX_ERROR = 1e-3
"""Largest error of a row's output, relative to its norm, that a variant may show before it is timed."""


@dataclass(frozen=True)
class Variant:
    """One way to launch the same computation.

    Attributes:
        name: for the table.
        pdl: programmatic dependent launch, default: where the GPU can.
        prefetch: bring each next page to the L2 cache early, default: `attend_decode.prefetches_pages`.

    """

    name: str = "shipped"
    pdl: bool | None = None
    prefetch: bool | None = None


VARIANTS = [
    Variant(),
    Variant("no pdl", pdl=False),
    Variant("prefetch", prefetch=True),
    Variant("no prefetch", prefetch=False),
]
"""Launch choices to compare, the shipped one first."""


class Cache:
    """Pools of random pages and window blocks, and the tables of one batch after another."""

    def __init__(self, pages: int, window_blocks: int, device: str) -> None:
        self.layout = PageLayout(HEAD_SIZE, "page")
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (pages, KV_HEADS, self.layout.page_bytes)
        self.pages = torch.empty(shape, dtype=torch.uint8, device=device)
        for part in self.pages.split(4096):
            part.random_(0, 256, generator=generator)
            numbers = part.view(torch.float16)[..., self.layout.key_scale // 2 :]
            drawn = torch.rand(numbers.shape, device=device, generator=generator)
            drawn[..., : 2 * PAGE_TOKENS] = drawn[..., : 2 * PAGE_TOKENS] * 0.6 + 0.3  # scales of keys and values
            numbers.copy_(drawn)
        window_shape = (window_blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        self.windows = torch.randn(window_shape, device=device, generator=generator, dtype=torch.bfloat16)
        self.codec = self._codec(device)
        self.matrix = QueryMatrix.of(self.codec)
        self.device = device

    @staticmethod
    def _codec(device: str) -> LayerCodec:
        generator = torch.Generator().manual_seed(1)
        bases = torch.linalg.qr(torch.randn(2, KV_HEADS, HEAD_SIZE, HEAD_SIZE, generator=generator))[0]
        gauss = Quantizer("gauss", 1.1)
        codec = rotation_codec(bases[0], bases[1], zero="page", key_quantizer=gauss, value_quantizer=gauss)
        return codec.to(device)


class Batch:
    """One decode step of some requests over several disjoint choices of pages, launched as `select` says."""

    def __init__(self, cache: Cache, lengths: list[int], groups: int, copies: int | None = None) -> None:
        device, self.cache = cache.device, cache
        requests, longest = len(lengths), max(lengths)
        needed = [n // PAGE_TOKENS for n in lengths]
        page_bytes = KV_HEADS * cache.layout.page_bytes
        self.history = [max(0, -(-(n - RECENT) // PAGE_TOKENS)) for n in lengths]
        window_tokens = sum(min(n, SINK + RECENT) for n in lengths)
        self.traffic = sum(self.history) * page_bytes + window_tokens * KV_HEADS * 4 * HEAD_SIZE
        if copies is None:
            copies = max(1, min(64, -(-COLD_BYTES // self.traffic), cache.pages.shape[0] // max(1, sum(needed))))
        self.tables = []
        for _ in range(copies):
            page_table = torch.zeros(requests, longest // PAGE_TOKENS + 1, dtype=torch.int32, device=device)
            order = torch.randperm(cache.pages.shape[0], device=device).int()
            window_table = torch.zeros(requests, longest // BLOCK + 1, dtype=torch.int32, device=device)
            blocks = torch.randperm(cache.windows.shape[0] - 1, device=device).int() + 1
            page_at = block_at = 0
            for r, length in enumerate(lengths):
                page_table[r, : needed[r]] = order[page_at : page_at + needed[r]]
                page_at += needed[r]
                held = torch.arange(-(-length // BLOCK), device=device)
                held = held[(held < SINK // BLOCK) | (held >= (length - RECENT) // BLOCK)]
                window_table[r, held] = blocks[block_at : block_at + len(held)]
                block_at += len(held)
            self.tables.append((page_table, window_table))
        self.lengths = lengths
        self.query = torch.randn(requests, KV_HEADS * groups, HEAD_SIZE, device=device).bfloat16()
        self.output = torch.full_like(self.query, torch.nan)
        self.query_start_loc = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.sizes: dict[str, Any] = {
            "num_query_heads": KV_HEADS * groups,
            "num_kv_heads": KV_HEADS,
            "head_size": HEAD_SIZE,
        }
        self.workspace = DecodeWorkspace.allocate(max_requests=requests, max_query_len=1, device=device, **self.sizes)
        self.schedule = DecodeSchedule.allocate(
            max_requests=requests, multiprocessors=self.workspace.multiprocessors, device=device
        )
        self.select(Variant())

    def select(self, variant: Variant) -> None:
        """Launch as a variant from now on."""
        self.variant = variant
        self.grid = self.workspace.grid(num_requests=len(self.lengths), max_query_len=1, **self.sizes)
        self.update()

    def update(self, index: int = 0) -> None:
        self.schedule.update(
            grid=self.grid,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            window_table=self.tables[index][1],
            window_block_size=BLOCK,
            sink=SINK,
            recent=RECENT,
        )

    def prepare(self) -> None:
        prepare_query(
            query=self.query,
            codec=self.cache.codec,
            matrix=self.cache.matrix,
            grid=self.grid,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            scale=HEAD_SIZE**-0.5,
            prepared=self.workspace.prepared,
            launch_pdl=self.variant.pdl,
        )

    def _cache(self, index: int) -> dict[str, Any]:
        return {
            "pages": self.cache.pages,
            "windows": self.cache.windows,
            "page_table": self.tables[index][0],
            "window_table": self.tables[index][1],
            "codec": self.cache.codec,
            "layout": self.cache.layout,
            "scale": HEAD_SIZE**-0.5,
            "sink": SINK,
            "recent": RECENT,
        }

    def attend(self, index: int, pdl: bool | None = None) -> Any:
        return attend_partials(
            query=self.query,
            **self._cache(index),
            schedule=self.schedule,
            workspace=self.workspace,
            launch_pdl=pdl,
            prefetch_pages=self.variant.prefetch,
        )

    def merge(self) -> Any:
        return merge_partials(
            codec=self.cache.codec,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            schedule=self.schedule,
            workspace=self.workspace,
            output=self.output,
            launch_pdl=self.variant.pdl,
        )

    def whole(self, index: int) -> None:
        self.prepare()
        attend_decode(
            query=self.query,
            **self._cache(index),
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            schedule=self.schedule,
            workspace=self.workspace,
            output=self.output,
            launch_pdl=self.variant.pdl,
            prefetch_pages=self.variant.prefetch,
        )

    def error(self) -> float:
        """Worst row of the whole step against the reference, relative to the row's norm."""
        rounded, self.output = self.output, torch.full_like(self.output, torch.nan, dtype=torch.float32)
        self.whole(0)
        output, self.output = self.output, rounded
        # The step's own key and value, which the reference takes from outside, are the newest window slots.
        last = self.seq_lens.long() - 1
        block = self.tables[0][1][torch.arange(len(self.lengths), device=last.device), last // BLOCK].long()
        newest = self.cache.windows[block, :, last % BLOCK]
        expected, _ = reference.attend(
            self.query,
            newest[..., :HEAD_SIZE],
            newest[..., HEAD_SIZE:],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            **self._cache(0),
        )
        error = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(error.nan_to_num(float("inf")).max())


def microseconds(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Median time of one call when all of them are replayed as one CUDA graph, in microseconds."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for repeat in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def warm_clocks(device: str) -> None:
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(60):
        matrix @ matrix
    torch.cuda.synchronize()


@triton.jit
def _copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy of 2 GiB, the best of ``copy_`` and a kernel of 16-byte accesses."""
    source = torch.ones(1 << 29, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copies: dict[str, Callable[[], Any]] = {
        "copy_": lambda: target.copy_(source),
        "kernel": lambda: _copy_kernel[(source.numel() // 4096,)](source, target, BLOCK=4096),
    }
    rates = {}
    for name, copy in copies.items():
        copy()
        times = []
        for _ in range(11):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            copy()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        rates[name] = 2 * source.numel() * source.element_size() / sorted(times)[len(times) // 2]
    print(", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in rates.items()), flush=True)
    return max(rates.values())


class FlashAttention:
    """vLLM's FlashAttention-3 paged decode over random BF16 or FP8 caches of blocks of 16 tokens."""

    def __init__(self, tokens: int, device: str) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self.function, self.device = flash_attn_varlen_func, device
        shape = (tokens // BLOCK, BLOCK, KV_HEADS, HEAD_SIZE)
        self.key = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    def quantize(self) -> None:
        """Keep FP8 copies instead."""
        self.key = self.key.to(torch.float8_e4m3fn)
        self.value = self.value.to(torch.float8_e4m3fn)

    def time(self, batch: Batch) -> float:
        requests, longest = len(batch.lengths), max(batch.lengths)
        needed = [-(-length // BLOCK) for length in batch.lengths]
        copies = max(1, min(16, self.key.shape[0] // sum(needed)))
        bytes_read = 2 * sum(batch.lengths) * KV_HEADS * HEAD_SIZE * self.key.element_size()
        copies = min(copies, max(1, -(-COLD_BYTES // bytes_read)))
        order = torch.randperm(self.key.shape[0], device=self.device).int()
        tables = []
        for i in range(copies):
            table, at = torch.zeros(requests, max(needed), dtype=torch.int32, device=self.device), i * sum(needed)
            for r, blocks in enumerate(needed):
                table[r, :blocks] = order[at : at + blocks]
                at += blocks
            tables.append(table)
        fp8 = self.key.dtype != torch.bfloat16
        query = batch.query.to(self.key.dtype)
        scales = torch.ones(requests, KV_HEADS, device=self.device) if fp8 else None
        output = torch.empty_like(batch.query)

        def call(table: Tensor) -> None:
            self.function(
                q=query,
                k=self.key,
                v=self.value,
                out=output,
                cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=1,
                seqused_k=batch.seq_lens,
                max_seqlen_k=longest,
                softmax_scale=HEAD_SIZE**-0.5,
                causal=True,
                block_table=table,
                fa_version=3,
                q_descale=scales,
                k_descale=scales,
                v_descale=scales,
            )

        return microseconds([lambda table=table: call(table) for table in tables])


def time_batch(batch: Batch) -> dict[str, float]:
    """Microseconds of each launch and of the whole step."""
    indices = range(len(batch.tables))
    batch.whole(0)
    return {
        "prepare": microseconds([batch.prepare] * 16),
        "attend": microseconds([lambda i=i: batch.attend(i, pdl=False) for i in indices]),
        "merge": microseconds([batch.merge] * 16),
        "whole": microseconds([lambda i=i: batch.whole(i) for i in indices]),
    }


def shape_name(requests: int, length: int) -> str:
    return f"{requests} x {length // 1000}k"


def make_cache(device: str) -> Cache:
    """A pool for the largest batch."""
    return Cache(max(b * n for b, n in SHAPES) // PAGE_TOKENS + 1024, 6144, device)


def check(cache: Cache, groups: int, variants: list[Variant]) -> None:
    """Compare whole steps with the reference.

    Raises:
        RuntimeError: a variant's result is wrong.

    """
    probe = Batch(cache, CHECK_LENGTHS, groups, copies=1)
    for variant in variants:
        probe.select(variant)
        error = probe.error()
        kernel, merge = probe.attend(0), probe.merge()
        print(
            f"check {variant.name:16s} G{groups:<2d}: error {error:.1e}; attend {kernel.n_regs} registers, "
            f"{kernel.n_spills} spilled, {kernel.metadata.shared} B shared; "
            f"merge {merge.n_regs} registers, {merge.n_spills} spilled, {merge.metadata.shared} B shared",
            flush=True,
        )
        if not error < MAX_ERROR:
            raise RuntimeError(f"variant {variant.name!r} is wrong by {error:.2e}; nothing is timed")


class Recorder:
    """Times batches, prints and keeps a row for each."""

    def __init__(self, device: str) -> None:
        warm_clocks(device)
        self.copy = copy_bandwidth(device)
        self.rows: list[dict[str, Any]] = []
        print(f"copy {self.copy / 1e12:.2f} TB/s", flush=True)

    def record(self, name: str, batch: Batch, groups: int, variant: Variant) -> None:
        batch.select(variant)
        times = time_batch(batch)
        share, attend_share = (batch.traffic / (times[part] * 1e-6) / self.copy for part in ("whole", "attend"))
        self.rows.append(
            {"shape": name, "variant": variant.name, "groups": groups, "MB": batch.traffic / 1e6}
            | {f"{part}_us": time for part, time in times.items()}
            | {"share_attend": attend_share, "share_whole": share, "copy_tb_per_s": self.copy / 1e12}
        )
        print(
            f"{name:12s} {variant.name:18s} G{groups:<2d} prepare {times['prepare']:6.1f} "
            f"attend {times['attend']:7.1f} ({attend_share:4.0%}) merge {times['merge']:5.1f} "
            f"whole {times['whole']:7.1f} us ({share:4.0%} of copy)",
            flush=True,
        )


def skewed_batches(cache: Cache) -> list[tuple[str, Batch]]:
    """One long request among short ones, and as many tokens shared out evenly."""
    balanced = (131072 + 31 * 4096) // 32
    return [
        ("1x128k+31x4k", Batch(cache, [131072] + [4096] * 31, 4)),
        ("balanced", Batch(cache, [balanced] * 32, 4)),
    ]


def run(device: str = "cuda", flash: bool = True) -> list[dict[str, Any]]:
    """Check the shipped launch, time it on all shapes, print and return one row per measurement.

    Args:
        device: a CUDA device.
        flash: also time vLLM's FlashAttention-3 where it can be imported.

    Raises:
        RuntimeError: a result is wrong; nothing is timed.

    """
    cache, shipped = make_cache(device), Variant()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    for groups in VARIANT_SHAPES:
        check(cache, groups, [shipped])
    recorder = Recorder(device)
    rows, record = recorder.rows, recorder.record
    batches = {shape_name(b, n): Batch(cache, [n] * b, 4) for b, n in SHAPES}
    for name, batch in batches.items():
        record(name, batch, 4, shipped)
    for groups in (8, 16):
        for requests, length in VARIANT_SHAPES[groups]:
            record(shape_name(requests, length), Batch(cache, [length] * requests, groups), groups, shipped)
    (skewed_name, skewed), balanced = skewed_batches(cache)
    for name, batch in ((skewed_name, skewed), balanced):
        record(name, batch, 4, shipped)
    schedule_time = microseconds([skewed.update] * 8)
    print(f"schedule of 32 requests, once per step: {schedule_time:.1f} us", flush=True)
    rows.append({"shape": "32 requests", "variant": "schedule", "whole_us": schedule_time})

    if flash:
        try:
            attention = FlashAttention(max(b * n for b, n in SHAPES), device)
        except ImportError as error:
            print(f"FlashAttention-3 is not timed: {error}")
            return rows
        ours = {row["shape"]: row["whole_us"] for row in rows if row.get("groups") == 4}
        for dtype in ("bf16", "fp8"):
            if dtype == "fp8":
                attention.quantize()
            for name, batch in [*batches.items(), (skewed_name, skewed)]:
                time = attention.time(batch)
                rows.append({"shape": name, "variant": f"flash-attention-3 {dtype}", "groups": 4, "whole_us": time})
                print(
                    f"{name:12s} flash-attention-3 {dtype}: {time:7.1f} us, {time / ours[name]:.2f}x ours", flush=True
                )
    return rows


def run_variants(device: str = "cuda") -> list[dict[str, Any]]:
    """Compare launch choices with the shipped one on `VARIANT_SHAPES`; checked first, rows as those of `run`.

    Args:
        device: a CUDA device.

    Raises:
        RuntimeError: a variant's result is wrong; nothing is timed.

    """
    cache = make_cache(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    for groups in VARIANT_SHAPES:
        check(cache, groups, VARIANTS)
    recorder = Recorder(device)
    for groups, shapes in VARIANT_SHAPES.items():
        for requests, length in shapes:
            batch = Batch(cache, [length] * requests, groups)
            for variant in VARIANTS:
                recorder.record(shape_name(requests, length), batch, groups, variant)
    for name, batch in skewed_batches(cache):
        for variant in VARIANTS:
            recorder.record(name, batch, 4, variant)
    return recorder.rows


def main() -> None:
    """Measure and append to attend_decode.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-flash", action="store_true", help="skip FlashAttention-3")
    parser.add_argument("--variants", action="store_true", help="compare launch choices instead")
    arguments = parser.parse_args()
    results.require_gpu()
    rows = run_variants() if arguments.variants else run(flash=not arguments.no_flash)
    print("kept in", results.append("attend_decode", rows))


if __name__ == "__main__":
    main()
