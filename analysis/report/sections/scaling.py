"""Scaling: images per second and efficiency against the number of GPUs, as figures and tables; laws fitted to the curves."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from analysis.findings.labels import gpu_ids, gpu_list
from analysis.findings.model import Curve, Estimate, Findings, Point
from analysis.findings.runs import named
from analysis.findings.study import Study
from analysis.report.measured_values import about_intervals
from analysis.report.names import BETWEEN, short_names, unit_of
from analysis.report.numbers import number
from analysis.report.section import Section
from analysis.report.style import (
    INK,
    LABEL_PLACE,
    LABEL_STEP,
    MARKERS,
    MUTED,
    PAPER,
    Picture,
    colours,
    new_figure,
    rendered,
    spread,
    window,
)
from analysis.report.tables import Column, Table
from analysis.report.text import count, first_lines, sentence, single_line

OTHER_CLOCKS = 0.01  # share of the SM clock from which on the efficiency at equal clocks is told
PANELS = 3  # figures of each sort: a page is read, the tables hold the rest
CURVES = 6  # of one figure
WIDTH, HEIGHT = 4.6, 2.9  # inches
LABEL_LENGTH = 24  # characters
ASIDE = 5.0  # points between the intervals of curves that would cover each other
MOST_ASIDE = 12.0  # between the outermost of them


def scaling(study: Study, findings: Findings) -> Section | None:
    """Return curves, their points, the fits, and why some points have no efficiency."""
    if not study.trains:
        return None
    curves, one = findings.scaling.curves, unit_of(study).removesuffix("s")
    names = short_names(dict.fromkeys(curve.label for curve in curves))
    rows = tuple(
        (
            names[curve.label], curve.kind, gpu_ids(p.gpus), p.world_size, p.runs, p.batch_size, p.rate, p.baseline,
            p.slowest, p.speedup, p.efficiency, p.at_equal_clocks, gpu_ids(p.without_baseline), "suspect" if p.suspect else "",
        )
        for curve in curves for p in curve.points
    )  # fmt: skip
    slowed = [
        f"{number(p.at_equal_clocks, 'share')} instead of {number(p.efficiency.value, 'share')} "
        f"({names[curve.label]} on {gpu_list(p.gpus)})"
        for curve in curves for p in curve.points
        if p.efficiency and p.clock_ratio and abs(p.clock_ratio - 1) > OTHER_CLOCKS
    ]  # fmt: skip
    table = Table(
        "points",
        f"Every subset; efficiency and speed-up are against the slowest member alone. Numbers in parentheses: "
        f"{about_intervals(study)}.",
        (
            Column("curve", "curve"), Column("kind", "scaling"), Column("gpus", unit_of(study)),
            Column("world_size", "n", "count"),
            Column("runs", "runs", "count"), Column("batch_size", "batch", "count"),
            Column("images_per_second", "images/s", "rate", True), Column("baseline", "slowest alone", "rate", True),
            Column("slowest", f"slowest {one}", "count"), Column("speedup", "speed-up", "ratio", True),
            Column("efficiency", "efficiency", "share", True),
            Column("efficiency_at_equal_clocks", "at equal clocks", "share", shown=bool(slowed)),
            Column("without_baseline", "not measured alone"),
            Column("mark", "mark"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    told = [f"with the SM clock that the slowest member has alone, the efficiency would be {'; '.join(slowed)}"]
    lines = first_lines([sentence(text) for text in (*(told if slowed else ()), *findings.scaling.refusals)])
    if not curves:
        lines.insert(0, "No usable cell measured images per second.")
    pictures = tuple(scaling_figures(study, curves))
    return Section("scaling", "Scaling", tuple(lines), pictures, (table, _fits(curves, names)), place=10)


def _fits(curves: Sequence[Curve], names: Mapping[str, str]) -> Table:
    def shares(parameters: Mapping[str, float]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {number(value, 'share')}" for name, value in parameters.items())

    laws = {"amdahl": "Amdahl", "usl": "universal scalability law"}
    return Table(
        "fits", "Laws fitted to curves with enough points; the error is that of the point farthest from the law.",
        (Column("curve", "curve"), Column("law", "law"), Column("parameters", "shares"), Column("error", "error", "share")),
        tuple(
            (names[curve.label], laws.get(fit.law, fit.law), shares(fit.parameters), fit.error)
            for curve in curves for fit in curve.fits
        ),
    )  # fmt: skip


def scaling_figures(study: Study, curves: Sequence[Curve]) -> Iterator[Picture]:
    """Yield rates, then efficiencies, for each model and kind of scaling with curves of two or more sizes."""
    panels = _panels(study, curves)
    left = len(panels) - PANELS
    for place, ((model, kind), members) in enumerate(list(panels.items())[:PANELS], 1):
        drawn = _most_telling(members)
        more = f" {count(len(members) - len(drawn), 'more curve')} in points.csv." * (len(members) > len(drawn))
        more += f" {count(left, 'more model')} in points.csv." * (left > 0 and place == PANELS)
        about = f"{single_line(model)}, {kind} scaling"
        marked = " Hollow: suspect." * any(point.suspect for curve in drawn for point in curve.points)
        yield _rates(
            study, drawn, f"scaling-{place}",
            f"Images per second, {about}. Dashed: N × the slowest member alone; bars: {about_intervals(study)}.{marked}{more}",
        )  # fmt: skip
        if any(_efficiencies(curve) for curve in drawn):
            yield _shares(
                study, drawn, f"efficiency-{place}",
                f"Efficiency, {about}: rate ÷ (N × the slowest member alone); bars: {about_intervals(study)}.{marked}",
            )  # fmt: skip


def _panels(study: Study, curves: Sequence[Curve]) -> dict[tuple[str, str], list[Curve]]:
    found: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        if len({point.world_size for point in curve.points}) > 1:
            found[_of(study, curve, "model"), curve.kind].append(curve)
    return found


def _of(study: Study, curve: Curve, group: str) -> str:
    """Return the name of the model or strategy of a curve's cells."""
    return next((named(record, group) for point in curve.points for record in study.records_of(point)), "unknown")


