"""Clocks beside steps: the samples of a cell's GPUs, each with the steps around it, from the raw lines of its folder."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.record import CellFolder, Kind, Record, read_lines

TIMED, WITH, WITHOUT = "timed", "with exchange", "without exchange"  # windows of steps
AROUND_S = 0.15  # steps whose middle lies so near to a sample belong to it
FEWEST_STEPS = 3  # around a sample
FEWEST_OF_A_MEAN = 3  # samples
Numbers = np.ndarray[Any, np.dtype[np.float64]]


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
            found.append(_beside([one for name, *one in windows if name == purpose], of_gpus))
    return [pair for pair in found if len(pair[0]) > 1]


def _clocks(folder: CellFolder, ranks: int) -> Iterator[tuple[float, list[float]]]:
    """Yield (time, MHz of each GPU) of the samples that have a clock for every rank."""
    for line in read_lines(folder.gpu_samples):
        gpus = line.get("gpus")
        found: list[Any] = (
            [one.get("sm_mhz") for one in gpus if isinstance(one, dict)] if isinstance(gpus, list) else []
        )
        mhz = [float(one) for one in found if _is_number(one) and one > 0]
        if _is_number(line.get("time")) and len(mhz) == len(found) == ranks:
            yield float(line["time"]), mhz


def _windows(folder: CellFolder, rank: int) -> list[tuple[str, Numbers, Numbers]]:
    """Return (purpose, seconds in the middle of each step, its ms) of the windows of one rank."""
    found = []
    for line in read_lines(folder.rank_lines(rank)):
        ms = line.get("ms")
        if line.get("kind") != Kind.BLOCK or not isinstance(ms, list) or not _is_number(line.get("time")):
            continue
        if ms and all(_is_number(one) and one > 0 for one in ms):
            steps = np.asarray(ms, dtype=float)
            after = np.cumsum(steps[::-1])[::-1] - steps / 2  # from the middle of a step to the end of the window
            found.append((str(line.get("purpose")), float(line["time"]) - after / 1e3, steps))
    return found


def _beside(windows: Sequence[Sequence[Numbers]], clocks: Sequence[tuple[float, float]]) -> tuple[Numbers, Numbers]:
    pairs = []
    for middles, steps in windows:
        for at, mhz in clocks:
            near = np.abs(middles - at) < AROUND_S
            if np.count_nonzero(near) >= FEWEST_STEPS:
                pairs.append((math.log(mhz), math.log(steps[near].mean())))
    both = np.asarray(pairs, dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def clock_errors(record: Record, folder: CellFolder) -> list[float]:
    """Return the standard error of the mean logarithm of each GPU's clock over the timed windows; empty with too few samples."""
    timed = [middles for purpose, middles, _ in _windows(folder, 0) if purpose == TIMED]
    inside = [
        np.log(mhz)
        for at, mhz in _clocks(folder, record.cell.world_size)
        if any(middles[0] <= at <= middles[-1] for middles in timed)
    ]
    if len(inside) < FEWEST_OF_A_MEAN:
        return []
    errors = np.std(inside, axis=0, ddof=1) / math.sqrt(len(inside))
    return [float(one) for one in errors]
