"""A study: which attempt counts for every cell, and the runs of equal cells.

Every finding and every efficiency goes through here, so that each leaves out the same: unusable records, attempts that a
later one replaced, other machines, other software.
"""

import dataclasses
import functools
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.study.estimates import Estimate, Member, Point
from analysis.study.intervals import interval
from analysis.study.noise_floor import (
    CLOCK,
    Floor,
    FloorGroup,
    NoiseFloors,
    Scatters,
    group_of,
    of_other_studies,
)
from analysis.study.provenance import (
    CONNECTIONS,
    PROVENANCE,
    STUDY,
    Machines,
    connections,
    installation,
    provenance,
)
from analysis.study.rates import IMAGES_PER_SECOND, Rate, primary_rate
from benchmarks.record import CellFolder, Record, RecordError, read_study
from benchmarks.record.metrics import metric as entry_of
from conf import groups
from conf.cell import Cell
from conf.options import Refused, to_text

if TYPE_CHECKING:
    from analysis.study.draws import Sample


# Runs of one cell: what was asked of it, where it ran, and the metrics of its records.


# Two runs of one cell may differ in these. A profiler has a pass of its own; the timed pass is the same with it.
INCIDENTAL = ("repeat", "seed", "labels", "profiler", "profiler_options")
_FIELDS = tuple(
    one.name for one in dataclasses.fields(Cell) if one.name not in (*INCIDENTAL, "hosts", "gpus")
)


def request_of(cell: Cell) -> dict[str, str]:
    """Flatten a cell's request to {"strategy.comm_hook": "bf16"}, without its hosts, its GPUs and INCIDENTAL fields.

    CPU workers do not use NCCL, so its settings are no part of what was asked of them.
    How long throughput is measured does not change what it is, so only the name of that benchmark is kept. Of what the
    YAML files declare, only the hash of the user's own code is kept: another hash makes another cell.
    """
    request: dict[str, str] = {}
    for name in _FIELDS:
        value = getattr(cell, name)
        if value is None or value == () or (name == "nccl" and cell.device == "cpu"):
            continue
        if name == "declared":
            hashes = {group: rules["sha256"] for group, rules in value.items() if "sha256" in rules}
            request |= {f"{group}.sha256": to_text(one) for group, one in hashes.items()}
        elif name == "benchmark" and value["name"] == "throughput":
            request["benchmark.name"] = "throughput"
        elif name == "data":  # one thing: its loader and what the loader is given
            request |= {"data": to_text(value)} if value else {}
        elif isinstance(value, dict) or dataclasses.is_dataclass(value):
            inside = value if isinstance(value, dict) else vars(value)
            request |= {
                f"{name}.{inner}": to_text(one) for inner, one in inside.items() if one is not None
            }
        else:
            request[name] = to_text(value)
    return request


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one cell."""

    records: tuple[Record, ...]
    gpus: tuple[Member, ...]  # conf.cell.Cell.members
    request: Mapping[str, str]  # of request_of
    provenance: Mapping[str, str]  # of analysis.study.provenance
    floors: NoiseFloors  # of their study

    @functools.cached_property
    def key(self) -> Mapping[str, str]:
        """What was asked, and where it ran, without the GPUs: equal for equal cells of one machine and software."""
        return {**self.request, **self.provenance}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.gpus)

    @property
    def cell(self) -> Cell:
        """The cell of the first run."""
        return self.records[0].cell

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return str(self.cell.strategy["name"])

    @property
    def trains(self) -> bool:
        """Whether the cell has a model and a strategy; otherwise it measures links."""
        return self.cell.trains

    @property
    def batch_size(self) -> int:
        """The images per rank and step."""
        return self.cell.batch_size

    @property
    def strong(self) -> bool:
        """Whether the images per step were asked for (strong scaling), and not those per rank."""
        return "global_batch_size" in self.request

    @property
    def suspect(self) -> bool:
        """Whether a check cast doubt on one of the runs."""
        return any(record.validity.verdict == "suspect" for record in self.records)

    def values(self, metric: str) -> list[float]:
        """Return a metric of every run that has it."""
        found = (record.metrics.get(metric) for record in self.records)
        return [value for value in found if value is not None and math.isfinite(value)]

    def logarithms(self, metric: str) -> list[float]:
        """Return the logarithm of a metric of every run in which it is positive."""
        return [math.log(value) for value in self.values(metric) if value > 0]

    @functools.cached_property
    def median_log_rate(self) -> float | None:
        """The median over the runs of the logarithm of images per second; None where the benchmark counts no images."""
        rates = self.logarithms(IMAGES_PER_SECOND)
        return statistics.median(rates) if rates else None

    @functools.cached_property
    def log_rate(self) -> "Sample | None":
        """The same median as a sample, with the noise floor."""
        from analysis.study.draws import Sample

        if self.median_log_rate is None:
            return None
        runs = len(self.logarithms(IMAGES_PER_SECOND))
        return Sample(
            self.median_log_rate, self.floor(IMAGES_PER_SECOND), runs, self.records[0].record_id
        )

    @functools.cached_property
    def clock_mhz(self) -> float | None:
        """The median over the runs of the GPUs' SM clock; None where it was not sampled."""
        return middle(self.records, CLOCK)

    @functools.cached_property
    def rate(self) -> Rate:
        """The primary rate of the benchmark."""
        return primary_rate(self.cell)

    @functools.cached_property
    def log_rates(self) -> list[float]:
        """The logarithm of the primary rate in each of `rated_records`."""
        found = self.logarithms(self.rate.metric)
        return [-value for value in found] if self.rate.is_time else found

    @functools.cached_property
    def rated_records(self) -> tuple[Record, ...]:
        """The records that have the primary rate."""
        rates = ((record, record.metrics.get(self.rate.metric)) for record in self.records)
        return tuple(record for record, rate in rates if rate is not None and 0 < rate < math.inf)

    @functools.cached_property
    def group(self) -> FloorGroup:
        """The cells with which these runs share a noise floor."""
        return group_of(self.records[0])

    def floor(self, metric: str) -> Floor | None:
        """Return the noise floor of a metric; None where too few runs of equal cells are known."""
        return self.floors.of(self.group, metric)

    def next_run(self, metric: str) -> Estimate | None:
        """Return the median of a metric with the interval of the next run, where it is known; None without the metric."""
        values = self.values(metric)
        return interval(values, metric, self.floor(metric)) if values else None

    def difference(self, metric: str) -> "Sample | None":
        """Return the median of a metric that may be 0 or less as a sample, with the noise floor."""
        from analysis.study.draws import Sample

        assert entry_of(metric).signed, metric
        values = self.values(metric)
        if not values:
            return None
        name = f"{metric} {self.records[0].record_id}"
        return Sample(statistics.median(values), self.floor(metric), len(values), name)


