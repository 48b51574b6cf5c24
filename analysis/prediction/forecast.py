"""A forecast of a cell, its interval, the null model beside it, and errors of held-out cells.

README.md. The interval is the best value ± q · the deviation of the draws · the growth beyond the
ranks that were measured; q is the split-conformal quantile (Lei et al. 2018) of |error| ÷ deviation
of held-out cells. The null model says that nothing changes.
"""

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from analysis.prediction.calibration_data import (
    DEFAULT_SCATTER,
    SIGMA_AT_P95,
    STEP,
    CalibrationData,
    MeasuredCell,
    calibrate,
    cells_with,
    nearest_cells,
    once,
)
from analysis.prediction.distributions import deviation, mean
from analysis.prediction.query import CellQuery, Workload, query_of, workload_of
from analysis.prediction.step_model import LEAST_STEP, of_batches, rate_share, step_model
from analysis.study.conditions import request_of
from analysis.study.names import of_unit
from analysis.study.study import Study
from conf.cell import Cell

VERSION = 11  # another model has another number: it may forecast otherwise from the same records
LEVEL = 0.9  # of an interval
FEWEST_HELD_OUT = 10
MOST_HELD_OUT = 60  # for an interval: further ones change its width by little and take long
MOST_RATE = 2.0  # no rate is believed that is further above the best value than 0 is below it
ASSUMED_SCATTER = (
    f"the run-to-run variation was not measured; {100 * DEFAULT_SCATTER[STEP]:.1f} % of a step is "
    "assumed"
)
NOT_IN_IT = (
    "for more GPUs than were measured, the forecast leaves out data loading, stragglers and "
    "networks shared with other jobs"
)
NOT_SCORED = "no error bars: forecasts for one GPU, or without an exchange, are not cross-validated"
INTERPOLATED, EXTRAPOLATED = "interpolated", "extrapolated"
ASSUMED_NETWORK = "assumed_network"  # between hosts, as --net describes it
CONDITION, SIZE, TRANSPORT, BATCH, MODEL = "condition", "size", "transport", "batch", "model"
SMALL = "small"  # batches below LARGE from larger ones, of one GPU too
LARGE = 128
# {way of holding cells out: what it needs}
HOLDOUTS = {
    CONDITION: "needs a valid training run of several GPUs",
    SIZE: "needs training runs on at least two numbers of GPUs above one",
    TRANSPORT: "needs training runs on several GPUs over at least two transports",
    BATCH: "needs training runs of one model with at least two batch sizes",
    MODEL: "needs training runs on several GPUs of at least two models",
    SMALL: f"needs training runs of one model with batches below {LARGE} and with {LARGE} or more",
}


@dataclass(frozen=True)
class Forecast:
    """What a cell should give. Times are ms; `low`, `high` are None where no error is claimed."""

    step_ms: float
    low: float | None
    high: float | None
    images_per_second: float  # as a run gives them, whose mean step is longer than its median
    efficiency: float  # against one GPU with the same strategy
    cost_ms: float  # the step minus that of the same GPUs without exchange
    exposed_ms: float  # what one GPU with this strategy does not have
    tail_ms: float
    contention_ms: float
    own_work_ms: float
    null_step_ms: float
    null_cost_ms: float
    compute_ms: float  # a step of the same GPUs without any exchange, alone
    compute_deviation_ms: float
    deviation_ms: float  # of the step, by the draws
    growth: float  # of the interval, beyond the ranks that were measured
    basis: str  # interpolated, extrapolated, assumed_network
    why: tuple[str, ...]  # a sentence for each part that was not measured, and a missing interval
    records: tuple[str, ...]  # of the calibration


