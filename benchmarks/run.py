# SPDX-License-Identifier: Apache-2.0
"""All measurements on one GPU: ``python -m benchmarks.run [attend_decode demote_prefill engine turns]``.

Each part checks its kernels against the reference first and refuses to time a wrong one. Rows go to
``benchmarks/results/<part>.csv`` with the command, the commit, the GPU and the versions.
"""

import argparse
from pathlib import Path

import torch

from benchmarks import attend_decode, demote_prefill, engine, results

PARTS = ("attend_decode", "demote_prefill", "engine", "turns")
DTYPES = ["auto", "fp8", "oscar_int2"]
TURNS = ["--turns", "1", "--kv-cache-gib", "24", "--max-model-len", "40960", "--shapes", "32000x4", "32000x32"]
"""Users in turns within 24 GiB of cache, which hold 5 contexts of 32,000 tokens in BF16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which parts, default all: {', '.join(PARTS)}")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, help="KV-cache dtypes of engine and turns")
    parser.add_argument("--log-dir", type=Path, help="where engine and turns keep each engine's output")
    options, engine_options = parser.parse_known_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)}; known: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU found")
    for part in options.parts or PARTS:
        if part in ("engine", "turns"):
            extra = [*(TURNS if part == "turns" else []), *engine_options]
            measured = (engine.run(dtype, extra, options.log_dir) for dtype in options.dtypes)
        else:
            measured = ({"attend_decode": attend_decode, "demote_prefill": demote_prefill}[part].run("cuda"),)
        for rows in measured:
            print(results.table(rows))
            print("kept in", results.append(part, rows))


if __name__ == "__main__":
    main()
