"""The study frame: a table of pandas with a row for each run, or for each cell.

A column is an option or a metric as it is called elsewhere, made a Python name with its unit:

    comm/exchange_ms -> comm_exchange_ms    scaling/efficiency -> scaling_efficiency_share
    nccl.NCCL_ALGO -> NCCL_ALGO

The value of a metric in % is a share of one: 0.981 for 98.1 %. `_low` and `_high` are the ends of
the 95 % interval for the next run; those of the interval inside one run are `_within_run_low` and
`_within_run_high`. What is not known is NA.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import pandas as pd

from analysis.study.conditions import request_of
from analysis.study.estimates import Efficiency, Estimate
from analysis.study.intervals import names_of
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, label, run_name
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, has_floor
from analysis.study.provenance import CONNECTIONS, PROVENANCE, hardware
from analysis.study.runs import Runs
from analysis.study.study import Study
from benchmarks.record import VERDICTS, Record, finite, metrics
from benchmarks.record.metrics import metric as entry_of
from conf.cell import Cell
from conf.options import to_text

Values = Mapping[str, Any]  # {column: value}; None is not known

EFFICIENCY = "scaling/efficiency"
IS_DRIFT = "the first cell once more at the end, which shows the drift"
WITHOUT = (
    "not_measured_alone"  # GPUs without a baseline: one may be slower than those that have one
)
FIRST = ("cell", "gpus", "run", "verdict", "codes", "unchecked", "state", "counts", "left_out")
INTEGERS = ("world_size", "runs", "repeat", "channels")  # also where none is known
LARGEST_INT = 2**63 - 1
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


@dataclass(frozen=True)
class StudyRow:
    """One row, in the order of its columns."""

    head: Values  # which cell, and whether it may be believed
    measured: Mapping[str, float | None]
    options: Values  # what was asked
    used: Values  # what was used, where, when


def frame_of_runs(
    study: Study, values_of: Callable[[Record], Mapping[str, float]] = lambda record: record.metrics
) -> pd.DataFrame:
    """Return a row for each run, in order of their start: also those that failed, or that a later
    attempt replaced.

    `values_of` gives the values of a record that rest on other records too (OF_SEVERAL_RECORDS).
    """
    columns = metric_columns(study)
    cell_of = {id(record): runs for runs in study.runs for record in runs.records}
    left_out = {id(record): why for record, why in study.left_out}
    for record, runs in study.drift:
        cell_of[id(record)] = runs
        left_out[id(record)] = IS_DRIFT
    records = every_record(study)
    within_run = {name for record in records for name in record.within_run}
    rows = []
    for record in records:
        single, now = study.single(record), values_of(record)
        measured: dict[str, float | None] = {}
        for name, column in columns.items():
            if name in OF_SEVERAL_RECORDS:
                measured[column] = float(now[name]) if name in now else None
            else:
                measured |= median_columns(single, name, column)
            if name in within_run:
                ends = metrics.interval(name, record.within_run) or (None, None)
                measured[f"{column}_within_run_low"], measured[f"{column}_within_run_high"] = ends
        why = left_out.get(id(record))
        head = head_columns(study, cell_of.get(id(record), single), single)
        head["run"] = run_name(record)
        # `run` names what is no repeat.
        head["repeat"] = record.cell.repeat if record.cell.repeat >= 0 else None
        head |= verdict_columns([record])
        head |= {"state": record.state, "counts": why is None, "left_out": why}
        share = now.get(EFFICIENCY)
        used = {WITHOUT: None} | used_columns(single)
        if isinstance(share, Efficiency):
            used[WITHOUT] = _without_baseline(record, share)
        used |= {
            "started_at": datetime.fromtimestamp(record.started_at, timezone.utc),
            "took_seconds": record.ended_at - record.started_at,
            "record_id": record.record_id,
            "cell_key": record.cell_key,
            "sweep_id": record.sweep_id,
        }
        options = {**option_columns(record.cell), "seed": record.cell.seed}
        rows.append(StudyRow(head, measured, options, used))
    return frame_of_rows(rows)


def frame_of_rows(rows: Sequence[StudyRow]) -> pd.DataFrame:
    """Return rows as a table: first all columns of `head`, then those that were measured, asked and
    used.
    """
    kinds: dict[str, str] = {}
    for part in ("head", "measured", "options", "used"):
        for row in rows:
            for name in getattr(row, part):
                kinds.setdefault(name, "string")
    for row in rows:
        kinds |= dict.fromkeys(row.measured, "float64")
    for name in INTEGERS:
        if name in kinds:
            kinds[name] = "Int64"
    values = [{**row.used, **row.options, **row.measured, **row.head} for row in rows]
    return frame_of(values, kinds)


def frame_of(rows: Sequence[Values], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Return rows as a table. `kinds` are {column: its type where no value is known}, in their
    order.
    """
    columns = {}
    for name, unknown in kinds.items():
        values = [row.get(name) for row in rows]
        kind = kind_of(values, unknown)
        columns[name] = pd.Series([_as_kind(value, kind) for value in values], dtype=kind)
    return pd.DataFrame(columns, columns=list(kinds))


