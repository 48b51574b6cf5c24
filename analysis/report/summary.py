"""The first screen of a report: what was measured, the answer, how sure it is, why, and what next.

At most five sentences, whatever the study holds.
"""

import math
from collections.abc import Mapping, Sequence

from analysis.findings.baselines import WITHOUT
from analysis.findings.communication import COST
from analysis.findings.examine import Findings
from analysis.findings.links import host_wires
from analysis.findings.scaling import Point
from analysis.report.cell_numbers import first_metric
from analysis.report.main_point import (
    CurvePoint,
    effects_on,
    judgements,
    largest_sure_part,
    loss_against_none,
    main_point,
    much_faster,
    points_of,
)
from analysis.report.numbers import central, estimate, interval, number
from analysis.report.section import RATE, Section, median_and_interval, words_of
from analysis.report.sections.benchmarks_section import largest_cells
from analysis.report.sections.comparisons_section import differences
from analysis.study.draws import scaled
from analysis.study.measured_numbers import NO_DIFFERENCE
from analysis.study.names import gpu_ids, ran_alone, run_name, spoken, unit_of
from analysis.study.provenance import gpus_of, hardware
from analysis.study.runs import median_of, named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from benchmarks.record import Record, metrics
from conf.cell import compress_hosts

SENTENCES = 5
MOST_NAMES = 3  # models, strategies, benchmarks or machines; of more the number is given
MOST_RATES = 4  # of models beside the main point's
REASON_LENGTH = 60  # characters of a reason
MOST_REASONS = 3
MOST_EFFECTS = 2  # NCCL settings that have a sentence of their own
SAME_TIME = 0.05  # share by which exchanges may differ that take as long
WIRE_LIMITS = 0.8  # an exchange that uses this share of what the wire carries is limited by it
WIRE_MEASURED = 1.1  # above it the reference was slower than the wire, and says nothing of it
COMPARE = (
    "To compare it with another machine, version or date, "
    "run python -m analysis compare THIS_STUDY OTHER_STUDY."
)


# ---- The sentences ------------------------------------------------------------------------------


def sentences(study: Study, findings: Findings, of_benchmarks: Mapping[str, Section]) -> list[str]:
    """Return at most SENTENCES sentences; `of_benchmarks` are the sections of benchmarks."""
    if not study.records:
        return ["This folder holds no record that can be read."]
    main = main_point(study, findings)
    subject = measured(study)
    following = ""
    if main is not None or study.usable:
        following = next_step(study, findings, main)
    if main is None:
        room = SENTENCES - 1 - (following not in ("", COMPARE))
        lines = _benchmark_sentences(study, of_benchmarks)
        if any(comparison.verdict for comparison in findings.comparisons):
            lines = [*lines[: room - 1], differences(findings)]
        lines = [subject, *lines[:room], following]
        return list(map(words_of(study), filter(None, lines[:SENTENCES])))
    # The sentences that say most, in the order of the questions that they answer.
    settings = settings_sentences(findings, main)
    answers = [
        answer(study, main),
        between_hosts(study, main.point),
        *settings,
        other_cells(findings, main),
        other_models(study, findings, main),
        highest_rate(findings, main),
    ]
    interval_of_rate = certainty(study, main.point)
    doubts = doubt(study, main.point)
    cause = loss(study, findings, main)
    # The last ones are left out where there are more than a screen has room for.
    by_weight = [subject, *answers[:2], doubts, *settings[:1]]
    if following != COMPARE:
        by_weight.append(following)
    by_weight += [*answers[2:], interval_of_rate, cause, following]
    kept = list(filter(None, dict.fromkeys(by_weight)))[:SENTENCES]
    in_order = dict.fromkeys([subject, *answers, interval_of_rate, doubts, cause, following])
    lines = [line for line in in_order if line in kept]
    return list(map(words_of(study), lines))


