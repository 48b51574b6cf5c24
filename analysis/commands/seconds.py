"""`python -m analysis seconds STUDY [--json]`: where the wall time of every cell went, and that of the sweep around them."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.findings.across.sides import studies_in
from analysis.findings.runs import named
from analysis.report.names import run_name
from analysis.report.numbers import ABSENT
from analysis.report.text import join_words
from analysis.seconds.cell import named_in_order
from analysis.seconds.study import CellCost, StudyCost, cost_of, sweep_parts

LEAST_NAME = 16  # characters of a column of names
_HELP = """\
A row for each attempt at a cell, in seconds: the parts of its wall time in their order, their sum (total), the seconds inside
windows whose samples count (measured), and total ÷ measured (ratio). Behind the ratio: what the launcher did for the cell
after its end. The last table has what each sweep took around its cells. What is not known is "–", and absent in JSON.
benchmarks/METHOD.md, "What a cell costs", says what each part is."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument("study", metavar="STUDY", type=Path, help="the folder of a study: <output_dir>/<study>")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        UnreadableInput, ValueError, OSError: it is not the folder of one study.
    """
    studies = studies_in(arguments.study)
    if len(studies) > 1:
        names = join_words([study.name for study in studies])
        raise ValueError(f"{arguments.study}: holds {len(studies)} studies ({names}); give one of them")
    found = cost_of(studies[0])
    if arguments.json:
        print(json.dumps(found.to_json()))
        return 0
    out = console()
    for benchmark in dict.fromkeys(named(one.record, "benchmark") for one in found.cells):  # each has phases of its own
        out.print(_cells([one for one in found.cells if named(one.record, "benchmark") == benchmark]))
    if found.sweeps:
        out.print(_sweeps(found))
    for sentence in found.unreadable:
        out.print(f"note: {escape(sentence)}", soft_wrap=True)
    return 0


def _cells(cells: Sequence[CellCost]) -> Table:
    """Return the table of cells."""
    parts = named_in_order(one.seconds.parts for one in cells)
    beyond = named_in_order(one.beyond for one in cells)
    table = _table("cell", [*parts, "total", "measured", "ratio", *beyond])
    for one in cells:
        cost = one.seconds
        values = [*(cost.parts.get(part) for part in parts), cost.total, cost.measuring]
        ratio = ABSENT if cost.ratio is None else f"{cost.ratio:.2f}"
        state = "" if one.record.state == "finished" else f" ({one.record.state})"
        after = (_text(one.beyond.get(part)) for part in beyond)
        table.add_row(escape(run_name(one.record) + state), *map(_text, values), ratio, *after)
    return table


def _sweeps(found: StudyCost) -> Table:
    """Return the table of sweeps."""
    names = [name for name, _ in sweep_parts(found.sweeps[0])]
    table = _table("sweep", ["cells", *names, "total"])
    for number, sweep in enumerate(found.sweeps, 1):
        parts = [_text(seconds) for _, seconds in sweep_parts(sweep)]
        table.add_row(str(number), str(len(sweep.begun)), *parts, _text(sweep.total))
    return table


def _table(first: str, others: Iterable[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=LEAST_NAME)
    for name in others:
        table.add_column(escape(name), justify="right", overflow="fold")
    return table


def _text(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds:.2f}"
