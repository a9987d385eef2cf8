# SPDX-License-Identifier: Apache-2.0
"""Streaming second moments of queries, keys, values and attention outputs, in float64.

Sums only: no activation is kept, and memory does not depend on the number of samples. A statistics object can be
saved after any sample and loaded to go on, which gives bit for bit what an uninterrupted run gives.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from calib.capture import AttentionCall, attention_weights
from calib.simulate import Segments, grouped_logits
from oscar_vllm.errors import OscarArtifactError, OscarConfigError
from triton_ops.layout import PAGE_TOKENS
from triton_ops.reference import TINY

VERSION = 3
"""Of what the sums mean; a file of another version is not gone on with."""

QUERIES = 512
"""Query positions per sample in attending_moment and attended_moment, evenly spaced over those that have a history."""

MIN_ATTENDING = 1e-6
"""Added to the weights there, so that a head that never looks at history has a basis too."""


@dataclass
class LayerStatistics:
    """Sums over the tokens of one layer, sink tokens left out. H KV heads, G query heads each; float64 on the CPU.

    Attributes:
        tokens: [1] tokens summed.
        queries: [1] query vectors summed per KV head (tokens * G).
        query_moment: [H, d, d] sum of q^T q over a KV head's whole group.
        attending_moment: [H, d, d] sum of w q^T q over some of the queries, w = what the query's output may lose by
            errors of logits in history: sum over the history tokens t of |p_t (v_t - o)|^2, p the attention weights and
            o the output, over the sample's mean of |v|^2. (An error e of one logit moves o by e p_t (v_t - o).)
        attended_moment: [H, d, d] sum of w (k - m)^T (k - m) as in page_moment, w = what those outputs may lose by
            errors of this key's logits: the same terms summed over the queries.
        attended_weight: [H] sum of w.
        key_sum: [H, d] sum of k.
        key_moment: [H, d, d] sum of k^T k.
        page_moment: [H, d, d] sum of (k - m)^T (k - m), m the mean key of the token's 128-token page.
        value_sum: [H, d] sum of v.
        value_moment: [H, d, d] sum of v^T v.
        output_moment: [H, d, d] sum of o^T o over the group, o the attention output: (S V)^T (S V).
        mean_field_moment: [H, d, d] sum of w_t v_t^T v_t, w_t = k_t M_Q k_t^T scaled to mean 1 in each sample
            (M_Q of that sample): the published stand-in for output_moment.

    """

    tokens: Tensor
    queries: Tensor
    query_moment: Tensor
    attending_moment: Tensor
    attended_moment: Tensor
    attended_weight: Tensor
    key_sum: Tensor
    key_moment: Tensor
    page_moment: Tensor
    value_sum: Tensor
    value_moment: Tensor
    output_moment: Tensor
    mean_field_moment: Tensor

    @classmethod
    def zeros(cls, heads: int, head_size: int) -> "LayerStatistics":
        def zeros(name: str) -> Tensor:
            if name in ("tokens", "queries"):
                return torch.zeros(1, dtype=torch.float64)
            shape = (heads,) if name.endswith("_weight") else (heads, head_size)
            return torch.zeros(shape + (head_size,) * name.endswith("_moment"), dtype=torch.float64)

        return cls(**{field.name: zeros(field.name) for field in fields(cls)})

    @property
    def num_kv_heads(self) -> int:
        return self.key_sum.shape[0]

    @property
    def head_size(self) -> int:
        return self.key_sum.shape[1]

    @property
    def key_mean(self) -> Tensor:
        """[H, d]."""
        return self.key_sum / self.tokens

    @property
    def value_mean(self) -> Tensor:
        """[H, d]."""
        return self.value_sum / self.tokens

    @property
    def query_covariance(self) -> Tensor:
        """M_Q, [H, d, d], not centred."""
        return self.query_moment / self.queries

    @property
    def key_covariance(self) -> Tensor:
        """[H, d, d], about the mean key."""
        return self.key_moment / self.tokens - self.key_mean[:, :, None] * self.key_mean[:, None, :]

    @property
    def page_covariance(self) -> Tensor:
        """[H, d, d], about each page's own mean key."""
        return self.page_moment / self.tokens

    @property
    def attended_covariance(self) -> Tensor:
        """[H, d, d] like page_covariance, each key weighted by what outputs may lose by its errors."""
        weight = (self.attended_weight + MIN_ATTENDING)[:, None, None]
        return (self.attended_moment + MIN_ATTENDING * self.page_covariance) / weight

    def update(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, attending: Tensor, attended: Tensor, sink: int
    ) -> None:
        """Add one sample.

        Args:
            query: [Hq, T, d].
            key: [H, T, d].
            value: [H, T, d].
            output: [Hq, T, d] of the attention.
            attending: [H, d, d] the sample's own part of attending_moment.
            attended: [H, T] the weights of the sample's keys in attended_moment.
            sink: the first tokens to leave out.

        """
        heads, length, _ = key.shape
        query = rearrange(query[:, sink:].double(), "(h g) t d -> h (g t) d", h=heads)
        output = rearrange(output[:, sink:].double(), "(h g) t d -> h (g t) d", h=heads)
        key, value = key[:, sink:].double(), value[:, sink:].double()
        page = (torch.arange(sink, length, device=key.device) // PAGE_TOKENS) - sink // PAGE_TOKENS
        counts = torch.bincount(page)
        page_mean = key.new_zeros(heads, len(counts), key.shape[-1]).index_add_(1, page, key) / counts[:, None]
        centred = key - page_mean[:, page]
        query_moment = query.mT @ query
        weight = (key @ query_moment * key).sum(-1)
        weight = weight / weight.mean(1, keepdim=True)
        sums = {
            "tokens": torch.tensor([float(key.shape[1])]),
            "queries": torch.tensor([float(query.shape[1])]),
            "query_moment": query_moment,
            "attending_moment": attending,
            "attended_moment": centred.mT @ (centred * attended[:, sink:, None]),
            "attended_weight": attended[:, sink:].sum(1),
            "key_sum": key.sum(1),
            "key_moment": key.mT @ key,
            "page_moment": centred.mT @ centred,
            "value_sum": value.sum(1),
            "value_moment": value.mT @ value,
            "output_moment": output.mT @ output,
            "mean_field_moment": value.mT @ (value * weight[:, :, None]),
        }
        for name, update in sums.items():
            getattr(self, name).add_(update.to("cpu", torch.float64))


def possible_losses(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """What one sample's outputs may lose by errors of logits in history, for evenly spaced queries that have one.

    Args:
        call: where the sample is from: factor and cap of the logits, learned sinks.
        query: [Hq, T, d].
        key: [H, T, d].
        value: [H, T, d].
        segments: which tokens are history for a query.

    Returns:
        The sample's part of `LayerStatistics.attending_moment`, [H, d, d] float64, and the weights of its keys in
        attended_moment, [H, T] float64.

    """
    heads, length, _ = key.shape
    position = segments.query_positions(length, QUERIES, key.device)
    history = segments.history(position, length)
    future = torch.arange(length, device=key.device) > position[:, None]
    sinks, attending, attended = call.grouped_sinks, [], []
    for head, own in enumerate(rearrange(query[:, position], "(h g) n d -> h (g) n d", h=heads)):
        logits = grouped_logits(own, key[head : head + 1], call)[0]
        weights = attention_weights(logits.masked_fill_(future, -torch.inf), None if sinks is None else sinks[head])
        weights, v = weights.double(), value[head].double()
        squares, output = v.square().sum(-1), weights @ v
        distance = (squares - 2 * output @ v.T + output.square().sum(-1, keepdim=True)).clamp_min(0)
        lost = weights.square() * distance * history / squares.mean().clamp_min(TINY)  # [G, n, T]
        rows = own.flatten(0, 1).double()
        attending.append((rows * (lost.sum(-1).reshape(-1, 1) + MIN_ATTENDING)).mT @ rows)
        attended.append(lost.sum((0, 1)))
    return torch.stack(attending), torch.stack(attended)


class Statistics:
    """Every layer's sums, the samples they hold and the settings they were collected with.

    Attributes:
        segments: the sink is left out of every sample; sink and recent tokens are no history.
        settings: what the sums depend on (model, texts, seed, …); compared when a run is resumed.
        samples: samples summed so far.
        layers: layer index -> `LayerStatistics`.

    """

    def __init__(self, segments: Segments, settings: dict | None = None) -> None:
        self.segments = segments
        self.settings = settings or {}
        self.samples = 0
        self.layers: dict[int, LayerStatistics] = {}

    def observe(self, call: AttentionCall) -> Tensor:
        """Handler for `intercept_attention`: add the call's samples, return the exact attention output.

        Raises:
            OscarConfigError: a query, key, value or output is not finite; the message names the layer.

        """
        output = call.attend()
        heads, head_size = call.key.shape[1], call.key.shape[3]
        layer = self.layers.setdefault(call.layer, LayerStatistics.zeros(heads, head_size))
        for query, key, value, out in zip(call.query, call.key, call.value, output, strict=True):
            attending, attended = possible_losses(call, query, key, value, self.segments)
            layer.update(query, key, value, out, attending, attended, sink=self.segments.sink)
        # A sum of squares is finite exactly when every element is, and costs nothing to look at.
        for name in ("query", "key", "value", "output"):
            if not bool(torch.isfinite(getattr(layer, f"{name}_moment")).all()):
                raise OscarConfigError(
                    f"layer {call.layer}: the {name} holds non-finite values in sample {self.samples} "
                    f"({call.query.dtype}); calibrate with --dtype float32, and check the model's weights"
                )
        return output

    def save(self, path: str | os.PathLike) -> None:
        """Write to ``path`` (safetensors); an interrupted write leaves the earlier file in place."""
        path = Path(path)
        tensors = {
            f"layers.{index}.{field.name}": getattr(layer, field.name).contiguous()
            for index, layer in self.layers.items()
            for field in fields(layer)
        }
        state = {"segments": asdict(self.segments), "samples": self.samples, "settings": self.settings}
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata={"oscar_statistics": json.dumps(state)})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Statistics":
        """Read what `save` wrote.

        Raises:
            OscarArtifactError: the file is damaged or no statistics file.

        """
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["oscar_statistics"])
                tensors: dict[int, dict[str, Tensor]] = {}
                for name in file.keys():  # noqa: SIM118
                    _, index, field = name.split(".")
                    tensors.setdefault(int(index), {})[field] = file.get_tensor(name)
            statistics = cls(Segments(**state["segments"]), state["settings"])
            statistics.samples = state["samples"]
            statistics.layers = {index: LayerStatistics(**tensors[index]) for index in sorted(tensors)}
        except Exception as error:
            raise OscarArtifactError(f"{path} is no readable statistics file ({error}); delete it") from error
        return statistics
