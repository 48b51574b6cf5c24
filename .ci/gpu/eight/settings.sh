#!/usr/bin/env bash
# The command that Ringside was made for, its levels, the classes of subsets, the best and the worst four, and a trace of all ranks.
# 8 GPUs (N=4: four; best and worst of two), about 5 minutes.
# Fills RESULTS "NCCL settings", "Traces" and a table of classes. Copy $out/settings_x8, …, packed, to tests/data/h200_x8.
. "$(dirname "$0")/shared.sh"
pair=gpus=$(small 0,3 0,1)
sweep 60 "command_x$N" "$pair" "model=$model" nccl.p2p_level=LOC "${windows[@]}" "${short[@]}"
cells 90 "settings_x$N" "$pair" "model=$model" nccl.p2p_level=null,NVL,PIX,LOC "${windows[@]}" "${short[@]}" noise_pairs=0
if [ -z "${SMALL:-}" ]; then
  cells 60 "best_x$N" "gpus=best:$((N / 2)),worst:$((N / 2))" "model=$model" "${windows[@]}" noise_pairs=0
  cells 160 "classes_x$N" gpus=classes "model=$model" "${windows[@]}" noise_pairs=0
fi
sweep 110 "trace_x$N" "gpus=[$all]" "model=$model" "profiler=$(small auto torch)" "${windows[@]}" "${short[@]}"
finish "command_x$N" "settings_x$N" "best_x$N" "classes_x$N" "trace_x$N"
