"""The hosts of a sweep, as each of them describes itself (launch.machine.facts)."""

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from analysis.study.provenance import NO_EFFECT, OF_A_HOST
from analysis.text import join_words
from benchmarks.agent.network import Interface, interface_of
from benchmarks.record.encoding import decoded
from benchmarks.record.safe_text import one_line
from conf.nccl import forbidding_multicast, refuse_multicast
from conf.options import Refused
from launch.machine.devices import Machine
from launch.machine.facts import FORM, facts, measuring_code

# Of a host: other containers come and go, and where it can be reached is tried anew.
OF_THE_MOMENT = ("boot_id", "interfaces", "free_memory_bytes", "shared_memory_bytes")
LONGEST = 200  # characters of what a host says wrongly


@dataclass(frozen=True)
class Host:
    """One host: its devices, its software, and how it can be reached."""

    name: str  # as the user typed it, or Slurm has it
    machine: Machine
    facts: dict[str, Any]  # launch.machine.facts, for records
    variables: dict[str, str]  # those around its agent that a record keeps
    left_out: list[str]  # names of those that look like secrets
    versions: dict[str, str]  # python, torch, nccl, as far as they are known
    kernel: str
    boot_id: str  # of its kernel; hosts with the same one are one machine; empty where it has none
    interfaces: tuple[Interface, ...]
    infiniband: list[dict[str, str]]
    free_memory_bytes: int | None  # None: not known
    shared_memory_bytes: int  # that are free
    too_small: list[str]  # limits of its processes, a sentence each

    @staticmethod
    def described(name: str, said: object) -> "Host":
        """Return the host of a description: its JSON text, or the object.

        Raises:
            Refused: the host cannot do what is asked, or says something else than a description of this Ringside.
        """
        try:
            plain: Any = None
            plain = decoded(said) if isinstance(said, str | bytes) else said
            if not isinstance(plain, Mapping) or plain.get("form") != FORM:
                raise TypeError(f"{said!r:.100}")
            if "refused" in plain:
                raise Refused(f"host {name}: {one_line(str(plain['refused']))}")
            return _host(name, {key: value for key, value in plain.items() if key != "form"})
        except Refused:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(
                f"host {name}: what it says of itself is no description by this Ringside "
                f"({_other_commit(plain) or one_line(str(error), LONGEST)}); accepted is the same Ringside on every host "
                "(engine.folder=, engine.python=)"
            ) from None

    def changed(self, before: "Host") -> str:
        """Return what an earlier description of the host says otherwise, `kernel, versions`; empty for nothing of weight."""
        names = [one.name for one in fields(self) if one.name not in OF_THE_MOMENT]
        return ", ".join(name for name in names if getattr(self, name) != getattr(before, name))

    @property
    def hostname(self) -> str:
        """Return what the host calls itself."""
        return str(self.facts.get("host", self.name))


def _other_commit(plain: Any) -> str:
    """Return which commit of Ringside wrote a description and which one reads it; empty where they are equal or not known."""
    try:
        there, here = (
            one_line(str(one["git"]["commit"]))[:12] for one in (plain["facts"], facts())
        )
    except (TypeError, LookupError):
        return ""
    return f"it is of commit {there}, and this is {here}" if there != here else ""


def _host(name: str, plain: Mapping[str, Any]) -> Host:
    """Return a host. Raises ValueError for what `describe` does not write so."""
    host = msgspec.convert({**plain, "name": name}, Host)
    unknown = plain.keys() - {one.name for one in fields(Host)}
    if unknown:
        raise ValueError(f"{', '.join(map(str, unknown))} is no field of it")
    ids = {device.id for device in host.machine.devices}
    if host.machine.kind not in ("cuda", "cpu") or not ids.issuperset(host.machine.all_gpus):
        raise ValueError(f"machine={plain['machine']!r:.100}")
    for interface in host.interfaces:
        interface.refuse_wrong_addresses()
    return host


