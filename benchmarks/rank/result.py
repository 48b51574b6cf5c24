"""What a benchmark found."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """Equal on every rank."""

    metrics: dict[str, float] = field(default_factory=dict)  # name: value, the unit is in the name
    series: dict[str, list[list[float]]] = field(default_factory=dict)  # name: [[step, value], …], one per window
    tables: dict[str, Any] = field(
        default_factory=dict
    )  # matrices and rows, in the JSON shapes of `python -m analysis`
    model: dict[str, float] = field(default_factory=dict)  # parameters, arrays, gradient_bytes
    checks: dict[str, Any] = field(default_factory=dict)  # facts that analysis.validity.checks judges
