# SPDX-License-Identifier: Apache-2.0
"""What a step writes and what a prefill chunk reads, one layer: append, demote, and attention over INT2 history.

``step`` is all that a decode step does before it attends: append, demote and query preparation, in three launches or,
as it ships, in one.

`run(device)` checks every launch variant against the reference, refuses to time a wrong one, then times replayed CUDA
graphs. Attention of a chunk over a context counts 4 * query heads * head size operations for each pair of a query and
a key: `attend_prefill` reads the context in place, `gather` writes context and chunk out for vLLM's FlashAttention-3,
which is also timed on BF16 keys, contiguous and in blocks of 16 tokens as vLLM keeps them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.attend_decode import microseconds, warm_clocks
from oscar_vllm.prefill import PrefillBuffers, attend_long
from triton_ops import reference
from triton_ops.append import append
from triton_ops.attend_decode import DecodeWorkspace
from triton_ops.attend_prefill import attend_prefill, workspace_shapes
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec
from triton_ops.demote import demote
from triton_ops.gather import GatherPlan, Span, gather, plan_gather
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import QueryMatrix, prepare_query
from triton_ops.write_and_prepare import write_and_prepare

HEAD_SIZE, KV_HEADS, QUERY_HEADS, SINK, RECENT, BLOCK = 128, 8, 32, 64, 256, 16
CHUNK = 8192
CONTEXTS = [0, 32768, 100352]
MAX_PAGE_MISMATCH = 1e-4
"""Share of page bytes that may differ from the reference on the CPU: rounding decides codes at a level's edge."""
MAX_ERROR = 5e-3
"""Largest error of a row's attention output relative to its norm; BF16 FlashAttention is at 4e-3."""
MAX_GATHERED_ERROR = 1.5e-2
"""The same for keys, values, output and merge all rounded to BF16."""


