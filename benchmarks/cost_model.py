# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs, from bytes and launches: when a smaller KV cache pays, before anything is measured.

    step      = (weights + cache read) / bandwidth + layers * latency + rest
    cache     = requests * tokens * bytes per token, windows counted unquantized
    latency   = launches of a layer that move next to nothing: their time when the cache is nearly empty
    rest      = sampling, output layer, scheduling: what is left of a measured step

``python -m benchmarks.cost_model`` prints the table for the measured geometry. tests/benchmarks/test_cost_model.py
holds it against ``benchmarks/results/engine.csv``.
"""

from dataclasses import dataclass

from triton_ops.layout import PageLayout


@dataclass(frozen=True)
class Model:
    """What of a model a decode step reads.

    Attributes:
        weight_bytes: all weights but the input embedding.
        layers: attention layers.
        kv_heads: KV heads of a layer on one GPU.
        head_size: d.

    """

    weight_bytes: float
    layers: int
    kv_heads: int
    head_size: int


QWEN3_8B = Model(weight_bytes=15.1e9, layers=36, kv_heads=8, head_size=128)


@dataclass(frozen=True)
class Gpu:
    """Memory of a GPU, as measured.

    Attributes:
        bandwidth: bytes per second of a copy.
        rest: seconds of a step that are neither weights nor attention.

    """

    bandwidth: float
    rest: float


H200 = Gpu(bandwidth=4.2e12, rest=1.0e-3)


@dataclass(frozen=True)
class Cache:
    """One KV-cache dtype.

    Attributes:
        launches: kernels of a layer's attention: cache writes, query preparation, attention, merge.
        latency: seconds of a layer's attention and cache writes when there is next to nothing to read.
        efficiency: share of the bandwidth that attention reaches on large shapes.

    """

    launches: int
    latency: float
    efficiency: float


CACHES = {
    "auto": Cache(launches=2, latency=14e-6, efficiency=1.05),
    "fp8": Cache(launches=3, latency=16e-6, efficiency=0.77),
    "oscar_int2": Cache(launches=3, latency=18e-6, efficiency=0.92),
}
"""Fitted on an H200. Reading alone is a little faster than copying; FP8 FlashAttention-3 is far from twice as fast."""

SINK, RECENT = 64, 256


def cache_bytes(dtype: str, model: Model, tokens: int) -> float:
    """Bytes of one layer's cache that a decode step reads for one request of ``tokens`` tokens."""
    plain = 2 * 2 * model.kv_heads * model.head_size
    if dtype == "auto":
        return tokens * plain
    if dtype == "fp8":
        return tokens * plain / 2
    history = max(0, tokens - SINK - RECENT)
    return min(tokens, SINK + RECENT) * plain + history * model.kv_heads * PageLayout(model.head_size).bytes_per_token


def step_seconds(dtype: str, model: Model, requests: int, tokens: int, gpu: Gpu = H200) -> float:
    """Seconds of one decode step of ``requests`` requests of ``tokens`` tokens each."""
    cache = CACHES[dtype]
    read = requests * cache_bytes(dtype, model, tokens) / (gpu.bandwidth * cache.efficiency)
    return model.weight_bytes / gpu.bandwidth + model.layers * (cache.latency + read) + gpu.rest


def main() -> None:
    print("decode step of Qwen3-8B's geometry on an H200, ms, by the model: BF16, FP8, oscar_int2")
    for requests in (1, 4, 16, 64):
        for tokens in (1024, 8192, 32768, 100_000):
            times = [1e3 * step_seconds(dtype, QWEN3_8B, requests, tokens) for dtype in CACHES]
            print(f"{requests:3d} x {tokens:6d}  " + "  ".join(f"{time:7.2f}" for time in times))


if __name__ == "__main__":
    main()
