"""One archive of a study that another person can open, check and make the report of again.

STUDY/CELL/…       the record of every run, and its raw samples, packed
STUDY/report/      the report, made from these files
noise_floor.json   what other studies showed of the scatter between runs, where there are any
README.md          what it is, how to check it and how to make the report again
commands.sh        the commands of the study as they were typed
SHA256SUMS         the hash of every other file, as `sha256sum -c` reads it

The archive is a zip whose bytes follow from its content alone.
"""

import contextlib
import importlib.metadata
import secrets
import shlex
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from analysis.input_files import UnreadableInput, most_unpacked
from analysis.report.build import examine
from analysis.report.report_files import Report, filled, write
from analysis.study.noise_floor import FILE as NOISE_FLOOR
from analysis.study.noise_floor import as_json, of_other_studies
from analysis.study.study import open_study
from analysis.text import count, single_line
from analysis.verification.verify_study import ABSENT, Difference, Verification, is_sample, verify
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
MOST_FILES = 200_000  # of an archive
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


def bundle(study: Path, file: Path | None = None) -> Path:
    """Write the bundle of a study and return its path.

    That is `file`, or STUDY.bundle.zip in it where it is a folder; without it, beside the study.

    Raises OSError; UnreadableInput: the folder holds no record; WrongStudy: a record does not say
    what its samples say; NotOurs: something else than a bundle is there already.
    """
    # The whole path of the folder, which ends in the study's name; a link keeps its own.
    folder = study.absolute()
    if study.name == "..":
        folder = study.resolve()
    target = folder.parent
    if file is not None:
        target = file.resolve()
    if target.is_dir():
        target /= f"{folder.name}{SUFFIX}"
    refuse_other(target)
    with contextlib.suppress(FileNotFoundError), open_to_read(target) as stream:
        is_bundle = False
        with contextlib.suppress(*DAMAGED_ZIP), zipfile.ZipFile(stream) as archive:
            is_bundle = archive.comment == MARK
        if not is_bundle:
            raise NotOurs(target, "holds something else than a bundle")
    make_folder(target.parent)
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    root = work / f"{folder.name}.bundle"
    root.mkdir(parents=True)
    try:
        _lay_out(study, folder, root)
        with zipfile.ZipFile(work / "zip", "x") as archive:
            archive.comment = MARK
            for path in _files(root):
                entry = zipfile.ZipInfo(path.relative_to(work).as_posix(), EARLIEST)
                entry.compress_type = zipfile.ZIP_DEFLATED
                if path.suffix == PACKED:
                    entry.compress_type = zipfile.ZIP_STORED
                entry.external_attr, entry.create_system = MODE, 3  # Unix, wherever it is made
                entry.file_size = path.stat().st_size  # beyond 2 GiB it must be known before
                with path.open("rb") as source, archive.open(entry, "w") as packed:
                    shutil.copyfileobj(source, packed, 1 << 20)
        put_in_place(work / "zip", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _lay_out(study: Path, folder: Path, root: Path) -> None:
    inside = root / folder.name
    for path in record_paths(folder):
        cell, target = CellFolder(path.parent), inside / path.parent.relative_to(folder)
        for published in cell.published():
            name = published.relative_to(cell.path).as_posix()
            file = stored(published) or published
            if is_sample(name):
                _put(target / f"{name}{PACKED}", packed_bytes(published))
            else:
                _put(target / file.relative_to(cell.path), file.read_bytes())
    if not inside.exists():
        raise UnreadableInput(
            f"{study}: holds no record; expected the folder of a study (<output_dir>/<study>)"
        )
    checked = verify(inside)
    if not checked.right:
        raise WrongStudy(
            f"{study} does not say what its samples say, so nothing was bundled "
            "(`python -m analysis verify` names what differs)"
        )
    original = open_study(folder)
    # What other studies show of the scatter of runs, as far as the report uses it.
    groups = {runs.group.wider[-1] for runs in original.runs}
    beside = {}
    for key, scatter in of_other_studies(folder).items():
        if key[0].wider[-1] in groups:
            beside[key] = scatter
    if beside:
        _put(root / NOISE_FLOOR, encoded(as_json({"other studies": beside}), indent=1))
    report, _ = examine(inside)
    write(report, inside / REPORT)
    readme = _readme(report, folder.name, checked, is_scatter_beside=bool(beside))
    _put(root / "README.md", readme.encode())
    commands = "# What was typed in Ringside's clone.\n"
    sweeps = {record.sweep_id: tuple(record.overrides) for record in original.records}
    for overrides in dict.fromkeys(sweeps.values()):
        command = shlex.join(["python", "launch.py", *overrides])
        commands += visible(command, kept="") + "\n"
    _put(root / "commands.sh", commands.encode())
    sums = ""
    for path_inside, digest in _sums(root).items():
        sums += f"{digest}  {path_inside}\n"
    _put(root / SUMS, sums.encode())


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _readme(report: Report, study: str, checked: Verification, is_scatter_beside: bool) -> str:
    made = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        made["version"] = importlib.metadata.version("ringside")
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "-uno"):
        commit += " with changes"
    if commit:
        made["commit"] = commit
    for library in DRAWN_BY:
        made[library] = importlib.metadata.version(library)
    name = single_line(study).replace("`", "'")
    return filled(
        "bundle.md.j2",
        report,
        study=name,
        folder=f"BUNDLE/{shlex.quote(name)}",
        checked=checked,
        beside=is_scatter_beside,
        made=made,
    )


