"""Lay out what a bundle holds, in a folder of its own.

STUDY/CELL/…       the record of every run, and its raw samples, packed
STUDY/report/      the report, made from these files
OTHER/CELL/        records of links that other studies measured on the machine, where the report uses them
noise_floor.json   what other studies showed of the scatter between runs, where there are any
README.md          what it is, how to check it and how to make the report again
commands.sh        the commands of the study as they were typed
versions.csv       the machine, the software, and what made the report
SHA256SUMS         the hash of every other file, as `sha256sum -c` reads it
"""

from collections.abc import Iterator
from pathlib import Path

from analysis.bundle.readme import commands, readme, versions
from analysis.errors import UnreadableInput
from analysis.findings.links import BENCHMARKS, measured_beside
from analysis.report.build import examine, write
from analysis.study.noise_floor import FILE as NOISE_FLOOR
from analysis.study.noise_floor import as_json, of_other_studies
from analysis.study.study import Study, open_study
from analysis.verification.verify import is_sample, verify
from benchmarks.record import CellFolder, RecordError, encoded, read, record_paths
from benchmarks.record.folder import PACKED, packed_bytes, sha256, stored

SUMS = "SHA256SUMS"
REPORT = "report"


class WrongStudy(ValueError):
    """A study that does not verify; the message is a sentence."""


def lay_out(study: Path, root: Path) -> None:
    """Write everything that a study's bundle holds below an empty folder.

    Raises:
        UnreadableInput: the folder holds no record.
        WrongStudy: a record does not say what its samples say.
        OSError: a file cannot be read or written.
    """
    folder = named(study)
    inside = root / folder.name
    for path in record_paths(folder):
        _copy_cell(CellFolder(path.parent), inside / path.parent.relative_to(folder))
    if not inside.exists():
        raise UnreadableInput(
            f"{study}: holds no record; accepted is the folder of a study (<output_dir>/<study>)"
        )
    checked = verify(inside)
    if not checked.right:
        raise WrongStudy(
            f"{study} does not say what its samples say, so nothing was bundled (`python -m analysis verify` names what differs)"
        )
    original = open_study(folder)
    beside = list(_from_beside(original))
    for name, content in beside:
        _put(root / name, content)
    report, _ = examine(inside)
    write(report, inside / REPORT)
    _put(root / "README.md", readme(report, folder.name, checked, bool(beside)).encode())
    _put(root / "commands.sh", commands(original).encode())
    _put(root / "versions.csv", versions(report).encode())
    _put(root / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums(root)).encode())


def named(study: Path) -> Path:
    """Return the whole path of a study's folder, which ends in its name; a link keeps its own, as the noise floor has it."""
    return study.resolve() if study.name == ".." else study.absolute()


def sums(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path from the folder, SHA-256) of every file below a bundle's folder but SUMS, by path."""
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path != root / SUMS):
        yield path.relative_to(root).as_posix(), sha256(path)


def _copy_cell(cell: CellFolder, to: Path) -> None:
    """Copy what others need of a cell's folder, samples packed."""
    for path in cell.published():
        name, place = path.relative_to(cell.path).as_posix(), stored(path)
        assert place is not None
        if is_sample(name):
            _put(to / f"{name}{PACKED}", packed_bytes(path))
        else:
            _put(to / place.relative_to(cell.path), place.read_bytes())


def _from_beside(study: Study) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the bundle, content) of what the report takes from other studies of the same output_dir."""
    assert study.folder is not None
    groups = {runs.group.of_any_size for runs in study.runs}
    rows = {
        key: one
        for key, one in of_other_studies(study.folder).items()
        if key[0].of_any_size in groups
    }
    if rows:
        yield NOISE_FLOOR, encoded(as_json({"other studies": rows}), indent=1)
    wanted = {record.record_id for record in measured_beside(study)}
    places = (
        path for name in BENCHMARKS for path in study.folder.parent.glob(f"*/{name}-*/record.json")
    )
    for path in sorted(places) if wanted else ():
        try:
            record = read(path)
        except RecordError:
            continue
        if record.record_id in wanted:
            yield path.relative_to(study.folder.parent).as_posix(), path.read_bytes()


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
