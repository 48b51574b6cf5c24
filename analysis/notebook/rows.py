"""The rows of a study's two tables: one for each cell, one for each run of a cell.

A column that both have means the same in both. `_low` and `_high` are the ends of the 95 % interval for the next run, as
everywhere; those of the interval inside one run are `_within_run_low` and `_within_run_high`.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import EXPOSED, HIDDEN
from analysis.findings.record_values import SeveralRecords
from analysis.notebook.columns import asked, of_metric
from analysis.notebook.frames import INTEGER, NUMBER, TEXT, with_ends
from analysis.study.estimates import Efficiency, Findings
from analysis.study.intervals import names_of
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, label, run_name
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, has_floor
from analysis.study.provenance import CONNECTIONS, PROVENANCE, hardware
from analysis.study.study import Runs, Study, merged
from benchmarks.record import VERDICTS, Record, finite, metrics

IS_DRIFT = "the first cell once more at the end, which shows the drift"
WITHOUT = "not_measured_alone"  # GPUs without a baseline: one of them may be slower than those that have one
FIRST = ("cell", "gpus", "run", "verdict", "codes", "unchecked", "state", "counts", "left_out")
INTEGERS = ("world_size", "runs", "repeat", "channels")  # also where none is known


@dataclass(frozen=True)
class StudyRow:
    """One row, in the order of its columns."""

    head: Mapping[str, Any]  # which cell, and whether it may be believed
    measured: Mapping[str, float | None]
    asked: Mapping[str, Any]
    found: Mapping[str, Any]  # what was used, where, when

    @property
    def values(self) -> dict[str, Any]:
        """Return {column: value}; None is unknown."""
        return {**self.found, **self.asked, **self.measured, **self.head}


def columns(rows: Sequence[StudyRow]) -> dict[str, str]:
    """Return {column: its type where no value is known} of all rows, in their order."""
    names = [
        name
        for part in ("head", "measured", "asked", "found")
        for row in rows
        for name in getattr(row, part)
    ]
    numbers = {name for row in rows for name in row.measured}
    return {
        name: INTEGER if name in INTEGERS else NUMBER if name in numbers else TEXT
        for name in dict.fromkeys(names)
    }


def cell_rows(study: Study, findings: Findings) -> Iterator[StudyRow]:
    """Yield one row for each cell: the median over its runs. A cell without a usable run has `runs` 0 and no numbers."""
    names = metric_columns(study)
    several, drawn = SeveralRecords(study), _of_cells(findings)
    for runs in study.runs:
        ids = tuple(record.record_id for record in runs.records)
        head = _head(study, runs, runs) | {"runs": len(runs.records)} | _verdict(runs.records)
        measured: dict[str, float | None] = {}
        for name, column in names.items():
            if name in OF_SEVERAL_RECORDS:
                values = [
                    value
                    for record in runs.records
                    if (value := several.values(record).get(name)) is not None
                ]
                known = drawn.get((ids, name), statistics.median(values) if values else None)
                measured |= with_ends(column, known) if name == EFFICIENCY else {column: known}
            else:
                measured |= _measured(runs, name, column)
        found = {WITHOUT: drawn.get((ids, WITHOUT)), **_found(runs)}
        yield StudyRow(head, measured, asked(runs.cell), found)
    for runs in _without_usable(study):
        yield StudyRow(
            _head(study, runs, runs) | {"runs": 0} | _verdict(runs.records),
            {},
            asked(runs.cell),
            _found(runs),
        )


def run_rows(study: Study) -> Iterator[StudyRow]:
    """Yield one row for each run, in order of their start: also those that failed, or that a later attempt replaced."""
    names, several = metric_columns(study), SeveralRecords(study)
    of_cell = {id(record): runs for runs in study.runs for record in runs.records}
    drift = {id(record): runs for record, runs in study.drift}
    left_out = {id(record): why for record, why in study.left_out}
    left_out |= dict.fromkeys(drift, IS_DRIFT)
    within = {name for record in every_record(study) for name in record.within_run}
    for record in every_record(study):
        single = study.single(record)
        cell = of_cell.get(id(record)) or drift.get(id(record)) or single
        now = several.values(record)
        measured: dict[str, float | None] = {}
        for name, column in names.items():
            if name in OF_SEVERAL_RECORDS:
                measured[column] = None if (value := now.get(name)) is None else float(value)
            else:
                measured |= _measured(single, name, column)
            if name in within:
                inside = metrics.interval(name, record.within_run) or (None, None)
                measured |= dict(
                    zip(
                        (f"{column}_within_run_low", f"{column}_within_run_high"),
                        inside,
                        strict=True,
                    )
                )
        repeat = (
            record.cell.repeat if record.cell.repeat >= 0 else None
        )  # `run` names what is no repeat
        head = (
            _head(study, cell, single)
            | {"run": run_name(record), "repeat": repeat}
            | _verdict([record])
        )
        why = left_out.get(id(record))
        head |= {"state": record.state, "counts": why is None, "left_out": why}
        when = {
            "started_at": datetime.fromtimestamp(record.started_at, timezone.utc),
            "took_seconds": record.ended_at - record.started_at,
        }
        ids = {name: getattr(record, name) for name in ("record_id", "cell_key", "sweep_id")}
        share = now.get(EFFICIENCY)
        missing = _without(record, share) if isinstance(share, Efficiency) else None
        found = {WITHOUT: missing, **_found(single), **when, **ids}
        yield StudyRow(head, measured, {**asked(record.cell), "seed": record.cell.seed}, found)


def every_record(study: Study) -> list[Record]:
    """Return the record of every run in order of their start, also of those that a later attempt replaced."""
    return sorted(
        [*study.records, *study.replaced], key=lambda one: (one.started_at, one.record_id)
    )


def metric_columns(study: Study) -> dict[str, str]:
    """Return {metric: column} of every metric that a study has, in the order of their table. No two have one column."""
    every = {name for record in every_record(study) for name in record.metrics} | set(
        OF_SEVERAL_RECORDS
    )
    ends = {end for name in every for end in names_of(name)}  # which other columns have
    found: dict[str, str] = {}
    taken = {name for record in every_record(study) for name in asked(record.cell)} | {
        *FIRST,
        *INTEGERS,
    }
    for name in sorted(every - ends, key=lambda name: (metrics.place(name), name)):
        column = of_metric(name)
        while column in taken:
            column = f"metric_{column}"
        found[name] = column
        taken.add(column)
    return found


def _head(study: Study, cell: Runs, runs: Runs) -> dict[str, Any]:
    name = f"{label(study, cell)}{BETWEEN}{gpu_list(runs.gpus)}"
    return {"cell": name, "gpus": gpu_ids(runs.gpus), "world_size": runs.world_size}


def _without(record: Record, share: Efficiency) -> str:
    """Return the GPUs of a record that were not measured alone, so that its efficiency is against the others."""
    return gpu_ids([gpu for gpu in record.cell.members if share.of and gpu not in share.of])


def _verdict(records: Sequence[Record]) -> dict[str, Any]:
    """Return the worst verdict of some runs, and every code."""
    return {
        "verdict": max((record.validity.verdict for record in records), key=VERDICTS.index),
        "codes": ", ".join(
            dict.fromkeys(code for record in records for code in record.validity.codes)
        ),
        "unchecked": ", ".join(
            dict.fromkeys(code for record in records for code in record.validity.unchecked)
        ),
    }


def _measured(runs: Runs, name: str, column: str) -> dict[str, float | None]:
    """Return the median over runs of a metric, with the interval of the next run where it can have one."""
    if not has_floor(name):
        values = runs.values(name)
        return {column: statistics.median(values) if values else None}
    return with_ends(column, runs.next_run(name))


def _of_cells(findings: Findings) -> dict[tuple[tuple[str, ...], str], Any]:
    """Return {(ids of a cell's records, metric or WITHOUT): value} of what findings say of runs of equal cells together."""
    found: dict[tuple[tuple[str, ...], str], Any] = {}
    for point in (point for curve in findings.scaling.curves for point in curve.points):
        found[point.record_ids, EFFICIENCY] = point.efficiency
        found[point.record_ids, AT_EQUAL_CLOCKS] = point.at_equal_clocks
        if point.efficiency is not None:
            found[point.record_ids, WITHOUT] = gpu_ids(point.without_baseline)
    for one in findings.communication:
        found[one.record_ids, EXPOSED], found[one.record_ids, HIDDEN] = (
            one.exposed_ms,
            one.hidden_share,
        )
    return found


def _found(runs: Runs) -> dict[str, Any]:
    """Return what was really used and where it ran: NCCL's transport, the machine, the software, variables from around."""
    used = {
        name: _first(record.effective.get(name) for record in runs.records)
        for name in ("transport", "link_class")
    }
    channels = _first(finite(record.effective.get("channels")) for record in runs.records)
    around = {
        name if name in PROVENANCE else f"inherited_{name}": value or None
        for name, value in runs.provenance.items()
        if name != CONNECTIONS
    }
    many = None if channels is None else int(channels)
    first = runs.records[0]
    return {**used, "channels": many, "study": first.study, "hardware": hardware(first), **around}


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _without_usable(study: Study) -> Iterator[Runs]:
    """Yield the cells none of whose runs may be used."""
    known = {(runs.gpus, frozenset(runs.request.items())) for runs in study.runs}
    others: dict[Any, list[Runs]] = {}
    for record in study.excluded:
        one = study.single(record)
        same = one.gpus, frozenset(one.request.items())
        if same not in known:
            others.setdefault(same, []).append(one)
    for runs in others.values():
        yield merged(runs)
