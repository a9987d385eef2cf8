# SPDX-License-Identifier: Apache-2.0
"""The calibration run: load, collect, choose, check, write. A killed run goes on where it stopped."""

import hashlib
import inspect
import json
import math
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from calib.capture import intercept_attention
from calib.data import load_documents, token_windows
from calib.positions import PageRotations, held_out_starts, over_context
from calib.pretrained import from_pretrained
from calib.quantizer_search import LayerChoice, QuantizerSearch
from calib.rotation import PRESETS, Recipe
from calib.simulate import QuantizedCache, Segments
from calib.statistics import VERSION, Statistics
from oscar_vllm.artifact import CONFIG_FILE, Artifact, model_geometry
from oscar_vllm.errors import OscarConfigError, OscarUnsupportedError
from triton_ops.codec import LayerCodec
from triton_ops.layout import PAGE_TOKENS, page_head_size

CHECKPOINT = "calibration_statistics.safetensors"
"""Statistics of an unfinished run, in the output directory; removed when the artifact is written."""

MAX_POSITION = 131_072
"""Longest context that is calibrated for unless another is asked for."""

ROTATION_TOKENS = 512
"""Tokens of a sample that are read twice to see what moving them does."""

TOKENS_PER_DIMENSION = 16
"""Fewest tokens per head dimension for a covariance whose small eigenvalues mean something."""

_JUDGED = 512
"""Token positions per held-out sample whose logits are compared, evenly spaced behind the first history."""


@dataclass(frozen=True)
class Sample:
    """A text and where in a context it stands.

    Attributes:
        ids: [T] int64 token ids.
        start: position of its first token.

    """

    ids: Tensor
    start: int = 0


@dataclass(frozen=True)
class CalibrationResult:
    """What `calibrate` returns: the artifact as written, and what each layer chose."""

    artifact: Artifact
    choices: dict[int, LayerChoice]
    skipped: dict[int, str]

    def table(self) -> str:
        """Spectrum and errors per layer, as text."""
        lines = [
            "                key attention KL, nats           value output error           constants  spread,",
            "layer  top 1/8  identity hadamard   chosen   identity hadamard   chosen      K      V  attended",
        ]
        for index, choice in sorted(self.choices.items()):
            keys = "".join(f"{choice.key_kl[name]:9.4f}" for name in ("identity", "hadamard", "chosen"))
            values = "".join(f"{choice.value_error[name]:9.4f}" for name in ("identity", "hadamard", "chosen"))
            recipe = choice.recipe
            basis = f"{recipe.spread} {recipe.attended:g}" if recipe.allocation == "spectral" else ""
            constants = f"{choice.codec.key_quantizer.constant:7.2f}{choice.codec.value_quantizer.constant:7.2f}"
            lines.append(f"{index:5d}  {choice.concentration:6.1%} {keys}  {values} {constants}  {basis}".rstrip())
        lines += [f"{index:5d}  stays BF16: {reason}" for index, reason in sorted(self.skipped.items())]
        figures, candidates = (self.artifact.metrics[name] for name in ("model", "candidates"))
        if len(candidates) > 1:
            lines.append("held-out KL of the candidates:")
            lines += [f"    {kl:.5f}  {name}" for name, kl in sorted(candidates.items(), key=lambda pair: pair[1])]
        lines.append(
            f"held-out text: KL to the exact model {figures['kl']:.5f} nats, same top token {figures['top1']:.2%}, "
            f"perplexity {figures['perplexity']:.4f} (exact {figures['exact_perplexity']:.4f})"
        )
        if self.artifact.not_for_serving:
            lines.append(self.artifact.not_for_serving)
        return "\n".join(lines)


