# SPDX-License-Identifier: Apache-2.0
"""The wiring of the kernels in the backend, in Triton's interpreter: one mixed step against the reference.

FlashAttention does not exist on a CPU; a few lines of PyTorch with its interface stand in for it.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from oscar_vllm import backend
from oscar_vllm import prefill as prefill_module
from oscar_vllm.artifact import hadamard_codecs
from oscar_vllm.backend import OscarImpl, OscarMetadataBuilder
from oscar_vllm.cache_spec import SinkWindowSpec
from oscar_vllm.config import OscarConfig
from oscar_vllm.rotation import EngineSettings
from tests.triton_ops.step_cases import make_step
from tests.triton_ops.test_reference import make_codec
from triton_ops import reference
from triton_ops.attend_decode import DecodeWorkspace
from triton_ops.layout import PAGE_TOKENS, FloatPageLayout, page_head_size
from triton_ops.prepare import QueryMatrix

HEADS, GROUPS, D, SINK, RECENT = 1, 2, 64, 64, 128
CAP = 0.5
# Two decodes, then chunks: several pages of context, a page that the recent window cuts, and a prompt from its start.
REQUESTS = [(400, 1), (90, 1), (530, 60), (300, 40), (100, 7), (0, 30)]

DECODES = [(400, 1), (511, 1), (90, 1)]
"""Decodes alone; one completes a page."""


def flash(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale, softcap, causal, out, **options):
    """FlashAttention's interface as the backend uses it: ragged keys, queries last, an optional window, natural lse."""
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q >= max(b - a for a, b in pairwise(starts))
    for r, (begin, end) in enumerate(pairwise(starts)):
        keys, values = (x[options["cu_seqlens_k"][r] : options["cu_seqlens_k"][r + 1]] for x in (k, v))
        assert max_seqlen_k >= keys.shape[0]
        distance = torch.arange(end - begin)[:, None] + keys.shape[0] - (end - begin) - torch.arange(keys.shape[0])
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if options.get("window_size"):
            seen &= distance <= options["window_size"][0]
        keys, values = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        logits = torch.einsum("nhd,thd->hnt", q[begin:end].float(), keys) * softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, -torch.inf)
        lse[:, begin:end] = logits.logsumexp(-1)
        out[begin:end] = torch.einsum("hnt,thd->nhd", logits.softmax(-1).nan_to_num(), values).to(out.dtype)
    return out, lse


def make_impl(codec, layout, options, head_size=D) -> OscarImpl:
    """An implementation as `OscarImpl.__init__` and `attach` leave it on a GPU."""
    impl = object.__new__(OscarImpl)
    impl.num_heads, impl.num_kv_heads = HEADS * GROUPS, HEADS
    impl.head_size, impl.scale, impl.soft_cap = head_size, head_size**-0.5, 0.0
    impl.settings = EngineSettings(options, None)
    impl.layout, impl.codec, impl.uses_kernels = layout, codec.to("cpu"), True
    impl.window_name, impl.sinks = "layer.oscar_window", None
    impl.gather_pages = 12
    impl.query_matrix = QueryMatrix.of(impl.codec)
    impl.workspace = DecodeWorkspace.allocate(
        max_requests=8,
        max_query_len=1,
        num_query_heads=HEADS * GROUPS,
        num_kv_heads=HEADS,
        head_size=layout.head_size,
        device="cpu",
        multiprocessors=4,
        capability=(9, 0),
    )
    return impl


def test_a_codec_lost_in_sleep_comes_back_in_place(monkeypatch):
    """A sleep of level 2 leaves device memory undefined; weights are loaded again, graphs keep their addresses."""
    codec, _ = make_codec(HEADS, D, "page")
    clone = lambda self, device: replace(self, **{name: x.clone() for name, x in self.tensors()})  # noqa: E731
    monkeypatch.setattr(type(codec), "to", clone)
    impl = object.__new__(OscarImpl)
    impl.uses_kernels, impl.codec, impl.loaded_codec = False, codec, codec
    impl.process_weights_after_loading(torch.bfloat16)
    first = dict(impl.codec.tensors())
    for tensor in first.values():
        tensor.fill_(7)
    impl.process_weights_after_loading(torch.bfloat16)
    for name, tensor in impl.codec.tensors():
        assert tensor is first[name]
        assert torch.equal(tensor, getattr(codec, name)), name


