"""What a cell costs: the parts of its wall time, its seconds of measuring, and the ratio of both.

Parts are cut out by lines that rank 0 and the sampler of its GPUs wrote while the cell ran, so
`python -m analysis verify` makes them again. benchmarks/METHOD.md, "Seconds of a cell".
"""

import math
from collections.abc import Mapping, Sequence
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
IMPORTS = "imports"
CONTEXT = "context"  # until rank 0 had its GPU
CONNECT = "connect"  # until the ranks had met
EXIT = "exit"  # from the result until the launcher had seen the end

# Windows before the measuring begins; they do not count as measuring.
BEFORE_MEASURING = ("first", "warm-up", "using up")
# Lines whose windows are the sum of samples: the key of the samples, in the line or in its rows,
# and their ms per unit.
SAMPLES: Mapping[str, tuple[str, float]] = {
    Kind.HELD: ("ms", 1.0),
    Kind.TIMELINE: ("update_ms", 1.0),
    Kind.BUCKET_EXCHANGE: ("ms", 1.0),
    Kind.SOLVES: ("seconds", 1e3),
    Kind.GRID_COPIES: ("seconds", 1e3),
}
LONGEST_WINDOW_MS = 1e12
NEED_WINDOW_MS = (Kind.WINDOW, Kind.P2P)  # without `window_ms` their length is not known


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
        values = {}
        if self.total >= 0:
            values[SECONDS] = self.total
        for name, value in ((MEASURING, self.measuring), (RATIO, self.ratio)):
            if value is not None:
                values[name] = value
        return values

    @property
    def tables(self) -> dict[str, Any]:
        """The table of a record."""
        rows = [{"part": part, "seconds": seconds} for part, seconds in self.parts.items()]
        return {TABLE: {"rows": rows}}


def to_record(
    folder: CellFolder, lines: RankLines, started_at: float, ended_at: float
) -> CellCost | None:
    """Return the cost that the record of a cell states; None where its lines lack a part."""
    first_rank = lines.get(0, ())
    if not any("began" in line for line in of_kind(first_rank, Kind.START)):
        return None
    settled_at = None
    for line in read_lines(folder.gpu_samples):
        if line["kind"] == Kind.BEFORE:
            settled_at = line["time"]
            break
    own = parts(first_rank, settled_at, started_at, ended_at)
    return CellCost(ended_at - started_at, own, measuring_seconds(lines))


def from_record(record: Record) -> CellCost:
    """Return the cost that a record states; without parts where they do not add up."""
    total = record.ended_at - record.started_at
    rows = record.tables.get(TABLE, {"rows": []})["rows"]
    seconds = {row["part"]: float(row["seconds"]) for row in rows}
    adds_up = abs(sum(seconds.values()) - total) <= SLACK_S
    if not adds_up or min(seconds.values(), default=0.0) < 0:
        return CellCost(total, {}, None)
    measuring = record.metrics.get(MEASURING)
    if measuring is not None and not 0 < measuring < math.inf:
        measuring = None
    return CellCost(total, seconds, measuring)


def parts(
    lines: Sequence[Line], settled_at: float | None, started_at: float, ended_at: float
) -> dict[str, float]:
    """Return {part: seconds} of a cell from the lines of its rank 0, the first of which is START.

    They add up to `ended_at` − `started_at`, seconds since 1970. At `settled_at` the GPUs had been
    sampled for the first time.
    """
    start = next(iter(of_kind(lines, Kind.START)))
    began = start["began"]
    begins = [(started_at, SPAWN)]
    if settled_at is not None and settled_at <= began:
        begins = [(started_at, SETTLE), (settled_at, SPAWN)]
    if "imported" in start:
        begins.append((began, IMPORTS))
    if str(start.get("device", "")).startswith("cuda"):
        begins.append((start.get("imported", began), CONTEXT))
    begins.append((start["time"], CONNECT))
    for line in lines:
        if line["kind"] == Kind.PHASE and "phase" in line:
            begins.append((line["time"], str(line["phase"])))
        elif line["kind"] in (Kind.RESULT, Kind.ERROR):
            begins.append((line["time"], EXIT))
    seconds: dict[str, float] = {}
    moment = started_at
    for (_, part), (until, _) in pairwise([*begins, (ended_at, "")]):
        until = min(max(until, moment), ended_at)
        if until > moment:
            seconds[part] = seconds.get(part, 0.0) + until - moment
        moment = until
    return seconds


def measuring_seconds(lines: RankLines) -> float | None:
    """Return the seconds in which a rank was inside a window that counts; None: not known."""
    edges: list[tuple[float, int]] = []  # of windows, which a rank enters (1) and leaves (-1)
    for own in lines.values():
        for line in own:
            if line["kind"] in NEED_WINDOW_MS and "window_ms" not in line:
                return None
            if line.get("purpose") in BEFORE_MEASURING:
                continue
            length_ms = line.get("window_ms", line.get("host_ms"))  # with its lead-in
            if length_ms is None and line["kind"] in SAMPLES:
                name, ms_per_unit = SAMPLES[line["kind"]]
                sums = []
                for holder in (line, *(line.get("rows") or ())):
                    samples = holder.get(name, [])
                    if isinstance(samples, list) and all(map(_is_length, samples)):
                        sums.append(ms_per_unit * math.fsum(samples))
                length_ms = math.fsum(sums)
            if _is_length(length_ms) and length_ms > 0:
                # A line is written right after its window.
                edges += [(line["time"] - length_ms / 1e3, 1), (line["time"], -1)]
    seconds, depth = 0.0, 0
    for (moment, change), (following, _) in pairwise(sorted(edges)):
        depth += change
        if depth:
            seconds += following - moment
    return seconds or None


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LONGEST_WINDOW_MS
