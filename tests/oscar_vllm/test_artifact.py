# SPDX-License-Identifier: Apache-2.0
"""What an artifact must survive: being read back, and everything that can be wrong with the files or the model."""

import copy
import functools
import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config

from calib.allocation import allocate, scale_shares
from oscar_vllm.__main__ import describe, main
from oscar_vllm.artifact import (
    CONFIG_FILE,
    INVERSE_TOLERANCE,
    TENSOR_FILE,
    Artifact,
    _artifact_id,
    hadamard_codecs,
    import_rotationzoo,
    model_geometry,
)
from oscar_vllm.errors import OscarArtifactError, OscarUnsupportedError
from triton_ops.codec import (
    UNIT_STEP,
    LayerCodec,
    Quantizer,
    hadamard,
    rotation_codec,
    spectral_codec,
    unbiased_gain,
)
from triton_ops.layout import page_head_size

HEADS, D, LAYERS = 2, 64, 3
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": D,
    "num_hidden_layers": LAYERS,
}
CONFIG = LlamaConfig(**SHAPE)


def orthogonal(seed: int, heads: int = HEADS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, D, D, dtype=torch.float64, generator=generator)).Q


def spectral(seed: int, max_bits: int):
    variance = torch.logspace(1, -3, D, dtype=torch.float64).expand(HEADS, D)
    stretch = torch.logspace(-1, 1, D, dtype=torch.float64)
    directions = orthogonal(seed) * stretch
    return spectral_codec(
        directions, torch.linalg.inv(directions), variance,
        torch.stack([allocate(row, torch.zeros(D), 0.0, max_bits) for row in variance]),
        kappa=1.1, value_rotation=orthogonal(seed + 1), value_quantizer=Quantizer("gauss", 1.0),
    )  # fmt: skip


def example() -> Artifact:
    """Layers 0 and 2 of three: four bits and eight bits at most."""
    return Artifact(
        layers={0: spectral(0, 4), 2: spectral(2, 8)},
        geometry=model_geometry(CONFIG),
        model="some/model",
        revision="abc",
        sink=32,
        recent=512,
        method={"allocation": "spectral"},
        calibration={"seed": 3},
        metrics={"model": {"kl": 0.01}},
    )


def test_saved_and_loaded_is_equal(tmp_path):
    artifact = example()
    loaded = Artifact.load(artifact.save(tmp_path / "a"))
    for name in ("geometry", "model", "revision", "sink", "recent", "method", "calibration", "metrics", "artifact_id"):
        assert getattr(loaded, name) == getattr(artifact, name), name
    assert sorted(loaded.layers) == [0, 2]
    for index, codec in artifact.layers.items():
        other = loaded.layers[index]
        for name in ("zero", "key_quantizer", "value_quantizer"):
            assert getattr(codec, name) == getattr(other, name), name
        for name, tensor in codec.tensors():
            assert torch.equal(tensor, getattr(other, name)), name
    assert {path.name for path in (tmp_path / "a").iterdir()} == {CONFIG_FILE, TENSOR_FILE}


def test_the_id_follows_every_part():
    artifact = example()
    changed = [
        replace(artifact, sink=64),
        replace(artifact, metrics={}),
        replace(artifact, layers={0: artifact.layers[0]}),
        replace(artifact, layers=artifact.layers | {0: spectral(5, 4)}),
    ]
    assert len({a.artifact_id for a in [artifact, *changed]}) == 5
    assert example().artifact_id == artifact.artifact_id


# ---------------------------------------------------------------------------------------------- damaged files


def test_missing_files_name_the_command(tmp_path):
    with pytest.raises(OscarArtifactError, match=r"does not exist; give a folder made by `python -m calib --model"):
        Artifact.load(tmp_path / "none")
    with pytest.raises(OscarArtifactError, match=r"holds no oscar_config.json; make an artifact with `python -m calib"):
        Artifact.load(tmp_path)
    example().save(tmp_path)
    (tmp_path / TENSOR_FILE).unlink()
    with pytest.raises(OscarArtifactError, match=r"lacks oscar_rotations.safetensors"):
        Artifact.load(tmp_path)


def test_a_revision_of_a_folder_is_refused(tmp_path):
    example().save(tmp_path)
    with pytest.raises(OscarArtifactError, match="revision 'main' has no meaning for the local folder"):
        Artifact.load(tmp_path, revision="main")


