# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with linear attention (Qwen3-Next's gated delta rule), three layers of it to one of full attention.

Pages hold floats, so tokens must be those of stock vLLM under the same schedule. vLLM's CPU kernels for the gated delta
rule know bfloat16 only, in which chunks that are cut elsewhere round otherwise: hence the same schedule.
"""

from pathlib import Path

import pytest

from tests.engine.conftest import OSCAR, Engines, leaks
from tests.engine.models import write_linear_hybrid
from tests.engine.test_hybrids import FLOAT, HADAMARD, SCENARIOS, same_tokens

CHUNKS = {"dtype": "bfloat16", "max_num_batched_tokens": 900}


@pytest.fixture(scope="module")
def model(engines: Engines) -> Path:
    return write_linear_hybrid(engines.directory / "models")


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "caching"])
def test_tokens(engines: Engines, model: Path, caching: bool) -> None:
    """In chunks, and with hits, which are as long as stock vLLM's: whole blocks of what a state takes."""
    options = CHUNKS | {"enable_prefix_caching": caching}
    stock = engines.run(model, options, SCENARIOS)
    run = engines.run(model, OSCAR | FLOAT | options, SCENARIOS)
    same_tokens(run, stock)
    assert run.cached("generate") == stock.cached("generate")
    assert (max(run.cached("generate")[1]) > 1000) == caching


@pytest.mark.slow
def test_two_bits(engines: Engines, model: Path) -> None:
    """Every block has the same bytes, and only the attention layer is counted as compressed."""
    run = engines.run(model, OSCAR | HADAMARD | CHUNKS, SCENARIOS)
    groups = run["shapes"]["groups"]
    pages = {group["spec"]: group["block_size"] for group in groups}
    assert pages["FullAttentionSpec"] // 128 == pages["SinkWindowSpec"] // 16 > 1
    assert {group["page_bytes"] for group in groups} == {pages["FullAttentionSpec"] // 128 * 2 * 4992}
    assert "(1 layers, 2 KV heads of size 64)" in run.log
    assert leaks(run) == {}
