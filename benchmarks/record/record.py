"""The record of an attempt at a cell: what was asked, used and measured, and may it be believed.

A Record can be rebuilt from the files of its cell's folder (folder.py). MLflow is only ever a
projection of Records.

Versions of the schema (`.ci/migrate_records` gives older records the form of 4):
    4  the oldest that is read
    5  tables.residuals
    6  predicted
    7  hashes of topology.txt and ranks/*.count; facts of the timed windows
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from benchmarks.record import safe_files
from benchmarks.record.encoding import NOT_FINITE, encoded, jsonable, refuse_deep, restored
from benchmarks.record.folder import CellFolder, record_paths
from benchmarks.record.shapes import DERIVED_FIELDS, RECORD_FIELDS, Finite, Number
from conf.cell import OMITTED_IF_EMPTY, Cell, Network, Optimizer

SCHEMA_VERSION = 8
OLDEST_SCHEMA = 4
LATER_FIELDS = ("predicted",)  # that the oldest schema lacks
LAST_TIME = 253402300800  # the year 10000, in seconds since 1970
STATES = ("finished", "failed", "interrupted")
REHEARSAL = "rehearsal"  # a verdict, and what the environment says of the machine planned for
VERDICTS = ("valid", "suspect", "invalid", REHEARSAL)
# Codes that say something of a cell, and nothing against its numbers. (clocks_differ may be such a
# finding too.)
FINDINGS = ("profiled", "reference_exceeded", "input_bound", "setting_no_effect", "slower_together")
# Fields whose numbers may be written as text, because JSON has no word for them.
NUMERIC = ("model", "metrics", "within_run", "series", "checks", "tables", "predicted")

Time = Annotated[float, Meta(ge=0, lt=LAST_TIME)]  # seconds since 1970


class RecordError(ValueError):
    """A file that is not a record this version can read; the message names file and reason."""


@dataclass(frozen=True)
class Failure:
    """Why a cell did not finish."""

    cause: str  # hang, oom, killed, nccl, exception, start, node_lost, interrupted
    rank: int | None  # the first failing rank, where one is known
    message: str  # one sentence
    log_tail: str = ""  # the last lines of that rank's log


@dataclass(frozen=True)
class Validity:
    """What the checks said. A check that did not run is never passed."""

    verdict: str = "valid"  # VERDICTS
    codes: dict[str, str] = field(default_factory=dict)  # code: sentence
    # code: why it could not run, although it should have
    unchecked: dict[str, str] = field(default_factory=dict)
    # validity.* as asked: what the checks judged by
    limits: dict[str, Finite] = field(default_factory=dict)
    # code: why such a cell has nothing to check
    not_applicable: dict[str, str] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The verdict as people read it: it tells how many checks could not run."""
        if not self.unchecked:
            return self.verdict
        checks = "1 check"
        if len(self.unchecked) > 1:
            checks = f"{len(self.unchecked)} checks"
        return f"{self.verdict}, {checks} not run"

    @property
    def against(self) -> dict[str, str]:
        """The codes that speak against the numbers, with their sentences."""
        return {code: sentence for code, sentence in self.codes.items() if code not in FINDINGS}


@dataclass(frozen=True)
class Record:
    """One attempt at one cell. benchmarks.record.shapes says what the open fields hold."""

    record_id: str  # unique for every attempt, 32 hexadecimal digits
    cell_key: str  # hash of what was asked; equal for every attempt at a cell
    name: str  # for people
    cell: Cell  # what was asked
    study: str
    sweep_id: str
    overrides: list[str]  # the command line as typed, credentials removed
    state: str  # STATES
    started_at: Time
    ended_at: Time
    failure: Failure | None = None
    validity: Validity = field(default_factory=Validity)
    # versions, hardware, variables, git commit
    environment: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Number] = field(default_factory=dict)  # parameters, gradient_bytes, arrays
    # {name: value}; METRICS lists each. scaling/efficiency is against the baselines of that
    # time, in checks.baselines
    metrics: dict[str, float] = field(default_factory=dict)
    # {metric: {low, high, and how it was found}}: its 95 % interval inside this run, which says
    # nothing of the next run
    within_run: dict[str, dict[str, float]] = field(default_factory=dict)
    # {name: [[step, value], …]}, one per window
    series: dict[str, list[list[Number]]] = field(default_factory=dict)
    # matrices and rows, in the JSON shapes of `python -m analysis`
    tables: dict[str, Any] = field(default_factory=dict)
    # what was really used: settings, transport, link_class, …
    effective: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)  # facts that analysis.validity judges
    # rank, host, pid, device of each that reported
    ranks: list[dict[str, Any]] = field(default_factory=list)
    # SHA-256 of each raw file, unpacked, by its path in the cell's folder, for `verify`
    raw_sha256: dict[str, str] = field(default_factory=dict)
    # of predict=auto, written before the ranks started: what the cell should give
    predicted: dict[str, Any] = field(default_factory=dict)
    drift: bool = False  # the first cell of a repeated list, measured once more at the end
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError where a word is not one of the accepted."""
        for name, word, accepted in (
            ("state", self.state, STATES),
            ("verdict", self.validity.verdict, VERDICTS),
        ):
            if word not in accepted:
                raise ValueError(f"{name}={word!r}: expected {', '.join(accepted)}")

    def order(self) -> tuple[float, str]:
        """Return what records are sorted by: their start."""
        return self.started_at, self.record_id

    def ends_within_run(self, metric: str) -> tuple[float, float] | None:
        """Return the ends of a metric's 95 % interval inside the run; None without both."""
        ends = self.within_run.get(metric, {})
        if "low" not in ends or "high" not in ends:
            return None
        return ends["low"], ends["high"]

    @property
    def usable(self) -> bool:
        """Whether its numbers may enter a baseline or a plot unmarked."""
        return self.state == "finished" and self.validity.verdict in ("valid", "suspect")


