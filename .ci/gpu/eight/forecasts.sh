#!/usr/bin/env bash
# Forecasts of four and eight GPUs, written down before they run, from cells on one and two. 8 GPUs (N=4: three and four), about 6.5
# minutes.
# Fills RESULTS "Forecasts", by size. Copy $out/forecasts_x8, packed, to tests/data/h200_x8/forecasts.
. "$(dirname "$0")/shared.sh"
brief=(predict=auto noise_pairs=0 "$(small benchmark.max_seconds=0.6 benchmark.max_seconds=0.3)"
  benchmark.exposed_rounds=1 "${short[@]}" study="forecasts_x$N")
sizes="[$halves],[$all]"
if [ "$N" = 4 ]; then sizes="[0,1,2],[$all]"; fi
both=strategy=nccl_allreduce,kvstore_device
cells 150 calibration 'gpus=[0],[0,1]' "model=$model" strategy=none,nccl_allreduce,kvstore_device "batch_size=$(small 256,128 16,8)" \
  "${brief[@]}"
cells 110 alone "gpus=${each#*,}" "model=$model" "batch_size=$(small 256 16)" "${brief[@]}"
cells 60 transport gpus=0,1 "model=$model" nccl.p2p_level=LOC "batch_size=$(small 256 16)" "${brief[@]}"
if [ -z "${SMALL:-}" ]; then
  cells 170 sizes "gpus=$sizes" "model=$model" "$both" batch_size=256,192,128 "${brief[@]}"
  cells 80 far_sizes "gpus=$sizes" "model=$model" nccl.p2p_level=LOC batch_size=256 "${brief[@]}"
fi
analysis predict_size predict "$out/forecasts_x$N" --holdout size
finish "forecasts_x$N"
