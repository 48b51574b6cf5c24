"""`python -m analysis predict STUDY` and `… advise STUDY --gpus 4`.

predict: what cells should give before they run, with intervals and beside a null model.
`--holdout condition|size|transport|batch|model` forecasts measured cells from the others and says
how far off that was. Several folders are read as one study.
advise: which GPUs, strategy and NCCL settings to take. Cells that were measured count by their
runs. Exit status: 0 done, 2 wrong input or request.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from analysis.prediction.advise import (
    Advice,
    Candidate,
    ForecastRequest,
    RankedCell,
    advise,
    candidates,
    machine_gpus,
    machine_words,
    studied_settings,
    subsets,
    told_apart,
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
from analysis.prediction.query import CellQuery, Subset, read_batches, read_nccl, read_subsets
from analysis.prediction.strategies import exchange_of
from analysis.report.numbers import ABSENT, number
from analysis.study.names import of_unit
from analysis.study.study import Study, open_study
from analysis.text import count

UNTOUCHED = "default"  # --nccl of no setting
MOST_NOTES, MOST_RANKED = 12, 10
NUMBERS = "a number of GPUs needs --per-node too, such as --gpus 16 --per-node 8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    if parser.prog.endswith("advise"):
        add("study", metavar="STUDY", help="the folder of a study with training cells")
        add("--gpus", metavar="K", required=True,
            help="how many GPUs; or subsets to choose from, such as 0+1,0+3")  # fmt: skip
        add("--nccl", metavar="SETTINGS", action="append",
            help="such as P2P_LEVEL=LOC,ALGO=Ring; again for others to choose from; "
            f"{UNTOUCHED}: none (default: the study's)")  # fmt: skip
    else:
        add("study", metavar="STUDY", nargs="+",
            help="the folder of a study; several are read as one")  # fmt: skip
        add("--gpus", metavar="LIST",
            help="ids of GPUs: 0,1,2,3 is one subset; with --per-node numbers of GPUs: 16,64")  # fmt: skip
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
        return _advise(arguments)
    if arguments.per_node is not None and arguments.gpus is None:
        raise ValueError(
            f"--per-node {arguments.per_node}: accepted together with --gpus, such as --gpus 16,64,256 --per-node 8"
        )
    if arguments.net is not None and arguments.per_node is None:
        raise ValueError(
            f"--net {arguments.net}: accepted together with --gpus and --per-node, such as --gpus 16,64 --per-node 8"
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


def _request(arguments: argparse.Namespace, chosen: Sequence[Subset]) -> ForecastRequest:
    strategies, batches = arguments.strategy, arguments.batch
    return ForecastRequest(
        subsets=chosen,
        strategies=None if strategies is None else strategies.split(","),
        batches=None if batches is None else read_batches(batches),
    )


def refuse_absent(
    text: str, chosen: Sequence[Subset], study: Study, calibration: CalibrationData, more: str = ""
) -> None:
    """Refuse GPUs that the machine of most cells does not have. Raises ValueError."""
    gpus = machine_gpus(study, calibration.machine)
    for subset in chosen:
        for gpu in subset.members:
            if gpu not in gpus:
                where = machine_words(calibration, calibration.machine)
                raise ValueError(
                    f"--gpus {text!r}: {where} has no {calibration.unit} {gpu}; accepted are "
                    f"{', '.join(map(str, gpus))}{of_unit(more, calibration.unit)}"
                )


# --- predict


def _print_forecasts(
    arguments: argparse.Namespace, study: Study, calibration: CalibrationData
) -> None:
    chosen = [Subset(2 * max(cell.ranks for cell in calibration.timed()))]
    gpus_of_host = arguments.per_node
    if arguments.gpus is not None:
        chosen = read_subsets(arguments.gpus, arguments.per_node)
        if arguments.per_node is None:
            refuse_absent(arguments.gpus, chosen, study, calibration, f"; {NUMBERS}")
            gpus_of_host = len(machine_gpus(study, calibration.machine))
    several_hosts = any(subset.hosts > 1 for subset in chosen)
    measured_hosts = any(curve.hosts > 1 for curve in calibration.links.curves)
    if several_hosts and arguments.net is None and not measured_hosts:
        raise ValueError(
            "--gpus on several hosts: no cell was measured between hosts; say --net 8x50GB/s,5us"
        )
    request = replace(
        _request(arguments, chosen),
        settings=[read_nccl(arguments.nccl or "")],
        network=None if arguments.net is None else read_network(arguments.net),
        gpus_of_host=gpus_of_host,
    )
    queries = []
    for several in candidates(calibration, request).values():
        queries += [candidate.query for candidate in several]
    scores = HeldOutScores(calibration)
    notes = list(calibration.notes)
    json_rows, rows = [], []
    refused = []
    for query in queries:
        name = f"{query.workload} · {query.strategy} · {query.batch_size}"
        facts = {
            "model": query.workload.model,
            "strategy": query.strategy,
            "batch_size": query.batch_size,
            "gpus": list(query.members) or None,
            "ranks": query.ranks,
            "hosts": query.hosts,
            "wire": str(query.wire),
        }
        where = _where(query)
        if query.ranks > 1 and query.unit == "GPU":
            where = f"{where}, {query.wire}"
        try:
            made = forecast(calibration, query, scores.of(query))
        except ValueError as error:
            refused.append(str(error))
            json_rows.append({**facts, "refused": str(error)})
            rows.append([name, where, *[ABSENT] * 10, "no forecast", ABSENT])
            notes.append(f"no forecast of {query.strategy}: {error}")
            continue
        json_rows.append({**facts, "forecast": made.to_json()})
        parts = [made.cost_ms, made.tail_ms, made.contention_ms, made.own_work_ms]
        parts += [made.waiting_ms, made.null_step_ms]
        rows.append(
            [
                name,
                where,
                f"{made.step_ms:.2f}",
                _ends(made.low, made.high),
                number(made.images_per_second, "rate"),
                number(made.efficiency, "share"),
                *[f"{part:.2f}" for part in parts],
                made.basis,
                made.widest,
            ]
        )
        notes += made.why
    if len(refused) == len(queries):
        raise ValueError(f"no forecast of {_where(queries[0])}: {refused[0]}")
    if arguments.json:
        held_out = len(scores.of(queries[0]))
        cells = {"cells": len(calibration.cells), "held_out": held_out}
        facts = {**cells, "notes": list(calibration.notes)}
        print(json.dumps({"calibration": facts, "level": LEVEL, "forecasts": json_rows}))
        return
    for subset in chosen:
        if len(subset.members) == 1:
            gpu = subset.members[0]
            note = f"--gpus {gpu} is GPU {gpu} alone; {NUMBERS}"
            notes.append(of_unit(note, calibration.unit))
    headings = "step ms,90 % interval,img/s,efficiency,cost ms,tail,contention,own,waiting"
    _print_table(f"cell|where|{headings.replace(',', '|')}|null's step|basis|widest part", rows)
    _print_notes(notes)


def _where(query: CellQuery) -> str:
    """Return the GPUs of a query: `gpus 0,1`, or how many on how many hosts."""
    if query.members:
        return "gpus " + ",".join(map(str, query.members))
    many = f"{query.ranks} {query.unit}s"
    return many if query.hosts == 1 else f"{many}, {query.hosts} hosts"


def _ends(low: float | None, high: float | None) -> str:
    return ABSENT if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _change(forecast_ms: float, measured_ms: float) -> str:
    return number(forecast_ms / measured_ms - 1, "change")


# --- predict --holdout


def _print_held_out(arguments: argparse.Namespace, calibration: CalibrationData) -> None:
    held = hold_out(calibration, arguments.holdout)
    errors = errors_of(held)
    if arguments.json:
        cells = [_held_out_json(result) for result in held]
        facts = {"holdout": arguments.holdout, "level": LEVEL}
        print(json.dumps({**facts, "cells": cells, "summary": asdict(errors)}))
        return
    notes = list(calibration.notes)
    rows = []
    for result in held:
        row = [result.cell.label, f"{result.step_ms:.2f}"]
        made = result.forecast
        if made is None:
            rows.append([*row, *[ABSENT] * 9])
            notes.append(f"no forecast of {result.cell.label}: {result.why}")
            continue
        step_ms, cost_ms = result.step_ms, result.cost_ms
        row += [f"{made.step_ms:.2f}", _change(made.step_ms, step_ms)]
        row += [_change(made.null_step_ms, step_ms), _ends(result.low, result.high)]
        row.append({None: ABSENT, True: "yes", False: "no"}[result.inside])
        cost = [ABSENT] * 4
        if cost_ms:
            cost = [f"{cost_ms:.2f}", f"{made.cost_ms:.2f}", _change(made.cost_ms, cost_ms)]
            cost.append(_change(made.null_cost_ms, cost_ms))
        rows.append([*row, *cost])
    headings = "step ms|forecast|error|null's|interval|inside|cost ms|forecast|error|null's"
    _print_table(f"held-out cell|{headings}", rows)
    out = console()
    made_count = errors.cells - errors.not_forecast
    out.print(f"{made_count} of {errors.cells} held-out cells have a forecast")
    if errors.cost is not None:
        out.print(
            f"communication cost ({errors.cost_cells} cells): mean error "
            f"{number(errors.cost, 'share')}, the null model's {number(errors.null_cost, 'share')}"
        )
    if errors.step is not None:
        out.print(
            f"step: {number(errors.step, 'share')}, the null model's {number(errors.null_step, 'share')}"
        )
    if errors.covered is None:
        out.print(
            f"intervals: not enough to state an error; {FEWEST_HELD_OUT + 1} held-out cells are needed"
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


def _advise(arguments: argparse.Namespace) -> int:
    study = open_study(Path(arguments.study))
    calibration = calibrate(study)
    machine = calibration.machine
    gpus = machine_gpus(study, machine)
    topology = topology_of(study, machine)
    text = arguments.gpus
    if text.isascii() and text.isdigit() and len(text) < 8:
        chosen = subsets(calibration, topology, gpus, int(text), machine)
    else:
        chosen = read_subsets(text, None)
        refuse_absent(text, chosen, study, calibration)
        if len({subset.gpus for subset in chosen}) > 1:
            raise ValueError(
                f"--gpus {text!r}: accepted are subsets of one size, so that their rates can be compared"
            )
    settings = studied_settings(study)
    if arguments.nccl:
        settings = [{} if typed == UNTOUCHED else read_nccl(typed) for typed in arguments.nccl]
    request = replace(
        _request(arguments, chosen),
        settings=settings,
        gpus_of_host=len(gpus),
        topology=topology,
        every_option=True,
    )
    scores = HeldOutScores(calibration)
    made: list[Advice] = []
    refused: dict[str, str] = {}
    for workload, several in candidates(calibration, request).items():
        try:
            made.append(advise(calibration, told_apart(calibration, several), scores))
        except ValueError as error:  # UnknownLink too
            refused[str(workload)] = str(error)
    if not made:
        raise ValueError(next(iter(refused.values())))
    if arguments.json:
        shown = [_advice_json(advice, scores) for advice in made]
        print(json.dumps({"study": study.name, "advice": shown, "refused": refused}))
        return 0
    for advice in made:
        _print_advice(study, calibration, advice)
    for model, why in refused.items():
        console().print(f"No advice on {model}: {why}", soft_wrap=True, markup=False)
    return 0


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


def _print_advice(study: Study, calibration: CalibrationData, advice: Advice) -> None:
    first = advice.first
    query = first.candidate.query
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cell in advice.ranked:
        for option, value in cell.candidate.query.options:
            values[cell.candidate.query.strategy, option].add(value)
    differing = {option for (_, option), several in values.items() if len(several) > 1}
    rows = []
    for rank, cell in enumerate(advice.ranked[:MOST_RANKED], 1):
        shown = cell.candidate.query
        words = [shown.strategy]
        words += [f"{name}={value}" for name, value in shown.options if name in differing]
        settings = [f"{name.removeprefix('NCCL_')}={value}" for name, value in cell.candidate.nccl]
        ends = ABSENT
        if cell.low is not None:
            ends = f"{number(cell.low, 'rate')} to {number(cell.high, 'rate')}"
        behind = number(cell.rate / first.rate - 1, "change")
        if cell.as_fast and rank > 1:
            behind += " ~"
        rows.append(
            [
                str(rank),
                ",".join(map(str, shown.members)) + _servers(cell),
                " ".join(words),
                str(shown.batch_size),
                ", ".join(settings) or "default",
                number(cell.rate, "rate"),
                ends,
                behind,
                number(cell.p_fastest, "share"),
                count(cell.runs, "run") if cell.runs else "forecast",
            ]
        )
    out = console()
    out.print(f"[bold]{escape(str(query.workload))}[/bold]")
    headings = "images/s|90 % interval|to the first|chance to be fastest|from"
    _print_table(f"|{query.unit}s|strategy|batch|NCCL|{headings}", rows)
    for sentence in advice_sentences(advice):
        out.print(sentence, soft_wrap=True)
    for why in dict.fromkeys(why for _, why in advice.refused):
        out.print(f"Not ranked: {escape(why)}", soft_wrap=True)
    notes = []
    machines = {runs.provenance.get("machine", "") for runs in study.runs}
    if len(machines) > 1:
        notes.append(
            f"the study has cells of {len(machines)} machines: this is for {query.machine}, where most of them ran"
        )
    _print_notes([*notes, *_advice_notes(advice)])


def _servers(cell: RankedCell) -> str:
    """Return what is said of servers that have GPUs of their own."""
    query = cell.candidate.query
    if query.shares_gpu or not exchange_of(query).gpu_servers:
        return ""
    return f" + {count(max(1, query.servers), 'server')}"


def advice_sentences(advice: Advice) -> list[str]:
    """Return what the table of an advice says, in words."""
    first, query = advice.first, advice.first.candidate.query
    sentences = []
    rest = len(advice.ranked) - MOST_RANKED
    if rest > 0:
        sentences.append(f"… and {count(rest, 'more cell')} below (--json has all)")
    unit = f"{query.unit}s" if len(query.members) > 1 else query.unit
    on = f"{unit} {','.join(map(str, query.members))}{_servers(first)}"
    if len({cell.candidate.query.batch_size for cell in advice.ranked}) > 1:
        on += f" with batch {query.batch_size}"
    how = "measured" if first.runs else "forecast"
    rate = number(first.rate, "rate")
    sentences.append(f"First is {query.strategy} on {on}: {rate} images/s, {how}.")
    if len(advice.ranked) == 1:
        return [*sentences, "There is nothing else to choose from."]
    chance = number(first.p_fastest, "share")
    sentences[-1] += f" The chance that nothing else is faster is {chance}."
    alike = sum(cell.as_fast for cell in advice.ranked[1:])
    if alike:
        sentences.append(
            f"{count(alike, 'cell')} cannot be told from it (~): each is as fast with a chance of 5 % or more."
        )
    else:
        sentences.append("Every other cell is slower with a chance of more than 95 %.")
    return sentences


def _advice_notes(advice: Advice) -> list[str]:
    unit = advice.first.candidate.query.unit
    notes = []
    shown = advice.ranked[:MOST_RANKED]
    queries = [cell.candidate.query for cell in shown]
    if any(not exchange_of(query).waits for query in queries if query.strategy != "none"):
        notes.append(
            "with an asynchronous strategy ranks do not wait for each other: it trains with older weights"
        )
    if any(_servers(cell) for cell in shown):
        notes.append("a server has a GPU of its own beside those of the ranks")
    if any(cell.bounded for cell in shown):
        notes.append(
            f"no upper end is above that of the same {unit}s without any exchange, as measured "
            "with its scatter, nor above twice the rate of its cell"
        )
    notes += dict.fromkeys(of_unit(cell.why, unit) for cell in advice.ranked if cell.why)
    if any(not cell.runs for cell in shown):
        notes.append(
            f"{unit}s that did not run alone with this model are alike to a forecast: one subset stands for all of them"
        )
    return notes


# --- tables and notes


def _print_table(headings: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a table; `headings` are joined by |, and numbers stand at the right."""
    table = Table(box=SIMPLE_HEAD)
    listed = list(rows)
    for index, heading in enumerate(headings.split("|")):
        words = [row[index] for row in listed]
        is_text = any(word[:1].isalpha() for word in words if word not in ("yes", "no"))
        table.add_column(heading, justify="left" if is_text else "right")
    for row in listed:
        table.add_row(*[escape(word) for word in row])
    console().print(table)


def _print_notes(notes: Sequence[str]) -> None:
    out, several = console(), list(dict.fromkeys(notes))
    for note in several[:MOST_NOTES]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    if len(several) > MOST_NOTES:
        out.print(f"… {len(several) - MOST_NOTES} more (--json has all)")
