"""The numbers of one cell as tables of cells print them: on the terminal and in MLflow's notes."""

import math
from collections.abc import Container, Iterable, Mapping

from analysis.findings.baselines import AGAINST, EFFICIENCY, stated_efficiency
from analysis.prediction.recorded_forecast import recorded_forecast
from analysis.report.numbers import ABSENT, MOST_SHARE, THIN, estimate, number, of_metric
from analysis.study.conditions import IMAGES_PER_SECOND, primary_rate
from analysis.study.intervals import WORDS, Estimate, ends_of, names_of, rests_on
from analysis.study.names import of_unit
from benchmarks.record import Record, metrics

RUNS = names_of(IMAGES_PER_SECOND)[2]  # absent where the interval is lent
MARGIN = "±"  # half the 95 % interval of the next run, as a share of images per second
ONE_RUN = "one run"  # stands there where it is not known
LEAST_MARGIN = 0.00005  # a smaller one would be rounded to 0.00 %
WIDE_MARGIN = 0.2  # above which both ends are shown
NOT_SEEN = "none seen"  # of an exposed time of 0 or less: steps without the exchange were as slow
RESULT = "result"  # of benchmarks whose metrics have no column
TRANSPORT = "transport"
PREDICTED = "predicted"  # images per second by the forecast, and the measured step against it
EXPOSED, IDEAL, COST = "comm/exposed_ms", "comm/ideal_ratio", "strategy/cost_ms"
TRACE_EXPOSED = "trace/exposed_ms_per_step"
OF_SEVERAL_GPUS = ("throughput/images_per_second_per_gpu", EFFICIENCY)  # on one GPU nothing new
# Columns of tables of cells in their order; the trace's exposed ms stand beside the exposed ms.
COLUMN_OF = {
    entry.name: entry.column for entry in metrics.COLUMNS if not entry.name.startswith("trace/")
}
_RATE, *_OTHERS = COLUMN_OF.values()
COLUMNS = (_RATE, MARGIN, *_OTHERS, RESULT, TRANSPORT)


def cell_numbers(record: Record, of_several: Mapping[str, float]) -> dict[str, str]:
    """Return {column: number} of a finished cell; what is not known is absent.

    A number has its unit if the column's heading has not. `of_several` are the values that need
    other records, and the known intervals (analysis.findings.communication, `shown`).
    """
    values = dict(record.metrics)
    efficiency = stated_efficiency(record)
    if efficiency is not None:
        values[EFFICIENCY] = efficiency
    values |= of_several
    texts = {}
    for name, column in COLUMN_OF.items():
        if name in values and (record.cell.world_size > 1 or name not in OF_SEVERAL_GPUS):
            texts[column] = number(values[name], of_metric(name))
    if COST in values:
        texts[COLUMN_OF[COST]] = cost_text(record, values)
    if values.get(EXPOSED, 1.0) <= 0:
        texts[COLUMN_OF[EXPOSED]] = NOT_SEEN
    if TRACE_EXPOSED in values:
        exposed = texts.get(COLUMN_OF[EXPOSED], ABSENT)
        texts[COLUMN_OF[EXPOSED]] = f"{exposed} (trace {number(values[TRACE_EXPOSED])})"
    forecast = recorded_forecast(record)
    if forecast is not None:
        texts[PREDICTED] = f"{texts.get(PREDICTED, ABSENT)}, {forecast.comparison}"
    texts[MARGIN] = margin(values)
    texts[RESULT] = first_number(record, values)
    # What NCCL really used: `P2P/CUMEM over NV18, 24 channels`.
    used, channels = record.effective.get("transport"), record.effective.get("channels")
    texts[TRANSPORT] = str(used or "")
    if used and channels:
        texts[TRANSPORT] += f", {channels} channels"
    filled = {}
    for column in COLUMNS:
        if texts.get(column, "") not in ("", ABSENT):
            filled[column] = texts[column]
    return filled


def cost_text(record: Record, values: Mapping[str, float]) -> str:
    """Return `0.487 (0.452 to 0.522)`: what the strategy costs, with the interval of the next run,
    else that inside the run; ABSENT for the cost of a suspect cell whose interval holds 0.
    """
    ends = ends_of(COST, values) or record.ends_within_run(COST)
    if not ends:
        return number(values[COST], of_metric(COST))
    if record.validity.verdict == "suspect" and ends[0] <= 0 <= ends[1]:
        return ABSENT
    return estimate(Estimate(values[COST], *ends), of_metric(COST))


