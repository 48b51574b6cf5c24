"""What cells lose, against what their wires carry: a line for every mechanism of a study.

    lost ms per step = fixed + share · ms that the bytes of the exchange take at the measured GB/s of its wires

A mechanism is everything asked but the GPUs and NCCL's settings: a model, a strategy with its options, a batch. Only within
one does the same share of the exchange hide behind compute. GB/s are measured, and a line has those of one source alone.
"""

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations
from statistics import median
from typing import Any

import numpy as np

from analysis.findings.baselines import EFFICIENCY, follows_from_gpus
from analysis.findings.communication import COST, EXPOSED
from analysis.findings.step_differences import Step, mean_step, step_of
from analysis.study import names as labels
from analysis.study.draws import MEASURED, MEDIAN, Draws, estimate, quantile
from analysis.study.estimates import (
    Communication,
    Estimate,
    LinkValue,
    Member,
    Point,
    Scaling,
    SubsetLinks,
    WireLine,
    WirePoint,
)
from analysis.study.intervals import LEVEL
from analysis.study.names import gpu_list
from analysis.study.provenance import (
    CONNECTIONS,
    Machines,
    facts_of_hosts,
    gpus_of,
    interface_of,
    listed,
    mapping,
    provenance,
)
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.study import Runs, Study, between_runs, middle, named
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
from benchmarks.record import CellFolder, Record, RecordError, read
from conf.cell import compress_hosts

# The exposed communication of several hosts: what is exposed inside them and what between them.


COMMUNICATION = "exposed communication"
INSIDE, BETWEEN = (
    "communication inside hosts",
    "communication between hosts",
)  # together what is exposed of it
Parts = list[
    tuple[str, Step | None, str]
]  # of a waterfall: name, time, why it is not known or what qualifies it


def by_hosts(runs: Runs, parts: Parts, hosts: Mapping[Member, Runs], alone: Step | None) -> Parts:
    """Return the parts of the communication, of several hosts split into what is exposed inside them and between them.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts, without what it costs on one.
    """
    (_, exposed, why), *others = parts
    if len(runs.cell.hosts) < 2 or exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [(BETWEEN, exposed, why), *others]
    costs = [step for one in hosts.values() if (step := step_of(one, COST)) is not None]
    whole = mean_step(costs) if hosts and len(costs) == len(hosts) else None
    if whole is None:
        untold = "no host was measured alone with all its GPUs: what is lost inside hosts and between them is not told apart"
        return [(COMMUNICATION, exposed, "; ".join(filter(None, (why, untold)))), *others]
    inside = whole - alone if alone else whole
    return [(INSIDE, inside, why), (BETWEEN, exposed - inside, ""), *others]


# Links of a study's machine that other studies beside it measured: benchmark=p2p and collectives, in the same output_dir.


BENCHMARKS = ("p2p", "collectives")
MOST = 200  # records that are read
SAME = ("machine", "driver", "NCCL")


def measured_beside(study: Study) -> tuple[Record, ...]:
    """Return the usable records of other studies that measured links of the machine on which this one trained.

    A benchmark that this study ran itself is not looked for elsewhere, and nothing is where it trained on several machines.
    The name of a cell's folder begins with its benchmark, so no other record is read.
    """
    trained = [runs for runs in study.timed if runs.world_size > 1]
    if study.folder is None or not trained:
        return ()
    wanted = [
        name
        for name in BENCHMARKS
        if all(named(runs.records[0], "benchmark") != name for runs in study.runs)
    ]
    folder = study.folder.absolute()
    try:
        others = [
            other for other in sorted(folder.parent.iterdir()) if other != folder and other.is_dir()
        ]
        cells = [
            CellFolder(cell)
            for other in others
            for name in wanted
            for cell in sorted(other.glob(f"{name}-*"))
        ]
    except OSError:
        return ()
    found = []
    for cell in islice(cells, MOST):
        try:
            record = read(cell.record)
        except (RecordError, OSError):
            continue
        found += [record] * record.usable
    own = [runs.records[0] for runs in trained]
    machines = Machines([*own, *found])
    here = {_surroundings(record, machines) for record in own}
    return tuple(record for record in found if here == {_surroundings(record, machines)})


