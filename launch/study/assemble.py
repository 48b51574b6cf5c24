"""The record of an attempt, made of what its folder holds: cell.json, attempt.json, the lines of the ranks, NCCL's logs."""

import json
from pathlib import Path
from typing import Any

from benchmarks.record import Failure, Record, RecordError, read_lines
from conf.cell import Cell


def assemble(folder: Path, state: str, failure: Failure | None, ended_at: float) -> Record:
    """One Record, not yet judged. The same folder gives the same record.

    Raises:
        RecordError: the folder holds no begun attempt.
    """
    try:
        cell = Cell.from_dict(json.loads((folder / "cell.json").read_text()))
        attempt = json.loads((folder / "attempt.json").read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{folder}: no attempt was begun here ({error})") from None
    result: dict[str, Any] = {}
    ranks: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    for number in range(cell.world_size + cell.servers):
        lines = list(read_lines(folder / "ranks" / f"{number}.jsonl"))
        start = next((line for line in lines if line["kind"] == "start"), None)
        if start is None:
            continue
        facts = {name: value for name, value in start.items() if name not in ("kind", "time", "versions")}
        told = {**facts, "done": any(line["kind"] == "done" for line in lines)}
        (ranks if number < cell.world_size else servers).append(told)
        attempt["environment"].setdefault("versions", start["versions"])
        result = next((line for line in lines if line["kind"] == "result"), result)
    if servers:
        attempt["environment"]["servers"] = servers
    return Record(
        cell_key=cell.key,
        name=cell.name,
        cell=cell.to_dict(),
        state=state,
        failure=failure,
        ended_at=ended_at,
        model=result.get("model", {}),
        metrics=_numbers(result.get("metrics", {})),
        series=result.get("series", {}),
        tables=result.get("tables", {}),
        checks=result.get("checks", {}),
        ranks=ranks,
        **attempt,
    )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
