# SPDX-License-Identifier: Apache-2.0
"""Statistics for all positions of a long context, from samples that stand at its start.

Rotary embeddings turn keys and queries by an angle that grows with the position, in every plane of two dimensions at
its own speed. A sample of 2,048 tokens sees the slow planes in a narrow range of angles; further on, keys lie where
the sample had none, along directions that get no bits. (SmolLM2, quantized by statistics of the first 2,048 tokens:
KL 0.006 there, 0.03 to 0.06 after 4,000 to 7,000 tokens.)

Attention does not change when a whole text is moved: its keys and queries are turned, by one orthogonal matrix for
all of them. So second moments at any place follow from those at the start. The matrix of a move by one page is measured
(`page_rotations`), which needs no knowledge of the model's embedding; its powers move by more pages, and averages of
powers need no more than their doubling. Every doubling of the context counts alike (`over_context`).
"""

import math
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from calib.capture import AttentionCall
from calib.statistics import LayerStatistics, Statistics
from triton_ops.layout import PAGE_TOKENS

MAX_RESIDUAL = 0.1
"""Relative error up to which a move counts as a rotation. bfloat16 models leave 0.01 to 0.02."""

TURNED = ("query_moment", "attending_moment", "attended_moment", "key_moment", "page_moment")
"""Moments of what rotary embeddings turn."""


class PageRotations:
    """Handler for `intercept_attention`, for two readings of a text, the second one page further on.

    Attributes:
        matrices: layer index -> [d, d] float64 orthogonal: keys and queries one page further on are ``x @ matrix``. The
            identity where moving a text does not rotate them.
        fixed: layers where it does not.

    """

    def __init__(self) -> None:
        self.matrices: dict[int, Tensor] = {}
        self.fixed: list[int] = []
        self._first: dict[int, list[Tensor]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        rows = [part.flatten(0, 2).double() for part in (call.query, call.key)]
        if call.layer not in self._first:
            self._first[call.layer] = rows
            return call.attend()
        before = self._first.pop(call.layer)
        # Queries and keys count alike, whatever their scales.
        scales = [1.0 / float(part.square().sum()) for part in rows]
        cross = sum(scale * (a.mT @ b) for scale, a, b in zip(scales, before, rows, strict=True))
        u, _, vh = torch.linalg.svd(cross)
        matrix = u @ vh  # orthogonal Procrustes problem (Schönemann 1966)
        residual = max(
            scale * float((a @ matrix - b).square().sum()) for scale, a, b in zip(scales, before, rows, strict=True)
        )
        if residual > MAX_RESIDUAL**2:
            self.fixed.append(call.layer)
            matrix = torch.eye(matrix.shape[0], dtype=torch.float64)
        self.matrices[call.layer] = matrix.cpu()
        return call.attend()


def average(moment: Tensor, rotation: Tensor, count: int) -> Tensor:
    """Mean of a second moment [..., d, d] over moves by 0, 1, … ``count`` - 1 times ``rotation`` [d, d]."""
    if count == 1:
        return moment
    half = count // 2
    mean = average(moment, rotation, half)
    mean = (mean + _moved(mean, torch.linalg.matrix_power(rotation, half))) / 2
    if count % 2:
        mean += (_moved(moment, torch.linalg.matrix_power(rotation, count - 1)) - mean) / count
    return mean


def _moved(moment: Tensor, rotation: Tensor) -> Tensor:
    return rotation.mT @ moment @ rotation


def context_average(moment: Tensor, rotation: Tensor, window: int, context: int) -> Tensor:
    """Mean over a context of a second moment that was measured on its first tokens.

    The context is cut into parts whose ends grow by one factor, at most two, the first of them the window; each counts
    alike. In a part, all moves of the window by whole pages that stay inside count alike.

    Args:
        moment: [..., d, d] float64.
        rotation: [d, d] that moves by one page.
        window: pages of the sample.
        context: pages of the context, at least ``window``.

    """
    parts = math.ceil(math.log2(context / window))
    edges = [round(window * (context / window) ** (i / parts)) for i in range(parts + 1)] if parts else [window]
    means = [moment]
    for begin, end in pairwise(edges):
        inside = average(moment, rotation, max(end - begin - window + 1, 1))
        means.append(_moved(inside, torch.linalg.matrix_power(rotation, begin)))
    return torch.stack(means).mean(0)


def over_context(statistics: Statistics, rotations: PageRotations, window: int, context: int) -> Statistics:
    """Statistics whose moments of queries and keys are `context_average` of the samples'; sums stay as they are.

    Args:
        statistics: of samples that stand at position 0.
        rotations: of the same layers.
        window: tokens of a sample.
        context: tokens of the longest context.

    """
    pages = max(window // PAGE_TOKENS, 1), max(context // PAGE_TOKENS, window // PAGE_TOKENS, 1)

    def moved(index: int, layer: LayerStatistics) -> LayerStatistics:
        turned = {name: context_average(getattr(layer, name), rotations.matrices[index], *pages) for name in TURNED}
        return replace(layer, **turned)

    result = Statistics(statistics.segments, statistics.settings)
    result.samples = statistics.samples
    result.layers = {index: moved(index, layer) for index, layer in statistics.layers.items()}
    return result


def held_out_starts(count: int, window: int, context: int) -> list[int]:
    """Positions at which ``count`` samples of ``window`` tokens start, multiples of a page: spread over the context as
    `context_average` counts it."""
    shares = [(i + 0.5) / count for i in range(count)]
    return [int(window * (max(context / window, 1.0) ** share - 1)) // PAGE_TOKENS * PAGE_TOKENS for share in shares]
