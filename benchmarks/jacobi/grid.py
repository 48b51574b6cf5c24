"""A rank's rows of the grid in two buffers (Jacobi reads one and writes the other), and one iteration on them.

The grid, its boundary and the split of its rows are those of NVIDIA's jacobi_memcpy: zero inside, sin(2π·row/(ny − 1)) in the
first and last column, the first and last row periodic neighbours of the inner ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.jacobi.request import pitch


@dataclass(frozen=True)
class Rows:
    """The inner rows of one rank: `count` rows from row `start` of the grid."""

    start: int
    count: int


def split(ny: int, world_size: int) -> list[Rows]:
    """Return the ny − 2 inner rows by rank; where they do not divide, the first ranks have one row fewer."""
    low, more = divmod(ny - 2, world_size)
    found, start = [], 1
    for rank in range(world_size):
        count = low + (rank >= world_size - more)
        found.append(Rows(start, count))
        start += count
    return found


@dataclass(frozen=True)
class Tile:
    """How the kernel cuts a slab: rows and columns of one program, and its warps."""

    rows: int
    columns: int
    warps: int


# Taller tiles read fewer rows twice; shorter ones leave registers for more threads. A thread has four columns.
TILES = (
    Tile(2, 512, 4), Tile(4, 512, 4), Tile(8, 512, 4), Tile(16, 512, 4), Tile(4, 256, 2), Tile(8, 256, 2), Tile(4, 128, 1),
    Tile(8, 128, 1),
)  # fmt: skip
EDGE = Tile(1, 128, 1)
TUNING_CALLS = 5
MOST_DOWN = 65535  # CUDA's limit to a grid of programs in its second dimension


def tiles(count: int) -> list[Tile]:
    """Return the tiles that can cut a slab of `count` rows; 1,000,000 rows, the most accepted, leave only the tallest."""
    return [tile for tile in TILES if -(-count // tile.rows) <= MOST_DOWN]


class Slab:
    """Two buffers of shape (rows.count + 2, pitch) in float32; the first and last row of each are the halo."""

    def __init__(
        self, nx: int, ny: int, rows: Rows, device: torch.device, base: Tensor | None = None
    ) -> None:
        """`base` is memory for both buffers (uint8, of `size_bytes`); None: torch's own."""
        self.nx, self.ny, self.rows, self.device = nx, ny, rows, device
        self.pitch = pitch(nx, device.type)
        shape = (2, rows.count + 2, self.pitch)
        whole = (
            torch.empty(shape, device=device)
            if base is None
            else base.view(torch.float32).view(shape)
        )
        self.buffers: tuple[Tensor, Tensor] = (whole[0], whole[1])
        self.reset()

    @staticmethod
    def size_bytes(nx: int, rows: Rows, device: torch.device) -> int:
        """Return the bytes of both buffers."""
        return 2 * (rows.count + 2) * pitch(nx, device.type) * 4

    def reset(self) -> None:
        """Set both buffers to the start: zero, and the boundary."""
        numbers = torch.arange(
            self.rows.start - 1, self.rows.start + self.rows.count + 1, dtype=torch.float64
        )
        edge = torch.sin(2 * math.pi * numbers / (self.ny - 1)).float().to(self.device)
        for buffer in self.buffers:
            buffer.zero_()
            buffer[:, 0] = edge
            buffer[:, self.nx - 1] = edge

    def inner(self, number: int) -> Tensor:
        """Return the rank's own rows after `number` iterations, without padding: (rows.count, nx)."""
        return self.buffers[number % 2][1:-1, : self.nx]


class TorchStencil:
    """The iteration in torch's operators: for CPU workers, and the reference of the kernel."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._change = torch.zeros((), dtype=torch.float64)
        self._scratch = torch.empty(slab.rows.count, slab.nx - 2)

    def rest(self, number: int, norm: bool) -> None:
        """Do nothing: `edges` computes all rows."""

    def edges(self, number: int, norm: bool) -> None:
        """Compute all rows of iteration `number`, from the state after number − 1."""
        old, new = (self._slab.buffers[(number + turn) % 2][:, : self._slab.nx] for turn in (1, 0))
        torch.add(old[1:-1, :-2], old[1:-1, 2:], out=self._scratch)
        self._scratch.add_(old[:-2, 1:-1]).add_(old[2:, 1:-1]).mul_(0.25)
        if norm:
            self._change = (self._scratch - old[1:-1, 1:-1]).double().square().sum()
        new[1:-1, 1:-1] = self._scratch

    def change(self) -> Callable[[], float]:
        """Return a function that gives the squared change of the last iteration with a norm."""
        found = float(self._change)
        return lambda: found


class TritonStencil:
    """The iteration in the kernel: the first and last row come first, so that they travel while the rest is computed."""

    def __init__(self, slab: Slab) -> None:
        """Compile, and choose the fastest tile; the slab is reset."""
        from benchmarks.jacobi.kernel import sweep

        self._slab, self._sweep = slab, sweep
        edge_programs = 2 * (slab.pitch // EDGE.columns)
        possible = tiles(slab.rows.count)
        most = max(
            -(-slab.rows.count // tile.rows) * (slab.pitch // tile.columns) for tile in possible
        )
        self._sums = torch.zeros(edge_programs + most, device=slab.device)
        self._edge_sums, self._rest_sums = self._sums[:edge_programs], self._sums[edge_programs:]
        self._landed = [
            (torch.empty(1, dtype=torch.float64, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]
        self._turn = 0
        self.tile = min(possible, key=self._tile_ms)
        for part in (self.edges, self.rest):
            part(1, norm=True)  # compiles
        slab.reset()
        torch.cuda.synchronize(slab.device)

    def _tile_ms(self, tile: Tile) -> float:
        """Return the ms of some iterations; the calls before them compile."""
        self.tile = tile
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(2 * TUNING_CALLS):
            if number == TUNING_CALLS:
                begin.record()
            self.edges(number, norm=False)
            self.rest(number, norm=False)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def edges(self, number: int, norm: bool) -> None:
        """Compute the first and last row of iteration `number`."""
        count = self._slab.rows.count
        self._launch(
            number, norm, 1, count + 1, max(1, count - 1), EDGE, min(2, count), self._edge_sums
        )

    def rest(self, number: int, norm: bool) -> None:
        """Compute all other rows."""
        rows = self._slab.rows.count - 2
        if rows > 0:
            tile = self.tile
            self._launch(
                number, norm, 2, rows + 2, tile.rows, tile, -(-rows // tile.rows), self._rest_sums
            )

    def _launch(
        self,
        number: int,
        norm: bool,
        first: int,
        last: int,
        stride: int,
        tile: Tile,
        down: int,
        sums: Tensor,
    ) -> None:
        slab = self._slab
        new, old = slab.buffers[number % 2], slab.buffers[(number + 1) % 2]
        launch: Any = self._sweep[(slab.pitch // tile.columns, down)]
        launch(
            new, old, sums, slab.pitch, slab.nx, first, last, stride,
            ROWS=tile.rows, COLUMNS=tile.columns, NORM=norm, num_warps=tile.warps,
        )  # fmt: skip

    def change(self) -> Callable[[], float]:
        """Return a function that waits for the device and gives the squared change of the last iteration with a norm."""
        self._turn = 1 - self._turn
        value, landed = self._landed[self._turn]
        value.copy_(self._sums.sum(dtype=torch.float64).view(1), non_blocking=True)
        landed.record()

        def found() -> float:
            landed.synchronize()
            return float(value)

        return found
