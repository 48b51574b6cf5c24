"""The commands on files of other tools: `nccl-log`, `nccl-tests`, `p2p` and `trace`."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.commands.terminal_tables import print_table
from analysis.console import console, print_text
from analysis.native.nccl_tests import read_nccl_tests
from analysis.native.p2p import read_p2p
from analysis.nccl.log import NcclLog, read_nccl_log
from analysis.report.numbers import NumberFormat
from analysis.report.table import Column, Table
from analysis.text import count
from analysis.topology.drawing import write_drawing

CHOICES_SHOWN = 20
FILES = {
    "nccl-log": "one log of all ranks, or one log per rank",
    "nccl-tests": "output of nccl-tests 2.0 to 2.19",
    "p2p": "output of p2pBandwidthLatencyTest, whole or in part",
}
COUNT = NumberFormat(decimals=0)
ONE, TWO, THREE = NumberFormat(decimals=1), NumberFormat(decimals=2), NumberFormat(decimals=3)
FACTS = (Column("fact", ""), Column("text", ""))
TRANSPORTS = (
    Column("transport", "transport"),
    Column("connections", "connections", kind=COUNT),
    Column("between", "between"),
)
CHOICES = (
    Column("function", "function", "function"),
    Column("bytes", "bytes", "size", COUNT),
    Column("algorithm", "algorithm", "algorithm"),
    Column("protocol", "protocol", "protocol"),
    Column("channels", "channels", "channels", COUNT),
    Column("calls", "calls", "calls", COUNT),
)
NCCL_TESTS = (
    Column("bytes", "bytes", kind=COUNT),
    Column("dtype", "type"),
    Column("redop", "redop"),
    Column("root", "root"),
    Column("out_of_place time_us", "time\nµs", kind=TWO),
    Column("out_of_place algbw", "algbw\nGB/s", kind=TWO),
    Column("out_of_place busbw", "busbw\nGB/s", kind=TWO),
    Column("out_of_place wrong", "#wrong", kind=COUNT),
    Column("out_of_place error", "error"),
    Column("in_place time_us", "in place\ntime\nµs", kind=TWO),
    Column("in_place algbw", "in place\nalgbw\nGB/s", kind=TWO),
    Column("in_place busbw", "in place\nbusbw\nGB/s", kind=TWO),
    Column("in_place wrong", "in place\n#wrong", kind=COUNT),
    Column("in_place error", "in place\nerror"),
)
# Of the rows of a trace; a quantity that is not known is "–".
RANKS = (
    Column("rank", "rank"),
    Column("ran_on", "ran on"),
    Column("comm_ms", "communication ms", kind=THREE),
    Column("exposed_ms", "exposed ms", kind=THREE),
    Column("overlapped_ms", "overlapped ms", kind=THREE),
    Column("wait_ms", "wait ms", kind=THREE),
    Column("compute_ms", "compute ms", kind=THREE),
    Column("gpu_idle_share", "idle", kind=NumberFormat(100.0, "%", 1)),
    Column("gap_us", "gap µs", kind=TWO),
    Column("step_median_ms", "host step ms", kind=THREE),
    Column("step_exposed_ms", "exposed ms/step", kind=THREE),
    Column("step_exposed_in_gaps_ms", "… in gaps", kind=THREE),
)
COLLECTIVES = (
    Column("rank", "rank"),
    Column("name", "collective"),
    Column("calls", "calls", kind=COUNT),
    Column("avg_us", "average µs", kind=ONE),
    Column("median_us", "median µs", kind=ONE),
    Column("total_ms", "total ms", kind=THREE),
)
ACROSS_RANKS = (
    Column("name", "collective"),
    Column("matched", "matched", kind=COUNT),
    Column("wait_ms", "wait ms", kind=THREE),
    Column("transfer_ms", "transfer ms", kind=THREE),
    Column("transfer_avg_us", "average transfer µs", kind=ONE),
    Column("transfer_median_us", "median transfer µs", kind=ONE),
)
COPIES = (
    Column("rank", "rank"),
    Column("kind", "copies"),
    Column("calls", "calls", kind=COUNT),
    Column("bytes", "bytes", kind=COUNT),
    Column("total_ms", "total ms", kind=THREE),
    Column("gb_per_s", "GB/s", kind=ONE),
    Column("exposed_ms", "exposed ms", kind=THREE),
)
TRACE_HELP = """\
TRACE is one run, as one of these (all may end in .gz):
  an SQLite export of Nsight Systems (.sqlite), with every rank of the node
  a .nsys-rep, if nsys is on PATH or named by the variable NSYS
  a JSON file of torch.profiler (one rank), or a folder with one such file for each rank
  files joined by commas: rank0.json,rank1.json