def _surroundings(record: Record, machines: Machines) -> tuple[str, ...]:
    known = provenance(record, machines)
    return tuple(known[name] for name in SAME)


# The wires between the hosts of a cell: which interfaces its exchange used, what they carried, and what they could carry.


EXCHANGE, NET_LINK, BETWEEN_HOSTS_BUSBW = (
    "comm/exchange_ms",
    "reference/net_link_ms",
    "comm/busbw_gb_per_s",
)
MOVED = "comm/bytes_moved"
MOST_PADDING = 0.01  # share of the bytes that buckets may add
NAMED = 2  # hosts whose interfaces are told one by one


@dataclass(frozen=True)
class HostWire:
    """What a host reaches the others through."""

    names: tuple[
        str, ...
    ]  # network devices that NCCL used, else the interface that gloo was given; empty: not known
    gbit_per_s: float | None  # of all of them, as the driver has it


@dataclass(frozen=True)
class HostWires:
    """The wires between the hosts of one cell; medians over its runs, None where no run measured it."""

    of_hosts: Mapping[str, HostWire]  # in rank order, then hosts that have servers only
    exchange_ms: float | None
    link_ms: (
        float | None
    )  # what the bytes of an exchange take if nothing but the wire is used: reference net_link
    gb_per_s: (
        float | None
    )  # of each host while it exchanges; known for a ring of one rank on each host

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
        known = [wire.gbit_per_s for wire in self.of_hosts.values() if wire.gbit_per_s is not None]
        return min(known) / 8 if len(known) == len(self.of_hosts) else None

    @property
    def worded(self) -> str:
        """`a's eth0 ↔ b's ib0`, of many hosts `eth0 of node[01-16]`; empty where not every interface is known."""
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
    exchange, link = (middle(runs.records, name) for name in (EXCHANGE, NET_LINK))
    return HostWires(
        wires_of(runs.records[0]),
        exchange,
        link,
        middle(runs.records, BETWEEN_HOSTS_BUSBW) if _all_crosses(runs) else None,
    )


def _all_crosses(runs: Runs) -> bool:
    """Tell whether all that a rank sends crosses to other hosts: a ring of one rank on each host."""
    hosts, size = len(runs.cell.hosts), runs.records[0].model.get("gradient_bytes")
    moved = middle(runs.records, MOVED)
    if len(runs.cell.gpus) > 1 or runs.cell.servers or not size or moved is None:
        return False
    return math.isclose(moved, 2 * (hosts - 1) / hosts * size, rel_tol=MOST_PADDING)


def wires_of(record: Record) -> dict[str, HostWire]:
    """Return what each host of a record reaches the others through."""
    used = mapping(mapping(record.effective.get("nccl")).get("nics"))
    return {host: _wire(facts, used.get(host)) for host, facts in facts_of_hosts(record).items()}


def _wire(facts: Mapping[str, Any], used: object) -> HostWire:
    devices = [str(one) for one in used] if isinstance(used, list) else []
    if not devices:
        one = interface_of(facts)
        return HostWire((one.name,) if one.name else (), one.gbit_per_s)
    rates = {
        str(port.get("device")): _gbit(str(port.get("rate")))
        for port in listed(facts.get("infiniband"))
    }
    interfaces = {
        str(one.get("name")): one.get("mbit_per_s") for one in listed(facts.get("interfaces"))
    }
    rates |= {
        name: mbit / 1000
        for name, mbit in interfaces.items()
        if isinstance(mbit, int | float) and mbit > 0
    }
    known = [rates.get(name) for device in devices for name in device.split("+")]
    return HostWire(tuple(devices), sum(filter(None, known)) if all(known) else None)


