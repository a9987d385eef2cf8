# SPDX-License-Identifier: Apache-2.0
"""Running engines, each in a process of its own, so that none can leak into another."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

import pytest

from scripts.fetch_model import fetch_model
from tests.engine.models import Geometry, write_model

ROOT = Path(__file__).resolve().parents[2]

OSCAR = {"kv_cache_dtype": "oscar_int2"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in reach of the test
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # n-gram drafts: their OpenMP threads would also become PyTorch's
    "TRITON_INTERPRET": "0",  # this process tests kernels in the interpreter; a server does not
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines of several tests share the cores; two ranks need no NUMA nodes
}


@dataclass(frozen=True)
class Run:
    """What one engine process did: everything it printed, and results by scenario name."""

    log: str
    results: dict

    def __getitem__(self, scenario: str):
        return self.results[scenario]["result"]

    def tokens(self, scenario: str) -> list:
        """Token ids, [round][prompt][completion]."""
        return [[output["token_ids"] for output in outputs] for outputs in self[scenario]]

    def cached(self, scenario: str) -> list:
        """Prefix-hit lengths, [round][prompt]."""
        return [[output["cached"] for output in outputs] for outputs in self[scenario]]


def environment(**changes: str) -> dict:
    """The environment of an engine process."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **changes}


def leaks(run: Run) -> dict:
    """Scenarios after which a block was still in use, with their pools: empty when nothing leaked."""
    leaked = {}
    for name, record in run.results.items():
        pool = record["pool"]
        returned = pool and (pool["free"] is None or pool["free"] == pool["total"] - 1) and not pool["in_store"]
        if pool and not (pool["reset"] and returned):
            leaked[name] = pool
    return leaked


class Launcher:
    """A process that has imported vLLM and runs jobs in forks of itself: ``serve`` of ``tests/engine/runner.py``."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.connection, other = Pipe()
        with other, open(log_path, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.runner", "serve", str(other.fileno())],
                cwd=log_path.parent,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, job: tuple, timeout: float) -> int | None:
        """Exit status of a job, given by the arguments of ``run_job``; without one in time this process is killed."""
        status = None
        try:
            self.connection.send(job)
            if self.connection.poll(timeout):
                status = self.connection.recv()
        except EOFError:
            pass
        finally:
            if status is None:
                self.kill()
        return status

    def kill(self) -> None:
        if self.alive:
            os.killpg(self.process.pid, 9)
            self.process.wait()


class Engines:
    """Runs jobs (see ``tests/engine/runner.py``) and remembers their results within a test session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.finished: dict[str, Run] = {}
        self.numbers = itertools.count()
        self.launcher: Launcher | None = None

    def model(self, geometry: Geometry) -> Path:
        return write_model(geometry, self.directory / "models")

    def run(
        self,
        model: Geometry | Path,
        engine: dict,
        scenarios: list[dict],
        *,
        env: dict[str, str] | None = None,
        timeout: float = 400,
    ) -> Run:
        path = self.model(model) if isinstance(model, Geometry) else model
        job = {"model": str(path), "engine": engine, "scenarios": scenarios}
        key = json.dumps([job, env], sort_keys=True)
        if key not in self.finished:
            self.finished[key] = self._run(job, env or {}, timeout)
        return self.finished[key]

    def refusals(self, cases: list[dict], timeout: float = 400) -> dict:
        """What each engine of ``cases`` (name, model, engine) raises at its start; see ``runner.refusal``."""
        return self._run({"refusals": cases}, {}, timeout).results

    def _run(self, job: dict, env: dict[str, str], timeout: float) -> Run:
        directory = self.directory / f"job-{next(self.numbers)}"
        directory.mkdir()
        job_path, result_path, log_path = (directory / n for n in ("job.json", "result.json", "log.txt"))
        job_path.write_text(json.dumps(job))
        if self.launcher is None or not self.launcher.alive:
            self.launcher = Launcher(directory / "launcher.txt")
        status = self.launcher.run((str(job_path), str(result_path), str(log_path), env), timeout)
        log = log_path if log_path.exists() else self.launcher.log_path
        if status != 0:
            what = f"ended with status {status}" if status is not None else f"was killed, or hung for {timeout} s"
            pytest.fail(f"engine process {what}:\n{log.read_text()[-6000:]}", pytrace=False)
        return Run(log.read_text(), json.loads(result_path.read_text()))

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, fetched on first use and kept in the cache of scripts/fetch_model.py."""
    return fetch_model("smollm2")