def test_a_hub_id_is_fetched_with_its_revision(tmp_path, monkeypatch):
    import huggingface_hub

    artifact, asked = example(), []
    artifact.save(tmp_path)

    def fetch(name, *, revision, allow_patterns):
        asked.append((name, revision, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert Artifact.load("team/oscar-model", revision="v1").artifact_id == artifact.artifact_id
    assert asked == [("team/oscar-model", "v1", [CONFIG_FILE, TENSOR_FILE])]


def test_an_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OscarArtifactError, match=r"team/oscar-model is neither a folder nor available from the hub"):
        Artifact.load("team/oscar-model")


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSOR_FILE])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files_are_refused(tmp_path, name, share):
    example().save(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(OscarArtifactError, match=r"damaged|changed"):
        Artifact.load(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, bytes]:
    folder = example().save(tmp_path_factory.mktemp("saved"))
    return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}


@given(st.sampled_from([CONFIG_FILE, TENSOR_FILE]), st.integers(0), st.integers(0, 7), st.booleans())
def test_any_flipped_bit_is_noticed(tmp_path_factory, saved, name, offset, bit, in_header):
    """One bit anywhere; half of the flips of the tensor file aim at its header."""
    content = bytearray(saved[name])
    limit = 2000 if in_header and name == TENSOR_FILE else len(content)
    content[offset % limit] ^= 1 << bit
    folder = tmp_path_factory.mktemp("flipped")
    for other, raw in saved.items():
        (folder / other).write_bytes(bytes(content) if other == name else raw)
    try:
        loaded = Artifact.load(folder)
    except OscarArtifactError:
        return
    # A flip that means the same (white space, the file's own metadata) may load, as the same artifact.
    assert loaded.artifact_id == example().artifact_id


def test_another_schema_or_format_is_refused(tmp_path):
    for key, value, message in (
        ("schema_version", 2, "has schema version 2, this program reads 1"),
        ("format", "other", "is not an oscar_int2 artifact"),
    ):
        example().save(tmp_path)
        config = json.loads((tmp_path / CONFIG_FILE).read_text())
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {key: value}))
        with pytest.raises(OscarArtifactError, match=message):
            Artifact.load(tmp_path)


def test_a_consistent_id_does_not_excuse_a_missing_entry(tmp_path):
    artifact = example()
    artifact.save(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    del config["artifact_id"], config["layers"]["2"]["value_quantizer"]
    config["artifact_id"] = _artifact_id(artifact._tensors(), config)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(OscarArtifactError, match=r"does not follow the schema: KeyError\('value_quantizer'\)"):
        Artifact.load(tmp_path)


HOSTILE = [None, True, -1, 0, 2.5, 1e308, math.inf, math.nan, 10**30, "x", [], {}, [[]]]


def places(content: dict, prefix: tuple = ()) -> Iterator[tuple]:
    for key, value in content.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from places(value, (*prefix, key))


def signed(config: dict, tensors: dict, folder: Path) -> Path:
    """Write an artifact whose id is right, whatever it holds."""
    folder.mkdir(exist_ok=True)
    config = config | {"artifact_id": _artifact_id(tensors, config)}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / TENSOR_FILE)
    return folder


def test_whatever_stands_in_a_signed_configuration_is_read_or_refused(tmp_path):
    """Every entry deleted, and replaced by values of every kind: an `OscarArtifactError`, or a valid artifact."""
    config, tensors = example()._config(), example()._tensors()
    refusals = []
    for place in places(config):
        for value in ["deleted", *HOSTILE]:
            changed = copy.deepcopy(config)
            *above, last = place
            parent = functools.reduce(lambda inner, key: inner[key], above, changed)
            if value == "deleted":
                del parent[last]
            else:
                parent[last] = value
            try:
                Artifact.load(signed(changed, tensors, tmp_path / "a")).validate()
            except OscarArtifactError as error:
                refusals.append(str(error))
    assert len(refusals) > 300
    assert not [message for message in refusals if "\n" in message]


