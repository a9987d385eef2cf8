# SPDX-License-Identifier: Apache-2.0
"""Moments over a whole context are those that samples at every place of it would have given."""

from types import SimpleNamespace

import pytest
import torch

from calib.capture import intercept_attention
from calib.positions import PageRotations, average, context_average, held_out_starts, over_context
from calib.simulate import Segments
from calib.statistics import Statistics
from tests.calib.models import VOCABULARY, random_model
from triton_ops.layout import PAGE_TOKENS

D = 8


def turning(angles: list[float]) -> torch.Tensor:
    """[2 n, 2 n] that turns n planes in a random basis."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.zeros(2 * len(angles), 2 * len(angles), dtype=torch.float64)
    for i, angle in enumerate(torch.tensor(angles, dtype=torch.float64)):
        plane[2 * i, 2 * i] = plane[2 * i + 1, 2 * i + 1] = angle.cos()
        plane[2 * i, 2 * i + 1], plane[2 * i + 1, 2 * i] = angle.sin(), -angle.sin()
    basis, _ = torch.linalg.qr(torch.randn(plane.shape, generator=generator, dtype=torch.float64))
    return basis @ plane @ basis.mT


def moment() -> torch.Tensor:
    rows = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return rows.mT @ rows


def moved(moment: torch.Tensor, rotation: torch.Tensor, pages: int) -> torch.Tensor:
    power = torch.linalg.matrix_power(rotation, pages)
    return power.mT @ moment @ power


ROTATION = turning([2.1, 0.3, 0.02, 0.0])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_averages_by_doubling_are_the_mean_over_all_moves(count):
    expected = torch.stack([moved(moment(), ROTATION, pages) for pages in range(count)]).mean(0)
    torch.testing.assert_close(average(moment(), ROTATION, count), expected)


@pytest.mark.parametrize(
    ("context", "parts"),
    [(16, []), (64, [(16, 32), (32, 64)]), (40, [(16, 25), (25, 40)])],
)
def test_parts_of_a_context_count_alike(context, parts):
    window = 16
    means = [moment()]
    for begin, end in parts:
        starts = range(begin, max(end - window, begin) + 1)
        means.append(torch.stack([moved(moment(), ROTATION, start) for start in starts]).mean(0))
    torch.testing.assert_close(context_average(moment(), ROTATION, window, context), torch.stack(means).mean(0))


def test_a_long_context_knows_no_direction_in_a_plane_that_turns():
    result = context_average(moment(), turning([1.0, 0.9, 0.8, 0.7]), 16, 2**14)
    turned = moved(result, turning([1.0, 0.9, 0.8, 0.7]), 5)
    assert (turned - result).norm() < 0.25 * (moved(moment(), turning([1.0, 0.9, 0.8, 0.7]), 5) - moment()).norm()


def record(model, ids: torch.Tensor, start: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> queries and keys of a text that starts at a position."""
    found = {}

    def handler(call):
        found[call.layer] = call.query[0].double(), call.key[0].double()
        return call.attend()

    with intercept_attention(model, handler), torch.inference_mode():
        model(ids[None], position_ids=torch.arange(start, start + len(ids))[None], use_cache=False)
    return found


def measured(model, ids: torch.Tensor) -> PageRotations:
    rotations = PageRotations()
    with intercept_attention(model, rotations), torch.inference_mode():
        for start in (0, PAGE_TOKENS):
            model(ids[None], position_ids=torch.arange(start, start + len(ids))[None], use_cache=False)
    return rotations


def tokens(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("head_size", [64, 80])
def test_the_measured_matrix_moves_keys_and_queries_of_a_model(head_size):
    """By one page, and its powers by many; heads that are padded with zeros stay so."""
    model, ids = random_model(head_size=head_size), tokens(300)
    rotations = measured(model, ids)
    assert rotations.fixed == []
    near, far = record(model, ids, 0), record(model, ids, 20 * PAGE_TOKENS)
    for layer, matrix in rotations.matrices.items():
        size = matrix.shape[0]
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64))
        power = torch.linalg.matrix_power(matrix, 20)
        for a, b in zip(near[layer], far[layer], strict=True):
            error = (a @ power - b).norm() / b.norm()
            assert error < 1e-3
            assert (a - b).norm() / b.norm() > 0.1


def test_what_no_rotation_explains_stays_as_it_is():
    rotations = PageRotations()
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        query, key = torch.randn(2, 1, 2, 50, D, generator=generator)
        rotations(SimpleNamespace(layer=4, query=query, key=key, attend=lambda: None))
    assert rotations.fixed == [4]
    assert torch.equal(rotations.matrices[4], torch.eye(D, dtype=torch.float64))


def test_statistics_over_a_context_are_those_of_moved_samples():
    """One sample, a context of twice its length: the mean of the sample's moments here and there."""
    model, window = random_model(), 512
    ids = tokens(window)
    segments = Segments(sink=64, recent=128)

    def collect(start: int) -> Statistics:
        statistics = Statistics(segments)
        with intercept_attention(model, statistics.observe), torch.inference_mode():
            model(ids[None], position_ids=torch.arange(start, start + window)[None], use_cache=False)
        return statistics

    here, there = collect(0), collect(window)
    both = over_context(here, measured(model, ids), window, 2 * window)
    for layer, statistics in both.layers.items():
        for name in ("query_moment", "attending_moment", "key_moment", "page_moment"):
            expected = (getattr(here.layers[layer], name) + getattr(there.layers[layer], name)) / 2
            error = (getattr(statistics, name) - expected).norm() / expected.norm()
            assert error < 1e-3, name
        assert torch.equal(statistics.output_moment, here.layers[layer].output_moment)
    assert both.samples == here.samples


def test_held_out_samples_are_spread_over_the_context():
    assert held_out_starts(2, 2048, 2048) == [0, 0]
    starts = held_out_starts(3, 2048, 131072)
    assert starts == sorted(starts)
    assert all(start % PAGE_TOKENS == 0 and start + 2048 <= 131072 for start in starts)
    assert starts[0] < 2048 * 2 < 131072 // 4 < starts[2]
