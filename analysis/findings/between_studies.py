"""The same cells in two studies: by how much they differ, and whether their runs show it.

Two studies are not measured in turn. The test takes the scatter between runs inside each study (its
noise floor) and nothing else, so a change of the machine between them looks like one of the
software. All cells are one family, held at 5 % by Holm's method.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from scipy.special import stdtr

from analysis.findings.baselines import EFFICIENCY, Baselines, efficiency
from analysis.findings.communication import COST, EXCHANGE, EXPOSED, Exposures
from analysis.findings.comparisons import smallest_change
from analysis.findings.scaling import log_speedup
from analysis.findings.study_inputs import StudyInput
from analysis.statistics.tests import significant
from analysis.study.conditions import chosen_options, differing_names, request_of
from analysis.study.draws import MEASURED
from analysis.study.estimates import Estimate, Member
from analysis.study.intervals import LEVEL, WIDEST, of_median, quantile
from analysis.study.names import BETWEEN, format_option, gpu_list
from analysis.study.runs import Runs
from analysis.study.study import OF_TRAINING, Study
from benchmarks.record.metrics import metric as entry_of
from benchmarks.record.metrics import place
from conf.cell import Cell
from conf.options import to_text

# The GPUs in rank order, and what was asked: (option, value) in words that are the same for every
# version of Ringside.
CellId = tuple[tuple[Member, ...], frozenset[tuple[str, str]]]
Measured = list[tuple[StudyInput, Runs]]  # one cell in each input of a study that has it
ALWAYS = ("model.name", "strategy.name", "benchmark.name")
FASTER, SLOWER, EQUAL, UNKNOWN = "faster", "slower", "no difference seen", "cannot tell"
BY_CHANCE = "its own interval excludes 0, but among this many cells that can be chance"
NO_FLOOR = "how far runs differ is not known in {}: too few runs of equal cells (add repeats=3)"
STUDIES = ("the first study", "the second study")


@dataclass(frozen=True)
class MeasuredNumber:
    """A number with its standard error; of rates and times both are those of the logarithm."""

    value: float
    runs: int
    error: float | None = None  # None: the scatter between runs is not known
    freedom: float = math.inf  # degrees of freedom of the error
    logarithm: bool = True

    @property
    def plain(self) -> float:
        """The number itself."""
        return math.exp(self.value) if self.logarithm else self.value


@dataclass(frozen=True)
class NumberDifference:
    """The difference of two measured numbers, second − first, on their own scale."""

    value: float
    error: float | None
    freedom: float
    logarithm: bool

    @staticmethod
    def between(first: MeasuredNumber, second: MeasuredNumber) -> "NumberDifference":
        """Return the difference; its degrees of freedom are Welch's."""
        value = second.value - first.value
        if first.error is None or second.error is None:
            return NumberDifference(value, None, math.inf, first.logarithm)
        variances = first.error**2, second.error**2
        parts = variances[0] ** 2 / first.freedom + variances[1] ** 2 / second.freedom
        freedom = sum(variances) ** 2 / parts if parts else math.inf
        return NumberDifference(value, math.sqrt(sum(variances)), freedom, first.logarithm)

    @property
    def chance(self) -> float:
        """The two-sided p: the chance of so large a difference between equal cells. NaN without an
        error.
        """
        if self.error is None:
            return math.nan
        if not self.error:
            return float(not self.value)
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))

    def estimate(self) -> Estimate:
        """Return the difference with its 95 % interval: of a rate or time as a share of the first,
        else in its own unit.
        """
        if self.error is None:
            return Estimate(self._plain(self.value))
        half = min(quantile(self.freedom) * self.error, WIDEST)
        return Estimate(*(self._plain(self.value + end) for end in (0.0, -half, half)))

    def _plain(self, value: float) -> float:
        return math.expm1(max(-WIDEST, min(value, WIDEST))) if self.logarithm else value


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
    smallest: float | None  # the smallest change of the metric that these runs could have shown
    why: str = ""  # why there is no verdict, or what qualifies it
    doubts: str = ""  # what checks said of its runs

    @property
    def change(self) -> Estimate | None:
        """The change of the rate as a share of the first: more is faster, also where the metric is
        a time.
        """
        step = self.steps.get(self.metric)
        if step is None:
            return None
        if entry_of(self.metric).less_is_better:
            step = replace(step, value=-step.value)
        return step.estimate()

    def is_regression(self, limit: float) -> bool:
        """Return whether the second is slower, by a verdict and by `limit` or more, a share."""
        return self.verdict == SLOWER and self.change is not None and -self.change.value >= limit


@dataclass(frozen=True)
class Differences:
    """Every cell that two studies have both, and what only one of them has."""

    cells: tuple[CellDifference, ...]
    only_first: tuple[str, ...]  # names of cells, some with a reason
    only_second: tuple[str, ...]
    in_turn: bool  # whether their sweeps were measured in turn


