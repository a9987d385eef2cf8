# SPDX-License-Identifier: Apache-2.0
"""Prefixes that left the pool come back from CPU memory: with their windows, from the right place, and never too soon.

The pool is small and other prompts push everything out of it. The engine is on a CPU, where vLLM's copies do not run:
`tests/engine/offload.py` brings its own, which happen as late as may be. All else is what runs on a GPU.
"""

import re

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts, write_eagle_head, write_mixed
from tests.engine.test_float_payload import FLOAT, PERIODIC, PRESSURE, assert_same_tokens
from tests.engine.test_invariant_prefill import assert_same, invariant

QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4, sharpness=1.0)
PLAIN = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)
EXACT = OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard"}}}

CACHING = {
    "enable_prefix_caching": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "disable_log_stats": False,
}


def offloading(blocks: int, polls: int, gigabytes: float = 0.2) -> dict:
    """A pool of ``blocks``, a store of ``gigabytes``, and copies that take ``polls`` steps."""
    extra = {"cpu_bytes_to_use": int(gigabytes * 1e9), "polls": polls}
    connector = {
        "kv_connector": "CPUOffloadConnector",
        "kv_connector_module_path": "tests.engine.offload",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return CACHING | {"num_gpu_blocks_override": blocks, "kv_transfer_config": connector}


def asked(name: str, prompts: list, keep_cache: bool = True, **options: int) -> dict:
    options = {"max_tokens": 16, "one_at_a_time": True, **options}
    return {"name": name, "kind": "generate", "prompts": prompts, "keep_cache": keep_cache, **options}


def counted(name: str) -> dict:
    return {"name": name, "kind": "counters", "keep_cache": True}


# Ends behind and at a page, and prompts that share pages and sinks but no recent tokens.
SHARED = prompts([700], seed=41)[0]
CHATS = prompts([300, 513, 640, 911], seed=42) + prompts([710, 1100], seed=43, prefix=SHARED)
OTHERS = prompts([1500] * 6, seed=44)
RETURN = [
    asked("cold", CHATS),
    counted("before"),
    asked("others", OTHERS, max_tokens=2),
    counted("between"),
    asked("warm", CHATS),
    counted("after"),
    asked("end", prompts([5], seed=45), keep_cache=False),
]


def hits(run: Run, first: str, last: str) -> tuple[float, float]:
    """Tokens found in the pool and in the store between two readings of the counters."""
    names = ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits")
    return tuple(run[last][name] - run[first][name] for name in names)


@pytest.fixture(scope="module")
def restored(engines: Engines) -> Run:
    return engines.run(QWEN3, invariant() | offloading(140, polls=2), RETURN)


def test_restored_prefixes_give_the_same_tokens(engines: Engines, restored: Run) -> None:
    """As without any cache, where every token is computed; whole pages of every prompt come from the store."""
    uncached = engines.run(QWEN3, invariant() | {"max_num_batched_tokens": 512}, [asked("cold", CHATS)])
    assert_same(restored["cold"][0], uncached["cold"][0])
    assert_same(restored["warm"][0], uncached["cold"][0])
    assert restored.cached("warm")[0] == [(len(prompt) - 1) // 128 * 128 for prompt in CHATS]
    in_pool, in_store = hits(restored, "between", "after")
    assert in_store > 2500 > in_pool
    assert not leaks(restored)


@pytest.mark.slow
def test_recent_tokens_are_restored_too(engines: Engines) -> None:
    """Exact prefill reads what windows it finds: all that a pool would have kept must come back from the store."""
    kept = engines.run(QWEN3, EXACT | CACHING, [asked("cold", CHATS), asked("others", OTHERS), asked("warm", CHATS)])
    run = engines.run(QWEN3, EXACT | offloading(140, polls=3), RETURN)
    assert run.cached("warm") == kept.cached("warm")
    assert_same(run["warm"][0], kept["warm"][0])
    assert hits(run, "between", "after")[1] > 2500
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [QWEN3, Geometry("llama", 128, 2, 1, sharpness=1.0)], ids=lambda g: g.name)
def test_the_store_continues_what_the_pool_still_has(engines: Engines, geometry: Geometry) -> None:
    """The start of a prompt, sinks included, is in the pool again; its other pages and its recent tokens are not."""
    long = prompts([1900], seed=46)
    start = [asked("cold", long), asked("others", OTHERS, max_tokens=2), asked("start", [long[0][:520]])]
    scenarios = [*start, counted("between"), asked("warm", long), counted("after")]
    kept = engines.run(geometry, EXACT | CACHING, scenarios)
    run = engines.run(geometry, EXACT | offloading(140, polls=2), scenarios)
    assert hits(run, "between", "after") == (512, 1280)
    assert_same(run["warm"][0], kept["warm"][0])


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [0.2, 0.044], ids=["large-store", "store-of-the-same-size"])
def test_preemption(engines: Engines, gigabytes: float) -> None:
    """Requests that lost all their blocks come back from a store that keeps all, and from one that forgets."""
    stock = engines.run(PLAIN, {}, [PRESSURE])
    engine = FLOAT | offloading(110, polls=3, gigabytes=gigabytes) | {"max_model_len": 1024}
    run = engines.run(PLAIN, engine, [PRESSURE | {"rounds": 2}, {"name": "counters", "kind": "counters"}])
    assert run.results["pressure"]["preemptions"] >= 5
    assert run.tokens("pressure") == stock.tokens("pressure") * 2
    assert run["counters"]["vllm:external_prefix_cache_hits"] > 0
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("after_steps", [1, 4])
def test_requests_cancelled_while_they_load(engines: Engines, restored: Run, after_steps: int) -> None:
    """Loads of cancelled requests end before their blocks are given to others."""
    cancelled = {"kind": "abort", "prompts": CHATS, "aborted": [1, 4, 5], "after_steps": after_steps}
    scenarios = [
        *RETURN[:3],
        {**cancelled, "name": "cancelled", "max_tokens": 16, "keep_cache": True},
        asked("warm", CHATS, keep_cache=False),
    ]
    run = engines.run(QWEN3, invariant() | offloading(140, polls=4), scenarios)
    finished = run["cancelled"]
    assert sorted(finished) == ["0", "2", "3"]
    assert_same(list(finished.values()), [restored["cold"][0][int(index)] for index in finished])
    assert_same(run["warm"][0], restored["cold"][0])
    assert not leaks(run)


