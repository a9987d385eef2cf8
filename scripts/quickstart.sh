#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# From nothing to a 2-bit KV cache on a real model: environment, model, calibration, one long prompt through
# vLLM with and without it. Arguments are passed to scripts/quickstart.py (--help lists them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python scripts/quickstart.py "$@"
