# SPDX-License-Identifier: Apache-2.0
"""Errors of each layer on the exact model's own activations, for `eval_fidelity.py`, and how they rank final KL.

Per layer and configuration, over 128 evenly spaced query positions of every window and all heads, with the BF16
segments in place: the KL divergence of the attention weights (nats per query) and the squared error of the attention
output over its square. A learned sink takes its share of the weights in both.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture import AttentionCall, attention_weights, intercept_attention, log_normalizer
from calib.simulate import Segments, grouped_logits

FIELDS = ("model", "configuration", "text", "windows", "tokens", "sink", "recent", "layer", "attention_kl",
          "output_error", "commit", "versions", "command")  # fmt: skip

QUERIES = 128

Errors = dict[str, dict[int, tuple[float, float]]]
"""Configuration -> layer -> (attention KL, output error)."""


def attention_kl(exact: Tensor, actual: Tensor, sinks: Tensor | None) -> Tensor:
    """[..., n] KL divergence of the attention weights, nats.

    Args:
        exact: [..., n, T] logits; masked ones are minus infinity.
        actual: the same with other logits where the keys differ.
        sinks: [...] learned sinks of the heads, or None.

    """
    change = (exact - actual).masked_fill(exact == -torch.inf, 0.0)
    # A learned sink's logit is the same in both, so its own term is in the difference of the denominators.
    normalizers = log_normalizer(actual, sinks) - log_normalizer(exact, sinks)
    return (attention_weights(exact, sinks) * change).sum(-1) + normalizers


def layer_errors(call: AttentionCall, store: Any, segments: Segments) -> tuple[float, float]:
    """(attention KL, output error) of one store on one call with a batch of one."""
    key, value = call.key[0], call.value[0].float()
    length = key.shape[1]
    position = segments.query_positions(length, QUERIES, key.device)
    query, history = call.query[0][:, position], segments.history(position, length)
    future = torch.arange(length, device=key.device) > position[:, None]
    stored_key, stored_value = store(key, value)
    exact = grouped_logits(query, key, call).masked_fill(future, -torch.inf)
    actual = grouped_logits(query, stored_key, call).where(history, exact)
    sinks = call.grouped_sinks
    p, q = attention_weights(exact, sinks), attention_weights(actual, sinks)
    output = p @ value[:, None]
    approximate = (q * history) @ stored_value[:, None] + (q * ~history) @ value[:, None]
    kl = attention_kl(exact, actual, sinks).mean()
    return float(kl), float((approximate - output).square().sum() / output.square().sum())


def measure(model: PreTrainedModel, windows: list[Tensor], chosen: dict[str, Any], segments: Segments) -> Errors:
    """Means over the windows; configurations that are exact are left out."""
    errors: Errors = {name: {} for name, configuration in chosen.items() if configuration.store is not None}

    def observe(call: AttentionCall) -> Tensor:
        for name, layers in errors.items():
            store = chosen[name].store(call.layer)
            if store is not None:
                before = layers.get(call.layer, (0.0, 0.0))
                new = layer_errors(call, store, segments)
                layers[call.layer] = before[0] + new[0] / len(windows), before[1] + new[1] / len(windows)
        return call.attend()

    with intercept_attention(model, observe):
        for window in windows:
            model(window[None].to(model.device), use_cache=False, logits_to_keep=1)
    return {name: layers for name, layers in errors.items() if layers}


def spearman(x: list[float], y: list[float]) -> float:
    """Rank correlation of two lists without ties."""
    rank = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (x, y)]
    return float(torch.corrcoef(torch.stack(rank))[0, 1])


def summary(errors: Errors, kl: dict[str, float]) -> str:
    """Means over the layers, and their rank correlation with the final KL over the configurations."""
    lines = [f"{'configuration':24s} {'attention KL':>13s} {'output error':>13s} {'final KL':>10s}"]
    means = {name: [_mean([error[i] for error in layers.values()]) for i in (0, 1)] for name, layers in errors.items()}
    for name, (attention, output) in means.items():
        lines.append(f"{name:24s} {attention:13.5f} {output:13.5f} {kl[name]:10.5f}")
    if len(means) > 2:
        final = [kl[name] for name in means]
        ranks = [spearman([mean[i] for mean in means.values()], final) for i in (0, 1)]
        lines.append(f"rank correlation with the final KL: attention KL {ranks[0]:.2f}, output error {ranks[1]:.2f}")
    return "\n".join(lines)


def rows(errors: Errors) -> list[dict[str, Any]]:
    """For the CSV file."""
    return [
        {"configuration": name, "layer": layer, "attention_kl": attention, "output_error": output}
        for name, layers in errors.items()
        for layer, (attention, output) in layers.items()
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