def _most_telling(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with most points and fewest settings, in their order."""

    def key(place: int) -> tuple[int, int, int]:
        return -len(curves[place].points), curves[place].settings, place

    chosen = sorted(range(len(curves)), key=key)[:CURVES]
    return [curves[place] for place in sorted(chosen)]


def _efficiencies(curve: Curve) -> list[Point]:
    return [point for point in curve.points if point.efficiency is not None and point.world_size > 1]


def _line(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return the sizes, and the median at each size."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, value in points:
        by_size[size].append(value)
    return sorted(by_size), [median(by_size[size]) for size in sorted(by_size)]


def _looks(study: Study, curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Return (colour, marker) of each curve: a strategy has one colour, and its curves differ in the marker."""
    strategies = [_of(study, curve, "strategy") for curve in curves]
    palette = colours(named(record, "strategy") for record in study.records) | colours(strategies)
    seen: dict[str, int] = defaultdict(int)
    looks = []
    for strategy in strategies:
        looks.append((palette[strategy], MARKERS[seen[palette[strategy]] % len(MARKERS)]))
        seen[palette[strategy]] += 1
    return looks


def _rates(study: Study, curves: Sequence[Curve], name: str, caption: str) -> Picture:
    figure, axes = new_figure(WIDTH, HEIGHT)
    ends = []
    for curve, (colour, marker) in zip(curves, _looks(study, curves), strict=True):
        _ideal(axes, curve)
        ends.append(_draw(axes, [(p, p.rate) for p in curve.points], colour, marker))
    ideal = [point.baseline.value * point.world_size for curve in curves for point in curve.points if point.baseline]
    axes.set_ylim(0, window([point.rate for curve in curves for point in curve.points], ideal)[1])
    axes.set_ylabel("images/s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 or not value else f"{value:g}")
    sizes = {point.world_size for curve in curves for point in curve.points} | ({1} if ideal else set())
    _finish(axes, sorted(sizes), curves, ends, study)
    return rendered(figure, name, caption)


def _ideal(axes: Any, curve: Curve) -> None:
    """Draw N × the slowest member alone, from one GPU on."""
    alone = {point.world_size: point.baseline.value for point in curve.points if point.baseline is not None}
    if alone:
        sizes = sorted({1, *alone})
        rates = [size * alone.get(size, alone[min(alone)]) for size in sizes]
        axes.plot(sizes, rates, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)


def _shares(study: Study, curves: Sequence[Curve], name: str, caption: str) -> Picture:
    figure, axes = new_figure(WIDTH, HEIGHT)
    shown = [(curve, look) for curve, look in zip(curves, _looks(study, curves), strict=True) if _efficiencies(curve)]
    axes.axhline(1.0, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    apart = min(ASIDE, MOST_ASIDE / max(1, len(shown) - 1))
    ends = [
        _draw(
            axes, [(p, p.efficiency) for p in _efficiencies(curve) if p.efficiency is not None], colour, marker,
            apart * (place - (len(shown) - 1) / 2),
        )
        for place, (curve, (colour, marker)) in enumerate(shown)
    ]  # fmt: skip
    every = [point.efficiency for curve, _ in shown for point in _efficiencies(curve) if point.efficiency is not None]
    low, high = window(every, [1.0])
    margin = max(0.005, 0.1 * (high - low))
    axes.set_ylim(max(0.0, low - margin), high + margin)
    axes.set_ylabel("efficiency")
    step = axes.get_ylim()[1] - axes.get_ylim()[0]
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{0 if step > 0.06 else 1}f} %")
    sizes = sorted({point.world_size for curve, _ in shown for point in _efficiencies(curve)})
    _finish(axes, sizes, [curve for curve, _ in shown], ends, study)
    begins = " The axis does not begin at 0." if axes.get_ylim()[0] > 0 else ""
    return rendered(figure, name, caption + begins)


def _draw(
    axes: Any, points: Sequence[tuple[Point, Estimate]], colour: str, marker: str, aside: float = 0.0
) -> tuple[float, float, str]:
    """Draw every subset and a line through the medians of the sizes; return (x, y, colour) of the curve's end.

    The curve is moved to the right by `aside` points, so that intervals of several curves do not cover each other.
    """
    from matplotlib.transforms import offset_copy

    moved = offset_copy(axes.transData, axes.figure, x=aside, units="points")
    xs, ys = _line([(point.world_size, estimate.value) for point, estimate in points])
    axes.plot(xs, ys, color=colour, zorder=2, transform=moved)
    known = [(p.world_size, e.low, e.high) for p, e in points if e.low is not None and e.high is not None]
    if known:
        axes.vlines(*zip(*known, strict=True), color=colour, lw=1.1, zorder=2, transform=moved)
    for suspect in (False, True):
        marked = [(point.world_size, estimate.value) for point, estimate in points if point.suspect == suspect]
        if marked:
            face = PAPER if suspect else colour
            look = {"marker": marker, "color": colour, "markerfacecolor": face, "markeredgewidth": 1.2}
            axes.plot(*zip(*marked, strict=True), linestyle="none", zorder=3, transform=moved, **look)
    return xs[-1], ys[-1], colour


def _finish(
    axes: Any, sizes: Sequence[int], curves: Sequence[Curve], ends: Sequence[tuple[float, float, str]], study: Study
) -> None:
    """Draw the axis of sizes, and a label at the end of each curve."""
    if sizes[-1] > 16:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 2**0.2, sizes[-1] * 2**0.2)
        axes.minorticks_off()
        sizes = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
    else:
        beyond = 0.05 * (sizes[-1] - sizes[0]) or 1
        axes.set_xlim(sizes[0] - beyond, sizes[-1] + beyond)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(unit_of(study))
    axes.grid(axis="x", visible=False)
    low, high = axes.get_ylim()
    places = spread([y for _, y, _ in ends], LABEL_STEP * (high - low)) if ends else []
    words = short_names(single_line(curve.label) for curve in curves)
    for curve, (x, y, colour), place in zip(curves, ends, places, strict=True):
        text = _short(words[single_line(curve.label)]) if len(curves) > 1 else ""
        axes.annotate(
            text or number(y, "share" if high < 3 else "rate"), (x, y), xytext=(LABEL_PLACE, (place - low) / (high - low)),
            textcoords="axes fraction", va="center", fontsize=8, color=colour, annotation_clip=False,
        )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def _short(label: str) -> str:
    """Return the end of a long label: curves of one colour differ in its last parts."""
    parts = label.split(BETWEEN)
    while len(parts) > 1 and len(BETWEEN.join(parts)) > LABEL_LENGTH:
        parts[:2] = [f"… {parts[1]}"]
    return single_line(BETWEEN.join(parts), LABEL_LENGTH)


SECTIONS = (scaling,)
