"""What the wire between hosts allows when all ranks send to another host at once."""

import torch
import torch.distributed as dist

from trainers.hosts import Hosts
from trainers.peers.ring_probe import ITEM_BYTES, MESSAGE_BYTES, TIMES
from trainers.strategy import ReferenceProbe

NAME = "net_link"


def probes(
    hosts: Hosts, device: torch.device, host_bytes: float, rail: dist.ProcessGroup | None = None
) -> list[ReferenceProbe]:
    """Return lower bounds for an exchange in which each host sends `host_bytes` bytes to others. Without other hosts: none.

    Every rank sends to the rank with its place on the next host, over NCCL or gloo as `device` says. Where the ranks with its
    place have a group, `rail`, they use that. On GPUs one large all-reduce is a second way.
    """
    here, count = len(hosts.ranks[0]), len(hosts.ranks)
    if count == 1:
        return []
    size, (rank, ranks) = MESSAGE_BYTES[device.type], (dist.get_rank(rail), dist.get_world_size(rail))
    step = 1 if rail is not None else here
    out, into = (torch.ones(size // ITEM_BYTES, device=device) for _ in range(2))
    # In this order, or gloo does not send both ways at once. Seen between two hosts on a wire of 1 Gbit/s: 0.119 GB/s each way,
    # and 0.056 where the message that goes out is begun first.
    messages = [
        dist.P2POp(dist.irecv, into, group=rail, group_peer=(rank - step) % ranks),
        dist.P2POp(dist.isend, out, group=rail, group_peer=(rank + step) % ranks),
    ]

    def message() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def reduce() -> None:
        dist.all_reduce(into, group=rail)

    rank_bytes = host_bytes / here
    if device.type == "cpu":
        return [ReferenceProbe(NAME, message, rank_bytes / size, way=time) for time in TIMES]
    sent = size * 2 * (ranks - 1) / ranks  # bytes that each rank of a ring sends, and each host of a ring of all ranks
    in_ring = host_bytes if rail is None else rank_bytes
    return [
        ReferenceProbe(NAME, message, rank_bytes / size),
        ReferenceProbe(NAME, reduce, in_ring / sent, way="all-reduce"),  # over sockets faster than one message each way
    ]
