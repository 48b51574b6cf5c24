"""The point that a study is about, and the comparisons of it."""

from collections.abc import Callable, Iterator, Mapping

from analysis.study.estimates import Comparison, Curve, Findings, Key, Point
from analysis.study.rates import is_of_training
from analysis.study.study import Study

MainPoint = tuple[Curve, Point]
DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/


def main_point(study: Study, findings: Findings) -> MainPoint | None:
    """Return the point on most GPUs that exchanges and has an efficiency over every member; None without points.

    Of several such points it is the default: without settings, with the most of DEFAULTS, then the one that started first.
    Another is chosen only where a verdict says that it is faster than that one: a single run does not choose.
    """
    every = [(curve, point) for curve in findings.scaling.curves for point in curve.points]
    if not every:
        return None
    best = max(_merit(point) for _, point in every)
    equals = [pair for pair in every if _merit(pair[1]) == best]
    place = {record.record_id: number for number, record in enumerate(study.records)}

    def default_first(pair: MainPoint) -> tuple[bool, int, int]:
        asked = pair[1].key
        plainer = any(
            one.gpus == pair[1].gpus and one.key.items() < asked.items() for _, one in equals
        )
        return (
            plainer,
            sum(asked.get(name) != value for name, value in DEFAULTS.items()),
            place.get(pair[1].record_ids[0], 0),
        )

    chosen, *others = sorted(equals, key=default_first)
    for pair in sorted(others, key=lambda pair: -pair[1].rate.value):
        if _is_faster(findings, pair[1], chosen[1]):
            return pair
    return chosen


def _merit(point: Point) -> tuple[bool, bool, bool, bool, int]:
    return (
        point.key["strategy.name"] != "none",
        point.efficiency is not None and point.world_size > 1,
        not point.without_baseline,
        not point.suspect,
        point.world_size,
    )


def _is_faster(findings: Findings, point: Point, other: Point) -> bool:
    """Tell whether a verdict says that one point is faster than another."""

    def is_other(_: Comparison, key: Mapping[str, str]) -> bool:
        return key == other.key

    judged = compared_with(findings, point, is_other)
    return judged is not None and judged[0].verdict == ("faster" if judged[1] else "slower")


def compared_with(
    findings: Findings, point: Point, is_other: Callable[[Comparison, Mapping[str, str]], bool]
) -> tuple[Comparison, bool] | None:
    """Return the judged comparison of a point with the cell that `is_other` accepts by its key; whether the point is its second.

    Of several, the one whose cells have the fewest options is returned.
    """
    alike = [
        (len(set(point.key.items()) | set(other.items())), one, is_second)
        for one, other, is_second in comparisons_of(findings, point)
        if is_other(one, other)
    ]
    if not alike:
        return None
    _, one, is_second = min(alike, key=lambda each: each[0])
    return one, is_second


def comparisons_of(findings: Findings, point: Point) -> Iterator[tuple[Comparison, Key, bool]]:
    """Yield every judged comparison of a point's rate, the key of the other cell, and whether the point is the second."""
    for one in findings.comparisons:
        if not one.verdict or one.gpus != point.gpus or not is_of_training(one.rate):
            continue
        if one.second_key == point.key:
            yield one, one.first_key, True
        if one.first_key == point.key:
            yield one, one.second_key, False
