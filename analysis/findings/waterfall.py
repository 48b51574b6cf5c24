"""Why a subset trains slower than its members would alone: the efficiency waterfall, from control cells.

Every part is a difference of step times in ms, and each comes from another measurement, so that the residual is a check
and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    clocks      slowest of (member alone + overhead) × (its SM     samples of the GPUs (losses.clocks)
                clock ÷ that together)^e, minus that alone
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
                at the clocks of these ranks
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: strategy/cost_ms
                minus the same on one GPU, else minus the overhead
                on several hosts, inside them      the strategy on each host alone with all its GPUs
                and between them                   the rest of it
                on one host, after the last        observed steps, with exchange and without
                gradient, in a slower backward,    (losses.exchange)
                and the rest
    waiting     of it, waiting for a peer of equal speed           the cell's trace: trace/wait_ms_per_step

Subtracted one after the other they become images per second. Where no GPU ran alone without a strategy, but the clocks differ,
the waterfall begins with the slowest member alone with the strategy.
"""

import dataclasses
import functools
import math
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.findings.communication import COST
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.findings.links import COMMUNICATION, Parts, by_hosts
from analysis.findings.step_differences import Step, mean_step, step_of
from analysis.study import names as labels
from analysis.study.draws import (
    DRAWS,
    Draws,
    Sample,
    exponential,
    freedom,
    next_run,
    scaled,
    slowest,
)
from analysis.study.estimates import Estimate, Member, Waterfall, WaterfallPart
from analysis.study.intervals import WIDEST, of_median
from analysis.study.names import gpu_list, several
from analysis.study.noise_floor import CLOCK, FloorGroup, group_of
from analysis.study.study import Runs, Study
from benchmarks.record import CellFolder, Kind, Record, finite, read_lines
from benchmarks.timing.statistics import ERROR_OF_MEDIAN

# What is exposed of an exchange, in parts: by the moments of observed steps with it and without it (tables.timeline).


TAIL, SLOWED, REST = (
    "exchange after the last gradient",
    "backward slowed by the exchange",
    "exposed, not explained",
)
UNSEEN = "no step was observed (benchmark.calibrate=timeline)"
_QUARTILES = 1.349  # between those of normal values, in standard deviations
_Moments = tuple[
    tuple[float, float, float], tuple[float, float, float]
]  # in ms, and the standard errors


@dataclass(frozen=True)
class Observed:
    """How much longer the parts of a step take with the exchange."""

    tail: Step
    slowed: Step
    after: Step


def in_parts(parts: Parts, runs: Runs, alone: Mapping[Member, Runs]) -> Parts:
    """Return the parts of the communication with the exposed one split, where steps were observed; else with the reason."""
    (name, exposed, why), *others = parts
    if name != COMMUNICATION or exposed is None:
        return parts
    found, own = (
        observed(runs),
        [step for gpu in runs.gpus if gpu in alone if (step := observed(alone[gpu]))],
    )
    if found is None or not own:
        untold = (
            _why_unseen(runs.records[0]) if found is None else "no GPU's steps were observed alone"
        )
        return [
            (name, exposed, "; ".join(filter(None, (why, f"its parts are not known: {untold}")))),
            *others,
        ]
    tail, slowed = (
        beyond(found.tail, [one.tail for one in own]),
        beyond(found.slowed, [one.slowed for one in own]),
    )
    return [(TAIL, tail, why), (SLOWED, slowed, ""), (REST, exposed - tail - slowed, ""), *others]


def beyond(together: Step, alone: Sequence[Step]) -> Step:
    """Return a part of a step on several GPUs without the mean of what it is on one."""
    mean = mean_step(alone)
    return together if mean is None else together - mean


