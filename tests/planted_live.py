"""Faults that begin when timing begins, in two real ranks, each beside a clean twin.

`LIVE` names the plants of an audit (2026-11): the cell, what plants it, and the code that finds it.
A plant is on from the phase `timed` to the end, or, where a case says so, in that phase alone.
"""

import contextlib
import dataclasses
import itertools
from typing import Any, NamedTuple
from unittest import mock

import synchronising
import torch
import torch.distributed as dist
from build import DDP, SMALL_CNN, make_cell
from derived_results import run_whole

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder
from benchmarks.timing.clock import Clock
from benchmarks.training import correctness, throughput
from trainers import models, step
from trainers.step import Training
from trainers.strategies.ddp import NcclAllreduce
from trainers.strategy import Strategy

# A warm-up of one window only tells nothing of a step: a busy machine needs time for a second.
STEPS = {"max_iterations": 14, "max_seconds": 5.0, "warmup_max_seconds": 0.5}
STEPS |= {"exchange_iterations": 0, "exposed_rounds": 0, "calibrate": "none"}
STEPS["model"] = SMALL_CNN


class Switch:
    on = False
    only_timed = False


def phase(reporter, name):
    """Begin a phase; timing switches the faults on."""
    Switch.on = name in ("timed", "exposed") or (Switch.on and not Switch.only_timed)
    if name in ("build", "held"):
        Switch.on = False
    REAL_PHASE(reporter, name)


REAL_PHASE, REAL_BLOCK, REAL_TIMES = Reporter.phase, Reporter.block, Clock.block
REAL_BATCHES, REAL_BUILD, REAL_BACKWARD = step.synthetic, models.build, Training.backward
REAL_STEP, REAL_PREPARE = Training.uncaptured_step, NcclAllreduce.prepare
REAL_UPDATE, REAL_GRADIENT = Strategy.update, correctness.gradient
AUTOCAST = dict(step.AUTOCAST)


# The exchange


LOSSY = "bf16 always"  # as a strategy sends that says so