@pytest.mark.parametrize("name", sorted(example()._tensors()))
def test_whatever_tensor_stands_in_a_signed_file_is_refused(tmp_path, name):
    config, tensors = example()._config(), example()._tensors()
    tensor = tensors[name]
    other = torch.int32 if tensor.is_floating_point() else torch.float32
    for changed in (tensor.to(other), tensor.half(), tensor[:1], tensor[..., :0], tensor.flatten(), tensor / 0):
        with pytest.raises(OscarArtifactError):
            Artifact.load(signed(config, tensors | {name: changed.contiguous()}, tmp_path / "a"))
    del tensors[name]
    with pytest.raises(OscarArtifactError, match="does not follow the schema"):
        Artifact.load(signed(config, tensors, tmp_path / "a"))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "", "null", "7", "\ufeff{}", '{"format": "oscar_int2"}'],
    ids=["deep", "long number", "empty", "null", "number", "marked", "short"],
)
def test_text_that_is_no_configuration_is_refused(tmp_path, text):
    example().save(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(OscarArtifactError):
        Artifact.load(tmp_path)


@pytest.mark.parametrize("source", ["x" * 100_000, "a\0b", "~/nowhere", "a/b/c"])
def test_sources_that_cannot_be_a_folder_are_refused(source):
    with pytest.raises(OscarArtifactError, match="does not exist"):
        Artifact.load(source)


# ---------------------------------------------------------------------------------------------- half-written files


@pytest.mark.parametrize("failing", ["tensors", "configuration", "first move", "second move"])
def test_a_write_that_fails_leaves_no_half_of_an_artifact(tmp_path, monkeypatch, failing):
    """A full disk, or a kill, at any point: the folder holds the old artifact, or one that is refused; never a mix."""
    example().save(tmp_path)
    old, new = example(), replace(example(), layers={0: spectral(5, 4)})
    moves = 0

    def full(*_, **__):
        raise OSError("no space left on device")

    def move(source, target, original=os.replace):
        nonlocal moves
        moves += 1
        if moves == (1 if failing == "first move" else 2):
            full()
        original(source, target)

    if failing == "tensors":
        monkeypatch.setattr("oscar_vllm.artifact.save_file", full)
    elif failing == "configuration":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.setattr(os, "replace", move)
    with pytest.raises(OSError, match="no space left"):
        new.save(tmp_path)
    monkeypatch.undo()
    if failing == "second move":
        with pytest.raises(OscarArtifactError, match="changed or damaged after saving"):
            Artifact.load(tmp_path)
    else:
        assert Artifact.load(tmp_path).artifact_id == old.artifact_id
    new.save(tmp_path)
    assert Artifact.load(tmp_path).artifact_id == new.artifact_id
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, TENSOR_FILE}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_that_are_not_finite_are_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(OscarArtifactError, match="metrics are not finite"):
        replace(example(), metrics={"0": {"key_kl": value}}).save(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- wrong content


def broken(index: int, **changes) -> Artifact:
    artifact = example()
    return replace(artifact, layers=artifact.layers | {index: replace(artifact.layers[index], **changes)})


def altered(tensor: torch.Tensor, where: tuple, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[where] = value
    return tensor


CODEC = spectral(0, 4)


def scaled_direction(codec: LayerCodec, factor: float) -> torch.Tensor:
    """key_query with one direction of KV head 0 read back ``factor`` times as large."""
    of_first = (codec.key_digit[0] == 0).cumsum(0) == 1
    return torch.where(of_first & (torch.arange(2) == 0)[:, None, None], codec.key_query * factor, codec.key_query)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_rotation": CODEC.value_rotation * 1.001}, "value_rotation is not orthogonal, max.* = 2.00e-03"),
        ({"key_encode": altered(CODEC.key_encode, (1, 3, 5), float("nan"))}, "layer 0: key_encode holds non-finite"),
        ({"value_mean": altered(CODEC.value_mean, (0, 0), float("inf"))}, "layer 0: value_mean holds non-finite"),
        ({"key_query": CODEC.key_query * 1.01}, "key_encode and key_query are not inverse"),
        ({"key_query": CODEC.key_query.roll(1, 1)}, "key_encode and key_query are not inverse"),
        ({"key_query": scaled_direction(CODEC, 1.01)}, "not inverse to each other, max.* = [0-9.]+e-0[23]"),
        ({"key_encode": altered(CODEC.key_encode, (1, 0, 0), 9.0)}, "digits do not belong together|not inverse"),
        ({"key_digit": torch.zeros_like(CODEC.key_digit)}, "key_levels must be"),
        ({"key_digit": CODEC.key_digit * 2}, "key_digit does not count 0, 1"),
        ({"key_digit": CODEC.key_digit + 1}, "key_digit does not count 0, 1"),
        ({"key_levels": torch.full_like(CODEC.key_levels, 4)}, "key_levels must be"),
        ({"key_weight": torch.zeros_like(CODEC.key_weight)}, "key_weight must be positive"),
        ({"key_mean": CODEC.key_mean.double()}, "key_mean has dtype torch.float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inconsistent_layers_are_refused(changes, message):
    with pytest.raises(OscarArtifactError, match=message):
        broken(0, **changes).validate()


def test_earlier_artifacts_read_levels_from_the_middle_of_their_cells():
    gains = torch.ones(HEADS, D)
    for bits, step in UNIT_STEP.items():
        gains[CODEC.key_levels == 2**bits] = float(unbiased_gain(bits, step * CODEC.key_quantizer.constant))
    middle = CODEC.key_query / gains[:, None]
    assert not torch.equal(middle, CODEC.key_query)
    broken(0, key_query=middle).validate()


def test_gains_of_widened_steps_are_checked():
    """A step follows from its slot's weight in the row scale, a gain from the step."""
    basis = orthogonal(4)
    variance = torch.logspace(1, -3, D, dtype=torch.float64).expand(HEADS, D)
    bits = torch.stack([allocate(row, torch.zeros(D), 0.0, 8) for row in variance])
    codec = spectral_codec(
        basis, basis.mT, variance, bits, kappa=1.1, value_rotation=orthogonal(5),
        value_quantizer=Quantizer("gauss", 1.0), reach=1 + torch.rand(HEADS, D), share=scale_shares(bits),
    )  # fmt: skip
    artifact = replace(example(), layers={0: codec})
    artifact.validate()
    for name in ("key_weight", "key_query"):
        changed = replace(codec, **{name: getattr(codec, name) * 1.1})
        with pytest.raises(OscarArtifactError, match="not inverse"):
            replace(artifact, layers={0: changed}).validate()


def test_a_digits_own_column_is_checked():
    codec = example().layers[2]
    slot = int((codec.key_digit[0] == 1).nonzero()[0])
    for name in ("key_encode", "key_query"):
        tensor = getattr(codec, name)
        tensor = altered(tensor, (0, 7, slot), float(tensor[0, 7, slot]) * 1.01 + 1e-3)
        with pytest.raises(OscarArtifactError, match="layer 2: the columns of a direction's digits do not belong"):
            broken(2, **{name: tensor}).validate()


def test_impossible_layers_are_refused():
    artifact = example()
    with pytest.raises(OscarArtifactError, match="no layer; calibrate a model"):
        replace(artifact, layers={}).validate()
    with pytest.raises(OscarArtifactError, match="layer 7 is beyond the model's 3 layers"):
        replace(artifact, layers={7: CODEC}).validate()
    with pytest.raises(OscarArtifactError, match="layer 0 has 1 KV heads of size 64, the model's pages have 2 of"):
        replace(artifact, layers={0: CODEC.heads(slice(0, 1))}).validate()
    token = rotation_codec(
        orthogonal(0), orthogonal(1), zero="token",
        key_quantizer=Quantizer("gauss", 1.0), value_quantizer=Quantizer("gauss", 1.0),
    )  # fmt: skip
    longer = replace(token, key_query=token.key_query * 1.01)
    with pytest.raises(OscarArtifactError, match=r"layer 0.*not inverse"):
        replace(artifact, layers={0: longer}).validate()
    with pytest.raises(OscarArtifactError, match=r"alike, found \['page', 'token'\]"):
        replace(artifact, layers={0: CODEC, 1: token}).validate()


def test_saving_an_invalid_artifact_writes_nothing(tmp_path):
    with pytest.raises(OscarArtifactError, match="not inverse"):
        broken(0, key_query=CODEC.key_query * 2).save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------------------------------- the model


def test_the_fitted_model_is_accepted():
    example().check_model(CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, fitted on 3"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, fitted on 2"),
        ({"head_dim": 128}, "head_size is 128, fitted on 64"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta is 500000.0, fitted on 10000.0"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}, "rope_type is 'linear', fit"),
    ],
)
def test_another_model_is_refused_with_the_difference(config, message):
    with pytest.raises(OscarArtifactError, match=message) as caught:
        example().check_model(LlamaConfig(**SHAPE | config))
    assert "was fitted on some/model" in str(caught.value)
    assert "python -m calib --model" in str(caught.value)


def test_another_family_of_equal_shape_is_refused():
    config = Qwen2Config(**SHAPE)
    with pytest.raises(OscarArtifactError, match="model_type is 'qwen2', fitted on 'llama'"):
        example().check_model(config)


@pytest.mark.parametrize(
    ("rope", "same"),
    [
        ({"rope_parameters": {"type": "linear", "rope_theta": 1e4, "factor": 2}}, True),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 10000}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}}, True),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, False),
    ],
    ids=["old-name", "old-fields", "per-layer-type", "other-factor"],
)
def test_spellings_of_the_same_rope_are_equal(rope, same):
    from types import SimpleNamespace

    usual = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    first, second = (model_geometry(SimpleNamespace(**SHAPE, **options)) for options in (usual, rope))
    assert (first == second) == same


