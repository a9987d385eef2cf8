# SPDX-License-Identifier: Apache-2.0
"""How many tokens vLLM says fit in a cache of fixed size."""

import re

import pytest

from tests.engine.conftest import OSCAR, Engines, Run
from tests.engine.models import Geometry

CAPACITY_LINE = re.compile(r"(?:CPU|GPU) KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens")


def capacity(run: Run) -> int:
    tokens, _ = CAPACITY_LINE.search(run.log).groups()
    return int(tokens.replace(",", ""))


@pytest.mark.slow
def test_tokens_in_one_gibibyte_at_32k(engines: Engines) -> None:
    geometry = Geometry("llama", head_size=128, kv_heads=8, query_heads_per_kv_head=1, layers=4, dtype="bfloat16")
    engine = {"dtype": "bfloat16", "max_model_len": 32768}
    shapes = [{"name": "shapes", "kind": "shapes"}]
    bf16 = engines.run(geometry, engine, shapes)
    oscar = engines.run(geometry, engine | OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard"}}}, shapes)
    assert capacity(bf16) == 2**30 // (4 * 8 * 2 * 128 * 2)
    assert capacity(oscar) >= 5.8 * capacity(bf16)
    history, window = (oscar["shapes"]["groups"][index] for index in (1, 0))
    # Both groups of a layer draw blocks of one size: 128 tokens of 72 bytes, or 16 of 512 padded to that.
    assert (history["block_size"], history["page_bytes"]) == (128, 8 * 128 * 72)
    assert (window["block_size"], window["page_bytes"]) == (16, 8 * 128 * 72)
