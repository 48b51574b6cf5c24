"""A rank's rows of the grid in two buffers (Jacobi reads one, writes the other), and an iteration.

The grid, its boundary and the split of its rows are those of NVIDIA's jacobi_memcpy: zero inside,
sin(2π·row/(ny − 1)) in the first and last column, the first and last row periodic neighbours of the
inner ones.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.jacobi.request import ELEMENT_BYTES, pitch


class Tile(NamedTuple):
    """How the kernel cuts a slab: rows and columns of one program, and its warps."""

    rows: int
    columns: int
    warps: int


# Taller tiles read fewer rows twice; shorter ones leave registers for more threads. A thread has
# four columns.
TILES = (
    Tile(2, 512, 4),
    Tile(4, 512, 4),
    Tile(8, 512, 4),
    Tile(16, 512, 4),
    Tile(4, 256, 2),
    Tile(8, 256, 2),
    Tile(4, 128, 1),
    Tile(8, 128, 1),
)
EDGE = Tile(1, 128, 1)
TUNING_CALLS = 5
MOST_DOWN = 65535  # CUDA's limit to a grid of programs in its second dimension


def split(ny: int, world_size: int) -> list[range]:
    """Return the ny − 2 inner rows by rank; if they do not divide, the first have one fewer."""
    low, more = divmod(ny - 2, world_size)
    rows_by_rank, start = [], 1
    for rank in range(world_size):
        stop = start + low + (rank >= world_size - more)
        rows_by_rank.append(range(start, stop))
        start = stop
    return rows_by_rank


def tiles(count: int) -> list[Tile]:
    """Return the tiles that can cut `count` rows; the most accepted leave the tallest."""
    return [tile for tile in TILES if -(-count // tile.rows) <= MOST_DOWN]


class Slab:
    """Two buffers of shape (rows + 2, pitch) in float32; the first and last row are the halo."""

    def __init__(
        self, nx: int, ny: int, rows: range, device: torch.device, base: Tensor | None = None
    ) -> None:
        """`base` is memory for both buffers (uint8, of `size_bytes`); None: torch's own."""
        self.nx, self.ny, self.rows, self.device = nx, ny, rows, device
        self.pitch = pitch(nx, device.type)
        shape = (2, len(rows) + 2, self.pitch)
        if base is None:
            whole = torch.empty(shape, device=device)
        else:
            whole = base.view(torch.float32).view(shape)
        self.buffers: tuple[Tensor, Tensor] = (whole[0], whole[1])
        self.reset()

    @staticmethod
    def size_bytes(nx: int, rows: range, device: torch.device) -> int:
        """Return the bytes of both buffers."""
        return 2 * (len(rows) + 2) * pitch(nx, device.type) * ELEMENT_BYTES

    def reset(self) -> None:
        """Set both buffers to the start: zero, and the boundary."""
        indices = torch.arange(self.rows.start - 1, self.rows.stop + 1, dtype=torch.float64)
        edge = torch.sin(2 * math.pi * indices / (self.ny - 1)).float().to(self.device)
        for buffer in self.buffers:
            buffer.zero_()
            buffer[:, 0] = edge
            buffer[:, self.nx - 1] = edge

    def inner(self, iteration: int) -> Tensor:
        """Return the rank's own rows after an iteration, without padding: (rows, nx)."""
        return self.buffers[iteration % 2][1:-1, : self.nx]


class TorchStencil:
    """The iteration in torch's operators: for CPU workers, and the reference of the kernel."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._change = torch.zeros((), dtype=torch.float64)
        self._scratch = torch.empty(len(slab.rows), slab.nx - 2)

    def edges(self, iteration: int, norm: bool) -> None:
        """Compute all rows of an iteration from the state after the one before."""
        old = self._slab.buffers[(iteration + 1) % 2][:, : self._slab.nx]
        new = self._slab.buffers[iteration % 2][:, : self._slab.nx]
        torch.add(old[1:-1, :-2], old[1:-1, 2:], out=self._scratch)
        self._scratch.add_(old[:-2, 1:-1]).add_(old[2:, 1:-1]).mul_(0.25)
        if norm:
            self._change = (self._scratch - old[1:-1, 1:-1]).double().square().sum()
        new[1:-1, 1:-1] = self._scratch

    def rest(self, iteration: int, norm: bool) -> None:
        """Do nothing: `edges` computes all rows."""

    def change(self) -> Callable[[], float]:
        """Return a function that gives the squared change of the last iteration with a norm."""
        change = float(self._change)
        return lambda: change


class TritonStencil:
    """The iteration in the kernel: first and last row come first, and travel meanwhile."""

    def __init__(self, slab: Slab) -> None:
        """Compile, and choose the fastest tile; the slab is reset."""
        from benchmarks.jacobi.kernel import iterate

        self._slab, self._iterate = slab, iterate
        rows = len(slab.rows)
        programs = []
        for tile in tiles(rows):
            programs.append(-(-rows // tile.rows) * (slab.pitch // tile.columns))
        edge_programs = 2 * (slab.pitch // EDGE.columns)
        self._sums = torch.zeros(edge_programs + max(programs), device=slab.device)
        self._edge_sums, self._rest_sums = self._sums[:edge_programs], self._sums[edge_programs:]
        self._landed = []  # two in turn
        for _ in range(2):
            value = torch.empty(1, dtype=torch.float64, pin_memory=True)
            self._landed.append((value, torch.cuda.Event()))
        self._turn = 0
        tile_ms = {}
        for tile in tiles(rows):
            self.tile = tile
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for iteration in range(2 * TUNING_CALLS):
                if iteration == TUNING_CALLS:  # the calls before compile
                    begin.record()
                self.edges(iteration, norm=False)
                self.rest(iteration, norm=False)
            end.record()
            end.synchronize()
            tile_ms[tile] = float(begin.elapsed_time(end))
        self.tile = min(tile_ms, key=tile_ms.__getitem__)
        self.edges(1, norm=True)  # compiles
        self.rest(1, norm=True)
        slab.reset()
        torch.cuda.synchronize(slab.device)

    def edges(self, iteration: int, norm: bool) -> None:
        """Compute the first and last row of an iteration."""
        rows = len(self._slab.rows)
        down, stride = min(2, rows), max(1, rows - 1)
        self._launch(iteration, norm, (1, rows + 1, stride), EDGE, down, self._edge_sums)

    def rest(self, iteration: int, norm: bool) -> None:
        """Compute all other rows."""
        rows, tile = len(self._slab.rows) - 2, self.tile
        if rows > 0:
            down = -(-rows // tile.rows)
            self._launch(iteration, norm, (2, rows + 2, tile.rows), tile, down, self._rest_sums)

    def _launch(
        self,
        iteration: int,
        norm: bool,
        rows: tuple[int, int, int],  # first, behind the last, from one tile to the next
        tile: Tile,
        down: int,
        sums: Tensor,
    ) -> None:
        slab = self._slab
        new, old = slab.buffers[iteration % 2], slab.buffers[(iteration + 1) % 2]
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "NORM": norm, "num_warps": tile.warps}
        launch: Any = self._iterate[(slab.pitch // tile.columns, down)]
        launch(new, old, sums, slab.pitch, slab.nx, *rows, **sizes)

    def change(self) -> Callable[[], float]:
        """Return a function that waits, and gives the squared change of the last with a norm."""
        self._turn = 1 - self._turn
        value, landed = self._landed[self._turn]
        value.copy_(self._sums.sum(dtype=torch.float64).view(1), non_blocking=True)
        landed.record()

        def change() -> float:
            landed.synchronize()
            return float(value)

        return change
