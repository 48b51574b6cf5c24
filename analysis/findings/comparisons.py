"""Which of two cells is faster: their runs against each other, and the noise floor.

Two cells are compared if they belong to the same benchmark, do the same amount of work and differ
in exactly one asked thing on the same GPUs. The test is on the logarithms of the primary rate in
whole runs, with the turns as blocks (analysis.statistics.tests); where no turns connect two cells
it is Welch's, unpaired. All tests of a study are one family (Holm 1979).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from analysis.findings.links import transport_of
from analysis.statistics.tests import NO_TURN, Flags, Floats, TurnModel, fitted, significant
from analysis.study import names as labels
from analysis.study.conditions import chosen_options, differing_names
from analysis.study.intervals import LEVEL, WIDEST, Estimate, half_width
from analysis.study.noise_floor import FloorGroup
from analysis.study.rates import IMAGES_PER_SECOND, Rate
from analysis.study.runs import Key, Runs, grouped
from analysis.study.study import Study
from analysis.text import count
from benchmarks.record import Record, metrics
from conf.cell import Member

VERDICTS = ("faster", "slower", "no difference seen")

PREFIX = "nccl."  # of the names of NCCL's settings in a key
EXCHANGE = "comm/exchange_ms"
POWER = 0.8  # a difference as large as `smallest` is seen in four studies of five
MOST_VALUES = 8  # of one thing; of more, every one is compared with the first alone
BATCH = ("batch_size", "global_batch_size")  # one follows from the other and the GPUs: one thing
# Asked things that are no choice between equals, or that are compared in their own way.
NOT_COMPARED = (
    *("model.", "optimizer.", "profiler", "device", "strategy.", "server_gpus", "data"),
    *(PREFIX, *BATCH),
)
SINGLE = "a single run gives no verdict (repeats=5 does)"
CHANCE = "its interval excludes 0, but among so many comparisons that can be chance"
FEWEST_EQUAL = 3  # runs of a group, of which one can be called noisy
TIMES_AS_NOISY = 3  # its interval inside against those of equal runs
NO_SCATTER = 1e-9  # of a logarithm: what rounding leaves of none
UNPAIRED = "no sweep measured both cells in turn: a drift of the machine would look the same"
SEPARATE = "one cell was measured before the other: a change of the machine would look the same"


@dataclass(frozen=True)
class Comparison:
    """The runs of two cells that differ in one thing, on the same GPUs."""

    first: str  # label
    second: str  # label
    difference: Estimate  # (second − first) ÷ first
    smallest: float | None  # the smallest share that these runs could have shown
    verdict: str  # VERDICTS, of the second; empty where nothing can be said
    why: str = ""  # where there is no verdict, or what qualifies it
    floor: float | None = None  # the larger noise floor of the two, a share
    asked: str = ""  # what differs, for people: strategy, optimize, NCCL_P2P_LEVEL, …
    gpus: tuple[Member, ...] = ()
    runs: tuple[int, int] = (1, 1)
    rate: str = "images/s"  # what is compared; more is faster
    differing: tuple[str, ...] = ()  # names in the keys that differ
    first_key: Key = field(default_factory=dict)
    second_key: Key = field(default_factory=dict)


@dataclass(frozen=True)
class SettingEffect:
    """What an NCCL setting changed, against the same cell in which it was left alone."""

    setting: str  # for people: P2P_LEVEL=LOC
    compared: Comparison  # of the primary rate; the first cell leaves the setting alone
    transports: tuple[str, str]  # without and with it, as NCCL's log says; empty where it does not
    exchange_ms: tuple[float | None, float | None]  # medians over runs

    @property
    def exchange_ratio(self) -> float | None:
        """The time of an exchange with the setting, as a multiple of that without it."""
        without, with_it = self.exchange_ms
        return with_it / without if without and with_it else None

    @property
    def other_transport(self) -> bool:
        """Whether NCCL is known to have used another transport."""
        without, with_it = self.transports
        return bool(without and with_it) and without != with_it


@dataclass(frozen=True)
class Noise:
    """The noise floor of a group of cells, on which their intervals of the next run rest."""

    rate: str = "images/s"
    group: str = ""  # `nccl_allreduce · 2 GPUs`: what tells its cells from those of other groups
    # As a share; 19 of 20 pairs of single runs of equal cells differ by less. None: not known.
    floor: float | None = None
    drift: float | None = None  # change of the first cell when it ran once more at the end, a share


@dataclass(frozen=True)
class NoisyRun:
    """A run that is noisier inside than equal ones."""

    name: str
    inside: float  # half its interval inside the run, a share
    floor: float  # how far one more run may lie from a single one, a share


@dataclass(frozen=True)
class Pair:
    """Two cells to compare."""

    subject: str  # what differs, for people
    differing: tuple[str, ...]  # names in the keys that differ
    first: Runs
    second: Runs


@dataclass(frozen=True)
class Tests:
    """The tests of several pairs, an entry each; NaN but for `difference` where there is none."""

    difference: Floats  # of the logarithms, second − first
    error: Floats  # its standard error
    freedom: Floats  # degrees of freedom
    in_turns: Flags  # whether the turns are blocks; otherwise the test is unpaired

    @staticmethod
    def of(study: Study, compared: Sequence[Pair]) -> "Tests":
        """Test every pair: with the turns as blocks where they connect its cells, else unpaired."""
        difference, error, freedom = np.full((3, len(compared)), math.nan)
        models = turn_models(study)
        families: dict[Hashable, list[int]] = defaultdict(list)
        for at, pair in enumerate(compared):
            families[family(pair.first)].append(at)
        for name, members in families.items():
            cells, model = models[name]
            firsts, seconds = [], []
            for at in members:
                firsts.append(cells[id(compared[at].first)])
                seconds.append(cells[id(compared[at].second)])
            contrasts = model.contrasts(np.array(firsts), np.array(seconds))
            difference[members] = contrasts.difference
            error[members] = contrasts.error
            freedom[members] = contrasts.freedom
        in_turns = np.isfinite(error)
        for at, pair in enumerate(compared):
            first, second = np.array(pair.first.log_rates), np.array(pair.second.log_rates)
            repeated = min(len(first), len(second)) > 1
            in_turns[at] &= repeated
            if in_turns[at]:
                continue
            difference[at] = second.mean() - first.mean()
            error[at] = freedom[at] = math.nan
            if repeated:  # Welch 1947
                parts = np.array([first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)])
                error[at], freedom[at] = np.sqrt(parts.sum()), len(first) + len(second) - 2.0
                if parts.sum():
                    own = (parts**2 / np.array([len(first) - 1, len(second) - 1])).sum()
                    freedom[at] = parts.sum() ** 2 / own
        return Tests(difference, error, freedom, in_turns)


def smallest_change(error: Any, freedom: Any, tests: int) -> Any:
    """Return the smallest change of a rate, as a share, that runs could have shown in `tests`.

    `error` is the standard error of the difference of two logarithms, a number or an array.
    """
    level = (1 - LEVEL) / max(1, tests)
    errors = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
    return np.expm1(np.minimum(errors * error, WIDEST))


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a verdict for every pair of cells that may be compared."""
    compared = list(pairs(study))
    tests = Tests.of(study, compared)
    tested = np.isfinite(tests.error)
    seen = np.zeros(len(compared), dtype=bool)
    seen[tested] = significant(chances(tests)[tested], 1 - LEVEL)
    halves = np.minimum(stdtrit(tests.freedom, (1 + LEVEL) / 2) * tests.error, WIDEST)
    smallest_changes = smallest_change(tests.error, tests.freedom, int(tested.sum()))
    verdicts = []
    for at, pair in enumerate(compared):
        difference, half = min(max(float(tests.difference[at]), -WIDEST), WIDEST), halves[at]
        estimate, verdict, why = Estimate(math.expm1(difference)), "", SINGLE
        smallest = None
        if tested[at]:
            ends = (math.expm1(difference - half), math.expm1(difference + half))
            estimate, reasons = Estimate(estimate.value, *ends), []
            verdict = "no difference seen"
            if seen[at]:
                verdict = "faster" if difference > 0 else "slower"
            elif 0 < half < abs(difference):
                reasons.append(CHANCE)
            if not tests.in_turns[at]:
                first = [record.started_at for record in pair.first.records]
                second = [record.started_at for record in pair.second.records]
                are_separate = max(first) < min(second) or max(second) < min(first)
                if seen[at] and are_separate:
                    reasons.append(SEPARATE)
                else:
                    reasons.append(UNPAIRED)
            why, smallest = "; ".join(reasons), float(smallest_changes[at])
        comparison = Comparison(
            first=labels.side_label(study, pair.first, pair.differing, pair.subject),
            second=labels.side_label(study, pair.second, pair.differing, pair.subject),
            difference=estimate,
            smallest=smallest,
            verdict=verdict,
            why=why,
            floor=_larger_floor(pair),
            asked=pair.subject,
            gpus=pair.first.gpus,
            runs=(len(pair.first.log_rates), len(pair.second.log_rates)),
            rate=pair.first.rate.name,
            differing=pair.differing,
            first_key=pair.first.key,
            second_key=pair.second.key,
        )
        verdicts.append(comparison)
    return tuple(verdicts)


