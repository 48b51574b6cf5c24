"""Facts about correctness of every cell: whether replicas agree, and how far the exchanged gradient is from the mean.

Equal replicas alone prove nothing (equal data and no exchange give them too), so ranks see different data, and the
gradient after the exchange is compared with the mean of the gradients before it, which takes another path: over gloo and the
hosts' memory, without a reduction of any backend. NCCL takes no part, or what it breaks would be in both, and a cell that has
nothing to do with NCCL, or an algorithm of it that gathers nothing, would have a communicator and traffic of the check's own.
All else is done on the device.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank.group import Ranks
from benchmarks.training import digest
from trainers.own_model import Batch
from trainers.step import Training

# Runs of backward without exchange on the same batch: what differs among them is what the arithmetic leaves open, since
# cuDNN's backward kernels may sum in another order each time.
RUNS = 3
MARGIN = 10  # times that difference may be between the exchanged gradient and the mean
# Elements compared of each rank's gradient: bounds the cost of the float64 path for large models. A small array is compared
# whole, or a large one would hide it.
MOST_ELEMENTS, WHOLE_ELEMENTS = 1_000_000, 1024


def replicas_equal(training: Training, ranks: Ranks) -> bool:
    """Return whether the weights of all ranks are equal, bit for bit, by their checksums. Collective."""
    return len({tuple(values) for values in ranks.gather(digest.of_all(training.parameters))}) == 1


@dataclass(frozen=True)
class ComparedElements:
    """Which elements of a gradient are compared: every element of a small array, an equal share of each large one."""

    strides: list[int]
    counts: Tensor  # (arrays,): elements of each

    @classmethod
    def of(cls, training: Training) -> "ComparedElements":
        """Choose the elements of a training's gradient."""
        sizes = [parameter.numel() for parameter in training.parameters]
        share = _next_prime(-(-sum(sizes) // MOST_ELEMENTS))  # a prime shares no pattern with what is lost regularly
        strides = [max(1, min(share, size // WHOLE_ELEMENTS)) for size in sizes]
        counts = torch.tensor([-(-size // stride) for size, stride in zip(sizes, strides, strict=True)])
        return cls(strides, counts)

    def gradient(self, training: Training) -> Tensor:
        """Return the chosen elements, (elements,) in float64 on the device; zeros of an array without a gradient."""
        return self.values([torch.zeros_like(one) if one.grad is None else one.grad for one in training.parameters])

    def values(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the chosen elements of arrays, (elements,) in float64 on their device."""
        parts = [
            array.detach().flatten()[::stride].double() for array, stride in zip(arrays, self.strides, strict=True)
        ]
        return torch.cat(parts)

    def by_array(self, values: Tensor) -> Tensor:
        """Return Σ|value| of each array, (arrays,), added up in the same order each time."""
        return torch.stack(torch._foreach_norm(list(values.split(self.counts.tolist())), 1))


def gradient(training: Training, batch: Batch, ranks: Ranks) -> dict[str, Any]:
    """Return facts: how far the exchanged gradient is from the mean of the local ones, and how far it may be.

    `gradient_error` is ‖exchanged − mean‖ ÷ ‖mean‖, the largest of any rank. `gradient_spread` is ‖local − mean‖ ÷ ‖mean‖, the
    smallest of any rank: an error far below the spread proves an exchange. `gradient_repeat` is the same difference between
    runs of backward without exchange, and `gradient_tolerance` MARGIN times that, with what the exchange must round.
    `gradient_worst` says the same of the worst array: Σ|exchanged − mean| ÷ Σ of the ranks' mean |gradient|, beside its own
    tolerance. Collective; leaves weights as they were.
    """
    sample = ComparedElements.of(training)
    with training.without_exchange():
        runs = [_seeded(training, batch, sample) for _ in range(RUNS)]
    with training.strategy.gradients_only():
        exchanged = _seeded(training, batch, sample)
    training.optimizer.zero_grad(set_to_none=True)
    local, mean = runs[0], _mean(runs[0], ranks)
    wrong = exchanged - mean
    pairs = [one - other for one, other in itertools.combinations(runs, 2)]
    repeat = torch.stack([pair.norm() for pair in pairs]).max()
    norms = gathered(ranks, torch.stack([wrong.norm(), (local - mean).norm(), local.norm(), repeat]))
    repeats = torch.stack([sample.by_array(pair) for pair in pairs]).amax(0)
    by_array = gathered(ranks, torch.stack([sample.by_array(wrong), repeats, sample.by_array(local)]))

    norm = mean.norm().item() or 1.0
    error, _, size, repeat = (value / norm for value in norms.amax(0).tolist())  # torch's maximum keeps NaN
    rounding = torch.tensor([_rounding(training, p.dtype, ranks.world_size) for p in training.parameters]).double()
    step = training.strategy.smallest_step
    tolerance = MARGIN * repeat + rounding.max().item() * size + step * len(mean) ** 0.5 / norm
    wrongs, repeats, _ = by_array.amax(0)
    worst_array = worst(wrongs, repeats, by_array[:, 2].mean(0), rounding, step * sample.counts)
    return {
        "gradient_error": error,
        "gradient_spread": norms[:, 1].min().item() / norm,
        "gradient_repeat": repeat,
        "gradient_tolerance": tolerance,
        "gradient_worst": worst_array | {"array": training.names[worst_array["array"]]},
    }


def _mean(local: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean over the ranks of (elements,) values, on their device. Collective.

    Every rank gets its share of the elements from all ranks over gloo, adds them up itself and gives the means to all.
    """
    own = torch.nn.functional.pad(local.cpu(), (0, -len(local) % ranks.world_size))
    of_all, mean = torch.empty_like(own), torch.empty_like(own)
    dist.all_to_all_single(of_all, own)
    dist.all_gather_into_tensor(mean, of_all.view(ranks.world_size, -1).sum(0) / ranks.world_size)
    return mean[: len(local)].to(local.device)


def worst(wrong: Tensor, repeats: Tensor, sizes: Tensor, rounding: Tensor, smallest: Tensor) -> dict[str, Any]:
    """Return the array, by number, whose error is the most of its tolerance; all are (arrays,) sums of |value|."""
    # An array of few elements may repeat by chance: none is trusted to repeat better than most arrays do.
    usual = (repeats / sizes).nan_to_num(0.0).median() * sizes
    allowed = MARGIN * torch.maximum(repeats, usual) + rounding * sizes + smallest
    share = torch.where(wrong == 0, 0.0, wrong / allowed)
    number = int(share.argmax())  # torch's: NaN is the largest
    size = sizes[number].item() or 1.0
    return {"array": number, "error": wrong[number].item() / size, "tolerance": allowed[number].item() / size}


def _rounding(training: Training, dtype: torch.dtype, world_size: int) -> float:
    """Return the share of Σ|local| that the exchange may round: each of n sums half a unit in the last place, and reserve."""
    return max(training.strategy.rounding, world_size * torch.finfo(dtype).eps)


def gathered(ranks: Ranks, values: Tensor) -> Tensor:
    """Return the values of every rank, (ranks, *shape). Collective."""
    of_ranks = torch.tensor(ranks.gather(values.flatten().tolist()), dtype=torch.float64)
    return of_ranks.view(-1, *values.shape)


def _seeded(training: Training, batch: Batch, sample: ComparedElements) -> Tensor:
    """Run backward with the same dropout masks each time. Return the chosen elements of the gradient."""
    torch.manual_seed(training.cell.seed)
    training.backward(batch)
    return sample.gradient(training)


def _next_prime(number: int) -> int:
    """Return the smallest prime that is not below a number."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
