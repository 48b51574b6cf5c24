"""Results tied to the wires: what each subset exchanged over which links, which member of a class stands out, what a link
is worth.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import numpy as np

from analysis.findings.baselines import RATE
from analysis.findings.estimates import LEVEL, MEDIAN, Draws, estimate, quantile
from analysis.findings.model import Estimate, Scaling, Wire, Worth
from analysis.findings.provenance import part
from analysis.findings.runs import Gathered, Runs, between_runs, gather, gpu_list
from analysis.findings.scaling import curves
from analysis.topology.link_classes import best_first, is_known
from analysis.topology.model import Gpu, Topology
from analysis.topology.placement import MOST_GPUS, Ring, place
from benchmarks.record import Record

BUSBW = "comm/busbw_gb_per_s"
FEWEST_MEMBERS = 3  # of a class: of two, nobody knows which one stands out
P2P = ("unidirectional_enabled", "unidirectional_disabled")  # with and without peer access

Matrix = dict[tuple[int, int], float]


class Machine:
    """The links of one machine: classes, and GB/s between pairs where benchmark=p2p measured them."""

    def __init__(self, topology: Topology | None, measured: Mapping[str, Matrix]) -> None:
        self._topology, self._measured = topology, measured
        self._rings: dict[frozenset[int], Ring | None] = {}

    def ring(self, gpus: Iterable[int]) -> Ring | None:
        """The best ring of a subset by link class; None where a class is not known."""
        members = frozenset(gpus)
        if members not in self._rings:
            self._rings[members] = self._best(members)
        return self._rings[members]

    def _best(self, gpus: frozenset[int]) -> Ring | None:
        topology = self._topology
        if topology is None or not 2 <= len(gpus) <= MOST_GPUS or not gpus <= set(topology.gpus):
            return None
        words = {topology.link_between(a, b) for a, b in combinations(sorted(gpus), 2)}
        if len(words) == 1:  # every ring is as good
            return Ring(tuple(sorted(gpus)), {words.pop(): 1 if len(gpus) == 2 else len(gpus)}, None, None)
        devices = tuple(gpu for gpu in topology.devices if gpu.index in gpus)
        return place(Topology(devices, (), topology.links, None, topology.source), len(gpus)).best

    def slowest_gb_per_s(self, gpus: Sequence[int], transport: str | None) -> float | None:
        """The slowest measured link of the ring, with peer access or without as the transport has it."""
        ring = self.ring(gpus)
        order = ring.order if ring else tuple(gpus)
        matrix = self._measured.get(P2P[0] if transport is None or "P2P" in transport else P2P[1], {})
        ends = zip(order, (*order[1:], order[0]), strict=True)
        found = [min(matrix.get((a, b), math.nan), matrix.get((b, a), math.nan)) for a, b in ends]
        return min(found) if all(map(math.isfinite, found)) else None


def wires(records: Iterable[Record], topology: Topology | None = None) -> tuple[Wire, ...]:
    """One line for every subset of several GPUs whose cell exchanged or trained."""
    study = gather(records)
    return wired(study, machines(study, topology), curves(study))


def worth(records: Iterable[Record], topology: Topology | None = None) -> tuple[Worth, ...]:
    """What each link class costs against the best one of the study, for each strategy and number of GPUs."""
    study = gather(records)
    return lost(study, machines(study, topology))


def machines(study: Gathered, topology: Topology | None) -> dict[str, Machine]:
    """By name. `topology` is that of a study on one machine; else the records' own."""
    by_machine: dict[str, list[Runs]] = defaultdict(list)
    for runs in study.runs:
        by_machine[runs.around["machine"]].append(runs)
    made = {}
    for name, members in by_machine.items():
        records = [record for runs in members for record in runs.records]
        own = topology if len(by_machine) == 1 and topology is not None else _links(records)
        made[name] = Machine(own, _matrices(records))
    return made


def _links(records: Iterable[Record]) -> Topology | None:
    """The classes that the records of a machine name."""
    told: dict[str, str] = {}
    for record in records:
        told |= part(record.environment, "links")
    words: dict[frozenset[int | str], str] = {}
    for pair, word in told.items():
        ends = pair.split("-")
        if len(ends) == 2 and all(end.isdigit() for end in ends):
            words[frozenset(map(int, ends))] = str(word)
    gpus = sorted({int(gpu) for pair in words for gpu in pair})
    if not gpus or any(frozenset(pair) not in words for pair in combinations(gpus, 2)):
        return None
    return Topology(tuple(Gpu(gpu) for gpu in gpus), (), words, None, "records")


def _matrices(records: Iterable[Record]) -> dict[str, Matrix]:
    """What records of benchmark=p2p measured: GB/s from each of the cell's GPUs (row) to each other."""
    made: dict[str, Matrix] = {name: {} for name in P2P}
    for record in records:
        told = part(part(record.tables, "p2p"), "matrices")
        gpus = record.cell.gpus
        for name in P2P:
            rows = told.get(name)
            if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
                continue
            for a, row in zip(gpus, rows, strict=False):
                for b, value in zip(gpus, row, strict=False):
                    if a != b and isinstance(value, int | float) and value > 0:
                        made[name][a, b] = float(value)
    return made


