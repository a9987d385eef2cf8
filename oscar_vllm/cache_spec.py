# SPDX-License-Identifier: Apache-2.0
"""What vLLM's allocator has to know about the two caches of an OSCAR attention layer.

*History* is the layer's own cache: INT2 pages of 128 tokens for every token, an ordinary full-attention spec whose
page :func:`history_layout` sizes. *Windows* belong to an auxiliary object, :class:`WindowCache`: blocks of at most 16
tokens in the model's dtype for the sink and the recent tokens only, described by :class:`SinkWindowSpec`. Both blocks
have the same number of bytes, so both groups draw from one block pool.

    block size       history 128 tokens             windows 16 tokens (bfloat16, head size 128)
    bytes, 8 heads   8 x 9216 = 73,728              16 x 8 x 512 = 65,536, padded to 73,728

In a hybrid model the blocks of the pool also hold recurrent states (Mamba, linear attention), one state per block.
Where a state is larger than a page, a block holds as many pages as cover it, and as many times 16 window tokens.
Kernels see single pages all the same: vLLM splits such blocks in its block tables.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from oscar_vllm.compat import state_block_alignment
from oscar_vllm.config import DTYPE, OscarConfig
from oscar_vllm.errors import OscarUnsupportedError
from triton_ops.layout import PAGE_TOKENS, FloatPageLayout, PageLayout, page_head_size

__all__ = [
    "DTYPE",
    "WINDOW_SUFFIX",
    "SinkWindowSpec",
    "WindowCache",
    "fit_to_shared_page",
    "history_layout",
    "pages_per_block",
    "shared_page_bytes",
    "window_block_size",
]

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WINDOW_SUFFIX = ".oscar_window"
"""Appended to an attention layer's name to name its window cache."""

MAX_WINDOW_BLOCK = 16
"""Tokens of a window block, if that many fit in the bytes of a history page."""


def history_layout(options: OscarConfig, head_size: int, dtype: torch.dtype) -> PageLayout | FloatPageLayout:
    """The page of one KV head; its ``head_size`` is that of padded heads (`page_head_size`).

    Args:
        options: resolved options (``zero`` is set).
        head_size: the layer's own.
        dtype: dtype of the model's keys and values; matters for ``payload="float"`` only.

    Raises:
        ValueError: the head size fits no INT2 page.

    """
    head_size = page_head_size(head_size)
    if options.payload == "float":
        return FloatPageLayout(head_size, get_dtype_size(dtype))
    return PageLayout(head_size, options.zero or "page")


def window_block_size(head_size: int, dtype: torch.dtype, page_bytes: int) -> int:
    """Tokens of a window block: the largest power of two up to 16 whose bytes, per KV head, fit in ``page_bytes``."""
    token_bytes = 2 * head_size * get_dtype_size(dtype)
    block = MAX_WINDOW_BLOCK
    while block > 1 and block * token_bytes > page_bytes:
        block //= 2
    return block


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(AttentionSpec):
    """Blocks for the first ``sink`` and the last ``recent`` tokens of a sequence; the rest of the table is null.

    Not a ``SlidingWindowSpec``: runners null the entries in front of a sliding window, which would drop the sinks.
    Everything a scheduler needs is a field, so that it holds on every rank and in every process.

    Attributes:
        sink: tokens at the start that are held until the request ends.
        recent: a query at position q reads the tokens t with q - recent < t.
        replay_tokens: further tokens held behind ``recent``, so that the tail of the last prefix-cache boundary is
            still there when it is hashed: a page where a hit gives up its last one, and one more where the tail must be
            whole; without that it may lack up to a page of its oldest tokens.
        speculative_tokens: draft tokens of a step; so many positions of a step may be rejected.
        lookahead_tokens: slots a drafter writes past the scheduled tokens.
        concurrent_batches: steps that may be scheduled and not yet processed, the one being scheduled included.
        in_flight_tokens: tokens those steps may hold together.
        require_recent: a prefix hit is only valid where the whole recent tail is cached.

    """

    sink: int
    recent: int
    replay_tokens: int = 0
    speculative_tokens: int = 0
    lookahead_tokens: int = 0
    concurrent_batches: int = 1
    in_flight_tokens: int = 0
    require_recent: bool = False

    @property
    def sink_blocks(self) -> int:
        return cdiv(self.sink, self.block_size)

    @property
    def rollback_tokens(self) -> int:
        """How far the position of the next query can lie below the end of the step being scheduled.

        Each step in flight may lose all its draft tokens, and a scheduler that runs ahead counts them as computed.
        """
        return self.speculative_tokens * self.concurrent_batches

    def first_recent_block(self, position: int) -> int:
        """Index of the oldest block that a query at ``position``, or a later one, may read as recent."""
        return max(0, position - self.recent + 1) // self.block_size

    def first_held_block(self, position: int) -> int:
        """Index of the oldest block that is held for the recent tail while the next query is at ``position``."""
        return self.first_recent_block(max(0, position - self.replay_tokens))

    @property
    def tail_blocks(self) -> int:
        """Most blocks that the recent tail of one position spans, rejected and lookahead tokens included."""
        tokens = self.recent - 1 + self.replay_tokens + self.rollback_tokens + self.lookahead_tokens
        return cdiv(tokens - 1, self.block_size) + 1

    @property
    def max_blocks_per_request(self) -> int:
        """Most blocks one request holds at a time.

        The tail of what has been processed, which steps in flight still read, and one tail per step in flight: the
        middle of a prefill chunk holds nothing. Tails of short steps overlap, hence the second bound.
        """
        tails = (1 + self.concurrent_batches) * self.tail_blocks
        if self.in_flight_tokens:
            tokens = self.recent - 1 + self.replay_tokens + self.in_flight_tokens + self.lookahead_tokens
            tails = min(tails, cdiv(tokens - 1, self.block_size) + 1)
        return self.sink_blocks + tails

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        """Bytes one request of the maximum length needs in one layer."""
        blocks = min(self.max_blocks_per_request, cdiv(vllm_config.model_config.max_model_len, self.block_size))
        return blocks * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, SinkWindowSpec) and spec == self for spec in kv_cache_specs.values())


