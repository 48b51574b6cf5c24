"""`python -m analysis predict STUDY` and `… advise STUDY --gpus 0+1,0+3`.

predict: what cells should give before they run, with intervals and beside a null model.
`--holdout condition|size|transport|batch|model` forecasts measured cells from the others and says
how far off that was. Several folders are read as one study.
advise: which of several cells is best. Cells that were measured count by their runs.
Exit status: 0 done, 2 wrong input or request.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.commands.forecast_options import (
    read_batches,
    read_nccl,
    read_subsets,
    refuse_absent,
)
from analysis.console import console
from analysis.prediction.advise import (
    Advice,
    Candidate,
    ForecastRequest,
    RankedCell,
    advise,
    candidates,
    studied_settings,
    topology_of,
)
from analysis.prediction.calibration import CalibrationData, calibrate
from analysis.prediction.forecast import (
    FEWEST_HELD_OUT,
    HOLDOUTS,
    LEVEL,
    HeldOut,
    HeldOutScores,
    errors_of,
    forecast,
    hold_out,
)
from analysis.prediction.links import NETWORK_FORM, read_network
from analysis.prediction.query import CellQuery, Subset
from analysis.prediction.strategies import exchange_of
from analysis.report.numbers import NumberFormat, number
from analysis.report.table import Column, Table
from analysis.study.estimates import Estimate
from analysis.study.names import of_unit
from analysis.study.study import Study, open_study
from analysis.text import count

MOST_NOTES, MOST_RANKED = 12, 10
UNTOUCHED = "default"  # --nccl of no setting
NUMBERS = "a number of GPUs needs --per-node too, such as --gpus 16 --per-node 8"
CAPTION = f"{100 * LEVEL:.0f} % intervals stand below their values"
MS = NumberFormat(decimals=2)
FORECASTS = (
    Column("cell", "cell"),
    Column("where", "where"),
    Column("step_ms", "step ms", kind=MS, bounded=True),
    Column("images_per_second", "img/s", kind="rate"),
    Column("efficiency", "efficiency", kind="share"),
    Column("cost_ms", "cost ms", kind=MS),
    Column("tail_ms", "tail", kind=MS),
    Column("contention_ms", "contention", kind=MS),
    Column("own_work_ms", "own", kind=MS),
    Column("waiting_ms", "waiting", kind=MS),
    Column("null_step_ms", "null's step", kind=MS),
    Column("basis", "basis"),
)
HELD_OUT = (
    Column("cell", "held-out cell"),
    Column("measured_ms", "step ms", kind=MS),
    Column("step_ms", "forecast", kind=MS, bounded=True),
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
    if parser.prog.endswith("advise"):
        add("study", metavar="STUDY", help="the folder of a study with training cells")
        add("--gpus", metavar="LIST", required=True,
            help="subsets to choose from, of one size, such as 0+1,0+3")  # fmt: skip
        add("--nccl", metavar="SETTINGS", action="append",
            help="such as P2P_LEVEL=LOC,ALGO=Ring; again for others to choose from; "
            f"{UNTOUCHED}: none (default: the study's)")  # fmt: skip
    else:
        add("study", metavar="STUDY", nargs="+",
            help="the folder of a study; several are read as one")  # fmt: skip
        add("--gpus", metavar="LIST",
            help="ids of GPUs: 0,1,2,3 is one subset; with --per-node numbers: 16,64")  # fmt: skip
        add("--per-node", type=int, metavar="N", help="GPUs of a host")
        add("--net", metavar="NET",
            help=f"the network between hosts that were not measured: {NETWORK_FORM}")  # fmt: skip
        add("--nccl", metavar="SETTINGS", help="such as P2P_LEVEL=LOC,ALGO=Ring")
        add("--holdout", choices=HOLDOUTS, help="forecast measured cells from the others")
    add("--strategy", metavar="NAMES",
        help="such as nccl_allreduce,kvstore_device (default: the study's)")  # fmt: skip
    add("--batch", metavar="SIZES",
        help="images per GPU, such as 128,256 (default: the study's)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print forecasts, or an advice. Raises OSError, ValueError."""
    if arguments.command == "advise":
        _advise(arguments)
        return 0
    if arguments.per_node is not None and arguments.gpus is None:
        raise ValueError(
            f"--per-node {arguments.per_node}: accepted together with --gpus, such as "
            "--gpus 16,64,256 --per-node 8"
        )
    if arguments.net is not None and arguments.per_node is None:
        raise ValueError(
            f"--net {arguments.net}: accepted together with --gpus and --per-node, such as "
            "--gpus 16,64 --per-node 8"
        )
    folders = [open_study(Path(folder)) for folder in arguments.study]
    study = folders[0]
    if len(folders) > 1:
        records = []
        for folder in folders:
            records += [*folder.records, *folder.replaced]
        study = Study.of(records)
    calibration = calibrate(study)
    if arguments.holdout:
        for option in ("gpus", "net", "nccl", "strategy", "batch"):
            if getattr(arguments, option) is not None:
                raise ValueError(
                    f"--holdout forecasts the study's own cells; --{option} asks for others"
                )
        _print_held_out(arguments, calibration)
    else:
        _print_forecasts(arguments, study, calibration)
    return 0


