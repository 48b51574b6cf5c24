"""What the end of a pool states: how the rate of its first cell changed until then, and how much noise explains.

The launching process imports this module: it needs no numpy.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from analysis.findings.next_run.interval import half_width
from analysis.findings.rates import primary_rate
from analysis.findings.study import Study
from analysis.findings.warm.pools import place_of
from benchmarks.record import Record, metrics

POOL_END = "pool_end"  # among the checks of a pool's last record: the fields of PoolEnd
LEAST_ALLOWED = 0.005  # of the rate: less counts as equal, as in the proof that warm equals cold


@dataclass(frozen=True)
class PoolEnd:
    """What the last record of a pool states of the first."""

    first: str  # record_id
    change: float  # of the rate, as a share
    allowed: float  # the largest rise that noise explains, likewise; a fall is allowed that such a rise makes good

    @property
    def least(self) -> float:
        """The largest fall that noise explains, as a negative share."""
        return 1 / (1 + self.allowed) - 1

    @property
    def drifted(self) -> bool:
        """Whether the change is more than noise explains, or no number."""
        return not self.least <= self.change <= self.allowed


def stated(record: Record) -> PoolEnd | None:
    """Return what a record states as the end of its pool; None where it states nothing that can be read."""
    facts = record.checks.get(POOL_END)
    if not isinstance(facts, Mapping):
        return None
    first, change, allowed = (
        facts.get(name) for name in ("first", "change", "allowed")
    )  # anything, in a damaged record
    if isinstance(first, str) and isinstance(change, float | int) and isinstance(allowed, float | int):
        return PoolEnd(first, change, allowed)
    return None


def facts_at_end(study: Study, record: Record) -> dict[str, object]:
    """Return what POOL_END has of a pool's last record; empty for any other, and where the pool had another first cell."""
    place = place_of(record)
    if not record.cell.ends_pool or place is None:
        return {}
    mine = study.single(record)
    for first in (*study.records, *study.replaced):
        other = study.single(first)
        if place_of(first) == (place.pool, 0) and (other.key, other.gpus) == (mine.key, mine.gpus):
            change, floor = change_of(record, first), mine.floor(mine.rate.metric)
            half = half_width(floor, 1) if floor is not None else _half_within(first, record, mine.rate.metric)
            if change is not None and half is not None:
                return asdict(PoolEnd(first.record_id, change, max(LEAST_ALLOWED, math.expm1(half))))
    return {}


def change_of(last: Record, first: Record) -> float | None:
    """Return the change of the rate from a pool's first record to its last, as a share; None where one has no rate."""
    rate = primary_rate(last.cell)
    before, after = (one.metrics.get(rate.metric, 0.0) for one in (first, last))
    return rate.change(before, after) if min(before, after) > 0 else None


def _half_within(first: Record, last: Record, metric: str) -> float | None:
    """Return half the interval of the logarithm of two runs' ratio by what they scattered inside; None without that."""
    halves = []
    for record in (first, last):
        ends = metrics.interval(metric, record.within_run)
        if ends is None or not 0 < ends[0] <= ends[1]:
            return None
        halves.append(math.log(ends[1] / ends[0]) / 2)
    return math.hypot(*halves)