def wired(study: Gathered, known: Mapping[str, Machine], scaling: Scaling) -> tuple[Wire, ...]:
    """What `wires` returns, of runs that were gathered before."""
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    listed = []
    for runs in study.runs:
        busbw = runs.metric(BUSBW)
        if runs.world_size == 1 or (busbw is None and runs.rate is None):
            continue
        machine, transport = known[runs.around["machine"]], _transport(runs)
        point = points.get(runs.records[0].record_id)
        wire = Wire(
            runs.gpus,
            runs.strategy,
            study.label(runs),
            class_of(machine, runs),
            transport,
            busbw.value if busbw else None,
            machine.slowest_gb_per_s(runs.gpus, transport),
            point.efficiency.value if point and point.efficiency else None,
        )
        listed.append((wire, runs))
    sentences = _outstanding(study, listed)
    return tuple(replace(wire, stands_out=sentences.get(at, "")) for at, (wire, _) in enumerate(listed))


def _transport(runs: Runs) -> str | None:
    found = (record.effective.get("transport") for record in runs.records)
    return next((str(one) for one in found if one), None)


def class_of(machine: Machine, runs: Runs) -> str | None:
    """The worst class between neighbours of the best ring; of a machine without topology the worst that a record names."""
    ring = machine.ring(runs.gpus)
    if ring:
        return list(ring.links)[-1]
    told = str(runs.records[0].effective.get("link_class") or "")
    return told.split("+")[-1] or None


def _outstanding(study: Gathered, listed: Sequence[tuple[Wire, Runs]]) -> dict[int, str]:
    """A sentence for every member that differs from the median of its class by more than equal cells of this study do.

    Classes of exchange bandwidth, or of images per second where nothing was exchanged alone; all members tested are one family.
    """
    found: dict[int, str] = {}
    for metric, name in ((BUSBW, "exchanges"), (RATE, "trains")):
        deviation, freedom = between_runs((runs for _, runs in listed), metric)
        if not freedom:
            continue
        classes: dict[Hashable, list[tuple[int, float, int]]] = defaultdict(list)
        for at, (wire, runs) in enumerate(listed):
            values = runs.logarithms(metric)
            if values and at not in found:
                key = (len(wire.gpus), wire.link_class, study.condition(runs))
                classes[key].append((at, sum(values) / len(values), len(values)))
        members = [one for one in classes.values() if len(one) >= FEWEST_MEMBERS]
        level = 1 - (1 - LEVEL) / max(1, sum(map(len, members)))
        for one in members:
            middle, runs_of_class = median(value for _, value, _ in one), sum(count for _, _, count in one)
            for at, value, count in one:
                error = deviation * math.sqrt(1 / count + MEDIAN**2 / runs_of_class)
                if abs(value - middle) > quantile(freedom, level) * error:
                    found[at] = _sentence(listed[at][0], name, math.expm1(value - middle), len(one))
    return found


def _sentence(wire: Wire, name: str, share: float, members: int) -> str:
    size, links = len(wire.gpus), f" with {wire.link_class}" if wire.link_class else ""
    return (
        f"{gpu_list(wire.gpus)} {name} {abs(share):.1%} {'slower' if share < 0 else 'faster'} than the median of the "
        f"{members} subsets of {size}{links}, more than noise explains"
    )


def lost(study: Gathered, known: Mapping[str, Machine]) -> tuple[Worth, ...]:
    """What `worth` returns, of runs that were gathered before."""
    alike: dict[Hashable, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for runs in study.timed:
        link = class_of(known[runs.around["machine"]], runs) if runs.world_size > 1 else None
        if link is not None and is_known(link):
            alike[runs.world_size, study.condition(runs)][link].append(runs)
    found = []
    for classes in alike.values():
        best, *others = best_first(classes)
        for link in others:
            first = classes[link][0]
            found.append(
                Worth(
                    first.strategy,
                    f"{study.label(first)} · {first.world_size} GPUs, {best} against {link}",
                    link,
                    _difference(classes[best], classes[link]),
                    first.records[0].model.get("gradient_bytes"),
                    first.batch_size,
                )
            )
    return tuple(found)


def _difference(better: Sequence[Runs], worse: Sequence[Runs]) -> Estimate:
    """Images per second and GPU between the means of two classes."""
    (one, first), (two, second) = _mean(better), _mean(worse)
    return estimate(one - two, first - second if first is not None and second is not None else None)


def _mean(members: Sequence[Runs]) -> tuple[float, Draws | None]:
    """Mean rate per GPU of several subsets, and draws of it where the scatter of all is known."""
    rates = [runs.rate for runs in members if runs.rate is not None]
    size = members[0].world_size
    value = sum(math.exp(rate.value) for rate in rates) / len(rates) / size
    drawn = [rate.draws for rate in rates if rate.draws is not None]
    return value, np.exp(drawn).mean(axis=0) / size if len(drawn) == len(rates) else None
