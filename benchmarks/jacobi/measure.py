"""`benchmark=jacobi`: a halo-exchange solver's strong scaling, after NVIDIA's jacobi_memcpy. METHOD.md, "Halo exchange"."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.jacobi.grid import Slab, TorchStencil, TritonStencil, split
from benchmarks.jacobi.halo import Alone, Gloo, Halo, HostOnCpu, HostOnGpu, NcclRows, Peer
from benchmarks.jacobi.request import option
from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import statistics
from benchmarks.timing.c_calls import made_by
from benchmarks.timing.clock import COMPARABLE_MS
from conf.cell import Cell

WARM_UP = 4  # iterations: connections, and whatever the first launch costs
COPIES = 20  # of the grid, to know what memory allows
POINT_BYTES = 8  # each inner point is read once and written once
# jacobi_memcpy's own: the solutions differ by no more in any point.
TOLERANCE = 1e-8


@dataclass(frozen=True)
class Solved:
    """One solve. `norm` is the L2 norm of the last change; the two clocks agree, or something else held the host."""

    iterations: int
    norm: float
    seconds: float
    device_seconds: float | None  # None: there is no other clock

    @property
    def disagreement(self) -> float:
        """Difference of the two clocks, as a share of the host's."""
        return 0.0 if self.device_seconds is None else abs(self.device_seconds - self.seconds) / self.seconds


class Solver:
    """A slab with its stencil and its exchange."""

    def __init__(self, cell: Cell, slab: Slab, halo: Halo, beat: Callable[[int], None]) -> None:
        self._slab, self._halo, self._beat = slab, halo, beat
        self._niter, self._norm_every = int(option(cell, "niter")), int(cell.benchmark["norm_every"])
        self._tolerance = float(cell.benchmark["tolerance"])
        self.stencil = TritonStencil(slab) if slab.device.type == "cuda" else TorchStencil(slab)
        self._total = 0  # iterations of all solves: flags only grow

    def solve(
        self, everybody: Callable[[], None], over_ranks: Callable[[float], float], most: int | None = None
    ) -> Solved:
        """From the start to the tolerance, or `niter` (or `most`) iterations.

        `everybody` waits for all ranks, `over_ranks` sums a number over them. The norm of a batch of iterations is read while
        the next batch runs, so that the device never waits for the host: a solve that reaches the tolerance does one more.
        """
        self._slab.reset()  # the start lies in both buffers
        done, norm, niter = 0, math.inf, most or self._niter
        pending: Callable[[], float] | None = None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._slab.device.type == "cuda" else []
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
        return Solved(done, norm, seconds, events[0].elapsed_time(events[1]) / 1e3 if events else None)

    def _iterate(self, norm: bool) -> None:
        self._total += 1
        self.stencil.edges(self._total, norm)
        self._halo.send(self._total)
        self.stencil.rest(self._total, norm)
        self._halo.receive(self._total)

    def solution(self) -> torch.Tensor:
        """This rank's rows after the last solve."""
        return self._slab.inner(self._total)


def _halo(name: str, slab: Slab, ranks: Ranks, handle: bytes) -> Halo:
    """The exchange that was asked for. Collective."""
    if ranks.world_size == 1:
        return Alone(slab)
    if name == "peer":
        return Peer(slab, ranks, handle)
    if name == "host":
        return HostOnGpu(slab, ranks) if slab.device.type == "cuda" else HostOnCpu(slab, ranks)
    return NcclRows(slab, ranks) if name == "nccl" else Gloo(slab, ranks)


@dataclass(frozen=True)
class Reference:
    """What rank 0 found alone; the other ranks have nothing."""

    solves: list[Solved]
    solution: torch.Tensor | None
    copy_bytes_per_second: float


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    if ranks.device.type == "cpu":
        return _measured(cell, ranks, reporter)
    with torch.cuda.stream(torch.cuda.Stream(ranks.device)):  # flags are awaited there
        return _measured(cell, ranks, reporter)


