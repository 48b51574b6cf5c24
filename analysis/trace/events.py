"""The model of a trace from any profiler: what computed, communicated and copied on each rank.

Events are structured arrays, one row per event. All times of a rank are ns on one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace.time_sets import Spans, subtract, union

# Between kernels that were enqueued in time: on an H200 1.4 µs at the median under nsys, 2.5 under
# torch.profiler.
GAP_NS = 10_000

EVENT = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("lane", np.int64),  # CUDA stream, or thread on the host
        ("name", np.int64),  # index into `Trace.names`; of a collective "AllReduce"
        ("launch", np.int64),  # host time of the call that launched it; -1: not known
        ("communicator", np.int64),  # of a collective, index into `Trace.names`; -1: not known
        ("bytes", np.int64),  # of a copy; -1: not known
        ("peer", np.int64),  # 1 for a copy between two GPUs
    ]
)
Events = NDArray[Any]  # of EVENT
Names = dict[str, int]  # a name's number; in the order of the numbers


def number_of(name: str, names: Names) -> int:
    """Return the name's number, a new one for a new name."""
    return names.setdefault(name, len(names))


def make_events(count: int) -> Events:
    """Return rows of which only is known that no copy is between two GPUs."""
    events = np.zeros(count, EVENT)
    for column in ("launch", "communicator", "bytes"):
        events[column] = -1
    return events


def spans(events: Events) -> Spans:
    """Return starts and ends, shape (n, 2), in the events' order."""
    return np.column_stack((events["start"], events["end"]))


@dataclass(frozen=True, eq=False)
class RankTrace:
    """One rank: a process on its GPU.

    - `compute`: GPU kernels other than NCCL's; without GPU activity (`on_host`), the operators that
      ran on the host.
    - `collectives`: NCCL's kernels, or gloo's calls.
    - `ranges`: NVTX ranges, or those of record_function.
    - `device`: the GPU's number with CUDA_VISIBLE_DEVICES undone if the trace allows it, else the
      CUDA device; None on a host rank.
    """

    rank: int
    device: int | None
    compute: Events
    collectives: Events
    copies: Events
    memsets: Events
    ranges: Events
    on_host: bool = False
    backend: str = "nccl"
    pid: int | None = None
    gpu: str | None = None
    bus_id: str | None = None

    @cached_property
    def work(self) -> Spans:
        """Return the set of times at which compute ran."""
        return union(spans(self.compute))

    @cached_property
    def gaps(self) -> Spans:
        """Return the pauses of at most 10 µs between two compute kernels."""
        between = np.column_stack((self.work[:-1, 1], self.work[1:, 0]))
        return between[between[:, 1] - between[:, 0] <= GAP_NS]

    @cached_property
    def communication(self) -> Spans:
        """Return the set of times at which a collective or a copy between two GPUs ran."""
        return union(spans(self.collectives), spans(self.copies[self.copies["peer"] == 1]))

    @cached_property
    def exposed(self) -> Spans:
        """Return the set of times of communication without compute."""
        return subtract(self.communication, self.work)

    @cached_property
    def activity(self) -> Spans:
        """Return the set of times at which anything ran."""
        tables = (self.compute, self.collectives, self.copies, self.memsets)
        return union(*map(spans, tables))


@dataclass(frozen=True, eq=False)
class Trace:
    """The ranks of one file, or of all files of a run.

    `clock` names the clock of a file's times, None: not known. `numbered`: the file itself numbers
    its ranks. `one_clock`: times of different ranks can be compared.
    """

    source: str
    names: Sequence[str]
    ranks: tuple[RankTrace, ...]
    clock: str | None = None
    numbered: bool = True
    one_clock: bool = True
    world_size: int | None = None
    notes: tuple[str, ...] = ()
