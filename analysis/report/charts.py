"""The charts of a report but for curves: rows of dots, bars, waterfalls, scatters, heat maps.

A section gives values and words; a chart draws them and saves the figure with its data.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

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
from analysis.report.table import Table
from analysis.study.estimates import Estimate
from analysis.text import count, single_line

LEGEND: Any = {"frameon": False, "fontsize": TEXT_PT, "handlelength": 1.6, "columnspacing": 1.2}
ROW_IN, ROW_LENGTH, MOST_ROWS = 0.4, 66, 20  # height, characters of a label, rows of a figure


def truncation_note(everything: Sequence[object], most: int, noun: str, file: str) -> str:
    """Return ` 3 more rows are in wires.csv.`; empty if all are drawn."""
    left = len(everything) - most
    return f" {count(left, noun)} {'is' if left == 1 else 'are'} in {file}." if left > 0 else ""


def new_axes(height_in: float, width_in: float | None = None) -> tuple[Any, Any]:
    """Return a figure of the current width and its axes."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width_in or figure_width(), height_in), layout="constrained")
    return figure, figure.add_subplot()


def curve_height(height_in: float) -> float:
    """Scale the height of a figure of curves from the page to the current width."""
    return float(height_in * (figure_width() / WIDTHS_IN[ON_PAGE]) ** 0.6)


def window(estimates: Iterable[Estimate], values: Iterable[float] = ()) -> tuple[float, float]:
    """Return the limits of an axis.

    They show every value, and clip intervals at 1.5 × the range of the values.
    Intervals from two runs are often much wider; the table has them whole.
    """
    centres, ends = list(values), []
    for estimate in estimates:
        centres.append(estimate.value)
        ends += [end for end in (estimate.low, estimate.high) if end is not None]
    least, most = min(centres), max(centres)
    room = 1.5 * max(most - least, 0.05 * max(abs(least), abs(most)))
    low = max(min([least, *ends]), least - room)
    high = min(max([most, *ends]), most + room)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


@dataclass(frozen=True)
class DotRow:
    """A row of dots, with its name above it on the left and a number on the right."""

    label: str
    right: str
    dots: Sequence[Estimate]
    colour: str
    marker: str = "o"
    strokes: Sequence[float] = ()  # what limits the dots
    band: float = 0.0  # half the width of a band around 0


def rows_figure(
    name: str,
    caption: str,
    rows: Sequence[DotRow],
    label: str,
    data: Table,
    format_tick: Any,
    from_zero: bool = False,
    around_zero: bool = False,
) -> Figure:
    """Return values with their intervals, a row for each.

    Long labels stand above their rows and take no width.
    """
    figure, axes = _rows(len(rows))
    for y, row in enumerate(rows):
        if row.band:
            axes.barh(y + 0.08, 2 * row.band, left=-row.band, height=0.34, color=RULE, zorder=1)
        if around_zero:
            axes.plot([0, 0], [y - 0.09, y + 0.25], color=MUTED, lw=0.9, zorder=1)
        for dot in row.dots:
            if dot.low is not None and dot.high is not None:
                axes.plot([dot.low, dot.high], [y + 0.08] * 2, color=row.colour, lw=1.6, zorder=2)
        values = [dot.value for dot in row.dots]
        axes.plot(
            values, [y + 0.08] * len(values), row.marker, color=row.colour, alpha=0.85, zorder=3
        )
        look = {"color": INK, "markersize": 9, "markeredgewidth": 1.4}
        axes.plot(row.strokes, [y + 0.08] * len(row.strokes), "|", zorder=2, **look)
        _label_row(axes, y, row.label, row.right)
    if from_zero:
        axes.set_xlim(0, 1.04 * axes.get_xlim()[1])
    else:
        others = [end for row in rows for end in (-row.band, row.band)] if around_zero else []
        axes.set_xlim(*window((dot for row in rows for dot in row.dots), others))
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: format_tick(value))
    return as_figure(figure, name, caption, data)


