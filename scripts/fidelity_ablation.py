# SPDX-License-Identifier: Apache-2.0
"""What would a change of the recipe do at equal bits? KL paired with the unchanged recipe's, for docs/fidelity.md.

    python scripts/fidelity_ablation.py --model MODEL --windows 16 --tokens 2048

All recipes are fitted on the same bundled text and read the same other text, which no table of docs/fidelity.md uses
(PyTorch's own documentation strings and library modules that are not in the text ``code``). Unchanged is the default
recipe with spreading, attended 1, and kappa 1 for keys and values, so that nothing is chosen. The changes:

* ``key levels middle``, ``value levels middle``: codes are read back in the middle of their cells, which gives back
  less than was stored (`codec.unbiased_gain`); ``levels middle``: both.
* ``values about their mean``: the calibrated mean value is subtracted before values are quantized.
* ``value kappa 1.1``, ``key kappa 1.1``, ``key kappa 1.2``: instead of 1.
* ``4 bits`` at most instead of 8; ``no spreading``; both.
* ``attended 0``, ``attended 0.3``, ``attended 3``: the weight of keys by what outputs may lose by their errors, instead
  of 1; 0 counts all keys alike.
* ``value basis W_O``: values' rotation from the eigenvectors of the outputs' moment as W_O reads it, G^(1/2) C G^(1/2)
  with G = W_O^T W_O of the head's group.
* ``value basis plain``: from the values' own moment.
* ``value basis none``: a Hadamard rotation alone.
* ``queries by attention``: M_Q with each query weighted by what its attention may lose by errors in history, sum over t
  of p_t (1 - p_t), instead of what its output may lose (`LayerStatistics.attending_moment`).
* ``queries by W_O``: by what its output, as W_O reads it, may lose: sum over t of p_t^2 |W_O (v_t - o)|^2.
* ``kappa by layer``, ``kappa by head``: of keys, the best of `KEY_CONSTANTS` by the attention's KL on held-out text.

The ratio is of mean KL; its standard error is over blocks of 64 positions, paired (ratio estimator).
"""

import argparse
import math
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval_fidelity import (
    BLOCK,
    Score,
    append_csv,
    check_csv,
    evaluation_windows,
    first_position,
    load_model,
    log_probabilities,
    module_source,
    positive,
    provenance,
    refusals,
)
from fidelity_layers import attention_kl

from calib.capture import AttentionCall, attention_weights, intercept_attention
from calib.data import load_documents, token_windows
from calib.pretrained import from_pretrained
from calib.quantizer_search import KEY_CONSTANTS
from calib.quantizer_search import QUERIES as SEARCHED_QUERIES
from calib.rotation import Recipe, layer_basis, rotation
from calib.simulate import QuantizedCache, Segments, grouped_logits, quantized_keys, segmented_attention
from calib.statistics import MIN_ATTENDING, QUERIES, LayerStatistics, Statistics
from oscar_vllm.errors import OscarConfigError
from triton_ops.codec import LayerCodec
from triton_ops.reference import MIN_SCALE

FIELDS = ("model", "change", "windows", "tokens", "positions", "kl", "ratio", "ratio_stderr", "calibration_windows",
          "calibration_tokens", "seed", "commit", "versions", "command")  # fmt: skip

UNCHANGED = Recipe(spread="groups", attended=1.0)
KAPPA = 1.0
MODULES = ("turtle", "doctest", "difflib", "inspect", "optparse", "mailbox", "imaplib", "pickletools", "statistics")
"""Modules of the standard library in the text."""


def other_text() -> str:
    """Documentation strings of PyTorch and library modules."""
    library = Path(sysconfig.get_path("stdlib"))
    torch_docs = (Path(torch.__file__).parent / "_torch_docs.py").read_text(encoding="utf-8")
    return "\n\n".join([torch_docs, *(module_source(library, module) for module in MODULES)])


def output_metric(call: AttentionCall) -> Tensor:
    """[H, G, d, d] float64: W_O^T W_O of every query head."""
    size = call.module.head_dim
    weight = rearrange(call.module.o_proj.weight.double(), "o (h g d) -> h g d o", h=call.key.shape[1], d=size)
    return weight @ weight.mT


