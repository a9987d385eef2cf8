# SPDX-License-Identifier: Apache-2.0
"""Everything around the quantizer: with pages that store floats, vLLM gives the token ids of its stock cache.

``payload="float"`` keeps the plugin's block groups, window manager, demotion and segment rules and replaces only the
content of a page by the unquantized keys and values. Whatever the scheduler does (chunks, prefix hits, preemption,
speculation, sampling, aborts, tensor parallelism) the token ids must be those of stock vLLM, and every block must
return to the pool.
"""

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts

FLOAT = OSCAR | {"additional_config": {"oscar": {"payload": "float", "rotation": "hadamard"}}}

QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)
GEOMETRIES = [
    Geometry("llama", head_size=128, kv_heads=2, query_heads_per_kv_head=1),
    Geometry("qwen2", head_size=64, kv_heads=1, query_heads_per_kv_head=7),
    Geometry("qwen2", head_size=128, kv_heads=2, query_heads_per_kv_head=2),
]

# On, before and after the boundaries of a page, the sink (64) and the recent window (256).
LENGTHS = [5, 37, 64, 127, 128, 129, 300, 384, 444, 513, 640, 911, 1200, 1500, 2048, 2100]
MIXED = {"name": "mixed", "kind": "generate", "prompts": prompts(LENGTHS, seed=0), "max_tokens": 24}

SHARED_PREFIX = prompts([640], seed=1)[0]
HITS = {
    "name": "hits",
    "kind": "generate",
    "prompts": prompts([650, 700, 768, 1000, 1300, 640, 200], seed=2, prefix=SHARED_PREFIX),
    "rounds": 3,
    "max_tokens": 24,
    "keep_cache": True,
}
CONVERSATION = {
    "name": "conversation",
    "kind": "conversation",
    "prompts": prompts([30, 500, 900], seed=3, prefix=SHARED_PREFIX[:400]),
    "turns": prompts([40, 150, 3], seed=4),
    "max_tokens": 140,
}
SAMPLED = {  # 4 x 820 tokens, one step: vLLM 0.32 on CPU fails on seeded requests that are prefilled in chunks
    "name": "sampled",
    "kind": "generate",
    "prompts": prompts([20, 200, 600], seed=5),
    "n": 4,
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 24,
}
ABORTED = {
    "name": "aborted",
    "kind": "abort",
    "prompts": prompts([30, 1500, 700, 400, 2000, 130], seed=6),
    "aborted": [0, 1, 4],
    "after_steps": 5,
    "max_tokens": 24,
}
PRESSURE = {  # short prompts are admitted together and outgrow the pool
    "name": "pressure",
    "kind": "generate",
    "prompts": prompts([20, 60, 120, 30, 90, 380, 70, 110, 50, 420, 40, 100, 80, 130], seed=8),
    "max_tokens": 200,
}
PERIODIC = {  # repeated text, so that n-gram drafts are accepted
    "name": "periodic",
    "kind": "generate",
    "prompts": [pattern * 12 for pattern in prompts([30, 50, 61], seed=9)],
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def stock(engines: Engines) -> Run:
    run = engines.run(QWEN3, {}, [MIXED, SAMPLED, ABORTED, PRESSURE, PERIODIC, HITS | {"keep_cache": False}])
    assert not leaks(run)
    return run


@pytest.fixture(scope="module")
def stock_cached(engines: Engines) -> Run:
    return engines.run(QWEN3, {"enable_prefix_caching": True, "block_size": 128}, [HITS, CONVERSATION])


@pytest.fixture(scope="module")
def float_pages(engines: Engines) -> Run:
    return engines.run(QWEN3, FLOAT, [MIXED, SAMPLED, ABORTED])


@pytest.fixture(scope="module")
def float_pages_cached(engines: Engines) -> Run:
    return engines.run(QWEN3, FLOAT | {"enable_prefix_caching": True}, [HITS, CONVERSATION])


def assert_same_tokens(run: Run, expected: Run, scenario: str) -> None:
    """Token ids are equal; on a difference, say which prompt differs first and where."""
    for turn, (got_outputs, want_outputs) in enumerate(
        zip(run.tokens(scenario), expected.tokens(scenario), strict=True)
    ):
        for index, (got, want) in enumerate(zip(got_outputs, want_outputs, strict=True)):
            assert got == want, f"{scenario}: round {turn}, prompt {index}"


def test_mixed_lengths(float_pages: Run, stock: Run) -> None:
    assert_same_tokens(float_pages, stock, "mixed")
    assert not leaks(float_pages)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_geometries(engines: Engines, geometry: Geometry) -> None:
    expected = engines.run(geometry, {}, [MIXED])
    run = engines.run(geometry, FLOAT, [MIXED])
    assert_same_tokens(run, expected, "mixed")
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [128, 256, 512])
def test_chunked_prefill(engines: Engines, stock: Run, chunk: int) -> None:
    run = engines.run(QWEN3, FLOAT | {"max_num_batched_tokens": chunk}, [MIXED])
    assert_same_tokens(run, stock, "mixed")
    assert not leaks(run)


