# SPDX-License-Identifier: Apache-2.0
"""Bits, steps and row scales for keys of which few are attended to most."""

import pytest
import torch

from calib.allocation import REACH, allocate, reaches, scale_shares
from calib.rotation import Recipe, layer_basis
from calib.statistics import LayerStatistics
from triton_ops.codec import UNIT_STEP, quantization_error
from triton_ops.reference import decode_keys, encode_keys

D, KEYS, FAR = 64, 4096, 32


def test_without_attended_keys_bits_follow_the_variance_and_steps_are_the_best_ones():
    variance = torch.logspace(2, -2, D, dtype=torch.float64)
    bits = allocate(variance, torch.ones(D), 0.0, 8)
    assert int(bits.sum()) == 2 * D
    assert bool((bits.diff() <= 0).all())
    assert torch.equal(reaches(bits, torch.ones(D), 0.0), torch.ones(D, dtype=torch.float64))
    error = [1.0] + [float(quantization_error(b, torch.tensor(UNIT_STEP[b]), torch.ones(()))) for b in (2, 4, 6, 8)]
    given = list(zip(variance.tolist(), (bits // 2).tolist(), strict=True))
    gain_up = [v * (error[n] - error[n + 1]) for v, n in given if n < 4]
    loss_down = [v * (error[n - 1] - error[n]) for v, n in given if n > 0]
    assert max(gain_up) <= min(loss_down)


def test_attended_keys_that_stand_far_out_get_bits_and_reach_there():
    variance, attended = torch.ones(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    attended[5] = 400.0
    bits = allocate(variance, attended, 1.0, 8)
    assert bits[5] == 8
    reach = reaches(bits, attended, 1.0)
    scale = float((scale_shares(bits) * attended).sum())
    assert float(reach[5]) * UNIT_STEP[8] * 128 > (400 / scale) ** 0.5  # the last level lies beyond them
    assert bool((reach[bits == 2] == 1).all())
    assert float(reach.max()) <= float(REACH.max())


def test_shares_are_of_one_row_scale_and_few_levels_count_most():
    share = scale_shares(torch.tensor([[0, 2, 4, 6, 8]]))[0]
    assert float(share.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(share[1:-1], 4 * share[2:])
    assert float(share[0]) == 0.0


def test_attended_keys_lose_less_than_what_the_others_lose_by_it():
    """Few keys far out along one direction, as those that a model attends to when it looks for nothing."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(KEYS, D, generator=generator) * torch.logspace(0, -1, D)
    far = torch.arange(0, KEYS, KEYS // FAR)
    keys[far] += 40 * torch.nn.functional.one_hot(torch.tensor(3), D)
    pages = keys.view(-1, 1, 128, D)
    centred = (pages - pages.mean(2, keepdim=True)).view(KEYS, D).double()
    layer = LayerStatistics.zeros(1, D)
    layer.tokens += KEYS
    layer.attending_moment += torch.eye(D)
    layer.output_moment += torch.eye(D)
    layer.page_moment += centred.mT @ centred
    layer.attended_moment += centred[far].mT @ centred[far]
    layer.attended_weight += FAR
    stored = torch.ones(pages.shape[0], 128, dtype=torch.bool)
    errors = {}
    for weight in (0.0, 1.0):
        recipe = Recipe(spread="none", attended=weight)
        codec = layer_basis(layer, recipe).codec(1.1, 1.1)
        error = (decode_keys(encode_keys(pages, stored, codec), codec) - pages).square().sum(-1).view(-1)
        others = torch.ones(KEYS, dtype=torch.bool)
        others[far] = False
        errors[weight] = float(error[far].mean()), float(error[others].mean())
    assert errors[1.0][0] < 0.2 * errors[0.0][0]
    assert errors[0.0][1] < errors[1.0][1] < 1.5 * errors[0.0][1]
    assert sum(errors[1.0]) < 0.5 * sum(errors[0.0])
