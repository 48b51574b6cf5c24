"""The noise floor: how far runs of equal cells differ on one machine, for each metric. METHOD.md, "The noise floor".

It belongs to a group: machine, model, batch, precision, optimise, number of GPUs. Of every cell that ran at least twice
the squared differences from its own mean are added up. A study adds what its own records show to what the other studies
of its output_dir showed, which `noise_floor.json` keeps: a row for each study, group and metric, so that a study that is
read again counts once. The launching process imports this module, so it needs neither numpy nor scipy.
"""

import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.record import Record, metrics

if TYPE_CHECKING:
    from analysis.findings.runs import Runs

FILE = "noise_floor.json"  # in output_dir, beside the studies
VERSION = 1
FEWEST = 3  # degrees of freedom below which the numbers of GPUs are pooled, and below which there is no floor
ANY_SIZE = 0  # world_size of the group in which the numbers of GPUs are pooled
# Of other records too, so that a record alone has no scatter of it: analysis.findings computes them.
OF_SEVERAL_RECORDS = ("scaling/efficiency", "comm/exposed_ms", "comm/hidden_share")


class Group(NamedTuple):
    """Cells whose runs scatter alike."""

    host: str
    gpus: str  # digest of the UUIDs of all GPUs of the host; '' where they are not known
    device: str
    model: str  # of a benchmark without a model its name and options
    batch_size: int
    precision: str
    optimize: str
    world_size: int  # number of GPUs of the cell

    @property
    def of_any_size(self) -> "Group":
        """The group in which the numbers of GPUs are pooled."""
        return self._replace(world_size=ANY_SIZE)


@dataclass(frozen=True)
class Scatter:
    """What runs of equal cells showed: their number, the degrees of freedom, the sum of squares."""

    runs: int = 0
    freedom: int = 0
    squares: float = 0.0  # of logarithms; of a metric that may be 0 or less in its own unit

    def __add__(self, other: "Scatter") -> "Scatter":
        """Return both together."""
        return Scatter(self.runs + other.runs, self.freedom + other.freedom, self.squares + other.squares)


@dataclass(frozen=True)
class Floor:
    """The standard deviation between runs of equal cells."""

    deviation: float  # of the logarithm; of a metric that may be 0 or less in its own unit
    freedom: int  # degrees of freedom
    runs: int  # that it rests on
    name: str  # equal for equal floors: what several numbers share is drawn once


Scatters = Mapping[tuple[Group, str], Scatter]  # by group and metric


class NoiseFloors:
    """The noise floors that a study's numbers rest on: from its own runs and from those of other studies."""

    def __init__(self, others: Scatters | None = None) -> None:
        """`others` is what other studies of the output_dir showed."""
        self._others = others or {}
        self._cells: list[tuple[Group, Sequence[Record]]] = []
        self._pooled: dict[str, dict[Group, Scatter]] = {}

    def learn(self, cells: Iterable[tuple["Runs", Sequence[Record]]]) -> None:
        """Take the runs of a study: (the runs of a cell, further records of the same cell)."""
        every = ((runs, [*runs.records, *more]) for runs, more in cells)
        self._cells += [(runs.group, records) for runs, records in every if len(records) > 1]
        self._pooled.clear()

    def of(self, group: Group, metric: str) -> Floor | None:
        """Return the floor of a group; with few runs that of its machine and model on any number of GPUs, else None."""
        if metric not in self._pooled:
            self._pooled[metric] = self._pool(metric)
        for chosen in (group, group.of_any_size):
            found = self._pooled[metric].get(chosen, Scatter())
            if found.freedom >= FEWEST:
                return Floor(math.sqrt(found.squares / found.freedom), found.freedom, found.runs, f"{metric} {chosen}")
        return None

    def own(self) -> Scatters:
        """Return what the study's own runs showed, for every metric that can have a floor."""
        names = {name for _, records in self._cells for record in records for name in record.metrics}
        found: dict[tuple[Group, str], Scatter] = {}
        for name in sorted(filter(has_floor, names)):
            found |= {(group, name): scatter for group, scatter in self._own(name).items() if scatter.freedom}
        return found

    def groups(self, metric: str) -> dict[Group, Floor]:
        """Return the floor of every group in which the study's own cells ran more than once."""
        known = {group: self.of(group, metric) for group in dict.fromkeys(group for group, _ in self._cells)}
        return {group: floor for group, floor in known.items() if floor is not None}

    def _own(self, metric: str) -> dict[Group, Scatter]:
        found: dict[Group, Scatter] = defaultdict(Scatter)
        for group, records in self._cells:
            found[group] += scatter_of(metric, records)
        return found

    def _pool(self, metric: str) -> dict[Group, Scatter]:
        found = defaultdict(Scatter, self._own(metric))
        for (group, name), scatter in self._others.items():
            if name == metric:
                found[group] += scatter
        for group, scatter in list(found.items()):
            found[group.of_any_size] += scatter
        return found


