"""Facts about correctness of every cell: whether replicas agree, and how far the exchanged gradient is from the mean.

Equal replicas alone prove nothing (equal data and no exchange give them too), so ranks see different data, and the
gradient after the exchange is compared with the mean of the gradients before it, summed by another path in float64.
"""

import hashlib

import torch
import torch.distributed as dist

from benchmarks.rank.group import Ranks
from trainers.step import Training

# Relative error that rounding may leave in the exchanged gradient, by arithmetic. Backward runs twice, and cuDNN's
# backward kernels may sum in another order each time.
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 4e-2, "fp16": 4e-2, "bf16_weights": 4e-2}
# Elements compared of each rank's gradient: bounds the cost of the float64 path for large models.
MOST_ELEMENTS = 4_000_000


def replicas_equal(training: Training, ranks: Ranks) -> bool:
    """Return whether the weights of all ranks are equal, bit for bit. Collective."""
    digest = hashlib.sha256()
    for parameter in training.parameters:
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return len({tuple(values) for values in ranks.gather([float(byte) for byte in digest.digest()])}) == 1


def gradient_error(training: Training, ranks: Ranks) -> tuple[float, float]:
    """Compare the exchanged gradient and the local ones with the mean of the local ones.

    Returns (error, spread): ‖exchanged − mean‖ / ‖mean‖, the largest of any rank, and ‖local − mean‖ / ‖mean‖, the smallest
    of any rank. An error far below the spread proves an exchange. Collective; leaves weights as they were.
    """
    batch = next(training.batches)
    with training.strategy.without_exchange():
        _seeded_backward(training, batch)
    local = _gradient(training)
    total = local.clone()
    dist.all_reduce(total)
    mean = total / ranks.world_size
    with training.strategy.gradients_only():
        _seeded_backward(training, batch)
    exchanged = _gradient(training)
    training.optimizer.zero_grad(set_to_none=True)
    norm = mean.norm().item() or 1.0
    error, spread = (exchanged - mean).norm().item() / norm, (local - mean).norm().item() / norm
    gathered = ranks.gather([error, spread])
    return max(values[0] for values in gathered), min(values[1] for values in gathered)


def _seeded_backward(training: Training, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run backward with the same dropout masks each time."""
    torch.manual_seed(training.cell.seed)
    training.backward(batch)


def _gradient(training: Training) -> torch.Tensor:
    """Return a sample of the gradient, (elements,) in float64 on the host: an equal share of every parameter's elements."""
    elements = sum(parameter.numel() for parameter in training.parameters)
    stride = -(-elements // MOST_ELEMENTS)
    parts = [p.grad.detach().flatten()[::stride].double().cpu() for p in training.parameters if p.grad is not None]
    return torch.cat(parts)
