# SPDX-License-Identifier: Apache-2.0
"""Pages written out as plain keys and values, against the reference; sink tokens come from their window blocks."""

import pytest
import torch

from tests.triton_ops.step_cases import DEVICES
from tests.triton_ops.test_attend_prefill import SINK, prepare
from triton_ops import reference
from triton_ops.dequantize import dequantize
from triton_ops.layout import PAGE_TOKENS

CASES = [(64, "page", 3), (128, "page", 2), (128, "token", 1), (256, "page", 1), (64, "token", 2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("d", "zero", "heads"), CASES)
def test_dequantize_matches_the_reference(d, zero, heads, device):
    step, codec, layout = prepare([(700, 5), (130, 2), (40, 3)], heads=heads, groups=1, d=d, zero=zero)
    first, span = 0, 3
    num_pages = torch.tensor([5, 1, 0], dtype=torch.int32)
    expected = torch.full((2, 3 * span, PAGE_TOKENS, heads, d), torch.nan)
    bound = torch.zeros_like(expected)
    for r, count in enumerate(num_pages.clamp(max=span).tolist()):
        page = step.pages[step.page_table[r, :count].long()]
        parts = zip(reference.unpack(page, layout), (codec.key_query, codec.value_rotation), strict=True)
        place = slice(r * span, r * span + count)
        expected[:, place] = torch.stack(reference.dequantize(page, codec=codec, layout=layout))
        # tf32 keeps 11 bits of both factors of a product.
        size = torch.stack([part.rows().abs() @ matrix.abs().transpose(1, 2) for part, matrix in parts])
        bound[:, place] = 2.0**-10 * size.transpose(2, 3)
        if count:
            t = torch.arange(SINK)
            plain = step.windows[step.window_table[r, t // 16].long(), :, t % 16].float()
            expected[:, r * span, :SINK] = torch.stack(plain.split(d, -1))
    moved = step.to(device)
    buffers = torch.full(expected.shape, torch.nan, device=device)
    names = ("pages", "windows", "page_table", "window_table")
    dequantize(
        **{name: getattr(moved, name) for name in names},
        num_pages=num_pages.to(device),
        first_page=first,
        span=span,
        codec=codec.to(device),
        layout=layout,
        sink=SINK,
        key=buffers[0],
        value=buffers[1],
    )
    actual = buffers.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    excess = (actual - expected).abs().nan_to_num() - bound - 1e-6
    assert float(excess.max()) <= 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_later_span_starts_at_its_first_page(device):
    step, codec, layout = prepare([(900, 1)], heads=1, groups=1, d=64, zero="page")
    moved, codec = step.to(device), codec.to(device)
    names = ("pages", "windows", "page_table", "window_table")
    whole, part = (torch.zeros(2, n, PAGE_TOKENS, 1, 64, dtype=torch.bfloat16, device=device) for n in (7, 4))
    for buffers, first in ((whole, 0), (part, 4)):
        dequantize(
            **{name: getattr(moved, name) for name in names},
            num_pages=torch.tensor([7], dtype=torch.int32, device=device),
            first_page=first,
            span=buffers.shape[1],
            codec=codec,
            layout=layout,
            sink=SINK,
            key=buffers[0],
            value=buffers[1],
        )
    assert torch.equal(part[:, :3], whole[:, 4:])
    assert not part[:, 3].any()


def test_buffers_that_do_not_fit_are_refused():
    step, codec, layout = prepare([(300, 1)], heads=1, groups=1, d=64, zero="page")
    names = ("pages", "windows", "page_table", "window_table")
    small = torch.zeros(1, PAGE_TOKENS, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"does not hold 1 x 2 pages of \[128, 1, 64\]"):
        dequantize(
            **{name: getattr(step, name) for name in names},
            num_pages=torch.tensor([2], dtype=torch.int32),
            first_page=0,
            span=2,
            codec=codec,
            layout=layout,
            sink=SINK,
            key=small,
            value=small,
        )
