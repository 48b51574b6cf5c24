"""A study in a notebook: typed records, tables of pandas, figures of matplotlib.

Begin with `analysis.open_study`. A column is an option or a metric as it is called elsewhere, made
a Python name with its unit:

    comm/exchange_ms -> comm_exchange_ms    scaling/efficiency -> scaling_efficiency_share
    nccl.NCCL_ALGO -> NCCL_ALGO

A share is a part of one: 0.981 for 98.1 %. `_low` and `_high` are the ends of the 95 % interval for
the next run (of a strategy's cost, where that is not known, inside the run), `_within_run_low` and
`_within_run_high` those inside one run. Unknown is NA, as is a cost that a check doubts and whose
interval holds 0.
"""

import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY, Efficiency
from analysis.findings.communication import EXPOSED, HIDDEN, SeveralRecords
from analysis.findings.examine import Findings, findings_of
from analysis.input_files import gc_paused
from analysis.report.build import checked_study, report_of
from analysis.report.report_files import Report
from analysis.study.conditions import request_of
from analysis.study.intervals import Estimate, names_of
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, label, run_name
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, has_floor
from analysis.study.provenance import CONNECTIONS, PROVENANCE, hardware
from analysis.study.runs import Runs, grouped, merged
from analysis.study.study import Study
from analysis.validity.checks import limit_marks
from benchmarks.record import VERDICTS, Record, metrics
from benchmarks.record.metrics import entry_of
from conf.cell import Cell
from conf.options import to_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IS_DRIFT = "the first cell once more at the end, which shows the drift"
# GPUs without a baseline: one may be slower than those that have one.
WITHOUT = "not_measured_alone"
FIRST = (
    *("cell", "gpus", "run", "verdict", "codes", "unchecked", "limits", "state", "counts"),
    "left_out",
)
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


class Row(NamedTuple):
    """A row in the order of its columns."""

    head: Values  # which cell it is, and whether it may be believed
    measured: Values
    options: Values
    used: Values


