"""The model of a trace from any profiler: what computed, communicated and copied on each rank.

All times of a rank are ns on one clock. An event has a start, an end, a lane (CUDA stream, or
thread on the host), a name, and the host time of the call that launched it (-1: not known). A name
is an index into `Trace.names`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import Flags, Spans, Times, subtract, union

Kind = TypeVar("Kind", bound="Events")
# Between kernels that were enqueued in time: on an H200 1.4 µs at the median under nsys, 2.5 under
# torch.profiler.
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
        columns = {field.name: getattr(self, field.name)[chosen] for field in fields(self)}
        return type(self)(**columns)

    @classmethod
    def empty(cls: type[Kind]) -> Kind:
        """Return a table without rows."""
        return cls(**{field.name: column([]) for field in fields(cls)})


@dataclass(frozen=True, eq=False)
class Collectives(Events):
    """NCCL's kernels, or gloo's calls.

    `label` is the collective ("AllReduce"), `communicator` is -1 if not known.
    """

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

    - `compute`: GPU kernels other than NCCL's; without GPU activity (`on_host`), the operators that
      ran on the host.
    - `ranges`: NVTX ranges, or those of record_function.
    - `device`: the GPU's number with CUDA_VISIBLE_DEVICES undone if the trace allows it, else the
      CUDA device; None on a host rank.
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
    def exposed(self) -> Spans:
        """Return the set of times of communication without compute."""
        return subtract(self.communication, self.work)

    @cached_property
    def activity(self) -> Spans:
        """Return the set of times at which anything ran."""
        tables = (self.compute, self.collectives, self.copies, self.memsets)
        return union(*(table.spans for table in tables))


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
    """The ranks of one file. Files with the same `clock` can be compared in time.

    `clock` is None if the clock is not known. `numbered`: the file itself numbers its ranks.
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
        if name not in self._numbers:
            self._numbers[name] = len(self.table)
            self.table.append(name)
        return self._numbers[name]

    def number_or_none(self, name: str | None) -> int:
        """Return the name's number, -1 for no name."""
        return -1 if name is None else self.number(name)


def column(values: Sequence[int] | Times) -> Times:
    """Return a column of integers."""
    return np.asarray(values, dtype=np.int64)


def unknown(count: int) -> Times:
    """Return a column of values that are not known."""
    return np.full(count, -1, dtype=np.int64)
