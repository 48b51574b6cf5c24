"""How the processes of a cell live on after it: one pipe from the agent of their host to each of them, and one back.

The agent makes the pipes before it forks. A process that came to the end of its cell says so and waits, with an idle device. A
line on its pipe is the next cell. The end of the pipe means: leave.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.host.messages import Inbox
from benchmarks.host.own_environ import show_in_environ
from benchmarks.record import own_files
from benchmarks.record.encoding import encoded
from conf.variables import TOKEN

STARTER_OF_RANKS = -1  # the process that started the ranks and watches them: it must know in which folder they write
MOST_SAID = 1000  # characters of what a process kept: a line of several writers to one pipe must be below 4,096 bytes


@dataclass(frozen=True)
class NextCell:
    """With what the processes go on: the folder of the next cell, its token, and what changes in their environment."""

    folder: str
    token: str
    changed: dict[str, str]
    removed: list[str]

    def enter(self, log: Path) -> None:
        """Be a process of this cell from now on: by its environment, by what the kernel shows of it, and by its log.

        Raises:
            OSError: the log cannot be written.
        """
        for name in self.removed:
            os.environ.pop(name, None)
        os.environ.update(self.changed)
        os.environ[TOKEN] = self.token
        show_in_environ(TOKEN, self.token)
        write_to(log)


class Staying:
    """The pipes between the agent of a host and the processes of a cell that outlive it. Both sides hold one of these."""

    def __init__(self, pool: str, numbers: Sequence[int]) -> None:
        """Make the pipes, in the agent. `pool` names these processes, in records."""
        self.pool, self._numbers = pool, list(numbers)
        self._orders = {number: os.pipe() for number in (STARTER_OF_RANKS, *numbers)}
        self._said = os.pipe()
        self._inboxes: dict[int, Inbox] = {}
        self._ended: dict[int, list[str]] = {}

    # In the agent

    def be_agent(self) -> None:
        """Keep the agent's ends. The end of a pipe is seen only if nobody else holds its other end."""
        for reading, _ in self._orders.values():
            os.close(reading)
        os.close(self._said[1])
        os.set_blocking(self._said[0], False)

    @property
    def descriptor(self) -> int:
        """Return what can be read when a process came to the end of its cell, or all are gone."""
        return self._said[0]

    def all_ended(self) -> list[str] | None:
        """Return what the processes kept of the cell, as sentences, once all came to its end; None before."""
        inbox = self._inboxes.setdefault(self.descriptor, Inbox(self.descriptor))
        with contextlib.suppress(BlockingIOError):
            for message in inbox.receive() or ():
                self._ended[int(message["number"])] = [str(one) for one in message["kept"]]
        if len(self._ended) < len(self._numbers):
            return None
        return [sentence for number in sorted(self._ended) for sentence in self._ended[number]]

    def go_on(self, following: NextCell) -> None:
        """Have every process go on with the next cell. Raises BrokenPipeError: one of them is gone."""
        self._ended = {}
        for _, writing in self._orders.values():  # the one that watches the ranks first
            os.write(writing, encoded(asdict(following)))

    def leave(self) -> None:
        """Have every process leave."""
        for _, writing in self._orders.values():
            os.close(writing)
        os.close(self._said[0])

    # In the processes

    def be_process(self) -> None:
        """Keep the ends of the processes."""
        for _, writing in self._orders.values():
            os.close(writing)
        os.close(self._said[0])

    def said_to_starter(self) -> Iterator[NextCell]:
        """Yield the cells with which the ranks went on since the last call, without waiting."""
        reading = self._orders[STARTER_OF_RANKS][0]
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):
            for message in self._inboxes.setdefault(reading, Inbox(reading)).receive() or ():
                yield NextCell(**message)

    def next(self, number: int, kept: Sequence[str]) -> NextCell | None:
        """Say that a process came to the end of its cell and what it `kept` of it, then wait. None: leave."""
        message: dict[str, Any] = {"number": number, "kept": ["; ".join(kept)[:MOST_SAID]] if kept else []}
        os.write(self._said[1], encoded(message))
        reading = self._orders[number][0]
        inbox = self._inboxes.setdefault(reading, Inbox(reading))
        while (messages := inbox.receive()) is not None:
            for one in messages:
                return NextCell(**one)
        return None


def write_to(log: Path) -> None:
    """Have what this process prints go to a log of its own. Raises OSError."""
    descriptor = own_files.open_own(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
