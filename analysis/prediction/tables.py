"""What a record's tables say of its step: buckets, moments, collectives of the size of buckets, γ, residuals.

Their shapes are those of benchmarks/training/calibration. A record without them is read without an error: the forecast then
rests on less, and says so.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.prediction.draws import Values
from benchmarks.record import finite

_MOST_SIZES = 12  # of calls of which buckets are looked for
_MOST_STEPS = 100_000  # residuals that are rebuilt from their quantiles
# What a damaged record may say beyond them enters no forecast: bytes of a bucket, ms of anything, γ.
_MOST_BYTES, _LONGEST_MS, _MOST_SLOWED = 1e13, 1e9, 1e3


@dataclass(frozen=True)
class StepMoments:
    """When things happen in a step without any exchange, in ms after its start."""

    ready_ms: tuple[float, ...]  # each bucket, in order
    backward_ms: float
    update_ms: float  # the whole step


@dataclass(frozen=True)
class Slowed:
    """γ by the interference probe: how much longer compute takes for each ms of communication."""

    gamma: float
    error: float


def buckets(tables: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return the bytes of each bucket on the wire, in order; None where the record does not say."""
    rows = _rows(tables, "buckets")
    sizes = [_within(row.get("bytes"), 1, _MOST_BYTES) for row in rows]
    return tuple(size for size in sizes if size) if rows and None not in sizes else None


def logged_buckets(choices: Any, gradient_bytes: float, cap_bytes: float) -> tuple[float, ...]:
    """Return the bytes of each bucket by NCCL's log of its calls, the smallest last; empty where it does not say.

    They are the sizes of all-reduces that make up the gradients, of which all but one reach the cap: DDP closes a bucket with
    the gradient that does. The log has more sizes, such as those of DDP's first step.
    """
    rows = [row for row in choices if isinstance(row, Mapping)] if isinstance(choices, list) else []
    known = {finite(row.get("bytes")) for row in rows if row.get("function") == "AllReduce"}
    sizes = sorted((size for size in known if size and 0 < size < gradient_bytes), reverse=True)[
        :_MOST_SIZES
    ]
    made = (
        (*full, last)
        for last in sizes
        for count in range(1, len(sizes))
        for full in itertools.combinations(
            [size for size in sizes if size >= max(cap_bytes, last)], count
        )
    )
    plans = {plan for plan in made if sum(plan) == gradient_bytes and len(set(plan)) == len(plan)}
    return plans.pop() if len(plans) == 1 else ()


def moments(tables: Mapping[str, Any]) -> StepMoments | None:
    """Return the moments of the slowest rank without exchange; None where one of them is not known."""
    found = []
    for row in _rows(tables, "timeline"):
        ready = _numbers(row.get("ready_ms"), 0.0, _LONGEST_MS)
        backward, update = (
            _within(row.get(f"{name}_ms"), 0.0, _LONGEST_MS) for name in ("backward", "update")
        )
        if (
            not row.get("exchange")
            and ready
            and backward is not None
            and update
            and backward <= update
        ):
            found.append(StepMoments(ready, backward, update))
    return max(found, key=lambda one: one.update_ms, default=None)


def exchange_curve(
    tables: Mapping[str, Any],
) -> tuple[str, tuple[float, ...], tuple[float, ...]] | None:
    """Return the operation, sizes in bytes and times in µs of collectives alone; None where they were not timed."""
    operation = _table(tables, "bucket_exchange").get("operation")
    points = {}
    for row in _rows(tables, "bucket_exchange"):
        size, ms = (
            _within(row.get("bytes"), 1, _MOST_BYTES),
            _within(row.get("ms"), 0.0, _LONGEST_MS),
        )
        if size and ms:
            points[size] = 1e3 * ms
    if not points or not isinstance(operation, str):
        return None
    return operation, tuple(sorted(points)), tuple(points[size] for size in sorted(points))


def slowed(tables: Mapping[str, Any]) -> Slowed | None:
    """Return γ of the slowest rank; None where nothing probed it."""
    found = []
    for row in _rows(tables, "interference"):
        gamma = _within(row.get("gamma"), -_MOST_SLOWED, _MOST_SLOWED)
        error = _within(row.get("gamma_error"), 0.0, _MOST_SLOWED)
        if gamma is not None and error is not None:
            found.append(Slowed(gamma, error))
    return max(found, key=lambda one: one.gamma, default=None)


def residuals_ms(tables: Mapping[str, Any]) -> Values | None:
    """Return residuals of one rank's steps, rebuilt from their quantiles; None where the record has none."""
    probabilities = _numbers(_table(tables, "residuals").get("probabilities"), 0.0, 1.0)
    found = []
    for row in _rows(tables, "residuals"):
        quantiles, mean = (
            _numbers(row.get("quantiles_ms"), 0.0, _LONGEST_MS),
            finite(row.get("mean_ms")),
        )
        count = finite(row.get("n"))
        if not quantiles or len(quantiles) != len(probabilities) or mean is None:
            continue
        if count and 2 <= count <= _MOST_STEPS:
            levels = (np.arange(int(count)) + 0.5) / int(count)
            found.append(np.interp(levels, probabilities, quantiles) - mean)
    return np.concatenate(found) if found else None


def together_for(tables: Mapping[str, Any]) -> float:
    """Return how many steps in a row scatter together, by the autocorrelation; 1 where it is not known."""
    found = []
    for row in _rows(tables, "residuals"):
        total = 1.0
        noise = 2 / math.sqrt(max(finite(row.get("n")) or 1.0, 1.0))
        for value in _numbers(row.get("acf"), -1.0, 1.0):
            if value <= noise:
                break
            total += 2 * value
        found.append(total)
    return statistics.median(found) if found else 1.0


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a record; an empty one where it has none."""
    table = tables.get(name)
    return table if isinstance(table, Mapping) else {}


def _rows(tables: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the rows of a table of a record that are objects."""
    rows = _table(tables, name).get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _numbers(values: Any, least: float, most: float) -> tuple[float, ...]:
    """Return a list of numbers; none of it where one is something else."""
    found = [_within(value, least, most) for value in values] if isinstance(values, list) else []
    return tuple(one for one in found if one is not None) if None not in found else ()


def _within(value: Any, least: float, most: float) -> float | None:
    """Return a number inside its bounds; None for anything else."""
    found = finite(value)
    return found if found is not None and least <= found <= most else None
