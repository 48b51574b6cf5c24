"""The collectives that exchange one bucket, in buffers of their own: what a forecast times by itself, by bytes."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.strategy import BucketExchange

Group = dist.ProcessGroup | None  # None: all ranks
# Values start small where gloo sums them, so that float32 does not overflow in some hundred calls on a few ranks.
SMALL = 1e-30


def all_reduce(size_bytes: int, dtype: str, device: torch.device, group: Group = None) -> BucketExchange:
    """Return an all-reduce."""
    flat = _filled(size_bytes, dtype, device, 1)

    def run() -> None:
        _wait(dist.all_reduce(flat, _operation(flat), group, async_op=True))

    return BucketExchange("all_reduce", run)


def sharded(size_bytes: int, dtype: str, returned: torch.dtype, device: torch.device) -> BucketExchange:
    """Return a reduce-scatter, and an all-gather of as many elements of the dtype `returned`."""
    ranks = dist.get_world_size()
    flat = _filled(size_bytes, dtype, device, ranks)
    share, weights = flat.new_empty(flat.numel() // ranks), torch.zeros_like(flat, dtype=returned)
    own = weights.chunk(ranks)[dist.get_rank()]

    def run() -> None:
        _wait(dist.reduce_scatter_tensor(share, flat, _operation(flat), async_op=True))
        _wait(dist.all_gather_into_tensor(weights, own, async_op=True))

    return BucketExchange("reduce_scatter + all_gather", run)


def owned(size_bytes: int, dtype: str, returned: torch.dtype, device: torch.device) -> BucketExchange:
    """Return a reduce to rank 0, and a broadcast of as many elements of the dtype `returned`."""
    flat = _filled(size_bytes, dtype, device, 1)
    weights = torch.zeros_like(flat, dtype=returned)

    def run() -> None:
        _wait(dist.reduce(flat, 0, _operation(flat), async_op=True))
        _wait(dist.broadcast(weights, 0, async_op=True))

    return BucketExchange("reduce + broadcast", run)


def in_two_levels(
    size_bytes: int, dtype: str, device: torch.device, inside: Group, rail: Group, place: int, here: int
) -> BucketExchange:
    """Return a reduction inside a host of `here` ranks, one of this rank's share on its rail, and an all-gather inside."""
    flat = _filled(size_bytes, dtype, device, here)
    share = flat.chunk(here)[place]
    # As trainers.strategies.hierarchical: gloo's own reduce-scatter is an all-reduce of a copy.
    scatter = "reduce_scatter" if flat.is_cuda else "all_reduce"
    steps = [*([scatter] if here > 1 else []), *(["all_reduce"] if rail else []), *(["all_gather"] if here > 1 else [])]

    def run() -> None:
        if here > 1 and flat.is_cuda:
            _wait(dist.reduce_scatter_tensor(share, flat, _operation(flat), inside, async_op=True))
        elif here > 1:
            _wait(dist.all_reduce(flat, group=inside, async_op=True))
        if rail is not None:
            _wait(dist.all_reduce(share, _operation(share), rail, async_op=True))
        if here > 1:
            _wait(dist.all_gather_into_tensor(flat, share, inside, async_op=True))

    return BucketExchange(" + ".join(steps), run)


def _filled(size_bytes: int, dtype: str, device: torch.device, multiple_of: int) -> Tensor:
    """Return values (elements,), as many as a multiple of some number; random on GPUs, whose power depends on them."""
    of: torch.dtype = getattr(torch, dtype)
    elements = max(1, -(-size_bytes // (of.itemsize * multiple_of))) * multiple_of
    return (
        torch.randn(elements, device=device).to(of)
        if device.type == "cuda"
        else torch.full((elements,), SMALL, dtype=of)
    )


def _operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """Return the mean on GPUs, and the sum on CPUs: gloo has no mean."""
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM


def _wait(work: dist.Work | None) -> None:
    """Make the current stream wait for a collective; on a CPU worker the thread waits."""
    assert work is not None
    work.wait()
