"""Every cell of several GPUs beside its forecast and beside the null model.

Forecasts written before the ranks started come first. A cell without one is held out: forecast from
the others, after all were measured, which is hindsight.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary

from analysis.prediction.calibration import COST, calibrate
from analysis.prediction.forecast import CONDITION, FEWEST_HELD_OUT, LEVEL, hold_out, scores_of
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study import names as study_names
from analysis.study.estimates import Estimate, Findings
from analysis.study.names import gpu_ids, ran_alone, short_names, unit_of
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import finite

MOST_CELLS = 60  # of several GPUs: holding each out takes time that grows with their square
MS = NumberFormat(decimals=2)
INSIDE = {None: "", True: "yes", False: "no"}
CHANGE = NumberFormat(100.0, "%", 2, sign=True)


@dataclass(frozen=True)
class CellForecast:
    """What one cell was forecast to give, and what it gave."""

    record_id: str  # of the cell's first run
    before: bool  # written before the ranks started; else the cell was held out
    measured_ms: float  # the step
    measured_cost_ms: float | None  # of communication; None where it was not measured
    forecast: Mapping[str, Any]  # of Forecast, as a record has it

    def ms(self, name: str) -> float | None:
        """Return a number of the forecast; None where it has none."""
        return finite(self.forecast.get(name))

    def step_error(self, name: str) -> float:
        """Return the measured step against a forecast one, as a share; more than 0: slower."""
        return self.measured_ms / (self.ms(name) or self.measured_ms) - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the interval; None without one."""
        low, high = self.ms("low"), self.ms("high")
        return None if low is None or high is None else low <= self.measured_ms <= high

    @property
    def step(self) -> Estimate:
        """The forecast of the step, with its interval."""
        return Estimate(self.ms("step_ms") or 0.0, self.ms("low"), self.ms("high"))

    @property
    def made(self) -> str:
        """When it was made."""
        return "before it ran" if self.before else "afterwards, from the other cells"


@dataclass(frozen=True)
class StudyForecasts:
    """The forecasts of a study's cells."""

    cells: tuple[CellForecast, ...] = ()  # before their ranks started first, then held out
    held_out: int = 0  # cells whose errors the intervals come from
    too_many: bool = False  # cells, to hold out each

    def of(self, record_ids: Iterable[str]) -> CellForecast | None:
        """Return the forecast of a cell by the ids of its records; None where there is none."""
        wanted = set(record_ids)
        return next((cell for cell in self.cells if cell.record_id in wanted), None)


_cache: WeakKeyDictionary[Study, StudyForecasts] = WeakKeyDictionary()


def study_forecasts(study: Study) -> StudyForecasts:
    """Return the forecasts of a study's cells, made once for all sections."""
    if study not in _cache:
        _cache[study] = _study_forecasts(study)
    return _cache[study]


def _study_forecasts(study: Study) -> StudyForecasts:
    cells = _recorded(study)
    recorded = {cell.record_id for cell in cells}
    try:
        calibration = calibrate(study)
    except ValueError:  # nothing was measured
        return StudyForecasts(tuple(cells))
    if len(calibration.several) > MOST_CELLS:
        return StudyForecasts(tuple(cells), too_many=True)
    held = []
    with contextlib.suppress(ValueError):  # there is no cell to hold out
        held = hold_out(calibration, CONDITION)
    for result in held:
        if result.forecast is not None and recorded.isdisjoint(result.cell.record_ids):
            ends = {"low": result.low, "high": result.high}
            values = {**asdict(result.forecast), **ends}
            record_id = result.cell.record_ids[0]
            cell = CellForecast(record_id, False, result.step_ms, result.cost_ms, values)
            cells.append(cell)
    return StudyForecasts(tuple(cells), len(scores_of(held)))


