# SPDX-License-Identifier: Apache-2.0
"""All measurements on one GPU: ``python -m benchmarks.run [attend_decode demote_prefill engine turns]``.

Each part checks its kernels against the reference first and refuses to time a wrong one. Rows go to
``benchmarks/results/<part>.csv`` with the command, the commit, the GPU and the versions.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import attend_decode, demote_prefill, engine, results

KERNELS = {"attend_decode": attend_decode, "demote_prefill": demote_prefill}
PARTS = (*KERNELS, "engine", "turns")
DTYPES = ["auto", "fp8", "oscar_int2"]
TURNS = ["--turns", "1", "--kv-cache-gib", "24", "--max-model-len", "40960", "--shapes", "32000x4", "32000x32"]
"""Users in turns within 24 GiB of cache, which hold 5 contexts of 32,000 tokens in BF16."""


def measured(
    part: str, options: argparse.Namespace, engine_options: list[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(what was measured, its rows), one after the other."""
    if part in KERNELS:
        yield part, KERNELS[part].run("cuda")
        return
    extra = [*(TURNS if part == "turns" else []), *engine_options]
    for dtype in options.dtypes:
        yield f"{part} {dtype}", engine.run(dtype, extra, options.log_dir)


def main() -> int:
    """Run the parts; 1 if one of them, such as an engine that fails, gives no rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which parts, default all: {', '.join(PARTS)}")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, help="KV-cache dtypes of engine and turns")
    parser.add_argument("--log-dir", type=Path, help="where engine and turns keep each engine's output")
    options, engine_options = parser.parse_known_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)}; known: {', '.join(PARTS)}")
    results.require_gpu()
    failed = []
    for part in options.parts or PARTS:
        for name, rows in measured(part, options, engine_options):
            if rows:
                results.keep(part, rows)
            else:
                failed.append(name)
    if failed:
        print(f"error: no rows from {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
