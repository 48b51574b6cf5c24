"""Results next to the links: what each subset exchanged over which links, which member of a class stands out, and how many
images per second a link class costs.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from analysis.findings import labels
from analysis.findings.estimates import MEASURED, MEDIAN, Draws, estimate, quantile
from analysis.findings.labels import gpu_list
from analysis.findings.model import Estimate, LinkValue, Scaling, SubsetLinks
from analysis.findings.next_run.interval import LEVEL
from analysis.findings.rates import IMAGES_PER_SECOND
from analysis.findings.runs import Runs, between_runs, middle
from analysis.findings.study import Study
from analysis.findings.wires.between_hosts import host_wires
from analysis.findings.wires.measured import MachineLinks, transport_of
from analysis.topology.link_classes import best_first, is_known

BUSBW = "comm/busbw_gb_per_s"
FEWEST_MEMBERS = 3  # of a class: of two, nobody knows which one stands out


def subset_links(study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling) -> tuple[SubsetLinks, ...]:
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
            p2p_gb_per_s=machine.measured_gb_per_s(runs.gpus, transport) if between is None else between.link_gb_per_s,
            nominal_gb_per_s=machine.nominal_gb_per_s(runs.gpus) if between is None else between.nominal_gb_per_s,
            efficiency=point.efficiency.value if point and point.efficiency else None,
        )
        listed.append((links, runs))
    sentences = _outstanding(study, listed)
    return tuple(replace(links, stands_out=sentences.get(at, "")) for at, (links, _) in enumerate(listed))


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
        tested.append((name, deviation, freedom, [one for one in classes.values() if len(one) >= FEWEST_MEMBERS]))
    level = 1 - (1 - LEVEL) / max(1, sum(len(one) for *_, members in tested for one in members))
    found: dict[int, str] = {}
    for name, deviation, freedom, members in tested:
        for one in members:
            usual, runs_of_class = median(value for _, value, _ in one), sum(count for _, _, count in one)
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
