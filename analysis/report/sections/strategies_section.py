"""The section on strategies: the exchange of each, and what it adds to a step."""

from collections import Counter
from dataclasses import replace
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
from analysis.findings.examine import Findings
from analysis.report.main_point import points_of
from analysis.report.numbers import of_metric
from analysis.report.section import RATE, Section, about_costs, about_intervals, verdict_of
from analysis.report.table import Column, Table, metric_column
from analysis.study.names import gpu_ids, ran_alone, short_names
from analysis.study.names import unit_of as unit_of_study
from analysis.study.runs import Runs
from analysis.study.study import Study
from analysis.text import count, first_lines, single_line

EXCHANGE_MS, EXCHANGE_SHARE = "comm/exchange_ms", "comm/ideal_ratio"
BUSBW = "comm/busbw_gb_per_s"
TRACE_HIDDEN, TRACE_ALL = "trace/overlapped_ms_per_step", "trace/comm_ms_per_step"
NO_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks


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
        if NO_EFFECT in record.validity.codes:
            without_effect[record.validity.codes[NO_EFFECT]] += 1
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
    if rows:
        for text, number_of in without_effect.items():
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
