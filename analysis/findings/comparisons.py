"""Which of two cells is faster, and which configuration is fastest. METHOD.md, "Comparisons".

The scatter is that of the cells within common turns (randomised blocks: Fisher 1935), or the noise
floor of each one's own group. Terminal, report and `advise` say the same because they ask here.
Configurations of one ranking do the same work with one model and installation on equally many GPUs;
how they do it is their choice.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from scipy.special import fdtr

from analysis.findings.baselines import WITHOUT
from analysis.findings.links import transport_of
from analysis.study import names as labels
from analysis.study.conditions import Rate, chosen_options, is_among
from analysis.study.intervals import LEVEL, Estimate
from analysis.study.measured_numbers import (
    FASTER,
    FEWEST_RUNS,
    NO_DIFFERENCE,
    SLOWER,
    UNKNOWN,
    MeasuredNumber,
    judge,
    measured,
    significant,
)
from analysis.study.provenance import CONNECTIONS
from analysis.study.runs import Key, Runs, grouped
from analysis.study.study import Study
from benchmarks.record import Record
from conf.cell import Member

VERDICTS = (FASTER, SLOWER, NO_DIFFERENCE)

LEAST_RATIO = 1e-12  # of two rates
PREFIX = "nccl."  # of the names of NCCL's settings in a key
EXCHANGE = "comm/exchange_ms"
MOST_VALUES = 8  # of one thing; of more, every one is compared with the first alone
BATCH = ("batch_size", "global_batch_size")  # one follows from the other and the GPUs: one thing
# Asked things that are no choice between equals, or that are compared in their own way.
NOT_COMPARED = (
    *("model.", "optimizer.", "profiler", "device", "strategy.", "server_gpus", "data"),
    *(PREFIX, *BATCH),
)
SINGLE = "a single run gives no verdict (repeats=5 does)"
FEWEST_TURNS = 5  # of fewer the noise floors tell more than differences within the turns
CONTRADICTED = 0.9  # level above which two cells scatter more than the others of their group
SEPARATE = "one was measured before the other: a change of the machine would look the same"


@dataclass(frozen=True)
class Comparison:
    """The runs of two cells that differ in one thing, on the same GPUs."""

    first: str  # label
    second: str  # label
    difference: Estimate  # (second − first) ÷ first
    smallest: float | None  # the smallest share that these runs could have shown
    verdict: str  # VERDICTS, of the second; empty where nothing can be said
    why: str = ""  # where there is no verdict, or what qualifies it
    asked: str = ""  # what differs, for people: strategy, optimize, NCCL_P2P_LEVEL, …
    gpus: tuple[Member, ...] = ()
    runs: tuple[int, int] = (1, 1)
    rate: str = "images/s"  # what is compared; more is faster
    differing: tuple[str, ...] = ()  # names in the keys that differ
    first_key: Key = field(default_factory=dict)
    second_key: Key = field(default_factory=dict)

    def swapped(self) -> "Comparison":
        """Return the first cell against the second."""
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        ends = []
        for end in (value, high, low):
            if end is not None:
                ends.append(1 / max(1 + end, LEAST_RATIO) - 1)
        return replace(
            self,
            first=self.second,
            second=self.first,
            difference=Estimate(*ends),
            verdict={FASTER: SLOWER, SLOWER: FASTER}.get(self.verdict, self.verdict),
            runs=self.runs[::-1],
            first_key=self.second_key,
            second_key=self.first_key,
        )


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
class Pair:
    """Two cells to compare."""

    subject: str  # what differs, for people
    differing: tuple[str, ...]  # names in the keys that differ
    first: Runs
    second: Runs


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return every pair of cells that may be compared, with a verdict where their runs give one."""
    compared, rates = list(pairs(study)), RateSteps(study)
    steps = [rates.step(pair.first, pair.second) for pair in compared]
    chances = [step.chance for step in steps if step.error is not None]
    is_seen = iter(significant(chances, 1 - LEVEL))
    verdicts = []
    for pair, step in zip(compared, steps, strict=True):
        difference, smallest, verdict = step.estimate(), None, ""
        if step.error is None:
            why = why_no_verdict(study, pair.first) or why_no_verdict(study, pair.second)
        else:
            smallest = step.smallest_change(len(chances))
            verdict, why = judge(difference, next(is_seen))
            if verdict != NO_DIFFERENCE and measured_apart(pair.first, pair.second):
                why = SEPARATE
        verdicts.append(
            Comparison(
                first=labels.side_label(study, pair.first, pair.differing, pair.subject),
                second=labels.side_label(study, pair.second, pair.differing, pair.subject),
                difference=difference,
                smallest=smallest,
                verdict=verdict,
                why=why,
                asked=pair.subject,
                gpus=pair.first.gpus,
                runs=(len(pair.first.log_rates), len(pair.second.log_rates)),
                rate=pair.first.rate.name,
                differing=pair.differing,
                first_key=pair.first.key,
                second_key=pair.second.key,
            )
        )
    return tuple(verdicts)


