"""What the end of a pool states: how the rate of its first cell changed until then, and how much noise explains.

The launching process imports this module: it needs no numpy.
"""

import math

from analysis.findings.next_run.interval import half_width
from analysis.findings.rates import primary_rate
from analysis.findings.study import Study
from analysis.findings.warm.pools import place_of
from benchmarks.record import Record, metrics

POOL_END = (
    "pool_end"  # among the checks of a pool's last record: its first record, the change of the rate, what is allowed
)
LEAST_ALLOWED = 0.005  # of the rate: less counts as equal, as in the proof that warm equals cold


def at_end(study: Study, record: Record) -> dict[str, object]:
    """Return what POOL_END has of a pool's last record; empty for any other, and where the pool had another first cell."""
    place, rate = place_of(record), primary_rate(record.cell).metric
    if not record.cell.ends_pool or place is None:
        return {}
    mine = study.single(record)
    for first in (*study.records, *study.replaced):
        if (
            place_of(first) == (place.pool, 0)
            and study.single(first).key == mine.key
            and first.cell.gpus == record.cell.gpus
        ):
            change = _change(first, record, rate)
            floor = mine.floor(rate)
            half = half_width(floor, 1) if floor is not None else _half_within(first, record, rate)
            if change is None or half is None:
                return {}
            return {"first": first.record_id, "change": change, "allowed": max(LEAST_ALLOWED, math.expm1(half))}
    return {}


def change_of(record: Record, first: Record) -> float | None:
    """Return the change of the rate from a pool's first record to its last, as a share; None where one has no rate."""
    return _change(first, record, primary_rate(record.cell).metric)


def _change(first: Record, last: Record, metric: str) -> float | None:
    before, after = (one.metrics.get(metric, 0.0) for one in (first, last))
    return primary_rate(last.cell).change(before, after) if min(before, after) > 0 else None


def _half_within(first: Record, last: Record, metric: str) -> float | None:
    """Return half the interval of the logarithm of two runs' ratio by what they scattered inside; None without that."""
    halves = []
    for record in (first, last):
        ends = metrics.interval(metric, record.within_run)
        if ends is None or not 0 < ends[0] <= ends[1]:
            return None
        halves.append(math.log(ends[1] / ends[0]) / 2)
    return math.hypot(*halves)
