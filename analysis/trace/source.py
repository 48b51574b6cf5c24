"""Load one `Trace` from what a user names: a file, a folder, or several files joined by commas.

The content decides the reader, not the suffix: SQLite exports of nsys and Kineto JSON, plain or gzipped. A `.nsys-rep`
goes through `nsys export`, where nsys is on PATH or named by the variable NSYS.
"""

import gzip
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from analysis.errors import UnreadableInput
from analysis.input_files import (
    CUT,
    GZIP,
    LARGEST_JSON_BYTES,
    LARGEST_TRACE_BYTES,
    pieces,
    read_bytes,
)
from analysis.trace.kineto import is_kineto, read_kineto
from analysis.trace.model import Names, RankTrace, Trace, TraceFile
from analysis.trace.nsys import read_nsys

_SQLITE = b"SQLite format 3\0"
_REPORTS = (".nsys-rep", ".qdrep")
_SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", *_REPORTS)
_EXPORT_SECONDS = 1800


def load_trace(source: str) -> Trace:
    """Load the trace of one run. Raises OSError if it cannot be opened, UnreadableInput if it is not a trace."""
    names = Names()
    files, of_folder = _files(source)
    parts = [
        part for file in files if (part := _read(file, names, skip_foreign=of_folder)) is not None
    ]
    if not parts:
        raise UnreadableInput(
            f"{source}: no trace in this folder; accepted are files named …{', …'.join(_SUFFIXES)}"
        )
    return _joined(source, parts, names)


def _files(source: str) -> tuple[list[Path], bool]:
    """Return the files, and whether they were found in a folder (which may hold other files)."""
    path = Path(source)
    if path.is_dir():
        found = sorted(
            one for one in path.iterdir() if one.name.endswith(_SUFFIXES) and one.is_file()
        )
        exported = {one.name.split(".sqlite")[0] for one in found if ".sqlite" in one.name}
        return [one for one in found if not (one.suffix in _REPORTS and one.stem in exported)], True
    if path.exists() or "," not in source:
        return [path], False
    return [Path(one) for one in source.split(",") if one], False


def _read(path: Path, names: Names, skip_foreign: bool) -> TraceFile | None:
    """Read one file; None for JSON in a folder that is not a trace (a record.json)."""
    try:
        if path.suffix in _REPORTS:
            with tempfile.TemporaryDirectory() as scratch:
                return replace(
                    read_nsys(exported(path, Path(scratch)), names), file=path.name, clock=str(path)
                )
        head = _start(path)
        if head.startswith(_SQLITE):
            with tempfile.TemporaryDirectory() as scratch:
                return replace(
                    read_nsys(plain_export(path, Path(scratch)), names),
                    file=path.name,
                    clock=str(path),
                )
        if head.lstrip()[:1] not in (b"{", b"["):
            raise UnreadableInput(
                "accepted are an SQLite export of nsys and the JSON of torch.profiler"
            )
        text = _bytes(path).decode("utf-8", "replace")
        if skip_foreign and not is_kineto(text):
            return None
        return read_kineto(path.name, text, names)
    except CUT:
        raise UnreadableInput(f"{path}: cut or damaged gzip file") from None
    except UnreadableInput as error:
        raise UnreadableInput(f"{path}: {error}") from None


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(256)
    if head.startswith(GZIP):
        with gzip.open(path) as file:
            head = file.read(256)
    if not head:
        raise UnreadableInput("an empty file")
    return head


def _bytes(path: Path) -> bytes:
    return read_bytes(path, LARGEST_JSON_BYTES)


def plain_export(path: Path, scratch: Path) -> Path:
    """Return an SQLite file itself, or a decompressed copy of a gzipped one in the folder `scratch`.

    Raises UnreadableInput for other files and for a cut gzip file.
    """
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    plain = path
    if packed:
        plain = scratch / "export.sqlite"
        try:
            with gzip.open(path) as source, plain.open("wb") as file:
                file.writelines(pieces(source, path.name, LARGEST_TRACE_BYTES))
        except CUT:
            raise UnreadableInput("cut or damaged gzip file") from None
    with plain.open("rb") as file:
        if file.read(len(_SQLITE)) != _SQLITE:
            raise UnreadableInput("not an SQLite file, so not an export of nsys")
    return plain


