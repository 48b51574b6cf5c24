"""What lower SM clocks take from GPUs that train together, against each of them alone: step ∝
clock^−e, with 0 ≤ e ≤ 1.

e comes from the samples of a cell's GPUs, each with the steps around it, in the raw lines of its
folder.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.statistics.tests import Floats
from analysis.study.draws import DRAWS, Draws, Sample, Step, draws_of_median, generator_of
from analysis.study.estimates import Estimate, Member, WaterfallPart
from analysis.study.noise_floor import CLOCK, FloorGroup, group_of
from analysis.study.provenance import listed, mapping
from analysis.study.runs import Runs
from analysis.study.study import Study
from benchmarks.record import CellFolder, Kind, Record, finite, read_lines

NAME = "other clocks than alone"
NOT_TOLD = "not told apart from 0"
TIMED, WITH, WITHOUT = "timed", "with exchange", "without exchange"  # windows of steps
AROUND_S = 0.15  # steps whose middle lies so near to a sample belong to it
FEWEST_STEPS = 3  # around a sample
FEWEST_OF_A_MEAN = 3  # samples
FEWEST_WINDOWS, FEWEST_SAMPLES = 4, 12
MOST_RECORDS = 100  # of one workload whose raw samples are read
LEAST_SCATTER = 0.004  # of the logarithm of the clock: half a step of an H200's, 15 of 1,980 MHz
LEAST_RATIO = 0.004  # of logarithms of clocks that differ, likewise


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
    at_equal_clocks: Estimate | None = (
        None  # images per second with the clocks of the members alone
    )


@dataclass(frozen=True)
class Exponent:
    """e, its draws (DRAWS,), and how many samples it rests on; 0 of them: nothing measured it, and
    `value` is its bound, 1.
    """

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


class StepWindow(NamedTuple):
    """Steps that one rank timed together: (steps,) arrays."""

    purpose: str
    middles_s: Floats  # since 1970
    steps_ms: Floats


def clocks_and_steps(record: Record, folder: CellFolder) -> list[tuple[Floats, Floats]]:
    """Return for each sort of window (logarithm of the SM clock, logarithm of the step time) of its
    samples.

    Steps that wait for other ranks belong to the lowest clock of all GPUs, others to that of their
    own GPU. Empty where the folder has no raw lines, and for cells on several hosts, whose clocks
    lie in several files.
    """
    if len(record.cell.hosts) > 1:
        return []
    clocks = _clocks(folder, record.cell.world_size)
    exchanges = record.cell.world_size > 1 and record.cell.strategy["name"] != "none"
    pairs = []
    for rank in range(record.cell.world_size if clocks else 0):
        windows = _windows(folder, rank)
        for purpose in (TIMED, WITH, WITHOUT):
            waits = exchanges and purpose != WITHOUT
            if waits and rank:
                continue  # its steps are those of rank 0
            own = [(at, min(mhz) if waits else mhz[rank]) for at, mhz in clocks]
            pair = _with_steps_around([each for each in windows if each.purpose == purpose], own)
            if len(pair[0]) > 1:
                pairs.append(pair)
    return pairs


def _clocks(folder: CellFolder, ranks: int) -> list[tuple[float, list[float]]]:
    clocks = []
    for line in read_lines(folder.gpu_samples):
        at = finite(line["time"])
        mhz = _positive([gpu.get("sm_mhz") for gpu in listed(line.get("gpus"))])
        if at is not None and len(mhz) == ranks:
            clocks.append((at, mhz))
    return clocks


def _windows(folder: CellFolder, rank: int) -> list[StepWindow]:
    windows = []
    for line in read_lines(folder.rank_lines(rank)):
        ms, end = line.get("ms"), finite(line["time"])
        if line["kind"] != Kind.BLOCK or not isinstance(ms, list) or end is None:
            continue
        steps = np.asarray(_positive(ms))
        if len(steps):
            to_end = np.cumsum(steps[::-1])[::-1] - steps / 2  # from the middle of each step
            windows.append(StepWindow(str(line.get("purpose")), end - to_end / 1e3, steps))
    return windows


def _positive(values: Sequence[object]) -> list[float]:
    """Return the values where all are positive numbers; else none."""
    numbers = [finite(value) for value in values]
    positive = [number for number in numbers if number is not None and number > 0]
    return positive if len(positive) == len(values) else []


def _with_steps_around(
    windows: Sequence[StepWindow], clocks: Sequence[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """Return the logarithms of the clocks (time, MHz) that have steps around them, and of the means
    of these steps.
    """
    log_clocks, log_steps = [], []
    for window in windows:
        for at, mhz in clocks:
            near = np.abs(window.middles_s - at) < AROUND_S
            if np.count_nonzero(near) >= FEWEST_STEPS:
                log_clocks.append(math.log(mhz))
                log_steps.append(math.log(window.steps_ms[near].mean()))
    return np.asarray(log_clocks, dtype=float), np.asarray(log_steps, dtype=float)


def clock_errors(record: Record, folder: CellFolder) -> list[float]:
    """Return the standard error of the mean logarithm of each GPU's clock over the timed windows;
    empty with too few samples.
    """
    timed = [each.middles_s for each in _windows(folder, 0) if each.purpose == TIMED]
    inside = []
    for at, mhz in _clocks(folder, record.cell.world_size):
        if any(middles[0] <= at <= middles[-1] for middles in timed):
            inside.append(np.log(mhz))
    if len(inside) < FEWEST_OF_A_MEAN:
        return []
    return list(map(float, np.std(inside, axis=0, ddof=1) / math.sqrt(len(inside))))


def exponent(windows: Sequence[tuple[Floats, Floats]], name: str) -> Exponent:
    """Return e of the windows of one workload, each (logarithms of clocks, logarithms of step
    times); `name` seeds its draws.
    """
    samples = sum(len(clocks) for clocks, _ in windows)
    if len(windows) < FEWEST_WINDOWS or samples < FEWEST_SAMPLES:
        return UNKNOWN
    sums = []
    for clocks, steps in windows:
        x, y = clocks - clocks.mean(), steps - steps.mean()
        sums.append((x @ x, y @ y, -(x @ y)))
    moments = np.array(sums)
    xx, _, xy = moments.sum(axis=0)
    # Where clock and step do not go together, the direct slope is 0 and nothing bounds the reverse
    # one.
    if xy <= 0 or xx / (samples - len(windows)) < LEAST_SCATTER**2:
        return UNKNOWN
    generator = generator_of(name)
    shares = np.full(len(windows), 1 / len(windows))
    weights = generator.multinomial(len(windows), shares, size=DRAWS).astype(float)
    value = _slope(moments.sum(axis=0)[None], np.array([0.5]))
    draws = _slope(weights @ moments, generator.integers(0, 2, size=DRAWS).astype(float))
    return Exponent(float(value[0]), draws, samples)


def _slope(sums: Floats, weight: Floats) -> Draws:
    """Return the slope between the direct (weight 0) and the reverse one (1), from sums (n, 3) of
    squares and products.
    """
    xx, yy, xy = sums.T
    together = np.maximum(xy, 1e-12)
    direct = np.clip(together / np.maximum(xx, 1e-12), 0, 1)
    reverse = np.clip(yy / together, 0, 1)
    slope: Draws = direct ** (1 - weight) * reverse**weight
    return slope


@dataclass(frozen=True)
class _LogClock:
    """The logarithm of a mean clock in MHz, and draws of it; None where its scatter is not known."""

    value: float
    draws: Draws | None


class Clocks:
    """The clocks of a study's cells, and how far the steps of each workload follow them."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._exponents: dict[FloorGroup, Exponent] = {}
        self._errors: dict[str, list[float]] = {}  # of each record's clocks

    def at_clock_of(self, together: Runs, step: Step, alone: Runs) -> Step | None:
        """Return what a step of one GPU, or a part of it, takes at the mean clock of a cell; None
        without both clocks.
        """
        before, after = _of_cell(alone), _of_cell(together)
        if before is None or after is None:
            return None
        return _slowed(step, before, after, self.exponent(together))

    def differ(self, together: Runs, alone: Runs) -> bool:
        """Return whether GPUs had another clock together than one had alone."""
        before, after = _of_cell(alone), _of_cell(together)
        if before is None or after is None:
            return False
        return abs(before.value - after.value) > LEAST_RATIO

    def lost(
        self, runs: Runs, alone: Mapping[Member, Runs], steps: Mapping[Member, Step]
    ) -> Step | None:
        """Return how much longer the slowest step is at the clocks that the members have together;
        None without clocks.

        `steps` are those of members alone, with what the strategy does on one GPU.
        """
        clocks = self._of_members(runs, alone)
        if clocks:
            follows = self.exponent(runs)
            slowed = [_slowed(steps[gpu], *clocks[gpu], follows) for gpu in clocks]
            return _beyond(_slowest(slowed), _slowest([steps[gpu] for gpu in clocks]))
        slowest = max(steps, key=lambda gpu: steps[gpu].ms)
        at_clock = self.at_clock_of(runs, steps[slowest], alone[slowest])
        return None if at_clock is None else _beyond(at_clock, steps[slowest])

    def members(self, runs: Runs, alone: Mapping[Member, Runs]) -> tuple[MemberClock, ...]:
        """Return the clocks of every member that ran alone; none where the records have no clock of
        each GPU.
        """
        members = []
        for gpu, clocks in self._of_members(runs, alone).items():
            alone_mhz, together_mhz = (round(math.exp(clock.value), 3) for clock in clocks)
            members.append(MemberClock(gpu, alone_mhz, together_mhz))
        return tuple(members)

    def _of_members(
        self, runs: Runs, alone: Mapping[Member, Runs]
    ) -> dict[Member, tuple[_LogClock, _LogClock]]:
        clocks = {}
        for gpu in runs.gpus:
            if gpu in alone:
                before, after = self._of_gpu(alone[gpu], gpu), self._of_gpu(runs, gpu)
                if before is None or after is None:
                    return {}
                clocks[gpu] = before, after
        return clocks

    def _of_gpu(self, runs: Runs, gpu: Member) -> _LogClock | None:
        rank = runs.gpus.index(gpu)
        floor = runs.floor(CLOCK)
        logarithms, errors = [], [floor.deviation if floor else 0.0]
        for record in runs.records:
            mhz = _mean_mhz(record, rank)
            if mhz is not None:
                logarithms.append(math.log(mhz))
            folder = self._study.folders.get(record.record_id)
            if folder:
                errors += self._errors_of(record, folder)[rank : rank + 1]
        if not logarithms:
            return None
        value, deviation = statistics.median(logarithms), max(errors)
        if not deviation:
            return _LogClock(value, None)
        name = f"{CLOCK} {runs.records[0].record_id} {gpu}"
        return _LogClock(value, draws_of_median(value, deviation, len(logarithms), name))

    def _errors_of(self, record: Record, folder: CellFolder) -> list[float]:
        if record.record_id not in self._errors:
            self._errors[record.record_id] = clock_errors(record, folder)
        return self._errors[record.record_id]

    def exponent(self, runs: Runs) -> Exponent:
        """Return e of the workload of a cell, from all valid cells of it whose raw samples are
        here.
        """
        workload = group_of(runs.records[0]).of_any_size
        if workload not in self._exponents:
            self._exponents[workload] = self._of_workload(workload)
        return self._exponents[workload]

    def _of_workload(self, workload: FloorGroup) -> Exponent:
        records = []
        for record in self._study.usable:
            has_samples = record.record_id in self._study.folders
            valid = record.validity.verdict == "valid" and has_samples
            if valid and group_of(record).of_any_size == workload:
                records.append(record)
        windows = []
        for record in records[:MOST_RECORDS]:
            windows += clocks_and_steps(record, self._study.folders[record.record_id])
        return exponent(windows, f"{CLOCK} {workload}")


