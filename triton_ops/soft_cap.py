# SPDX-License-Identifier: Apache-2.0
"""Logits with a soft cap, as Gemma 2 has them: the scaled logit x becomes c tanh(x / c) before the softmax."""

import triton
import triton.language as tl

from triton_ops.prepare import LOG2_E


def soft_cap_log2(soft_cap: float) -> float:
    """A cap c, 0 for none, in the kernels' units of log2: their constant ``SOFT_CAP``.

    Raises:
        ValueError: the cap is negative.

    """
    if soft_cap < 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive, or 0 for none")
    return soft_cap * LOG2_E


@triton.jit
def capped(logit, SOFT_CAP: tl.constexpr):
    """SOFT_CAP tanh(x / SOFT_CAP) for logits x, both in units of log2; error about 2^-23 SOFT_CAP."""
    power = tl.math.exp2(logit * (2 * 1.4426950408889634 / SOFT_CAP))
    return SOFT_CAP - 2 * SOFT_CAP / (1.0 + power)
