"""The model of a trace from any profiler: what computed, communicated and copied on each rank, on one clock, in ns.

An event has a start and an end in ns, a lane (CUDA stream, or thread on the host), a name, and the host time of the
call that launched it (-1: not known). A name is an index into `Trace.names`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import Flags, Spans, Times, union

Kind = TypeVar("Kind", bound="Events")
# Between kernels that were enqueued in time: on an H200 1.4 µs at the median under nsys, 2.5 under torch.profiler.
GAP_NS = 10_000


@dataclass(frozen=True, eq=False)
class Events:
    """Columns of equal length, one row per event."""

    start: Times
    end: Times
    lane: Times
    name: Times
    launch: Times

    def __len__(self) -> int:
        return len(self.start)

    @property
    def spans(self) -> Spans:
        """Return starts and ends, shape (n, 2), in the events' order."""
        return np.column_stack((self.start, self.end))

    @property
    def duration(self) -> Times:
        """Return durations in ns, shape (n,)."""
        return self.end - self.start

    def where(self: Kind, chosen: Flags | Times) -> Kind:
        """Return the rows chosen by a mask or by indices."""
        return type(self)(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


@dataclass(frozen=True, eq=False)
class Collectives(Events):
    """NCCL's kernels, or gloo's calls. `label` is the collective ("AllReduce"), `communicator` is -1 if not known."""

    label: Times
    communicator: Times


@dataclass(frozen=True, eq=False)
class Copies(Events):
    """Copies; `name` is the kind ("HtoD"), `bytes` is -1 if not known, `peer`: between two GPUs."""

    bytes: Times
    peer: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RankTrace:
    """One rank: a process on its GPU.

    - `compute`: GPU kernels other than NCCL's; without GPU activity (`on_host`), the operators that ran on the host.
    - `ranges`: NVTX ranges, or those of record_function.
    - `device`: the GPU's number with CUDA_VISIBLE_DEVICES undone if the trace allows it, else the CUDA device; None on
      a host rank.
    """

    rank: int
    device: int | None
    compute: Events
    collectives: Collectives
    copies: Copies
    memsets: Events
    ranges: Events
    on_host: bool = False
    pid: int | None = None
    gpu: str | None = None
    bus_id: str | None = None

    @cached_property
    def work(self) -> Spans:
        """Return the set of times at which compute ran."""
        return union(self.compute.spans)

    @cached_property
    def gaps(self) -> Spans:
        """Return the pauses of at most 10 µs between two compute kernels."""
        between = np.column_stack((self.work[:-1, 1], self.work[1:, 0]))
        return between[between[:, 1] - between[:, 0] <= GAP_NS]

    @cached_property
    def communication(self) -> Spans:
        """Return the set of times at which a collective or a copy between two GPUs ran."""
        return union(self.collectives.spans, self.copies.spans[self.copies.peer])

    @cached_property
    def activity(self) -> Spans:
        """Return the set of times at which anything ran."""
        return union(
            *(
                events.spans
                for events in (self.compute, self.collectives, self.copies, self.memsets)
            )
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace of all given ranks; `one_clock`: times of different ranks can be compared."""

    source: str
    names: Sequence[str]
    ranks: tuple[RankTrace, ...]
    one_clock: bool
    world_size: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TraceFile:
    """The ranks of one file. Files with the same `clock` can be compared in time; None: the clock is not known.

    `numbered`: the file itself numbers its ranks.
    """

    file: str
    source: str
    ranks: tuple[RankTrace, ...]
    clock: str | None
    numbered: bool
    world_size: int | None = None
    notes: tuple[str, ...] = ()


class Names:
    """A table of names that grows: each name has one number."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the name's number, a new one for a new name."""
        known = self._numbers.setdefault(name, len(self.table))
        if known == len(self.table):
            self.table.append(name)
        return known

    def mapped(self, names: Sequence[str]) -> Times:
        """Return the numbers of many names."""
        return np.array([self.number(name) for name in names], dtype=np.int64)


def column(values: Sequence[int] | Times) -> Times:
    """Return a column of numbers."""
    return np.asarray(values, dtype=np.int64)


def no_events() -> Events:
    """Return a table without rows."""
    return Events(*(column([]) for _ in range(5)))


def no_collectives() -> Collectives:
    """Return a table without rows."""
    return Collectives(**vars(no_events()), label=column([]), communicator=column([]))


def no_copies() -> Copies:
    """Return a table without rows."""
    return Copies(**vars(no_events()), bytes=column([]), peer=np.array([], dtype=np.bool_))
