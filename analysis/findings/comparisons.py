"""Which of two cells is faster: their runs against each other, the noise floor, and the smallest difference to be seen.

Two cells are compared if they belong to the same benchmark, do the same amount of work and differ in exactly one asked
thing on the same GPUs. The test is Welch's, on the logarithms of the benchmark's primary rate in whole runs. All tests of a
study are one family, held at 5 % by Holm's method (1979).
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_ind

from analysis.findings import labels
from analysis.findings.estimates import LEVEL, WIDEST, Draws, quantile
from analysis.findings.model import Comparison, Estimate, Noise
from analysis.findings.rates import Rate
from analysis.findings.runs import Runs, between_runs
from analysis.findings.strategy_options import chosen_options
from analysis.findings.study import Study

POWER = 0.8  # a difference as large as `smallest` is seen in four studies of five
# With more values of one thing than this, every one is compared with the first alone: pairs grow with the square.
MOST_VALUES = 8
BATCH = ("batch_size", "global_batch_size")  # one follows from the other and the GPUs: one thing
# Asked things that are no choice between equals, or that are compared in their own way.
NOT_COMPARED = ("model.", "optimizer.", "profiler", "device", "strategy.", "nccl.", "server_gpus", *BATCH)
SINGLE = "a single run does not show how far runs differ: add repeats=5"
CHANCE = "its own interval excludes 0, but among this many comparisons that can be chance"
SEPARATE = "all runs of one cell were measured before those of the other: a change of the machine would look the same"

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Pair:
    """Two cells to compare."""

    asked: str  # what differs, for people
    differing: tuple[str, ...]  # names in the keys that differ
    first: Runs
    second: Runs


@dataclass(frozen=True)
class Welch:
    """Welch's test of several pairs, an entry each. All but `difference` are NaN for a pair with a single run."""

    difference: Draws  # of the mean logarithms, second − first
    error: Draws  # its standard error
    freedom: Draws  # degrees of freedom
    chance: Draws  # two-sided p


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a verdict for every pair of cells that may be compared."""
    found = list(pairs(study))
    tests = _welch([(pair.first.log_rates, pair.second.log_rates) for pair in found])
    tested = np.isfinite(tests.error)
    seen = _holm(tests.chance, tested)
    error, freedom = tests.error[tested], tests.freedom[tested]
    half, smallest = np.full((2, len(found)), math.nan)
    half[tested] = np.minimum(student.ppf((1 + LEVEL) / 2, freedom) * error, WIDEST)
    level = (1 - LEVEL) / max(1, int(tested.sum()))
    errors = student.ppf(1 - level / 2, freedom) + student.ppf(POWER, freedom)
    smallest[tested] = np.expm1(np.minimum(errors * error, WIDEST))
    rows = zip(found, tests.difference, half, smallest, tested, seen, strict=True)
    return tuple(_comparison(study, *row) for row in rows)


def _comparison(
    study: Study, pair: Pair, difference: float, half: float, smallest: float, tested: bool, seen: bool
) -> Comparison:
    difference = min(max(difference, -WIDEST), WIDEST)
    estimate, least, verdict, why = Estimate(math.expm1(difference)), None, "", SINGLE
    if tested:
        estimate = Estimate(estimate.value, math.expm1(difference - half), math.expm1(difference + half))
        least = float(smallest)
        verdict = ("faster" if difference > 0 else "slower") if seen else "no difference seen"
        by_chance, separate = not seen and 0 < half < abs(difference), seen and _separate(pair)
        why = CHANCE if by_chance else SEPARATE if separate else ""
    first, second = (labels.side_label(study, runs, pair.differing, pair.asked) for runs in (pair.first, pair.second))
    return Comparison(
        first,
        second,
        estimate,
        least,
        verdict,
        why,
        pair.asked,
        pair.first.gpus,
        (len(pair.first.log_rates), len(pair.second.log_rates)),
        pair.first.rate.name,
        pair.differing,
        pair.first.key,
        pair.second.key,
    )


def _separate(pair: Pair) -> bool:
    """Tell whether the runs of two cells were not interleaved."""
    one, two = ([record.started_at for record in runs.records] for runs in (pair.first, pair.second))
    return max(one) < min(two) or max(two) < min(one)


def _welch(samples: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Welch:
    """Test every pair of samples; those with equal numbers of runs in one call."""
    difference, error, freedom, chance = np.full((4, len(samples)), math.nan)
    by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, (first, second) in enumerate(samples):
        by_size[len(first), len(second)].append(at)
    for sizes, members in by_size.items():
        one, two = (np.array([samples[at][side] for at in members]) for side in (0, 1))
        difference[members] = two.mean(axis=1) - one.mean(axis=1)
        if min(sizes) < 2:
            continue
        with warnings.catch_warnings():  # of runs that are equal to the last digit
            warnings.simplefilter("ignore", RuntimeWarning)
            test = ttest_ind(two, one, axis=1, equal_var=False)
            interval = test.confidence_interval(LEVEL)
        constant = (np.ptp(one, axis=1) == 0) & (np.ptp(two, axis=1) == 0)
        freedom[members] = np.where(constant, sum(sizes) - 2, test.df)
        half = (interval.high - interval.low) / 2
        error[members] = np.where(constant, 0.0, half / student.ppf((1 + LEVEL) / 2, freedom[members]))
        certain = np.where(difference[members] == 0, 1.0, 0.0)  # without any scatter
        chance[members] = np.where(constant, certain, test.pvalue)
    return Welch(difference, error, freedom, chance)


def _holm(chance: Draws, tested: Flags) -> Flags:
    """Return which tests are significant: the smallest p below 5 % ÷ m, the next below 5 % ÷ (m − 1), until one is not."""
    seen = np.zeros(len(chance), dtype=bool)
    order = [at for at in np.argsort(chance, kind="stable") if tested[at]]
    for rank, at in enumerate(order):
        if chance[at] > (1 - LEVEL) / (len(order) - rank):
            break
        seen[at] = True
    return seen


def pairs(study: Study) -> Iterator[Pair]:
    """Yield all cells that differ in one asked thing; the one that started first is the first."""
    names = [name for name in study.varied if not name.startswith(NOT_COMPARED)]
    settings = [name for name in study.varied if name.startswith("nccl.")]
    every = [name for name in study.varied if name.startswith("strategy.")]
    if "strategy.name" in study.varied:
        # Two strategies with the same options beside their defaults.
        left_out = ("strategy.name", *(name for name in every if name != "strategy.name"), "server_gpus")
        yield from _pairs(study, "strategy", left_out, lambda runs: chosen_options(runs.cell))
    for name in every:
        if name != "strategy.name":
            yield from _pairs(study, name.removeprefix("strategy."), (name,), lambda runs: runs.strategy)
    for first, *others in _presets(study, settings):
        asked = first.removeprefix("nccl.") + (f" and {len(others)} more" if others else "")
        yield from _pairs(study, asked, (first, *others))
    for name in names:
        yield from _pairs(study, name.removeprefix("benchmark."), (name,))
    if batch := [name for name in BATCH if name in study.varied]:
        others = [name for name in BATCH if name != batch[0]]
        yield from _pairs(study, "batch_size", (batch[0], *others), lambda runs: runs.strong)


def _presets(study: Study, settings: Sequence[str]) -> list[list[str]]:
    """Group settings that cells have all together or not at all (nccl=sharp): they are one thing. Others are alone."""
    found: dict[Hashable, list[str]] = defaultdict(list)
    for name in settings:
        values = [runs.request.get(name) for runs in study.rated]
        one_value = len({value for value in values if value is not None}) == 1
        found[tuple(value is None for value in values) if one_value else name].append(name)
    return [*found.values()]


def _pairs(
    study: Study, asked: str, left_out: Sequence[str], also: Callable[[Runs], Hashable] = lambda runs: None
) -> Iterator[Pair]:
    """Yield pairs of one benchmark that differ in the first of the names left out and are equal in all that is not left out."""
    name = left_out[0]
    alike: dict[Hashable, dict[str | None, Runs]] = defaultdict(dict)
    for runs in study.rated:
        if not runs.rate.is_same_work(name):
            continue
        key = (runs.gpus, also(runs), *study.condition(runs, left_out))
        alike[key].setdefault(runs.request.get(name), runs)
    for values in alike.values():
        ordered = sorted(values.values(), key=lambda runs: (name in runs.request, runs.records[0].started_at))
        among = combinations(ordered, 2) if len(ordered) <= MOST_VALUES else ((ordered[0], one) for one in ordered[1:])
        yield from (Pair(asked, tuple(left_out), first, second) for first, second in among)


def noises(study: Study) -> tuple[Noise, ...]:
    """Return the noise of every rate that the study has."""
    return tuple(_noise(study, rate) for rate in study.rates)


def _noise(study: Study, rate: Rate) -> Noise:
    """Return how far runs of equal cells differ in one rate: their standard deviation over all cells, and the drift."""
    members = [runs for runs in study.rated if runs.rate == rate]
    deviation, freedom = between_runs(members, rate.metric)
    drift = [
        rate.change(first, last)
        for record, runs in study.drift
        if runs.rate == rate
        and (first := runs.records[0].metrics.get(rate.metric, 0)) > 0
        and (last := record.metrics.get(rate.metric, 0)) > 0
    ]
    change = drift[0] if drift else None
    if not freedom:
        return Noise(None, 0, change, rate=rate.name)
    floor = math.expm1(quantile(freedom) * math.sqrt(2) * deviation)
    pairs_of_runs = sum(math.comb(len(runs.log_rates), 2) for runs in members)
    return Noise(floor, pairs_of_runs, change, deviation, freedom, rate.name)
