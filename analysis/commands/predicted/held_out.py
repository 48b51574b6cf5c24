"""The table of held-out cells: measured and forecast, the null model's errors, and a summary beside what is aimed at."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.commands.predicted.notes import error, print_notes, share
from analysis.console import console
from analysis.prediction.calibration import Calibrated
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL
from analysis.prediction.holdout import HeldOut
from analysis.prediction.scores import (
    AIMS,
    FEWEST_FOR_COVERAGE,
    CollectiveError,
    Summary,
    mean_error,
    summary,
)
from analysis.report.numbers import ABSENT


def to_json(way: str, held: Sequence[HeldOut], errors: Sequence[CollectiveError]) -> dict[str, Any]:
    """Return one JSON object."""
    cells = [
        {
            "cell": one.cell.label, "records": list(one.cell.record_ids), "step_ms": one.step_ms, "cost_ms": one.cost_ms,
            "cost_floor": one.floor, "low": one.low, "high": one.high, "inside": one.inside,
            "forecast": one.forecast.to_json() if one.forecast else None, "refused": one.why or None,
        }
        for one in held
    ]  # fmt: skip
    found = summary(held)
    said = {
        name: getattr(found, name)
        for name in ("cells", "not_forecast", "cost_cells", "cost", "null_cost", "step")
    }
    said |= {"cost_floor": found.cost_floor, "null_step": found.null_step}
    said |= {"covered": found.covered, "with_interval": found.with_interval}
    said["rankings"] = [vars(one) for one in found.rankings]
    said |= {
        f"collectives_{size}": mean_error(errors, size == "large") for size in ("large", "small")
    }
    return {"holdout": way, "level": LEVEL, "cells": cells, "summary": said}


def print_held_out(
    held: Sequence[HeldOut], errors: Sequence[CollectiveError], calibration: Calibrated
) -> None:
    """Print the table, the summary and the notes."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("held-out cell")
    for heading in (
        "step ms",
        "forecast",
        "error",
        "null's",
        "interval",
        "inside",
        "cost ms",
        "forecast",
        "error",
        "null's",
        "floor",
    ):
        table.add_column(heading, justify="right")
    notes = list(calibration.notes)
    for one in held:
        found = one.forecast
        if found is None:
            table.add_row(escape(one.cell.label), f"{one.step_ms:.2f}", *[ABSENT] * 10)
            notes.append(f"no forecast of {one.cell.label}: {one.why}")
            continue
        interval = ABSENT if one.low is None else f"{one.low:.2f} to {one.high:.2f}"
        inside = ABSENT if one.inside is None else "yes" if one.inside else "no"
        cost = [ABSENT] * 5
        if one.cost_ms:
            cost = [f"{one.cost_ms:.2f}", f"{found.cost_ms:.2f}", error(found.cost_ms, one.cost_ms)]
            cost += [
                error(found.null_cost_ms, one.cost_ms),
                ABSENT if one.floor is None else share(one.floor),
            ]
        table.add_row(
            escape(one.cell.label), f"{one.step_ms:.2f}", f"{found.step_ms:.2f}", error(found.step_ms, one.step_ms),
            error(found.null_step_ms, one.step_ms), interval, inside, *cost,
        )  # fmt: skip
    out = console()
    out.print(table)
    for line in _sentences(summary(held), errors):
        out.print(line, soft_wrap=True)
    print_notes(notes)


def _sentences(found: Summary, errors: Sequence[CollectiveError]) -> list[str]:
    """Return the errors beside what was aimed at, one sentence each; what too few cells cannot show is said."""
    made = found.cells - found.not_forecast
    lines = [f"{made} of {found.cells} held-out cells have a forecast"]
    if found.cost is not None:
        lines.append(
            f"communication cost ({found.cost_cells} cells): mean error {share(found.cost)} "
            f"(aim: at most {share(AIMS['cost'])}), the null model's {share(found.null_cost)} (aim: at most half of it); "
            f"a perfect forecast would err by {share(found.cost_floor)}, because equal runs differ"
        )
    if found.step is not None:
        lines.append(
            f"step: {share(found.step)} (aim: {share(AIMS['step'])}), the null model's {share(found.null_step)}"
        )
    if found.coverage is None:
        lines.append(
            f"intervals: not enough to state an error; {FEWEST_HELD_OUT + 1} held-out cells are needed"
        )
    else:
        enough = (
            ""
            if found.with_interval >= FEWEST_FOR_COVERAGE
            else f"; {FEWEST_FOR_COVERAGE} are needed to judge that"
        )
        least, most = AIMS["coverage"]
        inside = f"{found.covered} of {found.with_interval} cells inside ({share(found.coverage)}"
        lines.append(f"90 % intervals: {inside}; aim: {share(least)} to {share(most)}){enough}")
    for ranking in found.rankings:
        line = f"order of {ranking.cells} strategies, {ranking.name}: τ = {ranking.tau:.2f} (aim: {AIMS['tau']})"
        if ranking.tau_of_pairs is not None:
            all_pairs = ranking.cells * (ranking.cells - 1) // 2
            line += f"; {ranking.tau_of_pairs:.2f} over the {ranking.pairs} of {all_pairs} pairs that measurements can order"
        lines.append(line)
    for large, words in ((True, "from 1 MiB"), (False, "below 1 MiB")):
        if (mean := mean_error(errors, large)) is not None:
            aim = AIMS["large" if large else "small"]
            lines.append(
                f"collectives {words}, from fewer ranks: mean error {share(mean)} (aim: {share(aim)})"
            )
    return lines