def _gbit(rate: str) -> float | None:
    """Return the Gbit/s of `400 Gb/sec (4X NDR)`, as the kernel writes the rate of a port."""
    found = re.match(r"([0-9.]+) Gb/sec", rate)
    return float(found[1]) if found else None


# A straight line through the cells of one mechanism: least squares, with the intervals of Student's t.


Values = np.ndarray[Any, np.dtype[np.float64]]
_LEAST = 1e-6  # of the largest value: residuals below it are rounding
BENT = 0.99  # level at which a parabola's further term differs from 0


@dataclass(frozen=True)
class Fit:
    """y = fixed + slope · x, through `count` points."""

    fixed: float
    slope: float
    count: int
    middle: float  # mean of x
    spread: float  # sum of squares of x about it
    deviation: float  # of the residuals, with count − 2 degrees of freedom
    r_squared: float

    def at(self, x: float) -> float:
        """Return the line's value."""
        return self.fixed + self.slope * x

    def expected(self, x: float, level: float = LEVEL) -> Estimate:
        """Return the line's value with the interval that holds a further point at x."""
        half = quantile(self.count - 2, level) * self.deviation * math.sqrt(1 + self._leverage(x))
        return Estimate(self.at(x), self.at(x) - half, self.at(x) + half)

    def fixed_estimate(self) -> Estimate:
        """Return the line's value at 0 with its interval."""
        half = quantile(self.count - 2) * self.deviation * math.sqrt(self._leverage(0))
        return Estimate(self.fixed, self.fixed - half, self.fixed + half)

    def slope_estimate(self) -> Estimate:
        """Return the slope with its interval."""
        half = quantile(self.count - 2) * self.deviation / math.sqrt(self.spread)
        return Estimate(self.slope, self.slope - half, self.slope + half)

    def _leverage(self, x: float) -> float:
        return 1 / self.count + (x - self.middle) ** 2 / self.spread


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the line of least squares through (x, y); None for fewer than three points, or where all x are equal."""
    count = len(points)
    if count < 3:
        return None
    middle, mean = (math.fsum(values) / count for values in zip(*points, strict=True))
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread <= (_LEAST * middle) ** 2:
        return None
    slope = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    fixed = mean - slope * middle
    left = math.fsum((y - fixed - slope * x) ** 2 for x, y in points)
    total = math.fsum((y - mean) ** 2 for _, y in points)
    least = _LEAST * max(abs(y) for _, y in points)
    deviation = max(math.sqrt(left / (count - 2)), least)
    return Fit(
        fixed,
        slope,
        count,
        middle,
        spread,
        deviation,
        1 - left / total if total > least**2 else 0.0,
    )


def outliers(points: Sequence[tuple[float, float]], level: float, fewest: int) -> list[int]:
    """Return the places of points outside the interval that all others give them, farthest first.

    They are taken out one by one, each judged by what is left (Rosner's generalised test for several outliers, Technometrics
    25, 1983), at most a quarter of the points and never below `fewest`. A point counts only if neither a line nor a parabola
    through the others explains it: cells that bend away from a line together are no outliers.
    """
    left, found = list(range(len(points))), []
    while len(left) > max(fewest, len(points) - len(points) // 4):
        values = np.array([points[place] for place in left])
        misses = np.minimum(_misses(values, 1, level), _misses(values, 2, level))
        if misses.max() <= 1:
            break
        found.append(left.pop(int(misses.argmax())))
    return found


def _misses(points: Values, degree: int, level: float) -> Values:
    """Return how far each point lies from the polynomial through all others, as a multiple of half its interval."""
    x, y = points.T
    freedom = len(x) - degree - 2  # of the polynomial through the others
    if freedom < 1:
        return np.zeros(len(x))
    basis = _basis(x, degree)
    left = y - basis @ (basis.T @ y)
    kept = np.maximum(1 - (basis**2).sum(axis=1), _LEAST)  # 1 − leverage
    squares = np.maximum((left**2).sum() - left**2 / kept, 0.0) / freedom
    deviation = np.maximum(np.sqrt(squares), _LEAST * np.abs(y).max() + 1e-300)
    misses: Values = np.abs(left) / (np.sqrt(kept) * deviation * quantile(freedom, level))
    return misses


def bends(points: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the points follow a parabola rather than a line: its further term differs from 0."""
    x, y = np.array(points, dtype=float).T
    freedom = len(x) - 3
    if freedom < 1:
        return False
    basis = _basis(x, 2)
    parts = basis.T @ y
    deviation = math.sqrt(max(float(((y - basis @ parts) ** 2).sum()), 0.0) / freedom)
    return bool(
        abs(parts[2]) > quantile(freedom, BENT) * max(deviation, _LEAST * float(np.abs(y).max()))
    )


