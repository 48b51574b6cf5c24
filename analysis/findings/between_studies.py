"""The same cells in two studies: by how much they differ, and whether their runs show it.

Two studies are not measured in turn. The test takes the scatter between runs inside each study (its noise floor) and nothing
else, so a change of the machine between them looks like one of the software. All cells are one family, held at 5 % by Holm's
method.
"""

import dataclasses
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
from scipy.special import stdtr, stdtrit

from analysis.findings.baselines import EFFICIENCY, OF_SERVERS, Baselines, efficiency
from analysis.findings.communication import COST, EXCHANGE, EXPOSED, Exposures
from analysis.findings.comparisons import POWER
from analysis.findings.scaling import log_speedup
from analysis.statistics.tests import significant
from analysis.study import names as labels
from analysis.study.draws import MEASURED, quantile
from analysis.study.estimates import Estimate, Member
from analysis.study.intervals import LEVEL, WIDEST, of_median
from analysis.study.names import BETWEEN
from analysis.study.noise_floor import of_other_studies
from analysis.study.provenance import (
    Machines,
    first_gpu,
    gpus_of,
    hardware,
    inherited,
    mapping,
    short_hardware,
)
from analysis.study.study import (
    OF_TRAINING,
    Runs,
    Study,
    chosen_options,
    refuse_no_folder,
    request_of,
    unreadable_files,
)
from benchmarks.record import CellFolder, Record, read_study, record_paths
from benchmarks.record.metrics import metric as entry_of
from benchmarks.record.metrics import place
from conf.cell import Cell, compress_hosts
from conf.options import to_text

# What was asked of a cell, in words that are the same for every version of Ringside, and names made of them.


AskedFor = frozenset[tuple[str, str]]  # (option, value)
CellId = tuple[
    tuple[Member, ...], AskedFor
]  # the GPUs in rank order, and what was asked; no GPUs: of a curve
ALWAYS = ("model.name", "strategy.name", "benchmark.name")
_WITH_DEFAULTS = ("strategy", "benchmark")


def cell_id(cell: Cell, hosts: Mapping[str, str] = MappingProxyType({})) -> CellId:
    """Return what makes cells of several studies the same cell.

    `hosts` gives hosts other names: those of one study are compared with those of another by their places.
    """
    request = {
        name: value for name, value in request_of(cell).items() if not name.endswith(".sha256")
    }
    for group in _WITH_DEFAULTS:
        chosen = {f"{group}.{option}" for option, _ in chosen_options(cell, group)} | {
            f"{group}.name"
        }
        request = {
            name: value
            for name, value in request.items()
            if name in chosen or not name.startswith(f"{group}.")
        }
    request.pop("benchmark.format", None)  # how the output is printed
    if "server_hosts" in request:
        request["server_hosts"] = to_text([hosts.get(host, host) for host in cell.server_hosts])
    placed = dataclasses.replace(cell, hosts=tuple(hosts.get(host, host) for host in cell.hosts))
    return placed.members, frozenset(request.items())


def curve_id(cell: Cell) -> CellId:
    """Return what makes curves of several studies the same curve: what their cells ask besides the GPUs."""
    _, asked = cell_id(cell)
    follows = OF_SERVERS if cell.global_batch_size is None else (*OF_SERVERS, "batch_size")
    return (), frozenset(item for item in asked if item[0] not in follows)


def names(cells: Iterable[CellId]) -> dict[CellId, str]:
    """Return a name for each cell: its model and strategy or its benchmark, what else varies among the cells, its GPUs.

    An option varies where two cells of one benchmark differ in it.
    """
    asked = {one: dict(one[1]) for one in cells}
    together: dict[str, list[dict[str, str]]] = defaultdict(list)
    for told in asked.values():
        together[told["benchmark.name"]].append(told)
    varied = {benchmark: _varied(members) for benchmark, members in together.items()}
    return {one: _name(one[0], told, varied[told["benchmark.name"]]) for one, told in asked.items()}


