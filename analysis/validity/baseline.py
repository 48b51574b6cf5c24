"""A check of the baseline that a cell's efficiency was computed with.

The function returns None for a record that passes.
"""

import math

from analysis.findings.baselines import BASELINES, EFFICIENCY, NOISE
from analysis.findings.next_run.interval import of_median
from analysis.validity.check import CheckResult, not_applicable
from benchmarks.record import Record
from benchmarks.record.metrics import interval
from conf.schema import ValidityLimits

RATE = "throughput/images_per_second"
MOST_EFFICIENCY = 1.02  # where the scatter between runs is not known
# Where it is known: so many standard deviations of the ratio of two rates above 1, and at least this.
MOST_DEVIATIONS, LEAST_MOST_EFFICIENCY = 3.0, 1.005


def efficiency_above_one(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the efficiency is too high for a fair baseline: chosen badly, disturbed, or of another kind."""
    share = record.metrics.get(EFFICIENCY)
    if record.cell.world_size == 1:
        return None  # a baseline is not compared with itself
    if share is None:
        return not_applicable("no efficiency is stated: there is no one-GPU baseline")
    most = _most(record)
    return CheckResult(f"{share:.1%}, and noise explains at most {most:.1%}") if share > most else None


def _most(record: Record) -> float:
    """Return the efficiency that noise explains, by the scatter between runs; without it, by the cell's own interval."""
    noise, ids = record.checks.get(NOISE), record.checks.get(BASELINES)
    if isinstance(noise, float) and isinstance(ids, dict) and ids:
        runs = min(len(of_gpu) for of_gpu in ids.values())
        return max(LEAST_MOST_EFFICIENCY, math.exp(MOST_DEVIATIONS * noise * math.sqrt(1 + of_median(max(1, runs)))))
    rate, ends = record.metrics.get(RATE), interval(RATE, record.within_run)
    return MOST_EFFICIENCY * (rate / ends[0] if rate and ends and ends[0] > 0 else 1.0)
