# SPDX-License-Identifier: Apache-2.0
"""The attention backend of `oscar_int2` layers, worker side: write the cache, then attend.

Each layer has two caches, both owned by vLLM's scheduler: **history**, INT2 pages of 128 tokens (the layer's own cache)
and **window**, unquantized blocks for the sink and the recent tokens (the auxiliary layer of `cache_spec.WindowCache`).
In a step, for every layer

    do_kv_cache_update   append   step's key, value -> window blocks
                         demote   pages completed by this step -> INT2
    forward              attend   sink + recent from window blocks, the rest from pages, one softmax

vLLM lets a request reuse blocks that another request computes in the same step, so both writes precede all reads.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from oscar_vllm.cache_spec import DTYPE, WINDOW_SUFFIX, SinkWindowSpec, history_layout
from oscar_vllm.errors import OscarUnsupportedError
from oscar_vllm.rotation import EngineSettings, engine_settings
from triton_ops import reference
from triton_ops.codec import LayerCodec
from triton_ops.layout import PAGE_TOKENS, SUPPORTED_HEAD_SIZES


@dataclass
class OscarMetadata(AttentionMetadata):
    """One cache group's view of the batch. T tokens, R requests.

    Attributes:
        num_actual_tokens: T; tensors may be padded beyond it.
        num_reqs: R.
        max_query_len: longest query.
        max_seq_len: longest sequence, or an upper bound.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, tokens of each request with this step's.
        block_table: [R, blocks] int32: page blocks for the history group, window blocks for the window group.

    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Same builder for the history and the window group; nothing here waits for the device."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OscarMetadata:
        common = common_attn_metadata
        return OscarMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
        )


class OscarBackend(AttentionBackend):
    """Capabilities of `oscar_int2` layers."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [DTYPE]  # type: ignore[assignment]

    @staticmethod
    def get_name() -> str:
        return "OSCAR_INT2"

    @staticmethod
    def get_impl_cls() -> type["OscarImpl"]:
        return OscarImpl

    @staticmethod
    def get_builder_cls() -> type[OscarMetadataBuilder]:
        return OscarMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(SUPPORTED_HEAD_SIZES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # Neither a page nor a window block is ever split: any size that a spec asks for is taken whole.
        return [MultipleOf(PAGE_TOKENS if kv_cache_spec is None else 1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_TOKENS

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A page of one KV head must be contiguous: [block, head, page bytes].
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pack the spec of an `oscar_int2` layer; vLLM also asks with specs of other layers, which stay as they are."""
        if spec.dtype is not torch.uint8 or isinstance(spec, SinkWindowSpec):
            return spec
        vllm_config = get_current_vllm_config_or_none() or OscarImpl.last_vllm_config
        options = engine_settings(vllm_config).options
        layout = history_layout(options, spec.head_size, vllm_config.model_config.dtype)
        return replace(spec, state_content_bytes=layout.bytes_per_token)


class OscarImpl(AttentionImpl[OscarMetadata]):
    """One layer's cache writes and attention."""

    last_vllm_config: ClassVar[Any] = None
    """Configuration of the engine built last: vLLM asks for specs outside of any configuration context."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a logit soft cap": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            **{name: value is not None for name, value in unsupported.items()},
        }
        for feature, present in refused.items():
            if present:
                raise OscarUnsupportedError(
                    f"--kv-cache-dtype {DTYPE} does not support layers with {feature}; "
                    "leave such layers unquantized with --kv-cache-dtype-skip-layers, or use --kv-cache-dtype auto"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        vllm_config = get_current_vllm_config()
        OscarImpl.last_vllm_config = vllm_config
        self.settings: EngineSettings = engine_settings(vllm_config)
        self.layout = history_layout(self.settings.options, head_size, vllm_config.model_config.dtype)
        self.codec: LayerCodec
        self.window_name: str

    def attach(self, layer_name: str) -> None:
        """Take the layer's codec; called once the layer knows its name. A layer sharing another's cache uses its codec.

        Raises:
            OscarArtifactError: the artifact does not fit this layer.

        """
        owner = self.kv_sharing_target_layer_name or layer_name
        self.window_name = owner + WINDOW_SUFFIX
        self.codec = self.settings.codec(
            extract_layer_index(owner),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            tp_size=get_tensor_model_parallel_world_size(),
            tp_rank=get_tensor_model_parallel_rank(),
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.codec = self.codec.to(current_platform.device_type)

    def _batch(self, kv_cache: torch.Tensor, metadata: OscarMetadata) -> dict[str, Any]:
        """Arguments that demote and attend share."""
        window_metadata, _, windows, _ = get_attention_context(self.window_name)
        return {
            "pages": kv_cache.flatten(2),
            "windows": windows,
            "page_table": metadata.block_table,
            "window_table": window_metadata.block_table,
            "query_start_loc": metadata.query_start_loc,
            "seq_lens": metadata.seq_lens,
            "codec": self.codec,
            "layout": self.layout,
            "sink": self.settings.options.sink,
        }

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Append the step's tokens to the window, then demote the pages they complete."""
        metadata, _, _, _ = get_attention_context(layer.layer_name)
        _, _, windows, window_slots = get_attention_context(self.window_name)
        if metadata is None or window_slots is None:
            return
        tokens = metadata.num_actual_tokens
        key, value = key[:tokens], value[:tokens]
        reference.append(key, value, slot_mapping=window_slots[:tokens], windows=windows)
        reference.demote(key, value, **self._batch(kv_cache, metadata))

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OscarMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; see `triton_ops.reference.attend` for the rule. query [T, Hq, d], output [T, Hq, d]."""
        if attn_metadata is None:  # memory profiling
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        options = self.settings.options
        attended, _ = reference.attend(
            query[:tokens],
            key[:tokens],
            value[:tokens],
            **self._batch(kv_cache, attn_metadata),
            scale=self.scale,
            recent=options.recent,
            prefill=options.prefill,
        )
        output[:tokens] = attended.to(output.dtype)
        return output