def observed(runs: Runs) -> Observed | None:
    """Return the parts of the runs of a cell, the medians; None where no step was observed with and without exchange."""
    found = [one for record in runs.records if (one := _of_record(record)) is not None]
    if not found:
        return None
    name = f"moments {runs.records[0].record_id}"
    values, errors = (list(zip(*each, strict=True)) for each in zip(*found, strict=True))
    return Observed(*(_step(values[at], errors[at], f"{at} {name}") for at in range(3)))


def _step(values: Sequence[float], errors: Sequence[float], name: str) -> Step:
    """Return the median, with draws by the larger of the scatter inside runs and of that between them."""
    between = statistics.stdev(values) if len(values) > 1 else 0.0
    deviation = max(statistics.median(errors), between)
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((2, DRAWS))
    median = statistics.median(values)
    return Step(
        median, median + normal * deviation * np.array([[1.0], [math.sqrt(of_median(len(values)))]])
    )


def _why_unseen(record: Record) -> str:
    """Return why a record does not have the moments of its steps."""
    said = (row.get("unknown") for row in _rows(record).values())
    why = (
        text
        for one in said
        if isinstance(one, Mapping)
        for text in one.values()
        if isinstance(text, str)
    )
    return next(why, UNSEEN)


def _of_record(record: Record) -> _Moments | None:
    rows = _rows(record)
    ranks = [
        (rows.get((rank, False)), rows.get((rank, True))) for rank in range(record.cell.world_size)
    ]
    found = [_of_rank(without, with_it) for without, with_it in ranks if without and with_it]
    known = [one for one in found if one is not None]
    return min(known) if len(known) == record.cell.world_size else None


def _of_rank(without: Mapping[str, Any], with_it: Mapping[str, Any]) -> _Moments | None:
    before, after = _last_and_ends(without), _last_and_ends(with_it)
    if before is None or after is None:
        return None
    (last, end, whole), (last_with, end_with, whole_with) = before[0], after[0]
    of_last, of_end, of_whole = (
        math.hypot(*pair) for pair in zip(before[1], after[1], strict=True)
    )
    parts = (
        (end_with - last_with) - (end - last),
        last_with - last,
        (whole_with - end_with) - (whole - end),
    )
    return parts, (math.hypot(of_last, of_end), of_last, math.hypot(of_end, of_whole))


def _last_and_ends(row: Mapping[str, Any]) -> _Moments | None:
    """Return when the last gradient is there, the exchange has ended and the step has, in ms, and their standard errors."""
    ready, spreads, steps = (
        row.get("ready_ms"),
        row.get("ready_spread_ms"),
        finite(row.get("steps")),
    )
    ends = [
        (finite(row.get(f"{one}_ms")), finite(row.get(f"{one}_spread_ms")))
        for one in ("exchange", "update")
    ]
    if (
        not isinstance(ready, list)
        or not isinstance(spreads, list)
        or len(spreads) != len(ready)
        or not ready
    ):
        return None
    pairs = [
        *((finite(one), finite(other)) for one, other in zip(ready, spreads, strict=True)),
        *ends,
    ]
    known = [(at, spread) for at, spread in pairs if at is not None and spread is not None]
    if len(known) < len(pairs) or not steps or steps < 1:
        return None
    three = max(known[:-2]), *known[-2:]
    share = ERROR_OF_MEDIAN / _QUARTILES / math.sqrt(steps)
    (last, end, whole), errors = (tuple(one[at] for one in three) for at in (0, 1))
    return (last, end, whole), (errors[0] * share, errors[1] * share, errors[2] * share)


def _rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    table = record.tables.get("timeline")
    rows = table.get("rows") if isinstance(table, Mapping) else None
    return {
        (row["rank"], bool(row.get("exchange"))): row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping) and isinstance(row.get("rank"), int)
    }


# Clocks beside steps: the samples of a cell's GPUs, each with the steps around it, from the raw lines of its folder.


