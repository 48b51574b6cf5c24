"""What is believed of the rates of several cells, and what measuring one of them is worth.

Beliefs are jointly normal: cells share GPUs, links and γ, so a measurement of one tells of the others. The cell to measure next
is the one after which choosing the highest expected rate loses least on average: the expected value of sample information
(Raiffa and Schlaifer 1961), for beliefs that depend on each other the knowledge gradient (Frazier, Powell and Dayanik, INFORMS
Journal on Computing 21(4), 2009). Expectations are means over SAMPLES draws, equal for equal beliefs.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.prediction.draws import Values

SAMPLES = 8000  # half of them mirror images of the others
MOST_NEXT = 3  # cells that are offered
ENOUGH = 0.1  # of the loss: below it no further cell is offered
EQUAL = 1e-9  # of a rate: what is less apart is equal
WORTH = 1e-4  # of the rate: a smaller loss is worth no cell


@dataclass(frozen=True)
class Beliefs:
    """Expected rates, their covariance, and the variance of one measured run of each."""

    mean: Values
    covariance: Values
    of_a_run: Values

    @staticmethod
    def of(rates: Sequence[Values], of_a_run: Sequence[float]) -> "Beliefs":
        """Return the beliefs that draws of rates show: the best value first in each."""
        best = np.array([one[0] for one in rates])
        apart = np.array([one[1:] for one in rates]) - best[:, None]
        return Beliefs(best, apart @ apart.T / apart.shape[1], np.array(of_a_run))

    @functools.cached_property
    def _drawn(self) -> Values:
        """Possible rates, (SAMPLES, cells), and with each its mirror image, so that their means are exact."""
        values, vectors = np.linalg.eigh(self.covariance)
        normal = np.random.default_rng(0).standard_normal((SAMPLES // 2, len(self.mean)))
        apart = normal * np.sqrt(np.clip(values, 0.0, None)) @ vectors.T
        return np.asarray(self.mean + np.concatenate([apart, -apart]))

    def chances(self) -> Values:
        """Return the chance of each cell to be the fastest; equals share it."""
        highest = self._drawn >= _or_equal(self._drawn.max(axis=1, keepdims=True))
        return np.asarray((highest / highest.sum(axis=1, keepdims=True)).mean(axis=0))

    def as_fast_as(self, place: int) -> Values:
        """Return the chance of each cell to be as fast as one of them, or faster."""
        return np.asarray((self._drawn >= _or_equal(self._drawn[:, [place]])).mean(axis=0))

    def loss(self, measured: Sequence[int] = ()) -> float:
        """Return how far the choice lies below the fastest cell on average, once some cells have been measured."""
        return max(
            0.0, float((self._drawn.max(axis=1) - self._expected(measured).max(axis=1)).mean())
        )

    def _expected(self, measured: Sequence[int]) -> Values:
        """Return the expected rates after each possible measurement."""
        if not measured:
            return np.broadcast_to(self.mean, self._drawn.shape)
        at = list(measured)
        normal = np.random.default_rng(1).standard_normal((SAMPLES // 2, len(self.mean)))[:, at]
        noise = np.sqrt(self.of_a_run[at]) * np.concatenate([normal, -normal])
        seen = self._drawn[:, at] + noise - self.mean[at]
        known = self.covariance[np.ix_(at, at)] + np.diag(self.of_a_run[at])
        return np.asarray(self.mean + seen @ np.linalg.pinv(known) @ self.covariance[at])

    def next_cells(self) -> list[tuple[int, float]]:
        """Return the cells worth measuring, each with the loss that is left after it; none where a loss is negligible."""
        found: list[tuple[int, float]] = []
        left = self.loss()
        enough = max(ENOUGH * left, WORTH * float(self.mean.max()))
        while len(found) < min(MOST_NEXT, len(self.mean)) and left > enough:
            so_far = [place for place, _ in found]
            after = {
                place: self.loss([*so_far, place])
                for place in range(len(self.mean))
                if place not in so_far
            }
            place = min(after, key=lambda one: after[one])
            if left - after[place] < ENOUGH * left:
                break
            left = after[place]
            found.append((place, left))
        return found


def _or_equal(rates: Values) -> Values:
    """Return rates less what counts as equal; where runs scatter much, a draw may lie below 0."""
    return np.asarray(rates - EQUAL * np.abs(rates))
