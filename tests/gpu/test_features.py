# SPDX-License-Identifier: Apache-2.0
"""What users combine with the cache, on a GPU: several GPUs, sleep, quantized weights, drafts, adapters, odd models.

All processes start at once, spread over the visible GPUs; each runs the engines of one `Job` after the other. Pages
hold INT2 codes and are read by the kernels, with ``prefill="invariant"``: results do not depend on the scheduler.

Two runs that should be the same are compared as `tests/engine/distance.py` says.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import ROOT
from tests.engine.distance import Distance, assert_alike, distance
from tests.engine.models import (
    Geometry,
    byte_tokenizer,
    prompts,
    write_eagle_head,
    write_linear_hybrid,
    write_lora,
    write_mixed,
    write_model,
    write_quantized,
    write_shortened,
)
from tests.engine.test_features import SCHEMA

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MAIN = Geometry("qwen3", 128, 2, 4, sharpness=1.0, dtype="bfloat16")
ONE_KV_HEAD = Geometry("qwen3", 128, 1, 4, sharpness=1.0, dtype="bfloat16")
PHI3 = Geometry("llama", 96, 4, 1, sharpness=1.0, dtype="bfloat16")
HALF = Geometry("qwen3", 64, 2, 4, sharpness=1.0, dtype="float16")
MIMO = Geometry("mimo", 64, 2, 2, sharpness=1.0, dtype="bfloat16")
PACKED = Geometry("qwen2", 64, 2, 2, sharpness=1.0, dtype="bfloat16")  # Marlin wants multiples of 128

SCORE = {"name": "score", "kind": "generate", "prompts": prompts([600, 1100, 1700], seed=71), "max_tokens": 1}
SCORE |= {"prompt_logprobs": 1}
MIXED = {"name": "mixed", "kind": "generate", "prompts": prompts([5, 130, 300, 444, 700, 911, 1500], seed=72)}
MIXED |= {"max_tokens": 24}
PERIODIC = {"name": "periodic", "kind": "generate", "max_tokens": 150}
PERIODIC |= {"prompts": [pattern * 12 for pattern in prompts([30, 37, 44, 50, 56, 61], seed=73)]}
COUNTERS = {"name": "counters", "kind": "counters"}
LONG = prompts([40, 700, 1100], seed=74)
BEAMS = {"name": "beams", "kind": "beams", "prompts": LONG, "width": 4, "max_tokens": 12}
LETTERS = [[3 + token % 94 for token in prompt] for prompt in LONG]  # ASCII: half a character would stay in the answer
STRUCTURED = {"name": "json", "kind": "structured", "prompts": LETTERS, "schema": SCHEMA, "max_tokens": 150}
OTHERS = {"name": "others", "kind": "generate", "prompts": prompts([1700] * 12, seed=75), "max_tokens": 2}
PUSHED_OUT = [  # of the pool by other prompts, then asked for again
    MIXED | {"keep_cache": True},
    OTHERS | {"keep_cache": True},
    COUNTERS | {"name": "between", "keep_cache": True},
    MIXED | {"name": "warm", "keep_cache": True},
    COUNTERS | {"name": "after", "keep_cache": True},
    {"name": "end", "kind": "generate", "prompts": prompts([5], seed=76), "max_tokens": 8},
]
ASLEEP = {"kind": "sleep", "prompts": MIXED["prompts"], "max_tokens": 24}

ENGINE = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2**30,
    "gpu_memory_utilization": 0.02,  # what must be free at the start; the cache has its own size
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "0",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 420
"""A process that takes longer is stopped, so that the others' results are seen."""


def oscar(**options) -> dict:
    options = {"rotation": "hadamard", "prefill": "invariant", **options}
    return {"kv_cache_dtype": "oscar_int2", "additional_config": {"oscar": options}}


@dataclass
class Job:
    """One process: engines by name (arguments of ``LLM`` beside `ENGINE`, scenarios), one after the other."""

    model: Path
    engines: dict[str, tuple[dict, list[dict]]]
    gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    def write(self, path: Path) -> None:
        engines = [
            {"name": name, "model": str(self.model), "engine": {**ENGINE, **options}, "scenarios": scenarios}
            for name, (options, scenarios) in self.engines.items()
        ]
        path.write_text(json.dumps({"engines": engines}))


def trio(model: Path, scenarios: list[dict] | None = None, **options) -> Job:
    """A model with its own cache dtype, with INT2 pages and the kernels, and with INT2 pages and the reference ops."""
    scenarios = scenarios or [SCORE, MIXED]
    caches = {"stock": {"block_size": 128}, "int2": oscar(), "reference": oscar(ops="reference")}
    return Job(model, {name: ({**cache, **options}, scenarios) for name, cache in caches.items()})


