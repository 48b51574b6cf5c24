"""The table of published ladders: each point that was forecast from the first ones, and the null model's error."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.commands.predicted.notes import error, share
from analysis.console import console
from analysis.prediction.ladders import RungForecast, mean_errors


def to_json(found: Sequence[RungForecast]) -> dict[str, Any]:
    """Return one JSON object."""
    rows = [
        {
            "system": one.ladder.system, "round": one.ladder.round, "nodes": one.rung.nodes,
            "batch_size": one.rung.batch_size, "from": one.from_what,
            "step_ms": one.step_ms, "forecast_ms": one.said_ms, "null_ms": one.null_ms,
        }
        for one in found
    ]  # fmt: skip
    said, null = mean_errors(found)
    return {"points": rows, "mean_error": said, "null_mean_error": null}


def print_ladders(found: Sequence[RungForecast]) -> None:
    """Print the table and both mean errors."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("system", "round", "from"):
        table.add_column(heading)
    for heading in ("nodes", "GPUs", "batch", "step ms", "forecast", "error", "null", "error"):
        table.add_column(heading, justify="right")
    for one in found:
        ladder, rung = one.ladder, one.rung
        table.add_row(
            escape(ladder.system), escape(ladder.round), escape(one.from_what), str(rung.nodes),
            str(rung.nodes * ladder.gpus_per_node), str(rung.batch_size), f"{one.step_ms:.2f}", f"{one.said_ms:.2f}",
            error(one.said_ms, one.step_ms), f"{one.null_ms:.2f}", error(one.null_ms, one.step_ms),
        )  # fmt: skip
    out = console()
    out.print(table)
    said, null = mean_errors(found)
    out.print(
        f"mean error {share(said)}, the null model's {share(null)}; no interval is stated, the points are too few"
    )
