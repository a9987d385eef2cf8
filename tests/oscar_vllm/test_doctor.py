# SPDX-License-Identifier: Apache-2.0
"""The report for bug reports: facts in order, every problem marked, an exit status that says whether there is one."""

import importlib.metadata
import json
import re
from types import SimpleNamespace

import pytest
import torch

import oscar_vllm
from oscar_vllm import compat, doctor
from oscar_vllm.__main__ import main
from oscar_vllm.artifact import Artifact, hadamard_codecs, model_geometry
from oscar_vllm.doctor import ranges, render, report
from oscar_vllm.errors import OscarSelfTestError
from tests.oscar_vllm.test_plugin import MODEL

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="expects the report of a machine without a GPU")


@pytest.fixture(autouse=True)
def the_doctors_log_level_ends_with_the_test(monkeypatch):
    """`main` sets it for its process, which here is that of all tests and of the engines they start."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture
def model(tmp_path):
    config = MODEL | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]}
    config |= {"num_hidden_layers": 4, "sliding_window": 512, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def lines(*arguments) -> dict[str, list[tuple[str, bool]]]:
    """The report by label."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for label, text, well in report(*arguments):
        assert "\n" not in text
        found.setdefault(label, []).append((text, well))
    return found


def test_a_machine_without_gpu_is_well():
    found = lines()
    assert list(found) == ["oscar-vllm", "with", "system", "plugin", "GPU", "self-test"]
    assert found["oscar-vllm"] == [(oscar_vllm.__version__, True)]
    assert f"torch {importlib.metadata.version('torch')}" in found["with"][0][0]
    assert found["plugin"] == [("--kv-cache-dtype oscar_int2 is registered", True)]
    assert render(report())[1]


def test_a_models_layers_and_their_backends(model, capsys):
    """A sliding layer and a skipped one keep the platform's backend."""
    found = lines(str(model), {"rotation": "hadamard"})
    assert found["model"] == [(f"{model}: qwen3", True)]
    assert found["serves"][0][0].startswith("OSCAR KV cache: 2.25 bits per element")
    assert found["layers"] == [("OSCAR_INT2: 0-1, 3", True), ("CPU_ATTN: 2", True)]
    assert main(["doctor", "--model", str(model), "--options", '{"rotation": "hadamard"}']) == 0
    assert "layers       OSCAR_INT2: 0-1, 3\n" in capsys.readouterr().out


def test_a_missing_artifact_is_a_problem(model, capsys):
    assert main(["doctor", "--model", str(model)]) == 1
    problem, tested = capsys.readouterr().out.splitlines()[-2:]
    assert tested.startswith("self-test ")
    assert problem.startswith(f"model        PROBLEM: {model}: OscarArtifactError: no OSCAR calibration artifact")


def test_an_artifact_is_compared_with_the_model(model):
    from transformers import AutoConfig

    geometry = model_geometry(AutoConfig.from_pretrained(model))
    layers = dict.fromkeys((0, 1, 3), hadamard_codecs(1, 2, 128)[0])
    artifact = Artifact(layers=layers, geometry=geometry, model="m")
    artifact.save(model / "oscar_int2")
    found = lines(str(model), {})
    assert found["artifact"] == [(f"{artifact.artifact_id} from the model's own folder fits the model", True)]
    other = Artifact(layers=layers, geometry=geometry | {"num_attention_heads": 8}, model="m")
    folder = str(other.save(model / "other"))
    text, well = lines(str(model), {"artifact": folder})["model"][0]
    assert not well
    assert "does not fit this model" in text


MISSING = "model folder '/no/model' does not exist; give a folder that does, or a hub id"


def test_a_missing_model_folder_is_a_problem(capsys):
    assert main(["doctor", "--model", "/no/model"]) == 1
    assert f"model        PROBLEM: /no/model: OscarConfigError: {MISSING}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, MISSING), ("{", r"the configuration of model '.*' cannot be loaded: .* is not a valid JSON file; give .*")],
)
def test_rotations_of_a_model_that_cannot_be_loaded_are_refused(tmp_path, capsys, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    folder = "/no/model" if config is None else str(tmp_path)
    files = ["--keys", "k.pt", "--values", "v.pt", "--output-dir", str(tmp_path / "out")]
    assert main(["import-rotationzoo", "--model", folder, *files]) == 1
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_wrong_options_are_refused(capsys):
    assert main(["doctor", "--options", '{"rotatoin": "x"}']) == 1
    assert "did you mean 'rotation'" in capsys.readouterr().err


def test_an_unsupported_vllm_ends_the_report(monkeypatch):
    monkeypatch.setattr(compat, "version_problem", lambda: "supports vLLM 0.32.x, found 0.1")
    found = lines()
    assert found["vLLM"] == [("supports vLLM 0.32.x, found 0.1", False)]
    assert "self-test" not in found


def test_a_plugin_that_vllm_will_not_load_is_a_problem(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert ("VLLM_PLUGINS=other leaves it out; add oscar", False) in lines()["plugin"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,oscar")
    assert all(well for _, well in lines()["plugin"])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert any("pip install" in text and not well for text, well in lines()["plugin"])


@pytest.fixture
def two_gpus(monkeypatch):
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    return properties


def test_every_gpu_tests_itself(monkeypatch, two_gpus):
    tested = []

    def self_test(kernels, device):
        tested.append((kernels.codec.head_size, kernels.num_query_heads, str(device)))
        if device.index == 1:
            raise OscarSelfTestError("kernel demote computes wrong results")

    monkeypatch.setattr("oscar_vllm.self_test.self_test", self_test)
    assert next(iter(doctor._gpu())) == ("GPU", "0: Some GPU, compute capability 9.0, 141 GiB", True)
    (_, first, well), second = doctor._self_test(None)
    assert first.startswith("GPU 0: passed in ")
    assert well
    assert second == ("self-test", "kernel demote computes wrong results", False)
    assert tested == [(128, 8, "cuda:0"), (128, 8, "cuda:1")]


def test_an_old_gpu_is_a_problem(two_gpus):
    two_gpus.major = 7
    label, text, well = next(iter(doctor._gpu()))
    assert (label, well) == ("GPU", False)
    assert "8.0 or newer" in text


def test_the_self_test_takes_the_models_own_rotations(model):
    options = {"rotation": "hadamard", "recent": 512, "prefill": "invariant"}
    kernels = doctor._kernels_of(doctor._engine_config(str(model), options))
    assert (kernels.codec.num_kv_heads, kernels.num_query_heads, kernels.layout.head_size) == (2, 4, 128)
    assert (kernels.sink, kernels.recent, kernels.prefill, kernels.dtype) == (64, 512, "invariant", torch.bfloat16)
    assert doctor._kernels_of(doctor._engine_config(str(model), options | {"ops": "reference"})) is None


def test_ranges():
    assert ranges([0, 1, 2, 5]) == "0-2, 5"
    assert ranges([]) == ""
