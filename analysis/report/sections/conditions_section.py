"""What the numbers are based on: validity, environment, what cells cost, commands, every cell."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from analysis import cost as parts
from analysis.cost import CellCost, from_record
from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import (
    COST,
    DISAGREEMENT,
    EXPOSED,
    HIDDEN,
    TRACE_EXPOSED,
    SeveralRecords,
)
from analysis.findings.examine import Findings
from analysis.report.numbers import number
from analysis.report.section import RATE, Section, about_costs, about_intervals, bounded, verdict_of
from analysis.report.table import Column, Reader, Table, Value, columns_of, metric_column
from analysis.study.names import gpu_ids, run_name
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import LEFT_OUT, hardware, inherited
from analysis.study.rehearsal import conclusion, memory, plan_of, trouble, untried
from analysis.study.runs import named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from analysis.validity.checks import verdict_words
from analysis.validity.fast_paths import ANSWERS, NO, Answer, answers
from benchmarks.record import REHEARSAL, Record
from conf.cell import compress_hosts

BUSBW = "comm/busbw_gb_per_s"
MOST_VALUES = 4  # of one variable that are named
MOST_COMMANDS = 40


def validity(study: Study, findings: Findings) -> Section:
    """Return what was excluded and why, what is marked, and which checks could not run."""
    excluded, remarks, unchecked = [], [], []
    for record in filter(lambda each: each.validity.verdict != REHEARSAL, study.excluded):
        why = "; ".join(record.validity.codes.values())
        if record.failure is not None:
            why = f"{record.failure.cause}: {record.failure.message}"
            if record.failure.rank is not None:
                failure = record.failure
                why = f"{failure.cause} of rank {failure.rank}: {failure.message}"
        excluded.append({"cell": run_name(record), "state": _state(record), "why": why})
    for text in study.unreadable:
        excluded.append({"cell": "", "state": "unreadable", "why": text})
    skipped: Counter[tuple[str, str]] = Counter()
    for record in study.usable:
        for code, text in record.validity.codes.items():
            verdict = verdict_of([record]) or "valid"
            row = {"cell": run_name(record), "verdict": verdict, "code": code, "why": text}
            remarks.append(row)
        skipped.update(record.validity.unchecked.items())
    for (code, why), cells in skipped.items():
        unchecked.append({"code": code, "why": why, "cells": cells})
    tables = (
        Table.of(
            "excluded",
            "Left out: failed, interrupted, invalid or unreadable.",
            columns_of(cell="run", state="state", why="why"),
            excluded,
        ),
        Table.of(
            "remarks",
            "Runs that count, and what a check found.",
            columns_of(cell="run", verdict="verdict", code="code", why="what was found"),
            remarks,
            marked=lambda row: not row["verdict"].startswith("valid"),
        ),
        Table.of(
            "unchecked",
            "Checks that could not be made on runs that count.",
            columns_of(code="check", why="why") + columns_of("count", cells="runs"),
            unchecked,
        ),
    )
    lines = tuple(single_line(line, 1200) for line in _validity_lines(study))
    return Section("validity", "Validity, and what was left out", lines, tables=tables)


def _validity_lines(study: Study) -> list[str]:
    verdicts: Counter[str] = Counter()
    states: Counter[str] = Counter()
    unchecked = 0
    for record in study.records:
        if record.state == "finished":
            verdicts[record.validity.verdict] += 1
            unchecked += bool(record.validity.unchecked)
        else:
            states[record.state] += 1
    words = []
    for word, cells in (*verdicts.most_common(), *sorted(states.items())):
        words.append(f"{cells:,} {word}")
    lines = ["No record could be read."]
    if words:
        lines = [f"{count(len(study.records), 'run')}: {join_words(words)}."]
    if study.compared:
        lines.append(study.compared)
    if unchecked:
        lines.append(f"Not every check could be made on {count(unchecked, 'run')}.")
    if study.replaced:
        attempts = "other attempt at the same runs is", "other attempts at the same runs are"
        lines.append(f"{count(len(study.replaced), *attempts)} not counted.")
    if len(study.installations) > 1:
        each = [f"{name} ({count(cells, 'run')})" for name, cells in study.installations.items()]
        lines.append(
            f"The records come from {len(study.installations)} machines or installations, and are "
            f"not compared with each other: {single_line('; '.join(each), 900)}."
        )
    return lines


def _state(record: Record) -> str:
    if record.state == "finished":
        return verdict_words(record)
    return record.state


def rehearsal(study: Study, findings: Findings) -> Section | None:
    """Return what would fail on the machine planned for; None for a study that was measured."""
    records = list(filter(plan_of, study.records))
    if not records:
        return None
    columns = (
        Column("cell", "run", run_name),
        Column("batch", "batch", lambda record: record.cell.batch_size or None, "count"),
        Column("whole", "of", lambda record: plan_of(record)["batch_size"] or None, "count"),
        Column("state", "state", "state"),
        Column("nccl", "NCCL", lambda record: record.effective.get("nccl", {}).get("version")),
        Column("memory", "a rank held", memory),
        Column("trouble", "would fail because", trouble),
        Column("untried", "not tried", untried),
    )
    caption = "Every run as it was tried: less than the whole batch where ranks shared a device."
    table = Table.of("rehearsal", caption, columns, records, marked=lambda row: bool(trouble(row)))
    return Section("rehearsal", "Would it run?", tables=(table,), finding=conclusion(records)[:1])


def fast_paths(study: Study, findings: Findings) -> Section | None:
    """Return which fast paths engaged of those that were asked for; None where none was."""
    return fast_path_section([answer for record in study.usable for answer in answers(record)])


def fast_path_section(answered: Iterable[Answer]) -> Section | None:
    """Return a table of the answers of all runs; None where there is none."""
    rows: dict[tuple[str, ...], list[Answer]] = defaultdict(list)  # by path, request and answer
    for answer in answered:
        rows[answer[:3]].append(answer)
    columns = (
        Column("path", "fast path", lambda row: row[0].path),
        Column("asked", "asked for by", lambda row: row[0].asked),
        Column("answer", "did it engage?", lambda row: row[0].answer),
        Column("runs", "runs", len, "count"),
        Column("line", "what proves it, in the first of them", lambda row: row[0].line),
    )
    worst_first = sorted(rows.values(), key=lambda row: ANSWERS.index(row[0].answer))
    caption = "Fast paths that were asked for, and whether they engaged."
    table = Table.of("fast_paths", caption, columns, worst_first, lambda row: row[0].answer == NO)
    return Section("fast_paths", "Fast paths", tables=(table,)) if rows else None


def environment(study: Study, findings: Findings) -> Section:
    """Return hardware, versions, and the variables that were set."""
    facts: dict[str, Counter[str]] = defaultdict(Counter)
    variables: dict[str, Counter[str]] = defaultdict(Counter)
    from_outside: Counter[str] = Counter()
    for record in study.records:
        for name, value in _facts(record).items():
            if value not in (None, ""):
                facts[name][str(value)] += 1
        for name, value in record.environment.get("variables", {}).items():
            variables[name][str(value)] += 1
        for name in record.environment.get(LEFT_OUT) or ():
            variables[str(name)]["left out: it looks like a secret"] += 1
        for name, value in inherited(record).items():
            from_outside[f"{name}={value}"] += 1
    rows = []
    for sort, by_name in (("machine", facts), ("variable", dict(sorted(variables.items())))):
        for name, values in by_name.items():
            text = "; ".join(f"{value} ({count(cells, 'run')})" for value, cells in values.items())
            if len(values) > MOST_VALUES:
                text = f"{len(values):,} different values"
            elif len(values) == 1:
                text = next(iter(values))
            rows.append({"sort": sort, "name": name, "value": text})
    table = Table.of(
        "environment",
        "The machine, the versions and the environment variables of the ranks.",
        (Column("sort", "sort", shown=False), Column("name", "name"), Column("value", "value")),
        rows,
    )
    words = []
    for setting, cells in from_outside.items():
        if cells < len(study.records):
            setting += f" ({count(cells, 'run')})"
        words.append(setting)
    lines: tuple[str, ...] = ()
    if words:
        text = (
            f"Set outside Ringside, and able to change results: {join_words(words)}. Runs that "
            "differ in it are not compared."
        )
        lines = (single_line(text, 900),)
    return Section("environment", "Environment", lines, tables=(table,))


def _facts(record: Record) -> dict[str, Any]:
    environment = record.environment
    cpu, gpu = environment.get("cpu", {}), environment.get("gpu", {})
    versions, git = environment.get("versions", {}), environment.get("git", {})
    hosts, memory = record.cell.every_host, cpu.get("memory_bytes")
    commit = str(git.get("commit") or "")
    if memory is not None:
        memory = f"{memory / 2**30:,.0f} GiB"
    starts: dict[str, None] = {}
    for rank in record.ranks:
        if "started" in rank:
            starts[str(rank["started"])] = None
    if commit and git.get("modified"):
        commit += ", modified"
    return {
        "hardware": hardware(record),
        "ranks were started by": ", ".join(starts),
        "hosts": compress_hosts(sorted(hosts)),
        "host": None if hosts else environment.get("host"),
        "driver": gpu.get("driver"),
        "platform": environment.get("platform"),
        "CPU": cpu.get("model"),
        "cores": cpu.get("cores"),
        "NUMA nodes": environment.get("numa_nodes"),
        "memory": memory,
        **versions,
        "Ringside": commit,
        "code that measures": environment.get("code"),
    }


def commands(study: Study, findings: Findings) -> Section:
    """Return the command of each sweep."""
    sweeps = {record.sweep_id: tuple(record.overrides) for record in study.records}
    cells = Counter(sweeps[record.sweep_id] for record in study.records)
    lines = []
    for overrides, invocations in Counter(sweeps.values()).items():
        command = single_line(shlex.join(["python", "launch.py", *overrides]), 2000)
        line = f"{command}  # {count(cells[overrides], 'run')}"
        if invocations > 1:
            line += f", {invocations} invocations"
        lines.append(line)
    left = len(lines) - MOST_COMMANDS
    if left > 0:
        lines[MOST_COMMANDS:] = [f"# {left:,} more commands are in the records"]
    return Section("commands", "The exact commands", commands=tuple(lines))


def cells(study: Study, findings: Findings) -> Section:
    """Return every run, failed ones too."""
    several = SeveralRecords(study)
    values = {record.record_id: several.values(record) for record in study.records}

    def effective(key: str) -> Reader:
        def read(record: Record) -> str:
            value = record.effective.get(key)
            if isinstance(value, list):
                return ", ".join(map(str, value))
            return str(value or "")

        return read

    def current(name: str) -> Reader:
        """Return a metric that needs other records, by all that the study has now."""
        return lambda record: values[record.record_id].get(name)

    def own(name: str) -> Reader:
        return lambda record: record.metrics.get(name)

    def with_interval(key: str, name: str) -> Column:
        return metric_column(key, name, lambda record: bounded(study, record, name), bounded=True)

    def started(record: Record) -> str:
        at = datetime.fromtimestamp(record.started_at, timezone.utc)
        return at.strftime("%Y-%m-%d %H:%M:%S")

    columns = (
        Column("cell", "run", run_name),
        with_interval("images_per_second", RATE),
        metric_column("efficiency", EFFICIENCY, current(EFFICIENCY)),
        Column("state", "state", _state),
        Column("codes", "codes", lambda record: ", ".join(record.validity.codes)),
        Column("gpus", "GPUs", lambda record: gpu_ids(record.cell.members), shown=False),
        Column("efficiency_at_equal_clocks", "", current(AT_EQUAL_CLOCKS), "share", shown=False),
        Column("sm_mhz", "", own(CLOCK), "count", shown=False),
        with_interval("exchange_ms", "comm/exchange_ms"),
        metric_column("busbw_gb_per_s", BUSBW, own(BUSBW)),
        with_interval("cost_ms", COST),
        metric_column("exposed_ms", EXPOSED, current(EXPOSED)),
        metric_column("hidden_share", HIDDEN, current(HIDDEN)),
        metric_column("exposed_by_trace_ms", TRACE_EXPOSED, own(TRACE_EXPOSED)),
        metric_column("difference_ms", DISAGREEMENT, current(DISAGREEMENT)),
        Column("transport", "transport", effective("transport")),
        Column("link_class", "link class", effective("link_class")),
        Column("benchmark", "", lambda record: named(record, "benchmark"), shown=False),
        Column("started", "", started, shown=False),
        Column("record_id", "", "record_id", shown=False),
    )
    table = Table.of(
        "cells",
        f"Every run, in the order of their start.{about_intervals(study)}{about_costs(study)} "
        "Times and record ids are in cells.csv.",
        columns,
        study.records,
        marked=lambda record: not _state(record).startswith("valid"),
    )
    return Section("cells", "Every run", tables=(table,))


# Parts that stand together. The last two are of older records.
TOGETHER = {
    parts.SETTLE: "start", parts.SPAWN: "start", parts.IMPORTS: "start", parts.CONTEXT: "start",
    parts.CONNECT: "start", "build": "start", "first step": "first_step", "warm-up": "warm_up",
    parts.EXIT: "end", "take over": "start", "give back": "end",
}  # fmt: skip
MEASURED, OTHER = "measured", "checks_and_gaps"


def costs(study: Study, findings: Findings) -> Section | None:
    """Return where the wall time of every cell went; None where no record tells."""
    records, totals, measuring = [], [], []
    for record in study.records:
        cost = from_record(record)
        if cost.parts:
            records.append(record)
            totals.append(cost.total)
            measuring.append(cost.measuring or 0.0)
    if not records:
        return None
    total = math.fsum(totals)
    share = number(math.fsum(measuring) / total, "share")
    line = f"{count(len(records), 'run')} took {number(total)} s, {share} of it spent measuring."
    return Section("costs", "Time that the runs took", (line,), tables=(costs_table(records),))


def costs_table(records: Sequence[Record]) -> Table:
    """Return the seconds of each cell; parts that belong together stand as one."""
    rows = []
    for record in records:
        cost = from_record(record)
        row: dict[str, Value] = {"cell": run_name(record), "record_id": record.record_id}
        rows.append(row | together(cost) | {"seconds": cost.total, "overhead_ratio": cost.ratio})
    columns = [
        *columns_of(cell="run"),
        *columns_of("ms", start="start", first_step="first step", warm_up="warm-up"),
        *columns_of("ms", measured="measured", checks_and_gaps="checks and gaps", end="end"),
        *columns_of("ms", seconds="total"),
        *columns_of("ratio", overhead_ratio="ratio"),
        Column("record_id", "record", shown=False),
    ]
    caption = "Wall time of each run, in seconds. Ratio: wall time for each second of measuring."
    return Table.of("costs", caption, columns, rows)


def together(cost: CellCost) -> dict[str, Value]:
    """Return the seconds of a cell by the columns of the table; without `measured` if not known."""
    seconds: dict[str, float] = {}
    for part, of_part in cost.parts.items():
        key = TOGETHER.get(part, OTHER)
        seconds[key] = seconds.get(key, 0.0) + of_part
    if cost.measuring is not None:
        seconds[MEASURED] = cost.measuring
        seconds[OTHER] = max(0.0, seconds.get(OTHER, 0.0) - cost.measuring)
    return dict(seconds)
