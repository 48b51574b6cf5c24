"""Every cell of several GPUs beside its forecast and beside the null model: sentences, table and figure."""

from collections.abc import Sequence
from statistics import fmean

from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.sections.forecasts.curve import curves
from analysis.report.sections.forecasts.known import MOST_CELLS, CellForecast, StudyForecasts, known
from analysis.report.sections.forecasts.scatter import scatter
from analysis.report.table import Column, Table, Value
from analysis.study import names as labels
from analysis.study.estimates import Estimate, Findings
from analysis.study.names import gpu_ids, ran_alone, short_names, unit_of
from analysis.study.study import Study
from analysis.text import count

MS = NumberFormat(decimals=2)
CHANGE = NumberFormat(100.0, "%", 2, sign=True)


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells and the curves over numbers of GPUs; None where its records allow none."""
    found = known(study)
    if not found.forecasts and not found.too_many:
        return None
    names, unit, alone = _names(study, found.forecasts), unit_of(study), ran_alone(study)
    on = f"one {unit.removesuffix('s')}" if alone else f"several {unit}"
    pictures = () if alone else (*scatter(found.forecasts, unit), *curves(study, found))
    with_cost = any(one.measured_cost_ms is not None for one in found.forecasts)
    rows = tuple(_row(one, *names[one.record_id]) for one in found.forecasts)
    table = Table(
        "forecasts",
        f"Each cell on {on} beside its forecast{f' ({100 * LEVEL:.0f} % intervals)' * (not alone)}, and how much longer the "
        "measured step is than the forecast and than the null model, which says that nothing changes."
        f"{' Cost: what the strategy adds to a step, by steps with and without it in turn.' * with_cost}",
        (
            Column("cell", "cell"), Column("gpus", unit), Column("made", "made"),
            Column("step_ms", "step ms", kind=MS), Column("forecast_ms", "forecast ms", kind=MS, bounded=True),
            Column("error", "measured against it", kind=CHANGE), Column("null_error", "against null model", kind=CHANGE),
            Column("inside", "in interval"), Column("cost_ms", "cost ms", kind=MS, shown=with_cost),
            Column("forecast_cost_ms", "cost forecast ms", kind=MS, shown=with_cost),
            Column("null_cost_ms", "cost by null model ms", kind=MS, shown=with_cost),
            Column("basis", "basis"), Column("widest", "least sure part"),
        ),
        rows,
        frozenset(place for place, one in enumerate(found.forecasts) if one.inside is False),
    )  # fmt: skip
    return Section(
        "forecasts", "Forecast and measured", tuple(_lines(found, on, alone)), pictures, (table,)
    )


def _names(study: Study, told: Sequence[CellForecast]) -> dict[str, tuple[str, str]]:
    """Return {record_id: (name of its cell, its GPUs)}; a run with a forecast of its own says which of the cell's runs it is."""
    of_records = {
        record.record_id: (runs, record) for runs in study.runs for record in runs.records
    }
    found = {one.record_id: of_records[one.record_id] for one in told}
    said = {name: labels.label(study, runs) for name, (runs, _) in found.items()}
    short = short_names(dict.fromkeys(said.values()))
    marks = {one.record_id: found[one.record_id][1].marks if one.before else [] for one in told}
    return {
        name: (labels.BETWEEN.join([short[said[name]], *marks[name]]), gpu_ids(runs.gpus))
        for name, (runs, _) in found.items()
    }


def _row(one: CellForecast, name: str, gpus: str) -> tuple[Value, ...]:
    inside = "" if one.inside is None else "yes" if one.inside else "no"
    return (
        name, gpus, one.made, one.measured_ms, Estimate(one.step_ms, one.low, one.high),
        one.error, one.null_error, inside, one.measured_cost_ms, one.cost_ms, one.null_cost_ms, one.basis, one.widest,
    )  # fmt: skip


def _lines(found: StudyForecasts, on: str, alone: bool) -> list[str]:
    """Return how good the forecasts were: first of those that were made before, told apart from hindsight."""
    said = []
    for before in (True, False):
        told = [one for one in found.forecasts if one.before == before]
        if told:
            was, its = ("was", "its") if len(told) == 1 else ("were", "their")
            in_hindsight = "forecast afterwards, each from the other cells"
            how = f"forecast before {its} ranks started" if before else in_hindsight
            said.append(f"{count(len(told), 'cell')} on {on} {was} {how}: {_errors(told, alone)}.")
    if alone:
        said.append(f"No error is claimed: cells on {on} are not held out.")
    elif found.forecasts and all(one.low is None for one in found.forecasts):
        said.append(
            f"No error is claimed: {count(len(found.scores), 'cell')} could be held out, {FEWEST_HELD_OUT} are needed."
        )
    if found.too_many:
        said.append(
            f"More than {MOST_CELLS} cells are not held out here; `python -m analysis predict STUDY --holdout condition` does."
        )
    return said


def _errors(told: Sequence[CellForecast], alone: bool) -> str:
    """Return the mean errors of the step and of the cost, with the null model's, and how many lie in their intervals.

    On one GPU alone nothing is communication's cost.
    """
    step, null = fmean(abs(one.error) for one in told), fmean(abs(one.null_error) for one in told)
    said = f"the step is off by {number(step, 'part')} on average, the null model by {number(null, 'part')}"
    known = [(one.measured_cost_ms, one.cost_ms, one.null_cost_ms) for one in told]
    costs = [
        (forecast / measured - 1, of_null / measured - 1)
        for measured, forecast, of_null in known
        if measured is not None and forecast is not None and of_null is not None and measured > 0
    ]
    if costs and not alone:
        own, nulls = (fmean(abs(error) for error in errors) for errors in zip(*costs, strict=True))
        said += f"; the cost of communication by {number(own, 'share')}, the null model by {number(nulls, 'share')}"
    judged = [one.inside for one in told if one.inside is not None]
    if judged:
        said += f"; {sum(judged)} of {len(judged)} lie in their {100 * LEVEL:.0f} % intervals "
        said += f"(without a fault at most 1 in {round(1 / (1 - LEVEL))} is meant to lie outside)"
    return said
