"""Curves as figures: against the number of GPUs, images per second and efficiency; and what figures of other curves share."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from analysis.report.numbers import estimate, number
from analysis.report.style import (
    INK,
    LABEL_PLACE,
    MUTED,
    PAPER,
    Picture,
    curve_height,
    curve_label,
    drawn,
    figure_width,
    for_width,
    label_step,
    line_style,
    new_figure,
    rendered,
    spread,
    window,
)
from analysis.study.estimates import Estimate, Point
from analysis.study.names import gpu_ids, legend_names, short_names
from analysis.text import single_line

HEIGHT = 2.9  # inches, on the page
LABEL_LENGTH, LEAST_LENGTH = 24, 18  # characters, on the page and at least
ASIDE = 5.0  # points between the intervals of curves that would cover each other
MOST_ASIDE = 12.0  # between the outermost of them


@dataclass(frozen=True)
class DrawnCurve:
    """A curve and how it looks."""

    label: str
    points: tuple[Point, ...]
    colour: str
    marker: str


def rates_figure(
    curves: Sequence[DrawnCurve], unit: str, things: str, name: str, caption: str
) -> Picture:
    """Return images (`things`) per second against the number of GPUs (`unit`), with N × the slowest member alone."""
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    ends = []
    for place, curve in enumerate(curves):
        _ideal(axes, curve)
        ends.append(
            draw_curve(
                axes, [(p.world_size, p.rate, p.suspect) for p in curve.points], curve, place
            )
        )
    ideal = [
        point.baseline.value * point.world_size
        for curve in curves
        for point in curve.points
        if point.baseline
    ]
    axis_of_rates(axes, curves, things, ideal)
    sizes = {point.world_size for curve in curves for point in curve.points} | (
        {1} if ideal else set()
    )
    _finish(axes, sorted(sizes), curves, ends, unit, "rate")
    rows = [
        (curve.label, gpu_ids(p.gpus), p.world_size, p.rate, p.baseline and p.baseline.value * p.world_size)
        for curve in curves for p in curve.points
    ]  # fmt: skip
    rate = f"{things.replace(' ', '_')}_per_second"
    told = _told([(curve, [(p, p.rate) for p in curve.points]) for curve in curves], "rate", unit)
    return rendered(
        figure,
        name,
        f"{caption} {told}".strip(),
        drawn(("curve", "gpus", "world_size", rate, f"ideal_{rate}"), rows),
    )


def efficiency_figure(curves: Sequence[DrawnCurve], unit: str, name: str, caption: str) -> Picture:
    """Return the efficiency against the number of GPUs (`unit`) of the curves that have one."""
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    shown = [curve for curve in curves if efficiencies(curve.points)]
    axes.axhline(1.0, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    apart = min(ASIDE, MOST_ASIDE / max(1, len(shown) - 1))
    ends = [
        draw_curve(
            axes, [(p.world_size, p.efficiency, p.suspect) for p in efficiencies(curve.points) if p.efficiency is not None],
            curve, place, apart * (place - (len(shown) - 1) / 2),
        )
        for place, curve in enumerate(shown)
    ]  # fmt: skip
    every = [
        p.efficiency
        for curve in shown
        for p in efficiencies(curve.points)
        if p.efficiency is not None
    ]
    low, high = window(every, [1.0])
    margin = max(0.005, 0.1 * (high - low))
    axes.set_ylim(max(0.0, low - margin), high + margin)
    axes.set_ylabel("efficiency")
    axes.locator_params(
        axis="y", nbins=7, steps=(1, 2, 5, 10)
    )  # a tick says its value with one decimal
    step = axes.get_ylim()[1] - axes.get_ylim()[0]
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{0 if step > 0.06 else 1}f} %")
    sizes = sorted({point.world_size for curve in shown for point in efficiencies(curve.points)})
    _finish(axes, sizes, shown, ends, unit, "share")
    begins = " The axis does not begin at 0." if axes.get_ylim()[0] > 0 else ""
    rows = [
        (curve.label, gpu_ids(p.gpus), p.world_size, p.efficiency)
        for curve in shown
        for p in efficiencies(curve.points)
    ]
    efficient = [
        (c, [(p, p.efficiency) for p in efficiencies(c.points) if p.efficiency]) for c in shown
    ]
    told = _told(efficient, "share", unit)
    return rendered(
        figure,
        name,
        f"{caption}{begins} {told}".strip(),
        drawn(("curve", "gpus", "world_size", "efficiency"), rows),
    )


def _told(
    curves: Sequence[tuple[DrawnCurve, list[tuple[Point, Estimate]]]], kind: str, unit: str
) -> str:
    """Return the number at the end of each curve, `On 4 GPUs: eager 18,676; compile 25,738.`, where one subset has that size."""
    most = max(point.world_size for _, points in curves for point, _ in points)
    names = short_names([single_line(curve.label) for curve, _ in curves])
    each = []
    for curve, points in curves:
        values = [value for point, value in points if point.world_size == most]
        if len(values) == 1:
            name = f"{names[single_line(curve.label)]} " if len(curves) > 1 else ""
            each.append(name + estimate(values[0], kind))
    return f"On {most} {unit}: {'; '.join(each)}." if each else ""


def efficiencies(points: Sequence[Point]) -> list[Point]:
    """Return the points of several GPUs that have an efficiency."""
    return [point for point in points if point.efficiency is not None and point.world_size > 1]


def axis_of_rates(
    axes: Any, curves: Sequence[DrawnCurve], things: str, others: Sequence[float] = ()
) -> None:
    """Draw the axis of images (`things`) per second, from 0 to the highest rate of the curves and of `others`."""
    axes.set_ylim(0, window([point.rate for curve in curves for point in curve.points], others)[1])
    axes.set_ylabel(f"{things}/s")
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:g}"
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the sizes, and the median at each size."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, value in points:
        by_size[size].append(value)
    return sorted(by_size), [median(by_size[size]) for size in sorted(by_size)]


def _ideal(axes: Any, curve: DrawnCurve) -> None:
    """Draw N × the slowest member alone, from one GPU on."""
    alone = {
        point.world_size: point.baseline.value
        for point in curve.points
        if point.baseline is not None
    }
    if alone:
        sizes = sorted({1, *alone})
        rates = [size * alone.get(size, alone[min(alone)]) for size in sizes]
        axes.plot(sizes, rates, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)


def draw_curve(
    axes: Any,
    points: Sequence[tuple[float, Estimate, bool]],
    curve: DrawnCurve,
    place: int,
    aside: float = 0.0,
) -> tuple[float, float, str]:
    """Draw points (x, value, suspect) and a line through the medians of each x; return (x, y, colour) of the curve's end.

    The curve is moved to the right by `aside` points, so that intervals of several curves do not cover each other.
    """
    from matplotlib.transforms import offset_copy

    colour = curve.colour
    moved = offset_copy(axes.transData, axes.figure, x=aside, units="points")
    xs, ys = _line([(x, value.value) for x, value, _ in points])
    axes.plot(xs, ys, color=colour, ls=line_style(place), zorder=2, transform=moved)
    known = [(x, e.low, e.high) for x, e, _ in points if e.low is not None and e.high is not None]
    if known:
        axes.vlines(*zip(*known, strict=True), color=colour, lw=1.1, zorder=2, transform=moved)
    for suspect in (False, True):
        marked = [(x, value.value) for x, value, doubted in points if doubted == suspect]
        if marked:
            face = PAPER if suspect else colour
            look = {
                "marker": curve.marker,
                "color": colour,
                "markerfacecolor": face,
                "markeredgewidth": 1.2,
            }
            axes.plot(
                *zip(*marked, strict=True), linestyle="none", zorder=3, transform=moved, **look
            )
    return xs[-1], ys[-1], colour


def _finish(
    axes: Any, sizes: Sequence[int], curves: Sequence[DrawnCurve], ends: Sequence[tuple[float, float, str]], unit: str,
    kind: str,
) -> None:  # fmt: skip
    """Draw the axis of sizes, and a label at the end of each curve; `kind` is that of their numbers."""
    logarithmic = sizes[-1] > 16
    limit_x(axes, sizes, logarithmic)
    if logarithmic:
        sizes = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(unit)
    label_ends(axes, curves, ends, kind)


def limit_x(axes: Any, values: Sequence[float], logarithmic: bool) -> None:
    """Have the axis show all values, in rising order: curves are moved aside, so matplotlib does not see where they lie."""
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xlim(values[0] / 2**0.2, values[-1] * 2**0.2)
        axes.minorticks_off()
    else:
        beyond = 0.05 * (values[-1] - values[0]) or 1
        axes.set_xlim(values[0] - beyond, values[-1] + beyond)


def label_ends(
    axes: Any, curves: Sequence[DrawnCurve], ends: Sequence[tuple[float, float, str]], kind: str
) -> None:
    """Write at the end of each curve its name, of a single one its number, and give the axes the look of curves."""
    axes.grid(axis="x", visible=False)
    low, high = axes.get_ylim()
    places = spread([y for _, y, _ in ends], label_step(axes) * (high - low)) if ends else []
    words = legend_names(
        [single_line(curve.label) for curve in curves], max(LEAST_LENGTH, for_width(LABEL_LENGTH))
    )
    if len(curves) == 1:
        (_, y, colour), at = ends[0], (LABEL_PLACE, (places[0] - low) / (high - low))
        axes.annotate(
            number(y, kind),
            at,
            xycoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
        )
    else:
        for order, (curve, place) in enumerate(zip(curves, places, strict=True)):
            look = {"color": curve.colour, "marker": curve.marker, "markersize": 3.5}
            curve_label(
                axes, words[single_line(curve.label)], (place - low) / (high - low), order, look
            )
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