def _request(
    arguments: argparse.Namespace, subsets: Sequence[Subset], gpus_of_host: int | None
) -> ForecastRequest:
    strategies, batches = arguments.strategy, arguments.batch
    sizes = None
    if batches is not None:
        sizes = read_batches(batches)
    return ForecastRequest(
        subsets=subsets,
        strategies=None if strategies is None else strategies.split(","),
        batches=sizes,
        gpus_of_host=gpus_of_host,
    )


# --- predict


def _print_forecasts(
    arguments: argparse.Namespace, study: Study, calibration: CalibrationData
) -> None:
    subsets = [Subset(2 * max(cell.ranks for cell in calibration.timed()))]
    gpus_of_host = arguments.per_node
    if arguments.gpus is not None:
        subsets = read_subsets(arguments.gpus, arguments.per_node)
        if arguments.per_node is None:
            gpus_of_host = refuse_absent(
                arguments.gpus, subsets, study, calibration, f"; {NUMBERS}"
            )
    several_hosts = any(subset.hosts > 1 for subset in subsets)
    measured_hosts = any(curve.hosts > 1 for curve in calibration.links.curves)
    if several_hosts and arguments.net is None and not measured_hosts:
        raise ValueError(
            "--gpus on several hosts: no cell was measured between hosts; say --net 8x50GB/s,5us"
        )
    request = replace(
        _request(arguments, subsets, gpus_of_host),
        settings=[read_nccl(arguments.nccl) if arguments.nccl else {}],
        network=None if arguments.net is None else read_network(arguments.net),
    )
    queries = []
    for several in candidates(calibration, request).values():
        queries += [candidate.query for candidate in several]
    scores = HeldOutScores(calibration)
    json_rows: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    refused, notes = [], []
    for query in queries:
        facts = _facts(query)
        where = _where(query)
        if query.ranks > 1 and query.unit == "GPU":
            where = f"{where}, {query.wire}"
        name = f"{query.workload} · {query.strategy} · {query.batch_size}"
        row = {"cell": name, "where": where}
        try:
            prediction = forecast(calibration, query, scores.of(query))
        except ValueError as error:
            refused.append(str(error))
            json_rows.append({**facts, "refused": str(error)})
            rows.append({**row, "basis": "no forecast"})
            notes.append(f"no forecast of {query.strategy}: {error}")
            continue
        json_rows.append({**facts, "forecast": prediction.to_json()})
        rows.append(
            {
                **asdict(prediction),
                **row,
                "step_ms": Estimate(prediction.step_ms, prediction.low, prediction.high),
            }
        )
        notes += prediction.why
    if len(refused) == len(queries):
        raise ValueError(f"no forecast of {_where(queries[0])}: {refused[0]}")
    if arguments.json:
        held_out = len(scores.of(queries[0]))
        calibrated = {"cells": len(calibration.cells), "held_out": held_out}
        print(json.dumps({"calibration": calibrated, "level": LEVEL, "forecasts": json_rows}))
        return
    for subset in subsets:
        if len(subset.members) == 1:
            gpu = subset.members[0]
            notes.append(of_unit(f"--gpus {gpu} is GPU {gpu} alone; {NUMBERS}", calibration.unit))
    _print_table(FORECASTS, rows)
    _print_notes(notes)


def _facts(query: CellQuery) -> dict[str, Any]:
    return {
        "model": query.workload.model,
        "strategy": query.strategy,
        "batch_size": query.batch_size,
        "gpus": list(query.members) or None,
        "ranks": query.ranks,
        "hosts": query.hosts,
        "wire": str(query.wire),
    }


def _where(query: CellQuery) -> str:
    """Return the GPUs of a query: `gpus 0,1`, or how many on how many hosts."""
    if query.members:
        return "gpus " + ",".join(map(str, query.members))
    many = f"{query.ranks} {query.unit}s"
    return many if query.hosts == 1 else f"{many}, {query.hosts} hosts"


# --- predict --holdout


