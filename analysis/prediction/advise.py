"""Which of several cells that could be run is best, by images per second.

A cell that was measured counts by its runs, another by its forecast. No rate is believed above that
of the same GPUs without any exchange, less its scatter, nor above MOST_RATE of the best value.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.input_files import UnreadableInput
from analysis.prediction.calibration_data import SIGMA_AT_P95, CalibrationData
from analysis.prediction.distributions import average, deviation, mean
from analysis.prediction.forecast import conformal, growth_of, way_of, why_no_error
from analysis.prediction.link_model import requested_wire
from analysis.prediction.query import CellQuery, Subset, Workload
from analysis.prediction.step_model import (
    bare_step,
    between_runs_ms,
    matching_cells,
    rate_share,
    step_model,
)
from analysis.prediction.strategies import exchange_of, refuse_unknown_names, shares_gpu
from analysis.study.provenance import gpus_of
from analysis.study.study import Study
from analysis.topology.model import Topology, quality
from analysis.topology.readers import parse_topology
from conf.cell import Member
from conf.subsets import CPU_SLOTS

MOST_RATE = 2.0  # as far above the best value as 0 is below it
SAME_CELL = ("workload", "batch_size", "options", "wire", "hosts", "machine", "shares_gpu")


@dataclass(frozen=True)
class Candidate:
    """A cell to choose or not; `link_class`: the farthest between its GPUs, if it is known."""

    query: CellQuery
    nccl: tuple[tuple[str, str], ...] = ()
    link_class: str | None = None


@dataclass(frozen=True)
class RankedCell:
    """A cell with its rate in images per second; no interval where too few were held out."""

    candidate: Candidate
    rate: float
    low: float | None
    high: float | None
    runs: int  # that were measured; 0: it is a forecast
    bounded: bool  # the upper end of its interval is that of compute alone, or MOST_RATE
    why: str = ""  # no error is claimed


def overlaps(cell: RankedCell, first: RankedCell) -> bool:
    """Tell whether a cell cannot be told from a faster one: its interval reaches that one's."""
    if cell.high is None or first.low is None:
        return cell.rate >= first.rate
    return cell.high >= first.low


def advise(
    calibration: CalibrationData,
    candidates: Sequence[Candidate],
    scores: Mapping[str, Sequence[float]],
) -> tuple[list[RankedCell], dict[Candidate, str]]:
    """Return the candidates in order of their rates, and {candidate without a forecast: reason}.

    `scores` are those of held_out_scores. Raises ValueError where no candidate has a forecast.
    """
    ranked: list[RankedCell] = []
    refused: dict[Candidate, str] = {}
    for candidate in candidates:
        try:
            ranked.append(_ranked(calibration, candidate, scores))
        except ValueError as error:
            refused[candidate] = str(error)
    if not ranked and refused:
        raise ValueError(next(iter(refused.values())))
    if not ranked:
        raise ValueError("the study has no strategy to advise on; accepted with --strategy")
    ranked.sort(key=lambda cell: -round(cell.rate, 6))
    return ranked, refused


def _ranked(
    calibration: CalibrationData, candidate: Candidate, scores: Mapping[str, Sequence[float]]
) -> RankedCell:
    """Return a cell with its rate. Raises ValueError."""
    query = candidate.query
    images = rate_share(calibration, query) * query.ranks * query.batch_size * 1e3
    next_run_ms = between_runs_ms(calibration, query)
    runs = 0
    steps = []
    rates = []
    for cell in matching_cells(calibration.timed(), query, *SAME_CELL):
        if cell.step_ms is not None and set(cell.query.members) == set(query.members):
            runs += len(cell.record_ids)
            steps.append(cell.step_ms)
            rates.append(cell.images_per_second)
    why = ""
    if steps:
        step_ms = mean(average(steps))
        half_ms = SIGMA_AT_P95 * math.sqrt(1 + 1 / runs) * next_run_ms
        images = step_ms * statistics.fmean(rates) or images  # the rate of the report
        bare, _ = bare_step(calibration, query)
    else:
        model = step_model(calibration, query)
        bare, step_ms = model.bare, mean(model.step)
        of_query = scores[way_of(calibration, query)]
        why = why_no_error(query, len(of_query))
        half_ms = 0.0
        if not why:
            wide = growth_of(calibration, query) * conformal(of_query)
            half_ms = wide * deviation(model.step + model.noise)
    # The shortest step that is believed in: that without any exchange, less its scatter.
    compute_ms = mean(bare) - SIGMA_AT_P95 * math.hypot(deviation(bare), next_run_ms)
    least_ms = min(max(compute_ms, step_ms / MOST_RATE), step_ms)
    low = high = None
    if not why:
        low, high = images / (step_ms + half_ms), images / max(step_ms - half_ms, least_ms)
    bounded = not why and step_ms - half_ms < least_ms
    return RankedCell(candidate, images / step_ms, low, high, runs, bounded, why)


# --- the candidates


def topology_of(study: Study, machine: str) -> Topology | None:
    """Return the topology that the newest record of a machine has; None without any."""
    for record in reversed(study.records):
        text = record.environment.get("topology")
        here = study.single(record).provenance.get("machine", "") == machine
        if here and isinstance(text, str) and text:
            try:
                return parse_topology(text)
            except UnreadableInput:
                continue
    return None


