"""Checks of what a cell computed, and of whether what ran is what was asked.

Each function returns None for a record that passes.
"""

import math
from collections.abc import Sequence

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

# The dtype in which autocast computes, and most layers do, by precision; float32 where it is not
# here.
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = AUTOCAST | {"bf16_weights": "bfloat16"}
ROUNDING = 1e-9  # of a number that is computed another way
HALF = ("fp16", "bf16")  # hooks that send half the bytes
MOST_NAMED = 3  # things that a sentence names


# Who ran


def missing_rank(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks that did not finish."""
    missing = set(range(record.cell.world_size))
    missing -= {rank["rank"] for rank in record.ranks if rank.get("done")}
    if not missing:
        return None
    return CheckResult(", ".join(map(str, sorted(missing))))


def wrong_gpu(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks that ran on another GPU than planned."""
    planned = record.environment.get("planned_uuids")
    if not planned:
        if record.cell.device == "cuda":
            return unchecked("no UUID was planned")
        return not_applicable("CPU workers have no GPU UUID")
    reported = {rank["rank"]: rank.get("uuid", "unknown") for rank in record.ranks}
    wrong = []
    for rank, uuid in enumerate(planned):
        if rank in reported and reported[rank] != uuid:
            wrong.append(f"rank {rank} ran on {reported[rank]} instead of {uuid}")
    if not wrong:
        return None
    return CheckResult("; ".join(wrong))


def wrong_peers(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks of several hosts that met others than were started: host, process or GPU differ.

    What the ranks told each other over the network is compared with what each one wrote, which came
    through the agent of its own host, and with the plan.
    """
    cell, rows = record.cell, record.checks.get("peers")
    if not cell.hosts:
        return None
    if rows is None:
        if len(cell.every_host) > 1:
            return unchecked("no rank wrote whom it met")
        return not_applicable("all ranks are on one host")
    planned = record.environment.get("planned_uuids") or []
    reports = {rank["rank"]: rank for rank in record.ranks}
    wrong = []
    for rank, member in enumerate(cell.places[: cell.world_size]):
        met = [row[1:] for row in rows if row[0] == rank]
        report = reports.get(rank, {})
        started = [report.get("node"), report.get("pid"), report.get("uuid")]
        if len(met) != 1 or met[0] != started:
            peer = _peer(met[0] if met else [])
            wrong.append(f"rank {rank} is {peer}, and {_peer(started)} was started")
            continue
        has_wrong_gpu = rank < len(planned) and planned[rank] not in (None, started[2])
        if started[0] != member.host or has_wrong_gpu:
            wrong.append(f"rank {rank} is {_peer(started)}, and host {member.host} was planned")
    if len(rows) != cell.world_size:
        wrong.append(f"{len(rows)} ranks met, and {cell.world_size} were started")
    if not wrong:
        return None
    return CheckResult("; ".join(wrong[:MOST_NAMED]))


def _peer(facts: Sequence[object]) -> str:
    """Return what a rank is in words; nobody where nothing is known of it."""
    host, pid, uuid = (*facts, None, None, None)[:3]
    words = []
    if host:
        words.append(f"host {host}")
    if pid:
        words.append(f"process {pid}")
    if uuid:
        words.append(str(uuid))
    return ", ".join(words) or "nobody"


# Weights, gradients and losses


def replicas_differ(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the ranks ended with different weights."""
    if "replicas_equal" not in record.checks:
        return _not_compared(record)
    if record.checks["replicas_equal"]:
        return None
    return CheckResult("")


def gradient_not_mean(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchanged gradient differs from the mean of the local gradients."""
    facts = record.checks
    if "gradient_error" not in facts:
        return _not_compared(record)
    error, tolerance = facts["gradient_error"], facts["gradient_tolerance"]
    if not error <= tolerance:  # also NaN
        return CheckResult(f"relative error {error:.2g}, allowed {tolerance:.2g}")
    worst = facts.get("gradient_worst")
    if worst is not None and not worst["error"] <= worst["tolerance"]:
        return CheckResult(
            f"relative error of {worst['array']} {worst['error']:.2g}, "
            f"allowed {worst['tolerance']:.2g}"
        )
    if not facts["gradient_spread"] > 2 * max(error, tolerance):
        return unchecked("the ranks' gradients are too similar to tell their mean from one of them")
    return None


def _not_compared(record: Record) -> CheckResult:
    if record.cell.world_size == 1:
        return not_applicable("there is only one rank, so nothing to compare")
    if record.cell.benchmark["name"] != "throughput":
        return not_applicable("this benchmark trains nothing")
    strategy = record.cell.strategy["name"]
    return not_applicable(
        f"strategy {strategy} does not keep the weights equal, or its compression loses precision"
    )


def exchange_wrong(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchange of known gradients differs from their mean."""
    error = record.checks.get("exchange_error")
    tolerance = record.checks.get("exchange_tolerance")
    if error is None or tolerance is None:
        if "comm/exchange_ms" not in record.metrics:
            return not_applicable("no exchange was timed")
        if record.cell.benchmark["name"] != "exchange" and "exchanged_bytes" not in record.checks:
            return unchecked(NOT_REPORTED)
        return not_applicable("its compression loses precision")
    if error <= tolerance:
        return None
    return CheckResult(f"relative error {error:.2g}, allowed {tolerance:.2g}")  # also NaN


def loss_not_finite(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks whose loss is infinite or NaN."""
    losses = record.checks.get("losses")
    if not losses:
        return unless_training(record, "no loss was reported")
    ranks = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if not ranks:
        return None
    return CheckResult(", ".join(ranks))


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


# Copies, collectives and solutions


def copy_wrong(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find copies of benchmark=p2p with wrong elements."""
    if not record.checks.get("copies_compared"):
        if record.cell.benchmark["name"] == "p2p":
            return unchecked("no copy was compared")
        return None
    wrong = [f"{count} elements of {name}" for name, count in record.checks["copies_wrong"].items()]
    if not wrong:
        return None
    if len(wrong) > MOST_NAMED:
        wrong = [*wrong[:MOST_NAMED], "…"]
    return CheckResult(", ".join(wrong))


def entry_not_positive(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find matrices of benchmark=p2p with an entry that is not a positive number."""
    matrices = record.tables.get("p2p", {}).get("matrices")
    if not matrices:
        if record.cell.benchmark["name"] == "p2p":
            return unchecked("no matrix was measured")
        return None
    wrong = []
    for name, rows in matrices.items():
        entries = [entry for row in rows for entry in row]
        if not all(0 < float(entry) < math.inf for entry in entries):
            wrong.append(name)
    if not wrong:
        return None
    return CheckResult(", ".join(wrong))


def wrong_elements(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a collective's result has wrong elements."""
    if record.cell.benchmark["name"] == "collectives" and "wrong_elements" not in record.checks:
        return unchecked("benchmark.verify=false switched the check off")
    count, sizes = record.checks.get("wrong_elements"), record.checks.get("wrong_bytes", [])
    if not count:
        return None
    return CheckResult(f"{count}, in messages of {', '.join(map(str, sizes[:5]))} bytes")


def solution_differs(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the solution of benchmark=jacobi differs from that of one GPU."""
    difference = record.checks.get("solution_difference")
    tolerance = record.checks.get("solution_tolerance")
    if difference is None or difference <= tolerance:
        return None
    return CheckResult(f"by up to {difference:.2g}, allowed {tolerance:.2g}")  # also NaN


# Whether what ran is what was asked


def images_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the ranks counted another number of images than their steps hold."""
    counted = record.metrics.get("throughput/images")
    steps = record.metrics.get("step/iterations")
    if counted is None or steps is None:
        return unless_training(record, "the ranks counted no images")
    expected = steps * record.cell.batch_size * record.cell.world_size
    if counted == expected:
        return None
    return CheckResult(f"{counted:.0f} counted, {expected:.0f} expected")


def batches_not_distinct(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether ranks trained on the same images, or on one batch again and again."""
    if "batches_differ" not in record.checks:
        return unless_training(record)
    if not record.checks["batches_differ"]:
        return CheckResult(f"several ranks have the same {record.cell.model.inputs}")
    if record.checks["batches_in_turn"] < 2:
        return CheckResult(f"every step has the same {record.cell.model.inputs}")
    return None


def precision_not_used(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the steps computed in another arithmetic than asked."""
    facts = record.checks.get("arithmetic")
    if facts is None:
        return unless_training(record)
    precision = record.cell.precision
    if facts["autocast"] != AUTOCAST.get(precision):
        return CheckResult(f"precision={precision}, and autocast was {facts['autocast'] or 'off'}")
    if facts["tf32"] and precision != "tf32":
        return CheckResult(f"precision={precision}, and TF32 was on")
    if precision == "tf32" and not facts["tf32"]:
        return CheckResult(f"precision={precision}, and TF32 was off")
    layers = sum(facts["layers"].values())
    as_asked = facts["layers"].get(LAYERS.get(precision, "float32"), 0)
    if 2 * as_asked < layers:
        return CheckResult(
            f"precision={precision}, and {layers - as_asked} of {layers} layers returned another "
            "dtype"
        )
    return None


def not_compiled(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether nothing that torch.compile made took part in the steps, where it was asked."""
    if not record.cell.compiled:
        return not_applicable("this cell was not compiled")
    graphs = record.checks.get("graphs")
    if graphs is None:
        return unless_training(record)
    # older records do not say what ran
    parts = record.checks.get("arithmetic", {}).get("compiled_parts", graphs)
    if not graphs or not parts:
        return CheckResult("")
    return None


def compiled_while_timed(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether torch.compile made graphs in the timed windows."""
    if not record.cell.compiled:
        return not_applicable("this cell was not compiled")
    graphs = record.checks.get("timed_graphs")
    if graphs is None:
        return unless_training(record)
    if not graphs:
        return None
    return CheckResult(str(graphs))


def graph_differs(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a replay of the CUDA graph does something else than the step without one."""
    if not record.cell.graphed:
        return None
    worst = record.checks.get("replay")
    if worst is None:
        return unless_training(record, "no GPU had room for a second copy of the weights")
    error, tolerance = worst["error"], worst["tolerance"]
    if error <= tolerance:
        return None
    step = "step"
    if not worst["exchange"]:
        step = "step without exchange"
    return CheckResult(
        f"the {worst['what']} of {worst['array']} after a {step}, by {error:.2g}, "
        f"allowed {tolerance:.2g}"
    )


def replays_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a GPU did not replay as many steps as its rank asked for, or ranks differ."""
    if not record.cell.graphed:
        return None
    replays = record.checks.get("replays")
    if replays is None:
        return unless_training(record)
    ranks_differ = len({requested for requested, _ in replays}) > 1
    wrong = []
    for rank, (requested, done) in enumerate(replays):
        if ranks_differ:
            wrong.append(f"rank {rank} {requested}")
        elif requested != done or not requested:
            wrong.append(f"rank {rank} {done} of {requested}")
    if not wrong:
        return None
    return CheckResult(", ".join(wrong))


def bytes_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the bytes of the gradient, of the exchange and of its rates are not the same."""
    trained, metrics = record.checks.get("trained_bytes"), record.metrics
    if trained is None:
        if "comm/exchange_ms" not in metrics:
            return unless_training(record)
        return unchecked(NOT_REPORTED)
    exchange_us = 1e3 * metrics.get("comm/exchange_ms", math.nan)
    moved = metrics.get("comm/bytes_moved")
    counts: list[tuple[str, float | None, float | None]] = [
        ("the model's gradient_bytes", record.model.get("gradient_bytes"), trained),
        ("what came back from the exchange", record.checks.get("exchanged_bytes"), trained),
        ("comm/algbw × time", _bytes(metrics.get("comm/algbw_gb_per_s"), exchange_us), trained),
        ("comm/busbw × time", _bytes(metrics.get("comm/busbw_gb_per_s"), exchange_us), moved),
        ("comm/bytes_moved", moved, _sent(record.cell, trained)),
    ]
    wrong = []
    for name, count, expected in counts:
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


def _bytes(gb_per_s: float | None, microseconds: float) -> float | None:
    if gb_per_s is None:
        return None
    return gb_per_s * 1e3 * microseconds


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
