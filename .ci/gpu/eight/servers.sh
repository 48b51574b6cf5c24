#!/usr/bin/env bash
# Servers on GPUs of their own (7 + 1, 6 + 2, 4 + 1), and the exchange of every strategy alone. 8 GPUs (N=4: 3 + 1, 2 + 2, 2 + 1),
# about 4.5 minutes.
# Fills RESULTS "Strategies on eight GPUs" and "The exchange alone". Copy $out/servers_x8, $out/exchange_x8, packed, to tests/data/h200_x8.
. "$(dirname "$0")/shared.sh"
first() { seq -s , 0 $(($1 - 1)); }  # NUMBER: so many GPUs
options=("model=$model" "${windows[@]}" "${short[@]}" study="servers_x$N" noise_pairs=0)
if [ -z "${SMALL:-}" ]; then
  on_gpus=strategy=kvstore_dist_sync_device,kvstore_dist_async_device
  cells 90 one_server "gpus=[$(first $((N - 1)))]" "$on_gpus" "strategy.server_gpus=$((N - 1))" "${options[@]}"
  cells 90 two_servers "gpus=[$(first $((N - 2)))]" "$on_gpus" strategy.servers=2 \
    "strategy.server_gpus=$((N - 2))+$((N - 1))" "${options[@]}"
  cells 60 few_workers "gpus=[$halves]" strategy=kvstore_dist_async_device "strategy.server_gpus=$((N - 1))" "${options[@]}"
fi
cells 240 "exchange_x$N" "gpus=[$all]" benchmark=exchange "model=$model" \
  strategy=nccl_allreduce,kvstore_device,cpu_staged,kvstore_dist_sync,kvstore_dist_async,kvstore_dist_sync_device,kvstore_dist_async_device
finish "servers_x$N" "exchange_x$N"