def forecast(
    calibration: CalibrationData, query: CellQuery, scores: Sequence[float] = ()
) -> Forecast:
    """Return the forecast of a cell; `scores` are |error| ÷ deviation of held-out cells.

    Raises ValueError for an unknown wire, strategy or workload.
    """
    model = step_model(calibration, query)
    step = model.step + model.noise
    step_ms = mean(step)
    compute_ms = mean(model.bare)
    cost_ms = step_ms - compute_ms
    own_work_ms = min(mean(model.local), max(cost_ms, 0.0))
    null_cost_ms = max(_null_cost(calibration, query), (LEAST_STEP - 1) * compute_ms)
    share = rate_share(calibration, query.workload, query.strategy)
    images = share * query.ranks * query.batch_size * 1e3
    basis = EXTRAPOLATED
    most_ranks = _most_ranks(calibration, query.workload)
    if query.ranks <= most_ranks and model.is_measured and not model.why:
        basis = INTERPOLATED
    no_error = why_no_error(query, len(scores))
    sentences = list(model.why)
    if not _scatter_known(calibration, query.workload):
        sentences.append(ASSUMED_SCATTER)
    sentences.append(no_error)
    if query.ranks > most_ranks:
        sentences.append(NOT_IN_IT)
    if query.across_hosts and calibration.links.network is not None:
        basis = ASSUMED_NETWORK
        sentences.append("the network between hosts is as --net describes it")
    why = [of_unit(sentence, query.unit) for sentence in sentences if sentence]
    prediction = Forecast(
        step_ms=step_ms,
        low=None,
        high=None,
        images_per_second=images / step_ms,
        efficiency=(compute_ms + own_work_ms) / step_ms,
        cost_ms=cost_ms,
        exposed_ms=cost_ms - own_work_ms,
        tail_ms=mean(model.played.tail_ms),
        contention_ms=mean(model.played.contention_ms),
        own_work_ms=own_work_ms,
        null_step_ms=compute_ms + null_cost_ms,
        null_cost_ms=null_cost_ms,
        compute_ms=compute_ms,
        compute_deviation_ms=math.hypot(deviation(model.bare), deviation(model.noise)),
        deviation_ms=deviation(step),
        growth=1 + math.log(max(1.0, query.ranks / most_ranks)),
        basis=basis,
        why=tuple(why),
        records=calibration.record_ids,
    )
    if no_error:
        return prediction
    low, high = interval(prediction, conformal(scores))
    return replace(prediction, low=low, high=high)


def interval(prediction: Forecast, factor: float) -> tuple[float, float]:
    """Return the ends of the interval of a step: not below that without any exchange less its own
    scatter, which does not grow with the ranks, nor below what MOST_RATE gives.
    """
    wide = factor * prediction.growth * prediction.deviation_ms
    least = prediction.compute_ms - SIGMA_AT_P95 * prediction.compute_deviation_ms
    least = min(max(least, prediction.step_ms / MOST_RATE), prediction.step_ms)
    low = max(prediction.step_ms - wide, least)
    return low, prediction.step_ms + wide


def conformal(scores: Sequence[float], level: float = LEVEL) -> float:
    """Return the factor that holds a further score with this probability."""
    rank = math.ceil((len(scores) + 1) * level)
    return sorted(scores)[min(rank, len(scores)) - 1]


def why_no_error(query: CellQuery, held_out: int) -> str:
    """Return why no error is claimed; empty where enough cells could be held out."""
    if query.ranks < 2 or query.strategy == "none":
        return NOT_SCORED
    if held_out >= FEWEST_HELD_OUT:
        return ""
    return (
        f"no error bars: cross-validation needs {FEWEST_HELD_OUT} measured configurations on "
        f"several GPUs, and there are {held_out}"
    )


def _null_cost(calibration: CalibrationData, query: CellQuery) -> float:
    """Return the cost of the nearest measured cell, of several ranks or of one, unchanged."""
    if query.strategy == "none":
        return 0.0

    def unlike(there: CellQuery) -> tuple[bool, ...] | None:
        if there.is_alone != query.is_alone:
            return None
        if there.strategy != query.strategy and (query.ranks < 2 or there.strategy == "none"):
            return None
        return (
            there.workload != query.workload,
            there.across_hosts != query.across_hosts,
            there.shares_gpu != query.shares_gpu,
            there.strategy != query.strategy,
        )

    with_cost = cells_with(calibration, "step_ms", "cost_ms")
    nearest = next(nearest_cells(with_cost, query, unlike), None)
    if nearest is None or nearest.cost_ms is None:
        return 0.0
    return mean(nearest.cost_ms)


@once
def _most_ranks(calibration: CalibrationData, workload: Workload) -> int:
    return max((cell.query.ranks for cell in calibration.by_workload.get(workload, ())), default=1)


@once
def _scatter_known(calibration: CalibrationData, workload: Workload) -> bool:
    return any(cell.scatter_known for cell in calibration.by_workload[workload])


@dataclass(frozen=True)
class HeldOut:
    """A cell and its forecast from others; `forecast` is None where `why` says so."""

    cell: MeasuredCell
    step_ms: float  # measured
    cost_ms: float | None  # of communication, measured; None where it was not
    forecast: Forecast | None
    why: str = ""
    low: float | None = None  # of the step in ms, by the scores of the other cells
    high: float | None = None
    inside: bool | None = None  # whether the measured step lies in it


