# SPDX-License-Identifier: Apache-2.0
"""How far does a quantized cache move a model? Teacher-forced, on a CPU or a GPU.

    python scripts/eval_fidelity.py --model MODEL --artifact default=DIR --artifact reference=DIR

Every configuration reads the same texts with the same BF16 segments: a query at position q reads tokens
sink <= t <= q - recent from quantized pages and the rest exactly. Compared with the unquantized model at every
position behind the first page of history: KL divergence of the next-token distribution (nats), agreement of the top
token, perplexity. Standard errors are over blocks of 64 positions.

Built-in configurations: ``bf16`` (the unquantized model), ``float`` (the same path with exact pages: its KL is
the harness's own rounding), ``naive`` (INT2 without rotation or clipping), ``hadamard`` (Hadamard rotation, clip 0.96
and 0.92), and those of fidelity_baselines.py. ``--artifact NAME=DIR`` adds a calibrated one.

Texts that calibration does not use: ``manual`` (Python's own manual, `pydoc_data.topics`), ``code`` (modules of
Python's standard library), a UTF-8 file, or a folder of HTML pages. Retrieval takes several, commas between.

``--engine transformers`` quantizes inside transformers' attention function with the server's own reference ops;
``--engine vllm`` scores the same windows in vLLM through the plugin (prefill "invariant", one engine process per
configuration), for the configurations that the plugin serves. ``--layers`` adds each layer's own errors
(fidelity_layers.py). ``--retrieval`` finds needles instead of scoring text (fidelity_retrieval.py), ``--exact-match``
answers small tasks (fidelity_exact_match.py); both count right answers, paired with the exact model's
(fidelity_answers.py).
"""

import argparse
import csv
import math
import platform
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fidelity_answers
import fidelity_engine
import fidelity_exact_match
import fidelity_layers
import fidelity_retrieval
from fidelity_baselines import BASELINES, bits_per_element
from fidelity_retrieval import integers
from quickstart import json_object

from benchmarks.results import commit
from calib.capture import AttentionCall, intercept_attention
from calib.data import read_utf8
from calib.pretrained import from_pretrained
from calib.simulate import Segments, Store, page_store, segmented_attention
from oscar_vllm.artifact import Artifact, hadamard_codecs, model_geometry
from oscar_vllm.errors import OscarArtifactError, OscarConfigError, OscarUnsupportedError
from triton_ops.codec import LayerCodec, Quantizer, hadamard, rotation_codec
from triton_ops.layout import PAGE_TOKENS, PageLayout, page_head_size

FIELDS = (
    "model", "configuration", "text", "windows", "tokens", "sink", "recent", "positions", "kl", "kl_stderr", "top1",
    "perplexity", "seconds", "commit", "versions", "command", "bits", "perplexity_change", "change_stderr", "engine",
)  # fmt: skip

BLOCK = 64
"""Positions in a block of the standard errors."""

CODE_MODULES = ("argparse", "tarfile", "shutil", "subprocess", "typing", "zipfile", "ast", "configparser")
"""Modules of the standard library in the text ``code``."""


@dataclass(frozen=True)
class Configuration:
    """A cache to evaluate.

    Attributes:
        bits: stored bits per key or value element of history, scales and means included.
        store: layer index -> what history looks like after the cache, None where it stays exact; None: plain attention.
        engine: arguments of vLLM's ``LLM`` that serve it; None: not served.

    """

    bits: float
    store: Callable[[int], Store | None] | None
    engine: dict[str, Any] | None = None

    def served(self, **oscar: Any) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``, with other options ``oscar`` of the plugin; empty: vLLM's own cache.

        Raises:
            SystemExit: vLLM does not serve it.

        """
        if self.engine is None:
            raise SystemExit("vLLM serves bf16, uncalibrated and --artifact NAME=DIR only")
        if not self.engine:
            return {}
        options = self.engine["additional_config"]["oscar"] | oscar
        return self.engine | {"additional_config": {"oscar": options}}

    def attention(self, segments: Segments) -> Callable[[AttentionCall], Tensor]:
        """The handler for `intercept_attention`."""
        store = self.store
        if store is None:
            return lambda call: call.attend()
        return lambda call: segmented_attention(call, store(call.layer), segments)


def rotated(rotation: Tensor, heads: int, key_clip: float, value_clip: float) -> LayerCodec:
    """One rotation [d, d] for every head, token zeros, the reference's quantizer."""
    matrices = rotation.expand(heads, *rotation.shape)
    return rotation_codec(
        matrices,
        matrices,
        zero="token",
        key_quantizer=Quantizer("minmax", key_clip),
        value_quantizer=Quantizer("minmax", value_clip),
    )


