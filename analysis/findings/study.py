"""What a report is made of: the record that counts of every cell of a study, what could not be read, and what they agree in."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from analysis.findings.baselines import INCIDENTAL
from analysis.findings.model import Point
from analysis.findings.provenance import Machines, surroundings
from benchmarks.record import Record, RecordError, read_study


@dataclass(frozen=True)
class Study:
    """The records of one folder, in order of their start."""

    name: str
    records: tuple[Record, ...]  # the one that counts of each cell
    unreadable: tuple[str, ...] = ()  # a sentence each, paths from the study's folder
    replaced: tuple[Record, ...] = ()  # attempts for which another one at the same cell counts
    folder: Path | None = None  # where they lie

    @cached_property
    def usable(self) -> tuple[Record, ...]:
        """Finished and not invalid."""
        return tuple(record for record in self.records if record.usable)

    @cached_property
    def excluded(self) -> tuple[Record, ...]:
        """Whose numbers enter nothing."""
        return tuple(record for record in self.records if not record.usable)

    @property
    def trains(self) -> bool:
        """Whether a cell has a model; others measure links alone. A study without records could have had one."""
        return not self.records or any(record.cell.trains for record in self.records)

    @cached_property
    def by_id(self) -> dict[str, Record]:
        """{record_id: record}."""
        return {record.record_id: record for record in self.records}

    def of(self, point: Point) -> list[Record]:
        """The records of a point's runs that are here."""
        return [self.by_id[one] for one in point.record_ids if one in self.by_id]

    @property
    def attempts(self) -> tuple[Record, ...]:
        """Every readable record: findings choose among them by the same rule."""
        return self.records + self.replaced

    @cached_property
    def groups(self) -> tuple[tuple[Record, ...], ...]:
        """Usable records by equal cells of one machine and software, whose repeat alone differs; the first started first."""
        found: dict[tuple[str, tuple[str, ...]], list[Record]] = defaultdict(list)
        machines = Machines()
        for record in self.usable:
            around = tuple(surroundings(record, machines).values())
            found[cell_without_repeat(record), around].append(record)
        return tuple(tuple(group) for group in found.values())

    @cached_property
    def machines(self) -> dict[str, int]:
        """{what a machine is: number of its records}, the first first."""
        return dict(Counter(machine(record) for record in self.records))


def open_study(folder: Path) -> Study:
    """Read a study's folder. Raises NotADirectoryError or FileNotFoundError where it is no folder."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; expected the folder of a study (<output_dir>/<study>)")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: is no folder; expected the folder of a study (<output_dir>/<study>)")
    records, errors = read_study(folder)
    kept = counting(records)
    ids = {id(record) for record in kept}
    names = Counter(record.study for record in kept)
    name = names.most_common(1)[0][0] if names else folder.resolve().name
    return Study(
        name, tuple(kept), tuple(_from(folder, error) for error in errors),
        tuple(record for record in records if id(record) not in ids), folder,
    )  # fmt: skip


def counting(records: Iterable[Record]) -> list[Record]:
    """The attempt that counts of every cell, in order of their start.

    It is the last usable one, of each machine and software (as in analysis.findings.runs.gather); on a machine where none is, the
    last finished one, else the last.
    """
    machines = Machines()
    usable: dict[tuple[Any, ...], Record] = {}
    others: dict[tuple[Any, ...], Record] = {}
    measured: set[tuple[Any, ...]] = set()
    for record in sorted(records, key=_started):
        around = surroundings(record, machines)
        # What failed may not know the software that it ran on.
        cell = (record.cell_key, record.drift, around["machine"])
        if record.usable:
            usable[cell, tuple(around.values())] = record
            measured.add(cell)
        elif cell not in others or record.state == "finished" or others[cell].state != "finished":
            others[cell] = record
    rest = [record for cell, record in others.items() if cell not in measured]
    return sorted([*usable.values(), *rest], key=_started)


def _started(record: Record) -> tuple[float, str]:
    return record.started_at, record.record_id


def _from(folder: Path, error: RecordError) -> str:
    return str(error).replace(f"{folder}/", "")


def cell_without_repeat(record: Record, *without: str) -> str:
    """Equal for equal cells; also for those that differ in fields that are left out."""
    left_out = (*INCIDENTAL, *without)
    asked = record.cell.to_dict()
    return json.dumps({name: value for name, value in asked.items() if name not in left_out}, sort_keys=True)


def named(record: Record, group: str) -> str:
    """Return the name of a cell's model, strategy or benchmark."""
    return record.cell.model.name if group == "model" else str(getattr(record.cell, group)["name"])


def hardware(record: Record) -> str:
    """`4 × NVIDIA H200`, or the CPU that workers ran on; of the machine, not of the subset."""
    gpus = mapping(record.environment.get("gpu")).get("gpus")
    if record.cell.device == "cuda" and isinstance(gpus, list) and gpus:
        kinds = Counter(str(mapping(gpu).get("name", "unknown GPU")) for gpu in gpus)
        return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))
    cpu = mapping(record.environment.get("cpu"))
    return f"CPU workers on {cpu.get('model') or 'an unknown CPU'}"


def machine(record: Record) -> str:
    """What must be one for rates to be comparable, as far as the record tells."""
    versions = mapping(record.environment.get("versions"))
    parts = [hardware(record), f"host {record.environment.get('host', 'unknown')}"]
    driver = mapping(record.environment.get("gpu")).get("driver")
    parts += [f"driver {driver}"] if driver else []
    parts += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(parts)


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one: a record's environment may hold anything."""
    return value if isinstance(value, Mapping) else {}


def middle(records: Iterable[Record], metric: str) -> float | None:
    """The median of a metric over records that have a finite one."""
    found = (record.metrics.get(metric) for record in records)
    values = [value for value in found if value is not None and math.isfinite(value)]
    return median(values) if values else None
