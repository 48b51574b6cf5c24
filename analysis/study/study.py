"""A study: which attempt counts for every cell, and the runs of equal cells.

Every finding and every efficiency goes through here, so that each leaves out the same: unusable
records, attempts that a later one replaced, other machines, other software.
"""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.study.conditions import (
    Condition,
    Rate,
    chosen_options,
    differing_names,
    is_among,
    request_of,
)
from analysis.study.noise_floor import NoiseFloors, Scatters, of_other_studies
from analysis.study.provenance import (
    CONNECTIONS,
    STUDY,
    Machines,
    connections,
    installation,
    provenance,
)
from analysis.study.runs import Runs, grouped, merged
from benchmarks.record import CellFolder, Record, RecordError, read_study

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
    """The records of one study in order of their start; `Study.of` or `open_study` make it."""

    name: str
    records: tuple[Record, ...]  # the attempt that counts of each cell
    replaced: tuple[Record, ...]  # attempts for which another one at the same cell counts
    runs: tuple[Runs, ...]  # the usable records, equal cells of one machine and software together
    # The first cell once more at the end, and the runs that it belongs to.
    drift: tuple[tuple[Record, Runs], ...]
    singles: Mapping[int, Runs]  # every record as runs of its own, by id()
    unreadable: tuple[str, ...] = ()  # a sentence for each file, paths from the study's folder
    folder: Path | None = None
    floors: NoiseFloors = field(default_factory=NoiseFloors)
    compared: str = ""  # a sentence on how many records were compared with their raw samples
    # By record_id, where it was read from files.
    folders: Mapping[str, CellFolder] = field(default_factory=dict)

    @staticmethod
    def of(
        records: Iterable[Record],
        unreadable: Sequence[str] = (),
        folder: Path | None = None,
        scatters: Scatters | None = None,
        by_study: bool = False,
    ) -> "Study":
        """Choose the attempt that counts of every cell and put runs of equal cells together.

        `scatters` is what other studies of the machine showed of the scatter between runs.
        `by_study`: records of several studies, told apart by their names.
        """
        ordered = sorted(records, key=Record.order)
        machines, floors = Machines(ordered), NoiseFloors(scatters)
        singles = {}
        for record in ordered:
            origin = provenance(record, machines)
            if by_study:
                origin[STUDY] = record.study
            request = request_of(record.cell)
            singles[id(record)] = Runs((record,), record.cell.members, request, origin, floors)
        chosen = _chosen(singles.values())
        counting, usable = [], []
        for single in chosen:
            counting.append(single.records[0])
            if single.records[0].usable:
                usable.append(single)
        ids = set(map(id, counting))
        runs, drift = _together(usable)
        by_cell = {id(each): list(each.records) for each in runs}
        for record, of_cell in drift:
            by_cell[id(of_cell)].append(record)
        floors.learn(by_cell.values())
        name = ""
        if counting:
            name = statistics.mode(record.study for record in counting)
        elif folder:
            name = folder.resolve().name
        return Study(
            name=name,
            records=tuple(counting),
            replaced=tuple(record for record in ordered if id(record) not in ids),
            runs=runs,
            drift=drift,
            singles=singles,
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
        """Records whose numbers enter nothing, and those replaced, each with the reason."""
        rows = []
        for record in sorted([*self.excluded, *self.replaced], key=Record.order):
            why = REPLACED
            if record.state != "finished":
                why = record.state
                if record.failure:
                    why += f": {record.failure.message}"
            elif not record.usable:
                reasons = "; ".join(record.validity.codes.values())
                why = f"{record.validity.verdict}: {reasons or 'no reason was recorded'}"
            rows.append((record, why))
        return tuple(rows)

    @property
    def trains(self) -> bool:
        """Whether a cell has a model; others measure links. Without records one could have had."""
        return not self.records or any(record.cell.trains for record in self.records)

    def records_of(self, record_ids: Iterable[str]) -> list[Record]:
        """Return the records with these ids."""
        by_id = {record.record_id: record for record in self.records}
        return list(filter(None, map(by_id.get, record_ids)))

    @functools.cached_property
    def installations(self) -> dict[str, int]:
        """{machine and software: number of records}, in order of their first record."""
        counts: Counter[str] = Counter()
        for record in self.records:
            counts[installation(record, self.single(record).machine)] += 1
        return dict(counts)

    @functools.cached_property
    def timed(self) -> tuple[Runs, ...]:
        """Runs with images per second."""
        return tuple(runs for runs in self.runs if not math.isnan(runs.median_log_rate))

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

    @functools.cached_property
    def _relevant(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """{irrelevant names: the names in which runs differ without them}; all others are equal."""
        # Connections are known once runs are put together (Study.of).
        names = differing_names([single.key for single in self.singles.values()])
        return {(): (*names, CONNECTIONS)}

    def condition(
        self, runs: Runs, irrelevant: Collection[str] = (), *fixed: Hashable
    ) -> Condition:
        """Return what runs share with comparable ones; they may differ in `irrelevant` names."""
        ignored = tuple(irrelevant)
        if ignored not in self._relevant:
            names = []
            for name in self._relevant[()]:
                if not is_among(name, ignored):
                    names.append(name)
            self._relevant[ignored] = tuple(names)
        return tuple(map(runs.key.get, self._relevant[ignored])), fixed

    @functools.cached_property
    def varied(self) -> tuple[str, ...]:
        """The names of what was asked differently within the study."""
        return differing_names([runs.request for runs in self.runs])

    @functools.cached_property
    def varied_provenance(self) -> tuple[str, ...]:
        """The names of a provenance that differ within the study."""
        return differing_names([runs.provenance for runs in self.runs])

    @functools.cached_property
    def naming_provenance(self) -> tuple[str, ...]:
        """The names of a provenance that differ, without those that follow from the study."""
        if STUDY not in self.varied_provenance:
            return self.varied_provenance
        names = []
        for name in self.varied_provenance:
            pairs = {(runs.provenance[STUDY], runs.provenance.get(name)) for runs in self.runs}
            if name == STUDY or len(pairs) > len(dict(pairs)):
                names.append(name)
        return tuple(names)

    @functools.cached_property
    def naming_options(self) -> tuple[str, ...]:
        """The varied names without those that follow from the model, the benchmark or the
        optimizer; that of the model and of the strategy first.
        """
        following = set()
        for name in self.varied:
            group = name.partition(".")[0]
            if name == "batch_size":
                group = "model"
            if group not in ("model", "benchmark", "optimizer") or name == f"{group}.name":
                continue
            leads = "benchmark.run" if name == "benchmark.sha256" else f"{group}.name"
            pairs = set()
            for runs in self.runs:
                pairs.add((runs.request.get(leads), runs.request.get(name)))
            if len(pairs) == len(dict(pairs)):  # one value with each choice
                following.add(name)
        trained = [runs for runs in self.runs if runs.cell.trains]
        for name in OF_TRAINING:
            if len({runs.request.get(name) for runs in trained}) == 1:
                following.add(name)
        leading = ("model.name", "strategy.name")
        ordered = sorted(self.varied, key=lambda name: not name.startswith(leading))
        return tuple(name for name in ordered if name not in following)

    def naming_options_of(self, runs: Runs, without: Sequence[str] = ()) -> list[str]:
        """Return the options that tell runs from others of the study, without defaults."""
        hides_defaults = "strategy.name" in self.varied
        chosen = {f"strategy.{option}" for option, _ in chosen_options(runs.cell)}
        chosen.add("strategy.name")
        names = []
        for name in self.naming_options:
            if name not in runs.request or name in without:
                continue
            if hides_defaults and name.startswith("strategy.") and name not in chosen:
                continue
            if runs.cell.trains or name not in OF_TRAINING:
                names.append(name)
        return names


def open_study(folder: Path, check: Callable[[Record, CellFolder], Record] | None = None) -> Study:
    """Read a study's folder; `check` returns the record to take instead of one that was read.

    Raises FileNotFoundError, NotADirectoryError: it is not a folder.
    """
    refuse_no_folder(folder)
    folders: dict[str, CellFolder] = {}

    def checked(record: Record, cell_folder: CellFolder) -> Record:
        folders[record.record_id] = cell_folder
        if check:
            return check(record, cell_folder)
        return record

    records, errors = read_study(folder, checked)
    study = Study.of(records, unreadable_files(folder, errors), folder, of_other_studies(folder))
    return replace(study, folders=folders)


def refuse_no_folder(folder: Path) -> None:
    """Refuse what is no folder. Raises FileNotFoundError, NotADirectoryError."""
    accepted = "expected the folder of a study (<output_dir>/<study>)"
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; {accepted}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder; {accepted}")


def _chosen(singles: Iterable[Runs]) -> list[Runs]:
    """Return the attempt that counts of every cell, in order of their start.

    On each machine it is the last usable attempt with each software; where none is usable, the last
    finished one, else the last. A failed attempt may not know its software, so one that failed
    counts only where none is usable.
    """
    chosen: dict[tuple[Any, ...], Runs] = {}
    unusable: dict[tuple[Any, ...], Runs] = {}
    measured = set()
    for single in singles:
        record = single.records[0]
        study = single.provenance.get(STUDY)
        cell = (record.cell_key, record.drift, single.machine, study)
        if record.usable:
            chosen[cell, frozenset(single.provenance.items())] = single
            measured.add(cell)
        elif record.state == "finished" or not (
            cell in unusable and unusable[cell].records[0].state == "finished"
        ):
            unusable[cell] = single
    for cell, single in unusable.items():
        if cell not in measured:
            chosen[cell] = single
    return sorted(chosen.values(), key=lambda single: single.records[0].order())


def _together(usable: Sequence[Runs]) -> tuple[tuple[Runs, ...], tuple[tuple[Record, Runs], ...]]:
    """Return runs of equal cells together, and the drift runs with the runs that they belong to.

    Equal cells are split by how NCCL connected their ranks, which their provenance then says. Those
    without NCCL's log stay with the others, unless these differ among themselves.
    """
    runs, drift = [], []
    equal = grouped(usable, lambda single: (single.gpus, frozenset(single.key.items())))
    for members in equal.values():
        parts = grouped(members, lambda single: connections(single.records[0]))
        if len(parts.keys() - {""}) < 2:
            parts = {"": members}
        for how, part in parts.items():
            repeats, once_more = [], []
            for single in part:
                if len(parts) > 1:
                    origin = {**single.provenance, CONNECTIONS: how}
                    single = replace(single, provenance=origin)
                if single.records[0].drift:
                    once_more.append(single)
                else:
                    repeats.append(single)
            of_cell = merged(repeats or once_more)
            runs.append(of_cell)
            if repeats:
                drift += [(single.records[0], of_cell) for single in once_more]
    return tuple(runs), tuple(drift)


def unreadable_files(folder: Path, errors: Iterable[RecordError]) -> tuple[str, ...]:
    """Return a sentence for each file that could not be read, its path from the study's folder."""
    return tuple(str(error).replace(f"{folder}/", "") for error in errors)
