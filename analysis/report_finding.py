"""The finding of a study in three sentences: how far it scales, where the rest goes, which differences are real."""

from collections.abc import Sequence

from analysis.findings import Curve, Estimate, Findings, Noise, Point, Waterfall
from analysis.report_curves import unit_of
from analysis.report_numbers import count, estimate, number
from analysis.report_study import Study, hardware, middle, named, short_names
from analysis.report_tables import plain


def sentences(study: Study, found: Findings) -> list[str]:
    """Three, whatever the study holds; one that cannot be said says so and what would let it."""
    if not study.records:
        return ["This folder holds no readable record of a cell, so there is nothing to say about scaling."]
    headline = _headline(found.scaling.curves)
    return [_scale(study, headline), _why(study, found, headline), _differences(found)]


def _headline(curves: Sequence[Curve]) -> tuple[Curve, Point] | None:
    """The point that a study is about: with an efficiency, of most GPUs, the fastest."""
    every = [(curve, point) for curve in curves for point in curve.points]
    return max(
        every,
        key=lambda pair: (
            pair[1].efficiency is not None and pair[1].world_size > 1,
            not pair[1].suspect,
            pair[1].world_size,
            pair[1].rate.value,
        ),
        default=None,
    )


def _scale(study: Study, headline: tuple[Curve, Point] | None) -> str:
    if headline is None:
        if study.usable:
            return f"{count(len(study.usable), 'cell')} finished, none of which measured images per second."
        return f"None of the {count(len(study.records), 'cell')} of this study gave a number that may be used."
    curve, point = headline
    first = next((study.by_id[one] for one in point.record_ids if one in study.by_id), study.records[0])
    unit = unit_of(study)
    which = f"{point.world_size} {unit if point.world_size > 1 else unit.removesuffix('s')}"
    what = f"{plain(named(first, 'model'))} with {plain(named(first, 'strategy'))}"
    said = f"{what} trains {estimate(point.rate, 'rate')} images/s on {which} ({plain(hardware(first))})"
    if point.world_size == 1:
        return f"{said}; no larger subset was measured, so nothing is said of scaling."
    if point.efficiency is None:
        return f"{said}; without a usable one-GPU baseline (gpus=each) its efficiency is not known."
    batch = "per GPU" if curve.kind == "weak" else "on each"
    return (
        f"{said}: {estimate(point.efficiency, 'share')} of {point.world_size} × the slowest member alone "
        f"({curve.kind} scaling, {point.batch_size:,} images {batch} a step)."
    )


def _why(study: Study, found: Findings, headline: tuple[Curve, Point] | None) -> str:
    gpus = headline[1].gpus if headline else ()
    closing = max(found.waterfalls, key=lambda one: (one.gpus == gpus, len(one.gpus), one.ideal.value), default=None)
    if closing is not None:
        return _lost(closing)
    exposed = _exposed(study, headline[1]) if headline else ""
    return f"Where the rest goes is not told, for want of control cells (waterfall=true plans them){exposed}."


def _lost(one: Waterfall) -> str:
    gap = one.ideal.value - one.measured.value
    share = f" ({number(gap / one.ideal.value, 'share', 0.001)})" if one.ideal.value else ""
    known = [part for part in one.parts if part.lost is not None and part.lost.value > 0 and not part.above_ideal]
    rest = f"{estimate(Estimate(one.residual, one.residual_low, one.residual_high), 'rate')} left unexplained"
    if gap <= 0:
        return f"Nothing is lost: the measured rate is {number(-gap, 'rate')} images/s above the ideal {number(one.ideal.value, 'rate')}; {rest}."
    if not known:
        return f"{number(gap, 'rate')} images/s of the ideal {number(one.ideal.value, 'rate')} are lost{share}, to no part that a cell tells; {rest}."
    largest = max(known, key=lambda part: part.lost.value if part.lost else 0.0)
    return (
        f"{number(gap, 'rate')} images/s of the ideal {number(one.ideal.value, 'rate')} are lost{share}, most of them to "
        f"{plain(largest.name)}: {estimate(largest.lost, 'rate')}; {rest}."
    )


def _exposed(study: Study, point: Point) -> str:
    """What the cells themselves tell about their communication."""
    records = [study.by_id[one] for one in point.record_ids if one in study.by_id]
    exposed, step = (middle(records, name) for name in ("comm/exposed_ms", "step/ms_median"))
    if exposed is None or not step:
        return ""
    low, high = (middle(records, f"comm/exposed_ms_ci_{end}") for end in ("low", "high"))
    return f"; the exchange exposes {estimate(Estimate(exposed, low, high))} ms of a step of {number(step)} ms"


def _differences(found: Findings) -> str:
    judged = [one for one in found.comparisons if one.verdict]
    real = [one for one in judged if one.verdict in ("faster", "slower")]
    floor = _floor(found.noise)
    if not judged:
        return f"No two sets of runs of this study can be compared; {floor}."
    if not real:
        least = [one.smallest for one in judged if one.smallest is not None]
        could = f", and the best of them could have seen {number(min(least), 'share')}" if least else ""
        return f"{count(len(judged), 'comparison')} of runs show no difference{could}; {floor}."
    one = max(real, key=lambda item: (abs(item.difference.value), item.first, item.second))
    names = short_names(dict.fromkeys((one.first, one.second)))
    first, second = (plain(names[name], 80) for name in (one.first, one.second))
    size = Estimate(abs(one.difference.value), *_ends(one.difference))
    return (
        f"{len(real)} of {count(len(judged), 'comparison')} {'shows' if len(real) == 1 else 'show'} a difference, the "
        f"largest: {second} is {estimate(size, 'share')} {one.verdict} than {first}; {floor}."
    )


def _ends(difference: Estimate) -> tuple[float | None, float | None]:
    if difference.low is None or difference.high is None:
        return None, None
    return (difference.low, difference.high) if difference.value >= 0 else (-difference.high, -difference.low)


def _floor(noise: Noise) -> str:
    if noise.floor is None:
        return "no cell was run twice, so the noise floor of this machine is not known (repeats=5 tells it)"
    return f"equal cells of this study differ by {number(noise.floor, 'share', 0.001)} ({count(noise.pairs, 'pair')} of runs)"
