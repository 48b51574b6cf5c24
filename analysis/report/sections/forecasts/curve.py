"""The forecast over numbers of GPUs: its band, what was measured, and the null model beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.prediction.asked import Subset, questions
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question, Workload
from analysis.prediction.draws import best
from analysis.prediction.forecast import LEVEL, Forecast, forecast
from analysis.report.numbers import estimate, number
from analysis.report.sections.forecasts.drawing import (
    INK,
    LABEL_PLACE,
    MUTED,
    RULE,
    Picture,
    colours,
    curve_height,
    drawn,
    figure_width,
    label_step,
    marker,
    new_figure,
    rendered,
    spread,
    within,
)
from analysis.report.sections.forecasts.known import StudyForecasts
from analysis.study.estimates import Estimate
from analysis.study.names import things_of, unit_of
from analysis.study.study import Study
from analysis.text import count, single_line

FIGURES = 3
# The curve goes to twice as many GPUs as were measured, at least to 8: no machine that we know holds many more.
TIMES_MEASURED, FEWEST_GPUS = 2, 8
HEIGHT = 2.4  # inches, on the page


@dataclass(frozen=True)
class ForecastCurve:
    """One strategy over numbers of GPUs, with the efficiencies that were measured, {GPUs: shares}."""

    workload: Workload
    strategy: str
    points: tuple[tuple[int, Forecast], ...]
    measured: tuple[tuple[int, float], ...]


def curves(study: Study, found: StudyForecasts) -> Iterator[Picture]:
    """Yield a figure for each of the first workloads and strategies that can be forecast on more GPUs than were measured."""
    calibration = found.calibration
    if (
        calibration is None
        or not calibration.several
        or any(one.question.hosts > 1 for one in calibration.several)
    ):
        return
    most = max(one.ranks for one in calibration.several)
    sizes = _sizes(max(TIMES_MEASURED * most, FEWEST_GPUS))
    asked = questions(calibration, [Subset(size) for size in sizes], {}, None, None, None)
    made = [one for one in _curves(calibration, found.scores, asked) if len(one.points) > 1]
    rest = len(made) - FIGURES
    for place, one in enumerate(made[:FIGURES], 1):
        is_last = place == FIGURES and rest > 0
        more = f" {count(rest, 'more curve')} by python -m analysis predict." if is_last else ""
        yield _figure(study, one, most, f"forecast-curve-{place}", more)


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 4, … up to a number."""
    return [size for size in (2**power for power in range(20)) if size <= most]


def _curves(
    calibration: Calibrated, scores: Sequence[float], asked: Sequence[Question]
) -> Iterator[ForecastCurve]:
    """Yield a curve for each workload and strategy of some questions; sizes without a forecast are left out."""
    for workload, strategy in dict.fromkeys((one.workload, one.strategy) for one in asked):
        points, measured = [], []
        for question in (
            one for one in asked if (one.workload, one.strategy) == (workload, strategy)
        ):
            try:
                made = forecast(calibration, question, scores)
            except ValueError:  # a wire, or the strategy's own work, is not known
                continue
            points.append((question.ranks, made))
            alone_ms = made.efficiency * made.step_ms
            measured += [
                (one.ranks, alone_ms / best(one.step_ms))
                for one in calibration.several
                if one.step_ms is not None and _same(one.question, question)
            ]
        yield ForecastCurve(workload, strategy, tuple(points), tuple(measured))


def _same(one: Question, other: Question) -> bool:
    """Tell whether two cells differ in their GPUs alone."""
    here, there = (
        (each.workload, each.batch_size, each.options, each.wire, each.ranks)
        for each in (one, other)
    )
    return here == there


def _band(made: Forecast) -> Estimate:
    """Return the efficiency of a forecast, with the interval that the step's gives it."""
    alone_ms = made.efficiency * made.step_ms
    known = made.low is not None and made.high is not None and made.low > 0
    ends = (alone_ms / made.high, alone_ms / made.low) if known else ()  # type: ignore[operator]
    return Estimate(made.efficiency, *ends)


def _null(size: int, made: Forecast) -> float:
    """Return the efficiency that the null model says; one GPU has all of it."""
    return (
        made.efficiency * made.step_ms / made.null_step_ms
        if made.null_step_ms and size > 1
        else 1.0
    )


