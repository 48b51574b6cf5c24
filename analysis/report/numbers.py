"""Print numbers as a report does: rounded to what their interval allows; unknown ones as `–`."""

import math
from dataclasses import dataclass

from analysis.findings.baselines import Efficiency
from analysis.study.intervals import Estimate
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
    "ms": NumberFormat(decimals=2),
    "share": NumberFormat(100.0, "%", 1),
    "part": NumberFormat(100.0, "%", 2),
    "change": NumberFormat(100.0, "%", 1, sign=True),
    "ratio": NumberFormat(decimals=2),
}
MOST_SHARE = 1000  # %; what two runs of each could have shown may be beyond all measure


def of_metric(name: str) -> NumberFormat:
    """Return how a metric is written; only % is written with the number, headings have units."""
    entry = metrics.entry_of(name)
    if entry.unit == "%":
        return NumberFormat(100.0, "%", entry.decimals)
    return NumberFormat(decimals=entry.decimals)


def two_digits(rate: float) -> str:
    """Return a rate without digits that nobody knows: `1,100`, `5.3`."""
    rounded = float(f"{rate:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def number(
    value: float | None, kind: str | NumberFormat = "number", width: float | None = None
) -> str:
    """Return a number as text: `4,652`, `98.1 %`; a narrow interval (its `width`) adds a decimal.

    An efficiency against some of its members says so: `98.1 % against GPU 0`.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    form = _format_of(kind)
    mark = ""
    if isinstance(value, Efficiency) and value.mark:
        mark = THIN + value.mark.replace(" ", THIN)
    printed = value * form.factor
    sign = ""
    if printed < 0:
        sign = MINUS
    elif form.sign:
        sign = "+"
    size = abs(printed)
    if form == KINDS["share"] and size > MOST_SHARE:
        return f"{sign}over {MOST_SHARE:,}{THIN}%"
    decimals = form.decimals
    if decimals is None:
        decimals = 0
        if size and size < 100:
            decimals = min(6, max(0, 2 - math.floor(math.log10(size))))
    elif decimals == 1 and 0 < round(size, 9) < 1:
        decimals = 2  # 0.04 % is not nothing
    elif decimals > 0 and width is not None and 0 < width * form.factor < 2 * 10**-decimals:
        decimals += 1
    text = f"{size:,.{decimals}f}"
    if float(text.replace(",", "")):
        text = sign + text
    unit = THIN + form.unit if form.unit else ""
    return f"{text}{unit}{mark}"


def _format_of(kind: str | NumberFormat) -> NumberFormat:
    return KINDS[kind] if isinstance(kind, str) else kind


def texts(value: float | Estimate | None, kind: str | NumberFormat = "number") -> tuple[str, str]:
    """Return a number and its 95 % interval without its unit: `98.1 %`, `98.0 to 98.3`.

    The interval is empty where it is not known.
    """
    if not isinstance(value, Estimate):
        return number(value, kind), ""
    if value.low is None or value.high is None:
        return number(value.value, kind), ""
    width = value.high - value.low
    central = number(value.value, kind, width)
    if not math.isfinite(width):
        return central, ""
    unit = _format_of(kind).unit
    low, high = number(value.low, kind, width), number(value.high, kind, width)
    return central, f"{low.removesuffix(THIN + unit)} to {high.removesuffix(THIN + unit)}"


def interval(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return the 95 % interval of an estimate without its unit; empty without."""
    return texts(value, kind)[1]


def central(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return the number itself, rounded as its interval is."""
    return texts(value, kind)[0]


def estimate(value: float | Estimate | None, kind: str | NumberFormat = "number") -> str:
    """Return a number with its interval: `98.1 % (98.0 to 98.3)`."""
    text, ends = texts(value, kind)
    return f"{text} ({ends})" if ends else text


def rounded(value: float, error: float) -> str:
    """Return a number without the digits below the first one of its error."""
    digits = -math.floor(math.log10(max(error, 1e-9)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"
