# SPDX-License-Identifier: Apache-2.0
"""The real engine on a GPU: CUDA graphs, torch.compile, kernels against the reference ops, hits, preemption, drafts.

All engines start at once, each in its own process, and the tests compare what they did. Graphs replay the same kernels
on the same data, so their tokens and logprobs must be equal to the last bit. torch.compile rounds bfloat16 elsewhere
than eager mode does, and a random model amplifies that, so compiled runs are compared with compiled runs. Runs on
other kernels, in other batches or with drafts are compared as `tests/engine/distance.py` says.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triton_ops
from tests.engine.distance import Distance, assert_alike, distance
from tests.engine.models import Geometry, prompts, write_model
from tests.engine.test_float_payload import PRESSURE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GEOMETRY = Geometry("qwen3", 128, 2, 4, layers=4, sharpness=1.0, dtype="bfloat16")
ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "kv_cache_memory_bytes": 4 * 2**30,
    "gpu_memory_utilization": 0.02,  # what must be free at the start; the cache has its own size
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 512,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
ENVIRONMENTS = {"v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}


def oscar(**options) -> dict:
    return {
        "kv_cache_dtype": "oscar_int2",
        "additional_config": {"oscar": {"rotation": "hadamard", **options}},
    }


def blocks(tokens: int) -> int:
    """Blocks of the pool that a request of this length holds: pages of 128 tokens, and a window of at most 64 sinks and
    two pages in blocks of 16 (a page of INT2 codes has the bytes of 16 tokens in bfloat16, and more)."""
    return math.ceil(tokens / 128) + math.ceil(min(tokens, 64 + 2 * 128) / 16)


LATE = re.compile(r"JIT compilation during inference: (\w+)")
"""vLLM's warning that a request waited for a kernel to be compiled."""
ANSWERED = [len(prompt) + PRESSURE["max_tokens"] for prompt in PRESSURE["prompts"]]
ENGINES = {
    "eager": {**oscar(), "enforce_eager": True},
    "graphs": {**oscar(), "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {**oscar(), "compilation_config": {"cudagraph_mode": "NONE"}},
    "piecewise": {**oscar(), "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": oscar(),
    "v1": oscar(),
    "reference": {**oscar(ops="reference"), "enforce_eager": True},
    "invariant": {**oscar(prefill="invariant"), "enforce_eager": True},
    "invariant_reference": {**oscar(prefill="invariant", ops="reference"), "enforce_eager": True},
    "stock": {"block_size": 128, "enforce_eager": True},
    "tight": {
        **oscar(prefill="invariant"), "enforce_eager": True, "enable_prefix_caching": False, "max_model_len": 1024,
        "num_gpu_blocks_override": sum(map(blocks, ANSWERED)) * 2 // 5,
    },
    "undrafted": oscar(prefill="invariant"),
    "ngram": {
        **oscar(prefill="invariant"), "disable_log_stats": False,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        },
    },
}  # fmt: skip


def scenarios(engine: str) -> list[dict]:
    if engine == "tight":
        return [PRESSURE]
    mixed = prompts([5, 37, 130, 300, 444, 513, 700, 911, 1500, 2048], seed=0)
    shared = prompts([640], seed=1)[0]
    hits = prompts([700, 900, 1300, 1301], seed=2, prefix=shared)
    loops = [(pattern * 25)[:700] for pattern in prompts([30, 37, 40, 44, 50, 61], seed=5)]
    score = {"name": "score", "kind": "generate", "prompts": prompts([600, 1100, 1700], seed=6), "max_tokens": 1}
    added = {
        "invariant": [score | {"prompt_logprobs": 1}, PRESSURE],
        "ngram": [{"name": "counters", "kind": "counters"}],
    } | {name: [score | {"prompt_logprobs": 1}] for name in ("eager", "reference", "invariant_reference", "stock")}
    return [
        {"name": "first", "kind": "generate", "prompts": mixed, "max_tokens": 1, "logprobs": 5},
        {"name": "mixed", "kind": "generate", "prompts": mixed, "max_tokens": 200},
        {"name": "hits", "kind": "generate", "prompts": hits, "max_tokens": 40, "rounds": 3},
        {"name": "loop", "kind": "generate", "prompts": loops, "max_tokens": 150},
        *added.get(engine, []),
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict[str, dict], dict[str, str]]:
    """Results and log of every engine by its name."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    model = write_model(GEOMETRY, folder)
    processes = {}
    for name, options in ENGINES.items():
        job = {"model": str(model), "engine": {**ENGINE, **options}, "scenarios": scenarios(name)}
        (folder / f"{name}.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "tests.engine.runner", f"{folder}/{name}.json", f"{folder}/{name}.result"]
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **ENVIRONMENTS.get(name, {})},
            )
    results, logs = {}, {}
    for name, process in processes.items():
        process.wait(timeout=500)
        log = (folder / f"{name}.log").read_text()
        assert process.returncode == 0, f"engine {name} ended with {process.returncode}:\n{log[-5000:]}"
        results[name] = json.loads((folder / f"{name}.result").read_text())
        logs[name] = log
    return results, logs


@pytest.fixture(scope="module")
def runs(finished) -> dict[str, dict]:
    """Results of every engine by its name, then by scenario."""
    return finished[0]


def outputs(results: dict, scenario: str) -> list[tuple]:
    """(token ids, logprobs) of every round and prompt."""
    return [(output["token_ids"], output["logprobs"]) for batch in results[scenario]["result"] for output in batch]


def results_of(run: dict) -> dict:
    """What `distance` compares: results by scenario."""
    return {name: record["result"] for name, record in run.items()}


def apart(one: dict, other: dict, scenarios: tuple[str, ...] = ("score", "mixed")) -> Distance:
    return distance(results_of(one), results_of(other), scenarios)


@pytest.mark.parametrize(
    ("one", "other"), [("eager", "graphs"), ("compiled", "piecewise"), ("piecewise", "full")], ids=str
)
def test_graphs_change_nothing(runs, one, other):
    for scenario in ("first", "mixed", "hits", "loop"):
        assert outputs(runs[one], scenario) == outputs(runs[other], scenario), scenario


def test_both_model_runners_agree(runs):
    assert_alike(apart(runs["v1"], runs["full"], ("mixed",)), apart(runs["invariant"], runs["stock"]))


@pytest.mark.parametrize(("kernels", "ops"), [("eager", "reference"), ("invariant", "invariant_reference")], ids=str)
def test_kernels_agree_with_the_reference_ops(runs, kernels, ops):
    effect = apart(runs[ops], runs["stock"])
    assert 0.001 < effect.rms < 1.5
    assert_alike(apart(runs[kernels], runs[ops]), effect)


def test_no_request_waits_for_a_kernel_to_be_compiled(finished):
    files = Path(triton_ops.__file__).parent.glob("*.py")
    kernels = {name for file in files for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)}
    assert "_demote_kernel" in kernels
    watched = {name: log for name, log in finished[1].items() if "JIT monitor activated" in log}  # none in eager mode
    assert {"graphs", "full", "piecewise", "ngram"} <= set(watched)
    for name, log in watched.items():
        assert not kernels & set(LATE.findall(log)), name


def test_hits_are_those_of_bfloat16(runs):
    cached = {
        name: [output["cached"] for batch in runs[name]["hits"]["result"] for output in batch]
        for name in ("stock", "full", "eager")
    }
    assert cached["full"] == cached["eager"] == cached["stock"]
    assert min(cached["stock"][4:]) >= 640


def test_every_block_returns_to_the_pool(runs):
    for name, results in runs.items():
        for scenario, entry in results.items():
            assert entry["pool"]["free"] == entry["pool"]["total"] - 1, (name, scenario)


def test_preempted_requests_finish(runs):
    """Their answers are those of an engine that had room for all of them."""
    assert runs["tight"]["pressure"]["preemptions"] >= 5
    assert runs["invariant"]["pressure"]["preemptions"] == 0
    assert {len(tokens[0]) for tokens, _ in outputs(runs["tight"], "pressure")} == {PRESSURE["max_tokens"]}
    effect = apart(runs["invariant"], runs["stock"])
    assert_alike(apart(runs["tight"], runs["invariant"], ("pressure",)), effect)


def test_ngram_speculation_equals_plain_decoding(runs):
    counters = runs["ngram"]["counters"]["result"]
    made, accepted = (counters[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    print(f"{accepted:.0f} of {made:.0f} drafted tokens accepted")
    assert made > 100
    assert accepted > 10
    effect = apart(runs["invariant"], runs["stock"])
    assert_alike(apart(runs["ngram"], runs["undrafted"], ("loop",)), effect)
