"""The record of a cell, and the lines that ranks write while they measure. Standard library only.

`<output_dir>/<study>/<cell>/record.json` is one Record: written whole or not at all (temporary file, fsync, rename).
`<cell>/ranks/<rank>.jsonl` is what one rank wrote, a JSON object a line, each with a `kind` and a `time`; a last line torn
by a crash is dropped when read. A Record can be rebuilt from these lines; MLflow is only ever a projection of Records.

Versions of the schema:
    1  first
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
FILE_NAME = "record.json"
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
    effective: dict[str, Any] = field(default_factory=dict)  # what was really used: settings, transport, link_class, …
    checks: dict[str, Any] = field(default_factory=dict)  # facts that analysis.validity judges
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
    def usable(self) -> bool:
        """Whether its numbers may enter a baseline or a plot unmarked."""
        return self.state == "finished" and self.validity.verdict != "invalid"


def write(folder: Path, record: Record) -> Path:
    """Write `record.json` in a cell's folder: whole or not at all, on disk when this returns. Raises OSError."""
    return write_json(folder / FILE_NAME, dataclasses.asdict(record))


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write one JSON object atomically: temporary file, fsync, rename, fsync of the folder. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(_plain(content), file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


def _plain(value: Any) -> Any:
    """NaN and infinity as strings: JSON has no word for them, and a record with a bad number must stay readable."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read(path: Path) -> Record:
    """Read one `record.json`.

    Raises:
        RecordError: unreadable, no record, or written by a newer Ringside.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: no readable record ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or version < 1:
        raise RecordError(f"{path}: no record (schema_version={version!r})")
    if version > SCHEMA_VERSION:
        raise RecordError(f"{path}: schema_version={version} is newer than {SCHEMA_VERSION}, the newest known here")
    try:
        failure = Failure(**content.pop("failure")) if content.get("failure") else None
        metrics = {name: float(value) for name, value in content.pop("metrics").items()}
        return Record(**{**content, "failure": failure, "validity": Validity(**content["validity"]), "metrics": metrics})
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise RecordError(f"{path}: a damaged record ({error})") from None


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
    """Append-only JSON lines of one writer. `write` is for every line; `sync` puts all of them on disk."""

    def __init__(self, path: Path) -> None:
        """Open for appending; the folder exists. Raises OSError."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, time: float, **content: Any) -> None:
        """One line; visible to readers at once, on disk after `sync`."""
        self._file.write(json.dumps({"kind": kind, "time": time, **_plain(content)}, ensure_ascii=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to disk."""
        os.fsync(self._file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one writer; a torn or foreign line is passed over. A missing file has no lines."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "kind" in line:
                yield line
