# SPDX-License-Identifier: Apache-2.0
"""``prefill="invariant"``: with INT2 pages, tokens do not depend on chunks, batch or prefix hits.

Where a query reads a token (page or window) is fixed by their two positions alone, so every schedule computes the same
attention. What may differ is the order of float32 sums: matrix products of other shapes. Two things follow.

* Nearly always nothing but the last bits of logprobs differs.
* Rarely a key or value lies so close to a rounding boundary that its code becomes a neighbour. A step of a code is at
  most 1.2 standard deviations of the row, and attention logits have a standard deviation of 1 here, so one code of 64
  moves the logit of its token by 1.2 / sqrt(64) = 0.15. Among 320 tokens or more no token has a weight p much above
  0.05, so one head's output moves by about 0.15 p |v - o| < 0.01 |v - o|: hundredths in logits whose standard deviation
  is 4. `ROUNDED` is that bound.

A wrong segment is far outside: `test_a_wrong_segment_is_seen` moves one boundary by 16 tokens.
"""

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_float_payload import HITS, MIXED, SHARED_PREFIX

ROUNDED = 0.05
"""Nats by which a logprob may move when codes round the other way."""


def invariant(**options: str | int) -> dict:
    return OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard", "prefill": "invariant", **options}}}


QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4, sharpness=1.0)
LLAMA = Geometry("llama", head_size=128, kv_heads=2, query_heads_per_kv_head=1, sharpness=1.0)

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


def assert_same(got: list, want: list) -> None:
    """Outputs of the same prompts under two schedules: equal tokens, up to what the module's docstring derives.

    Logprobs of common tokens agree within ROUNDED, a first difference in tokens is a tie within twice that in both
    runs, and three quarters of the prompts are not touched at all.
    """
    untouched = 0
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        tokens_a, tokens_b = a["token_ids"][0], b["token_ids"][0]
        pairs = enumerate(zip(tokens_a, tokens_b, strict=True))
        first = next((at for at, (x, y) in pairs if x != y), len(tokens_a))
        moved = [abs(x - y) for x, y in zip(a["logprobs"][0][:first], b["logprobs"][0][:first], strict=True)]
        assert max(moved, default=0.0) <= ROUNDED, f"prompt {index}: logprobs differ by {max(moved)}"
        if first < len(tokens_a):
            margins = a["margins"][0][first], b["margins"][0][first]
            assert max(margins) <= 2 * ROUNDED, f"prompt {index}: token {first} differs with margins {margins}"
        else:
            untouched += max(moved) < 1e-3
    assert 4 * untouched >= 3 * len(got), f"only {untouched} of {len(got)} prompts agree to 1e-3"


def test_quantization_is_on(engines: Engines, uncached: Run) -> None:
    """INT2 at random weights changes tokens of long prompts, and none of prompts that fit in the windows."""
    stock = engines.run(QWEN3, {}, [MIXED])
    same = [got == want for got, want in zip(uncached.tokens("mixed")[0], stock.tokens("mixed")[0], strict=True)]
    assert all(same[index] for index, prompt in enumerate(MIXED["prompts"]) if len(prompt) + 24 <= 256)
    assert not all(same[index] for index, prompt in enumerate(MIXED["prompts"]) if len(prompt) > 640)


@pytest.mark.slow
def test_a_wrong_segment_is_seen(engines: Engines, uncached: Run) -> None:
    """The comparison of this file has the power to find a boundary that is off by one window block."""
    run = engines.run(QWEN3, invariant(recent=272), [MIXED])
    with pytest.raises(AssertionError, match="prompt"):
        assert_same(run["mixed"][0], uncached["mixed"][0])


def test_batch_order(uncached: Run) -> None:
    assert_same(uncached["reversed"][0][::-1], uncached["mixed"][0])


def test_batch_size(uncached: Run) -> None:
    assert_same(uncached["single"][0], uncached["mixed"][0])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [128, 200, 512])
def test_chunk_size(engines: Engines, uncached: Run, chunk: int) -> None:
    run = engines.run(QWEN3, invariant() | {"max_num_batched_tokens": chunk}, [MIXED])
    assert_same(run["mixed"][0], uncached["mixed"][0])
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": "token"}], ids=["page-mean", "token-zero"])
def test_chunk_size_at_head_size_128(engines: Engines, options: dict) -> None:
    whole = engines.run(LLAMA, invariant(**options), [MIXED])
    chunked = engines.run(LLAMA, invariant(**options) | {"max_num_batched_tokens": 192}, [MIXED])
    assert_same(chunked["mixed"][0], whole["mixed"][0])


def test_prefix_hits(cached: Run, uncached: Run) -> None:
    """Every round, with whatever hits it has, gives what single runs on an empty cache give."""
    for outputs in cached["hits"]:
        assert_same(outputs, uncached["hits-single"][0])
    assert min(cached.cached("hits")[1][:5]) >= 640


def test_long_first_chunk_beside_prefix_hits(cached: Run, uncached: Run) -> None:
    assert cached.cached("burst")[0] == [0, 640, 640, 640, 640]
    assert_same(cached["burst"][0], uncached["burst-single"][0])
