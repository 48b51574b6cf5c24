"""`python -m analysis nccl-tests FILE… [--json]`: the tables of nccl-tests, text or JSON, and their notes."""

import argparse
import json

from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.errors import UnreadableInput
from analysis.foreign import read_text
from analysis.nccl_tests.reader import Run, parse_nccl_tests
from analysis.nccl_tests.run import Measured


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="output of nccl-tests 2.0 to 2.19, its -J file or a record.json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print every run. Raises OSError for a file that cannot be read, UnreadableInput for a foreign one."""
    runs: list[tuple[str, Run]] = []
    for file in arguments.files:
        try:
            text = read_text(file)
            runs += [(file, one) for one in parse_nccl_tests(text)]
        except UnreadableInput as error:
            raise UnreadableInput(f"{file}: {error}") from None
    if arguments.json:
        print(json.dumps({"runs": [one.as_json() | {"file": file} for file, one in runs]}))
        return 0
    for file, one in runs:
        _print(one, file)
    return 0


def _figure(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _cells(one: Measured | None, iterations: bool) -> list[str]:
    if one is None:
        return [""] * (7 if iterations else 4)
    time = one.time_us if one.cputime_us is None else one.cputime_us
    wrong = _figure(one.error, ".0e") if one.wrong is None else str(one.wrong)
    more = one.per_iteration or {}
    kept = [_figure(more.get(key)) for key in ("min_us", "max_us", "p99_us")] if iterations else []
    return [_figure(time), _figure(one.algbw), _figure(one.busbw), *kept, wrong]


def _print(one: Run, file: str) -> None:
    """Print one run: what it is, its rows, its notes."""
    ranks = (
        "ranks not said"
        if one.ranks is None
        else f"{one.ranks} {'rank' if one.ranks == 1 else 'ranks'}"
    )
    names = dict.fromkeys(str(device["name"]) for device in one.devices if device.get("name"))
    settings = [f"{name}={value}" for name, value in one.environment.items()]
    said = [one.collective or "collective not said", ranks, *names, *settings]
    said += [f"NCCL {one.nccl_version}"] if one.nccl_version else []
    out = console()
    out.print(
        f"[bold]{escape(f'{file}:{one.line}')}[/bold] {escape(', '.join(said))}", soft_wrap=True
    )
    table = Table()
    placements = [measured for row in one.rows for _, measured in row.placements()]
    iterations = any(measured.per_iteration for measured in placements)
    last = "error" if any(measured.error is not None for measured in placements) else "#wrong"
    time = "CPU time" if any(measured.cputime_us is not None for measured in placements) else "time"
    left = ("bytes", "type", "redop", "root")
    for name in left:
        table.add_column(name, justify="right")
    for name in (time, "algbw", "busbw", *(("min", "max", "p99") if iterations else ()), last) * 2:
        unit = {"algbw": "\nGB/s", "busbw": "\nGB/s", last: ""}.get(name, "\nµs")
        table.add_column(name + unit, justify="right")
    for row in one.rows:
        root = "" if row.root is None else str(row.root)
        figures = [*_cells(row.out_of_place, iterations), *_cells(row.in_place, iterations)]
        table.add_row(str(row.bytes), escape(row.dtype), escape(row.redop or ""), root, *figures)
    out.print(table)
    mean, there = one.mean_busbw, " that are there" if one.rows_missing else ""
    average = "not printed" if one.avg_busbw is None else f"{one.avg_busbw:g} GB/s"
    out.print(
        f"columns: out of place, then in place. avg busbw: {average}; mean of the rows{there}: {_figure(mean, '.4f')} GB/s"
    )
    for title, lines in (("error", one.errors), ("note", one.notes)):
        for line in lines:
            out.print(f"[bold]{title}[/bold] {escape(line)}", soft_wrap=True)
    out.print()
