"""Checks of what a cell computed: ranks, GPUs, weights, gradients, copies, elements, losses.

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
from conf.schema import ValidityLimits


def missing_rank(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks that did not finish."""
    expected = set(range(record.cell.world_size))
    missing = expected - {rank["rank"] for rank in record.ranks if rank.get("done")}
    return CheckResult(", ".join(map(str, sorted(missing)))) if missing else None


def wrong_gpu(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks that ran on another GPU than planned."""
    planned = record.environment.get("planned_uuids")
    if not planned:
        on_gpu = record.cell.device == "cuda"
        return (
            unchecked("no UUID was planned")
            if on_gpu
            else not_applicable("CPU workers have no GPU UUID")
        )
    reported = {rank["rank"]: rank.get("uuid", "unknown") for rank in record.ranks}
    wrong = [
        f"rank {number} ran on {reported[number]} instead of {uuid}"
        for number, uuid in enumerate(planned)
        if number in reported and reported[number] != uuid
    ]
    return CheckResult("; ".join(wrong)) if wrong else None


def wrong_peers(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks of several hosts that met others than were started: on another host, as another process, with another GPU.

    What the ranks told each other over the network is compared with what each one wrote, which came through the agent of
    its own host, and with the plan.
    """
    cell, rows = record.cell, record.checks.get("peers")
    if not cell.hosts:
        return None
    if not isinstance(rows, list):
        several = len(cell.every_host) > 1
        return (
            unchecked("no rank wrote whom it met")
            if several
            else not_applicable("all ranks are on one host")
        )
    planned = record.environment.get("planned_uuids") or []
    own = {rank.get("rank"): rank for rank in record.ranks}
    wrong = []
    for number, place in enumerate(cell.places[: cell.world_size]):
        met = [row[1:] for row in rows if isinstance(row, list) and row[:1] == [number]]
        started = [own.get(number, {}).get(name) for name in ("node", "pid", "uuid")]
        if len(met) != 1 or met[0] != started:
            wrong.append(
                f"rank {number} is {_told(met[0] if met else [])}, and {_told(started)} was started"
            )
        elif met[0][0] != place.host or (
            number < len(planned) and planned[number] not in (None, met[0][2])
        ):
            wrong.append(f"rank {number} is {_told(met[0])}, and host {place.host} was planned")
    if len(rows) != cell.world_size:
        wrong.append(f"{len(rows)} ranks met, and {cell.world_size} were started")
    return CheckResult("; ".join(wrong[:3])) if wrong else None


def _told(of_rank: Sequence[object]) -> str:
    """Return what a rank is in words; nobody where nothing is known of it."""
    host, pid, uuid = (*of_rank, None, None, None)[:3]
    parts = (
        [f"host {host}"] * bool(host) + [f"process {pid}"] * bool(pid) + [str(uuid)] * bool(uuid)
    )
    return ", ".join(parts) or "nobody"


def replicas_differ(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the ranks ended with different weights."""
    if "replicas_equal" not in record.checks:
        return _not_compared(record)
    return None if record.checks["replicas_equal"] else CheckResult("")


def gradient_not_mean(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchanged gradient differs from the mean of the local gradients."""
    facts = record.checks
    if "gradient_error" not in facts:
        return _not_compared(record)
    error, spread, tolerance = (
        float(facts[f"gradient_{name}"]) for name in ("error", "spread", "tolerance")
    )
    if not error <= tolerance:  # also NaN
        return CheckResult(f"relative error {error:.2g}, allowed {tolerance:.2g}")
    worst = facts.get("gradient_worst")  # since schema 4
    if worst is not None and not worst["error"] <= worst["tolerance"]:
        return CheckResult(
            f"relative error of {worst['array']} {worst['error']:.2g}, allowed {worst['tolerance']:.2g}"
        )
    if not spread > 2 * max(error, tolerance):
        return unchecked("the ranks' gradients are too similar to tell their mean from one of them")
    return None


def _not_compared(record: Record) -> CheckResult:
    if record.cell.world_size == 1:
        return not_applicable("there is only one rank, so nothing to compare")
    if record.cell.benchmark["name"] != "throughput":
        return not_applicable("this benchmark trains nothing")
    strategy = record.cell.strategy["name"]
    why = f"strategy {strategy} does not keep the weights equal, or its compression loses precision"
    return not_applicable(why)


def exchange_wrong(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the exchange of known gradients differs from their mean."""
    error, tolerance = (record.checks.get(f"exchange_{name}") for name in ("error", "tolerance"))
    if error is None or tolerance is None:
        if "comm/exchange_ms" not in record.metrics:
            return not_applicable("no exchange was timed")
        if record.cell.benchmark["name"] != "exchange" and "exchanged_bytes" not in record.checks:
            return unchecked(NOT_REPORTED)
        return not_applicable("its compression loses precision")
    return (
        None
        if error <= tolerance
        else CheckResult(f"relative error {error:.2g}, allowed {tolerance:.2g}")
    )  # also NaN


def copy_wrong(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find copies of benchmark=p2p with wrong elements."""
    if not record.checks.get("copies_compared"):
        return unchecked("no copy was compared") if record.cell.benchmark["name"] == "p2p" else None
    wrong = record.checks["copies_wrong"]
    if not wrong:
        return None
    first = [f"{elements} elements of {name}" for name, elements in list(wrong.items())[:3]]
    return CheckResult(", ".join([*first, "…"] if len(wrong) > 3 else first))


def entry_not_positive(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find matrices of benchmark=p2p with an entry that is not a positive number."""
    matrices = record.tables.get("p2p", {}).get("matrices")
    if not matrices:
        return (
            unchecked("no matrix was measured") if record.cell.benchmark["name"] == "p2p" else None
        )
    bad = [
        name
        for name, rows in matrices.items()
        if not all(0 < float(value) < math.inf for row in rows for value in row)
    ]
    return CheckResult(", ".join(bad)) if bad else None


def wrong_elements(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a collective's result has wrong elements."""
    if record.cell.benchmark["name"] == "collectives" and "wrong_elements" not in record.checks:
        return unchecked("benchmark.verify=false switched the check off")
    count, sizes = record.checks.get("wrong_elements"), record.checks.get("wrong_bytes", [])
    return (
        CheckResult(f"{count}, in messages of {', '.join(map(str, sizes[:5]))} bytes")
        if count
        else None
    )


def solution_differs(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the solution of benchmark=jacobi differs from that of one GPU."""
    difference, tolerance = (
        record.checks.get(f"solution_{name}") for name in ("difference", "tolerance")
    )
    if difference is None or difference <= tolerance:
        return None
    return CheckResult(f"by up to {difference:.2g}, allowed {tolerance:.2g}")  # also NaN


def loss_not_finite(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find ranks whose loss is infinite or NaN."""
    losses = record.checks.get("losses")
    if not losses:
        return unless_training(record, "no loss was reported")
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(float(loss))]
    return CheckResult(", ".join(bad)) if bad else None


def images_miscounted(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether the ranks counted another number of images than their steps hold."""
    counted, steps = (record.metrics.get(name) for name in ("throughput/images", "step/iterations"))
    if counted is None or steps is None:
        return unless_training(record, "the ranks counted no images")
    expected = steps * record.cell.batch_size * record.cell.world_size
    return (
        CheckResult(f"{counted:.0f} counted, {expected:.0f} expected")
        if counted != expected
        else None
    )