def _larger_floor(pair: Pair) -> float | None:
    widths = []
    for runs in (pair.first, pair.second):
        floor = runs.floor(runs.rate.metric)
        if floor is not None:
            widths.append(math.expm1(half_width(floor, 1)))
    return max(widths, default=None)


def family(runs: Runs) -> Hashable:
    """Return a key of cells whose scatter is pooled: of one rate, one model and one machine."""
    return runs.rate, runs.request.get("model.name"), runs.machine


def turn_models(study: Study) -> dict[Hashable, tuple[dict[int, int], TurnModel]]:
    """Return the fit of every family, and the numbers of its cells, by the id() of their runs."""
    turns = _turns(study)
    models = {}
    for name, members in grouped(study.rated, family).items():
        values, cells, turn_of, times = [], [], [], []
        cell_of = {}
        for cell, runs in enumerate(members):
            cell_of[id(runs)] = cell
            for record, value in zip(runs.rated_records, runs.log_rates, strict=True):
                values.append(value)
                cells.append(cell)
                turn_of.append(turns.get(id(record), NO_TURN))
                times.append(record.started_at)
        models[name] = (cell_of, fitted(values, cells, turn_of, times))
    return models


def _turns(study: Study) -> dict[int, int]:
    """Return {id(record): its turn}, the records of one sweep with one repeat.

    A sweep whose turns overlap in time did not measure in turns; its records are absent.
    """
    sweeps: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for runs in study.rated:
        for record in runs.records:
            if not record.drift:
                sweeps[record.sweep_id][record.cell.repeat].append(record)
    turn_of: dict[int, int] = {}
    count = 0
    for turns in sweeps.values():
        spans: list[tuple[float, float]] = []
        of_sweep: dict[int, int] = {}
        for turn in turns.values():
            of_sweep |= dict.fromkeys(map(id, turn), count + len(spans))
            times = [record.started_at for record in turn]
            spans.append((min(times), max(times)))
        spans.sort()
        if all(earlier[1] < later[0] for earlier, later in pairwise(spans)):
            turn_of |= of_sweep
            count += len(spans)
    return turn_of


