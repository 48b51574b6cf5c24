"""`python -m analysis compare A B [--limit 2%]`: how the same cells of two studies differ.

Exit status: 0 no regression was seen, 1 a regression was found, 2 wrong input, and with --strict no
cell can be told.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from analysis.console import console
from analysis.findings.baselines import EFFICIENCY
from analysis.findings.between_studies import UNKNOWN, CellDifference, Differences, differences
from analysis.findings.communication import EXCHANGE
from analysis.findings.study_inputs import (
    StudyInput,
    StudyPath,
    differing,
    open_inputs,
    same_machine,
)
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.sections.comparisons_section import (
    differences_table,
    facts_table,
    plain_number,
    unit_of,
    verdict_words,
)
from analysis.report.table import Column, Table
from analysis.study.names import short_names
from analysis.text import count, single_line
from analysis.verification.quick import QuickCheck
from benchmarks.record.metrics import metric as entry_of

MOST_ROWS = 60
LIMIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
BESIDE = (EFFICIENCY, EXCHANGE)  # numbers beside the one that is judged
POINTS, SIGNED = NumberFormat(100.0, "points", 1, sign=True), NumberFormat(sign=True)
NOTHING_DIFFERS = (
    "What differs: nothing that the records tell of the machine, the software and the code."
)
NOT_IN_TURN = (
    "The two studies were not measured in turn: what changes on a machine from one sweep to the "
    "next (heat, clocks, neighbours) would look the same. The intervals hold what differs between "
    "runs inside each study."
)
ONCE_MORE = (
    "To see what a sweep changes by itself, measure A once more under another name and compare "
    "the two."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    for name in ("a", "b"):
        folder = "the folder of a study; LABEL=FOLDER gives it a name"
        add(name, metavar=name.upper(), help=folder)
    limit = (
        "a cell that is slower by less, such as 2%%, is no regression (default: any that runs "
        "show). Exit status: 0 no regression was seen, 1 a regression was found, 2 wrong input"
    )
    add("--limit", metavar="SHARE", help=limit)
    add("--strict", action="store_true", help="exit status 2 where no cell can be told")


def run(arguments: argparse.Namespace) -> int:
    """Print how two studies differ and return the exit status. Raises OSError, ValueError."""
    match = LIMIT.fullmatch((arguments.limit or "0").strip())
    limit = -1.0
    if match:
        limit = float(match[1]) / (100 if match[2] else 1)
    if not 0 <= limit < 1:
        raise ValueError(
            f"--limit {arguments.limit}: accepted is a share from 0 to below 100 %, such as 2% or "
            "0.02"
        )
    inputs = [StudyPath.of(text) for text in (arguments.a, arguments.b)]
    for study in inputs:
        if study.folder.is_file():
            raise ValueError(f"{study.folder}: is a file; accepted are two folders of studies")
    sides = open_inputs(inputs, QuickCheck().marked)
    result = differences(*sides)
    if not result.cells:
        raise ValueError(
            f"{arguments.a} and {arguments.b} have no cell in common that is usable in both"
        )
    if arguments.json:
        print(json.dumps(_as_json(sides, result, limit)))
    else:
        _print(sides, result, limit)
    if any(cell.is_regression(limit) for cell in result.cells):
        return 1
    if all(cell.verdict == UNKNOWN for cell in result.cells):
        reason = f"python -m analysis compare: no cell can be told: {result.cells[0].why}"
        print(single_line(reason, 600), file=sys.stderr)
        return 2 if arguments.strict else 0
    return 0


def _apart(sides: Sequence[Sequence[StudyInput]], result: Differences) -> dict[str, list[str]]:
    """Return {fact: its value in each input} of everything that differs between the two sides."""
    apart, _ = differing([*sides[0], *sides[1]])
    for name, (first, second) in result.facts.items():
        apart[name] = [first] * len(sides[0]) + [second] * len(sides[1])
    return apart


def _as_json(
    sides: Sequence[Sequence[StudyInput]], result: Differences, limit: float
) -> dict[str, Any]:
    """Return everything in plain JSON types: shares of one, the second minus the first."""
    inputs = []
    for side in sides:
        facts = []
        for study in side:
            folder = str(study.folder)
            facts.append({"name": study.name, "study": study.study.name, "folder": folder})
        inputs.append(facts)
    _, shared = differing([*sides[0], *sides[1]])
    apart = _apart(sides, result)
    cells, regressions = [], 0
    verdicts: Counter[str] = Counter()
    for cell in result.cells:
        cells.append(_cell_json(cell, limit))
        regressions += cell.is_regression(limit)
        verdicts[cell.verdict] += 1
    return {
        "a": inputs[0],
        "b": inputs[1],
        "differs": apart,
        "shared": shared,
        "limit": limit,
        "regressions": regressions,
        "verdicts": dict(verdicts),
        "cells": cells,
        "only_a": list(result.only_first),
        "only_b": list(result.only_second),
    }


def _cell_json(cell: CellDifference, limit: float) -> dict[str, Any]:
    change = None
    if cell.change is not None:
        change = asdict(cell.change)
    numbers = []
    for side in (cell.first, cell.second):
        values = {}
        for name, measured in side.items():
            values[name] = {"value": float(measured.plain), "runs": measured.runs}
        numbers.append(values)
    steps = {}
    for name, step in cell.steps.items():
        unit = unit_of(name)
        if step.logarithm:
            unit = "share of a"
        steps[name] = asdict(step.estimate()) | {"unit": unit}
    return {
        "cell": cell.name,
        "gpus": list(cell.gpus),
        "metric": cell.metric,
        "change": change,
        "verdict": cell.verdict,
        "smallest": cell.smallest,
        "regression": cell.is_regression(limit),
        "why": cell.why,
        "doubts": cell.doubts,
        "a": numbers[0],
        "b": numbers[1],
        "differences": steps,
    }


def _print(sides: Sequence[Sequence[StudyInput]], result: Differences, limit: float) -> None:
    out = console()
    letters = []
    for letter, side in zip("AB", sides, strict=True):
        for study in side:
            letters.append(letter)
            cells = count(len(study.study.runs), "cell")
            where = f"{escape(study.name)}  ({escape(str(study.folder))}, {cells})"
            out.print(f"[bold]{letter}[/bold]  {where}", soft_wrap=True)
    inputs = [*sides[0], *sides[1]]
    apart = _apart(sides, result)
    if apart:
        out.print(facts_table(apart, letters).to_rich())
    else:
        out.print(NOTHING_DIFFERS, soft_wrap=True)
    out.print(differences_table(result, "cells", "The same cells, B against A").to_rich(MOST_ROWS))
    if len(result.cells) > MOST_ROWS:
        out.print(f"… {len(result.cells) - MOST_ROWS} more (--json has all)")
    beside = _beside_table(result)
    if beside.rows:
        out.print(beside.to_rich(MOST_ROWS))
    for line in _lines(result, limit, same_machine(inputs)):
        out.print(escape(line), soft_wrap=True)


def _beside_table(result: Differences) -> Table:
    """Return efficiency and exchange of the cells that have them."""
    names = short_names(cell.name for cell in result.cells)
    columns = [Column("cell", "cell")]
    rows: dict[str, dict[str, str]] = {}
    for metric in BESIDE:
        cells = [cell for cell in result.cells if metric in cell.steps]
        if all(cell.metric == metric for cell in cells):
            continue
        entry = entry_of(metric)
        columns.append(Column(metric, entry.column or entry.title, kind="number"))
        columns.append(Column(f"{metric}_difference", "difference", kind="number"))
        for cell in cells:
            row = rows.setdefault(cell.name, {"cell": names[cell.name]})
            first = plain_number(metric, cell.first[metric])
            row[metric] = f"{first} → {plain_number(metric, cell.second[metric])}"
            step = cell.steps[metric]
            form: str | NumberFormat = SIGNED
            if step.logarithm:
                form = "change"
            elif entry.unit == "%":
                form = POINTS
            row[f"{metric}_difference"] = estimate(step.estimate(), form)
    for row in rows.values():
        for column in columns:
            row.setdefault(column.key, "")
    return Table.of("beside", "A → B, and the difference", columns, rows.values())


def _lines(result: Differences, limit: float, is_same_machine: bool) -> list[str]:
    """Return what the table says in sentences, and what a difference may claim."""
    cells = result.cells
    lines = [f"{count(len(cells), 'cell')} compared, B against A: {verdict_words(cells)}."]
    size, word, advice = "", "Slower", NOT_IN_TURN
    if limit:
        size = f" by {number(limit, 'share')} or more"
    if is_same_machine:
        word, advice = "Regression", f"{NOT_IN_TURN} {ONCE_MORE}"
    slower, blind, doubts = [], [], []
    is_told = False
    reasons: Counter[str] = Counter()
    for cell in cells:
        is_told = is_told or cell.verdict != UNKNOWN
        if cell.is_regression(limit) and cell.change is not None:
            slower.append((cell.change.value, cell.name, cell.change))
        if cell.smallest and cell.smallest > limit > 0:
            blind.append(cell.smallest)
        if cell.why:
            reasons[cell.why] += 1
        if cell.doubts:
            doubts.append(f"{cell.name}: {cell.doubts}.")
    if slower:
        _, name, change = min(slower, key=lambda entry: entry[0])
        most = f"{name}, {estimate(change, 'change')}"
        lines.append(f"{word}{size}: {count(len(slower), 'cell')}, most of all {most}.")
    elif is_told:
        lines.append(f"No regression was found: no cell of B is seen to be slower{size}.")
        if blind:
            lines.append(
                f"The limit is below what {count(len(blind), 'cell')} could show (up to "
                f"{number(max(blind), 'share')}): "
                "a smaller regression there can stay unseen. More repeats show more."
            )
    lines.append(advice)
    for why, number_of in reasons.items():
        lines.append(f"{count(number_of, 'cell')}: {why}.")
    lines += doubts[:3]
    for letter, names in (("A", result.only_first), ("B", result.only_second)):
        more = ""
        if len(names) > 3:
            more = f" and {len(names) - 3} more"
        if names:
            lines.append(f"Only in {letter}: {'; '.join(names[:3])}{more}.")
    return lines
