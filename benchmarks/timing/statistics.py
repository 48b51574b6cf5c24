"""Statistics of correlated iteration times: intervals inside one run, steadiness (METHOD.md).

And the α–β model of a communication: time = α + bytes ÷ β, in a few pieces, which need not join as
libraries change protocol with size. Each is fitted by least squares of the relative error, with
scipy's non-negative solver; cuts are where the sum of the errors is least.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

COMPARABLE_MS = 100.0  # length of a window from which its two clocks can be compared
# A warm-up has ended when the step time of its last three parts falls by less than this share, or
# by less than noise.
FLAT_SHARE = 0.001
WARM_UP_PARTS = 3
FEWEST_SAMPLES = 6  # of a warm-up: two for each part
SIGMA_PER_MAD = 1.4826  # of normal noise: standard deviation ÷ median absolute deviation
ERROR_OF_MEDIAN = 1.2533  # of normal noise: standard error of a median ÷ that of a mean
OUTSIDE = 0.05  # of the 95 % interval
# |mean − truth| · √n ÷ √V exceeds this with probability 0.05: √45.40 (Lobato 2001, table 1), and
# for few values, from 400,000 simulated series.
CRITICAL, CRITICAL_OF_FEW = 6.738, {2: 36.0, 3: 11.86, 4: 9.06}
# For n independent values: CRITICAL · (1 + 4.7 ÷ n²), within 1 % of the simulated from five on.
MORE_FOR_FEW = 4.7
FEWEST_OF_LONGEST = 0.5  # a window shorter than this share of the longest has no level of its own
FEWEST = 12  # values that are tested for steadiness
# Of clean series, both tests together accuse at most this share, up to a correlation of neighbours
# of 0.8.
DRIFT_CHANCE = 0.0005
# The self-normalised statistic of a change (Shao and Zhang 2010, Journal of the American
# Statistical Association 105) exceeds 100 · (1 + 100 ÷ effective values) in 0.1 % of simulated
# clean series; the second factor is for few values, by simulation.
CHANGE, CHANGE_OF_FEW = 100.0, 100.0
TRIM = 0.1  # share of the values at each end between which a change is looked for
FEWEST_IN_PART = 48
MOST_CORRELATED = 0.98
MOST_BEYOND = 1e6  # of a series without noise
# A pause makes a step longer than the median by this share, and by this many times the distance of
# the 90th percentile.
PAUSE_SHARE, PAUSE_DISTANCES = 0.25, 6.0
# Clocks resolve a µs or less: times that are whole multiples of these were rounded.
GRIDS_MS, ON_GRID = (1.0, 0.1, 0.01), 1e-6
Windows = Sequence[Sequence[float]]  # ms of each iteration, by window
Array = np.ndarray[Any, Any]


def joined(windows: Windows) -> list[float]:
    """Return the values of all windows, one after the other."""
    return list(itertools.chain.from_iterable(windows))


def median(ms: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(ms))


def percentile_95(ms: Sequence[float]) -> float:
    """Return the 95th percentile, linear between neighbours."""
    return float(np.percentile(ms, 95))


def levelled(ms: Sequence[float], period: int) -> list[float]:
    """Return steps as long as the mean of their period; those behind the last one as they are."""
    level: list[float] = []
    for start in range(0, len(ms) - period + 1, period) if period > 1 else ():
        level += [math.fsum(ms[start : start + period]) / period] * period
    return level + list(ms[len(level) :])


def clock_disagreement(device: float, host: float) -> float:
    """Return the difference of the two clocks of a window, as a share of the host's."""
    return abs(device - host) / host


