# SPDX-License-Identifier: Apache-2.0
"""Whatever the scheduler does, a request gets the tokens of its single run on an empty pool.

With ``prefill="invariant"`` the comparison is that of tests/engine/test_invariant_prefill.py, float32 rounding and
nothing else; its docstring derives the bound. Two engines serve all situations: `alone` computes every prompt from
scratch in one piece in a large pool, `tight` has prefix caching, chunks of 256 tokens and a pool that overflows.
"""

import pytest

from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_invariant_prefill import assert_same, invariant

pytestmark = pytest.mark.slow

MODEL = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4, layers=2, sharpness=1.0)

CHUNK = 256
LONG = 2500
SHARED = prompts([640], seed=31)[0]

# One token before, on and after: the windows (64 + 256), a page, a chunk, and multiples of them.
EDGES = [edge + offset for edge in (320, 384, 512, 768, 1024, 1280) for offset in (-1, 0, 1)]
BOUNDARIES = {
    "name": "boundaries",
    "kind": "generate",
    "prompts": prompts(EDGES, seed=32),
    "max_tokens": 4,
    "one_at_a_time": True,
}
NEEDLE = {"name": "long", "kind": "generate", "prompts": prompts([LONG], seed=33), "max_tokens": 40}
# A long prompt that hits nothing, at the head of a batch of short ones whose prefix is cached.
MIXED = {
    "name": "mixed",
    "kind": "generate",
    "prompts": [prompts([2100], seed=34)[0], *prompts([650, 700, 768, 1000], seed=35, prefix=SHARED)],
    "max_tokens": 24,
}
FULL = {  # long prompts fill the pool, short ones are admitted together and outgrow it
    "name": "full",
    "kind": "generate",
    "prompts": prompts([640, 900, 513, 60, 90, 380, 70, 110, 50, 420, 40, 100, 80, 130], seed=36),
    "max_tokens": 180,
}
CHATS = prompts([200, 500], seed=37, prefix=SHARED[:150])
TURNS = prompts([40, 150, 3], seed=38)
CHAT = {"name": "chat", "kind": "conversation", "prompts": CHATS, "turns": TURNS, "max_tokens": 140}


@pytest.fixture(scope="module")
def alone(engines: Engines) -> Run:
    return engines.run(MODEL, invariant(), [BOUNDARIES, NEEDLE, MIXED | {"one_at_a_time": True}, FULL, CHAT])


def histories(run: Run) -> list[list[list[int]]]:
    """The prompts of every turn of `CHAT`, [turn][chat], with the answers of ``run``."""
    chats = [list(prompt) for prompt in CHATS]
    result = []
    for added, answers in zip([[], *TURNS], run.tokens("chat"), strict=True):
        result.append([[*chat, *added] for chat in chats])
        chats = [[*prompt, *answer[0]] for prompt, answer in zip(result[-1], answers, strict=True)]
    return result


def turns(run: Run) -> list[dict]:
    """The turns as scenarios that keep the cache: each prompt continues what ``alone`` answered to the one before."""
    return [
        {"name": f"turn-{turn}", "kind": "generate", "prompts": batch, "max_tokens": 140, "keep_cache": True}
        for turn, batch in enumerate(histories(run))
    ]


@pytest.fixture(scope="module")
def tight(engines: Engines, alone: Run) -> Run:
    engine = {
        "enable_prefix_caching": True, "max_num_batched_tokens": CHUNK, "max_model_len": LONG + 100,
        "num_gpu_blocks_override": 260,
    }  # fmt: skip
    warm = {"name": "warm", "kind": "generate", "prompts": [SHARED], "max_tokens": 1, "keep_cache": True}
    twice = [prompt for prompt in BOUNDARIES["prompts"] for _ in range(2)]
    last_turn = turns(alone)[-1] | {"keep_cache": False}
    scenarios = [
        BOUNDARIES | {"prompts": twice}, NEEDLE | {"rounds": 2}, warm, MIXED, *turns(alone)[:-1], last_turn, FULL,
    ]  # fmt: skip
    run = engines.run(MODEL, invariant() | engine, scenarios)
    assert not leaks(run)
    return run


def test_long_first_prefill_beside_cached_prefixes(tight: Run, alone: Run) -> None:
    """vLLM 46460: the batch was taken for fresh prompts, and the prefixes were dropped."""
    assert tight.cached("mixed")[0] == [0, 640, 640, 640, 640]
    assert_same(tight["mixed"][0], alone["mixed"][0])


def test_unique_prompts_that_overflow_the_pool(tight: Run, alone: Run) -> None:
    """vLLM 50702: answers were corrupted once the pool stood at 100 %."""
    assert tight.results["full"]["preemptions"] >= 3
    assert alone.results["full"]["preemptions"] == 0
    assert_same(tight["full"][0], alone["full"][0])


def test_cold_and_warm_answers_are_the_same(tight: Run, alone: Run) -> None:
    """omlx 3690: details were wrong only on a hit. A warm run reads the very pages that the cold one wrote."""
    cold, warm = tight.cached("long")
    assert (cold, warm) == ([0], [(LONG - 1) // 128 * 128])
    assert_same(tight["long"][1], tight["long"][0])
    assert_same([*tight["long"][0], *tight["mixed"][0]], [*alone["long"][0], *alone["mixed"][0]])


def test_prompts_that_end_at_a_boundary(tight: Run, alone: Run) -> None:
    """vLLM 41726, 43357, 46767: prompts broke at the edges of chunks and buffers; here cold and warm."""
    assert tight.cached("boundaries")[0][::2] == [0] * len(EDGES)
    assert tight.cached("boundaries")[0][1::2] == [(length - 1) // 128 * 128 for length in EDGES]
    for first in range(2):
        assert_same(tight["boundaries"][0][first::2], alone["boundaries"][0])


def test_long_conversations_stay_the_same(tight: Run, alone: Run) -> None:
    """OSCAR 4: long sessions turned to garble. Every turn equals the same conversation computed without a cache."""
    computed = [output for outputs in alone["chat"] for output in outputs]
    assert_same([output for turn in range(len(alone["chat"])) for output in tight[f"turn-{turn}"][0]], computed)


def test_hits_include_generated_tokens(tight: Run, alone: Run) -> None:
    """OSCAR's reference prefills each answer again in the next turn."""
    prompts_of_turns = histories(alone)
    for turn in range(1, len(prompts_of_turns)):
        for chat, before in enumerate(prompts_of_turns[turn - 1]):
            answered = len(before) + 140 - 1  # the last token of an answer was never computed
            hit = tight.cached(f"turn-{turn}")[0][chat]
            assert hit == answered // 128 * 128
            assert hit > (len(before) - 1) // 128 * 128


def test_the_recent_window_is_full_after_prefill(engines: Engines) -> None:
    """transformers 34189: it was empty. With a window longer than the sequence nothing may come from INT2 pages."""
    geometry = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)  # single tokens matter
    scenario = {
        "name": "recent", "kind": "generate", "prompts": prompts([300, 513, 700, 900], seed=39), "max_tokens": 40,
    }  # fmt: skip
    wide = {"additional_config": {"oscar": {"rotation": "hadamard", "recent": 1024}}}
    run = engines.run(geometry, OSCAR | wide | {"max_num_batched_tokens": CHUNK}, [scenario])
    usual = engines.run(geometry, OSCAR | invariant() | {"max_num_batched_tokens": CHUNK}, [scenario])
    stock = engines.run(geometry, {}, [scenario])
    assert run.tokens("recent") == stock.tokens("recent")
    assert usual.tokens("recent") != stock.tokens("recent")  # INT2 would have shown