def _git(*arguments: str) -> str:
    """Return what git says of this clone; empty without git or a clone. It writes nothing."""
    command = ["git", "--no-optional-locks", "-C", str(CLONE), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return answer.stdout.strip()


def _files(root: Path) -> list[Path]:
    return sorted(filter(Path.is_file, root.rglob("*")))


def _sums(root: Path) -> dict[str, str]:
    sums = {}
    for path in _files(root):
        if path != root / SUMS:
            sums[path.relative_to(root).as_posix()] = sha256(path)
    return sums


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path | None]:
    """Yield the folder of a bundle, of an archive a temporary copy; None for what is no bundle.
    Raises UnreadableInput, and OSError: it cannot be read, or there is no room for the copy.
    """
    if (path / SUMS).is_file():
        yield path
    elif not path.is_file() or path.suffix != ".zip":
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="ringside-bundle-") as temporary:
            yield _unpacked(path, Path(temporary))


def _unpacked(file: Path, target: Path) -> Path:
    try:
        with open_to_read(file) as stream, zipfile.ZipFile(stream) as archive:
            needed = sum(entry.file_size for entry in archive.infolist())
            most, entries = most_unpacked(file.stat().st_size), len(archive.infolist())
            if needed > most or entries > MOST_FILES:
                raise UnreadableInput(
                    f"{file}: holds {needed / 1e6:,.0f} MB in {count(entries, 'file')}; expected "
                    f"from an archive of its size: {most / 1e6:,.0f} MB in {MOST_FILES:,} files"
                )
            free = shutil.disk_usage(target).free
            if needed > free:
                raise OSError(
                    f"{file}: holds {needed / 1e9:,.1f} GB unpacked, and {target.parent} has room "
                    f"for {free / 1e9:,.1f}"
                )
            archive.extractall(target)  # which keeps every file below the folder; makes no links
    except (UnicodeDecodeError, IndexError):  # from the names of its files
        raise UnreadableInput(f"{file}: a damaged archive (a name empty or not UTF-8)") from None
    except DAMAGED_ZIP as error:
        raise UnreadableInput(f"{file}: a damaged archive ({error})") from None
    roots = [path.parent for path in target.glob(f"*/{SUMS}") if path.is_file()]
    if len(roots) != 1:
        raise UnreadableInput(
            f"{file}: no bundle of a study (it holds no {SUMS}); "
            "python -m analysis report STUDY --bundle makes one"
        )
    return roots[0]


def studies(root: Path) -> list[Path]:
    """Return the folders of a bundle that hold records, last that of its study."""
    folders, with_report = [], []
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or not record_paths(folder):
            continue
        if (folder / REPORT).is_dir():
            with_report.append(folder)
        else:
            folders.append(folder)
    return folders + with_report


def changed(root: Path) -> tuple[int, list[Difference]]:
    """Return how many files a bundle names, and those that are changed, missing or added.

    Raises UnreadableInput: the list of files is damaged.
    """
    recorded = {}
    try:
        for line in (root / SUMS).read_text(encoding="utf-8").splitlines():
            digest, name = line.split("  ", 1)
            recorded[name] = digest
    except ValueError:
        raise UnreadableInput(f"{root / SUMS}: no list of hashes, as sha256sum writes it") from None
    folders = {name.split("/")[0] for name in recorded if "/" in name}
    present = _sums(root)
    differences = []
    for name in sorted({*recorded, *present}):
        before, now = recorded.get(name, ABSENT), present.get(name, ABSENT)
        is_foreign = name not in recorded and name.split("/")[0] not in folders
        if before != now and not is_foreign:
            differences.append(Difference("", name, "SHA-256", before, now))
    return len(recorded), differences
