"""Every cell of several GPUs beside its forecast and beside the null model: sentences, table and figure."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from analysis.findings import labels
from analysis.findings.labels import gpu_ids
from analysis.findings.model import Estimate, Findings
from analysis.findings.study import Study
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL
from analysis.report.names import short_names, unit_of
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.sections.forecasts.curve import curves
from analysis.report.sections.forecasts.known import MOST_CELLS, CellForecast, StudyForecasts, known
from analysis.report.style import (
    INK,
    LABEL_PLACE,
    MUTED,
    PAPER,
    Picture,
    colours,
    curve_height,
    drawn,
    figure_width,
    label_step,
    marker,
    new_figure,
    rendered,
)
from analysis.report.tables import Column, Table, Value
from analysis.report.text import count

PLACE = 33  # after the wires
HEIGHT = 2.9  # inches, on the page
MS = NumberFormat(decimals=2)
CHANGE = NumberFormat(100.0, "%", 2, sign=True)
BEFORE, AFTER = "before it ran", "held out afterwards"
LOGARITHMIC = 6.0  # between the largest and the smallest, from here on


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells and the curves over numbers of GPUs; None where its records allow none."""
    found = known(study)
    names = _names(study, found.forecasts)
    pictures = [*_scatter(found.forecasts, unit_of(study)), *curves(study, found)]
    if not found.forecasts and not found.too_many:
        return None
    rows = tuple(_row(one, *names[one.record_id]) for one in found.forecasts)
    table = Table(
        "forecasts",
        f"Each cell on several {unit_of(study)} beside its forecast ({100 * LEVEL:.0f} % intervals), and how much longer the "
        f"measured step is than the forecast and than the null model, which says that nothing changes. Cost: what the "
        "strategy adds to a step, by steps with and without it in turn.",
        (
            Column("cell", "cell"), Column("gpus", unit_of(study)), Column("made", "made"),
            Column("step_ms", "step ms", MS), Column("forecast_ms", "forecast ms", MS, True),
            Column("error", "measured against it", CHANGE), Column("null_error", "against null model", CHANGE),
            Column("inside", "in interval"),
            Column("cost_ms", "cost ms", MS), Column("forecast_cost_ms", "forecast ms", MS),
            Column("null_cost_ms", "null model ms", MS), Column("basis", "basis"), Column("widest", "least sure part"),
        ),
        rows,
        frozenset(place for place, one in enumerate(found.forecasts) if one.inside is False),
    )  # fmt: skip
    return Section("forecasts", "Forecast and measured", tuple(_lines(found)), tuple(pictures), (table,), place=PLACE)


def _names(study: Study, told: Sequence[CellForecast]) -> dict[str, tuple[str, str]]:
    """Return {record_id: (name of its cell, its GPUs)}."""
    of_records = {record.record_id: runs for runs in study.runs for record in runs.records}
    found = {one.record_id: of_records[one.record_id] for one in told}
    said = {name: labels.label(study, runs) for name, runs in found.items()}
    short = short_names(dict.fromkeys(said.values()))
    return {name: (short[said[name]], gpu_ids(runs.gpus)) for name, runs in found.items()}


def _row(one: CellForecast, name: str, gpus: str) -> tuple[Value, ...]:
    inside = "" if one.inside is None else "yes" if one.inside else "no"
    return (
        name, gpus, BEFORE if one.before else AFTER, one.measured_ms, Estimate(one.step_ms, one.low, one.high),
        one.error, one.null_error, inside, one.measured_cost_ms, one.cost_ms, one.null_cost_ms, one.basis, one.widest,
    )  # fmt: skip


def _lines(found: StudyForecasts) -> list[str]:
    """Return how good the forecasts were: first of those that were made before, told apart from hindsight."""
    said = []
    for before in (True, False):
        told = [one for one in found.forecasts if one.before == before]
        if told:
            how = (
                f"forecast before {'its' if len(told) == 1 else 'their'} ranks started"
                if before
                else "held out and forecast from the others, in hindsight"
            )
            said.append(f"{count(len(told), 'cell')} {'was' if len(told) == 1 else 'were'} {how}: {_errors(told)}.")
    if found.forecasts and all(one.low is None for one in found.forecasts):
        said.append(
            f"No error is claimed: {count(len(found.scores), 'cell')} could be held out, {FEWEST_HELD_OUT} are needed."
        )
    if found.too_many:
        said.append(
            f"More than {MOST_CELLS} cells are not held out here; `python -m analysis predict STUDY --holdout condition` does."
        )
    return said


