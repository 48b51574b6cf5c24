"""Memory that all ranks of a cell map: one file in /dev/shm, unlinked as soon as all have it, so that nothing stays behind."""

import mmap
import os
from pathlib import Path

import torch.distributed as dist

from benchmarks.rank.group import Ranks
from trainers.kvstore.shared_regions import Shared


def mapped(ranks: Ranks, size_bytes: int) -> mmap.mmap:
    """Zeroed bytes that every rank sees. Collective.

    Raises:
        OSError: there is not that much shared memory.
    """
    path = [str(Shared.new_path())]
    dist.broadcast_object_list(path, 0)
    file = Path(path[0])
    if ranks.rank == 0:
        file.write_bytes(bytes(size_bytes))  # takes the pages: one that cannot be had later is a SIGBUS
    ranks.barrier()
    opened = os.open(file, os.O_RDWR)
    memory = mmap.mmap(opened, size_bytes)
    os.close(opened)
    ranks.barrier()
    if ranks.rank == 0:
        file.unlink()
    return memory
