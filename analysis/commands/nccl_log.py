"""`python -m analysis nccl-log FILE… [--json]`: what NCCL did."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from analysis.console import SafeConsole, console
from analysis.errors import UnreadableInput
from analysis.foreign import read_text
from analysis.nccl.log import parse_nccl_log
from analysis.nccl.model import NcclLog

_CHOICES_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="one log of all ranks, or one log per rank"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the log's facts. Raises OSError for a file that cannot be read, UnreadableInput for a foreign one."""
    log = _read(arguments.files)
    if arguments.json:
        print(json.dumps(log.as_json(), indent=2))
    else:
        _print(log, console())
    return 0


def _read(files: Sequence[str]) -> NcclLog:
    texts = [read_text(file) for file in files]
    try:
        return parse_nccl_log(*texts)
    except UnreadableInput as error:
        raise UnreadableInput(f"{', '.join(files)}: {error}") from None


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _ranks_of_devices(log: NcclLog) -> dict[str, str]:
    """Return {network device: `3 ranks`}."""
    ranks = Counter(name for names in log.nics.values() for name in names)
    return {name: f"{count} rank{'s' * (count > 1)}" for name, count in sorted(ranks.items())}


def _print(log: NcclLog, out: SafeConsole) -> None:
    channels = ", ".join(
        f"{count} {kind}" for kind, count in log.channels.items() if count is not None
    )
    source = " (from the rings)" if log.channels_from == "rings" else ""
    settings = ", ".join(f"{name}={value}" for name, value in log.settings.items())
    conflicts = ", ".join(f"{name}: {' / '.join(values)}" for name, values in log.conflicts.items())
    devices = log.communicators[0].devices
    gpus = ", ".join(
        f"{rank}: {device.nvml if device.nvml is not None else f'bus {device.bus_id}'}"
        for rank, device in devices.items()
        if device.nvml is not None or device.bus_id is not None
    )
    multicast = {True: "available", False: "not available", None: ""}[log.multicast]
    facts = Table(title="NCCL log", title_justify="left", show_header=False, box=None)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in (
        ("version", log.version or "not said"),
        ("ranks", "not said" if log.nranks is None else str(log.nranks)),
        ("GPU of rank", gpus),
        ("channels", (channels or "not said") + source),
        ("settings", settings or "none announced"),
        ("several values", conflicts),
        ("network", log.network or ""),
        (
            "network devices",
            ", ".join(f"{name} of {many}" for name, many in _ranks_of_devices(log).items()),
        ),
        ("hosts", str(log.nodes) if (log.nodes or 1) > 1 else ""),
        ("NVLS multicast", multicast),
    ):
        if text:
            facts.add_row(name, escape(text))
    out.print(facts)
    _print_transports(log, out)
    if log.algorithms:
        table = Table(title="choices", title_justify="left")
        for name in ("function", "bytes", "algorithm", "protocol", "channels", "calls"):
            table.add_column(
                name, justify="left" if name in ("function", "algorithm", "protocol") else "right"
            )
        for one in log.algorithms[:_CHOICES_SHOWN]:
            cells = (
                one.function or "",
                str(one.size),
                one.algorithm,
                one.protocol,
                _count(one.channels),
            )
            table.add_row(*map(escape, cells), str(one.calls))
        out.print(table)
        if len(log.algorithms) > _CHOICES_SHOWN:
            out.print(f"… {len(log.algorithms) - _CHOICES_SHOWN} more (--json has all)")
    for title, lines in (("warning", log.warnings), ("error", log.errors), ("note", log.notes)):
        for line in lines:
            out.print(f"[bold]{title}[/bold] {escape(line)}", soft_wrap=True)


def _print_transports(log: NcclLog, out: SafeConsole) -> None:
    """Print connections by transport."""
    if not log.transports:
        out.print("The log has no connection: they appear at the first collective.")
        return
    table = Table(title="transports (rank->rank)", title_justify="left")
    table.add_column("transport", no_wrap=True)
    table.add_column("connections", justify="right")
    table.add_column("between", overflow="fold")
    grouped: dict[str, list[str]] = {}
    for pair, words in log.transports.items():
        grouped.setdefault(" + ".join(words), []).append(pair)
    for words_text, pairs in sorted(grouped.items()):
        table.add_row(escape(words_text), str(len(pairs)), ", ".join(pairs))
    out.print(table)
