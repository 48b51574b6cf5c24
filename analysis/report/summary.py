"""The sentences of a report: the answer in two, what was measured, why, and what to do next.

At most five sentences, whatever the study holds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from analysis.findings.baselines import WITHOUT
from analysis.findings.communication import COST
from analysis.findings.comparisons import TIED, Ranking
from analysis.findings.examine import Findings
from analysis.findings.links import host_wires
from analysis.findings.scaling import Point
from analysis.findings.waterfall import OVERHEAD
from analysis.report.cell_numbers import first_metric
from analysis.report.main_point import (
    CurvePoint,
    effects_on,
    largest_sure_part,
    loss_against_none,
    main_point,
    names_of,
    points_of,
    ranking_of,
)
from analysis.report.numbers import THIN, central, estimate, interval, number, texts, two_digits
from analysis.report.report_files import batch_of
from analysis.report.section import (
    RATE,
    Section,
    invalid_records,
    median_and_interval,
    next_command,
    words_of,
)
from analysis.report.sections.benchmarks_section import largest_cells
from analysis.report.sections.comparisons_section import differences
from analysis.study.draws import scaled
from analysis.study.measured_numbers import FASTER, NO_DIFFERENCE, SLOWER, UNKNOWN
from analysis.study.names import (
    BETWEEN,
    gpu_ids,
    gpu_list,
    label,
    named_gpus,
    parts,
    run_name,
    short_names,
    spoken,
    unit_of,
)
from analysis.study.provenance import gpus_of, hardware
from analysis.study.runs import named
from analysis.study.study import Study
from analysis.text import count, join_words, sentence, single_line
from analysis.validity.checks import serious
from benchmarks.record import Record, metrics
from conf.cell import compress_hosts

SENTENCES = 5
MOST_NAMES = 3  # models, strategies, benchmarks or machines; of more the number is given
MOST_RATES = 4  # of models beside the main point's
REASON_LENGTH = 160  # characters of a reason
MOST_REASONS = 2
MOST_TIED = 4  # configurations that are named
MOST_EFFECTS = 2  # NCCL settings that have a sentence of their own
SAME_TIME = 0.05  # share by which exchanges may differ that take as long
WIRE_LIMITS = 0.8  # an exchange that uses this share of what the wire carries is limited by it
WIRE_MEASURED = 1.1  # above it the reference was slower than the wire, and says nothing of it
COMPARE = (
    "To compare this study with another machine, version or date, "
    "run python -m analysis compare THIS_STUDY OTHER_STUDY."
)


def sentences(study: Study, findings: Findings, of_benchmarks: Mapping[str, Section]) -> list[str]:
    """Return at most SENTENCES sentences; `of_benchmarks` are the sections of benchmarks."""
    if not study.records:
        return ["This folder holds no record that can be read."]
    main = main_point(study, findings)
    subject, invalid = measured(study), all_invalid(study)
    following = ""
    if main is not None or study.usable:
        following = next_step(study, findings, main)
    if main is None:
        room = SENTENCES - 1 - bool(invalid) - (following not in ("", COMPARE))
        lines = _benchmark_sentences(study, of_benchmarks)
        if any(comparison.verdict for comparison in findings.comparisons):
            lines = [*lines[: room - 1], differences(findings)]
        lines = list(filter(None, [invalid, *lines[:room], subject, following]))
        return list(map(words_of(study), lines[:SENTENCES]))
    ranking = ranking_of(study, findings, main.point)
    settings, order = settings_sentences(findings, main), ranked(study, ranking)
    network, lost = between_hosts(study, main.point), loss(study, findings, main)
    models = other_models(findings, main)
    if main.point.suspect:  # nothing stands as a fact
        settings = [f"In these runs {line}" for line in settings]
        network = ""
    own = [answer(study, main), definition(main.point)]
    answers = [*settings, *order, *own]
    is_doubtful = ranking is not None and ranking.suspect_leader is not None
    if is_doubtful and main.point.suspect and main.point.efficiency is None:
        answers = [*settings, *order]
    elif ranking is not None and ranking.fastest and not is_doubtful:
        answers = [own[0], *settings, *order, own[1]]
        if main.point.efficiency is None:
            answers = [*settings, *order]
    elif main.point.efficiency is not None or not answers[:-2]:
        answers = [*own, *settings, *order]
    beside = own[0] if own[0] in answers else answers[0]
    answers[answers.index(beside)] = f"{beside} {models}".strip()
    answers = list(filter(None, [doubt(study, main.point), answers[0], network, *answers[1:]]))
    # The last ones are left out where there are more than a screen has room for.
    by_weight = [invalid, *answers[:2], subject]
    if following != COMPARE:
        by_weight.append(following)
    explained = [lost, unknown_variation(study, main.point)]
    by_weight += [*answers[2:3], *explained, *answers[3:], following]
    kept = list(filter(None, dict.fromkeys(by_weight)))[:SENTENCES]
    in_order = dict.fromkeys([invalid, *answers, subject, *explained, following])
    return list(map(words_of(study), (line for line in in_order if line in kept)))


def _benchmark_sentences(study: Study, sections: Mapping[str, Section]) -> list[str]:
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
            entry = metrics.entry_of(name)
            text = f"{single_line(entry.title, 80)} {median_and_interval(runs, name)}"
            if entry.unit not in ("", "%"):
                text += f" {entry.unit}"
            lines.append(f"{single_line(run_name(record))}: {text}.")
    if study.usable:
        return lines or ["No run measured images per second or a link."]
    subject = f"None of {len(study.records):,} runs gave a number"
    if len(study.records) == 1:
        subject = "The only run gave no number"
    return [f"{subject} that can be used; the report says why (“Validity, and what was left out”)."]


def measured(study: Study) -> str:
    """Return what was measured and on how many devices of which machine."""
    records: Sequence[Record] = study.usable or study.records
    is_done, trained = False, []
    for record in records:
        is_done = is_done or record.state == "finished"
        counts_images = RATE in record.metrics or named(record, "benchmark") == "throughput"
        if counts_images and not record.cell.runs_script:
            trained.append(record)
    records = trained or records
    with_model = [record for record in records if record.cell.trains]
    models = _several(with_model, "model")
    if trained:
        exchanging = [record for record in records if named(record, "strategy") != WITHOUT]
        way = "without an exchange"
        if exchanging:
            way = f"with {_several(exchanging, 'strategy', 'strategies')}"
            way += " (and, to compare, without an exchange)" * (len(exchanging) < len(records))
        verb = "was" if len(_names(records, "model")) == 1 else "were"
        if not is_done:
            verb += " to be"
        subject = f"{models} {verb} trained {way}"
        pairs = {(named(record, "model"), named(record, "strategy")) for record in records}
        if len(pairs) < len(_names(records, "model")) * len(_names(records, "strategy")):
            each = [single_line(" with ".join(pair), 160) for pair in sorted(pairs)]
            subject = f"{join_words(each, MOST_NAMES)} {verb} trained"
        subject += f" on {_devices(study, records)}"
        batches = set(map(batch_of, records))
        if len(batches) == 1:
            subject += f", with {batches.pop()}"
        return f"{subject}."
    subject = _several(records, "benchmark")
    if len(_names(records, "benchmark")) <= MOST_NAMES:
        subject = f"benchmark={subject}"
    verb = "ran" if is_done else "failed"
    if models:
        verb += f" with {models}"
    return f"{subject} {verb} on {_devices(study, records)}."


def _names(records: Sequence[Record], group: str) -> list[str]:
    return list(dict.fromkeys(single_line(named(record, group), 80) for record in records))


def _several(records: Sequence[Record], group: str, plural: str = "") -> str:
    names = _names(records, group)
    if len(names) > MOST_NAMES:
        return count(len(names), group, plural)
    return join_words(names)


def _devices(study: Study, records: Sequence[Record]) -> str:
    # Records on a part of the hosts of others, the baselines of several hosts, name no machine.
    sizes, host_sets = set(), set()
    for record in records:
        sizes.add(record.cell.world_size)
        host_sets.add(frozenset(record.cell.every_host))
    units = "GPU" if sizes == {1} else "GPUs"
    preposition = "of" if unit_of(study) == "GPUs" else "on"
    machines = []
    for record in records:
        hosts = frozenset(record.cell.every_host)
        if hosts and any(hosts < larger for larger in host_sets):
            continue
        machine = single_line(hardware(record).removeprefix("CPU workers on "))
        if hosts:
            machine += f" ({compress_hosts(sorted(hosts))})"
        elif unit_of(study) == "GPUs":
            machine = f"a machine with {machine}"
        machines.append(machine)
    where = join_words(list(dict.fromkeys(machines)), MOST_NAMES)
    return f"{join_words(list(map(str, sorted(sizes))))} {units} {preposition} {where}"


def answer(study: Study, main: CurvePoint) -> str:
    """Return the rate and the efficiency of the point that the study is about."""
    curve, point = main
    trained = [record for record in study.usable if record.cell.trains]
    subject = point.key["model.name"]
    if len({*_names(trained, "strategy")} - {WITHOUT}) > 1:
        subject += f" with strategy={point.key['strategy.name']}"
    if curve.details:
        subject += f" ({', '.join(curve.details).replace(BETWEEN, ', ')})"
    devices = count(point.world_size, "GPU")
    subsets = {runs.gpus for runs in study.timed if runs.cell.world_size == point.world_size}
    if isinstance(point.gpus[0], str):
        devices += f" ({named_gpus(point.gpus)})"
    elif len(subsets) > 1:
        devices += f" ({gpu_ids(point.gpus)})"
    record, *_ = study.records_of(point.record_ids)
    verb = "run" if record.cell.runs_script else "train"
    verb += "s" * (point.world_size == 1)
    line = f"{devices} {verb} {single_line(subject, 120)}"
    rate, ends = texts(point.rate, "rate")
    if point.suspect:
        rate = f"about {two_digits(point.rate.value)}"  # no digits that nobody knows
    line += f" at {rate} images/s"
    if ends and point.suspect:
        ends = f"{two_digits(point.rate.low or 0.0)} to {two_digits(point.rate.high or 0.0)}"
    if ends:
        line += f" ({ends})"
    if point.efficiency is None:
        return f"{line}."
    if point.suspect:
        return f"{line}, an efficiency of about {100 * point.efficiency.value:.0f}{THIN}%."
    share = replace(point.efficiency, value=float(point.efficiency.value))
    return f"{line}, an efficiency of {estimate(share, 'share')}."


def _suspect_by(codes: Sequence[str]) -> str:
    word = "check" if len(codes) == 1 else "checks"
    return f" (suspect by the {word} {join_words([f'‘{code}’' for code in codes])})"


def definition(point: Point) -> str:
    """Return what the efficiency of a point is: `95.0 % = 190 ÷ (2 × 100), …`; else empty."""
    if point.efficiency is None or point.baseline is None or point.slowest is None or point.suspect:
        return ""
    alone = central(point.baseline, "rate")
    line = f"Efficiency {number(float(point.efficiency.value), 'share')} = "
    line += f"{central(point.rate, 'rate')} ÷ ({point.world_size} × {alone}), "
    line += f"with {alone} images/s on {named_gpus([point.slowest])} alone"
    if point.baseline_doubts:
        line += _suspect_by(point.baseline_doubts)
    if point.key.get("global_batch_size"):
        line += " with all images of a step"
    if not point.without_baseline:
        return f"{line}, the slowest."
    verb = "was" if len(point.without_baseline) == 1 else "were"
    return f"{line}; {named_gpus(point.without_baseline)} {verb} not measured alone."


def other_models(findings: Findings, main: CurvePoint) -> str:
    """Return the rates of the other models, on the same GPUs where they ran there; else empty."""

    def distance(each: CurvePoint) -> tuple[bool, int]:
        differing = each.point.key.items() ^ main.point.key.items()
        return each.point.gpus != main.point.gpus, len(differing)

    texts: dict[str, str] = {}
    for _, point in sorted(points_of(findings.scaling.curves), key=distance):
        name = point.key["model.name"]
        if name == main.point.key["model.name"] or point.suspect or name in texts:
            continue
        texts[name] = f"{single_line(name, 80)} at {central(point.rate, 'rate')} images/s"
        if point.gpus != main.point.gpus:
            texts[name] += f" on {gpu_list(point.gpus)}"
    return f"Also measured: {join_words(list(texts.values()), MOST_RATES)}." if texts else ""


def ranked(study: Study, ranking: Ranking | None) -> list[str]:
    """Return which configuration is fastest, with which it is tied, and which are slower."""
    if ranking is None:
        return []
    names = names_of(study, [each.runs for each in ranking.configurations])
    words = {runs: single_line(spoken(name), 80) for runs, name in names.items()}
    of_first = ranking.configurations[0].runs
    devices = count(of_first.cell.world_size, "GPU")
    shared = dict.fromkeys(parts(study, of_first))
    for each in ranking.configurations:
        shared = dict.fromkeys(word for word in parts(study, each.runs) if word in shared)
    if shared:
        devices += f" ({single_line(', '.join(shared), 120)})"
    leader = ranking.suspect_leader
    if leader is not None:
        why = f"{words[leader.runs]} has the highest rate, but all its runs are suspect"
        if all(each.runs.all_suspect for each in ranking.configurations):
            why = "every run is suspect" + " or invalid" * bool(invalid_records(study))
        return [f"The fastest on {devices} is not known: {why}."]
    first = ranking.fastest
    if first is None:
        highest, second, *_ = ranking.configurations
        return [
            f"Highest rate on {devices}: {words[highest.runs]}, {central(highest.rate, 'rate')} "
            f"{ranking.rate.name}, then {words[second.runs]}, {central(second.rate, 'rate')}; "
            "too few repeats to test the difference."
        ]
    among = "" if ranking.fastest_leads else " (only configurations with enough repeats)"
    line = f"Fastest on {devices}{among}: {words[first.runs]}, {estimate(first.rate, 'rate')}"
    line += f" {ranking.rate.name}"
    if first.runs.doubts:
        line += _suspect_by(first.runs.doubts)
    tied = [words[each.runs] for each in ranking.standing(TIED)]
    if tied:
        line += f", tied with {join_words(tied, MOST_TIED)}"
    lines = [f"{line}."]
    slower = ranking.standing(SLOWER)
    if slower:
        last = min(slower, key=lambda each: each.behind.value).runs
        who = slowest = words[last]
        if len(slower) > 1:
            who, slowest = f"{len(slower)} others", f"The slowest, {slowest},"
        sizes = sorted(-each.behind.value for each in slower)
        least, most = number(sizes[0], "share"), number(sizes[-1], "share")
        ends = dict.fromkeys([least.removesuffix(f"{THIN}%"), most.removesuffix(f"{THIN}%")])
        line = f"Slower than {words[first.runs]}: {who}, by {' to '.join(ends)}{THIN}%."
        own, other = last.next_run(COST), first.runs.next_run(COST)
        if own and other and (own.low or 0) > (other.high or math.inf):
            line += f" {slowest} loses {number(own.value)} ms of each step to its exchange; "
            line += f"{words[first.runs]} loses {number(other.value)} ms."
        lines.append(line)
    untested = [words[each.runs] for each in ranking.standing(UNKNOWN)]
    if untested:
        lines.append(f"Too few repeats to compare: {join_words(untested, MOST_TIED)}.")
    return lines


def settings_sentences(findings: Findings, main: CurvePoint) -> list[str]:
    """Return what NCCL settings change of the main point's own cell: those with an effect first."""
    changing, without_effect, lines = [], [], []
    for effect in effects_on(findings, main.point):
        if effect.compared.verdict in (FASTER, SLOWER) or effect.other_transport:
            changing.append(effect)
        else:
            without_effect.append(effect)
    changing.sort(key=lambda effect: -abs(effect.compared.difference.value))
    for effect in changing[:MOST_EFFECTS]:
        compared, change = effect.compared, effect.compared.difference.value
        word = "slower" if change < 0 else "faster"
        line = single_line(effect.setting, 60)
        if not compared.verdict:
            line += f" was {number(abs(change), 'share')} {word} than NCCL's default in single runs"
        elif compared.verdict == NO_DIFFERENCE:
            line += f" shows no significant difference in {compared.rate} from NCCL's default"
        else:
            size = estimate(scaled(compared.difference, math.copysign(1, change)), "share")
            line += f" is {size} {word} than NCCL's default"
        causes = []
        if effect.other_transport:
            before, after = effect.transports
            instead = f"instead of {single_line(before, 40)}"
            causes.append(f"NCCL used {single_line(after, 40)} {instead}")
        lines.append(_with_causes(line, causes, [effect.exchange_ratio]))
    if not without_effect:
        return lines
    names, changes, ratios = [], [], []
    causes = ["NCCL used the same transport as by default"]
    has_verdicts = True
    for effect in without_effect:
        names.append(single_line(effect.setting, 60))
        changes.append(abs(effect.compared.difference.value))
        ratios.append(effect.exchange_ratio)
        has_verdicts = has_verdicts and bool(effect.compared.verdict)
        if not all(effect.transports):
            causes = []
    s = "s" * (len(without_effect) == 1)
    line = f"{join_words(names)} show{s} no significant difference from NCCL's default"
    if not has_verdicts:
        size = number(max(changes), "share")
        line = f"{join_words(names)} differ{s} from NCCL's default by at most {size} (single runs)"
    return [*lines, _with_causes(line, causes, ratios)]


