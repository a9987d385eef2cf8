# SPDX-License-Identifier: Apache-2.0
r"""The start-up self-test on several geometries: every kernel, small sizes, against the reference.

    python -m tests.gpu.geometries                 # all
    python -m tests.gpu.geometries 0 3             # some, by number
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.geometries 0
    compute-sanitizer --tool racecheck --error-exitcode 9 --kernel-name kernel_substring=_kernel \
        python -m tests.gpu.geometries 0

FlashAttention, which the self-test also runs, is not ours. Its `cutlass::device_kernel` has the substring too, and
racecheck reports hazards inside FlashAttention 3 on Hopper: those of a kernel named `_..._kernel` would be ours.
"""

import sys
import time

import torch

from calib.allocation import allocate
from oscar_vllm.self_test import LayerKernels, self_test
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec, spectral_codec
from triton_ops.layout import PageLayout, Zero

GEOMETRIES: list[tuple[int, int, int, Zero, torch.dtype, str, int]] = [
    # query heads, KV heads, head size, zero, dtype, prefill, longest decode query
    (32, 8, 128, "page", torch.bfloat16, "exact", 1),
    (9, 3, 64, "page", torch.bfloat16, "invariant", 1),
    (32, 8, 128, "page", torch.bfloat16, "exact", 4),
    (16, 1, 128, "token", torch.bfloat16, "exact", 1),
    (16, 2, 64, "page", torch.float16, "exact", 1),
    (4, 1, 256, "page", torch.bfloat16, "exact", 1),
    (16, 2, 128, "page", torch.bfloat16, "exact", 2),
    (4, 4, 128, "page", torch.bfloat16, "exact", 1),
]


def make_codec(heads: int, d: int, zero: Zero) -> LayerCodec:
    """Random bases; with ``zero="page"`` directions of unequal variance, so that bits are allocated by it."""
    generator = torch.Generator().manual_seed(3)
    basis, other = torch.linalg.qr(torch.randn(2, heads, d, d, generator=generator, dtype=torch.float64))[0]
    gauss = Quantizer("gauss", 1.1)
    if zero == "token":
        return rotation_codec(basis, other, zero="token", key_quantizer=gauss, value_quantizer=gauss)
    width = 2.0 ** torch.linspace(3, -3, d, dtype=torch.float64)
    variance = width.square().expand(heads, d)
    bits = allocate(width.square(), torch.zeros(d), 0.0, 8).expand(heads, d)
    inverse = (basis / width).transpose(1, 2)
    return spectral_codec(
        basis * width, inverse, variance, bits, kappa=1.1, value_rotation=other, value_quantizer=gauss
    )


def main() -> None:
    for number in [int(x) for x in sys.argv[1:]] or range(len(GEOMETRIES)):
        query_heads, heads, d, zero, dtype, prefill, queries = GEOMETRIES[number]
        codec, layout = make_codec(heads, d, zero), PageLayout(d, zero)
        layer = LayerKernels(codec, layout, query_heads, d**-0.5, 64, 256, prefill, dtype, queries)  # type: ignore[arg-type]
        times = []
        for _ in range(2):  # compiled, then warm
            begin = time.perf_counter()
            self_test(layer, "cuda")
            times.append(f"{time.perf_counter() - begin:.2f} s")
        print(f"geometry {number} {GEOMETRIES[number]}: passed in {times[0]}, again in {times[1]}", flush=True)


if __name__ == "__main__":
    main()
