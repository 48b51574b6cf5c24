"""The wires of a machine as a study knows them: their link classes, and GB/s between pairs where benchmark=p2p measured them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from analysis.findings.machines.hosts import facts_of_hosts, gpus_of, mapping
from analysis.findings.model import Member
from analysis.findings.runs import Runs
from analysis.findings.study import Study
from analysis.topology.link_classes import nvlink_gb_per_s
from analysis.topology.model import Gpu, Topology, infer_nvswitch
from analysis.topology.placement import MOST_GPUS, Ring, best_ring
from analysis.topology.wires import set_bandwidth
from benchmarks.record import Record

P2P = ("unidirectional_enabled", "unidirectional_disabled")  # with and without peer access

Matrix = dict[tuple[Member, Member], float]


class MachineLinks:
    """The links of one machine: their classes, and GB/s between pairs where benchmark=p2p measured them."""

    def __init__(self, topologies: Mapping[str, Topology | None], measured: Mapping[str, Matrix]) -> None:
        """`topologies` are those of its hosts; that of a machine whose cells have no hosts stands under ''."""
        self._topologies, self._measured = topologies, measured
        self._rings: dict[frozenset[Member], Ring | None] = {}
        self._carried: dict[tuple[frozenset[Member], bool], float | None] = {}

    def ring(self, gpus: Iterable[Member]) -> Ring | None:
        """Return a subset in the order of its best ring, with its nominal bandwidth; None where a link class is not known.

        GPUs of several hosts have no ring whose links are known.
        """
        members = frozenset(gpus)
        if members not in self._rings:
            topology, ids = self._on_one_host(members)
            known = topology is not None and 2 <= len(ids) <= MOST_GPUS and ids <= set(topology.gpus)
            self._rings[members] = best_ring(topology, sorted(ids)) if known and topology is not None else None
        return self._rings[members]

    def _on_one_host(self, members: Iterable[Member]) -> tuple[Topology | None, set[int]]:
        """Return the topology of the host of some members, and their ids there; (None, {}) for those of several hosts."""
        placed = [str(member).rpartition(":") for member in members]
        hosts = {host for host, _, _ in placed}
        if len(hosts) != 1:
            return None, set()
        return self._topologies.get(hosts.pop()), {int(gpu) for _, _, gpu in placed}

    def nominal_gb_per_s(self, gpus: Iterable[Member]) -> float | None:
        """Return what the rings of a subset carry by data sheets; None where no such number exists."""
        ring = self.ring(gpus)
        return ring.bandwidth.shown_gb_per_s if ring and ring.bandwidth else None

    @property
    def has_different_links(self) -> bool:
        """Whether not all pairs have one link class."""
        known = [topology for topology in self._topologies.values() if topology is not None]
        return any(len({one.link_between(a, b) for a, b in combinations(one.gpus, 2)}) > 1 for one in known)

    def measured_gb_per_s(self, gpus: Iterable[Member], transport: str | None) -> float | None:
        """Return what the rings of a subset carry together at the measured GB/s of its pairs; None where one is missing.

        Peer copies count with peer access or without, as the transport has it. Without it all wires lead through the host.
        """
        key = frozenset(gpus), transport is None or "P2P" in transport
        if key not in self._carried:
            self._carried[key] = self._measured_of(*key)
        return self._carried[key]

    def _measured_of(self, gpus: frozenset[Member], peers: bool) -> float | None:
        of_host, members = self._on_one_host(gpus)
        chosen = sorted(members)
        name = {int(str(member).rpartition(":")[2]): member for member in gpus}
        pairs = self._measured.get(P2P[0] if peers else P2P[1], {})
        if not 2 <= len(chosen) <= MOST_GPUS or any(pair not in pairs for pair in permutations(gpus, 2)):
            return None
        topology = of_host if peers and of_host and members <= set(of_host.gpus) else None
        matrix = [[pairs.get((name[a], name[b]), 0.0) for b in chosen] for a in chosen]
        if topology is not None:
            devices = tuple(topology.gpu(gpu) for gpu in chosen)
            topology = replace(topology, devices=devices)
        return set_bandwidth(topology, chosen if topology else range(len(chosen)), matrix).gb_per_s


def transport_of(runs: Runs) -> str | None:
    """Return what NCCL used between the ranks of a cell; None where the runs do not say."""
    found = (record.effective.get("transport") for record in runs.records)
    return next((str(one) for one in found if one), None)


def machine_links(study: Study, beside: Sequence[Record] = ()) -> dict[str, MachineLinks]:
    """Return the links of every machine of a study, by the machine's name.

    `beside` holds what other studies measured on the machine of a study that has one (analysis.findings.wires.beside).
    """
    by_machine: dict[str, list[Runs]] = defaultdict(list)
    for runs in study.runs:
        by_machine[runs.provenance["machine"]].append(runs)
    links = {}
    for name, members in by_machine.items():
        records = [record for runs in members for record in runs.records]
        hosts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for record in records:
            for host, facts in facts_of_hosts(record).items():
                hosts[host].append(facts)
        topologies = {host: _links(facts) for host, facts in hosts.items()}
        links[name] = MachineLinks(topologies, _matrices([*beside, *records]))
    return links


def _links(known: Sequence[Mapping[str, Any]]) -> Topology | None:
    """Return the link classes that the facts of a host name; None unless every pair has one."""
    pairs: dict[str, str] = {}
    for facts in known:
        pairs |= mapping(facts.get("links"))
    words: dict[frozenset[int | str], str] = {}
    for pair, word in pairs.items():
        ends = pair.split("-")
        if len(ends) == 2 and all(re.fullmatch(r"[0-9]{1,4}", end) for end in ends):
            words[frozenset(map(int, ends))] = str(word)
    gpus = sorted({int(gpu) for pair in words for gpu in pair})
    if not gpus or any(frozenset(pair) not in words for pair in combinations(gpus, 2)):
        return None
    speeds = _nvlink_speeds(known)
    devices = tuple(Gpu(gpu, nvlink_gb_per_s=speeds.get(gpu)) for gpu in gpus)
    return Topology(devices, (), words, infer_nvswitch(gpus, words), "records")


def _nvlink_speeds(known: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    """Return the GB/s of an NVLink of each GPU whose name the facts of a host know."""
    found: dict[int, float | None] = {}
    for facts in known:
        for gpu in gpus_of(facts):
            if type(gpu.get("id")) is int:
                found.setdefault(gpu["id"], nvlink_gb_per_s(str(gpu.get("name"))))
    return found


def _matrices(records: Iterable[Record]) -> dict[str, Matrix]:
    """Return what records of benchmark=p2p measured: {name: {(from GPU, to GPU): GB/s}}."""
    matrices: dict[str, Matrix] = {name: {} for name in P2P}
    for record in records:
        measured = mapping(mapping(record.tables.get("p2p")).get("matrices"))
        gpus = record.cell.members
        for name in P2P:
            rows = measured.get(name)
            if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
                continue
            for a, row in zip(gpus, rows, strict=False):
                for b, value in zip(gpus, row, strict=False):
                    if a != b and isinstance(value, int | float) and value > 0:
                        matrices[name][a, b] = float(value)
    return matrices
