"""Several tests at once: Holm's method (1979) with the restrictions of Shaffer (1986).

Of four cells that are compared each with each, if one pair differs, at most three of the six pairs are of equal cells. So the
second test counts among three, not among five.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def significant(chances: Floats, groups: Iterable[int], level: float) -> Flags:
    """Return which of m tests show a difference, so that the chance of one wrong is at most `level`.

    The smallest of `chances` (p of each test) must be below level ÷ m, the next below level ÷ (m − 1), until one is not.
    `groups` are the numbers of cells that are compared each with each; their pairs are the tests.
    """
    seen = np.zeros(len(chances), dtype=bool)
    possible = _possible(groups)
    for rank, at in enumerate(np.argsort(chances, kind="stable")):
        equal = (possible & ((2 << (len(chances) - rank)) - 1)).bit_length() - 1
        if chances[at] > level / max(1, equal):
            break
        seen[at] = True
    return seen


def _possible(groups: Iterable[int]) -> int:
    """Return how many pairs can be of equal cells, as bits: bit 3 is set if three can."""
    total = 1
    for cells in groups:
        total = _sums(total, _equal_pairs(cells))
    return total


def _sums(one: int, other: int) -> int:
    """Return the sums of a number of each as bits."""
    found = 0
    while other:
        low = other & -other
        found |= one << (low.bit_length() - 1)
        other ^= low
    return found


@functools.cache
def _equal_pairs(cells: int) -> int:
    """Return how many pairs of some cells can be equal, as bits: the cells fall into classes of equal ones."""
    if cells < 2:
        return 1
    found = 0
    for size in range(1, cells + 1):
        found |= _equal_pairs(cells - size) << (size * (size - 1) // 2)
    return found
