"""Curves of efficiency against one-GPU baselines (analysis.findings.baselines) with intervals, and the laws that fit them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.findings.baselines import (
    DIFFER,
    Baselines,
    clock_ratio,
    efficiency,
    follows_from_gpus,
    is_irrelevant_alone,
    log_slowest,
)
from analysis.findings.control_cells import WITHOUT
from analysis.study import names as labels
from analysis.study import provenance
from analysis.study.draws import Draws, Sample, exponential, freedom, next_run, scaled
from analysis.study.estimates import Curve, Estimate, Member, Point, Scaling, ScalingLaw
from analysis.study.intervals import of_median
from analysis.study.names import gpu_list, several, worded
from analysis.study.study import Runs, Study
from conf.cell import counted

# A law is fitted where the curve has this many different numbers of GPUs, one GPU counted. Both laws go through N = 1; with
# as many parameters as other points, any points would fit.
FEWEST = {"amdahl": 3, "usl": 4}
NAMES = ("model.name", "strategy.name", "benchmark.name")


def curves(study: Study) -> Scaling:
    """Return a curve for every set of points with equal conditions."""
    baselines = Baselines(study)
    by_condition: dict[tuple[str | None, ...], list[Runs]] = defaultdict(list)
    for runs in study.timed:
        by_condition[study.condition(runs, follows_from_gpus(runs))].append(runs)
    found = []
    without: dict[str, list[str]] = defaultdict(list)
    partly: list[str] = []
    for members in by_condition.values():
        follows = follows_from_gpus(members[0])
        label = labels.label(study, members[0], follows)
        points = tuple(point(runs, baselines) for runs in sorted(members, key=_by_size))
        spoken = (
            f"strategy {label}" if label.split(" ")[0] == WITHOUT else label
        )  # "none on gpus 0,1" is a riddle
        settings = len(study.distinguishing(members[0], follows))
        details = tuple(labels.parts(study, members[0], (*follows, *NAMES)))
        found.append(
            Curve(
                label,
                "strong" if members[0].strong else "weak",
                points,
                fits(points),
                settings,
                details,
            )
        )
        together = [one for one in points if one.world_size > 1]
        bare = [one.gpus for one in together if one.efficiency is None]
        if bare:
            without[_difference(study, bare[0], members[0])] += [
                f"{spoken} on {gpu_list(gpus)}" for gpus in bare
            ]
        partly += [
            f"{spoken} on {gpu_list(one.gpus)}"
            for one in together
            if one.efficiency and one.without_baseline
        ]
    refusals = [f"{several(cells)}: no efficiency, because {why}" for why, cells in without.items()]
    if partly:
        refusals.append(
            f"{several(partly)}: not every member was measured alone, and the others may be slower"
        )
    if len({curve.kind for curve in found}) > 1:
        refusals.append(
            "weak scaling (batch_size) and strong scaling (global_batch_size) are not compared"
        )
    return Scaling(tuple(found), (*refusals, *incomparable(study)))


def _by_size(runs: Runs) -> tuple[int, list[tuple[bool, Member]]]:
    """Return a sort key: the number of GPUs, then their ids; those of hosts behind those of one machine."""
    return runs.world_size, [(isinstance(gpu, str), gpu) for gpu in runs.gpus]


def point(runs: Runs, baselines: Baselines) -> Point:
    """Return one subset against the slowest of its members that ran alone."""
    assert runs.log_rate is not None
    size, members = runs.world_size, baselines.of(runs)
    made = Point(
        runs.gpus,
        runs.key,
        exponential(runs.log_rate.next_run()),
        runs.log_rate.runs,
        runs.batch_size,
        suspect=runs.suspect,
        record_ids=tuple(record.record_id for record in runs.records),
        without_baseline=tuple(gpu for gpu in runs.gpus if gpu not in members) if size > 1 else (),
    )
    made = replace(made, node_efficiency=_of_hosts(runs, baselines))
    found = log_speedup(runs, baselines)
    if found is None:
        return made
    speedup = exponential(next_run(found.value, found.draws, found.freedom))
    value = efficiency(found.rate.value, found.slowest, runs.cell, found.alone)
    return replace(
        made,
        baseline=exponential(
            next_run(found.slowest, found.slowest_draws, freedom(found.alone.values()))
        ),
        slowest=min(found.alone, key=lambda gpu: found.alone[gpu].value),
        speedup=speedup,
        efficiency=replace(scaled(speedup, 1 / size), value=value),
        clock_ratio=clock_ratio(runs, members.values()),
    )


def _of_hosts(runs: Runs, baselines: Baselines) -> Estimate | None:
    """Return rate ÷ (hosts × slowest host alone) of a cell on several hosts; None where one was not measured alone."""
    hosts = baselines.of_hosts(runs)
    found = _log_speedup(runs, hosts, baselines.noise(runs))
    return (
        scaled(exponential(next_run(found.value, found.draws, found.freedom)), 1 / len(hosts))
        if found
        else None
    )


@dataclass(frozen=True)
class LogSpeedup:
    """The logarithm of a subset's rate over that of its slowest member alone, or of its slowest host alone."""

    rate: Sample
    alone: Mapping[Member, Sample]  # of the members, or hosts, that were measured alone
    slowest: float  # the logarithm of the slowest of them
    slowest_draws: Draws | None  # (2, DRAWS); None where the scatter is not known

    @property
    def value(self) -> float:
        """The logarithm of the speed-up."""
        return self.rate.value - self.slowest

    @property
    def draws(self) -> Draws | None:
        """Draws of it, (2, DRAWS); None where the scatter is not known."""
        known = self.rate.draws is not None and self.slowest_draws is not None
        return self.rate.draws - self.slowest_draws if known else None  # type: ignore[operator]

    @property
    def freedom(self) -> float:
        """The degrees of freedom of its draws."""
        return freedom([self.rate, *self.alone.values()])


