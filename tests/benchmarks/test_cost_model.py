# SPDX-License-Identifier: Apache-2.0
"""The cost model against what was measured, and its limits."""

import csv

import pytest

from benchmarks.cost_model import CACHES, H200, QWEN3_8B, cache_bytes, step_seconds
from benchmarks.results import RESULTS


def measured() -> list[dict[str, str]]:
    with (RESULTS / "engine.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["geometry"] == "qwen3-8b" and int(row["context"]) >= 32_000]


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['kv_cache_dtype']}-{row['batch']}x{row['context']}")
def test_long_contexts_cost_what_was_measured(row):
    predicted = 1e3 * step_seconds(row["kv_cache_dtype"], QWEN3_8B, int(row["batch"]), int(row["context"]))
    assert predicted == pytest.approx(float(row["ms_per_step"]), rel=0.1)


def test_bytes_of_a_token():
    plain = 2 * 2 * 8 * 128
    assert cache_bytes("auto", QWEN3_8B, 1000) == 1000 * plain
    assert cache_bytes("fp8", QWEN3_8B, 1000) == 500 * plain
    assert cache_bytes("oscar_int2", QWEN3_8B, 300) == 300 * plain  # all in the windows
    assert cache_bytes("oscar_int2", QWEN3_8B, 1320) == 320 * plain + 1000 * 8 * 72
    assert cache_bytes("auto", QWEN3_8B, 10**6) / cache_bytes("oscar_int2", QWEN3_8B, 10**6) == pytest.approx(
        7.1, abs=0.1
    )


def test_an_empty_cache_costs_weights_and_launches():
    for dtype, cache in CACHES.items():
        floor = QWEN3_8B.weight_bytes / H200.bandwidth + H200.rest + QWEN3_8B.layers * cache.latency
        assert step_seconds(dtype, QWEN3_8B, 1, 0) == pytest.approx(floor)
