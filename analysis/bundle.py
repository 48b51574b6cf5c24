"""One archive of a study that another person can open, check and make the report of again.

STUDY/CELL/…       the record of every run, and its raw samples, packed
STUDY/report/      the report, made from these files
noise_floor.json   what other studies showed of the scatter between runs, where there are any
README.md          what it is, how to check it and how to make the report again
commands.sh        the commands of the study as they were typed
versions.csv       the machine, the software, and what made the report
SHA256SUMS         the hash of every other file, as `sha256sum -c` reads it

The archive is a zip whose bytes follow from its content alone.
"""

import contextlib
import importlib.metadata
import platform
import secrets
import shlex
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from analysis.errors import UnreadableInput
from analysis.report.build import examine, write
from analysis.report.page import Report
from analysis.report.table import TEXT_LENGTH
from analysis.study.noise_floor import FILE as NOISE_FLOOR
from analysis.study.noise_floor import as_json, of_other_studies
from analysis.study.study import Study, open_study
from analysis.text import markdown, single_line
from analysis.verification.verify import ABSENT, Difference, Verification, is_sample, verify
from benchmarks.record import CellFolder, encoded, record_paths
from benchmarks.record.folder import PACKED, packed_bytes, sha256, stored
from benchmarks.record.safe_files import (
    NotOurs,
    make_folder,
    open_to_read,
    put_in_place,
    refuse_other,
)
from benchmarks.record.safe_text import visible

SUMS = "SHA256SUMS"
REPORT = "report"
SUFFIX = ".bundle.zip"
MARK = b"Ringside bundle"  # the comment of the archive
# The first time that a zip can hold: when it was made changes nothing.
EARLIEST = (1980, 1, 1, 0, 0, 0)
MODE = 0o100644 << 16
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeError,
)
CLONE = Path(__file__).parent.parent
# Another version of these may draw or round otherwise.
DRAWN_BY = ("numpy", "scipy", "matplotlib", "jinja2")


class WrongStudy(ValueError):
    """A study that does not verify; the message is a sentence."""


# Write a bundle.


def bundle(study: Path, file: Path | None = None) -> Path:
    """Write the bundle of a study and return its path.

    That is `file`, or STUDY.bundle.zip in it where it is a folder; without it, beside the study.

    Raises:
        UnreadableInput: the folder holds no record.
        WrongStudy: a record does not say what its samples say.
        NotOurs: something else than a bundle is there already.
        OSError: a file cannot be read or written.
    """
    folder = _absolute(study)
    target = folder.parent
    if file is not None:
        target = file.resolve()
    if target.is_dir():
        target /= f"{folder.name}{SUFFIX}"
    _refuse_other_files(target)
    make_folder(target.parent)
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    work.mkdir()
    try:
        root = work / f"{folder.name}.bundle"
        root.mkdir()
        _lay_out(study, root)
        _pack(root, work / "zip")
        put_in_place(work / "zip", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _absolute(study: Path) -> Path:
    """Return the whole path of a study's folder, which ends in its name; a link keeps its own."""
    if study.name == "..":
        return study.resolve()
    return study.absolute()


def _refuse_other_files(target: Path) -> None:
    """Refuse to replace what is no bundle. Raises NotOurs."""
    refuse_other(target)
    with contextlib.suppress(FileNotFoundError), open_to_read(target) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                is_bundle = archive.comment == MARK
        except DAMAGED_ZIP:
            is_bundle = False
        if not is_bundle:
            raise NotOurs(target, "holds something else than a bundle")


def _lay_out(study: Path, root: Path) -> None:
    """Write everything that a study's bundle holds below an empty folder. Raises as `bundle`."""
    folder = _absolute(study)
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
            f"{study} does not say what its samples say, so nothing was bundled "
            "(`python -m analysis verify` names what differs)"
        )
    original = open_study(folder)
    beside = list(_from_beside(original))
    for name, content in beside:
        _put(root / name, content)
    report, _ = examine(inside)
    write(report, inside / REPORT)
    _put(root / "README.md", _readme(report, folder.name, checked, bool(beside)).encode())
    _put(root / "commands.sh", _commands(original).encode())
    _put(root / "versions.csv", _versions(report).encode())
    lines = [f"{digest}  {name}\n" for name, digest in _sums(root).items()]
    _put(root / SUMS, "".join(lines).encode())


def _copy_cell(cell: CellFolder, target: Path) -> None:
    """Copy what a reader needs of a cell's folder, samples packed."""
    for path in cell.published():
        name, file = path.relative_to(cell.path).as_posix(), stored(path)
        assert file is not None
        if is_sample(name):
            _put(target / f"{name}{PACKED}", packed_bytes(path))
        else:
            _put(target / file.relative_to(cell.path), file.read_bytes())