def _print_held_out(arguments: argparse.Namespace, calibration: CalibrationData) -> None:
    held = hold_out(calibration, arguments.holdout)
    errors = errors_of(held)
    if arguments.json:
        cells = [_held_out_json(result) for result in held]
        facts = {"holdout": arguments.holdout, "level": LEVEL}
        print(json.dumps({**facts, "cells": cells, "summary": asdict(errors)}))
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
        row["step_ms"] = Estimate(prediction.step_ms, result.low, result.high)
        row["error"] = prediction.step_ms / result.step_ms - 1
        row["null_error"] = prediction.null_step_ms / result.step_ms - 1
        row["inside"] = {None: "", True: "yes", False: "no"}[result.inside]
        if result.cost_ms:
            row |= {"measured_cost_ms": result.cost_ms, "cost_ms": prediction.cost_ms}
            row["cost_error"] = prediction.cost_ms / result.cost_ms - 1
            row["null_cost_error"] = prediction.null_cost_ms / result.cost_ms - 1
    _print_table(HELD_OUT, rows)
    out = console()
    with_forecast = errors.cells - errors.not_forecast
    out.print(f"{with_forecast} of {errors.cells} held-out cells have a forecast")
    if errors.cost is not None:
        out.print(
            f"communication cost ({errors.cost_cells} cells): mean error "
            f"{number(errors.cost, 'share')}, the null model's {number(errors.null_cost, 'share')}"
        )
    if errors.step is not None:
        out.print(
            f"step: {number(errors.step, 'share')}, the null model's "
            f"{number(errors.null_step, 'share')}"
        )
    if errors.covered is None:
        out.print(
            f"intervals: not enough to state an error; {FEWEST_HELD_OUT + 1} held-out cells are "
            "needed"
        )
    else:
        share = number(errors.covered / errors.with_interval, "share")
        out.print(
            f"90 % intervals: {errors.covered} of {errors.with_interval} cells inside ({share})"
        )
    _print_notes(notes)


def _held_out_json(result: HeldOut) -> dict[str, Any]:
    return {
        "cell": result.cell.label,
        "records": list(result.cell.record_ids),
        "step_ms": result.step_ms,
        "cost_ms": result.cost_ms,
        "low": result.low,
        "high": result.high,
        "inside": result.inside,
        "forecast": result.forecast.to_json() if result.forecast else None,
        "refused": result.why or None,
    }


# --- advise


def _advise(arguments: argparse.Namespace) -> None:
    study = open_study(Path(arguments.study))
    calibration = calibrate(study)
    subsets = read_subsets(arguments.gpus, None)
    gpus_of_host = refuse_absent(arguments.gpus, subsets, study, calibration)
    if len({subset.gpus for subset in subsets}) > 1:
        raise ValueError(
            f"--gpus {arguments.gpus!r}: accepted are subsets of one size, so that their rates can "
            "be compared"
        )
    choices = studied_settings(study)
    if arguments.nccl:
        choices = [{} if typed == UNTOUCHED else read_nccl(typed) for typed in arguments.nccl]
    request = replace(
        _request(arguments, subsets, gpus_of_host),
        settings=choices,
        topology=topology_of(study, calibration.machine),
        every_option=True,
    )
    scores = HeldOutScores(calibration)
    advices: list[Advice] = []
    refused: dict[str, str] = {}
    for workload, several in candidates(calibration, request).items():
        try:
            advices.append(advise(calibration, several, scores))
        except ValueError as error:  # UnknownLink too
            refused[str(workload)] = str(error)
    if not advices:
        raise ValueError(next(iter(refused.values())))
    if arguments.json:
        shown = [_advice_json(advice, scores) for advice in advices]
        print(json.dumps({"study": study.name, "advice": shown, "refused": refused}))
        return
    for advice in advices:
        _print_advice(study, advice)
    for model, why in refused.items():
        console().print(f"No advice on {model}: {why}", soft_wrap=True, markup=False)


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    query = candidate.query
    return {
        "gpus": list(query.members),
        "strategy": query.strategy,
        "options": dict(query.options),
        "batch_size": query.batch_size,
        "nccl": dict(candidate.nccl),
        "links": candidate.link_class,
    }


def _advice_json(advice: Advice, scores: HeldOutScores) -> dict[str, Any]:
    cells = []
    for cell in advice.ranked:
        cells.append(
            {
                **_candidate_json(cell.candidate),
                "images_per_second": cell.rate,
                "low": cell.low,
                "high": cell.high,
                "runs": cell.runs,
                "high_is_bounded": cell.bounded,
                "chance_to_be_fastest": cell.p_fastest,
                "as_fast_as_the_first": cell.as_fast,
            }
        )
    query = advice.first.candidate.query
    refused = [{**_candidate_json(candidate), "why": why} for candidate, why in advice.refused]
    return {
        "model": str(query.workload),
        "machine": query.machine,
        "level": LEVEL,
        "held_out": len(scores.of(query)),
        "cells": cells,
        "refused": refused,
    }


