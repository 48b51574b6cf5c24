"""Copy an nsys export without the environment and the command line, so that it can be published.

A report embeds the whole environment and the command line of what was profiled, secrets included,
in tables and as strings that no event uses. So nothing is deleted: a new file is written with only
what a summary needs. Tables and text columns come from a list. Strings are kept if a kept event
refers to them. Names of kernels, CUDA calls, NVTX ranges and GPUs stay, and so does text that the
profiled program put into an NVTX range.
"""

import gzip
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from analysis.input_files import UnreadableInput
from analysis.trace.nsys_export import VERSIONS, Export, open_export, quoted
from analysis.trace.source import plain_export
from benchmarks.record.safe_files import put_in_place

# table: the columns that may hold text; all others are kept where they hold numbers.
_ENUM = ("name", "label")
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
    "ENUM_CUDA_MEMCPY_OPER": _ENUM,
    "ENUM_CUDA_MEM_KIND": _ENUM,
    "ENUM_NSYS_EVENT_TYPE": _ENUM,
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": _ENUM,
}
# Columns that point into StringIds.
_REFERENCES = ("demangledName", "shortName", "mangledName", "nameId", "textId")
_VERSION_KEYS = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")


def scrub(source: Path, target: Path) -> None:
    """Write `target` (gzipped where its name ends in .gz) from the SQLite export `source`, plain or
    gzipped. The target appears whole or not at all.
    Raises OSError, and UnreadableInput: the source is not an export of nsys.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".scrub-") as scratch:
        scrubbed = Path(scratch) / "scrubbed.sqlite"
        try:
            with (
                open_export(plain_export(source, Path(scratch))) as export,
                closing(sqlite3.connect(scrubbed)) as fresh,
            ):
                _copy(export, fresh)
                fresh.commit()
        except UnreadableInput as error:
            raise UnreadableInput(f"{source}: {error}") from None
        if target.suffix == ".gz":
            packed = Path(scratch) / "scrubbed.gz"
            # No name and no time in the header: the same export gives the same bytes.
            with (
                scrubbed.open("rb") as plain,
                packed.open("wb") as raw,
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
            ):
                shutil.copyfileobj(plain, file, 2**20)
            scrubbed = packed
        put_in_place(scrubbed, target)


def _copy(export: Export, fresh: sqlite3.Connection) -> None:
    used: set[int] = set()
    for table, text_columns in _KEPT.items():
        columns = export.columns.get(table)
        if columns is None:
            continue
        declared, selected = [], []
        for column in columns:
            name = quoted(column)
            if column in text_columns:
                declared.append(f"{name} TEXT")
                selected.append(name)
            else:  # a value of another type becomes NULL
                declared.append(f"{name} INTEGER")
                selected.append(f"CASE WHEN typeof({name}) IN ('integer', 'real') THEN {name} END")
        query = f"SELECT {', '.join(selected)} FROM {quoted(table)}"
        _write(fresh, table, declared, export.connection.execute(query))
        for column in set(columns) & set(_REFERENCES):
            references = fresh.execute(f"SELECT DISTINCT {quoted(column)} FROM {quoted(table)}")
            used.update(string_id for (string_id,) in references)
    strings = [row for row in export.strings().items() if row[0] in used]
    _write(fresh, "StringIds", ("id INTEGER NOT NULL PRIMARY KEY", "value TEXT NOT NULL"), strings)
    versions = []
    for name, value in export.select(VERSIONS, "name", "value"):
        if name in _VERSION_KEYS:
            versions.append((name, value))
    _write(fresh, VERSIONS, ("name TEXT", "value TEXT"), versions)
    # Ids only: a process's name can be its command line, and the table lists every process of the
    # machine.
    processes = export.select("PROCESSES", "globalPid", "pid")
    if all(isinstance(value, int) for row in processes for value in row):
        _write(fresh, "PROCESSES", ("globalPid INTEGER", "pid INTEGER"), processes)


def _write(fresh: sqlite3.Connection, table: str, columns: Sequence[str], rows: Any) -> None:
    fresh.execute(f"CREATE TABLE {quoted(table)} ({', '.join(columns)})")
    marks = ", ".join("?" * len(columns))
    fresh.executemany(f"INSERT INTO {quoted(table)} VALUES ({marks})", rows)
