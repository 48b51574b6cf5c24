"""What the numbers are based on: validity, environment, commands, and every cell."""

import shlex
from collections import Counter, defaultdict
from datetime import datetime, timezone
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import COST, DISAGREEMENT, EXPOSED, HIDDEN, TRACE_EXPOSED
from analysis.findings.record_values import SeveralRecords
from analysis.report.section import RATE, Section, bounded, in_parentheses
from analysis.report.table import Column, Table, metric_column
from analysis.study.estimates import Findings
from analysis.study.names import gpu_ids, run_name, things_of
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import LEFT_OUT, hardware, inherited, mapping
from analysis.study.runs import median_of, named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from benchmarks.record import Record
from conf.cell import compress_hosts

MOST_VALUES = 4  # of one variable that are named
MOST_COMMANDS = 40


def validity(study: Study, findings: Findings) -> Section:
    """Return what was excluded and why, what is marked, and which checks could not run."""
    excluded = []
    for record in study.excluded:
        row = {"cell": run_name(record), "state": _state(record), "why": _reason(record)}
        excluded.append(row)
    for text in study.unreadable:
        excluded.append({"cell": "", "state": "unreadable", "why": text})
    remarks = []
    skipped: Counter[tuple[str, str]] = Counter()
    for record in study.usable:
        verdict = record.validity.verdict
        for code, text in record.validity.codes.items():
            row = {"cell": run_name(record), "verdict": verdict, "code": code, "why": text}
            remarks.append(row)
        skipped.update(record.validity.unchecked.items())
    unchecked = []
    for (code, why), cells in skipped.items():
        unchecked.append({"code": code, "why": why, "cells": cells})
    tables = (
        Table.of(
            "excluded",
            "Left out: failed, interrupted, invalid or unreadable.",
            (Column("cell", "cell"), Column("state", "state"), Column("why", "why")),
            excluded,
        ),
        Table.of(
            "remarks",
            "Cells that count, and what a check found.",
            (
                Column("cell", "cell"),
                Column("verdict", "verdict"),
                Column("code", "code"),
                Column("why", "what was found"),
            ),
            remarks,
            marked=lambda row: row["verdict"] != "valid",
        ),
        Table.of(
            "unchecked",
            "Checks that could not run on cells that count.",
            (Column("code", "check"), Column("why", "why"), Column("cells", "cells", kind="count")),
            unchecked,
        ),
    )
    lines = tuple(single_line(line, 1200) for line in _validity_lines(study))
    return Section("validity", "Validity, and what was left out", lines, tables=tables)


def _validity_lines(study: Study) -> list[str]:
    finished = [record for record in study.records if record.state == "finished"]
    verdicts = Counter(record.validity.verdict for record in finished)
    states = Counter(record.state for record in study.records if record.state != "finished")
    ordered = [*sorted(verdicts.items(), key=lambda item: -item[1]), *sorted(states.items())]
    words = join_words([f"{cells:,} {word}" for word, cells in ordered])
    lines = ["No record could be read."]
    if study.records:
        lines = [f"{count(len(study.records), 'cell')}: {words}."]
    if study.compared:
        lines.append(study.compared)
    unchecked = sum(bool(record.validity.unchecked) for record in finished)
    if unchecked:
        lines.append(f"In {count(unchecked, 'cell')} not every check could run.")
    if study.replaced:
        are = "is" if len(study.replaced) == 1 else "are"
        lines.append(
            f"{count(len(study.replaced), 'other attempt')} at the same cells {are} not counted."
        )
    if len(study.installations) > 1:
        each = [f"{name} ({count(cells, 'cell')})" for name, cells in study.installations.items()]
        lines.append(
            f"The records come from {len(study.installations)} machines or installations, and are "
            "not compared with each other: "
            f"{single_line('; '.join(each), 900)}."
        )
    return lines


def _state(record: Record) -> str:
    return record.validity.said if record.state == "finished" else record.state


def _reason(record: Record) -> str:
    if record.failure is not None:
        rank = f" of rank {record.failure.rank}" if record.failure.rank is not None else ""
        return f"{record.failure.cause}{rank}: {record.failure.message}"
    return "; ".join(record.validity.codes.values())


def environment(study: Study, findings: Findings) -> Section:
    """Return hardware, versions, and the variables that were set."""
    facts: dict[str, Counter[str]] = defaultdict(Counter)
    variables: dict[str, Counter[str]] = defaultdict(Counter)
    from_outside: Counter[str] = Counter()
    for record in study.records:
        for name, value in _facts(record).items():
            facts[name][str(value)] += 1
        for name, value in _variables(record).items():
            variables[name][str(value)] += 1
        from_outside.update(f"{name}={value}" for name, value in inherited(record).items())
    rows = []
    for sort, named_values in (("machine", facts.items()), ("variable", sorted(variables.items()))):
        for name, values in named_values:
            rows.append({"sort": sort, "name": name, "value": _distinct(values)})
    table = Table.of(
        "environment",
        "The machine, the versions and the environment variables of the ranks.",
        (Column("sort", "sort", shown=False), Column("name", "name"), Column("value", "value")),
        rows,
    )
    lines: tuple[str, ...] = ()
    if from_outside:
        words = []
        for setting, cells in from_outside.items():
            words.append(
                setting if cells == len(study.records) else f"{setting} ({count(cells, 'cell')})"
            )
        text = f"Set outside Ringside, and able to change results: {join_words(words)}."
        text += " Cells that differ in it are not compared."
        lines = (single_line(text, 900),)
    return Section("environment", "Environment", lines, tables=(table,))


