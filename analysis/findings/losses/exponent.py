"""How much longer a step takes at a lower SM clock: step ∝ clock^−e, with 0 ≤ e ≤ 1.

A step that waits for memory alone has e = 0, one that computes alone has e = 1. Inside the windows of a workload's cells the
clock wanders, under a power cap by some per cent, and the steps beside each sample wander with it. Both are measured with errors,
so that the slope of the step on the clock is too small and that of the clock on the step too large: the truth lies between
the two (Frisch 1934). Draws take windows again with replacement, and one of both slopes.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.findings.estimates import DRAWS, Draws
from analysis.findings.losses.samples import Numbers
from analysis.findings.model import Estimate

FEWEST_WINDOWS, FEWEST_SAMPLES = 4, 12
LEAST_SCATTER = 0.004  # of the logarithm of the clock: half a step of an H200's, 15 of 1,980 MHz


@dataclass(frozen=True)
class Exponent:
    """e, its draws (DRAWS,), and how many samples it rests on; 0 of them: nothing measured it, and `value` is its bound, 1."""

    value: float
    draws: Draws | None = None
    samples: int = 0

    @property
    def measured(self) -> bool:
        """Whether samples say it."""
        return self.samples > 0

    @property
    def estimate(self) -> Estimate:
        """It with its 95 % interval; unmeasured, from 0 to 1."""
        if self.draws is None:
            return Estimate(self.value, 0.0, 1.0)
        low, high = np.quantile(self.draws, [0.025, 0.975])
        return Estimate(self.value, float(low), float(high))


UNKNOWN = Exponent(1.0)


def exponent(windows: Sequence[tuple[Numbers, Numbers]], name: str) -> Exponent:
    """Return e of the windows of one workload, each (logarithms of clocks, logarithms of step times); `name` seeds its draws."""
    samples = sum(len(clocks) for clocks, _ in windows)
    if len(windows) < FEWEST_WINDOWS or samples < FEWEST_SAMPLES:
        return UNKNOWN
    centred = [(clocks - clocks.mean(), steps - steps.mean()) for clocks, steps in windows]
    sums = np.array([(x @ x, y @ y, -(x @ y)) for x, y in centred])
    value = _between(sums.sum(axis=0)[None], np.array([0.5]))
    if sums[:, 0].sum() / (samples - len(windows)) < LEAST_SCATTER**2 or value is None:
        return UNKNOWN
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    weights = generator.multinomial(len(windows), np.full(len(windows), 1 / len(windows)), size=DRAWS)
    draws = _between(weights @ sums, generator.integers(0, 2, size=DRAWS).astype(float))
    assert draws is not None
    return Exponent(float(value[0]), draws, samples)


def _between(sums: Numbers, place: Numbers) -> Draws | None:
    """Return a slope between the direct and the reverse one, from sums (n, 3) of squares and products; None if it never falls.

    Where clock and step do not go together, the direct one is 0 and nothing bounds the other one.
    """
    xx, yy, xy = sums.T
    if len(sums) == 1 and xy[0] <= 0:
        return None
    together = np.maximum(xy, 1e-12)
    direct, reverse = np.clip(together / np.maximum(xx, 1e-12), 0, 1), np.clip(yy / together, 0, 1)
    slope: Draws = direct ** (1 - place) * reverse**place
    return slope
