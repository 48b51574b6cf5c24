"""The charts of a report: curves, rows of dots, waterfalls, scatters, heat maps.

A section gives values and words; a chart draws them and saves the figure with its numbers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from analysis.report.figure import (
    HATCH,
    HIGHLIGHT,
    INK,
    MUTED,
    ON_PAGE,
    PAPER,
    RULE,
    TEXT_PT,
    WIDTHS_IN,
    Figure,
    as_figure,
    figure_width,
    for_width,
)
from analysis.report.numbers import NumberFormat, number
from analysis.report.table import numbers_table
from analysis.study.intervals import Estimate
from analysis.study.names import legend_names
from analysis.text import count, single_line

ROW_IN, ROW_LENGTH, MOST_ROWS = 0.4, 46, 20  # height; characters, for phones too; rows
CHARACTER_IN = 0.085  # room for a letter
LINE_OF_ROW = 0.34  # height of one more line of a label, in rows
WATERFALL_LENGTH = 34  # characters of a part's name
SOLID = "-"
DASHED = (0, (4, 3))
DASHES: Any = (
    SOLID, (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1)), (0, (8, 2)),
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
NOT_FROM_0 = " The axis does not begin at 0."  # ends a caption
ASIDE_PT = 4.0  # between neighbouring efficiencies of one number of GPUs
LEGEND_LENGTH, LEAST_LEGEND_LENGTH = 24, 18  # characters on the page, and at least


@dataclass(frozen=True)
class Axis:
    """One axis of a figure."""

    label: str
    key: str = ""  # of its numbers in the figure's CSV
    kind: str | NumberFormat = "number"  # of its values
    ticks: Mapping[float, str] = field(default_factory=dict)  # empty: matplotlib's
    base: int = 0  # of its logarithm; 0: linear
    from_zero: bool = False
    shown: tuple[float, ...] = ()  # besides the points'; each has a dashed line


class DrawnPoint(NamedTuple):
    """A point of a curve."""

    x: float
    y: Estimate
    is_doubtful: bool = False


@dataclass(frozen=True)
class DrawnCurve:
    """A curve of a figure and its look."""

    label: str
    points: Sequence[DrawnPoint]
    colour: str
    marker: str = "o"
    ideal: Sequence[tuple[float, float]] = ()  # a dashed line
    end: str = ""  # the text at the end of a curve that is alone; empty: its last value


@dataclass(frozen=True)
class DotRow:
    """A dot with its interval, its name and a number."""

    label: str
    right: str
    dot: Estimate
    colour: str
    marker: str = "o"
    is_doubtful: bool = False


@dataclass(frozen=True)
class WaterfallStep:
    """A row of a waterfall: a level, or a step down to the next one."""

    name: str
    level: Estimate | None = None
    lost: Estimate | None = None
    text: str = ""
    colour: str = HIGHLIGHT
    hatch: str = ""
    pale: bool = False  # not told apart from 0


@dataclass(frozen=True)
class ScatterPoint:
    """A point of a scatter."""

    x: float
    y: float
    label: str
    weight: float  # points with more weight are named first


HOLLOW = " Hollow markers: suspect runs."  # the end of a caption


def truncation_note(everything: Sequence[object], most: int, noun: str, file: str) -> str:
    """Return ` 3 more rows are only in wires.csv.`; empty if all are drawn."""
    left = len(everything) - most
    if left <= 0:
        return ""
    return f" {count(left, f'{noun} is', f'{noun}s are')} only in {file}."


def new_axes(height_in: float, width_in: float | None = None) -> tuple[Any, Any]:
    """Return a figure of the current width and its axes."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width_in or figure_width(), height_in), layout="constrained")
    return figure, figure.add_subplot()


def _curve_height(height_in: float) -> float:
    return float(height_in * (figure_width() / WIDTHS_IN[ON_PAGE]) ** 0.6)


