# SPDX-License-Identifier: Apache-2.0
"""Tokens written out as plain rows, against the reference; each row from where `reference.attend` reads it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_ops.step_cases import BLOCK, DEVICES
from tests.triton_ops.test_attend_prefill import RECENT, SINK, prepare
from triton_ops import reference
from triton_ops.gather import PADDING_ROWS, gather, plan_gather
from triton_ops.layout import PAGE_TOKENS

# (before, new): several pages of context, one that ends inside the recent window, none, an incomplete page.
REQUESTS = [(700, 150), (130, 40), (0, 60), (90, 3)]


def rows(step, codec, layout):
    """Keys and values [T_r, H, d] float32 of every request as ``exact`` reads them, and how far tf32 may move them."""
    result = []
    starts = step.query_start_loc.tolist()
    for r, length in enumerate(step.seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        first = length - (end - begin)
        page = step.pages[step.page_table[r, : length // PAGE_TOKENS].long()]
        parts = zip(reference.unpack(page, layout), (codec.key_query, codec.value_rotation), strict=True)
        size = torch.stack([part.rows().abs() @ matrix.abs().transpose(1, 2) for part, matrix in parts])
        bound = torch.zeros(2, length, *step.key.shape[1:])
        both = torch.full_like(bound, torch.nan)
        decoded = torch.stack(reference.dequantize(page, codec=codec, layout=layout)).flatten(1, 2)
        both[:, : decoded.shape[1]] = decoded
        bound[:, : decoded.shape[1]] = 2.0**-10 * size.transpose(2, 3).flatten(1, 2)  # 11 bits of both factors
        t = torch.arange(length)
        block = step.window_table[r, t // BLOCK].long()
        plain = (t < first) & ((t < SINK) | (t > first - RECENT)) & (block != 0)
        windows = step.windows[block, :, t % BLOCK].float()
        both[:, plain] = torch.stack(windows[plain].split(codec.head_size, -1))
        both[:, first:] = torch.stack([step.key[begin:end], step.value[begin:end]]).float()
        bound[:, plain | (t >= first)] = 0
        result.append((both, bound))
    return result


def run(step, codec, layout, device, buffer_pages):
    """Every span's rows of every request, in the order of the tokens: a list of [2, T_r, H, d] float32."""
    moved, codec = step.to(device), codec.to(device)
    lengths = step.seq_lens.tolist()
    plan = plan_gather(
        query_lens=step.query_start_loc.diff().tolist(),
        max_seq_lens=lengths,
        seq_lens=moved.seq_lens,
        buffer_pages=buffer_pages,
    )
    assert plan is not None
    assert plan.request.shape[0] <= buffer_pages
    buffer = torch.empty(2, plan.rows + 7, *step.key.shape[1:], device=device)
    found = [[] for _ in lengths]
    for number, span in enumerate(plan.spans):
        buffer.fill_(torch.nan)
        gather(
            **moved.cache("key", "value"), plan=plan, span=span, codec=codec, layout=layout, sink=SINK, recent=RECENT,
            key_out=buffer[0], value_out=buffer[1],
        )  # fmt: skip
        edges = span.start_loc.tolist()
        assert not buffer[:, : edges[-1]].isnan().any()
        # FlashAttention multiplies what follows by zero.
        assert not buffer[:, edges[-1] : edges[-1] + PADDING_ROWS].any()
        assert buffer[:, edges[-1] + PADDING_ROWS :].isnan().all()
        for r, (begin, end) in enumerate(pairwise(edges)):
            assert end - begin <= span.max_tokens
            if number == 0:  # the causal one holds all of the step's own tokens
                assert end - begin >= int(step.query_start_loc[r + 1] - step.query_start_loc[r])
            found[r].insert(0, buffer[:, begin:end].to("cpu", copy=True))
    return [torch.cat(parts, 1) for parts in found], len(plan.spans)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("d", "zero", "heads"), [(64, "page", 3), (128, "page", 2), (128, "token", 1), (256, "page", 1)]
)
def test_rows_come_from_where_attention_reads_them(d, zero, heads, device):
    step, codec, layout = prepare(REQUESTS, heads=heads, groups=1, d=d, zero=zero)
    found, spans = run(step, codec, layout, device, buffer_pages=12)
    assert spans == 3
    for actual, (expected, bound) in zip(found, rows(step, codec, layout), strict=True):
        assert actual.shape == expected.shape
        assert not expected.isnan().any()
        assert float(((actual - expected).abs() - bound).max()) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_recents_missing_after_a_prefix_hit_come_from_pages(device):
    step, codec, layout = prepare([(389, 150)], heads=1, groups=1, d=64, zero="page", drop_recents=True)
    (actual,), spans = run(step, codec, layout, device, buffer_pages=16)
    ((expected, bound),) = rows(step, codec, layout)
    assert spans == 1
    assert bool((bound[:, 389 - RECENT + 1 : 384] > 0).all(1).all())
    assert float(((actual - expected).abs() - bound).max()) <= 1e-6


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(0, 300),
)
def test_a_plan_covers_every_token_once(requests, buffer_pages, slack):
    """Spans are consecutive, fit the buffer, and the first ends with each request; ``slack``: the host's bound."""
    lengths = torch.tensor([before + new for before, new in requests], dtype=torch.int32)
    plan = plan_gather(
        query_lens=[new for _, new in requests],
        max_seq_lens=[n + slack for n in lengths.tolist()],
        seq_lens=lengths,
        buffer_pages=buffer_pages,
    )
    if plan is None:
        assert sum(-(-new // PAGE_TOKENS) + 1 for _, new in requests) > buffer_pages
        return
    assert plan.request.shape[0] <= buffer_pages
    places = list(zip(plan.request.tolist(), plan.index.tolist(), strict=True))
    end = lengths.clone()
    for number, span in enumerate(plan.spans):
        count = span.start_loc.diff()
        assert int(span.start_loc[-1]) <= buffer_pages * PAGE_TOKENS
        assert int(count.max()) <= span.max_tokens
        if number == 0:
            assert bool((count >= torch.tensor([new for _, new in requests])).all())
        begin = torch.where(count > 0, span.first_page * PAGE_TOKENS, end)
        assert torch.equal(begin + count, end)
        for r, tokens in enumerate(count.tolist()):  # every row has a place that writes it
            assert {(r, i) for i in range(-(-tokens // PAGE_TOKENS))} <= set(places)
        end = begin
    assert not end.any()


def test_buffers_that_do_not_fit_are_refused():
    step, codec, layout = prepare([(300, 1)], heads=1, groups=1, d=64, zero="page")
    plan = plan_gather(query_lens=[1], max_seq_lens=[301], seq_lens=step.seq_lens, buffer_pages=3)
    small = torch.zeros(2 * PAGE_TOKENS, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"contiguous \[at least 640, 1, 64\]"):
        gather(
            **step.cache("key", "value"), plan=plan, span=plan.spans[0], codec=codec, layout=layout, sink=SINK,
            recent=RECENT, key_out=small, value_out=small,
        )  # fmt: skip