def hold_out(calibration: CalibrationData, way: str, most: float = math.inf) -> list[HeldOut]:
    """Return the forecast of each valid cell of several ranks from others (HOLDOUTS), of `most`
    cells about.

    Raises ValueError where there are none.
    """
    valid = []
    for cell in calibration.timed:
        if cell.query.ranks > 1 and cell.query.strategy != "none" and cell.valid:
            valid.append(cell)
    needs = HOLDOUTS[CONDITION]
    if valid or way == SMALL:
        needs = HOLDOUTS[way]
    cells = _can_be_held_out(calibration, valid, way)
    if not cells:
        raise ValueError(f"--holdout {way}: {of_unit(needs, calibration.unit)}")
    cells = cells[:: math.ceil(len(cells) / most) or 1]
    calibrations: dict[tuple[Any, ...], CalibrationData] = {}
    held = []
    for cell in cells:
        key = _holdout_key(cell, way)
        if key not in calibrations:
            calibrations[key] = _calibration_without(calibration, way, key)
        assert cell.step_ms is not None
        cost_ms = None
        if cell.cost_ms is not None:
            cost_ms = mean(cell.cost_ms)
        prediction, why = None, ""
        try:
            prediction = forecast(calibrations[key], cell.query)
        except ValueError as error:
            why = str(error)
        held.append(HeldOut(cell, mean(cell.step_ms), cost_ms, prediction, why))
    with_intervals = []
    for result in held:
        scores = scores_of(apart for apart in held if apart is not result)
        if result.forecast is not None and len(scores) >= FEWEST_HELD_OUT:
            low, high = interval(result.forecast, conformal(scores))
            result = replace(result, low=low, high=high, inside=low <= result.step_ms <= high)
        with_intervals.append(result)
    return with_intervals


def scores_of(held: Iterable[HeldOut]) -> list[float]:
    """Return |error| ÷ deviation ÷ growth of the cells that have a forecast."""
    scores = []
    for result in held:
        if result.forecast is not None:
            expected_ms = result.forecast.deviation_ms * result.forecast.growth
            error_ms = abs(result.step_ms - result.forecast.step_ms)
            scores.append(error_ms / max(expected_ms, 1e-9))
    return scores


def _holdout_key(cell: MeasuredCell, way: str) -> tuple[Any, ...]:
    query = cell.query
    if way == SIZE:
        return (cell.query.ranks,)
    if way == TRANSPORT:
        return query.transport, cell.query.ranks > 1
    if way == BATCH:
        return query.workload, query.batch_size
    if way == MODEL:
        return query.workload.model, cell.query.ranks > 1
    if way == SMALL:
        return query.workload, query.batch_size < LARGE
    return (query.workload, query.batch_size, query.options, query.wire, query.gpus, query.hosts)


def _can_be_held_out(
    calibration: CalibrationData, cells: list[MeasuredCell], way: str
) -> list[MeasuredCell]:
    if way == SIZE:
        cells = [cell for cell in cells if not cell.query.across_hosts]
        fewest = min((cell.query.ranks for cell in cells), default=0)
        return [cell for cell in cells if cell.query.ranks > fewest]
    if way == TRANSPORT:
        transports = Counter(cell.query.transport for cell in cells)
        ((usual, _),) = transports.most_common(1) or [("", 0)]
        return [cell for cell in cells if cell.query.transport != usual]
    if way == BATCH:
        sizes: dict[Workload, set[int]] = defaultdict(set)
        for cell in calibration.timed:
            sizes[cell.query.workload].add(cell.query.batch_size)
        return [cell for cell in cells if len(sizes[cell.query.workload]) > 1]
    if way == MODEL and len({cell.query.workload.model for cell in cells}) < 2:
        return []
    if way == SMALL:  # the CPU bounds many of them, which is suspect
        small, large = [], set()
        for cell in calibration.timed:
            if cell.query.batch_size < LARGE:
                small.append(cell)
            else:
                large.add(cell.query.workload)
        return [cell for cell in small if cell.query.workload in large]
    return cells


def _calibration_without(
    calibration: CalibrationData, way: str, key: tuple[Any, ...]
) -> CalibrationData:
    """Return a calibration without the cells that are held out.

    Links that were measured by themselves stay, but for those of as many ranks with SIZE.
    """
    if way == SIZE:
        return calibration.without(lambda cell: False, most_ranks=key[0] - 1)
    if way != TRANSPORT:
        return calibration.without(lambda cell: _holdout_key(cell, way) == key)
    cells = []
    for cell in calibration.cells:
        if _holdout_key(cell, way) == key:  # its exchange alone stays: it is a link
            cell = replace(cell, step_ms=None, cost_ms=None)
        cells.append(cell)
    return replace(calibration, cells=tuple(cells))


