"""What a cell is held against: its members alone, its hosts alone, and the cells without exchange.

METHOD.md, "Scaling". The terminal, the record, MLflow and the report take efficiencies from here,
and a planner the control cells. The launcher imports this module: no numpy.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from analysis.study.conditions import (
    IMAGES_PER_SECOND,
    OF_SERVERS,
    Condition,
    irrelevant_to_baselines,
    irrelevant_to_curves,
)
from analysis.study.intervals import of_median
from analysis.study.names import unit
from analysis.study.noise_floor import CLOCK, pooled_scatter
from analysis.study.provenance import CONNECTIONS
from analysis.study.runs import Runs, RunsByMember, grouped
from analysis.study.study import Study
from benchmarks.record import Record
from conf import groups
from conf.cell import Cell, Member

AGAINST = "against"  # before the members that an efficiency is against

EFFICIENCY = "scaling/efficiency"  # metrics
AT_EQUAL_CLOCKS = "scaling/efficiency_at_equal_clocks"
NODE_EFFICIENCY = "scaling/node_efficiency"
# Among a record's checks: {GPU or host: ids of its baseline's records}, and the scatter of runs.
BASELINES, HOST_BASELINES, NOISE = "baselines", "host_baselines", "baseline_noise"
WITHOUT = "none"  # the strategy without exchange
FEWEST_FREEDOM = 3  # degrees of freedom below which the scatter between runs is not known
NOISE_MULTIPLE = 1.5  # members differ where the variance of their rates exceeds the noise's so
# A control cell has the same images per rank, whether these were asked for or follow from the step.
FREE_IN_CONTROLS = ("global_batch_size", *OF_SERVERS)


class Efficiency(float):
    """A scaling efficiency as a share; against which GPUs, where some were not measured alone."""

    of: tuple[Member, ...]
    unit: str

    def __new__(cls, value: float, of: tuple[Member, ...] = (), unit: str = "GPU") -> "Efficiency":
        """Make one; `of` is empty where every member was measured alone."""
        share = super().__new__(cls, value)
        share.of, share.unit = of, unit
        return share

    @property
    def mark(self) -> str:
        """`against GPU 0`, for people; empty where every member was measured alone."""
        if not self.of:
            return ""
        return f"{AGAINST} {self.members}"

    @property
    def members(self) -> str:
        """`GPU 0`, `CPU workers 0,2` or `every GPU`: those that were measured alone."""
        if not self.of:
            return f"every {self.unit}"
        unit = self.unit
        if len(self.of) > 1:
            unit += "s"
        return f"{unit} {','.join(map(str, self.of))}"


class Baselines:
    """The runs of a study on one GPU and on one host, by the condition that other runs share."""

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Group a study's runs; without `judged` the scatter of runs is what a record states."""
        self._study, self._judged = study, judged
        alone, on_host = [], []
        for runs in study.timed:
            if runs.cell.world_size == 1:
                alone.append(runs)
            if len(runs.cell.hosts) == 1:
                on_host.append(runs)
        self._alone = RunsByMember(alone, self._condition, lambda runs: runs.gpus[0])
        self._hosts = RunsByMember(on_host, self._host_condition, lambda runs: runs.cell.hosts[0])
        self._noise = {}
        for name, members in grouped(study.timed, _noise_group).items():
            scatter = pooled_scatter((runs.records for runs in members), IMAGES_PER_SECOND)
            if scatter.freedom >= FEWEST_FREEDOM:
                self._noise[name] = scatter.deviation
        # Thousands of records may have equal baselines: what these give is computed once.
        self._members: dict[int, dict[Member, Runs]] = {}
        self._log_slowest: dict[Hashable, float] = {}

    def _condition(self, runs: Runs) -> Condition:
        return self._study.condition(runs, irrelevant_to_baselines(runs.strong))

    def _host_condition(self, runs: Runs) -> Condition:
        irrelevant = irrelevant_to_baselines(runs.strong)
        if len(runs.cell.gpus) > 1:  # GPUs of one host use links, and so NCCL's settings
            irrelevant = (*irrelevant_to_curves(runs.strong), CONNECTIONS)
        return self._study.condition(runs, irrelevant, runs.cell.gpus)

    def of_members(self, runs: Runs) -> dict[Member, Runs]:
        """Return {GPU: its runs alone} for the members of a subset that were measured alone."""
        if id(runs) not in self._members:
            self._members[id(runs)] = self._alone.of(runs, runs.gpus)
        return self._members[id(runs)]

    def of_hosts(self, runs: Runs) -> dict[Member, Runs]:
        """Return {host: its runs alone with the same GPUs} of a cell on several; all, or none."""
        hosts = runs.cell.hosts
        alone = self._hosts.of(runs, hosts)
        return alone if len(alone) == len(hosts) > 1 else {}

    def noise(self, runs: Runs) -> float | None:
        """Return the standard deviation of log(images/s) between runs like these, if known."""
        if self._judged:
            return self._noise.get(_noise_group(runs))
        noise: float | None = runs.records[0].checks.get(NOISE)
        return noise

    def efficiency(self, record: Record) -> Efficiency | None:
        """Return the efficiency of a record; None for one GPU, without a rate or a baseline."""
        single = self._study.single(record)
        alone = self.of_members(single)
        if single.cell.world_size == 1 or math.isnan(single.median_log_rate) or not alone:
            return None
        noise = self.noise(single)
        key = (noise, *map(id, alone.values()))
        if key not in self._log_slowest:
            self._log_slowest[key] = log_slowest(alone, noise)
        return efficiency(single.median_log_rate, self._log_slowest[key], single.cell, alone)

    def node_efficiency(self, record: Record) -> float | None:
        """Return rate ÷ (hosts × slowest host alone); None unless each was measured."""
        single = self._study.single(record)
        alone = self.of_hosts(single)
        if math.isnan(single.median_log_rate) or not alone:
            return None
        slowest = log_slowest(alone, self.noise(single))
        return math.exp(single.median_log_rate - slowest) / len(alone)

    def at_equal_clocks(self, record: Record, share: Efficiency | None) -> Efficiency | None:
        """Return an efficiency as if the GPUs had the SM clock of the slowest member alone.

        A rate is taken to follow the clock. None where the efficiency or a clock is not known.
        """
        single = self._study.single(record)
        ratio = clock_ratio(single, self.of_members(single).values())
        if share is None or ratio is None:
            return None
        return Efficiency(share * ratio, share.of, share.unit)

    def facts(self, record: Record) -> dict[str, object]:
        """Return what an efficiency rests on: ids of the baselines' records, and the noise."""
        single = self._study.single(record)
        facts: dict[str, object] = {BASELINES: _record_ids(self.of_members(single))}
        hosts = self.of_hosts(single)
        if hosts:
            facts[HOST_BASELINES] = _record_ids(hosts)
        noise = self.noise(single)
        if noise:
            facts[NOISE] = noise
        return facts


