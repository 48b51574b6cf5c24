"""A study in a notebook: typed records, tables of pandas, figures of matplotlib. Begin with
`analysis.open_study`.
"""

import functools
import statistics
from collections.abc import Iterator
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
from analysis.report.table import Table
from analysis.study.estimates import Estimate, Findings
from analysis.study.frame import (
    WITHOUT,
    StudyRow,
    column_of_option,
    every_record,
    frame_of,
    frame_of_rows,
    frame_of_runs,
    head_columns,
    median_columns,
    metric_columns,
    option_columns,
    used_columns,
    verdict_columns,
    with_ends,
)
from analysis.study.names import gpu_ids
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.study.runs import grouped, merged
from analysis.study.study import Study
from benchmarks.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class OpenedStudy:
    """A study that was read. What it returns is computed from its records when it is first asked
    for.
    """

    def __init__(self, study: Study) -> None:
        """Keep what was read; `analysis.open_study` reads it."""
        self._study = study
        self.name = study.name
        self.folder = study.folder
        self.unreadable = study.unreadable  # a sentence for each record that could not be read

    def __repr__(self) -> str:
        """Return the study's name, and what it holds."""
        return f"<study {self.name}: {len(self.records)} runs of {len(self._study.runs)} cells, in {self.folder}>"

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the record of every run, in order of their start: `record.metrics`,
        `record.cell.gpus`, `record.validity`.
        """
        return tuple(every_record(self._study))

    @property
    def varied(self) -> tuple[str, ...]:
        """Return the columns of what was asked differently within the study, without the GPUs: what
        to group rows by.
        """
        return tuple(column_of_option(name) for name in self._study.naming_options)

    @functools.cached_property
    def findings(self) -> Findings:
        """Return everything that the report says as typed values: curves, waterfalls, comparisons,
        links.
        """
        return findings_of(self._study)

    def cells(self) -> pd.DataFrame:
        """Return a table with one row for each cell: the median of its usable runs, with the
        interval for the next run.

        Columns are options and metrics under their names in METHOD.md, with the unit:
        `comm_exchange_ms`. A share is a part of one. `_low` and `_high` are the ends of the 95 %
        interval. What is not known is NA.
        """
        return frame_of_rows(list(_cell_rows(self._study, self.findings)))

    def runs(self) -> pd.DataFrame:
        """Return a table with one row for each run, in order of their start: failed, invalid and
        replaced ones too.

        `counts` tells whether a run enters the numbers of its cell; `left_out` says why not.
        Columns are those of `cells`; `_within_run_low` and `_within_run_high` are the ends of the
        95 % interval inside the run.
        """
        return frame_of_runs(self._study, SeveralRecords(self._study).values)

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
        """Return the report's figures by the names of their files, as matplotlib's:
        `figures["efficiency-1"]`.

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
        """Return a table of the report by its name, as its CSV has it. Raises KeyError: the report
        has no such table.
        """
        tables = {table.name: table for table in self.report.tables}
        if name not in tables:
            raise KeyError(f"no table {name!r}: the report of {self.name} has {', '.join(tables)}")
        return _frame_of_table(tables[name])


def opened(folder: str | Path) -> OpenedStudy:
    """Read a study's folder, and compare its records with their raw samples as a report does.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    with gc_paused():
        return OpenedStudy(checked_study(Path(folder)))


def _cell_rows(study: Study, findings: Findings) -> Iterator[StudyRow]:
    """Yield one row for each cell. A cell without a usable run has `runs` 0 and no numbers."""
    columns, drawn = metric_columns(study), _of_findings(findings)
    several = SeveralRecords(study)
    for runs in study.runs:
        head = head_columns(study, runs, runs) | {"runs": len(runs.records)}
        values = [several.values(record) for record in runs.records]
        measured: dict[str, float | None] = {}
        for name, column in columns.items():
            if name not in OF_SEVERAL_RECORDS:
                measured |= median_columns(runs, name, column)
                continue
            of_records = [each[name] for each in values if name in each]
            median = statistics.median(of_records) if of_records else None
            value = drawn.get((runs.record_ids, name), median)
            measured |= with_ends(column, value) if name == EFFICIENCY else {column: value}
        used = {WITHOUT: drawn.get((runs.record_ids, WITHOUT)), **used_columns(runs)}
        head |= verdict_columns(runs.records)
        yield StudyRow(head, measured, option_columns(runs.cell), used)
    usable = {(runs.gpus, frozenset(runs.request.items())) for runs in study.runs}
    excluded = grouped(
        [study.single(record) for record in study.excluded],
        lambda single: (single.gpus, frozenset(single.request.items())),
    )
    for cell, singles in excluded.items():
        if cell not in usable:
            runs = merged(singles)
            head = head_columns(study, runs, runs) | {"runs": 0} | verdict_columns(runs.records)
            yield StudyRow(head, {}, option_columns(runs.cell), used_columns(runs))


def _of_findings(findings: Findings) -> dict[tuple[tuple[str, ...], str], Any]:
    """Return {(ids of a cell's records, metric or WITHOUT): value} of what findings say of runs of
    equal cells together.
    """
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


def _frame_of_table(table: Table) -> pd.DataFrame:
    kinds: dict[str, str] = {}
    for column in table.columns:
        for key in column.keys:
            kinds[key] = "string" if column.is_text else "float64"
    rows = []
    for row in table.rows:
        values: dict[str, Any] = {}
        for column, value in zip(table.columns, row, strict=True):
            if column.bounded and not isinstance(value, str):
                values |= with_ends(column.key, value)
            elif isinstance(value, Estimate):
                values[column.key] = value.value
            else:
                values[column.key] = None if value == "" else value
        rows.append(values)
    return frame_of(rows, kinds)