def test_a_layer_with_kernels_tests_itself_once_loaded(monkeypatch):
    codec, layout = make_codec(HEADS, D, "page")
    options = OscarConfig(prefill="invariant", sink=SINK, recent=RECENT).resolved()
    impl = make_impl(codec, layout, options)
    impl.loaded_codec, impl.max_requests, impl.max_query_len = impl.codec, 8, 4
    impl.soft_cap = 50.0
    tested = []
    monkeypatch.setattr(backend.OscarImpl, "last_vllm_config", None, raising=False)
    monkeypatch.setattr(backend, "pages_per_block", lambda _: 3)  # a hybrid model
    monkeypatch.setattr(backend, "self_test_once", lambda kernels, device: tested.append((kernels, device)))
    monkeypatch.setattr(backend, "_decode_workspace", lambda *sizes: sizes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    impl.process_weights_after_loading(torch.float16)
    ((kernels, _),) = tested
    assert kernels.codec is impl.codec
    assert (kernels.layout, kernels.num_query_heads, kernels.scale) == (layout, HEADS * GROUPS, D**-0.5)
    assert kernels.soft_cap == 50.0
    assert (kernels.sink, kernels.recent, kernels.prefill) == (SINK, RECENT, "invariant")
    assert (kernels.dtype, kernels.max_query_len, kernels.window_block) == (torch.float16, 4, 48)


def make_builder(impl, spec) -> OscarMetadataBuilder:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(impl=impl)}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    return OscarMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def run_step(monkeypatch, impl, step, pages, windows, *, head_size=D) -> tuple[torch.Tensor, dict]:
    """Write the cache and attend, with vLLM's metadata: output [T, Hq, head_size], and the metadata by layer name.

    The step's heads are padded; the layer sees their first ``head_size`` elements.
    """
    spec = SinkWindowSpec(
        block_size=16, num_kv_heads=HEADS, head_size=impl.layout.head_size, dtype=torch.uint8, sink=SINK, recent=RECENT
    )
    common = SimpleNamespace(
        num_actual_tokens=step.query.shape[0],
        num_reqs=step.seq_lens.shape[0],
        max_query_len=int(step.query_start_loc.diff().max()),
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc,
        seq_lens=step.seq_lens,
        seq_lens_cpu_upper_bound=step.seq_lens,
        is_prefilling=None,
        slot_mapping=step.slot_mapping,
    )
    metadata = {}
    for name, table, group in (("layer", step.page_table, None), (impl.window_name, step.window_table, spec)):
        common.block_table_tensor = table
        metadata[name] = make_builder(impl, group).build(0, common)
    cache = pages.view(pages.shape[0], HEADS, PAGE_TOKENS, -1)
    contexts = {
        "layer": (metadata["layer"], None, cache, None),
        impl.window_name: (metadata[impl.window_name], None, windows, None),
    }
    monkeypatch.setattr(backend, "get_attention_context", contexts.__getitem__)
    query, key, value = (x[..., :head_size].contiguous() for x in (step.query, step.key, step.value))
    output = torch.full_like(query, torch.nan)
    assert impl.forward(None, query, key, value, cache, metadata["layer"], output) is output
    return output, metadata


