# SPDX-License-Identifier: Apache-2.0
"""Other KV-cache quantizers, simulated for `eval_fidelity.py`: what a query would find in such a cache.

Each follows its publication in what it stores (bits, scales, which axis shares a scale), with the same BF16 segments
and pages of 128 tokens as ``oscar_int2``. Scales, zeros and norms are float16. They are here to compare with only.

* `int4_hadamard`: keys and values rotated by a Hadamard matrix, 4 bits with a scale and a zero per token and head
  (QuaRot, arXiv 2404.00456).
* `kivi2`: 2 bits; keys share a scale and a zero per channel over the 128 tokens of a page, values per token and head
  (KIVI, arXiv 2402.02750).
* `turboquant3`: rotated by a Hadamard matrix with random signs, a norm per token and head, 3 bits with the levels that
  are best for a Gaussian (TurboQuant's MSE quantizer, arXiv 2504.19874).
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from calib.simulate import Store
from triton_ops.codec import hadamard
from triton_ops.layout import PAGE_TOKENS

LLOYD_MAX_8 = (0.2451, 0.7560, 1.3439, 2.1520)
"""Positive levels of the 8-level Lloyd-Max quantizer of a unit Gaussian (Max 1960, table I)."""


def bits_per_element(name: str, head_size: int) -> float:
    """Stored bits per key or value element of a baseline, scales and zeros included."""
    return {
        "int4_hadamard": 4 + 32 / head_size,
        "kivi2": 2 + (32 / PAGE_TOKENS + 32 / head_size) / 2,
        "turboquant3": 3 + 16 / head_size,
    }[name]


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _minmax(x: Tensor, bits: int, dim: int) -> Tensor:
    """Asymmetric round-to-nearest of float32 ``x`` with one scale and zero along ``dim``."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero, scale = _half(low), _half(((high - low) / (2**bits - 1)).clamp_min(2.0**-14))
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def int4_hadamard(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """See the module; key and value [H, T, d], any float dtype, to float32."""
    rotation = hadamard(key.shape[-1]).to(key.device, torch.float32)
    stored_key, stored_value = (_minmax(x.float() @ rotation, 4, -1) @ rotation.T for x in (key, value))
    return stored_key, stored_value


def kivi2(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """See the module; key and value [H, T, d], any float dtype, to float32. The incomplete page stays exact."""
    whole = key.shape[1] // PAGE_TOKENS * PAGE_TOKENS
    pages = rearrange(key[:, :whole].float(), "h (p t) d -> h p t d", t=PAGE_TOKENS)
    stored = rearrange(_minmax(pages, 2, -2), "h p t d -> h (p t) d")
    return torch.cat([stored, key[:, whole:].float()], 1), _minmax(value.float(), 2, -1)


def turboquant3(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """See the module; key and value [H, T, d], any float dtype, to float32."""
    d = key.shape[-1]
    signs = torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    rotation = (signs[:, None].double() * hadamard(d)).to(key.device, torch.float32)
    positive = torch.tensor(LLOYD_MAX_8, device=key.device)
    levels = torch.cat([-positive.flip(0), positive])
    limits = (levels[1:] + levels[:-1]) / 2

    def stored(x: Tensor) -> Tensor:
        rotated = x.float() @ rotation
        scale = _half(rotated.norm(dim=-1, keepdim=True) / math.sqrt(d)).clamp_min(2.0**-14)
        return levels[torch.bucketize(rotated / scale, limits)] * scale @ rotation.T

    return stored(key), stored(value)


BASELINES: dict[str, Store] = {"int4_hadamard": int4_hadamard, "kivi2": kivi2, "turboquant3": turboquant3}
