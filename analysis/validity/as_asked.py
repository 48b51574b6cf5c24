"""Checks of whether what ran is what was asked: batches, arithmetic, compilation, weights, bytes, the time of the exchange.

Each function returns None for a record that passes.
"""

import math
from collections.abc import Mapping
from typing import Any

from analysis.validity.check import (
    NOT_REPORTED,
    CheckResult,
    not_applicable,
    unchecked,
    unless_training,
)
from benchmarks.record import Record
from conf import groups
from conf.cell import Cell
from conf.schema import ValidityLimits

# The dtype in which autocast computes, and in which most layers do, by precision; float32 where it is not here.
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = AUTOCAST | {"bf16_weights": "bfloat16"}
ROUNDING = 1e-9  # of a number that is computed another way
# Hooks that send half the bytes.
HALF = ("fp16", "bf16")


def batches_not_distinct(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether ranks trained on the same images, or on one batch again and again."""
    if "batches_differ" not in record.checks:
        return unless_training(record)
    if not record.checks["batches_differ"]:
        return CheckResult(f"several ranks have the same {record.cell.model.inputs}")
    in_turn = record.checks["batches_in_turn"]
    return (
        CheckResult(f"every step has the same {record.cell.model.inputs}") if in_turn < 2 else None
    )


def precision_not_used(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the steps computed in another arithmetic than asked."""
    facts = record.checks.get("arithmetic")
    if facts is None:
        return unless_training(record)
    asked = record.cell.precision
    if facts["autocast"] != AUTOCAST.get(asked):
        return CheckResult(f"precision={asked}, and autocast was {facts['autocast'] or 'off'}")
    if facts["tf32"] != (asked == "tf32"):
        return CheckResult(f"precision={asked}, and TF32 was {'on' if facts['tf32'] else 'off'}")
    layers: Mapping[str, int] = facts["layers"]
    wanted = LAYERS.get(asked, "float32")
    right, every = layers.get(wanted, 0), sum(layers.values())
    if 2 * right < every:
        return CheckResult(
            f"precision={asked}, and {every - right} of {every} layers returned another dtype"
        )
    return None


def not_compiled(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether nothing that torch.compile made took part in the steps, where it was asked."""
    if not record.cell.compiled:
        return not_applicable("this cell was not compiled")
    graphs, arithmetic = record.checks.get("graphs"), record.checks.get("arithmetic")
    if graphs is None:
        return unless_training(record)
    if not (arithmetic or {}).get(
        "compiled_parts", graphs
    ):  # an older record does not say what ran
        return CheckResult("")
    return None if graphs else CheckResult("")


def compiled_while_timed(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether torch.compile made graphs in the timed windows."""
    if not record.cell.compiled:
        return not_applicable("this cell was not compiled")
    graphs = record.checks.get("timed_graphs")
    if graphs is None:
        return unless_training(record)
    return CheckResult(str(graphs)) if graphs else None


def graph_differs(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a replay of the CUDA graph does something else than the same step without one."""
    if not record.cell.graphed:
        return None
    worst = record.checks.get("replay")
    if worst is None:
        return unless_training(record, "no GPU had room for a second copy of the weights")
    error, allowed = float(worst["error"]), float(worst["tolerance"])
    if error <= allowed:
        return None
    step = "" if worst["exchange"] else " without exchange"
    return CheckResult(
        f"the {worst['what']} of {worst['array']} after a step{step}, by {error:.2g}, allowed {allowed:.2g}"
    )


def replays_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a GPU did not replay as many steps as its rank asked for, or ranks asked for different numbers."""
    if not record.cell.graphed:
        return None
    replays = record.checks.get("replays")
    if replays is None:
        return unless_training(record)
    asked = {asked for asked, _ in replays}
    wrong = [
        f"rank {rank} {done} of {asked}"
        for rank, (asked, done) in enumerate(replays)
        if asked != done or not asked
    ]
    if len(asked) > 1:
        wrong = [f"rank {rank} {asked}" for rank, (asked, _) in enumerate(replays)]
    return CheckResult(", ".join(wrong)) if wrong else None


def weights_still(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether weights that should move in the timed steps did not."""
    arrays = record.checks.get("weights_still")
    if arrays is None:
        return unless_training(record)
    if not arrays:
        return None
    share, first = record.checks["weights_still_share"], record.checks["weights_still_first"]
    return CheckResult(
        f"{arrays} arrays with {100 * share:.1f} % of the elements, the first is {first}"
    )


def bytes_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the bytes of the gradient, of the exchange and of its rates are not the same."""
    trained, metrics = record.checks.get("trained_bytes"), record.metrics
    if trained is None:
        return (
            unless_training(record)
            if "comm/exchange_ms" not in metrics
            else unchecked(NOT_REPORTED)
        )
    counted: dict[str, Any] = {
        "the model's gradient_bytes": (record.model.get("gradient_bytes"), trained)
    }
    counted["what came back from the exchange"] = (record.checks.get("exchanged_bytes"), trained)
    seconds = metrics.get("comm/exchange_ms", math.nan) / 1e3
    moved = metrics.get("comm/bytes_moved")
    counted["comm/algbw × time"] = (_bytes(metrics.get("comm/algbw_gb_per_s"), seconds), trained)
    counted["comm/busbw × time"] = (_bytes(metrics.get("comm/busbw_gb_per_s"), seconds), moved)
    counted["comm/bytes_moved"] = (moved, _sent(record.cell, trained))
    wrong = []
    for name, (count, expected) in counted.items():
        if count is None or expected is None:
            continue
        if not math.isclose(count, expected, rel_tol=ROUNDING):
            wrong.append(f"{name} is {count:,.0f} bytes instead of {expected:,.0f}")
    if wrong:
        return CheckResult("; ".join(wrong))
    if moved is not None and not _sends(record.cell):
        strategy = record.cell.strategy["name"]
        return unchecked(f"strategy {strategy} does not declare what it `sends`")
    return None


def _bytes(gb_per_s: float | None, seconds: float) -> float | None:
    if gb_per_s is None:
        return None
    return gb_per_s * 1e9 * seconds


def _sends(cell: Cell) -> str:
    """Return how the strategy of a cell declares its bytes (conf.groups)."""
    declared = cell.declared.get("strategy", {})
    return groups.sends(cell.strategy["name"], cell.strategy, declared)


def _sent(cell: Cell, gradient_bytes: float) -> float | None:
    """Return the bytes that each rank sends in one exchange, as declared; None where unknown."""
    hook = cell.strategy.get("comm_hook", "none")
    sent = gradient_bytes
    if hook in HALF and cell.precision != "bf16_weights":
        sent = gradient_bytes / 2
    elif hook != "none":
        return None
    ranks_here, hosts = len(cell.gpus), max(1, len(cell.hosts))
    between_hosts = _ring(sent / ranks_here, hosts)  # of a rank's share
    by_word = {
        "once": sent,
        "ring": _ring(sent, cell.world_size),
        "two_rings": _ring(sent, ranks_here) + between_hosts,
        "once_and_ring": sent + between_hosts,
    }
    return by_word.get(_sends(cell))


def _ring(sent: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends of an all-reduce."""
    return sent * 2 * (ranks - 1) / ranks