def test_prefix_hits_over_three_rounds(float_pages_cached: Run, stock_cached: Run, stock: Run) -> None:
    assert_same_tokens(float_pages_cached, stock, "hits")
    _, second, third = float_pages_cached.cached("hits")
    assert second == third
    assert all(hit >= 640 for hit in second[:5]), second
    assert float_pages_cached.cached("hits") == stock_cached.cached("hits")


def test_multi_turn_continuation(float_pages_cached: Run, stock_cached: Run) -> None:
    assert_same_tokens(float_pages_cached, stock_cached, "conversation")
    ours, theirs = (run.cached("conversation") for run in (float_pages_cached, stock_cached))
    # The second prompt is the first that parts from others' where it does: it computes the 256 tokens before once more.
    assert ours[0] == [0, theirs[0][1] - 256, theirs[0][2]]
    assert ours[1:] == theirs[1:]
    # Generated tokens are found again: the last turn's hit reaches beyond the first prompt and answer.
    assert float_pages_cached.cached("conversation")[-1][1] > 640
    assert not leaks(float_pages_cached)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "caching"])
def test_preemption(engines: Engines, stock: Run, caching: bool) -> None:
    engine = FLOAT | {"num_gpu_blocks_override": 110, "max_model_len": 1024, "enable_prefix_caching": caching}
    run = engines.run(QWEN3, engine, [PRESSURE])
    assert run.results["pressure"]["preemptions"] >= 5
    assert_same_tokens(run, stock, "pressure")
    assert not leaks(run)


@pytest.mark.slow
def test_ngram_speculation(engines: Engines, stock: Run) -> None:
    draft = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    run = engines.run(
        QWEN3,
        FLOAT | {"speculative_config": draft, "disable_log_stats": False},
        [PERIODIC, {"name": "counters", "kind": "counters"}],
    )
    drafted = run["counters"]["vllm:spec_decode_num_draft_tokens"]
    accepted = run["counters"]["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < drafted, "the text must give accepted and rejected drafts"
    assert_same_tokens(run, stock, "periodic")
    assert not leaks(run)


def test_parallel_sampling(float_pages: Run, stock: Run) -> None:
    assert all(len(completions) == 4 for completions in stock.tokens("sampled")[0])
    assert_same_tokens(float_pages, stock, "sampled")


def test_abort_in_mid_stream(float_pages: Run, stock: Run) -> None:
    finished = {index: output["token_ids"] for index, output in float_pages["aborted"].items()}
    assert sorted(finished) == ["2", "3", "5"]
    assert finished == {index: output["token_ids"] for index, output in stock["aborted"].items()}


@pytest.mark.slow
def test_separate_engine_process(engines: Engines, stock: Run) -> None:
    run = engines.run(QWEN3, FLOAT, [MIXED, SAMPLED], env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert run.results["mixed"]["pool"]["free"] is None  # out of reach
    assert_same_tokens(run, stock, "mixed")
    assert_same_tokens(run, stock, "sampled")
    assert not leaks(run)


@pytest.mark.slow
def test_tensor_parallel(engines: Engines, stock: Run) -> None:
    run = engines.run(QWEN3, FLOAT | {"tensor_parallel_size": 2}, [MIXED])
    assert_same_tokens(run, stock, "mixed")
    assert not leaks(run)
