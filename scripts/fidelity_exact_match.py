# SPDX-License-Identifier: Apache-2.0
"""Small tasks with one right answer, for `eval_fidelity.py --exact-match`; fidelity_answers.py says what is right.

* ``sums``: word problems with one addition or subtraction, written out, one after the other, each with its answer.
  Asked are those behind the first page of history, so that all but the newest examples lie in INT2 pages.
* ``lookup``: a table of names and numbers, problems of ``sums`` until the table lies in history, then the table again
  in another order, its numbers asked for.
* ``code``: a window of real code. Of every line of at least `LINE_TOKENS` tokens behind the first page of history
  the second half is asked for.
* ``repeats``: of those lines the ones whose second half, with the token before it, stood in history and not since, so
  that the model can copy it from pages only.

Everything random comes from the seed, windows of code are evenly spaced, and every configuration reads the same cases.
"""

import argparse
import random
from typing import Any

import fidelity_answers
from fidelity_answers import Case
from torch import Tensor, tensor
from transformers import PreTrainedModel

from calib.simulate import Segments
from triton_ops.layout import PAGE_TOKENS

TASKS = ("sums", "lookup", "code", "repeats")
NAMES = ("Tom", "Lia", "Omar", "Ines", "Paul", "Nina", "Ravi", "Elsa", "Hugo", "Mina", "Karl", "Dora", "Ivan", "Rosa",
         "Sami", "Vera", "Leon", "Anna", "Finn", "Zoe")  # fmt: skip
THINGS = ("apples", "coins", "books", "pens", "cards", "shells", "stamps", "nuts")
PLUS = "{name} has {a} {thing} and gets {b} more: {a} + {b} ="
MINUS = "{name} has {a} {thing} and gives away {b}: {a} - {b} ="
ROWS = 12
LINE_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    group = parser.add_argument_group("exact match")
    group.add_argument("--exact-match", action="store_true", help="small tasks with one right answer instead of scores")
    group.add_argument("--tasks", default=",".join(TASKS), help="(%(default)s)")


