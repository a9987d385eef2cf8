# SPDX-License-Identifier: Apache-2.0
"""Attention of long queries: vLLM's FlashAttention over plain keys, and what of a cache is not plain made so or added.

no earlier tokens     FlashAttention over the step's own keys
many new tokens       `gather` writes out all keys, span by span; FlashAttention over each; merged
few, or "invariant"   FlashAttention over the step's own keys; `attend_prefill` over the cache in place; merged
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from triton_ops.attend_prefill import attend_prefill, workspace_shapes
from triton_ops.gather import PADDING_ROWS, GatherPlan, gather
from triton_ops.layout import PAGE_TOKENS
from triton_ops.reference import Prefill


@dataclass(frozen=True)
class PrefillBuffers:
    """Scratch memory of one prefill of T tokens; its size does not depend on the history.

    Attributes:
        part: [T, Hq, d] a partial output.
        part_lse: [Hq, T] float32 its log-sum-exp.
        workspace: of `attend_prefill`.
        key: [rows, H, d] what `gather` writes, or None.
        value: likewise.

    """

    part: torch.Tensor
    part_lse: torch.Tensor
    workspace: tuple[torch.Tensor, torch.Tensor]
    key: torch.Tensor | None
    value: torch.Tensor | None

    @classmethod
    def allocate(cls, query: torch.Tensor, *, num_kv_heads: int, gather_pages: int) -> "PrefillBuffers":
        """Buffers for ``query`` [T, Hq, d]; ``gather_pages`` is 0 where nothing is written out."""
        tokens, heads, d = query.shape
        shapes = workspace_shapes(num_tokens=tokens, num_query_heads=heads, head_size=d)
        rows = (gather_pages * PAGE_TOKENS + PADDING_ROWS, num_kv_heads, d)
        return cls(
            part=query.new_empty(query.shape),
            part_lse=query.new_empty((heads, tokens), dtype=torch.float32),
            workspace=(
                query.new_empty(shapes[0], dtype=torch.float16),
                query.new_empty(shapes[1], dtype=torch.float32),
            ),
            key=query.new_empty(rows) if gather_pages else None,
            value=query.new_empty(rows) if gather_pages else None,
        )


@functools.cache
def flash_attention(head_size: int) -> tuple[Any, Any, int | None]:
    """vLLM's FlashAttention for ragged batches, its merge of partial results, and the version for this GPU."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    return flash_attn_varlen_func, merge_attn_states, get_flash_attn_version(head_size=head_size)


def attend_long(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    batch: dict[str, Any],
    plan: GatherPlan | None,
    prefill: Prefill,
    scale: float,
    soft_cap: float,
    recent: int,
    max_query_len: int,
    buffers: PrefillBuffers | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of requests with many tokens in the step (`triton_ops.reference.attend`).

    Args:
        query: [T, Hq, d].
        key: [T, H, d] the step's keys.
        value: [T, H, d] its values.
        batch: ``pages``, ``windows``, ``page_table``, ``window_table``, ``query_start_loc`` (from 0), ``seq_lens``,
            ``codec``, ``layout`` and ``sink`` of these requests, as the kernels' launchers name them.
        plan: how `gather` goes about it, or None to read pages in place.
        prefill: ``"exact"`` or ``"invariant"``; a plan needs ``"exact"``.
        scale: softmax scale.
        soft_cap: c > 0 turns every scaled logit x into c tanh(x / c), in every part; 0 leaves logits as they are.
        recent: recent tokens.
        max_query_len: most tokens of a request in the step.
        buffers: scratch memory; None where no request has earlier tokens.
        out: [T, Hq, d] written.

    Returns:
        [Hq, T] float32 log-sum-exp.

    """
    flash_attn_varlen_func, merge_attn_states, version = flash_attention(query.shape[2])
    flash = functools.partial(
        flash_attn_varlen_func,
        q=query,
        max_seqlen_q=max_query_len,
        cu_seqlens_q=batch["query_start_loc"],
        softmax_scale=scale,
        softcap=soft_cap,
        return_softmax_lse=True,
        fa_version=version,
    )

    def merged(lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(lse)  # not in place: every thread of a row reads the old one
        merge_attn_states(out, part, part_lse, out, lse, total)
        return total

    if plan is not None:
        assert buffers is not None
        assert buffers.key is not None
        assert buffers.value is not None
        lse: torch.Tensor | None = None
        for span in plan.spans:
            gather(
                key=key,
                value=value,
                **batch,
                recent=recent,
                plan=plan,
                span=span,
                key_out=buffers.key,
                value_out=buffers.value,
            )
            part, part_lse, *_ = flash(
                k=buffers.key,
                v=buffers.value,
                max_seqlen_k=span.max_tokens,
                cu_seqlens_k=span.start_loc,
                causal=lse is None,  # the first span ends with the step's own tokens
                out=out if lse is None else buffers.part,
            )
            lse = part_lse if lse is None else merged(lse, part, part_lse)
        assert lse is not None
        return lse
    _, lse, *_ = flash(
        k=key,
        v=value,
        max_seqlen_k=max_query_len,
        cu_seqlens_k=batch["query_start_loc"],
        causal=True,
        # Of this step's keys, "invariant" reads the recent tokens here; attend_prefill reads the others.
        window_size=[recent - 1, 0] if prefill == "invariant" else None,
        out=out,
    )
    if buffers is None:
        return lse
    attend_prefill(
        query=query,
        **batch,
        scale=scale,
        soft_cap=soft_cap,
        recent=recent,
        num_tokens=query.shape[0],
        num_requests=batch["seq_lens"].shape[0],
        prefill=prefill,
        out=buffers.part,
        lse=buffers.part_lse,
        workspace=buffers.workspace,
    )
    return merged(lse, buffers.part, buffers.part_lse)
