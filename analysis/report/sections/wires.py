"""What cells lose, against what their wires carry: a line for each mechanism, and the cells that it does not explain."""

from collections.abc import Iterator, Sequence
from typing import Any

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import EXPOSED
from analysis.findings.links import SOURCES, efficiency_of, line_of
from analysis.report.figures import more_in
from analysis.report.numbers import NumberFormat, estimate, interval, number
from analysis.report.section import Section
from analysis.report.style import (
    COLOURS,
    INK,
    MUTED,
    PAPER,
    Picture,
    colours,
    curve_height,
    drawn,
    figure_width,
    marker,
    new_figure,
    rendered,
)
from analysis.report.tables import Column, Table
from analysis.study.draws import scaled
from analysis.study.estimates import Findings, WireLine, WirePoint
from analysis.study.names import short_names, unit_of
from analysis.study.study import Study
from analysis.text import count, first_lines, sentence, single_line

FIGURES = 4
HEIGHT = 3.0  # inches, on the page
BAND = 60  # points of a drawn band
LETTER_IN, LINE_IN, AXIS_IN = (
    0.07,
    0.15,
    0.6,
)  # of a label; and between the edges of figure and axes
# GB/s that the upper axis may name.
SPEEDS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
PLACES = tuple(
    (side, up) for up in (0, 1, -1, 2, -2) for side in (1, -1)
)  # of a label around its point, nearest first
TOLD = COLOURS["vermillion"][0]
MS = NumberFormat(decimals=2)


def wire_lines(study: Study, findings: Findings) -> Section | None:
    """Return the lines of a study with their cells; without one, what is missing."""
    lines = findings.wire_lines
    if not lines and not findings.no_wire_line:
        return None
    names = short_names(dict.fromkeys(line.label for line in lines))
    said = [text for line in lines for text in _sentences(line, names[line.label])]
    if findings.no_wire_line:
        said.append(sentence(findings.no_wire_line))
    table = Table(
        "wire_lines",
        "What a cell loses per step: a fixed time, and a share of the time that its exchange needs on its links.",
        (
            Column("cells", "cells"), Column("strategy", "strategy", shown=False), Column("lost", "lost"),
            Column("source", "GB/s from"), Column("fixed_ms", "fixed ms", MS, True), Column("share", "share", "share", True),
            Column("r_squared", "R²", "ratio"), Column("deviation_ms", "residuals ms", MS),
            Column("count", "cells used", "count"), Column("speeds", "different times", "count"),
        ),
        tuple(
            (
                names[line.label], line.strategy, _lost(line), SOURCES[line.source], line.fixed_ms, line.share,
                line.r_squared, line.deviation_ms, len(line.points), line.speeds,
            )
            for line in lines
        ),
    )  # fmt: skip
    rows = [(line, point) for line in lines for point in line.points]
    cells = Table(
        "wire_cells",
        "Every cell beside its line, with what the line through the others lets expect of it: it loses more, or less.",
        (
            Column("line", "line", shown=len(names) > 1), Column("lost", "lost", shown=len(lines) > 1),
            Column("cell", unit_of(study)),
            Column("gb_per_s", "measured GB/s", "number"), Column("wire_ms", "ms on links", MS),
            Column("lost_ms", "lost ms", MS), Column("expected_ms", "expected ms", MS, True),
            Column("residual_ms", "difference ms", NumberFormat(decimals=2, sign=True)),
            Column("efficiency", "efficiency", "share"), Column("expected_efficiency", "expected", "share", True),
            Column("verdict", "loses"),
        ),
        tuple(
            (
                names[line.label], _lost(line), p.label, p.gb_per_s, p.wire_ms, p.lost_ms, p.expected_ms, p.residual_ms,
                p.efficiency, p.expected_efficiency, p.verdict,
            )
            for line, p in rows
        ),
        frozenset(place for place, (_, point) in enumerate(rows) if point.verdict),
    )  # fmt: skip
    return Section(
        "wire-lines",
        "Lost time and the speed of the links",
        tuple(said),
        tuple(wire_line_figures(study, lines)),
        (table, cells) if lines else (),
        place=31,
    )


