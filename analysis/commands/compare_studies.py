"""`python -m analysis compare STUDY_A STUDY_B [--limit 2%] [--json]`: how the same cells of two studies differ.

Exit status: 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be told.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from analysis.console import console
from analysis.findings.baselines import EFFICIENCY
from analysis.findings.between_studies import (
    UNKNOWN,
    CellDifference,
    Differences,
    MeasuredNumber,
    differences,
)
from analysis.findings.communication import EXCHANGE, EXPOSED
from analysis.findings.study_inputs import (
    StudyInput,
    StudyPath,
    differing,
    open_inputs,
    same_machine,
)
from analysis.report.numbers import KINDS, NumberFormat, estimate, number
from analysis.report.sections.studies import (
    differences_table,
    facts_table,
    plain_number,
    unit_of,
    verdict_words,
)
from analysis.report.table import Column, Table
from analysis.study.estimates import Estimate
from analysis.study.names import short_names
from analysis.text import count, single_line
from analysis.verification.quick import QuickCheck
from benchmarks.record.metrics import metric as entry_of

MOST_ROWS = 60
LIMIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
BESIDE = (EFFICIENCY, EXPOSED, EXCHANGE)  # numbers beside the one that is judged
INSIDE = "The intervals hold what differs between runs inside each study."
NOT_IN_TURN = (
    "The two studies were not measured in turn: what changes on a machine from one sweep to the "
    "next (heat, clocks, "
    f"neighbours) would look the same. {INSIDE}"
)
ONCE_MORE = (
    "To see what a sweep changes by itself, measure A once more under another name and compare "
    "the two."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="the folder of a study; LABEL=FOLDER gives it a name"
        )
    parser.add_argument(
        "--limit",
        metavar="SHARE",
        help="a cell that is slower by less, such as 2%%, is no regression (default: any that runs "
        "show). "
        "Exit status: 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be "
        "told",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print how two studies differ and return the exit status. Raises OSError, ValueError."""
    limit = _limit(arguments.limit)
    inputs = [StudyPath.of(text) for text in (arguments.a, arguments.b)]
    for study in inputs:
        if study.folder.is_file():
            raise ValueError(f"{study.folder}: is a file; accepted are two folders of studies")
    first, second = open_inputs(inputs, QuickCheck().marked)
    result = differences(first, second)
    if not result.cells:
        raise ValueError(
            f"{arguments.a} and {arguments.b} have no cell in common that is usable in both"
        )
    if arguments.json:
        print(json.dumps(as_json(first, second, result, limit)))
    else:
        _print(first, second, result, limit)
    if any(cell.is_regression(limit) for cell in result.cells):
        return 1
    if all(cell.verdict == UNKNOWN for cell in result.cells):
        reason = f"python -m analysis compare: no cell can be told: {result.cells[0].why}"
        print(single_line(reason, 600), file=sys.stderr)
        return 2
    return 0


