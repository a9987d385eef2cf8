# SPDX-License-Identifier: Apache-2.0
"""The soak: its rule for answers, that it finds every fault it looks for, and its short form on a real server.

Faults come from `Stub`, a small server that answers like ``vllm serve`` and misbehaves in one way. The short form is
the real thing on a random model: one minute of traffic, and a run whose engine is killed.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
import vllm.envs

from scripts import soak
from tests.engine.conftest import ROOT, environment
from tests.engine.models import Geometry, write_model

# ------------------------------------------------------------------------------------------------------ the rule


def answer(tokens: str, logprobs: list[float] | None = None, rivals: dict[int, tuple[str, float]] | None = None):
    """One letter a token, with a likely token ``z`` 5 nats behind unless ``rivals`` says otherwise."""
    result = soak.Answer(text=tokens)
    for index, token in enumerate(tokens):
        logprob = logprobs[index] if logprobs else -0.1
        rival, behind = (rivals or {}).get(index, ("z", 5.0))
        result.add(token, logprob, {token: logprob, rival: logprob - behind})
    return result


ALONE = answer("abcd", rivals={2: ("x", 0.15)})
LONG = "abcdefghij"
BOUNDS = soak.Bounds(token=0.1, answer=0.05, margin=0.2, run_rms=None, run_p98=None, source="test")


@pytest.mark.parametrize(
    ("alone", "other", "verdict", "reason"),
    [
        (ALONE, answer("abcd"), "equal", ""),
        (ALONE, answer("abcd", [-0.1, -0.1, -0.1, -0.19]), "equal", ""),
        (ALONE, answer("abcd", [-0.1, -0.1, -0.1, -0.21]), "wrong", "a logprob moved by 0.110 nats"),
        (ALONE, answer("abxy"), "tie", "token 2 differs; alone the margin was 0.150 nats"),
        (ALONE, answer("abxy", [-0.1, -0.5, -0.1, -0.1]), "wrong", "a logprob moved by 0.400"),
        (ALONE, answer("aby", rivals={2: ("c", 0.15)}), "tie", "token 2 differs; under load the margin was 0.150"),
        (ALONE, answer("aby", rivals={2: ("c", 0.25)}), "wrong", "token 2 differs; under load the margin was 0.250"),
        (ALONE, answer("abyy"), "wrong", "token 2 is none of the 20 most likely"),
        (ALONE, answer("abcz"), "wrong", "token 3 differs; alone the margin was 5.000 nats"),
        (ALONE, answer("abc"), "wrong", "3 tokens instead of 4"),
        (ALONE, answer("abcde"), "wrong", "5 tokens instead of 4"),
        (answer(LONG), answer(LONG, [-0.14] * 10), "equal", ""),
        (answer(LONG), answer(LONG, [-0.16] * 10), "wrong", "10 logprobs moved by 0.060 nats on average"),
    ],
    ids=[
        "same", "noise", "moved", "tie", "moved before a tie", "tie by the other's list", "no tie by that", "unlikely",
        "other word", "short", "long", "all moved a little", "all moved",
    ],
)  # fmt: skip
def test_answers_are_compared_token_by_token(alone, other, verdict, reason):
    comparison = soak.compare(alone, other, BOUNDS)
    assert comparison.verdict == verdict
    assert reason in comparison.reason


def reading(seed: int, number: int, quantized: bool = True) -> soak.Answer:
    """An answer whose logprobs are sums over 400 Gaussian numbers, which this reading sees with noise of its own.

    Quantized ones are coded with the four levels -1.5, -0.5, 0.5 and 1.5 after that.
    """
    size = (len(LONG), 2, 400)
    numbers = np.random.default_rng(seed).standard_normal(size)
    seen = numbers + 0.02 * np.random.default_rng((seed, number)).standard_normal(size)
    if quantized:
        seen = np.floor(seen.clip(-1.99, 1.99)) + 0.5
    result = soak.Answer(text=LONG)
    for token, (chosen, second) in zip(LONG, 0.02 * (seen - numbers).sum(-1), strict=True):
        result.add(token, -0.5 + chosen, {token: -0.5 + chosen, "z": -6.0 + second})
    return result


def test_bounds_follow_from_the_effect_of_quantization():
    """Other readings of the same numbers pass; an answer that lost its context by half a nat does not."""
    effects = soak.Effects()
    for seed in range(40):
        effects.add(reading(seed, 0), reading(seed, 0, quantized=False))
    bounds = effects.bounds("invariant", "auto")
    assert bounds is not None
    assert (bounds.token, bounds.answer) == (max(effects.tokens), max(effects.answers))
    assert bounds.run_rms == pytest.approx(np.sqrt(np.mean(np.square(effects.tokens))))
    assert bounds.run_p98 == pytest.approx(2 * np.quantile(effects.tokens, 0.99), rel=0.1)
    exact = effects.bounds("exact", "auto")
    assert exact is not None
    for name in ("token", "answer", "margin", "run_rms"):
        assert getattr(exact, name) == 2 * getattr(bounds, name)
    record = soak.Record()
    for seed in range(40):
        alone = reading(seed, 0)
        for number in range(1, 30):
            other = reading(seed, number)
            comparison = soak.compare(alone, other, bounds)
            assert comparison.verdict == "equal"
            record.compared(soak.Question("q", "plain", {}), "under load", alone, other, comparison)
    drift = record.drift.summary()
    share = 0.7 * 0.02 * np.sqrt(2)  # of the codes that differ: both readings have noise
    assert drift["rms"] == pytest.approx(np.sqrt(12 * share) * bounds.run_rms, rel=0.25)
    assert drift["max"] < 0.9 * bounds.token
    assert drift["p98"] < bounds.run_p98
    lost = reading(7, 31)
    lost.logprobs = [logprob - 0.5 for logprob in lost.logprobs]
    assert soak.compare(reading(7, 0), lost, bounds).verdict == "wrong"


def test_lost_values_are_judged_by_chance():
    assert soak.chance_of(0, 0) == soak.chance_of(0, 5) == 1
    assert soak.chance_of(1, 0) == 0.5
    assert soak.chance_of(2, 1) == 0.5
    assert soak.chance_of(6, 0) > soak.SIGNIFICANT > soak.chance_of(7, 0)


def test_few_tokens_make_no_bounds():
    effects = soak.Effects()
    effects.add(answer(LONG), answer(LONG))
    assert effects.bounds("invariant", "auto") is None


def test_effects_end_at_the_first_difference():
    effects = soak.Effects()
    other = answer("abxdefghij", [-0.3] * 10, rivals={2: ("c", 0.2)})
    effects.add(answer("abcdefghij", rivals={2: ("x", 0.4)}), other)
    assert effects.tokens == pytest.approx([0.2, 0.2, 0.4, 0.2])  # c: -0.1 and -0.5; x: -0.3 and -0.5
    assert effects.answers == []
    assert max(effects.margins) == pytest.approx(0.6)  # 0.4 for c became 0.2 for x


def test_a_distribution_is_that_of_its_numbers():
    distribution = soak.Distribution()
    values = [random.Random(0).lognormvariate(-3, 1) for _ in range(1)] + [n / 1000 for n in range(1000)]
    for value in values:
        distribution.add(value)
    summary = distribution.summary()
    assert summary["mean"] == pytest.approx(sum(values) / len(values))
    assert summary["p50"] == pytest.approx(0.5, rel=0.012)
    assert summary["p99.9"] == pytest.approx(0.999, rel=0.012)
    assert summary["max"] == 0.999
    assert len(distribution.bins) < 700
    assert soak.Distribution().summary() == {}


def test_records_do_not_grow_with_the_run():
    record = soak.Record()
    wrong = soak.Comparison("wrong", [0.5] * 10, None, "test")
    for _ in range(3 * soak.KEPT):
        record.compared(soak.Question("q", "plain", {}), "under load", answer(LONG), answer(LONG), wrong)
    assert len(record.differences) == len(record.violations) == soak.KEPT
    assert record.violation_kinds == {"wrong answer": 3 * soak.KEPT}
    assert len(record.furthest) == 10


def test_a_nan_is_not_finite():
    answered = answer("ab")
    answered.add("c", None, {})
    assert not answered.finite
    assert math.isnan(answered.logprobs[-1])
    assert answer("ab").finite


def test_growth_is_from_the_middle_to_the_end():
    assert soak.growth([100.0, 500.0]) is None
    assert soak.growth([None] * 9) is None
    assert soak.growth([100.0, 500.0, 500.0]) == 0.0
    assert soak.growth([0.0, 0.0, 500.0, 500.0, 700.0, 900.0]) == 300.0


def test_questions_know_their_answers():
    questions = soak.Prompts(seed=3, chars_per_token=3.0).questions(30, 4096)
    assert {question.kind for question in questions} == {"echo", "json", "plain"}
    assert len({question.name for question in questions}) == 30
    for question in questions:
        prompt = question.body.get("prompt") or question.body["messages"][0]["content"]
        assert len(prompt) / 3 < 0.9 * 4096
        assert (question.expected is None) == (question.kind == "plain")
        if question.expected is not None:
            assert prompt.count(f" drawer is {question.expected}.") == 1
    assert max(len(q.body.get("prompt", "")) for q in questions) / 3 > 0.7 * 4096


# ------------------------------------------------------------------------------------------- a server with a fault

CONTEXT = 1024


class Stub(ThreadingHTTPServer):
    """Answers that depend on the prompt alone, one fault, and the state that ``/metrics`` tells."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, fault: str) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.fault = fault
        self.lock = threading.Lock()
        self.running = self.requests = 0

    def handle_error(self, request, client_address) -> None:
        """Clients that hang up are part of the traffic."""


