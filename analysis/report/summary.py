"""The first screen of a report: what was measured, the answer, how sure it is, why, and what next.

At most five sentences, whatever the study holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis.findings.comparisons import PREFIX
from analysis.findings.control_cells import WITHOUT
from analysis.findings.links.host_wires import HostWires, host_wires
from analysis.report.cell_numbers import first_metric
from analysis.report.numbers import central, estimate, interval, number
from analysis.report.section import RATE, Section, bounded, first_records, median_and_interval
from analysis.report.sections.benchmarks import largest_cells
from analysis.report.sections.comparisons import differences
from analysis.study.draws import scaled
from analysis.study.estimates import (
    Comparison,
    Curve,
    Estimate,
    Findings,
    Key,
    Point,
    SettingEffect,
    Waterfall,
)
from analysis.study.names import (
    gpu_ids,
    of_unit,
    ran_alone,
    run_name,
    short_names,
    spoken,
    things_of,
    unit_of,
)
from analysis.study.provenance import gpus_of, hardware
from analysis.study.rates import is_of_training
from analysis.study.runs import median_of, named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from benchmarks.record import Record, metrics
from conf.cell import compress_hosts

SENTENCES = 5
DEFAULTS = {"strategy.name": "nccl_allreduce", "optimize": "eager"}  # of conf/
NO_DIFFERENCE = "no difference seen"  # a verdict
MOST_NAMES = 3  # models, strategies, benchmarks or machines; of more the number is given
MOST_RATES = 4  # of models beside the main point's
MUCH_FASTER = 1.2  # times the rate: single runs show it, though they have no verdict
MOST_EFFECTS = 2  # NCCL settings that have a sentence of their own
MOST_SETTINGS = 4  # NCCL settings that are named together
SAME_TIME = 0.05  # share by which exchanges may differ that take as long
WIRE_LIMITS = 0.8  # an exchange that uses this share of what the wire carries is limited by it
WIRE_MEASURED = 1.1  # above it the reference was slower than the wire, and says nothing of it
HOST_COUNTS = [
    "no",
    "One",
    "Two",
    "Three",
    "Four",
    "Five",
    "Six",
    "Seven",
    "Eight",
    "Nine",
    "Ten",
    "Eleven",
    "Twelve",
]
REASON_LENGTH = 60  # characters of a reason; instead of a longer one stands its code
MOST_REASONS = 3
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


class MainPoint(NamedTuple):
    """The point that a study is about."""

    curve: Curve
    point: Point


class Judged(NamedTuple):
    """A comparison with a verdict between a point and another cell on the same devices."""

    comparison: Comparison
    other_key: Key
    is_second: bool  # the point is the second of the comparison

    @property
    def change(self) -> float:
        """By how much the other cell's rate differs, as a share of the point's."""
        difference = self.comparison.difference.value
        return 1 / (1 + difference) - 1 if self.is_second else difference

    @property
    def other_name(self) -> str:
        """The name of the other cell, without what both names share."""
        first, second = self.comparison.first, self.comparison.second
        short = short_names([first, second])
        return single_line(spoken(short[first if self.is_second else second]), 80)


def sentences(study: Study, findings: Findings, of_benchmarks: Mapping[str, Section]) -> list[str]:
    """Return at most SENTENCES sentences; `of_benchmarks` are the sections of benchmarks."""
    if not study.records:
        return ["This folder holds no record that can be read."]
    main = main_point(study, findings)
    if main is not None:
        return _training_sentences(study, findings, main)
    lines = _benchmark_sentences(study, of_benchmarks)
    following = next_step(study, findings, None) if study.usable else ""
    room = SENTENCES - 1
    if following not in ("", COMPARE):
        room -= 1
    if any(comparison.verdict for comparison in findings.comparisons):
        lines = [*lines[: room - 1], differences(findings)]
    lines = [measured(study), *lines[:room], following]
    return [line for line in lines if line][:SENTENCES]


def _training_sentences(study: Study, findings: Findings, main: MainPoint) -> list[str]:
    """Return the sentences that say most, in the order of the questions that they answer."""
    subject = measured(study)
    settings = settings_sentences(findings, main)
    answers = [
        answer(study, main),
        between_hosts(study, main.point),
        *settings,
        other_cells(findings, main),
        other_models(study, findings, main),
        highest_rate(study, findings, main),
    ]
    interval_of_rate = certainty(study, findings, main.point)
    doubts = doubt(study, main.point)
    cause = loss(study, findings, main)
    following = next_step(study, findings, main)
    # The last ones are left out where there are more than a screen has room for.
    by_weight = [subject, *answers[:2], doubts, *settings[:1]]
    if following != COMPARE:
        by_weight.append(following)
    by_weight += [*answers[2:], interval_of_rate, cause, following]
    kept = [line for line in dict.fromkeys(by_weight) if line][:SENTENCES]
    in_order = dict.fromkeys([subject, *answers, interval_of_rate, doubts, cause, following])
    return [line for line in in_order if line in kept]


def _benchmark_sentences(study: Study, sections: Mapping[str, Section]) -> list[str]:
    """Return what the benchmarks found, for a study in which no usable cell counts images."""
    lines: list[str] = []
    first = first_records(study.usable)
    for benchmark in sorted(first, key=lambda name: not first[name].cell.trains):
        section = sections.get(benchmark)
        if section and section.finding:
            lines += section.finding
            continue
        group = largest_cells(study, benchmark)[0][0]
        name = first_metric(group[0])
        if name is not None:
            entry = metrics.metric(name)
            value = median_and_interval(study, group, name)
            unit = "" if entry.unit in ("", "%") else f" {entry.unit}"
            title = single_line(entry.title, 80)
            lines.append(f"{single_line(run_name(group[0]))}: {title} {value}{unit}.")
    if lines:
        return lines
    if study.usable:
        return ["No cell measured images per second or a link."]
    cells = f"None of its {len(study.records):,} cells gave a number"
    if len(study.records) == 1:
        cells = "Its one cell gave no number"
    return [f"{cells} that can be used; the reasons are under “Validity, and what was left out”."]


# The point that a study is about, and the comparisons of it.


def main_point(study: Study, findings: Findings) -> MainPoint | None:
    """Return the point on most GPUs that exchanges and has an efficiency over every member.

    Of several such points it is the default: without settings, with the most of DEFAULTS, then the
    first to start. Another is chosen only where a verdict says that it is faster than that one.
    None without points.
    """
    points = [
        MainPoint(curve, point) for curve in findings.scaling.curves for point in curve.points
    ]
    if not points:
        return None
    best = max(_merit(each.point) for each in points)
    equals = [each for each in points if _merit(each.point) == best]
    order = {record.record_id: index for index, record in enumerate(study.records)}

    def default_first(each: MainPoint) -> tuple[bool, int, int]:
        point = each.point
        options = point.key.items()
        has_plainer = any(
            rival.point.gpus == point.gpus and rival.point.key.items() < options for rival in equals
        )
        changed = sum(point.key.get(name) != value for name, value in DEFAULTS.items())
        return has_plainer, changed, order.get(point.record_ids[0], 0)

    chosen, *rivals = sorted(equals, key=default_first)
    for rival in sorted(rivals, key=lambda each: -each.point.rate.value):
        judged = compared_with(
            findings, rival.point, lambda each: each.other_key == chosen.point.key
        )
        if judged is not None:
            faster = "faster" if judged.is_second else "slower"
            if judged.comparison.verdict == faster:
                return rival
    return chosen


def _merit(point: Point) -> tuple[bool, bool, bool, bool, int]:
    return (
        point.key["strategy.name"] != WITHOUT,
        point.efficiency is not None and point.world_size > 1,
        not point.without_baseline,
        not point.suspect,
        point.world_size,
    )


def judged_of(findings: Findings, point: Point) -> Iterator[Judged]:
    """Yield every comparison of a point's rate that has a verdict."""
    for comparison in findings.comparisons:
        is_here = comparison.gpus == point.gpus and is_of_training(comparison.rate)
        if not comparison.verdict or not is_here:
            continue
        if comparison.second_key == point.key:
            yield Judged(comparison, comparison.first_key, True)
        if comparison.first_key == point.key:
            yield Judged(comparison, comparison.second_key, False)


