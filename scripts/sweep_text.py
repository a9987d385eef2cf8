# SPDX-License-Identifier: Apache-2.0
"""Does a 2-bit cache garble text or run into loops where the model itself does not? Greedy, through vLLM.

    python scripts/sweep_text.py --model MODEL --artifact DIR           # a CPU; larger on a GPU
    python scripts/sweep_text.py --model MODEL --artifact DIR --text ru=BOOK.txt --prompts 8 --tokens 4000

Long prompts of real text are continued by two engines, one with the model's own cache dtype and one with
``oscar_int2`` as it is served by default. `symptoms` looks at both continuations. What only ``oscar_int2`` shows is
looked at again, because greedy decoding of a small model loops now and then, and which of two nearly equal tokens comes
first decides: the unquantized engine goes on from the first token that differed, the *branch*. Symptoms that it shows
there as well are the model's own; any other is printed with all texts, and the exit status is 1. What only the
unquantized engine shows is counted too.

Single prompts cannot tell a cause from chance: two unquantized engines that round differently loop on different
prompts. ``--control`` names the options of a second unquantized engine, for example ``'{"dtype": "float16"}'``, which
is examined as ``oscar_int2`` is: what it alone shows is how much of that chance makes.

Texts (all come with Python or with vLLM's own requirements, none is read by calibration; `TEXTS`): code and manual of
the standard library, conversations in the model's chat template about pages of the manual, tables, names of languages,
countries and regions in five languages. ``--text NAME=FILE`` adds a UTF-8 file. Prompts are evenly spaced stretches;
nothing is random.

Symptoms of a continuation, each a fixed rule on its tokens or characters:

* ``loop``: it ends in the same tokens again and again: at least `LOOP_REPEATS` times and over `LOOP_TOKENS` tokens.
* ``repeats``: fewer than `DISTINCT` of its runs of `RUN` tokens are different ones.
* ``replacement``: it holds U+FFFD, which bytes that are no UTF-8 decode to (but for characters that its ends cut).
* ``foreign``: more than `FOREIGN` of its letters are of scripts, Latin left out, that make up less than a hundredth of
  the prompt's.
* ``noise``: zlib cannot shorten it: more than `INCOMPRESSIBLE` bytes are left of each, given the prompt's end.
* ``unlikely``: the unquantized model finds it less likely than the prompt and than `UNLIKELY` nats per token.
"""

import argparse
import html.entities
import http
import mimetypes
import sys
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fidelity_engine
from eval_fidelity import append_csv, check_csv, positive, provenance, read_text, refusals
from quickstart import json_object

from calib.pretrained import from_pretrained
from oscar_vllm.artifact import Artifact
from oscar_vllm.errors import OscarConfigError

LOOP_TOKENS, LOOP_REPEATS = 40, 4
RUN, DISTINCT = 8, 0.4
FOREIGN = 0.1
INCOMPRESSIBLE = 0.8
UNLIKELY = 2.5

FIELDS = ("model", "text", "prompt", "tokens", "new_tokens", "cache", "symptoms", "period", "distinct", "replacements",
          "foreign", "incompressible", "nats", "prompt_nats", "equal_tokens", "branch", "dtype", "commit", "versions",
          "command")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- texts


