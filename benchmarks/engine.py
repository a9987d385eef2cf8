# SPDX-License-Identifier: Apache-2.0
"""Whole-engine speed and capacity per KV-cache dtype: prefill, decode step at a long context, tokens that fit.

Random weights of a real geometry; every dtype runs in its own process. The decode step is timed on a full prefix hit:
each request's prompt is cached, and the time per step is the difference between a long and a short generation.

With ``--turns`` many users talk in turns instead, each over a context of its own (``--answer`` tokens, then 64 of their
own), all within one budget of cache bytes:
generated tokens per second once every context has been read, contexts that were evicted meanwhile read again included.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton_ops.layout import PAGE_TOKENS

GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
STEPS = 96
"""Decode steps that are timed for up to four requests, in proportion for more: reading long prompts again takes a time
that varies by a tenth of a second."""
Shape = tuple[int, int]
"""Tokens of context and requests."""


def shape(text: str) -> Shape:
    """``100000x4``: four requests of 100,000 tokens."""
    context, requests = text.split("x")
    return int(context), int(requests)


def prompts(arguments: argparse.Namespace, context: int, count: int) -> list[list[int]]:
    """Token ids that share no prefix."""
    last = GEOMETRIES[arguments.geometry]["vocab_size"] - 10
    return [[(i * 7919 + j * (2 * i + 1)) % last + 5 for j in range(context)] for i in range(count)]


class Engine:
    """vLLM with random weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM

        requests = sorted({1, *(count for _, count in arguments.shapes)})
        options: dict[str, Any] = {"gpu_memory_utilization": arguments.gpu_memory_utilization}
        if arguments.kv_cache_gib is not None:
            options = {"kv_cache_memory_bytes": int(arguments.kv_cache_gib * 2**30)}
        if arguments.kv_cache_dtype.startswith("oscar"):
            options["additional_config"] = {"oscar": {"rotation": "hadamard"}}
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(GEOMETRIES[arguments.geometry]))
            self.llm = LLM(
                folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                kv_cache_dtype=arguments.kv_cache_dtype,
                max_model_len=arguments.max_model_len,
                max_num_seqs=max(requests),
                max_num_batched_tokens=arguments.max_num_batched_tokens,
                enforce_eager=arguments.enforce_eager,
                compilation_config={"cudagraph_capture_sizes": requests},
                enable_prefix_caching=True,
                seed=0,
                **options,
            )
        self.generate([[7] * 300], 8)  # compile what is compiled on first use
        self.start_s = time.perf_counter() - start

    def generate(self, batch: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
        """Seconds, and vLLM's outputs."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in batch], parameters, use_tqdm=False)
        return time.perf_counter() - begin, outputs


def measure_steps(engine: Engine, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each shape: time of a prefill, and of a decode step on a full prefix hit."""
    read: dict[int, list[float]] = {}
    for context, requests in arguments.shapes:
        # One token behind the last whole page: a hit leaves a prefill of a single token, in every dtype.
        whole = context // PAGE_TOKENS * PAGE_TOKENS + 1
        chosen, seconds = prompts(arguments, whole, requests), read.setdefault(context, [])
        for prompt in chosen[len(seconds) :]:
            seconds.append(engine.generate([prompt], 1)[0])
            print(f"prefill of {context} tokens: {seconds[-1]:.2f} s", flush=True)
        engine.generate(chosen, 4)
        # The best of each: the difference of two noisy times would favour a slow short run.
        steps = STEPS * max(1, requests // 4)
        runs = [(engine.generate(chosen, 4), engine.generate(chosen, 4 + steps)) for _ in range(3)]
        short, long = (min(times[i][0] for times in runs) for i in (0, 1))
        yield {
            "context": context,
            "batch": requests,
            "ms_per_step": 1e3 * (long - short) / steps,
            "prefill_s": min(seconds),
            "prefill_tokens_per_s": whole / min(seconds),
            "hit_tokens": min(output.num_cached_tokens or 0 for output in runs[0][0][1]),
        }


def measure_turns(engine: Engine, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each shape: users that each add 64 tokens to their context and get an answer, all at once."""
    for context, users in arguments.shapes:
        histories = prompts(arguments, context, users)
        for turn in range(1 + arguments.turns):
            seconds, outputs = engine.generate(histories, arguments.answer)
            hits = sum(output.num_cached_tokens or 0 for output in outputs)
            print(f"turn {turn} of {users} users: {seconds:.2f} s, {hits} tokens cached", flush=True)
            if turn:
                yield {
                    "context": context,
                    "batch": users,
                    "turn": turn,
                    "answer": arguments.answer,
                    "tokens_per_s": arguments.answer * users / seconds,
                    "hit_share": hits / sum(map(len, histories)),
                    "kv_cache_gib": arguments.kv_cache_gib,
                }
            for user, output in enumerate(outputs):
                histories[user] += [*output.outputs[0].token_ids, *([11 + turn] * 64)]


def measure(arguments: argparse.Namespace) -> None:
    """Print rows of one KV-cache dtype; runs inside its own process."""
    engine = Engine(arguments)
    common = {"kv_cache_dtype": arguments.kv_cache_dtype, "geometry": arguments.geometry}
    for row in (measure_turns if arguments.turns else measure_steps)(engine, arguments):
        print(json.dumps(common | row | {"start_s": engine.start_s}), flush=True)


def run(dtype: str, extra: list[str], log_dir: Path | None = None, timeout_s: float = 400) -> list[dict[str, Any]]:
    """Measure one dtype in its own process; what it finds is printed at once, a failure is shown and gives no row."""
    rows: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.engine", "--kv-cache-dtype", dtype, *extra]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    guard = threading.Timer(timeout_s, process.kill)
    guard.start()
    output, kv_tokens = [], None
    log = (log_dir / f"engine_{dtype}.log").open("w") if log_dir else None
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if log:
            print(f"{time.perf_counter() - begin:6.1f} {line}", end="", file=log, flush=True)
        if size := re.search(r"KV cache size: ([\d,]+) tokens", line):
            kv_tokens = int(size.group(1).replace(",", ""))
        if line.startswith('{"kv_cache_dtype"'):
            rows.append({**json.loads(line), "kv_tokens": kv_tokens})
        if size or line.startswith(('{"kv_cache_dtype"', "prefill of", "turn ")):
            print(f"{time.perf_counter() - begin:5.0f} s  {line.strip()}", flush=True)
    guard.cancel()
    print(f"{dtype}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s, exit {process.wait()}", flush=True)
    if not rows:
        print("".join(output)[-3000:], flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kv-cache-dtype", default="oscar_int2")
    arguments.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-8b")
    arguments.add_argument(
        "--shapes", type=shape, nargs="+", default=[(100_000, 1), (100_000, 4)], help="CONTEXTxREQUESTS, in order"
    )
    arguments.add_argument("--turns", type=int, default=0, help="users in turns: turns to measure")
    arguments.add_argument("--answer", type=int, default=128, help="users in turns: tokens generated in each")
    arguments.add_argument("--kv-cache-gib", type=float, help="cache size instead of a share of the memory")
    arguments.add_argument("--max-model-len", type=int, default=131_072)
    arguments.add_argument("--max-num-batched-tokens", type=int, default=8192)
    arguments.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    arguments.add_argument("--enforce-eager", action="store_true")
    return arguments


if __name__ == "__main__":
    measure(parser().parse_args())
