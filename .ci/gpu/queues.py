"""How long a step is by the stream on which its gradients are copied: `.ci/gpu/queues.py CASE`.

ResNet-50, batch 128, bf16 autocast, one GPU, without Ringside. CASE: `none` copies nothing; `first`
reduce-scatters and gathers in the first NCCL communicator of the process, a group of all ranks,
`second` in a second one; `copies` copies on a plain stream. Prints a line of JSON: medians of two
windows, and what torch.profiler sees of each stream in steps after them. Set
CUDA_DEVICE_MAX_CONNECTIONS to change the number of hardware queues (CUDA: 8). Alone it is one rank;
`torchrun --nproc-per-node 2 --no-python python .ci/gpu/queues.py CASE` runs it on two GPUs.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch.profiler import ProfilerActivity, profile

CASES = ("none", "first", "second", "copies")
BATCH, WARM_UP_STEPS, STEPS, TRACED_STEPS = 128, 12, 30, 5
MOST_GAP_US = 30.0  # longer ones are waits for the host


def exchange_of(case: str, elements: int) -> Callable[[torch.Tensor], None]:
    """Return what a case does with a step's gradients, (elements,) on the GPU."""
    # In every case: torch deals streams from one pool, also to NCCL, and the queues follow from it.
    stream = torch.cuda.Stream()
    if case == "none":
        return lambda gradients: None
    shares = torch.zeros(elements // dist.get_world_size(), device="cuda")

    def copies(gradients: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            shares.copy_(gradients[: shares.numel()])
            gradients[: shares.numel()].copy_(shares)
        torch.cuda.current_stream().wait_stream(stream)

    if case == "copies":
        return copies
    group = dist.group.WORLD
    if case == "second":
        dist.all_reduce(torch.zeros(1024, device="cuda"))
        group = dist.new_group()

    def collectives(gradients: torch.Tensor) -> None:
        for operation, output, source in (
            (dist.reduce_scatter_tensor, shares, gradients),
            (dist.all_gather_into_tensor, gradients, shares),
        ):
            work = operation(output, source, group=group, async_op=True)
            work.wait()

    return collectives


def main(case: str) -> None:
    """Time a case."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        with tempfile.NamedTemporaryFile() as meeting:
            dist.init_process_group("nccl", f"file://{meeting.name}", rank=0, world_size=1)
    network = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    images = torch.randn(BATCH, 3, 224, 224, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    targets = torch.randint(1000, (BATCH,), device="cuda")
    elements = sum(weight.numel() for weight in network.parameters())
    # Every rank takes an equal share.
    padding = -elements % dist.get_world_size()
    gradients = torch.zeros(elements + padding, device="cuda")
    exchange = exchange_of(case, gradients.numel())

    def steps_ms(count: int) -> list[float]:
        """Train `count` + 1 steps; return what each but the first and the last took."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks:
            mark.record()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(network(images), targets)
            loss.backward()
            flat = [weight.grad.flatten() for weight in network.parameters()]
            torch.cat(flat, out=gradients[:elements])
            exchange(gradients)
            optimizer.step()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks[1:])]

    steps_ms(WARM_UP_STEPS)
    row: dict[str, Any] = {
        "case": case,
        "ranks": dist.get_world_size(),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "ms": [round(statistics.median(steps_ms(STEPS)), 3) for _ in range(2)],
    }
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        steps_ms(TRACED_STEPS)
    # By stream: start and end of all that ran on it, in ns.
    by_stream: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in recorded.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns():
            start_ns = event.start_ns()
            end_ns = start_ns + event.duration_ns()
            by_stream[event.device_resource_id()].append((start_ns, end_ns))
    for stream, spans in by_stream.items():
        spans.sort()
        gaps_us = []
        for (_, end_ns), (start_ns, _) in itertools.pairwise(spans):
            if start_ns - end_ns < 1e3 * MOST_GAP_US:
                gaps_us.append((start_ns - end_ns) / 1e3)
        busy_ms = sum(end_ns - start_ns for start_ns, end_ns in spans) / 1e6 / (TRACED_STEPS + 1)
        row[f"stream {stream}"] = {
            "busy_ms": round(busy_ms, 3),
            "gap_us": round(statistics.median(gaps_us or [0.0]), 3),
        }
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    os._exit(0)  # a process group that is destroyed may wait for its threads


if __name__ == "__main__":
    if sys.argv[1:2] not in [[case] for case in CASES] or len(sys.argv) > 2:
        sys.exit(f"CASE={' '.join(sys.argv[1:])}: accepted are {', '.join(CASES)}")
    main(sys.argv[1])
