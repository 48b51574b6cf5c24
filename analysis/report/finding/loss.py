"""Why the devices train less together than alone: the waterfall, the strategy `none` beside it, or the cost of the strategy."""

from analysis.report.finding.main_point import MainPoint, compared_with
from analysis.report.measured_values import bounded
from analysis.report.numbers import estimate, interval, number
from analysis.study.estimates import Estimate, Findings, Point, Waterfall
from analysis.study.names import gpu_ids, things_of, unit_of
from analysis.study.names import names_of_unit as of_unit
from analysis.study.study import Study, middle
from analysis.text import single_line


def loss(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return where the loss comes from, as far as the study says it; empty where it says nothing."""
    if closing := _closing(findings, main):
        return _lost(study, closing, main)
    beside = _beside_none(findings, main, unit_of(study))
    cost = _cost(study, main[1])
    if beside and cost:
        return f"{beside}; {cost}."
    return f"{beside or cost[:1].upper() + cost[1:]}." if beside or cost else ""


def explained(findings: Findings, main: MainPoint) -> bool:
    """Tell whether a waterfall says where the loss comes from."""
    return _closing(findings, main) is not None


def _closing(findings: Findings, main: MainPoint) -> Waterfall | None:
    """Return the waterfall of the main point; without one, that of the largest subset."""
    return max(
        findings.waterfalls,
        key=lambda one: (_is_main(one, main), len(one.gpus), one.ideal.value),
        default=None,
    )


def _is_main(one: Waterfall, main: MainPoint) -> bool:
    return (one.gpus, one.key) == (main[1].gpus, main[1].key)


def _lost(study: Study, one: Waterfall, main: MainPoint) -> str:
    """Return what is lost of the ideal rate, and the largest part whose interval excludes 0."""
    gap, ideal, unit = (
        one.ideal.value - one.measured.value,
        number(one.ideal.value, "rate"),
        unit_of(study),
    )
    where = "" if _is_main(one, main) else f"{single_line(one.label)} on {gpu_ids(one.gpus)}: "
    how = "with the strategy" if one.with_strategy else "without a strategy"
    alone = f"{len(one.gpus)} × the slowest {unit.removesuffix('s')} alone {how}"
    if gap <= 0:
        return f"{where}Nothing is lost of {ideal} {things_of(study)}/s ({alone})."
    said = f"{where}{number(gap / one.ideal.value, 'share')} of {ideal} {things_of(study)}/s ({alone}) is lost"
    parts = [
        (part.lost, part.name)
        for part in one.parts
        if part.lost is not None and not part.above_ideal
    ]
    seen = [(lost, name) for lost, name in parts if lost.low is not None and lost.low > 0]
    if seen:
        lost, name = max(seen, key=lambda pair: pair[0].value)
        return f"{said}; the largest sure cause is {of_unit(name, unit)}: {estimate(lost, 'rate')} {things_of(study)}/s."
    if any(lost.low is not None for lost, _ in parts):
        return f"{said}; no single cause stands out from the noise."
    return f"{said}; single runs do not show to what."


def _beside_none(findings: Findings, main: MainPoint, unit: str) -> str:
    """Return the loss against the same devices without any exchange; empty where that was not compared, or is slower."""
    judged = compared_with(
        findings,
        main[1],
        lambda one, other: "strategy.name" in one.differing and other["strategy.name"] == "none",
    )
    if judged is None:
        return ""
    one, is_second = judged
    if one.verdict == "no difference seen":
        return f"Without any exchange (strategy none) the same {unit} are not seen to be faster"
    if one.verdict == ("faster" if is_second else "slower"):
        return ""
    # `difference` is (second − first) ÷ first. As the second, the point lost −difference; as the first, 1 − 1 ÷ (1 + difference).
    ends = (one.difference.value, one.difference.low, one.difference.high)
    value, *bounds = (-end if is_second else 1 - 1 / (1 + end) for end in ends if end is not None)
    lost = estimate(Estimate(value, *sorted(bounds)), "share")
    return f"It loses {lost} of what the same {unit} train without any exchange (strategy none)"


def _cost(study: Study, point: Point) -> str:
    """Return what the strategy adds to a step, by steps with and without it; empty where that was not measured."""
    records = study.records_of(point)
    cost, step = bounded(study, records, "strategy/cost_ms"), middle(records, "step/ms_median")
    if cost is None or not step:
        return ""
    if cost.low is not None and cost.low <= 0:
        return f"what the strategy adds to a step of {number(step)} ms is lost in the noise ({interval(cost)} ms)"
    return f"the strategy adds {estimate(cost)} ms to a step of {number(step)} ms"
