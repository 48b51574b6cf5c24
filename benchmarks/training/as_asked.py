"""Facts about what ran, to be compared with what was asked: batches, arithmetic, compiled parts, weights.

Each is found once in a cell, outside the timed windows. analysis.validity.as_asked judges them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rank.group import Ranks
from benchmarks.timing import compilation
from benchmarks.training import digest
from trainers.own_model import Batch
from trainers.step import Training

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)  # what autocast computes in half precision
OWN = "python"  # the library of a user's own model, which may freeze weights on purpose
ALTERNATING = 0.1  # share of its rate that AdamW surely moves a weight


def batches(drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return whether all ranks drew different first batches, and how many different ones this rank drew. Collective."""
    digests = [digest.of_all(inputs) for *inputs, _ in drawn]
    first = [tuple(values) for values in ranks.gather(digests[0])]
    in_turn = min(int(count) for (count,) in ranks.gather([len(set(digests))]))
    return {
        "batches_differ": len(set(first)) == ranks.world_size,
        "batches_in_turn": in_turn,
        "sample": _sample(drawn[0]),
    }


def _sample(batch: Batch) -> dict[str, Any]:
    """Return the dtype and the shape of one sample: of each tensor that forward takes, and of the targets."""
    *inputs, targets = (f"{_word(tensor.dtype)} {list(tensor.shape[1:])}" for tensor in batch)
    return {"inputs": inputs, "targets": targets}


@contextmanager
def arithmetic(training: Training) -> Iterator[dict[str, Any]]:
    """Yield facts that the forward passes inside fill in.

    `autocast` is the dtype that autocast had when the model was called, None where it was off. `layers` counts the
    convolutions and matrix products by the dtype that they returned; compiled ones are not seen. `tf32` tells whether float32
    operations may use it. `compiled_parts`, where torch.compile was asked for, counts those that forward went through.
    """
    kind, real = training.device.type, training.model
    layers: Counter[str] = Counter()
    found: dict[str, Any] = {"autocast": None, "layers": layers}

    def seen(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            layers[_word(output.dtype)] += 1

    def watched(*inputs: Tensor) -> Tensor:
        found["autocast"] = _word(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        outputs = real(*inputs)
        if compiled:
            found["compiled_parts"] = compilation.parts(outputs)
        return outputs

    compiled = training.cell.compiled  # a hook would compile it again
    modules = [] if compiled else [module for module in training.network.modules() if isinstance(module, LAYERS)]
    hooks = [module.register_forward_hook(seen) for module in modules]
    training.model = watched
    try:
        yield found
    finally:
        training.model = real
        for hook in hooks:
            hook.remove()
        found["layers"] = dict(layers)
        found["tf32"] = torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"


class Weights:
    """The weights of a training at one time, as checksums."""

    def __init__(self, training: Training) -> None:
        self._training = training
        own = training.cell.model.library == OWN
        self._named = {
            name: weight for name, weight in training.network.named_parameters() if weight.requires_grad or not own
        }
        self._before = digest.of_each(list(self._named.values()))

    def still(self, ranks: Ranks) -> dict[str, Any]:
        """Return facts about the arrays that should have moved since then and did not, on the rank with most. Collective.

        An array whose gradient is too small to change any of its elements, or that takes no part, need not move.
        """
        after, names = digest.of_each(list(self._named.values())), list(self._named)
        still = [
            number
            for number, weight in enumerate(self._named.values())
            if after[number] == self._before[number] and self._must_move(weight)
        ]
        share = sum(self._named[names[number]].numel() for number in still) / self._elements()
        count, share, first = max(ranks.gather([len(still), share, still[0] if still else 0]))
        return {"weights_still": int(count), "weights_still_share": share} | (
            {"weights_still_first": names[int(first)]} if count else {}
        )

    def _elements(self) -> int:
        return sum(weight.numel() for weight in self._named.values()) or 1

    def _must_move(self, weight: nn.Parameter) -> bool:
        """Tell whether one step changes an element of this array."""
        if not weight.requires_grad:
            return True
        if weight.grad is None:
            return False
        asked = self._training.cell.optimizer
        if asked.name == "adamw":
            # A step has the size of the rate, whatever the gradient's; alternating ones make it smaller.
            step = (weight.grad != 0) * (asked.learning_rate * ALTERNATING)
        else:
            step = weight.grad.abs() * (asked.learning_rate / self._training.scaler.get_scale())
        return bool((step > weight.detach().abs() * torch.finfo(weight.dtype).eps).any())


def trained_bytes(training: Training) -> int:
    """Return the bytes of all gradients: of every weight of the network that is trained."""
    return sum(weight.nbytes for weight in training.network.parameters() if weight.requires_grad)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
