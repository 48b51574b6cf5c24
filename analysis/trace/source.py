"""Open a trace wherever it is: one file, several joined by commas, a folder of them, or a cell's.

The content decides the reader, not the suffix: SQLite exports of nsys and Kineto JSON, plain or
gzipped. A `.nsys-rep` goes through `nsys export`, where nsys is on PATH or named by the variable
NSYS.
"""

import gzip
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from analysis.input_files import (
    CUT,
    GZIP,
    LARGEST_JSON_BYTES,
    LARGEST_TRACE_BYTES,
    UnreadableInput,
    most_unpacked,
    pieces,
    read_text,
)
from analysis.trace.events import Names, RankTrace, Trace
from analysis.trace.kineto import read_kineto
from analysis.trace.nsys_export import read_nsys
from benchmarks.record.folder import PROFILE

_SQLITE = b"SQLite format 3\0"
_REPORT = ".nsys-rep"
_SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", _REPORT)
_EXPORT_SECONDS = 1800


def read_trace(source: str) -> Trace:
    """Return the trace of one run. Raises OSError, and UnreadableInput: it is not a trace, or its
    files are not of one run.
    """
    folder = Path(source)
    in_folder = folder.is_dir()
    if (folder / PROFILE).is_dir():
        folder = folder / PROFILE
    paths = []
    exported_stems = set()
    if in_folder:
        for path in sorted(folder.iterdir()):
            stem, suffix, _ = path.name.partition(".sqlite")
            if path.name.endswith(_SUFFIXES):
                paths.append(path)
                if suffix:
                    exported_stems.add(stem)
    else:
        paths = [Path(word) for word in source.split(",") if word]
    names: Names = {}
    parts: list[tuple[str, Trace]] = []
    for path in paths:
        if path.suffix == _REPORT and path.stem in exported_stems:
            continue  # its export is beside it
        part = _read(path, names, in_folder)
        if part is not None:
            parts.append((path.name, part))
    if not parts:
        raise UnreadableInput(
            f"{source}: no trace in this folder; expected files named …{', …'.join(_SUFFIXES)}"
        )
    return _joined(source, parts, names)


