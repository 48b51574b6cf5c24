"""What is exposed of an exchange, in parts: by the moments of observed steps with it and without it (tables.timeline).

    tail      from the last gradient to the end of the exchange, with it − without it
    slowed    until the last gradient is there, with it − without it
    rest      exposed by steps in turn (A B B A) − tail − slowed: nothing makes it 0

Both are those of the rank whose tail is shortest: it waits for no other one. The same of one GPU is taken off: there it is the
strategy's own work.
"""

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.findings.communication.by_hosts import COMMUNICATION, Parts
from analysis.findings.communication.steps import Step, mean_step
from analysis.findings.estimates import DRAWS
from analysis.findings.model import Member
from analysis.findings.next_run.interval import of_median
from analysis.findings.runs import Runs
from benchmarks.record import Record
from benchmarks.timing.statistics import ERROR_OF_MEDIAN

TAIL, SLOWED, REST = "exchange after the last gradient", "backward slowed by the exchange", "exposed, not explained"
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
_QUARTILES = 1.349  # between those of normal values, in standard deviations
_Moments = tuple[float, float, float, float]  # tail and slowed in ms, and the standard error of each


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts of the communication with the exposed one split, where steps were observed; else with the reason."""
    (name, exposed, why), *others = parts
    if name != COMMUNICATION or exposed is None:
        return parts
    found, own = observed(runs), [step for gpu in runs.gpus if gpu in alone if (step := observed(alone[gpu]))]
    if found is None or not own:
        untold = UNSEEN if found is None else "no GPU's steps were observed alone"
        return [(name, exposed, "; ".join(filter(None, (why, f"its parts are not known: {untold}")))), *others]
    tail, slowed = (
        together - alone_ms
        for together, alone_ms in zip(found, (mean_step(of_all) for of_all in zip(*own, strict=True)), strict=True)
        if alone_ms is not None
    )
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *others]


def observed(runs: Runs) -> tuple[Step, Step] | None:
    """Return tail and slowed of the runs of a cell, the medians; None where no step was observed with and without exchange."""
    found = [one for record in runs.records if (one := _of_record(record)) is not None]
    if not found:
        return None
    name = f"moments {runs.records[0].record_id}"
    tail, slowed, *errors = zip(*found, strict=True)
    return _step(tail, errors[0], f"tail {name}"), _step(slowed, errors[1], f"slowed {name}")


def _step(values: Sequence[float], errors: Sequence[float], name: str) -> Step:
    """Return the median, with draws by the larger of the scatter inside runs and of that between them."""
    between = statistics.stdev(values) if len(values) > 1 else 0.0
    deviation = max(statistics.median(errors), between)
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((2, DRAWS))
    median = statistics.median(values)
    return Step(median, median + normal * deviation * np.array([[1.0], [math.sqrt(of_median(len(values)))]]))


def _of_record(record: Record) -> _Moments | None:
    rows = _rows(record)
    ranks = [(rows.get((rank, False)), rows.get((rank, True))) for rank in range(record.cell.world_size)]
    found = [_of_rank(without, with_it) for without, with_it in ranks if without and with_it]
    known = [one for one in found if one is not None]
    return min(known) if len(known) == record.cell.world_size else None


def _of_rank(without: Mapping[str, Any], with_it: Mapping[str, Any]) -> _Moments | None:
    before, after = _last_and_end(without), _last_and_end(with_it)
    if before is None or after is None:
        return None
    (last, end, last_error, end_error), (last_with, end_with, *errors_with) = before, after
    slowed_error = math.hypot(last_error, errors_with[0])
    tail_error = math.hypot(slowed_error, end_error, errors_with[1])
    return (end_with - last_with) - (end - last), last_with - last, tail_error, slowed_error


def _last_and_end(row: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    """Return when the last gradient is there and when the exchange has ended, in ms, and the standard error of each."""
    ready, spreads = row.get("ready_ms"), row.get("ready_spread_ms")
    steps, end, end_spread = (_number(row.get(name)) for name in ("steps", "exchange_ms", "exchange_spread_ms"))
    if not isinstance(ready, list) or not isinstance(spreads, list) or len(spreads) != len(ready) or not ready:
        return None
    pairs = [(at, spread) for one, other in zip(ready, spreads, strict=True)
             if (at := _number(one)) is not None and (spread := _number(other)) is not None]  # fmt: skip
    if len(pairs) < len(ready) or not steps or end is None or end_spread is None:
        return None
    last, spread = max(pairs)
    share = ERROR_OF_MEDIAN / _QUARTILES / math.sqrt(steps)
    return last, end, spread * share, end_spread * share


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    table = record.tables.get("timeline")
    rows = table.get("rows") if isinstance(table, Mapping) else None
    return {
        (row["rank"], bool(row.get("exchange"))): row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping) and isinstance(row.get("rank"), int)
    }


def _number(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]