def heading(column: str, things: str, unit: str) -> str:
    """Return the heading of a column of cells that count `things` on GPUs or CPU workers."""
    return of_unit(column, unit).replace("images", things)


def with_unit(column: str, text: str, things: str = "images", units: str = "GPUs") -> str:
    """Return a number of a column in words: `99.9 % efficiency against GPU 0`."""
    if text == NOT_SEEN:
        return "no exposed communication seen"
    if column == PREDICTED:
        return f"predicted {text}"
    if column == MARGIN and text != ONE_RUN:
        sign = "" if text.startswith("−") else "±"
        return f"{sign}{text} around this run"  # a configuration's is around its median
    for entry in metrics.COLUMNS:
        if entry.column == column:
            unit = "" if entry.unit == "%" else entry.of(things).unit
            words = of_unit(entry.of(things).column.removesuffix(unit).strip(), units)
            value, against, members = text.partition(f" {AGAINST} ")
            return " ".join(filter(None, (value, unit, words, against.strip(), members)))
    return text


def margin(values: Mapping[str, float]) -> str:
    """Return half the interval of the next run, as a share of the rate; of a wide one, whose ends
    are not alike, both: `−52 to +110 %`; empty without a rate.
    """
    rate, ends = values.get(IMAGES_PER_SECOND), ends_of(IMAGES_PER_SECOND, values)
    if not rate:
        return ""
    if not ends or not math.isfinite(ends[1] - ends[0]):
        return ONE_RUN
    half = (ends[1] - ends[0]) / 2 / rate
    if WIDE_MARGIN < half <= MOST_SHARE / 100:
        low, high = 100 * (1 - ends[0] / rate), 100 * (ends[1] / rate - 1)
        return f"−{low:.0f} to +{high:.0f}{THIN}%"
    return f"<0.01{THIN}%" if 0 <= half < LEAST_MARGIN else number(half, "share")


def about_margins(values: Iterable[Mapping[str, float]]) -> str:
    """Return what ± is: `± for the next run, from 12 runs of equal cells`; empty without any."""
    runs, lent_by, shown = [], "", 0
    for of_cell in values:
        shown += 1
        for name, value in of_cell.items():
            if name.endswith("ci_runs"):
                runs.append(value)
        if RUNS not in of_cell and ends_of(IMAGES_PER_SECOND, of_cell):
            lent_by = "other configurations"
    basis = rests_on(runs, lent_by)
    if runs and max(runs) > shown:
        basis += " (not all are of this sweep)"
    return f"± {WORDS} (95 %), {basis}" if basis else ""


def about_columns(shown: Container[str]) -> str:
    """Return what the reference of an exchange and the interval of a cost are, where shown."""
    words = []
    if COLUMN_OF[IDEAL] in shown:
        words.append("reference: the same bytes at the rate of one large transfer, without waiting")
    if COLUMN_OF[COST] in shown:
        words.append("cost: with the 95 % interval for the next run, else that inside the run")
    return "; ".join(words)


def first_number(record: Record, values: Mapping[str, float]) -> str:
    """Return the number that says most of a cell whose metrics have no column.

    `overhead 0.12 % (−0.05 to 0.30 for the next run)`.
    """
    name = first_metric(record)
    if name is None:
        return ""
    entry, kind = metrics.entry_of(name), of_metric(name)
    title = of_unit(entry.title, "GPU" if record.cell.device == "cuda" else "CPU worker")
    text = f"{title} {number(record.metrics[name], kind)}"
    if entry.unit not in ("%", ""):
        text += f" {entry.unit}"
    ends = ends_of(name, values)
    if not ends:
        return f"{text}, {ONE_RUN}"
    unit = f"{THIN}{kind.unit}"
    low, high = number(ends[0], kind), number(ends[1], kind)
    return f"{text} ({low.removesuffix(unit)} to {high.removesuffix(unit)} {WORDS})"


def first_metric(record: Record) -> str | None:
    """Return the metric in which cells of its benchmark are compared, None where a column shows it;
    where they are not compared, the first that the table of metrics marks, or of the user's own.
    """
    compared = primary_rate(record.cell).metric
    if compared in record.metrics:
        if compared in COLUMN_OF:
            return None
        return compared
    marked, own = [], []
    for name in record.metrics:
        entry = metrics.known(name)
        if entry is None:
            own.append(name)
        elif entry.first:
            marked.append(name)
    return next(iter([*sorted(marked, key=metrics.position_of), *own]), None)
