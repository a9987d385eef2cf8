# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer: INT2 pages and BF16 windows, against FlashAttention-3 in the same process.

`run(device)` checks every launch variant against the reference, refuses to time a wrong one, then times by replaying
CUDA graphs that walk through several caches, so that no run finds its data in the L2 cache. Traffic counts the bytes a
step must read: pages and windows. ``python -m benchmarks.attend_decode`` prints the table and appends it to
``benchmarks/results/attend_decode.csv``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import results
from triton_ops import reference
from triton_ops.attend_decode import (
    DecodeWorkspace,
    MergeOptions,
    attend_decode,
    attend_partials,
    merge_options,
    merge_partials,
)
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import prepare_query
from triton_ops.schedule import DecodeGrid, DecodeSchedule, register_limit, resident_programs

HEAD_SIZE, KV_HEADS, SINK, RECENT, BLOCK = 128, 8, 64, 256, 16
SHAPES = [(b, n) for b in (1, 8, 32) for n in (4096, 32768, 100352)]
VARIANT_SHAPES = [(1, 32768), (8, 100352), (32, 32768)]
COLD_BYTES = 400_000_000
"""Bytes a graph walks through before it comes back to the same cache; several times the L2."""
MAX_ERROR = 1e-3
"""Largest error of a row's output, relative to its norm, that a variant may show before it is timed."""


@dataclass(frozen=True)
class Variant:
    """One way to launch the same computation."""

    name: str
    pdl: bool | None = None
    merge: Callable[[MergeOptions], MergeOptions] = lambda shipped: shipped


