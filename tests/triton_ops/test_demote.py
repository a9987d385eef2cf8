# SPDX-License-Identifier: Apache-2.0
"""The demote kernel against the reference: equal bytes where arithmetic is exact, equal up to rounding elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.triton_ops.step_cases import DEVICES, make_step
from tests.triton_ops.test_codec import random_basis, random_spectral
from triton_ops import reference
from triton_ops.codec import LayerCodec, Quantizer, hadamard, rotation_codec
from triton_ops.demote import demote, launch_shape, page_bound, quantile_index
from triton_ops.layout import PAGE_TOKENS, PageLayout

# (tokens before the step, tokens of the step): a page inside a chunk, one across two chunks, one finished by a single
# token, two in a step, none, and a padded request.
REQUESTS = [(0, 130), (100, 60), (383, 1), (200, 200), (10, 5), (128, 0)]
SINK = 64


def run(step, device, codec, layout, **options):
    """Pages after `demote` on a device, on the CPU."""
    moved = step.to(device)
    demote(
        key=moved.key,
        value=moved.value,
        **moved.cache(),
        codec=codec.to(device),
        layout=layout,
        sink=SINK,
        **{**step.sizes, **options},
    )
    return moved.pages.cpu()


def expected_pages(step, codec, layout):
    pages = step.pages.clone()
    cache = step.cache() | {"pages": pages}
    reference.demote(step.key, step.value, **cache, codec=codec, layout=layout, sink=SINK)
    return pages


# ------------------------------------------------------------------------------------------ exact arithmetic


def signs(d: int) -> torch.Tensor:
    """[d, d] matrix of ±1 with orthogonal rows."""
    return hadamard(d).mul(d**0.5).round().float()


def exact_codec(heads: int, d: int, kind: str) -> tuple[LayerCodec, PageLayout]:
    """Matrices of ±1 and powers of two, so that every product and sum below is exact in float32."""
    quantizer = {
        "gauss": Quantizer("gauss", 1.1),
        "clip": Quantizer("minmax", 0.92),
        "minmax": Quantizer("minmax", 1.0),
    }
    value_kind = "gauss" if kind == "spectral" else kind
    rotation = torch.stack([signs(d).roll(h, 1) for h in range(heads)])
    means = (torch.arange(heads * d).view(heads, d) % 3 - 1).float()
    zeros = torch.zeros(heads, d)
    zero = "page" if kind == "spectral" else "token"
    slot = torch.arange(d)
    # Directions of 4, 16, 64 and 256 levels by quarters of the slots; matrix columns repeat for a direction's digits.
    digits = torch.tensor([1, 2, 3, 4])[slot * 4 // d]
    first = slot - slot % digits
    return LayerCodec(
        zero=zero,
        key_encode=rotation[:, :, first] * 2.0 ** (digits - 3) if zero == "page" else rotation,
        key_query=rotation,
        key_levels=(4**digits).int().expand(heads, d).contiguous(),
        key_digit=(slot % digits).int().expand(heads, d).contiguous(),
        key_weight=(2.0 ** -(2 * digits)).float().expand(heads, d).contiguous(),
        key_mean=zeros if zero == "page" else means,
        value_rotation=rotation.flip(0).contiguous(),
        value_mean=means,
        key_quantizer=quantizer[value_kind],
        value_quantizer=quantizer[value_kind],
    ), PageLayout(d, zero)


def integers_of(codec: LayerCodec, matrix: torch.Tensor, mean: torch.Tensor, generator: torch.Generator):
    """Tokens whose projection is d times small integers with a row mean of 0, and whose page mean is an integer."""

    def make(count: int) -> torch.Tensor:
        heads, d, _ = matrix.shape
        half = torch.randint(-3, 4, (count, heads, d // 2), generator=generator).float()
        target = torch.cat([half, -half.flip(2)], 2)
        # Tokens 32 to 63 of every 64 mirror the 32 before them, so a page sums to the constant added below.
        position = torch.arange(count)
        mirrored = position % 64 >= 32
        target[mirrored] = -target[position[mirrored] - 32]
        tokens = torch.einsum("thd,hed->the", target, matrix) + mean
        return tokens + (3.0 if codec.zero == "page" else 0.0)

    return make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["spectral", "gauss", "clip", "minmax"])
@pytest.mark.parametrize(
    ("heads", "d", "tokens_per_program"), [(1, 64, 32), (1, 64, 128), (2, 128, 128), (1, 128, 64), (1, 256, 32)]
)
def test_bytes_equal_the_reference_where_arithmetic_is_exact(device, heads, d, kind, tokens_per_program):
    codec, layout = exact_codec(heads, d, kind)
    generator = torch.Generator().manual_seed(d)
    keys = integers_of(codec, signs(d).expand(heads, d, d), codec.key_mean, generator)
    values = integers_of(codec, codec.value_rotation, codec.value_mean, generator)
    step = make_step(REQUESTS, heads=heads, d=d, layout=layout, sink=SINK, keys=keys, values=values)
    assert bool((step.key.float() == step.key.float().round()).all())
    assert float(step.key.abs().max()) <= 256  # exact in bfloat16
    actual = run(step, device, codec, layout, tokens_per_program=tokens_per_program)
    expected = expected_pages(step, codec, layout)
    assert bool((expected != step.pages).flatten(1).any(1).sum() == 5)
    assert torch.equal(actual, expected)


# ------------------------------------------------------------------------------------------ real values


def real_codec(heads: int, d: int, kind: str) -> tuple[LayerCodec, PageLayout]:
    if kind == "spectral":
        return random_spectral(heads, d, 8), PageLayout(d, "page")
    zero = "token" if kind in ("token", "clip") else "page"
    means = torch.randn(2, heads, d, generator=torch.Generator().manual_seed(5))
    quantizer = Quantizer("minmax", 0.96) if kind == "clip" else Quantizer("gauss", 1.1)
    codec = rotation_codec(
        random_basis(heads, d, 3),
        random_basis(heads, d, 4),
        zero=zero,
        key_quantizer=quantizer,
        value_quantizer=quantizer,
        key_mean=means[0] if zero == "token" else None,
        value_mean=means[1],
    )
    return codec, PageLayout(d, zero)


def levels_of(
    rows: torch.Tensor, encoded: reference.EncodedRows, codec: LayerCodec, is_key: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 values before `floor`, and the size of a code's cell.

    Where the codes depend on what a page really stores (scales, zeros, means), that is what they are taken from.
    """
    rows = rows.double()
    scale = encoded.scale.double()[..., None]
    if is_key and codec.zero == "page":
        return rows @ codec.key_encode.double() / scale + codec.key_levels[:, None].double() / 2, scale
    rows = rows @ (codec.key_encode if is_key else codec.value_rotation).double()
    quantizer = codec.key_quantizer if is_key else codec.value_quantizer
    if quantizer.kind == "minmax":
        return (rows - encoded.zero.double()[..., None]) / scale + 0.5, scale
    centred = rows - rows.mean(-1, keepdim=True)
    cell = (quantizer.constant * centred.square().mean(-1, keepdim=True).sqrt()).clamp_min(reference.MIN_SCALE)
    return centred / cell + 2.0, cell


