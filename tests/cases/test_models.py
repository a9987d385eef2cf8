# SPDX-License-Identifier: Apache-2.0
"""Geometries in which other caches failed, in the real engine: odd GQA ratios, and models with sliding windows.

Pages that store floats must give the tokens of stock vLLM; the groups of the engine show which layers are INT2.
"""

from pathlib import Path

import pytest

from tests.calib.models import random_model
from tests.engine.conftest import Engines, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_float_payload import FLOAT, assert_same_tokens

pytestmark = pytest.mark.slow

MIXED = {
    "name": "mixed",
    "kind": "generate",
    "prompts": prompts([33, 129, 320, 513, 900], seed=51),
    "max_tokens": 16,
}
SHAPES = {"name": "shapes", "kind": "shapes"}


@pytest.mark.parametrize(("family", "kv_heads", "ratio"), [("qwen2", 3, 5), ("llama", 2, 12)])
def test_odd_gqa_ratios(engines: Engines, family: str, kv_heads: int, ratio: int) -> None:
    """A fork of llama.cpp, issue 78: wrong KV heads at ratios 5, 6, 7 and 12 with more than one KV head."""
    geometry = Geometry(family, head_size=64, kv_heads=kv_heads, query_heads_per_kv_head=ratio, layers=1)
    run = engines.run(geometry, FLOAT, [MIXED])
    assert_same_tokens(run, engines.run(geometry, {}, [MIXED]), "mixed")
    assert not leaks(run)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sliding-window and two full layers of head size 256."""
    folder = tmp_path_factory.mktemp("gemma3")
    random_model(family="gemma3", kv_heads=1, group=2, head_size=256, layers=4).save_pretrained(folder)
    return folder


def test_sliding_layers_stay_unquantized(engines: Engines, gemma: Path) -> None:
    """vLLM 40094, 53231: Gemma-like models. Full layers have pages and windows, sliding ones the model's dtype."""
    scenario = MIXED | {"prompts": [[3 + token % 200 for token in prompt] for prompt in MIXED["prompts"]]}
    stock = engines.run(gemma, {}, [scenario])
    run = engines.run(gemma, FLOAT, [scenario, SHAPES])
    assert_same_tokens(run, stock, "mixed")
    assert not leaks(run)
    groups = run["shapes"]["groups"]
    assert sorted((group["spec"], group["layers"]) for group in groups) == [
        ("FullAttentionSpec", 2), ("SinkWindowSpec", 2), ("SlidingWindowSpec", 2),
    ]  # fmt: skip
