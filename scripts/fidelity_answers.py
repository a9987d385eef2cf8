# SPDX-License-Identifier: Apache-2.0
"""Right answers of a quantized cache, question by question against the unquantized model's.

A *case* is a prompt with the right answers in it. An answer is right if greedy decoding would write it: teacher-forced,
every one of its tokens must be the most likely one. So one reading of a prompt scores all its answers; a later question
sees the right answers of the earlier ones.

Questions about one prompt are not independent. Intervals of the paired difference are therefore over prompts; Wilson's
interval and McNemar's test, which are over questions, are too narrow by what the questions of a prompt share.

Right or wrong is a coarse measure: with 100 questions ten points may be chance. The *loss* of an answer, its negative
log-probability in nats, teacher-forced, moves with every error of the cache; its mean change is told by fewer prompts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from calib.capture import intercept_attention
from calib.simulate import Segments

FIELDS = ("model", "configuration", "task", "text", "length", "seed", "sink", "recent", "bits", "prompts", "asked",
          "right", "right_low", "right_high", "exact_right", "lost", "gained", "mcnemar", "difference",
          "difference_low", "difference_high", "commit", "versions", "command", "loss_change",
          "loss_change_stderr")  # fmt: skip

NORMAL_95 = 1.959964
"""97.5 % quantile of the standard normal distribution: 95 % intervals have this half-width in standard errors."""


@dataclass(frozen=True)
class Case:
    """A prompt and its questions.

    Attributes:
        ids: [T] token ids, the right answers included.
        answers: where they stand, token indices [start, end).

    """

    ids: Tensor
    answers: list[tuple[int, int]]


class Answer(NamedTuple):
    """How a model answers a question.

    Attributes:
        right: greedy decoding writes the right answer.
        loss: negative log-probability of the right answer, nats; nan where it was not looked at.

    """

    right: bool
    loss: float


def answered(model: PreTrainedModel, cases: list[Case]) -> list[list[Answer]]:
    """The model's answers of each case; the cases are read in one batch.

    Args:
        model: sends its attention where it should.
        cases: of equal length.

    """
    first = min(start for case in cases for start, _ in case.answers) - 1
    ids = torch.stack([case.ids for case in cases]).to(model.device)
    positions = torch.arange(first, ids.shape[1] - 1, device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=positions).logits

    def answer(row: int, start: int, end: int) -> Answer:
        wanted, likely = ids[row, start:end], logits[row, start - 1 - first : end - 1 - first].float()
        loss = cross_entropy(likely, wanted, reduction="sum")
        return Answer(bool((likely.argmax(-1) == wanted).all()), float(loss))

    return [[answer(row, *span) for span in case.answers] for row, case in enumerate(cases)]


def score(
    model: PreTrainedModel, tasks: dict[Any, list[Case]], chosen: dict[str, Any], segments: Segments, batch: int
) -> dict[Any, dict[str, list[list[Answer]]]]:
    """Task -> configuration -> `answered` of every case; under the name "exact" the unquantized model's.

    Args:
        model: a transformers model.
        tasks: cases of equal length by task.
        chosen: `Configuration` by name.
        segments: the BF16 windows.
        batch: cases read at a time.

    """
    work = [(task, name) for task in tasks for name in ("exact", *chosen)]
    results: dict[Any, dict[str, list[list[Answer]]]] = {task: {} for task in tasks}
    for task, name in tqdm(work, desc="answers", unit="configuration"):
        if name != "exact" and chosen[name].store is None:
            results[task][name] = results[task]["exact"]
            continue
        handler: Callable = (lambda call: call.attend()) if name == "exact" else chosen[name].attention(segments)
        cases = tasks[task]
        with intercept_attention(model, handler):
            parts = [answered(model, cases[i : i + batch]) for i in range(0, len(cases), batch)]
        results[task][name] = [case for part in parts for case in part]
    return results


# ------------------------------------------------------------------------------------------------ statistics


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a probability (Wilson 1927)."""
    z2 = NORMAL_95**2
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = NORMAL_95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided probability that ``lost`` and ``gained`` answers differ so much by chance (McNemar 1947)."""
    n = lost + gained
    tail = sum(math.comb(n, k) for k in range(min(lost, gained) + 1)) / 2**n
    return min(1.0, 2 * tail)


def compare(exact: list[list[Answer]], actual: list[list[Answer]]) -> dict[str, Any]:
    """A configuration's answers against the exact model's on the same cases, by the names of `FIELDS`.

    The difference is actual minus exact in the share of right answers, the loss's change likewise the mean over the
    questions. The 95 % interval of the one and the standard error of the other are from the spread over the prompts,
    each weighted by its questions (a ratio estimator), and nan with a single prompt.
    """
    pairs = [pair for a, b in zip(exact, actual, strict=True) for pair in zip(a, b, strict=True)]
    outcomes = [(a.right, b.right) for a, b in pairs]
    found, found_exact = sum(b for _, b in outcomes), sum(a for a, _ in outcomes)
    lost, gained = outcomes.count((True, False)), outcomes.count((False, True))
    asked, prompts = len(pairs), len(exact)

    def change(name: str) -> tuple[float, float]:
        """(mean over the questions of actual minus exact, its standard error)."""
        sums = [sum(getattr(y, name) - getattr(x, name) for x, y in zip(a, b, strict=True))
                for a, b in zip(exact, actual, strict=True)]  # fmt: skip
        mean = sum(sums) / asked
        if prompts == 1:
            return mean, math.nan
        residuals = [total - mean * len(a) for total, a in zip(sums, exact, strict=True)]
        return mean, math.sqrt(sum(r * r for r in residuals) * prompts / (prompts - 1)) / asked

    difference, spread = change("right")
    loss_change, loss_stderr = change("loss")
    low, high = wilson(found, asked)
    return {
        "prompts": prompts, "asked": asked, "right": found, "right_low": low, "right_high": high,
        "exact_right": found_exact, "lost": lost, "gained": gained, "mcnemar": mcnemar(lost, gained),
        "difference": difference, "difference_low": difference - NORMAL_95 * spread,
        "difference_high": difference + NORMAL_95 * spread,
        "loss_change": loss_change, "loss_change_stderr": loss_stderr,
    }  # fmt: skip


def rows(
    results: dict[Any, dict[str, list[list[Answer]]]], describe: Callable[[Any], dict[str, Any]], chosen: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per task and configuration; ``describe``: task -> its columns."""
    return [
        describe(task) | {"configuration": name, "bits": chosen[name].bits} | compare(scored["exact"], scored[name])
        for task, scored in results.items()
        for name in chosen
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'task':12s} {'length':>6s} {'configuration':16s} {'right':>9s} {'95 %':>13s} {'to exact':>9s} "
             f"{'95 % (prompts)':>17s} {'lost':>5s} {'gained':>6s} {'McNemar':>8s} {'loss':>8s} "
             f"{'± s.e.':>7s}"]  # fmt: skip
    for row in rows:
        lines.append(
            f"{row['task']:12s} {row['length']:6d} {row['configuration']:16s} {row['right']:4d}/{row['asked']:4d} "
            f"{row['right_low']:6.1%}-{row['right_high']:6.1%} {100 * row['difference']:+8.1f}p "
            f"{100 * row['difference_low']:+7.1f} to {100 * row['difference_high']:+6.1f} "
            f"{row['lost']:5d} {row['gained']:6d} {row['mcnemar']:8.3g} "
            f"{row['loss_change']:+8.4f} {row['loss_change_stderr']:7.4f}"
        )
    return "\n".join(lines)