def _benchmark_sentences(study: Study, sections: Mapping[str, Section]) -> list[str]:
    """Return what the benchmarks found, for a study in which no usable cell counts images."""
    lines: list[str] = []
    trains: dict[str, bool] = {}
    for record in study.usable:
        trains.setdefault(named(record, "benchmark"), record.cell.trains)
    for benchmark in sorted(trains, key=lambda name: not trains[name]):
        section = sections.get(benchmark)
        if section and section.finding:
            lines += section.finding
            continue
        runs = largest_cells(study, benchmark)[0][0]
        record = runs.records[0]
        name = first_metric(record)
        if name is not None:
            entry = metrics.metric(name)
            text = f"{single_line(entry.title, 80)} {median_and_interval(runs, name)}"
            if entry.unit not in ("", "%"):
                text += f" {entry.unit}"
            lines.append(f"{single_line(run_name(record))}: {text}.")
    if lines:
        return lines
    if study.usable:
        return ["No cell measured images per second or a link."]
    cells = f"None of its {len(study.records):,} cells gave a number"
    if len(study.records) == 1:
        cells = "Its one cell gave no number"
    return [f"{cells} that can be used; the reasons are under “Validity, and what was left out”."]


# ---- What was measured, and where ---------------------------------------------------------------


def measured(study: Study) -> str:
    """Return what was measured and on how many devices of which machine."""
    records: Sequence[Record] = study.usable or study.records
    is_done, trained = False, []
    for record in records:
        is_done = is_done or record.state == "finished"
        if RATE in record.metrics or named(record, "benchmark") == "throughput":
            trained.append(record)
    records = trained or records
    with_model = [record for record in records if record.cell.trains]
    models = _several(with_model, "model")
    if trained:
        exchanging = [record for record in records if named(record, "strategy") != WITHOUT]
        ways = []
        if exchanging:
            ways.append(f"with {_several(exchanging, 'strategy', 'strategies')}")
        if len(exchanging) < len(records):
            ways.append("without any exchange")
        verb = "were"
        if len(_names(records, "model")) == 1:
            verb = "was"
        if not is_done:
            verb += " to be"
        subject = f"{models} {verb} trained {' and '.join(ways)}"
        return f"{subject} on {_devices(study, records)}{_batch(records)}."
    number_of = len(_names(records, "benchmark"))
    subject = _several(records, "benchmark")
    if number_of == 1:
        subject = f"The benchmark {subject}"
    elif number_of <= MOST_NAMES:
        subject = f"The benchmarks {subject}"
    if models:
        subject += f" ({models})"
    verb = "failed"
    if is_done:
        verb = "ran"
    return f"{subject} {verb} on {_devices(study, records)}."


def _names(records: Sequence[Record], group: str) -> list[str]:
    """Return the names of models, strategies or benchmarks, each once."""
    return list(dict.fromkeys(single_line(named(record, group), 80) for record in records))


def _several(records: Sequence[Record], group: str, plural: str = "") -> str:
    """Return the names of models, strategies or benchmarks, or how many there are."""
    names = _names(records, group)
    if len(names) > MOST_NAMES:
        return count(len(names), group, plural)
    return join_words(names)


def _devices(study: Study, records: Sequence[Record]) -> str:
    """Return `1, 2 and 4 GPUs of 4 × NVIDIA H200`, or the workers and their CPU.

    Records on a part of the hosts of others, the baselines of several hosts, name no machine.
    """
    sizes, host_sets = set(), set()
    for record in records:
        sizes.add(record.cell.world_size)
        host_sets.add(frozenset(record.cell.every_host))
    units, preposition = "GPUs", "on"
    if sizes == {1}:
        units = "GPU"
    if unit_of(study) == "GPUs":
        preposition = "of"
    machines = []
    for record in records:
        hosts = frozenset(record.cell.every_host)
        if hosts and any(hosts < larger for larger in host_sets):
            continue
        machine = single_line(hardware(record).removeprefix("CPU workers on "))
        if hosts:
            machine += f" ({compress_hosts(sorted(hosts))})"
        machines.append(machine)
    where = join_words(list(dict.fromkeys(machines)), MOST_NAMES)
    return f"{join_words(list(map(str, sorted(sizes))))} {units} {preposition} {where}"


def _batch(records: Sequence[Record]) -> str:
    """Return the images of a step, where they are the same in every cell."""
    per_step, per_rank = set(), set()
    for record in records:
        per_step.add(record.cell.global_batch_size)
        per_rank.add(record.cell.batch_size)
    if per_step == {None} and len(per_rank) == 1:
        return f", with {per_rank.pop():,} images per GPU and step"
    if None not in per_step and len(per_step) == 1:
        return f", with {per_step.pop():,} images per step on all GPUs together"
    return ""


