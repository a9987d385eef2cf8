# SPDX-License-Identifier: Apache-2.0
"""Watch or replace the attention of a transformers model, without code for any particular model.

transformers sends every decoder's post-RoPE queries, keys and values through a function named in the model's
configuration. `intercept_attention` names one of ours for the length of a ``with`` block:

    with intercept_attention(model, handler) as interception:
        model(input_ids, use_cache=False)

Layers with a sliding window never reach the handler: they keep their BF16 cache. Heads without a page of their own size
reach it as the server stores them, padded with zeros. A *learned sink* (gpt-oss) is one more logit per query head, of a
token that has no value: it takes its share of the attention and gives nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oscar_vllm.errors import OscarConfigError, OscarUnsupportedError
from triton_ops.layout import page_head_size

_NAME = "oscar_intercept"


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over one batch of whole sequences (no earlier cache).

    Attributes:
        layer: index of the decoder layer.
        query: [B, Hq, T, d], after normalisation and rotary embedding; d is the pages' head size.
        key: [B, H, T, d], likewise; Hq is a multiple of H.
        value: [B, H, T, d].
        scaling: factor on the logits.
        softcap: ``softcap * tanh(logit / softcap)`` is applied to the logits, None = off.
        module: the attention module.
        mask: what transformers passes on: None for plain causal attention.
        sinks: [Hq] logits of learned sinks, None = the layer has none.

    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    module: nn.Module
    mask: Tensor | None
    sinks: Tensor | None = None

    @property
    def grouped_sinks(self) -> Tensor | None:
        """The learned sinks by KV head and query head of its group, [H, Hq / H] float32."""
        return None if self.sinks is None else self.sinks.float().view(self.key.shape[1], -1)

    def attend(self) -> Tensor:
        """Exact causal attention, [B, Hq, T, d] in the model's dtype."""
        if self.softcap is None and self.sinks is None:
            output, _ = sdpa_attention_forward(
                self.module, self.query, self.key, self.value, self.mask, scaling=self.scaling, is_causal=True
            )
            return output.transpose(1, 2)
        group = self.query.shape[1] // self.key.shape[1]
        logits = self.query.float() @ self.key.repeat_interleave(group, 1).float().transpose(-1, -2) * self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        causal = self.mask
        if causal is None:
            causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        weights = attention_weights(logits.masked_fill(~causal, -torch.inf), self.sinks)
        return weights.to(self.value.dtype) @ self.value.repeat_interleave(group, 1)


def log_normalizer(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """[..., n] log of the attention's denominator.

    Args:
        logits: [..., n, T]; masked ones are minus infinity.
        sinks: [...] learned sinks of the heads, or None.

    """
    lse = logits.logsumexp(-1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[..., None])


def attention_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """[..., n, T] softmax; a learned sink's share is missing from its sum. Arguments: see `log_normalizer`."""
    if sinks is None:
        return logits.softmax(-1)
    return (logits - log_normalizer(logits, sinks)[..., None]).exp()


Handler = Callable[[AttentionCall], Tensor]
"""Receives a layer's call, returns the attention output [B, Hq, T, d] the model goes on with."""


@dataclass
class Interception:
    """What was seen so far. ``layers``: indices that reached the handler; ``skipped``: index -> reason."""

    layers: set[int] = field(default_factory=set)
    skipped: dict[int, str] = field(default_factory=dict)


def _with_padding(handler: Handler, call: AttentionCall, size: int) -> Tensor:
    """Output [B, Hq, T, d] of a handler that gets heads of ``size`` elements, the last ones zeros."""
    head_size = call.key.shape[-1]
    if head_size == size:
        return handler(call)
    padded = {name: pad(getattr(call, name), (0, size - head_size)) for name in ("query", "key", "value")}
    return handler(replace(call, **padded))[..., :head_size]


@contextmanager
def intercept_attention(model: PreTrainedModel, handler: Handler) -> Iterator[Interception]:
    """Send every full-attention layer of ``model`` through ``handler`` inside the ``with`` block.

    The attention function in force before is restored on leaving, also after an exception. Works for models spread
    over devices: tensors arrive on the layer's device.

    Raises:
        OscarConfigError: another interception is active.
        OscarUnsupportedError: a layer needs something that an INT2 page cannot hold (position biases, keys and values
            of different head sizes, a head size that fits no page).

    """
    if _NAME in AttentionInterface._global_mapping:
        raise OscarConfigError("the attention of a model is intercepted already; leave that `with` block first")
    seen = Interception()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        name = f"layer {layer} ({type(module).__name__})"
        if kwargs.get("position_bias") is not None:
            raise OscarUnsupportedError(f"{name} adds position biases; not supported")
        if key.shape[-1] != value.shape[-1]:
            raise OscarUnsupportedError(
                f"{name} has keys of size {key.shape[-1]} and values of size {value.shape[-1]} (latent attention?); "
                "an INT2 page needs equal sizes"
            )
        scaling = kwargs.get("scaling")
        call = AttentionCall(
            layer=-1 if layer is None else layer,
            query=query,
            key=key,
            value=value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=kwargs.get("softcap"),
            module=module,
            mask=attention_mask,
            sinks=kwargs.get("s_aux"),
        )
        if layer is None or not getattr(module, "is_causal", True):
            return call.attend().transpose(1, 2).contiguous(), None
        if kwargs.get("sliding_window") is not None:
            seen.skipped[layer] = f"sliding window of {kwargs['sliding_window']} tokens"
            return call.attend().transpose(1, 2).contiguous(), None
        seen.layers.add(layer)
        try:
            size = page_head_size(key.shape[-1])
        except ValueError as error:
            raise OscarUnsupportedError(f"{name}: {error}") from None
        return _with_padding(handler, call, size).transpose(1, 2).contiguous(), None

    config = model.config
    before = {"": config._attn_implementation}
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            before[name] = getattr(config, name)._attn_implementation
    try:
        AttentionInterface.register(_NAME, attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)
        yield seen
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)
