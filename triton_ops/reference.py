# SPDX-License-Identifier: Apache-2.0
"""What every kernel must compute, in plain PyTorch; also the CPU serving path and calibration's own quantizer.

Data flow of one layer in one step, the same nouns as in the kernels::

    append   key, value -> window blocks (BF16)
    demote   every page completed in the step -> INT2 page      encode_keys, encode_values, pack_*
    attend   sink + recent from BF16, history from pages, one softmax, history un-rotated at the end

Shapes: T tokens of the step, R requests, H KV heads, G query heads per KV head, d head size, N blocks in the pool.
All arithmetic is float32 with IEEE division and square root, in the order written here: kernels match packed pages
bit for bit. Nothing loops over tokens or heads; `attend` loops over requests.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from triton_ops.codec import LayerCodec, Quantizer
from triton_ops.layout import PAGE_TOKENS, FloatPageLayout, PageLayout

Layout = PageLayout | FloatPageLayout
Prefill = Literal["exact", "invariant"]

MIN_SCALE = 2.0**-14
"""Smallest row scale: float16's smallest normal number, so that a constant row divides by something."""
MAX_SCALE = 65504.0
TINY = 1e-30
"""Smallest divisor, for rows without any spread."""

_MAX_LOGITS = 1 << 22
"""Logits `attend` holds at a time; longer chunks are attended in blocks of queries, which also skip future keys."""


# ------------------------------------------------------------------------------------------------ packing


def _pack_planes(planes: Tensor) -> Tensor:
    """[..., rows, 4, 32] codes 0..3 -> [..., rows * 32] bytes in fragment order (layout.py)."""
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=planes.device)[:, None]
    packed = (planes.int() << shift).sum(-2, dtype=torch.int32).to(torch.uint8)
    return rearrange(packed, "... (rt r3 r7) (c4 c2 c0) -> ... (rt r7 c2 c4 r3 c0)", r3=2, r7=8, c4=2, c2=4)


def _unpack_planes(packed: Tensor) -> Tensor:
    """Inverse of `_pack_planes`; uint8."""
    order = "... (rt r7 c2 c4 r3 c0) -> ... (rt r3 r7) (c4 c2 c0)"
    rows = rearrange(packed, order, r7=8, c2=4, c4=2, r3=2, c0=4)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)[:, None]
    return (rows[..., None, :] >> shift) & 3


def pack_key_codes(codes: Tensor) -> Tensor:
    """[..., 128, d] slot codes 0..3 -> [..., 32 d] uint8 bytes."""
    d = codes.shape[-1]
    if d == 64:
        planes = rearrange(codes, "... (half row) (jl c) -> ... row (half jl) c", half=2, c=32)
    else:
        planes = rearrange(codes, "... token (g j c) -> ... (g token) j c", j=4, c=32)
    return _pack_planes(planes)


