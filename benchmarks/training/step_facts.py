"""Facts about what a step does: its batches, arithmetic, images, collectives and updates.

They are found before the timed windows, again after them on the same objects, and, where it costs
a step nothing, counted inside. METHOD.md, "Correctness, in every cell".
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rank.ranks import Ranks
from benchmarks.timing import compilation
from benchmarks.training.correctness import ComparedElements, checksum, checksums
from conf.cell import OWN_MODEL
from trainers import collectives
from trainers.batches import Batch
from trainers.step import UNMARKED, Training
from trainers.strategy import whole

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)  # what autocast computes in half precision
ALTERNATING = 0.1  # share of its rate that AdamW surely moves a weight
PASSES = "num_batches_tracked"  # a batch norm counts its passes on the device, in training alone


class WindowCounts:
    """What the steps of windows did, counted where it costs a step nothing.

    Of the timed windows together, and of the last window of every other purpose, but for its first
    one: in it strategies set themselves up. `images` are those that
    entered the model, `updates` steps of the optimizer, `collectives` those that torch's groups
    began, and `passes` those that batch norms count on the device.
    """

    def __init__(self, training: Training, ranks: Ranks) -> None:
        """Find out which collectives open a window. Collective."""
        self._training, self._ranks = training, ranks
        self._timed: Counter[str] = Counter()
        self._last: dict[str, Counter[str]] = {}  # by purpose; empty after the first window
        self._timed_groups: set[str] = set()
        before = collectives.begun(ranks.device)
        ranks.barrier()
        self._opening = collectives.begun(ranks.device) - before

    @contextmanager
    def window(self, purpose: str, steps: int) -> Iterator[None]:
        """Count the steps inside, which follow one barrier."""
        training, device = self._training, self._ranks.device
        images, updates, groups = training.images, training.updates, collectives.begun(device)
        yield
        begun = collectives.begun(device) - groups - self._opening
        counts = Counter(
            steps=steps,
            images=training.images - images,
            updates=training.updates - updates,
            collectives=begun.total(),
        )
        if purpose == "timed":
            self._timed_groups.update(begun)
            self._timed.update(counts)
        elif purpose in self._last:
            self._last[purpose] = counts
        else:
            self._last[purpose] = Counter()

    @contextmanager
    def timed_passes(self) -> Iterator[None]:
        """Count the passes of batch norms inside. Waits for the device."""
        before = passes(self._training.network)
        yield
        self._timed["passes"] = passes(self._training.network) - before

    def facts(self) -> dict[str, Any]:
        """Return the counts of all ranks together, by purpose, and the communicators. Collective.

        `communicators` are those of the device that were used so far; `timed` are the groups that
        the timed steps used.
        """
        counted: dict[str, dict[str, int]] = {}
        for purpose, own in {**self._last, "timed": self._timed}.items():
            if not own:
                continue
            of_ranks = self._ranks.gather(list(own.values()))
            counted[purpose] = {}
            for name, *values in zip(own, *of_ranks, strict=True):
                counted[purpose][name] = int(sum(values))
        live = len(+collectives.begun(self._ranks.device))
        timed = sorted(self._timed_groups)
        return {"counted": counted, "communicators": {"count": live, "timed": timed}}


def passes(network: nn.Module) -> int:
    """Return the passes that all batch norms of a network have counted. Waits for the device."""
    total = 0
    for name, buffer in network.named_buffers():
        if name.endswith(PASSES):
            total += int(buffer)
    return total


class SentTensors(TorchDispatchMode):
    """Sees what torch's collectives send: their names, elements and dtypes, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if operation.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            shapes = [f"{tensor.numel()} {_name(tensor.dtype)}" for tensor in tensors]
            self.rows.append(f"{operation} {', '.join(shapes)}")
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return operation(*arguments, **(options or {}))


@contextmanager
def sent(training: Training) -> Iterator[dict[str, Any]]:
    """Yield facts of the collectives that exchange gradients in the steps inside.

    Their number, their bytes and, of each operation, a checksum of the order, sizes and dtypes;
    `early` are the reductions in micro-steps before the last.
    Empty where a model is compiled: a compiled step runs as another under it. A user's own model
    may have compiled parts: its backward passes are not looked at.
    """
    facts: dict[str, Any] = {}
    if training.cell.compiled:
        yield facts
        return
    seen = SentTensors()
    stages = {"backward", "exchange"}
    if training.cell.model.library == OWN_MODEL:
        stages = {"exchange"}

    starts: list[int] = []  # of backward passes, as numbers of rows

    def watched(stage: str) -> AbstractContextManager[Any]:
        if training.exchanges and stage in stages:
            if stage == "backward":
                starts.append(len(seen.rows))
            return seen
        return UNMARKED

    usual, training.mark = training.mark, watched
    try:
        yield facts
    finally:
        training.mark = usual
        # Which of two operations comes first may depend on what has ended.
        rows = sorted(seen.rows, key=lambda row: row.partition(" ")[0])
        order = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
        facts |= {"collectives": len(seen.rows), "bytes": seen.bytes, "order": order}
        if training.cell.accumulate > 1 and starts:
            early = seen.rows[: starts[-1]]
            facts["early"] = sum("reduce" in row for row in early)


