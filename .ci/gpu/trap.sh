#!/usr/bin/env bash
# Why a second process group with a device_id makes steps slower (METHOD.md, "Warm ranks"): second_group.py trains in turns with groups
# made in different ways, and tells of each the step, the gap between empty kernels at several moments and on another stream, threads,
# memory, clocks, and the processes on each GPU; then the same with one variable changed. 2 GPUs, about 4 minutes.
# Fills METHOD "Warm ranks", the reason that is not known. A gap that widens at one moment names what does it.
. "$(dirname "$0")/common.sh"
LINES_SHOWN=40
told() { step "$1" "$2" env "${@:3}" "$PYTHON" .ci/gpu/second_group.py "$out/$2.json" "model=$model" "batch_size=$(small 256 8)" "${one[@]}"; }
export TURNS=device_id,device_id,plain,early,plain,after_work,side_stream,plain
told 120 trap
export TURNS=device_id,device_id,plain
if [ "${SMALL:-}" ]; then TURNS=device_id,plain; fi
told 60 trap_without_cumem NCCL_CUMEM_ENABLE=0
told 60 trap_one_queue CUDA_DEVICE_MAX_CONNECTIONS=1
told 60 trap_without_event_cache TORCH_NCCL_CUDA_EVENT_CACHE=0
told 60 trap_without_monitoring TORCH_NCCL_ENABLE_MONITORING=0
told 60 trap_expandable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
told 60 trap_without_ras NCCL_RAS_ENABLE=0
finish