def _basis(x: Values, degree: int) -> Values:
    """Return orthonormal polynomials at x, the constant first, (len(x), degree + 1)."""
    basis, _ = np.linalg.qr(
        np.vander((x - x.mean()) / (np.ptp(x) or 1.0), degree + 1, increasing=True)
    )
    return basis


# The wires of a machine as a study knows them: their link classes, and GB/s between pairs where benchmark=p2p measured them.


P2P = ("unidirectional_enabled", "unidirectional_disabled")  # with and without peer access

Matrix = dict[tuple[Member, Member], float]


class MachineLinks:
    """The links of one machine: their classes, and GB/s between pairs where benchmark=p2p measured them."""

    def __init__(
        self, topologies: Mapping[str, Topology | None], measured: Mapping[str, Matrix]
    ) -> None:
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
            known = (
                topology is not None and 2 <= len(ids) <= MOST_GPUS and ids <= set(topology.gpus)
            )
            self._rings[members] = (
                best_ring(topology, sorted(ids)) if known and topology is not None else None
            )
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
        return any(
            len({one.link_between(a, b) for a, b in combinations(one.gpus, 2)}) > 1 for one in known
        )

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
        if not 2 <= len(chosen) <= MOST_GPUS or any(
            pair not in pairs for pair in permutations(gpus, 2)
        ):
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

    `beside` holds what other studies measured on the machine of a study that has one (analysis.findings.links).
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


FEWEST = 4  # cells of a line
SPREAD = 1.2  # the slowest wires of a line must take this many times as long as the fastest
ALIKE = 1.1  # below this ratio two speeds are one
# Where the GB/s of a line come from, as the report words it. Of sources that know as many cells the first counts.
SOURCES = {
    "p2p": "peer copies (benchmark=p2p), in all rings that fit",
    "collectives": "all-reduce alone (benchmark=collectives)",
    "reference": "the reference that each cell measured",
    "exchange": "the exchange alone in each cell",
}
_STAGE, _RING = (
    "reference/",
    "reference/ring_ms",
)  # what a cell measured of the wires that its strategy uses


@dataclass(frozen=True)
class _Cell:
    """One cell of a mechanism: ms on its wires by each source, and what it lost by each quantity, both where known."""

    runs: Runs
    megabytes: float  # that the exchange moves over its wires: busbw · time
    wire_ms: Mapping[str, float]
    lost_ms: Mapping[str, float]
    alone_ms: float | None  # a step of the slowest member alone


def wire_lines(
    study: Study,
    machines: Mapping[str, MachineLinks],
    scaling: Scaling,
    communication: Sequence[Communication],
    beside: Sequence[Record] = (),
) -> tuple[tuple[WireLine, ...], str]:
    """Return the lines of a study; without any, a sentence on what is missing and how to plan it.

    `beside` holds what other studies measured of the machine's links (analysis.findings.links).
    """
    mechanisms = _mechanisms(study, machines, scaling, beside)
    exposed = {
        one.record_ids[0]: one.exposed_ms for one in communication if one.exposed_ms is not None
    }
    chosen = []
    for cells in mechanisms:
        for quantity in (COST, EFFICIENCY):
            known = [cell for cell in cells if quantity in cell.lost_ms]
            source = _source(known)
            if source:
                known = [cell for cell in known if source in cell.wire_ms]
                told = _with_exposed(known, exposed) if quantity == COST else []
                if len(told) == len(known):
                    quantity, known = EXPOSED, told
                chosen.append((quantity, source, known))
    tested = sum(len(cells) for _, _, cells in chosen)
    level = 1 - (1 - LEVEL) / max(1, tested)  # all cells of all lines are one family
    lines = [_line(study, quantity, source, cells, level) for quantity, source, cells in chosen]
    found = tuple(line for line in lines if line is not None)
    return found, "" if found or not mechanisms else _missing(machines, mechanisms)


