# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_vllm.config import OscarConfig
from oscar_vllm.errors import OscarArtifactError, OscarConfigError


def parse(**options):
    return OscarConfig.from_additional_config({"oscar": options})


def test_defaults_without_an_entry():
    config = OscarConfig.from_additional_config({"other": 1})
    assert config == OscarConfig()
    assert (config.prefill, config.payload) == ("exact", "int2")


def test_json_text_is_parsed_at_both_levels():
    expected = OscarConfig(rotation="hadamard", sink=32)
    assert OscarConfig.from_additional_config(json.dumps({"oscar": {"rotation": "hadamard", "sink": 32}})) == expected
    assert OscarConfig.from_additional_config({"oscar": '{"rotation": "hadamard", "sink": 32}'}) == expected


def test_options_round_trip():
    config = parse(artifact="folder", prefill="invariant", sink=0, recent=512)
    assert OscarConfig.from_options(config.to_options()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"artefact": "x"}, r"'artefact' is unknown; did you mean 'artifact'\?"),
        ({"recents": 256}, r"'recents' is unknown; did you mean 'recent'\?"),
        ({"rotation": "random"}, r"rotation='random' is unknown; use one of: 'hadamard'"),
        ({"prefill": "fast"}, r"prefill='fast' is unknown; use one of: 'exact', 'invariant'"),
        ({"payload": "int4"}, r"payload='int4' is unknown"),
        ({"zero": "row"}, r"zero='row' is unknown"),
        ({"artifact": ""}, r"artifact='' must be a non-empty string"),
        ({"artifact": 3}, r"artifact=3 must be a non-empty string"),
        ({"sink": 8}, r"sink=8 must be a multiple of 16, 0..128 tokens"),
        ({"sink": 144}, r"sink=144 must be a multiple of 16, 0..128 tokens"),
        ({"sink": -16}, r"sink=-16 must be"),
        ({"sink": True}, r"sink=True must be"),
        ({"sink": 64.0}, r"sink=64.0 must be"),
        ({"recent": 112}, r"recent=112 must be a multiple of 16, 128 or more tokens"),
        ({"recent": 130}, r"recent=130 must be"),
        ({"recent": "256"}, r"recent='256' must be"),
        ({"artifact": "x", "rotation": "hadamard"}, r"exclude each other"),
        ({"revision": "main"}, r"revision='main' needs artifact"),
        (["artifact"], r"must be a JSON object, got list"),
        ("{artifact", r"is not valid JSON"),
    ],
    ids=lambda value: json.dumps(value)[:40] if not isinstance(value, str) else None,
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(OscarConfigError, match=message) as caught:
        OscarConfig.from_options(options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"sink": ' + "9" * 5000 + "}", "", "nul", "[1]", "7", '"x"'])
def test_text_that_is_no_object_is_refused_in_one_line(text):
    for read in (OscarConfig.from_options, OscarConfig.from_additional_config):
        with pytest.raises(OscarConfigError) as refusal:
            read(text)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 400


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in fields(OscarConfig)]) | st.text(max_size=3),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
        | st.sampled_from(["exact", "page", "int2", "hadamard", 64, 256]),
        max_size=4,
    )
)  # fmt: skip
def test_any_options_are_accepted_or_refused(options):
    try:
        config = OscarConfig.from_options(options)
    except OscarConfigError:
        return
    assert OscarConfig.from_options(config.to_options()) == config


def test_resolved_prefers_the_option_then_the_artifact_then_the_default():
    assert (OscarConfig().resolved().sink, OscarConfig().resolved().recent) == (64, 256)
    assert OscarConfig().resolved(sink=0, recent=512, zero="token") == OscarConfig(sink=0, recent=512, zero="token")
    assert parse(sink=0).resolved(sink=128, recent=512).sink == 0


def test_zero_that_contradicts_the_artifact_is_refused():
    with pytest.raises(OscarConfigError, match="contradicts the artifact, which was calibrated with 'page'"):
        parse(zero="token").resolved(zero="page")


def test_artifact_source(tmp_path):
    assert parse(artifact="org/name").artifact_source(str(tmp_path)) == "org/name"
    assert parse(rotation="hadamard").artifact_source(str(tmp_path)) is None
    assert parse(payload="float").artifact_source(str(tmp_path)) is None
    (tmp_path / "oscar_int2").mkdir()
    assert OscarConfig().artifact_source(str(tmp_path)) == str(tmp_path / "oscar_int2")


def test_missing_artifact_names_the_command_and_the_alternative(tmp_path):
    with pytest.raises(OscarArtifactError) as caught:
        OscarConfig().artifact_source(str(tmp_path))
    message = str(caught.value)
    assert f"python -m calib --model {tmp_path} --output-dir" in message
    assert '{"oscar": {"rotation": "hadamard"}}' in message
    assert "\n" not in message


def test_importing_the_package_loads_neither_torch_nor_vllm():
    code = "import sys, oscar_vllm, oscar_vllm.config; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
