"""The numbers of `benchmark=jacobi` from the raw lines of the ranks. README.md."""

from typing import Any

from benchmarks.derived import Derived, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

POINT_BYTES = 8  # each inner point is read once and written once


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return seconds on one rank and on all, speedup, what memory allows; and what is printed."""
    alone = of_kind(lines[0], Kind.SOLVES, purpose="one rank")[0]
    copied = of_kind(lines[0], Kind.GRID_COPIES)[0]
    solves = together(lines, Kind.SOLVES, purpose="all ranks")[0]
    all_seconds, alone_seconds = slowest(line["seconds"] for line in solves), alone["seconds"]
    seconds, one_gpu_seconds = statistics.median(all_seconds), statistics.median(alone_seconds)
    nx, ny, iterations = solves[0]["nx"], solves[0]["ny"], solves[0]["iterations_done"][0]
    speedup = one_gpu_seconds / seconds
    bytes_a_sweep = float((nx - 2) * (ny - 2) * POINT_BYTES)  # a text times an int is a long text
    rate = bytes_a_sweep * iterations / one_gpu_seconds
    copy_rate = copied["bytes"] / copied["seconds"]
    metrics = {}
    if cell.world_size > 1:
        metrics = {"jacobi/efficiency": speedup / cell.world_size, "jacobi/speedup": speedup}
    metrics |= {
        "jacobi/seconds": seconds,
        "jacobi/one_gpu_seconds": one_gpu_seconds,
        "jacobi/iterations": iterations,
        "jacobi/norm": solves[0]["norms"][0],
        "jacobi/stencil_gb_per_s": rate / 1e9,
        "jacobi/copy_gb_per_s": copy_rate / 1e9,
        "jacobi/copy_share": rate / copy_rate,
    }
    series = {
        "jacobi/solve_seconds": _numbered(all_seconds),
        "jacobi/one_gpu_solve_seconds": _numbered(alone_seconds),
    }
    checks: dict[str, Any] = {}
    if cell.device == "cuda" and seconds * 1e3 >= statistics.COMPARABLE_MS:
        checks["clock_disagreement"] = 0.0  # the largest, over solves that are long enough
        for line in [alone, *solves]:
            for device, host in zip(line["device_seconds"], line["seconds"], strict=True):
                if device is not None and host * 1e3 >= statistics.COMPARABLE_MS:
                    off = statistics.clock_disagreement(device, host)
                    checks["clock_disagreement"] = max(checks["clock_disagreement"], off)
    output = "\n".join(output_lines(cell, nx, ny, one_gpu_seconds, seconds))
    return Derived(metrics, series, checks=checks, output=output)


def _numbered(values: list[float]) -> list[list[float]]:
    return [[solve, value] for solve, value in enumerate(values, 1)]


def output_lines(cell: Cell, nx: int, ny: int, one_second: float, seconds: float) -> list[str]:
    """Return the lines of jacobi_memcpy, for scripts that read them."""
    count, unit = cell.world_size, "GPU"
    if cell.device == "cpu":
        unit = "CPU worker"
    speedup = one_second / seconds
    ids = "".join(f"{gpu}, " for gpu in cell.gpus)
    return [
        f"Num {unit}s: {count}. Using {unit} ID: {ids}",
        f"{ny}x{nx}: 1 {unit}: {one_second:8.4f} s, {count} {unit}s: {seconds:8.4f} s, "
        f"speedup: {speedup:8.2f}, efficiency: {100 * speedup / count:8.2f} ",
    ]
