"""Scaling: curves of efficiency against one-GPU baselines (findings.baselines), with intervals, and the laws that fit them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from analysis.findings.baselines import no_matter
from analysis.findings.estimates import Draws, Sample, estimate, exponential
from analysis.findings.model import Curve, Estimate, Fit, Point, Scaling
from analysis.findings.provenance import SURROUNDINGS
from analysis.findings.runs import Gathered, Runs, gather, gpu_list, merged, several, shown
from benchmarks.record import Record

# A law is fitted where the curve has this many different numbers of GPUs, one GPU counted: each has a parameter less than
# there are points beside N = 1, through which both go anyway. Otherwise any points would fit.
FEWEST = {"amdahl": 3, "usl": 4}


def scaling(records: Iterable[Record]) -> Scaling:
    """Every curve of a study's records."""
    return curves(gather(records))


class Alone:
    """The runs on one GPU of a study, found by what they must share with others."""

    def __init__(self, study: Gathered) -> None:
        """Sort them by their condition; runs of cells that one GPU cannot tell apart are runs of one baseline."""
        self._study = study
        together: dict[tuple[Any, ...], dict[int, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        for runs in study.timed:
            if runs.world_size == 1:
                together[self._condition(runs)][runs.gpus[0]].append(runs)
        self._known = {key: {gpu: merged(one) for gpu, one in members.items()} for key, members in together.items()}

    def _condition(self, runs: Runs) -> tuple[Any, ...]:
        names = [name for name in self._study.varied if no_matter(name, _follows(runs))]
        return self._study.condition(runs, names)

    def baselines(self, runs: Runs) -> dict[int, Sample]:
        """The rates of the members of a subset alone, those that were measured."""
        known = self._known.get(self._condition(runs), {})
        return {gpu: rate for gpu in runs.gpus if gpu in known and (rate := known[gpu].rate) is not None}


def _follows(runs: Runs) -> tuple[str, ...]:
    """What differs between the points of one curve because the GPUs do: in strong scaling the images per rank too."""
    return ("server_gpus", "batch_size") if runs.strong else ("server_gpus",)


def curves(study: Gathered) -> Scaling:
    """Points with equal conditions, one curve for each."""
    alone = Alone(study)
    by_curve: dict[tuple[str | None, ...], list[Runs]] = defaultdict(list)
    for runs in study.timed:
        by_curve[study.condition(runs, _follows(runs))].append(runs)
    found = []
    without: dict[str, list[str]] = defaultdict(list)
    partly: list[str] = []
    for members in by_curve.values():
        label = study.label(members[0], _follows(members[0]))
        points = tuple(point(runs, alone.baselines(runs)) for runs in sorted(members, key=lambda runs: runs.world_size))
        found.append(Curve(label, "strong" if members[0].strong else "weak", points, fits(points)))
        together = [one for one in points if one.world_size > 1]
        bare = [one.gpus for one in together if one.efficiency is None]
        if bare:
            without[_difference(study, bare[0], members[0])] += [f"{label} on {gpu_list(gpus)}" for gpus in bare]
        partly += [f"{label} on {gpu_list(one.gpus)}" for one in together if one.efficiency and one.without_baseline]
    refusals = [f"no efficiency of {several(cells)}: {why}" for why, cells in without.items()]
    if partly:
        refusals.append(
            f"efficiency of {several(partly)}: some of the members were not measured alone and may be slower"
        )
    if len({curve.kind for curve in found}) > 1:
        refusals.append("weak scaling (batch_size) and strong scaling (global_batch_size) are not compared")
    return Scaling(tuple(found), (*refusals, *incomparable(study)))


def point(runs: Runs, members: Mapping[int, Sample]) -> Point:
    """One subset against its slowest member."""
    assert runs.rate is not None
    rate, size, ends = runs.rate, runs.world_size, runs.rate.interval()
    made = Point(
        runs.gpus,
        exponential(Estimate(rate.value, *ends) if ends else Estimate(rate.value)),
        rate.runs,
        runs.batch_size,
        suspect=runs.suspect,
        record_ids=tuple(record.record_id for record in runs.records),
        without_baseline=tuple(gpu for gpu in runs.gpus if gpu not in members) if size > 1 else (),
    )
    if size == 1 or not members:
        return made
    value, draws = slowest_of(members.values())
    drawn = rate.draws - draws if rate.draws is not None and draws is not None else None
    speedup = exponential(estimate(rate.value - value, drawn))
    return replace(
        made,
        baseline=exponential(estimate(value, draws)),
        slowest=min(members, key=lambda gpu: members[gpu].value),
        speedup=speedup,
        efficiency=scaled(speedup, 1 / size),
    )


def slowest_of(members: Iterable[Sample]) -> tuple[float, Draws | None]:
    """The logarithm of the slowest rate, and draws of it; without where one member's scatter is not known."""
    listed = list(members)
    value = min(member.value for member in listed)
    drawn = [member.draws for member in listed if member.draws is not None]
    return value, np.min(drawn, axis=0) if len(drawn) == len(listed) else None


def scaled(value: Estimate, factor: float) -> Estimate:
    """An estimate times a positive number."""
    ends = (None if end is None else end * factor for end in (value.low, value.high))
    return Estimate(value.value * factor, *ends)


def fits(points: Sequence[Point]) -> tuple[Fit, ...]:
    """Amdahl's law and the universal scalability law (Gunther 1993), where there are points for them (FEWEST).

    N ÷ speed-up − 1 is linear in both: serial · (N − 1), and contention · (N − 1) + coherency · N(N − 1). Least squares
    there, with no parameter below 0.
    """
    known = np.array([(one.world_size, one.speedup.value) for one in points if one.speedup], dtype=float).reshape(-1, 2)
    size, speedup = known.T
    different = len({*size, 1.0})
    found = []
    for law, names in {"amdahl": ("serial",), "usl": ("contention", "coherency")}.items():
        if different < FEWEST[law]:
            continue
        terms = np.stack([size - 1, size * (size - 1)][: len(names)], axis=1)
        parameters, _ = nnls(terms, size / speedup - 1)
        predicted = size / (1 + terms @ parameters)
        error = float(np.max(np.abs(predicted / speedup - 1)))
        found.append(Fit(law, dict(zip(names, map(float, parameters), strict=True)), error))
    return tuple(found)


def _difference(study: Gathered, gpus: Sequence[int], runs: Runs) -> str:
    """Why a subset has no baseline: what the most similar cell on one of its GPUs differs in."""
    alone = [other for other in study.timed if other.world_size == 1]
    if not alone:
        return "no valid cell ran on one GPU"
    names = (*study.varied, *SURROUNDINGS)

    def differing(other: Runs) -> list[str]:
        return [name for name in names if not no_matter(name, _follows(runs)) and _of(runs, name) != _of(other, name)]

    nearest = min(alone, key=lambda other: (other.gpus[0] not in gpus, len(differing(other))))
    if nearest.gpus[0] not in gpus:
        return "none of their GPUs was measured alone"
    told = [f"{_name(name)} ({_told(nearest, name)}, not {_told(runs, name)})" for name in differing(nearest)]
    return f"the cell on one GPU differs in {' and '.join(told[:4]) or 'the kind of batch'}"


def _of(runs: Runs, name: str) -> str | None:
    return runs.around.get(name) if name in SURROUNDINGS else runs.asked.get(name)


def _name(name: str) -> str:
    return "the kind of batch" if name == "global_batch_size" else name.removesuffix(".name").removeprefix("nccl.")


def _told(runs: Runs, name: str) -> str:
    value = _of(runs, name)
    if name == "global_batch_size":
        return "weak scaling" if value is None else f"{value} images per step"
    return value or "not known" if name in SURROUNDINGS else "none" if value is None else shown(name, value)


def incomparable(study: Gathered) -> tuple[str, ...]:
    """A sentence for each way in which cells that were asked alike ran on another machine or with other software."""
    by_asked: dict[tuple[Any, ...], list[Runs]] = defaultdict(list)
    for runs in study.runs:
        by_asked[study.condition(runs, SURROUNDINGS)].append(runs)
    counted: dict[tuple[str, ...], int] = defaultdict(int)
    for members in by_asked.values():
        first = members[0]
        for other in members[1:]:
            names = [name for name in study.around if first.around[name] != other.around[name]]
            if names:
                told = (f"{name} ({first.around[name] or '?'} and {other.around[name] or '?'})" for name in names)
                counted[tuple(told)] += 1
    return tuple(
        f"{count} {'cell is' if count == 1 else 'cells are'} not compared with others that were asked alike: different "
        f"{' and '.join(told)}"
        for told, count in counted.items()
    )