TIMED, WITH, SAMPLES_WITHOUT = "timed", "with exchange", "without exchange"  # windows of steps
AROUND_S = 0.15  # steps whose middle lies so near to a sample belong to it
FEWEST_STEPS = 3  # around a sample
FEWEST_OF_A_MEAN = 3  # samples
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class StepWindow(NamedTuple):
    """Steps that one rank timed together: (steps,) arrays."""

    purpose: str
    middles_s: Numbers  # since 1970
    steps_ms: Numbers


def beside_steps(record: Record, folder: CellFolder) -> list[tuple[Numbers, Numbers]]:
    """Return for each sort of window (logarithm of the SM clock, logarithm of the step time) of its samples.

    Steps that wait for other ranks belong to the lowest clock of all GPUs, others to that of their own GPU. Empty where the
    folder has no raw lines, and for cells on several hosts, whose clocks lie in several files.
    """
    if len(record.cell.hosts) > 1:
        return []
    clocks = list(_clocks(folder, record.cell.world_size))
    found = []
    for rank in range(record.cell.world_size if clocks else 0):
        windows = _windows(folder, rank)
        for purpose in (TIMED, WITH, SAMPLES_WITHOUT):
            waits = (
                record.cell.world_size > 1
                and purpose != SAMPLES_WITHOUT
                and record.cell.strategy["name"] != "none"
            )
            if waits and rank:
                continue  # its steps are those of rank 0
            of_gpus = [(at, min(mhz) if waits else mhz[rank]) for at, mhz in clocks]
            found.append(_beside([one for one in windows if one.purpose == purpose], of_gpus))
    return [pair for pair in found if len(pair[0]) > 1]


def _clocks(folder: CellFolder, ranks: int) -> Iterator[tuple[float, list[float]]]:
    """Yield (time, MHz of each GPU) of the samples that have a clock for every rank."""
    for line in read_lines(folder.gpu_samples):
        gpus, at = line.get("gpus"), finite(line["time"])
        mhz = (
            _positive([one.get("sm_mhz") for one in gpus if isinstance(one, dict)])
            if isinstance(gpus, list)
            else []
        )
        if at is not None and len(mhz) == ranks:
            yield at, mhz


def _windows(folder: CellFolder, rank: int) -> list[StepWindow]:
    """Return the windows of one rank."""
    found = []
    for line in read_lines(folder.rank_lines(rank)):
        ms, end = line.get("ms"), finite(line["time"])
        if (
            line["kind"] == Kind.BLOCK
            and isinstance(ms, list)
            and end is not None
            and (known := _positive(ms))
        ):
            steps = np.asarray(known)
            to_end = np.cumsum(steps[::-1])[::-1] - steps / 2  # from the middle of each step
            found.append(StepWindow(str(line.get("purpose")), end - to_end / 1e3, steps))
    return found


def _positive(values: Sequence[object]) -> list[float]:
    """Return the values where all are positive numbers; else none."""
    known = [number for value in values if (number := finite(value)) is not None and number > 0]
    return known if len(known) == len(values) else []


