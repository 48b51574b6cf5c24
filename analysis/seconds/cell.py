"""What a cell cost: its parts, its seconds of measuring, and the ratio of both, as its record states them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.seconds.parts import parts, settled, tells
from analysis.seconds.windows import measuring_seconds
from benchmarks.derived import Line, RankLines
from benchmarks.record import CellFolder, Record

TABLE = "seconds"  # of a record: {"rows": [{"part": …, "seconds": …}, …]}
SLACK_S = 0.1  # by which the parts may miss the wall time
SECONDS, MEASURING, RATIO = "cell/seconds", "cell/measuring_seconds", "cell/overhead_ratio"


@dataclass(frozen=True)
class CellSeconds:
    """The wall time of a cell, and what of it is known."""

    total: float  # below 0: the clock was set back while it ran, and nothing is known
    parts: Mapping[str, float]  # in order, adding up to the total; empty: not known
    measuring: float | None  # None: not known, or nothing was measured

    @property
    def ratio(self) -> float | None:
        """Seconds of the cell for each second of measuring."""
        return self.total / self.measuring if self.measuring and self.total > 0 else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of a finished cell."""
        known = {
            SECONDS: self.total if self.total >= 0 else None,
            MEASURING: self.measuring,
            RATIO: self.ratio,
        }
        return {name: value for name, value in known.items() if value is not None}

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
) -> CellSeconds:
    """Return what a cell cost by its raw files: the lines of its ranks and the samples of its GPUs."""
    of_first: Sequence[Line] = lines.get(0, ())
    known = parts(of_first, settled(folder), started_at, ended_at) if of_first else {}
    return CellSeconds(ended_at - started_at, known, measuring_seconds(lines))


def to_record(
    folder: CellFolder, lines: RankLines, started_at: float, ended_at: float
) -> CellSeconds | None:
    """Return what the record of a cell states of its cost; None where its lines do not tell every part."""
    return from_lines(folder, lines, started_at, ended_at) if tells(lines.get(0, ())) else None


def from_record(record: Record) -> CellSeconds | None:
    """Return what a record states; None for one of an earlier Ringside, or one whose parts do not add up."""
    total, measuring = record.ended_at - record.started_at, record.metrics.get(MEASURING)
    try:
        stated = {str(row["part"]): float(row["seconds"]) for row in record.tables[TABLE]["rows"]}
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if (
        not all(0 <= seconds < math.inf for seconds in stated.values())
        or abs(sum(stated.values()) - total) > SLACK_S
    ):
        return None
    return CellSeconds(
        total, stated, measuring if measuring is not None and 0 < measuring < math.inf else None
    )


def named_in_order(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names that occur in some rows, each behind those that come before it in its row."""
    order: list[str] = []
    for row in rows:
        place = 0
        for name in row:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return order
