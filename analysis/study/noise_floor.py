"""The noise floor: how far runs of equal cells differ on one machine, for each metric.

METHOD.md, "The noise floor". It belongs to a group: machine, model, batch, precision, optimise,
number of GPUs. Of every cell that ran at least twice the squared differences from its own mean are
added up. A study adds what its own records show to what the other studies of its output_dir showed
(noise_floor.json). The launching process imports this folder, so it needs neither numpy nor scipy.
"""

import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from analysis.study.provenance import gpus_of
from benchmarks.record import Record, metrics
from benchmarks.record.safe_files import open_to_read
from conf.cell import Cell

FEWEST = 3  # degrees of freedom below which the numbers of GPUs are pooled, or there is no floor
ANY_SIZE = 0  # world_size of the group in which the numbers of GPUs are pooled
# Metrics that rest on several records, so that one alone has no scatter of them.
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
FILE = "noise_floor.json"  # in output_dir, beside the studies
VERSION = 1
MOST_RUNS = 2**53  # above it is no count of runs


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
        squares = self.squares + other.squares
        return Scatter(self.runs + other.runs, self.freedom + other.freedom, squares)


@dataclass(frozen=True)
class Floor:
    """The standard deviation between runs of equal cells."""

    deviation: float  # of the logarithm; of a metric that may be 0 or less in its own unit
    freedom: int  # degrees of freedom
    runs: int  # that it rests on
    name: str  # metric and group: numbers of one floor share its uncertainty


Scatters = Mapping[tuple[FloorGroup, str], Scatter]  # by group and metric


class NoiseFloors:
    """The noise floors of a study: from its own runs and from those of other studies."""

    def __init__(self, scatters: Scatters | None = None) -> None:
        """`scatters` is what other studies of the output_dir showed."""
        self._of_other_studies = scatters or {}
        self._cells: list[tuple[FloorGroup, Sequence[Record]]] = []
        self._pooled: dict[str, dict[FloorGroup, Scatter]] = {}

    def learn(self, cells: Iterable[Sequence[Record]]) -> None:
        """Take what a study measured: the records of each cell."""
        for records in cells:
            if len(records) > 1:
                self._cells.append((group_of(records[0]), records))
        self._pooled.clear()

    def of(self, group: FloorGroup, metric: str) -> Floor | None:
        """Return the floor of a group; with few runs that of any number of GPUs, else None."""
        if metric not in self._pooled:
            pooled = self._own_scatters(metric)
            for (of_group, name), scatter in self._of_other_studies.items():
                if name == metric:
                    pooled[of_group] += scatter
            for of_group, scatter in list(pooled.items()):
                pooled[of_group.of_any_size] += scatter
            self._pooled[metric] = pooled
        for candidate in (group, group.of_any_size):
            scatter = self._pooled[metric].get(candidate, Scatter())
            # Runs equal to the last digit say nothing.
            if scatter.freedom >= FEWEST and scatter.squares > 0:
                deviation = math.sqrt(scatter.squares / scatter.freedom)
                return Floor(deviation, scatter.freedom, scatter.runs, f"{metric} {candidate}")
        return None

    def own(self) -> Scatters:
        """Return what the study's own runs showed, for every metric that can have a floor."""
        names: set[str] = set()
        for _, records in self._cells:
            for record in records:
                names |= record.metrics.keys()
        scatters = {}
        for name in sorted(filter(has_floor, names)):
            for group, scatter in self._own_scatters(name).items():
                if scatter.freedom:
                    scatters[group, name] = scatter
        return scatters

    def _own_scatters(self, metric: str) -> dict[FloorGroup, Scatter]:
        """Return the scatter of one metric over runs of one cell, where at least two have it."""
        signed = metrics.metric(metric).signed
        scatters: dict[FloorGroup, Scatter] = defaultdict(Scatter)
        for group, records in self._cells:
            values = []
            for record in records:
                value = record.metrics.get(metric, math.nan)
                if signed and math.isfinite(value):
                    values.append(value)
                elif 0 < value < math.inf:
                    values.append(math.log(value))
            scatter = Scatter()
            if len(values) > 1:
                mean = math.fsum(values) / len(values)
                squares = math.fsum((value - mean) ** 2 for value in values)
                scatter = Scatter(len(values), len(values) - 1, squares)
            scatters[group] += scatter
        return scatters


