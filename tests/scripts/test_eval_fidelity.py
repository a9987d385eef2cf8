# SPDX-License-Identifier: Apache-2.0
"""The fidelity harness on a small random model: no error where there is none, and the expected order where there is."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from calib import PRESETS, calibrate
from calib.simulate import Segments
from oscar_vllm.artifact import Artifact
from oscar_vllm.errors import OscarArtifactError
from tests.calib.models import ByteTokenizer, random_model

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "eval_fidelity.py"
SEGMENTS = Segments(sink=64, recent=128)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("eval_fidelity", SCRIPT)
    module = sys.modules["eval_fidelity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return random_model(family="qwen2", kv_heads=2, group=2)


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory) -> Artifact:
    options = {"num_samples": 3, "held_out": 1, "max_length": 512, "recent": 128, "tokenizer": ByteTokenizer()}
    return calibrate(model, tmp_path_factory.mktemp("a"), recipe=PRESETS["default"], **options).artifact


def test_scores_rank_the_configurations(script, model, artifact):
    windows = script.evaluation_windows("All human beings are born free. " * 60, ByteTokenizer(), 2, 640)
    with torch.inference_mode():
        attentions = script.configurations(
            ["bf16", "float", "naive", "hadamard"], {"default": artifact}, model.config, SEGMENTS
        )
        scores = script.evaluate(model, windows, attentions, SEGMENTS)
    assert list(scores) == ["bf16", "float", "naive", "hadamard", "default"]
    assert scores["bf16"].kl == 0.0
    assert scores["bf16"].top1 == 1.0
    assert scores["float"].kl == pytest.approx(0.0, abs=1e-6)
    assert scores["float"].perplexity == pytest.approx(scores["bf16"].perplexity, rel=1e-4)
    assert 1e-5 < scores["default"].kl < scores["hadamard"].kl
    assert scores["default"].kl < scores["naive"].kl
    assert all(score.positions == 2 * (640 - 1 - 320) for score in scores.values())
    table = script.table(scores).splitlines()
    assert len(table) == 6
    assert table[-1].startswith("default")


def test_an_artifact_of_another_model_is_refused(script, artifact):
    other = random_model(family="qwen2", kv_heads=1, group=4)
    with pytest.raises(OscarArtifactError, match="num_key_value_heads is 1, fitted on 2"):
        script.configurations([], {"default": artifact}, other.config, SEGMENTS)


def test_unknown_configurations_and_short_texts_end_in_one_line(script, model):
    with pytest.raises(SystemExit, match="configuration 'int3' is unknown; use bf16, float, naive, hadamard"):
        script.configurations(["int3"], {}, model.config, SEGMENTS)
    with pytest.raises(SystemExit, match="the text has 5 tokens, 2 windows of 640 need 1280"):
        script.evaluation_windows("short", ByteTokenizer(), 2, 640)


def test_rows_are_added_never_replaced(script, tmp_path):
    path = tmp_path / "new" / "fidelity.csv"
    row = dict.fromkeys(script.FIELDS, "x")
    script.append_csv(path, [row])
    script.append_csv(path, [row | {"kl": "y"}])
    with open(path, newline="") as file:
        assert [entry["kl"] for entry in csv.DictReader(file)] == ["x", "y"]


def test_the_default_text_is_none_that_calibration_uses(script):
    from calib.data import load_documents

    name, text = script.read_text([])
    assert name == "pydoc_data.topics"
    assert len(text) > 100_000
    lines = {line.strip() for document in load_documents(None) for line in document.splitlines() if len(line) > 60}
    assert not lines & {line.strip() for line in text.splitlines()}
