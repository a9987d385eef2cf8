# SPDX-License-Identifier: Apache-2.0
"""The attention backend of `oscar_int2` layers, worker side: write the cache, then attend.

Each layer has two caches, both owned by vLLM's scheduler: **history**, INT2 pages of 128 tokens (the layer's own cache)
and **window**, unquantized blocks for the sink and the recent tokens (the auxiliary layer of `cache_spec.WindowCache`).
In a step, for every layer

    append   step's key, value -> window blocks
    demote   pages completed by this step -> INT2
    attend   sink + recent from window blocks, the rest from pages, one softmax

Pages exist for heads of 64, 128 and 256 elements. Queries, keys and values of other heads are padded with zeros to the
next of these where they enter, and outputs are cut where they leave; codecs, caches and kernels know padded heads only.
Zeros add nothing to a logit, and codes hold rotated elements: none of them is padding where a row's minimum, mean or
deviation is taken.

vLLM lets a request reuse blocks that another request computes in the same step, so both writes precede all reads.

On an NVIDIA GPU the Triton kernels run: short queries (decode, verification of drafts) through `attend_decode`, longer
ones through FlashAttention on what `gather` writes out, or through `attend_prefill`. A step of short queries alone does
both writes in the launch that prepares its queries (`write_and_prepare`). On a CPU, and for ``payload="float"`` or
``ops="reference"``, the PyTorch reference runs.
"""

import functools
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
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from oscar_vllm.cache_spec import (
    DTYPE,
    WINDOW_SUFFIX,
    SinkWindowSpec,
    history_layout,
    pages_per_block,
    window_block_size,
)
from oscar_vllm.errors import OscarUnsupportedError
from oscar_vllm.prefill import PrefillBuffers, attend_long
from oscar_vllm.rotation import EngineSettings, engine_settings
from oscar_vllm.self_test import LayerKernels, self_test_once
from triton_ops import reference
from triton_ops.append import append
from triton_ops.attend_decode import DecodeWorkspace, attend_decode
from triton_ops.codec import LayerCodec
from triton_ops.demote import demote
from triton_ops.gather import GatherPlan, plan_gather
from triton_ops.layout import PAGE_TOKENS, SERVED_HEAD_SIZES, PageLayout
from triton_ops.prepare import QueryMatrix, prepare_query
from triton_ops.schedule import DecodeSchedule
from triton_ops.write_and_prepare import write_and_prepare


