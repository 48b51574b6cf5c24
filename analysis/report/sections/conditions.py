"""Sections on what the numbers are based on: validity, environment, commands, and every cell."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import COST, DISAGREEMENT, EXPOSED, HIDDEN, TRACE_EXPOSED
from analysis.findings.record_values import SeveralRecords
from analysis.report.measured_values import RATE, bounded, in_parentheses
from analysis.report.section import Section
from analysis.report.tables import Column, Table, Value, metric_column
from analysis.study.estimates import Estimate, Findings
from analysis.study.intervals import half_width
from analysis.study.names import gpu_ids, run_name, things_of, unit_of
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import LEFT_OUT, hardware, inherited, mapping
from analysis.study.study import Study, middle, named
from analysis.text import count, join_words, single_line
from benchmarks.record import Record
from benchmarks.record.metrics import metric
from conf.cell import folded

DIFFERENT = 4  # values of one variable that are named


def validity(study: Study, findings: Findings) -> Section:
    """Return what was excluded and why, what is marked, and which checks could not run."""
    finished = [record for record in study.records if record.state == "finished"]
    verdicts = Counter(record.validity.verdict for record in finished)
    states = Counter(record.state for record in study.records if record.state != "finished")
    said = [
        f"{n:,} {word}"
        for word, n in [
            *sorted(verdicts.items(), key=lambda item: -item[1]),
            *sorted(states.items()),
        ]
    ]
    lines = [
        f"{count(len(study.records), 'cell')}: {join_words(said)}."
        if study.records
        else "No record could be read."
    ]
    if study.compared:
        lines.append(study.compared)
    if late := sum(bool(record.validity.unchecked) for record in finished):
        lines.append(f"In {count(late, 'cell')} not every check could run.")
    if study.replaced:
        others = len(study.replaced)
        lines.append(
            f"{count(others, 'other attempt')} at the same cells {'is' if others == 1 else 'are'} not counted."
        )
    if len(study.installations) > 1:
        each = [f"{name} ({count(cells, 'cell')})" for name, cells in study.installations.items()]
        lines.append(
            f"The records come from {len(study.installations)} machines or installations, and are not compared with each other: "
            f"{single_line('; '.join(each), 900)}."
        )
    excluded = tuple(
        (run_name(record), _status(record), _reason(record)) for record in study.excluded
    )
    excluded += tuple(("", "unreadable", text) for text in study.unreadable)
    remarks = tuple(
        (run_name(record), record.validity.verdict, code, sentence)
        for record in study.usable for code, sentence in record.validity.codes.items()
    )  # fmt: skip
    skipped = Counter(
        (code, why) for record in study.usable for code, why in record.validity.unchecked.items()
    )
    return Section(
        "validity", "Validity, and what was left out", tuple(single_line(line, 1200) for line in lines), place=90,
        tables=(
            Table(
                "excluded", "Left out: failed, interrupted, invalid or unreadable.",
                (Column("cell", "cell"), Column("state", "state"), Column("why", "why")), excluded,
            ),
            Table(
                "remarks", "Cells that count, and what a check found.",
                (Column("cell", "cell"), Column("verdict", "verdict"), Column("code", "code"), Column("why", "what was found")),
                remarks, frozenset(place for place, row in enumerate(remarks) if row[1] != "valid"),
            ),
            Table(
                "unchecked", "Checks that could not run on cells that count.",
                (Column("code", "check"), Column("why", "why"), Column("cells", "cells", "count")),
                tuple((code, why, cells) for (code, why), cells in skipped.items()),
            ),
        ),
    )  # fmt: skip


def _status(record: Record) -> str:
    return record.validity.said if record.state == "finished" else record.state


def _reason(record: Record) -> str:
    if record.failure is not None:
        rank = f" of rank {record.failure.rank}" if record.failure.rank is not None else ""
        return f"{record.failure.cause}{rank}: {record.failure.message}"
    return "; ".join(record.validity.codes.values())


def environment(study: Study, findings: Findings) -> Section:
    """Return hardware, versions, and the variables that were set."""
    rows = []
    for label, group in (("", _facts), ("variable", _variables)):
        values: dict[str, Counter[str]] = defaultdict(Counter)
        for record in study.records:
            for name, value in group(record).items():
                values[name][str(value)] += 1
        for name in values if group is _facts else sorted(values):
            rows.append((label or "machine", name, _distinct(values[name])))
    table = Table(
        "environment", "The machine, the versions and the environment variables of the ranks.",
        (Column("sort", "sort", shown=False), Column("name", "name"), Column("value", "value")), tuple(rows),
    )  # fmt: skip
    return Section("environment", "Environment", _inherited(study), tables=(table,), place=100)


def _inherited(study: Study) -> tuple[str, ...]:
    """Return a sentence on the variables that came from around the launcher and may change results."""
    found = Counter(
        f"{name}={value}" for record in study.records for name, value in inherited(record).items()
    )
    words = [
        one if cells == len(study.records) else f"{one} ({count(cells, 'cell')})"
        for one, cells in found.items()
    ]
    if not words:
        return ()
    return (
        single_line(
            f"Set outside Ringside, and able to change results: {join_words(words)}. Cells that differ in it are not compared.",
            900,
        ),
    )


def _facts(record: Record) -> dict[str, Any]:
    known = record.environment
    cpu, gpu, versions, git = (
        mapping(known.get(name)) for name in ("cpu", "gpu", "versions", "git")
    )
    hosts = record.cell.every_host
    memory = cpu.get("memory_bytes")
    facts = {
        "hardware": hardware(record),
        "ranks were started by": ", ".join(dict.fromkeys(str(one["started"]) for one in record.ranks if "started" in one)),
        "hosts": folded(sorted(hosts)), "host": None if hosts else known.get("host"),
        "driver": gpu.get("driver"), "platform": known.get("platform"),
        "CPU": cpu.get("model"), "cores": cpu.get("cores"), "NUMA nodes": known.get("numa_nodes"),
        "memory": f"{memory / 2**30:,.0f} GiB" if isinstance(memory, int | float) else None,
        **{str(name): version for name, version in versions.items()},
        "Ringside": f"{git['commit']}{', modified' if git.get('modified') else ''}" if "commit" in git else None,
        "code that measures": known.get("code"),
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _variables(record: Record) -> Mapping[str, Any]:
    names = record.environment.get(LEFT_OUT)
    left_out = {
        str(name): "left out: it looks like a secret"
        for name in (names if isinstance(names, list) else ())
    }
    return {**mapping(record.environment.get("variables")), **left_out}


def _distinct(values: Counter[str]) -> str:
    if len(values) > DIFFERENT:
        return f"{len(values):,} different values"
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({count(cells, 'cell')})" for value, cells in values.items())


def commands(study: Study, findings: Findings) -> Section:
    """Return the command of each sweep."""
    sweeps = {record.sweep_id: tuple(record.overrides) for record in study.records}
    typed = Counter(sweeps.values())
    cells = Counter(sweeps[record.sweep_id] for record in study.records)
    lines = [
        f"{single_line(shlex.join(['python', 'launch.py', *overrides]), 2000)}  # {count(cells[overrides], 'cell')}"
        + (f", {n} invocations" if n > 1 else "")
        for overrides, n in typed.items()
    ]
    shown = lines[:40] + (
        [f"# {len(lines) - 40:,} more commands are in the records"] if len(lines) > 40 else []
    )
    return Section("commands", "The exact commands", commands=tuple(shown), place=110)


def cells(study: Study, findings: Findings) -> Section:
    """Return every cell, failed ones too."""
    rows: list[tuple[Value, ...]] = []
    several = SeveralRecords(study)
    for record in study.records:
        rate: Estimate | None = bounded(study, [record], RATE)
        now = several.values(record)
        rows.append((
            run_name(record), _status(record), ", ".join(record.validity.codes),
            gpu_ids(record.cell.members), rate,
            now.get(EFFICIENCY), now.get(AT_EQUAL_CLOCKS), middle([record], CLOCK),
            bounded(study, [record], "comm/exchange_ms"),
            middle([record], "comm/busbw_gb_per_s"), bounded(study, [record], COST), now.get(EXPOSED), now.get(HIDDEN),
            middle([record], TRACE_EXPOSED), now.get(DISAGREEMENT),
            _text(record.effective.get("transport")), _text(record.effective.get("link_class")),
            named(record, "benchmark"), datetime.fromtimestamp(record.started_at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            record.record_id,
        ))  # fmt: skip
    table = Table(
        "cells", "Every single run, in the order of their start. Its efficiency is against all baselines that the study has now."
        f"{in_parentheses(study)} Times and record ids are in cells.csv.",
        (
            Column("cell", "cell"), Column("state", "state"), Column("codes", "codes"),
            Column("gpus", "GPUs", shown=False),
            metric_column("images_per_second", RATE, bounded=True, things=things_of(study)),
            metric_column("efficiency", "scaling/efficiency"),
            Column("efficiency_at_equal_clocks", "at equal clocks", "share", shown=False),
            Column("sm_mhz", "clock, MHz", "count", shown=False),
            metric_column("exchange_ms", "comm/exchange_ms", bounded=True),
            metric_column("busbw_gb_per_s", "comm/busbw_gb_per_s"),
            metric_column("cost_ms", COST, bounded=True), metric_column("exposed_ms", EXPOSED),
            metric_column("hidden_share", HIDDEN),
            metric_column("exposed_by_trace_ms", TRACE_EXPOSED), metric_column("difference_ms", DISAGREEMENT),
            Column("transport", "transport"),
            Column("link_class", "link class"), Column("benchmark", "benchmark", shown=False),
            Column("started", "started", shown=False), Column("record_id", "record", shown=False),
        ),
        tuple(rows), frozenset(place for place, row in enumerate(rows) if not str(row[2]).startswith("valid")),
    )  # fmt: skip
    return Section("cells", "Every cell", tables=(table,), place=120)


def noise(study: Study, findings: Findings) -> Section | None:
    """Return the noise floors that the intervals of the study rest on."""
    names = dict.fromkeys(
        [rate.metric for rate in study.rates] + ["strategy/cost_ms", "comm/exchange_ms"]
    )
    rows: list[tuple[Value, ...]] = []
    for name in names:
        of_group = {runs.group: runs for runs in study.runs if runs.values(name)}
        for group, runs in sorted(of_group.items()):
            floor, entry = runs.floor(name), metric(name)
            if floor is None:
                continue
            half = half_width(floor, 1)
            rows.append((
                named(runs.records[0], "model" if runs.trains else "benchmark"), group.batch_size or None, group.precision,
                group.optimize, group.world_size, single_line(entry.title),
                None if entry.signed else math.expm1(half), half if entry.signed else None,
                entry.unit if entry.signed else "", floor.runs, floor.freedom,
            ))  # fmt: skip
    table = Table(
        "noise_floor", "How far one more run may lie from a single run, 95 times in 100, by runs of equal cells here.",
        (
            Column("model", "model"), Column("batch_size", "batch", "count"), Column("precision", "precision"),
            Column("optimize", "optimize"), Column("world_size", unit_of(study), "count"), Column("metric", "metric"),
            Column("half_share", "±", "part"), Column("half", "± in its unit", "number"), Column("unit", "unit"),
            Column("runs", "runs", "count"), Column("freedom", "degrees of freedom", "count"),
        ),
        tuple(rows),
    )  # fmt: skip
    return Section("noise", "The noise floor", tables=(table,), place=85) if rows else None


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


SECTIONS = (noise, validity, environment, commands, cells)
