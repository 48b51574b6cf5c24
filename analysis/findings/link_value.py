"""Results next to the links: what each subset exchanged over which links, which member of a class stands out, and how many
images per second a link class costs.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import numpy as np

from analysis.findings import labels
from analysis.findings.estimates import LEVEL, MEASURED, MEDIAN, Draws, estimate, quantile
from analysis.findings.labels import gpu_list
from analysis.findings.model import Estimate, LinkValue, Scaling, SubsetLinks
from analysis.findings.provenance import mapping
from analysis.findings.rates import IMAGES_PER_SECOND
from analysis.findings.runs import Runs, between_runs
from analysis.findings.study import Study
from analysis.topology.link_classes import best_first, is_known
from analysis.topology.model import Gpu, Topology
from analysis.topology.placement import MOST_GPUS, Ring, place
from benchmarks.record import Record

BUSBW = "comm/busbw_gb_per_s"
FEWEST_MEMBERS = 3  # of a class: of two, nobody knows which one stands out
P2P = ("unidirectional_enabled", "unidirectional_disabled")  # with and without peer access

Matrix = dict[tuple[int, int], float]


class MachineLinks:
    """The links of one machine: their classes, and GB/s between pairs where benchmark=p2p measured them."""

    def __init__(self, topology: Topology | None, measured: Mapping[str, Matrix]) -> None:
        self._topology, self._measured = topology, measured
        self._rings: dict[frozenset[int], Ring | None] = {}

    def ring(self, gpus: Iterable[int]) -> Ring | None:
        """Return the best ring of a subset by link class; None where a class is not known."""
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
        """Return the slowest measured link of the ring, with peer access or without, as the transport has it."""
        ring = self.ring(gpus)
        order = ring.order if ring else tuple(gpus)
        matrix = self._measured.get(P2P[0] if transport is None or "P2P" in transport else P2P[1], {})
        ends = zip(order, (*order[1:], order[0]), strict=True)
        found = [min(matrix.get((a, b), math.nan), matrix.get((b, a), math.nan)) for a, b in ends]
        return min(found) if all(map(math.isfinite, found)) else None


def machine_links(study: Study, topology: Topology | None) -> dict[str, MachineLinks]:
    """Return the links of every machine of a study, by the machine's name.

    `topology` is that of a study on one machine; otherwise the links that the records name count.
    """
    by_machine: dict[str, list[Runs]] = defaultdict(list)
    for runs in study.runs:
        by_machine[runs.provenance["machine"]].append(runs)
    links = {}
    for name, members in by_machine.items():
        records = [record for runs in members for record in runs.records]
        own = topology if len(by_machine) == 1 and topology is not None else _links(records)
        links[name] = MachineLinks(own, _matrices(records))
    return links


def _links(records: Iterable[Record]) -> Topology | None:
    """Return the link classes that the records of a machine name; None unless every pair has one."""
    pairs: dict[str, str] = {}
    for record in records:
        pairs |= mapping(record.environment.get("links"))
    words: dict[frozenset[int | str], str] = {}
    for pair, word in pairs.items():
        ends = pair.split("-")
        if len(ends) == 2 and all(end.isdigit() for end in ends):
            words[frozenset(map(int, ends))] = str(word)
    gpus = sorted({int(gpu) for pair in words for gpu in pair})
    if not gpus or any(frozenset(pair) not in words for pair in combinations(gpus, 2)):
        return None
    return Topology(tuple(Gpu(gpu) for gpu in gpus), (), words, None, "records")


def _matrices(records: Iterable[Record]) -> dict[str, Matrix]:
    """Return what records of benchmark=p2p measured: {name: {(from GPU, to GPU): GB/s}}."""
    matrices: dict[str, Matrix] = {name: {} for name in P2P}
    for record in records:
        measured = mapping(mapping(record.tables.get("p2p")).get("matrices"))
        gpus = record.cell.gpus
        for name in P2P:
            rows = measured.get(name)
            if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
                continue
            for a, row in zip(gpus, rows, strict=False):
                for b, value in zip(gpus, row, strict=False):
                    if a != b and isinstance(value, int | float) and value > 0:
                        matrices[name][a, b] = float(value)
    return matrices


def subset_links(study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling) -> tuple[SubsetLinks, ...]:
    """Return one line for every subset of several GPUs whose cell exchanged or trained."""
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    listed = []
    for runs in study.runs:
        rates = runs.values(BUSBW)
        busbw = median(rates) if rates else None
        if runs.world_size == 1 or (busbw is None and runs.log_rate is None):
            continue
        machine, transport = machines[runs.provenance["machine"]], _transport(runs)
        point = points.get(runs.records[0].record_id)
        links = SubsetLinks(
            runs.gpus,
            runs.key,
            runs.strategy,
            labels.label(study, runs),
            class_of(machine, runs),
            transport,
            busbw,
            machine.slowest_gb_per_s(runs.gpus, transport),
            point.efficiency.value if point and point.efficiency else None,
        )
        listed.append((links, runs))
    sentences = _outstanding(study, listed)
    return tuple(replace(links, stands_out=sentences.get(at, "")) for at, (links, _) in enumerate(listed))


def _transport(runs: Runs) -> str | None:
    found = (record.effective.get("transport") for record in runs.records)
    return next((str(one) for one in found if one), None)


def class_of(machine: MachineLinks, runs: Runs) -> str | None:
    """Return the worst class between neighbours of the best ring; without a topology the worst that a record names."""
    ring = machine.ring(runs.gpus)
    if ring:
        return list(ring.links)[-1]
    classes = str(runs.records[0].effective.get("link_class") or "")
    return classes.split("+")[-1] or None


def _outstanding(study: Study, listed: Sequence[tuple[SubsetLinks, Runs]]) -> dict[int, str]:
    """Return a sentence for every member that differs from the median of its class by more than equal cells of this study do.

    Members are compared in exchange bandwidth, or in images per second where nothing was exchanged alone. All members that
    are tested are one family.
    """
    found: dict[int, str] = {}
    for metric, name in ((BUSBW, "exchanges"), (IMAGES_PER_SECOND, "trains")):
        deviation, freedom = between_runs((runs for _, runs in listed), metric)
        if not freedom:
            continue
        classes: dict[Hashable, list[tuple[int, float, int]]] = defaultdict(list)
        for at, (links, runs) in enumerate(listed):
            values = runs.logarithms(metric)
            if values and at not in found:
                key = (len(links.gpus), links.link_class, study.condition(runs))
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


def _sentence(one: SubsetLinks, name: str, share: float, members: int) -> str:
    size, links = len(one.gpus), f" with {one.link_class}" if one.link_class else ""
    return (
        f"{gpu_list(one.gpus)} {name} {abs(share):.1%} {'slower' if share < 0 else 'faster'} than the median of the "
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
