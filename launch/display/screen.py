"""Show a sweep while it runs, one line for each cell: a table that changes in place on a terminal, plain lines elsewhere.

A narrow terminal leaves out whole columns, the least important first; no number is ever cut.
"""

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.console import SafeConsole
from analysis.findings.record_values import SeveralRecords
from analysis.report.cell_numbers import (
    COLUMNS,
    TRANSPORT,
    about_margins,
    about_reference,
    cell_numbers,
    heading,
    with_unit,
)
from analysis.report.numbers import ABSENT, THIN
from analysis.study.names import unit_of_cells
from analysis.study.noise_floor import Scatters
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import Record
from conf.cell import counted
from launch.display.columns import (
    COST,
    EFFICIENCY,
    GPUS,
    STATE,
    VALIDITY,
    asked,
    filled,
    fit,
    measured,
    verdict,
)
from launch.plan.estimate import duration, estimates
from launch.plan.order import PlannedCell, rounds
from launch.supervision.progress import Watch

STYLES = {
    "valid": "green",
    "suspect": "yellow",
    "invalid": "red",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
}
# States of a cell after which nothing more happens to it in this sweep.
SETTLED = ("finished", "failed", "interrupted", "done before", "measured elsewhere")
WAITING, ELSEWHERE = "waiting", "elsewhere"
# Words of ranks and what a person reads.
PHASES = {"": "starting", "exit": "ending"}
MESSAGE_LENGTH = 1000  # characters of why a cell failed
UNLIMITED = 1000  # characters of a line where there is no terminal
AROUND = 6  # lines of the terminal that are not rows
FEWEST_ROWS = 3