def _record_ids(alone: Mapping[Member, Runs]) -> dict[str, list[str]]:
    return {str(member): list(runs.record_ids) for member, runs in alone.items()}


def efficiency(
    log_rate: float, log_alone: float, cell: Cell, alone: Iterable[Member]
) -> Efficiency:
    """Return rate ÷ (N × slowest alone) of two logarithms, and which members ran alone."""
    return _efficiency_of(math.exp(log_rate - log_alone) * (1 / cell.world_size), cell, alone)


def stated_efficiency(record: Record) -> Efficiency | None:
    """Return the efficiency that a record states; None where it does not name its baselines."""
    value, ids = record.metrics.get(EFFICIENCY), record.checks.get(BASELINES)
    if value is None or ids is None:
        return None
    return _efficiency_of(value, record.cell, ids)


def _efficiency_of(value: float, cell: Cell, alone: Iterable[Member]) -> Efficiency:
    ids = set(map(str, alone))
    members = tuple(gpu for gpu in cell.members if str(gpu) in ids)
    if len(members) == cell.world_size:
        members = ()
    return Efficiency(value, members, unit(cell.device))


def log_slowest(members: Mapping[Member, Runs], noise: float | None) -> float:
    """Return the logarithm of the slowest of several rates, without the bias of a least number.

    The rates are shrunk to their mean by √(1 − NOISE_MULTIPLE · variance of noise ÷ theirs), so
    that they vary as much as the true rates do (constrained empirical Bayes, Louis 1984, Ghosh
    1992); the slowest of these counts. Without a known noise it is the slowest as measured.
    """
    rates, factors_of_medians = [], []
    for runs in members.values():
        factors_of_medians.append(of_median(len(runs.values(IMAGES_PER_SECOND))))
        rates.append(runs.median_log_rate)
    least, mean = min(rates), statistics.fmean(rates)
    if noise is None or len(rates) == 1:
        return least
    noise_variance = noise**2 * statistics.fmean(factors_of_medians)
    variance = statistics.variance(rates)
    if variance <= NOISE_MULTIPLE * noise_variance:
        return mean
    shrinkage = math.sqrt(1 - NOISE_MULTIPLE * noise_variance / variance)
    return mean + shrinkage * (least - mean)


