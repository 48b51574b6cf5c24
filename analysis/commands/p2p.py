"""`python -m analysis p2p FILE [--svg OUT] [--topology FILE] [--json]`: matrices of GB/s and µs between GPUs."""

import argparse
import json
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.errors import UnreadableInput
from analysis.foreign import read_text
from analysis.p2p.matrices import Matrices
from analysis.p2p.source import P2p, read_p2p
from analysis.topology.model import Topology
from analysis.topology.source import load_topology, parse_topology


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="output of p2pBandwidthLatencyTest, whole or in part; or a record.json of benchmark=p2p",
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the matrices. Raises OSError for a file that cannot be read, UnreadableInput for a foreign one.

    If the file holds several runs, the JSON object is the first and `repeats` holds the others. For a record it holds
    the medians, and `repeats` every repeat.
    """
    try:
        found = read_p2p(read_text(arguments.file))
    except UnreadableInput as error:
        raise UnreadableInput(f"{arguments.file}: {error}") from None
    runs = found.shown
    if arguments.svg:
        from analysis.p2p.heat_map import draw_heat_maps

        draw_heat_maps(
            runs[0],
            _topology(found, arguments.topology),
            Path(arguments.svg),
            found.title,
            found.words,
        )
    if arguments.json:
        others = found.samples if found.words else runs[1:]
        more: dict[str, object] = {"repeats": [one.as_json() for one in others]} if others else {}
        print(json.dumps(runs[0].as_json() | more))
        return 0
    for state, words in (found.words or {}).items():
        console().print(f"P2P {state}: {escape(words)}", soft_wrap=True)
    for number, one in enumerate(runs, 1):
        prefix = f"run {number} of {len(runs)}: " if len(runs) > 1 else ""
        _print(one, prefix, (found.words or {}).get("enabled", "peer access"))
    return 0


def _topology(found: P2p, file: str | None) -> Topology | None:
    """Load the topology of a file, else the record's own; None if that cannot be read: the drawing works without it."""
    if file is not None:
        return load_topology(file)
    if found.topology is None:
        return None
    try:
        return parse_topology(found.topology)
    except UnreadableInput:
        return None


def _print(one: Matrices, prefix: str, access: str) -> None:
    """Print the devices, the pairs without `access`, the matrices and the notes."""
    out = console()
    for number, device in sorted(one.devices.items()):
        out.print(f"GPU {number}: {escape(device['name'])}, bus id {device['bus_id']}")
    refused = sorted({(min(pair), max(pair)) for pair, can in one.access.items() if not can})
    if one.access:
        pairs = ", ".join(f"{a}-{b}" for a, b in refused)
        out.print(
            escape(f"no {access}: {pairs}" if refused else f"every pair has {access}"),
            soft_wrap=True,
        )
    for name, columns in one.ids.items():
        unit = "µs" if name.startswith("latency") else "GB/s"
        out.print(
            f"[italic]{prefix}{name}, {unit}[/italic]", soft_wrap=True
        )  # a table's own title is cut to its width
        table = Table()
        for heading in ("", *map(str, columns)):
            table.add_column(heading, justify="right")
        for row in columns:
            values = [one.entries[name].get((row, column)) for column in columns]
            if any(value is not None for value in values):
                table.add_row(
                    str(row), *("" if value is None else f"{value:.2f}" for value in values)
                )
        out.print(table)
    for line in one.notes:
        out.print(f"[bold]note[/bold] {escape(line)}", soft_wrap=True)
