"""The links inside a machine and the network between hosts: what each subset exchanged over which,
and what a link class costs.

Link classes come from the records, GB/s between pairs from cells with benchmark=p2p.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from statistics import fmean
from typing import Any

import numpy as np

from analysis.findings.scaling import Scaling
from analysis.study import names as labels
from analysis.study.conditions import Condition
from analysis.study.draws import MEASURED, Draws, estimate
from analysis.study.intervals import Estimate
from analysis.study.provenance import facts_of_hosts, gpus_of, interface_of, interface_rates
from analysis.study.runs import Key, Runs, grouped
from analysis.study.study import Study
from analysis.topology.model import (
    Gpu,
    Topology,
    best_first,
    infer_nvswitch,
    is_known,
    nvlink_gb_per_s,
)
from analysis.topology.placement import MOST_GPUS, Ring, best_ring, set_bandwidth
from benchmarks.record import Record
from conf.cell import Member, compress_hosts

MOST_PADDING = 0.01  # share of the bytes that buckets may add
NAMED = 2  # hosts whose interfaces are named one by one
# Copies from one GPU to another, in a record's matrices.
WITH_PEERS, WITHOUT_PEERS = "unidirectional_enabled", "unidirectional_disabled"

Matrix = dict[tuple[Member, Member], float]  # GB/s from one GPU to another


@dataclass(frozen=True)
class SubsetLinks:
    """The exchange of a subset next to the links that it had."""

    gpus: tuple[Member, ...]
    key: Key
    strategy: str
    label: str
    link_class: str | None  # the worst between neighbours of the best ring
    transport: str | None
    exchange_gb_per_s: float | None  # busbw
    p2p_gb_per_s: float | None  # of all its rings, at the GB/s of benchmark=p2p between pairs
    nominal_gb_per_s: float | None  # the same by link counts and data sheets
    efficiency: float | None


@dataclass(frozen=True)
class LinkValue:
    """Images/s and GPU that one strategy loses with a link class instead of the best one."""

    key: Key  # of the first cell with the class
    strategy: str
    label: str
    link_class: str
    lost: Estimate
    gradient_bytes: float | None
    batch_size: int


class MachineLinks:
    """The links of one machine, as its records know them."""

    def __init__(self, records: Sequence[Record]) -> None:
        facts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for record in records:
            for host, of_host in facts_of_hosts(record).items():
                facts[host].append(of_host)
        # That of a machine whose cells have no hosts stands under ''.
        self._topologies = {host: _topology(of_host) for host, of_host in facts.items()}
        self._measured = _measured(records)
        # Many runs have the same subset.
        self.ring = functools.cache(self._ring)
        self.measured_gb_per_s = functools.cache(self._measured_gb_per_s)

    def _ring(self, members: frozenset[Member]) -> Ring | None:
        """Return the best ring of a subset of one host; None where a link class is not known."""
        topology, ids = self._on_one_host(members)
        if topology is None or not 2 <= len(ids) <= MOST_GPUS or not ids <= set(topology.gpus):
            return None
        return best_ring(topology, sorted(ids))

    def _on_one_host(self, members: Iterable[Member]) -> tuple[Topology | None, set[int]]:
        """Return the topology of the members' host, and their ids there; (None, {}) of several."""
        hosts, ids = set(), set()
        for member in members:
            host, _, gpu = str(member).rpartition(":")
            hosts.add(host)
            ids.add(int(gpu))
        if len(hosts) != 1:
            return None, set()
        return self._topologies.get(hosts.pop()), ids

    def _measured_gb_per_s(self, members: frozenset[Member], copies: str) -> float | None:
        """Return what the rings of a subset carry at the measured GB/s; None where one is missing.

        Without peer access all wires lead through the host.
        """
        topology, ids = self._on_one_host(members)
        pairs = self._measured[copies]
        if not 2 <= len(ids) <= MOST_GPUS or not pairs.keys() >= {*permutations(members, 2)}:
            return None
        chosen = sorted(members, key=lambda gpu: int(str(gpu).rpartition(":")[2]))
        matrix = []
        for a in chosen:
            matrix.append([pairs.get((a, b), 0.0) for b in chosen])
        subset, positions = None, list(range(len(chosen)))
        if topology is not None and copies == WITH_PEERS and ids <= set(topology.gpus):
            positions = sorted(ids)
            devices = [topology.gpu(gpu) for gpu in positions]
            subset = replace(topology, devices=tuple(devices))
        return set_bandwidth(subset, positions, matrix).gb_per_s


def _topology(facts_of_records: Sequence[Mapping[str, Any]]) -> Topology | None:
    classes: dict[frozenset[int | str], str] = {}
    speeds: dict[int, float | None] = {}  # of an NVLink
    for facts in facts_of_records:
        for pair, link_class in facts.get("links", {}).items():
            ends = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", pair, re.ASCII)
            if ends:
                classes[frozenset(map(int, ends.groups()))] = link_class
        for gpu in gpus_of(facts):
            if "id" in gpu:
                speeds.setdefault(gpu["id"], nvlink_gb_per_s(str(gpu.get("name"))))
    gpus = sorted(map(int, set().union(*classes)))
    pairs = set(map(frozenset, combinations(gpus, 2)))
    if not gpus or not classes.keys() >= pairs:
        return None
    devices = []
    for gpu_id in gpus:
        devices.append(Gpu(gpu_id, nvlink_gb_per_s=speeds.get(gpu_id)))
    return Topology(tuple(devices), (), classes, infer_nvswitch(gpus, classes), "records")