class WindowCache(AttentionLayerBase):
    """Owns the window blocks of one attention layer. A plain object beside the layer: no parameters, no forward.

    Attributes:
        layer_name: the layer's name with ``.oscar_window`` appended.
        head_size: d of the pages, that of padded heads.
        kv_cache: [num_blocks, H, block_size, 2 d] in the model's dtype, keys in [..., :d]. Blocks are padded to the
            bytes of a history page: take strides from the tensor.

    """

    def __init__(self, parent: Any, options: OscarConfig, dtype: torch.dtype) -> None:
        self.layer_name = parent.layer_name + WINDOW_SUFFIX
        self.impl = parent.impl
        self.attn_backend = parent.attn_backend
        self.num_heads = parent.num_heads
        self.num_kv_heads = parent.num_kv_heads
        self.is_draft_layer = parent.is_draft_layer
        self.options = options
        self.dtype = dtype
        self.layout = history_layout(options, parent.head_size, dtype)
        self.head_size = self.layout.head_size
        self.kv_cache = torch.tensor([])

    @property
    def history_page_bytes(self) -> int:
        """Bytes of one history page of the parent layer, all KV heads of this rank together."""
        return self.num_kv_heads * self.layout.page_bytes

    @property
    def window_tokens(self) -> int:
        """Window tokens that fit in the bytes of one history page."""
        return window_block_size(self.head_size, self.dtype, self.layout.page_bytes)

    def get_attn_backend(self) -> Any:
        return self.attn_backend

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take [num_blocks, H, block_size, bytes] uint8 and keep it as the model's dtype."""
        self.kv_cache = kv_cache.view(self.dtype)

    def get_kv_cache_spec(self, vllm_config: "VllmConfig") -> SinkWindowSpec:
        sink, recent = self.options.sink, self.options.recent
        assert sink is not None, "options are resolved"
        assert recent is not None, "options are resolved"
        invariant = self.options.prefill == "invariant"
        speculative = vllm_config.speculative_config
        # EAGLE-like drafters give up the last page of every hit, so its tail lies one page further back.
        drops_page = speculative is not None and speculative.use_eagle()
        return SinkWindowSpec(
            block_size=pages_per_block(vllm_config) * self.window_tokens,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NONE,
            state_content_bytes=2 * self.head_size * get_dtype_size(self.dtype),
            page_size_padded=shared_page_bytes(vllm_config),
            sink=sink,
            recent=recent,
            replay_tokens=PAGE_TOKENS * (invariant + drops_page),
            speculative_tokens=vllm_config.num_speculative_tokens,
            lookahead_tokens=vllm_config.num_lookahead_tokens,
            concurrent_batches=vllm_config.max_concurrent_batches,
            in_flight_tokens=vllm_config.max_in_flight_tokens,
            require_recent=invariant,
        )