@dataclass
class OscarMetadata(AttentionMetadata):
    """One cache group's view of the batch. T tokens, R requests.

    Attributes:
        num_actual_tokens: T; tensors may be padded beyond it.
        num_reqs: R.
        max_query_len: longest query.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, tokens of each request with this step's.
        block_table: [R, blocks] int32: page blocks for the history group, window blocks for the window group.
        slot_mapping: [T] int64, where each token of the step goes in the group's blocks.
        num_decodes: requests with short queries; they come first.
        num_decode_tokens: their tokens.
        prefill_query_start_loc: [R - num_decodes + 1] int32, from 0; None without long queries.
        prefill_reads_cache: whether a long query reads anything but its own step's keys (an upper bound).
        gather: how the long queries' keys are written out; None if pages are read in place.
        schedule: work of the decode kernels; the window group's metadata on a GPU only.

    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    prefill_query_start_loc: torch.Tensor | None
    prefill_reads_cache: bool
    gather: GatherPlan | None
    schedule: DecodeSchedule | None


GATHER_MIN_TOKENS = 256
"""Shorter queries, by their mean over tokens of history, read pages in place. Measured on an H200
(benchmarks/demote_prefill.py): a query token costs 59 ps per token of history and layer in place and 24 ps by
FlashAttention-3 (32 heads of size 128), but writing a token of history out costs 7.5 ns: equal at 215."""
GATHER_BYTES = 256 * 2**20
"""Buffer for gathered keys and values: 65,536 tokens of 8 KV heads of size 128."""


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Same builder for the history and the window group; nothing here waits for the device."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.impl: OscarImpl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.schedule: DecodeSchedule | None = None
        if isinstance(kv_cache_spec, SinkWindowSpec) and self.impl.uses_kernels:
            self.schedule = DecodeSchedule.allocate(
                max_requests=vllm_config.scheduler_config.max_num_seqs,
                multiprocessors=self.impl.workspace.multiprocessors,
                device=device,
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OscarMetadata:
        common = common_attn_metadata
        threshold = self.reorder_batch_threshold or 1
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(common, threshold)
        metadata = OscarMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            prefill_query_start_loc=None,
            prefill_reads_cache=False,
            gather=None,
            schedule=self.schedule,
        )
        if num_prefills:
            start_loc = metadata.query_start_loc[num_decodes:]
            metadata.prefill_query_start_loc = start_loc - num_decode_tokens if num_decodes else start_loc
            metadata.prefill_reads_cache = self._prefill_reads_cache(common, num_decodes)
            if metadata.prefill_reads_cache and self.impl.uses_kernels and self.schedule is None:  # history group
                metadata.gather = self._plan_gather(common, metadata)
        if self.schedule is not None:
            impl = self.impl
            grid = impl.workspace.grid(
                num_requests=num_decodes,
                # Compiled for single tokens and for the most drafts, not for what this step happens to hold.
                max_query_len=threshold if num_prefills or common.max_query_len > 1 else 1,
                num_query_heads=impl.num_heads,
                num_kv_heads=impl.num_kv_heads,
                head_size=impl.layout.head_size,
            )
            self.schedule.update(
                grid=grid,
                query_start_loc=metadata.query_start_loc,
                seq_lens=metadata.seq_lens,
                window_table=metadata.block_table,
                window_block_size=self.kv_cache_spec.block_size,
                sink=impl.settings.sink,
                recent=impl.settings.recent,
            )
        return metadata

    def _prefill_reads_cache(self, common: CommonAttentionMetadata, first: int) -> bool:
        """Whether a request from ``first`` on has earlier tokens, or reads its own step's pages. No device access."""
        if self.impl.settings.options.prefill == "invariant" or common.seq_lens_cpu_upper_bound is None:
            return True
        start_loc = common.query_start_loc_cpu[first : common.num_reqs + 1]
        seq_lens = common.seq_lens_cpu_upper_bound[first : common.num_reqs]
        return bool((seq_lens > start_loc.diff()).any())

    def _plan_gather(self, common: CommonAttentionMetadata, metadata: OscarMetadata) -> GatherPlan | None:
        """The plan for the long queries of the step, where writing their keys out pays and keeps the rule."""
        first, bound = metadata.num_decodes, common.seq_lens_cpu_upper_bound
        if self.impl.settings.options.prefill == "invariant" or bound is None:
            return None
        query_lens = common.query_start_loc_cpu[first : common.num_reqs + 1].diff().tolist()
        max_seq_lens = bound[first : common.num_reqs].tolist()
        history = [length - new for length, new in zip(max_seq_lens, query_lens, strict=True)]
        work = sum(new * old for new, old in zip(query_lens, history, strict=True))
        if work < GATHER_MIN_TOKENS * sum(history):
            return None
        return plan_gather(
            query_lens=query_lens,
            max_seq_lens=max_seq_lens,
            seq_lens=metadata.seq_lens[first:],
            buffer_pages=self.impl.gather_pages,
        )


