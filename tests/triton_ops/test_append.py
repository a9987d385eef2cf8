# SPDX-License-Identifier: Apache-2.0
"""The append kernel writes the very bytes of the reference, and nothing else."""

import pytest
import torch

from tests.triton_ops.step_cases import BLOCK, DEVICES
from triton_ops import reference
from triton_ops.append import append, num_warps


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that takes a NaN to equal the same NaN."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "d", "tokens"), [(1, 64, 1), (8, 128, 33), (3, 256, 7), (2, 64, 63)])
def test_bytes_equal_the_reference(device, heads, d, tokens, dtype):
    generator = torch.Generator().manual_seed(heads * d)
    # Slices of one projection, as a model gives them, and blocks padded to a larger page.
    qkv = torch.randn(tokens + 2, 5 * heads, d, generator=generator).to(dtype)
    key, value = qkv[:, 2 * heads : 3 * heads], qkv[:, 4 * heads :]
    blocks = tokens // BLOCK + 3
    storage = torch.full((blocks, heads * BLOCK * 2 * d + 96), torch.nan, dtype=dtype)

    def windows_of(storage):
        return storage[:, : heads * BLOCK * 2 * d].view(blocks, heads, BLOCK, 2 * d)

    slots = torch.randperm((blocks - 1) * BLOCK, generator=generator)[: tokens + 2] + BLOCK
    slots[::5] = -1
    slots[2::7] = 3  # in the null block
    expected, actual = storage.clone(), storage.to(device, copy=True)
    reference.append(key[:tokens], value[:tokens], slot_mapping=slots[:tokens], windows=windows_of(expected))
    qkv, slots = qkv.to(device), slots.to(device)
    append(
        key=qkv[:, 2 * heads : 3 * heads],
        value=qkv[:, 4 * heads :],
        slot_mapping=slots,
        windows=windows_of(actual),
        num_tokens=tokens,
    )
    assert same_bits(actual, expected)


def test_refuses_what_does_not_fit():
    key = torch.zeros(4, 2, 64)
    windows = torch.zeros(3, 2, BLOCK, 128)
    slots = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not agree"):
        append(key=key, value=key, slot_mapping=slots, windows=torch.zeros(3, 2, BLOCK, 64), num_tokens=4)
    turned = key.transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        append(key=turned, value=turned, slot_mapping=slots, windows=torch.zeros(3, 64, BLOCK, 4), num_tokens=4)
    with pytest.raises(ValueError, match="num_tokens=5"):
        append(key=key, value=key, slot_mapping=slots, windows=windows, num_tokens=5)


@pytest.mark.parametrize(("elements", "expected"), [(64, 1), (256, 1), (1024, 4), (2048, 8), (16384, 8)])
def test_warps(elements, expected):
    assert num_warps(elements) == expected
