"""How good held-out forecasts were, beside the null model and beside what was aimed at."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from analysis.prediction.draws import best, deviation
from analysis.prediction.holdout import HeldOut
from analysis.prediction.links.model import KnownLinks, NoLink, TimeCurve
from analysis.prediction.scatter import SIGMAS_AT_95

FEWEST_FOR_COVERAGE = 30  # held-out cells
FEWEST_STRATEGIES = 3  # to rank
MIB = 2**20
# What is aimed at: shares, of coverage the least and the most.
AIMS: dict[str, Any] = {
    "cost": 0.15,
    "of_null": 0.5,
    "step": 0.02,
    "large": 0.08,
    "small": 0.15,
    "coverage": (0.85, 0.97),
    "tau": 0.8,
}


@dataclass(frozen=True)
class Ranking:
    """Strategies and their variants of one workload on as many GPUs, by forecast and as measured."""

    name: str
    cells: int
    tau: float  # Kendall's, of the costs
    pairs: int  # whose measured costs differ by more than runs do
    tau_of_pairs: (
        float | None
    )  # of these alone: (in the measured order − against it) ÷ pairs; None without any


@dataclass(frozen=True)
class Summary:
    """Mean absolute errors as shares (MAPE), coverage, and τ; None where there are no cells for one."""

    cells: int
    not_forecast: int
    cost_cells: int
    cost: float | None
    null_cost: float | None
    cost_floor: float | None  # of a perfect forecast: runs scatter
    step: float | None
    null_step: float | None
    covered: int | None  # of the cells with an interval
    with_interval: int
    rankings: tuple[Ranking, ...]

    @property
    def coverage(self) -> float | None:
        """The share of cells inside their intervals."""
        return (
            self.covered / self.with_interval
            if self.covered is not None and self.with_interval
            else None
        )


def summary(held: Sequence[HeldOut]) -> Summary:
    """Return the summary of held-out cells."""
    made = [(one, one.forecast) for one in held if one.forecast is not None]
    costs = [
        (one.cost_ms, found) for one, found in made if one.cost_ms is not None and one.cost_ms > 0
    ]
    inside = [one.inside for one, _ in made if one.inside is not None]
    return Summary(
        cells=len(held),
        not_forecast=len(held) - len(made),
        cost_cells=len(costs),
        cost=_mape((measured, found.cost_ms) for measured, found in costs),
        null_cost=_mape((measured, found.null_cost_ms) for measured, found in costs),
        cost_floor=fmean(floors)
        if (floors := [one.floor for one, _ in made if one.floor is not None])
        else None,
        step=_mape((one.step_ms, found.step_ms) for one, found in made),
        null_step=_mape((one.step_ms, found.null_step_ms) for one, found in made),
        covered=sum(inside) if inside else None,
        with_interval=len(inside),
        rankings=rankings(held),
    )


def rankings(held: Iterable[HeldOut]) -> tuple[Ranking, ...]:
    """Return Kendall's τ of the costs of different strategies over one wire, for each workload and number of GPUs."""
    groups: dict[Any, dict[Any, list[HeldOut]]] = defaultdict(lambda: defaultdict(list))
    for one in held:
        question = one.cell.question
        if one.forecast is not None and one.cost_ms is not None:
            many = f"{question.ranks} {question.unit}s"
            where = str(question.workload), many, question.hosts, question.batch_size, question.wire
            groups[where][question.options].append(one)
    found = []
    for (workload, many, *_), strategies in groups.items():
        if len(strategies) >= FEWEST_STRATEGIES and (
            made := _ranking(f"{workload} on {many}", strategies.values())
        ):
            found.append(made)
    return tuple(found)


def _ranking(name: str, strategies: Iterable[Sequence[HeldOut]]) -> Ranking | None:
    """Return how a forecast orders strategies, each with its cells; None where all have one cost."""
    from scipy.stats import kendalltau  # takes long to import

    rows = []
    for cells in strategies:
        measured = [one.cell.cost_ms for one in cells if one.cell.cost_ms is not None]
        said = fmean(one.forecast.cost_ms for one in cells if one.forecast)
        rows.append(
            (
                said,
                fmean(map(best, measured)),
                math.hypot(*map(deviation, measured)) / len(measured),
            )
        )
    tau = float(kendalltau([said for said, *_ in rows], [ms for _, ms, _ in rows]).statistic)
    if not math.isfinite(tau):
        return None
    orders = [
        math.copysign(1, (one[0] - other[0]) * (one[1] - other[1])) if one[0] != other[0] else 0.0
        for one, other in itertools.combinations(rows, 2)
        if abs(one[1] - other[1]) > SIGMAS_AT_95 * math.hypot(one[2], other[2])
    ]
    return Ranking(name, len(rows), tau, len(orders), fmean(orders) if orders else None)


@dataclass(frozen=True)
class CollectiveError:
    """A measured time of a collective, and what fewer ranks said of it."""

    kind: str
    ranks: int
    from_ranks: int
    size_bytes: float
    measured_us: float
    said_us: float


def collective_errors(links: KnownLinks) -> tuple[CollectiveError, ...]:
    """Return every time of a collective on more ranks than the fewest, by what was measured on fewer ranks."""
    alone = [one for one in links.joined if not one.of_gradients]
    found = []
    for curve in alone:
        fewer = tuple(one for one in alone if one.ranks < curve.ranks)
        found += _errors(curve, replace(links, curves=fewer))
    return tuple(found)


def _errors(curve: TimeCurve, fewer: KnownLinks) -> list[CollectiveError]:
    """Return the errors of one curve by curves of fewer ranks; none where these lack its collective or wire."""
    known = [one.ranks for one in fewer.joined if (one.kind, one.wire) == (curve.kind, curve.wire)]
    found = []
    for size, us in zip(curve.sizes_bytes, curve.times_us, strict=True) if known else ():
        try:
            said = 1e3 * best(fewer.time(curve.kind, size, curve.ranks, curve.wire, curve.hosts).ms)
        except NoLink:
            continue
        found.append(CollectiveError(curve.kind, curve.ranks, max(known), size, us, said))
    return found


def mean_error(errors: Iterable[CollectiveError], large: bool) -> float | None:
    """Return the MAPE of collectives from 1 MiB, or below it."""
    return _mape(
        (one.measured_us, one.said_us) for one in errors if (one.size_bytes >= MIB) == large
    )


def _mape(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return the mean absolute error of (measured, said) as a share; None without any."""
    errors = [abs(said / measured - 1) for measured, said in pairs]
    return fmean(errors) if errors else None
