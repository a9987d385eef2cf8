# SPDX-License-Identifier: Apache-2.0
"""Where `oscar_int2` wins and loses: decode attention of one layer over requests and context, as a table and a picture.

python -m benchmarks.heatmap           # on a GPU: times ours and vLLM's FlashAttention-3, appends heatmap.csv
python -m benchmarks.heatmap --plot    # anywhere: heatmap.csv -> docs/heatmap.png (needs matplotlib)
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.attend_decode import Batch, Cache, FlashAttention, Variant, check, time_batch, warm_clocks
from triton_ops.layout import PAGE_TOKENS

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
GROUPS = 4
PICTURE = Path(__file__).parents[1] / "docs" / "heatmap.png"


def run(device: str = "cuda") -> list[dict[str, Any]]:
    """Check the kernels, time every shape, return a row for each."""
    most = max(REQUESTS) * max(CONTEXTS)
    cache = Cache(most // PAGE_TOKENS + 1024, max(REQUESTS) * 32, device)
    check(cache, GROUPS, [Variant()])
    warm_clocks(device)
    batches = {(b, n): Batch(cache, [n] * b, GROUPS) for b in REQUESTS for n in CONTEXTS}
    ours = {shape: time_batch(batch)["whole"] for shape, batch in batches.items()}
    attention = FlashAttention(most, device)
    bf16 = {shape: attention.time(batch) for shape, batch in batches.items()}
    attention.quantize()
    fp8 = {shape: attention.time(batch) for shape, batch in batches.items()}
    rows = [
        {"requests": b, "context": n, "oscar_int2_us": ours[b, n], "bf16_us": bf16[b, n], "fp8_us": fp8[b, n]}
        for b, n in batches
    ]
    for row in rows:
        row["over_bf16"], row["over_fp8"] = (row[f"{name}_us"] / row["oscar_int2_us"] for name in ("bf16", "fp8"))
    return rows


def plot(rows: list[dict[str, str]], path: Path = PICTURE) -> None:
    """Two heat maps of the latest rows: how many times faster than BF16 and FP8; blue where slower."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    latest = {(int(row["requests"]), int(row["context"])): row for row in rows}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, name in zip(axes, ("bf16", "fp8"), strict=True):
        grid = [[float(latest[b, n][f"over_{name}"]) for n in CONTEXTS] for b in REQUESTS]
        image = axis.imshow(grid, cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.5, 7.1), aspect="auto")
        for y, line in enumerate(grid):
            for x, factor in enumerate(line):
                axis.text(x, y, f"{factor:.1f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(CONTEXTS)), [f"{n // 1024}k" for n in CONTEXTS])
        axis.set_yticks(range(len(REQUESTS)), [str(b) for b in REQUESTS])
        axis.set(
            xlabel="tokens of context", ylabel="requests", title=f"times faster than FlashAttention-3 {name.upper()}"
        )
        figure.colorbar(image, ax=axis)
    hardware = rows[-1]["hardware"]
    figure.suptitle(f"Decode attention of one layer, 32 query and 8 KV heads of size 128, {hardware}")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="draw what was measured")
    if parser.parse_args().plot:
        with (results.RESULTS / "heatmap.csv").open(newline="") as file:
            plot(list(csv.DictReader(file)))
        print(PICTURE)
        return
    results.require_gpu()
    results.keep("heatmap", run())


if __name__ == "__main__":
    main()