def window(estimates: Iterable[Estimate], values: Iterable[float] = ()) -> tuple[float, float]:
    """Return the limits of an axis, which hold every value and every interval."""
    ends = list(values)
    for estimate in estimates:
        for end in (estimate.value, estimate.low, estimate.high):
            if end is not None:
                ends.append(end)
    low, high = min(ends), max(ends)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _draw_interval(axes: Any, estimate: Estimate, y: float, colour: str, width: float) -> None:
    if estimate.low is not None and estimate.high is not None:
        axes.plot([estimate.low, estimate.high], [y, y], color=colour, lw=width, zorder=3)


def curves_figure(
    name: str, caption: str, curves: Sequence[DrawnCurve], x: Axis, y: Axis, closing: str = ""
) -> Figure:
    """Return curves with the intervals of their points, each with its name at its end.

    `caption` is followed by a note where a linear axis does not begin at 0, then by `closing`.
    """
    figure, axes = new_axes(_curve_height(2.9))
    for value in y.shown:
        axes.axhline(value, color=MUTED, lw=0.9, ls=DASHED, zorder=1)
    ends, rows = [], []
    positions: set[float] = set()
    for index, curve in enumerate(curves):
        if curve.ideal:
            axes.plot(*zip(*curve.ideal, strict=True), color=MUTED, lw=0.9, ls=DASHED, zorder=1)
        aside_pt = 0.0
        if y.kind in ("share", "change"):  # else their intervals would cover each other
            aside_pt = ASIDE_PT * (index - (len(curves) - 1) / 2)
        ends.append(_draw_curve(axes, curve, index, aside_pt))
        for position, _ in curve.ideal:
            positions.add(position)
        for position, estimate, _ in curve.points:
            positions.add(position)
            rows.append((curve.label, position, estimate))
    low, high = min(positions), max(positions)
    if x.base:
        axes.set_xscale("log", base=x.base)
        room = max(0.05 * math.log2(high / low), 0.2)
        axes.set_xlim(low / 2**room, high * 2**room)
        axes.minorticks_off()
    else:
        room = 0.05 * (high - low) or 1
        axes.set_xlim(low - room, high + room)
    if x.ticks:
        axes.set_xticks([*x.ticks], [*x.ticks.values()])
    elif not x.base:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(x.label, color=INK)
    axes.grid(axis="x", visible=False)
    _scale_y(axes, y, curves)
    _name_curves(axes, curves, ends, y)
    if not (y.base or y.from_zero) and axes.get_ylim()[0] > 0:
        caption += NOT_FROM_0
    data = numbers_table(("curve", x.key, y.key), rows)
    return as_figure(figure, name, f"{caption} {closing}".strip(), data)


def _draw_curve(axes: Any, curve: DrawnCurve, index: int, aside_pt: float) -> float:
    from matplotlib.transforms import offset_copy

    look: dict[str, Any] = {"color": curve.colour}
    if aside_pt:
        look["transform"] = offset_copy(axes.transData, axes.figure, x=aside_pt, units="points")
    by_x: dict[float, list[float]] = defaultdict(list)
    for at, estimate, is_doubtful in curve.points:
        by_x[at].append(estimate.value)
        if estimate.low is not None and estimate.high is not None:
            axes.vlines(at, estimate.low, estimate.high, lw=1.1, zorder=2, **look)
        face = PAPER if is_doubtful else curve.colour
        marker = {"markerfacecolor": face, "markeredgewidth": 1.2}
        axes.plot(at, estimate.value, curve.marker, zorder=3, **marker, **look)
    xs = sorted(by_x)
    ys = [median(by_x[at]) for at in xs]
    axes.plot(xs, ys, ls=DASHES[index % len(DASHES)], zorder=2, **look)
    return ys[-1]


