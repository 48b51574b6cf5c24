"""A study in a notebook: typed records, tables of pandas, figures of matplotlib.

Begin with `analysis.open_study`. A column is an option or a metric as it is called elsewhere, made a
Python name with its unit:

    comm/exchange_ms -> comm_exchange_ms    scaling/efficiency -> scaling_efficiency_share
    nccl.NCCL_ALGO -> NCCL_ALGO

A share is a part of one: 0.981 for 98.1 %. `_low` and `_high` are the ends of the 95 % interval for
the next run, `_within_run_low` and `_within_run_high` those inside one run. Unknown is NA.
"""

import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import EXPOSED, HIDDEN
from analysis.findings.examine import findings_of
from analysis.findings.record_values import SeveralRecords
from analysis.gc_pause import gc_paused
from analysis.report.build import checked_study, report_of
from analysis.report.page import Report
from analysis.study.conditions import request_of
from analysis.study.estimates import Efficiency, Estimate, Findings
from analysis.study.intervals import names_of
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, label, run_name
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, has_floor
from analysis.study.provenance import CONNECTIONS, PROVENANCE, hardware
from analysis.study.runs import Runs, grouped, merged
from analysis.study.study import Study
from benchmarks.record import VERDICTS, Record, metrics
from benchmarks.record.metrics import metric as entry_of
from conf.cell import Cell
from conf.options import to_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IS_DRIFT = "the first cell once more at the end, which shows the drift"
# GPUs without a baseline: one may be slower than those that have one.
WITHOUT = "not_measured_alone"
FIRST = ("cell", "gpus", "run", "verdict", "codes", "unchecked", "state", "counts", "left_out")
INTEGERS = ("world_size", "runs", "repeat", "channels")  # also where none is known
LARGEST_INT = 2**63 - 1
# Words for a unit in a name, the first of which is added where a name has none of them.
UNITS = {
    "%": ("share", "ratio", "fraction"),
    "images/s": ("images_per_second",),
    "GB/s": ("gb_per_s",),
    "/s": ("per_second",),
    "s": ("seconds",),
    "µs": ("us",),
    "°C": ("c",),
}

Values = dict[str, Any]  # {column: value}; None is not known
# A row in the order of its columns: which cell it is and whether it may be believed, what was
# measured, what was asked, and what was used.
Row = tuple[Values, Values, Values, Values]


