# SPDX-License-Identifier: Apache-2.0
"""Rows of measurements name the command that made them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "from benchmarks import results; print(results.context()['command'])"


def test_the_command_names_the_module_that_ran(tmp_path):
    (tmp_path / "measure.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for started in (["-m", "measure", "--variants"], ["measure.py", "one", "two"]):
        run = subprocess.run(
            [sys.executable, *started], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == " ".join(["python", *started])