def default_variants() -> list[Variant]:
    return [
        Variant("shipped"),
        Variant("no pdl", pdl=False),
        Variant("merge in halves", merge=lambda o: replace(o, columns=HEAD_SIZE // 2)),
    ]


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
        self.device = device

    @staticmethod
    def _codec(device: str) -> LayerCodec:
        generator = torch.Generator().manual_seed(1)
        bases = torch.linalg.qr(torch.randn(2, KV_HEADS, HEAD_SIZE, HEAD_SIZE, generator=generator))[0]
        gauss = Quantizer("gauss", 1.1)
        codec = rotation_codec(bases[0], bases[1], zero="page", key_quantizer=gauss, value_quantizer=gauss)
        return codec.to(device)

    def batch(self, lengths: list[int], groups: int) -> "Batch":
        return Batch(self, lengths, groups)


class Batch:
    """One decode step of some requests over several disjoint choices of pages.

    With ``row_blocks`` the query heads of a KV head are shared out to that many programs, each of which reads the pages
    (the L2 cache serves all but the first), instead of the shipped number.
    """

    def __init__(
        self, cache: Cache, lengths: list[int], groups: int, copies: int | None = None, row_blocks: int = 1
    ) -> None:
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
        sizes: dict[str, Any] = {
            "num_query_heads": KV_HEADS * groups,
            "num_kv_heads": KV_HEADS,
            "head_size": HEAD_SIZE,
        }
        self.workspace = DecodeWorkspace.allocate(max_requests=requests, max_query_len=1, device=device, **sizes)
        self.schedule = DecodeSchedule.allocate(
            max_requests=requests, multiprocessors=self.workspace.multiprocessors, device=device
        )
        self.grid = self.workspace.grid(num_requests=requests, max_query_len=1, **sizes)
        if row_blocks > 1:
            rows, capability = self.grid.rows // row_blocks, self.workspace.capability
            resident = resident_programs(rows=rows, head_size=HEAD_SIZE, capability=capability)
            entries = self.workspace.multiprocessors * resident // (KV_HEADS * row_blocks)
            self.grid = DecodeGrid(requests, rows, row_blocks, max(entries, requests))
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

    def prepare(self, pdl: bool | None = None) -> None:
        prepare_query(
            query=self.query,
            codec=self.cache.codec,
            grid=self.grid,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            scale=HEAD_SIZE**-0.5,
            prepared=self.workspace.prepared,
            launch_pdl=pdl,
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

    def attend(self, index: int, variant: Variant) -> Any:
        return attend_partials(
            query=self.query,
            **self._cache(index),
            schedule=self.schedule,
            workspace=self.workspace,
            launch_pdl=variant.pdl,
        )

    def merge_options(self, variant: Variant) -> MergeOptions:
        shipped = merge_options(
            grid=self.grid,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            multiprocessors=self.workspace.multiprocessors,
        )
        return variant.merge(shipped)

    def merge(self, variant: Variant) -> Any:
        return merge_partials(
            codec=self.cache.codec,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            schedule=self.schedule,
            workspace=self.workspace,
            output=self.output,
            launch_pdl=variant.pdl,
            options=self.merge_options(variant),
        )

    def whole(self, index: int, variant: Variant) -> None:
        self.prepare(variant.pdl)
        attend_decode(
            query=self.query,
            **self._cache(index),
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            schedule=self.schedule,
            workspace=self.workspace,
            output=self.output,
            launch_pdl=variant.pdl,
            merge=self.merge_options(variant),
        )

    def error(self, variant: Variant) -> float:
        """Worst row of the whole step against the reference, relative to the row's norm."""
        rounded, self.output = self.output, torch.full_like(self.output, torch.nan, dtype=torch.float32)
        self.whole(0, variant)
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


def time_batch(batch: Batch, variant: Variant) -> dict[str, float]:
    """Microseconds of each launch and of the whole step."""
    indices = range(len(batch.tables))
    batch.whole(0, variant)
    return {
        "prepare": microseconds([lambda: batch.prepare(variant.pdl)] * 16),
        "attend": microseconds([lambda i=i: batch.attend(i, replace(variant, pdl=False)) for i in indices]),
        "merge": microseconds([lambda: batch.merge(variant)] * 16),
        "whole": microseconds([lambda i=i: batch.whole(i, variant) for i in indices]),
    }


def run(device: str = "cuda", variants: list[Variant] | None = None, flash: bool = True) -> list[dict[str, Any]]:
    """Check, time, print and return one row per measurement.

    Args:
        device: a CUDA device.
        variants: launch variants to compare on three shapes; the first one is timed everywhere.
        flash: also time vLLM's FlashAttention-3 where it can be imported.

    Raises:
        RuntimeError: a variant's result is wrong; nothing is timed.

    """
    variants = variants or default_variants()
    largest = max(b * n for b, n in SHAPES)
    cache = Cache(largest // PAGE_TOKENS + 1024, 6144, device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)

    lengths = [1000, 1, 320, 5000, 129, 40000]
    shipped, halves = Variant("shipped"), Variant("half the rows")
    checks = [(4, variant, 1) for variant in variants]
    checks += [(groups, *choice) for groups in (8, 16) for choice in ((shipped, 1), (halves, 2))]
    for groups, variant, row_blocks in checks:
        probe = Batch(cache, lengths, groups, copies=1, row_blocks=row_blocks)
        error = probe.error(variant)
        kernel, merge = probe.attend(0, variant), probe.merge(variant)
        limit = register_limit(probe.grid.rows, HEAD_SIZE)
        print(
            f"check {variant.name:13s} groups {groups:2d}: error {error:.1e}; attend {kernel.n_regs} registers "
            f"(limit {limit}), {kernel.n_spills} spilled, {kernel.metadata.shared} B shared; "
            f"merge {merge.n_regs} registers, {merge.n_spills} spilled, {merge.metadata.shared} B shared",
            flush=True,
        )
        if not error < MAX_ERROR:
            raise RuntimeError(f"variant {variant.name!r} is wrong by {error:.2e}; nothing is timed")

    warm_clocks(device)
    copy = copy_bandwidth(device)
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []

    def record(name: str, variant: Variant, batch: Batch, groups: int) -> None:
        times = time_batch(batch, variant)
        share = batch.traffic / (times["whole"] * 1e-6) / copy
        attend_share = batch.traffic / (times["attend"] * 1e-6) / copy
        rows.append(
            {"shape": name, "variant": variant.name, "groups": groups, "MB": batch.traffic / 1e6}
            | times
            | {"share_attend": attend_share, "share_whole": share}
        )
        print(
            f"{name:12s} {variant.name:18s} G{groups:<2d} prepare {times['prepare']:6.1f} "
            f"attend {times['attend']:7.1f} ({attend_share:4.0%}) merge {times['merge']:5.1f} "
            f"whole {times['whole']:7.1f} us ({share:4.0%} of copy)",
            flush=True,
        )

    batches = {}
    for requests, length in SHAPES:
        name = f"{requests} x {length // 1000}k"
        batches[name] = Batch(cache, [length] * requests, 4)
        record(name, variants[0], batches[name], 4)
    for requests, length in VARIANT_SHAPES:
        name = f"{requests} x {length // 1000}k"
        for variant in variants[1:]:
            record(name, variant, batches[name], 4)
    for groups in (8, 16):
        record("32 x 32k", shipped, Batch(cache, [32768] * 32, groups), groups)
        record("32 x 32k", halves, Batch(cache, [32768] * 32, groups, row_blocks=2), groups)
    skewed = Batch(cache, [131072] + [4096] * 31, 4)
    balanced = Batch(cache, [(131072 + 31 * 4096) // 32] * 32, 4)
    record("1x128k+31x4k", variants[0], skewed, 4)
    record("balanced", variants[0], balanced, 4)
    schedule_time = microseconds([skewed.update] * 8)
    print(f"schedule of 32 requests, once per step: {schedule_time:.1f} us", flush=True)
    rows.append({"shape": "32 requests", "variant": "schedule", "whole": schedule_time})

    if flash:
        try:
            attention = FlashAttention(largest, device)
        except ImportError as error:
            print(f"FlashAttention-3 is not timed: {error}")
            return rows
        ours = {row["shape"]: row["whole"] for row in rows if row["variant"] == variants[0].name and row["groups"] == 4}
        for dtype in ("bf16", "fp8"):
            if dtype == "fp8":
                attention.quantize()
            for name, batch in [*batches.items(), ("1x128k+31x4k", skewed)]:
                time = attention.time(batch)
                rows.append({"shape": name, "variant": f"flash-attention-3 {dtype}", "groups": 4, "whole": time})
                print(
                    f"{name:12s} flash-attention-3 {dtype}: {time:7.1f} us, {time / ours[name]:.2f}x ours", flush=True
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-flash", action="store_true", help="skip FlashAttention-3")
    arguments = parser.parse_args()
    results.append("attend_decode", run(flash=not arguments.no_flash))
    return 0


if __name__ == "__main__":
    sys.exit(main())
