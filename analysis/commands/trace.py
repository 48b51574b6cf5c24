"""`python -m analysis trace A [B]`: where communication time goes in a trace, or what changed between two."""

import argparse
import json
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from analysis.console import SafeConsole, console
from analysis.trace.difference import Change, TraceDifference, compare_traces
from analysis.trace.model import Trace
from analysis.trace.source import load_trace
from analysis.trace.steps import within_steps
from analysis.trace.summary import TraceSummary, summarize
from benchmarks.record.safe_files import write_named

_RANK_HEADINGS: tuple[str, ...] = (
    "communication ms",
    "exposed ms",
    "overlapped ms",
    "wait ms",
    "compute ms",
    "idle %",
)
_RANK_HEADINGS += ("gap µs", "step ms", "exposed ms/step", "… in gaps")
_MEETING_HEADINGS = ("wait ms", "transfer ms", "average transfer µs", "median transfer µs")
_HELP = """\
TRACE is one run, as one of these (all may end in .gz):
  an SQLite export of Nsight Systems (.sqlite), with every rank of the node
  a .nsys-rep, if nsys is on PATH or named by the variable NSYS
  a JSON file of torch.profiler (one rank), or a folder with one such file for each rank
  files joined by commas: rank0.json,rank1.json

With one TRACE its numbers are printed, with two the changes from the first to the second, with ratios.

Communication  kernels of NCCL and copies between GPUs; without NCCL, calls of gloo
Exposed        communication while no other kernel ran on that GPU
Wait           from a rank's start of a collective until the last rank has started it
Transfer       the time of the rank that took least"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument(
        "a", metavar="TRACE", help="file, folder with one file per rank, or FILE,FILE,…"
    )
    parser.add_argument(
        "b", metavar="TRACE", nargs="?", help="a second trace, to compare with the first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--within-steps",
        action="store_true",
        help="count only what belongs to a step, as a record does",
    )
    parser.add_argument("--svg", metavar="OUT", type=Path, help="draw one step into this SVG file")
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="number of the step to draw, from 0 (default: one of median time)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers, and draw if asked. Raises OSError or UnreadableInput for a trace that cannot be read."""
    if arguments.b is not None and arguments.svg is not None:
        raise ValueError("--svg needs one trace; give one TRACE")
    if arguments.step is not None and arguments.svg is None:
        raise ValueError("--step chooses the step to draw: give --svg too")
    trace = _load(arguments.a, arguments)
    summary = summarize(trace)
    if arguments.b is not None:
        return _compare(arguments, summary)
    if arguments.svg is not None:
        from analysis.trace.drawing.timeline import draw_timeline
        from analysis.trace.steps import choose_window

        drawing = draw_timeline(trace, choose_window(trace, arguments.step))
        write_named(arguments.svg, drawing.encode())
    if arguments.json:
        print(json.dumps(summary.as_json()))
        return 0
    out = console()
    _print(summary, out)
    if arguments.svg is not None:
        out.print(f"drawn: {escape(str(arguments.svg))}", soft_wrap=True)
    return 0


def _load(source: str, arguments: argparse.Namespace) -> Trace:
    trace = load_trace(source)
    return within_steps(trace) if arguments.within_steps else trace


def _compare(arguments: argparse.Namespace, first: TraceSummary) -> int:
    second = summarize(_load(arguments.b, arguments))
    comparison = compare_traces(first, second)
    if arguments.json:
        print(json.dumps({"a": first.as_json(), "b": second.as_json()} | comparison.as_json()))
        return 0
    out = console()
    out.print(f"A: {escape(arguments.a)} ({escape(first.source)})", soft_wrap=True)
    out.print(f"B: {escape(arguments.b)} ({escape(second.source)})", soft_wrap=True)
    _print_changes(comparison, out)
    for name, summary in (("A", first), ("B", second)):
        _print_stragglers(summary, out, f"{name}: ")
    for note in [
        *comparison.notes,
        *(f"A: {one}" for one in first.notes),
        *(f"B: {one}" for one in second.notes),
    ]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    return 0