def _lost(line: WireLine) -> str:
    return {EFFICIENCY: "against one GPU", EXPOSED: "to communication"}.get(
        line.quantity, "to the strategy"
    )


def _sentences(line: WireLine, name: str) -> list[str]:
    share = estimate(line.share, "share")
    told = [point for point in line.points if point.verdict]
    words = {
        EFFICIENCY: "a step takes longer than alone by",
        EXPOSED: "of communication a step does not hide",
    }
    begins = words.get(line.quantity, "the strategy costs a step")
    takes = "takes alone" if line.source == "exchange" else "needs on its links"
    text = (
        f"{name}: {begins} {estimate(line.fixed_ms, MS)} ms, and {share} of the time that the exchange {takes} "
        f"(R² {number(line.r_squared, 'ratio')}, {len(line.points) - len(told)} cells; GB/s from {SOURCES[line.source]})"
    )
    said = [sentence(text)]
    if line.speeds == 2:
        said.append(
            "The links have only two speeds here, and a line goes through any two points: no cell between them tests it."
        )
    if line.bends:
        said.append(
            "Its cells bend away from the line, so it says little of speeds between them: look at the figure."
        )
    return said + first_lines(sentence(_told(point)) for point in told)


def _told(point: WirePoint) -> str:
    if point.expected_efficiency is not None:
        expected = interval(point.expected_efficiency, "share")
        measured = f"efficiency {number(point.efficiency, 'share')}, expected {expected}"
    else:
        measured = (
            f"{number(point.lost_ms, MS)} ms a step, expected {interval(point.expected_ms, MS)}"
        )
    return f"GPUs {point.label}: this subset loses {point.verdict} time than its link speed explains ({measured})"


def wire_line_figures(study: Study, lines: Sequence[WireLine]) -> Iterator[Picture]:
    """Yield the cells of each line with the line and the band in which 95 % of further cells fall."""
    palette = colours(line.strategy for line in lines)
    names = short_names(dict.fromkeys(line.label for line in lines))
    for place, line in enumerate(lines[:FIGURES], 1):
        figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
        colour = palette[line.strategy]
        _draw_line(axes, line, colour)
        for point in line.points:
            look = {"color": TOLD, "markerfacecolor": PAPER} if point.verdict else {"color": colour}
            axes.plot(
                point.wire_ms,
                _value(line, point),
                marker(line.strategy),
                zorder=3,
                markeredgewidth=1.4,
                **look,
            )
        _finish(axes, line)
        _label(axes, line)
        what = {EFFICIENCY: "Efficiency", EXPOSED: "Exposed communication"}.get(
            line.quantity, "What the strategy costs a step"
        )
        told = " Hollow: loses more or less time than link speed explains." * any(
            point.verdict for point in line.points
        )
        more = more_in(lines, FIGURES, "more line", "wire_lines.csv") if place == FIGURES else ""
        yield rendered(
            figure, f"wire-line-{place}",
            f"{what}, {single_line(names[line.label])}, against the time that the exchange needs on its links. Band: 95 % of "
            f"further cells. Labels where they fit; {count(len(line.points), 'cell')} in wire_cells.csv.{told}{more}",
            _data(line),
        )  # fmt: skip


def _data(line: WireLine) -> Table:
    quantity = "efficiency_percent" if line.quantity == EFFICIENCY else "lost_ms"
    rows = [
        (p.label, p.wire_ms, p.gb_per_s, _value(line, p), scaled(p.expected_efficiency, 100.0)
         if line.quantity == EFFICIENCY and p.expected_efficiency else p.expected_ms, p.verdict)
        for p in line.points
    ]  # fmt: skip
    return drawn(("cell", "wire_ms", "gb_per_s", quantity, f"expected_{quantity}", "loses"), rows)


