# SPDX-License-Identifier: Apache-2.0
"""The soak: its rule for answers, that it finds every fault it looks for, and its short form on a real server.

Faults come from `Stub`, a small server that answers like ``vllm serve`` and misbehaves in one way. The short form is
the real thing on a random model: one minute of traffic, and a run whose engine is killed.
"""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.parametrize(
    ("other", "verdict", "reason"),
    [
        (answer("abcd"), "equal", ""),
        (answer("abcd", [-0.1, -0.1, -0.1, -0.19]), "equal", ""),
        (answer("abcd", [-0.1, -0.1, -0.1, -0.21]), "wrong", "a logprob moved by 0.110 nats"),
        (answer("abxy"), "tie", "token 2 differs; alone it was 0.150 nats less likely"),
        (answer("abxy", [-0.1, -0.5, -0.1, -0.1]), "wrong", "a logprob moved by 0.400"),
        (answer("abzy"), "wrong", "token 2 is none of the 10 most likely"),
        (answer("abcz"), "wrong", "token 3 differs; alone it was 5.000 nats less likely"),
        (answer("abc"), "wrong", "3 tokens instead of 4"),
        (answer("abcde"), "wrong", "5 tokens instead of 4"),
    ],
    ids=["same", "noise", "moved", "tie", "moved before a tie", "unlikely", "other word", "short", "long"],
)
def test_answers_are_compared_token_by_token(other, verdict, reason):
    comparison = soak.compare(ALONE, other, tolerance=0.1)
    assert comparison.verdict == verdict
    assert reason in comparison.reason


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
            self.reply(200, {"id": "1", "model": "stub", "choices": [{**choice, "index": i} for i in range(body["n"])]})
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
        assert result["checked"]["equal"] > 50
        assert {"burst", "fill", "abort", "conversation", "malformed", "sampled"} <= result["traffic"].keys()
    if fault == "wrong":
        wrong = result["checked"]["differences"][0]
        assert wrong["alone"] != wrong["answer"] == wrong["alone"][:-1] + "#"


def test_a_run_that_did_not_exercise_the_server_fails(tmp_path):
    with stub("none") as url:
        command = ["--base-url", url, "--minutes", "0", "--questions", "3", "--conversations", "0"]
        assert soak.main([*command, "--report", str(tmp_path / "report.json")]) == 1
    violations = json.loads((tmp_path / "report.json").read_text())["violations"]
    assert {violation["kind"] for violation in violations} == {"coverage"}


# -------------------------------------------------------------------------------------------------- the short form

MODEL = Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4, sharpness=1.0)
SERVE = ["--max-model-len", "1536", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"]
FORWARDED = ["--", "--enforce-eager", "--dtype", "float32"]
# Float32 and "invariant" leave the noise of a code that rounds the other way: tests/engine/test_invariant_prefill.py.
SMALL = ["--concurrency", "6", "--questions", "12", "--conversations", "2", "--tolerance", "0.05"]


@contextlib.contextmanager
def real_run(folder: Path, minutes: str) -> Iterator[subprocess.Popen]:
    """The script as a user starts it, on a random model without a tokenizer."""
    model = write_model(MODEL, folder)
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--model", str(model), "--minutes", minutes]
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*command, "--report", str(folder / "report.json"), *SMALL, *SERVE, *FORWARDED],
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", PYTHONPATH=os.environ.get("PYTHONPATH", "")),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@pytest.mark.slow
def test_one_minute_on_a_real_server(tmp_path):
    with real_run(tmp_path, "1") as process:
        status = process.wait(540)
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
    assert len(result["memory"]) >= 3


@pytest.mark.slow
def test_a_killed_engine_is_reported(tmp_path):
    with real_run(tmp_path, "2") as process:
        deadline = time.monotonic() + 300
        log = tmp_path / "report.oscar_int2.log"
        while not log.exists() or "POST /v1/completions" not in log.read_text():
            assert process.poll() is None, (tmp_path / "output.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        (engine,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "EngineCore" in p.name()]
        engine.kill()
        assert process.wait(120) == 1
    result = json.loads((tmp_path / "report.json").read_text())
    assert [violation["kind"] for violation in result["violations"]] == ["died"]
    assert "died" in (tmp_path / "output.txt").read_text().splitlines()[-1]
