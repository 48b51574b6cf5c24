"""Read an SQLite export of Nsight Systems as tables of columns.

nsys makes a table only when it has rows, and adds columns from version to version (schema 2.x and
3.x), so every reader asks for columns and says which are optional. Source: NVIDIA's "SQLite Export
Schema Reference", exports of 2025.3 (schema 3.20). Nothing loops over events in Python: a million
kernels with their launches take about four seconds.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from analysis.errors import UnreadableInput
from analysis.trace.intervals import Times

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"
TIMES = ("start", "end")
LATEST = 2**61  # ns; sums and differences of times fit into 64 bits
VERSIONS = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # one table, by its newer and its older name
_OF_NSYS = (*VERSIONS, KERNEL, RUNTIME, NVTX, "TARGET_INFO_SESSION_START_TIME")

Columns = dict[str, Times]


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

    def has(self, table: str, *columns: str) -> bool:
        """Tell whether the table exists with all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 if it does not exist."""
        if table not in self.columns:
            return 0
        return int(self.rows(f"SELECT count(*) FROM {quoted(table)}")[0][0])

    def version(self) -> str:
        """Return product, version and schema, as far as the export names them."""
        facts: dict[str, str] = {}
        for table in VERSIONS:
            if self.has(table, "name", "value"):
                for name, value in self.rows(f"SELECT name, value FROM {quoted(table)}"):
                    if isinstance(name, str) and isinstance(value, str):
                        facts[name] = value
        text = f"Nsight Systems {facts.get('EXPORT_PRODUCT_VERSION', 'of an unknown version')}"
        schema = facts.get("EXPORT_SCHEMA_VERSION")
        return f"{text} (schema {schema})" if schema else text

    def strings(self) -> dict[int, str]:
        """Return StringIds: number to text."""
        texts: dict[int, str] = {}
        if self.has("StringIds", "id", "value"):
            for number, text in self.rows("SELECT id, value FROM StringIds"):
                if isinstance(number, int) and isinstance(text, str):
                    texts[number] = text
        return texts

    def read(
        self, table: str, needed: Sequence[str], optional: Sequence[str] = (), where: str = "1"
    ) -> Columns:
        """Return columns of a table as arrays; -1 stands for no value. A missing table has no rows.

        Rows that end before they start are left out: nsys writes them for events that were cut.

        Raises:
            UnreadableInput: a needed column is missing or holds text, or a time is none that a
                clock has.
        """
        wanted = [*needed, *optional]
        if table not in self.columns:
            return {name: np.array([], dtype=np.int64) for name in wanted}
        present = self.columns[table]
        missing = ", ".join(name for name in needed if name not in present)
        if missing:
            raise UnreadableInput(f"table {table} has no column {missing}: a schema not known here")
        selected = []
        for name in wanted:
            selected.append(f"coalesce({quoted(name)}, -1)" if name in present else "-1")
        conditions = [where, *(f"{quoted(name)} IS NOT NULL" for name in needed)]
        rows = self.connection.execute(
            f"SELECT {', '.join(selected)} FROM {quoted(table)} WHERE {' AND '.join(conditions)}"
        )
        try:
            data = np.fromiter(rows, dtype=np.dtype([(name, np.int64) for name in wanted]))
        except (ValueError, TypeError, OverflowError):
            raise UnreadableInput(
                f"table {table} holds text where numbers belong: a schema not known here"
            ) from None
        for name in needed:
            if name in TIMES and ((data[name] < 0) | (data[name] >= LATEST)).any():
                raise UnreadableInput(
                    f"table {table} holds times that no clock has: a damaged file"
                )
        if "end" in wanted:
            data = data[data["end"] >= data["start"]]
        return {name: np.ascontiguousarray(data[name]) for name in wanted}


@contextmanager
def open_export(path: Path) -> Iterator[Export]:
    """Open an export for reading.

    Raises:
        UnreadableInput: a foreign or damaged file, also while it is read.
    """
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        export = Export(connection)
        if not any(table in export.columns for table in _OF_NSYS):
            tables = ", ".join(sorted(export.columns)[:5]) or "none"
            raise UnreadableInput(
                f"an SQLite file, but not an export of Nsight Systems (its tables: {tables})"
            )
        yield export
    except UnicodeDecodeError:  # SQLite quotes damaged bytes in its message
        raise _damaged("its schema is not text") from None
    except sqlite3.Error as error:
        raise _damaged(" ".join(str(error).split())) from None
    finally:
        connection.close()


def _damaged(cause: str) -> UnreadableInput:
    return UnreadableInput(f"a damaged or cut SQLite file ({cause}): export the report again")


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
