"""`python -m analysis advise STUDY --gpus 0+1,0+3`: which of several configurations is best.

What was measured is ranked as in reports (comparisons.py), others by their forecasts; each has the
interval that reports and `predict` show of it. Where there is none, no order is claimed.
"""

import argparse
import json
import shlex
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.commands.predict_cells import (
    UNTOUCHED,
    add_choices,
    devices_of,
    forecasts,
    print_next,
    read_nccl,
    read_subsets,
    refuse_absent,
    typed_choices,
)
from analysis.commands.terminal_tables import print_notes, print_table
from analysis.console import print_text
from analysis.findings.comparisons import (
    FASTEST,
    TIED,
    RankedConfiguration,
    comparisons,
    rank_configurations,
)
from analysis.prediction.calibration_data import (
    CalibrationData,
    MeasuredCell,
    calibrate,
    cells_with,
)
from analysis.prediction.candidates import (
    Candidate,
    ForecastRequest,
    candidates,
    machine_line,
    measuring_command,
    studied_settings,
    topology_of,
)
from analysis.prediction.forecast import LEVEL, held_out_cells, scores_of, way_of, why_no_error
from analysis.prediction.query import Subset
from analysis.prediction.strategies import exchange_of
from analysis.report.numbers import number
from analysis.report.table import Column, Table
from analysis.study.intervals import LEVEL as LEVEL_OF_RUNS
from analysis.study.intervals import Estimate
from analysis.study.measured_numbers import SLOWER, UNKNOWN
from analysis.study.names import of_unit
from analysis.study.study import open_study
from analysis.text import count, join_words, sentence

MOST_RANKED = 10
MOST_NEXT = 3  # configurations that the next command measures
NO_VARIATION = "too few repeats for a ± (repeats=5 gives one)"
INTERVALS = (
    f"Below each value is its prediction interval ({100 * LEVEL_OF_RUNS:.0f} % for measured "
    f"configurations, {100 * LEVEL:.0f} % for forecasts)."
)
ASYNCHRONOUS = (
    "with an asynchronous strategy ranks do not wait for each other: it trains with older weights"
)
COLUMNS = (
    Column("configuration", "configuration"),
    Column("images_per_second", "images/s", kind="rate", bounded=True),
    Column("behind", "vs. best"),
    Column("source", "source"),
)
# {what RankedConfiguration says: whether it may be as fast as the fastest}
AS_FAST = {FASTEST: True, TIED: True, SLOWER: False, UNKNOWN: None}


@dataclass(frozen=True)
class RankedCell:
    """A cell with its rate in images per second, and the interval of that where it has one."""

    candidate: Candidate
    rate: float
    low: float | None = None
    high: float | None = None
    runs: int = 0  # that were measured; 0: it is a forecast
    standing: str = ""  # of a measured one in its ranking (findings/comparisons.py)
    bounded: bool = False  # the upper end of its interval is the most that is believed
    why: str = ""  # it has no interval, or one that says no order


def best(ranked: Sequence[RankedCell]) -> RankedCell:
    """Return the fastest of those that were measured; where it is not known, the highest rate."""
    for cell in ranked:
        if cell.standing == FASTEST:
            return cell
    return ranked[0]


def is_as_fast(cell: RankedCell, first: RankedCell) -> bool | None:
    """Tell whether a cell may be as fast as the best one; None where it cannot be told.

    Of measured ones their ranking decides, of others whether their intervals reach each other.
    """
    if cell.standing and first.standing == FASTEST:
        return AS_FAST.get(cell.standing)
    if cell.high is None or first.low is None or cell.why or first.why:
        return None
    return cell.high >= first.low


