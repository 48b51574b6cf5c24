"""The model of a trace from any profiler: what computed, communicated and copied on each rank.

Events are structured arrays, one row per event. All times of a rank are ns on one clock. Sets of
times are arrays of half-open intervals [start, end): sorted, disjoint, none empty or touching the
next. Everything works on arrays: a million intervals take tenths of a second.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]  # shape (n,), ns
Spans = NDArray[np.int64]  # shape (n, 2), ns: start, end
Flags = NDArray[np.bool_]

NOTHING: Spans = np.empty((0, 2), dtype=np.int64)

# Between kernels that were enqueued in time: on an H200 1.4 µs at the median under nsys, 2.5 under
# torch.profiler.
GAP_NS = 10_000

# Longest first: AllReduce and ReduceScatter contain Reduce.
_COLLECTIVES = (
    *("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "SendRecv", "Scatter"),
    *("Gather", "Reduce", "Generic"),
)
_NCCL = re.compile(r"(?:void )?nccl\w*", re.IGNORECASE)

EVENT = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("device", np.int64),  # number of CUDA
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
        return union(*map(spans, self.tables))

    @property
    def tables(self) -> tuple[Events, ...]:
        """Return everything that ran, but for ranges."""
        return self.compute, self.collectives, self.copies, self.memsets


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


def split_nccl(kernels: Events, names: Names) -> tuple[Events, Flags]:
    """Return the kernels under the names of their collectives, and which are NCCL's.

    A kernel is NCCL's if its name begins with `nccl`: the rule of NVIDIA's own report
    nccl_gpu_overlap_trace. The name says the collective ("other": none), but not the algorithm or
    protocol: its suffix is that of the inlined body, not of what ran. A group of calls in one
    kernel carries the name of one of them.
    """
    collectives = kernels.copy()
    is_nccl: Flags = np.zeros(len(kernels), np.bool_)
    texts = list(names)
    for name_id in np.unique(kernels["name"]).tolist():
        head = _NCCL.match(texts[name_id])
        if head is None:
            continue
        collective = "other"
        for name in _COLLECTIVES:
            if name.lower() in head[0].lower():
                collective = name
                break
        is_of_name = kernels["name"] == name_id
        is_nccl |= is_of_name
        collectives["name"][is_of_name] = number_of(collective, names)
    return collectives, is_nccl


def union(*many: Spans) -> Spans:
    """Return the set of all times that any interval covers; reversed ones cover nothing."""
    spans = np.concatenate(many) if many else NOTHING
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NOTHING
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.append(True, spans[1:, 0] > reach[:-1]))
    last = np.append(first[1:] - 1, len(spans) - 1)
    return np.column_stack((spans[first, 0], reach[last]))


def total(spans: Spans) -> int:
    """Return the length of a set, ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def intersect(a: Spans, b: Spans) -> Spans:
    """Return the times in both sets."""
    return _sweep(a, b, np.logical_and)


def subtract(a: Spans, b: Spans) -> Spans:
    """Return the times in `a` and not in `b`."""
    return _sweep(a, b, lambda in_a, in_b: in_a & ~in_b)


def covers(spans: Spans, times: Times) -> Flags:
    """Tell for each time whether it lies in the set."""
    at = np.searchsorted(spans[:, 0], times, side="right") - 1
    inside: Flags = at >= 0
    inside[inside] = times[inside] < spans[at[inside], 1]
    return inside


def _sweep(a: Spans, b: Spans, keep: Callable[[Flags, Flags], Flags]) -> Spans:
    """Ask `keep` between every two neighbouring ends, where nothing changes; join what touches."""
    points = np.concatenate((a[:, 0], a[:, 1], b[:, 0], b[:, 1]))
    step_a = np.repeat([1, -1, 0, 0], [len(a), len(a), len(b), len(b)])
    step_b = np.repeat([0, 0, 1, -1], [len(a), len(a), len(b), len(b)])
    order = np.argsort(points, kind="stable")
    points = points[order]
    kept = keep(np.cumsum(step_a[order]) > 0, np.cumsum(step_b[order]) > 0)[:-1]
    return union(np.column_stack((points[:-1], points[1:]))[kept])
