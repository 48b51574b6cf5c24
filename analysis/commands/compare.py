"""`python -m analysis compare A B [--json]`: how two studies differ, or two outputs of nccl-tests or p2p.

Of two studies: `--limit 2%`; exit status 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be told.
Of two files: `--tolerance 0.03`, `--latency-tolerance 0.1`.
"""

import argparse
import json
from statistics import median

from rich.markup import escape
from rich.table import Table

from analysis.commands import compare_studies
from analysis.commands.native_difference import (
    LATENCY_TOLERANCE,
    TOLERANCE,
    NativeDifference,
    NativeMeasurement,
    compare_measurements,
    read_measurement,
)
from analysis.console import console
from analysis.errors import UnreadableInput
from analysis.foreign import read_text

_SHOWN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="the folder of a study (LABEL=FOLDER gives it a name), output of nccl-tests (text or JSON) or "
            "p2pBandwidthLatencyTest, or a record.json of benchmark=collectives or benchmark=p2p",
        )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="PART",
        help="two medians that differ by less than this share of A are equal (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--latency-tolerance", type=float, default=LATENCY_TOLERANCE, metavar="PART",
        help="the same for latency matrices and for messages of at most 64 KiB (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", metavar="SHARE",
        help="of two studies: a cell that is slower by less, such as 2%%, is no regression (default: any that runs show). "
        "Exit status: 0 no regression, 1 a regression was found, 2 wrong input, or no cell can be told",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what differs. Raises OSError, UnreadableInput, or ValueError if the two have nothing in common."""
    if any(compare_studies.is_folder(one) for one in (arguments.a, arguments.b)):
        return compare_studies.run(arguments)
    if arguments.limit is not None:
        raise ValueError("--limit is for two studies; of two files --tolerance says what is equal")
    a, b = (_read(file) for file in (arguments.a, arguments.b))
    result = compare_measurements(a, b, arguments.tolerance, arguments.latency_tolerance)
    if arguments.json:
        whole = {
            "a": arguments.a, "b": arguments.b,
            "tolerance": arguments.tolerance, "latency_tolerance": arguments.latency_tolerance,
            "compared": result.compared, "single": result.single, "differ": [one.as_json() for one in result.differ],
            "only_a": result.only_a, "only_b": result.only_b, "notes": result.notes,
        }  # fmt: skip
        print(json.dumps(whole))
        return 0
    _print(result, arguments)
    return 0


def _read(file: str) -> NativeMeasurement:
    try:
        return read_measurement(read_text(file))
    except UnreadableInput as error:
        raise UnreadableInput(f"{file}: {error}") from None


def _print(result: NativeDifference, arguments: argparse.Namespace) -> None:
    out = console()
    tables = any(one.entry.busbw for one in result.differ)
    if result.differ:
        title = "differences beyond the tolerance" if result.single else "differences beyond noise"
        table = Table(title=f"{title}, greatest first", title_justify="left")
        table.add_column("entry")
        for name in ("A", "B", "unit", "B/A", *(("busbw A", "busbw B") if tables else ()), "B is"):
            table.add_column(name, justify="left" if name in ("unit", "B is") else "right")
        for one in result.differ[:_SHOWN]:
            ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
            pair = (
                [
                    f"{median(side.busbw):.2f}" if side.busbw else ""
                    for side in (one.entry, one.other)
                ]
                if tables
                else []
            )
            word = "faster" if one.better else "slower"
            table.add_row(
                escape(one.entry.name),
                f"{one.a:.7g}",
                f"{one.b:.7g}",
                one.entry.unit,
                ratio,
                *pair,
                word,
            )
        out.print(table)
        if len(result.differ) > _SHOWN:
            out.print(f"… {len(result.differ) - _SHOWN} more (--json has all)")
    faster = sum(one.better for one in result.differ)
    tolerance = (
        f"{100 * arguments.tolerance:g} %, of latencies {100 * arguments.latency_tolerance:g} %"
    )
    beyond = (
        "more than the tolerance"
        if result.single
        else "more than the tolerance and the scatter of repetitions"
    )
    head = f"{len(result.differ)} of {result.compared} entries differ by {beyond} ({tolerance})"
    out.print(
        f"{head}: B is faster in {faster}, slower in {len(result.differ) - faster}", soft_wrap=True
    )
    if result.single:
        out.print(
            "These are single measurements: how far two runs of one machine differ is not known.",
            soft_wrap=True,
        )
    for side, names in (("A", result.only_a), ("B", result.only_b)):
        if names:
            more = f", … {len(names) - 3} more" if len(names) > 3 else ""
            out.print(f"only in {side}: {escape(', '.join(names[:3]))}{more}", soft_wrap=True)
    for line in result.notes:
        out.print(f"[bold]note[/bold] {escape(line)}", soft_wrap=True)
