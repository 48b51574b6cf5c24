"""The noise floor: how far runs of equal cells differ on one machine, for each metric. METHOD.md, "The noise floor".

It belongs to a group: machine, model, batch, precision, optimise, number of GPUs. Of every cell that ran at least twice
the squared differences from its own mean are added up. A study adds what its own records show to what the other studies
of its output_dir showed (floor_file). The launching process imports this folder, so it needs neither numpy nor scipy.
"""

import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.study.provenance import gpus_of, mapping
from benchmarks.record import Record, metrics
from benchmarks.record.safe_files import open_to_read
from conf.cell import Cell

FEWEST = 3  # degrees of freedom below which the numbers of GPUs are pooled, and below which there is no floor
ANY_SIZE = 0  # world_size of the group in which the numbers of GPUs are pooled
# Of other records too, so that a record alone has no scatter of it: analysis.findings computes them.
OF_SEVERAL_RECORDS = (
    "scaling/efficiency",
    "scaling/node_efficiency",
    "scaling/efficiency_at_equal_clocks",
    "comm/exposed_ms",
    "comm/hidden_share",
    "trace/exposed_disagreement_ms",
)
SEVERAL_HOSTS = "hosts of nodes="  # stands for a host's name
CLOCK = "gpu/sm_mhz"  # neither way is better, but parts of a waterfall rest on it


class FloorGroup(NamedTuple):
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
    def asked(self) -> tuple[str | int, ...]:
        """What was asked of the cells, without the machine."""
        return self[2:]

    @property
    def of_any_size(self) -> "FloorGroup":
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
        return Scatter(
            self.runs + other.runs, self.freedom + other.freedom, self.squares + other.squares
        )


@dataclass(frozen=True)
class Floor:
    """The standard deviation between runs of equal cells."""

    deviation: float  # of the logarithm; of a metric that may be 0 or less in its own unit
    freedom: int  # degrees of freedom
    runs: int  # that it rests on
    name: str  # metric and group: numbers of one floor share its uncertainty


Scatters = Mapping[tuple[FloorGroup, str], Scatter]  # by group and metric


class NoiseFloors:
    """The noise floors that a study's numbers rest on: from its own runs and from those of other studies."""

    def __init__(self, others: Scatters | None = None) -> None:
        """`others` is what other studies of the output_dir showed."""
        self._others = others or {}
        self._cells: list[tuple[FloorGroup, Sequence[Record]]] = []
        self._pooled: dict[str, dict[FloorGroup, Scatter]] = {}
        self._floors: dict[tuple[FloorGroup, str], Floor | None] = {}

    def learn(self, cells: Iterable[Sequence[Record]]) -> None:
        """Take what a study measured: the records of each cell."""
        self._cells += [(group_of(records[0]), records) for records in cells if len(records) > 1]
        self._pooled.clear()
        self._floors.clear()

    def of(self, group: FloorGroup, metric: str) -> Floor | None:
        """Return the floor of a group; with few runs that of its machine and model on any number of GPUs, else None."""
        if (group, metric) not in self._floors:
            self._floors[group, metric] = self._find(group, metric)
        return self._floors[group, metric]

    def _find(self, group: FloorGroup, metric: str) -> Floor | None:
        if metric not in self._pooled:
            self._pooled[metric] = self._pool(metric)
        for chosen in (group, group.of_any_size):
            found = self._pooled[metric].get(chosen, Scatter())
            if (
                found.freedom >= FEWEST and found.squares > 0
            ):  # runs equal to the last digit say nothing
                return Floor(
                    math.sqrt(found.squares / found.freedom),
                    found.freedom,
                    found.runs,
                    f"{metric} {chosen}",
                )
        return None

    def own(self) -> Scatters:
        """Return what the study's own runs showed, for every metric that can have a floor."""
        names = {
            name for _, records in self._cells for record in records for name in record.metrics
        }
        found: dict[tuple[FloorGroup, str], Scatter] = {}
        for name in sorted(filter(has_floor, names)):
            found |= {
                (group, name): scatter
                for group, scatter in self._own(name).items()
                if scatter.freedom
            }
        return found

    def _own(self, metric: str) -> dict[FloorGroup, Scatter]:
        found: dict[FloorGroup, Scatter] = defaultdict(Scatter)
        for group, records in self._cells:
            found[group] += scatter_of(metric, records)
        return found

    def _pool(self, metric: str) -> dict[FloorGroup, Scatter]:
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
    judged = entry is None or entry.less_is_better is not None or metric == CLOCK
    return metric not in OF_SEVERAL_RECORDS and judged


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