def updates(training: Training, steps: Iterable[Callable[[], object]]) -> dict[str, int]:
    """Take steps. Returns after how many of them a weight had moved, of some of each array.

    A step that the loss scaler skips does not count.
    """
    elements, counts = ComparedElements(training), {"updates": 0, "steps": 0}
    for step in steps:
        scale, before = training.scaler.get_scale(), elements.values(training.parameters)
        step()
        has_moved = not torch.equal(before, elements.values(training.parameters))
        if training.scaler.get_scale() >= scale:
            counts["steps"] += 1
            counts["updates"] += has_moved
    return counts


def batches(drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return whether all ranks drew different first batches, and how many this rank drew.

    Collective. `sample` has the dtype and the shape of one sample: of each tensor that forward
    takes, and of the targets.
    """
    checksums_of_inputs = [checksum(inputs) for *inputs, _ in drawn]
    first = {tuple(values) for values in ranks.gather(checksums_of_inputs[0])}
    counts = ranks.gather([len(set(checksums_of_inputs))])
    shapes = [f"{_name(tensor.dtype)} {list(tensor.shape[1:])}" for tensor in drawn[0]]
    return {
        "batches_differ": len(first) == ranks.world_size,
        "batches_in_turn": min(int(count) for (count,) in counts),
        "sample": {"inputs": shapes[:-1], "targets": shapes[-1]},
    }


@contextmanager
def arithmetic(training: Training) -> Iterator[dict[str, Any]]:
    """Yield facts that the forward passes inside fill in.

    `autocast` is the dtype that autocast had when the model was called, None where it was off.
    `layers` counts the convolutions and matrix products by the dtype that they returned; compiled
    ones are not seen; `elements` are those that they returned in one pass. `tf32` tells whether
    float32 operations may use it. `compiled_parts`, where torch.compile was asked for, counts those
    that forward went through. `images` are those of the smallest batch that the model was called
    with, and `evaluating` the modules that were in evaluation mode then. `passes` are those of
    `calls` that batch norms counted.
    """
    device_type, model = training.device.type, training.model
    compiled = training.cell.compiled
    layers: Counter[str] = Counter()
    facts: dict[str, Any] = {"autocast": None, "layers": layers, "elements": 0, "calls": 0}
    before = passes(training.network)

    def count_layer(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            layers[_name(output.dtype)] += 1
            facts["elements"] += output.numel()

    def watched(*inputs: Tensor) -> Tensor:
        facts.update(autocast=None, elements=0, calls=facts["calls"] + 1)
        facts["images"] = min(len(inputs[0]), facts.get("images", len(inputs[0])))
        facts["evaluating"] = sum(not module.training for module in training.network.modules())
        if torch.is_autocast_enabled(device_type):
            facts["autocast"] = _name(torch.get_autocast_dtype(device_type))
        outputs = model(*inputs)
        if compiled:
            facts["compiled_parts"] = compilation.parts(outputs)
        return outputs

    hooks = []
    for module in training.network.modules():
        if isinstance(module, LAYERS) and not compiled:  # a hook would compile it again
            hooks.append(module.register_forward_hook(count_layer))
    training.model = watched
    try:
        yield facts
    finally:
        training.model = model
        for hook in hooks:
            hook.remove()
        precision = torch.get_float32_matmul_precision()
        facts["layers"] = dict(layers)
        facts["passes"] = passes(training.network) - before
        facts["tf32"] = torch.backends.cudnn.allow_tf32 or precision != "highest"


class Weights:
    """The weights of a training at one time, as checksums."""

    def __init__(self, training: Training) -> None:
        self._training = training
        may_freeze = training.cell.model.library == OWN_MODEL  # on purpose
        self._weights: dict[str, nn.Parameter] = {}
        for name, weight in training.network.named_parameters():
            if weight.requires_grad or not may_freeze:
                self._weights[name] = weight
        self._before = checksums(list(self._weights.values()))

    def unchanged(self, ranks: Ranks) -> dict[str, Any]:
        """Return the arrays that should have moved since then and did not. Collective.

        They are those of the rank with most. An array whose gradient is too small to change any of
        its elements, or that takes no part, need not move.
        """
        names, weights = list(self._weights), list(self._weights.values())
        after = checksums(weights)
        still = []
        elements = all_elements = 0
        for index, weight in enumerate(weights):
            all_elements += weight.numel()
            if after[index] == self._before[index] and self._must_move(weight):
                still.append(index)
                elements += weight.numel()
        share = elements / (all_elements or 1)
        first = min(still, default=0)
        count, share, first_still = max(ranks.gather([len(still), share, first]))
        facts: dict[str, Any] = {"weights_still": int(count), "weights_still_share": share}
        if count:
            facts["weights_still_first"] = names[int(first_still)]
        return facts

    def _must_move(self, weight: nn.Parameter) -> bool:
        if not weight.requires_grad:
            return True
        if weight.grad is None:
            return False
        gradient, values = whole(weight.grad), whole(weight.detach())
        optimizer = self._training.cell.optimizer
        if optimizer.name == "adamw":
            # A step has the size of the rate, whatever the gradient's; alternating ones make it
            # smaller.
            step = (gradient != 0) * (optimizer.learning_rate * ALTERNATING)
        else:
            rate = optimizer.learning_rate / self._training.scaler.get_scale()
            step = gradient.abs() * rate
        return bool((step > values.abs() * torch.finfo(weight.dtype).eps).any())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
