# SPDX-License-Identifier: Apache-2.0
"""Plots of what `eval_fidelity.py` recorded: benchmarks/results/fidelity*.csv to docs/fidelity_*.png.

    python scripts/fidelity_plots.py      # needs matplotlib

The newest row of every model, text and configuration is drawn.
"""

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


def newest(path: Path, *keys: str) -> list[dict[str, str]]:
    """The last row of each combination of ``keys``, in order of first appearance; artifact ids are left out."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            row["configuration"] = row["configuration"].split(" (")[0]
            rows[tuple(row[key] for key in keys)] = row
    return list(rows.values())


def distinct(values: Iterable) -> list:
    """Without repeats, in order."""
    return list(dict.fromkeys(values))


def save(figure: plt.Figure, name: str) -> None:
    """Write docs/NAME.png."""
    DOCS.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(DOCS / f"{name}.png", dpi=90)
    plt.close(figure)


def plot_kl(text: str = "manual", configurations: tuple[str, ...] = (
    "reference", "kivi2", "turboquant3", "uncalibrated", "default", "int4_hadamard",
)) -> None:  # fmt: skip
    """KL by model and configuration."""
    rows = [row for row in newest(RESULTS / "fidelity.csv", "model", "text", "configuration", "engine")
            if row["text"] == text and row["engine"] == "transformers"]  # fmt: skip
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    rows = [row for row in rows if row["model"] in models]
    figure, axis = plt.subplots(figsize=SIZE)
    width = 0.8 / len(configurations)
    for i, name in enumerate(configurations):
        found = [(models.index(row["model"]), row) for row in rows if row["configuration"] == name]
        places = [place + (i - len(configurations) / 2 + 0.5) * width for place, _ in found]
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
    models = distinct(row["model"] for row in rows)
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


if __name__ == "__main__":
    plot_kl()
    plot_layers()
    plot_calibration_size()