def chances(tests: Tests) -> Floats:
    """Return two-sided p of every test: the chance of so large a difference between equal cells."""
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = 2 * stdtr(tests.freedom, -np.abs(tests.difference / tests.error))
    certain = np.where(np.abs(tests.difference) < NO_SCATTER, 1.0, 0.0)
    chance = np.where(tests.error < NO_SCATTER, certain, chance)
    return np.asarray(chance, dtype=np.float64)


def pairs(study: Study) -> Iterator[Pair]:
    """Yield all cells that differ in one asked thing; the one that started first is the first."""
    options: list[str] = []
    # NCCL's settings that cells have all together or not at all (nccl=sharp) are one thing.
    presets: dict[Hashable, list[str]] = defaultdict(list)
    for name in study.varied:
        if name.startswith("strategy.") and name != "strategy.name":
            options.append(name)
        elif name.startswith(PREFIX):
            values = [runs.request.get(name) for runs in study.rated]
            preset_key: Hashable = name
            if len({*values} - {None}) == 1:
                preset_key = tuple(value is None for value in values)
            presets[preset_key].append(name)
    if "strategy.name" in study.varied:
        # Two strategies with the same options beside their defaults.
        differing = ("strategy.name", *options, "server_gpus")
        yield from _pairs(study, "strategy", differing, lambda runs: chosen_options(runs.cell))
    for name in options:
        subject = name.removeprefix("strategy.")
        yield from _pairs(study, subject, (name,), lambda runs: runs.strategy)
    for preset in presets.values():
        subject = preset[0].removeprefix(PREFIX)
        if len(preset) > 1:
            subject += f" and {len(preset) - 1} more"
        yield from _pairs(study, subject, preset)
    yield from _pairs(study, "data", ("data", "data.sha256"))
    for name in study.varied:
        if not name.startswith(NOT_COMPARED):
            yield from _pairs(study, name.removeprefix("benchmark."), (name,))
    batch = sorted(BATCH, key=lambda name: name not in study.varied)
    if batch[0] in study.varied:
        yield from _pairs(study, "batch_size", batch, lambda runs: runs.strong)


def _pairs(
    study: Study,
    subject: str,
    differing: Sequence[str],
    equal: Callable[[Runs], Hashable] = lambda runs: None,
) -> Iterator[Pair]:
    """Yield pairs that differ in the first of some names and are equal in all others."""
    name = differing[0]
    same_work = [runs for runs in study.rated if runs.rate.is_same_work(name)]
    conditions = grouped(
        same_work, lambda runs: study.condition(runs, differing, runs.gpus, equal(runs))
    )
    for members in conditions.values():
        values: dict[str | None, Runs] = {}
        for runs in members:
            values.setdefault(runs.request.get(name), runs)
        ordered = sorted(
            values.values(), key=lambda runs: (name in runs.request, runs.records[0].started_at)
        )
        for first, second in combinations(ordered, 2):
            if first is ordered[0] or len(ordered) <= MOST_VALUES:
                yield Pair(subject, tuple(differing), first, second)


