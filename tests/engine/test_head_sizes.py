# SPDX-License-Identifier: Apache-2.0
"""Heads that have no page of their own size are padded to the next one, on the real engine.

With pages of floats the token ids must be those of stock vLLM, which pads nothing; with INT2 pages those of
transformers with the reference ops.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oscar_vllm.artifact import Artifact, hadamard_codecs, model_geometry
from tests.engine.conftest import OSCAR, Engines, Run, leaks
from tests.engine.models import Geometry, prompts
from tests.engine.test_fidelity import assert_greedy, spectral_codecs
from tests.engine.test_float_payload import FLOAT, assert_same_tokens

GEOMETRIES = {
    head_size: Geometry("llama", head_size, kv_heads=2, query_heads_per_kv_head=groups, layers=2)
    for head_size, groups in ((80, 3), (96, 1), (112, 3), (192, 1))
}
PROMPTS = prompts([5, 129, 500, 1000], seed=0)
# Inside the windows, at the end of a page, over several pages, and decoding over the end of one.
MIXED = {"name": "mixed", "kind": "generate", "prompts": PROMPTS, "max_tokens": 40}
CODECS = {  # spectral: every bit of the page goes to the 96 directions that keys have
    "hadamard-80": hadamard_codecs(2, 2, 80),
    "spectral-96": spectral_codecs(GEOMETRIES[96]),
}


@pytest.fixture(scope="module")
def runs(engines: Engines) -> dict[str, Run]:
    """Engines by ``stock-<head size>``, ``float-<head size>`` and the names of `CODECS`."""
    cases = {
        f"{name}-{head_size}": (geometry, engine, [MIXED])
        for head_size, geometry in GEOMETRIES.items()
        for name, engine in (("stock", {}), ("float", FLOAT))
    }
    for name, codecs in CODECS.items():
        geometry = GEOMETRIES[int(name[-2:])]
        fitted = model_geometry(AutoConfig.from_pretrained(engines.model(geometry)))
        folder = Artifact(codecs, fitted, geometry.name).save(engines.directory / name)
        cases[name] = (geometry, OSCAR | {"additional_config": {"oscar": {"artifact": str(folder)}}}, [MIXED])
    return {name: engines.run(*case) for name, case in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("head_size", GEOMETRIES)
def test_float_pages(runs: dict[str, Run], head_size: int) -> None:
    run = runs[f"float-{head_size}"]
    assert f"2 KV heads of size {head_size}, padded to {128 if head_size < 128 else 256})" in run.log
    assert_same_tokens(run, runs[f"stock-{head_size}"], "mixed")
    assert not leaks(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_int2_pages(engines: Engines, runs: dict[str, Run], name: str) -> None:
    answers = [output["token_ids"][0] for output in runs[name]["mixed"][0]]
    model = AutoModelForCausalLM.from_pretrained(engines.model(GEOMETRIES[int(name[-2:])]), dtype=torch.float32)
    assert_greedy(model, CODECS[name], PROMPTS, answers)
    assert answers != runs[f"stock-{name[-2:]}"].tokens("mixed")[0]
    assert not leaks(runs[name])