def _figure(study: Study, curve: ForecastCurve, most: int, name: str, more: str) -> Picture:
    figure, axes = new_figure(figure_width(), curve_height(HEIGHT))
    (colour,) = colours([curve.strategy]).values()
    sizes = [size for size, _ in curve.points]
    bands = [_band(one) for _, one in curve.points]
    nulls = [_null(size, one) for size, one in curve.points]
    axes.axvspan(1, most, color=RULE, alpha=0.45, lw=0, zorder=0)
    axes.axhline(1.0, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    axes.plot(sizes, [one.value for one in bands], color=colour, lw=1.8, zorder=3)
    _fill(
        axes,
        [(size, one) for size, one in zip(sizes, bands, strict=True) if one.low is not None],
        colour,
    )
    axes.plot(sizes, nulls, color=INK, lw=1.2, ls=(0, (1.2, 1.6)), zorder=2)
    if curve.measured:
        axes.plot(
            *zip(*curve.measured, strict=True), marker(curve.strategy), color=colour, zorder=4
        )
    ends = [end for one in bands for end in (one.low, one.high) if end is not None]
    axes.set_ylim(
        *within(
            [*(one.value for one in bands), *nulls, *(value for _, value in curve.measured), 1.0],
            ends,
        )
    )
    _set_axes(axes, sizes, unit_of(study))
    _label_ends(axes, (("forecast", bands[-1].value, colour), ("null model", nulls[-1], INK)))
    keys = (
        "strategy",
        "gpus",
        "efficiency",
        "null_efficiency",
        f"{things_of(study)}_per_second",
        "basis",
    )
    rows = [
        (curve.strategy, size, band, null, one.images_per_second, one.basis)
        for (size, one), band, null in zip(curve.points, bands, nulls, strict=True)
    ]
    return rendered(figure, name, _caption(study, curve, most) + more, drawn(keys, rows))


def _fill(axes: Any, bands: Sequence[tuple[int, Estimate]], colour: str) -> None:
    """Fill the band between the ends of the intervals."""
    if len(bands) > 1:
        lows, highs = ([getattr(one, end) for _, one in bands] for end in ("low", "high"))
        axes.fill_between(
            [size for size, _ in bands], lows, highs, color=colour, alpha=0.16, lw=0, zorder=1
        )


def _set_axes(axes: Any, sizes: Sequence[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, sizes[-1])
    axes.minorticks_off()
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(unit)
    axes.set_ylabel("efficiency")
    low, high = axes.get_ylim()
    decimals = 0 if high - low > 0.06 else 1
    axes.locator_params(axis="y", nbins=6, steps=(1, 2, 5, 10))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{decimals}f} %")
    axes.grid(axis="x", visible=False)
    axes.tick_params(length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def _label_ends(axes: Any, lines: Sequence[tuple[str, float, str]]) -> None:
    """Write each line's name and last value beside its end; `lines` are (name, value, colour)."""
    low, high = axes.get_ylim()
    places = spread([value for _, value, _ in lines], label_step(axes) * (high - low))
    for (name, value, colour), at in zip(lines, places, strict=True):
        axes.annotate(
            f"{name} {number(value, 'share')}", (LABEL_PLACE, (at - low) / (high - low)), va="center",
            xycoords="axes fraction", color=colour, annotation_clip=False,
        )  # fmt: skip


def _caption(study: Study, curve: ForecastCurve, most: int) -> str:
    last, one = curve.points[-1]
    has_band = any(point.low is not None for _, point in curve.points)
    band = (
        f" Band: {100 * LEVEL:.0f} % interval."
        if has_band
        else " No band: too few cells could be held out."
    )
    marks = " Marks: measured." if curve.measured else ""
    rate = f"{number(one.images_per_second, 'rate')} {things_of(study)}/s"
    return (
        f"{single_line(str(curve.workload), 60)} with {single_line(curve.strategy, 60)}: efficiency as forecast, on one machine "
        f"with the links that were measured. Shaded: numbers of {unit_of(study)} that were measured.{marks}{band} On {last} "
        f"{unit_of(study)}: {estimate(_band(one), 'share')}, {rate} ({one.basis}; least sure: {one.widest})."
    )