def _recorded(study: Study) -> list[CellForecast]:
    """Return the forecasts that records hold of themselves, written before their ranks started.

    Beside cells of several GPUs those of one show nothing new.
    """
    fewest = 1 if ran_alone(study) else 2
    cells = []
    for runs in study.runs:
        for record in runs.records:
            recorded = recorded_forecast(record)
            if runs.world_size >= fewest and recorded is not None and recorded.in_time:
                cost_ms = finite(record.metrics.get(COST))
                ends = {"low": recorded.low, "high": recorded.high}
                values = {**record.predicted, **ends}
                cell = CellForecast(record.record_id, True, recorded.measured_ms, cost_ms, values)
                cells.append(cell)
    return cells


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells; None where its records allow none."""
    shown = study_forecasts(study)
    if not shown.cells and not shown.too_many:
        return None
    alone, unit = ran_alone(study), unit_of(study)
    on = f"one {unit.removesuffix('s')}" if alone else f"several {unit}"
    level = "" if alone else f" ({100 * LEVEL:.0f} % intervals)"
    with_cost = any(cell.measured_cost_ms is not None for cell in shown.cells)
    caption = (
        f"Each cell on {on} beside its forecast{level}, and how much longer the measured step is "
        "than the forecast and than the null model, which says that nothing changes."
    )
    if with_cost:
        caption += " Cost: what the strategy adds to a step, by steps with and without it in turn."
    names = _names(study, shown.cells)
    table = Table.of("forecasts", caption, (
        Column("cell", "cell", lambda cell: names[cell.record_id][0]),
        Column("gpus", unit, lambda cell: names[cell.record_id][1]),
        Column("made", "made", lambda cell: cell.made),
        Column("step_ms", "step ms", lambda cell: cell.measured_ms, MS),
        Column("forecast_ms", "forecast ms", lambda cell: cell.step, MS, bounded=True),
        Column("error", "measured against it", lambda cell: cell.step_error("step_ms"), CHANGE),
        Column(
            "null_error", "against null model", lambda cell: cell.step_error("null_step_ms"), CHANGE
        ),
        Column("inside", "in interval", lambda cell: INSIDE[cell.inside]),
        Column("cost_ms", "cost ms", lambda cell: cell.measured_cost_ms, MS, shown=with_cost),
        Column(
            "forecast_cost_ms", "cost forecast ms", lambda cell: cell.ms("cost_ms"), MS,
            shown=with_cost,
        ),
        Column(
            "null_cost_ms", "cost by null model ms", lambda cell: cell.ms("null_cost_ms"), MS,
            shown=with_cost,
        ),
        Column("basis", "basis", lambda cell: single_line(cell.forecast.get("basis", ""), 60)),
    ), shown.cells, lambda cell: cell.inside is False)  # fmt: skip
    lines = tuple(_lines(shown, on, alone))
    return Section("forecasts", "Forecast and measured", lines, (), (table,))


def _names(study: Study, cells: Sequence[CellForecast]) -> dict[str, tuple[str, str]]:
    """Return {record_id: (name of its cell, its GPUs)}; a recorded one says which of the runs."""
    forecast = {cell.record_id: cell for cell in cells}
    shown = []
    for runs in study.runs:
        for record in runs.records:
            if record.record_id in forecast:
                shown.append((record, study_names.label(study, runs), gpu_ids(runs.gpus)))
    short = short_names(dict.fromkeys(label for _, label, _ in shown))
    names = {}
    for record, label, gpus in shown:
        words = [short[label]]
        if forecast[record.record_id].before:
            words += record.run_suffixes
        names[record.record_id] = (study_names.BETWEEN.join(words), gpus)
    return names


def _lines(shown: StudyForecasts, on: str, alone: bool) -> list[str]:
    """Return how good the forecasts were: those made before their cells first."""
    lines = []
    for before in (True, False):
        cells = [cell for cell in shown.cells if cell.before == before]
        if not cells:
            continue
        was, its = ("was", "its") if len(cells) == 1 else ("were", "their")
        how = "forecast afterwards, each from the other cells"
        if before:
            how = f"forecast before {its} ranks started"
        lines.append(f"{count(len(cells), 'cell')} on {on} {was} {how}: {_errors(cells, alone)}.")
    if alone:
        lines.append(f"No error is claimed: cells on {on} are not held out.")
    elif shown.cells and all(cell.ms("low") is None for cell in shown.cells):
        lines.append(
            f"No error is claimed: {count(shown.held_out, 'cell')} could be held out, "
            f"{FEWEST_HELD_OUT} are needed."
        )
    if shown.too_many:
        lines.append(
            f"More than {MOST_CELLS} cells are not held out here; "
            "`python -m analysis predict STUDY --holdout condition` does."
        )
    return lines


def _errors(cells: Sequence[CellForecast], alone: bool) -> str:
    """Return the mean errors of step and cost beside the null model's, and what lies inside."""
    step = fmean(abs(cell.step_error("step_ms")) for cell in cells)
    null = fmean(abs(cell.step_error("null_step_ms")) for cell in cells)
    words = (
        f"the step is off by {number(step, 'part')} on average, the null model by "
        f"{number(null, 'part')}"
    )
    errors, null_errors = [], []
    for cell in cells:
        cost_ms, null_cost_ms = cell.ms("cost_ms"), cell.ms("null_cost_ms")
        measured_ms = cell.measured_cost_ms or 0.0
        if measured_ms > 0 and cost_ms is not None and null_cost_ms is not None:
            errors.append(abs(cost_ms / measured_ms - 1))
            null_errors.append(abs(null_cost_ms / measured_ms - 1))
    if errors and not alone:
        words += (
            f"; the cost of communication by {number(fmean(errors), 'share')}, the null model by "
            f"{number(fmean(null_errors), 'share')}"
        )
    judged = [cell.inside for cell in cells if cell.inside is not None]
    if judged:
        words += (
            f"; {sum(judged)} of {len(judged)} lie in their {100 * LEVEL:.0f} % intervals (without "
            f"a fault at most 1 in {round(1 / (1 - LEVEL))} is meant to lie outside)"
        )
    return words
