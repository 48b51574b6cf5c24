"""Keep the folder of a study: cells with their attempts, and a journal that survives.

<output_dir>/<study>/journal.jsonl  what was begun and ended, and by which process; append-only
<output_dir>/<study>/<cell>/        a cell (benchmarks.record.folder)
"""

import contextlib
import dataclasses
import errno
import os
import platform
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import psutil

from analysis.text import count
from analysis.validity.checks import judged
from analysis.verification.complete import complete, lines_of_ranks
from benchmarks import record as records
from benchmarks.agent import processes
from benchmarks.record import (
    CellFolder,
    Failure,
    Kind,
    Lines,
    Record,
    RecordError,
    decoded,
    read_lines,
    safe_files,
    write_json,
)
from benchmarks.record.lines import now
from benchmarks.record.safe_files import NotOurs, because
from conf.cell import Cell
from conf.options import Refused, expand_path
from conf.schema import ValidityLimits
from launch.machine import facts
from launch.study.run_environment import RunEnvironment

MOST_PID = 1 << 22  # Linux gives none above
# A start time read twice may differ by this much when the host's clock was stepped.
CLOCK_SLACK_S = 5.0


@dataclass(frozen=True)
class ProcessIdentity:
    """Names one process among all that ever ran: a pid alone is given to other processes later."""

    host: str
    pid: Annotated[int, msgspec.Meta(gt=0, le=MOST_PID)]
    started: float  # seconds since 1970, as psutil reports it
    boot_id: str  # of the host's kernel; empty where it has none

    @staticmethod
    def own() -> "ProcessIdentity":
        """Return the identity of the calling process."""
        return ProcessIdentity(
            platform.node(), os.getpid(), psutil.Process().create_time(), facts.boot_id()
        )

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended; False for a process on another host."""
        own = ProcessIdentity.own()
        if self.host != own.host:
            return False
        if self.boot_id != own.boot_id:
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return bool(abs(process.create_time() - self.started) > CLOCK_SLACK_S)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclass(frozen=True)
class Sweep:
    """One invocation of `launch.py`: the parent run of its cells."""

    sweep_id: str  # 32 hexadecimal digits
    study: str
    overrides: list[str]  # the command line as typed, credentials removed
    started_at: float  # seconds since 1970
    cells: int  # how many are planned
    process: ProcessIdentity  # the one that writes its runs

    @staticmethod
    def begin(study: str, overrides: list[str], cells: int) -> "Sweep":
        """Return a new sweep of the calling process, which starts now."""
        return Sweep(uuid.uuid4().hex, study, overrides, now(), cells, ProcessIdentity.own())

    @property
    def name(self) -> str:
        """Name beside other sweeps of the study: `4 runs · 2026-11-21 10:31`, in local time."""
        moment = datetime.fromtimestamp(self.started_at).strftime("%Y-%m-%d %H:%M")
        return f"{count(self.cells, 'run')} · {moment}"


def sweep_of(records: Sequence[Record]) -> Sweep:
    """Return the sweep that some records belong to, with the calling process as its writer.

    Raises TypeError: a record's time is not a number.
    """
    first = min(records, key=lambda record: record.started_at)
    return Sweep(
        first.sweep_id,
        first.study,
        first.overrides,
        first.started_at,
        len(records),
        ProcessIdentity.own(),
    )


# What a file of an attempt that holds something else than Ringside wrote may raise.
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Of a folder of ours: it cannot lead elsewhere.
PLAIN_NAME = r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\Z"
PROFILED = "profiled"  # the code of validity that says what the profiled pass gave


@dataclass(frozen=True)
class _OpenAttempt:
    """What the journal says of an attempt that was begun and has not ended."""

    token: str
    cell: Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)]
    process: ProcessIdentity  # of the launcher
    time: float  # of its begin, in seconds since 1970


def study_folder(output_dir: str, name: str) -> Path:
    """Return the folder of a study. Raises Refused: output_dir names the home of nobody."""
    return expand_path("output_dir", output_dir) / name


class StudyFolder:
    """The folder of a study, opened for measuring."""

    def __init__(self, output_dir: str, name: str, only_read: bool = False) -> None:
        """Make the folder, unless it is only read. Raises Refused if it cannot be written."""
        self.name = name
        self.folder = study_folder(output_dir, name)
        if only_read:
            return
        try:
            safe_files.make_folder(self.folder)
            self._folder_status = self.folder.stat()
            self._journal = Lines(self.folder / "journal.jsonl")
        except OSError as error:
            raise Refused(
                f"output_dir={output_dir}: cannot be written ({because(error)})"
            ) from None

    def finished(self, cell: Cell, here: RunEnvironment | None = None) -> Record | None:
        """Return the record of a cell that was finished before; None if it must be measured.

        The newest attempt in the environment of `here` decides, or the newest of all. A cell with a
        profiler is finished once its profiled pass has said what it gave.
        """
        for record in self.attempts(cell):
            if here and here.differences(record):
                continue
            codes = record.validity.codes.keys() | record.validity.unchecked.keys()
            profiled = cell.profiler == "none" or PROFILED in codes
            if record.state == "finished" and profiled:
                return record
            return None
        return None

    def attempts(self, cell: Cell) -> Iterator[Record]:
        """Yield the readable records of the attempts at a cell, the newest first."""
        folder = CellFolder(self.folder / cell.folder)
        try:
            newest = records.read(folder.record)
        except RecordError:
            return
        earlier: list[Record] = []
        for attempt_folder in folder.earlier_attempts():
            with contextlib.suppress(RecordError):
                earlier.append(records.read(attempt_folder.record))
        earlier.sort(key=lambda record: record.started_at, reverse=True)
        for record in [newest, *earlier]:
            if record.cell_key == record.cell.key == cell.key:
                yield record

    def folder_of(self, record: Record) -> CellFolder:
        """Return the folder with the files of a record's attempt."""
        folder = CellFolder(self.folder / record.cell.folder)
        for earlier in folder.earlier_attempts():
            with contextlib.suppress(FileNotFoundError):
                text = earlier.attempt.read_text(encoding="utf-8", errors="replace")
                if record.record_id in text:
                    return earlier
        return folder

    def check_still_mounted(self) -> None:
        """Refuse to write where another folder has the study's path. Raises OSError."""
        try:
            same = os.path.samestat(self.folder.stat(), self._folder_status)
        except FileNotFoundError:
            same = False
        if not same:
            raise OSError(
                errno.ENOENT,
                "the folder is gone; was it moved, or its file system unmounted?",
                str(self.folder),
            )

    def lock(self, cell: Cell) -> contextlib.AbstractContextManager[bool]:
        """Hold a cell while entered; yields False if another launcher holds the cell.

        The kernel frees the lock when its holder dies. Raises OSError: also without its folder.
        """
        self.check_still_mounted()
        return _lock(CellFolder(self.folder / cell.folder))

    def who_holds(self, cell: Cell) -> str:
        """Return which process measures a cell by the journal, and since when, as a sentence."""
        for attempt in reversed(self._open_attempts().values()):
            if attempt.cell == cell.folder and not attempt.process.gone:
                since = time.strftime("%H:%M:%S", time.localtime(attempt.time))
                process = attempt.process
                return f"process {process.pid} on {process.host} has measured it since {since}"
        return "another launcher holds it"

    def begin(self, cell: Cell, token: str, details: Mapping[str, Any]) -> CellFolder:
        """Set an earlier attempt aside and begin a new one, locked. Raises OSError, NotOurs.

        `token` marks its processes; `details` are fields of the Record known before it starts.
        """
        folder = CellFolder(self.folder / cell.folder)
        self._close_left(folder)
        folder.set_aside()
        prepare(folder, cell)
        topology = details["environment"].get("topology")
        if topology:
            safe_files.write_whole(folder.topology, topology.encode())
        write_json(folder.attempt, {"record_id": token, "started_at": now(), **details})
        self.note(Kind.BEGIN, cell=cell.folder, token=token)
        return folder

    def end(self, folder: CellFolder, record: Record) -> None:
        """Write the record and note the end of the attempt in the journal. Raises OSError."""
        records.write(folder, record)
        name = folder.path.name
        self.note(Kind.END, cell=name, token=record.record_id, state=record.state)

    def recover(self) -> list[Record]:
        """Close the attempts that dead launchers left open, and return their records.

        Their processes are ended; what they measured is kept as an interrupted record. A damaged
        line of the journal is passed over, and a damaged attempt is set aside when its cell is
        measured again.
        """
        closed = []
        for token, attempt in self._open_attempts().items():
            folder = CellFolder(self.folder / attempt.cell)
            if not attempt.process.gone or not folder.path.is_dir():
                continue  # another sweep is measuring it now, or there is nothing to close
            with contextlib.suppress(NotOurs), _lock(folder) as ours:
                if not ours:
                    continue  # another sweep is closing it, or measures it anew
                processes.end(token, 0.0)
                record = self._close_left(folder)
                if record is not None and record.record_id == token:
                    closed.append(record)
                else:  # its record is there already
                    self.note(Kind.END, cell=attempt.cell, token=token, state="closed before")
        return closed

    def _open_attempts(self) -> dict[str, _OpenAttempt]:
        """Return the attempts that the journal does not see end, by token."""
        attempts: dict[str, _OpenAttempt] = {}
        for line in read_lines(self.folder / "journal.jsonl"):
            if line["kind"] == Kind.BEGIN:
                with contextlib.suppress(ValueError):  # of a damaged line
                    attempt = msgspec.convert(line, _OpenAttempt)
                    attempts[attempt.token] = attempt
            elif line["kind"] == Kind.END:
                attempts.pop(str(line.get("token")), None)
        return attempts

    def _close_left(self, folder: CellFolder) -> Record | None:
        """Write an interrupted record for a locked attempt without one, and return it."""
        if folder.record.exists() or not folder.attempt.exists():
            return None  # it died after the record was written, or before anything was begun
        failure = Failure("interrupted", None, "the launching process ended before the run did")
        try:
            folder.refuse_too_large()
            ended_at: float = folder.attempt.stat().st_mtime
            for path in folder.all_rank_lines():  # the last sign of a rank
                ended_at = max([ended_at, *(line["time"] for line in read_lines(path))])
            record = assemble(folder, "interrupted", failure, ended_at, (), self.folder_of)
            record = judged(record, ValidityLimits())
        except (RecordError, *DAMAGED):
            return None
        processes.end(record.record_id, 0.0)
        self.end(folder, record)
        return record

    @contextlib.contextmanager
    def timed_step(self, token: str, part: str) -> Iterator[None]:
        """Note in the journal the seconds that the entered context takes for an attempt.

        A journal that cannot be written any more is left alone.
        """
        began = now()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.note(Kind.SPENT, token=token, part=part, seconds=now() - began)

    def note(self, kind: str, **content: Any) -> None:
        """Write a line about the sweep to the journal."""
        process = dataclasses.asdict(ProcessIdentity.own())
        self._journal.write(kind, now(), process=process, **content)
        self._journal.sync()


