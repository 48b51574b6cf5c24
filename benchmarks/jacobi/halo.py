"""The exchange of halo rows after an iteration: outer rows go to the rank before and the one after.

The grid is a ring of ranks. Every exchange has `send(iteration)`, called when a rank's outer rows
are computed (or enqueued on the current stream), and `receive(iteration)`, before the next
iteration reads the halo; what lies between hides the exchange. Iterations of all solves are
counted, from 1; their state lies in buffers[iteration % 2]. Two buffers in turn need no
acknowledgement: a rank can only be one iteration ahead of its neighbours, since it needs their
rows, and they have read its rows before they send theirs.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.jacobi.grid import Slab
from benchmarks.jacobi.request import ELEMENT_BYTES, FLAGS_BYTES, shared_bytes
from benchmarks.rank.ranks import Ranks
from trainers import collectives

FLAG_BYTES = 4
PAUSE_SECONDS = 20e-6
BEFORE, AFTER = 0, 1  # the two neighbours, and the halo that each fills


def exchange_of(name: str, slab: Slab, ranks: Ranks, handle: bytes) -> Any:
    """Return the exchange that is asked for; `handle` is that of the slab's memory. Collective."""
    if ranks.world_size == 1:
        return OwnNeighbour(slab)
    if name == "peer":
        return Peer(slab, ranks, handle)
    if name == "nccl":
        return NcclRows(slab, ranks)
    return HostOnGpu(slab, ranks) if slab.device.type == "cuda" else HostOnCpu(slab, ranks)


def neighbours(ranks: Ranks) -> tuple[int, int]:
    """Return the rank before and the rank after, around the ring."""
    return (ranks.rank - 1) % ranks.world_size, (ranks.rank + 1) % ranks.world_size


class OwnNeighbour:
    """The exchange of a single rank, which is its own neighbour."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def send(self, iteration: int) -> None:
        """Copy within the slab."""
        buffer = self._slab.buffers[iteration % 2]
        buffer[0].copy_(buffer[-2])
        buffer[-1].copy_(buffer[1])

    def receive(self, iteration: int) -> None:
        """Do nothing: the copies are made or enqueued in order."""


class SharedRows:
    """Rows and flags in host memory that all ranks map; the first of two rows is for BEFORE."""

    def __init__(self, ranks: Ranks, row_bytes: int) -> None:
        """Map rows of `row_bytes`; 0: flags only. Collective."""
        size = ranks.world_size
        memory = ranks.map_shared(shared_bytes(size, row_bytes))
        raw = np.frombuffer(memory, dtype=np.uint8)
        assert 2 * size * FLAG_BYTES <= FLAGS_BYTES
        self.size_bytes = len(raw)
        self.address = int(raw.__array_interface__["data"][0])
        # Of [rank][side]: the last iteration whose row a rank has sent to that side.
        self.flags = raw[: 2 * size * FLAG_BYTES].view(np.int32).reshape(size, 2)
        rows = torch.from_numpy(raw[FLAGS_BYTES:]).view(torch.float32)
        self.rows = rows.view(2, size, 2, row_bytes // ELEMENT_BYTES)

    def flag(self, rank: int, side: int) -> int:
        """Return the offset in bytes of a flag."""
        return FLAG_BYTES * (2 * rank + side)


class HostOnCpu:
    """The exchange of CPU workers through shared memory."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        self._slab, self._rank = slab, ranks.rank
        before, after = neighbours(ranks)
        self._shared = SharedRows(ranks, ELEMENT_BYTES * slab.pitch)
        self._inward = ((0, before, AFTER), (-1, after, BEFORE))

    def send(self, iteration: int) -> None:
        """Write rows, then flags: x86 keeps the order of stores."""
        buffer = self._slab.buffers[iteration % 2]
        for side, row in ((BEFORE, buffer[1]), (AFTER, buffer[-2])):
            self._shared.rows[iteration % 2, self._rank, side] = row
            self._shared.flags[self._rank, side] = iteration

    def receive(self, iteration: int) -> None:
        """Wait for the neighbours' rows, and read them."""
        buffer = self._slab.buffers[iteration % 2]
        for halo, neighbour, side in self._inward:
            while self._shared.flags[neighbour, side] < iteration:
                time.sleep(PAUSE_SECONDS)
            buffer[halo].copy_(self._shared.rows[iteration % 2, neighbour, side])


class GpuHalo:
    """What the exchanges of GPUs share: a stream with priority over that of the computation."""

    def __init__(self, slab: Slab) -> None:
        self._row_bytes = ELEMENT_BYTES * slab.pitch
        self._outer = [_addresses(buffer[1], buffer[-2]) for buffer in slab.buffers]
        self._stream = torch.cuda.Stream(slab.device, priority=-1)
        self._ready = torch.cuda.Event()

    def _after_the_rows(self) -> None:
        self._ready.record()
        self._stream.wait_event(self._ready)

    def _map_flags(self, ranks: Ranks, row_bytes: int) -> SharedRows:
        """Map shared memory for GPUs, and keep the addresses of a rank's and its peers' flags."""
        from trainers import memory

        before, after = neighbours(ranks)
        shared = SharedRows(ranks, row_bytes)
        memory.page_lock(shared.address, shared.size_bytes)
        flags = memory.device_address(shared.address)
        self._own_flags = [flags + shared.flag(ranks.rank, side) for side in (BEFORE, AFTER)]
        self._peer_flags = [flags + shared.flag(before, AFTER), flags + shared.flag(after, BEFORE)]
        self._shared = shared
        return shared


