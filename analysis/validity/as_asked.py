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
from conf.schema import ValidityLimits

# The dtype in which autocast computes, and in which most layers do, by precision; float32 where it is not here.
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = AUTOCAST | {"bf16_weights": "bfloat16"}
# Times its reference above which an exchange was hardly awaited; METHOD.md says why less is possible.
MOST_OF_REFERENCE = 1.2
# Share of a step, and ms, that a CPU worker may spend between steps: what lies there is in no sample.
MOST_BETWEEN, MOST_BETWEEN_MS = 0.02, 0.1
ROUNDING = 1e-9  # of a number that is computed another way
# Strategies whose bytes METHOD.md's table states: those that send the whole gradient once; the others as a ring does.
WHOLE = (
    "kvstore_dist_sync",
    "kvstore_dist_async",
    "kvstore_dist_sync_device",
    "kvstore_dist_async_device",
)
STAGED = (
    "cpu_staged",
    "kvstore_local",
)  # these too; where there are several hosts, a share of it between them as well
RING = ("nccl_allreduce", "kvstore_device")
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
    counted["comm/bytes_moved"] = (moved, _sent(record, trained))
    wrong = [
        f"{name} is {found:,.0f} bytes instead of {right:,.0f}"
        for name, (found, right) in counted.items()
        if found is not None
        and right is not None
        and not math.isclose(found, right, rel_tol=ROUNDING)
    ]
    return CheckResult("; ".join(wrong)) if wrong else None


def _bytes(gb_per_s: float | None, seconds: float) -> float | None:
    return None if gb_per_s is None else gb_per_s * 1e9 * seconds


def _sent(record: Record, gradient_bytes: float) -> float | None:
    """Return the bytes that each rank sends in one exchange by METHOD.md's table; None where it does not say."""
    strategy, n = record.cell.strategy, record.cell.world_size
    hook = strategy.get("comm_hook", "none")
    if hook not in ("none", *HALF) or (hook in HALF and record.cell.precision == "bf16_weights"):
        return None
    sent = gradient_bytes / 2 if hook in HALF else gradient_bytes
    here, hosts = len(record.cell.gpus), max(1, len(record.cell.hosts))
    between_hosts = _ring(sent / here, hosts)  # of a rank's share
    name, staged = strategy["name"], strategy["name"] in STAGED
    if name == "hierarchical" or (staged and strategy.get("staging") == "sharded"):
        return _ring(sent, here) + between_hosts
    if name in RING or (staged and strategy.get("transport") == "gloo"):
        return _ring(sent, n)
    if staged:
        return sent + between_hosts
    return sent if name in WHOLE else None


def _ring(sent: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends of an all-reduce."""
    return sent * 2 * (ranks - 1) / ranks


def faster_than_reference(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchange took so little time that it was hardly awaited."""
    share = record.metrics.get("comm/ideal_ratio")
    if share is None:
        return _no_reference(record)
    name = record.checks.get("reference")
    return (
        CheckResult(f"{share:.2f} times as fast as its reference {name}")
        if not share <= MOST_OF_REFERENCE
        else None
    )


def _no_reference(record: Record) -> CheckResult:
    if "comm/exchange_ms" not in record.metrics:
        return not_applicable("no exchange was timed")
    if not record.cell.benchmark.get("limit_iterations", 1):
        return not_applicable("benchmark.limit_iterations=0: no reference was asked for")
    return unchecked("no reference was measured")


def time_between_steps(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a CPU worker spent time between its steps, which is in no sample."""
    if record.cell.device == "cuda":
        return not_applicable("on GPUs clocks_disagree checks this")
    share, ms = (record.checks.get(f"between_steps_{name}") for name in ("share", "ms"))
    if share is None or ms is None:
        return unless_training(record)
    much = abs(share) > MOST_BETWEEN and abs(ms) > MOST_BETWEEN_MS
    return CheckResult(f"{100 * share:.1f} %, {ms:.2g} ms a step") if much else None
