"""Checks of what a cell computed, and of whether what ran is what was asked."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.validity.check import (
    AFTER,
    NOT_REPORTED,
    OF_SCRIPT,
    Judgement,
    check,
    not_applicable,
    unchecked,
    unchecked_if_training,
)
from benchmarks.record import Record
from conf import groups
from conf.cell import OWN_MODEL, Cell
from conf.schema import ValidityLimits

# AUTOCAST and SENT_BYTES are also in trainers: a judge shares no code with what it judges.
# The dtype in which autocast computes, and most layers do, by precision; else float32.
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = AUTOCAST | {"bf16_weights": "bfloat16"}
# Of the layers; a loss or a head may compute in float32, of a user's own model some on purpose.
FEWEST_RIGHT, FEWEST_OF_OWN = 0.95, 0.5
ROUNDING = 1e-9  # of a number that is computed another way
SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp8": 1 + 4 / 256}  # of an element, with a hook
# Faults that a sentence names. Of more it gives no number: `verify` compares the numbers of older
# records, which have none.
MOST_FAULTS = 3
# What a step did, before the timed windows and after them.
WORK_OF_A_STEP = {
    "arithmetic": {
        "images": "images in a batch",
        "elements": "elements from the layers",
        "evaluating": "modules in evaluation mode",
    },
    "sent": {
        "collectives": "collectives",
        "bytes": "bytes to the collectives",
        "order": "as the checksum of their order",
    },
}
NOT_COMPILED = "this run was not compiled"
ERRORS_OF_ARRAY = "relative error of {array} {error:.2g}, allowed {tolerance:.2g}"
ERRORS = "relative error {value:.2g}, allowed {allowed:.2g}"


@check("invalid", "rank {} wrote no complete samples")
def missing_rank(record: Record, _: ValidityLimits) -> Judgement:
    """a rank did not write all of its step times"""
    done = {rank["rank"] for rank in record.ranks if rank.get("done")}
    missing = set(range(record.cell.world_size)) - done
    return ", ".join(map(str, sorted(missing)))


@check("invalid", "ranks ran on other GPUs than requested: {}")
def wrong_gpu(record: Record, _: ValidityLimits) -> Judgement:
    """a rank ran on another GPU (UUID) than planned, or its times were saved as another rank's"""
    planned = record.environment.get("planned_uuids")
    if not planned:
        if record.cell.device == "cuda":
            return unchecked("no UUID was planned")
        return not_applicable("CPU workers have no GPU UUID")
    wrong, silent = [], []
    for report in record.ranks:
        rank, uuid = report["rank"], report.get("uuid", "unknown")
        if "uuid" not in report and record.cell.runs_script:
            silent.append(str(rank))
        elif rank < len(planned) and uuid != planned[rank]:
            wrong.append(f"rank {rank} ran on {uuid} instead of {planned[rank]}")
    ranks = [report["rank"] for report in record.ranks]
    if ranks != sorted(ranks):
        wrong.append(f"the lines of ranks {', '.join(map(str, ranks))} lie in each other's files")
    if silent and not wrong:
        return unchecked(f"the script of rank {', '.join(silent)} used no GPU through torch")
    return "; ".join(wrong)


