"""The hosts of a sweep, as each describes itself (launch.machine.facts), and how they differ."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from analysis.study.provenance import NO_EFFECT, OF_A_HOST, gpus_of
from analysis.text import join_words
from benchmarks.agent.network import Interface
from benchmarks.record.encoding import decoded
from benchmarks.record.safe_text import one_line
from benchmarks.record.shapes import HOST, Count, optional
from conf.nccl import forbidding_multicast, refuse_multicast
from conf.options import Refused
from launch.machine.devices import Machine
from launch.machine.facts import FORM, facts, measuring_code

FACTS = optional(**HOST)  # as a record has them
MOST_CHARACTERS = 200  # of an error
MOST_VALUE_CHARACTERS = 120
MOST_NAMES = 4  # hosts that a sentence names for one value
SAME_TORCH = "install the same torch on every host (engine.python=)"
# Of what is compared between hosts: what to do where it must be equal. Else a difference is noted.
REMEDIES = {
    "Python": "use the same Python on every host (engine.python=)",
    "torch": SAME_TORCH,
    "NCCL": SAME_TORCH,
    "the GPUs": "leave hosts out of nodes=: a run has the same GPUs on every host",
    "the NVIDIA driver's branch": "leave hosts out of nodes=, or install the same driver",
}


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
    free_memory_bytes: Count | None  # None: not known
    shared_memory_bytes: Count  # that are free
    too_small: list[str]  # limits of its processes, a sentence each

    @staticmethod
    def described(name: str, description: object) -> "Host":
        """Return the host of a description: its JSON text, or the object.

        Raises Refused: the host cannot do what is asked, or this is not a description by this
        Ringside.
        """
        plain: Any = description
        try:
            if isinstance(description, str | bytes):
                plain = decoded(description)
            if not isinstance(plain, Mapping) or plain.get("form") != FORM:
                raise TypeError(f"{description!r:.100}")
            if "refused" not in plain:
                return _host(name, plain)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            reason = one_line(str(error), MOST_CHARACTERS)
            with contextlib.suppress(TypeError, LookupError):
                there = one_line(str(plain["facts"]["git"]["commit"]))[:12]
                here = one_line(str(facts()["git"]["commit"]))[:12]
                if there != here:
                    reason = f"it is of commit {there}, and this is {here}"
            raise Refused(
                f"host {name}: what it says of itself is not a description by this Ringside "
                f"({reason}). What to do: use the same Ringside on every host (engine.folder=, "
                "engine.python=)"
            ) from None
        raise Refused(f"host {name}: {one_line(str(plain['refused']))}")


def _host(name: str, plain: Mapping[str, Any]) -> Host:
    """Return a host. Raises ValueError for what a description does not hold so."""
    host = msgspec.convert({**plain, "name": name}, Host)
    msgspec.convert(host.facts, FACTS)
    unknown = plain.keys() - {field.name for field in fields(Host)} - {"form"}
    if unknown:
        raise ValueError(f"{', '.join(map(str, unknown))} is not a field of it")
    ids = {device.id for device in host.machine.devices}
    if host.machine.kind not in ("cuda", "cpu") or not ids.issuperset(host.machine.all_gpus):
        raise ValueError(f"machine={plain['machine']!r:.100}")
    return host


@dataclass(frozen=True)
class Fleet:
    """The hosts of a sweep, in the order in which the user named them."""

    hosts: tuple[Host, ...]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def some(self, names: Sequence[str]) -> "Fleet":
        """Return the hosts of these names, in their order. Raises KeyError."""
        return Fleet(tuple(self[name] for name in names))

    def forbidding_multicast(self, surrounding: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which a host, or what surrounds us, forbids NVLink multicast.

        Ranks of all hosts get them: what one host must not do, others could make it do.
        """
        variables = forbidding_multicast(surrounding)
        for host in self.hosts:
            variables = forbidding_multicast(host.variables) | variables
        return variables

    def refuse_multicast(self, settings: Mapping[str, str]) -> None:
        """Refuse settings with NVLink multicast where a host forbids it. Raises Refused."""
        for host in self.hosts:
            refuse_multicast(settings, host.variables, f"environment of host {host.name}")


