"""The point that a study is about, and what its comparisons say of it."""

from collections.abc import Callable

from analysis.findings import Comparison, Curve, Findings, Point
from analysis.headlines import IMAGES
from analysis.report_study import BETWEEN, Study, cell_without_repeat, named
from benchmarks.record import Record

Headline = tuple[Curve, Point]


def main_point(study: Study, found: Findings) -> Headline | None:
    """One that exchanges, with an efficiency over every member, of most GPUs, the fastest.

    Where that one has settings of NCCL that show no gain, the same cell without them stands for it.
    """
    every = [(curve, point) for curve in found.scaling.curves for point in curve.points]
    if not every:
        return None

    def merit(pair: Headline) -> tuple[bool, bool, bool, bool, int, float]:
        point = pair[1]
        return (
            any(named(one, "strategy") != "none" for one in _records(study, point)),
            point.efficiency is not None and point.world_size > 1,
            not point.without_baseline,
            not point.suspect,
            point.world_size,
            point.rate.value,
        )

    fastest = max(every, key=merit)
    rest = (pair for pair in every if merit(pair)[:-1] == merit(fastest)[:-1] and _untouched(study, fastest, pair))
    plain = next(rest, None)
    return fastest if plain is None or _gains(found, fastest, plain) else plain


def _records(study: Study, point: Point) -> list[Record]:
    return [study.by_id[one] for one in point.record_ids if one in study.by_id]


def _untouched(study: Study, fastest: Headline, other: Headline) -> bool:
    """Whether the other is the same cell with NCCL left alone."""
    these, those = (_records(study, point)[:1] for _, point in (fastest, other))
    if not these or not those or not these[0].cell.get("nccl") or those[0].cell.get("nccl"):
        return False
    return cell_without_repeat(these[0], "nccl") == cell_without_repeat(those[0], "nccl")


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
