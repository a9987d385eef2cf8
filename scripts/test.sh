#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Everything a change must pass: lint, types, tests. Arguments go to pytest, for example
#
#     bash scripts/test.sh                                   # all
#     bash scripts/test.sh -m 'not slow' tests/triton_ops    # some
#
# OSCAR_TEST_JOBS sets the number of test processes (2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

echo "== ruff"
ruff check --output-format=concise .
echo "== mypy"
mypy
echo "== pytest"
# Test files go to the processes whole: engines started by one file share results. Their order is tests/conftest.py's.
python -m pytest -n "${OSCAR_TEST_JOBS:-2}" --dist loadfile --no-loadscope-reorder --durations=15 "$@"
