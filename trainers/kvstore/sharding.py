"""Buckets that collectives move: flat tensors, padded so that every rank owns an equal share of each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore.buckets import Bucket, BucketLayout
from trainers.kvstore.shared_regions import DTYPES

# A share is a multiple of this many elements: 512 bytes of half precision, so that every share starts at an aligned address.
SHARE_ELEMENTS = 256


def share_of(bucket: Bucket, world_size: int) -> int:
    """Return the elements of a bucket that each rank owns, with the padding of the last rank."""
    return -(-bucket.elements // (world_size * SHARE_ELEMENTS)) * SHARE_ELEMENTS


def padded(layout: BucketLayout, world_size: int, in_weight_dtype: bool, device: torch.device) -> list[Tensor]:
    """Return zeros (world_size × share,) for each bucket, in the weights' dtype or the one that travels."""
    found = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.weight_dtype if in_weight_dtype else array.wire_dtype]
        found.append(torch.zeros(share_of(bucket, world_size) * world_size, dtype=dtype, device=device))
    return found


def shares(flats: Sequence[Tensor], rank: int, world_size: int) -> list[Tensor]:
    """Return a view (share,) of a rank's share of each flat tensor."""
    return [flat.chunk(world_size)[rank] for flat in flats]


def start_mean(share: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Reduce-scatter `flat` (ranks × share,): `share` has the mean over a group once `end_mean` was called too.

    Without a group, here and below: over all ranks.
    """
    work = dist.reduce_scatter_tensor(share, flat, mean_operation(flat), group, async_op=True)
    assert work is not None
    return work


def end_mean(work: dist.Work, share: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Make the current stream wait for the mean."""
    work.wait()
    if not share.is_cuda:
        share.div_(dist.get_world_size(group))


def all_shares(flats: Sequence[Tensor], own: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """All-gather the shares (share,) of a group's ranks into the flat tensors (ranks × share,)."""
    if flats and flats[0].is_cuda:
        # NCCL sends them in one kernel, as fast as one tensor of all bytes: on its own a small one does not fill the links.
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as together:
            for flat, share in zip(flats, own, strict=True):
                dist.all_gather_into_tensor(flat, share, group)
        together.wait()
        return
    works = [
        dist.all_gather_into_tensor(flat, share, group, async_op=True) for flat, share in zip(flats, own, strict=True)
    ]
    for work in works:
        assert work is not None
        work.wait()


def ring_bytes(sent_bytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends when a ring reduce-scatters and gathers `sent_bytes`: 2(n−1)/n of them.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return sent_bytes * 2 * (world_size - 1) / world_size


def mean_operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """Return the mean on GPUs. Return the sum on CPUs, since gloo has no mean: the caller divides."""
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM
