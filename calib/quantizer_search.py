# SPDX-License-Identifier: Apache-2.0
"""Choose each layer's quantizer constants by the error that counts, on text the statistics lack.

Keys are judged by the Kullback-Leibler divergence between the attention weights over exact and over quantized keys,
values by the relative error of the attention output under exact weights, both with the BF16 segments in place.
Candidates are encoded and decoded by `triton_ops.reference`. Nothing is kept but sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from calib.capture import AttentionCall, log_normalizer
from calib.rotation import Recipe, data_free, layer_basis, spectrum_concentration
from calib.simulate import Segments, grouped_logits, quantized_keys, quantized_values
from calib.statistics import LayerStatistics, Statistics
from triton_ops.codec import LayerCodec

KEY_CONSTANTS = {"gauss": (0.9, 1.0, 1.1, 1.2, 1.4), "minmax": (0.9, 0.94, 0.96, 0.98, 1.0)}
VALUE_CONSTANTS = {"gauss": (0.9, 1.0, 1.1, 1.2), "minmax": (0.88, 0.92, 0.96, 1.0)}
"""Candidates. `gauss`: kappa, the step in units of the best step for a Gaussian; `minmax`: the clip quantile."""

SPECTRAL_KAPPA = 1.1
"""kappa of keys with spectral allocation. A search by layer or by head, by attention KL, gains nothing
(docs/fidelity.md, "Keys that many queries attend to")."""

QUERIES = 128
"""Query positions judged per sample, evenly spaced over those that have a history."""


@dataclass(frozen=True)
class LayerChoice:
    """One layer's codec and what led to it.

    Attributes:
        codec: the chosen codec.
        recipe: the chosen alternative of the run's recipe.
        concentration: share of the logit's variance in the first eighth of the key directions.
        key_kl: attention-weight KL (nats per query) of ``"identity"``, ``"hadamard"`` and ``"chosen"``.
        value_error: squared output error over squared output of the same three.

    """

    codec: LayerCodec
    recipe: Recipe
    concentration: float
    key_kl: dict[str, float]
    value_error: dict[str, float]

    def metrics(self) -> dict:
        """The figures as plain values, for the artifact."""
        return {
            "attended": self.recipe.attended,
            "spread": self.recipe.spread,
            "concentration": self.concentration,
            "key_kl": self.key_kl,
            "value_error": self.value_error,
        }


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
        self._candidates: dict[int, _Candidates] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        candidates = self._candidates.get(call.layer)
        if candidates is None:
            statistics = self.statistics.layers[call.layer]
            candidates = self._candidates[call.layer] = _Candidates(statistics, self.recipe, call.query.device)
        for query, key, value in zip(call.query, call.key, call.value, strict=True):
            key_kl, value_error = _measure(call, query, key, value, self.segments)
            candidates.add(key_kl, value_error)
            if call.layer == min(self.statistics.layers):
                self.samples += 1
        return call.attend()

    def choose(self, alternative: Recipe) -> dict[int, LayerChoice]:
        """Layer index -> the codec with the best constants for one of the recipe's alternatives."""
        number = self.recipe.alternatives().index(alternative)
        return {
            index: self._candidates[index].choose(self.samples, number) for index in sorted(self.statistics.layers)
        }


