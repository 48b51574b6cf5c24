"""Show a sweep while it runs: a table that changes in place on a terminal, plain lines elsewhere.

A narrow terminal leaves out whole columns, the least important first; no index is ever cut.
"""

import io
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.findings.communication import SeveralRecords
from analysis.report import cell_numbers
from analysis.report.cell_numbers import COLUMNS
from analysis.report.numbers import THIN as NO_BREAK
from analysis.report.sections.standings import standings_table
from analysis.study.asked import Asked, RaceState, answer
from analysis.study.names import unit_of_cells
from analysis.study.noise_floor import Scatters
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import Record
from benchmarks.record.safe_text import forgive
from conf.cell import counted
from launch.display.columns import (
    ABOUT_DRIFT,
    COST,
    GPUS,
    STATE,
    STYLES,
    VALIDITY,
    fitted_table,
    request_columns,
    verdict,
)
from launch.plan.estimate import duration, estimates
from launch.plan.order import PlannedCell
from launch.study.background import Pace
from launch.supervision.watch import Watch

STATE_STYLES = {"finished": "green", "interrupted": "yellow", "failed": "red"}
# States of a cell after which nothing more happens to it in this sweep.
SKIPPED = "skipped: node_lost"
SETTLED = ("finished", "failed", "interrupted", "done before", "measured elsewhere", SKIPPED)
WAITING, ELSEWHERE = "waiting", "elsewhere"
# What a rank does, in common words; other phases have good names.
PHASE_WORDS = {
    **dict.fromkeys(("", "start", "imports", "connect", "build", "first step"), "starting"),
    "warm-up": "warming up",
    **dict.fromkeys(("timed", "held", "data"), "measuring"),
    **dict.fromkeys(("check", "compare", "verify"), "checking"),
    **dict.fromkeys(("exchange", "references", "bucket exchange"), "measuring the exchange"),
    **dict.fromkeys(("exposed", "timeline"), "measuring the exchange"),
    **dict.fromkeys(("profiled pass", "tuning pass"), "profiling"),
    "exit": "ending",
}
MESSAGE_LENGTH = 1000  # characters of why a cell failed
UNLIMITED = 1000  # characters of a line where there is no terminal
OTHER_LINES = 6  # of the terminal that are not rows
FEWEST_ROWS = 3


