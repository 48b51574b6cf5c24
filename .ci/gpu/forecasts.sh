#!/usr/bin/env bash
# A blind test of forecasts: 14 cells that calibrate, then cells of other batch sizes, transports, sizes of buckets, hooks and another
# model, each forecast before its ranks start. 2 GPUs, about 9 minutes.
# Fills RESULTS "Forecasts". Copy $out/forecasts, packed, to tests/data/h200_x2; predict_*.txt have the tables.
. "$(dirname "$0")/common.sh"
brief=(predict=auto noise_pairs=0 "$(small benchmark.max_seconds=0.6 benchmark.max_seconds=0.3)"
  benchmark.exposed_rounds=1 "${short[@]}")
both=strategy=nccl_allreduce,kvstore_device
forecast() { cells "$@" study=forecasts "${brief[@]}"; }  # all of one study, so that each sweep knows those before
# What the others are forecast from: 12 + 2 cells.
forecast 190 calibration 'gpus=[0],[0,1]' "model=$model" strategy=none,nccl_allreduce,kvstore_device "batch_size=$(small 256,128 32,16)"
forecast 70 transport gpus=0,1 "model=$model" "$both" nccl.p2p_level=LOC "batch_size=$(small 256 32)"
# What is forecast: 16 + 6 + 4 + 2 + 4.
forecast 180 batches gpus=0,1 "model=$model" "$both" "batch_size=$(small 288,224,208,192,176,160,144,112 24,20)"
if [ -z "${SMALL:-}" ]; then
  forecast 100 far_batches gpus=0,1 "model=$model" "$both" nccl.p2p_level=LOC batch_size=224,192,160
  forecast 90 sizes_of_buckets gpus=0,1 "model=$model" "$both" strategy.bucket_cap_mb=10,50 batch_size=256
  forecast 70 hooks gpus=0,1 "model=$model" "$both" strategy.comm_hook=bf16 batch_size=256
  forecast 100 another_model 'gpus=[0],[0,1]' model=inception_v3 "$both" batch_size=128
fi
for held in condition batch transport model; do
  analysis "predict_$held" predict "$out/forecasts" --holdout "$held"
done
finish forecasts
