# SPDX-License-Identifier: Apache-2.0
"""Attention over a quantized cache inside transformers, with the ops that the server uses.

A query at position q reads tokens t with sink <= t <= q - recent from INT2 pages (`triton_ops.reference` encodes and
decodes them) and all others exactly. A history token's page is always complete because recent >= 128.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from calib.capture import AttentionCall, attention_weights
from triton_ops.codec import LayerCodec
from triton_ops.layout import PAGE_TOKENS
from triton_ops.reference import decode_keys, decode_values, encode_keys, encode_values

_QUERIES = 512
"""Queries attended at a time: bounds memory, and lets a block skip the tokens behind it."""


@dataclass(frozen=True)
class Segments:
    """BF16 tokens at the start (``sink``) and at the end (``recent``, the query's own token included)."""

    sink: int = 64
    recent: int = 256

    def history(self, positions: Tensor, length: int) -> Tensor:
        """[n, length] bool: what queries at ``positions`` [n] read from pages."""
        token = torch.arange(length, device=positions.device)
        return (token >= self.sink) & (token <= positions[:, None] - self.recent)

    def query_positions(self, length: int, count: int, device: torch.device | None = None) -> Tensor:
        """Evenly spaced positions of queries that have a history.

        Args:
            length: tokens of the text.
            count: positions wanted; fewer where the text has fewer.
            device: where the result lies; default: the CPU.

        Returns:
            [n] int64, ascending.

        """
        first = self.sink + self.recent
        return torch.linspace(first, length - 1, min(count, length - first), device=device).long()


def _pages(rows: Tensor) -> Tensor:
    """[H, T, d] -> the complete pages [P, H, 128, d]."""
    whole = rows.shape[1] // PAGE_TOKENS * PAGE_TOKENS
    return rearrange(rows[:, :whole], "h (p t) d -> p h t d", t=PAGE_TOKENS)


def _replace_pages(rows: Tensor, pages: Tensor) -> Tensor:
    """``rows`` [H, T, d] with the complete pages replaced; the incomplete page stays exact. float32."""
    pages = rearrange(pages, "p h t d -> h (p t) d")
    return torch.cat([pages, rows[:, pages.shape[1] :].float()], 1)


def quantized_keys(key: Tensor, codec: LayerCodec, sink: int) -> Tensor:
    """Keys [H, T, d] of one sequence as a query would find them in pages; sink tokens are not meaningful. float32."""
    pages = _pages(key)
    position = torch.arange(pages.shape[0] * PAGE_TOKENS, device=key.device).view(-1, PAGE_TOKENS)
    return _replace_pages(key, decode_keys(encode_keys(pages, position >= sink, codec), codec))


def quantized_values(value: Tensor, codec: LayerCodec) -> Tensor:
    """Values [H, T, d] of one sequence as a query would find them in pages. float32."""
    return _replace_pages(value, decode_values(encode_values(_pages(value), codec), codec))


Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A cache's effect on one sequence: exact keys and values [H, T, d] -> float32 ones as a query would find them."""


def page_store(codec: LayerCodec, sink: int) -> Store:
    """The store of INT2 pages."""
    return lambda key, value: (quantized_keys(key, codec, sink), quantized_values(value, codec))


def grouped_logits(query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
    """[H, G, n, T] float32 scaled (and capped) logits of ``query`` [Hq, n, d] and ``key`` [H, T, d]."""
    query = rearrange(query.float(), "(h g) n d -> h g n d", h=key.shape[0])
    logits = query @ key.float().mT[:, None] * call.scaling
    return logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)


def segmented_attention(call: AttentionCall, store: Store | None, segments: Segments) -> Tensor:
    """Attention output [B, Hq, T, d] of a layer whose history is read from ``store``, in the model's dtype.

    Without a store history is exact, which leaves only this function's own rounding.
    """
    outputs = []
    for query, key, value in zip(call.query, call.key, call.value, strict=True):
        stored = (key, value) if store is None else store(key, value)
        length = key.shape[1]
        blocks = [
            _attend_block(call, query, key, value, stored, range(first, min(first + _QUERIES, length)), segments)
            for first in range(0, length, _QUERIES)
        ]
        outputs.append(torch.cat(blocks, 1))
    return torch.stack(outputs).to(call.query.dtype)


def _attend_block(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: tuple[Tensor, Tensor],
    block: range,
    segments: Segments,
) -> Tensor:
    """[Hq, n, d] output of the queries at the positions ``block``: one softmax over exact and stored tokens.

    A layer's learned sinks are in its denominator.
    """
    first, end = block.start, block.stop
    sink = min(segments.sink, end)
    near = torch.arange(max(sink, first - segments.recent + 1), end, device=key.device)
    exact = torch.cat([torch.arange(sink, device=key.device), near])
    history = torch.arange(sink, max(sink, end - segments.recent), device=key.device)
    at = torch.arange(first, end, device=key.device)[:, None]
    reads_exact = (exact <= at) & ((exact < segments.sink) | (exact > at - segments.recent))
    reads_history = history <= at - segments.recent
    queries = query[:, first:end]
    logits = torch.cat(
        [grouped_logits(queries, key[:, exact], call), grouped_logits(queries, stored[0][:, history], call)], -1
    )
    logits.masked_fill_(~torch.cat([reads_exact, reads_history], 1), -torch.inf)
    weights = attention_weights(logits, call.grouped_sinks)
    output = weights[..., : len(exact)] @ value[:, None, exact].float()
    output += weights[..., len(exact) :] @ stored[1][:, None, history].float()
    return rearrange(output, "h g n d -> (h g) n d")


class QuantizedCache:
    """Handler for `intercept_attention`: every layer with a codec reads its history from pages.

    Attributes:
        codecs: layer index -> codec; other layers attend exactly.
        segments: the BF16 windows.

    """

    def __init__(self, codecs: Mapping[int, LayerCodec], segments: Segments) -> None:
        self.codecs = dict(codecs)
        self.segments = segments

    def __call__(self, call: AttentionCall) -> Tensor:
        codec = self.codecs.get(call.layer)
        if codec is None:
            return call.attend()
        device = call.query.device
        if codec.key_mean.device != device:
            codec = self.codecs[call.layer] = codec.to(device)
        return segmented_attention(call, page_store(codec, self.segments.sink), self.segments)
