"""The table of forecasts: step, interval, rate, parts, null model, basis, and what most of the width comes from."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.commands.predicted.notes import print_notes
from analysis.console import console
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question
from analysis.prediction.forecast import LEVEL, Forecast
from analysis.report.numbers import ABSENT, number

# A question, its forecast, and why there is none.
Made = Sequence[tuple[Question, Forecast | None, str]]


def to_json(calibration: Calibrated, made: Made, held_out: int) -> dict[str, Any]:
    """Return one JSON object; `held_out` is the number of cells that the intervals come from."""
    rows = []
    for question, found, why in made:
        asked = {
            "model": question.workload.model, "strategy": question.strategy, "batch_size": question.batch_size,
            "gpus": list(question.members) or None, "ranks": question.ranks, "hosts": question.hosts,
            "wire": str(question.wire),
        }  # fmt: skip
        rows.append(asked | ({"forecast": found.to_json()} if found else {"refused": why}))
    cells = {
        "cells": len(calibration.cells),
        "held_out": held_out,
        "notes": list(calibration.notes),
    }
    return {"calibration": cells, "level": LEVEL, "forecasts": rows}


def print_forecasts(calibration: Calibrated, made: Made) -> None:
    """Print the table and its notes."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("cell")
    table.add_column("where")
    for heading in (
        "step ms",
        "90 % interval",
        "img/s",
        "efficiency",
        "cost ms",
        "tail",
        "contention",
        "own",
        "waiting",
    ):
        table.add_column(heading, justify="right")
    table.add_column("null's step", justify="right")
    table.add_column("basis")
    table.add_column("widest part")
    notes = list(calibration.notes)
    for question, found, why in made:
        name = f"{question.workload} · {question.strategy} · {question.batch_size}"
        has_wire = question.ranks > 1 and question.unit == "GPU"
        place = ", ".join([where(question), *[str(question.wire)][:has_wire]])
        if found is None:
            table.add_row(escape(name), place, *[ABSENT] * 10, "no forecast", ABSENT)
            notes.append(f"no forecast of {question.strategy}: {why}")
            continue
        interval = (
            ABSENT
            if found.low is None or found.high is None
            else f"{found.low:.2f} to {found.high:.2f}"
        )
        parts = (
            found.cost_ms,
            found.tail_ms,
            found.contention_ms,
            found.own_work_ms,
            found.waiting_ms,
        )
        table.add_row(
            escape(name), place, f"{found.step_ms:.2f}", interval, number(found.images_per_second, "rate"),
            number(found.efficiency, "share"), *(f"{part:.2f}" for part in parts), f"{found.null_step_ms:.2f}",
            found.basis, found.widest,
        )  # fmt: skip
        notes += found.why
    console().print(table)
    print_notes(notes)


def where(question: Question) -> str:
    """Return the GPUs of a question: `gpus 0,1`, or how many on how many hosts."""
    if question.members:
        return "gpus " + ",".join(map(str, question.members))
    many = f"{question.ranks} {question.unit}s"
    return many if question.hosts == 1 else f"{many}, {question.hosts} hosts"
