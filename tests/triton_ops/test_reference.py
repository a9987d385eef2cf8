# SPDX-License-Identifier: Apache-2.0
"""The reference against a brute force that follows the rule token by token, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_ops.test_codec import random_basis, random_spectral
from triton_ops import reference
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec
from triton_ops.layout import PAGE_TOKENS, FloatPageLayout, PageLayout

BLOCK = 16


def make_codec(heads: int, d: int, kind: str) -> tuple[LayerCodec, PageLayout | FloatPageLayout]:
    gauss = Quantizer("gauss", 1.1)
    if kind == "spectral":
        return random_spectral(heads, d, 4), PageLayout(d, "page")
    key, value = random_basis(heads, d, 3), random_basis(heads, d, 4)
    if kind == "float":
        return rotation_codec(key, value, zero="page", key_quantizer=gauss, value_quantizer=gauss), FloatPageLayout(
            d, 4
        )
    if kind == "page":
        codec = rotation_codec(key, value, zero="page", key_quantizer=gauss, value_quantizer=gauss)
        return codec, PageLayout(d, "page")
    means = torch.randn(2, heads, d, generator=torch.Generator().manual_seed(5))
    codec = rotation_codec(
        key,
        value,
        zero="token",
        key_quantizer=Quantizer("minmax", 0.96) if kind == "minmax" else gauss,
        value_quantizer=Quantizer("minmax", 0.92) if kind == "minmax" else gauss,
        key_mean=means[0],
        value_mean=means[1],
    )
    return codec, PageLayout(d, "token")


class Cache:
    """A paged cache of several requests, NaN wherever nothing was written."""

    def __init__(self, heads, groups, d, lengths, kind="spectral", sink=64, recent=256, prefill="exact", seed=0):
        self.codec, self.layout = make_codec(heads, d, kind)
        self.rule = {"sink": sink, "recent": recent, "prefill": prefill}
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randn(n, heads * (groups + 2), d, generator=generator) for n in lengths]
        self.heads, self.groups, self.d = heads, groups, d
        self.done = [0] * len(lengths)
        longest = max(lengths)
        max_pages, max_blocks = longest // PAGE_TOKENS + 1, longest // BLOCK + 1
        permutation = torch.randperm(len(lengths) * max_pages, generator=generator) + 1
        self.page_table = permutation.view(len(lengths), max_pages).int()
        permutation = torch.randperm(len(lengths) * max_blocks, generator=generator) + 1
        self.window_table = permutation.view(len(lengths), max_blocks).int()
        self.pages = torch.full((len(lengths) * max_pages + 1, heads, self.layout.page_bytes), 255, dtype=torch.uint8)
        self.windows = torch.full((len(lengths) * max_blocks + 1, heads, BLOCK, 2 * d), torch.nan)

    def split(self, tokens):
        q, k, v = tokens.split([self.heads * self.groups, self.heads, self.heads], 1)
        return q, k, v

    def step(self, counts):
        """Compute the next ``counts[r]`` tokens of each request; returns [T, Hq, d] outputs and lse."""
        rows, slots = [], []
        for r, count in enumerate(counts):
            position = torch.arange(self.done[r], self.done[r] + count)
            rows.append(self.tokens[r][position])
            slots.append(self.window_table[r, position // BLOCK].long() * BLOCK + position % BLOCK)
            self.done[r] += count
        q, k, v = self.split(torch.cat(rows))
        batch = {
            "pages": self.pages,
            "windows": self.windows,
            "page_table": self.page_table,
            "window_table": self.window_table,
            "query_start_loc": torch.tensor([0, *counts]).cumsum(0).int(),
            "seq_lens": torch.tensor(self.done).int(),
            "codec": self.codec,
            "layout": self.layout,
        }
        reference.append(k, v, slot_mapping=torch.cat(slots), windows=self.windows)
        reference.demote(k, v, **batch, sink=self.rule["sink"])
        return reference.attend(q, k, v, **batch, scale=1 / math.sqrt(self.d), **self.rule)

    def brute_force(self, r, first_query, step_start, decode=False):
        """float64 outputs of request r's queries from ``first_query`` on, token by token."""
        q, k, v = (x.double() for x in self.split(self.tokens[r]))
        table = self.page_table[r, : self.done[r] // PAGE_TOKENS].long()
        page_k, page_v = reference.dequantize(
            self.pages[table], codec=self.codec, layout=self.layout, dtype=torch.float32
        )
        page_k, page_v = (x.flatten(0, 1).double() for x in (page_k, page_v))
        sink, recent = self.rule["sink"], self.rule["recent"]
        out = []
        for position in range(first_query, self.done[r]):
            keys, values = [], []
            anchor = step_start if self.rule["prefill"] == "exact" and not decode else position
            for t in range(position + 1):
                exact = t < sink or t > anchor - recent
                if exact and t < step_start and self.window_table[r, t // BLOCK] == 0:
                    exact = False
                if self.rule["prefill"] == "exact" and t >= step_start:
                    exact = True
                keys.append(k[t] if exact else page_k[t])
                values.append(v[t] if exact else page_v[t])
            keys, values = torch.stack(keys), torch.stack(values)  # [t, H, d]
            query = q[position].view(self.heads, self.groups, self.d)
            probability = (torch.einsum("hgd,thd->hgt", query, keys) / math.sqrt(self.d)).softmax(-1)
            out.append(torch.einsum("hgt,thd->hgd", probability, values).flatten(0, 1))
        return torch.stack(out)


def assert_close(actual, expected):
    """Per (row, head) relative error of float32 arithmetic."""
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 2e-5, f"worst (row, head) error {float(error.max()):.2e}"


@pytest.mark.parametrize("kind", ["spectral", "page", "gauss", "minmax", "float"])
@pytest.mark.parametrize("prefill", ["exact", "invariant"])
@pytest.mark.parametrize("d", [64, 128])
def test_attend_follows_the_rule(kind, prefill, d):
    cache = Cache(2, 2, d, [600, 333], kind=kind, prefill=prefill)
    cache.step([383, 100])
    out, _ = cache.step([17, 200])
    assert_close(out[:17], cache.brute_force(0, 383, 383))
    assert_close(out[17:], cache.brute_force(1, 100, 100))
    out, _ = cache.step([200, 33])
    assert_close(out[150:200], cache.brute_force(0, 550, 400))


@pytest.mark.parametrize("groups", [1, 3, 7])
def test_grouped_query_heads(groups):
    cache = Cache(2, groups, 64, [450])
    cache.step([440])
    out, _ = cache.step([10])
    assert_close(out, cache.brute_force(0, 440, 440))


@pytest.mark.parametrize("sink", [0, 16, 128])
@pytest.mark.parametrize("recent", [128, 256])
def test_window_sizes(sink, recent):
    cache = Cache(1, 2, 64, [520], sink=sink, recent=recent)
    cache.step([500])
    out, _ = cache.step([20])
    assert_close(out, cache.brute_force(0, 500, 500))


def test_null_recent_blocks_are_read_from_pages():
    """After a prefix hit without its recents, only the sink and the new tokens have BF16 blocks."""
    cache = Cache(2, 2, 64, [512 + 40])
    cache.step([512])
    cache.window_table[0, 64 // BLOCK : 512 // BLOCK] = 0
    out, _ = cache.step([40])
    assert_close(out, cache.brute_force(0, 512, 512))


def test_drafts_see_what_plain_decoding_sees():
    """Verified together, each token counts its recents from itself; as a chunk, all count from the first."""
    cache = Cache(2, 2, 64, [448])
    cache.rule["max_decode_len"] = 8
    cache.step([440])
    out, _ = cache.step([8])
    assert_close(out, cache.brute_force(0, 440, 440, decode=True))
    with pytest.raises(AssertionError, match="worst"):
        assert_close(out, cache.brute_force(0, 440, 440))


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 200), min_size=1, max_size=8), kind=st.sampled_from(["spectral", "gauss"]))
def test_invariant_rule_does_not_depend_on_chunking(cuts, kind):
    """The same pages bit for bit, and outputs equal to float32 rounding, however the prompt is cut."""
    length = sum(cuts)
    whole, chunked = (Cache(1, 2, 64, [length], kind=kind, prefill="invariant") for _ in range(2))
    expected, expected_lse = whole.step([length])
    parts = [chunked.step([n]) for n in cuts]
    assert torch.equal(whole.pages, chunked.pages)
    assert_close(torch.cat([out for out, _ in parts]), expected.double())
    assert torch.allclose(torch.cat([lse for _, lse in parts]), expected_lse, atol=1e-5)