def calibrate(
    model: str | PreTrainedModel,
    output_dir: str | Path,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    dataset: str | None = None,
    split: str = "train",
    text_field: str = "text",
    num_samples: int = 10,
    held_out: int = 2,
    max_length: int = 2048,
    max_position: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device_map: str | None = None,
    recipe: Recipe | None = None,
    sink: int = 64,
    recent: int = 256,
    checkpoint_seconds: float = 30.0,
    overwrite: bool = False,
    keep_statistics: bool = False,
    trust_remote_code: bool = False,
) -> CalibrationResult:
    """Fit a model's codecs and write the artifact.

    Args:
        model: hub id or folder, or a loaded transformers model (then ``tokenizer`` is needed too).
        output_dir: where the artifact goes; holds the statistics while the run lasts.
        tokenizer: default: the model's own.
        revision: hub revision of the model.
        dataset: a Hugging Face dataset, a .txt or .jsonl file, or None, see `calib.data.load_documents`.
        split: split of a Hugging Face dataset.
        text_field: field of the dataset that holds the text.
        num_samples: samples for the statistics.
        held_out: further samples to choose constants and measure by.
        max_length: tokens per sample.
        max_position: tokens of the longest context to be served (calib/positions.py); default: the model's own limit,
            at most `MAX_POSITION`.
        seed: which samples, and in which order.
        dtype: of the model: ``"auto"`` is float32 on a CPU and the checkpoint's own elsewhere.
        device_map: passed to transformers, such as ``"auto"``; default: one GPU if there is one, else the CPU.
        recipe: how codecs are made; default: ``PRESETS["default"]``.
        sink: BF16 tokens at the start.
        recent: BF16 tokens at the end.
        checkpoint_seconds: how often the statistics are saved.
        overwrite: replace an artifact that is already there.
        keep_statistics: leave the statistics in the folder, so that a run with another recipe starts from them.
        trust_remote_code: passed to transformers.

    Raises:
        OscarConfigError: the model cannot be loaded, or an option, the text or the model's numbers are unusable.
        OscarUnsupportedError: the model cannot be served with an INT2 cache.

    """
    recipe = recipe or PRESETS["default"]
    output_dir = Path(output_dir)
    _check_options(output_dir, num_samples, held_out, max_length, sink, recent, overwrite)
    segments = Segments(sink, recent)
    load = {"revision": revision, "trust_remote_code": trust_remote_code}
    name = model if isinstance(model, str) else model.config._name_or_path or type(model).__name__
    config = from_pretrained(AutoConfig, model, **load) if isinstance(model, str) else model.config
    geometry = model_geometry(config)
    head_size = geometry["head_size"]
    _check_padding(head_size, recipe)
    context = _context(config, recipe, max_position, max_length)
    fewest = math.ceil(TOKENS_PER_DIMENSION * head_size / (max_length - sink))
    if num_samples < fewest:
        raise OscarConfigError(
            f"{num_samples} samples of {max_length} tokens are too few for a stable covariance at head size "
            f"{head_size}: {TOKENS_PER_DIMENSION * head_size} tokens behind the sink are needed; raise --num-samples "
            "or --max-length"
        )
    if tokenizer is None:
        tokenizer = from_pretrained(AutoTokenizer, name, **load)
    documents = load_documents(dataset, split=split, text_field=text_field, seed=seed)
    windows = token_windows(documents, tokenizer, count=num_samples + held_out, length=max_length, seed=seed)
    samples, judged = _split(windows, num_samples, held_out, fewest, dataset or "bundled")
    if isinstance(model, str):
        model = _load_model(model, config, dtype, device_map, load)
    _check_weights(model)
    model.eval()

    started = time.monotonic()
    settings = _settings(name, config, model.dtype, windows, segments)
    with torch.inference_mode():
        statistics, skipped = _collect(model, samples, settings, segments, output_dir / CHECKPOINT, checkpoint_seconds)
        choices, metrics = _choose(model, samples, judged, statistics, recipe, segments, context)
    artifact = Artifact(
        layers=_codecs(choices),
        geometry=geometry,
        model=name,
        revision=revision or getattr(config, "_commit_hash", None),
        sink=sink,
        recent=recent,
        method=recipe.describe(),
        calibration={
            "dataset": dataset or "bundled",
            "samples": len(samples),
            "held_out_samples": len(judged),
            "max_length": max_length,
            "max_position": context,
            "tokens": len(samples) * max_length,
            "seed": seed,
            "dtype": str(model.dtype).removeprefix("torch."),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
            "skipped_layers": {str(index): reason for index, reason in skipped.items()},
        },
        metrics=metrics,
    )
    result = CalibrationResult(artifact, choices, skipped)
    _write(result, output_dir, time.monotonic() - started)
    if not keep_statistics:
        (output_dir / CHECKPOINT).unlink(missing_ok=True)
    return result


