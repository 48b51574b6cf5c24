"""`benchmark=jacobi`: a halo-exchange solver's strong scaling, after NVIDIA's jacobi_memcpy. README.md."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.jacobi.grid import Slab, TorchStencil, TritonStencil, split
from benchmarks.jacobi.halo import (
    GlooHalo,
    Halo,
    HostOnCpu,
    HostOnGpu,
    NcclRows,
    OwnNeighbour,
    Peer,
)
from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.c_calls import made_by
from conf.cell import Cell

WARM_UP = 4  # iterations: they connect, and pay for the first launches
COPIES = 20  # of the grid: what memory allows
# That of jacobi_memcpy: the largest difference of two solutions in any point.
TOLERANCE = 1e-8


@dataclass(frozen=True)
class Solved:
    """One solve. `norm` is the L2 norm of the last change; the two clocks agree unless something else held the host."""

    iterations: int
    norm: float
    seconds: float
    device_seconds: float | None  # None: there is no other clock


class Solver:
    """Solves the grid on one slab with its stencil and its exchange."""

    def __init__(self, cell: Cell, slab: Slab, halo: Halo, beat: Callable[[int], None]) -> None:
        self._slab, self._halo, self._beat = slab, halo, beat
        self._niter, self._norm_every = (
            int(cell.benchmark["niter"]),
            int(cell.benchmark["norm_every"]),
        )
        self._tolerance = float(cell.benchmark["tolerance"])
        self.stencil = TritonStencil(slab) if slab.device.type == "cuda" else TorchStencil(slab)
        self._total = 0  # iterations of all solves: flags only grow

    def solve(
        self,
        everybody: Callable[[], None],
        over_ranks: Callable[[float], float],
        most: int | None = None,
    ) -> Solved:
        """Solve from the start to the tolerance, or for `niter` (or `most`) iterations.

        `everybody` waits for all ranks, `over_ranks` sums a number over them. The norm of a batch of iterations is read while
        the next batch runs, so that the device never waits for the host: a solve that reaches the tolerance does one more.
        """
        self._slab.reset()  # the start lies in both buffers
        done, norm, niter = 0, math.inf, most or self._niter
        pending: Callable[[], float] | None = None
        events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if self._slab.device.type == "cuda"
            else []
        )
        everybody()
        opened = time.perf_counter()
        if events:
            events[0].record()
        while done < niter and norm > self._tolerance:
            batch = min(self._norm_every, niter - done)
            for last in range(batch - 1, -1, -1):
                self._iterate(norm=last == 0)
            done += batch
            self._beat(batch)
            change = self.stencil.change()
            if pending is not None:
                norm = math.sqrt(over_ranks(pending()))
            pending = change
        if events:
            events[1].record()
            events[1].synchronize()
        seconds = time.perf_counter() - opened
        assert pending is not None
        norm = math.sqrt(over_ranks(pending()))
        return Solved(
            done, norm, seconds, events[0].elapsed_time(events[1]) / 1e3 if events else None
        )

    def _iterate(self, norm: bool) -> None:
        self._total += 1
        self.stencil.edges(self._total, norm)
        self._halo.send(self._total)
        self.stencil.rest(self._total, norm)
        self._halo.receive(self._total)

    def solution(self) -> torch.Tensor:
        """Return this rank's rows after the last solve."""
        return self._slab.inner(self._total)


def _halo(name: str, slab: Slab, ranks: Ranks, handle: bytes) -> Halo:
    """Return the exchange that was asked for. Collective."""
    if ranks.world_size == 1:
        return OwnNeighbour(slab)
    if name == "peer":
        return Peer(slab, ranks, handle)
    if name == "host":
        return HostOnGpu(slab, ranks) if slab.device.type == "cuda" else HostOnCpu(slab, ranks)
    return NcclRows(slab, ranks) if name == "nccl" else GlooHalo(slab, ranks)


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    if ranks.device.type == "cpu":
        return _measured(cell, ranks, reporter)
    with torch.cuda.stream(torch.cuda.Stream(ranks.device)):  # flags are awaited there
        return _measured(cell, ranks, reporter)


