#!/usr/bin/env bash
# Where the rate goes: all of them and each alone, with the strategy and without. 8 GPUs (N=4: four), about 8 minutes
# with two runs; REPEATS=3 fits a call only on four.
# Fills RESULTS "Scaling" and "Where the rate goes". Copy $out/waterfall_x8, packed, to tests/data/h200_x8/waterfall.
. "$(dirname "$0")/shared.sh"
sweep 560 "waterfall_x$N" "gpus=[$all]" "model=$model" waterfall=true "repeats=${REPEATS:-$(small 2 1)}" \
  "$(small benchmark.max_seconds=1 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 "${short[@]}"
finish "waterfall_x$N"
