#!/usr/bin/env bash
# Whether warm ranks measure what new ranks measure: turns of new, warm, warm, new (two pairs each), on two GPUs and on one.
# 2 GPUs, about 41 s a turn on two and 34 s on one: TURNS=5 (10 pairs each) takes about 7.5 minutes.
# Fills RESULTS "What a cell costs", warm against new ranks. Copy $out/warm_cold_2 and $out/warm_cold_1, packed, to
# tests/data/h200_x2: of each cell record.json, cell.json, ranks/, nccl/, gpus.jsonl.gz and cpu.jsonl.gz.
. "$(dirname "$0")/common.sh"
turns=${TURNS:-$(small 5 1)}
proof=(+experiment=warm_cold "model=$model" "warm_cold=$turns" "${short[@]}")
if [ "${SMALL:-}" ]; then proof+=("${windows[@]}" full=true batch_size=16); fi
cells 320 warm_cold_2 "${proof[@]}" gpus=0,1
cells 260 warm_cold_1 "${proof[@]}" gpus=0
for study in warm_cold_2 warm_cold_1; do analysis "report_$study" report "$out/$study"; done
finish warm_cold_2 warm_cold_1
