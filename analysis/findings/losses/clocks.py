"""What lower SM clocks take from GPUs that train together, against each of them alone.

A member that needs t ms alone at clock f needs t · (f ÷ f')^e at the clock f' that it has together (e: losses.exponent). The
slowest member counts. Where the records do not have the clock of each GPU, the mean over all GPUs of a cell counts. Without raw
samples that say e, it is taken as 1: the part is then the most that clocks can take.
"""

import functools
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.findings.communication.steps import Step
from analysis.findings.estimates import DRAWS, Draws, Sample
from analysis.findings.losses.exponent import UNKNOWN, Exponent, exponent
from analysis.findings.losses.samples import beside_steps, clock_errors
from analysis.findings.model import Estimate, Member, WaterfallPart
from analysis.findings.next_run.floors import CLOCK, FloorGroup, group_of
from analysis.findings.next_run.interval import of_median
from analysis.findings.runs import Runs
from analysis.findings.study import Study
from benchmarks.record import Record, finite

NAME = "other clocks than alone"
NOT_TOLD = "not told apart from 0"
MOST_RECORDS = 100  # of one workload whose raw samples are read
LEAST_RATIO = 0.004  # of logarithms of clocks: half of an H200's smallest step


@dataclass(frozen=True)
class MemberClock:
    """The mean SM clock of one GPU alone and together, in MHz."""

    gpu: Member
    alone_mhz: float
    together_mhz: float


@dataclass(frozen=True)
class ClockPart(WaterfallPart):
    """The part of the clocks, with what it rests on."""

    members: tuple[MemberClock, ...] = ()  # those that ran alone
    exponent: Estimate | None = None  # e
    samples: int = 0  # of clocks beside steps that say e; 0: nothing does
    at_equal_clocks: Estimate | None = None  # images per second with the clocks that the members have alone


@dataclass(frozen=True)
class _LogClock:
    """The logarithm of a mean clock in MHz, and draws of it; None where its scatter is not known."""

    value: float
    draws: Draws | None


