"""The α–β model of a communication: time = α + bytes ÷ β, in a few pieces, because libraries change protocol with size.

Pieces need not join. Each is fitted by least squares of the relative error, with scipy's non-negative solver since neither
latency nor bandwidth is negative. Cuts are where the sum of the errors is least.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FEWEST_SIZES = 3  # of a piece
MOST_PIECES = 3
# Relative error that noise leaves in a time. A fit that is better than this does not justify another piece.
NOISE = 0.01


@dataclass(frozen=True)
class Piece:
    """One line, for messages of from_bytes to to_bytes."""

    from_bytes: int
    to_bytes: int
    alpha_us: float
    beta_gb_per_s: float | None  # None: its times do not grow with size
    rms_error: float  # of the times, relative
    worst_error: float

    def time_us(self, size_bytes: float) -> float:
        """Return the time of a message."""
        return self.alpha_us + (
            size_bytes / self.beta_gb_per_s / 1e3 if self.beta_gb_per_s else 0.0
        )


@dataclass(frozen=True)
class AlphaBetaFit:
    """The pieces in order of size, and the relative error of all times."""

    pieces: tuple[Piece, ...]
    rms_error: float
    worst_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "pieces": [asdict(piece) for piece in self.pieces]}


def fit(sizes_bytes: Sequence[int], times_us: Sequence[float]) -> AlphaBetaFit | None:
    """Fit times of messages, in ascending order of size; None below FEWEST_SIZES sizes.

    The number of pieces is the one with the lowest BIC (Schwarz 1978), three parameters a piece.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_us, dtype=float)
    count = len(sizes)
    if count < FEWEST_SIZES:
        return None
    cost = {
        (start, stop): _line(sizes[start:stop], times[start:stop])[2]
        for start, stop in itertools.combinations(range(count + 1), 2)
        if stop - start >= FEWEST_SIZES
    }
    best: tuple[float, list[int]] | None = None
    for pieces in range(1, min(MOST_PIECES, count // FEWEST_SIZES) + 1):
        squares, cuts = _cut(cost, count, pieces)
        score = count * math.log(squares / count + NOISE**2) + 3 * pieces * math.log(count)
        if best is None or score < best[0]:
            best = score, cuts
    assert best is not None
    spans = list(itertools.pairwise(best[1]))
    found = [_piece(sizes[start:stop], times[start:stop]) for start, stop in spans]
    squares = math.fsum(cost[span] for span in spans)
    return AlphaBetaFit(
        tuple(found), math.sqrt(squares / count), max(piece.worst_error for piece in found)
    )


def _line(sizes: Any, times: Any) -> tuple[float, float, float]:
    """Return α in µs, µs per byte, and the sum of the squared relative errors."""
    from scipy.optimize import nnls  # takes as long to import as the rest of a small study's report

    scale = sizes.max()  # of like magnitude, or nnls loses digits
    (alpha, slope), residual = nnls(
        np.column_stack([1 / times, sizes / scale / times]), np.ones(len(sizes))
    )
    return float(alpha), float(slope / scale), float(residual**2)


def _cut(cost: dict[tuple[int, int], float], count: int, pieces: int) -> tuple[float, list[int]]:
    """Return the least sum of costs of `pieces` pieces, and their cuts from 0 to `count`."""
    inner = itertools.combinations(range(FEWEST_SIZES, count - FEWEST_SIZES + 1), pieces - 1)
    options = [[0, *cuts, count] for cuts in inner]
    allowed = [cuts for cuts in options if all(pair in cost for pair in itertools.pairwise(cuts))]
    return min(
        (math.fsum(cost[pair] for pair in itertools.pairwise(cuts)), cuts) for cuts in allowed
    )


def _piece(sizes: Any, times: Any) -> Piece:
    alpha, slope, squares = _line(sizes, times)
    errors = np.abs((alpha + slope * sizes) / times - 1)
    beta = 1 / slope / 1e3 if slope > 0 else None
    rms = math.sqrt(squares / len(sizes))
    return Piece(int(sizes[0]), int(sizes[-1]), alpha, beta, rms, float(errors.max()))
