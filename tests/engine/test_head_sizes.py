# SPDX-License-Identifier: Apache-2.0
"""Heads that have no page of their own size are padded to the next one, on the real engine.

With pages of floats the token ids must be those of stock vLLM, which pads nothing.
"""

import pytest

from tests.engine.conftest import Engines, Run, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_float_payload import FLOAT, assert_same_tokens

GEOMETRIES = {
    head_size: Geometry("llama", head_size, kv_heads=2, query_heads_per_kv_head=groups, layers=2)
    for head_size, groups in ((80, 3), (96, 1), (112, 3), (192, 1))
}
# Inside the windows, at the end of a page, over several pages, and decoding over the end of one.
MIXED = {"name": "mixed", "kind": "generate", "prompts": prompts([5, 129, 500, 1000], seed=0), "max_tokens": 24}


@pytest.fixture(scope="module")
def runs(engines: Engines) -> dict[str, Run]:
    """By ``stock-<head size>`` and ``float-<head size>``."""
    return engines.run_each(
        {
            f"{name}-{head_size}": (geometry, engine, [MIXED])
            for head_size, geometry in GEOMETRIES.items()
            for name, engine in (("stock", {}), ("float", FLOAT))
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_size", GEOMETRIES)
def test_float_pages(runs: dict[str, Run], head_size: int) -> None:
    run = runs[f"float-{head_size}"]
    assert f"2 KV heads of size {head_size}, padded to {128 if head_size < 128 else 256})" in run.log
    assert_same_tokens(run, runs[f"stock-{head_size}"], "mixed")
    assert not leaks(run)
