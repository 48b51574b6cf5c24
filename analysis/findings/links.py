"""The links inside a machine: what each subset exchanged over which, and what a link class costs.

Link classes come from the records, GB/s between pairs from cells with benchmark=p2p.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from statistics import fmean
from typing import Any

import numpy as np

from analysis.findings.host_wires import host_wires
from analysis.study import names as labels
from analysis.study.conditions import Condition
from analysis.study.draws import MEASURED, Draws, estimate
from analysis.study.estimates import LinkValue, Member, Scaling, SubsetLinks
from analysis.study.provenance import facts_of_hosts, gpus_of, mapping
from analysis.study.runs import Runs, grouped
from analysis.study.study import Study
from analysis.topology.bandwidth import set_bandwidth
from analysis.topology.model import (
    Gpu,
    Topology,
    best_first,
    infer_nvswitch,
    is_known,
    nvlink_gb_per_s,
)
from analysis.topology.placement import MOST_GPUS, Ring, best_ring
from benchmarks.record import Record

# Copies from one GPU to another, in a record's matrices.
WITH_PEERS, WITHOUT_PEERS = "unidirectional_enabled", "unidirectional_disabled"

Matrix = dict[tuple[Member, Member], float]  # GB/s from one GPU to another


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
        self._rings: dict[frozenset[Member], Ring | None] = {}
        self._carried: dict[tuple[frozenset[Member], str], float | None] = {}

    def ring(self, gpus: Iterable[Member]) -> Ring | None:
        """Return the best ring of a subset of one host; None where a link class is not known."""
        members = frozenset(gpus)
        if members not in self._rings:
            topology, ids = self._on_one_host(members)
            self._rings[members] = None
            if topology is not None and 2 <= len(ids) <= MOST_GPUS and ids <= set(topology.gpus):
                self._rings[members] = best_ring(topology, sorted(ids))
        return self._rings[members]

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

    def measured_gb_per_s(self, gpus: Iterable[Member], transport: str | None) -> float | None:
        """Return what the rings of a subset carry at the measured GB/s; None where one is missing.

        Copies count with peer access or without, as the transport has it. Without it all wires
        lead through the host.
        """
        members, copies = frozenset(gpus), WITHOUT_PEERS
        if transport is None or "P2P" in transport:
            copies = WITH_PEERS
        if (members, copies) in self._carried:
            return self._carried[members, copies]
        topology, ids = self._on_one_host(members)
        pairs, carried = self._measured[copies], None
        if 2 <= len(ids) <= MOST_GPUS and pairs.keys() >= {*permutations(members, 2)}:
            chosen = sorted(members, key=lambda gpu: int(str(gpu).rpartition(":")[2]))
            matrix = []
            for a in chosen:
                matrix.append([pairs.get((a, b), 0.0) for b in chosen])
            subset, positions = None, list(range(len(chosen)))
            if topology is not None and copies == WITH_PEERS and ids <= set(topology.gpus):
                positions = sorted(ids)
                devices = [topology.gpu(gpu) for gpu in positions]
                subset = replace(topology, devices=tuple(devices))
            carried = set_bandwidth(subset, positions, matrix).gb_per_s
        self._carried[members, copies] = carried
        return carried


def _topology(facts_of_records: Sequence[Mapping[str, Any]]) -> Topology | None:
    classes: dict[frozenset[int | str], str] = {}
    speeds: dict[int, float | None] = {}  # of an NVLink
    for facts in facts_of_records:
        for pair, link_class in mapping(facts.get("links")).items():
            ends = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", pair, re.ASCII)
            if ends:
                classes[frozenset(map(int, ends.groups()))] = str(link_class)
        for gpu in gpus_of(facts):
            if type(gpu.get("id")) is int:
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
        members, matrices = record.cell.members, mapping(record.tables.get("p2p")).get("matrices")
        for copies, gb_per_s in measured.items():
            rows = mapping(matrices).get(copies)
            if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
                continue
            for a, row in zip(members, rows, strict=False):
                for b, value in zip(members, row, strict=False):
                    if a != b and isinstance(value, int | float) and value > 0:
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
    ring = machine.ring(runs.gpus)
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
        if runs.cell.world_size == 1 or (busbw is None and runs.log_rate is None):
            continue
        machine, transport, wires = machines[runs.machine], transport_of(runs), host_wires(runs)
        if wires is None:
            ring, nominal = machine.ring(runs.gpus), None
            if ring and ring.bandwidth:
                nominal = ring.bandwidth.shown_gb_per_s
            measured = machine.measured_gb_per_s(runs.gpus, transport)
        else:
            measured, nominal = wires.link_gb_per_s, wires.nominal_gb_per_s
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
            draws = None
            if more_draws is not None and less_draws is not None:
                draws = more_draws - less_draws
            first = classes[link_class][0]
            where = f"{first.cell.world_size} GPUs, {best} against {link_class}"
            value = LinkValue(
                first.key,
                first.strategy,
                f"{labels.label(study, first)} · {where}",
                link_class,
                estimate(more - less, draws),
                first.records[0].model.get("gradient_bytes"),
                first.cell.batch_size,
            )
            values.append(value)
    return tuple(values)


def _mean_rate(members: Sequence[Runs]) -> tuple[float, Draws | None]:
    """Return the mean of images per second and GPU, and draws of it (DRAWS,)."""
    rates, drawn = [], []
    for runs in members:
        rate = runs.log_rate
        if rate is not None:
            rates.append(math.exp(rate.value))
        if rate is not None and rate.draws is not None:
            drawn.append(rate.draws[MEASURED])
    size = members[0].cell.world_size
    if len(drawn) < len(rates):
        return fmean(rates) / size, None
    return fmean(rates) / size, np.exp(drawn).mean(axis=0) / size
