"""The network interfaces of this host, and whether they lead to another host."""

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
from benchmarks.record.shapes import Count

# Bridges and tunnels inside a host, of containers and virtual machines, as their programs name
# them.
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
PROBE_SECONDS = 3.0  # for a connection and its answer
OPEN_SECONDS = 60.0  # a listener that nobody closed
BACKLOG = 1024  # hosts that connect at the same time
WORD_BYTES = 64


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses as `10.0.0.7/24`, but no link-local ones.

    Raises ValueError: one is no address with a prefix.
    """

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: Count  # 0: the driver does not say
    loopback: bool
    inner: bool  # leads to containers or virtual machines, as far as name and kernel tell

    def __post_init__(self) -> None:
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
        addresses, loopback = [], True
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or entry.netmask is None:
                continue
            ip = ipaddress.ip_address(entry.address.partition("%")[0])
            if ip.is_link_local:  # it needs its interface's name
                continue
            prefix = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
            addresses.append(f"{ip}/{prefix}")
            loopback = loopback and ip.is_loopback
        # Switched on; psutil's own `isup` is whether there is a carrier, which the kernel tells up
        # to a second later.
        state = states.get(name)
        if state is None or "up" not in state.flags.split(",") or not addresses:
            continue
        inner = name.startswith(INNER) or (NET / name / "bridge").is_dir()
        speed = max(0, state.speed)
        usable.append(Interface(name, tuple(addresses), speed, loopback, inner))
    return usable


def interface_of(address: str, candidates: Iterable[Interface]) -> str | None:
    """Return the name of the interface that has an address; None if none has it."""
    ip = ipaddress.ip_address(address)
    for interface in candidates:
        for own in interface.addresses:
            if ipaddress.ip_interface(own).ip == ip:
                return interface.name
    return None


def _family(address: str) -> socket.AddressFamily:
    if ipaddress.ip_address(address).version == 6:
        return socket.AF_INET6
    return socket.AF_INET


class ProbeListeners:
    """Listeners of this host, one an address, that answer every connection with a word.

    Before a sweep one host listens and the others connect (`try_connect`).
    """

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
            except OSError as error:
                listener.close()
                self.refused[address] = because(error)
            else:
                listener.setblocking(False)
                self._listeners[address] = listener

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
    own = interfaces()
    results: dict[str, dict[str, str]] = {}
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for address, port in ports.items():
            connection = stack.enter_context(socket.socket(_family(address)))
            connection.setblocking(False)
            status = connection.connect_ex((address, port))
            if status in (0, errno.EINPROGRESS):
                selector.register(connection, selectors.EVENT_READ, (address, connection))
            else:
                results[address] = {"why": os.strerror(status)}
        while len(results) < len(ports) and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                address, connection = key.data
                selector.unregister(connection)
                results[address] = _answer(connection, word, own)
    for address in ports:
        results.setdefault(address, {"why": f"no answer within {within_s:g} s"})
    return results


def _answer(connection: socket.socket, word: str, own: Iterable[Interface]) -> dict[str, str]:
    """Return the interface of a connection on which a word came, or why it is none."""
    try:
        came = connection.recv(WORD_BYTES)
        address = connection.getsockname()[0]
    except OSError as error:
        return {"why": because(error)}
    if came != word.encode():
        return {"why": "another program answers there"}
    interface = interface_of(address.partition("%")[0], own)
    if interface is None:
        return {"why": f"no interface of this host has the address {address}"}
    return {"interface": interface}
