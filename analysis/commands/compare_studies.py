"""`python -m analysis compare STUDY_A STUDY_B [--limit 2%] [--json]`: how the same cells of two studies differ.

Exit status: 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be told.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.findings.across.differences import (
    EQUAL,
    FASTER,
    SLOWER,
    UNKNOWN,
    CellDifference,
    Differences,
    differences,
)
from analysis.findings.across.measured import MeasuredNumber
from analysis.findings.across.sides import Asked, Side, open_sides
from analysis.findings.across.surroundings import differing, same_machine
from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication.exposed import EXCHANGE, EXPOSED
from analysis.findings.model import Estimate
from analysis.report.names import short_names
from analysis.report.numbers import ABSENT, KINDS, NumberFormat, central, estimate, interval, number, of_metric
from analysis.report.text import count, single_line
from analysis.verification.quick import QuickCheck
from benchmarks.record.metrics import metric as entry_of

_SHOWN = 60  # rows
_LIMIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
BESIDE = (EFFICIENCY, EXPOSED, EXCHANGE)  # numbers beside the one that is judged
INSIDE = "The intervals hold what differs between runs inside each study."
NOT_IN_TURN = (
    "The two studies were not measured in turn: what changes on a machine from one sweep to the next (heat, clocks, "
    f"neighbours) would look the same. {INSIDE}"
)
ONCE_MORE = "To see what a sweep changes by itself, measure A once more under another name and compare the two."
IN_TURN = f"Their sweeps were measured in turn. {INSIDE}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="the folder of a study; LABEL=FOLDER gives it a name")
    parser.add_argument(
        "--limit",
        metavar="SHARE",
        help="a cell that is slower by less, such as 2%%, is no regression (default: any that runs show). "
        "Exit status: 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be told",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print how two studies differ and return the exit status. Raises OSError, ValueError."""
    limit = _limit(arguments.limit)
    asked = [Asked.of(text) for text in (arguments.a, arguments.b)]
    for one in asked:
        if one.folder.is_file():
            raise ValueError(f"{one.folder}: is a file; accepted are two folders of studies")
    first, second = open_sides(asked, QuickCheck().marked)
    found = differences(first, second)
    if not found.cells:
        raise ValueError(f"{arguments.a} and {arguments.b} have no cell in common that is usable in both")
    if arguments.json:
        print(json.dumps(as_json(first, second, found, limit)))
    else:
        _print(first, second, found, limit)
    if any(one.is_regression(limit) for one in found.cells):
        return 1
    if all(one.verdict == UNKNOWN for one in found.cells):
        reasons = dict.fromkeys(one.why for one in found.cells)
        print(
            single_line(f"python -m analysis compare: no cell can be told: {next(iter(reasons))}", 600), file=sys.stderr
        )
        return 2
    return 0