def _names(language: str) -> str:
    """ISO names of languages, countries and regions with their translation, from pycountry's catalogues."""
    import gettext

    import pycountry

    lines = []
    for domain in ("iso639-3", "iso3166-1", "iso3166-2", "iso15924"):
        path = Path(pycountry.LOCALES_DIR, language, "LC_MESSAGES", f"{domain}.mo")
        with open(path, "rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        pairs = sorted((name, word) for name, word in catalogue.items() if isinstance(name, str) and name != word)
        lines += [f"{name} — {word}" for name, word in pairs if name]
    return "\n".join(lines)


def _tables() -> str:
    """Markdown tables of the standard library's constants."""
    parts = ["| entity | code point | name |", "|---|---|---|"]
    for name, point in sorted(html.entities.name2codepoint.items()):
        parts.append(f"| {name} | U+{point:04X} | {unicodedata.name(chr(point), '').capitalize()} |")
    parts += ["", "| extension | type |", "|---|---|"]
    parts += [f"| {extension} | {kind} |" for extension, kind in sorted(mimetypes.MimeTypes().types_map[1].items())]
    parts += ["", "| status | phrase | meaning |", "|---|---|---|"]
    parts += [f"| {status.value} | {status.phrase} | {status.description} |" for status in http.HTTPStatus]
    return "\n".join(parts)


TEXTS: dict[str, Callable[[], str]] = {
    "code": partial(read_text, "code"),
    "manual": partial(read_text, "manual"),
    "tables": _tables,
    **{f"names-{language}": partial(_names, language) for language in ("fr", "de", "ru", "zh_CN", "ja")},
}
"""Plain texts by name; ``chat`` is made of pages of the manual by `conversations`."""


def stretches(tokenizer: Any, text: str, count: int, length: int) -> list[list[int]]:
    """Up to ``count`` stretches of ``length`` tokens, evenly spaced, from a text of at least ``length``."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(tokens) < length:
        raise SystemExit(f"the text has {len(tokens)} tokens, a prompt of {length} needs more; lower --tokens")
    last = len(tokens) - length
    starts = {last * i // max(count - 1, 1) for i in range(count)}
    return [tokens[start : start + length] for start in sorted(starts)]


def conversations(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Conversations of up to ``length`` tokens about pages of the manual; the last question is about the first page.

    Each begins with another page, so there are at most as many as pages.
    """
    from pydoc_data.topics import topics

    pages = [(name, topics[name].strip()) for name in sorted(topics) if 800 < len(topics[name]) < 3000]
    count = min(count, len(pages))

    def written(messages: list[tuple[str, str]]) -> list[int]:
        if tokenizer.chat_template is None:
            text = "\n\n".join([*(f"{role}: {content}" for role, content in messages), "assistant:"])
        else:
            turns = [{"role": role, "content": content} for role, content in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids

    made = []
    for i in range(count):
        start = len(pages) * i // count
        order = pages[start:] + pages[:start]
        last = f"Thank you. Now say in three sentences what you told me about {order[0][0]!r} at the beginning."
        messages: list[tuple[str, str]] = []
        for name, page in order:
            turn = [("user", f"What does Python's manual say about {name!r}?"), ("assistant", page)]
            if len(written([*messages, *turn, ("user", last)])) > length:
                break
            messages += turn
        if not messages:
            raise SystemExit(f"{length} tokens are too few for a conversation; raise --tokens")
        made.append(written([*messages, ("user", last)]))
    return made


# -------------------------------------------------------------------------------------------------- symptoms


@dataclass(frozen=True)
class Symptoms:
    """What was measured of a continuation, and which rules it breaks.

    Attributes:
        period: tokens of the loop it ends in, 0 for none.
        distinct: share of its runs of `RUN` tokens that are different ones.
        replacements: characters U+FFFD.
        foreign: share of letters of scripts that the prompt does not use.
        incompressible: bytes that zlib adds for it behind the prompt's end, per byte.
        nats: mean negative log-probability under the unquantized model, per token.
        names: the rules it breaks.

    """

    period: int
    distinct: float
    replacements: int
    foreign: float
    incompressible: float
    nats: float
    names: frozenset[str]


def loop_period(tokens: list[int]) -> int:
    """The least number of tokens that the end repeats `LOOP_REPEATS` times and over `LOOP_TOKENS`; 0 for none."""
    for period in range(1, len(tokens) // LOOP_REPEATS + 1):
        length = max(LOOP_TOKENS, LOOP_REPEATS * period)
        if length <= len(tokens) and all(tokens[-i] == tokens[-i - period] for i in range(1, length - period + 1)):
            return period
    return 0


def distinct_runs(tokens: list[int]) -> float:
    """Share of the runs of `RUN` tokens that are different ones; 1 for a text shorter than two runs."""
    if len(tokens) < 2 * RUN:
        return 1.0
    runs = [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    return len(set(runs)) / len(runs)


def scripts(text: str) -> Counter:
    """Letters by script, the first word of their Unicode name (LATIN, CYRILLIC, CJK, HIRAGANA, …)."""
    return Counter(unicodedata.name(char, "UNNAMED").split()[0] for char in text if char.isalpha())


def foreign_share(prompt: str, text: str) -> float:
    """Share of the letters of ``text`` in scripts but Latin with less than a hundredth of the letters of ``prompt``."""
    at_home, found = scripts(prompt), scripts(text)
    known = {"LATIN"} | {script for script, n in at_home.items() if n * 100 >= at_home.total()}
    strange = sum(n for script, n in found.items() if script not in known)
    return strange / found.total() if found else 0.0


def incompressible_share(prompt: str, text: str) -> float:
    """Bytes zlib adds for ``text`` behind the last 4,000 characters of ``prompt``, per byte."""
    before, both = prompt[-4000:].encode(), (prompt[-4000:] + text).encode()
    return (len(zlib.compress(both, 9)) - len(zlib.compress(before, 9))) / max(1, len(both) - len(before))


def symptoms(prompt: str, text: str, tokens: list[int], nats: float, prompt_nats: float) -> Symptoms:
    """See the module.

    Args:
        prompt: its text.
        text: the continuation's, see `readable`.
        tokens: the continuation's.
        nats: mean negative log-probability of ``tokens`` under the unquantized model.
        prompt_nats: that of the prompt's tokens.

    """
    period, distinct, replacements = loop_period(tokens), distinct_runs(tokens), text.count("\ufffd")
    foreign, incompressible = foreign_share(prompt, text), incompressible_share(prompt, text)
    broken = {
        "loop": period > 0,
        "repeats": distinct < DISTINCT,
        "replacement": replacements > prompt.count("\ufffd"),
        "foreign": foreign > FOREIGN,
        "noise": incompressible > INCOMPRESSIBLE,
        "unlikely": nats > max(prompt_nats, UNLIKELY),
    }
    names = frozenset(name for name, yes in broken.items() if yes)
    return Symptoms(period, distinct, replacements, foreign, incompressible, nats, names)


# ------------------------------------------------------------------------------------------------------ main


def readable(tokenizer: Any, tokens: list[int]) -> str:
    """The text of a continuation, without the bytes of characters that its ends cut: at most 3 on each side."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    for strip in (str.lstrip, str.rstrip):
        whole = strip(text, "\ufffd")
        text = whole if len(text) - len(whole) <= 3 else text
    return text


def agreeing(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Sweep:
    """The prompts, and what the unquantized engine makes of them.

    Attributes:
        tokenizer: the model's.
        cases: text, number and token ids of each prompt.
        exact: the unquantized engine's continuations, and what it finds of all others.
        dtype: of the model.
        new_tokens: of a continuation.
        shared: columns of every row.

    """

    tokenizer: Any
    cases: list[tuple[str, int, list[int]]]
    exact: fidelity_engine.Continuations
    dtype: str
    new_tokens: int
    shared: dict[str, Any]

    @cached_property
    def texts(self) -> list[str]:
        """The prompts as text."""
        return [self.tokenizer.decode(prompt) for *_, prompt in self.cases]

    @cached_property
    def of_exact(self) -> list[Symptoms]:
        """The symptoms of the unquantized engine's own continuations."""
        return [self.examine(at, tokens, self.exact.nats[0][at]) for at, tokens in enumerate(self.exact.tokens)]

    def examine(self, at: int, tokens: list[int], nats: float) -> Symptoms:
        """The symptoms of a continuation of prompt ``at``."""
        return symptoms(self.texts[at], readable(self.tokenizer, tokens), tokens, nats, self.exact.prompt_nats[at])

    def row(self, at: int, cache: str, dtype: str, tokens: list[int], seen: Symptoms) -> dict[str, Any]:
        """A continuation by the names of `FIELDS`, as one that has no branch."""
        text, number, prompt = self.cases[at]
        return self.shared | {
            "text": text, "prompt": number, "tokens": len(prompt), "new_tokens": len(tokens),
            "cache": cache, "dtype": dtype, "symptoms": " ".join(sorted(seen.names)), "period": seen.period,
            "distinct": seen.distinct, "replacements": seen.replacements, "foreign": seen.foreign,
            "incompressible": seen.incompressible, "nats": seen.nats, "prompt_nats": self.exact.prompt_nats[at],
            "equal_tokens": len(tokens), "branch": "",
        }  # fmt: skip


def compare(
    sweep: Sweep,
    cache: str,
    continuations: list[list[int]],
    nats: list[float],
    dtype: str,
    continued: Callable[[list[list[int]], int], fidelity_engine.Continuations],
) -> tuple[list[dict[str, Any]], bool]:
    """(a row per prompt, whether it shows symptoms that are not the model's own); these are printed with all texts.

    Args:
        sweep: the prompts and the unquantized engine's continuations.
        cache: name of the other engine.
        continuations: its own.
        nats: their mean negative log-probability under the unquantized model.
        dtype: of the other engine.
        continued: the unquantized engine's continuations of prompts, of some tokens: the branches.

    """
    cases, exact = sweep.cases, sweep.exact
    seen = [sweep.examine(at, tokens, nats[at]) for at, tokens in enumerate(continuations)]
    pairs = list(enumerate(zip(seen, sweep.of_exact, strict=True)))
    only_other = {at: x.names - y.names for at, (x, y) in pairs if x.names - y.names}
    only_exact = {at: y.names - x.names for at, (x, y) in pairs if y.names - x.names}
    equal = [agreeing(*pair) for pair in zip(exact.tokens, continuations, strict=True)]
    branches: dict[int, list[int]] = {}
    if only_other:
        heads = {at: continuations[at][: equal[at] + 1] for at in only_other}
        tails = continued([cases[at][2] + head for at, head in heads.items()], sweep.new_tokens).tokens
        branches = {at: (head + tail)[: sweep.new_tokens] for (at, head), tail in
                    zip(heads.items(), tails, strict=True)}  # fmt: skip
    # The branch's likelihood was not computed and excuses nothing.
    of_branch = {at: sweep.examine(at, tokens, 0.0).names - {"unlikely"} for at, tokens in branches.items()}
    left = {at: names - of_branch[at] for at, names in only_other.items() if names - of_branch[at]}
    rows = []
    for at, tokens in enumerate(continuations):
        branch = {"equal_tokens": equal[at], "branch": " ".join(sorted(of_branch.get(at, ())))}
        rows.append(sweep.row(at, cache, dtype, tokens, seen[at]) | branch)
    for at, names in left.items():
        print(f"--- {cases[at][0]} {cases[at][1]}: {', '.join(sorted(names))}\n… {sweep.texts[at][-200:]}")
        for name, tokens in (("auto", exact.tokens[at]), (cache, continuations[at]),
                             ("auto, from the branch", branches[at])):  # fmt: skip
            print(f"--- {name}\n{readable(sweep.tokenizer, tokens)}")
    for label, found in (("only auto shows", only_exact), (f"only {cache} shows", only_other),
                         (f"only {cache} shows and auto does not from the branch", left)):  # fmt: skip
        listed = "; ".join(f"{cases[at][0]} {cases[at][1]}: {', '.join(sorted(x))}" for at, x in found.items())
        print(f"symptoms that {label}: {len(found)} of {len(cases)} prompts. {listed}".rstrip())
    return rows, bool(left)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--artifact", help="folder of the artifact (default: what the plugin finds for the model)")
    parser.add_argument("--texts", default=",".join([*TEXTS, "chat"]), help="(%(default)s)")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="a further text; repeatable")
    parser.add_argument("--prompts", type=positive, default=4, help="prompts per text (%(default)s)")
    parser.add_argument(
        "--tokens", type=positive, default=1200, help="tokens of a prompt; of a chat at most (%(default)s)"
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens of a continuation (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="(%(default)s)")
    parser.add_argument("--engine-options", type=json_object, default={}, help="arguments of vllm.LLM, as JSON")
    parser.add_argument(
        "--control", type=json_object, metavar="OPTIONS", help="options of another unquantized engine, as JSON"
    )
    parser.add_argument("--csv", type=Path, help="append a row per prompt and cache to this file")
    return parser


def prompts_of(tokenizer: Any, options: argparse.Namespace) -> list[tuple[str, int, list[int]]]:
    """Text, number and token ids of every prompt that is asked for.

    Raises:
        OscarConfigError: a text is unknown or cannot be read, or there is none.
        SystemExit: a text is too short.

    """
    sources = {name: TEXTS.get(name) for name in options.texts.split(",") if name}
    unknown = [name for name, source in sources.items() if source is None and name != "chat"]
    if unknown:
        raise OscarConfigError(f"text {unknown[0]!r} is unknown; use {', '.join([*TEXTS, 'chat'])} or --text NAME=FILE")
    for item in options.text:
        name, _, file = item.rpartition("=")
        sources[name or Path(file).stem] = partial(read_text, file)
    if not sources:
        raise OscarConfigError("--texts names no text; give one, or --text NAME=FILE")
    cases: list[tuple[str, int, list[int]]] = []
    for name, source in sources.items():
        if source is None:
            prompts = conversations(tokenizer, options.prompts, options.tokens)
        else:
            prompts = stretches(tokenizer, source(), options.prompts, options.tokens)
        cases += [(name, i, prompt) for i, prompt in enumerate(prompts)]
    return cases


@refusals()
def main() -> int:
    """Run the sweep; 1 if ``oscar_int2`` shows a symptom that is not the model's own."""
    options = _parser().parse_args()
    if options.csv is not None:
        check_csv(options.csv, FIELDS)
    oscar = {}
    if options.artifact:
        Artifact.load(options.artifact)  # an engine would refuse it after minutes
        oscar = {"artifact": str(Path(options.artifact).resolve())}
    tokenizer = from_pretrained(AutoTokenizer, options.model)
    cases = prompts_of(tokenizer, options)
    prompts = [prompt for *_, prompt in cases]
    common = options.engine_options
    engines = {"oscar_int2": common | {"kv_cache_dtype": "oscar_int2", "additional_config": {"oscar": oscar}}}
    if options.control is not None:
        engines["control"] = common | options.control
    run = partial(fidelity_engine.continued, options.model, dtype=options.dtype)
    others = {cache: run(prompts, options.new_tokens, engine=engine).tokens for cache, engine in engines.items()}
    exact = run(prompts, options.new_tokens, engine=common, judged=list(others.values()))

    shared = {"model": Path(options.model).name} | provenance("sweep_text.py", options.dtype)
    sweep = Sweep(tokenizer, cases, exact, options.dtype, options.new_tokens, shared)
    rows = [sweep.row(at, "auto", sweep.dtype, tokens, sweep.of_exact[at]) for at, tokens in enumerate(exact.tokens)]
    status = 0
    for (cache, continuations), nats in zip(others.items(), exact.nats[1:], strict=True):
        dtype = engines[cache].get("dtype", options.dtype)
        own, left = compare(sweep, cache, continuations, nats, dtype, partial(run, engine=common))
        rows += own
        if cache == "oscar_int2" and left:
            status = 1
    print(summary(rows))
    if options.csv is not None:
        append_csv(options.csv, rows, FIELDS)
    return status


def summary(rows: list[dict[str, Any]]) -> str:
    """By text and cache: prompts with a symptom, and means."""
    lines = [
        f"{'text':14s} {'cache':11s} {'symptoms':>9s} {'nats':>6s} {'of prompt':>9s} {'distinct':>8s} {'equal':>6s}"
    ]
    for text, cache in dict.fromkeys((row["text"], row["cache"]) for row in rows):
        some = [row for row in rows if (row["text"], row["cache"]) == (text, cache)]

        def mean(name: str, some: list[dict[str, Any]] = some) -> float:
            return sum(row[name] for row in some) / len(some)

        ill = sum(bool(row["symptoms"]) for row in some)
        lines.append(
            f"{text:14s} {cache:11s} {ill:4d}/{len(some):4d} {mean('nats'):6.2f} {mean('prompt_nats'):9.2f} "
            f"{mean('distinct'):8.2f} {mean('equal_tokens'):6.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
