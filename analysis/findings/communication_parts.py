"""The parts of the exposed communication: inside hosts and between them; on one host, the tail and
the slowed backward.

The parts on one host come from the moments of observed steps with the exchange and without it
(tables.timeline).
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
# Together what is exposed of it.
INSIDE, BETWEEN = "communication inside hosts", "communication between hosts"
TAIL = "exchange after the last gradient"
SLOWED = "backward slowed by the exchange"
REST = "exposed, not explained"
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
_QUARTILES = 1.349  # between those of normal values, in standard deviations
# Of a waterfall: name, time, and why it is not known or what qualifies it.
Parts = list[tuple[str, Step | None, str]]
# Three times in ms, and their standard errors.
_Moments = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Observed:
    """How much longer the parts of a step take with the exchange."""

    tail: Step
    slowed: Step
    after: Step


def by_hosts(runs: Runs, parts: Parts, hosts: Mapping[Member, Runs], alone: Step | None) -> Parts:
    """Return the parts of the communication, of several hosts split into what is exposed inside
    them and between them.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts,
    without what it costs on one.
    """
    (_, exposed, why), *rest = parts
    if len(runs.cell.hosts) < 2 or exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [(BETWEEN, exposed, why), *rest]
    costs = [each.step(COST) for each in hosts.values()]
    known = [step for step in costs if step is not None]
    whole = mean_step(known) if len(known) == len(costs) else None
    if whole is None:
        unsplit = (
            "no host was measured alone with all its GPUs: what is lost inside hosts and between them is not told "
            "apart"
        )
        return [(COMMUNICATION, exposed, f"{why}; {unsplit}" if why else unsplit), *rest]
    inside = whole - alone if alone else whole
    return [(INSIDE, inside, why), (BETWEEN, exposed - inside, ""), *rest]


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts of the communication with the exposed one split, where steps were observed;
    else with the reason.
    """
    (name, exposed, why), *rest = parts
    if name != COMMUNICATION or exposed is None:
        return parts
    together = observed(runs)
    members = [observed(alone[gpu]) for gpu in runs.gpus if gpu in alone]
    own = [member for member in members if member is not None]
    if together is None or not own:
        reason = "no GPU's steps were observed alone"
        if together is None:
            reason = _why_unseen(runs.records[0])
        unsplit = f"its parts are not known: {reason}"
        return [(name, exposed, f"{why}; {unsplit}" if why else unsplit), *rest]
    tail = beyond(together.tail, [member.tail for member in own])
    slowed = beyond(together.slowed, [member.slowed for member in own])
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *rest]


def beyond(together: Step, alone: Sequence[Step]) -> Step:
    """Return a part of a step on several GPUs without the mean of what it is on one."""
    mean = mean_step(alone)
    return together if mean is None else together - mean


def observed(runs: Runs) -> Observed | None:
    """Return the parts of the runs of a cell, the medians; None where no step was observed with and
    without exchange.
    """
    of_records = [_moments_of_record(record) for record in runs.records]
    moments = [each for each in of_records if each is not None]
    if not moments:
        return None
    steps = []
    for index in range(3):
        values = [values[index] for values, _ in moments]
        errors = [errors[index] for _, errors in moments]
        name = f"{index} moments {runs.records[0].record_id}"
        # The larger of the scatter inside runs and of that between them.
        between = statistics.stdev(values) if len(values) > 1 else 0.0
        deviation = max(statistics.median(errors), between)
        median = statistics.median(values)
        steps.append(Step(median, draws_of_median(median, deviation, len(values), name)))
    return Observed(*steps)


def _why_unseen(record: Record) -> str:
    for row in _rows(record).values():
        for text in mapping(row.get("unknown")).values():
            if isinstance(text, str):
                return text
    return UNSEEN


def _moments_of_record(record: Record) -> _Moments | None:
    """Return how much longer the parts of a step take with the exchange, on the rank where the tail
    is shortest.
    """
    rows = _rows(record)
    moments = []
    for rank in range(record.cell.world_size):
        without, with_it = rows.get((rank, False)), rows.get((rank, True))
        before = _last_and_ends(without) if without else None
        after = _last_and_ends(with_it) if with_it else None
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


def _last_and_ends(row: Mapping[str, Any]) -> _Moments | None:
    """Return when the last gradient is there, the exchange has ended and the step has, in ms, and
    their standard errors.
    """
    ready, spreads, steps = (
        row.get("ready_ms"),
        row.get("ready_spread_ms"),
        finite(row.get("steps")),
    )
    if not isinstance(ready, list) or not isinstance(spreads, list) or not steps or steps < 1:
        return None
    if len(spreads) != len(ready) or not ready:
        return None
    pairs = list(zip(ready, spreads, strict=True))
    pairs += [
        (row.get(f"{name}_ms"), row.get(f"{name}_spread_ms")) for name in ("exchange", "update")
    ]
    moments = []
    for value, spread in pairs:
        at_ms, spread_ms = finite(value), finite(spread)
        if at_ms is None or spread_ms is None:
            return None
        moments.append((at_ms, spread_ms))
    three = [max(moments[:-2]), *moments[-2:]]
    share = ERROR_OF_MEDIAN / _QUARTILES / math.sqrt(steps)
    return tuple(at for at, _ in three), tuple(spread * share for _, spread in three)


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    rows = {}
    for row in listed(mapping(record.tables.get("timeline")).get("rows")):
        if isinstance(row.get("rank"), int):
            rows[row["rank"], bool(row.get("exchange"))] = row
    return rows
