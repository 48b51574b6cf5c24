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
    costs = [of_host.step(COST) for of_host in hosts.values()]
    measured = [step for step in costs if step is not None]
    whole = mean_step(measured) if len(measured) == len(costs) else None
    if whole is None:
        unsplit = (
            "no host was measured alone with all its GPUs: what is lost inside hosts and between "
            "them is not told apart"
        )
        return [(COMMUNICATION, exposed, _joined(why, unsplit)), *rest]
    inside = whole - alone if alone else whole
    return [(INSIDE, inside, why), (BETWEEN, exposed - inside, ""), *rest]


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts with the exposed one split by observed steps, else with the reason."""
    (name, exposed, why), *rest = parts
    if exposed is None:
        return parts
    together = observed(runs)
    members = [observed(member) for member in alone.values()]
    own = [member for member in members if member is not None]
    if together is None or not own:
        reason = "no GPU's steps were observed alone"
        if together is None:
            reason = _why_unseen(runs.records[0])
        return [(name, exposed, _joined(why, f"its parts are not known: {reason}")), *rest]
    tail = beyond(together.tail, [member.tail for member in own])
    slowed = beyond(together.slowed, [member.slowed for member in own])
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *rest]


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def beyond(together: Step, alone: Sequence[Step]) -> Step:
    """Return a part of a step on several GPUs without the mean of what it is on one."""
    mean = mean_step(alone)
    return together if mean is None else together - mean


def observed(runs: Runs) -> Observed | None:
    """Return the medians of the parts over runs; None without steps with and without exchange."""
    of_records = [_moments(record) for record in runs.records]
    moments = [of_record for of_record in of_records if of_record is not None]
    if not moments:
        return None
    steps = []
    for index in range(3):
        values = [times[index] for times, _ in moments]
        errors = [errors[index] for _, errors in moments]
        # The larger of the scatter inside runs and of that between them.
        between = statistics.stdev(values) if len(values) > 1 else 0.0
        deviation = max(statistics.median(errors), between)
        median, name = statistics.median(values), f"{index} moments {runs.records[0].record_id}"
        steps.append(Step(median, draws_of_median(median, deviation, len(values), name)))
    return Observed(*steps)


def _why_unseen(record: Record) -> str:
    for row in _rows(record).values():
        for text in mapping(row.get("unknown")).values():
            if isinstance(text, str):
                return text
    return UNSEEN


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
    ready, spreads, steps = (
        row.get("ready_ms"),
        row.get("ready_spread_ms"),
        finite(row.get("steps")),
    )
    if not isinstance(ready, list) or not isinstance(spreads, list) or not steps or steps < 1:
        return None
    if len(spreads) != len(ready) or not ready:
        return None
    times = [*ready, row.get("exchange_ms"), row.get("update_ms")]
    spreads = [*spreads, row.get("exchange_spread_ms"), row.get("update_spread_ms")]
    moments = []
    for time, spread in zip(times, spreads, strict=True):
        at_ms, spread_ms = finite(time), finite(spread)
        if at_ms is None or spread_ms is None:
            return None
        moments.append((at_ms, spread_ms))
    ends = [max(moments[:-2]), *moments[-2:]]
    share = ERROR_OF_MEDIAN / QUARTILES / math.sqrt(steps)
    return tuple(at_ms for at_ms, _ in ends), tuple(spread_ms * share for _, spread_ms in ends)


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    rows = {}
    for row in listed(mapping(record.tables.get("timeline")).get("rows")):
        if isinstance(row.get("rank"), int):
            rows[row["rank"], bool(row.get("exchange"))] = row
    return rows
