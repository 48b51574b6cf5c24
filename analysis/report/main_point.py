"""The point that a study is about, and its comparisons with other cells on the same devices."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import Comparison
from analysis.findings.examine import Findings
from analysis.findings.scaling import Curve, Point
from analysis.study.names import short_names, spoken
from analysis.study.rates import is_of_training
from analysis.study.runs import Key
from analysis.study.study import Study
from analysis.text import single_line

DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/
NO_DIFFERENCE = "no difference seen"  # a verdict


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
        return {"faster": "slower", "slower": "faster"}.get(verdict, verdict)

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
    by_merit: dict[tuple[bool, bool, bool, bool, int], list[CurvePoint]] = defaultdict(list)
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
            if judged.other_key == chosen.point.key and judged.verdict == "faster":
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