class RateSteps:
    """The differences between the rates of a study's cells, second − first, as logarithms."""

    def __init__(self, study: Study) -> None:
        """Find the turns of each sweep: the runs with one repeat, every cell once.

        A sweep whose turns overlap in time did not measure in turns.
        """
        sweeps: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
        rates = {}
        for runs in study.rated:
            for record, rate in zip(runs.rated_records, runs.log_rates, strict=True):
                rates[id(record)] = runs, rate
                if not record.drift:
                    sweeps[record.sweep_id][record.cell.repeat].append(record)
        # {runs: {id of the turn's first record: rate}}
        self._of_turns: dict[Runs, dict[str, float]] = defaultdict(dict)
        for repeats in sweeps.values():
            turns = sorted(repeats.values(), key=lambda turn: turn[0].started_at)
            overlap = False
            for earlier, later in pairwise(turns):
                last_start = max(record.started_at for record in earlier)
                overlap |= last_start >= min(record.started_at for record in later)
            if overlap:
                continue
            for turn in turns:
                for record in turn:
                    runs, rate = rates[id(record)]
                    self._of_turns[runs][turn[0].record_id] = rate
        self._groups = grouped(study.rated, lambda runs: (runs.rate, runs.group))

    def step(self, first: Runs, second: Runs) -> MeasuredNumber:
        """Return the difference of two cells, within FEWEST_TURNS common turns, else of medians.

        Within turns the scatter is that of the two; of cells of one group that of the whole group,
        unless the two scatter more than the others (F test). Else it is the noise floor of each
        one's own group.
        """
        turns = self._of_turns[first].keys() & self._of_turns[second].keys()
        if len(turns) >= FEWEST_TURNS:
            return self._within(sorted(turns), first, second)
        numbers = [measured(runs, runs.rate.metric) for runs in (first, second)]
        assert numbers[0] is not None and numbers[1] is not None
        step = numbers[1].minus(numbers[0])
        if first.rate.is_time:
            return replace(step, value=-step.value)
        return step

    def _within(self, turns: Sequence[str], first: Runs, second: Runs) -> MeasuredNumber:
        cells, common = [first, second], set(turns)
        if first.group == second.group and not first.suspect and not second.suspect:
            for runs in self._groups[first.rate, first.group]:
                has_all = self._of_turns[runs].keys() >= common
                if has_all and not runs.suspect and runs not in cells:
                    cells.append(runs)
        rows = []
        for runs in cells:
            of_turns = self._of_turns[runs]
            rows.append([of_turns[turn] for turn in turns])
        rates = np.array(rows)
        means = rates.mean(axis=1)
        rest = rates - means[:, None]
        rest -= rest.mean(axis=0)
        of_pair, freedom = len(turns) - 1, (len(cells) - 1) * (len(turns) - 1)
        squares = float((rest**2).sum())
        own_squares = float(((rest[1] - rest[0]) ** 2).sum()) / 2
        of_others = freedom - of_pair
        if of_others and squares > own_squares:
            ratio = own_squares / of_pair / ((squares - own_squares) / of_others)
            # Of eight equal cells of which one scatters five times as much, one was called faster
            # or slower in 16 % of 1,500 simulated studies of five turns; with this in 3 %.
            if fdtr(of_pair, of_others, ratio) > CONTRADICTED:
                squares, freedom = own_squares, of_pair
        error = math.sqrt(2 * squares / freedom / len(turns))
        return MeasuredNumber(float(means[1] - means[0]), len(turns), error, freedom)