def _beside(
    windows: Sequence[StepWindow], clocks: Sequence[tuple[float, float]]
) -> tuple[Numbers, Numbers]:
    """Return the logarithms of the clocks (time, MHz) that have steps around them, and of the means of these steps."""
    pairs = []
    for window in windows:
        for at, mhz in clocks:
            near = np.abs(window.middles_s - at) < AROUND_S
            if np.count_nonzero(near) >= FEWEST_STEPS:
                pairs.append((math.log(mhz), math.log(window.steps_ms[near].mean())))
    both = np.asarray(pairs, dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def clock_errors(record: Record, folder: CellFolder) -> list[float]:
    """Return the standard error of the mean logarithm of each GPU's clock over the timed windows; empty with too few samples."""
    timed = [one.middles_s for one in _windows(folder, 0) if one.purpose == TIMED]
    inside = [
        np.log(mhz)
        for at, mhz in _clocks(folder, record.cell.world_size)
        if any(middles[0] <= at <= middles[-1] for middles in timed)
    ]
    if len(inside) < FEWEST_OF_A_MEAN:
        return []
    return list(map(float, np.std(inside, axis=0, ddof=1) / math.sqrt(len(inside))))


# How much longer a step takes at a lower SM clock: step ∝ clock^−e, with 0 ≤ e ≤ 1.


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
    value = _exponent_between(sums.sum(axis=0)[None], np.array([0.5]))
    if sums[:, 0].sum() / (samples - len(windows)) < LEAST_SCATTER**2 or value is None:
        return UNKNOWN
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    weights = generator.multinomial(
        len(windows), np.full(len(windows), 1 / len(windows)), size=DRAWS
    )
    draws = _exponent_between(weights @ sums, generator.integers(0, 2, size=DRAWS).astype(float))
    assert draws is not None
    return Exponent(float(value[0]), draws, samples)


def _exponent_between(sums: Numbers, place: Numbers) -> Draws | None:
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


# What lower SM clocks take from GPUs that train together, against each of them alone.


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
    at_equal_clocks: Estimate | None = (
        None  # images per second with the clocks that the members have alone
    )


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
        return (
            None
            if one is None or several is None
            else _slowed(step, one, several, self.exponent(together))
        )

    def differ(self, together: Runs, alone: Runs) -> bool:
        """Tell whether GPUs had another clock together than one had alone."""
        one, several = _of_cell(alone), _of_cell(together)
        return (
            one is not None and several is not None and abs(one.value - several.value) > LEAST_RATIO
        )

    def lost(
        self, runs: Runs, alone: Mapping[Member, Runs], steps: Mapping[Member, Step]
    ) -> Step | None:
        """Return how much longer the slowest step is at the clocks that the members have together; None without clocks.

        `steps` are those of members alone, with what the strategy does on one GPU.
        """
        if known := self._of_members(runs, alone):
            changed = [
                _slowed(steps[gpu], *clocks, self.exponent(runs)) for gpu, clocks in known.items()
            ]
            return _beyond(_slowest(changed), _slowest([steps[gpu] for gpu in known]))
        slowest = max(steps, key=lambda gpu: steps[gpu].ms)
        found = self.at_clock_of(runs, steps[slowest], alone[slowest])
        return None if found is None else _beyond(found, steps[slowest])

    def members(self, runs: Runs, alone: Mapping[Member, Runs]) -> tuple[MemberClock, ...]:
        """Return the clocks of every member that ran alone; none where the records have no clock of each GPU."""
        known = self._of_members(runs, alone)
        return tuple(
            MemberClock(gpu, *(round(math.exp(clock.value), 3) for clock in clocks))
            for gpu, clocks in known.items()
        )

    def _of_members(
        self, runs: Runs, alone: Mapping[Member, Runs]
    ) -> dict[Member, tuple[_LogClock, _LogClock]]:
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
        found = [
            math.log(mhz) for one in runs.records if (mhz := _mean_mhz(one, place)) is not None
        ]
        if not found:
            return None
        value, floor = statistics.median(found), runs.floor(CLOCK)
        errors = [error for one in runs.records for error in self._errors(one)[place : place + 1]]
        deviation = max([floor.deviation if floor else 0.0, *errors])
        if not deviation:
            return _LogClock(value, None)
        seed = zlib.crc32(f"{CLOCK} {runs.records[0].record_id} {gpu}".encode())
        normal = np.random.default_rng(seed).standard_normal((2, DRAWS))
        return _LogClock(
            value,
            value + normal * deviation * np.array([[1.0], [math.sqrt(of_median(len(found)))]]),
        )

    def _errors(self, record: Record) -> list[float]:
        folder = self._study.folders.get(record.record_id)
        return clock_errors(record, folder) if folder else []

    def exponent(self, runs: Runs) -> Exponent:
        """Return e of the workload of a cell, from all valid cells of it whose raw samples are here."""
        return self._exponent_of(group_of(runs.records[0]).of_any_size)

    def _of_workload(self, workload: FloorGroup) -> Exponent:
        alike = [one for one in self._study.usable if group_of(one).of_any_size == workload]
        valid = [
            one
            for one in alike
            if one.validity.verdict == "valid" and one.record_id in self._study.folders
        ]
        windows = [
            pair
            for one in valid[:MOST_RECORDS]
            for pair in beside_steps(one, self._study.folders[one.record_id])
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
    mhz = (
        finite(found[place])
        if isinstance(found, list) and len(found) == record.cell.world_size
        else None
    )
    return mhz if mhz is not None and mhz > 0 else None


def _slowest(steps: Sequence[Step]) -> Step:
    return max(steps, key=lambda step: step.ms)


def _slowed(step: Step, before: _LogClock, after: _LogClock, follows: Exponent) -> Step:
    """Return a step at another clock. Its draws need those of both clocks."""
    draws = None
    if before.draws is not None and after.draws is not None:
        share = np.full((2, DRAWS), follows.value)
        if follows.draws is not None:
            share[0] = (
                follows.draws
            )  # against the best value in the other row, so that the interval has its error
        draws = (step.ms if step.draws is None else step.draws) * np.exp(
            share * (before.draws - after.draws)
        )
    return Step(step.ms * math.exp(follows.value * (before.value - after.value)), draws)


def _beyond(changed: Step, step: Step) -> Step:
    """Return the difference; where nothing says how far steps scatter, its draws are those of the clocks alone."""
    if step.draws is None and changed.draws is not None:
        step = Step(step.ms, np.full_like(changed.draws, step.ms))
    return changed - step


def clock_part(
    part: WaterfallPart,
    members: tuple[MemberClock, ...],
    follows: Exponent,
    rate: float,
    step_ms: float,
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
        ends = (
            None if end is None else rate / (1 - end / step_ms)
            for end in (ms.value, ms.low, ms.high)
        )
        equal = Estimate(*ends)  # type: ignore[arg-type]
    return ClockPart(part.name, lost, why, False, ms, members, said, follows.samples, equal)


def _from_nothing(bound: Estimate | None) -> Estimate | None:
    """Return a bound with an interval that reaches 0."""
    if bound is None or bound.low is None or bound.high is None:
        return bound
    return Estimate(bound.value, min(bound.low, 0.0), max(bound.high, 0.0))


# A subset of GPUs whose loss is explained: its members alone, and each part of the loss as a difference of step times.


WAIT = "trace/wait_ms_per_step"
OVERHEAD, CONTENTION, WAITING = "strategy overhead on one GPU", "contention", "waiting for a peer"


@dataclass(frozen=True)
class ExplainedSubset:
    """The runs of a subset, and those of the control cells that explain them."""

    runs: Runs
    log_rate: Sample  # of `runs`: the logarithm of images per second
    members: Mapping[Member, Runs]  # those that ran alone
    rates: Mapping[Member, Sample]  # of each member, as `log_rate`
    with_strategy: bool  # so the members ran alone
    without: Mapping[
        tuple[Member, ...], Runs
    ]  # strategy=none, by subset; empty where members ran with the strategy
    alone: Mapping[Member, Runs]  # with the strategy
    hosts: Mapping[Member, Runs]  # each of several hosts alone with all its GPUs
    clocks: Clocks

    @staticmethod
    def of(runs: Runs, controls: ControlRuns, clocks: Clocks) -> "ExplainedSubset | None":
        """Return what is known of a subset; None where no member ran alone, or only with the strategy and at the same clock."""
        without, alone = controls.without(runs), controls.alone(runs)
        members = _with_rate({gpu: without[(gpu,)] for gpu in runs.gpus if (gpu,) in without})
        with_strategy = not members
        members = members or _with_rate({gpu: alone[gpu] for gpu in runs.gpus if gpu in alone})
        rates = {gpu: rate for gpu, one in members.items() if (rate := one.log_rate) is not None}
        if not rates or runs.log_rate is None or not runs.batch_size:
            return None
        hosts = controls.hosts(runs)
        found = ExplainedSubset(
            runs,
            runs.log_rate,
            members,
            rates,
            with_strategy,
            {} if with_strategy else without,
            alone,
            hosts,
            clocks,
        )
        return found if not with_strategy or clocks.differ(runs, found.slowest) else None

    @property
    def slowest(self) -> Runs:
        """The runs of the slowest member alone."""
        return self.members[min(self.rates, key=lambda gpu: self.rates[gpu].value)]

    @property
    def images(self) -> int:
        """The images of a step of all ranks."""
        return self.runs.world_size * self.runs.batch_size

    @functools.cached_property
    def step(self) -> Step:
        """The measured step."""
        return _subset_step(self.log_rate, self.images)

    @functools.cached_property
    def slowest_step(self) -> Step:
        """The step of the slowest member alone, whichever that is in each draw."""
        value, draws = slowest(self.rates.values())
        images = self.runs.batch_size * 1e3  # of a step, times the ms of a second
        return Step(images / math.exp(value), None if draws is None else images / np.exp(draws))

    @functools.cached_property
    def freedom(self) -> float:
        """The degrees of freedom of all rates and differences that the parts come from."""
        others = [self.alone[gpu].log_rate for gpu in self.runs.gpus if gpu in self.alone]
        others.append(together.log_rate if (together := self.without.get(self.runs.gpus)) else None)
        others.append(_as_share(self.runs.difference(COST), self.step.ms))
        return freedom(
            [self.log_rate, *self.rates.values(), *(one for one in others if one is not None)]
        )

    def parts(self) -> Iterator[tuple[str, Step | None, str]]:
        """Yield the parts below the ideal: name, time, and why it is not known or what qualifies it."""
        yield OVERHEAD, self._overhead, self._why_no_overhead()
        slowed = self.clocks.lost(self.runs, self.members, self._computing())
        yield NAME, slowed, "" if slowed else self._why_no_clocks()
        yield self._contention()
        yield from self._communication()

    @functools.cached_property
    def _overhead(self) -> Step | None:
        """What the strategy adds to a step of one rank, the mean over the members; None with it in the ideal."""
        if self.with_strategy:
            return None
        steps = [
            self._step_alone(rate) - self._step_alone(self.rates[gpu])
            for gpu in self.runs.gpus
            if gpu in self.rates
            and gpu in self.alone
            and (rate := self.alone[gpu].log_rate) is not None
        ]
        return mean_step(steps)

    def _why_no_overhead(self) -> str:
        if self.with_strategy:
            return (
                "it is in the ideal: no GPU ran alone without a strategy (waterfall=true adds that)"
            )
        return "" if self._overhead else "the strategy was not measured on one of these GPUs alone"

    def _why_no_clocks(self) -> str:
        return (
            "the clocks were not sampled"
            if self.runs.cell.device == "cuda"
            else "CPU workers have no SM clock"
        )

    def _computing(self) -> dict[Member, Step]:
        """Return the step of each member alone, with what the strategy does on one GPU."""
        steps = {gpu: self._step_alone(rate) for gpu, rate in self.rates.items()}
        return {
            gpu: step + self._overhead if self._overhead else step for gpu, step in steps.items()
        }

    def _contention(self) -> tuple[str, Step | None, str]:
        """Return what ranks take from each other without any exchange, beside clocks: host memory, the CPU."""
        together = self.without.get(self.runs.gpus)
        if together is None or together.log_rate is None:
            return CONTENTION, None, "strategy=none did not run on this subset"
        slowed = (
            self.clocks.at_clock_of(together, self.slowest_step, self.slowest)
            if self.runs.clock_mhz
            else None
        )
        return (
            CONTENTION,
            _subset_step(together.log_rate, self.images) - (slowed or self.slowest_step),
            "",
        )

    def _communication(self) -> Parts:
        """Return the exposed communication in parts, and the waiting."""
        own = self._cost_alone() or self._overhead
        at_clock = own and (self.clocks.at_clock_of(self.runs, own, self.slowest) or own)
        parts = self._exposed_and_waiting(at_clock)
        if len(self.runs.cell.hosts) > 1:
            return by_hosts(self.runs, parts, self.hosts, own)
        return in_parts(parts, self.runs, self.alone)

    def _cost_alone(self) -> Step | None:
        """Return the cost of the strategy on one GPU, by steps with and without exchange in turn, the mean over the members."""
        alone = [self.alone[gpu] for gpu in self.runs.gpus if gpu in self.alone]
        return mean_step([step for one in alone if (step := step_of(one, COST)) is not None])

    def _exposed_and_waiting(self, own: Step | None) -> Parts:
        """Return the exposed communication without what the strategy costs on one GPU, and the waiting, which a trace shows."""
        whole = step_of(self.runs, COST)
        if whole is None:
            asked = self.runs.cell.benchmark.get("exposed_rounds", 1)
            untimed = (
                "the strategy has no exchange alone" if asked else "benchmark.exposed_rounds=0"
            )
            why = f"steps without the exchange were not timed ({untimed})"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        if self.with_strategy and own is None:  # the ideal has it already
            why = "what the strategy costs on one GPU was not measured"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        why = "" if own else "this includes what the strategy costs on one GPU"
        exposed = whole - own if own else whole
        waiting, untold = self._waiting()
        if waiting is None:
            return [(COMMUNICATION, exposed, why), (WAITING, None, untold)]
        if waiting.ms <= 0 or exposed.ms <= 0:
            untold = "ranks wait for slower GPUs only, or the wait costs no step time"
            return [(COMMUNICATION, exposed, why), (WAITING, None, untold)]
        if waiting.ms > exposed.ms:  # part of it was hidden behind compute
            return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
        return [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]

    def _waiting(self) -> tuple[Step | None, str]:
        """Return how long the mean rank waits for a peer of equal speed, or why that is not known.

        A trace shows how long it waits; the part in which it waits for a slower GPU is the spread, which the ideal is without.
        """
        waiting = step_of(self.runs, WAIT)
        if waiting is None:
            return None, "part of the exposed communication: no trace tells them apart"
        if len(self.rates) < self.runs.world_size:
            return None, "how long ranks wait for slower GPUs is not known"
        for_slower = mean_step(
            [self.slowest_step - self._step_alone(rate) for rate in self.rates.values()]
        )
        assert for_slower is not None  # there is a member
        return waiting - for_slower, ""

    def _step_alone(self, rate: Sample) -> Step:
        """Return the step of one rank that belongs to the logarithm of a rate."""
        return _subset_step(rate, self.runs.batch_size)


def _with_rate(runs: Mapping[Member, Runs]) -> dict[Member, Runs]:
    return {gpu: one for gpu, one in runs.items() if one.log_rate is not None}


def _subset_step(rate: Sample, images: int) -> Step:
    """Return the time of a step of so many images that belongs to the logarithm of a rate."""
    ms = images * 1e3  # at one image per second
    return Step(ms / math.exp(rate.value), None if rate.draws is None else ms / np.exp(rate.draws))


def _as_share(difference: Sample | None, ms: float) -> Sample | None:
    """Return a difference of step times as a share of a step."""
    if difference is None or difference.floor is None:
        return None
    floor = dataclasses.replace(difference.floor, deviation=difference.floor.deviation / ms)
    return dataclasses.replace(difference, value=difference.value / ms, floor=floor)


SPREAD = "spread between GPUs"


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone with strategy=none, and a sentence on the others."""
    controls, clocks = ControlRuns(study), Clocks(study)
    found, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        if subset := ExplainedSubset.of(runs, controls, clocks):
            found.append(_waterfall(labels.label(study, runs), subset))
        else:
            without.append(f"{labels.label(study, runs)} on {gpu_list(runs.gpus)}")
    found.sort(key=lambda one: -len(one.hosts))  # most hosts first, otherwise as they ran
    sentence = (
        f"where the loss of {several(without)} comes from: run with waterfall=true"
        if without
        else ""
    )
    return tuple(found), (sentence,) if sentence else ()


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, spent = subset.runs, subset.slowest_step
    parts = [_spread(subset)]
    for name, step, why in subset.parts():
        part = WaterfallPart(name, _lost(subset, spent, step), why, ms=_next_run(subset, step))
        parts.append(_with_clocks(part, subset) if name == NAME and step else part)
        spent = spent + step if step else spent
    residual = _between(subset, spent, subset.step)
    return Waterfall(
        label=label,
        gpus=runs.gpus,
        key=runs.key,
        ideal=_ideal(subset),
        measured=exponential(subset.log_rate.next_run()),
        parts=tuple(parts),
        residual=residual.value,
        residual_low=residual.low,
        residual_high=residual.high,
        hosts=runs.cell.hosts if len(runs.cell.hosts) > 1 else (),
        with_strategy=subset.with_strategy,
    )


def _ideal(subset: ExplainedSubset) -> Estimate:
    """Return the images per second of N times the slowest member alone."""
    rates = subset.rates.values()
    return scaled(exponential(next_run(*slowest(rates), freedom(rates))), subset.runs.world_size)


def _spread(subset: ExplainedSubset) -> WaterfallPart:
    """Return what synchronous ranks lose because they wait for the slowest GPU; the ideal is without it."""
    missing = [gpu for gpu in subset.runs.gpus if gpu not in subset.rates]
    if missing:
        how = "" if subset.with_strategy else " with strategy=none"
        why = f"{gpu_list(missing)} did not run alone{how}: one of them may be the slowest"
        return WaterfallPart(SPREAD, None, why, above_ideal=True)
    rates = [math.exp(rate.value) for rate in subset.rates.values()]
    known = [rate.draws for rate in subset.rates.values() if rate.draws is not None]
    draws = None
    if len(known) == len(rates):
        drawn = np.exp(known)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    lost = next_run(sum(rates) - len(rates) * min(rates), draws, subset.freedom)
    return WaterfallPart(SPREAD, lost, above_ideal=True)


def _with_clocks(part: WaterfallPart, subset: ExplainedSubset) -> WaterfallPart:
    """Return the part of the clocks with what it rests on."""
    members = subset.clocks.members(subset.runs, subset.members)
    follows, rate = subset.clocks.exponent(subset.runs), math.exp(subset.log_rate.value)
    return clock_part(part, members, follows, rate, subset.step.ms)


def _next_run(subset: ExplainedSubset, step: Step | None) -> Estimate | None:
    return None if step is None else next_run(step.ms, step.draws, subset.freedom)


def _lost(subset: ExplainedSubset, spent: Step, part: Step | None) -> Estimate | None:
    """Return the images per second that one part takes; with an interval where the scatter of the part alone is known too."""
    if part is None:
        return None
    if spent.draws is None and part.draws is not None:
        spent = Step(spent.ms, np.full_like(part.draws, spent.ms))
    return _between(subset, spent, spent + part)


def _between(subset: ExplainedSubset, before: Step, after: Step) -> Estimate:
    """Return the images per second between two step times."""
    images = subset.images * 1e3  # of a step, times the ms of a second
    draws = None
    if (
        before.draws is not None and after.draws is not None
    ):  # a step takes some time, however little is known of it
        longer, shorter = (
            np.maximum(after.draws, after.ms / WIDEST),
            np.maximum(before.draws, before.ms / WIDEST),
        )
        draws = images / shorter - images / longer
    return next_run(images / before.ms - images / after.ms, draws, subset.freedom)