class OpenedStudy:
    """A study that was read. What it returns is computed when it is first asked for."""

    def __init__(self, study: Study) -> None:
        """Keep what was read; `analysis.open_study` reads it."""
        self._study = study
        self.name = study.name
        self.folder = study.folder
        self.unreadable = study.unreadable  # a sentence for each record that could not be read
        # The record of every run in order of their start, also of those that a later one replaced.
        self.records = tuple(sorted([*study.records, *study.replaced], key=Record.order))
        # The columns of what was asked differently, without the GPUs: what to group rows by.
        self.varied = tuple(column_of_option(name) for name in study.naming_options)

    def __repr__(self) -> str:
        """Return the study's name, and what it holds."""
        counts = f"{len(self.records)} runs of {len(self._study.runs)} cells"
        return f"<study {self.name}: {counts}, in {self.folder}>"

    @functools.cached_property
    def findings(self) -> Findings:
        """Return what the report says as typed values: curves, waterfalls, comparisons, links."""
        return findings_of(self._study)

    @functools.cached_property
    def report(self) -> Report:
        """Return the content of the report: its sections with sentences, figures and tables."""
        with gc_paused():
            return report_of(self._study, self.findings)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return what the report says first: the finding of the study."""
        return self.report.finding

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Return sentences on what the study cannot say, and why."""
        return self.report.unsaid

    @property
    def figures(self) -> "dict[str, Figure]":
        """Return the report's figures by the names of their files: `figures["efficiency-1"]`.

        Save one with `savefig(file, bbox_inches="tight")`. The timeline of a traced step is a file
        of the study, and not here.
        """
        figures = [figure for section in self.report.sections for figure in section.figures]
        return {figure.name: figure.figure for figure in figures if figure.figure is not None}

    @property
    def captions(self) -> dict[str, str]:
        """Return what each figure shows, by its name."""
        figures = [figure for section in self.report.sections for figure in section.figures]
        return {figure.name: figure.caption for figure in figures}

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the report's tables."""
        return tuple(table.name for table in self.report.tables)

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the report as its CSV has it. Raises KeyError: there is none."""
        tables = {table.name: table for table in self.report.tables}
        if name not in tables:
            raise KeyError(f"no table {name!r}: the report of {self.name} has {', '.join(tables)}")
        kinds: dict[str, str] = {}
        for column in tables[name].columns:
            kinds |= dict.fromkeys(column.keys, "string" if column.is_text else "float64")
        rows = []
        for row in tables[name].rows:
            values: Values = {}
            for column, value in zip(tables[name].columns, row, strict=True):
                if column.bounded and not isinstance(value, str):
                    values |= _with_ends(column.key, value)
                elif isinstance(value, Estimate):
                    values[column.key] = value.value
                else:
                    values[column.key] = None if value == "" else value
            rows.append(values)
        return _frame(rows, kinds)

    def cells(self) -> pd.DataFrame:
        """Return a row for each cell: the median of its usable runs, with the interval for the next
        run. A cell without a usable run has `runs` 0 and no numbers.
        """
        study, columns = self._study, metric_columns(self.records)
        several, of_findings = SeveralRecords(study), _of_findings(self.findings)
        rows: list[Row] = []
        for runs in study.runs:
            values = [several.values(record) for record in runs.records]
            measured: Values = {}
            for name, column in columns.items():
                if name not in OF_SEVERAL_RECORDS:
                    measured |= _median_columns(runs, name, column)
                    continue
                of_records = [each[name] for each in values if name in each]
                median = statistics.median(of_records) if of_records else None
                value = of_findings.get((runs.record_ids, name), median)
                measured |= _with_ends(column, value) if name == EFFICIENCY else {column: value}
            used = {WITHOUT: of_findings.get((runs.record_ids, WITHOUT)), **_used_columns(runs)}
            head = _head_columns(study, runs, runs) | {"runs": len(runs.records)}
            head |= _verdict_columns(runs.records)
            rows.append((head, measured, option_columns(runs.cell), used))
        usable = {_cell_of(runs) for runs in study.runs}
        excluded = grouped([study.single(record) for record in study.excluded], _cell_of)
        for cell, singles in excluded.items():
            if cell not in usable:
                runs = merged(singles)
                head = _head_columns(study, runs, runs) | {"runs": 0}
                head |= _verdict_columns(runs.records)
                rows.append((head, {}, option_columns(runs.cell), _used_columns(runs)))
        return _frame_of_rows(rows)

    def runs(self) -> pd.DataFrame:
        """Return a row for each run, in order of their start: failed, invalid and replaced ones too.

        `counts` tells whether a run enters the numbers of its cell; `left_out` says why not.
        """
        study, columns = self._study, metric_columns(self.records)
        several = SeveralRecords(study)
        cell_of = {id(record): runs for runs in study.runs for record in runs.records}
        left_out = {id(record): why for record, why in study.left_out}
        for record, runs in study.drift:
            cell_of[id(record)] = runs
            left_out[id(record)] = IS_DRIFT
        within_run = {name for record in self.records for name in record.within_run}
        rows: list[Row] = []
        for record in self.records:
            single, now, cell = study.single(record), several.values(record), record.cell
            measured: Values = {}
            for name, column in columns.items():
                if name in OF_SEVERAL_RECORDS:
                    measured[column] = float(now[name]) if name in now else None
                else:
                    measured |= _median_columns(single, name, column)
                if name in within_run:
                    low, high = metrics.interval(name, record.within_run) or (None, None)
                    measured[f"{column}_within_run_low"] = low
                    measured[f"{column}_within_run_high"] = high
            why = left_out.get(id(record))
            head = _head_columns(study, cell_of.get(id(record), single), single)
            head["run"] = run_name(record)
            # `run` names what is no repeat.
            head["repeat"] = cell.repeat if cell.repeat >= 0 else None
            head |= _verdict_columns([record])
            head |= {"state": record.state, "counts": why is None, "left_out": why}
            used: Values = {WITHOUT: None, **_used_columns(single)}
            share = now.get(EFFICIENCY)
            if isinstance(share, Efficiency):
                missing = [gpu for gpu in cell.members if share.of and gpu not in share.of]
                used[WITHOUT] = gpu_ids(missing)
            used["started_at"] = datetime.fromtimestamp(record.started_at, timezone.utc)
            used["took_seconds"] = record.ended_at - record.started_at
            for name in ("record_id", "cell_key", "sweep_id"):
                used[name] = getattr(record, name)
            rows.append((head, measured, {**option_columns(cell), "seed": cell.seed}, used))
        return _frame_of_rows(rows)


def opened(folder: str | Path) -> OpenedStudy:
    """Read a study's folder, and compare its records with their raw samples as a report does.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    with gc_paused():
        return OpenedStudy(checked_study(Path(folder)))


# Frames


def _frame_of_rows(rows: Sequence[Row]) -> pd.DataFrame:
    kinds: dict[str, str] = {}
    for part in range(4):
        for row in rows:
            for name in row[part]:
                kinds.setdefault(name, "float64" if part == 1 else "string")
    kinds |= {name: "Int64" for name in INTEGERS if name in kinds}
    values = [used | options | measured | head for head, measured, options, used in rows]
    return _frame(values, kinds)


