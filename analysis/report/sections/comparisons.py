"""Cells against each other: strategies, NCCL settings, real differences, the noise floor."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.findings.communication import (
    COST,
    DISAGREEMENT,
    EXPOSED,
    HIDDEN,
    TRACE_EXPOSED,
    disagreement,
)
from analysis.report.charts import MOST_ROWS, ROW_LENGTH, DotRow, rows_figure, truncation_note
from analysis.report.figure import COLOURS, GREY, HIGHLIGHT, Figure, colours, for_width, marker
from analysis.report.numbers import estimate, number, of_metric
from analysis.report.section import RATE, Section, bars, bounded, in_parentheses
from analysis.report.table import Column, Table, Value, metric_column, numbers_table
from analysis.study.draws import scaled
from analysis.study.estimates import Communication, Comparison, Estimate, Findings, Noise
from analysis.study.intervals import half_width
from analysis.study.names import (
    BETWEEN,
    gpu_ids,
    gpu_list,
    ran_alone,
    short_names,
    things_of,
    unit_of,
)
from analysis.study.rates import is_of_training
from analysis.study.runs import Runs, median_of, named
from analysis.study.study import Study
from analysis.text import count, first_lines, join_words, single_line
from benchmarks.record import Record
from benchmarks.record.metrics import metric as entry_of

MOST_STRATEGY_FIGURES = 2
EXCHANGE_MS, EXCHANGE_SHARE = "comm/exchange_ms", "comm/ideal_ratio"
TRACE_HIDDEN, TRACE_ALL = "trace/overlapped_ms_per_step", "trace/comm_ms_per_step"
NO_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks
VERDICT_LOOKS = {"faster": (COLOURS["blue"][0], ">"), "slower": (HIGHLIGHT, "<")}


# ---- Strategies ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StrategyCell:
    """Equal cells on several GPUs, and what the findings say of them."""

    runs: Runs
    label: str
    rate: Estimate | None
    communication: Communication | None

    @property
    def record(self) -> Record:
        """The record of the first run."""
        return self.runs.records[0]

    @property
    def exposed_ms(self) -> float | None:
        """The exposed communication of a step."""
        return self.communication.exposed_ms if self.communication else None

    @property
    def hidden_share(self) -> float | None:
        """The share of the exchange that steps hide."""
        return self.communication.hidden_share if self.communication else None

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return named(self.record, "strategy")

    def median(self, metric: str) -> float | None:
        """Return the median of a metric over the runs."""
        return self.runs.median(metric)

    @property
    def hidden_by_trace(self) -> float | None:
        """The share of the exchange that the trace saw beside compute."""
        hidden, total = self.median(TRACE_HIDDEN), self.median(TRACE_ALL)
        return hidden / total if hidden is not None and total else None

    @property
    def disagreement_ms(self) -> float | None:
        """By how much the exposed communication of steps and of the trace differ."""
        values = {EXPOSED: self.exposed_ms, TRACE_EXPOSED: self.median(TRACE_EXPOSED)}
        measured = {name: value for name, value in values.items() if value is not None}
        return disagreement(measured).get(DISAGREEMENT)

    @property
    def references(self) -> str:
        """What the exchange was compared with."""
        names = {record.checks.get("reference") for record in self.runs.records}
        return ", ".join(sorted(str(name) for name in names if name))


def strategies(study: Study, findings: Findings) -> Section | None:
    """Return every set of equal cells with its rate, its exchange and what of it is exposed."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    cells = _strategy_cells(study, findings)
    names = short_names(dict.fromkeys(cell.label for cell in cells))
    unit, things = unit_of(study), things_of(study)
    member = unit.removesuffix("s")

    def gb_per_s(cell: StrategyCell) -> float | None:
        exchange = bounded(study, cell.runs.records, EXCHANGE_MS)
        size = cell.record.model.get("gradient_bytes")
        if not size or exchange is None or exchange.value <= 0:
            return None
        ranks = cell.runs.world_size
        return float(size) * 2 * (ranks - 1) / ranks / (exchange.value / 1000) / 1e9

    def metric(key: str, name: str) -> Column:
        return metric_column(key, name, lambda cell: cell.median(name))

    def metric_of_runs(key: str, name: str) -> Column:
        return metric_column(
            key, name, lambda cell: bounded(study, cell.runs.records, name), bounded=True
        )

    on_hosts = any(cell.runs.cell.hosts for cell in cells)  # the section on links has their GB/s
    columns = (
        Column("cell", "cell", lambda cell: names[cell.label]),
        Column("model", "model", lambda cell: named(cell.record, "model"), shown=False),
        Column("strategy", "strategy", "strategy", shown=False),
        Column("gpus", unit, lambda cell: gpu_ids(cell.record.cell.members)),
        Column("runs", "runs", lambda cell: len(cell.runs.records), "count"),
        metric_column("images_per_second", RATE, "rate", bounded=True, things=things),
        metric_of_runs("exchange_ms", EXCHANGE_MS),
        Column(
            "gb_per_second_per_gpu", f"GB/s per {member}", gb_per_s, "number", shown=not on_hosts
        ),
        metric("of_reference", EXCHANGE_SHARE),
        Column("reference", "reference", "references"),
        metric_of_runs("cost_ms", COST),
        metric_column("exposed_ms", EXPOSED, "exposed_ms"),
        metric_column("hidden_share", HIDDEN, "hidden_share"),
        Column("hidden_by_trace", "hidden by trace", "hidden_by_trace", of_metric(HIDDEN)),
        metric("exposed_by_trace_ms", TRACE_EXPOSED),
        metric_column("difference_ms", DISAGREEMENT, "disagreement_ms"),
        Column("mark", "verdict", lambda cell: "suspect" if cell.runs.suspect else ""),
    )
    table = Table.of(
        "strategies",
        f"Cells on several {unit}; numbers are medians over the runs of a cell. GB/s per {member}: "
        "gradient bytes · 2(n−1)/n ÷ the time of an exchange. Cost: what the strategy adds to a "
        f"step. Exposed: what it adds beyond its cost on one {member}. Hidden: the share of the "
        f"exchange that is not exposed.{in_parentheses(study)}",
        columns,
        cells,
        marked=lambda cell: cell.runs.suspect,
    )
    lines = [f"No cell that counts ran on several {unit}."]
    if cells:
        lines = _settings_without_effect(study)
    figures = tuple(_strategy_figures(study, cells, names))
    return Section("strategies", "Strategies and settings", tuple(lines), figures, (table,))


