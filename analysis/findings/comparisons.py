"""Which of two is faster: repeats against repeats, the noise floor of the machine, and the smallest difference to be seen.

Two cells are compared where they belong to the same benchmark, do the same amount of work and differ in exactly one asked
thing on the same GPUs. The test is Welch's on the logarithms of the benchmark's rate (analysis.findings.rates) in whole runs; all
tests of a study are one family, held at 5 % by Holm's method (1979).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import t as student

from analysis.findings.estimates import LEVEL, WIDEST, Draws, quantile
from analysis.findings.model import Comparison, Estimate, Noise
from analysis.findings.rates import HEADLINES, Headline
from analysis.findings.runs import Gathered, Runs, between_runs, chosen, gather, gpu_list
from benchmarks.record import Record

POWER = 0.8  # a difference as large as `smallest` is seen in four studies of five
# With more values of one thing than this every one is compared with the first alone: pairs grow with the square.
MOST_VALUES = 8
BATCH = ("batch_size", "global_batch_size")  # one follows from the other and the GPUs: one thing
# Asked things that are no choice between equals, or that are compared in their own way.
NOT_COMPARED = ("model.", "optimizer.", "profiler", "device", "strategy.", "nccl.", "server_gpus", *BATCH)
SINGLE = "a single run says nothing of the next: repeats=5 tells"
CHANCE = "its own interval excludes 0, which among so many comparisons chance does as well"

SEPARATE = "all runs of one were measured before the other's: had the machine changed meanwhile, it would look the same"

Pair = tuple[str, Runs, Runs]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def comparisons(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """A verdict for every pair of a study's records."""
    return compared(gather(records))


def compared(study: Gathered) -> tuple[Comparison, ...]:
    """What `comparisons` returns, of runs that were gathered before."""
    found = list(pairs(study))
    tests = np.array([_welch(first, second) for _, first, second in found]).reshape(-1, 3)
    difference, error, freedom = tests.T
    tested = np.isfinite(error)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(difference == 0, 0.0, np.abs(difference) / error)
    chance = np.ones(len(found))
    chance[tested] = 2 * student.sf(ratio[tested], freedom[tested])
    seen = _holm(chance, tested)
    half = np.full(len(found), math.nan)
    half[tested] = np.minimum(student.ppf((1 + LEVEL) / 2, freedom[tested]) * error[tested], WIDEST)
    smallest = np.full(len(found), math.nan)
    level = (1 - LEVEL) / max(1, int(tested.sum()))
    sure = student.ppf(1 - level / 2, freedom[tested]) + student.ppf(POWER, freedom[tested])
    smallest[tested] = np.expm1(np.minimum(sure * error[tested], WIDEST))
    rows = zip(found, difference, half, smallest, tested, seen, strict=True)
    return tuple(_comparison(study, *row) for row in rows)


def _comparison(
    study: Gathered, pair: Pair, difference: float, half: float, smallest: float, tested: bool, seen: bool
) -> Comparison:
    asked, first, second = pair
    one, two = (f"{gpu_list(runs.gpus)} · {study.label(runs)}{_absent(asked, runs)}" for runs in (first, second))
    difference = min(max(difference, -WIDEST), WIDEST)
    runs, share = (len(first.rates), len(second.rates)), math.expm1(difference)
    rate = first.headline.rate
    if not tested:
        return Comparison(one, two, Estimate(share), None, "", SINGLE, asked, first.gpus, runs, rate)
    low, high = math.expm1(difference - half), math.expm1(difference + half)
    verdict = ("faster" if difference > 0 else "slower") if seen else "no difference seen"
    why = CHANCE if not seen and 0 < half < abs(difference) else SEPARATE if seen and _separate(first, second) else ""
    return Comparison(
        one, two, Estimate(share, low, high), float(smallest), verdict, why, asked, first.gpus, runs, rate
    )


def _separate(first: Runs, second: Runs) -> bool:
    """Whether the runs of two cells were not interleaved."""
    one, two = ([record.started_at for record in runs.records] for runs in (first, second))
    return max(one) < min(two) or max(two) < min(one)


def _absent(asked: str, runs: Runs) -> str:
    """A setting that was left alone is named all the same, where it is what differs."""
    untouched = asked.startswith("NCCL_") and f"nccl.{asked.split()[0]}" not in runs.asked
    return f" · {asked.removeprefix('NCCL_')} untouched" if untouched else ""