def compared_with(
    findings: Findings, point: Point, accepts: Callable[[Judged], bool]
) -> Judged | None:
    """Return the judged comparison of a point that `accepts` takes: the one with fewest options."""
    return min(
        filter(accepts, judged_of(findings, point)),
        key=lambda judged: len(point.key.items() | judged.other_key.items()),
        default=None,
    )


# What was measured, and where.


def measured(study: Study) -> str:
    """Return what was measured and on how many devices of which machine."""
    records = study.usable or study.records
    is_done = any(record.state == "finished" for record in records)
    trained = []
    for record in records:
        if RATE in record.metrics or named(record, "benchmark") == "throughput":
            trained.append(record)
    if trained:
        return (
            f"{_trained(trained, is_done)} on {_devices(study, trained)}{_batch(study, trained)}."
        )
    benchmarks = list(dict.fromkeys(named(record, "benchmark") for record in records))
    subject = _several(benchmarks, "benchmark")
    verb = "were to run"
    if len(benchmarks) == 1:
        subject = f"The benchmark {subject}"
        verb = "was to run"
    elif len(benchmarks) <= MOST_NAMES:
        subject = f"The benchmarks {subject}"
    models = _names(records, "model")
    if models:
        subject += f" ({_several(models, 'model')})"
    if is_done:
        verb = "ran"
    return f"{subject} {verb} on {_devices(study, records)}."


