"""Arithmetic of sets of half-open intervals [start, end), as integer arrays of shape (n, 2) in ns.

`union` makes a set: sorted, disjoint, no interval empty or touching the next. The other functions
take and return sets. Everything works on arrays: a million intervals take tenths of a second.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]  # shape (n,), ns
Spans = NDArray[np.int64]  # shape (n, 2), ns: start, end
Flags = NDArray[np.bool_]

NOTHING: Spans = np.empty((0, 2), dtype=np.int64)


def union(*many: Spans) -> Spans:
    """Return the set of all times that any interval covers; reversed ones cover nothing."""
    spans = np.concatenate(many) if many else NOTHING
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NOTHING
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.append(True, spans[1:, 0] > reach[:-1]))
    last = np.append(first[1:] - 1, len(spans) - 1)
    return np.column_stack((spans[first, 0], reach[last]))


def total(spans: Spans) -> int:
    """Return the length of a set, ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def intersect(a: Spans, b: Spans) -> Spans:
    """Return the times in both sets."""
    return _sweep(a, b, np.logical_and)


def subtract(a: Spans, b: Spans) -> Spans:
    """Return the times in `a` and not in `b`."""
    return _sweep(a, b, lambda in_a, in_b: in_a & ~in_b)


def covers(spans: Spans, times: Times) -> Flags:
    """Tell for each time whether it lies in the set."""
    at = np.searchsorted(spans[:, 0], times, side="right") - 1
    inside: Flags = at >= 0
    inside[inside] = times[inside] < spans[at[inside], 1]
    return inside


def _sweep(a: Spans, b: Spans, keep: Callable[[Flags, Flags], Flags]) -> Spans:
    """Ask `keep` between every two neighbouring ends, where nothing changes; join what touches."""
    points = np.concatenate((a[:, 0], a[:, 1], b[:, 0], b[:, 1]))
    step_a = np.repeat([1, -1, 0, 0], [len(a), len(a), len(b), len(b)])
    step_b = np.repeat([0, 0, 1, -1], [len(a), len(a), len(b), len(b)])
    order = np.argsort(points, kind="stable")
    points = points[order]
    kept = keep(np.cumsum(step_a[order]) > 0, np.cumsum(step_b[order]) > 0)[:-1]
    return union(np.column_stack((points[:-1], points[1:]))[kept])