def stored_scales(
    rows: torch.Tensor, encoded: reference.EncodedRows, codec: LayerCodec, is_key: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 scale and zero of ``"gauss"`` rows from the codes that a page really stores: [P, H, 128] each."""
    rows = rows.double() @ (codec.key_encode if is_key else codec.value_rotation).double()
    mean = rows.mean(-1, keepdim=True)
    covered = ((rows - mean) * (encoded.codes.double() - 1.5)).sum(-1)
    scale = (rows - mean).square().sum(-1) / covered.clamp_min(1e-30)
    scale = scale.clamp(reference.MIN_SCALE, reference.MAX_SCALE)
    return scale, mean[..., 0] - 1.5 * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["spectral", "page", "token", "clip"])
@pytest.mark.parametrize(("heads", "d"), [(1, 64), (2, 128), (1, 256)])
def test_real_values_differ_only_where_rounding_decides(device, heads, d, kind):
    """Scales within one float16 rounding of the reference's, or where they follow from the codes (``"gauss"`` with a
    zero per token) of what the codes give; codes equal unless the level lies at an integer.

    A projection is a sum of d products, so its float32 error is at most (d + 4) half-ulps of sum |x||matrix|; the
    levels' error is that divided by the scale, plus a few ulps of the level itself.
    """
    codec, layout = real_codec(heads, d, kind)
    step = make_step(REQUESTS, heads=heads, d=d, layout=layout, sink=SINK, seed=d)
    actual, expected = run(step, device, codec, layout), expected_pages(step, codec, layout)
    written = (expected != step.pages).flatten(1).any(1)
    assert torch.equal(actual[~written], step.pages[~written])
    request, page = reference.completed_pages(step.query_start_loc, step.seq_lens)
    block = step.page_table[request, page].long()
    assert torch.equal(block.sort().values, written.nonzero().squeeze(1))
    tokens = gather(step, request, page)
    stored = (page[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS) >= SINK)[:, None, :, None]
    close = 0
    pairs = zip(reference.unpack(actual[block], layout), reference.unpack(expected[block], layout), strict=True)
    for (ours, theirs), rows, is_key in zip(pairs, tokens.split(d, -1), (True, False), strict=True):
        matrix = codec.key_encode if is_key else codec.value_rotation
        largest = rows.double().abs().amax()
        if is_key:
            centre = codec.key_mean[:, None] if ours.mean is None else ours.mean.float()[:, :, None]
            rows = torch.where(stored, rows - centre, 0.0)
        else:
            rows = torch.where(stored, rows - codec.value_mean[:, None], 0.0)
        expected_scales = {name: getattr(theirs, name) for name in ("scale", "zero", "mean")}
        if theirs.zero is not None and (codec.key_quantizer if is_key else codec.value_quantizer).kind == "gauss":
            expected_scales["scale"], expected_scales["zero"] = stored_scales(rows, ours, codec, is_key)
        for name, b in expected_scales.items():
            a = getattr(ours, name)
            if b is not None:
                assert bool(a.isfinite().all())
                # One float16 rounding apart at most; a zero near 0 carries the projection's absolute error.
                slack = 2.0**-10 * b.double().abs() + 2.0**-20 * largest
                assert bool(((a.double() - b.double()).abs() <= slack).all()), name
                assert float((a != getattr(theirs, name)).double().mean()) < 0.01, name
        level, cell = levels_of(rows, ours, codec, is_key)
        magnitude = rows.double().abs() @ matrix.double().abs() / cell
        bound = 2.0**-24 * ((d + 4) * magnitude + 8 * level.abs() + 8)
        near = (level - level.round()).abs() <= bound
        if is_key and codec.zero == "page":
            top = codec.key_levels[:, None].double() - 1
            code = torch.minimum(level.floor().clamp_min(0), top).int()
            code = (code >> (2 * codec.key_digit[:, None])) & 3
        else:
            code = level.floor().clamp(0, 3).int()
        assert bool(((code == ours.codes) | near).all())
        close += int((near & (code != ours.codes)).sum())
    assert close <= 4


def gather(step, request, page) -> torch.Tensor:
    """[P, H, 128, 2 d] float32: the tokens of pages, from the step or the windows."""
    position = page[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
    first = step.seq_lens[request] - step.query_start_loc.diff()[request]
    index = (step.query_start_loc[request] - first)[:, None] + position
    new = torch.cat([step.key, step.value], -1)[index.clamp(0, step.key.shape[0] - 1)]
    old = step.windows[step.window_table[request[:, None], position // 16].long(), :, position % 16]
    return torch.where((position >= first[:, None])[..., None, None], new, old).float().transpose(1, 2)


# ------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("device", DEVICES)
def test_decode_finishes_pages_of_some_requests(device):
    """One token each: the grid has a column per request, and only full pages are written."""
    codec, layout = exact_codec(1, 128, "minmax")
    step = make_step([(127, 1), (300, 1), (255, 1), (0, 1), (0, 0)], heads=1, d=128, layout=layout, sink=SINK)
    actual, expected = run(step, device, codec, layout), expected_pages(step, codec, layout)
    assert torch.equal(actual, expected)
    assert int((actual != step.pages).flatten(1).any(1).sum()) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_many_requests_in_one_step(device):
    """The search for a program's page runs over several blocks of requests."""
    codec, layout = exact_codec(1, 64, "minmax")
    counts = [(5, 0)] * 255 + [(100, 300), (127, 1), (0, 1), (127, 2)]
    step = make_step(counts, heads=1, d=64, layout=layout, sink=0)
    moved = step.to(device)
    demote(
        key=moved.key, value=moved.value, **moved.cache(), codec=codec.to(device), layout=layout, sink=0,
        num_tokens=304, num_requests=len(counts), max_query_len=300, tokens_per_program=128,
    )  # fmt: skip
    expected = step.pages.clone()
    reference.demote(step.key, step.value, **step.cache() | {"pages": expected}, codec=codec, layout=layout, sink=0)
    assert torch.equal(moved.pages.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_inputs_and_padded_blocks(device):
    """Keys and values are slices of one projection; pages and windows share padded storage."""
    codec, layout = exact_codec(2, 128, "minmax")
    step = make_step([(100, 60), (0, 130)], heads=2, d=128, layout=layout, sink=SINK)
    expected = expected_pages(step, codec, layout)
    moved = step.to(device)
    qkv = torch.cat([moved.query, moved.key, moved.value], 1)
    storage = torch.full((step.pages.shape[0], 2 * layout.page_bytes + 64), 255, dtype=torch.uint8, device=device)
    pages = storage[:, : 2 * layout.page_bytes].view(-1, 2, layout.page_bytes)
    demote(
        key=qkv[:, 2:4], value=qkv[:, 4:], **moved.cache() | {"pages": pages}, codec=codec.to(device), layout=layout,
        sink=SINK, **step.sizes,
    )  # fmt: skip
    assert torch.equal(pages.cpu(), expected)
    assert bool((storage[:, 2 * layout.page_bytes :] == 255).all())


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 700)), min_size=1, max_size=20))
def test_the_grid_covers_every_completed_page(requests):
    lengths = torch.tensor([before + new for before, new in requests])
    starts = torch.tensor([0, *(new for _, new in requests)]).cumsum(0)
    completed = reference.completed_pages(starts, lengths)[0].shape[0]
    longest = max(new for _, new in requests)
    bound = page_bound(num_tokens=int(starts[-1]), num_requests=len(requests), max_query_len=longest)
    assert completed <= bound
    if longest <= PAGE_TOKENS:
        assert reference.completed_pages(starts, lengths)[0].unique().shape[0] == completed


