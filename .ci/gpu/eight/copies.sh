#!/usr/bin/env bash
# Copies between all pairs of GPUs, alone and at once, and the links to the host from one GPU to all. 8 GPUs (N=4: four), about 3
# minutes. P2P_TEST may name p2pBandwidthLatencyTest of the CUDA samples, which then runs in the same call.
# Fills RESULTS "Links". Copy $out/p2p_x8, $out/host_link_x8, packed, to tests/data/h200_x8/links.
. "$(dirname "$0")/shared.sh"
if [ "${SMALL:-}" ]; then less=(benchmark.repeats=1 benchmark.bytes=1000000); fi
cells 300 "p2p_x$N" "gpus=[$all]" benchmark=p2p benchmark.concurrent=true "${less[@]:-benchmark.repeats=5}"
if [ "${P2P_TEST:-}" ]; then step 60 p2p_tool "$P2P_TEST"; fi
cells 150 "host_link_x$N" "gpus=[0],$scale" benchmark=host_link
finish "p2p_x$N" "host_link_x$N"