class OpenedStudy:
    """A study that was read. What it returns is computed when it is first asked for."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.name = study.name
        self.folder = study.folder
        self.unreadable = study.unreadable  # a sentence for each record that could not be read
        # The record of every run in order of their start, also of those that a later one replaced.
        self.records = tuple(sorted([*study.records, *study.replaced], key=Record.order))
        # The columns of what was asked differently, without the GPUs: what to group rows by.
        self.varied = tuple(column_of_option(name) for name in study.naming_options)

    def __repr__(self) -> str:
        counts = f"{len(self.records)} runs, {len(self._study.runs)} cells with numbers"
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
        return tuple(self.report.unsaid)

    @property
    def figures(self) -> "dict[str, Figure]":
        """Return the report's figures by the names of their files: `figures["efficiency-1"]`.

        Save one with `savefig(file, bbox_inches="tight")`. The timeline of a traced step is a file
        of the study, and not here.
        """
        figures = {}
        for figure in self.report.figures:
            if figure.figure is not None:
                figures[figure.name] = figure.figure
        return figures

    @property
    def captions(self) -> dict[str, str]:
        """Return what each figure shows, by its name."""
        return {figure.name: figure.caption for figure in self.report.figures}

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
            kind = "float64"
            if column.is_text:
                kind = "string"
            kinds |= dict.fromkeys(column.keys, kind)
        rows = []
        for row in tables[name].rows:
            values: Values = {}
            for column, value in zip(tables[name].columns, row, strict=True):
                if column.bounded and not isinstance(value, str):
                    values |= _with_ends(column.key, value)
                elif isinstance(value, Estimate):
                    values[column.key] = value.value
                elif value != "":
                    values[column.key] = value
            rows.append(values)
        return _frame(rows, kinds)

    def cells(self) -> pd.DataFrame:
        """Return a row for each cell: the median of its usable runs, with the interval for the next
        run. A cell without a usable run has `runs` 0 and no numbers.
        """
        study, columns = self._study, metric_columns(self.records)
        several = SeveralRecords(study)
        # {(ids of a cell's records, metric or WITHOUT): what findings say of these runs}
        of_findings: dict[tuple[tuple[str, ...], str], Any] = {}
        for curve in self.findings.scaling.curves:
            for point in curve.points:
                of_findings[point.record_ids, EFFICIENCY] = point.efficiency
                of_findings[point.record_ids, AT_EQUAL_CLOCKS] = point.at_equal_clocks
                if point.efficiency is not None:
                    of_findings[point.record_ids, WITHOUT] = gpu_ids(point.without_baseline)
        for each in self.findings.communication:
            of_findings[each.record_ids, EXPOSED] = each.exposed_ms
            of_findings[each.record_ids, HIDDEN] = each.hidden_share
        rows: list[Row] = []
        for runs in study.runs:
            by_name: dict[str, list[float]] = {}
            for record in runs.records:
                for name, value in several.values(record).items():
                    by_name.setdefault(name, []).append(value)
            measured: Values = {}
            for name, column in columns.items():
                if name not in OF_SEVERAL_RECORDS:
                    measured |= _median_columns(runs, name, column)
                    continue
                median = None
                if name in by_name:
                    median = statistics.median(by_name[name])
                stated = of_findings.get((runs.record_ids, name), median)
                if name == EFFICIENCY:
                    measured |= _with_ends(column, stated)
                else:
                    measured[column] = stated
            used = {WITHOUT: of_findings.get((runs.record_ids, WITHOUT)), **_used_columns(runs)}
            head = _head_columns(study, runs, runs, {"runs": len(runs.records)})
            rows.append(Row(head, measured, option_columns(runs.cell), used))
        usable = {_cell_of(runs) for runs in study.runs}
        excluded = grouped([study.single(record) for record in study.excluded], _cell_of)
        for cell, singles in excluded.items():
            if cell not in usable:
                runs = merged(singles)
                head = _head_columns(study, runs, runs, {"runs": 0})
                rows.append(Row(head, {}, option_columns(runs.cell), _used_columns(runs)))
        return _frame_of_rows(rows)

    def runs(self) -> pd.DataFrame:
        """Return a row for each run, in order of their start: also failed, invalid and replaced.

        `counts` tells whether a run enters the numbers of its cell; `left_out` says why not.
        """
        study, columns = self._study, metric_columns(self.records)
        several = SeveralRecords(study)
        cell_of: dict[int, Runs] = {}
        for runs in study.runs:
            cell_of |= dict.fromkeys(map(id, runs.records), runs)
        left_out = {id(record): why for record, why in study.left_out}
        for record, runs in study.drift:
            cell_of[id(record)] = runs
            left_out[id(record)] = IS_DRIFT
        within_run = set().union(*(record.within_run for record in self.records))
        rows: list[Row] = []
        for record in self.records:
            single, now, cell = study.single(record), several.values(record), record.cell
            measured: Values = {}
            for name, column in columns.items():
                if name not in OF_SEVERAL_RECORDS:
                    measured |= _median_columns(single, name, column)
                elif name in now:
                    measured[column] = float(now[name])
                else:
                    measured[column] = None
                if name in within_run:
                    low, high = record.ends_within_run(name) or (None, None)
                    measured[f"{column}_within_run_low"] = low
                    measured[f"{column}_within_run_high"] = high
            why = left_out.get(id(record))
            repeat = cell.repeat if cell.repeat >= 0 else None  # `run` names what is no repeat
            own = {"run": run_name(record), "repeat": repeat}
            head = _head_columns(study, cell_of.get(id(record), single), single, own)
            head |= {"state": record.state, "counts": why is None, "left_out": why}
            used: Values = {WITHOUT: None, **_used_columns(single)}
            share = now.get(EFFICIENCY)
            if isinstance(share, Efficiency):
                alone = share.of or cell.members
                used[WITHOUT] = gpu_ids([gpu for gpu in cell.members if gpu not in alone])
            used["started_at"] = datetime.fromtimestamp(record.started_at, timezone.utc)
            used["took_seconds"] = record.ended_at - record.started_at
            for name in ("record_id", "cell_key", "sweep_id"):
                used[name] = getattr(record, name)
            options = {**option_columns(cell), "seed": cell.seed}
            rows.append(Row(head, measured, options, used))
        return _frame_of_rows(rows)


def opened(folder: str | Path) -> OpenedStudy:
    """Read a study's folder, and compare its records with their raw samples as a report does.

    Raises FileNotFoundError, NotADirectoryError: it is not a folder.
    """
    with gc_paused():
        return OpenedStudy(checked_study(Path(folder)))


def _frame_of_rows(rows: Sequence[Row]) -> pd.DataFrame:
    kinds: dict[str, str] = {}
    for part, kind in enumerate(("string", "float64", "string", "string")):
        for row in rows:
            for name in row[part]:
                kinds.setdefault(name, kind)
    for name in kinds.keys() & set(INTEGERS):
        kinds[name] = "Int64"
    values = [row.used | row.options | row.measured | row.head for row in rows]
    return _frame(values, kinds)


def _frame(rows: Sequence[Values], kinds: Mapping[str, str]) -> pd.DataFrame:
    # `kinds` are {column: its type where no value is known}, in order.
    columns = {}
    for name, unknown in kinds.items():
        values = [row.get(name) for row in rows]
        kind = kind_of(values, unknown)
        for index, value in enumerate(values):
            if value is not None and kind == "float64":
                values[index] = float(value)
            elif value is not None and kind == "string":
                # A message may hold half a character, which pandas refuses.
                values[index] = to_text(value).encode(errors="backslashreplace").decode()
        columns[name] = pd.Series(values, dtype=kind)
    return pd.DataFrame(columns, columns=list(kinds))


def kind_of(values: Sequence[Any], unknown: str) -> str:
    """Return pandas' type for the values of a column; `unknown` where all of them are None."""
    present = [value for value in values if value is not None]
    kinds = set(map(type, present))
    if not kinds:
        return unknown
    if kinds == {bool}:
        return "boolean"
    if kinds == {int} and max(map(abs, present)) <= LARGEST_INT:
        return "Int64"
    if kinds <= {int, float}:
        return "float64"
    if kinds == {datetime}:
        return "datetime64[us, UTC]"
    return "string"