def test_models_without_pages_are_refused():
    with pytest.raises(OscarUnsupportedError, match=r"deepseek_v3 uses latent attention .kv_lora_rank=512."):
        model_geometry(DeepseekV3Config())
    with pytest.raises(OscarUnsupportedError, match="llama: head size 100 fits no INT2 page; multiples of 8 up to 256"):
        model_geometry(LlamaConfig(head_dim=100))


# ---------------------------------------------------------------------------------------------- other sources


@pytest.mark.parametrize("zero", ["page", "token"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_data_free_codecs_are_valid(head_size, zero):
    codecs = hadamard_codecs(2, 3, head_size, zero)
    geometry = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_size": head_size}
    Artifact(layers=codecs, geometry=geometry, model="m").validate()
    assert codecs[0].zero == zero
    assert torch.equal(codecs[0].value_rotation[1], hadamard(head_size).float())


def test_layers_that_share_a_codec_can_be_saved(tmp_path):
    """Saving data-free codecs failed: all layers are one object, and safetensors refuses tensors that share memory."""
    geometry = model_geometry(CONFIG)
    heads, size = geometry["num_key_value_heads"], geometry["head_size"]
    artifact = Artifact(hadamard_codecs(geometry["num_hidden_layers"], heads, size), geometry, "m")
    loaded = Artifact.load(artifact.save(tmp_path / "a"))
    assert loaded.artifact_id == artifact.artifact_id
    assert torch.equal(loaded.layers[1].key_encode, artifact.layers[0].key_encode)


def test_data_free_codecs_need_a_page():
    with pytest.raises(OscarUnsupportedError, match="head size 100"):
        hadamard_codecs(1, 1, 100)


@pytest.mark.parametrize("head_size", [32, 80, 96, 112, 192])
def test_padding_is_no_lane_of_the_codes(head_size):
    """lmdeploy 4849: padded lanes entered minimum and maximum. Here each rotated element holds every real one."""
    codec = hadamard_codecs(1, 1, head_size)[0]
    size = codec.head_size
    assert size == page_head_size(head_size)
    rows = torch.randn(1000, head_size, generator=torch.Generator().manual_seed(0))
    rows = torch.nn.functional.pad(rows / rows.std(0, correction=0), (0, size - head_size))
    for matrix in (1.2 * codec.key_encode[0], codec.value_rotation[0]):
        deviation = (rows @ matrix).std(0, correction=0)
        assert torch.allclose(deviation, torch.tensor((head_size / size) ** 0.5), rtol=0.3), deviation


def test_artifacts_of_padded_heads_hold_codecs_of_the_padded_size(tmp_path):
    config = LlamaConfig(hidden_size=384, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    geometry = model_geometry(config)
    assert geometry["head_size"] == 96
    artifact = Artifact(hadamard_codecs(2, 2, 96), geometry, "m")
    loaded = Artifact.load(artifact.save(tmp_path / "a"))
    assert loaded.layers[1].head_size == 128
    assert "4/2 heads of size 96, padded to 128, " in describe(loaded)
    assert describe(loaded).endswith("  0 / 128 / 0 / 0 / 0")
    loaded.check_model(config)
    with pytest.raises(OscarArtifactError, match="head_size is 112, fitted on 96"):
        loaded.check_model(LlamaConfig(**config.to_dict() | {"head_dim": 112}))
    for size in (64, 256):
        wrong = Artifact(hadamard_codecs(2, 2, size), geometry, "m")
        with pytest.raises(OscarArtifactError, match=f"size {size}, the model's pages have 2 of size 128"):
            wrong.save(tmp_path / "wrong")
    with pytest.raises(OscarArtifactError, match="the artifact's model cannot be served: head size 100 fits no INT2"):
        replace(artifact, geometry=geometry | {"head_size": 100}).validate()


def test_rotationzoo_files_of_padded_heads_are_refused(tmp_path):
    write_zoo(tmp_path / "k.pt", 2, 0)
    with pytest.raises(OscarUnsupportedError, match=r"heads of size 96 are padded to 128.*calibrate instead"):
        import_rotationzoo(tmp_path / "k.pt", tmp_path / "k.pt", LlamaConfig(head_dim=96), model="m")


def write_zoo(path: Path, version: int, seed: int, layers: int = LAYERS) -> list[torch.Tensor]:
    rotations = [orthogonal(seed + i)[0] if version == 1 else orthogonal(seed + i) for i in range(layers)]
    content = [{"rotation": r.float(), "eigenvalues": torch.ones(r.shape[:-1])} for r in rotations]
    torch.save({"format_version": version, "layers": content}, path)
    return rotations


@pytest.mark.parametrize("version", [1, 2])
def test_rotationzoo_files_become_an_artifact(tmp_path, version):
    keys, values = (write_zoo(tmp_path / name, version, seed) for name, seed in (("k.pt", 0), ("v.pt", 10)))
    artifact = import_rotationzoo(tmp_path / "k.pt", tmp_path / "v.pt", CONFIG, model="some/model")
    loaded = Artifact.load(artifact.save(tmp_path / "out"))
    for index in range(LAYERS):
        codec = loaded.layers[index]
        expected_keys, expected_values = (r[index].float().expand(HEADS, D, D) for r in (keys, values))
        assert torch.equal(codec.key_encode, expected_keys)
        assert torch.equal(codec.key_query, expected_keys)
        assert torch.equal(codec.value_rotation, expected_values)
        assert codec.zero == "token"
        assert (codec.key_quantizer, codec.value_quantizer) == (Quantizer("minmax", 0.96), Quantizer("minmax", 0.92))


def test_rotationzoo_files_that_do_not_fit_are_refused(tmp_path):
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    write_zoo(good, 2, 0)
    for content, message in (
        ({"format_version": 3, "layers": []}, "has format_version 3; RotationZoo versions 1 and 2"),
        ({"layers": []}, "has format_version None"),
        ([1], "has format_version None"),
        ({"format_version": 1, "layers": []}, "has no layers"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(32)}]}, r"\(32, 32\), the model needs \(64, 64\)"),
        ({"format_version": 2, "layers": [{"eigenvalues": torch.ones(4)}]}, "rotation of shape None"),
        ({"format_version": 1, "layers": [{"rotation": 2 * torch.eye(D)}] * 3}, "not inverse|not orthogonal"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(D)}]}, r"has layers \[0\], .* they must agree"),
        ({"format_version": torch.tensor([1, 2]), "layers": []}, "has format_version tensor"),
        ({"format_version": 1, "layers": {"a": {"rotation": torch.eye(D)}}}, "layer 'a' is torch.float32"),
        ({"format_version": 1, "layers": {None: {"rotation": torch.eye(D)}}}, "layer None is torch.float32"),
        ({"format_version": 1, "layers": {-1: {"rotation": torch.eye(D)}}}, "layer -1 is torch.float32"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(D).int()}]}, "layer 0 is torch.int32"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(D).cfloat()}]}, "layer 0 is torch.complex64"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(D).to_sparse()}]}, "torch.sparse_coo; not a rot"),
        ({"format_version": 1, "layers": [{"rotation": torch.eye(D) * torch.nan}] * 3}, "holds non-finite"),
    ):
        torch.save(content, bad)
        with pytest.raises(OscarArtifactError, match=message):
            import_rotationzoo(bad, good, CONFIG, model="m")
    with pytest.raises(OscarArtifactError, match=r"missing.pt does not exist"):
        import_rotationzoo(tmp_path / "missing.pt", good, CONFIG, model="m")


