"""Names and types of a table's columns: an option or a metric as it is called elsewhere, made a Python name with its unit.

comm/exchange_ms -> comm_exchange_ms    scaling/efficiency -> scaling_efficiency_share    nccl.NCCL_ALGO -> NCCL_ALGO
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from analysis.study.study import request_of
from benchmarks.record.metrics import metric as entry_of
from conf.cell import Cell
from conf.options import to_text

# Words for a unit in a name, the first of which is added where a name has none of them.
_UNITS = {
    "%": ("share", "ratio", "fraction"),
    "images/s": ("images_per_second",),
    "GB/s": ("gb_per_s",),
    "/s": ("per_second",),
    "s": ("seconds",),
    "µs": ("us",),
    "°C": ("c",),
}
LARGEST_INT = 2**63 - 1


def of_metric(name: str) -> str:
    """Return the column of a metric. The value of a metric in % is a share of one: 0.981 for 98.1 %."""
    column, unit = _python(name), entry_of(name).unit
    words = _UNITS.get(unit) or ((_python(unit).lower(),) if unit else ())
    known = any(f"_{word}_" in f"_{column}_" for word in words)
    return column if known or not words else f"{column}_{words[0]}"


def of_option(name: str) -> str:
    """Return the column of an option as `request_of` names it: `strategy` for strategy.name, `strategy_staging`."""
    group, _, option = name.partition(".")
    return _python(option if group == "nccl" else name.removesuffix(".name"))


def _python(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def asked(cell: Cell) -> dict[str, Any]:
    """Return {column: value} of everything that was asked of a cell and tells it from others; what holds nothing is left out."""
    found: dict[str, Any] = {}
    for name, text in request_of(cell).items():
        group, _, option = name.partition(".")
        value = getattr(cell, group)
        if option and option != "sha256":
            value = value[option] if isinstance(value, dict) else getattr(value, option)
        elif option:
            value = text  # of a file of the user's own
        if value not in ({}, [], ()):
            found[of_option(name)] = (
                value if isinstance(value, str | int | float) else to_text(value)
            )
    return found


def kind_of(values: Sequence[Any], unknown: str) -> str:
    """Return pandas' type for the values of a column, of which None are unknown; `unknown` where all of them are."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return unknown
    if kinds == {bool}:
        return "boolean"
    if kinds == {int} and all(value is None or abs(value) <= LARGEST_INT for value in values):
        return "Int64"
    if kinds <= {int, float}:
        return "float64"
    return "datetime64[us, UTC]" if kinds == {datetime} else "string"


def as_kind(value: Any, kind: str) -> Any:
    """Return a value as a column of this type holds it; None stays unknown."""
    if value is None:
        return None
    return float(value) if kind == "float64" else to_text(value) if kind == "string" else value