def way_of(calibration: CalibrationData, query: CellQuery) -> str:
    """Return how cells are held out, so that as much is unknown as of a query: CONDITION, or BATCH
    where its own batch size was not measured.
    """
    if query.batch_size in of_batches(calibration, query.workload):
        return CONDITION
    return BATCH


def held_out_cells(
    calibration: CalibrationData, queries: Iterable[CellQuery]
) -> dict[str, list[HeldOut]]:
    """Return forecasts of a calibration's own cells by each way that queries need (way_of)."""
    held: dict[str, list[HeldOut]] = {}
    for way in sorted({way_of(calibration, query) for query in queries}):
        held[way] = []
        with contextlib.suppress(ValueError):  # there is nothing to hold out
            held[way] = hold_out(calibration, way, MOST_HELD_OUT)
    return held


def errors_of(held: Sequence[HeldOut]) -> dict[str, Any]:
    """Return how good forecasts of held-out cells were: mean absolute errors as shares, with the
    null model's, of the `cost_cells` with a cost and of all; None without cells for one.
    """
    errors: dict[str, list[float]] = {"cost": [], "null_cost": [], "step": [], "null_step": []}
    inside = []
    for result in held:
        prediction = result.forecast
        if prediction is None:
            continue
        errors["step"].append(abs(prediction.step_ms / result.step_ms - 1))
        errors["null_step"].append(abs(prediction.null_step_ms / result.step_ms - 1))
        if result.cost_ms is not None and result.cost_ms > 0:
            errors["cost"].append(abs(prediction.cost_ms / result.cost_ms - 1))
            errors["null_cost"].append(abs(prediction.null_cost_ms / result.cost_ms - 1))
        if result.inside is not None:
            inside.append(result.inside)
    summary: dict[str, Any] = {
        "cells": len(held),
        "not_forecast": len(held) - len(errors["step"]),
        "cost_cells": len(errors["cost"]),
        "covered": None,  # of the cells with an interval
        "with_interval": len(inside),
    }
    if inside:
        summary["covered"] = sum(inside)
    for name, several in errors.items():
        summary[name] = None
        if several:
            summary[name] = fmean(several)
    return summary


# The scores of held-out cells, by (way of holding out, machine, device): errors on another machine
# say nothing of this one.
Scores = Mapping[tuple[str, str, str], Sequence[float]]


def scores_by_machine(study: Study) -> Scores:
    """Return the scores of a study's cells in each way that upcoming cells may need."""
    held: dict[tuple[str, str, str], list[HeldOut]] = defaultdict(list)
    with contextlib.suppress(ValueError):  # nothing was measured, or too little
        calibration = calibrate(study)
        for way in (CONDITION, BATCH):
            for result in hold_out(calibration, way, MOST_HELD_OUT):
                held[_score_key(way, result.cell.query)].append(result)
    return {key: scores_of(results) for key, results in held.items()}


def _score_key(way: str, query: CellQuery) -> tuple[str, str, str]:
    return way, query.machine, query.workload.requested("device")


calibration_of = functools.lru_cache(maxsize=1)(calibrate)  # of the launcher's study


def forecast_before(
    cell: Cell, study: Study, machine: str, link_class: str | None, scores: Scores
) -> dict[str, Any]:
    """Return the forecast of a cell that is about to run, as plain JSON types.

    Those of Forecast, the VERSION of the model, the number of `cells` that it rests on, the
    `level` of its interval and the number of cells `held_out` for it; or `refused`: why there is
    none. `machine` is the one it will run on, `link_class` the farthest between its GPUs.
    """
    try:
        calibration = calibration_of(study)
    except ValueError:
        refused = "no run of the study with a step time was measured before it"
        return {"version": VERSION, "cells": 0, "refused": refused}
    facts = {"version": VERSION, "cells": len(calibration.cells)}
    requested = workload_of(request_of(cell), {})
    workload = None  # with its gradients, which measured cells know
    for measured in calibration.timed:
        there = measured.query.workload
        if workload is not None and there.gradient_bytes <= workload.gradient_bytes:
            continue
        if (there.model, there.rest) == (requested.model, requested.rest):
            workload = there
    if workload is None:
        refused = f"no run of the study that trains {requested} like this was measured before it"
        return {**facts, "refused": refused}
    of_way: Sequence[float] = ()
    try:
        query = query_of(cell, workload, link_class, machine)
        if why_no_error(query, 0) != NOT_SCORED and _most_ranks(calibration, query.workload) > 1:
            of_way = scores.get(_score_key(way_of(calibration, query), query), ())
        prediction = forecast(calibration, query, of_way)
    except ValueError as error:
        return {**facts, "refused": str(error)}
    return {**facts, "held_out": len(of_way), "level": LEVEL, **asdict(prediction)}
