#!/usr/bin/env bash
# Every strategy on eight GPUs, two runs each. 8 GPUs (N=4: four), about 5.5 minutes.
# Fills RESULTS "Strategies on eight GPUs". Copy $out/strategies_x8, packed, to tests/data/h200_x8/strategies.
. "$(dirname "$0")/shared.sh"
options=(+experiment=strategies "gpus=[$all]" "model=$model" "repeats=${REPEATS:-$(small 2 1)}" "${windows[@]}" "${short[@]}")
if [ "${SMALL:-}" ]; then options+=(full=true strategy=none,cpu_staged); fi
cells 560 "strategies_x$N" "${options[@]}"
finish "strategies_x$N"
