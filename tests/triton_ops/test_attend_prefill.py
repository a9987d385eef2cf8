# SPDX-License-Identifier: Apache-2.0
"""Partial prefill attention, merged with the chunk's own keys, against the reference in float64."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calib.allocation import allocate
from tests.triton_ops.step_cases import DEVICES, make_step
from tests.triton_ops.test_codec import random_basis
from triton_ops import reference
from triton_ops.attend_prefill import attend_prefill, launch_shape, tile_bound
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec, spectral_codec
from triton_ops.layout import PAGE_TOKENS, PageLayout

SINK, RECENT = 64, 128


def make_codec(heads: int, d: int, zero: str) -> tuple[LayerCodec, PageLayout]:
    if zero == "page":
        # Directions of unit-variance keys, weighted as if queries read some of them 64 times more than others.
        basis, weight = random_basis(heads, d, 3), 2.0 ** torch.linspace(3, -3, d, dtype=torch.float64)
        codec = spectral_codec(
            basis * weight,
            (basis / weight).transpose(1, 2),
            weight.square().expand(heads, d),
            allocate(weight.square(), torch.zeros(d), 0.0, 8).expand(heads, d),
            kappa=1.1,
            value_rotation=random_basis(heads, d, 4),
            value_quantizer=Quantizer("gauss", 1.1),
        )
        return codec.to("cpu"), PageLayout(d, "page")
    means = torch.randn(2, heads, d, generator=torch.Generator().manual_seed(5))
    codec = rotation_codec(
        random_basis(heads, d, 3),
        random_basis(heads, d, 4),
        zero="token",
        key_quantizer=Quantizer("gauss", 1.1),
        value_quantizer=Quantizer("gauss", 1.1),
        key_mean=means[0],
        value_mean=means[1],
    )
    return codec.to("cpu"), PageLayout(d, "token")


def prepare(requests, *, heads, groups, d, zero, **options):
    """A step whose pages hold what `demote` would have written, in this step and before."""
    codec, layout = make_codec(heads, d, zero)
    step = make_step(requests, heads=heads, groups=groups, d=d, layout=layout, sink=SINK, recent=RECENT, **options)
    generator = torch.Generator().manual_seed(1)
    for r, length in enumerate(step.seq_lens.tolist()):
        count = length // PAGE_TOKENS
        # Unlike the windows' tokens: a token read from the wrong place then shows.
        both = torch.randn(2, count, PAGE_TOKENS, heads, d, generator=generator)
        both[0] += torch.randn(count, 1, heads, d, generator=generator)
        first = torch.arange(count) * PAGE_TOKENS
        encoded = reference.encode_pages(both[0], both[1], first, codec=codec, layout=layout, sink=SINK)
        step.pages[step.page_table[r, :count].long()] = encoded
    # Windows of the step's own tokens are written before attention.
    reference.append(step.key, step.value, slot_mapping=step.slot_mapping, windows=step.windows)
    return step, codec, layout


def own_tokens(step, scale, prefill):
    """Causal attention of each chunk over its own keys: the caller's part. [T, Hq, d] and [T, Hq], float64."""
    outs, lses = [], []
    starts = step.query_start_loc.tolist()
    for begin, end in pairwise(starts):
        q, k, v = (x[begin:end].double().transpose(0, 1) for x in (step.query, step.key, step.value))
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = distance >= 0
        if prefill == "invariant":
            seen &= distance < RECENT
        logits = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outs.append((logits.softmax(-1) @ v).transpose(0, 1))
        lses.append(logits.logsumexp(-1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def logit_rounding(step, codec, layout, scale):
    """[T, Hq] float64: how far float16 rounding moves the logits of a row, from the size of what is rounded.

    q_hat and a key's slots are rounded once each, 2^-12 relative on average. Over the slots of a token such errors add
    like a random walk (four standard deviations are allowed), except that slots with codes 0 and 3 share the rounding
    of 1.5 scale, which is relative to the logit.
    """
    tokens = []
    starts = step.query_start_loc.tolist()
    for r, length in enumerate(step.seq_lens.tolist()):
        q = step.query[starts[r] : starts[r + 1]].double()
        q = q.view(q.shape[0], codec.num_kv_heads, q.shape[1] // codec.num_kv_heads, codec.head_size)
        page = step.pages[step.page_table[r, : length // PAGE_TOKENS].long()]
        rows = reference.unpack(page, layout)[0].rows().double().transpose(0, 1).flatten(1, 2)  # [H, t, d]
        hat = torch.einsum("thgd,hds->thgs", q, codec.key_query.double()) * scale
        logit = torch.einsum("thgs,hns->thgn", hat, rows).abs()
        walk = torch.einsum("thgs,hns->thgn", hat.square(), rows.square()).sqrt()
        size = logit + 4 * walk
        tokens.append(
            size.amax(-1).flatten(1) if page.shape[0] else size.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        )
    return 2.0**-11 * torch.cat(tokens)


def compare(step, codec, layout, device, prefill="exact", **options):
    """Runs the kernel, merges with the chunk's own attention and checks every row; returns the partial (out, lse).

    Beside the logits, probabilities and dequantized values are rounded to float16: 2^-10 of a row together.
    """
    scale = codec.head_size**-0.5
    moved = step.to(device)
    out = torch.full(step.query.shape, torch.nan, device=device)
    lse = torch.full((step.query.shape[1], step.query.shape[0]), torch.nan, device=device)
    sizes = {name: step.sizes[name] for name in ("num_tokens", "num_requests")}
    attend_prefill(
        query=moved.query, **moved.cache(), codec=codec.to(device), layout=layout, scale=scale, sink=SINK,
        recent=RECENT, prefill=prefill, out=out, lse=lse, **sizes, **options,
    )  # fmt: skip
    out, lse = out.cpu().double(), lse.cpu().double().T
    assert bool(out.isfinite().all())
    assert not bool(lse.isnan().any())
    parts = [(out, lse), own_tokens(step, scale, prefill)]
    merged = reference.merge(*(torch.stack(part) for part in zip(*parts, strict=True)))
    expected = reference.attend(
        step.query, step.key, step.value, **step.cache(), codec=codec, layout=layout, scale=scale, sink=SINK,
        recent=RECENT, prefill=prefill,
    )  # fmt: skip
    rounding = logit_rounding(step, codec, layout, scale)
    assert float(rounding.max()) < 0.02  # the case is a fair one
    error = (merged[0] - expected[0]).abs().amax(-1) / expected[0].abs().amax(-1)
    assert bool((error <= 2 * rounding + 2.0**-10).all()), float(error.max())
    lse_error = (merged[1] - expected[1]).abs()
    assert bool((lse_error <= rounding + 1e-5).all()), float(lse_error.max())
    print(f"error {float(error.max()):.1e}, lse {float(lse_error.max()):.1e}, bound {float(rounding.max()):.1e}")
    return out, lse


# (before, new): no context, a context shorter than the recent window, a chunk longer than the recent window that
# completes a page begun before it, a decode token, a padded request.
REQUESTS = [(0, 70), (100, 33), (270, 200), (260, 1), (5, 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("zero", "prefill"), [("page", "exact"), ("page", "invariant"), ("token", "exact")])
@pytest.mark.parametrize(("heads", "groups", "d", "block_n"), [(2, 2, 64, 64), (1, 4, 128, 128), (1, 1, 256, 64)])
def test_against_the_reference(device, heads, groups, d, block_n, zero, prefill):
    step, codec, layout = prepare(REQUESTS, heads=heads, groups=groups, d=d, zero=zero)
    out, lse = compare(step, codec, layout, device, prefill, block_n=block_n)
    assert bool((lse[:70] == -torch.inf).all())
    assert bool((out[:70] == 0).all())
    assert bool((lse[70:] > -torch.inf).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block_n", "d"), [(64, 128), (128, 64), (128, 256)])
def test_inner_steps_of_half_and_whole_pages(device, block_n, d):
    step, codec, layout = prepare([(300, 20)], heads=1, groups=1, d=d, zero="page")
    compare(step, codec, layout, device, block_n=block_n)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [3, 7, 8, 16])
def test_query_heads_per_key_head(device, groups):
    """Group sizes that are no power of two leave rows of a tile unused."""
    step, codec, layout = prepare([(300, 29), (40, 2)], heads=2, groups=groups, d=64, zero="page")
    compare(step, codec, layout, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefill", ["exact", "invariant"])
def test_recents_missing_after_a_prefix_hit(device, prefill):
    """Null window blocks fall back to pages, token by token and only for tokens before the step."""
    step, codec, layout = prepare([(389, 150)], heads=1, groups=2, d=128, zero="page", drop_recents=True)
    assert bool((step.window_table[0, SINK // 16 : 384 // 16] == 0).all())
    compare(step, codec, layout, device, prefill)


@pytest.mark.parametrize("device", DEVICES)
def test_many_pages_before_the_window(device):
    """The mean keys of 16 pages are multiplied at a time; here are 18."""
    step, codec, layout = prepare([(18 * PAGE_TOKENS + 130, 3)], heads=1, groups=1, d=64, zero="page")
    compare(step, codec, layout, device)


@pytest.mark.parametrize("device", DEVICES)
def test_sink_and_recent_of_other_lengths(device):
    """No sink: page 0 is read whole. A sink of a whole page: page 0 is not read at all."""
    for sink in (0, 128):
        step, codec, layout = prepare([(400, 20)], heads=1, groups=1, d=64, zero="token")
        moved = step.to(device)
        out, lse = attend_prefill(
            query=moved.query, **moved.cache(), codec=codec.to(device), layout=layout, scale=0.125, sink=sink,
            recent=RECENT, num_tokens=20, num_requests=1,
        )  # fmt: skip
        if sink == 128:  # the window table holds 64 sink tokens: the others are nowhere
            step.window_table[0, 4:8] = 0
        own = own_tokens(step, 0.125, "exact")
        parts = torch.stack([out.cpu().double(), own[0]]), torch.stack([lse.cpu().double().T, own[1]])
        expected = reference.attend(
            step.query, step.key, step.value, **step.cache(), codec=codec, layout=layout, scale=0.125, sink=sink,
            recent=RECENT,
        )  # fmt: skip
        merged = reference.merge(*parts)
        assert float((merged[0] - expected[0]).abs().max() / expected[0].abs().max()) < 2e-3
        assert float((merged[1] - expected[1]).abs().max()) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_queries_stay_finite(device):
    """Rows of zeros, of 1e-6 and of 1e3: the power of two per row keeps float16 weights in range."""
    step, codec, layout = prepare([(300, 40)], heads=1, groups=2, d=64, zero="page")
    step.query[::2] = 0
    step.query[1::4] *= 1e-6
    compare(step, codec, layout, device)
    step.query.fill_(1e3)
    moved = step.to(device)
    out, lse = attend_prefill(
        query=moved.query, **moved.cache(), codec=codec.to(device), layout=layout, scale=0.125, sink=SINK,
        recent=RECENT, num_tokens=40, num_requests=1,
    )  # fmt: skip
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.sampled_from([4, 8, 18, 32, 64, 128]))
def test_the_grid_covers_every_tile(counts, tile):
    bound = tile_bound(num_tokens=sum(counts), num_requests=len(counts), tile=tile)
    assert sum(-(-n // tile) for n in counts) <= bound


def test_launch_choices():
    for d in (64, 128, 256):
        for groups in (1, 3, 4, 16, 100):
            rows, tokens, warps = launch_shape(head_size=d, groups=groups)
            assert rows >= min(groups, rows)
            assert rows & (rows - 1) == 0
            assert tokens in (64, 128)
            assert warps in (4, 8)


def test_refuses_what_does_not_fit():
    step, codec, layout = prepare([(130, 10)], heads=2, groups=1, d=64, zero="page")
    arguments = {**step.cache("query"), "codec": codec, "layout": layout}
    arguments |= {"scale": 0.1, "sink": 64, "recent": 256, "num_tokens": 10, "num_requests": 1}
    with pytest.raises(ValueError, match="must be contiguous"):
        attend_prefill(**arguments | {"codec": replace(codec, key_encode=codec.key_encode.mT.contiguous().mT)})
    with pytest.raises(ValueError, match="zero='page'"):
        attend_prefill(**arguments | {"layout": PageLayout(64, "token")})
    with pytest.raises(ValueError, match="do not agree"):
        attend_prefill(**arguments | {"query": step.query[:, :1]})
    with pytest.raises(ValueError, match="do not fit"):
        attend_prefill(**arguments | {"pages": step.pages[..., :-4]})
    with pytest.raises(ValueError, match="must be bfloat16"):
        attend_prefill(**arguments | {"query": step.query.float()})
    with pytest.raises(ValueError, match="recent=100"):
        attend_prefill(**arguments | {"recent": 100})
    wide = step.query.repeat_interleave(17, 1)
    with pytest.raises(ValueError, match="block_m=16"):
        attend_prefill(**arguments | {"query": wide, "block_m": 16})
