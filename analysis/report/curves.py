"""Curves with intervals against a number: rates by GPUs, efficiencies, rates by an option."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from analysis.report.charts import LEGEND, curve_height, new_axes, window
from analysis.report.figure import INK, MUTED, PAPER, Figure, as_figure, for_width
from analysis.report.numbers import NumberFormat, number
from analysis.report.table import Table
from analysis.study.estimates import Estimate
from analysis.study.names import legend_names
from analysis.text import single_line

DASHES: Any = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1)),
    (0, (8, 2)),
)
REFERENCE_DASHES = (0, (4, 3))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
LEGEND_LENGTH, LEAST_LEGEND_LENGTH = 24, 18  # characters on the page, and at least
DODGE_PT, MOST_DODGE_PT = 5.0, 12.0  # between the intervals of neighbouring curves, and in all


@dataclass(frozen=True)
class DrawnCurve:
    """A curve of a figure and its look."""

    label: str
    points: Sequence[tuple[float, Estimate, bool]]  # x, y, and whether a check doubts it
    colour: str
    marker: str = "o"
    ideal: Sequence[tuple[float, float]] = ()  # a dashed line
    band: bool = False  # the intervals are a band, and the points have no markers
    end: str = ""  # the text at the end of a curve that is alone; empty: its last value


@dataclass(frozen=True)
class Axis:
    """One axis of a figure of curves."""

    label: str
    kind: str | NumberFormat = "number"  # of its values
    ticks: Mapping[float, str] = field(default_factory=dict)  # empty: matplotlib's
    base: int = 0  # of its logarithm; 0: linear
    from_zero: bool = False
    shown: tuple[
        float, ...
    ] = ()  # values that a linear y axis shows besides the points'; each has a dashed line


def curves_figure(
    name: str,
    caption: str,
    curves: Sequence[DrawnCurve],
    x: Axis,
    y: Axis,
    data: Table,
    closing: str = "",
    dodge: bool = False,
) -> Figure:
    """Return curves with the intervals of their points, each with its name at its end.

    `caption` is followed by a note where a linear axis does not begin at 0, then by `closing`.
    `dodge` moves curves sideways, so that their intervals do not cover each other.
    """
    figure, axes = new_axes(curve_height(2.9))
    for value in y.shown:
        axes.axhline(value, color=MUTED, lw=0.9, ls=REFERENCE_DASHES, zorder=1)
    apart = min(DODGE_PT, MOST_DODGE_PT / max(1, len(curves) - 1)) if dodge else 0.0
    ends = []
    for index, curve in enumerate(curves):
        if curve.ideal:
            axes.plot(
                *zip(*curve.ideal, strict=True), color=MUTED, lw=0.9, ls=REFERENCE_DASHES, zorder=1
            )
        ends.append(_draw_curve(axes, curve, index, apart * (index - (len(curves) - 1) / 2)))
    positions = {point[0] for curve in curves for point in curve.points}
    positions |= {position for curve in curves for position, _ in curve.ideal}
    _scale_x(axes, x, sorted(positions))
    _scale_y(axes, y, curves)
    _name_curves(axes, curves, ends, y)
    begins = (
        " The axis does not begin at 0."
        if not (y.base or y.from_zero) and axes.get_ylim()[0] > 0
        else ""
    )
    return as_figure(figure, name, f"{caption}{begins} {closing}".strip(), data)


def _draw_curve(axes: Any, curve: DrawnCurve, index: int, aside_pt: float) -> float:
    """Draw a curve's points, intervals and the line through the medians of each x.

    Return the y of its end.
    """
    from matplotlib.transforms import offset_copy

    moved: dict[str, Any] = {"color": curve.colour}
    if aside_pt:
        moved["transform"] = offset_copy(axes.transData, axes.figure, x=aside_pt, units="points")
    by_x: dict[float, list[float]] = defaultdict(list)
    for position, estimate, _ in curve.points:
        by_x[position].append(estimate.value)
    xs = sorted(by_x)
    ys = [median(by_x[position]) for position in xs]
    axes.plot(xs, ys, ls=DASHES[index % len(DASHES)], zorder=2, **moved)
    bounded = [
        (at, one.low, one.high)
        for at, one, _ in curve.points
        if one.low is not None and one.high is not None
    ]
    if bounded and curve.band:
        axes.fill_between(
            *zip(*bounded, strict=True), color=curve.colour, alpha=0.16, lw=0, zorder=1
        )
    elif bounded:
        axes.vlines(*zip(*bounded, strict=True), lw=1.1, zorder=2, **moved)
    for doubtful, face in ((False, curve.colour), (True, PAPER)):
        marked = [(at, one.value) for at, one, doubt in curve.points if doubt == doubtful]
        if marked and not curve.band:
            look = {
                "marker": curve.marker,
                "markerfacecolor": face,
                "markeredgewidth": 1.2,
                "linestyle": "none",
            }
            axes.plot(*zip(*marked, strict=True), zorder=3, **look, **moved)
    return ys[-1]


def _scale_x(axes: Any, x: Axis, values: Sequence[float]) -> None:
    # Dodged curves are not where matplotlib thinks that they are.
    low, high = values[0], values[-1]
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
    axes.set_xlabel(x.label, color=INK)
    axes.grid(axis="x", visible=False)


def _scale_y(axes: Any, y: Axis, curves: Sequence[DrawnCurve]) -> None:
    axes.set_ylabel(y.label, color=INK)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    if y.base:
        axes.set_yscale("log", base=y.base)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip("."))
        return
    ideals = [value for curve in curves for _, value in curve.ideal]
    low, high = window((one for curve in curves for _, one, _ in curve.points), (*y.shown, *ideals))
    if y.from_zero:
        axes.set_ylim(0, high)
    else:
        room = max(0.005, 0.1 * (high - low))
        axes.set_ylim(max(0.0, low - room), high + room)
    if y.kind == "share":
        decimals = 0 if axes.get_ylim()[1] - axes.get_ylim()[0] > 0.06 else 1
        axes.locator_params(
            axis="y", nbins=7, steps=(1, 2, 5, 10)
        )  # a tick says its value with one decimal
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{decimals}f} %")
    else:
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:g}"
        )


def _name_curves(axes: Any, curves: Sequence[DrawnCurve], ends: Sequence[float], y: Axis) -> None:
    """Write the last value at the end of a single curve.

    Name several in the order of their ends.
    """
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
        marker = "" if curve.band else curve.marker
        label = words[names[index]]
        lines.append(Line2D([], [], marker=marker, markersize=3.5, label=label, **look))
    beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "labelcolor": "linecolor"}
    axes.legend(handles=lines, **beside, **LEGEND)
