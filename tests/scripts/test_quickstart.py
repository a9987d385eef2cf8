# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the quick start and the shell scripts end in one line, before anything is fetched or run."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("quickstart")
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt-tokens", "8128"],
            "--prompt-tokens 8128 and --new-tokens 64 do not fit into --max-model-len 8192; ",
        ),
        (["--max-model-len", "1024"], "do not fit into --max-model-len 1024; .* together at most 1023"),
        (["--new-tokens", "0"], "use at least 1 of each"),
        (["--engine-options", "{bad"], "'{bad' is not JSON"),
    ],
)
def test_bad_values_are_refused_before_anything_is_fetched(script, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(script, "fetch_model", lambda name: pytest.fail("fetched"))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, line), line


def test_the_longest_prompt_that_fits_is_accepted(script, monkeypatch):
    monkeypatch.setattr(script, "fetch_model", lambda name: sys.exit("fetched"))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--prompt-tokens", "8127"])
    with pytest.raises(SystemExit, match="fetched"):
        script.main()


def test_a_calibration_that_is_refused_ends_in_one_line(script, tmp_path):
    with pytest.raises(SystemExit, match="calibration failed, see above"):
        script.calibrate(tmp_path / "missing", tmp_path / "artifact", [])


@pytest.mark.parametrize("name", ["fidelity_gpu", "fidelity_study"])
@pytest.mark.parametrize("arguments", [[], ["m"]])
def test_shell_scripts_without_their_arguments_say_what_they_take(name, arguments):
    done = subprocess.run(["bash", str(SCRIPTS / f"{name}.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: bash scripts/{name}.sh MODEL ")
    assert done.stderr.count("\n") == 1
