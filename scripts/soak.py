# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic against ``vllm serve`` for minutes or hours; ends with status 1 when anything was wrong.

    python scripts/soak.py --model FOLDER --minutes 20                        # starts the server itself
    python scripts/soak.py --model FOLDER --minutes 20 -- --dtype bfloat16    # more arguments of `vllm serve`
    python scripts/soak.py --base-url http://localhost:8000 --minutes 5       # a server that runs already

Workers send questions of all lengths, conversations that share a system prompt, requests that are cut off in
mid-stream, bursts over capacity, unique long prompts that pin the small KV pool full, sampled and malformed requests.
Every ``--segment`` seconds they let the server come to rest, and what must then hold is checked.

**What a correct answer is.** Before the traffic every question is asked alone at temperature 0, on an idle server
with an empty prefix cache. Under load the same question must give the same answer, token by token, but for *drift*:
batches of another shape add up floating-point sums in another order, so logprobs move, a key or value next to the
border between two codes is coded the other way, and where two tokens are equally likely the greedy choice may fall
the other way (a *tie*). `Bounds` says how far this may go. Anything else is a wrong answer. Drift and ties are
reported as distributions.

**Where the bounds come from.** A server with the model's own cache dtype (``--compare-dtype``, by default ``auto``)
answers the questions first. Tokens up to the first difference have the same prompt and prefix on both servers, so e,
the change of such a token's logprob, is the *effect* of quantizing everything, measured on the tokens that are judged
(and it includes the floating-point noise of both servers). The answer given alone and the one under load are two
quantized readings of the same keys and values. With effects e and e', the drift is d = e' - e, and far smaller than
these: a reading that codes a share f of its numbers the other way differs by a full step D in each of those, rounding
everything costs D / sqrt(12) on average, so rms(d) = sqrt(12 f) rms(e), less than rms(e) as long as f < 1/12. Noise of
t standard deviations takes f = 0.7 t of Gaussian numbers over one of the borders 0 and +-1; a step of bfloat16 is
t = 0.004, and with t = 0.03 after some layers the drift is half the effect. Hence

* *one token*: its logprob moves by at most the largest effect on a token; that leaves a factor of about two because a
  run compares many more tokens than the effect is measured on; likewise the margin between the two likeliest tokens;
* *one answer*: the mean over its tokens is at most the largest such mean of the effect;
* *the whole run*: the root mean square over all tokens is at most that of the effect, and 98 % of them move by at most
  twice the effect's 99th percentile (|d| <= |e| + |e'|, and each of the two is larger in 1 %).

With ``--prefill exact`` it also depends on the scheduler's cuts which tokens are read quantized, so that d may be as
large as |e| + |e'|, and the bounds are twice as high.

Corruption stands out: an answer from another prompt, a lost prefix or a wrong page moves most tokens of an answer by
nats, or changes one that was certain. ``--tolerance`` replaces the measurement by one figure: the bound for a token
and for an answer's mean, twice that for a margin, and none for the run. Without either (``--base-url``) and for a
cache that is not quantized (``--cache-dtype auto``, where nothing is to be compared with), the figures are
`TOLERANCE`.

The default mode of the server is ``prefill="invariant"``, in which results do not depend on how the scheduler cuts
prompts. The server of ``--compare-dtype`` also gets some minutes of the same traffic: its drift is what batches do
without any quantization, on the same machine. The report also says how many of the values that it finds in its
prompts the quantized cache loses and gains; more losses than chance explains (sign test) are a violation.

The report is written after every segment, and at the end also when the run is interrupted (SIGINT, SIGTERM).

Everything is read from local folders. A model folder without a tokenizer (random weights) gets one with a token per
byte.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import pydoc_data.topics
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

TOLERANCE = {"invariant": 1.4, "exact": 2.8, "unquantized": 1.0}
"""Nats. For a quantized cache the largest effect on SmolLM2-135M, of 1,179 tokens of a manual (median 0.05, 90 % 0.22,
99 % 0.51, 99.9 % 1.19 nats), and twice that. Unquantized: bfloat16 logits from 16 to 32 are 1/8 apart; eight steps."""

ENOUGH_TOKENS = 8
"""Tokens of an answer from which on their mean is judged."""
ENOUGH_EFFECTS = 200
"""Tokens from which on measured effects make bounds."""
SIGNIFICANT = 0.01
"""Chance below which lost values (`chance_of`) are a violation."""
TOP_LOGPROBS = 20
KEPT = 200
"""Differences, and violations of one kind, that are kept in full; all are counted."""
STARTUP_SECONDS = 900
IDLE_SECONDS = 60
CONNECTION_SECONDS = 1.0
"""Connections idle for longer are not reused. ``vllm serve`` closes them after 5 s, VLLM_HTTP_TIMEOUT_KEEP_ALIVE, and
5 s is the clients' default too: a request sent at that moment is lost without any fault of the server."""
FULL_REQUESTS, WINDOW_BLOCKS = 2.5, 64
"""The pool holds this many requests of full length; each has about that many blocks beside those of 128 tokens."""
FULL_POOL = 0.9
GROWTH_MIB = 256
COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
SHOWN_LOG_LINES = re.compile(r"(?:CPU|GPU) KV cache size: .*|OSCAR KV cache: .*")
MANUAL = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
INTERRUPTED = "interrupted"
JSON_ANSWER = r'\{"name": "[a-z]{1,8}", "code": [0-9]{5}, "active": (true|false)\}'


class ServerDied(Exception):
    """The server's process or its engine is gone."""


class NoAnswerAlone(Exception):
    """An idle server did not answer; the record says why."""


def described(error: BaseException) -> str:
    """An error in one line, with what caused it: the clients say no more than "Connection error" themselves."""
    cause = f", from {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause}"


# ------------------------------------------------------------------------------------------- questions and answers


@dataclass(frozen=True)
class Question:
    """A request at temperature 0 whose answer is compared.

    Attributes:
        name: unique within a run.
        kind: ``echo``, ``json``, ``plain`` or ``turn``.
        body: of the completions or, if it holds ``messages``, the chat endpoint.
        expected: what a model that reads its whole prompt answers; None if there is no right answer.

    """

    name: str
    kind: str
    body: dict
    expected: str | None = None


