# SPDX-License-Identifier: Apache-2.0
"""Logits with a soft cap (Gemma 2): the reference against plain attention, the kernels against the reference."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.triton_ops import test_attend_decode as decode
from tests.triton_ops.step_cases import DEVICES
from tests.triton_ops.test_attend_prefill import RECENT, SINK, prepare
from triton_ops import reference
from triton_ops.attend_prefill import attend_prefill
from triton_ops.layout import FloatPageLayout

CAP = 1.5
"""Small, for logits of a few units: the cap then changes most of them."""


def attend(step, codec, layout, **options):
    return reference.attend(
        step.query, step.key, step.value, **step.cache(), codec=codec, layout=layout, scale=0.125, sink=SINK,
        recent=RECENT, **options,
    )  # fmt: skip


def test_the_reference_caps_every_logit():
    """Float pages hold what the windows would: plain attention over all tokens is the answer."""
    step, codec, _ = prepare([(300, 1), (0, 40)], heads=2, groups=2, d=64, zero="page")
    layout = FloatPageLayout(64, 4)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 300, 2, 64, generator=generator)
    first = torch.arange(2) * 128
    shape = (2, 128, 2, 64)
    encoded = reference.encode_pages(
        key[:256].view(shape), value[:256].view(shape), first, codec=codec, layout=layout, sink=SINK
    )
    pages = encoded.new_zeros(step.pages.shape[0], *encoded.shape[1:])
    pages[step.page_table[0, :2].long()] = encoded
    fields = ("query", "key", "value", "windows")
    step = replace(step, pages=pages, **{name: getattr(step, name).float() for name in fields})
    position = torch.arange(300)
    windows = step.window_table[0, position // 16].long()
    step.windows[windows, :, position % 16] = torch.cat([key, value], 2)
    out, lse = attend(step, codec, layout, soft_cap=CAP)
    key, value = (torch.cat([old, new[:1]]) for old, new in ((key, step.key), (value, step.value)))
    logits = torch.einsum("hgd,thd->hgt", step.query[0].view(2, 2, 64), key) * 0.125
    assert float(logits.abs().max()) > CAP
    logits = CAP * torch.tanh(logits / CAP)
    expected = torch.einsum("hgt,thd->hgd", logits.softmax(-1), value).flatten(0, 1)
    assert torch.allclose(out[0], expected, atol=1e-5)
    assert torch.allclose(lse[0], logits.logsumexp(-1).flatten(), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("d", "groups", "zero", "prefill"),
    [
        (64, 2, "page", "exact"),
        (64, 2, "page", "invariant"),
        (64, 2, "token", "exact"),
        (64, 16, "token", "invariant"),
        (128, 4, "page", "exact"),
        (128, 1, "token", "exact"),
        (256, 2, "page", "exact"),
        (256, 3, "token", "exact"),
    ],
)
def test_prefill_caps_pages_and_windows(device, d, groups, zero, prefill):
    """A step that sees a history, a sink and recent tokens; its own tokens are attended by the caller."""
    step, codec, layout = prepare([(270, 33), (100, 5)], heads=1, groups=groups, d=d, zero=zero)
    moved = step.to(device)
    sizes = {name: step.sizes[name] for name in ("num_tokens", "num_requests")}
    out, lse = attend_prefill(
        query=moved.query, **moved.cache(), codec=codec.to(device), layout=layout, scale=0.125, sink=SINK,
        recent=RECENT, prefill=prefill, soft_cap=CAP, **sizes,
    )  # fmt: skip
    own_out, own_lse = own_tokens(step, prefill)
    parts = torch.stack([out.cpu().double(), own_out]), torch.stack([lse.cpu().double().T, own_lse])
    merged, total = reference.merge(*parts)
    expected, expected_lse = attend(step, codec, layout, prefill=prefill, soft_cap=CAP)
    plain, _ = attend(step, codec, layout, prefill=prefill)
    scale = expected.abs().amax(-1, keepdim=True)
    assert float(((plain - expected) / scale).abs().max()) > 0.1  # the cap matters here
    assert float(((merged - expected) / scale).abs().max()) < 3e-3
    assert float((total - expected_lse).abs().max()) < 1e-3


def own_tokens(step, prefill):
    """Capped causal attention of each chunk over its own keys, [T, Hq, d] and [T, Hq] float64."""
    outs, lses = [], []
    starts = step.query_start_loc.tolist()
    for begin, end in pairwise(starts):
        q, k, v = (x[begin:end].double().transpose(0, 1) for x in (step.query, step.key, step.value))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (distance >= 0) & ((distance < RECENT) | (prefill == "exact"))
        logits = CAP * torch.tanh(q @ k.transpose(1, 2) * 0.125 / CAP)
        logits = logits.masked_fill(~seen, -torch.inf)
        outs.append((logits.softmax(-1) @ v).transpose(0, 1))
        lses.append(logits.logsumexp(-1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def check_decode(requests, device, *, groups, d, kind, sharpness=2.0, cap=CAP, **options):
    """The decode kernels against the reference, in a step that no row would pass without its cap."""
    codec, layout = decode.make_codec(1, d, kind)
    step = decode.decode_step(requests, heads=1, d=d, groups=groups, codec=codec, layout=layout, **options)
    step.query.mul_(sharpness)
    rules = {"codec": codec, "layout": layout, "scale": d**-0.5, "sink": 64, "recent": 256, "max_decode_len": 16}
    tensors = (step.query, step.key, step.value)
    capped, plain = (reference.attend(*tensors, **step.cache(), **rules, soft_cap=c) for c in (cap, 0.0))
    moved = (plain[0] - capped[0]).norm(dim=-1) / capped[0].norm(dim=-1)
    assert float(torch.maximum(moved, (plain[1] - capped[1]).abs()).min()) > 0.02
    decode.check(step, device, codec, layout, soft_cap=cap)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("groups", "kind"),
    [(1, "page"), (3, "token"), (4, "page"), (5, "page"), (8, "token"), (12, "page"), (16, "token")],
)
def test_decode_caps_pages_and_windows(device, groups, kind, d):
    check_decode([(799, 1), (140, 1)], device, groups=groups, d=d, kind=kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "groups", "d"), [(5, 1, 128), (3, 4, 64), (2, 8, 256)])
def test_decode_caps_several_query_tokens(device, queries, groups, d):
    """Pages that some rows read and others do not; recents that lost their windows."""
    requests = [(500, queries), (640, queries), (256 - queries, queries)]
    check_decode(requests, device, groups=groups, d=d, kind="page", drop_recents=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [4, 8])
def test_decode_caps_logits_far_beyond_the_cap(device, groups):
    """Logits of hundreds of units end at the cap, where many tokens weigh the same."""
    check_decode([(1200, 1), (90, 1)], device, groups=groups, d=128, kind="page", sharpness=60.0, cap=20.0)


def test_a_negative_cap_is_refused():
    step, codec, layout = prepare([(130, 10)], heads=1, groups=1, d=64, zero="page")
    with pytest.raises(ValueError, match="soft_cap=-1"):
        attend_prefill(
            **step.cache("query"), codec=codec, layout=layout, scale=0.1, sink=SINK, recent=RECENT, num_tokens=10,
            num_requests=1, soft_cap=-1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="soft_cap=-1"):
        decode.run(step, "cpu", codec, layout, sink=SINK, recent=RECENT, soft_cap=-1.0)
