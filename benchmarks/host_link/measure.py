"""`benchmark=host_link`: copies between the host and each GPU, and the host's memory bandwidth.

Copies run on one GPU alone and on all at once, from pinned and pageable memory. The host's memory
is copied and summed as STREAM does it (McCalpin 1995). The rate of both directions of all GPUs at
once is the reference of strategies with a stage in the host's memory. README.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.timing.clock import Clock
from conf.cell import Cell
from conf.host import usable_cores
from trainers.process import CORES, on_threads

BEFORE = 2  # calls before the timed ones: page tables, the driver's staging buffers, threads


@dataclass(frozen=True)
class Operation:
    """What is timed, and the bytes that one call counts."""

    name: str
    memory: str  # pinned or pageable; host: the data stays in the host's memory
    run: Callable[[], None]
    counted_bytes: int


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell: every operation on each rank alone, and on all at once. Collective."""
    options, size = cell.benchmark, int(cell.benchmark["bytes"])
    clock = Clock(ranks)
    for operation in _operations(ranks.device, size, bool(options["pageable"])):
        for together in (False, True) if ranks.world_size > 1 else (False,):
            name = f"{operation.name} {operation.memory}"
            reporter.phase(f"{name}{' all at once' * together}")
            threads = options["threads"]
            if threads == "share":
                # Alone in the host's memory a rank may have every core: a copy engine needs none.
                threads = usable_cores()
                if together:
                    threads = max(1, CORES // ranks.world_size)
            facts = {
                "operation": operation.name,
                "memory": operation.memory,
                "counted_bytes": operation.counted_bytes,
                "bytes": size,
                "at_once": ranks.world_size if together else 1,
                "threads": int(threads),
            }
            with on_threads(int(threads)):
                for _ in range(BEFORE):
                    operation.run()
                for turn in [ranks.rank] if together else range(ranks.world_size):
                    timed = operation.run if turn == ranks.rank else _wait
                    block = clock.block(timed, int(options["iterations"]), reporter.beat)
                    if turn == ranks.rank:
                        reporter.block(f"{name}{' all' * together}", block, 0, **facts)
    return Result()


def _operations(device: torch.device, size: int, pageable: bool) -> Iterator[Operation]:
    """Yield every operation with buffers of its own, whose pages exist before the first call."""
    if device.type == "cuda":
        there = torch.empty(size, dtype=torch.uint8, device=device).random_()
        back = torch.empty(size, dtype=torch.uint8, device=device).random_()
        yield from _copies(there, back, "pinned")
        if pageable:
            yield from _copies(there, back, "pageable")
    first, second, third = (_filled(size, False).view(torch.float32) for _ in range(3))

    def copy() -> None:
        second.copy_(first)

    def add() -> None:
        torch.add(first, second, out=third)

    # STREAM's counting: what a line of the program reads and writes, not what the cache fetches.
    yield Operation("copy", "host", copy, 2 * size)
    yield Operation("add", "host", add, 3 * size)


def _copies(there: Tensor, back: Tensor, memory: str) -> Iterator[Operation]:
    size, device = len(there), there.device
    source, target = (_filled(size, memory == "pinned") for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_device() -> None:
        there.copy_(source, non_blocking=True)

    def to_host() -> None:
        target.copy_(back, non_blocking=True)

    def both() -> None:
        timed = torch.cuda.current_stream(device)
        # Both wait before the first join: a stream forked after it would wait for the other's end.
        up.wait_stream(timed)
        down.wait_stream(timed)
        with torch.cuda.stream(up):
            to_device()
        with torch.cuda.stream(down):
            to_host()
        timed.wait_stream(up)
        timed.wait_stream(down)

    yield Operation("to_device", memory, to_device, size)
    yield Operation("to_host", memory, to_host, size)
    if memory == "pinned":  # pageable copies hold the calling thread: no two at once
        yield Operation("both", memory, both, size)


def _filled(size: int, pinned: bool) -> Tensor:
    """Return bytes that differ and are normal float32: a sum of denormal ones is slow."""
    buffer = torch.empty(size // 4, dtype=torch.float32, pin_memory=pinned)
    return buffer.uniform_(1.0, 2.0).view(torch.uint8)


def _wait() -> None:
    """Do nothing: another rank has its turn."""
