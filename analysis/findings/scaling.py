"""Curves of efficiency against baselines (analysis.findings.baselines), and the laws that fit."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.findings.baselines import (
    NOISE_MULTIPLE,
    WITHOUT,
    Baselines,
    clock_ratio,
    efficiency,
    log_slowest,
)
from analysis.study import names as labels
from analysis.study import provenance
from analysis.study.conditions import (
    IMAGES_PER_SECOND,
    irrelevant_to_baselines,
    irrelevant_to_curves,
    is_among,
)
from analysis.study.draws import Draws, Sample, exponential, freedom, next_run, scaled
from analysis.study.intervals import Estimate, of_median
from analysis.study.names import format_option, gpu_list, several
from analysis.study.runs import Key, Runs, grouped
from analysis.study.study import Study
from conf.cell import Member, counted

# A law is fitted where the curve has this many different numbers of GPUs, one GPU counted. Both
# laws go through N = 1; with as many parameters as other points, any points would fit.
FEWEST = {"amdahl": 3, "usl": 4}
NAMES = ("model.name", "strategy.name", "benchmark.name")
NOT_ALONE = ("no run on a single GPU", "none of its GPUs was measured alone")


@dataclass(frozen=True)
class ScalingLaw:
    """A law fitted to the points of a curve."""

    law: str  # amdahl or usl
    parameters: dict[str, float]  # shares
    error: float  # largest relative miss of a point


@dataclass(frozen=True)
class Point:
    """One subset of a curve: runs of equal cells that differ in their repeat alone."""

    gpus: tuple[Member, ...]
    key: Key
    rate: Estimate  # images per second, all GPUs
    runs: int
    batch_size: int  # images per rank and step
    baseline: Estimate | None = None  # images per second of the slowest member alone
    slowest: Member | None = None  # which GPU that is
    baseline_doubts: tuple[str, ...] = ()  # codes of checks that make its runs suspect
    speedup: Estimate | None = None  # over the slowest member alone
    efficiency: Estimate | None = None  # share of world_size times the slowest member
    node_efficiency: Estimate | None = None  # share of the hosts times the slowest host alone
    clock_ratio: float | None = None  # SM clock of the slowest member alone, of that of the subset
    suspect: bool = False
    record_ids: tuple[str, ...] = ()
    without_baseline: tuple[Member, ...] = ()  # not measured alone: one may be slower still

    @property
    def world_size(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    @property
    def at_equal_clocks(self) -> float | None:
        """The efficiency as if the subset had the SM clock of the slowest member alone."""
        if self.efficiency is None or self.clock_ratio is None:
            return None
        return self.efficiency.value * self.clock_ratio


@dataclass(frozen=True)
class Curve:
    """Points that differ in their GPUs alone."""

    label: str
    kind: str  # weak (images per GPU unchanged) or strong (images per step unchanged)
    points: tuple[Point, ...]  # by number of GPUs, then as listed
    fits: tuple[ScalingLaw, ...] = ()
    settings: int = 0  # number of options that tell it from the other curves
    details: tuple[str, ...] = ()  # parts of the label besides model, strategy and benchmark


@dataclass(frozen=True)
class Scaling:
    """Every curve of a study; `refusals`: {what was not compared and why: what measures it}."""

    curves: tuple[Curve, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)


def in_sentence(label: str) -> str:
    """Return a label as part of a sentence, where `none` alone would not name a strategy."""
    return f"strategy {label}" if label.split(" ")[0] == WITHOUT else label


def curves(study: Study) -> Scaling:
    """Return a curve for every set of points with equal conditions."""
    baselines = Baselines(study)
    curves = []
    without: dict[str, list[str]] = defaultdict(list)
    partly: list[str] = []
    conditions = grouped(
        study.timed, lambda runs: study.condition(runs, irrelevant_to_curves(runs.strong))
    )
    for members in conditions.values():
        curve = _curve(study, members, baselines)
        curves.append(curve)
        name = in_sentence(curve.label)
        for point in curve.points:
            if point.world_size > 1 and point.efficiency is None:
                why = _why_no_baseline(study, point.gpus, members[0])
                without[why].append(f"{name} on {gpu_list(point.gpus)}")
            elif point.world_size > 1 and point.without_baseline:
                partly.append(f"{name} on {gpu_list(point.gpus)}")
    refusals = {}
    for why, cells in without.items():
        option = "gpus=each" if why in NOT_ALONE else ""
        refusals[f"Efficiency of {several(cells)}: {why}"] = option
    if partly:
        why = "not every GPU was measured alone; the others may be slower"
        refusals[f"Efficiency of {several(partly)}: {why}"] = "gpus=each"
    if len({curve.kind for curve in curves}) > 1:
        why = "weak scaling (batch_size) and strong scaling (global_batch_size) are not compared"
        refusals[why] = ""
    return Scaling(tuple(curves), refusals | dict.fromkeys(_incomparable(study), ""))


def _curve(study: Study, members: Sequence[Runs], baselines: Baselines) -> Curve:
    def by_size(runs: Runs) -> tuple[int, list[tuple[bool, Member]]]:
        # Those of hosts behind those of one machine.
        return runs.cell.world_size, [(isinstance(gpu, str), gpu) for gpu in runs.gpus]

    first = members[0]
    irrelevant = irrelevant_to_curves(first.strong)
    points = tuple(_point(runs, baselines) for runs in sorted(members, key=by_size))
    return Curve(
        label=labels.label(study, first, irrelevant),
        kind="strong" if first.strong else "weak",
        points=points,
        fits=fits(points),
        settings=len(study.naming_options_of(first, irrelevant)),
        details=tuple(labels.parts(study, first, (*irrelevant, *NAMES))),
    )


def _point(runs: Runs, baselines: Baselines) -> Point:
    size, members = runs.cell.world_size, baselines.of_members(runs)
    hosts = baselines.of_hosts(runs)
    without_baseline: tuple[Member, ...] = ()
    if size > 1:
        without_baseline = tuple(gpu for gpu in runs.gpus if gpu not in members)
    node_efficiency = None
    over_hosts = _speedup_over(hosts, runs, baselines.noise(runs))
    if over_hosts is not None:
        node_efficiency = scaled(over_hosts.estimate(), 1 / len(hosts))
    rate = runs.next_run(IMAGES_PER_SECOND)
    assert rate is not None
    point = Point(
        runs.gpus,
        runs.key,
        rate,
        runs.log_rate.runs,
        runs.cell.batch_size,
        node_efficiency=node_efficiency,
        suspect=runs.suspect,
        record_ids=runs.record_ids,
        without_baseline=without_baseline,
    )
    over_members = log_speedup(runs, baselines)
    if over_members is None:
        return point
    alone, log_slowest_rate = over_members.alone, over_members.slowest
    baseline = next_run(log_slowest_rate, over_members.slowest_draws, freedom(alone.values()))
    speedup = over_members.estimate()
    share = efficiency(over_members.rate.value, log_slowest_rate, runs.cell, alone)
    slowest = min(alone, key=lambda gpu: alone[gpu].value)
    return replace(
        point,
        baseline=exponential(baseline),
        slowest=slowest,
        baseline_doubts=members[slowest].doubts,
        speedup=speedup,
        efficiency=replace(scaled(speedup, 1 / size), value=share),
        clock_ratio=clock_ratio(runs, members.values()),
    )


@dataclass(frozen=True)
class LogSpeedup:
    """The logarithm of a subset's rate over that of its slowest member, or host, alone."""

    rate: Sample
    alone: Mapping[Member, Sample]  # of the members, or hosts, that were measured alone
    slowest: float  # the logarithm of the slowest of them
    slowest_draws: Draws  # (2, DRAWS)

    @property
    def draws(self) -> Draws:
        """Draws of it, (2, DRAWS)."""
        return self.rate.draws - self.slowest_draws

    @property
    def freedom(self) -> float:
        """The degrees of freedom of its draws."""
        return freedom([self.rate, *self.alone.values()])

    def estimate(self) -> Estimate:
        """Return the speed-up with the interval of the next run."""
        return exponential(next_run(self.rate.value - self.slowest, self.draws, self.freedom))


