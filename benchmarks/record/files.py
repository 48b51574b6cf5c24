"""Read and write `record.json`. It is written whole or not at all; a damaged one is refused in one sentence."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import own_files
from benchmarks.record.cell_folder import CellFolder, record_paths
from benchmarks.record.encoding import encoded, refuse_deep, restored
from benchmarks.record.field_types import check_types
from benchmarks.record.former import LAST_OLD_NAMES, LATER_FIELDS, LATER_TABLES, renewed
from benchmarks.record.model import (
    LAST_TIME,
    SCHEMA_VERSION,
    Failure,
    Record,
    RecordError,
    Validity,
)
from conf.cell import ONLY_IF_SAID, Cell, Network, Optimizer


def write(folder: CellFolder, record: Record) -> Path:
    """Write `record.json` in a cell's folder: whole or not at all, on disk when this returns. Raises OSError."""
    return write_json(folder.record, dataclasses.asdict(record))


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write one JSON object whole or not at all; return its path. Raises OSError."""
    return own_files.write_whole(path, encoded(content, indent=1))


def read(path: Path) -> Record:
    """Read one `record.json`. Every field, the cell's too, holds what its annotation says.

    Raises:
        RecordError: unreadable, no record, damaged, or written by a newer Ringside.
    """
    try:
        with own_files.open_to_read(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: no readable record ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"{path}: no record (schema_version={version!r})")
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema_version={version} is newer than {SCHEMA_VERSION}, the newest known here"
        )
    try:
        return _record(content)
    except (
        TypeError,
        KeyError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise RecordError(f"{path}: a damaged record ({error})") from None


def _record(content: dict[str, Any]) -> Record:
    """Return the record that a JSON object holds. Raises what a constructor raises, and ValueError for a wrong time."""
    content = renewed(content)
    for name in ("model", "metrics", "within_run", "series", "checks", "tables", "predicted"):
        content[name] = restored(content.get(name, {}) if name in LATER_TABLES else content[name])
    refuse_deep(
        {name: value for name, value in content.items() if name not in ("series", "tables")}
    )
    if lost := list(
        _lost(content)
    ):  # what is lost must not become a default: valid, no repeat, no failure
        raise KeyError(", ".join(lost))
    content["failure"] = Failure(**content["failure"]) if content["failure"] is not None else None
    content["validity"] = Validity(**content["validity"])
    content["cell"] = Cell.from_dict(content["cell"])
    record = Record(**content)
    check_types(record)
    if not 0 <= record.started_at < LAST_TIME or not 0 <= record.ended_at < LAST_TIME:
        raise ValueError("started_at and ended_at are no times")
    return record


def _lost(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that a record of its schema has and this one does not."""
    later = LATER_FIELDS if content["schema_version"] <= LAST_OLD_NAMES else ()
    cell, failure = content["cell"], content["failure"]
    parts = [(Record, content), (Validity, content["validity"]), (Cell, cell)]
    parts += [(Network, cell["model"]), (Optimizer, cell["optimizer"])]
    for kind, part in [*parts, (Failure, failure)] if isinstance(failure, Mapping) else parts:
        yield from (
            field.name
            for field in dataclasses.fields(kind)
            if field.name not in (*part, *later, *ONLY_IF_SAID)
        )


def read_study(
    folder: Path, check: Callable[[Record, CellFolder], Record] | None = None
) -> tuple[list[Record], list[RecordError]]:
    """Read every record of a study, earlier attempts too. Returns them in order of their start, and what could not be read.

    `check` returns the record to take instead of one, and may read its folder.
    """
    records, unreadable = [], []
    for path in record_paths(folder):
        try:
            record = read(path)
            records.append(check(record, CellFolder(path.parent)) if check else record)
        except RecordError as error:
            unreadable.append(error)
    return sorted(records, key=lambda record: (record.started_at, record.record_id)), unreadable