def _varied(members: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the options in which some of several cells differ."""
    known = {name for told in members for name in told}
    return {name for name in known if len({told.get(name) for told in members}) > 1}


def _name(gpus: Sequence[Member], told: Mapping[str, str], varied: Collection[str]) -> str:
    trains = told["model.name"] != "none"
    first = [told["model.name"], told["strategy.name"]] if trains else []
    if told["benchmark.name"] != "throughput":
        first.insert(0, told["benchmark.name"])
    others = [
        labels.worded(name, told[name])
        for name in sorted({*varied} & {*told} - {*ALWAYS})
        if not (name.startswith("model.") and "model.name" in varied)
        and (trains or name not in OF_TRAINING)
    ]
    return labels.BETWEEN.join([*first, *others, *([labels.gpu_list(gpus)] if gpus else [])])


# The numbers of one cell of one side, each with its standard error: what differences between studies are made of.


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

    @property
    def variance(self) -> float:
        """The square of the error; NaN where it is not known."""
        return math.nan if self.error is None else self.error**2


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
        variance = first.variance + second.variance
        value = second.value - first.value
        if math.isnan(variance):
            return NumberDifference(value, None, math.inf, first.logarithm)
        parts = sum(one.variance**2 / one.freedom for one in (first, second))
        return NumberDifference(
            value, math.sqrt(variance), variance**2 / parts if parts else math.inf, first.logarithm
        )

    @property
    def chance(self) -> float:
        """The two-sided p: the chance of so large a difference between equal cells. NaN without an error."""
        if self.error is None:
            return math.nan
        return (
            float(2 * stdtr(self.freedom, -abs(self.value) / self.error))
            if self.error
            else float(not self.value)
        )

    def estimate(self) -> Estimate:
        """Return the difference with its 95 % interval: of a rate or time as a share of the first, else in its own unit."""
        if self.error is None:
            return Estimate(self._plain(self.value))
        half = min(quantile(self.freedom) * self.error, WIDEST)
        return Estimate(*(self._plain(self.value + end) for end in (0.0, -half, half)))

    def _plain(self, value: float) -> float:
        return math.expm1(max(-WIDEST, min(value, WIDEST))) if self.logarithm else value


class MeasuredCells:
    """Finds the numbers of the cells of one side."""

    def __init__(self, study: Study) -> None:
        """`study` is of one machine."""
        self._baselines = Baselines(study)
        self._exposures = Exposures(study, self._baselines)

    def of(self, runs: Runs) -> dict[str, MeasuredNumber]:
        """Return {metric: number} of runs of one cell: its main rate, its exchange, its efficiency, what is exposed."""
        metrics = dict.fromkeys(one for one in (main_metric(runs), EXCHANGE) if one is not None)
        found = {name: measured(runs, name) for name in metrics if runs.logarithms(name)}
        if share := self._efficiency(runs):
            found[EFFICIENCY] = share
        if exposed := self._exposed(runs):
            found[EXPOSED] = exposed
        return found

    def _efficiency(self, runs: Runs) -> MeasuredNumber | None:
        speedup = log_speedup(runs, self._baselines)
        if speedup is None:
            return None
        share, draws = (
            efficiency(speedup.rate.value, speedup.slowest, runs.cell, speedup.alone),
            speedup.draws,
        )
        error = None if draws is None else float(np.std(draws[MEASURED])) * share
        return MeasuredNumber(share, speedup.rate.runs, error, speedup.freedom, logarithm=False)

    def _exposed(self, runs: Runs) -> MeasuredNumber | None:
        claimed = [self._exposures.of(record) for record in runs.records]
        values = [
            one.exposed_ms for one in claimed if one is not None and one.exposed_ms is not None
        ]
        if not values:
            return None
        known, floor = self._exposures.of_runs(runs), runs.floor(COST)
        error = None if known is None or floor is None else known.half_ms / quantile(floor.freedom)
        freedom = floor.freedom if floor is not None else math.inf
        error = None if error is None or math.isnan(error) else error
        return MeasuredNumber(
            statistics.median(values), len(values), error, freedom, logarithm=False
        )


def measured(runs: Runs, metric: str) -> MeasuredNumber:
    """Return the median of a rate or time over runs."""
    values, floor = runs.logarithms(metric), runs.floor(metric)
    if floor is None:
        return MeasuredNumber(statistics.median(values), len(values))
    error = floor.deviation * math.sqrt(of_median(len(values)))
    return MeasuredNumber(statistics.median(values), len(values), error, floor.freedom)


def main_metric(runs: Runs) -> str | None:
    """Return the metric in which a cell is compared: its benchmark's rate, else the first that the table of metrics marks."""
    if runs.log_rates:
        return runs.rate.metric
    names = dict.fromkeys(name for record in runs.records for name in record.metrics)
    marked = [
        name
        for name in names
        if entry_of(name).first and not entry_of(name).signed and runs.logarithms(name)
    ]
    return min(marked, key=place, default=None)


# Sides: what is set beside each other. A side is the part of one study that one machine measured, with a name that tells.


_LABELLED = re.compile(r"([^=/\\]+)=(.+)", re.DOTALL)  # LABEL=FOLDER
_ATTEMPT = re.compile(r"attempt-\d+")
Check = Callable[[Record, CellFolder], Record]


@dataclass(frozen=True)
class Asked:
    """A folder as the user named it."""

    label: str  # of the user; empty: none was given
    folder: Path

    @staticmethod
    def of(text: str) -> "Asked":
        """Read `FOLDER` or `LABEL=FOLDER`; a folder that exists is taken as it is."""
        found = None if Path(text).exists() else _LABELLED.fullmatch(text)
        return Asked(found[1].strip(), Path(found[2])) if found else Asked("", Path(text))


@dataclass(frozen=True)
class Side:
    """What one machine measured of one study."""

    name: str  # for people; no other side has it
    folder: Path  # of the study
    study: Study
    hosts: Mapping[str, str] = field(
        default_factory=dict
    )  # {host: its name beside other sides} where these have others


def open_sides(asked: Sequence[Asked], check: Check | None = None) -> list[list[Side]]:
    """Return the sides of each folder: one for each machine of each study in it. `check` is as open_study has it.

    Raises:
        OSError: it is no folder, or cannot be read.
        ValueError: it holds no record, or a study is named twice.
    """
    folders = [studies_in(one.folder) for one in asked]
    compared: set[Path] = set()
    for folder in (folder for of_one in folders for folder in of_one):
        if folder.resolve() in compared:
            raise ValueError(f"{folder}: named twice; accepted are different studies")
        compared.add(folder.resolve())
    found = [
        [(one, folder, study) for folder in of_one for study in _open(folder, compared, check)]
        for one, of_one in zip(asked, folders, strict=True)
    ]
    names = iter(_names([each for of_one in found for each in of_one]))
    sides = [[Side(next(names), folder, study) for _, folder, study in of_one] for of_one in found]
    hosts = {frozenset(_hosts(side.study)) for of_one in sides for side in of_one} - {frozenset()}
    if len(hosts) < 2:
        return sides
    return [
        [dataclasses.replace(side, hosts=_places(side.study)) for side in of_one]
        for of_one in sides
    ]


def _hosts(study: Study) -> list[str]:
    """Return the hosts that the cells of a study name, sorted."""
    return sorted({host for record in study.records for host in record.cell.every_host})


def _places(study: Study) -> dict[str, str]:
    """Return {host: host1, host2, …} by their places among the hosts of a study."""
    return {host: f"host{place}" for place, host in enumerate(_hosts(study), 1)}


def studies_in(folder: Path) -> list[Path]:
    """Return the folders of the studies in a folder: itself, or those that lie in it. Raises as `open_sides`."""
    refuse_no_folder(folder)
    cells = {
        path.parent.parent if _ATTEMPT.fullmatch(path.parent.name) else path.parent
        for path in record_paths(folder)
    }
    if not cells:
        raise ValueError(
            f"{folder}: holds no record; accepted is the folder of a study (<output_dir>/<study>)"
        )
    return sorted({cell.parent for cell in cells if cell.parent not in cells})


def _open(folder: Path, compared: set[Path], check: Check | None) -> list[Study]:
    """Return a Study for each machine of a study's folder; the noise floor of a study that is compared is its own alone."""
    records, errors = read_study(folder, check)
    beside = {one.name for one in compared if one.parent == folder.resolve().parent}
    others = of_other_studies(folder, beside)
    machines, parts = Machines(records), defaultdict[str, list[Record]](list)
    for record in records:
        parts[machines.name(record)].append(record)
    made = [Study.of(part, (), folder, others) for part in parts.values()] or [
        Study.of([], (), folder)
    ]
    return [dataclasses.replace(made[0], unreadable=unreadable_files(folder, errors)), *made[1:]]


def _names(sides: Sequence[tuple[Asked, Path, Study]]) -> list[str]:
    """Return a name for each side: its label, or its hardware and host; where that is not enough, what tells it from others."""
    facts = [_facts(*side) for side in sides]
    names: list[tuple[str, ...]] = [(one.label or _place(study),) for one, _, study in sides]
    for fact in range(len(facts[0])):
        values = defaultdict[tuple[str, ...], set[str]](set)
        for name, of_side in zip(names, facts, strict=True):
            values[name].add(of_side[fact])
        names = [
            (*name, of_side[fact]) if len(values[name]) > 1 else name
            for name, of_side in zip(names, facts, strict=True)
        ]
    return [BETWEEN.join(name) for name in names]


def _place(study: Study) -> str:
    """Return `4 × H200 on vm`."""
    first = study.records[0] if study.records else None
    if first and first.cell.hosts:
        return f"{short_hardware(first)} on {compress_hosts(_hosts(study))}"
    return (
        f"{short_hardware(first)} on {first.environment.get('host', 'unknown host')}"
        if first
        else "no machine"
    )


def _facts(asked: Asked, folder: Path, study: Study) -> tuple[str, ...]:
    """Return what may tell a side from others of the same name, what people know best first."""
    first = study.records[0] if study.records else None
    at = datetime.fromtimestamp(first.started_at if first else 0, timezone.utc)
    return (
        folder.resolve().name,
        f"{at:%Y-%m-%d}",
        first_gpu(first) if first else "",
        f"{at:%H:%M}",
        str(folder),
    )


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
    smallest: (
        float | None
    )  # the smallest change of the metric that these runs could have shown, as a share
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
    against: (
        CellDifference | None
    )  # its difference to the first side that has the cell; None for that side itself


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
        cell: [_difference(named[cell], each[0], one, numbers) for one in each[1:]]
        for cell, each in shared.items()
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


def _difference(
    name: str, one: Found, other: Found, numbers: Mapping[int, MeasuredCells]
) -> CellDifference:
    """Return a difference without a verdict; `why` says why it can get none."""
    (side, first), (other_side, second) = one[-1], other[-1]
    left, right = numbers[id(side.study)].of(first), numbers[id(other_side.study)].of(second)
    metric = next(
        (
            each
            for each in (main_metric(first), main_metric(second))
            if each in left and each in right
        ),
        "",
    )
    steps = {
        each: NumberDifference.between(left[each], right[each])
        for each in left
        if each in right and _alike(left[each], right[each])
    }
    several = [words for words, found in zip(SIDES, (one, other), strict=True) if len(found) > 1]
    unknown = [
        words
        for words, found in zip(SIDES, (left, right), strict=True)
        if metric and found[metric].error is None
    ]
    why = ""
    if not metric:
        why = "no rate that both measured"
    elif several:
        why = f"{several[0]} has this cell on several machines or with several versions; the last is shown"
    elif unknown:
        why = NO_FLOOR.format("either study" if len(unknown) > 1 else unknown[0])
    return CellDifference(
        name, first.gpus, metric, left, right, steps, UNKNOWN, None, why, _doubts(first, second)
    )


def _alike(one: MeasuredNumber, other: MeasuredNumber) -> bool:
    """Tell whether two numbers are of the same kind: efficiencies may be against some of the members alone."""
    return getattr(one.value, "of", ()) == getattr(other.value, "of", ())


def _doubts(first: Runs, second: Runs) -> str:
    """Return `suspect in the second study: noisy`; empty where no check cast doubt."""
    said = []
    for words, runs in zip(SIDES, (first, second), strict=True):
        codes = dict.fromkeys(
            code
            for record in runs.records
            if record.validity.verdict == "suspect"
            for code in record.validity.against
        )
        said += [f"suspect in {words}: {', '.join(codes)}"] * bool(codes)
    return "; ".join(said)


def _judged(found: Sequence[CellDifference]) -> tuple[CellDifference, ...]:
    """Give a verdict to every cell that can have one."""
    tested = [one.steps[one.metric] for one in found if not one.why]
    level = 1 - LEVEL
    seen = significant(
        np.array([step.chance for step in tested], dtype=float), [2] * len(tested), level
    )
    verdicts = iter(zip(tested, seen, strict=True))
    return tuple(
        one if one.why else _verdict(one, *next(verdicts), level / max(1, len(tested)))
        for one in found
    )


def _verdict(
    one: CellDifference, step: NumberDifference, is_seen: bool, level: float
) -> CellDifference:
    change = one.change
    assert step.error is not None and change is not None
    errors = stdtrit(step.freedom, 1 - level / 2) + stdtrit(step.freedom, POWER)
    smallest = math.expm1(min(errors * step.error, WIDEST))
    outside = (
        change.low is not None and change.high is not None and not change.low <= 0 <= change.high
    )
    verdict = (FASTER if change.value > 0 else SLOWER) if is_seen else EQUAL
    return replace(
        one, verdict=verdict, smallest=smallest, why=BY_CHANCE if outside and not is_seen else ""
    )


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


# What differs between machines and versions: GPUs, links, driver, NCCL, torch, CPU, host, date, commit, inherited variables.


MOST = 3  # values of one fact that are named
NOT_KNOWN = "not known"
GPUS = "GPU UUIDs"  # tells two machines with equal hardware and host names apart
# In the order in which they are told.
FACTS = (
    "GPUs", "links", "driver", "NCCL", "torch", "CUDA", "cuDNN", "Python", "CPU", "cores", "memory", "host", "date", GPUS,
    "SM clock, most", "commit", "code that measures",
)  # fmt: skip


def facts(study: Study) -> dict[str, str]:
    """Return {fact: what the records of a study say of it}; a variable that was inherited is a fact of its own name."""
    values: dict[str, Counter[str]] = {}
    for record in study.records:
        for name, value in _of_record(record).items():
            values.setdefault(name, Counter())[value] += 1
    every = len(study.records)
    found = {name: _said(counts, every - sum(counts.values())) for name, counts in values.items()}
    widest = max(study.records, key=lambda record: len(record.cell.every_host), default=None)
    if (
        widest is not None and widest.cell.hosts
    ):  # a cell on one of several hosts says nothing of the others
        found |= {
            name: value for name, value in _of_record(widest).items() if name in ("GPUs", "host")
        }
    return found


def differing(sides: Sequence[Side]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return {fact: its value on each side} of facts that differ, and {fact: value} of those that do not.

    A fact that a side's records do not say is NOT_KNOWN, and differs from nothing; a variable that was not set is `unset`.
    """
    each = [facts(side.study) for side in sides]
    names = [*FACTS, *sorted({name for one in each for name in one} - {*FACTS})]
    apart, shared = dict[str, list[str]](), dict[str, str]()
    for name in names:
        values = [one.get(name, NOT_KNOWN if name in FACTS else "unset") for one in each]
        known = [*dict.fromkeys(value for value in values if value != NOT_KNOWN)]
        if len(known) > 1:
            apart[name] = values
        elif known:
            shared[name] = known[0]
    return apart, shared


def same_machine(sides: Sequence[Side]) -> bool:
    """Tell whether all sides are of one machine, as far as hosts, CPUs and UUIDs of GPUs tell."""
    apart, _ = differing(sides)
    return not {"host", "GPUs", GPUS, "CPU", "cores"} & apart.keys()


def _of_record(record: Record) -> dict[str, str]:
    known = record.environment
    cpu, gpu, versions, git = (
        mapping(known.get(name)) for name in ("cpu", "gpu", "versions", "git")
    )
    gpus = gpus_of(known)
    memory, on_gpus = cpu.get("memory_bytes"), record.cell.device == "cuda"
    at = datetime.fromtimestamp(record.started_at, timezone.utc)
    clocks = {one["max_sm_mhz"] for one in gpus if "max_sm_mhz" in one}
    values = {
        "GPUs": hardware(record) if on_gpus else "none",
        "links": _links(mapping(known.get("links"))),
        "driver": gpu.get("driver"),
        "NCCL": versions.get("nccl") if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda") if on_gpus else None,
        "cuDNN": versions.get("cudnn") if on_gpus else None,
        "Python": versions.get("python"),
        "CPU": cpu.get("model"),
        "cores": cpu.get("cores"),
        "memory": f"{memory / 2**30:,.0f} GiB" if isinstance(memory, int | float) else None,
        "host": compress_hosts(sorted(record.cell.every_host)) or known.get("host"),
        GPUS: first_gpu(record) and f"{first_gpu(record)}…",
        "SM clock, most": f"{max(clocks)} MHz"
        if clocks and all(isinstance(one, int) for one in clocks)
        else None,
        "date": f"{at:%Y-%m-%d}",
        "commit": f"{str(git['commit'])[:7]}{', modified' if git.get('modified') else ''}"
        if git.get("commit")
        else None,
        "code that measures": known.get("code"),
    }
    return {
        name: str(value) for name, value in values.items() if value not in (None, "")
    } | inherited(record)


def _links(links: Mapping[str, object]) -> str:
    """Return `NV18 between all`, or `NV2 between 8 pairs, SYS between 12`."""
    counts = Counter(str(value) for value in links.values())
    if len(counts) == 1:
        return f"{next(iter(counts))} between all"
    pairs = [f"{name} between {number}" for name, number in counts.most_common(MOST)]
    return ", ".join(pairs) + (" pairs" if pairs else "")


def _said(counts: Counter[str], without: int) -> str:
    """Return a fact in words: its value, several values, or the first and the last of many."""
    if len(counts) > MOST:
        return f"{min(counts)} to {max(counts)}"
    values = [name for name, _ in groupby(sorted(counts))]
    return " or ".join(values) + (" or unset" if without else "")
