"""Where the processes of a cell meet: at an address of its first host that all peers reach."""

import ipaddress
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.agent.network import interface_of
from benchmarks.agent.protocol import Command, Event
from benchmarks.record.safe_text import one_line
from conf import schema
from conf.options import Refused
from launch.engines.agent_channel import ANSWER_S, AgentGone, Channel, refusing_gone_agents
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

    Raises Refused: an agent is gone, or no address of the first is reached by all peers.
    """
    word = uuid.uuid4().hex
    first, *peers = fleet.hosts
    addresses = candidates(first, peers, limits.interface, limits.trusted_network)
    with refusing_gone_agents(first.name):
        channels[first.name].send(Command.LISTEN, addresses=addresses, word=word)
        listening = channels[first.name].answer(Event.LISTENING, ANSWER_S)
        ports = {at: port for at, port in listening["ports"].items() if at in addresses}
        if ports.keys() | listening["refused"].keys() != set(addresses):
            raise AgentGone("it does not say at which ports it listens")
    for host in peers:
        with refusing_gone_agents(host.name):
            channels[host.name].send(Command.REACH, ports=ports, word=word)
    answers = {}
    for host in peers:
        with refusing_gone_agents(host.name):
            reached = channels[host.name].answer(Event.REACHED, ANSWER_S)["found"]
            if not ports.keys() <= reached.keys():
                raise AgentGone("it does not say which addresses it reached")
            answers[host.name] = reached
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

    Raises Refused: there is none, or all are routed to the whole internet.
    """
    outer = []
    inner = []
    for interface in first.interfaces:
        if interface_name:
            is_usable = interface.name == interface_name
        else:
            is_usable = not interface.loopback
        if is_usable and interface.inner:
            inner.append(interface)
        elif is_usable:
            outer.append(interface)
    usable = outer or inner
    if interface_name and not usable:
        have = ", ".join([interface.name for interface in first.interfaces])
        raise Refused(
            f"engine.interface={interface_name}: host {first.name} has none of this name that is "
            f"up; it has {have}"
        )
    hosts_in: Counter[object] = Counter()  # by network: how many of the peers are in it
    for host in peers:
        networks = set()
        for interface in host.interfaces:
            networks |= {ipaddress.ip_interface(text).network for text in interface.addresses}
        hosts_in.update(networks)
    ranked: list[tuple[tuple[bool, int, int, int], str]] = []
    public = []
    for interface in usable:
        for text in interface.addresses:
            address = ipaddress.ip_interface(text)
            if address.ip.is_global and not trusted:
                public.append(str(address.ip))
                continue
            is_shared = hosts_in[address.network] == len(peers)
            order = (not is_shared, -interface.mbit_per_s, address.version, len(ranked))
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
        "internet, and what ranks send is not encrypted. What to do: name another interface "
        "(engine.interface=), or add engine.trusted_network=true if a firewall closes this network"
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

    Raises Refused: none was reached by all; names the pairs of hosts and the reasons.
    """
    for address in addresses:
        interfaces = {first.name: str(interface_of(address, first.interfaces) or "")}
        for name, answer in answers.items():
            interfaces[name] = str(answer.get(address, {}).get("interface") or "")
        if all(interfaces.values()):
            return HostRendezvous(address, interfaces)
    reasons = []
    for address, reason in refused.items():
        reasons.append(f"{first.name} cannot listen at {address}: {reason}")
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