def _check_options(
    output_dir: Path, num_samples: int, held_out: int, max_length: int, sink: int, recent: int, overwrite: bool
) -> None:
    if num_samples < 1 or held_out < 1:
        raise OscarConfigError(f"--num-samples {num_samples}, --held-out {held_out}: at least one of each is needed")
    if not 0 <= sink <= PAGE_TOKENS or sink % 16:
        raise OscarConfigError(f"--sink {sink} is out of range; use a multiple of 16 from 0 to {PAGE_TOKENS}")
    if recent < PAGE_TOKENS or recent % 16:
        raise OscarConfigError(f"--recent {recent} is out of range; use a multiple of 16, at least {PAGE_TOKENS}")
    shortest = sink + recent + 2 * PAGE_TOKENS
    if max_length < shortest:
        raise OscarConfigError(
            f"--max-length {max_length} leaves no history behind {sink} sink and {recent} recent tokens; "
            f"use at least {shortest}"
        )
    if (output_dir / CONFIG_FILE).exists() and not overwrite:
        raise OscarConfigError(f"{output_dir} already holds an artifact; choose another folder or pass --overwrite")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise OscarConfigError(
            f"--output-dir {output_dir} cannot be written to ({error.strerror}); choose another folder"
        ) from None


def _check_padding(head_size: int, recipe: Recipe) -> None:
    """Refuse recipes that would spend codes on the zeros behind heads without a page of their own size."""
    size = page_head_size(head_size)
    if size == head_size:
        return
    if "H" not in recipe.composition:
        raise OscarConfigError(
            f"--composition {recipe.composition} would store the zeros that pad heads of {head_size} to {size}; "
            "use one with H"
        )
    if recipe.allocation == "spectral" and recipe.max_bits * head_size < 2 * size:
        raise OscarConfigError(
            f"--max-bits {recipe.max_bits}: heads of {head_size} cannot take the {2 * size} bits of a page of "
            f"head size {size}, and zeros would; raise --max-bits or use --allocation uniform"
        )


