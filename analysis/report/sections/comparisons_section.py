"""Configurations against each other: strategies, settings, real differences, variation, studies."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from analysis.findings.communication import (
    COST,
    DISAGREEMENT,
    EXPOSED,
    HIDDEN,
    TRACE_EXPOSED,
    Communication,
    disagreement,
)
from analysis.findings.comparisons import Comparison, SettingEffect
from analysis.findings.examine import Findings
from analysis.report.figure import COLOURS, HIGHLIGHT
from analysis.report.main_point import DEFAULTS, points_of
from analysis.report.numbers import estimate, number, of_metric
from analysis.report.section import RATE, Section, about_costs, about_intervals, verdict_of
from analysis.report.table import Column, Table, Value, columns_of, metric_column
from analysis.study.conditions import is_of_training
from analysis.study.draws import scaled
from analysis.study.intervals import half_width
from analysis.study.measured_numbers import NO_DIFFERENCE
from analysis.study.names import (
    BETWEEN,
    UNTOUCHED,
    gpu_ids,
    gpu_list,
    label,
    ran_alone,
    short_names,
)
from analysis.study.names import unit_of as unit_of_study
from analysis.study.noise_floor import Floor, FloorGroup
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import count, first_lines, join_words, single_line
from benchmarks.record.metrics import metric as entry_of

EXCHANGE_MS, EXCHANGE_SHARE = "comm/exchange_ms", "comm/ideal_ratio"
BUSBW = "comm/busbw_gb_per_s"
TRACE_HIDDEN, TRACE_ALL = "trace/overlapped_ms_per_step", "trace/comm_ms_per_step"
NO_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks
MOST_SOURCES = 4  # cells that show a noise floor; of more the number is given
VERDICT_LOOKS = {"faster": (COLOURS["blue"][0], ">"), "slower": (HIGHLIGHT, "<")}
VERDICT_WORDS = {NO_DIFFERENCE: "not significant", "": "not tested"}
MOST_MATRICES = 2
WIDTH = itemgetter("width")  # of a noise floor


def strategies(study: Study, findings: Findings) -> Section | None:
    """Return every set of equal cells with its rate, its exchange and what of it is exposed."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    points: dict[str, dict[str, Any]] = {}
    for curve, point in points_of(findings.scaling.curves):
        shown = {"cell": curve.label, "images_per_second": point.rate}
        points |= dict.fromkeys(point.record_ids, shown)
    communication = {cell.record_ids[0]: cell for cell in findings.communication}
    rows = []
    for runs in study.runs:
        exchanges = runs.median(EXCHANGE_MS) is not None
        if runs.cell.world_size > 1 and (exchanges or runs.median(RATE) is not None):
            record_id = runs.records[0].record_id
            row = _strategy_row(runs, communication.get(record_id))
            rows.append(row | points.get(record_id, {}))
    names = short_names(str(row["cell"]) for row in rows)
    rows.sort(key=lambda row: (-row["world_size"], -(row["median_rate"] or 0.0)))
    is_on_links = unit_of_study(study) == "GPUs"  # their GB/s: section on links
    without_effect: Counter[str] = Counter()
    for record in study.usable:
        without_effect[record.validity.codes.get(NO_EFFECT, "")] += 1
    columns = (
        Column("cell", "configuration", lambda row: names[row["cell"]]),
        metric_column("exchange_ms", EXCHANGE_MS, bounded=True),
        metric_column("cost_ms", COST, heading="overhead ms", bounded=True),
        Column("model", "model", shown=False),
        Column("strategy", "strategy", shown=False),
        Column("gpus", "GPUs"),
        Column("runs", "runs", kind="count", shown=False),
        replace(metric_column("images_per_second", RATE, bounded=True), shown=not study.timed),
        replace(metric_column("busbw_gb_per_s", BUSBW), shown=not is_on_links),
        metric_column("of_reference", EXCHANGE_SHARE),
        Column("reference", "reference"),
        metric_column("exposed_ms", EXPOSED),
        metric_column("hidden_share", HIDDEN),
        Column("hidden_by_trace", "hidden by trace", kind=of_metric(HIDDEN)),
        metric_column("exposed_by_trace_ms", TRACE_EXPOSED),
        metric_column("difference_ms", DISAGREEMENT),
        Column("mark", "verdict"),
    )
    table = Table.of(
        "strategies",
        "Exchange: alone, without training. Overhead: what the strategy adds to a step. Exposed: "
        "what it adds beyond its overhead on one GPU. Hidden: the share of the exchange that is "
        f"not exposed.{about_intervals(study)}{about_costs(study)}",
        columns,
        rows,
        marked=lambda row: row["is_suspect"],
    )
    lines = []
    for text, number_of in without_effect.items():
        if text and rows:
            lines.append(f"{single_line(text, 300)} ({count(number_of, 'run')}).")
    title = "Gradient exchange and strategy overhead"
    return Section("strategies", title, tuple(first_lines(lines)), tables=(table,))


