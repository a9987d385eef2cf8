# SPDX-License-Identifier: Apache-2.0
"""Before an engine serves, its kernels prove themselves on its own GPU, with its own rotations.

A kernel that is wrong on some GPU, driver or geometry answers fluent nonsense with HTTP 200. So once per process and
shape of layer, after the weights are loaded, random keys and values go through every kernel and every result is
compared with the reference on the CPU::

    step                  kernels                                   compared with
    two prompts           append, demote                            window blocks bit by bit, pages code by code
    27 tokens more        append, gather                            `reference.dequantize`
                          attend_prefill or gather, FlashAttention  `reference.attend`
    1 token more          append, demote, schedule + attend_decode  `reference.attend`
    27 tokens more        append
    1 token or the drafts append, schedule + attend_decode          `reference.attend`

The first sequence has everything, the second lost its recent tokens as after a prefix hit. The first decoded token
completes a page; at the second the edge of the recent tokens lies inside a page. It takes a fraction of a second once
the kernels are compiled, and compiles all that requests would wait for (warm_up.py).

Keys and queries are drawn in the codec's own coordinates, at the scale it was fitted to, and queries are scaled so that
logits have a standard deviation of `LOGIT_SPREAD`: a dozen tokens share most of a query's weight, and one token read
from the wrong place shows. With a soft cap it is at least a twelfth of that, so that the cap shows as well.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oscar_vllm.errors import OscarSelfTestError
from oscar_vllm.prefill import PrefillBuffers, attend_long
from oscar_vllm.rotation import plain_tensors
from oscar_vllm.warm_up import compile_ahead
from triton_ops import reference
from triton_ops.append import append
from triton_ops.attend_decode import DecodeWorkspace, attend_decode
from triton_ops.codec import LayerCodec
from triton_ops.demote import demote
from triton_ops.gather import GatherPlan, gather, plan_gather
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import MAX_INTEGER, QueryMatrix, prepare_query
from triton_ops.schedule import DecodeSchedule
from triton_ops.write_and_prepare import write_and_prepare

logger = logging.getLogger(__name__)

LOGIT_SPREAD = 2.0
CHUNK = 27
"""Tokens of the second step: they leave one token to the end of a page."""
MAX_CODES_APART = 1e-3
"""Share of a page's codes that may differ: float32 sums round differently where a value lies at a code's edge."""


@dataclass(frozen=True)
class LayerKernels:
    """What decides which kernels a layer runs and what they must compute. T tokens, H KV heads, d head size.

    Attributes:
        codec: the layer's codec on this rank, H heads.
        layout: its page.
        num_query_heads: Hq on this rank.
        scale: softmax scale.
        sink: tokens kept unquantized at the start.
        recent: tokens kept unquantized at the end.
        prefill: ``"exact"`` or ``"invariant"``.
        dtype: bfloat16 or float16, of queries, keys, values and windows.
        max_query_len: most tokens of a decode query, 1 without speculation.
        max_requests: most requests of a decode step.
        has_sinks: whether heads have learned sinks, for which a log-sum-exp is needed.
        soft_cap: c of logits c tanh(x / c), or 0.
        window_block: tokens of a window block; more than 16 in hybrid models.

    """

    codec: LayerCodec
    layout: PageLayout
    num_query_heads: int
    scale: float
    sink: int
    recent: int
    prefill: reference.Prefill
    dtype: torch.dtype
    max_query_len: int = 1
    max_requests: int = 2
    has_sinks: bool = False
    soft_cap: float = 0.0
    window_block: int = 16

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for layers that run the same compiled kernels."""
        codec = self.codec
        quantizers = [(q.kind, q.constant < 1.0) for q in (codec.key_quantizer, codec.value_quantizer)]
        segments = (self.sink, self.recent, self.prefill, self.max_query_len, self.max_requests, self.has_sinks)
        heads = (codec.num_kv_heads, self.num_query_heads, self.soft_cap)
        return (self.layout, *heads, self.dtype, self.window_block, *segments, *quantizers)


_passed: set[tuple[Any, ...]] = set()