def _read(path: Path, names: Names, in_folder: bool) -> Trace | None:
    """Return one file; None for JSON in a folder that is not a trace (a record.json)."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if path.suffix == _REPORT:
                return read_nsys(exported(path, Path(scratch)), path, names)
            with _opened(path) as stream:
                head = stream.read(256)
            if head.startswith(_SQLITE):
                return read_nsys(plain_export(path, Path(scratch)), path, names)
        if not head:
            raise UnreadableInput("an empty file")
        if head.lstrip()[:1] != b"{":
            raise UnreadableInput("expected an SQLite export of nsys or the JSON of torch.profiler")
        text = read_text(path, LARGEST_JSON_BYTES)
        if in_folder and '"traceEvents"' not in text:
            return None
        return read_kineto(path.name, text, names)
    except CUT:
        raise UnreadableInput(f"{path}: cut or damaged gzip file") from None
    except UnreadableInput as error:
        raise UnreadableInput(f"{path}: {error}") from None


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
    return gzip.open(path) if is_packed else path.open("rb")


def plain_export(path: Path, scratch: Path) -> Path:
    """Return an SQLite file itself, or a decompressed copy of a gzipped one in `scratch`.

    Raises UnreadableInput: another file, or a cut gzip file.
    """
    try:
        with _opened(path) as source:
            if source.read(len(_SQLITE)) != _SQLITE:
                raise UnreadableInput("not an SQLite file, so not an export of nsys")
            if not isinstance(source, gzip.GzipFile):
                return path
            source.seek(0)
            plain = scratch / "export.sqlite"
            with plain.open("wb") as file:
                most = min(LARGEST_TRACE_BYTES, most_unpacked(path.stat().st_size))
                file.writelines(pieces(source, path.name, most))
            return plain
    except CUT:
        raise UnreadableInput("cut or damaged gzip file") from None


def exported(path: Path, scratch: Path, nsys: str | None = None) -> Path:
    """Return the SQLite export of a report, made in the folder `scratch` with `nsys`, else the nsys
    of the variable NSYS or of PATH. Raises OSError, and UnreadableInput: it cannot be exported.
    """
    path.open("rb").close()
    nsys = nsys or os.environ.get("NSYS") or shutil.which("nsys")
    if not nsys:
        raise UnreadableInput(
            "a report of Nsight Systems is read with `nsys export`, but nsys is neither on PATH "
            "nor named by the variable NSYS; on a machine with nsys: "
            f"nsys export --type=sqlite {path.name}"
        )
    target = scratch / "export.sqlite"
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={target}"]
    try:
        process = subprocess.run(
            [nsys, "export", *options, str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_EXPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UnreadableInput(f"`{nsys} export` did not end within {_EXPORT_SECONDS} s") from None
    except OSError as error:
        raise UnreadableInput(f"{nsys} cannot be run ({error.strerror})") from None
    if process.returncode or not target.exists():
        output = process.stderr.strip() or process.stdout.strip() or "nothing said"
        raise UnreadableInput(
            f"`{nsys} export` failed with status {process.returncode}: {output.splitlines()[-1]}"
        )
    return target


def of_cell(trace: Trace, hosts: int) -> Trace:
    """Return the trace of a cell on so many hosts: profilers write the clock of their host, also
    where hosts have one name.
    """
    if hosts < 2:
        return trace
    note = (
        "each host's part has a clock of its own: how long ranks wait for those of other hosts is "
        "not known"
    )
    return replace(trace, one_clock=False, notes=(*trace.notes, note))


def _joined(source: str, parts: Sequence[tuple[str, Trace]], names: Names) -> Trace:
    notes: list[str] = []
    sources: dict[str, None] = {}
    profilers, clocks, world_sizes = set(), set(), set()
    for _, part in parts:
        notes += part.notes
        sources[part.source] = None
        profilers.add(part.source.split(" ")[0])
        clocks.add(part.clock)
        if part.world_size is not None:
            world_sizes.add(part.world_size)
    if len(profilers) > 1:
        raise UnreadableInput(
            f"{source}: traces of torch.profiler and of nsys together; name one of them"
        )
    ranks = _numbered(source, parts, notes)
    if len(parts) > 1 and clocks == {None}:
        notes.append("the files do not name their host: one host is assumed, and one time of day")
    elif len(clocks) > 1:
        notes.append(
            "the files come from several hosts or reports, whose clocks differ: waiting times are "
            "not known"
        )
    if len(world_sizes) > 1:
        sizes = " and ".join(map(str, sorted(world_sizes)))
        raise UnreadableInput(f"{source}: ranks of runs with {sizes} ranks together")
    size = None
    if world_sizes:
        size = world_sizes.pop()
        if size > len(ranks):
            notes.append(f"{len(ranks)} of {size} ranks are given: waiting times cover only these")
    return Trace(
        ", ".join(sources),
        list(names),
        ranks,
        one_clock=len(clocks) == 1,
        world_size=size,
        notes=tuple(dict.fromkeys(notes)),
    )


def _numbered(
    source: str, parts: Sequence[tuple[str, Trace]], notes: list[str]
) -> tuple[RankTrace, ...]:
    """Number the ranks as their files do; if not all files do, in the order of the files."""
    file_of: dict[int, str] = {}
    ranks: list[RankTrace] = []
    numbered = all(part.numbered for _, part in parts)
    for file, part in parts:
        for rank in part.ranks:
            if not numbered:
                rank = replace(rank, rank=len(ranks))
            elif rank.rank in file_of:
                raise UnreadableInput(
                    f"{source}: {file_of[rank.rank]} and {file} are both rank {rank.rank}"
                )
            file_of[rank.rank] = file
            ranks.append(rank)
    if not numbered and len(parts) > 1:
        files = ", ".join(file for file, _ in parts)
        notes.append(f"not every file names its rank: they are numbered in the order {files}")
    return tuple(sorted(ranks, key=lambda rank: rank.rank))