def _of_cell(runs: Runs) -> _LogClock | None:
    logarithms = runs.logarithms(CLOCK)
    if not logarithms:
        return None
    value, name = statistics.median(logarithms), f"{CLOCK} {runs.records[0].record_id}"
    return _LogClock(value, Sample(value, runs.floor(CLOCK), len(logarithms), name).draws)


def _mean_mhz(record: Record, rank: int) -> float | None:
    timed = mapping(mapping(mapping(record.checks.get("gpu_samples")).get("phases")).get("timed"))
    clocks = timed.get("sm_mhz")
    if not isinstance(clocks, list) or len(clocks) != record.cell.world_size:
        return None
    mhz = finite(clocks[rank])
    return mhz if mhz is not None and mhz > 0 else None


def _slowest(steps: Sequence[Step]) -> Step:
    return max(steps, key=lambda step: step.ms)


def _slowed(step: Step, before: _LogClock, after: _LogClock, follows: Exponent) -> Step:
    """Return a step at another clock. Its draws need those of both clocks."""
    ms = step.ms * math.exp(follows.value * (before.value - after.value))
    if before.draws is None or after.draws is None:
        return Step(ms, None)
    share = np.full((2, DRAWS), follows.value)
    if follows.draws is not None:
        # Against the best value in the other row, so that the interval has its error.
        share[0] = follows.draws
    unslowed = step.ms if step.draws is None else step.draws
    return Step(ms, unslowed * np.exp(share * (before.draws - after.draws)))


