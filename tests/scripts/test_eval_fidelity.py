# SPDX-License-Identifier: Apache-2.0
"""The fidelity harness on a small random model: no error where there is none, and the expected order where there is."""

import argparse
import csv
import importlib
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from calib import PRESETS, calibrate
from calib.capture import AttentionCall
from calib.simulate import Segments, page_store
from oscar_vllm.errors import OscarArtifactError, OscarConfigError
from tests.calib.models import ByteTokenizer, random_model

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
SEGMENTS = Segments(sink=64, recent=128)
TEXT = "All human beings are born free. "


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("eval_fidelity")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def model():
    return random_model(family="qwen2", kv_heads=2, group=2)


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a")
    options = {"num_samples": 3, "held_out": 1, "max_length": 512, "recent": 128, "tokenizer": ByteTokenizer()}
    calibrate(model, folder, recipe=PRESETS["default"], **options)
    return folder


def test_scores_rank_the_configurations(script, model, artifact):
    windows = script.evaluation_windows(TEXT * 60, ByteTokenizer(), 2, 640)
    names = ["bf16", "float", "naive", "hadamard", "uncalibrated", "int4_hadamard", "kivi2", "turboquant3"]
    with torch.inference_mode():
        chosen = script.configurations(names, {"default": artifact}, model.config, SEGMENTS)
        scores = script.evaluate(model, windows, chosen, SEGMENTS)
        layers = script.fidelity_layers.measure(model, windows, chosen, SEGMENTS)
    assert list(scores) == [*names, "default"]
    rows = {name: {"bits": chosen[name].bits} | score.row() for name, score in scores.items()}
    assert rows["bf16"]["kl"] == 0.0
    assert rows["bf16"]["top1"] == 1.0
    assert rows["float"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows["float"]["perplexity"] == pytest.approx(rows["bf16"]["perplexity"], rel=1e-4)
    assert rows["float"]["perplexity_change"] == pytest.approx(0.0, abs=1e-4)
    kl = {name: row["kl"] for name, row in rows.items()}
    assert 1e-5 < kl["default"] < kl["hadamard"]
    assert kl["default"] < kl["naive"]
    assert kl["int4_hadamard"] < kl["turboquant3"] < kl["uncalibrated"]
    assert all(row["positions"] == 2 * (640 - 1 - 320) for row in rows.values())
    assert [rows[name]["bits"] for name in ("bf16", "naive", "default")] == [16, 2.5, 2.4375]
    assert len(script.table(rows).splitlines()) == len(names) + 2

    assert set(layers) == {*names, "default"} - {"bf16", "float"}
    assert layers["default"][0][0] < layers["naive"][0][0]
    assert "rank correlation" in script.fidelity_layers.summary(layers, kl)
    assert len(script.fidelity_layers.rows(layers)) == len(layers) * model.config.num_hidden_layers


CONSTANTS = ["float", "naive", "hadamard", "uncalibrated", "int4_hadamard", "kivi2", "turboquant3"]


def test_windows_may_stand_anywhere_in_a_context(script, model):
    """The exact distributions do not change, so that the differences are the cache's; quantized keys do."""
    window = script.evaluation_windows(TEXT * 60, ByteTokenizer(), 1, 640)
    chosen = script.configurations(["bf16", "naive"], {}, model.config, SEGMENTS)
    first = script.first_position(SEGMENTS)
    with torch.inference_mode():
        exact = [script.log_probabilities(model, window[0], first, start) for start in (0, 1000)]
        near, far = (script.evaluate(model, window, chosen, SEGMENTS, start) for start in (0, 1000))
    torch.testing.assert_close(exact[0], exact[1], atol=1e-3, rtol=0)
    assert far["bf16"].row()["kl"] == 0
    assert far["naive"].row()["kl"] != pytest.approx(near["naive"].row()["kl"], rel=1e-3)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_made_on_the_device_of_the_keys(script, model, name):
    """On the device `meta`, whose elementwise operations refuse tensors of the CPU as a GPU's do."""
    query = torch.empty(1, 4, 1500, 64, device="meta")
    key = torch.empty(1, 2, 1500, 64, device="meta")
    call = AttentionCall(0, query, key, key, 0.125, None, model.model.layers[0].self_attn, None)
    configuration = script.configurations([name], {}, model.config, SEGMENTS)[name]
    output = configuration.attention(SEGMENTS)(call)
    assert (output.device.type, output.shape) == ("meta", query.shape)


@pytest.mark.parametrize("sinks", [None, torch.tensor([4.0, 6.0, 2.0, 5.0])])
def test_layer_errors_are_those_of_the_softmax_with_the_learned_sink(script, sinks):
    """Against one more logit per head with a value of zero, query by query."""
    torch.manual_seed(0)
    length, first = 400, SEGMENTS.sink + SEGMENTS.recent
    query, key, value = 4 * torch.randn(1, 4, length, 64), torch.randn(1, 2, length, 64), torch.randn(1, 2, length, 64)
    call = AttentionCall(0, query, key, value, 0.125, None, torch.nn.Module(), None, sinks)
    stored = key[0] + 0.3 * torch.randn_like(key[0]), value[0] + 0.3 * torch.randn_like(value[0])
    kl, error, scale = [], 0.0, 0.0
    for head in range(4):
        exact_key, exact_value = key[0, head // 2].double(), value[0, head // 2].double()
        more = torch.empty(0) if sinks is None else sinks[head : head + 1]
        for position in torch.linspace(first, length - 1, script.fidelity_layers.QUERIES).long().tolist():
            token = torch.arange(position + 1)
            history = ((token >= SEGMENTS.sink) & (token <= position - SEGMENTS.recent))[:, None]
            outputs, weights = [], []
            for paged in (torch.zeros_like(history), history):
                k, v = (
                    torch.where(paged, part[head // 2, : position + 1].double(), whole[: position + 1])
                    for part, whole in zip(stored, (exact_key, exact_value), strict=True)
                )
                logits = k @ query[0, head, position].double() * 0.125
                weights.append(torch.cat([logits, more.double()]).softmax(-1))
                outputs.append(weights[-1][: position + 1] @ v)
            p, q = weights
            kl.append((p * (p / q).log()).sum().item())
            error += (outputs[1] - outputs[0]).square().sum().item()
            scale += outputs[0].square().sum().item()
    actual = script.fidelity_layers.layer_errors(call, lambda key, value: stored, SEGMENTS)
    assert actual == pytest.approx((sum(kl) / len(kl), error / scale), rel=1e-4)
    assert actual[0] > 0.01


def test_a_codec_on_another_device_is_noticed(script):
    codec = script.rotated(torch.eye(64), 2, 0.96, 0.92)
    key = torch.empty(2, 256, 64, device="meta")
    page_store(codec.to("meta"), 64)(key, key)
    with pytest.raises(RuntimeError, match="device"):
        page_store(codec, 64)(key, key)


def test_padded_heads_count_their_own_elements(script):
    model = random_model(kv_heads=1, group=2, head_size=96, layers=1)
    windows = script.evaluation_windows(TEXT * 60, ByteTokenizer(), 1, 640)
    names = ["bf16", "hadamard", "uncalibrated", "int4_hadamard"]
    with torch.inference_mode():
        chosen = script.configurations(names, {}, model.config, SEGMENTS)
        scores = script.evaluate(model, windows, chosen, SEGMENTS)
    assert [chosen[name].bits for name in names] == [16, 3.0, 3.0, pytest.approx(4.25 * 128 / 96)]
    kl = {name: score.row()["kl"] for name, score in scores.items()}
    assert 0 < kl["int4_hadamard"] < kl["hadamard"]
    assert kl["int4_hadamard"] < kl["uncalibrated"]


def test_the_change_in_perplexity_and_its_error_are_those_of_known_numbers(script):
    exact = torch.full((128, 2), 0.5).log()
    actual = torch.tensor([0.25, 0.75]).log().expand(128, 2)
    score = script.Score()
    score.add(exact, actual, torch.zeros(128, dtype=torch.long))
    score.add(exact, exact, torch.zeros(128, dtype=torch.long))
    row = score.row()
    assert row["positions"] == 256
    assert row["perplexity"] == pytest.approx((2 * 4) ** 0.5)
    assert row["perplexity_change"] == pytest.approx(2**0.5 - 1)
    assert row["kl"] == pytest.approx(0.25 * math.log(4 / 3), rel=1e-5)
    # Four blocks, two with the mean 2 kl and two with zero.
    assert row["kl_stderr"] == pytest.approx(row["kl"] * (4 / 3) ** 0.5 / 2, rel=1e-5)


def test_needles_stand_where_they_should(script):
    retrieval = script.fidelity_retrieval
    text = ByteTokenizer()(TEXT * 200, add_special_tokens=False).input_ids
    shape = {"length": 2000, "depths": [10, 40, 70]}
    ids, needles = retrieval.prompt(ByteTokenizer(), text, generator=random.Random(1), **shape)
    assert len(ids) == 2000
    words = bytes(ids.tolist()).decode()
    assert words.count("The secret number of ") == 6
    room = 2000 - len(words[words.index(retrieval.INTRODUCTION) :])
    for depth, needle in zip(shape["depths"], needles, strict=True):
        number = words[slice(*needle.answer)].strip()
        name = words[: needle.answer[0]].split()[-2]
        fact = retrieval.SENTENCE.format(name=name, number=number)
        assert words[slice(*needle.sentence)] == f"\n\n{fact}\n\n"
        assert words.count(fact) == 2
        assert needle.sentence[0] == pytest.approx(depth / 100 * room, abs=0.06 * room)
    again, _ = retrieval.prompt(ByteTokenizer(), text, generator=random.Random(1), **shape)
    assert torch.equal(ids, again)


def test_an_answer_is_right_if_greedy_decoding_writes_it(script, model):
    answers = script.fidelity_answers
    with torch.inference_mode():
        ids = torch.tensor(ByteTokenizer()(TEXT * 20, add_special_tokens=False).input_ids)
        spans = [(300, 302), (200, 201)]
        for at in (200, 300, 301):
            ids[at] = model(ids[None, :at]).logits[0, -1].argmax()
        wrong = ids.clone()
        wrong[301] = (ids[301] + 1) % 256
        right = [answers.Case(ids, spans), answers.Case(wrong, spans[::-1]), answers.Case(ids, spans[1:])]
        read = answers.answered(model, right)
        loss = -model(wrong[None, :302]).logits[0, [299, 300]].log_softmax(-1).gather(1, wrong[300:302, None]).sum()
    assert [[answer.right for answer in case] for case in read] == [[True, True], [True, False], [True]]
    assert read[1][1].loss == pytest.approx(float(loss), rel=1e-4)
    assert read[1][0].loss == pytest.approx(read[0][1].loss, rel=1e-4)
    assert read[1][1].loss > read[0][0].loss


def test_retrieval_counts_answers_by_depth_and_pairs_them_with_the_exact_model(script, model, monkeypatch):
    retrieval = script.fidelity_retrieval
    chosen = script.configurations(["bf16", "hadamard"], {}, model.config, SEGMENTS)
    options = argparse.Namespace(lengths=[1000], depths=[50, 20], trials=1, seeds=[0, 1], batch=3)
    yes, no = script.fidelity_answers.Answer(True, 0.25), script.fidelity_answers.Answer(False, 2.0)
    results = iter([[[yes, yes]] * 3, [[yes, no]], [[no, yes]] * 3, [[no, no]]])
    monkeypatch.setattr(script.fidelity_answers, "answered", lambda model, cases: next(results))
    with torch.inference_mode():
        texts = {"a": TEXT * 50, "b": TEXT.upper() * 50}
        rows, paired = retrieval.evaluate(model, ByteTokenizer(), texts, chosen, SEGMENTS, options)
    keys = ("configuration", "text", "seed", "depth", "found", "trials")
    assert [tuple(row[key] for key in keys) for row in rows if row["text"] == "b"] == [
        ("bf16", "b", 0, 20, 1, 1), ("bf16", "b", 0, 50, 1, 1), ("bf16", "b", 1, 20, 1, 1), ("bf16", "b", 1, 50, 0, 1),
        ("hadamard", "b", 0, 20, 0, 1), ("hadamard", "b", 0, 50, 1, 1), ("hadamard", "b", 1, 20, 0, 1),
        ("hadamard", "b", 1, 50, 0, 1),
    ]  # fmt: skip
    assert "20 %: 0/4  50 %: 3/4" in retrieval.table(rows)
    keys = ("configuration", "asked", "right", "exact_right", "lost", "gained", "prompts", "seed", "text")
    assert [tuple(row[key] for key in keys) for row in paired] == [
        ("bf16", 8, 7, 7, 0, 0, 4, "0 1", "a b"), ("hadamard", 8, 3, 7, 4, 0, 4, "0 1", "a b"),
    ]  # fmt: skip
    # One answer of each of the four prompts costs 1.75 more: no spread.
    assert [row["loss_change"] for row in paired] == [0.0, 4 * 1.75 / 8]
    assert [row["loss_change_stderr"] for row in paired] == [0.0, pytest.approx(0.0)]
    assert len(script.fidelity_answers.table(paired).splitlines()) == 3


def test_intervals_and_tests_of_known_counts(script):
    answers = script.fidelity_answers
    assert answers.wilson(10, 12) == pytest.approx((0.5520, 0.9530), abs=1e-4)
    assert answers.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert answers.mcnemar(0, 0) == 1.0
    assert answers.mcnemar(5, 0) == pytest.approx(2 / 32)
    assert answers.mcnemar(1, 7) == pytest.approx(2 * 9 / 256)
    # Losses change by 0.5, 0 and 1 nat in the prompts: mean 1.5 / 6, standard error 1 / sqrt(12), of 2 answers each.
    (yes, no), costly = (answers.Answer(right, 1.0) for right in (True, False)), answers.Answer(False, 1.5)
    better = answers.Answer(True, 2.0)
    row = answers.compare([[yes, yes], [yes, no], [yes, no]], [[yes, costly], [yes, no], [yes, better]])
    assert (row["right"], row["exact_right"], row["lost"], row["gained"]) == (4, 4, 1, 1)
    assert row["difference"] == 0.0
    # Changes of -1, 0 and 1 answers per prompt: their mean has a standard error of 1 / sqrt(3), of 2 answers each.
    assert row["difference_high"] == pytest.approx(1.959964 / 3**0.5 / 2, rel=1e-5)
    assert row["difference_low"] == -row["difference_high"]
    assert row["loss_change"] == pytest.approx(0.25)
    assert row["loss_change_stderr"] == pytest.approx(12**-0.5 / 2)
    assert math.isnan(answers.compare([[yes]], [[no]])["loss_change_stderr"])


def test_sums_are_right_and_asked_behind_the_first_page(script):
    tasks = script.fidelity_exact_match
    case = tasks.sums(ByteTokenizer(), random.Random(1), first=320, length=2000)
    assert len(case.ids) == 2000
    words = bytes(case.ids.tolist()).decode()
    assert len(case.answers) >= 20
    assert all(start > 320 for start, _ in case.answers)
    for start, end in case.answers:
        sentence = words[:start].splitlines()[-1]
        a, b, *written = [int(word.strip(":")) for word in sentence.split() if word.strip(":").isdigit()]
        assert int(words[start:end]) == (a - b if "away" in sentence else a + b)
        assert written == [a, b]


def test_a_table_is_asked_for_when_it_lies_in_history(script):
    tasks = script.fidelity_exact_match
    case = tasks.lookup(ByteTokenizer(), random.Random(1), segments=SEGMENTS, length=2500)
    assert len(case.ids) == 2500
    words = bytes(case.ids.tolist()).decode()
    rows = [line.split(" | ") for line in words.splitlines() if line.startswith("| ") and "name" not in line]
    table, again = dict(rows[: tasks.ROWS]), dict(rows[tasks.ROWS :])
    assert table == again
    assert list(table) != list(again)
    assert len(case.answers) == tasks.ROWS
    for start, end in case.answers:
        name = words[:start].splitlines()[-1].removesuffix(" |")
        assert words[start:end] == " " + table[name].removesuffix(" |")
    assert SEGMENTS.sink <= words.index("| name")
    assert words.index("\n\n", words.index("|---|")) <= case.answers[0][0] - SEGMENTS.recent
    with pytest.raises(SystemExit, match="600 tokens are too few for a table in history"):
        tasks.lookup(ByteTokenizer(), random.Random(1), segments=SEGMENTS, length=600)


def test_lines_are_asked_for_by_halves_and_copies_are_known(script):
    tasks = script.fidelity_exact_match

    class Decoder(ByteTokenizer):
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    unique = "".join(f"    value_{i} = {i * i}\n" for i in range(30))
    text = "x" * 70 + "\n    return self.answer\n" + unique + "    return self.answer\n    short\nunfinished line"
    ids = torch.tensor(Decoder()(text).input_ids)
    spans = tasks.lines(Decoder(), ids, 200)
    halves = [text[start:end] for start, end in spans]
    assert halves[-1] == "lf.answer"  # of the 18 characters behind the indentation 9 are given
    assert halves.count("lf.answer") == 1  # the first of the two lines is no question
    assert all(start > 200 and "\n" not in half for (start, _), half in zip(spans, halves, strict=True))
    assert [tasks.repeated(ids, span, SEGMENTS) for span in spans].count(True) == 1
    assert tasks.repeated(ids, spans[-1], SEGMENTS)
    assert not tasks.repeated(ids, spans[-1], Segments(sink=64, recent=1024))
    assert not tasks.repeated(ids, spans[-1], Segments(sink=128, recent=128))


def test_tasks_become_cases_of_one_length(script, model):
    tasks = script.fidelity_exact_match

    class Decoder(ByteTokenizer):
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    options = argparse.Namespace(tasks="sums,lookup,code", seeds=[0, 1], trials=2, tokens=2500, batch=2, text="code")
    windows = script.evaluation_windows(script.read_text("code")[:20000], Decoder(), 2, 2500)
    made = tasks.cases(Decoder(), windows, SEGMENTS, options)
    assert {task: len(cases) for task, cases in made.items()} == {"sums": 4, "lookup": 4, "code": 2}
    assert {len(case.ids) for cases in made.values() for case in cases} == {2500}
    assert len({bytes(case.ids.tolist()) for case in made["sums"]}) == 4
    options.tasks = "sums"
    with torch.inference_mode():
        chosen = script.configurations(["bf16", "hadamard"], {}, model.config, SEGMENTS)
        rows = tasks.evaluate(model, Decoder(), windows, chosen, SEGMENTS, options)
    assert [(row["configuration"], row["task"], row["difference"]) for row in rows[:1]] == [("bf16", "sums", 0.0)]
    assert rows[1]["asked"] == rows[0]["asked"] == sum(len(case.answers) for case in made["sums"])
    options.tasks = "prose"
    with pytest.raises(SystemExit, match="task 'prose' is unknown; use sums, lookup, code, repeats"):
        tasks.cases(Decoder(), windows, SEGMENTS, options)
    options.tasks = "repeats"
    with pytest.raises(SystemExit, match="repeats: 2500 tokens hold no question"):
        tasks.cases(Decoder(), [torch.full((2500,), ord("x"))], SEGMENTS, options)


@pytest.mark.parametrize("depth", [1, 95])
def test_a_needle_among_the_exact_tokens_is_refused(script, depth):
    options = argparse.Namespace(lengths=[1000], depths=[depth], trials=1, seeds=[0])
    with pytest.raises(SystemExit, match=f"at depth {depth} % of 1000 tokens a sentence is not in history"):
        script.fidelity_retrieval.cases(ByteTokenizer(), {"a": TEXT * 50}, SEGMENTS, options)


def test_prompts_without_room_for_text_are_refused(script):
    options = argparse.Namespace(lengths=[90], depths=[10, 50], trials=1, seeds=[0])
    with pytest.raises(SystemExit, match="90 tokens are too few for 2 sentences and questions; raise --lengths"):
        script.fidelity_retrieval.cases(ByteTokenizer(), {"a": TEXT * 50}, SEGMENTS, options)


def test_an_artifact_of_another_model_is_refused(script, artifact):
    other = random_model(family="qwen2", kv_heads=1, group=4)
    with pytest.raises(OscarArtifactError, match="num_key_value_heads is 1, fitted on 2"):
        script.configurations([], {"default": artifact}, other.config, SEGMENTS)


def test_what_cannot_be_evaluated_ends_in_one_line(script, model):
    with pytest.raises(SystemExit, match="configuration 'int3' is unknown; use bf16, float, naive, hadamard"):
        script.configurations(["int3"], {}, model.config, SEGMENTS)
    with pytest.raises(SystemExit, match="the text has 5 tokens, 2 windows of 640 need 1280"):
        script.evaluation_windows("short", ByteTokenizer(), 2, 640)
    chosen = script.configurations(["bf16", "kivi2"], {}, model.config, SEGMENTS)
    with pytest.raises(SystemExit, match="vLLM serves bf16, uncalibrated and --artifact NAME=DIR only"):
        script.evaluate_engine("model", [], chosen, SEGMENTS, "float32", {})


def test_html_pages_become_text(script, tmp_path):
    page = (
        "<html><head><title>no</title></head><body><h1>One</h1><p>Two <b>three</b></p><script>no</script></body></html>"
    )
    (tmp_path / "b.html").write_text("<p>last</p>")
    (tmp_path / "a.html").write_text(page)
    assert script.read_text(str(tmp_path)) == "One\n\nTwo three\n\nlast"


def test_rows_are_added_never_replaced(script, tmp_path):
    path = tmp_path / "new" / "fidelity.csv"
    row = dict.fromkeys(script.FIELDS, "x")
    script.append_csv(path, [row])
    script.append_csv(path, [row | {"kl": "y"}])
    with open(path, newline="") as file:
        assert [entry["kl"] for entry in csv.DictReader(file)] == ["x", "y"]
    with pytest.raises(OscarConfigError, match="has other columns"):
        script.append_csv(path, [{"layer": 1}], ("layer",))
    path.write_text("")
    script.append_csv(path, [row])
    assert len(path.read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder, and files that are no good."""
    folder = tmp_path_factory.mktemp("m")
    random_model().save_pretrained(folder / "model")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1") * 1000)
    (folder / "other.csv").write_text("a,b\n")
    (folder / "other_answers.csv").write_text("a,b\n")
    return folder


def refused(script, monkeypatch, capsys, arguments: list[str]) -> str:
    """The line that the command line ends with."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        script.main()
    if stop.value.code == 2:  # argparse has printed it
        return capsys.readouterr().err.splitlines()[-1]
    assert "\n" not in str(stop.value)
    return str(stop.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/model"], "error: model folder '/no/model' does not exist"),
        (["--text", "missing.txt"], "error: text missing.txt cannot be read: No such file"),
        (["--text", "latin.txt"], "error: latin.txt is not UTF-8"),
        (["--text", "manual,code"], "error: --text manual,code: several texts need --retrieval; give one"),
        (["--artifact", "default=/nope"], "error: .*/nope"),
        (["--windows", "0"], "--windows: '0' is no number from 1 on"),
        (["--windows", "-1"], "--windows: '-1' is no number from 1 on"),
        (["--tokens", "0"], "--tokens: '0' is no number from 1 on"),
        (["--tokens", "460"], "error: --tokens 460 is too few: the first 448 tokens .*; use at least 577"),
        (["--tokens", "576", "--exact-match"], "error: --tokens 576 is too few"),
        (["--sink", "-5"], "error: --sink -5 is out of range"),
        (["--recent", "64"], "error: --recent 64 is out of range; use 128 or more"),
        (["--start", "-1"], "error: --start -1 is out of range"),
        (["--engine-options", "{bad"], "--engine-options: '{bad' is not JSON: "),
        (["--engine-options", "[1]"], r"--engine-options: '\[1\]' is no JSON object"),
        (["--engine", "vllm", "--layers"], "error: --layers needs --engine transformers"),
        (["--engine", "vllm", "--exact-match"], "error: --exact-match needs --engine transformers"),
        (["--engine", "vllm", "--start", "9"], "error: --start needs --engine transformers"),
        (["--configurations", ""], "error: no cache is to be evaluated"),
        (["--device", "nowhere"], "error: --device nowhere cannot be used"),
        (["--csv", "other.csv"], "error: --csv other.csv has other columns; choose another file"),
        (["--csv", "other.csv", "--exact-match"], "error: --csv other_answers.csv has other columns"),
        (["--csv", "latin.txt/a.csv"], "error: --csv latin.txt/a.csv cannot be written: .*; choose another file"),
        (["--retrieval", "--depths", ",".join("1" * 13)], "error: --depths has 13 values; use at most 12"),
        (["--retrieval", "--depths", "101"], "error: --depths 101 is out of range"),
        (["--retrieval", "--lengths", "0"], "error: --lengths 0 is out of range"),
        (["--retrieval", "--trials", "0"], "--trials: '0' is no number from 1 on"),
    ],
)
def test_bad_values_end_in_one_line(script, folder, monkeypatch, capsys, arguments, message):
    """Before the model is loaded; files with other columns before anything is."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(script.AutoTokenizer, "from_pretrained", lambda *_: ByteTokenizer())
    monkeypatch.setattr(script.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    line = refused(script, monkeypatch, capsys, ["--model", "model", "--configurations", "bf16", *arguments])
    assert re.search(message, line), line


def test_the_recorded_command_can_be_typed_again(script):
    arguments = ["--model", "/a/b/smol", "--configurations", "", "--artifact", "x=/c/d", "--csv", "e.csv", "--layers"]
    words = " ".join(script._words("eval_fidelity.py", arguments))
    assert words == "python scripts/eval_fidelity.py --model smol --configurations '' --artifact x=DIR --layers"
    words = " ".join(script._words("sweep_text.py", ["--artifact", "/c/d", "--text", "ru=/e/f.txt"]))
    assert words == "python scripts/sweep_text.py --artifact DIR --text ru=f.txt"


def test_the_default_text_is_none_that_calibration_uses(script):
    from calib.data import load_documents

    text = script.read_text("manual") + script.read_text("code")
    assert len(text) > 800_000
    lines = {line.strip() for document in load_documents(None) for line in document.splitlines() if len(line) > 60}
    assert not lines & {line.strip() for line in text.splitlines()}


def test_a_module_that_is_a_package_is_read(script, tmp_path, monkeypatch):
    """As Python 3.12's zipfile."""
    for module in script.CODE_MODULES[1:]:
        (tmp_path / f"{module}.py").write_text(f"source of {module}")
    package = script.CODE_MODULES[0]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"source of {package}")
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    assert script.read_text("code") == "\n\n".join(f"source of {module}" for module in script.CODE_MODULES)


@pytest.mark.slow
def test_vllm_and_transformers_agree(script, tmp_path):
    """The same windows through the plugin, float32: the same KL, up to codes that round the other way."""
    pytest.importorskip("vllm")
    model = random_model(family="llama", kv_heads=2, group=2)
    model.save_pretrained(tmp_path)
    windows = script.evaluation_windows(TEXT * 60, ByteTokenizer(), 2, 640)
    chosen = script.configurations(["uncalibrated"], {}, model.config, SEGMENTS)
    with torch.inference_mode():
        expected = script.evaluate(model, windows, chosen, SEGMENTS)["uncalibrated"].row()
    actual = script.evaluate_engine(str(tmp_path), windows, chosen, SEGMENTS, "float32", {})["uncalibrated"].row()
    assert actual["kl"] == pytest.approx(expected["kl"], rel=0.02)
    assert actual["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-3)
    assert actual["positions"] == expected["positions"]


@pytest.mark.slow
@pytest.mark.parametrize("prefix_hits", [False, True])
def test_vllm_writes_the_answers_that_greedy_decoding_writes(script, tmp_path, prefix_hits):
    """Right where the model goes on like that, wrong where one token differs; whether the text is cached or not."""
    pytest.importorskip("vllm")
    model = random_model(family="llama", kv_heads=2, group=2)
    model.save_pretrained(tmp_path)
    ids = torch.tensor(ByteTokenizer()(TEXT * 60).input_ids[:700])
    answers = importlib.import_module("fidelity_answers")
    written = model.generate(ids[None], do_sample=False, max_new_tokens=4, min_new_tokens=4)[0]
    other = written.clone()
    other[-1] = (other[-1] + 1) % model.config.vocab_size
    cases = [answers.Case(text, [(700, 703), (701, 704)]) for text in (written, other)]
    with torch.inference_mode():
        read = [[answer.right for answer in case] for case in answers.answered(model, cases)]
        assert read == [[True, True], [True, False]]
    actual = importlib.import_module("fidelity_engine").answers(
        str(tmp_path), cases, "float32", {}, prefix_hits=prefix_hits
    )
    assert actual == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("more", "files"),
    [
        ([], {"a.csv": 2}),
        (["--layers"], {"a.csv": 2, "a_layers.csv": 1}),
        (
            ["--retrieval", "--lengths", "1200", "--depths", "20", "--trials", "1"],
            {"a_answers.csv": 2, "a_retrieval.csv": 2},
        ),
    ],
)
def test_a_run_adds_rows_to_its_own_files(script, folder, tmp_path, monkeypatch, more, files):
    monkeypatch.setattr(script.AutoTokenizer, "from_pretrained", lambda *_: ByteTokenizer())
    arguments = ["--model", str(folder / "model"), "--configurations", "bf16,naive", "--windows", "1"]
    arguments += ["--tokens", "600"]
    monkeypatch.setattr(sys, "argv", ["eval_fidelity.py", *arguments, "--csv", str(tmp_path / "a.csv"), *more])
    script.main()
    written = {}
    for path in tmp_path.iterdir():
        with path.open(newline="") as file:
            written[path.name] = len({row["configuration"] for row in csv.DictReader(file)})
    assert written == files