def _rows(rows: int) -> tuple[Any, Any]:
    """Return a figure whose rows have room for a label above them."""
    figure, axes = new_axes(0.55 + ROW_IN * rows)
    axes.set_ylim(rows - 0.3, -0.75)
    axes.set_yticks([])
    _strip(axes)
    axes.grid(visible=False)
    at = [y + 0.08 for y in range(rows)]
    axes.hlines(at, 0, 1, transform=axes.get_yaxis_transform(), color=RULE, lw=0.7, zorder=0)
    return figure, axes


def _strip(axes: Any) -> None:
    """Remove what axes of rows do not need: lines between rows, ticks, the left spine."""
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.xaxis.label.set_color(INK)


def _label_row(axes: Any, y: float, text: str, right: str) -> None:
    at = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": TEXT_PT}
    axes.text(0.0, y - 0.3, single_line(text, max(16, for_width(ROW_LENGTH) - len(right))), **at)
    axes.text(1.0, y - 0.3, right, ha="right", color=MUTED, **at)


def _text_right_of(axes: Any, x: float, y: float, text: str) -> None:
    beside = {
        "xytext": (6, 0),
        "textcoords": "offset points",
        "va": "center",
        "annotation_clip": False,
    }
    axes.annotate(text, (min(x, axes.get_xlim()[1]), y), fontsize=TEXT_PT, **beside)


@dataclass(frozen=True)
class Bar:
    """A bar of parts behind one another."""

    parts: Mapping[str, float]
    name: str = ""  # beside it on the left
    whole: Estimate | None = None  # a diamond with its interval
    text: str = ""  # at its end


@dataclass(frozen=True)
class BarGroup:
    """Bars under one name."""

    label: str
    right: str
    bars: Sequence[Bar]


def bars_figure(
    name: str,
    caption: str,
    groups: Sequence[BarGroup],
    looks: Mapping[str, tuple[str, str]],
    label: str,
    data: Table,
) -> Figure:
    """Return bars of parts from 0 on; `looks` are {part: (colour, hatch)} in order.

    Parts below 0 take no room.
    """
    from matplotlib.patches import Patch

    parts = [
        part for part in looks if any(part in bar.parts for group in groups for bar in group.bars)
    ]
    columns = max(1, for_width(84) // (max(map(len, parts), default=0) + 8))
    figure, axes = _rows(0)
    y, ticks = 0.0, {}
    for group in groups:
        several = len(group.bars) > 1
        if several:
            y += 0.3
        _label_row(axes, y - 0.25 if several else y, group.label, group.right)
        for bar in group.bars:
            end = _stack(
                axes, y + 0.08, bar, {part: looks[part] for part in parts}, 0.55 if several else 0.3
            )
            if bar.text:
                _text_right_of(axes, end, y + 0.08, bar.text)
            if bar.name:
                ticks[y + 0.08] = bar.name
            y += 0.7 if several else 1.0
        if several:
            y += 0.4
    figure.set_figheight(0.55 + 0.18 * math.ceil(len(parts) / columns) + ROW_IN * y)
    axes.set_ylim(y - 0.3, -0.75)
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=6)
    patches = []
    for part in parts:
        colour, hatch = looks[part]
        patches.append(Patch(facecolor=colour, hatch=hatch, edgecolor=HATCH, lw=0, label=part))
    figure.legend(
        handles=patches, loc="outside upper left", ncols=columns, labelcolor=MUTED, **LEGEND
    )
    return as_figure(figure, name, caption, data)