def measured_apart(first: Runs, second: Runs) -> bool:
    """Return whether all runs of one cell started before those of the other."""
    starts = [record.started_at for record in first.records]
    of_second = [record.started_at for record in second.records]
    return max(starts) < min(of_second) or max(of_second) < min(starts)


def why_no_verdict(study: Study, runs: Runs) -> str:
    """Return why the runs of a cell do not show how far they differ; empty where they do."""
    if len(runs.log_rates) < FEWEST_RUNS:
        return SINGLE
    floor = runs.floor(runs.rate.metric)
    if floor is not None and not floor.lenders:
        return ""
    name = labels.label(study, runs)
    if floor is None:
        return f"too few runs of {name} show how far they differ (repeats=5 does)"
    lender = f"comes from other configurations: {floor.lent_by} (repeats=5 gives its own)"
    return f"{name} has too few repeats, so its ± {lender}"


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
        most = len(ordered) if len(ordered) <= MOST_VALUES else 1
        for index, first in enumerate(ordered[:most]):
            for second in ordered[index + 1 :]:
                yield Pair(subject, tuple(differing), first, second)


def drifts(study: Study) -> dict[str, float]:
    """Return {name of a rate: its change, a share, when the first cell ran again at the end}."""
    changes: dict[str, float] = {}
    for record, runs in study.drift:
        first = runs.records[0].metrics.get(runs.rate.metric, 0)
        last = record.metrics.get(runs.rate.metric, 0)
        if first > 0 and last > 0:
            changes.setdefault(runs.rate.name, runs.rate.change(first, last))
    return changes


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
        return "Effect of NCCL settings: CPU workers do not use NCCL"
    return ""


FASTEST, TIED = "fastest", "tied"
# What configurations of one ranking have alike, beside what changes the amount of work.
ALIKE = ("model.", "optimizer.", "device", "data", "data.sha256")
NOTHING_TO_COMPARE = "no other configuration has enough runs to be compared with"


@dataclass(frozen=True)
class RankedConfiguration:
    """A configuration with its rate, and where it stands against the fastest."""

    runs: Runs
    rate: Estimate  # median of the metric of `Ranking.rate`, with the interval of the next run
    standing: str  # FASTEST, TIED, SLOWER, or UNKNOWN: its runs do not show how far they differ
    # (This rate − the fastest) ÷ the fastest, a share, where more is faster: with its 95 % interval
    # where it can be told. Where no configuration is the fastest, against the highest rate.
    behind: Estimate
    why: str = ""  # of UNKNOWN: a single run, a floor that is lent, …


@dataclass(frozen=True)
class Ranking:
    """Configurations that do the same work, the highest median rate first."""

    rate: Rate
    configurations: tuple[RankedConfiguration, ...]

    def standing(self, standing: str) -> tuple[RankedConfiguration, ...]:
        """Return the configurations that stand so: FASTEST, TIED, SLOWER or UNKNOWN."""
        return tuple(each for each in self.configurations if each.standing == standing)

    @property
    def fastest(self) -> RankedConfiguration | None:
        """The highest rate of those that can be told; None where fewer than two can.

        Those that stand before it in `configurations` had higher rates, which nobody can tell.
        """
        return next(iter(self.standing(FASTEST)), None)

    @property
    def fastest_leads(self) -> bool:
        """Whether no configuration that cannot be told has a higher rate than the fastest."""
        return self.fastest is self.configurations[0]

    @property
    def suspect_leader(self) -> RankedConfiguration | None:
        """The fastest, or the highest rate without one, where a check doubts each of its runs: then
        nobody knows which is fastest."""
        leader = self.fastest or self.configurations[0]
        return leader if leader.runs.all_suspect else None


