# SPDX-License-Identifier: Apache-2.0
"""Needles in long texts, for `eval_fidelity.py --retrieval`: can the model still read a fact far back?

A prompt is a stretch of the text with one sentence of the form "The secret number of NAME is 48213." at every depth
asked for; after it the beginnings of those sentences follow in random order, each with its number. A needle is found if
greedy decoding would write its number: teacher-forced, every token of the number must be the most likely one. So one
reading of a prompt scores all depths; one depth alone is the single needle. Names, numbers, order and the stretch of
text come from the seed; every configuration sees the same prompts. The whole prompt is read through the quantized
cache, as in the scores, and a depth whose sentence would not lie in history is refused.
"""

import argparse
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from calib.capture import intercept_attention
from calib.simulate import Segments

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    group = parser.add_argument_group("retrieval")
    group.add_argument("--retrieval", action="store_true", help="needles in the text instead of scores")
    group.add_argument("--lengths", type=_integers, default=[4096], help="tokens of a prompt, commas between (4096)")
    group.add_argument("--depths", type=_integers, default=[10, 30, 50, 70, 90], help="percent (10,30,50,70,90)")
    group.add_argument("--trials", type=int, default=4, help="prompts per length (%(default)s)")
    group.add_argument("--seed", type=int, default=0, help="names, numbers, stretches of text (%(default)s)")


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


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


def found(model: PreTrainedModel, ids: Tensor, needles: list[Needle]) -> list[bool]:
    """For each needle whether greedy decoding writes its answer."""
    first = min(needle.answer[0] for needle in needles) - 1
    positions = torch.arange(first, len(ids) - 1)
    logits = model(ids[None].to(model.device), use_cache=False, logits_to_keep=positions).logits[0]
    right = logits.argmax(-1).cpu() == ids[first + 1 :]
    return [bool(right[start - first - 1 : end - first - 1].all()) for start, end in (x.answer for x in needles)]


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    chosen: dict[str, Any],
    segments: Segments,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per configuration, length and depth.

    Raises:
        SystemExit: the text is too short, or a sentence stands among the exact tokens of its question.

    """
    filler = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(filler) < max(options.lengths):
        raise SystemExit(f"the text has {len(filler)} tokens, a prompt of {max(options.lengths)} needs more")
    depths = sorted(options.depths)
    prompts = {}
    for length in options.lengths:
        generator = random.Random(f"{options.seed} {length}")
        prompts[length] = [
            prompt(tokenizer, filler, length=length, depths=depths, generator=generator) for _ in range(options.trials)
        ]
        for depth, needle in ((d, n) for _, needles in prompts[length] for d, n in zip(depths, needles, strict=True)):
            if needle.sentence[0] < segments.sink or needle.sentence[1] > needle.answer[0] - segments.recent:
                raise SystemExit(f"at depth {depth} % of {length} tokens a sentence is not in history; choose another")
    rows = []
    for length, name in tqdm([(x, y) for x in options.lengths for y in chosen], desc="needles", unit="configuration"):
        with intercept_attention(model, chosen[name].attention(segments)):
            hits = [found(model, *case) for case in prompts[length]]
        for depth, column in zip(depths, zip(*hits, strict=True), strict=True):
            row = {"configuration": name, "length": length, "depth": depth, "needles": len(depths)}
            counts = {"trials": options.trials, "found": sum(column), "seed": options.seed}
            rows.append(row | counts | {"bits": chosen[name].bits})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Found of all trials, by configuration and length; depths in order."""
    lines = [f"{'configuration':24s} {'length':>7s} {'found':>8s}  by depth"]
    for name, length in dict.fromkeys((row["configuration"], row["length"]) for row in rows):
        some = [row for row in rows if row["configuration"] == name and row["length"] == length]
        share = sum(row["found"] for row in some) / sum(row["trials"] for row in some)
        depths = "  ".join(f"{row['depth']} %: {row['found']}/{row['trials']}" for row in some)
        lines.append(f"{name:24s} {length:7d} {share:8.1%}  {depths}")
    return "\n".join(lines)