def exported(path: Path, scratch: Path, nsys: str | None = None) -> Path:
    """Export a report to SQLite in the folder `scratch`, with `nsys`, else the nsys of the variable NSYS or of PATH.

    Raises OSError if the report does not exist, UnreadableInput if it cannot be exported.
    """
    path.open("rb").close()
    nsys = nsys or os.environ.get("NSYS") or shutil.which("nsys")
    if not nsys:
        raise UnreadableInput(
            "a report of Nsight Systems is read with `nsys export`, but nsys is neither on PATH nor named by the variable "
            f"NSYS; on a machine with nsys: nsys export --type=sqlite {path.name}"
        )
    target = scratch / "export.sqlite"
    command = [
        nsys,
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={target}",
        str(path),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_EXPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnreadableInput(f"`{nsys} export` did not end within {_EXPORT_SECONDS} s") from None
    except OSError as error:
        raise UnreadableInput(f"{nsys} cannot be run ({error.strerror})") from None
    if done.returncode or not target.exists():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise UnreadableInput(f"`{nsys} export` failed with status {done.returncode}: {said}")
    return target


def of_cell(trace: Trace, hosts: int) -> Trace:
    """Return the trace of a cell on so many hosts. Profilers write the clock of their host, also where hosts have one name."""
    if hosts < 2:
        return trace
    note = "each host's part has a clock of its own: how long ranks wait for those of other hosts is not known"
    return replace(trace, one_clock=False, notes=(*trace.notes, note))


def _joined(source: str, parts: list[TraceFile], names: Names) -> Trace:
    """Join the files to one trace: number the ranks, collect the notes, decide about the clock."""
    kinds = {part.source.split(" ")[0] for part in parts}
    if len(kinds) > 1:
        raise UnreadableInput(
            f"{source}: traces of torch.profiler and of nsys together; name one of them"
        )
    notes = [note for part in parts for note in part.notes]
    ranks = _numbered(source, parts, notes)
    clocks = {part.clock for part in parts}
    one_clock = len(clocks) == 1
    if len(parts) > 1 and clocks == {None}:
        notes.append("the files do not name their host: one host and one clock are assumed")
    elif not one_clock:
        notes.append(
            "the files come from several hosts or reports, whose clocks differ: waiting times are not known"
        )
    sizes = {part.world_size for part in parts if part.world_size is not None}
    if len(sizes) > 1:
        raise UnreadableInput(
            f"{source}: ranks of runs with {' and '.join(map(str, sorted(sizes)))} ranks together"
        )
    size = sizes.pop() if sizes else None
    if size is not None and size > len(ranks):
        notes.append(f"{len(ranks)} of {size} ranks are given: waiting times cover only these")
    sources = dict.fromkeys(part.source for part in parts)
    return Trace(
        ", ".join(sources), names.table, ranks, one_clock, size, tuple(dict.fromkeys(notes))
    )


def _numbered(source: str, parts: list[TraceFile], notes: list[str]) -> tuple[RankTrace, ...]:
    """Number the ranks as their files do; if not all files do, in the order of the files."""
    if all(part.numbered for part in parts):
        ranks = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.rank)
        seen: dict[int, str] = {}
        for part in parts:
            for rank in part.ranks:
                if rank.rank in seen:
                    raise UnreadableInput(
                        f"{source}: {seen[rank.rank]} and {part.file} are both rank {rank.rank}"
                    )
                seen[rank.rank] = part.file
        return tuple(ranks)
    if len(parts) > 1:
        notes.append(
            f"not every file names its rank: they are numbered in the order {_list(part.file for part in parts)}"
        )
    every = (rank for part in parts for rank in part.ranks)
    return tuple(replace(rank, rank=number) for number, rank in enumerate(every))


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)
