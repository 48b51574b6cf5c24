"""Checks of values against limits: clocks, noise, iterations, the reference, the baseline, the steps.

Each judge returns None for a record that passes. benchmarks.training.derive finds the facts of
the steps in the raw lines.
"""

import math

from analysis.findings.baselines import BASELINES, EFFICIENCY, NOISE
from analysis.findings.communication import COST
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.study.intervals import of_median
from analysis.study.names import unit
from analysis.validity.check import (
    CheckResult,
    ValueLimit,
    not_applicable,
    unchecked,
    unless_cpu,
    unless_training,
)
from benchmarks.record import Record
from benchmarks.record.metrics import interval
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.schema import ValidityLimits

RATE = "throughput/images_per_second"
MOST_EFFICIENCY = 1.02  # where the scatter between runs is not known
# Where it is known: so many standard deviations of the ratio of two rates above 1, and at least
# this.
MOST_DEVIATIONS, LEAST_MOST_EFFICIENCY = 3.0, 1.005
# An exchange may find data in a cache where its reference does not.
EXPECTED_OF_REFERENCE = 1.05
# Times its reference above which an exchange was hardly awaited; METHOD.md says why less is
# possible.
MOST_OF_REFERENCE = 1.2
# Of a window that samples may leave out; on H200s they leave out 5·10⁻⁷ at most.
MOST_UNACCOUNTED = 1e-3
MOST_ROUNDED = 1e-6  # relative error that floats may leave in images ÷ seconds
MOST_OF_DATA = 0.02  # share of a step that a loader may cost before it is said to limit the rate
OF_NOISE = 2.0  # a slow rank is slower by this many half-widths of the 95 % interval
# CPU workers share their cores with the system: their steps may change and pause by so much more.
CPU_SHARE = 3.0
# Share of a step, and ms, that a CPU worker may spend between steps: what lies there is in no
# sample.
MOST_BETWEEN, MOST_BETWEEN_MS = 0.02, 0.1


def _no_clock(record: Record) -> CheckResult:
    if record.cell.device != "cuda":
        return not_applicable("a CPU worker has one clock")
    return unless_training(record, "no window was timed")


def _clock_disagreement(record: Record) -> float | None:
    if record.cell.device != "cuda":
        return None
    return record.checks.get("clock_disagreement")


clocks_disagree = ValueLimit(
    _clock_disagreement, lambda _, limits: limits.clock_limit, missing=_no_clock
)


def _half_width(record: Record) -> float | None:
    value = record.checks.get("half_width")
    if value is None or not math.isfinite(value):
        return None
    return float(value)


noisy = ValueLimit(
    _half_width,
    lambda _, limits: limits.noise_limit,
    missing=lambda record: unless_training(record, "too few steps for an interval"),
    detail=lambda _, value, most: f"±{100 * value:.1f} %, allowed ±{100 * most:.1f} %",
)


def _no_idle_share(record: Record) -> CheckResult:
    why = "the idle share of the GPU was not measured"
    if record.cell.device == "cuda":
        return unless_training(record, why)
    return unless_cpu(record, why)


def _idle_detail(record: Record, share: float, most: float) -> str:
    graph = {"compile": "compile_graph", "max": "max_graph"}.get(record.cell.optimize, "graph")
    detail = f"{100 * share:.0f} % of a step, allowed {100 * most:.0f} %"
    if _could_be_a_graph(record.cell):
        detail += f"; optimize={graph} launches each step at once"
    return detail


def _could_be_a_graph(cell: Cell) -> bool:
    """Tell whether the step of a cell that is none could be one CUDA graph."""
    if cell.graphed or cell.precision == "fp16":
        return False
    try:
        strategy = groups.choice("strategy", cell.strategy["name"])
    except Refused:  # of the user's own, which is not here
        return False
    return not strategy.why_no_graph(cell.strategy)


cpu_bound = ValueLimit(
    lambda record: record.metrics.get("gpu/idle_share"),
    lambda _, limits: limits.idle_limit,
    missing=_no_idle_share,
    detail=_idle_detail,
)

samples_do_not_fill_window = ValueLimit(
    lambda record: record.checks.get("unaccounted_share"),
    lambda record, limits: MOST_UNACCOUNTED,
    missing=unless_training,
    detail=lambda _, value, most: f"{100 * value:.1f} % of it differs, allowed {100 * most:.1f} %",
)


