"""Images per second against the number of GPUs, and against options that are numbers."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis.report.charts import truncation_note
from analysis.report.curves import MARKERS, Axis, DrawnCurve, curves_figure
from analysis.report.figure import Figure, colours, for_width
from analysis.report.numbers import estimate, number
from analysis.report.section import Section, bars, in_parentheses
from analysis.report.table import Column, Table, Value, numbers_table
from analysis.study.estimates import Curve, Estimate, Findings, Member, Point
from analysis.study.names import (
    BETWEEN,
    format_option,
    gpu_ids,
    gpu_list,
    ran_alone,
    short_names,
    things_of,
    unit_of,
)
from analysis.study.runs import named
from analysis.study.study import Study
from analysis.text import count, first_lines, sentence, single_line

OTHER_CLOCKS = 0.01  # share of the SM clock from which on the efficiency at equal clocks is told
MOST_FIGURES = 3  # of each kind: a page is read, the tables hold the rest
MOST_CURVES = 6  # of one figure
MOST_LINEAR_SIZE = 16  # GPUs; with more the axis is logarithmic
LAWS = {"amdahl": "Amdahl", "usl": "universal scalability law"}
FEWEST_VALUES = 3  # of an option that is an axis
NO_AXES = ("seed", "model.classes", "global_batch_size")
WIDE_RANGE = 8.0  # times the least value of an option: the axis is logarithmic


def scaling(study: Study, findings: Findings) -> Section | None:
    """Return curves, their points, the fits, and why some points have no efficiency."""
    if not study.trains:
        return None
    alone = ran_alone(study)
    curves = _by_batch(findings.scaling.curves) if alone else findings.scaling.curves
    names = short_names(dict.fromkeys(curve.label for curve in curves))
    things = things_of(study)
    lines = []
    if not curves:
        lines.append(f"No cell that counts measured {things} per second.")
    slowed = _slowed_by_clocks(curves, names)
    if slowed:
        lines.append(
            "If steps followed the SM clock, the efficiency at that of the slowest GPU alone would "
            "be "
            f"{'; '.join(slowed)}; steps that wait for memory follow it less."
        )
    table = _points_table(study, curves, names, bool(slowed))
    fits: list[dict[str, Value]] = []
    for curve in curves:
        for fit in curve.fits:
            law, shares = LAWS.get(fit.law, fit.law), _shares(fit.parameters)
            row = {"curve": names[curve.label], "law": law, "parameters": shares}
            fits.append(row | {"error": fit.error})
    fits_table = Table.of(
        "fits",
        "Laws fitted where enough numbers of GPUs were measured. The error is that of the point "
        "farthest from the law.",
        (
            Column("curve", "cells"),
            Column("law", "law"),
            Column("parameters", "shares"),
            Column("error", "error", kind="share"),
        ),
        fits,
    )
    refusals = [sentence(text) for text in findings.scaling.refusals]
    start = [] if curves else lines[:1]
    lines = start + first_lines([*lines[len(start) :], *refusals])
    return Section(
        "scaling",
        "Rates" if alone else "Scaling",
        tuple(lines),
        tuple(_figures(study, curves)),
        (table, fits_table),
    )


def _by_batch(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Return curves of one size; those that differ in their batch alone stand together."""

    def request(curve: Curve) -> frozenset[tuple[str, str]]:
        items = (item for point in curve.points for item in point.key.items())
        return frozenset(item for item in items if item[0] != "batch_size")

    order: dict[frozenset[tuple[str, str]], int] = {}
    for curve in curves:
        order.setdefault(request(curve), len(order))

    def position(curve: Curve) -> tuple[int, int]:
        return order[request(curve)], min((point.batch_size for point in curve.points), default=0)

    return tuple(sorted(curves, key=position))


def _slowed_by_clocks(curves: Sequence[Curve], names: Mapping[str, str]) -> list[str]:
    """Return `98.1 % instead of 97.0 % (eager on gpus 0,1)` of points with other clocks."""
    slowed = []
    for curve in curves:
        for point in curve.points:
            if point.efficiency and point.clock_ratio and abs(point.clock_ratio - 1) > OTHER_CLOCKS:
                shares = (
                    number(share, "share")
                    for share in (point.at_equal_clocks, point.efficiency.value)
                )
                slowed.append(
                    f"{' instead of '.join(shares)} ({names[curve.label]} on "
                    f"{gpu_list(point.gpus)})"
                )
    return slowed


class CurvePoint(NamedTuple):
    """A row of the table of points."""

    curve: Curve
    point: Point