def _mechanisms(
    study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling, beside: Sequence[Record]
) -> list[list[_Cell]]:
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    alone = _collectives(study, beside)
    together: dict[Any, list[_Cell]] = defaultdict(list)
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == "none":
            continue
        settings = [name for name in (*study.varied, *study.varied_provenance) if _is_setting(name)]
        key = (
            runs.provenance["machine"],
            study.condition(runs, (*settings, *follows_from_gpus(runs))),
        )
        machine = machines[runs.provenance["machine"]]
        together[key].append(_cell(runs, machine, alone, points.get(runs.records[0].record_id)))
    return list(together.values())


def _is_setting(name: str) -> bool:
    """Tell whether a name is one of NCCL's settings, which change the wires or their use, not the mechanism."""
    return name.startswith(("nccl.", "NCCL_")) or name == CONNECTIONS


def _cell(
    runs: Runs, machine: MachineLinks, alone: Mapping[Any, Sequence[float]], point: Point | None
) -> _Cell:
    exchange, busbw = (
        middle(runs.records, "comm/exchange_ms"),
        middle(runs.records, "comm/busbw_gb_per_s"),
    )
    megabytes = exchange * busbw if exchange and busbw else 0.0
    stages = {name for record in runs.records for name in record.metrics if name.startswith(_STAGE)}
    speeds: dict[str, float | None] = {}
    if stages <= {_RING} and transport_of(
        runs
    ):  # the exchange crosses nothing but the wires between GPUs
        measured = alone.get(_collectives_key(runs.provenance["machine"], runs.records[0]))
        speeds["p2p"] = machine.measured_gb_per_s(runs.gpus, transport_of(runs))
        speeds["collectives"] = median(measured) if measured else None
    times = {source: megabytes / speed for source, speed in speeds.items() if speed and megabytes}
    reference = middle(runs.records, "comm/ideal_ms")
    if megabytes and reference:
        times["reference"] = reference
    if megabytes and exchange:
        times["exchange"] = exchange
    lost, step_alone = {}, None
    cost = middle(runs.records, COST)
    if cost is not None:
        lost[COST] = cost
    if point is not None and point.baseline is not None:
        step_alone = 1e3 * point.batch_size / point.baseline.value
        lost[EFFICIENCY] = 1e3 * point.batch_size * point.world_size / point.rate.value - step_alone
    return _Cell(runs, megabytes, times, lost, step_alone)


def _with_exposed(cells: Sequence[_Cell], exposed: Mapping[str, float]) -> list[_Cell]:
    """Return the cells whose exposed communication is known, with it beside the strategy's cost."""
    known = [(cell, exposed.get(cell.runs.records[0].record_id)) for cell in cells]
    return [
        replace(cell, lost_ms={**cell.lost_ms, EXPOSED: ms}) for cell, ms in known if ms is not None
    ]


def _collectives_key(machine: str, record: Record) -> tuple[Any, ...]:
    return machine, frozenset(record.cell.members), frozenset(record.cell.nccl.items())