def _with_causes(line: str, causes: Sequence[str], ratios: Sequence[float | None]) -> str:
    ends = sorted(ratio for ratio in ratios if ratio is not None)
    if ends and max(1 - ends[0], ends[-1] - 1) < SAME_TIME:
        causes = [*causes, "an exchange took the same time"]
    elif ends:
        times = " to ".join(dict.fromkeys((number(ends[0]), number(ends[-1]))))
        causes = [*causes, f"an exchange took {times} times as long"]
    if causes:
        return f"{line}. {sentence(', and '.join(causes))}"
    return f"{line}."


def between_hosts(study: Study, point: Point) -> str:
    """Return how several hosts compare with one, and whether their network limits them.

    `2 hosts train 1.3 times as fast as the slowest one alone. …`; empty on one host.
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
        verb = "limits" if wires.share >= WIRE_LIMITS else "does not limit"
        share = number(min(1.0, wires.share), "share")
        text += f": {share} of the bandwidth of this network, which {verb} the exchange"
    start = "A"
    if point.node_efficiency is not None:
        ratio = number(point.node_efficiency.value * hosts, "ratio")
        start = f"{hosts} hosts train {ratio} times as fast as the slowest one alone. A"
    return single_line(f"{start}{text}.", 400)


def all_invalid(study: Study) -> str:
    """Return the configurations without any run that counts that a check refused, and why."""
    names = short_names(record.name for record in study.records)
    usable = {record.name for record in study.usable}
    reasons: dict[str, str] = {}
    for record in invalid_records(study):
        why = [*serious(record.validity).values()]
        if record.name not in usable and why:
            reasons.setdefault(single_line(spoken(names[record.name]), 80), why[0])
    if not reasons:
        return ""
    first, *others = reasons
    line = f"{first} is invalid: "
    if others:
        line = f"{join_words([*reasons], MOST_NAMES)} are invalid; {first}: "
    return single_line(f"{line}{single_line(reasons[first], REASON_LENGTH).rstrip('.')}.", 400)


def unknown_variation(study: Study, point: Point) -> str:
    """Return that the run-to-run variation of a point is not known, and why; else empty."""
    if interval(point.rate, "rate"):
        return ""
    if any(len(runs.records) > 1 for runs in study.timed):
        return "Too few repeated runs of this configuration: its run-to-run variation is unknown."
    return "Single runs: the run-to-run variation is unknown."


def doubt(study: Study, point: Point) -> str:
    """Return why checks cast doubt on the records of the point; empty where none does."""
    if not point.suspect:
        return ""
    by_code: dict[str, str] = {}
    records = study.records_of(point.record_ids)
    for record in records:
        if record.validity.verdict == "suspect":
            by_code = {**record.validity.against, **by_code}
    reasons = []
    for text in by_code.values():
        reason = text.replace(" this run ", " a run ") if len(records) > 1 else text
        reasons.append(single_line(sentence(reason), REASON_LENGTH))
    doubtful = sum(record.validity.verdict == "suspect" for record in records)
    first = "Not reliable."
    if doubtful < len(records):
        runs = next(runs for runs in study.runs if runs.record_ids == point.record_ids)
        whose = f"{spoken(label(study, runs))} on {named_gpus(point.gpus)}"
        first = f"Checks cast doubt on {doubtful} of {count(len(records), 'run')} of {whose}."
    line = " ".join([first, *reasons[:MOST_REASONS]])
    if len(reasons) > MOST_REASONS:
        line += f" And {count(len(reasons) - MOST_REASONS, 'more reason')}."
    return line


def loss(study: Study, findings: Findings, main: CurvePoint) -> str:
    """Return where the loss comes from: waterfall, strategy `none` or the strategy's cost."""
    point = main.point
    where = " in these runs" if point.suspect else ""
    for fall in findings.waterfalls:
        if (fall.gpus, fall.key) != (point.gpus, point.key):
            continue
        lost = fall.ideal.value - fall.measured.value
        of_ideal = number(lost / fall.ideal.value, "share")
        line = f"Compared with {point.world_size} × the slowest GPU alone with strategy=none "
        line += f"({number(fall.ideal.value, 'rate')} images/s), {number(lost, 'rate')} images/s "
        line += f"or {of_ideal} are lost{where}"
        part, has_intervals = largest_sure_part(fall)
        if part is not None:
            size = estimate(part.lost, "rate")
            cause = part.name
            if cause == OVERHEAD:
                cause = "strategy overhead that one GPU has too"
            line += f". Largest confirmed cause: {size} of these {number(lost, 'rate')} are {cause}"
        elif has_intervals:
            line += "; no cause is significant"
        return f"{line}."
    parts = []
    share = loss_against_none(findings, point)
    if share is not None:
        size = estimate(share, "share")
        parts.append(f"{size} of the rate, compared with runs with strategy=none")
    runs = next(each for each in study.runs if each.record_ids == point.record_ids)
    cost_ms, step_ms = runs.next_run(COST), runs.median("step/ms_median")
    if cost_ms is not None and cost_ms.low is not None and step_ms:
        size = f"{estimate(cost_ms)} ms"
        if runs.floor(COST) is None:
            of_runs = f"95 % interval within one run: {interval(cost_ms)}"
            size = f"{central(cost_ms)} ms ({of_runs})"
        compared = "compared with exchange-free steps of the same runs"
        parts.append(f"{size} of each {number(step_ms)} ms step, {compared}")
    if not parts:
        return ""
    return f"Overhead of {point.key['strategy.name']}{where}: {'; '.join(parts)}."


def next_step(study: Study, findings: Findings, main: CurvePoint | None) -> str:
    """Return what to run to learn more: `To see how it scales, run with gpus=scale.`"""
    offers: list[tuple[str, str]] = []
    if main is not None and main.point.world_size == 1:
        # A driver that names a single GPU has no other.
        records = study.records_of(main.point.record_ids)
        if any(len(gpus_of(record.environment)) != 1 for record in records):
            offers.append(("measure scaling", "gpus=scale"))
    elif main is not None and study.trains and not findings.waterfalls:
        aim = "see what costs speed"
        if main.point.efficiency is None:
            aim = "measure the efficiency and see what costs speed"
        offers.append((aim, "waterfall=true"))
    if findings.comparisons and not any(each.verdict for each in findings.comparisons):
        offers.append(("test which differences are significant", "repeats=5"))
    elif study.timed and all(runs.floor(RATE) is None for runs in study.timed):
        offers.append(("measure run-to-run variation", "repeats=5"))
    if not offers:
        return COMPARE
    (aim, option), *_ = offers
    return f"To {aim}: {next_command(study, option)}"
