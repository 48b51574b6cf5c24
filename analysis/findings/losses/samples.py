"""Clocks beside steps: the samples of a cell's GPUs, each with the steps around it, from the raw lines of its folder."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.record import CellFolder, Kind, Record, finite, read_lines

TIMED, WITH, WITHOUT = "timed", "with exchange", "without exchange"  # windows of steps
AROUND_S = 0.15  # steps whose middle lies so near to a sample belong to it
FEWEST_STEPS = 3  # around a sample
FEWEST_OF_A_MEAN = 3  # samples
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class StepWindow(NamedTuple):
    """Steps that one rank timed together: (steps,) arrays."""

    purpose: str
    middles_s: Numbers  # since 1970
    steps_ms: Numbers


def beside_steps(record: Record, folder: CellFolder) -> list[tuple[Numbers, Numbers]]:
    """Return for each sort of window (logarithm of the SM clock, logarithm of the step time) of its samples.

    Steps that wait for other ranks belong to the lowest clock of all GPUs, others to that of their own GPU. Empty where the
    folder has no raw lines, and for cells on several hosts, whose clocks lie in several files.
    """
    if len(record.cell.hosts) > 1:
        return []
    clocks = list(_clocks(folder, record.cell.world_size))
    found = []
    for rank in range(record.cell.world_size if clocks else 0):
        windows = _windows(folder, rank)
        for purpose in (TIMED, WITH, WITHOUT):
            waits = record.cell.world_size > 1 and purpose != WITHOUT and record.cell.strategy["name"] != "none"
            if waits and rank:
                continue  # its steps are those of rank 0
            of_gpus = [(at, min(mhz) if waits else mhz[rank]) for at, mhz in clocks]
            found.append(_beside([one for one in windows if one.purpose == purpose], of_gpus))
    return [pair for pair in found if len(pair[0]) > 1]


def _clocks(folder: CellFolder, ranks: int) -> Iterator[tuple[float, list[float]]]:
    """Yield (time, MHz of each GPU) of the samples that have a clock for every rank."""
    for line in read_lines(folder.gpu_samples):
        gpus, at = line.get("gpus"), finite(line["time"])
        mhz = _positive([one.get("sm_mhz") for one in gpus if isinstance(one, dict)]) if isinstance(gpus, list) else []
        if at is not None and len(mhz) == ranks:
            yield at, mhz


def _windows(folder: CellFolder, rank: int) -> list[StepWindow]:
    """Return the windows of one rank."""
    found = []
    for line in read_lines(folder.rank_lines(rank)):
        ms, end = line.get("ms"), finite(line["time"])
        if line["kind"] == Kind.BLOCK and isinstance(ms, list) and end is not None and (known := _positive(ms)):
            steps = np.asarray(known)
            to_end = np.cumsum(steps[::-1])[::-1] - steps / 2  # from the middle of each step
            found.append(StepWindow(str(line.get("purpose")), end - to_end / 1e3, steps))
    return found


def _positive(values: Sequence[object]) -> list[float]:
    """Return the values where all are positive numbers; else none."""
    known = [number for value in values if (number := finite(value)) is not None and number > 0]
    return known if len(known) == len(values) else []


def _beside(windows: Sequence[StepWindow], clocks: Sequence[tuple[float, float]]) -> tuple[Numbers, Numbers]:
    """Return the logarithms of the clocks (time, MHz) that have steps around them, and of the means of these steps."""
    pairs = []
    for window in windows:
        for at, mhz in clocks:
            near = np.abs(window.middles_s - at) < AROUND_S
            if np.count_nonzero(near) >= FEWEST_STEPS:
                pairs.append((math.log(mhz), math.log(window.steps_ms[near].mean())))
    both = np.asarray(pairs, dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def clock_errors(record: Record, folder: CellFolder) -> list[float]:
    """Return the standard error of the mean logarithm of each GPU's clock over the timed windows; empty with too few samples."""
    timed = [one.middles_s for one in _windows(folder, 0) if one.purpose == TIMED]
    inside = [
        np.log(mhz)
        for at, mhz in _clocks(folder, record.cell.world_size)
        if any(middles[0] <= at <= middles[-1] for middles in timed)
    ]
    if len(inside) < FEWEST_OF_A_MEAN:
        return []
    return list(map(float, np.std(inside, axis=0, ddof=1) / math.sqrt(len(inside))))
