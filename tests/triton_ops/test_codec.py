# SPDX-License-Identifier: Apache-2.0
"""Codec builders: matrices are inverse to each other, bits are spent where they remove most error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calib.allocation import allocate
from triton_ops.codec import (
    UNIT_STEP,
    Quantizer,
    bit_reversal,
    hadamard,
    quantization_error,
    rotation_codec,
    spectral_codec,
    spend_bits,
    unbiased_gain,
)

# Error of a unit Gaussian with UNIT_STEP, read back unbiased: e / (1 - e), where e is the least error of all steps.
UNIT_ERROR = {2: 0.134876, 4: 0.0116777, 6: 0.00104113, 8: 8.7694e-5}


def random_basis(heads: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, d, d, dtype=torch.float64, generator=generator))[0]


def random_spectral(heads: int, d: int, max_bits: int, kappa: float = 1.1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    skew = torch.eye(d, dtype=torch.float64) + 0.1 * torch.randn(heads, d, d, dtype=torch.float64, generator=generator)
    directions = random_basis(heads, d, seed) @ skew
    variance = torch.rand(heads, d, dtype=torch.float64, generator=generator) ** 6 * 10 + 1e-3
    bits = torch.stack([allocate(row, torch.zeros(d), 0.0, max_bits) for row in variance])
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
    gain = float(unbiased_gain(bits, step))
    products = gain * x * middle - x * x
    assert abs(float(products.mean())) < 4 * float(products.std()) / 1024
    assert (bits, kappa) != (2, 1.0) or gain == pytest.approx(1 + UNIT_ERROR[2], rel=1e-4)  # the best step's


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("variance", [0.04, 1.0, 9.0])
def test_quantization_error_is_a_gaussians(bits, variance):
    """Also of one narrower or wider than the quantizer was made for."""
    x = torch.randn(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(bits)) * variance**0.5
    step, half = torch.tensor(UNIT_STEP[bits] * 1.3), 1 << (bits - 1)
    level = ((x / step).floor().clamp(-half, half - 1) + 0.5) * step * unbiased_gain(bits, step)
    errors = (level - x).square()
    expected = float(quantization_error(bits, step, torch.tensor(variance)))
    assert abs(float(errors.mean()) - expected) < 4 * float(errors.std()) / 1024


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("max_bits", [2, 4, 8])
def test_spectral_encode_and_query_are_inverse_up_to_the_gain(d, max_bits):
    codec = random_spectral(2, d, max_bits)
    for head in range(2):
        lowest = codec.key_digit[head] == 0
        product = codec.key_encode[head][:, lowest].T.double() @ codec.key_query[head][:, lowest].double()
        counts = codec.key_levels[head][lowest].double().log2().int().tolist()
        gains = torch.stack([unbiased_gain(bits, UNIT_STEP[bits] * 1.1) for bits in counts])
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


def test_reach_widens_steps_and_share_weighs_directions_in_the_row_scale():
    d, generator = 64, torch.Generator().manual_seed(0)
    basis, variance = random_basis(1, d), torch.logspace(1, -2, d, dtype=torch.float64)[None]
    bits = allocate(variance[0], torch.zeros(d), 0.0, 8)[None]
    reach = 2.0 ** torch.randint(-1, 3, (1, d), generator=generator)
    share = torch.rand(1, d, generator=generator) * (bits > 0)
    share = share / share.sum()
    codec = spectral_codec(
        basis, basis.mT, variance, bits, kappa=1.1, value_rotation=basis, value_quantizer=Quantizer("gauss", 1.1),
        reach=reach, share=share,
    )  # fmt: skip
    lowest = codec.key_digit[0] == 0
    kept = bits[0] > 0
    coordinates = torch.randn(d, dtype=torch.float64, generator=generator)
    precode = (coordinates * variance[0].sqrt()) @ basis[0].T @ codec.key_encode[0].double()
    steps = torch.tensor([UNIT_STEP.get(int(b), 1.0) for b in bits[0]], dtype=torch.float64) * 1.1 * reach[0]
    torch.testing.assert_close(precode[lowest], (coordinates / steps)[kept], rtol=1e-5, atol=1e-6)
    expected = (share[0] * coordinates.square()).sum()
    assert float((codec.key_weight[0] * precode.square()).sum()) == pytest.approx(float(expected), rel=1e-5)
    gains = torch.stack([unbiased_gain(int(b), step) for b, step in zip(bits[0][kept], steps[kept], strict=True)])
    product = codec.key_encode[0][:, lowest].T.double() @ codec.key_query[0][:, lowest].double()
    torch.testing.assert_close(product, gains.diag(), rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 2**31), steps=st.integers(1, 4), d=st.sampled_from([8, 64]))
def test_spending_cannot_be_improved_by_moving_two_bits(seed, steps, d):
    generator = torch.Generator().manual_seed(seed)
    gains = torch.rand(d, steps, dtype=torch.float64, generator=generator).sort(1, descending=True).values  # convex
    error = torch.cat([torch.zeros(d, 1), -gains.cumsum(1)], 1)
    bits = spend_bits(error, 2 * d)
    assert int(bits.sum()) == 2 * d
    assert int(bits.max()) <= 2 * steps
    given = list(zip(gains.tolist(), (bits // 2).tolist(), strict=True))
    gain_up = [row[n] for row, n in given if n < steps]
    loss_down = [row[n - 1] for row, n in given if n > 0]
    if gain_up:
        assert max(gain_up) <= min(loss_down) + 1e-15


def test_spending_never_skips_a_step():
    """Errors that are not convex: a second step that gains more counts as much as the first, which comes before it."""
    error = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.8, 0.75]], dtype=torch.float64)
    assert spend_bits(error, 4).tolist() == [2, 2]
    assert spend_bits(error, 6).tolist() == [4, 2]


def test_spending_refuses_the_impossible():
    with pytest.raises(ValueError, match="17 bits cannot be given"):
        spend_bits(torch.ones(8, 3), 17)
    with pytest.raises(ValueError, match="at most 4 bits"):
        spend_bits(torch.ones(8, 3), 34)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_unit_steps_are_the_best_ones(bits):
    x = torch.linspace(-12, 12, 480_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2)
    density /= density.sum()

    def error(step: float, gain: float | torch.Tensor) -> float:
        code = (x / step + 2 ** (bits - 1)).floor().clamp(0, 2**bits - 1)
        return float((density * (gain * (code - (2**bits - 1) / 2) * step - x).square()).sum())

    def unbiased(step: float) -> float:
        return error(step, unbiased_gain(bits, step))

    best = quantization_error(bits, torch.tensor(UNIT_STEP[bits]), torch.ones(()))
    for value in (unbiased(UNIT_STEP[bits]), float(best)):
        assert value == pytest.approx(UNIT_ERROR[bits], rel=1e-3)
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
