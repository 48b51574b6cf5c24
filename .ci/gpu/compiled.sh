#!/usr/bin/env bash
# Compiled steps, and the same as CUDA graphs, by batch size, on two GPUs and on one. 2 GPUs, about 7.5 minutes for ResNet-50 with
# three batch sizes: new code takes 45 s for each, which the graph and the one GPU then find in the cache. MODEL and BATCHES choose
# (Inception-v3 compiles longer: take two).
# Fills RESULTS "CUDA graphs", the columns compile and compile_graph, and "Scaling", Inception-v3 compiled on two GPUs.
. "$(dirname "$0")/common.sh"
options=("model=$model" "optimize=$compile,$(small compile_graph eager)" "batch_size=${BATCHES:-$(small 256,64,16 8)}"
  "$(small benchmark.max_seconds=1 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 "${short[@]}" noise_pairs=0)
cells 420 "compiled_${model}_2" gpus=0,1 "${options[@]}"
cells 240 "compiled_${model}_1" gpus=0 "${options[@]}"
finish "compiled_${model}_2" "compiled_${model}_1"