def merged(runs: Sequence[Runs]) -> Runs:
    """Return runs of cells whose differences do not matter as runs of one cell, the first."""
    records = tuple(record for one in runs for record in one.records)
    return replace(runs[0], records=records) if len(runs) > 1 else runs[0]


def between_runs(members: Iterable[Runs], metric: str) -> tuple[float, int]:
    """Return the standard deviation of a metric's logarithm between runs of equal cells, and its degrees of freedom.

    It is pooled over the cells. Returns (NaN, 0) where no cell ran twice.
    """
    return pooled(runs.logarithms(metric) for runs in members)


def pooled(samples: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation inside samples, over all of them, and its degrees of freedom; (NaN, 0) without two values."""
    groups = [values for values in samples if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def named(record: Record, group: str) -> str:
    """Return the name of a cell's model, strategy or benchmark."""
    return record.cell.model.name if group == "model" else str(getattr(record.cell, group)["name"])


def middle(records: Iterable[Record], metric: str) -> float | None:
    """Return the median of a metric over the records in which it is finite; None where there is none."""
    found = (record.metrics.get(metric) for record in records)
    values = [value for value in found if value is not None and math.isfinite(value)]
    return statistics.median(values) if values else None


# Options that say nothing of a cell without a model.
OF_TRAINING = (
    "model.name",
    "strategy.name",
    "batch_size",
    "precision",
    "optimize",
    "channels_last",
)
REPLACED = "a later attempt at the same cell counts instead"


@dataclass(frozen=True, eq=False)
class Study:
    """The records of one study, in order of their start. Make one with `Study.of` or `open_study`."""

    name: str
    records: tuple[Record, ...]  # the attempt that counts of each cell
    replaced: tuple[Record, ...]  # attempts for which another one at the same cell counts
    runs: tuple[Runs, ...]  # the usable records, equal cells of one machine and software together
    drift: tuple[
        tuple[Record, Runs], ...
    ]  # the first cell once more at the end, and the runs that it belongs to
    singles: Mapping[int, Runs]  # every record as runs of its own, by id()
    unreadable: tuple[str, ...] = ()  # a sentence for each file, paths from the study's folder
    folder: Path | None = None
    floors: NoiseFloors = field(default_factory=NoiseFloors)
    compared: str = ""  # a sentence on how many records were compared with their raw samples
    folders: Mapping[str, CellFolder] = field(
        default_factory=dict
    )  # by record_id, where it was read from files
    varied: tuple[str, ...] = field(
        init=False
    )  # names of what was asked differently within the study

    def __post_init__(self) -> None:
        """Find what varies."""
        names = dict.fromkeys(name for one in self.runs for name in one.request)
        varied = tuple(
            name for name in names if len({one.request.get(name) for one in self.runs}) > 1
        )
        object.__setattr__(self, "varied", varied)

    @staticmethod
    def of(
        records: Iterable[Record],
        unreadable: Sequence[str] = (),
        folder: Path | None = None,
        others: Scatters | None = None,
        by_study: bool = False,
    ) -> "Study":
        """Choose the attempt that counts of every cell and put runs of equal cells together.

        `others` is what other studies of the machine showed of the scatter between runs. `by_study`: records of several
        studies, told apart by their name.
        """
        listed = sorted(records, key=_start)
        machines, floors = Machines(listed), NoiseFloors(others)
        singles = []
        for record in listed:
            origin = provenance(record, machines) | ({STUDY: record.study} if by_study else {})
            singles.append(
                Runs((record,), record.cell.members, request_of(record.cell), origin, floors)
            )
        chosen = _chosen(singles)
        counting = [one.records[0] for one in chosen]
        ids = {id(record) for record in counting}
        runs, drift = _together([one for one in chosen if one.records[0].usable])
        again: dict[int, list[Record]] = defaultdict(list)
        for record, of_cell in drift:
            again[id(of_cell)].append(record)
        floors.learn([*one.records, *again[id(one)]] for one in runs)
        names = Counter(record.study for record in counting)
        of_folder = folder.resolve().name if folder else ""
        return Study(
            name=names.most_common(1)[0][0] if names else of_folder,
            records=tuple(counting),
            replaced=tuple(one.records[0] for one in singles if id(one.records[0]) not in ids),
            runs=runs,
            drift=drift,
            singles={id(one.records[0]): one for one in singles},
            unreadable=tuple(unreadable),
            folder=folder,
            floors=floors,
        )

    @functools.cached_property
    def usable(self) -> tuple[Record, ...]:
        """Records that are finished and not invalid."""
        return tuple(record for record in self.records if record.usable)

    @functools.cached_property
    def excluded(self) -> tuple[Record, ...]:
        """Records whose numbers enter nothing."""
        return tuple(record for record in self.records if not record.usable)

    @functools.cached_property
    def left_out(self) -> tuple[tuple[Record, str], ...]:
        """Records whose numbers enter nothing, and attempts that were replaced, each with the reason."""
        both = sorted([*self.excluded, *self.replaced], key=_start)
        return tuple(
            (record, REPLACED if record.usable else _why_unusable(record)) for record in both
        )

    @property
    def trains(self) -> bool:
        """Whether a cell has a model; others measure links. A study without records could have had one."""
        return not self.records or any(record.cell.trains for record in self.records)

    @functools.cached_property
    def by_id(self) -> dict[str, Record]:
        """{record_id: record}."""
        return {record.record_id: record for record in self.records}

    def records_of(self, point: Point) -> list[Record]:
        """Return the records of a point's runs."""
        return [self.by_id[one] for one in point.record_ids if one in self.by_id]

    @functools.cached_property
    def installations(self) -> dict[str, int]:
        """{machine and software: number of records}, in order of their first record."""
        return dict(
            Counter(
                installation(one, self.single(one).provenance["machine"]) for one in self.records
            )
        )

    @functools.cached_property
    def timed(self) -> tuple[Runs, ...]:
        """Runs with images per second."""
        return tuple(runs for runs in self.runs if runs.median_log_rate is not None)

    @functools.cached_property
    def rated(self) -> tuple[Runs, ...]:
        """Runs with the primary rate of their benchmark."""
        return tuple(runs for runs in self.runs if runs.log_rates)

    @functools.cached_property
    def rates(self) -> tuple[Rate, ...]:
        """The primary rates that the study has, in order of their first run."""
        return tuple(dict.fromkeys(runs.rate for runs in self.rated))

    def single(self, record: Record) -> Runs:
        """Return one record of the study as runs of its own, whether it counts or not."""
        return self.singles[id(record)]

    def distinguishing(self, runs: Runs, without: Sequence[str] = ()) -> list[str]:
        """Return the names of what was asked that tell runs from others of the study, options with their defaults left out."""
        chosen = {f"strategy.{option}" for option, _ in chosen_options(runs.cell)} | {
            "strategy.name"
        }
        hides_defaults = "strategy.name" in self.varied
        return [
            name
            for name in self.telling
            if name in runs.request
            and name not in without
            and not (hides_defaults and name.startswith("strategy.") and name not in chosen)
            and (runs.trains or name not in OF_TRAINING)
        ]

    @functools.cached_property
    def telling(self) -> tuple[str, ...]:
        """The varied names without those that follow from the model, from there being a model, or from the benchmark."""
        names = [*self.varied]
        for group in ("model", "benchmark", "optimizer"):
            first: dict[str | None, Runs] = {}
            following = {
                name
                for name in self.varied
                if name.startswith(f"{group}.") and name != f"{group}.name"
            }
            following |= {"batch_size"} & set(self.varied) if group == "model" else set()
            for runs in self.runs:
                like = first.setdefault(runs.request.get(f"{group}.name"), runs)
                following -= {
                    name for name in following if runs.request.get(name) != like.request.get(name)
                }
            names = [name for name in names if name not in following]
        trained = [runs for runs in self.runs if runs.trains]
        alike = {
            name for name in OF_TRAINING if len({runs.request.get(name) for runs in trained}) == 1
        }
        names = [name for name in names if name not in alike]
        return tuple(
            sorted(names, key=lambda name: not name.startswith(("model.name", "strategy.name")))
        )

    @functools.cached_property
    def varied_provenance(self) -> tuple[str, ...]:
        """The names of a provenance that differ within the study."""
        names = dict.fromkeys(
            (*PROVENANCE, *(name for runs in self.runs for name in runs.provenance))
        )
        return tuple(
            name for name in names if len({runs.provenance.get(name) for runs in self.runs}) > 1
        )

    @functools.cached_property
    def telling_provenance(self) -> tuple[str, ...]:
        """The names of a provenance that differ, without those that follow from the study where there are several."""
        names = self.varied_provenance
        if STUDY not in names:
            return names
        studies = {runs.provenance[STUDY] for runs in self.runs}
        telling = []
        for name in names:
            pairs = {(runs.provenance[STUDY], runs.provenance.get(name)) for runs in self.runs}
            if name == STUDY or len(pairs) > len(studies):
                telling.append(name)
        return tuple(telling)

    def condition(self, runs: Runs, without: Iterable[str] = ()) -> tuple[str | None, ...]:
        """Return a key that is equal for runs that may be compared: all that varies, without the GPUs and the names left out."""
        left_out = set(without)
        asked = (runs.request.get(name) for name in self.varied if name not in left_out)
        around = (
            runs.provenance.get(name) for name in self.varied_provenance if name not in left_out
        )
        return (*asked, *around)


def open_study(folder: Path, check: Callable[[Record, CellFolder], Record] | None = None) -> Study:
    """Read a study's folder; `check` returns the record to take instead of one that was read.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    refuse_no_folder(folder)
    places: dict[str, CellFolder] = {}

    def placed(record: Record, place: CellFolder) -> Record:
        places[record.record_id] = place
        return check(record, place) if check else record

    records, errors = read_study(folder, placed)
    study = Study.of(records, unreadable_files(folder, errors), folder, of_other_studies(folder))
    return replace(study, folders=places)


def refuse_no_folder(folder: Path) -> None:
    """Refuse what is no folder. Raises FileNotFoundError, NotADirectoryError."""
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder}: no such folder; accepted is the folder of a study (<output_dir>/<study>)"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: is no folder; accepted is the folder of a study (<output_dir>/<study>)"
        )


def _chosen(singles: Sequence[Runs]) -> list[Runs]:
    """Return the attempt that counts of every cell, in order of their start.

    On each machine it is the last usable attempt with each software; where none is usable, the last finished one, else
    the last. A failed attempt may not know its software, so one that failed counts only where none is usable.
    """
    usable: dict[tuple[Any, ...], Runs] = {}
    others: dict[tuple[Any, ...], Runs] = {}
    measured: set[tuple[Any, ...]] = set()
    for one in singles:
        record = one.records[0]
        cell = (record.cell_key, record.drift, one.provenance["machine"], one.provenance.get(STUDY))
        if record.usable:
            usable[cell, frozenset(one.provenance.items())] = one
            measured.add(cell)
        elif (
            cell not in others
            or record.state == "finished"
            or others[cell].records[0].state != "finished"
        ):
            others[cell] = one
    rest = [one for cell, one in others.items() if cell not in measured]
    return sorted([*usable.values(), *rest], key=lambda one: _start(one.records[0]))


def _together(usable: Sequence[Runs]) -> tuple[tuple[Runs, ...], tuple[tuple[Record, Runs], ...]]:
    """Return the runs of equal cells, and each drift run with the runs of its cell."""
    alike: dict[tuple[Any, ...], list[Runs]] = defaultdict(list)
    for one in usable:
        alike[one.gpus, frozenset(one.key.items())].append(one)
    runs, drift = [], []
    for members in (part for whole in alike.values() for part in _connected_alike(whole)):
        repeats = [one for one in members if not one.records[0].drift]
        of_cell = merged(repeats or members)
        runs.append(of_cell)
        drift += [(one.records[0], of_cell) for one in members if repeats and one.records[0].drift]
    return tuple(runs), tuple(drift)


def _connected_alike(members: Sequence[Runs]) -> list[list[Runs]]:
    """Split runs that were asked alike by how NCCL connected their ranks, and say so in their provenance.

    Runs without NCCL's log stay with the others, unless these differ among themselves.
    """
    parts: dict[str, list[Runs]] = defaultdict(list)
    for one in members:
        parts[connections(one.records[0])].append(one)
    if len(parts.keys() - {""}) < 2:
        return [[*members]]
    return [
        [replace(one, provenance={**one.provenance, CONNECTIONS: how}) for one in part]
        for how, part in parts.items()
    ]


def _start(record: Record) -> tuple[float, str]:
    return record.started_at, record.record_id


def _why_unusable(record: Record) -> str:
    if record.state != "finished":
        return f"{record.state}: {record.failure.message}" if record.failure else record.state
    return "invalid: " + ("; ".join(record.validity.codes.values()) or "no reason was recorded")


def unreadable_files(folder: Path, errors: Iterable[RecordError]) -> tuple[str, ...]:
    """Return a sentence for each file of a study that could not be read, with its path from the study's folder."""
    return tuple(str(error).replace(f"{folder}/", "") for error in errors)


# The options of a cell's strategy, and of its benchmark, that differ from the defaults of their YAML.


def chosen_options(cell: Cell, group: str = "strategy") -> frozenset[tuple[str, str]]:
    """Return (option, value) for each option of the strategy (or benchmark) that has another value than its default.

    What `auto` means for this cell is its default too. Options of a strategy without a YAML here are all chosen.
    """
    return _strategy_options_chosen(
        group, json.dumps(getattr(cell, group), sort_keys=True), cell.device, cell.world_size
    )


@functools.lru_cache(maxsize=4096)
def _strategy_options_chosen(
    group: str, given: str, device: str, ranks: int
) -> frozenset[tuple[str, str]]:
    options: dict[str, Any] = json.loads(given)
    name = options["name"]
    try:
        defaults = groups.choice(group, name).options
    except Refused:
        defaults = {}
    return frozenset(
        (option, to_text(value))
        for option, value in options.items()
        if option != "name"
        and not (
            option in defaults
            and value in (defaults[option], _meaning(group, options, option, device, ranks))
        )
    )


def _meaning(group: str, options: dict[str, Any], option: str, device: str, ranks: int) -> Any:
    """Return what an option means where it is not set, next to the others as they are."""
    default = groups.choice(group, options["name"]).options[option]
    if default != "auto":
        return default
    try:
        return groups.resolved(group, {**options, option: default}, device, ranks)[option]
    except (Refused, KeyError, TypeError):  # an older record may lack the options that decide
        return default
