"""Estimate the seconds that a cell will take: what an equal or similar cell took before, else a rule of thumb."""

from collections.abc import Iterable
from statistics import median

from benchmarks.record import Record
from conf.cell import Cell

# Measured on 2 CPU cores and on H200s: starting ranks, importing torch, building, warming up, checking, exchange, ABBA.
START_SECONDS = {"cpu": 30.0, "cuda": 20.0}
# Compiling ResNet-50 on an H200 takes 25 to 45 s.
COMPILE_SECONDS = 45.0
TIMED_SECONDS = {"cpu": 8.0, "cuda": 20.0}


def estimate(cell: Cell, known: Iterable[Record]) -> float:
    """Return the seconds that a cell will take; `known` are records of the same study."""
    traced = START_SECONDS[cell.device] if cell.profiler != "none" else 0.0  # a pass of its own, after the timed one
    finished = [record for record in known if record.state == "finished"]
    for same in (("model", "benchmark", "optimize", "device"), ("benchmark", "optimize", "device")):
        took = [
            record.ended_at - record.started_at
            for record in finished
            if all(getattr(record.cell, name) == getattr(cell, name) for name in same)
        ]
        if took:
            return median(took) + traced
    timed = float(cell.benchmark.get("max_seconds", TIMED_SECONDS[cell.device]))
    seconds = START_SECONDS[cell.device] + timed
    return seconds + traced + (COMPILE_SECONDS if cell.optimize == "compile" else 0.0)
