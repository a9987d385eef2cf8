# SPDX-License-Identifier: Apache-2.0
"""Choose each layer's quantizer constants by the error that counts, on text the statistics have not seen.

Keys are judged by the Kullback-Leibler divergence between the attention weights over exact and over quantized keys,
values by the relative error of the attention output under exact weights, both with the BF16 segments in place.
Candidates are encoded and decoded by `triton_ops.reference`. Nothing is kept but sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from calib.capture import AttentionCall
from calib.rotation import LayerBasis, Recipe, data_free, layer_basis, spectrum_concentration
from calib.simulate import Segments, grouped_logits, quantized_keys, quantized_values
from calib.statistics import LayerStatistics, Statistics
from triton_ops.codec import LayerCodec

KEY_CONSTANTS = {"gauss": (0.9, 1.0, 1.1, 1.2, 1.35), "minmax": (0.9, 0.94, 0.96, 0.98, 1.0)}
VALUE_CONSTANTS = {"gauss": (0.9, 1.0, 1.1, 1.2), "minmax": (0.88, 0.92, 0.96, 1.0)}
"""Candidates. `gauss`: kappa, the step in units of the best step for a Gaussian; `minmax`: the clip quantile."""

QUERIES = 128
"""Query positions judged per sample, evenly spaced over those that have a history."""


@dataclass(frozen=True)
class LayerChoice:
    """One layer's codec and what led to it.

    Attributes:
        codec: the chosen codec.
        concentration: share of the logit's variance in the first eighth of the key directions.
        key_kl: attention-weight KL (nats per query) of ``"identity"``, ``"hadamard"`` and ``"chosen"``.
        value_error: squared output error over squared output of the same three.

    """

    codec: LayerCodec
    concentration: float
    key_kl: dict[str, float]
    value_error: dict[str, float]

    def metrics(self) -> dict:
        """The figures as plain values, for the artifact."""
        return {"concentration": self.concentration, "key_kl": self.key_kl, "value_error": self.value_error}


class QuantizerSearch:
    """Handler for `intercept_attention`: measures every candidate on every layer, then `choose`.

    Args:
        statistics: what the bases are built from.
        recipe: its constants, where given, are the only candidates.
        segments: the BF16 windows in place.

    """

    def __init__(self, statistics: Statistics, recipe: Recipe, segments: Segments) -> None:
        self.statistics, self.recipe, self.segments = statistics, recipe, segments
        self.samples = 0
        self._bases: dict[int, LayerBasis] = {}
        self._candidates: dict[int, dict[str, dict[str, LayerCodec]]] = {}
        self._errors: dict[int, dict[str, dict[str, float]]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        candidates = self._candidates.get(call.layer)
        if candidates is None:
            basis = self._bases[call.layer] = layer_basis(self.statistics.layers[call.layer], self.recipe)
            candidates = {
                part: {name: codec.to(call.query.device) for name, codec in codecs.items()}
                for part, codecs in self._build(self.statistics.layers[call.layer], basis).items()
            }
            self._candidates[call.layer] = candidates
            self._errors[call.layer] = {part: dict.fromkeys(codecs, 0.0) for part, codecs in candidates.items()}
        errors = self._errors[call.layer]
        for query, key, value in zip(call.query, call.key, call.value, strict=True):
            measure = _measure(call, query, key, value, self.segments)
            for part in ("keys", "values"):
                for name, codec in candidates[part].items():
                    errors[part][name] += measure[part](codec)
            if call.layer == min(self.statistics.layers):
                self.samples += 1
        return call.attend()

    def _build(self, layer: LayerStatistics, basis: LayerBasis) -> dict[str, dict[str, LayerCodec]]:
        """Candidate codecs of a layer: one per constant, and the two data-free bases to compare with."""
        recipe = self.recipe
        keys = [recipe.key_constant] if recipe.key_constant else KEY_CONSTANTS[recipe.quantizer]
        values = [recipe.value_constant] if recipe.value_constant else VALUE_CONSTANTS[recipe.quantizer]
        middle = keys[len(keys) // 2], values[len(values) // 2]
        compared = {
            "identity": layer_basis(layer, data_free(recipe, "identity")).codec(*middle),
            "hadamard": layer_basis(layer, data_free(recipe, "H")).codec(*middle),
        }
        return {
            "keys": compared | {str(constant): basis.codec(constant, middle[1]) for constant in keys},
            "values": compared | {str(constant): basis.codec(middle[0], constant) for constant in values},
        }

    def choose(self) -> dict[int, LayerChoice]:
        """Layer index -> the best candidate of each part, joined."""
        choices = {}
        for index, layer in sorted(self.statistics.layers.items()):
            best, tables = {}, {}
            for part, sums in self._errors[index].items():
                means = {name: total / self.samples for name, total in sums.items()}
                constants = {name: error for name, error in means.items() if name not in ("identity", "hadamard")}
                best[part] = min(constants, key=constants.__getitem__)
                tables[part] = {
                    "identity": means["identity"],
                    "hadamard": means["hadamard"],
                    "chosen": means[best[part]],
                }
            choices[index] = LayerChoice(
                codec=self._bases[index].codec(float(best["keys"]), float(best["values"])),
                concentration=spectrum_concentration(layer, self.recipe),
                key_kl=tables["keys"],
                value_error=tables["values"],
            )
        return choices


def _measure(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> dict[str, Callable[[LayerCodec], float]]:
    """Error functions of one sample: query [Hq, T, d], key and value [H, T, d]."""
    length = key.shape[1]
    first = segments.sink + segments.recent
    position = torch.linspace(first, length - 1, min(QUERIES, length - first), device=key.device).long()
    query = query[:, position]
    history = segments.history(position, length)
    future = torch.arange(length, device=key.device) > position[:, None]
    exact = grouped_logits(query, key, call).masked_fill_(future, -torch.inf)
    exact_lse = exact.logsumexp(-1)
    weights = (exact - exact_lse[..., None]).exp_()
    output = weights @ value.float()[:, None]
    history_weights = weights * history
    value_weights = rearrange(history_weights, "h g n t -> h (g n) t")

    def key_kl(codec: LayerCodec) -> float:
        # With logits s and s': KL = sum_t p_t (s_t - s'_t) + log sum exp s' - log sum exp s.
        logits = grouped_logits(query, quantized_keys(key, codec, segments.sink), call)
        difference = (history_weights * (exact.where(history, 0.0) - logits)).sum(-1)
        return float((difference + torch.where(history, logits, exact).logsumexp(-1) - exact_lse).mean())

    def value_error(codec: LayerCodec) -> float:
        error = value_weights @ (quantized_values(value, codec) - value.float())
        return float(error.square().sum() / output.square().sum())

    return {"keys": key_kl, "values": value_error}
