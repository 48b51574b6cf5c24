"""Scaling: images per second and efficiency against the number of GPUs, as figures and tables; laws fitted to the curves."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from analysis.report.curves import DrawnCurve, efficiencies, efficiency_figure, rates_figure
from analysis.report.measured_values import bars, in_parentheses
from analysis.report.numbers import number
from analysis.report.section import Section
from analysis.report.style import MARKERS, Picture, colours
from analysis.report.tables import Column, Table
from analysis.study.estimates import Curve, Findings
from analysis.study.names import gpu_ids, gpu_list, ran_alone, short_names, things_of, unit_of
from analysis.study.study import Study, named
from analysis.text import count, first_lines, sentence, single_line

OTHER_CLOCKS = 0.01  # share of the SM clock from which on the efficiency at equal clocks is told
PANELS = 3  # figures of each sort: a page is read, the tables hold the rest
CURVES = 6  # of one figure


def scaling(study: Study, findings: Findings) -> Section | None:
    """Return curves, their points, the fits, and why some points have no efficiency."""
    if not study.trains:
        return None
    curves, one, alone = findings.scaling.curves, unit_of(study).removesuffix("s"), ran_alone(study)
    curves = _by_batch(curves) if alone else curves
    names = short_names(dict.fromkeys(curve.label for curve in curves))
    of_hosts = any(p.node_efficiency for curve in curves for p in curve.points)
    rows = tuple(
        (
            names[curve.label], curve.kind, gpu_ids(p.gpus), p.world_size, p.runs, p.batch_size, p.rate, p.efficiency,
            *[p.node_efficiency][:of_hosts], p.at_equal_clocks, p.speedup, p.baseline, p.slowest,
            gpu_ids(p.without_baseline), "suspect" if p.suspect else "",
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
        f"{_caption(unit_of(study), alone, of_hosts)}{in_parentheses(study)}",
        (
            Column("curve", "cells"), Column("kind", "scaling", shown=not alone),
            Column("gpus", one if alone else unit_of(study)),
            Column("world_size", "how many", "count", shown=not (of_hosts or alone)),
            Column("runs", "runs", "count"), Column("batch_size", f"{things_of(study)} per {one}", "count", shown=not of_hosts),
            Column("images_per_second", f"{things_of(study)}/s", "rate", True), Column("efficiency", "efficiency", "share", True),
            *[Column("node_efficiency", "by hosts", "share", True)][:of_hosts],
            Column("efficiency_at_equal_clocks", "at equal clocks", "share", shown=bool(slowed)),
            Column("speedup", "speed-up", "ratio", True), Column("baseline", "slowest alone", "rate", True),
            Column("slowest", f"slowest {one}", "text" if of_hosts else "count"),  # a:0 is no number
            # Where no member was, the line above the table says why.
            Column("without_baseline", "not measured alone", shown=any(p.efficiency for curve in curves for p in curve.points)),
            Column("mark", "verdict"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    told = [
        f"if steps followed the SM clock, the efficiency at that of the slowest GPU alone would be {'; '.join(slowed)}; "
        "steps that wait for memory follow it less"
    ]
    lines = first_lines(
        [sentence(text) for text in (*(told if slowed else ()), *findings.scaling.refusals)]
    )
    if not curves:
        lines.insert(0, f"No cell that counts measured {things_of(study)} per second.")
    pictures = tuple(scaling_figures(study, curves))
    title = "Rates" if alone else "Scaling"
    return Section(
        "scaling", title, tuple(lines), pictures, (table, _fits(curves, names)), place=10
    )


def _by_batch(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return curves of one size with those that differ in their batch alone together, in order of the batch."""

    def asked(curve: Curve) -> frozenset[tuple[str, str]]:
        return frozenset(
            one for point in curve.points for one in point.key.items() if one[0] != "batch_size"
        )

    place: dict[frozenset[tuple[str, str]], int] = {}
    for curve in curves:
        place.setdefault(asked(curve), len(place))
    least = {
        curve.label: min((point.batch_size for point in curve.points), default=0)
        for curve in curves
    }
    return tuple(sorted(curves, key=lambda curve: (place[asked(curve)], least[curve.label])))


