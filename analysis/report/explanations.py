"""Why a study's rate is what it is, for the first screen: the loss, NCCL settings, the network.

And what to run to learn more.
"""

import math
from collections.abc import Sequence

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import PREFIX
from analysis.findings.host_wires import HostWires, host_wires
from analysis.report.main_point import NO_DIFFERENCE, Judged, MainPoint, compared_with
from analysis.report.numbers import estimate, interval, number
from analysis.report.section import bounded
from analysis.study.draws import scaled
from analysis.study.estimates import Estimate, Findings, Key, Point, SettingEffect, Waterfall
from analysis.study.names import gpu_ids, of_unit, things_of, unit_of
from analysis.study.provenance import gpus_of
from analysis.study.runs import median_of
from analysis.study.study import Study
from analysis.text import count, join_words, single_line

MOST_EFFECTS = 2  # NCCL settings that have a sentence of their own
MOST_SETTINGS = 4  # NCCL settings that are named together
SAME_TIME = 0.05  # share by which exchanges may differ that take as long
WIRE_LIMITS = 0.8  # an exchange that uses this share of what the wire carries is limited by it
WIRE_MEASURED = 1.1  # above it the reference was slower than the wire, and says nothing of it
HOST_COUNTS = (
    "no", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven",
    "Twelve",
)  # fmt: skip
MOST_OFFERS = 2
COMPARE = (
    "To compare it with another machine, version or date, "
    "run python -m analysis compare THIS_STUDY OTHER_STUDY."
)
# What another run would remove, by the codes of suspect cells.
REMEDIES = {
    ("foreign_cpu", "foreign_load"): ("remove the doubt", "nothing else on the machine"),
    ("too_few_iterations",): ("measure longer", "benchmark.max_seconds=60"),
}


# Why the devices train less together than alone.


