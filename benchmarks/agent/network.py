"""The network interfaces of this host, and whether they lead to another host, still."""

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record.safe_files import because

# Bridges and tunnels inside a host, of containers and virtual machines, as their programs name
# them.
INNER = tuple(
    [
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
    ]
)
NET = Path("/sys/class/net")
PROBE_SECONDS = 3.0  # for a connection and its answer
OPEN_SECONDS = 60.0  # a listener that nobody closed
BACKLOG = 1024  # hosts that connect at the same time
WORD_BYTES = 64
BEAT_SECONDS = 1.0
HELLO_BYTES = 64  # the token of the cell and the number of the host


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses as `10.0.0.7/24` but link-local ones."""

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: int  # 0: the driver does not say
    loopback: bool
    inner: bool  # leads to containers or virtual machines, as far as name and kernel tell

    def refuse_wrong_addresses(self) -> None:
        """Refuse what is no address with a prefix. Raises ValueError."""
        for address in self.addresses:
            ipaddress.ip_interface(address)

    def to_dict(self) -> dict[str, Any]:
        """Return the interface as plain JSON types."""
        return {**asdict(self), "addresses": list(self.addresses)}


def interfaces() -> list[Interface]:
    """Return the interfaces of this host that are up and have an address, by name."""
    states = psutil.net_if_stats()
    usable = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = []
        for entry in entries:
            address = _with_prefix(entry.family, entry.address, entry.netmask)
            if address is not None:
                addresses.append(address)
        # Switched on; psutil's own `isup` is whether there is a carrier, which the kernel tells up
        # to a second later.
        state = states.get(name)
        if state is None or "up" not in state.flags.split(",") or not addresses:
            continue
        loopback = all(ipaddress.ip_interface(address).is_loopback for address in addresses)
        inner = name.startswith(INNER) or (NET / name / "bridge").is_dir()
        speed = max(0, state.speed)
        usable.append(Interface(name, tuple(addresses), speed, loopback, inner))
    return usable


def _with_prefix(family: int, address: str, netmask: str | None) -> str | None:
    """Return `10.0.0.7/24`; None for what is no IP address and for a link-local one."""
    if family not in (socket.AF_INET, socket.AF_INET6) or netmask is None:
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_link_local:  # it needs its interface's name
        return None
    prefix = bin(int(ipaddress.ip_address(netmask))).count("1")
    return f"{ip}/{prefix}"


def interface_of(address: str, candidates: Iterable[Interface]) -> str | None:
    """Return the name of the interface that has an address; None if none has it."""
    ip = ipaddress.ip_address(address)
    for interface in candidates:
        for own in interface.addresses:
            if ipaddress.ip_interface(own).ip == ip:
                return interface.name
    return None


# Before a sweep: one host listens, the others connect, and it answers with a word.


class ProbeListeners:
    """Listeners of this host, one an address, that answer every connection with a word."""

    def __init__(self, addresses: Iterable[str], word: str) -> None:
        """Listen at free ports. An address where that is impossible is in `refused`, with why."""
        self._word = word.encode()
        self._until = time.monotonic() + OPEN_SECONDS
        self._listeners: dict[str, socket.socket] = {}
        self.refused: dict[str, str] = {}
        for address in addresses:
            listener = socket.socket(_family(address))
            try:
                listener.bind((address, 0))
                listener.listen(BACKLOG)
                listener.setblocking(False)
                self._listeners[address] = listener
            except OSError as error:
                listener.close()
                self.refused[address] = because(error)

    @property
    def ports(self) -> dict[str, int]:
        """Return the port at each address."""
        return {address: own.getsockname()[1] for address, own in self._listeners.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to wait for; none after `close`."""
        return list(self._listeners.values())

    def answer(self) -> None:
        """Answer those who have connected; close what is open for too long. Never waits."""
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):  # nobody is there, or nobody any more
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.setblocking(False)
                        connection.send(self._word)
        if time.monotonic() > self._until:
            self.close()

    def close(self) -> None:
        """Listen no longer."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners = {}


def try_connect(
    ports: Mapping[str, int], word: str, within_s: float = PROBE_SECONDS
) -> dict[str, dict[str, str]]:
    """Connect to the listeners of another host, all at the same time, for `within_s` seconds.

    Returns for each address {"interface": the one of this host that leads there} or {"why": what
    went wrong}.
    """
    results: dict[str, dict[str, str]] = {}
    connections: dict[str, socket.socket] = {}
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for address, port in ports.items():
            connection = stack.enter_context(socket.socket(_family(address)))
            connection.setblocking(False)
            error = connection.connect_ex((address, port))
            if error in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_READ, address)
                connections[address] = connection
            else:
                results[address] = {"why": os.strerror(error)}
        while len(results) < len(ports) and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                connection = connections.pop(key.data)
                results[key.data] = _probe_result(connection, word.encode())
                selector.unregister(connection)
    for address in connections:
        results[address] = {"why": f"no answer within {within_s:g} s"}
    return results


def _probe_result(connection: socket.socket, word: bytes) -> dict[str, str]:
    try:
        answer = connection.recv(WORD_BYTES)
        own_address = connection.getsockname()[0]
    except OSError as error:
        return {"why": because(error)}
    if answer != word:
        return {"why": "another program answers there"}
    interface = interface_of(own_address.partition("%")[0], interfaces())
    if interface is None:
        return {"why": f"no interface of this host has the address {own_address}"}
    return {"interface": interface}


def _family(address: str) -> socket.AddressFamily:
    if ipaddress.ip_address(address).version == 6:
        return socket.AF_INET6
    return socket.AF_INET


# While a cell runs: only a sign of life over the network of the ranks tells that it is cut, as the
# launcher may reach the agents over another.


class PeerHeartbeat:
    """Connections between the first host of a cell and each other, with a heartbeat both ways."""

    def __init__(self, token: str, host: int, lost_after_s: float) -> None:
        """`host` is this host's number; one that is silent for `lost_after_s` seconds is lost."""
        self._hello = f"{token} {host}".ljust(HELLO_BYTES).encode()
        self._token, self._lost_after_s = token, lost_after_s
        self._listener: socket.socket | None = None
        self._unnamed: list[socket.socket] = []  # connected, and their hello has not come
        self._peers: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}
        self._next_beat = 0.0

    def listen(self, address: str) -> int:
        """Listen at an address of this host, the first; return the port. Raises OSError."""
        self._listener = socket.socket(_family(address))
        self._listener.bind((address, 0))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        return int(self._listener.getsockname()[1])

    def connect(self, address: str, port: int, within_s: float) -> None:
        """Connect to the first host. Raises OSError: it is not reached."""
        connection = socket.create_connection((address, port), timeout=within_s)
        connection.sendall(self._hello)
        connection.setblocking(False)
        self._add(0, connection)

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to wait for."""
        sockets = [*self._unnamed, *self._peers.values()]
        if self._listener:
            sockets.append(self._listener)
        return sockets

    def beat(self) -> dict[int, float]:
        """Take what has come, and send a heartbeat. Returns the seconds of silence of lost hosts.

        Hosts behind one cut wire were last heard within a heartbeat of each other: they are
        returned together.
        """
        self._accept()
        now = time.monotonic()
        for number, connection in list(self._peers.items()):
            data = _received(connection, 4096)
            if data:
                self._heard[number] = now
            elif data is not None:  # it has left: its cell has ended, or its launcher knows
                self._peers.pop(number).close()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            for connection in self._peers.values():
                with contextlib.suppress(OSError):  # full: the wire is cut, and silence will tell
                    connection.send(b".")
        silent_s = {number: now - self._heard[number] for number in self._peers}
        if max(silent_s.values(), default=0.0) <= self._lost_after_s:
            return {}
        least_s = self._lost_after_s - 2 * BEAT_SECONDS
        return {number: seconds for number, seconds in silent_s.items() if seconds > least_s}

    def close(self) -> None:
        """Close every connection."""
        for connection in self.sockets:
            connection.close()
        self._listener, self._unnamed, self._peers = None, [], {}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # nobody is there, or no descriptor is left
            while self._listener:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._unnamed.append(connection)
        for connection in list(self._unnamed):
            data = _received(connection, HELLO_BYTES)
            if data is None:
                continue
            self._unnamed.remove(connection)
            fields = data.decode(errors="replace").split()
            if len(fields) == 2 and fields[0] == self._token and fields[1].isdecimal():
                self._add(int(fields[1]), connection)
            else:
                connection.close()

    def _add(self, number: int, connection: socket.socket) -> None:
        self._peers[number] = connection
        self._heard[number] = time.monotonic()


def _received(connection: socket.socket, most_bytes: int) -> bytes | None:
    """Return what has come; None where nothing has, b"" where the connection has ended."""
    try:
        return connection.recv(most_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
