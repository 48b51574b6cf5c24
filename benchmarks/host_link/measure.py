"""`benchmark=host_link`: what the host allows. Copies between its memory and each GPU, alone and all at once, pinned and
pageable; and the host's own memory, copied and summed as STREAM does it (McCalpin 1995). METHOD.md, "Host links".

Both directions at once of all GPUs is the limit that strategies with a stage in the host's memory are judged by.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import statistics
from benchmarks.timing.clock import COMPARABLE_MS, Clock
from conf.cell import Cell
from trainers.devices import CORES

# What `auto` means on (GPU, CPU worker).
AUTO = {"bytes": (256 << 20, 64 << 20), "iterations": (20, 5)}
LABELS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy (reads and writes)",
    "add": "sum of two arrays",
}


@dataclass(frozen=True)
class Operation:
    """What is timed, and the bytes that one call counts."""

    name: str
    memory: str  # pinned, pageable; host: nothing leaves the host's memory
    run: Callable[[], None]
    counted_bytes: int


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective."""
    asked = cell.asked(AUTO)
    size, iterations, given = int(asked["bytes"]), int(asked["iterations"]), asked["threads"]
    share = max(1, len(CORES) // ranks.world_size)
    clock, rows = Clock(ranks), []
    for operation in _operations(ranks.device, size, bool(asked["pageable"])):
        for together in (False, True) if ranks.world_size > 1 else (False,):
            reporter.phase(f"{operation.name} {operation.memory}{' all at once' if together else ''}")
            # Alone in the host's memory a rank may have every core: one copy engine needs none.
            threads = int(given) if given != "auto" else share if together else len(os.sched_getaffinity(0))
            torch.set_num_threads(threads)
            rows.append(_row(operation, together, threads, iterations, clock, ranks, reporter))
    result = Result(tables={"host_link": {"bytes": size, "gpus": list(cell.gpus), "rows": rows}})
    result.metrics |= _metrics(rows)
    disagreements = [found for row in rows if (found := row.pop("clock_disagreement")) is not None]
    # A CPU worker has one clock, and short copies between signs of life.
    if ranks.device.type == "cuda" and disagreements:
        result.checks["clock_disagreement"] = max(disagreements)
    if ranks.rank == 0:
        reporter.output(text(result.tables["host_link"], cell.device))
    return result


def _operations(device: torch.device, size: int, pageable: bool) -> Iterator[Operation]:
    """Every operation, with buffers that it alone holds. Their pages exist before the first call."""
    if device.type == "cuda":
        there, back = (torch.empty(size, dtype=torch.uint8, device=device).random_() for _ in range(2))
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
            if memory == "pinned":  # pageable copies hold the calling thread: one thread has no two of them at once
                yield Operation("both", memory, both, size)
    first, second, third = (_filled(size, False).view(torch.float32) for _ in range(3))
    # STREAM's counting: what a line of the program reads and writes, not what the cache fetches to write.
    yield Operation("copy", "host", lambda: _done(second.copy_(first)), 2 * size)
    yield Operation("add", "host", lambda: _done(torch.add(first, second, out=third)), 3 * size)


def _at_once(timed: torch.cuda.Stream, lanes: Sequence[tuple[torch.cuda.Stream, Callable[[], None]]]) -> None:
    """Every lane's call on its own stream, after what `timed` has done so far; `timed` goes on when all have ended."""
    for stream, _ in lanes:  # all before the first join: a lane forked after it would wait for the other's end
        stream.wait_stream(timed)
    for stream, call in lanes:
        with torch.cuda.stream(stream):
            call()
    for stream, _ in lanes:
        timed.wait_stream(stream)


def _done(_: Tensor) -> None:
    """The operators of the host's memory return when they are done."""


def _filled(size: int, pinned: bool) -> Tensor:
    """Bytes that are not all alike and, as floats, are finite and normal: a sum of denormal numbers is slow."""
    buffer = torch.empty(size // 4, dtype=torch.float32, pin_memory=pinned)
    return buffer.uniform_(1.0, 2.0).view(torch.uint8)


def _row(
    operation: Operation, together: bool, threads: int, iterations: int, clock: Clock, ranks: Ranks, reporter: Reporter
) -> dict[str, Any]:
    """One line of the table: GB/s of every rank, all together or each while the others wait. Collective."""
    for _ in range(2):
        operation.run()  # page tables, the driver's staging buffers, threads
    mine: list[float] = []
    clocks: list[float] = []
    for turn in [None] if together else range(ranks.world_size):
        ours = turn is None or turn == ranks.rank
        block = clock.block(operation.run if ours else _wait, iterations, reporter.beat)
        if ours:
            reporter.block(f"{operation.name} {operation.memory}{' all' if together else ''}", block, 0)
            mine, clocks = block.ms, [block.host_ms, block.disagreement]
    everyone = ranks.gather(mine)
    seconds = [sum(ms) / 1e3 for ms in everyone]
    counted = operation.counted_bytes * iterations
    slowest = max(everyone, key=sum)
    low, high = statistics.mean_interval(slowest)
    return {
        "operation": operation.name,
        "memory": operation.memory,
        "at_once": ranks.world_size if together else 1,
        "threads": threads if operation.memory == "host" else None,
        "gb_per_s": [counted / one / 1e9 for one in seconds],
        # All is done when the slowest is.
        "sum_gb_per_s": ranks.world_size * counted / max(seconds) / 1e9 if together else None,
        "clock_disagreement": _disagreement(ranks.gather(clocks)),
        "slowest_ms": [
            low,
            sum(slowest) / iterations,
            high,
        ],  # mean of the slowest rank, between its 95 % interval's ends
    }


def _disagreement(clocks: Sequence[Sequence[float]]) -> float | None:
    """The largest of (ms of a window, disagreement of its clocks) by rank; None where every window is too short to tell."""
    return max((disagreement for host_ms, disagreement in clocks if host_ms >= COMPARABLE_MS), default=None)


def _wait() -> None:
    """Another rank's turn."""


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """GB/s: `one_…` is the slowest rank alone, `all_…` the sum of all at once. The limit of staged strategies comes first."""
    found = {}
    for row in rows:
        memory = {"pinned": "", "pageable": "_pageable", "host": "_host"}[row["memory"]]
        how = "one" if row["at_once"] == 1 else "all"
        value = min(row["gb_per_s"]) if row["sum_gb_per_s"] is None else row["sum_gb_per_s"]
        found[f"host_link/{how}{memory}_{row['operation']}_gb_per_s"] = value
    first = [name for name in ("host_link/all_both_gb_per_s", "host_link/one_both_gb_per_s") if name in found][:1]
    return {name: found[name] for name in [*first, *found]}


def text(table: Mapping[str, Any], device: str) -> str:
    """What a person reads: a line for each measurement, GB/s of one rank and of all."""
    ranks = "GPUs" if device == "cuda" else "CPU workers"
    lines = [f"{'GB/s':32s}{'at once':>9s}{'threads':>9s}{'slowest':>10s}{'fastest':>10s}{'sum':>10s}"]
    for memory, head in (("pinned", "pinned"), ("pageable", "pageable"), ("host", "host memory")):
        rows = [row for row in table["rows"] if row["memory"] == memory]
        lines += [f"{head}"] if rows else []
        for row in rows:
            total = "" if row["sum_gb_per_s"] is None else f"{row['sum_gb_per_s']:.1f}"
            lines.append(
                f"  {LABELS[row['operation']]:30s}{row['at_once']:>9d}{row['threads'] or '':>9}"
                f"{min(row['gb_per_s']):>10.1f}{max(row['gb_per_s']):>10.1f}{total:>10s}"
            )
    if device == "cpu":
        lines.append("CPU workers have no link between host and device.")
    lines.insert(0, f"{ranks} {','.join(map(str, table['gpus']))}, {table['bytes'] / 2**20:g} MiB a copy and array")
    return "\n".join(lines)
