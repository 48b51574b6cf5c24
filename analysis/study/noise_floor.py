"""The noise floor: how far runs of equal cells differ on one machine, for each metric.

METHOD.md, "The noise floor". Of every cell that ran at least twice the squared differences from its
own mean are added up, by group; a study adds what the other studies of its output_dir showed
(noise_floor.json). The launching process imports this folder: no numpy, no scipy.
"""

import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from analysis.study.provenance import gpus_of
from analysis.text import join_words
from benchmarks.record import Record, metrics
from benchmarks.record.safe_files import open_to_read
from conf.cell import Cell

FEWEST = 2  # degrees of freedom below which a group has no floor of its own: one cell, three runs
FEWEST_LENT = 3  # … below which the runs of other groups are none either
ANY_SIZE, ANY_STRATEGY = 0, ""  # of the groups in which numbers of GPUs, and strategies, are pooled
SIGMA_AT_95 = 1.96  # half the 95 % interval of a normal value, in standard deviations
SUSPECT = "suspect"  # a verdict: such cells have their own runs alone
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
COST = "strategy/cost_ms"  # of the strategy in a step
CLOCK = "gpu/sm_mhz"  # neither way is better, but parts of a waterfall rest on it
FILE = "noise_floor.json"  # in output_dir, beside the studies
VERSION = 1
MOST_RUNS = 2**53  # above it is not a count of runs


class FloorGroup(NamedTuple):
    """Cells whose runs scatter alike."""

    host: str
    gpus: str  # digest of the UUIDs of all GPUs of the host; '' where they are not known
    strategy: str  # its name; '' of a benchmark without a model
    device: str
    model: str  # of a benchmark without a model its name and options
    batch_size: int
    precision: str
    optimize: str
    world_size: int  # number of GPUs of the cell

    @property
    def asked(self) -> tuple[str | int, ...]:
        """What was asked of the cells, without the machine and the strategy."""
        return self[3:]

    @property
    def wider(self) -> tuple["FloorGroup", "FloorGroup"]:
        """The groups that lend: of any number of GPUs, then of any strategy too."""
        of_any_size = self._replace(world_size=ANY_SIZE)
        return of_any_size, of_any_size._replace(strategy=ANY_STRATEGY)


@dataclass(frozen=True)
class Scatter:
    """What runs of equal cells showed: their number, the degrees of freedom, the sum of squares."""

    runs: int = 0
    freedom: int = 0
    squares: float = 0.0  # of logarithms; of a metric that may be 0 or less in its own unit

    def __add__(self, other: "Scatter") -> "Scatter":
        squares = self.squares + other.squares
        return Scatter(self.runs + other.runs, self.freedom + other.freedom, squares)

    @property
    def deviation(self) -> float:
        """The standard deviation; NaN without a degree of freedom."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else math.nan

    def floor(self, fewest: int, name: str) -> "Floor | None":
        """Return the floor that it gives; None below so many degrees of freedom."""
        if self.freedom < fewest or not self.squares:  # runs equal to the last digit say nothing
            return None
        return Floor(self.deviation, self.freedom, self.runs, name)


@dataclass(frozen=True)
class Floor:
    """The standard deviation between runs of equal cells."""

    deviation: float  # of the logarithm; of a metric that may be 0 or less in its own unit
    freedom: int  # degrees of freedom
    runs: int  # that it rests on
    name: str  # metric and group: numbers of one floor share its uncertainty
    lenders: tuple[FloorGroup, ...] = ()  # whose runs these are, where they are not the group's own

    @property
    def lent_by(self) -> str:
        """`kvstore_device on 1 GPU and none on 1 and 2 GPUs`; empty for the group's own floor."""
        sizes: dict[str, list[int]] = defaultdict(list)
        device = "GPU"
        for group in self.lenders:
            sizes[group.strategy or "the benchmark"].append(group.world_size)
            if group.device != "cuda":
                device = "CPU worker"
        parts = []
        for strategy, of_strategy in sorted(sizes.items()):
            plural = "" if of_strategy == [1] else "s"
            counts = join_words([*map(str, sorted(of_strategy))])
            parts.append(f"{strategy} on {counts} {device}{plural}")
        return join_words(parts)


Scatters = Mapping[tuple[FloorGroup, str], Scatter]  # by group and metric


