# SPDX-License-Identifier: Apache-2.0
"""The real engine on a GPU: CUDA graphs, torch.compile, kernels against the reference ops, hits, preemption, drafts.

All engines start at once, each in its own process, and the tests compare what they did. Graphs replay the same kernels
on the same data, so their tokens and logprobs must be equal to the last bit. torch.compile rounds bfloat16 elsewhere
than eager mode does, and a random model amplifies that, so compiled runs are compared with compiled runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.models import Geometry, prompts, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GEOMETRY = Geometry("qwen3", 128, 2, 4, layers=4, dtype="bfloat16")
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


def oscar(**options) -> dict:
    return {
        "kv_cache_dtype": "oscar_int2",
        "additional_config": {"oscar": {"rotation": "hadamard", **options}},
    }


ENGINES = {
    "eager": {**oscar(), "enforce_eager": True},
    "graphs": {**oscar(), "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {**oscar(), "compilation_config": {"cudagraph_mode": "NONE"}},
    "piecewise": {**oscar(), "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": oscar(),
    "reference": {**oscar(ops="reference"), "enforce_eager": True},
    "invariant": {**oscar(prefill="invariant"), "enforce_eager": True},
    "invariant_reference": {**oscar(prefill="invariant", ops="reference"), "enforce_eager": True},
    "stock": {"block_size": 128, "enforce_eager": True},
    "tight": {**oscar(), "enforce_eager": True, "enable_prefix_caching": False, "num_gpu_blocks_override": 260},
    "ngram": {
        **oscar(),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    },
}


def scenarios() -> list[dict]:
    mixed = prompts([5, 37, 130, 300, 444, 513, 700, 911, 1500, 2048], seed=0)
    shared = prompts([640], seed=1)[0]
    hits = prompts([700, 900, 1300, 1301], seed=2, prefix=shared)
    loop = (prompts([40], seed=5)[0] * 20)[:700]
    return [
        {"name": "first", "kind": "generate", "prompts": mixed, "max_tokens": 1, "logprobs": 5},
        {"name": "mixed", "kind": "generate", "prompts": mixed, "max_tokens": 200},
        {"name": "hits", "kind": "generate", "prompts": hits, "max_tokens": 40, "rounds": 3},
        {"name": "loop", "kind": "generate", "prompts": [loop, loop[13:]], "max_tokens": 150},
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    """Results of every engine by its name, then by scenario."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    model = write_model(GEOMETRY, folder)
    processes = {}
    for name, options in ENGINES.items():
        job = {"model": str(model), "engine": {**ENGINE, **options}, "scenarios": scenarios()}
        (folder / f"{name}.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "tests.engine.runner", f"{folder}/{name}.json", f"{folder}/{name}.result"]
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
            )
    results = {}
    for name, process in processes.items():
        process.wait(timeout=500)
        log = (folder / f"{name}.log").read_text()
        assert process.returncode == 0, f"engine {name} ended with {process.returncode}:\n{log[-5000:]}"
        results[name] = json.loads((folder / f"{name}.result").read_text())
    return results


def outputs(results: dict, scenario: str) -> list[tuple]:
    """(token ids, logprobs) of every round and prompt."""
    return [(output["token_ids"], output["logprobs"]) for batch in results[scenario]["result"] for output in batch]


def agreement(first: dict, second: dict, scenario: str) -> float:
    """Share of the tokens that are equal before each pair's first difference."""
    equal = total = 0
    for (one, _), (other, _) in zip(outputs(first, scenario), outputs(second, scenario), strict=True):
        pairs = list(zip(one[0], other[0], strict=True))
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    return equal / total


@pytest.mark.parametrize(
    ("one", "other"), [("eager", "graphs"), ("compiled", "piecewise"), ("piecewise", "full")], ids=str
)
def test_graphs_change_nothing(runs, one, other):
    for scenario in ("first", "mixed", "hits", "loop"):
        assert outputs(runs[one], scenario) == outputs(runs[other], scenario), scenario


@pytest.mark.parametrize(("kernels", "ops"), [("eager", "reference"), ("invariant", "invariant_reference")], ids=str)
def test_kernels_agree_with_the_reference_ops(runs, kernels, ops):
    """First tokens of the same prompts: bfloat16 noise only; the yardstick is stock vLLM compiled against eager."""
    worst = 0.0
    for one, other in zip(outputs(runs[kernels], "first"), outputs(runs[ops], "first"), strict=True):
        assert one[0] == other[0]
        worst = max(worst, abs(one[1][0][0] - other[1][0][0]))
    print(kernels, "first-token logprob difference", worst, "agreement", agreement(runs[kernels], runs[ops], "mixed"))
    assert worst < 0.3


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
    assert runs["tight"]["mixed"]["preemptions"] >= 5
    assert {len(tokens[0]) for tokens, _ in outputs(runs["tight"], "mixed")} == {200}


def test_ngram_speculation_equals_plain_decoding(runs):
    share = agreement(runs["full"], runs["ngram"], "loop")
    print("ngram agreement", share)
    assert share > 0.5
