"""What a person sees: one line for each cell. A live table on a terminal, plain lines elsewhere.

On a narrow terminal whole columns are left out, the least important first; no number is ever cut.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.findings.baselines import RATE, efficiency
from analysis.trace.metrics import TRACE_EXPOSED
from benchmarks.record import Record
from conf.cell import Cell
from launch.plan.order import PlannedCell
from launch.plan.time_estimate import estimate
from launch.supervision.progress import Watch
from launch.tracking.note import exposed, half_width, headline, percent, wires
from launch.tracking.note import number as shown

STYLES = {
    "valid": "green",
    "suspect": "yellow",
    "invalid": "red",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
}
SETTLED = ("finished", "failed", "interrupted", "done before", "held elsewhere")
WAITING = "waiting"
# Columns of what was measured; one without any value is left out.
NUMBERS = (
    "images/s", "±", "per GPU", "efficiency", "exchange ms", "of limit", "busbw GB/s", "exposed ms", "result", "transport",
)  # fmt: skip
# What a narrow terminal can do without, in this order.
DISPENSABLE = ("transport", "exposed ms", "of limit", "exchange ms", "per GPU", "busbw GB/s", "±", "efficiency")
STATE_WIDTH = 12  # of "interrupted": the column shall not jump
LEAST_WIDTH = 6  # of a column of words that is cut because nothing else is left to leave out
GAP = 2  # between columns


def _settings(cell: Cell) -> str:
    return " ".join(f"{name.removeprefix('NCCL_')}={value}" for name, value in sorted(cell.nccl.items())) or "–"


# Columns that say what a cell is; one that is the same for all cells is said once, above the table.
WHAT: dict[str, Callable[[Cell], str]] = {
    "model": lambda cell: cell.model.name if cell.trains else "–",
    "benchmark": lambda cell: str(cell.benchmark["name"]),
    "strategy": lambda cell: str(cell.strategy["name"]) if cell.trains else "–",
    "GPUs": lambda cell: ",".join(map(str, cell.gpus)),
    "NCCL": _settings,
    "batch": lambda cell: str(cell.batch_size) if cell.trains else "–",
    "precision": lambda cell: cell.precision if cell.trains else "–",
    "optimize": lambda cell: cell.optimize if cell.trains else "–",
}
COVERED = ("model", "strategy", "benchmark", "gpus", "nccl", "batch_size", "precision", "optimize", "repeat", "labels",
           "profiler_options")  # fmt: skip


class Screen:
    """Rows of a sweep; a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, cells: Sequence[PlannedCell], known: Sequence[Record], console: Console | None = None) -> None:
        """`known` are records of the study from before: baselines may be among them."""
        self.console = console or Console(highlight=False)
        self.cells = cells
        self.states = [WAITING] * len(cells)
        self.records: list[Record | None] = [None] * len(cells)
        self._known = list(known)
        self._numbers: list[dict[str, str]] = [{}] * len(cells)  # by column; what a record does not say is absent
        words = {name: [say(planned.cell) for planned in cells] for name, say in WHAT.items()}
        words |= _options([planned.cell for planned in cells])
        words["repeat"] = ["drift" if planned.drift else str(planned.cell.repeat) for planned in cells]
        self._constant = {name: said[0] for name, said in words.items() if name in WHAT and len(set(said)) == 1}
        self._constant.pop("GPUs", None)
        self._words = {name: said for name, said in words.items() if name == "GPUs" or len(set(said)) > 1}
        self._estimates: list[float] = []  # seconds
        self._opened: float = time.monotonic()
        self._running: tuple[int, float, str] | None = None  # cell, since when, what its slowest rank does
        self._live: Live | None = None
        self._last = False  # the table that stays

    def __enter__(self) -> "Screen":
        """Start drawing."""
        self._estimate()
        same = [f"{name} {said}" for name, said in self._constant.items() if said != "–"]
        for line in _filled(same, self._width()):
            self.console.print(Text(line, style="dim"))
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw the last state, every row that says something, and stop."""
        self._running, self._last = None, True
        self._measure(range(len(self.cells)))
        if self._live:
            self._live.__exit__(kind, error, trace)
        else:
            self.console.print(self._summary())

    def progress(self, number: int, watch: Watch) -> None:
        """A running cell: its slowest rank's phase."""
        behind = min(watch.ranks, key=lambda rank: (rank.iterations, not rank.done))
        phase = {"": "starting", "exit": "ending"}.get(behind.phase, behind.phase)
        first = self._running is None or self._running[0] != number
        since = time.monotonic() if first or self._running is None else self._running[1]
        self.states[number] = phase
        self._running = (number, since, f"{phase}, {behind.iterations} steps" if behind.iterations else phase)
        if not self._live and first:
            self.console.print(Text(f"{self._head(number)}  started", style="dim"))

    def settle(self, number: int, state: str, record: Record | None) -> None:
        """A cell that is closed, or not run."""
        self.states[number], self.records[number] = state, record
        self._running = None
        if record:
            self._known.append(record)
        self._estimate()
        self._measure([*self._rows(), number])
        if not self._live:
            self.console.print(Text(f"{self._head(number)}  {'  '.join(self._plain(number))}"))
            if record and record.failure:
                self.console.print(Text(f"    {record.failure.cause}: {record.failure.message}"))

    def _head(self, number: int) -> str:
        planned = self.cells[number]
        repeat = f" · repeat {planned.cell.repeat}" if "repeat" in self._words else ""
        mark = " · drift" if planned.drift else repeat
        return f"[{number + 1}/{len(self.cells)}] {planned.cell.name}{mark}"

    def _plain(self, number: int) -> list[str]:
        """What is printed of a settled cell without a table: every number with its unit."""
        units = {
            "images/s": " images/s",
            "per GPU": " per GPU",
            "efficiency": " efficiency",
            "exchange ms": " ms exchange",
            "of limit": " of limit",
            "busbw GB/s": " GB/s busbw",
            "exposed ms": " ms exposed",
        }
        said = self._numbers[number].items()
        numbers = [f"±{value}" if name == "±" else f"{value}{units.get(name, '')}" for name, value in said]
        return [part for part in (self.states[number], *numbers, self._verdict(number, "all")) if part]

    def _measure(self, rows: Sequence[int]) -> None:
        """What finished cells measured; a later baseline gives earlier cells their efficiency."""
        for number in rows:
            record = self.records[number]
            if record is None or record.state != "finished":
                continue
            metrics, several = record.metrics, len(record.cell.gpus) > 1
            rate = metrics.get(RATE)
            said = {
                "images/s": _number(rate),
                "±": percent(half_width(record)),
                "per GPU": _number(metrics.get("throughput/images_per_second_per_gpu")) if several else "",
                "efficiency": percent(efficiency(record, self._known), 1) if several else "",
                "exchange ms": _number(metrics.get("comm/exchange_ms")),
                "of limit": percent(metrics.get("comm/ideal_ratio"), 0),
                "busbw GB/s": _number(metrics.get("comm/busbw_gb_per_s")),
                "exposed ms": exposed(record) if TRACE_EXPOSED in metrics else "",
                "result": headline(record) if rate is None else "",
                "transport": wires(record),
            }
            self._numbers[number] = {name: text for name, text in said.items() if text}

    def _verdict(self, number: int, codes: str) -> str:
        """The verdict with `all` its codes, the `first` of them or their `count`; of a failed cell the cause."""
        record = self.records[number]
        if record is None:
            return ""
        if record.state != "finished":
            failure = record.failure
            if failure is None or failure.cause == record.state:
                return ""
            return failure.cause + (f", rank {failure.rank}" if failure.rank is not None else "")
        verdict, found = record.validity.verdict, list(record.validity.codes)
        if not found:
            return verdict
        if codes == "count":
            return f"{verdict}, {len(found)} {'code' if len(found) == 1 else 'codes'}"
        more = f" +{len(found) - 1}" if len(found) > 1 else ""
        return f"{verdict}: {', '.join(found) if codes == 'all' else found[0] + more}"

    def _draw(self) -> Group:
        rows = self._rows()
        states = [self._state(number) for number in rows]
        columns: dict[str, list[str]] = {name: [said[number] for number in rows] for name, said in self._words.items()}
        columns["state"] = [state.plain for state in states]
        for name in NUMBERS:
            if any(name in said for said in self._numbers):
                columns[name] = [self._numbers[number].get(name, "") for number in rows]
        columns["validity"] = [self._verdict(number, "all") for number in rows]
        widths = self._fit(columns, rows)
        table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        for name in columns:
            table.add_column(
                name,
                justify="right" if name in NUMBERS and name != "transport" else "left",
                no_wrap=True,
                width=widths[name],
            )
        for place, number in enumerate(rows):
            cells = [Text(said[place], self._style(name, number)) for name, said in columns.items()]
            table.add_row(*cells)
        below = [
            Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in (self._summary(), self._now()) if line
        ]
        return Group(table, *below)

    def _fit(self, columns: dict[str, list[str]], rows: Sequence[int]) -> dict[str, int]:
        """Leave out and shorten until the columns fit the terminal; returns their widths."""
        width = self._width()

        def widths() -> dict[str, int]:
            widest = {name: max(map(cell_len, [name, *said])) for name, said in columns.items()}
            return widest | {"state": max(STATE_WIDTH, widest["state"])}

        def excess() -> int:
            return sum(widths().values()) + GAP * (len(columns) - 1) - width

        for name in ("codes", *DISPENSABLE, "validity"):
            if excess() <= 0:
                break
            if name == "codes":
                columns["validity"] = [self._verdict(number, "first") for number in rows]
            elif name == "validity":
                columns[name] = [self._verdict(number, "count") for number in rows]
            else:
                columns.pop(name, None)
        found, over = widths(), max(0, excess())
        for name in sorted(self._words.keys() - {"GPUs"}, key=lambda name: (-found[name], name)):
            cut = min(over, max(0, found[name] - LEAST_WIDTH))
            found[name], over = found[name] - cut, over - cut
        return found

    def _style(self, column: str, number: int) -> str:
        if column == "validity":
            record = self.records[number]
            return STYLES.get(record.validity.verdict if record and record.state == "finished" else "failed", "")
        if column == "state":
            return str(self._state(number).style)
        return ""

    def _state(self, number: int) -> Text:
        state = self.states[number]
        if state in SETTLED or state == WAITING:
            return Text(state, STYLES.get(state, "dim"))
        return Text(f"▸ {state}", "bold cyan")

    def _rows(self) -> Sequence[int]:
        """The rows that fit: around the first that is not settled. In the end all that are not waiting."""
        if self._last:
            return [number for number, state in enumerate(self.states) if state != WAITING]
        room = max(3, (self.console.height or 24) - 6)
        if len(self.cells) <= room:
            return range(len(self.cells))
        current = next((n for n, state in enumerate(self.states) if state not in SETTLED), len(self.cells) - 1)
        first = min(max(0, current - room // 2), len(self.cells) - room)
        return range(first, first + room)

    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else 1000

    def _summary(self) -> str:
        """How far it is."""
        done = sum(state in SETTLED for state in self.states)
        passed = duration(time.monotonic() - self._opened)
        parts = [f"{done} of {len(self.cells)} cells, {passed} passed"]
        if self._last:
            bad = {state: self.states.count(state) for state in ("failed", "interrupted")}
            parts += [f"{count} {state}" for state, count in bad.items() if count]
            parts += [f"{len(self.cells) - done} not begun"] if done < len(self.cells) else []
        else:
            left = self._left()
            parts += [f"about {duration(left)} left"] if left else []
            rows = self._rows()
            parts += [f"rows {rows[0] + 1}–{rows[-1] + 1}"] if len(rows) < len(self.cells) else []
        return ", ".join(parts)

    def _now(self) -> str:
        """What the running cell does; a line of its own, so that neither wraps and the table keeps its place."""
        return f"cell {self._running[0] + 1}: {self._running[2]}" if self._running else ""

    def _estimate(self) -> None:
        """What each cell will take, as far as is known now; equal ones are asked for once."""
        self._estimates, found = [], {}
        for planned, state in zip(self.cells, self.states, strict=True):
            cell = planned.cell
            alike = repr((cell.model, cell.benchmark, cell.optimize, cell.device, cell.profiler))
            if state not in SETTLED and alike not in found:
                found[alike] = estimate(cell, self._known)
            self._estimates.append(0.0 if state in SETTLED else found[alike])

    def _left(self) -> int:
        """Seconds until the last cell is done, in steps of five; 0 where that is over."""
        seconds = sum(self._estimates)
        if self._running:
            number, since, _ = self._running
            seconds -= min(self._estimates[number], time.monotonic() - since)
        return 5 * round(seconds / 5)


def _options(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """What else tells cells apart: options in which two cells of the same model, strategy and benchmark differ."""
    listed = []
    for cell in cells:
        plain = cell.to_dict()
        flat: dict[str, Any] = {name: value for name, value in plain.items() if name not in COVERED}
        for group in ("model", "strategy", "benchmark"):
            flat |= {f"{group}.{name}": value for name, value in plain[group].items() if name != "name"}
        kind = (cell.model.name, cell.strategy["name"], cell.benchmark["name"])
        listed.append((kind, {name: str(value) for name, value in flat.items()}))
    columns = {}
    for name in dict.fromkeys(name for _, flat in listed for name in flat):
        pairs = {(kind, flat[name]) for kind, flat in listed if name in flat}
        if len(pairs) > len({kind for kind, _ in pairs}):
            columns[name.rpartition(".")[2]] = [flat.get(name, "–") for _, flat in listed]
    return columns


def _number(value: float | None) -> str:
    return "" if value is None else shown(value)


def _filled(parts: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width`, broken between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + GAP + cell_len(part) <= width:
            lines[-1] += " " * GAP + part
        else:
            lines.append(part)
    return lines


def duration(seconds: float) -> str:
    """`48 s`, `6 min 05 s`, `1 h 15 min`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
