"""The network interfaces of this host: their addresses and speed, and which of them leads to another host."""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent.protocol import Outbox, Say
from benchmarks.record.safe_files import because

# Bridges and tunnels inside a host, of containers and virtual machines, as their programs name them.
INNER = (
    "docker",
    "br-",
    "virbr",
    "vnet",
    "cni",
    "flannel",
    "cali",
    "lxc",
    "lxd",
    "podman",
    "tailscale",
)
NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses as `10.0.0.7/24`; the link-local ones are left out."""

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: int  # 0: the driver does not say
    loopback: bool
    inner: bool  # it leads to containers or virtual machines of the host, as far as its name and the kernel tell

    def refuse_wrong_addresses(self) -> None:
        """Refuse what is no address with a prefix. Raises ValueError."""
        for address in self.addresses:
            ipaddress.ip_interface(address)

    def to_dict(self) -> dict[str, Any]:
        """Return the interface as plain JSON types."""
        return {**dataclasses.asdict(self), "addresses": list(self.addresses)}


def interfaces() -> list[Interface]:
    """Return the interfaces of this host that are up and have an address, by name."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        known = tuple(
            filter(None, (_with_prefix(one.family, one.address, one.netmask) for one in addresses))
        )
        # Switched on; psutil's own `isup` is whether there is a carrier, which the kernel tells up to a second later.
        if state is None or "up" not in state.flags.split(",") or not known:
            continue
        loopback = all(ipaddress.ip_interface(one).is_loopback for one in known)
        inner = name.startswith(INNER) or (NET / name / "bridge").is_dir()
        found.append(Interface(name, known, max(0, state.speed), loopback, inner))
    return found


def interface_of(address: str, known: Iterable[Interface]) -> str | None:
    """Return the name of the interface that has an address; None if none has it."""
    wanted = ipaddress.ip_address(address)
    return next(
        (
            one.name
            for one in known
            if any(ipaddress.ip_interface(own).ip == wanted for own in one.addresses)
        ),
        None,
    )


def _with_prefix(family: int, address: str, netmask: str | None) -> str | None:
    """Return `10.0.0.7/24`; None for what is no address of IP, and for a link-local one, which needs its interface's name."""
    if family not in (socket.AF_INET, socket.AF_INET6) or netmask is None:
        return None
    known = ipaddress.ip_address(address.partition("%")[0])
    prefix = bin(int(ipaddress.ip_address(netmask))).count("1")
    return None if known.is_link_local else f"{known}/{prefix}"


# Try whether hosts reach each other: one listens at an address of its own, the others connect, and it answers with a word.


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


def reach(
    ports: dict[str, int], word: str, within_s: float = WITHIN_SECONDS
) -> dict[str, dict[str, str]]:
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
    return (
        {"interface": interface}
        if interface
        else {"why": f"no interface of this host has the address {here}"}
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


# Signs of life of an agent that imports: it has one thread, so a child gives them. Their end tells that its host is gone.


EVERY_S = 1.0


@contextlib.contextmanager
def given(outbox: Outbox, every_s: float = EVERY_S) -> Iterator[None]:
    """Have a child give a sign of life every so many seconds until the block ends, or until this process does.

    There are none where an earlier message is not written yet. Nothing else may be written meanwhile.
    """
    if outbox.waiting_bytes:
        yield
        return
    mine = os.getpid()
    if (child := os.fork()) == 0:
        with contextlib.suppress(OSError):  # the launcher is gone
            while os.getppid() == mine:
                outbox.send({"say": Say.BEAT.value})
                time.sleep(every_s)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Watch the wires between the hosts of a running cell: every host sends the first one a sign of life over them.


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
        return [
            *([self._listener] if self._listener else []),
            *self._unnamed,
            *self._others.values(),
        ]

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
            number: seconds
            for number, seconds in silent_s.items()
            if seconds > self._lost_after_s - 2 * BEAT_SECONDS
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