def other_moments(call: AttentionCall, segments: Segments) -> tuple[Tensor, Tensor]:
    """`LayerStatistics.attending_moment` of one sample with the weights of ``queries by W_O`` and ``queries by
    attention``, [H, d, d] float64 each."""
    query, key, value = call.query[0], call.key[0], call.value[0].double()
    length = key.shape[1]
    position = segments.query_positions(length, QUERIES, key.device)
    history = segments.history(position, length)
    future = torch.arange(length, device=key.device) > position[:, None]
    query = query[:, position]
    logits = grouped_logits(query, key, call).masked_fill(future, -torch.inf)
    weights = attention_weights(logits, call.grouped_sinks).double()  # [H, G, n, T]
    output = weights @ value[:, None]
    metric = output_metric(call)
    squares = ((value[:, None] @ metric) * value[:, None]).sum(-1)  # [H, G, T]
    read = output @ metric
    distance = squares[:, :, None] - 2 * read @ value[:, None].mT + (read * output).sum(-1, keepdim=True)
    by_output = (weights.square() * distance * history).sum(-1)  # [H, G, n]
    by_attention = (weights * (1 - weights) * history).sum(-1)
    rows = rearrange(query.double(), "(h g) n d -> h (g n) d", h=key.shape[0])

    def moment(lost: Tensor) -> Tensor:
        return (rows * (rearrange(lost, "h g n -> h (g n) 1") + MIN_ATTENDING)).mT @ rows

    return moment(by_output / by_output.mean()), moment(by_attention)


