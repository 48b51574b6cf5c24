"""`python -m analysis predict STUDY…`: what cells should give before they run.

Forecasts stand with their intervals beside a null model. `--holdout condition|size|transport|batch|
model` forecasts measured cells from the others and says how far off that was. Several folders are
read as one study. The options that `advise` has too are read here.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.console import console
from analysis.prediction.calibration_data import CalibrationData, calibrate
from analysis.prediction.candidates import (
    ForecastRequest,
    candidates,
    machine_gpus,
    machine_line,
)
from analysis.prediction.forecast import (
    FEWEST_HELD_OUT,
    HOLDOUTS,
    LEVEL,
    errors_of,
    forecast,
    held_out_scores,
    hold_out,
    way_of,
)
from analysis.prediction.link_model import NETWORK_FORM, read_network
from analysis.prediction.query import CellQuery, Subset
from analysis.report.numbers import NumberFormat, number
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate
from analysis.study.names import of_unit
from analysis.study.study import Study, open_study
from conf.nccl import FIELDS, Nccl, settings, unknown_setting

MOST_NOTES = 12
MOST_GPUS, MOST_BATCH = 1 << 20, 1 << 24
UNTOUCHED = "default"  # --nccl of no setting
WORK = {"optimize": "eager,graph", "precision": "bf16"}  # options of the work of a rank
GPUS_FORM = (
    "GPUs of this machine as 0,1,2,3 (several subsets: 0+1,0+1+2+3), or with --per-node numbers of "
    "GPUs as 16,64,256"
)
NUMBERS = "a number of GPUs needs --per-node too, such as --gpus 16 --per-node 8"
CAPTION = f"{100 * LEVEL:.0f} % intervals stand below their values"
MS = NumberFormat(decimals=2)
FORECASTS = (
    Column("cell", "cell"),
    Column("where", "where"),
    Column("step", "step ms", kind=MS, bounded=True),
    Column("images_per_second", "img/s", kind="rate"),
    Column("efficiency", "efficiency", kind="share"),
    Column("cost_ms", "cost ms", kind=MS),
    Column("tail_ms", "tail", kind=MS),
    Column("contention_ms", "contention", kind=MS),
    Column("own_work_ms", "own", kind=MS),
    Column("null_step_ms", "null's step", kind=MS),
    Column("basis", "basis"),
)
HELD_OUT = (
    Column("cell", "held-out cell"),
    Column("measured_ms", "step ms", kind=MS),
    Column("step", "forecast", kind=MS, bounded=True),
    Column("error", "error", kind="change"),
    Column("null_error", "null's", kind="change"),
    Column("inside", "inside"),
    Column("measured_cost_ms", "cost ms", kind=MS),
    Column("cost_ms", "forecast", kind=MS),
    Column("cost_error", "error", kind="change"),
    Column("null_cost_error", "null's", kind="change"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    folders = "the folder of a study; several are read as one"
    add("study", metavar="STUDY", nargs="+", help=folders)
    gpus = "ids of GPUs: 0,1,2,3 is one subset; with --per-node numbers: 16,64"
    add("--gpus", metavar="LIST", help=gpus)
    add("--per-node", type=int, metavar="N", help="GPUs of a host")
    network = f"the network between hosts where none was measured: {NETWORK_FORM}"
    add("--net", metavar="NET", help=network)
    add("--nccl", metavar="SETTINGS", help="such as P2P_LEVEL=LOC,ALGO=Ring")
    add("--holdout", choices=HOLDOUTS, help="forecast measured cells from the others")
    add_choices(parser)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that typed_choices reads."""
    add = parser.add_argument
    strategies = "such as nccl_allreduce,kvstore_device (default: the study's)"
    add("--strategy", metavar="NAMES", help=strategies)
    sizes = "images per GPU, such as 128,256 (default: the study's)"
    add("--batch-size", "--batch", metavar="SIZES", help=sizes)
    for name, example in WORK.items():
        words = f"such as {example}: those of the study that count (default: all)"
        add(f"--{name}", metavar="WORDS", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Print forecasts. Raises OSError, ValueError."""
    wrong = ""
    if arguments.per_node is not None and arguments.gpus is None:
        wrong = f"--per-node {arguments.per_node}: needs --gpus"
    elif arguments.net is not None and arguments.per_node is None:
        wrong = f"--net {arguments.net}: needs --gpus and --per-node"
    if wrong:
        raise ValueError(f"{wrong}, such as --gpus 16,64,256 --per-node 8")
    folders = [open_study(Path(folder)) for folder in arguments.study]
    study = folders[0]
    if len(folders) > 1:
        records = []
        for folder in folders:
            records += [*folder.records, *folder.replaced]
        study = Study.of(records)
    if arguments.holdout:
        for option in ("gpus", "net", "nccl", "strategy", "batch_size", *WORK):
            if getattr(arguments, option) is not None:
                raise ValueError(
                    "--holdout forecasts the study's own cells; "
                    f"--{option.replace('_', '-')} asks for others"
                )
        _print_held_out(arguments, calibrate(study))
    else:
        calibration = calibrate(study, folders[0])
        machine = machine_line(study, folders[0], calibration.machine)
        _print_forecasts(arguments, study, calibration, machine)
    return 0


def read_subsets(text: str, per_node: int | None) -> list[Subset]:
    """Read --gpus. Raises ValueError."""
    parts = list(map(str.strip, text.split(",")))
    subsets = []
    if per_node is None:
        groups = [parts]
        if "+" in text:
            groups = [part.split("+") for part in parts]
        for group in groups:
            if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in group):
                raise ValueError(f"--gpus {text!r}: expected {GPUS_FORM}")
            members = tuple(map(int, group))
            if len(set(members)) < len(members):
                raise ValueError(
                    f"--gpus {text!r}: a GPU stands twice in a subset; expected {GPUS_FORM}"
                )
            subsets.append(Subset(len(members), members=members))
        return subsets
    if not 1 <= per_node <= MOST_GPUS:
        raise ValueError(f"--per-node {per_node}: expected a number of GPUs from 1 to {MOST_GPUS}")
    for part in parts:
        gpus = _positive(part, MOST_GPUS)
        if gpus == 0 or (gpus > per_node and gpus % per_node):
            raise ValueError(
                f"--gpus {text!r}: {part!r} is no multiple of --per-node {per_node}; "
                "expected multiples, such as 16,64,256"
            )
        subsets.append(Subset(min(gpus, per_node), max(1, gpus // per_node)))
    return subsets


def _positive(text: str, most: int) -> int:
    """Return a decimal number from 1 to `most`; 0 for anything else."""
    is_short_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_short_number or int(text) > most:
        return 0
    return int(text)


def read_nccl(text: str | None) -> dict[str, str]:
    """Read --nccl as a study has it: P2P_LEVEL=LOC,ALGO=Ring. Raises ValueError."""
    if text is None or text == UNTOUCHED:
        return {}
    typed: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = map(str.strip, part.partition("="))
        setting = name.lower().removeprefix("nccl_")
        if not value:
            raise ValueError(f"--nccl {part!r}: expected NAME=VALUE, such as P2P_LEVEL=LOC")
        if setting not in FIELDS:
            raise ValueError(f"--nccl {part!r}: {unknown_setting(setting, value)}")
        if setting in typed:
            raise ValueError(
                f"--nccl {text!r}: {name} stands there twice; expected each setting once"
            )
        typed[setting] = value
        if value.isascii() and value.isdigit() and len(value) < 12:
            typed[setting] = int(value)
    return settings(Nccl(**typed))[0]


def refuse_absent(
    text: str, subsets: Sequence[Subset], study: Study, calibration: CalibrationData, hint: str = ""
) -> int:
    """Return how many GPUs the machine has that is asked about. Raises ValueError for others."""
    machine, unit = calibration.machine, calibration.unit
    gpus = machine_gpus(study, machine)
    where = "the machine of the study"
    if len({cell.query.machine for cell in calibration.cells}) > 1:
        where = f"{machine}, which forecasts are for,"
    for subset in subsets:
        for gpu in subset.members:
            if gpu not in gpus:
                raise ValueError(
                    f"--gpus {text!r}: {where} has no {unit} {gpu}; expected "
                    f"{', '.join(map(str, gpus))}{of_unit(hint, unit)}"
                )
    return len(gpus)


def typed_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what add_choices declares as a ForecastRequest has it. Raises ValueError."""
    choices: dict[str, Any] = {}
    if arguments.strategy is not None:
        choices["strategies"] = arguments.strategy.split(",")
    if arguments.batch_size is not None:
        sizes = arguments.batch_size.split(",")
        choices["batches"] = [_positive(size, MOST_BATCH) for size in sizes]
        if 0 in choices["batches"]:
            raise ValueError(
                f"--batch-size {arguments.batch_size!r}: expected images per GPU, such as 128,256"
            )
    choices["work"] = {}
    for name in WORK:
        typed = getattr(arguments, name)
        if typed is not None:
            choices["work"][name] = typed.split(",")
    return choices


def _print_forecasts(
    arguments: argparse.Namespace, study: Study, calibration: CalibrationData, machine: str
) -> None:
    """Print the forecasts that are asked for, below a sentence on their machine."""
    subsets = [Subset(2 * max(cell.ranks for cell in calibration.timed))]
    gpus_of_host = arguments.per_node
    if arguments.gpus is not None:
        subsets = read_subsets(arguments.gpus, arguments.per_node)
        if arguments.per_node is None:
            hint = f"; {NUMBERS}"
            gpus_of_host = refuse_absent(arguments.gpus, subsets, study, calibration, hint)
    request = ForecastRequest(
        subsets=subsets,
        settings=[read_nccl(arguments.nccl)],
        gpus_of_host=gpus_of_host,
        **typed_choices(arguments),
    )
    queries = []
    for several in candidates(calibration, request).values():
        for candidate in several:
            queries.append(candidate.query)
    scores = held_out_scores(calibration, queries)
    if arguments.net is not None:
        links = replace(calibration.links, network=read_network(arguments.net))
        calibration = replace(calibration, links=links)
    answers, rows, notes = _forecasts(calibration, queries, scores)
    refused = [answer["refused"] for answer in answers if "refused" in answer]
    if len(refused) == len(queries):
        raise ValueError(f"no forecast of {_where(queries[0])}: {refused[0]}")
    if arguments.json:
        held_out = len(scores[way_of(calibration, queries[0])])
        calibrated = {"cells": len(calibration.cells), "held_out": held_out}
        facts = {"machine": calibration.machine, "calibration": calibrated, "level": LEVEL}
        print(json.dumps({**facts, "forecasts": answers}))
        return
    for subset in subsets:
        if len(subset.members) == 1:
            gpu = subset.members[0]
            notes.append(of_unit(f"--gpus {gpu} is GPU {gpu} alone; {NUMBERS}", calibration.unit))
    console().print(machine, soft_wrap=True, markup=False)
    console().print(Table.of("forecasts", CAPTION, FORECASTS, rows).to_rich())
    print_notes(notes)


def _forecasts(
    calibration: CalibrationData,
    queries: Sequence[CellQuery],
    scores: Mapping[str, Sequence[float]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the forecasts for programs and as rows, and notes on them."""
    answers: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for query in queries:
        row: dict[str, Any] = {
            "cell": f"{query.workload} · {query.strategy} · {query.batch_size}",
            "where": _where(query),
        }
        if query.ranks > 1 and query.unit == "GPU":
            row["where"] += f", {query.wire}"
        answer: dict[str, Any] = {
            "model": query.workload.model,
            "strategy": query.strategy,
            "batch_size": query.batch_size,
            "gpus": list(query.members) or None,
            "ranks": query.ranks,
            "hosts": query.hosts,
            "wire": str(query.wire),
        }
        try:
            prediction = forecast(calibration, query, scores[way_of(calibration, query)])
        except ValueError as error:
            answer["refused"] = str(error)
            row["basis"] = "no forecast"
            notes.append(f"no forecast of {query.strategy}: {error}")
        else:
            answer["forecast"] = asdict(prediction)
            row |= answer["forecast"]
            row["step"] = Estimate(prediction.step_ms, prediction.low, prediction.high)
            notes += prediction.why
        answers.append(answer)
        rows.append(row)
    return answers, rows, notes


def _where(query: CellQuery) -> str:
    """Return the GPUs of a query: `gpus 0,1`, or how many on how many hosts."""
    if query.members:
        return "gpus " + ",".join(map(str, query.members))
    many = f"{query.ranks} {query.unit}s"
    if query.hosts == 1:
        return many
    return f"{many}, {query.hosts} hosts"


def _print_held_out(arguments: argparse.Namespace, calibration: CalibrationData) -> None:
    held = hold_out(calibration, arguments.holdout)
    errors = errors_of(held)
    if arguments.json:
        cells = []
        for result in held:
            content = None
            if result.forecast is not None:
                content = asdict(result.forecast)
            cells.append(
                {
                    "cell": result.cell.label,
                    "records": list(result.cell.record_ids),
                    "step_ms": result.step_ms,
                    "cost_ms": result.cost_ms,
                    "low": result.low,
                    "high": result.high,
                    "inside": result.inside,
                    "forecast": content,
                    "refused": result.why or None,
                }
            )
        facts = {"holdout": arguments.holdout, "level": LEVEL}
        print(json.dumps({**facts, "cells": cells, "summary": errors}))
        return
    notes = []
    rows = []
    for result in held:
        row: dict[str, Any] = {"cell": result.cell.label, "measured_ms": result.step_ms}
        rows.append(row)
        prediction = result.forecast
        if prediction is None:
            notes.append(f"no forecast of {result.cell.label}: {result.why}")
            continue
        row["step"] = Estimate(prediction.step_ms, result.low, result.high)
        row["error"] = prediction.step_ms / result.step_ms - 1
        row["null_error"] = prediction.null_step_ms / result.step_ms - 1
        row["inside"] = {None: "", True: "yes", False: "no"}[result.inside]
        if result.cost_ms:
            row |= {"measured_cost_ms": result.cost_ms, "cost_ms": prediction.cost_ms}
            row["cost_error"] = prediction.cost_ms / result.cost_ms - 1
            row["null_cost_error"] = prediction.null_cost_ms / result.cost_ms - 1
    out = console()
    out.print(Table.of("forecasts", CAPTION, HELD_OUT, rows).to_rich())
    for line in _error_lines(errors):
        out.print(line)
    print_notes(notes)


def _error_lines(errors: Mapping[str, Any]) -> list[str]:
    """Return how good the forecasts of held-out cells were, in sentences."""
    with_forecast = errors["cells"] - errors["not_forecast"]
    lines = [f"{with_forecast} of {errors['cells']} held-out cells have a forecast"]
    for key, what in (
        ("cost", f"communication cost ({errors['cost_cells']} cells): mean error "),
        ("step", "step: "),
    ):
        if errors[key] is not None:
            null = number(errors[f"null_{key}"], "share")
            lines.append(f"{what}{number(errors[key], 'share')}, the null model's {null}")
    covered, of = errors["covered"], errors["with_interval"]
    if covered is None:
        needed = f"{FEWEST_HELD_OUT + 1} held-out cells are needed"
        lines.append(f"intervals: not enough to state an error; {needed}")
    else:
        share = number(covered / of, "share")
        lines.append(f"90 % intervals: {covered} of {of} cells inside ({share})")
    return lines


def print_notes(notes: Sequence[str]) -> None:
    """Print each note once, the first MOST_NOTES of them."""
    out, several = console(), list(dict.fromkeys(notes))
    for note in several[:MOST_NOTES]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    if len(several) > MOST_NOTES:
        out.print(f"… {len(several) - MOST_NOTES} more (--json has all)")
