"""Read ranks from an SQLite export of Nsight Systems (`nsys export --type=sqlite`).

One report holds every process of a node on one clock. A rank is a process on a device. The report does not number the
ranks: a mark or range named `rank N` of the process does. Without marks, the order is that of the CUDA devices if every
process has its own, else that of the process ids (the order in which torchrun starts them).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.errors import UnreadableInput
from analysis.trace.intervals import Flags, Times
from analysis.trace.model import (
    Collectives,
    Copies,
    Events,
    Names,
    RankTrace,
    TraceFile,
    no_collectives,
    no_copies,
    no_events,
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
    Columns,
    Export,
    open_export,
)

_RANGES, _MARKS = (59, 60, 70, 71), (34, 65)  # eventType of push/pop and start/end ranges; of marks
_LAUNCHERS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMem", "cuMem")
_PEER = 10  # copyKind of a copy between two GPUs
_ACTIVITY = ("deviceId", "streamId", "correlationId", "globalPid")
_NO_PROCESS = -1


def read_nsys(path: Path, names: Names) -> TraceFile:
    """Read the ranks of one export. NVTX ranges without any CUDA activity (ranks on CPUs) give step times only.

    Raises UnreadableInput for a foreign or damaged file, and for a trace with CUDA calls but no kernels: it does not
    say how long anything took, and that is not 0 ms.
    """
    with open_export(path) as export:
        version = export.version()
        ranges = _read_ranges(export)
        notes: list[str] = []
        kernels = export.read(KERNEL, ("start", "end"), (*_ACTIVITY, "demangledName", "shortName"))
        if len(kernels["start"]):
            ranks, numbered = _gpu_ranks(export, kernels, ranges, names, notes)
        else:
            _explain_no_kernels(export, version)
            ranks, numbered = _host_ranks(ranges, names)
            notes.append("no CUDA activity was traced: only step times are known")
        if not numbered and len(ranks) > 1:
            notes.append(
                "the report does not number the ranks: they are ordered by device, else by process id"
            )
        return TraceFile(
            path.name, version, ranks, f"nsys session of {path}", numbered, notes=tuple(notes)
        )


def _explain_no_kernels(export: Export, version: str) -> None:
    calls, graphs = export.count(RUNTIME), export.count(GRAPHS)
    if graphs:
        raise UnreadableInput(
            f"{graphs} CUDA graph launches were traced as a whole and no kernel: communication cannot be separated from "
            "compute; record with --cuda-graph-trace=node"
        )
    if calls or KERNEL in export.columns:
        raise UnreadableInput(
            f"{f'{calls} CUDA calls' if calls else 'a kernel table'} and no GPU kernel, so no time on the GPU is known "
            f"(it is not 0 ms); the likely cause: {version} is too old for the machine's CUDA driver, or the capture "
            "range held no GPU work"
        )
    if not export.count(NVTX):
        raise UnreadableInput(
            "neither GPU kernels nor NVTX ranges were traced: record with `nsys profile -t cuda,nvtx`"
        )


@dataclass(frozen=True)
class _Range:
    start: int  # ns
    end: int
    process: int
    thread: int
    name: str


def _read_ranges(export: Export) -> list[_Range]:
    """Read NVTX ranges and marks (which end where they start). Their text is `text`, or in StringIds by `textId`."""
    have = export.columns.get(NVTX, [])
    if not {"start", "end", "eventType"} <= set(have) or not {"text", "textId"} & set(have):
        return []
    strings = export.strings()
    text, number, thread = (
        one if one in have else "NULL" for one in ("text", "textId", "globalTid")
    )
    kinds = ", ".join(map(str, _RANGES + _MARKS))
    query = f'SELECT "start", "end", eventType, {text}, {number}, {thread} FROM {NVTX} WHERE eventType IN ({kinds})'
    found = []
    for start, end, kind, said, said_by, tid in export.connection.execute(query):
        name = said or strings.get(said_by)
        last = start if kind in _MARKS else end
        if (
            isinstance(name, str)
            and name
            and isinstance(start, int)
            and isinstance(last, int)
            and start <= last < LATEST
        ):
            process, number_of_thread = (
                (tid >> 24, tid & 0xFFFFFF) if isinstance(tid, int) else (_NO_PROCESS, 0)
            )
            found.append(_Range(start, last, process, number_of_thread, name))
    return found


def _gpu_ranks(
    export: Export, kernels: Columns, ranges: list[_Range], names: Names, notes: list[str]
) -> tuple[tuple[RankTrace, ...], bool]:
    """Return one rank per process and device, in order, and whether marks number them."""
    if export.count(GRAPHS):
        notes.append(
            f"{export.count(GRAPHS)} CUDA graph launches were traced as a whole: the kernels inside are missing here; "
            "record with --cuda-graph-trace=node"
        )
    text = export.strings()
    copies = export.read(
        MEMCPY, ("start", "end"), (*_ACTIVITY, "copyKind", "bytes", "srcDeviceId", "dstDeviceId")
    )
    sets = export.read(MEMSET, ("start", "end"), _ACTIVITY)
    launched = _launches(export, text) if any(is_step(one.name) for one in ranges) else None
    for table in (kernels, copies, sets):
        table["process"] = np.where(table["globalPid"] < 0, _NO_PROCESS, table["globalPid"] >> 24)
        table["launch"] = launched(table) if launched else np.full(len(table["start"]), -1)
    full = np.where(kernels["demangledName"] >= 0, kernels["demangledName"], kernels["shortName"])
    kernels["name"] = _mapped(full, lambda number: names.number(text.get(number, "unnamed kernel")))
    kernels["label"] = _mapped(kernels["name"], lambda number: _label(names, number))
    copies["name"] = _mapped(
        copies["copyKind"], lambda kind: names.number(COPY_KINDS.get(kind, COPY_KINDS[0]))
    )
    source, target = copies["srcDeviceId"], copies["dstDeviceId"]
    copies["peer"] = (copies["copyKind"] == _PEER) | (
        (source >= 0) & (target >= 0) & (source != target)
    )
    sets["name"] = np.full(len(sets["start"]), names.number("memset"))
    gpu_of, described = _devices(export)
    units, numbered = _order(_units(kernels, notes), ranges)
    ranks = []
    for number, process, device in units:
        mine, copied = _of(kernels, process, device), _of(copies, process, device)
        nccl = mine & (kernels["label"] >= 0)
        gpu = gpu_of.get((process & 0xFFFFFF, device), device)
        product, bus = described.get(gpu, (None, None))
        ranks.append(
            RankTrace(
                number,
                gpu,
                _events(kernels, mine & ~nccl),
                Collectives(
                    **vars(_events(kernels, nccl)),
                    label=kernels["label"][nccl],
                    communicator=np.full(int(nccl.sum()), -1),
                ),
                Copies(
                    **vars(_events(copies, copied)),
                    bytes=copies["bytes"][copied],
                    peer=copies["peer"][copied] > 0,
                ),
                _events(sets, _of(sets, process, device)),
                _range_events(ranges, process, names),
                pid=None if process == _NO_PROCESS else process & 0xFFFFFF,
                gpu=product,
                bus_id=bus,
            )
        )
    return tuple(ranks), numbered


def _host_ranks(ranges: list[_Range], names: Names) -> tuple[tuple[RankTrace, ...], bool]:
    """Make ranks of the processes with step ranges, else of those with any range."""
    chosen = [one for one in ranges if is_step(one.name)] or ranges
    units, numbered = _order(sorted({(one.process, 0) for one in chosen}), ranges)
    empty = (no_events(), no_collectives(), no_copies(), no_events())
    ranks = (
        RankTrace(
            number,
            None,
            *empty,
            _range_events(ranges, process, names),
            on_host=True,
            pid=process & 0xFFFFFF,
        )
        for number, process, _ in units
    )
    return tuple(ranks), numbered


def _order(
    units: Sequence[tuple[int, int]], ranges: list[_Range]
) -> tuple[list[tuple[int, int, int]], bool]:
    """Return (rank, process, CUDA device) in rank order, and whether marks number the ranks."""
    said = {one.process: mark for one in ranges if (mark := rank_mark(one.name)) is not None}
    marked = sorted(
        (said[process], process, device) for process, device in units if process in said
    )
    if marked and len({mark for mark, _, _ in marked}) == len(marked):
        return marked, True  # another process without a mark is not a rank but a parameter server
    own_device = len({device for _, device in units}) == len(units)
    ordered = sorted(units, key=lambda unit: unit[1] if own_device else unit[0])
    return [(number, process, device) for number, (process, device) in enumerate(ordered)], False


def _units(kernels: Columns, notes: list[str]) -> list[tuple[int, int]]:
    """Return (process, CUDA device) of every rank.

    A process that uses NCCL on one device and touches another (a context made by accident, usually on GPU 0) is one
    rank. What it ran elsewhere is noted and not counted.
    """
    pairs, counts = np.unique(
        np.column_stack((kernels["process"], kernels["deviceId"])), axis=0, return_counts=True
    )
    nccl = kernels["label"] >= 0
    with_nccl = set(
        zip(kernels["process"][nccl].tolist(), kernels["deviceId"][nccl].tolist(), strict=True)
    )
    found = []
    for (process, device), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        if (process, device) in with_nccl or not any(process == other for other, _ in with_nccl):
            found.append((process, device))
        else:
            notes.append(
                f"process {process & 0xFFFFFF} also ran {count} kernels on CUDA device {device}, without NCCL: not counted"
            )
    return found


def _label(names: Names, number: int) -> int:
    """Return the number of an NCCL kernel's collective; -1 for other kernels."""
    label = nccl_collective(names.table[number])
    return -1 if label is None else names.number(label)