def _facts(record: Record) -> dict[str, Any]:
    environment = record.environment
    cpu, gpu, versions, git = (
        mapping(environment.get(name)) for name in ("cpu", "gpu", "versions", "git")
    )
    hosts = record.cell.every_host
    memory = cpu.get("memory_bytes")
    starts = dict.fromkeys(str(rank["started"]) for rank in record.ranks if "started" in rank)
    modified = ", modified" if git.get("modified") else ""
    facts = {
        "hardware": hardware(record),
        "ranks were started by": ", ".join(starts),
        "hosts": compress_hosts(sorted(hosts)),
        "host": None if hosts else environment.get("host"),
        "driver": gpu.get("driver"),
        "platform": environment.get("platform"),
        "CPU": cpu.get("model"),
        "cores": cpu.get("cores"),
        "NUMA nodes": environment.get("numa_nodes"),
        "memory": f"{memory / 2**30:,.0f} GiB" if isinstance(memory, int | float) else None,
        **{str(name): version for name, version in versions.items()},
        "Ringside": f"{git['commit']}{modified}" if "commit" in git else None,
        "code that measures": environment.get("code"),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _variables(record: Record) -> dict[str, Any]:
    """Return the variables of the ranks, and the names of those that were left out."""
    left_out = record.environment.get(LEFT_OUT)
    secrets = left_out if isinstance(left_out, list) else ()
    variables = dict(mapping(record.environment.get("variables")))
    return variables | {str(name): "left out: it looks like a secret" for name in secrets}


def _distinct(values: Counter[str]) -> str:
    if len(values) > MOST_VALUES:
        return f"{len(values):,} different values"
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({count(cells, 'cell')})" for value, cells in values.items())


def commands(study: Study, findings: Findings) -> Section:
    """Return the command of each sweep."""
    sweeps = {record.sweep_id: tuple(record.overrides) for record in study.records}
    invocations = Counter(sweeps.values())
    cells = Counter(sweeps[record.sweep_id] for record in study.records)
    lines = []
    for overrides, number in invocations.items():
        command = single_line(shlex.join(["python", "launch.py", *overrides]), 2000)
        several = f", {number} invocations" if number > 1 else ""
        lines.append(f"{command}  # {count(cells[overrides], 'cell')}{several}")
    shown = lines[:MOST_COMMANDS]
    if len(lines) > MOST_COMMANDS:
        shown.append(f"# {len(lines) - MOST_COMMANDS:,} more commands are in the records")
    return Section("commands", "The exact commands", commands=tuple(shown))


def cells(study: Study, findings: Findings) -> Section:
    """Return every cell, failed ones too."""
    several = SeveralRecords(study)
    values = {record.record_id: several.values(record) for record in study.records}

    def effective(record: Record, name: str) -> str:
        value = record.effective.get(name)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")

    def current(key: str, name: str) -> Column:
        """Return the column of a metric that needs other records, by all that the study has now."""
        return metric_column(key, name, lambda record: values[record.record_id].get(name))

    def own(key: str, name: str) -> Column:
        return metric_column(key, name, lambda record: median_of([record], name))

    def with_interval(key: str, name: str, **changes: Any) -> Column:
        return metric_column(
            key, name, lambda record: bounded(study, [record], name), bounded=True, **changes
        )

    def at_equal_clocks(record: Record) -> float | None:
        return values[record.record_id].get(AT_EQUAL_CLOCKS)

    columns = (
        Column("cell", "cell", run_name),
        Column("state", "state", _state),
        Column("codes", "codes", lambda record: ", ".join(record.validity.codes)),
        Column("gpus", "GPUs", lambda record: gpu_ids(record.cell.members), shown=False),
        with_interval("images_per_second", RATE, things=things_of(study)),
        current("efficiency", EFFICIENCY),
        Column(
            "efficiency_at_equal_clocks", "at equal clocks", at_equal_clocks, "share", shown=False
        ),
        Column(
            "sm_mhz", "clock, MHz", lambda record: median_of([record], CLOCK), "count", shown=False
        ),
        with_interval("exchange_ms", "comm/exchange_ms"),
        own("busbw_gb_per_s", "comm/busbw_gb_per_s"),
        with_interval("cost_ms", COST),
        current("exposed_ms", EXPOSED),
        current("hidden_share", HIDDEN),
        own("exposed_by_trace_ms", TRACE_EXPOSED),
        current("difference_ms", DISAGREEMENT),
        Column("transport", "transport", lambda record: effective(record, "transport")),
        Column("link_class", "link class", lambda record: effective(record, "link_class")),
        Column("benchmark", "benchmark", lambda record: named(record, "benchmark"), shown=False),
        Column("started", "started", _started, shown=False),
        Column("record_id", "record", "record_id", shown=False),
    )
    table = Table.of(
        "cells",
        "Every single run, in the order of their start. Its efficiency is against all baselines "
        "that the study has now."
        f"{in_parentheses(study)} Times and record ids are in cells.csv.",
        columns,
        study.records,
        marked=lambda record: not _state(record).startswith("valid"),
    )
    return Section("cells", "Every cell", tables=(table,))


def _started(record: Record) -> str:
    return datetime.fromtimestamp(record.started_at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
