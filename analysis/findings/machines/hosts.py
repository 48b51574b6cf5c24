"""The hosts of a record, and their hardware. A cell without hosts has one, this machine, whose name is empty."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.record import Record

SHARED = ("topology", "links")  # an entry of a host has them where they are not those of the first


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: a record's environment and tables may hold anything."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a list; empty for anything else."""
    return [mapping(one) for one in value] if isinstance(value, list) else []


def facts_of_hosts(record: Record) -> dict[str, Mapping[str, Any]]:
    """Return {host: its facts}, in rank order, then those that have servers only; of a cell without hosts {'': …}.

    What equal hosts share, and what the record says of no host, is that of its environment: the first host's.
    """
    environment, names = record.environment, record.cell.every_host
    if not names:
        return {"": environment}
    told = {str(one.get("name")): one for one in listed(environment.get("hosts"))}
    own = {name: value for name, value in environment.items() if name != "hosts"}
    shared = {name: own[name] for name in SHARED if name in own}
    return {name: {**shared, **told.get(name, {} if place else own)} for place, name in enumerate(names)}


@dataclass(frozen=True)
class HostInterface:
    """The network interface through which a host reaches the others; its name is empty where that is not known."""

    name: str = ""
    gbit_per_s: float | None = None  # as the driver has it


def interface_of(facts: Mapping[str, Any]) -> HostInterface:
    """Return the interface that gloo and NCCL's sockets were given on a host, by its facts."""
    name = str(facts.get("interface") or "").partition(",")[0]  # gloo opens a connection for each entry of a list
    known = next((one for one in listed(facts.get("interfaces")) if one.get("name") == name), {})
    mbit = known.get("mbit_per_s")
    return HostInterface(name, mbit / 1000 if isinstance(mbit, int | float) and mbit > 0 else None)


def gpus_of(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is known of each GPU of a host, by its facts."""
    return listed(mapping(facts.get("gpu")).get("gpus"))


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine, not only those of the subset.

    Of several hosts `2 hosts with 4 × NVIDIA H200 each`, `CPU workers on 2 hosts with …`.
    """
    facts = list(facts_of_hosts(record).values())
    if record.cell.device == "cuda":
        named = [gpu_names(one) for one in facts]
        if any(named):
            return _each([one or "no known GPU" for one in named], " each")
    return f"CPU workers on {_each([str(mapping(one.get('cpu')).get('model') or 'an unknown CPU') for one in facts])}"


def _each(kinds: Sequence[str], every: str = "") -> str:
    """Return what hosts have: of one host that alone, of several `2 hosts with …`."""
    if len(kinds) == 1:
        return kinds[0]
    parts = [
        f"{count} hosts with {kind}{every}" if count > 1 else f"1 host with {kind}"
        for kind, count in Counter(kinds).items()
    ]
    return " + ".join(parts)


def gpu_names(facts: Mapping[str, Any]) -> str:
    """Return the GPUs of a host by its facts: `4 × NVIDIA H200`; empty without any."""
    kinds = Counter(str(gpu.get("name", "unknown GPU")) for gpu in gpus_of(facts))
    return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    found = hardware(record)
    return "GPUs" if found.startswith("CPU workers") else found.replace("NVIDIA ", "").replace("GeForce ", "")
