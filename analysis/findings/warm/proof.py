"""The proof that warm equals cold: of each cell, turns of new, warm, warm and new ranks (A B B A).

Both B were measured in the ranks that the first A began, so they share its accident. The turns do not: each has new processes.
A turn therefore gives one difference, mean of B minus mean of A, and the turns are the pairs of the test.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analysis.findings.communication.exposed import COST
from analysis.findings.labels import BETWEEN, gpu_list, label
from analysis.findings.runs import Runs
from analysis.findings.study import Study
from analysis.findings.warm.pools import place_of, was_warm
from analysis.statistics.equivalence import DIFFERENT, EQUIVALENT, NOT_ENOUGH, Equivalence, equivalence
from benchmarks.record import Record

RATE_MARGIN = 0.005  # of the rate
EXPOSED_MARGIN_MS = 0.05  # of what the strategy costs a step, and so of exposed communication
OF_TURN = 4  # A B B A


@dataclass(frozen=True)
class WarmColdTurn:
    """One turn of a cell: warm minus cold."""

    rate: float  # of the logarithms; more is faster
    cost_ms: float | None  # of the strategy in a step; None where it was not measured


@dataclass(frozen=True)
class WarmCold:
    """What the turns of one cell say."""

    label: str
    turns: tuple[WarmColdTurn, ...]
    left_out: int  # turns with a run that is not usable, or was not as warm or as cold as it was to be
    rate: Equivalence  # of the logarithms
    cost: Equivalence | None  # in ms; None where a turn has none

    @property
    def verdict(self) -> str:
        """Whether rate and cost are equivalent, one of them is different, or there is not enough to say."""
        found = [one.verdict for one in (self.rate, self.cost) if one is not None]
        return next(one for one in (DIFFERENT, NOT_ENOUGH, EQUIVALENT) if one in found)

    @property
    def needed(self) -> int | None:
        """The number of turns that would be enough to say; None where it is enough, or no such number is known."""
        wanted = [one.needed for one in (self.rate, self.cost) if one is not None and one.verdict == NOT_ENOUGH]
        return None if None in wanted else max(filter(None, wanted), default=None)


def warm_against_cold(study: Study) -> tuple[WarmCold, ...]:
    """Return what the study says of every cell that was measured in turns of warm and cold; empty where none was."""
    return tuple(found for runs in study.rated if (found := _of_cell(study, runs)) is not None)


def _of_cell(study: Study, runs: Runs) -> WarmCold | None:
    rates = {id(record): rate for record, rate in zip(runs.rated_records, runs.log_rates, strict=True)}
    turns: list[WarmColdTurn] = []
    left_out = 0
    for of_sweep in _by_sweep(runs.rated_records):
        found = [one for one in of_sweep if is_turn(one)]
        turns += [WarmColdTurn(_difference([rates[id(record)] for record in one]), _cost_ms(one)) for one in found]
        left_out += len(of_sweep) - len(found) if found else 0
    if not turns:
        return None
    costs = [one.cost_ms for one in turns if one.cost_ms is not None]
    return WarmCold(
        BETWEEN.join([gpu_list(runs.gpus), label(study, runs)]),
        tuple(turns),
        left_out,
        equivalence([one.rate for one in turns], math.log1p(RATE_MARGIN)),
        equivalence(costs, EXPOSED_MARGIN_MS) if len(costs) == len(turns) else None,
    )


def _by_sweep(records: Sequence[Record]) -> Iterator[list[list[Record]]]:
    """Yield for each sweep its records, those of four repeats together in the order of the repeats."""
    sweeps: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda one: one.cell.repeat):
        if record.cell.repeat >= 0:
            sweeps[record.sweep_id][record.cell.repeat // OF_TURN].append(record)
    for turns in sweeps.values():
        yield list(turns.values())


def is_turn(records: Sequence[Record]) -> bool:
    """Tell whether four records are a turn: the first began the ranks in which both others went on, the last had new ones."""
    if [was_warm(record) for record in records] != [False, True, True, False]:
        return False
    first, second, third, last = map(place_of, records)
    same = first is not None and second is not None and third is not None and first.pool == second.pool == third.pool
    return same and (last is None or (first is not None and last.pool != first.pool))


def _difference(values: Sequence[float]) -> float:
    """Return the mean of the second and third minus the mean of the first and fourth."""
    first, second, third, fourth = values
    return (second + third - first - fourth) / 2


def _cost_ms(records: Sequence[Record]) -> float | None:
    costs = [record.metrics[COST] for record in records if COST in record.metrics]
    return _difference(costs) if len(costs) == OF_TURN else None