def valid(body: dict) -> bool:
    """Whether vLLM would accept this request of the soak."""
    prompt, regex = body.get("prompt"), body.get("structured_outputs", {}).get("regex", "")
    chat = isinstance(body.get("messages"), list)
    return (
        body.get("model") == "stub"
        and (chat or isinstance(prompt, str))
        and "((" not in regex
        and "response_format" not in body
        and body["temperature" if "temperature" in body else "max_tokens"] not in (-1, "warm")
        and 1 <= body["max_tokens"] <= CONTEXT
        and body.get("top_p", 1) <= 1
        and body.get("n", 1) >= 1
        and body.get("logprobs", 1) <= 20
    )


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_) -> None:
        """Silence."""

    def reply(self, status: int, content: object, kind: str = "application/json") -> None:
        raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        stub = self.server
        if self.path == "/health":
            self.reply(503 if stub.fault == "died" and stub.requests > 60 else 200, "", "text/plain")
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": CONTEXT}]})
        else:
            held = 0.25 if stub.fault == "usage stays" else 0.0
            values = {
                "num_requests_running": stub.running,
                "num_requests_waiting": 0,
                "kv_cache_usage_perc": 0.5 if stub.running else held,
                "corrupted_requests_total": 3 if stub.fault == "counted NaN" else 0,
            }
            lines = [f'vllm:{name}{{engine="0"}} {float(value)}' for name, value in values.items()]
            self.reply(200, "\n".join(lines) + "\n", "text/plain")

    def do_POST(self) -> None:
        stub, raw = self.server, self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == "/reset_prefix_cache":
            self.reply(200, {"success": stub.fault != "reset refused" or stub.requests < 60})
            return
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if self.path not in ("/v1/completions", "/v1/chat/completions") or not isinstance(body, dict):
            self.reply(404, {})
        elif not valid(body):
            self.reply(500 if stub.fault == "malformed" else 400, {})
        else:
            with stub.lock:
                stub.running += 1
                stub.requests += 1
            try:
                self.answer(body, busy=stub.running > 1)
            finally:
                with stub.lock:
                    stub.running -= 1

    def answer(self, body: dict, busy: bool) -> None:
        fault = self.server.fault
        time.sleep(0.002)
        if fault == "dropped" and busy:
            self.connection.close()
            return
        if fault == "error" and busy:
            self.reply(400, {"error": {"message": "out of memory"}})
            return
        content = json.dumps(body.get("prompt") or body["messages"])
        text = hashlib.sha256(content.encode()).hexdigest()[:5]
        if "structured_outputs" in body:
            text = json.dumps({"name": "x", "code": int(text, 16) % 90_000 + 10_000, "active": True})
        if fault == "wrong" and busy:
            text = text[:-1] + "#"
        if fault == "no JSON" and "structured_outputs" in body:
            text = text[:-1]
        logprobs = [None if fault == "NaN" and busy else -0.5] * len(text)
        if not body.get("stream"):
            columns = {"token_logprobs": logprobs, "tokens": list(text), "top_logprobs": None, "text_offset": []}
            choice = {"text": text, "logprobs": columns, "finish_reason": "stop"}
            self.reply(
                200, {"id": "1", "model": "stub", "choices": [{**choice, "index": i} for i in range(body.get("n", 1))]}
            )
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        chat = "messages" in body
        for index, (token, logprob) in enumerate(zip(text, logprobs, strict=True)):
            choice: dict = {"index": 0, "finish_reason": "stop" if index == len(text) - 1 else None}
            if chat:
                top = {"token": token, "logprob": logprob, "top_logprobs": []}
                choice |= {"delta": {"content": token}, "logprobs": {"content": [top]}}
            else:
                columns = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [{token: logprob}]}
                choice |= {"text": token, "logprobs": columns}
            self.event({"id": "1", "choices": [choice], "usage": None})
        self.event({"id": "1", "choices": [], "usage": {"prompt_tokens": len(content) // 4}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")


@contextlib.contextmanager
def stub(fault: str) -> Iterator[str]:
    server = Stub(fault)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


FAULTS = {
    "none": None,
    "wrong": "wrong answer",
    "no JSON": "wrong answer",
    "NaN": "not finite",
    "counted NaN": "not finite",
    "error": "error",
    "dropped": "error",
    "usage stays": "leak",
    "reset refused": "leak",
    "malformed": "malformed",
    "died": "died",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "IDLE_SECONDS", 1)
    path = tmp_path / "report.json"
    with stub(fault) as url:
        command = ["--base-url", url, "--minutes", "0.02", "--segment", "0.5", "--concurrency", "3"]
        status = soak.main([*command, "--questions", "9", "--conversations", "2", "--report", str(path)])
    result = json.loads(path.read_text())
    kinds = {violation["kind"] for violation in result["violations"]}
    assert kinds == ({FAULTS[fault]} if FAULTS[fault] else set()), result["violations"][:3]
    assert status == (0 if fault == "none" else 1)
    assert result["passed"] == (fault == "none")
    output = capsys.readouterr().out
    assert ("passed" if fault == "none" else FAULTS[fault]) in output.splitlines()[-1]
    if fault == "none":
        assert result["checked"]["equal"] > 30
        assert {"burst", "fill", "abort", "conversation", "malformed", "sampled"} <= result["traffic"].keys()
    if fault == "dropped":
        assert all(", from R" in violation["detail"] for violation in result["violations"])
    if fault == "wrong":
        wrong = result["checked"]["differences"][0]
        assert wrong["alone"] != wrong["answer"] == wrong["alone"][:-1] + "#"


@pytest.mark.parametrize("name", ["missing", "empty", "config.json"])
def test_a_model_folder_without_a_configuration_is_refused_at_once(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--model", str(tmp_path / name)])
    assert "there is no such folder with a config.json; give the folder of a model" in capsys.readouterr().err


def test_connections_are_given_up_before_the_server_closes_them():
    """A server that drops what comes on a connection idle for 2 s, as one does that is just closing it."""
    dropped = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered = None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                if answered is not None and time.monotonic() - answered > 2:
                    dropped.append(time.monotonic() - answered)
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n")
                writer.write(b'{"data": []}')
                await writer.drain()
                answered = time.monotonic()
        writer.close()

    async def talk() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = soak.parse(["--base-url", url])
        client = soak.Soak(url, None, options, BOUNDS, 1.0, lambda _: None)
        for pause in (0, 2.3):
            await asyncio.sleep(pause)
            assert (await client.http.get("/health")).status_code == 200
            assert (await client.client.models.list()).data == []
        await client.http.aclose()
        await client.client.close()
        server.close()

    asyncio.run(talk())
    assert dropped == []
    assert soak.CONNECTION_SECONDS < vllm.envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE / 2


def test_a_run_that_did_not_exercise_the_server_fails(tmp_path):
    with stub("none") as url:
        command = ["--base-url", url, "--minutes", "0", "--questions", "3", "--conversations", "0"]
        assert soak.main([*command, "--report", str(tmp_path / "report.json")]) == 1
    violations = json.loads((tmp_path / "report.json").read_text())["violations"]
    assert {violation["kind"] for violation in violations} == {"coverage"}


def start_script(arguments: list[str], folder: Path, **changes: str) -> subprocess.Popen:
    """The script as a user starts it; what it prints goes to ``output.txt``."""
    with open(folder / "output.txt", "w") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "soak.py"), "--report", str(folder / "report.json"), *arguments],
            env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""), **changes),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell does with background jobs
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_reports_what_it_saw(number, tmp_path):
    with stub("none") as url:
        command = ["--base-url", url, "--minutes", "60", "--segment", "0.5", "--concurrency", "3", "--questions", "9"]
        process = start_script(command, tmp_path)
        report, deadline = tmp_path / "report.json", time.monotonic() + 60
        while not report.exists() or json.loads(report.read_text())["segments"] < 2:
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(30) == 1
    result = json.loads(report.read_text())
    assert not result["passed"]
    assert not result["finished"]
    assert soak.INTERRUPTED in result["notes"]
    assert result["violations"] == []
    assert result["checked"]["equal"] > 20
    output = (tmp_path / "output.txt").read_text().splitlines()
    assert sum(" violations; memory {" in line for line in output) >= 2  # one line per segment
    assert output[-1].split() == ["result", "not", "finished"]