def _collectives(study: Study, beside: Sequence[Record]) -> dict[Any, list[float]]:
    """Return the busbw of all-reduces that ran alone, by machine, GPUs and NCCL's settings."""
    found: dict[Any, list[float]] = defaultdict(list)
    own = [(runs.provenance["machine"], record) for runs in study.runs for record in runs.records]
    machine = own[0][0] if own else ""  # `beside` is empty where there are several
    for where, record in [*own, *((machine, record) for record in beside)]:
        options, busbw = record.cell.benchmark, record.metrics.get("collectives/busbw_gb_per_s")
        if busbw and options["name"] == "collectives" and options.get("collective") == "all_reduce":
            found[_collectives_key(where, record)].append(busbw)
    return found


def _source(cells: Sequence[_Cell]) -> str | None:
    """Return the source of GB/s that knows most cells, among those whose cells are enough for a line."""
    counts = {}
    for source in SOURCES:
        times = [cell.wire_ms[source] for cell in cells if source in cell.wire_ms]
        if len(times) >= FEWEST and max(times) >= SPREAD * min(times):
            counts[source] = len(times)
    return max(counts, key=counts.__getitem__, default=None)


def _line(
    study: Study, quantity: str, source: str, cells: Sequence[_Cell], level: float
) -> WireLine | None:
    pairs = [(cell.wire_ms[source], cell.lost_ms[quantity]) for cell in cells]
    outside = outliers(pairs, level, FEWEST)
    line = fit([pair for place, pair in enumerate(pairs) if place not in outside])
    if line is None:
        return None
    first = cells[0].runs
    points = []
    for place, (cell, (x, _)) in enumerate(zip(cells, pairs, strict=True)):
        others = (
            line
            if place in outside
            else fit([one for at, one in enumerate(pairs) if at not in (place, *outside)])
        )
        points.append(
            _point(
                study, quantity, source, cell, (others or line).expected(x, level), place in outside
            )
        )
    alone = [cell.alone_ms for cell in cells if cell.alone_ms is not None]
    return WireLine(
        label=labels.label(
            study, first, ["benchmark.name", *(name for name in study.varied if _is_setting(name))]
        ),
        strategy=first.strategy,
        key=first.key,
        quantity=quantity,
        source=source,
        # Cells of other lines share an error of one GPU.
        fixed_ms=line.fixed_estimate() if quantity == COST else Estimate(line.fixed),
        share=line.slope_estimate(),
        r_squared=line.r_squared,
        deviation_ms=line.deviation,
        points=tuple(sorted(points, key=lambda point: (point.wire_ms, point.gpus, point.label))),
        speeds=_speeds([x for x, _ in pairs]),
        bends=bends([pair for place, pair in enumerate(pairs) if place not in outside]),
        alone_ms=median(alone) if alone and quantity == EFFICIENCY else None,
    )


def _point(
    study: Study, quantity: str, source: str, cell: _Cell, expected: Estimate, outside: bool
) -> WirePoint:
    runs, lost = cell.runs, cell.lost_ms[quantity]
    settings = [
        labels.worded(name, runs.request[name]) for name in study.varied if _set(runs, name)
    ]
    verdict = ("more" if lost > expected.value else "less") if outside else ""
    return WirePoint(
        runs.gpus, runs.key, labels.BETWEEN.join([labels.gpu_ids(runs.gpus), *settings]),
        cell.megabytes / cell.wire_ms[source], cell.wire_ms[source], lost, expected, lost - expected.value, verdict,
        *_shares(cell, lost, expected, quantity),
    )  # fmt: skip


def _set(runs: Runs, name: str) -> bool:
    return _is_setting(name) and name in runs.request


def _shares(
    cell: _Cell, lost: float, expected: Estimate, quantity: str
) -> tuple[float | None, Estimate | None]:
    """Return a cell's efficiency, and that which the line gives it; both None where the line is not one of efficiency."""
    if quantity != EFFICIENCY or cell.alone_ms is None:
        return None, None
    return cell.alone_ms / (cell.alone_ms + lost), efficiency_of(cell.alone_ms, expected)


