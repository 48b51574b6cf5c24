"""Compare the hosts of a sweep before its first cell: what must be equal is refused by name, what may differ is noted."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from analysis.findings.provenance import NO_EFFECT, OF_A_HOST
from analysis.report.text import join_words
from benchmarks.record.visible import one_line
from conf.options import Refused
from launch.machine.facts import measuring_code
from launch.machine.fleet import Fleet, Host

MOST_NAMES = 4  # hosts that a sentence names for one value
LONGEST = 120  # characters of a value


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
    return str(_mapping(host.facts.get("gpu")).get("driver") or "") if host.machine.kind == "cuda" else ""


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
    speeds = sorted({one.mbit_per_s for one in host.interfaces if one.mbit_per_s and not one.inner}, reverse=True)
    ports = sorted({one["rate"] for one in host.infiniband if one.get("rate")})
    return ", ".join([f"{speed / 1000:g} Gbit/s" for speed in speeds] + [f"InfiniBand {rate}" for rate in ports])


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
        "NCCL", lambda host: host.versions.get("nccl", ""), "install the same torch on every host (engine.python=)"
    ),
    Compared("the GPUs", _gpus, "leave hosts out of nodes=: a cell has the same GPUs on every host"),
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
    names = {name for host in fleet for name in host.variables} - NO_EFFECT - {"CUDA_VISIBLE_DEVICES", *OF_A_HOST}
    groups = ((name, _groups(fleet, functools.partial(_variable, name))) for name in sorted(names))
    return notes + [found for name, of in groups if (found := _difference(f"the variable {name}", of))]


def _difference(what: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence that names the hosts with each value; '' where there is one value."""
    parts = (
        f"{join_words(list(names), MOST_NAMES)} {'have' if len(names) > 1 else 'has'} {one_line(value, LONGEST)}"
        for value, names in groups.items()
    )
    return f"hosts differ in {what}: {'; '.join(parts)}" if len(groups) > 1 else ""


def _refuse_useless(fleet: Fleet) -> None:
    """Refuse hosts that could run no cell, run other code than the launcher reads, or lack the GPUs that others have."""
    ours = measuring_code()
    for host in fleet:
        for sentence in host.too_small:
            raise Refused(f"host {host.name}: {one_line(sentence)}")
        its = one_line(str(host.facts.get("code", "unknown")), LONGEST)
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
            f"({one_line(without.machine.why, LONGEST)}). What to do: write device=cpu, or leave hosts out of nodes="
        )


def _groups(hosts: Fleet, of: Callable[[Host], str]) -> dict[str, list[str]]:
    """Return the names of the hosts that have each value; those that do not say are left out."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        if value := of(host):
            groups.setdefault(value, []).append(host.name)
    return groups
