# SPDX-License-Identifier: Apache-2.0
"""From a layer's statistics to its codec: bases U·H·P, the query-whitened key basis, bits by spectrum.

Two ways to store keys (README, "How it works"):

* ``allocation="uniform"``: an orthogonal rotation, two bits for every direction.
* ``allocation="spectral"``: coordinates in which an error of one is a logit error of one and keys are uncorrelated;
  directions get 0 to ``max_bits`` bits by their variance, 2 d in all (calib/allocation.py).

Values always use a rotation: their spectrum is flat, and a dropped direction would be a bias that averaging over
tokens does not remove.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from calib.allocation import allocate, reaches, scale_shares
from calib.statistics import LayerStatistics
from oscar_vllm.errors import OscarConfigError
from triton_ops.codec import (
    LayerCodec,
    Quantizer,
    bit_reversal,
    hadamard,
    rotation_codec,
    spectral_codec,
)

CHOICES: dict[str, tuple] = {
    "granularity": ("head", "layer"),
    "composition": ("identity", "H", "U", "UH", "UHP"),
    "key_target": ("query", "key"),
    "query_weight": ("history", "uniform"),
    "positions": ("context", "samples"),
    "value_target": ("output", "mean_field", "value"),
    "allocation": ("spectral", "uniform"),
    "max_bits": (2, 4, 6, 8),
    "spread": ("groups", "none"),
    "zero": ("page", "token"),
    "quantizer": ("gauss", "minmax"),
    "centre": ("none", "keys", "values", "both"),
}
"""Legal values of the fields of `Recipe`."""


def flag(name: str) -> str:
    """The option of ``python -m calib`` that sets a field of `Recipe`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Recipe:
    """Every choice that shapes a codec; the defaults are what measures best.

    Attributes:
        granularity: one basis per KV ``"head"`` or one per ``"layer"`` (statistics averaged over the heads).
        composition: rotation of values, and of keys with uniform allocation. U: eigenvectors of the target, ascending;
            H: Hadamard; P: bit-reversed order, which changes nothing while one scale covers a whole row.
        key_target: U of keys from M_Q (``"query"``) or from the keys' own second moment (``"key"``).
        query_weight: how queries count in M_Q: each by what its output may lose by errors in history
            (``"history"``, see `LayerStatistics.attending_moment`), or all alike.
        attended: with spectral allocation, weight of keys that count by what outputs may lose by their errors
            (`LayerStatistics.attended_moment`), against all keys alike: in basis, bits and steps (calib/allocation.py).
            None: 0 or 1, by the model's KL on held-out text.
        positions: whether queries and keys are those of all positions of the longest context (``"context"``,
            calib/positions.py) or those of the samples alone.
        value_target: U of values from the attention output's moment, from its mean-field stand-in, or from the values.
        allocation: see the module's docstring; ``"spectral"`` needs ``zero="page"``.
        max_bits: most bits of a direction with spectral allocation.
        spread: with spectral allocation, Hadamard rotations inside groups of directions of equal bits (``"groups"``):
            they spread keys that stand far out along one direction. None: with or without, likewise.
        ridge: multiple of M_Q's mean diagonal that is added to it before whitening.
        zero: subtract each page's mean key (``"page"``) or store a zero per token (``"token"``).
        quantizer: ``"gauss"`` or ``"minmax"``, for keys and values; ``zero="page"`` needs ``"gauss"``.
        centre: calibrated means to subtract; keys only with ``zero="token"``.
        key_constant: the quantizer's constant for keys, above 0 (``"minmax"``: at most 1); None:
            `quantizer_search.SPECTRAL_KAPPA` with spectral allocation, else searched per layer on held-out text.
        value_constant: likewise for values, always searched.

    Raises:
        OscarConfigError: a value is unknown or out of range, or two choices contradict each other.

    """

    granularity: Literal["head", "layer"] = "head"
    composition: Literal["identity", "H", "U", "UH", "UHP"] = "UH"
    key_target: Literal["query", "key"] = "query"
    query_weight: Literal["history", "uniform"] = "history"
    attended: float | None = 1.0
    positions: Literal["context", "samples"] = "context"
    value_target: Literal["output", "mean_field", "value"] = "output"
    allocation: Literal["spectral", "uniform"] = "spectral"
    max_bits: int = 8
    spread: Literal["groups", "none"] | None = "groups"
    ridge: float = 1e-4
    zero: Literal["page", "token"] = "page"
    quantizer: Literal["gauss", "minmax"] = "gauss"
    centre: Literal["none", "keys", "values", "both"] = "none"
    key_constant: float | None = None
    value_constant: float | None = None

    def __post_init__(self) -> None:
        for name, legal in CHOICES.items():
            searched = name == "spread" and self.spread is None
            if getattr(self, name) not in legal and not searched:
                choices = ", ".join(map(str, legal))
                raise OscarConfigError(f"{flag(name)} {getattr(self, name)} is unknown; use one of {choices}")
        if not 0.0 < self.ridge < 1.0:
            raise OscarConfigError(f"--ridge {self.ridge} is out of range; use a value between 0 and 1, such as 1e-4")
        if self.attended is not None and not 0.0 <= self.attended < math.inf:
            raise OscarConfigError(f"--attended {self.attended} is out of range; use 0 or more, such as 1")
        for name in ("key_constant", "value_constant"):
            constant, upper = getattr(self, name), 1.0 if self.quantizer == "minmax" else math.inf
            if constant is not None and not (0.0 < constant <= upper and math.isfinite(constant)):
                allowed = "above 0 and at most 1" if self.quantizer == "minmax" else "above 0"
                raise OscarConfigError(
                    f"{flag(name)} {constant} is out of range; with --quantizer {self.quantizer} use a value {allowed}"
                )
        if self.allocation == "spectral" and self.zero != "page":
            raise OscarConfigError("--allocation spectral needs --zero page; add --allocation uniform or --zero page")
        if self.zero == "page" and self.quantizer != "gauss":
            raise OscarConfigError(
                f"--quantizer {self.quantizer} (--preset reference sets it) needs --zero token; "
                "add --zero token or --quantizer gauss"
            )
        if self.zero == "page" and self.centre in ("keys", "both"):
            raise OscarConfigError(
                f"--centre {self.centre} has no effect on keys with --zero page, which subtracts the page's own mean; "
                "add --zero token or leave out the keys"
            )

    def alternatives(self) -> list["Recipe"]:
        """The recipes to choose from: every open choice made in each way."""
        if self.allocation == "uniform":
            return [self]
        return [
            replace(self, attended=attended, spread=spread)
            for attended in ((0.0, 1.0) if self.attended is None else (self.attended,))
            for spread in (CHOICES["spread"] if self.spread is None else (self.spread,))
        ]

    def describe(self) -> dict[str, Any]:
        """The choices as plain values, for the artifact."""
        return asdict(self)