# ---- The answer of a study that trains ----------------------------------------------------------


def answer(study: Study, main: CurvePoint) -> str:
    """Return the rate and the efficiency of the point that the study is about."""
    curve, point = main
    trained = [record for record in study.usable if record.cell.trains]
    names = []
    if len(_names(trained, "model")) > 1:
        names.append(point.key["model.name"])
    if len({*_names(trained, "strategy")} - {WITHOUT}) > 1:
        names.append(point.key["strategy.name"])
    subject = " with ".join(names) or "it"
    if curve.details:
        subject += f" ({', '.join(curve.details)})"
    devices = count(point.world_size, "GPU")
    subsets = {runs.gpus for runs in study.timed if runs.cell.world_size == point.world_size}
    if len(subsets) > 1 or isinstance(point.gpus[0], str):
        devices += f" ({gpu_ids(point.gpus)})"
    line = f"On {devices} {single_line(subject, 120)} trains {central(point.rate, 'rate')} images/s"
    if point.efficiency is None:
        return f"{line}."
    whole = f"{point.world_size} × the slowest GPU alone"
    not_alone = ""
    if point.without_baseline:
        whole = f"{point.world_size} × GPU {point.slowest} alone"
        ids = gpu_ids(point.without_baseline)
        not_alone = f"; GPU {ids} was not measured alone"
        if len(point.without_baseline) > 1:
            not_alone = f"; GPUs {ids} were not measured alone"
    if curve.kind == "strong":
        whole += " with all images of a step"
    share = number(float(point.efficiency.value), "share")
    return f"{line}: an efficiency of {share} (100 % would be {whole}{not_alone})."


def other_models(study: Study, findings: Findings, main: CurvePoint) -> str:
    """Return the rates of the other models of a study of single GPUs; empty for other studies."""
    if not ran_alone(study):
        return ""
    points = points_of(findings.scaling.curves)
    points.sort(key=lambda each: len(each.point.key.items() ^ main.point.key.items()))
    rates: dict[str, str] = {}
    for _, point in points:
        if point.gpus == main.point.gpus:
            rates.setdefault(point.key["model.name"], central(point.rate, "rate"))
    rates.pop(main.point.key["model.name"], None)
    if not rates:
        return ""
    texts = [f"{single_line(name, 80)} trains {rate}" for name, rate in rates.items()]
    return f"{join_words(texts, MOST_RATES)} images/s."


def highest_rate(findings: Findings, main: CurvePoint) -> str:
    """Return the highest rate of single runs on the same devices, where no verdict says more."""
    best = much_faster(findings, main)
    if best is None or any(judgements(findings, main.point).values()):
        return ""
    rate = f"{central(best.point.rate, 'rate')} images/s"
    return (
        f"The highest rate of single runs is {rate}: {single_line(spoken(best.curve.label), 120)}."
    )


def other_cells(findings: Findings, main: CurvePoint) -> str:
    """Return how the other cells on the same devices compare; empty where none has a verdict."""
    faster, slower, equal = judgements(findings, main.point).values()
    if len(equal) == 1 and not faster and not slower:
        least = number(equal[0].comparison.smallest, "share")
        name = equal[0].other_name
        return f"{name} shows no difference to it (these runs can show one of {least} or more)."
    parts = []
    for word, cells in (("faster", faster), ("slower", slower)):
        if cells:
            most = max(cells, key=lambda judged: abs(judged.change))
            change = number(abs(most.change), "share")
            are = count(len(cells), "is", "are")
            parts.append(f"{are} {word} ({most.other_name} the most, by {change})")
    if equal:
        parts.append(f"{count(len(equal), 'shows', 'show')} no difference")
    if not parts:
        return ""
    none_is = ""
    if slower and not faster:
        none_is = "none is faster; "
    others = count(len(faster) + len(slower) + len(equal), "other cell")
    return f"Of {others} on the same devices, {none_is}{', '.join(parts)}."


# ---- What NCCL settings changed -----------------------------------------------------------------


