# SPDX-License-Identifier: Apache-2.0
"""Codec builders: matrices are inverse to each other, bits are spent where they remove most error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_ops.codec import (
    UNIT_ERROR,
    UNIT_STEP,
    Quantizer,
    allocate_bits,
    bit_reversal,
    hadamard,
    rotation_codec,
    spectral_codec,
    unbiased_gain,
)


def random_basis(heads: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, d, d, dtype=torch.float64, generator=generator))[0]


def random_spectral(heads: int, d: int, max_bits: int, kappa: float = 1.1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    skew = torch.eye(d, dtype=torch.float64) + 0.1 * torch.randn(heads, d, d, dtype=torch.float64, generator=generator)
    directions = random_basis(heads, d, seed) @ skew
    variance = torch.rand(heads, d, dtype=torch.float64, generator=generator) ** 6 * 10 + 1e-3
    bits = torch.stack([allocate_bits(row, 2 * d, max_bits) for row in variance])
    rotation = random_basis(heads, d, seed + 1)
    return spectral_codec(
        directions,
        torch.linalg.inv(directions),
        variance,
        bits,
        kappa=kappa,
        value_rotation=rotation,
        value_quantizer=Quantizer("gauss", 1.1),
    )


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("kappa", [0.8, 1.0, 1.4])
def test_unbiased_gain_gives_a_gaussian_back(bits, kappa):
    """The regression of what is read back on what was stored has slope one; with middle levels it is 1 / gain."""
    x = torch.randn(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    step, half = UNIT_STEP[bits] * kappa, 1 << (bits - 1)
    middle = ((x / step).floor().clamp(-half, half - 1) + 0.5) * step
    gain = unbiased_gain(bits, step)
    products = gain * x * middle - x * x
    assert abs(float(products.mean())) < 4 * float(products.std()) / 1024
    assert (bits, kappa) != (2, 1.0) or gain == pytest.approx(1 + UNIT_ERROR[2], rel=1e-4)  # the best step's


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("max_bits", [2, 4, 8])
def test_spectral_encode_and_query_are_inverse_up_to_the_gain(d, max_bits):
    codec = random_spectral(2, d, max_bits)
    for head in range(2):
        lowest = codec.key_digit[head] == 0
        product = codec.key_encode[head][:, lowest].T.double() @ codec.key_query[head][:, lowest].double()
        counts = codec.key_levels[head][lowest].double().log2().int().tolist()
        gains = torch.tensor([unbiased_gain(bits, UNIT_STEP[bits] * 1.1) for bits in counts], dtype=torch.float64)
        assert torch.allclose(product, gains.diag(), atol=1e-4)
        # Each further digit weighs four times the one before it, and repeats the same pre-code.
        higher = (codec.key_digit[head] > 0).nonzero().squeeze(1)
        assert torch.equal(codec.key_encode[head][:, higher], codec.key_encode[head][:, higher - 1])
        assert torch.equal(codec.key_query[head][:, higher], 4 * codec.key_query[head][:, higher - 1])
        # A direction of b bits has b / 2 slots, so levels over slots give back 2 d bits.
        bits = torch.log2(codec.key_levels[head].double())
        assert float((bits * lowest).sum()) == 2 * d


def test_row_scale_is_the_root_mean_square_over_directions():
    codec = random_spectral(1, 64, 4, kappa=1.3)
    step = {4**n: UNIT_STEP[2 * n] * 1.3 for n in (1, 2)}
    precode = torch.randn(64)
    lowest = codec.key_digit[0] == 0
    # One pre-code per direction: copy it to the direction's other digits.
    owner = lowest.cumsum(0) - 1
    precode = precode[lowest][owner]
    unit = precode * torch.tensor([step[int(level)] for level in codec.key_levels[0]])
    expected = unit[lowest].square().mean()
    assert float((codec.key_weight[0] * precode.square()).sum()) == pytest.approx(float(expected), rel=1e-5)


@given(seed=st.integers(0, 2**31), max_bits=st.sampled_from([2, 4, 6, 8]), d=st.sampled_from([8, 64]))
def test_allocation_cannot_be_improved_by_moving_two_bits(seed, max_bits, d):
    variance = torch.rand(d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4
    bits = allocate_bits(variance, 2 * d, max_bits)
    assert int(bits.sum()) == 2 * d
    assert int(bits.max()) <= max_bits
    given = list(zip(variance.tolist(), bits.tolist(), strict=True))
    gain_up = [v * (UNIT_ERROR[b] - UNIT_ERROR[b + 2]) for v, b in given if b < max_bits]
    loss_down = [v * (UNIT_ERROR[b - 2] - UNIT_ERROR[b]) for v, b in given if b > 0]
    if gain_up:
        assert max(gain_up) <= min(loss_down) + 1e-15


def test_allocation_refuses_the_impossible():
    with pytest.raises(ValueError, match="17 bits cannot be given"):
        allocate_bits(torch.ones(8), 17, 4)
    with pytest.raises(ValueError, match="max_bits=3"):
        allocate_bits(torch.ones(8), 16, 3)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_unit_steps_are_the_best_ones(bits):
    x = torch.linspace(-12, 12, 480_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2)
    density /= density.sum()

    def error(step: float, gain: float) -> float:
        code = (x / step + 2 ** (bits - 1)).floor().clamp(0, 2**bits - 1)
        return float((density * (gain * (code - (2**bits - 1) / 2) * step - x).square()).sum())

    def unbiased(step: float) -> float:
        return error(step, unbiased_gain(bits, step))

    assert unbiased(UNIT_STEP[bits]) == pytest.approx(UNIT_ERROR[bits], rel=1e-3)
    for step in (0.99 * UNIT_STEP[bits], 1.01 * UNIT_STEP[bits]):
        assert unbiased(UNIT_STEP[bits]) <= unbiased(step)
        assert error(UNIT_STEP[bits], 1.0) <= error(step, 1.0)


def test_hadamard_is_orthogonal_and_bit_reversal_a_permutation():
    h = hadamard(64)
    assert torch.allclose(h @ h.T, torch.eye(64, dtype=torch.float64))
    assert sorted(bit_reversal(64).tolist()) == list(range(64))
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    with pytest.raises(ValueError, match="size 96"):
        hadamard(96)


def test_codec_checks_its_shapes():
    rotation = random_basis(2, 64)
    gauss = Quantizer("gauss", 1.1)
    with pytest.raises(ValueError, match="value_rotation has shape"):
        rotation_codec(rotation, rotation[:, :, :32], zero="page", key_quantizer=gauss, value_quantizer=gauss)
    with pytest.raises(ValueError, match="needs the 'gauss' key quantizer"):
        rotation_codec(rotation, rotation, zero="page", key_quantizer=Quantizer("minmax", 0.96), value_quantizer=gauss)
    with pytest.raises(ValueError, match="out of range"):
        Quantizer("minmax", 1.5)
    with pytest.raises(ValueError, match="no effect with zero='page'"):
        rotation_codec(
            rotation,
            rotation,
            zero="page",
            key_quantizer=gauss,
            value_quantizer=gauss,
            key_mean=torch.zeros(2, 64),
        )


def test_heads_picks_and_repeats_kv_heads():
    codec = random_spectral(4, 64, 4)
    assert torch.equal(codec.heads(slice(1, 3)).key_encode, codec.key_encode[1:3])
    assert torch.equal(codec.heads(torch.tensor([2, 2])).key_levels, codec.key_levels[[2, 2]])
