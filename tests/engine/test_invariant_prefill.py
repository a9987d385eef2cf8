# SPDX-License-Identifier: Apache-2.0
"""``prefill="invariant"``: with INT2 pages, tokens do not depend on chunks, batch or prefix hits.

Where a query reads a token (page or window) is fixed by their two positions alone, so every schedule computes the same
attention. What may differ is the order of float32 sums (matrix products of other shapes): token ids must be equal
all the same.
"""

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_float_payload import HITS, MIXED, SHARED_PREFIX, assert_same_tokens


def invariant(**options: str) -> dict:
    return OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard", "prefill": "invariant", **options}}}


QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)
LLAMA = Geometry("llama", head_size=128, kv_heads=2, query_heads_per_kv_head=1)

REVERSED = {**MIXED, "name": "reversed", "prompts": MIXED["prompts"][::-1]}
SINGLE = {**MIXED, "name": "single", "one_at_a_time": True}
HITS_SINGLE = {**HITS, "name": "hits-single", "one_at_a_time": True, "rounds": 1, "keep_cache": False}

# A long prompt without a hit and, behind it in the same batch, short ones whose prefix is cached.
BURST = [prompts([2100], seed=11)[0], *prompts([650, 700, 768, 1000], seed=12, prefix=SHARED_PREFIX)]
WARM = {"name": "warm", "kind": "generate", "prompts": [SHARED_PREFIX], "max_tokens": 1, "keep_cache": True}
BURST_WARM = {"name": "burst", "kind": "generate", "prompts": BURST, "max_tokens": 24}
BURST_SINGLE = {**BURST_WARM, "name": "burst-single", "one_at_a_time": True}


@pytest.fixture(scope="module")
def uncached(engines: Engines) -> Run:
    run = engines.run(QWEN3, invariant(), [MIXED, REVERSED, SINGLE, HITS_SINGLE, BURST_SINGLE])
    assert not leaks(run)
    return run


@pytest.fixture(scope="module")
def cached(engines: Engines) -> Run:
    scenarios = [HITS | {"keep_cache": False}, WARM, BURST_WARM]
    run = engines.run(QWEN3, invariant() | {"enable_prefix_caching": True}, scenarios)
    assert not leaks(run)
    return run


def test_quantization_is_on(engines: Engines, uncached: Run) -> None:
    """INT2 at random weights changes tokens of long prompts, and none of prompts that fit in the windows."""
    stock = engines.run(QWEN3, {}, [MIXED])
    same = [got == want for got, want in zip(uncached.tokens("mixed")[0], stock.tokens("mixed")[0], strict=True)]
    assert all(same[index] for index, prompt in enumerate(MIXED["prompts"]) if len(prompt) + 24 <= 256)
    assert not all(same[index] for index, prompt in enumerate(MIXED["prompts"]) if len(prompt) > 640)


def test_batch_order(uncached: Run) -> None:
    assert uncached.tokens("reversed")[0][::-1] == uncached.tokens("mixed")[0]


def test_batch_size(uncached: Run) -> None:
    assert_same_tokens(uncached_as(uncached, "single", "mixed"), uncached, "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [128, 200, 512])
def test_chunk_size(engines: Engines, uncached: Run, chunk: int) -> None:
    run = engines.run(QWEN3, invariant() | {"max_num_batched_tokens": chunk}, [MIXED])
    assert_same_tokens(run, uncached, "mixed")
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": "token"}], ids=["page-mean", "token-zero"])
def test_chunk_size_at_head_size_128(engines: Engines, options: dict) -> None:
    whole = engines.run(LLAMA, invariant(**options), [MIXED])
    chunked = engines.run(LLAMA, invariant(**options) | {"max_num_batched_tokens": 192}, [MIXED])
    assert_same_tokens(chunked, whole, "mixed")


def test_prefix_hits(cached: Run, uncached: Run) -> None:
    """Every round, with whatever hits it has, gives what single runs on an empty cache give."""
    for turn, outputs in enumerate(cached.tokens("hits")):
        assert outputs == uncached.tokens("hits-single")[0], f"round {turn}"
    assert min(cached.cached("hits")[1][:5]) >= 640


def test_long_first_chunk_beside_prefix_hits(cached: Run, uncached: Run) -> None:
    assert cached.cached("burst")[0] == [0, 640, 640, 640, 640]
    assert cached.tokens("burst")[0] == uncached.tokens("burst-single")[0]


def uncached_as(run: Run, source: str, name: str) -> Run:
    """The same run with scenario ``source`` under the name ``name``."""
    return Run(run.log, {name: run.results[source]})
