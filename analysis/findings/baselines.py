"""Scaling efficiency against one-GPU baselines: the one algorithm that the terminal, the record, MLflow and the report use.

    efficiency = rate ÷ (N × rate of the slowest member alone)

The images per GPU are unchanged (weak scaling), or the images per step where `global_batch_size` was asked for (strong
scaling). The launching process imports this module, so it needs neither numpy nor scipy, which take a second to import.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from analysis.findings.provenance import CONNECTIONS
from analysis.findings.runs import Runs, merged
from analysis.findings.study import Study
from benchmarks.record import Record

EFFICIENCY = "scaling/efficiency"  # a metric
AT_EQUAL_CLOCKS = "scaling/efficiency_at_equal_clocks"  # a metric, where both clocks are known
BASELINES = "baselines"  # among a record's checks: {GPU: ids of the records that its efficiency was computed with}


class Baselines:
    """The runs on one GPU of a study, found by what they must share with others."""

    def __init__(self, study: Study) -> None:
        """Sort them by their condition; runs of cells that one GPU cannot tell apart are runs of one baseline."""
        self._study = study
        together: dict[Any, dict[int, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        for runs in study.timed:
            if runs.world_size == 1:
                together[_condition(runs)][runs.gpus[0]].append(runs)
        self._known = {key: {gpu: merged(one) for gpu, one in members.items()} for key, members in together.items()}

    def of(self, runs: Runs) -> dict[int, Runs]:
        """Return {GPU: its runs alone} for the members of a subset that were measured alone."""
        known = self._known.get(_condition(runs), {})
        return {gpu: known[gpu] for gpu in runs.gpus if gpu in known}

    def efficiency(self, record: Record) -> float | None:
        """Return the efficiency of one record; None for one GPU, without a rate or without any baseline."""
        one = self._study.single(record)
        if one.world_size == 1 or one.median_log_rate is None:
            return None
        alone = [runs.median_log_rate for runs in self.of(one).values() if runs.median_log_rate is not None]
        return efficiency(one.median_log_rate, min(alone), one.world_size) if alone else None

    def at_equal_clocks(self, record: Record) -> float | None:
        """Return the efficiency as if the GPUs had the SM clock that the slowest member has alone; None where one is not known.

        A rate is taken to follow the clock.
        """
        share, one = self.efficiency(record), self._study.single(record)
        ratio = clock_ratio(one, self.of(one).values())
        return None if share is None or ratio is None else share * ratio

    def record_ids(self, record: Record) -> dict[str, list[str]]:
        """Return {GPU: ids of the records of its baseline} for the members of a record's subset."""
        members = self.of(self._study.single(record))
        return {str(gpu): [one.record_id for one in runs.records] for gpu, runs in members.items()}


def efficiency(log_rate: float, log_slowest: float, world_size: int) -> float:
    """Return rate ÷ (N × slowest), of the logarithms of both rates."""
    return math.exp(log_rate - log_slowest) * (1 / world_size)


def clock_ratio(runs: Runs, alone: Iterable[Runs]) -> float | None:
    """Return the SM clock of the slowest member alone ÷ that of a subset; None where one of them was not sampled."""
    timed = [one for one in alone if one.median_log_rate is not None]
    slowest = min(timed, key=lambda one: one.median_log_rate or 0.0, default=None)
    clocks = None if slowest is None else (slowest.clock_mhz, runs.clock_mhz)
    return clocks[0] / clocks[1] if clocks and clocks[0] and clocks[1] else None


def _condition(runs: Runs) -> Any:
    """Return a key that is equal for a subset and its baselines."""
    follows = follows_from_gpus(runs)
    asked = frozenset(item for item in runs.request.items() if not is_irrelevant_alone(item[0], follows))
    around = frozenset(item for item in runs.provenance.items() if not is_irrelevant_alone(item[0], follows))
    return asked, around


def is_irrelevant_alone(name: str, follows: Iterable[str]) -> bool:
    """Tell whether an option may differ between a cell and its baseline: one GPU uses neither NCCL's settings nor links."""
    return name in follows or name.startswith("nccl.") or name == CONNECTIONS


def follows_from_gpus(runs: Runs) -> tuple[str, ...]:
    """Return what differs between the points of one curve because their GPUs do; in strong scaling the images per rank too."""
    return ("server_gpus", "batch_size") if runs.strong else ("server_gpus",)
