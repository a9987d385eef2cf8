# SPDX-License-Identifier: Apache-2.0
"""Which tokens a query reads from pages, and which queries are looked at."""

import pytest

from calib.simulate import Segments


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [(200, 5, [192, 193, 195, 197, 199]), (194, 5, [192, 193]), (193, 5, [192]), (292, 2, [192, 291])],
)
def test_query_positions_are_evenly_spaced_and_have_a_history(length, count, expected):
    segments = Segments(sink=64, recent=128)
    positions = segments.query_positions(length, count)
    assert positions.tolist() == expected
    assert segments.history(positions, length).any(1).all()