def flat(ms: Sequence[float], least: int, least_ms: float = 0.0) -> bool:
    """Return whether the step time has stopped falling (METHOD.md, "Warm-up").

    There must be at least `least` (and FEWEST_SAMPLES) samples, which lasted `least_ms`.
    """
    lasted_ms = np.cumsum(np.asarray(ms, dtype=float)[::-1])
    if len(ms) < max(least, FEWEST_SAMPLES) or lasted_ms[-1] < least_ms:
        return False
    recent = int(np.searchsorted(lasted_ms, max(lasted_ms[-1] / 2, least_ms)) + 1)
    size = max(min(recent, len(ms)), FEWEST_SAMPLES) // WARM_UP_PARTS
    parts = np.asarray(ms[-WARM_UP_PARTS * size :], dtype=float).reshape(WARM_UP_PARTS, size)
    medians = np.median(parts, axis=1)
    sigma = SIGMA_PER_MAD * float(np.median(np.abs(parts - medians[:, None])))
    noise = 2 * ERROR_OF_MEDIAN * sigma * (2 / size) ** 0.5
    tolerance = max(FLAT_SHARE * float(medians[-1]), noise)
    return bool(medians[:-1].max() - medians[-1] <= tolerance)


# 95 % intervals of the mean, the median and the difference of correlated times inside one run.
def mean_interval(windows: Windows) -> tuple[float, float]:
    """Return the 95 % interval of the mean; (nan, nan) below two values."""
    return _around(_mean(_joined(windows)), mean_half_width(windows))


def mean_half_width(windows: Windows) -> float:
    """Return the half-width of the 95 % interval of the mean; nan below two values."""
    values = _joined(windows)
    if len(values) < 2:
        return math.nan
    of_levels = _level_half_width([_mean(window) for window in _long(windows)])
    return max(_self_normalised(values - _mean(values)), of_levels)


def median_interval(windows: Windows) -> tuple[float, float]:
    """Return the 95 % interval of the median; (nan, nan) below two values.

    Its self-normalised part is found in ranks: how far the share of values below the median may be
    off. With few values no rank is far enough out, and the half-width of the mean is taken.
    """
    values = _joined(windows)
    if len(values) < 2:
        return math.nan, math.nan
    middle = float(np.median(values))
    above = np.sign(values - middle) / 2
    off = _self_normalised(above - _mean(above))
    if off >= 0.5:
        return _around(middle, mean_half_width(windows))
    low, high = np.quantile(values, [0.5 - off, 0.5 + off]).tolist()
    levels = [float(np.median(window)) for window in _long(windows)]
    level_low, level_high = _around(middle, _level_half_width(levels))
    return min(low, level_low), max(high, level_high)