def jobs(folder: Path) -> dict[str, Job]:
    """Every process by name; models are written to ``folder``."""
    main = write_model(MAIN, folder)
    with_text = write_model(MAIN, folder / "text")
    byte_tokenizer().save_pretrained(with_text)
    adapter = str(write_lora(MAIN, folder))
    plain = {"name": "plain", "kind": "generate", "prompts": LONG, "max_tokens": 24, "keep_cache": True}
    adapted = {"name": "adapted", "kind": "adapted", "prompts": LONG, "adapter": adapter, "max_tokens": 24}
    text = {
        "skip_tokenizer_init": False, "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": True,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }  # fmt: skip

    def drafting(**draft) -> tuple[dict, list[dict]]:
        options = {"speculative_config": draft, "disable_log_stats": False}
        return {**oscar(), **GRAPHS, **options}, [PERIODIC, COUNTERS]

    draft = {"method": "draft_model", "model": str(write_shortened(MAIN, 2, folder)), "num_speculative_tokens": 3}
    eagle = {"method": "eagle", "model": str(write_eagle_head(MAIN, folder)), "num_speculative_tokens": 3}
    undrafted = ({**oscar(), **GRAPHS}, [SCORE, MIXED, PERIODIC])
    unquantized = ({"block_size": 128, **GRAPHS}, [SCORE, MIXED])
    two = {"gpus": 2, "environment": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}}
    ranks = {**oscar(), "disable_custom_all_reduce": True}
    offload = {"kv_offloading_size": 2, "num_gpu_blocks_override": 250, "enable_prefix_caching": True}
    offload |= {"disable_log_stats": False, **GRAPHS}
    linear = {"stock": {}, "int2": oscar(), "reference": oscar(ops="reference")}
    for options in linear.values():  # FlashInfer, the default on Hopper, need not be installed
        options["additional_config"] = {**options.get("additional_config", {}), "gdn_prefill_backend": "triton"}
    sleeping = [ASLEEP | {"name": "first", "level": 1}, ASLEEP | {"name": "second", "level": 2}]
    return {
        "main": trio(main),
        "one KV head": trio(write_model(ONE_KV_HEAD, folder)),
        "tensor": Job(main, {"int2": ({**ranks, "tensor_parallel_size": 2}, [SCORE, MIXED])}, **two),
        "tensor, one KV head": Job(
            folder / ONE_KV_HEAD.name, {"int2": ({**ranks, "tensor_parallel_size": 2}, [SCORE, MIXED])}, **two
        ),
        "pipeline": Job(main, {"int2": ({**ranks, "pipeline_parallel_size": 2}, [SCORE, MIXED])}, **two),
        "process": Job(main, {"int2": (oscar(), [SCORE, MIXED])}, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        "sleep": Job(main, {"int2": ({**oscar(), **GRAPHS, "enable_sleep_mode": True}, sleeping)}, alone=True),
        "offload": Job(main, {"int2": ({**oscar(), **offload}, PUSHED_OUT)}),
        "offload, tensor": Job(main, {"int2": ({**ranks, **offload, "tensor_parallel_size": 2}, PUSHED_OUT)}, **two),
        "fp8": trio(main, quantization="fp8_per_tensor"),
        "gptq": trio(write_quantized(PACKED, "gptq", folder)),
        "awq": trio(write_quantized(PACKED, "awq", folder)),
        "text": trio(with_text, [BEAMS, STRUCTURED, plain, adapted], **text),
        "drafts": Job(main, {"int2": undrafted, "draft_model": drafting(**draft)}),
        "eagle": Job(main, {"eagle": drafting(**eagle)}),
        "mtp": Job(
            write_model(MIMO, folder),
            {"stock": unquantized, "int2": undrafted, "mtp": drafting(method="mtp", num_speculative_tokens=1)},
        ),
        "gpt_oss": trio(write_mixed("gpt_oss", folder, sharpness=1.0)),
        "gemma2": trio(write_mixed("gemma2", folder, sharpness=8.0)),
        "gemma3": trio(write_mixed("gemma3", folder, sharpness=1.0)),
        "gemma3n": trio(write_mixed("gemma3n", folder, sharpness=1.0)),
        "linear attention": Job(
            write_linear_hybrid(folder), {name: (cache, [SCORE, MIXED]) for name, cache in linear.items()}
        ),
        "head size 96": trio(write_model(PHI3, folder)),
        "float16": trio(write_model(HALF, folder), dtype="float16"),
    }


@dataclass
class Finished:
    """What a process left: its log, and results by engine and scenario if it got to the end."""

    log: str
    results: dict | None

    def __getitem__(self, engine: str) -> dict:
        """Results of an engine by scenario; the test fails if the process did."""
        if self.results is None:
            pytest.fail(f"the process failed:\n{self.log[-5000:]}", pytrace=False)
        return {name: record["result"] for name, record in self.results[engine].items()}


def visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def start(job: Job, name: str, folder: Path, gpus: list[str]) -> subprocess.Popen:
    path = folder / name.replace(" ", "_").replace(",", "")
    job.write(path.with_suffix(".json"))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.engine.runner", str(path.with_suffix(".json")), f"{path}.result"],
            stdout=log, stderr=subprocess.STDOUT, env={**environment, **job.environment}, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen, name: str, folder: Path, deadline: float) -> Finished:
    path = folder / name.replace(" ", "_").replace(",", "")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(1.0, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = Path(f"{path}.result")
    log = path.with_suffix(".log").read_text(errors="replace")
    return Finished(log, json.loads(result.read_text()) if process.returncode == 0 else None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Results by name of the process; those that need more GPUs than there are are missing."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder, gpus = tmp_path_factory.mktemp("features"), visible_gpus()
    possible = {name: job for name, job in jobs(folder).items() if job.gpus <= len(gpus)}
    finished: dict[str, Finished] = {}
    # Sleeping measures the memory of the whole GPU: nothing else may start or end on it meanwhile.
    for together in ([n for n in possible if not possible[n].alone], [n for n in possible if possible[n].alone]):
        deadline = time.monotonic() + SECONDS
        processes = {
            name: start(possible[name], name, folder, gpus if possible[name].gpus > 1 else [gpus[index % len(gpus)]])
            for index, name in enumerate(together)
        }
        finished |= {name: finish(process, name, folder, deadline) for name, process in processes.items()}
    return finished


def assert_kernels_agree(job: Finished, scenarios: tuple[str, ...] = ("score", "mixed")) -> None:
    """The kernels compute what the reference ops compute, in the engine, up to re-coded numbers."""
    effect = distance(job["reference"], job["stock"], scenarios)
    assert 0.001 < effect.rms < 1.5
    assert_alike(distance(job["int2"], job["reference"], scenarios), effect)


def main_effect(runs: dict[str, Finished], name: str = "main") -> Distance:
    return distance(runs[name]["int2"], runs[name]["stock"])


# ---------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    "name",
    [
        *("main", "one KV head", "fp8", "gptq", "awq", "gpt_oss", "gemma2", "gemma3", "gemma3n", "linear attention"),
        *("head size 96", "float16"),
    ],
)
def test_models_and_weights(runs: dict[str, Finished], name: str) -> None:
    assert_kernels_agree(runs[name])


@pytest.mark.parametrize(("name", "single"), [("tensor", "main"), ("tensor, one KV head", "one KV head")])
def test_tensor_parallel(runs: dict[str, Finished], name: str, single: str) -> None:
    """Rotations sharded by KV head, and one KV head on both ranks."""
    if name not in runs:
        pytest.skip("needs 2 GPUs")
    assert_alike(distance(runs[name]["int2"], runs[single]["int2"]), main_effect(runs, single))


def test_pipeline_parallel(runs: dict[str, Finished]) -> None:
    if "pipeline" not in runs:
        pytest.skip("needs 2 GPUs")
    assert_alike(distance(runs["pipeline"]["int2"], runs["main"]["int2"]), main_effect(runs))


def test_engine_in_its_own_process(runs: dict[str, Finished]) -> None:
    assert_alike(distance(runs["process"]["int2"], runs["main"]["int2"]), main_effect(runs))


@pytest.mark.parametrize("level", ["first", "second"])
def test_sleep(runs: dict[str, Finished], level: str) -> None:
    """Levels 1 and 2 with CUDA graphs: rotations, workspace and graphs survive, to the last bit."""
    before, after = runs["sleep"]["int2"][level]
    assert after == before


@pytest.mark.parametrize("name", ["offload", "offload, tensor"])
def test_offloading(runs: dict[str, Finished], name: str) -> None:
    """Prefixes come back from CPU memory with their windows: whole pages of every prompt, and the same answers."""
    if name not in runs:
        pytest.skip("needs 2 GPUs")
    results = runs[name]["int2"]
    counts = ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits")
    in_pool, in_store = (results["after"][count] - results["between"][count] for count in counts)
    print(f"{in_pool:.0f} tokens found in the pool, {in_store:.0f} in the store")
    assert in_store > 2500 > in_pool
    for answers in (results["mixed"], results["warm"]):
        assert_alike(distance({"mixed": answers}, runs["main"]["int2"], ("mixed",)), main_effect(runs))


@pytest.mark.parametrize(("job", "method"), [("drafts", "draft_model"), ("eagle", "eagle"), ("mtp", "mtp")])
def test_speculation(runs: dict[str, Finished], job: str, method: str) -> None:
    """Greedy tokens are those without drafts; the drafts of a shortened target are often right."""
    drafted, plain = runs[job][method], runs["drafts" if job == "eagle" else job]["int2"]
    effect = main_effect(runs, "mtp" if job == "mtp" else "main")
    counters = drafted["counters"]
    made, accepted = (counters[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    print(f"{accepted:.0f} of {made:.0f} drafted tokens accepted")
    assert made > 100
    assert accepted > 10 or method != "draft_model"
    assert_alike(distance(drafted, plain, ("periodic",)), effect)


def test_lora(runs: dict[str, Finished]) -> None:
    """Another answer with the adapter, and no hit on what was cached without it."""
    # Together: where answers part after three tokens, nine numbers say nothing about the effect of the cache.
    assert_kernels_agree(runs["text"], ("plain", "adapted"))
    results = runs["text"]["int2"]
    pairs = list(zip(results["plain"][0], results["adapted"][0], strict=True))
    assert all(plain["token_ids"] != adapted["token_ids"] for plain, adapted in pairs)
    assert [adapted["cached"] for _, adapted in pairs] == [0, 0, 0]


def test_beam_search(runs: dict[str, Finished]) -> None:
    kernels, reference = (runs["text"][name]["beams"] for name in ("int2", "reference"))
    for beams in kernels:
        assert [len(beam) for beam in beams] == [12] * 4
        assert len({tuple(beam) for beam in beams}) == 4
    equal = sum(one[0] == other[0] for one, other in zip(kernels, reference, strict=True))
    print(f"{equal} of {len(kernels)} best beams equal")
    assert equal >= 1  # the shortest prompt has no history


def test_structured_outputs(runs: dict[str, Finished]) -> None:
    for answer in runs["text"]["int2"]["json"]:
        found = json.loads(answer)
        assert set(found) == set(SCHEMA["required"])
        assert set(found["tags"]) <= {"red", "green"}


def test_every_block_returns_to_the_pool(runs: dict[str, Finished]) -> None:
    for name, job in runs.items():
        for engine, scenarios in (job.results or {}).items():
            for scenario, record in scenarios.items():
                if pool := record["pool"]:
                    assert pool["reset"], (name, engine, scenario)
                    assert not pool["in_store"], (name, engine, scenario)
                    assert pool["free"] is None or pool["free"] == pool["total"] - 1, (name, engine, scenario)


# ----------------------------------------------------------------------------------------------------- vllm serve


@contextlib.contextmanager
def serving(model: Path, log_path: Path) -> Iterator[str]:
    """A server with CUDA graphs; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "served",
        "--kv-cache-dtype", "oscar_int2", "--additional-config", json.dumps(oscar()["additional_config"]),
        "--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(2**30),
        "--gpu-memory-utilization", "0.02", "--compilation-config", json.dumps(GRAPHS["compilation_config"]),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while True:
            assert process.poll() is None, log_path.read_text()[-5000:]
            assert time.monotonic() < deadline
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(url: str, prompt: list[int], max_tokens: int) -> dict:
    """One completion in the form of `runner.describe`."""
    body = {
        "model": "served", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        columns = json.load(response)["choices"][0]["logprobs"]
    best = [sorted(top.values(), reverse=True)[:2] for top in columns["top_logprobs"]]
    return {
        "token_ids": [[int(token.removeprefix("token_id:")) for token in columns["tokens"]]],
        "logprobs": [columns["token_logprobs"]],
        "margins": [[first - second for first, second in best]],
        "prompt_logprobs": None,
    }


def test_vllm_serve(runs: dict[str, Finished], tmp_path: Path) -> None:
    model = write_model(MAIN, tmp_path)
    byte_tokenizer().save_pretrained(model)
    with serving(model, tmp_path / "server.log") as url:
        answers = [ask(url, prompt, MIXED["max_tokens"]) for prompt in MIXED["prompts"]]
    effect = distance(runs["main"]["int2"], runs["main"]["stock"], ("mixed",))
    assert_alike(distance({"mixed": [answers]}, runs["main"]["int2"], ("mixed",)), effect)