def prepare(folder: CellFolder, cell: Cell) -> CellFolder:
    """Make a folder for ranks with the cell that they read; return the folder. Raises OSError."""
    write_json(folder.make().cell, cell.to_dict())
    return folder


@contextlib.contextmanager
def _lock(folder: CellFolder) -> Iterator[bool]:
    """Take a cell's lock file without waiting; yield whether it is held now."""
    safe_files.make_folder(folder.path)
    with safe_files.locked(folder.lock) as ours:
        yield ours


def assemble(
    folder: CellFolder,
    state: str,
    failure: Failure | None,
    ended_at: float,
    study_records: Iterable[Record],
    folder_of: Callable[[Record], CellFolder],
) -> Record:
    """Return the record of an attempt from its files, and write what the benchmark prints.

    It is not yet judged. The same folder gives the same record. `study_records` are the study's
    records so far.

    Raises RecordError: the folder holds no begun attempt.
    """
    try:
        cell = Cell.from_dict(decoded(safe_files.read_whole(folder.cell)))
        attempt = decoded(safe_files.read_whole(folder.attempt))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{folder.path}: no attempt was begun here ({error})") from None
    begun = Record(
        cell_key=cell.key,
        name=cell.name,
        cell=cell,
        state=state,
        failure=failure,
        ended_at=max(ended_at, attempt["started_at"]),
        raw_sha256=folder.raw_sha256(),
        **attempt,
    )
    record, output = complete(begun, folder, lines_of_ranks(cell, folder), study_records, folder_of)
    if output:
        safe_files.write_whole(folder.output, f"{output}\n".encode())
    return record


