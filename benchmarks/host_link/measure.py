"""`benchmark=host_link`: copies between the host's memory and each GPU, and the bandwidth of that memory.

Copies run on one GPU alone and on all at once, from pinned and pageable memory. The host's memory is copied and summed as
STREAM does it (McCalpin 1995). The rate of both directions of all GPUs at once is the reference of strategies with a stage in
the host's memory. README.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.timing.clock import Clock
from conf.cell import Cell
from conf.host_limits import usable_cores
from trainers.process import CORES, on_threads


@dataclass(frozen=True)
class Operation:
    """What is timed, and the bytes that one call counts."""

    name: str
    memory: str  # pinned or pageable; host: the data stays in the host's memory
    run: Callable[[], None]
    counted_bytes: int


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective."""
    asked = cell.benchmark
    size, iterations, given = int(asked["bytes"]), int(asked["iterations"]), asked["threads"]
    share = max(1, CORES // ranks.world_size)
    clock = Clock(ranks)
    for operation in _operations(ranks.device, size, bool(asked["pageable"])):
        for together in (False, True) if ranks.world_size > 1 else (False,):
            reporter.phase(
                f"{operation.name} {operation.memory}{' all at once' if together else ''}"
            )
            # Alone in the host's memory a rank may have every core: one copy engine needs none.
            threads = int(given) if given != "share" else share if together else usable_cores()
            facts = {
                "bytes": size,
                "at_once": ranks.world_size if together else 1,
                "threads": threads,
            }
            with on_threads(threads):
                _time(operation, together, facts, iterations, clock, ranks, reporter)
    return Result()


def _operations(device: torch.device, size: int, pageable: bool) -> Iterator[Operation]:
    """Yield every operation with buffers of its own, whose pages exist before the first call."""
    if device.type == "cuda":
        there, back = (
            torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2)
        )
        for memory in ("pinned", "pageable") if pageable else ("pinned",):
            source, target = (_filled(size, memory == "pinned") for _ in range(2))
            up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

            def to_device(source: Tensor = source) -> None:
                there.copy_(source, non_blocking=True)

            def to_host(target: Tensor = target) -> None:
                target.copy_(back, non_blocking=True)

            def both(
                upward: Callable[[], None] = to_device,
                downward: Callable[[], None] = to_host,
                up: torch.cuda.Stream = up,
                down: torch.cuda.Stream = down,
            ) -> None:
                _at_once(torch.cuda.current_stream(device), ((up, upward), (down, downward)))

            yield Operation("to_device", memory, to_device, size)
            yield Operation("to_host", memory, to_host, size)
            if (
                memory == "pinned"
            ):  # pageable copies hold the calling thread: one thread has no two of them at once
                yield Operation("both", memory, both, size)
    first, second, third = (_filled(size, False).view(torch.float32) for _ in range(3))
    # STREAM's counting: what a line of the program reads and writes, not what the cache fetches to write.
    yield Operation("copy", "host", lambda: _done(second.copy_(first)), 2 * size)
    yield Operation("add", "host", lambda: _done(torch.add(first, second, out=third)), 3 * size)


def _at_once(
    timed: torch.cuda.Stream, lanes: Sequence[tuple[torch.cuda.Stream, Callable[[], None]]]
) -> None:
    """Make each call on its own stream, after the work queued on `timed`; `timed` goes on when all calls have ended."""
    for (
        stream,
        _,
    ) in lanes:  # all before the first join: a lane forked after it would wait for the other's end
        stream.wait_stream(timed)
    for stream, call in lanes:
        with torch.cuda.stream(stream):
            call()
    for stream, _ in lanes:
        timed.wait_stream(stream)


def _done(_: Tensor) -> None:
    """Drop the result: operators of the host's memory return when they are done."""


def _filled(size: int, pinned: bool) -> Tensor:
    """Return `size` bytes that differ and, as float32, are normal numbers: a sum of denormal ones is slow."""
    buffer = torch.empty(size // 4, dtype=torch.float32, pin_memory=pinned)
    return buffer.uniform_(1.0, 2.0).view(torch.uint8)


def _time(
    operation: Operation,
    together: bool,
    facts: dict[str, Any],
    iterations: int,
    clock: Clock,
    ranks: Ranks,
    reporter: Reporter,
) -> None:
    """Time an operation on all ranks at once, or on each while the others wait, and write the samples. Collective."""
    for _ in range(2):
        operation.run()  # page tables, the driver's staging buffers, threads
    facts = {
        "operation": operation.name,
        "memory": operation.memory,
        "counted_bytes": operation.counted_bytes,
        **facts,
    }
    for turn in [None] if together else range(ranks.world_size):
        ours = turn is None or turn == ranks.rank
        block = clock.block(operation.run if ours else _wait, iterations, reporter.beat)
        if ours:
            reporter.block(
                f"{operation.name} {operation.memory}{' all' if together else ''}",
                block,
                0,
                **facts,
            )


def _wait() -> None:
    """Do nothing: another rank has its turn."""
