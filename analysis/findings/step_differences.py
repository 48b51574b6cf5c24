"""Step times and parts of them in ms, each with its draws where the scatter between runs is known."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from analysis.study.draws import Draws
from analysis.study.study import Runs


@dataclasses.dataclass(frozen=True)
class Step:
    """A step time, or a part of one."""

    ms: float
    draws: Draws | None  # ms; None where the scatter is not known

    def __add__(self, other: "Step") -> "Step":
        """Return the sum."""
        known = self.draws is not None and other.draws is not None
        return Step(self.ms + other.ms, self.draws + other.draws if known else None)  # type: ignore[operator]

    def __sub__(self, other: "Step") -> "Step":
        """Return the difference."""
        known = self.draws is not None and other.draws is not None
        return Step(self.ms - other.ms, self.draws - other.draws if known else None)  # type: ignore[operator]


def mean_step(steps: Sequence[Step]) -> Step | None:
    """Return the mean of steps; None where there is none."""
    if not steps:
        return None
    known = [step.draws for step in steps if step.draws is not None]
    draws = np.mean(known, axis=0) if len(known) == len(steps) else None
    return Step(sum(step.ms for step in steps) / len(steps), draws)


def step_of(runs: Runs, name: str) -> Step | None:
    """Return the median of a metric of runs that is a part of a step; None where they do not have it."""
    found = runs.difference(name)
    return None if found is None else Step(found.value, found.draws)
