# SPDX-License-Identifier: Apache-2.0
"""The interception sees what the model attends with, changes nothing by itself, and always leaves."""

import pytest
import torch

from calib.capture import intercept_attention
from oscar_vllm.errors import OscarConfigError, OscarUnsupportedError
from tests.calib.models import VOCABULARY, random_model

TOKENS = torch.arange(96)[None] % VOCABULARY


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_passing_through_changes_no_logit(family):
    model = random_model(family=family)
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        with intercept_attention(model, lambda call: call.attend()):
            actual = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kv_heads", "group", "head_size"), [(2, 1, 64), (2, 2, 128), (1, 4, 64), (1, 7, 64)])
def test_the_call_holds_every_head(kv_heads, group, head_size):
    model = random_model(kv_heads=kv_heads, group=group, head_size=head_size)
    calls = []

    def handler(call):
        calls.append(call)
        return call.attend()

    with torch.no_grad(), intercept_attention(model, handler):
        model(TOKENS, use_cache=False)
    assert [call.layer for call in calls] == [0, 1]
    assert calls[0].query.shape == (1, kv_heads * group, 96, head_size)
    assert calls[0].key.shape == calls[0].value.shape == (1, kv_heads, 96, head_size)


def test_heads_without_a_page_of_their_own_size_are_padded():
    model = random_model(kv_heads=2, group=3, head_size=80)
    calls = []

    def handler(call):
        calls.append(call)
        return call.attend()

    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        with intercept_attention(model, handler):
            actual = model(TOKENS, use_cache=False).logits
    for heads, count in ((calls[1].query, 6), (calls[1].key, 2), (calls[1].value, 2)):
        assert heads.shape == (1, count, 96, 128)
        assert heads[..., :80].all()
        assert not heads[..., 80:].any()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_fit_no_page_are_refused():
    model = random_model(head_size=100)
    message = r"layer 0 \(LlamaAttention\): head size 100 fits no INT2 page"
    with (
        torch.no_grad(),
        pytest.raises(OscarUnsupportedError, match=message),
        intercept_attention(model, lambda call: call.attend()),
    ):
        model(TOKENS, use_cache=False)


def test_the_output_is_what_the_model_goes_on_with():
    model = random_model()
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        with intercept_attention(model, lambda call: torch.zeros_like(call.query)):
            changed = model(TOKENS, use_cache=False).logits
    assert not torch.allclose(changed, expected, atol=1e-3)


def test_sliding_window_layers_are_left_out_and_named():
    model = random_model(family="gemma3", layers=4)
    with torch.no_grad(), intercept_attention(model, lambda call: call.attend()) as interception:
        model(TOKENS, use_cache=False)
    assert interception.layers == {1, 3}
    assert interception.skipped == {0: "sliding window of 32 tokens", 2: "sliding window of 32 tokens"}


def test_a_soft_cap_is_applied():
    from calib.capture import AttentionCall

    torch.manual_seed(0)
    query, key, value = 4 * torch.randn(1, 2, 8, 64), torch.randn(1, 1, 8, 64), torch.randn(1, 1, 8, 64)
    call = AttentionCall(0, query, key, value, 0.125, 2.0, torch.nn.Module(), None)
    logits = 2.0 * torch.tanh(query @ key.mT * 0.125 / 2.0)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    expected = logits.masked_fill(~causal, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(call.attend(), expected)


def test_learned_sinks_take_their_share():
    """The attention weights are those of the model's own eager attention, sliding layers and full ones."""
    from calib.capture import attention_weights
    from calib.simulate import Segments, grouped_logits, segmented_attention

    model = random_model(family="gpt_oss", kv_heads=2, group=3)
    model.set_attn_implementation("eager")
    calls = []
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False, output_attentions=True)
        with intercept_attention(model, lambda call: calls.append(call) or call.attend()):
            model(TOKENS, use_cache=False)
    (call,) = calls
    causal = torch.ones(96, 96, dtype=torch.bool).tril()
    logits = grouped_logits(call.query[0], call.key[0], call).masked_fill(~causal, -torch.inf)
    weights = attention_weights(logits, call.grouped_sinks).flatten(0, 1)
    torch.testing.assert_close(weights, expected.attentions[1][0], rtol=1e-3, atol=1e-4)
    assert 0.2 < 1 - weights.sum(-1).mean().item() < 0.8  # the sinks' share
    read = segmented_attention(call, None, Segments(sink=16, recent=32))
    torch.testing.assert_close(read, call.attend(), rtol=1e-5, atol=1e-5)


def test_a_learned_sink_is_one_more_logit():
    from calib.capture import attention_weights, log_normalizer

    torch.manual_seed(0)
    logits, sinks = 3 * torch.randn(2, 3, 5, 7), 2 * torch.randn(2, 3)
    logits[..., 2, 4:] = -torch.inf
    appended = torch.cat([logits, sinks[..., None, None].expand(2, 3, 5, 1)], -1)
    torch.testing.assert_close(log_normalizer(logits, sinks), appended.logsumexp(-1))
    torch.testing.assert_close(attention_weights(logits, sinks), appended.softmax(-1)[..., :-1])


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_attention_function_is_restored_after_an_exception(before):
    model = random_model()
    model.set_attn_implementation(before)

    def fail(call):
        raise RuntimeError("stop")

    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        with pytest.raises(RuntimeError, match="stop"), intercept_attention(model, fail):
            model(TOKENS, use_cache=False)
        assert model.config._attn_implementation == before
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected)
        with intercept_attention(model, lambda call: call.attend()):  # and it can be entered again
            pass


def test_two_interceptions_at_once_are_refused():
    model = random_model()
    with (
        intercept_attention(model, lambda call: call.attend()),
        pytest.raises(OscarConfigError, match="intercepted already"),
        intercept_attention(model, lambda call: call.attend()),
    ):
        pass
    with torch.no_grad():
        model(TOKENS, use_cache=False)


def test_keys_and_values_of_different_sizes_are_refused():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, vocab_size=VOCABULARY,
        first_k_dense_replace=1,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    with (
        torch.no_grad(),
        pytest.raises(OscarUnsupportedError, match=r"layer 0 .* keys of size 48 and values of size 32"),
        intercept_attention(model, lambda call: call.attend()),
    ):
        model(TOKENS, use_cache=False)