def has_floor(metric: str) -> bool:
    """Return whether equal runs tell how a metric scatters: no count, nor of several records."""
    if metric in OF_SEVERAL_RECORDS:
        return False
    entry = metrics.known(metric)
    return entry is None or entry.less_is_better is not None or metric == CLOCK


def group_of(record: Record) -> FloorGroup:
    """Return the group of a record's cell; cells on hosts of one model are of one machine."""
    facts = record.environment
    gpus = gpus_of(facts)
    if not record.cell.hosts:
        uuids = [str(gpu.get("uuid", "")) for gpu in gpus]
        return group_of_cell(record.cell, str(facts.get("host", "")), _digest(tuple(sorted(uuids))))
    models = {str(gpu.get("name", "")) for gpu in gpus}
    if not gpus:
        models = {str(facts.get("cpu", {}).get("model", ""))}
    return group_of_cell(record.cell, SEVERAL_HOSTS, _digest(tuple(sorted(models))))


def group_of_cell(cell: Cell, host: str = "", gpus: str = "") -> FloorGroup:
    """Return the group of a cell on one machine."""
    model = cell.model.name
    if not cell.trains:
        model = json.dumps(cell.benchmark, sort_keys=True, default=str)
    if cell.data:  # it scatters as its loader does
        model = f"{model} with data={cell.data['name']}"
    request = (cell.device, model, cell.batch_size, cell.precision, cell.optimize, cell.world_size)
    return FloorGroup(host, gpus, *request)


@functools.lru_cache(maxsize=64)
def _digest(names: tuple[str, ...]) -> str:
    lines = "\n".join(filter(None, names))
    if not lines:
        return ""
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


# noise_floor.json


# One row: the group, the metric, and its scatter.
ROW = msgspec.defstruct(
    "Row",
    [*get_type_hints(FloorGroup).items(), ("metric", str), *get_type_hints(Scatter).items()],
    forbid_unknown_fields=True,
)


def floors_of(path: Path) -> dict[str, Scatters]:
    """Return {study: what it showed} of a noise_floor.json; empty where there is none.

    A damaged row counts for nothing.

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
    version, studies = None, None
    if isinstance(content, dict):
        version, studies = content.get("version"), content.get("studies")
    if version != VERSION or not isinstance(studies, dict):
        raise ValueError(
            f"{path} is no noise floor that this version can read (version={version!r})"
        )
    floors: dict[str, Scatters] = {}
    for study, rows in studies.items():
        if not isinstance(rows, list):
            continue
        scatters = {}
        for content in rows:
            try:
                row = msgspec.structs.asdict(msgspec.convert(content, ROW))
            except (msgspec.ValidationError, OverflowError):
                continue
            metric, runs, freedom = row.pop("metric"), row.pop("runs"), row.pop("freedom")
            squares = row.pop("squares")
            if 0 < freedom < runs < MOST_RUNS and 0 <= squares < math.inf:
                scatters[FloorGroup(**row), metric] = Scatter(runs, freedom, squares)
        floors[study] = scatters
    return floors


def of_other_studies(folder: Path, without: Collection[str] = ()) -> Scatters:
    """Return what the other studies beside a study's folder showed, but those of `without`.

    Nothing where the file cannot be read.
    """
    folder = folder.absolute()
    try:
        studies = floors_of(folder.parent / FILE)
    except (OSError, ValueError):
        return {}
    pooled: dict[tuple[FloorGroup, str], Scatter] = defaultdict(Scatter)
    for study, scatters in studies.items():
        if study != folder.name and study not in without:
            for key, scatter in scatters.items():
                pooled[key] += scatter
    return pooled


def as_json(studies: Mapping[str, Scatters]) -> dict[str, Any]:
    """Return the content of noise_floor.json."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for study, scatters in studies.items():
        rows[study] = []
        for (group, metric), scatter in scatters.items():
            rows[study].append({**group._asdict(), "metric": metric, **asdict(scatter)})
    return {"version": VERSION, "studies": rows}
