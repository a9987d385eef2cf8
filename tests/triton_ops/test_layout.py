# SPDX-License-Identifier: Apache-2.0
"""The byte layout: sizes, that every code has its own place, and that the reference packs where the formulas say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_ops.layout import (
    PAGE_TOKENS,
    SUPPORTED_HEAD_SIZES,
    FloatPageLayout,
    PageLayout,
    metadata_position,
    page_head_size,
)
from triton_ops.reference import pack_key_codes, pack_value_codes, unpack_key_codes, unpack_value_codes

LAYOUTS = [PageLayout(d, zero) for d in SUPPORTED_HEAD_SIZES for zero in ("page", "token")]


@pytest.mark.parametrize(
    ("layout", "page_bytes", "bits"),
    [
        (PageLayout(64, "page"), 4992, 2.4375),
        (PageLayout(64, "token"), 5120, 2.5),
        (PageLayout(128, "page"), 9216, 2.25),
        (PageLayout(128, "token"), 9216, 2.25),
        (PageLayout(256, "page"), 17664, 2.15625),
        (PageLayout(256, "token"), 17408, 2.125),
        (FloatPageLayout(128, 2), 65536, 16.0),
    ],
    ids=str,
)
def test_page_sizes(layout, page_bytes, bits):
    assert layout.page_bytes == page_bytes
    assert layout.bits_per_element == bits
    assert layout.bytes_per_token * PAGE_TOKENS == page_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_code_has_its_own_place(layout):
    d = layout.head_size
    keys = {layout.key_code(t, s) for t in range(PAGE_TOKENS) for s in range(d)}
    values = {layout.value_code(t, s) for t in range(PAGE_TOKENS) for s in range(d)}
    assert len(keys) == len(values) == PAGE_TOKENS * d
    assert {byte for byte, _ in keys} == set(range(layout.code_bytes))
    assert {byte for byte, _ in values} == set(range(layout.code_bytes, 2 * layout.code_bytes))
    assert {shift for _, shift in keys | values} == {0, 2, 4, 6}


def test_metadata_order_is_a_permutation():
    assert sorted(map(metadata_position, range(PAGE_TOKENS))) == list(range(PAGE_TOKENS))


def test_worked_example_of_the_docstring():
    layout = PageLayout(128, "page")
    assert layout.key_code(21, 75) == (867, 4)
    assert layout.key_scale + 2 * metadata_position(21) == 8330


@pytest.mark.parametrize("head_size", SUPPORTED_HEAD_SIZES)
@given(data=st.data())
def test_packing_follows_the_formulas(head_size, data):
    layout = PageLayout(head_size, "page")
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 4, (PAGE_TOKENS, head_size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    keys, values = pack_key_codes(codes), pack_value_codes(codes)
    token, dim = data.draw(st.integers(0, PAGE_TOKENS - 1)), data.draw(st.integers(0, head_size - 1))
    byte, shift = layout.key_code(token, dim)
    assert (int(keys[byte]) >> shift) & 3 == int(codes[token, dim])
    byte, shift = layout.value_code(token, dim)
    assert (int(values[byte - layout.value_codes]) >> shift) & 3 == int(codes[token, dim])
    assert torch.equal(unpack_key_codes(keys), codes)
    assert torch.equal(unpack_value_codes(values), codes)


@pytest.mark.parametrize("head_size", [0, 32, 96, 192])
def test_unsupported_head_size_is_named(head_size):
    with pytest.raises(ValueError, match=f"head size {head_size} has no INT2 page layout"):
        PageLayout(head_size, "page")


@pytest.mark.parametrize(
    ("head_size", "size"),
    [(8, 64), (64, 64), (72, 128), (80, 128), (96, 128), (112, 128), (128, 128), (136, 256), (192, 256), (256, 256)],
)
def test_heads_take_the_smallest_page_that_holds_them(head_size, size):
    assert page_head_size(head_size) == size


@pytest.mark.parametrize("head_size", [-8, 0, 4, 100, 264, 512])
def test_heads_that_fit_no_page_are_named(head_size):
    with pytest.raises(ValueError, match=f"head size {head_size} fits no INT2 page; multiples of 8 up to 256 are"):
        page_head_size(head_size)


def test_unknown_zero_is_named():
    with pytest.raises(ValueError, match="zero='row' is unknown"):
        PageLayout(128, "row")
