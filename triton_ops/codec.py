# SPDX-License-Identifier: Apache-2.0
"""The constants that turn one layer's keys and values into INT2 codes and back.

Row vectors: a key is projected as ``y @ key_encode``, a query as ``q @ key_query``. H is the number of KV heads,
d the head size. A *direction* is one column of the basis keys are stored in; it owns b/2 two-bit *slots* that hold the
base-4 digits of its b-bit code. Calibration builds codecs, the artifact stores them, kernels and reference read them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from triton_ops.layout import PageLayout, Zero

# Step of the uniform quantizer with 2**bits levels that is best for a unit Gaussian: the minimum of E[(x - Q(x))^2],
# integrated numerically. With the same step and its `unbiased_gain` the error is least among unbiased quantizers.
UNIT_STEP = {2: 0.99569, 4: 0.33520, 6: 0.10406, 8: 0.030762}


@dataclass(frozen=True)
class Quantizer:
    """How a row's scale is chosen.

    Attributes:
        kind: ``"gauss"``: cells of constant * standard deviation of the row, and levels that give the row back as large
            as it was (but for keys about their page's mean: `rotation_codec`, `spectral_codec`); ``"minmax"``: clip at
            the row's quantile of \\|x\\|, then minimum and maximum.
        constant: kappa for ``"gauss"`` (> 0), the clip quantile in (0, 1] for ``"minmax"`` (1 = no clipping).

    """

    kind: Literal["gauss", "minmax"]
    constant: float

    def __post_init__(self) -> None:
        if self.kind not in ("gauss", "minmax"):
            raise ValueError(f"quantizer kind {self.kind!r} is unknown; use 'gauss' or 'minmax'")
        upper = 1.0 if self.kind == "minmax" else math.inf
        if not 0.0 < self.constant <= upper:
            raise ValueError(f"quantizer constant {self.constant} is out of range for {self.kind!r}")


@dataclass(frozen=True)
class LayerCodec:
    """One layer's codec. Tensors lead with the KV heads H; float32 unless said otherwise.

    Attributes:
        zero: ``"page"``: the page's mean key is subtracted and a token stores a scale only; ``"token"``: a token
            stores a scale and a zero.
        key_encode: [H, d, d]. ``y @ key_encode`` gives one pre-code per slot, in units of the row scale. A direction's
            column stands once for each of its digits.
        key_query: [H, d, d]. ``q @ key_query`` gives the slots' weights in the logit; also the decode matrix:
            ``key = mean + (scale * (code - 1.5)) @ key_query.T`` (``zero="page"``).
        key_levels: [H, d] int32, 4, 16, 64 or 256: levels of the direction that owns the slot.
        key_digit: [H, d] int32: which base-4 digit of the direction's code the slot holds, 0 = lowest.
        key_weight: [H, d]: row scale = sqrt(sum over slots of weight * pre-code^2); ``zero="page"`` only.
        key_mean: [H, d]: calibrated mean key, subtracted before encoding; ``zero="token"`` only, zeros = off.
        value_rotation: [H, d, d], orthogonal.
        value_mean: [H, d]: calibrated mean value, zeros = off.
        key_quantizer: for ``zero="page"`` its kappa is already folded into the matrices above.
        value_quantizer: values always store a scale and a zero per token.

    """

    zero: Zero
    key_encode: Tensor
    key_query: Tensor
    key_levels: Tensor
    key_digit: Tensor
    key_weight: Tensor
    key_mean: Tensor
    value_rotation: Tensor
    value_mean: Tensor
    key_quantizer: Quantizer
    value_quantizer: Quantizer

    def __post_init__(self) -> None:
        heads, d = self.key_mean.shape
        for name, tensor in self.tensors():
            expected = (heads, d, d) if name in ("key_encode", "key_query", "value_rotation") else (heads, d)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        if self.zero == "page" and self.key_quantizer.kind != "gauss":
            raise ValueError(f"zero='page' needs the 'gauss' key quantizer, not {self.key_quantizer.kind!r}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensor attributes by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    @property
    def num_kv_heads(self) -> int:
        return self.key_mean.shape[0]

    @property
    def head_size(self) -> int:
        return self.key_mean.shape[1]

    def to(self, device: torch.device | str) -> "LayerCodec":
        """The same codec with its tensors on a device, contiguous."""
        return replace(self, **{name: tensor.to(device).contiguous() for name, tensor in self.tensors()})

    def heads(self, index: Tensor | slice) -> "LayerCodec":
        """The codec of some KV heads (tensor parallelism): a slice or an int64 index of heads, repeats allowed."""
        return replace(self, **{name: tensor[index].contiguous() for name, tensor in self.tensors()})


BATCH_ARGUMENTS = (
    "page_table",
    "window_table",
    "page_table_stride",
    "window_table_stride",
    "query_start_loc",
    "seq_lens",
)
"""Kernel arguments whose alignment differs from batch to batch: a kernel specialized on them would compile again
while requests wait."""


def check_cache(*, pages: Tensor, windows: Tensor, codec: LayerCodec, layout: PageLayout) -> None:
    """Refuse a cache that does not fit the codec; the kernels' launchers call it.

    Args:
        pages: [N, H, page_bytes] uint8.
        windows: [N, H, block_size, 2 d].
        codec: the layer's codec: H and d.
        layout: the page layout.

    Raises:
        ValueError: shapes or zero points do not agree, or the codec's tensors are not contiguous.

    """
    heads, d = codec.num_kv_heads, codec.head_size
    if not all(tensor.is_contiguous() for _, tensor in codec.tensors()):
        raise ValueError("the codec's tensors must be contiguous; LayerCodec.to makes them so")
    if codec.zero != layout.zero:
        raise ValueError(f"the codec has zero={codec.zero!r}, the pages have zero={layout.zero!r}")
    if pages.shape[1:] != (heads, layout.page_bytes) or windows.shape[1] != heads or windows.shape[3] != 2 * d:
        raise ValueError(
            f"pages {tuple(pages.shape)} or windows {tuple(windows.shape)} do not fit {heads} heads of size {d}; "
            f"expected [N, {heads}, {layout.page_bytes}] and [N, {heads}, block_size, {2 * d}]"
        )


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix divided by sqrt(size), [size, size] float64.

    Raises:
        ValueError: ``size`` is no power of two.

    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of size {size} is not available; the size must be a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(size)


def bit_reversal(size: int) -> Tensor:
    """Permutation [size] int64 that reverses the bits of the index (the P of U·H·P)."""
    bits = size.bit_length() - 1
    return torch.tensor([int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(size)])


def unbiased_gain(bits: int, step: Tensor | float) -> Tensor:
    """Factor on the levels with which quantizing a unit Gaussian x neither shrinks nor stretches it: 1 / E[x Q(x)].

    Levels in the middle of their cells give back less than was there, E[x Q(x)] = 0.88 with 2 bits and step 1, because
    far values are cut off. Rounding errors average out over tokens and layers; this does not.

    Args:
        bits: 2, 4, 6 or 8.
        step: of the uniform quantizer, any shape.

    Returns:
        float64 of the shape of ``step``.

    """
    level, lower, upper = _cells(bits, torch.as_tensor(step, dtype=torch.float64))
    # E[x; a < x < b] = pdf(a) - pdf(b), and the cells above 0 give half of E[x Q(x)].
    return 0.5 / (level * (_density(lower) - _density(upper))).sum(-1)


def quantization_error(bits: int, step: Tensor, variance: Tensor) -> Tensor:
    """E[(x - Q(x))^2] of a Gaussian x, with the steps and levels (`unbiased_gain`) of a quantizer for a unit Gaussian.

    Args:
        bits: 2, 4, 6 or 8.
        step: of the uniform quantizer; broadcasts with ``variance``.
        variance: of x.

    Returns:
        float64 of the common shape.

    """
    step, variance = step.double(), variance.double()
    sigma = variance.clamp_min(1e-24).sqrt()
    level, lower, upper = _cells(bits, step)
    level = level * unbiased_gain(bits, step)[..., None]
    lower, upper = lower / sigma[..., None], upper / sigma[..., None]
    product = (level * (_density(lower) - _density(upper))).sum(-1) * sigma
    square = (level.square() * (torch.special.ndtr(upper) - torch.special.ndtr(lower))).sum(-1)
    return variance - 4 * product + 2 * square


def _cells(bits: int, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(middle, lower end, upper end) of a quantizer's cells above 0, each [..., 2**(bits - 1)]; the last is open."""
    index = torch.arange(1 << (bits - 1), dtype=torch.float64)
    lower = index * step[..., None]
    upper = torch.cat([lower[..., 1:], torch.full_like(lower[..., :1], math.inf)], -1)
    return (index + 0.5) * step[..., None], lower, upper


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def spend_bits(error: Tensor, total: int) -> Tensor:
    """Give each direction some of the bits, ``total`` in all, so that the sum of errors left is least.

    Greedy: two bits at a time to the direction whose error they reduce most, which is optimal where errors are convex
    in the bits (method: reverse water-filling with a uniform quantizer).

    Args:
        error: [d, n] float64 error of every direction with 0, 2, … 2 (n - 1) bits.
        total: bits to hand out, even, at most 2 (n - 1) d.

    Returns:
        [d] int64 bits.

    """
    d, steps = error.shape[0], error.shape[1] - 1
    if total % 2 or total > 2 * steps * d:
        raise ValueError(f"{total} bits cannot be given to {d} directions of at most {2 * steps} bits in steps of two")
    # A step is never taken before the ones below it, even where it gains more.
    gains = -error.diff(dim=1).cummax(1).values  # [d, steps]
    order = gains.flatten().argsort(descending=True, stable=True)[: total // 2]
    return 2 * torch.bincount(order // steps, minlength=d)


def rotation_codec(
    key_rotation: Tensor,
    value_rotation: Tensor,
    *,
    zero: Zero,
    key_quantizer: Quantizer,
    value_quantizer: Quantizer,
    key_mean: Tensor | None = None,
    value_mean: Tensor | None = None,
) -> LayerCodec:
    """Two bits for every direction of an orthogonal basis.

    Args:
        key_rotation: [H, d, d] orthogonal; a key is stored as ``k @ key_rotation``.
        value_rotation: [H, d, d] orthogonal.
        zero: see `LayerCodec`.
        key_quantizer: with ``zero="page"`` it must be ``"gauss"``; levels are then ±½, ±1½ times kappa * rms(row).
        value_quantizer: quantizer of the rotated values.
        key_mean: [H, d] calibrated mean key in the model's basis, only with ``zero="token"``.
        value_mean: [H, d] calibrated mean value in the model's basis.

    """
    heads, d, _ = key_rotation.shape
    kappa = key_quantizer.constant if zero == "page" else 1.0
    if zero == "page" and key_mean is not None:
        raise ValueError("a calibrated key mean has no effect with zero='page': the page's own mean is subtracted")
    zeros = torch.zeros(heads, d)
    return LayerCodec(
        zero=zero,
        key_encode=(key_rotation.double() / kappa).float(),
        key_query=(key_rotation.double() * kappa).float(),
        key_levels=torch.full((heads, d), 4, dtype=torch.int32),
        key_digit=torch.zeros(heads, d, dtype=torch.int32),
        key_weight=torch.full((heads, d), kappa * kappa / d),
        key_mean=zeros if key_mean is None else key_mean.float(),
        value_rotation=value_rotation.float(),
        value_mean=zeros.clone() if value_mean is None else value_mean.float(),
        key_quantizer=key_quantizer,
        value_quantizer=value_quantizer,
    )


def spectral_codec(
    directions: Tensor,
    inverse: Tensor,
    variance: Tensor,
    bits: Tensor,
    *,
    kappa: float,
    value_rotation: Tensor,
    value_quantizer: Quantizer,
    value_mean: Tensor | None = None,
    reach: Tensor | None = None,
    share: Tensor | None = None,
) -> LayerCodec:
    """Uneven bits over a basis: directions with more of the logit's variance get more slots.

    Args:
        directions: [H, d, d] T; ``y @ T`` are the key's coordinates (need not be orthogonal).
        inverse: [H, d, d] T^-1; ``q @ T^-T`` are the query's coordinates, so row i of T^-1 belongs to direction i.
        variance: [H, d] variance of each coordinate of the page-centred keys.
        bits: [H, d] 0, 2, 4, 6 or 8 bits; each head's sum is 2 d.
        kappa: factor on every quantizer step.
        value_rotation: [H, d, d] orthogonal.
        value_quantizer: quantizer of the rotated values.
        value_mean: [H, d] calibrated mean value.
        reach: [H, d] further factor on each direction's step; None: 1.
        share: [H, d] of each direction in the square of a row's scale, 1 in all per head; None: all that have bits
            alike.

    Raises:
        ValueError: a head's bits do not sum to 2 d or are not 0, 2, 4, 6 or 8.

    """
    heads, d, _ = directions.shape
    bits = bits.long().cpu()
    if bool((bits.sum(1) != 2 * d).any()) or not set(bits.unique().tolist()) <= {0, *UNIT_STEP}:
        raise ValueError(f"bits must be 0, 2, 4, 6 or 8 and sum to {2 * d} per head; sums are {bits.sum(1).tolist()}")
    step, gain = torch.zeros(heads, d, dtype=torch.float64), torch.ones(heads, d, dtype=torch.float64)
    factor = torch.ones_like(step) if reach is None else reach.double().cpu()
    for b, unit in UNIT_STEP.items():
        own = bits == b
        step[own] = kappa * unit * factor[own]
        gain[own] = unbiased_gain(b, step[own])
    if share is None:
        share = (bits > 0) / (bits > 0).sum(1, keepdim=True)
    sigma = variance.double().clamp_min(1e-24).sqrt().cpu()
    # A direction's slots stand together, lowest digit first.
    owner = torch.stack([torch.arange(d).repeat_interleave(row // 2) for row in bits])  # [H, d] direction of a slot
    first = (bits // 2).cumsum(1) - bits // 2
    digit = torch.arange(d) - first.gather(1, owner)
    slots = (bits // 2).gather(1, owner)
    columns = owner[:, None, :].expand(heads, d, d)
    encode = directions.double().cpu().gather(2, columns) / (sigma * step).gather(1, owner)[:, None]
    level = (sigma * step * gain).gather(1, owner) * 4.0**digit
    query = inverse.double().cpu().transpose(1, 2).gather(2, columns) * level[:, None]
    return LayerCodec(
        zero="page",
        key_encode=encode.float(),
        key_query=query.float(),
        key_levels=(4**slots).int(),
        key_digit=digit.int(),
        key_weight=((share.double().cpu() * step.square()).gather(1, owner) / slots).float(),
        key_mean=torch.zeros(heads, d),
        value_rotation=value_rotation.float().cpu(),
        value_mean=torch.zeros(heads, d) if value_mean is None else value_mean.float().cpu(),
        key_quantizer=Quantizer("gauss", kappa),
        value_quantizer=value_quantizer,
    )
