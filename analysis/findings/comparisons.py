"""Which of two cells is faster: their runs against each other, the noise floor, and the smallest difference to be seen.

Two cells are compared if they belong to the same benchmark, do the same amount of work and differ in exactly one asked
thing on the same GPUs. The test is on the logarithms of the benchmark's primary rate in whole runs, with the turns as blocks
(analysis.statistics.tests); where no turns connect two cells it is Welch's, unpaired. All tests of a study are one family,
held at 5 % by Holm's method (1979).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from scipy.special import stdtr, stdtrit

from analysis.findings.links import transport_of
from analysis.statistics.tests import NO_TURN, Flags, TurnModel, fitted, significant
from analysis.study import names as labels
from analysis.study.draws import Draws, quantile
from analysis.study.estimates import Comparison, Estimate, Noise, SettingEffect
from analysis.study.intervals import LEVEL, WIDEST
from analysis.study.noise_floor import FEWEST
from analysis.study.rates import Rate
from analysis.study.study import Runs, Study, between_runs, chosen_options, middle
from benchmarks.record import Record

POWER = 0.8  # a difference as large as `smallest` is seen in four studies of five
# With more values of one thing than this, every one is compared with the first alone: pairs grow with the square.
MOST_VALUES = 8
BATCH = ("batch_size", "global_batch_size")  # one follows from the other and the GPUs: one thing
# Asked things that are no choice between equals, or that are compared in their own way.
NOT_COMPARED = (
    "model.",
    "optimizer.",
    "profiler",
    "device",
    "strategy.",
    "nccl.",
    "server_gpus",
    "data",
    *BATCH,
)
SINGLE = "a single run gives no verdict (repeats=5 does)"
CHANCE = "its interval excludes 0, but among so many comparisons that can be chance"
NO_SCATTER = 1e-9  # of a logarithm: what rounding leaves of none
UNPAIRED = "no sweep measured both cells in turn: a drift of the machine would look the same"
SEPARATE = "one cell was measured before the other: a change of the machine would look the same"


@dataclass(frozen=True)
class Pair:
    """Two cells to compare."""

    asked: str  # what differs, for people
    differing: tuple[str, ...]  # names in the keys that differ
    first: Runs
    second: Runs
    group: Hashable  # equal for pairs of cells that are compared each with each


@dataclass(frozen=True)
class Tests:
    """The tests of several pairs, an entry each. All but `difference` are NaN for a pair that cannot be tested."""

    difference: Draws  # of the logarithms, second − first
    error: Draws  # its standard error
    freedom: Draws  # degrees of freedom
    in_turns: Flags  # whether the turns are blocks; otherwise the test is unpaired


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a verdict for every pair of cells that may be compared."""
    found = list(pairs(study))
    tests = _tests(study, found)
    tested = np.isfinite(tests.error)
    seen = np.zeros(len(found), dtype=bool)
    seen[tested] = significant(chances(tests)[tested], _groups(found, tested), 1 - LEVEL)
    error, freedom = tests.error[tested], tests.freedom[tested]
    half, smallest = np.full((2, len(found)), math.nan)
    half[tested] = np.minimum(stdtrit(freedom, (1 + LEVEL) / 2) * error, WIDEST)
    level = (1 - LEVEL) / max(1, int(tested.sum()))
    errors = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
    smallest[tested] = np.expm1(np.minimum(errors * error, WIDEST))
    rows = zip(found, tests.difference, half, smallest, tested, seen, tests.in_turns, strict=True)
    return tuple(_comparison(study, *row) for row in rows)


def _comparison(
    study: Study,
    pair: Pair,
    difference: float,
    half: float,
    smallest: float,
    tested: bool,
    seen: bool,
    in_turns: bool,
) -> Comparison:
    difference = min(max(difference, -WIDEST), WIDEST)
    estimate, least, verdict, why = Estimate(math.expm1(difference)), None, "", SINGLE
    if tested:
        estimate = Estimate(
            estimate.value, math.expm1(difference - half), math.expm1(difference + half)
        )
        least = float(smallest)
        verdict = ("faster" if difference > 0 else "slower") if seen else "no difference seen"
        unpaired = "" if in_turns else SEPARATE if seen and _separate(pair) else UNPAIRED
        by_chance = CHANCE if not seen and 0 < half < abs(difference) else ""
        why = "; ".join(one for one in (by_chance, unpaired) if one)
    first, second = (
        labels.side_label(study, runs, pair.differing, pair.asked)
        for runs in (pair.first, pair.second)
    )
    return Comparison(
        first=first,
        second=second,
        difference=estimate,
        smallest=least,
        verdict=verdict,
        why=why,
        asked=pair.asked,
        gpus=pair.first.gpus,
        runs=(len(pair.first.log_rates), len(pair.second.log_rates)),
        rate=pair.first.rate.name,
        differing=pair.differing,
        first_key=pair.first.key,
        second_key=pair.second.key,
    )


