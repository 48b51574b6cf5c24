"""What a person sees: one line for each cell. A live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.scaling import efficiency
from benchmarks.record import Record
from conf.cell import Cell
from launch.plan import Planned
from launch.supervise import Watch

STYLES = {
    "valid": "green",
    "suspect": "yellow",
    "invalid": "red",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
}
SETTLED = ("finished", "failed", "interrupted", "done before", "held elsewhere")


def _settings(cell: Cell) -> str:
    return " ".join(f"{name.removeprefix('NCCL_')}={value}" for name, value in sorted(cell.nccl.items())) or "–"


# Columns that say what a cell is; one that is the same for all cells is said once, above the table.
WHAT: dict[str, Callable[[Cell], str]] = {
    "model": lambda cell: cell.model.name,
    "benchmark": lambda cell: str(cell.benchmark["name"]),
    "strategy": lambda cell: str(cell.strategy["name"]),
    "GPUs": lambda cell: ",".join(map(str, cell.gpus)),
    "NCCL": _settings,
    "batch": lambda cell: str(cell.batch_size),
    "precision": lambda cell: cell.precision,
    "optimize": lambda cell: cell.optimize,
}


class Screen:
    """Rows of a sweep; a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, cells: Sequence[Planned], known: Sequence[Record], console: Console | None = None) -> None:
        """`known` are records of the study from before: baselines may be among them."""
        self.console = console or Console(highlight=False)
        self.cells = cells
        self.states = ["waiting"] * len(cells)
        self.records: list[Record | None] = [None] * len(cells)
        self._known = list(known)
        self._constant = {
            name: say(cells[0].cell)
            for name, say in WHAT.items()
            if len({say(c.cell) for c in cells}) == 1 and name != "GPUs"
        }
        self._opened: float = time.monotonic()
        self._live: Live | None = None
        self._phase = ""

    def __enter__(self) -> "Screen":
        """Start drawing."""
        self.console.print(Text("  ".join(f"{n} {v}" for n, v in self._constant.items() if v != "–"), style="dim"))
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw the last state and stop."""
        if self._live:
            self._live.__exit__(kind, error, trace)

    def progress(self, number: int, watch: Watch) -> None:
        """A running cell: its slowest rank's phase."""
        behind = min(watch.ranks, key=lambda rank: (rank.iterations, not rank.done))
        phase = behind.phase or "starting"
        self.states[number] = f"{phase} {behind.iterations}" if behind.iterations else phase
        if not self._live and phase != self._phase:
            self._phase = phase
            self.console.print(f"{self._head(number)}  {phase} …", style="dim")

    def settle(self, number: int, state: str, record: Record | None) -> None:
        """A cell that is closed, or not run."""
        self.states[number], self.records[number] = state, record
        if record:
            self._known.append(record)
        if not self._live:
            row = "  ".join(part for part in self._result(number) if part not in ("", "–"))
            self.console.print(f"{self._head(number)}  {row}")
            if record and record.failure:
                self.console.print(f"    {record.failure.cause}: {record.failure.message}", markup=False)

    def _head(self, number: int) -> str:
        return f"[{number + 1}/{len(self.cells)}] {self.cells[number].cell.name}".replace("[", "\\[", 1)

    def _result(self, number: int) -> list[str]:
        """state, images/s, per GPU, efficiency, busbw, validity."""
        state, record = self.states[number], self.records[number]
        if record is None or record.state != "finished":
            return [state, "", "", "", "", ""]
        metrics = record.metrics
        rate, low = metrics.get("throughput/images_per_second"), metrics.get("throughput/ci_low")
        share = efficiency(record, self._known)
        plain = self._live is None
        codes = ", ".join(record.validity.codes)
        return [
            state,
            f"{rate:,.1f} ±{(rate - low) / rate:.1%}{' images/s' if plain else ''}" if rate and low else "–",
            _number(metrics.get("throughput/images_per_second_per_gpu"), ",.1f", " per GPU" if plain else ""),
            _number(share, ".1%", " efficiency" if plain else ""),
            _number(metrics.get("comm/busbw_gb_per_s"), ".2f", " GB/s busbw" if plain else ""),
            f"{record.validity.verdict}: {codes}" if codes else record.validity.verdict,
        ]

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        what = {name: say for name, say in WHAT.items() if name not in self._constant}
        for name in what:
            table.add_column(name, no_wrap=True)
        table.add_column("state", no_wrap=True, min_width=16)
        for name in ("images/s", "per GPU", "efficiency", "busbw GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("validity")
        for number in self._visible():
            state, *numbers, verdict = self._result(number)
            running = state not in (*SETTLED, "waiting")
            style = "bold cyan" if running else STYLES.get(state, "dim")
            cells = [say(self.cells[number].cell) + (" (drift)" if self.cells[number].drift and n == "GPUs" else "")
                     for n, say in what.items()]  # fmt: skip
            table.add_row(*cells, Text(state, style), *numbers, Text(verdict, STYLES.get(verdict.split(":")[0], "")))
        return Group(table, Text(self._summary(), style="dim"))

    def _visible(self) -> range:
        """The rows that fit: around the first that is not settled."""
        room = max(3, (self.console.height or 24) - 6)
        if len(self.cells) <= room:
            return range(len(self.cells))
        current = next((n for n, state in enumerate(self.states) if state not in SETTLED), len(self.cells) - 1)
        first = min(max(0, current - room // 2), len(self.cells) - room)
        return range(first, first + room)

    def _summary(self) -> str:
        done = sum(state in SETTLED for state in self.states)
        measured = [record.ended_at - record.started_at for record, state in zip(self.records, self.states, strict=True)
                    if record and state != "done before"]  # fmt: skip
        left = (len(self.cells) - done) * sum(measured) / len(measured) if measured else None
        passed = duration(time.monotonic() - self._opened)
        return f"{done} of {len(self.cells)} cells, {passed} passed" + (
            f", about {duration(left)} left" if left else ""
        )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