def settings_sentences(findings: Findings, main: CurvePoint) -> list[str]:
    """Return what NCCL settings change of the main point's own cell: those with an effect first."""
    changing, without_effect, lines = [], [], []
    for effect in effects_on(findings, main.point):
        if effect.compared.verdict in ("faster", "slower") or effect.other_transport:
            changing.append(effect)
        else:
            without_effect.append(effect)
    changing.sort(key=lambda effect: -abs(effect.compared.difference.value))
    for effect in changing[:MOST_EFFECTS]:
        compared, change = effect.compared, effect.compared.difference.value
        word = "faster"
        if change < 0:
            word = "slower"
        line = single_line(effect.setting, 60)
        if not compared.verdict:
            line += f" was {number(abs(change), 'share')} {word} than untouched in single runs"
        elif compared.verdict == NO_DIFFERENCE:
            line += f" shows no difference in {compared.rate} to untouched"
        else:
            size = estimate(scaled(compared.difference, math.copysign(1, change)), "share")
            line += f" is {size} {word} than untouched"
        causes = []
        if effect.other_transport:
            before, after = effect.transports
            instead = f"instead of {single_line(before, 40)}"
            causes.append(f"NCCL used {single_line(after, 40)} {instead}")
        lines.append(_with_causes(line, causes, [effect.exchange_ratio]))
    if not without_effect:
        return lines
    names, changes, ratios = [], [], []
    causes = ["NCCL used the same transport"]
    has_verdicts = True
    for effect in without_effect:
        names.append(single_line(effect.setting, 60))
        changes.append(abs(effect.compared.difference.value))
        ratios.append(effect.exchange_ratio)
        has_verdicts = has_verdicts and bool(effect.compared.verdict)
        if not all(effect.transports):
            causes = []
    s = "s" * (len(without_effect) == 1)
    line = f"{join_words(names)} show{s} no difference to untouched"
    if not has_verdicts:
        size = number(max(changes), "share")
        line = f"{join_words(names)} differ{s} from untouched by {size} at most in single runs"
    return [*lines, _with_causes(line, causes, ratios)]


def _with_causes(line: str, causes: Sequence[str], ratios: Sequence[float | None]) -> str:
    times_as_long = sorted(ratio for ratio in ratios if ratio is not None)
    if times_as_long and max(1 - times_as_long[0], times_as_long[-1] - 1) < SAME_TIME:
        causes = [*causes, "an exchange took as long"]
    elif times_as_long:
        times = " to ".join(dict.fromkeys((number(times_as_long[0]), number(times_as_long[-1]))))
        causes = [*causes, f"an exchange took {times} times as long"]
    if causes:
        line += f": {', and '.join(causes)}"
    return f"{line}."


# ---- Which wire limits cells on several hosts ---------------------------------------------------


def between_hosts(study: Study, point: Point) -> str:
    """Return how several hosts compare with one, and whether their network limits them.

    `2 hosts train 1.3 × the slowest of them alone: an exchange takes …`; empty on one host.
    """
    wires, hosts = None, 0
    for runs in study.runs:
        if runs.records[0].record_id in point.record_ids:
            wires, hosts = host_wires(runs), len(runs.cell.hosts)
            break
    if wires is None or wires.exchange_ms is None:
        return ""
    network = wires.worded or "the network between them"
    text = f"n exchange takes {number(wires.exchange_ms)} ms over {network}"
    if wires.gb_per_s:
        text += f" at {number(wires.gb_per_s)} GB/s"
    if wires.share is not None and wires.share <= WIRE_MEASURED:
        verb = "does not limit"
        if wires.share >= WIRE_LIMITS:
            verb = "limits"
        share = number(min(1.0, wires.share), "share")
        text += f", and this network {verb} it ({share} of what it carries is used)"
    start = "A"
    if point.node_efficiency is not None:
        ratio = number(point.node_efficiency.value * hosts, "ratio")
        start = f"{hosts} hosts train {ratio} × the slowest of them alone: a"
    return single_line(f"{start}{text}.", 400)


# ---- How sure the answer is, and why the devices train less together than alone -----------------


