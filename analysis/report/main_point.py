"""The point that a study is about, and its comparisons with other cells on the same devices."""

from collections.abc import Iterator
from typing import NamedTuple

from analysis.findings.baselines import WITHOUT
from analysis.study.estimates import Comparison, Curve, Findings, Key, Point
from analysis.study.names import short_names, spoken
from analysis.study.rates import is_of_training
from analysis.study.study import Study
from analysis.text import single_line

DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/
NO_DIFFERENCE = "no difference seen"  # a verdict


class MainPoint(NamedTuple):
    """The point that a study is about."""

    curve: Curve
    point: Point


class Judged(NamedTuple):
    """A comparison with a verdict between a point and another cell on the same devices."""

    comparison: Comparison
    other_key: Key
    is_second: bool  # the point is the second of the comparison

    @property
    def change(self) -> float:
        """By how much the other cell's rate differs, as a share of the point's."""
        difference = self.comparison.difference.value
        return 1 / (1 + difference) - 1 if self.is_second else difference

    @property
    def other_name(self) -> str:
        """The name of the other cell, without what both names share."""
        pair = (self.comparison.first, self.comparison.second)
        return single_line(spoken(short_names(pair)[pair[not self.is_second]]), 80)


def main_point(study: Study, findings: Findings) -> MainPoint | None:
    """Return the point on most GPUs that exchanges and has an efficiency over every member.

    Of several such points it is the default: without settings, with the most of DEFAULTS, then the
    first to start. Another is chosen only where a verdict says that it is faster than that one.
    None without points.
    """
    points = [
        MainPoint(curve, point) for curve in findings.scaling.curves for point in curve.points
    ]
    if not points:
        return None
    best = max(_merit(point) for _, point in points)
    equals = [each for each in points if _merit(each.point) == best]
    order = {record.record_id: index for index, record in enumerate(study.records)}

    def default_first(each: MainPoint) -> tuple[bool, int, int]:
        point, has_plainer = each.point, False
        for _, rival in equals:
            if rival.gpus == point.gpus and rival.key.items() < point.key.items():
                has_plainer = True
        changed = sum(point.key.get(name) != value for name, value in DEFAULTS.items())
        return has_plainer, changed, order.get(point.record_ids[0], 0)

    chosen, *rivals = sorted(equals, key=default_first)
    for rival in sorted(rivals, key=lambda each: -each.point.rate.value):
        for judged in judged_of(findings, rival.point):
            faster = "faster" if judged.is_second else "slower"
            if judged.other_key == chosen.point.key and judged.comparison.verdict == faster:
                return rival
    return chosen


def _merit(point: Point) -> tuple[bool, bool, bool, bool, int]:
    return (
        point.key["strategy.name"] != WITHOUT,
        point.efficiency is not None and point.world_size > 1,
        not point.without_baseline,
        not point.suspect,
        point.world_size,
    )


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