def unpack_key_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_key_codes`: [..., 32 d] uint8 -> [..., 128, d] uint8."""
    planes = _unpack_planes(packed)
    if packed.shape[-1] == 32 * 64:
        return rearrange(planes, "... row (half jl) c -> ... (half row) (jl c)", half=2)
    return rearrange(planes, "... (g token) j c -> ... token (g j c)", token=PAGE_TOKENS)


def pack_value_codes(codes: Tensor) -> Tensor:
    """[..., 128, d] codes 0..3 -> [..., 32 d] uint8 bytes (transposed: a row is a dimension)."""
    return _pack_planes(rearrange(codes, "... (j c4 c0 c3_1) dim -> ... dim j (c4 c3_1 c0)", c4=2, c0=2, c3_1=8))


def unpack_value_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_value_codes`: [..., 32 d] uint8 -> [..., 128, d] uint8."""
    return rearrange(_unpack_planes(packed), "... dim j (c4 c3_1 c0) -> ... (j c4 c0 c3_1) dim", c4=2, c0=2, c3_1=8)


def _metadata_bytes(vector: Tensor) -> Tensor:
    """[..., 128] float16 per token -> [..., 256] uint8 in metadata order."""
    ordered = rearrange(vector, "... (tile lane pair) -> ... (lane tile pair)", lane=4, pair=2)
    return ordered.contiguous().view(torch.uint8)


def _metadata_vector(packed: Tensor) -> Tensor:
    """Inverse of `_metadata_bytes`, float32."""
    vector = packed.contiguous().view(torch.float16)
    return rearrange(vector, "... (lane tile pair) -> ... (tile lane pair)", lane=4, pair=2).float()


# ------------------------------------------------------------------------------------------------ encoding


@dataclass(frozen=True)
class EncodedRows:
    """Quantized keys or values of pages. Rows are tokens.

    Attributes:
        codes: [P, H, 128, d] uint8, 0..3.
        scale: [P, H, 128] float16.
        zero: [P, H, 128] float16 per token; None for keys with ``zero="page"``.
        mean: [P, H, d] float16, the page's mean key; None unless ``zero="page"``.

    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    mean: Tensor | None

    def rows(self) -> Tensor:
        """[P, H, 128, d] float32 ``scale * code + zero`` (zero = -1.5 scale with a page mean)."""
        scale = self.scale.float()
        if self.zero is None:
            return scale[..., None] * (self.codes.float() - 1.5)
        return scale[..., None] * self.codes.float() + self.zero.float()[..., None]


def _affine(rows: Tensor, quantizer: Quantizer) -> EncodedRows:
    """Four levels with a scale and a zero per row; rows [..., d] float32 (``"minmax"``: paper section 3.3)."""
    if quantizer.kind == "gauss":
        # Cells of one size about the mean; levels whose product with the row is the row's with itself, so that far
        # values that are cut off shrink nothing: the errors of rounding average out over tokens, a shrinkage would not.
        mean = rows.mean(-1, keepdim=True)
        centred = rows - mean
        energy = centred.square().sum(-1, keepdim=True)
        step = (quantizer.constant * (energy / rows.shape[-1]).sqrt()).clamp_min(MIN_SCALE)
        codes = (centred / step + 2.0).floor().clamp(0, 3)
        covered = (centred * (codes - 1.5)).sum(-1, keepdim=True).clamp_min(TINY)
        scale = (energy / covered).clamp(MIN_SCALE, MAX_SCALE).half()
        zero = (mean - 1.5 * scale.float()).half()
    else:
        if quantizer.constant < 1.0:
            kth = min(int(quantizer.constant * rows.shape[-1]), rows.shape[-1] - 1)
            limit = rows.abs().sort(-1).values[..., kth : kth + 1]
            rows = torch.minimum(torch.maximum(rows, -limit), limit)
        low, high = rows.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 3.0).clamp(MIN_SCALE, MAX_SCALE).half()
        zero = low.half()
        codes = ((rows - zero.float()) / scale.float() + 0.5).floor().clamp(0, 3)
    return EncodedRows(codes.to(torch.uint8), scale.squeeze(-1), zero.squeeze(-1), None)


def encode_keys(key: Tensor, stored: Tensor, codec: LayerCodec) -> EncodedRows:
    """Quantize the keys of pages (README, "How it works").

    Args:
        key: [P, H, 128, d], any float dtype: keys after RoPE, as the model produced them.
        stored: [P, 128] bool: tokens that will be read from the page; sink tokens are not, and stay out of the
            page's mean and scales.
        codec: the layer's codec.

    """
    rows = key.float()
    keep = stored[:, None, :, None]
    if codec.zero == "token":
        rows = torch.where(keep, rows - codec.key_mean[:, None], 0.0)
        return _affine(rows @ codec.key_encode, codec.key_quantizer)
    count = stored.sum(1).clamp_min(1).float()[:, None, None]
    mean = (torch.where(keep, rows, 0.0).sum(2) / count).half()
    rows = torch.where(keep, rows - mean.float()[:, :, None], 0.0)
    precode = rows @ codec.key_encode
    scale = (codec.key_weight[:, None] * precode.square()).sum(-1).sqrt().clamp(MIN_SCALE, MAX_SCALE).half()
    levels = codec.key_levels[:, None]
    code = (precode / scale.float()[..., None] + levels / 2).floor()
    code = torch.minimum(code.clamp_min(0), (levels - 1).float()).int()
    return EncodedRows(((code >> (2 * codec.key_digit[:, None])) & 3).to(torch.uint8), scale, None, mean)


