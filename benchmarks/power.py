# SPDX-License-Identifier: Apache-2.0
"""Decode attention at full clock and at the power limit: ``python -m benchmarks.power``, rows in power.csv.

Unpacking at the rate of memory can draw more than a GPU may: then its clock falls, and a figure depends on what ran
before. So each kernel is timed in a burst after a rest and for some seconds on end, the latter with what nvidia-smi
says of the clock, the power and the reasons for the clock (0x4: the power cap).
"""

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import results
from benchmarks.attend_decode import Batch, Variant, check, make_cache

REQUESTS, CONTEXT = 32, 32768
CALLS = 50
"""Calls in a graph."""
BURST, REST_S, ON_END_S = 4, 0.5, 3.0
"""Replays of a burst, seconds of rest before it, and seconds on end."""
SAMPLED = ("clocks.sm", "power.draw", "clocks_event_reasons.active", "temperature.gpu")


def sampled() -> list[str]:
    """`SAMPLED` of the GPU in use, from nvidia-smi, without units."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(SAMPLED)}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")


def replayed(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a call over at least `BURST` replays and ``seconds``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin, count = time.perf_counter(), 0
    start.record()
    while count == 0 or time.perf_counter() - begin < seconds:
        for _ in range(BURST):
            graph.replay()
        count += BURST
        torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (count * CALLS)


def measure(call: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds in a burst and on end, and the middle one of what was sampled meanwhile."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    time.sleep(REST_S)
    burst = replayed(graph, 0)
    samples: list[list[str]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(sampled())

    sampler = threading.Thread(target=sample)
    sampler.start()
    on_end = replayed(graph, ON_END_S)
    done.set()
    sampler.join()
    return {"burst_us": burst, "on_end_us": on_end} | dict(zip(SAMPLED, samples[len(samples) // 2], strict=True))


def run(device: str = "cuda") -> list[dict[str, Any]]:
    """Check the kernels, then a row for each number of query heads per KV head, of attention alone and of a step."""
    cache, shipped, rows = make_cache(device), Variant(), []
    for groups in (4, 8, 16):
        check(cache, groups, [shipped])
        batch = Batch(cache, [CONTEXT] * REQUESTS, groups)
        batch.select(shipped)
        batch.whole(0)
        for part, call in (("attend", partial(batch.attend, 0, pdl=False)), ("whole", partial(batch.whole, 0))):
            rows.append({"shape": f"{REQUESTS} x {CONTEXT // 1024}k", "groups": groups, "part": part} | measure(call))
    return rows


def main() -> None:
    """Measure, print one table, append to power.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    results.require_gpu()
    results.keep("power", run())


if __name__ == "__main__":
    main()
