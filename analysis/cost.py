"""What a cell costs: the parts of its wall time, its seconds of measuring, and the ratio of both.

Parts are cut out by lines that rank 0 and the sampler of its GPUs wrote while the cell ran, so
`python -m analysis verify` makes them again. benchmarks/METHOD.md, "Seconds of a cell".
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.derived import Line, RankLines, of_kind
from benchmarks.record import CellFolder, Kind, Record, read_lines

TABLE = "seconds"  # of a record: {"rows": [{"part": …, "seconds": …}, …]}
SECONDS, MEASURING, RATIO = "cell/seconds", "cell/measuring_seconds", "cell/overhead_ratio"
SLACK_S = 0.1  # by which the parts may miss the wall time

# Parts that are no phases of a rank.
SETTLE = "settle"  # until the GPUs were idle and the first sample of them was taken
SPAWN = "spawn"  # until the process of rank 0 had begun
START = "start"  # until the first line of rank 0, where older lines do not tell more
IMPORTS = "imports"
CONTEXT = "context"  # until rank 0 had its GPU
CONNECT = "connect"  # until the ranks had met
EXIT = "exit"  # from the result until the launcher had seen the end

# Windows before the measuring begins; they do not count as measuring.
BEFORE_MEASURING = ("first", "warm-up", "using up")
# Lines whose windows are the sum of samples: the keys of the samples, in the line or in its rows,
# and their ms per unit.
SAMPLES: Mapping[str, tuple[tuple[str, ...], float]] = {
    Kind.HELD: (("ms",), 1.0),
    Kind.TIMELINE: (("update_ms",), 1.0),
    Kind.BUCKET_EXCHANGE: (("ms",), 1.0),
    Kind.SOLVES: (("seconds",), 1e3),
    Kind.GRID_COPIES: (("seconds",), 1e3),
}
LONGEST_WINDOW_MS = 1e12
NEED_WINDOW_MS = (
    Kind.WINDOW,
    Kind.P2P,
)  # without `window_ms` the length of their window is not known


@dataclass(frozen=True)
class CellCost:
    """The wall time of a cell, and what of it is known."""

    total: float  # seconds; below 0: the clock was set back while the cell ran
    parts: Mapping[str, float]  # {part: seconds} in order, adding up to the total; empty: not known
    measuring: float | None  # seconds; None: not known, or nothing was measured

    @property
    def ratio(self) -> float | None:
        """Seconds of the cell for each second of measuring."""
        return self.total / self.measuring if self.measuring and self.total > 0 else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of a finished cell."""
        values = {
            SECONDS: self.total if self.total >= 0 else None,
            MEASURING: self.measuring,
            RATIO: self.ratio,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def tables(self) -> dict[str, Any]:
        """The table of a record."""
        return {
            TABLE: {
                "rows": [{"part": part, "seconds": seconds} for part, seconds in self.parts.items()]
            }
        }


def from_lines(
    folder: CellFolder, lines: RankLines, started_at: float, ended_at: float
) -> CellCost:
    """Return the cost of a cell from its raw files: lines of ranks and samples of GPUs."""
    first_rank = lines.get(0, ())
    if not first_rank:
        return CellCost(ended_at - started_at, {}, measuring_seconds(lines))
    before = (
        line["time"] for line in read_lines(folder.gpu_samples) if line["kind"] == Kind.BEFORE
    )
    return CellCost(
        ended_at - started_at,
        parts(first_rank, next(before, None), started_at, ended_at),
        measuring_seconds(lines),
    )


def to_record(
    folder: CellFolder, lines: RankLines, started_at: float, ended_at: float
) -> CellCost | None:
    """Return the cost that the record of a cell states.

    None where its lines do not have every part.
    """
    if not has_every_part(lines.get(0, ())):
        return None
    return from_lines(folder, lines, started_at, ended_at)


def from_record(record: Record) -> CellCost | None:
    """Return the cost that a record states.

    None where it states none, or parts that do not add up.
    """
    if TABLE not in record.tables:
        return None
    total = record.ended_at - record.started_at
    seconds = {row["part"]: float(row["seconds"]) for row in record.tables[TABLE]["rows"]}
    if not all(0 <= value < math.inf for value in seconds.values()):
        return None
    if abs(sum(seconds.values()) - total) > SLACK_S:
        return None
    measuring = record.metrics.get(MEASURING)
    if measuring is not None and not 0 < measuring < math.inf:
        measuring = None
    return CellCost(total, seconds, measuring)


def has_every_part(lines: Sequence[Line]) -> bool:
    """Return whether rank 0 wrote everything that the parts are cut out by."""
    return any("began" in line for line in of_kind(lines, Kind.START))


def parts(
    lines: Sequence[Line], settled_at: float | None, started_at: float, ended_at: float
) -> dict[str, float]:
    """Return {part: seconds} of a cell from the lines of its rank 0.

    They add up to `ended_at` − `started_at`.
    Times are seconds since 1970. At `settled_at` the GPUs had been sampled for the first time.
    """
    seconds: dict[str, float] = {}
    moment, part = started_at, START
    for until, following in (*_beginnings(lines, settled_at, started_at), (ended_at, "")):
        until = min(max(until, moment), ended_at)
        if until > moment:
            seconds[part] = seconds.get(part, 0.0) + until - moment
        moment, part = until, following
    return seconds


def _beginnings(
    lines: Sequence[Line], settled_at: float | None, started_at: float
) -> Iterator[tuple[float, str]]:
    """Yield (time, part) for the begin of each part."""
    start = next(iter(of_kind(lines, Kind.START)), None)
    if start is None:
        return
    began = start.get("began")
    if began is None:
        first, until = START, start["time"]
    else:
        first, until = SPAWN, began
    if settled_at is not None and settled_at <= until:
        yield started_at, SETTLE
        yield settled_at, first
    else:
        yield started_at, first
    if began is not None:
        if "imported" in start:
            yield began, IMPORTS
        if str(start.get("device", "")).startswith("cuda"):
            yield start.get("imported", began), CONTEXT
    yield start["time"], CONNECT
    for line in lines:
        if line["kind"] == Kind.PHASE and "phase" in line:
            yield line["time"], str(line["phase"])
        elif line["kind"] in (Kind.RESULT, Kind.ERROR):
            yield line["time"], EXIT


def measuring_seconds(lines: RankLines) -> float | None:
    """Return the seconds in which at least one rank was inside a window that counts.

    None where lines do not tell.
    """
    spans = []
    for own in lines.values():
        for line in own:
            if line["kind"] in NEED_WINDOW_MS and "window_ms" not in line:
                return None
            seconds = _window_seconds(line)
            if seconds > 0:  # a line is written right after its window
                spans.append((line["time"] - seconds, line["time"]))
    return union_seconds(spans) or None


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are inside at least one of some spans (from, to)."""
    edges = []
    for first, last in spans:
        if last > first:
            edges += [(first, 1), (last, -1)]
    total, depth = 0.0, 0
    for (moment, change), (following, _) in pairwise(sorted(edges)):
        depth += change
        if depth:
            total += following - moment
    return total


def _window_seconds(line: Line) -> float:
    """Return the length of a line's window with its lead-in; 0 for a line without a window."""
    if line.get("purpose") in BEFORE_MEASURING:
        return 0.0
    length_ms = line.get("window_ms", line.get("host_ms"))
    if length_ms is None and line["kind"] in SAMPLES:
        names, ms_per_unit = SAMPLES[line["kind"]]
        rows = line.get("rows")
        holders = [line]
        if isinstance(rows, list):
            holders += [row for row in rows if isinstance(row, Mapping)]
        length_ms = math.fsum(
            ms_per_unit * _sum(holder.get(name)) for holder in holders for name in names
        )
    return length_ms / 1e3 if _is_length(length_ms) else 0.0


def _sum(values: Any) -> float:
    """Return the sum of a list of numbers; 0 for anything else."""
    if not isinstance(values, list) or not all(map(_is_length, values)):
        return 0.0
    return math.fsum(values)


def _is_length(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < LONGEST_WINDOW_MS
    )


def merge_key_order(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the keys of some rows, each behind those that precede it in its row."""
    order: list[str] = []
    for row in rows:
        position = 0
        for name in row:
            if name in order:
                position = order.index(name) + 1
            else:
                order.insert(position, name)
                position += 1
    return order
