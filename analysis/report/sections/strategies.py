"""Strategies and settings on several GPUs: figure and table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.findings.communication import (
    COST,
    DISAGREEMENT,
    EXPOSED,
    HIDDEN,
    TRACE_EXPOSED,
    disagreement,
)
from analysis.report.figures import ROWS, dot, more_in, row_label, rows_figure
from analysis.report.measured_values import RATE, bars, bounded, in_parentheses
from analysis.report.numbers import estimate, of_metric
from analysis.report.section import Section
from analysis.report.style import Picture, colours, drawn, marker, rendered, window
from analysis.report.tables import Column, Table, metric_column
from analysis.study.estimates import Communication, Estimate, Findings, Point
from analysis.study.names import gpu_ids, gpu_list, ran_alone, short_names, things_of, unit_of
from analysis.study.study import Runs, Study, middle, named
from analysis.text import count, first_lines, single_line
from benchmarks.record import Record

STRATEGY_FIGURES = 2
TRACE_HIDDEN, TRACE_ALL = "trace/overlapped_ms_per_step", "trace/comm_ms_per_step"
WITHOUT_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks


def strategies(study: Study, findings: Findings) -> Section | None:
    """Return every set of equal cells: its rate, its exchange against what the machine allows, and the exposed part."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    curves = {
        one: (curve, p)
        for curve in findings.scaling.curves
        for p in curve.points
        for one in p.record_ids
    }
    cells = [runs for runs in study.runs if runs.world_size > 1 and _measured(runs.records)]
    cells.sort(key=lambda runs: (-runs.world_size, -(middle(runs.records, RATE) or 0.0)))
    groups = [runs.records for runs in cells]
    labels = [
        curves[group[0].record_id][0].label if group[0].record_id in curves else group[0].name
        for group in groups
    ]
    names = short_names(dict.fromkeys(labels))
    exposed = {one.record_ids[0]: one for one in findings.communication}
    rows = [
        _strategy_row(
            study,
            group,
            names[label],
            curves[group[0].record_id][1] if group[0].record_id in curves else None,
            exposed.get(group[0].record_id),
        )
        for group, label in zip(groups, labels, strict=True)
    ]
    unit, of_hosts = (
        unit_of(study),
        any(runs.cell.hosts for runs in cells),
    )  # of hosts the section on links has the GB/s
    table = Table(
        "strategies",
        f"Cells on several {unit}; numbers are medians over the runs of a cell. GB/s per {unit[:-1]}: gradient bytes · "
        "2(n−1)/n ÷ the time of an exchange. Cost: what the strategy adds to a step. Exposed: what it adds beyond its cost on "
        f"one {unit[:-1]}. Hidden: the share of the exchange that is not exposed."
        f"{in_parentheses(study)}",
        (
            Column("cell", "cell"), Column("model", "model", shown=False), Column("strategy", "strategy", shown=False),
            Column("gpus", unit), Column("runs", "runs", "count"),
            metric_column("images_per_second", RATE, bounded=True, things=things_of(study)),
            metric_column("exchange_ms", "comm/exchange_ms", bounded=True),
            Column("gb_per_second_per_gpu", f"GB/s per {unit[:-1]}", "number", shown=not of_hosts),
            metric_column("of_reference", "comm/ideal_ratio"), Column("reference", "reference"),
            metric_column("cost_ms", COST, bounded=True), metric_column("exposed_ms", EXPOSED),
            metric_column("hidden_share", HIDDEN), Column("hidden_by_trace", "hidden by trace", of_metric(HIDDEN)),
            metric_column("exposed_by_trace_ms", TRACE_EXPOSED), metric_column("difference_ms", DISAGREEMENT),
            Column("mark", "verdict"),
        ),
        tuple(rows), frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    lines = _without_effect(study) if rows else (f"No cell that counts ran on several {unit}.",)
    return Section(
        "strategies",
        "Strategies and settings",
        lines,
        tuple(_strategy_figures(study, cells, rows)),
        (table,),
        place=60,
    )


def _without_effect(study: Study) -> tuple[str, ...]:
    """Return the settings that had no effect by NCCL's log, and in how many cells."""
    told = Counter(
        str(record.validity.codes[WITHOUT_EFFECT])
        for record in study.usable
        if WITHOUT_EFFECT in record.validity.codes
    )
    return tuple(
        first_lines(
            f"{single_line(said, 300)} ({count(cells, 'cell')})." for said, cells in told.items()
        )
    )


def _measured(group: Sequence[Record]) -> bool:
    return any(middle(group, metric) is not None for metric in (RATE, "comm/exchange_ms"))


def _strategy_figures(
    study: Study, cells: Sequence[Runs], rows: Sequence[tuple[Any, ...]]
) -> Iterator[Picture]:
    """Yield a figure for each model that has several settings on its largest number of GPUs; a row for each cell."""
    place = 0
    for model in dict.fromkeys(runs.cell.model.name for runs in cells):
        timed = [
            pair
            for pair in zip(cells, rows, strict=True)
            if pair[0].cell.model.name == model and pair[1][5]
        ]
        most = max((runs.world_size for runs, _ in timed), default=0)
        largest = [(runs, row) for runs, row in timed if runs.world_size == most]
        if (
            len({frozenset(runs.key.items()) for runs, _ in largest}) < 2
            or place == STRATEGY_FIGURES
        ):
            continue
        place += 1
        labels = short_names(dict.fromkeys(row[0] for _, row in largest))
        subsets = len({runs.gpus for runs, _ in largest}) > 1
        drawn = [
            (labels[row[0]] + (f" · {gpu_list(runs.gpus)}" if subsets else ""), row[2], row[5])
            for runs, row in largest
        ]
        what = f"{model} on {most} {unit_of(study)}"
        yield strategy_figure(drawn, f"strategies-{place}", what, bars(study), things_of(study))


def _strategy_row(
    study: Study,
    group: Sequence[Record],
    label: str,
    point: Point | None,
    told: Communication | None,
) -> tuple[Any, ...]:
    first = group[0]
    exposed = {} if told is None or told.exposed_ms is None else {EXPOSED: told.exposed_ms}
    traced, hidden, communicated = (
        middle(group, name) for name in (TRACE_EXPOSED, TRACE_HIDDEN, TRACE_ALL)
    )
    by_trace = {} if traced is None else {TRACE_EXPOSED: traced}
    ranks, exchange = first.cell.world_size, bounded(study, group, "comm/exchange_ms")
    size = first.model.get("gradient_bytes")
    per_gpu = None
    if size and exchange is not None and exchange.value > 0:
        per_gpu = size * 2 * (ranks - 1) / ranks / (exchange.value / 1000) / 1e9
    references = sorted({str(one) for record in group if (one := record.checks.get("reference"))})
    return (
        label, named(first, "model"), named(first, "strategy"), gpu_ids(first.cell.members), len(group),
        point.rate if point else bounded(study, group, RATE), exchange, per_gpu, middle(group, "comm/ideal_ratio"),
        ", ".join(references), bounded(study, group, COST), exposed.get(EXPOSED), told and told.hidden_share,
        hidden / communicated if hidden is not None and communicated else None,
        traced, disagreement(exposed | by_trace).get(DISAGREEMENT),
        "suspect" if any(record.validity.verdict != "valid" for record in group) else "",
    )  # fmt: skip


def strategy_figure(
    rows: Sequence[tuple[str, str, Estimate]], name: str, what: str, bars: str, things: str
) -> Picture:
    """Return images per second of (label, strategy, rate) rows as a figure, best first."""
    palette = colours(strategy for _, strategy, _ in rows)
    shown = sorted(rows, key=lambda row: (-row[2].value, row[0]))[:ROWS]
    figure, axes = rows_figure(len(shown))
    for y, (label, strategy, rate) in enumerate(shown):
        dot(axes, y, rate, palette[strategy], marker(strategy))
        row_label(axes, y, label, estimate(rate, "rate"))
    axes.set_xlim(*window([rate for _, _, rate in shown]))
    axes.set_xlabel(f"{things}/s")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    )
    caption = f"{things.capitalize()} per second, {single_line(what)}.{bars} The axis does not begin at 0."
    return rendered(
        figure,
        name,
        caption + more_in(rows, ROWS, "more row", "strategies.csv"),
        drawn(("cell", "strategy", f"{things.replace(' ', '_')}_per_second"), shown),
    )


SECTIONS = (strategies,)