class MeasuredCells:
    """Finds the numbers of the cells of a study of one machine."""

    def __init__(self, study: Study) -> None:
        self._baselines = Baselines(study)
        self._exposures = Exposures(study, self._baselines)

    def of(self, runs: Runs) -> dict[str, MeasuredNumber]:
        """Return {metric: number} of runs of one cell: its main rate, its exchange, its efficiency,
        what is exposed.
        """
        numbers = {}
        for name in (main_metric(runs), EXCHANGE):
            if name is not None and runs.logarithms(name):
                numbers[name] = measured(runs, name)
        share = self._efficiency(runs)
        if share is not None:
            numbers[EFFICIENCY] = share
        exposed = self._exposed(runs)
        if exposed is not None:
            numbers[EXPOSED] = exposed
        return numbers

    def _efficiency(self, runs: Runs) -> MeasuredNumber | None:
        speedup = log_speedup(runs, self._baselines)
        if speedup is None:
            return None
        share = efficiency(speedup.rate.value, speedup.slowest, runs.cell, speedup.alone)
        draws = speedup.draws
        error = None if draws is None else float(np.std(draws[MEASURED])) * share
        return MeasuredNumber(share, speedup.rate.runs, error, speedup.freedom, logarithm=False)

    def _exposed(self, runs: Runs) -> MeasuredNumber | None:
        claims = [self._exposures.of(record) for record in runs.records]
        values = []
        for claim in claims:
            if claim is not None and claim.exposed_ms is not None:
                values.append(claim.exposed_ms)
        if not values:
            return None
        value, floor = statistics.median(values), runs.floor(COST)
        exposed = self._exposures.of_runs(runs)
        if floor is None or exposed is None:
            freedom = math.inf if floor is None else floor.freedom
            return MeasuredNumber(value, len(values), None, freedom, logarithm=False)
        error: float | None = exposed[1] / quantile(floor.freedom)
        if math.isnan(exposed[1]):
            error = None
        return MeasuredNumber(value, len(values), error, floor.freedom, logarithm=False)


def measured(runs: Runs, metric: str) -> MeasuredNumber:
    """Return the median of a rate or time over runs."""
    values, floor = runs.logarithms(metric), runs.floor(metric)
    if floor is None:
        return MeasuredNumber(statistics.median(values), len(values))
    error = floor.deviation * math.sqrt(of_median(len(values)))
    return MeasuredNumber(statistics.median(values), len(values), error, floor.freedom)


def main_metric(runs: Runs) -> str | None:
    """Return the metric in which a cell is compared: its benchmark's rate, else the first that the
    table of metrics marks.
    """
    if runs.log_rates:
        return runs.rate.metric
    names = dict.fromkeys(name for record in runs.records for name in record.metrics)
    marked = []
    for name in names:
        entry = entry_of(name)
        if entry.first and not entry.signed and runs.logarithms(name):
            marked.append(name)
    return min(marked, key=place, default=None)


def cell_id(cell: Cell, hosts: Mapping[str, str] = MappingProxyType({})) -> CellId:
    """Return what makes cells of several studies the same cell.

    `hosts` gives hosts other names: those of one study are compared with those of another by their
    places.
    """
    chosen = {"strategy.name", "benchmark.name"}
    for group in ("strategy", "benchmark"):
        chosen |= {f"{group}.{option}" for option, _ in chosen_options(cell, group)}
    request = {}
    for name, value in request_of(cell).items():
        is_default = name.startswith(("strategy.", "benchmark.")) and name not in chosen
        if not is_default and not name.endswith(".sha256"):
            request[name] = value
    request.pop("benchmark.format", None)  # how the output is printed
    if "server_hosts" in request:
        request["server_hosts"] = to_text([hosts.get(host, host) for host in cell.server_hosts])
    placed = dataclasses.replace(cell, hosts=tuple(hosts.get(host, host) for host in cell.hosts))
    return placed.members, frozenset(request.items())


def names(cells: Iterable[CellId]) -> dict[CellId, str]:
    """Return a name for each cell: its model and strategy or its benchmark, what else varies among
    the cells, its GPUs.

    An option varies where two cells of one benchmark differ in it.
    """
    requests = {cell: dict(cell[1]) for cell in cells}
    benchmarks: dict[str, list[dict[str, str]]] = defaultdict(list)
    for request in requests.values():
        benchmarks[request["benchmark.name"]].append(request)
    varied = {name: differing_names(members) for name, members in benchmarks.items()}
    return {
        cell: _name(cell, request, varied[request["benchmark.name"]])
        for cell, request in requests.items()
    }


def _name(cell: CellId, request: Mapping[str, str], varied: Sequence[str]) -> str:
    words = []
    if request["benchmark.name"] != "throughput":
        words.append(request["benchmark.name"])
    trains = request["model.name"] != "none"
    if trains:
        words += [request["model.name"], request["strategy.name"]]
    for name in sorted(varied):
        follows = name.startswith("model.") and "model.name" in varied
        is_shown = name in request and name not in ALWAYS and not follows
        if is_shown and (trains or name not in OF_TRAINING):
            words.append(format_option(name, request[name]))
    return BETWEEN.join([*words, gpu_list(cell[0])])