def _print_advice(study: Study, advice: Advice) -> None:
    first = advice.first
    query = first.candidate.query
    differing = _differing(advice.ranked)
    columns = (
        Column("gpus", f"{query.unit}s", _members),
        Column("strategy", "strategy", lambda cell: _strategy(cell.candidate.query, differing)),
        Column("batch_size", "batch", lambda cell: cell.candidate.query.batch_size, "count"),
        Column("nccl", "NCCL", _nccl),
        Column(
            "images_per_second", "images/s",
            lambda cell: Estimate(cell.rate, cell.low, cell.high), "rate", bounded=True,
        ),
        Column("behind", "to the first", lambda cell: _behind(cell, first)),
        Column("chance", "chance to be fastest", lambda cell: cell.p_fastest, "share"),
        Column("source", "from", _source),
    )  # fmt: skip
    out = console()
    out.print(f"[bold]{escape(str(query.workload))}[/bold]")
    _print_table(columns, advice.ranked[:MOST_RANKED])
    rest = len(advice.ranked) - MOST_RANKED
    if rest > 0:
        out.print(f"… and {count(rest, 'more cell')} below (--json has all)")
    out.print(advice_sentences(advice), soft_wrap=True)
    for why in dict.fromkeys(why for _, why in advice.refused):
        out.print(f"Not ranked: {escape(why)}", soft_wrap=True)
    notes = []
    machines = {runs.provenance.get("machine", "") for runs in study.runs}
    if len(machines) > 1:
        notes.append(
            f"the study has cells of {len(machines)} machines: this is for {query.machine}, where "
            "most of them ran"
        )
    queries = [cell.candidate.query for cell in advice.ranked[:MOST_RANKED]]
    if any(shown.strategy != "none" and not exchange_of(shown).waits for shown in queries):
        notes.append(
            "with an asynchronous strategy ranks do not wait for each other: it trains with older "
            "weights"
        )
    notes += [of_unit(cell.why, query.unit) for cell in advice.ranked if cell.why]
    _print_notes(notes)


def _members(cell: RankedCell) -> str:
    """Return the GPUs, and how many servers have GPUs of their own."""
    query = cell.candidate.query
    members = ",".join(map(str, query.members))
    if query.shares_gpu or not exchange_of(query).gpu_servers:
        return members
    return f"{members} + {count(max(1, query.servers), 'server')}"


def _differing(cells: Iterable[RankedCell]) -> set[tuple[str, str]]:
    """Return (strategy, option) of the options that cells of a strategy have otherwise."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cell in cells:
        query = cell.candidate.query
        for option, value in query.options:
            values[query.strategy, option].add(value)
    return {key for key, several in values.items() if len(several) > 1}


def _strategy(query: CellQuery, differing: set[tuple[str, str]]) -> str:
    words = [query.strategy]
    for name, value in query.options:
        if (query.strategy, name) in differing:
            words.append(f"{name}={value}")
    return " ".join(words)


def _nccl(cell: RankedCell) -> str:
    settings = [f"{name.removeprefix('NCCL_')}={value}" for name, value in cell.candidate.nccl]
    return ", ".join(settings) or UNTOUCHED


def _behind(cell: RankedCell, first: RankedCell) -> str:
    change = number(cell.rate / first.rate - 1, "change")
    return f"{change} ~" if cell.as_fast and cell is not first else change


def _source(cell: RankedCell) -> str:
    return count(cell.runs, "run") if cell.runs else "forecast"


def advice_sentences(advice: Advice) -> str:
    """Return what the table of an advice says, in words."""
    first, query = advice.first, advice.first.candidate.query
    unit = f"{query.unit}s" if len(query.members) > 1 else query.unit
    on = f"{unit} {_members(first)}"
    if len({cell.candidate.query.batch_size for cell in advice.ranked}) > 1:
        on += f" with batch {query.batch_size}"
    how = "measured" if first.runs else "forecast"
    rate = number(first.rate, "rate")
    words = f"First is {query.strategy} on {on}: {rate} images/s, {how}."
    if len(advice.ranked) == 1:
        return words
    alike = sum(cell.as_fast for cell in advice.ranked[1:])
    if alike:
        return (
            f"{words} {count(alike, 'cell')} cannot be told from it (~): each is as fast with a "
            "chance of 5 % or more."
        )
    return f"{words} Every other cell is slower with a chance of more than 95 %."


def _print_table(columns: Sequence[Column], rows: Iterable[Any]) -> None:
    console().print(Table.of("forecasts", CAPTION, columns, rows).to_rich())


def _print_notes(notes: Sequence[str]) -> None:
    out, several = console(), list(dict.fromkeys(notes))
    for note in several[:MOST_NOTES]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    if len(several) > MOST_NOTES:
        out.print(f"… {len(several) - MOST_NOTES} more (--json has all)")
