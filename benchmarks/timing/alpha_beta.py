"""The α–β model of a communication: time = α + bytes ÷ β, in a few pieces.

Libraries change protocol with size, so pieces need not join. Each is fitted by least squares of the
relative error, with scipy's non-negative solver since neither latency nor bandwidth is negative.
Cuts are where the sum of the errors is least.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FEWEST_SIZES = 3  # of a piece
MOST_PIECES = 3
# Relative error that noise leaves in a time. A fit that is better does not justify another piece.
NOISE = 0.01
Span = tuple[int, int]  # (first, behind the last) of some sizes


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
        if not self.beta_gb_per_s:
            return self.alpha_us
        return self.alpha_us + size_bytes / self.beta_gb_per_s / 1e3


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
    cost: dict[Span, float] = {}
    for start, stop in itertools.combinations(range(count + 1), 2):
        if stop - start >= FEWEST_SIZES:
            cost[start, stop] = _line(sizes[start:stop], times[start:stop])[2]
    least_score, spans = math.inf, [(0, count)]
    for pieces in range(1, min(MOST_PIECES, count // FEWEST_SIZES) + 1):
        least_squares, best = math.inf, spans
        cuts = range(FEWEST_SIZES, count - FEWEST_SIZES + 1)
        for inner in itertools.combinations(cuts, pieces - 1):
            candidate = list(itertools.pairwise([0, *inner, count]))
            if all(span in cost for span in candidate):
                squares = math.fsum(cost[span] for span in candidate)
                if squares < least_squares:
                    least_squares, best = squares, candidate
        score = count * math.log(least_squares / count + NOISE**2) + 3 * pieces * math.log(count)
        if score < least_score:
            least_score, spans = score, best
    fitted = []
    worst_error = 0.0
    for start, stop in spans:
        of_piece, measured = sizes[start:stop], times[start:stop]
        alpha, slope, squares = _line(of_piece, measured)
        error = float(np.abs((alpha + slope * of_piece) / measured - 1).max())
        worst_error = max(worst_error, error)
        beta = 1 / slope / 1e3 if slope > 0 else None
        rms, ends = math.sqrt(squares / len(of_piece)), (int(of_piece[0]), int(of_piece[-1]))
        fitted.append(Piece(*ends, alpha, beta, rms, error))
    squares = math.fsum(cost[span] for span in spans)
    return AlphaBetaFit(tuple(fitted), math.sqrt(squares / count), worst_error)


def _line(sizes: Any, times: Any) -> tuple[float, float, float]:
    """Return α in µs, µs per byte, and the sum of the squared relative errors."""
    from scipy.optimize import nnls  # takes as long to import as the rest of a small report

    scale = sizes.max()  # of like magnitude, or nnls loses digits
    columns = np.column_stack([1 / times, sizes / scale / times])
    (alpha, slope), residual = nnls(columns, np.ones(len(sizes)))
    return float(alpha), float(slope / scale), float(residual**2)