def differences(first: Sequence[StudyInput], second: Sequence[StudyInput]) -> Differences:
    """Return how the cells of two studies differ; each may be of several machines."""
    before, after = _runs_by_cell(first), _runs_by_cell(second)
    named = names([*before, *(cell for cell in after if cell not in before)])
    numbers = {id(each.study): MeasuredCells(each.study) for each in (*first, *second)}
    cells = []
    for cell in before:
        if cell in after:
            cells.append(_difference(named[cell], before[cell], after[cell], numbers))
    return Differences(
        _judged(cells),
        tuple(_alone(named[cell], cell, second) for cell in before if cell not in after),
        tuple(_alone(named[cell], cell, first) for cell in after if cell not in before),
        in_turn(first, second),
    )


def _runs_by_cell(inputs: Sequence[StudyInput]) -> dict[CellId, Measured]:
    cells: dict[CellId, Measured] = {}
    for each in inputs:
        for runs in each.study.runs:
            cells.setdefault(cell_id(runs.cell, each.hosts), []).append((each, runs))
    return cells


def _difference(
    name: str, before: Measured, after: Measured, cells: Mapping[int, MeasuredCells]
) -> CellDifference:
    """Return a difference without a verdict; `why` says why it can get none."""
    (first_input, first), (second_input, second) = before[-1], after[-1]
    left, right = cells[id(first_input.study)].of(first), cells[id(second_input.study)].of(second)
    metric = ""
    for each in (main_metric(second), main_metric(first)):
        if each in left and each in right:
            metric = each
    steps = {}
    for each, number in left.items():
        # Efficiencies may be against some of the members alone.
        if each in right and _against(number) == _against(right[each]):
            steps[each] = NumberDifference.between(number, right[each])
    sides = list(zip(STUDIES, (before, after), (left, right), strict=True))
    repeated = [study for study, inputs, _ in sides if len(inputs) > 1]
    why = ""
    if not metric:
        why = "no rate that both measured"
    elif repeated:
        why = f"{repeated[0]} has this cell on several machines or with several versions; the last is shown"
    else:
        unknown = [study for study, _, numbers in sides if numbers[metric].error is None]
        if unknown:
            why = NO_FLOOR.format("either study" if len(unknown) > 1 else unknown[0])
    doubts = _doubts(first, second)
    return CellDifference(name, first.gpus, metric, left, right, steps, UNKNOWN, None, why, doubts)


def _against(number: MeasuredNumber) -> tuple[Member, ...]:
    against: tuple[Member, ...] = getattr(number.value, "of", ())
    return against


def _doubts(first: Runs, second: Runs) -> str:
    """Return `suspect in the second study: noisy`; empty where no check cast doubt."""
    doubts = []
    for study, runs in zip(STUDIES, (first, second), strict=True):
        codes: dict[str, None] = {}
        for record in runs.records:
            if record.validity.verdict == "suspect":
                codes |= dict.fromkeys(record.validity.against)
        if codes:
            doubts.append(f"suspect in {study}: {', '.join(codes)}")
    return "; ".join(doubts)


def _judged(cells: Sequence[CellDifference]) -> tuple[CellDifference, ...]:
    tested = [cell for cell in cells if not cell.why]
    chances = np.array([cell.steps[cell.metric].chance for cell in tested], dtype=float)
    seen = iter(significant(chances, [2] * len(tested), 1 - LEVEL))
    judged = []
    for cell in cells:
        if cell.why:
            judged.append(cell)
            continue
        step, change, is_seen = cell.steps[cell.metric], cell.change, next(seen)
        assert change is not None and change.low is not None and change.high is not None
        verdict, why = EQUAL, ""
        if is_seen:
            verdict = FASTER if change.value > 0 else SLOWER
        elif not change.low <= 0 <= change.high:
            why = BY_CHANCE
        smallest = float(smallest_change(step.error, step.freedom, len(tested)))
        judged.append(replace(cell, verdict=verdict, smallest=smallest, why=why))
    return tuple(judged)


def _alone(name: str, cell: CellId, inputs: Sequence[StudyInput]) -> str:
    """Return the name of a cell that one study has alone; with the reason where the other's
    attempts cannot be used.
    """
    for each in inputs:
        for record, why in each.study.left_out:
            if not record.usable and cell_id(record.cell, each.hosts) == cell:
                return f"{name} (the other study's is not usable: {why})"
    return name


def in_turn(first: Sequence[StudyInput], second: Sequence[StudyInput]) -> bool:
    """Return whether sweeps of two studies took turns: first, second, first, or the other way
    round.
    """
    starts: dict[tuple[bool, str], float] = {}
    for is_second, inputs in ((False, first), (True, second)):
        for each in inputs:
            for record in each.study.usable:
                key = is_second, record.sweep_id
                starts[key] = min(starts.get(key, math.inf), record.started_at)
    order = [is_second for is_second, _ in sorted(starts, key=lambda key: starts[key])]
    return sum(before != after for before, after in pairwise(order)) > 1