# -------------------------------------------------------------------------------------------------- the short form

MODEL = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4, sharpness=1.0)
SERVE = ["--max-model-len", "1536", "--blocks", "150", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"]
FORWARDED = ["--", "--enforce-eager", "--dtype", "float32"]
# Float32 and "invariant" leave the noise of a code that rounds the other way: tests/engine/test_invariant_prefill.py.
SMALL = ["--concurrency", "6", "--questions", "12", "--conversations", "2", "--tolerance", "0.05"]


@contextlib.contextmanager
def real_run(folder: Path, minutes: str, *more: str) -> Iterator[subprocess.Popen]:
    """A run on a random model without a tokenizer."""
    command = ["--model", str(write_model(MODEL, folder)), "--minutes", minutes, *SMALL, *SERVE, *more, *FORWARDED]
    process = start_script(command, folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_one_minute_on_a_real_server(tmp_path):
    with real_run(tmp_path, "1", "--compare-dtype", "auto", "--compare-minutes", "0.2") as process:
        status = process.wait(800)
    output = (tmp_path / "output.txt").read_text()
    print(output[-3000:])
    assert status == 0, output[-3000:]
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["checked"]["equal"] >= 50
    assert result["checked"]["wrong"] == 0
    assert result["pool"]["peak_usage"] >= soak.FULL_POOL
    assert result["pool"]["num_preemptions"] > 0
    assert result["pool"]["prefix_cache_hits"] > 0
    assert result["traffic"]["turns with a prefix hit"] > 0
    assert len(result["memory"]) >= 2
    assert result["comparison"]["reference"]["checked"]["equal"] >= 20
    assert result["comparison"]["effect"]["count"] >= soak.ENOUGH_EFFECTS


@pytest.mark.slow
def test_a_killed_engine_is_reported(tmp_path):
    with real_run(tmp_path, "2") as process:
        deadline = time.monotonic() + 300
        while "questions asked alone" not in (tmp_path / "output.txt").read_text():
            assert process.poll() is None, (tmp_path / "output.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        (engine,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "EngineCore" in p.name()]
        engine.kill()
        assert process.wait(120) == 1
    result = json.loads((tmp_path / "report.json").read_text())
    assert [violation["kind"] for violation in result["violations"]] == ["died"]
    assert "died" in (tmp_path / "output.txt").read_text().splitlines()[-1]