def noises(study: Study) -> tuple[Noise, ...]:
    """Return the noise floor of every rate and group of cells that the study has."""
    groups = list(dict.fromkeys(runs.group for runs in study.rated))
    differing = differing_names([group._asdict() for group in groups])
    noise_of_groups = []
    for rate in study.rates:
        of_rate = [runs for runs in study.rated if runs.rate == rate]
        drift = _drift(study, rate)
        for group, members in grouped(of_rate, lambda runs: runs.group).items():
            steady = [runs for runs in members if not runs.suspect] or members
            floor = steady[0].floor(rate.metric)
            share = None
            if floor is not None:
                share = math.expm1(half_width(floor, 1))
            name = _group_name(group, differing)
            noise_of_groups.append(Noise(rate.name, name, share, drift))
            drift = None
    return tuple(noise_of_groups)


def _group_name(group: FloorGroup, differing: Collection[str]) -> str:
    words = []
    for name in ("strategy", "model", "precision", "optimize"):
        if name in differing:
            words.append(str(getattr(group, name)))
    if "batch_size" in differing:
        words.append(f"batch {group.batch_size}")
    if "world_size" in differing:
        words.append(count(group.world_size, labels.unit(group.device)))
    return labels.BETWEEN.join(filter(None, words))


def noisy_runs(study: Study) -> tuple[NoisyRun, ...]:
    """Return the runs that are noisier inside than equal ones, and than these differ.

    The fixed limit of the code `noisy` judges where a group has no floor of its own.
    """
    noisy = []
    for members in grouped(study.timed, lambda runs: runs.group).values():
        rows = []
        for runs in members:
            floor = runs.floor(IMAGES_PER_SECOND)
            between = math.inf
            if floor is not None and not floor.lenders:
                between = math.expm1(half_width(floor, 1))
            for record in runs.records:
                ends = metrics.interval(IMAGES_PER_SECOND, record.within_run)
                if ends is not None and ends[0] > 0 and not runs.suspect:
                    inside = math.sqrt(ends[1] / ends[0]) - 1
                    rows.append(NoisyRun(record.name, inside, between))
        if len(rows) >= FEWEST_EQUAL:
            usual = TIMES_AS_NOISY * statistics.median(row.inside for row in rows)
            noisy += [row for row in rows if row.inside > max(usual, row.floor)]
    return tuple(noisy)


def _drift(study: Study, rate: Rate) -> float | None:
    """Return the change of the first cell when it ran once more at the end; None without that."""
    for record, runs in study.drift:
        first = runs.records[0].metrics.get(rate.metric, 0)
        last = record.metrics.get(rate.metric, 0)
        if runs.rate == rate and first > 0 and last > 0:
            return rate.change(first, last)
    return None


def setting_effects(study: Study, compared: Sequence[Comparison]) -> tuple[SettingEffect, ...]:
    """Return the effect of every NCCL setting that one of two cells has and the other has not."""
    runs_of = {(runs.gpus, frozenset(runs.key.items())): runs for runs in study.rated}
    effects = []
    for each in compared:
        words = []
        for name in each.differing:
            if name.startswith(PREFIX) and name in each.second_key:
                words.append(labels.format_option(name, each.second_key[name]))
        if not words or not each.first_key.keys().isdisjoint(each.differing):
            continue
        without = runs_of[each.gpus, frozenset(each.first_key.items())]
        with_it = runs_of[each.gpus, frozenset(each.second_key.items())]
        transports = (_transport(without), _transport(with_it))
        exchange_ms = (without.median(EXCHANGE), with_it.median(EXCHANGE))
        effects.append(SettingEffect(" ".join(words), each, transports, exchange_ms))
    return tuple(effects)


def _transport(runs: Runs) -> str:
    """Return `P2P/CUMEM` or `SHM`: the transport without its links."""
    transport = transport_of(runs) or ""
    for separator in (" over ", ","):
        transport = transport.partition(separator)[0]
    return transport.removesuffix("/direct/direct")


def unused_on_cpu_workers(study: Study) -> str:
    """Return a sentence where CPU workers were asked with different NCCL settings, else nothing."""
    settings = set()
    for record in study.usable:
        if record.cell.device == "cpu":
            settings.add(frozenset(record.cell.nccl.items()))
    if len(settings) > 1:
        return "what NCCL settings change: CPU workers do not use NCCL"
    return ""
