# SPDX-License-Identifier: Apache-2.0
"""Bases: orthogonality, the whitening identities, what each option does, and the presets."""

from dataclasses import replace

import pytest
import torch

from calib.rotation import PRESETS, Recipe, layer_basis, rotation, spectrum_concentration, whitened_basis
from calib.statistics import LayerStatistics
from oscar_vllm.errors import OscarConfigError
from triton_ops.codec import hadamard

HEADS, D = 3, 64


def covariance(seed: int, steepness: float = 3.0) -> torch.Tensor:
    """[H, d, d] positive definite with eigenvalues from 1 to 10**-steepness."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(HEADS, D, D, dtype=torch.float64, generator=generator)).Q
    return basis * torch.logspace(0, -steepness, D, dtype=torch.float64) @ basis.mT


def statistics() -> LayerStatistics:
    layer = LayerStatistics.zeros(HEADS, D)
    layer.tokens += 1000
    layer.queries += 2000
    for seed, name in enumerate(("query", "key", "page", "value", "output", "mean_field", "attending", "attended")):
        getattr(layer, f"{name}_moment").copy_(1000 * covariance(seed))
    layer.attended_weight += 1000
    layer.key_sum += 500
    layer.value_sum += 250
    return layer


@pytest.mark.parametrize("composition", ["identity", "H", "U", "UH", "UHP"])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_rotations_are_orthogonal(composition, granularity):
    matrix = rotation(covariance(0), composition=composition, granularity=granularity)
    identity = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    torch.testing.assert_close(matrix @ matrix.mT, identity, rtol=0, atol=1e-12)
    shared = torch.equal(matrix[0], matrix[1])
    assert shared == (granularity == "layer" or "U" not in composition)


def test_u_diagonalizes_the_target_in_ascending_order():
    target = covariance(0)
    u = rotation(target, composition="U")
    diagonal = u.mT @ target @ u
    eigenvalues = diagonal.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, torch.diag_embed(eigenvalues), rtol=0, atol=1e-12)
    assert bool((eigenvalues.diff(dim=1) > 0).all())


def test_uh_spreads_the_target_evenly():
    target = covariance(0)
    uh = rotation(target, composition="UH")
    torch.testing.assert_close(uh, rotation(target, composition="U") @ hadamard(D))
    energy = (uh.mT @ target @ uh).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(energy, energy.mean(1, keepdim=True).expand_as(energy))


def test_p_reorders_columns_only():
    uh, uhp = (rotation(covariance(0), composition=name) for name in ("UH", "UHP"))
    assert not torch.equal(uh, uhp)
    assert torch.equal(uh[0, 0].sort().values, uhp[0, 0].sort().values)
    assert torch.equal(uhp[..., 1], uh[..., D // 2])


def test_whitening_keeps_logits_and_decorrelates_both_sides():
    m, sigma, ridge = covariance(0), covariance(1), 1e-6
    directions, inverse, variance = whitened_basis(m, sigma, ridge)
    identity = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    torch.testing.assert_close(directions @ inverse, identity, rtol=0, atol=1e-9)
    torch.testing.assert_close(directions.mT @ sigma @ directions, torch.diag_embed(variance), rtol=0, atol=1e-10)
    ridged = m + ridge * m.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * identity
    torch.testing.assert_close(inverse @ ridged @ inverse.mT, identity, rtol=0, atol=1e-9)
    assert bool((variance.diff(dim=1) <= 0).all())


def test_the_default_spends_two_bits_per_direction_unevenly():
    default = PRESETS["default"]
    assert default.alternatives() == [default]
    first, *others = replace(default, attended=None, spread=None).alternatives()
    assert [(recipe.attended, recipe.spread) for recipe in others] == [(0.0, "none"), (1.0, "groups"), (1.0, "none")]
    basis = layer_basis(statistics(), first)
    assert basis.bits.sum(1).tolist() == [2 * D] * HEADS
    assert set(basis.bits.unique().tolist()) == {0, 2, 4, 6}
    codec = basis.codec(1.1, 1.0)
    assert (codec.zero, codec.key_quantizer.constant, codec.value_quantizer.constant) == ("page", 1.1, 1.0)


@pytest.mark.parametrize("max_bits", [2, 4, 8])
def test_spreading_keeps_bits_and_logits_and_evens_out_each_group(max_bits):
    layer = statistics()
    recipe = Recipe(max_bits=max_bits, attended=0.0)
    plain, spread = (layer_basis(layer, replace(recipe, spread=name)) for name in ("none", "groups"))
    assert torch.equal(plain.bits, spread.bits)
    identity = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    torch.testing.assert_close(spread.directions @ spread.inverse, identity, rtol=0, atol=1e-8)
    covariance = spread.directions.mT @ layer.page_covariance @ spread.directions
    torch.testing.assert_close(covariance, torch.diag_embed(spread.variance), rtol=0, atol=1e-8)
    for head in range(HEADS):
        largest = (plain.bits[head] == 2).nonzero().squeeze(1)
        part = largest[: 1 << (len(largest).bit_length() - 1)]
        # One key far out along the first direction of the group becomes equal parts of every direction of it.
        outlier = plain.inverse[head, part[0]] * plain.variance[head, part[0]].sqrt() * 8
        coordinates = (outlier @ spread.directions[head])[part]
        torch.testing.assert_close(coordinates.abs(), torch.full_like(coordinates, 8 / len(part) ** 0.5))


def test_the_reference_preset_is_the_papers():
    layer = statistics()
    recipe = PRESETS["reference"]
    codec = layer_basis(layer, recipe).codec(recipe.key_constant, recipe.value_constant)
    pooled = layer.query_covariance.mean(0, keepdim=True).expand(HEADS, D, D)
    expected = rotation(pooled, composition="UHP").float()
    assert torch.equal(codec.key_encode, expected)
    assert torch.equal(codec.key_query, expected)
    expected = rotation(layer.mean_field_moment, composition="UHP", granularity="layer").float()
    assert torch.equal(codec.value_rotation, expected)
    assert codec.zero == "token"
    assert (codec.key_quantizer.kind, codec.key_quantizer.constant) == ("minmax", 0.96)
    assert (codec.value_quantizer.kind, codec.value_quantizer.constant) == ("minmax", 0.92)
    assert not codec.key_mean.any()
    assert not codec.value_mean.any()


def test_targets_and_centring_reach_the_codec():
    layer = statistics()
    plain = Recipe(allocation="uniform", zero="token", composition="U")
    changed = Recipe(
        allocation="uniform", zero="token", composition="U", key_target="key", value_target="value", centre="both"
    )
    first, second = (layer_basis(layer, recipe).codec(1.0, 1.0) for recipe in (plain, changed))
    assert torch.equal(first.key_encode, rotation(layer.attending_moment, composition="U").float())
    uniform = layer_basis(layer, replace(plain, query_weight="uniform")).codec(1.0, 1.0)
    assert torch.equal(uniform.key_encode, rotation(layer.query_covariance, composition="U").float())
    assert torch.equal(second.key_encode, rotation(layer.key_moment, composition="U").float())
    assert torch.equal(second.value_rotation, rotation(layer.value_moment, composition="U").float())
    assert not torch.equal(first.key_encode, second.key_encode)
    assert torch.equal(second.key_mean, torch.full((HEADS, D), 0.5))
    assert torch.equal(second.value_mean, torch.full((HEADS, D), 0.25))


def test_concentration_of_a_flat_spectrum_is_an_eighth():
    layer = statistics()
    identity = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    layer.attending_moment.copy_(identity)
    layer.page_moment.copy_(identity)
    assert spectrum_concentration(layer, Recipe()) == pytest.approx(1 / 8)
    assert spectrum_concentration(statistics(), Recipe()) > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"composition": "HU"}, "--composition HU is unknown"),
        ({"zero": "token"}, "--allocation spectral needs --zero page; add --allocation uniform"),
        ({"quantizer": "minmax"}, "--quantizer minmax .* needs --zero token"),
        ({"max_bits": 3}, "--max-bits 3 is unknown; use one of 2, 4, 6, 8"),
        ({"key_constant": -1.0}, "--key-constant -1.0 is out of range; with --quantizer gauss use a value above 0$"),
        ({"value_constant": 0.0}, "--value-constant 0.0 is out of range"),
        ({"value_constant": float("inf")}, "--value-constant inf is out of range"),
        ({"key_constant": float("nan")}, "--key-constant nan is out of range"),
        (
            {"key_constant": 1.1, "quantizer": "minmax", "zero": "token", "allocation": "uniform"},
            "--key-constant 1.1 is out of range; with --quantizer minmax use a value above 0 and at most 1",
        ),
        ({"centre": "keys"}, "--centre keys has no effect on keys with --zero page"),
        ({"ridge": 0.0}, "--ridge 0.0 is out of range"),
        ({"attended": -1.0}, "--attended -1.0 is out of range; use 0 or more"),
        ({"attended": float("nan")}, "--attended nan is out of range"),
    ],
)
def test_contradicting_choices_are_refused(options, message):
    with pytest.raises(OscarConfigError, match=message):
        Recipe(**options)
