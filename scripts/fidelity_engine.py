# SPDX-License-Identifier: Apache-2.0
"""Next-token distributions of whole windows from vLLM, for `eval_fidelity.py`; one engine process per call.

The process computes prompt log-probabilities and keeps the logits behind them (as scripts/quickstart.py does), so that
distributions are complete. ``prefill="invariant"`` makes a position of the window read its history from pages.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
    length = len(windows[0])
    arguments = {
        "dtype": dtype,
        "max_model_len": length + 1,
        "max_num_batched_tokens": length + 1,  # a window is scored in one batch
        "max_num_seqs": 1,
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
        job = {"model": model, "engine": arguments, "first": first, "windows": [window.tolist() for window in windows]}
        Path(folder, "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).resolve()), folder]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{(result.stdout + result.stderr)[-4000:]}\nthe engine failed ({result.returncode})")
        yield [np.load(Path(folder, f"{i}.npy"), mmap_mode="r") for i in range(len(windows))]


def _run(folder: Path) -> None:
    from quickstart import capture_prompt_logits, prompt_logits
    from vllm import LLM, SamplingParams

    job = json.loads((folder / "job.json").read_text())
    llm = LLM(job["model"], **job["engine"])
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
