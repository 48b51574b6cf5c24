"""The point that a study is about, and what else the study knows of it: the facts of the summary.

Its comparisons with other cells on the same devices, the NCCL settings, what it loses.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import PREFIX, VERDICTS, Comparison, SettingEffect
from analysis.findings.examine import Findings
from analysis.findings.scaling import Curve, Point
from analysis.findings.waterfall import Waterfall, WaterfallPart
from analysis.study.intervals import Estimate
from analysis.study.measured_numbers import FASTER, NO_DIFFERENCE, SLOWER
from analysis.study.names import short_names, spoken
from analysis.study.rates import is_of_training
from analysis.study.runs import Key
from analysis.study.study import Study
from analysis.text import single_line

DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/
MUCH_FASTER = 1.2  # times the rate: single runs show it, though they have no verdict


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


class Judged(NamedTuple):
    """A comparison with a verdict between a point and another cell on the same devices."""

    comparison: Comparison
    other_key: Key
    is_second: bool  # the point is the second of the comparison

    @property
    def change(self) -> float:
        """By how much the other cell's rate differs, as a share of the point's."""
        difference = self.comparison.difference.value
        if self.is_second:
            return 1 / (1 + difference) - 1
        return difference

    @property
    def verdict(self) -> str:
        """The verdict on the point."""
        verdict = self.comparison.verdict
        if self.is_second:
            return verdict
        return {FASTER: SLOWER, SLOWER: FASTER}.get(verdict, verdict)

    @property
    def other_name(self) -> str:
        """The name of the other cell, without what both names share."""
        pair = (self.comparison.first, self.comparison.second)
        return single_line(spoken(short_names(pair)[pair[not self.is_second]]), 80)


def main_point(study: Study, findings: Findings) -> CurvePoint | None:
    """Return the point on most GPUs that exchanges and has an efficiency over every member.

    Of several such points it is the default: without settings, with the most of DEFAULTS, then the
    first to start. Another is chosen only where a verdict says that it is faster than that one.
    None without points.
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

    def default_first(each: CurvePoint) -> tuple[bool, int, int]:
        point, has_plainer = each.point, False
        for _, rival in equals:
            if rival.gpus == point.gpus and rival.key.items() < point.key.items():
                has_plainer = True
        changed = len(DEFAULTS.items() - point.key.items())
        return has_plainer, changed, order.get(point.record_ids[0], 0)

    chosen, *rivals = sorted(equals, key=default_first)
    for rival in sorted(rivals, key=lambda each: -each.point.rate.value):
        for judged in judged_of(findings, rival.point):
            if judged.other_key == chosen.point.key and judged.verdict == FASTER:
                return rival
    return chosen


def judged_of(findings: Findings, point: Point) -> Iterator[Judged]:
    """Yield every comparison of a point's rate that has a verdict."""
    for comparison in findings.comparisons:
        is_here = comparison.gpus == point.gpus and is_of_training(comparison.rate)
        if not comparison.verdict or not is_here:
            continue
        if comparison.second_key == point.key:
            yield Judged(comparison, comparison.first_key, True)
        if comparison.first_key == point.key:
            yield Judged(comparison, comparison.second_key, False)


def judgements(findings: Findings, point: Point) -> dict[str, list[Judged]]:
    """Return the other cells on the devices of a point by the verdict on them: faster, slower, …

    NCCL's settings and the strategy `none` are left out: they have sentences of their own.
    """
    by_verdict: dict[str, list[Judged]] = {verdict: [] for verdict in VERDICTS}
    for judged in judged_of(findings, point):
        is_setting = judged.comparison.differing[0].startswith(PREFIX)
        if judged.other_key["strategy.name"] == WITHOUT or is_setting:
            continue
        verdict = judged.comparison.verdict
        if verdict != NO_DIFFERENCE:
            verdict = FASTER if judged.change > 0 else SLOWER
        by_verdict[verdict].append(judged)
    return by_verdict


def much_faster(findings: Findings, main: CurvePoint) -> CurvePoint | None:
    """Return the point with the highest rate on the same devices, if it is MUCH_FASTER."""
    best = main
    for each in points_of(findings.scaling.curves):
        point = each.point
        is_alike = point.gpus == main.point.gpus and point.key["strategy.name"] != WITHOUT
        if is_alike and not point.suspect and point.rate.value > best.point.rate.value:
            best = each
    if best.point.rate.value < MUCH_FASTER * main.point.rate.value:
        return None
    return best


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
    for judged in judged_of(findings, point):
        differs = "strategy.name" in judged.comparison.differing
        if differs and judged.other_key["strategy.name"] == WITHOUT:
            options = len(point.key.items() | judged.other_key.items())
            if nearest is None or options < fewest:
                nearest, fewest = judged, options
    if nearest is None or nearest.verdict != SLOWER:
        return None
    difference = nearest.comparison.difference
    losses = []
    for end in (difference.value, difference.low, difference.high):
        # `difference` is (second − first) ÷ first. As the second, the point lost −difference; as
        # the first, 1 − 1 ÷ (1 + difference).
        if end is not None and nearest.is_second:
            losses.append(-end)
        elif end is not None:
            losses.append(1 - 1 / (1 + end))
    return Estimate(losses[0], *sorted(losses[1:]))