def _welch(first: Runs, second: Runs) -> tuple[float, float, float]:
    """Difference of the mean logarithms, its standard error and degrees of freedom; NaN below two runs each."""
    one, two = first.rates, second.rates
    difference = sum(two) / len(two) - sum(one) / len(one)
    if min(len(one), len(two)) < 2:
        return difference, math.nan, math.nan
    shares = [statistics.variance(values) / len(values) for values in (one, two)]
    whole = sum(shares)
    below = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (one, two), strict=True))
    return difference, math.sqrt(whole), whole**2 / below if below else len(one) + len(two) - 2.0


def _holm(chance: Draws, tested: Flags) -> Flags:
    """Which of the tested are significant: the smallest p below 5 % ÷ m, the next below 5 % ÷ (m − 1), … until one is not."""
    seen = np.zeros(len(chance), dtype=bool)
    order = [at for at in np.argsort(chance, kind="stable") if tested[at]]
    for rank, at in enumerate(order):
        if chance[at] > (1 - LEVEL) / (len(order) - rank):
            break
        seen[at] = True
    return seen


def pairs(study: Gathered) -> Iterator[Pair]:
    """(what differs, first, second) for all runs that differ in one asked thing; the one that started first is the first."""
    names = [name for name in study.varied if not name.startswith(NOT_COMPARED)]
    settings = [name for name in study.varied if name.startswith("nccl.")]
    options = [name for name in study.varied if name.startswith("strategy.") and name != "strategy.name"]
    every = [name for name in study.varied if name.startswith("strategy.")]
    if "strategy.name" in study.varied:
        # Two strategies with the same options asked beside their defaults.
        yield from _pairs(study, "strategy", "strategy.name", (*every, "server_gpus"), chosen)
    for name in options:
        yield from _pairs(study, name.removeprefix("strategy."), name, (name,), lambda runs: runs.strategy)
    for first, *others in _presets(study, settings):
        asked = first.removeprefix("nccl.") + (f" and {len(others)} more" if others else "")
        yield from _pairs(study, asked, first, (first, *others))
    for name in names:
        yield from _pairs(study, name.removeprefix("benchmark."), name, (name,))
    if batch := [name for name in BATCH if name in study.varied]:
        yield from _pairs(study, "batch_size", batch[0], BATCH, lambda runs: runs.strong)


def _presets(study: Gathered, settings: Sequence[str]) -> list[list[str]]:
    """Settings that the study's cells have all together or not at all are one thing, as nccl=sharp asks; others are alone."""
    found: dict[Hashable, list[str]] = defaultdict(list)
    for name in settings:
        values = [runs.asked.get(name) for runs in study.rated]
        one_value = len({value for value in values if value is not None}) == 1
        found[tuple(value is None for value in values) if one_value else name].append(name)
    return [*found.values()]


def _pairs(
    study: Gathered, asked: str, name: str, without: Sequence[str], also: Callable[[Runs], Hashable] = lambda runs: None
) -> Iterator[Pair]:
    """Pairs of one benchmark that are equal in everything but `without` and differ in `name`."""
    alike: dict[Hashable, dict[str | None, Runs]] = defaultdict(dict)
    for runs in study.rated:
        if not runs.headline.may_differ(name):
            continue
        key = (runs.gpus, also(runs), *study.condition(runs, without))
        alike[key].setdefault(runs.asked.get(name), runs)
    for values in alike.values():
        ordered = sorted(values.values(), key=lambda runs: (name in runs.asked, runs.records[0].started_at))
        among = combinations(ordered, 2) if len(ordered) <= MOST_VALUES else ((ordered[0], one) for one in ordered[1:])
        yield from ((asked, first, second) for first, second in among)


def noises(study: Gathered) -> tuple[Noise, ...]:
    """The noise of every rate that the study has."""
    present = {runs.headline for runs in study.rated}
    return tuple(_noise(study, headline) for headline in HEADLINES.values() if headline in present)


def _noise(study: Gathered, headline: Headline) -> Noise:
    """How far runs of equal cells differ: their standard deviation over all cells with this rate, and the drift."""
    members = [runs for runs in study.rated if runs.headline == headline]
    deviation, freedom = between_runs(members, headline.metric)
    drift = [
        headline.change(first, last)
        for record, runs in study.drift
        if runs.headline == headline
        and (first := runs.records[0].metrics.get(headline.metric, 0)) > 0
        and (last := record.metrics.get(headline.metric, 0)) > 0
    ]
    change = drift[0] if drift else None
    if not freedom:
        return Noise(None, 0, change, rate=headline.rate)
    floor = math.expm1(quantile(freedom) * math.sqrt(2) * deviation)
    pairs_of_runs = sum(math.comb(len(runs.rates), 2) for runs in members)
    return Noise(floor, pairs_of_runs, change, deviation, freedom, headline.rate)
