# SPDX-License-Identifier: Apache-2.0
"""Needles in long texts, for `eval_fidelity.py --retrieval`: can the model still read one fact far back?

A prompt is a stretch of the text with sentences of the form "The secret number of NAME is 48213." put in at given
depths, and ends with the beginning of one of those sentences. The answer is found if greedy decoding would write the
number: teacher-forced, every token of the number must be the most likely one. Names, numbers and the stretch of text
come from the seed; every configuration sees the same prompts. The whole prompt is read through the quantized cache,
as in the scores.
"""

import argparse
import random
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
QUESTION = "\n\nOne of the secret numbers in the text above is asked for. The secret number of {name} is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    group = parser.add_argument_group("retrieval")
    group.add_argument("--retrieval", action="store_true", help="needles in the text instead of scores")
    group.add_argument("--lengths", type=_integers, default=[4096], help="tokens of a prompt, commas between (4096)")
    group.add_argument("--depths", type=_integers, default=[10, 30, 50, 70, 90], help="percent (10,30,50,70,90)")
    group.add_argument("--needles", type=int, default=1, help="sentences in the text; one is asked for (%(default)s)")
    group.add_argument("--trials", type=int, default=4, help="prompts per length and depth (%(default)s)")
    group.add_argument("--seed", type=int, default=0, help="names, numbers, stretches of text (%(default)s)")


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def prompt(
    tokenizer: Any, text: list[int], *, length: int, depth: int, needles: int, generator: random.Random
) -> tuple[Tensor, int]:
    """(token ids [length + tokens of the answer], tokens of the answer).

    Args:
        tokenizer: the model's.
        text: tokens of the filler, at least ``length``.
        length: tokens before the answer.
        depth: percent of the prompt before the needle that is asked for; the others stand at random places.
        needles: sentences, at most `NAMES`.
        generator: source of everything random.

    """

    def tokens(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False).input_ids

    names = generator.sample(NAMES, needles)
    numbers = [str(generator.randrange(10_000, 100_000)) for _ in names]
    places = [depth / 100, *(generator.uniform(0.05, 0.95) for _ in names[1:])]
    question = tokens(QUESTION.format(name=names[0]))
    answer = tokens(QUESTION.format(name=names[0]) + f" {numbers[0]}")[len(question) :]
    facts = [tokens(f"\n\n{SENTENCE.format(name=a, number=b)}\n\n") for a, b in zip(names, numbers, strict=True)]
    room = length - len(question) - sum(len(fact) for fact in facts)
    start = generator.randrange(len(text) - room + 1)
    ids: list[int] = []
    at = 0
    for place, fact in sorted(zip(places, facts, strict=True)):
        until = int(place * room)
        ids += text[start + at : start + until] + fact
        at = until
    ids += text[start + at : start + room] + question
    return torch.tensor(ids + answer), len(answer)


def found(model: PreTrainedModel, ids: Tensor, answer: int) -> bool:
    """Whether greedy decoding writes the last ``answer`` tokens of ``ids``."""
    positions = torch.arange(len(ids) - answer - 1, len(ids) - 1)
    logits = model(ids[None].to(model.device), use_cache=False, logits_to_keep=positions).logits[0]
    return bool((logits.argmax(-1).cpu() == ids[-answer:]).all())


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    chosen: dict[str, Any],
    segments: Segments,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per configuration, length and depth."""
    filler = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(filler) < max(options.lengths):
        raise SystemExit(f"the text has {len(filler)} tokens, a prompt of {max(options.lengths)} needs more")
    rows = []
    cases = [(length, depth) for length in options.lengths for depth in options.depths]
    for length, depth in tqdm(cases, desc="needles", unit="depth"):
        generator = random.Random(f"{options.seed} {length} {depth}")
        shape = {"length": length, "depth": depth, "needles": options.needles}
        prompts = [prompt(tokenizer, filler, generator=generator, **shape) for _ in range(options.trials)]
        for name, configuration in chosen.items():
            with intercept_attention(model, configuration.attention(segments)):
                hits = sum(found(model, *case) for case in prompts)
            own = {"configuration": name, "bits": configuration.bits, "trials": options.trials, "found": hits}
            rows.append(shape | own | {"seed": options.seed})
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