def rank(
    calibration: CalibrationData,
    several: Sequence[Candidate],
    scores: Mapping[str, Sequence[float]],
    standings: Mapping[str, RankedConfiguration] | None = None,
) -> tuple[list[RankedCell], dict[Candidate, str]]:
    """Return the candidates in order of their rates, and {candidate without a forecast: reason}.

    `scores` are those of held-out cells by way_of, `standings` the ranked configuration of each
    record. Raises ValueError where no candidate has a forecast.
    """
    ranked: list[RankedCell] = []
    unmeasured = []
    for candidate in several:
        query = candidate.query
        measured = []
        alike = cells_with(calibration, "step_ms").get(query.kind, {})
        for cell in alike.get(query.batch_size, ()):
            if set(cell.query.members) == set(query.members) and cell.rate is not None:
                measured.append(cell)
        if measured:
            ranked.append(_by_runs(candidate, measured, standings or {}))
        else:
            unmeasured.append(candidate)
    predictions, refused = forecasts(calibration, unmeasured, scores)
    for candidate, prediction in predictions.items():
        rate, step_ms = prediction.images_per_second, prediction.step_ms
        if prediction.low is None or prediction.high is None:
            held_out = len(scores[way_of(calibration, candidate.query)])
            ranked.append(RankedCell(candidate, rate, why=why_no_error(candidate.query, held_out)))
            continue
        bounded = step_ms - prediction.low < (prediction.high - step_ms) * (1 - 1e-9)
        images = rate * step_ms
        low, high = images / prediction.high, images / prediction.low
        ranked.append(RankedCell(candidate, rate, low, high, bounded=bounded))
    if not ranked and refused:
        raise ValueError(next(iter(refused.values())))
    if not ranked:
        raise ValueError("the study has no strategy to advise on; name some with --strategy")
    ranked.sort(key=lambda cell: -round(cell.rate, 6))
    return ranked, refused


def _by_runs(
    candidate: Candidate,
    measured: Sequence[MeasuredCell],
    standings: Mapping[str, RankedConfiguration],
) -> RankedCell:
    runs = 0
    rates = []
    ends = []
    why = ""
    for cell in measured:
        assert cell.rate is not None
        runs += len(cell.record_ids)
        rates.append(cell.rate.value)
        if cell.lent_by and not why:
            why = "too few repeats of it: its interval in the table uses the variation of "
            why += cell.lent_by
        if cell.rate.low is not None and cell.rate.high is not None:
            ends += [cell.rate.low, cell.rate.high]
    rate = statistics.fmean(rates)
    ranked = standings.get(measured[0].record_ids[0])
    standing = ""
    if ranked is not None and len(measured) == 1:
        standing = ranked.standing
    if len(ends) == 2 * len(measured):
        return RankedCell(candidate, rate, min(ends), max(ends), runs, standing, why=why)
    return RankedCell(candidate, rate, runs=runs, standing=standing, why=NO_VARIATION)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("study", metavar="STUDY", help="the folder of a study with training runs")
    gpus = "subsets to choose from, of one size, such as 0+1,0+3 (without: the largest measured)"
    add("--gpus", metavar="LIST", help=gpus)
    nccl = f"'{UNTOUCHED}': no setting; repeat it to compare several (without: the study's)"
    add("--nccl", metavar="SETTINGS", action="append", help=f"such as ALGO=Ring; {nccl}")
    add("--per-node", help=argparse.SUPPRESS)  # of `predict`: refused with the way there
    add_choices(parser)


def _measured_subsets(calibration: CalibrationData) -> list[Subset]:
    """Return the subsets that trained on one host, those with the most GPUs. Raises ValueError."""
    subsets: dict[tuple[int, ...], Subset] = {}
    for cell in calibration.timed:
        members = tuple(gpu for gpu in cell.query.members if isinstance(gpu, int))
        if members and cell.query.hosts == 1 and cell.query.machine == calibration.machine:
            subsets[members] = Subset(len(members), members=members)
    if not subsets:
        raise ValueError("--gpus: no run has a step time on this machine; expected subsets of GPUs")
    most = max(subset.gpus for subset in subsets.values())
    return [subset for subset in subsets.values() if subset.gpus == most]