def log_speedup(runs: Runs, baselines: Baselines) -> LogSpeedup | None:
    """Return the speed-up of a subset; None for one GPU, and where no member was measured alone."""
    if runs.cell.world_size == 1 or math.isnan(runs.median_log_rate):
        return None
    return _speedup_over(baselines.of_members(runs), runs, baselines.noise(runs))


def _speedup_over(
    members: Mapping[Member, Runs], runs: Runs, noise: float | None
) -> LogSpeedup | None:
    if not members:
        return None
    alone, rate_draws, factors_of_medians = {}, [], []
    for member, of_member in members.items():
        sample = of_member.log_rate
        alone[member] = sample
        rate_draws.append(sample.draws)
        factors_of_medians.append(of_median(sample.runs))
    draws: Draws = np.min(rate_draws, axis=0)
    if noise is not None and len(rate_draws) > 1:  # each draw is shrunk as `log_slowest` does
        factor = sum(factors_of_medians) / len(factors_of_medians)
        noise_variances = noise**2 * np.array([[1.0], [factor]])
        mean, variances = np.mean(rate_draws, axis=0), np.var(rate_draws, axis=0, ddof=1)
        with np.errstate(divide="ignore"):
            remaining = 1 - NOISE_MULTIPLE * noise_variances / variances
        draws = mean + np.sqrt(np.clip(remaining, 0, 1)) * (draws - mean)
    return LogSpeedup(runs.log_rate, alone, log_slowest(members, noise), draws)