def loss(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return where the loss comes from: the waterfall, the strategy `none` or the strategy's cost.

    Empty where the study says nothing about it.
    """
    if findings.waterfalls:
        return _waterfall_loss(study, findings, main)
    against_none = _loss_against_none(findings, main, unit_of(study))
    cost = _strategy_cost(study, main.point)
    parts = "; ".join(filter(None, [against_none, cost]))
    return f"{parts[0].upper()}{parts[1:]}." if parts else ""


def _waterfall_loss(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return what is lost of the ideal rate, and the largest part whose interval excludes 0.

    The waterfall is the main point's, without one that of the largest subset.
    """

    def is_main(waterfall: Waterfall) -> bool:
        return (waterfall.gpus, waterfall.key) == (main.point.gpus, main.point.key)

    waterfall = max(
        findings.waterfalls, key=lambda each: (is_main(each), len(each.gpus), each.ideal.value)
    )
    where = ""
    if not is_main(waterfall):
        where = f"{single_line(waterfall.label)} on {gpu_ids(waterfall.gpus)}: "
    unit, things = unit_of(study), things_of(study)
    slowest = f"the slowest {unit.removesuffix('s')} alone without a strategy"
    alone = f"{len(waterfall.gpus)} × {slowest}"
    ideal = f"{number(waterfall.ideal.value, 'rate')} {things}/s ({alone})"
    gap = waterfall.ideal.value - waterfall.measured.value
    if gap <= 0:
        return f"{where}Nothing is lost of {ideal}."
    line = f"{where}{number(gap / waterfall.ideal.value, 'share')} of {ideal} is lost"
    largest: tuple[Estimate, str] | None = None
    has_intervals = False
    for part in waterfall.parts:
        if part.lost is None or part.lost.low is None or part.above_ideal:
            continue
        has_intervals = True
        if part.lost.low > 0 and (largest is None or part.lost.value > largest[0].value):
            largest = part.lost, of_unit(part.name, unit)
    if largest is not None:
        lost, name = largest
        return f"{line}; the largest sure cause is {name}: {estimate(lost, 'rate')} {things}/s."
    if has_intervals:
        return f"{line}; no single cause stands out from the noise."
    return f"{line}; single runs do not show to what."


def _loss_against_none(findings: Findings, main: MainPoint, unit: str) -> str:
    """Return the loss against the same devices without any exchange; empty where none is seen."""

    def is_none(judged: Judged) -> bool:
        differs = "strategy.name" in judged.comparison.differing
        return differs and judged.other_key["strategy.name"] == WITHOUT

    judged = compared_with(findings, main.point, is_none)
    if judged is None:
        return ""
    comparison = judged.comparison
    if comparison.verdict == NO_DIFFERENCE:
        return f"Without any exchange (strategy none) the same {unit} are not seen to be faster"
    if comparison.verdict == ("faster" if judged.is_second else "slower"):
        return ""
    # `difference` is (second − first) ÷ first. As the second, the point lost −difference; as the
    # first, 1 − 1 ÷ (1 + difference).
    losses = []
    for end in (comparison.difference.value, comparison.difference.low, comparison.difference.high):
        if end is not None:
            losses.append(-end if judged.is_second else 1 - 1 / (1 + end))
    share = estimate(Estimate(losses[0], *sorted(losses[1:])), "share")
    return f"It loses {share} of what the same {unit} train without any exchange (strategy none)"


def _strategy_cost(study: Study, point: Point) -> str:
    """Return what the strategy adds to a step; empty where that was not measured."""
    records = study.records_of(point)
    cost_ms = bounded(study, records, "strategy/cost_ms")
    step_ms = median_of(records, "step/ms_median")
    if cost_ms is None or not step_ms:
        return ""
    step = f"a step of {number(step_ms)} ms"
    if cost_ms.low is not None and cost_ms.low <= 0:
        return f"what the strategy adds to {step} is lost in the noise ({interval(cost_ms)} ms)"
    return f"the strategy adds {estimate(cost_ms)} ms to {step}"


# What NCCL settings changed.


def settings_sentences(findings: Findings, main: MainPoint) -> list[str]:
    """Return sentences on the NCCL settings of the main point: those with an effect first."""
    changing, without_effect = [], []
    for effect in _effects_on(findings.settings, main.point):
        has_verdict = effect.compared.verdict in ("faster", "slower")
        if has_verdict or effect.other_transport:
            changing.append(effect)
        else:
            without_effect.append(effect)
    changing.sort(key=lambda effect: -abs(effect.compared.difference.value))
    lines = [_effect(effect) for effect in changing[:MOST_EFFECTS]]
    more = changing[MOST_EFFECTS:]
    if more:
        line = lines[-1].removesuffix(".")
        lines[-1] = f"{line}; {_setting_names(more)} changed something too."
    if without_effect:
        lines.append(_no_effect(without_effect))
    return lines


def _effects_on(effects: Sequence[SettingEffect], point: Point) -> list[SettingEffect]:
    """Return the effects on a point's devices, against its own cell without any setting."""
    fewest: int | None = None
    kept: list[SettingEffect] = []
    for effect in effects:
        untouched = effect.compared.first_key
        if effect.compared.gpus != point.gpus:
            continue
        if _without_settings(untouched) != _without_settings(point.key):
            continue
        settings = sum(name.startswith(PREFIX) for name in untouched)
        if fewest is None or settings < fewest:
            fewest = settings
            kept = []
        if settings == fewest:
            kept.append(effect)
    return kept


def _without_settings(key: Key) -> dict[str, str]:
    options = dict(key)
    options.pop("connections", None)
    for name in key:
        if name.startswith(PREFIX):
            del options[name]
    return options


def _effect(effect: SettingEffect) -> str:
    """Return `LOC is 2.2 % slower than untouched: NCCL used SHM, and an exchange took …`."""
    compared, change = effect.compared, effect.compared.difference.value
    word = "slower" if change < 0 else "faster"
    name = single_line(effect.setting, 60)
    if not compared.verdict:
        size = number(abs(change), "share")
        line = f"{name} was {size} {word} than untouched in single runs"
    elif compared.verdict == NO_DIFFERENCE:
        line = f"{name} shows no difference in {compared.rate} to untouched"
    else:
        size = estimate(scaled(compared.difference, math.copysign(1, change)), "share")
        line = f"{name} is {size} {word} than untouched"
    causes = []
    before, after = (single_line(transport, 40) for transport in effect.transports)
    if effect.other_transport:
        causes.append(f"NCCL used {after} instead of {before}")
    elif before and after:
        causes.append(f"NCCL used {before} as before")
    if effect.exchange_ratio is not None:
        causes.append(_exchange_took(effect.exchange_ratio, effect.exchange_ratio))
    return _with_causes(line, causes)


def _no_effect(effects: Sequence[SettingEffect]) -> str:
    """`P2P_LEVEL=PIX shows no difference to untouched: NCCL used the same transport.`"""
    names = _setting_names(effects)
    is_single = len(effects) == 1
    if all(effect.compared.verdict for effect in effects):
        line = f"{names} {'shows' if is_single else 'show'} no difference to untouched"
    else:
        most = max(abs(effect.compared.difference.value) for effect in effects)
        line = f"{names} differ from untouched by {number(most, 'share')} at most in single runs"
        if is_single:
            line = f"{names} differs from untouched by {number(most, 'share')} in single runs"
    causes = []
    if all(all(effect.transports) for effect in effects):
        causes.append("NCCL used the same transport")
    ratios = [effect.exchange_ratio for effect in effects if effect.exchange_ratio is not None]
    if ratios:
        causes.append(_exchange_took(min(ratios), max(ratios)))
    return _with_causes(line, causes)


def _with_causes(line: str, causes: Sequence[str]) -> str:
    return f"{line}: {', and '.join(causes)}." if causes else f"{line}."


def _exchange_took(least: float, most: float) -> str:
    if max(abs(least - 1), abs(most - 1)) < SAME_TIME:
        return "an exchange took as long"
    times = " to ".join(dict.fromkeys((number(least), number(most))))
    return f"an exchange took {times} times as long"


def _setting_names(effects: Sequence[SettingEffect]) -> str:
    if len(effects) > MOST_SETTINGS:
        return count(len(effects), "other setting")
    return join_words([single_line(effect.setting, 60) for effect in effects])


# Which wire limits cells on several hosts.


def between_hosts(study: Study, point: Point) -> str:
    """Return how several hosts compare with one, and whether their network limits them.

    `Two hosts train 1.3 × the slowest of them alone: an exchange takes …`; empty on one host.
    """
    runs = next(
        (each for each in study.runs if each.records[0].record_id in point.record_ids), None
    )
    wires = None if runs is None else host_wires(runs)
    text = "" if wires is None else _network(wires)
    if runs is None or not text:
        return ""
    text = f"{text[0].upper()}{text[1:]}."
    if point.node_efficiency is not None:
        hosts = len(runs.cell.hosts)
        spelled = HOST_COUNTS[hosts] if hosts < len(HOST_COUNTS) else f"{hosts:,}"
        ratio = number(point.node_efficiency.value * hosts, "ratio")
        text = f"{text[0].lower()}{text[1:]}"
        text = f"{spelled} hosts train {ratio} × the slowest of them alone: {text}"
    return single_line(text, 400)


def _network(wires: HostWires) -> str:
    network = wires.worded or "the network between them"
    if wires.exchange_ms is None:
        return f"they exchange over {network}" if wires.worded else ""
    exchange = f"an exchange takes {number(wires.exchange_ms)} ms over {network}"
    if wires.gb_per_s:
        exchange += f" at {number(wires.gb_per_s)} GB/s"
    nominal = ""
    if wires.nominal_gb_per_s is not None:
        nominal = f"by the driver {8 * wires.nominal_gb_per_s:g} Gbit/s"
    if wires.share is None or wires.share > WIRE_MEASURED:
        return f"{exchange} ({nominal})" if nominal else exchange
    share = f"{number(min(1.0, wires.share), 'share')} of what it carries is used"
    if nominal:
        share += f"; {nominal}"
    verb = "limits" if wires.share >= WIRE_LIMITS else "does not limit"
    return f"{exchange}, and this network {verb} it ({share})"


# What to do next.


def next_step(study: Study, findings: Findings, main: MainPoint | None) -> str:
    """Return what to run to learn more: `To see how it scales, run with gpus=scale.`"""
    offers = _offers(study, findings, main)[:MOST_OFFERS]
    if not offers:
        return COMPARE
    aim, option = offers[0]
    line = f"To {aim}, run with {option}"
    for aim, option in offers[1:]:
        line += f"; to {aim}, with {option}"
    return f"{line}."


def _offers(study: Study, findings: Findings, main: MainPoint | None) -> list[tuple[str, str]]:
    """Return (aim, option) of what is open, the most important first."""
    offers: list[tuple[str, str]] = []
    if main is not None:
        point = main.point
        records = study.records_of(point)
        codes = {code for record in records for code in record.validity.codes}
        for doubtful, remedy in REMEDIES.items():
            if point.suspect and not offers and codes.intersection(doubtful):
                offers.append(remedy)
        if point.world_size == 1:
            # A driver that names a single GPU has no other.
            if any(len(gpus_of(record.environment)) != 1 for record in records):
                offers.append(("see how it scales", "gpus=scale"))
        elif not findings.waterfalls:
            aim = "see where the loss comes from"
            if point.efficiency is None:
                aim = "see the efficiency and where the loss comes from"
            offers.append((aim, "waterfall=true"))
    if findings.comparisons and not any(each.verdict for each in findings.comparisons):
        offers.append(("learn which differences are real", "repeats=5"))
    elif study.timed and all(noise.floor is None for noise in findings.noises):
        offers.append(("learn how far runs differ", "repeats=5"))
    return offers
