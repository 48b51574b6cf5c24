"""Copy an nsys export without the environment and the command line, so that it can be kept and published.

A report embeds the whole environment and the command line of what was profiled, secrets included, in tables and as
strings that no event uses. So nothing is deleted: a new file is written with only what a summary needs. Tables
and text columns come from a list. Strings are kept if a kept event refers to them. Names of kernels, CUDA calls, NVTX
ranges and GPUs stay, and so does text that the profiled program put into an NVTX range.
"""

import gzip
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from analysis.errors import UnreadableInput
from analysis.trace.nsys_tables import Export, open_export, quoted
from analysis.trace.source import plain_export
from benchmarks.record.safe_files import put_in_place

# table: the columns that may hold text; all others are kept where they hold numbers. Every value of another type goes.
_KEPT: dict[str, tuple[str, ...]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (),
    "CUPTI_ACTIVITY_KIND_MEMSET": (),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (),
    "CUDA_GRAPH_NODE_EVENTS": (),
    "NVTX_EVENTS": ("text",),
    "TARGET_INFO_GPU": ("name", "busLocation", "uuid", "chipName"),
    "TARGET_INFO_CUDA_DEVICE": (),
    "TARGET_INFO_CUDA_CONTEXT_INFO": (),
    "TARGET_INFO_CUDA_STREAM": (),
    "TARGET_INFO_SESSION_START_TIME": (),
    "ANALYSIS_DETAILS": (),
    "ENUM_CUDA_MEMCPY_OPER": ("name", "label"),
    "ENUM_CUDA_MEM_KIND": ("name", "label"),
    "ENUM_NSYS_EVENT_TYPE": ("name", "label"),
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": ("name", "label"),
}
_REFERENCES = (
    "demangledName",
    "shortName",
    "mangledName",
    "nameId",
    "textId",
)  # columns that point into StringIds
_PROFILER: tuple[str, ...] = (
    "EXPORT_PRODUCT_NAME",
    "EXPORT_PRODUCT_VERSION",
    "EXPORT_SCHEMA_VERSION",
)
_PROFILER += (
    "EXPORT_SCHEMA_VERSION_MAJOR",
    "EXPORT_SCHEMA_VERSION_MINOR",
    "EXPORT_SCHEMA_VERSION_MICRO",
)
_VERSIONS = ("META_DATA_EXPORT", "EXPORT_META_DATA")


def scrub(source: Path, target: Path) -> None:
    """Write `target` (gzipped where its name ends in .gz) from the SQLite export `source` (plain or gzipped).

    The target appears whole or not at all. Raises OSError, and UnreadableInput for a file that is not an export of nsys.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".scrub-") as scratch:
        made = Path(scratch) / "scrubbed.sqlite"
        try:
            with (
                open_export(plain_export(source, Path(scratch))) as export,
                closing(sqlite3.connect(made)) as fresh,
            ):
                _copy(export, fresh)
                fresh.commit()
        except UnreadableInput as error:
            raise UnreadableInput(f"{source}: {error}") from None
        if target.suffix == ".gz":
            packed = Path(scratch) / "scrubbed.gz"
            # No name and no time in the header: the same export gives the same bytes.
            with (
                made.open("rb") as plain,
                packed.open("wb") as raw,
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
            ):
                shutil.copyfileobj(plain, file, 2**20)
            made = packed
        put_in_place(made, target)


def _copy(export: Export, fresh: sqlite3.Connection) -> None:
    used: set[int] = set()
    for table, texts in _KEPT.items():
        columns = export.columns.get(table)
        if columns is None:
            continue
        _copy_rows(export, fresh, table, columns, texts)
        for column in set(columns) & set(_REFERENCES):
            found = fresh.execute(
                f"SELECT DISTINCT {quoted(column)} FROM {quoted(table)}"
            ).fetchall()
            used |= {number for (number,) in found if number is not None}
    strings = [(number, text) for number, text in export.strings().items() if number in used]
    fresh.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    fresh.executemany("INSERT INTO StringIds VALUES (?, ?)", strings)
    for table in _VERSIONS:
        if export.has(table, "name", "value"):
            fresh.execute(f"CREATE TABLE {quoted(table)} (name TEXT, value TEXT)")
            marks = ", ".join("?" * len(_PROFILER))
            rows = export.connection.execute(
                f"SELECT name, value FROM {quoted(table)} WHERE name IN ({marks})", _PROFILER
            )
            fresh.executemany(f"INSERT INTO {quoted(table)} VALUES (?, ?)", rows)
    _copy_processes(export, fresh)


def _copy_rows(
    export: Export,
    fresh: sqlite3.Connection,
    table: str,
    columns: list[str],
    texts: tuple[str, ...],
) -> None:
    types = ", ".join(f"{quoted(one)} {'TEXT' if one in texts else 'INTEGER'}" for one in columns)
    fresh.execute(f"CREATE TABLE {quoted(table)} ({types})")
    chosen = ", ".join(
        quoted(one)
        if one in texts
        else f"CASE WHEN typeof({quoted(one)}) IN ('integer', 'real') THEN {quoted(one)} END"
        for one in columns
    )
    rows = export.connection.execute(f"SELECT {chosen} FROM {quoted(table)}")
    fresh.executemany(f"INSERT INTO {quoted(table)} VALUES ({', '.join('?' * len(columns))})", rows)


def _copy_processes(export: Export, fresh: sqlite3.Connection) -> None:
    """Copy ids only: a process's name can be its command line, and the table lists every process of the machine."""
    if export.has("PROCESSES", "globalPid", "pid"):
        fresh.execute("CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER)")
        rows = export.connection.execute(
            "SELECT globalPid, pid FROM PROCESSES WHERE typeof(pid) = 'integer'"
        )
        fresh.executemany("INSERT INTO PROCESSES VALUES (?, ?)", rows)
