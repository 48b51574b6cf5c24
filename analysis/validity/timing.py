"""Checks of the times of a cell: a step that changes, pauses, a slow rank, samples that do not fill their window, a rate that
is not images ÷ seconds. benchmarks.training.steadiness finds the facts in the raw lines.

Each function returns None for a record that passes.
"""

from collections.abc import Mapping
from typing import Any

from analysis.findings.communication import COST
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.study.names import unit
from analysis.validity.check import (
    NOT_REPORTED,
    CheckResult,
    not_applicable,
    unchecked,
    unless_training,
)
from benchmarks.record import Record
from benchmarks.record.metrics import interval
from conf.schema import ValidityLimits

# Of a window that samples may leave out; on H200s they leave out 5·10⁻⁷ at most.
MOST_UNACCOUNTED = 1e-3
MOST_ROUNDED = 1e-6  # relative error that floats may leave in images ÷ seconds
MOST_OF_DATA = 0.02  # share of a step that a loader may cost before it is said to limit the rate
OF_NOISE = 2.0  # a slow rank is slower by this many half-widths of the 95 % interval
CPU_SHARE = 3.0  # CPU workers share their cores with the system: their steps may change and pause by so many times more


def _allowed(record: Record, share: float) -> float:
    """Return the share that is allowed on the device of a record."""
    return CPU_SHARE * share if record.cell.device == "cpu" else share


def not_stationary(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether the step time changed while it was measured, by more than noise explains."""
    facts: Mapping[str, Any] | None = record.checks.get("stationarity")
    if not facts:
        return unless_training(record) if facts is None else unchecked("too few steps were timed")
    found, allowed = [], _allowed(record, limits.change_limit)
    if abs(facts["change"]) > allowed and facts["change_beyond"] > 1:
        found.append(
            f"it changed by {100 * facts['change']:+.1f} % at iteration {facts['change_at']:.0f}"
        )
    if abs(facts["drift"]) > allowed and facts["drift_beyond"] > 1:
        found.append(
            f"it drifted by {100 * facts['drift']:+.1f} % from the first to the last iteration"
        )
    return CheckResult(f"{' and '.join(found)}, allowed {100 * allowed:.1f} %") if found else None


def pauses(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether pauses made some steps much longer than the others."""
    facts: Mapping[str, Any] | None = record.checks.get("pauses")
    if facts is None:
        return unless_training(record)
    lost, allowed = facts["lost_share"], _allowed(record, limits.pause_limit)
    if lost <= allowed:
        return None
    steps = f"{facts['count']:.0f} of {record.checks['iterations']} steps, up to {facts['longest_ms']:.4g} ms"
    return CheckResult(
        f"{steps}; they lost {100 * lost:.2f} % of the time, allowed {100 * allowed:.2f} %"
    )


def slow_rank(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether one rank computes slower than the others, by its own steps without exchange."""
    facts: Mapping[str, Any] | None = record.checks.get("slowest_rank")
    if facts is None:
        alone = record.cell.world_size == 1
        if not record.cell.benchmark.get("exposed_rounds", 1):
            return not_applicable(
                "benchmark.exposed_rounds=0: no steps without exchange were asked for"
            )
        if alone:
            return not_applicable("there is only one rank")
        untimed = "no steps without exchange were timed: the strategy has no exchange alone"
        return unless_training(record, NOT_REPORTED if COST in record.metrics else untimed)
    share, noise = float(facts["share"]), float(facts["noise"])
    if not share > limits.slow_rank_limit:
        return None
    if noise != noise:
        return unchecked("one window does not show the noise")
    allowed = limits.slow_rank_limit
    return (
        CheckResult(f"rank {facts['rank']} by {100 * share:.1f} %, allowed {100 * allowed:.1f} %")
        if share > OF_NOISE * noise
        else None
    )


def input_bound(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a data loader limits the rate."""
    if not record.cell.data:
        return None
    cost_ms, share, wait_ms = (
        record.metrics.get(f"data/{name}") for name in ("cost_ms", "cost_share", "wait_ms")
    )
    ends = interval("data/cost_ms", record.within_run)
    if cost_ms is None or share is None or ends is None:
        return unless_training(record, "no steps without the loader were timed")
    if not (share > MOST_OF_DATA and ends[0] > 0):
        return None
    return CheckResult(
        f"it takes {100 * share:.1f} % of a step ({cost_ms:.3g} ms), because steps on batches that are on the device already "
        f"are so much shorter; allowed {100 * MOST_OF_DATA:.0f} %. In each step the host waits {wait_ms:.3g} ms for data"
    )


def samples_do_not_fill_window(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the samples of a window add up to its time."""
    share = record.checks.get("unaccounted_share")
    if share is None:
        return unless_training(record)
    if share <= MOST_UNACCOUNTED:
        return None
    return CheckResult(
        f"{100 * share:.1f} % of it differs, allowed {100 * MOST_UNACCOUNTED:.1f} %"
    )  # also NaN


def unexplained(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the step lies outside the interval that was forecast before the ranks started, and its own interval too."""
    if not record.predicted:
        return None
    said = recorded_forecast(record)
    if said is None:
        return not_applicable("there was no forecast of the step")
    if not said.in_time:
        return unchecked("the forecast was not written before the cell began")
    if said.inside is None:
        if record.cell.world_size == 1 or record.cell.strategy["name"] == "none":
            one = unit(record.cell.device)
            return not_applicable(
                f"no error was claimed: cells of one {one}, or without an exchange, are not held out"
            )
        return not_applicable("no error was claimed: too few cells of this kind could be held out")
    return CheckResult(said.missed) if said.unexplained else None


def rate_inconsistent(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether images/s is images ÷ seconds, and the rate per GPU its share."""
    rate, per_gpu, images, seconds = (
        record.metrics.get(f"throughput/{name}")
        for name in ("images_per_second", "images_per_second_per_gpu", "images", "seconds")
    )
    if rate is None or images is None or seconds is None:
        return unless_training(record, "the images or the seconds are missing")
    things = record.cell.model.inputs
    if not abs(rate * seconds - images) <= MOST_ROUNDED * images:
        return CheckResult(f"{rate:.6g} {things}/s, but {images:.0f} {things} in {seconds:.6g} s")
    ranks = record.cell.world_size
    if per_gpu is not None and not abs(per_gpu * ranks - rate) <= MOST_ROUNDED * rate:
        one = unit(record.cell.device)
        return CheckResult(f"{rate:.6g} {things}/s of {ranks} {one}s, but {per_gpu:.6g} per {one}")
    return None
