# SPDX-License-Identifier: Apache-2.0
"""Decode attention and merge against `reference.attend` on the same cache: worst row and head, not the average."""

import math

import pytest
import torch

from tests.triton_ops.step_cases import DEVICES, Step, make_step
from tests.triton_ops.test_codec import random_basis, random_spectral
from triton_ops import reference
from triton_ops.attend_decode import (
    DecodeWorkspace,
    MergeOptions,
    attend_decode,
    merge_columns,
    merge_options,
)
from triton_ops.codec import LayerCodec, Quantizer, rotation_codec
from triton_ops.layout import PAGE_TOKENS, PageLayout
from triton_ops.prepare import MAX_INTEGER, QueryMatrix, prepare_query
from triton_ops.schedule import DecodeSchedule, decode_grid

# Beside rounding in float32, probabilities times value scale in 14 bits or float16: relative to a row's norm.
TOLERANCE = 3e-4


def make_codec(heads: int, d: int, kind: str) -> tuple[LayerCodec, PageLayout]:
    if kind == "spectral":
        return random_spectral(heads, d, 4), PageLayout(d, "page")
    gauss = Quantizer("gauss", 1.1)
    bases = random_basis(heads, d, 3), random_basis(heads, d, 4)
    if kind == "page":
        return rotation_codec(*bases, zero="page", key_quantizer=gauss, value_quantizer=gauss), PageLayout(d, "page")
    means = torch.randn(2, heads, d, generator=torch.Generator().manual_seed(5))
    codec = rotation_codec(
        *bases,
        zero="token",
        key_quantizer=gauss,
        value_quantizer=gauss,
        key_mean=means[0],
        value_mean=means[1],
    )
    return codec, PageLayout(d, "token")


def kind_of(codec: LayerCodec) -> str:
    return "spectral" if bool((codec.key_digit > 0).any()) else codec.zero


def decode_step(requests, *, heads, d, codec, layout, **options) -> Step:
    """A step after `append` and `demote`: every complete page is packed, the step's tokens lie in their windows."""
    drawn: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1)
    dtype = options.get("dtype", torch.bfloat16)
    value_of_sinks = options.pop("value_of_sinks", 1.0)

    def draw(count: int) -> torch.Tensor:
        # Keys share a mean, as trained keys do, and values an offset.
        shared = torch.randn(1, heads, d, generator=generator)
        drawn.append((torch.randn(count, heads, d, generator=generator) + shared).to(dtype))
        return drawn[-1]

    step = make_step(requests, heads=heads, d=d, layout=layout, keys=draw, values=draw, **options)
    for r in range(len(requests)):
        key, value = drawn[2 * r], drawn[2 * r + 1]
        count = key.shape[0] // PAGE_TOKENS
        if count == 0:
            continue
        shape = (count, PAGE_TOKENS, heads, d)
        first = torch.arange(count) * PAGE_TOKENS
        key, value = (x[: count * PAGE_TOKENS].view(shape) for x in (key, value))
        value = torch.where(
            torch.arange(PAGE_TOKENS)[:, None, None] + first.view(-1, 1, 1, 1) < 64, value_of_sinks * value, value
        )
        encoded = reference.encode_pages(key, value, first, codec=codec, layout=layout, sink=options.get("sink", 64))
        step.pages[step.page_table[r, :count].long()] = encoded
    if kind_of(codec) == "spectral":
        step.query.mul_(0.125)  # the random spectrum is steep: bring logits down to a standard deviation of about 3
    reference.append(step.key, step.value, slot_mapping=step.slot_mapping, windows=step.windows)
    return step


