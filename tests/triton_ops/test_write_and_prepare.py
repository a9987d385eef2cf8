# SPDX-License-Identifier: Apache-2.0
"""One launch writes and prepares what append, demote and prepare_query do, byte for byte."""

from dataclasses import replace

import pytest
import torch

from tests.triton_ops.step_cases import DEVICES, make_step
from tests.triton_ops.test_append import same_bits
from tests.triton_ops.test_codec import random_basis, random_spectral
from triton_ops import reference
from triton_ops.append import append
from triton_ops.codec import Quantizer, rotation_codec
from triton_ops.demote import demote
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import PreparedQuery, QueryMatrix, prepare_query
from triton_ops.schedule import decode_grid
from triton_ops.write_and_prepare import write_and_prepare

SINK, SCALE = 64, 0.25


def make_codec(heads: int, d: int, zero: str):
    if zero == "page":
        return random_spectral(heads, d, 4)
    gauss, bases = Quantizer("gauss", 1.1), (random_basis(heads, d, 1), random_basis(heads, d, 2))
    return rotation_codec(*bases, zero="token", key_quantizer=gauss, value_quantizer=gauss)


class Written:
    """What a step leaves behind, on the CPU."""

    def __init__(self, step, codec, layout, device, *, one_launch: bool, multiprocessors: int) -> None:
        moved, codec = step.to(device), codec.to(device)
        heads, d = codec.num_kv_heads, codec.head_size
        requests, longest = len(step.seq_lens), int(step.query_start_loc.diff().max())
        grid = decode_grid(
            num_requests=requests, max_query_len=longest, num_query_heads=step.query.shape[1], num_kv_heads=heads,
            head_size=d, multiprocessors=multiprocessors, capability=(9, 0),
        )  # fmt: skip
        prepared = PreparedQuery(blocks=requests * grid.row_blocks * heads, rows=grid.rows, head_size=d, device=device)
        for tensor in vars(prepared).values():
            tensor.fill_(77)
        batch = {"query_start_loc": moved.query_start_loc, "seq_lens": moved.seq_lens}
        queries = {"query": moved.query, "matrix": QueryMatrix.of(codec), "grid": grid, "scale": SCALE}
        queries |= {"prepared": prepared, "codec": codec}
        rows = {"key": moved.key, "value": moved.value}
        slots = {"slot_mapping": moved.slot_mapping, "num_tokens": len(step.key)}
        cache = moved.cache() | {"layout": layout, "sink": SINK}
        if one_launch:
            write_and_prepare(**rows, **slots, **cache, **queries, multiprocessors=multiprocessors)
        else:
            append(**rows, **slots, windows=moved.windows)
            demote(**rows, **cache, codec=codec, **step.sizes, tokens_per_program=32)
            prepare_query(**queries, **batch)
        self.pages, self.windows = moved.pages.cpu(), moved.windows.cpu()
        self.prepared = {name: tensor.cpu() for name, tensor in vars(prepared).items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("requests", "heads", "groups", "d", "zero"),
    [
        ([(383, 1), (127, 1), (500, 1), (255, 1)], 2, 4, 128, "page"),
        ([(383, 3), (126, 2), (0, 1), (639, 4), (130, 0)], 3, 3, 64, "token"),
        ([(511, 1), (64, 1)], 1, 8, 256, "page"),
    ],
)
def test_bytes_equal_those_of_three_launches(device, requests, heads, groups, d, zero):
    codec, layout = make_codec(heads, d, zero), PageLayout(d, zero)
    step = make_step(requests, heads=heads, d=d, groups=groups, layout=layout, sink=SINK)
    # As many programs as look for pages in one step, and too few of them for the pages that there are.
    expected = Written(step, codec, layout, device, one_launch=False, multiprocessors=5)
    actual = Written(step, codec, layout, device, one_launch=True, multiprocessors=5)
    completed = sum((before + new) // PAGE_TOKENS - before // PAGE_TOKENS for before, new in requests)
    assert (expected.pages != step.pages).flatten(1).any(1).sum() == completed > 0
    assert torch.equal(actual.pages, expected.pages)
    assert same_bits(actual.windows, expected.windows)
    assert not same_bits(actual.windows, step.windows)
    for name, tensor in expected.prepared.items():
        # On a GPU products may be contracted with sums in one launch and not in the other: a few bytes' rounding.
        differ = (actual.prepared[name] != tensor).double().mean()
        assert differ <= (0 if device == "cpu" else 1e-2), (name, differ)


def test_demoted_pages_are_the_references():
    codec, layout = make_codec(2, 64, "page"), PageLayout(64, "page")
    step = make_step([(383, 1), (200, 1), (127, 1)], heads=2, d=64, layout=layout, sink=SINK)
    actual = Written(step, codec, layout, "cpu", one_launch=True, multiprocessors=132)
    pages = step.pages.clone()
    cache = step.cache() | {"pages": pages}
    reference.demote(step.key, step.value, **cache, codec=codec, layout=layout, sink=SINK)
    assert (actual.pages != pages).double().mean() < 1e-3
    assert (pages != step.pages).any()


def test_refuses_what_does_not_fit():
    codec, layout = make_codec(1, 64, "page"), PageLayout(64, "page")
    step = make_step([(10, 1)], heads=1, d=64, layout=layout, sink=SINK)
    step = replace(step, slot_mapping=step.slot_mapping[:0])
    with pytest.raises(ValueError, match="num_tokens=1, but key holds 1 and slot_mapping 0 tokens"):
        Written(step, codec, layout, "cpu", one_launch=True, multiprocessors=4)