def difference_interval(estimate: float, differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a difference found in several blocks, by Student's t.

    (nan, nan) below two blocks.
    """
    half_width = math.nan
    if len(differences) > 1:
        half_width = _level_half_width(differences)
    return estimate - half_width, estimate + half_width


def correlation(values: Sequence[float] | Array) -> float:
    """Return the correlation of neighbours; 0 for constants and below three values."""
    centred = np.asarray(values, dtype=float) - _mean(values)
    squares = float((centred**2).sum())
    if len(centred) < 3 or squares <= 0:
        return 0.0
    return float((centred[1:] * centred[:-1]).sum()) / squares


def _around(middle: float, half_width: float) -> tuple[float, float]:
    if half_width == 0:
        return middle, middle
    factor = math.exp(min(half_width / middle, 700.0))
    return middle / factor, middle * factor


def _self_normalised(deviations: Array) -> float:
    """Return the half-width of the mean of (n,) values whose deviations from it are given."""
    count = len(deviations)
    correlated = max(correlation(deviations), 0.0)
    # As many independent values tell as much.
    effective = count * (1 - correlated) / (1 + correlated)
    of_few = CRITICAL * (1 + MORE_FOR_FEW / max(effective, 2.0) ** 2)
    critical = max(CRITICAL_OF_FEW.get(count, CRITICAL), of_few)
    sums = np.cumsum(deviations)
    return critical * math.sqrt(float((sums**2).sum()) / count**3)


def _level_half_width(levels: Sequence[float]) -> float:
    """Return the half-width of a mean of independent values by Student's t; 0 below two."""
    count = len(levels)
    if count < 2:
        return 0.0
    deviation = float(np.std(np.asarray(levels, dtype=float), ddof=1))
    return two_sided_quantile(OUTSIDE, count - 1) * deviation / math.sqrt(count)


def _long(windows: Windows) -> list[Sequence[float]]:
    """Return the windows that are long enough for a level of their own."""
    longest = max(map(len, windows))
    return [window for window in windows if len(window) >= FEWEST_OF_LONGEST * longest]


def _joined(windows: Windows) -> Array:
    return np.asarray(joined(windows), dtype=float)


def _mean(values: Sequence[float] | Array) -> float:
    return math.fsum(values) / len(values) if len(values) else math.nan


# Whether a step time stayed the same while it was measured: drift, a sudden change, pauses.
def stationarity(ms: Sequence[float]) -> dict[str, float]:
    """Return the drift and the largest change of a series, as shares of its mean.

    `drift` is from the first to the last value on a straight line, `change` is after − before at
    the iteration `change_at`. `drift_beyond` and `change_beyond` are the statistic ÷ its limit:
    above 1, noise does not explain it. Empty below FEWEST values.
    """
    if len(ms) < FEWEST:
        return {}
    values = np.asarray(ms, dtype=float)
    mean = math.fsum(ms) / len(ms)
    drift_ms, drift_beyond = _drift(values - mean)
    changes = []
    for first, last in _parts(len(values)):
        change_ms, beyond, position = _change(values[first:last] - mean)
        changes.append((change_ms, beyond, first + position))
    # What is beyond noise comes first, and of that the largest change.
    change_ms, change_beyond, change_at = max(
        changes, key=lambda change: (change[1] > 1, abs(change[0]))
    )
    return {
        "drift": drift_ms / mean,
        "drift_beyond": drift_beyond,
        "change": change_ms / mean,
        "change_beyond": change_beyond,
        "change_at": float(change_at),
    }


def folded(windows: Windows) -> list[float]:
    """Return the mean over windows at each place of a window, the first n of all long windows.

    What happens in each window at the same place stands out of noise. Empty below two windows.
    """
    long = _long(windows)
    if len(long) < 2:
        return []
    return [math.fsum(at_place) / len(long) for at_place in zip(*long, strict=False)]


def grid(ms: Sequence[float]) -> float:
    """Return the coarsest of GRIDS_MS on which all values lie; 0: on none."""
    values = np.asarray(ms, dtype=float)
    for step in GRIDS_MS:
        if np.abs(values / step - np.round(values / step)).max() < ON_GRID:
            return step
    return 0.0


def drift(ms: Sequence[float]) -> float:
    """Return how far a straight line through a series rises, as a share of its mean.

    0 below three values.
    """
    if len(ms) < 3:
        return 0.0
    mean = math.fsum(ms) / len(ms)
    return _drift(np.asarray(ms, dtype=float) - mean)[0] / mean


def pauses(ms: Sequence[float]) -> dict[str, float]:
    """Return how many steps a pause made longer, the share of all time lost, the longest step."""
    values = np.asarray(ms, dtype=float)
    middle, high = np.quantile(values, [0.5, 0.9]).tolist()
    limit = middle + max(PAUSE_SHARE * middle, PAUSE_DISTANCES * (high - middle))
    beyond = values[values > limit]
    lost_ms = math.fsum(float(value) - middle for value in beyond)
    return {
        "count": float(len(beyond)),
        "lost_share": lost_ms / math.fsum(ms),
        "longest_ms": float(values.max()),
    }


def _parts(count: int) -> list[tuple[int, int]]:
    """Return (first, last) of the whole, and of halves and quarters that overlap by half.

    Several changes hide each other in the whole (seeded intervals: Kovács and others 2023,
    Biometrika 110).
    """
    parts = [(0, count)]
    for size in (count // 2, count // 4):
        if size >= FEWEST_IN_PART:
            parts += [(start, start + size) for start in range(0, count - size + 1, size // 2)]
    return parts


def _drift(centred: Array) -> tuple[float, float]:
    """Return the rise of a straight line through (n,) values, and |t| of its slope ÷ its limit."""
    count = len(centred)
    along = np.arange(count) / (count - 1) - 0.5
    squares = float((along**2).sum())
    rise = float((centred * along).sum()) / squares
    rest = centred - rise * along
    inflation = _inflation(_correlation(rest, 2))
    # The variance of the rest is too small, because a correlated rest follows the line.
    followed = 1 - min(2 * inflation / count, 0.8)
    variance = float((rest**2).sum()) / (count - 2) / followed
    error = math.sqrt(variance * inflation / squares)
    freedom = max(count / inflation, 4.0) - 2
    limit = two_sided_quantile(DRIFT_CHANCE, freedom) * error
    return rise, _ratio(abs(rise), limit)


def _change(values: Array) -> tuple[float, float, int]:
    """Return the likeliest change: (mean after − before, statistic ÷ its limit, values before).

    The statistic at k is D² ÷ V: D compares the means before and after k, V is made of the partial
    sums on either side, in which a change at k does not show.
    """
    count = len(values)
    centred = values - math.fsum(values) / count
    steps = np.arange(1, count + 1, dtype=float)
    sums = np.cumsum(centred)
    margin = max(2, int(TRIM * count))
    before = np.arange(margin, count - margin + 1)
    at = sums[before - 1]
    left = _bridges(np.cumsum(sums**2), np.cumsum(steps * sums), np.cumsum(steps**2), before, at)
    back = np.cumsum(centred[::-1])  # the same from the other end
    after = count - before
    back_at = back[after - 1]
    right = _bridges(
        np.cumsum(back**2), np.cumsum(steps * back), np.cumsum(steps**2), after, back_at
    )
    distance = at - before / count * sums[-1]
    tiny = 1e-20 * count * max(float((values**2).max()), 1e-300)
    statistic = distance**2 / count / (np.maximum(left + right, tiny) / count**2)
    best = int(statistic.argmax())
    position = int(before[best])
    first_mean = math.fsum(centred[:position]) / position
    second_mean = math.fsum(centred[position:]) / (count - position)
    rest = np.concatenate([centred[:position] - first_mean, centred[position:] - second_mean])
    limit = CHANGE * (1 + CHANGE_OF_FEW * _inflation(_correlation(rest, 2)) / count)
    return second_mean - first_mean, _ratio(float(statistic[best]), limit), position


def _bridges(squares: Array, products: Array, steps: Array, lengths: Array, ends: Array) -> Array:
    """Return Σ (S_t − t ÷ k · S_k)² over t ≤ k, for every length k of a series' beginning.

    S are its partial sums.
    """
    index = lengths - 1
    slope = ends / lengths
    sums: Array = squares[index] - 2 * slope * products[index] + slope**2 * steps[index]
    return sums


def _correlation(rest: Array, fitted: int) -> float:
    """Return the correlation of neighbours of what a fit of some parameters left, 0 or more.

    It is corrected for the fit.
    """
    count, squares = len(rest), float((rest**2).sum())
    if squares == 0:
        return 0.0
    measured = float((rest[1:] * rest[:-1]).sum()) / squares
    corrected = (measured + fitted / count) / (1 - min(2 * fitted / count, 0.5))
    return min(max(corrected, 0.0), MOST_CORRELATED)


def _inflation(correlated: float) -> float:
    """Return by how much correlated neighbours inflate the variance of a mean (AR(1))."""
    return (1 + correlated) / (1 - correlated)


def _ratio(value: float, limit: float) -> float:
    if limit <= 0:
        return MOST_BEYOND * (value > 0)
    return min(value / limit, MOST_BEYOND)


def two_sided_quantile(share: float, freedom: float) -> float:
    """Return the value that Student's |t| exceeds with probability `share`.

    For `freedom` degrees of freedom, 1 or from 2 on: Hill 1970, Communications of the ACM 13(10),
    algorithm 396. Without scipy, whose import takes a second on every rank.
    """
    n = freedom
    if n == 1:
        return 1 / math.tan(share * math.pi / 2)
    if n == 2:
        return math.sqrt(2 / (share * (2 - share)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * share) ** (2 / n)
    if y <= 0.05 + a:
        y = (
            (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
        ) * (n + 1) / (n + 2) + 1 / y
        return math.sqrt(n * y)
    x = NormalDist().inv_cdf(share / 2)
    y = x**2
    if n < 5:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    return math.sqrt(n * math.expm1(a * y**2))


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