def has_floor(metric: str) -> bool:
    """Tell whether runs of equal cells say how far a metric scatters: not that of a count, nor of several records."""
    entry = metrics.known(metric)
    return metric not in OF_SEVERAL_RECORDS and (entry is None or entry.less_is_better is not None)


def scatter_of(metric: str, records: Iterable[Record]) -> Scatter:
    """Return the scatter of one metric over runs of one cell; none where fewer than two runs have it."""
    found = (record.metrics.get(metric) for record in records)
    values = [value for value in found if value is not None and math.isfinite(value)]
    if not metrics.metric(metric).signed:
        values = [math.log(value) for value in values if value > 0]
    if len(values) < 2:
        return Scatter()
    mean = math.fsum(values) / len(values)
    return Scatter(len(values), len(values) - 1, math.fsum((value - mean) ** 2 for value in values))


def group_of(record: Record) -> Group:
    """Return the group of a record's cell."""
    cell, environment = record.cell, record.environment
    gpu = environment.get("gpu")
    listed = gpu.get("gpus") if isinstance(gpu, Mapping) else None
    uuids = [str(one.get("uuid", "")) for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    model = cell.model.name
    if not cell.trains:
        model = json.dumps(cell.benchmark, sort_keys=True, default=str)
    return Group(
        str(environment.get("host", "")), _digest(tuple(sorted(uuids))), cell.device, model, cell.batch_size,
        cell.precision, cell.optimize, cell.world_size,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _digest(uuids: tuple[str, ...]) -> str:
    known = [uuid for uuid in uuids if uuid]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12] if known else ""


def read_floors(path: Path) -> dict[str, dict[tuple[Group, str], Scatter]]:
    """Return {study: what it showed} of a noise_floor.json; empty where there is none. A damaged row counts for nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    studies = content.get("studies") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(studies, dict):
        return {}
    return {study: dict(_rows(rows)) for study, rows in studies.items() if isinstance(rows, list)}


def _rows(rows: Sequence[Any]) -> Iterator[tuple[tuple[Group, str], Scatter]]:
    for row in rows:
        try:
            fields = dict(row)
            metric, runs, freedom, squares = (fields.pop(name) for name in ("metric", "runs", "freedom", "squares"))
            group = Group(**fields)
            types = [type(one) for one in (*group, metric, runs, freedom)]
        except (TypeError, ValueError, KeyError):
            continue
        right = types == [*Group.__annotations__.values(), str, int, int] and type(squares) in (int, float)
        if right and 0 < freedom < runs and 0 <= squares < math.inf:
            yield (group, metric), Scatter(runs, freedom, float(squares))


def of_other_studies(folder: Path) -> Scatters:
    """Return what the other studies beside a study's folder showed."""
    pooled: dict[tuple[Group, str], Scatter] = defaultdict(Scatter)
    for study, rows in read_floors(folder.absolute().parent / FILE).items():
        for key, scatter in rows.items() if study != folder.absolute().name else ():
            pooled[key] += scatter
    return pooled


def as_json(studies: Mapping[str, Scatters]) -> dict[str, Any]:
    """Return the content of noise_floor.json."""
    rows = {
        study: [{**group._asdict(), "metric": metric, **asdict(scatter)} for (group, metric), scatter in shown.items()]
        for study, shown in studies.items()
    }
    return {"version": VERSION, "studies": rows}
