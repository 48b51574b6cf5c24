"""The commands on NVIDIA's tools: `nccl-log FILE…`, `nccl-tests FILE…` and `p2p FILE`.

`nccl-log` says what NCCL did, `nccl-tests` prints the tables of nccl-tests (text, JSON or a record)
with their notes, `p2p` matrices of GB/s and µs between GPUs.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from analysis.console import SafeConsole, console
from analysis.errors import UnreadableInput
from analysis.native.nccl_tests import read_nccl_tests
from analysis.native.nccl_tests_run import NcclTestsRun, PlacementNumbers
from analysis.native.p2p import Matrices, P2p, read_p2p
from analysis.nccl.log import NcclLog, read_nccl_log
from analysis.topology.model import Topology
from analysis.topology.readers import parse_topology, read_topology

_CHOICES_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that the parser is for."""
    command = parser.prog.split()[-1]
    if command == "p2p":
        parser.add_argument(
            "file",
            metavar="FILE",
            help="output of p2pBandwidthLatencyTest, whole or in part; or a record.json of "
            "benchmark=p2p",
        )
        parser.add_argument(
            "--svg",
            metavar="OUT",
            help="draw heat maps into this SVG file; of several runs, the first one",
        )
        parser.add_argument(
            "--topology",
            metavar="FILE",
            help="topology whose link classes stand in the squares (a record has its own)",
        )
    else:
        text = "one log of all ranks, or one log per rank"
        if command == "nccl-tests":
            text = "output of nccl-tests 2.0 to 2.19, its -J file or a record.json"
        parser.add_argument("files", nargs="+", metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what the files hold. Raises OSError, or UnreadableInput for a foreign file."""
    if arguments.command == "nccl-log":
        log = read_nccl_log(arguments.files)
        if arguments.json:
            print(json.dumps(log.to_json(), indent=2))
        else:
            _print_log(log, console())
    elif arguments.command == "nccl-tests":
        _run_nccl_tests(arguments)
    else:
        _run_p2p(arguments)
    return 0


def _print_notes(out: SafeConsole, title: str, lines: Sequence[str]) -> None:
    for line in lines:
        out.print(f"[bold]{title}[/bold] {escape(line)}", soft_wrap=True)


# --- nccl-log -------------------------------------------------------------------------------------


def _print_log(log: NcclLog, out: SafeConsole) -> None:
    counts = [f"{count} {kind}" for kind, count in log.channels.items() if count is not None]
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
    nics = [f"{name} of {n} rank{'' if n == 1 else 's'}" for name, n in sorted(users.items())]
    settings = ", ".join(f"{name}={value}" for name, value in log.settings.items())
    conflicts = [f"{name}: {' / '.join(values)}" for name, values in log.conflicts.items()]
    multicast = {True: "available", False: "not available", None: ""}[log.multicast]
    facts = Table(title="NCCL log", title_justify="left", show_header=False, box=None)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in (
        ("version", log.version or "not said"),
        ("ranks", "not said" if log.nranks is None else str(log.nranks)),
        ("GPU of rank", ", ".join(gpus)),
        ("channels", channels),
        ("settings", settings or "none announced"),
        ("several values", ", ".join(conflicts)),
        ("network", log.network or ""),
        ("network devices", ", ".join(nics)),
        ("hosts", str(log.nodes) if (log.nodes or 1) > 1 else ""),
        ("NVLS multicast", multicast),
    ):
        if text:
            facts.add_row(name, escape(text))
    out.print(facts)
    _print_transports(log, out)
    _print_choices(log, out)
    _print_notes(out, "warning", log.warnings)
    _print_notes(out, "error", log.errors)
    _print_notes(out, "note", log.notes)


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
    table = Table(title="choices", title_justify="left")
    for heading in ("function", "bytes", "algorithm", "protocol", "channels", "calls"):
        is_text = heading in ("function", "algorithm", "protocol")
        table.add_column(heading, justify="left" if is_text else "right")
    for choice in log.algorithms[:_CHOICES_SHOWN]:
        channels = "?" if choice.channels is None else str(choice.channels)
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
    ranks = "ranks not said"
    if nccl_run.ranks is not None:
        ranks = f"{nccl_run.ranks} {'rank' if nccl_run.ranks == 1 else 'ranks'}"
    facts = [nccl_run.collective or "collective not said", ranks]
    facts += dict.fromkeys(str(gpu["name"]) for gpu in nccl_run.devices if gpu.get("name"))
    facts += [f"{name}={value}" for name, value in nccl_run.environment.items()]
    if nccl_run.nccl_version:
        facts.append(f"NCCL {nccl_run.nccl_version}")
    where = escape(f"{file}:{nccl_run.line}")
    out.print(f"[bold]{where}[/bold] {escape(', '.join(facts))}", soft_wrap=True)
    placements = [numbers for row in nccl_run.rows for numbers in row.placements()]
    has_iterations = any(numbers.per_iteration for numbers in placements)
    has_errors = any(numbers.error is not None for numbers in placements)
    is_cpu_time = any(numbers.cputime_us is not None for numbers in placements)
    headings = ["CPU time\nµs" if is_cpu_time else "time\nµs", "algbw\nGB/s", "busbw\nGB/s"]
    if has_iterations:
        headings += ["min\nµs", "max\nµs", "p99\nµs"]
    headings.append("error" if has_errors else "#wrong")
    table = Table()
    for heading in ("bytes", "type", "redop", "root", *headings, *headings):
        table.add_column(heading, justify="right")
    for row in nccl_run.rows:
        root = "" if row.root is None else str(row.root)
        cells = [str(row.bytes), escape(row.dtype), escape(row.redop or ""), root]
        for numbers in (row.out_of_place, row.in_place):
            cells += _placement_cells(numbers, has_iterations)
        table.add_row(*cells)
    out.print(table)
    average = "not printed" if nccl_run.avg_busbw is None else f"{nccl_run.avg_busbw:g} GB/s"
    present = " that are there" if nccl_run.rows_missing else ""
    mean = _figure(nccl_run.mean_busbw, ".4f")
    out.print(
        f"columns: out of place, then in place. avg busbw: {average}; mean of the rows{present}: "
        f"{mean} GB/s"
    )
    _print_notes(out, "error", nccl_run.errors)
    _print_notes(out, "note", nccl_run.notes)
    out.print()


def _placement_cells(numbers: PlacementNumbers | None, has_iterations: bool) -> list[str]:
    if numbers is None:
        return [""] * (7 if has_iterations else 4)
    time_us = numbers.time_us if numbers.cputime_us is None else numbers.cputime_us
    cells = [_figure(time_us), _figure(numbers.algbw), _figure(numbers.busbw)]
    if has_iterations:
        iterations = numbers.per_iteration or {}
        cells += [_figure(iterations.get(key)) for key in ("min_us", "max_us", "p99_us")]
    wrong = _figure(numbers.error, ".0e") if numbers.wrong is None else str(numbers.wrong)
    return [*cells, wrong]


def _figure(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


# --- p2p ------------------------------------------------------------------------------------------


def _run_p2p(arguments: argparse.Namespace) -> None:
    """Print the matrices.

    If the file holds several runs, the JSON object is the first and `repeats` holds the others. For
    a record it holds the medians, and `repeats` every repeat.
    """
    p2p = read_p2p(arguments.file)
    first = p2p.runs[0]
    if arguments.svg:
        from analysis.native.heat_map import draw_heat_maps

        topology = _topology_of(p2p, arguments.topology)
        draw_heat_maps(first, topology, Path(arguments.svg), p2p.title, p2p.words)
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


def _topology_of(p2p: P2p, file: str | None) -> Topology | None:
    """Return the topology of a file, else the record's own.

    None if that cannot be read: the drawing works without it.
    """
    if file is not None:
        return read_topology(file)
    if p2p.topology is None:
        return None
    try:
        return parse_topology(p2p.topology)
    except UnreadableInput:
        return None


def _print_matrices(matrices: Matrices, prefix: str, access: str, out: SafeConsole) -> None:
    """Print the devices, the pairs without `access`, the matrices and the notes."""
    for gpu, device in sorted(matrices.devices.items()):
        out.print(f"GPU {gpu}: {escape(device['name'])}, bus id {device['bus_id']}")
    if matrices.access:
        refused = {(min(a, b), max(a, b)) for (a, b), can in matrices.access.items() if not can}
        pairs = ", ".join(f"{a}-{b}" for a, b in sorted(refused))
        line = f"no {access}: {pairs}" if refused else f"every pair has {access}"
        out.print(escape(line), soft_wrap=True)
    for name, columns in matrices.ids.items():
        unit = "µs" if name.startswith("latency") else "GB/s"
        # A table's own title is cut to its width.
        out.print(f"[italic]{prefix}{name}, {unit}[/italic]", soft_wrap=True)
        table = Table()
        for heading in ("", *map(str, columns)):
            table.add_column(heading, justify="right")
        for row in columns:
            values = [matrices.entries[name].get((row, column)) for column in columns]
            if any(value is not None for value in values):
                table.add_row(str(row), *map(_figure, values))
        out.print(table)
    _print_notes(out, "note", matrices.notes)
