"""`benchmark=jacobi`: a halo-exchange solver's strong scaling, after jacobi_memcpy. README.md."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.jacobi.grid import Slab, TorchStencil, TritonStencil, split
from benchmarks.jacobi.halo import OwnNeighbour, exchange_of
from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.c_calls import made_by
from conf.cell import Cell

WARM_UP = 4  # iterations: they connect, and pay for the first launches
COPIES = 20  # of the grid, timed together
# That of jacobi_memcpy: the largest difference of two solutions in any point.
TOLERANCE = 1e-8


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Solve the grid on rank 0 alone, then on all ranks. Collective."""
    device, exchange = ranks.device, cell.benchmark["exchange"]
    stream: Any = contextlib.nullcontext()
    if device.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream(device))  # flags are awaited there
    solutions: list[torch.Tensor] = []  # of rank 0 alone

    def alone() -> None:
        solutions.append(_solve_alone(cell, device, reporter))

    with stream:
        reporter.phase("one rank")
        ranks.on_rank_zero(alone, reporter.beat)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reporter.phase("all ranks")
        difference = _solve_together(cell, ranks, solutions, reporter)
    result = Result()
    result.checks = {
        "solution_difference": difference,
        "solution_tolerance": TOLERANCE,
        "exchange": exchange,
    }
    if exchange == "nccl" and ranks.world_size > 1:  # one rank sends nothing
        result.checks["enqueued_by"] = made_by()
    return result


class Solve(NamedTuple):
    """What one solve took, and what it came to.

    The two clocks agree unless something else held the host.
    """

    seconds: float
    device_seconds: float | None  # None: the device has no clock of its own
    iterations_done: int
    norm: float  # L2, of the last change


class Solver:
    """Solves the grid on one slab with its stencil and its exchange."""

    def __init__(
        self,
        cell: Cell,
        slab: Slab,
        halo: Any,
        reporter: Reporter,
        barrier: Callable[[], None],
        over_ranks: Callable[[float], float],
    ) -> None:
        """`barrier` waits for all ranks, `over_ranks` sums a value over them."""
        self._slab, self._halo, self._reporter = slab, halo, reporter
        self._barrier, self._over_ranks = barrier, over_ranks
        self._options = cell.benchmark
        on_gpu = slab.device.type == "cuda"
        self.stencil = TritonStencil(slab) if on_gpu else TorchStencil(slab)
        self._iteration = 0  # of all solves: flags only grow

    def measure(self, purpose: str) -> torch.Tensor:
        """Solve, write the samples, and return this rank's rows after the last solve."""
        self._solve(WARM_UP)
        niter = int(self._options["niter"])
        solves = [self._solve(niter) for _ in range(int(self._options["solves"]))]
        self._reporter.line(
            Kind.SOLVES,
            purpose=purpose,
            nx=self._slab.nx,
            ny=self._slab.ny,
            seconds=[solve.seconds for solve in solves],
            device_seconds=[solve.device_seconds for solve in solves],
            iterations_done=[solve.iterations_done for solve in solves],
            norms=[solve.norm for solve in solves],
        )
        return self._slab.inner(self._iteration)

    def _solve(self, most: int) -> Solve:
        """Solve from the start to the tolerance, or for `most` iterations.

        The norm of a batch of iterations is read while the next batch runs, so that the device
        never waits for the host: a solve that reaches the tolerance does one more.
        """
        self._slab.reset()  # the start lies in both buffers
        norm_every, tolerance = int(self._options["norm_every"]), float(self._options["tolerance"])
        done, norm = 0, math.inf
        pending: Callable[[], float] | None = None
        events = []
        if self._slab.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._barrier()
        opened = time.perf_counter()
        if events:
            events[0].record()
        while done < most and norm > tolerance:
            batch = min(norm_every, most - done)
            for step in range(batch):
                with_norm = step == batch - 1
                self._iteration += 1
                self.stencil.edges(self._iteration, with_norm)
                self._halo.send(self._iteration)
                self.stencil.rest(self._iteration, with_norm)
                self._halo.receive(self._iteration)
            done += batch
            self._reporter.beat(batch)
            change = self.stencil.change()
            if pending is not None:
                norm = math.sqrt(self._over_ranks(pending()))
            pending = change
        if events:
            events[1].record()
            events[1].synchronize()
        seconds = time.perf_counter() - opened
        assert pending is not None
        norm = math.sqrt(self._over_ranks(pending()))
        device_seconds = None
        if events:
            device_seconds = events[0].elapsed_time(events[1]) / 1e3
        return Solve(seconds, device_seconds, done, norm)


def _solve_alone(cell: Cell, device: torch.device, reporter: Reporter) -> torch.Tensor:
    """Solve the whole grid on this rank, and time copies of it. Return the solution."""
    nx, ny = cell.benchmark["nx"], cell.benchmark["ny"]
    slab = Slab(nx, ny, split(ny, 1)[0], device)

    def idle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    solver = Solver(cell, slab, OwnNeighbour(slab), reporter, idle, lambda change: change)
    solution = solver.measure("one rank").clone()
    # Copies of one buffer to the other: what memory allows a stencil.
    into, source = slab.buffers
    into.copy_(source)
    idle()
    opened = time.perf_counter()
    for _ in range(COPIES):
        into.copy_(source)
    idle()
    seconds = time.perf_counter() - opened
    reporter.line(Kind.GRID_COPIES, seconds=seconds, bytes=2 * source.nbytes * COPIES)
    return solution


def _solve_together(
    cell: Cell, ranks: Ranks, solutions: list[torch.Tensor], reporter: Reporter
) -> float:
    """Solve on all ranks; return the largest difference of any point from rank 0's. Collective."""
    options = cell.benchmark
    nx, ny, exchange = options["nx"], options["ny"], options["exchange"]
    rows = split(ny, ranks.world_size)[ranks.rank]
    handle, base = b"", None
    if exchange == "peer" and ranks.world_size > 1:
        from trainers.memory import GpuMemory, exported

        memory = GpuMemory(Slab.size_bytes(nx, rows, ranks.device), ranks.device)
        handle, base = exported(memory), memory.bytes  # they stay until the process ends
    slab = Slab(nx, ny, rows, ranks.device, base)
    halo = exchange_of(exchange, slab, ranks, handle)

    def over_ranks(change: float) -> float:
        return sum(changes[0] for changes in ranks.gather([change]))

    solver = Solver(cell, slab, halo, reporter, ranks.barrier, over_ranks)
    difference = _difference(solver.measure("all ranks"), ny, solutions, ranks)
    ranks.barrier()  # neighbours' memory is needed no longer
    return difference


def _difference(own: torch.Tensor, ny: int, solutions: list[torch.Tensor], ranks: Ranks) -> float:
    """Return the largest difference of any point from rank 0's solution; NaN stays. Collective.

    Rows travel over gloo: NCCL would make a communicator for every pair, and log those too.
    """
    by_rank = split(ny, ranks.world_size)
    if ranks.rank == 0:
        whole = solutions[0]  # its first row is row 1 of the grid
        for rank in range(1, ranks.world_size):
            rows = by_rank[rank]
            dist.send(whole[rows.start - 1 : rows.stop - 1].contiguous().cpu(), rank)
        right = whole[: len(by_rank[0])]
    else:
        landed = torch.empty(own.shape)
        dist.recv(landed, 0)
        right = landed.to(own.device)
    largest = (own - right).abs().max().item()
    return float(torch.tensor(ranks.gather([largest])).max())