def efficiency_of(alone_ms: float, lost_ms: Estimate) -> Estimate:
    """Return the efficiency of a step that takes `lost_ms` more than alone; interval ends change places."""
    value, high, low = (
        None if lost is None else alone_ms / max(alone_ms + lost, 1e-9)
        for lost in (lost_ms.value, lost_ms.low, lost_ms.high)
    )
    assert value is not None
    return Estimate(value, low, high)


def line_of(line: WireLine) -> Fit | None:
    """Return the fit of a line, to draw it."""
    return fit([(point.wire_ms, point.lost_ms) for point in line.points if not point.verdict])


def _speeds(times: Iterable[float]) -> int:
    """Return how many different times on the wires there are; those within ALIKE of the fastest of a group are one."""
    count, first = 0, 0.0
    for time in sorted(times):
        if not count or time > ALIKE * first:
            count, first = count + 1, time
    return count


def _missing(machines: Mapping[str, MachineLinks], mechanisms: Sequence[Sequence[_Cell]]) -> str:
    cells = max(mechanisms, key=lambda cells: sum(bool(cell.wire_ms) for cell in cells))
    strategy, machine = cells[0].runs.strategy, machines[cells[0].runs.provenance["machine"]]
    measured = [cell for cell in cells if cell.wire_ms]
    plan = (
        " (gpus=classes adds them)"
        if machine.has_different_links
        else " (nccl.max_nchannels=1,2,4,8 adds them)"
    )
    plan = plan if cells[0].runs.cell.device == "cuda" else ""
    said = "whether the speed of the links explains what cells lose is not known"
    if not measured:
        return f"{said}: no cell measured its exchange or its links"
    if not any(cell.lost_ms for cell in measured):
        return f"{said}: no cell of {strategy} measured what the strategy costs, and none ran on one GPU (gpus=each adds that)"
    if len(measured) < FEWEST:
        have = f"{len(measured)} cell{'s' if len(measured) > 1 else ''} with measured links"
        return f"{said}: {strategy} has {have}, and {FEWEST} with different GB/s are needed{plan}"
    speeds = [cell.megabytes / min(cell.wire_ms.values()) for cell in measured]
    return (
        f"{said}: all links of {strategy} are equally fast ({min(speeds):.0f} to {max(speeds):.0f} GB/s), and {FEWEST} cells "
        f"with different GB/s are needed{plan}"
    )


# Results next to the links: what each subset exchanged over which links, which member of a class stands out, and how many


BUSBW = "comm/busbw_gb_per_s"
FEWEST_MEMBERS = 3  # of a class: of two, nobody knows which one stands out


def subset_links(
    study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling
) -> tuple[SubsetLinks, ...]:
    """Return one line for every subset of several GPUs whose cell exchanged or trained."""
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    listed = []
    for runs in study.runs:
        busbw = middle(runs.records, BUSBW)
        if runs.world_size == 1 or (busbw is None and runs.log_rate is None):
            continue
        machine, transport = machines[runs.provenance["machine"]], transport_of(runs)
        point = points.get(runs.records[0].record_id)
        between = host_wires(runs)
        links = SubsetLinks(
            gpus=runs.gpus,
            key=runs.key,
            strategy=runs.strategy,
            label=labels.label(study, runs),
            link_class=class_of(machine, runs),
            transport=transport,
            exchange_gb_per_s=busbw,
            p2p_gb_per_s=machine.measured_gb_per_s(runs.gpus, transport)
            if between is None
            else between.link_gb_per_s,
            nominal_gb_per_s=machine.nominal_gb_per_s(runs.gpus)
            if between is None
            else between.nominal_gb_per_s,
            efficiency=point.efficiency.value if point and point.efficiency else None,
        )
        listed.append((links, runs))
    sentences = _outstanding(study, listed)
    return tuple(
        replace(links, stands_out=sentences.get(at, "")) for at, (links, _) in enumerate(listed)
    )


