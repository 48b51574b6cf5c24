"""A study: which attempt counts for every cell, and the runs of equal cells.

Every finding and every efficiency goes through here, so that each leaves out the same: unusable records, attempts that a
later one replaced, other machines, other software.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.findings.machines.identity import Machines
from analysis.findings.model import Point
from analysis.findings.next_run.floor_file import of_other_studies
from analysis.findings.next_run.floors import NoiseFloors, Scatters
from analysis.findings.provenance import CONNECTIONS, PROVENANCE, STUDY, connections, installation, provenance
from analysis.findings.rates import Rate
from analysis.findings.runs import Runs, merged, request_of
from analysis.findings.strategy_options import chosen_options
from benchmarks.record import CellFolder, Record, RecordError, read_study

# Options that say nothing of a cell without a model.
OF_TRAINING = ("model.name", "strategy.name", "batch_size", "precision", "optimize", "channels_last")
REPLACED = "a later attempt at the same cell counts instead"


@dataclass(frozen=True, eq=False)
class Study:
    """The records of one study, in order of their start. Make one with `Study.of` or `open_study`."""

    name: str
    records: tuple[Record, ...]  # the attempt that counts of each cell
    replaced: tuple[Record, ...]  # attempts for which another one at the same cell counts
    runs: tuple[Runs, ...]  # the usable records, equal cells of one machine and software together
    drift: tuple[tuple[Record, Runs], ...]  # the first cell once more at the end, and the runs that it belongs to
    singles: Mapping[int, Runs]  # every record as runs of its own, by id()
    unreadable: tuple[str, ...] = ()  # a sentence for each file, paths from the study's folder
    folder: Path | None = None
    floors: NoiseFloors = field(default_factory=NoiseFloors)
    compared: str = ""  # a sentence on how many records were compared with their raw samples
    folders: Mapping[str, CellFolder] = field(default_factory=dict)  # by record_id, where it was read from files
    varied: tuple[str, ...] = field(init=False)  # names of what was asked differently within the study

    def __post_init__(self) -> None:
        """Find what varies."""
        names = dict.fromkeys(name for one in self.runs for name in one.request)
        varied = tuple(name for name in names if len({one.request.get(name) for one in self.runs}) > 1)
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
            singles.append(Runs((record,), record.cell.members, request_of(record.cell), origin, floors))
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
        return tuple((record, REPLACED if record.usable else _why_unusable(record)) for record in both)

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
        return dict(Counter(installation(one, self.single(one).provenance["machine"]) for one in self.records))

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
        chosen = {f"strategy.{option}" for option, _ in chosen_options(runs.cell)} | {"strategy.name"}
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
            following = {name for name in self.varied if name.startswith(f"{group}.") and name != f"{group}.name"}
            following |= {"batch_size"} & set(self.varied) if group == "model" else set()
            for runs in self.runs:
                like = first.setdefault(runs.request.get(f"{group}.name"), runs)
                following -= {name for name in following if runs.request.get(name) != like.request.get(name)}
            names = [name for name in names if name not in following]
        trained = [runs for runs in self.runs if runs.trains]
        alike = {name for name in OF_TRAINING if len({runs.request.get(name) for runs in trained}) == 1}
        names = [name for name in names if name not in alike]
        return tuple(sorted(names, key=lambda name: not name.startswith(("model.name", "strategy.name"))))

    @functools.cached_property
    def varied_provenance(self) -> tuple[str, ...]:
        """The names of a provenance that differ within the study."""
        names = dict.fromkeys((*PROVENANCE, *(name for runs in self.runs for name in runs.provenance)))
        return tuple(name for name in names if len({runs.provenance.get(name) for runs in self.runs}) > 1)

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
        around = (runs.provenance.get(name) for name in self.varied_provenance if name not in left_out)
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
        raise FileNotFoundError(f"{folder}: no such folder; accepted is the folder of a study (<output_dir>/<study>)")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: is no folder; accepted is the folder of a study (<output_dir>/<study>)")


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
        elif cell not in others or record.state == "finished" or others[cell].records[0].state != "finished":
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
        [replace(one, provenance={**one.provenance, CONNECTIONS: how}) for one in part] for how, part in parts.items()
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
