"""Read ranks from an SQLite export of Nsight Systems (`nsys export --type=sqlite`).

One report holds every process of a node on one clock. A rank is a process on a device. The report
does not number the ranks: a mark or range named `rank N` of the process does. Without marks, the
order is that of the CUDA devices if every process has its own, else that of the process ids (the
order in which torchrun starts them).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.errors import UnreadableInput
from analysis.trace.intervals import Times
from analysis.trace.model import (
    Collectives,
    Copies,
    Events,
    Names,
    RankTrace,
    TraceFile,
    column,
    unknown,
)
from analysis.trace.names import COPY_KINDS, is_step, nccl_collective, rank_mark
from analysis.trace.nsys_tables import (
    GRAPHS,
    KERNEL,
    LATEST,
    MEMCPY,
    MEMSET,
    NVTX,
    RUNTIME,
    TIMES,
    Columns,
    Export,
    open_export,
)

_MARKS = (34, 65)  # eventType
_RANGES = (59, 60, 70, 71)  # eventType: push/pop, start/end
_LAUNCHERS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMem", "cuMem")
_PEER = 10  # copyKind of a copy between two GPUs
_ACTIVITY = ("deviceId", "streamId", "correlationId", "globalPid")
_NO_PROCESS = -1
_WHOLE_GRAPHS = "CUDA graph launches were traced as a whole"
_TRACE_NODES = "record with --cuda-graph-trace=node"


@dataclass(frozen=True)
class _Range:
    start: int  # ns
    end: int
    process: int
    thread: int
    name: str


def read_nsys(path: Path, report: Path, names: Names) -> TraceFile:
    """Return the ranks of the export at `path`, whose clock is that of `report`.

    NVTX ranges without any CUDA activity (ranks on CPUs) give step times only.

    Raises:
        UnreadableInput: a foreign or damaged file, or CUDA calls but no kernels: they do not say
            how long anything took, and that is not 0 ms.
    """
    with open_export(path) as export:
        version = export.version()
        ranges = _read_ranges(export)
        notes: list[str] = []
        kernels = export.read(KERNEL, TIMES, (*_ACTIVITY, "demangledName", "shortName"))
        if len(kernels["start"]):
            ranks, numbered = _gpu_ranks(export, kernels, ranges, names, notes)
        else:
            _refuse_calls_without_kernels(export, version)
            ranks, numbered = _host_ranks(ranges, names)
            notes.append("no CUDA activity was traced: only step times are known")
    if not numbered and len(ranks) > 1:
        notes.append(
            "the report does not number the ranks: they are ordered by device, else by process id"
        )
    return TraceFile(report.name, version, ranks, str(report), numbered, notes=tuple(notes))


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


# --- ranges ---------------------------------------------------------------------------------------


def _read_ranges(export: Export) -> list[_Range]:
    """Return NVTX ranges and marks (which end where they start).

    Their text is `text`, or in StringIds by `textId`.
    """
    columns = set(export.columns.get(NVTX, []))
    if not {*TIMES, "eventType"} <= columns or not {"text", "textId"} & columns:
        return []
    strings = export.strings()
    selected = ['"start"', '"end"', "eventType"]
    for optional in ("text", "textId", "globalTid"):
        selected.append(optional if optional in columns else "NULL")
    kinds = ", ".join(map(str, _RANGES + _MARKS))
    ranges = []
    for start, end, kind, text, text_id, tid in export.rows(
        f"SELECT {', '.join(selected)} FROM {NVTX} WHERE eventType IN ({kinds})"
    ):
        if kind in _MARKS:
            end = start
        name = text or strings.get(text_id)
        if not isinstance(name, str) or not name:
            continue
        if not isinstance(start, int) or not isinstance(end, int) or not start <= end < LATEST:
            continue
        process, thread = _NO_PROCESS, 0
        if isinstance(tid, int):
            process, thread = tid >> 24, tid & 0xFFFFFF
        ranges.append(_Range(start, end, process, thread, name))
    return ranges


def _range_events(ranges: Sequence[_Range], process: int, names: Names) -> Events:
    rows = []
    for span in ranges:
        if span.process == process:
            rows.append((span.start, span.end, span.thread, names.number(span.name), -1))
    return Events(*np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T)


# --- ranks ----------------------------------------------------------------------------------------


def _gpu_ranks(
    export: Export, kernels: Columns, ranges: Sequence[_Range], names: Names, notes: list[str]
) -> tuple[tuple[RankTrace, ...], bool]:
    """Return one rank per process and device, in order, and whether marks number them."""
    graphs = export.count(GRAPHS)
    if graphs:
        notes.append(
            f"{graphs} {_WHOLE_GRAPHS}: the kernels inside are missing here; {_TRACE_NODES}"
        )
    strings = export.strings()
    copies = export.read(
        MEMCPY, TIMES, (*_ACTIVITY, "copyKind", "bytes", "srcDeviceId", "dstDeviceId")
    )
    memsets = export.read(MEMSET, TIMES, _ACTIVITY)
    launches = None
    if any(is_step(span.name) for span in ranges):
        launches = _Launches.read(export, strings)
    for table in (kernels, copies, memsets):
        table["process"] = np.where(table["globalPid"] < 0, _NO_PROCESS, table["globalPid"] >> 24)
        table["launch"] = unknown(len(table["start"]))
        if launches is not None:
            table["launch"] = launches.times_of(table)
    name_id = np.where(
        kernels["demangledName"] >= 0, kernels["demangledName"], kernels["shortName"]
    )
    kernels["name"] = _translated(
        name_id, lambda number: names.number(strings.get(number, "unnamed kernel"))
    )
    kernels["label"] = _translated(
        kernels["name"], lambda name: names.number_or_none(nccl_collective(names.table[name]))
    )
    copies["name"] = _translated(copies["copyKind"], lambda kind: names.number(_copy_kind(kind)))
    source, target = copies["srcDeviceId"], copies["dstDeviceId"]
    between = (source >= 0) & (target >= 0) & (source != target)
    memsets["name"] = np.full(len(memsets["start"]), names.number("memset"))
    is_nccl = kernels["label"] >= 0
    compute = _events(kernels)
    collectives = Collectives(
        **vars(compute), label=kernels["label"], communicator=unknown(len(compute))
    )
    copied = Copies(
        **vars(_events(copies)), bytes=copies["bytes"], peer=(copies["copyKind"] == _PEER) | between
    )
    memory_sets = _events(memsets)
    gpu_of, described = _devices(export)
    units, numbered = _order(_units(kernels, notes), ranges)
    ranks = []
    for number, process, device in units:
        mine, my_copies, my_memsets = (
            (table["process"] == process) & (table["deviceId"] == device)
            for table in (kernels, copies, memsets)
        )
        gpu = gpu_of.get((process & 0xFFFFFF, device), device)
        gpu_name, bus_id = described.get(gpu, (None, None))
        ranks.append(
            RankTrace(
                number,
                gpu,
                compute.where(mine & ~is_nccl),
                collectives.where(mine & is_nccl),
                copied.where(my_copies),
                memory_sets.where(my_memsets),
                _range_events(ranges, process, names),
                pid=None if process == _NO_PROCESS else process & 0xFFFFFF,
                gpu=gpu_name,
                bus_id=bus_id,
            )
        )
    return tuple(ranks), numbered


def _host_ranks(ranges: Sequence[_Range], names: Names) -> tuple[tuple[RankTrace, ...], bool]:
    """Return ranks of the processes with step ranges, else of those with any range."""
    steps = [span for span in ranges if is_step(span.name)]
    processes = {span.process for span in steps or ranges}
    units, numbered = _order([(process, 0) for process in sorted(processes)], ranges)
    ranks = []
    for number, process, _ in units:
        ranks.append(
            RankTrace(
                number,
                None,
                Events.empty(),
                Collectives.empty(),
                Copies.empty(),
                Events.empty(),
                _range_events(ranges, process, names),
                on_host=True,
                pid=process & 0xFFFFFF,
            )
        )
    return tuple(ranks), numbered


def _units(kernels: Columns, notes: list[str]) -> list[tuple[int, int]]:
    """Return (process, CUDA device) of every rank.

    A process that uses NCCL on one device and touches another (a context made by accident, usually
    on GPU 0) is one rank. What it ran elsewhere is noted and not counted.
    """
    pairs = np.column_stack((kernels["process"], kernels["deviceId"]))
    with_nccl = set(map(tuple, pairs[kernels["label"] >= 0].tolist()))
    nccl_processes = {process for process, _ in with_nccl}
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    units = []
    for (process, device), count in zip(distinct.tolist(), counts.tolist(), strict=True):
        if (process, device) in with_nccl or process not in nccl_processes:
            units.append((process, device))
        else:
            notes.append(
                f"process {process & 0xFFFFFF} also ran {count} kernels on CUDA device {device}, "
                "without NCCL: not counted"
            )
    return units


def _order(
    units: Sequence[tuple[int, int]], ranges: Sequence[_Range]
) -> tuple[list[tuple[int, int, int]], bool]:
    """Return (rank, process, CUDA device) in rank order, and whether marks number the ranks."""
    marks = {}
    for span in ranges:
        mark = rank_mark(span.name)
        if mark is not None:
            marks[span.process] = mark
    marked = sorted(
        (marks[process], process, device) for process, device in units if process in marks
    )
    if marked and len({mark for mark, _, _ in marked}) == len(marked):
        return marked, True  # another process without a mark is not a rank but a parameter server
    has_own_device = len({device for _, device in units}) == len(units)
    ordered = sorted(units, key=lambda unit: unit[1] if has_own_device else unit[0])
    return [(rank, process, device) for rank, (process, device) in enumerate(ordered)], False


def _devices(export: Export) -> tuple[dict[tuple[int, int], int], dict[int, tuple[str, str]]]:
    """Return {(pid, CUDA device): GPU} and {GPU: (product name, bus id)}.

    The first undoes CUDA_VISIBLE_DEVICES.
    """
    gpu_of: dict[tuple[int, int], int] = {}
    if export.has("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId"):
        for pid, device, gpu in export.rows(
            "SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE"
        ):
            if isinstance(gpu, int):
                gpu_of[pid, device] = gpu
    described: dict[int, tuple[str, str]] = {}
    if export.has("TARGET_INFO_GPU", "id", "name", "busLocation"):
        for gpu, name, bus_id in export.rows("SELECT id, name, busLocation FROM TARGET_INFO_GPU"):
            if isinstance(name, str) and isinstance(bus_id, str):
                described[gpu] = (name, bus_id)
    return gpu_of, described


# --- columns --------------------------------------------------------------------------------------


def _events(table: Columns) -> Events:
    return Events(table["start"], table["end"], table["streamId"], table["name"], table["launch"])


def _copy_kind(number: int) -> str:
    return COPY_KINDS[number] if 0 <= number < len(COPY_KINDS) else COPY_KINDS[0]


def _translated(values: Times, translate: Callable[[int], int]) -> Times:
    """Translate every value; `translate` is called once per distinct value."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return column([translate(value) for value in distinct.tolist()])[inverse]


