"""Buckets that collectives move: flat tensors, padded so that every rank owns an equal share of each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore.buckets import Bucket, Layout
from trainers.kvstore.shared_regions import DTYPES

# A rank's share of a bucket is a multiple of so many elements.
SHARE_ELEMENTS = 256


def share_of(bucket: Bucket, world_size: int) -> int:
    """Elements of a bucket that each rank owns, the padding of the last included."""
    return -(-bucket.elements // (world_size * SHARE_ELEMENTS)) * SHARE_ELEMENTS


def padded(layout: Layout, world_size: int, kept: bool, device: torch.device) -> list[Tensor]:
    """A zeroed flat tensor for each bucket, `world_size` shares long, in the dtype of weights or of what is sent."""
    found = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.kept if kept else array.sent]
        found.append(torch.zeros(share_of(bucket, world_size) * world_size, dtype=dtype, device=device))
    return found


def shares(flats: Sequence[Tensor], rank: int, world_size: int) -> list[Tensor]:
    """A rank's share of each flat tensor, as views."""
    return [flat.chunk(world_size)[rank] for flat in flats]


def start_mean(share: Tensor, flat: Tensor) -> dist.Work:
    """Reduce-scatter: this rank's share of the mean over all ranks, once `end_mean` was called too."""
    work = dist.reduce_scatter_tensor(share, flat, operation(flat), async_op=True)
    assert work is not None
    return work


def end_mean(work: dist.Work, share: Tensor) -> None:
    """The current stream waits for the mean."""
    work.wait()
    if not share.is_cuda:
        share.div_(dist.get_world_size())


def all_shares(flats: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    """All-gather: every rank's shares into the flat tensors."""
    works = [dist.all_gather_into_tensor(flat, share, async_op=True) for flat, share in zip(flats, mine, strict=True)]
    for work in works:
        assert work is not None
        work.wait()


def ring_bytes(sent_bytes: float, world_size: int) -> float:
    """What each rank sends of flat buckets that are reduce-scattered and gathered again: (n−1)/n of them, twice."""
    return sent_bytes * 2 * (world_size - 1) / world_size


def operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """The mean, where the backend has it."""
    # gloo can only sum.
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM
