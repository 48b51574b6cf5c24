"""What the links between neighbours, and the wire between hosts, allow when all ranks send."""

import torch
import torch.distributed as dist

from trainers.strategy import Hosts, ReferenceProbe

# Bytes of a message, and of what is gathered or all-reduced: larger than a GPU's L2 cache; small
# enough for gloo.
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
ITEM_BYTES = 4  # float32
# A CPU is measured three times, for the fastest to count: other programs may delay one.
TIMES = ("", "again", "once more")
NET_LINK = "net_link"


def ring(
    device: torch.device, bytes_each: float, group: dist.ProcessGroup | None = None
) -> list[ReferenceProbe]:
    """Return lower bounds for an exchange in which each rank of a group sends `bytes_each` bytes.

    On GPUs there are three ways around the ring, and the fastest counts: a message to the next
    rank, an all-gather and an all-reduce. NCCL gives each its own number of channels. Over gloo the
    message is no reference: an exchange has several under way, and this has one. There the
    reference is a copy in memory, since gloo copies every byte that it sends at least once.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size, on_gpu = MESSAGE_BYTES[device.type], device.type == "cuda"
    out, into = (torch.ones(size // ITEM_BYTES, device=device) for _ in range(2))

    def message() -> None:
        to_next = dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % world_size)
        from_last = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % world_size)
        for work in dist.batch_isend_irecv([to_next, from_last]):
            work.wait()

    probes = [ReferenceProbe("ring", message, bytes_each / size, reference=on_gpu)]
    if not on_gpu:
        # Of the exchange's own size: a small gradient stays in a cache, and its copy must too.
        elements = min(max(1, int(bytes_each / ITEM_BYTES)), out.numel())
        source, target = out[:elements], into[:elements]

        def copy() -> None:
            target.copy_(source)

        share = bytes_each / (elements * ITEM_BYTES)
        probes += [ReferenceProbe("memory_copy", copy, share, way=time) for time in TIMES]
    elif world_size > 1:
        own = into.numel() // world_size

        def gather() -> None:
            dist.all_gather_into_tensor(into[: own * world_size], out[:own], group=group)

        def reduce() -> None:
            dist.all_reduce(into, group=group)

        # Bytes of a rank in a gather, and in each half of an all-reduce.
        sent = own * ITEM_BYTES * (world_size - 1)
        probes.append(ReferenceProbe("ring", gather, bytes_each / sent, way="gather"))
        probes.append(ReferenceProbe("ring", reduce, bytes_each / (2 * sent), way="all-reduce"))
    return probes


def between_hosts(
    hosts: Hosts, device: torch.device, host_bytes: float, rail: dist.ProcessGroup | None = None
) -> list[ReferenceProbe]:
    """Return lower bounds for an exchange in which each host sends `host_bytes` bytes to others.

    None without other hosts. Every rank sends to its like on the next host, over NCCL or gloo as
    `device` says, in the group of its likes, `rail`, where they have one. On GPUs one large
    all-reduce is a second way.
    """
    here = len(hosts.ranks[0])
    if len(hosts.ranks) == 1:
        return []
    size = MESSAGE_BYTES[device.type]
    rank, ranks = dist.get_rank(rail), dist.get_world_size(rail)
    step = 1 if rail is not None else here
    out, into = (torch.ones(size // ITEM_BYTES, device=device) for _ in range(2))
    # In this order, or gloo does not send both ways at once. Seen between two hosts on a wire of
    # 1 Gbit/s: 0.119 GB/s each way, and 0.056 where the message that goes out is begun first.
    messages = [
        dist.P2POp(dist.irecv, into, group=rail, group_peer=(rank - step) % ranks),
        dist.P2POp(dist.isend, out, group=rail, group_peer=(rank + step) % ranks),
    ]

    def message() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    rank_bytes = host_bytes / here
    if device.type == "cpu":
        share = rank_bytes / size
        return [ReferenceProbe(NET_LINK, message, share, way=time) for time in TIMES]

    def reduce() -> None:
        dist.all_reduce(into, group=rail)

    # Bytes that each rank of a ring sends, and each host of a ring of all ranks.
    sent = size * 2 * (ranks - 1) / ranks
    in_ring = host_bytes if rail is None else rank_bytes
    return [
        ReferenceProbe(NET_LINK, message, rank_bytes / size),
        # Over sockets faster than one message each way.
        ReferenceProbe(NET_LINK, reduce, in_ring / sent, way="all-reduce"),
    ]