Communication  kernels of NCCL and copies between GPUs; without NCCL, calls of gloo
Exposed        communication while no other kernel ran on that GPU
Wait           from a rank's start of a collective until the last rank has started it
Transfer       the time of the fastest rank"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that the parser is for."""
    command = parser.get_default("command")
    add = parser.add_argument
    if command == "trace":
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = TRACE_HELP
        add("trace", metavar="TRACE", help="file, folder with one file per rank, or FILE,FILE,…")
        steps = "count only what happens inside steps, as metrics of a run do"
        add("--within-steps", action="store_true", help=steps)
        add("--svg", metavar="OUT", type=Path, help="draw one step into this SVG file")
        step = "number of the step to draw, from 0 (default: the step of median time)"
        add("--step", metavar="N", type=int, help=step)
    elif command == "p2p":
        add("file", metavar="FILE", help=FILES[command])
    else:
        add("files", nargs="+", metavar="FILE", help=FILES[command])


def run(arguments: argparse.Namespace) -> int:
    """Print what the files hold. Raises OSError, UnreadableInput, ValueError."""
    commands = {
        "nccl-log": _run_nccl_log,
        "nccl-tests": _run_nccl_tests,
        "p2p": _run_p2p,
        "trace": _run_trace,
    }
    commands[arguments.command](arguments)
    return 0


def _print_table(caption: str, columns: Sequence[Column], rows: Iterable[Any]) -> None:
    table = Table.of("", caption, columns, rows)
    if table.rows:
        print_table(table)


def _print_notes(title: str, lines: Sequence[str]) -> None:
    for line in lines:
        print_text(f"[bold]{title}[/bold] {escape(line)}")


def _run_nccl_log(arguments: argparse.Namespace) -> None:
    log = read_nccl_log(arguments.files)
    if arguments.json:
        print(json.dumps(log.to_json(), indent=2))
        return
    facts = []
    for name, text in _nccl_facts(log).items():
        if text:
            facts.append({"fact": name, "text": text})
    _print_table("NCCL log", FACTS, facts)
    pairs_of: dict[str, list[str]] = {}
    for pair, words in log.transports.items():
        pairs_of.setdefault(" + ".join(words), []).append(pair)
    rows = []
    for transport, pairs in sorted(pairs_of.items()):
        between = ", ".join(pairs)
        rows.append({"transport": transport, "connections": len(pairs), "between": between})
    _print_table("transports (rank->rank)", TRANSPORTS, rows)
    if not rows:
        console().print("The log has no connection: they appear at the first collective.")
    _print_table("choices", CHOICES, log.algorithms[:CHOICES_SHOWN])
    if len(log.algorithms) > CHOICES_SHOWN:
        console().print(f"… {len(log.algorithms) - CHOICES_SHOWN} more (--json has all)")
    _print_notes("warning", log.warnings)
    _print_notes("error", log.errors)
    _print_notes("note", log.notes)


def _nccl_facts(log: NcclLog) -> dict[str, str]:
    counts = []
    for kind, many in log.channels.items():
        if many is not None:
            counts.append(f"{many} {kind}")
    channels = ", ".join(counts) or "not said"
    if log.channels_from == "rings":
        channels += " (from the rings)"
    gpus = []
    for rank, device in log.communicators[0].devices.items():
        if device.nvml is not None:
            gpus.append(f"{rank}: {device.nvml}")
        elif device.bus_id is not None:
            gpus.append(f"{rank}: bus {device.bus_id}")
    users = Counter(chain.from_iterable(log.nics.values()))
    nics = [f"{name} of {count(ranks, 'rank')}" for name, ranks in sorted(users.items())]
    settings = [f"{name}={value}" for name, value in log.settings.items()]
    conflicts = [f"{name}: {' / '.join(values)}" for name, values in log.conflicts.items()]
    hosts = ""
    if log.nodes is not None and log.nodes > 1:
        hosts = str(log.nodes)
    return {
        "version": log.version or "not said",
        "ranks": "not said" if log.nranks is None else str(log.nranks),
        "GPU of rank": ", ".join(gpus),
        "channels": channels,
        "settings": ", ".join(settings) or "none announced",
        "several values": ", ".join(conflicts),
        "network": log.network or "",
        "network devices": ", ".join(nics),
        "hosts": hosts,
        "NVLS multicast": {True: "available", False: "not available", None: ""}[log.multicast],
    }


