"""The finding of a study in three sentences: how far it scales, where the rest goes, which differences are real."""

from collections.abc import Iterator, Mapping

from analysis.findings.labels import gpu_ids
from analysis.findings.model import Curve, Estimate, Findings, Point, Waterfall
from analysis.findings.next_run.interval import WORDS
from analysis.findings.provenance import hardware
from analysis.findings.runs import middle, named
from analysis.findings.study import Study
from analysis.report.cell_numbers import first_metric
from analysis.report.finding.main_point import MainPoint, compared_with, main_point
from analysis.report.measured_values import RATE, bounded, first_records, median_and_interval
from analysis.report.microbenchmarks import largest_cells
from analysis.report.names import run_name, unit_of
from analysis.report.numbers import central, estimate, interval, number
from analysis.report.section import Section
from analysis.report.sections.comparisons import differences
from analysis.report.text import count, single_line
from benchmarks.record import Record, metrics

SENTENCES = 3


def sentences(study: Study, findings: Findings, of_benchmarks: Mapping[str, Section]) -> list[str]:
    """Return at most three sentences, whatever the study holds; where one cannot be said, it says what is missing.

    `of_benchmarks` are the sections of the study's benchmarks by the name of the benchmark.
    """
    if not study.records:
        return ["This folder holds no readable record of a cell, so there is nothing to say about scaling."]
    if not study.trains or (study.usable and middle(study.usable, RATE) is None):
        said, judged = _of_benchmarks(study, of_benchmarks), any(one.verdict for one in findings.comparisons)
        return [*said[: SENTENCES - 1], differences(findings)] if judged else said
    main = main_point(study, findings)
    return [_scale(study, main), _why(study, findings, main), differences(findings)]


def _of_benchmarks(study: Study, sections: Mapping[str, Section]) -> list[str]:
    """Return what the benchmarks found, for a study in which no usable cell counts images.

    Benchmarks with a model come first, then the others in the order in which they ran.
    """
    lines: list[str] = []
    first = first_records(study.usable)
    for benchmark in sorted(first, key=lambda name: not first[name].cell.trains):
        section = sections.get(benchmark)
        lines += section.finding if section and section.finding else _first_number(study, benchmark)
    return lines[:SENTENCES] or [_nothing(study)]


def _first_number(study: Study, benchmark: str) -> Iterator[str]:
    """Yield the first number of a benchmark that brings no sentence of its own."""
    groups, _ = largest_cells(study, benchmark)
    record = groups[0][0]
    name = first_metric(record)
    if name is not None:
        entry = metrics.metric(name)
        unit = f" {entry.unit}" if entry.unit not in ("", "%") else ""
        value = median_and_interval(study, groups[0], name)
        yield f"{single_line(run_name(record))}: {single_line(entry.title, 80)} {value}{unit}."


def _nothing(study: Study) -> str:
    """Return that no cell gave a number for the first screen."""
    if study.usable:
        cells = count(len(study.usable), "usable cell")
        if len(study.usable) == 1:
            return "The one usable cell of this study measured neither images per second nor a link."
        return f"None of the {cells} of this study measured images per second or a link."
    if len(study.records) == 1:
        return "The one cell of this study gave no number that may be used."
    return f"None of the {count(len(study.records), 'cell')} of this study gave a number that may be used."


def _scale(study: Study, main: MainPoint | None) -> str:
    if main is None:
        return _nothing(study)
    curve, point = main
    first = next(iter(study.records_of(point)), study.records[0])
    said = f"{_what(curve, first)} trains {_first(point.rate)} on {_where(study, point, first)}"
    unit, doubt = unit_of(study).removesuffix("s"), _doubt(study, point)
    if point.world_size == 1:
        return f"{said}; no larger subset was measured, so its scaling is not known{doubt}."
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
    """Return ` (suspect: clocks)` with the codes of the point's suspect records; empty if there is none."""
    codes = dict.fromkeys(
        code for one in study.records_of(point) if one.validity.verdict == "suspect" for code in one.validity.codes
    )
    return f" (suspect: {single_line(', '.join(codes) or 'no reason was recorded')})" if point.suspect else ""


def _what(curve: Curve, first: Record) -> str:
    """Return the model, the strategy, and the settings in which the curve differs from others."""
    model, strategy = named(first, "model"), named(first, "strategy")
    return single_line(f"{model} with {strategy}" + (f" ({', '.join(curve.details)})" if curve.details else ""))