def _separate(pair: Pair) -> bool:
    """Tell whether the runs of two cells were not interleaved."""
    one, two = (
        [record.started_at for record in runs.records] for runs in (pair.first, pair.second)
    )
    return max(one) < min(two) or max(two) < min(one)


def _tests(study: Study, found: Sequence[Pair]) -> Tests:
    """Test every pair: with the turns as blocks where they connect its two cells, else unpaired."""
    difference, error, freedom = np.full((3, len(found)), math.nan)
    models = turn_models(study)
    by_family: dict[Hashable, list[int]] = defaultdict(list)
    for at, pair in enumerate(found):
        by_family[family(pair.first)].append(at)
    for name, members in by_family.items():
        numbers, model = models[name]
        sides = (
            np.array([numbers[id(side(found[at]))] for at in members]) for side in (_first, _second)
        )
        made = model.contrasts(*sides)
        difference[members], error[members], freedom[members] = (
            made.difference,
            made.error,
            made.freedom,
        )
    runs = np.array(
        [min(len(pair.first.log_rates), len(pair.second.log_rates)) for pair in found], dtype=int
    )
    in_turns = np.isfinite(error) & (runs > 1)
    error[~in_turns] = math.nan
    for at in map(int, np.flatnonzero(~in_turns)):
        one, two = (np.array(side(found[at]).log_rates) for side in (_first, _second))
        difference[at] = two.mean() - one.mean()
        if runs[at] > 1:
            error[at], freedom[at] = _welch(one, two)
    return Tests(difference, error, freedom, in_turns)


def _groups(found: Sequence[Pair], tested: Flags) -> list[int]:
    """Return the numbers of tested cells that are compared each with each."""
    cells: dict[Hashable, set[int]] = defaultdict(set)
    for pair, is_tested in zip(found, tested, strict=True):
        if is_tested:
            cells[pair.group] |= {id(pair.first), id(pair.second)}
    return [len(one) for one in cells.values()]


def _first(pair: Pair) -> Runs:
    return pair.first


def _second(pair: Pair) -> Runs:
    return pair.second


def family(runs: Runs) -> Hashable:
    """Return a key that is equal for cells whose scatter is pooled: of one rate, one model and one machine."""
    return runs.rate, runs.request.get("model.name"), runs.provenance["machine"]


def turn_models(study: Study) -> dict[Hashable, tuple[dict[int, int], TurnModel]]:
    """Return the fit of every family, and the numbers of its cells, by the id() of their runs."""
    families: dict[Hashable, list[Runs]] = defaultdict(list)
    for runs in study.rated:
        families[family(runs)].append(runs)
    turns = _turns(record for runs in study.rated for record in runs.records)
    models = {}
    for name, members in families.items():
        known = [
            (value, number, turns.get(id(record), NO_TURN), record.started_at)
            for number, runs in enumerate(members)
            for record, value in zip(runs.rated_records, runs.log_rates, strict=True)
        ]
        models[name] = (
            {id(runs): number for number, runs in enumerate(members)},
            fitted(*zip(*known, strict=True)),
        )
    return models


def _turns(records: Iterable[Record]) -> dict[int, int]:
    """Return the number of each record's turn by its id(): the records of one sweep with one repeat.

    A sweep whose turns overlap in time did not measure in turns; its records are absent.
    """
    sweeps: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record.drift:
            sweeps[record.sweep_id][record.cell.repeat].append(record)
    found: dict[int, int] = {}
    number = 0
    for turns in sweeps.values():
        times = sorted(
            (min(starts), max(starts))
            for turn in turns.values()
            if (starts := [r.started_at for r in turn])
        )
        if any(last >= first for (_, last), (first, _) in pairwise(times)):
            continue
        for turn in turns.values():
            found |= {id(record): number for record in turn}
            number += 1
    return found


def _welch(one: Draws, two: Draws) -> tuple[float, float]:
    """Return the standard error of the difference of two means and its degrees of freedom (Welch 1947)."""
    parts = np.array([values.var(ddof=1) / len(values) for values in (one, two)])
    if not parts.sum():
        return 0.0, len(one) + len(two) - 2.0
    freedom = parts.sum() ** 2 / (parts**2 / np.array([len(one) - 1, len(two) - 1])).sum()
    return float(np.sqrt(parts.sum())), float(freedom)