def _limit(text: str | None) -> float:
    """Return a share. Raises ValueError for what is none."""
    found = _LIMIT.fullmatch((text or "0").strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share < 1:
        raise ValueError(f"--limit {text}: accepted is a share from 0 to below 100 %, such as 2% or 0.02")
    return share


def as_json(first: Sequence[Side], second: Sequence[Side], found: Differences, limit: float) -> dict[str, Any]:
    """Return everything in plain JSON types. Shares are parts of one; a difference is the second minus the first."""
    apart, shared = differing([*first, *second])
    sides = {
        name: [{"name": side.name, "study": side.study.name, "folder": str(side.folder)} for side in of_one]
        for name, of_one in (("a", first), ("b", second))
    }
    return {
        **sides,
        "differs": apart,
        "shared": shared,
        "in_turn": found.in_turn,
        "limit": limit,
        "regressions": sum(one.is_regression(limit) for one in found.cells),
        "verdicts": dict(Counter(one.verdict for one in found.cells)),
        "cells": [_cell_json(one, limit) for one in found.cells],
        "only_a": list(found.only_first),
        "only_b": list(found.only_second),
    }


def _cell_json(one: CellDifference, limit: float) -> dict[str, Any]:
    return {
        "cell": one.name,
        "gpus": list(one.gpus),
        "metric": one.metric,
        "change": _ends(one.change),
        "verdict": one.verdict,
        "smallest": one.smallest,
        "regression": one.is_regression(limit),
        "why": one.why,
        "doubts": one.doubts,
        "a": _values(one.first),
        "b": _values(one.second),
        "differences": {
            name: {**(_ends(step.estimate()) or {}), "unit": "share of a" if step.logarithm else _unit(name)}
            for name, step in one.steps.items()
        },
    }


def _values(side: Any) -> dict[str, dict[str, float]]:
    return {name: {"value": float(value.plain), "runs": value.runs} for name, value in side.items()}


def _ends(value: Estimate | None) -> dict[str, float | None] | None:
    return None if value is None else {"value": value.value, "low": value.low, "high": value.high}


def _unit(metric: str) -> str:
    unit = entry_of(metric).unit
    return "share" if unit == "%" else unit


def _print(first: Sequence[Side], second: Sequence[Side], found: Differences, limit: float) -> None:
    out = console()
    for letter, sides in (("A", first), ("B", second)):
        for side in sides:
            cells = count(len(side.study.runs), "cell")
            told = f"[bold]{letter}[/bold]  {escape(side.name)}  ({escape(str(side.folder))}, {cells})"
            out.print(told, soft_wrap=True)
    _print_surroundings(first, second)
    _print_rates(found)
    _print_beside(found)
    for line in _lines(found, limit, same_machine([*first, *second])):
        out.print(escape(line), soft_wrap=True)


def _print_rates(found: Differences) -> None:
    """Print both rates of every cell, their difference and the verdict."""
    units = {_unit(one.metric) for one in found.cells if one.metric}
    unit = units.pop() if len(units) == 1 else ""
    names = short_names(one.name for one in found.cells)
    table = _table("The same cells, B against A, with 95 % intervals", "cell")
    for heading in ("runs", f"A\n{unit}".strip(), f"B\n{unit}".strip(), "difference"):
        table.add_column(heading, justify="right")
    table.add_column("verdict on B")
    for one in found.cells[:_SHOWN]:
        table.add_row(escape(names[one.name]), *_numbers(one, "" if unit else _unit(one.metric)))
    out = console()
    out.print(table)
    if len(found.cells) > _SHOWN:
        out.print(f"… {len(found.cells) - _SHOWN} more (--json has all)")


def _print_beside(found: Differences) -> None:
    """Print efficiency, exposed communication and exchange of the cells that have them."""
    metrics = [name for name in BESIDE if any(name in one.steps and name != one.metric for one in found.cells)]
    if not metrics:
        return
    names = short_names(one.name for one in found.cells)
    table = _table("A → B, and the difference", "cell")
    for name in metrics:
        table.add_column(entry_of(name).column or entry_of(name).title, justify="right")
    for one in found.cells[:_SHOWN]:
        if any(name in one.steps for name in metrics):
            table.add_row(escape(names[one.name]), *(_step(name, one) for name in metrics))
    console().print(table)


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    return table


def _print_surroundings(first: Sequence[Side], second: Sequence[Side]) -> None:
    """Print what differs between the machines and versions."""
    out, sides = console(), [*first, *second]
    apart, _ = differing(sides)
    if not apart:
        out.print(
            "What differs: nothing that the records tell of the machine, the software and the code.", soft_wrap=True
        )
        return
    letters = [letter for letter, of_one in (("A", first), ("B", second)) for _ in of_one]
    table = _table("What differs", "")
    for letter in letters:
        table.add_column(letter)
    for name, values in apart.items():
        table.add_row(escape(name), *map(escape, values))
    out.print(table)


def _numbers(one: CellDifference, unit: str) -> list[str]:
    """Return runs, both numbers, the difference, and the verdict; where none is seen, what could have been."""
    values = [side.get(one.metric) for side in (one.first, one.second)]
    runs = ", ".join(str(value.runs) for value in values if value)
    told = [f"{_number(one.metric, value)} {unit}".strip() for value in values]
    could = f"\ncould see {number(one.smallest, 'share')}" if one.verdict == EQUAL else ""
    return [runs, *told, _in_lines(one.change, KINDS["change"]), f"{one.verdict}{could}"]


def _in_lines(value: Estimate | None, kind: NumberFormat) -> str:
    """Return a number, and its interval under it."""
    return "\n".join(text for text in (central(value, kind), interval(value, kind)) if text)


def _number(metric: str, value: MeasuredNumber | None) -> str:
    return ABSENT if value is None else number(value.plain, of_metric(metric))


def _step(metric: str, one: CellDifference) -> str:
    """Return `99.6 % → 99.8 %`, and under it the difference; empty where a side lacks the number."""
    if metric not in one.steps:
        return ""
    values = " → ".join(_number(metric, side[metric]) for side in (one.first, one.second))
    step = one.steps[metric]
    return f"{values}\n{_in_lines(step.estimate(), KINDS['change'] if step.logarithm else _points(metric))}"


def _points(metric: str) -> NumberFormat:
    entry = entry_of(metric)
    return NumberFormat(100.0, "points", 1, sign=True) if entry.unit == "%" else NumberFormat(sign=True)


def _lines(found: Differences, limit: float, is_same_machine: bool) -> list[str]:
    """Return what the table says in sentences, and what a difference may claim."""
    verdicts = Counter(one.verdict for one in found.cells)
    told = ", ".join(f"{word} in {verdicts[word]}" for word in (SLOWER, FASTER, EQUAL, UNKNOWN) if verdicts[word])
    lines = [f"{count(len(found.cells), 'cell')} compared, B against A: {told}."]
    slower = [(one.change.value, one) for one in found.cells if one.is_regression(limit) and one.change is not None]
    size = f" by {number(limit, 'share')} or more" if limit else ""
    if slower:
        _, worst = min(slower, key=lambda pair: pair[0])
        word = "Regression" if is_same_machine else "Slower"
        most = f"{worst.name}, {estimate(worst.change, 'change')}"
        lines.append(f"{word}{size}: {count(len(slower), 'cell')}, most of all {most}.")
    elif verdicts[UNKNOWN] < len(found.cells):
        lines.append(f"No regression was found: no cell of B is seen to be slower{size}.")
        blind = [one.smallest for one in found.cells if one.smallest and one.smallest > limit > 0]
        if blind:
            lines.append(
                f"The limit is below what {count(len(blind), 'cell')} could show (up to {number(max(blind), 'share')}): "
                "a smaller regression there can stay unseen. More repeats show more."
            )
    lines.append(IN_TURN if found.in_turn else f"{NOT_IN_TURN} {ONCE_MORE}" if is_same_machine else NOT_IN_TURN)
    lines += [
        f"{count(cells, 'cell')}: {why}." for why, cells in Counter(one.why for one in found.cells if one.why).items()
    ]
    lines += [f"{one.name}: {one.doubts}." for one in found.cells if one.doubts][:3]
    for letter, names in (("A", found.only_first), ("B", found.only_second)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"Only in {letter}: {'; '.join(names[:3])}{more}.")
    return lines