def _from_beside(study: Study) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the bundle, content) of what other studies show of the scatter of runs."""
    assert study.folder is not None
    groups = {runs.group.of_any_size for runs in study.runs}
    rows = {}
    for key, row in of_other_studies(study.folder).items():
        if key[0].of_any_size in groups:
            rows[key] = row
    if rows:
        yield NOISE_FLOOR, encoded(as_json({"other studies": rows}), indent=1)


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _readme(report: Report, study: str, checked: Verification, beside: bool) -> str:
    """Return README.md.

    `study` is the name of its folder; `beside`: a noise floor of other studies is there.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("analysis.report", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["markdown"] = lambda text: markdown(text, TEXT_LENGTH)
    name = single_line(study).replace("`", "'")
    return environment.get_template("bundle.md.j2").render(
        report=report,
        study=name,
        folder=f"BUNDLE/{shlex.quote(name)}",
        checked=checked,
        beside=beside,
        made=_program(),
    )


def _commands(study: Study) -> str:
    """Return the command of each sweep of a study as it was typed, one a line."""
    sweeps = {record.sweep_id: tuple(record.overrides) for record in study.records}
    lines = ["# What was typed in Ringside's clone."]
    for overrides in dict.fromkeys(sweeps.values()):
        lines.append(visible(shlex.join(["python", "launch.py", *overrides]), kept=""))
    return "\n".join([*lines, ""])


def _versions(report: Report) -> str:
    """Return the report's table of machine and software as CSV, with what made the report."""
    versions = {f"Ringside {name}": text for name, text in _program().items()}
    for name in DRAWN_BY:
        versions[name] = importlib.metadata.version(name)
    versions["python"] = platform.python_version()
    table = next(table for table in report.tables if table.name == "environment")
    rows = [*table.rows]
    for name, text in versions.items():
        rows.append(("report", name, text))
    return replace(table, rows=tuple(rows)).to_csv()


def _program() -> dict[str, str]:
    """Return {"version": …, "commit": …} of this program, as far as it is known."""
    program = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        program["version"] = importlib.metadata.version("ringside")
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "-uno"):
        commit += " with changes"
    if commit:
        program["commit"] = commit
    return program


def _git(*arguments: str) -> str:
    """Return what git says of this clone; empty without git or a clone. It writes nothing."""
    command = ["git", "--no-optional-locks", "-C", str(CLONE), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return answer.stdout.strip()


def _pack(root: Path, file: Path) -> None:
    """Write a new archive of every file below a folder, by path. Raises OSError."""
    with zipfile.ZipFile(file, "x") as archive:
        archive.comment = MARK
        for path in _files(root):
            entry = zipfile.ZipInfo(path.relative_to(root.parent).as_posix(), EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            if path.suffix == PACKED:
                entry.compress_type = zipfile.ZIP_STORED
            entry.external_attr, entry.create_system = MODE, 3  # Unix, wherever it is made
            entry.file_size = path.stat().st_size  # of more than 2 GiB zipfile must know it before
            with path.open("rb") as source, archive.open(entry, "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _sums(root: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a bundle's folder but SUMS, by path."""
    files = [path for path in _files(root) if path != root / SUMS]
    return {path.relative_to(root).as_posix(): sha256(path) for path in files}


# Open a bundle.


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path | None]:
    """Yield the folder of a bundle, of an archive a temporary copy; None for what is no bundle.

    Raises:
        UnreadableInput: the archive is damaged, or holds no bundle.
        OSError: it cannot be read, or there is no room for the copy.
    """
    if (path / SUMS).is_file():
        yield path
    elif not path.is_file() or path.suffix != ".zip":
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="ringside-bundle-") as temporary:
            yield _unpacked(path, Path(temporary))


def _unpacked(file: Path, target: Path) -> Path:
    """Unpack an archive, and return the folder of its bundle. Raises UnreadableInput."""
    try:
        with open_to_read(file) as stream, zipfile.ZipFile(stream) as archive:
            needed = sum(entry.file_size for entry in archive.infolist())
            free = shutil.disk_usage(target).free
            if needed > free:
                raise OSError(
                    f"{file}: holds {needed / 1e9:,.1f} GB unpacked, and {target.parent} has room "
                    f"for {free / 1e9:,.1f}"
                )
            archive.extractall(target)  # which keeps every file below the folder; makes no links
    except DAMAGED_ZIP as error:
        raise UnreadableInput(f"{file}: a damaged archive ({error})") from None
    roots = [folder for folder in target.iterdir() if (folder / SUMS).is_file()]
    if len(roots) != 1:
        raise UnreadableInput(
            f"{file}: no bundle of a study (it holds no {SUMS}); "
            "python -m analysis report STUDY --bundle makes one"
        )
    return roots[0]


def studies(root: Path) -> list[Path]:
    """Return the folders of a bundle that hold records, last that of its study."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and record_paths(folder)]
    return sorted(folders, key=lambda folder: ((folder / REPORT).is_dir(), folder.name))


def changed(root: Path) -> tuple[int, list[Difference]]:
    """Return how many files a bundle names, and those that are changed, missing or added.

    Raises:
        UnreadableInput: the list of files is damaged.
    """
    recorded = {}
    try:
        for line in (root / SUMS).read_text(encoding="utf-8").splitlines():
            digest, name = line.split("  ", 1)
            recorded[name] = digest
    except ValueError:
        raise UnreadableInput(f"{root / SUMS}: no list of hashes, as sha256sum writes it") from None
    folders = {name.split("/")[0] for name in recorded if "/" in name}
    present = {}
    for name, digest in _sums(root).items():
        if name in recorded or name.split("/")[0] in folders:
            present[name] = digest
    differences = []
    for name in sorted({*recorded, *present}):
        before, now = recorded.get(name, ABSENT), present.get(name, ABSENT)
        if before != now:
            differences.append(Difference("", name, "SHA-256", before, now))
    return len(recorded), differences