def chances(tests: Tests) -> Draws:
    """Return two-sided p of every test: the chance of so large a difference between equal cells."""
    sure = tests.error < NO_SCATTER
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 2 * stdtr(tests.freedom, -np.abs(tests.difference / tests.error))
    certain = np.where(np.abs(tests.difference) < NO_SCATTER, 1.0, 0.0)
    chance: Draws = np.where(sure, certain, found)
    return chance


def pairs(study: Study) -> Iterator[Pair]:
    """Yield all cells that differ in one asked thing; the one that started first is the first."""
    names = [name for name in study.varied if not name.startswith(NOT_COMPARED)]
    settings = [name for name in study.varied if name.startswith("nccl.")]
    every = [name for name in study.varied if name.startswith("strategy.")]
    if "strategy.name" in study.varied:
        # Two strategies with the same options beside their defaults.
        left_out = (
            "strategy.name",
            *(name for name in every if name != "strategy.name"),
            "server_gpus",
        )
        yield from _pairs(study, "strategy", left_out, lambda runs: chosen_options(runs.cell))
    for name in every:
        if name != "strategy.name":
            yield from _pairs(
                study, name.removeprefix("strategy."), (name,), lambda runs: runs.strategy
            )
    for first, *others in _presets(study, settings):
        asked = first.removeprefix("nccl.") + (f" and {len(others)} more" if others else "")
        yield from _pairs(study, asked, (first, *others))
    yield from _pairs(study, "data", ("data", "data.sha256"))
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
    study: Study,
    asked: str,
    left_out: Sequence[str],
    also: Callable[[Runs], Hashable] = lambda runs: None,
) -> Iterator[Pair]:
    """Yield pairs of one benchmark that differ in the first of the names left out and are equal in all that is not left out."""
    name = left_out[0]
    alike: dict[Hashable, dict[str | None, Runs]] = defaultdict(dict)
    for runs in study.rated:
        if not runs.rate.is_same_work(name):
            continue
        key = (runs.gpus, also(runs), *study.condition(runs, left_out))
        alike[key].setdefault(runs.request.get(name), runs)
    for condition, values in alike.items():
        ordered = sorted(
            values.values(), key=lambda runs: (name in runs.request, runs.records[0].started_at)
        )
        each = len(ordered) <= MOST_VALUES
        for first, second in (
            combinations(ordered, 2) if each else ((ordered[0], one) for one in ordered[1:])
        ):
            yield Pair(
                asked, tuple(left_out), first, second, (name, condition, 0 if each else id(second))
            )


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
    floor = math.expm1(quantile(freedom) * math.sqrt(2) * deviation) if freedom >= FEWEST else None
    pairs_of_runs = sum(math.comb(len(runs.log_rates), 2) for runs in members)
    return Noise(floor, pairs_of_runs, change, deviation, freedom, rate.name)


# What every NCCL setting changed, against the same cell in which it was left alone: the transport, the exchange, the rate.


PREFIX = "nccl."  # of the names of settings in a key
EXCHANGE = "comm/exchange_ms"


def setting_effects(study: Study, compared: Sequence[Comparison]) -> tuple[SettingEffect, ...]:
    """Return the effect of every setting that one of the compared cells has and the other one leaves alone."""
    runs_of = {(runs.gpus, frozenset(runs.key.items())): runs for runs in study.rated}
    found = []
    for one in compared:
        settings = [
            name for name in one.differing if name.startswith(PREFIX) and name in one.second_key
        ]
        if not settings or any(name in one.first_key for name in one.differing):
            continue
        without, with_it = (
            runs_of[one.gpus, frozenset(key.items())] for key in (one.first_key, one.second_key)
        )
        words = [labels.worded(name, one.second_key[name]) for name in settings]
        found.append(
            SettingEffect(
                " ".join(words),
                one,
                (_transport(without), _transport(with_it)),
                (middle(without.records, EXCHANGE), middle(with_it.records, EXCHANGE)),
            )
        )
    return tuple(found)


def _transport(runs: Runs) -> str:
    """Return `P2P/CUMEM` or `SHM`: the transport without the links that it runs over or leaves unused."""
    return (
        (transport_of(runs) or "")
        .partition(" over ")[0]
        .partition(",")[0]
        .removesuffix("/direct/direct")
    )


def unused_on_cpu_workers(study: Study) -> str:
    """Return a sentence where cells of CPU workers were asked with different NCCL settings; else nothing."""
    asked = {
        tuple(sorted(one.cell.nccl.items())) for one in study.usable if one.cell.device == "cpu"
    }
    return "what NCCL settings change: CPU workers do not use NCCL" if len(asked) > 1 else ""
