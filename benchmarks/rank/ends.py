"""How and when the ranks of an agent ended: seen within a millisecond, and before the agent ends the others."""

import os
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LEAVING_SECONDS = 2.0  # for a process that already ends to let go of its memory, which takes a while on a GPU
PAUSE_SECONDS = 0.002
PF_EXITING = 0x4  # linux/sched.h


@dataclass
class Ends:
    """The processes of the ranks, and those that have ended so far."""

    pids: Mapping[int, int]  # by rank
    statuses: dict[int, int | None] = field(default_factory=dict)  # by rank; a signal if negative; None: unknown

    def __post_init__(self) -> None:
        """Open a descriptor for every process: it becomes readable when the process ends."""
        self._poll, self._running = select.poll(), {}
        for rank, pid in self.pids.items():
            try:
                self._running[rank] = os.pidfd_open(pid)
            except OSError:  # the kernel or a container has no such call
                continue
            self._poll.register(self._running[rank], select.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """Return the ranks that ended since the last call; wait up to some seconds for one."""
        if self._running:
            self._poll.poll(1000 * seconds)
        else:
            time.sleep(seconds)
        return self._look()

    def rest(self) -> list[int]:
        """Return the ranks that had begun to end by themselves, now that they have; after LEAVING_SECONDS with status None.

        To be asked when a rank has ended: a peer may have ended earlier, and its process not be gone yet.
        """
        found = self._look()
        deadline = time.monotonic() + LEAVING_SECONDS
        while (leaving := self._leaving()) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
            found += self._look()
        self.statuses |= dict.fromkeys(leaving)
        return found + leaving

    def _look(self) -> list[int]:
        """Return the ranks that have ended since the last look. Their processes stay for torch to be reaped."""
        found = []
        for rank, pid in self.pids.items():
            if rank in self.statuses:
                continue
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch was faster, and goes on only after a status of 0
                self.statuses[rank] = 0
            else:
                if end is None:
                    continue
                self.statuses[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            found.append(rank)
            if rank in self._running:
                self._poll.unregister(self._running[rank])
                os.close(self._running.pop(rank))
        return found

    def _leaving(self) -> list[int]:
        """Return the ranks whose processes have begun to end."""
        return [rank for rank, pid in self.pids.items() if rank not in self.statuses and _is_ending(pid)]


def _is_ending(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return words[0] in "ZX" or bool(int(words[6]) & PF_EXITING)
