"""`python -m analysis seconds STUDY`: where the wall time of every cell went."""

import argparse
import json
from pathlib import Path

from rich.markup import escape

from analysis.console import console
from analysis.cost import from_record
from analysis.input_files import UnreadableInput
from analysis.report.sections.conditions_section import costs_table
from analysis.study.study_inputs import studies_in
from analysis.text import join_words
from benchmarks.record import read_study


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = "What each part is: benchmarks/METHOD.md, Seconds of a cell. --json has all."
    folder = "the folder of a study: <output_dir>/<study>"
    parser.add_argument("study", metavar="STUDY", type=Path, help=folder)


def run(arguments: argparse.Namespace) -> int:
    """Print the seconds of every cell. Raises OSError, ValueError: not the folder of one study."""
    studies = studies_in(arguments.study)
    if len(studies) > 1:
        names = join_words([study.name for study in studies])
        raise ValueError(
            f"{arguments.study}: holds {len(studies)} studies ({names}); expected one of them"
        )
    records, unreadable = read_study(studies[0])
    if not records:
        raise UnreadableInput(
            f"{studies[0]}: holds no record that can be read; expected the folder of a study "
            f"(<output_dir>/<study>); {unreadable[0]}"
        )
    if not arguments.json:
        console().print(costs_table(records).to_rich())
        for error in unreadable:
            console().print(f"note: {escape(str(error))}", soft_wrap=True)
        return 0
    cells = []
    for record in records:
        cost = from_record(record)
        cell: dict[str, object] = {
            "cell": record.name,
            "marks": record.cell.run_suffixes(record.drift),
            "record_id": record.record_id,
            "sweep_id": record.sweep_id,
            "state": record.state,
            "started_at": record.started_at,
            "parts": dict(cost.parts),
        }
        for name, value in cost.metrics.items():
            cell[name.removeprefix("cell/")] = value
        # A first run has no marks, and parts may not be known.
        cells.append({name: value for name, value in cell.items() if value not in ([], {})})
    print(json.dumps({"cells": cells}))
    return 0