@pytest.mark.slow
def test_layers_with_a_sliding_window(engines: Engines) -> None:
    """Blocks of three groups, whose sizes differ, come and go together."""
    model = write_mixed("gemma3", engines.directory / "models")
    stock = engines.run(model, {"max_model_len": 2048, "max_num_batched_tokens": 512}, [asked("cold", CHATS)])
    run = engines.run(model, FLOAT | offloading(220, polls=2), RETURN)
    assert_same_tokens(run, stock, "cold")
    assert run.tokens("warm") == run.tokens("cold")
    assert hits(run, "between", "after")[1] > 2000
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_speculation(engines: Engines, method: str) -> None:
    """Drafts change where hits end (EAGLE gives up a page), and the drafter's own cache is restored as well."""
    draft: dict = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle":
        draft["model"] = str(write_eagle_head(PLAIN, engines.directory / "models"))
    else:
        draft |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    stock = engines.run(PLAIN, {}, [PERIODIC])
    repeated = {**PERIODIC, "keep_cache": True}
    scenarios = [
        repeated,
        asked("others", OTHERS, max_tokens=2),
        counted("between"),
        {**repeated, "name": "warm"},
        counted("after"),
        asked("end", prompts([5], seed=45), keep_cache=False),
    ]
    blocks = 240 if method == "eagle" else 200  # EAGLE's recent tails are a page longer
    run = engines.run(PLAIN, FLOAT | offloading(blocks, polls=2) | {"speculative_config": draft}, scenarios)
    assert run.tokens("periodic") == stock.tokens("periodic")
    assert run.tokens("warm") == stock.tokens("periodic")
    assert hits(run, "between", "after")[1] > 500
    assert not leaks(run)


@pytest.mark.slow
def test_a_store_smaller_than_the_pool_is_refused(engines: Engines) -> None:
    case = {"name": "small", "model": str(engines.model(PLAIN)), "engine": FLOAT | offloading(110, 1, gigabytes=0.04)}
    error = engines.refusals([case | {"engine": case["engine"] | {"dtype": "float32", "max_model_len": 1024}}])["small"]
    assert error["types"][0] == "OscarConfigError"
    assert re.search("101 blocks, fewer than the 110 of the GPU's own cache.*set it to 0.05 GiB", error["message"])
