#!/usr/bin/env bash
# Compiles one model for several batch sizes side by side on GPU 0, so that the cells of a sweep find their code:
#   compile_before.sh FOLDER MODEL BATCH...
# On one H200 with 16 cores (2026-11-23) five batch sizes took 89 s for ResNet-50 and 152 s for Inception-v3, where a cell alone takes 45 and over 90.
# What torch chose by timing kernels is deleted: it was measured beside other programs, and the cells choose again.
# The caller sets TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR for this and for the sweep.
set -u
out=$1 model=$2
shift 2
folder=$(mktemp -d)
for batch in "$@"; do
  (
    "${PYTHON:-python}" launch.py gpus=0 "model=$model" "optimize=${OPTIMIZE:-compile}" "batch_size=$batch" "output_dir=$folder/$batch" \
      tracking=none report=false noise_pairs=0 benchmark.max_seconds=0.3 benchmark.min_iterations=3 benchmark.warmup_iterations=1 \
      benchmark.warmup_min_seconds=0 benchmark.exposed_rounds=1 benchmark.calibrate=none ${SMALL:+device=cpu} > "$out/before-$model-$batch.txt" 2>&1
    echo "$model, batch $batch: status $? after $SECONDS s"
  ) &
done
wait
find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete
rm -rf "$folder"