def _stack(
    axes: Any, y: float, bar: Bar, looks: Mapping[str, tuple[str, str]], height: float
) -> float:
    """Draw the parts of a bar and the diamond of its whole; return where it ends."""
    end = 0.0
    for part, (colour, hatch) in looks.items():
        width = max(0.0, bar.parts.get(part, 0.0))
        look: dict[str, Any] = {"color": colour, "edgecolor": PAPER, "lw": 0.4}
        if hatch:
            look |= {"hatch": hatch, "edgecolor": HATCH, "lw": 0}
        axes.barh(y, width, left=end, height=height, zorder=2, **look)
        end += width
    whole = bar.whole
    if whole is None:
        return end
    if whole.low is not None and whole.high is not None:
        axes.plot([whole.low, whole.high], [y, y], color=INK, lw=1.0, zorder=3)
    axes.plot(whole.value, y, "D", color=INK, markersize=4.5, zorder=4)
    return max(end, whole.high or whole.value)


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


def waterfall_figure(
    name: str, caption: str, steps: Sequence[WaterfallStep], start: float, label: str, data: Table
) -> Figure:
    """Return bars that each begin where the one before ended.

    Steps without level and loss are not known.
    """
    figure, axes = new_axes(0.5 + 0.34 * len(steps))
    axes.set_xlim(*_waterfall_limits(steps, start))
    at = start
    for y, step in enumerate(steps):
        if step.level is not None:
            at = step.level.value
            axes.plot(at, y, marker="D", color=INK, markersize=5, zorder=3, clip_on=False)
            if step.level.low is not None and step.level.high is not None:
                axes.plot([step.level.low, step.level.high], [y, y], color=INK, lw=1.2, zorder=3)
            _text_right_of(axes, max(at, step.level.high or at), y, step.text)
            continue
        axes.plot([at, at], [y - 1, y + 0.29], color=MUTED, lw=0.7, zorder=1)
        if step.lost is None:
            _text_right_of(axes, at, y, step.text)
            continue
        end = at - step.lost.value
        look = {
            "color": step.colour,
            "hatch": step.hatch,
            "edgecolor": HATCH,
            "lw": 0,
            "alpha": 0.4 if step.pale else 1.0,
        }
        axes.barh(y, end - at, left=at, height=0.58, zorder=2, **look)
        right = max(at, end)
        if step.lost.low is not None and step.lost.high is not None:
            axes.plot(
                [at - step.lost.high, at - step.lost.low], [y, y], color=INK, lw=1.0, zorder=3
            )
            right = max(right, at - step.lost.low)
        _text_right_of(axes, right, y, step.text)
        at = end
        axes.plot([at, at], [y - 0.29, y + 1], color=MUTED, lw=0.7, zorder=1)
    length = max(18, for_width(34) - 6)
    axes.set_yticks(range(len(steps)), [fill(single_line(step.name, 34), length) for step in steps])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=4 if for_width(4) >= 4 else 2)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:g}"
    )
    _strip(axes)
    return as_figure(figure, name, caption, data)


def _waterfall_limits(steps: Sequence[WaterfallStep], start: float) -> tuple[float, float]:
    at = start
    estimates = []
    for step in steps:
        if step.level is not None:
            at = step.level.value
            estimates.append(step.level)
        elif step.lost is not None:
            low, high = (
                None if end is None else at - end for end in (step.lost.high, step.lost.low)
            )
            at -= step.lost.value
            estimates.append(Estimate(at, low, high))
    return window(estimates, [start])


@dataclass(frozen=True)
class ScatterPoint:
    """A point of a scatter."""

    x: float
    y: float
    label: str
    stands_out: bool = False
    weight: float = 0.0  # points with more weight are named first


