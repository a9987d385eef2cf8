# SPDX-License-Identifier: Apache-2.0
"""How far does a quantized cache move a model? Teacher-forced, inside transformers, with the server's own ops.

    python scripts/eval_fidelity.py --model MODEL --artifact default=DIR --artifact reference=DIR

Every configuration reads the same texts with the same BF16 segments: a query at position q reads tokens
sink <= t <= q - recent from quantized pages and the rest exactly. Compared with the unquantized model at every
position behind the first page of history: KL divergence of the next-token distribution (nats), agreement of the top
token, perplexity. The default text is Python's own manual (`pydoc_data.topics`), which calibration does not use.

Built-in configurations: ``bf16`` (the unquantized model), ``float`` (the same path with exact pages: its KL is
the harness's own rounding), ``naive`` (INT2 without rotation or clipping), ``hadamard`` (Hadamard rotation, clip 0.96
and 0.92). ``--artifact NAME=DIR`` adds a calibrated one.
"""

import argparse
import csv
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from calib.capture import AttentionCall, intercept_attention
from calib.simulate import QuantizedCache, Segments, segmented_attention
from oscar_vllm.artifact import Artifact, model_geometry
from triton_ops.codec import LayerCodec, Quantizer, hadamard, rotation_codec

FIELDS = (
    "model", "configuration", "text", "windows", "tokens", "sink", "recent", "positions", "kl", "kl_stderr", "top1",
    "perplexity", "seconds", "commit", "versions", "command",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """Figures of one configuration: means over positions; ``kl_stderr`` over windows."""

    kl: float
    kl_stderr: float
    top1: float
    perplexity: float
    positions: int
    seconds: float


Attention = Callable[[AttentionCall], Tensor]


def rotated(rotation: Tensor, layers: int, heads: int, key_clip: float, value_clip: float) -> dict[int, LayerCodec]:
    """One rotation [d, d] for every layer and head, token zeros, the reference's quantizer."""
    matrices = rotation.expand(heads, *rotation.shape)
    codec = rotation_codec(
        matrices,
        matrices,
        zero="token",
        key_quantizer=Quantizer("minmax", key_clip),
        value_quantizer=Quantizer("minmax", value_clip),
    )
    return dict.fromkeys(range(layers), codec)


def exact_attention(call: AttentionCall) -> Tensor:
    """The unquantized model."""
    return call.attend()


def configurations(
    names: list[str], artifacts: dict[str, Artifact], config: Any, segments: Segments
) -> dict[str, Attention]:
    """Name -> attention handler, in the order asked for."""
    geometry = model_geometry(config)
    size, layers, heads = geometry["head_size"], geometry["num_hidden_layers"], geometry["num_key_value_heads"]
    builtin: dict[str, Callable[[], Attention]] = {
        "bf16": lambda: exact_attention,
        "float": lambda: lambda call: segmented_attention(call, None, segments),
        "naive": lambda: QuantizedCache(
            rotated(torch.eye(size, dtype=torch.float64), layers, heads, 1.0, 1.0), segments
        ),
        "hadamard": lambda: QuantizedCache(rotated(hadamard(size), layers, heads, 0.96, 0.92), segments),
    }
    chosen: dict[str, Attention] = {}
    for name in names:
        if name not in builtin:
            raise SystemExit(f"configuration {name!r} is unknown; use {', '.join(builtin)} or --artifact NAME=DIR")
        chosen[name] = builtin[name]()
    for name, artifact in artifacts.items():
        artifact.check_model(config)
        chosen[name] = QuantizedCache(artifact.layers, segments)
    return chosen


def read_text(paths: list[Path]) -> tuple[str, str]:
    """(name, text) of the evaluation text."""
    if paths:
        return "+".join(path.name for path in paths), "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    from pydoc_data.topics import topics

    return "pydoc_data.topics", "\n\n".join(topics[key] for key in sorted(topics))


def evaluation_windows(text: str, tokenizer: Any, count: int, length: int) -> list[Tensor]:
    """``count`` windows of ``length`` tokens, evenly spaced over the text."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(tokens) < count * length:
        raise SystemExit(f"the text has {len(tokens)} tokens, {count} windows of {length} need {count * length}")
    starts = torch.linspace(0, len(tokens) - length, count).long().tolist()
    return [tokens[start : start + length] for start in starts]


def log_probabilities(model: PreTrainedModel, window: Tensor, first: int) -> Tensor:
    """[n, vocabulary] float32 log-probabilities of the tokens after positions first, first + 1, …"""
    positions = torch.arange(first, len(window) - 1)
    logits = model(window[None].to(model.device), use_cache=False, logits_to_keep=positions).logits
    return logits[0].float().log_softmax(-1)


def evaluate(
    model: PreTrainedModel, windows: list[Tensor], attentions: dict[str, Attention], segments: Segments
) -> dict[str, Score]:
    """Scores by configuration. Window by window, so that one window's exact distribution is kept at a time."""
    first = segments.sink + segments.recent + 128
    sums: dict[str, dict[str, list[float]]] = {name: {"kl": [], "top1": [], "loss": [], "s": []} for name in attentions}
    for window in tqdm(windows, desc="windows", unit="window"):
        with intercept_attention(model, exact_attention):
            exact = log_probabilities(model, window, first)
        probability, top = exact.exp(), exact.argmax(-1)
        negative_entropy = torch.linalg.vecdot(probability, exact)
        following = window[first + 1 :, None].to(exact.device)
        for name, attention in attentions.items():
            start = time.monotonic()
            with intercept_attention(model, attention):
                actual = exact if attention is exact_attention else log_probabilities(model, window, first)
            entry = sums[name]
            entry["kl"].append(float((negative_entropy - torch.linalg.vecdot(probability, actual)).mean()))
            entry["top1"].append(float((top == actual.argmax(-1)).float().mean()))
            entry["loss"].append(float(-actual.gather(1, following).mean()))
            entry["s"].append(time.monotonic() - start)
    positions = len(windows) * (len(windows[0]) - 1 - first)
    return {
        name: Score(
            kl=_mean(entry["kl"]),
            kl_stderr=float(torch.tensor(entry["kl"]).std() / math.sqrt(len(windows))),
            top1=_mean(entry["top1"]),
            perplexity=math.exp(_mean(entry["loss"])),
            positions=positions,
            seconds=sum(entry["s"]),
        )
        for name, entry in sums.items()
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(scores: dict[str, Score]) -> str:
    """The scores as text."""
    lines = [f"{'configuration':24s} {'KL':>9s} {'± s.e.':>9s} {'top-1':>8s} {'perplexity':>11s}"]
    for name, score in scores.items():
        lines.append(f"{name:24s} {score.kl:9.5f} {score.kl_stderr:9.5f} {score.top1:8.2%} {score.perplexity:11.4f}")
    return "\n".join(lines)


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows, with a header if the file is new. Rows are never replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of a transformers model")
    parser.add_argument("--configurations", default="bf16,float,naive,hadamard", help="built-in ones (%(default)s)")
    parser.add_argument("--artifact", action="append", default=[], metavar="NAME=DIR", help="calibrated; repeatable")
    parser.add_argument("--text", action="append", default=[], type=Path, help="UTF-8 file; repeatable, joined")
    parser.add_argument("--windows", type=int, default=4, help="windows (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens per window (%(default)s)")
    parser.add_argument("--sink", type=int, default=64, help="BF16 tokens at the start (%(default)s)")
    parser.add_argument("--recent", type=int, default=256, help="BF16 tokens at the end (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    return parser


def main() -> None:
    """Evaluate, print one table, append to the CSV file."""
    options = _parser().parse_args()
    segments = Segments(options.sink, options.recent)
    artifacts = {}
    for item in options.artifact:
        name, _, folder = item.partition("=")
        artifacts[name] = Artifact.load(folder or name)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text_name, text = read_text(options.text)
    windows = evaluation_windows(text, tokenizer, options.windows, options.tokens)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device).eval()
    names = [name for name in options.configurations.split(",") if name]
    with torch.inference_mode():
        attentions = configurations(names, artifacts, model.config, segments)
        scores = evaluate(model, windows, attentions, segments)
    print(table(scores))
    if options.csv is not None:
        command = "python scripts/eval_fidelity.py " + " ".join(
            f"{flag} {value}"
            for flag, value in (
                ("--model", Path(options.model).name),
                ("--configurations", options.configurations),
                *(("--artifact", item.partition("=")[0] + "=DIR") for item in options.artifact),
                *(("--text", path.name) for path in options.text),
                ("--windows", options.windows),
                ("--tokens", options.tokens),
                ("--sink", options.sink),
                ("--recent", options.recent),
                ("--dtype", options.dtype),
            )
        )
        libraries = f"torch {torch.__version__} transformers {version('transformers')}"
        shared = {
            "model": Path(options.model).name,
            "text": text_name,
            "windows": options.windows,
            "tokens": options.tokens,
            "sink": options.sink,
            "recent": options.recent,
            "commit": _commit(),
            "versions": f"python {platform.python_version()} {libraries}",
            "command": command,
        }
        append_csv(
            options.csv,
            [
                shared
                | {
                    "configuration": name + (f" ({artifacts[name].artifact_id})" if name in artifacts else ""),
                    "positions": score.positions,
                    "kl": f"{score.kl:.6f}",
                    "kl_stderr": f"{score.kl_stderr:.6f}",
                    "top1": f"{score.top1:.5f}",
                    "perplexity": f"{score.perplexity:.5f}",
                    "seconds": f"{score.seconds:.1f}",
                }
                for name, score in scores.items()
            ],
        )


if __name__ == "__main__":
    main()