def shared_page_bytes(vllm_config: "VllmConfig") -> int:
    """Bytes every block of the pool has: those of the largest history page, or of several in a hybrid model.

    Layers that keep another dtype take blocks small enough to fit; only if their smallest block does not fit does the
    shared block grow to it.
    """
    pages, history = pages_per_block(vllm_config), _largest_history_page(vllm_config)
    return pages * history if pages > 1 else max([history, *_other_blocks(vllm_config)])


def pages_per_block(vllm_config: "VllmConfig") -> int:
    """History pages of one block: 1, or in a hybrid model as many as cover its largest recurrent state."""
    states = _state_bytes(vllm_config)
    if not states:
        return 1
    pages = cdiv(max(states + _other_blocks(vllm_config)), _largest_history_page(vllm_config))
    alignment = state_block_alignment(vllm_config)
    return round_up(pages, alignment // math.gcd(alignment, PAGE_TOKENS))


def _layers(vllm_config: "VllmConfig") -> Iterable[Any]:
    return vllm_config.compilation_config.static_forward_context.values()


def _largest_history_page(vllm_config: "VllmConfig") -> int:
    return max(layer.history_page_bytes for layer in _layers(vllm_config) if isinstance(layer, WindowCache))


def _other_blocks(vllm_config: "VllmConfig") -> list[int]:
    """Bytes of the smallest block of every key-value layer that keeps another dtype."""
    return [_smallest_block(layer) * _token_bytes(layer) for layer in _layers(vllm_config) if _keeps_other_dtype(layer)]


def _state_bytes(vllm_config: "VllmConfig") -> list[int]:
    """Bytes of every recurrent state, one per layer."""
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in _layers(vllm_config) if isinstance(layer, MambaBase)]
    return [replace(spec, page_size_padded=None).page_size_bytes for spec in specs if isinstance(spec, MambaSpec)]


def fit_to_shared_page(layer: Any, spec: KVCacheSpec, vllm_config: "VllmConfig") -> KVCacheSpec:
    """The spec of a layer in a model that has OSCAR layers, with its block made as large as the shared block.

    An OSCAR layer keeps its pages of 128 tokens, several to a block in a hybrid model, and is padded where another
    layer has a larger page. A layer of another dtype takes the largest block that fits.

    Raises:
        OscarUnsupportedError: a hybrid model whose history pages differ in size: a padded block cannot hold several.

    """
    context = vllm_config.compilation_config.static_forward_context
    if not any(isinstance(other, WindowCache) for other in context.values()):
        return spec
    shared, pages = shared_page_bytes(vllm_config), pages_per_block(vllm_config)
    if layer.kv_cache_dtype == DTYPE:
        page = context[layer.layer_name + WINDOW_SUFFIX].history_page_bytes
        if pages * page == shared:
            return replace(spec, block_size=pages * PAGE_TOKENS)
        if pages > 1:
            raise OscarUnsupportedError(
                f"layer {layer.layer_name} has another page size ({page} bytes) than the largest of this hybrid model "
                f"({shared // pages}); leave it unquantized with --kv-cache-dtype-skip-layers"
            )
        return replace(spec, page_size_padded=shared)
    if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
        return spec
    token_bytes, block = _token_bytes(layer), _smallest_block(layer)
    while block < pages * PAGE_TOKENS and _supports_block(layer, 2 * block) and 2 * block * token_bytes <= shared:
        block *= 2
    return replace(spec, block_size=block, page_size_padded=shared)


def _keeps_other_dtype(layer: Any) -> bool:
    """Whether a registered layer owns a key-value cache that is not OSCAR's."""
    return (
        getattr(layer, "kv_cache_dtype", DTYPE) != DTYPE
        and getattr(layer, "attn_type", None) == "decoder"
        and getattr(layer, "kv_sharing_target_layer_name", None) is None
    )


def _token_bytes(layer: Any) -> int:
    return layer.num_kv_heads * (layer.head_size + layer.head_size_v) * get_dtype_size(layer.kv_cache_torch_dtype)


def _smallest_block(layer: Any) -> int:
    sizes = layer.get_attn_backend().get_supported_kernel_block_sizes()
    return min(size.base if isinstance(size, MultipleOf) else size for size in sizes)


def _supports_block(layer: Any, block: int) -> bool:
    sizes = layer.get_attn_backend().get_supported_kernel_block_sizes()
    return any(block % size.base == 0 if isinstance(size, MultipleOf) else block == size for size in sizes)