def _strategy_cells(study: Study, findings: Findings) -> list[StrategyCell]:
    """Return the cells on several GPUs with a rate or an exchange, the largest, fastest first."""
    points: dict[str, tuple[str, Estimate | None]] = {}
    for curve in findings.scaling.curves:
        for point in curve.points:
            points |= dict.fromkeys(point.record_ids, (curve.label, point.rate))
    communication = {cell.record_ids[0]: cell for cell in findings.communication}
    cells = []
    for runs in study.runs:
        rate = bounded(study, runs.records, RATE)
        exchange_ms = median_of(runs.records, EXCHANGE_MS)
        if runs.world_size == 1 or (rate is None and exchange_ms is None):
            continue
        record_id = runs.records[0].record_id
        label = runs.records[0].name
        if record_id in points:
            label, rate = points[record_id]
        cells.append(StrategyCell(runs, label, rate, communication.get(record_id)))
    return sorted(cells, key=lambda cell: (-cell.runs.world_size, -(cell.median(RATE) or 0.0)))


def _settings_without_effect(study: Study) -> list[str]:
    """Return the settings that had no effect by NCCL's log, and in how many cells."""
    cells_of: Counter[str] = Counter()
    for record in study.usable:
        if NO_EFFECT in record.validity.codes:
            cells_of[record.validity.codes[NO_EFFECT]] += 1
    lines = []
    for text, cells in cells_of.items():
        lines.append(f"{single_line(text, 300)} ({count(cells, 'cell')}).")
    return first_lines(lines)


def _strategy_figures(
    study: Study, cells: Sequence[StrategyCell], names: Mapping[str, str]
) -> list[Figure]:
    """Return a figure for each model with several settings on its largest number of GPUs."""
    by_model: dict[str, list[StrategyCell]] = defaultdict(list)
    for cell in cells:
        if cell.rate:
            by_model[cell.runs.cell.model.name].append(cell)
    figures: list[Figure] = []
    for model, of_model in by_model.items():
        most = max(cell.runs.world_size for cell in of_model)
        largest = [cell for cell in of_model if cell.runs.world_size == most]
        settings = {frozenset(cell.runs.key.items()) for cell in largest}
        if len(settings) > 1 and len(figures) < MOST_STRATEGY_FIGURES:
            name = f"strategies-{len(figures) + 1}"
            subject = f"{model} on {most} {unit_of(study)}"
            figures.append(_strategy_figure(study, name, subject, largest, names))
    return figures


