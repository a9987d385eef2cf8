# SPDX-License-Identifier: Apache-2.0
"""Needles in long texts, for `eval_fidelity.py --retrieval`: can the model still read a fact far back?

A prompt is a stretch of the text with one sentence of the form "The secret number of NAME is 48213." at every depth
asked for; after it the beginnings of those sentences follow in random order, each with its number. Which numbers the
model writes is what fidelity_answers.py says. One depth alone is the single needle. Names, numbers, order and the
stretch of text come from the seed; every configuration sees the same prompts. In transformers the whole prompt is read
through the quantized cache, as in the scores; in vLLM as ``--prefill`` and ``--prefix-hits`` say. A depth whose
sentence would not lie in history is refused.
"""

import argparse
import math
import random
from dataclasses import dataclass
from typing import Any

import fidelity_answers
import fidelity_engine
import torch
from fidelity_answers import Answer, Case
from torch import Tensor
from transformers import PreTrainedModel

from calib.simulate import Segments
from oscar_vllm.errors import OscarConfigError

FIELDS = ("model", "configuration", "text", "length", "depth", "needles", "seed", "sink", "recent", "trials", "found",
          "bits", "commit", "versions", "command")  # fmt: skip

NAMES = ("Lisbon", "Oslo", "Quito", "Dakar", "Hanoi", "Perth", "Sofia", "Tunis", "Riga", "Lima", "Kyoto", "Bergen")
SENTENCE = "The secret number of {name} is {number}."
INTRODUCTION = "\n\nThe secret numbers in the text above are asked for."
QUESTION = " The secret number of {name} is"


@dataclass(frozen=True)
class Needle:
    """Where a fact and its number stand in a prompt, token indices; ``sentence`` and ``answer``: [start, end)."""

    sentence: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class Haystack:
    """What a prompt was made from, and its needles in the order of the depths."""

    text: str
    seed: int
    needles: list[Needle]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    group = parser.add_argument_group("retrieval")
    group.add_argument("--retrieval", action="store_true", help="needles in the text instead of scores")
    group.add_argument("--lengths", type=integers, default=[4096], help="tokens of a prompt, commas between (4096)")
    group.add_argument("--depths", type=integers, default=[10, 30, 50, 70, 90], help="percent (10,30,50,70,90)")
    group.add_argument(
        "--prefill",
        default="invariant",
        choices=("invariant", "exact"),
        help="how oscar_int2 reads a prompt, with --engine vllm; exact is what is served by default (%(default)s)",
    )
    group.add_argument(
        "--prefix-hits", action="store_true", help="with --engine vllm: ask when the text is in the prefix cache"
    )


def integers(text: str) -> list[int]:
    """Of an option like ``1,2,3``."""
    return [int(word) for word in text.split(",")]


def check_options(options: argparse.Namespace) -> None:
    """Refuse lengths and depths that no prompt can be made of.

    Raises:
        OscarConfigError: a length or depth is out of range, or there are more depths than names.

    """
    if len(options.depths) > len(NAMES):
        raise OscarConfigError(f"--depths has {len(options.depths)} values; use at most {len(NAMES)}")
    for depth in options.depths:
        if not 0 <= depth <= 100:
            raise OscarConfigError(f"--depths {depth} is out of range; use percents from 0 to 100")
    for length in options.lengths:
        if length < 1:
            raise OscarConfigError(f"--lengths {length} is out of range; use tokens of a prompt, such as 4096")


def prompt(
    tokenizer: Any, text: list[int], *, length: int, depths: list[int], generator: random.Random
) -> tuple[Tensor, list[Needle]]:
    """(token ids [length], the needles in the order of ``depths``).

    Args:
        tokenizer: the model's.
        text: tokens of the filler, at least ``length``.
        length: tokens, questions and answers included.
        depths: percent of the filler before each sentence, at most as many as `NAMES`, ascending.
        generator: source of everything random.

    Raises:
        SystemExit: sentences and questions leave no room for the filler.

    """

    def tokens(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False).input_ids

    facts, questions = [], []
    for name in generator.sample(NAMES, len(depths)):
        number = str(generator.randrange(10_000, 100_000))
        facts.append(tokens(f"\n\n{SENTENCE.format(name=name, number=number)}\n\n"))
        question = tokens(QUESTION.format(name=name))
        questions.append((question, tokens(QUESTION.format(name=name) + f" {number}")[len(question) :]))
    introduction, stop = tokens(INTRODUCTION), tokens(".")
    asked = sum(len(question) + len(answer) + len(stop) for question, answer in questions) + len(introduction)
    room = length - asked - sum(len(fact) for fact in facts)
    if room < 1:
        raise SystemExit(f"{length} tokens are too few for {len(depths)} sentences and questions; raise --lengths")
    start = generator.randrange(len(text) - room + 1)
    ids: list[int] = []
    sentences = []
    at = 0
    for depth, fact in zip(depths, facts, strict=True):
        until = depth * room // 100
        ids += text[start + at : start + until] + fact
        sentences.append((len(ids) - len(fact), len(ids)))
        at = until
    ids += text[start + at : start + room] + introduction
    needles = {}
    for i in generator.sample(range(len(depths)), len(depths)):
        question, answer = questions[i]
        ids += question + answer + stop
        end = len(ids) - len(stop)
        needles[i] = Needle(sentences[i], (end - len(answer), end))
    return torch.tensor(ids), [needles[i] for i in range(len(depths))]


