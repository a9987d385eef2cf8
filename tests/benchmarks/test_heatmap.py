# SPDX-License-Identifier: Apache-2.0
"""The picture is drawn from the latest row of every shape."""

import pytest

from benchmarks.heatmap import CONTEXTS, REQUESTS, plot

pytest.importorskip("matplotlib")


def test_plot(tmp_path):
    rows = [
        {"requests": str(b), "context": str(n), "over_bf16": "2.5", "over_fp8": "0.9", "hardware": "a GPU"}
        for b in REQUESTS
        for n in CONTEXTS
    ]
    plot(rows, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyError):
        plot(rows[1:], tmp_path / "map.png")
