"""The wires between the hosts of a cell: which interfaces its exchange used, what they carried, and
what they could carry.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.study.provenance import facts_of_hosts, interface_of, listed, mapping
from analysis.study.runs import Runs
from benchmarks.record import Record
from conf.cell import compress_hosts

EXCHANGE, NET_LINK = "comm/exchange_ms", "reference/net_link_ms"
BUSBW, MOVED = "comm/busbw_gb_per_s", "comm/bytes_moved"
MOST_PADDING = 0.01  # share of the bytes that buckets may add
NAMED = 2  # hosts whose interfaces are named one by one


@dataclass(frozen=True)
class HostWire:
    """What a host reaches the others through."""

    names: tuple[str, ...]  # devices that NCCL used, else gloo's interface; empty: not known
    gbit_per_s: float | None  # of all of them, as the driver has it


@dataclass(frozen=True)
class HostWires:
    """The wires between the hosts of one cell; medians over its runs, None where no run measured
    it.
    """

    of_hosts: Mapping[str, HostWire]  # in rank order, then hosts that have servers only
    exchange_ms: float | None
    link_ms: float | None  # of the bytes of an exchange over the wire alone: reference net_link
    gb_per_s: float | None  # of a host while it exchanges; known for a ring of one rank a host

    @property
    def share(self) -> float | None:
        """The share of what the wires carry that the exchange reached."""
        return self.link_ms / self.exchange_ms if self.link_ms and self.exchange_ms else None

    @property
    def link_gb_per_s(self) -> float | None:
        """What the wires of a host carry by the reference net_link."""
        return self.gb_per_s / self.share if self.gb_per_s and self.share else None

    @property
    def nominal_gb_per_s(self) -> float | None:
        """What the wires of the slowest host carry by its driver; None unless every driver says it."""
        rates = [wire.gbit_per_s for wire in self.of_hosts.values() if wire.gbit_per_s is not None]
        return min(rates) / 8 if len(rates) == len(self.of_hosts) else None

    @property
    def worded(self) -> str:
        """`a's eth0 ↔ b's ib0`, of many hosts `eth0 of node[01-16]`; empty where not every
        interface is known.
        """
        names = {host: "+".join(wire.names) for host, wire in self.of_hosts.items()}
        if not all(names.values()):
            return ""
        if len(names) <= NAMED:
            return " ↔ ".join(f"{host}'s {name}" for host, name in names.items())
        return f"{', '.join(dict.fromkeys(names.values()))} of {compress_hosts([*names])}"


def host_wires(runs: Runs) -> HostWires | None:
    """Return the wires between the hosts of a cell; None where it has one."""
    if len(runs.cell.every_host) < 2:
        return None
    gb_per_s = runs.median(BUSBW) if _all_crosses(runs) else None
    wires = wires_of(runs.records[0])
    return HostWires(wires, runs.median(EXCHANGE), runs.median(NET_LINK), gb_per_s)


def _all_crosses(runs: Runs) -> bool:
    """Return whether all that a rank sends crosses to other hosts: a ring of one rank on each host."""
    hosts, size = len(runs.cell.hosts), runs.records[0].model.get("gradient_bytes")
    moved = runs.median(MOVED)
    if len(runs.cell.gpus) > 1 or runs.cell.servers or not size or moved is None:
        return False
    return math.isclose(moved, 2 * (hosts - 1) / hosts * size, rel_tol=MOST_PADDING)


def wires_of(record: Record) -> dict[str, HostWire]:
    """Return what each host of a record reaches the others through."""
    used = mapping(mapping(record.effective.get("nccl")).get("nics"))
    return {host: _wire(facts, used.get(host)) for host, facts in facts_of_hosts(record).items()}


def _wire(facts: Mapping[str, Any], used: object) -> HostWire:
    devices = [str(device) for device in used] if isinstance(used, list) else []
    if not devices:
        interface = interface_of(facts)
        return HostWire((interface.name,) if interface.name else (), interface.gbit_per_s)
    rates: dict[str, float] = {}
    for port in listed(facts.get("infiniband")):
        rate = re.match(r"([0-9.]+) Gb/sec", str(port.get("rate")))  # as the kernel writes it
        if rate:
            rates[str(port.get("device"))] = float(rate[1])
    for each in listed(facts.get("interfaces")):
        mbit = each.get("mbit_per_s")
        if isinstance(mbit, int | float) and mbit > 0:
            rates[str(each.get("name"))] = mbit / 1000
    total = 0.0
    for device in devices:
        for name in device.split("+"):
            if name not in rates:
                return HostWire(tuple(devices), None)
            total += rates[name]
    return HostWire(tuple(devices), total)