def _strategy_row(runs: Runs, communication: Communication | None) -> dict[str, Any]:
    record = runs.records[0]
    hidden_ms, total_ms = runs.median(TRACE_HIDDEN), runs.median(TRACE_ALL)
    references = {str(each.checks.get("reference") or "") for each in runs.records}
    row: dict[str, Any] = {
        "cell": record.name,
        "model": runs.cell.model.name,
        "strategy": runs.strategy,
        "gpus": gpu_ids(runs.gpus),
        "world_size": runs.cell.world_size,
        "median_rate": runs.median(RATE),
        "runs": len(runs.records),
        "images_per_second": runs.next_run(RATE),
        "exchange_ms": runs.next_run(EXCHANGE_MS),
        "busbw_gb_per_s": runs.median(BUSBW),
        "of_reference": runs.median(EXCHANGE_SHARE),
        "reference": ", ".join(sorted(filter(None, references))),
        "cost_ms": runs.next_run(COST),
        "exposed_by_trace_ms": runs.median(TRACE_EXPOSED),
        "is_suspect": runs.suspect,
        "mark": verdict_of(runs.records),
    }
    if communication is not None:
        row["exposed_ms"] = communication.exposed_ms
        row["hidden_share"] = communication.hidden_share
    if hidden_ms is not None and total_ms:
        row["hidden_by_trace"] = hidden_ms / total_ms
    measured = {}
    for metric, key in ((TRACE_EXPOSED, "exposed_by_trace_ms"), (EXPOSED, "exposed_ms")):
        if row.get(key) is not None:
            measured[metric] = row[key]
    row["difference_ms"] = disagreement(measured).get(DISAGREEMENT)
    return row


def settings(study: Study, findings: Findings) -> Section | None:
    """Return the transport, the exchange and the rate with each setting and without; else None."""
    if not findings.settings:
        return None

    def default(effect: SettingEffect) -> str:
        parts = effect.compared.first.split(BETWEEN)[1:]  # without its GPUs, which have a column
        kept = [part for part in parts if not part.endswith(f" {UNTOUCHED}")]
        return single_line(BETWEEN.join(kept))

    columns = (
        Column("setting", "setting", "setting"),
        Column("difference", "rate changes by", "compared.difference", "change", True),
        Column("verdict", "verdict", lambda row: verdict_word(row.compared.verdict)),
        Column("cell", "against", default),
        Column("gpus", "GPUs", lambda row: gpu_ids(row.compared.gpus)),
        Column("transport_untouched", "transport by default", lambda row: row.transports[0]),
        Column("transport", "transport with it", lambda row: row.transports[1]),
        Column("exchange_ms_untouched", "exchange ms", lambda row: row.exchange_ms[0], "number"),
        Column("exchange_ms", "with it", lambda row: row.exchange_ms[1], "number"),
        Column("exchange_ratio", "times as long", "exchange_ratio", "ratio"),
        Column("rate", "rate", "compared.rate"),
    )
    caption = (
        "Each NCCL setting against NCCL's default; the change of the rate with its 95 % interval."
    )
    table = Table.of("settings", caption, columns, findings.settings)
    lines: tuple[str, ...] = ()
    if not all(effect.compared.verdict for effect in findings.settings):
        lines = ("Not tested: single runs do not show the run-to-run variation.",)
    return Section("settings", "NCCL settings", lines, tables=(table,))


def comparisons(study: Study, findings: Findings) -> Section | None:
    """Return the verdicts, and how far the machine drifted; None without either."""
    pairs = findings.comparisons
    lines = []
    if pairs:
        lines.append(differences(findings))
    rates = {pair.rate for pair in pairs}
    if not all(map(is_of_training, rates)):
        metrics = []
        for rate in study.rates:
            metric = f"1 ÷ {rate.metric}" if rate.is_time else rate.metric
            if rate.name in rates:
                metrics.append(f"{rate.name} ({metric})")
        lines.append(f"Compared: {join_words(metrics)}; more is faster.")
    for name, drift in findings.drifts.items():
        in_rate = f" in {name}" if len(study.rates) > 1 else ""
        lines.append(
            "The first configuration ran once more at the end: its rate changed by "
            f"{number(drift, 'change')}{in_rate}."
        )
    if not lines:
        return None
    lines = list(map(single_line, lines))
    tables = _comparison_tables(study, findings)
    return Section("comparisons", "Which differences are significant", tuple(lines), tables=tables)