def kind_of(values: Sequence[Any], unknown: str) -> str:
    """Return pandas' type for the values of a column, of which None are unknown; `unknown` where
    all of them are.
    """
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


def _as_kind(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "float64":
        return float(value)
    return to_text(value) if kind == "string" else value


def with_ends(column: str, value: float | Estimate | None) -> dict[str, float | None]:
    """Return a number and the ends of its 95 % interval: {column, column_low, column_high}."""
    ends: tuple[float | None, float | None] = (None, None)
    number = None
    if isinstance(value, Estimate):
        number, ends = float(value.value), (value.low, value.high)
    elif value is not None:
        number = float(value)
    return {column: number, f"{column}_low": ends[0], f"{column}_high": ends[1]}


def every_record(study: Study) -> list[Record]:
    """Return the record of every run in order of their start, also of those that a later attempt
    replaced.
    """
    records = [*study.records, *study.replaced]
    return sorted(records, key=lambda record: (record.started_at, record.record_id))


def metric_columns(study: Study) -> dict[str, str]:
    """Return {metric: column} of every metric that a study has, in the order of their table. No two
    have one column.
    """
    names = set(OF_SEVERAL_RECORDS)
    taken = {*FIRST, *INTEGERS}
    for record in every_record(study):
        names |= record.metrics.keys()
        taken |= option_columns(record.cell).keys()
    names -= {end for name in names for end in names_of(name)}  # which other columns have
    columns: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (metrics.place(name), name)):
        column = column_of_metric(name)
        while column in taken:
            column = f"metric_{column}"
        columns[name] = column
        taken.add(column)
    return columns


def column_of_metric(name: str) -> str:
    """Return the column of a metric."""
    column, unit = _python_name(name), entry_of(name).unit
    words: tuple[str, ...] = ()
    if unit:
        words = _UNITS.get(unit, (_python_name(unit).lower(),))
    if not words or any(f"_{word}_" in f"_{column}_" for word in words):
        return column
    return f"{column}_{words[0]}"


def column_of_option(name: str) -> str:
    """Return the column of an option as `request_of` names it: `strategy` for strategy.name,
    `strategy_staging`.
    """
    group, _, option = name.partition(".")
    return _python_name(option if group == "nccl" else name.removesuffix(".name"))


def _python_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def option_columns(cell: Cell) -> dict[str, Any]:
    """Return {column: value} of everything that was asked of a cell and tells it from others,
    without empty values.
    """
    columns: dict[str, Any] = {}
    for name, text in request_of(cell).items():
        group, _, option = name.partition(".")
        value = getattr(cell, group)
        if option == "sha256":  # of a file of the user's own
            value = text
        elif option:
            value = value[option] if isinstance(value, dict) else getattr(value, option)
        if value not in ({}, [], ()):
            is_plain = isinstance(value, str | int | float)
            columns[column_of_option(name)] = value if is_plain else to_text(value)
    return columns


def head_columns(study: Study, cell: Runs, runs: Runs) -> dict[str, Any]:
    """Return the name of a cell and the GPUs of some runs."""
    name = f"{label(study, cell)}{BETWEEN}{gpu_list(runs.gpus)}"
    return {"cell": name, "gpus": gpu_ids(runs.gpus), "world_size": runs.world_size}


def verdict_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return the worst verdict of some runs, and every code."""
    verdicts = [record.validity.verdict for record in records]
    codes = dict.fromkeys(code for record in records for code in record.validity.codes)
    unchecked = dict.fromkeys(code for record in records for code in record.validity.unchecked)
    return {
        "verdict": max(verdicts, key=VERDICTS.index),
        "codes": ", ".join(codes),
        "unchecked": ", ".join(unchecked),
    }


def median_columns(runs: Runs, name: str, column: str) -> dict[str, float | None]:
    """Return the median over runs of a metric, with the interval of the next run where it can have
    one.
    """
    if has_floor(name):
        return with_ends(column, runs.next_run(name))
    return {column: runs.median(name)}


def used_columns(runs: Runs) -> dict[str, Any]:
    """Return what was really used and where it ran: NCCL's transport, the machine, the software,
    inherited variables.
    """
    used: dict[str, Any] = {"transport": None, "link_class": None, "channels": None}
    for record in reversed(runs.records):
        for name in ("transport", "link_class"):
            if record.effective.get(name) is not None:
                used[name] = record.effective[name]
        channels = finite(record.effective.get("channels"))
        if channels is not None:
            used["channels"] = int(channels)
    used |= {"study": runs.records[0].study, "hardware": hardware(runs.records[0])}
    for name, value in runs.provenance.items():
        if name != CONNECTIONS:
            used[name if name in PROVENANCE else f"inherited_{name}"] = value or None
    return used


def _without_baseline(record: Record, share: Efficiency) -> str:
    return gpu_ids([gpu for gpu in record.cell.members if share.of and gpu not in share.of])
