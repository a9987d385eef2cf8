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
from oscar_vllm.backend import OscarImpl, OscarMetadataBuilder
from oscar_vllm.cache_spec import SinkWindowSpec
from oscar_vllm.config import OscarConfig
from oscar_vllm.rotation import EngineSettings
from tests.triton_ops.step_cases import make_step
from tests.triton_ops.test_reference import make_codec
from triton_ops import reference
from triton_ops.attend_decode import DecodeWorkspace
from triton_ops.layout import PAGE_TOKENS

HEADS, GROUPS, D, SINK, RECENT = 1, 2, 64, 64, 128
# Two decodes, then chunks: several pages of context, a page that the recent window cuts, and a prompt from its start.
REQUESTS = [(400, 1), (90, 1), (530, 60), (300, 40), (100, 7), (0, 30)]


def flash(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale, causal, out, **options):
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
        logits = logits.masked_fill(~seen, -torch.inf)
        lse[:, begin:end] = logits.logsumexp(-1)
        out[begin:end] = torch.einsum("hnt,thd->nhd", logits.softmax(-1).nan_to_num(), values).to(out.dtype)
    return out, lse


def make_impl(codec, layout, options) -> OscarImpl:
    """An implementation as `OscarImpl.__init__` and `attach` leave it on a GPU."""
    impl = object.__new__(OscarImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = HEADS * GROUPS, HEADS, D, D**-0.5
    impl.settings = EngineSettings(options, None)
    impl.layout, impl.codec, impl.uses_kernels = layout, codec.to("cpu"), True
    impl.window_name, impl.sinks = "layer.oscar_window", None
    impl.gather_pages = 12
    impl.workspace = DecodeWorkspace.allocate(
        max_requests=8,
        max_query_len=1,
        num_query_heads=HEADS * GROUPS,
        num_kv_heads=HEADS,
        head_size=D,
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
    tested = []
    monkeypatch.setattr(backend, "self_test_once", lambda kernels, device: tested.append((kernels, device)))
    monkeypatch.setattr(backend, "_decode_workspace", lambda *sizes: sizes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    impl.process_weights_after_loading(torch.float16)
    ((kernels, _),) = tested
    assert kernels.codec is impl.codec
    assert (kernels.layout, kernels.num_query_heads, kernels.scale) == (layout, HEADS * GROUPS, D**-0.5)
    assert (kernels.sink, kernels.recent, kernels.prefill) == (SINK, RECENT, "invariant")
    assert (kernels.dtype, kernels.max_query_len) == (torch.float16, 4)


def make_builder(impl, spec) -> OscarMetadataBuilder:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(impl=impl)}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    return OscarMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("prefill", "gathered", "sinks"),
    [("exact", True, False), ("exact", True, True), ("exact", False, True), ("invariant", False, False)],
    ids=["gathered", "gathered with learned sinks", "in place with learned sinks", "invariant"],
)
def test_a_mixed_step_equals_the_reference(monkeypatch, prefill, gathered, sinks):
    codec, layout = make_codec(HEADS, D, "page")
    options = OscarConfig(prefill=prefill, sink=SINK, recent=RECENT).resolved()
    step = make_step(REQUESTS, heads=HEADS, groups=GROUPS, d=D, layout=layout, sink=SINK, recent=RECENT)
    generator = torch.Generator().manual_seed(3)
    for r, length in enumerate(step.seq_lens.tolist()):  # pages of earlier steps
        count = length // PAGE_TOKENS
        both = torch.randn(2, count, PAGE_TOKENS, HEADS, D, generator=generator)
        encoded = reference.encode_pages(
            *both, torch.arange(count) * PAGE_TOKENS, codec=codec, layout=layout, sink=SINK
        )
        step.pages[step.page_table[r, :count].long()] = encoded
    pages, windows = step.pages.clone(), step.windows.clone()

    impl = make_impl(codec, layout, options)
    if sinks:  # as heavy as all tokens together
        impl.sinks = torch.randn(HEADS * GROUPS, generator=generator) + 6
    spec = SinkWindowSpec(block_size=16, num_kv_heads=HEADS, head_size=D, dtype=torch.uint8, sink=SINK, recent=RECENT)
    common = SimpleNamespace(
        num_actual_tokens=step.query.shape[0],
        num_reqs=len(REQUESTS),
        max_query_len=60,
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc,
        seq_lens=step.seq_lens,
        seq_lens_cpu_upper_bound=step.seq_lens,
        is_prefilling=None,
    )
    monkeypatch.setattr(backend, "GATHER_MIN_TOKENS", 1 if gathered or prefill == "invariant" else 10_000)
    metadata = {}
    for name, table, group in (("layer", step.page_table, None), (impl.window_name, step.window_table, spec)):
        common.block_table_tensor = table
        metadata[name] = make_builder(impl, group).build(0, common)
    assert (metadata["layer"].num_decodes, metadata["layer"].gather is not None) == (2, gathered)
    if gathered:
        assert [span.start_loc.diff().tolist() for span in metadata["layer"].gather.spans] == [
            [334, 340, 107, 30],
            [256, 0, 0, 0],
        ]

    cache = pages.view(pages.shape[0], HEADS, PAGE_TOKENS, -1)
    contexts = {
        "layer": (metadata["layer"], None, cache, None),
        impl.window_name: (metadata[impl.window_name], None, windows, step.slot_mapping),
    }
    monkeypatch.setattr(backend, "get_attention_context", contexts.__getitem__)
    monkeypatch.setattr(prefill_module, "flash_attention", lambda: (flash, merge_attn_states, 3))
    impl.do_kv_cache_update(SimpleNamespace(layer_name="layer"), step.key, step.value, cache, step.slot_mapping)
    output = torch.full_like(step.query, torch.nan)
    impl.forward(None, step.query, step.key, step.value, cache, metadata["layer"], output)

    batch = {**step.cache(), "codec": codec, "layout": layout, "sink": SINK}
    reference.append(step.key, step.value, slot_mapping=step.slot_mapping, windows=step.windows)
    reference.demote(step.key, step.value, **batch)
    expected, lse = reference.attend(
        step.query, step.key, step.value, **batch, scale=D**-0.5, recent=RECENT, prefill=prefill
    )
    if sinks:  # one more token, whose value is 0
        expected *= (lse - torch.logaddexp(lse, impl.sinks.expand_as(lse))).exp()[..., None]
    error = (output.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The output is bfloat16 (the interpreter truncates), and a merge rounds it once more.
    assert float(error.max()) < 2.0**-6, f"worst (row, head) error {float(error.max()):.1e}"
