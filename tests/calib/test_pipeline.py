# SPDX-License-Identifier: Apache-2.0
"""Whole calibration runs on small random models: what is written, what is resumed, what is refused."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from calib import PRESETS, Recipe, calibrate, pipeline
from calib.__main__ import main, parser
from calib.pipeline import CHECKPOINT
from oscar_vllm.artifact import SERVABLE_KL, Artifact
from oscar_vllm.errors import OscarConfigError, OscarUnsupportedError
from tests.calib.models import ByteTokenizer, random_model

ROOT = Path(__file__).parent.parent.parent
FAST = {"num_samples": 3, "held_out": 1, "max_length": 512, "recent": 128, "tokenizer": ByteTokenizer()}
SHORT = ["--num-samples", "3", "--held-out", "1", "--max-length", "512", "--recent", "128"]


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        ({"family": "llama", "kv_heads": 2, "group": 2}, Recipe()),
        ({"family": "qwen2", "kv_heads": 1, "group": 7}, Recipe(max_bits=4)),
        ({"family": "llama", "kv_heads": 2, "group": 1}, PRESETS["reference"]),
        ({"family": "qwen2", "kv_heads": 2, "group": 2}, Recipe(allocation="uniform", composition="H")),
        ({"family": "llama", "kv_heads": 1, "group": 4}, Recipe(allocation="uniform", zero="token", centre="both")),
        ({"family": "llama", "kv_heads": 2, "group": 2}, Recipe(granularity="layer", max_bits=2)),
    ],
    ids=["default", "bits4-group7-bias", "reference", "hadamard", "token-centred", "layer-2bits"],
)
def test_a_run_writes_a_valid_artifact_for_the_model(tmp_path, shape, recipe):
    model = random_model(**shape)
    result = calibrate(model, tmp_path, recipe=recipe, **FAST)
    artifact = Artifact.load(tmp_path)
    artifact.check_model(model.config)
    assert artifact.artifact_id == result.artifact.artifact_id
    assert sorted(artifact.layers) == [0, 1]
    assert (artifact.sink, artifact.recent, artifact.zero) == (64, 128, recipe.zero)
    assert artifact.method == json.loads(json.dumps(recipe.describe()))
    assert artifact.calibration["tokens"] == 3 * 512
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"README.md", "oscar_config.json", "oscar_rotations.safetensors"}
    assert artifact.artifact_id in (tmp_path / "README.md").read_text()
    candidates = artifact.metrics["candidates"]
    assert artifact.metrics["model"]["kl"] == min(candidates.values())
    unfit = artifact.metrics["model"]["kl"] > SERVABLE_KL
    assert len(result.table().splitlines()) == 2 + 2 + 1 + (len(candidates) > 1) * (1 + len(candidates)) + unfit
    assert ("NOT FOR SERVING" in result.table()) == unfit


def test_the_candidate_with_the_least_final_kl_is_written(tmp_path, monkeypatch):
    """Whatever the layers' own errors say: the model's KL decides."""
    judge, favourite = pipeline._judge, "spread none, attended 1"

    def biased(*arguments):
        figures = judge(*arguments)
        return figures | {"kl": 0.0 if arguments[-1] == favourite else figures["kl"]}

    monkeypatch.setattr(pipeline, "_judge", biased)
    result = calibrate(random_model(), tmp_path, recipe=Recipe(attended=None, spread=None), **FAST)
    names = {f"spread {spread}, attended {weight}" for weight in (0, 1) for spread in ("groups", "none")}
    assert set(result.artifact.metrics["candidates"]) == names
    assert {(choice.recipe.attended, choice.recipe.spread) for choice in result.choices.values()} == {(1.0, "none")}
    assert torch.equal(Artifact.load(tmp_path).layers[1].key_encode, result.choices[1].codec.key_encode)


def test_head_size_128(tmp_path):
    result = calibrate(random_model(head_size=128, kv_heads=1), tmp_path, **FAST | {"num_samples": 5})
    assert result.artifact.layers[0].head_size == 128


@pytest.mark.parametrize(
    ("head_size", "recipe"), [(80, Recipe()), (96, PRESETS["reference"])], ids=["80-default", "96-reference"]
)
def test_heads_without_a_page_of_their_own_size_are_padded(tmp_path, head_size, recipe):
    """No bit goes to a direction of zeros."""
    model = random_model(head_size=head_size, kv_heads=1, group=3)
    result = calibrate(model, tmp_path, recipe=recipe, **FAST | {"num_samples": 4})
    artifact = Artifact.load(tmp_path)
    artifact.check_model(model.config)
    assert artifact.geometry["head_size"] == head_size
    for index, codec in artifact.layers.items():
        choice = result.choices[index]
        assert codec.head_size == 128
        assert choice.value_error["chosen"] < 0.7 * choice.value_error["identity"]
        if recipe.allocation == "spectral":
            assert not codec.key_query[:, head_size:].any()
            assert choice.key_kl["chosen"] < 0.7 * choice.key_kl["hadamard"]


@pytest.mark.parametrize(
    ("head_size", "recipe", "message"),
    [
        (80, Recipe(composition="U"), "--composition U would store the zeros that pad heads of 80 to 128"),
        (80, Recipe(max_bits=2), "--max-bits 2: heads of 80 cannot take the 256 bits .* raise --max-bits"),
        (8, Recipe(), "--max-bits 8: heads of 8 cannot take the 128 bits"),
    ],
)
def test_recipes_that_would_store_padding_are_refused(tmp_path, head_size, recipe, message):
    with pytest.raises(OscarConfigError, match=message):
        calibrate(random_model(head_size=head_size), tmp_path, recipe=recipe, **FAST)


def test_sliding_window_layers_are_absent_and_reported(tmp_path):
    model = random_model(family="gemma3", layers=4)
    result = calibrate(model, tmp_path, **FAST)
    assert sorted(result.artifact.layers) == [1, 3]
    assert "0  stays BF16: sliding window of 32 tokens" in result.table()
    assert result.artifact.calibration["skipped_layers"]["2"] == "sliding window of 32 tokens"


def test_the_same_seed_gives_the_same_artifact(tmp_path):
    model = random_model()
    ids = [calibrate(model, tmp_path / str(i), seed=s, **FAST).artifact.artifact_id for i, s in enumerate((1, 1, 2))]
    assert ids[0] == ids[1] != ids[2]


def test_a_run_that_raised_resumes_where_it_stopped(tmp_path, monkeypatch):
    model = random_model()
    straight = calibrate(model, tmp_path / "straight", **FAST).artifact.artifact_id
    seen, forward = [], model.forward

    @functools.wraps(forward)
    def counted(tokens, **options):
        seen.append(bytes(tokens[0].tolist()))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", counted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, tmp_path / "killed", checkpoint_seconds=0.0, **FAST)
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [CHECKPOINT]
    resumed = calibrate(model, tmp_path / "killed", **FAST)
    assert resumed.artifact.artifact_id == straight
    assert len(set(seen[:2] + seen[3:4])) == 3  # the third sample is done, the first two are not done again
    assert seen[2] == seen[3]


def test_the_longest_context_is_the_models_unless_another_is_asked_for(tmp_path, capsys):
    """Positions change the codec of keys; the paper's recipe knows the samples' only."""
    model = random_model()
    near, far = (calibrate(model, tmp_path / str(n), max_position=n, **FAST).artifact for n in (512, None))
    reference = calibrate(model, tmp_path / "reference", recipe=PRESETS["reference"], **FAST).artifact
    samples = calibrate(model, tmp_path / "samples", recipe=Recipe(positions="samples", key_constant=1.1), **FAST)
    assert [artifact.max_position for artifact in (near, far, reference)] == [512, 4096, None]
    assert samples.artifact.max_position == 512
    assert not torch.equal(near.layers[0].key_encode, far.layers[0].key_encode)
    torch.testing.assert_close(near.layers[0].key_encode, samples.artifact.layers[0].key_encode)
    assert "positions do not rotate" not in capsys.readouterr().err


def test_a_model_that_takes_no_positions_is_refused_with_the_way_out(tmp_path, monkeypatch):
    model = random_model()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, use_cache, logits_to_keep: forward(
        tokens, use_cache=use_cache, logits_to_keep=logits_to_keep))  # fmt: skip
    with pytest.raises(OscarConfigError, match="takes no position_ids; calibrate with --positions samples"):
        calibrate(model, tmp_path / "a", **FAST)
    calibrate(model, tmp_path / "b", recipe=Recipe(positions="samples"), **FAST)


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path, monkeypatch, capsys):
    model = random_model()
    straight = calibrate(model, tmp_path / "straight", seed=5, **FAST).artifact.artifact_id
    monkeypatch.setattr("calib.pipeline._search", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, tmp_path / "other", seed=4, **FAST)
    monkeypatch.undo()
    assert calibrate(model, tmp_path / "other", seed=5, **FAST).artifact.artifact_id == straight
    assert "belongs to other settings" in capsys.readouterr().err


_KILLED_RUN = """
import sys
from calib import calibrate
from tests.calib.test_pipeline import FAST
from tests.calib.models import random_model
calibrate(random_model(), sys.argv[1], checkpoint_seconds=0.0, **FAST | {"num_samples": int(sys.argv[2])})
"""


def test_a_run_killed_by_sigkill_resumes_to_the_same_artifact(tmp_path):
    options = FAST | {"num_samples": 24}
    straight = calibrate(random_model(), tmp_path / "straight", **options).artifact.artifact_id
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED_RUN, str(tmp_path / "killed"), "24"], env=environment, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    checkpoint = tmp_path / "killed" / CHECKPOINT
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists()
    assert calibrate(random_model(), tmp_path / "killed", **options).artifact.artifact_id == straight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 2}, r"2 samples of 512 tokens are too few .* head size 64: 1024 tokens .* raise --num"),
        (
            {"max_length": 300},
            "--max-length 300 leaves no history behind 64 sink and 128 recent tokens; use at least",
        ),
        ({"recent": 100}, "--recent 100 is out of range; use a multiple of 16, at least 128"),
        ({"sink": 144}, "--sink 144 is out of range; use a multiple of 16 from 0 to 128"),
        ({"sink": 10}, "--sink 10 is out of range"),
        ({"sink": -16}, "--sink -16 is out of range"),
        ({"num_samples": 0}, "--num-samples 0"),
        ({"held_out": 0}, "--held-out 0"),
        (
            {"max_position": 511},
            r"--max-position 511 is out of range; use at least the 512 tokens of a sample",
        ),
        (
            {"max_position": 2048, "recipe": PRESETS["reference"]},
            "--max-position 2048 has no effect with --pos",
        ),
        ({"max_position": 4097}, "at most the model's own limit, 4096"),
    ],
)
def test_unusable_options_are_refused_before_any_text_is_read(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(pipeline, "load_documents", lambda *_, **__: pytest.fail("read the text"))
    with pytest.raises(OscarConfigError, match=message):
        calibrate(random_model(), tmp_path, **FAST | options)


@pytest.mark.parametrize("folder", ["file", "file/out", "/proc/oscar"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarConfigError, match=f"^--output-dir {folder} cannot be written to .*; choose another"):
        calibrate("/no/model", folder, **FAST)


def _broken_models(folder: Path) -> dict[str, Path]:
    """Copies of a saved model without a tokenizer, each broken in its own way."""
    random_model().save_pretrained(folder / "no tokenizer")
    config, weights = "config.json", "model.safetensors"
    whole = (folder / "no tokenizer" / weights).read_bytes()
    files: dict[str, dict[str, bytes]] = {
        "broken config": {config: b"{"},
        "unknown type": {config: b'{"model_type": "foo"}'},
        "truncated weights": {weights: whole[: len(whole) // 2]},
        "weights without a header": {weights: whole[:9]},
    }
    for name, changed in files.items():
        shutil.copytree(folder / "no tokenizer", folder / name)
        for file, content in changed.items():
            (folder / name / file).write_bytes(content)
    shutil.copytree(folder / "no tokenizer", folder / "no weights")
    (folder / "no weights" / weights).unlink()
    (folder / "empty").mkdir()
    (folder / "a file").write_text("x")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing", r"model folder '.*missing' does not exist; give a folder that does, or a hub id"),
        ("empty", "the configuration of model .*empty' cannot be loaded: Unrecognized model .*; give the hub id"),
        (
            "broken config",
            "the configuration of model .*: It looks like the config file .* is not a valid JSON",
        ),
        ("a file", "the configuration of model .*a file' cannot be loaded: .*; give the hub id"),
        ("unknown type", "the configuration of model .* model type `foo` .*; give the hub id"),
        ("no tokenizer", "the tokenizer of model .* cannot be loaded: .*; give a model that has one"),
        (
            "no weights",
            "the weights of model .*: Error no file named model.safetensors, .*; give a model with",
        ),
        (
            "truncated weights",
            "the weights of model .*: Error while deserializing header: .*; give a model with",
        ),
        ("weights without a header", "the weights of model .* cannot be loaded: .*; give a model with complete"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, capsys, monkeypatch, model, message):
    path = _broken_models(tmp_path).get(model, tmp_path / model)
    if model != "no tokenizer":
        monkeypatch.setattr("calib.pipeline.AutoTokenizer.from_pretrained", lambda *_, **__: ByteTokenizer())
    capsys.readouterr()
    assert main(["--model", str(path), "--output-dir", str(tmp_path / "out"), *SHORT]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"error: {message}", error), error


@pytest.mark.parametrize("name", ["", "a b", "./no", "~/no", "a/b/c"])
def test_names_that_are_neither_folder_nor_hub_id_are_refused_at_once(tmp_path, capsys, name):
    assert main(["--model", name, "--output-dir", str(tmp_path), *SHORT]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not exist; give a folder that does" in error or "Repo id must use alphanumeric" in error


def test_a_device_that_is_none_is_named(tmp_path, monkeypatch):
    random_model().save_pretrained(tmp_path / "model")
    with pytest.raises(OscarConfigError, match=r"the weights of model .* but found nowhere; give a model with"):
        calibrate(str(tmp_path / "model"), tmp_path / "out", device_map="nowhere", **FAST)


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 300)
    with pytest.raises(OscarConfigError, match=r"a.txt gives \d samples of 512 tokens; at least 4 are needed"):
        calibrate(random_model(), tmp_path / "out", dataset=str(tmp_path / "a.txt"), **FAST)


def test_an_artifact_is_not_replaced_unasked(tmp_path):
    calibrate(random_model(), tmp_path, **FAST)
    with pytest.raises(OscarConfigError, match="already holds an artifact"):
        calibrate(random_model(), tmp_path, **FAST)
    calibrate(random_model(), tmp_path, overwrite=True, **FAST)


def test_nan_weights_are_named(tmp_path):
    model = random_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = float("nan")
    with pytest.raises(OscarConfigError, match=r"weight model.layers.1.mlp.up_proj.weight holds non-finite"):
        calibrate(model, tmp_path, **FAST)


def test_odd_head_sizes_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(OscarUnsupportedError, match="llama: head size 100 fits no INT2 page; multiples of 8"):
        calibrate(random_model(head_size=100), tmp_path, **FAST)


def test_models_without_full_attention_layers_are_refused(tmp_path):
    model = random_model(family="gemma3")
    model.config.layer_types = ["sliding_attention"] * 2
    for layer in model.model.layers:
        layer.self_attn.sliding_window, layer.attention_type = 32, "sliding_attention"
    with pytest.raises(OscarUnsupportedError, match=r"sent no full-attention layer .*sliding window of 32"):
        calibrate(model, tmp_path, **FAST)


def test_the_command_line_ends_with_the_table_or_one_line(tmp_path, capsys, monkeypatch):
    """End to end through `python -m calib`'s own parser, with a model folder on disk."""
    random_model().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("calib.pipeline.AutoTokenizer.from_pretrained", lambda *_, **__: ByteTokenizer())
    command = [
        *("--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "out")),
        *SHORT,
    ]
    capsys.readouterr()
    assert main([*command, "--preset", "reference", "--zero", "page"]) == 1
    assert capsys.readouterr().err == (
        "error: --quantizer minmax (--preset reference sets it) needs --zero token; add --zero token or "
        "--quantizer gauss\n"
    )
    assert main([*command, "--max-bits", "6", "--ridge", "1e-3", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert "held-out text: KL to the exact model" in output
    artifact = Artifact.load(tmp_path / "out")
    assert (artifact.method["max_bits"], artifact.method["ridge"]) == (6, 1e-3)
    assert artifact.model == str(tmp_path / "model")


def test_every_option_has_a_help_text():
    assert [action.dest for action in parser()._actions if not action.help] == []


def test_kept_statistics_serve_another_recipe(tmp_path, monkeypatch):
    model = random_model()
    reference = {"recipe": PRESETS["reference"]}
    straight = calibrate(model, tmp_path / "straight", **reference, **FAST).artifact.artifact_id
    calibrate(model, tmp_path / "kept", keep_statistics=True, **FAST)
    monkeypatch.setattr("calib.statistics.Statistics.observe", lambda *_: pytest.fail("collected again"))
    again = calibrate(model, tmp_path / "kept", overwrite=True, **reference, **FAST).artifact.artifact_id
    assert again == straight
    assert not (tmp_path / "kept" / CHECKPOINT).exists()
