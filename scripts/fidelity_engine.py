# SPDX-License-Identifier: Apache-2.0
"""Next-token distributions, answers and continuations from vLLM, for `eval_fidelity.py` and `sweep_text.py`.

One engine process per call. For distributions the process computes prompt log-probabilities and keeps the logits behind
them (as scripts/quickstart.py does), so that they are complete; ``prefill="invariant"`` makes a position of the window
read its history from pages.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_answers import Case
from torch import Tensor


@contextmanager
def scored(
    model: str, windows: list[Tensor], first: int, dtype: str, engine: dict[str, Any]
) -> Iterator[list[np.ndarray]]:
    """Memory-mapped log-probabilities [n, vocabulary] float32 of the tokens after positions first, first + 1, ….

    Args:
        model: folder or hub id.
        windows: token ids [T], each of one length.
        first: first position wanted.
        dtype: of the model.
        engine: further arguments of ``vllm.LLM``.

    Raises:
        SystemExit: the engine failed; the end of its log is the message.

    """
    job = {"first": first, "windows": [window.tolist() for window in windows]}
    with _engine(model, len(windows[0]) + 1, dtype, {"max_num_seqs": 1, **engine}, job) as folder:
        yield [np.load(folder / f"{i}.npy", mmap_mode="c") for i in range(len(windows))]


@dataclass(frozen=True)
class Continuations:
    """What an engine makes of some prompts.

    Attributes:
        tokens: its own greedy continuations.
        prompt_nats: mean negative log-probability of each prompt's tokens, its first token left out.
        nats: that of each continuation behind its prompt: the engine's own ones, then each set that was given.

    """

    tokens: list[list[int]]
    prompt_nats: list[float]
    nats: list[list[float]]


def continued(
    model: str,
    prompts: list[list[int]],
    new_tokens: int,
    dtype: str,
    engine: dict[str, Any],
    judged: list[list[list[int]]] | None = None,
) -> Continuations:
    """Greedy continuations of ``prompts``; with ``judged``, sets of other continuations, likelihoods too.

    Args:
        model: folder or hub id.
        prompts: token ids.
        new_tokens: at most so many; fewer where the model ends its text.
        dtype: of the model.
        engine: further arguments of ``vllm.LLM``.
        judged: continuations of every prompt, by other engines.

    Raises:
        SystemExit: the engine failed; the end of its log is the message.

    """
    longest = max(map(len, prompts)) + new_tokens + 1
    job = {"prompts": prompts, "new_tokens": new_tokens, "judged": judged}
    with _engine(model, longest, dtype, {"max_num_seqs": 8, **engine}, job) as folder:
        return Continuations(**json.loads((folder / "result.json").read_text()))


def answers(
    model: str, cases: list[Case], dtype: str, engine: dict[str, Any], *, prefix_hits: bool
) -> list[list[bool]]:
    """For each answer of each case whether greedy decoding writes it behind all that stands before it.

    Args:
        model: folder or hub id.
        cases: prompts with their answers, of any lengths.
        dtype: of the model.
        engine: further arguments of ``vllm.LLM``.
        prefix_hits: read each text before its questions are asked, so that these find it in the prefix cache; else
            each question is a prompt of its own.

    Raises:
        SystemExit: the engine failed, or a question did not find its text; the end of its log is the message.

    """
    questions = [
        [(case.ids[:start].tolist(), case.ids[start:end].tolist()) for start, end in case.answers] for case in cases
    ]
    length = max(len(case.ids) for case in cases) + 1
    options = {"max_num_seqs": 8, "enable_prefix_caching": prefix_hits, **engine}
    with _engine(model, length, dtype, options, {"questions": questions, "prefix_hits": prefix_hits}) as folder:
        return json.loads((folder / "result.json").read_text())


@contextmanager
def _engine(model: str, length: int, dtype: str, engine: dict[str, Any], job: dict[str, Any]) -> Iterator[Path]:
    """Run a job for texts of up to ``length`` tokens in a process of its own; the folder holds its results."""
    arguments = {
        "dtype": dtype,
        "max_model_len": length,
        "max_num_batched_tokens": length,  # a text is read in one batch
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **engine,
    }
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model lives in that process, so that its logits can be kept
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # only the CPU build reads it
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.json").write_text(json.dumps({"model": model, "engine": arguments, **job}))
        command = [sys.executable, str(Path(__file__).resolve()), folder]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{(result.stdout + result.stderr)[-4000:]}\nthe engine failed ({result.returncode})")
        yield Path(folder)


def _run(folder: Path) -> None:
    from vllm import LLM

    job = json.loads((folder / "job.json").read_text())
    llm = LLM(job["model"], **job["engine"])
    if "prompts" in job:
        (folder / "result.json").write_text(json.dumps(_continue(llm, **job)))
    elif "questions" in job:
        (folder / "result.json").write_text(json.dumps(_answer(llm, job["questions"], job["prefix_hits"])))
    else:
        _score(llm, job, folder)


def _continue(
    llm: Any, *, prompts: list[list[int]], new_tokens: int, judged: list[list[list[int]]] | None, **_: Any
) -> dict[str, Any]:
    """The fields of `Continuations`."""
    from vllm import SamplingParams

    def run(texts: list[list[int]], **options: Any) -> list[Any]:
        params = SamplingParams(temperature=0.0, detokenize=False, **options)
        return llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)

    tokens = [list(output.outputs[0].token_ids) for output in run(prompts, max_tokens=new_tokens)]
    prompt_nats, nats = [], []
    for continuations in [] if judged is None else [tokens, *judged]:
        texts = [prompt + new for prompt, new in zip(prompts, continuations, strict=True)]
        scored = run(texts, max_tokens=1, prompt_logprobs=0)
        losses = [
            [-entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
            for output, text in zip(scored, texts, strict=True)
        ]
        lengths = [len(prompt) - 1 for prompt in prompts]
        nats.append([float(np.mean(loss[n:])) for loss, n in zip(losses, lengths, strict=True)])
        prompt_nats = [float(np.mean(loss[:n])) for loss, n in zip(losses, lengths, strict=True)]
    return {"tokens": tokens, "prompt_nats": prompt_nats, "nats": nats}


def _answer(llm: Any, questions: list[list[tuple[list[int], list[int]]]], prefix_hits: bool) -> list[list[bool]]:
    """`answers`, one text after the other, so that none is evicted before it was asked about."""
    from vllm import SamplingParams

    right = []
    for asked in questions:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        params = [SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True, detokenize=False)
                  for _, answer in asked]  # fmt: skip
        if prefix_hits:
            llm.generate(min(prompts, key=lambda prompt: len(prompt["prompt_token_ids"])), params[0], use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if prefix_hits and 2 * (output.num_cached_tokens or 0) < len(output.prompt_token_ids):
                found = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)}"
                raise SystemExit(f"only {found} tokens of a question were in the prefix cache")
        right.append([list(output.outputs[0].token_ids) == answer
                      for output, (_, answer) in zip(outputs, asked, strict=True)])  # fmt: skip
    return right


def _score(llm: Any, job: dict[str, Any], folder: Path) -> None:
    """Write the log-probabilities of each window."""
    from quickstart import capture_prompt_logits, prompt_logits
    from vllm import SamplingParams

    batches: list[Tensor] = []
    llm.apply_model(lambda model: capture_prompt_logits(model, batches))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    for i, window in enumerate(job["windows"]):
        llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        logits = prompt_logits(batches, len(window))
        batches.clear()
        np.save(folder / f"{i}.npy", logits[job["first"] :].float().log_softmax(-1).cpu().numpy())


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