class Clocks:
    """The clocks of a study's cells, and how far the steps of each workload follow them."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._exponent_of = functools.cache(self._of_workload)

    def at_clock_of(self, together: Runs, step: Step, alone: Runs) -> Step | None:
        """Return what a step of one GPU, or a part of it, takes at the mean clock of a cell; None without both clocks."""
        one, several = _of_cell(alone), _of_cell(together)
        return None if one is None or several is None else _slowed(step, one, several, self.exponent(together))

    def differ(self, together: Runs, alone: Runs) -> bool:
        """Tell whether GPUs had another clock together than one had alone."""
        one, several = _of_cell(alone), _of_cell(together)
        return one is not None and several is not None and abs(one.value - several.value) > LEAST_RATIO

    def lost(self, runs: Runs, alone: Mapping[Member, Runs], steps: Mapping[Member, Step]) -> Step | None:
        """Return how much longer the slowest step is at the clocks that the members have together; None without clocks.

        `steps` are those of members alone, with what the strategy does on one GPU.
        """
        if known := self._of_members(runs, alone):
            changed = [_slowed(steps[gpu], *clocks, self.exponent(runs)) for gpu, clocks in known.items()]
            return _beyond(_slowest(changed), _slowest([steps[gpu] for gpu in known]))
        slowest = max(steps, key=lambda gpu: steps[gpu].ms)
        found = self.at_clock_of(runs, steps[slowest], alone[slowest])
        return None if found is None else _beyond(found, steps[slowest])

    def members(self, runs: Runs, alone: Mapping[Member, Runs]) -> tuple[MemberClock, ...]:
        """Return the clocks of every member that ran alone; none where the records have no clock of each GPU."""
        known = self._of_members(runs, alone)
        return tuple(
            MemberClock(gpu, *(round(math.exp(clock.value), 3) for clock in clocks)) for gpu, clocks in known.items()
        )

    def _of_members(self, runs: Runs, alone: Mapping[Member, Runs]) -> dict[Member, tuple[_LogClock, _LogClock]]:
        """Return {GPU: its clock alone and together} of the members that ran alone; none where one is not known."""
        found = {}
        for gpu in (member for member in runs.gpus if member in alone):
            one, several = self._of_gpu(alone[gpu], gpu), self._of_gpu(runs, gpu)
            if one is None or several is None:
                return {}
            found[gpu] = one, several
        return found

    def _of_gpu(self, runs: Runs, gpu: Member) -> _LogClock | None:
        """Return the mean clock of one GPU of a cell; None where the records do not say it."""
        place = runs.gpus.index(gpu)
        found = [math.log(mhz) for one in runs.records if (mhz := _mean_mhz(one, place)) is not None]
        if not found:
            return None
        value, floor = statistics.median(found), runs.floor(CLOCK)
        errors = [error for one in runs.records for error in self._errors(one)[place : place + 1]]
        deviation = max([floor.deviation if floor else 0.0, *errors])
        if not deviation:
            return _LogClock(value, None)
        seed = zlib.crc32(f"{CLOCK} {runs.records[0].record_id} {gpu}".encode())
        normal = np.random.default_rng(seed).standard_normal((2, DRAWS))
        return _LogClock(value, value + normal * deviation * np.array([[1.0], [math.sqrt(of_median(len(found)))]]))

    def _errors(self, record: Record) -> list[float]:
        folder = self._study.folders.get(record.record_id)
        return clock_errors(record, folder) if folder else []

    def exponent(self, runs: Runs) -> Exponent:
        """Return e of the workload of a cell, from all valid cells of it whose raw samples are here."""
        return self._exponent_of(group_of(runs.records[0]).of_any_size)

    def _of_workload(self, workload: FloorGroup) -> Exponent:
        alike = [one for one in self._study.usable if group_of(one).of_any_size == workload]
        valid = [one for one in alike if one.validity.verdict == "valid" and one.record_id in self._study.folders]
        windows = [
            pair for one in valid[:MOST_RECORDS] for pair in beside_steps(one, self._study.folders[one.record_id])
        ]
        return exponent(windows, f"{CLOCK} {workload}") if windows else UNKNOWN


def _of_cell(runs: Runs) -> _LogClock | None:
    """Return the mean clock of all GPUs of a cell; None where it was not sampled."""
    found = runs.logarithms(CLOCK)
    if not found:
        return None
    value = statistics.median(found)
    sample = Sample(value, runs.floor(CLOCK), len(found), f"{CLOCK} {runs.records[0].record_id}")
    return _LogClock(value, sample.draws)


def _mean_mhz(record: Record, place: int) -> float | None:
    """Return the mean clock of one GPU over the timed window; None where the record does not say it."""
    found: Any = record.checks
    for name in ("gpu_samples", "phases", "timed", "sm_mhz"):
        found = found.get(name) if isinstance(found, Mapping) else None
    mhz = finite(found[place]) if isinstance(found, list) and len(found) == record.cell.world_size else None
    return mhz if mhz is not None and mhz > 0 else None


def _slowest(steps: Sequence[Step]) -> Step:
    return max(steps, key=lambda step: step.ms)


def _slowed(step: Step, before: _LogClock, after: _LogClock, follows: Exponent) -> Step:
    """Return a step at another clock. Its draws need those of both clocks."""
    draws = None
    if before.draws is not None and after.draws is not None:
        share = np.full((2, DRAWS), follows.value)
        if follows.draws is not None:
            share[0] = follows.draws  # against the best value in the other row, so that the interval has its error
        draws = (step.ms if step.draws is None else step.draws) * np.exp(share * (before.draws - after.draws))
    return Step(step.ms * math.exp(follows.value * (before.value - after.value)), draws)


def _beyond(changed: Step, step: Step) -> Step:
    """Return the difference; where nothing says how far steps scatter, its draws are those of the clocks alone."""
    if step.draws is None and changed.draws is not None:
        step = Step(step.ms, np.full_like(changed.draws, step.ms))
    return changed - step


def clock_part(
    part: WaterfallPart, members: tuple[MemberClock, ...], follows: Exponent, rate: float, step_ms: float
) -> ClockPart:
    """Return the part of the clocks of a cell that trains `rate` images per second; where nothing says e, it reaches 0."""
    said, lost, ms, why = follows.estimate, part.lost, part.ms, part.why
    if follows.measured:
        longer = f"{said.value:.2f} % ({said.low:.2f} to {said.high:.2f}) longer"
        why = f"a clock 1 % lower makes a step {longer}, by {follows.samples} samples of clocks beside steps"
    else:
        lost, ms = _from_nothing(lost), _from_nothing(ms)
        why = "at most, as if a step followed the clock; one that waits for memory follows it less"
    if lost is None or not lost.value:
        why = ""
    elif lost.low is None or lost.high is None or lost.low <= 0 <= lost.high:
        why += f"; {NOT_TOLD}"
    equal = None
    if ms is not None and max(ms.value, ms.high or 0.0) < step_ms:
        ends = (None if end is None else rate / (1 - end / step_ms) for end in (ms.value, ms.low, ms.high))
        equal = Estimate(*ends)  # type: ignore[arg-type]
    return ClockPart(part.name, lost, why, False, ms, members, said, follows.samples, equal)


def _from_nothing(bound: Estimate | None) -> Estimate | None:
    """Return a bound with an interval that reaches 0."""
    if bound is None or bound.low is None or bound.high is None:
        return bound
    return Estimate(bound.value, min(bound.low, 0.0), max(bound.high, 0.0))
