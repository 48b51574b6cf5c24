"""The table of a sweep in Markdown: the note of its parent run."""

import math
from collections.abc import Iterable, Sequence

from analysis.trace.metrics import TRACE_EXPOSED
from benchmarks.record import Record
from launch.tracking.projection import escaped, run_name

COLUMNS = (
    "cell",
    "images/s",
    "95 % interval",
    "per GPU",
    "efficiency",
    "exchange ms",
    "of limit",
    "busbw GB/s",
    "exposed ms",
    "transport",
    "link class",
    "validity",
)
ABSENT = "–"
CELL_LENGTH = 200  # characters of a table cell
BETWEEN = " · "  # the parts of a name
UNITS = {"_gb_per_s": " GB/s", "_per_second": "/s", "_ms": " ms", "_us": " µs"}  # by the end of a metric's name


def summary_markdown(records: Iterable[Record]) -> str:
    """One row for each record, in the order given; what a record does not say is '–', never 0.

    MLflow gives the table little room: what all names begin with is said once, above it, and the headline of benchmarks
    other than `throughput` has a column only where there is one.
    """
    records = list(records)
    names = [run_name(record).split(BETWEEN) for record in records]
    common = _common(names)
    results = [headline(record) if record.state == "finished" else "" for record in records]
    head, align = [*COLUMNS], ["---", *["---:"] * 8, *["---"] * 3]
    rows = [[_cell(BETWEEN.join(name[common:])), *_row(record)] for name, record in zip(names, records, strict=True)]
    if any(results):
        for row, result in zip([head, align, *rows], ["result", "---", *results], strict=True):
            row.insert(1, result if row in (head, align) else _cell(result or ABSENT))
    above = f"Every cell: {_cell(BETWEEN.join(names[0][:common]))}\n\n" if common else ""
    return above + "".join(f"| {' | '.join(row)} |\n" for row in [head, align, *rows])


def _common(names: Sequence[Sequence[str]]) -> int:
    """With how many parts all names of a table begin; the last part of each stays in its row."""
    most = min((len(name) for name in names), default=1) - 1 if len(names) > 1 else 0
    return next((place for place in range(most) if len({name[place] for name in names}) > 1), most)


def headline(record: Record) -> str:
    """The first number of a benchmark other than `throughput`, with its unit and interval; empty where there is none."""
    benchmark, metrics = record.cell.benchmark["name"], record.metrics
    name = next((name for name in metrics if name.startswith(f"{benchmark}/")), None)
    if name is None or benchmark == "throughput":
        return ""
    label = name.rpartition("/")[2]
    suffix = next((suffix for suffix in UNITS if label.endswith(suffix)), "")
    share = label.endswith(("share", "fraction", "efficiency"))
    ends = [metrics.get(f"{name}_ci_{end}") for end in ("low", "high")]
    interval = [f"{100 * end:.2f}" if share else number(end) for end in ends if end is not None]
    value = percent(metrics[name], 2) if share else number(metrics[name]) + UNITS.get(suffix, "")
    words = label.removesuffix(suffix).replace("_", " ")
    return f"{words} {value}" + (f" ({' to '.join(interval)})" if len(interval) == 2 else "")


def half_width(record: Record) -> float | None:
    """Half the 95 % interval of images/sec, as a share of it."""
    rate, low, high = (record.metrics.get(f"throughput/{name}") for name in ("images_per_second", "ci_low", "ci_high"))
    return (high - low) / 2 / rate if rate and low is not None and high is not None else None


def percent(share: float | None, digits: int | None = None) -> str:
    """`98.1 %`; with `digits` left to it two below one percent. Empty where the share is absent or not finite."""
    if share is None or not math.isfinite(share):
        return ""
    if digits is None and 0 <= share < 0.00005:
        return "<0.01 %"
    return f"{100 * share:.{(2 if share < 0.01 else 1) if digits is None else digits}f} %"


def cut_to(markdown: str, length: int) -> str:
    """Markdown of at most `length` characters, cut at the end of a line that says so (MLflow's notes are bounded)."""
    if len(markdown) <= length:
        return markdown
    last = "\n… the rest is in the artifact summary.md\n"
    whole, _, _ = markdown[: max(0, length - len(last))].rpartition("\n")
    return whole + "\n" + last


def _row(record: Record) -> tuple[str, ...]:
    """The columns after the cell's name."""
    metrics, interval = record.metrics, percent(half_width(record))
    return (
        number(metrics.get("throughput/images_per_second")),
        f"± {interval}".replace(" ", "\N{NO-BREAK SPACE}") if interval else ABSENT,
        number(metrics.get("throughput/images_per_second_per_gpu")),
        percent(metrics.get("scaling/efficiency"), 1).replace(" ", "\N{NO-BREAK SPACE}") or ABSENT,
        number(metrics.get("comm/exchange_ms")),
        percent(metrics.get("comm/ideal_ratio"), 0).replace(" ", "\N{NO-BREAK SPACE}") or ABSENT,
        number(metrics.get("comm/busbw_gb_per_s")),
        exposed(record),
        _cell(wires(record) or ABSENT),
        _cell(_words(record.effective.get("link_class"))),
        _validity(record),
    )


def number(value: float | None) -> str:
    """Three significant digits, all the digits of whole thousands: 4,652 · 98.1 · 0.123."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def exposed(record: Record) -> str:
    """Exposed ms by the difference ABBA, and where there is a trace, what it says: `0.60 (trace 0.55)`."""
    traced, measured = record.metrics.get(TRACE_EXPOSED), number(record.metrics.get("comm/exposed_ms"))
    return measured if traced is None else f"{measured} (trace {number(traced)})"


def wires(record: Record) -> str:
    """`P2P/CUMEM over NV18, 24 channels`: what NCCL really used; empty where its log does not say."""
    transport, channels = (record.effective.get(name) for name in ("transport", "channels"))
    if not transport:
        return ""
    return f"{transport}, {channels} channels" if channels else str(transport)


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value or ABSENT)


def _cell(text: str) -> str:
    return escaped(text, CELL_LENGTH)


def _validity(record: Record) -> str:
    """The verdict with its codes; of a cell that did not finish its state and the cause."""
    codes = _cell(", ".join(record.validity.codes))
    if record.state == "finished":
        return f"**{record.validity.verdict}**: {codes}" if codes else record.validity.verdict
    if record.failure is None:
        return f"**{record.state}**"
    where = f" of rank {record.failure.rank}" if record.failure.rank is not None else ""
    return f"**{record.state}**: {_cell(record.failure.cause)}{where}, {_cell(record.failure.message)}"