class OscarBackend(AttentionBackend):
    """Capabilities of `oscar_int2` layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [DTYPE]

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
        return list(SERVED_HEAD_SIZES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # A window block is taken whole, whatever its size; a block of several pages is split into pages.
        return [MultipleOf(1) if isinstance(kv_cache_spec, SinkWindowSpec) else PAGE_TOKENS]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

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
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            **{name: value is not None for name, value in unsupported.items()},
        }
        for feature, present in refused.items():
            if present:
                raise OscarUnsupportedError(
                    f"--kv-cache-dtype {DTYPE} does not support layers with {feature}; "
                    "leave them unquantized with --kv-cache-dtype-skip-layers (their indices, or sliding_window), or "
                    "use --kv-cache-dtype auto"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.soft_cap = float(logits_soft_cap or 0.0)  # c tanh(logit / c); 0 for none
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks  # [Hq] learned logits of a token whose value is zero; loaded with the weights
        vllm_config = get_current_vllm_config()
        OscarImpl.last_vllm_config = vllm_config
        self.settings: EngineSettings = engine_settings(vllm_config)
        self.layout = history_layout(self.settings.options, head_size, vllm_config.model_config.dtype)
        self.uses_kernels = (
            current_platform.is_cuda()
            and isinstance(self.layout, PageLayout)
            and self.settings.options.ops != "reference"
        )
        self.max_requests = vllm_config.scheduler_config.max_num_seqs
        page = 2 * PAGE_TOKENS * self.num_kv_heads * self.layout.head_size * vllm_config.model_config.dtype.itemsize
        # A step's own tokens must fit with room to spare, whatever the budget.
        self.gather_pages = max(
            GATHER_BYTES // page, 2 * vllm_config.scheduler_config.max_num_batched_tokens // PAGE_TOKENS
        )
        self.max_query_len = max_decode_query_len(vllm_config)  # what the builder takes for a decode
        self.codec: LayerCodec
        self.loaded_codec: LayerCodec
        self.window_name: str
        self.workspace: DecodeWorkspace
        self.query_matrix: QueryMatrix

    def attach(self, layer_name: str) -> None:
        """Take the layer's codec; called once the layer knows its name.

        Raises:
            OscarArtifactError: the artifact does not fit this layer.

        """
        self.window_name = layer_name + WINDOW_SUFFIX
        self.codec = self.loaded_codec = self.settings.codec(
            extract_layer_index(layer_name),
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            tp_size=get_tensor_model_parallel_world_size(),
            tp_rank=get_tensor_model_parallel_rank(),
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Bring the codec to the device, also when weights are loaded again: a sleep of level 2 loses what lay there.

        CUDA graphs keep reading the tensors of the first time.
        """
        first = self.codec is self.loaded_codec
        if first:
            self.codec = self.loaded_codec.to(current_platform.device_type)
        for (_, tensor), (_, loaded) in zip(self.codec.tensors(), self.loaded_codec.tensors(), strict=True):
            tensor.copy_(loaded)
        if self.uses_kernels:
            matrix = QueryMatrix.of(self.codec)
            if first:
                self.query_matrix = matrix
            else:
                self.query_matrix.copy_(matrix)
            self.workspace = _decode_workspace(
                self.max_requests, self.max_query_len, self.num_heads, self.num_kv_heads, self.layout.head_size
            )
            self._self_test(act_dtype)

    def _self_test(self, dtype: torch.dtype) -> None:
        """Refuse to serve with kernels that are wrong on this device."""
        assert isinstance(self.layout, PageLayout)
        window_tokens = window_block_size(self.layout.head_size, dtype, self.layout.page_bytes)
        kernels = LayerKernels(
            codec=self.codec,
            layout=self.layout,
            num_query_heads=self.num_heads,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sink=self.settings.sink,
            recent=self.settings.recent,
            prefill=self.settings.options.prefill,
            dtype=dtype,
            max_query_len=self.max_query_len,
            max_requests=self.max_requests,
            has_sinks=self.sinks is not None,
            window_block=pages_per_block(OscarImpl.last_vllm_config) * window_tokens,
        )
        self_test_once(kernels, torch.device(current_platform.device_type, torch.cuda.current_device()))

    def _windows(self) -> tuple[OscarMetadata, torch.Tensor]:
        """The window group's metadata, and the layer's window blocks."""
        metadata, _, windows, _ = get_attention_context(self.window_name)
        return metadata, windows

    def _batch(self, kv_cache: torch.Tensor, metadata: OscarMetadata, requests: slice = slice(None)) -> dict[str, Any]:
        """Arguments that demote and attend share, for some of the batch's requests."""
        window_metadata, windows = self._windows()
        last = metadata.num_reqs if requests.stop is None else requests.stop
        return {
            "pages": kv_cache.flatten(2),
            "windows": windows,
            "page_table": metadata.block_table[requests],
            "window_table": window_metadata.block_table[requests],
            "query_start_loc": metadata.query_start_loc[requests.start : last + 1],
            "seq_lens": metadata.seq_lens[requests],
            "codec": self.codec,
            "layout": self.layout,
            "sink": self.settings.sink,
        }

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        """``heads`` [T, heads, d] with zeros up to the pages' head size; itself where that is d."""
        padding = self.layout.head_size - heads.shape[-1]
        return torch.nn.functional.pad(heads, (0, padding)) if padding else heads

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
        """Write the cache, then attend; see `triton_ops.reference.attend` for the rule.

        query [T, Hq, d], key and value [T, H, d], output [T, Hq, d].
        """
        query, key, value = self._padded(query), self._padded(key), self._padded(value)
        attended = output if output.shape == query.shape else output.new_empty(query.shape)
        if attn_metadata is None:  # memory profiling: hold what a prefill of this many tokens holds
            held = self._prefill_buffers(query, gathered=True) if self.uses_kernels else None
            output.fill_(0)
            del held
            return output
        self._attend(query, key, value, kv_cache, attn_metadata, attended)
        if attended is not output:
            tokens = attn_metadata.num_actual_tokens
            output[:tokens] = attended[:tokens, :, : self.head_size]
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
    ) -> None:
        """`forward` for queries and outputs with heads as large as the pages'."""
        if not self.uses_kernels:
            self._write_reference(key, value, kv_cache, metadata)
            self._attend_reference(query, key, value, kv_cache, metadata, output)
        elif metadata.prefill_query_start_loc is None:
            self._decode(query, kv_cache, metadata, output, (key, value))
        else:
            self._write(key, value, kv_cache, metadata)
            if metadata.num_decodes:
                self._decode(query, kv_cache, metadata, output)
            lse = self._prefill(query, key, value, kv_cache, metadata, output)
            self._add_sinks(output[metadata.num_decode_tokens : metadata.num_actual_tokens], lse.T)

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: OscarMetadata) -> None:
        """Append the step's tokens to the window, then demote the pages they complete."""
        tokens, (window_metadata, windows) = metadata.num_actual_tokens, self._windows()
        append(key=key, value=value, slot_mapping=window_metadata.slot_mapping, windows=windows, num_tokens=tokens)
        demote(
            key=key,
            value=value,
            num_tokens=tokens,
            num_requests=metadata.num_reqs,
            max_query_len=metadata.max_query_len,
            **self._batch(kv_cache, metadata),
        )

    def _write_reference(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: OscarMetadata
    ) -> None:
        """`_write`, by the PyTorch reference."""
        key, value = key[: metadata.num_actual_tokens], value[: metadata.num_actual_tokens]
        window_metadata, windows = self._windows()
        slots = window_metadata.slot_mapping[: metadata.num_actual_tokens]
        reference.append(key, value, slot_mapping=slots, windows=windows)
        reference.demote(key, value, **self._batch(kv_cache, metadata))

    def _add_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Give every head's learned sink its share of the softmax: output [T, Hq, d] in place, lse [T, Hq]."""
        if self.sinks is not None:
            output.mul_(torch.sigmoid(lse - self.sinks.float())[..., None])

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
        written: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """The first ``num_decodes`` requests, by the decode kernels, which also write ``written`` (keys, values)."""
        tokens = metadata.num_decode_tokens
        window_metadata, _ = self._windows()
        schedule = window_metadata.schedule
        assert schedule is not None
        lse = None if self.sinks is None else query.new_empty((self.num_heads, tokens), dtype=torch.float32)
        batch = self._batch(kv_cache, metadata, slice(0, metadata.num_decodes))
        queries: dict[str, Any] = {
            "query": query[:tokens],
            "matrix": self.query_matrix,
            "grid": schedule.grid,
            "scale": self.scale,
            "prepared": self.workspace.prepared,
        }
        if written is None:
            names = ("codec", "query_start_loc", "seq_lens")
            prepare_query(**queries, **{name: batch[name] for name in names})
        else:
            write_and_prepare(
                key=written[0],
                value=written[1],
                slot_mapping=window_metadata.slot_mapping,
                num_tokens=tokens,
                multiprocessors=self.workspace.multiprocessors,
                **queries,
                **batch,
            )
        attend_decode(
            query=query[:tokens],
            **batch,
            scale=self.scale,
            soft_cap=self.soft_cap,
            recent=self.settings.recent,
            schedule=schedule,
            workspace=self.workspace,
            output=output[:tokens],
            lse=lse,
        )
        if lse is not None:
            self._add_sinks(output[:tokens], lse.T)

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """The other requests, by FlashAttention and `attend_prefill`.

        Returns:
            [Hq, T] float32 log-sum-exp.

        """
        tokens = slice(metadata.num_decode_tokens, metadata.num_actual_tokens)
        batch = self._batch(kv_cache, metadata, slice(metadata.num_decodes, metadata.num_reqs))
        buffers = None
        if metadata.prefill_reads_cache:
            buffers = self._prefill_buffers(query[tokens], gathered=metadata.gather is not None)
        return attend_long(
            query[tokens],
            key[tokens],
            value[tokens],
            batch=batch | {"query_start_loc": metadata.prefill_query_start_loc},
            plan=metadata.gather,
            prefill=self.settings.options.prefill,
            scale=self.scale,
            soft_cap=self.soft_cap,
            recent=self.settings.recent,
            max_query_len=metadata.max_query_len,
            buffers=buffers,
            out=output[tokens],
        )

    def _prefill_buffers(self, query: torch.Tensor, gathered: bool) -> PrefillBuffers:
        pages = self.gather_pages if gathered else 0
        return PrefillBuffers.allocate(query, num_kv_heads=self.num_kv_heads, gather_pages=pages)

    def _attend_reference(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
    ) -> None:
        """All requests, by the PyTorch reference."""
        tokens = metadata.num_actual_tokens
        attended, lse = reference.attend(
            query[:tokens],
            key[:tokens],
            value[:tokens],
            **self._batch(kv_cache, metadata),
            scale=self.scale,
            soft_cap=self.soft_cap,
            recent=self.settings.recent,
            prefill=self.settings.options.prefill,
            max_decode_len=self.max_query_len,
        )
        self._add_sinks(attended, lse)
        output[:tokens] = attended.to(output.dtype)


@functools.lru_cache(maxsize=8)
def _decode_workspace(
    max_requests: int, max_query_len: int, num_query_heads: int, num_kv_heads: int, head_size: int
) -> DecodeWorkspace:
    """Scratch memory of the decode kernels, one for all layers of a shape."""
    return DecodeWorkspace.allocate(
        max_requests=max_requests,
        max_query_len=max_query_len,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        device=current_platform.device_type,
    )
