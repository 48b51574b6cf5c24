"""What the launcher took besides its cells, from the journal of a study: before the first, between them and after the last."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.seconds.windows import open_seconds
from benchmarks.derived import Line
from benchmarks.record import Kind, read_lines
from benchmarks.record.record import LAST_TIME

JOURNAL = "journal.jsonl"
# What the launcher does for one cell beyond its wall time.
TUNING, PROFILED, PROJECTION = "tuning pass", "profiled pass", "projection"


@dataclass
class SweepSeconds:
    """One sweep of a study. Times are seconds since 1970."""

    sweep_id: str
    began_at: (
        float | None
    )  # when launch.py began, or in older journals its process; None: an earlier sweep ran in that
    planned_at: float  # when the cells were known, and were about to be measured
    begun: dict[str, float] = field(default_factory=dict)  # {token: when the attempt began}
    ended: dict[str, float] = field(default_factory=dict)  # {token: when its record was written}
    closed_at: float | None = (
        None  # when the report was written and the tracking closed; None: not known
    )

    @property
    def plan(self) -> float | None:
        """Seconds until the cells were known: imports, the configuration, the machine."""
        return _seconds(self.began_at, self.planned_at)

    @property
    def before(self) -> float | None:
        """Seconds from there to the first cell."""
        return _seconds(self.planned_at, min(self.begun.values(), default=None))

    @property
    def of_cells(self) -> float | None:
        """Seconds between the begin of a cell and its record, passes too; those of cells at the same time count once.

        None where a clock was set back in one.
        """
        spans = [(self.begun[token], last) for token, last in self.ended.items()]
        return open_seconds(spans) if None not in [_seconds(*span) for span in spans] else None

    @property
    def between(self) -> float | None:
        """Seconds between the first begin and the last record in which no cell ran; None with fewer than two cells."""
        if len(self.ended) < 2 or (of_cells := self.of_cells) is None:
            return None
        return max(self.ended.values()) - min(self.begun[token] for token in self.ended) - of_cells

    @property
    def after(self) -> float | None:
        """Seconds from the last record to the end of the sweep."""
        return _seconds(max(self.ended.values(), default=None), self.closed_at)

    @property
    def total(self) -> float | None:
        """Seconds from the begin of the launcher to the end of the sweep."""
        return _seconds(self.began_at, self.closed_at)


@dataclass(frozen=True)
class Journal:
    """What the journal of a study says of time."""

    sweeps: tuple[SweepSeconds, ...]
    beyond: Mapping[
        str, Mapping[str, float]
    ]  # {token of an attempt: {part: seconds beyond its wall time}}
    written: Mapping[str, float]  # {token of an attempt: when its record was written}


def journal(folder: Path) -> Journal:
    """Return what the journal in the folder of a study says; a study without one has neither. Damaged lines are passed over."""
    lines = [
        line
        for line in read_lines(folder / JOURNAL)
        if _is_number(line["time"]) and _process(line) is not None
    ]
    beyond: dict[str, dict[str, float]] = {}
    for token, part, seconds in _spent(lines):
        of_cell = beyond.setdefault(token, {})
        of_cell[part] = of_cell.get(part, 0.0) + seconds
    written = {line["token"]: line["time"] for line in lines if _is_of_attempt(line, Kind.END)}
    return Journal(tuple(_sweeps(lines)), beyond, written)


def _sweeps(lines: Iterable[Line]) -> list[SweepSeconds]:
    """Return the sweeps in their order. A line belongs to the newest sweep of the process that wrote it."""
    sweeps: list[SweepSeconds] = []
    newest: dict[Any, SweepSeconds] = {}
    for line in lines:
        process = _process(line)
        sweep = newest.get(process)
        if line["kind"] == Kind.SWEEP:
            newest[process] = SweepSeconds(
                str(line.get("sweep_id", "")), _began(line, sweep is not None), line["time"]
            )
            sweeps.append(newest[process])
        elif sweep and _is_of_attempt(line, Kind.BEGIN):
            sweep.begun[line["token"]] = line["time"]
        elif sweep and _is_of_attempt(line, Kind.END) and line["token"] in sweep.begun:
            sweep.ended[line["token"]] = line["time"]
        elif sweep and line["kind"] == Kind.CLOSED:
            sweep.closed_at = line["time"]
    return sweeps


def _began(line: Line, is_later: bool) -> float | None:
    """Return when launch.py began; `is_later`: an earlier sweep ran in its process. None where the line does not say.

    Lines of an earlier Ringside have the begin of the process alone, which may have done other things before.
    """
    began = line.get("began", None if is_later else line["process"]["started"])
    return float(began) if began is not None and _is_number(began) else None


def _spent(lines: Iterable[Line]) -> Iterator[tuple[str, str, float]]:
    for line in lines:
        token, part, seconds = line.get("token"), line.get("part"), line.get("seconds")
        is_spent = line["kind"] == Kind.SPENT and isinstance(token, str) and isinstance(part, str)
        if is_spent and seconds is not None and _is_number(seconds) and seconds >= 0:
            yield str(token), str(part), float(seconds)


def _is_of_attempt(line: Line, kind: Kind) -> bool:
    return bool(line["kind"] == kind) and isinstance(line.get("token"), str)


def _process(line: Line) -> tuple[str, str, str] | None:
    """Return what tells the process that wrote a line from others; None where the line does not say it."""
    process = line.get("process")
    if not isinstance(process, Mapping) or not _is_number(process.get("started")):
        return None
    host, pid, boot = (str(process.get(name)) for name in ("host", "pid", "boot_id"))
    return host, pid, boot


def _seconds(first: float | None, last: float | None) -> float | None:
    """Return the seconds between two moments; None where one is not known, or a clock was set back in between."""
    return None if first is None or last is None or last < first else last - first


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LAST_TIME