def cases(
    tokenizer: Any, texts: dict[str, str], segments: Segments, options: argparse.Namespace
) -> dict[int, list[tuple[Case, Haystack]]]:
    """Length -> prompts: ``options.trials`` for each text and seed.

    Raises:
        SystemExit: a text is too short, or a sentence stands among the exact tokens of its question.

    """
    depths = sorted(options.depths)
    fillers = {name: tokenizer(text, add_special_tokens=False, verbose=False).input_ids for name, text in texts.items()}
    for filler in fillers.values():
        if len(filler) < max(options.lengths):
            raise SystemExit(f"the text has {len(filler)} tokens, a prompt of {max(options.lengths)} needs more")
    made: dict[int, list[tuple[Case, Haystack]]] = {length: [] for length in options.lengths}
    for length, seed in ((x, y) for x in options.lengths for y in options.seeds):
        generator = random.Random(f"{seed} {length}")
        for name in [name for name in texts for _ in range(options.trials)]:
            ids, needles = prompt(tokenizer, fillers[name], length=length, depths=depths, generator=generator)
            for depth, needle in zip(depths, needles, strict=True):
                if needle.sentence[0] < segments.sink or needle.sentence[1] > needle.answer[0] - segments.recent:
                    raise SystemExit(
                        f"at depth {depth} % of {length} tokens a sentence is not in history; choose another"
                    )
            made[length].append((Case(ids, [needle.answer for needle in needles]), Haystack(name, seed, needles)))
    return made


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: dict[str, str],
    chosen: dict[str, Any],
    segments: Segments,
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(one row per configuration, length, text, seed and depth; one per configuration and length against exact).

    Raises:
        SystemExit: see `cases`.

    """
    made = cases(tokenizer, texts, segments, options)
    tasks = {length: [case for case, _ in pairs] for length, pairs in made.items()}
    results = fidelity_answers.score(model, tasks, chosen, segments, options.batch)
    return _rows(made, results, texts, chosen, options, "retrieval")


def evaluate_engine(
    tokenizer: Any, texts: dict[str, str], chosen: dict[str, Any], segments: Segments, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same rows from what vLLM writes greedily behind each question; the exact model is vLLM's own.

    Raises:
        SystemExit: see `cases` and `fidelity_engine.answers`.

    """
    made = cases(tokenizer, texts, segments, options)
    asked = [case for pairs in made.values() for case, _ in pairs]

    def answers_of(engine: dict[str, Any]) -> dict[int, list[list[Answer]]]:
        arguments = options.engine_options | engine
        written = iter(
            fidelity_engine.answers(options.model, asked, options.dtype, arguments, prefix_hits=options.prefix_hits)
        )
        return {
            length: [[Answer(right, math.nan) for right in next(written)] for _ in pairs]
            for length, pairs in made.items()
        }

    answers = {"exact": answers_of({})}
    for name, configuration in chosen.items():
        engine = configuration.served(prefill=options.prefill)
        answers[name] = answers_of(engine) if engine else answers["exact"]
    results = {length: {name: found[length] for name, found in answers.items()} for length in made}
    task = f"retrieval {options.prefill}{' hits' if options.prefix_hits else ''}"
    return _rows(made, results, texts, chosen, options, task)


def _rows(
    made: dict[int, list[tuple[Case, Haystack]]],
    results: dict[int, dict[str, list[list[Answer]]]],
    texts: dict[str, str],
    chosen: dict[str, Any],
    options: argparse.Namespace,
    task: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    depths = sorted(options.depths)
    by_depth = []
    for length, name in ((x, y) for x in results for y in chosen):
        hits = results[length][name]
        for text, seed in dict.fromkeys((haystack.text, haystack.seed) for _, haystack in made[length]):
            same = [hit for hit, (_, haystack) in zip(hits, made[length], strict=True)
                    if (haystack.text, haystack.seed) == (text, seed)]  # fmt: skip
            for depth, column in zip(depths, zip(*same, strict=True), strict=True):
                row = {"configuration": name, "text": text, "length": length, "depth": depth, "seed": seed}
                counts = {"needles": len(depths), "trials": len(column), "found": sum(a.right for a in column)}
                by_depth.append(row | counts | {"bits": chosen[name].bits})
    seeds = " ".join(map(str, options.seeds))
    described = {"task": task, "text": " ".join(texts), "seed": seeds}
    return by_depth, fidelity_answers.rows(results, lambda length: described | {"length": length}, chosen)


def table(rows: list[dict[str, Any]]) -> str:
    """Found of all trials, by configuration and length; depths in order."""
    lines = [f"{'configuration':24s} {'length':>7s} {'found':>8s}  by depth"]
    for name, length in dict.fromkeys((row["configuration"], row["length"]) for row in rows):
        some = [row for row in rows if row["configuration"] == name and row["length"] == length]
        counts: dict[int, tuple[int, int]] = {}
        for row in some:
            found, trials = counts.get(row["depth"], (0, 0))
            counts[row["depth"]] = (found + row["found"], trials + row["trials"])
        share = sum(found for found, _ in counts.values()) / sum(trials for _, trials in counts.values())
        depths = "  ".join(f"{depth} %: {found}/{trials}" for depth, (found, trials) in counts.items())
        lines.append(f"{name:24s} {length:7d} {share:8.1%}  {depths}")
    return "\n".join(lines)