@dataclass(frozen=True)
class Variant:
    """One way to launch a kernel: its launcher's keyword options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


DEMOTE_VARIANTS = [
    Variant("shipped"),
    Variant("32 tokens", {"tokens_per_program": 32, "num_warps": 4}),
    Variant("128 tokens", {"tokens_per_program": 128, "num_warps": 8}),
    Variant("ieee", {"precision": "ieee"}),
]
PREFILL_VARIANTS = [
    Variant("shipped"),
    Variant("128 rows, 1 stage", {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 1}),
]
BUFFER_PAGES = [128, 512, 1024]


def make_codec(device: str) -> LayerCodec:
    generator = torch.Generator().manual_seed(1)
    bases = torch.linalg.qr(torch.randn(2, KV_HEADS, HEAD_SIZE, HEAD_SIZE, generator=generator))[0]
    gauss = Quantizer("gauss", 1.1)
    return rotation_codec(bases[0], bases[1], zero="page", key_quantizer=gauss, value_quantizer=gauss).to(device)


class Case:
    """One step: requests of ``before`` tokens and ``new`` ones, random pages and windows."""

    def __init__(self, requests: list[tuple[int, int]], device: str) -> None:
        self.layout, self.codec = PageLayout(HEAD_SIZE, "page"), make_codec(device)
        lengths = [before + new for before, new in requests]
        tokens, count = sum(new for _, new in requests), len(requests)
        max_pages, max_blocks = max(lengths) // PAGE_TOKENS + 1, max(lengths) // BLOCK + 1
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        def table(width: int) -> Tensor:
            order = torch.randperm(count * width, generator=generator, device=device) + 1
            return order.view(count, width).int()

        self.page_table, self.window_table = table(max_pages), table(max_blocks)
        self.query, self.key = normal(tokens, QUERY_HEADS, HEAD_SIZE), normal(tokens, KV_HEADS, HEAD_SIZE)
        self.value = normal(tokens, KV_HEADS, HEAD_SIZE)
        self.windows = normal(count * max_blocks + 1, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        shape = (count * max_pages + 1, KV_HEADS, self.layout.page_bytes)
        self.pages = torch.empty(shape, dtype=torch.uint8, device=device)
        self.pages.random_(0, 256, generator=generator)
        numbers = self.pages.view(torch.float16)[..., self.layout.key_scale // 2 :]
        drawn = torch.rand(numbers.shape, device=device, generator=generator)
        drawn[..., : 2 * PAGE_TOKENS] = drawn[..., : 2 * PAGE_TOKENS] * 0.6 + 0.3  # scales of keys and values
        numbers.copy_(drawn)
        slots = []
        for r, (before, new) in enumerate(requests):
            position = torch.arange(before, before + new, device=device)
            slot = self.window_table[r, position // BLOCK].long() * BLOCK + position % BLOCK
            held = (position < SINK) | (position >= before + new - RECENT)
            slots.append(torch.where(held, slot, 0))
        self.slot_mapping = torch.cat(slots)
        starts = torch.tensor([0, *(new for _, new in requests)], device=device)
        self.query_start_loc = starts.cumsum(0).int()
        self.seq_lens = torch.tensor(lengths, device=device).int()
        self.sizes = {"num_tokens": tokens, "num_requests": count}
        self.longest = max(new for _, new in requests)
        self.device = device
        self.matrix = QueryMatrix.of(self.codec)
        self.workspace: DecodeWorkspace | None = None

    def cache(self) -> dict[str, Any]:
        return {
            "pages": self.pages,
            "windows": self.windows,
            "page_table": self.page_table,
            "window_table": self.window_table,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "codec": self.codec,
            "layout": self.layout,
            "sink": SINK,
        }

    def append(self) -> None:
        append(
            key=self.key,
            value=self.value,
            slot_mapping=self.slot_mapping,
            windows=self.windows,
            num_tokens=self.sizes["num_tokens"],
        )

    def demote(self, variant: Variant) -> None:
        demote(
            key=self.key,
            value=self.value,
            **self.cache(),
            **self.sizes,
            max_query_len=self.longest,
            **variant.options,
        )

    def queries(self) -> dict[str, Any]:
        """Arguments of `prepare_query` for a step of short queries."""
        sizes = {"num_query_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
        requests = self.sizes["num_requests"]
        if self.workspace is None:
            self.workspace = DecodeWorkspace.allocate(
                max_requests=requests, max_query_len=1, device=self.device, **sizes
            )
        return {
            "query": self.query,
            "codec": self.codec,
            "matrix": self.matrix,
            "grid": self.workspace.grid(num_requests=requests, max_query_len=1, **sizes),
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "scale": HEAD_SIZE**-0.5,
            "prepared": self.workspace.prepared,
        }

    def three_launches(self, queries: dict[str, Any]) -> None:
        self.append()
        self.demote(DEMOTE_VARIANTS[0])
        prepare_query(**queries)

    def one_launch(self, queries: dict[str, Any]) -> None:
        assert self.workspace is not None
        write_and_prepare(
            key=self.key,
            value=self.value,
            slot_mapping=self.slot_mapping,
            num_tokens=self.sizes["num_tokens"],
            multiprocessors=self.workspace.multiprocessors,
            **self.cache() | queries,
        )

    def outputs(self) -> dict[str, Any]:
        """Buffers of `attend`, allocated once: a captured graph must not allocate."""
        tokens = self.sizes["num_tokens"]
        shapes = workspace_shapes(num_tokens=tokens, num_query_heads=QUERY_HEADS, head_size=HEAD_SIZE)
        return {
            "out": torch.full((tokens, QUERY_HEADS, HEAD_SIZE), torch.nan, device=self.device),
            "lse": torch.full((QUERY_HEADS, tokens), torch.nan, device=self.device),
            "workspace": (
                torch.empty(shapes[0], dtype=torch.float16, device=self.device),
                torch.empty(shapes[1], device=self.device),
            ),
        }

    def attend(self, variant: Variant, outputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return attend_prefill(
            query=self.query,
            **self.cache(),
            **self.sizes,
            **outputs,
            scale=HEAD_SIZE**-0.5,
            recent=RECENT,
            **variant.options,
        )

    def plan(self, buffer_pages: int) -> GatherPlan:
        lengths = self.query_start_loc.diff().tolist(), self.seq_lens.tolist()
        plan = plan_gather(
            query_lens=lengths[0], max_seq_lens=lengths[1], seq_lens=self.seq_lens, buffer_pages=buffer_pages
        )
        assert plan is not None
        return plan

    def gather(self, plan: GatherPlan, span: Span, buffers: PrefillBuffers) -> None:
        assert buffers.key is not None
        assert buffers.value is not None
        gather(
            key=self.key,
            value=self.value,
            **self.cache(),
            plan=plan,
            span=span,
            recent=RECENT,
            key_out=buffers.key,
            value_out=buffers.value,
        )

    def buffers(self, buffer_pages: int) -> PrefillBuffers:
        return PrefillBuffers.allocate(self.query, num_kv_heads=KV_HEADS, gather_pages=buffer_pages)

    def attend_gathered(self, plan: GatherPlan, buffers: PrefillBuffers, out: Tensor) -> None:
        """Attention of the chunk over all its keys, as the backend goes about it."""
        attend_long(
            self.query,
            self.key,
            self.value,
            batch=self.cache(),
            plan=plan,
            prefill="exact",
            scale=HEAD_SIZE**-0.5,
            soft_cap=0.0,
            recent=RECENT,
            max_query_len=self.longest,
            buffers=buffers,
            out=out,
        )


def page_mismatch(case: Case, launch: Callable[[], None]) -> float:
    """Share of page bytes that differ from the reference, which runs on the CPU for its IEEE division."""
    expected = case.pages.cpu()
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in case.cache().items()}
    moved |= {"codec": case.codec.to("cpu"), "pages": expected}
    reference.demote(case.key.cpu(), case.value.cpu(), **moved)
    launch()
    return float((case.pages.cpu() != expected).double().mean())


def check_demote(variant: Variant, device: str) -> float:
    """`page_mismatch` of `demote`."""
    case = Case([(100, 300), (383, 1)], device)
    return page_mismatch(case, lambda: case.demote(variant))


def check_step(_: Variant, device: str) -> float:
    """`page_mismatch` of one launch for a decode step."""
    case = Case([(1023, 1), (1000, 1), (511, 1)], device)
    return page_mismatch(case, lambda: case.one_launch(case.queries()))


def check_prefill(variant: Variant, device: str) -> float:
    """Worst error of a row of context attention merged with the chunk's own, relative to the row's norm."""
    case = Case([(3000, 300), (0, 50)], device)
    out, lse = case.attend(variant, case.outputs())
    expected, total = reference.attend(
        case.query, case.key, case.value, **case.cache(), scale=HEAD_SIZE**-0.5, recent=RECENT
    )
    parts, sums = [], []
    for begin, end in ((0, 300), (300, 350)):
        q, k, v = (x[begin:end].float().transpose(0, 1) for x in (case.query, case.key, case.value))
        k, v = (x.repeat_interleave(QUERY_HEADS // KV_HEADS, 0) for x in (k, v))
        logits = q @ k.transpose(1, 2) * HEAD_SIZE**-0.5
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
        parts.append((logits.softmax(-1) @ v).transpose(0, 1))
        sums.append(logits.logsumexp(-1).T)
    merged, merged_lse = reference.merge(torch.stack([out, torch.cat(parts)]), torch.stack([lse.T, torch.cat(sums)]))
    error = (merged - expected).norm(dim=-1) / expected.norm(dim=-1)
    worst = max(float(error.nan_to_num(float("inf")).max()), float((merged_lse - total).abs().max()))
    return worst if worst == worst else float("inf")


def check_gathered(device: str) -> float:
    """Worst error of a row of `gather` and FlashAttention in several spans, relative to the row's norm."""
    case = Case([(3000, 300), (700, 550)], device)
    buffers, out = case.buffers(20), torch.empty_like(case.query)
    for buffer in (buffers.key, buffers.value):
        assert buffer is not None
        buffer.fill_(torch.nan)
    case.attend_gathered(case.plan(20), buffers, out)
    expected, _ = reference.attend(
        case.query, case.key, case.value, **case.cache(), scale=HEAD_SIZE**-0.5, recent=RECENT
    )
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.nan_to_num(float("inf")).max())


