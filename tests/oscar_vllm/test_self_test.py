# SPDX-License-Identifier: Apache-2.0
"""The start-up self-test in Triton's interpreter: right kernels pass, wrong ones are named."""

import logging
import re

import pytest
import torch
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from oscar_vllm import prefill
from oscar_vllm import self_test as module
from oscar_vllm.errors import OscarSelfTestError
from oscar_vllm.self_test import LayerKernels, self_test, self_test_once
from tests.oscar_vllm.test_backend import flash
from tests.triton_ops.step_cases import INTERPRETED
from tests.triton_ops.test_attend_decode import make_codec
from triton_ops import reference

DEVICE = "cpu" if INTERPRETED else "cuda"
GRID = {"multiprocessors": 4, "capability": (9, 0)} if INTERPRETED else {}


@pytest.fixture(autouse=True)
def flash_attention_on_a_cpu(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(prefill, "flash_attention", lambda _: (flash, merge_attn_states, 3))


def layer(kind: str = "page", *, heads: int = 1, groups: int = 2, d: int = 64, queries: int = 1, **options):
    codec, layout = make_codec(heads, d, kind)
    given = {"sink": 64, "recent": 128, "prefill": "exact", "dtype": torch.bfloat16} | options
    return LayerKernels(codec, layout, heads * groups, d**-0.5, max_query_len=queries, **given)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "spectral", "queries": 4, "sink": 0},
        {"kind": "token", "groups": 3, "prefill": "invariant", "dtype": torch.float16, "recent": 144},
        {"kind": "page", "groups": 4, "soft_cap": 50.0},
        {"kind": "page", "window_block": 48},
    ],
    ids=["spectral", "token", "soft cap", "hybrid"],
)
def test_right_kernels_pass_whatever_the_loader_set(options):
    """vLLM loads weights with the model's dtype as torch's default; the global random state is not touched."""
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        self_test(layer(**options), DEVICE, **GRID)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def off_by_one_window(original):
    """A kernel that reads 16 tokens as recent that it should read from pages."""
    return lambda **arguments: original(**arguments | {"recent": arguments["recent"] + 16})


def one_token_lost(original):
    """A writer that leaves out the last token."""
    return lambda **arguments: original(**arguments | {"num_tokens": arguments["num_tokens"] - 1})


def swapped(original):
    """A writer that takes keys for values."""
    return lambda **arguments: original(**arguments | {"key": arguments["value"], "value": arguments["key"]})


def no_sink(original):
    """Sink tokens count as history."""
    return lambda **arguments: original(**arguments | {"sink": 0})


def value_scales(original, change):
    """Value codes and scales [..., 128] as `change` leaves them, in the first page, when it is written."""

    def kernel(**arguments):
        original(**arguments)
        if int(arguments["query_start_loc"][1]) < int(arguments["seq_lens"][0]):
            return  # not the first step
        page, layout = arguments["pages"][int(arguments["page_table"][0, 0])], arguments["layout"]
        keys, values = reference.unpack(page, layout)
        change(values)
        page.copy_(reference.pack(keys, values, layout))

    return kernel


def larger_value_scales(original):
    """Value scales that do not belong to the codes."""
    return value_scales(original, lambda values: values.scale.mul_(1.01))


def another_tie(original):
    """One value that lay between two codes, and the scale of its row, which follows from the codes."""

    def change(values):
        values.codes[..., 100, 5] ^= 1
        values.scale[..., 100] *= 1.01

    return value_scales(original, change)


def wrong_scale(original):
    """Logits 1 % too large."""
    return lambda **arguments: original(**arguments | {"scale": 1.01 * arguments["scale"]})


def no_merge(original):
    """Partial results that are never added."""
    function, _, version = original(64)
    return lambda _: (function, lambda *tensors: tensors[5].copy_(tensors[4]), version)


def wrong_lse(original):
    """FlashAttention whose log-sum-exp is wrong where keys are not causal."""
    function, merge, version = original(64)

    def attention(causal, **arguments):
        out, lse, *_ = function(causal=causal, **arguments)
        return out, lse if causal else lse + 0.3

    return lambda _: (attention, merge, version)


def crashes(original):
    def kernel(**arguments):
        raise RuntimeError("device kernel image is invalid\nsecond line")

    return kernel