def _beyond(slowed: Step, step: Step) -> Step:
    """Return the difference; where nothing says how far steps scatter, its draws are those of the
    clocks alone.
    """
    if step.draws is None and slowed.draws is not None:
        step = Step(step.ms, np.full_like(slowed.draws, step.ms))
    return slowed - step


def clock_part(
    part: WaterfallPart,
    members: tuple[MemberClock, ...],
    follows: Exponent,
    rate: float,
    step_ms: float,
) -> ClockPart:
    """Return the part of the clocks of a cell that trains `rate` images per second; where nothing
    says e, it reaches 0.
    """
    share, lost, ms = follows.estimate, part.lost, part.ms
    if follows.measured:
        longer = f"{share.value:.2f} % ({share.low:.2f} to {share.high:.2f}) longer"
        why = f"a clock 1 % lower makes a step {longer}, by {follows.samples} samples of clocks beside steps"
    else:
        lost, ms = _reaching_0(lost), _reaching_0(ms)
        why = "at most, as if a step followed the clock; one that waits for memory follows it less"
    if lost is None or not lost.value:
        why = ""
    elif lost.low is None or lost.high is None or lost.low <= 0 <= lost.high:
        why += f"; {NOT_TOLD}"
    equal = None
    if ms is not None and max(ms.value, ms.high or 0.0) < step_ms:

        def without(part_ms: float | None) -> float | None:
            return None if part_ms is None else rate / (1 - part_ms / step_ms)

        equal = Estimate(rate / (1 - ms.value / step_ms), without(ms.low), without(ms.high))
    return ClockPart(part.name, lost, why, False, ms, members, share, follows.samples, equal)


def _reaching_0(bound: Estimate | None) -> Estimate | None:
    if bound is None or bound.low is None or bound.high is None:
        return bound
    return Estimate(bound.value, min(bound.low, 0.0), max(bound.high, 0.0))