def test_launch_choices():
    assert page_bound(num_tokens=32, num_requests=32, max_query_len=1) == 32
    assert page_bound(num_tokens=8192, num_requests=1, max_query_len=8192) == 64
    decode, chunk = {"max_query_len": 1, "num_heads": 8}, {"max_query_len": 8192, "num_heads": 8}
    assert launch_shape(bound=256, head_size=128, **decode) == (32, 4)
    assert launch_shape(bound=2, head_size=128, **chunk) == (32, 4)
    assert launch_shape(bound=64, head_size=128, **chunk) == (128, 8)
    assert launch_shape(bound=782, head_size=256, **chunk) == (32, 8)
    assert quantile_index(Quantizer("minmax", 0.92), 128) == 117
    assert quantile_index(Quantizer("minmax", 1.0), 128) == 127
    assert quantile_index(Quantizer("gauss", 1.1), 128) == 0


def test_refuses_what_does_not_fit():
    codec, layout = exact_codec(2, 128, "minmax")
    step = make_step([(0, 130)], heads=2, d=128, layout=layout)
    arguments = {**step.cache("key", "value"), **step.sizes, "codec": codec, "layout": layout, "sink": 64}
    with pytest.raises(ValueError, match="zero='token'"):
        demote(**arguments | {"layout": PageLayout(128, "page")})
    with pytest.raises(ValueError, match="do not agree"):
        demote(**arguments | {"codec": codec.heads(slice(0, 1))})
    with pytest.raises(ValueError, match="do not fit"):
        demote(**arguments | {"pages": step.pages[..., :-4]})
    with pytest.raises(ValueError, match="contiguous"):
        demote(**arguments | {"key": step.key.transpose(1, 2).contiguous().transpose(1, 2)})
