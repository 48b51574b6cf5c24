"""Write the archive of a bundle, and open one again: a zip whose bytes follow from its content alone."""

import contextlib
import secrets
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from analysis.bundle.stage import REPORT, SUMS, lay_out, named, sums
from analysis.errors import UnreadableInput
from analysis.verification.comparison import ABSENT, Difference
from benchmarks.record import record_paths
from benchmarks.record.folder import PACKED
from benchmarks.record.safe_files import (
    NotOurs,
    make_folder,
    open_to_read,
    put_in_place,
    refuse_other,
)

SUFFIX = ".bundle.zip"
MARK = b"Ringside bundle"  # the comment of the archive
EARLIEST = (
    1980,
    1,
    1,
    0,
    0,
    0,
)  # the first time that a zip can hold: when it was made changes nothing
MODE = 0o100644 << 16
CUT = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError)


def bundle(study: Path, file: Path | None = None) -> Path:
    """Write the bundle of a study and return its path: `file`; STUDY.bundle.zip where that is a folder; else beside the study.

    Raises:
        UnreadableInput: the folder holds no record.
        WrongStudy: a record does not say what its samples say.
        NotOurs: something else than a bundle is there already.
        OSError: a file cannot be read or written.
    """
    folder = named(study)
    place = file.resolve() if file else folder.parent
    if place.is_dir():
        place /= f"{folder.name}{SUFFIX}"
    _refuse_others(place)
    make_folder(place.parent)
    work = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    work.mkdir()
    try:
        root = work / f"{folder.name}.bundle"
        root.mkdir()
        lay_out(study, root)
        pack(root, work / "zip")
        put_in_place(work / "zip", place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def _refuse_others(place: Path) -> None:
    """Refuse to replace what is no bundle. Raises NotOurs."""
    refuse_other(place)
    with contextlib.suppress(FileNotFoundError), open_to_read(place) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                ours = archive.comment == MARK
        except CUT:
            ours = False
        if not ours:
            raise NotOurs(place, "holds something else than a bundle")


def pack(root: Path, file: Path) -> None:
    """Write a new archive of every file below a folder, by path; what is packed already is stored as it is. Raises OSError."""
    with zipfile.ZipFile(file, "x") as archive:
        archive.comment = MARK
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(root.parent).as_posix(), EARLIEST)
            entry.compress_type = (
                zipfile.ZIP_STORED if path.suffix == PACKED else zipfile.ZIP_DEFLATED
            )
            entry.external_attr, entry.create_system = MODE, 3  # Unix, wherever it is made
            entry.file_size = path.stat().st_size  # of more than 2 GiB zipfile must know it before
            with path.open("rb") as source, archive.open(entry, "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path | None]:
    """Yield the folder of a bundle, of an archive a copy in a temporary folder; None where the path is no bundle.

    Raises:
        UnreadableInput: the archive is damaged, or holds no bundle.
        OSError: it cannot be read, or there is no room for the copy.
    """
    if path.is_dir():
        yield path if (path / SUMS).is_file() else None
    elif not path.is_file() or path.suffix != ".zip":
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="ringside-bundle-") as temporary:
            yield _unpacked(path, Path(temporary))


def _unpacked(file: Path, to: Path) -> Path:
    """Unpack an archive, and return the folder of its bundle. Raises UnreadableInput."""
    try:
        with open_to_read(file) as stream, zipfile.ZipFile(stream) as archive:
            needed, free = (
                sum(entry.file_size for entry in archive.infolist()),
                shutil.disk_usage(to).free,
            )
            if needed > free:
                raise OSError(
                    f"{file}: holds {needed / 1e9:,.1f} GB unpacked, and {to.parent} has room for {free / 1e9:,.1f}"
                )
            archive.extractall(to)  # which keeps every file below the folder, and makes no links
    except CUT as error:
        raise UnreadableInput(f"{file}: a damaged archive ({error})") from None
    roots = [folder for folder in to.iterdir() if (folder / SUMS).is_file()]
    if len(roots) != 1:
        raise UnreadableInput(
            f"{file}: no bundle of a study (it holds no {SUMS}); python -m analysis report STUDY --bundle makes one"
        )
    return roots[0]


def studies(root: Path) -> list[Path]:
    """Return the folders of a bundle that hold records, last that of its study."""
    found = [folder for folder in root.iterdir() if folder.is_dir() and record_paths(folder)]
    return sorted(found, key=lambda folder: ((folder / REPORT).is_dir(), folder.name))


def changed(root: Path) -> tuple[int, list[Difference]]:
    """Return how many files a bundle names, and those that are changed, missing, or beside the named ones in their folders.

    Raises:
        UnreadableInput: the list of files is damaged.
    """
    try:
        lines = (root / SUMS).read_text(encoding="utf-8").splitlines()
        listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        raise UnreadableInput(f"{root / SUMS}: no list of hashes, as sha256sum writes it") from None
    there, folders = dict(sums(root)), {name.split("/")[0] for name in listed if "/" in name}
    found = {
        name: digest
        for name, digest in there.items()
        if name in listed or name.split("/")[0] in folders
    }
    names = sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name))
    return len(listed), [
        Difference("", name, "SHA-256", listed.get(name, ABSENT), found.get(name, ABSENT))
        for name in names
    ]