class NoiseFloors:
    """The noise floors of a study: from its own runs and from those of other studies."""

    def __init__(self, scatters: Scatters | None = None) -> None:
        """`scatters` is what other studies of the output_dir showed."""
        self._of_other_studies = scatters or {}
        self._cells: list[tuple[FloorGroup, Sequence[Record]]] = []  # that ran more than once
        self._cell_of: dict[int, Sequence[Record]] = {}  # by id() of each of their records
        self._pooled: dict[str, dict[FloorGroup, _Pool]] = {}

    def learn(self, cells: Iterable[Sequence[Record]]) -> None:
        """Take what a study measured: the records of each cell."""
        for records in cells:
            if len(records) > 1:
                self._cells.append((group_of(records[0]), records))
                self._cell_of |= dict.fromkeys(map(id, records), records)
        self._pooled.clear()

    def of(self, record: Record, group: FloorGroup, metric: str) -> Floor | None:
        """Return the floor of a record's cell and its group; None where too little is known.

        A lent one is never below what the cell's own runs show, inside and between them. A suspect
        cell has the floor of its own runs alone.
        """
        records = self._cell_of.get(id(record), (record,))
        if any(is_suspect(run) for run in records if not run.drift):
            own = scatter_of(records, metric)
            return own.floor(FEWEST, f"{metric} {records[0].record_id}")
        pools = self._pools(metric)
        own = pools[group].scatter if group in pools else Scatter()
        floor = own.floor(FEWEST, f"{metric} {group}")
        for wider in group.wider:
            if floor is None and wider in pools:
                floor = pools[wider].scatter.floor(FEWEST_LENT, f"{metric} {wider}")
                if floor is not None:
                    deviation = max(floor.deviation, _least_deviation(records, metric))
                    lenders = tuple(pools[wider].lenders)
                    floor = replace(floor, deviation=deviation, freedom=FEWEST, lenders=lenders)
        return floor

    def _pools(self, metric: str) -> Mapping[FloorGroup, "_Pool"]:
        if metric not in self._pooled:
            pools: dict[FloorGroup, _Pool] = defaultdict(_Pool)
            scatters = list(self._own_scatters(metric).items())
            for (group, name), scatter in self._of_other_studies.items():
                if name == metric:
                    scatters.append((group, scatter))
            for group, scatter in scatters:
                for pool in dict.fromkeys((group, *group.wider)):
                    pools[pool].scatter += scatter
                    if scatter.freedom:
                        pools[pool].lenders[group] = None
            self._pooled[metric] = pools
        return self._pooled[metric]

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
        scatters: dict[FloorGroup, Scatter] = defaultdict(Scatter)
        for group, records in self._cells:
            steady = [record for record in records if not is_suspect(record)]
            scatters[group] += scatter_of(steady, metric)
        return scatters


@dataclass
class _Pool:
    scatter: Scatter = field(default_factory=Scatter)
    lenders: dict[FloorGroup, None] = field(default_factory=dict)  # groups with repeated cells


def is_suspect(record: Record) -> bool:
    """Return whether a check cast doubt on a record."""
    return record.validity.verdict == SUSPECT


def scatter_of(records: Sequence[Record], metric: str) -> Scatter:
    """Return the scatter of a metric over the runs of one cell."""
    signed, values = metrics.entry_of(metric).signed, []
    for record in records:
        value = record.metrics.get(metric, math.nan)
        if signed and math.isfinite(value):
            values.append(value)
        elif 0 < value < math.inf:
            values.append(math.log(value))
    if len(values) < 2:
        return Scatter()
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Scatter(len(values), len(values) - 1, squares)


def pooled_scatter(cells: Iterable[Sequence[Record]], metric: str) -> Scatter:
    """Return the scatter of a metric between runs of equal cells, over several cells."""
    return sum((scatter_of(records, metric) for records in cells), Scatter())


def _least_deviation(records: Sequence[Record], metric: str) -> float:
    """Return the standard deviation that the runs of a cell show, inside them or between them."""
    own, signed = scatter_of(records, metric), metrics.entry_of(metric).signed
    least = own.deviation if own.freedom else 0.0
    for record in records:
        ends = record.ends_within_run(metric)
        if ends is not None and signed:
            least = max(least, (ends[1] - ends[0]) / 2 / SIGMA_AT_95)
        elif ends is not None and 0 < ends[0] <= ends[1] < math.inf:
            least = max(least, math.log(ends[1] / ends[0]) / 2 / SIGMA_AT_95)
    return least


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
    model, strategy = cell.model.name, str(cell.strategy["name"])
    if not cell.trains:
        strategy = ANY_STRATEGY
        model = json.dumps(cell.benchmark, sort_keys=True, default=str)
    if cell.data:  # it scatters as its loader does
        model = f"{model} with data={cell.data['name']}"
    request = (cell.device, model, cell.batch_size, cell.precision, cell.optimize, cell.world_size)
    return FloorGroup(host, gpus, strategy, *request)


@functools.lru_cache(maxsize=64)
def _digest(names: tuple[str, ...]) -> str:
    lines = "\n".join(filter(None, names))
    if not lines:
        return ""
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


# One row: the group, the metric, and its scatter.
ROW = msgspec.defstruct(
    "Row",
    [*get_type_hints(FloorGroup).items(), ("metric", str), *get_type_hints(Scatter).items()],
    forbid_unknown_fields=True,
)


def floors_of(path: Path) -> dict[str, Scatters]:
    """Return {study: what it showed} of a noise_floor.json; empty where there is none.

    A damaged row counts for nothing.

    Raises OSError, ValueError: it cannot be read, or is none that this version knows.
    """
    if not path.exists():
        return {}
    try:
        with open_to_read(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not a noise floor: its JSON is nested too deep") from None
    version, studies = None, None
    if isinstance(content, dict):
        version, studies = content.get("version"), content.get("studies")
    if version != VERSION or not isinstance(studies, dict):
        raise ValueError(
            f"{path} is not a noise floor that this version can read (version={version!r})"
        )
    floors: dict[str, Scatters] = {}
    for study, rows in studies.items():
        if not isinstance(rows, list):
            continue
        scatters = {}
        for content in rows:
            try:
                row = msgspec.structs.astuple(msgspec.convert(content, ROW))
            except (ValueError, OverflowError):
                continue
            *group, metric, runs, freedom, squares = row
            if 0 < freedom < runs < MOST_RUNS and 0 <= squares < math.inf:
                scatters[FloorGroup(*group), metric] = Scatter(runs, freedom, squares)
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