def _caption(unit: str, alone: bool, of_hosts: bool) -> str:
    one = unit.removesuffix("s")
    if alone:
        return f"Every cell that was measured, each on one {one}; none says how it scales."
    hosts = ", by hosts against the slowest host alone with as many" * of_hosts
    return f"Every set of {unit} that was measured. Efficiency and speed-up are against its slowest {one} alone{hosts}."


def _fits(curves: Sequence[Curve], names: Mapping[str, str]) -> Table:
    def shares(parameters: Mapping[str, float]) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {number(value, 'share')}"
            for name, value in parameters.items()
        )

    laws = {"amdahl": "Amdahl", "usl": "universal scalability law"}
    return Table(
        "fits", "Laws fitted where enough numbers of GPUs were measured. The error is that of the point farthest from the law.",
        (Column("curve", "cells"), Column("law", "law"), Column("parameters", "shares"), Column("error", "error", "share")),
        tuple(
            (names[curve.label], laws.get(fit.law, fit.law), shares(fit.parameters), fit.error)
            for curve in curves for fit in curve.fits
        ),
    )  # fmt: skip


def scaling_figures(study: Study, curves: Sequence[Curve]) -> Iterator[Picture]:
    """Yield rates, then efficiencies, for each model and kind of scaling with curves of two or more sizes."""
    panels = _panels(study, curves)
    left, unit, things = len(panels) - PANELS, unit_of(study), things_of(study)
    for place, ((model, kind), members) in enumerate(list(panels.items())[:PANELS], 1):
        drawn = _most_telling(members)
        more = f" {count(len(members) - len(drawn), 'more curve')} in points.csv." * (
            len(members) > len(drawn)
        )
        more += f" {count(left, 'more model')} in points.csv." * (left > 0 and place == PANELS)
        about = f"{single_line(model)}, {kind} scaling"
        marked = " Hollow: suspect." * any(
            point.suspect for curve in drawn for point in curve.points
        )
        curves_drawn = _drawn(study, drawn)
        yield rates_figure(
            curves_drawn, unit, things, f"scaling-{place}",
            f"{things.capitalize()} per second, {about}. Dashed: N × the slowest member alone.{bars(study)}{marked}{more}",
        )  # fmt: skip
        if any(efficiencies(curve.points) for curve in drawn):
            yield efficiency_figure(
                curves_drawn, unit, f"efficiency-{place}",
                f"Efficiency, {about}: rate ÷ (N × the slowest member alone).{bars(study)}{marked}",
            )  # fmt: skip


def _panels(study: Study, curves: Sequence[Curve]) -> dict[tuple[str, str], list[Curve]]:
    found: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        if len({point.world_size for point in curve.points}) > 1:
            found[_of(study, curve, "model"), curve.kind].append(curve)
    return found


def _of(study: Study, curve: Curve, group: str) -> str:
    """Return the name of the model or strategy of a curve's cells."""
    return next(
        (named(record, group) for point in curve.points for record in study.records_of(point)),
        "unknown",
    )


def _most_telling(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with most points and fewest settings, in their order."""

    def key(place: int) -> tuple[int, int, int]:
        return -len(curves[place].points), curves[place].settings, place

    chosen = sorted(range(len(curves)), key=key)[:CURVES]
    return [curves[place] for place in sorted(chosen)]


def _drawn(study: Study, curves: Sequence[Curve]) -> list[DrawnCurve]:
    """Return curves with their looks: a strategy has one colour, and every curve a marker of its own."""
    strategies = [_of(study, curve, "strategy") for curve in curves]
    palette = colours(named(record, "strategy") for record in study.records) | colours(strategies)
    drawn = []
    for place, (curve, strategy) in enumerate(zip(curves, strategies, strict=True)):
        drawn.append(
            DrawnCurve(curve.label, curve.points, palette[strategy], MARKERS[place % len(MARKERS)])
        )
    return drawn


SECTIONS = (scaling,)
