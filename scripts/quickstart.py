# SPDX-License-Identifier: Apache-2.0
"""One long prompt through vLLM with a BF16 and with an ``oscar_int2`` KV cache, on a real model.

    bash scripts/quickstart.sh            # makes the environment first, then runs this file

Steps: fetch the model (scripts/fetch_model.py), calibrate it (``python -m calib``; skipped when the artifact is
there), run each cache in an engine process of its own, compare. What is compared:

* the greedy continuations of the prompt, token by token;
* KL(BF16 || oscar_int2) of the next-token distribution over the whole vocabulary, teacher-forced: both engines
  read the same text (the prompt and BF16's continuation) in one prefill, and the distributions at every position
  that has history in INT2 pages are compared. For this the oscar engine runs with ``prefill="invariant"``, in
  which a prefill position reads its history from pages exactly as a decoding step at that position would.
"""

import argparse
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from fetch_model import MODELS, fetch_model

TOPICS = ("assignment", "typesmapping", "string-methods", "class", "compound")
DEFAULT_CPU_CACHE_GIB = "1"
# Lines of the engine's log worth showing: vLLM's capacity line, the plugin's start-up summary and its warning of
# contexts longer than the artifact was calibrated for.
SHOWN_LOG_LINES = re.compile(r"(?:CPU|GPU) KV cache size: .*|OSCAR KV cache: .*|--max-model-len \d+: the artifact .*")


# ---------------------------------------------------------------------------------------- one engine process


