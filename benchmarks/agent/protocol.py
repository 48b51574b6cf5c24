"""The messages between a launcher and the agent of a host: one JSON object a line.

They travel over the agent's standard input and output.

Launcher                                    Agent
                                            ready    torch is imported; cells can be run
time     what time is it?                   time     the host's monotonic clock; from now on both
                                                     give signs of life
prepare  import what a cell needs
run      fork the ranks of a cell           meeting  the port where the ranks of all hosts meet
                                                     (the first host only)
                                            started  the process of the cell; or failed: why there
                                                     is none
                                            file     new bytes of a file (of a host that writes to
                                                     a scratch folder)
                                            states   what processes do that do something else now
beat     a sign of life
stacks   ask ranks where they stand
stop     end every process of the cell      stopped  those that survive SIGKILL
                                            ended    exit status of the cell's process, after its
                                                     last file
                                            beat     a sign of life
                                            busy     for how many seconds at most there are none
look     describe the host                  looked   the description
listen   listen at addresses                listening  the ports
reach    connect to addresses               reached  which of them could be reached, and from
                                                     which interface

The end of the agent's input means: end every process of mine, and leave.
"""

import os
import selectors
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from benchmarks.record.encoding import decoded, encoded

CHUNK_BYTES = 1 << 20  # of a file in one message
MOST_BYTES = 1 << 26  # of one message: more is no message of ours
# Of a launcher that sends heartbeats: it is gone, or a wire is cut, and its agent leaves.
LONGEST_SILENCE_S = 30.0
# Before an agent reads no further files: its launcher is slower than its ranks.
MOST_WAITING_BYTES = 1 << 23


class Command(str, Enum):
    """What a launcher asks."""

    TIME = "time"
    BEAT = "beat"
    PREPARE = "prepare"
    RUN = "run"
    STACKS = "stacks"
    STOP = "stop"
    LOOK = "look"
    LISTEN = "listen"
    REACH = "reach"


class Event(str, Enum):
    """What an agent answers."""

    READY = "ready"
    TIME = "time"
    MEETING = "meeting"
    STARTED = "started"
    FAILED = "failed"
    FILE = "file"
    STATES = "states"
    STOPPED = "stopped"
    ENDED = "ended"
    BEAT = "beat"
    BUSY = "busy"
    LOOKED = "looked"
    LISTENING = "listening"
    REACHED = "reached"


class Reader:
    """Reads messages from a descriptor, as they come."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that are complete; wait for some bytes. None: the writer is gone.

        Raises ValueError: a line is no message, or too long.
        """
        received = os.read(self.descriptor, CHUNK_BYTES)
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError("a line without end")
        messages = []
        for line in lines:
            message = decoded(line)
            if not isinstance(message, dict):
                raise ValueError(f"no message: {line[:100]!r}")
            messages.append(message)
        return messages


class Writer:
    """Writes messages to a descriptor without waiting for the reader: the rest is kept."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        os.set_blocking(descriptor, False)

    @property
    def waiting_bytes(self) -> int:
        """Return how much is kept."""
        return len(self._waiting)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message after those that are kept. Raises BrokenPipeError: the reader is gone."""
        self._waiting += encoded(message)
        self.flush()

    def flush(self) -> None:
        """Write as much as can be written now. Raises BrokenPipeError: the reader is gone."""
        try:
            while self._waiting:
                written = os.write(self.descriptor, bytes(self._waiting[:CHUNK_BYTES]))
                del self._waiting[:written]
        except BlockingIOError:
            return


def wait_readable(
    reading: Iterable[Any], timeout_s: float | None, writing: Iterable[Any] = ()
) -> list[Any]:
    """Return which of `reading` can be read once any can be used; none after so many seconds.

    A pipe whose other end is closed can be read: that is how its end is seen.

    Raises ValueError: one of them is closed.
    """
    with selectors.PollSelector() as selector:  # epoll takes no file
        for stream in reading:
            selector.register(stream, selectors.EVENT_READ)
        for stream in writing:
            selector.register(stream, selectors.EVENT_WRITE)
        readable = []
        for key, events in selector.select(timeout_s):
            if events & selectors.EVENT_READ:
                readable.append(key.fileobj)
        return readable
