"""The finding of a study in three sentences: how far it scales, where the rest goes, which differences are real."""

from collections.abc import Sequence

from analysis.findings import Comparison, Curve, Estimate, Findings, Point, Waterfall
from analysis.headlines import IMAGES
from analysis.report_comparisons import differences
from analysis.report_curves import unit_of
from analysis.report_links import SENTENCES, nothing
from analysis.report_links import sentences as links
from analysis.report_numbers import central, count, estimate, interval, number
from analysis.report_sections import RATE
from analysis.report_study import BETWEEN, Study, hardware, middle, named
from analysis.report_tables import plain
from analysis.runs import gpu_ids
from benchmarks.record import Record


def sentences(study: Study, found: Findings) -> list[str]:
    """Three, whatever the study holds; one that cannot be said says so and what would let it."""
    if not study.records:
        return ["This folder holds no readable record of a cell, so there is nothing to say about scaling."]
    if not study.trains or (study.usable and middle(study.usable, RATE) is None):
        said, judged = links(study), any(one.verdict for one in found.comparisons)
        return [*said[: SENTENCES - 1], differences(found)] if judged else said
    headline = main_point(study, found.scaling.curves)
    return [_scale(study, headline), _why(study, found, headline), differences(found)]


def main_point(study: Study, curves: Sequence[Curve]) -> tuple[Curve, Point] | None:
    """The point that a study is about: one that exchanges, with an efficiency over every member, of most GPUs, the fastest.

    A point that leaves NCCL alone stands for all whose settings show no gain over it.
    """

    def recorded(point: Point) -> list[Record]:
        return [study.by_id[one] for one in point.record_ids if one in study.by_id]

    def merit(point: Point) -> tuple[bool, bool, bool, bool, int]:
        return (
            any(named(one, "strategy") != "none" for one in recorded(point)),
            point.efficiency is not None and point.world_size > 1,
            not point.without_baseline,
            not point.suspect,
            point.world_size,
        )

    every = [(curve, point) for curve in curves for point in curve.points]
    if not every:
        return None
    best = max(merit(point) for _, point in every)
    equals = [(curve, point) for curve, point in every if merit(point) == best]
    fastest = max(point.rate.value for _, point in equals)
    untouched = [
        (curve, point) for curve, point in equals
        if (point.rate.high or point.rate.value) >= fastest and not any(one.cell.get("nccl") for one in recorded(point))
    ]  # fmt: skip
    return max(untouched or equals, key=lambda pair: pair[1].rate.value)


def _scale(study: Study, headline: tuple[Curve, Point] | None) -> str:
    if headline is None:
        return nothing(study)
    curve, point = headline
    first = next((study.by_id[one] for one in point.record_ids if one in study.by_id), study.records[0])
    said = f"{_what(curve, first)} trains {_first(point.rate)} images/s on {_where(study, point, first)}"
    unit, doubt = unit_of(study).removesuffix("s"), _doubt(study, point)
    if point.world_size == 1:
        return f"{said}; no larger subset was measured, so nothing is said of scaling{doubt}."
    if point.efficiency is None:
        return f"{said}; without a usable one-{unit} baseline (gpus=each) its efficiency is not known{doubt}."
    batch = f"per {unit}" if curve.kind == "weak" else "on each"
    alone, others = "the slowest member", ""
    if point.without_baseline:
        were = "was" if len(point.without_baseline) == 1 else "were"
        alone = f"{unit} {point.slowest}"
        others = f"{gpu_ids(point.without_baseline)} {were} not measured alone; "
    return (
        f"{said}: {estimate(point.efficiency, 'share')} of {point.world_size} × {alone} alone "
        f"({others}{curve.kind} scaling, {point.batch_size:,} images {batch} a step){doubt}."
    )


def _doubt(study: Study, point: Point) -> str:
    """` (suspect: clocks)` with the codes of the point's suspect records; empty where nothing casts doubt on it."""
    records = (study.by_id[one] for one in point.record_ids if one in study.by_id)
    codes = dict.fromkeys(code for one in records if one.validity.verdict == "suspect" for code in one.validity.codes)
    return f" (suspect: {plain(', '.join(codes) or 'no reason was recorded')})" if point.suspect else ""


def _what(curve: Curve, first: Record) -> str:
    """The model, the strategy, and what else tells the curve from the others."""
    model, strategy = named(first, "model"), named(first, "strategy")
    more = [part for part in curve.label.split(BETWEEN) if part not in (model, strategy, named(first, "benchmark"))]
    return plain(f"{model} with {strategy}" + (f" ({', '.join(more)})" if more else ""))