def _value(line: WireLine, point: WirePoint) -> float:
    if line.quantity == EFFICIENCY and point.efficiency is not None:
        return 100 * point.efficiency
    return point.lost_ms


def _draw_line(axes: Any, line: WireLine, colour: str) -> None:
    fitted, most = line_of(line), 1.06 * max(point.wire_ms for point in line.points)
    if fitted is None:
        return
    xs = [most * step / BAND for step in range(BAND + 1)]
    expected = [fitted.expected(x) for x in xs]
    if line.quantity == EFFICIENCY and line.alone_ms is not None:
        expected = [scaled(efficiency_of(line.alone_ms, one), 100.0) for one in expected]
    axes.plot(xs, [one.value for one in expected], color=colour, lw=1.4, zorder=2)
    axes.fill_between(
        xs,
        [one.low for one in expected],
        [one.high for one in expected],
        color=colour,
        alpha=0.16,
        lw=0,
    )
    axes.set_xlim(0, most)
    values = [_value(line, point) for point in line.points]
    ends = [one.value for one in expected]
    low, high = min(*values, *ends), max(*values, *ends)
    room = 0.12 * (high - low) or 1.0
    axes.set_ylim(low - room, high + room)


def _finish(axes: Any, line: WireLine) -> None:
    axes.set_xlabel("ms that the exchange needs on its links")
    axes.set_ylabel("efficiency, %" if line.quantity == EFFICIENCY else "lost ms per step")
    axes.tick_params(length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    megabytes = [point.wire_ms * point.gb_per_s for point in line.points]
    if max(megabytes) > 1.01 * min(megabytes):
        return  # subsets of other sizes move other amounts: one time stands for several GB/s
    most = axes.get_xlim()[1]
    ticks: list[tuple[float, int]] = []
    for speed in reversed(SPEEDS):
        at = megabytes[0] / speed
        if 0.7 * line.points[0].wire_ms <= at <= most and (
            not ticks or at - ticks[-1][0] > 0.09 * most
        ):
            ticks.append((at, speed))
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    above.set_xticks([at for at, _ in ticks], [str(speed) for _, speed in ticks])
    above.set_xlabel("measured GB/s")
    above.tick_params(length=0)
    above.grid(visible=False)


def _label(axes: Any, line: WireLine) -> None:
    """Name the cells where their names fit: those that the line does not explain first, then the farthest from it."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    letter = LETTER_IN / (figure_width() - AXIS_IN)
    line_height = LINE_IN / (axes.figure.get_figheight() - AXIS_IN)
    spots = {
        id(point): (
            (point.wire_ms - left) / (right - left),
            (_value(line, point) - low) / (high - low),
        )
        for point in line.points
    }
    taken: list[tuple[float, float, float, float]] = [
        (x - 0.012, x + 0.012, y - 0.02, y + 0.02) for x, y in spots.values()
    ]
    for point in sorted(line.points, key=lambda one: (not one.verdict, -abs(one.residual_ms))):
        x, y = spots[id(point)]
        width = letter * len(point.label)
        for side, lines in PLACES if point.verdict else PLACES[:6]:
            start = x + 0.02 if side > 0 else x - 0.02 - width
            up = lines * line_height
            box = (start, start + width, y + up - line_height / 2, y + up + line_height / 2)
            inside = box[0] >= 0 and box[1] <= 1.0 and box[2] >= 0 and box[3] <= 1
            if inside and not any(
                box[0] < b and box[1] > a and box[2] < d and box[3] > c for a, b, c, d in taken
            ):
                taken.append(box)
                axes.text(
                    start, y + up, single_line(point.label, 40), transform=axes.transAxes, va="center", fontsize=8,
                    color=TOLD if point.verdict else MUTED,
                )  # fmt: skip
                break


SECTIONS = (wire_lines,)
