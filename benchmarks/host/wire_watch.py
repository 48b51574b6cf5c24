"""Watch the wires between the hosts of a running cell: every host sends the first one a sign of life over them.

A rank that waits for one behind a cut wire waits for minutes: TCP repeats what is not acknowledged. The pipe of an agent may
take another wire. So the agents themselves speak over the wire of the ranks, a byte a second, at the address where these meet.
"""

import contextlib
import socket
import time
from collections.abc import Mapping

BEAT_SECONDS = 1.0
HELLO_BYTES = 64  # the token of the cell and the number of the host


class WireWatch:
    """The connections of this host to those that it watches. Nothing here waits: the agent calls it several times a second."""

    def __init__(self, token: str, host: int, lost_after_s: float) -> None:
        """`host` is this host's number in the cell; one that is silent for `lost_after_s` seconds is lost."""
        self._token, self._host, self._lost_after_s = token, host, lost_after_s
        self._listener: socket.socket | None = None
        self._unnamed: list[socket.socket] = []  # connected, and their hello has not come
        self._others: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}
        self._next_beat = 0.0

    def listen(self, address: str) -> int:
        """Listen at an address of this host, the first; return the port. Raises OSError."""
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._listener.bind((address, 0))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        return int(self._listener.getsockname()[1])

    def connect(self, address: str, port: int, within_s: float) -> None:
        """Connect to the first host. Raises OSError: it is not reached."""
        connection = socket.create_connection((address, port), timeout=within_s)
        connection.sendall(f"{self._token} {self._host}".ljust(HELLO_BYTES).encode())
        self._watch(0, connection)

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to wait for, as select does."""
        return [*([self._listener] if self._listener else []), *self._unnamed, *self._others.values()]

    def look(self) -> Mapping[int, float]:
        """Take what has come, and send a sign of life. Returns for each lost host since how many seconds it is silent."""
        self._accept()
        now = time.monotonic()
        for number, connection in list(self._others.items()):
            try:
                if connection.recv(4096):
                    self._heard[number] = now
                else:
                    self._forget(number)  # it has left: its cell has ended, or its launcher knows
            except BlockingIOError:
                continue
            except OSError:
                self._forget(number)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            for connection in self._others.values():
                with contextlib.suppress(OSError):  # full: the wire is cut, and silence will tell
                    connection.send(b".")
        silent_s = {number: now - self._heard[number] for number in self._others}
        if max(silent_s.values(), default=0.0) <= self._lost_after_s:
            return {}
        # Hosts behind one cut wire were last heard within a beat of each other: they are told together.
        return {
            number: seconds for number, seconds in silent_s.items() if seconds > self._lost_after_s - 2 * BEAT_SECONDS
        }

    def close(self) -> None:
        """Close every connection."""
        for one in self.sockets:
            one.close()
        self._listener, self._unnamed, self._others = None, [], {}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # nobody is there, or no descriptor is left
            while self._listener:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._unnamed.append(connection)
        for connection in list(self._unnamed):
            try:
                words = connection.recv(HELLO_BYTES).decode(errors="replace").split()
            except BlockingIOError:
                continue
            except OSError:
                words = []
            self._unnamed.remove(connection)
            if len(words) == 2 and words[0] == self._token and words[1].isdecimal():
                self._watch(int(words[1]), connection)
            else:  # no host of this cell
                connection.close()

    def _watch(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._others[number], self._heard[number] = connection, time.monotonic()

    def _forget(self, number: int) -> None:
        self._others.pop(number).close()