def class_of(machine: MachineLinks, runs: Runs) -> str | None:
    """Return the worst class between neighbours of the best ring; without a topology the worst that a record names."""
    ring = machine.ring(runs.gpus)
    if ring:
        return list(ring.links)[-1]
    classes = str(runs.records[0].effective.get("link_class") or "")
    return classes.split("+")[-1] or None


def _outstanding(study: Study, listed: Sequence[tuple[SubsetLinks, Runs]]) -> dict[int, str]:
    """Return a sentence for every member that differs from the median of its class by more than equal cells of this study do.

    Members are compared in exchange bandwidth and in images per second. All tests of both are one family.
    """
    tested = []
    for metric, name in ((BUSBW, "exchanges"), (IMAGES_PER_SECOND, "trains")):
        deviation, freedom = between_runs((runs for _, runs in listed), metric)
        if not freedom:
            continue
        classes: dict[Hashable, list[tuple[int, float, int]]] = defaultdict(list)
        for at, (links, runs) in enumerate(listed):
            values = runs.logarithms(metric)
            if values:
                key = (len(links.gpus), links.link_class, study.condition(runs))
                classes[key].append((at, sum(values) / len(values), len(values)))
        tested.append(
            (
                name,
                deviation,
                freedom,
                [one for one in classes.values() if len(one) >= FEWEST_MEMBERS],
            )
        )
    level = 1 - (1 - LEVEL) / max(1, sum(len(one) for *_, members in tested for one in members))
    found: dict[int, str] = {}
    for name, deviation, freedom, members in tested:
        for one in members:
            usual, runs_of_class = (
                median(value for _, value, _ in one),
                sum(count for _, _, count in one),
            )
            for at, value, count in one:
                error = deviation * math.sqrt(1 / count + MEDIAN**2 / runs_of_class)
                if at not in found and abs(value - usual) > quantile(freedom, level) * error:
                    found[at] = _sentence(listed[at][0], name, math.expm1(value - usual), len(one))
    return found


def _sentence(one: SubsetLinks, name: str, share: float, members: int) -> str:
    size, links = len(one.gpus), f" with {one.link_class}" if one.link_class else ""
    return (
        f"{gpu_list(one.gpus)} {name} {100 * abs(share):.1f} % {'slower' if share < 0 else 'faster'} than the median of the "
        f"{members} subsets of {size}{links}, more than noise explains"
    )


def link_values(study: Study, machines: Mapping[str, MachineLinks]) -> tuple[LinkValue, ...]:
    """Return what each link class costs against the best one of the study, for each strategy and number of GPUs."""
    alike: dict[Hashable, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for runs in study.timed:
        link = class_of(machines[runs.provenance["machine"]], runs) if runs.world_size > 1 else None
        if link is not None and is_known(link):
            alike[runs.world_size, study.condition(runs)][link].append(runs)
    found = []
    for classes in alike.values():
        best, *others = best_first(classes)
        for link in others:
            first = classes[link][0]
            found.append(
                LinkValue(
                    first.key,
                    first.strategy,
                    f"{labels.label(study, first)} · {first.world_size} GPUs, {best} against {link}",
                    link,
                    _difference(classes[best], classes[link]),
                    first.records[0].model.get("gradient_bytes"),
                    first.batch_size,
                )
            )
    return tuple(found)


def _difference(better: Sequence[Runs], worse: Sequence[Runs]) -> Estimate:
    """Return the images per second and GPU between the means of two classes."""
    (one, first), (two, second) = _mean(better), _mean(worse)
    return estimate(one - two, first - second if first is not None and second is not None else None)


def _mean(members: Sequence[Runs]) -> tuple[float, Draws | None]:
    """Return the mean rate per GPU of several subsets, and draws of it where the scatter of all is known."""
    rates = [runs.log_rate for runs in members if runs.log_rate is not None]
    size = members[0].world_size
    value = sum(math.exp(rate.value) for rate in rates) / len(rates) / size
    drawn = [rate.draws[MEASURED] for rate in rates if rate.draws is not None]
    return value, np.exp(drawn).mean(axis=0) / size if len(drawn) == len(rates) else None