def _scale_y(axes: Any, y: Axis, curves: Sequence[DrawnCurve]) -> None:
    axes.set_ylabel(y.label, color=INK)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    if y.base:
        axes.set_yscale("log", base=y.base)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip("."))
        return
    estimates, lines = [], list(y.shown)
    for curve in curves:
        for _, estimate, _ in curve.points:
            estimates.append(estimate)
        for _, value in curve.ideal:
            lines.append(value)
    if y.from_zero:
        lines.append(0.0)
    low, high = window(estimates, lines)
    if y.from_zero:
        axes.set_ylim(0, high)
    else:
        room = max(0.005, 0.1 * (high - low))
        bottom = low - room
        axes.set_ylim(max(0.0, bottom) if low >= 0 else bottom, high + room)
    if y.kind in ("share", "change"):
        decimals = 0 if axes.get_ylim()[1] - axes.get_ylim()[0] > 0.06 else 1
        axes.locator_params(axis="y", nbins=7, steps=(1, 2, 5, 10))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{decimals}f} %")
    else:
        axes.yaxis.set_major_formatter(_tick)


def _tick(value: float, _: int = 0) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:g}"


def _name_curves(axes: Any, curves: Sequence[DrawnCurve], ends: Sequence[float], y: Axis) -> None:
    from matplotlib.lines import Line2D

    if len(curves) == 1:
        text = curves[0].end or number(ends[0], y.kind)
        outside: Any = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
        axes.annotate(text, (1.03, ends[0]), va="center", color=curves[0].colour, **outside)
        return
    names = [single_line(curve.label) for curve in curves]
    words = legend_names(names, max(LEAST_LEGEND_LENGTH, for_width(LEGEND_LENGTH)))
    lines = []
    for index in sorted(range(len(curves)), key=lambda index: -ends[index]):
        curve = curves[index]
        look: Any = {"color": curve.colour, "ls": DASHES[index % len(DASHES)], "lw": 1.4}
        label = words[names[index]]
        lines.append(Line2D([], [], marker=curve.marker, markersize=3.5, label=label, **look))
    look = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "labelcolor": "linecolor"}
    axes.legend(handles=lines, frameon=False, fontsize=TEXT_PT, handlelength=1.6, **look)


def rows_figure(name: str, caption: str, rows: Sequence[DotRow], x: Axis) -> Figure:
    """Return values with their intervals, a row for each with its label above; `x.shown` are lines.

    A label that is longer than the figure is wide takes several lines.
    """
    room = for_width(ROW_LENGTH) - max(len(row.right) for row in rows)
    labels = [fill(single_line(row.label), max(16, room)) for row in rows]
    breaks = [label.count("\n") * LINE_OF_ROW for label in labels]
    figure, axes = new_axes(0.55 + ROW_IN * (len(rows) + sum(breaks)))
    axes.set_ylim(len(rows) + sum(breaks) - 0.3, -0.75)
    axes.set_yticks([])
    axes.grid(visible=False)
    data, y = [], -0.92
    for row, label, more in zip(rows, labels, breaks, strict=True):
        at = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": TEXT_PT}
        axes.text(0.0, y + 0.62 + more / 2, label, linespacing=1.15, **at)
        axes.text(1.0, y + 0.62, row.right, ha="right", color=MUTED, **at)
        y += 1 + more
        axes.axhline(y, color=RULE, lw=0.7, zorder=0)
        for value in x.shown:
            axes.plot([value, value], [y - 0.17, y + 0.17], color=MUTED, lw=0.9, zorder=1)
        _draw_interval(axes, row.dot, y, row.colour, 1.6)
        look: Any = {"color": row.colour, "zorder": 4}
        if row.is_doubtful:
            look |= {"markerfacecolor": PAPER, "markeredgewidth": 1.2}
        axes.plot(row.dot.value, y, row.marker, **look)
        data.append((row.label, row.dot))
    low, high = window((row.dot for row in rows), x.shown)
    right = CHARACTER_IN * max(len(row.right) for row in rows) / WIDTHS_IN["single"]
    for value in x.shown:  # else the number of a row would stand above it, on a phone too
        high = max(high, value + (value - low) * right / (1 - right))
    axes.set_xlim(low, high)
    _strip(axes, x.label)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: number(value, x.kind) if value else "0")
    caption += NOT_FROM_0 * (low > 0)
    return as_figure(figure, name, caption, numbers_table(("row", x.key), data))