class Screen:
    """The rows of a sweep. A context manager: it gives the terminal back whatever happens."""

    def __init__(
        self,
        cells: Sequence[PlannedCell],
        known: Sequence[Record],
        console: Console | None = None,
        others: Scatters | None = None,
    ) -> None:
        """`known` are the records that the study had before; `others` is what other studies showed of the scatter."""
        self._others = others
        self.console = console or SafeConsole()
        self._in_place = self.console.is_terminal and not self.console.is_dumb_terminal
        self.cells = cells
        self.states = [WAITING] * len(cells)
        self.records: list[Record | None] = [None] * len(cells)
        self._known = list(known)
        self._values: list[dict[str, float]] = [{}] * len(cells)  # that need other records
        self._numbers: list[dict[str, str]] = [{}] * len(
            cells
        )  # by column; what a record does not have is absent
        self._same, self._asked = asked(cells)
        self._things = counted(planned.cell for planned in cells)
        self._unit = unit_of_cells(planned.cell for planned in cells)
        self._estimates: list[float] = []  # seconds
        self._opened: float = time.monotonic()
        # By the number of the cell: since when it runs, and what its slowest rank does.
        self._running: dict[int, tuple[float, str]] = {}
        self._settling = threading.Lock()
        self._live: Live | None = None
        self._last = False  # the table that stays

    def __enter__(self) -> "Screen":
        """Print what all cells have in common and start drawing."""
        self._estimate()
        same = [f"{name} {text}" for name, text in self._same.items() if text != ABSENT]
        for line in filled(same, self._width()):
            self.console.print(Text(line, style="dim"))
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
        self._running, self._last = {}, True
        self._measure(range(len(self.cells)))
        if self._live:
            self._live.__exit__(kind, error, trace)
        else:
            for line in filter(
                None, (about_margins(self._values), about_reference(self._shown()), self._summary())
            ):
                self.console.print(line)

    def progress(self, number: int, watch: Watch) -> None:
        """Show the phase of a running cell's slowest rank."""
        behind = min(watch.ranks, key=lambda rank: (rank.iterations, not rank.done))
        phase = PHASES.get(behind.phase, behind.phase)
        first = number not in self._running
        since = time.monotonic() if first else self._running[number][0]
        self.states[number] = phase
        done = f"{behind.iterations} step{'' if behind.iterations == 1 else 's'}"
        self._running[number] = since, f"{phase}, {done}" if behind.iterations else phase
        if not self._live and first:
            self.console.print(Text(f"{self._head(number)}  started", style="dim"))

    def hold(self, number: int) -> None:
        """Show that another launcher measures a cell."""
        self.states[number] = ELSEWHERE

    def settle(self, number: int, state: str, record: Record | None) -> None:
        """Show the end of a cell, or that it is not run. Cells that ran at the same time may end so."""
        with self._settling:
            self.states[number], self.records[number] = state, record
            self._running.pop(number, None)
            if record:
                self._known.append(record)
            self._estimate()
            self._measure([*self._rows(), number])
            if not self._live:
                self.console.print(Text(f"{self._head(number)}  {'  '.join(self._line(number))}"))
                if record and record.failure:
                    self.console.print(
                        Text(
                            f"    {record.failure.cause}: {single_line(record.failure.message, MESSAGE_LENGTH)}"
                        )
                    )

    def _head(self, number: int) -> str:
        return f"[{number + 1}/{len(self.cells)}] {self.cells[number].name}"

    def _line(self, number: int) -> list[str]:
        """Return what is printed of a settled cell without a table: its state, every number with its unit, the verdict."""
        numbers = [
            with_unit(column, text, self._things, self._unit) + self._so_far(column)
            for column, text in self._numbers[number].items()
        ]
        return [
            part for part in (self.states[number], *numbers, verdict(self.records[number])) if part
        ]

    def _so_far(self, column: str) -> str:
        """Return words for a number that a cell to come may change: an efficiency, by another run of its baseline."""
        return (
            " so far"
            if column == EFFICIENCY and any(state not in SETTLED for state in self.states)
            else ""
        )

    def _measure(self, rows: Sequence[int]) -> None:
        """Take the numbers of finished cells; a baseline that came later changes those of earlier cells."""
        several = SeveralRecords(Study.of(self._known, others=self._others))
        for number in rows:
            record = self.records[number]
            if record is not None and record.state == "finished":
                self._values[number] = several.shown(record)
                found = cell_numbers(record, self._values[number])
                found.pop(
                    COST, None
                )  # a terminal has little room, and exposed communication says more
                self._numbers[number] = {
                    column: text.replace(THIN, " ") for column, text in found.items()
                }

    def _draw(self) -> Group:
        rows = self._rows()
        states = [self._state(number) for number in rows]
        records = [self.records[number] for number in rows]
        columns = {name: [texts[number] for number in rows] for name, texts in self._asked.items()}
        columns[STATE] = [state.plain for state in states]
        columns |= measured(self._numbers, rows)
        columns[VALIDITY] = [verdict(record) for record in records]
        headings = {name: heading(name, self._things, self._unit) for name in columns}
        words = [name for name in self._asked if name != GPUS]
        widths = fit(columns, words, records, self._width(), headings)
        table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        for name in columns:
            justify = "right" if name in COLUMNS and name != TRANSPORT else "left"
            head = headings[name] + self._so_far(name).replace(" so", "\nso")
            table.add_column(head, justify=justify, no_wrap=True, width=widths[name])  # type: ignore[arg-type]
        for place, number in enumerate(rows):
            table.add_row(
                *(Text(texts[place], self._style(name, number)) for name, texts in columns.items())
            )
        # Each a line of its own, cut and not wrapped: the table keeps its place.
        below = [
            Text(line, "dim", no_wrap=True, overflow="ellipsis")
            for line in (
                about_margins(self._values),
                about_reference(columns),
                self._summary(),
                self._now(),
            )
            if line
        ]
        return Group(table, *below) if rows else Group(*below)

    def _style(self, column: str, number: int) -> str:
        if column == VALIDITY:
            record = self.records[number]
            return STYLES.get(
                record.validity.verdict if record and record.state == "finished" else "failed", ""
            )
        return str(self._state(number).style) if column == STATE else ""

    def _state(self, number: int) -> Text:
        state = self.states[number]
        if state in SETTLED or state == WAITING:
            return Text(state, STYLES.get(state, "dim"))
        return Text(f"▸ {state}", "bold cyan")

    def _rows(self) -> Sequence[int]:
        """Return the rows that fit, around the first cell that is not settled; in the end all cells that were begun."""
        if self._last:
            return [number for number, state in enumerate(self.states) if state != WAITING]
        shown = self._shown()
        # An efficiency so far has a second line in its heading.
        more = (
            bool(about_margins(self._values)) + bool(about_reference(shown)) + (EFFICIENCY in shown)
        )
        room = max(FEWEST_ROWS, (self.console.height or 24) - AROUND - more)
        if len(self.cells) <= room:
            return range(len(self.cells))
        current = next(
            (n for n, state in enumerate(self.states) if state not in SETTLED), len(self.cells) - 1
        )
        first = min(max(0, current - room // 2), len(self.cells) - room)
        return range(first, first + room)

    def _shown(self) -> set[str]:
        """Return the columns of numbers that some cell has."""
        return {column for of_cell in self._numbers for column in of_cell}

    def _width(self) -> int:
        return self.console.width if self._in_place else UNLIMITED

    def _summary(self) -> str:
        """Return how many cells are done, and the time it took and will take."""
        settled = sum(state in SETTLED for state in self.states)
        bad = {state: self.states.count(state) for state in ("failed", "interrupted")}
        done = settled - sum(bad.values())
        parts = [
            f"{done} of {count(len(self.cells), 'cell')} in {duration(time.monotonic() - self._opened)}"
        ]
        parts += [f"{number} {state}" for state, number in bad.items() if number]
        if self._last:
            parts += (
                [f"{len(self.cells) - settled} not started"] if settled < len(self.cells) else []
            )
        else:
            left = self._left()
            parts += [f"about {duration(left)} left"] if left else []
            rows = self._rows()
            parts += [f"rows {rows[0] + 1}–{rows[-1] + 1}"] if len(rows) < len(self.cells) else []
        return ", ".join(parts)

    def _now(self) -> str:
        """Return what the running cells do."""
        return "; ".join(
            f"cell {number + 1}: {does}"
            for number, (_, does) in sorted(self._running.copy().items())
        )

    def _estimate(self) -> None:
        """Estimate the time of each cell that is not settled."""
        open_cells = [
            one for one, state in zip(self.cells, self.states, strict=True) if state not in SETTLED
        ]
        found = iter(estimates(open_cells, self._known))
        self._estimates = [
            0.0 if state in SETTLED else next(found).seconds for state in self.states
        ]

    def _left(self) -> int:
        """Return the seconds until the last cell is done, in steps of five; 0 where the estimate is over."""
        left = list(self._estimates)
        for number, (since, _) in self._running.copy().items():
            left[number] -= min(left[number], time.monotonic() - since)
        return 5 * round(
            sum(max(left[place] for place in together) for together in rounds(self.cells)) / 5
        )