def _run_nccl_tests(arguments: argparse.Namespace) -> None:
    runs = []
    for file in arguments.files:
        for nccl_run in read_nccl_tests(file):
            runs.append((file, nccl_run))
    if arguments.json:
        content = [nccl_run.to_json() | {"file": file} for file, nccl_run in runs]
        print(json.dumps({"runs": content}))
        return
    out = console()
    for file, nccl_run in runs:
        ranks = "ranks not said"
        if nccl_run.ranks is not None:
            ranks = count(nccl_run.ranks, "rank")
        facts = [nccl_run.collective or "collective not said", ranks]
        for gpu in nccl_run.devices:
            if gpu.get("name") and str(gpu["name"]) not in facts:
                facts.append(str(gpu["name"]))
        facts += [f"{name}={value}" for name, value in nccl_run.environment.items()]
        if nccl_run.nccl_version:
            facts.append(f"NCCL {nccl_run.nccl_version}")
        where = escape(f"{file}, line {nccl_run.line}:")
        out.print(f"[bold]{where}[/bold] {escape(', '.join(facts))}", soft_wrap=True)
        rows = []
        for row in nccl_run.rows:
            values = dict(row)
            for placement in ("out_of_place", "in_place"):
                for key, value in row[placement].items():
                    values[f"{placement} {key}"] = value
            rows.append(values)
        _print_table("", NCCL_TESTS, rows)
        average = mean = "not printed"
        if nccl_run.avg_busbw is not None:
            average = f"{nccl_run.avg_busbw:g} GB/s"
        if nccl_run.mean_busbw is not None:
            mean = f"{nccl_run.mean_busbw:.4f} GB/s"
        present = " that are there" if nccl_run.rows_missing else ""
        out.print(
            f"columns: out of place, then in place. Average busbw: {average} in the file, {mean} "
            f"computed from its rows{present}"
        )
        _print_notes("error", nccl_run.errors)
        _print_notes("note", nccl_run.notes)
        out.print()


def _run_p2p(arguments: argparse.Namespace) -> None:
    runs = read_p2p(arguments.file)
    if arguments.json:
        content: dict[str, Any] = runs[0].to_json()
        if len(runs) > 1:
            content["repeats"] = [matrices.to_json() for matrices in runs[1:]]
        print(json.dumps(content))
        return
    for index, matrices in enumerate(runs, 1):
        prefix = ""
        if len(runs) > 1:
            prefix = f"run {index} of {len(runs)}: "
        out = console()
        for gpu, device in sorted(matrices.devices.items()):
            out.print(f"GPU {gpu}: {escape(device['name'])}, bus id {device['bus_id']}")
        if matrices.access:
            refused = {tuple(sorted(pair)) for pair, can in matrices.access.items() if not can}
            line = "every pair has peer access"
            if refused:
                line = f"no peer access: {', '.join(f'{a}-{b}' for a, b in sorted(refused))}"
            print_text(escape(line))
        for name, gpus in matrices.ids.items():
            unit = "µs" if name.startswith("latency") else "GB/s"
            # A table's own title is cut to its width.
            title = name.replace("_disabled", ", P2P disabled").replace("_enabled", ", P2P enabled")
            title = title.replace("_", " ")
            out.print(f"[italic]{prefix}{title}, {unit}[/italic]", soft_wrap=True)
            columns = [Column("source", "")]
            columns += [Column(str(gpu), str(gpu), kind=TWO) for gpu in gpus]
            entries, rows = matrices.entries[name], []
            for source in gpus:
                row: dict[str, Any] = {"source": str(source)}
                for target in gpus:
                    if (source, target) in entries:
                        row[str(target)] = entries[source, target]
                if len(row) > 1:
                    rows.append(row)
            _print_table("", columns, rows)
        _print_notes("note", matrices.notes)


def _run_trace(arguments: argparse.Namespace) -> None:
    from analysis.trace.source import read_trace
    from analysis.trace.steps import within_steps
    from analysis.trace.timeline import draw_timeline
    from analysis.trace.trace_summary import summarize

    if arguments.step is not None and arguments.svg is None:
        raise ValueError("--step chooses the step to draw; it works only with --svg FILE")
    trace = read_trace(arguments.trace)
    if arguments.within_steps:
        trace = within_steps(trace)
    if arguments.svg is not None:
        write_drawing(arguments.svg, draw_timeline(trace, arguments.step).encode())
    summary = summarize(trace)
    if arguments.json:
        print(json.dumps(summary.to_json(), default=repr))  # names of a damaged file may be bytes
        return
    ranks, collectives, copies = [], [], []
    for rank in summary.ranks:
        number = {"rank": str(rank.rank)}
        facts = {**vars(rank), **number, "ran_on": "the host"}
        if rank.device is not None:
            facts["ran_on"] = f"GPU {rank.device}"
        for quantity in ("median_ms", "exposed_ms", "exposed_in_gaps_ms"):
            facts[f"step_{quantity}"] = getattr(rank.steps, quantity, None)
        ranks.append(facts)
        for collective in rank.nccl:
            collectives.append({**collective, **number})
        for copy in rank.memcpy:
            copies.append({**copy, **number})
    across = []
    for row in summary.collectives:
        title = row["name"]
        if row["communicator"] is not None:
            title += f" ({row['communicator']})"
        across.append({**row, "name": title})
    _print_table(f"ranks ({summary.source})", RANKS, ranks)
    _print_table("collectives per rank", COLLECTIVES, collectives)
    _print_table("across ranks (wait: average over ranks)", ACROSS_RANKS, across)
    _print_table("copies per rank", COPIES, copies)
    for row in summary.stragglers:
        print_text(
            f"rank {row['rank']} was the straggler in {row['last']} of {row['of']} collectives "
            f"({row['others_waited_ms']:.3f} ms of waiting)"
        )
    _print_notes("note", summary.notes)
    if arguments.svg is not None:
        console().print(f"drawn: {escape(str(arguments.svg))}", soft_wrap=True)
