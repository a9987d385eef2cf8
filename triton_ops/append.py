# SPDX-License-Identifier: Apache-2.0
"""Write the step's keys and values into BF16 window blocks (`reference.append`).

One program per token copies all heads, keys and values. Most tokens of a long prefill chunk have no window block:
their slot lies in the null block or is -1, and their program ends after reading it.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def append_token(
    token,
    slot_mapping,
    key,
    value,
    windows,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Copy one token of the step, all heads, to its window slot, if it has one."""
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= WINDOW_BLOCK:
        head = tl.arange(0, BLOCK_HEADS)[:, None]
        dim = tl.arange(0, HEAD_SIZE)[None, :]
        keep = head < NUM_HEADS
        k = tl.load(key + token * key_stride_token + head * key_stride_head + dim, mask=keep)  # [heads, d]
        v = tl.load(value + token * value_stride_token + head * value_stride_head + dim, mask=keep)
        target = windows + slot // WINDOW_BLOCK * window_stride_block + slot % WINDOW_BLOCK * window_stride_token
        target += head * window_stride_head + dim
        tl.store(target, k.to(windows.dtype.element_ty), mask=keep)
        tl.store(target + HEAD_SIZE, v.to(windows.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["slot_mapping"])
def _append_kernel(
    slot_mapping,
    key,
    value,
    windows,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_token,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    append_token(
        tl.program_id(0).to(tl.int64), slot_mapping, key, value, windows, key_stride_token, key_stride_head,
        value_stride_token, value_stride_head, window_stride_block, window_stride_head, window_stride_token,
        NUM_HEADS, HEAD_SIZE, WINDOW_BLOCK, BLOCK_HEADS,
    )  # fmt: skip


def key_value_arguments(*, key: Tensor, value: Tensor, windows: Tensor) -> tuple[Any, ...]:
    """Keys, values and windows with their strides, in the order of `append_token` and `demote_part`."""
    return key, value, windows, *key.stride()[:2], *value.stride()[:2], *windows.stride()[:3]


def check_append(*, key: Tensor, value: Tensor, slot_mapping: Tensor, windows: Tensor, num_tokens: int) -> None:
    """Raise ValueError if `append`'s arguments do not agree."""
    _, heads, d = key.shape
    if key.shape != value.shape or windows.shape[1] != heads or windows.shape[3] != 2 * d:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and windows {tuple(windows.shape)} do not agree; "
            "expected [T, H, d] twice and [N, H, block_size, 2 d]"
        )
    if key.stride(2) != 1 or value.stride(2) != 1 or windows.stride(3) != 1:
        raise ValueError("the last axis of key, value and windows must be contiguous")
    if not num_tokens <= min(key.shape[0], slot_mapping.shape[0]):
        raise ValueError(
            f"num_tokens={num_tokens}, but key holds {key.shape[0]} and slot_mapping {slot_mapping.shape[0]} tokens"
        )


def append(*, key: Tensor, value: Tensor, slot_mapping: Tensor, windows: Tensor, num_tokens: int) -> None:
    """Write tokens into window blocks, keys and values in one launch.

    Args:
        key: [T, H, d] as the model produced it, float16 or bfloat16 or float32, last axis contiguous.
        value: [T, H, d], likewise; the strides may differ from the keys'.
        slot_mapping: [T] int64, block * block_size + offset in the window group; -1 and the slots of block 0 (the
            null block) are skipped.
        windows: [N, H, block_size, 2 d], written in place, key first; last axis contiguous, blocks may be padded.
        num_tokens: tokens to write, at most T.

    Raises:
        ValueError: shapes do not agree, or a last axis is not contiguous.

    """
    check_append(key=key, value=value, slot_mapping=slot_mapping, windows=windows, num_tokens=num_tokens)
    if num_tokens == 0:
        return
    _, heads, d = key.shape
    block_heads = triton.next_power_of_2(heads)
    _append_kernel[(num_tokens,)](
        slot_mapping,
        *key_value_arguments(key=key, value=value, windows=windows),
        NUM_HEADS=heads,
        HEAD_SIZE=d,
        WINDOW_BLOCK=windows.shape[2],
        BLOCK_HEADS=block_heads,
        num_warps=num_warps(block_heads * d),
    )


def num_warps(elements: int) -> int:
    """Warps per program for ``elements`` keys of one token: 8 elements (16 bytes) a lane, between 1 and 8 warps."""
    return max(1, min(8, elements // 256))
