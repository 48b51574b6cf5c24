#!/usr/bin/env bash
# Draw which way to synchronise is fastest behind which link, without a network: two hosts as network namespaces of this
# machine, behind each link in turn. Needs ip and tc, no root and no GPU.
#
#     launch/recipes/where_each_wins.sh [FOLDER]           three links: minutes on two cores
#     FULL=1 launch/recipes/where_each_wins.sh [FOLDER]    40 links and micro-steps: an hour
#     RATES="1gbit 3gbit" DELAYS="0.1ms 2ms" launch/recipes/where_each_wins.sh [FOLDER]    these links
#
# A link is a study of FOLDER (outputs/where_each_wins); `alone` is one host, from which forecasts are made. The same command
# goes on where it was cut off.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-outputs/where_each_wins}
python=${RINGSIDE_PYTHON:-.venv/bin/python}
rates="100mbit 400mbit 2gbit" delays=0ms micro_steps=1
if [[ -n ${FULL:-} ]]; then
  rates="100mbit 200mbit 300mbit 500mbit 1gbit 1500mbit 2gbit 4gbit" delays="0.1ms 0.5ms 2ms 10ms 50ms" micro_steps=1,4
fi
rates=${RATES:-$rates} delays=${DELAYS:-$delays}

sweep() {  # STUDY RATE DELAY NODES OPTIONS…
  local study=$1 rate=$2 delay=$3 nodes=$4
  shift 4
  CUDA_VISIBLE_DEVICES= tests/in_namespaces.sh -d "$delay" "$rate" -- "$python" launch.py +experiment=where_each_wins \
    study="$study" nodes="$nodes" gpus=0 engine=command 'engine.prefix=[ip,netns,exec,{host}]' device=cpu \
    model=fmnist_cnn batch_size=16 noise_pairs=0 benchmark.max_seconds=2 benchmark.min_iterations=5 \
    benchmark.warmup_min_seconds=0.5 benchmark.warmup_max_seconds=20 benchmark.exposed_rounds=1 \
    benchmark.exchange_iterations=0 benchmark.limit_iterations=0 \
    output_dir="$folder" tracking=none report=false "$@"
}

link() {  # STUDY RATE DELAY NODES
  sweep "$@" accumulate="$micro_steps"
  sweep "$@" accumulate=1 strategy=nccl_allreduce strategy.comm_hook=fp16
}

link alone 1gbit 0ms a
for rate in $rates; do
  for delay in $delays; do link "$rate-$delay" "$rate" "$delay" a+b; done
done
exec "$python" -m analysis report "$folder"
