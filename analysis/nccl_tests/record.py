"""Read the tables of a record.json of `benchmark=collectives`: Ringside's own runs, in the form of nccl-tests' runs."""

import json
import re
from collections.abc import Mapping
from typing import Any

from analysis.foreign import damage_told, table_of
from analysis.nccl_tests.json_output import number, whole_number
from analysis.nccl_tests.run import Measured, Row, Run
from benchmarks.collectives.busbw import NCCL_TESTS_COLLECTIVES

_ITERATION = ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct")


def record_in(text: str) -> dict[str, Any] | None:
    """Return the record that a text holds; None where it is no record of Ringside's."""
    if '"cell_key"' not in text:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "cell_key" in content else None


def read_record(content: Mapping[str, Any]) -> list[Run]:
    """Return the runs of a record, not yet annotated. Raises UnreadableInput where it has none, or is damaged."""
    table = table_of(content, "nccl-tests")
    with damage_told("nccl-tests"):
        return [_run(one, content) for one in table["runs"]]


def _run(one: Mapping[str, Any], content: Mapping[str, Any]) -> Run:
    run, cell = Run(1, digits=5e-7), content["cell"]
    known = NCCL_TESTS_COLLECTIVES.get(one["collective"])
    run.program = None if known is None else known.program
    versions = (content.get("environment") or {}).get("versions") or {}
    run.nccl_version = str(versions["nccl"]) if versions.get("nccl") else None
    run.environment = {
        str(name): str(value)
        for name, value in cell["nccl"].items()
        if re.fullmatch(r"NCCL_[A-Z0-9_]+", name)
    }
    gpus = cell["gpus"] * max(1, len(cell.get("hosts", ())))
    run.listed = [(0, rank) for rank in range(len(gpus))]
    run.devices = [
        {
            "rank": place,
            "device": whole_number(gpu),
            **({"name": str(rank["name"])} if "name" in rank else {}),
        }
        for place, (gpu, rank) in enumerate(zip(gpus, content["ranks"], strict=False))
    ]
    run.rows = [_row(row) for row in one["rows"]]
    run.avg_busbw = number(one["avg_busbw"])
    return run


def _row(row: Mapping[str, Any]) -> Row:
    root, redop = row["root"], row["redop"]
    out, within = (_measured(row[place]) for place in ("out_of_place", "in_place"))
    named = None if redop is None else str(redop)
    kind, count = str(row["dtype"]), whole_number(row["count"])
    return Row(
        whole_number(row["bytes"]),
        count,
        kind,
        named,
        None if root is None else whole_number(root),
        out,
        within,
    )


def _measured(one: Mapping[str, Any] | None) -> Measured | None:
    if one is None:
        return None
    wrong = one.get("wrong")
    time, algbw, busbw = (number(one[name]) for name in ("time_us", "algbw", "busbw"))
    iterations = one.get("per_iteration")
    kept = (
        {name: number(iterations[name]) for name in _ITERATION if name in iterations}
        if iterations
        else None
    )
    return Measured(
        time, algbw, busbw, None if wrong is None else whole_number(wrong), per_iteration=kept
    )
