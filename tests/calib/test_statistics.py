# SPDX-License-Identifier: Apache-2.0
"""Streamed sums against explicit matrices over all tokens at once."""

import pytest
import torch
from einops import rearrange

from calib.capture import AttentionCall, intercept_attention
from calib.simulate import Segments
from calib.statistics import LayerStatistics, Statistics
from oscar_vllm.errors import OscarArtifactError, OscarConfigError
from tests.calib.models import VOCABULARY, random_model

SINK, LENGTH = 64, 300
SEGMENTS = Segments(SINK, 128)
SAMPLES = [torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture(
    scope="module",
    params=[("llama", 2, 1, 64), ("qwen2", 2, 2, 128), ("llama", 1, 4, 64), ("qwen2", 1, 7, 64)],
    ids=["group1", "group2-d128-bias", "group4", "group7-bias"],
)
def collected(request):
    """Statistics of one model over `SAMPLES`, and the (query, key, value) of layer 1 they were made from."""
    family, kv_heads, group, head_size = request.param
    model = random_model(family=family, kv_heads=kv_heads, group=group, head_size=head_size)
    statistics, calls = Statistics(SEGMENTS), []

    def handler(call):
        if call.layer == 1:
            calls.append((call.query[0].double(), call.key[0].double(), call.value[0].double(), call.scaling))
        return statistics.observe(call)

    with torch.no_grad(), intercept_attention(model, handler):
        for sample in SAMPLES:
            model(sample[None], use_cache=False)
    return statistics.layers[1], calls


def mean_outer(parts: list[torch.Tensor]) -> torch.Tensor:
    """[H, d, d] mean of x^T x over the rows of all parts [H, n, d]."""
    rows = torch.cat(parts, 1)
    return rows.mT @ rows / rows.shape[1]


def test_first_and_second_moments(collected):
    layer, calls = collected
    heads = layer.num_kv_heads
    queries = [rearrange(q[:, SINK:], "(h g) t d -> h (g t) d", h=heads) for q, *_ in calls]
    keys = torch.cat([k[:, SINK:] for _, k, *_ in calls], 1)
    values = torch.cat([v[:, SINK:] for _, _, v, _ in calls], 1)
    assert layer.tokens.item() == 3 * (LENGTH - SINK)
    torch.testing.assert_close(layer.query_covariance, mean_outer(queries))
    torch.testing.assert_close(layer.key_mean, keys.mean(1))
    torch.testing.assert_close(layer.key_covariance, mean_outer([keys - keys.mean(1, keepdim=True)]))
    torch.testing.assert_close(layer.value_mean, values.mean(1))
    torch.testing.assert_close(layer.value_moment / layer.tokens, mean_outer([values]))


def centred_by_page(key: torch.Tensor) -> torch.Tensor:
    """[H, T - SINK, d] keys about the mean of their page."""
    pages = [key[:, a:b] for a, b in ((64, 128), (128, 256), (256, 300))]
    return torch.cat([page - page.mean(1, keepdim=True) for page in pages], 1)


def test_page_covariance_is_about_each_pages_mean(collected):
    layer, calls = collected
    torch.testing.assert_close(layer.page_covariance, mean_outer([centred_by_page(k) for _, k, *_ in calls]))


def test_output_moment_is_v_s_s_v(collected):
    """C_S from the layer's own output equals V^T S^T S V with the causal softmax S written out."""
    layer, calls = collected
    heads, expected = layer.num_kv_heads, 0.0
    for query, key, value, scaling in calls:
        group = query.shape[0] // heads
        logits = query @ key.repeat_interleave(group, 0).mT * scaling
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        softmax = logits.masked_fill(~causal, -torch.inf).softmax(-1)[:, SINK:]
        moment = value.repeat_interleave(group, 0).mT @ softmax.mT @ softmax @ value.repeat_interleave(group, 0)
        expected = expected + rearrange(moment, "(h g) d e -> h g d e", h=heads).sum(1)
    # Outputs are float32: each product is off by some 1e-7 of the largest, whatever the entry's own size.
    torch.testing.assert_close(layer.output_moment, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_queries_and_keys_weigh_what_outputs_may_lose_in_history(collected):
    layer, calls = collected
    heads, queries, keys, weight = layer.num_kv_heads, 0.0, 0.0, 0.0
    for query, key, value, scaling in calls:
        group = query.shape[0] // heads
        logits = query @ key.repeat_interleave(group, 0).mT * scaling
        at, token = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        weights = logits.masked_fill(token > at, -torch.inf).softmax(-1)
        history = (token >= SINK) & (token <= at - SEGMENTS.recent)
        v = value.repeat_interleave(group, 0)
        moved = weights[..., None] * (v[:, None] - (weights @ v)[:, :, None])  # [Hq, n, T, d]: by an error of one
        squares = value.square().sum(-1).mean(1).repeat_interleave(group, 0)[:, None, None]
        lost = (moved.square().sum(-1) * history / squares)[:, SINK + SEGMENTS.recent :]
        rows = query[:, SINK + SEGMENTS.recent :]
        moment = (rows * (lost.sum(-1, keepdim=True) + 1e-6)).mT @ rows
        queries = queries + rearrange(moment, "(h g) d e -> h g d e", h=heads).sum(1)
        by_key = rearrange(lost, "(h g) n t -> h (g n) t", h=heads).sum(1)
        centred = centred_by_page(key)
        keys = keys + centred.mT @ (centred * by_key[:, SINK:, None])
        weight = weight + by_key.sum(1)
    for actual, expected in (
        (layer.attending_moment, queries), (layer.attended_moment, keys), (layer.attended_weight, weight)
    ):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    expected = (keys + 1e-6 * layer.page_covariance) / (weight + 1e-6)[:, None, None]
    torch.testing.assert_close(layer.attended_covariance, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_head_without_values_has_a_moment_too():
    """Its outputs can lose nothing; every query and every key counts a little, alike."""
    statistics = Statistics(SEGMENTS)
    model = random_model(kv_heads=2, group=1, layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:64] = 0.0
        with intercept_attention(model, statistics.observe):
            model(SAMPLES[0][None], use_cache=False)
    moments = statistics.layers[0].attending_moment
    assert bool(moments.isfinite().all())
    assert 0 < float(moments[0].trace()) < 1e-3 * float(moments[1].trace())
    layer = statistics.layers[0]
    torch.testing.assert_close(layer.attended_covariance[0], layer.page_covariance[0])


def test_mean_field_weights_are_query_energies_of_mean_one(collected):
    layer, calls = collected
    expected = 0.0
    for query, key, value, _ in calls:
        query = rearrange(query[:, SINK:], "(h g) t d -> h (g t) d", h=layer.num_kv_heads)
        key, value = key[:, SINK:], value[:, SINK:]
        energy = (key @ query.mT).square().sum(2)  # k M_Q k^T, up to a factor
        weight = energy / energy.mean(1, keepdim=True)
        expected = expected + value.mT @ torch.diag_embed(weight) @ value
    torch.testing.assert_close(layer.mean_field_moment, expected)


def test_saved_and_loaded_goes_on_bit_for_bit(tmp_path):
    model = random_model()
    straight, first = Statistics(SEGMENTS, {"seed": 1}), Statistics(SEGMENTS, {"seed": 1})
    with torch.no_grad():
        with intercept_attention(model, straight.observe):
            for sample in SAMPLES:
                model(sample[None], use_cache=False)
        with intercept_attention(model, first.observe):
            model(SAMPLES[0][None], use_cache=False)
        first.samples = 1
        first.save(tmp_path / "s.safetensors")
        resumed = Statistics.load(tmp_path / "s.safetensors")
        assert (resumed.samples, resumed.segments, resumed.settings) == (1, SEGMENTS, {"seed": 1})
        with intercept_attention(model, resumed.observe):
            for sample in SAMPLES[1:]:
                model(sample[None], use_cache=False)
    for index, layer in straight.layers.items():
        for name in LayerStatistics.__dataclass_fields__:
            assert torch.equal(getattr(layer, name), getattr(resumed.layers[index], name)), (index, name)


def test_size_does_not_depend_on_the_number_of_samples(tmp_path):
    statistics, sizes = Statistics(Segments(0, 128)), []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        query, key = torch.randn(1, 2, 200, 64, generator=generator), torch.randn(1, 1, 200, 64, generator=generator)
        module = torch.nn.Module()
        module.num_key_value_groups = 2
        statistics.observe(AttentionCall(0, query, key, key, 0.1, None, module, None))
        statistics.samples += 1
        statistics.save(tmp_path / "s.safetensors")
        sizes.append((tmp_path / "s.safetensors").stat().st_size)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_non_finite_activations_name_the_layer(part):
    model = random_model()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, part).weight[3, 5] = float("inf")
        with (
            pytest.raises(OscarConfigError, match=r"layer 1: the \w+ holds non-finite values in sample 0.*--dtype"),
            intercept_attention(model, Statistics(SEGMENTS).observe),
        ):
            model(SAMPLES[0][None], use_cache=False)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(OscarArtifactError, match="no readable statistics file"):
        Statistics.load(path)
