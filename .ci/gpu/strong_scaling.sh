#!/usr/bin/env bash
# A fixed global batch on one GPU, on the other, and on both, each step one replay of a CUDA graph; three runs. 2 GPUs, about 3 minutes.
# Fills RESULTS "CUDA graphs", strong scaling: a verdict for each number of GPUs. Copy $out/strong_scaling, packed, to tests/data/h200_x2.
. "$(dirname "$0")/common.sh"
options=(+experiment=strong_scaling 'gpus=[0],[1],[0,1]' "model=$model" "optimize=$graph" "${windows[@]}" "${short[@]}")
if [ "${SMALL:-}" ]; then options+=(full=true repeats=1 global_batch_size=32); fi
sweep 400 strong_scaling "${options[@]}"
finish strong_scaling
