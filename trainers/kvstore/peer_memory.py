"""GPU memory that the ranks of a host write into each other by copy engines, with flags that say when all is there.

A copy takes no multiprocessor from the kernels of a step, and nothing is copied on the way. Seen on two H200s: 51 MB go both ways
at the rate of a peer copy, where NCCL's ring takes half as long again.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainers import shared_memory
from trainers.kvstore import cuda_copies
from trainers.kvstore.buckets import aligned
from trainers.kvstore.server import FLAG_BYTES
from trainers.peers import told
from trainers.peers.groups import Peers


class PeerMemory:
    """This rank's memory among that of all ranks, which are on one host: the same bytes at the same place on each.

    What a rank sends may be written over what a peer had read before it began a collective that this rank has waited for.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate zeros, and open the others' memory. Collective.

        Raises:
            RuntimeError: there is not that much memory, or a GPU cannot address another.
            OSError: not enough shared memory.
        """
        self._peers = Peers(dist.get_rank(), dist.get_world_size())
        rank, ranks = self._peers.rank, self._peers.size
        self._exported = cuda_copies.Exported(size_bytes, device)
        self.bytes: Tensor = self._exported.bytes.zero_()  # (size_bytes,) uint8
        torch.cuda.synchronize()  # before others write
        handles = told.by_all([self._exported.handle().hex()])
        # Each begins with the next rank: no GPU is written by all at once.
        self._others = [(rank + step) % ranks for step in range(1, ranks)]
        self._imported = {other: cuda_copies.imported(bytes.fromhex(handles[other][0])) for other in self._others}
        self._flags = self._shared_flags(ranks)
        self._sent = 0  # rounds so far
        self._copies = cuda_copies.CopyStream(torch.cuda.Stream())

    def _shared_flags(self, ranks: int) -> int:
        """Return where GPUs see the flags, int32 of (reader, writer): the last round that has ended."""
        path = shared_memory.named(self._peers.from_rank_zero(shared_memory.new_path().name))
        size_bytes = aligned(FLAG_BYTES * ranks * ranks)
        if self._peers.rank == 0:
            self._mapping = shared_memory.create(path, size_bytes)
        self._peers.barrier()
        if self._peers.rank != 0:
            self._mapping = shared_memory.attach(path, size_bytes)
        self._peers.barrier()
        if self._peers.rank == 0:
            path.unlink()
        self._address = torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8)).data_ptr()
        cuda_copies.page_lock(self._address, size_bytes)
        return cuda_copies.device_address(self._address)

    @property
    def stream(self) -> torch.cuda.Stream:
        """Return the stream of the copies."""
        return self._copies.stream

    def send(self, part: Tensor) -> None:
        """Copy a part of this memory to the same place of all others, behind what `stream` has."""
        offset = part.data_ptr() - self._exported.address
        for other in self._others:
            self._copies.copy(self._imported[other] + offset, part.data_ptr(), part.nbytes)

    def end(self) -> None:
        """End a round: `stream` waits until all that others sent in it is here. Every rank ends as many rounds."""
        self._sent += 1
        for other in self._others:
            self._copies.write_flag(self._flag(other, self._peers.rank), self._sent)
        for other in self._others:
            self._copies.wait_flag(self._flag(self._peers.rank, other), self._sent)

    def _flag(self, reader: int, writer: int) -> int:
        return self._flags + FLAG_BYTES * (reader * self._peers.size + writer)

    def close(self) -> None:
        """Give the memory back, of which no tensor may be used any more. Collective."""
        torch.cuda.synchronize()
        self._peers.barrier()  # until no copy is under way
        cuda_copies.give_back(self._address, self._imported.values())
        self._peers.barrier()  # until nobody has it open
        self._exported.free()