class _Writer:
    """Token ids, piece by piece, and where the answers stand in them."""

    def __init__(self, tokenizer: Any, ids: list[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = list(ids or [])
        self.answers: list[tuple[int, int]] = []

    def add(self, words: str) -> None:
        self.ids += self.tokenizer(words, add_special_tokens=False).input_ids

    def ask(self, question: str, answer: str) -> None:
        """``question`` and, behind a space, its answer."""
        before = self.tokenizer(question, add_special_tokens=False).input_ids
        both = self.tokenizer(f"{question} {answer}", add_special_tokens=False).input_ids
        self.answers.append((len(self.ids) + len(before), len(self.ids) + len(both)))
        self.ids += both

    def ask_sum(self, generator: random.Random) -> None:
        """A word problem."""
        a, b, thing = generator.randrange(10, 20), generator.randrange(2, 10), generator.choice(THINGS)
        sentence, answer = generator.choice(((PLUS, a + b), (MINUS, a - b)))
        self.ask(sentence.format(name=generator.choice(NAMES), a=a, b=b, thing=thing), str(answer))
        self.add(f" {thing}.\n")


def sums(tokenizer: Any, generator: random.Random, *, first: int, length: int) -> Case:
    """``length`` tokens of word problems; those whose answers stand behind token ``first`` are asked."""
    writer = _Writer(tokenizer)
    while len(writer.ids) < length:
        writer.ask_sum(generator)
    answers = [(start, end) for start, end in writer.answers if start > first and end <= length]
    return Case(tensor(writer.ids[:length]), answers)


def lookup(tokenizer: Any, generator: random.Random, *, segments: Segments, length: int) -> Case:
    """A table behind the sink, problems, and the table's rows asked for at the end of ``length`` tokens.

    Raises:
        SystemExit: the table would not lie in history.

    """
    names = generator.sample(NAMES, ROWS)
    bottles = {name: generator.randrange(100, 1000) for name in names}
    head = "| name | bottles |\n|---|---|\n"
    questions = _Writer(tokenizer)
    questions.add(f"\nThe table again, in another order:\n\n{head}")
    for name in generator.sample(names, ROWS):
        questions.ask(f"| {name} |", str(bottles[name]))
        questions.add(" |\n")
    writer = _Writer(tokenizer)
    while len(writer.ids) < segments.sink:
        writer.ask_sum(generator)
    writer.add(f"\nWhat they have in the cellar:\n\n{head}")
    writer.add("".join(f"| {name} | {number} |\n" for name, number in bottles.items()) + "\n")
    until = length - len(questions.ids)
    if len(writer.ids) > until - segments.recent:
        raise SystemExit(f"{length} tokens are too few for a table in history; raise --tokens")
    while len(writer.ids) < until:
        writer.ask_sum(generator)
    ids = writer.ids[:until] + questions.ids
    return Case(tensor(ids), [(until + start, until + end) for start, end in questions.answers])


def lines(tokenizer: Any, ids: Tensor, first: int) -> list[tuple[int, int]]:
    """The second halves of the lines behind token ``first`` of a window, token indices [start, end).

    A line is what ends in a token with a newline in it, which is not asked for; so is indentation.
    """
    words = [tokenizer.decode([token]) for token in ids.tolist()]
    found, start = [], 0
    for i, word in enumerate(words):
        if "\n" not in word:
            continue
        while start < i and not words[start].strip():
            start += 1
        if i - start >= LINE_TOKENS and start > first:
            found.append((start + (i - start + 1) // 2, i))
        start = i + 1
    return found


def repeated(ids: Tensor, span: tuple[int, int], segments: Segments) -> bool:
    """Whether a span, with the token before it, stands in what is history to it and not in the recent tokens."""
    tokens, (start, end) = ids.tolist(), span
    wanted = tokens[start - 1 : end]
    places = [at for at in range(segments.sink, start - 1) if tokens[at : at + len(wanted)] == wanted]
    return bool(places) and places[-1] + len(wanted) <= start - segments.recent


def cases(
    tokenizer: Any, windows: list[Tensor], segments: Segments, options: argparse.Namespace
) -> dict[str, list[Case]]:
    """Task -> cases of ``options.tokens`` tokens; cases without a question are left out.

    Args:
        tokenizer: the model's.
        windows: of code, for the tasks on code.
        segments: the BF16 windows.
        options: ``tasks``, ``seeds``, ``trials`` (cases for each seed) and ``tokens``.

    Raises:
        SystemExit: a task is unknown, or has no question.

    """
    first, length = segments.sink + segments.recent + PAGE_TOKENS, options.tokens
    made: dict[str, list[Case]] = {}
    for task in options.tasks.split(","):
        generators = [random.Random(f"{task} {seed} {i}") for seed in options.seeds for i in range(options.trials)]
        if task == "sums":
            made[task] = [sums(tokenizer, g, first=first, length=length) for g in generators]
        elif task == "lookup":
            made[task] = [lookup(tokenizer, g, segments=segments, length=length) for g in generators]
        elif task in ("code", "repeats"):
            spans = [[span for span in lines(tokenizer, ids, first) if task == "code" or repeated(ids, span, segments)]
                     for ids in windows]  # fmt: skip
            made[task] = [Case(ids, answers) for ids, answers in zip(windows, spans, strict=True)]
        else:
            raise SystemExit(f"task {task!r} is unknown; use {', '.join(TASKS)}")
        made[task] = [case for case in made[task] if case.answers]
        if not made[task]:
            raise SystemExit(f"{task}: {length} tokens hold no question; raise --tokens or --windows")
    return made


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    windows: list[Tensor],
    chosen: dict[str, Any],
    segments: Segments,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per task and configuration; see `cases`."""
    made = cases(tokenizer, windows, segments, options)
    results = fidelity_answers.score(model, made, chosen, segments, options.batch)

    def describe(task: str) -> dict[str, Any]:
        synthetic = {"text": "generated", "seed": " ".join(map(str, options.seeds))}
        real = {"text": options.text, "seed": ""}
        return {"task": task, "length": options.tokens} | (real if task in ("code", "repeats") else synthetic)

    return fidelity_answers.rows(results, describe, chosen)
