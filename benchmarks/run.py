# SPDX-License-Identifier: Apache-2.0
"""All measurements on one GPU: ``python -m benchmarks.run [attend_decode demote_prefill engine]``.

Each part checks its kernels against the reference first and refuses to time a wrong one. Rows go to
``benchmarks/results/<part>.csv`` with the command, the commit, the GPU and the versions.
"""

import argparse
from pathlib import Path

import torch

from benchmarks import attend_decode, demote_prefill, engine, results

PARTS = ("attend_decode", "demote_prefill", "engine")
DTYPES = ["auto", "fp8", "oscar_int2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which parts, default all: {', '.join(PARTS)}")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, help="KV-cache dtypes of the engine part")
    parser.add_argument("--log-dir", type=Path, help="where the engine part keeps each engine's output")
    options, engine_options = parser.parse_known_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)}; known: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU found")
    for part in options.parts or PARTS:
        if part == "engine":
            measured = (engine.run(dtype, engine_options, options.log_dir) for dtype in options.dtypes)
        else:
            measured = ({"attend_decode": attend_decode, "demote_prefill": demote_prefill}[part].run("cuda"),)
        for rows in measured:
            print(results.table(rows))
            print("kept in", results.append(part, rows))


if __name__ == "__main__":
    main()
