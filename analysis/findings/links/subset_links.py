"""Results next to the links: what each subset exchanged over which links, which stands out, and
what a link is worth.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from analysis.findings.links.host_wires import BUSBW, host_wires
from analysis.findings.links.machine_links import MachineLinks, link_class_of, transport_of
from analysis.study import names as labels
from analysis.study.conditions import Condition
from analysis.study.draws import MEASURED, MEDIAN, Draws, estimate, quantile
from analysis.study.estimates import Estimate, LinkValue, Scaling, SubsetLinks
from analysis.study.intervals import LEVEL
from analysis.study.names import gpu_list
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.runs import Runs, between_runs
from analysis.study.study import Study
from analysis.topology.model import best_first, is_known

FEWEST_MEMBERS = 3  # of a class: of two, nobody knows which one stands out


def subset_links(
    study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling
) -> tuple[SubsetLinks, ...]:
    """Return one line for every subset of several GPUs whose cell exchanged or trained."""
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    subsets, cells = [], []
    for runs in study.runs:
        busbw = runs.median(BUSBW)
        if runs.world_size == 1 or (busbw is None and runs.log_rate is None):
            continue
        machine, transport = machines[runs.machine], transport_of(runs)
        wires = host_wires(runs)
        if wires is None:
            alone_gb_per_s = machine.measured_gb_per_s(runs.gpus, transport)
            nominal_gb_per_s = machine.nominal_gb_per_s(runs.gpus)
        else:
            alone_gb_per_s, nominal_gb_per_s = wires.link_gb_per_s, wires.nominal_gb_per_s
        point = points.get(runs.records[0].record_id)
        subsets.append(
            SubsetLinks(
                gpus=runs.gpus,
                key=runs.key,
                strategy=runs.strategy,
                label=labels.label(study, runs),
                link_class=link_class_of(machine, runs),
                transport=transport,
                exchange_gb_per_s=busbw,
                p2p_gb_per_s=alone_gb_per_s,
                nominal_gb_per_s=nominal_gb_per_s,
                efficiency=point.efficiency.value if point and point.efficiency else None,
            )
        )
        cells.append(runs)
    for index, sentence in _outstanding(study, subsets, cells).items():
        subsets[index] = replace(subsets[index], stands_out=sentence)
    return tuple(subsets)


def _outstanding(
    study: Study, subsets: Sequence[SubsetLinks], cells: Sequence[Runs]
) -> dict[int, str]:
    """Return a sentence for every subset that differs from the median of its class by more than
    noise explains, by its index.

    Subsets are compared in exchange bandwidth and in images per second. All tests of both are one
    family.
    """
    families = []
    for metric, verb in ((BUSBW, "exchanges"), (IMAGES_PER_SECOND, "trains")):
        deviation, freedom = between_runs(cells, metric)
        classes: dict[Hashable, list[tuple[int, float, int]]] = defaultdict(list)
        for index, (subset, runs) in enumerate(zip(subsets, cells, strict=True)):
            values = runs.logarithms(metric)
            if values and freedom:
                condition = study.condition(runs, (), len(subset.gpus), subset.link_class)
                classes[condition].append((index, sum(values) / len(values), len(values)))
        for members in classes.values():
            if len(members) >= FEWEST_MEMBERS:
                families.append((verb, deviation, freedom, members))
    level = 1 - (1 - LEVEL) / max(1, sum(len(members) for *_, members in families))
    sentences: dict[int, str] = {}
    for verb, deviation, freedom, members in families:
        usual = median(value for _, value, _ in members)
        runs_of_class = sum(count for _, _, count in members)
        for index, value, count in members:
            error = deviation * math.sqrt(1 / count + MEDIAN**2 / runs_of_class)
            if index in sentences or abs(value - usual) <= quantile(freedom, level) * error:
                continue
            subset, share = subsets[index], math.expm1(value - usual)
            word = "slower" if share < 0 else "faster"
            links = f" with {subset.link_class}" if subset.link_class else ""
            sentences[index] = (
                f"{gpu_list(subset.gpus)} {verb} {100 * abs(share):.1f} % {word} than the median of the "
                f"{len(members)} subsets of {len(subset.gpus)}{links}, more than noise explains"
            )
    return sentences


def link_values(study: Study, machines: Mapping[str, MachineLinks]) -> tuple[LinkValue, ...]:
    """Return what each link class costs against the best one of the study, for each strategy and
    number of GPUs.
    """
    conditions: dict[Condition, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for runs in study.timed:
        if runs.world_size > 1:
            link_class = link_class_of(machines[runs.machine], runs)
            if link_class is not None and is_known(link_class):
                conditions[study.condition(runs, (), runs.world_size)][link_class].append(runs)
    values = []
    for classes in conditions.values():
        best, *worse = best_first(classes)
        for link_class in worse:
            first = classes[link_class][0]
            name = f"{labels.label(study, first)} · {first.world_size} GPUs, {best} against {link_class}"
            values.append(
                LinkValue(
                    first.key,
                    first.strategy,
                    name,
                    link_class,
                    _lost(classes[best], classes[link_class]),
                    first.records[0].model.get("gradient_bytes"),
                    first.batch_size,
                )
            )
    return tuple(values)


def _lost(better: Sequence[Runs], worse: Sequence[Runs]) -> Estimate:
    more, more_draws = _mean_rate(better)
    less, less_draws = _mean_rate(worse)
    if more_draws is None or less_draws is None:
        return estimate(more - less, None)
    return estimate(more - less, more_draws - less_draws)


def _mean_rate(members: Sequence[Runs]) -> tuple[float, Draws | None]:
    rates = [runs.log_rate for runs in members if runs.log_rate is not None]
    size = members[0].world_size
    value = fmean(math.exp(rate.value) for rate in rates) / size
    drawn = [rate.draws[MEASURED] for rate in rates if rate.draws is not None]
    return value, np.exp(drawn).mean(axis=0) / size if len(drawn) == len(rates) else None
