"""Try whether hosts reach each other: one listens at an address of its own, the others connect, and it answers with a word.

Only the answer shows that the right program was reached: an address of a bridge is the same on many hosts. Neither side has
a thread, and `Listening` never waits: the agent that calls them serves its launcher meanwhile.
"""

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Iterable

from benchmarks.host.interfaces import interface_of, interfaces
from benchmarks.record.os_errors import because

WITHIN_SECONDS = 3.0  # for a connection and its answer
OPEN_SECONDS = 60.0  # a listener that nobody closed
BACKLOG = 1024  # hosts that connect at the same time
WORD_BYTES = 64


class Listening:
    """Listeners of this host, each on one address and a free port, that answer every connection with a word."""

    def __init__(self, addresses: Iterable[str], word: str) -> None:
        """Listen at these addresses of this host. One at which that is not possible is in `refused`, with the reason."""
        self._word = word.encode()
        self._until = time.monotonic() + OPEN_SECONDS
        self._sockets: dict[str, socket.socket] = {}
        self.refused: dict[str, str] = {}
        for address in addresses:
            listener = socket.socket(_family(address))
            try:
                listener.bind((address, 0))
                listener.listen(BACKLOG)
                listener.setblocking(False)
                self._sockets[address] = listener
            except OSError as error:
                listener.close()
                self.refused[address] = because(error)

    @property
    def ports(self) -> dict[str, int]:
        """Return the port at each address."""
        return {address: listener.getsockname()[1] for address, listener in self._sockets.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to wait for, as select does; none after `close`."""
        return list(self._sockets.values())

    def answer(self) -> None:
        """Answer those who have connected; close what is open for too long. Never waits."""
        for listener in self._sockets.values():
            with contextlib.suppress(OSError):  # nobody is there, or nobody any more
                while True:
                    connected, _ = listener.accept()
                    with connected:
                        connected.setblocking(False)
                        connected.send(self._word)
        if time.monotonic() > self._until:
            self.close()

    def close(self) -> None:
        """Listen no longer."""
        for listener in self._sockets.values():
            listener.close()
        self._sockets = {}


def reach(ports: dict[str, int], word: str, within_s: float = WITHIN_SECONDS) -> dict[str, dict[str, str]]:
    """Connect to the listeners of another host, all at the same time; wait for at most `within_s` seconds.

    Returns for each address {"interface": the one of this host that leads there} or {"why": what went wrong}.
    """
    found: dict[str, dict[str, str]] = {}
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as waiting:
        for address, port in ports.items():
            connecting = socket.socket(_family(address))
            connecting.setblocking(False)
            error = connecting.connect_ex((address, port))
            if error in (0, errno.EINPROGRESS):
                waiting.register(connecting, selectors.EVENT_READ, address)
            else:
                connecting.close()
                found[address] = {"why": os.strerror(error)}
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                found[key.data] = _told(key.fileobj, word.encode())
                waiting.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(waiting.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            found[key.data] = {"why": f"no answer within {within_s:g} s"}
            key.fileobj.close()
    return found


def _told(connection: socket.socket, word: bytes) -> dict[str, str]:
    """Return what a connection that has something to read says."""
    try:
        answer = connection.recv(WORD_BYTES)
        here = connection.getsockname()[0]
    except OSError as error:
        return {"why": because(error)}
    if answer != word:
        return {"why": "another program answers there"}
    interface = interface_of(here.partition("%")[0], interfaces())
    return {"interface": interface} if interface else {"why": f"no interface of this host has the address {here}"}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
