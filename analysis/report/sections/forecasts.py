"""Every cell of several GPUs beside its forecast and beside the null model.

Forecasts written before the ranks started come first. A cell without one is held out: forecast from
the others, after all were measured, which is hindsight.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from analysis.prediction.calibration import COST, calibrate
from analysis.prediction.forecast import CONDITION, FEWEST_HELD_OUT, LEVEL, hold_out, scores_of
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study.estimates import Estimate, Findings
from analysis.study.names import BETWEEN, gpu_ids, label, ran_alone, short_names
from analysis.study.runs import Runs
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import Record, finite

MOST_CELLS = 60  # of several GPUs: holding each out takes time that grows with their square
INSIDE = {None: "", True: "yes", False: "no"}
CHANGE = NumberFormat(100.0, "%", 2, sign=True)


@dataclass(frozen=True)
class CellForecast:
    """What one cell was forecast to give, and what it gave."""

    runs: Runs
    record: Record  # the cell's first run, or the one that was forecast
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
    def step(self) -> Estimate:
        """The forecast of the step, with its interval."""
        return Estimate(self.ms("step_ms") or 0.0, self.ms("low"), self.ms("high"))

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the interval; None without one."""
        low, high = self.step.low, self.step.high
        return None if low is None or high is None else low <= self.measured_ms <= high


def study_forecasts(study: Study) -> tuple[list[CellForecast], int]:
    """Return the forecasts of cells, and how many cells could be held out.

    Those written before their ranks started come first. Beside cells of several GPUs those of one
    show nothing new.
    """
    fewest = 1 if ran_alone(study) else 2
    cells = []
    by_id = {}
    for runs in study.runs:
        for record in runs.records:
            by_id[record.record_id] = runs, record
            recorded = recorded_forecast(record)
            if runs.world_size >= fewest and recorded is not None and recorded.in_time:
                values = {**record.predicted, "low": recorded.low, "high": recorded.high}
                measured = recorded.measured_ms, finite(record.metrics.get(COST))
                cells.append(CellForecast(runs, record, True, *measured, values))
    ids = {cell.record.record_id for cell in cells}
    held = []
    with contextlib.suppress(ValueError):  # nothing was measured, or no cell of several GPUs
        calibration = calibrate(study)
        if len(calibration.several) <= MOST_CELLS:
            held = hold_out(calibration, CONDITION)
    for result in held:
        if result.forecast is not None and ids.isdisjoint(result.cell.record_ids):
            values = {**asdict(result.forecast), "low": result.low, "high": result.high}
            measured = result.step_ms, result.cost_ms
            first = by_id[result.cell.record_ids[0]]
            cells.append(CellForecast(*first, False, *measured, values))
    return cells, len(scores_of(held))


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells; None where its records allow none."""
    cells, held_out = study_forecasts(study)
    if not cells:
        return None
    alone = ran_alone(study)
    on = "one GPU" if alone else "several GPUs"
    level = "" if alone else f" ({100 * LEVEL:.0f} % intervals)"
    caption = (
        f"Each cell on {on} beside its forecast{level}, and how much longer the measured step is "
        "than the forecast and than the null model, which says that nothing changes. Cost: what "
        "the strategy adds to a step, by steps with and without it in turn."
    )
    names = short_names(label(study, cell.runs) for cell in cells)

    def name(cell: CellForecast) -> str:
        run = cell.record.run_suffixes if cell.before else ()
        return BETWEEN.join([names[label(study, cell.runs)], *run])

    def made(cell: CellForecast) -> str:
        return "before it ran" if cell.before else "afterwards, from the other cells"

    def error(key: str, heading: str, name: str) -> Column:
        return Column(key, heading, lambda cell: cell.step_error(name), CHANGE)

    table = Table.of(
        "forecasts",
        caption,
        (
            Column("cell", "cell", name),
            Column("gpus", "GPUs", lambda cell: gpu_ids(cell.runs.gpus)),
            Column("made", "made", made),
            Column("step_ms", "step ms", "measured_ms", "ms"),
            Column("forecast_ms", "forecast ms", "step", "ms", bounded=True),
            error("error", "measured against it", "step_ms"),
            error("null_error", "against null model", "null_step_ms"),
            Column("inside", "in interval", lambda cell: INSIDE[cell.inside]),
            Column("cost_ms", "cost ms", "measured_cost_ms", "ms"),
            Column("forecast_cost_ms", "cost forecast ms", lambda cell: cell.ms("cost_ms"), "ms"),
            Column("null_cost_ms", "cost by null ms", lambda cell: cell.ms("null_cost_ms"), "ms"),
            Column("basis", "basis", lambda cell: single_line(cell.forecast.get("basis", ""), 60)),
        ),
        cells,
        lambda cell: cell.inside is False,
    )
    lines = []
    for before, how in (
        (True, "before {} ranks started"),
        (False, "afterwards, each from the other cells"),
    ):
        group = [cell for cell in cells if cell.before == before]
        if group:
            was, its = ("was", "its") if len(group) == 1 else ("were", "their")
            words = f"{was} forecast {how.format(its)}: {_errors(group, alone)}."
            lines.append(f"{count(len(group), 'cell')} on {on} {words}")
    if alone:
        lines.append(f"No error is claimed: cells on {on} are not held out.")
    elif all(cell.step.low is None for cell in cells):
        cells_held = count(held_out, "cell")
        lines.append(
            f"No error is claimed: {cells_held} could be held out, {FEWEST_HELD_OUT} are needed."
        )
    return Section("forecasts", "Forecast and measured", tuple(lines), (), (table,))


def _errors(cells: Sequence[CellForecast], alone: bool) -> str:
    """Return the mean errors of step and cost beside the null model's, and what lies inside."""
    errors: dict[str, list[float]] = {"step": [], "null": [], "cost": [], "null_cost": []}
    inside = []
    for cell in cells:
        errors["step"].append(abs(cell.step_error("step_ms")))
        errors["null"].append(abs(cell.step_error("null_step_ms")))
        cost_ms, null_cost_ms = cell.ms("cost_ms"), cell.ms("null_cost_ms")
        measured_ms = cell.measured_cost_ms or 0.0
        if measured_ms > 0 and cost_ms is not None and null_cost_ms is not None:
            errors["cost"].append(abs(cost_ms / measured_ms - 1))
            errors["null_cost"].append(abs(null_cost_ms / measured_ms - 1))
        if cell.inside is not None:
            inside.append(cell.inside)
    words = (
        f"the step is off by {number(fmean(errors['step']), 'part')} on average, the null model by "
        f"{number(fmean(errors['null']), 'part')}"
    )
    if errors["cost"] and not alone:
        words += (
            f"; the cost of communication by {number(fmean(errors['cost']), 'share')}, the null "
            f"model by {number(fmean(errors['null_cost']), 'share')}"
        )
    if inside:
        words += (
            f"; {sum(inside)} of {len(inside)} lie in their {100 * LEVEL:.0f} % intervals (without "
            f"a fault at most 1 in {round(1 / (1 - LEVEL))} is meant to lie outside)"
        )
    return words
