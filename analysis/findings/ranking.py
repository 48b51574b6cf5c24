"""Which configuration is fastest, which are tied with it, and which cannot be told.

Terminal, report and `advise` say the same because they ask here. Configurations of one ranking do
the same work with one model and installation on equally many GPUs; how they do it is their choice
(strategy, GPUs, NCCL settings, batch, precision, optimize).
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from analysis.findings.baselines import WITHOUT
from analysis.findings.comparisons import Comparison, RateSteps, why_no_verdict
from analysis.study.conditions import Rate, is_among
from analysis.study.intervals import LEVEL, Estimate
from analysis.study.measured_numbers import FASTER, SLOWER, UNKNOWN, significant
from analysis.study.provenance import CONNECTIONS
from analysis.study.runs import Runs, grouped
from analysis.study.study import Study

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


def rank_configurations(study: Study, compared: Sequence[Comparison]) -> tuple[Ranking, ...]:
    """Return every ranking of a study with two configurations or more, on most GPUs first.

    Cells without an exchange (`none`) take no part beside others. `compared` is what
    `comparisons(study)` returns: where it has a verdict on two cells, theirs is the same. Other
    pairs are tested here; any two of a ranking could have been the first, so all count (Holm 1979).
    """
    verdicts: dict[Hashable, str] = {}
    for pair in compared:
        first, second = frozenset(pair.first_key.items()), frozenset(pair.second_key.items())
        verdicts[frozenset([(pair.gpus, first), (pair.gpus, second)])] = pair.verdict
    rankings, rates = [], RateSteps(study)
    for members in grouped(study.rated, _alike).values():
        exchanging = [runs for runs in members if runs.strategy != WITHOUT]
        if exchanging:
            members = exchanging
        if len(members) > 1:
            members.sort(key=lambda runs: -statistics.median(runs.log_rates))
            rankings.append(Ranking(members[0].rate, _ranked(study, rates, members, verdicts)))
    rankings.sort(key=lambda ranking: -ranking.configurations[0].runs.cell.world_size)
    return tuple(rankings)


def _alike(runs: Runs) -> Hashable:
    """Return what the configurations of one ranking share."""
    shared: dict[str, Hashable] = {"rate": runs.rate, "GPUs": runs.cell.world_size}
    for name, value in runs.request.items():
        if is_among(name, ALIKE) or not runs.rate.is_same_work(name):
            shared[name] = value
    for name, value in runs.provenance.items():
        if name != CONNECTIONS:
            shared[name] = value
    return frozenset(shared.items())


def _ranked(
    study: Study, rates: RateSteps, members: Sequence[Runs], verdicts: Mapping[Hashable, str]
) -> tuple[RankedConfiguration, ...]:
    """Return configurations, in order of their rates, as they stand against the fastest."""
    unknown = {id(runs): why_no_verdict(study, runs) for runs in members}
    told = [runs for runs in members if not unknown[id(runs)]]
    first = told[0] if len(told) > 1 else members[0]
    steps = {id(runs): rates.step(first, runs) for runs in members}
    is_seen = {}
    if len(told) > 1:
        rest = told[1:]
        chances = [steps[id(runs)].chance * len(told) / 2 for runs in rest]
        is_seen = dict(zip(map(id, rest), significant(chances, 1 - LEVEL), strict=True))
    ranked = []
    for runs in members:
        pair = frozenset((each.gpus, frozenset(each.key.items())) for each in (first, runs))
        standing, why = UNKNOWN, unknown[id(runs)]
        behind = steps[id(runs)].estimate()
        if not is_seen:
            why = why or NOTHING_TO_COMPARE
        elif runs is first:
            standing, behind = FASTEST, Estimate(0.0)
        elif not why:
            is_slower = verdicts.get(pair) in (FASTER, SLOWER)
            if not verdicts.get(pair):
                is_slower = bool(is_seen[id(runs)])
            standing = SLOWER if is_slower else TIED
        rate = runs.next_run(runs.rate.metric)
        assert rate is not None
        ranked.append(RankedConfiguration(runs, rate, standing, behind, why))
    return tuple(ranked)
