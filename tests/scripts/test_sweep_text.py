# SPDX-License-Identifier: Apache-2.0
"""The sweep's rules fire on planted loops and garble, and not on real text."""

import importlib
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


class CharacterTokenizer:
    """One token per character; U+E000 stands for a byte that is no UTF-8."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(char) for char in text])

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids)).replace("\ue000", "\ufffd")


TOKENIZER = CharacterTokenizer()


@pytest.fixture(scope="module")
def sweep():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("sweep_text")
    sys.path.remove(str(SCRIPTS))


def names(sweep, prompt: str, text: str, *, nats: float = 0.5, prompt_nats: float = 2.0) -> set[str]:
    tokens = TOKENIZER(text).input_ids
    return set(sweep.symptoms(prompt, sweep.readable(TOKENIZER, tokens), tokens, nats, prompt_nats).names)


def sources() -> dict:
    pytest.importorskip("pycountry")
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("sweep_text").TEXTS
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("name", sources())
def test_real_text_has_no_symptom(sweep, name):
    """Forty evenly spaced places of every text, 600 characters behind 3,000."""
    text = sweep.TEXTS[name]()
    assert len(text) > 10_000
    for ids in sweep.stretches(TOKENIZER, text, 40, 3600):
        prompt, following = TOKENIZER.decode(ids[:3000]), TOKENIZER.decode(ids[3000:])
        assert names(sweep, prompt, following) <= {"repeats"}  # columns of characters, not of tokens


PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. Winston Smith slipped quickly. " * 9
TEXT = "He went through the glass doors, though not quickly enough to prevent a swirl of gritty dust from entering."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, set()),
        (TEXT + " and so on" * 10, {"loop"}),
        ("the same. " * 30, {"loop", "repeats"}),
        ("".join(f"The item {i} is like the item before it in all respects. " for i in range(9)), {"repeats"}),
        (TEXT + "\ue000\ue000\ue000", set()),
        (TEXT[:50] + "\ue000" + TEXT[50:], {"replacement"}),
        (TEXT[:60] + "".join(map(chr, range(0x3042, 0x3082))), {"foreign"}),
        ("".join(random.Random(0).choices([chr(i) for i in range(33, 127)], k=500)), {"noise"}),
    ],
)
def test_planted_symptoms_are_found(sweep, text, expected):
    found = names(sweep, PROMPT, text)
    assert found == expected


def test_a_script_of_the_prompt_is_not_foreign(sweep):
    japanese = "".join(map(chr, range(0x3042, 0x3082)))
    assert names(sweep, PROMPT + japanese, TEXT + japanese) == set()
    assert "foreign" not in names(sweep, japanese * 20, TEXT)  # Latin letters stand in every language's text


def test_an_unlikely_text_is_one_less_likely_than_the_prompt(sweep):
    assert names(sweep, PROMPT, TEXT, nats=3.0, prompt_nats=2.0) == {"unlikely"}
    assert names(sweep, PROMPT, TEXT, nats=3.0, prompt_nats=3.5) == set()
    assert names(sweep, PROMPT, TEXT, nats=2.4, prompt_nats=0.5) == set()


def test_loops_have_a_least_period(sweep):
    assert sweep.loop_period([1, 2, 3] * 20) == 3
    assert sweep.loop_period([7] * 40) == 1
    assert sweep.loop_period([7] * 39) == 0
    assert sweep.loop_period(list(range(20)) * 4) == 20
    assert sweep.loop_period(list(range(20)) * 3) == 0
    assert sweep.loop_period([*range(100), *[1, 2, 3] * 20, 9]) == 0  # it has left the loop


def test_conversations_fit_and_ask_for_their_first_page(sweep):
    made = sweep.conversations(TOKENIZER, 3, 6000)
    texts = [TOKENIZER.decode(ids) for ids in made]
    assert len({text[:100] for text in texts}) == 3
    with pytest.raises(SystemExit, match="500 tokens are too few for a conversation"):
        sweep.conversations(TOKENIZER, 3, 500)
    for text in texts:
        assert 3000 < len(text) <= 6000
        first = text.split("What does Python's manual say about ")[1].split("?")[0]
        assert text.endswith(f"what you told me about {first} at the beginning.\n\nassistant:")


def run_main(sweep, monkeypatch, tmp_path, *, quantized: str, exact: str, branch: str = "") -> int:
    """The exit status of a sweep over a file; engines write ``quantized``, ``exact`` and, from a branch, ``branch``."""
    story = PROMPT * 5

    def continued(model, prompts, new_tokens, *, dtype, engine, judged=None):
        words = quantized if engine else exact
        if len(prompts[0]) > 1200:  # a branch
            assert TOKENIZER.decode(prompts[0])[1200:] == quantized[: len(prompts[0]) - 1200]
            assert quantized[: len(prompts[0]) - 1201] == exact[: len(prompts[0]) - 1201]
            words = branch
        own = [TOKENIZER(words).input_ids] * len(prompts)
        nats = [] if judged is None else [[0.5] * len(prompts)] * 2
        return sweep.fidelity_engine.Continuations(own, [2.0] * len(prompts), nats)

    monkeypatch.setattr(sweep.fidelity_engine, "continued", continued)
    monkeypatch.setattr(sweep.AutoTokenizer, "from_pretrained", lambda model: TOKENIZER)
    (tmp_path / "story.txt").write_text(story)
    monkeypatch.setattr(
        sys, "argv",
        ["sweep_text.py", "--model", "m", "--texts", "", "--text", f"story={tmp_path / 'story.txt'}", "--prompts", "2",
         "--new-tokens", "400", "--csv", str(tmp_path / "sweep.csv")],
    )  # fmt: skip
    return sweep.main()


LOOP = "He went round. " * 20


def test_the_exit_status_is_1_for_what_only_the_quantized_cache_shows(sweep, monkeypatch, tmp_path, capsys):
    assert run_main(sweep, monkeypatch, tmp_path, quantized=LOOP, exact=TEXT, branch=TEXT) == 1
    printed = capsys.readouterr().out
    assert "--- story 1: loop, repeats" in printed
    assert printed.count(LOOP) == 2
    assert "symptoms that only oscar_int2 shows: 2 of 2 prompts" in printed
    assert "symptoms that only oscar_int2 shows and auto does not from the branch: 2 of 2 prompts" in printed


def test_the_exit_status_is_0_for_what_the_model_shows_itself(sweep, monkeypatch, tmp_path, capsys):
    assert run_main(sweep, monkeypatch, tmp_path, quantized=LOOP, exact=LOOP) == 0
    assert run_main(sweep, monkeypatch, tmp_path, quantized=TEXT, exact=LOOP) == 0
    assert "symptoms that only auto shows: 2 of 2 prompts" in capsys.readouterr().out
    assert run_main(sweep, monkeypatch, tmp_path, quantized=LOOP, exact=TEXT, branch=LOOP[9:]) == 0
    printed = capsys.readouterr().out
    assert "symptoms that only oscar_int2 shows: 2 of 2 prompts" in printed
    assert "auto does not from the branch: 0 of 2 prompts." in printed
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 3 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/model"], "error: model folder '/no/model' does not exist"),
        (["--prompts", "0"], "--prompts: '0' is no number from 1 on"),
        (["--new-tokens", "-1"], "--new-tokens: '-1' is no number from 1 on"),
        (["--engine-options", "{bad"], "--engine-options: '{bad' is not JSON: "),
        (["--control", "7"], "--control: '7' is no JSON object"),
        (["--texts", "", "--text", "x=/nope"], "error: text /nope cannot be read: No such file"),
        (["--texts", "prose"], "error: text 'prose' is unknown; use code, manual, .* or --text NAME=FILE"),
        (["--texts", ""], "error: --texts names no text"),
        (["--artifact", "/nope"], "error: .*/nope"),
        (["--csv", "other.csv"], "error: --csv other.csv has other columns"),
    ],
)
def test_bad_values_end_in_one_line(sweep, monkeypatch, tmp_path, capsys, arguments, message):
    """Before an engine is started."""
    (tmp_path / "other.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.fidelity_engine, "continued", lambda *_, **__: pytest.fail("started an engine"))
    monkeypatch.setattr(sweep.AutoTokenizer, "from_pretrained", lambda model: TOKENIZER)
    monkeypatch.setattr(sys, "argv", ["sweep_text.py", "--model", "m", *arguments])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    line = capsys.readouterr().err.splitlines()[-1] if stop.value.code == 2 else str(stop.value)
    assert re.search(message, line), line
    assert "\n" not in line
