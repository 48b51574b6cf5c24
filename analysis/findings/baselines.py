"""Scaling efficiency against one-GPU baselines: the one algorithm that the terminal, the record,
MLflow and the report use.

    efficiency = rate ÷ (N × rate of the slowest member alone)
    node efficiency = rate ÷ (hosts × rate of the slowest host alone, with the same GPUs)

The images per GPU are unchanged (weak scaling), or the images per step where `global_batch_size`
was asked for (strong scaling). The slowest of several noisy rates is too slow on average;
`log_slowest` corrects that. The launching process imports this module: no numpy, scipy or pandas.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping

from analysis.study.conditions import (
    Condition,
    irrelevant_to_baselines,
    irrelevant_to_curves,
)
from analysis.study.estimates import Efficiency, Member
from analysis.study.intervals import of_median
from analysis.study.names import unit
from analysis.study.provenance import CONNECTIONS
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.runs import Runs, between_runs, grouped, merged_by
from analysis.study.study import Study
from benchmarks.record import Record
from conf.cell import Cell

EFFICIENCY = "scaling/efficiency"  # a metric
AT_EQUAL_CLOCKS = "scaling/efficiency_at_equal_clocks"  # a metric, where both clocks are known
NODE_EFFICIENCY = "scaling/node_efficiency"  # a metric, where every one of several hosts ran alone
# Among a record's checks: {GPU: ids of its baseline's records}, the same of hosts, and the scatter
# between runs.
BASELINES, HOST_BASELINES, NOISE = "baselines", "host_baselines", "baseline_noise"
FEWEST_FREEDOM = 3  # degrees of freedom below which the scatter between runs is not known
# Members differ where their rates vary by more than this multiple of what noise explains; of equal
# GPUs one in four does.
DIFFER = 1.5


class Baselines:
    """The runs of a study on one GPU, and on one host, found by the condition that they share with
    other runs.
    """

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Group the runs of a study by their condition.

        `judged`: the scatter between runs is that of the study; otherwise what a record states of
        it.
        """
        self._study, self._judged = study, judged
        alone = [runs for runs in study.timed if runs.world_size == 1]
        on_host = [runs for runs in study.timed if len(runs.cell.hosts) == 1]
        self._alone = merged_by(alone, self._condition, lambda runs: runs.gpus[0])
        self._hosts = merged_by(on_host, self._host_condition, lambda runs: runs.cell.hosts[0])
        self._noise = {}
        for scatter, members in grouped(study.timed, _scatter_group).items():
            deviation, freedom = between_runs(members, IMAGES_PER_SECOND)
            if freedom >= FEWEST_FREEDOM:
                self._noise[scatter] = deviation
        # A study may have thousands of records with equal baselines: what these give is computed
        # once.
        self._members: dict[int, dict[Member, Runs]] = {}
        self._log_slowest: dict[Hashable, float] = {}

    def _condition(self, runs: Runs) -> Condition:
        return self._study.condition(runs, irrelevant_to_baselines(runs.strong))

    def _host_condition(self, runs: Runs) -> Condition:
        """Return what a cell on several hosts shares with those on one of them, with the same GPUs."""
        if len(runs.cell.gpus) == 1:
            irrelevant = irrelevant_to_baselines(runs.strong)
        else:  # several GPUs of one host use links, and so NCCL's settings
            irrelevant = (*irrelevant_to_curves(runs.strong), CONNECTIONS)
        return self._study.condition(runs, irrelevant, runs.cell.gpus)

    def of(self, runs: Runs) -> dict[Member, Runs]:
        """Return {GPU: its runs alone} for the members of a subset that were measured alone."""
        if id(runs) not in self._members:
            alone = self._alone.get(self._condition(runs), {})
            self._members[id(runs)] = {gpu: alone[gpu] for gpu in runs.gpus if gpu in alone}
        return self._members[id(runs)]

    def of_hosts(self, runs: Runs) -> dict[Member, Runs]:
        """Return {host: its runs alone with the same GPUs} of a cell on several hosts, if every one
        was measured.
        """
        hosts = runs.cell.hosts
        alone = self._hosts.get(self._host_condition(runs), {})
        if len(hosts) < 2 or not alone.keys() >= {*hosts}:
            return {}
        return {host: alone[host] for host in hosts}

    def noise(self, runs: Runs) -> float | None:
        """Return the standard deviation of the logarithm of images/s between runs of cells like
        these, if it is known.
        """
        if not self._judged:
            noise = runs.records[0].checks.get(NOISE)
            return noise if isinstance(noise, float) else None
        return self._noise.get(_scatter_group(runs))

    def efficiency(self, record: Record) -> Efficiency | None:
        """Return the efficiency of one record; None for one GPU, without a rate or without any
        baseline.
        """
        single = self._study.single(record)
        alone = self.of(single)
        if single.world_size == 1 or single.median_log_rate is None or not alone:
            return None
        noise = self.noise(single)
        key = (noise, *map(id, alone.values()))
        if key not in self._log_slowest:
            self._log_slowest[key] = log_slowest(alone, noise)
        return efficiency(single.median_log_rate, self._log_slowest[key], single.cell, alone)

    def node_efficiency(self, record: Record) -> float | None:
        """Return rate ÷ (hosts × slowest host alone) of one record; None unless each of several
        hosts was measured.
        """
        single = self._study.single(record)
        alone = self.of_hosts(single)
        if single.median_log_rate is None or not alone:
            return None
        slowest = log_slowest(alone, self.noise(single))
        return math.exp(single.median_log_rate - slowest) / len(alone)

    def at_equal_clocks(self, record: Record, share: Efficiency | None) -> Efficiency | None:
        """Return the efficiency `share` of a record as if the GPUs had the SM clock that the
        slowest member has alone.

        A rate is taken to follow the clock. None where the efficiency or a clock is not known.
        """
        single = self._study.single(record)
        ratio = clock_ratio(single, self.of(single).values())
        if share is None or ratio is None:
            return None
        return Efficiency(share * ratio, share.of, share.unit)

    def facts(self, record: Record) -> dict[str, object]:
        """Return what the efficiency of a record rests on: ids of the baselines' records, and the
        noise if it is known.
        """
        single = self._study.single(record)
        facts: dict[str, object] = {}
        facts[BASELINES] = {
            str(gpu): list(runs.record_ids) for gpu, runs in self.of(single).items()
        }
        hosts = {host: list(runs.record_ids) for host, runs in self.of_hosts(single).items()}
        if hosts:
            facts[HOST_BASELINES] = hosts
        noise = self.noise(single)
        if noise:
            facts[NOISE] = noise
        return facts


