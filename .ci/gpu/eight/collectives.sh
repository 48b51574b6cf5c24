#!/usr/bin/env bash
# Four collectives from 256 B to 4 GiB on 2, 4 and 8 GPUs (N=4: from 64 B, which eight cannot share in an all-gather), and nccl-tests
# beside them if NCCL_TESTS is the folder of its programs, built against the NCCL that torch has. 8 GPUs (N=4: four), about 3 minutes,
# 6 with nccl-tests.
# Fills RESULTS "Links". Copy $out/collectives_x8, packed, to tests/data/h200_x8/links, and nccl_tests_*.txt to tests/data.
. "$(dirname "$0")/shared.sh"
least=$((N > 4 ? 256 : 64))
cells 330 "collectives_x$N" "gpus=$scale" benchmark=collectives \
  benchmark.collective=all_reduce,all_gather,reduce_scatter,all_to_all "benchmark.min_bytes=$least" "benchmark.max_bytes=$bytes" \
  benchmark.factor=4 sample_gpus=false
if [ "${NCCL_TESTS:-}" ]; then
  for ((size = 2; size <= N; size *= 2)); do
    for program in all_reduce all_gather reduce_scatter alltoall; do
      step 40 "nccl_tests_${program}_$size" "$NCCL_TESTS/${program}_perf" -b "$least" -e "$bytes" -f 4 -t "$size" -g 1 -n 20 -w 5
    done
  done
fi
finish "collectives_x$N"
