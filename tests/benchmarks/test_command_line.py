# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' command lines do without a GPU, with their rows, and with an engine that fails."""

import importlib
import sys

import pytest
import torch

MODULES = ("attend_decode", "demote_prefill", "heatmap", "power", "run")
ROWS = [{"kernel": "demote", "us": 1.5}]


def start(monkeypatch, name: str, *arguments: str):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return importlib.import_module(f"benchmarks.{name}").main()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend there is one; rows go to a folder that is returned."""
    monkeypatch.setattr("benchmarks.results.require_gpu", lambda: None)
    append = importlib.import_module("benchmarks.results").append
    monkeypatch.setattr("benchmarks.results.append", lambda name, rows: append(name, rows, tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", MODULES)
def test_help_and_the_refusal_need_no_gpu(monkeypatch, capsys, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="0"):
        start(monkeypatch, name, "--help")
    assert "usage" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: PyTorch finds no NVIDIA GPU here; benchmarks run on one only"):
        start(monkeypatch, name)


@pytest.mark.parametrize("name", ["attend_decode", "demote_prefill", "heatmap", "power"])
def test_rows_are_kept(monkeypatch, gpu, name):
    monkeypatch.setattr(f"benchmarks.{name}.run", lambda *_, **__: ROWS)
    start(monkeypatch, name)
    assert "demote,1.5" in (gpu / f"{name}.csv").read_text()


def test_an_engine_without_rows_fails_the_run_and_the_others_are_kept(monkeypatch, gpu, capsys):
    monkeypatch.setattr("benchmarks.engine.run", lambda dtype, *_: [] if dtype == "fp8" else ROWS)
    assert start(monkeypatch, "run", "engine", "--dtypes", "auto", "fp8", "oscar_int2") == 1
    assert capsys.readouterr().err == "error: no rows from engine fp8\n"
    assert len((gpu / "engine.csv").read_text().splitlines()) == 3
    assert start(monkeypatch, "run", "turns", "--dtypes", "auto") == 0
