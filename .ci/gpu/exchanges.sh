#!/usr/bin/env bash
# Exchanges alone and in a step: sizes of buckets, every strategy, half precision, a server with a GPU of its own. 2 GPUs, about 7.5
# minutes; the same exchanges of an older commit too, if OLD is a checkout of it (2 minutes more: BUCKETS=no leaves sizes out).
# Fills RESULTS "The exchange alone" (sizes of buckets too) and "Strategies on two GPUs" as they are with today's code.
. "$(dirname "$0")/common.sh"
alone=(benchmark=exchange "model=$model")
if [ "${SMALL:-}" ]; then alone+=(benchmark.iterations=2 benchmark.limit_iterations=2); fi
again() { small repeats=2 repeats=1; }
strategies=strategy=nccl_allreduce,kvstore_device,cpu_staged,kvstore_dist_sync,kvstore_dist_async
cells 190 exchange gpus=0,1 "${alone[@]}" "$strategies" "$(again)"
if [ "${OLD:-}" ]; then
  with_old cells 190 exchange_old gpus=0,1 "${alone[@]}" "$strategies" "$(again)"
fi
cells 60 exchange_fp16 gpus=0,1 "${alone[@]}" strategy=nccl_allreduce,kvstore_device strategy.comm_hook=fp16
cells 50 exchange_sharded gpus=0,1 "${alone[@]}" strategy=cpu_staged strategy.staging=sharded
cells 70 exchange_server gpus=0 "${alone[@]}" strategy=kvstore_dist_sync_device,kvstore_dist_async_device \
  strategy.server_gpus=1
if [ "${BUCKETS:-yes}" = yes ]; then
  cells 190 buckets gpus=0,1 "model=$model" "strategy.bucket_cap_mb=$(small 5,10,25,50,100,200 1,25)" "${windows[@]}" "${short[@]}" \
    "$(again)"
fi
cells 110 staged gpus=0,1 "model=$model" strategy=cpu_staged,kvstore_dist_sync,kvstore_dist_async "${windows[@]}" "${short[@]}"
finish exchange exchange_fp16 exchange_sharded exchange_server buckets staged
