"""A study as a notebook uses it: what its report shows, as Python objects."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.findings.examine import findings_of
from analysis.gc_pause import gc_paused
from analysis.notebook.columns import of_option
from analysis.notebook.frames import frame, of_table
from analysis.notebook.rows import StudyRow, cell_rows, columns, every_record, run_rows
from analysis.report.build import checked_study, report_of
from analysis.report.page import Report
from analysis.study.estimates import Findings
from analysis.study.study import Study
from benchmarks.record import Record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class OpenedStudy:
    """A study that was read. What it returns is computed from its records when it is first asked for."""

    def __init__(self, study: Study) -> None:
        """Keep what was read; `open_study` reads it."""
        self._study = study

    def __repr__(self) -> str:
        """Return the study's name, and what it holds."""
        return f"<study {self.name}: {len(self.records)} runs of {len(self._study.runs)} cells, in {self.folder}>"

    @property
    def name(self) -> str:
        """Return the name of the study."""
        return self._study.name

    @property
    def folder(self) -> Path | None:
        """Return the folder that was read."""
        return self._study.folder

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the record of every run, in order of their start: `record.metrics`, `record.cell.gpus`, `record.validity`."""
        return tuple(every_record(self._study))

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Return a sentence for each record that could not be read."""
        return self._study.unreadable

    @property
    def varied(self) -> tuple[str, ...]:
        """Return the columns of what was asked differently within the study, without the GPUs: what to group rows by."""
        return tuple(of_option(name) for name in self._study.telling)

    @functools.cached_property
    def findings(self) -> Findings:
        """Return everything that the report says as typed values: curves, waterfalls, comparisons, links."""
        return findings_of(self._study)

    def cells(self) -> "pd.DataFrame":
        """Return a table with one row for each cell: the median of its usable runs, with the interval for the next run.

        Columns are options and metrics under their names in METHOD.md, with the unit: `comm_exchange_ms`. A share is a part of
        one. `_low` and `_high` are the ends of the 95 % interval. What is not known is NA.

        Raises:
            ImportError: pandas is not installed.
        """
        return _frame(list(cell_rows(self._study, self.findings)))

    def runs(self) -> "pd.DataFrame":
        """Return a table with one row for each run, in order of their start: failed, invalid and replaced ones too.

        `counts` tells whether a run enters the numbers of its cell; `left_out` says why not. Columns are those of `cells`;
        `_within_run_low` and `_within_run_high` are the ends of the 95 % interval inside the run.

        Raises:
            ImportError: pandas is not installed.
        """
        return _frame(list(run_rows(self._study)))

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return what the report says first: the finding of the study."""
        return self.report.finding

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Return sentences on what the study cannot say, and why."""
        return self.report.unsaid

    @functools.cached_property
    def report(self) -> Report:
        """Return the content of the report: its sections with sentences, figures and tables."""
        with gc_paused():
            return report_of(self._study, self.findings)

    @property
    def figures(self) -> "dict[str, Figure]":
        """Return the report's figures by the names of their files, as matplotlib's: `figures["efficiency-1"]`.

        Save one with `savefig(file, bbox_inches="tight")`. The timeline of a traced step is a file of the study, and not here.
        """
        figures = [figure for section in self.report.sections for figure in section.figures]
        return {figure.name: figure.figure for figure in figures if figure.figure is not None}

    @property
    def captions(self) -> dict[str, str]:
        """Return what each figure shows, by its name."""
        return {
            figure.name: figure.caption
            for section in self.report.sections
            for figure in section.figures
        }

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the report's tables."""
        return tuple(table.name for table in self.report.tables)

    def table(self, name: str) -> "pd.DataFrame":
        """Return a table of the report by its name, with the numbers unrounded.

        Raises:
            KeyError: the report has no such table.
            ImportError: pandas is not installed.
        """
        known = {table.name: table for table in self.report.tables}
        if name not in known:
            raise KeyError(f"no table {name!r}: the report of {self.name} has {', '.join(known)}")
        return of_table(known[name])


def opened(folder: str | Path) -> OpenedStudy:
    """Read a study's folder, and compare its records with their raw samples as a report does.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    with gc_paused():
        return OpenedStudy(checked_study(Path(folder)))


def _frame(rows: list[StudyRow]) -> "pd.DataFrame":
    return frame([row.values for row in rows], columns(rows))