def test_damaged_rotationzoo_files_are_refused_or_mean_the_same(tmp_path):
    good, bad, generator = tmp_path / "good.pt", tmp_path / "bad.pt", random.Random(0)
    write_zoo(good, 2, 0)
    raw = good.read_bytes()
    expected = import_rotationzoo(good, good, CONFIG, model="m")
    for share in (0.0, 0.1, 0.5, 0.999):
        bad.write_bytes(raw[: int(len(raw) * share)])
        with pytest.raises(OscarArtifactError, match="no RotationZoo file that can be read safely"):
            import_rotationzoo(bad, good, CONFIG, model="m")
    refused = 0
    for _ in range(200):
        flipped = bytearray(raw)
        for _ in range(generator.choice((1, 8))):
            flipped[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        bad.write_bytes(flipped)
        try:
            artifact = import_rotationzoo(bad, good, CONFIG, model="m")
        except OscarArtifactError:
            refused += 1
        else:  # A flip of padding, or of an element's last bits: R^T R moves by that times an element of its row,
            # of which one is at least d^-0.5, and may move by INVERSE_TOLERANCE.
            for index, codec in expected.layers.items():
                moved = (artifact.layers[index].key_encode - codec.key_encode).abs().max()
                assert float(moved) <= INVERSE_TOLERANCE * D**0.5
    assert refused > 100


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_code_in_a_rotation_file_is_not_executed(tmp_path, container):
    mark, bad = tmp_path / "executed", tmp_path / "bad.pt"
    content = {"format_version": 1, "layers": [_Malicious(mark)]}
    if container == "torch":
        torch.save(content, bad)
    else:
        bad.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(OscarArtifactError, match="no RotationZoo file that can be read safely"):
        import_rotationzoo(bad, bad, CONFIG, model="m")
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Malicious(mark)))
    assert mark.exists()  # the content would have done it