@dataclass(frozen=True)
class Fleet:
    """The hosts of a sweep, in the order in which the user named them."""

    hosts: tuple[Host, ...]

    def __iter__(self) -> Iterator[Host]:
        """Iterate over the hosts."""
        return iter(self.hosts)

    def __getitem__(self, name: str) -> Host:
        """Return the host of a name. Raises KeyError."""
        return {host.name: host for host in self.hosts}[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the hosts."""
        return tuple(host.name for host in self.hosts)

    def some(self, names: Sequence[str]) -> "Fleet":
        """Return the hosts of these names, in their order. Raises KeyError."""
        return Fleet(tuple(self[name] for name in names))

    def forbidding_multicast(self, surrounding: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which some host, or the launcher's own surroundings, forbids NVLink multicast.

        Ranks of all hosts get them: what one host must not do, others could make it do.
        """
        found: dict[str, str] = {}
        for variables in (surrounding, *(host.variables for host in self.hosts)):
            found = forbidding_multicast(variables) | found
        return found

    def refuse_multicast(self, asked: Mapping[str, str]) -> None:
        """Refuse settings with NVLink multicast where a host forbids it. Raises Refused."""
        for host in self.hosts:
            refuse_multicast(asked, host.variables, f"environment of host {host.name}")


# Choose the address of a host at which the processes of a cell meet, and name the interfaces that lead there.


MEETING_LONGEST = 120  # characters of a reason
MOST_PAIRS = 4  # of hosts that a sentence names


@dataclass(frozen=True)
class MeetingAddress:
    """Where the processes of a cell meet."""

    address: str  # of the first host
    interfaces: Mapping[str, str]  # by the name of each host: the one that leads there


def candidates(
    first: Host, others: Sequence[Host], interface: str | None, trusted: bool
) -> list[str]:
    """Return the addresses of the first host at which the others may reach it, the best first.

    `interface` is `engine.interface`, `trusted` is `engine.trusted_network`. Otherwise addresses in a network that all hosts
    share come first, those of faster interfaces, and IPv4; those of bridges inside the host are used if there is no other.

    Raises:
        Refused: there is none, or all are routed to the whole internet.
    """
    usable = [
        one
        for one in first.interfaces
        if (one.name == interface if interface else not one.loopback)
    ]
    if interface and not usable:
        have = ", ".join(one.name for one in first.interfaces)
        raise Refused(
            f"engine.interface={interface}: host {first.name} has none of this name that is up; it has {have}"
        )
    outer = [one for one in usable if not one.inner] or usable
    pairs = [(one, ipaddress.ip_interface(address)) for one in outer for address in one.addresses]
    if not pairs:
        raise Refused(
            f"host {first.name} has no interface with an address at which other hosts could reach it"
        )
    closed = [(one, address) for one, address in pairs if trusted or not address.ip.is_global]
    if not closed:
        raise Refused(
            f"host {first.name} has no address but {', '.join(str(address.ip) for _, address in pairs)}, which is routed to the "
            "whole internet, and nothing that ranks send is encrypted; accepted is another interface (engine.interface=), or "
            "engine.trusted_network=true where a firewall closes this network"
        )

    def rank(
        pair: tuple[Interface, ipaddress.IPv4Interface | ipaddress.IPv6Interface],
    ) -> tuple[bool, int, int]:
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

    `refused` says why the first host cannot listen at an address; `answers` is what
    benchmarks.agent.network.try_connect returned on each other host, by its name.

    Raises:
        Refused: none was reached by all; names the pairs of hosts and the reasons.
    """
    for address in wanted:
        found = {
            name: told[address].get("interface")
            for name, told in answers.items()
            if address in told
        }
        here = interface_of(address, first.interfaces)
        if here and len(found) == len(answers) and all(found.values()):
            return MeetingAddress(
                address, {first.name: here, **{name: str(one) for name, one in found.items()}}
            )
    reasons = [
        f"{first.name} cannot listen at {address}: {why}" for address, why in refused.items()
    ]
    reasons += [
        f"{name} does not reach {first.name} at {address}: "
        + one_line(str(told[address].get("why", "no answer")), MEETING_LONGEST)
        for name, told in answers.items()
        for address in wanted
        if address in told and "interface" not in told[address]
    ]
    more = f"; and {len(reasons) - MOST_PAIRS} more" if len(reasons) > MOST_PAIRS else ""
    raise Refused(
        f"no address of host {first.name} was reached by every other host: {'; '.join(reasons[:MOST_PAIRS])}{more}. "
        "What to do: name the interface of the network that they share (engine.interface=), or open that network's ports"
    )


# Compare the hosts of a sweep before its first cell: what must be equal is refused by name, what may differ is noted.


MOST_NAMES = 4  # hosts that a sentence names for one value
PREFLIGHT_LONGEST = 120  # characters of a value


@dataclass(frozen=True)
class Compared:
    """Something that is compared between hosts."""

    what: str
    of: Callable[[Host], str]  # '' where a host does not say: that differs from nothing
    remedy: str = ""  # what to do where it must be equal; empty: a difference is noted


def _gpus(host: Host) -> str:
    if host.machine.kind == "cpu":
        return ""
    names = Counter(device.name for device in host.machine.devices)
    kinds = " + ".join(f"{count} × {name}" for name, count in names.items())
    return f"{kinds} ({','.join(str(device.id) for device in host.machine.devices)})"


def _driver(host: Host) -> str:
    return (
        str(_mapping(host.facts.get("gpu")).get("driver") or "")
        if host.machine.kind == "cuda"
        else ""
    )


def _clocks(host: Host) -> str:
    gpus = _mapping(host.facts.get("gpu")).get("gpus")
    clocks = [_mapping(one).get("max_sm_mhz") for one in gpus] if isinstance(gpus, list) else []
    return ", ".join(f"{mhz} MHz" for mhz in dict.fromkeys(clocks) if mhz is not None)


def _cpu(name: str) -> Callable[[Host], str]:
    return lambda host: str(_mapping(host.facts.get("cpu")).get(name) or "")


def _memory(host: Host) -> str:
    found = _mapping(host.facts.get("cpu")).get("memory_bytes")
    return f"{found / 2**30:.0f} GiB" if isinstance(found, int) else ""


def _speeds(host: Host) -> str:
    speeds = sorted(
        {one.mbit_per_s for one in host.interfaces if one.mbit_per_s and not one.inner},
        reverse=True,
    )
    ports = sorted({one["rate"] for one in host.infiniband if one.get("rate")})
    return ", ".join(
        [f"{speed / 1000:g} Gbit/s" for speed in speeds] + [f"InfiniBand {rate}" for rate in ports]
    )


def _variable(name: str, host: Host) -> str:
    return host.variables.get(name, "unset")


def _commit(host: Host) -> str:
    return str(_mapping(host.facts.get("git")).get("commit") or "")[:12]


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


# The first that must be equal and is not is the sentence that the user sees.
COMPARED = (
    Compared(
        "Python",
        lambda host: ".".join(host.versions.get("python", "").split(".")[:2]),
        "use the same Python on every host (engine.python=)",
    ),
    Compared(
        "torch",
        lambda host: host.versions.get("torch", "none"),
        "install the same torch on every host (engine.python=)",
    ),
    Compared(
        "NCCL",
        lambda host: host.versions.get("nccl", ""),
        "install the same torch on every host (engine.python=)",
    ),
    Compared(
        "the GPUs", _gpus, "leave hosts out of nodes=: a cell has the same GPUs on every host"
    ),
    Compared(
        "the NVIDIA driver's branch",
        lambda host: _driver(host).split(".")[0],
        "leave hosts out of nodes=, or install the same driver",
    ),
    Compared("the commit of Ringside", _commit),
    Compared("the NVIDIA driver", _driver),
    Compared("the kernel", lambda host: host.kernel),
    Compared("the highest SM clock", _clocks),
    Compared("the CPU", _cpu("model")),
    Compared("the cores", lambda host: str(host.machine.cores)),
    Compared("the memory", _memory),
    Compared("the speed of network interfaces", _speeds),
)


def compare(fleet: Fleet) -> list[str]:
    """Return what differs between the hosts of a sweep and may differ, a sentence each.

    Raises:
        Refused: a host has another version of something, another kind of GPU or limits that are too small; or the code that
            measures is not the launcher's. The sentence names the hosts, both values and what to do.
    """
    _refuse_useless(fleet)
    notes = []
    for compared in COMPARED:
        if found := _difference(compared.what, _groups(fleet, compared.of)):
            if compared.remedy:
                raise Refused(f"{found}. What to do: {compared.remedy}")
            notes.append(found)
    names = (
        {name for host in fleet for name in host.variables}
        - NO_EFFECT
        - {"CUDA_VISIBLE_DEVICES", *OF_A_HOST}
    )
    groups = ((name, _groups(fleet, functools.partial(_variable, name))) for name in sorted(names))
    return notes + [
        found for name, of in groups if (found := _difference(f"the variable {name}", of))
    ]


def _difference(what: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence that names the hosts with each value; '' where there is one value."""
    parts = (
        f"{join_words(list(names), MOST_NAMES)} {'have' if len(names) > 1 else 'has'} {one_line(value, PREFLIGHT_LONGEST)}"
        for value, names in groups.items()
    )
    return f"hosts differ in {what}: {'; '.join(parts)}" if len(groups) > 1 else ""


def _refuse_useless(fleet: Fleet) -> None:
    """Refuse hosts that could run no cell, run other code than the launcher reads, or lack the GPUs that others have."""
    ours = measuring_code()
    for host in fleet:
        for sentence in host.too_small:
            raise Refused(f"host {host.name}: {one_line(sentence)}")
        its = one_line(str(host.facts.get("code", "unknown")), PREFLIGHT_LONGEST)
        if its != ours:
            raise Refused(
                f"Ringside's measuring code is {ours} here and {its} on {host.name}. What to do: bring the same commit of "
                "Ringside to every host (engine.folder=)"
            )
    with_gpus = [host.name for host in fleet if host.machine.kind == "cuda"]
    without = next((host for host in fleet if host.machine.kind != "cuda"), None)
    if with_gpus and without:
        raise Refused(
            f"{join_words(with_gpus, MOST_NAMES)} {'have' if len(with_gpus) > 1 else 'has'} GPUs and {without.name} has none "
            f"({one_line(without.machine.why, PREFLIGHT_LONGEST)}). What to do: write device=cpu, or leave hosts out of nodes="
        )


def _groups(hosts: Fleet, of: Callable[[Host], str]) -> dict[str, list[str]]:
    """Return the names of the hosts that have each value; those that do not say are left out."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        if value := of(host):
            groups.setdefault(value, []).append(host.name)
    return groups