def group_of(record: Record) -> FloorGroup:
    """Return the group of a record's cell. All cells that name hosts, on GPUs or CPUs of one model, are of one machine."""
    facts = record.environment
    gpus = gpus_of(facts)
    if record.cell.hosts:
        kinds = [str(one.get("name", "")) for one in gpus] or [
            str(mapping(facts.get("cpu")).get("model", ""))
        ]
        return group_of_cell(record.cell, SEVERAL_HOSTS, _digest(tuple(sorted({*kinds}))))
    uuids = [str(one.get("uuid", "")) for one in gpus]
    return group_of_cell(record.cell, str(facts.get("host", "")), _digest(tuple(sorted(uuids))))


def group_of_cell(cell: Cell, host: str = "", gpus: str = "") -> FloorGroup:
    """Return the group of a cell on one machine."""
    model = (
        cell.model.name if cell.trains else json.dumps(cell.benchmark, sort_keys=True, default=str)
    )
    if cell.data:  # it scatters as its loader does
        model = f"{model} with data={cell.data['name']}"
    return FloorGroup(
        host,
        gpus,
        cell.device,
        model,
        cell.batch_size,
        cell.precision,
        cell.optimize,
        cell.world_size,
    )


@functools.lru_cache(maxsize=64)
def _digest(uuids: tuple[str, ...]) -> str:
    known = [uuid for uuid in uuids if uuid]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12] if known else ""


# Read and make the content of `noise_floor.json`, which stands in output_dir beside the studies.


FILE = "noise_floor.json"
VERSION = 1
MOST_RUNS = 2**53  # above it is no count of runs


def floors_of(path: Path) -> dict[str, Scatters]:
    """Return {study: what it showed} of a noise_floor.json; empty where there is none. A damaged row counts for nothing.

    Raises:
        OSError, ValueError: it cannot be read, or is none that this version knows.
    """
    if not path.exists():
        return {}
    try:
        with open_to_read(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is no noise floor: its JSON is nested too deep") from None
    version, studies = (
        content.get(name) if isinstance(content, dict) else None for name in ("version", "studies")
    )
    if version != VERSION or not isinstance(studies, dict):
        raise ValueError(
            f"{path} is no noise floor that this version can read (version={version!r})"
        )
    return {study: dict(_rows(rows)) for study, rows in studies.items() if isinstance(rows, list)}


def _rows(rows: Sequence[Any]) -> Iterator[tuple[tuple[FloorGroup, str], Scatter]]:
    for row in rows:
        try:
            fields = dict(row)
            metric, runs, freedom, squares = (
                fields.pop(name) for name in ("metric", "runs", "freedom", "squares")
            )
            group = FloorGroup(**fields)
            types = [type(one) for one in (*group, metric, runs, freedom)]
            squares = float(squares) if type(squares) is int else squares
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
        right = (
            types == [*FloorGroup.__annotations__.values(), str, int, int]
            and type(squares) is float
        )
        if right and 0 < freedom < runs < MOST_RUNS and 0 <= squares < math.inf:
            yield (group, metric), Scatter(runs, freedom, squares)


def of_other_studies(folder: Path, without: Collection[str] = ()) -> Scatters:
    """Return what the other studies beside a study's folder showed; nothing where the file cannot be read.

    `without` are names of studies that are left out too.
    """
    folder, pooled = folder.absolute(), defaultdict[tuple[FloorGroup, str], Scatter](Scatter)
    try:
        studies = floors_of(folder.parent / FILE)
    except (OSError, ValueError):
        return {}
    for study, rows in studies.items():
        for key, scatter in rows.items() if study != folder.name and study not in without else ():
            pooled[key] += scatter
    return pooled


def as_json(studies: Mapping[str, Scatters]) -> dict[str, Any]:
    """Return the content of noise_floor.json."""
    rows = {
        study: [
            {**group._asdict(), "metric": metric, **asdict(scatter)}
            for (group, metric), scatter in shown.items()
        ]
        for study, shown in studies.items()
    }
    return {"version": VERSION, "studies": rows}
