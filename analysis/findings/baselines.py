"""Scaling efficiency against one-GPU baselines: the one algorithm that the terminal, the record, MLflow and the report use.

    efficiency = rate ÷ (N × rate of the slowest member alone)
    node efficiency = rate ÷ (hosts × rate of the slowest host alone, with the same GPUs)

The images per GPU are unchanged (weak scaling), or the images per step where `global_batch_size` was asked for (strong
scaling). The slowest of several noisy rates is too slow on average; `log_slowest` corrects that. The launching process imports
this module, so it needs neither numpy nor scipy, which take a second to import.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.study.estimates import Efficiency, Member
from analysis.study.intervals import of_median
from analysis.study.names import unit
from analysis.study.provenance import CONNECTIONS
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.study import Runs, Study, between_runs, merged
from benchmarks.record import Record
from conf.cell import Cell

EFFICIENCY = "scaling/efficiency"  # a metric
AT_EQUAL_CLOCKS = "scaling/efficiency_at_equal_clocks"  # a metric, where both clocks are known
NODE_EFFICIENCY = "scaling/node_efficiency"  # a metric of cells on several hosts, where every host was measured alone
# Among a record's checks: {GPU: ids of the records that its efficiency was computed with}, and the scatter between runs.
BASELINES, NOISE = "baselines", "baseline_noise"
HOST_BASELINES = "host_baselines"  # likewise {host: ids}, of its node efficiency
OF_SERVERS = ("server_gpus", "server_hosts")  # where servers are follows from where ranks are
FEWEST_FREEDOM = 3  # degrees of freedom below which the scatter between runs is not known
# Members differ where their rates vary by more than this multiple of what noise explains; of equal GPUs one in four does.
DIFFER = 1.5


class Baselines:
    """The runs on one GPU of a study, found by what they must share with others."""

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Sort them by their condition; runs of cells that one GPU cannot tell apart are runs of one baseline.

        `judged`: the scatter between runs is that of the study; otherwise what a record states of it.
        """
        self._study, self._judged = study, judged
        together: dict[Any, dict[Member, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        hosts: dict[Any, dict[Member, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        alike: dict[Any, list[Runs]] = defaultdict(list)
        for runs in study.timed:
            alike[_kind(runs)].append(runs)
            if len(runs.cell.hosts) == 1:
                hosts[_condition_of_host(runs)][runs.cell.hosts[0]].append(runs)
            if runs.world_size == 1:
                together[_condition(runs)][runs.gpus[0]].append(runs)
        self._known = {
            key: {gpu: merged(one) for gpu, one in members.items()}
            for key, members in together.items()
        }
        self._hosts = {
            key: {host: merged(one) for host, one in found.items()} for key, found in hosts.items()
        }
        scatters = {
            kind: between_runs(members, IMAGES_PER_SECOND) for kind, members in alike.items()
        }
        self._noise = {
            kind: noise for kind, (noise, freedom) in scatters.items() if freedom >= FEWEST_FREEDOM
        }
        # A study may have thousands of records with equal baselines: what these give is computed once.
        self._members: dict[int, dict[Member, Runs]] = {}
        self._log_slowest: dict[tuple[object, ...], float] = {}

    def of(self, runs: Runs) -> dict[Member, Runs]:
        """Return {GPU: its runs alone} for the members of a subset that were measured alone."""
        if id(runs) not in self._members:
            known = self._known.get(_condition(runs), {})
            self._members[id(runs)] = {gpu: known[gpu] for gpu in runs.gpus if gpu in known}
        return self._members[id(runs)]

    def of_hosts(self, runs: Runs) -> dict[Member, Runs]:
        """Return {host: its runs alone with the same GPUs} of a cell on several hosts; empty unless every one was measured."""
        hosts = runs.cell.hosts
        known = self._hosts.get(_condition_of_host(runs), {}) if len(hosts) > 1 else {}
        return {host: known[host] for host in hosts} if known.keys() >= {*hosts} else {}

    def node_efficiency(self, record: Record) -> float | None:
        """Return rate ÷ (hosts × slowest host alone) of one record; None unless every one of several hosts was measured."""
        one = self._study.single(record)
        alone = self.of_hosts(one)
        if one.median_log_rate is None or not alone:
            return None
        return math.exp(one.median_log_rate - log_slowest(alone, self.noise(one))) / len(alone)

    def noise(self, runs: Runs) -> float | None:
        """Return the standard deviation of the logarithm of images/s between runs of cells like these; None if not known."""
        if not self._judged:
            noise = runs.records[0].checks.get(NOISE)
            return noise if isinstance(noise, float) else None
        return self._noise.get(_kind(runs))

    def efficiency(self, record: Record) -> Efficiency | None:
        """Return the efficiency of one record; None for one GPU, without a rate or without any baseline."""
        one = self._study.single(record)
        if one.world_size == 1 or one.median_log_rate is None:
            return None
        alone = self.of(one)
        if not alone:
            return None
        noise = self.noise(one)
        same = noise, *map(id, alone.values())
        if same not in self._log_slowest:
            self._log_slowest[same] = log_slowest(alone, noise)
        return efficiency(one.median_log_rate, self._log_slowest[same], one.cell, alone)

    def at_equal_clocks(self, record: Record, share: Efficiency | None) -> Efficiency | None:
        """Return the efficiency `share` of a record as if the GPUs had the SM clock that the slowest member has alone.

        A rate is taken to follow the clock. None where the efficiency or a clock is not known.
        """
        one = self._study.single(record)
        ratio = clock_ratio(one, self.of(one).values())
        return (
            None
            if share is None or ratio is None
            else Efficiency(share * ratio, share.of, share.unit)
        )

    def facts(self, record: Record) -> dict[str, object]:
        """Return what the efficiency of a record rests on: ids of the records of its baselines, and the noise if it is known."""
        one = self._study.single(record)
        ids = {
            str(gpu): [record.record_id for record in runs.records]
            for gpu, runs in self.of(one).items()
        }
        hosts = {
            host: [record.record_id for record in runs.records]
            for host, runs in self.of_hosts(one).items()
        }
        noise = self.noise(one)
        found: dict[str, object] = {BASELINES: ids, HOST_BASELINES: hosts, NOISE: noise}
        return {name: value for name, value in found.items() if value or name == BASELINES}


def efficiency(
    log_rate: float, log_alone: float, cell: Cell, alone: Iterable[Member]
) -> Efficiency:
    """Return rate ÷ (N × slowest alone), of the logarithms of both rates, and which members were measured alone."""
    return _marked(math.exp(log_rate - log_alone) * (1 / cell.world_size), cell, alone)


def _marked(value: float, cell: Cell, alone: Iterable[Member]) -> Efficiency:
    known = set(alone)
    members = tuple(gpu for gpu in cell.members if gpu in known)
    return Efficiency(value, () if len(members) == cell.world_size else members, unit(cell.device))


def stated(record: Record) -> Efficiency | None:
    """Return the efficiency that a record states, and of which members; None where it does not name its baselines."""
    value, ids = record.metrics.get(EFFICIENCY), record.checks.get(BASELINES)
    if value is None or not isinstance(ids, Mapping):
        return None
    return _marked(value, record.cell, [gpu for gpu in record.cell.members if str(gpu) in ids])


def log_slowest(members: Mapping[Member, Runs], noise: float | None) -> float:
    """Return the logarithm of the slowest of several rates alone, without the bias of the least of noisy numbers.

    The rates are drawn to their mean by √(1 − DIFFER · variance of noise ÷ their variance), so that they vary as much as the
    true rates do (constrained empirical Bayes, Louis 1984, Ghosh 1992); the slowest of these counts. Members that do not
    differ beyond noise all have the mean. Without a known noise it is the slowest as measured.
    """
    rates = [rate for runs in members.values() if (rate := runs.median_log_rate) is not None]
    least, mean = min(rates), statistics.fmean(rates)
    if noise is None or len(rates) == 1:
        return least
    errors = noise**2 * statistics.fmean(
        of_median(len(runs.values(IMAGES_PER_SECOND))) for runs in members.values()
    )
    variance = statistics.variance(rates)
    return (
        mean
        if variance <= DIFFER * errors
        else mean + math.sqrt(1 - DIFFER * errors / variance) * (least - mean)
    )


def _kind(runs: Runs) -> Any:
    """Return a key that is equal for cells whose runs scatter alike."""
    names = ("model.name", "optimize", "precision", "device")
    return tuple(runs.request.get(name) for name in names), runs.provenance["machine"]


def clock_ratio(runs: Runs, alone: Iterable[Runs]) -> float | None:
    """Return the SM clock of the slowest member alone ÷ that of a subset; None where one of them was not sampled."""
    timed = [one for one in alone if one.median_log_rate is not None]
    slowest = min(timed, key=lambda one: one.median_log_rate or 0.0, default=None)
    clocks = None if slowest is None else (slowest.clock_mhz, runs.clock_mhz)
    return clocks[0] / clocks[1] if clocks and clocks[0] and clocks[1] else None


def _condition(runs: Runs) -> Any:
    """Return a key that is equal for a subset and its baselines."""
    follows = follows_from_gpus(runs)
    asked = frozenset(
        item for item in runs.request.items() if not is_irrelevant_alone(item[0], follows)
    )
    around = frozenset(
        item for item in runs.provenance.items() if not is_irrelevant_alone(item[0], follows)
    )
    return asked, around


def _condition_of_host(runs: Runs) -> Any:
    """Return a key that is equal for a cell on several hosts and those on one with the same GPUs.

    One GPU uses neither NCCL's settings nor links; several of one host do.
    """
    if len(runs.cell.gpus) == 1:
        return runs.cell.gpus, _condition(runs)
    left_out = (*follows_from_gpus(runs), CONNECTIONS)
    return runs.cell.gpus, *(
        frozenset(item for item in one.items() if item[0] not in left_out)
        for one in (runs.request, runs.provenance)
    )


def is_irrelevant_alone(name: str, follows: Iterable[str]) -> bool:
    """Tell whether an option may differ between a cell and its baseline: one GPU uses neither NCCL's settings nor links."""
    return name in follows or name.startswith("nccl.") or name == CONNECTIONS


def follows_from_gpus(runs: Runs) -> tuple[str, ...]:
    """Return what differs between the points of one curve because their GPUs do; in strong scaling the images per rank too."""
    return (*OF_SERVERS, "batch_size") if runs.strong else OF_SERVERS
