"""What every cell of a study cost, and what its sweeps took besides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import UnreadableInput
from analysis.seconds.cell import SECONDS, CellSeconds, from_lines, from_record
from analysis.seconds.sweeps import PROJECTION, Journal, SweepSeconds, journal
from benchmarks.record import CellFolder, Record, read_lines, read_study

RECORD = "record"  # what is between the end of a cell and its record, beyond the passes: derived, judged, written
# What raw files that hold something else than Ringside wrote may raise.
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class CellCost:
    """What one attempt at a cell cost."""

    record: Record
    seconds: CellSeconds
    beyond: Mapping[
        str, float
    ]  # {part: seconds after its wall time}: passes, the record, MLflow; absent: not known

    def to_json(self) -> dict[str, Any]:
        """Return it in plain JSON types; what is not known is absent."""
        record, cost = self.record, self.seconds
        told = {
            "cell": record.name, "marks": record.marks, "record_id": record.record_id, "sweep_id": record.sweep_id,
            "state": record.state, "started_at": record.started_at, "seconds": cost.metrics.get(SECONDS),
            "parts": dict(cost.parts), "measuring_seconds": cost.measuring, "overhead_ratio": cost.ratio,
            "beyond": dict(self.beyond),
        }  # fmt: skip
        return {name: value for name, value in told.items() if value not in (None, {}, [])}


@dataclass(frozen=True)
class StudyCost:
    """What a study cost."""

    cells: Sequence[CellCost]  # in order of their start
    sweeps: Sequence[SweepSeconds]
    unreadable: Sequence[str]  # a sentence for each record that cannot be read

    def to_json(self) -> dict[str, Any]:
        """Return it in plain JSON types; what is not known is absent."""
        cells = [one.to_json() for one in self.cells]
        return {"cells": cells, "sweeps": [sweep_to_json(one) for one in self.sweeps]}


def cost_of(study: Path) -> StudyCost:
    """Return what the cells of a study cost, earlier attempts too: as their records state it, else by their raw files.

    Raises:
        UnreadableInput: the folder holds no record that can be read.
    """
    folders: dict[int, CellFolder] = {}

    def taken(record: Record, folder: CellFolder) -> Record:
        folders[id(record)] = folder
        return record

    records, unreadable = read_study(study, taken)
    if not records:
        why = f"; {unreadable[0]}" if unreadable else ""
        raise UnreadableInput(
            f"{study}: holds no record that can be read; accepted is the folder of a study (<output_dir>/<study>){why}"
        )
    said = journal(study)
    cells = [CellCost(one, _seconds(one, folders[id(one)]), _beyond(one, said)) for one in records]
    return StudyCost(cells, said.sweeps, [str(one) for one in unreadable])


def _seconds(record: Record, folder: CellFolder) -> CellSeconds:
    if stated := from_record(record):
        return stated
    try:
        lines = {
            rank: list(read_lines(folder.rank_lines(rank)))
            for rank in range(record.cell.world_size)
        }
        return from_lines(folder, lines, record.started_at, record.ended_at)
    except DAMAGED:
        return CellSeconds(record.ended_at - record.started_at, {}, None)


def _beyond(record: Record, said: Journal) -> dict[str, float]:
    """Return what the launcher took for a cell beyond its wall time."""
    spent = said.beyond.get(record.record_id, {})
    passes = {part: seconds for part, seconds in spent.items() if part != PROJECTION}
    projection = {part: seconds for part, seconds in spent.items() if part == PROJECTION}
    written_at = said.written.get(record.record_id)
    if (
        written_at is None or written_at < record.ended_at
    ):  # closed later by another launcher: not this cell's time
        return passes | projection
    return (
        passes
        | {RECORD: max(0.0, written_at - record.ended_at - sum(passes.values()))}
        | projection
    )


def sweep_to_json(sweep: SweepSeconds) -> dict[str, Any]:
    """Return a sweep in plain JSON types; what is not known is absent."""
    told = (
        {"sweep_id": sweep.sweep_id, "cells": len(sweep.begun)}
        | dict(sweep_parts(sweep))
        | {"seconds": sweep.total}
    )
    return {name: value for name, value in told.items() if value is not None}


def sweep_parts(sweep: SweepSeconds) -> Iterator[tuple[str, float | None]]:
    """Yield the parts of a sweep in their order, which add up to its seconds; None: not known."""
    yield "plan", sweep.plan
    yield "before the first cell", sweep.before
    yield "in cells", sweep.of_cells
    yield "between cells", sweep.between
    yield "after the last cell", sweep.after
