"""The parts of the exposed communication: inside hosts and between them; on one host, the tail and
the slowed backward, from observed steps with the exchange and without it (tables.timeline).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.findings.communication import COST
from analysis.study.draws import Step, draws_of_median, mean_step
from analysis.study.provenance import listed, mapping
from analysis.study.runs import Runs
from benchmarks.record import Record, finite
from benchmarks.timing.statistics import ERROR_OF_MEDIAN
from conf.cell import Member

COMMUNICATION = "exposed communication"
INSIDE, BETWEEN = "communication inside hosts", "communication between hosts"  # together all of it
TAIL = "exchange after the last gradient"
SLOWED = "backward slowed by the exchange"
REST = "exposed, not explained"
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
UNSEEN_ALONE = "no GPU's steps were observed alone"
UNSPLIT = (
    "no host was measured alone with all its GPUs: what is lost inside hosts and between them is "
    "not told apart"
)
QUARTILES = 1.349  # between those of normal values, in standard deviations


class LossPart(NamedTuple):
    """A part of a waterfall."""

    name: str
    step: Step | None  # None: not known
    why: str = ""  # it is not known, or what qualifies it


class Time(NamedTuple):
    """A time in ms with its standard error."""

    ms: float
    error: float

    def minus(self, earlier: "Time") -> "Time":
        """Return the time since another one."""
        return Time(self.ms - earlier.ms, math.hypot(self.error, earlier.error))


def by_hosts(
    runs: Runs, parts: Sequence[LossPart], hosts: Mapping[Member, Runs], alone: Step | None
) -> Sequence[LossPart]:
    """Return the parts with the communication of several hosts split into inside and between.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts,
    without what it costs on one GPU.
    """
    (_, exposed, why), *rest = parts
    if exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [LossPart(BETWEEN, exposed, why), *rest]
    costs = []
    for of_host in hosts.values():
        cost = of_host.step(COST)
        if cost is not None:
            costs.append(cost)
    inside = mean_step(costs)
    if inside is None or len(costs) < len(hosts):
        return [LossPart(COMMUNICATION, exposed, _joined(why, UNSPLIT)), *rest]
    if alone:
        inside = inside - alone
    return [LossPart(INSIDE, inside, why), LossPart(BETWEEN, exposed - inside), *rest]


def in_parts(
    parts: Sequence[LossPart], runs: Runs, alone: Mapping[Member, Runs]
) -> Sequence[LossPart]:
    """Return the parts with the exposed one split by observed steps, else with the reason."""
    (name, exposed, why), *rest = parts
    if exposed is None:
        return parts
    together = _observed(runs)
    tails, slowed_backwards = [], []
    for member in alone.values():
        of_member = _observed(member)
        if of_member:
            tails.append(of_member[TAIL])
            slowed_backwards.append(of_member[SLOWED])
    tail_alone, slowed_alone = mean_step(tails), mean_step(slowed_backwards)
    if not together or tail_alone is None or slowed_alone is None:
        reason = UNSEEN_ALONE
        if not together:
            reason = _why_unseen(runs.records[0])
        return [LossPart(name, exposed, _joined(why, f"its parts are not known: {reason}")), *rest]
    tail, slowed = together[TAIL] - tail_alone, together[SLOWED] - slowed_alone
    unexplained = LossPart(REST, exposed - tail - slowed)
    return [LossPart(TAIL, tail, why), LossPart(SLOWED, slowed), unexplained, *rest]


def _why_unseen(record: Record) -> str:
    for row in _rows(record).values():
        for reason in mapping(row.get("unknown")).values():
            if isinstance(reason, str):
                return reason
    return UNSEEN


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _observed(runs: Runs) -> dict[str, Step]:
    """Return how much longer TAIL and SLOWED take with the exchange, medians over the runs; empty
    without steps with the exchange and without it.
    """
    observed: dict[str, list[Time]] = {TAIL: [], SLOWED: []}
    for record in runs.records:
        times = _observed_of(record)
        if times is not None:
            for name, time in zip(observed, times, strict=True):
                observed[name].append(time)
    steps = {}
    for index, (name, times_of_runs) in enumerate(observed.items()):
        if not times_of_runs:
            return {}
        values, errors = zip(*times_of_runs, strict=True)
        deviation = statistics.median(errors)
        if len(values) > 1:  # the larger of the scatter inside runs and of that between them
            deviation = max(deviation, statistics.stdev(values))
        median, seed = statistics.median(values), f"{index} moments {runs.records[0].record_id}"
        steps[name] = Step(median, draws_of_median(median, deviation, len(values), seed))
    return steps


def _observed_of(record: Record) -> tuple[Time, Time] | None:
    """Return how much longer tail and backward take, on the rank with the shortest tail."""
    rows = _rows(record)
    of_ranks = []
    for rank in range(record.cell.world_size):
        without, with_exchange = _ends(rows.get((rank, False))), _ends(rows.get((rank, True)))
        if without is None or with_exchange is None:
            return None
        slowed = with_exchange[0].minus(without[0])
        tail = with_exchange[1].minus(without[1]).minus(slowed)
        of_ranks.append((tail, slowed))
    return min(of_ranks)


def _ends(row: Mapping[str, Any] | None) -> tuple[Time, Time] | None:
    """Return when the last gradient is there, and when the exchange has ended."""
    if row is None:
        return None
    ready, spreads = row.get("ready_ms"), row.get("ready_spread_ms")
    steps = finite(row.get("steps"))
    if not isinstance(ready, list) or not isinstance(spreads, list) or not steps or steps < 1:
        return None
    if len(spreads) != len(ready) or not ready:
        return None
    moments = [*ready, row.get("exchange_ms"), row.get("update_ms")]
    spreads = [*spreads, row.get("exchange_spread_ms"), row.get("update_spread_ms")]
    share = ERROR_OF_MEDIAN / QUARTILES / math.sqrt(steps)
    times = []
    for moment, spread in zip(moments, spreads, strict=True):
        at_ms, spread_ms = finite(moment), finite(spread)
        if at_ms is None or spread_ms is None:
            return None
        times.append(Time(at_ms, spread_ms * share))
    return max(times[:-2]), times[-2]


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    rows = {}
    for row in listed(mapping(record.tables.get("timeline")).get("rows")):
        if isinstance(row.get("rank"), int):
            rows[row["rank"], bool(row.get("exchange"))] = row
    return rows