def _split(
    windows: list[Tensor], num_samples: int, held_out: int, fewest: int, dataset: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Samples for the statistics, at least ``fewest``, and the ``held_out`` last windows to choose and measure by."""
    if len(windows) < fewest + held_out:
        length = f" of {len(windows[0])} tokens" if windows else ""
        raise OscarConfigError(
            f"dataset {dataset} gives {len(windows)} samples{length}; at least {held_out + fewest} are needed; "
            "give more text or lower --max-length"
        )
    samples, judged = windows[:-held_out], windows[-held_out:]
    if len(samples) < num_samples:
        print(f"dataset {dataset} holds {len(samples)} of {num_samples} samples", file=sys.stderr)
    return samples, judged


def _load_model(model: str, config: Any, dtype: str, device_map: str | None, load: dict[str, Any]) -> PreTrainedModel:
    if device_map is None:
        device_map = "cuda" if torch.cuda.is_available() else None
    if dtype == "auto" and device_map in (None, "cpu"):
        dtype = "float32"
    return from_pretrained(AutoModelForCausalLM, model, config=config, dtype=dtype, device_map=device_map, **load)


def _check_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.device.type != "meta" and not parameter.isfinite().all():
            raise OscarConfigError(f"weight {name} holds non-finite values; fetch the model anew")


def _context(config: Any, recipe: Recipe, max_position: int | None, max_length: int) -> int:
    """Tokens of the longest context to calibrate for: those of a sample where positions are not looked at."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_position is not None and not max_length <= max_position <= (limit or max_position):
        raise OscarConfigError(
            f"--max-position {max_position} is out of range; use at least the {max_length} tokens of a sample "
            + (f"(--max-length) and at most the model's own limit, {limit}" if limit else "(--max-length)")
        )
    if recipe.positions == "samples":
        if max_position is not None:
            raise OscarConfigError(
                f"--max-position {max_position} has no effect with --positions samples (--preset reference sets it); "
                "leave it out, or add --positions context"
            )
        return max_length
    return max_position or max(max_length, min(limit or MAX_POSITION, MAX_POSITION))


def _rotations(model: PreTrainedModel, ids: Tensor) -> PageRotations:
    """What moving a text by a page does to each layer's keys and queries."""
    rotations = PageRotations()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise OscarConfigError(f"{type(model).__name__} takes no position_ids; calibrate with --positions samples")
    with intercept_attention(model, rotations):
        for start in (0, PAGE_TOKENS):
            _forward(model, Sample(ids, start))
    if rotations.fixed:
        print(f"positions do not rotate the keys of layers {rotations.fixed}; samples stand for all", file=sys.stderr)
    return rotations


def _settings(name: str, config: Any, dtype: torch.dtype, windows: list[Tensor], segments: Segments) -> dict[str, Any]:
    """What the statistics depend on, for `Statistics.settings`."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.numpy().tobytes())
    return {
        "version": VERSION,
        "model": name,
        "revision": getattr(config, "_commit_hash", None),
        "geometry": model_geometry(config),
        "dtype": str(dtype),
        "windows": digest.hexdigest(),
        "sink": segments.sink,
        "recent": segments.recent,
    }


def _device(model: PreTrainedModel) -> torch.device:
    return model.get_input_embeddings().weight.device


def _collect(
    model: PreTrainedModel,
    samples: list[Tensor],
    settings: dict[str, Any],
    segments: Segments,
    checkpoint: Path,
    checkpoint_seconds: float,
) -> tuple[Statistics, dict[int, str]]:
    """Statistics over the samples, and the layers that were left out; goes on from a checkpoint that fits."""
    statistics = Statistics(segments, settings)
    if checkpoint.exists():
        saved = Statistics.load(checkpoint)
        if saved.settings == json.loads(json.dumps(settings)):
            statistics = saved
            print(f"resuming after {saved.samples} of {len(samples)} samples", file=sys.stderr)
        else:
            print(f"{checkpoint} belongs to other settings; starting anew", file=sys.stderr)
    saved_at = time.monotonic()
    with intercept_attention(model, statistics.observe) as interception:
        progress = tqdm(total=len(samples), initial=statistics.samples, desc="statistics", unit="sample")
        with progress:
            for sample in samples[statistics.samples :]:
                _forward(model, Sample(sample))
                statistics.samples += 1
                progress.update()
                if time.monotonic() - saved_at >= checkpoint_seconds:
                    statistics.save(checkpoint)
                    saved_at = time.monotonic()
    statistics.save(checkpoint)
    if not statistics.layers:
        raise OscarUnsupportedError(
            f"{type(model).__name__} sent no full-attention layer through transformers' attention interface"
            + (f"; left out: {interception.skipped}" if interception.skipped else "")
        )
    return statistics, interception.skipped


def _forward(model: PreTrainedModel, sample: Sample, judged: Tensor | None = None) -> Tensor:
    """Logits [1, n, vocabulary] of some tokens (default: the last one only)."""
    keep: Any = 1 if judged is None else judged
    ids, moved = sample.ids[None].to(_device(model)), {}
    if sample.start:
        moved["position_ids"] = torch.arange(sample.start, sample.start + ids.shape[1], device=ids.device)[None]
    return model(ids, use_cache=False, logits_to_keep=keep, **moved).logits


def _judged_tokens(length: int, segments: Segments) -> Tensor:
    return segments.query_positions(length - 1, _JUDGED)  # the last token has no successor to predict


def _log_probabilities(model: PreTrainedModel, sample: Sample, segments: Segments) -> Tensor:
    logits = _forward(model, sample, _judged_tokens(len(sample.ids), segments))[0]
    return logits.float().log_softmax(-1).cpu()


def _choose(
    model: PreTrainedModel,
    samples: list[Tensor],
    judged: list[Tensor],
    statistics: Statistics,
    recipe: Recipe,
    segments: Segments,
    context: int,
) -> tuple[dict[int, LayerChoice], dict[str, Any]]:
    """The layers of the candidate with the least KL on held-out text, and the artifact's metrics."""
    length = len(judged[0])
    if recipe.positions == "context":
        rotations = _rotations(model, samples[0][:ROTATION_TOKENS])
        statistics = over_context(statistics, rotations, length, context)
    starts = held_out_starts(len(judged), length, context)
    placed = [Sample(ids, start) for ids, start in zip(judged, starts, strict=True)]
    search, exact = _search(model, placed, statistics, recipe, segments)
    candidates = _candidates(search, recipe)
    figures = {
        name: _judge(model, placed, QuantizedCache(_codecs(choices), segments), exact, segments, name)
        for name, choices in candidates.items()
    }
    best = min(candidates, key=lambda name: figures[name]["kl"])
    metrics = {"model": figures[best], "candidates": {name: each["kl"] for name, each in figures.items()}}
    return candidates[best], metrics | {str(index): choice.metrics() for index, choice in candidates[best].items()}


def _search(
    model: PreTrainedModel, judged: list[Sample], statistics: Statistics, recipe: Recipe, segments: Segments
) -> tuple[QuantizerSearch, list[Tensor]]:
    """Every candidate measured per layer, and the exact model's log-probabilities on the same samples."""
    search = QuantizerSearch(statistics, recipe, segments)
    with intercept_attention(model, search):
        exact = [
            _log_probabilities(model, sample, segments) for sample in tqdm(judged, desc="constants", unit="sample")
        ]
    return search, exact


def _candidates(search: QuantizerSearch, recipe: Recipe) -> dict[str, dict[int, LayerChoice]]:
    """Whole models to choose from, one for each alternative of the recipe."""

    def name(alternative: Recipe) -> str:
        if alternative.allocation == "uniform":
            return "2 bits everywhere"
        return f"spread {alternative.spread}, attended {alternative.attended:g}"

    return {name(each): search.choose(each) for each in recipe.alternatives()}


def _codecs(choices: dict[int, LayerChoice]) -> dict[int, LayerCodec]:
    return {index: choice.codec for index, choice in choices.items()}


def _judge(
    model: PreTrainedModel,
    judged: list[Sample],
    cache: QuantizedCache,
    exact: list[Tensor],
    segments: Segments,
    name: str,
) -> dict[str, float]:
    """Divergence of the model with the quantized cache from the exact one; ``name`` is shown with the progress."""
    kl, top1, loss, exact_loss = [], [], [], []
    with intercept_attention(model, cache):
        for sample, expected in zip(tqdm(judged, desc=f"checking {name}", unit="sample"), exact, strict=True):
            actual = _log_probabilities(model, sample, segments)
            following = sample.ids[_judged_tokens(len(sample.ids), segments) + 1][:, None]
            kl.append((expected.exp() * (expected - actual)).sum(-1))
            top1.append((expected.argmax(-1) == actual.argmax(-1)).float())
            loss.append(-actual.gather(1, following))
            exact_loss.append(-expected.gather(1, following))
    return {
        "kl": float(torch.cat(kl).mean()),
        "top1": float(torch.cat(top1).mean()),
        "perplexity": math.exp(torch.cat(loss).mean()),
        "exact_perplexity": math.exp(torch.cat(exact_loss).mean()),
    }


def _write(result: CalibrationResult, output_dir: Path, seconds: float) -> None:
    """The artifact and its card."""
    result.artifact.save(output_dir)
    (output_dir / "README.md").write_text(_model_card(result, seconds), encoding="utf-8")


def _model_card(result: CalibrationResult, seconds: float) -> str:
    artifact = result.artifact
    calibration = artifact.calibration
    method = "\n".join(f"| {name} | {value} |" for name, value in artifact.method.items())
    return f"""---
base_model: {artifact.model}
library_name: vllm
tags: [kv-cache, quantization, oscar]
---
# INT2 KV-cache constants for {artifact.model}

Constants for serving `{artifact.model}` with a 2-bit KV cache in vLLM through the plugin oscar-vllm. No model weights.

    vllm serve {artifact.model} --kv-cache-dtype oscar_int2 \\
        --additional-config '{{"oscar": {{"artifact": "<this folder>"}}}}'

* Artifact id `{artifact.artifact_id}`, model fingerprint `{artifact.fingerprint}`, {len(artifact.layers)} layers.
* {artifact.sink} sink and {artifact.recent} recent tokens stay BF16.
* For contexts of up to {calibration["max_position"]} tokens. Statistics over {calibration["tokens"]} tokens
  ({calibration["samples"]} samples of {calibration["max_length"]}) of dataset `{calibration["dataset"]}`, seed
  {calibration["seed"]}, {calibration["dtype"]}; {seconds:.0f} s.

| choice | value |
|---|---|
{method}

Measured on {calibration["held_out_samples"]} samples that the statistics do not hold. Key columns: divergence of the
attention weights; value columns: squared error of the attention output over its square.

```
{result.table()}
```
"""
