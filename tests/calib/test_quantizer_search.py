# SPDX-License-Identifier: Apache-2.0
"""The search measures what its docstring says, and picks the least."""

from dataclasses import replace

import pytest
import torch

from calib.capture import AttentionCall
from calib.quantizer_search import KEY_CONSTANTS, QUERIES, SPECTRAL_KAPPA, QuantizerSearch
from calib.rotation import PRESETS, Recipe, layer_basis
from calib.simulate import Segments, page_store, quantized_keys, quantized_values, segmented_attention
from calib.statistics import Statistics

HEADS, GROUP, D, LENGTH = 2, 3, 64, 700
SEGMENTS = Segments(sink=64, recent=128)
OPEN = replace(PRESETS["default"], spread=None, attended=None)
PLAIN = replace(OPEN, spread="none", attended=0.0)


def attention_call(seed: int) -> AttentionCall:
    """Queries and keys with a steep spectrum, a key bias, and values."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0.5, -1, D)
    query = torch.randn(1, HEADS * GROUP, LENGTH, D, generator=generator) * spectrum
    key = torch.randn(1, HEADS, LENGTH, D, generator=generator) * spectrum.flip(0).sqrt() + torch.linspace(-2, 2, D)
    value = torch.randn(1, HEADS, LENGTH, D, generator=generator)
    module = torch.nn.Module()
    module.num_key_value_groups = GROUP
    return AttentionCall(0, query, key, value, D**-0.5, None, module, None)


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    statistics = Statistics(SEGMENTS)
    for seed in range(3):
        statistics.observe(attention_call(seed))
    return statistics


def run(statistics: Statistics, recipe: Recipe) -> QuantizerSearch:
    search = QuantizerSearch(statistics, recipe, SEGMENTS)
    for seed in (10, 11):
        search(attention_call(seed))
    return search


def brute_force(codec) -> tuple[float, float]:
    """Key KL and value error of one codec over both samples, from full attention matrices."""
    kls, errors = [], []
    for seed in (10, 11):
        call = attention_call(seed)
        query, key, value = call.query[0], call.key[0], call.value[0]
        position = torch.linspace(192, LENGTH - 1, QUERIES).long()
        token = torch.arange(LENGTH)
        history = (token >= 64) & (token <= position[:, None] - 128)
        causal = token <= position[:, None]

        def logits(keys, query=query, position=position, scaling=call.scaling):
            return query[:, position] @ keys.repeat_interleave(GROUP, 0).mT * scaling

        exact = logits(key).masked_fill(~causal, -torch.inf).log_softmax(-1)
        mixed = torch.where(history, logits(quantized_keys(key, codec, 64)), logits(key))
        mixed = mixed.masked_fill(~causal, -torch.inf).log_softmax(-1)
        kls.append((exact.exp() * (exact - mixed).masked_fill(~causal, 0)).sum(-1).mean())
        wrong = exact.exp() * history @ (quantized_values(value, codec) - value).repeat_interleave(GROUP, 0)
        errors.append(wrong.square().sum() / (exact.exp() @ value.repeat_interleave(GROUP, 0)).square().sum())
    return float(sum(kls) / 2), float(sum(errors) / 2)


def test_reported_errors_equal_brute_force(statistics):
    choice = run(statistics, OPEN).choose(PLAIN)[0]
    kl, error = brute_force(choice.codec)
    assert choice.key_kl["chosen"] == pytest.approx(kl, rel=1e-3)
    assert choice.value_error["chosen"] == pytest.approx(error, rel=1e-4)


def test_an_alternative_has_the_constant_of_spectral_keys(statistics):
    search = run(statistics, OPEN)
    kls = []
    for alternative in OPEN.alternatives():
        choice = search.choose(alternative)[0]
        assert choice.recipe == alternative
        basis = layer_basis(statistics.layers[0], alternative)
        value_constant = choice.codec.value_quantizer.constant
        expected, _ = brute_force(basis.codec(SPECTRAL_KAPPA, value_constant))
        assert choice.key_kl["chosen"] == pytest.approx(expected, rel=1e-3)
        kls.append(choice.key_kl["chosen"])
    assert len(set(kls)) > 1


def test_the_best_constant_of_a_rotation_is_chosen(statistics):
    recipe = Recipe(allocation="uniform", zero="page")
    choice = run(statistics, recipe).choose(recipe)[0]
    basis = layer_basis(statistics.layers[0], recipe)
    value_constant = choice.codec.value_quantizer.constant
    kls = {constant: brute_force(basis.codec(constant, value_constant))[0] for constant in KEY_CONSTANTS["gauss"]}
    assert len(kls) == 5
    assert choice.key_kl["chosen"] == pytest.approx(min(kls.values()), rel=1e-3)


def test_spectral_bits_beat_the_data_free_bases_on_a_steep_spectrum(statistics):
    kl = run(statistics, OPEN).choose(PLAIN)[0].key_kl
    assert kl["chosen"] < 0.5 * kl["hadamard"]
    assert kl["chosen"] < 0.5 * kl["identity"]


def test_given_constants_are_kept(statistics):
    codec = run(statistics, PRESETS["reference"]).choose(PRESETS["reference"])[0].codec
    assert (codec.key_quantizer.constant, codec.value_quantizer.constant) == (0.96, 0.92)


def test_segmented_attention_equals_masked_full_attention(statistics):
    """The blocks of `segmented_attention` against one matrix with a `where` between exact and stored tokens."""
    codec = layer_basis(statistics.layers[0], Recipe(spread="groups", attended=0.0)).codec(1.1, 1.0)
    call = attention_call(10)
    query, key, value = call.query[0], call.key[0], call.value[0]
    at, token = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    history = (token >= 64) & (token <= at - 128)
    keys = [quantized_keys(key, codec, 64), key]
    stored, exact = (query @ k.repeat_interleave(GROUP, 0).mT * call.scaling for k in keys)
    weights = torch.where(history, stored, exact).masked_fill(token > at, -torch.inf).softmax(-1)
    values = [v.repeat_interleave(GROUP, 0) for v in (quantized_values(value, codec), value)]
    expected = (weights * history) @ values[0] + (weights * ~history) @ values[1]
    torch.testing.assert_close(
        segmented_attention(call, page_store(codec, SEGMENTS.sink), SEGMENTS)[0], expected, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(segmented_attention(call, None, SEGMENTS), call.attend(), rtol=1e-4, atol=1e-5)


def test_segmented_attention_is_the_servers_invariant_rule(statistics):
    """The same call through the packed pages and `attend` of the serving path."""
    from triton_ops.layout import PageLayout
    from triton_ops.reference import attend, encode_pages

    codec = layer_basis(statistics.layers[0], Recipe(spread="groups", attended=0.0)).codec(1.1, 1.0)
    call = attention_call(11)
    query, key, value = (rows[0].transpose(0, 1).contiguous() for rows in (call.query, call.key, call.value))
    layout, pages = PageLayout(D, codec.zero), LENGTH // 128
    first = torch.arange(pages) * 128
    packed = encode_pages(
        *(rows[: pages * 128].reshape(pages, 128, HEADS, D) for rows in (key, value)),
        first, codec=codec, layout=layout, sink=64,
    )  # fmt: skip
    expected, _ = attend(
        query, key, value, pages=packed, windows=torch.zeros(1, HEADS, 16, 2 * D), page_table=torch.arange(pages)[None],
        window_table=torch.zeros(1, LENGTH // 16 + 1, dtype=torch.long), query_start_loc=torch.tensor([0, LENGTH]),
        seq_lens=torch.tensor([LENGTH]), codec=codec, layout=layout, scale=call.scaling, sink=64, recent=128,
        prefill="invariant",
    )  # fmt: skip
    actual = segmented_attention(call, page_store(codec, SEGMENTS.sink), SEGMENTS)[0].transpose(0, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
