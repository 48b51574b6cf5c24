"""The commands on files of other tools: `nccl-log`, `nccl-tests`, `p2p` and `trace`.

`nccl-log FILE…` says what NCCL did, `nccl-tests FILE…` prints the tables of nccl-tests (text or a
record) with their notes, `p2p FILE` matrices of GB/s and µs between GPUs, `trace TRACE` where
communication time goes in a trace.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from analysis.console import SafeConsole, console, table_of_texts
from analysis.native.nccl_tests import NcclTestsRun, read_nccl_tests
from analysis.native.p2p import Matrices, read_p2p
from analysis.nccl.log import NcclLog, read_nccl_log
from analysis.text import count
from benchmarks.record.safe_files import write_named

if TYPE_CHECKING:  # numpy takes a tenth of a second
    from analysis.trace.summary import TraceSummary

_CHOICES_SHOWN = 20
_FILES = {
    "nccl-log": "one log of all ranks, or one log per rank",
    "nccl-tests": "output of nccl-tests 2.0 to 2.19, or a record.json of benchmark=collectives",
}
_TIMES_MS = ("comm_ms", "exposed_ms", "overlapped_ms", "wait_ms", "compute_ms")
_RANK_COLUMNS = (
    *("rank", "ran on", "communication ms", "exposed ms", "overlapped ms", "wait ms"),
    *("compute ms", "idle %", "gap µs", "step ms", "exposed ms/step", "… in gaps"),
)
_TRACE_HELP = """\
TRACE is one run, as one of these (all may end in .gz):
  an SQLite export of Nsight Systems (.sqlite), with every rank of the node
  a .nsys-rep, if nsys is on PATH or named by the variable NSYS
  a JSON file of torch.profiler (one rank), or a folder with one such file for each rank
  files joined by commas: rank0.json,rank1.json

Communication  kernels of NCCL and copies between GPUs; without NCCL, calls of gloo
Exposed        communication while no other kernel ran on that GPU
Wait           from a rank's start of a collective until the last rank has started it
Transfer       the time of the rank that took least"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that the parser is for."""
    command = parser.prog.split()[-1]
    if command == "trace":
        _configure_trace(parser)
    elif command == "p2p":
        parser.add_argument(
            "file",
            metavar="FILE",
            help="output of p2pBandwidthLatencyTest, whole or in part; or a record.json of "
            "benchmark=p2p",
        )
    else:
        parser.add_argument("files", nargs="+", metavar="FILE", help=_FILES[command])