def rank_configurations(study: Study, compared: Sequence[Comparison]) -> tuple[Ranking, ...]:
    """Return every ranking of a study with two configurations or more, on most GPUs first.

    Cells without an exchange (`none`) take no part beside others. `compared` is what
    `comparisons(study)` returns: where it has a verdict on two cells, theirs is the same. Other
    pairs are tested here, those of all rankings as one family (Holm 1979); any two of a ranking
    could have been the first, so all count.
    """
    verdicts: dict[Hashable, str] = {}
    for pair in compared:
        first, second = frozenset(pair.first_key.items()), frozenset(pair.second_key.items())
        verdicts[frozenset([(pair.gpus, first), (pair.gpus, second)])] = pair.verdict
    unknown = {runs: why_no_verdict(study, runs) for runs in study.rated}
    rates, ordered = RateSteps(study), []
    steps: dict[Runs, MeasuredNumber] = {}
    chances: dict[Runs, float] = {}
    for members in grouped(study.rated, _alike).values():
        exchanging = [runs for runs in members if runs.strategy != WITHOUT]
        if exchanging:
            members = exchanging
        if len(members) < 2:
            continue
        members.sort(key=lambda runs: -statistics.median(runs.log_rates))
        told = [runs for runs in members if not unknown[runs]]
        leader = told[0] if len(told) > 1 else members[0]
        ordered.append((leader, members))
        for runs in members:
            steps[runs] = rates.step(leader, runs)
        for runs in told[1:]:
            chances[runs] = steps[runs].chance * len(told) / 2
    seen = significant([*chances.values()], 1 - LEVEL)
    is_seen = dict(zip(chances, seen, strict=True))
    rankings = []
    for leader, members in ordered:
        ranked = _ranked(leader, members, steps, unknown, is_seen, verdicts)
        rankings.append(Ranking(leader.rate, ranked))
    rankings.sort(key=lambda ranking: -ranking.configurations[0].runs.cell.world_size)
    return tuple(rankings)


def _alike(runs: Runs) -> Hashable:
    shared: dict[str, Hashable] = {**runs.provenance, CONNECTIONS: None}
    for name, value in runs.request.items():
        if is_among(name, ALIKE) or not runs.rate.is_same_work(name):
            shared[name] = value
    return runs.rate, runs.cell.world_size, frozenset(shared.items())


def _ranked(
    leader: Runs,
    members: Sequence[Runs],
    steps: Mapping[Runs, MeasuredNumber],
    unknown: Mapping[Runs, str],
    is_seen: Mapping[Runs, bool],
    verdicts: Mapping[Hashable, str],
) -> tuple[RankedConfiguration, ...]:
    has_tests = not is_seen.keys().isdisjoint(members)
    ranked = []
    for runs in members:
        pair = frozenset((each.gpus, frozenset(each.key.items())) for each in (leader, runs))
        standing, why = UNKNOWN, unknown[runs]
        behind = steps[runs].estimate()
        if not has_tests:
            why = why or NOTHING_TO_COMPARE
        elif runs is leader:
            standing, behind = FASTEST, Estimate(0.0)
        elif not why:
            is_slower = bool(is_seen[runs])
            if verdicts.get(pair):
                is_slower = verdicts[pair] != NO_DIFFERENCE
            standing = SLOWER if is_slower else TIED
        rate = runs.next_run(runs.rate.metric)
        assert rate is not None
        ranked.append(RankedConfiguration(runs, rate, standing, behind, why))
    return tuple(ranked)