def run(arguments: argparse.Namespace) -> int:
    """Print an advice for each workload of the study. Raises OSError, ValueError."""
    predict = f"python -m analysis predict {shlex.quote(arguments.study)}"
    more = f"for more GPUs: {predict} --gpus 16,64 --per-node 8"
    if arguments.per_node is not None:
        raise ValueError(f"--per-node: advise compares GPUs of one machine; {more}")
    study = open_study(Path(arguments.study))
    calibration = calibrate(study)
    if arguments.gpus is None:
        subsets = _measured_subsets(calibration)
    else:
        subsets = read_subsets(arguments.gpus, None)
    gpus = refuse_absent(arguments.gpus, subsets, study, calibration, f"; {more}")
    if len({subset.gpus for subset in subsets}) > 1:
        raise ValueError(
            f"--gpus {arguments.gpus!r}: expected subsets of equal size, such as 0+1,0+2, whose "
            "rates can be compared"
        )
    choices: Sequence[Mapping[str, str]] = studied_settings(study)
    if arguments.nccl:
        choices = [read_nccl(typed) for typed in arguments.nccl]
    request = ForecastRequest(
        subsets=subsets,
        settings=choices,
        gpus_of_host=len(gpus),
        topology=topology_of(study, calibration.machine),
        every_option=True,
        **typed_choices(arguments),
    )
    by_workload = candidates(calibration, request)
    queries = [candidate.query for candidate in chain.from_iterable(by_workload.values())]
    held = held_out_cells(calibration, queries)
    scores = {way: scores_of(results) for way, results in held.items()}
    standings: dict[str, RankedConfiguration] = {}
    for ranking in rank_configurations(study, comparisons(study)):
        if ranking.suspect_leader:
            continue
        for configuration in ranking.configurations:
            for record in configuration.runs.records:
                standings[record.record_id] = configuration
    advices = []
    refused: dict[str, str] = {}
    for workload, several in by_workload.items():
        try:
            advices.append(rank(calibration, several, scores, standings))
        except ValueError as error:
            refused[str(workload)] = str(error)
    if not advices:
        raise ValueError(next(iter(refused.values())))
    if arguments.json:
        answers = []
        for ranked, omitted in advices:
            held_out = len(scores[way_of(calibration, ranked[0].candidate.query)])
            answers.append({**_advice_json(ranked, omitted), "held_out": held_out})
        print(json.dumps({"study": study.name, "advice": answers, "refused": refused}))
        return 0
    print_text(escape(machine_line(study, study, calibration.machine)))
    for ranked, omitted in advices:
        _print_advice(ranked, omitted)
        first = best(ranked)
        if first.standing != FASTEST:
            rivals = [
                cell for cell in ranked if cell is first or is_as_fast(cell, first) is not False
            ]
            several = [*(cell.candidate for cell in rivals), *omitted][:MOST_NEXT]
            print_next(f"{measuring_command(several, gpus, Path(arguments.study))} repeats=5")
    for model, why in refused.items():
        print_text(escape(f"No advice on {model}: {sentence(why)}"))
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


def _advice_json(ranked: Sequence[RankedCell], omitted: Mapping[Candidate, str]) -> dict[str, Any]:
    refused = []
    for candidate, why in omitted.items():
        refused.append({**_candidate_json(candidate), "why": why})
    first = best(ranked)
    cells = []
    for cell in ranked:
        cells.append(
            {
                **_candidate_json(cell.candidate),
                "images_per_second": cell.rate,
                "low": cell.low,
                "high": cell.high,
                "runs": cell.runs,
                "high_is_bounded": cell.bounded,
                "as_fast_as_the_first": is_as_fast(cell, first),
            }
        )
    query = ranked[0].candidate.query
    return {
        "model": str(query.workload),
        "machine": query.machine,
        "level": LEVEL,  # of forecasts
        "level_of_runs": LEVEL_OF_RUNS,
        "cells": cells,
        "refused": refused,
    }


