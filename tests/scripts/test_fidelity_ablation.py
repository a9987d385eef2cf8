# SPDX-License-Identifier: Apache-2.0
"""The changes of the ablation are the ones that their names say, and ratios have the error of known numbers."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from calib.capture import intercept_attention
from calib.simulate import Segments, quantized_values
from tests.calib.models import random_model

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
SEGMENTS = Segments(sink=64, recent=128)


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("fidelity_ablation")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def model():
    return random_model(kv_heads=2, group=2, layers=1)


def windows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (512,), generator=generator) for _ in range(count)]


def test_every_change_differs_from_the_unchanged_recipe_in_its_own_part(script, model):
    with torch.inference_mode():
        handlers = script.changes(model, windows(3), windows(1), SEGMENTS)
    codecs = {name: handler.codecs[0] for name, handler in handlers.items()}
    base = codecs.pop("unchanged")
    for name, codec in codecs.items():
        same_values = torch.equal(codec.value_rotation, base.value_rotation)
        assert same_values == (not name.startswith("value basis")), name
        assert torch.equal(codec.value_mean, base.value_mean) == (name != "values about their mean"), name
        assert (codec.value_quantizer == base.value_quantizer) == (not name.startswith("value kappa")), name
        assert (type(handlers[name]) is script.MiddleValues) == (name in ("value levels middle", "levels middle")), name
        if name.startswith("value"):
            identity = codec.value_rotation[0] @ codec.value_rotation[0].T
            torch.testing.assert_close(identity, torch.eye(64), atol=1e-5, rtol=0)
            assert torch.equal(codec.key_encode, base.key_encode), name
    assert not torch.allclose(codecs["queries by W_O"].key_encode, base.key_encode)
    assert not torch.allclose(codecs["queries by attention"].key_encode, base.key_encode)
    for name, kappa in (("key kappa 1.1", 1.1), ("key kappa 1.2", 1.2)):
        torch.testing.assert_close(codecs[name].key_encode, base.key_encode * (script.KAPPA / kappa))
    # From the middle of its cells every direction comes back by a factor of one; 2 bits of the best step 12 % smaller.
    for name in ("key levels middle", "levels middle"):
        middle = codecs[name]
        assert torch.equal(middle.key_encode, base.key_encode)
        product = (middle.key_encode * middle.key_query).sum(1)
        torch.testing.assert_close(product, 4.0**middle.key_digit, rtol=1e-4, atol=0)
        shrunk = (middle.key_query / base.key_query)[base.key_levels[:, None].expand_as(base.key_query) == 4]
        assert bool(((shrunk - 0.8812).abs() < 1e-3).any())
    assert bool((codecs["attended 0"].key_levels != base.key_levels).any())
    assert torch.equal(codecs["attended 0"].value_rotation, base.value_rotation)
    # kappa scales a head's matrices; per layer both heads have the same factor.
    factors = {
        name: (base.key_encode / codecs[name].key_encode).nanmean((1, 2))
        for name in ("kappa by layer", "kappa by head")
    }
    assert factors["kappa by layer"][0] == pytest.approx(float(factors["kappa by layer"][1]), rel=1e-4)
    for factor in factors["kappa by head"].tolist():
        assert min(abs(factor * script.KAPPA - kappa) for kappa in script.KEY_CONSTANTS["gauss"]) < 1e-3


def test_values_from_the_middle_of_their_cells_shrink(script, model):
    with torch.inference_mode():
        codec = script.changes(model, windows(3), windows(1), SEGMENTS)["unchanged"].codecs[0]
    value = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(1))
    for back, slope in ((script.middle_values(value, codec), 0.881), (quantized_values(value, codec), 1.0)):
        assert float((back * value).sum() / value.square().sum()) == pytest.approx(slope, abs=0.01)


def test_the_other_moments_are_those_of_their_definitions(script, model):
    seen = []

    def observe(call):
        seen.append((call, script.other_moments(call, SEGMENTS)))
        return call.attend()

    with torch.inference_mode(), intercept_attention(model, observe):
        model(windows(1)[0][None, :250], use_cache=False)
    call, (by_output, by_attention) = seen[0]
    weight = call.module.o_proj.weight.double()
    expected, expected_by_attention = (torch.zeros(2, 64, 64, dtype=torch.float64) for _ in range(2))
    lost = {}
    for head in range(4):
        key, value = call.key[0, head // 2].double(), call.value[0, head // 2].double()
        reads = weight[:, 64 * head : 64 * (head + 1)]
        for at in range(192, 250):
            p = (call.query[0, head, at].double() @ key[: at + 1].T * call.scaling).softmax(-1)
            output = p @ value[: at + 1]
            history = range(64, at - 128 + 1)
            lost[head, at] = sum(p[t] ** 2 * (reads @ (value[t] - output)).square().sum() for t in history)
            attention = sum(p[t] * (1 - p[t]) for t in history)
            outer = torch.outer(call.query[0, head, at].double(), call.query[0, head, at].double())
            expected_by_attention[head // 2] += (attention + 1e-6) * outer
    mean = sum(lost.values()) / len(lost)
    for (head, at), weight_of in lost.items():
        query = call.query[0, head, at].double()
        expected[head // 2] += (weight_of / mean + 1e-6) * torch.outer(query, query)
    # Logits are float32 and large in this model, so weights are good to about four digits.
    for moment, definition in ((by_output, expected), (by_attention, expected_by_attention)):
        torch.testing.assert_close(moment, definition, rtol=0, atol=3e-4 * float(definition.abs().max()))


def test_the_error_of_a_ratio_is_that_of_known_numbers(script):
    base = [torch.ones(128), torch.ones(64)]
    assert script.paired_ratio([2 * x for x in base], base) == (2.0, 0.0)
    actual = [torch.cat([torch.full((64,), 1.0), torch.full((64,), 2.0)]), torch.full((64,), 3.0)]
    ratio, stderr = script.paired_ratio(actual, base)
    assert ratio == 2.0
    assert stderr == pytest.approx(1 / 3**0.5)


def test_the_positions_behind_the_last_whole_block_count_in_the_ratio(script):
    """As they do in the means of the table."""
    base = [torch.ones(192)]
    actual = [torch.cat([torch.ones(64), torch.full((64,), 2.0), torch.full((64,), 3.0)])]
    _, stderr = script.paired_ratio(actual, base)
    more = torch.full((32,), 9.0)
    ratio, _ = script.paired_ratio([torch.cat([actual[0], more])], [torch.ones(224)])
    assert stderr == pytest.approx(1 / 3**0.5)
    assert ratio == pytest.approx((192 * 2 + 32 * 9) / 224)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/model"], "error: model folder '/no/model' does not exist"),
        (["--model", "m", "--tokens", "500"], "error: --tokens 500 leaves too little history; use at least 577"),
        (["--model", "m", "--calibration-tokens", "9"], "error: --calibration-tokens 9 leaves too little history"),
    ],
)
def test_bad_values_end_in_one_line(script, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["fidelity_ablation.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        script.main()
