"""The figure of costs as forecast against those measured, with the line on which both are equal."""

from collections.abc import Sequence
from typing import Any

from analysis.prediction.forecast import LEVEL
from analysis.report.sections.forecasts.drawing import (
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
from analysis.report.sections.forecasts.known import CellForecast

HEIGHT = 2.9  # inches, on the page
LOGARITHMIC = 6.0  # between the largest and the smallest, from here on
Point = tuple[CellForecast, float, float]  # the costs of a cell in ms: measured, and as forecast


def scatter(told: Sequence[CellForecast], unit: str) -> list[Picture]:
    """Return the figure; none where no cell's cost was both measured and forecast."""
    points: list[Point] = [
        (one, one.measured_cost_ms, one.cost_ms)
        for one in told
        if one.measured_cost_ms is not None and one.cost_ms is not None
    ]
    if not points:
        return []
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    limits = _set_scale(axes, points)
    axes.plot(limits, limits, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    palette = colours(one.strategy for one, _, _ in points)
    for point in points:
        _draw(axes, point, palette[point[0].strategy], limits[0])
    _set_limits(axes, limits)
    axes.set_xlabel("measured cost, ms of a step")
    axes.set_ylabel("forecast, ms of a step")
    axes.tick_params(length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    _legend(axes, palette)
    keys = (
        "strategy",
        "gpus",
        "before",
        "measured_ms",
        "forecast_ms",
        "low_ms",
        "high_ms",
        "null_ms",
    )
    rows = [
        (
            one.strategy,
            one.gpus,
            int(one.before),
            measured,
            said,
            *_ends(one, said),
            one.null_cost_ms,
        )
        for one, measured, said in points
    ]
    return [
        rendered(
            figure,
            "forecast-cost",
            _caption([one for one, _, _ in points], unit),
            drawn(keys, rows),
        )
    ]


def _ends(one: CellForecast, said: float) -> tuple[float | None, float | None]:
    """Return the interval of the cost: that of the step, around the cost."""
    low, high = (None if end is None else said + end - one.step_ms for end in (one.low, one.high))
    return low, high


def _set_scale(axes: Any, points: Sequence[Point]) -> tuple[float, float]:
    """Make both axes logarithmic where costs differ much, and return their limits."""
    values = [
        value
        for one, measured, said in points
        for value in (measured, said, one.null_cost_ms or said)
    ]
    least, most = min(values), max(values)
    if least > 0 and most / least > LOGARITHMIC:
        axes.set_xscale("log")
        axes.set_yscale("log")
        return least / 1.25, most * 1.25
    room = 0.08 * (most - least) or 0.1
    return least - room, most + room


def _draw(axes: Any, point: Point, colour: str, bottom: float) -> None:
    """Draw one cell, its interval down to the bottom of the axes, and what the null model says of it."""
    one, measured, said = point
    if one.null_cost_ms is not None:
        axes.plot(
            measured,
            one.null_cost_ms,
            "x",
            color=MUTED,
            markersize=4.5,
            markeredgewidth=1.0,
            zorder=2,
        )
    low, high = _ends(one, said)
    if low is not None and high is not None:
        axes.plot(
            [measured, measured],
            [max(low, bottom), max(high, bottom)],
            color=colour,
            lw=0.8,
            alpha=0.7,
            zorder=2,
        )
    face = colour if one.before else PAPER
    axes.plot(
        measured,
        said,
        marker(one.strategy),
        color=colour,
        markerfacecolor=face,
        markeredgewidth=1.3,
        zorder=3,
    )


def _set_limits(axes: Any, limits: tuple[float, float]) -> None:
    """Give both axes the same limits and plain numbers: on a logarithmic one at 1, 2 and 5 of each decade."""
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    if axes.get_xscale() != "log":
        axes.locator_params(nbins=5, steps=(1, 2, 5, 10))
        return
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
        axes.plot(
            [LABEL_PLACE + 0.015],
            [y],
            marker(name),
            color=colour,
            transform=axes.transAxes,
            clip_on=False,
        )
        axes.annotate(
            name,
            (LABEL_PLACE + 0.05, y),
            xycoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _caption(shown: Sequence[CellForecast], unit: str) -> str:
    if all(one.before for one in shown):
        how = "All were forecast before their ranks started."
    elif not any(one.before for one in shown):
        how = "All were forecast afterwards, each from the other cells."
    else:
        how = "Filled: forecast before its ranks started; hollow: forecast afterwards, from the other cells."
    bars = (
        f" Bars: {100 * LEVEL:.0f} % intervals."
        if any(one.low is not None for one in shown)
        else ""
    )
    return (
        f"What communication costs a step on several {unit}, as forecast and as measured; on the dashed line both are equal. "
        f"{how}{bars} Crosses: the null model, for which nothing changes."
    )