@dataclass
class Answer:
    """What a server streamed back; times in seconds since the request was sent."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, token: str, logprob: float | None, alternatives: dict[str, float]) -> None:
        """Append one token; JSON has no NaN, so it arrives as null."""
        self.tokens.append(token)
        self.logprobs.append(math.nan if logprob is None else logprob)
        self.alternatives.append(alternatives)

    @property
    def finite(self) -> bool:
        """Whether every logprob is a number."""
        return all(map(math.isfinite, self.logprobs))


@dataclass(frozen=True)
class Bounds:
    """How far an answer under load may be from the one alone, in nats; the module's docstring derives it.

    Attributes:
        token: change of one token's logprob, before the first difference.
        answer: mean of these changes over an answer of at least `ENOUGH_TOKENS` such tokens.
        margin: how far the token taken under load was, alone, behind the chosen one.
        run_rms: root mean square of all changes of the whole run; None: not judged.
        run_p98: their 98th percentile; None: not judged.
        source: where the figures come from.

    """

    token: float
    answer: float
    margin: float
    run_rms: float | None
    run_p98: float | None
    source: str

    @classmethod
    def of_tolerance(cls, tolerance: float, source: str) -> "Bounds":
        """One figure for everything."""
        return cls(tolerance, tolerance, 2 * tolerance, None, None, source)


@dataclass(frozen=True)
class Comparison:
    """How an answer relates to another one.

    Attributes:
        verdict: ``equal``, ``tie`` (a difference that the bounds allow) or ``wrong``.
        drift: absolute change of every logprob before the first difference, in nats.
        margin: at the first difference, how far the token taken was behind the chosen one; None without a difference.
        reason: of a verdict other than ``equal``.

    """

    verdict: str
    drift: list[float]
    margin: float | None = None
    reason: str = ""

    @property
    def mean(self) -> float | None:
        """Mean drift; None if there are too few tokens to judge it."""
        return statistics.fmean(self.drift) if len(self.drift) >= ENOUGH_TOKENS else None


def common_tokens(one: Answer, other: Answer) -> int:
    """Number of tokens before the first difference."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


def compare(alone: Answer, other: Answer, bounds: Bounds) -> Comparison:
    """Judge ``other`` by the rule of the module's docstring."""
    first = common_tokens(alone, other)
    drift = [abs(a - b) for a, b in zip(alone.logprobs[:first], other.logprobs[:first], strict=True)]
    comparison = Comparison("equal", drift)
    if max(drift, default=0.0) > bounds.token:
        return replace(comparison, verdict="wrong", reason=f"a logprob moved by {max(drift):.3f} nats")
    if (comparison.mean or 0.0) > bounds.answer:
        reason = f"{first} logprobs moved by {comparison.mean:.3f} nats on average"
        return replace(comparison, verdict="wrong", reason=reason)
    if first == min(len(alone.tokens), len(other.tokens)):
        if len(alone.tokens) == len(other.tokens):
            return comparison
        return replace(comparison, verdict="wrong", reason=f"{len(other.tokens)} tokens instead of {len(alone.tokens)}")
    chosen, taken = alone.tokens[first], other.tokens[first]
    if taken in alone.alternatives[first]:
        margin, where = alone.logprobs[first] - alone.alternatives[first][taken], "alone"
    elif chosen in other.alternatives[first]:  # a grammar can choose a token far below the likeliest ones
        margin, where = other.logprobs[first] - other.alternatives[first][chosen], "under load"
    else:
        reason = f"token {first} is none of the {TOP_LOGPROBS} most likely alone"
        return replace(comparison, verdict="wrong", reason=reason)
    reason = f"token {first} differs; {where} the margin was {abs(margin):.3f} nats"
    verdict = "wrong" if abs(margin) > bounds.margin else "tie"
    return replace(comparison, verdict=verdict, margin=abs(margin), reason=reason)


@dataclass
class Effects:
    """What another cache dtype does to answers, in nats: per token, per margin of the two likeliest, per answer."""

    tokens: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def add(self, one: Answer, other: Answer) -> None:
        """Compare two answers to one question up to their first difference, that token included."""
        first = common_tokens(one, other)
        changes = [abs(a - b) for a, b in zip(one.logprobs[:first], other.logprobs[:first], strict=True)]
        if len(changes) >= ENOUGH_TOKENS:
            self.answers.append(statistics.fmean(changes))
        for mine, others in zip(one.alternatives[: first + 1], other.alternatives[: first + 1], strict=True):
            best = sorted(mine, key=mine.__getitem__, reverse=True)[:2]
            if len(best) == 2 and all(token in others for token in best):
                a, b = best
                self.margins.append(abs((mine[a] - mine[b]) - (others[a] - others[b])))
        if first < min(len(one.tokens), len(other.tokens)):
            for here, there in ((one, other), (other, one)):
                if (token := here.tokens[first]) in there.alternatives[first]:
                    changes.append(abs(here.logprobs[first] - there.alternatives[first][token]))
        self.tokens += changes

    def bounds(self, prefill: str, dtype: str) -> Bounds | None:
        """The bounds that follow; None if there are too few answers."""
        if len(self.tokens) < ENOUGH_EFFECTS or not self.margins or not self.answers:
            return None
        factor = 1 if prefill == "invariant" else 2
        return Bounds(
            token=factor * max(self.tokens),
            answer=factor * max(self.answers),
            margin=factor * max(self.margins),
            run_rms=factor * percentiles(self.tokens)["rms"],
            run_p98=2 * percentiles(self.tokens)["p99"],
            source=f"the effect of quantization on {len(self.tokens)} tokens of these questions, against {dtype}",
        )

    def summary(self) -> dict:
        """The distributions."""
        return {
            "tokens": percentiles(self.tokens), "count": len(self.tokens), "margins": percentiles(self.margins),
            "means of answers": percentiles(self.answers),
        }  # fmt: skip


class Distribution:
    """Non-negative numbers in bins 1 % wide, so that a run of days needs no more memory than one of minutes."""

    SMALLEST = 1e-6

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self.count = 0
        self.total = self.squares = self.largest = 0.0

    def add(self, value: float) -> None:
        """Count one number; what is below `SMALLEST` counts as that."""
        self.bins[math.floor(math.log(max(value, self.SMALLEST)) / math.log(1.01))] += 1
        self.count += 1
        self.total += value
        self.squares += value**2
        self.largest = max(self.largest, value)

    def percentile(self, share: float) -> float:
        """The number that ``share`` percent are not above, to 1 %."""
        left = self.count * share / 100
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return min(1.01 ** (index + 1), self.largest)
        return self.largest

    def summary(self) -> dict[str, float]:
        """Mean, root mean square, percentiles, maximum."""
        if not self.count:
            return {}
        points = {f"p{share:g}": self.percentile(share) for share in (50, 90, 98, 99, 99.9)}
        rms = math.sqrt(self.squares / self.count)
        return {"mean": self.total / self.count, "rms": rms, **points, "max": self.largest}