class _Candidates:
    """One layer's candidate codecs and the sums of their errors."""

    def __init__(self, statistics: LayerStatistics, recipe: Recipe, device: torch.device) -> None:
        self.statistics, self.recipe = statistics, recipe
        keys = key_constants(recipe)
        given = recipe.value_constant
        values = VALUE_CONSTANTS[recipe.quantizer] if given is None else (given,)
        middle = keys[len(keys) // 2], values[len(values) // 2]
        compared = {
            "identity": layer_basis(statistics, data_free(recipe, "identity")).codec(*middle).to(device),
            "hadamard": layer_basis(statistics, data_free(recipe, "H")).codec(*middle).to(device),
        }
        self.bases = [layer_basis(statistics, alternative) for alternative in recipe.alternatives()]
        self.keys: dict[_Name, LayerCodec] = dict(compared) | {
            (number, constant): basis.codec(constant, middle[1]).to(device)
            for number, basis in enumerate(self.bases)
            for constant in keys
        }
        self.values: dict[_Name, LayerCodec] = dict(compared) | {
            (0, constant): self.bases[0].codec(middle[0], constant).to(device) for constant in values
        }
        self.key_kl = dict.fromkeys(self.keys, 0.0)
        self.value_error = dict.fromkeys(self.values, 0.0)

    def add(self, key_kl: Callable[[LayerCodec], float], value_error: Callable[[LayerCodec], float]) -> None:
        """Measure every candidate on one sample."""
        for name, codec in self.keys.items():
            self.key_kl[name] += key_kl(codec)
        for name, codec in self.values.items():
            self.value_error[name] += value_error(codec)

    def choose(self, samples: int, alternative: int) -> LayerChoice:
        key, value = _best(self.key_kl, alternative), _best(self.value_error, 0)
        basis = self.bases[key[0]]
        return LayerChoice(
            codec=basis.codec(key[1], value[1]),
            recipe=basis.recipe,
            concentration=spectrum_concentration(self.statistics, self.recipe),
            key_kl=_compare(self.key_kl, key, samples),
            value_error=_compare(self.value_error, value, samples),
        )


def key_constants(recipe: Recipe) -> tuple[float, ...]:
    """The candidates for keys."""
    if recipe.key_constant is not None:
        return (recipe.key_constant,)
    return (SPECTRAL_KAPPA,) if recipe.allocation == "spectral" else KEY_CONSTANTS[recipe.quantizer]


_Name = str | tuple[int, float]
"""A candidate: a basis to compare with, or (alternative of the recipe, constant)."""


def _best(errors: dict[_Name, float], alternative: int) -> tuple[int, float]:
    names = [name for name in errors if isinstance(name, tuple) and name[0] == alternative]
    return min(names, key=errors.__getitem__)


def _compare(errors: dict[_Name, float], chosen: _Name, samples: int) -> dict[str, float]:
    names: dict[str, _Name] = {"identity": "identity", "hadamard": "hadamard", "chosen": chosen}
    return {label: errors[name] / samples for label, name in names.items()}


def _measure(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> tuple[Callable[[LayerCodec], float], Callable[[LayerCodec], float]]:
    """(key KL, value error) of a codec on one sample: query [Hq, T, d], key and value [H, T, d]."""
    length = key.shape[1]
    position = segments.query_positions(length, QUERIES, key.device)
    query = query[:, position]
    history = segments.history(position, length)
    future = torch.arange(length, device=key.device) > position[:, None]
    exact = grouped_logits(query, key, call).masked_fill_(future, -torch.inf)
    sinks = call.grouped_sinks
    exact_lse = log_normalizer(exact, sinks)
    weights = (exact - exact_lse[..., None]).exp_()
    output = weights @ value.float()[:, None]
    history_weights = weights * history
    value_weights = rearrange(history_weights, "h g n t -> h (g n) t")

    def key_kl(codec: LayerCodec) -> float:
        # With logits s and s': KL = sum_t p_t (s_t - s'_t) + log sum exp s' - log sum exp s; a learned sink stays.
        logits = grouped_logits(query, quantized_keys(key, codec, segments.sink), call)
        difference = (history_weights * (exact.where(history, 0.0) - logits)).sum(-1)
        lse = log_normalizer(torch.where(history, logits, exact), sinks)
        return float((difference + lse - exact_lse).mean())

    def value_error(codec: LayerCodec) -> float:
        error = value_weights @ (quantized_values(value, codec) - value.float())
        return float(error.square().sum() / output.square().sum())

    return key_kl, value_error