def encode_values(value: Tensor, codec: LayerCodec) -> EncodedRows:
    """Quantize the values of pages: [P, H, 128, d] any float dtype, as the model produced them."""
    return _affine((value.float() - codec.value_mean[:, None]) @ codec.value_rotation, codec.value_quantizer)


def decode_keys(encoded: EncodedRows, codec: LayerCodec) -> Tensor:
    """[P, H, 128, d] float32 keys in the model's basis."""
    mean = codec.key_mean if encoded.mean is None else encoded.mean.float()
    return encoded.rows() @ codec.key_query.transpose(1, 2) + mean[..., None, :]


def decode_values(encoded: EncodedRows, codec: LayerCodec) -> Tensor:
    """[P, H, 128, d] float32 values in the model's basis."""
    return encoded.rows() @ codec.value_rotation.transpose(1, 2) + codec.value_mean[:, None]


def pack(keys: EncodedRows, values: EncodedRows, layout: PageLayout) -> Tensor:
    """Bytes of pages, [P, H, page_bytes] uint8."""
    assert values.zero is not None
    last = keys.mean.view(torch.uint8) if keys.mean is not None else _metadata_bytes(keys.zero)
    sections = [
        pack_key_codes(keys.codes),
        pack_value_codes(values.codes),
        _metadata_bytes(keys.scale),
        _metadata_bytes(values.scale),
        _metadata_bytes(values.zero),
        last,
    ]
    page = torch.cat(sections, -1)
    assert page.shape[-1] == layout.page_bytes
    return page


def unpack(page: Tensor, layout: PageLayout) -> tuple[EncodedRows, EncodedRows]:
    """Keys and values of [P, H, page_bytes] uint8 pages, as they were encoded."""

    def vector(offset: int) -> Tensor:
        return _metadata_vector(page[..., offset : offset + 2 * PAGE_TOKENS]).half()

    last = page[..., layout.key_zero :].contiguous()
    keys = EncodedRows(
        unpack_key_codes(page[..., : layout.value_codes]),
        vector(layout.key_scale),
        vector(layout.key_zero) if layout.zero == "token" else None,
        last.view(torch.float16) if layout.zero == "page" else None,
    )
    values = EncodedRows(
        unpack_value_codes(page[..., layout.value_codes : layout.key_scale]),
        vector(layout.value_scale),
        vector(layout.value_zero),
        None,
    )
    return keys, values


def encode_pages(
    key: Tensor, value: Tensor, first_token: Tensor, *, codec: LayerCodec, layout: Layout, sink: int
) -> Tensor:
    """Bytes of whole pages.

    Args:
        key: [P, 128, H, d] keys after RoPE, as the model produced them; value likewise.
        value: [P, 128, H, d].
        first_token: [P] position in its sequence of each page's first token.
        codec: the layer's codec; ignored by `FloatPageLayout`.
        layout: the page layout.
        sink: tokens at positions below this are never read from pages.

    Returns:
        [P, H, page_bytes] uint8.

    """
    if isinstance(layout, FloatPageLayout):
        return rearrange(torch.cat([key, value], -1), "p t h c -> p h (t c)").contiguous().view(torch.uint8)
    stored = first_token[:, None] + torch.arange(PAGE_TOKENS, device=key.device) >= sink
    keys = encode_keys(rearrange(key, "p t h d -> p h t d"), stored, codec)
    # A token that is never read must not set the largest scale of its page, which kernels quantize weights against.
    value = torch.where(stored[:, :, None, None], value.float(), codec.value_mean)
    return pack(keys, encode_values(rearrange(value, "p t h d -> p h t d"), codec), layout)


