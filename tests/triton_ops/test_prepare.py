# SPDX-License-Identifier: Apache-2.0
"""Prepared queries, decoded again, are the query's slot weights up to half a rounding step."""

import math

import pytest
import torch

from tests.triton_ops.step_cases import DEVICES
from tests.triton_ops.test_codec import random_basis, random_spectral
from triton_ops.codec import Quantizer, rotation_codec
from triton_ops.prepare import MAX_INTEGER, PreparedQuery, QueryMatrix, prepare_query
from triton_ops.schedule import decode_grid

SCALE_LOG2 = 0.25 * math.log2(math.e)


def prepare(query, codec, counts, device, strided):
    """The workspace on the CPU, and the grid."""
    tokens, query_heads, d = query.shape
    requests = len(counts)
    grid = decode_grid(
        num_requests=requests,
        max_query_len=max(counts),
        num_query_heads=query_heads,
        num_kv_heads=codec.num_kv_heads,
        head_size=d,
        multiprocessors=4,
        capability=(9, 0),
    )
    blocks = requests * grid.row_blocks * codec.num_kv_heads
    prepared = PreparedQuery(blocks=blocks, rows=grid.rows, head_size=d, device=device)
    prepared.fragments.fill_(99)
    for tensor in (prepared.plain, prepared.factors):
        tensor.fill_(torch.nan)
    query = query.to(device)
    if strided:
        wide = torch.full((tokens, query_heads + 2, d + 16), torch.nan, dtype=query.dtype, device=device)
        wide[:, 1:-1, 16:] = query
        query = wide[:, 1:-1, 16:]
    start = torch.tensor([0, *counts]).cumsum(0).int()
    codec = codec.to(device)
    prepare_query(
        query=query,
        codec=codec,
        matrix=QueryMatrix.of(codec),
        grid=grid,
        query_start_loc=start.to(device),
        seq_lens=torch.tensor([500 if count else 0 for count in counts]).int().to(device),
        scale=0.25,
        prepared=prepared,
    )
    shape = (requests, grid.row_blocks, codec.num_kv_heads)
    halves = prepared.fragments.cpu().view(*shape, d // 32, grid.rows, 2, 4, 2, 4).int()  # plane, row, half, a, b, i
    integers = (256 * halves[..., 0, :, :, :] + halves[..., 1, :, :, :]).permute(0, 1, 2, 4, 3, 6, 5, 7)
    return (
        grid,
        integers.reshape(*shape, grid.rows, d),
        prepared.sums.cpu().view(*shape, grid.rows),
        prepared.factors.cpu().view(*shape, 2, grid.rows),
        prepared.plain.cpu().view(*shape, grid.rows, d),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("counts", "groups", "d", "kind"),
    [
        ([1] * 6, 4, 128, "spectral"),
        ([1, 0, 1, 1, 1], 3, 64, "token"),
        ([3, 1, 5], 2, 128, "spectral"),
        ([2, 16, 0, 1], 7, 64, "spectral"),
        ([1, 1], 8, 256, "spectral"),
    ],
)
def test_decoded_weights(device, counts, groups, d, kind, dtype):
    heads = 2
    if kind == "token":
        gauss = Quantizer("gauss", 1.1)
        codec = rotation_codec(
            random_basis(heads, d, 1),
            random_basis(heads, d, 2),
            zero="token",
            key_quantizer=gauss,
            value_quantizer=gauss,
            key_mean=torch.randn(heads, d, generator=torch.Generator().manual_seed(3)),
        )
    else:
        codec = random_spectral(heads, d, 4)
    generator = torch.Generator().manual_seed(4)
    query = (torch.randn(sum(counts), heads * groups, d, generator=generator) * 3).to(dtype)
    grid, integers, sums, factors, plain = prepare(query, codec, counts, device, strided=True)

    weight = torch.where(torch.arange(d) // 32 % 2 == 1, 4, 1)
    assert not factors.isnan().any()
    assert torch.equal((integers * weight).sum(-1).int(), sums)
    start = [0, *torch.tensor(counts).cumsum(0).tolist()]
    for r, count in enumerate(counts):
        for row in range(grid.row_blocks * grid.rows):
            at = (r, row // grid.rows, slice(None), row % grid.rows)
            factor = factors[r, row // grid.rows, :, :, row % grid.rows]  # [H, 2]
            if row >= count * groups:
                assert not integers[at].any(), "a row of no query token is zero"
                continue
            q = query[start[r] + row // groups, torch.arange(heads) * groups + row % groups].double()  # [H, d]
            exact = torch.einsum("hd,hds->hs", q, codec.key_query.double())
            unit = factor[:, 0].double() / SCALE_LOG2
            # Half a step, and a float32 sum of d products with a matrix of 22 bits: 2**-20 of the norms.
            norms = q.norm(dim=1, keepdim=True) * codec.key_query.double().norm(dim=1)
            error = (integers[at] * weight * unit[:, None] - exact).abs() - 2.0**-20 * norms
            error /= weight * unit[:, None]
            assert error.max() < 0.5, f"row {row} of request {r}: {error.max():.3f} steps"
            assert integers[at].abs().max() >= MAX_INTEGER - 1, "the largest weight uses the whole range"
            if kind == "token":
                expected = (q * codec.key_mean.double()).sum(1) * SCALE_LOG2
                assert torch.allclose(factor[:, 1].double(), expected, rtol=1e-5, atol=1e-5)
            else:
                # Times a power of two: the query itself comes back exactly.
                assert torch.equal(plain[at].double() * (factor[:, 1:].double() / SCALE_LOG2).float().double(), q)


def test_query_matrix_is_the_codecs():
    """22 bits of a column's largest element, whatever the other columns and heads hold."""
    codec = random_spectral(3, 64, 4)
    codec.key_query[1] *= 2.0**-30
    codec.key_query[2, :, 5] *= 2.0**-20
    matrix = QueryMatrix.of(codec)
    assert torch.equal(matrix.unit.log2(), matrix.unit.log2().round())
    both = matrix.halves.double().sum(1) * matrix.unit.double()[:, None]
    largest = codec.key_query.abs().amax(1).double()
    assert ((both - codec.key_query.double()).abs().amax(1) <= largest * 2.0**-22).all()
    assert (matrix.halves[:, 0].abs().amax(1) >= 1024).all()


def test_refusals():
    codec = random_spectral(2, 64, 4)
    query = torch.randn(2, 8, 64).bfloat16()
    with pytest.raises(ValueError, match="does not fit"):
        prepare(torch.cat([query, query], 2), codec, [1, 1], "cpu", strided=False)
    with pytest.raises(ValueError, match="whole ratio"):
        decode_grid(
            num_requests=1, max_query_len=1, num_query_heads=7, num_kv_heads=2, head_size=64, multiprocessors=4,
            capability=(9, 0),
        )  # fmt: skip