def _measured(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Solve the grid on rank 0 alone, then on all ranks. Return how far the two solutions differ."""
    exchange = cell.benchmark["exchange"]
    reporter.phase("one rank")
    found: list[torch.Tensor] = []
    ranks.on_rank_zero(lambda: found.append(_alone(cell, ranks.device, reporter)), reporter.beat)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    reporter.phase("all ranks")
    difference = _together(cell, ranks, found[0] if found else None, reporter)
    result = Result()
    result.checks = {
        "solution_difference": difference,
        "solution_tolerance": TOLERANCE,
        "exchange": exchange,
    }
    if exchange == "nccl" and ranks.world_size > 1:  # one rank sends nothing
        result.checks["enqueued_by"] = made_by()
    return result


def _write(purpose: str, solves: list[Solved], slab: Slab, reporter: Reporter) -> None:
    """Write the samples of some solves."""
    reporter.line(
        Kind.SOLVES,
        purpose=purpose,
        nx=slab.nx,
        ny=slab.ny,
        seconds=[solved.seconds for solved in solves],
        device_seconds=[solved.device_seconds for solved in solves],
        iterations_done=[solved.iterations for solved in solves],
        norms=[solved.norm for solved in solves],
    )


def _alone(cell: Cell, device: torch.device, reporter: Reporter) -> torch.Tensor:
    """Solve the whole grid on this rank, and time copies of it. Return the solution."""
    nx, ny = cell.benchmark["nx"], cell.benchmark["ny"]
    slab = Slab(nx, ny, split(ny, 1)[0], device)
    solver = Solver(cell, slab, OwnNeighbour(slab), reporter.beat)

    def solve(most: int | None = None) -> Solved:
        return solver.solve(lambda: _idle(device), lambda change: change, most)

    solve(WARM_UP)
    solves = [solve() for _ in range(int(cell.benchmark["solves"]))]
    _write("one rank", solves, slab, reporter)
    solution = solver.solution().clone()
    seconds, copied_bytes = _time_copies(slab)
    reporter.line(Kind.GRID_COPIES, seconds=seconds, bytes=copied_bytes)
    return solution


def _together(cell: Cell, ranks: Ranks, whole: torch.Tensor | None, reporter: Reporter) -> float:
    """Solve it on all ranks. Return the largest difference of any point from rank 0's solution alone, `whole`. Collective."""
    nx, ny, exchange = (cell.benchmark[name] for name in ("nx", "ny", "exchange"))
    rows = split(ny, ranks.world_size)[ranks.rank]
    handle, base = b"", None
    if exchange == "peer" and ranks.world_size > 1:
        from trainers.kvstore.cuda_copies import exported
        from trainers.memory import GpuMemory

        size_bytes = Slab.size_bytes(nx, rows, ranks.device)
        memory = GpuMemory(size_bytes, ranks.device)  # stays until the process ends
        handle, base = exported(memory), memory.bytes
    slab = Slab(nx, ny, rows, ranks.device, base)
    solver = Solver(cell, slab, _halo(exchange, slab, ranks, handle), reporter.beat)

    def over_ranks(change: float) -> float:
        return sum(one for (one,) in ranks.gather([change]))

    solver.solve(ranks.barrier, over_ranks, WARM_UP)
    solves = [solver.solve(ranks.barrier, over_ranks) for _ in range(int(cell.benchmark["solves"]))]
    _write("all ranks", solves, slab, reporter)
    difference = _difference(solver.solution(), ny, whole, ranks)
    ranks.barrier()  # neighbours' memory is needed no longer
    return difference


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_copies(slab: Slab) -> tuple[float, int]:
    """Return (seconds, bytes read and written) of copies of one buffer to the other: what memory allows a stencil."""
    into, source = slab.buffers
    into.copy_(source)
    _idle(slab.device)
    opened = time.perf_counter()
    for _ in range(COPIES):
        into.copy_(source)
    _idle(slab.device)
    return time.perf_counter() - opened, 2 * source.nbytes * COPIES


def _difference(mine: torch.Tensor, ny: int, whole: torch.Tensor | None, ranks: Ranks) -> float:
    """Return the largest difference of any point from rank 0's solution alone, `whole`; NaN stays NaN. Collective.

    Rows travel over gloo: NCCL would make a communicator for every pair, and its log would name those too.
    """
    rows = split(ny, ranks.world_size)
    if whole is not None:
        for rank in range(1, ranks.world_size):
            first = rows[rank].start - 1
            dist.send(whole[first : first + rows[rank].count].contiguous().cpu(), rank)
        right = whole[: rows[0].count]
    else:
        landed = torch.empty(mine.shape)
        dist.recv(landed, 0)
        right = landed.to(mine.device)
    largest = (mine - right).abs().max().item()
    return float(torch.tensor([value for (value,) in ranks.gather([largest])]).max())
