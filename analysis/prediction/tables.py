"""What a record's tables say of its step: buckets, moments, collectives of the size of buckets, γ, residuals.

Their shapes are those of benchmarks/training/calibration. A record without them is read without an error: the forecast then
rests on less, and says so.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.prediction.draws import Values


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
    sizes = [_number(row.get("bytes")) for row in rows]
    return tuple(size for size in sizes if size is not None) if rows and all(sizes) else None


def moments(tables: Mapping[str, Any]) -> StepMoments | None:
    """Return the moments of the slowest rank without exchange; None where one of them is not known."""
    found = []
    for row in _rows(tables, "timeline"):
        ready = [_number(one) for one in row.get("ready_ms") or []]
        backward, update = _number(row.get("backward_ms")), _number(row.get("update_ms"))
        if not row.get("exchange") and ready and None not in ready and backward is not None and update is not None:
            found.append(StepMoments(tuple(one for one in ready if one is not None), backward, update))
    return max(found, key=lambda one: one.update_ms, default=None)


def exchange_curve(tables: Mapping[str, Any]) -> tuple[str, tuple[float, ...], tuple[float, ...]] | None:
    """Return the operation, sizes in bytes and times in µs of collectives alone; None where they were not timed."""
    operation = (tables.get("bucket_exchange") or {}).get("operation")
    points = {}
    for row in _rows(tables, "bucket_exchange"):
        size, ms = _number(row.get("bytes")), _number(row.get("ms"))
        if size and ms:
            points[size] = 1e3 * ms
    if not points or not isinstance(operation, str):
        return None
    return operation, tuple(sorted(points)), tuple(points[size] for size in sorted(points))


def slowed(tables: Mapping[str, Any]) -> Slowed | None:
    """Return γ of the slowest rank; None where nothing probed it."""
    found = []
    for row in _rows(tables, "interference"):
        gamma, error = _number(row.get("gamma")), _number(row.get("gamma_error"))
        if gamma is not None and error is not None:
            found.append(Slowed(gamma, error))
    return max(found, key=lambda one: one.gamma, default=None)


def residuals_ms(tables: Mapping[str, Any]) -> Values | None:
    """Return residuals of one rank's steps, rebuilt from their quantiles; None where the record has none."""
    probabilities = (tables.get("residuals") or {}).get("probabilities")
    found = []
    for row in _rows(tables, "residuals"):
        quantiles, count, mean = row.get("quantiles_ms"), _number(row.get("n")), _number(row.get("mean_ms"))
        if not probabilities or not quantiles or len(quantiles) != len(probabilities) or mean is None:
            continue
        if count and count >= 2:
            levels = (np.arange(int(count)) + 0.5) / int(count)
            found.append(np.interp(levels, probabilities, quantiles) - mean)
    return np.concatenate(found) if found else None


def together_for(tables: Mapping[str, Any]) -> float:
    """Return how many steps in a row scatter together, by the autocorrelation; 1 where it is not known."""
    found = []
    for row in _rows(tables, "residuals"):
        total = 1.0
        for correlation in row.get("acf") or []:
            value = _number(correlation)
            if value is None or value <= 2 / math.sqrt(row.get("n") or 1):
                break
            total += 2 * value
        found.append(total)
    return statistics.median(found) if found else 1.0


def _rows(tables: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    table = tables.get(name)
    rows: Iterable[Any] = table.get("rows", ()) if isinstance(table, Mapping) else ()
    return [row for row in rows if isinstance(row, Mapping)]


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