def _trained(records: Sequence[Record], is_done: bool) -> str:
    models = _names(records, "model")
    strategies = _names(records, "strategy")
    exchanging = [name for name in strategies if name != WITHOUT]
    ways = []
    if exchanging:
        ways.append(f"with {_several(exchanging, 'strategy', 'strategies')}")
    if WITHOUT in strategies:
        ways.append("without any exchange")
    verb = "was" if len(models) == 1 else "were"
    if not is_done:
        verb += " to be"
    return f"{_several(models, 'model')} {verb} trained {' and '.join(ways)}"


def _names(records: Sequence[Record], group: str) -> list[str]:
    return list(dict.fromkeys(named(record, group) for record in records if record.cell.trains))


def _several(names: list[str], noun: str, plural: str = "") -> str:
    if len(names) > MOST_NAMES:
        return count(len(names), noun, plural)
    return join_words([single_line(name, 80) for name in names])


def _devices(study: Study, records: Sequence[Record]) -> str:
    """Return `1, 2 and 4 GPUs of 4 × NVIDIA H200`, or the workers and their CPU.

    Records on a part of the hosts of others, the baselines of several hosts, name no machine.
    """
    unit = unit_of(study)
    preposition = "of" if unit == "GPUs" else "on"
    sizes = [str(size) for size in sorted({record.cell.world_size for record in records})]
    if sizes[-1:] == ["1"]:
        unit = unit.removesuffix("s")
    host_sets = {frozenset(record.cell.every_host) for record in records}
    machines = []
    for record in records:
        hosts = frozenset(record.cell.every_host)
        if hosts and any(hosts < larger for larger in host_sets):
            continue
        machine = hardware(record).removeprefix("CPU workers on ")
        if hosts:
            machine += f" ({compress_hosts(sorted(hosts))})"
        machines.append(machine)
    where = join_words([single_line(name) for name in dict.fromkeys(machines)], MOST_NAMES)
    return f"{join_words(sizes)} {unit} {preposition} {where}"


