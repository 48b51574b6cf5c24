"""`python -m analysis seconds STUDY [--json]`: where the wall time of every cell went."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.console import console
from analysis.cost import SECONDS, CellCost, from_lines, from_record
from analysis.errors import UnreadableInput
from analysis.findings.study_inputs import studies_in
from analysis.report.sections.running import costs_table
from analysis.text import join_words
from benchmarks.record import CellFolder, Record, RecordError, read_lines, read_study

# What raw files that hold something else than Ringside wrote may raise.
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
HELP = """\
A row for each attempt at a cell, in seconds: the parts of its wall time, their sum (total), and
total ÷ measured (ratio); measured are the seconds inside windows whose samples count. What is not
known is "–". --json has every part.
benchmarks/METHOD.md, "Seconds of a cell", says what each part is."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument(
        "study", metavar="STUDY", type=Path, help="the folder of a study: <output_dir>/<study>"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        UnreadableInput, ValueError, OSError: it is not the folder of one study.
    """
    studies = studies_in(arguments.study)
    if len(studies) > 1:
        names = join_words([study.name for study in studies])
        raise ValueError(
            f"{arguments.study}: holds {len(studies)} studies ({names}); accepted is one of them"
        )
    cells, unreadable = costs_of(studies[0])
    if arguments.json:
        print(json.dumps({"cells": [_as_json(record, cost) for record, cost in cells]}))
        return 0
    out = console()
    out.print(costs_table(cells, whole="--json has").to_rich())
    for error in unreadable:
        out.print(f"note: {escape(str(error))}", soft_wrap=True)
    return 0


def costs_of(study: Path) -> tuple[list[tuple[Record, CellCost]], Sequence[RecordError]]:
    """Return the cost of every attempt, as its record states it, else by its raw files; and what cannot be read.

    Raises:
        UnreadableInput: the folder holds no record that can be read.
    """
    folders: dict[str, CellFolder] = {}

    def placed(record: Record, folder: CellFolder) -> Record:
        folders[record.record_id] = folder
        return record

    records, unreadable = read_study(study, placed)
    if not records:
        why = f"; {unreadable[0]}" if unreadable else ""
        raise UnreadableInput(
            f"{study}: holds no record that can be read; accepted is the folder of a study "
            f"(<output_dir>/<study>){why}"
        )
    return [(record, _cost(record, folders[record.record_id])) for record in records], unreadable


def _cost(record: Record, folder: CellFolder) -> CellCost:
    if stated := from_record(record):
        return stated
    try:
        lines = {
            rank: list(read_lines(folder.rank_lines(rank)))
            for rank in range(record.cell.world_size)
        }
        return from_lines(folder, lines, record.started_at, record.ended_at)
    except DAMAGED:
        return CellCost(record.ended_at - record.started_at, {}, None)


def _as_json(record: Record, cost: CellCost) -> dict[str, Any]:
    """Return a cell in plain JSON types; what is not known is absent."""
    values = {
        "cell": record.name,
        "marks": record.run_suffixes,
        "record_id": record.record_id,
        "sweep_id": record.sweep_id,
        "state": record.state,
        "started_at": record.started_at,
        "seconds": cost.metrics.get(SECONDS),
        "parts": dict(cost.parts),
        "measuring_seconds": cost.measuring,
        "overhead_ratio": cost.ratio,
    }
    return {name: value for name, value in values.items() if value not in (None, {}, [])}
