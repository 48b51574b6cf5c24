#!/usr/bin/env bash
# The way to the published rate, on one GPU: what each rewrite of optimize=max gains alone, in turns in one process (gains.py, about
# 4.5 minutes, most of it compiling), then cells of compile and max in two runs (about 3.5 minutes). 1 GPU.
# Fills RESULTS "The way to the published rate": the table of gains, the kernels that take longest, the best rate.
. "$(dirname "$0")/common.sh"
LINES_SHOWN=60
step 330 gains "$PYTHON" .ci/gpu/gains.py "$out" "model=$model" "precision=$weights" "batch_size=$(small 512 16)" "${one[@]}"
cells 300 fastest gpus=0 "model=$model" "optimize=$compile,$(small max eager)" "precision=$weights" "batch_size=$(small 1024 16)" \
  "${windows[@]}" "${short[@]}" repeats=2
finish fastest
