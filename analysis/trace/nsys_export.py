"""Read ranks from an SQLite export of Nsight Systems (`nsys export --type=sqlite`).

One report holds every process of a node on one clock. A rank is a process on a device. The report
does not number the ranks: a mark or range named `rank N` of the process does. Without marks, the
order is that of the CUDA devices, then that of the process ids (the order in which torchrun starts
them).

nsys makes a table only when it has rows, and adds columns from version to version. Source: NVIDIA's
"SQLite Export Schema Reference", exports of 2025.3 (schema 3.20). Nothing loops over events in
Python: a million kernels with their launches take about four seconds.
"""

import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
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
from analysis.trace.steps import is_step

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"
VERSIONS = "META_DATA_EXPORT"
LATEST = 2**61  # ns; sums and differences of times fit into 64 bits


class Export:
    """One open export: its connection, and the columns of each table."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self.columns: dict[str, list[str]] = {}
        for (table,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'"):
            if isinstance(table, str):  # a damaged one may be anything
                described = self.rows(f"PRAGMA table_info({quoted(table)})")
                self.columns[table] = [row[1] for row in described]

    def rows(self, query: str, parameters: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self.connection.execute(query, parameters).fetchall()

    def select(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return columns of a table; no rows if the table or a column is missing."""
        if not set(columns) <= set(self.columns.get(table, [])):
            return []
        return self.rows(f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(table)}")

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 if it does not exist."""
        if table not in self.columns:
            return 0
        return int(self.rows(f"SELECT count(*) FROM {quoted(table)}")[0][0])

    def version(self) -> str:
        """Return product, version and schema, as far as the export names them."""
        facts = dict(self.select(VERSIONS, "name", "value"))
        text = f"Nsight Systems {facts.get('EXPORT_PRODUCT_VERSION', 'of an unknown version')}"
        if facts.get("EXPORT_SCHEMA_VERSION"):
            text += f" (schema {facts['EXPORT_SCHEMA_VERSION']})"
        return text

    def strings(self) -> dict[int, str]:
        """Return {number: text} of the strings that events refer to."""
        texts = {}
        for string_id, text in self.select("StringIds", "id", "value"):
            if isinstance(string_id, int) and isinstance(text, str):
                texts[string_id] = text
        return texts

    def read(self, table: str, columns: Sequence[str], where: str = "1") -> NDArray[Any]:
        """Return start, end and these columns of a table as a structured array.

        -1 stands for no value and for a missing column. A missing table has no rows. Rows that end
        before they start are left out: nsys writes them for events that were cut.

        Raises UnreadableInput: there are no times, or none that a clock has, or a column holds
        text.
        """
        names = ["start", "end", *columns]
        dtype = np.dtype([(name, np.int64) for name in names])
        if table not in self.columns:
            return np.empty(0, dtype)
        present = self.columns[table]
        missing = [name for name in names[:2] if name not in present]
        if missing:
            raise UnreadableInput(
                f"table {table} has no column {', '.join(missing)}: a schema not known here"
            )
        selected = []
        for name in names:
            selected.append(f"coalesce({quoted(name)}, -1)" if name in present else "-1")
        rows = self.connection.execute(
            f"SELECT {', '.join(selected)} FROM {quoted(table)} WHERE {where} "
            'AND "start" IS NOT NULL AND "end" IS NOT NULL'
        )
        try:
            data = np.fromiter(rows, dtype)
        except (ValueError, TypeError, OverflowError):
            raise UnreadableInput(
                f"table {table} holds text where numbers belong: a schema not known here"
            ) from None
        for name in names[:2]:
            if ((data[name] < 0) | (data[name] >= LATEST)).any():
                raise UnreadableInput(
                    f"table {table} holds times that no clock has: a damaged file"
                )
        return data[data["end"] >= data["start"]]


@contextmanager
def open_export(path: Path) -> Iterator[Export]:
    """Open an export for reading.

    Raises UnreadableInput: a foreign or damaged file, also while it is read.
    """
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        export = Export(connection)
        if not {VERSIONS, KERNEL, RUNTIME, NVTX} & export.columns.keys():
            tables = ", ".join(sorted(export.columns)[:5]) or "none"
            raise UnreadableInput(
                f"an SQLite file, but not an export of Nsight Systems (its tables: {tables})"
            )
        yield export
    except (UnicodeDecodeError, sqlite3.Error) as error:
        cause = " ".join(str(error).split())
        if isinstance(error, UnicodeDecodeError):  # SQLite quotes damaged bytes in its message
            cause = "its schema is not text"
        raise UnreadableInput(
            f"a damaged or cut SQLite file ({cause}): export the report again"
        ) from None
    finally:
        connection.close()


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


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
# A call that launched GPU work: its process and correlation in one number; the host's ns.
_LAUNCH = np.dtype([("key", np.int64), ("time", np.int64)])
_TRACE_NODES = "record with --cuda-graph-trace=node"


class _Range(NamedTuple):
    """An NVTX range, or a mark, which ends where it starts."""

    start: int  # ns
    end: int
    pid: int
    thread: int
    name: str


def read_nsys(path: Path, report: Path, names: Names) -> Trace:
    """Return the ranks of the export at `path`, whose clock is that of `report`; of ranks on CPUs,
    which have NVTX ranges and no CUDA activity, step times only.

    Raises UnreadableInput: a foreign or damaged file, or CUDA calls but no kernels.
    """
    with open_export(path) as export:
        reader = _NsysReader(export, names)
        kernels = export.read(KERNEL, (*_ACTIVITY, "demangledName"))
        if len(kernels):
            ranks = reader.gpu_ranks(kernels)
        else:
            ranks = reader.host_ranks()
        version = export.version()
    if not reader.numbered and len(ranks) > 1:
        reader.notes.append(
            "the report does not number the ranks: they are ordered by device, else by process id"
        )
    notes = tuple(reader.notes)
    return Trace(version, list(names), tuple(ranks), str(report), reader.numbered, notes=notes)


class _NsysReader:
    def __init__(self, export: Export, names: Names) -> None:
        self.export, self.names = export, names
        self.strings = export.strings()
        self.notes: list[str] = []
        self.numbered = False  # whether marks number the ranks
        self.ranges: list[_Range] = []  # NVTX ranges and marks
        columns = ("start", "end", "eventType", "text", "textId", "globalTid")
        for start, end, kind, text, text_id, tid in export.select(NVTX, *columns):
            if kind in _MARKS:
                end = start
            elif kind not in _RANGES:
                continue
            name = text or self.strings.get(text_id)
            if not isinstance(start, int) or not isinstance(end, int) or not isinstance(tid, int):
                continue
            if name and isinstance(name, str) and 0 <= start <= end < LATEST:
                pid, thread = tid >> 24 & 0xFFFFFF, tid & 0xFFFFFF
                self.ranges.append(_Range(start, end, pid, thread, name))

    def host_ranks(self) -> list[RankTrace]:
        """Return the processes of which only NVTX ranges were traced. Raises UnreadableInput."""
        calls, graphs = self.export.count(RUNTIME), self.export.count(GRAPHS)
        if graphs:
            raise UnreadableInput(
                f"{graphs} {_WHOLE_GRAPHS} and no kernel: communication cannot be separated from "
                f"compute; {_TRACE_NODES}"
            )
        if calls or KERNEL in self.export.columns:
            traced = f"{calls} CUDA calls" if calls else "a kernel table"
            raise UnreadableInput(
                f"{traced} and no GPU kernel, so no time on the GPU is known (it is not 0 ms); the "
                f"likely cause: {self.export.version()} is too old for the machine's CUDA driver, "
                "or the capture range held no GPU work"
            )
        if not self.export.count(NVTX):
            raise UnreadableInput(
                "neither GPU kernels nor NVTX ranges were traced: record with "
                "`nsys profile -t cuda,nvtx`"
            )
        self.notes.append("no CUDA activity was traced: only step times are known")
        with_steps = {(span.pid, 0) for span in self.ranges if is_step(span.name)}
        processes = with_steps or {(span.pid, 0) for span in self.ranges}
        none = make_events(0)
        ranks = []
        for rank, pid, _ in self.ordered(processes):
            spans = self.ranges_of(pid)
            ranks.append(
                RankTrace(rank, None, none, none, none, none, spans, on_host=True, pid=pid)
            )
        return ranks

    def gpu_ranks(self, kernels: NDArray[Any]) -> list[RankTrace]:
        export, names = self.export, self.names
        graphs = export.count(GRAPHS)
        if graphs:
            self.notes.append(
                f"{graphs} {_WHOLE_GRAPHS}: the kernels inside are missing here; {_TRACE_NODES}"
            )
        columns = ("copyKind", "bytes", "srcDeviceId", "dstDeviceId")
        copied = export.read(MEMCPY, (*_ACTIVITY, *columns))
        memset = export.read(MEMSET, _ACTIVITY)
        launches = np.empty(0, _LAUNCH)
        if any(is_step(span.name) for span in self.ranges):
            launches = self.read_launches()
        compute, memsets = _events(kernels, launches), _events(memset, launches)
        compute["name"] = _translated(
            kernels["demangledName"],
            lambda string_id: number_of(self.strings.get(string_id, "unnamed kernel"), names),
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
        ranks = []
        for rank, pid, device in self.ordered(self.processes_on_devices(kernels, is_nccl)):
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
                    self.ranges_of(pid),
                    pid=pid,
                    gpu=name,
                    bus_id=bus_id,
                )
            )
        return ranks

    def ranges_of(self, pid: int) -> Events:
        mine = sorted(span for span in self.ranges if span.pid == pid)
        events = make_events(len(mine))
        for at, span in enumerate(mine):
            events["start"][at], events["end"][at] = span.start, span.end
            events["lane"][at], events["name"][at] = span.thread, number_of(span.name, self.names)
        return events

    def processes_on_devices(
        self, kernels: NDArray[Any], is_nccl: NDArray[np.bool_]
    ) -> list[tuple[int, int]]:
        """Return (process, CUDA device) of every rank. A process that uses NCCL on one device and
        touches another (a context made by accident, usually on GPU 0) is one rank.
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
                self.notes.append(
                    f"process {pid} also ran {count} kernels on CUDA device {device}, without "
                    "NCCL: not counted"
                )
        return units

    def ordered(self, units: Collection[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return (rank, process, CUDA device) in the order of ranks: by marks that number the
        ranks, else by device and process.
        """
        marks = {}
        for span in self.ranges:
            mark = _RANK.fullmatch(span.name)
            if mark is not None:
                marks[span.pid] = int(mark[1])
        marked = []
        for pid, device in units:
            if pid in marks:
                marked.append((marks[pid], pid, device))
        if marked and len({rank for rank, _, _ in marked}) == len(marked):
            # Another process without a mark is not a rank but a parameter server.
            self.numbered = True
            return sorted(marked)
        by_device = sorted((device, pid) for pid, device in units)
        return [(rank, pid, device) for rank, (device, pid) in enumerate(by_device)]

    def read_launches(self) -> NDArray[Any]:
        """Return the calls that launched GPU work, by ascending key; of those with one, the first:
        a call into the runtime calls the driver.
        """
        names = []
        for string_id, name in self.strings.items():
            if name.startswith(_LAUNCHERS):
                names.append(str(string_id))
        if not names or "nameId" not in self.export.columns.get(RUNTIME, []):
            return np.empty(0, _LAUNCH)
        where = f"nameId IN ({', '.join(names)})"
        calls = self.export.read(RUNTIME, ("correlationId", "globalTid"), where)
        keys = _pids(calls, "globalTid") << 32 | calls["correlationId"]
        order = np.lexsort((calls["start"], keys))
        distinct, first = np.unique(keys[order], return_index=True)
        launches = np.empty(len(distinct), _LAUNCH)
        launches["key"], launches["time"] = distinct, calls["start"][order][first]
        return launches


def _copies(rows: NDArray[Any], launches: NDArray[Any], names: Names) -> Events:
    copies = _events(rows, launches)
    kinds = np.where(rows["copyKind"] < len(_COPY_KINDS), np.maximum(rows["copyKind"], 0), 0)
    copies["name"] = _translated(kinds, lambda kind: number_of(_COPY_KINDS[kind], names))
    copies["bytes"] = rows["bytes"]
    source, target = rows["srcDeviceId"], rows["dstDeviceId"]
    between = (source >= 0) & (target >= 0) & (source != target)
    copies["peer"] = between | (kinds == _COPY_KINDS.index("PtoP"))
    return copies


def _pids(rows: NDArray[Any], column: str) -> Any:
    return rows[column] >> 24 & 0xFFFFFF


def _is_on(rows: NDArray[Any], pid: int, device: int) -> Any:
    return (_pids(rows, "globalPid") == pid) & (rows["deviceId"] == device)


def _events(rows: NDArray[Any], launches: NDArray[Any]) -> Events:
    events = make_events(len(rows))
    events["start"], events["end"] = rows["start"], rows["end"]
    events["device"], events["lane"] = rows["deviceId"], rows["streamId"]
    if len(launches) and len(rows):
        wanted = _pids(rows, "globalPid") << 32 | rows["correlationId"]
        keys = launches["key"]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        events["launch"] = np.where(keys[at] == wanted, launches["time"][at], -1)
    return events


def _translated(values: Times, translate: Callable[[int], int]) -> Times:
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.array([translate(value) for value in distinct.tolist()], dtype=np.int64)[inverse]
