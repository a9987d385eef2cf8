# SPDX-License-Identifier: Apache-2.0
"""The table of README.md: every situation once, every pointer alive and where its row says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| (\d+) \| (.+) \| (CPU|GPU|CPU, GPU|figure) \| (.+) \|$")
POINTER = re.compile(r"`((?:tests|benchmarks)/[^`]+)`")
ROWS = [
    match.groups()
    for line in (Path(__file__).parent / "README.md").read_text().splitlines()
    if (match := ROW.match(line))
]


def is_gpu_file(path: Path) -> bool:
    return bool(re.search(r"^pytestmark = .*pytest\.mark\.gpu", path.read_text(), re.MULTILINE))


def test_every_situation_is_listed_once():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 35))


@pytest.mark.parametrize(("number", "runs", "covered"), [(n, r, c) for n, _, r, c in ROWS], ids=[r[0] for r in ROWS])
def test_pointers_lead_to_tests(number, runs, covered):
    pointers = POINTER.findall(covered)
    assert pointers
    places = set()
    for pointer in pointers:
        file, _, name = pointer.partition("::")
        path = ROOT / file
        assert path.is_file(), f"situation {number}: {file} does not exist"
        if not name:
            places.add("figure")
            continue
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"situation {number}: {file} has no {name}"
        places.add("GPU" if is_gpu_file(path) else "CPU")
    assert ", ".join(sorted(places)) == runs


def test_every_test_of_this_folder_is_in_the_table():
    table = {pointer for row in ROWS for pointer in POINTER.findall(row[3])}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        for name in (node.name for node in functions if node.name.startswith("test_")):
            pointer = f"tests/cases/{path.name}::{name}"
            assert pointer in table