# ---------------------------------------------------------------------------------------------- command line


def test_inspect_shows_or_refuses(tmp_path, capsys):
    artifact = example()
    artifact.save(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert artifact.artifact_id in output
    assert "layers       2 with INT2 pages: 0, 2" in output
    assert "sink 32, recent 512" in output
    (tmp_path / TENSOR_FILE).write_bytes(b"x")
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("metrics", "fit"), [({}, True), ({"kl": 0.05}, True), ({"kl": 0.0501}, False)])
def test_inspect_says_what_is_not_for_serving(tmp_path, capsys, metrics, fit):
    replace(example(), metrics={"model": metrics}).save(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert ("NOT FOR SERVING: KL of 0.050 nats" in capsys.readouterr().out) == (not fit)


def test_inspect_counts_the_bits_of_each_layer(tmp_path, capsys):
    example().save(tmp_path)
    main(["inspect", str(tmp_path)])
    rows = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[-2:]]
    for row, max_bits in zip(rows, (4, 8), strict=True):
        counts = [int(count) for count in row.split(" / ")]
        bits = allocate(torch.logspace(1, -3, D, dtype=torch.float64), torch.zeros(D), 0.0, max_bits)
        assert counts == torch.bincount(bits // 2, minlength=5).tolist()


def test_import_from_the_command_line(tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path / "model")
    for name, seed in (("k.pt", 0), ("v.pt", 10)):
        write_zoo(tmp_path / name, 2, seed)
    files = ["--keys", str(tmp_path / "k.pt"), "--values", str(tmp_path / "v.pt")]
    command = ["import-rotationzoo", *files, "--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "out")]
    assert main(command) == 0
    Artifact.load(tmp_path / "out").check_model(CONFIG)
    assert main([*command[:2], str(tmp_path / "none.pt"), *command[3:]]) == 1
    assert "none.pt does not exist" in capsys.readouterr().err


def test_artifacts_are_read_without_vllm_and_transformers():
    code = "import sys, oscar_vllm.artifact; print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    root = Path(__file__).parent.parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root).strip() == "[]"


def test_random_bytes_are_refused(tmp_path):
    generator = random.Random(0)
    for _ in range(20):
        example().save(tmp_path)
        (tmp_path / TENSOR_FILE).write_bytes(generator.randbytes(generator.randrange(4096)))
        with pytest.raises(OscarArtifactError, match="damaged"):
            Artifact.load(tmp_path)
