"""Checks of the conditions of a measurement: timers, noise, iterations, reference, baseline.

Each function returns None for a record that passes.
"""

import math

from analysis.findings.baselines import BASELINES, EFFICIENCY, NOISE
from analysis.study.intervals import of_median
from analysis.validity.as_asked import MOST_OF_REFERENCE
from analysis.validity.check import CheckResult, not_applicable, unless_cpu, unless_training
from benchmarks.record import Record
from benchmarks.record.metrics import interval
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.schema import ValidityLimits

RATE = "throughput/images_per_second"
MOST_EFFICIENCY = 1.02  # where the scatter between runs is not known
# Where it is known: so many standard deviations of the ratio of two rates above 1, and at least this.
MOST_DEVIATIONS, LEAST_MOST_EFFICIENCY = 3.0, 1.005
EXPECTED_OF_REFERENCE = 1.05  # an exchange may find data in a cache where its reference does not


def clocks_disagree(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether the GPU's clock and the host's clock measure a window differently."""
    if record.cell.device != "cuda":
        return not_applicable("a CPU worker has one clock")
    value = record.checks.get("clock_disagreement")
    if value is None:
        return unless_training(record, "no window was timed")
    return (
        CheckResult(f"{100 * float(value):.1f} %, allowed {100 * limits.clock_limit:.1f} %")
        if not value <= limits.clock_limit
        else None
    )


def noisy(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether the confidence interval of the rate is too wide."""
    value = record.checks.get("half_width")
    if value is None or not math.isfinite(float(value)):
        return unless_training(record, "too few steps for an interval")
    return (
        CheckResult(f"±{100 * float(value):.1f} %, allowed ±{100 * limits.noise_limit:.1f} %")
        if value > limits.noise_limit
        else None
    )


def cpu_bound(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether the GPU waits for the CPU to launch work."""
    share = record.metrics.get("gpu/idle_share")
    if share is None:
        why = "the idle share of the GPU was not measured"
        return (
            unless_training(record, why)
            if record.cell.device == "cuda"
            else unless_cpu(record, why)
        )
    if share <= limits.idle_limit:
        return None
    graph = {"compile": "compile_graph", "max": "max_graph"}.get(record.cell.optimize, "graph")
    way_out = (
        f"; optimize={graph} launches each step at once" if _could_be_a_graph(record.cell) else ""
    )
    return CheckResult(
        f"{100 * share:.0f} % of a step, allowed {100 * limits.idle_limit:.0f} %{way_out}"
    )


def _could_be_a_graph(cell: Cell) -> bool:
    """Tell whether the step of a cell that is none could be one CUDA graph."""
    try:
        strategy = groups.choice("strategy", cell.strategy["name"])
    except Refused:  # somebody's own, which is not here
        return False
    return (
        not cell.graphed and cell.precision != "fp16" and not strategy.why_no_graph(cell.strategy)
    )


def too_few_iterations(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether fewer iterations were measured than requested."""
    done, wanted = record.checks.get("iterations"), record.cell.benchmark.get("min_iterations")
    if done is None or wanted is None:
        return unless_training(record, "the ranks counted no steps")
    return CheckResult(f"{done}, at least {wanted} requested") if done < wanted else None


def reference_exceeded(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchange was faster than its reference."""
    share = record.metrics.get("comm/ideal_ratio")
    if (
        share is None or not EXPECTED_OF_REFERENCE < share <= MOST_OF_REFERENCE
    ):  # above it: faster_than_reference
        return None
    return CheckResult(f"{record.checks.get('reference')}, {100 * share:.0f} %")


def warmup_not_flat(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the step time was still falling at the end of the warm-up."""
    if "warmup_flat" not in record.checks:
        return unless_training(record, "no warm-up was measured")
    return None if record.checks["warmup_flat"] else CheckResult("")


def efficiency_above_one(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the efficiency is too high for a fair baseline: chosen badly, disturbed, or of another kind."""
    share = record.metrics.get(EFFICIENCY)
    if record.cell.world_size == 1:
        return None  # a baseline is not compared with itself
    if share is None:
        return not_applicable("no efficiency is stated: there is no baseline")
    most = _most(record)
    return (
        CheckResult(f"{100 * share:.1f} %, and noise explains at most {100 * most:.1f} %")
        if share > most
        else None
    )


def _most(record: Record) -> float:
    """Return the efficiency that noise explains, by the scatter between runs; without it, by the cell's own interval."""
    noise, ids = record.checks.get(NOISE), record.checks.get(BASELINES)
    if isinstance(noise, float) and isinstance(ids, dict) and ids:
        runs = min(len(of_gpu) for of_gpu in ids.values())
        return max(
            LEAST_MOST_EFFICIENCY,
            math.exp(MOST_DEVIATIONS * noise * math.sqrt(1 + of_median(max(1, runs)))),
        )
    rate, ends = record.metrics.get(RATE), interval(RATE, record.within_run)
    return MOST_EFFICIENCY * (rate / ends[0] if rate and ends and ends[0] > 0 else 1.0)
