#!/usr/bin/env bash
# The way to the published rate, on one GPU: what each rewrite of optimize=max gains alone, in turns in one process (gains.py, 6 minutes,
# most of it compiling), then a cell of max_graph and one of compile (2 minutes). 1 GPU.
# Fills RESULTS "The published rate": the table of gains, the kernels that take longest, the best rate.
. "$(dirname "$0")/common.sh"
LINES_SHOWN=60
step 420 gains "$PYTHON" .ci/gpu/gains.py "$out" "model=$model" "precision=$weights" "batch_size=$(small 512 16)" "${one[@]}"
cells 160 fastest gpus=0 "model=$model" "optimize=$(small max_graph eager),$compile" "precision=$weights" "batch_size=$(small 1024 16)" \
  "$(small benchmark.max_seconds=5 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 "${short[@]}" noise_pairs=0
finish fastest
