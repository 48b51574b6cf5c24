"""What a rehearsal (rehearse=) found: which runs would fail on the machine planned for, and why."""

from collections.abc import Sequence
from typing import Any

from analysis.study.names import of_unit, unit_of_cells
from analysis.text import count, single_line
from benchmarks.record import REHEARSAL, Record

RESERVED = "memory/reserved_gib"
SHARDED = ("fsdp", "hsdp", "zero1", "zero2")  # of these a rank alone holds what all share
INTERRUPTED = "interrupted"  # a state of records, and why nothing is known
NO_ROOM = "for lack of memory here"
REASON_LENGTH = 160  # characters, in the sentence


def plan_of(record: Record) -> dict[str, Any]:
    """Return what a record says of the machine that it was rehearsed for; empty for others."""
    return dict(record.environment.get(REHEARSAL, {}))


def trouble(record: Record) -> str:
    """Return why a run would fail on the machine planned for; empty where nothing says so."""
    if record.failure is None or untried(record):
        return "; ".join(record.validity.against.values()) if record.state == "finished" else ""
    return f"{record.failure.cause}: {record.failure.message}"


def untried(record: Record) -> str:
    """Return why nothing is known of a run: interrupted, or too little memory here; else empty."""
    if record.state == INTERRUPTED:
        return INTERRUPTED
    is_oom = record.failure is not None and record.failure.cause == "oom"
    ranks, plan = record.cell.world_size, plan_of(record)
    shards = ranks < plan["gpus"] and record.cell.strategy["name"] in SHARDED
    return NO_ROOM if is_oom and (ranks > plan["present"] or shards) else ""


def memory(record: Record) -> str:
    """Return what a rank held: `17.2 of 139.8 GiB`; empty where it is not known."""
    reserved, of_gpu = record.metrics.get(RESERVED), plan_of(record)["memory_bytes"]
    return f"{reserved:.1f} of {of_gpu / 2**30:.1f} GiB" if reserved and of_gpu else ""


def conclusion(records: Sequence[Record]) -> tuple[str, bool]:
    """Return what a rehearsal found, for people, and whether a run would fail."""
    plan, failing = plan_of(records[0]), []
    for record in filter(trouble, records):
        failing.append(f"{record.name} ({single_line(trouble(record), REASON_LENGTH)})")
    left_open: dict[str, list[str]] = {INTERRUPTED: [], NO_ROOM: []}
    for record in filter(untried, records):
        left_open[untried(record)].append(record.name)
    works = len(records) - len(failing) - sum(map(len, left_open.values()))
    parts = {
        f"{works} of {count(len(records), 'run')} would work on ": count(plan["gpus"], "GPU"),
        "would fail: ": ", ".join(failing),
        "interrupted: ": ", ".join(left_open[INTERRUPTED]),
        f"not tried {NO_ROOM}: ": ", ".join(left_open[NO_ROOM]),
        "a rank holds up to ": memory(max(records, key=lambda r: r.metrics.get(RESERVED, 0.0))),
    }
    line = "; ".join(words + found for words, found in parts.items() if found)
    line = of_unit(line, unit_of_cells(record.cell for record in records))
    return f"{line}; the sweep itself has {plan['sweep']}.", bool(failing)