def _no_reference(record: Record) -> CheckResult:
    if "comm/exchange_ms" not in record.metrics:
        return not_applicable("no exchange was timed")
    if not record.cell.benchmark.get("limit_iterations", 1):
        return not_applicable("benchmark.limit_iterations=0: no reference was asked for")
    return unchecked("no reference was measured")


def _reference_detail(record: Record, ratio: float, _: float) -> str:
    return f"{ratio:.2f} times as fast as its reference {record.checks.get('reference')}"


faster_than_reference = ValueLimit(
    lambda record: record.metrics.get("comm/ideal_ratio"),
    lambda record, limits: MOST_OF_REFERENCE,
    missing=_no_reference,
    detail=_reference_detail,
)


def reference_exceeded(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchange was faster than its reference."""
    ratio = record.metrics.get("comm/ideal_ratio")
    # above MOST_OF_REFERENCE it is faster_than_reference
    if ratio is None or not EXPECTED_OF_REFERENCE < ratio <= MOST_OF_REFERENCE:
        return None
    return CheckResult(f"{record.checks.get('reference')}, {100 * ratio:.0f} %")


def _lost_share(record: Record) -> float | None:
    if "pauses" not in record.checks:
        return None
    return float(record.checks["pauses"]["lost_share"])


def _pauses_detail(record: Record, lost: float, most: float) -> str:
    facts, steps = record.checks["pauses"], record.checks["iterations"]
    return (
        f"{facts['count']:.0f} of {steps} steps, up to {facts['longest_ms']:.4g} ms; "
        f"they lost {100 * lost:.2f} % of the time, allowed {100 * most:.2f} %"
    )


def _of_device(record: Record, share: float) -> float:
    """Return the share that is allowed on the device of a record."""
    if record.cell.device == "cpu":
        return CPU_SHARE * share
    return share


pauses = ValueLimit(
    _lost_share,
    lambda record, limits: _of_device(record, limits.pause_limit),
    missing=unless_training,
    detail=_pauses_detail,
)


def not_stationary(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether the step time changed while it was measured, by more than noise explains."""
    facts = record.checks.get("stationarity")
    if facts is None:
        return unless_training(record)
    if not facts:
        return unchecked("too few steps were timed")
    allowed = _of_device(record, limits.change_limit)
    changes = []
    if abs(facts["change"]) > allowed and facts["change_beyond"] > 1:
        share, step = 100 * facts["change"], facts["change_at"]
        changes.append(f"it changed by {share:+.1f} % at iteration {step:.0f}")
    if abs(facts["drift"]) > allowed and facts["drift_beyond"] > 1:
        share = 100 * facts["drift"]
        changes.append(f"it drifted by {share:+.1f} % from the first to the last iteration")
    if not changes:
        return None
    return CheckResult(f"{' and '.join(changes)}, allowed {100 * allowed:.1f} %")


def slow_rank(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether one rank computes slower than the rest, by its own steps without exchange."""
    facts = record.checks.get("slowest_rank")
    if facts is None:
        if not record.cell.benchmark.get("exposed_rounds", 1):
            return not_applicable(
                "benchmark.exposed_rounds=0: no steps without exchange were asked for"
            )
        if record.cell.world_size == 1:
            return not_applicable("there is only one rank")
        if COST in record.metrics:
            return unless_training(record)
        why = "no steps without exchange were timed: the strategy has no exchange alone"
        return unless_training(record, why)
    share, noise, allowed = facts["share"], facts["noise"], limits.slow_rank_limit
    if not share > allowed:
        return None
    if math.isnan(noise):
        return unchecked("one window does not show the noise")
    if share <= OF_NOISE * noise:
        return None
    percent = f"{100 * share:.1f} %, allowed {100 * allowed:.1f} %"
    return CheckResult(f"rank {facts['rank']} by {percent}")


def input_bound(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a data loader limits the rate."""
    if not record.cell.data:
        return None
    cost_ms = record.metrics.get("data/cost_ms")
    share = record.metrics.get("data/cost_share")
    wait_ms = record.metrics.get("data/wait_ms")
    ends = interval("data/cost_ms", record.within_run)
    if cost_ms is None or share is None or ends is None:
        return unless_training(record, "no steps without the loader were timed")
    if share <= MOST_OF_DATA or ends[0] <= 0:
        return None
    return CheckResult(
        f"it takes {100 * share:.1f} % of a step ({cost_ms:.3g} ms), because steps on batches that "
        f"are on the device already are so much shorter; allowed {100 * MOST_OF_DATA:.0f} %. "
        f"In each step the host waits {wait_ms:.3g} ms for data"
    )


def time_between_steps(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a CPU worker spent time between its steps, which is in no sample."""
    if record.cell.device == "cuda":
        return not_applicable("on GPUs clocks_disagree checks this")
    share = record.checks.get("between_steps_share")
    ms = record.checks.get("between_steps_ms")
    if share is None or ms is None:
        return unless_training(record)
    if abs(share) <= MOST_BETWEEN or abs(ms) <= MOST_BETWEEN_MS:
        return None
    return CheckResult(f"{100 * share:.1f} %, {ms:.2g} ms a step")


def unexplained(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the step and its interval lie outside the interval that was forecast before."""
    if not record.predicted:
        return None
    forecast = recorded_forecast(record)
    if forecast is None:
        return not_applicable("there was no forecast of the step")
    if not forecast.in_time:
        return unchecked("the forecast was not written before the cell began")
    if forecast.inside is None:
        if record.cell.world_size == 1 or record.cell.strategy["name"] == "none":
            device = unit(record.cell.device)
            return not_applicable(
                f"no error was claimed: cells of one {device}, or without an exchange, are not "
                "held out"
            )
        return not_applicable("no error was claimed: too few cells of this kind could be held out")
    if not forecast.unexplained:
        return None
    return CheckResult(forecast.missed)


def rate_inconsistent(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether images/s is images ÷ seconds, and the rate per GPU its share."""
    rate = record.metrics.get(RATE)
    per_gpu = record.metrics.get("throughput/images_per_second_per_gpu")
    images = record.metrics.get("throughput/images")
    seconds = record.metrics.get("throughput/seconds")
    if rate is None or images is None or seconds is None:
        return unless_training(record, "the images or the seconds are missing")
    inputs = record.cell.model.inputs
    if not abs(rate * seconds - images) <= MOST_ROUNDED * images:
        return CheckResult(f"{rate:.6g} {inputs}/s, but {images:.0f} {inputs} in {seconds:.6g} s")
    ranks = record.cell.world_size
    if per_gpu is not None and not abs(per_gpu * ranks - rate) <= MOST_ROUNDED * rate:
        device = unit(record.cell.device)
        return CheckResult(
            f"{rate:.6g} {inputs}/s of {ranks} {device}s, but {per_gpu:.6g} per {device}"
        )
    return None


def too_few_iterations(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether fewer iterations were measured than requested."""
    done = record.checks.get("iterations")
    wanted = record.cell.benchmark.get("min_iterations")
    if done is None or wanted is None:
        return unless_training(record, "the ranks counted no steps")
    if done >= wanted:
        return None
    return CheckResult(f"{done}, at least {wanted} requested")


def warmup_not_flat(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the step time was still falling at the end of the warm-up."""
    if "warmup_flat" not in record.checks:
        return unless_training(record, "no warm-up was measured")
    if record.checks["warmup_flat"]:
        return None
    return CheckResult("")


def efficiency_above_one(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the efficiency is too high for a fair baseline: disturbed, or of another kind."""
    share = record.metrics.get(EFFICIENCY)
    if record.cell.world_size == 1:
        return None  # a baseline is not compared with itself
    if share is None:
        return not_applicable("no efficiency is stated: there is no baseline")
    most = _most_efficiency(record)
    if share <= most:
        return None
    return CheckResult(f"{100 * share:.1f} %, and noise explains at most {100 * most:.1f} %")


def _most_efficiency(record: Record) -> float:
    """Return what noise explains, by the scatter between runs, or else by the cell's interval."""
    noise, baselines = record.checks.get(NOISE), record.checks.get(BASELINES)
    if noise is not None and baselines:
        runs = min(len(ids) for ids in baselines.values())
        deviation = noise * math.sqrt(1 + of_median(max(1, runs)))
        return max(LEAST_MOST_EFFICIENCY, math.exp(MOST_DEVIATIONS * deviation))
    rate, ends = record.metrics.get(RATE), interval(RATE, record.within_run)
    if rate and ends and ends[0] > 0:
        return MOST_EFFICIENCY * rate / ends[0]
    return MOST_EFFICIENCY