def _limit(text: str | None) -> float:
    """Return a share. Raises ValueError for what is none."""
    match = LIMIT.fullmatch((text or "0").strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise ValueError(
            f"--limit {text}: accepted is a share from 0 to below 100 %, such as 2% or 0.02"
        )
    return share


def as_json(
    first: Sequence[StudyInput], second: Sequence[StudyInput], result: Differences, limit: float
) -> dict[str, Any]:
    """Return everything in plain JSON types.

    Shares are parts of one; a difference is the second minus the first.
    """
    apart, shared = differing([*first, *second])
    return {
        "a": [_side_json(side) for side in first],
        "b": [_side_json(side) for side in second],
        "differs": apart,
        "shared": shared,
        "limit": limit,
        "regressions": sum(cell.is_regression(limit) for cell in result.cells),
        "verdicts": dict(Counter(cell.verdict for cell in result.cells)),
        "cells": [_cell_json(cell, limit) for cell in result.cells],
        "only_a": list(result.only_first),
        "only_b": list(result.only_second),
    }


def _side_json(side: StudyInput) -> dict[str, str]:
    return {"name": side.name, "study": side.study.name, "folder": str(side.folder)}


def _cell_json(cell: CellDifference, limit: float) -> dict[str, Any]:
    steps = {}
    for name, step in cell.steps.items():
        steps[name] = _estimate_json(step.estimate()) | {
            "unit": "share of a" if step.logarithm else unit_of(name)
        }
    return {
        "cell": cell.name,
        "gpus": list(cell.gpus),
        "metric": cell.metric,
        "change": None if cell.change is None else _estimate_json(cell.change),
        "verdict": cell.verdict,
        "smallest": cell.smallest,
        "regression": cell.is_regression(limit),
        "why": cell.why,
        "doubts": cell.doubts,
        "a": _numbers_json(cell.first),
        "b": _numbers_json(cell.second),
        "differences": steps,
    }


def _numbers_json(numbers: Mapping[str, MeasuredNumber]) -> dict[str, dict[str, float]]:
    return {
        name: {"value": float(measured.plain), "runs": measured.runs}
        for name, measured in numbers.items()
    }


def _estimate_json(value: Estimate) -> dict[str, Any]:
    return {"value": value.value, "low": value.low, "high": value.high}


def _print(
    first: Sequence[StudyInput], second: Sequence[StudyInput], result: Differences, limit: float
) -> None:
    out = console()
    letters = []
    for letter, sides in (("A", first), ("B", second)):
        for side in sides:
            letters.append(letter)
            cells = count(len(side.study.runs), "cell")
            text = (
                f"[bold]{letter}[/bold]  {escape(side.name)}  ({escape(str(side.folder))}, {cells})"
            )
            out.print(text, soft_wrap=True)
    sides = [*first, *second]
    apart, _ = differing(sides)
    if apart:
        out.print(facts_table(apart, letters).to_rich())
    else:
        text = (
            "What differs: nothing that the records tell of the machine, the software and the code."
        )
        out.print(text, soft_wrap=True)
    out.print(differences_table(result, "cells", "The same cells, B against A").to_rich(MOST_ROWS))
    if len(result.cells) > MOST_ROWS:
        out.print(f"… {len(result.cells) - MOST_ROWS} more (--json has all)")
    beside = _beside_table(result)
    if beside.rows:
        out.print(beside.to_rich(MOST_ROWS))
    for line in _lines(result, limit, same_machine(sides)):
        out.print(escape(line), soft_wrap=True)


def _beside_table(result: Differences) -> Table:
    """Return efficiency, exposed communication and exchange of the cells that have them."""
    metrics = [
        name
        for name in BESIDE
        if any(name in cell.steps and name != cell.metric for cell in result.cells)
    ]
    names = short_names(cell.name for cell in result.cells)
    columns = [Column("cell", "cell", lambda cell: names[cell.name])]
    for name in metrics:
        heading = entry_of(name).column or entry_of(name).title
        columns.append(Column(name, heading, _values_of(name), "number"))
        columns.append(Column(f"{name}_difference", "difference", _difference_of(name), "number"))
    cells = [cell for cell in result.cells if any(name in cell.steps for name in metrics)]
    return Table.of("beside", "A → B, and the difference", columns, cells)


def _values_of(metric: str) -> Callable[[CellDifference], str]:
    """Return what gives `99.6 % → 99.8 %` of a cell; empty where a side lacks the number."""

    def values(cell: CellDifference) -> str:
        if metric not in cell.steps:
            return ""
        return " → ".join(
            plain_number(metric, numbers[metric]) for numbers in (cell.first, cell.second)
        )

    return values


def _difference_of(metric: str) -> Callable[[CellDifference], str]:
    """Return what gives the difference of a cell's numbers, with its interval.

    Empty where a side lacks the number.
    """
    points = (
        NumberFormat(100.0, "points", 1, sign=True)
        if entry_of(metric).unit == "%"
        else NumberFormat(sign=True)
    )

    def difference(cell: CellDifference) -> str:
        step = cell.steps.get(metric)
        if step is None:
            return ""
        return estimate(step.estimate(), KINDS["change"] if step.logarithm else points)

    return difference


def _lines(result: Differences, limit: float, is_same_machine: bool) -> list[str]:
    """Return what the table says in sentences, and what a difference may claim."""
    cells = result.cells
    lines = [f"{count(len(cells), 'cell')} compared, B against A: {verdict_words(cells)}."]
    slower = [
        (cell.change.value, cell)
        for cell in cells
        if cell.is_regression(limit) and cell.change is not None
    ]
    size = f" by {number(limit, 'share')} or more" if limit else ""
    if slower:
        _, worst = min(slower, key=lambda pair: pair[0])
        word = "Regression" if is_same_machine else "Slower"
        most = f"{worst.name}, {estimate(worst.change, 'change')}"
        lines.append(f"{word}{size}: {count(len(slower), 'cell')}, most of all {most}.")
    elif any(cell.verdict != UNKNOWN for cell in cells):
        lines.append(f"No regression was found: no cell of B is seen to be slower{size}.")
        blind = [cell.smallest for cell in cells if cell.smallest and cell.smallest > limit > 0]
        if blind:
            lines.append(
                f"The limit is below what {count(len(blind), 'cell')} could show (up to "
                f"{number(max(blind), 'share')}): "
                "a smaller regression there can stay unseen. More repeats show more."
            )
    lines.append(f"{NOT_IN_TURN} {ONCE_MORE}" if is_same_machine else NOT_IN_TURN)
    reasons = Counter(cell.why for cell in cells if cell.why)
    lines += [f"{count(number_of, 'cell')}: {why}." for why, number_of in reasons.items()]
    lines += [f"{cell.name}: {cell.doubts}." for cell in cells if cell.doubts][:3]
    for letter, names in (("A", result.only_first), ("B", result.only_second)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"Only in {letter}: {'; '.join(names[:3])}{more}.")
    return lines
