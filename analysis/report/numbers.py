"""Print numbers as a report does: rounded to what their interval allows, and '–' for what is not known."""

import math
from dataclasses import dataclass

from analysis.study.estimates import Efficiency, Estimate
from benchmarks.record import metrics

ABSENT = "–"
MINUS = "\N{MINUS SIGN}"
THIN = "\N{NO-BREAK SPACE}"  # between a number and its unit


@dataclass(frozen=True)
class NumberFormat:
    """How a quantity is written: `factor` to its printed unit, the unit, the fewest decimals."""

    factor: float = 1.0
    unit: str = ""
    decimals: int | None = None  # None: three significant digits, all digits of whole thousands
    sign: bool = False  # write a plus too


KINDS = {
    "count": NumberFormat(decimals=0),
    "number": NumberFormat(),
    "rate": NumberFormat(),
    "share": NumberFormat(100.0, "%", 1),
    "part": NumberFormat(100.0, "%", 2),
    "change": NumberFormat(100.0, "%", 1, sign=True),
    "ratio": NumberFormat(decimals=2),
}
MOST_SHARE = 1000  # %; what two runs of each could have shown may be beyond all measure


def of_metric(name: str) -> NumberFormat:
    """Return how a metric is written, by the table of metrics; only % is written with the number, other units are in headings."""
    entry = metrics.metric(name)
    return (
        NumberFormat(100.0, "%", entry.decimals)
        if entry.unit == "%"
        else NumberFormat(decimals=entry.decimals)
    )


def number(
    value: float | None, kind: str | NumberFormat = "number", width: float | None = None
) -> str:
    """Return a number as text: `4,652`, `98.1 %`, `0.123`; a narrow interval (its `width`) gives it one more decimal.

    An efficiency against some of its members says so: `98.1 % against GPU 0`.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    how = _how(kind)
    mark = (
        THIN + value.mark.replace(" ", THIN) if isinstance(value, Efficiency) and value.mark else ""
    )
    value *= how.factor
    if how == KINDS["share"] and abs(value) > MOST_SHARE:
        return f"{MINUS if value < 0 else ''}over {MOST_SHARE:,}{THIN}%"
    decimals = _decimals(value, None if width is None else width * how.factor, how)
    text = f"{abs(value):,.{decimals}f}"
    if float(text.replace(",", "")):
        text = (MINUS if value < 0 else "+" if how.sign else "") + text
    return text + (THIN + how.unit if how.unit else "") + mark


def _how(kind: str | NumberFormat) -> NumberFormat:
    return KINDS[kind] if isinstance(kind, str) else kind


def _decimals(value: float, width: float | None, how: NumberFormat) -> int:
    if how.decimals is None:
        size = abs(value)
        return 0 if size >= 100 or not size else min(6, max(0, 2 - math.floor(math.log10(size))))
    narrow = how.decimals > 0 and width is not None and 0 < width < 2 * 10**-how.decimals
    tiny = how.decimals == 1 and 0 < abs(value) < 1  # 0.04 % is not nothing
    return how.decimals + (narrow or tiny)


def interval(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return the 95 % interval of an estimate without its unit: `98.0 to 98.3`; empty if there is none."""
    if not isinstance(value, Estimate) or value.low is None or value.high is None:
        return ""
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return ""
    unit = THIN + _how(kind).unit if _how(kind).unit else ""
    low, high = (
        number(end, kind, value.high - value.low).removesuffix(unit)
        for end in (value.low, value.high)
    )
    return f"{low} to {high}"


def central(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return the number itself, rounded as its interval is."""
    if not isinstance(value, Estimate):
        return number(value, kind)
    known = value.low is not None and value.high is not None
    return number(value.value, kind, value.high - value.low if known else None)  # type: ignore[operator]


def estimate(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return a number with its interval: `98.1 % (98.0 to 98.3)`."""
    within = interval(value, kind)
    return f"{central(value, kind)} ({within})" if within else central(value, kind)
