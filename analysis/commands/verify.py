"""`python -m analysis verify STUDY [--json]`: derive every record again from the raw lines of its ranks, and compare."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from analysis.commands.console import console
from analysis.errors import UnreadableInput
from analysis.validity.recompute import Verification, verify

_SHOWN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("study", metavar="STUDY", help="the folder of a study: OUTPUT_DIR/STUDY")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what differs. Return 0: nothing does; 1: a value differs or lines are missing; 2: none could be compared.

    Raises:
        UnreadableInput: the folder holds no record.
    """
    result = verify(Path(arguments.study))
    if not result.records:
        raise UnreadableInput(f"{arguments.study}: holds no record; give the folder of a study, OUTPUT_DIR/STUDY")
    if arguments.json:
        print(json.dumps(_as_json(arguments.study, result)))
    else:
        _print(result)
    if not result.right:
        return 1
    return 0 if result.recomputed else 2  # a study of which nothing could be compared is not proved right


def _as_json(study: str, result: Verification) -> dict[str, Any]:
    """Return the result in plain JSON types."""
    return {
        "study": study,
        "records": result.records,
        "recomputed": result.recomputed,
        "values": result.values,
        "differences": [_plain(dataclasses.asdict(one)) for one in result.differences],
        "not_recomputed": [dataclasses.asdict(one) for one in result.omissions],
        "other_metrics": sorted(result.other_metrics),
    }


def _plain(difference: dict[str, Any]) -> dict[str, Any]:
    """Return a difference whose numbers JSON has: NaN and infinities become text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in difference.items()
    }


def _print(result: Verification) -> None:
    """Print the table of differences, what could not be recomputed, and the count."""
    out = console()
    if result.differences:
        table = Table(title="values that the raw lines give otherwise", title_justify="left")
        for name in ("record", "value", "recorded", "recomputed"):
            table.add_column(name, justify="right" if name.startswith("rec") and name != "record" else "left")
        for one in result.differences[:_SHOWN]:
            table.add_row(escape(one.record), escape(one.value), _text(one.recorded), _text(one.recomputed))
        out.print(table)
        if len(result.differences) > _SHOWN:
            out.print(f"… {len(result.differences) - _SHOWN} more (--json has all)")
    for omission in result.omissions:
        out.print(f"cannot be recomputed: {escape(omission.record)}: {escape(omission.reason)}", soft_wrap=True)
    if result.other_metrics:
        names = ", ".join(sorted(result.other_metrics))
        out.print(f"not from the lines of the ranks, and not compared: {escape(names)}", soft_wrap=True)
    several = len({one.record for one in result.differences})
    out.print(
        f"{result.recomputed} of {result.records} records recomputed, {result.values} values compared: "
        + (f"{len(result.differences)} differ, in {several} records" if result.differences else "0 differ"),
        soft_wrap=True,
    )


def _text(value: Any) -> str:
    """Return a value with every digit that it has, in one short line."""
    text = repr(value) if isinstance(value, float) else str(value)
    return escape(text if len(text) <= 40 else f"{text[:39]}…")
