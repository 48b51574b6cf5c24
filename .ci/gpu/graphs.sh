#!/usr/bin/env bash
# Steps as CUDA graphs beside eager ones, by batch size, on one GPU and on two. 2 GPUs, about 3 minutes a model.
# MODELS names them: both take about 6.
# Fills RESULTS "CUDA graphs", the columns eager and graph. Copy $out/graphs_MODEL, packed, to tests/data/h200_x2.
. "$(dirname "$0")/common.sh"
models=$(small "${MODELS:-resnet50 inception_v3}" fmnist_cnn)
studies=()
for one_model in $models; do
  cells 270 "graphs_$one_model" 'gpus=[0],[0,1]' "model=$one_model" "optimize=eager,$graph" \
    "batch_size=$(small 256,128,64,32,16 16,8)" "$(small benchmark.max_seconds=1 benchmark.max_seconds=0.3)" \
    benchmark.exposed_rounds=1 "${short[@]}" noise_pairs=0
  studies+=("graphs_$one_model")
done
finish "${studies[@]}"
