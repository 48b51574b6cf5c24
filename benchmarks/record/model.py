"""The record of a cell, and the lines that ranks write while they measure. Standard library only.

`<output_dir>/<study>/<cell>/record.json` is one Record: written whole or not at all (temporary file, fsync, rename).
`<cell>/ranks/<rank>.jsonl` is what one rank wrote, a JSON object a line, each with a `kind` and a `time`; a last line torn
by a crash is dropped when read. A Record can be rebuilt from these lines; MLflow is only ever a projection of Records.

Versions of the schema:
    1  first
    2  tables
    3  the cell holds no `auto`, and what its YAML files declare
"""

import dataclasses
import functools
import json
import math
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 3
FILE_NAME = "record.json"
OUTPUT_NAME = "output.txt"  # what a cell's benchmark prints
LAST_TIME = 253402300800  # the year 10000, in seconds since 1970
STATES = ("finished", "failed", "interrupted")
VERDICTS = ("valid", "suspect", "invalid")


class RecordError(ValueError):
    """A file that is no record this version can read; the message names the file and the reason."""


@dataclass(frozen=True)
class Failure:
    """Why a cell did not finish."""

    cause: str  # hang, oom, killed, nccl, exception, start, interrupted
    rank: int | None  # the first failing rank, where one is known
    message: str  # one sentence
    log_tail: str = ""  # the last lines of that rank's log


@dataclass(frozen=True)
class Validity:
    """What the checks said. A check that could not run is in `unchecked` with the reason, never passed."""

    verdict: str = "valid"  # VERDICTS
    codes: dict[str, str] = field(default_factory=dict)  # code: sentence
    unchecked: dict[str, str] = field(default_factory=dict)  # code: why it could not run


@dataclass(frozen=True)
class Record:
    """One attempt at one cell."""

    record_id: str  # unique for every attempt, 32 hexadecimal digits
    cell_key: str  # hash of what was asked; equal for every attempt at a cell
    name: str  # for people
    cell: dict[str, Any]  # what was asked, every `auto` resolved (conf.cell.Cell.to_dict)
    study: str
    sweep_id: str
    overrides: list[str]  # the command line as typed, credentials removed
    state: str  # STATES
    started_at: float  # seconds since 1970
    ended_at: float
    failure: Failure | None = None
    validity: Validity = field(default_factory=Validity)
    environment: dict[str, Any] = field(default_factory=dict)  # versions, hardware, variables, git commit
    model: dict[str, float] = field(default_factory=dict)  # parameters, gradient_bytes, arrays
    metrics: dict[str, float] = field(default_factory=dict)  # name: value; METHOD.md defines each
    series: dict[str, list[list[float]]] = field(default_factory=dict)  # name: [[step, value], …], one per window
    tables: dict[str, Any] = field(
        default_factory=dict
    )  # matrices and rows, in the JSON shapes of `python -m analysis`
    effective: dict[str, Any] = field(default_factory=dict)  # what was really used: settings, transport, link_class, …
    checks: dict[str, Any] = field(default_factory=dict)  # facts that analysis.validity.checks judges
    ranks: list[dict[str, Any]] = field(default_factory=list)  # rank, host, pid, device of each that reported
    drift: bool = False  # the first cell of a repeated list, measured once more at the end
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError where a word is not one of the accepted."""
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r}: accepted are {', '.join(STATES)}")
        if self.validity.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.validity.verdict!r}: accepted are {', '.join(VERDICTS)}")

    @property
    def marks(self) -> list[str]:
        """Which of several measurements of the same cell it is, for people; empty for the first."""
        repeat = self.cell.get("repeat") or 0
        return ["drift"] if self.drift else [f"repeat {repeat}"] if repeat else []

    @property
    def usable(self) -> bool:
        """Whether its numbers may enter a baseline or a plot unmarked."""
        return self.state == "finished" and self.validity.verdict != "invalid"


def write(folder: Path, record: Record) -> Path:
    """Write `record.json` in a cell's folder: whole or not at all, on disk when this returns. Raises OSError."""
    return write_json(folder / FILE_NAME, dataclasses.asdict(record))


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write one JSON object atomically: temporary file, fsync, rename, fsync of the folder. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    data = _encoded(content, indent=1)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


