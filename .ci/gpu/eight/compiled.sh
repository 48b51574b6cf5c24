#!/usr/bin/env bash
# Weak scaling over 1, 2, 4 and 8 GPUs, compiled, each GPU alone too. 8 GPUs (N=4: four), about 7.5 minutes for ResNet-50: code is new
# where a rank has a GPU that had none. MODEL chooses; for Inception-v3 ALONE=0 measures GPU 0 alone only.
# Fills RESULTS "Scaling": compiled, and at equal clocks. Copy $out/compiled_x8_MODEL, packed, to tests/data/h200_x8.
. "$(dirname "$0")/shared.sh"
alone=${ALONE:+[0]}
cells 560 "compiled_x${N}_$model" "gpus=${alone:-$each},$scale" "model=$model" "optimize=$compile" "${windows[@]}" "${short[@]}" \
  noise_pairs=0
finish "compiled_x${N}_$model"