def scatter_figure(
    name: str,
    caption: str,
    points: Sequence[ScatterPoint],
    line: Sequence[tuple[float, Estimate]],
    look: tuple[str, str],
    labels: tuple[str, str],
    data: Table,
    upper: tuple[str, Mapping[float, str]] = ("", {}),
) -> Figure:
    """Return points with a line and its band, named where their names fit.

    `look` is (colour, marker), `labels` are those of x and y, `upper` is (label, {x: tick}) of a
    second axis above.
    """
    figure, axes = new_axes(curve_height(3.0))
    colour, form = look
    most = 1.06 * max(point.x for point in points)
    if line:
        xs = [x for x, _ in line]
        axes.plot(xs, [one.value for _, one in line], color=colour, lw=1.4, zorder=2)
        lows, highs = [one.low for _, one in line], [one.high for _, one in line]
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.16, lw=0)
        values = [point.y for point in points] + [one.value for _, one in line]
        room = 0.12 * (max(values) - min(values)) or 1.0
        axes.set_xlim(0, most)
        axes.set_ylim(min(values) - room, max(values) + room)
    for point in points:
        colours_ = (
            {"color": HIGHLIGHT, "markerfacecolor": PAPER}
            if point.stands_out
            else {"color": colour}
        )
        axes.plot(point.x, point.y, form, zorder=3, markeredgewidth=1.4, **colours_)
    axes.set_xlabel(labels[0], color=INK)
    axes.set_ylabel(labels[1], color=INK)
    axes.tick_params(length=0)
    if upper[1]:
        above = axes.twiny()
        above.set_xlim(axes.get_xlim())
        above.set_xticks([*upper[1]], [*upper[1].values()])
        above.set_xlabel(upper[0])
        above.tick_params(length=0)
        above.grid(visible=False)
    _name_points(axes, points)
    return as_figure(figure, name, caption, data)


Box = tuple[float, float, float, float]  # left, right, low, high


def _name_points(axes: Any, points: Sequence[ScatterPoint]) -> None:
    """Name points where names fit: first those that stand out, then those with most weight."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    letter = 0.07 / (figure_width() - 0.6)
    line = 0.15 / (axes.figure.get_figheight() - 0.6)
    spots = [
        ((point.x - left) / (right - left), (point.y - low) / (high - low)) for point in points
    ]
    taken: list[Box] = [(x - 0.012, x + 0.012, y - 0.02, y + 0.02) for x, y in spots]
    order = sorted(
        range(len(points)), key=lambda index: (not points[index].stands_out, -points[index].weight)
    )
    for index in order:
        point, (x, y) = points[index], spots[index]
        width = letter * len(point.label)
        for lines_up in (0, 1, -1, 2, -2) if point.stands_out else (0, 1, -1):
            middle = y + lines_up * line
            starts = (x + 0.02, x - 0.02 - width)
            boxes: list[Box] = [
                (start, start + width, middle - line / 2, middle + line / 2) for start in starts
            ]
            fitting = next((box for box in boxes if _is_free(box, taken)), None)
            if fitting:
                taken.append(fitting)
                look = {
                    "va": "center",
                    "fontsize": TEXT_PT,
                    "color": HIGHLIGHT if point.stands_out else MUTED,
                }
                axes.text(
                    fitting[0],
                    middle,
                    single_line(point.label, 40),
                    transform=axes.transAxes,
                    **look,
                )
                break


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    if box[0] < 0 or box[1] > 1 or box[2] < 0 or box[3] > 1:
        return False
    return not any(box[0] < b and box[1] > a and box[2] < d and box[3] > c for a, b, c, d in taken)


def heat_map_figure(
    name: str,
    caption: str,
    ids: Sequence[Any],
    values: Mapping[tuple[Any, Any], float],
    unit: str,
    scale: tuple[float, float],
    data: Table,
) -> Figure:
    """Return a matrix of numbers between devices, {(row, column): value}.

    Dark is better, by a scale that maps share.
    """
    from analysis.native.heat_map import squares

    width = figure_width()
    figure, axes = new_axes(min(width, 1.0 + 0.5 * len(ids)), min(width, 1.2 + 0.5 * len(ids)))
    squares(axes, ids, values, unit, scale=scale)
    axes.tick_params(labelcolor=MUTED)  # which the page changes with its own colours
    axes.xaxis.label.set_color(MUTED)
    axes.grid(visible=False)
    return as_figure(figure, name, caption, data)
