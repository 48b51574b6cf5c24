"""The exchange of halo rows after an iteration: each rank's first row goes to the rank before, its last to the one after.

The grid is a ring of ranks. `send` is called when a rank's outer rows are computed (or enqueued), `receive` before the next
iteration reads the halo; what lies between hides the exchange. Two buffers in turn need no acknowledgement: a rank can only
be one iteration ahead of its neighbours, since it needs their rows, and they have read its rows before they send theirs.
"""

import time
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.jacobi.grid import Slab
from benchmarks.jacobi.request import FLAGS_BYTES, shared_bytes
from benchmarks.rank.ranks import Ranks
from trainers import collectives

FLAG_BYTES = 4
PAUSE_SECONDS = 20e-6
BEFORE, AFTER = 0, 1  # the two neighbours, and the halo that each fills


class Halo(Protocol):
    """An exchange of halo rows. `number` counts iterations of all solves, from 1; its state lies in buffers[number % 2]."""

    def send(self, number: int) -> None:
        """Send the outer rows of this iteration, which are computed, or enqueued on the current stream."""

    def receive(self, number: int) -> None:
        """Fill the halo of this iteration; the current stream waits for it."""


def outer_rows(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows for the rank before and for the one after."""
    return buffer[1], buffer[-2]


def halo_rows(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that the rank before and the one after fill."""
    return buffer[0], buffer[-1]


def addresses(rows: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Return the addresses of two rows' first elements."""
    return rows[0].data_ptr(), rows[1].data_ptr()


class OwnNeighbour:
    """The exchange of a single rank, which is its own neighbour."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def send(self, number: int) -> None:
        """Copy within the slab."""
        buffer = self._slab.buffers[number % 2]
        buffer[0].copy_(buffer[-2])
        buffer[-1].copy_(buffer[1])

    def receive(self, number: int) -> None:
        """Do nothing: the copies are made or enqueued in order."""


class GlooHalo:
    """Messages of gloo. A tag tells the two rows apart where both neighbours are one rank."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        self._slab = slab
        self._before, self._after = neighbours(ranks)
        self._works: list[Any] = []

    def send(self, number: int) -> None:
        """Start all four messages."""
        buffer = self._slab.buffers[number % 2]
        (first, last), (above, below) = outer_rows(buffer), halo_rows(buffer)
        self._works = [
            dist.irecv(above, self._before, tag=1),
            dist.irecv(below, self._after, tag=2),
            dist.isend(last, self._after, tag=1),
            dist.isend(first, self._before, tag=2),
        ]

    def receive(self, number: int) -> None:
        """Wait for all four messages."""
        for work in self._works:
            work.wait()


class SharedRows:
    """Rows and flags in host memory that all ranks map, indexed [rank][0: to the rank before, 1: to the rank after]."""

    def __init__(self, ranks: Ranks, row_bytes: int) -> None:
        """Map rows of `row_bytes`; 0: flags only. Collective."""
        count = 2 * ranks.world_size
        raw = np.frombuffer(
            ranks.map_shared(shared_bytes(ranks.world_size, row_bytes)), dtype=np.uint8
        )
        assert count * FLAG_BYTES <= FLAGS_BYTES
        self.size_bytes = len(raw)
        self.address = int(raw.__array_interface__["data"][0])
        self.flags = raw[: count * FLAG_BYTES].view(np.int32).reshape(ranks.world_size, 2)
        self.rows = (
            torch.from_numpy(raw[FLAGS_BYTES:])
            .view(torch.float32)
            .view(2, ranks.world_size, 2, row_bytes // 4)
        )

    def flag(self, rank: int, side: int) -> int:
        """Return the offset in bytes of a flag, which holds the last iteration whose row a rank has sent to that side."""
        return FLAG_BYTES * (2 * rank + side)


class HostOnCpu:
    """The exchange of CPU workers through shared memory."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        self._slab, self._rank = slab, ranks.rank
        self._before, self._after = neighbours(ranks)
        self._shared = SharedRows(ranks, 4 * slab.pitch)

    def send(self, number: int) -> None:
        """Write rows, then flags: x86 keeps the order of stores."""
        for side, row in enumerate(outer_rows(self._slab.buffers[number % 2])):
            self._shared.rows[number % 2, self._rank, side] = row
            self._shared.flags[self._rank, side] = number

    def receive(self, number: int) -> None:
        """Wait for the neighbours' rows, and read them."""
        above, below = halo_rows(self._slab.buffers[number % 2])
        for halo, neighbour, side in ((above, self._before, AFTER), (below, self._after, BEFORE)):
            while self._shared.flags[neighbour, side] < number:
                time.sleep(PAUSE_SECONDS)
            halo.copy_(self._shared.rows[number % 2, neighbour, side])


class GpuHalo:
    """What the exchanges of GPUs have in common: a stream of its own with priority over that of the computation."""

    def __init__(self, slab: Slab) -> None:
        self._row_bytes = 4 * slab.pitch
        self._outer = [addresses(outer_rows(buffer)) for buffer in slab.buffers]
        self._stream = torch.cuda.Stream(slab.device, priority=-1)
        self._ready = torch.cuda.Event()

    def _after_the_rows(self) -> None:
        """Have the stream wait until the outer rows are computed."""
        self._ready.record()
        self._stream.wait_event(self._ready)


class HostOnGpu(GpuHalo):
    """The exchange through page-locked shared memory; streams write the flags and wait for them."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        from trainers.kvstore import cuda_copies

        super().__init__(slab)
        before, after = neighbours(ranks)
        self._shared = shared = SharedRows(ranks, self._row_bytes)
        cuda_copies.page_lock(shared.address, shared.size_bytes)
        flags = cuda_copies.device_address(shared.address)
        mine = [flags + shared.flag(ranks.rank, side) for side in (BEFORE, AFTER)]
        theirs = [flags + shared.flag(before, AFTER), flags + shared.flag(after, BEFORE)]
        # For each of the two buffers: (flag, to, from) of the rows that go out, and of those that come in.
        self._outward, self._inward = [], []
        for turn, buffer in enumerate(slab.buffers):
            slots = addresses(
                (shared.rows[turn, ranks.rank, BEFORE], shared.rows[turn, ranks.rank, AFTER])
            )
            self._outward.append(list(zip(mine, slots, self._outer[turn], strict=True)))
            slots = addresses((shared.rows[turn, before, AFTER], shared.rows[turn, after, BEFORE]))
            self._inward.append(list(zip(theirs, addresses(halo_rows(buffer)), slots, strict=True)))
        self._out = cuda_copies.CopyStream(self._stream)
        self._in = cuda_copies.CopyStream(torch.cuda.Stream(slab.device, priority=-1))

    def send(self, number: int) -> None:
        """Copy the rows to host memory, and the neighbours' rows from there."""
        self._after_the_rows()
        for flag, target, source in self._outward[number % 2]:
            self._out.copy(target, source, self._row_bytes)
            self._out.write_flag(flag, number)
        for flag, target, source in self._inward[number % 2]:
            self._in.wait_flag(flag, number)
            self._in.copy(target, source, self._row_bytes)

    def receive(self, number: int) -> None:
        """Have the current stream wait for the copies."""
        torch.cuda.current_stream().wait_stream(self._in.stream)


class Peer(GpuHalo):
    """Copies straight into the neighbours' memory (CUDA IPC). Flags lie in host memory; streams write and wait for them."""

    def __init__(self, slab: Slab, ranks: Ranks, handle: bytes) -> None:
        """Open the neighbours' memory; `handle` is that of the slab's two buffers. Collective.

        Raises:
            ValueError: a GPU cannot address its neighbour's memory.
        """
        from trainers.kvstore import cuda_copies

        super().__init__(slab)
        before, after = neighbours(ranks)
        for neighbour in {before, after}:
            if not torch.cuda.can_device_access_peer(ranks.rank, neighbour):
                raise ValueError(
                    f"benchmark.exchange=peer: the GPU of rank {ranks.rank} cannot address that of rank {neighbour}; accepted "
                    "here are host and nccl"
                )
        everyone = collectives.all_gather_json(
            {"handle": handle.hex(), "rows": slab.rows.count + 2}
        )
        rows = [int(one["rows"]) for one in everyone]
        bases = {
            rank: cuda_copies.imported(bytes.fromhex(everyone[rank]["handle"]))
            for rank in {before, after}
        }
        # My first row becomes the last one, a halo, of the rank before; my last row the first one of the rank after.
        self._targets = []
        for turn in range(2):
            first = {
                rank: base + turn * rows[rank] * self._row_bytes for rank, base in bases.items()
            }
            self._targets.append(
                (first[before] + (rows[before] - 1) * self._row_bytes, first[after])
            )
        self._shared = shared = SharedRows(ranks, 0)
        cuda_copies.page_lock(shared.address, shared.size_bytes)
        flags = cuda_copies.device_address(shared.address)
        self._mine = [flags + shared.flag(ranks.rank, side) for side in (BEFORE, AFTER)]
        self._theirs = [flags + shared.flag(before, AFTER), flags + shared.flag(after, BEFORE)]
        self._lane, self._reader = (
            cuda_copies.CopyStream(self._stream),
            cuda_copies.CopyStream(torch.cuda.current_stream()),
        )

    def send(self, number: int) -> None:
        """Copy both rows, and write a flag after each."""
        self._after_the_rows()
        for flag, target, source in zip(
            self._mine, self._targets[number % 2], self._outer[number % 2], strict=True
        ):
            self._lane.copy(target, source, self._row_bytes)
            self._lane.write_flag(flag, number)

    def receive(self, number: int) -> None:
        """Have the stream that was current at the start wait for both neighbours' flags."""
        for flag in self._theirs:
            self._reader.wait_flag(flag, number)


class NcclRows(GpuHalo):
    """The exchange as one NCCL group of two sends and two receives."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        from benchmarks.collectives.calls import NcclCalls

        super().__init__(slab)
        before, after = neighbours(ranks)
        calls = NcclCalls(ranks, "sum", 0, self._stream)
        self._exchanges = []
        for buffer in slab.buffers:
            (first, last), (above, below) = outer_rows(buffer), halo_rows(buffer)
            # Where both neighbours are one rank, its first row comes first.
            messages = [("ncclSend", first, before), ("ncclSend", last, after)]
            messages += [("ncclRecv", below, after), ("ncclRecv", above, before)]
            self._exchanges.append(calls.exchange(messages))

    def send(self, number: int) -> None:
        """Enqueue the group."""
        self._after_the_rows()
        self._exchanges[number % 2]()

    def receive(self, number: int) -> None:
        """Have the current stream wait for the group."""
        torch.cuda.current_stream().wait_stream(self._stream)


def neighbours(ranks: Ranks) -> tuple[int, int]:
    """Return the rank before and the rank after, around the ring."""
    return (ranks.rank - 1) % ranks.world_size, (ranks.rank + 1) % ranks.world_size