def test_pages_do_not_depend_on_the_batch():
    alone, together = Cache(2, 2, 128, [300]), Cache(2, 2, 128, [300, 700, 129])
    together.tokens[0] = alone.tokens[0]
    alone.step([300])
    together.step([300, 700, 129])
    pages = [cache.pages[cache.page_table[0, :2].long()] for cache in (alone, together)]
    assert torch.equal(*pages)


def test_rewritten_speculative_tokens_replace_the_page():
    """A page completed by draft tokens that are rejected is demoted again with the right tokens."""
    right, wrong = Cache(1, 2, 64, [400]), Cache(1, 2, 64, [400])
    accepted = wrong.tokens[0].clone()
    wrong.tokens[0][380:] = torch.randn_like(accepted[380:])
    wrong.step([379])
    wrong.step([8])  # 379..386 completes page 2; 380.. are rejected
    wrong.done[0], wrong.tokens[0] = 380, accepted
    wrong.step([20])
    right.step([380])
    right.step([20])
    assert torch.equal(right.pages[right.page_table[0, :3].long()], wrong.pages[wrong.page_table[0, :3].long()])


def test_sink_tokens_stay_out_of_page_statistics():
    cache, loud = Cache(1, 1, 64, [128]), Cache(1, 1, 64, [128])
    loud.tokens[0][:64, 1] *= 1000
    cache.step([128])
    loud.step([128])
    rows = [reference.unpack(c.pages[c.page_table[0, :1].long()], c.layout)[0] for c in (cache, loud)]
    assert torch.equal(rows[0].mean, rows[1].mean)
    assert torch.equal(rows[0].codes[:, :, 64:], rows[1].codes[:, :, 64:])


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("zero", ["page", "token"])
def test_pack_and_unpack_are_inverse(d, zero):
    codec, layout = make_codec(2, d, "page" if zero == "page" else "gauss")
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 2, PAGE_TOKENS, d, generator=generator) for _ in range(2))
    keys = reference.encode_keys(key, torch.ones(3, PAGE_TOKENS, dtype=torch.bool), codec)
    values = reference.encode_values(value, codec)
    unpacked = reference.unpack(reference.pack(keys, values, layout), layout)
    for before, after in zip((keys, values), unpacked, strict=True):
        for name in ("codes", "scale", "zero", "mean"):
            one, other = getattr(before, name), getattr(after, name)
            assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("kind", ["page", "gauss"])
