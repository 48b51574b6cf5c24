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
                                                     last file, and how ranks ended
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
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from benchmarks.record.encoding import encoded

CHUNK_BYTES = 1 << 20  # of a file in one message
MOST_BYTES = 1 << 26  # of one message: more is not a message of ours
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


Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Status = Annotated[int, Meta(ge=-255, le=255)]


@dataclass(frozen=True)
class RankEnd:
    """How a process of a cell ended that should not have, and when."""

    status: Status | None  # a signal if negative; None: nobody knows
    time: float  # seconds since 1970; of several that were found ended at one look, the same
    why: str = ""  # if the host knows


# What each event holds. JSON has no word for a number that is not finite, and msgspec takes none.
FIELDS: dict[Event, dict[str, Any]] = {
    Event.READY: {"pid": Pid, "torch": str},
    Event.TIME: {"sent": float, "monotonic": float},
    Event.MEETING: {"cell": str, "port": Port},
    Event.STARTED: {"cell": str, "pid": Pid},
    Event.FAILED: {"cell": str, "why": str},
    Event.FILE: {"cell": str, "name": str, "at": int | None, "data": bytes},
    Event.STATES: {"cell": str, "states": dict[str, str]},
    Event.STOPPED: {"cell": str, "survivors": list[Pid]},
    Event.ENDED: {"cell": str, "status": Status, "ranks": dict[int, RankEnd]},
    Event.BEAT: {},
    Event.BUSY: {"for_s": float},
    Event.LOOKED: {"said": str},
    Event.LISTENING: {"ports": dict[str, Port], "refused": dict[str, str]},
    Event.REACHED: {"found": dict[str, dict[str, str]]},
}
Typed: Any = TypedDict  # mypy knows only those that are written out
EVENT = msgspec.json.Decoder(Typed("EventName", {"say": Event}))
EVENTS = {
    event: msgspec.json.Decoder(Typed(event.value, {"say": Event, **fields}))
    for event, fields in FIELDS.items()
}


def read_event(line: bytes) -> dict[str, Any]:
    """Return what an agent says, with the fields of its event. Raises ValueError."""
    try:
        event: dict[str, Any] = EVENTS[EVENT.decode(line)["say"]].decode(line)
    except RecursionError:
        raise ValueError("it is too deep") from None
    return event


class Reader:
    """Reads lines from a descriptor, as they come."""

    def __init__(self, descriptor: int, longest: int) -> None:
        """Read lines of up to `longest` bytes."""
        self.descriptor, self.longest = descriptor, longest
        self._pieces: list[bytes] = []  # of the last line
        self._piece_bytes = 0

    def receive(self) -> list[bytes] | None:
        """Return the lines that are complete; wait for some bytes. None: the writer is gone.

        The beginning of a line that is too long is one too, and no message.
        """
        try:
            received = os.read(self.descriptor, CHUNK_BYTES)
        except ConnectionResetError:  # it left before it had read everything
            received = b""
        if not received:
            return None
        first, *rest = received.split(b"\n")
        self._pieces.append(first)
        self._piece_bytes += len(first)
        if not rest and self._piece_bytes <= self.longest:
            return []
        lines = [b"".join(self._pieces), *rest]
        self._pieces = [lines.pop() if rest else b""]
        self._piece_bytes = len(self._pieces[0])
        return lines


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
