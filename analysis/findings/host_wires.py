"""The network between the hosts of a cell: its interfaces, what they carried and could carry."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.study.provenance import facts_of_hosts, interface_of, listed, mapping
from analysis.study.runs import Runs
from benchmarks.record import Record
from conf.cell import compress_hosts

MOST_PADDING = 0.01  # share of the bytes that buckets may add
NAMED = 2  # hosts whose interfaces are named one by one


@dataclass(frozen=True)
class HostWire:
    """What a host reaches the others through."""

    names: tuple[str, ...]  # devices that NCCL used, else gloo's interface; empty: not known
    gbit_per_s: float | None  # of all of them, as the driver has it


@dataclass(frozen=True)
class HostWires:
    """The network between the hosts of a cell; medians over its runs, None: not measured."""

    worded: str  # `a's eth0 ↔ b's ib0`, of many hosts `eth0 of node[01-16]`; empty: not known
    exchange_ms: float | None
    share: float | None  # of what the wires carry, by the reference net_link
    gb_per_s: float | None  # of a host while it exchanges, where it is a ring of one rank a host
    link_gb_per_s: float | None  # what the wires of a host carry, by the reference
    nominal_gb_per_s: float | None  # … of the slowest host, if every driver says it


def host_wires(runs: Runs) -> HostWires | None:
    """Return the wires between the hosts of a cell; None where it has one."""
    if len(runs.cell.every_host) < 2:
        return None
    of_hosts = wires_of(runs.records[0])
    names, rates = [], []
    for wire in of_hosts.values():
        names.append("+".join(wire.names))
        if wire.gbit_per_s is not None:
            rates.append(wire.gbit_per_s)
    worded = ""
    if all(names) and len(names) <= NAMED:
        worded = " ↔ ".join(f"{host}'s {name}" for host, name in zip(of_hosts, names, strict=True))
    elif all(names):
        worded = f"{', '.join(dict.fromkeys(names))} of {compress_hosts([*of_hosts])}"
    exchange_ms, link_ms = runs.median("comm/exchange_ms"), runs.median("reference/net_link_ms")
    share = link_ms / exchange_ms if link_ms and exchange_ms else None
    # A ring of one rank on each host: all that a rank sends crosses to other hosts.
    hosts, size = len(runs.cell.hosts), runs.records[0].model.get("gradient_bytes")
    gb_per_s, link_gb_per_s, nominal = None, None, None
    if size and len(runs.cell.gpus) == 1 and not runs.cell.servers:
        crossing, moved = 2 * (hosts - 1) / hosts * size, runs.median("comm/bytes_moved") or 0.0
        if crossing > 0 and math.isclose(moved, crossing, rel_tol=MOST_PADDING):
            gb_per_s = runs.median("comm/busbw_gb_per_s")
    if gb_per_s and share:
        link_gb_per_s = gb_per_s / share
    if len(rates) == len(of_hosts):
        nominal = min(rates) / 8
    return HostWires(worded, exchange_ms, share, gb_per_s, link_gb_per_s, nominal)


def wires_of(record: Record) -> dict[str, HostWire]:
    """Return {host: what it reaches the others through}, in rank order, then hosts of servers."""
    used = mapping(mapping(record.effective.get("nccl")).get("nics"))
    return {host: _wire(facts, used.get(host)) for host, facts in facts_of_hosts(record).items()}


def _wire(facts: Mapping[str, Any], used: object) -> HostWire:
    if not isinstance(used, list) or not used:
        name, gbit_per_s = interface_of(facts)
        return HostWire((name,) if name else (), gbit_per_s)
    devices = tuple(map(str, used))
    rates: dict[str, float] = {}
    for port in listed(facts.get("infiniband")):
        rate = re.match(r"([0-9.]+) Gb/sec", str(port.get("rate")))  # as the kernel writes it
        if rate:
            rates[str(port.get("device"))] = float(rate[1])
    for port in listed(facts.get("interfaces")):
        mbit = port.get("mbit_per_s")
        if isinstance(mbit, int | float) and mbit > 0:
            rates[str(port.get("name"))] = mbit / 1000
    of_ports = []
    for port_name in "+".join(devices).split("+"):
        if port_name not in rates:
            return HostWire(devices, None)
        of_ports.append(rates[port_name])
    return HostWire(devices, sum(of_ports, 0.0))
