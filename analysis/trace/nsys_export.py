"""Read ranks from an SQLite export of Nsight Systems (`nsys export --type=sqlite`).

One report holds every process of a node on one clock. A rank is a process on a device. The report
does not number the ranks: a mark or range named `rank N` of the process does. Without marks, the
order is that of the CUDA devices, then that of the process ids (the order in which torchrun starts
them).
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.input_files import UnreadableInput
from analysis.trace.events import (
    Events,
    Names,
    RankTrace,
    Times,
    Trace,
    make_events,
    number_of,
    split_nccl,
)
from analysis.trace.nsys_tables import (
    GRAPHS,
    KERNEL,
    LATEST,
    MEMCPY,
    MEMSET,
    NVTX,
    RUNTIME,
    Export,
    open_export,
)
from analysis.trace.steps import is_step

_RANK = re.compile(r"rank[ _:=]?(\d{1,6})", re.IGNORECASE)
_MARKS = (34, 65)  # eventType
_RANGES = (59, 60, 70, 71)  # eventType: push/pop, start/end
_LAUNCHERS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMem", "cuMem")
# CUPTI's memcpy kinds by their number, copyKind.
_COPY_KINDS = (
    *("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("UVM HtoD", "UVM DtoH", "UVM DtoD"),
)
_ACTIVITY = ("deviceId", "streamId", "correlationId", "globalPid")
_WHOLE_GRAPHS = "CUDA graph launches were traced as a whole"
_TRACE_NODES = "record with --cuda-graph-trace=node"


class _Range(NamedTuple):
    """An NVTX range, or a mark, which ends where it starts."""

    start: int  # ns
    end: int
    pid: int
    thread: int
    name: str


def read_nsys(path: Path, report: Path, names: Names) -> Trace:
    """Return the ranks of the export at `path`, whose clock is that of `report`.

    NVTX ranges without any CUDA activity (ranks on CPUs) give step times only.

    Raises:
        UnreadableInput: a foreign or damaged file, or CUDA calls but no kernels: they do not say
            how long anything took, and that is not 0 ms.
    """
    with open_export(path) as export:
        version = export.version()
        strings = export.strings()
        ranges = _read_ranges(export, strings)
        notes: list[str] = []
        kernels = export.read(KERNEL, (*_ACTIVITY, "demangledName"))
        if len(kernels):
            ranks, numbered = _gpu_ranks(export, kernels, strings, ranges, names, notes)
        else:
            _refuse_calls_without_kernels(export, version)
            notes.append("no CUDA activity was traced: only step times are known")
            with_steps = {span.pid for span in ranges if is_step(span.name)}
            processes = with_steps or {span.pid for span in ranges}
            order, numbered = _order([(pid, 0) for pid in sorted(processes)], ranges)
            none = make_events(0)
            ranks = []
            for rank, pid, _ in order:
                spans = _events_of(ranges, pid, names)
                ranks.append(
                    RankTrace(rank, None, none, none, none, none, spans, on_host=True, pid=pid)
                )
    if not numbered and len(ranks) > 1:
        notes.append(
            "the report does not number the ranks: they are ordered by device, else by process id"
        )
    return Trace(version, list(names), tuple(ranks), str(report), numbered, notes=tuple(notes))


def _refuse_calls_without_kernels(export: Export, version: str) -> None:
    calls, graphs = export.count(RUNTIME), export.count(GRAPHS)
    if graphs:
        raise UnreadableInput(
            f"{graphs} {_WHOLE_GRAPHS} and no kernel: communication cannot be separated from "
            f"compute; {_TRACE_NODES}"
        )
    if calls or KERNEL in export.columns:
        traced = f"{calls} CUDA calls" if calls else "a kernel table"
        raise UnreadableInput(
            f"{traced} and no GPU kernel, so no time on the GPU is known (it is not 0 ms); the "
            f"likely cause: {version} is too old for the machine's CUDA driver, or the capture "
            "range held no GPU work"
        )
    if not export.count(NVTX):
        raise UnreadableInput(
            "neither GPU kernels nor NVTX ranges were traced: record with "
            "`nsys profile -t cuda,nvtx`"
        )


def _read_ranges(export: Export, strings: dict[int, str]) -> list[_Range]:
    """Return NVTX ranges and marks, whose text is `text`, or in StringIds by `textId`."""
    ranges = []
    columns = ("start", "end", "eventType", "text", "textId", "globalTid")
    for start, end, kind, text, text_id, tid in export.select(NVTX, *columns):
        if kind in _MARKS:
            end = start
        elif kind not in _RANGES:
            continue
        name = text or strings.get(text_id)
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(tid, int):
            continue
        if name and isinstance(name, str) and 0 <= start <= end < LATEST:
            ranges.append(_Range(start, end, tid >> 24 & 0xFFFFFF, tid & 0xFFFFFF, name))
    return ranges


def _events_of(ranges: Sequence[_Range], pid: int, names: Names) -> Events:
    mine = sorted(span for span in ranges if span.pid == pid)
    events = make_events(len(mine))
    for at, span in enumerate(mine):
        events["start"][at], events["end"][at] = span.start, span.end
        events["lane"][at], events["name"][at] = span.thread, number_of(span.name, names)
    return events


def _gpu_ranks(
    export: Export,
    kernels: NDArray[Any],
    strings: dict[int, str],
    ranges: Sequence[_Range],
    names: Names,
    notes: list[str],
) -> tuple[list[RankTrace], bool]:
    """Return one rank per process and device, in order, and whether marks number them."""
    graphs = export.count(GRAPHS)
    if graphs:
        notes.append(
            f"{graphs} {_WHOLE_GRAPHS}: the kernels inside are missing here; {_TRACE_NODES}"
        )
    copied = export.read(MEMCPY, (*_ACTIVITY, "copyKind", "bytes", "srcDeviceId", "dstDeviceId"))
    memset = export.read(MEMSET, _ACTIVITY)
    launches = None
    if any(is_step(span.name) for span in ranges):
        launches = _read_launches(export, strings)
    compute, memsets = _events(kernels, launches), _events(memset, launches)
    compute["name"] = _translated(
        kernels["demangledName"],
        lambda string_id: number_of(strings.get(string_id, "unnamed kernel"), names),
    )
    collectives, is_nccl = split_nccl(compute, names)
    copies = _copies(copied, launches, names)
    memsets["name"] = number_of("memset", names)
    gpu_of = {}  # undoes CUDA_VISIBLE_DEVICES
    for pid, device, gpu in export.select("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId"):
        if isinstance(gpu, int):
            gpu_of[pid, device] = gpu
    described = {}
    for gpu, name, bus_id in export.select("TARGET_INFO_GPU", "id", "name", "busLocation"):
        described[gpu] = (name, bus_id)
    order, numbered = _order(_processes_on_devices(kernels, is_nccl, notes), ranges)
    ranks = []
    for rank, pid, device in order:
        gpu = gpu_of.get((pid, device), device)
        name, bus_id = described.get(gpu, (None, None))
        mine = _is_on(kernels, pid, device)
        ranks.append(
            RankTrace(
                rank,
                gpu,
                compute[mine & ~is_nccl],
                collectives[mine & is_nccl],
                copies[_is_on(copied, pid, device)],
                memsets[_is_on(memset, pid, device)],
                _events_of(ranges, pid, names),
                pid=pid,
                gpu=name,
                bus_id=bus_id,
            )
        )
    return ranks, numbered


def _copies(rows: NDArray[Any], launches: tuple[Times, Times] | None, names: Names) -> Events:
    copies = _events(rows, launches)
    kinds = np.where(rows["copyKind"] < len(_COPY_KINDS), np.maximum(rows["copyKind"], 0), 0)
    copies["name"] = _translated(kinds, lambda kind: number_of(_COPY_KINDS[kind], names))
    copies["bytes"] = rows["bytes"]
    source, target = rows["srcDeviceId"], rows["dstDeviceId"]
    between = (source >= 0) & (target >= 0) & (source != target)
    copies["peer"] = between | (kinds == _COPY_KINDS.index("PtoP"))
    return copies


def _pids(rows: NDArray[Any], column: str) -> Times:
    pids: Times = rows[column] >> 24 & 0xFFFFFF
    return pids


def _is_on(rows: NDArray[Any], pid: int, device: int) -> NDArray[np.bool_]:
    is_on: NDArray[np.bool_] = (_pids(rows, "globalPid") == pid) & (rows["deviceId"] == device)
    return is_on


def _processes_on_devices(
    kernels: NDArray[Any], is_nccl: NDArray[np.bool_], notes: list[str]
) -> list[tuple[int, int]]:
    """Return (process, CUDA device) of every rank.

    A process that uses NCCL on one device and touches another (a context made by accident, usually
    on GPU 0) is one rank. What it ran elsewhere is noted and not counted.
    """
    pairs = np.column_stack((_pids(kernels, "globalPid"), kernels["deviceId"]))
    with_nccl, nccl_processes = set(), set()
    for pid, device in np.unique(pairs[is_nccl], axis=0).tolist():
        with_nccl.add((pid, device))
        nccl_processes.add(pid)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    units = []
    for (pid, device), count in zip(distinct.tolist(), counts.tolist(), strict=True):
        if (pid, device) in with_nccl or pid not in nccl_processes:
            units.append((pid, device))
        else:
            notes.append(
                f"process {pid} also ran {count} kernels on CUDA device {device}, without NCCL: "
                "not counted"
            )
    return units


def _order(
    units: Sequence[tuple[int, int]], ranges: Sequence[_Range]
) -> tuple[list[tuple[int, int, int]], bool]:
    """Return (rank, process, CUDA device) in rank order, and whether marks number the ranks."""
    marks = {}
    for span in ranges:
        mark = _RANK.fullmatch(span.name)
        if mark is not None:
            marks[span.pid] = int(mark[1])
    marked = []
    for pid, device in units:
        if pid in marks:
            marked.append((marks[pid], pid, device))
    if marked and len({mark for mark, _, _ in marked}) == len(marked):
        # Another process without a mark is not a rank but a parameter server.
        return sorted(marked), True
    ordered = sorted(units, key=lambda unit: (unit[1], unit[0]))
    return [(rank, pid, device) for rank, (pid, device) in enumerate(ordered)], False


def _events(rows: NDArray[Any], launches: tuple[Times, Times] | None) -> Events:
    events = make_events(len(rows))
    events["start"], events["end"], events["lane"] = rows["start"], rows["end"], rows["streamId"]
    if launches is not None and len(rows):
        keys, times = launches
        wanted = _pids(rows, "globalPid") << 32 | rows["correlationId"]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        events["launch"] = np.where(keys[at] == wanted, times[at], -1)
    return events


def _read_launches(export: Export, strings: dict[int, str]) -> tuple[Times, Times] | None:
    """Return the calls that launched GPU work: sorted keys of process and correlation, and times.

    None if there are none. Of a call into the runtime, which calls the driver, the first counts.
    """
    names = []
    for string_id, name in strings.items():
        if name.startswith(_LAUNCHERS):
            names.append(str(string_id))
    if not names or "nameId" not in export.columns.get(RUNTIME, []):
        return None
    where = f"nameId IN ({', '.join(names)})"
    calls = export.read(RUNTIME, ("correlationId", "globalTid"), where)
    keys = _pids(calls, "globalTid") << 32 | calls["correlationId"]
    order = np.lexsort((calls["start"], keys))
    distinct, first = np.unique(keys[order], return_index=True)
    if not len(distinct):
        return None
    return distinct, calls["start"][order][first]


def _translated(values: Times, translate: Callable[[int], int]) -> Times:
    """Translate every value; `translate` is called once per distinct value."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.array([translate(value) for value in distinct.tolist()], dtype=np.int64)[inverse]