@dataclass(frozen=True)
class _Launches:
    """The calls that launched GPU work: sorted keys of process and correlation, and host times."""

    processes: Times
    keys: Times
    times: Times

    @staticmethod
    def read(export: Export, strings: dict[int, str]) -> "_Launches | None":
        """Return the calls of an export; None if it has none."""
        calls = [str(number) for number, name in strings.items() if name.startswith(_LAUNCHERS)]
        needed = ("start", "correlationId", "globalTid")
        if not calls or not export.has(RUNTIME, *needed, "nameId"):
            return None
        rows = export.read(RUNTIME, needed, where=f"nameId IN ({', '.join(calls)})")
        if not len(rows["start"]):
            return None
        rows["process"] = rows["globalTid"] >> 24
        processes = np.unique(rows["process"])
        keys = _launch_keys(rows, processes)
        # A call into the runtime calls the driver: the first counts.
        order = np.lexsort((rows["start"], keys))
        distinct, first = np.unique(keys[order], return_index=True)
        return _Launches(processes, distinct, rows["start"][order][first])

    def times_of(self, table: Columns) -> Times:
        """Return the host time (ns) of the call that launched each row, -1 if unknown."""
        wanted = _launch_keys(table, self.processes)
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return column(np.where((self.keys[at] == wanted) & (wanted >= 0), self.times[at], -1))


def _launch_keys(table: Columns, processes: Times) -> Times:
    """Return a number for each row's process and correlation, -1 for a process without calls."""
    at = np.minimum(np.searchsorted(processes, table["process"]), len(processes) - 1)
    is_known = (processes[at] == table["process"]) & (table["correlationId"] >= 0)
    return column(np.where(is_known, (at << 32) | table["correlationId"], -1))
