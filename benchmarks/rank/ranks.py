"""The ranks of a cell as a benchmark sees them, and the lines that a rank writes."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import CellFolder, Kind, Lines, safe_files
from benchmarks.record.lines import now
from trainers import collectives, memory

POLL_SECONDS = 0.02  # between two looks while rank 0 works: far below the seconds that it takes
# Seconds between heartbeats: far below any deadline, far above the cost of a line.
BEAT_SECONDS = 1.0
COUNT_FORMAT = b"%20d"  # of one width, so that a write replaces the number before


@dataclass(frozen=True)
class Ranks:
    """This rank among all ranks. Values travel over gloo, outside every timed window.

    Clocks of two hosts have nothing in common: no time of another rank may be subtracted from one
    of this rank's.
    """

    rank: int
    world_size: int
    device: torch.device
    several_hosts: bool = False

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, by rank. All pass the same number. Collective."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [values.tolist() for values in everyone]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over the ranks. Collective.

        An iteration takes as long as its slowest rank.
        """
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def barrier(self) -> None:
        """Finish this rank's device, then wait on the host for every rank. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))

    def on_rank_zero(self, work: Callable[[], None], beat: Callable[[int], None]) -> None:
        """Run `work` on rank 0. Collective.

        The others wait on the host with idle devices and call `beat` as a sign of life.
        """
        if self.rank == 0:
            work()
        waiting = dist.all_reduce(torch.zeros(1), async_op=True)
        while not waiting.is_completed():
            beat(0)
            time.sleep(POLL_SECONDS)
        waiting.wait()

    def map_shared(self, size_bytes: int) -> mmap.mmap:
        """Map zeroed host memory that every rank sees; no file stays behind. Collective.

        Raises:
            OSError: there is not that much shared memory.
            ValueError: the ranks are on several hosts, which share none.
        """
        if self.several_hosts:
            accepted = "expected a cell on one host"
            raise ValueError(f"ranks on several hosts share no memory; {accepted}")
        path = memory.named(collectives.broadcast_json(memory.new_path().name))
        if self.rank == 0:
            mapped = memory.create(path, size_bytes)
        self.barrier()
        if self.rank != 0:
            mapped = memory.attach(path, size_bytes)
        self.barrier()
        if self.rank == 0:
            path.unlink()
        return mapped


@dataclass(frozen=True)
class Block:
    """One timed window: iterations back to back, after one lead-in that is kept and not counted."""

    ms: list[float]  # of each counted iteration, on the device's clock
    lead_in_ms: float  # of the lead-in, which starts on an idle device
    launch_ms: float  # host time to enqueue the lead-in
    device_ms: float  # the whole window on the device's clock
    host_ms: float  # the whole window on the host's clock


@dataclass
class Result:
    """Facts that only the ranks know, equal on all. Samples are lines (benchmarks/derived.py)."""

    metrics: dict[str, float] = field(default_factory=dict)  # name: value; the unit is in the name
    # {metric: its 95 % interval inside the run: low, high, and how it was found}
    within_run: dict[str, dict[str, float]] = field(default_factory=dict)
    # name: [[step, value], …], one for each window
    series: dict[str, list[list[float]]] = field(default_factory=dict)
    # Matrices and rows, in the JSON shapes of `python -m analysis`.
    tables: dict[str, Any] = field(default_factory=dict)
    model: dict[str, float] = field(default_factory=dict)  # parameters, arrays, gradient_bytes
    # Facts that analysis.validity.checks judges.
    checks: dict[str, Any] = field(default_factory=dict)


class Reporter:
    """Appends phases, heartbeats and samples to `<cell>/ranks/<rank>.jsonl`."""

    def __init__(self, folder: CellFolder, rank: int) -> None:
        """Open the lines of a rank, in the folder of its cell or of an untimed pass.

        Raises OSError: they cannot be written there.
        """
        self._lines = Lines(folder.rank_lines(rank))
        self.folder = folder
        # Heartbeats are too far apart to show which of several stopped ranks is behind; this file
        # always holds the count.
        self._count = safe_files.open_own(folder.rank_count(rank), append=False)
        os.pwrite(self._count, COUNT_FORMAT % 0, 0)
        self._phase = "start"
        self._iterations = 0
        self._next_beat = 0.0

    def line(self, kind: str, **content: Any) -> None:
        """Write one line. It is on disk when this returns."""
        self._lines.write(kind, now(), **content)
        self._lines.sync()

    def phase(self, name: str) -> None:
        """Begin a phase. The terminal shows its name, and so does the message of a hang."""
        self._phase = name
        self.line(Kind.PHASE, phase=name)

    def beat(self, iterations: int = 1) -> None:
        """Count iterations that were enqueued.

        Called inside timed windows: at most one line a second, without fsync.
        """
        self._iterations += iterations
        if iterations:
            os.pwrite(self._count, COUNT_FORMAT % self._iterations, 0)
        moment = time.monotonic()
        if moment >= self._next_beat:
            self._next_beat = moment + BEAT_SECONDS
            self._lines.write(Kind.BEAT, now(), phase=self._phase, iterations=self._iterations)

    def output(self, text: str) -> None:
        """Write what the benchmark prints; the launcher shows it at the end. One rank calls it."""
        safe_files.write_whole(self.folder.output, f"{text}\n".encode())

    def block(self, purpose: str, block: Block, images: int, **facts: Any) -> None:
        """Write the samples of a window, and `facts` of what was timed.

        `images` (or samples) are those of its counted steps.
        """
        self.line(
            Kind.BLOCK,
            purpose=purpose,
            ms=block.ms,
            lead_in_ms=block.lead_in_ms,
            launch_ms=block.launch_ms,
            device_ms=block.device_ms,
            host_ms=block.host_ms,
            images=images,
            **facts,
        )
