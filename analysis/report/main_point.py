"""The point that a study is about, and what its comparisons say of it."""

from collections.abc import Callable

from analysis.findings.model import Comparison, Curve, Findings, Point
from analysis.findings.rates import IMAGES
from analysis.findings.study import Study, cell_without_repeat, named
from analysis.report.names import BETWEEN
from benchmarks.record import Record

Headline = tuple[Curve, Point]


def main_point(study: Study, found: Findings) -> Headline | None:
    """One that exchanges, with an efficiency over every member, of most GPUs, the fastest.

    Where that one has settings of NCCL that show no gain, the same cell without them stands for it.
    """
    every = [(curve, point) for curve in found.scaling.curves for point in curve.points]
    if not every:
        return None

    def merit(pair: Headline) -> tuple[bool, bool, bool, bool, int]:
        point = pair[1]
        return (
            any(named(one, "strategy") != "none" for one in study.of(point)),
            point.efficiency is not None and point.world_size > 1,
            not point.without_baseline,
            not point.suspect,
            point.world_size,
        )

    fastest = max(every, key=lambda pair: (merit(pair), pair[1].rate.value))
    first = _first(study, fastest)
    if first is None or not first.cell.nccl:
        return fastest
    alike = cell_without_repeat(first, "nccl")
    for pair in every:
        other = _first(study, pair)
        if other is None or other.cell.nccl or merit(pair) != merit(fastest):
            continue
        if cell_without_repeat(other, "nccl") == alike:
            return fastest if _gains(found, fastest, pair) else pair
    return fastest


def _first(study: Study, headline: Headline) -> Record | None:
    return next(iter(study.of(headline[1])), None)


def _gains(found: Findings, fastest: Headline, plain: Headline) -> bool:
    """By the verdict; where there is none, by whether the plain one's interval reaches as far."""
    if judged := compared_with(
        found, fastest, lambda asked, parts: f"{asked.removeprefix('NCCL_')} untouched" in parts
    ):
        comparison, is_second = judged
        return comparison.verdict == ("faster" if is_second else "slower")
    rate = plain[1].rate
    return fastest[1].rate.value > (rate.value if rate.high is None else rate.high)


def compared_with(
    found: Findings, headline: Headline, is_other: Callable[[str, set[str]], bool]
) -> tuple[Comparison, bool] | None:
    """The judged comparison of a point with the same devices where one thing is another; whether the point is its second.

    `is_other` gets what differs and the parts of a side's name. Of several the one whose cells have the fewest settings.
    """
    curve, point = headline
    mine = set(curve.label.split(BETWEEN))
    alike = []
    for one in found.comparisons:
        if not one.verdict or one.gpus != point.gpus or one.rate != IMAGES.rate:
            continue
        first, second = (set(name.split(BETWEEN)) for name in (one.first, one.second))
        for ours, theirs, is_second in ((second, first, True), (first, second, False)):
            if mine <= ours and is_other(one.asked, theirs):
                alike.append((len(ours | theirs), one, is_second))
    if not alike:
        return None
    _, one, is_second = min(alike, key=lambda each: each[0])
    return one, is_second