def certainty(study: Study, point: Point) -> str:
    """Return the intervals of the next run, or why they are not known."""
    rate = interval(point.rate, "rate")
    if rate:
        line = f"The next run would give {rate} images/s"
        share = interval(point.efficiency, "share").replace("\N{NO-BREAK SPACE}%", "")
        if share:
            line += f", an efficiency of {share} %"
        return f"{line} (95 % interval)."
    if any(len(runs.records) > 1 for runs in study.timed):
        return "Too few runs of equal cells are known to say what the next run would give."
    return "Every cell ran only once."


def doubt(study: Study, point: Point) -> str:
    """Return why checks cast doubt on the records of the point; empty where none does."""
    if not point.suspect:
        return ""
    reasons: list[str] = []
    for record in study.records_of(point.record_ids):
        if record.validity.verdict == "suspect":
            for text in record.validity.against.values():
                # The first clause says it without numbers.
                reasons.append(single_line(text.partition(":")[0], REASON_LENGTH))
    reasons = list(dict.fromkeys(reasons))
    line = f"Checks cast doubt on this: {'; '.join(reasons[:MOST_REASONS])}"
    if len(reasons) > MOST_REASONS:
        line += f"; and {len(reasons) - MOST_REASONS} more"
    return f"{line}."


def loss(study: Study, findings: Findings, main: CurvePoint) -> str:
    """Return where the loss comes from: waterfall, strategy `none` or the strategy's cost."""
    point = main.point
    for fall in findings.waterfalls:
        if (fall.gpus, fall.key) != (point.gpus, point.key):
            continue
        alone = f"{len(fall.gpus)} × the slowest GPU alone without a strategy"
        gap = number((fall.ideal.value - fall.measured.value) / fall.ideal.value, "share")
        line = f"{gap} of {number(fall.ideal.value, 'rate')} images/s ({alone}) is lost"
        part, has_intervals = largest_sure_part(fall)
        if part is not None:
            size = estimate(part.lost, "rate")
            line += f"; the largest sure cause is {part.name}: {size} images/s"
        elif has_intervals:
            line += "; no single cause stands out from the noise"
        return f"{line}."
    parts = []
    share = loss_against_none(findings, point)
    if share is not None:
        size = estimate(share, "share")
        parts.append(
            f"it loses {size} of what the same GPUs train without any exchange (strategy none)"
        )
    records = study.records_of(point.record_ids)
    cost_ms, is_of_next_run = None, False
    for runs in study.runs:
        if runs.records[0].record_id in point.record_ids:
            cost_ms, is_of_next_run = runs.next_run(COST), runs.floor(COST) is not None
    step_ms = median_of(records, "step/ms_median")
    if cost_ms is not None and cost_ms.low is not None and step_ms:
        size = f"{estimate(cost_ms)} ms"
        if not is_of_next_run:
            size = f"{central(cost_ms)} ms ({interval(cost_ms)} inside its runs)"
        parts.append(f"the strategy adds {size} to a step of {number(step_ms)} ms")
    if not parts:
        return ""
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


# ---- What to do next ----------------------------------------------------------------------------


def next_step(study: Study, findings: Findings, main: CurvePoint | None) -> str:
    """Return what to run to learn more: `To see how it scales, run with gpus=scale.`"""
    offers: list[tuple[str, str]] = []
    if main is not None and main.point.world_size == 1:
        # A driver that names a single GPU has no other.
        records = study.records_of(main.point.record_ids)
        if any(len(gpus_of(record.environment)) != 1 for record in records):
            offers.append(("see how it scales", "gpus=scale"))
    elif main is not None and not findings.waterfalls:
        aim = "see where the loss comes from"
        if main.point.efficiency is None:
            aim = "see the efficiency and where the loss comes from"
        offers.append((aim, "waterfall=true"))
    if findings.comparisons and not any(each.verdict for each in findings.comparisons):
        offers.append(("learn which differences are real", "repeats=5"))
    elif study.timed and all(runs.floor(RATE) is None for runs in study.timed):
        offers.append(("learn how far runs differ", "repeats=5"))
    if not offers:
        return COMPARE
    (aim, option), *rest = offers
    line = f"To {aim}, run with {option}"
    for aim, option in rest:
        line += f"; to {aim}, with {option}"
    return f"{line}."