def _strip(axes: Any, label: str) -> None:
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label, color=INK)


def waterfall_figure(
    name: str, caption: str, steps: Sequence[WaterfallStep], start: float, x: Axis
) -> Figure:
    """Return bars that each begin where the one before ended; without level and loss: not known."""
    figure, axes = new_axes(0.5 + 0.34 * len(steps))
    at, reached, data = start, [], []
    for y, step in enumerate(steps):
        data.append((step.name, step.lost, step.level))
        begin = at
        if step.level is not None:
            at = step.level.value
            reached.append(step.level)
            axes.plot(at, y, marker="D", color=INK, markersize=5, zorder=3, clip_on=False)
        else:
            axes.plot([at, at], [y - 1, y + 0.29], color=MUTED, lw=0.7, zorder=1)
        if step.lost is not None:
            at = begin - step.lost.value
            ends: list[float] = []
            if step.lost.low is not None and step.lost.high is not None:
                ends = [begin - step.lost.high, begin - step.lost.low]
            reached.append(Estimate(at, *ends))
            look: dict[str, Any] = {"hatch": step.hatch, "edgecolor": HATCH, "lw": 0}
            opacity = 0.4 if step.pale else 1.0
            axes.barh(
                y, at - begin, 0.58, begin, color=step.colour, alpha=opacity, zorder=2, **look
            )
            axes.plot([at, at], [y - 0.29, y + 1], color=MUTED, lw=0.7, zorder=1)
        right = max(begin, at)
        if step.level is not None or step.lost is not None:
            _draw_interval(axes, reached[-1], y, INK, 1.1)
            right = max(at, begin if step.lost else at, reached[-1].high or at)
        axes.annotate(
            step.text, (right, y), (6, 0), textcoords="offset points", va="center",
            annotation_clip=False, fontsize=TEXT_PT,
        )  # fmt: skip
    low, high = window(reached, [start])
    axes.set_xlim(low, high)
    length = max(18, for_width(WATERFALL_LENGTH) - 6)
    names = [fill(single_line(step.name, WATERFALL_LENGTH), length) for step in steps]
    axes.set_yticks(range(len(steps)), names)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4 if for_width(4) >= 4 else 2)
    axes.xaxis.set_major_formatter(_tick)
    _strip(axes, x.label)
    caption += NOT_FROM_0 * (low > 0)
    return as_figure(figure, name, caption, numbers_table(("part", f"lost_{x.key}", x.key), data))


def scatter_figure(
    name: str,
    caption: str,
    points: Sequence[ScatterPoint],
    line: Sequence[tuple[float, Estimate]],
    colour: str,
    x: Axis,
    y: Axis,
) -> Figure:
    """Return points with a line and its band, named where their names fit."""
    figure, axes = new_axes(_curve_height(3.0))
    xs, ends = [], []
    heights: list[float] = []
    for position, expected in line:
        xs.append(position)
        heights.append(expected.value)
        ends.append((expected.low, expected.high))
    axes.plot(xs, heights, color=colour, lw=1.4, zorder=2)
    axes.fill_between(xs, *zip(*ends, strict=True), color=colour, alpha=0.16, lw=0)
    rows, most = [], 0.0
    for point in points:
        axes.plot(point.x, point.y, "o", zorder=3, color=colour)
        rows.append((point.label, point.x, point.y))
        heights.append(point.y)
        most = max(most, point.x)
    room = 0.12 * (max(heights) - min(heights)) or 1.0
    axes.set_xlim(0, 1.06 * most)
    axes.set_ylim(min(heights) - room, max(heights) + room)
    axes.set_xlabel(x.label, color=INK)
    axes.set_ylabel(y.label, color=INK)
    axes.tick_params(length=0)
    taken: list[tuple[float, float]] = []
    width, height = figure.get_size_inches()
    for point in sorted(points, key=lambda point: -point.weight):
        along, up = axes.transLimits.transform((point.x, point.y))
        length = 0.08 * len(point.label) / width  # of the axes
        start, side, moved = along, "left", 6
        if along + length > 1:
            start, side, moved = along - length, "right", -6
        if any(abs(a - start) < length and abs(b - up) < 0.2 / height for a, b in taken):
            continue
        taken.append((start, up))
        look: Any = {"textcoords": "offset points", "ha": side, "va": "center", "color": MUTED}
        axes.annotate(point.label, (point.x, point.y), (moved, 0), **look)
    return as_figure(figure, name, caption, numbers_table(("point", x.key, y.key), rows))


