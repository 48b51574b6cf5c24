"""What a rank has measured and found."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Block:
    """One timed window: iterations back to back, after one lead-in iteration that is kept and not counted."""

    ms: list[float]  # of each counted iteration, on the device's clock
    lead_in_ms: float  # of the lead-in, which starts on an idle device
    launch_ms: float  # host time to enqueue the lead-in
    device_ms: float  # the whole window on the device's clock
    host_ms: float  # the whole window on the host's clock


@dataclass
class Result:
    """Facts that only the ranks know; equal on every rank. Samples are lines (benchmarks/derived.py)."""

    metrics: dict[str, float] = field(default_factory=dict)  # name: value; the unit is in the name
    # {metric: its 95 % interval inside the run: low, high, and how it was found}
    within_run: dict[str, dict[str, float]] = field(default_factory=dict)
    series: dict[str, list[list[float]]] = field(default_factory=dict)  # name: [[step, value], …], one for each window
    # Matrices and rows, in the JSON shapes of `python -m analysis`.
    tables: dict[str, Any] = field(default_factory=dict)
    model: dict[str, float] = field(default_factory=dict)  # parameters, arrays, gradient_bytes
    checks: dict[str, Any] = field(default_factory=dict)  # facts that analysis.validity.checks judges
