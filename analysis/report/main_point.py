"""The point that a study is about, and the comparisons of it."""

from collections.abc import Callable, Mapping

from analysis.findings.model import Comparison, Curve, Findings, Key, Point
from analysis.findings.rates import images_rate
from analysis.findings.study import Study

MainPoint = tuple[Curve, Point]


def main_point(study: Study, findings: Findings) -> MainPoint | None:
    """Return the fastest point on most GPUs that exchanges and has an efficiency over every member; None without points.

    If it has NCCL settings that show no gain, the same cell without them is returned.
    """
    every = [(curve, point) for curve in findings.scaling.curves for point in curve.points]
    if not every:
        return None
    fastest = max(every, key=lambda pair: (_merit(pair[1]), pair[1].rate.value))
    if fastest[1].key == _without_settings(fastest[1].key):
        return fastest
    for pair in every:
        point = pair[1]
        alike = point.gpus == fastest[1].gpus and point.key == _without_settings(fastest[1].key)
        if alike and _merit(point) == _merit(fastest[1]):
            return fastest if _gains(findings, fastest[1]) else pair
    return fastest


def _merit(point: Point) -> tuple[bool, bool, bool, bool, int]:
    return (
        point.key["strategy.name"] != "none",
        point.efficiency is not None and point.world_size > 1,
        not point.without_baseline,
        not point.suspect,
        point.world_size,
    )


def _without_settings(key: Key) -> Key:
    """Return a key without NCCL's settings."""
    return {name: value for name, value in key.items() if not name.startswith("nccl.")}


def _gains(findings: Findings, fastest: Point) -> bool:
    """Tell whether settings gain, by the verdict; without one they do not: runs of equal cells differ too."""

    def lacks_setting(comparison: Comparison, other: Key) -> bool:
        names = comparison.differing
        return all(name.startswith("nccl.") for name in names) and names[0] not in other

    if judged := compared_with(findings, fastest, lacks_setting):
        comparison, is_second = judged
        return comparison.verdict == ("faster" if is_second else "slower")
    return False


def compared_with(
    findings: Findings, point: Point, is_other: Callable[[Comparison, Mapping[str, str]], bool]
) -> tuple[Comparison, bool] | None:
    """Return the judged comparison of a point with the cell that `is_other` accepts by its key; whether the point is its second.

    Of several, the one whose cells have the fewest options is returned.
    """
    alike = []
    for one in findings.comparisons:
        if not one.verdict or one.gpus != point.gpus or one.rate != images_rate().name:
            continue
        for own, other, is_second in ((one.second_key, one.first_key, True), (one.first_key, one.second_key, False)):
            if own == point.key and is_other(one, other):
                alike.append((len(set(own.items()) | set(other.items())), one, is_second))
    if not alike:
        return None
    _, one, is_second = min(alike, key=lambda each: each[0])
    return one, is_second