def _points_table(
    study: Study, curves: Sequence[Curve], names: Mapping[str, str], slowed: bool
) -> Table:
    alone, unit, things = ran_alone(study), unit_of(study), things_of(study)
    member = unit.removesuffix("s")
    rows = [CurvePoint(curve, point) for curve in curves for point in curve.points]
    of_hosts = any(row.point.node_efficiency for row in rows)
    has_efficiency = any(row.point.efficiency for row in rows)
    columns = [
        Column("curve", "cells", lambda row: names[row.curve.label]),
        Column("kind", "scaling", "curve.kind", shown=not alone),
        Column("gpus", member if alone else unit, lambda row: gpu_ids(row.point.gpus)),
        Column(
            "world_size", "how many", "point.world_size", "count", shown=not (of_hosts or alone)
        ),
        Column("runs", "runs", "point.runs", "count"),
        Column(
            "batch_size", f"{things} per {member}", "point.batch_size", "count", shown=not of_hosts
        ),
        Column("images_per_second", f"{things}/s", "point.rate", "rate", True),
        Column("efficiency", "efficiency", "point.efficiency", "share", True),
    ]
    if of_hosts:
        columns.append(
            Column("node_efficiency", "by hosts", "point.node_efficiency", "share", True)
        )
    # Of a host `a:0` is no number. Where no member was measured alone, a line above the table says
    # why.
    slowest_kind = "text" if of_hosts else "count"
    columns += [
        Column(
            "efficiency_at_equal_clocks",
            "at equal clocks",
            "point.at_equal_clocks",
            "share",
            shown=slowed,
        ),
        Column("speedup", "speed-up", "point.speedup", "ratio", True),
        Column("baseline", "slowest alone", "point.baseline", "rate", True),
        Column("slowest", f"slowest {member}", "point.slowest", slowest_kind),
        Column(
            "without_baseline",
            "not measured alone",
            lambda row: gpu_ids(row.point.without_baseline),
            shown=has_efficiency,
        ),
        Column("mark", "verdict", lambda row: "suspect" if row.point.suspect else ""),
    ]
    if alone:
        caption = f"Every cell that was measured, each on one {member}; none says how it scales."
    else:
        hosts = ", by hosts against the slowest host alone with as many" if of_hosts else ""
        caption = (
            f"Every set of {unit} that was measured. "
            f"Efficiency and speed-up are against its slowest {member} alone{hosts}."
        )
    caption += in_parentheses(study)
    return Table.of("points", caption, columns, rows, marked=lambda row: row.point.suspect)


def _shares(parameters: Mapping[str, float]) -> str:
    texts = []
    for name, value in parameters.items():
        texts.append(f"{name.replace('_', ' ')} {number(value, 'share')}")
    return ", ".join(texts)


def _figures(study: Study, curves: Sequence[Curve]) -> Iterator[Figure]:
    """Yield rates, then efficiencies, for each model and kind of scaling with two sizes."""
    panels: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        if len({point.world_size for point in curve.points}) > 1:
            panels[_name_of(study, curve, "model"), curve.kind].append(curve)
    left = len(panels) - MOST_FIGURES
    for panel, ((model, kind), members) in enumerate(list(panels.items())[:MOST_FIGURES], 1):
        drawn = _with_most_points(members)
        notes = bars(study)
        if any(point.suspect for curve in drawn for point in curve.points):
            notes += " Hollow: suspect."
        more = truncation_note(members, len(drawn), "more curve", "points.csv")
        if left > 0 and panel == MOST_FIGURES:
            more += f" {count(left, 'more model')} in points.csv."
        about = f"{single_line(model)}, {kind} scaling"
        yield _rates_figure(study, drawn, f"scaling-{panel}", about, notes + more)
        with_efficiency = [curve for curve in drawn if _efficient(curve)]
        if with_efficiency:
            yield _efficiency_figure(
                study, drawn, with_efficiency, f"efficiency-{panel}", about, notes
            )


def _name_of(study: Study, curve: Curve, group: str) -> str:
    """Return the name of the model or strategy of a curve's cells."""
    for point in curve.points:
        for record in study.records_of(point):
            return named(record, group)
    return "unknown"


