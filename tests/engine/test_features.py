# SPDX-License-Identifier: Apache-2.0
"""What users combine with the cache, on the real engine; and the table of docs/compatibility.md held to its tests.

Pages store floats here (``payload="float"``), so token ids must be those of stock vLLM: what surrounds the quantizer
does not depend on what a page holds. `tests/engine/test_float_payload.py` has the features of scheduling.
"""

import ast
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from calib.pipeline import calibrate
from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.distance import assert_alike, distance
from tests.engine.features import PAGE, README, ROOT, TABLE, page, readme
from tests.engine.models import (
    IMAGE_TOKEN,
    Geometry,
    byte_tokenizer,
    prompts,
    write_blip2,
    write_eagle_head,
    write_lora,
    write_mixed,
    write_model,
    write_quantized,
    write_shortened,
)
from tests.engine.test_fidelity import assert_greedy
from tests.engine.test_float_payload import FLOAT, PERIODIC, assert_same_tokens

QWEN3 = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4)
MIMO = Geometry("mimo", head_size=64, kv_heads=2, query_heads_per_kv_head=2)
PACKED = Geometry("qwen2", head_size=64, kv_heads=2, query_heads_per_kv_head=2, sharpness=1.0, dtype="bfloat16")
ONE_KV_HEAD = Geometry("qwen3", head_size=64, kv_heads=1, query_heads_per_kv_head=4)

SHARP = 20.0
"""Standard deviation of the logits of a model that caps them at 50."""

