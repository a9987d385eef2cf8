# SPDX-License-Identifier: Apache-2.0
"""Which KV heads a tensor-parallel rank serves, and what a layer is told when the artifact does not fit."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from oscar_vllm.artifact import Artifact, model_geometry
from oscar_vllm.config import OscarConfig
from oscar_vllm.errors import OscarArtifactError
from oscar_vllm.rotation import EngineSettings, engine_settings, local_kv_heads
from tests.triton_ops.test_codec import random_spectral

GEOMETRY = {"num_hidden_layers": 2, "head_size": 64}


@pytest.mark.parametrize(
    ("total", "local", "tp_size", "expected"),
    [
        (8, 8, 1, [list(range(8))]),
        (8, 4, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 1, 2, [[0], [1]]),
        (2, 1, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (1, 1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_heads_are_dealt_like_vllm_does(total, local, tp_size, expected):
    assert [local_kv_heads(total, local, tp_size, rank).tolist() for rank in range(tp_size)] == expected


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(OscarArtifactError, match="calibrated for 6 KV heads, the model has 2 on each of 2 ranks"):
        local_kv_heads(6, 2, 2, 0)


def test_codec_of_a_rank_is_the_right_part_of_the_artifact():
    codec = random_spectral(4, 64, 4)
    artifact = Artifact(layers={1: codec}, geometry=GEOMETRY, model="m")
    settings = EngineSettings(OscarConfig().resolved(), artifact)
    part = settings.codec(1, num_kv_heads=2, head_size=64, tp_size=2, tp_rank=1)
    assert torch.equal(part.key_encode, codec.key_encode[2:])
    with pytest.raises(OscarArtifactError, match=r"has no layer 0; calibrated layers: \[1\]"):
        settings.codec(0, num_kv_heads=4, head_size=64)
    with pytest.raises(OscarArtifactError, match="layer 1: calibrated for head size 64, the model has 128"):
        settings.codec(1, num_kv_heads=4, head_size=128)


def test_padded_heads_get_codecs_of_the_padded_size():
    options = OscarConfig(rotation="hadamard").resolved()
    assert EngineSettings(options, None).codec(0, num_kv_heads=2, head_size=80).head_size == 128
    artifact = Artifact(layers={1: random_spectral(2, 128, 4)}, geometry=GEOMETRY | {"head_size": 80}, model="m")
    settings = EngineSettings(OscarConfig().resolved(), artifact)
    assert settings.codec(1, num_kv_heads=2, head_size=80).head_size == 128
    with pytest.raises(OscarArtifactError, match="layer 1: calibrated for head size 80, the model has 96"):
        settings.codec(1, num_kv_heads=2, head_size=96)


def test_data_free_settings():
    config = SimpleNamespace(
        additional_config={"oscar": {"rotation": "hadamard", "sink": 32}}, model_config=SimpleNamespace(model="m")
    )
    settings = engine_settings(config)
    assert (settings.artifact, settings.options.sink, settings.options.recent) == (None, 32, 256)
    codec = settings.codec(5, num_kv_heads=3, head_size=64)
    assert codec.key_encode.shape == (3, 64, 64)


@pytest.mark.parametrize("source", ["artifact", "hadamard"])
def test_the_loaders_defaults_do_not_reach_the_codec(source):
    """vLLM makes a model with its dtype and device as torch's defaults; the meta device stands in for a GPU."""
    artifact = Artifact(layers={0: random_spectral(2, 64, 4)}, geometry=GEOMETRY, model="m")
    settings = EngineSettings(OscarConfig().resolved(), artifact if source == "artifact" else None)
    expected = settings.codec(0, num_kv_heads=1, head_size=64, tp_size=2, tp_rank=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            codec = settings.codec(0, num_kv_heads=1, head_size=64, tp_size=2, tp_rank=1)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, tensor), (_, plain) in zip(codec.tensors(), expected.tensors(), strict=True):
        assert tensor.dtype == (torch.int32 if name in ("key_levels", "key_digit") else torch.float32), name
        assert torch.equal(tensor, plain), name


def test_an_artifact_first_read_while_the_model_is_made(tmp_path):
    """A separate engine process reads it for the first time inside a layer's constructor."""
    config = LlamaConfig(num_attention_heads=2, hidden_size=128, num_key_value_heads=2, num_hidden_layers=1)
    codec = random_spectral(2, 64, 4)
    folder = Artifact({0: codec}, model_geometry(config), "m").save(tmp_path / "artifact")
    config = SimpleNamespace(
        additional_config={"oscar": {"artifact": str(folder)}}, model_config=SimpleNamespace(model="m")
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            loaded = engine_settings(config).artifact
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, tensor), (_, plain) in zip(loaded.layers[0].tensors(), codec.tensors(), strict=True):
        assert torch.equal(tensor, plain), name