def _comparison_tables(study: Study, findings: Findings) -> tuple[Table, ...]:
    names = _short_names(findings.comparisons)
    columns = (
        Column("first", "baseline", lambda pair: names[pair.first]),
        Column("second", "configuration", lambda pair: names[pair.second]),
        Column("asked", "differ in", "asked"),
        Column("rate", "rate", "rate", shown=len(study.rates) > 1),
        Column("first_runs", "runs of baseline", lambda pair: pair.runs[0], "count", shown=False),
        Column("second_runs", "runs", lambda pair: pair.runs[1], "count", shown=False),
        Column("difference", "difference", "difference", "change", True),
        Column("smallest", "detectable", "smallest", "share"),
        Column("verdict", "verdict", lambda pair: verdict_word(pair.verdict)),
        Column("why", "note", "why"),
    )
    matrices, ordered, listed = list[Table](), list[Comparison](), set[int]()
    for group in _groups(findings):
        ordered += group
        if not any(pair.verdict for pair in group):
            continue
        if len(group) > 2 and len(matrices) < MOST_MATRICES:
            matrices.append(_matrix(group, f"matrix-{len(matrices) + 1}"))
        else:
            listed |= {id(pair) for pair in group if pair.first_key == group[0].first_key}
    caption = (
        "Each configuration against its baseline, with the 95 % interval of the difference. "
        "Detectable: the smallest increase that these runs can show (80 % power)."
    )
    return (
        *matrices,
        Table.of("comparisons", caption, columns, ordered, shown=lambda pair: id(pair) in listed),
    )


def verdict_word(verdict: str) -> str:
    """Return a verdict in the words of the page."""
    return VERDICT_WORDS.get(verdict, verdict)


def _groups(findings: Findings) -> list[list[Comparison]]:
    """Return the pairs that differ in the same thing on the same GPUs, each second against one that
    came before it; the first of the first pair is the baseline.
    """
    groups: dict[Any, list[Comparison]] = defaultdict(list)
    for pair in findings.comparisons:
        same = {name: value for name, value in pair.first_key.items() if name not in pair.differing}
        groups[pair.asked, pair.rate, pair.gpus, frozenset(same.items())].append(pair)
    ordered = []
    for group in groups.values():
        keys = []
        for pair in group:
            keys += [pair.first_key, pair.second_key]
        baseline = next((key for key in keys if DEFAULTS.items() <= key.items()), keys[0])
        against = [pair.swapped() if pair.second_key == baseline else pair for pair in group]
        ordered.append(sorted(against, key=lambda pair: pair.first_key != baseline))
    return ordered


def _matrix(group: Sequence[Comparison], name: str) -> Table:
    ranks: dict[str, float] = defaultdict(float)
    pair_of = {}
    for pair in group:
        ranks[pair.first] -= math.log1p(pair.difference.value)
        ranks[pair.second] += math.log1p(pair.difference.value)
        pair_of[pair.first, pair.second] = pair
        pair_of[pair.second, pair.first] = pair.swapped()
    order = sorted(ranks, key=lambda label: -ranks[label])
    names = _short_names(group)

    columns = [Column("cell", "")]
    for position in range(1, len(order)):
        columns.append(Column(f"against_{position}", f"against {position}", kind="change"))
    rows = []
    for index, second in enumerate(order):
        row: dict[str, Value] = dict.fromkeys((column.key for column in columns), "")
        row["cell"] = f"{index + 1}  {names[second]}"
        for position, first in enumerate(order[:index], 1):
            compared = pair_of.get((first, second))
            if compared is not None and compared.verdict == NO_DIFFERENCE:
                change = number(compared.difference.value, "change")
                row[f"against_{position}"] = f"{change} (n. s.)"
            elif compared is not None:
                row[f"against_{position}"] = compared.difference
        rows.append(row)
    caption = (
        "Each configuration against the faster ones (columns: their numbers), with 95 % "
        "intervals. n. s.: not significant."
    )
    return Table.of(name, caption, columns, rows)


def _short_names(pairs: Sequence[Comparison]) -> dict[str, str]:
    names = []
    for pair in pairs:
        names += [pair.first, pair.second]
    return short_names(names)


def differences(findings: Findings) -> str:
    """Return the largest difference that is significant, and of how many; or that none is."""
    judged, real, least = [], [], []
    for pair in findings.comparisons:
        if pair.verdict:
            judged.append(pair)
            if pair.smallest is not None:
                least.append(pair.smallest)
        if pair.verdict in VERDICT_LOOKS:
            real.append(pair)
    if not findings.comparisons:
        return "No two configurations of this study differ in one option only."
    if not judged:
        pairs = count(len(findings.comparisons), "pair differs", "pairs differ")
        return f"{pairs} in one option only; too few repeats to test the differences."
    if not real:
        line = f"No difference is significant in {count(len(judged), 'comparison')}"
        if least:
            line += f"; each detects an increase of {number(max(least), 'share')} or more"
        return f"{line}."
    largest = max(real, key=lambda pair: abs(pair.difference.value))
    names = _short_names(findings.comparisons)
    first, second = (single_line(names[name], 120) for name in (largest.first, largest.second))
    value = largest.difference.value
    size = estimate(scaled(largest.difference, math.copysign(1, value)), "share")
    line = f"{second} is {size} {largest.verdict} than {first}"
    if len(judged) == 1:
        return f"{line}."
    share = f"{len(real):,} of {len(judged):,} comparisons are significant"
    return f"Largest difference: {line}; {share}."


