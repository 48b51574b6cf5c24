"""The table of a sweep in Markdown: the note of its parent run."""

import math
from collections.abc import Iterable

from benchmarks.record import Record
from launch.projection import escaped, run_name

COLUMNS = (
    "cell",
    "images/s (95 % interval)",
    "images/s per GPU",
    "efficiency",
    "busbw GB/s",
    "exposed ms",
    "transport",
    "link class",
    "validity",
)
ABSENT = "–"
CELL_LENGTH = 200  # characters of a table cell


def summary_markdown(records: Iterable[Record]) -> str:
    """One row for each record, in the order given; what a record does not say is '–', never 0."""
    rows = [COLUMNS, ("---", *["---:"] * 5, *["---"] * 3), *map(_row, records)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cut_to(markdown: str, length: int) -> str:
    """Markdown of at most `length` characters, cut at the end of a line that says so (MLflow's notes are bounded)."""
    if len(markdown) <= length:
        return markdown
    last = "\n… the rest is in the artifact summary.md\n"
    whole, _, _ = markdown[: max(0, length - len(last))].rpartition("\n")
    return whole + "\n" + last


def _row(record: Record) -> tuple[str, ...]:
    metrics = record.metrics
    rate = number(metrics.get("throughput/images_per_second"))
    low, high = (metrics.get(f"throughput/ci_{end}") for end in ("low", "high"))
    if rate != ABSENT and ABSENT not in (number(low), number(high)):
        rate += f" ({number(low)} to {number(high)})"
    efficiency = metrics.get("scaling/efficiency")
    return (
        _cell(run_name(record)),
        rate,
        number(metrics.get("throughput/images_per_second_per_gpu")),
        f"{efficiency:.1%}".replace("%", " %") if efficiency is not None and math.isfinite(efficiency) else ABSENT,
        number(metrics.get("comm/busbw_gb_per_s")),
        number(metrics.get("comm/exposed_ms")),
        *(_cell(_words(record.effective.get(name))) for name in ("transport", "link_class")),
        _validity(record),
    )


def number(value: float | None) -> str:
    """Three significant digits, all the digits of whole thousands: 4,652 · 98.1 · 0.123."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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