def test_quantizer_error_on_gaussian_rows(kind):
    """With kappa 1.1 four levels in the middle of their cells leave 0.122 of a Gaussian row's variance, 9.1 dB, but
    give back 0.917 of it (keys about a page's mean). Further out, so that all comes back, they leave 0.1365, 8.65 dB.
    """
    codec, layout = make_codec(1, 128, kind)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(8, PAGE_TOKENS, 1, 128, generator=generator) for _ in range(2))
    key, value = key + codec.key_mean, value + codec.value_mean
    first = torch.full((8,), PAGE_TOKENS)
    page = reference.encode_pages(key, value, first, codec=codec, layout=layout, sink=64)
    decoded = reference.dequantize(page, codec=codec, layout=layout)
    for name, original, approximate in zip(("key", "value"), (key, value), decoded, strict=True):
        middle = (name, kind) == ("key", "page")
        signal = (original - original.mean((0, 1))).square().mean()
        sqnr = 10 * math.log10(float(signal / (approximate - original).square().mean()))
        least = 9.1 if middle else 8.6
        assert least < sqnr < least + 0.2, f"{sqnr:.2f} dB"
        rows, back = (x - original.mean((0, 1)) for x in (original, approximate))
        assert float((rows * back).sum() / rows.square().sum()) == pytest.approx(0.917 if middle else 1.0, abs=0.01)


def test_float16_overflow_and_constant_rows_stay_finite():
    codec, layout = make_codec(1, 64, "page")
    key = torch.cat([torch.full((1, PAGE_TOKENS, 1, 64), 3.0), torch.zeros(1, PAGE_TOKENS, 1, 64)])
    page = reference.encode_pages(key, key, torch.tensor([128, 256]), codec=codec, layout=layout, sink=64)
    decoded, _ = reference.dequantize(page, codec=codec, layout=layout)
    assert torch.allclose(decoded, key, atol=1e-3)


def test_merge_joins_disjoint_keys_exactly():
    generator = torch.Generator().manual_seed(0)
    logits, values = (
        torch.randn(5, 30, dtype=torch.float64, generator=generator),
        torch.randn(30, 8, dtype=torch.float64, generator=generator),
    )
    parts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    outputs = torch.stack([logits[:, p].softmax(-1) @ values[p] for p in parts] + [torch.full((5, 8), torch.nan)])
    lse = torch.stack([logits[:, p].logsumexp(-1) for p in parts] + [torch.full((5,), -torch.inf)])
    out, total = reference.merge(outputs, lse)
    assert torch.allclose(out, logits.softmax(-1) @ values)
    assert torch.allclose(total, logits.logsumexp(-1))


def test_append_skips_padding_and_the_null_block():
    windows = torch.full((3, 1, BLOCK, 4), torch.nan)
    key = torch.arange(8.0).view(4, 1, 2)
    reference.append(key, key + 100, slot_mapping=torch.tensor([-1, 5, 16, 47]), windows=windows)
    assert torch.isnan(windows[0]).all()
    assert windows[1, 0, 0].tolist() == [4.0, 5.0, 104.0, 105.0]
    assert windows[2, 0, 15].tolist() == [6.0, 7.0, 106.0, 107.0]
    assert int(torch.isfinite(windows).sum()) == 8