def capture_prompt_logits(model, sink: list) -> None:
    """Make ``model`` (the engine's own, in this process) also append every batch of logits to ``sink``."""
    compute_logits = model.compute_logits

    def compute_and_keep(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        sink.append(logits)
        return logits

    model.compute_logits = compute_and_keep


def prompt_logits(batches: list, tokens: int):
    """Logits [tokens - 1, vocabulary] of all but the last token of the one prompt that ``batches`` come from.

    A prompt's own logits are computed in one batch or in several, with or without the last token's; the batch of one
    row is the token to sample.
    """
    import torch

    kept = [batch for batch in batches if batch.shape[0] > 1]
    if sum(map(len, kept)) not in (tokens - 1, tokens):
        raise SystemExit(f"{[tuple(batch.shape) for batch in batches]} are not the logits of {tokens} tokens")
    return torch.cat(kept)[: tokens - 1]


def run_engine(job: dict, result_path: Path) -> None:
    """Generate and score as ``job`` says; write token ids as JSON, log-probabilities as ``.npy`` beside it.

    ``generate_from`` is a prompt to continue or None; ``score`` are token ids whose next-token distributions are
    wanted, ``"continued"`` for the prompt with its continuation, or None.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], **job["engine"])
    result: dict = {}
    if job["generate_from"]:
        params = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
        started = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": job["generate_from"]}], params, use_tqdm=False)[0].outputs[0]
        result["seconds"] = time.perf_counter() - started
        result["token_ids"], result["text"] = list(output.token_ids), output.text
    if job["score"]:
        text = job["generate_from"] + result["token_ids"] if job["score"] == "continued" else job["score"]
        batches: list = []
        llm.apply_model(lambda model: capture_prompt_logits(model, batches))
        # They are computed only when prompt logprobs are asked for.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
        logits = prompt_logits(batches, len(text))
        np.save(result_path.with_suffix(".npy"), logits.float().log_softmax(-1).cpu().numpy())
    result_path.write_text(json.dumps(result))


# ---------------------------------------------------------------------------------------------- the parent


def start_engine(job: dict, log_path: Path) -> tuple[dict, np.ndarray | None, list[str]]:
    """Run ``job`` in a process of its own. Returns its result, log-probabilities if scored, and log lines to show."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model lives in the child, so that its logits can be kept
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": DEFAULT_CPU_CACHE_GIB,  # only the CPU build reads it
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as work:
        job_path, result_path = Path(work) / "job.json", Path(work) / "result.json"
        job_path.write_text(json.dumps(job))
        with open(log_path, "w") as log:
            status = subprocess.run(
                [sys.executable, __file__, "--engine-job", str(job_path), str(result_path)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        log_text = log_path.read_text()
        if status != 0:
            raise SystemExit(f"{log_text[-4000:]}\nthe engine failed with status {status}; its log: {log_path}")
        lines = list(dict.fromkeys(SHOWN_LOG_LINES.findall(log_text)))
        scores = result_path.with_suffix(".npy")
        return json.loads(result_path.read_text()), np.load(scores) if scores.exists() else None, lines


def calibrate(model: Path, artifact: Path, arguments: list[str]) -> None:
    """Make the artifact of ``model`` unless it exists; calibration shows its own progress bar."""
    if (artifact / "oscar_config.json").exists():
        print(f"calibration artifact: {artifact} (made earlier)")
        return
    command = [sys.executable, "-m", "calib", "--model", str(model), "--output-dir", str(artifact), *arguments]
    print("$", " ".join(command), flush=True)
    if subprocess.run(command, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode:
        raise SystemExit("calibration failed, see above; --calib-args are its arguments")


def long_prompt(model: Path, tokens: int) -> list[int]:
    """The first ``tokens`` tokens of some pages of Python's manual, which calibration has not seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in TOPICS)
    token_ids = tokenizer(text).input_ids[:tokens]
    if len(token_ids) < tokens:
        raise SystemExit(f"the bundled prompt has {len(token_ids)} tokens; --prompt-tokens is {tokens}")
    return token_ids


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) in nats at every row of two [positions, vocabulary] arrays of log-probabilities."""
    rows = range(reference.shape[0])
    return np.array([np.sum(np.exp(p) * (p - q)) for p, q in ((reference[i], other[i]) for i in rows)], np.float64)


def json_object(text: str) -> dict:
    """Of an option that holds a JSON object.

    Raises:
        argparse.ArgumentTypeError: it is none.

    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; use one such as \'{{"dtype": "float16"}}\'')
    return value


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--model", default="smollm2", choices=MODELS, help="packaged model (default: smollm2)")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="length of the prompt (1500)")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens to generate (64)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="what capacity is computed for (8192)")
    parser.add_argument("--calib-args", default="", help="further arguments of `python -m calib`, in one string")
    parser.add_argument("--engine-options", type=json_object, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--engine-job", nargs=2, type=Path, metavar=("JOB", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine_job:
        run_engine(json.loads(options.engine_job[0].read_text()), options.engine_job[1])
        return
    # Scoring reads the prompt with its continuation, and samples one token behind them.
    if min(options.prompt_tokens, options.new_tokens) < 1 or (
        options.prompt_tokens + options.new_tokens + 1 > options.max_model_len
    ):
        parser.error(
            f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens} do not fit into "
            f"--max-model-len {options.max_model_len}; use at least 1 of each, and together at most "
            f"{options.max_model_len - 1}"
        )

    started = time.perf_counter()
    model = fetch_model(options.model)
    print(f"model: {model}")
    # vLLM with the plugin looks for a model's artifact here, so no option has to name it.
    artifact = model / "oscar_int2"
    calibrate(model, artifact, options.calib_args.split())
    segments = json.loads((artifact / "oscar_config.json").read_text())["segments"]
    exact_tokens = segments["sink"] + segments["recent"]

    prompt = long_prompt(model, options.prompt_tokens)
    if len(prompt) <= exact_tokens:
        raise SystemExit(f"--prompt-tokens must exceed {exact_tokens}, the tokens that stay in BF16")
    logs = Path(tempfile.mkdtemp(prefix="oscar-quickstart-"))
    engine = {
        "dtype": "bfloat16",
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_model_len,  # a prompt is scored in one batch
        "max_num_seqs": 8,
        "enforce_eager": not on_gpu(),  # compiling the model on a CPU takes longer than this whole run
        **options.engine_options,
    }
    job = {"model": str(model), "new_tokens": options.new_tokens, "generate_from": prompt, "score": None}
    scored = {"engine": engine, "score": "continued"}

    print(f"\nprompt: {len(prompt)} tokens of Python's manual. Engine logs: {logs}", flush=True)
    bf16, bf16_logprobs, bf16_lines = start_engine(job | scored, logs / "bf16.log")
    oscar_engine = engine | {"kv_cache_dtype": "oscar_int2"}
    oscar, _, oscar_lines = start_engine(job | {"engine": oscar_engine}, logs / "oscar_int2.log")
    scoring = {
        "engine": oscar_engine | {"additional_config": {"oscar": {"prefill": "invariant"}}},
        "generate_from": None,
        "score": prompt + bf16["token_ids"],
    }
    _, oscar_logprobs, _ = start_engine(job | scoring, logs / "oscar_int2-scoring.log")

    for name, result in (("BF16", bf16), ("oscar_int2", oscar)):
        print(f"\n--- {name} ({options.new_tokens} tokens in {result['seconds']:.1f} s, prefill included)")
        print(result["text"])
    assert bf16_logprobs is not None  # both jobs asked for scores
    assert oscar_logprobs is not None
    same = [a == b for a, b in zip(bf16["token_ids"], oscar["token_ids"], strict=True)]
    first_difference = same.index(False) if False in same else len(same)
    kl = divergence(bf16_logprobs, oscar_logprobs)
    reads_pages = kl[exact_tokens:]
    top = bf16_logprobs[exact_tokens:].argmax(-1) == oscar_logprobs[exact_tokens:].argmax(-1)
    print("\n--- comparison")
    print(f"continuations: {sum(same)}/{len(same)} tokens equal, the first {first_difference} without a difference")
    print(
        f"teacher-forced KL(BF16 || oscar_int2): mean {reads_pages.mean():.4f} nats, median "
        f"{np.median(reads_pages):.4f}, over the {len(reads_pages)} positions with history in INT2 pages "
        f"(most likely token equal at {100 * top.mean():.1f} %)"
    )
    print("\n--- capacity, in vLLM's words")
    for name, lines in (("BF16", bf16_lines), ("oscar_int2", oscar_lines)):
        for line in lines:
            print(f"{name:11}{line}")
    flags = "" if on_gpu() else " --enforce-eager"
    prefix = "" if on_gpu() else "VLLM_CPU_KVCACHE_SPACE=4 "
    print("\n--- serve it")
    print(f"source {os.environ.get('VIRTUAL_ENV', '.venv')}/bin/activate")
    print(f"{prefix}vllm serve {model} --kv-cache-dtype oscar_int2 --max-model-len {options.max_model_len}{flags}")
    print(f"\n{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