@check("invalid", "the ranks met others than those of their own hosts: {}")
def wrong_peers(record: Record, _: ValidityLimits) -> Judgement:
    """on several hosts, the ranks that communicated differ (in host, process or GPU UUID) from
    those that were planned, or from those whose times were saved
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
        if met != [started]:
            peer = _peer(met[0] if len(met) else [])
            wrong.append(f"rank {rank} is {peer}, and {_peer(started)} was started")
            continue
        is_wrong_gpu = rank < len(planned) and planned[rank] not in (None, started[2])
        if started[0] != member.host or is_wrong_gpu:
            wrong.append(f"rank {rank} is {_peer(started)}, and host {member.host} was planned")
    if len(rows) != cell.world_size:
        wrong.append(f"{len(rows)} ranks met, and {cell.world_size} were started")
    return _first_of(wrong)


def _peer(facts: Sequence[object]) -> str:
    words = []
    for noun, value in zip(("host ", "process ", ""), facts, strict=False):
        if value:
            words.append(f"{noun}{value}")
    return ", ".join(words) or "nobody"


@check("suspect", "the ranks ran on different software: {}", since=7)
def versions_differ(record: Record, _: ValidityLimits) -> Judgement:
    """a rank has another version of a library, or another number of CPU threads, than rank 0

    Install the same software and set the same OMP_NUM_THREADS on every host.
    """
    if record.cell.world_size == 1:
        return not_applicable("there is only one rank")
    if "versions_differ" not in record.checks:
        return unchecked(NOT_REPORTED)
    differing = record.checks["versions_differ"]
    return "; ".join(f"{name} {', '.join(of_ranks)}" for name, of_ranks in differing.items())


@check("invalid", "the ranks have different weights after synchronous steps")
def replicas_differ(record: Record, _: ValidityLimits) -> Judgement:
    """ranks hold different weights after an update that should make them equal

    Look at the strategy's code: after its update all ranks must hold the same weights.
    """
    if "replicas_equal" not in record.checks:
        return _not_compared(record)
    if record.checks["replicas_equal"]:
        return None
    return "other weights"


@check("invalid", "the exchanged gradient is not the mean of the local ones: {}", twice=True)
def gradient_not_mean(record: Record, _: ValidityLimits) -> Judgement:
    """the exchanged gradient is not the mean of the ranks' own gradients

    Look at the strategy's code: it must return the mean of all ranks' gradients.
    """
    facts = record.checks
    if "gradient_error" not in facts:
        return _not_compared(record)
    error, tolerance = facts["gradient_error"], facts["gradient_tolerance"]
    if not error <= tolerance:  # also NaN
        reason = ERRORS.format(value=error, allowed=tolerance)
        ranks = record.cell.world_size
        if abs(error - (ranks - 1)) <= tolerance:
            reason += f" (the error of a sum that is not divided by {ranks}, the number of ranks)"
        return reason
    worst = facts.get("gradient_worst")
    if worst is not None and not worst["error"] <= worst["tolerance"]:
        return ERRORS_OF_ARRAY.format(**worst)
    if not facts["gradient_spread"] > 2 * max(error, tolerance):
        return unchecked("the ranks' gradients are too similar to tell their mean from one of them")
    return None


def _not_compared(record: Record) -> Judgement:
    if record.cell.world_size == 1:
        return not_applicable("there is only one rank, so nothing to compare")
    if record.cell.runs_script:
        return unchecked(OF_SCRIPT)
    if record.cell.benchmark["name"] != "throughput":
        return not_applicable("this benchmark trains nothing")
    strategy = record.cell.strategy["name"]
    return not_applicable(
        f"strategy {strategy} does not keep the weights equal, or its compression loses precision"
    )


@check("invalid", "synchronised weights are not the mean of the ranks' own: {}", since=8)
def weights_not_average(record: Record, _: ValidityLimits) -> Judgement:
    """after a synchronisation the weights are not the mean of what the ranks held before it

    Look at the strategy's code: it must average the weights of all ranks.
    """
    if record.cell.period == 1 or record.cell.world_size == 1:
        return not_applicable("no period of local steps")
    if record.cell.strategy.get("outer", "average") != "average":
        return not_applicable("an outer optimizer steps to the mean")
    worst = record.checks.get("average_worst")
    if worst is None:
        return unchecked_if_training(record, "no rank had room for a second copy of the weights")
    if not worst:
        return "none was equal"
    if worst["error"] <= worst["tolerance"]:
        return None
    return ERRORS_OF_ARRAY.format(**worst)


@check("invalid", "the exchange does not return the mean of known gradients: {}")
def exchange_wrong(record: Record, _: ValidityLimits) -> Judgement:
    """the exchange, tested alone with known gradients, did not return their mean. Allowed relative
    error of any tensor: 10⁻⁴ in `benchmark=exchange`; in training runs the larger of one
    ulp per rank and the rounding error of the dtype sent
    """
    error, tolerance = record.checks.get("exchange_error"), record.checks.get("exchange_tolerance")
    if error is not None and tolerance is not None:
        if error <= tolerance:
            return None
        return ERRORS.format(value=error, allowed=tolerance)
    if "comm/exchange_ms" not in record.metrics:
        return not_applicable("no exchange was timed")
    if record.cell.benchmark["name"] != "exchange" and "exchanged_bytes" not in record.checks:
        return unchecked(NOT_REPORTED)
    return not_applicable("its compression loses precision")


@check("invalid", "the loss is not finite on rank {}")
def loss_not_finite(record: Record, _: ValidityLimits) -> Judgement:
    """the loss is NaN or infinite

    Lower optimizer.learning_rate, or use precision=bf16 in place of fp16.
    """
    losses = record.checks.get("losses")
    if not losses:
        return unchecked_if_training(record, "no loss was reported")
    wrong = []
    for rank, loss in enumerate(losses):
        if not math.isfinite(loss):
            wrong.append(str(rank))
    return ", ".join(wrong)


@check("invalid", "weights did not change while steps were timed: {}", needs="weights_still")
def weights_still(record: Record, _: ValidityLimits) -> Judgement:
    """weights that should change did not change in the timed steps"""
    arrays = record.checks["weights_still"]
    if not arrays:
        return None
    share, first = record.checks["weights_still_share"], record.checks["weights_still_first"]
    return f"{arrays} arrays with {100 * share:.1f} % of the elements, the first is {first}"


@check("invalid", "copies arrived with wrong data: {}")
def copy_wrong(record: Record, _: ValidityLimits) -> Judgement:
    """`benchmark=p2p`: the data that arrived are not the pattern that was sent"""
    if not record.checks.get("copies_compared"):
        if record.cell.benchmark["name"] == "p2p":
            return unchecked("no copy was compared")
        return None
    copies_wrong = record.checks["copies_wrong"]
    return _first_of([f"{count} elements of {name}" for name, count in copies_wrong.items()])


@check("invalid", "a matrix has entries that are not positive numbers: {}")
def entry_not_positive(record: Record, _: ValidityLimits) -> Judgement:
    """`benchmark=p2p`: a rate or latency between two GPUs is not a positive number"""
    matrices = record.tables.get("p2p", {}).get("matrices")
    if not matrices:
        if record.cell.benchmark["name"] == "p2p":
            return unchecked("no matrix was measured")
        return None
    wrong: dict[str, None] = {}
    for name, rows in matrices.items():
        for entry in itertools.chain(*rows):
            if entry is None or not 0 < entry < math.inf:
                wrong[name] = None
    return ", ".join(wrong)


@check("invalid", "a collective returned wrong elements: {}")
def wrong_elements(record: Record, _: ValidityLimits) -> Judgement:
    """a collective returned wrong elements for known inputs

    Try benchmark.calls=torch (torch.distributed in place of NCCL's own functions) and another
    version of NCCL. If it happens again, report it to NCCL's developers.
    """
    if record.cell.benchmark["name"] == "collectives" and "wrong_elements" not in record.checks:
        return unchecked("benchmark.verify=false switched the check off")
    count, sizes = record.checks.get("wrong_elements"), record.checks.get("wrong_bytes", [])
    if not count:
        return None
    return f"{count}, in messages of {', '.join(map(str, sizes[:5]))} bytes"


@check("invalid", "the solution differs from that of one device: {}")
def solution_differs(record: Record, _: ValidityLimits) -> Judgement:
    """`benchmark=jacobi`: several GPUs computed another result than one GPU"""
    difference = record.checks.get("solution_difference")
    allowed = record.checks.get("solution_tolerance")
    if difference is None or allowed is None or difference <= allowed:
        return None
    return f"by up to {difference:.2g}, allowed {allowed:.2g}"


@check("invalid", "the counted images are not steps × batch × ranks: {}")
def images_miscounted(record: Record, _: ValidityLimits) -> Judgement:
    """the images counted, or those that entered the model, are not steps × batch × ranks"""
    counted = record.metrics.get("throughput/images")
    steps = record.metrics.get("step/iterations")
    if counted is None or steps is None:
        return unchecked_if_training(record, "the ranks counted no images")
    if record.cell.runs_script:
        return unchecked(OF_SCRIPT)
    expected = steps * record.cell.batch_size * record.cell.world_size
    if counted != expected:
        return f"{counted:.0f} counted, {expected:.0f} expected"
    timed = record.checks.get("counted", {}).get("timed")
    if timed is None:
        return None
    entered = timed["steps"] * record.cell.batch_size
    if timed["images"] != entered:
        return f"{timed['images']} entered the model, {entered} expected"
    return None


@check("invalid", "a timed window was written twice: {}", needs="windows_repeated", since=7)
def windows_repeated(record: Record, _: ValidityLimits) -> Judgement:
    """two timed windows of a rank have the same step times or the same start"""
    count = record.checks["windows_repeated"]
    return f"{count} with the samples or the moment of another" if count else None


@check(
    "invalid",
    "the samples are not all of the iterations that ran: {}",
    needs="iterations_missing",
    since=7,
)
def iterations_miscounted(record: Record, _: ValidityLimits) -> Judgement:
    """a rank saved times of more or fewer steps than it counted while it ran: some are missing, cut
    off or saved twice
    """
    count = record.checks["iterations_missing"]
    if not count:
        return None
    return f"by its heartbeats a rank ran at least {count} more or less than its windows hold"


@check(
    "invalid", "the ranks do not have batches of their own: {}", needs="batches_differ", twice=True
)
def batches_not_distinct(record: Record, _: ValidityLimits) -> Judgement:
    """two ranks, or two steps, have the same batch

    Give each rank, in each step, data of its own: seed the loader with the rank.
    """
    if not record.checks["batches_differ"]:
        return f"several ranks have the same {record.cell.model.inputs}"
    if record.checks["batches_in_turn"] < 2:
        return f"every step has the same {record.cell.model.inputs}"
    return None


@check(
    "invalid", "the precision is not the one that was asked for: {}", needs="arithmetic", twice=True
)
def precision_not_used(record: Record, _: ValidityLimits) -> Judgement:
    """the run computed in another precision than asked. One of these is enough: autocast or TF32
    was not as asked; more than 5 % of the layers returned another dtype (50 % in a model of your
    own)

    Ask for the precision that the model uses, or change the model's dtypes.
    """
    facts, precision = record.checks["arithmetic"], record.cell.precision
    if facts["autocast"] != AUTOCAST.get(precision):
        return f"precision={precision}, and autocast was {facts['autocast'] or 'off'}"
    if facts["tf32"] != (precision == "tf32"):
        return f"precision={precision}, and TF32 was {'on' if facts['tf32'] else 'off'}"
    layers = sum(facts["layers"].values())
    right = facts["layers"].get(LAYERS.get(precision, "float32"), 0)
    fewest = FEWEST_RIGHT
    if record.cell.model.library == OWN_MODEL:
        fewest = FEWEST_OF_OWN
    if right < fewest * layers:
        wrong = f"{layers - right} of {layers} layers"
        return f"precision={precision}, and {wrong} returned another dtype"
    return None


@check("invalid", "the longest steps of a window were cut: {}")
def samples_cut(record: Record, _: ValidityLimits) -> Judgement:
    """the step times of a window look clipped: at least three steps, and at least 5 % of them, took
    exactly the same longest time, while no other time occurs twice
    """
    steps = record.checks.get("equal_longest")
    return f"{steps} steps took exactly as long as the longest one" if steps else None


@check("invalid", "timed steps are not those that were checked: {}", since=7)
def steps_changed(record: Record, _: ValidityLimits) -> Judgement:
    """a step in the timed windows, or right after them, did other work than the steps before.
    The check compares passes through the model (images, layers), updates, collectives (bytes,
    order) and the modules in training mode
    """
    facts = record.checks
    if "counted" not in facts or "arithmetic" not in facts:
        return not_applicable("the ranks did not look at it")
    evaluating = facts["arithmetic"].get("evaluating")
    if evaluating and record.cell.model.library != OWN_MODEL:
        return f"{evaluating} modules were in evaluation mode before"
    return _first_of([*_counted_otherwise(record), *_found_otherwise(facts)])


def _counted_otherwise(record: Record) -> Iterator[str]:
    """Yield what timed steps did more or less often than the steps before them."""
    facts, cell = record.checks, record.cell
    timed, warm_up = facts["counted"].get("timed", {}), facts["counted"].get("warm-up", {})
    steps = timed.get("steps", 0)
    # What is counted, how often in a step, and by how much the windows may differ.
    expected: list[tuple[str, float, float]] = []
    if cell.model.library != OWN_MODEL:  # its layers may be left out at random
        before = facts["arithmetic"]
        of_a_call = before.get("passes", 0) / (before.get("calls") or 1)
        expected.append(("passes", of_a_call * cell.accumulate, 0.0))
    if warm_up.get("steps"):
        lead_ins = cell.world_size * len(record.series.get("throughput/images_per_second", ()))
        updates, allowed = warm_up.get("updates", 0) / warm_up["steps"], 0.0
        if updates not in (0, 1):  # some steps update: a window may end before one does
            allowed = lead_ins + cell.world_size * steps / warm_up["steps"]
        expected.append(("updates", updates, allowed))
        if "gradient_error" in facts and "gradients_equal" in facts:  # else some steps may differ
            collectives = warm_up.get("collectives", 0) / warm_up["steps"]
            # After steps without exchange a lead-in may leave one out, as DDP does that of buffers.
            expected.append(("collectives", collectives, collectives * lead_ins))
    for name, of_a_step, allowed in expected:
        count = timed.get(name, 0)
        if abs(count - of_a_step * steps) > allowed + 0.5:
            yield f"{count} of {of_a_step * steps:.0f} {name} in the windows"


def _found_otherwise(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the ranks found otherwise right after the timed steps than before them."""
    if AFTER not in facts:
        yield "nobody looked after them"
        return
    after = facts[AFTER]
    if facts.get("gradients_equal") and not after.get("gradients_equal"):
        yield "the last timed step left each rank another gradient"
    for part, nouns in WORK_OF_A_STEP.items():
        for name, noun in nouns.items():
            first, again = facts.get(part, {}).get(name), after.get(part, {}).get(name)
            if first != again:
                yield f"{again} instead of {first} {noun} after them"
    updates, steps = after.get("updates", 0), after.get("steps", 1)
    if updates < steps:
        yield f"{updates} of {steps} steps after them moved weights"


def _first_of(wrong: Sequence[str]) -> str:
    """Join the first faults; `…` stands for the others."""
    others = ["…"] if len(wrong) > MOST_FAULTS else []
    return "; ".join([*wrong[:MOST_FAULTS], *others])


@check("invalid", "gradients travelled before the last micro-step: {}", since=8)
def accumulated_nothing(record: Record, _: ValidityLimits) -> Judgement:
    """with accumulate above 1, ranks exchanged gradients before the last micro-step

    Look at the strategy's code: `accumulating()` must add gradients up, and exchange nothing.
    """
    if record.cell.accumulate == 1:
        return not_applicable("a step has one micro-step")
    if record.cell.world_size == 1:
        return not_applicable("one rank reduces nothing")
    early = record.checks.get("sent", {}).get("early")
    if early is None:
        return unchecked("nobody saw its collectives")
    return f"{early} collectives" if early else None


@check("invalid", "torch.compile was asked for and compiled nothing")
def not_compiled(record: Record, _: ValidityLimits) -> Judgement:
    """compiled steps were asked for, and no compiled code ran in the timed steps

    Look for graph breaks in the rank's log (TORCH_LOGS=graph_breaks), or use optimize=eager.
    """
    if not record.cell.compiled:
        return not_applicable(NOT_COMPILED)
    graphs = record.checks.get("graphs")
    if graphs is None:
        return unchecked_if_training(record)
    # older records do not say what ran
    parts = record.checks.get("arithmetic", {}).get("compiled_parts", graphs)
    if graphs and parts:
        return None
    return "no graph"


@check("suspect", "torch.compile still compiled while steps were timed: {}")
def compiled_while_timed(record: Record, _: ValidityLimits) -> Judgement:
    """torch.compile still compiled in the timed windows

    Raise benchmark.warmup_iterations so that all shapes are compiled before.
    """
    if not record.cell.compiled:
        return not_applicable(NOT_COMPILED)
    graphs = record.checks.get("timed_graphs")
    if graphs is None:
        return unchecked_if_training(record)
    return str(graphs) if graphs else None


@check("invalid", "a replay of the CUDA graph does something else than the step itself: {}")
def graph_differs(record: Record, _: ValidityLimits) -> Judgement:
    """a replayed step gives other gradients or weights than the step without a CUDA graph"""
    if not record.cell.graphed:
        return None
    worst = record.checks.get("replay")
    if worst is None:
        return unchecked_if_training(record, "no GPU had room for a second copy of the weights")
    if worst["error"] <= worst["tolerance"]:
        return None
    step = "step" if worst["exchange"] else "step without exchange"
    return (
        f"the {worst['what']} of {worst['array']} after a {step}, by {worst['error']:.2g}, "
        f"allowed {worst['tolerance']:.2g}"
    )


@check("invalid", "the GPUs did not replay the steps that were asked for: {}")
def replays_miscounted(record: Record, _: ValidityLimits) -> Judgement:
    """a GPU replayed a graph more or less often than asked"""
    if not record.cell.graphed:
        return None
    replays = record.checks.get("replays")
    if replays is None:
        return unchecked_if_training(record)
    ranks_differ = len({requested for requested, _ in replays}) > 1
    wrong = []
    for rank, (requested, done) in enumerate(replays):
        if ranks_differ:
            wrong.append(f"rank {rank} {requested}")
        elif requested != done or not requested:
            wrong.append(f"rank {rank} {done} of {requested}")
    return ", ".join(wrong)


@check("invalid", "two counts of the exchanged bytes differ: {}")
def bytes_miscounted(record: Record, _: ValidityLimits) -> Judgement:
    """three byte counts should be equal and are not: the size of the gradient, the bytes exchanged,
    and the bytes from which GB/s was computed. Or the bytes that the strategy reports as sent
    differ from the formula `sends` in its YAML
    """
    trained, metrics = record.checks.get("trained_bytes"), record.metrics
    if trained is None:
        if "comm/exchange_ms" not in metrics:
            return unchecked_if_training(record)
        return unchecked(NOT_REPORTED)
    moved = metrics.get("comm/bytes_moved")
    counts: dict[str, tuple[float | None, float | None]] = {
        "the model's gradient_bytes": (record.model.get("gradient_bytes"), trained),
        "what came back from the exchange": (record.checks.get("exchanged_bytes"), trained),
    }
    for rate, expected in (("algbw", trained), ("busbw", moved)):
        gb_per_s = metrics.get(f"comm/{rate}_gb_per_s")
        if gb_per_s is not None:
            exchanged = 1e6 * gb_per_s * metrics.get("comm/exchange_ms", math.nan)
            counts[f"comm/{rate} × time"] = (exchanged, expected)
    cell = record.cell
    sends = groups.sends(cell)
    counts["comm/bytes_moved"] = (moved, _sent(cell, sends, trained))
    wrong = []
    for name, (count, expected) in counts.items():
        if count is None or expected is None:
            continue
        if not math.isclose(count, expected, rel_tol=ROUNDING):
            wrong.append(f"{name} is {count:,.0f} bytes instead of {expected:,.0f}")
    if not wrong and moved is not None and not sends:
        return unchecked(f"strategy {cell.strategy['name']} does not declare what it `sends`")
    return "; ".join(wrong)


def _sent(cell: Cell, sends: str, gradient_bytes: float) -> float | None:
    """Return the bytes that each rank sends in one exchange, as declared; None where unknown."""
    hook, sent = str(cell.strategy.get("comm_hook", "none")), gradient_bytes
    if hook in SENT_BYTES:
        own_bytes = 2 if cell.precision == "bf16_weights" else 4
        sent *= min(1.0, SENT_BYTES[hook] / own_bytes)
    elif hook != "none":
        return None
    ranks, ranks_here, hosts = cell.world_size, len(cell.gpus), max(1, len(cell.hosts))
    # Each rank of a ring sends 2 (n − 1) ÷ n of what it reduces; between hosts, of its share.
    between_hosts = sent / ranks_here * 2 * (hosts - 1) / hosts
    by_word = {
        "once": sent,
        "ring": sent * 2 * (ranks - 1) / ranks,
        "two_rings": sent * 2 * (ranks_here - 1) / ranks_here + between_hosts,
        "once_and_ring": sent + between_hosts,
    }
    return by_word.get(sends)
