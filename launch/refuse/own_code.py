"""Refuse code of the user's own that cannot be called as it will be: one process imports it before any rank starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.agent.processes import with_absolute_path
from conf import groups
from conf.cell import SAMPLES, Cell
from conf.options import Refused
from conf.targets import locate_without_torch
from launch.engines.environment import ROOT

STRATEGY, OWN_MODEL = "trainers.strategy.Strategy", "trainers.batches.OwnModel"


def refuse_wrong_code(cells: Sequence[Cell]) -> None:
    """Refuse cells whose model, loader, strategy or benchmark of the user's own cannot be called, or lacks a method.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    calls: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for call in own_calls(cell):
            calls[json.dumps(call)] = call
    if not calls:
        return
    answer = subprocess.run(
        [sys.executable, "-m", "trainers.own_code"],
        cwd=ROOT,
        env=with_absolute_path(os.environ),
        input=json.dumps(list(calls.values())),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        fields = ", ".join(f"{call['field']}={call['target']}" for call in calls.values())
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        raise Refused(f"{fields}: the process that imports it ends ({reason})")
    if sentence := json.loads(answer.stdout):
        raise Refused(sentence)
    for name, exchange in dict.fromkeys(
        (cell.strategy["name"], _own_exchange(cell)) for cell in cells
    ):
        if exchange:
            _refuse_exchange(f"strategy={name}: code.exchange", exchange)


def own_calls(cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield what a rank or a report will call of the user's own code, as trainers.own_code reads it."""
    targets = {group: rules["target"] for group, rules in cell.declared.items()}
    if "model" in targets:
        is_samples = cell.model.inputs == SAMPLES
        keywords = (
            [*cell.model.options] if is_samples else ["classes", "channels", *cell.model.options]
        )
        base = OWN_MODEL if is_samples else ""
        yield _call("model.builder", targets["model"], keywords, "model.options", base)
    if "data" in targets:
        keywords = ["batch_size", "rank", "world_size", "seed", *cell.data["options"]]
        yield _call("data.loader", targets["data"], keywords, "data.options")
    if "strategy" in targets and not _is_ours("strategy", cell):
        keywords = [name for name in cell.strategy if name != "name"]
        field = f"strategy={cell.strategy['name']}: _target_"
        yield _call(field, targets["strategy"], keywords, "the options of its YAML", STRATEGY)
    if "benchmark" in targets and not _is_ours("benchmark", cell):
        field = f"benchmark={cell.benchmark['name']}"
        yield _call(f"{field}: _target_", targets["benchmark"])
        for name in ("derive", "section"):
            if name in cell.declared["benchmark"]:
                yield _call(f"{field}: code.{name}", cell.declared["benchmark"][name])


def _call(
    field: str, target: str, keywords: list[str] | None = None, options: str = "", base: str = ""
) -> dict[str, Any]:
    return {
        "field": field,
        "target": target,
        "keywords": keywords,
        "options": options,
        "base": base,
    }


def _is_ours(group: str, cell: Cell) -> bool:
    name = cell.strategy["name"] if group == "strategy" else cell.benchmark["name"]
    return groups.choice(group, name).is_ours


def _own_exchange(cell: Cell) -> str:
    rules = cell.declared.get("strategy", {})
    return "" if not rules or _is_ours("strategy", cell) else str(rules.get("exchange", ""))


def _refuse_exchange(field: str, dotted: str) -> None:
    from analysis.prediction.strategies import Exchange  # with numpy, which a plan does not need

    try:
        exchange = locate_without_torch(dotted)
    except Refused as error:
        raise Refused(f"{field}={error}") from None
    if not isinstance(exchange, Exchange):
        raise Refused(
            f"{field}={dotted}: accepted is an analysis.prediction.strategies.Exchange, as by_collective returns"
        )
