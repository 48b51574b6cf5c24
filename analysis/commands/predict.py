"""`python -m analysis predict STUDY`: what cells should give before they run, with intervals and beside a null model.

`--holdout condition|size|transport|model` forecasts measured cells from the others and says how far off that was. Several
folders are read as one study. Exit status: 0 done, 2 wrong input or request.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.findings.study import Study, open_study
from analysis.prediction.asked import questions, read_batches, read_nccl, read_subsets
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.cells import Question
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL, Forecast, forecast
from analysis.prediction.holdout import CONDITION, WAYS, HeldOut, hold_out, scores
from analysis.prediction.links.network import FORM, read_network
from analysis.prediction.scores import (
    AIMS,
    FEWEST_FOR_COVERAGE,
    CollectiveError,
    Summary,
    collective_errors,
    mean_error,
    summary,
)
from analysis.report.numbers import ABSENT, number

_MOST_NOTES = 12


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("study", metavar="STUDY", nargs="+", help="the folder of a study; several are read as one")
    parser.add_argument(
        "--gpus", metavar="LIST", help="0,1,2,3 is one subset; with --per-node numbers of GPUs: 16,64,256"
    )
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs of a host")
    parser.add_argument("--net", metavar="NET", help=f"the network between hosts that were not measured: {FORM}")
    parser.add_argument("--nccl", metavar="SETTINGS", default="", help="such as P2P_LEVEL=LOC,ALGO=Ring")
    parser.add_argument(
        "--strategy", metavar="NAMES", help="such as nccl_allreduce,kvstore_device (default: the study's)"
    )
    parser.add_argument("--batch", metavar="SIZES", help="images per GPU, such as 128,256 (default: the study's)")
    parser.add_argument("--holdout", choices=WAYS, help="forecast measured cells from the others")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print forecasts, or those of held-out cells. Raises OSError, ValueError."""
    _refuse(arguments)
    calibration = calibrate(_study(arguments.study))
    if arguments.holdout:
        held = hold_out(calibration, arguments.holdout)
        errors = collective_errors(calibration.known.links)
        if arguments.json:
            print(json.dumps(_held_json(arguments.holdout, held, errors)))
        else:
            _print_held(held, errors, calibration)
        return 0
    asked = questions(
        calibration,
        read_subsets(arguments.gpus, arguments.per_node) if arguments.gpus else None,
        read_nccl(arguments.nccl),
        arguments.strategy.split(",") if arguments.strategy else None,
        read_batches(arguments.batch) if arguments.batch else None,
        read_network(arguments.net) if arguments.net else None,
    )
    known = _scores(calibration)
    made = [(question, *_forecast(calibration, question, known)) for question in asked]
    if not any(found for _, found, _ in made):
        raise ValueError(made[0][2] if made else "no cell of the study has several GPUs; expected --strategy")
    if arguments.json:
        print(json.dumps(_json(calibration, made, len(known))))
    else:
        _print(calibration, made)
    return 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse options that would be ignored. Raises ValueError."""
    if arguments.per_node is not None and not arguments.gpus:
        raise ValueError(f"--per-node {arguments.per_node}: expected --gpus too, such as --gpus 16,64,256 --per-node 8")
    if arguments.net and arguments.per_node is None:
        raise ValueError(
            f"--net {arguments.net}: expected --gpus and --per-node too, such as --gpus 16,64 --per-node 8"
        )
    asked = [name for name in ("gpus", "net", "nccl", "strategy", "batch") if getattr(arguments, name)]
    if arguments.holdout and asked:
        raise ValueError(f"--holdout forecasts the study's own cells; --{asked[0]} asks for others")


def _study(folders: Sequence[str]) -> Study:
    """Return one study, or the records of several as one."""
    opened = [open_study(Path(folder)) for folder in folders]
    if len(opened) == 1:
        return opened[0]
    return Study.of(record for one in opened for record in (*one.records, *one.replaced))


def _scores(calibration: Calibrated) -> list[float]:
    """Return the scores of the cells that can be held out; none where there are too few."""
    if len([one for one in calibration.several if one.valid]) < FEWEST_HELD_OUT:
        return []
    return scores(hold_out(calibration, CONDITION))


def _forecast(calibration: Calibrated, question: Question, known: Sequence[float]) -> tuple[Forecast | None, str]:
    try:
        return forecast(calibration, question, known), ""
    except ValueError as error:
        return None, str(error)


def _where(question: Question) -> str:
    if question.members:
        return "gpus " + ",".join(map(str, question.members))
    return f"{question.ranks} GPUs" if question.hosts == 1 else f"{question.ranks} GPUs, {question.hosts} hosts"


Made = Sequence[tuple[Question, Forecast | None, str]]


def _json(calibration: Calibrated, made: Made, held_out: int) -> dict[str, Any]:
    rows = []
    for question, found, why in made:
        asked = {
            "model": question.workload.model, "strategy": question.strategy, "batch_size": question.batch_size,
            "gpus": list(question.members) or None, "ranks": question.ranks, "hosts": question.hosts,
            "wire": str(question.wire),
        }  # fmt: skip
        rows.append(asked | ({"forecast": found.to_json()} if found else {"refused": why}))
    cells = {"cells": len(calibration.cells), "held_out": held_out, "notes": list(calibration.notes)}
    return {"calibration": cells, "level": LEVEL, "forecasts": rows}


def _print(calibration: Calibrated, made: Made) -> None:
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
        where = f"{_where(question)}, {question.wire}"
        if found is None:
            table.add_row(escape(name), where, *[ABSENT] * 10, "no forecast", ABSENT)
            notes.append(f"no forecast of {question.strategy}: {why}")
            continue
        interval = ABSENT if found.low is None or found.high is None else f"{found.low:.2f} to {found.high:.2f}"
        parts = (found.cost_ms, found.tail_ms, found.contention_ms, found.own_work_ms, found.waiting_ms)
        table.add_row(
            escape(name), where, f"{found.step_ms:.2f}", interval, number(found.images_per_second, "rate"),
            number(found.efficiency, "share"), *(f"{part:.2f}" for part in parts), f"{found.null_step_ms:.2f}",
            found.basis, found.widest,
        )  # fmt: skip
        notes += found.why
    console().print(table)
    _print_notes(notes)


def _print_notes(notes: Sequence[str]) -> None:
    out, several = console(), list(dict.fromkeys(notes))
    for note in several[:_MOST_NOTES]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    if len(several) > _MOST_NOTES:
        out.print(f"… {len(several) - _MOST_NOTES} more (--json has all)")


def _held_json(way: str, held: Sequence[HeldOut], errors: Sequence[CollectiveError]) -> dict[str, Any]:
    cells = [
        {
            "cell": one.cell.label, "records": list(one.cell.record_ids), "step_ms": one.step_ms, "cost_ms": one.cost_ms,
            "low": one.low, "high": one.high, "inside": one.inside,
            "forecast": one.forecast.to_json() if one.forecast else None, "refused": one.why or None,
        }
        for one in held
    ]  # fmt: skip
    found = summary(held)
    said = {name: getattr(found, name) for name in ("cells", "not_forecast", "cost_cells", "cost", "null_cost", "step")}
    said |= {"null_step": found.null_step, "covered": found.covered, "with_interval": found.with_interval}
    said["rankings"] = [vars(one) for one in found.rankings]
    said |= {f"collectives_{size}": mean_error(errors, size == "large") for size in ("large", "small")}
    return {"holdout": way, "level": LEVEL, "cells": cells, "summary": said}


def _print_held(held: Sequence[HeldOut], errors: Sequence[CollectiveError], calibration: Calibrated) -> None:
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
    ):
        table.add_column(heading, justify="right")
    notes = list(calibration.notes)
    for one in held:
        found = one.forecast
        if found is None:
            table.add_row(escape(one.cell.label), f"{one.step_ms:.2f}", *[ABSENT] * 9)
            notes.append(f"no forecast of {one.cell.label}: {one.why}")
            continue
        interval = ABSENT if one.low is None else f"{one.low:.2f} to {one.high:.2f}"
        inside = ABSENT if one.inside is None else "yes" if one.inside else "no"
        cost = [ABSENT] * 4
        if one.cost_ms:
            cost = [f"{one.cost_ms:.2f}", f"{found.cost_ms:.2f}", _error(found.cost_ms, one.cost_ms)]
            cost.append(_error(found.null_cost_ms, one.cost_ms))
        table.add_row(
            escape(one.cell.label), f"{one.step_ms:.2f}", f"{found.step_ms:.2f}", _error(found.step_ms, one.step_ms),
            _error(found.null_step_ms, one.step_ms), interval, inside, *cost,
        )  # fmt: skip
    out = console()
    out.print(table)
    for line in _sentences(summary(held), errors):
        out.print(line, soft_wrap=True)
    _print_notes(notes)


def _error(said: float, measured: float) -> str:
    return number(said / measured - 1, "change")


def _sentences(found: Summary, errors: Sequence[CollectiveError]) -> list[str]:
    """Return the errors beside what was aimed at, one sentence each; what too few cells cannot show is said."""
    made = found.cells - found.not_forecast
    lines = [f"{made} of {found.cells} held-out cells have a forecast"]
    if found.cost is not None:
        lines.append(
            f"communication cost ({found.cost_cells} cells): mean error {_share(found.cost)} "
            f"(aim: at most {_share(AIMS['cost'])}), the null model's {_share(found.null_cost)} (aim: at most half of it)"
        )
    if found.step is not None:
        lines.append(
            f"step: {_share(found.step)} (aim: {_share(AIMS['step'])}), the null model's {_share(found.null_step)}"
        )
    if found.coverage is None:
        lines.append(f"intervals: not enough to state an error; {FEWEST_HELD_OUT + 1} held-out cells are needed")
    else:
        enough = (
            "" if found.with_interval >= FEWEST_FOR_COVERAGE else f"; {FEWEST_FOR_COVERAGE} are needed to judge that"
        )
        least, most = AIMS["coverage"]
        inside = f"{found.covered} of {found.with_interval} cells inside ({_share(found.coverage)}"
        lines.append(f"90 % intervals: {inside}; aim: {_share(least)} to {_share(most)}){enough}")
    for ranking in found.rankings:
        lines.append(f"order of {ranking.cells} strategies, {ranking.name}: τ = {ranking.tau:.2f} (aim: {AIMS['tau']})")
    for large, words in ((True, "from 1 MiB"), (False, "below 1 MiB")):
        if (share := mean_error(errors, large)) is not None:
            aim = AIMS["large" if large else "small"]
            lines.append(f"collectives {words}, from fewer ranks: mean error {_share(share)} (aim: {_share(aim)})")
    return lines


def _share(value: float | None) -> str:
    return number(value, "share")