SOME = prompts([5, 130, 300, 513, 700, 911], seed=0)
MIXED = {"name": "mixed", "kind": "generate", "prompts": SOME, "max_tokens": 24}
COUNTERS = {"name": "counters", "kind": "counters"}
LONG = prompts([40, 700, 1100], seed=21)
BEAMS = {"name": "beams", "kind": "beams", "prompts": LONG, "width": 4, "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]{1,12}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
BYTES = [[3 + token % 256 for token in prompt] for prompt in LONG]  # tokens that the tokenizer knows
STRUCTURED = {"name": "json", "kind": "structured", "prompts": BYTES, "schema": SCHEMA, "max_tokens": 150}
ENGINE = {
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_lora_rank": 8,
    "enable_prefix_caching": True,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def runs(engines: Engines) -> tuple[Run, Run]:
    """Stock vLLM, and pages of floats: beams, JSON, adapters and drafts' text on one engine each."""
    directory = engines.directory / "features"
    model = write_model(QWEN3, directory)
    byte_tokenizer().save_pretrained(model)
    adapter = str(write_lora(QWEN3, directory))
    plain = {"name": "plain", "kind": "generate", "prompts": LONG, "max_tokens": 24, "keep_cache": True}
    adapted = {"name": "adapted", "kind": "adapted", "prompts": LONG, "adapter": adapter, "max_tokens": 24}
    scenarios = [BEAMS, STRUCTURED, plain, adapted]
    stock = engines.run(model, ENGINE | {"block_size": 128}, [*scenarios, PERIODIC, MIXED])
    run = engines.run(model, ENGINE | FLOAT, scenarios)
    assert not leaks(run)
    return run, stock


@pytest.mark.slow
def test_beam_search(runs: tuple[Run, Run]) -> None:
    run, stock = runs
    assert [len(beams) for beams in stock["beams"]] == [4, 4, 4]
    assert run["beams"] == stock["beams"]


@pytest.mark.slow
def test_structured_outputs(runs: tuple[Run, Run]) -> None:
    run, stock = runs
    for answer in run["json"]:
        found = json.loads(answer)
        assert set(found) == set(SCHEMA["required"])
        assert set(found["tags"]) <= {"red", "green"}
    assert run["json"] == stock["json"]


@pytest.mark.slow
def test_lora(runs: tuple[Run, Run]) -> None:
    """The same prompts without and with an adapter: another answer, and no hit on what the other has cached."""
    run, stock = runs
    assert_same_tokens(run, stock, "plain")
    assert_same_tokens(run, stock, "adapted")
    assert all(a != b for a, b in zip(run.tokens("plain")[0], run.tokens("adapted")[0], strict=True))
    assert run.cached("adapted") == [[0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_speculation(engines: Engines, runs: tuple[Run, Run], method: str) -> None:
    """Greedy tokens are those without drafts, whether drafts are taken (a shortened target) or not (random heads)."""
    model, stock = QWEN3, runs[1]
    draft: dict = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
    if method == "draft_model":
        draft["model"] = str(write_shortened(QWEN3, 2, engines.directory / "models"))
    elif method == "eagle":
        draft["model"] = str(write_eagle_head(QWEN3, engines.directory / "models"))
    else:
        model, stock = MIMO, engines.run(MIMO, {}, [PERIODIC])
    run = engines.run(model, FLOAT | {"speculative_config": draft, "disable_log_stats": False}, [PERIODIC, COUNTERS])
    drafted, accepted = (run["counters"][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert drafted > 100
    assert 10 < accepted < drafted if method == "draft_model" else accepted < drafted
    assert_same_tokens(run, stock, "periodic")
    assert not leaks(run)


def window_layers(run: Run) -> int:
    """Layers that have a window beside their history."""
    return sum(group["layers"] for group in run["shapes"]["groups"] if group["spec"] == "SinkWindowSpec")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "int2"), [("gemma3", 2), ("gemma3n", 1), ("gpt_oss", 2)])
def test_mixed_models(engines: Engines, family: str, int2: int) -> None:
    """Sliding layers, and a cache that several layers read, keep the model's dtype; the other full layers do not."""
    model = write_mixed(family, engines.directory / "models")
    stock = engines.run(model, {}, [MIXED])
    run = engines.run(model, FLOAT, [MIXED, {"name": "shapes", "kind": "shapes"}])
    assert_same_tokens(run, stock, "mixed")
    assert window_layers(run) == int2
    assert not leaks(run)


@pytest.mark.slow
def test_sliding_layers_reuse_blocks_of_pages(engines: Engines) -> None:
    """Codes left in a block are NaN for a layer that keeps its dtype; answers are the same in every round."""
    model = write_mixed("gpt_oss", engines.directory / "models")
    before = {"name": "before", "kind": "generate", "prompts": prompts([600, 1100, 1700], seed=71), "max_tokens": 1}
    rounds = {"name": "rounds", "kind": "generate", "prompts": prompts([130, 444, 911], seed=72), "rounds": 3}
    codes = OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard"}}, "max_num_batched_tokens": 512}
    run = engines.run(model, codes, [before, rounds | {"max_tokens": 16}])
    assert all(math.isfinite(x) for outputs in run["rounds"] for output in outputs for x in output["logprobs"][0])
    first, second, third = run.tokens("rounds")
    assert first == second == third
    assert not leaks(run)


@pytest.mark.slow
def test_soft_cap(engines: Engines) -> None:
    """Logits far beyond Gemma 2's cap, in decoding and in chunks of a prefill; without a cap answers are others."""
    model = write_mixed("gemma2", engines.directory / "models", SHARP)
    stock = engines.run(model, {}, [MIXED])
    uncapped = engines.run(model, {"hf_overrides": {"attn_logit_softcapping": None}}, [MIXED])
    assert sum(a != b for a, b in zip(stock.tokens("mixed")[0], uncapped.tokens("mixed")[0], strict=True)) >= 5
    for prefill in ("exact", "invariant"):
        options = OSCAR | {"additional_config": {"oscar": {"payload": "float", "prefill": prefill}}}
        options |= {"max_num_batched_tokens": 600}
        run = engines.run(model, options, [MIXED, {"name": "shapes", "kind": "shapes"}])
        assert_same_tokens(run, stock, "mixed")
        assert window_layers(run) == 2
        assert not leaks(run)


class Letters:
    """A tokenizer of one token per byte, none of them special."""

    bos_token_id = None

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + byte for byte in text.encode()])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sharpness"), [("gpt_oss", 3.0), ("gemma2", SHARP)])
def test_mixed_models_with_a_calibrated_artifact(
    engines: Engines, tmp_path: Path, family: str, sharpness: float
) -> None:
    """The engine's greedy tokens are those of transformers with the artifact's codecs, every sink or cap in place."""
    path = write_mixed(family, engines.directory / "models", sharpness)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    size = {"num_samples": 2, "held_out": 1, "max_length": 1024, "dtype": "float32"}
    artifact = calibrate(model, tmp_path / "artifact", tokenizer=Letters(), **size).artifact
    assert sorted(artifact.layers) == [1, 3]
    asked = prompts([200, 700, 1100], seed=23)
    scenario = {"name": "greedy", "kind": "generate", "prompts": asked, "max_tokens": 40}
    options = {"additional_config": {"oscar": {"artifact": str(tmp_path / "artifact")}}}
    run = engines.run(path, OSCAR | options, [scenario])
    assert_greedy(model, artifact.layers, asked, [output["token_ids"][0] for output in run["greedy"][0]])


@pytest.mark.slow
def test_images(engines: Engines) -> None:
    model = write_blip2(engines.directory / "models")
    asked = [[IMAGE_TOKEN, *prompt] for prompt in prompts([60, 500, 900], seed=31)]
    images = {"name": "images", "kind": "images", "prompts": asked, "size": 28, "max_tokens": 24}
    stock = engines.run(model, {"skip_tokenizer_init": False}, [images])
    run = engines.run(model, FLOAT | {"skip_tokenizer_init": False}, [images])
    assert_same_tokens(run, stock, "images")
    assert not leaks(run)


@pytest.mark.slow
def test_skipped_layers(engines: Engines, runs: tuple[Run, Run]) -> None:
    skipped = FLOAT | {"kv_cache_dtype_skip_layers": ["0", "2"]}
    run = engines.run(QWEN3, skipped, [MIXED, {"name": "shapes", "kind": "shapes"}])
    assert_same_tokens(run, runs[1], "mixed")
    assert window_layers(run) == 1
    assert len({g["page_bytes"] for g in run["shapes"]["groups"]}) == 1
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantized_weights(engines: Engines, method: str) -> None:
    """Four-bit weights, in bfloat16: pages of floats change less than codes do."""
    model = write_quantized(PACKED, method, engines.directory / "models")
    scored = {"name": "score", "kind": "generate", "prompts": prompts([700, 1100], seed=24), "max_tokens": 1}
    scenarios = [scored | {"prompt_logprobs": 1}, MIXED]
    codes = OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard", "prefill": "invariant"}}}
    stock, run, int2 = (
        engines.run(model, cache | {"dtype": "bfloat16"}, scenarios) for cache in ({"block_size": 128}, FLOAT, codes)
    )
    effect = distance(int2, stock)
    assert 0.01 < effect.rms < 1.5
    assert_alike(distance(run, stock), effect)
    assert not leaks(run)
    assert not leaks(int2)


@pytest.mark.slow
def test_fewer_kv_heads_than_ranks(engines: Engines) -> None:
    stock = engines.run(ONE_KV_HEAD, {}, [MIXED])
    run = engines.run(ONE_KV_HEAD, FLOAT | {"tensor_parallel_size": 2}, [MIXED])
    assert_same_tokens(run, stock, "mixed")
    assert not leaks(run)


@pytest.mark.slow
def test_restart(engines: Engines, tmp_path: Path) -> None:
    """INT2 pages: two engines give the same tokens and logprobs, to the last bit."""
    engine = OSCAR | {"additional_config": {"oscar": {"rotation": "hadamard"}}}
    first = engines.run(QWEN3, engine, [MIXED])
    others = Engines(tmp_path)  # nothing in common with the first one's process
    second = others.run(QWEN3, engine, [MIXED])
    others.close()
    assert first["mixed"] == second["mixed"]


# ----------------------------------------------------------------------------------------------- the yardstick


def answers(lengths: list[int], drift: float, margin: float = 0.06, size: int = 24) -> tuple[dict, dict]:
    """Results of two engines whose answers are the same for these numbers of tokens."""
    same = {"prompt_logprobs": None, "margins": [[margin] * size]}
    one, other = [], []
    for length in lengths:
        one.append(same | {"token_ids": [[1] * size], "logprobs": [[-1.0] * size]})
        other.append(same | {"token_ids": [[1] * length + [2] * (size - length)], "logprobs": [[-1.0 - drift] * size]})
    return {"mixed": [one]}, {"mixed": [other]}


EFFECT = distance(*answers([12, 16, 14, 24], 0.5, 0.5), ("mixed",))


@pytest.mark.parametrize(
    ("lengths", "drift", "more"),
    [([20, 24, 14, 24], 0.05, {}), ([24] * 4, 0.05, {}), ([38, 30, 45], 0.05, {"size": 150})],
)
def test_runs_with_ties_are_alike(lengths: list[int], drift: float, more: dict) -> None:
    """Answers of another length may part later than half of the effect's, whatever share of them that is."""
    assert_alike(distance(*answers(lengths, drift, **more), ("mixed",)), EFFECT)


@pytest.mark.parametrize(
    ("lengths", "drift", "more"),
    [
        ([24] * 4, 0.6, {}),  # moved more than by quantization
        ([20, 24, 14, 24], 0.05, {"margin": 0.9}),  # parted at tokens that were certain
        ([10, 10], 0.05, {}),  # compared on next to nothing
        ([6] * 10, 0.05, {}),  # parted sooner than quantization parts them
    ],
)
def test_runs_that_are_not_alike(lengths: list[int], drift: float, more: dict) -> None:
    with pytest.raises(AssertionError):
        assert_alike(distance(*answers(lengths, drift, **more), ("mixed",)), EFFECT)


# ------------------------------------------------------------------------------------------------ the table


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("feature", TABLE, ids=lambda feature: feature.name)
def test_every_row_names_a_test(feature) -> None:
    path, function = re.fullmatch(r"(tests/\w+/\w+\.py)::(test_\w+)", feature.test).groups()
    assert function in functions(ROOT / path)


def test_every_feature_stands_once() -> None:
    names = [feature.name for feature in TABLE]
    assert len(names) == len(set(names))


def test_the_page_is_written_from_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.engine.features`"
    assert README.read_text() == readme(), "run `python -m tests.engine.features`"


def test_documented_metrics_exist() -> None:
    import vllm.v1.metrics.loggers

    known = Path(vllm.v1.metrics.loggers.__file__).read_text()
    named = set(re.findall(r"vllm:\w+", (ROOT / "docs" / "serving.md").read_text()))
    assert len(named) >= 8
    assert [name for name in sorted(named) if f'"{name}"' not in known] == []