def machine_gpus(study: Study, machine: str) -> tuple[int, ...]:
    """Return the GPUs of a machine: by its topology, by the driver, and of its cells."""
    gpus: set[int] = set()
    topology = topology_of(study, machine)
    if topology:
        gpus.update(topology.gpus)
    here = [runs for runs in study.runs if runs.provenance.get("machine", "") == machine]
    device = ""
    if here:
        device = statistics.mode([runs.cell.device for runs in here])
    for runs in here:
        if runs.cell.device != device or runs.cell.hosts:
            continue
        for record in runs.records:
            gpus |= set(record.cell.gpus)
            for gpu in gpus_of(record.environment):
                if isinstance(gpu.get("id"), int):
                    gpus.add(gpu["id"])
    if device == "cpu":
        gpus |= set(range(CPU_SLOTS))
    return tuple(sorted(gpus))


def farthest_class(topology: Topology | None, members: Sequence[Member]) -> str | None:
    """Return the farthest link class between GPUs; None where it is not known."""
    gpus = [member for member in members if isinstance(member, int)]
    if topology is None or len(gpus) < 2 or not set(gpus) <= set(topology.gpus):
        return None
    links = itertools.starmap(topology.link_between, itertools.combinations(gpus, 2))
    return min(links, key=quality)


def studied_settings(study: Study) -> list[Mapping[str, str]]:
    """Return the NCCL settings of a study's training cells, none at all first."""
    studied: list[Mapping[str, str]] = [{}]
    for runs in study.runs:
        settings = {name: str(value) for name, value in runs.cell.nccl.items()}
        if runs.cell.trains and settings not in studied:
            studied.append(settings)
    return studied


@dataclass(frozen=True)
class ForecastRequest:
    """What the options of `predict` and `advise` ask for; None: what the study has."""

    subsets: Sequence[Subset]
    settings: Sequence[Mapping[str, str]] = ({},)  # of NCCL
    strategies: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    gpus_of_host: int | None = None  # servers of weights share GPUs where none is left
    topology: Topology | None = None  # without it links are as those that were measured
    every_option: bool = False  # of a strategy, and every batch size that is as frequent


def candidates(
    calibration: CalibrationData, request: ForecastRequest
) -> dict[Workload, list[Candidate]]:
    """Return every combination that is asked for, by workload. Raises ValueError.

    Settings that choose the same wire count once, and those that do not reach a strategy not at
    all. Strategies have the options that the study has most often, or all of them.
    """
    queries = [cell.query for cell in calibration.timed()]
    refuse_unknown_names(request.strategies or (), [cell.query for cell in calibration.cells])
    by_workload: dict[Workload, list[Candidate]] = {}
    of_workload: dict[Workload, list[CellQuery]] = {}
    for query in queries:
        of_workload.setdefault(query.workload, []).append(query)
    for workload, here in of_workload.items():
        sizes = statistics.multimode([query.batch_size for query in here])
        if not request.every_option:
            sizes = sizes[:1]
        by_query: dict[CellQuery, Candidate] = {}
        for kind, batch_size, subset, settings in itertools.product(
            _kinds(queries, here, request),
            request.batches or sizes,
            request.subsets,
            request.settings,
        ):
            alone = subset.gpus * subset.hosts == 1
            if kind.strategy == "none" and not alone and not request.strategies:
                continue  # ranks that train apart
            if not exchange_of(kind).by_nccl or alone:
                settings = {}  # it reaches no other
            link_class = farthest_class(request.topology, subset.members) or calibration.link_class
            query = replace(
                kind,
                workload=workload,
                batch_size=batch_size,
                wire=requested_wire(settings, link_class, subset.hosts),
                gpus=subset.gpus,
                hosts=subset.hosts,
                members=subset.members,
                machine=calibration.machine,
            )
            if request.gpus_of_host is not None:
                query = replace(query, shares_gpu=shares_gpu(query, request.gpus_of_host))
            typed = tuple(sorted(settings.items()))
            by_query.setdefault(query, Candidate(query, typed, link_class))
        by_workload[workload] = list(by_query.values())
    return by_workload


def _kinds(
    queries: Sequence[CellQuery], here: Sequence[CellQuery], request: ForecastRequest
) -> list[CellQuery]:
    """Return a query for each strategy, with its options."""
    by_options: dict[object, CellQuery] = {}
    studied: dict[str, None] = {}
    for query in here:
        if query.strategy != "none":
            by_options[query.options] = query
            studied[query.strategy] = None
    if request.every_option and by_options and not request.strategies:
        return list(by_options.values())
    kinds = []
    for name in request.strategies or list(studied) or ["none"]:
        alike: list[CellQuery] = []
        for several in (here, queries):
            alike = alike or [query for query in several if query.strategy == name]
        if alike:
            options = statistics.mode([query.options for query in alike])
            kinds.append(next(query for query in alike if query.options == options))
        else:
            kinds.append(replace(here[0], options=(("name", name),), shares_gpu=False, sends=""))
    return kinds
