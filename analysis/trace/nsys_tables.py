"""Read an SQLite export of Nsight Systems as tables of columns.

nsys makes a table only when it has rows, and adds columns from version to version. Source: NVIDIA's
"SQLite Export Schema Reference", exports of 2025.3 (schema 3.20). Nothing loops over events in
Python: a million kernels with their launches take about four seconds.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.input_files import UnreadableInput

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
        schema = facts.get("EXPORT_SCHEMA_VERSION")
        if schema:
            text += f" (schema {schema})"
        return text

    def strings(self) -> dict[int, str]:
        """Return StringIds: number to text."""
        texts = {}
        for string_id, text in self.select("StringIds", "id", "value"):
            if isinstance(string_id, int) and isinstance(text, str):
                texts[string_id] = text
        return texts

    def read(self, table: str, columns: Sequence[str], where: str = "1") -> NDArray[Any]:
        """Return start, end and these columns of a table as a structured array.

        -1 stands for no value and for a missing column. A missing table has no rows. Rows that end
        before they start are left out: nsys writes them for events that were cut.

        Raises:
            UnreadableInput: there are no times, or none that a clock has, or a column holds text.
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

    Raises:
        UnreadableInput: a foreign or damaged file, also while it is read.
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