def _first(rate: Estimate) -> str:
    """Return a rate with its unit and its interval, and what the interval is."""
    within = interval(rate, "rate")
    return f"{central(rate, 'rate')} images/s" + (f" (95 % {WORDS}: {within})" if within else "")


def _where(study: Study, point: Point, first: Record) -> str:
    place, unit = single_line(hardware(first)), unit_of(study)
    if place.startswith(f"{point.world_size} × "):
        return place
    if unit == "GPUs":
        return f"{point.world_size} of {place}"
    return f"{count(point.world_size, unit.removesuffix('s'))} ({place.removeprefix(f'{unit} on ')})"


def _why(study: Study, findings: Findings, main: MainPoint | None) -> str:
    def is_main(one: Waterfall) -> bool:
        return main is not None and (one.gpus, one.key) == (main[1].gpus, main[1].key)

    closing = max(findings.waterfalls, key=lambda one: (is_main(one), len(one.gpus), one.ideal.value), default=None)
    if closing is not None:
        where = "" if is_main(closing) else f"{single_line(closing.label)} on {gpu_ids(closing.gpus)}: "
        return where + _lost(closing)
    cost = _cost(study, main[1]) if main else ""
    controls = "control cells are missing (add waterfall=true)"
    beside, lost = _beside_none(findings, main) if main else ("", False)
    if not beside:
        return f"Where the rest goes is not known: {controls}{cost}."
    return f"{beside}{cost}; where the loss goes is not known: {controls}." if lost else f"{beside}{cost}."


def _beside_none(findings: Findings, main: MainPoint) -> tuple[str, bool]:
    """Return the loss against the same devices without any exchange, as words, and whether a loss is seen.

    The words are empty if this was not compared, or if the devices without exchange are slower.
    """
    judged = compared_with(
        findings, main[1], lambda one, other: "strategy.name" in one.differing and other["strategy.name"] == "none"
    )
    if judged is None:
        return "", False
    one, is_second = judged
    if one.verdict == "no difference seen":
        least = None if one.smallest is None else 1 - 1 / (1 + one.smallest)  # of the rate of none
        could = "" if least is None else f" (from {number(least, 'share')} on it would be)"
        return f"Against the same devices without any exchange (none) no loss is seen{could}", False
    if one.verdict == ("faster" if is_second else "slower"):
        return "", False
    # `difference` is (second − first) ÷ first. As the second, the point lost −difference; as the first, 1 − 1 ÷ (1 + difference).
    ends = (one.difference.value, one.difference.low, one.difference.high)
    value, *bounds = (-end if is_second else 1 - 1 / (1 + end) for end in ends if end is not None)
    lost = estimate(Estimate(value, *sorted(bounds)), "share")
    return f"It loses {lost} of what the same devices train without any exchange (none)", True


def _lost(one: Waterfall) -> str:
    gap, ideal = one.ideal.value - one.measured.value, number(one.ideal.value, "rate")
    rest = f"{estimate(Estimate(one.residual, one.residual_low, one.residual_high), 'rate')} left unexplained"
    if gap <= 0:
        return f"Nothing is lost: the measured rate is {number(-gap, 'rate')} images/s above the ideal {ideal}; {rest}."
    share = f" ({number(gap / one.ideal.value, 'share')})" if one.ideal.value else ""
    parts = [(part.lost, part.name) for part in one.parts if part.lost is not None and not part.above_ideal]
    seen = [(lost, name) for lost, name in parts if lost.low is not None and lost.low > 0]
    said = f"{number(gap, 'rate')} images/s of the ideal {ideal} are lost{share}"
    if not any(lost.value > 0 for lost, _ in parts):
        return f"{said}, and no control cell shows to what; {rest}."
    if not seen:
        if any(lost.low is not None for lost, _ in parts):
            return f"{said}; the interval of no part excludes 0, so none is named as the cause; {rest}."
        return f"{said}; single runs do not show how far runs differ, so no part is named as the cause; {rest}."
    lost, name = max(seen, key=lambda pair: pair[0].value)
    return f"{said}, the largest part to {single_line(name)}: {estimate(lost, 'rate')}; {rest}."


def _cost(study: Study, point: Point) -> str:
    """Return what the cells themselves measured of what their strategy costs."""
    records = study.records_of(point)
    cost, step = bounded(study, records, "strategy/cost_ms"), middle(records, "step/ms_median")
    if cost is None or not step:
        return ""
    return f"; the strategy costs {estimate(cost)} ms of a step of {number(step)} ms"
