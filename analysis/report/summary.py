"""The first screen of a report: what was measured, the answer, how sure it is, why, and what next.

At most five sentences, whatever the study holds.
"""

from collections.abc import Mapping, Sequence

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import PREFIX
from analysis.report.cell_numbers import first_metric
from analysis.report.explanations import COMPARE, between_hosts, loss, next_step, settings_sentences
from analysis.report.main_point import NO_DIFFERENCE, Judged, MainPoint, judged_of, main_point
from analysis.report.numbers import central, interval, number
from analysis.report.section import RATE, Section, first_records, median_and_interval
from analysis.report.sections.benchmarks import largest_cells
from analysis.report.sections.comparisons import differences
from analysis.study.estimates import Findings, Point
from analysis.study.names import gpu_ids, ran_alone, run_name, spoken, things_of, unit_of
from analysis.study.provenance import hardware
from analysis.study.runs import named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from benchmarks.record import Record, metrics
from conf.cell import compress_hosts

SENTENCES = 5
MOST_NAMES = 3  # models, strategies, benchmarks or machines; of more the number is given
MOST_RATES = 4  # of models beside the main point's
MUCH_FASTER = 1.2  # times the rate: single runs show it, though they have no verdict
REASON_LENGTH = 60  # characters of a reason; instead of a longer one stands its code
MOST_REASONS = 3


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
