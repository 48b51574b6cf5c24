"""What is exposed of an exchange, in parts: by the moments of observed steps with it and without it (tables.timeline).

    tail      from the last gradient to the end of the exchange, with it − without it
    slowed    until the last gradient is there, with it − without it
    after     from the end of the exchange to the end of the step, with it − without it: own work of the strategy
    rest      exposed by steps in turn (A B B A) − tail − slowed: nothing makes it 0

All are those of the rank whose tail is shortest: it waits for no other one. The same of one GPU is taken off: there it is the
strategy's own work. (Between one GPU and several, `after` does not differ beyond the rest.)
"""

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.findings.communication.by_hosts import COMMUNICATION, Parts
from analysis.findings.communication.steps import Step, mean_step
from analysis.findings.estimates import DRAWS
from analysis.findings.model import Member
from analysis.findings.next_run.interval import of_median
from analysis.findings.runs import Runs
from benchmarks.record import Record, finite
from benchmarks.timing.statistics import ERROR_OF_MEDIAN

TAIL, SLOWED, REST = "exchange after the last gradient", "backward slowed by the exchange", "exposed, not explained"
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
_QUARTILES = 1.349  # between those of normal values, in standard deviations
_Moments = tuple[tuple[float, float, float], tuple[float, float, float]]  # in ms, and the standard errors


@dataclass(frozen=True)
class Observed:
    """How much longer the parts of a step take with the exchange."""

    tail: Step
    slowed: Step
    after: Step


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts of the communication with the exposed one split, where steps were observed; else with the reason."""
    (name, exposed, why), *others = parts
    if name != COMMUNICATION or exposed is None:
        return parts
    found, own = observed(runs), [step for gpu in runs.gpus if gpu in alone if (step := observed(alone[gpu]))]
    if found is None or not own:
        untold = _why_unseen(runs.records[0]) if found is None else "no GPU's steps were observed alone"
        return [(name, exposed, "; ".join(filter(None, (why, f"its parts are not known: {untold}")))), *others]
    tail, slowed = beyond(found.tail, [one.tail for one in own]), beyond(found.slowed, [one.slowed for one in own])
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *others]


def beyond(together: Step, alone: Sequence[Step]) -> Step:
    """Return a part of a step on several GPUs without the mean of what it is on one."""
    mean = mean_step(alone)
    return together if mean is None else together - mean


def observed(runs: Runs) -> Observed | None:
    """Return the parts of the runs of a cell, the medians; None where no step was observed with and without exchange."""
    found = [one for record in runs.records if (one := _of_record(record)) is not None]
    if not found:
        return None
    name = f"moments {runs.records[0].record_id}"
    values, errors = (list(zip(*each, strict=True)) for each in zip(*found, strict=True))
    return Observed(*(_step(values[at], errors[at], f"{at} {name}") for at in range(3)))


def _step(values: Sequence[float], errors: Sequence[float], name: str) -> Step:
    """Return the median, with draws by the larger of the scatter inside runs and of that between them."""
    between = statistics.stdev(values) if len(values) > 1 else 0.0
    deviation = max(statistics.median(errors), between)
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((2, DRAWS))
    median = statistics.median(values)
    return Step(median, median + normal * deviation * np.array([[1.0], [math.sqrt(of_median(len(values)))]]))


def _why_unseen(record: Record) -> str:
    """Return why a record does not have the moments of its steps."""
    said = (row.get("unknown") for row in _rows(record).values())
    why = (text for one in said if isinstance(one, Mapping) for text in one.values() if isinstance(text, str))
    return next(why, UNSEEN)


def _of_record(record: Record) -> _Moments | None:
    rows = _rows(record)
    ranks = [(rows.get((rank, False)), rows.get((rank, True))) for rank in range(record.cell.world_size)]
    found = [_of_rank(without, with_it) for without, with_it in ranks if without and with_it]
    known = [one for one in found if one is not None]
    return min(known) if len(known) == record.cell.world_size else None


def _of_rank(without: Mapping[str, Any], with_it: Mapping[str, Any]) -> _Moments | None:
    before, after = _last_and_ends(without), _last_and_ends(with_it)
    if before is None or after is None:
        return None
    (last, end, whole), (last_with, end_with, whole_with) = before[0], after[0]
    of_last, of_end, of_whole = (math.hypot(*pair) for pair in zip(before[1], after[1], strict=True))
    parts = (end_with - last_with) - (end - last), last_with - last, (whole_with - end_with) - (whole - end)
    return parts, (math.hypot(of_last, of_end), of_last, math.hypot(of_end, of_whole))


def _last_and_ends(row: Mapping[str, Any]) -> _Moments | None:
    """Return when the last gradient is there, the exchange has ended and the step has, in ms, and their standard errors."""
    ready, spreads, steps = row.get("ready_ms"), row.get("ready_spread_ms"), finite(row.get("steps"))
    ends = [(finite(row.get(f"{one}_ms")), finite(row.get(f"{one}_spread_ms"))) for one in ("exchange", "update")]
    if not isinstance(ready, list) or not isinstance(spreads, list) or len(spreads) != len(ready) or not ready:
        return None
    pairs = [*((finite(one), finite(other)) for one, other in zip(ready, spreads, strict=True)), *ends]
    known = [(at, spread) for at, spread in pairs if at is not None and spread is not None]
    if len(known) < len(pairs) or not steps or steps < 1:
        return None
    three = max(known[:-2]), *known[-2:]
    share = ERROR_OF_MEDIAN / _QUARTILES / math.sqrt(steps)
    (last, end, whole), errors = (tuple(one[at] for one in three) for at in (0, 1))
    return (last, end, whole), (errors[0] * share, errors[1] * share, errors[2] * share)


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    table = record.tables.get("timeline")
    rows = table.get("rows") if isinstance(table, Mapping) else None
    return {
        (row["rank"], bool(row.get("exchange"))): row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping) and isinstance(row.get("rank"), int)
    }
