"""Identify a sweep and the process that runs it, also after that process has ended."""

import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
import psutil

from analysis.text import count
from benchmarks.record import Record
from benchmarks.record.lines import now
from launch.machine.facts import boot_id

MOST_PID = 1 << 22  # Linux gives none above
# A start time read twice may differ by this much when the host's clock was stepped.
CLOCK_SLACK_S = 5.0


@dataclass(frozen=True)
class ProcessIdentity:
    """Names one process among all that ever ran: a pid alone is given to other processes later."""

    host: str
    pid: int
    started: float  # seconds since 1970, as psutil reports it
    boot_id: str  # of the host's kernel; empty where it has none

    @staticmethod
    def own() -> "ProcessIdentity":
        """Return the identity of the calling process."""
        return ProcessIdentity(
            platform.node(), os.getpid(), psutil.Process().create_time(), boot_id()
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


def identity_of(content: object) -> ProcessIdentity | None:
    """Return the identity that a JSON object of a journal holds; None where it holds none."""
    try:
        process = msgspec.convert(content, ProcessIdentity, strict=True)
    except msgspec.ValidationError:
        return None
    if not 0 < process.pid <= MOST_PID:
        return None
    return process


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
        """Name beside other sweeps of the study: `4 cells · 2026-11-21 10:31`, in local time."""
        moment = datetime.fromtimestamp(self.started_at).strftime("%Y-%m-%d %H:%M")
        return f"{count(self.cells, 'cell')} · {moment}"


def sweep_of(records: Sequence[Record]) -> Sweep:
    """Return the sweep that some records belong to, with the calling process as its writer.

    Raises:
        TypeError: a record's time is no number.
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