def log_speedup(runs: Runs, baselines: Baselines) -> LogSpeedup | None:
    """Return the speed-up of a subset; None for one GPU, and where no member was measured alone."""
    members = baselines.of(runs) if runs.world_size > 1 else {}
    return _log_speedup(runs, members, baselines.noise(runs))


def _log_speedup(
    runs: Runs, members: Mapping[Member, Runs], noise: float | None
) -> LogSpeedup | None:
    alone = {member: one.log_rate for member, one in members.items() if one.log_rate is not None}
    if runs.log_rate is None or not alone:
        return None
    draws = _draws_of_slowest(list(alone.values()), noise)
    return LogSpeedup(runs.log_rate, alone, log_slowest(members, noise), draws)


def _draws_of_slowest(members: Sequence[Sample], noise: float | None) -> Draws | None:
    """Return draws of `log_slowest`; None where the scatter of a member is not known."""
    drawn = [member.draws for member in members if member.draws is not None]
    if len(drawn) < len(members):
        return None
    least: Draws = np.min(drawn, axis=0)
    if noise is None or len(drawn) == 1:
        return least
    of_rows = np.array([[1.0], [sum(of_median(member.runs) for member in members) / len(members)]])
    mean: Draws = np.mean(drawn, axis=0)
    with np.errstate(divide="ignore"):
        kept = np.sqrt(
            np.clip(1 - DIFFER * noise**2 * of_rows / np.var(drawn, axis=0, ddof=1), 0, 1)
        )
    found: Draws = mean + kept * (least - mean)
    return found


def fits(points: Sequence[Point]) -> tuple[ScalingLaw, ...]:
    """Return Amdahl's law and the universal scalability law (Gunther 1993), each where it has enough points (FEWEST).

    N ÷ speed-up − 1 is linear in both: serial · (N − 1), and contention · (N − 1) + coherency · N(N − 1). The fit is least
    squares with no parameter below 0.
    """
    from scipy.optimize import nnls  # takes as long to import as the rest of a small study's report

    known = np.array(
        [(one.world_size, one.speedup.value) for one in points if one.speedup], dtype=float
    ).reshape(-1, 2)
    size, speedup = known.T
    different = len({*size, 1.0})
    fitted = []
    for law, names in {"amdahl": ("serial",), "usl": ("contention", "coherency")}.items():
        if different < FEWEST[law]:
            continue
        terms = np.stack([size - 1, size * (size - 1)][: len(names)], axis=1)
        parameters, _ = nnls(terms, size / speedup - 1)
        predicted = size / (1 + terms @ parameters)
        error = float(np.max(np.abs(predicted / speedup - 1)))
        fitted.append(ScalingLaw(law, dict(zip(names, map(float, parameters), strict=True)), error))
    return tuple(fitted)


def _difference(study: Study, gpus: Sequence[Member], runs: Runs) -> str:
    """Return why a subset has no baseline: what the most similar cell on one of its GPUs differs in."""
    alone = [other for other in study.timed if other.world_size == 1]
    if not alone:
        return "no cell ran on one GPU (gpus=each adds that)"
    names = (*study.varied, *study.varied_provenance)

    def differing(other: Runs) -> list[str]:
        return [
            name
            for name in names
            if not is_irrelevant_alone(name, follows_from_gpus(runs))
            and runs.key.get(name) != other.key.get(name)
        ]

    nearest = min(alone, key=lambda other: (other.gpus[0] not in gpus, len(differing(other))))
    if nearest.gpus[0] not in gpus:
        return "none of their GPUs was measured alone"
    differences = [
        f"{_name(name)} ({_worded(study, nearest, name)}, not {_worded(study, runs, name)})"
        for name in differing(nearest)
    ]
    return (
        f"their cell on one GPU differs in {' and '.join(differences[:4]) or 'the kind of batch'}"
    )


def _name(name: str) -> str:
    return (
        "the kind of batch"
        if name == "global_batch_size"
        else name.removesuffix(".name").removeprefix("nccl.")
    )


def _worded(study: Study, runs: Runs, name: str) -> str:
    if name in study.varied_provenance:
        return provenance.worded(runs.provenance.get(name))
    value = runs.request.get(name)
    if name == "global_batch_size":
        return (
            "weak scaling"
            if value is None
            else f"{value} {counted(one.cell for one in study.records)} per step"
        )
    return "none" if value is None else worded(name, value)


def incomparable(study: Study) -> tuple[str, ...]:
    """Return a sentence for each way in which cells that were asked alike ran in other surroundings."""
    by_request: dict[tuple[Any, ...], list[Runs]] = defaultdict(list)
    for runs in study.runs:
        by_request[study.condition(runs, study.varied_provenance)].append(runs)
    counted: dict[tuple[str, ...], int] = defaultdict(int)
    for members in by_request.values():
        first = members[0].provenance
        for other in members[1:]:
            values = (
                (name, first.get(name), other.provenance.get(name))
                for name in study.varied_provenance
            )
            named = tuple(
                f"{name} ({provenance.worded(one)} and {provenance.worded(two)})"
                for name, one, two in values
                if one != two
            )
            if named:
                counted[named] += 1
    return tuple(
        f"{count} {'cell is' if count == 1 else 'cells are'} not compared with others that were asked alike: different "
        f"{' and '.join(differences)}"
        for differences, count in counted.items()
    )
