"""The network interfaces of this host: their addresses and speed, and which of them leads to another host."""

import dataclasses
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Bridges and tunnels inside a host, of containers and virtual machines, as their programs name them.
INNER = ("docker", "br-", "virbr", "vnet", "cni", "flannel", "cali", "lxc", "lxd", "podman", "tailscale")
NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses as `10.0.0.7/24`; the link-local ones are left out."""

    name: str
    addresses: tuple[str, ...]
    mbit_per_s: int  # 0: the driver does not say
    loopback: bool
    inner: bool  # it leads to containers or virtual machines of the host, as far as its name and the kernel tell

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> "Interface":
        """Return the interface that dataclasses.asdict wrote. Raises TypeError, KeyError."""
        return Interface(**{**plain, "addresses": tuple(plain["addresses"])})

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
        known = tuple(filter(None, (_with_prefix(one.family, one.address, one.netmask) for one in addresses)))
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
        (one.name for one in known if any(ipaddress.ip_interface(own).ip == wanted for own in one.addresses)), None
    )


def _with_prefix(family: int, address: str, netmask: str | None) -> str | None:
    """Return `10.0.0.7/24`; None for what is no address of IP, and for a link-local one, which needs its interface's name."""
    if family not in (socket.AF_INET, socket.AF_INET6) or netmask is None:
        return None
    known = ipaddress.ip_address(address.partition("%")[0])
    prefix = bin(int(ipaddress.ip_address(netmask))).count("1")
    return None if known.is_link_local else f"{known}/{prefix}"