def fits(points: Sequence[Point]) -> tuple[ScalingLaw, ...]:
    """Return Amdahl's law and the universal scalability law (Gunther 1993), where points suffice.

    N ÷ speed-up − 1 is linear in both: serial · (N − 1), and contention · (N − 1) + coherency · N(N
    − 1). The fit is least squares with no parameter below 0.
    """
    from scipy.optimize import nnls  # takes as long to import as the rest of a small study's report

    world_sizes, speedups = [], []
    for point in points:
        if point.speedup is not None:
            world_sizes.append(point.world_size)
            speedups.append(point.speedup.value)
    size, speedup = np.array(world_sizes, dtype=float), np.array(speedups, dtype=float)
    terms_of_usl = np.stack([size - 1, size * (size - 1)], axis=1)
    laws = []
    for law, names in {"amdahl": ("serial",), "usl": ("contention", "coherency")}.items():
        if len({*size, 1}) < FEWEST[law]:
            continue
        terms = terms_of_usl[:, : len(names)]  # Amdahl's law has the first
        parameters, _ = nnls(terms, size / speedup - 1)
        predicted = size / (1 + terms @ parameters)
        error = float(np.max(np.abs(predicted / speedup - 1)))
        laws.append(ScalingLaw(law, dict(zip(names, map(float, parameters), strict=True)), error))
    return tuple(laws)


def _why_no_baseline(study: Study, gpus: Sequence[Member], runs: Runs) -> str:
    irrelevant = irrelevant_to_baselines(runs.strong)
    nearest, differing = None, list[str]()
    alone = [baseline for baseline in study.timed if baseline.cell.world_size == 1]
    for baseline in alone:
        if baseline.gpus[0] not in gpus:
            continue
        names = []
        for name in (*study.varied, *study.varied_provenance):
            is_equal = runs.key.get(name) == baseline.key.get(name)
            if not is_equal and not is_among(name, irrelevant):
                names.append(name)
        if nearest is None or len(names) < len(differing):
            nearest, differing = baseline, names
    if not alone:
        return NOT_ALONE[0]
    if nearest is None:
        return NOT_ALONE[1]
    differences = []
    for name in differing[:4]:
        words = name.removesuffix(".name").removeprefix("nccl.")
        if name == "global_batch_size":
            words = "the kind of batch"
        alone_value, value = _value_words(study, nearest, name), _value_words(study, runs, name)
        differences.append(f"{words} ({alone_value}, not {value})")
    return f"its run on one GPU differs in {' and '.join(differences) or 'the kind of batch'}"


def _value_words(study: Study, runs: Runs, name: str) -> str:
    if name in study.varied_provenance:
        return provenance.worded(runs.provenance.get(name))
    value = runs.request.get(name)
    if name == "global_batch_size":
        if value is None:
            return "weak scaling"
        return f"{value} {counted(record.cell for record in study.records)} per step"
    return "none" if value is None else format_option(name, value)


def _incomparable(study: Study) -> list[str]:
    """Return a sentence for each way in which cells asked alike ran in other surroundings."""
    differences: Counter[str] = Counter()
    asked_alike = grouped(study.runs, lambda runs: study.condition(runs, study.varied_provenance))
    for first, *rest in asked_alike.values():
        for runs in rest:
            words = []
            for name in study.varied_provenance:
                values = first.provenance.get(name), runs.provenance.get(name)
                if values[0] != values[1]:
                    words.append(f"{name} ({' and '.join(map(provenance.worded, values))})")
            if words:
                differences[" and ".join(words)] += 1
    sentences = []
    for words_of_pair, cells in differences.items():
        subject = "run is" if cells == 1 else "runs are"
        sentences.append(
            f"{cells} {subject} not compared with equal requests: different {words_of_pair}"
        )
    return sentences