def dequantize(
    page: Tensor, *, codec: LayerCodec, layout: Layout, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and values of pages in the model's basis, [P, 128, H, d] float32: what attention over pages approximates.

    Args:
        page: [P, H, page_bytes] uint8.
        codec: the layer's codec.
        layout: the page layout.
        dtype: element type of a `FloatPageLayout`.

    """
    if isinstance(layout, FloatPageLayout):
        both = rearrange(page.contiguous().view(dtype), "p h (t c) -> p t h c", t=PAGE_TOKENS).float()
        return both[..., : layout.head_size], both[..., layout.head_size :]
    keys, values = unpack(page, layout)
    return (
        rearrange(decode_keys(keys, codec), "p h t d -> p t h d"),
        rearrange(decode_values(values, codec), "p h t d -> p t h d"),
    )


# ------------------------------------------------------------------------------------------------ the cache


def append(key: Tensor, value: Tensor, *, slot_mapping: Tensor, windows: Tensor) -> None:
    """Write the step's tokens into window blocks.

    Args:
        key: [T, H, d] as the model produced it; value likewise.
        value: [T, H, d].
        slot_mapping: [T] int64, block * block_size + offset; -1 and slots of block 0 (the null block) are skipped.
        windows: [N, H, block_size, 2 d], written in place: key first, then value.

    """
    block_size = windows.shape[2]
    tokens = (slot_mapping >= block_size).nonzero().squeeze(1)
    slots = slot_mapping[tokens]
    both = torch.cat([key[tokens], value[tokens]], -1).to(windows.dtype)
    windows[slots // block_size, :, slots % block_size] = both


def completed_pages(query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Request and page index of every page whose last token is in the step, [P] int64 each."""
    seq_lens = seq_lens.long()
    first = (seq_lens - query_start_loc.diff()) // PAGE_TOKENS
    count = seq_lens // PAGE_TOKENS - first
    request = torch.arange(seq_lens.shape[0], device=seq_lens.device).repeat_interleave(count)
    within = torch.arange(request.shape[0], device=seq_lens.device) - (count.cumsum(0) - count)[request]
    return request, first[request] + within


def demote(
    key: Tensor,
    value: Tensor,
    *,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    layout: Layout,
    sink: int,
) -> None:
    """Quantize and pack every page completed in the step; `append` comes first.

    Args:
        key: [T, H, d] the step's keys; value likewise.
        value: [T, H, d].
        pages: [N, H, page_bytes] uint8, written in place.
        windows: [N, H, block_size, 2 d]: the tokens of earlier steps.
        page_table: [R, max_pages] history block of each page.
        window_table: [R, max_blocks] window block of each 16 tokens.
        query_start_loc: [R + 1] first token of each request in the step.
        seq_lens: [R] tokens of each request, this step's included.
        codec: the layer's codec.
        layout: the page layout.
        sink: sink tokens.

    """
    request, page = completed_pages(query_start_loc, seq_lens)
    if request.shape[0] == 0:
        return
    block_size, d = windows.shape[2], key.shape[-1]
    position = page[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=key.device)
    step_token = query_start_loc[request + 1][:, None] - seq_lens[request][:, None] + position
    in_step = (step_token >= query_start_loc[request][:, None])[..., None, None]
    block = window_table[request[:, None], position // block_size].long()
    earlier = windows[block, :, position % block_size]
    step_token = step_token.clamp_min(0).long()
    tokens_key = torch.where(in_step, key[step_token].to(windows.dtype), earlier[..., :d])
    tokens_value = torch.where(in_step, value[step_token].to(windows.dtype), earlier[..., d:])
    encoded = encode_pages(tokens_key, tokens_value, page * PAGE_TOKENS, codec=codec, layout=layout, sink=sink)
    pages[page_table[request, page].long()] = encoded


# ------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class _History:
    """Complete pages of one request in the codec's own coordinates, H leading; tokens are consecutive from 0.

    ``logit = query_slots . key_rows + query . key_mean[page]``; the output of history is un-rotated after the sum.
    """

    key_rows: Tensor  # [H, P * 128, d]
    key_mean: Tensor  # [H, P, d]
    value_rows: Tensor  # [H, P * 128, d]


def _read_history(page: Tensor, codec: LayerCodec, layout: Layout, dtype: torch.dtype) -> _History:
    if isinstance(layout, FloatPageLayout):
        key, value = dequantize(page, codec=codec, layout=layout, dtype=dtype)
        key, value = (rearrange(x, "p t h d -> h (p t) d") for x in (key, value))
        return _History(key, key.new_zeros(key.shape[0], page.shape[0], layout.head_size), value)
    keys, values = unpack(page, layout)
    mean = codec.key_mean.expand(page.shape[0], -1, -1) if keys.mean is None else keys.mean.float()
    return _History(
        rearrange(keys.rows(), "p h t d -> h (p t) d"),
        rearrange(mean, "p h d -> h p d"),
        rearrange(values.rows(), "p h t d -> h (p t) d"),
    )


def merge(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join partial attentions over disjoint keys into one softmax, exactly.

    Args:
        outputs: [S, ..., d] partial outputs; entries with ``lse = -inf`` are ignored, whatever they hold.
        lse: [S, ...] natural log of the partial sums of exponentials.

    Returns:
        (output [..., d], lse [...]); zeros and -inf where no part has a key.

    """
    total = torch.logsumexp(lse, 0)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    return torch.where(weight[..., None] > 0, outputs * weight[..., None], 0.0).sum(0), total


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pages: Tensor,
    windows: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    codec: LayerCodec,
    layout: Layout,
    scale: float,
    sink: int,
    recent: int,
    prefill: Prefill = "exact",
    max_decode_len: int = 1,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention over sink, history and recent; `append` and `demote` come first.

    A query at position q, of a request whose first token of the step is at q0, reads token t <= q
      * as BF16 from its window block (or from the step's own key and value) if t < sink or t > q - recent,
      * with ``prefill="exact"`` also as BF16 if t belongs to the step or, in a request with more than
        ``max_decode_len`` tokens in the step, if t > q0 - recent: such tokens are at hand unquantized, and all queries
        read the same. Few tokens are a decode or drafts to verify, which must see what plain decoding sees,
      * otherwise from its page. A recent token whose window block is null (the request resumed from a cached prefix
        without its recents) is read from its page as well.

    Args:
        query: [T, H * G, d].
        key: [T, H, d] the step's keys; value likewise.
        value: [T, H, d].
        pages: [N, H, page_bytes] uint8.
        windows: [N, H, block_size, 2 d].
        page_table: [R, max_pages]; window_table: [R, max_blocks], 0 = null block.
        window_table: see page_table.
        query_start_loc: [R + 1]; seq_lens: [R].
        seq_lens: see query_start_loc.
        codec: the layer's codec.
        layout: the page layout.
        scale: softmax scale.
        sink: tokens kept in BF16 at the start.
        recent: tokens kept in BF16 at the end, the query's own included; at least 128.
        prefill: the rule for tokens of the same step.
        max_decode_len: most tokens of a decode.
        soft_cap: c > 0 turns every scaled logit x into c tanh(x / c), as Gemma 2 does; 0 leaves logits as they are.

    Returns:
        (output [T, H * G, d] float32, lse [T, H * G] float32 natural log).

    """
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    starts = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if begin == end:
            continue
        # Complete pages; with "exact" only those that hold a token of an earlier step.
        num_pages = seq_len // PAGE_TOKENS
        if prefill == "exact":
            num_pages = min(num_pages, -(-(seq_len - end + begin) // PAGE_TOKENS))
        history = _read_history(pages[page_table[r, :num_pages].long()], codec, layout, windows.dtype)
        rows = max(1, _MAX_LOGITS // (query.shape[1] * seq_len))
        for at in range(begin, end, rows):
            until = min(at + rows, end)
            output[at:until], lse[at:until] = _attend_request(
                query[at:until],
                key[begin:until],
                value[begin:until],
                first_query=seq_len - (end - at),
                step=seq_len - (end - begin),
                history=history,
                windows=windows,
                blocks=window_table[r],
                codec=codec,
                rotated=not isinstance(layout, FloatPageLayout),
                scale=scale,
                sink=sink,
                recent=recent,
                prefill=prefill,
                decode=end - begin <= max_decode_len,
                soft_cap=soft_cap,
            )
    return output, lse


def _attend_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first_query: int,
    step: int,
    history: _History,
    windows: Tensor,
    blocks: Tensor,
    codec: LayerCodec,
    rotated: bool,
    scale: float,
    sink: int,
    recent: int,
    prefill: Prefill,
    decode: bool,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """`attend` for some consecutive queries of one request.

    ``key`` and ``value`` hold the step's tokens up to the last query; ``step`` is the position of the first of them.
    """
    device, d, block_size = query.device, query.shape[-1], windows.shape[2]
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    end = first_query + query.shape[0]
    q_position = torch.arange(first_query, end, device=device)[:, None]

    # Tokens of earlier steps that may be read as BF16: the sink, and what is recent for the first query here.
    t_sink = torch.arange(min(sink, step), device=device)
    shared = prefill == "exact" and not decode  # all queries read the same recent tokens
    t_recent = torch.arange(min(max(sink, (step if shared else first_query) - recent + 1), step), step, device=device)
    earlier = torch.cat([t_sink, t_recent])
    block = blocks[earlier // block_size].long()
    present = block != 0
    both = torch.where(present[:, None, None], windows[block, :, earlier % block_size].float(), 0.0)
    exact_key = rearrange(torch.cat([both[..., :d], key.float()]), "t h d -> h t d")
    exact_value = rearrange(torch.cat([both[..., d:], value.float()]), "t h d -> h t d")
    exact_position = torch.cat([earlier, torch.arange(step, end, device=device)])
    available = torch.cat([present, present.new_ones(key.shape[0])])

    def reads_exact(position: Tensor) -> Tensor:  # [queries, tokens]
        rule = (position < sink) | (position > (step if shared else q_position) - recent)
        return rule | (position >= step) if prefill == "exact" else rule

    q = rearrange(query.float(), "n (h g) d -> h (n g) d", g=groups)
    use_exact = reads_exact(exact_position) & available & (exact_position <= q_position)
    logits_exact = (q @ exact_key.transpose(1, 2)) * scale

    pages = min(history.key_mean.shape[1], -(-end // PAGE_TOKENS))
    t_history = torch.arange(pages * PAGE_TOKENS, device=device)
    bf16 = torch.zeros(max(end, t_history.shape[0]), dtype=torch.bool, device=device)
    bf16[exact_position] = available
    use_history = (t_history <= q_position) & (t_history >= sink)
    use_history &= ~(reads_exact(t_history) & bf16[: t_history.shape[0]])
    slots = q @ codec.key_query if rotated else q
    from_mean = (q @ history.key_mean[:, :pages].transpose(1, 2)).repeat_interleave(PAGE_TOKENS, 2)
    logits_history = (slots @ history.key_rows[:, : t_history.shape[0]].transpose(1, 2) + from_mean) * scale

    use = torch.cat([use_exact, use_history], 1).repeat_interleave(groups, 0)
    weight = torch.cat([logits_exact, logits_history], 2)
    if soft_cap:
        weight.div_(soft_cap).tanh_().mul_(soft_cap)
    weight.masked_fill_(~use, -torch.inf)
    largest = weight.amax(2, keepdim=True)
    weight.sub_(largest).exp_()
    total = weight.sum(2, keepdim=True)
    from_exact, from_history = weight.split([exact_position.shape[0], t_history.shape[0]], 2)
    out_history = from_history @ history.value_rows[:, : t_history.shape[0]]
    if rotated:
        out_history = out_history @ codec.value_rotation.transpose(1, 2)
        out_history = out_history + from_history.sum(2, keepdim=True) * codec.value_mean[:, None]
    lse = (largest + total.log()).squeeze(2)
    out = (from_exact @ exact_value + out_history) / total
    shape = {"h": heads, "g": groups}
    return rearrange(out, "h (n g) d -> n (h g) d", **shape), rearrange(lse, "h (n g) -> n (h g)", **shape)
