# SPDX-License-Identifier: Apache-2.0
"""Every ratio of query heads to KV heads, and every length of a verification step, with several KV heads.

A kernel that reads the wrong KV head gives plausible text, and with one KV head it cannot be seen. (A fork of llama.cpp
read wrong heads at ratios 5, 6, 7 and 12 from two KV heads on, its issue 78; vLLM 40914 took verification rows for
single tokens.) Triton's interpreter is slow, so without a GPU kernels are run on the shapes that failed elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.triton_ops import test_attend_decode as decode
from tests.triton_ops import test_attend_prefill as prefill
from tests.triton_ops.step_cases import DEVICES
from tests.triton_ops.test_reference import Cache, assert_close

RATIOS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
FAILED_ELSEWHERE = [5, 6, 7, 12]


def on_devices(interpreted: Sequence, compiled: Sequence) -> list[Any]:
    """Parameters (device, value): some values in the interpreter, others on a GPU."""
    cpu, cuda = DEVICES
    return [
        *(pytest.param("cpu", value, marks=cpu.marks, id=f"cpu-{value}") for value in interpreted),
        *(pytest.param("cuda", value, marks=cuda.marks, id=f"cuda-{value}") for value in compiled),
    ]


@pytest.mark.parametrize("groups", RATIOS)
def test_reference_reads_the_right_head(groups):
    cache = Cache(3, groups, 64, [460, 300])
    cache.step([446, 299])
    out, _ = cache.step([14, 1])
    assert_close(out[:14], cache.brute_force(0, 446, 446))
    assert_close(out[14:], cache.brute_force(1, 299, 299))


@pytest.mark.parametrize(("device", "groups"), on_devices(FAILED_ELSEWHERE, RATIOS))
def test_decode_kernel_reads_the_right_head(device, groups):
    codec, layout = decode.make_codec(2, 64, "spectral" if groups % 2 else "token")
    step = decode.decode_step([(520, 1), (333, 1)], heads=2, d=64, groups=groups, codec=codec, layout=layout)
    decode.check(step, device, codec, layout)


@pytest.mark.parametrize(("device", "groups"), on_devices(FAILED_ELSEWHERE, RATIOS))
def test_prefill_kernel_reads_the_right_head(device, groups):
    step, codec, layout = prefill.prepare([(300, 20), (140, 2)], heads=2, groups=groups, d=64, zero="page")
    prefill.compare(step, codec, layout, device)


@pytest.mark.parametrize("device", DEVICES)
def test_exchanged_heads_are_seen(device):
    """The comparison has the power to find it: queries that read the pages of the other KV head."""
    codec, layout = decode.make_codec(2, 64, "token")
    step = decode.decode_step([(520, 1)], heads=2, d=64, groups=5, codec=codec, layout=layout)
    expected, _ = decode.run(step, device, codec, layout, sink=64, recent=256)
    for cache in (step.pages, step.windows):
        cache.copy_(cache.flip(1))
    output, _ = decode.run(step, device, codec, layout, sink=64, recent=256)
    assert ((output - expected).norm(dim=-1) / expected.norm(dim=-1)).min() > 100 * decode.TOLERANCE


@pytest.mark.parametrize(("device", "lengths"), on_devices([(2, 13)], [tuple(range(1, 17))]))
@pytest.mark.parametrize(("heads", "groups", "d"), [(2, 2, 64), (1, 1, 128)])
def test_verification_steps_of_every_length(device, lengths, heads, groups, d):
    """Query tokens of many lengths in one step, each causal inside its draft, over edges of pages."""
    codec, layout = decode.make_codec(heads, d, "spectral")
    requests = [(384 - count // 2, count) for count in lengths]
    step = decode.decode_step(requests, heads=heads, d=d, groups=groups, codec=codec, layout=layout)
    decode.check(step, device, codec, layout)
