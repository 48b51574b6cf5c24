"""The section on noise floors: how far runs of the same configuration scatter."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from analysis.findings.communication import COST
from analysis.findings.examine import Findings
from analysis.report.numbers import number
from analysis.report.section import Section
from analysis.report.table import Column, Table, columns_of
from analysis.study.intervals import half_width
from analysis.study.names import gpu_list, label
from analysis.study.noise_floor import Floor, FloorGroup
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import join_words, single_line
from benchmarks.record.metrics import entry_of

EXCHANGE_MS = "comm/exchange_ms"
MOST_SOURCES = 4  # cells that show a noise floor; of more the number is given


def noise(study: Study, findings: Findings) -> Section | None:
    """Return the noise floors that the intervals of the study rest on, and the runs behind each."""
    rows: list[dict[str, Any]] = []
    rates = [rate.metric for rate in study.rates]
    for metric in dict.fromkeys([*rates, COST, EXCHANGE_MS]):
        rows += floor_rows(study, metric)
    if not rows:
        return None
    main_metric = rows[0]["metric"]
    of_main = [row for row in rows if row["metric"] == main_metric]
    of_main.sort(key=lambda row: row["width"])
    widths = []
    for row in (of_main[0], of_main[-1]):
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
