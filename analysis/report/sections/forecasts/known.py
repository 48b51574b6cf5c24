"""The forecasts of a study's cells, made once for all sections: those written before the ranks started, and of cells held out.

A cell held out is forecast from the others, after all were measured: that is hindsight. A cell with a forecast of its own
(predict=auto) is not held out.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from analysis.findings.predicted.stated import BesideForecast, stated_forecast
from analysis.prediction import tables
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.forecast import FEWEST_HELD_OUT, forecast
from analysis.prediction.holdout import CONDITION, HeldOut, hold_out, scores
from analysis.study.names import ran_alone
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import Record, finite

MOST_CELLS = 60  # of several GPUs: holding each out takes time that grows with their square
# Of a Forecast, and under the same names of a record.
_COSTS = ("cost_ms", "null_cost_ms", "tail_ms", "contention_ms", "own_work_ms", "waiting_ms")


@dataclass(frozen=True)
class CellForecast(BesideForecast):
    """What one cell was forecast to give, and what it gave. Times are ms; None: not known or not claimed."""

    record_id: str  # of the cell's first run
    gpus: int
    strategy: str
    before: bool  # written before the ranks started; else the cell was held out
    measured_ms: float
    measured_cost_ms: float | None
    step_ms: float
    low: float | None
    high: float | None
    null_step_ms: float
    cost_ms: float | None
    null_cost_ms: float | None
    tail_ms: float | None
    contention_ms: float | None
    own_work_ms: float | None
    waiting_ms: float | None
    basis: str
    widest: str  # the part that most of the interval comes from

    @property
    def made(self) -> str:
        """When it was made."""
        return "before it ran" if self.before else "afterwards, from the other cells"


@dataclass(frozen=True)
class StudyForecasts:
    """What can be said of a study's forecasts."""

    calibration: Calibrated | None = None
    scores: tuple[float, ...] = ()  # of the cells that were held out
    forecasts: tuple[CellForecast, ...] = ()  # before their ranks started first, then held out
    too_many: bool = False  # cells, to hold out each

    def of(self, record_ids: Iterable[str]) -> CellForecast | None:
        """Return the forecast of a cell by the ids of its records; None where there is none."""
        wanted = set(record_ids)
        return next((one for one in self.forecasts if one.record_id in wanted), None)


_known: WeakKeyDictionary[Study, StudyForecasts] = WeakKeyDictionary()


def known(study: Study) -> StudyForecasts:
    """Return what can be said of a study's forecasts; nothing where no cell of several GPUs has a step time."""
    if study not in _known:
        _known[study] = _of_study(study)
    return _known[study]


def _of_study(study: Study) -> StudyForecasts:
    of_cells = {record.record_id for runs in study.runs for record in runs.records}  # no drift run
    fewest = (
        1 if ran_alone(study) else 2
    )  # ranks: beside cells of several, those of one show nothing new
    several = (
        one for one in study.usable if one.record_id in of_cells and one.cell.world_size >= fewest
    )
    stated = tuple(found for one in several if (found := _stated(one)) is not None)
    try:
        calibration = calibrate(study)
    except ValueError:
        return StudyForecasts(forecasts=stated)
    if len(calibration.several) > MOST_CELLS:
        return StudyForecasts(calibration, (), stated, too_many=True)
    held: list[HeldOut] = []
    for suspect in (
        False,
        True,
    ):  # cells that a check casts doubt on count where the others are too few
        if len(scores(held)) < FEWEST_HELD_OUT:
            with contextlib.suppress(ValueError):  # there is no such cell
                held = hold_out(calibration, CONDITION, suspect)
    own = {one.record_id for one in stated}
    after = (
        found
        for one in held
        if not own & set(one.cell.record_ids) and (found := _held(one)) is not None
    )
    return StudyForecasts(calibration, tuple(scores(held)), (*stated, *after))


def of_own_parts(found: StudyForecasts, record_ids: Iterable[str]) -> CellForecast | None:
    """Return what a cell's own buckets, collectives and γ give, without its steps; None where the cell did not measure them."""
    calibration, wanted = found.calibration, set(record_ids)
    cell = (
        next((one for one in calibration.cells if wanted & set(one.record_ids)), None)
        if calibration
        else None
    )
    if calibration is None or cell is None or cell.step_ms is None:
        return None
    if tables.slowed(cell.tables) is None or tables.exchange_curve(cell.tables) is None:
        return None
    blinded = (
        replace(one, step_ms=None, cost_ms=None) if one is cell else one
        for one in calibration.cells
    )
    try:
        made = forecast(replace(calibration, cells=tuple(blinded), memo={}), cell.question)
    except ValueError:  # no other cell says the step without exchange
        return None
    return _held(HeldOut(cell, made))


def _held(one: HeldOut) -> CellForecast | None:
    found, question = one.forecast, one.cell.question
    if found is None:
        return None
    said = {name: getattr(found, name) for name in ("step_ms", "null_step_ms", *_COSTS)}
    return CellForecast(
        one.cell.record_ids[0], question.ranks, question.strategy, False, one.step_ms, one.cost_ms,
        low=one.low, high=one.high, basis=found.basis, widest=found.widest, **said,
    )  # fmt: skip


def _stated(record: Record) -> CellForecast | None:
    """Return the forecast that a record holds of itself; None where it has none, or it came too late."""
    found = stated_forecast(record)
    if found is None or not found.in_time:
        return None
    parts: dict[str, Any] = {name: finite(record.predicted.get(name)) for name in _COSTS}
    parts |= {name: single_line(record.predicted.get(name, ""), 60) for name in ("basis", "widest")}
    strategy, cost = (
        str(record.cell.strategy["name"]),
        finite(record.metrics.get("strategy/cost_ms")),
    )
    return CellForecast(
        record.record_id, record.cell.world_size, strategy, True, found.measured_ms, cost, found.step_ms,
        low=found.low, high=found.high, null_step_ms=found.null_step_ms, **parts,
    )  # fmt: skip
