"""The point that a study is about, and what else the study knows of it: the facts of the summary.

Its comparisons with other cells on the same devices, the NCCL settings, what it loses. And
the figure beside the answer: an efficiency for several numbers of GPUs, a line for an option that
is a number, otherwise a row for each configuration.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import (
    PREFIX,
    Comparison,
    Ranking,
    SettingEffect,
    rank_configurations,
)
from analysis.findings.examine import Findings
from analysis.findings.scaling import Curve, Point
from analysis.findings.waterfall import Waterfall, WaterfallPart
from analysis.report.charts import HOLLOW, MOST_ROWS, Axis, DotRow, rows_figure, truncation_note
from analysis.report.figure import Figure, colours, for_screen_and_phone
from analysis.report.numbers import central, number, of_metric
from analysis.report.section import Section, about_intervals, words_of
from analysis.study.conditions import is_of_training
from analysis.study.draws import scaled
from analysis.study.intervals import Estimate
from analysis.study.measured_numbers import FASTER, SLOWER, UNKNOWN
from analysis.study.names import BETWEEN, UNTOUCHED, gpu_list, parts, short_names
from analysis.study.runs import Key, Runs
from analysis.study.study import Study
from benchmarks.record.metrics import entry_of

DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/


class CurvePoint(NamedTuple):
    """A point with its curve."""

    curve: Curve
    point: Point


def points_of(curves: Iterable[Curve]) -> list[CurvePoint]:
    """Return every point with its curve."""
    points = []
    for curve in curves:
        for point in curve.points:
            points.append(CurvePoint(curve, point))
    return points


def main_point(study: Study, findings: Findings) -> CurvePoint | None:
    """Return the point on most GPUs that exchanges and has an efficiency over every member.

    Of several such points it is the default: without settings, with the most of DEFAULTS, of the
    model and GPUs that started first; of batch sizes and the like that with the highest rate.
    Another is chosen only where a verdict says that it is faster than that one. None without
    points.
    """
    by_merit: dict[tuple[bool | int, ...], list[CurvePoint]] = defaultdict(list)
    for each in points_of(findings.scaling.curves):
        point = each.point
        merit = (
            point.key["strategy.name"] != WITHOUT,
            point.efficiency is not None and point.world_size > 1,
            not point.without_baseline,
            not point.suspect,
            point.world_size,
        )
        by_merit[merit].append(each)
    if not by_merit:
        return None
    equals = by_merit[max(by_merit)]
    order = {record.record_id: index for index, record in enumerate(study.records)}

    longest = max(len(each.point.key) for each in equals)
    plainer = [each.point for each in equals if len(each.point.key) < longest]

    first: dict[tuple[Any, ...], int] = {}  # of a model on GPUs: when its first run started
    for each in equals:
        place = (each.point.key["model.name"], each.point.gpus)
        start = order.get(each.point.record_ids[0], 0)
        first[place] = min(start, first.get(place, start))

    def default_first(each: CurvePoint) -> tuple[bool, int, int, float]:
        point, has_plainer = each.point, False
        for rival in plainer:
            if rival.gpus == point.gpus and rival.key.items() < point.key.items():
                has_plainer = True
        changed = len(DEFAULTS.items() - point.key.items())
        start = first[point.key["model.name"], point.gpus]
        return has_plainer, changed, start, -point.rate.value

    chosen, *rivals = sorted(equals, key=default_first)
    faster = []
    for against in judged_of(findings, chosen.point):
        judged = against.swapped()
        if judged.verdict == FASTER:
            faster.append((judged.gpus, judged.second_key))
    for rival in sorted(rivals, key=lambda each: -each.point.rate.value):
        if (rival.point.gpus, rival.point.key) in faster:
            return rival
    return chosen


def ranking_of(study: Study, findings: Findings, point: Point | None) -> Ranking | None:
    """Return the ranking that a point takes part in; without a point the first; None: in none."""
    for ranking in rank_configurations(study, findings.comparisons):
        for each in ranking.configurations:
            if point is None or each.runs.record_ids == point.record_ids:
                return ranking
    return None


def names_of(study: Study, several: Sequence[Runs]) -> dict[Runs, str]:
    """Return the short names of configurations, each by what it alone has."""
    names = {}
    for runs in several:
        words = parts(study, runs) or [UNTOUCHED]
        names[runs] = BETWEEN.join([*words, gpu_list(runs.gpus)])
    short = short_names(names.values())
    has_others = len({runs.strategy for runs in several}) > 1
    for runs, name in names.items():
        names[runs] = short[name]
        if runs.strategy == WITHOUT and has_others:
            names[runs] += " (no exchange)"
    return names


def judged_of(findings: Findings, point: Point) -> Iterator[Comparison]:
    """Yield every comparison of a point's rate that has a verdict; the point is its second."""
    for comparison in findings.comparisons:
        is_here = comparison.gpus == point.gpus and is_of_training(comparison.rate)
        if comparison.verdict and is_here and comparison.second_key == point.key:
            yield comparison
        if comparison.verdict and is_here and comparison.first_key == point.key:
            yield comparison.swapped()