def _with_most_points(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with most points and fewest settings, in their order."""

    def telling(index: int) -> tuple[int, int, int]:
        return -len(curves[index].points), curves[index].settings, index

    chosen = sorted(range(len(curves)), key=telling)[:MOST_CURVES]
    return [curves[index] for index in sorted(chosen)]


def _efficient(curve: Curve) -> list[tuple[Point, Estimate]]:
    """Return the points of several GPUs that have an efficiency, with it."""
    points = []
    for point in curve.points:
        if point.efficiency and point.world_size > 1:
            points.append((point, point.efficiency))
    return points


def _looks(study: Study, curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Return (colour, marker) of curves: a colour for each strategy, a marker for each curve."""
    strategies = [_name_of(study, curve, "strategy") for curve in curves]
    palette = colours(named(record, "strategy") for record in study.records) | colours(strategies)
    looks = []
    for index, strategy in enumerate(strategies):
        looks.append((palette[strategy], MARKERS[index % len(MARKERS)]))
    return looks


def _sizes_axis(unit: str, sizes: Sequence[int]) -> Axis:
    """Return the axis of numbers of GPUs."""
    logarithmic = sizes[-1] > MOST_LINEAR_SIZE
    if logarithmic:
        sizes = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
    return Axis(unit, ticks={size: str(size) for size in sizes}, base=2 if logarithmic else 0)


def _rates_figure(
    study: Study, curves: Sequence[Curve], name: str, about: str, notes: str
) -> Figure:
    """Return images per second against the number of GPUs, with N × the slowest member alone."""
    unit, things = unit_of(study), things_of(study)
    drawn, rows = [], []
    for curve, (colour, form) in zip(curves, _looks(study, curves), strict=True):
        points = [(point.world_size, point.rate, point.suspect) for point in curve.points]
        drawn.append(DrawnCurve(curve.label, points, colour, form, _ideal(curve)))
        for point in curve.points:
            ideal = point.baseline and point.baseline.value * point.world_size
            rows.append((curve.label, gpu_ids(point.gpus), point.world_size, point.rate, ideal))
    sizes = {point.world_size for curve in curves for point in curve.points}
    if any(curve.ideal for curve in drawn):
        sizes.add(1)
    rate = f"{things.replace(' ', '_')}_per_second"
    return curves_figure(
        name,
        f"{things.capitalize()} per second, {about}. Dashed: N × the slowest member alone.{notes}",
        drawn,
        _sizes_axis(unit, sorted(sizes)),
        Axis(f"{things}/s", "rate", from_zero=True),
        numbers_table(("curve", "gpus", "world_size", rate, f"ideal_{rate}"), rows),
        _ends(
            [(curve.label, [(point, point.rate) for point in curve.points]) for curve in curves],
            "rate",
            unit,
        ),
    )


def _ideal(curve: Curve) -> list[tuple[float, float]]:
    """Return N × the slowest member alone, from one GPU on; empty without a baseline."""
    alone = {}
    for point in curve.points:
        if point.baseline is not None:
            alone[point.world_size] = point.baseline.value
    if not alone:
        return []
    smallest = alone[min(alone)]
    return [(size, size * alone.get(size, smallest)) for size in sorted({1, *alone})]


def _efficiency_figure(
    study: Study, curves: Sequence[Curve], shown: Sequence[Curve], name: str, about: str, notes: str
) -> Figure:
    """Return the efficiency against the number of GPUs.

    The curves keep the looks that they have among all.
    """
    unit = unit_of(study)
    looks = dict(zip([curve.label for curve in curves], _looks(study, curves), strict=True))
    drawn, rows = [], []
    for curve in shown:
        points = []
        for point, efficiency in _efficient(curve):
            points.append((point.world_size, efficiency, point.suspect))
            rows.append((curve.label, gpu_ids(point.gpus), point.world_size, efficiency))
        drawn.append(DrawnCurve(curve.label, points, *looks[curve.label]))
    sizes = sorted({point.world_size for curve in shown for point, _ in _efficient(curve)})
    return curves_figure(
        name,
        f"Efficiency, {about}: rate ÷ (N × the slowest member alone).{notes}",
        drawn,
        _sizes_axis(unit, sizes),
        Axis("efficiency", "share", shown=(1.0,)),
        numbers_table(("curve", "gpus", "world_size", "efficiency"), rows),
        _ends([(curve.label, _efficient(curve)) for curve in shown], "share", unit),
        dodge=True,
    )


def _ends(curves: Sequence[tuple[str, list[tuple[Point, Estimate]]]], kind: str, unit: str) -> str:
    """Return the value at the end of each curve: `On 4 GPUs: eager 18,676; compile 25,738.`"""
    most = max(point.world_size for _, points in curves for point, _ in points)
    names = short_names([single_line(label) for label, _ in curves])
    parts = []
    for label, points in curves:
        values = [value for point, value in points if point.world_size == most]
        if len(values) == 1:
            name = f"{names[single_line(label)]} " if len(curves) > 1 else ""
            parts.append(name + estimate(values[0], kind))
    return f"On {most} {unit}: {'; '.join(parts)}." if parts else ""


# ---- Against an option --------------------------------------------------------------------------


class OptionLine(NamedTuple):
    """The rates of cells that differ in one option alone, by its value."""

    label: str
    points: tuple[tuple[float, Point], ...]

    @property
    def key(self) -> Mapping[str, str]:
        """What was asked of its first cell."""
        return self.points[0][1].key


def rates_by_option(study: Study, findings: Findings) -> Section | None:
    """Return a figure for each model and option that is a number.

    None where none has three values.
    """
    if not study.trains:
        return None
    by_gpus: dict[tuple[Member, ...], list[tuple[str, Point]]] = defaultdict(list)
    for curve in findings.scaling.curves:
        for point in curve.points:
            by_gpus[point.gpus].append((curve.label, point))
    if not by_gpus:
        return None
    gpus, points = max(by_gpus.items(), key=lambda item: (len(item[1]), len(item[0])))
    panels = []
    for option in dict.fromkeys(option for _, point in points for option in point.key):
        lines = _option_lines(option, points)
        for model in dict.fromkeys(line.key["model.name"] for line in lines):
            of_model = [line for line in lines if line.key["model.name"] == model]
            panels.append((option, model, of_model))
    figures = []
    for panel, (option, model, lines) in enumerate(panels[:MOST_FIGURES], 1):
        left = len(panels) - MOST_FIGURES if panel == MOST_FIGURES else 0
        more = f" {count(left, 'more figure')} in points.csv." if left > 0 else ""
        about = f"{single_line(model)} on {gpu_list(gpus)}"
        figures.append(_option_figure(study, f"by-option-{panel}", option, about, lines, more))
    return Section("scaling", "Rates", figures=tuple(figures)) if figures else None


def _option_lines(option: str, points: Sequence[tuple[str, Point]]) -> list[OptionLine]:
    """Return the lines of an option; empty where it is no number, or no question."""
    members: dict[frozenset[tuple[str, str]], dict[float, tuple[str, Point]]] = defaultdict(dict)
    for label, point in points:
        value = _positive(point.key.get(option, ""))
        # It may follow from the number of GPUs.
        follows = option == "batch_size" and "global_batch_size" in point.key
        if value is not None and not follows:
            rest = frozenset(point.key.items() - {(option, point.key[option])})
            members[rest][value] = (label, point)
    lines = []
    for by_value in members.values():
        if len(by_value) >= FEWEST_VALUES and option not in NO_AXES:
            label, point = next(iter(by_value.values()))
            part = format_option(option, point.key[option])
            name = BETWEEN.join(word for word in label.split(BETWEEN) if word != part)
            ordered = tuple((value, by_value[value][1]) for value in sorted(by_value))
            lines.append(OptionLine(name or point.key["model.name"], ordered))
    return lines


def _positive(text: str) -> float | None:
    """Return a value as a number of an axis; None for words, lists and what is not above zero."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _option_figure(
    study: Study, name: str, option: str, about: str, lines: Sequence[OptionLine], more: str
) -> Figure:
    order = sorted(range(len(lines)), key=lambda index: (-len(lines[index].points), index))
    shown = [lines[index] for index in sorted(order[:MOST_CURVES])]
    things = things_of(study)
    palette = colours(line.key["strategy.name"] for line in shown)
    drawn, rows = [], []
    for index, line in enumerate(shown):
        points = []
        for value, point in line.points:
            points.append((value, point.rate, point.suspect))
            rows.append((line.label, gpu_ids(point.gpus), value, point.rate))
        colour = palette[line.key["strategy.name"]]
        drawn.append(DrawnCurve(line.label, points, colour, MARKERS[index]))
    words = option.rpartition(".")[2].removeprefix("NCCL_")
    if option == "batch_size":
        words = "batch size"
    notes = bars(study)
    if any(point.suspect for line in shown for _, point in line.points):
        notes += " Hollow: suspect."
    notes += truncation_note(lines, len(shown), "more line", "points.csv")
    return curves_figure(
        name,
        f"{things.capitalize()} per second by {words}, {about}.{notes}{more}",
        drawn,
        _option_axis(words, sorted({value for line in shown for value, _ in line.points})),
        Axis(f"{things}/s", "rate", from_zero=True),
        numbers_table(("line", "gpus", option, f"{things.replace(' ', '_')}_per_second"), rows),
        _highest(shown, option),
    )


def _option_axis(words: str, values: Sequence[float]) -> Axis:
    """Return the axis of values: those that were measured, where there is room for them."""
    every = math.ceil(len(values) / for_width(10))
    base = 2 if values[-1] / values[0] >= WIDE_RANGE else 0
    return Axis(words, ticks={value: f"{value:g}" for value in values[::every]}, base=base)


def _highest(lines: Sequence[OptionLine], option: str) -> str:
    """Return the highest rate of each line: `Highest: eager 4,683 (batch 256); …`."""
    names = short_names([single_line(line.label) for line in lines])
    parts = []
    for line in lines:
        _, point = max(line.points, key=lambda pair: pair[1].rate.value)
        name = f"{names[single_line(line.label)]} " if len(lines) > 1 else ""
        parts.append(
            f"{name}{estimate(point.rate, 'rate')} ({format_option(option, point.key[option])})"
        )
    return f"Highest: {'; '.join(parts)}."
