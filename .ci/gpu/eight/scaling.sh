#!/usr/bin/env bash
# Weak scaling over 1, 2, 4 and 8 GPUs, eager, ResNet-50 and Inception-v3, each GPU alone too. 8 GPUs (N=4: four), about 5.5 minutes.
# Fills RESULTS "Scaling": efficiency against the slowest member. Copy $out/scaling_x8_MODEL, packed, to tests/data/h200_x8.
. "$(dirname "$0")/shared.sh"
models=$(small "${MODELS:-resnet50 inception_v3}" fmnist_cnn)
studies=()
for one_model in $models; do
  cells 280 "scaling_x${N}_$one_model" "gpus=$each,$scale" "model=$one_model" "${windows[@]}" "${short[@]}" noise_pairs=0
  studies+=("scaling_x${N}_$one_model")
done
finish "${studies[@]}"