PRESETS = {
    "default": Recipe(),
    # arXiv 2605.17757 and its public code: one rotation per layer, K from M_Q, V from the mean-field moment.
    "reference": Recipe(
        granularity="layer",
        composition="UHP",
        query_weight="uniform",
        attended=0.0,
        positions="samples",
        value_target="mean_field",
        allocation="uniform",
        zero="token",
        quantizer="minmax",
        key_constant=0.96,
        value_constant=0.92,
    ),
}


def _pool(moment: Tensor, granularity: str) -> Tensor:
    return moment if granularity == "head" else moment.mean(0, keepdim=True).expand_as(moment)


def rotation(target: Tensor, *, composition: str, granularity: str = "head") -> Tensor:
    """Orthogonal matrices [H, d, d] float64 for ``x @ rotation``.

    Args:
        target: [H, d, d] symmetric; its eigenvectors are U.
        composition: ``"identity"``, ``"H"``, ``"U"``, ``"UH"`` or ``"UHP"``.
        granularity: ``"head"`` or ``"layer"``.

    """
    size = target.shape[-1]
    matrix = torch.eye(size, dtype=torch.float64).expand_as(target)
    if "U" in composition:
        matrix = torch.linalg.eigh(_pool(target.double(), granularity)).eigenvectors
    if "H" in composition:
        matrix = matrix @ hadamard(size)
    return matrix[..., bit_reversal(size)] if "P" in composition else matrix


