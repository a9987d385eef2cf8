# SPDX-License-Identifier: Apache-2.0
"""The real engine on a GPU: CUDA graphs against eager, kernels against the reference ops, hits, chunks, preemption.

bfloat16 arithmetic differs in the last bits between kernels and batch shapes, so tokens are compared where the model
is sure of them: two runs must agree up to the first position at which the best two tokens are nearly tied.
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

GEOMETRY = Geometry("qwen3", 128, 2, 4, layers=4, hidden=512, dtype="bfloat16")
LENGTHS = [5, 37, 130, 300, 444, 513, 700, 911, 1500, 2048]
INT2 = {"rotation": "hadamard"}


class Engine:
    """Runs jobs, each in its own process; results are kept, so that tests share them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(GEOMETRY, folder)
        self.results: dict[str, dict] = {}

    def run(self, name: str, scenarios: list[dict], oscar: dict | None = None, **engine) -> dict:
        if name in self.results:
            return self.results[name]
        options = {
            "dtype": "bfloat16",
            "enforce_eager": False,
            "gpu_memory_utilization": 0.3,
            "max_num_seqs": 16,
            **engine,
        }
        if oscar is not None:
            options |= {"kv_cache_dtype": "oscar_int2", "additional_config": {"oscar": oscar}}
        job, result = self.folder / f"{name}.job.json", self.folder / f"{name}.result.json"
        job.write_text(json.dumps({"model": str(self.model), "engine": options, "scenarios": scenarios}))
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        command = [sys.executable, "-m", "tests.engine.runner", str(job), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        self.results[name] = json.loads(result.read_text())
        return self.results[name]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(tmp_path_factory.mktemp("gpu"))


def scenarios() -> list[dict]:
    mixed = prompts(LENGTHS, seed=0)
    shared = prompts([640], seed=1)[0]
    hits = prompts([700, 900, 1300, 1301], seed=2, prefix=shared)
    return [
        {"name": "mixed", "kind": "generate", "prompts": mixed, "max_tokens": 200},
        {"name": "hits", "kind": "generate", "prompts": hits, "max_tokens": 40, "rounds": 3},
        {
            "name": "turns",
            "kind": "conversation",
            "prompts": hits[:2],
            "turns": [[9, 8, 7], [11] * 150],
            "max_tokens": 90,
        },
    ]


CACHING = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}


def agreement(first: list, second: list) -> tuple[float, float]:
    """(share of equal tokens up to each pair's first difference, largest logprob difference on those tokens)."""
    equal = total = 0
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        tokens = list(zip(one["token_ids"][0], other["token_ids"][0], strict=True))
        same = next((i for i, (a, b) in enumerate(tokens) if a != b), len(tokens))
        equal, total = equal + same, total + len(tokens)
        pairs = zip(one["logprobs"][0][:same], other["logprobs"][0][:same], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return equal / total, worst


def assert_agree(first: list, second: list, share: float, logprob: float) -> None:
    found = agreement(first, second)
    assert found[0] >= share, f"only {found[0]:.3f} of the tokens agree"
    assert found[1] <= logprob, f"logprobs differ by {found[1]:.4f}"


def assert_pool_is_free(results: dict) -> None:
    for name, entry in results.items():
        assert entry["pool"]["free"] == entry["pool"]["total"] - 1, f"{name}: {entry['pool']}"


def test_graphs_equal_eager(engine):
    """FULL and PIECEWISE graphs, torch.compile included, give what eager mode gives."""
    runs = {
        mode: engine.run(mode, scenarios(), INT2, **CACHING, **options)
        for mode, options in {
            "eager": {"enforce_eager": True},
            "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
            "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        }.items()
    }
    for mode in ("full", "piecewise"):
        assert_pool_is_free(runs[mode])
        for name in ("mixed", "hits"):
            for one, other in zip(runs["eager"][name]["result"], runs[mode][name]["result"], strict=True):
                print(mode, name, agreement(one, other))
                assert_agree(one, other, 0.9, 0.15)


def test_kernels_agree_with_the_reference_ops(engine):
    kernels = engine.run("eager", scenarios(), INT2, **CACHING, enforce_eager=True)
    ops = engine.run("reference", scenarios(), {**INT2, "ops": "reference"}, **CACHING, enforce_eager=True)
    for name in ("mixed", "hits", "turns"):
        for one, other in zip(ops[name]["result"], kernels[name]["result"], strict=True):
            print("reference", name, agreement(one, other))
            assert_agree(one, other, 0.9, 0.15)


def test_hits_are_those_of_bfloat16(engine):
    quantized = engine.run("full", scenarios(), INT2, **CACHING)
    stock = engine.run("stock", scenarios(), None, **CACHING, block_size=128)
    for one, other in zip(stock["hits"]["result"], quantized["hits"]["result"], strict=True):
        assert [output["cached"] for output in one] == [output["cached"] for output in other]
    assert any(output["cached"] for output in quantized["hits"]["result"][1])


def test_preemption_returns_every_block(engine):
    tight = engine.run("full_tight", scenarios()[:1], INT2, enable_prefix_caching=False, num_gpu_blocks_override=260)
    assert tight["mixed"]["preemptions"] >= 5
    assert_pool_is_free(tight)
    roomy = engine.run("full", scenarios(), INT2, **CACHING)
    assert_agree(roomy["mixed"]["result"][0], tight["mixed"]["result"][0], 0.6, 0.3)


def test_ngram_speculation_equals_plain_decoding(engine):
    text = (prompts([40], seed=5)[0] * 20)[:700]
    job = [{"name": "repeat", "kind": "generate", "prompts": [text, text[13:]], "max_tokens": 150}]
    plain = engine.run("plain", job, INT2)
    draft = engine.run(
        "ngram",
        job,
        INT2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    )
    assert_agree(plain["repeat"]["result"][0], draft["repeat"]["result"][0], 0.9, 0.15)
