"""`python -m analysis predict STUDY…`: what runs should give before they are measured.

A sentence a requested size, the command that would measure next, and with `--details` the parts of
each step beside what it would be if nothing changed. `--holdout condition|size|transport|batch|
model|small` forecasts measured cells from the others and says how far off that was. Several folders
are read as one study. The options that `advise` has too are read here.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.commands.terminal_tables import print_notes, print_table
from analysis.console import console, print_text
from analysis.findings.scaling import curves
from analysis.prediction.calibration_data import CalibrationData, MeasuredCell, calibrate
from analysis.prediction.candidates import (
    WORK,
    Candidate,
    ForecastRequest,
    candidates,
    machine_gpus,
    machine_line,
    measuring_command,
)
from analysis.prediction.forecast import (
    ASSUMED_NETWORK,
    FEWEST_HELD_OUT,
    HOLDOUTS,
    LEVEL,
    Forecast,
    errors_of,
    forecast,
    held_out_cells,
    hold_out,
    scores_of,
    way_of,
)
from analysis.prediction.link_model import NETWORK_FORM, read_network
from analysis.prediction.query import CellQuery, Subset, Workload
from analysis.prediction.recorded_forecast import shown_low_ms
from analysis.report.numbers import NumberFormat, number, rounded
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate
from analysis.study.names import of_unit
from analysis.study.study import Study, open_study
from analysis.text import count
from conf.nccl import FIELDS, Nccl, settings, unknown_setting

FIRST_NOTES, MOST_NOTES = 6, 12
MOST_GPUS, MOST_BATCH = 1 << 20, 1 << 24
UNTOUCHED = "default"  # --nccl of no setting
GPUS_FORM = (
    "ids of GPUs of the study's machine, such as 0,1 (several subsets: 0+1,0+2); or how many GPUs, "
    "with --per-node: --gpus 16,64,256 --per-node 8"
)
NUMBERS = "to ask for a number of GPUs, not for ids, add --per-node, as in --gpus 16 --per-node 8"
NAIVE = "naive: the forecast that takes overhead and compute from the most similar run."
PARTS = f"overhead = after backward + slowdown of compute + on one GPU; {NAIVE}"
Subject = tuple[Workload, str]  # and a strategy
LEAST_ERROR = 0.01  # as which a forecast without error bars is rounded
MS = NumberFormat(decimals=2)
# The first columns matter most: what does not fit goes to further rows.
FORECASTS = (
    Column("cell", "configuration"),
    Column("step", "step ms", kind=MS, bounded=True),
    Column("images_per_second", "images/s", kind="rate"),
    Column("efficiency", "efficiency", kind="share", bounded=True),
    Column("cost_ms", "overhead ms", kind=MS),
    Column("null_step_ms", "naive ms", kind=MS),
    Column("tail_ms", "after backward ms", kind=MS),
    Column("contention_ms", "slowdown ms", kind=MS),
    Column("own_work_ms", "on one GPU ms", kind=MS),
    Column("basis", "basis"),
)
HELD_OUT = (
    Column("cell", "held-out configuration"),
    Column("measured_ms", "measured step ms", kind=MS),
    Column("step", "forecast ms", kind=MS, bounded=True),
    Column("error", "error", kind="change"),
    Column("null_error", "naive error", kind="change"),
    Column("inside", "in interval"),
    Column("measured_cost_ms", "measured overhead ms", kind=MS),
    Column("cost_ms", "forecast ms", kind=MS),
    Column("cost_error", "error", kind="change"),
    Column("null_cost_error", "naive error", kind="change"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    folders = "the folder of a study; several are read as one"
    add("study", metavar="STUDY", nargs="+", help=folders)
    gpus = "ids of GPUs: 0,1,2,3 is one subset; with --per-node how many: 16,64"
    add("--gpus", metavar="LIST", help=gpus)
    add("--per-node", type=int, metavar="N", help="GPUs of a host")
    network = f"the network between hosts where none was measured: {NETWORK_FORM}"
    add("--net", metavar="NET", help=network)
    add("--nccl", metavar="SETTINGS", help="such as P2P_LEVEL=LOC,ALGO=Ring")
    add(
        "--holdout",
        choices=HOLDOUTS,
        help="cross-validate: forecast measured configurations from the others",
    )
    add("--details", action="store_true", help="the parts of each step, as a table")
    add_choices(parser)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that typed_choices reads."""
    add = parser.add_argument
    strategies = "such as nccl_allreduce,kvstore_device (default: the study's)"
    add("--strategy", metavar="NAMES", help=strategies)
    sizes = "images per GPU, such as 128,256 (default: the study's)"
    add("--batch-size", "--batch", metavar="SIZES", help=sizes)
    for name, example in WORK.items():
        words = f"such as {example}: use only these runs of the study (default: all)"
        add(f"--{name}", metavar="WORDS", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Print forecasts. Raises OSError, ValueError."""
    example = "such as --gpus 16,64,256 --per-node 8"
    if arguments.per_node is not None and arguments.gpus is None:
        raise ValueError(f"--per-node {arguments.per_node}: needs --gpus, {example}")
    if arguments.net is not None and arguments.per_node is None:
        missing = "--per-node" if arguments.gpus else "--gpus and --per-node"
        raise ValueError(f"--net {arguments.net}: needs {missing}, {example}")
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
                    "--holdout forecasts the study's own configurations; "
                    f"leave out --{option.replace('_', '-')}"
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
                    f"--gpus {text!r}: a GPU is named twice; expected each once in a subset"
                )
            subsets.append(Subset(len(members), members=members))
        return subsets
    if not 1 <= per_node <= MOST_GPUS:
        raise ValueError(f"--per-node {per_node}: expected a number of GPUs from 1 to {MOST_GPUS}")
    for part in parts:
        gpus = _positive(part, MOST_GPUS)
        if gpus == 0 or (gpus > per_node and gpus % per_node):
            raise ValueError(
                f"--gpus {text!r}: {part!r} is not a multiple of --per-node {per_node}; "
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
            raise ValueError(f"--nccl {text!r}: {name} is given twice; expected each setting once")
        typed[setting] = value
        if value.isascii() and value.isdigit() and len(value) < 12:
            typed[setting] = int(value)
    return settings(Nccl(**typed))[0]


def refuse_absent(
    text: str, subsets: Sequence[Subset], study: Study, calibration: CalibrationData, hint: str = ""
) -> tuple[int, ...]:
    """Return the GPUs of the machine that is asked about. Raises ValueError for others."""
    machine, unit = calibration.machine, calibration.unit
    gpus = machine_gpus(study, machine)
    where = "the machine of the study"
    if len({cell.query.machine for cell in calibration.cells}) > 1:
        where = f"forecasts are for the machine of the first study ({machine}), which"
    for subset in subsets:
        for gpu in subset.members:
            if gpu not in gpus:
                raise ValueError(
                    f"--gpus {text!r}: {where} has no {unit} {gpu}; expected "
                    f"{', '.join(map(str, gpus))}{of_unit(hint, unit)}"
                )
    return gpus


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
    subsets = [Subset(2 * max(cell.query.ranks for cell in calibration.timed))]
    gpus_of_host = arguments.per_node
    if arguments.gpus is not None:
        subsets = read_subsets(arguments.gpus, arguments.per_node)
        if arguments.per_node is None:
            hint = f"; {NUMBERS}"
            gpus_of_host = len(refuse_absent(arguments.gpus, subsets, study, calibration, hint))
    request = ForecastRequest(
        subsets=subsets,
        settings=[read_nccl(arguments.nccl)],
        gpus_of_host=gpus_of_host,
        **typed_choices(arguments),
    )
    several = list(chain.from_iterable(candidates(calibration, request).values()))
    held = held_out_cells(calibration, [candidate.query for candidate in several])
    scores = {way: scores_of(results) for way, results in held.items()}
    if arguments.net is not None:
        links = replace(calibration.links, network=read_network(arguments.net))
        calibration = replace(calibration, links=links)
    predictions, refused = forecasts(calibration, several, scores)
    if not predictions:
        raise ValueError(f"no forecast of {devices_of(several[0].query)}: {refused[several[0]]}")
    doubts, most = measured_doubts(study, calibration, [each.query for each in predictions])
    if arguments.json:
        answers = [_forecast_json(each, predictions.get(each), refused, most) for each in several]
        of_first = len(scores[way_of(calibration, several[0].query)])
        content = {
            "machine": calibration.machine,
            "calibration": {"cells": len(calibration.cells), "held_out": of_first},
            "level": LEVEL,
            "doubts": doubts,
            "forecasts": answers,
        }
        print(json.dumps(content))
        return
    notes = [_no_better(errors_of(results)) for results in held.values()]
    for candidate, why in refused.items():
        notes.append(f"no forecast of {candidate.query.strategy}: {why}")
    for subset in subsets:
        if len(subset.members) == 1:
            gpu = subset.members[0]
            notes.append(of_unit(f"--gpus {gpu} is GPU {gpu} alone; {NUMBERS}", calibration.unit))
    for line in doubts:
        print_text(f"[bold yellow]{escape(line)}[/bold yellow]")
    print_text(escape(machine))
    _print_answer(predictions, most, notes, arguments.details)
    unknown = max(predictions, key=lambda each: predictions[each].basis == ASSUMED_NETWORK)
    gpus = machine_gpus(study, calibration.machine)
    print_next(measuring_command([unknown], gpus, Path(arguments.study[0])))


def forecasts(
    calibration: CalibrationData,
    several: Iterable[Candidate],
    scores: Mapping[str, Sequence[float]],
) -> tuple[dict[Candidate, Forecast], dict[Candidate, str]]:
    """Return the forecasts of candidates as they are shown, and {candidate without one: why}.

    `scores` are those of held-out cells by way_of.
    """
    predictions = {}
    refused = {}
    for candidate in several:
        query = candidate.query
        try:
            made = forecast(calibration, query, scores[way_of(calibration, query)])
        except ValueError as error:
            refused[candidate] = of_unit(str(error), candidate.query.unit)
            continue
        if made.low is not None:
            # Its draws may lie above 100 % efficiency, as one GPU's step is not exactly known.
            low = shown_low_ms(made.low, made.step_ms, made.efficiency, query.ranks)
            made = replace(made, low=low)
        predictions[candidate] = made
    return predictions, refused


def measured_doubts(
    study: Study, calibration: CalibrationData, queries: Iterable[CellQuery]
) -> tuple[list[str], dict[Subject, tuple[CellQuery, float]]]:
    """Return a sentence for each model and strategy of queries whose largest measured cell is
    suspect, or has another efficiency than its own forecast; and the cell and its efficiency where
    the forecast promises more.
    """
    shares: dict[tuple[str, ...], Estimate | None] = {}
    for curve in curves(study).curves:
        shares |= {point.record_ids: point.efficiency for point in curve.points}
    asked = dict.fromkeys((query.workload, query.strategy) for query in queries)
    largest: dict[Subject, MeasuredCell] = {}
    for cell in sorted(calibration.timed, key=lambda cell: -cell.query.ranks):
        largest.setdefault((cell.query.workload, cell.query.strategy), cell)
    lines = []
    most: dict[Subject, tuple[CellQuery, float]] = {}
    for measured in filter(None, map(largest.get, asked)):
        query, share = measured.query, shares.get(measured.record_ids)
        where = f"{query.workload} · {query.strategy} · batch {query.batch_size}"
        what = f"{where} on {devices_of(query)}: the measured "
        what += f"efficiency of {number(float(share.value), 'share')}" if share else "rate"
        if not measured.valid:
            records = study.records_of(measured.record_ids)
            codes = dict.fromkeys(chain(*(record.validity.against for record in records)))
            doubt = f"is suspect ({', '.join(codes)}), so forecasts cannot be checked against it"
            lines.append(f"Not reliable: {what} {doubt}.")
        elif share is not None:
            with suppress(ValueError):  # not every measured cell has a forecast
                own = forecast(calibration, query).efficiency
                low, high = share.low or share.value, share.high or share.value
                if not low - LEAST_ERROR <= own <= high + LEAST_ERROR:
                    forecast_share = number(own, "share")
                    lines.append(
                        f"{what} differs from the forecast, {forecast_share}: trust the run."
                    )
                    if own > share.value:
                        most[query.workload, query.strategy] = query, float(share.value)
    return lines, most


def _print_answer(
    predictions: Mapping[Candidate, Forecast],
    most: Mapping[Subject, tuple[CellQuery, float]],
    notes: list[str],
    details: bool,
) -> None:
    by_subject: dict[str, list[str]] = defaultdict(list)
    rows = []
    for candidate, prediction in predictions.items():
        query = candidate.query
        subject = f"{query.workload} · {query.strategy} · batch {query.batch_size}"
        measured = most.get((query.workload, query.strategy))
        by_subject[subject].append(forecast_sentence(query, prediction, measured))
        name = f"{subject} · {devices_of(query)}"
        share = most_measured(query, prediction, measured)
        if share is not None:
            name += f" (a run reached no more than {number(share, 'share')})"
        row = {"cell": name, "efficiency": efficiency_of(prediction)}
        row["step"] = Estimate(prediction.step_ms, prediction.low, prediction.high)
        rows.append(asdict(prediction) | row)
        notes += reversed(prediction.why)
    if details:
        print_table(Table.of("forecasts", f"{_about_intervals(rows)}{PARTS}", FORECASTS, rows))
        print_notes(notes, MOST_NOTES)
        return
    for subject, lines in by_subject.items():
        print_text(f"[bold]{escape(subject)}[/bold]")
        for line in lines:
            print_text(f"  {escape(line)}")
    if any("about" in line for line in chain(*by_subject.values())):
        print_text('Where a forecast says "about", its error is not known.')
    if any(each.basis == ASSUMED_NETWORK for each in predictions.values()):
        print_text("No run measured the network: its bandwidth and latency are those of --net.")
    print_notes(notes, FIRST_NOTES)


def _about_intervals(rows: Iterable[Mapping[str, Any]]) -> str:
    if any("step" in row and row["step"].low is not None for row in rows):
        return f"Below each value is its {100 * LEVEL:.0f} % prediction interval. "
    return ""


def efficiency_of(prediction: Forecast) -> Estimate:
    """Return the efficiency of a forecast as it is shown, with its interval."""
    alone_ms = prediction.efficiency * prediction.step_ms
    if prediction.low is None or prediction.high is None:
        return Estimate(prediction.efficiency)
    return Estimate(prediction.efficiency, alone_ms / prediction.high, alone_ms / prediction.low)


def _forecast_json(
    candidate: Candidate,
    prediction: Forecast | None,
    refused: Mapping[Candidate, str],
    most: Mapping[Subject, tuple[CellQuery, float]],
) -> dict[str, Any]:
    query = candidate.query
    answer: dict[str, Any] = {
        "model": query.workload.model,
        "optimize": query.workload.requested("optimize", "eager"),
        "strategy": query.strategy,
        "batch_size": query.batch_size,
        "gpus": list(query.members) or None,
        "ranks": query.ranks,
        "hosts": query.hosts,
        "wire": str(query.wire),
    }
    if prediction is None:
        return answer | {"refused": refused[candidate]}
    measured = most.get((query.workload, query.strategy))
    answer["most_measured_efficiency"] = most_measured(query, prediction, measured)
    return answer | {"forecast": asdict(prediction)}


def most_measured(
    query: CellQuery, prediction: Forecast, measured: tuple[CellQuery, float] | None
) -> float | None:
    """Return the efficiency of the largest measured cell where more is forecast of a larger one."""
    if measured is None or query.ranks < 2 or prediction.efficiency <= measured[1]:
        return None
    where, share = measured
    grows = query.ranks >= where.ranks and query.batch_size <= where.batch_size
    return share if grows else None


def forecast_sentence(
    query: CellQuery, prediction: Forecast, measured: tuple[CellQuery, float] | None = None
) -> str:
    """Return a forecast in words, without digits beyond its error; no higher efficiency than was
    measured where that contradicts forecasts.
    """
    efficiency, error = efficiency_of(prediction), LEAST_ERROR
    if prediction.low is not None and prediction.high is not None:
        error = (prediction.high - prediction.low) / 2 / prediction.step_ms
    rate = f"{rounded(prediction.images_per_second, error * prediction.images_per_second)} images/s"
    best = f"{rounded(100 * prediction.efficiency, 100 * error)} %"
    words = f"about {best} efficiency ({rate})."
    share = most_measured(query, prediction, measured)
    if query.ranks < 2:
        words = f"about {rate}."
    elif measured is not None and share is not None:
        images = prediction.images_per_second * share / prediction.efficiency
        words = (
            f"at most {rounded(images, error * images)} images/s, at the "
            f"{number(share, 'share')} efficiency measured on {devices_of(measured[0])}."
        )
    elif efficiency.low is not None and efficiency.high is not None:
        low, high = (rounded(100 * end, 100 * error) for end in (efficiency.low, efficiency.high))
        words = f"{low} to {high} % efficiency; expected {best} ({rate})."
        if prediction.growth > 1:
            words = f"{low} to {high} % efficiency; without a slow rank {best} ({rate})."
    return f"{devices_of(query)}: {words}"


def _no_better(errors: Mapping[str, Any]) -> str:
    if errors["step"] is None or errors["step"] < errors["null_step"]:
        return ""
    step, null = (number(errors[key], "share") for key in ("step", "null_step"))
    return (
        f"Warning: in cross-validation the naive forecast, a step as long as on one device, had a "
        f"mean error of {null}, these forecasts {step}"
    )


def print_next(command: str) -> None:
    """Print the command that measures next, in one line that can be pasted."""
    print_text("Measure next:")
    console().print(f"  {command}", soft_wrap=True, markup=False)


def devices_of(query: CellQuery) -> str:
    """Return the GPUs of a query: `GPUs 0,1`, or how many on how many hosts."""
    if query.members:
        return f"{query.unit}{'s' * (query.ranks > 1)} {','.join(map(str, query.members))}"
    many = count(query.ranks, query.unit)
    if query.hosts == 1:
        return many
    return f"{many} on {query.hosts} hosts"


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
        if result.cost_ms is not None:
            row |= {"measured_cost_ms": result.cost_ms, "cost_ms": prediction.cost_ms}
        if result.cost_ms is not None and result.cost_ms > 0:
            row["cost_error"] = prediction.cost_ms / result.cost_ms - 1
            row["null_cost_error"] = prediction.null_cost_ms / result.cost_ms - 1
    print_table(Table.of("forecasts", _about_intervals(rows) + NAIVE, HELD_OUT, rows))
    for line in _error_lines(errors):
        print_text(line)
    print_notes(notes, MOST_NOTES)


def _error_lines(errors: Mapping[str, Any]) -> list[str]:
    with_forecast = errors["cells"] - errors["not_forecast"]
    lines = [f"{with_forecast} of {errors['cells']} held-out configurations have a forecast."]
    for key, what in (("cost", "overhead"), ("step", "step time")):
        if errors[key] is not None:
            error, null = number(errors[key], "share"), number(errors[f"null_{key}"], "share")
            cells = errors["cost_cells"] if key == "cost" else with_forecast
            lines.append(
                f"{count(cells, 'forecast')} of the {what} were off by {error} on average, "
                f"naive forecasts by {null}."
            )
    covered, of = errors["covered"], errors["with_interval"]
    if covered is None:
        needed = f"{FEWEST_HELD_OUT + 1} held-out configurations"
        return [*lines, f"Whether error bars hold is not known: that needs {needed}."]
    share = number(covered / of, "share")
    return [*lines, f"90 % prediction intervals: {covered} of {of} inside ({share})."]
