"""Read an SQLite export of Nsight Systems as tables of columns.

nsys makes a table only when it has rows, and adds columns from version to version (schema 2.x and 3.x), so every
reader asks for columns and says which are optional. Source: NVIDIA's "SQLite Export Schema Reference", exports of
2025.3 (schema 3.20). Nothing loops over events in Python: a million kernels with their launches take about
four seconds.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
    """One open export."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self.columns: dict[str, list[str]] = {
            table: [row[1] for row in connection.execute(f"PRAGMA table_info({quoted(table)})")]
            for (table,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
            if isinstance(table, str)  # a damaged one may be anything
        }

    def has(self, table: str, *columns: str) -> bool:
        """Tell whether the table exists with all these columns."""
        return table in self.columns and set(columns) <= set(self.columns[table])

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 if it does not exist."""
        if table not in self.columns:
            return 0
        return int(self.connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()[0])

    def version(self) -> str:
        """Return product, version and schema, as far as the export names them."""
        known: dict[str, str] = {}
        for table in VERSIONS:
            if self.has(table, "name", "value"):
                rows = self.connection.execute(
                    f"SELECT name, value FROM {quoted(table)}"
                ).fetchall()
                known |= {
                    name: value
                    for name, value in rows
                    if isinstance(name, str) and isinstance(value, str)
                }
        product = f"Nsight Systems {known.get('EXPORT_PRODUCT_VERSION', 'of an unknown version')}"
        schema = known.get("EXPORT_SCHEMA_VERSION")
        return f"{product} (schema {schema})" if schema else product

    def strings(self) -> dict[int, str]:
        """Return StringIds: number to text."""
        if not self.has("StringIds", "id", "value"):
            return {}
        rows = self.connection.execute("SELECT id, value FROM StringIds").fetchall()
        return {
            number: value
            for number, value in rows
            if isinstance(number, int) and isinstance(value, str)
        }

    def read(
        self, table: str, needed: Sequence[str], optional: Sequence[str] = (), where: str = "1"
    ) -> Columns:
        """Return columns of a table as arrays; -1 stands for no value. A missing table has no rows.

        Rows that end before they start are left out: nsys writes them for events that were cut. Raises
        UnreadableInput if a needed column is missing or holds text, or a time is none that a clock has.
        """
        wanted = [*needed, *optional]
        if table not in self.columns:
            return {one: np.array([], dtype=np.int64) for one in wanted}
        have = self.columns[table]
        missing = [one for one in needed if one not in have]
        if missing:
            raise UnreadableInput(
                f"table {table} has no column {', '.join(missing)}: a schema not known here"
            )
        chosen = ", ".join(
            f"coalesce({quoted(one)}, -1)" if one in have else "-1" for one in wanted
        )
        present = " AND ".join(f"{quoted(one)} IS NOT NULL" for one in needed)
        rows = self.connection.execute(
            f"SELECT {chosen} FROM {quoted(table)} WHERE {present} AND {where}"
        )
        try:
            data = np.fromiter(rows, dtype=np.dtype([(one, np.int64) for one in wanted]))
        except (ValueError, TypeError, OverflowError):
            raise UnreadableInput(
                f"table {table} holds text where numbers belong: a schema not known here"
            ) from None
        if len(data) and any(
            (data[one] >= LATEST).any() or (data[one] < 0).any() for one in needed if one in TIMES
        ):
            raise UnreadableInput(f"table {table} holds times that no clock has: a damaged file")
        if "end" in wanted:
            data = data[data["end"] >= data["start"]]
        return {one: np.ascontiguousarray(data[one]) for one in wanted}


@contextmanager
def open_export(path: Path) -> Iterator[Export]:
    """Open an export for reading. Raises UnreadableInput for a foreign or damaged file, also while it is read."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        export = Export(connection)
        if not any(table in export.columns for table in _OF_NSYS):
            tables = ", ".join(sorted(export.columns)[:5]) or "none"
            raise UnreadableInput(
                f"an SQLite file, but not an export of Nsight Systems (its tables: {tables})"
            )
        yield export
    except (
        sqlite3.Error,
        UnicodeDecodeError,
    ) as error:  # UnicodeDecodeError: SQLite quotes damaged bytes in its message
        said = (
            " ".join(str(error).split())
            if isinstance(error, sqlite3.Error)
            else "its schema is not text"
        )
        raise UnreadableInput(
            f"a damaged or cut SQLite file ({said}): export the report again"
        ) from None
    finally:
        connection.close()


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
