"""The answer of a study that trains: how fast, how far it scales, and whether another cell on the same devices is faster."""

from collections.abc import Sequence
from typing import NamedTuple

from analysis.findings.comparisons import PREFIX
from analysis.findings.control_cells import WITHOUT
from analysis.report.finding.main_point import MainPoint, comparisons_of
from analysis.report.numbers import central, number
from analysis.study.estimates import Comparison, Findings, Point
from analysis.study.names import gpu_ids, ran_alone, short_names, spoken, things_of, unit_of
from analysis.study.study import Study, named
from analysis.text import count, join_words, single_line

SAME = "no difference seen"  # a verdict
NAMED = 4  # other models
MUCH = 1.2  # times the rate: single runs say it, though they have no verdict


def answer(study: Study, main: MainPoint) -> str:
    """Return the rate and the efficiency of the point that the study is about."""
    curve, point = main
    unit = unit_of(study).removesuffix("s")
    of_strategies = {named(record, "strategy") for record in study.usable if record.cell.trains}
    of_models = {named(record, "model") for record in study.usable if record.cell.trains}
    model, strategy = point.key["model.name"], point.key["strategy.name"]
    told = (
        " with ".join(
            [model] * (len(of_models) > 1) + [strategy] * (len(of_strategies - {WITHOUT}) > 1)
        )
        or "it"
    )
    told += f" ({', '.join(curve.details)})" if curve.details else ""
    in_brackets = _is_one_of_several(study, point) or isinstance(
        point.gpus[0], str
    )  # by host and id
    on = f"On {count(point.world_size, unit)}" + (
        f" ({gpu_ids(point.gpus)})" if in_brackets else ""
    )
    said = (
        f"{on} {single_line(told, 120)} trains {central(point.rate, 'rate')} {things_of(study)}/s"
    )
    if point.efficiency is None:
        return f"{said}."
    whole, alone = f"{point.world_size} × the slowest {unit} alone", ""
    if point.without_baseline:
        one = len(point.without_baseline) == 1
        whole = f"{point.world_size} × {unit} {point.slowest} alone"
        alone = f"; {unit}{'' if one else 's'} {gpu_ids(point.without_baseline)} {'was' if one else 'were'} not measured alone"
    strong = f" with all {things_of(study)} of a step" * (curve.kind == "strong")
    share = number(float(point.efficiency.value), "share")
    return f"{said}: an efficiency of {share} (100 % would be {whole}{strong}{alone})."


def of_other_models(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return the rates of the other models of a study of one GPU alone, each as like the main point as there is; else ''."""
    point, found = main[1], dict[str, Point]()
    alike = [
        one for curve in findings.scaling.curves for one in curve.points if one.gpus == point.gpus
    ]
    for one in sorted(alike, key=lambda one: len(one.key.items() ^ point.key.items())):
        found.setdefault(one.key["model.name"], one)
    found.pop(point.key["model.name"], None)
    if not found or not ran_alone(study):
        return ""
    told = [
        f"{single_line(name, 80)} trains {central(one.rate, 'rate')}" for name, one in found.items()
    ][:NAMED]
    more = (
        f" ({count(len(found) - NAMED, 'more model')} in the table below)"
        if len(found) > NAMED
        else ""
    )
    return f"{join_words(told)} {things_of(study)}/s{more}."


def highest(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return the highest rate on the same devices, where another cell's single run is much faster; '' where verdicts say more."""
    if others(findings, main):
        return ""
    alike = [
        (curve, point)
        for curve in findings.scaling.curves
        for point in curve.points
        if point.gpus == main[1].gpus
        and not point.suspect
        and point.key["strategy.name"] != WITHOUT
    ]
    curve, point = max(alike, key=lambda one: one[1].rate.value, default=main)
    if point.rate.value < MUCH * main[1].rate.value:
        return ""
    told = f"{central(point.rate, 'rate')} {things_of(study)}/s"
    return f"The highest rate of single runs is {told}: {single_line(spoken(curve.label), 120)}."


def _is_one_of_several(study: Study, point: Point) -> bool:
    """Tell whether other subsets of the same size were measured."""
    return len({runs.gpus for runs in study.timed if runs.world_size == point.world_size}) > 1


def others(findings: Findings, main: MainPoint) -> str:
    """Return how the other cells on the same devices compare with the main point; empty where none has a verdict.

    NCCL's settings and the strategy `none` have sentences of their own.
    """
    judged = [
        _Other(_name(one, is_second), _change(one, is_second), one.verdict, one.smallest)
        for one, key, is_second in comparisons_of(findings, main[1])
        if key["strategy.name"] != WITHOUT and not one.differing[0].startswith(PREFIX)
    ]
    real = [one for one in judged if one.verdict != SAME]
    sides = {
        word: [one for one in real if (one.change > 0) == (word == "faster")]
        for word in ("faster", "slower")
    }
    if len(judged) == 1:
        (one,) = judged
        if real:
            return f"{_side(real, *filter(sides.get, sides))}."
        return f"{one.name} shows no difference to it{_could_show(one.smallest)}."
    parts = [_side(side, word) for word, side in sides.items() if side]
    same = len(judged) - len(real)
    parts += [f"{same} {'shows' if same == 1 else 'show'} no difference"] if same else []
    none = "none is faster; " if sides["slower"] and not sides["faster"] else ""
    return (
        f"Of {len(judged):,} other cells on the same devices, {none}{', '.join(parts)}."
        if judged
        else ""
    )


class _Other(NamedTuple):
    """Another cell: its name, its change of the main point's rate, the verdict, the smallest change to be seen (shares)."""

    name: str
    change: float
    verdict: str
    smallest: float | None


def _could_show(smallest: float | None) -> str:
    """Return the smallest difference, a share, that the runs could have shown, in brackets; empty where it is not known."""
    if smallest is None:
        return ""
    if smallest >= 1:
        return " (these runs differ too much among themselves to show one)"
    return f" (these runs can show one of {number(smallest, 'share')} or more)"


def _name(one: Comparison, is_second: bool) -> str:
    """Return the name of the other cell, without what both names share."""
    pair = short_names(dict.fromkeys((one.first, one.second)))
    return single_line(spoken(pair[one.first if is_second else one.second]), 80)


def _change(one: Comparison, is_second: bool) -> float:
    """Return by how much the other cell's rate differs from that of the main point, as a share of the latter."""
    return 1 / (1 + one.difference.value) - 1 if is_second else one.difference.value


def _side(side: Sequence[_Other], word: str) -> str:
    most = max(side, key=lambda one: abs(one.change))
    by = number(abs(most.change), "share")
    return (
        f"{most.name} is {by} {word}"
        if len(side) == 1
        else f"{len(side)} are {word} ({most.name} the most, by {by})"
    )
