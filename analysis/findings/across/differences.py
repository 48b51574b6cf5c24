"""The same cells in two studies: by how much they differ, and whether their runs show it.

Two studies are not measured in turn. The test takes the scatter between runs inside each study (its noise floor) and nothing
else, so a change of the machine between them looks like one of the software. All cells are one family, held at 5 % by Holm's
method.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

from analysis.findings.across.asked import CellId, cell_id, names
from analysis.findings.across.measured import MeasuredCells, MeasuredNumber, NumberDifference, main_metric
from analysis.findings.across.sides import Side
from analysis.findings.comparisons import POWER
from analysis.findings.model import Estimate, Member
from analysis.findings.next_run.interval import LEVEL, WIDEST
from analysis.findings.runs import Runs
from analysis.statistics.holm import significant
from benchmarks.record.metrics import metric as entry_of

FASTER, SLOWER, EQUAL, UNKNOWN = "faster", "slower", "no difference seen", "cannot tell"
BY_CHANCE = "its own interval excludes 0, but among this many cells that can be chance"
NO_FLOOR = "how far runs differ is not known in {}: too few runs of equal cells (add repeats=3)"
SIDES = ("the first study", "the second study")


@dataclass(frozen=True)
class CellDifference:
    """One cell in two studies; the second against the first."""

    name: str  # for people
    gpus: tuple[Member, ...]
    metric: str  # by which it is judged
    first: Mapping[str, MeasuredNumber]  # {metric: number}
    second: Mapping[str, MeasuredNumber]
    steps: Mapping[str, NumberDifference]  # of the numbers that both have
    verdict: str  # of the second: FASTER, SLOWER, EQUAL, UNKNOWN
    smallest: float | None  # the smallest change of the metric that these runs could have shown, as a share
    why: str = ""  # why there is no verdict, or what qualifies it
    doubts: str = ""  # what checks said of its runs

    @property
    def change(self) -> Estimate | None:
        """The change of the rate as a share of the first: more is faster, also where the metric is a time."""
        step = self.steps.get(self.metric)
        if step is None:
            return None
        turned = NumberDifference(-step.value, step.error, step.freedom, step.logarithm)
        return (turned if entry_of(self.metric).less_is_better else step).estimate()

    def is_regression(self, limit: float) -> bool:
        """Tell whether the second is slower, by a verdict and by `limit` or more, a share."""
        return self.verdict == SLOWER and self.change is not None and -self.change.value >= limit


@dataclass(frozen=True)
class Differences:
    """Every cell that two studies have both, and what only one of them has."""

    cells: tuple[CellDifference, ...]
    only_first: tuple[str, ...]  # names of cells, some with a reason
    only_second: tuple[str, ...]
    in_turn: bool  # whether their sweeps were measured in turn


def differences(first: Sequence[Side], second: Sequence[Side]) -> Differences:
    """Return how the cells of two studies differ; each may be of several machines."""
    one, other = (_runs_by_cell(sides) for sides in (first, second))
    named = names([*one, *(cell for cell in other if cell not in one)])
    both = [cell for cell in one if cell in other]
    numbers = {id(side.study): MeasuredCells(side.study) for side in (*first, *second)}
    found = [_difference(named[cell], one[cell], other[cell], numbers) for cell in both]
    return Differences(
        _judged(found),
        tuple(_alone(named[cell], cell, second) for cell in one if cell not in other),
        tuple(_alone(named[cell], cell, first) for cell in other if cell not in one),
        in_turn(first, second),
    )


@dataclass(frozen=True)
class CellOnSide:
    """A cell as one side measured it."""

    side: Side
    runs: Runs
    numbers: Mapping[str, MeasuredNumber]
    against: CellDifference | None  # its difference to the first side that has the cell; None for that side itself


@dataclass(frozen=True)
class SharedCell:
    """A cell that several sides measured."""

    name: str
    gpus: tuple[Member, ...]
    metric: str  # by which it is judged; empty: none that two sides have
    places: tuple[CellOnSide, ...]  # in the order of the sides


def side_by_side(sides: Sequence[Side]) -> tuple[SharedCell, ...]:
    """Return every cell that two sides or more have, the others against the first of them; all their tests are one family."""
    by_side = [_runs_by_cell([side]) for side in sides]
    cells = dict.fromkeys(cell for found in by_side for cell in found)
    places = {cell: [found[cell] for found in by_side if cell in found] for cell in cells}
    shared = {cell: found for cell, found in places.items() if len(found) > 1}
    named, numbers = names([*shared]), {id(side.study): MeasuredCells(side.study) for side in sides}
    found = {
        cell: [_difference(named[cell], each[0], one, numbers) for one in each[1:]] for cell, each in shared.items()
    }
    judged = iter(_judged([one for each in found.values() for one in each]))
    made = []
    for cell, each in shared.items():
        against = [None, *(next(judged) for _ in each[1:])]
        on_sides = tuple(
            CellOnSide(side, runs, numbers[id(side.study)].of(runs), difference)
            for ((side, runs), difference) in zip((one[-1] for one in each), against, strict=True)
        )
        metric = next((one.metric for one in found[cell] if one.metric), "")
        made.append(SharedCell(named[cell], cell[0], metric, on_sides))
    return tuple(made)


Found = list[tuple[Side, Runs]]


def _runs_by_cell(sides: Sequence[Side]) -> dict[CellId, Found]:
    """Return the runs of each cell; several where machines or versions of one study have it."""
    found: dict[CellId, Found] = {}
    for side in sides:
        for runs in side.study.runs:
            found.setdefault(cell_id(runs.cell, side.hosts), []).append((side, runs))
    return found


def _difference(name: str, one: Found, other: Found, numbers: Mapping[int, MeasuredCells]) -> CellDifference:
    """Return a difference without a verdict; `why` says why it can get none."""
    (side, first), (other_side, second) = one[-1], other[-1]
    left, right = numbers[id(side.study)].of(first), numbers[id(other_side.study)].of(second)
    metric = next((each for each in (main_metric(first), main_metric(second)) if each in left and each in right), "")
    steps = {
        each: NumberDifference.between(left[each], right[each])
        for each in left
        if each in right and _alike(left[each], right[each])
    }
    several = [words for words, found in zip(SIDES, (one, other), strict=True) if len(found) > 1]
    unknown = [
        words for words, found in zip(SIDES, (left, right), strict=True) if metric and found[metric].error is None
    ]
    why = ""
    if not metric:
        why = "no rate that both measured"
    elif several:
        why = f"{several[0]} has this cell on several machines or with several versions; the last is shown"
    elif unknown:
        why = NO_FLOOR.format("either study" if len(unknown) > 1 else unknown[0])
    return CellDifference(name, first.gpus, metric, left, right, steps, UNKNOWN, None, why, _doubts(first, second))


def _alike(one: MeasuredNumber, other: MeasuredNumber) -> bool:
    """Tell whether two numbers are of the same kind: efficiencies may be against some of the members alone."""
    return getattr(one.value, "of", ()) == getattr(other.value, "of", ())


def _doubts(first: Runs, second: Runs) -> str:
    """Return `suspect in the second study: noisy`; empty where no check cast doubt."""
    said = []
    for words, runs in zip(SIDES, (first, second), strict=True):
        codes = dict.fromkeys(
            code for record in runs.records if record.validity.verdict == "suspect" for code in record.validity.against
        )
        said += [f"suspect in {words}: {', '.join(codes)}"] * bool(codes)
    return "; ".join(said)


def _judged(found: Sequence[CellDifference]) -> tuple[CellDifference, ...]:
    """Give a verdict to every cell that can have one."""
    tested = [one.steps[one.metric] for one in found if not one.why]
    level = 1 - LEVEL
    seen = significant(np.array([step.chance for step in tested], dtype=float), [2] * len(tested), level)
    verdicts = iter(zip(tested, seen, strict=True))
    return tuple(one if one.why else _verdict(one, *next(verdicts), level / max(1, len(tested))) for one in found)


def _verdict(one: CellDifference, step: NumberDifference, is_seen: bool, level: float) -> CellDifference:
    change = one.change
    assert step.error is not None and change is not None
    errors = stdtrit(step.freedom, 1 - level / 2) + stdtrit(step.freedom, POWER)
    smallest = math.expm1(min(errors * step.error, WIDEST))
    outside = change.low is not None and change.high is not None and not change.low <= 0 <= change.high
    verdict = (FASTER if change.value > 0 else SLOWER) if is_seen else EQUAL
    return replace(one, verdict=verdict, smallest=smallest, why=BY_CHANCE if outside and not is_seen else "")


def _alone(name: str, cell: CellId, others: Sequence[Side]) -> str:
    """Return the name of a cell that one study has alone; with the reason where the other's attempts cannot be used."""
    for side in others:
        for record, why in side.study.left_out:
            if not record.usable and cell_id(record.cell, side.hosts) == cell:
                return f"{name} (the other study's is not usable: {why})"
    return name


def in_turn(first: Sequence[Side], second: Sequence[Side]) -> bool:
    """Tell whether sweeps of two studies took turns: first, second, first, or the other way round."""
    starts: dict[tuple[bool, str], float] = {}
    for is_second, sides in ((False, first), (True, second)):
        for record in (record for side in sides for record in side.study.usable):
            key = is_second, record.sweep_id
            starts[key] = min(starts.get(key, math.inf), record.started_at)
    order = [key[0] for key in sorted(starts, key=lambda key: starts[key])]
    return sum(one != other for one, other in pairwise(order)) > 1