def _print_advice(ranked: Sequence[RankedCell], omitted: Mapping[Candidate, str]) -> None:
    first = best(ranked)
    unit, workload = first.candidate.query.unit, first.candidate.query.workload
    names = _names(ranked)
    rows, rivals = [], 0
    for cell in ranked[:MOST_RANKED]:
        behind = "–"
        is_alike = is_as_fast(cell, first)
        if cell is first:
            behind = "highest" if first.why else "best"
        elif is_alike is not None:
            behind = number(cell.rate / first.rate - 1, "change") + " ~" * is_alike
            rivals += is_alike
        rows.append(
            {
                "configuration": names[cell],
                "images_per_second": Estimate(cell.rate, cell.low, cell.high),
                "behind": behind,
                "source": count(cell.runs, "run") if cell.runs else "forecast",
            }
        )
    caption = []
    if any(cell.low is not None for cell in ranked[:MOST_RANKED]):
        caption.append(INTERVALS)
    if rivals:
        caption.append("~: may be as fast as the best.")
    print_text(f"[bold]{escape(str(workload))}[/bold]")
    print_text(escape(of_unit(_advice_sentences(ranked, names), unit)))
    print_table(Table.of("forecasts", " ".join(caption), COLUMNS, rows))
    if len(ranked) > MOST_RANKED:
        rest = count(len(ranked) - MOST_RANKED, "slower configuration")
        print_text(f"… and {rest} (--json has all)")
    notes = [f"not ranked: {why}" for why in omitted.values()]
    for cell in ranked[:MOST_RANKED]:
        query = cell.candidate.query
        if query.strategy != "none" and not exchange_of(query).waits:
            notes.append(ASYNCHRONOUS)
    for cell in ranked:
        if cell.why != first.why:
            notes.append(of_unit(cell.why, unit))
    print_notes(notes, MOST_RANKED)


def _names(ranked: Sequence[RankedCell]) -> dict[RankedCell, str]:
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    sizes = {cell.candidate.query.batch_size for cell in ranked}
    for cell in ranked:
        query = cell.candidate.query
        for option, value in query.options:
            values[query.strategy, option].add(value)
    names = {}
    for cell in ranked:
        query = cell.candidate.query
        words = [query.strategy]
        for option, value in query.options:
            if len(values[query.strategy, option]) > 1:
                words.append(f"{option}={value}")
        for name, value in cell.candidate.nccl:
            words.append(f"{name.removeprefix('NCCL_')}={value}")
        words.append(f"on {devices_of(query)}")
        if exchange_of(query).gpu_servers and not query.shares_gpu:
            words.append(f"+ {count(query.servers, 'server')}")
        if len(sizes) > 1:
            words.append(f"with batch {query.batch_size}")
        names[cell] = " ".join(words)
    return names


def _advice_sentences(ranked: Sequence[RankedCell], names: Mapping[RankedCell, str]) -> str:
    first = best(ranked)
    how = "measured" if first.runs else "forecast"
    configuration = f"{names[first]} ({number(first.rate, 'rate')} images/s, {how})"
    words = f"Best guess: {configuration}"
    if first.standing == FASTEST:
        words = f"Fastest: {configuration}"
    elif len(ranked) > 1 and first.why:
        why = sentence(first.why)
        return f"It is not known which is fastest. Highest rate: {configuration}. {why}"
    tied = [names[cell] for cell in ranked if cell.standing == TIED and first.standing == FASTEST]
    if tied:
        words += f"; tied with {join_words(tied, 3)}"
    alike = [is_as_fast(cell, first) for cell in ranked if cell is not first]
    as_fast, unknown = alike.count(True) - len(tied), alike.count(None)
    if as_fast:
        words += f". {count(as_fast, 'more configuration')} may be as fast (~)"
    if unknown:
        words += f". {count(unknown, 'configuration')} cannot be compared with it"
    return f"{words}."