def run(step, device, codec, layout, *, sink, recent, soft_cap=0.0, programs=24, strided=False):
    """Output [T, Hq, d] and lse [T, Hq] of the kernels on a device, on the CPU."""
    moved, codec = step.to(device), codec.to(device)
    tokens, query_heads, d = step.query.shape
    query = moved.query
    if strided:
        wide = torch.full((tokens, query_heads + 3, d + 16), torch.nan, dtype=query.dtype, device=device)
        wide[:, 2 : 2 + query_heads, :d] = query
        query = wide[:, 2 : 2 + query_heads, :d]
    sizes = {"num_query_heads": query_heads, "num_kv_heads": codec.num_kv_heads, "head_size": d}
    requests = step.seq_lens.shape[0]
    queries = int(step.query_start_loc.diff().max())
    workspace = DecodeWorkspace.allocate(
        max_requests=requests,
        max_query_len=queries,
        device=device,
        multiprocessors=-(-programs * codec.num_kv_heads // 12),
        capability=(9, 0),
        **sizes,
    )
    for tensor in (workspace.partial, workspace.stats, workspace.prepared.factors, workspace.prepared.plain):
        tensor.fill_(torch.nan)
    workspace.prepared.fragments.fill_(111)
    workspace.prepared.sums.fill_(12345)
    schedule = DecodeSchedule.allocate(max_requests=requests, multiprocessors=132, device=device)
    grid = workspace.grid(num_requests=requests, max_query_len=queries, **sizes)
    metadata = {"query_start_loc": moved.query_start_loc, "seq_lens": moved.seq_lens}
    schedule.update(
        grid=grid,
        window_table=moved.window_table,
        window_block_size=moved.windows.shape[2],
        sink=sink,
        recent=recent,
        **metadata,
    )
    scale = d**-0.5
    matrix = QueryMatrix.of(codec)
    prepare_query(
        query=query, codec=codec, matrix=matrix, grid=grid, scale=scale, prepared=workspace.prepared, **metadata
    )
    output = torch.full((tokens, query_heads, d), torch.nan, device=device)
    lse = torch.full((query_heads, tokens), torch.nan, device=device)
    attend_decode(
        query=query,
        **moved.cache(),
        codec=codec,
        layout=layout,
        scale=scale,
        sink=sink,
        recent=recent,
        schedule=schedule,
        workspace=workspace,
        output=output,
        lse=lse,
        soft_cap=soft_cap,
    )
    return output.cpu(), lse.T.cpu()


def logit_noise(step, codec, layout) -> torch.Tensor:
    """[T, Hq] root mean square error that 16-bit slot weights leave in a logit: uniform rounding times the codes."""
    tokens, query_heads, d = step.query.shape
    query = step.query.float().view(tokens, codec.num_kv_heads, -1, d)
    weights = torch.einsum("thgd,hds->thgs", query, codec.key_query)
    factor = torch.where(torch.arange(d) // 32 % 2 == 1, 4.0, 1.0)
    unit = (weights.abs() / factor).amax(-1) / MAX_INTEGER
    scale = reference.unpack(step.pages, layout)[0].scale.float()
    scale = scale.square().nanmean((0, 2)).sqrt()  # [H]; pages nobody wrote are NaN
    rounding = unit * (factor.square().sum() / 12 * 1.25).sqrt()
    return (rounding * scale[:, None] * d**-0.5).view(tokens, query_heads)


def check(step, device, codec, layout, *, sink=64, recent=256, soft_cap=0.0, tolerance=TOLERANCE, **options):
    expected, expected_lse = reference.attend(
        step.query, step.key, step.value, **step.cache(), codec=codec, layout=layout, scale=step.query.shape[2] ** -0.5,
        sink=sink, recent=recent, max_decode_len=16, soft_cap=soft_cap,
    )  # fmt: skip
    output, lse = run(step, device, codec, layout, sink=sink, recent=recent, soft_cap=soft_cap, **options)
    assert not output.isnan().any(), "unwritten or NaN output"
    assert not lse.isnan().any(), "unwritten or NaN lse"
    error = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
    noise = 4 * logit_noise(step, codec, layout)
    worst = divmod(int((error - noise).argmax()), error.shape[1])
    lse_error = (lse - expected_lse).abs()
    print(f"error {error.max():.1e}, lse {lse_error.max():.1e}, noise bound {noise.max():.1e}, worst row {worst}")
    assert (error < tolerance + noise).all(), (worst, float(error[worst]), float(noise[worst]))
    assert (lse_error < 1e-4 + noise).all(), (float(lse_error.max()), float(noise.max()))


LENGTHS = [1, 63, 64, 65, 127, 128, 129, 319, 320, 321, 447, 448, 1000]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["spectral", "page", "token"])
def test_ragged_lengths(device, kind):
    """All edge lengths in one batch, one token each, with a padded request in between."""
    heads = 2 if kind == "spectral" else 1
    codec, layout = make_codec(heads, 128, kind)
    requests = [(length - 1, 1) for length in LENGTHS]
    requests.insert(5, (0, 0))
    step = decode_step(requests, heads=heads, d=128, groups=4, codec=codec, layout=layout)
    check(step, device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sink", "recent"), [(0, 128), (16, 144), (64, 512), (128, 128)])
def test_window_sizes(device, sink, recent):
    codec, layout = make_codec(1, 64, "spectral")
    requests = [(length - 1, 1) for length in (1, 130, 700, 900)]
    step = decode_step(requests, heads=1, d=64, groups=4, codec=codec, layout=layout, sink=sink, recent=recent)
    check(step, device, codec, layout, sink=sink, recent=recent)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("groups", "kind"),
    [(1, "page"), (3, "page"), (4, "token"), (5, "page"), (8, "token"), (12, "page"), (12, "token"), (16, "token")],
)
def test_group_sizes(device, groups, kind, d):
    """Every number of rows, and with it every order of the sums, with both kinds of zero; masked pages too."""
    codec, layout = make_codec(1, d, kind)
    step = decode_step([(799, 1), (140, 1)], heads=1, d=d, groups=groups, codec=codec, layout=layout)
    check(step, device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "groups", "d"), [(2, 2, 128), (5, 4, 64), (8, 1, 256), (16, 3, 64), (3, 6, 128)])