def _configure_trace(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _TRACE_HELP
    parser.add_argument(
        "trace", metavar="TRACE", help="file, folder with one file per rank, or FILE,FILE,…"
    )
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
    """Print what the files hold.

    Raises:
        OSError: a file cannot be opened.
        UnreadableInput: a file is foreign or damaged.
        ValueError: the options contradict each other.
    """
    commands = {
        "nccl-log": _run_nccl_log,
        "nccl-tests": _run_nccl_tests,
        "p2p": _run_p2p,
        "trace": _run_trace,
    }
    commands[arguments.command](arguments)
    return 0


def _print_notes(out: SafeConsole, title: str, lines: Sequence[str]) -> None:
    for line in lines:
        out.print(f"[bold]{title}[/bold] {escape(line)}", soft_wrap=True)


def _figure(value: float | None, form: str = ".2f", absent: str = "") -> str:
    return absent if value is None else format(value, form)


# --- nccl-log -------------------------------------------------------------------------------------


def _run_nccl_log(arguments: argparse.Namespace) -> None:
    log = read_nccl_log(arguments.files)
    if arguments.json:
        print(json.dumps(log.to_json(), indent=2))
        return
    out = console()
    _print_facts(log, out)
    _print_transports(log, out)
    _print_choices(log, out)
    _print_notes(out, "warning", log.warnings)
    _print_notes(out, "error", log.errors)
    _print_notes(out, "note", log.notes)


def _print_facts(log: NcclLog, out: SafeConsole) -> None:
    counts = [f"{number} {kind}" for kind, number in log.channels.items() if number is not None]
    channels = ", ".join(counts) or "not said"
    if log.channels_from == "rings":
        channels += " (from the rings)"
    gpus = []
    for rank, device in log.communicators[0].devices.items():
        if device.nvml is not None:
            gpus.append(f"{rank}: {device.nvml}")
        elif device.bus_id is not None:
            gpus.append(f"{rank}: bus {device.bus_id}")
    users = Counter(name for names in log.nics.values() for name in names)
    nics = [f"{name} of {count(ranks, 'rank')}" for name, ranks in sorted(users.items())]
    settings = [f"{name}={value}" for name, value in log.settings.items()]
    conflicts = [f"{name}: {' / '.join(values)}" for name, values in log.conflicts.items()]
    multicast = {True: "available", False: "not available", None: ""}
    hosts = str(log.nodes) if log.nodes is not None and log.nodes > 1 else ""
    facts = Table(title="NCCL log", title_justify="left", show_header=False, box=None)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in (
        ("version", log.version or "not said"),
        ("ranks", _figure(log.nranks, "d", "not said")),
        ("GPU of rank", ", ".join(gpus)),
        ("channels", channels),
        ("settings", ", ".join(settings) or "none announced"),
        ("several values", ", ".join(conflicts)),
        ("network", log.network or ""),
        ("network devices", ", ".join(nics)),
        ("hosts", hosts),
        ("NVLS multicast", multicast[log.multicast]),
    ):
        if text:
            facts.add_row(name, escape(text))
    out.print(facts)


def _print_transports(log: NcclLog, out: SafeConsole) -> None:
    if not log.transports:
        out.print("The log has no connection: they appear at the first collective.")
        return
    pairs: dict[str, list[str]] = {}
    for pair, words in log.transports.items():
        pairs.setdefault(" + ".join(words), []).append(pair)
    table = Table(title="transports (rank->rank)", title_justify="left")
    table.add_column("transport", no_wrap=True)
    table.add_column("connections", justify="right")
    table.add_column("between", overflow="fold")
    for transport in sorted(pairs):
        connections = pairs[transport]
        table.add_row(escape(transport), str(len(connections)), ", ".join(connections))
    out.print(table)


def _print_choices(log: NcclLog, out: SafeConsole) -> None:
    if not log.algorithms:
        return
    headings = ("function", "bytes", "algorithm", "protocol", "channels", "calls")
    table = table_of_texts("choices", headings, left=("function", "algorithm", "protocol"))
    for choice in log.algorithms[:_CHOICES_SHOWN]:
        channels = _figure(choice.channels, "d", "?")
        words = (choice.function or "", str(choice.size), choice.algorithm, choice.protocol)
        table.add_row(*map(escape, words), channels, str(choice.calls))
    out.print(table)
    if len(log.algorithms) > _CHOICES_SHOWN:
        out.print(f"… {len(log.algorithms) - _CHOICES_SHOWN} more (--json has all)")


# --- nccl-tests -----------------------------------------------------------------------------------


def _run_nccl_tests(arguments: argparse.Namespace) -> None:
    runs = []
    for file in arguments.files:
        for nccl_run in read_nccl_tests(file):
            runs.append((file, nccl_run))
    if arguments.json:
        content = [nccl_run.to_json() | {"file": file} for file, nccl_run in runs]
        print(json.dumps({"runs": content}))
        return
    for file, nccl_run in runs:
        _print_nccl_tests(nccl_run, file, console())


def _print_nccl_tests(nccl_run: NcclTestsRun, file: str, out: SafeConsole) -> None:
    """Print one run: what it is, its rows, its notes."""
    facts = [nccl_run.collective or "collective not said"]
    facts.append("ranks not said" if nccl_run.ranks is None else count(nccl_run.ranks, "rank"))
    facts += dict.fromkeys(str(gpu["name"]) for gpu in nccl_run.devices if gpu.get("name"))
    facts += [f"{name}={value}" for name, value in nccl_run.environment.items()]
    if nccl_run.nccl_version:
        facts.append(f"NCCL {nccl_run.nccl_version}")
    where = escape(f"{file}:{nccl_run.line}")
    out.print(f"[bold]{where}[/bold] {escape(', '.join(facts))}", soft_wrap=True)
    placements = nccl_run.placements()
    has_iterations = any(numbers.get("per_iteration") for numbers in placements)
    has_errors = any(numbers["error"] is not None for numbers in placements)
    headings = ["time\nµs", "algbw\nGB/s", "busbw\nGB/s"]
    if has_iterations:
        headings += ["min\nµs", "max\nµs", "p99\nµs"]
    headings.append("error" if has_errors else "#wrong")
    table = table_of_texts(None, ("bytes", "type", "redop", "root", *headings, *headings))
    for row in nccl_run.rows:
        root = _figure(row["root"], "d")
        cells = [str(row["bytes"]), escape(row["dtype"]), escape(row["redop"] or ""), root]
        for placement in ("out_of_place", "in_place"):
            cells += _placement_cells(row[placement], has_iterations)
        table.add_row(*cells)
    out.print(table)
    average = "not printed"
    if nccl_run.avg_busbw is not None:
        average = f"{nccl_run.avg_busbw:g} GB/s"
    present = " that are there" if nccl_run.rows_missing else ""
    mean = _figure(nccl_run.mean_busbw, ".4f")
    out.print(
        f"columns: out of place, then in place. avg busbw: {average}; mean of the rows{present}: "
        f"{mean} GB/s"
    )
    _print_notes(out, "error", nccl_run.errors)
    _print_notes(out, "note", nccl_run.notes)
    out.print()


def _placement_cells(numbers: dict[str, Any] | None, has_iterations: bool) -> list[str]:
    if numbers is None:
        return [""] * (7 if has_iterations else 4)
    cells = [_figure(numbers[key]) for key in ("time_us", "algbw", "busbw")]
    if has_iterations:
        iterations = numbers.get("per_iteration") or {}
        cells += [_figure(iterations.get(key)) for key in ("min_us", "max_us", "p99_us")]
    if numbers["wrong"] is None:
        return [*cells, _figure(numbers["error"], ".0e")]
    return [*cells, str(numbers["wrong"])]


# --- p2p ------------------------------------------------------------------------------------------


def _run_p2p(arguments: argparse.Namespace) -> None:
    """Print the matrices.

    If the file holds several runs, the JSON object is the first and `repeats` holds the others. For
    a record it holds the medians, and `repeats` every repeat.
    """
    p2p = read_p2p(arguments.file)
    first = p2p.runs[0]
    if arguments.json:
        content: dict[str, Any] = first.to_json()
        repeats = p2p.repeats if p2p.words else p2p.runs[1:]
        if repeats:
            content["repeats"] = [matrices.to_json() for matrices in repeats]
        print(json.dumps(content))
        return
    words = p2p.words or {}
    for state, meaning in words.items():
        console().print(f"P2P {state}: {escape(meaning)}", soft_wrap=True)
    for number, matrices in enumerate(p2p.runs, 1):
        prefix = f"run {number} of {len(p2p.runs)}: " if len(p2p.runs) > 1 else ""
        _print_matrices(matrices, prefix, words.get("enabled", "peer access"), console())


def _print_matrices(matrices: Matrices, prefix: str, access: str, out: SafeConsole) -> None:
    """Print the devices, the pairs without `access`, the matrices and the notes."""
    for gpu, device in sorted(matrices.devices.items()):
        out.print(f"GPU {gpu}: {escape(device['name'])}, bus id {device['bus_id']}")
    if matrices.access:
        refused = {(min(a, b), max(a, b)) for (a, b), can in matrices.access.items() if not can}
        line = f"every pair has {access}"
        if refused:
            line = f"no {access}: {', '.join(f'{a}-{b}' for a, b in sorted(refused))}"
        out.print(escape(line), soft_wrap=True)
    for name, columns in matrices.ids.items():
        unit = "µs" if name.startswith("latency") else "GB/s"
        # A table's own title is cut to its width.
        out.print(f"[italic]{prefix}{name}, {unit}[/italic]", soft_wrap=True)
        table = table_of_texts(None, ("", *map(str, columns)))
        for row in columns:
            values = [matrices.entries[name].get((row, column)) for column in columns]
            if any(value is not None for value in values):
                table.add_row(str(row), *map(_figure, values))
        out.print(table)
    _print_notes(out, "note", matrices.notes)


# --- trace ----------------------------------------------------------------------------------------


def _run_trace(arguments: argparse.Namespace) -> None:
    """Print the numbers of a trace, and draw a step if asked."""
    from analysis.trace.source import read_trace
    from analysis.trace.steps import within_steps
    from analysis.trace.summary import summarize
    from analysis.trace.timeline import draw_timeline

    if arguments.step is not None and arguments.svg is None:
        raise ValueError("--step chooses the step to draw: give --svg too")
    trace = read_trace(arguments.trace)
    if arguments.within_steps:
        trace = within_steps(trace)
    if arguments.svg is not None:
        write_named(arguments.svg, draw_timeline(trace, arguments.step).encode())
    summary = summarize(trace)
    if arguments.json:
        print(json.dumps(summary.to_json()))
        return
    out = console()
    _print_trace(summary, out)
    for row in summary.stragglers:
        out.print(
            f"rank {row['rank']} came last in {row['last']} of {row['of']} collectives: the others "
            f"waited {row['others_waited_ms']:.3f} ms for it",
            soft_wrap=True,
        )
    _print_notes(out, "note", summary.notes)
    if arguments.svg is not None:
        out.print(f"drawn: {escape(str(arguments.svg))}", soft_wrap=True)


def _print_trace(summary: "TraceSummary", out: SafeConsole) -> None:
    """Print a table of ranks, of the collectives of each and across them, and of copies."""
    ranks = table_of_texts(f"ranks ({summary.source})", _RANK_COLUMNS, left=("rank", "ran on"))
    headings = ["rank", "collective", "calls", "average µs", "median µs", "total ms"]
    calls = table_of_texts("collectives per rank", headings, left=("rank", "collective"))
    headings = ["rank", "copies", "calls", "bytes", "total ms", "GB/s", "exposed ms"]
    copies = table_of_texts("copies per rank", headings, left=("rank", "copies"))
    headings = ["collective", "matched", "wait ms", "transfer ms"]
    headings += ["average transfer µs", "median transfer µs"]
    across = table_of_texts(
        "across ranks (wait: average over ranks)", headings, left=("collective",)
    )
    for rank in summary.ranks:
        cells = [str(rank.rank), "the host" if rank.device is None else f"GPU {rank.device}"]
        for quantity in _TIMES_MS:
            cells.append(_figure(getattr(rank, quantity), ".3f", "?"))
        cells += [_figure(rank.gpu_idle_share, ".1%", "?").rstrip("%")]
        cells += [_figure(rank.gap_us, ".2f", "?")]
        for quantity in ("median_ms", "exposed_ms", "exposed_in_gaps_ms"):
            cells.append(_figure(getattr(rank.steps, quantity, None), ".3f", "?"))
        ranks.add_row(*cells)
        for row in rank.nccl:
            cells = [f"{row['avg_us']:.1f}", f"{row['median_us']:.1f}", f"{row['total_ms']:.3f}"]
            calls.add_row(str(rank.rank), row["name"], str(row["calls"]), *cells)
        for row in rank.memcpy:
            copies.add_row(
                str(rank.rank),
                escape(row["kind"]),
                str(row["calls"]),
                _figure(row["bytes"], "d", "?"),
                f"{row['total_ms']:.3f}",
                _figure(row["gb_per_s"], ".1f", "?"),
                f"{row['exposed_ms']:.3f}",
            )
    for row in summary.collectives:
        name = row["name"]
        if row["communicator"] is not None:
            name += f" ({row['communicator']})"
        across.add_row(
            escape(name),
            str(row["matched"]),
            f"{row['wait_ms']:.3f}",
            f"{row['transfer_ms']:.3f}",
            f"{row['transfer_avg_us']:.1f}",
            f"{row['transfer_median_us']:.1f}",
        )
    for table in (ranks, calls, across, copies):
        if table.row_count:
            out.print(table)