def metric_columns(records: Sequence[Record]) -> dict[str, str]:
    """Return {metric: its own column} of every metric of records, in the order of their table."""
    names = set(OF_SEVERAL_RECORDS)
    taken = {*FIRST, *INTEGERS}
    for record in records:
        names |= record.metrics.keys()
        taken |= option_columns(record.cell).keys()
    for name in tuple(names):
        names.difference_update(names_of(name))  # which other columns have
    columns: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (metrics.position_of(name), name)):
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
    for word in words:
        if f"_{word}_" in f"_{column}_":
            return column
    return f"{column}_{words[0]}"


def column_of_option(name: str) -> str:
    """Return the column of an option of `request_of`: `strategy` for strategy.name."""
    if name.startswith("nccl."):
        return _python_name(name.removeprefix("nccl."))
    return _python_name(name.removesuffix(".name"))


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
        elif option and isinstance(value, dict):
            value = value[option]
        elif option:
            value = getattr(value, option)
        if value in ({}, [], ()):
            continue
        if not isinstance(value, str | int | float):
            value = to_text(value)
        columns[column_of_option(name)] = value
    return columns


def _cell_of(runs: Runs) -> tuple[Any, ...]:
    return runs.gpus, frozenset(runs.request.items())


def _head_columns(study: Study, cell: Runs, runs: Runs, own: Values) -> Values:
    codes: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    limits: dict[str, None] = {}
    for record in runs.records:
        limits |= dict.fromkeys(limit_marks(record))
        codes |= record.validity.codes
        unchecked |= record.validity.unchecked
    verdicts = [record.validity.verdict for record in runs.records]
    return {
        "cell": f"{label(study, cell)}{BETWEEN}{gpu_list(runs.gpus)}",
        "gpus": gpu_ids(runs.gpus),
        "world_size": runs.cell.world_size,
        **own,
        "verdict": max(verdicts, key=VERDICTS.index),
        "codes": ", ".join(codes),
        "unchecked": ", ".join(unchecked),
        "limits": ", ".join(limits),
    }


def _median_columns(runs: Runs, name: str, column: str) -> Values:
    if has_floor(name):
        return _with_ends(column, runs.next_run(name))
    return {column: runs.median(name)}


def _with_ends(column: str, value: float | Estimate | None) -> Values:
    ends: Values = {f"{column}_low": None, f"{column}_high": None}
    if value is None:
        return {column: None, **ends}
    if not isinstance(value, Estimate):
        return {column: float(value), **ends}
    median = float(value.value)
    return {column: median, f"{column}_low": value.low, f"{column}_high": value.high}


def _used_columns(runs: Runs) -> Values:
    used: Values = {"transport": None, "link_class": None, "channels": None}
    for record in runs.records:
        for name in used:
            if used[name] is None:
                used[name] = record.effective.get(name)
    used |= {"study": runs.records[0].study, "hardware": hardware(runs.records[0])}
    for name, value in runs.provenance.items():
        if name == CONNECTIONS:
            continue
        if name not in PROVENANCE:
            name = f"inherited_{name}"
        used[name] = value or None
    return used
