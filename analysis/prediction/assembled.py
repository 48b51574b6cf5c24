"""A step put together from its parts, with the draws of each.

step = max(replay of the buckets + waiting, launches of the host) + scatter between runs
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.prediction import tables
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, about, best, deviation, exactly, near
from analysis.prediction.parts.base import (
    StepPart,
    base,
    between_gpus_ms,
    of_members,
    scatter_ms,
    waited_ranks,
)
from analysis.prediction.parts.costs import own_work, slowed
from analysis.prediction.parts.exchange import exchange, replay_with
from analysis.prediction.parts.nearest import refuse_unknown_sizes
from analysis.prediction.replay import Replayed
from analysis.prediction.strategies import BucketTimes, exchange_of, refuse_unknown
from analysis.prediction.waiting import Waiting, expected_largest, largest_normal, wait_of_residuals

_WAITING_SPREAD = 0.25  # of a wait that follows from a 95th percentile alone
BASE, EXCHANGE, SLOWED, OWN, WAITING, NOISE = (
    "step of one GPU",
    "exchange",
    "contention",
    "own work of the strategy",
    "waiting",
    "scatter between runs",
)


@dataclass(frozen=True)
class Assembled:
    """The parts of a step. Times are ms."""

    calibration: Calibrated
    question: Question
    bare: StepPart  # the step of one GPU without the strategy
    times: BucketTimes  # of each bucket's exchange, if nothing else went on
    gamma: StepPart
    own: StepPart
    waiting: Values
    why_waiting: str
    noise: Values  # what the next run differs by
    launch_ms: float  # no step is shorter

    @functools.cached_property
    def played(self) -> Replayed:
        """The replay of the buckets."""
        return self._play(self.bare.values, self.times, self.gamma.values, self.own.values)

    def steps(self, next_run: bool = True) -> Values:
        """Return the step as draws; `next_run=False`: its mean over many runs."""
        return self._mean + self.noise if next_run else self._mean

    @functools.cached_property
    def _mean(self) -> Values:
        return self._step_of(self.played, self.times, self.waiting)

    @property
    def widest(self) -> str:
        """The part whose draws alone spread the step most."""
        names = (BASE, EXCHANGE, SLOWED, OWN, WAITING, NOISE)
        given: tuple[Any, ...] = (
            self.bare.values,
            self.times,
            self.gamma.values,
            self.own.values,
            self.waiting,
            self.noise,
        )

        def fixed(values: Any) -> Any:
            return values.best if isinstance(values, BucketTimes) else exactly(best(values))

        def spread(place: int) -> float:
            alone: list[Any] = [one if place == at else fixed(one) for at, one in enumerate(given)]
            return deviation(self._step(*alone))

        return max(names, key=lambda name: spread(names.index(name)))

    def _play(self, bare: Values, times: BucketTimes, gamma: Values, own: Values) -> Replayed:
        """Return the replay of the buckets with some parts as they are given."""
        return replay_with(self.calibration, self.question, bare, times, own, gamma)

    def _step(
        self,
        bare: Values,
        times: BucketTimes,
        gamma: Values,
        own: Values,
        waiting: Values,
        noise: Values,
    ) -> Values:
        """Return the step with all parts as they are given."""
        return self._step_of(self._play(bare, times, gamma, own), times, waiting) + noise

    def _step_of(self, played: Replayed, times: BucketTimes, waiting: Values) -> Values:
        """Return the step of a replay with its waiting: no shorter than its launches, or than its servers take."""
        whole = played.step_ms + waiting
        if not exchange_of(
            self.question
        ).waits:  # a server answers the pushes of all ranks, one after the other
            whole = np.maximum(whole, times.whole_ms)
        return np.maximum(whole, self.launch_ms)


def assemble(calibration: Calibrated, question: Question) -> Assembled:
    """Return the parts of the step of a cell. Raises NoLink, ValueError."""
    refuse_unknown(question)
    refuse_unknown_sizes(calibration, question)  # before anything else is missed
    bare = base(calibration, question)
    gamma = slowed(calibration, question)
    own = own_work(calibration, question, gamma.values)
    times = exchange(calibration, question)
    waiting, why = _waiting(calibration, question)
    noise = near(0.0, between_runs_ms(calibration, question), "next run")
    launch = _launch_ms(calibration, question)
    return Assembled(calibration, question, bare, times, gamma, own, waiting, why, noise, launch)


def _waiting(calibration: Calibrated, question: Question) -> tuple[Values, str]:
    """Return what a step takes longer than that of the mean GPU, or of the slowest member where all were measured, in ms."""
    if question.ranks < 2 or not exchange_of(question).waits:
        return exactly(0.0), ""
    ranks, inside, spread, why = (
        question.ranks,
        scatter_ms(calibration, question),
        _WAITING_SPREAD,
        "",
    )
    if found := _wait_of_records(calibration, question):
        wait, effective = found
        inside = wait.ms / largest_normal(
            ranks
        )  # as if the residuals were normal and waited as long
        spread = (
            max((wait.bound_ms / wait.ms - 1) / 2, 1 / math.sqrt(effective)) if wait.ms > 0 else 0.0
        )
        why = (
            f"waiting for {ranks} ranks is at most {wait.bound_ms:.2f} ms by its tail"
            if wait.beyond
            else ""
        )
    means = of_members(calibration, question)
    if means:
        return about(expected_largest(means, inside) - max(means), spread, "waiting"), why
    both = math.hypot(inside, between_gpus_ms(calibration, question))
    already = largest_normal(
        waited_ranks(calibration, question)
    )  # a step of several ranks has waited for some
    said = "GPUs that were not measured scatter as those that were"
    ms = about(both * max(largest_normal(ranks) - already, 0.0), spread, "waiting")
    return ms, f"{said}; {why}" if why else said


@functools.lru_cache(maxsize=256)
def _wait_of(residuals_ms: tuple[float, ...], ranks: int) -> Waiting:
    """Return the wait of some residuals: a fit of their tail, which every calibration with the same record needs again."""
    return wait_of_residuals(residuals_ms, ranks)


def _wait_of_records(calibration: Calibrated, question: Question) -> tuple[Waiting, float] | None:
    """Return the wait by the residuals of a record of this workload, and how many of them are independent; None without any."""
    key = "waiting", question.workload, question.ranks
    if key not in calibration.memo:
        calibration.memo[key] = None
        for one in calibration.cells:
            residuals = (
                tables.residuals_ms(one.tables)
                if one.question.workload == question.workload
                else None
            )
            if residuals is not None:
                wait = _wait_of(tuple(residuals), question.ranks)
                calibration.memo[key] = wait, len(residuals) / tables.together_for(one.tables)
                break
    found: tuple[Waiting, float] | None = calibration.memo[key]
    return found


def between_runs_ms(calibration: Calibrated, question: Question) -> float:
    """Return the standard deviation of a step between runs of equal cells, in ms."""
    found = [
        one for one in calibration.cells if one.timed and one.question.workload == question.workload
    ]
    shares = [one.between_runs * best(one.step_ms) for one in found if one.step_ms is not None]
    return float(np.median(shares)) if shares else 0.0


def _launch_ms(calibration: Calibrated, question: Question) -> float:
    """Return the time that the host needs to enqueue a step: no step is shorter; 0 where it was not measured.

    A CPU worker enqueues nothing: there it is the lead-in itself, which is longer than other steps, and of another batch.
    """
    if question.unit != "GPU":
        return 0.0
    found = [
        one.launch_ms
        for one in calibration.cells
        if one.question.workload == question.workload
        and one.question.strategy == question.strategy
        and one.launch_ms
    ]
    return min(found, default=0.0)
