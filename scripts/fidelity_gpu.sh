#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fidelity on one GPU, in minutes: KL, retrieval up to the model's limit and exact match, with the baselines, and
# changes of the recipe (fidelity_ablation.py). The sweep of sweep_text.py is apart, because it starts engines.
#
#   bash scripts/fidelity_gpu.sh MODEL OUT_DIR
#
# MODEL is a folder with a transformers model. The artifacts `default` and `reference` are made in OUT_DIR from the same
# statistics, unless they are there; DEFAULT names another folder of the first. Nothing is downloaded. The parts run
# side by side, because a small model leaves most of a GPU idle; each writes OUT_DIR/PART.log and its own CSV files,
# which are put together as OUT_DIR/fidelity*.csv with the columns of benchmarks/results/fidelity*.csv. The tables are
# printed at the end, and the exit status is that of the last part that failed. In the environment: DTYPE (float32),
# DEVICE (cuda), LENGTHS (8192 4096 2048), TRIALS (10: prompts of five questions for each of two texts and two seeds),
# WINDOWS (24), TOKENS (2048), CALIB (further arguments of `python -m calib`), PARTS (kl retrieval exact-match ablation)
# and PYTHON.
set -euo pipefail
if [[ $# -ne 2 ]]; then
    echo "usage: bash scripts/fidelity_gpu.sh MODEL OUT_DIR" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=$1 out=$2
python=${PYTHON:-python3} windows=${WINDOWS:-24} tokens=${TOKENS:-2048} dtype=${DTYPE:-float32} device=${DEVICE:-cuda}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$out/reference"

calibrate() { # FOLDER ARGUMENTS…
    local folder=$1
    shift
    [ -e "$folder/oscar_config.json" ] || $python -m calib --model "$model" --output-dir "$folder" --dtype "$dtype" \
        --device-map "$device" ${CALIB:-} "$@" >>"$out/calibration.log" 2>&1 || { cat "$out/calibration.log"; exit 1; }
}

default=${DEFAULT:-$out/default}
calibrate "$default" --keep-statistics
statistics=$default/calibration_statistics.safetensors
[ ! -e "$statistics" ] || cp "$statistics" "$out/reference/"
calibrate "$out/reference" --preset reference
echo "calibrated after $SECONDS s"

both=(--artifact "default=$default" --artifact "reference=$out/reference")
pids=() names=()
start() { # KIND NAME COMMAND…
    local kind=$1 part=$2
    shift 2
    [[ " ${PARTS:-kl retrieval exact-match ablation} " == *" $kind "* ]] || return 0
    names+=("$part")
    $python "$@" --model "$model" --dtype "$dtype" --device "$device" --csv "$out/$part.csv" >"$out/$part.log" 2>&1 &
    pids+=($!)
}

for text in manual code; do
    start kl kl-$text scripts/eval_fidelity.py "${both[@]}" --text $text --windows "$windows" --tokens "$tokens" \
        --configurations bf16,float,naive,hadamard,uncalibrated,int4_hadamard,kivi2,turboquant3
done
for length in ${LENGTHS:-8192 4096 2048}; do
    depths=10,30,50,70,90
    [ "$length" -gt 2048 ] || depths=10,25,40,55,70 # deeper ones would be among the recent tokens
    start retrieval retrieval-$length scripts/eval_fidelity.py "${both[@]}" --retrieval --text manual,code \
        --lengths "$length" --depths $depths --seeds 0,1 --trials "${TRIALS:-10}" --batch 2 \
        --configurations bf16,int4_hadamard,kivi2
done
start exact-match exact-match scripts/eval_fidelity.py "${both[@]}" --exact-match --text code --tokens "$tokens" \
    --windows "$windows" --seeds 0,1 --trials "${TRIALS:-10}" --batch 2 --configurations bf16,int4_hadamard,kivi2
for seed in 0 1; do
    start ablation ablation-$seed scripts/fidelity_ablation.py --windows "$windows" --tokens "$tokens" --seed $seed
done

status=0
for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || status=$?
    echo "== ${names[$i]}, after $SECONDS s"
    tr '\r' '\n' <"$out/${names[$i]}.log" | grep -v -e 'it/s' -e 's/it' -e '/configuration' -e '/window' | tail -40
done

together() { # FILE FILES…
    local file="$out/$1"
    shift
    [ -e "$1" ] || return 0
    { head -n 1 "$1" && tail -q -n +2 "$@"; } >"$file"
}
together fidelity.csv "$out"/kl-*.csv
together fidelity_retrieval.csv "$out"/retrieval-*_retrieval.csv
together fidelity_answers.csv "$out"/*-*_answers.csv
together fidelity_ablation.csv "$out"/ablation-*.csv
exit $status