def self_test_once(layer: LayerKernels, device: torch.device | str) -> None:
    """`self_test`, unless a layer of the same shape has passed it on this device in this process."""
    key = (str(device), *layer.shape)
    if key not in _passed:
        begin = time.perf_counter()
        self_test(layer, device)
        _passed.add(key)
        logger.info("OSCAR self-test passed on %s in %.1f s", device, time.perf_counter() - begin)


def self_test(
    layer: LayerKernels,
    device: torch.device | str,
    *,
    multiprocessors: int | None = None,
    capability: tuple[int, int] | None = None,
) -> None:
    """Run every kernel of the layer on ``device`` and compare with the reference on the CPU.

    Args:
        layer: what to test.
        device: where the kernels run; a CPU in Triton's interpreter only.
        multiprocessors: multiprocessors the decode grid is made for; default: the device's.
        capability: its compute capability; default: the device's.

    Raises:
        OscarSelfTestError: a kernel fails or differs from the reference by more than rounding explains.

    """
    device = torch.device(device)
    gpu: dict[str, Any] = {"multiprocessors": multiprocessors, "capability": capability}
    with torch.no_grad(), plain_tensors():
        test = _SelfTest(layer, device)
        with test.kernel("attend_decode"):
            compile_ahead(layer, device, **gpu)
        test.write("the prompts", test.advance([0, 0], test.prompt_lengths))
        step = test.advance(test.prompt_lengths, [CHUNK, CHUNK])
        test.write("a chunk", step)
        test.prefill(step, None)
        if layer.prefill == "exact":
            plan = test.plan(step)
            test.gather(step, plan)
            test.prefill(step, plan)
        decoder = test.decoder(**gpu)
        step = test.advance(test.seq_lens, [1, 1])
        test.write("a decoded token", step)
        test.decode(step, decoder, 1)
        test.write("a second chunk", test.advance(test.seq_lens, [CHUNK, CHUNK]))
        queries = layer.max_query_len
        step = test.advance(test.seq_lens, [queries, queries])
        test.decode(step, decoder, queries, writes=True)


