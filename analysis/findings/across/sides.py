"""Sides: what is set beside each other. A side is the part of one study that one machine measured, with a name that tells.

Every side is a Study of its own, so its baselines, its repeats and its noise floor are its own.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from analysis.findings.labels import BETWEEN
from analysis.findings.machines.hosts import short_hardware
from analysis.findings.machines.identity import Machines, first_gpu
from analysis.findings.next_run.floor_file import of_other_studies
from analysis.findings.study import Study, refuse_no_folder, unreadable_files
from benchmarks.record import CellFolder, Record, read_study, record_paths
from conf.cell import folded

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
    return [[dataclasses.replace(side, hosts=_places(side.study)) for side in of_one] for of_one in sides]


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
        path.parent.parent if _ATTEMPT.fullmatch(path.parent.name) else path.parent for path in record_paths(folder)
    }
    if not cells:
        raise ValueError(f"{folder}: holds no record; accepted is the folder of a study (<output_dir>/<study>)")
    return sorted({cell.parent for cell in cells if cell.parent not in cells})


def _open(folder: Path, compared: set[Path], check: Check | None) -> list[Study]:
    """Return a Study for each machine of a study's folder; the noise floor of a study that is compared is its own alone."""
    records, errors = read_study(folder, check)
    beside = {one.name for one in compared if one.parent == folder.resolve().parent}
    others = of_other_studies(folder, beside)
    machines, parts = Machines(records), defaultdict[str, list[Record]](list)
    for record in records:
        parts[machines.name(record)].append(record)
    made = [Study.of(part, (), folder, others) for part in parts.values()] or [Study.of([], (), folder)]
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
        return f"{short_hardware(first)} on {folded(_hosts(study))}"
    return f"{short_hardware(first)} on {first.environment.get('host', 'unknown host')}" if first else "no machine"


def _facts(asked: Asked, folder: Path, study: Study) -> tuple[str, ...]:
    """Return what may tell a side from others of the same name, what people know best first."""
    first = study.records[0] if study.records else None
    at = datetime.fromtimestamp(first.started_at if first else 0, timezone.utc)
    return folder.resolve().name, f"{at:%Y-%m-%d}", first_gpu(first) if first else "", f"{at:%H:%M}", str(folder)
