"""What the links between neighbours allow when all ranks send and receive at once."""

import torch
import torch.distributed as dist

from trainers.hosts import Hosts
from trainers.strategy import ReferenceProbe

# Bytes of a message, and of what is gathered or all-reduced: larger than a GPU's L2 cache; small enough for gloo.
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
ITEM_BYTES = 4  # float32
TIMES = (
    "",
    "again",
    "once more",
)  # a CPU is measured, for the fastest to count: other programs may delay one


def probes(
    device: torch.device, bytes_each: float, group: dist.ProcessGroup | None = None
) -> list[ReferenceProbe]:
    """Return lower bounds for an exchange in which each rank sends `bytes_each` bytes, over the transport that this cell uses.

    The ring is that of a group; None: of all ranks.

    On GPUs there are three ways around the ring, and the fastest counts: a message to the next rank, an all-gather and an
    all-reduce. NCCL gives each its own number of channels. Over gloo the message is no reference: an exchange has several under
    way, and this has one. There the reference is a copy in memory, since gloo copies every byte that it sends at least once.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size, on_gpu = MESSAGE_BYTES[device.type], device.type == "cuda"
    out, into = (torch.ones(size // ITEM_BYTES, device=device) for _ in range(2))

    def message() -> None:
        to_next = dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % world_size)
        from_last = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % world_size)
        for work in dist.batch_isend_irecv([to_next, from_last]):
            work.wait()

    one_message = ReferenceProbe("ring", message, bytes_each / size, reference=on_gpu)
    if not on_gpu:
        # Of the exchange's own size: a small gradient stays in a cache, and its copy must too.
        elements = min(max(1, int(bytes_each / ITEM_BYTES)), out.numel())
        source, target = out[:elements], into[:elements]
        copied = elements * ITEM_BYTES
        copies = [
            ReferenceProbe(
                "memory_copy", lambda: _copy(source, target), bytes_each / copied, way=time
            )
            for time in TIMES
        ]
        return [one_message, *copies]
    if world_size == 1:
        return [one_message]
    share = into.numel() // world_size

    def gather() -> None:
        dist.all_gather_into_tensor(into[: share * world_size], out[:share], group=group)

    def reduce() -> None:
        dist.all_reduce(into, group=group)

    passed_on = (
        share * ITEM_BYTES * (world_size - 1)
    )  # bytes of a rank in a gather, and in each half of an all-reduce
    return [
        one_message,
        ReferenceProbe("ring", gather, bytes_each / passed_on, way="gather"),
        ReferenceProbe("ring", reduce, bytes_each / (2 * passed_on), way="all-reduce"),
    ]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


# What the wire between hosts allows when all ranks send to another host at once.


NAME = "net_link"


def net_probe_probes(
    hosts: Hosts, device: torch.device, host_bytes: float, rail: dist.ProcessGroup | None = None
) -> list[ReferenceProbe]:
    """Return lower bounds for an exchange in which each host sends `host_bytes` bytes to others. Without other hosts: none.

    Every rank sends to the rank with its place on the next host, over NCCL or gloo as `device` says. Where the ranks with its
    place have a group, `rail`, they use that. On GPUs one large all-reduce is a second way.
    """
    here, count = len(hosts.ranks[0]), len(hosts.ranks)
    if count == 1:
        return []
    size, (rank, ranks) = (
        MESSAGE_BYTES[device.type],
        (dist.get_rank(rail), dist.get_world_size(rail)),
    )
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
    sent = (
        size * 2 * (ranks - 1) / ranks
    )  # bytes that each rank of a ring sends, and each host of a ring of all ranks
    in_ring = host_bytes if rail is None else rank_bytes
    return [
        ReferenceProbe(NAME, message, rank_bytes / size),
        ReferenceProbe(
            NAME, reduce, in_ring / sent, way="all-reduce"
        ),  # over sockets faster than one message each way
    ]
