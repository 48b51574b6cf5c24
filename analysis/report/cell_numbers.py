"""The numbers of one cell as tables of cells print them: on the terminal and in MLflow's note of a sweep."""

import math
from collections.abc import Container, Iterable, Mapping

from analysis.findings.baselines import EFFICIENCY, stated
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.report.numbers import ABSENT, THIN, number, of_metric
from analysis.study.estimates import AGAINST
from analysis.study.intervals import WORDS, ends_of, rests_on
from analysis.study.names import names_of_unit as of_unit
from analysis.study.rates import primary_rate
from benchmarks.record import Record, metrics

MARGIN = "±"  # half the 95 % interval of the next run, as a share of images per second
NOT_SEEN = (
    "none seen"  # stands for an exposed time of 0 or less: steps without the exchange were as slow
)
ONE_RUN = "one run"  # stands there where it is not known
RESULT = "result"  # of benchmarks whose metrics have no column
TRANSPORT = "transport"
EXPOSED, IDEAL = "comm/exposed_ms", "comm/ideal_ratio"
TRACE_EXPOSED = "trace/exposed_ms_per_step"
PREDICTED = "predicted"  # images per second by the forecast, and the measured step against it
RATE = "throughput/images_per_second"
OF_SEVERAL_GPUS = (
    "throughput/images_per_second_per_gpu",
    EFFICIENCY,
)  # on one GPU they say nothing new
LEAST_MARGIN = 0.00005  # a smaller one would be rounded to 0.00 %
# Columns of tables of cells in their order; the trace's exposed ms stand in the column of the exposed ms.
_METRICS = {one.name: one.column for one in metrics.COLUMNS if not one.name.startswith("trace/")}
_RATE, *_OTHERS = _METRICS.values()
COLUMNS = (_RATE, MARGIN, *_OTHERS, RESULT, TRANSPORT)


def cell_numbers(record: Record, of_several: Mapping[str, float]) -> dict[str, str]:
    """Return {column: number} of a finished cell, without the unit if the column's heading has it; what is unknown is absent.

    `of_several` are the values that need other records, as they are now, and the intervals that are known
    (analysis.findings.record_values, `shown`).
    """
    own = {} if (share := stated(record)) is None else {EFFICIENCY: share}
    values = record.metrics | own | dict(of_several)
    several = record.cell.world_size > 1
    names = [
        name for name in _METRICS if name in values and (several or name not in OF_SEVERAL_GPUS)
    ]
    found = {_METRICS[name]: number(values[name], of_metric(name)) for name in names}
    if values.get(EXPOSED, 1.0) <= 0:
        found[_METRICS[EXPOSED]] = NOT_SEEN
    if TRACE_EXPOSED in values:
        found[_METRICS[EXPOSED]] = (
            f"{found.get(_METRICS[EXPOSED], ABSENT)} (trace {number(values[TRACE_EXPOSED])})"
        )
    if (said := recorded_forecast(record)) is not None:
        found[PREDICTED] = f"{found.get(PREDICTED, ABSENT)}, {said.compared}"
    found |= {
        MARGIN: margin(values),
        RESULT: first_number(record, values),
        TRANSPORT: transport(record),
    }
    return {
        column: found[column] for column in COLUMNS if found.get(column, ABSENT) not in ("", ABSENT)
    }


def heading(column: str, things: str, unit: str) -> str:
    """Return the heading of a column, of cells that count `things` on GPUs or CPU workers (`unit`)."""
    return of_unit(column, unit).replace("images", things)


def with_unit(column: str, text: str, things: str = "images", units: str = "GPUs") -> str:
    """Return a number of a column with its unit and what it is, of other columns the text alone.

    Cells count `things` on GPUs or CPU workers (`units`).

    `0.454 ms exchange`, `99.9 % efficiency against GPU 0`.
    """
    if text == NOT_SEEN:
        return "no exposed communication seen"
    if column == PREDICTED:
        return f"predicted {text}"
    entry = next((one for one in metrics.COLUMNS if one.column == column), None)
    if entry is None:
        return f"±{text} {WORDS}" if column == MARGIN and text != ONE_RUN else text
    unit, column = "" if entry.unit == "%" else entry.of(things).unit, entry.of(things).column
    words = of_unit(column.removesuffix(unit).strip(), units)
    text, against, members = text.partition(
        f" {AGAINST} "
    )  # of an efficiency: its GPUs that were measured alone
    return " ".join(part for part in (text, unit, words, against.strip(), members) if part)


def margin(values: Mapping[str, float]) -> str:
    """Return half the interval of the next run of images per second, as a share of it, or `one run`; empty without a rate."""
    rate, ends = values.get(RATE), ends_of(RATE, values)
    if not rate:
        return ""
    half = (ends[1] - ends[0]) / 2 / rate if ends else math.nan
    return (
        f"<0.01{THIN}%"
        if 0 <= half < LEAST_MARGIN
        else number(half, "share")
        if math.isfinite(half)
        else ONE_RUN
    )


def about_margins(values: Iterable[Mapping[str, float]]) -> str:
    """Return what ± and the intervals of cells are: `± for the next run, from 12 runs of equal cells`; empty without any."""
    known = rests_on(
        value for of_cell in values for name, value in of_cell.items() if name.endswith("ci_runs")
    )
    return f"± {WORDS} (95 %), {known} of equal cells" if known else ""


def about_reference(shown: Container[str]) -> str:
    """Return what the reference of an exchange is, in METHOD.md's words; empty where its column is not shown."""
    said = "reference: the exchange's own bytes in the largest pieces, without any waiting"
    return said if _METRICS[IDEAL] in shown else ""


def first_number(record: Record, values: Mapping[str, float]) -> str:
    """Return the number that says most of a cell whose metrics have no column: `overhead 0.12 % (−0.05 to 0.30)`."""
    name = first_metric(record)
    return "" if name is None else _named(name, record, values)


def first_metric(record: Record) -> str | None:
    """Return the name of the metric that says most of a cell whose metrics have no column.

    It is the metric in which cells of its benchmark are compared; for benchmarks whose cells are not compared, the first that the
    table of metrics marks, or the first of the user's own. None where a column shows it.
    """
    compared = primary_rate(record.cell).metric
    if compared in _METRICS and compared in record.metrics:
        return None
    own = [name for name in record.metrics if metrics.known(name) is None]
    marked = [name for name in record.metrics if (entry := metrics.known(name)) and entry.first]
    marked.sort(key=metrics.place)
    return next((name for name in (compared, *marked, *own) if name in record.metrics), None)


def _named(name: str, record: Record, values: Mapping[str, float]) -> str:
    entry, kind = metrics.metric(name), of_metric(name)
    unit = f" {entry.unit}" if entry.unit != "%" and entry.unit else ""
    text = f"{entry.title} {number(record.metrics[name], kind)}{unit}"
    if ends := ends_of(name, values):
        low, high = (number(end, kind).removesuffix(f"{THIN}{kind.unit}") for end in ends)
        return f"{text} ({low} to {high} {WORDS})"
    return f"{text}, {ONE_RUN}"


def transport(record: Record) -> str:
    """Return what NCCL really used: `P2P/CUMEM over NV18, 24 channels`; empty where its log does not say."""
    used, channels = (record.effective.get(name) for name in ("transport", "channels"))
    if not used:
        return ""
    return f"{used}, {channels} channels" if channels else str(used)
