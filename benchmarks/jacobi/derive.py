"""The numbers of `benchmark=jacobi` from the raw lines of the ranks. README.md."""

from typing import Any

from benchmarks.derived import Derived, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

POINT_BYTES = 8  # each inner point is read once and written once


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value: seconds on one rank and on all, speedup, what memory allows; and jacobi_memcpy's lines."""
    (alone,) = of_kind(lines[0], Kind.SOLVES, purpose="one rank")
    (copied,) = of_kind(lines[0], Kind.GRID_COPIES)
    (solves,) = together(lines, Kind.SOLVES, purpose="all ranks")
    all_seconds, one_seconds = slowest(line["seconds"] for line in solves), alone["seconds"]
    seconds, one_second = statistics.median(all_seconds), statistics.median(one_seconds)
    nx, ny, iterations = solves[0]["nx"], solves[0]["ny"], solves[0]["iterations_done"][0]
    speedup = one_second / seconds
    rate = iterations * (nx - 2) * (ny - 2) * POINT_BYTES / one_second
    copy_rate = copied["bytes"] / copied["seconds"]
    metrics = {}
    if cell.world_size > 1:
        metrics = {"jacobi/efficiency": speedup / cell.world_size, "jacobi/speedup": speedup}
    metrics |= {
        "jacobi/seconds": seconds,
        "jacobi/one_gpu_seconds": one_second,
        "jacobi/iterations": iterations,
        "jacobi/norm": solves[0]["norms"][0],
        "jacobi/stencil_gb_per_s": rate / 1e9,
        "jacobi/copy_gb_per_s": copy_rate / 1e9,
        "jacobi/copy_share": rate / copy_rate,
    }
    series = {
        name: [[number + 1, value] for number, value in enumerate(values)]
        for name, values in (
            ("jacobi/solve_seconds", all_seconds),
            ("jacobi/one_gpu_solve_seconds", one_seconds),
        )
    }
    checks: dict[str, Any] = {}
    if cell.device == "cuda" and seconds * 1e3 >= statistics.COMPARABLE_MS:
        checks["clock_disagreement"] = _disagreement(lines)
    return Derived(
        metrics,
        series,
        checks=checks,
        output="\n".join(output_lines(cell, nx, ny, one_second, seconds)),
    )


def _disagreement(lines: RankLines) -> float:
    """Return the largest disagreement of a rank's two clocks over a solve that is long enough to compare them; 0 without any."""
    every = [
        line for own in lines.values() for line in of_kind(own, Kind.SOLVES, has="device_seconds")
    ]
    times = [
        times
        for line in every
        for times in zip(line["device_seconds"], line["seconds"], strict=True)
        if times[0] is not None and times[1] * 1e3 >= statistics.COMPARABLE_MS
    ]
    return max((statistics.clock_disagreement(*of_solve) for of_solve in times), default=0.0)


def output_lines(cell: Cell, nx: int, ny: int, one_second: float, seconds: float) -> list[str]:
    """Return the lines of jacobi_memcpy, for scripts that read them."""
    count, unit = cell.world_size, "GPU" if cell.device == "cuda" else "CPU worker"
    speedup = one_second / seconds
    return [
        f"Num {unit}s: {count}. Using {unit} ID: {''.join(f'{gpu}, ' for gpu in cell.gpus)}",
        f"{ny}x{nx}: 1 {unit}: {one_second:8.4f} s, {count} {unit}s: {seconds:8.4f} s, speedup: {speedup:8.2f}, "
        f"efficiency: {100 * speedup / count:8.2f} ",
    ]
