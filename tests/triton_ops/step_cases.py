# SPDX-License-Identifier: Apache-2.0
"""One step of several requests over a paged cache, for the tests of the kernels that write and prefill.

Everything is made on the CPU, where the reference runs; `Step.to` gives the kernel's copy. Whatever nobody wrote is
NaN (windows) or 0xFF (pages: NaN scales), so that a read of it shows.
"""

import os
from dataclasses import dataclass, fields, replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from triton_ops.layout import PAGE_TOKENS, PageLayout

BLOCK = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
"""Where a kernel test runs: in Triton's interpreter, and compiled where there is a GPU."""


@dataclass(frozen=True)
class Step:
    """Tensors of one step, named as the launchers name them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: torch.Tensor
    windows: torch.Tensor
    page_table: torch.Tensor
    window_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor

    def to(self, device: str) -> "Step":
        return replace(self, **{f.name: getattr(self, f.name).to(device, copy=True) for f in fields(self)})

    def cache(self, *names: str) -> dict[str, torch.Tensor]:
        common = ("pages", "windows", "page_table", "window_table", "query_start_loc", "seq_lens")
        return {name: getattr(self, name) for name in (*common, *names)}

    @property
    def sizes(self) -> dict[str, int]:
        counts = self.query_start_loc.diff()
        return {
            "num_tokens": self.query.shape[0],
            "num_requests": self.seq_lens.shape[0],
            "max_query_len": int(counts.max()),
        }


def make_step(
    requests: list[tuple[int, int]],
    *,
    heads: int,
    d: int,
    layout: PageLayout,
    groups: int = 1,
    sink: int = 64,
    recent: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    keys=None,
    values=None,
    drop_recents: bool = False,
    seed: int = 0,
) -> Step:
    """A step in which request r holds ``requests[r] = (tokens before the step, tokens of the step)``.

    Windows hold the sinks and the last ``recent`` tokens before the step, and have room for the step's last tokens; the
    other entries of the window table are 0. ``drop_recents`` leaves only the sinks and the tail of the incomplete page,
    as after a prefix hit. ``keys(tokens)`` and ``values(tokens)`` make [tokens, H, d]; default: standard normal.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, heads, d, generator=generator)

    keys, values = keys or normal, values or normal
    lengths = [before + new for before, new in requests]
    max_pages, max_blocks = max(lengths) // PAGE_TOKENS + 1, max(lengths) // BLOCK + 1
    count = len(requests)
    page_table = (torch.randperm(count * max_pages, generator=generator) + 1).view(count, max_pages).int()
    window_table = (torch.randperm(count * max_blocks, generator=generator) + 1).view(count, max_blocks).int()
    windows = torch.full((count * max_blocks + 1, heads, BLOCK, 2 * d), torch.nan, dtype=dtype)
    new_keys, new_values, slots = [], [], []
    for r, (before, new) in enumerate(requests):
        key, value = keys(before + new).to(dtype), values(before + new).to(dtype)
        position = torch.arange(before + new)
        tail = before // PAGE_TOKENS * PAGE_TOKENS if drop_recents else before - recent
        held = (position < sink) | (position >= torch.where(position < before, tail, before + new - recent))
        kept = torch.zeros(max_blocks * BLOCK, dtype=torch.bool)
        kept[: before + new] = held
        kept = kept.view(max_blocks, BLOCK).any(1)
        window_table[r][~kept] = 0
        old = position[:before][kept[position[:before] // BLOCK]]
        windows[window_table[r, old // BLOCK].long(), :, old % BLOCK] = torch.cat([key, value], -1)[old]
        step = position[before:]
        slots.append(window_table[r, step // BLOCK].long() * BLOCK + step % BLOCK)
        new_keys.append(key[before:])
        new_values.append(value[before:])
    tokens = sum(new for _, new in requests)
    return Step(
        query=torch.randn(tokens, heads * groups, d, generator=generator).to(dtype),
        key=torch.cat(new_keys),
        value=torch.cat(new_values),
        pages=torch.full((count * max_pages + 1, heads, layout.page_bytes), 255, dtype=torch.uint8),
        windows=windows,
        page_table=page_table,
        window_table=window_table,
        query_start_loc=torch.tensor([0, *(new for _, new in requests)]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths).int(),
        slot_mapping=torch.cat(slots),
    )