def _errors(told: Sequence[CellForecast]) -> str:
    """Return the mean errors of the step and of the cost, with the null model's, and how many lie in their intervals."""
    step, null = fmean(abs(one.error) for one in told), fmean(abs(one.null_error) for one in told)
    said = f"the step is off by {number(step, 'part')} on average, the null model by {number(null, 'part')}"
    costs = [
        (one.cost_ms / one.measured_cost_ms - 1, one.null_cost_ms / one.measured_cost_ms - 1)
        for one in told
        if one.cost_ms is not None and one.null_cost_ms is not None and (one.measured_cost_ms or 0) > 0
        if one.measured_cost_ms is not None
    ]
    if costs:
        own, nulls = (fmean(abs(error) for error in errors) for errors in zip(*costs, strict=True))
        said += f"; the cost of communication by {number(own, 'share')}, the null model by {number(nulls, 'share')}"
    judged = [one.inside for one in told if one.inside is not None]
    return said + (f"; {sum(judged)} of {len(judged)} lie in their {100 * LEVEL:.0f} % intervals" if judged else "")


def _scatter(told: Sequence[CellForecast], unit: str) -> list[Picture]:
    """Return the figure of costs as forecast against those measured, with the line on which both are equal."""
    points = [(one, one.measured_cost_ms, one.cost_ms) for one in told]
    shown = [(one, measured, said) for one, measured, said in points if measured is not None and said is not None]
    if not shown:
        return []
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    values = [value for one, measured, said in shown for value in (measured, said, one.null_cost_ms or said)]
    least, most = min(values), max(values)
    scaled = least > 0 and most / least > LOGARITHMIC
    if scaled:
        axes.set_xscale("log")
        axes.set_yscale("log")
        limits = (least / 1.25, most * 1.25)
    else:
        room = 0.08 * (most - least) or 0.1
        limits = (least - room, most + room)
    axes.plot(limits, limits, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    palette = colours(one.strategy for one, _, _ in shown)
    for one, measured, said in shown:
        colour = palette[one.strategy]
        if one.null_cost_ms is not None:
            axes.plot(measured, one.null_cost_ms, "x", color=MUTED, markersize=4.5, markeredgewidth=1.0, zorder=2)
        if one.low is not None and one.high is not None:
            ends = [max(said + end - one.step_ms, limits[0]) for end in (one.low, one.high)]
            axes.plot([measured, measured], ends, color=colour, lw=0.8, alpha=0.7, zorder=2)
        face = colour if one.before else PAPER
        axes.plot(
            measured, said, marker(one.strategy), color=colour, markerfacecolor=face, markeredgewidth=1.3, zorder=3
        )
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    if scaled:
        _ticks(axes, limits)
    else:
        axes.locator_params(nbins=5, steps=(1, 2, 5, 10))
    axes.set_xlabel("measured cost, ms of a step")
    axes.set_ylabel("forecast, ms of a step")
    axes.tick_params(length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    _legend(axes, palette)
    kinds = {one.before for one, _, _ in shown}
    how = {
        frozenset({True}): "All were forecast before their ranks started.",
        frozenset({False}): "All were held out and forecast from the others, in hindsight.",
    }.get(frozenset(kinds), "Filled: forecast before its ranks started; hollow: held out afterwards.")
    bars = f" Bars: {100 * LEVEL:.0f} % intervals." if any(one.low is not None for one, _, _ in shown) else ""
    caption = (
        f"What communication costs a step on several {unit}, as forecast and as measured; on the dashed line both are equal. "
        f"{how}{bars} Crosses: the null model, for which nothing changes."
    )
    keys = ("strategy", "gpus", "before", "measured_ms", "forecast_ms", "low_ms", "high_ms", "null_ms")
    rows = [
        (one.strategy, one.gpus, int(one.before), measured, said, one.low and said + one.low - one.step_ms,
         one.high and said + one.high - one.step_ms, one.null_cost_ms)
        for one, measured, said in shown
    ]  # fmt: skip
    return [rendered(figure, "forecast-cost", caption, drawn(keys, rows))]


def _ticks(axes: Any, limits: tuple[float, float]) -> None:
    """Write plain numbers at 1, 2 and 5 of each decade."""
    steps = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
    inside = [one for one in steps if limits[0] <= one <= limits[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(inside, [f"{one:g}" for one in inside])
        axis.set_ticks([], minor=True)


def _legend(axes: Any, palette: dict[str, str]) -> None:
    """Write the strategies beside the axes, from the top."""
    step = label_step(axes) * 1.15
    for place, (name, colour) in enumerate(palette.items()):
        y = 0.97 - place * step
        axes.plot([LABEL_PLACE + 0.015], [y], marker(name), color=colour, transform=axes.transAxes, clip_on=False)
        axes.annotate(
            name, (LABEL_PLACE + 0.05, y), xycoords="axes fraction", va="center", color=colour, annotation_clip=False
        )


SECTIONS = (forecasts,)