def clock_ratio(runs: Runs, alone: Collection[Runs]) -> float | None:
    """Return the SM clock of the slowest member alone ÷ that of a subset; None without one."""
    if not alone:
        return None
    slowest_mhz = min(alone, key=lambda member: member.median_log_rate).median(CLOCK)
    mhz = runs.median(CLOCK)
    if not slowest_mhz or not mhz:
        return None
    return slowest_mhz / mhz


def _noise_group(runs: Runs) -> Hashable:
    images = "global_batch_size" if runs.strong else "batch_size"
    names = ("model.name", "strategy.name", images, "optimize", "precision", "device")
    return runs.machine, *map(runs.request.get, names)


def control_cells(cell: Cell) -> list[Cell]:
    """Return the cells that explain one of several GPUs; none without a strategy or training step.

    Each member alone without and with the strategy, each of several hosts alone with its whole
    subset, and all without exchange. All keep model, images per rank, seed and repeat; a profiler
    is left out. They have no labels yet (conf.resolve.labelled).
    """
    trains = cell.benchmark["name"] == "throughput" and cell.strategy["name"] != WITHOUT
    if cell.world_size == 1 or not trains:
        return []
    untraced = dataclasses.replace(
        cell, global_batch_size=None, labels=(), profiler="none", profiler_options={}
    )
    plain = dataclasses.replace(untraced, nccl={})
    changes: dict[str, Any] = {"strategy": {"name": WITHOUT}, "server_gpus": (), "server_hosts": ()}
    if cell.declared:
        declared = groups.choice("strategy", WITHOUT).declared()
        changes["declared"] = {**cell.declared, "strategy": declared}
    without = dataclasses.replace(plain, **changes)
    controls = []
    for strategy in (without, plain):
        for on_host in _each_host(strategy):
            for gpu in cell.gpus:
                controls.append(dataclasses.replace(on_host, gpus=(gpu,)))
    if len(cell.hosts) > 1 and len(cell.gpus) > 1:
        controls += _each_host(untraced)
    return [*controls, without]


def _each_host(cell: Cell) -> Iterator[Cell]:
    """Yield a cell on each of its hosts alone, with its servers there; without hosts, the cell."""
    for host in cell.hosts:
        servers = []
        for server in cell.server_hosts:
            if server in cell.hosts:
                servers.append(host)
            else:
                servers.append(server)
        yield dataclasses.replace(cell, hosts=(host,), server_hosts=tuple(servers))
    if not cell.hosts:
        yield cell


class ControlRuns:
    """The runs of a study's control cells, by the condition that the explained cell shares."""

    def __init__(self, study: Study) -> None:
        def shared(runs: Runs, *irrelevant: str, fixed: Hashable = None) -> Condition:
            names = (*FREE_IN_CONTROLS, *irrelevant)
            return study.condition(runs, names, fixed, runs.cell.batch_size)

        without, alone, hosts = [], [], []
        for runs in study.timed:
            if runs.strategy == WITHOUT:
                without.append(runs)
            elif runs.cell.world_size == 1:
                alone.append(runs)
            elif len(runs.cell.hosts) == 1:
                hosts.append(runs)
        # With strategy=none by subset, with the strategy by GPU, and on a host with the same GPUs.
        self.without = RunsByMember(
            without, lambda runs: shared(runs, "nccl.", "strategy."), lambda runs: runs.gpus
        )
        self.alone = RunsByMember(
            alone, lambda runs: shared(runs, "nccl."), lambda runs: runs.gpus[0]
        )
        self.hosts = RunsByMember(
            hosts,
            lambda runs: shared(runs, CONNECTIONS, fixed=runs.cell.gpus),
            lambda runs: runs.cell.hosts[0],
        )
