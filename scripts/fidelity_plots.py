# SPDX-License-Identifier: Apache-2.0
"""Plots of what `eval_fidelity.py` recorded: benchmarks/results/fidelity*.csv to docs/fidelity_*.png.

    python scripts/fidelity_plots.py      # needs matplotlib

Drawn are rows with the default BF16 segments whose windows start a context. Layers and calibration sizes: the newest
row of every model, text and configuration. Caches: the newest run of a model that compares the default with others, and
the newest rows of the rest on the same windows.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
SIZE = (9, 3.6)
MODELS = ("smollm2", "gemma270m", "qwen0.5b", "qwen1.5b")
"""Models measured with the present default."""
CACHES = ("reference", "kivi2", "turboquant3", "uncalibrated", "default", "int4_hadamard")
SEGMENTS = ("64", "256")
"""BF16 tokens of the rows that are drawn: sink and recent."""


def measured(path: Path) -> list[dict[str, str]]:
    """The rows that can be compared, in order; artifact ids are left out of the configurations' names."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["configuration"] = row["configuration"].split(" (")[0]
    moved = {row["command"] for row in rows if any(word.split("=")[0] == "--start" for word in row["command"].split())}
    return [row for row in rows if (row["sink"], row["recent"]) == SEGMENTS and row["command"] not in moved]


def newest(path: Path, *keys: str) -> list[dict[str, str]]:
    """The last of the `measured` rows of each combination of ``keys``, in order of first appearance."""
    return list({tuple(row[key] for key in keys): row for row in measured(path)}.values())


def comparison(path: Path, text: str, configurations: tuple[str, ...]) -> dict[str, dict[str, dict[str, str]]]:
    """Model -> configuration -> row: the newest run with ``"default"`` and another configuration; for caches it lacks
    the newest row on as many windows of that length."""
    runs: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    alike: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in measured(path):
        if (row["text"], row["engine"]) == (text, "transformers") and row["configuration"] in configurations:
            for group, key in ((runs, ("commit", "command")), (alike, ("windows", "tokens"))):
                group.setdefault((row["model"], *(row[name] for name in key)), {})[row["configuration"]] = row
    chosen = {model: run for (model, *_), run in runs.items() if "default" in run and len(run) > 1}
    return {
        model: alike[model, run["default"]["windows"], run["default"]["tokens"]] | run for model, run in chosen.items()
    }


def distinct(values: Iterable) -> list:
    """Without repeats, in order."""
    return list(dict.fromkeys(values))


def save(figure: plt.Figure, name: str) -> None:
    """Write docs/NAME.png."""
    DOCS.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(DOCS / f"{name}.png", dpi=90)
    plt.close(figure)


def plot_kl(text: str = "manual") -> None:
    """KL by model and cache."""
    runs = comparison(RESULTS / "fidelity.csv", text, CACHES)
    models = [model for model in MODELS if model in runs]
    figure, axis = plt.subplots(figsize=SIZE)
    width = 0.8 / len(CACHES)
    for i, name in enumerate(CACHES):
        found = [(place, runs[model][name]) for place, model in enumerate(models) if name in runs[model]]
        places = [place + (i - len(CACHES) / 2 + 0.5) * width for place, _ in found]
        axis.bar(places, [float(row["kl"]) for _, row in found], width, label=name,
                 yerr=[float(row["kl_stderr"]) for _, row in found])  # fmt: skip
    axis.axhline(0.02, color="black", linewidth=0.8, linestyle=":")
    axis.set(yscale="log", xticks=range(len(models)), xticklabels=models, ylabel="KL to BF16, nats per token")
    axis.set_title(f"Teacher-forced KL, text: {text}", fontsize=10)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "fidelity_kl")


def plot_layers() -> None:
    """Attention KL of every layer, one panel per model."""
    rows = newest(RESULTS / "fidelity_layers.csv", "model", "text", "configuration", "layer")
    models = [model for model in distinct(row["model"] for row in rows) if model in MODELS]
    figure = plt.figure(figsize=SIZE)
    axes = [figure.add_subplot(1, len(models), i + 1) for i in range(len(models))]
    for axis, model in zip(axes, models, strict=True):
        for name in distinct(row["configuration"] for row in rows if row["model"] == model):
            some = [row for row in rows if (row["model"], row["configuration"]) == (model, name)]
            some = [row for row in some if float(row["attention_kl"]) > 0]
            axis.plot([int(row["layer"]) for row in some], [float(row["attention_kl"]) for row in some], label=name,
                      marker=".")  # fmt: skip
        axis.set(yscale="log", xlabel="layer", ylabel="attention KL, nats", title=model)
        axis.title.set_fontsize(10)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "fidelity_layers")


def plot_calibration_size() -> None:
    """Final KL against the tokens of calibration: configurations named ``size-TOKENS``, if there are any."""
    rows = [row for row in newest(RESULTS / "fidelity.csv", "model", "text", "configuration")
            if row["configuration"].startswith("size-") and row["model"] in MODELS]  # fmt: skip
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(5, 3))
    for model, text in distinct((row["model"], row["text"]) for row in rows):
        some = [row for row in rows if (row["model"], row["text"]) == (model, text)]
        points = sorted((int(row["configuration"].split("-")[1]), float(row["kl"])) for row in some)
        axis.plot(*zip(*points, strict=True), label=f"{model}, {text}", marker=".")
    axis.set(xscale="log", xlabel="calibration tokens", ylabel="KL to BF16, nats per token", ylim=(0, None))
    sizes = distinct(int(row["configuration"].split("-")[1]) for row in rows)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
    axis.minorticks_off()
    axis.legend(fontsize=7)
    save(figure, "fidelity_calibration_size")


def main(arguments: list[str] | None = None) -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    plot_kl()
    plot_layers()
    plot_calibration_size()


if __name__ == "__main__":
    main()