WRONG = {
    "append-lost": ("append", one_token_lost, "append.*wrong results.*window blocks of the prompts"),
    "demote-swapped": ("demote", swapped, "demote.*wrong results.*key codes of the prompts"),
    "demote-sink": ("demote", no_sink, "demote.*wrong results"),
    "demote-scales": ("demote", larger_value_scales, "demote.*wrong results.*value scales of the prompts"),
    "prefill-window": ("prefill.attend_prefill", off_by_one_window, "attend_prefill with FlashAttention.*wrong"),
    "prefill-merge": ("prefill.flash_attention", no_merge, "attend_prefill with FlashAttention.*wrong"),
    "prefill-gathered": ("prefill.flash_attention", wrong_lse, "gather with FlashAttention.*wrong"),
    "gather-sink": ("gather", no_sink, "gather.*wrong results.*a key"),
    "gather-window": ("gather", off_by_one_window, "gather.*wrong results.*a key"),
    "decode-window": ("attend_decode", off_by_one_window, "attend_decode.*wrong results.*an output"),
    "decode-scale": ("prepare_query", wrong_scale, "attend_decode.*wrong results.*an output"),
    "launch-lost": ("write_and_prepare", one_token_lost, "append.*wrong results.*window blocks of decoded tokens"),
    "launch-scale": ("write_and_prepare", wrong_scale, "attend_decode.*wrong results.*an output"),
    "decode-crash": ("attend_decode", crashes, "attend_decode.*could not run: RuntimeError: device kernel image"),
}


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_lie_in_memory_as_a_models_do(groups):
    """vLLM's merge refuses partial outputs of unequal strides; products of batched matrices come out permuted."""
    test = module._SelfTest(layer(heads=2, groups=groups), torch.device("cpu"))
    step = test.advance([0, 0], [3, 2])
    assert step.query.is_contiguous()
    assert step.key.is_contiguous()
    assert step.value.is_contiguous()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_named(monkeypatch, case):
    name, wrong, message = WRONG[case]
    place, name = (prefill, name.removeprefix("prefill.")) if name.startswith("prefill.") else (module, name)
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(OscarSelfTestError) as caught:
        self_test(layer(), DEVICE, **GRID)
    text = str(caught.value)
    assert re.search(message, text), text
    assert "\n" not in text
    for part in ("start-up self-test on ", "2 query and 1 KV heads of size 64", "not served", "doctor"):
        assert part in text


def test_values_between_two_codes_may_fall_either_way(monkeypatch):
    monkeypatch.setattr(module, "demote", another_tie(module.demote))
    self_test(layer(), DEVICE, **GRID)


def no_cap(original):
    """A kernel that knows of no soft cap."""
    return lambda **arguments: original(**arguments | {"soft_cap": 0.0})


def flash_without_cap(original):
    """FlashAttention that knows of no soft cap."""
    function, merge, version = original(64)
    return lambda _: (lambda **arguments: function(**arguments | {"softcap": 0.0}), merge, version)


@pytest.mark.parametrize(
    ("place", "name", "wrong", "message"),
    [
        (module, "attend_decode", no_cap, "attend_decode.*wrong results"),
        (prefill, "attend_prefill", no_cap, "attend_prefill with FlashAttention.*wrong results"),
        (prefill, "flash_attention", flash_without_cap, "with FlashAttention.*wrong results"),
    ],
)
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_kernel_without_the_models_soft_cap_is_found(monkeypatch, place, name, wrong, message, cap):
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(OscarSelfTestError, match=message):
        self_test(layer(soft_cap=cap), DEVICE, **GRID)


def test_nan_is_an_error(monkeypatch):
    original = module.attend_decode

    def kernel(**arguments):
        original(**arguments)
        arguments["output"][0, 0, 0] = torch.nan

    monkeypatch.setattr(module, "attend_decode", kernel)
    with pytest.raises(OscarSelfTestError, match="largest error of an output nan"):
        self_test(layer(), DEVICE, **GRID)


def test_layers_of_one_shape_are_tested_once(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("oscar_vllm"), "parent", logging.getLogger())
    caplog.set_level(logging.INFO, logger="oscar_vllm")
    tested = []
    monkeypatch.setattr(module, "self_test", lambda layer, device: tested.append((layer.shape, device)))
    monkeypatch.setattr(module, "_passed", set())
    for candidate in (layer(), layer(), layer("spectral"), layer(groups=4), layer("token"), layer(soft_cap=30.0)):
        self_test_once(candidate, "cuda:0")
    assert len(tested) == 4  # a spectral codec of the same geometry runs the same kernels
    self_test_once(layer(), "cuda:1")
    assert len(tested) == 5
    assert [r.message.split(" in ")[0] for r in caplog.records[-2:]] == [
        "OSCAR self-test passed on cuda:0",
        "OSCAR self-test passed on cuda:1",
    ]


def test_a_failure_is_not_remembered_as_passed(monkeypatch):
    def fails(layer, device):
        raise OscarSelfTestError("no")

    monkeypatch.setattr(module, "self_test", fails)
    monkeypatch.setattr(module, "_passed", set())
    for _ in range(2):
        with pytest.raises(OscarSelfTestError):
            self_test_once(layer(), "cuda:0")