def _measured(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    nx, ny, exchange = (option(cell, name) for name in ("nx", "ny", "exchange"))
    reporter.phase("one rank")
    found: list[Reference] = []
    ranks.on_rank_zero(lambda: found.append(_alone(cell, ranks.device, reporter)), reporter.beat)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    one = found[0] if found else Reference([], None, 0.0)
    reporter.phase("all ranks")
    every, difference = _together(cell, ranks, one, reporter)
    for purpose, solves in (("one rank", one.solves), ("all ranks", every)):
        reporter.line("solves", purpose=purpose, seconds=[solved.seconds for solved in solves])
    told = [one.copy_bytes_per_second, *(solved.seconds for solved in one.solves or every)]
    copy_rate, *one_seconds = ranks.gather(told)[0]
    all_seconds = ranks.slowest([solved.seconds for solved in every])
    seconds, one_second = statistics.median(all_seconds), statistics.median(one_seconds)
    speedup = one_second / seconds
    rate = every[0].iterations * (nx - 2) * (ny - 2) * POINT_BYTES / one_second
    result = Result()
    if ranks.world_size > 1:
        result.metrics = {"jacobi/efficiency": speedup / ranks.world_size, "jacobi/speedup": speedup}
    result.metrics |= {
        "jacobi/seconds": seconds,
        "jacobi/one_gpu_seconds": one_second,
        "jacobi/iterations": every[0].iterations,
        "jacobi/norm": every[0].norm,
        "jacobi/stencil_gb_per_s": rate / 1e9,
        "jacobi/copy_gb_per_s": copy_rate / 1e9,
        "jacobi/copy_share": rate / copy_rate,
    }
    result.series = {
        name: [[number + 1, value] for number, value in enumerate(values)]
        for name, values in (("jacobi/solve_seconds", all_seconds), ("jacobi/one_gpu_solve_seconds", one_seconds))
    }
    result.checks = {"solution_difference": difference, "solution_tolerance": TOLERANCE, "exchange": exchange}
    if exchange == "nccl" and ranks.world_size > 1:  # one rank sends nothing
        result.checks["enqueued_by"] = made_by()
    clocks = [solved.disagreement for solved in (*one.solves, *every) if solved.seconds * 1e3 >= COMPARABLE_MS]
    (disagreement,) = ranks.slowest([max(clocks, default=0.0)])
    if ranks.device.type == "cuda" and seconds * 1e3 >= COMPARABLE_MS:
        result.checks["clock_disagreement"] = disagreement
    if ranks.rank == 0:
        reporter.output("\n".join(lines(cell, nx, ny, one_second, seconds)))
    return result


def _alone(cell: Cell, device: torch.device, reporter: Reporter) -> Reference:
    """Solve the whole grid on this rank."""
    nx, ny = option(cell, "nx"), option(cell, "ny")
    slab = Slab(nx, ny, split(ny, 1)[0], device)
    solver = Solver(cell, slab, Alone(slab), reporter.beat)

    def solve(most: int | None = None) -> Solved:
        return solver.solve(lambda: _idle(device), lambda change: change, most)

    solve(WARM_UP)
    solves = [solve() for _ in range(int(option(cell, "solves")))]
    return Reference(solves, solver.solution().clone(), _copy_bytes_per_second(slab))


def _together(cell: Cell, ranks: Ranks, one: Reference, reporter: Reporter) -> tuple[list[Solved], float]:
    """Solve it on all ranks; also the largest difference of any point from the solution alone. Collective."""
    nx, ny, exchange = (option(cell, name) for name in ("nx", "ny", "exchange"))
    rows = split(ny, ranks.world_size)[ranks.rank]
    handle, base = b"", None
    if exchange == "peer" and ranks.world_size > 1:
        from trainers.kvstore.cuda_copies import Exported

        exported = Exported(Slab.size_bytes(nx, rows, ranks.device), ranks.device)  # stays until the process ends
        handle, base = exported.handle(), exported.bytes
    slab = Slab(nx, ny, rows, ranks.device, base)
    solver = Solver(cell, slab, _halo(exchange, slab, ranks, handle), reporter.beat)

    def over_ranks(change: float) -> float:
        return sum(one for (one,) in ranks.gather([change]))

    solver.solve(ranks.barrier, over_ranks, WARM_UP)
    solves = [solver.solve(ranks.barrier, over_ranks) for _ in range(int(option(cell, "solves")))]
    difference = _difference(solver.solution(), ny, one.solution, ranks)
    ranks.barrier()  # neighbours' memory is needed no longer
    return solves, difference


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_bytes_per_second(slab: Slab) -> float:
    """Bytes read and written in a second when one buffer is copied to the other: what memory allows a stencil."""
    into, source = slab.buffers
    into.copy_(source)
    _idle(slab.device)
    opened = time.perf_counter()
    for _ in range(COPIES):
        into.copy_(source)
    _idle(slab.device)
    return 2 * source.nbytes * COPIES / (time.perf_counter() - opened)


def _difference(mine: torch.Tensor, ny: int, whole: torch.Tensor | None, ranks: Ranks) -> float:
    """The largest difference of any point from rank 0's solution alone, `whole`; NaN stays. Collective.

    Rows travel over gloo: NCCL would make a communicator for every pair, and its log would tell of these too.
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


def lines(cell: Cell, nx: int, ny: int, one_second: float, seconds: float) -> list[str]:
    """The lines of jacobi_memcpy, for scripts that read them."""
    count, unit = cell.world_size, "GPU" if cell.device == "cuda" else "CPU worker"
    speedup = one_second / seconds
    return [
        f"Num {unit}s: {count}. Using {unit} ID: {''.join(f'{gpu}, ' for gpu in cell.gpus)}",
        f"{ny}x{nx}: 1 {unit}: {one_second:8.4f} s, {count} {unit}s: {seconds:8.4f} s, speedup: {speedup:8.2f}, "
        f"efficiency: {100 * speedup / count:8.2f} ",
    ]