def _frame(rows: Sequence[Values], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Return rows as a table. `kinds` are {column: its type where no value is known}, in order."""
    columns = {}
    for name, unknown in kinds.items():
        values = [row.get(name) for row in rows]
        kind = kind_of(values, unknown)
        if kind == "float64":
            values = [None if value is None else float(value) for value in values]
        elif kind == "string":
            values = [None if value is None else to_text(value) for value in values]
        columns[name] = pd.Series(values, dtype=kind)
    return pd.DataFrame(columns, columns=list(kinds))


def kind_of(values: Sequence[Any], unknown: str) -> str:
    """Return pandas' type for the values of a column; `unknown` where all of them are None."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return unknown
    if kinds == {bool}:
        return "boolean"
    if kinds == {int} and all(value is None or abs(value) <= LARGEST_INT for value in values):
        return "Int64"
    if kinds <= {int, float}:
        return "float64"
    return "datetime64[us, UTC]" if kinds == {datetime} else "string"


# Columns


def metric_columns(records: Sequence[Record]) -> dict[str, str]:
    """Return {metric: column} of every metric that records have, in the order of their table. No two
    have one column.
    """
    names = set(OF_SEVERAL_RECORDS)
    taken = {*FIRST, *INTEGERS}
    for record in records:
        names |= record.metrics.keys()
        taken |= option_columns(record.cell).keys()
    names -= {end for name in names for end in names_of(name)}  # which other columns have
    columns: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (metrics.place(name), name)):
        column = column_of_metric(name)
        while column in taken:
            column = f"metric_{column}"
        columns[name] = column
        taken.add(column)
    return columns


def column_of_metric(name: str) -> str:
    """Return the column of a metric."""
    column, unit = _python_name(name), entry_of(name).unit
    if not unit:
        return column
    words = UNITS.get(unit, (_python_name(unit).lower(),))
    has_unit = any(f"_{word}_" in f"_{column}_" for word in words)
    return column if has_unit else f"{column}_{words[0]}"


def column_of_option(name: str) -> str:
    """Return the column of an option of `request_of`: `strategy` for strategy.name."""
    group, _, option = name.partition(".")
    return _python_name(option if group == "nccl" else name.removesuffix(".name"))


def _python_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def option_columns(cell: Cell) -> Values:
    """Return everything that was asked of a cell and tells it from others, without empty values."""
    columns: Values = {}
    for name, text in request_of(cell).items():
        group, _, option = name.partition(".")
        value = getattr(cell, group)
        if option == "sha256":  # of a file of the user's own
            value = text
        elif option:
            value = value[option] if isinstance(value, dict) else getattr(value, option)
        if value not in ({}, [], ()):
            is_plain = isinstance(value, str | int | float)
            columns[column_of_option(name)] = value if is_plain else to_text(value)
    return columns


def _cell_of(runs: Runs) -> tuple[Any, ...]:
    return runs.gpus, frozenset(runs.request.items())


def _head_columns(study: Study, cell: Runs, runs: Runs) -> Values:
    name = f"{label(study, cell)}{BETWEEN}{gpu_list(runs.gpus)}"
    return {"cell": name, "gpus": gpu_ids(runs.gpus), "world_size": runs.cell.world_size}


def _verdict_columns(records: Sequence[Record]) -> Values:
    """Return the worst verdict of some runs, and every code."""
    verdicts = [record.validity.verdict for record in records]
    codes = dict.fromkeys(code for record in records for code in record.validity.codes)
    unchecked = dict.fromkeys(code for record in records for code in record.validity.unchecked)
    return {
        "verdict": max(verdicts, key=VERDICTS.index),
        "codes": ", ".join(codes),
        "unchecked": ", ".join(unchecked),
    }


def _median_columns(runs: Runs, name: str, column: str) -> Values:
    if has_floor(name):
        return _with_ends(column, runs.next_run(name))
    return {column: runs.median(name)}


def _with_ends(column: str, value: float | Estimate | None) -> Values:
    """Return a number and the ends of its 95 % interval."""
    if not isinstance(value, Estimate):
        median = None if value is None else float(value)
        return {column: median, f"{column}_low": None, f"{column}_high": None}
    median = float(value.value)
    return {column: median, f"{column}_low": value.low, f"{column}_high": value.high}


def _used_columns(runs: Runs) -> Values:
    """Return NCCL's transport, the machine, the software and inherited variables."""
    used: Values = {"transport": None, "link_class": None, "channels": None}
    for record in runs.records:
        for name in used:
            if used[name] is None:
                used[name] = record.effective.get(name)
    used |= {"study": runs.records[0].study, "hardware": hardware(runs.records[0])}
    for name, value in runs.provenance.items():
        if name != CONNECTIONS:
            used[name if name in PROVENANCE else f"inherited_{name}"] = value or None
    return used


def _of_findings(findings: Findings) -> dict[tuple[tuple[str, ...], str], Any]:
    """Return {(ids of a cell's records, metric or WITHOUT): what findings say of these runs}."""
    values: dict[tuple[tuple[str, ...], str], Any] = {}
    for curve in findings.scaling.curves:
        for point in curve.points:
            values[point.record_ids, EFFICIENCY] = point.efficiency
            values[point.record_ids, AT_EQUAL_CLOCKS] = point.at_equal_clocks
            if point.efficiency is not None:
                values[point.record_ids, WITHOUT] = gpu_ids(point.without_baseline)
    for each in findings.communication:
        values[each.record_ids, EXPOSED] = each.exposed_ms
        values[each.record_ids, HIDDEN] = each.hidden_share
    return values