def write(folder: CellFolder, record: Record) -> Path:
    """Write `record.json` in a cell's folder: whole or not at all, on disk when this returns.

    Raises OSError.
    """
    return write_json(folder.record, dataclasses.asdict(record))


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write one JSON object whole or not at all; return its path. Raises OSError."""
    return safe_files.write_whole(path, encoded(content, indent=1))


def read(path: Path) -> Record:
    """Read one `record.json`; every value has the type that Record, Cell or shapes gives it.

    Raises RecordError: unreadable, no record, damaged, or of a schema that is not read here.
    """
    try:
        with safe_files.open_to_read(path) as file:
            text = file.read().decode("utf-8")
        content = json.loads(text, object_pairs_hook=_shared)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: no readable record ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise RecordError(f"{path}: no record (schema_version={version!r})")
    why = ""
    if version > SCHEMA_VERSION:
        why = f"newer than {SCHEMA_VERSION}, the newest known here"
    elif version < OLDEST_SCHEMA:
        why = (
            f"older than {OLDEST_SCHEMA}, the oldest known here; "
            "`.ci/migrate_records FOLDER` brings the records of a folder to it"
        )
    if why:
        raise RecordError(f"{path}: schema_version={version} is {why}")
    try:
        if any(f'"{word}"' in text for word in NOT_FINITE):
            content |= {name: restored(content[name]) for name in NUMERIC if name in content}
        refuse_deep(content)
        if jsonable(content["cell"]) != content["cell"]:
            raise ValueError("a number of its cell is not finite")
        # A lost field must not become its default (valid, no failure).
        parts = [(Record, content), (Validity, content["validity"]), (Cell, content["cell"])]
        parts += [(Network, content["cell"]["model"]), (Optimizer, content["cell"]["optimizer"])]
        if content["failure"] is not None:
            parts.append((Failure, content["failure"]))
        lost = []
        for kind, part in parts:
            lost += [entry.name for entry in dataclasses.fields(kind) if entry.name not in part]
        lost = [name for name in lost if name not in (*LATER_FIELDS, *OMITTED_IF_EMPTY)]
        if lost:
            raise KeyError(", ".join(lost))
        msgspec.convert(content, RECORD_FIELDS)
        return msgspec.convert({**content, "cell": Cell.from_dict(content["cell"])}, Record)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: a damaged record ({error})") from None


def _shared(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; equal words of thousands of records take the memory of one."""
    content = {}
    for name, value in pairs:
        content[sys.intern(name)] = sys.intern(value) if type(value) is str else value
    return content


def as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return derived values as a record's reader has them. Raises TypeError or ValueError."""
    written: dict[str, Any] = restored(json.loads(encoded(values)))
    msgspec.convert(written, DERIVED_FIELDS)
    return written


def read_study(
    folder: Path, check: Callable[[Record, CellFolder], Record] | None = None
) -> tuple[list[Record], list[RecordError]]:
    """Return every record of a study in order of their start, and what could not be read.

    Earlier attempts are among them. `check` returns the record to take instead of one, and may read
    its folder.
    """
    records, unreadable = [], []
    for path in record_paths(folder):
        try:
            record = read(path)
            if check:
                record = check(record, CellFolder(path.parent))
            records.append(record)
        except RecordError as error:
            unreadable.append(error)
    return sorted(records, key=Record.order), unreadable