class KappaSearch:
    """Handler: attention KL of every head for every kappa of keys, summed over the samples."""

    def __init__(self, statistics: Statistics, segments: Segments) -> None:
        self.bases = {index: layer_basis(layer, UNCHANGED) for index, layer in statistics.layers.items()}
        self.segments = segments
        self.kl: dict[int, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        query, key = call.query[0], call.key[0]
        length = key.shape[1]
        position = self.segments.query_positions(length, SEARCHED_QUERIES, key.device)
        history = self.segments.history(position, length)
        future = torch.arange(length, device=key.device) > position[:, None]
        exact = grouped_logits(query[:, position], key, call).masked_fill(future, -torch.inf)
        errors = []
        for kappa in KEY_CONSTANTS["gauss"]:
            codec = self.bases[call.layer].codec(kappa, KAPPA).to(key.device)
            stored = quantized_keys(key, codec, self.segments.sink)
            actual = grouped_logits(query[:, position], stored, call).where(history, exact)
            errors.append(attention_kl(exact, actual, call.grouped_sinks).mean((1, 2)).cpu())
        self.kl[call.layer] = self.kl.get(call.layer, torch.zeros(1)) + torch.stack(errors)  # [kappas, H]
        return call.attend()

    def codecs(self, *, by_head: bool) -> dict[int, LayerCodec]:
        """The codecs with the best kappas."""
        chosen = {}
        for index, basis in self.bases.items():
            codecs = [basis.codec(kappa, KAPPA) for kappa in KEY_CONSTANTS["gauss"]]
            kl = self.kl[index] if by_head else self.kl[index].mean(1, keepdim=True).expand_as(self.kl[index])
            best = kl.argmin(0).tolist()
            tensors = {
                name: torch.stack([getattr(codecs[i], name)[head] for head, i in enumerate(best)])
                for name, _ in codecs[0].tensors()
            }
            chosen[index] = replace(codecs[0], **tensors)
        return chosen


def fitted(
    statistics: Statistics,
    recipe: Recipe = UNCHANGED,
    *,
    key_kappa: float = KAPPA,
    value_kappa: float = KAPPA,
    **changes: dict[int, Tensor],
) -> dict[int, LayerCodec]:
    """Layer -> codec of a recipe; ``changes``: sums of `LayerStatistics` to replace, by layer."""
    codecs = {}
    for index, layer in statistics.layers.items():
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        own = LayerStatistics(**values | {name: by_layer[index] for name, by_layer in changes.items()})
        codecs[index] = layer_basis(own, recipe).codec(key_kappa, value_kappa)
    return codecs


def middle_keys(codec: LayerCodec) -> LayerCodec:
    """The codec with key levels in the middle of their cells."""
    gains = (codec.key_encode * codec.key_query).sum(1) / 4.0**codec.key_digit
    return replace(codec, key_query=codec.key_query / gains[:, None])


def middle_values(value: Tensor, codec: LayerCodec) -> Tensor:
    """`quantized_values` with levels in the middle of their cells; the last, incomplete page is quantized too."""
    rows = value.float() @ codec.value_rotation
    mean = rows.mean(-1, keepdim=True)
    step = (KAPPA * (rows - mean).square().mean(-1, keepdim=True).sqrt()).clamp_min(MIN_SCALE)
    code = ((rows - mean) / step + 2.0).floor().clamp(0, 3)
    return (mean + (code - 1.5) * step) @ codec.value_rotation.mT


class MiddleValues(QuantizedCache):
    """`QuantizedCache` with value levels in the middle of their cells."""

    def __call__(self, call: AttentionCall) -> Tensor:
        codec = self.codecs[call.layer] = self.codecs[call.layer].to(call.query.device)

        def store(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return quantized_keys(key, codec, self.segments.sink), middle_values(value, codec)

        return segmented_attention(call, store, self.segments)


def square_root(matrix: Tensor) -> Tensor:
    """Of symmetric positive matrices [..., d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0)[..., None, :].sqrt() @ vectors.mT


def changes(
    model: Any, samples: list[Tensor], held_out: list[Tensor], segments: Segments
) -> dict[str, Callable[[AttentionCall], Tensor]]:
    """Change -> handler that attends with it; the unchanged recipe's first."""
    statistics = Statistics(segments)
    by_output: dict[int, Tensor] = {}
    by_attention: dict[int, Tensor] = {}
    metric: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> Tensor:
        for sums, moment in zip((by_output, by_attention), other_moments(call, segments), strict=True):
            sums[call.layer] = sums.get(call.layer, torch.zeros(1, dtype=torch.float64)) + moment.cpu()
        metric[call.layer] = output_metric(call).sum(1).cpu()
        return statistics.observe(call)

    def read(windows: list[Tensor], handler: Callable[[AttentionCall], Tensor]) -> None:
        with intercept_attention(model, handler):
            for window in windows:
                model(window[None].to(model.device), use_cache=False, logits_to_keep=1)

    read(samples, observe)
    search = KappaSearch(statistics, segments)
    read(held_out, search)
    unchanged = fitted(statistics)
    hadamards = {index: rotation(layer.output_moment, composition="H").float() for index, layer in
                 statistics.layers.items()}  # fmt: skip
    roots = {index: square_root(matrix) for index, matrix in metric.items()}
    read_by = {index: root @ statistics.layers[index].output_moment @ root for index, root in roots.items()}
    middle = {index: middle_keys(codec) for index, codec in unchanged.items()}
    codecs = {
        "unchanged": unchanged,
        "key levels middle": middle,
        "values about their mean": fitted(statistics, replace(UNCHANGED, centre="values")),
        "value kappa 1.1": fitted(statistics, value_kappa=1.1),
        "key kappa 1.1": fitted(statistics, key_kappa=1.1),
        "key kappa 1.2": fitted(statistics, key_kappa=1.2),
        "4 bits": fitted(statistics, replace(UNCHANGED, max_bits=4)),
        "no spreading": fitted(statistics, replace(UNCHANGED, spread="none")),
        "4 bits, no spreading": fitted(statistics, replace(UNCHANGED, max_bits=4, spread="none")),
        "attended 0": fitted(statistics, replace(UNCHANGED, attended=0.0)),
        "attended 0.3": fitted(statistics, replace(UNCHANGED, attended=0.3)),
        "attended 3": fitted(statistics, replace(UNCHANGED, attended=3.0)),
        "value basis W_O": fitted(statistics, output_moment=read_by),
        "value basis plain": fitted(statistics, replace(UNCHANGED, value_target="value")),
        "value basis none": {i: replace(codec, value_rotation=hadamards[i]) for i, codec in unchanged.items()},
        "queries by attention": fitted(statistics, attending_moment=by_attention),
        "queries by W_O": fitted(statistics, attending_moment=by_output),
        "kappa by layer": search.codecs(by_head=False),
        "kappa by head": search.codecs(by_head=True),
    }
    return {
        **{name: QuantizedCache(by_layer, segments) for name, by_layer in codecs.items()},
        "value levels middle": MiddleValues(unchanged, segments),
        "levels middle": MiddleValues(middle, segments),
    }


def paired_ratio(actual: list[Tensor], base: list[Tensor]) -> tuple[float, float]:
    """(mean of actual over mean of base, its standard error) from per-position values of the same windows.

    The means are over all positions, the standard error over the whole blocks.
    """
    a, b = (torch.cat([x[: len(x) // BLOCK * BLOCK].view(-1, BLOCK).mean(1) for x in values]).double()
            for values in (actual, base))  # fmt: skip
    mean = torch.cat(base).double().mean()
    ratio = torch.cat(actual).double().mean() / mean
    return float(ratio), float((a - ratio * b).std() / math.sqrt(len(a)) / mean)


@refusals()
def main() -> None:
    """Fit, read, print one table, append to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of a transformers model")
    parser.add_argument("--windows", type=positive, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, default=1024, help="per window (%(default)s)")
    parser.add_argument("--calibration-windows", type=positive, default=5, help="(%(default)s)")
    parser.add_argument("--calibration-tokens", type=positive, default=1280, help="per window (%(default)s)")
    parser.add_argument("--held-out", type=positive, default=2, help="further windows, for kappa (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of calibration (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    options = parser.parse_args()
    segments = Segments()
    fewest = first_position(segments) + 1 + 2 * BLOCK
    for flag, tokens in (("tokens", options.tokens), ("calibration-tokens", options.calibration_tokens)):
        if tokens < fewest:
            raise OscarConfigError(f"--{flag} {tokens} leaves too little history; use at least {fewest}")
    if options.csv is not None:
        check_csv(options.csv, FIELDS)

    tokenizer = from_pretrained(AutoTokenizer, options.model)
    model = load_model(options.model, options.dtype, options.device)
    fit = token_windows(
        load_documents(None), tokenizer, count=options.calibration_windows + options.held_out,
        length=options.calibration_tokens, seed=options.seed,
    )  # fmt: skip
    windows = evaluation_windows(other_text(), tokenizer, options.windows, options.tokens)
    first = first_position(segments)
    with torch.inference_mode():
        handlers = changes(model, fit[: options.calibration_windows], fit[options.calibration_windows :], segments)
        scores = {name: Score() for name in handlers}
        for window in windows:
            exact = log_probabilities(model, window, first)
            for name, handler in handlers.items():
                with intercept_attention(model, handler):
                    actual = log_probabilities(model, window, first)
                scores[name].add(exact, actual, window[first + 1 :].to(exact.device))
    base = scores["unchanged"].kl
    rows = []
    print(f"{'change':20s} {'KL':>9s} {'ratio':>7s} {'± s.e.':>7s}")
    for name, score in scores.items():
        kl = float(torch.cat(score.kl).mean())
        ratio, stderr = paired_ratio(score.kl, base)
        print(f"{name:20s} {kl:9.5f} {ratio:7.3f} {stderr:7.3f}")
        rows.append({
            "model": Path(options.model).name, "change": name, "windows": len(windows), "tokens": options.tokens,
            "positions": sum(map(len, score.kl)), "kl": kl, "ratio": ratio, "ratio_stderr": stderr,
            "calibration_windows": options.calibration_windows, "calibration_tokens": options.calibration_tokens,
            "seed": options.seed, **provenance("fidelity_ablation.py", options.dtype),
        })  # fmt: skip
    if options.csv is not None:
        append_csv(options.csv, rows, FIELDS)


if __name__ == "__main__":
    main()