def _pages(
    codecs: dict[int, LayerCodec], head_size: int, segments: Segments, oscar: dict[str, Any] | None
) -> Configuration:
    """A cache of INT2 pages for heads of ``head_size``; ``oscar``: the plugin's options that serve it."""
    codec = next(iter(codecs.values()))
    layout = PageLayout(codec.head_size, codec.zero)
    moved: dict[int, LayerCodec] = {}

    def store(layer: int) -> Store | None:
        if layer not in codecs:
            return None

        def stored(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if layer not in moved:
                moved[layer] = codecs[layer].to(key.device)
            return page_store(moved[layer], segments.sink)(key, value)

        return stored

    engine = None
    if oscar is not None:
        options = {"sink": segments.sink, "recent": segments.recent, "prefill": "invariant", **oscar}
        engine = {"kv_cache_dtype": "oscar_int2", "additional_config": {"oscar": options}}
    return Configuration(layout.page_bytes * 8 / (2 * PAGE_TOKENS * head_size), store, engine)


def configurations(
    names: list[str], artifacts: dict[str, Path], config: Any, segments: Segments
) -> dict[str, Configuration]:
    """Name -> `Configuration`, in the order asked for; ``artifacts``: name -> folder.

    Raises:
        SystemExit: a name is unknown.
        OscarArtifactError: an artifact is unreadable or of another model.

    """
    geometry = model_geometry(config)
    size, layers, heads = geometry["head_size"], geometry["num_hidden_layers"], geometry["num_key_value_heads"]

    padded = page_head_size(size)  # handlers get heads as the server stores them

    def every_layer(codec: LayerCodec) -> Configuration:
        return _pages(dict.fromkeys(range(layers), codec), size, segments, None)

    builtin: dict[str, Callable[[], Configuration]] = {
        "bf16": lambda: Configuration(16, None, {}),
        "float": lambda: Configuration(16, lambda layer: None),
        "naive": lambda: every_layer(rotated(torch.eye(padded, dtype=torch.float64), heads, 1.0, 1.0)),
        "hadamard": lambda: every_layer(rotated(hadamard(padded), heads, 0.96, 0.92)),
        "uncalibrated": lambda: _pages(hadamard_codecs(layers, heads, size), size, segments, {"rotation": "hadamard"}),
    }

    def baseline(name: str) -> Configuration:
        return Configuration(bits_per_element(name, padded) * padded / size, lambda layer: BASELINES[name])

    builtin |= {name: partial(baseline, name) for name in BASELINES}
    chosen: dict[str, Configuration] = {}
    for name in names:
        if name not in builtin:
            raise SystemExit(f"configuration {name!r} is unknown; use {', '.join(builtin)} or --artifact NAME=DIR")
        chosen[name] = builtin[name]()
    for name, folder in artifacts.items():
        artifact = Artifact.load(folder)
        artifact.check_model(config)
        chosen[name] = _pages(artifact.layers, size, segments, {"artifact": str(Path(folder).resolve())})
    return chosen


# ------------------------------------------------------------------------------------------------ text


class _HtmlText(HTMLParser):
    """The text of an HTML page; block elements end a line."""

    _BLOCKS = frozenset(("p", "div", "li", "pre", "h1", "h2", "h3", "h4", "tr", "dt", "dd", "br", "table"))
    _HIDDEN = frozenset(("script", "style", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self._HIDDEN
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self._HIDDEN
        if tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def _html_text(page: Path) -> str:
    parser = _HtmlText()
    parser.feed(read_utf8(page))
    return re.sub(r"\n\s*\n+", "\n\n", "".join(parser.parts)).strip()


def module_source(library: Path, module: str) -> str:
    """A module's source; of a package (zipfile since Python 3.12) that of its ``__init__``."""
    path = library / f"{module}.py"
    return (path if path.exists() else library / module / "__init__.py").read_text(encoding="utf-8")


def read_text(name: str) -> str:
    """An evaluation text.

    Args:
        name: ``manual``, ``code``, a UTF-8 file or a folder of HTML pages.

    Raises:
        OscarConfigError: the file cannot be read or is not UTF-8.

    """
    if name == "manual":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    if name == "code":
        library = Path(sysconfig.get_path("stdlib"))
        return "\n\n".join(module_source(library, module) for module in CODE_MODULES)
    path = Path(name)
    if path.is_dir():
        return "\n\n".join(_html_text(page) for page in sorted(path.glob("*.html")))
    return read_utf8(path)


def evaluation_windows(text: str, tokenizer: Any, count: int, length: int) -> list[Tensor]:
    """``count`` windows of ``length`` tokens, evenly spaced over the text."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(tokens) < count * length:
        raise SystemExit(f"the text has {len(tokens)} tokens, {count} windows of {length} need {count * length}")
    starts = torch.linspace(0, len(tokens) - length, count).long().tolist()
    return [tokens[start : start + length] for start in starts]


# ------------------------------------------------------------------------------------------------ scores


@dataclass
class Score:
    """Sums over positions, window by window.

    Attributes:
        kl: [n] per window, KL divergence from the exact model, nats.
        top1: [n] per window, 1 where the most likely token is the same.
        loss: [n] per window, negative log-probability of the text's next token.
        change: [n] per window, loss minus the exact model's.
        seconds: time spent.

    """

    kl: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    change: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, exact: Tensor, actual: Tensor, following: Tensor) -> None:
        """One window: log-probabilities [n, vocabulary] of the exact and this model, and the tokens [n] that follow."""
        kl, top1 = [], []
        for p, q in zip(exact.split(256), actual.split(256), strict=True):
            kl.append(torch.linalg.vecdot(p.exp(), p - q))
            top1.append((p.argmax(-1) == q.argmax(-1)).float())
        self.kl.append(torch.cat(kl).cpu())
        self.top1.append(torch.cat(top1).cpu())
        loss, exact_loss = (-x.gather(1, following[:, None])[:, 0].cpu() for x in (actual, exact))
        self.loss.append(loss)
        self.change.append(loss - exact_loss)

    def row(self) -> dict[str, float]:
        """The means by the names of `FIELDS`."""
        change = float(torch.cat(self.change).mean())
        return {
            "positions": sum(len(x) for x in self.kl),
            "kl": float(torch.cat(self.kl).mean()),
            "kl_stderr": standard_error(self.kl),
            "top1": float(torch.cat(self.top1).mean()),
            "perplexity": math.exp(torch.cat(self.loss).mean()),
            "perplexity_change": math.exp(change) - 1,
            "change_stderr": math.exp(change) * standard_error(self.change),
            "seconds": self.seconds,
        }


def standard_error(values: list[Tensor]) -> float:
    """Of the mean over positions, from the spread of the means of blocks of `BLOCK` positions."""
    means = torch.cat([window[: len(window) // BLOCK * BLOCK].view(-1, BLOCK).mean(1) for window in values])
    return float(means.std() / math.sqrt(len(means)))


def first_position(segments: Segments) -> int:
    """The first position compared: the first page of history is behind it."""
    return segments.sink + segments.recent + PAGE_TOKENS


def log_probabilities(model: PreTrainedModel, window: Tensor, first: int, start: int = 0) -> Tensor:
    """[n, vocabulary] float32 log-probabilities of the tokens after tokens first, first + 1, …

    ``start``: position of the window's first token. A model with rotary embeddings does not notice, a cache may.
    """
    judged = torch.arange(first, len(window) - 1, device=model.device)
    moved = {"position_ids": torch.arange(start, start + len(window), device=model.device)[None]} if start else {}
    logits = model(window[None].to(model.device), use_cache=False, logits_to_keep=judged, **moved).logits
    return logits[0].float().log_softmax(-1)


def evaluate(
    model: PreTrainedModel, windows: list[Tensor], chosen: dict[str, Configuration], segments: Segments, start: int = 0
) -> dict[str, Score]:
    """Scores by configuration. Window by window, so that one window's exact distribution is kept at a time.

    Args:
        model: a transformers model.
        windows: token ids [T].
        chosen: `Configuration` by name.
        segments: the BF16 windows.
        start: position of each window's first token.

    """
    first = first_position(segments)
    scores = {name: Score() for name in chosen}
    for window in tqdm(windows, desc="windows", unit="window"):
        with intercept_attention(model, lambda call: call.attend()):
            exact = log_probabilities(model, window, first, start)
        following = window[first + 1 :].to(exact.device)
        for name, configuration in chosen.items():
            begin = time.monotonic()
            with intercept_attention(model, configuration.attention(segments)):
                actual = exact if configuration.store is None else log_probabilities(model, window, first, start)
            scores[name].seconds += time.monotonic() - begin
            scores[name].add(exact, actual, following)
    return scores


def evaluate_engine(
    model: str,
    windows: list[Tensor],
    chosen: dict[str, Configuration],
    segments: Segments,
    dtype: str,
    common: dict[str, Any],
) -> dict[str, Score]:
    """The same scores from vLLM, with arguments ``common`` of every ``LLM``; the exact model is vLLM's own with its
    unquantized cache."""
    engines = {name: configuration.served() for name, configuration in chosen.items()}
    first = first_position(segments)
    scores = {name: Score() for name in chosen}
    with fidelity_engine.scored(model, windows, first, dtype, common) as exact:
        for name, engine in engines.items():
            start = time.monotonic()
            with ExitStack() as stack:
                actual = exact  # an engine without arguments is the exact one
                if engine:
                    scored = fidelity_engine.scored(model, windows, first, dtype, common | engine)
                    actual = stack.enter_context(scored)
                for window, p, q in zip(windows, exact, actual, strict=True):
                    scores[name].add(torch.from_numpy(p[:]), torch.from_numpy(q[:]), window[first + 1 :])
            scores[name].seconds = time.monotonic() - start
    return scores


def table(rows: dict[str, dict[str, float]]) -> str:
    """The scores as text."""
    head = ("configuration", "bits", "KL", "± s.e.", "top-1", "perplexity", "change", "± s.e.")
    lines = ["{:24s} {:>5s} {:>9s} {:>9s} {:>8s} {:>11s} {:>8s} {:>7s}".format(*head)]
    for name, row in rows.items():
        lines.append(
            f"{name:24s} {row['bits']:5.2f} {row['kl']:9.5f} {row['kl_stderr']:9.5f} {row['top1']:8.2%} "
            f"{row['perplexity']:11.4f} {row['perplexity_change']:+8.2%} {row['change_stderr']:7.2%}"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ files


def check_csv(path: Path, columns: tuple[str, ...] = FIELDS) -> bool:
    """Whether a file that rows are to be added to is new; its folder is made.

    Raises:
        OscarConfigError: the file has other columns, or it cannot be written.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.stat().st_size:
            return True
        with open(path, "r+", newline="", encoding="utf-8", errors="replace") as file:
            found = next(csv.reader(file))
    except OSError as error:
        raise OscarConfigError(f"--csv {path} cannot be written: {error.strerror}; choose another file") from None
    if found != list(columns):
        raise OscarConfigError(f"--csv {path} has other columns; choose another file")
    return False


def append_csv(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = FIELDS) -> None:
    """Add rows, with a header if the file is new. Rows are never replaced.

    Raises:
        OscarConfigError: see `check_csv`.

    """
    new = check_csv(path, columns)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def provenance(script: str, dtype: str) -> dict[str, str]:
    """The commit, versions and command line of this run, for the CSV file."""
    packages = f"torch {torch.__version__} transformers {version('transformers')}"
    return {
        "commit": commit() or "unknown",
        "versions": f"python {platform.python_version()} {packages} {dtype}",
        "command": " ".join(_words(script, sys.argv[1:])),
    }


def _words(script: str, arguments: list[str]) -> Iterator[str]:
    """The command line for the record: of paths only the last part, of artifacts only the name."""
    yield f"python scripts/{script}"
    previous = ""
    for word in arguments:
        if previous == "--artifact":
            word = "=".join([*word.split("=")[:-1], "DIR"])
        elif previous in ("--model", "--text") and "/" in word:
            name, equals, path = word.rpartition("=")
            word = name + equals + Path(path).name
        if previous != "--csv" and word != "--csv":
            yield shlex.quote(word)
        previous = word


# ------------------------------------------------------------------------------------------------ command line


@contextmanager
def refusals() -> Iterator[None]:
    """What is refused inside ends the program with one line.

    Raises:
        SystemExit: a model, an artifact, a text or an option cannot be used.

    """
    try:
        yield
    except (OscarArtifactError, OscarConfigError, OscarUnsupportedError) as error:
        raise SystemExit(f"error: {error}") from error


def positive(text: str) -> int:
    """Of an option that counts something.

    Raises:
        argparse.ArgumentTypeError: it is no integer from 1 on.

    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def load_model(model: str, dtype: str, device: str) -> PreTrainedModel:
    """A transformers model on a device.

    Raises:
        OscarConfigError: it cannot be loaded, or the device does not exist.

    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OscarConfigError(f"--device {device} cannot be used ({reason}); use one such as cpu or cuda") from error
    return from_pretrained(AutoModelForCausalLM, model, dtype=dtype).to(device).eval()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of a transformers model")
    parser.add_argument("--configurations", default="bf16,float,naive,hadamard", help="built-in ones (%(default)s)")
    parser.add_argument("--artifact", action="append", default=[], metavar="NAME=DIR", help="calibrated; repeatable")
    parser.add_argument("--text", default="manual", help="manual, code, a file or a folder of HTML pages (%(default)s)")
    parser.add_argument("--windows", type=positive, default=4, help="windows (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=1500, help="tokens per window (%(default)s)")
    parser.add_argument(
        "--start", type=int, default=0, help="position of a window's first token, in transformers (%(default)s)"
    )
    parser.add_argument("--sink", type=int, default=64, help="BF16 tokens at the start (%(default)s)")
    parser.add_argument("--recent", type=int, default=256, help="BF16 tokens at the end (%(default)s)")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"), help="(%(default)s)")
    parser.add_argument(
        "--engine-options", type=json_object, default={}, help="with --engine vllm: arguments of vllm.LLM, as JSON"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument(
        "--csv",
        type=Path,
        help="append rows to this file; those of --layers, of --retrieval and of answers go to "
        "files beside it whose names end in _layers, _retrieval and _answers",
    )
    parser.add_argument("--layers", action="store_true", help="also each layer's attention KL and output error")
    parser.add_argument("--trials", type=positive, default=4, help="prompts per seed, length and text (%(default)s)")
    parser.add_argument("--seeds", type=integers, default=[0], help="of prompts, commas between (0)")
    parser.add_argument("--batch", type=positive, default=1, help="prompts read at a time (%(default)s)")
    fidelity_retrieval.add_arguments(parser)
    fidelity_exact_match.add_arguments(parser)
    return parser


def _check_options(options: argparse.Namespace, segments: Segments) -> None:
    """Refuse what would give an error or nonsense after minutes.

    Raises:
        OscarConfigError: a value cannot be used, or two options contradict each other.

    """
    if segments.sink < 0:
        raise OscarConfigError(f"--sink {segments.sink} is out of range; use 0 or more")
    if segments.recent < PAGE_TOKENS:
        raise OscarConfigError(f"--recent {segments.recent} is out of range; use {PAGE_TOKENS} or more")
    if options.start < 0:
        raise OscarConfigError(f"--start {options.start} is out of range; use 0 or more")
    if not options.retrieval and "," in options.text and not Path(options.text).exists():
        raise OscarConfigError(f"--text {options.text}: several texts need --retrieval; give one")
    if options.engine == "vllm":
        for name in ("start", "layers", "exact_match"):
            if getattr(options, name):
                raise OscarConfigError(f"--{name.replace('_', '-')} needs --engine transformers")
    first = first_position(segments)
    fewest = first + 1 + 2 * BLOCK
    if not options.retrieval and options.tokens < fewest:
        raise OscarConfigError(
            f"--tokens {options.tokens} is too few: the first {first} tokens are not compared, and a standard error "
            f"needs two blocks of {BLOCK}; use at least {fewest}"
        )
    if options.retrieval:
        fidelity_retrieval.check_options(options)
    for path, columns in _files(options).items():
        check_csv(path, columns)


def _files(options: argparse.Namespace) -> dict[Path, tuple[str, ...]]:
    """The CSV files of a run, and their columns."""
    if options.csv is None:
        return {}
    if options.retrieval:
        suffixes = {"_retrieval": fidelity_retrieval.FIELDS, "_answers": fidelity_answers.FIELDS}
    elif options.exact_match:
        suffixes = {"_answers": fidelity_answers.FIELDS}
    else:
        suffixes = {"": FIELDS} | ({"_layers": fidelity_layers.FIELDS} if options.layers else {})
    return {options.csv.with_name(options.csv.stem + suffix + options.csv.suffix): columns
            for suffix, columns in suffixes.items()}  # fmt: skip


@refusals()
def main() -> None:
    """Evaluate, print one table, append to the CSV file."""
    options = _parser().parse_args()
    segments = Segments(options.sink, options.recent)
    _check_options(options, segments)
    artifacts = {}
    for item in options.artifact:
        name, _, folder = item.partition("=")
        artifacts[name] = Path(folder or name)
    config = from_pretrained(AutoConfig, options.model)
    chosen = configurations([x for x in options.configurations.split(",") if x], artifacts, config, segments)
    if not chosen:
        raise OscarConfigError("no cache is to be evaluated; give --configurations or --artifact NAME=DIR")
    tokenizer = from_pretrained(AutoTokenizer, options.model)
    shared = {
        "model": Path(options.model).name,
        "text": Path(options.text).name,
        "windows": options.windows,
        "tokens": options.tokens,
        "sink": options.sink,
        "recent": options.recent,
        "engine": options.engine,
        **provenance("eval_fidelity.py", options.dtype),
    }
    ids = {name: f" ({Artifact.load(folder).artifact_id})" for name, folder in artifacts.items()}
    load = partial(load_model, options.model, options.dtype, options.device)

    def record(*kinds: list[dict[str, Any]]) -> None:
        for (path, columns), rows in zip(_files(options).items(), kinds, strict=False):  # no files without --csv
            complete = [shared | row | {"configuration": row["configuration"] + ids.get(row["configuration"], "")}
                        for row in rows]  # fmt: skip
            append_csv(path, [{name: row[name] for name in columns} for row in complete], columns)

    if options.retrieval:
        texts = {Path(name).name: read_text(name) for name in options.text.split(",")}
        if options.engine == "vllm":
            by_depth, answers = fidelity_retrieval.evaluate_engine(tokenizer, texts, chosen, segments, options)
        else:
            with torch.inference_mode():
                evaluated = fidelity_retrieval.evaluate(load(), tokenizer, texts, chosen, segments, options)
            by_depth, answers = evaluated
        print(fidelity_retrieval.table(by_depth))
        print(fidelity_answers.table(answers))
        record(by_depth, answers)
        return
    windows = evaluation_windows(read_text(options.text), tokenizer, options.windows, options.tokens)
    if options.exact_match:
        with torch.inference_mode():
            answers = fidelity_exact_match.evaluate(load(), tokenizer, windows, chosen, segments, options)
        print(fidelity_answers.table(answers))
        record(answers)
        return
    layers = None
    if options.engine == "vllm":
        scores = evaluate_engine(options.model, windows, chosen, segments, options.dtype, options.engine_options)
    else:
        model = load()
        with torch.inference_mode():
            scores = evaluate(model, windows, chosen, segments, options.start)
            if options.layers:
                layers = fidelity_layers.measure(model, windows, chosen, segments)
    rows = {name: {"bits": chosen[name].bits} | score.row() for name, score in scores.items()}
    print(table(rows))
    scored = [{"configuration": name} | row for name, row in rows.items()]
    if layers is None:
        record(scored)
    else:
        print(fidelity_layers.summary(layers, {name: row["kl"] for name, row in rows.items()}))
        record(scored, fidelity_layers.rows(layers))


if __name__ == "__main__":
    main()