def test_several_query_tokens(device, queries, groups, d):
    """Speculative verification: causal inside the step, each query with its own edge of history."""
    codec, layout = make_codec(1, d, "spectral")
    requests = [(500, queries), (256 - queries, queries), (0, queries), (384, max(1, queries // 2))]
    step = decode_step(requests, heads=1, d=d, groups=groups, codec=codec, layout=layout)
    check(step, device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 4])
def test_recents_missing_after_a_prefix_hit(device, queries):
    """Recent tokens whose window block is null are read from their pages."""
    codec, layout = make_codec(1, 128, "spectral")
    requests = [(512 + 40, queries), (640, queries), (1000, queries)]
    step = decode_step(requests, heads=1, d=128, groups=2, codec=codec, layout=layout, drop_recents=True)
    check(step, device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
def test_null_blocks_in_the_middle_of_the_recents(device):
    """Not how the window manager frees blocks, but the rule is per token and so is the kernel."""
    codec, layout = make_codec(1, 64, "page")
    step = decode_step([(900, 1)], heads=1, d=64, groups=4, codec=codec, layout=layout)
    step.window_table[0, [42, 45, 46]] = 0
    check(step, device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("programs", [1, 3, 7, 64])
def test_any_number_of_splits(device, programs):
    codec, layout = make_codec(1, 64, "page")
    step = decode_step([(1000, 1), (400, 1), (30, 1)], heads=1, d=64, groups=4, codec=codec, layout=layout)
    check(step, device, codec, layout, programs=programs)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_strided_query_and_padded_blocks(device):
    codec, layout = make_codec(2, 64, "spectral")
    step = decode_step([(700, 1), (200, 1)], heads=2, d=64, groups=3, codec=codec, layout=layout, dtype=torch.float16)
    pages = torch.full((step.pages.shape[0], step.pages[0].numel() + 512), 255, dtype=torch.uint8)
    pages[:, : step.pages[0].numel()] = step.pages.flatten(1)
    windows = torch.full((step.windows.shape[0], step.windows[0].numel() + 96), torch.nan, dtype=torch.float16)
    windows[:, : step.windows[0].numel()] = step.windows.flatten(1)
    object.__setattr__(step, "pages", pages[:, : step.pages[0].numel()].view(step.pages.shape))
    object.__setattr__(step, "windows", windows[:, : step.windows[0].numel()].view(step.windows.shape))
    check(step, device, codec, layout, strided=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [4, 8])
def test_value_scales_far_apart(device, groups):
    """Weights are quantized against the largest value scale: scales up to 100 overflow nothing."""
    codec, layout = make_codec(1, 128, "page")
    step = decode_step([(1000, 1)], heads=1, d=128, groups=groups, codec=codec, layout=layout)
    scale = step.pages.view(torch.float16)[..., layout.value_scale // 2 : layout.value_zero // 2]
    scale *= torch.logspace(-2, 2, PAGE_TOKENS).half()
    check(step, device, codec, layout, tolerance=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [4, 8])
def test_values_of_sinks_leave_their_page_alone(device, groups):
    """Nobody reads them from there, so they must not set the scale that the page's weights are quantized against."""
    codec, layout = make_codec(1, 64, "page")
    options = {"heads": 1, "d": 64, "groups": groups, "codec": codec, "layout": layout, "value_of_sinks": 1e5}
    check(decode_step([(1300, 1)], **options), device, codec, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 2])
def test_a_dummy_batch_gives_numbers(device, queries):
    """All block tables are null, as in vLLM's warm-up and on idle data-parallel ranks: nothing is read, 0 comes out."""
    codec, layout = make_codec(1, 64, "page")
    step = make_step([(0, queries), (0, queries)], heads=1, d=64, layout=layout, groups=4)
    for name in ("window_table", "page_table", "windows", "pages"):
        getattr(step, name).zero_()
    output, lse = run(step, device, codec, layout, sink=64, recent=256)
    assert bool((output == 0).all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("groups", [4, 8])
def test_pages_of_very_different_size(device, groups, d, monkeypatch):
    """One program reads pages whose logits or value scales are far above, then far below, those before them."""
    monkeypatch.setattr("triton_ops.schedule.resident_programs", lambda **_: 1)
    codec, layout = make_codec(1, d, "page")
    step = decode_step([(1500, 1)], heads=1, d=d, groups=groups, codec=codec, layout=layout)
    numbers = step.pages.view(torch.float16)
    values = slice(layout.value_scale // 2, layout.key_zero // 2)  # scales and zeros
    direction = step.query[0, :1].half() / step.query[0, 0].norm()
    sizes, logits = [1, 8, 1, 4, 10000, 10000, 1, 8, 2], [0, 0, 20, 40, 40, 20, 60, 30, 60]
    for page, size, logit in zip(step.page_table[0, :9].tolist(), sizes, logits, strict=True):
        numbers[page, :, values] *= size
        numbers[page, :, layout.key_zero // 2 :] += logit * direction
    check(step, device, codec, layout, programs=1)


@pytest.mark.parametrize("device", DEVICES)
def test_large_logits(device):
    """One token takes nearly all the weight; logits span hundreds of units."""
    codec, layout = make_codec(1, 128, "spectral")
    step = decode_step([(1200, 1), (700, 3)], heads=1, d=128, groups=4, codec=codec, layout=layout)
    step.query.mul_(12)
    check(step, device, codec, layout, tolerance=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "merge",
    [
        MergeOptions(1, slots=16, tail=4),
        MergeOptions(4, slots=8, tail=2),
        MergeOptions(2, slots=4, tail=0),
    ],
    ids=str,
)
def test_merge_options_change_nothing(device, merge, monkeypatch):
    """More partials than a tile holds, rows with different numbers of them, and a request of no tokens."""
    monkeypatch.setattr("triton_ops.attend_decode.merge_options", lambda **_: merge)
    codec, layout = make_codec(2, 128, "spectral")
    requests = [(799, 1), (3400, 1), (0, 0), (30, 1)]
    step = decode_step(requests, heads=2, d=128, groups=4, codec=codec, layout=layout)
    check(step, device, codec, layout, programs=40)


def test_refusals():
    codec, layout = make_codec(1, 64, "page")
    step = decode_step([(200, 1)], heads=1, d=64, groups=4, codec=codec, layout=layout)
    check(step, "cpu", codec, layout)
    object.__setattr__(step, "query", step.query.float())
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        run(step, "cpu", codec, layout, sink=64, recent=256)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_merge_is_one_wave_where_it_can(d):
    for requests in (1, 2, 8, 33, 300):
        for heads in (1, 2, 8):
            grid = decode_grid(
                num_requests=requests, max_query_len=1, num_query_heads=4 * heads, num_kv_heads=heads, head_size=d,
                multiprocessors=132, capability=(9, 0),
            )  # fmt: skip
            options = merge_options(grid=grid, num_kv_heads=heads, head_size=d, multiprocessors=132)
            assert options.rows * options.slots * d <= (32768 if d < 256 else 16384)
            assert options.slots & (options.slots - 1) == 0
            programs = heads * math.ceil(grid.rows * requests / options.rows) * (d // merge_columns(d))
            assert options.rows == 16 or programs <= 132
            assert options.rows == 1 or 2 * programs > 132
