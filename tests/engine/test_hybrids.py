# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: attention layers in pages, recurrent states as vLLM keeps them, all from one pool.

With ``payload="float"`` the pages hold the values as they are, so every token must be the one of stock vLLM.
"""

from pathlib import Path

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import prompts, write_hybrid

FLOAT = {"additional_config": {"oscar": {"payload": "float"}}}
HADAMARD = {"additional_config": {"oscar": {"rotation": "hadamard"}}}

SHARED = prompts([1100], seed=5)[0]
SCENARIOS = [
    {"name": "shapes", "kind": "shapes"},
    {
        "name": "generate",
        "kind": "generate",
        "prompts": [*prompts([2500, 1200, 2400], seed=1, prefix=SHARED), SHARED[:700], *prompts([40], seed=2)],
        "rounds": 2,
        "max_tokens": 24,
    },
    {"name": "long answers", "kind": "generate", "prompts": prompts([380, 1000], seed=8), "max_tokens": 400},
]


@pytest.fixture(scope="module")
def model(engines: Engines) -> Path:
    return write_hybrid(engines.directory / "models")


@pytest.fixture(scope="module")
def stock(engines: Engines, model: Path) -> Run:
    return engines.run(model, {}, SCENARIOS)


def same_tokens(run: Run, stock: Run) -> None:
    for name in ("generate", "long answers"):
        assert run.tokens(name) == stock.tokens(name), name
    assert leaks(run) == {}


@pytest.mark.slow
def test_tokens(engines: Engines, model: Path, stock: Run) -> None:
    """Chunked prefills, without prefix caching: a block of three pages holds a state."""
    run = engines.run(model, OSCAR | FLOAT | {"max_num_batched_tokens": 900}, SCENARIOS)
    groups = {group["spec"]: group["block_size"] for group in run["shapes"]["groups"]}
    assert groups == {"MambaSpec": 4096, "SinkWindowSpec": 3 * 16, "FullAttentionSpec": 3 * 128}
    same_tokens(run, stock)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["exact", "invariant"])
def test_prefix_hits(engines: Engines, model: Path, stock: Run, prefill: str) -> None:
    """Hits are whole blocks, and continue from the right states."""
    options = {"additional_config": {"oscar": {"payload": "float", "prefill": prefill}}}
    options |= {"enable_prefix_caching": True, "max_num_batched_tokens": 900}
    run = engines.run(model, OSCAR | options, SCENARIOS)
    assert run.cached("generate")[1] == [2304, 1152, 2304, 384, 0]
    same_tokens(run, stock)


@pytest.mark.slow
def test_two_bits(engines: Engines, model: Path) -> None:
    """Blocks are of 28 pages; every block has the same bytes, and only attention layers are counted as compressed."""
    run = engines.run(model, OSCAR | HADAMARD, SCENARIOS)
    groups = run["shapes"]["groups"]
    assert {group["spec"]: group["block_size"] for group in groups} == {
        "MambaSpec": 4096,
        "SinkWindowSpec": 28 * 8,
        "FullAttentionSpec": 28 * 128,
    }
    assert {group["page_bytes"] for group in groups} == {28 * 2 * 4992}
    assert "(2 layers, 2 KV heads of size 64)" in run.log
    assert leaks(run) == {}