def _properties(host: Host) -> dict[str, object]:
    """Return what is compared between hosts before the first cell.

    None or '' where a host does not say: that differs from nothing. Of what must be equal the first
    difference is the sentence that the user sees.
    """
    gpus = driver = ""
    if host.machine.kind != "cpu":
        counts: Counter[str] = Counter()
        ids = []
        for device in host.machine.devices:
            counts[device.name] += 1
            ids.append(str(device.id))
        kinds = " + ".join([f"{count} × {name}" for name, count in counts.items()])
        gpus = f"{kinds} ({','.join(ids)})"
        driver = host.facts.get("gpu", {}).get("driver") or ""
    clocks = []
    for gpu in gpus_of(host.facts):
        if gpu.get("max_sm_mhz"):
            clocks.append(f"{gpu['max_sm_mhz']} MHz")
    cpu, memory = host.facts.get("cpu", {}), ""
    if cpu.get("memory_bytes") is not None:
        memory = f"{cpu['memory_bytes'] / 2**30:.0f} GiB"
    networks = []
    for interface in sorted(host.interfaces, key=lambda interface: -interface.mbit_per_s):
        if interface.mbit_per_s and not interface.inner:
            networks.append(f"{interface.mbit_per_s / 1000:g} Gbit/s")
    for rate in sorted([port.get("rate", "") for port in host.infiniband]):
        if rate:
            networks.append(f"InfiniBand {rate}")
    return {
        "Python": ".".join(host.versions.get("python", "").split(".")[:2]),
        "torch": host.versions.get("torch", "none"),
        "NCCL": host.versions.get("nccl"),
        "the GPUs": gpus,
        "the NVIDIA driver's branch": driver.split(".")[0],
        "the commit of Ringside": (host.facts.get("git", {}).get("commit") or "")[:12],
        "the NVIDIA driver": driver,
        "the kernel": host.kernel,
        "the highest SM clock": ", ".join(dict.fromkeys(clocks)),
        "the CPU": cpu.get("model"),
        "the cores": host.machine.cores,
        "the memory": memory,
        "the speed of network interfaces": ", ".join(dict.fromkeys(networks)),
    }


def compare(fleet: Fleet) -> list[str]:
    """Return what differs between the hosts of a sweep and may differ, a sentence each.

    Raises Refused: a host has another version of something, another kind of GPU or limits that are
    too small; or the code that measures is not the launcher's. The sentence names the hosts, both
    values and what to do.
    """
    code = measuring_code()
    with_gpus = []
    without = []
    for host in fleet:
        if host.machine.kind == "cuda":
            with_gpus.append(host.name)
        else:
            without.append(host)
        for sentence in host.too_small:
            raise Refused(f"host {host.name}: {one_line(sentence)}")
        its_code = one_line(host.facts.get("code", "unknown"), MOST_VALUE_CHARACTERS)
        if its_code != code:
            raise Refused(
                f"Ringside's measuring code is {code} here and {its_code} on {host.name}. What to "
                "do: bring the same commit of Ringside to every host (engine.folder=)"
            )

    if with_gpus and without:
        why = one_line(without[0].machine.why, MOST_VALUE_CHARACTERS)
        raise Refused(
            f"{_have(with_gpus)} GPUs and {without[0].name} has none ({why}). What to do: write "
            "device=cpu, or leave hosts out of nodes="
        )
    notes = []
    properties = {host.name: _properties(host) for host in fleet}
    for what in properties[fleet.hosts[0].name]:
        values = {name: str(of_host[what] or "") for name, of_host in properties.items()}
        sentence = _difference(what, values)
        if sentence and what in REMEDIES:
            raise Refused(f"{sentence}. What to do: {REMEDIES[what]}")
        notes.append(sentence)
    names: set[str] = set()
    for host in fleet:
        names |= host.variables.keys()
    for name in sorted(names - NO_EFFECT - {"CUDA_VISIBLE_DEVICES", *OF_A_HOST}):
        values = {host.name: host.variables.get(name, "unset") for host in fleet}
        notes.append(_difference(f"the variable {name}", values))
    return list(filter(None, notes))


def refuse_two_names(fleet: Fleet) -> None:
    """Refuse two hosts that are one machine: one GPU, or one kernel and address. Raises Refused."""
    names: dict[tuple[str, str], str] = {}
    for host in fleet:
        marks = [("GPU", device.uuid) for device in host.machine.devices if device.uuid]
        for interface in host.interfaces:
            if host.boot_id and not interface.loopback and not interface.inner:
                marks += [(host.boot_id, address) for address in interface.addresses]
        for mark in marks:
            first = names.setdefault(mark, host.name)
            if first != host.name:
                raise Refused(
                    f"nodes={first}+{host.name}: these are two names of one machine (both have "
                    f"{one_line(mark[1], MOST_VALUE_CHARACTERS)}). What to do: use one name"
                )


def _difference(what: str, values: Mapping[str, str]) -> str:
    """Return a sentence that names the hosts with each value; '' where there is one or none."""
    names_by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            names_by_value.setdefault(value, []).append(name)
    if len(names_by_value) < 2:
        return ""
    parts = []
    for value, names in names_by_value.items():
        parts.append(f"{_have(names)} {one_line(value, MOST_VALUE_CHARACTERS)}")
    return f"hosts differ in {what}: {'; '.join(parts)}"


def _have(names: list[str]) -> str:
    verb = "has"
    if len(names) > 1:
        verb = "have"
    return f"{join_words(names, MOST_NAMES)} {verb}"
