"""Efficiency curves of several machines or studies together; every curve is against the baselines of its own study."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.findings.between_studies import CellId, Side, curve_id, names
from analysis.report.curves import DrawnCurve, efficiencies, efficiency_figure
from analysis.report.section import Section
from analysis.report.several.look import Look, looks
from analysis.report.style import Picture
from analysis.report.tables import Column, Table
from analysis.study.estimates import Curve, Scaling
from analysis.study.names import gpu_ids, things_of, unit_of
from analysis.text import count, single_line

PANELS = 3  # figures
CURVES = 8  # of one figure


@dataclass(frozen=True)
class SharedCurve:
    """A curve that several sides measured; what was asked is equal, the GPUs may not be."""

    name: str
    places: tuple[tuple[Side, Curve], ...]


def shared_curves(
    sides: Sequence[Side], scalings: Mapping[str, Scaling]
) -> tuple[SharedCurve, ...]:
    """Return the curves with an efficiency that two sides or more have; `scalings` are those of the sides, by name."""
    found: dict[CellId, dict[str, tuple[Side, Curve]]] = {}
    for side in sides:
        for curve in scalings[side.name].curves:
            records = side.study.records_of(curve.points[0])
            if not efficiencies(curve.points) or not records:
                continue
            asked = curve_id(records[0].cell)
            known = found.setdefault(asked, {}).get(side.name)
            if known is None or len(known[1].points) < len(
                curve.points
            ):  # of two versions the longer curve
                found[asked][side.name] = side, curve
    shared = [asked for asked, of_sides in found.items() if len(of_sides) > 1]
    named = names(shared)
    return tuple(SharedCurve(named[asked], tuple(found[asked].values())) for asked in shared)


def scaling(sides: Sequence[Side], shared: Sequence[SharedCurve]) -> Section:
    """Return the curves together, as figures and a table."""
    title = "Efficiency on each"
    if not shared:
        line = "No curve of efficiency is of two of them: it needs the same model, strategy and settings, and a baseline."
        return Section("scaling", title, (line,))
    units = dict.fromkeys(unit_of(side.study) for curve in shared for side, _ in curve.places)
    rows = tuple(
        (
            curve.name, side.name, gpu_ids(p.gpus), p.world_size, p.runs, p.rate, p.efficiency, p.at_equal_clocks,
            "suspect" if p.suspect else "",
        )
        for curve in shared for side, one in curve.places for p in one.points
    )  # fmt: skip
    table = Table(
        "points",
        "Every subset of these curves, against the slowest of its members alone in the same study, with 95 % intervals for "
        "the next run there.",
        (
            Column("curve", "curve"), Column("side", "machine or study"), Column("gpus", " or ".join(units)),
            Column("world_size", "n", "count"), Column("runs", "runs", "count"),
            Column("images_per_second", f"{things_of(*(side.study for side in sides))}/s", "rate", True),
            Column("efficiency", "efficiency", "share", True),
            Column("efficiency_at_equal_clocks", "at equal clocks", "share", shown=False), Column("mark", "mark"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    return Section("scaling", title, (), tuple(_figures(shared, looks(sides))), (table,))


def _figures(shared: Sequence[SharedCurve], look: Mapping[str, Look]) -> Iterator[Picture]:
    """Yield a figure for each of the curves that most sides have."""
    panels = sorted(shared, key=lambda curve: -len(curve.places))[:PANELS]
    for place, curve in enumerate(panels, 1):
        drawn = [
            DrawnCurve(
                look[side.name].name, one.points, look[side.name].colour, look[side.name].marker
            )
            for side, one in curve.places[:CURVES]
        ]
        units = dict.fromkeys(unit_of(side.study) for side, _ in curve.places)
        more = f" {count(len(curve.places) - CURVES, 'more curve')} in points.csv." * (
            len(curve.places) > CURVES
        )
        kinds = " and ".join(dict.fromkeys(one.kind for _, one in curve.places))
        yield efficiency_figure(
            drawn, " or ".join(units), f"efficiency-{place}",
            f"Efficiency of {single_line(curve.name)}, {kinds} scaling: rate ÷ (N × the slowest member alone in the same "
            f"study); bars: 95 % intervals for the next run there.{more}",
        )  # fmt: skip