def _batch(study: Study, records: Sequence[Record]) -> str:
    """Return the images of a step, where they are the same in every cell."""
    things, unit = things_of(study), unit_of(study)
    per_step = {record.cell.global_batch_size for record in records}
    per_rank = {record.cell.batch_size for record in records}
    if per_step == {None} and len(per_rank) == 1:
        return f", with {per_rank.pop():,} {things} per {unit.removesuffix('s')} and step"
    if None not in per_step and len(per_step) == 1:
        return f", with {per_step.pop():,} {things} per step on all {unit} together"
    return ""


# The answer of a study that trains.


def answer(study: Study, main: MainPoint) -> str:
    """Return the rate and the efficiency of the point that the study is about."""
    curve, point = main
    device, things = unit_of(study).removesuffix("s"), things_of(study)
    trained = [record for record in study.usable if record.cell.trains]
    names = []
    if len({named(record, "model") for record in trained}) > 1:
        names.append(point.key["model.name"])
    if len({named(record, "strategy") for record in trained} - {WITHOUT}) > 1:
        names.append(point.key["strategy.name"])
    subject = " with ".join(names) or "it"
    if curve.details:
        subject += f" ({', '.join(curve.details)})"
    devices = count(point.world_size, device)
    subsets = {runs.gpus for runs in study.timed if runs.world_size == point.world_size}
    if len(subsets) > 1 or isinstance(point.gpus[0], str):
        devices += f" ({gpu_ids(point.gpus)})"
    rate = f"{central(point.rate, 'rate')} {things}/s"
    line = f"On {devices} {single_line(subject, 120)} trains {rate}"
    if point.efficiency is None:
        return f"{line}."
    whole = f"{point.world_size} × the slowest {device} alone"
    not_alone = ""
    if point.without_baseline:
        whole = f"{point.world_size} × {device} {point.slowest} alone"
        missing = gpu_ids(point.without_baseline)
        not_alone = f"; {device}s {missing} were not measured alone"
        if len(point.without_baseline) == 1:
            not_alone = f"; {device} {missing} was not measured alone"
    if curve.kind == "strong":
        whole += f" with all {things} of a step"
    share = number(float(point.efficiency.value), "share")
    return f"{line}: an efficiency of {share} (100 % would be {whole}{not_alone})."


