"""Where the processes of a cell meet: at an address of its first host that all peers reach."""

import ipaddress
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.agent.network import interface_of
from benchmarks.agent.protocol import Command, Event
from benchmarks.record.safe_text import one_line
from conf import schema
from conf.options import Refused
from launch.engines.agent_channel import ANSWER_S, Channel, refusing_gone_agents
from launch.machine.fleet import Fleet, Host

MOST_CHARACTERS = 120  # of a reason
MOST_PAIRS = 4  # of hosts that a sentence names


@dataclass(frozen=True)
class HostRendezvous:
    """Where the processes of a cell meet."""

    address: str  # of the first host
    interfaces: Mapping[str, str]  # by the name of each host: the one that leads there


def find_rendezvous(
    fleet: Fleet, channels: Mapping[str, Channel], limits: schema.Engine
) -> HostRendezvous:
    """Return where some hosts meet, after they have tried to reach the first.

    Raises:
        Refused: an agent is gone, or no address of the first is reached by all peers.
    """
    word = uuid.uuid4().hex
    first, *peers = fleet.hosts
    addresses = candidates(first, peers, limits.interface, limits.trusted_network)
    with refusing_gone_agents(first.name):
        channels[first.name].send(Command.LISTEN, addresses=addresses, word=word)
        listening = channels[first.name].answer(Event.LISTENING, ANSWER_S)
    for host in peers:
        with refusing_gone_agents(host.name):
            channels[host.name].send(Command.REACH, ports=listening["ports"], word=word)
    answers = {}
    for host in peers:
        with refusing_gone_agents(host.name):
            answers[host.name] = channels[host.name].answer(Event.REACHED, ANSWER_S)["found"]
    with refusing_gone_agents(first.name):
        channels[first.name].send(Command.LISTEN, addresses=[], word=word)
        channels[first.name].answer(Event.LISTENING, ANSWER_S)
    return choose(first, addresses, listening["refused"], answers)


def candidates(
    first: Host, peers: Sequence[Host], interface_name: str | None, trusted: bool
) -> list[str]:
    """Return the addresses of the first host at which the peers may reach it, the best first.

    `interface_name` is `engine.interface`, `trusted` is `engine.trusted_network`. Addresses in a
    network that all hosts share come first, those of faster interfaces, and IPv4; those of bridges
    inside the host are used if there is no other.

    Raises:
        Refused: there is none, or all are routed to the whole internet.
    """
    if interface_name:
        usable = [interface for interface in first.interfaces if interface.name == interface_name]
        if not usable:
            have = ", ".join(interface.name for interface in first.interfaces)
            raise Refused(
                f"engine.interface={interface_name}: host {first.name} has none of this name that "
                f"is up; it has {have}"
            )
    else:
        usable = [interface for interface in first.interfaces if not interface.loopback]
    outer = [interface for interface in usable if not interface.inner]
    networks = []  # of each other host
    for host in peers:
        addresses = [address for interface in host.interfaces for address in interface.addresses]
        networks.append({ipaddress.ip_interface(address).network for address in addresses})
    ranked: list[tuple[tuple[bool, int, int, int], str]] = []
    public = []
    for interface in outer or usable:
        for text in interface.addresses:
            address = ipaddress.ip_interface(text)
            if address.ip.is_global and not trusted:
                public.append(str(address.ip))
                continue
            shared = all(address.network in networks_there for networks_there in networks)
            order = (not shared, -interface.mbit_per_s, address.version, len(ranked))
            ranked.append((order, str(address.ip)))
    if ranked:
        return [address for _, address in sorted(ranked)]
    if not public:
        raise Refused(
            f"host {first.name} has no interface with an address at which other hosts could reach "
            "it"
        )
    raise Refused(
        f"host {first.name} has no address but {', '.join(public)}, which is routed to the whole "
        "internet, and nothing that ranks send is encrypted; accepted is another interface "
        "(engine.interface=), or engine.trusted_network=true where a firewall closes this network"
    )


def choose(
    first: Host,
    addresses: Sequence[str],
    refused: Mapping[str, str],
    answers: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> HostRendezvous:
    """Return the first of the addresses that every other host reached.

    `refused` says why the first host cannot listen at an address; `answers` has by the name of each
    other host what it returned: {address: {"interface": …} or {"why": …}}.

    Raises:
        Refused: none was reached by all; names the pairs of hosts and the reasons.
    """
    reasons = [
        f"{first.name} cannot listen at {address}: {why}" for address, why in refused.items()
    ]
    for address in addresses:
        interfaces = {first.name: interface_of(address, first.interfaces)}
        for name, answer in answers.items():
            interfaces[name] = answer.get(address, {}).get("interface")
        if all(interfaces.values()):
            return HostRendezvous(address, {name: str(face) for name, face in interfaces.items()})
    for name, answer in answers.items():
        for address in addresses:
            if address in answer and "interface" not in answer[address]:
                why = one_line(str(answer[address].get("why", "no answer")), MOST_CHARACTERS)
                reasons.append(f"{name} does not reach {first.name} at {address}: {why}")
    shown = "; ".join(reasons[:MOST_PAIRS])
    if len(reasons) > MOST_PAIRS:
        shown += f"; and {len(reasons) - MOST_PAIRS} more"
    raise Refused(
        f"no address of host {first.name} was reached by every other host: {shown}. What to do: "
        "name the interface of the network that they share (engine.interface=), or open that "
        "network's ports"
    )