class HostOnGpu(GpuHalo):
    """The exchange through page-locked shared memory; streams write flags and wait for them."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        from trainers import memory

        super().__init__(slab)
        before, after = neighbours(ranks)
        shared = self._map_flags(ranks, self._row_bytes)
        # For each of the two buffers: (flag, to, from) of the rows out, and of those that come in.
        self._outward, self._inward = [], []
        for turn, buffer in enumerate(slab.buffers):
            slots = _addresses(*shared.rows[turn, ranks.rank])
            self._outward.append(list(zip(self._own_flags, slots, self._outer[turn], strict=True)))
            halo = _addresses(buffer[0], buffer[-1])
            slots = _addresses(shared.rows[turn, before, AFTER], shared.rows[turn, after, BEFORE])
            self._inward.append(list(zip(self._peer_flags, halo, slots, strict=True)))
        self._out = memory.CopyStream(self._stream)
        self._in = memory.CopyStream(torch.cuda.Stream(slab.device, priority=-1))

    def send(self, iteration: int) -> None:
        """Copy the rows to host memory, and the neighbours' rows from there."""
        self._after_the_rows()
        for flag, target, source in self._outward[iteration % 2]:
            self._out.copy(target, source, self._row_bytes)
            self._out.write_flag(flag, iteration)
        for flag, target, source in self._inward[iteration % 2]:
            self._in.wait_flag(flag, iteration)
            self._in.copy(target, source, self._row_bytes)

    def receive(self, iteration: int) -> None:
        """Have the current stream wait for the copies."""
        torch.cuda.current_stream().wait_stream(self._in.stream)


class Peer(GpuHalo):
    """Copies straight into the neighbours' memory (CUDA IPC), with flags in host memory."""

    def __init__(self, slab: Slab, ranks: Ranks, handle: bytes) -> None:
        """Open the neighbours' memory; `handle` is that of the slab's two buffers. Collective.

        Raises ValueError: a GPU cannot address its neighbour's memory.
        """
        from trainers import memory

        super().__init__(slab)
        before, after = neighbours(ranks)
        own = ranks.device.index  # a rehearsal has several ranks on one GPU
        rows = len(slab.rows) + 2
        by_rank = collectives.all_gather_json({"handle": handle.hex(), "rows": rows, "gpu": own})
        for neighbour in {before, after}:
            gpu = by_rank[neighbour]["gpu"]
            if gpu != own and not torch.cuda.can_device_access_peer(own, gpu):
                raise ValueError(
                    f"benchmark.exchange=peer: the GPU of rank {ranks.rank} cannot address that of "
                    f"rank {neighbour}; possible here: host and nccl"
                )
        bases = {}
        for neighbour in {before, after}:
            bases[neighbour] = memory.imported(bytes.fromhex(by_rank[neighbour]["handle"]))
        # My first row becomes the last one, a halo, of the rank before; my last row the first one
        # of the rank after.
        self._targets = []
        rows_before, rows_after = int(by_rank[before]["rows"]), int(by_rank[after]["rows"])
        for turn in range(2):
            last_before = bases[before] + ((turn + 1) * rows_before - 1) * self._row_bytes
            first_after = bases[after] + turn * rows_after * self._row_bytes
            self._targets.append((last_before, first_after))
        self._map_flags(ranks, 0)
        self._lane = memory.CopyStream(self._stream)
        self._reader = memory.CopyStream(torch.cuda.current_stream())

    def send(self, iteration: int) -> None:
        """Copy both rows, and write a flag after each."""
        self._after_the_rows()
        targets, sources = self._targets[iteration % 2], self._outer[iteration % 2]
        for flag, target, source in zip(self._own_flags, targets, sources, strict=True):
            self._lane.copy(target, source, self._row_bytes)
            self._lane.write_flag(flag, iteration)

    def receive(self, iteration: int) -> None:
        """Have the stream that was current at the start wait for both neighbours' flags."""
        for flag in self._peer_flags:
            self._reader.wait_flag(flag, iteration)


class NcclRows(GpuHalo):
    """The exchange as one NCCL group of two sends and two receives."""

    def __init__(self, slab: Slab, ranks: Ranks) -> None:
        from benchmarks.collectives.calls import NcclCalls

        super().__init__(slab)
        before, after = neighbours(ranks)
        calls = NcclCalls(ranks, "sum", 0, self._stream)
        self._exchanges = []
        for buffer in slab.buffers:
            # Where both neighbours are one rank, its first row comes first.
            messages = [("ncclSend", buffer[1], before), ("ncclSend", buffer[-2], after)]
            messages += [("ncclRecv", buffer[-1], after), ("ncclRecv", buffer[0], before)]
            self._exchanges.append(calls.exchange(messages))

    def send(self, iteration: int) -> None:
        """Enqueue the group."""
        self._after_the_rows()
        self._exchanges[iteration % 2]()

    def receive(self, iteration: int) -> None:
        """Have the current stream wait for the group."""
        torch.cuda.current_stream().wait_stream(self._stream)


def _addresses(*rows: Tensor) -> list[int]:
    return [row.data_ptr() for row in rows]