@dataclass(frozen=True)
class _Step:
    """Tensors of one step of two requests on the CPU, named as the launchers name them."""

    query: Tensor
    key: Tensor
    value: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class _SelfTest:
    """A scratch cache of two sequences, on the CPU for the reference and on the device for the kernels."""

    def __init__(self, layer: LayerKernels, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.codec, self.device_codec = layer.codec.to("cpu"), layer.codec.to(device)
        self.generator = torch.Generator().manual_seed(0)
        heads, d = self.codec.num_kv_heads, self.codec.head_size
        # Both end 28 tokens before the end of a page; the first has three pages that no query reads as recent.
        behind = -(-layer.recent // PAGE_TOKENS) + 3
        self.prompt_lengths = [behind * PAGE_TOKENS + PAGE_TOKENS - CHUNK - 1, 4 * PAGE_TOKENS - CHUNK - 1]
        self.seq_lens = [0, 0]
        tokens = max(self.prompt_lengths) + PAGE_TOKENS + layer.max_query_len
        self.page_table = self._blocks(2, tokens // PAGE_TOKENS + 1)
        size = layer.window_block
        self.window_table = self._blocks(2, tokens // size + 1)
        block = torch.arange(self.window_table.shape[1])
        first_recent = (self.prompt_lengths[0] - layer.recent + 1) // size
        for table, first in zip(self.window_table, (first_recent, 3 * PAGE_TOKENS // size), strict=True):
            table[(block * size >= layer.sink) & (block < first)] = 0
        # What nobody wrote is NaN (0xFF bytes). Window blocks are padded to the bytes of whole pages, as in an engine.
        page_bytes = heads * layer.layout.page_bytes
        window_bytes = heads * size * 2 * d * layer.dtype.itemsize
        padded = -(-window_bytes // page_bytes) * page_bytes
        self.pages = torch.full((self.page_table.numel() + 1, page_bytes), 255, dtype=torch.uint8)
        self.windows = torch.full((self.window_table.numel() + 1, padded), 255, dtype=torch.uint8)
        self.device_pages, self.device_windows = (x.to(device, copy=True) for x in (self.pages, self.windows))
        # Keys and values share a mean, as trained ones do.
        self.mean = torch.randn(heads, d, generator=self.generator)

    def _blocks(self, requests: int, count: int) -> Tensor:
        """[requests, count] int32 block numbers from 1 on in random order."""
        return (torch.randperm(requests * count, generator=self.generator) + 1).view(requests, count).int()

    def advance(self, before: list[int], new: list[int]) -> _Step:
        """A step of ``new`` random tokens behind the first ``before`` of both sequences."""
        layer, codec = self.layer, self.codec
        heads, d, tokens = codec.num_kv_heads, codec.head_size, sum(new)
        groups = layer.num_query_heads // heads
        slots = torch.randn(tokens, heads, d, generator=self.generator)
        key = torch.einsum("ths,hds->thd", slots, codec.key_query)
        query = torch.randn(tokens, heads, groups, d, generator=self.generator)
        query = torch.einsum("thgs,hds->thgd", query, codec.key_encode)
        spread = torch.einsum("thgd,hdc,uhc->thgu", query[:64], torch.eye(d).expand(heads, d, d), key[:64])
        wanted = max(LOGIT_SPREAD, layer.soft_cap / 12)
        query *= wanted / layer.scale / spread.square().mean((0, 2, 3)).sqrt()[:, None, None]
        key += codec.key_mean + self.mean * key.std((0, 2))[:, None]
        value = torch.randn(tokens, heads, d, generator=self.generator) + codec.value_mean + self.mean
        position = [torch.arange(b, b + n) for b, n in zip(before, new, strict=True)]
        size = layer.window_block
        block = [table[at // size].long() for table, at in zip(self.window_table, position, strict=True)]
        self.seq_lens = [b + n for b, n in zip(before, new, strict=True)]
        return _Step(
            query=query.flatten(1, 2).to(layer.dtype).contiguous(),
            key=key.to(layer.dtype).contiguous(),
            value=value.to(layer.dtype).contiguous(),
            slot_mapping=torch.cat(block) * size + torch.cat(position) % size,
            query_start_loc=torch.tensor([0, *new]).cumsum(0).int(),
            seq_lens=torch.tensor(self.seq_lens).int(),
        )

    def cache(self, on_device: bool) -> dict[str, Tensor]:
        """Pages [N, H, page_bytes], windows [N, H, 16, 2 d] and their tables."""
        heads, d = self.codec.num_kv_heads, self.codec.head_size
        pages, windows = (self.device_pages, self.device_windows) if on_device else (self.pages, self.windows)
        size = self.layer.window_block
        windows = windows.view(self.layer.dtype)[:, : heads * size * 2 * d]
        where = self.device if on_device else "cpu"
        return {
            "pages": pages.view(-1, heads, self.layer.layout.page_bytes),
            "windows": windows.view(-1, heads, size, 2 * d),
            "page_table": self.page_table.to(where),
            "window_table": self.window_table.to(where),
        }

    def arguments(self, on_device: bool, step: _Step) -> dict[str, Any]:
        """Arguments that `demote` and attention share."""
        where = self.device if on_device else torch.device("cpu")
        return {
            **self.cache(on_device),
            "query_start_loc": step.query_start_loc.to(where),
            "seq_lens": step.seq_lens.to(where),
            "codec": self.device_codec if on_device else self.codec,
            "layout": self.layer.layout,
            "sink": self.layer.sink,
        }

    # ---- checks ----------------------------------------------------------------------------------------------------

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        """Runs of one kernel: whatever it raises is reported as the failure of that kernel."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise OscarSelfTestError(
                f"{self._who(name)} could not run: {type(error).__name__}: {reason}; {_WAY_OUT}"
            ) from error

    def check(self, name: str, what: str, error: Tensor, allowed: Tensor | float) -> None:
        """Raise unless ``error <= allowed`` everywhere; NaN is an error."""
        excess = error - allowed
        if not bool((excess <= 0).all()):
            worst = int(excess.nan_to_num(nan=torch.inf).argmax())
            bound = torch.as_tensor(allowed).expand(error.shape).flatten()[worst]
            raise OscarSelfTestError(
                f"{self._who(name)} computes wrong results: largest error of {what} {float(error.flatten()[worst]):.3g}"
                f", at most {float(bound):.3g} is rounding; {_WAY_OUT}"
            )

    def _who(self, name: str) -> str:
        device = self.device
        place = f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else "Triton's interpreter"
        layer = self.layer
        return (
            f"start-up self-test on {place}: kernel {name} "
            f"({layer.num_query_heads} query and {layer.codec.num_kv_heads} KV heads of size {layer.layout.head_size}, "
            f'zero="{layer.layout.zero}", {str(layer.dtype).removeprefix("torch.")})'
        )

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def write(self, what: str, step: _Step) -> None:
        """`append` and `demote` against the reference."""
        batch = self.arguments(True, step)
        rows = {"key": step.key.to(self.device), "value": step.value.to(self.device)}
        sizes: dict[str, Any] = {"num_requests": 2, "max_query_len": int(step.query_start_loc.diff().max())}
        tokens = step.key.shape[0]
        with self.kernel("append"):
            slots = step.slot_mapping.to(self.device)
            append(**rows, slot_mapping=slots, windows=batch["windows"], num_tokens=tokens)
        with self.kernel("demote"):
            demote(**rows, num_tokens=tokens, **batch, **sizes)
        self.check_written(what, step)

    def check_written(self, what: str, step: _Step) -> None:
        """The device's cache against the reference's; afterwards the reference has the kernels' pages, too."""
        expected = self.arguments(False, step)
        reference.append(step.key, step.value, slot_mapping=step.slot_mapping, windows=expected["windows"])
        reference.demote(step.key, step.value, **expected)
        with self.kernel("append"):
            windows = self.device_windows.cpu()
        self.check("append", f"the window blocks of {what}", (windows != self.windows).float().mean(), 0.0)
        with self.kernel("demote"):
            pages = self.device_pages.cpu()
        self._check_pages(what, step, pages.view(expected["pages"].shape), expected["pages"])
        self.pages = pages.clone()

    def _check_pages(self, what: str, step: _Step, actual: Tensor, expected: Tensor) -> None:
        request, page = reference.completed_pages(step.query_start_loc, step.seq_lens)
        block = self.page_table[request, page].long()
        others = torch.ones(actual.shape[0], dtype=torch.bool)
        others[block] = False
        stray = (actual[others] != expected[others]).float().sum()
        self.check("demote", f"bytes outside the pages of {what}", stray, 0.0)
        if not block.numel():
            return
        pairs = zip(*(reference.unpack(pages[block], self.layer.layout) for pages in (actual, expected)), strict=True)
        for (ours, theirs), name, rows in zip(pairs, ("key", "value"), (step.key, step.value), strict=True):
            apart = (ours.codes != theirs.codes).float().mean((2, 3))
            self.check("demote", f"the {name} codes of {what} (share that differs)", apart, MAX_CODES_APART)
            # One float16 rounding apart; a zero carries that of its scale, near 0 the absolute error of the projection.
            slack = {"scale": 0.0, "zero": 2.0**-10 * 1.5 * theirs.scale.float(), "mean": 0.0}
            # Scales with a zero per token follow from the codes: where those differ, nothing can be said.
            same = (ours.codes == theirs.codes).all(-1)
            for field, more in slack.items():
                a, b = getattr(ours, field), getattr(theirs, field)
                if b is None:
                    continue
                apart = (a.float() - b.float()).abs()
                if theirs.zero is not None:
                    apart = torch.where(same, apart, 0.0)
                allowed = 2.0**-10 * b.float().abs() + more + 2.0**-20 * rows.float().abs().amax()
                self.check("demote", f"the {name} {field}s of {what}", apart, allowed)

    def relative(self, step: _Step, output: Tensor) -> Tensor:
        """[T, Hq] norms of output rows [T, Hq, d] in units of the norm that a value of the head has."""
        size = step.value.float().norm(dim=-1).square().mean(0).sqrt()
        return output.norm(dim=-1) / size.repeat_interleave(self.layer.num_query_heads // size.shape[0])

    def expected_attention(self, step: _Step) -> tuple[Tensor, Tensor]:
        """Output [T, Hq, d] and lse [T, Hq] of the reference over the kernels' own pages."""
        layer = self.layer
        rules: dict[str, Any] = {"scale": layer.scale, "recent": layer.recent, "prefill": layer.prefill}
        rules |= {"max_decode_len": layer.max_query_len, "soft_cap": layer.soft_cap}
        return reference.attend(step.query, step.key, step.value, **self.arguments(False, step), **rules)

    def plan(self, step: _Step) -> GatherPlan:
        """Two spans of the step's sequences."""
        plan = plan_gather(
            query_lens=step.query_start_loc.diff().tolist(),
            max_seq_lens=self.seq_lens,
            seq_lens=step.seq_lens.to(self.device),
            buffer_pages=max(self.seq_lens) // PAGE_TOKENS + 3,
        )
        assert plan is not None
        return plan

    def prefill(self, step: _Step, plan: GatherPlan | None) -> None:
        """FlashAttention with `attend_prefill`, or on gathered keys; whatever they do not write is NaN."""
        layer = self.layer
        query, key, value = (x.to(self.device) for x in (step.query, step.key, step.value))
        pages = 0 if plan is None else plan.request.shape[0]
        buffers = PrefillBuffers.allocate(query, num_kv_heads=self.codec.num_kv_heads, gather_pages=pages)
        for buffer in (buffers.part, buffers.part_lse, buffers.key, buffers.value):
            if buffer is not None:
                buffer.fill_(torch.nan)
        out = torch.full_like(query, torch.nan)
        name = "attend_prefill" if plan is None else "gather"
        with self.kernel(f"{name} with FlashAttention"):
            lse = attend_long(
                query,
                key,
                value,
                batch=self.arguments(True, step),
                plan=plan,
                prefill=layer.prefill,
                scale=layer.scale,
                soft_cap=layer.soft_cap,
                recent=layer.recent,
                max_query_len=CHUNK,
                buffers=buffers,
                out=out,
            )
            out, lse = out.cpu().float(), lse.cpu().T
        expected, expected_lse = self.expected_attention(step)
        rounding = self._prefill_noise(step) if plan is None else self._gathered_noise(step)
        if layer.soft_cap:
            # A cap makes no error larger; but FlashAttention's tanh is right to 11 bits only.
            rounding = rounding + 2.0**-11 * self._largest_logit(step)
        # Beside the logits: probabilities, values, partial outputs and the output are rounded to the dtype.
        allowed = 2 * rounding + 2 * torch.finfo(layer.dtype).eps
        error = self.relative(step, out - expected)
        self.check(f"{name} with FlashAttention", "an output", error, allowed)
        self.check(f"{name} with FlashAttention", "a log-sum-exp", (lse - expected_lse).abs(), rounding + 1e-3)

    def _gathered_noise(self, step: _Step) -> Tensor:
        """[T, Hq] how far keys that are decoded in tf32 and rounded to the dtype move a logit.

        Rounding is a random walk (four standard deviations). tf32 drops the bits behind 11 of both factors, which makes
        every product smaller, by 2^-10 on average.
        """
        walk = [
            torch.einsum("thd,nhd->thn", query.square(), key.square()).sqrt().amax(-1)
            for query, key in self._scaled_queries_and_keys(step)
        ]
        rounding = 4 * torch.finfo(self.layer.dtype).eps / 12**0.5 * torch.cat(walk)
        return rounding + 2.0**-10 * self._largest_logit(step)

    def _largest_logit(self, step: _Step) -> Tensor:
        """[T, Hq] largest size of a logit, before a cap."""
        return torch.cat(
            [
                torch.einsum("thd,nhd->thn", query, key).abs().amax(-1)
                for query, key in self._scaled_queries_and_keys(step)
            ]
        )

    def _scaled_queries_and_keys(self, step: _Step) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each request, scaled queries [n, Hq, d] and keys [tokens, Hq, d] as a chunk's queries read them."""
        for request, (begin, end) in enumerate(pairwise(step.query_start_loc.tolist())):
            key = self._rows(step, request, slice(None))[0][0]
            key = key.repeat_interleave(self.layer.num_query_heads // key.shape[1], 1)
            yield step.query[begin:end].float() * self.layer.scale, key

    def gather(self, step: _Step, plan: GatherPlan) -> None:
        """`gather` of all tokens of both sequences."""
        layer, codec, d = self.layer, self.codec, self.codec.head_size
        rows = (2, plan.rows, codec.num_kv_heads, d)
        buffer = torch.full(rows, torch.nan, dtype=layer.dtype, device=self.device)
        ends = list(self.seq_lens)
        for span in plan.spans:
            with self.kernel("gather"):
                gather(
                    key=step.key.to(self.device),
                    value=step.value.to(self.device),
                    **self.arguments(True, step),
                    recent=layer.recent,
                    plan=plan,
                    span=span,
                    key_out=buffer[0],
                    value_out=buffer[1],
                )
                written, edges = buffer.cpu().float(), span.start_loc.tolist()
            for request, (begin, end) in enumerate(pairwise(edges)):
                tokens = slice(ends[request] - (end - begin), ends[request])
                ends[request] = tokens.start
                for name, actual, expected, bound in zip(
                    ("key", "value"), written[:, begin:end], *self._rows(step, request, tokens), strict=True
                ):
                    allowed = bound + torch.finfo(layer.dtype).eps * expected.abs() + 1e-6
                    self.check("gather", f"a {name}", (actual - expected).abs(), allowed)
        self.check("gather", "the tokens left out", torch.tensor(ends).float(), 0.0)

    def _rows(self, step: _Step, request: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [2, tokens, H, d] float32 as a chunk's queries read them, and how far tf32 may move them."""
        cache, codec, layer = self.cache(False), self.codec, self.layer
        begin, end = step.query_start_loc[request : request + 2].tolist()
        length = self.seq_lens[request]
        first = length - (end - begin)
        page = cache["pages"][self.page_table[request, : length // PAGE_TOKENS].long()]
        decoded = torch.stack(reference.dequantize(page, codec=codec, layout=layer.layout)).flatten(1, 2)
        encoded = zip(reference.unpack(page, layer.layout), (codec.key_query, codec.value_rotation), strict=True)
        # tf32 keeps 11 bits of both factors of a product.
        size = torch.stack([part.rows().abs() @ matrix.abs().transpose(1, 2) for part, matrix in encoded])
        rows, bound = decoded.new_zeros(2, 2, length, codec.num_kv_heads, codec.head_size)
        rows[:, : decoded.shape[1]] = decoded
        bound[:, : decoded.shape[1]] = 2.0**-10 * size.transpose(2, 3).flatten(1, 2)
        token = torch.arange(length)
        block = self.window_table[request, token // layer.window_block].long()
        plain = (token < first) & (block != 0) & ((token < layer.sink) | (token > first - layer.recent))
        windows = cache["windows"][block, :, token % layer.window_block].float()
        rows[:, plain] = torch.stack(windows[plain].split(codec.head_size, -1))
        rows[:, first:] = torch.stack([step.key[begin:end], step.value[begin:end]]).float()
        bound[:, plain | (token >= first)] = 0
        return rows[:, tokens], bound[:, tokens]

    def decoder(
        self, *, multiprocessors: int | None, capability: tuple[int, int] | None
    ) -> tuple[DecodeWorkspace, DecodeSchedule]:
        """Scratch memory of the decode kernels for two requests."""
        with self.kernel("attend_decode"):
            workspace = DecodeWorkspace.allocate(
                max_requests=2,
                max_query_len=self.layer.max_query_len,
                num_query_heads=self.layer.num_query_heads,
                num_kv_heads=self.codec.num_kv_heads,
                head_size=self.codec.head_size,
                device=self.device,
                multiprocessors=multiprocessors,
                capability=capability,
            )
            processors = workspace.multiprocessors
            return workspace, DecodeSchedule.allocate(max_requests=2, multiprocessors=processors, device=self.device)

    def decode(
        self, step: _Step, decoder: tuple[DecodeWorkspace, DecodeSchedule], queries: int, writes: bool = False
    ) -> None:
        """`DecodeSchedule.update`, `prepare_query` and `attend_decode`, with an output in float32 and in the dtype.

        With ``writes`` `write_and_prepare` also appends and demotes. It does so twice, to the same effect.
        """
        layer = self.layer
        workspace, schedule = decoder
        query, batch = step.query.to(self.device), self.arguments(True, step)
        heads, d = self.codec.num_kv_heads, self.codec.head_size
        metadata = {name: batch[name] for name in ("query_start_loc", "seq_lens")}
        exact = torch.full(query.shape, torch.nan, dtype=torch.float32, device=self.device)
        served = torch.full_like(query, torch.nan)
        lse = torch.full(query.shape[1::-1], torch.nan, dtype=torch.float32, device=self.device)
        with self.kernel("attend_decode"):
            grid = workspace.grid(
                num_requests=2,
                max_query_len=queries,
                num_query_heads=layer.num_query_heads,
                num_kv_heads=heads,
                head_size=d,
            )
            schedule.update(
                grid=grid,
                window_table=batch["window_table"],
                window_block_size=layer.window_block,
                sink=layer.sink,
                recent=layer.recent,
                **metadata,
            )
            queries_of: dict[str, Any] = {
                "query": query,
                "matrix": QueryMatrix.of(self.device_codec),
                "grid": grid,
                "scale": layer.scale,
                "prepared": workspace.prepared,
            }
            for output, output_lse in ((exact, lse), (served, None)):
                if writes:
                    write_and_prepare(
                        key=step.key.to(self.device),
                        value=step.value.to(self.device),
                        slot_mapping=step.slot_mapping.to(self.device),
                        num_tokens=query.shape[0],
                        multiprocessors=workspace.multiprocessors,
                        **queries_of,
                        **batch,
                    )
                else:
                    prepare_query(**queries_of, codec=self.device_codec, **metadata)
                attend_decode(
                    query=query,
                    **batch,
                    scale=layer.scale,
                    soft_cap=layer.soft_cap,
                    recent=layer.recent,
                    schedule=schedule,
                    workspace=workspace,
                    output=output,
                    lse=output_lse,
                )
            exact, served, lse = exact.cpu(), served.cpu().float(), lse.cpu().T
        if writes:
            self.check_written("decoded tokens", step)
        expected, expected_lse = self.expected_attention(step)
        noise = 4 * self._decode_noise(step)
        # 14-bit probabilities beside the rounding of logits.
        self.check("attend_decode", "an output", self.relative(step, exact - expected), 2.0**-10 + noise)
        self.check("attend_decode", "a log-sum-exp", (lse - expected_lse).abs(), 2.0**-12 + noise)
        rounding = torch.finfo(layer.dtype).eps * exact.abs() + 1e-6
        self.check("attend_decode", "a rounded output", (served - exact).abs(), rounding)

    # ---- rounding of logits ----------------------------------------------------------------------------------------

    def _slot_weights(self, step: _Step) -> tuple[Tensor, Tensor]:
        """Slot weights [T, H, G, d] of the queries and rows [H, tokens, d] of all pages written so far."""
        query = step.query.float().unflatten(1, (self.codec.num_kv_heads, -1))
        written = [self.page_table[r, : n // PAGE_TOKENS].long() for r, n in enumerate(self.seq_lens)]
        keys, _ = reference.unpack(self.cache(False)["pages"][torch.cat(written)], self.layer.layout)
        weights = torch.einsum("thgd,hds->thgs", query, self.codec.key_query) * self.layer.scale
        return weights, keys.rows().transpose(0, 1).flatten(1, 2)

    def _decode_noise(self, step: _Step) -> Tensor:
        """[T, Hq] root mean square error that 16-bit slot weights leave in a logit: uniform rounding times rows."""
        weights, rows = self._slot_weights(step)
        plane = torch.where(torch.arange(weights.shape[-1]) // 32 % 2 == 1, 4.0, 1.0)
        unit = (weights.abs() / plane).amax(-1) / MAX_INTEGER
        largest = (rows.square() * plane.square()).sum(-1).mean(1).sqrt()  # [H]
        return (unit * largest[:, None] / 12**0.5).flatten(1)

    def _prefill_noise(self, step: _Step) -> Tensor:
        """[T, Hq] how far rounding weights and rows to float16 moves a logit.

        Over the slots of a token such errors add like a random walk (four standard deviations are allowed), except that
        slots with equal codes share the rounding of their row's scale, which is relative to the logit.
        """
        weights, rows = self._slot_weights(step)
        logit = torch.einsum("thgs,hns->thgn", weights, rows).abs()
        walk = torch.einsum("thgs,hns->thgn", weights.square(), rows.square()).sqrt()
        return 2.0**-11 * (logit + 4 * walk).amax(-1).flatten(1)


_WAY_OUT = (
    "not served. Use --kv-cache-dtype auto, or the PyTorch reference, slow, with --enforce-eager and "
    """--additional-config '{"oscar": {"ops": "reference"}}'; please report this with the output of """
    "`python -m oscar_vllm doctor`"
)