class Screen:
    """The rows of a sweep. A context manager: it gives the terminal back whatever happens."""

    def __init__(
        self,
        cells: list[PlannedCell],
        study_records: Sequence[Record],
        console: Console,
        other_studies: Scatters | None = None,
    ) -> None:
        """`study_records` are from before; `other_studies` is what they showed of the scatter."""
        self.console = console
        self._in_place = self.console.is_terminal and not self.console.is_dumb_terminal
        self._width = UNLIMITED
        if self._in_place:
            self._width = self.console.width
        self.cells = cells
        self.states = [WAITING] * len(cells)
        self.records: list[Record | None] = [None] * len(cells)
        self._study_records, self._other_studies = list(study_records), other_studies
        self._values: list[dict[str, float]] = [{}] * len(cells)  # that need other records
        self._numbers: list[dict[str, str]] = [{}] * len(cells)  # by column
        self._common, self._request = request_columns(cells)
        requested = [planned.cell for planned in cells]
        self._things, self._unit = counted(requested), unit_of_cells(requested)
        self._estimates_s: list[float] = []
        self._opened_s = time.monotonic()
        # By the number of the cell: since when it runs, and what its slowest rank does.
        self._running: dict[int, tuple[float, str]] = {}
        self._live: Live | None = None
        self._is_last = False  # the table that stays
        self._race: Table | None = None  # of a question
        self._pace = Pace()  # of the study; until then a row has what its own record says
        self._is_stale = False  # records have come since the numbers of all rows were computed

    def __enter__(self) -> "Screen":
        self._estimate()
        parts = [f"{name} {text}".replace(" ", NO_BREAK) for name, text in self._common.items()]
        for line in textwrap.wrap("  ".join(parts), self._width, break_on_hyphens=False):
            self.console.print(Text(line.replace(NO_BREAK, " "), style="dim"))
        if self._in_place:
            self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Draw every cell that was begun a last time, and stop."""
        self._running, self._is_last = {}, True
        if self._is_stale:
            self._compute_numbers(range(len(self.cells)))
        if self._live:
            # The closing summary has a line for each configuration.
            self._live.transient = kind is None and {*self.states} <= {"finished", "done before"}
            self._live.__exit__(kind, error, trace)
            return
        for line in self._lines_below(self._number_columns()):
            self.console.print(line)

    def progress(self, index: int, watch: Watch) -> None:
        """Show the phase of a running cell's slowest rank."""
        slowest = min(watch.ranks, key=lambda rank: (rank.iterations, not rank.done))
        doing = PHASE_WORDS.get(slowest.phase, slowest.phase)
        self.states[index] = doing.removesuffix(" the exchange")
        if slowest.iterations:
            doing += f", {count(slowest.iterations, 'step')}"
        rate = len(watch.ranks) * min(rank.images_per_second for rank in watch.ranks)
        if rate:
            doing += f", {rate:,.0f} {self._things}/s"
        if index in self._running:
            self._running[index] = self._running[index][0], doing
            return
        self._running[index] = time.monotonic(), doing
        if not self._live:
            self.console.print(Text(f"{self._heading(index)}  started", style="dim"))

    def hold(self, index: int) -> None:
        """Show that another launcher measures a cell."""
        self.states[index] = ELSEWHERE

    def settle(self, index: int, state: str, record: Record | None) -> None:
        """Show the end of a cell, or that it is not run."""
        self.states[index], self.records[index] = state, record
        self._running.pop(index, None)
        if record:
            self._study_records.append(record)
            self._is_stale = True
        if self._pace.is_due:
            with self._pace.making():
                self._estimate()
                self._compute_numbers([*self._rows(), index])
        elif record and record.state == "finished":
            self._numbers[index] = self._numbers_of(record, {})
        self._print_settled(index)

    def add(self, planned: PlannedCell) -> None:
        """Take a further cell: a question chooses them one by one."""
        self.cells.append(planned)
        self.states.append(WAITING)
        self.records.append(None)
        self._values.append({})
        self._numbers.append({})
        self._estimate()
        self._common, self._request = request_columns(self.cells)

    def show_race(self, asked: Asked, race: RaceState) -> None:
        """Show how the candidates of a question stand instead of the runs."""
        self._race = standings_table(asked, race).to_rich()
        if not self._live and race.last is not None and race.pending == race.last.turn:
            self.console.print(Text(f"    {answer(asked, race)[0]}", style="dim"))

    def settle_done(self, done: Mapping[int, Record]) -> None:
        """Show cells that were finished before, by index; the study has their records."""
        for index, record in done.items():
            self.states[index], self.records[index] = "done before", record
        self._estimate()
        self._compute_numbers(list(done))
        for index in done:
            self._print_settled(index)

    def _print_settled(self, index: int) -> None:
        if self._live:
            return
        self.console.print(Text(f"{self._heading(index)}  {'  '.join(self._line(index))}"))
        record = self.records[index]
        if record and record.failure:
            message = single_line(record.failure.message, MESSAGE_LENGTH)
            self.console.print(Text(f"    {record.failure.cause}: {message}"))

    def _heading(self, index: int) -> str:
        return f"[{index + 1}/{len(self.cells)}] {self.cells[index].name}"

    def _line(self, index: int) -> list[str]:
        parts = [self.states[index]]
        for column, text in self._numbers[index].items():
            parts.append(cell_numbers.with_unit(column, text, self._things, self._unit))
        parts.append(verdict(self.records[index]))
        return list(filter(None, parts))

    def _compute_numbers(self, rows: Sequence[int]) -> None:
        """Compute the numbers of finished cells; a later baseline changes earlier ones."""
        several = SeveralRecords(Study.of(self._study_records, scatters=self._other_studies))
        for index in rows:
            record = self.records[index]
            if record is None or record.state != "finished":
                continue
            self._values[index] = several.shown(record)
            self._numbers[index] = self._numbers_of(record, self._values[index])

    def _numbers_of(self, record: Record, of_several: Mapping[str, float]) -> dict[str, str]:
        numbers = {}
        for column, text in cell_numbers.cell_numbers(record, of_several).items():
            if column != COST:  # there is little room, and exposed communication says more
                numbers[column] = text.replace(NO_BREAK, " ")
        return numbers

    def _number_columns(self) -> list[str]:
        present: set[str] = set()
        for numbers in self._numbers:
            present.update(numbers)
        return [name for name in COLUMNS if name in present]

    def _draw(self) -> Group:
        rows = self._rows()
        names = self._number_columns()
        columns: dict[str, list[Text]] = {}
        for column in (*self._request, STATE, *names, VALIDITY):
            columns[column] = []
        for row in rows:
            for column, texts in self._request.items():
                columns[column].append(Text(texts[row]))
            columns[STATE].append(self._state(row))
            for column in names:
                columns[column].append(Text(self._numbers[row].get(column, "")))
            record = self.records[row]
            style = STATE_STYLES["failed"]
            if record and record.state == "finished":
                style = STYLES.get(record.validity.verdict, "")
            columns[VALIDITY].append(Text(verdict(record), style))
        titles = {}
        for name in columns:
            titles[name] = cell_numbers.heading(name, self._things, self._unit)
        cut = [VALIDITY, *(name for name in self._request if name != GPUS)]
        table = fitted_table(columns, titles, self._width, cut)  # less what has no room
        lines = self._lines_below(columns)
        if len(rows) < len(self.cells) and not self._is_last:
            lines[-1] += f", rows {rows[0] + 1}–{rows[-1] + 1}"
        for row, (_, doing) in sorted(self._running.copy().items()):
            lines.append(f"run {row + 1}: {doing}")
        group = Group()
        if self._race is not None:
            group.renderables.append(self._race)
        elif rows:
            group.renderables.append(table)
        for line in lines:  # cut and not wrapped: the table keeps its place
            group.renderables.append(Text(line, "dim", no_wrap=True, overflow="ellipsis"))
        return group

    def _state(self, index: int) -> Text:
        state = self.states[index]
        if state in SETTLED or state == WAITING:
            return Text(state, STATE_STYLES.get(state, "dim"))
        return Text(f"▸ {state}", "bold cyan")

    def _rows(self) -> Sequence[int]:
        """Return the rows that fit, around the first open cell; at the end all that were begun."""
        if self._is_last:
            return [row for row, state in enumerate(self.states) if state != WAITING]
        extra = len(self._lines_below(self._number_columns())) - 1
        room = max(FEWEST_ROWS, (self.console.height or 24) - OTHER_LINES - extra)
        if len(self.cells) <= room:
            return range(len(self.cells))
        current = min([*self._unsettled(), len(self.cells) - 1])
        first = min(max(0, current - room // 2), len(self.cells) - room)
        return range(first, first + room)

    def _lines_below(self, columns: Collection[str]) -> list[str]:
        """Return what ± and the reference are, where they are shown, and how far the sweep is."""
        settled = len(self.cells) - len(self._unsettled())
        elapsed = duration(time.monotonic() - self._opened_s)
        done = settled
        rest = ""
        for state in ("failed", "interrupted", SKIPPED):
            cells = self.states.count(state)
            done -= cells
            if cells:
                rest += f", {cells} {state}"
        before = self.states.count("done before")
        if before:
            rest += f", {before} done before"
        status = f"{done} of {count(len(self.cells), 'run')} in {elapsed}{rest}"
        estimates_s = list(self._estimates_s)
        for row, (since, _) in self._running.copy().items():
            estimates_s[row] = max(0.0, estimates_s[row] - (time.monotonic() - since))
        left_s = 5 * round(sum(estimates_s) / 5)
        if self._is_last and settled < len(self.cells):
            status += f", {len(self.cells) - settled} not started"
        elif left_s and not self._is_last:
            status += f", about {duration(left_s)} left"
        margins = cell_numbers.about_margins(self._values)
        reference = cell_numbers.about_columns(columns)
        drift = ABOUT_DRIFT if any(planned.drift for planned in self.cells) else ""
        return list(filter(None, (margins, reference, drift, status)))

    def _unsettled(self) -> list[int]:
        return [row for row, state in enumerate(self.states) if state not in SETTLED]

    def _estimate(self) -> None:
        unsettled = self._unsettled()
        cells = [self.cells[row] for row in unsettled]
        self._estimates_s = [0.0] * len(self.cells)
        for row, estimate in zip(unsettled, estimates(cells, self._study_records), strict=True):
            self._estimates_s[row] = estimate.seconds


# An output that measuring outlives: a closed pipe or a lost terminal ends printing only.
class ResilientStream(io.TextIOBase):
    """Writes to a stream until that fails once; what is written later is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` is None where the process was started without one."""
        forgive(stream)
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream. Raises OSError where there is none."""
        if self._stream is None:
            raise OSError("the output is gone")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._stream = None
        return len(text)

    def flush(self) -> None:
        """Hand over what was written, or drop it."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