def flash_attention() -> Callable[..., Any] | None:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        print(f"FlashAttention-3 is not timed: {error}")
        return None
    return flash_attn_varlen_func


def time_prefill(case: Case, variant: Variant) -> float:
    """Microseconds of preparing the queries and attending to the context."""
    outputs = case.outputs()
    return microseconds([lambda: case.attend(variant, outputs)], repeats=3)


def time_gathered(case: Case, buffer_pages: int) -> tuple[float, float]:
    """Microseconds of gathering context and chunk, attending and merging, and of gathering alone."""
    plan, buffers, out = case.plan(buffer_pages), case.buffers(buffer_pages), torch.empty_like(case.query)
    alone = microseconds([lambda: [case.gather(plan, span, buffers) for span in plan.spans]], repeats=3)
    return microseconds([lambda: case.attend_gathered(plan, buffers, out)], repeats=3), alone


def time_paged_flash(case: Case, attention: Callable[..., Any], length: int) -> float:
    """Microseconds of causal FlashAttention-3 over ``length`` BF16 keys in blocks of 16, as a BF16 cache holds them."""
    blocks = length // BLOCK
    cache = torch.randn(2, blocks, BLOCK, KV_HEADS, HEAD_SIZE, device=case.device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=case.device).int()[None]
    arguments = {
        "q": case.query,
        "k": cache[0],
        "v": cache[1],
        "max_seqlen_q": CHUNK,
        "cu_seqlens_q": case.query_start_loc,
        "max_seqlen_k": length,
        "seqused_k": torch.tensor([length], device=case.device, dtype=torch.int32),
        "block_table": table,
        "softmax_scale": HEAD_SIZE**-0.5,
        "causal": True,
        "fa_version": 3,
    }
    return microseconds([lambda: attention(**arguments)], repeats=3)


