# SPDX-License-Identifier: Apache-2.0
"""Bits, steps and row scales of key directions, for two kinds of keys at once.

Few keys of history take most of its attention: tokens that a model attends to when it has nothing to look for, like the
sink at the start, and their keys lie far from all others. They are too few to count in a covariance, and a quantizer
made for the others clips them and gives them a coarse scale. What outputs lose by their errors is more than what they
lose by all other keys' errors (docs/fidelity.md, "Keys that many queries attend to").

So errors are summed over two kinds of keys, each taken for Gaussian: all keys alike, with a coordinate's variance v
and row scale one, and, times a weight w (`Recipe.attended`), keys weighted by what outputs may lose by them, with the
variance a (in units of v) and the row scale s that their coordinates give. With b bits and steps of r times the best
ones for a unit Gaussian that is v (e(1) + w s^2 e(a / s^2)), e the error of `codec.quantization_error`.
"""

from functools import cache

import torch
from torch import Tensor

from triton_ops.codec import UNIT_STEP, quantization_error, spend_bits

ROUNDS = 3
"""Times that bits are given for the row scales which the bits before them led to."""

REACH = torch.tensor([2.0 ** (i / 8) for i in range(-4, 25)], dtype=torch.float64)
"""Factors on a direction's step to choose from, 0.7 to 8."""

_OCTAVES = 24
"""Attended variances, in units of the row scale, are looked up between 2**-24 and 2**24, in eighths of an octave."""


def scale_shares(bits: Tensor) -> Tensor:
    """Share of every direction in the square of a row's scale, [..., d] float64, one in all.

    A direction with n levels counts 1 / n: few levels must fit the row, many reach far anyway. (Were all alike, a key
    far out along one direction of many levels would get a coarse scale in all others.)
    """
    share = torch.where(bits > 0, 2.0 ** -bits.double(), 0.0)
    return share / share.sum(-1, keepdim=True)


def allocate(variance: Tensor, attended: Tensor, weight: float, max_bits: int) -> Tensor:
    """Bits of every direction for the least error over both kinds of keys.

    Args:
        variance: [d] v of the coordinates, in units of logit error.
        attended: [d] a of the coordinates.
        weight: of attended keys against all keys.
        max_bits: 2, 4, 6 or 8.

    Returns:
        [d] int64, 2 d in all.

    """
    d = variance.shape[0]
    bits = torch.full((d,), 2)
    for _ in range(ROUNDS):
        scale = _attended_scale(bits, attended)
        errors = [1 + weight * attended]
        errors += [_errors(b, attended, scale, weight).amin(0) for b in range(2, max_bits + 1, 2)]
        bits = spend_bits(variance[:, None] * torch.stack(errors, 1), 2 * d)
    return bits


def reaches(bits: Tensor, attended: Tensor, weight: float) -> Tensor:
    """Factor on every direction's step for the least error over both kinds of keys, [d] float64; 1 without bits."""
    scale, reach = _attended_scale(bits, attended), torch.ones(bits.shape, dtype=torch.float64)
    for b in UNIT_STEP:
        own = bits == b
        reach[own] = REACH[_errors(b, attended[own], scale, weight).argmin(0)]
    return reach


def _attended_scale(bits: Tensor, attended: Tensor) -> Tensor:
    """Square of attended keys' row scale."""
    return (scale_shares(bits) * attended).sum().clamp_min(1e-12)


def _errors(bits: int, attended: Tensor, scale: Tensor, weight: float) -> Tensor:
    """[reach, n] error of directions with the attended variances [n], for every factor of `REACH`, v = 1."""
    index = (8 * (attended / scale).log2()).round().clamp(-8 * _OCTAVES, 8 * _OCTAVES)
    relative = _relative_errors(bits)
    return relative[:, 8 * _OCTAVES, None] + weight * attended * relative[:, index.long() + 8 * _OCTAVES]


@cache
def _relative_errors(bits: int) -> Tensor:
    """[reach, 16 * _OCTAVES + 1] `quantization_error` over the variance, for steps of `REACH`; 1 in the middle."""
    variance = 2.0 ** (torch.arange(-8 * _OCTAVES, 8 * _OCTAVES + 1, dtype=torch.float64) / 8)
    return quantization_error(bits, UNIT_STEP[bits] * REACH[:, None], variance) / variance