def other_models(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return the rates of the other models of a study of single GPUs; empty for other studies."""
    points = [point for curve in findings.scaling.curves for point in curve.points]
    points = [point for point in points if point.gpus == main.point.gpus]
    points.sort(key=lambda point: len(point.key.items() ^ main.point.key.items()))
    rates: dict[str, str] = {}
    for point in points:
        rates.setdefault(point.key["model.name"], central(point.rate, "rate"))
    rates.pop(main.point.key["model.name"], None)
    if not rates or not ran_alone(study):
        return ""
    texts = [f"{single_line(name, 80)} trains {rate}" for name, rate in rates.items()]
    more = ""
    if len(texts) > MOST_RATES:
        more = f" ({count(len(texts) - MOST_RATES, 'more model')} in the table below)"
    return f"{join_words(texts[:MOST_RATES])} {things_of(study)}/s{more}."


def highest_rate(study: Study, findings: Findings, main: MainPoint) -> str:
    """Return the highest rate on the same devices, where another cell's single run is much faster.

    Empty where verdicts say more.
    """
    if other_cells(findings, main):
        return ""
    best = main
    for curve in findings.scaling.curves:
        for point in curve.points:
            is_alike = point.gpus == main.point.gpus and point.key["strategy.name"] != WITHOUT
            if is_alike and not point.suspect and point.rate.value > best.point.rate.value:
                best = MainPoint(curve, point)
    if best.point.rate.value < MUCH_FASTER * main.point.rate.value:
        return ""
    rate = f"{central(best.point.rate, 'rate')} {things_of(study)}/s"
    return (
        f"The highest rate of single runs is {rate}: {single_line(spoken(best.curve.label), 120)}."
    )


def other_cells(findings: Findings, main: MainPoint) -> str:
    """Return how the other cells on the same devices compare; empty where none has a verdict.

    NCCL's settings and the strategy `none` have sentences of their own.
    """
    cells = []
    for judged in judged_of(findings, main.point):
        is_setting = judged.comparison.differing[0].startswith(PREFIX)
        if judged.other_key["strategy.name"] != WITHOUT and not is_setting:
            cells.append(judged)
    differing = [judged for judged in cells if judged.comparison.verdict != NO_DIFFERENCE]
    faster = [judged for judged in differing if judged.change > 0]
    slower = [judged for judged in differing if judged.change <= 0]
    parts = []
    if slower and not faster:
        parts.append("none is faster; ")
    parts.append(", ".join(filter(None, [_side(faster, "faster"), _side(slower, "slower")])))
    if len(cells) == 1:
        if differing:
            return f"{parts[-1]}."
        smallest = _smallest_shown(cells[0].comparison.smallest)
        return f"{cells[0].other_name} shows no difference to it{smallest}."
    if not cells:
        return ""
    equal = len(cells) - len(differing)
    if equal and differing:
        parts.append(", ")
    if equal:
        parts.append(f"{equal} {'shows' if equal == 1 else 'show'} no difference")
    return f"Of {len(cells):,} other cells on the same devices, {''.join(parts)}."


def _side(cells: Sequence[Judged], word: str) -> str:
    if not cells:
        return ""
    most = max(cells, key=lambda judged: abs(judged.change))
    change = number(abs(most.change), "share")
    if len(cells) == 1:
        return f"{most.other_name} is {change} {word}"
    return f"{len(cells)} are {word} ({most.other_name} the most, by {change})"


def _smallest_shown(smallest: float | None) -> str:
    if smallest is None:
        return ""
    if smallest >= 1:
        return " (these runs differ too much among themselves to show one)"
    return f" (these runs can show one of {number(smallest, 'share')} or more)"


# How sure the answer is.


def certainty(study: Study, findings: Findings, point: Point) -> str:
    """Return the intervals of the next run, or why they are not known."""
    rate = interval(point.rate, "rate")
    if rate:
        efficiency = interval(point.efficiency, "share").replace("\N{NO-BREAK SPACE}%", "")
        if efficiency:
            efficiency = f", an efficiency of {efficiency} %"
        return f"The next run would give {rate} {things_of(study)}/s{efficiency} (95 % interval)."
    if any(len(runs.records) > 1 for runs in study.timed):
        return "Too few runs of equal cells are known to say what the next run would give."
    if findings.comparisons:
        return "Every cell ran only once, so no difference between cells has a verdict."
    return "Every cell ran only once."


def doubt(study: Study, point: Point) -> str:
    """Return why checks cast doubt on the records of the point; empty where none does."""
    if not point.suspect:
        return ""
    against: dict[str, str] = {}
    for record in study.records_of(point):
        if record.validity.verdict == "suspect":
            against |= record.validity.against
    reasons = []
    for code, text in against.items():
        # The first clause says it without numbers.
        clause, colon, _ = text.partition(":")
        reasons.append(single_line(clause if colon and len(clause) <= REASON_LENGTH else code))
    more = ""
    if len(reasons) > MOST_REASONS:
        more = f"; and {len(reasons) - MOST_REASONS} more"
    listed = "; ".join(reasons[:MOST_REASONS]) or "no reason was recorded"
    return f"Checks cast doubt on this: {listed}{more}."


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
    how = "with the strategy" if waterfall.with_strategy else "without a strategy"
    alone = f"{len(waterfall.gpus)} × the slowest {unit.removesuffix('s')} alone {how}"
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