def hooked(fault):
    """Have DDP exchange by a hook that makes this fault while it is on."""

    def hook(_, bucket):
        gradient = bucket.buffer()
        on = Switch.on
        sent = gradient
        if on and fault == "half of each bucket":
            sent = gradient[: len(gradient) // 2]
        if (on and fault == "bf16 on the wire") or fault == LOSSY:
            sent = gradient.bfloat16()
        if on and fault == "last bucket" and bucket.is_last():
            done = torch.futures.Future()
            done.set_result(gradient)
            return done

        def mean(future):
            if not (on and fault == "sum"):
                sent.div_(dist.get_world_size())
            if sent.dtype != gradient.dtype:
                gradient.copy_(sent)
            return gradient

        return dist.all_reduce(sent, async_op=True).get_future().then(mean)

    def prepare(strategy, model, optimizer):
        ddp = REAL_PREPARE(strategy, model, optimizer)
        ddp.register_comm_hook(None, hook)
        strategy.exact = fault != LOSSY
        return ddp

    return [(NcclAllreduce, "prepare", prepare)]


def in_steps(fault):
    """Plant `fault(training, batch, number)` in the place of a step, which it may leave as it is."""
    count = itertools.count()

    def uncaptured_step(training, batch):
        if Switch.on:
            return fault(training, batch, next(count))
        return REAL_STEP(training, batch)

    return [(Training, "uncaptured_step", uncaptured_step)]


def skip_exchange(training, batch, number):
    if number % 10 != 3:
        return REAL_STEP(training, batch)
    with training.without_exchange():
        return REAL_STEP(training, batch)


def accumulate(training, batch, number):
    if number % 2:
        return REAL_STEP(training, batch)
    with training.without_exchange():
        return training.backward(batch)


def update_sometimes():
    count = itertools.count()

    def update(strategy, optimizer):
        if not Switch.on or next(count) % 2:
            REAL_UPDATE(strategy, optimizer)

    return [(Strategy, "update", update)]


def stand_still(strategy, optimizer):
    if Switch.on:
        optimizer.param_groups[0]["lr"] = 0.0
    REAL_UPDATE(strategy, optimizer)


def stale():
    """Give every step the exchanged gradients of the step before."""
    before: list[Any] = []

    def exchange(strategy):
        parameters = list(strategy._ddp.parameters())
        if not strategy._ddp.require_backward_grad_sync:
            return
        arrived = [parameter.grad.clone() for parameter in parameters]
        if Switch.on and before:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad.copy_(gradient)
        before[:] = arrived

    return [(NcclAllreduce, "exchange", exchange)]


# What is computed


class Autocast(dict):
    """The dtypes of autocast, and none while the fault is on."""

    def __contains__(self, precision):
        return not Switch.on and super().__contains__(precision)


def in_float32(training, batch):
    if Switch.on:
        batch = tuple(part.float() if part.is_floating_point() else part for part in batch)
    return REAL_BACKWARD(training, batch)


def layers_in_float32(network):
    """All layers but the first leave autocast."""
    model = REAL_BUILD(network)
    layers = [layer for layer in model.modules() if not list(layer.children())]
    for layer in [layer for layer in layers if list(layer.parameters())][1:]:
        layer.forward = outside_autocast(layer.forward)
    return model


def outside_autocast(forward):
    def changed(inputs):
        if not Switch.on:
            return forward(inputs)
        with torch.autocast("cpu", enabled=False):
            return forward(inputs.float())

    return changed


def half_counted(training, batch):
    if Switch.on:
        batch = tuple(part[: len(part) // 2] for part in batch)
    return REAL_BACKWARD(training, batch)


def half_computed(network):
    """A model that computes half of a batch, and gives its outputs twice."""
    model = REAL_BUILD(network)
    forward = model.forward

    def twice(images):
        if not Switch.on:
            return forward(images)
        outputs = forward(images[: len(images) // 2])
        return torch.cat([outputs, outputs])

    model.forward = twice
    return model


def evaluate(training, batch):
    training.network.train(not Switch.on)
    return REAL_BACKWARD(training, batch)


def one_batch(*asked):
    batches = REAL_BATCHES(*asked)
    first = next(batches)
    while True:
        yield first if Switch.on else next(batches)


# What is written


def written_twice(reporter, purpose, *content, **facts):
    for _ in range(2 if purpose == "timed" else 1):
        REAL_BLOCK(reporter, purpose, *content, **facts)


def flattened(clock, *asked):
    """Cut the slowest tenth of a window, and its time."""
    block = REAL_TIMES(clock, *asked)
    if not Switch.on:
        return block
    most = sorted(block.ms)[-1 - max(2, len(block.ms) // 10)]
    ms = [min(own, most) for own in block.ms]
    cut = sum(block.ms) - sum(ms)
    return dataclasses.replace(
        block, ms=ms, device_ms=block.device_ms - cut, host_ms=block.host_ms - cut
    )


class Live(NamedTuple):
    """A plant: the cell, what is patched, and the codes of which one must find it."""

    twin: str
    plants: list
    codes: set
    in_window: str = ""  # why it is not seen where it ends with the windows; "-": it is seen


# What a user's own strategy may do, and no check may hold against it


def clips(strategy, optimizer):
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
    optimizer.step()


def drops(strategy, optimizer):
    optimizer.step()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None


def agrees(strategy, optimizer):
    """Update, and agree on a flag."""
    optimizer.step()
    dist.all_reduce(torch.ones(1))


def accumulates():
    """Have every second step update, as a strategy says that accumulates gradients."""
    steps = itertools.count(1)

    def update(strategy, optimizer):
        if next(steps) % 2 == 0:
            optimizer.step()

    return [(Strategy, "update", update), (NcclAllreduce, "equal_every", 2)]


def unsettled(training, *asked):
    """Check the gradient while the loss scale is so large that all gradients overflow."""
    training.scaler.update(2.0**120)
    return REAL_GRADIENT(training, *asked)


OWN_STEPS = {
    "clipped gradients": [(Strategy, "update", clips)],
    "dropped gradients": [(Strategy, "update", drops)],
    "a flag in the update": [(Strategy, "update", agrees)],
    "accumulated gradients": accumulates(),
    "lossy exchange": hooked(LOSSY),
}
SMALL_BUCKETS = DDP | {"bucket_cap_mb": 0.01, "static_graph": False}
# A convolution of float16 takes a second on a core that has no instruction for it.
IN_FP16 = make_cell(precision="fp16", **STEPS | {"model": synchronising.MODEL})
CELLS = {
    "fp32": make_cell(**STEPS),
    "bf16": make_cell(precision="bf16", **STEPS),
    "buckets": make_cell(strategy=SMALL_BUCKETS, **STEPS),
    "fp16": IN_FP16,
}
SEEN = "-"
EQUAL = "all ranks leave the same gradient, which nothing in a window compares with a mean"
LIVE = {
    "exchange skipped in 1 of 10 steps":
        Live("fp32", in_steps(skip_exchange), {"steps_changed", "replicas_differ"}, SEEN),
    "gradients of the step before": Live("fp32", stale(), {"gradient_not_mean"}, EQUAL),
    "learning rate 0":
        Live("fp32", [(Strategy, "update", stand_still)], {"weights_still", "steps_changed"}, SEEN),
    "autocast off": Live("bf16", [(step, "AUTOCAST", Autocast(AUTOCAST))], {"failed"}, SEEN),
    "autocast off, inputs in float32": Live(
        "bf16",
        [(step, "AUTOCAST", Autocast(AUTOCAST)), (Training, "backward", in_float32)],
        {"precision_not_used"},
        "no step tells its dtypes",
    ),
    "half of each bucket sent": Live(
        "buckets", hooked("half of each bucket"), {"gradient_not_mean", "steps_changed"}, SEEN
    ),
    "last bucket dropped":
        Live("buckets", hooked("last bucket"), {"gradient_not_mean", "steps_changed"}, SEEN),
    "sum for mean": Live("fp32", hooked("sum"), {"gradient_not_mean"}, EQUAL),
    "bf16 on the wire":
        Live("buckets", hooked("bf16 on the wire"), {"gradient_not_mean", "steps_changed"}, EQUAL),
    "accumulation over two steps": Live("fp32", in_steps(accumulate), {"steps_changed"}, SEEN),
    "update in every second step": Live("fp32", update_sometimes(), {"steps_changed"}, SEEN),
    "half of each batch computed":
        Live("fp32", [(models, "build", half_computed)], {"steps_changed"}, "outputs are whole"),
    "half of each batch enters the model":
        Live("fp32", [(Training, "backward", half_counted)], {"images_miscounted"}, SEEN),
    "evaluation mode": Live(
        "fp32",
        [(Training, "backward", evaluate)],
        {"steps_changed"},
        "only batch norms count, and this network has none",
    ),
    "one batch for ever": Live(
        "fp32",
        [(step, "synthetic", one_batch)],
        {"batches_not_distinct"},
        "no step tells its batch",
    ),
    "windows written twice":
        Live("fp32", [(Reporter, "block", written_twice)], {"windows_repeated"}, SEEN),
    "slowest tenth flattened": Live("fp32", [(Clock, "block", flattened)], {"samples_cut"}, SEEN),
    "all layers but one in float32": Live(
        "bf16",
        [(models, "build", layers_in_float32)],
        {"precision_not_used"},
        "no step tells its dtypes",
    ),
}  # fmt: skip


def cases():
    """Yield (name, cell, plants, whether the plant ends with the windows) of every cell."""
    for twin, cell in CELLS.items():
        yield f"clean {twin}", cell, [], False
    for twin in ("fp32", "buckets"):
        yield f"hooked {twin}", CELLS[twin], hooked("none"), False
    for name, plants in OWN_STEPS.items():
        yield name, CELLS["fp32"], plants, False
    yield "loss scale not settled", CELLS["fp16"], [(correctness, "gradient", unsettled)], False
    for name, live in LIVE.items():
        yield name, CELLS[live.twin], live.plants, False
        if live.in_window == SEEN:
            yield f"{name}, while timed", CELLS[live.twin], live.plants, True


def measure(rank, folder):
    """Run every cell; they leave their lines in the folder. Return the errors by name."""
    ranks, failures = Ranks(rank, 2, torch.device("cpu")), {}
    few = mock.patch.object(correctness, "MOST_ELEMENTS", 5_000)  # of 18,362
    for name, cell, plants, only_timed in cases():
        lines = CellFolder(folder / name)
        lines.rank_lines(0).parent.mkdir(parents=True, exist_ok=True)
        Switch.on, Switch.only_timed = False, only_timed
        with contextlib.ExitStack() as planted:
            planted.enter_context(few)
            planted.enter_context(mock.patch.object(Reporter, "phase", phase))
            for owner, method, fault in plants:
                planted.enter_context(mock.patch.object(owner, method, fault))
            try:
                run_whole(throughput.run, cell, ranks, lines)
            except RuntimeError as error:
                failures[name] = str(error)
    return failures