def _first(rate: Estimate) -> str:
    """The first number with an interval says what the interval is."""
    within = interval(rate, "rate")
    return central(rate, "rate") + (f" (95 % interval {within})" if within else "")


def _where(study: Study, point: Point, first: Record) -> str:
    place, unit = plain(hardware(first)), unit_of(study)
    if place.startswith(f"{point.world_size} × "):
        return place
    if unit == "GPUs":
        return f"{point.world_size} of {place}"
    return f"{count(point.world_size, unit.removesuffix('s'))} ({place.removeprefix(f'{unit} on ')})"


def _why(study: Study, found: Findings, headline: tuple[Curve, Point] | None) -> str:
    label, gpus = (headline[0].label, headline[1].gpus) if headline else ("", ())
    closing = max(
        found.waterfalls,
        key=lambda one: (one.gpus == gpus and one.label == label, len(one.gpus), one.ideal.value),
        default=None,
    )
    if closing is not None:
        same = closing.gpus == gpus and closing.label == label
        return ("" if same else f"{plain(closing.label)} on {gpu_ids(closing.gpus)}: ") + _lost(closing)
    exposed = _exposed(study, headline[1]) if headline else ""
    if headline and (beside := _beside_none(found, *headline)):
        return f"{beside}{exposed}; where that goes is not told, for want of control cells (waterfall=true plans them)."
    return f"Where the rest goes is not told, for want of control cells (waterfall=true plans them){exposed}."


def _beside_none(found: Findings, curve: Curve, point: Point) -> str:
    """What the strategy loses of the rate of the same GPUs without any; empty where that was not compared."""
    mine = set(curve.label.split(BETWEEN))
    alike: list[tuple[int, float, Comparison]] = []
    for one in found.comparisons:
        if not one.verdict or one.asked != "strategy" or one.gpus != point.gpus or one.rate != IMAGES.rate:
            continue
        first, second = (set(name.split(BETWEEN)) for name in (one.first, one.second))
        if "none" in first and mine <= second:
            alike.append((len(first | second), 1.0, one))
        elif "none" in second and mine <= first:
            alike.append((len(first | second), -1.0, one))
    if not alike:
        return ""
    _, order, one = min(alike, key=lambda each: each[0])  # what differs in nothing else has the fewest words
    if one.verdict == "no difference seen":
        could = "" if one.smallest is None else f", where {number(one.smallest, 'share')} could have been"
        return f"Against the same devices without any exchange (none) no loss is seen{could}"
    ends = [None if end is None else _lost_share(end, order) for end in (one.difference.low, one.difference.high)]
    lost = Estimate(_lost_share(one.difference.value, order), *sorted(end for end in ends if end is not None))
    if lost.value < 0:
        return ""
    return f"It loses {estimate(lost, 'share')} of what the same devices train without any exchange (none)"


def _lost_share(difference: float, order: float) -> float:
    """Of the rate without an exchange: of a difference to it (order 1), or of it to a rate (−1)."""
    return -difference if order > 0 else difference / (1 + difference)


def _lost(one: Waterfall) -> str:
    gap, ideal = one.ideal.value - one.measured.value, number(one.ideal.value, "rate")
    rest = f"{estimate(Estimate(one.residual, one.residual_low, one.residual_high), 'rate')} left unexplained"
    if gap <= 0:
        return f"Nothing is lost: the measured rate is {number(-gap, 'rate')} images/s above the ideal {ideal}; {rest}."
    share = f" ({number(gap / one.ideal.value, 'share')})" if one.ideal.value else ""
    parts = [(part.lost.value, part) for part in one.parts if part.lost is not None and not part.above_ideal]
    largest = max(parts, key=lambda pair: pair[0], default=None)
    if largest is None or largest[0] <= 0:
        return f"{number(gap, 'rate')} images/s of the ideal {ideal} are lost{share}, to no part that a cell tells; {rest}."
    return (
        f"{number(gap, 'rate')} images/s of the ideal {ideal} are lost{share}, the largest part to "
        f"{plain(largest[1].name)}: {estimate(largest[1].lost, 'rate')}; {rest}."
    )


def _exposed(study: Study, point: Point) -> str:
    """What the cells themselves tell about their communication."""
    records = [study.by_id[one] for one in point.record_ids if one in study.by_id]
    exposed, step = (middle(records, name) for name in ("comm/exposed_ms", "step/ms_median"))
    if exposed is None or not step:
        return ""
    low, high = (middle(records, f"comm/exposed_ms_ci_{end}") for end in ("low", "high"))
    return f"; the exchange exposes {estimate(Estimate(exposed, low, high))} ms of a step of {number(step)} ms"