def time_flash(case: Case, attention: Callable[..., Any], length: int, causal: bool) -> float:
    """Microseconds of FlashAttention-3 over ``length`` contiguous BF16 keys."""
    key = torch.randn(length, KV_HEADS, HEAD_SIZE, device=case.device, dtype=torch.bfloat16)
    bounds = torch.tensor([0, length], device=case.device, dtype=torch.int32)
    arguments = {
        "q": case.query,
        "k": key,
        "v": key,
        "max_seqlen_q": CHUNK,
        "cu_seqlens_q": case.query_start_loc,
        "max_seqlen_k": length,
        "cu_seqlens_k": bounds,
        "softmax_scale": HEAD_SIZE**-0.5,
        "causal": causal,
        "fa_version": 3,
    }
    return microseconds([lambda: attention(**arguments)], repeats=3)


def run(
    device: str = "cuda",
    demote_variants: list[Variant] | None = None,
    prefill_variants: list[Variant] | None = None,
    flash: bool = True,
) -> list[dict[str, Any]]:
    """Check, time, print and return one row per measurement.

    Args:
        device: a CUDA device.
        demote_variants: launch variants of `demote`; the first one is timed on every shape.
        prefill_variants: launch variants of `attend_prefill`; the first one is timed on every context.
        flash: also time vLLM's FlashAttention-3 where it can be imported.

    Raises:
        RuntimeError: a variant's result is wrong; nothing is timed.

    """
    demote_variants = demote_variants or DEMOTE_VARIANTS
    prefill_variants = prefill_variants or PREFILL_VARIANTS
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    for variants, check, limit in (
        (demote_variants, check_demote, MAX_PAGE_MISMATCH),
        ([Variant("one launch")], check_step, MAX_PAGE_MISMATCH),
        (prefill_variants, check_prefill, MAX_ERROR),
    ):
        for variant in variants:
            error = check(variant, device)
            print(f"{check.__name__} {variant.name}: {error:.1e}", flush=True)
            if not error <= limit:
                raise RuntimeError(f"variant {variant.name!r} is wrong by {error:.2e}; nothing is timed")
    attention = flash_attention() if flash else None
    if attention is not None:
        error = check_gathered(device)
        print(f"check_gathered: {error:.1e}", flush=True)
        if not error <= MAX_GATHERED_ERROR:
            raise RuntimeError(f"gathered attention is wrong by {error:.2e}; nothing is timed")
    warm_clocks(device)
    rows: list[dict[str, Any]] = []

    def record(kernel: str, shape: str, variant: str, time: float, **more: float) -> None:
        rows.append({"kernel": kernel, "shape": shape, "variant": variant, "us": time} | more)
        extra = "  ".join(f"{name} {value:.4g}" for name, value in more.items())
        print(f"{kernel:14s} {shape:22s} {variant:22s} {time:10.1f} us  {extra}", flush=True)

    steps = {
        "1 x 1, no page": Case([(1000, 1)], device),
        "32 x 1, no page": Case([(1000, 1)] * 32, device),
        "1 x 1, 1 page": Case([(1023, 1)], device),
        "32 x 1, 1 page": Case([(1023, 1)] + [(1000, 1)] * 31, device),
        "32 x 1, 32 pages": Case([(1023, 1)] * 32, device),
        "1 x 8192, 64 pages": Case([(0, CHUNK)], device),
        "1 x 100096, 782 pages": Case([(0, 100096)], device),
    }
    for shape, case in steps.items():
        record("append", shape, "shipped", microseconds([case.append] * 10))
        for variant in demote_variants:
            record("demote", shape, variant.name, microseconds([lambda c=case, v=variant: c.demote(v)] * 10))
        if case.longest == 1:
            queries = case.queries()
            time = microseconds([lambda c=case, q=queries: c.three_launches(q)] * 10)
            record("step", shape, "three launches", time)
            record("step", shape, "one launch", microseconds([lambda c=case, q=queries: c.one_launch(q)] * 10))
    del steps, case

    for context in CONTEXTS:
        case, shape = Case([(context, CHUNK)], device), f"{CHUNK} after {context}"
        operations = 4 * CHUNK * context * QUERY_HEADS * HEAD_SIZE
        for variant in prefill_variants if context else prefill_variants[:1]:
            time = time_prefill(case, variant)
            record("attend_prefill", shape, variant.name, time, tflops=operations / time * 1e-6)
        if attention is None:
            continue
        whole = 4 * (CHUNK * context + CHUNK * (CHUNK + 1) // 2) * QUERY_HEADS * HEAD_SIZE
        for pages in BUFFER_PAGES if context else []:
            time, alone = time_gathered(case, pages)
            record("gather + FA3", shape, f"{pages} pages", time, tflops=whole / time * 1e-6)
            record("gather", shape, f"{pages} pages", alone)
        time = time_paged_flash(case, attention, context + CHUNK)
        record("FA3 BF16", shape, "blocks of 16", time, tflops=whole / time * 1e-6)
        time = time_flash(case, attention, context + CHUNK, causal=True)
        record("FA3 BF16", shape, "contiguous", time, tflops=whole / time * 1e-6)
    return rows


def main() -> None:
    """Measure and append to demote_prefill.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    results.require_gpu()
    print("kept in", results.append("demote_prefill", run()))


if __name__ == "__main__":
    main()