class Prompts:
    """Texts made from Python's manual, by seed and approximate length in tokens."""

    def __init__(self, seed: int, chars_per_token: float) -> None:
        self.random = random.Random(seed)
        self.chars_per_token = chars_per_token

    def text(self, tokens: float) -> str:
        """A passage of about ``tokens`` tokens that begins at a random place."""
        length = max(1, int(tokens * self.chars_per_token))
        start = self.random.randrange(max(1, len(MANUAL) - length))
        return MANUAL[start : start + length]

    def records(self, tokens: float) -> tuple[str, str, str]:
        """A text with codes of named drawers scattered in it, one of the names, and its code."""
        count = max(1, min(12, int(tokens / 60)))
        names = self.random.sample(COLOURS, count)
        codes = [f"{self.random.randrange(10_000, 100_000)}" for _ in names]
        lines = [f"\nThe code of the {name} drawer is {code}.\n" for name, code in zip(names, codes, strict=True)]
        rest = tokens - sum(map(len, lines)) / self.chars_per_token
        filler = [self.text(max(1.0, rest / (count + 1))) for _ in range(count + 1)]
        text = filler[0] + "".join(line + passage for line, passage in zip(lines, filler[1:], strict=True))
        wanted = self.random.randrange(count)
        return text, names[wanted], codes[wanted]

    def echo(self, name: str, tokens: int) -> Question:
        """Continue a line that stands earlier in the prompt."""
        text, drawer, code = self.records(tokens)
        prompt = f"{text}\nThe code of the {drawer} drawer is"
        return Question(name, "echo", {"prompt": prompt, "max_tokens": 8}, code)

    def plain(self, name: str, tokens: int) -> Question:
        """Continue the manual."""
        return Question(name, "plain", {"prompt": self.text(tokens), "max_tokens": 24})

    def json(self, name: str, tokens: int) -> Question:
        """Answer in strict JSON, which a regular expression enforces."""
        text, drawer, code = self.records(tokens)
        task = f"Describe the {drawer} drawer in JSON with its name and code."
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{text}\n{task}"}], "max_tokens": 60}
        body["structured_outputs"] = {"regex": JSON_ANSWER}
        return Question(name, "json", body, code)

    def questions(self, count: int, context: int) -> list[Question]:
        """``count`` questions of the three kinds, from 30 tokens to nearly the whole context."""
        longest = int(0.8 * context) - 80
        lengths = [30, 120, 129, 250, 330, 400, 513, 650, 1100, *(int(longest * share) for share in (0.25, 0.5, 1.0))]
        lengths = [length for length in lengths if length <= longest]
        kinds = (self.echo, self.json, self.plain)
        return [
            kinds[index % 3](f"{kinds[index % 3].__name__}-{index}", lengths[(index * 7) % len(lengths)])
            for index in range(count)
        ]


COLOURS = (
    "amber", "azure", "beige", "black", "bronze", "brown", "copper", "coral", "crimson", "cyan", "golden", "green",
    "grey", "indigo", "ivory", "lilac", "maroon", "navy", "olive", "orange", "pink", "purple", "scarlet", "silver",
    "teal", "violet", "white", "yellow",
)  # fmt: skip


def malformed_requests(model: str, context: int) -> dict[str, tuple[str, Any]]:
    """Requests that a server must answer with a status of 400 to 499: name -> (path, JSON body or raw bytes)."""
    completion = {"model": model, "prompt": "x", "max_tokens": 1}
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return {
        "not JSON": ("/v1/completions", b'{"model": '),
        "binary": ("/v1/completions", b"\x00\xff\xfe\x80"),
        "empty body": ("/v1/chat/completions", b""),
        "a list": ("/v1/chat/completions", [1, 2]),
        "unknown path": ("/v1/nothing", completion),
        "unknown model": ("/v1/completions", completion | {"model": "none"}),
        "no prompt": ("/v1/completions", {"model": model, "max_tokens": 1}),
        "prompt over the context": ("/v1/completions", completion | {"prompt": [5] * (context + 1)}),
        "answer over the context": ("/v1/completions", completion | {"max_tokens": context + 1}),
        "token outside the vocabulary": ("/v1/completions", completion | {"prompt": [2**31 - 1]}),
        "negative max_tokens": ("/v1/completions", completion | {"max_tokens": -1}),
        "negative temperature": ("/v1/completions", completion | {"temperature": -1}),
        "top_p of 2": ("/v1/completions", completion | {"top_p": 2}),
        "n of 0": ("/v1/completions", completion | {"n": 0}),
        "text for a number": ("/v1/completions", completion | {"temperature": "warm"}),
        "too many logprobs": ("/v1/completions", completion | {"logprobs": 1_000_000}),
        "no messages": ("/v1/chat/completions", {"model": model}),
        "messages of a wrong type": ("/v1/chat/completions", chat | {"messages": "x"}),
        "a broken regular expression": ("/v1/chat/completions", chat | {"structured_outputs": {"regex": "(("}}),
        "a schema that is none": (
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
        ),
    }


# ----------------------------------------------------------------------------------------------------- the server


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_byte_tokenizer(model: Path, directory: Path) -> Path:
    """A tokenizer with one token per byte, and unused ones up to the model's vocabulary; returns its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if size < len(words):
        raise SystemExit(f"{model}: a vocabulary of {size} is too small for a token per byte ({len(words)})")
    words += [f"t{index}" for index in range(len(words), size)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    )  # fmt: skip
    fast.save_pretrained(directory)
    return directory


class Server:
    """A ``vllm serve`` process of our own, in a session of its own."""

    def __init__(self, arguments: Sequence[str], log_path: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_SERVER_DEV_MODE": "1",  # the endpoint that resets the prefix cache
            "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; only the CPU build reads it
            **os.environ,
        }
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments,
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        with open(log_path, "w") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_healthy(self) -> None:
        """Return when the server answers.

        Raises:
            SystemExit: it ended, or did not answer in `STARTUP_SECONDS`.

        """
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(
                    f"{self.log()}\nthe server ended with status {self.process.returncode}: {self.log_path}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        self.stop()
        raise SystemExit(f"{self.log()}\nthe server was not healthy after {STARTUP_SECONDS} s: {self.log_path}")

    def log(self, characters: int = 4000) -> str:
        """The end of what the server printed."""
        return self.log_path.read_text(errors="replace")[-characters:]

    def memory_mib(self) -> float:
        """Resident memory of the server's processes."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total / 2**20

    def stop(self) -> None:
        """End the server and whatever of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def gpu_memory_mib() -> float | None:
    """Memory in use on all GPUs that ``nvidia-smi`` shows, other processes' included; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, capture_output=True, text=True)
    return sum(map(float, shown.stdout.split())) if shown.returncode == 0 else None


# ------------------------------------------------------------------------------------------------------- the soak


@dataclass
class Record:
    """Everything a run has seen; its size does not depend on the length of the run, but for one line per segment."""

    violations: list[dict] = field(default_factory=list)
    violation_kinds: Counter = field(default_factory=Counter)
    traffic: Counter = field(default_factory=Counter)
    verdicts: Counter = field(default_factory=Counter)
    differences: list[dict] = field(default_factory=list)
    drift: Distribution = field(default_factory=Distribution)
    answer_drift: Distribution = field(default_factory=Distribution)
    tie_margins: Distribution = field(default_factory=Distribution)
    furthest: list[dict] = field(default_factory=list)
    first_token: Distribution = field(default_factory=Distribution)
    between_tokens: Distribution = field(default_factory=Distribution)
    whole: Distribution = field(default_factory=Distribution)
    memory: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    usage: Distribution = field(default_factory=Distribution)
    full_samples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    segments: int = 0
    finished: bool = False

    def violation(self, kind: str, detail: str, **more: Any) -> None:
        """Something was wrong; the run goes on and ends with status 1."""
        self.violation_kinds[kind] += 1
        if self.violation_kinds[kind] <= KEPT:
            self.violations.append({"kind": kind, "detail": detail, **more})
            print(f"VIOLATION {kind}: {detail}", file=sys.stderr, flush=True)

    def compared(self, question: Question, when: str, alone: Answer, answer: Answer, comparison: Comparison) -> None:
        """Note an answer and how it relates to the one given alone."""
        for number, change in enumerate(comparison.drift):
            self.drift.add(change)
            if len(self.furthest) < 10 or change > self.furthest[-1]["drift"]:
                place = {"question": question.name, "when": when, "token": number}
                values = {"drift": change, "alone": alone.logprobs[number], "under_load": answer.logprobs[number]}
                self.furthest.append(place | values)
                self.furthest = sorted(self.furthest, key=lambda entry: -entry["drift"])[:10]
        if comparison.mean is not None:
            self.answer_drift.add(comparison.mean)
        if comparison.margin is not None:
            self.tie_margins.add(comparison.margin)
        self.verdicts[comparison.verdict] += 1
        if comparison.verdict == "equal":
            return
        if len(self.differences) < KEPT:
            difference = {
                "question": question.name, "when": when, "verdict": comparison.verdict, "reason": comparison.reason,
                "prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens,
                "alone": alone.text, "answer": answer.text,
            }  # fmt: skip
            self.differences.append(difference)
        if comparison.verdict == "wrong":
            detail = f"{question.name} {when}: {comparison.reason}: {alone.text!r} -> {answer.text!r}"
            self.violation("wrong answer", detail)

    def progress(self) -> str:
        """One line."""
        answers = ", ".join(f"{self.verdicts[verdict]} {verdict}" for verdict in ("equal", "tie", "wrong"))
        drift = self.drift.summary()
        moved = " ".join(f"{name} {drift[name]:.3f}" for name in ("rms", "p99", "max") if name in drift)
        memory = {name: self.memory[-1][name] for name in ("rss_mib", "all_gpus_mib")} if self.memory else {}
        return (
            f"{self.seconds:7.0f} s  answers {answers}; drift {moved}; pool full {self.full_share:.0%} of the time; "
            f"{self.metrics.get('vllm:num_preemptions_total', 0):.0f} preemptions; "
            f"{sum(self.violation_kinds.values())} violations; memory {memory}"
        )

    @property
    def full_share(self) -> float:
        """Share of the samples of the pool's usage that were at least `FULL_POOL`."""
        return self.full_samples / max(1, self.usage.count)


