# SPDX-License-Identifier: Apache-2.0
"""Compile every variant of the decode kernels at start-up.

Triton compiles a kernel when it is first launched with other constants, in one to four seconds. Which constants a step
launches depends on its number of requests, so a server would stop for seconds when a batch reaches a new size, or when
the first long prompt comes. Here every variant that a batch of up to ``max_requests`` requests can launch is launched
once, on a batch without tokens. Triton keeps what it compiled for the next start.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton

from triton_ops.attend_decode import DecodeWorkspace, attend_partials, merge_options, merge_partials
from triton_ops.demote import demote
from triton_ops.layout import PAGE_TOKENS
from triton_ops.prepare import QueryMatrix, prepare_query
from triton_ops.schedule import DecodeGrid, DecodeSchedule, request_block
from triton_ops.write_and_prepare import write_and_prepare

if TYPE_CHECKING:
    from oscar_vllm.self_test import LayerKernels


def decode_launches(
    layer: "LayerKernels",
    device: torch.device,
    *,
    multiprocessors: int | None = None,
    capability: tuple[int, int] | None = None,
) -> list[Callable[[], Any]]:
    """Launches on an empty batch that together compile whatever decode steps of the layer, and `demote`, launch.

    Args:
        layer: the layer.
        device: where the kernels run.
        multiprocessors: multiprocessors the decode grids are made for; default: the device's.
        capability: its compute capability; default: the device's.

    """
    codec = layer.codec.to(device)
    heads, d, requests = codec.num_kv_heads, codec.head_size, layer.max_requests
    shape = {"num_query_heads": layer.num_query_heads, "num_kv_heads": heads, "head_size": d}
    workspace = DecodeWorkspace.allocate(
        max_requests=requests,
        max_query_len=layer.max_query_len,
        device=device,
        multiprocessors=multiprocessors,
        capability=capability,
        **shape,
    )
    tables = {"page_table": (requests, 1), "window_table": (requests, 1)}
    batch = {"query_start_loc": (requests + 1,), "seq_lens": (requests,)}
    empty = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in (tables | batch).items()}
    cache = {
        "pages": torch.zeros(1, heads, layer.layout.page_bytes, dtype=torch.uint8, device=device),
        "windows": torch.zeros(1, heads, layer.window_block, 2 * d, dtype=layer.dtype, device=device),
    }
    query = torch.zeros(1, layer.num_query_heads, d, dtype=layer.dtype, device=device)
    row = torch.zeros(1, heads, d, dtype=layer.dtype, device=device)
    lse = torch.zeros(layer.num_query_heads, 1, dtype=torch.float32, device=device)
    slot = torch.full((1,), -1, dtype=torch.int64, device=device)
    matrix = QueryMatrix.of(codec)
    lengths = {name: empty[name] for name in batch}
    written: dict[str, Any] = {**cache, **empty, "codec": codec, "layout": layer.layout, "sink": layer.sink}

    def schedule(grid: DecodeGrid) -> DecodeSchedule:
        made = DecodeSchedule.allocate(max_requests=requests, multiprocessors=workspace.multiprocessors, device=device)
        made.entries.fill_(-1)
        made.grid = grid
        return made

    launches: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for queries, count in ((q, r) for q in {1, layer.max_query_len} for r in range(1, requests + 1)):
        grid = workspace.grid(num_requests=count, max_query_len=queries, **shape)
        rows = (grid.rows, grid.row_blocks)
        prepared = {
            "query": query, "codec": codec, "matrix": matrix, "grid": grid, "scale": layer.scale,
            "prepared": workspace.prepared,
        }  # fmt: skip
        if ("attend", *rows) not in launches:
            launches["attend", *rows] = partial(
                attend_partials, query=query, scale=layer.scale, recent=layer.recent, schedule=schedule(grid),
                workspace=workspace, soft_cap=layer.soft_cap,
                **{name: x for name, x in written.items() if name not in batch},
            )  # fmt: skip
            launches["prepare", *rows] = partial(prepare_query, **prepared, **lengths)
            launches["write", *rows] = partial(
                write_and_prepare, key=row, value=row, slot_mapping=slot, num_tokens=1,
                multiprocessors=workspace.multiprocessors, **prepared | written,
            )  # fmt: skip
        if ("schedule", request_block(count)) not in launches:
            launches["schedule", request_block(count)] = partial(
                schedule(grid).update, grid=grid, window_table=empty["window_table"], sink=layer.sink,
                recent=layer.recent, window_block_size=layer.window_block, **lengths,
            )  # fmt: skip
        options = merge_options(grid=grid, num_kv_heads=heads, head_size=d, multiprocessors=workspace.multiprocessors)
        merge = ("merge", *rows, options)
        if merge not in launches:
            launches[merge] = partial(
                merge_partials, codec=codec, schedule=schedule(grid), workspace=workspace, output=query,
                lse=lse if layer.has_sinks else None, **lengths,
            )  # fmt: skip
    for tokens in (1, 2 * PAGE_TOKENS**2):  # few pages, many pages, also for a single KV head
        launches["demote", tokens] = partial(
            demote, key=row, value=row, num_tokens=tokens, num_requests=1, max_query_len=tokens, **written
        )
    return list(launches.values())


def compile_ahead(layer: "LayerKernels", device: torch.device, **gpu: Any) -> None:
    """Run `decode_launches` on a GPU; in Triton's interpreter nothing is compiled.

    One after the other: threads save nothing (36 s alone, 36 s with twelve, on an H200), because Triton's compiler
    keeps the interpreter lock.
    """
    if not triton.knobs.runtime.interpret:
        for launch in decode_launches(layer, device, **gpu):
            launch()
