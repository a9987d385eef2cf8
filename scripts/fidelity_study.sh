#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The measurements of docs/fidelity.md on one model, in one go; rows go to benchmarks/results/fidelity*.csv.
#
#   bash scripts/fidelity_study.sh MODEL WORK_FOLDER [PART…]
#
# Parts, all by default: main (every cache on two texts, errors per layer), size (tokens of calibration), shift
# (calibrated on prose, read on code, and the reverse), retrieval. WINDOWS, TOKENS, LENGTHS, TRIALS, CALIB (further
# arguments of `python -m calib`) and PYTHON can be set in the environment. Artifacts in WORK_FOLDER are used again.
set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "usage: bash scripts/fidelity_study.sh MODEL WORK_FOLDER [PART…]" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=$1 work=$2
shift 2
parts=" ${*:-main size shift retrieval} "
python=${PYTHON:-python}
export TOKENIZERS_PARALLELISM=false
mkdir -p "$work"

calibrate() { # NAME ARGUMENTS…
    local folder="$work/$1"
    shift
    [ -e "$folder/oscar_config.json" ] || $python -m calib --model "$model" --output-dir "$folder" ${CALIB:-} "$@"
}

evaluate() { # ARGUMENTS…
    $python scripts/eval_fidelity.py --model "$model" --windows "${WINDOWS:-8}" --tokens "${TOKENS:-2048}" \
        --csv benchmarks/results/fidelity.csv "$@"
}

calibrate default --keep-statistics
mkdir -p "$work/reference"
[ -e "$work/reference/oscar_config.json" ] ||
    cp "$work/default/calibration_statistics.safetensors" "$work/reference/"
calibrate reference --preset reference
both=(--artifact "reference=$work/reference" --artifact "default=$work/default")

if [[ $parts == *" main "* ]]; then
    for text in manual code; do
        evaluate --text $text --layers \
            --configurations bf16,float,naive,hadamard,uncalibrated,int4_hadamard,kivi2,turboquant3 "${both[@]}"
    done
fi

if [[ $parts == *" size "* ]]; then
    sizes=()
    for samples in 1 2 4 8 16 32; do
        tokens=$((samples * 2048))
        calibrate size-$tokens --num-samples $samples || continue # too few tokens for this head size: refused
        sizes+=(--artifact "size-$tokens=$work/size-$tokens")
    done
    evaluate --text manual --configurations "" "${sizes[@]}"
fi

if [[ $parts == *" shift "* ]]; then
    cat calib/data/novel.txt calib/data/scripture_english.txt >"$work/prose.txt"
    cat calib/data/code_python.txt calib/data/code_cpp.txt >"$work/code.txt"
    for domain in prose code; do
        calibrate on-$domain --dataset "$work/$domain.txt" --max-length 1024 --num-samples 12
    done
    for text in manual code; do
        evaluate --text $text --configurations "" \
            --artifact "on-prose=$work/on-prose" --artifact "on-code=$work/on-code"
    done
fi

if [[ $parts == *" retrieval "* ]]; then
    for depths in 50 10,30,50,70,90; do # one needle, then five
        evaluate --retrieval --depths $depths --lengths "${LENGTHS:-4096}" --trials "${TRIALS:-4}" \
            --configurations bf16,hadamard,int4_hadamard,kivi2,turboquant3 "${both[@]}"
    done
fi