def _mapped(values: Times, translate: Callable[[int], int]) -> Times:
    """Translate every value; `translate` is called once per distinct value."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.array([translate(int(value)) for value in distinct], dtype=np.int64)[inverse]


def _of(table: Columns, process: int, device: int) -> Flags:
    chosen: Flags = (table["process"] == process) & (table["deviceId"] == device)
    return chosen


def _events(table: Columns, chosen: Flags) -> Events:
    return Events(*(table[one][chosen] for one in ("start", "end", "streamId", "name", "launch")))


def _range_events(ranges: list[_Range], process: int, names: Names) -> Events:
    rows = sorted(
        (one.start, one.end, one.thread, names.number(one.name), -1)
        for one in ranges
        if one.process == process
    )
    return Events(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


def _launches(export: Export, text: dict[int, str]) -> Callable[[Columns], Times] | None:
    """Return a function: the host time (ns) of the call that launched each row of a table, -1 if unknown."""
    calls = [str(number) for number, name in text.items() if name.startswith(_LAUNCHERS)]
    if not calls or not export.has(RUNTIME, "start", "correlationId", "globalTid", "nameId"):
        return None
    rows = export.read(
        RUNTIME, ("start", "correlationId", "globalTid"), where=f"nameId IN ({', '.join(calls)})"
    )
    rows["process"] = rows["globalTid"] >> 24
    processes = np.unique(rows["process"])

    def keys(table: Columns) -> Times:
        at = np.minimum(np.searchsorted(processes, table["process"]), len(processes) - 1)
        known = (processes[at] == table["process"]) & (table["correlationId"] >= 0)
        key: Times = np.where(known, (at << 32) | table["correlationId"], -1)
        return key

    if not len(processes):
        return None
    order = np.lexsort(
        (rows["start"], keys(rows))
    )  # a call into the runtime calls the driver: the first counts
    sorted_keys, first = np.unique(keys(rows)[order], return_index=True)
    times = rows["start"][order][first]

    def launched(table: Columns) -> Times:
        wanted = keys(table)
        at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
        time: Times = np.where((sorted_keys[at] == wanted) & (wanted >= 0), times[at], -1)
        return time

    return launched


def _devices(export: Export) -> tuple[dict[tuple[int, int], int], dict[int, tuple[str, str]]]:
    """Map (pid, CUDA device) to GPU, which undoes CUDA_VISIBLE_DEVICES; map GPU to (product name, bus id)."""
    gpu_of: dict[tuple[int, int], int] = {}
    described: dict[int, tuple[str, str]] = {}
    if export.has("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId"):
        rows = export.connection.execute(
            "SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE"
        ).fetchall()
        gpu_of = {(pid, device): gpu for pid, device, gpu in rows if isinstance(gpu, int)}
    if export.has("TARGET_INFO_GPU", "id", "name", "busLocation"):
        rows = export.connection.execute(
            "SELECT id, name, busLocation FROM TARGET_INFO_GPU"
        ).fetchall()
        described = {
            gpu: (name, bus)
            for gpu, name, bus in rows
            if isinstance(name, str) and isinstance(bus, str)
        }
    return gpu_of, described
