"""Which of two is faster: repeats against repeats, the noise floor of the machine, and the smallest difference to be seen.

Two cells are compared where they differ in exactly one asked thing on the same GPUs. The test is Welch's on the logarithms
of images per second of whole runs; all tests of a study are one family, held at 5 % by Holm's method (1979).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import t as student

from analysis.estimates import LEVEL, Draws, quantile
from analysis.findings import Comparison, Estimate, Noise
from analysis.runs import RATE, Gathered, Runs, chosen, gather, gpu_list, shown
from benchmarks.record import Record

POWER = 0.8  # a difference as large as `smallest` is seen in four studies of five
# With more values of one thing than this every one is compared with the first alone: pairs grow with the square.
MOST_VALUES = 8
# Asked things that are no choice between equals: another amount of work, or another way to measure.
NOT_COMPARED = (
    "model.",
    "benchmark.",
    "optimizer.",
    "profiler",
    "device",
    "strategy.",
    "nccl.",
    "server_gpus",
    "batch",
)
SINGLE = "a single run says nothing of the next: repeats=5 tells"

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
    half[tested] = student.ppf((1 + LEVEL) / 2, freedom[tested]) * error[tested]
    smallest = np.full(len(found), math.nan)
    level = (1 - LEVEL) / max(1, int(tested.sum()))
    sure = student.ppf(1 - level / 2, freedom[tested]) + student.ppf(POWER, freedom[tested])
    smallest[tested] = np.expm1(np.minimum(sure * error[tested], 50.0))
    rows = zip(found, difference, half, smallest, tested, seen, strict=True)
    return tuple(_comparison(study, *row) for row in rows)


def _comparison(
    study: Gathered, pair: Pair, difference: float, half: float, smallest: float, tested: bool, seen: bool
) -> Comparison:
    asked, first, second = pair
    names = [f"{gpu_list(runs.gpus)} · {study.label(runs)}{_absent(asked, runs)}" for runs in (first, second)]
    runs = (_runs(first), _runs(second))
    share = math.expm1(difference)
    if not tested:
        return Comparison(*names, Estimate(share), None, "", SINGLE, asked, first.gpus, runs)
    low, high = math.expm1(difference - half), math.expm1(difference + half)
    verdict = ("faster" if difference > 0 else "slower") if seen else "no difference seen"
    alone = not seen and half > 0 and abs(difference) > half
    why = "its interval alone excludes 0, which among so many comparisons chance does as well" if alone else ""
    return Comparison(*names, Estimate(share, low, high), float(smallest), verdict, why, asked, first.gpus, runs)


def _absent(asked: str, runs: Runs) -> str:
    """A setting that was left alone is named all the same, where it is what differs."""
    return (
        f" · {asked.removeprefix('NCCL_')} untouched"
        if asked.startswith("NCCL_") and f"nccl.{asked}" not in runs.asked
        else ""
    )


def _runs(runs: Runs) -> int:
    return runs.rate.runs if runs.rate else 0


def _logarithms(runs: Runs) -> list[float]:
    return [math.log(value) for value in runs.values(RATE) if value > 0]


def _welch(first: Runs, second: Runs) -> tuple[float, float, float]:
    """Difference of the mean logarithms, its standard error and degrees of freedom; NaN below two runs each."""
    one, two = _logarithms(first), _logarithms(second)
    difference = sum(two) / len(two) - sum(one) / len(one)
    if min(len(one), len(two)) < 2:
        return difference, math.nan, math.nan
    shares = [_variance(values) / len(values) for values in (one, two)]
    whole = sum(shares)
    below = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (one, two), strict=True))
    return difference, math.sqrt(whole), whole**2 / below if below else len(one) + len(two) - 2.0


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


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
    batch = ("batch_size", "global_batch_size")

    def kind(runs: Runs) -> Hashable:
        return "global_batch_size" in runs.asked

    if "strategy.name" in study.varied:
        # Two strategies with the same options asked beside their defaults.
        yield from _pairs(study, "strategy", "strategy.name", (*every, "server_gpus"), chosen)
    for name in options:
        yield from _pairs(study, shown(name, "").rstrip("="), name, (name,), lambda runs: runs.strategy)
    for name in settings:
        yield from _pairs(study, name.removeprefix("nccl."), name, (name,))
    for name in names:
        yield from _pairs(study, name, name, (name,))
    if set(batch) & set(study.varied):
        # The images per step follow from the batch and the GPUs, or the other way round: one thing.
        name = batch[1] if batch[1] in study.varied else batch[0]
        yield from _pairs(study, "batch_size", name, batch, kind)


def _pairs(
    study: Gathered, asked: str, name: str, without: Sequence[str], also: Callable[[Runs], Hashable] = lambda runs: None
) -> Iterator[Pair]:
    """Pairs that are equal in everything but `without` and differ in `name`."""
    alike: dict[Hashable, dict[str | None, Runs]] = defaultdict(dict)
    for runs in study.timed:
        key = (runs.gpus, also(runs), *study.condition(runs, without))
        alike[key].setdefault(runs.asked.get(name), runs)
    for values in alike.values():
        ordered = sorted(values.values(), key=lambda runs: (name in runs.asked, runs.records[0].started_at))
        among = combinations(ordered, 2) if len(ordered) <= MOST_VALUES else ((ordered[0], one) for one in ordered[1:])
        yield from ((asked, first, second) for first, second in among)


def noise(study: Gathered) -> Noise:
    """How far runs of equal cells differ: their standard deviation over all cells of the study, and the drift."""
    squares, freedom, pairs_of_runs = 0.0, 0, 0
    for runs in study.timed:
        values = _logarithms(runs)
        if len(values) > 1:
            squares += _variance(values) * (len(values) - 1)
            freedom += len(values) - 1
            pairs_of_runs += math.comb(len(values), 2)
    drift = [
        record.metrics[RATE] / first - 1
        for record, runs in study.drift
        if record.metrics.get(RATE, 0) > 0 and (first := runs.records[0].metrics.get(RATE))
    ]
    change = drift[0] if drift else None
    if not freedom:
        return Noise(None, 0, change)
    deviation = math.sqrt(squares / freedom)
    floor = math.expm1(quantile(freedom) * math.sqrt(2) * deviation)
    return Noise(floor, pairs_of_runs, change, deviation, freedom)