class Soak:
    """One server under traffic.

    Args:
        url: of the server.
        server: its process, if it is ours.
        options: the command line.
        bounds: by which answers are judged.
        minutes: of traffic.
        save: called after every segment.

    """

    def __init__(
        self,
        url: str,
        server: Server | None,
        options: argparse.Namespace,
        bounds: Bounds,
        minutes: float,
        save: Callable[["Soak"], Any],
    ) -> None:
        self.url = url
        self.server = server
        self.options = options
        self.bounds = bounds
        self.minutes = minutes
        self.save = save
        self.covers = True  # a run that did not exercise everything is wrong
        self.reference: Soak | None = None
        self.effects = Effects()
        self.record = Record()
        self.alone: dict[str, Answer] = {}
        self.questions: list[Question] = []
        self.conversations: list[list[Question]] = []
        self.can_reset = True
        limits: dict[str, Any] = {
            "max_connections": None, "max_keepalive_connections": None, "keepalive_expiry": CONNECTION_SECONDS,
        }  # fmt: skip
        self.http = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(**limits))
        openai_limits = type(openai.DEFAULT_CONNECTION_LIMITS)(**limits)  # of httpx or httpx2, by the version of openai
        self.client = openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, timeout=options.request_timeout,
            http_client=openai.DefaultAsyncHttpxClient(limits=openai_limits),
        )  # fmt: skip

    # ---- single requests ----

    async def ask(self, question: Question, **more: Any) -> Answer:
        """Stream one answer with its logprobs.

        Raises:
            openai.OpenAIError: the server refused or broke off.

        """
        answer, started = Answer(), time.monotonic()
        body: dict[str, Any] = {"model": self.model, "temperature": 0, **question.body, **more}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        extra: dict[str, Any] = {"return_tokens_as_token_ids": True}
        for name in ("structured_outputs", "ignore_eos"):
            if name in body:
                extra[name] = body.pop(name)
        if "messages" in body:
            stream = await self.client.chat.completions.create(
                **body, logprobs=True, top_logprobs=TOP_LOGPROBS, extra_body=extra
            )
        else:
            stream = await self.client.completions.create(**body, logprobs=TOP_LOGPROBS, extra_body=extra)
        async with stream:
            async for chunk in stream:
                if chunk.usage is not None:
                    answer.prompt_tokens = chunk.usage.prompt_tokens
                    details = chunk.usage.prompt_tokens_details
                    answer.cached_tokens = (details.cached_tokens if details else None) or 0
                for choice in chunk.choices:
                    answer.finish = choice.finish_reason or answer.finish
                    if "messages" in body:
                        answer.text += choice.delta.content or ""
                        for entry in (choice.logprobs and choice.logprobs.content) or ():
                            top = {candidate.token: candidate.logprob for candidate in entry.top_logprobs}
                            answer.add(entry.token, entry.logprob, top)
                    else:
                        answer.text += choice.text
                        if choice.logprobs is not None:
                            columns = choice.logprobs
                            for entry in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
                                answer.add(*entry)
                    if len(answer.tokens) > len(answer.times):
                        moment = time.monotonic() - started
                        answer.times += [moment] * (len(answer.tokens) - len(answer.times))
        return answer

    async def valid(self, question: Question, **more: Any) -> Answer | None:
        """An answer to a request that must succeed; None, and a violation, if it did not."""
        try:
            answer = await self.ask(question, **more)
        except openai.OpenAIError as error:
            await self.check_alive()
            self.record.violation("error", f"{question.name}: {described(error)}")
            return None
        if not answer.finite:
            wrong = sum(not math.isfinite(value) for value in answer.logprobs)
            self.record.violation("not finite", f"{question.name}: {wrong} of {len(answer.logprobs)} logprobs")
            return None
        if not answer.tokens or answer.finish is None:
            self.record.violation("error", f"{question.name}: the stream ended without an answer")
            return None
        return answer

    async def checked(self, question: Question, when: str) -> Answer | None:
        """Ask a question whose answer alone is known, and compare."""
        answer = await self.valid(question)
        if answer is None:
            return None
        self.record.first_token.add(answer.times[0])
        for before, after in zip(answer.times, answer.times[1:], strict=False):
            self.record.between_tokens.add(after - before)
        self.record.whole.add(answer.times[-1])
        alone = self.alone[question.name]
        self.record.compared(question, when, alone, answer, compare(alone, answer, self.bounds))
        if question.kind == "json":
            self.check_json(question, answer)
        return answer

    def check_json(self, question: Question, answer: Answer) -> None:
        """Whether a JSON answer is one."""
        if answer.finish == "stop" and re.fullmatch(JSON_ANSWER, answer.text) and json.loads(answer.text):
            return
        self.record.violation("wrong answer", f"{question.name}: not the JSON asked for: {answer.text!r}")

    # ---- the server's state ----

    async def check_alive(self) -> None:
        """Whether the server's process and its engine live.

        Raises:
            ServerDied: they do not.

        """
        for attempt in range(2):
            if self.server is not None and self.server.process.poll() is not None:
                raise ServerDied(f"the server's process ended with status {self.server.process.returncode}")
            try:
                status = (await self.http.get("/health")).status_code
                if status == 200:
                    return
                problem = f"/health says {status}"
            except httpx.HTTPError as error:
                problem = f"/health: {type(error).__name__}"
            if attempt == 0:
                await asyncio.sleep(3)
        raise ServerDied(problem)

    async def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, summed over their labels."""
        values: defaultdict[str, float] = defaultdict(float)
        for line in (await self.http.get("/metrics")).text.splitlines():
            if match := re.match(r"(vllm:\w+)(?:\{.*\})? (\S+)$", line):
                values[match[1]] += float(match[2])
        return values

    async def reset_prefix_cache(self) -> bool | None:
        """Empty the prefix cache, which the engine refuses while a block is in use; None where there is no endpoint."""
        response = await self.http.post("/reset_prefix_cache")
        if response.status_code == 404:
            self.can_reset = False
            return None
        return response.status_code == 200 and bool(response.json()["success"])

    async def watch(self) -> None:
        """Note the pool's peak usage and find out soon when the server dies."""
        while True:
            try:
                self.record.metrics = await self.metrics()
                usage = self.record.metrics.get("vllm:kv_cache_usage_perc", 0.0)
                self.record.usage.add(usage)
                self.record.full_samples += usage >= FULL_POOL
            except httpx.HTTPError:
                await self.check_alive()
            await self.check_alive()
            await asyncio.sleep(0.25)

    # ---- before the traffic ----

    async def prepare(self) -> None:
        """Make the questions and ask each alone, cold and then with its own prefix cached."""
        models = (await self.client.models.list()).data
        self.model, self.context = models[0].id, models[0].max_model_len
        sample = MANUAL[: min(2000, self.context // 2)]
        answer = await self.valid(Question("length", "plain", {"prompt": sample, "max_tokens": 1}))
        if answer is None:
            raise NoAnswerAlone("length")
        prompts = Prompts(self.options.seed, len(sample) / answer.prompt_tokens)
        self.questions = prompts.questions(self.options.questions, self.context)
        self.prompts = prompts
        for question in self.questions:
            await self.ask_alone(question)
        for index in range(self.options.conversations):
            await self.hold_conversation(index)
        print(f"{self.url}: {len(self.alone)} questions asked alone", flush=True)

    async def ask_alone(self, question: Question) -> None:
        if await self.reset_prefix_cache() is False:
            self.record.violation("leak", f"blocks are in use before {question.name}, on an idle server")
        answer = await self.valid(question)
        if answer is None:
            raise NoAnswerAlone(question.name)
        self.alone[question.name] = answer
        if question.kind == "json":
            self.check_json(question, answer)
        if question.kind != "turn":
            await self.checked(question, "alone, with its prefix cached")

    async def hold_conversation(self, index: int) -> None:
        """A chat of some turns alone; every second one begins with the same system prompt."""
        context = self.context
        shared = Prompts(self.options.seed + index % 2, self.prompts.chars_per_token).text(0.2 * context)
        messages = [{"role": "system", "content": shared}]
        turns: list[Question] = []
        for turn in range(self.options.turns):
            messages.append({"role": "user", "content": self.prompts.text(0.06 * context) + " Explain."})
            question = Question(f"chat-{index}-turn-{turn}", "turn", {"messages": [*messages], "max_tokens": 40})
            await self.ask_alone(question)
            answers = self.alone if self.reference is None else self.reference.alone  # equal prompts for both
            messages.append({"role": "assistant", "content": answers[question.name].text})
            turns.append(question)
        self.conversations.append(turns)

    # ---- traffic ----

    def activities(self) -> dict[str, tuple[Callable[[random.Random], Awaitable[None]], int]]:
        """What a worker does next: name -> (function, how often in a deck)."""
        return {
            "question": (self.do_question, 6),
            "conversation": (self.do_conversation, 2),
            "abort": (self.do_abort, 2),
            "sampled": (self.do_sampled, 1),
            "fill": (self.do_fill, 1),
            "burst": (self.do_burst, 1),
            "malformed": (self.do_malformed, 1),
        }

    async def do_question(self, rng: random.Random) -> None:
        await self.checked(rng.choice(self.questions), "under load")

    async def do_conversation(self, rng: random.Random) -> None:
        if not self.conversations:
            return
        for question in rng.choice(self.conversations):
            answer = await self.checked(question, "under load")
            if answer is not None and answer.cached_tokens:
                self.record.traffic["turns with a prefix hit"] += 1

    async def do_abort(self, rng: random.Random) -> None:
        """Cut the connection while the prompt is read, or after some tokens."""
        body = {
            "model": self.model, "prompt": self.prompts.text(rng.uniform(0.05, 0.7) * self.context),
            "max_tokens": 200, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        patience = rng.choice((0.05, 0.5, 2.0, 20.0))

        async def read_some() -> None:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                lines = 0
                async for _ in response.aiter_lines():
                    lines += 1
                    if lines > 12:
                        return

        try:
            await asyncio.wait_for(read_some(), patience)
        except TimeoutError:
            pass
        except httpx.HTTPError as error:
            await self.check_alive()
            self.record.violation("error", f"a request that was to be cut off: {described(error)}")

    async def not_compared(self, name: str, prompt: str, count: int, max_tokens: int, **more: Any) -> None:
        """``count`` answers to a prompt at once, not streamed: the client must not be what limits the load."""
        try:
            completion = await self.client.completions.create(
                model=self.model, prompt=prompt, n=count, max_tokens=max_tokens, logprobs=1, **more
            )
        except openai.OpenAIError as error:
            await self.check_alive()
            self.record.violation("error", f"{name}: {described(error)}")
            return
        columns = [choice.logprobs and choice.logprobs.token_logprobs for choice in completion.choices]
        finite = [column and all(value is not None and math.isfinite(value) for value in column) for column in columns]
        if len(finite) != count or not all(finite):
            self.record.violation("not finite", f"{name}: {str(columns)[:500]}")

    async def do_sampled(self, rng: random.Random) -> None:
        prompt = self.prompts.text(rng.uniform(20, 0.3 * self.context))
        await self.not_compared("sampled", prompt, 4, 24, temperature=1.0, top_p=0.95)

    async def do_fill(self, rng: random.Random) -> None:
        """Unique prompts at once, more than the pool holds, with long answers: what was admitted outgrows the pool."""
        requests = []
        for _ in range(self.options.concurrency):
            prompt = self.prompts.text(rng.choice((0.02, 0.3, 0.7)) * self.context)
            length = rng.randint(self.context // 32, self.context // 8)
            more = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
            requests.append(self.not_compared("fill", prompt, 1, length, **more))
        await asyncio.gather(*requests)

    async def do_burst(self, rng: random.Random) -> None:
        """Four times as many requests at once as workers; the short questions among them are compared."""
        short = [question for question in self.questions if self.alone[question.name].prompt_tokens < 600]
        chosen = [rng.choice(short or self.questions) for _ in range(4 * self.options.concurrency)]
        await asyncio.gather(*(self.checked(question, "in a burst") for question in chosen))

    async def do_malformed(self, rng: random.Random) -> None:
        requests = malformed_requests(self.model, self.context)
        for name in rng.sample(sorted(requests), len(requests)):
            path, body = requests[name]
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                response = await self.http.post(path, content=raw, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                await self.check_alive()
                self.record.violation("malformed", f"{name}: {type(error).__name__}")
                continue
            self.record.traffic[f"malformed: status {response.status_code}"] += 1
            if not 400 <= response.status_code < 500:
                await self.check_alive()
                self.record.violation("malformed", f"{name}: status {response.status_code}: {response.text[:200]}")

    async def perform(self, name: str, rng: random.Random) -> None:
        """One activity."""
        await self.activities()[name][0](rng)
        self.record.traffic[name] += 1

    async def work(self, deck: deque[str], until: float, rng: random.Random) -> None:
        """One worker: activities from the common deck until the segment ends."""
        while time.monotonic() < until:
            if not deck:
                cards = [name for name, (_, count) in self.activities().items() for _ in range(count)]
                rng.shuffle(cards)
                deck.extend(cards)
            await self.perform(deck.popleft(), rng)

    async def run(self) -> None:
        """Traffic in segments until the time is over, with a look at the idle server after each."""
        rng = random.Random(self.options.seed)
        started = time.monotonic()
        end = started + 60 * self.minutes
        deck: deque[str] = deque()
        while time.monotonic() < end:
            until = min(end, time.monotonic() + self.options.segment)
            workers = [self.work(deck, until, random.Random(rng.random())) for _ in range(self.options.concurrency)]
            if not self.record.segments:  # every kind once, however short the run is
                workers += [self.perform(name, random.Random(rng.random())) for name in self.activities()]
            await asyncio.gather(*workers)
            self.record.segments += 1
            self.record.seconds = time.monotonic() - started
            await self.check_idle()
            await self.checked(rng.choice(self.questions), "alone, after traffic")
            print(self.record.progress(), flush=True)
            self.save(self)
        for question in self.questions:
            await self.checked(question, "alone, at the end")
        await self.check_idle()

    async def check_idle(self) -> None:
        """After the last request: nothing runs, no block is held, memory is noted."""
        deadline = time.monotonic() + IDLE_SECONDS
        waiting = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while True:
            # The gauges are those of the last step, which an abort does not cause: one request brings them up to date.
            await self.valid(Question("probe", "plain", {"prompt": "x", "max_tokens": 1}))
            values = await self.metrics()
            busy = sum(values[name] for name in waiting)
            usage = values.get("vllm:kv_cache_usage_perc", 0.0)
            if not busy and not usage:
                break
            if time.monotonic() > deadline:
                self.record.violation("leak", f"idle for {IDLE_SECONDS} s: {busy:.0f} requests, usage {usage:.4f}")
                break
            await asyncio.sleep(1)
        if await self.reset_prefix_cache() is False:
            self.record.violation("leak", "the engine refuses to reset the prefix cache: blocks are in use")
        sample: dict[str, float | None] = {"seconds": round(self.record.seconds, 1), "all_gpus_mib": gpu_memory_mib()}
        sample["rss_mib"] = round(self.server.memory_mib(), 1) if self.server is not None else None
        self.record.memory.append(sample)

    async def drive(self) -> None:
        """The whole run on a server that is up; what goes wrong is in the record."""
        watcher = None
        try:
            await self.prepare()
            self.measure_effects()
            watcher = asyncio.create_task(self.watch())
            traffic = asyncio.create_task(self.run())
            try:
                done, _ = await asyncio.wait((watcher, traffic), return_when=asyncio.FIRST_COMPLETED)
            finally:
                traffic.cancel()
                await asyncio.gather(traffic, return_exceptions=True)
            for task in done:
                await task
            self.record.finished = True
            await self.judge()
        except asyncio.CancelledError:
            if (this := asyncio.current_task()) is not None:
                this.uncancel()
            self.record.notes.append(INTERRUPTED)
            with contextlib.suppress(ServerDied, httpx.HTTPError):
                await self.judge()
        except ServerDied as error:
            self.died(error)
        except NoAnswerAlone:
            pass  # a violation already
        except (httpx.HTTPError, openai.OpenAIError) as error:
            try:
                await self.check_alive()
                self.record.violation("error", described(error))
            except ServerDied as death:
                self.died(death)
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            await self.http.aclose()
            await self.client.close()

    def measure_effects(self) -> None:
        """Bounds from the answers of the reference, if there is one."""
        if self.reference is None:
            return
        for name, answer in self.alone.items():
            if other := self.reference.alone.get(name):
                self.effects.add(answer, other)
        measured = self.effects.bounds(self.options.prefill, self.options.compare_dtype)
        if self.options.tolerance is None and measured is not None:
            self.bounds = measured
        elif self.options.tolerance is None:
            self.record.notes.append(f"too few common tokens to measure bounds: {len(self.effects.tokens)}")
        print(f"effect of quantization: {self.effects.summary()}\nbounds: {self.bounds}", flush=True)

    def died(self, death: ServerDied) -> None:
        """Report the end of the server with the last it said."""
        self.record.violation("died", str(death), log=self.server.log(2000) if self.server is not None else "")

    async def judge(self) -> None:
        """What can be said only at the end: NaN counted by the engine, growth, and whether the run meant anything."""
        await self.check_alive()
        record = self.record
        record.metrics = await self.metrics()
        if corrupted := record.metrics.get("vllm:corrupted_requests_total", 0):
            record.violation("not finite", f"the engine counts {corrupted:.0f} requests with NaN in their logits")
        for name in ("rss_mib", "all_gpus_mib"):
            grown = growth([sample[name] for sample in record.memory])
            if grown is not None and grown > GROWTH_MIB:
                record.violation("growth", f"{name} grew by {grown:.0f} MiB from the middle to the end of the run")
        drift = record.drift.summary()
        for name, bound in (("rms", self.bounds.run_rms), ("p98", self.bounds.run_p98)):
            if bound is not None and drift and drift[name] > bound:
                record.violation("drift", f"{name} over the run is {drift[name]:.4f} nats, at most {bound:.4f}")
        if not self.can_reset:
            record.notes.append("no /reset_prefix_cache (VLLM_SERVER_DEV_MODE=1): leaks are judged by usage alone")
        if not (self.covers and record.finished):
            return
        for name in self.activities():
            if not record.traffic[name] and (name != "conversation" or self.conversations):
                record.violation("coverage", f"no traffic of kind {name}; run longer")
        if self.server is not None:
            if record.usage.largest < FULL_POOL:
                record.violation("coverage", f"the pool was never full: peak usage {record.usage.largest:.1%}")
            for counter in ("num_preemptions", "prefix_cache_hits"):
                if not record.metrics.get(f"vllm:{counter}_total"):
                    record.violation("coverage", f"vllm:{counter} is 0")


def growth(samples: Sequence[float | None]) -> float | None:
    """Mean of the last third minus mean of the middle third; None if not measured or fewer than three samples."""
    values = [value for value in samples if value is not None]
    third = len(values) // 3
    if not third:
        return None
    return statistics.mean(values[-third:]) - statistics.mean(values[third : 2 * third])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, root mean square, percentiles, maximum."""
    if not values:
        return {}
    ordered = sorted(values)
    points = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}
    rms = math.sqrt(statistics.fmean(value**2 for value in values))
    return {"mean": statistics.fmean(values), "rms": rms, **points, "max": ordered[-1]}


# -------------------------------------------------------------------------------------------------- report and start


def found(questions: Sequence[Question], answers: dict[str, Answer]) -> set[str]:
    """Names of the questions whose answer holds what the prompt says."""
    return {q.name for q in questions if q.expected is not None and q.expected in answers[q.name].text}


def compare_dtypes(main: Soak, reference: Soak) -> dict:
    """How the answers given alone by two servers relate, and what the other one did under load."""
    questions = [question for question in main.questions if question.name in reference.alone]
    asked = [question for question in questions if question.name in main.alone]
    right, also = found(asked, reference.alone), found(asked, main.alone)
    lost = [
        {"question": name, "reference": reference.alone[name].text, "answer": main.alone[name].text}
        for name in sorted(right - also)
    ]
    gained = sorted(also - right)
    equal = sum(main.alone[question.name].tokens == reference.alone[question.name].tokens for question in asked)
    return {
        "dtype": main.options.compare_dtype, "questions": len(asked), "equal": equal,
        "with_expected_value": sum(question.expected is not None for question in asked),
        "found": len(also), "found_by_reference": len(right), "lost": lost, "gained": gained,
        "chance": chance_of(len(lost), len(gained)),
        "effect": main.effects.summary(), "reference": observed(reference),
    }  # fmt: skip


def chance_of(lost: int, gained: int) -> float:
    """Probability of at least so many lost among the values that only one of two equally good caches finds."""
    return sum(math.comb(lost + gained, count) for count in range(lost, lost + gained + 1)) / 2 ** (lost + gained)


def observed(soak: Soak) -> dict:
    """What one server did."""
    record = soak.record
    counters = {name: record.metrics.get(f"vllm:{name}_total", 0.0) for name in COUNTERS}
    asked = [question for question in soak.questions if question.name in soak.alone]
    return {
        "finished": record.finished,
        "violation_kinds": dict(record.violation_kinds),
        "violations": record.violations,
        "traffic": dict(record.traffic),
        "segments": record.segments,
        "seconds": record.seconds,
        "checked": {
            **{verdict: record.verdicts[verdict] for verdict in ("equal", "tie", "wrong")},
            "bounds": asdict(soak.bounds),
            "drift": record.drift.summary(),
            "mean drift of answers": record.answer_drift.summary(),
            "margins of ties": record.tie_margins.summary(),
            "furthest": record.furthest,
            "differences": record.differences,
        },
        "values_found_alone": [len(found(asked, soak.alone)), sum(q.expected is not None for q in asked)],
        "pool": {
            "peak_usage": record.usage.largest, "full_share": record.full_share, "samples": record.usage.count,
            **counters,
        },
        "latency_seconds": {
            "first token": record.first_token.summary(),
            "between tokens": record.between_tokens.summary(),
            "whole answer": record.whole.summary(),
        },
        "memory": record.memory,
        "notes": record.notes,
    }  # fmt: skip


def serve_arguments(options: argparse.Namespace, tokenizer: Path | None, cache_dtype: str) -> list[str]:
    """Arguments of ``vllm serve`` for this run; the pool is kept small so that traffic can fill it."""
    arguments = [
        str(options.model), "--kv-cache-dtype", cache_dtype, "--max-model-len", str(options.max_model_len),
        "--max-num-seqs", str(options.max_num_seqs), "--max-num-batched-tokens", str(options.max_num_batched_tokens),
        "--enable-prompt-tokens-details", "--served-model-name", "soak", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if tokenizer is not None:
        arguments += ["--tokenizer", str(tokenizer)]
    if cache_dtype.startswith("oscar"):
        oscar: dict[str, str] = {"prefill": options.prefill}
        if options.artifact is not None:
            oscar["artifact"] = str(options.artifact)
        elif not (options.model / "oscar_int2").is_dir():
            oscar["rotation"] = "hadamard"
        arguments += ["--additional-config", json.dumps({"oscar": oscar})]
        arguments += ["--num-gpu-blocks-override", str(options.blocks)]
    else:
        pages = options.max_model_len / 128
        blocks = int(options.blocks * pages / (pages + WINDOW_BLOCKS))
        arguments += ["--block-size", "128", "--num-gpu-blocks-override", str(blocks)]
    return [*arguments, *options.serve]


def report(soak: Soak | None, options: argparse.Namespace, comparison: dict | None, log: str) -> dict:
    """The run as one JSON object."""
    run = {"finished": False, "violations": [], "violation_kinds": {}} if soak is None else observed(soak)
    return {
        "passed": run["finished"] and not run["violation_kinds"],
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "host": {"python": platform.python_version(), "processor": platform.machine()},
        "server": list(dict.fromkeys(SHOWN_LOG_LINES.findall(log))),
        **run,
        "comparison": comparison,
    }


def numbers(points: dict[str, float], factor: float = 1.0, digits: int = 4) -> str:
    """A distribution in one line."""
    return ", ".join(f"{name} {factor * value:.{digits}f}" for name, value in points.items()) or "none"


def lines_of(run: dict) -> list[str]:
    """What one server did, in a few lines."""
    checked, pool = run["checked"], run["pool"]
    activity = ", ".join(f"{name} {count}" for name, count in sorted(run["traffic"].items()))
    bounds = {name: value for name, value in checked["bounds"].items() if isinstance(value, float)}
    lines = [
        f"traffic        {run['seconds']:.0f} s: {activity}",
        f"answers        {checked['equal']} equal, {checked['tie']} ties, {checked['wrong']} wrong",
        f"bounds         {numbers(bounds)} nats ({checked['bounds']['source']})",
        f"drift          {numbers(checked['drift'])} nats per token",
        f"answers' means {numbers(checked['mean drift of answers'])} nats",
        f"ties' margins  {numbers(checked['margins of ties'])} nats",
        f"pool           peak usage {pool['peak_usage']:.1%}, full in {pool['full_share']:.1%} of {pool['samples']} "
        f"samples, {pool['num_preemptions']:.0f} preemptions, prefix hits {pool['prefix_cache_hits']:.0f} of "
        f"{pool['prefix_cache_queries']:.0f} tokens, {pool['prompt_tokens']:.0f} prompt and "
        f"{pool['generation_tokens']:.0f} generated tokens",
    ]
    lines += [f"{name:15}{numbers(points, 1000, 1)} ms" for name, points in run["latency_seconds"].items()]
    for name, key in (("memory", "rss_mib"), ("all GPUs", "all_gpus_mib")):
        samples = [sample[key] for sample in run["memory"] if sample[key] is not None]
        if samples:
            lines.append(f"{name:15}{samples[0]:.0f} MiB first, {max(samples):.0f} peak, {samples[-1]:.0f} at the end")
    return lines + [f"note           {note}" for note in run["notes"]]


def table(result: dict) -> str:
    """The report in a few lines."""
    lines = list(result["server"])
    if "checked" in result:
        lines += lines_of(result)
    if other := result["comparison"]:
        lines += [f"{other['dtype']} cache:", *("  " + line for line in lines_of(other["reference"]))]
        effect = other["effect"]
        lines += [
            f"effect         {numbers(effect['tokens'])} nats on {effect['count']} tokens alone; on margins "
            f"{numbers(effect['margins'])}",
            f"alone          {other['equal']} of {other['questions']} answers as with {other['dtype']}; values found: "
            f"{other['found_by_reference']}, here {other['found']} of {other['with_expected_value']}, "
            f"lost {len(other['lost'])}, gained {len(other['gained'])} (chance {other['chance']:.2f})",
        ]
    counts = [f"{count} x {kind}" for kind, count in result["violation_kinds"].items()]
    if not result["finished"]:
        counts.append("not finished")
    return "\n".join([*lines, f"result         {', '.join(counts) or 'passed'}"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = top.add_mutually_exclusive_group(required=True)
    target.add_argument("--model", type=Path, help="folder of the model to serve")
    target.add_argument("--base-url", help="a server that runs already, without the /v1")
    top.add_argument("--minutes", type=float, default=20.0, help="of traffic (%(default)s)")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument(
        "--report",
        type=Path,
        default=Path("soak.json"),
        help="where the JSON goes; the servers' logs go beside it (%(default)s)",
    )
    top.add_argument("--concurrency", type=int, default=24, help="workers (%(default)s)")
    top.add_argument("--questions", type=int, default=24, help="questions that are compared (%(default)s)")
    top.add_argument("--conversations", type=int, default=4, help="conversations that are compared (%(default)s)")
    top.add_argument("--turns", type=int, default=3, help="turns of a conversation (%(default)s)")
    top.add_argument(
        "--segment", type=float, help="seconds between two checks of the idle server (a 20th of the run, at least 15)"
    )
    top.add_argument("--tolerance", type=float, help="nats of drift that are allowed (measured; see above)")
    top.add_argument("--request-timeout", type=float, default=600.0, help="seconds (%(default)s)")
    serve = top.add_argument_group("a server of our own")
    serve.add_argument("--tokenizer", type=Path, help="folder (the model's)")
    serve.add_argument("--artifact", type=Path, help="calibration artifact (MODEL/oscar_int2, or a Hadamard rotation)")
    serve.add_argument("--cache-dtype", default="oscar_int2", help="(%(default)s)")
    serve.add_argument("--prefill", default="invariant", choices=tuple(TOLERANCE), help="(%(default)s)")
    serve.add_argument(
        "--compare-dtype",
        help="cache dtype of the server that answers first (auto without --tolerance; none: no such server)",
    )
    serve.add_argument("--compare-minutes", type=float, help="of traffic for it (a fifth of --minutes, at least one)")
    serve.add_argument("--max-model-len", type=int, default=8192)
    serve.add_argument("--max-num-seqs", type=int, default=16)
    serve.add_argument("--max-num-batched-tokens", type=int, default=2048)
    serve.add_argument("--blocks", type=int, help="size of the KV pool (two and a half requests of full length)")
    top.add_argument("serve", nargs="*", help="after --: more arguments of `vllm serve`")
    return top


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options with the defaults that depend on others."""
    top = parser()
    options = top.parse_args(arguments)
    if options.model is not None and not (options.model / "config.json").is_file():
        top.error(f"--model {options.model}: there is no such folder with a config.json; give the folder of a model")
    if options.compare_dtype is None and options.tolerance is None and options.cache_dtype.startswith("oscar"):
        options.compare_dtype = "auto"
    if options.compare_dtype == "none" or options.base_url:
        options.compare_dtype = None
    if options.compare_minutes is None:
        options.compare_minutes = min(options.minutes, max(1.0, options.minutes / 5))
    if options.segment is None:
        options.segment = max(15.0, 3 * options.minutes)
    if options.blocks is None:
        options.blocks = int(FULL_REQUESTS * (options.max_model_len / 128 + WINDOW_BLOCKS))
    return options


def stated_bounds(options: argparse.Namespace, cache_dtype: str) -> Bounds:
    """The bounds without a measurement."""
    if options.tolerance is not None:
        return Bounds.of_tolerance(options.tolerance, "--tolerance")
    kind = options.prefill if cache_dtype.startswith("oscar") else "unquantized"
    return Bounds.of_tolerance(TOLERANCE[kind], f"not measured; the default, {kind}")


class Run:
    """One run of the command line: its servers one after the other, and the report at any time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.reference: Soak | None = None
        self.soak: Soak | None = None
        self.server: Server | None = None

    def save(self, soak: Soak | None = None) -> dict:
        """Write and return the report, whatever there is to report."""
        log = self.server.log_path.read_text(errors="replace") if self.server is not None else ""
        comparison = None
        if self.soak is not None and self.reference is not None:
            comparison = compare_dtypes(self.soak, self.reference)
        result = report(self.soak, self.options, comparison, log)
        unfinished = self.options.report.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        unfinished.replace(self.options.report)
        return result

    def everything(self, work: Path) -> None:
        """Reference server and server, each with its traffic.

        Raises:
            SystemExit: a server does not start, or the reference does not answer.
            KeyboardInterrupt: the run is to end.

        """
        options = self.options
        if options.base_url:
            bounds = stated_bounds(options, options.cache_dtype)
            self.soak = Soak(options.base_url.rstrip("/"), None, options, bounds, options.minutes, self.save)
            asyncio.run(self.soak.drive())
            return
        tokenizer = options.tokenizer
        if tokenizer is None and not (options.model / "tokenizer_config.json").exists():
            tokenizer = write_byte_tokenizer(options.model, work / "tokenizer")
        if options.compare_dtype:
            print(f"server with cache dtype {options.compare_dtype}", flush=True)
            with self.serving(options.compare_dtype, tokenizer, options.compare_minutes, lambda _: None) as reference:
                reference.covers = False
                asyncio.run(reference.drive())
            if not reference.record.finished:
                reasons = [violation["detail"] for violation in reference.record.violations]
                raise SystemExit(
                    f"the {options.compare_dtype} server did not get to the end: {reasons[:3] or INTERRUPTED}"
                )
            self.reference = reference
        print(f"server with cache dtype {options.cache_dtype}", flush=True)
        with self.serving(options.cache_dtype, tokenizer, options.minutes, self.save) as soak:
            self.soak, soak.reference = soak, self.reference
            asyncio.run(soak.drive())
        if self.reference is not None and soak.record.finished:
            comparison = compare_dtypes(soak, self.reference)
            if comparison["chance"] < SIGNIFICANT:
                lost, gained = len(comparison["lost"]), len(comparison["gained"])
                soak.record.violation("lost values", f"{lost}, and {gained} gained: chance {comparison['chance']:.4f}")

    @contextlib.contextmanager
    def serving(
        self, cache_dtype: str, tokenizer: Path | None, minutes: float, save: Callable[[Soak], Any]
    ) -> Iterator[Soak]:
        """A server of our own that answers, stopped at the end."""
        log_path = self.options.report.with_suffix(f".{cache_dtype}.log").resolve()
        self.server = server = Server(serve_arguments(self.options, tokenizer, cache_dtype), log_path)
        try:
            server.wait_until_healthy()
            yield Soak(server.url, server, self.options, stated_bounds(self.options, cache_dtype), minutes, save)
        finally:
            server.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if anything was wrong or the run did not get to its end."""
    options = parse(arguments)
    run = Run(options)
    with tempfile.TemporaryDirectory(prefix="oscar-soak-") as work:
        try:
            run.everything(Path(work))
        except (KeyboardInterrupt, SystemExit) as stop:
            print(str(stop) or INTERRUPTED, file=sys.stderr, flush=True)
    result = run.save()
    print(table(result), flush=True)
    return 0 if result["passed"] else 1


def interruptible() -> None:
    """SIGTERM does what SIGINT does, also in the background of a shell, where SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


if __name__ == "__main__":
    interruptible()
    sys.exit(main())
