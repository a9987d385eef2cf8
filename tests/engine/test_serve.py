# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` process with a real model, asked through the official OpenAI client."""

import json
import pydoc_data.topics
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.engine.conftest import Engines, environment
from tests.engine.models import Geometry, byte_tokenizer, prompts, write_model

pytestmark = pytest.mark.slow

STARTUP_SECONDS = 300
NAME = "served"
LONG_PROMPT = pydoc_data.topics.topics["assignment"][:6000]  # about 1,500 tokens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vllm serve ended with status {process.returncode}:\n{log.read_text()[-6000:]}", pytrace=False)
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"vllm serve was not healthy after {STARTUP_SECONDS} s:\n{log.read_text()[-6000:]}", pytrace=False)


@contextmanager
def serving(model: Path, oscar: dict, log_path: Path, *arguments: str) -> Iterator[str]:
    """A server with float32 and INT2 or float pages, stopped on leaving; its URL."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--served-model-name", NAME,
        "--kv-cache-dtype", "oscar_int2", "--additional-config", json.dumps({"oscar": oscar}),
        "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details",
        "--host", "127.0.0.1", "--port", str(port), *arguments,
    ]  # fmt: skip
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            command,
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=log_path.parent,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log_path)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and log file of a server."""
    log_path = tmp_path_factory.mktemp("serve") / "log.txt"
    # "invariant" and float32 make an answer independent of prefix hits, so that it can be compared.
    with serving(smollm2, {"rotation": "hadamard", "prefill": "invariant"}, log_path) as url:
        yield url, log_path


@pytest.fixture(scope="module")
def client(server: tuple[str, Path]) -> openai.OpenAI:
    return client_of(server[0])


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)


def complete(client: openai.OpenAI, prompt: str = LONG_PROMPT) -> openai.types.Completion:
    return client.completions.create(model=NAME, prompt=prompt, max_tokens=32, temperature=0)


def chat_request(question: str) -> dict:
    messages = [{"role": "user", "content": f"{LONG_PROMPT[:3000]}\n\n{question}"}]
    return {"model": NAME, "messages": messages, "max_tokens": 32, "temperature": 0}


def test_startup_summary(client: openai.OpenAI, server: tuple[str, Path]) -> None:
    lines = [line for line in server[1].read_text().splitlines() if "OSCAR KV cache:" in line]
    assert len(lines) == 1
    assert "2.44 bits per element" in lines[0]  # 39 bytes for a key and a value of 64 elements
    assert "data-free Hadamard rotation" in lines[0]


def test_completion_with_prefix_hit(client: openai.OpenAI) -> None:
    cold, warm = complete(client), complete(client)
    assert cold.usage.prompt_tokens > 1000
    assert cold.usage.prompt_tokens_details is None or not cold.usage.prompt_tokens_details.cached_tokens
    # Everything but the last, incomplete block of 128 tokens.
    assert warm.usage.prompt_tokens_details.cached_tokens == (cold.usage.prompt_tokens - 1) // 128 * 128
    assert warm.choices[0].text == cold.choices[0].text
    assert warm.usage.completion_tokens == 32


def test_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt=LONG_PROMPT, max_tokens=32, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == complete(client).choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    request = chat_request("What is an assignment statement?")
    answer = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    assert answer.strip()


def test_unknown_model_is_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.completions.create(model="gpt-none", prompt="x", max_tokens=1)


def test_data_parallel(engines: Engines, tmp_path: Path) -> None:
    """Two engines behind one server: both are asked, and both answer as stock vLLM does."""
    model = write_model(Geometry("qwen3", head_size=64, kv_heads=2, query_heads_per_kv_head=4), tmp_path)
    byte_tokenizer().save_pretrained(model)
    asked = prompts([700, 130], seed=41)
    generate = {"name": "stock", "kind": "generate", "prompts": asked, "max_tokens": 16}
    expected = [
        [f"token_id:{token}" for token in ids[0]] for ids in engines.run(model, {}, [generate]).tokens("stock")[0]
    ]
    arguments = ["--data-parallel-size", "2", "--return-tokens-as-token-ids"]
    with serving(model, {"payload": "float"}, tmp_path / "log.txt", *arguments) as url:
        for prompt, tokens in [*zip(asked, expected, strict=True)] * 3:
            answer = client_of(url).completions.create(
                model=NAME, prompt=prompt, max_tokens=16, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].logprobs.tokens == tokens
        with urllib.request.urlopen(url + "/metrics") as response:
            metrics = response.read().decode()
    served = re.findall(r'vllm:generation_tokens_total{engine="(\d)",.*} (\d+)', metrics)
    assert {engine for engine, tokens in served if int(tokens) > 0} == {"0", "1"}