def _print(summary: TraceSummary, out: SafeConsole) -> None:
    ranks = _table(f"ranks ({summary.source})", "rank", "ran on", *_RANK_HEADINGS)
    calls = _table(
        "collectives per rank", "rank", "collective", "calls", "average µs", "median µs", "total ms"
    )
    copies = _table(
        "copies per rank", "rank", "copies", "calls", "bytes", "total ms", "GB/s", "exposed ms"
    )
    for one in summary.ranks:
        idle = None if one.gpu_idle_share is None else 100 * one.gpu_idle_share
        steps = one.steps
        per_step = (
            (steps.median_ms, steps.exposed_ms, steps.exposed_in_gaps_ms)
            if steps
            else (None, None, None)
        )
        times = _numbers(
            3, one.comm_ms, one.exposed_ms, one.overlapped_ms, one.wait_ms, one.compute_ms
        )
        device = "the host" if one.device is None else f"GPU {one.device}"
        ranks.add_row(
            str(one.rank),
            device,
            *times,
            _number(idle, 1),
            _number(one.gap_us, 2),
            *_numbers(3, *per_step),
        )
        for call in one.nccl:
            typical = _numbers(1, call.avg_us, call.median_us)
            calls.add_row(
                str(one.rank), call.name, str(call.calls), *typical, _number(call.total_ms, 3)
            )
        for copy in one.memcpy:
            size = "?" if copy.bytes is None else str(copy.bytes)
            speed = (
                _number(copy.total_ms, 3),
                _number(copy.gb_per_s, 1),
                _number(copy.exposed_ms, 3),
            )
            copies.add_row(str(one.rank), escape(copy.kind), str(copy.calls), size, *speed)
    across = _table(
        "across ranks (wait: average over ranks)", "collective", "matched", *_MEETING_HEADINGS
    )
    for meeting in summary.collectives:
        spent = _numbers(3, meeting.wait_ms, meeting.transfer_ms)
        typical = _numbers(1, meeting.transfer_avg_us, meeting.transfer_median_us)
        across.add_row(
            escape(_title(meeting.name, meeting.communicator)),
            str(meeting.matched),
            *spent,
            *typical,
        )
    for table in (ranks, calls, across, copies):
        if table.row_count:
            out.print(table)
    _print_stragglers(summary, out)
    for note in summary.notes:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)


def _print_stragglers(summary: TraceSummary, out: SafeConsole, prefix: str = "") -> None:
    for one in summary.stragglers:
        out.print(
            f"{prefix}rank {one.rank} came last in {one.last} of {one.of} collectives: "
            f"the others waited {one.others_waited_ms:.3f} ms for it",
            soft_wrap=True,
        )


def _print_changes(comparison: TraceDifference, out: SafeConsole) -> None:
    """Print a line per quantity of each rank, and a line per collective, per rank and across ranks."""
    ranks = _table("ranks", "rank", "quantity", "A", "B", "B / A")
    for one in comparison.changes:
        if one.collective is None:
            ranks.add_row(
                str(one.rank), one.quantity, *_numbers(3, one.a, one.b), _number(one.ratio, 2)
            )
    calls = _table(
        "collectives per rank", "rank", "collective", "calls A", "calls B", *_pair("average µs")
    )
    met = _table(
        "across ranks", "collective", *_pair("average wait µs"), *_pair("average transfer µs")
    )
    for rank, name, group in dict.fromkeys(
        (one.rank, one.collective, one.communicator) for one in comparison.changes
    ):
        if name is None:
            continue
        found = {one.quantity: one for one in comparison.of(rank, name, group)}
        cells = [_cells(found.get(what)) for what in ("avg_us", "wait_avg_us", "transfer_avg_us")]
        if rank is None:
            met.add_row(escape(_title(name, group)), *cells[1], *cells[2])
        else:
            calls.add_row(
                str(rank), name, *_numbers(0, found["calls"].a, found["calls"].b), *cells[0]
            )
    for table in (ranks, calls, met):
        if table.row_count:
            out.print(table)


def _pair(heading: str) -> tuple[str, str, str]:
    return f"{heading} A", "B", "B / A"


def _cells(change: Change | None) -> list[str]:
    return (
        ["?", "?", "?"]
        if change is None
        else [*_numbers(1, change.a, change.b), _number(change.ratio, 2)]
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for heading in headings:
        text = heading in ("collective", "copies", "quantity", "rank", "ran on")
        table.add_column(heading, justify="left" if text else "right")
    return table


def _title(name: str, communicator: str | None) -> str:
    return name if communicator is None else f"{name} ({communicator})"


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _numbers(digits: int, *values: float | None) -> list[str]:
    return [_number(value, digits) for value in values]