# JSON has no word for these, and a record with a bad number must stay readable: they are written as text.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _encoded(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON object and a newline. Bytes that are no UTF-8 (in a variable, in a path) come back as they were."""
    text = json.dumps(_plain(content), indent=indent, ensure_ascii=False, allow_nan=False)
    # A lone surrogate becomes \\udcXX, which is how JSON writes it.
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    """The inverse of _plain for values that hold numbers."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


def read(path: Path) -> Record:
    """Read one `record.json`.

    Raises:
        RecordError: unreadable, no record, or written by a newer Ringside.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: no readable record ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"{path}: no record (schema_version={version!r})")
    if version > SCHEMA_VERSION:
        raise RecordError(f"{path}: schema_version={version} is newer than {SCHEMA_VERSION}, the newest known here")
    try:
        for name in ("model", "metrics", "series", "checks", "tables"):
            content[name] = _restored(content.get(name, {}) if name == "tables" else content[name])
        content["failure"] = Failure(**content["failure"]) if content["failure"] is not None else None
        content["validity"] = Validity(**content["validity"])
        record = Record(**content)
        _check_types(record)
        if not _fits(record.cell.get("gpus"), list[int]):
            raise TypeError("cell.gpus is no list of ids")
        if not 0 <= record.started_at < LAST_TIME or not 0 <= record.ended_at < LAST_TIME:
            raise ValueError("started_at and ended_at are no times")
    except (TypeError, KeyError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"{path}: a damaged record ({error})") from None
    return record


_hints: Any = functools.cache(typing.get_type_hints)  # a study may have thousands of records


def _check_types(instance: "Record | Failure | Validity") -> None:
    """Raises TypeError where a field holds what its annotation does not allow: a later reader may rely on it."""
    for name, hint in _hints(type(instance)).items():
        if not _fits(value := getattr(instance, name), hint):
            raise TypeError(f"{name}={value!r:.100}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation of the classes above allows. Times and numbers fit a double."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is float:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, float) or (whole and abs(value) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if dataclasses.is_dataclass(hint) and isinstance(value, Failure | Validity):
        _check_types(value)
    return isinstance(value, hint)


def read_study(folder: Path) -> tuple[list[Record], list[RecordError]]:
    """Every record of a study, earlier attempts too, in order of their start, and what could not be read."""
    records, unreadable = [], []
    for path in sorted(folder.glob(f"*/**/{FILE_NAME}")):
        try:
            records.append(read(path))
        except RecordError as error:
            unreadable.append(error)
    return sorted(records, key=lambda record: (record.started_at, record.record_id)), unreadable


class Lines:
    """Append-only JSON lines. `write` is for every line; `sync` puts all of them on disk.

    Each line is one write to the end of the file, so that two processes can share a journal.
    """

    def __init__(self, path: Path) -> None:
        """Open for appending; the folder exists. Raises OSError."""
        self._file = path.open("ab", buffering=0)
        self._torn = _torn(path)

    def write(self, kind: str, time: float, **content: Any) -> None:
        """One line; visible to readers at once, on disk after `sync`. Raises OSError."""
        data = _encoded({"kind": kind, "time": time, **content})
        if self._torn:  # by a crash or a full disk: a line of its own for what comes next
            data = b"\n" + data
        self._torn = True
        while data:
            data = data[self._file.write(data) :]
        self._torn = False

    def sync(self) -> None:
        """Force what was written to disk. Raises OSError."""
        os.fsync(self._file.fileno())


def _torn(path: Path) -> bool:
    """Whether a file ends within a line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_line(text: str | bytes) -> dict[str, Any] | None:
    """One line that Lines wrote; None where it is torn or foreign."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    time = line.get("time")
    if not isinstance(time, int | float) or isinstance(time, bool):
        return None
    return {name: _restored(value) for name, value in line.items()}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one writer; a torn or foreign line is passed over. A missing file has no lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            line = read_line(text)
            if line is not None:
                yield line