def whitened_basis(query_covariance: Tensor, key_covariance: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates in which queries are white and keys uncorrelated, most important direction first.

    With M the query covariance (plus the ridge), A = M^(1/2) and A Σ A = V Λ V^T: keys become k A V, queries q A^-1 V.

    Args:
        query_covariance: [H, d, d] M_Q.
        key_covariance: [H, d, d] Σ.
        ridge: see `Recipe`.

    Returns:
        (T [H, d, d], T^-1 [H, d, d], variance [H, d]): keys are ``k @ T``, queries ``q @ T^-T``; all float64.

    """
    m = query_covariance.double()
    diagonal = m.diagonal(dim1=1, dim2=2).mean(1)
    m = m + ridge * diagonal[:, None, None] * torch.eye(m.shape[-1], dtype=torch.float64)
    eigenvalues, vectors = torch.linalg.eigh(m)
    eigenvalues = eigenvalues.clamp_min(1e-12 * eigenvalues.amax(1, keepdim=True))[:, None]
    root = vectors * eigenvalues.sqrt() @ vectors.mT
    inverse_root = vectors * eigenvalues.rsqrt() @ vectors.mT
    variance, basis = torch.linalg.eigh(root @ key_covariance.double() @ root)
    basis = basis.flip(2)
    return root @ basis, basis.mT @ inverse_root, variance.flip(1).clamp_min(0)


def spread_groups(
    directions: Tensor, inverse: Tensor, variance: Tensor, bits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hadamard rotations inside groups of directions of equal bits, scaled to unit variance first.

    A group of n directions is rotated in parts of the largest powers of two that fit, most important first. Bits and
    logits stay what they are; variances inside a rotated part become one.

    Args:
        directions: [H, d, d] T of `whitened_basis`.
        inverse: [H, d, d] inverse of directions.
        variance: [H, d] of the coordinates.
        bits: [H, d] of the coordinates.

    """
    directions, inverse, variance = directions.clone(), inverse.clone(), variance.clone()
    for head, row in enumerate(bits):
        for count in row.unique().tolist():
            group = (row == count).nonzero().squeeze(1)
            while count > 0 and len(group) > 1:
                size = 1 << (len(group).bit_length() - 1)
                part, group = group[:size], group[size:]
                sigma = variance[head, part].clamp_min(1e-24).sqrt()
                directions[head, :, part] = directions[head, :, part] / sigma @ hadamard(size)
                inverse[head, part] = hadamard(size) @ (sigma[:, None] * inverse[head, part])
                variance[head, part] = 1.0
    return directions, inverse, variance


@dataclass(frozen=True)
class LayerBasis:
    """Everything of a layer's codec but the quantizer's constants.

    Attributes:
        recipe: what it was made by.
        value_rotation: [H, d, d] orthogonal.
        value_mean: [H, d] that is subtracted first, or None.
        directions: [H, d, d] keys are stored as ``k @ directions``.
        inverse: [H, d, d] inverse of directions.
        variance: [H, d] variances of the coordinates; None with uniform allocation.
        bits: [H, d] bits of the coordinates; None with uniform allocation.
        reach: [H, d] factor on the coordinates' steps; None with uniform allocation.
        share: [H, d] of the coordinates in the square of a row's scale; None with uniform allocation.
        key_mean: [H, d] that is subtracted first, or None.

    """

    recipe: Recipe
    value_rotation: Tensor
    value_mean: Tensor | None
    directions: Tensor
    inverse: Tensor
    variance: Tensor | None = None
    bits: Tensor | None = None
    reach: Tensor | None = None
    share: Tensor | None = None
    key_mean: Tensor | None = None

    def codec(self, key_constant: float, value_constant: float) -> LayerCodec:
        """The codec for given constants; the recipe's own are not looked at."""
        value_quantizer = Quantizer(self.recipe.quantizer, value_constant)
        if self.variance is None or self.bits is None:
            return rotation_codec(
                self.directions,
                self.value_rotation,
                zero=self.recipe.zero,
                key_quantizer=Quantizer(self.recipe.quantizer, key_constant),
                value_quantizer=value_quantizer,
                key_mean=self.key_mean,
                value_mean=self.value_mean,
            )
        return spectral_codec(
            self.directions,
            self.inverse,
            self.variance,
            self.bits,
            kappa=key_constant,
            value_rotation=self.value_rotation,
            value_quantizer=value_quantizer,
            value_mean=self.value_mean,
            reach=self.reach,
            share=self.share,
        )


def layer_basis(statistics: LayerStatistics, recipe: Recipe) -> LayerBasis:
    """Bases and bits of one layer; no choice of the recipe may be open."""
    target = {
        "output": statistics.output_moment,
        "mean_field": statistics.mean_field_moment,
        "value": statistics.value_moment,
    }[recipe.value_target]
    values = {
        "recipe": recipe,
        "value_rotation": rotation(target, composition=recipe.composition, granularity=recipe.granularity),
        "value_mean": statistics.value_mean if recipe.centre in ("values", "both") else None,
    }
    if recipe.allocation == "spectral":
        return LayerBasis(**values, **spectral_basis(statistics, recipe))
    target = query_target(statistics, recipe) if recipe.key_target == "query" else statistics.key_moment
    directions = rotation(target, composition=recipe.composition, granularity=recipe.granularity)
    key_mean = statistics.key_mean if recipe.centre in ("keys", "both") else None
    return LayerBasis(directions=directions, inverse=directions.mT, key_mean=key_mean, **values)


def query_target(statistics: LayerStatistics, recipe: Recipe) -> Tensor:
    """M_Q [H, d, d] as the recipe weights queries, up to a factor."""
    return statistics.attending_moment if recipe.query_weight == "history" else statistics.query_covariance


def key_basis(statistics: LayerStatistics, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """`whitened_basis` of a layer; with granularity ``"layer"`` every head gets the same."""
    assert recipe.attended is not None
    covariance = statistics.page_covariance + recipe.attended * statistics.attended_covariance
    return whitened_basis(
        _pool(query_target(statistics, recipe), recipe.granularity),
        _pool(covariance, recipe.granularity),
        recipe.ridge,
    )


def _variances(covariance: Tensor, directions: Tensor, recipe: Recipe) -> Tensor:
    """[H, d] variances of the coordinates ``k @ directions``."""
    pooled = _pool(covariance, recipe.granularity)
    return (directions.mT @ pooled @ directions).diagonal(dim1=1, dim2=2).clamp_min(1e-24)


def spectral_basis(statistics: LayerStatistics, recipe: Recipe) -> dict[str, Tensor]:
    """The part of a `LayerBasis` that says how keys are stored, with spectral allocation."""
    assert recipe.attended is not None
    directions, inverse, _ = key_basis(statistics, recipe)
    variance = _variances(statistics.page_covariance, directions, recipe)
    attended = _variances(statistics.attended_covariance, directions, recipe) / variance
    rows = zip(variance, attended, strict=True)
    bits = torch.stack([allocate(*row, recipe.attended, recipe.max_bits) for row in rows])
    if recipe.spread == "groups":
        directions, inverse, _ = spread_groups(directions, inverse, variance, bits)
        variance = _variances(statistics.page_covariance, directions, recipe)
        attended = _variances(statistics.attended_covariance, directions, recipe) / variance
    reach = torch.stack([reaches(*row, recipe.attended) for row in zip(bits, attended, strict=True)])
    return {
        "directions": directions,
        "inverse": inverse,
        "variance": variance,
        "bits": bits,
        "reach": reach,
        "share": scale_shares(bits),
    }


def data_free(recipe: Recipe, composition: Literal["identity", "H"]) -> Recipe:
    """The recipe that stores every direction alike in a fixed basis: what the chosen codec is compared with."""
    return replace(recipe, composition=composition, allocation="uniform")


def spectrum_concentration(statistics: LayerStatistics, recipe: Recipe) -> float:
    """Share of the logit's variance in the first eighth of the key directions, mean over KV heads (1/8 = flat)."""
    _, _, variance = key_basis(statistics, replace(recipe, attended=0.0))
    return float((variance[:, : variance.shape[1] // 8].sum(1) / variance.sum(1)).mean())