def _strategy_figure(
    study: Study, name: str, subject: str, cells: Sequence[StrategyCell], names: Mapping[str, str]
) -> Figure:
    """Return images per second, a row for each cell, best first."""
    things = things_of(study)
    labels = short_names(dict.fromkeys(names[cell.label] for cell in cells))
    palette = colours(cell.strategy for cell in cells)
    several_subsets = len({cell.runs.gpus for cell in cells}) > 1
    rows, data = [], []
    for cell in cells:
        assert cell.rate is not None  # only such cells are drawn
        label = labels[names[cell.label]]
        if several_subsets:
            label += f" · {gpu_list(cell.runs.gpus)}"
        look = (palette[cell.strategy], marker(cell.strategy))
        rows.append(DotRow(label, estimate(cell.rate, "rate"), [cell.rate], *look))
        data.append((label, cell.strategy, cell.rate))
    rows.sort(key=lambda row: (-row.dots[0].value, row.label))
    data.sort(key=lambda row: (-row[2].value, row[0]))
    caption = f"{things.capitalize()} per second, {single_line(subject)}.{bars(study)}"
    more = truncation_note(cells, MOST_ROWS, "more row", "strategies.csv")
    keys = ("cell", "strategy", f"{things.replace(' ', '_')}_per_second")
    return rows_figure(
        name,
        f"{caption} The axis does not begin at 0.{more}",
        rows[:MOST_ROWS],
        f"{things}/s",
        numbers_table(keys, data[:MOST_ROWS]),
        format_tick=lambda value: f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}",
    )


# ---- NCCL settings ------------------------------------------------------------------------------


def settings(study: Study, findings: Findings) -> Section | None:
    """Return the transport, the time of an exchange and the rate with each setting and without it.

    None without settings.
    """
    if not findings.settings:
        return None
    rates = {effect.compared.rate for effect in findings.settings}
    table = Table.of(
        "settings",
        "Each NCCL setting against the same cell in which it is untouched; the rate with its 95 % "
        "interval.",
        (
            Column("setting", "setting", lambda effect: single_line(effect.setting)),
            Column("cell", "untouched cell", lambda effect: _untouched_name(effect.compared.first)),
            Column("gpus", unit_of(study), lambda effect: gpu_ids(effect.compared.gpus)),
            Column(
                "transport_untouched", "transport untouched", lambda effect: effect.transports[0]
            ),
            Column("transport", "transport with it", lambda effect: effect.transports[1]),
            Column(
                "exchange_ms_untouched",
                "exchange ms untouched",
                lambda effect: effect.exchange_ms[0],
                "number",
            ),
            Column("exchange_ms", "with it", lambda effect: effect.exchange_ms[1], "number"),
            Column("exchange_ratio", "times as long", "exchange_ratio", "ratio"),
            Column("rate", "rate", "compared.rate", shown=len(rates) > 1),
            Column("difference", "rate changes by", "compared.difference", "change", True),
            Column("verdict", "verdict", lambda effect: effect.compared.verdict or "no verdict"),
        ),
        findings.settings,
    )
    lines: tuple[str, ...] = ()
    if not all(effect.compared.verdict for effect in findings.settings):
        lines = ("The verdict needs repeats: a single run does not show how far runs differ.",)
    return Section("settings", "NCCL settings", lines, tables=(table,))


def _untouched_name(label: str) -> str:
    """Return the untouched cell's label without its GPUs, which have a column."""
    parts = [part for part in label.split(BETWEEN)[1:] if not part.endswith(" untouched")]
    return single_line(BETWEEN.join(parts))


# ---- Which differences are real -----------------------------------------------------------------