def noise(study: Study, findings: Findings) -> Section | None:
    """Return the noise floors that the intervals of the study rest on, and the runs behind each."""
    rows: list[dict[str, Any]] = []
    rates = [rate.metric for rate in study.rates]
    for metric in dict.fromkeys([*rates, COST, EXCHANGE_MS]):
        rows += floor_rows(study, metric)
    if not rows:
        return None
    main_metric = rows[0]["metric"]
    widths = []
    by_width = sorted((row for row in rows if row["metric"] == main_metric), key=WIDTH)
    for row in (by_width[0], by_width[-1]):
        width = number(row["half_share"], "part")
        if row["half_share"] is None:
            width = f"{number(row['half'])} {row['unit']}"
        widths.append(width)
    line = f"Run-to-run variation (95 %) of {main_metric}: ±"
    line += f"{' to '.join(dict.fromkeys(widths))}, estimated from repeated runs."

    def differing(kind: str, **headings: str) -> Iterator[Column]:
        for column in columns_of(kind, **headings):
            yield replace(column, shown=len({row[column.key] for row in rows}) > 1)

    table = Table.of(
        "noise_floor",
        "Run-to-run variation (95 %), estimated from repeated runs. Taken from other "
        "configurations, it is the widest of theirs, and never below what its own runs show.",
        (
            *differing("text", strategy="strategy", model="model"),
            *differing("count", batch_size="batch"),
            *differing("text", precision="precision", optimize="optimize"),
            *differing("count", world_size="GPUs"),
            *columns_of(metric="metric"),
            *columns_of("part", half_share="±"),
            *columns_of("number", half="± in its unit"),
            *columns_of(unit="unit"),
            *columns_of("count", runs="runs", freedom="freedom"),
            *columns_of(lent_by="taken from", source="measured on"),
        ),
        rows,
    )
    return Section("noise", "Run-to-run variation", (single_line(line, 600),), tables=(table,))


def floor_rows(study: Study, metric: str) -> list[dict[str, Any]]:
    """Return a row for each noise floor of a metric, the widest of its group, with the cells that
    show how runs scatter: `none on gpus 0 (3)`, with their runs.
    """
    repeated: dict[FloorGroup, list[str]] = defaultdict(list)
    drift = Counter(id(runs) for record, runs in study.drift if metric in record.metrics)
    for runs in study.runs:
        repeats = len(runs.values(metric)) + drift[id(runs)]
        if repeats > 1 and not runs.suspect:
            cell = f"{label(study, runs)} on {gpu_list(runs.gpus)} ({repeats})"
            repeated[runs.group].append(cell)
    widest: dict[tuple[FloorGroup, str], dict[str, Any]] = {}
    for runs in study.runs:
        floor = runs.floor(metric)
        if floor is None or not runs.values(metric):
            continue
        row, key = floor_row(runs, metric, floor), (runs.group, floor.name)
        if key in widest and row["width"] <= widest[key]["width"]:
            continue
        cells: list[str] = []
        for group in floor.lenders or (runs.group,):
            cells += repeated[group]
        if runs.suspect:
            cells = [f"{label(study, runs)} on {gpu_list(runs.gpus)}, suspect"]
        row["source"] = join_words(cells, MOST_SOURCES) or "other studies"
        widest[key] = row
    return [widest[key] for key in sorted(widest)]


def floor_row(runs: Runs, metric: str, floor: Floor) -> dict[str, Any]:
    """Return what the table of noise floors says of one floor."""
    group, entry, width = runs.group, entry_of(metric), half_width(floor, 1)
    half: dict[str, Any] = {"half_share": math.expm1(width), "half": None, "unit": ""}
    if entry.signed:
        half = {"half_share": None, "half": width, "unit": entry.unit}
    return half | {
        "width": width,
        "strategy": group.strategy,
        "model": named(runs.records[0], "model" if runs.cell.trains else "benchmark"),
        "batch_size": group.batch_size or None,
        "precision": group.precision,
        "optimize": group.optimize,
        "world_size": group.world_size,
        "metric": single_line(entry.title),
        "runs": floor.runs,
        "freedom": floor.freedom,
        "lent_by": floor.lent_by,
    }