def find_finished(
    cells: Sequence[Cell],
    study: StudyFolder,
    here: RunEnvironment,
    note: Callable[[str], None],
    by_id: Mapping[str, Record] = MappingProxyType({}),
) -> dict[int, Record]:
    """Return the records of cells that were finished in this environment, by their index.

    `note` gets a sentence on each difference for which cells are measured again. A record of
    `by_id` is returned instead of a second copy.
    """
    finished: dict[int, Record] = {}
    again = Counter[str]()
    for index, cell in enumerate(cells):
        record = study.finished(cell, here)
        if record:
            finished[index] = by_id.get(record.record_id, record)
            continue
        newest = next(study.attempts(cell), None)
        if newest is not None:
            changes = here.differences(newest)
            if changes:
                again["; ".join(changes)] += 1
    for why, cells_again in again.items():
        note(f"measuring {count(cells_again, 'run')} again: {why}. Earlier results are kept")
    by_changed_code = _measured_by_other_code(cells, finished, by_id.values())
    if by_changed_code:
        note(
            f"{count(by_changed_code, 'run')} of this study with other code of yours: the changed "
            "code is measured beside them (for a study of its own, study=NAME)"
        )
    code = facts.facts().get("code")
    by_other_code = sum(record.environment.get("code") != code for record in finished.values())
    if by_other_code:
        note(
            f"{count(by_other_code, 'run')} of another version of Ringside: the report does not "
            "compare these with new ones (resume=false measures all again)"
        )
    return finished


def _measured_by_other_code(
    cells: Sequence[Cell], finished: Collection[int], records: Iterable[Record]
) -> int:
    """Return the number of records that differ from a cell to be measured in the user's code."""
    declared = {}  # by all else of a cell
    for index, cell in enumerate(cells):
        if index not in finished and any("sha256" in rules for rules in cell.declared.values()):
            declared[_without_code(cell)] = cell.declared
    others = 0
    for record in records if declared else ():
        here = declared.get(_without_code(record.cell), record.cell.declared)
        others += record.state == "finished" and record.cell.declared != here
    return others


def _without_code(cell: Cell) -> str:
    return dataclasses.replace(cell, declared={}, repeat=0).key