def _measured(records: Iterable[Record]) -> dict[str, Matrix]:
    """Return {kind of copies: GB/s of each pair}; of several records the last counts."""
    measured: dict[str, Matrix] = {WITH_PEERS: {}, WITHOUT_PEERS: {}}
    for record in records:
        members = record.cell.members
        matrices = record.tables.get("p2p", {}).get("matrices", {})
        for copies, gb_per_s in measured.items():
            for a, row in zip(members, matrices.get(copies, ()), strict=False):
                for b, value in zip(members, row, strict=False):
                    if a != b and (value or 0) > 0:
                        gb_per_s[a, b] = float(value)
    return measured


def machine_links(study: Study) -> dict[str, MachineLinks]:
    """Return the links of every machine of a study, by the machine's name."""
    links = {}
    for name, members in grouped(study.runs, lambda runs: runs.machine).items():
        records: list[Record] = []
        for runs in members:
            records += runs.records
        links[name] = MachineLinks(records)
    return links


def transport_of(runs: Runs) -> str | None:
    """Return what NCCL used between the ranks of a cell; None where the runs do not say."""
    for record in runs.records:
        if record.effective.get("transport"):
            return str(record.effective["transport"])
    return None


def link_class_of(machine: MachineLinks, runs: Runs) -> str | None:
    """Return the worst class between neighbours of the best ring, else that a record names."""
    ring = machine.ring(frozenset(runs.gpus))
    if ring:
        return list(ring.links)[-1]
    classes = str(runs.records[0].effective.get("link_class") or "")
    return classes.split("+")[-1] or None


def subset_links(
    study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling
) -> tuple[SubsetLinks, ...]:
    """Return one line for every subset of several GPUs whose cell exchanged or trained."""
    efficiencies = {}
    for curve in scaling.curves:
        for point in curve.points:
            if point.efficiency:
                efficiencies[point.record_ids[0]] = point.efficiency.value
    subsets = []
    for runs in study.runs:
        busbw = runs.median("comm/busbw_gb_per_s")
        if runs.cell.world_size == 1 or (busbw is None and math.isnan(runs.median_log_rate)):
            continue
        machine, transport, wires = machines[runs.machine], transport_of(runs), host_wires(runs)
        measured, nominal = None, None
        if wires is not None:
            measured, nominal = wires.link_gb_per_s, wires.nominal_gb_per_s
        elif runs.records[0].checks.get("reference") == "host_link":  # no copies between GPUs
            transport = "host memory"
        else:
            members, copies = frozenset(runs.gpus), WITHOUT_PEERS
            if transport is None or "P2P" in transport:
                copies = WITH_PEERS
            measured = machine.measured_gb_per_s(members, copies)
            ring = machine.ring(members)
            if ring and ring.bandwidth:
                nominal = ring.bandwidth.shown_gb_per_s
        subset = SubsetLinks(
            gpus=runs.gpus,
            key=runs.key,
            strategy=runs.strategy,
            label=labels.label(study, runs),
            link_class=link_class_of(machine, runs),
            transport=transport,
            exchange_gb_per_s=busbw,
            p2p_gb_per_s=measured,
            nominal_gb_per_s=nominal,
            efficiency=efficiencies.get(runs.records[0].record_id),
        )
        subsets.append(subset)
    return tuple(subsets)


def link_values(study: Study, machines: Mapping[str, MachineLinks]) -> tuple[LinkValue, ...]:
    """Return what each link class costs against the best, for each strategy and number of GPUs."""
    conditions: dict[Condition, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for runs in study.timed:
        if runs.cell.world_size > 1:
            link_class = link_class_of(machines[runs.machine], runs)
            if link_class is not None and is_known(link_class):
                conditions[study.condition(runs, (), runs.cell.world_size)][link_class].append(runs)
    values = []
    for classes in conditions.values():
        best, *worse = best_first(classes)
        more, more_draws = _mean_rate(classes[best])
        for link_class in worse:
            less, less_draws = _mean_rate(classes[link_class])
            first = classes[link_class][0]
            where = f"{first.cell.world_size} GPUs, {best} against {link_class}"
            value = LinkValue(
                first.key,
                first.strategy,
                f"{labels.label(study, first)} · {where}",
                link_class,
                estimate(more - less, more_draws - less_draws),
                first.records[0].model.get("gradient_bytes"),
                first.cell.batch_size,
            )
            values.append(value)
    return tuple(values)


def _mean_rate(members: Sequence[Runs]) -> tuple[float, Draws]:
    """Return the mean of images per second and GPU, and draws of it (DRAWS,)."""
    rates, drawn = [], []
    for runs in members:
        rates.append(math.exp(runs.log_rate.value))
        drawn.append(runs.log_rate.draws[MEASURED])
    size = members[0].cell.world_size
    return fmean(rates) / size, np.exp(drawn).mean(axis=0) / size


# The network between the hosts of a cell: its interfaces, what they carried and could carry.
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
    used = record.effective.get("nccl", {}).get("nics", {})
    hosts = facts_of_hosts(record).items()
    return {host: _wire(facts, used.get(host, ())) for host, facts in hosts}


def _wire(facts: Mapping[str, Any], used: Sequence[str]) -> HostWire:
    if not used:
        name, gbit_per_s = interface_of(facts)
        return HostWire((name,) if name else (), gbit_per_s)
    devices = tuple(used)
    rates: dict[str, float] = {}
    for port in facts.get("infiniband", ()):
        rate = re.match(r"([0-9.]+) Gb/sec", str(port.get("rate")))  # as the kernel writes it
        if rate:
            rates[str(port.get("device"))] = float(rate[1])
    rates |= interface_rates(facts)
    of_ports = []
    for port_name in "+".join(devices).split("+"):
        if port_name not in rates:
            return HostWire(devices, None)
        of_ports.append(rates[port_name])
    return HostWire(devices, sum(of_ports, 0.0))
