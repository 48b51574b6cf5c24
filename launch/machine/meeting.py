"""Choose the address of a host at which the processes of a cell meet, and name the interfaces that lead there.

The launcher asks the agent of the first host to listen at each candidate, and those of the others to reach them
(benchmarks.host.probe). Nothing of what meets there is encrypted: an address that the whole internet could reach is refused.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.host.interfaces import Interface, interface_of
from benchmarks.record.visible import one_line
from conf.options import Refused
from launch.machine.fleet import Host

LONGEST = 120  # characters of a reason
MOST_PAIRS = 4  # of hosts that a sentence names


@dataclass(frozen=True)
class MeetingAddress:
    """Where the processes of a cell meet."""

    address: str  # of the first host
    interfaces: Mapping[str, str]  # by the name of each host: the one that leads there


def candidates(first: Host, others: Sequence[Host], interface: str | None, trusted: bool) -> list[str]:
    """Return the addresses of the first host at which the others may reach it, the best first.

    `interface` is `engine.interface`, `trusted` is `engine.trusted_network`. Otherwise addresses in a network that all hosts
    share come first, those of faster interfaces, and IPv4; those of bridges inside the host are used if there is no other.

    Raises:
        Refused: there is none, or all are routed to the whole internet.
    """
    usable = [one for one in first.interfaces if (one.name == interface if interface else not one.loopback)]
    if interface and not usable:
        have = ", ".join(one.name for one in first.interfaces)
        raise Refused(
            f"engine.interface={interface}: host {first.name} has none of this name that is up; it has {have}"
        )
    outer = [one for one in usable if not one.inner] or usable
    pairs = [(one, ipaddress.ip_interface(address)) for one in outer for address in one.addresses]
    if not pairs:
        raise Refused(f"host {first.name} has no interface with an address at which other hosts could reach it")
    closed = [(one, address) for one, address in pairs if trusted or not address.ip.is_global]
    if not closed:
        raise Refused(
            f"host {first.name} has no address but {', '.join(str(address.ip) for _, address in pairs)}, which is routed to the "
            "whole internet, and nothing that ranks send is encrypted; accepted is another interface (engine.interface=), or "
            "engine.trusted_network=true where a firewall closes this network"
        )

    def rank(pair: tuple[Interface, ipaddress.IPv4Interface | ipaddress.IPv6Interface]) -> tuple[bool, int, int]:
        one, address = pair
        shared = all(_shares(other, address.network) for other in others)
        return not shared, -one.mbit_per_s, address.version

    return [str(address.ip) for _, address in sorted(closed, key=rank)]


def _shares(host: Host, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    own = (ipaddress.ip_interface(address) for one in host.interfaces for address in one.addresses)
    return any(address.network == network for address in own)


def chosen(
    first: Host,
    wanted: Sequence[str],
    refused: Mapping[str, str],
    answers: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> MeetingAddress:
    """Return the first of the wanted addresses that every other host reached.

    `refused` says why the first host cannot listen at an address; `answers` is what benchmarks.host.probe.reach returned on each
    other host, by its name.

    Raises:
        Refused: none was reached by all; names the pairs of hosts and the reasons.
    """
    for address in wanted:
        found = {name: told[address].get("interface") for name, told in answers.items() if address in told}
        here = interface_of(address, first.interfaces)
        if here and len(found) == len(answers) and all(found.values()):
            return MeetingAddress(address, {first.name: here, **{name: str(one) for name, one in found.items()}})
    reasons = [f"{first.name} cannot listen at {address}: {why}" for address, why in refused.items()]
    reasons += [
        f"{name} does not reach {first.name} at {address}: {one_line(str(told[address].get('why', 'no answer')), LONGEST)}"
        for name, told in answers.items()
        for address in wanted
        if address in told and "interface" not in told[address]
    ]
    more = f"; and {len(reasons) - MOST_PAIRS} more" if len(reasons) > MOST_PAIRS else ""
    raise Refused(
        f"no address of host {first.name} was reached by every other host: {'; '.join(reasons[:MOST_PAIRS])}{more}. "
        "What to do: name the interface of the network that they share (engine.interface=), or open that network's ports"
    )