def efficiency(
    log_rate: float, log_alone: float, cell: Cell, alone: Iterable[Member]
) -> Efficiency:
    """Return rate ÷ (N × slowest alone), of the logarithms of both rates, and which members were
    measured alone.
    """
    return _marked(math.exp(log_rate - log_alone) * (1 / cell.world_size), cell, alone)


def stated(record: Record) -> Efficiency | None:
    """Return the efficiency that a record states, and of which members; None where it does not name
    its baselines.
    """
    value, ids = record.metrics.get(EFFICIENCY), record.checks.get(BASELINES)
    if value is None or not isinstance(ids, Mapping):
        return None
    return _marked(value, record.cell, [gpu for gpu in record.cell.members if str(gpu) in ids])


def _marked(value: float, cell: Cell, alone: Iterable[Member]) -> Efficiency:
    measured = set(alone)
    members = tuple(gpu for gpu in cell.members if gpu in measured)
    if len(members) == cell.world_size:
        members = ()
    return Efficiency(value, members, unit(cell.device))


def log_slowest(members: Mapping[Member, Runs], noise: float | None) -> float:
    """Return the logarithm of the slowest of several rates alone, without the bias of the least of
    noisy numbers.

    The rates are drawn to their mean by √(1 − DIFFER · variance of noise ÷ their variance), so that
    they vary as much as the true rates do (constrained empirical Bayes, Louis 1984, Ghosh 1992);
    the slowest of these counts. Members that do not differ beyond noise all have the mean. Without
    a known noise it is the slowest as measured.
    """
    rates = [runs.median_log_rate for runs in members.values() if runs.median_log_rate is not None]
    least, mean = min(rates), statistics.fmean(rates)
    if noise is None or len(rates) == 1:
        return least
    counts = [len(runs.values(IMAGES_PER_SECOND)) for runs in members.values()]
    errors = noise**2 * statistics.fmean(map(of_median, counts))
    variance = statistics.variance(rates)
    if variance <= DIFFER * errors:
        return mean
    return mean + math.sqrt(1 - DIFFER * errors / variance) * (least - mean)


def clock_ratio(runs: Runs, alone: Iterable[Runs]) -> float | None:
    """Return the SM clock of the slowest member alone ÷ that of a subset; None where one of them
    was not sampled.
    """
    timed = [member for member in alone if member.median_log_rate is not None]
    slowest = min(timed, key=lambda member: member.median_log_rate or 0.0, default=None)
    if slowest is None or not slowest.clock_mhz or not runs.clock_mhz:
        return None
    return slowest.clock_mhz / runs.clock_mhz


def _scatter_group(runs: Runs) -> Hashable:
    names = ("model.name", "optimize", "precision", "device")
    return runs.machine, *(runs.request.get(name) for name in names)
