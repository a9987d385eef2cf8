# SPDX-License-Identifier: Apache-2.0
"""What is compiled at start-up is all that decode steps launch, whatever their number of requests."""

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from oscar_vllm.self_test import LayerKernels
from oscar_vllm.warm_up import decode_launches
from tests.triton_ops.step_cases import INTERPRETED
from tests.triton_ops.test_attend_decode import make_codec
from triton_ops.attend_decode import DecodeWorkspace, attend_decode
from triton_ops.demote import demote
from triton_ops.prepare import QueryMatrix, prepare_query
from triton_ops.schedule import DecodeSchedule
from triton_ops.write_and_prepare import write_and_prepare

H200: dict[str, Any] = {"multiprocessors": 132, "capability": (9, 0)}
REQUESTS = 300

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="watches Triton's interpreter")


@pytest.fixture
def compiled(monkeypatch) -> set:
    """Kernels launched since, with all that Triton compiles them for; none of them runs."""
    found = set()

    def specialization(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int) and not isinstance(value, bool):
            return "int", value == 1, value % 16 == 0
        return "float" if isinstance(value, float) else value

    def run(self, *args, grid, warmup, **constants):
        general = self.kwargs["do_not_specialize"] or []
        named = zip(self.arg_names, args, strict=False)
        found.add((
            self.fn.__name__,
            tuple(getattr(x, "dtype", type(x)) if name in general else specialization(x) for name, x in named),
            tuple(sorted(constants.items())),
        ))  # fmt: skip

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def layer(heads: int, groups: int, d: int, queries: int, **options) -> LayerKernels:
    codec, layout = make_codec(heads, d, "page")
    given = {"sink": 64, "recent": 256, "prefill": "exact", "dtype": torch.bfloat16, "max_requests": REQUESTS}
    return LayerKernels(codec, layout, heads * groups, d**-0.5, max_query_len=queries, **given | options)


def launch_steps(layer: LayerKernels, requests: int, queries: int) -> None:
    """The launches of a decode step, of the decoding part of a mixed one, and of a long prompt, as the backend's."""
    codec, heads, d = layer.codec.to("cpu"), layer.codec.num_kv_heads, layer.codec.head_size
    shape = {"num_query_heads": layer.num_query_heads, "num_kv_heads": heads, "head_size": d}
    workspace = DecodeWorkspace.allocate(
        max_requests=REQUESTS, max_query_len=layer.max_query_len, device="cpu", **shape, **H200
    )
    schedule = DecodeSchedule.allocate(max_requests=REQUESTS, multiprocessors=132, device="cpu")
    tokens = requests * queries
    projected = torch.zeros(tokens, layer.num_query_heads + 2 * heads, d, dtype=layer.dtype)
    query, key, value = projected.split([layer.num_query_heads, heads, heads], 1)
    batch = {
        "pages": torch.zeros(3, heads, layer.layout.page_bytes, dtype=torch.uint8),
        "windows": torch.zeros(3, heads, layer.window_block, 2 * d, dtype=layer.dtype),
        "page_table": torch.zeros(requests, 7, dtype=torch.int32),
        "window_table": torch.zeros(requests, 51, dtype=torch.int32),
        "query_start_loc": torch.zeros(requests + 1, dtype=torch.int32),
        "seq_lens": torch.zeros(requests, dtype=torch.int32),
        "codec": codec,
        "layout": layer.layout,
        "sink": layer.sink,
    }
    lengths = {name: batch[name] for name in ("query_start_loc", "seq_lens")}
    grid = workspace.grid(num_requests=requests, max_query_len=queries, **shape)
    schedule.update(
        grid=grid, window_table=batch["window_table"], window_block_size=layer.window_block, sink=64,
        recent=layer.recent, **lengths,
    )  # fmt: skip
    queries_of = {"query": query, "matrix": QueryMatrix.of(codec), "grid": grid, "scale": layer.scale}
    queries_of["prepared"] = workspace.prepared
    write_and_prepare(
        key=key, value=value, slot_mapping=torch.zeros(tokens, dtype=torch.int64), num_tokens=tokens,
        multiprocessors=132, **queries_of, **batch,
    )  # fmt: skip
    prepare_query(codec=codec, **queries_of, **lengths)
    attend_decode(
        query=query, **batch, scale=layer.scale, recent=layer.recent, schedule=schedule, workspace=workspace,
        output=torch.zeros(tokens, layer.num_query_heads, d, dtype=layer.dtype),
        lse=torch.zeros(layer.num_query_heads, tokens) if layer.has_sinks else None,
    )  # fmt: skip
    for long in (200, 8192, 16384):
        rows = {"key": key, "value": value, "num_tokens": tokens + long}
        demote(**rows, **batch, num_requests=requests, max_query_len=long)


@pytest.mark.parametrize(
    "case",
    [
        (8, 4, 128, 1, {}),
        (2, 7, 64, 4, {"has_sinks": True}),
        (1, 8, 256, 1, {}),
        (1, 8, 128, 1, {"window_block": 48}),
    ],
    ids=["8x4x128", "2x7x64, 3 drafts, sinks", "1x8x256", "1x8x128, hybrid"],
)
def test_steps_of_any_size_launch_what_was_compiled(compiled, case):
    heads, groups, d, queries, options = case
    tested = layer(heads, groups, d, queries, **options)
    for launch in decode_launches(tested, torch.device("cpu"), **H200):
        launch()
    ahead = set(compiled)
    assert len({name for name, *_ in ahead}) == 6  # schedule, prepare, write and prepare, attend, merge, demote
    for requests in (1, 2, 3, 5, 8, 13, 24, 40, 64, 65, 66, 129, 200, REQUESTS):
        for length in {1, queries}:
            launch_steps(tested, requests, length)
    assert compiled - ahead == set()
