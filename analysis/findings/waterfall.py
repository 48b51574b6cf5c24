"""Why a subset trains slower than its members would alone: the efficiency waterfall, and the control cells it needs.

Every part is a difference of step times, in ms, and each comes from another measurement, so that what is left over is a
check and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: comm/exposed_ms
                without the overhead, which is in that difference
    waiting     of it, waiting for a peer of equal speed           the cell's trace: trace/wait_ms_per_step

Taken off one after the other they are images per second.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from analysis.findings.control_cells import WITHOUT
from analysis.findings.estimates import WIDEST, Draws, Sample, estimate, exponential
from analysis.findings.model import Estimate, Part, Waterfall
from analysis.findings.runs import Gathered, Runs, gather, gpu_list, merged, several
from analysis.findings.scaling import scaled, slowest_of
from benchmarks.record import Record

EXPOSED = "comm/exposed_ms"
WAIT = "trace/wait_ms_per_step"
SPREAD, OVERHEAD, CONTENTION, COMMUNICATION, WAITING = (
    "spread between GPUs",
    "strategy overhead on one GPU",
    "contention",
    "exposed communication",
    "waiting for a peer",
)


def waterfalls(records: Iterable[Record]) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """A waterfall for every subset whose members ran alone with strategy=none, and sentences for the others."""
    return explained(gather(records))


class Controls:
    """The controls of a study, found by what they share with the cell that they explain."""

    def __init__(self, study: Gathered) -> None:
        """Sort strategy=none and the one-GPU cells by their condition."""
        self._study = study
        self._free = [name for name in study.varied if name.startswith("nccl.")] + ["global_batch_size", "server_gpus"]
        self._strategy = [name for name in study.varied if name.startswith("strategy.")]
        without: dict[tuple[Any, ...], dict[tuple[int, ...], list[Runs]]] = defaultdict(lambda: defaultdict(list))
        alone: dict[tuple[Any, ...], dict[int, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        for runs in study.timed:
            if runs.strategy == WITHOUT:
                without[self._key(runs, self._strategy)][runs.gpus].append(runs)
            elif runs.world_size == 1:
                alone[self._key(runs)][runs.gpus[0]].append(runs)
        self._without = {key: {gpus: merged(one) for gpus, one in found.items()} for key, found in without.items()}
        self._alone = {key: {gpu: merged(one) for gpu, one in found.items()} for key, found in alone.items()}

    def _key(self, runs: Runs, left_out: Iterable[str] = ()) -> tuple[Any, ...]:
        # batch_size is the images per rank: a key has it whether it was asked for or follows from the images per step.
        return runs.batch_size, *self._study.condition(runs, (*self._free, *left_out))

    def without(self, runs: Runs) -> Mapping[tuple[int, ...], Runs]:
        """strategy=none by subset."""
        return self._without.get(self._key(runs, self._strategy), {})

    def alone(self, runs: Runs) -> Mapping[int, Runs]:
        """The same strategy on one GPU, by GPU."""
        return self._alone.get(self._key(runs), {})


def explained(study: Gathered) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """What `waterfalls` returns, of runs that were gathered before."""
    controls_of = Controls(study)
    found, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        made = _waterfall(study, runs, controls_of)
        if made:
            found.append(made)
        else:
            without.append(f"{study.label(runs)} on {gpu_list(runs.gpus)}")
    sentence = (
        f"no waterfall of {several(without)}: no member was measured alone with strategy=none (waterfall=true adds that)"
        if without
        else ""
    )
    return tuple(found), (sentence,) if sentence else ()


@dataclasses.dataclass(frozen=True)
class Step:
    """A step time, or a part of one: ms, and draws of it where its scatter is known."""

    ms: float
    draws: Draws | None

    def plus(self, other: "Step", sign: float = 1.0) -> "Step":
        """The sum, or the difference."""
        draws = None
        if self.draws is not None and other.draws is not None:
            draws = self.draws + sign * other.draws
        return Step(self.ms + sign * other.ms, draws)


def _waterfall(study: Gathered, runs: Runs, controls_of: Controls) -> Waterfall | None:
    """The waterfall of one subset; None where no member ran alone without a strategy."""
    size, batch = runs.world_size, runs.batch_size
    without, alone = controls_of.without(runs), controls_of.alone(runs)
    bare = {gpu: rate for gpu in runs.gpus if (gpu,) in without and (rate := without[(gpu,)].rate) is not None}
    measured = runs.rate
    if not bare or measured is None or not batch:
        return None
    images = size * batch * 1e3  # a step's images, times the ms of a second
    value, draws = slowest_of(bare.values())
    ideal = scaled(exponential(estimate(value, draws)), size)
    whole = _step(measured, images)
    slowest = Step(batch * 1e3 / math.exp(value), None if draws is None else batch * 1e3 / np.exp(draws))
    parts = [_spread(runs, bare)]
    spent, overhead = slowest, _overhead(runs, bare, alone, batch)
    for name, step, why in (
        (OVERHEAD, overhead, "" if overhead else "the strategy was not measured on one of these GPUs alone"),
        _contention(runs, without, slowest, images),
        *_communication(runs, overhead, _for_the_slowest(slowest, bare, batch) if len(bare) == size else None),
    ):
        after = spent.plus(step) if step else spent
        parts.append(Part(name, _lost(images, spent, after) if step else None, why))
        spent = after
    residual = _lost(images, spent, whole)
    return Waterfall(
        study.label(runs),
        runs.gpus,
        ideal,
        exponential(estimate(measured.value, measured.draws)),
        tuple(parts),
        residual.value,
        residual.low,
        residual.high,
    )


def _step(rate: Sample, images: float) -> Step:
    """The step time that belongs to a rate."""
    return Step(images / math.exp(rate.value), None if rate.draws is None else images / np.exp(rate.draws))


def _lost(images: float, before: Step, after: Step) -> Estimate:
    """Images per second between two step times."""
    draws = None
    if before.draws is not None and after.draws is not None:  # a step takes some time, however little is known of it
        draws = images / np.maximum(before.draws, before.ms / WIDEST) - images / np.maximum(
            after.draws, after.ms / WIDEST
        )
    return estimate(images / before.ms - images / after.ms, draws)


def _spread(runs: Runs, bare: Mapping[int, Sample]) -> Part:
    """What synchronous ranks lose because they wait for the slowest GPU: it is not in the ideal any more."""
    missing = [gpu for gpu in runs.gpus if gpu not in bare]
    if missing:
        why = f"{gpu_list(missing)} not measured alone with strategy=none: one of them may be the slowest"
        return Part(SPREAD, None, why, above_ideal=True)
    rates = [math.exp(rate.value) for rate in bare.values()]
    known = [rate.draws for rate in bare.values() if rate.draws is not None]
    draws = None
    if len(known) == len(rates):
        drawn = np.exp(known)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    return Part(SPREAD, estimate(sum(rates) - len(rates) * min(rates), draws), above_ideal=True)


def _overhead(runs: Runs, bare: Mapping[int, Sample], alone: Mapping[int, Runs], batch: int) -> Step | None:
    """The mean over the members of what the strategy adds to a step of one rank."""
    steps = [
        _step(rate, batch * 1e3).plus(_step(bare[gpu], batch * 1e3), -1)
        for gpu in runs.gpus
        if gpu in bare and gpu in alone and (rate := alone[gpu].rate) is not None
    ]
    if not steps:
        return None
    known = [step.draws for step in steps if step.draws is not None]
    draws = np.mean(known, axis=0) if len(known) == len(steps) else None
    return Step(sum(step.ms for step in steps) / len(steps), draws)


def _contention(
    runs: Runs, without: Mapping[tuple[int, ...], Runs], slowest: Step, images: float
) -> tuple[str, Step | None, str]:
    """What ranks take from each other without any exchange: power, host memory, the CPU."""
    together = without.get(runs.gpus)
    if together is None or together.rate is None:
        return CONTENTION, None, "strategy=none was not measured on this subset"
    return CONTENTION, _step(together.rate, images).plus(slowest, -1), ""


def _for_the_slowest(slowest: Step, bare: Mapping[int, Sample], batch: int) -> Step:
    """How long the mean rank waits in a step because another GPU is slower: the spread, which is no loss any more."""
    behind = [slowest.plus(_step(rate, batch * 1e3), -1) for rate in bare.values()]
    known = [one.draws for one in behind if one.draws is not None]
    draws = np.mean(known, axis=0) if len(known) == len(behind) else None
    return Step(sum(one.ms for one in behind) / len(behind), draws)


def _communication(
    runs: Runs, overhead: Step | None, for_the_slowest: Step | None
) -> list[tuple[str, Step | None, str]]:
    """Exposed communication without what the strategy costs on one GPU, and of it the waiting, where a trace tells it.

    A trace tells how long the mean rank waits; that it waits for a slower GPU is the spread.
    """
    whole = _metric(runs, EXPOSED)
    if whole is None:
        why = "the cell has no comm/exposed_ms (benchmark.exposed_rounds=0, or no exchange could be timed)"
        return [(COMMUNICATION, None, why), (WAITING, None, why)]
    why = "" if overhead else "with what the strategy costs on one GPU"
    exposed = whole.plus(overhead, -1) if overhead else whole
    waiting = _metric(runs, WAIT)
    if waiting is None:
        return [(COMMUNICATION, exposed, why), (WAITING, None, "no trace tells it apart from exposed communication")]
    if for_the_slowest is None:
        return [(COMMUNICATION, exposed, why), (WAITING, None, "how long ranks wait for slower GPUs is not known")]
    waiting = waiting.plus(for_the_slowest, -1)
    if waiting.ms <= 0 or exposed.ms <= 0:
        return [(COMMUNICATION, exposed, why), (WAITING, None, "ranks wait for slower GPUs only, or it costs no step")]
    if waiting.ms > exposed.ms:  # part of it was hidden behind compute
        return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
    return [(COMMUNICATION, exposed.plus(waiting, -1), why), (WAITING, waiting, "")]


def _metric(runs: Runs, name: str) -> Step | None:
    found = runs.metric(name)
    return None if found is None else Step(found.value, found.draws)
