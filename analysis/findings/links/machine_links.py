"""The links of a machine as its records know them: their classes, and GB/s between pairs where
benchmark=p2p measured them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, permutations
from typing import Any

from analysis.study.estimates import Member
from analysis.study.provenance import Machines, facts_of_hosts, gpus_of, mapping, provenance
from analysis.study.runs import Runs, grouped, named
from analysis.study.study import Study
from analysis.topology.bandwidth import set_bandwidth
from analysis.topology.model import Gpu, Topology, infer_nvswitch, nvlink_gb_per_s
from analysis.topology.placement import MOST_GPUS, Ring, best_ring
from benchmarks.record import CellFolder, Record, RecordError, read

BENCHMARKS = ("p2p", "collectives")  # that measure links
MOST = 200  # records of other studies that are read
SAME = ("machine", "driver", "NCCL")  # what other studies must share
P2P = ("unidirectional_enabled", "unidirectional_disabled")  # with and without peer access

Matrix = dict[tuple[Member, Member], float]  # GB/s from one GPU to another


class MachineLinks:
    """The links of one machine."""

    def __init__(
        self, topologies: Mapping[str, Topology | None], measured: Mapping[str, Matrix]
    ) -> None:
        """`topologies` are those of its hosts; that of a machine whose cells have no hosts stands
        under ''.
        """
        self._topologies, self._measured = topologies, measured
        self._rings: dict[frozenset[Member], Ring | None] = {}
        self._carried: dict[tuple[frozenset[Member], bool], float | None] = {}

    def ring(self, gpus: Iterable[Member]) -> Ring | None:
        """Return a subset in the order of its best ring, with its nominal bandwidth; None where a
        link class is not known.

        GPUs of several hosts have no ring whose links are known.
        """
        members = frozenset(gpus)
        if members not in self._rings:
            self._rings[members] = None
            topology, ids = self._on_one_host(members)
            if topology is not None and 2 <= len(ids) <= MOST_GPUS and ids <= set(topology.gpus):
                self._rings[members] = best_ring(topology, sorted(ids))
        return self._rings[members]

    def _on_one_host(self, members: Iterable[Member]) -> tuple[Topology | None, set[int]]:
        """Return the topology of the host of some members, and their ids there; (None, {}) for
        those of several hosts.
        """
        hosts, ids = set(), set()
        for member in members:
            host, _, gpu = str(member).rpartition(":")
            hosts.add(host)
            ids.add(int(gpu))
        if len(hosts) != 1:
            return None, set()
        return self._topologies.get(hosts.pop()), ids

    def nominal_gb_per_s(self, gpus: Iterable[Member]) -> float | None:
        """Return what the rings of a subset carry by data sheets; None where no such number exists."""
        ring = self.ring(gpus)
        return ring.bandwidth.shown_gb_per_s if ring and ring.bandwidth else None

    @property
    def has_different_links(self) -> bool:
        """Whether not all pairs have one link class."""
        for topology in self._topologies.values():
            if topology is not None:
                pairs = combinations(topology.gpus, 2)
                if len({topology.link_between(a, b) for a, b in pairs}) > 1:
                    return True
        return False

    def measured_gb_per_s(self, gpus: Iterable[Member], transport: str | None) -> float | None:
        """Return what the rings of a subset carry together at the measured GB/s of its pairs; None
        where one is missing.

        Peer copies count with peer access or without, as the transport has it. Without it all wires
        lead through the host.
        """
        key = frozenset(gpus), transport is None or "P2P" in transport
        if key not in self._carried:
            self._carried[key] = self._carried_by(*key)
        return self._carried[key]

    def _carried_by(self, gpus: frozenset[Member], peers: bool) -> float | None:
        topology, ids = self._on_one_host(gpus)
        pairs = self._measured.get(P2P[0] if peers else P2P[1], {})
        complete = all(pair in pairs for pair in permutations(gpus, 2))
        if not 2 <= len(ids) <= MOST_GPUS or not complete:
            return None
        chosen = sorted(ids)
        member = {int(str(gpu).rpartition(":")[2]): gpu for gpu in gpus}
        matrix = [[pairs.get((member[a], member[b]), 0.0) for b in chosen] for a in chosen]
        if topology is None or not peers or not ids <= set(topology.gpus):
            return set_bandwidth(None, range(len(chosen)), matrix).gb_per_s
        subset = replace(topology, devices=tuple(topology.gpu(gpu) for gpu in chosen))
        return set_bandwidth(subset, chosen, matrix).gb_per_s


def machine_links(study: Study, neighbours: Sequence[Record] = ()) -> dict[str, MachineLinks]:
    """Return the links of every machine of a study, by the machine's name; `neighbours` as
    `measured_beside` has them.
    """
    links = {}
    for name, members in grouped(study.runs, lambda runs: runs.machine).items():
        records = [record for runs in members for record in runs.records]
        hosts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for record in records:
            for host, facts in facts_of_hosts(record).items():
                hosts[host].append(facts)
        topologies = {host: _topology(facts) for host, facts in hosts.items()}
        links[name] = MachineLinks(topologies, _matrices([*neighbours, *records]))
    return links


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
    gpus = sorted({int(gpu) for pair in classes for gpu in pair})
    if not gpus or any(frozenset(pair) not in classes for pair in combinations(gpus, 2)):
        return None
    devices = tuple(Gpu(gpu, nvlink_gb_per_s=speeds.get(gpu)) for gpu in gpus)
    return Topology(devices, (), classes, infer_nvswitch(gpus, classes), "records")


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


def transport_of(runs: Runs) -> str | None:
    """Return what NCCL used between the ranks of a cell; None where the runs do not say."""
    for record in runs.records:
        if record.effective.get("transport"):
            return str(record.effective["transport"])
    return None


def link_class_of(machine: MachineLinks, runs: Runs) -> str | None:
    """Return the worst class between neighbours of the best ring; without a topology the worst that
    a record names.
    """
    ring = machine.ring(runs.gpus)
    if ring:
        return list(ring.links)[-1]
    classes = str(runs.records[0].effective.get("link_class") or "")
    return classes.split("+")[-1] or None


def measured_beside(study: Study) -> tuple[Record, ...]:
    """Return the usable records of other studies in the same output_dir that measured links of this
    study's machine.

    A benchmark that this study ran itself is not looked for elsewhere, and nothing is where it
    trained on several machines. The name of a cell's folder begins with its benchmark, so no other
    record is read.
    """
    own = [runs.records[0] for runs in study.timed if runs.world_size > 1]
    if study.folder is None or not own:
        return ()
    ran = {named(runs.records[0], "benchmark") for runs in study.runs}
    folder = study.folder.absolute()
    cells = []
    try:
        for neighbour in sorted(folder.parent.iterdir()):
            if neighbour != folder and neighbour.is_dir():
                for benchmark in BENCHMARKS:
                    if benchmark not in ran:
                        cells += sorted(neighbour.glob(f"{benchmark}-*"))
    except OSError:
        return ()
    records = []
    for cell in islice(cells, MOST):
        try:
            record = read(CellFolder(cell).record)
        except (RecordError, OSError):
            continue
        if record.usable:
            records.append(record)
    machines = Machines([*own, *records])

    def surroundings(record: Record) -> tuple[str, ...]:
        origin = provenance(record, machines)
        return tuple(origin[name] for name in SAME)

    here = {surroundings(record) for record in own}
    return tuple(record for record in records if here == {surroundings(record)})
