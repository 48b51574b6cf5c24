"""What the wires between neighbours allow: every rank sends to the next and receives from the one before, all at once."""

import torch
import torch.distributed as dist

from trainers.strategies import Probe

# One message, larger than a GPU's L2 cache; small enough for gloo.
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}


def probe(device: torch.device, bytes_each: float) -> Probe:
    """What exchanges in which each rank sends `bytes_each` are held to, over the transport that this cell's settings give.

    Over gloo it is no limit: gloo has several messages under way where this has one.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = MESSAGE_BYTES[device.type]
    out, into = (torch.ones(size // 4, device=device) for _ in range(2))

    def run() -> None:
        to_next = dist.P2POp(dist.isend, out, (rank + 1) % world_size)
        from_last = dist.P2POp(dist.irecv, into, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([to_next, from_last]):
            work.wait()

    return Probe("ring", run, bytes_each / size, limit=device.type == "cuda")
