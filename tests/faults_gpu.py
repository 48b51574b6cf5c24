"""Kinds of faults that need a GPU, for faults_planted: they run inside a rank."""

import os
import subprocess
import sys

STRANGER_S = 8  # how long another process computes on the GPU
STRANGER = f"""
import time, torch
square, end = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16), time.time() + {STRANGER_S}
while time.time() < end:
    square @ square
    torch.cuda.synchronize()
"""


def illegal_access(pid):
    """Have a kernel write far outside of what the process owns; CUDA tells at a later call."""
    import torch
    from torch.cuda import _compile_kernel

    source = 'extern "C" __global__ void outside(float* where) { where[1LL << 40] = 1.0f; }'
    _compile_kernel(source, "outside")((1, 1, 1), (1, 1, 1), (torch.zeros(1, device="cuda"),))


def out_of_gpu_memory(pid):
    """Ask for 32 TiB of the GPU's memory."""
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def message_that_nobody_sends(pid):
    """Wait in NCCL for a message from another rank, which sends none."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1 << 20, device="cuda"), (dist.get_rank() + 1) % dist.get_world_size())


def another_collective_of_nccl(pid):
    """Enqueue a broadcast where all others enqueue an all_reduce.

    On two H200s nothing waits for long: each collective of this rank meets the one before it of the other, and ends.
    """
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(1 << 20, device="cuda"), dist.get_rank())


def stranger(pid):
    """Start a process that is not of the cell and computes on this rank's GPU for STRANGER_S."""
    foreign = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RINGSIDE", "PYTHONPATH"))
    }
    visible = foreign["CUDA_VISIBLE_DEVICES"].split(",")
    foreign["CUDA_VISIBLE_DEVICES"] = visible[int(os.environ["LOCAL_RANK"])]
    subprocess.Popen([sys.executable, "-c", STRANGER], env=foreign, start_new_session=True)
