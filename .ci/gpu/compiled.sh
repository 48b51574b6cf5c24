#!/usr/bin/env bash
# Compiled steps, and the same as CUDA graphs, by batch size, on two GPUs and on one. 2 GPUs, about 8 minutes for ResNet-50: the code is made
# before, all batch sizes side by side (1.5 minutes), then a cell takes about 20 s. MODEL and BATCHES choose. Inception-v3 takes longer
# (2.5 minutes, then 30 s): GPUS="0,1" leaves one GPU alone out.
# Fills RESULTS "CUDA graphs", the columns compile and compile_graph, and "Scaling", Inception-v3 compiled on two GPUs.
. "$(dirname "$0")/common.sh"
export TORCHINDUCTOR_CACHE_DIR=$out/.compiled TRITON_CACHE_DIR=$out/.compiled/triton
[ "${SHOW:-}" ] || mkdir -p -m 700 "$out/.compiled"
batches=${BATCHES:-$(small 256,128,64,32,16 16,8)}
OPTIMIZE=$compile step 200 before bash "$here/compile_before.sh" "$out" "$model" ${batches//,/ }
studies=()
for gpus in ${GPUS:-0,1 0}; do
  commas=${gpus//[^,]/}
  study=compiled_${model}_$((${#commas} + 1))
  cells 420 "$study" "gpus=$gpus" "model=$model" "optimize=$compile,$(small compile_graph eager)" "batch_size=$batches" \
    "$(small benchmark.max_seconds=1 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 "${short[@]}" noise_pairs=0
  studies+=("$study")
done
finish "${studies[@]}"
