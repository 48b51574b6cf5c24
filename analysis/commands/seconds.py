"""`python -m analysis seconds STUDY [--json]`: where the wall time of every cell went, and that of the sweep around them."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from analysis.console import SafeConsole, console
from analysis.findings.between_studies import studies_in
from analysis.report.numbers import ABSENT
from analysis.seconds.cell import SECONDS, named_in_order
from analysis.seconds.study import CellCost, StudyCost, cost_of, sweep_parts
from analysis.study.names import run_name, shared_name, short_names
from analysis.study.study import named
from analysis.text import join_words

LEAST_NAME = 16  # characters of a column of names
OF_HEADING = 12  # characters of a line of a heading, unless a word is longer
GAP = 2  # characters between columns
Rows = list[list[str]]
_HELP = """\
A row for each attempt at a cell, in seconds: the parts of its wall time in their order, their sum (total), the seconds inside
windows whose samples count (measured), and total ÷ measured (ratio). Behind the ratio: what the launcher did for the cell
after its end. The last table has what each sweep took around its cells. What is not known is "–", and absent in JSON.
benchmarks/METHOD.md, "What a cell costs", says what each part is."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument(
        "study", metavar="STUDY", type=Path, help="the folder of a study: <output_dir>/<study>"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        UnreadableInput, ValueError, OSError: it is not the folder of one study.
    """
    studies = studies_in(arguments.study)
    if len(studies) > 1:
        names = join_words([study.name for study in studies])
        raise ValueError(
            f"{arguments.study}: holds {len(studies)} studies ({names}); accepted is one of them"
        )
    found = cost_of(studies[0])
    if arguments.json:
        print(json.dumps(found.to_json()))
        return 0
    out = console()
    for benchmark in dict.fromkeys(
        named(one.record, "benchmark") for one in found.cells
    ):  # each has phases of its own
        cells = [one for one in found.cells if named(one.record, "benchmark") == benchmark]
        if shared := shared_name(map(_name, cells)):
            out.print(f"every cell: {escape(shared)}")
        _show(out, _cells(cells))
    if found.sweeps:
        _show(out, _sweeps(found))
    for sentence in found.unreadable:
        out.print(f"note: {escape(sentence)}", soft_wrap=True)
    return 0


def _cells(cells: Sequence[CellCost]) -> Rows:
    """Return the heading and a row for each cell."""
    parts = named_in_order(one.seconds.parts for one in cells)
    beyond = named_in_order(one.beyond for one in cells)
    rows = [["cell", *parts, "total", "measured", "ratio", *beyond]]
    short = short_names(map(_name, cells))
    for one in cells:
        cost = one.seconds
        name = short[_name(one)] + (
            "" if one.record.state == "finished" else f" ({one.record.state})"
        )
        values = [
            *(cost.parts.get(part) for part in parts),
            cost.metrics.get(SECONDS),
            cost.measuring,
            cost.ratio,
        ]
        rows.append([name, *map(_text, [*values, *(one.beyond.get(part) for part in beyond)])])
    return rows


def _name(cell: CellCost) -> str:
    return run_name(cell.record)


def _sweeps(found: StudyCost) -> Rows:
    """Return the heading and a row for each sweep."""
    rows = [["sweep", "cells", *(name for name, _ in sweep_parts(found.sweeps[0])), "total"]]
    for number, sweep in enumerate(found.sweeps, 1):
        parts = [seconds for _, seconds in sweep_parts(sweep)]
        rows.append([str(number), str(len(sweep.begun)), *map(_text, [*parts, sweep.total])])
    return rows


def _show(out: SafeConsole, rows: Rows) -> None:
    """Print rows, the first as heading: as they are, or where the terminal is too narrow with rows and columns exchanged."""
    if _width(rows) <= out.width:
        out.print(_table(rows))
        return
    heading, *others = rows
    while others:
        fitting = len(others)
        while fitting > 1 and _width(_turned(heading, others[:fitting])) > out.width:
            fitting -= 1
        out.print(_table(_turned(heading, others[:fitting])))
        others = others[fitting:]


def _turned(heading: list[str], rows: Rows) -> Rows:
    return [list(column) for column in zip(heading, *rows, strict=True)]


def _lines(heading: str) -> list[str]:
    """Return the lines of a heading; no word is broken."""
    return wrap(heading, OF_HEADING, break_long_words=False)


def _width(rows: Rows) -> int:
    """Return how many characters a table of these rows needs: names are folded, numbers and headings are not."""
    first, *others = zip(*rows, strict=True)
    widths = [max(map(cell_len, [*_lines(head), *texts])) for head, *texts in others]
    return min(LEAST_NAME, max(map(cell_len, first))) + sum(widths) + GAP * (len(widths) + 1)


def _table(rows: Rows) -> Table:
    """Return a table whose first column is of words, and whose others are of numbers."""
    first, *others = rows[0]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    table.add_column(
        escape(first),
        overflow="fold",
        min_width=min(LEAST_NAME, max(cell_len(row[0]) for row in rows)),
    )
    for name in others:
        table.add_column(escape("\n".join(_lines(name))), justify="right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table


def _text(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"
