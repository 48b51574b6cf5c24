"""Rates against an option that is a number, as the batch size: a line for each set of other options with three values of it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.curves import (
    HEIGHT,
    DrawnCurve,
    axis_of_rates,
    draw_curve,
    label_ends,
    limit_x,
)
from analysis.report.measured_values import bars
from analysis.report.numbers import estimate
from analysis.report.section import Section
from analysis.report.style import (
    MARKERS,
    Picture,
    colours,
    curve_height,
    drawn,
    figure_width,
    for_width,
    new_figure,
    rendered,
)
from analysis.study.estimates import Findings, Member, Point
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, short_names, things_of, worded
from analysis.study.study import Study
from analysis.text import count, single_line

FEWEST = 3  # values of an option that make a line
FIGURES, LINES = 3, 6  # of a report; of one figure
NO_QUESTION = ("seed", "model.classes", "global_batch_size")
WIDE = 8.0  # times the least value: the axis is logarithmic


@dataclass(frozen=True)
class Line:
    """The rates of cells that differ in one option alone, by its value."""

    label: str
    strategy: str
    points: tuple[tuple[float, Point], ...]


def by_option(study: Study, findings: Findings) -> Section | None:
    """Return a figure for each model and option that is a number; None where none has three values."""
    if not study.trains:
        return None
    found = list(_panels(findings))
    left = count(len(found) - FIGURES, "more figure") if len(found) > FIGURES else ""
    pictures = tuple(
        _figure(study, name, model, gpus, lines, place, left if place == FIGURES else "")
        for place, (name, model, gpus, lines) in enumerate(found[:FIGURES], 1)
    )
    return Section("scaling", "Rates", pictures=pictures, place=11) if pictures else None


def _panels(findings: Findings) -> Iterator[tuple[str, str, tuple[Member, ...], list[Line]]]:
    """Yield (option, model, GPUs, lines) on the GPUs that have most points, of several such on the most GPUs."""
    by_gpus: dict[tuple[Member, ...], list[tuple[str, Point]]] = defaultdict(list)
    for curve in findings.scaling.curves:
        for point in curve.points:
            by_gpus[point.gpus].append((curve.label, point))
    if not by_gpus:
        return
    gpus, here = max(by_gpus.items(), key=lambda one: (len(one[1]), len(one[0])))
    for name in dict.fromkeys(name for _, point in here for name in point.key):
        varied = len({point.key.get(name) for _, point in here}) >= FEWEST
        lines = _lines(name, here) if varied and name not in NO_QUESTION else []
        for model in dict.fromkeys(line.points[0][1].key["model.name"] for line in lines):
            yield (
                name,
                model,
                gpus,
                [one for one in lines if one.points[0][1].key["model.name"] == model],
            )


def _lines(name: str, points: Sequence[tuple[str, Point]]) -> list[Line]:
    """Return the lines of an option; empty where it is no number."""
    members: dict[frozenset[tuple[str, str]], dict[float, tuple[str, Point]]] = defaultdict(dict)
    for label, point in points:
        value = _number(point.key.get(name, ""))
        if value is None or (
            name == "batch_size" and "global_batch_size" in point.key
        ):  # follows from the number of GPUs
            continue
        members[frozenset(point.key.items() - {(name, point.key[name])})][value] = (label, point)
    return [
        Line(_without(name, *next(iter(one.values()))), next(iter(one.values()))[1].key["strategy.name"],
             tuple((value, one[value][1]) for value in sorted(one)))
        for one in members.values() if len(one) >= FEWEST
    ]  # fmt: skip


def _number(text: str) -> float | None:
    """Return what a value says as a number of an axis; None for words, lists and what is not above zero."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _without(name: str, label: str, point: Point) -> str:
    """Return a cell's label without an option."""
    part = worded(name, point.key[name])
    return (
        BETWEEN.join(one for one in label.split(BETWEEN) if one != part) or point.key["model.name"]
    )


def _figure(
    study: Study,
    name: str,
    model: str,
    gpus: tuple[Member, ...],
    lines: Sequence[Line],
    place: int,
    left: str,
) -> Picture:
    """Return the figure of one model and option."""
    shown, things = _most_telling(lines), things_of(study)
    palette = colours(line.strategy for line in shown)
    curves = [
        DrawnCurve(
            line.label,
            tuple(point for _, point in line.points),
            palette[line.strategy],
            MARKERS[number],
        )
        for number, line in enumerate(shown)
    ]
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    ends = [
        draw_curve(
            axes, [(x, point.rate, point.suspect) for x, point in line.points], curve, number
        )
        for number, (line, curve) in enumerate(zip(shown, curves, strict=True))
    ]
    axis_of_rates(axes, curves, things)
    _x_axis(axes, sorted({value for line in shown for value, _ in line.points}), _words(name))
    label_ends(axes, curves, ends, "rate")
    more = f" {count(len(lines) - len(shown), 'more line')} in points.csv." * (
        len(lines) > len(shown)
    )
    more += f" {left} in points.csv." * bool(left)
    marked = " Hollow: suspect." * any(point.suspect for line in shown for _, point in line.points)
    told = f"{things.capitalize()} per second by {_words(name)}, {single_line(model)} on {gpu_list(gpus)}."
    rows = [
        (line.label, gpu_ids(gpus), value, point.rate)
        for line in shown
        for value, point in line.points
    ]
    keys = ("line", "gpus", name, f"{things.replace(' ', '_')}_per_second")
    caption = f"{told}{bars(study)}{marked}{more} {_best(shown, name)}"
    return rendered(figure, f"by-option-{place}", caption, drawn(keys, rows))


def _most_telling(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with most points, in their order."""
    chosen = sorted(range(len(lines)), key=lambda place: (-len(lines[place].points), place))[:LINES]
    return [lines[place] for place in sorted(chosen)]


def _words(name: str) -> str:
    """Return what an axis is called: `batch size`, `bucket_cap_mb`."""
    return {"batch_size": "batch size"}.get(name, name.rpartition(".")[2].removeprefix("NCCL_"))


def _x_axis(axes: Any, values: Sequence[float], words: str) -> None:
    """Draw the axis of values: those that were measured, where there is room for them."""
    limit_x(axes, values, logarithmic=values[-1] / values[0] >= WIDE)
    most = for_width(10)
    shown = values if len(values) <= most else values[:: -(-len(values) // most)]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.set_xlabel(words)


def _best(lines: Sequence[Line], name: str) -> str:
    """Return the highest rate of each line, and where: `Highest: eager 4,683 (batch 256); compile 6,532 (batch 256).`"""
    names = short_names([single_line(line.label) for line in lines])
    told = []
    for line in lines:
        _, point = max(line.points, key=lambda one: one[1].rate.value)
        said = f"{names[single_line(line.label)]} " if len(lines) > 1 else ""
        told.append(f"{said}{estimate(point.rate, 'rate')} ({worded(name, point.key[name])})")
    return f"Highest: {'; '.join(told)}."


SECTIONS = (by_option,)
