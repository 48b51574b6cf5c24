#!/usr/bin/env bash
# What a cell costs: ranks (of an older commit too, if OLD is a checkout of it), compiled code new and from the cache,
# and the sweep's own seconds. 2 GPUs, about 8.5 minutes; with OLD the last sweeps may be left out.
# Fills RESULTS, a table of seconds. Only the first sweep finds an empty store, as a user's first one does: run it into a new folder.
. "$(dirname "$0")/common.sh"
two=(gpus=0,1 "model=$model" strategy=nccl_allreduce,kvstore_device "batch_size=$(small 256,128 16,8)" "${windows[@]}" "${short[@]}"
  noise_pairs=0)
sweep 170 template "${two[@]}" nccl.algo=null,Ring
if [ "${OLD:-}" ]; then
  with_old sweep 110 old gpus=0,1 "model=$model" "batch_size=$(small 256,128 16,8)" "${windows[@]}" "${short[@]}" noise_pairs=0
fi
compiled=(gpus=0,1 "model=$model" "optimize=$compile" "${windows[@]}" "${short[@]}" noise_pairs=0)
sweep 170 compiled_new "${compiled[@]}"
sweep 120 compiled_cached "${compiled[@]}" nccl.algo=null,Ring
sweep 80 levels gpus=0,1 "model=$model" "${windows[@]}" "${short[@]}" nccl.p2p_level=null,LOC
for study in template old compiled_new compiled_cached levels; do
  if [ -d "$out/$study" ]; then analysis "seconds_$study" seconds "$out/$study"; fi
done
finish template compiled_new compiled_cached levels
