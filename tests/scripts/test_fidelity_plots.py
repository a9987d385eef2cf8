# SPDX-License-Identifier: Apache-2.0
"""What is drawn is what docs/fidelity.md tabulates: one run for each model, with the default segments."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
COLUMNS = (
    "model", "configuration", "text", "sink", "recent", "kl", "commit", "command", "engine", "windows", "tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("fidelity_plots")
    sys.path.remove(str(SCRIPTS))


def test_the_defaults_bars_are_the_first_table_of_the_document(script):
    runs = script.comparison(script.RESULTS / "fidelity.csv", "manual", script.CACHES)
    order = ("smollm2", "qwen0.5b", "qwen1.5b", "gemma270m")
    figures = [round(float(runs[model]["default"]["kl"]), 4) for model in order]
    assert figures == [0.0071, 0.0067, 0.0028, 0.0074]


def test_other_segments_and_other_places_in_a_context_are_left_out(script, tmp_path):
    plain = dict(
        zip(
            COLUMNS, ("m", "default (0a)", "manual", "64", "256", "1", "c", "run", "transformers", "4", "2048"),
            strict=True,
        )
    )  # fmt: skip
    rows = [
        plain,
        plain | {"configuration": "kivi2", "kl": "2"},
        plain | {"configuration": "bf16", "kl": "0"},
        plain | {"command": "run --sink 16", "sink": "16", "kl": "3"},
        plain | {"command": "run --recent 512", "recent": "512", "kl": "4"},
        plain | {"command": "run --start 4000", "kl": "5"},
        plain | {"command": "run --start=4000", "kl": "6"},
    ]
    alone = plain | {"command": "another run without other caches", "kl": "7"}
    earlier = [
        plain | {"commit": "b", "configuration": name, "kl": kl, "windows": windows}
        for name, kl, windows in (("reference", "8", "4"), ("kivi2", "9", "4"), ("turboquant3", "10", "8"))
    ]
    path = tmp_path / "fidelity.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([*earlier, *rows, alone])
    newest = {row["configuration"]: row["kl"] for row in script.newest(path, "configuration")}
    assert newest == {"reference": "8", "kivi2": "2", "turboquant3": "10", "default": "7", "bf16": "0"}
    runs = script.comparison(path, "manual", script.CACHES)
    assert {name: row["kl"] for name, row in runs["m"].items()} == {"reference": "8", "kivi2": "2", "default": "1"}


def test_help_draws_nothing(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "save", lambda *_: pytest.fail("drew"))
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    assert "usage" in capsys.readouterr().out
