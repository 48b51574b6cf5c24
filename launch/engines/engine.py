"""The seam between supervision and a cell's processes: an engine starts them, as a job.

Supervision keeps the deadlines and names the causes. It knows no process but through a Job.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from benchmarks.agent.protocol import RankEnd
from benchmarks.record import CellFolder
from conf.cell import Cell


@dataclass(frozen=True)
class Lost:
    """A host that is lost."""

    sentence: str  # which it is and how that was seen
    heard: float  # when it was last heard; seconds since 1970


def rank_ends(folder: CellFolder) -> dict[int, RankEnd]:
    """Return how ranks ended by themselves, as the agent saw it before it ended the others."""
    try:
        return msgspec.json.decode(folder.failures.read_bytes(), type=dict[int, RankEnd])
    except (OSError, ValueError, RecursionError):
        return {}


class Job(Protocol):
    """The running processes of one cell on all its hosts."""

    def poll(self) -> int | None:
        """Return the exit status of what started the ranks; None while it runs.

        Raises OSError: they could not be started, or what they wrote could not be kept here.
        """

    def wait(self, seconds: float) -> None:
        """Wait so long, or less where the end of what started the ranks is told at once."""
        time.sleep(seconds)

    def lost(self) -> Lost | None:
        """Return the host that is lost; None if none is, as where there is only this machine."""
        return None

    def process_state(self, number: int, pid: int) -> str:
        """Return what a process does: 'running', 'stopped', …; 'gone' if there is none."""

    def agent_state(self) -> str:
        """Return what the process does that started the ranks, in the same words."""

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        """Have processes, by number, write to their logs where each of their threads stands."""

    def stop(self, grace_s: float) -> list[int]:
        """End every process within about `grace_s` seconds. Return the ids of survivors."""


@dataclass(frozen=True)
class CellPass:
    """What the processes of a cell are started for: its timed pass, or one without times."""

    cell: Cell
    folder: CellFolder  # prepared
    token: str  # which they carry
    added: Mapping[str, str]  # variables beside those that the cell asks for
    profiler: Sequence[str] = ()  # the command before theirs
    sampled: bool = False  # the machine is sampled around them


class CellEngine(Protocol):
    """Starts the processes of cells."""

    def open(self, first: Cell) -> None:
        """Begin what takes long before the first cell, which is probably this one."""
        return

    def lost(self, cell: Cell) -> str | None:
        """Return which host of a cell is lost, as a sentence; None if none is."""
        return None

    def start(self, cell_pass: CellPass) -> Job:
        """Start the processes of a cell.

        Raises:
            AgentGone: their agent was stopped, or ends just now; the next call starts another.
            OSError: they cannot be started.
        """

    def close(self) -> None:
        """End what serves all cells."""
