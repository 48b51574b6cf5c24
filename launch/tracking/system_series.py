"""The samples of GPUs and CPU as series that MLflow shows on its page "System metrics"."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from analysis.validity.gpu_samples import Sample, is_of_cpu, is_of_gpus
from benchmarks.record import CellFolder, read_lines
from conf.cell import Cell

MOST_POINTS = 100  # of a series: more say nothing on a page, and each is a row of the store
# {what a sample has: (end of the name, times)}; where MLflow's own monitor measures the same, its name and unit.
OF_GPU = {
    "busy_percent": ("utilization_percentage", 1.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "power_w": ("power_usage_watts", 1.0),
    "sm_mhz": ("clock_mhz", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
}
Row = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step


def system_series(folder: CellFolder, cell: Cell) -> list[Row]:
    """Return the rows of a cell's series; empty without samples. The step is the number of the sample.

    Those of a cell with hosts have the host in their names: `system/a/gpu_0_clock_mhz`.
    """
    rows: list[Row] = []
    for number in folder.sampled_hosts():
        prefix = (
            f"system/{cell.every_host[number]}/" if number < len(cell.every_host) else "system/"
        )
        gpus = _lines(folder.gpu_samples_of(number), is_of_gpus)
        rows += [
            *_of_gpus(prefix, gpus, cell.gpus),
            *_of_cpu(prefix, _lines(folder.cpu_samples_of(number), is_of_cpu)),
        ]
    return [row for row in rows if math.isfinite(row[1])]


def _lines(path: Path, fits: Callable[[Sample], bool]) -> list[tuple[int, Sample]]:
    return _thinned([line for line in read_lines(path) if fits(line)])


def _of_gpus(
    prefix: str, lines: Sequence[tuple[int, Sample]], gpus: Sequence[int]
) -> Iterator[Row]:
    for step, line in lines:
        for gpu, sample in zip(gpus, line["gpus"], strict=False):
            for what, (name, times) in OF_GPU.items():
                if what in sample:
                    yield (
                        f"{prefix}gpu_{gpu}_{name}",
                        float(sample[what]) * times,
                        round(line["time"] * 1000),
                        step,
                    )


def _of_cpu(prefix: str, lines: Sequence[tuple[int, Sample]]) -> Iterator[Row]:
    """Yield how busy the cores were between two samples, and how much of it was the cell's own."""
    for (_, before), (step, line) in pairwise(lines):
        cores_s = line["cores"] * (line["time"] - before["time"])
        if cores_s > 0:
            for what, name in (("busy_s", "utilization"), ("own_s", "of_this_cell")):
                percent = 100 * max(0.0, line[what] - before[what]) / cores_s
                yield f"{prefix}cpu_{name}_percentage", percent, round(line["time"] * 1000), step


def _thinned(lines: Sequence[Sample]) -> list[tuple[int, Sample]]:
    """Return (number, line) of at most MOST_POINTS lines, evenly spread."""
    every = -(-len(lines) // MOST_POINTS) or 1
    return list(enumerate(lines))[::every]
