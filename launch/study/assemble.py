"""Make the record of an attempt from the files of its folder: cell.json, attempt.json and the lines of the ranks."""

import json
from typing import Any

from analysis.cost import to_record
from benchmarks.derived import FIELDS, Derived, IncompleteLines, complete, reported
from benchmarks.record import (
    CellFolder,
    Failure,
    Record,
    RecordError,
    check_types,
    decoded,
    encoded,
    own_files,
    read_lines,
    restored,
)
from conf.cell import Cell


def assemble(folder: CellFolder, state: str, failure: Failure | None, ended_at: float) -> Record:
    """Return the record, not yet judged, and write what the benchmark prints. The same folder gives the same record.

    Raises:
        RecordError: the folder holds no begun attempt.
    """
    try:
        cell = Cell.from_dict(decoded(folder.cell.read_bytes()))
        attempt = decoded(folder.attempt.read_bytes())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{folder.path}: no attempt was begun here ({error})") from None
    lines_of_ranks = {}
    ranks: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    for number in range(cell.world_size + cell.servers):
        lines = list(read_lines(folder.rank_lines(number)))
        if number < cell.world_size:
            lines_of_ranks[number] = lines
        if (told := reported(lines)) is None:
            continue
        (ranks if number < cell.world_size else servers).append(told.facts)
        attempt["environment"].setdefault("versions", told.versions)
    if servers:
        attempt["environment"]["servers"] = servers
    values: dict[str, Any] = {}
    try:
        values = _readable(complete(lines_of_ranks, cell) or {})
    except IncompleteLines as error:
        failure = failure or Failure("exception", None, f"the lines of the ranks are incomplete: {error}")
        state = "failed" if state == "finished" else state
    ended_at = max(ended_at, attempt["started_at"])
    if cost := to_record(folder, lines_of_ranks, attempt["started_at"], ended_at):
        values["tables"] = values.get("tables", {}) | cost.tables
        values["metrics"] = values.get("metrics", {}) | (cost.metrics if state == "finished" else {})
    if output := values.get("output"):
        own_files.write_whole(folder.output, f"{output}\n".encode())
    return Record(
        cell_key=cell.key,
        name=cell.name,
        cell=cell,
        state=state,
        failure=failure,
        ended_at=ended_at,
        **{name: values.get(name, {}) for name in FIELDS},
        ranks=ranks,
        raw_sha256=folder.raw_sha256(),
        **attempt,
    )


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as a reader of the record will have them. Raises IncompleteLines where a record cannot hold them."""
    try:
        written: dict[str, Any] = restored(json.loads(encoded(values)))
        check_types(Derived(**written))
    except (TypeError, ValueError, RecursionError) as error:
        raise IncompleteLines(f"a record cannot hold what was derived ({type(error).__name__}: {error})") from None
    return written