def comparisons(study: Study, findings: Findings) -> Section | None:
    """Return the verdicts, and the noise that they are based on.

    None where there is nothing to compare.
    """
    pairs = findings.comparisons
    lines = _comparison_lines(study, findings)
    if not lines:
        return None
    names = short_names(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    judged = any(pair.verdict for pair in pairs)
    reasons = {pair.why for pair in pairs}
    single = all(pair.runs == (1, 1) for pair in pairs)
    table = Table.of(
        "comparisons",
        _comparison_caption(judged, reasons),
        (
            Column("first", "first cell", lambda pair: names[pair.first]),
            Column("second", "second cell", lambda pair: names[pair.second]),
            Column("asked", "differ in", "asked"),
            Column("rate", "rate", "rate", shown=len(findings.noises) > 1),
            Column(
                "first_runs",
                "runs of the first",
                lambda pair: pair.runs[0],
                "count",
                shown=not single,
            ),
            Column(
                "second_runs",
                "runs of the second",
                lambda pair: pair.runs[1],
                "count",
                shown=not single,
            ),
            Column("difference", "difference", "difference", "change", True),
            Column("smallest", "visible from", "smallest", "share"),
            Column("verdict", "verdict", lambda pair: pair.verdict or "no verdict", shown=judged),
            Column("why", "note", "why", shown=judged or len(reasons) > 1),
        ),
        pairs,
    )
    figures = tuple(_comparison_figure(pairs, findings.noises, names))
    return Section(
        "comparisons",
        "Which differences are real",
        tuple(map(single_line, lines)),
        figures,
        (table,),
    )


def _comparison_lines(study: Study, findings: Findings) -> list[str]:
    lines = []
    if study.trains or findings.comparisons:
        lines.append(differences(findings))
    rates = {pair.rate for pair in findings.comparisons}
    if not all(map(is_of_training, rates)):
        metrics = []
        for rate in study.rates:
            metric = f"1 ÷ {rate.metric}" if rate.is_time else rate.metric
            if rate.name in rates:
                metrics.append(f"{rate.name} ({metric})")
        lines.append(f"Compared: {join_words(metrics)}; more is faster.")
    for noise in findings.noises:
        in_rate = f" in {noise.rate}" if len(findings.noises) > 1 else ""
        if noise.floor is not None:
            floor, pairs = number(noise.floor, "share"), count(noise.pairs, "pair")
            lines.append(
                f"The noise floor{in_rate} is {floor}: 19 of 20 pairs of single runs of equal "
                "cells differ by less "
                f"({pairs} of runs measured)."
            )
        if noise.drift is not None:
            drift = number(noise.drift, "change")
            lines.append(
                f"The first cell ran once more at the end: its rate changed by {drift}{in_rate}."
            )
    return lines


def _comparison_caption(judged: bool, reasons: Collection[str]) -> str:
    """Return what a table of comparisons shows.

    What all its rows would say is said once, before it.
    """
    against = "The second cell against the first"
    if judged:
        visible = "“Visible from” is the smallest difference that these runs could have shown."
        return f"{against}, with the 95 % interval of the difference. {visible}"
    if len(reasons) == 1 and any(reasons):
        return f"{against}. No pair has a verdict: {next(iter(reasons))}."
    return f"{against}. No pair has a verdict."


def differences(findings: Findings) -> str:
    """Return the largest difference that is seen, and of how many; or that none is."""
    judged = [pair for pair in findings.comparisons if pair.verdict]
    real = [pair for pair in judged if pair.verdict in VERDICT_LOOKS]
    if not findings.comparisons:
        return "No two cells of this study differ in one thing alone."
    if not judged:
        pairs = count(len(findings.comparisons), "pair of cells differs", "pairs of cells differ")
        return f"{pairs} in one thing alone, but single runs give no verdict."
    if not real:
        least = [pair.smallest for pair in judged if pair.smallest is not None]
        could = f"; each could have shown one of {number(max(least), 'share')}" if least else ""
        return f"No difference is seen in {count(len(judged), 'comparison')}{could}."
    largest = max(real, key=lambda pair: abs(pair.difference.value))
    names = [name for pair in findings.comparisons for name in (pair.first, pair.second)]
    every = short_names(dict.fromkeys(names))
    of_first = every[largest.first].split(BETWEEN)
    shared = [part for part in every[largest.second].split(BETWEEN) if part in of_first]
    where = single_line(f" ({', '.join(shared)})", 120) if shared else ""
    rest = ""
    if len(judged) > 1:
        rest = f"; {len(real):,} of {len(judged):,} comparisons show a difference"
    short = short_names(dict.fromkeys((largest.first, largest.second)))
    first, second = (single_line(short[name], 80) for name in (largest.first, largest.second))
    return f"{second} is {_size(largest)} {first}{where}{rest}."


def _size(pair: Comparison) -> str:
    """Return `13.0 % (11.2 to 14.8) slower than`, or `2.51 (2.47 to 2.55) times as fast as`."""
    value = pair.difference.value
    if value >= 1:
        ends = [1 + end for end in (pair.difference.low, pair.difference.high) if end is not None]
        return f"{estimate(Estimate(1 + value, *ends))} times as fast as"
    size = scaled(pair.difference, math.copysign(1, value))
    return f"{estimate(size, 'share')} {pair.verdict} than"


def _comparison_figure(
    pairs: Sequence[Comparison], noises: Sequence[Noise], names: Mapping[str, str]
) -> Iterator[Figure]:
    """Yield differences with intervals, largest first, over the noise floor."""
    judged = [pair for pair in pairs if pair.verdict]
    judged.sort(key=lambda pair: (-abs(pair.difference.value), pair.first, pair.second))
    shown = judged[:MOST_ROWS]
    if not shown:
        return
    rates = {pair.rate for pair in shown}
    floors = {noise.rate: noise.floor for noise in noises if noise.floor and noise.rate in rates}
    rows, data = [], []
    for pair in shown:
        colour, form = VERDICT_LOOKS.get(pair.verdict, (GREY, "o"))
        size = number(pair.difference.value, "change")
        if for_width(ROW_LENGTH) >= ROW_LENGTH:
            size += f", {pair.verdict}"
        label = _pair_name(pair, names)
        rows.append(
            DotRow(label, size, [pair.difference], colour, form, band=floors.get(pair.rate, 0.0))
        )
        names_of = (pair.first, pair.second, pair.rate)
        data.append((*names_of, pair.difference, pair.verdict, floors.get(pair.rate)))
    band = "; band: how far equal cells of this study differ" if floors else ""
    yield rows_figure(
        "comparisons",
        f"Differences with 95 % intervals{band}. Arrows: faster, slower; dots: no difference seen."
        f"{truncation_note(judged, MOST_ROWS, 'more comparison', 'comparisons.csv')}",
        rows,
        f"difference in {rates.pop() if len(rates) == 1 else 'the rate'}",
        numbers_table(
            ("first_cell", "second_cell", "rate", "difference", "verdict", "noise_floor"), data
        ),
        format_tick=_change_tick,
        around_zero=True,
    )


def _change_tick(value: float) -> str:
    if not value:
        return "0"
    text = f"{100 * value:+.3g} %" if abs(value) < 1 else f"{100 * value:+,.0f} %"
    return text.replace("-", "−")


def _pair_name(pair: Comparison, names: Mapping[str, str]) -> str:
    """Return `LOC against NVL · gpus 0,3`: what differs, then what both share."""
    first, second = (names[name].split(BETWEEN) for name in (pair.first, pair.second))
    shared = [part for part in second if part in first]
    sides = []
    for parts in (second, first):
        own = [part for part in parts if part not in shared]
        sides.append(BETWEEN.join(own) or "the default")
    return BETWEEN.join([" against ".join(sides), *shared])


# ---- The noise floor ----------------------------------------------------------------------------


def noise(study: Study, findings: Findings) -> Section | None:
    """Return the noise floors that the intervals of the study rest on."""
    rows: list[dict[str, Value]] = []
    for metric in dict.fromkeys([*(rate.metric for rate in study.rates), COST, EXCHANGE_MS]):
        by_group = {runs.group: runs for runs in study.runs if runs.values(metric)}
        for group, runs in sorted(by_group.items()):
            floor = runs.floor(metric)
            if not floor:
                continue
            entry = entry_of(metric)
            width = half_width(floor, 1)
            row: dict[str, Value] = {
                "model": named(runs.records[0], "model" if runs.trains else "benchmark"),
                "batch_size": group.batch_size or None,
                "precision": group.precision,
                "optimize": group.optimize,
                "world_size": group.world_size,
                "metric": single_line(entry.title),
                "runs": floor.runs,
                "freedom": floor.freedom,
            }
            if entry.signed:
                row |= {"half": width, "unit": entry.unit}
            else:
                row |= {"half_share": math.expm1(width), "unit": ""}
            rows.append(row)
    if not rows:
        return None
    columns = (
        Column("model", "model"),
        Column("batch_size", "batch", kind="count"),
        Column("precision", "precision"),
        Column("optimize", "optimize"),
        Column("world_size", unit_of(study), kind="count"),
        Column("metric", "metric"),
        Column("half_share", "±", kind="part"),
        Column("half", "± in its unit", kind="number"),
        Column("unit", "unit"),
        Column("runs", "runs", kind="count"),
        Column("freedom", "degrees of freedom", kind="count"),
    )
    caption = (
        "How far one more run may lie from a single run, 95 times in 100, "
        "by runs of equal cells here."
    )
    table = Table.of("noise_floor", caption, columns, rows)
    return Section("noise", "The noise floor", tables=(table,))