def effects_on(findings: Findings, point: Point) -> list[SettingEffect]:
    """Return what NCCL settings did to the cell of a point, against it with fewest settings."""
    effects: list[SettingEffect] = []
    for effect in findings.settings:
        untouched = _without_settings(effect.compared.first_key)
        if effect.compared.gpus == point.gpus and untouched == _without_settings(point.key):
            effects.append(effect)
    fewest = min((len(effect.compared.first_key) for effect in effects), default=0)
    return [effect for effect in effects if len(effect.compared.first_key) == fewest]


def _without_settings(key: Key) -> dict[str, str]:
    options = {}
    for name, value in key.items():
        if not name.startswith(PREFIX) and name != "connections":
            options[name] = value
    return options


def largest_sure_part(fall: Waterfall) -> tuple[WaterfallPart | None, bool]:
    """Return the largest part whose interval lies above 0, and whether any part has an interval."""
    largest, most, has_intervals = None, 0.0, False
    for part in fall.parts:
        if part.lost is None or part.lost.low is None or part.above_ideal:
            continue
        has_intervals = True
        if part.lost.low > 0 and part.lost.value > most:
            largest, most = part, part.lost.value
    return largest, has_intervals


def loss_against_none(findings: Findings, point: Point) -> Estimate | None:
    """Return the share lost against the same devices without any exchange; None: none is seen."""
    nearest, fewest = None, 0
    for pair in judged_of(findings, point):
        differs = "strategy.name" in pair.differing
        if differs and pair.first_key["strategy.name"] == WITHOUT:
            options = len(point.key.items() | pair.first_key.items())
            if nearest is None or options < fewest:
                nearest, fewest = pair, options
    if nearest is None or nearest.verdict != SLOWER:
        return None
    return scaled(nearest.difference, -1.0)


# Names of figures that answer, best first; a study has the first that its sections drew.
RANKING = "rates"
ANSWERS = (
    "question",
    "where-each-wins",
    "efficiency-1",
    "by-option-1",
    "collectives",
    RANKING,
    "scaling-1",
    "pairs-1",
    "waterfall-1",
)


def answer_figure(
    study: Study, findings: Findings, main: CurvePoint | None, sections: Sequence[Section]
) -> Figure | None:
    """Return the figure that answers what the study asked; None where it has nothing to draw."""
    drawn: dict[str, Figure | None] = {}
    for section in sections:
        for figure in section.figures:
            drawn[figure.name] = figure
    points = points_of(findings.scaling.curves)
    if len({point.world_size for _, point in points if point.efficiency}) < 2:  # no curve
        drawn.pop("efficiency-1", None)
    if drawn.keys().isdisjoint(ANSWERS[: ANSWERS.index(RANKING)]):
        drawn[RANKING] = ranking_figure(study, findings, main)
    for name in ANSWERS:
        answer = drawn.get(name)
        if answer is not None:
            return for_screen_and_phone(answer)
    return None


def ranking_figure(study: Study, findings: Findings, main: CurvePoint | None) -> Figure | None:
    """Return the rates of the configurations of a ranking, best first; without one, of all."""
    ranking = ranking_of(study, findings, main.point if main else None)
    rights: dict[Runs, str] = {}
    if ranking is not None:
        for each in ranking.configurations:
            rights[each.runs] = UNKNOWN if ranking.suspect_leader else each.standing
            if rights[each.runs] == SLOWER:
                rights[each.runs] = number(each.behind.value, "change")
        gpus = {runs.gpus for runs in rights}
        without = [runs for runs in study.timed if runs.strategy == WITHOUT and {runs.gpus} == gpus]
        shown = [*(runs for runs in without if runs not in rights), *rights]
    else:
        shown = [runs for runs in study.rated if runs.rate == study.rated[0].rate]
    if len(shown) < 2:
        return None
    rate = shown[0].rate
    values = {runs: runs.next_run(rate.metric) or Estimate(0.0) for runs in shown}
    shown.sort(key=lambda runs: values[runs].value, reverse=not rate.is_time)
    names, palette = names_of(study, shown), colours(runs.strategy for runs in shown)
    rows, shares = [], {}
    for _, point in points_of(findings.scaling.curves):
        if point.efficiency is not None:
            shares[point.record_ids] = point.efficiency.value
    for runs in shown[:MOST_ROWS]:
        words = [central(values[runs], of_metric(rate.metric))]
        if runs.record_ids in shares:
            words.append(f"efficiency {number(shares[runs.record_ids], 'share')}")
        if rights.get(runs, UNKNOWN) != UNKNOWN:
            words.append(rights[runs])
        name, look = names[runs], palette[runs.strategy]
        rows.append(DotRow(name, ", ".join(words), values[runs], look, is_doubtful=runs.suspect))
    entry = entry_of(rate.metric)
    title = entry.title[:1].upper() + entry.title[1:]
    notes = about_intervals(study, "Error bars:")
    if any(row.is_doubtful for row in rows):
        notes += HOLLOW
    notes += truncation_note(shown, MOST_ROWS, "more configuration", "points.csv")
    axis = Axis(words_of(study)(entry.unit or title), "value", of_metric(rate.metric))
    return rows_figure(RANKING, f"{title}.{notes}", rows, axis)