# A square for each ordered pair of GPUs. The colours are those of cividis: colour-blind people see
# them alike, and they keep their order in grey. Dark is always the better end. The diagonal (copies
# within one GPU) stays grey.
EDGE, EMPTY = "#ffffff", "#eef0f2"
UNIT_KEYS = {"µs": "us", "GB/s": "gb_per_s"}
LEAST_CONTRAST = 1.5  # values within a few percent of each other look alike
BLACK_FROM = 0.46  # of cividis; on darker squares a white text has more contrast (WCAG 2)
Entries = Mapping[tuple[Any, Any], float]  # {(row, column): value}
Scale = tuple[float, float]  # the least and the greatest value between two GPUs


def heat_map_figure(
    name: str, caption: str, ids: Sequence[Any], entries: Entries, unit: str, scale: Scale
) -> Figure:
    """Return a matrix of numbers between devices, by a scale of colours that maps share."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    width, side = figure_width(), 0.5 * len(ids)
    figure, axes = new_axes(min(width, 1.2 + side), min(width, 1.0 + side))
    axes.set(xlim=(0, len(ids)), ylim=(len(ids), 0), aspect="equal")
    rows = []
    for (row, column), value in entries.items():
        rows.append((row, column, value))
        x, y = ids.index(column), ids.index(row)
        ink = "black"
        fill: Any = EMPTY
        if row != column:
            light = shade(value, scale, unit)
            fill = colormaps["cividis"](light)
            ink = "black" if light >= BLACK_FROM else "white"
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=EDGE, linewidth=1.5))
        axes.text(x + 0.5, y + 0.5, number(value), ha="center", va="center", color=ink)
    middles = [position + 0.5 for position in range(len(ids))]
    axes.set_xticks(middles, list(map(str, ids)))
    axes.set_yticks(middles, list(map(str, ids)))
    axes.tick_params(length=0, labelcolor=MUTED, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    low, high = map(number, scale_of([entries]))
    axes.set_xlabel(f"{low} to {high} {unit}", color=MUTED)
    data = numbers_table(("from_gpu", "to_gpu", UNIT_KEYS[unit]), rows)
    return as_figure(figure, name, caption, data)


def scale_of(matrices: Iterable[Entries]) -> Scale:
    """Return the least and the greatest value between two GPUs of maps that share their colours."""
    values = []
    for entries in matrices:
        for (row, column), value in entries.items():
            if row != column and value > 0:
                values.append(value)
    return min(values, default=1.0), max(values, default=1.0)


def shade(value: float, scale: Scale, unit: str) -> float:
    """Return where a value is on the colour scale, by ratio: 0 is dark, the better end; 1 is light.

    Fewer µs and more GB/s are better.
    """
    low, high = scale
    if value <= 0 or high <= low:
        return 0.0
    ratio = high / value
    if unit == "µs":
        ratio = value / low
    return math.log(ratio) / math.log(max(high / low, LEAST_CONTRAST))
