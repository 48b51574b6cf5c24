"""How far runs of equal cells differ: measured medians as draws with that scatter."""

import math
import statistics
from collections.abc import Iterable, Sequence

from analysis.prediction.cells import Workload, workload_of
from analysis.prediction.draws import Values, about, near
from analysis.study.study import Runs, between_runs, pooled
from benchmarks.record.metrics import interval

STEP, COST, EXCHANGE = "step/ms_median", "strategy/cost_ms", "comm/exchange_ms"
# Scatter between runs where too few cells ran twice: shares, of the cost ms.
_OTHERWISE = {STEP: 0.003, EXCHANGE: 0.03, COST: 0.05}
_FEWEST_FREEDOM = 3
_LONGEST_MS = 1e9  # a damaged record may say more
SIGMAS_AT_95 = 1.96  # half a 95 % interval


class RunScatter:
    """How far runs of equal cells differ, over all cells of a workload."""

    def __init__(self, runs: Sequence[Runs]) -> None:
        self._alike: dict[Workload, list[Runs]] = {}
        self._shares: dict[tuple[Workload, str], float] = {}  # of COST in ms
        for one in runs:
            self._alike.setdefault(run_workload(one), []).append(one)

    def share(self, runs: Runs, metric: str) -> float:
        """Return the standard deviation of a metric of one run, as a share: between runs, or inside these if that is more."""
        key = run_workload(runs), metric
        if key not in self._shares:
            found, freedom = between_runs(self._alike[key[0]], metric)
            self._shares[key] = found if freedom >= _FEWEST_FREEDOM else _OTHERWISE[metric]
        return max(self._shares[key], _within_share(runs, metric))

    def cost_ms(self, runs: Runs) -> float:
        """Return the standard deviation of the cost of a strategy between runs, in ms: it may be 0 or less.

        That of the strategy where enough of its cells ran again, else that of all strategies of the workload.
        """
        key = run_workload(runs), f"{COST} {runs.strategy}"
        if key not in self._shares:
            alike = self._alike[key[0]]
            same = [one for one in alike if one.strategy == runs.strategy]
            self._shares[key] = _between_ms(same) or _between_ms(alike) or _OTHERWISE[COST]
        return self._shares[key]

    def drawn(self, runs: Runs, metric: str) -> Values | None:
        """Return the median of a metric as draws; None without it."""
        values = _believed(runs, metric)
        if not values:
            return None
        name = f"{metric} {runs.records[0].record_id}"
        if metric == COST:
            one_run = max(self.cost_ms(runs), _within_ms(runs))
            return near(statistics.median(values), one_run / math.sqrt(len(values)), name)
        return about(
            statistics.median(values), self.share(runs, metric) / math.sqrt(len(values)), name
        )


def _between_ms(alike: Iterable[Runs]) -> float | None:
    """Return the standard deviation of the cost between runs of equal cells, in ms; None where too few ran again."""
    deviation, freedom = pooled(_believed(one, COST) for one in alike)
    return deviation if freedom >= _FEWEST_FREEDOM else None


def _believed(runs: Runs, metric: str) -> list[float]:
    """Return the values of a metric in ms that are no damage."""
    return [
        one
        for one in runs.values(metric)
        if abs(one) <= _LONGEST_MS and (one > 0 or metric == COST)
    ]


def _within_ms(runs: Runs) -> float:
    """Return the standard error of one run's cost by the intervals inside the runs, in ms; 0 without any."""
    return _error([high - low for low, high in _inside(runs, COST)])


def _within_share(runs: Runs, metric: str) -> float:
    """Return the standard error of one run by the intervals inside the runs, as a share; 0 without any.

    Their ends lie at equal ratios, not at equal distances: those of a run with few and noisy steps are far apart.
    """
    return _error([math.log(high / low) for low, high in _inside(runs, metric) if low > 0])


def _inside(runs: Runs, metric: str) -> list[tuple[float, float]]:
    """Return the 95 % intervals inside the runs that are no damage."""
    made = (interval(metric, one.within_run) for one in runs.records)
    return [found for found in made if found and all(abs(end) <= _LONGEST_MS for end in found)]


def _error(widths: Sequence[float]) -> float:
    """Return the standard error that widths of 95 % intervals tell; 0 without any."""
    return (
        math.sqrt(statistics.fmean(width**2 for width in widths)) / 2 / SIGMAS_AT_95
        if widths
        else 0.0
    )


def run_workload(runs: Runs) -> Workload:
    """Return the workload of the runs of a cell."""
    return workload_of(runs.request, runs.records[0].model)
