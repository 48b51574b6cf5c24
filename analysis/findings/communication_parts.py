"""The parts of the exposed communication: inside hosts and between them; on one host, the tail and
the slowed backward, from observed steps with the exchange and without it (tables.timeline).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.communication import COST
from analysis.study.draws import Step, draws_of_median, mean_step
from analysis.study.estimates import Member
from analysis.study.provenance import listed, mapping
from analysis.study.runs import Runs
from benchmarks.record import Record, finite
from benchmarks.timing.statistics import ERROR_OF_MEDIAN

COMMUNICATION = "exposed communication"
INSIDE, BETWEEN = "communication inside hosts", "communication between hosts"  # together all of it
TAIL = "exchange after the last gradient"
SLOWED = "backward slowed by the exchange"
REST = "exposed, not explained"
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
QUARTILES = 1.349  # between those of normal values, in standard deviations
# Of a waterfall: name, time, and why it is not known or what qualifies it.
Parts = list[tuple[str, Step | None, str]]
# Three times in ms, and their standard errors.
Moments = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Observed:
    """How much longer the parts of a step take with the exchange."""

    tail: Step
    slowed: Step
    after: Step


def by_hosts(runs: Runs, parts: Parts, hosts: Mapping[Member, Runs], alone: Step | None) -> Parts:
    """Return the parts with the communication of several hosts split into inside and between.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts,
    without what it costs on one GPU.
    """
    (_, exposed, why), *rest = parts
    if exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [(BETWEEN, exposed, why), *rest]
    costs = []
    for of_host in hosts.values():
        cost = of_host.step(COST)
        if cost is not None:
            costs.append(cost)
    whole = mean_step(costs)
    if whole is None or len(costs) < len(hosts):
        unsplit = (
            "no host was measured alone with all its GPUs: what is lost inside hosts and between "
            "them is not told apart"
        )
        return [(COMMUNICATION, exposed, _joined(why, unsplit)), *rest]
    inside = whole
    if alone:
        inside = whole - alone
    return [(INSIDE, inside, why), (BETWEEN, exposed - inside, ""), *rest]


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts with the exposed one split by observed steps, else with the reason."""
    (name, exposed, why), *rest = parts
    if exposed is None:
        return parts
    together = observed(runs)
    own_tails, own_slowed = [], []
    for member in alone.values():
        of_member = observed(member)
        if of_member is not None:
            own_tails.append(of_member.tail)
            own_slowed.append(of_member.slowed)
    if together is None or not own_tails:
        reasons = ["no GPU's steps were observed alone"]
        if together is None:
            reasons = []
            for row in _rows(runs.records[0]).values():
                reasons += mapping(row.get("unknown")).values()
            reasons = [reason for reason in reasons if isinstance(reason, str)] or [UNSEEN]
        return [(name, exposed, _joined(why, f"its parts are not known: {reasons[0]}")), *rest]
    tail, slowed = beyond(together.tail, own_tails), beyond(together.slowed, own_slowed)
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *rest]


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def beyond(together: Step, alone: Sequence[Step]) -> Step:
    """Return a part of a step on several GPUs without the mean of what it is on one."""
    mean = mean_step(alone)
    return together if mean is None else together - mean


def observed(runs: Runs) -> Observed | None:
    """Return the medians of the parts over runs; None without steps with and without exchange."""
    values_of_runs, errors_of_runs = [], []
    for record in runs.records:
        moments = _moments(record)
        if moments is not None:
            values_of_runs.append(moments[0])
            errors_of_runs.append(moments[1])
    steps = []
    parts = zip(zip(*values_of_runs, strict=True), zip(*errors_of_runs, strict=True), strict=True)
    for index, (values, errors) in enumerate(parts):
        deviation = statistics.median(errors)
        if len(values) > 1:  # the larger of the scatter inside runs and of that between them
            deviation = max(deviation, statistics.stdev(values))
        median, name = statistics.median(values), f"{index} moments {runs.records[0].record_id}"
        steps.append(Step(median, draws_of_median(median, deviation, len(values), name)))
    if not steps:
        return None
    return Observed(*steps)


def _moments(record: Record) -> Moments | None:
    """Return how much longer tail, backward and update take, on the rank with the shortest tail."""
    rows = _rows(record)
    moments = []
    for rank in range(record.cell.world_size):
        before, after = _ends(rows.get((rank, False))), _ends(rows.get((rank, True)))
        if before is None or after is None:
            return None
        (last, end, whole), (last_with, end_with, whole_with) = before[0], after[0]
        of_last, of_end, of_whole = map(math.hypot, before[1], after[1])
        parts = (
            (end_with - last_with) - (end - last),
            last_with - last,
            (whole_with - end_with) - (whole - end),
        )
        errors = (math.hypot(of_last, of_end), of_last, math.hypot(of_end, of_whole))
        moments.append((parts, errors))
    return min(moments)


def _ends(row: Mapping[str, Any] | None) -> Moments | None:
    """Return when the last gradient is there, the exchange has ended and the step has, in ms."""
    if row is None:
        return None
    ready, spreads = row.get("ready_ms"), row.get("ready_spread_ms")
    steps = finite(row.get("steps"))
    if not isinstance(ready, list) or not isinstance(spreads, list) or not steps or steps < 1:
        return None
    if len(spreads) != len(ready) or not ready:
        return None
    times = [*ready, row.get("exchange_ms"), row.get("update_ms")]
    spreads = [*spreads, row.get("exchange_spread_ms"), row.get("update_spread_ms")]
    share = ERROR_OF_MEDIAN / QUARTILES / math.sqrt(steps)
    moments = []
    for time, spread in zip(times, spreads, strict=True):
        at_ms, spread_ms = finite(time), finite(spread)
        if at_ms is None or spread_ms is None:
            return None
        moments.append((at_ms, spread_ms * share))
    last, exchange, update = max(moments[:-2]), *moments[-2:]
    ends, errors = zip(last, exchange, update, strict=True)
    return ends, errors


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    rows = {}
    for row in listed(mapping(record.tables.get("timeline")).get("rows")):
        if isinstance(row.get("rank"), int):
            rows[row["rank"], bool(row.get("exchange"))] = row
    return rows