@pytest.mark.parametrize(
    ("requests", "prefill", "gathered", "sinks", "head_size", "soft_cap"),
    [
        (REQUESTS, "exact", True, False, D, 0.0),
        (REQUESTS, "exact", True, True, D, 0.0),
        (REQUESTS, "exact", False, True, D, 0.0),
        (REQUESTS, "invariant", False, False, D, 0.0),
        (REQUESTS, "exact", True, False, 40, 0.0),
        (DECODES, "exact", False, True, D, 0.0),
        (DECODES, "exact", False, False, 40, 0.0),
        (REQUESTS, "exact", True, True, D, CAP),
        (REQUESTS, "exact", False, False, D, CAP),
        (REQUESTS, "invariant", False, False, D, CAP),
        (DECODES, "exact", False, False, D, CAP),
    ],
    ids=[
        "gathered",
        "gathered with learned sinks",
        "in place with learned sinks",
        "invariant",
        "padded heads",
        "decodes",
        "decodes with padded heads",
        "gathered with soft cap and learned sinks",
        "in place with soft cap",
        "invariant with soft cap",
        "decodes with soft cap",
    ],
)
def test_a_step_equals_the_reference(monkeypatch, requests, prefill, gathered, sinks, head_size, soft_cap):
    codec, layout = make_codec(HEADS, D, "page")
    options = OscarConfig(prefill=prefill, sink=SINK, recent=RECENT).resolved()
    step = make_step(requests, heads=HEADS, groups=GROUPS, d=D, layout=layout, sink=SINK, recent=RECENT)
    generator = torch.Generator().manual_seed(3)
    padding = torch.arange(D) >= head_size
    for heads in (step.query, step.key, step.value, *step.windows.split(D, -1)):
        heads[..., padding] *= 0  # NaN stays NaN
    for r, length in enumerate(step.seq_lens.tolist()):  # pages of earlier steps
        count = length // PAGE_TOKENS
        both = torch.randn(2, count, PAGE_TOKENS, HEADS, D, generator=generator).masked_fill(padding, 0.0)
        encoded = reference.encode_pages(
            *both, torch.arange(count) * PAGE_TOKENS, codec=codec, layout=layout, sink=SINK
        )
        step.pages[step.page_table[r, :count].long()] = encoded

    impl = make_impl(codec, layout, options, head_size)
    impl.soft_cap = soft_cap
    if sinks:  # as heavy as all tokens together
        impl.sinks = torch.randn(HEADS * GROUPS, generator=generator) + 6
    monkeypatch.setattr(backend, "GATHER_MIN_TOKENS", 1 if gathered or prefill == "invariant" else 10_000)
    monkeypatch.setattr(prefill_module, "flash_attention", lambda _: (flash, merge_attn_states, 3))
    pages, windows = step.pages.clone(), step.windows.clone()
    output, metadata = run_step(monkeypatch, impl, step, pages, windows, head_size=head_size)
    decodes = sum(new == 1 for _, new in requests)
    assert (metadata["layer"].num_decodes, metadata["layer"].gather is not None) == (decodes, gathered)
    if gathered:
        assert [span.start_loc.diff().tolist() for span in metadata["layer"].gather.spans] == [
            [334, 340, 107, 30],
            [256, 0, 0, 0],
        ]

    batch = {**step.cache(), "codec": codec, "layout": layout, "sink": SINK}
    reference.append(step.key, step.value, slot_mapping=step.slot_mapping, windows=step.windows)
    reference.demote(step.key, step.value, **batch)
    assert torch.equal(windows.nan_to_num(), step.windows.nan_to_num())
    assert (pages != step.pages).double().mean() < 1e-3
    rules = {"scale": impl.scale, "recent": RECENT, "prefill": prefill}
    expected, lse = reference.attend(step.query, step.key, step.value, **batch, **rules, soft_cap=soft_cap)
    if soft_cap:
        plain, _ = reference.attend(step.query, step.key, step.value, **batch, **rules)
        moved = (plain - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(moved.quantile(0.05)) > 0.1
    expected = expected[..., :head_size]
    if sinks:  # one more token, whose value is 0
        expected *= (lse - torch.logaddexp(lse, impl.sinks.expand_as(lse))).exp()[..., None]
    error = (output.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The output is bfloat16 (the interpreter truncates), and a merge rounds it once more.
    assert float(error.max()) < 2.0**-6, f"worst (row, head) error {float(error.max()):.1e}"


@pytest.mark.parametrize("head_size", [48, 64, 80, 96, 112, 192])
def test_padded_heads_attend_like_plain_ones(monkeypatch, head_size):
    """Pages of floats: the layer is attention over all tokens with heads of the model's own size."""
    size = page_head_size(head_size)
    codec, layout = hadamard_codecs(1, HEADS, head_size)[0], FloatPageLayout(size, 4)
    rows = []  # keys, values of one request after the other, [tokens, H, size]

    def draw(count: int) -> torch.Tensor:
        plain = torch.randn(count, HEADS, head_size, generator=torch.Generator().manual_seed(len(rows)))
        rows.append(torch.nn.functional.pad(plain, (0, size - head_size)))
        return rows[-1]

    arguments = {"heads": HEADS, "groups": GROUPS, "layout": layout, "sink": SINK, "recent": RECENT}
    step = make_step(REQUESTS, d=size, dtype=torch.float32, keys=draw, values=draw, **arguments)
    requests = list(zip(rows[::2], rows[1::2], pairwise(step.query_start_loc.tolist()), strict=True))
    for table, (key, value, (begin, end)) in zip(step.page_table, requests, strict=True):
        count = (key.shape[0] - (end - begin)) // PAGE_TOKENS  # pages of earlier steps
        both = (x[: count * PAGE_TOKENS].view(count, PAGE_TOKENS, HEADS, size) for x in (key, value))
        step.pages[table[:count].long()] = reference.encode_pages(
            *both, torch.arange(count) * PAGE_TOKENS, codec=codec, layout=layout, sink=SINK
        )
    impl = make_impl(codec, layout, OscarConfig(payload="float", sink=SINK, recent=RECENT).resolved(), head_size)
    impl.uses_kernels, impl.max_query_len = False, 1
    output, _ = run_step(monkeypatch, impl, step, step.pages, step.windows, head_size=head_size)

    for key, value, (begin, end) in requests:
        query, key, value = (x[..., :head_size].transpose(0, 1) for x in (step.query[begin:end], key, value))
        key, value = (x.repeat_interleave(GROUPS, 0) for x in (key, value))
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        expected = (query @ key.mT * head_size**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ value
        torch.testing.assert_close(output[begin:end], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
