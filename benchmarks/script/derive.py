"""The numbers of `benchmark=script` from the raw lines of the ranks. README.md, without torch."""

import math
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.collectives.request import COLLECTIVES
from benchmarks.derived import Derived, IncompleteLines, Line, RankLines, of_kind, slowest
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.training import derive as training
from benchmarks.training.request import FEWEST_PER_WINDOW, WINDOW_SECONDS
from conf.cell import Cell

FEWEST_STEPS = 10  # that are timed
SET_UP_STEPS = 3
MORE = 1.25  # of its time after which a warm-up is judged again
PRINTED = "script/printed_per_second"
RATE = "throughput/images_per_second"
NAMES = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}


def warm_up_end(ms: Sequence[float], options: Mapping[str, Any]) -> tuple[int, bool]:
    """Return how many steps are warm-up, and whether it has ended: the step time is flat, or the
    time for it is over.
    """
    least_ms, most_ms = (1e3 * options[f"warmup_{end}_seconds"] for end in ("min", "max"))
    ends_ms = list(accumulate(ms))
    judged_ms = least_ms
    for steps, end_ms in enumerate(ends_ms, 1):
        if end_ms >= judged_ms and steps >= statistics.FEWEST_SAMPLES:
            if statistics.flat(ms[:steps], 0, least_ms) or end_ms >= most_ms:
                return steps, True
            judged_ms = max(end_ms * MORE, end_ms + 1)
    return len(ms) // 2, False


def is_enough(ms: Sequence[float], options: Mapping[str, Any]) -> bool:
    """Return whether the steps after the warm-up last `max_seconds`."""
    steps, has_ended = warm_up_end(ms, options)
    timed = ms[steps:]
    is_long = math.fsum(timed) >= 1e3 * options["max_seconds"]
    return has_ended and is_long and len(timed) >= FEWEST_STEPS


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return the rate and the step times; of a script without steps what it printed."""
    steps = {rank: Steps(own) for rank, own in lines.items()}
    if not any(own.ms for own in steps.values()):
        return _of_printed(lines, cell)
    count = min(len(own.ms) for own in steps.values())
    all_ms = slowest([own.ms[:count] for own in steps.values()])
    first, _ = warm_up_end(all_ms, cell.benchmark)
    if count - first < FEWEST_STEPS:
        raise IncompleteLines(
            f"{count - first} steps after the warm-up are on all ranks, at least {FEWEST_STEPS} "
            "are needed"
        )
    windows = _windows(all_ms, first)
    blocks: dict[int, list[Line]] = {}
    for rank, own in steps.items():
        blocks[rank] = [own.block(begin, end, cell) for begin, end in windows]
    if not sum(block["images"] for own in blocks.values() for block in own):
        raise IncompleteLines("no batch of a module was seen; expected benchmark.samples=")
    timed = training.timed(blocks)
    metrics = timed.metrics | {"warmup/iterations": first}
    del metrics["step/launch_ms"]
    ms = all_ms[first:]
    checks = timed.checks | {
        "warmup_flat": statistics.flat(all_ms[:first], 0),
        "stationarity": statistics.stationarity(ms),
        "pauses": statistics.pauses(ms),
        "grid_ms": statistics.grid(ms),
        "clock_disagreement": max(own.clock_disagreement(first, count) for own in steps.values()),
    }
    tables = training.path_tables(lines)
    tables["exchanges"] = {"rows": collectives_of_a_step(lines)}
    printed = _printed(lines, cell)
    if printed:
        metrics[PRINTED] = statistics.median([value for _, value in printed])
    return Derived(
        metrics,
        timed.series,
        tables=tables,
        checks=checks,
        output=_note(lines),
        within_run=timed.within_run,
    )


def _note(lines: RankLines) -> str:
    """Return a sentence for the user on ranks that had to be killed; else ''."""
    killed = []
    for rank, own in lines.items():
        if of_kind(own, "ended", by_itself=False, status=-signal.SIGKILL):
            killed.append(str(rank))
    if not killed:
        return ""
    return f"the script caught SIGTERM on rank {', '.join(killed)}, and was killed"


def _windows(ms: Sequence[float], first: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of windows of the timed steps; a short rest is left out."""
    windows = []
    begin, lasted_ms = first, 0.0
    for step in range(first, len(ms)):
        lasted_ms += ms[step]
        if lasted_ms >= 1e3 * WINDOW_SECONDS and step + 1 - begin >= FEWEST_PER_WINDOW:
            windows.append((begin, step + 1))
            begin, lasted_ms = step + 1, 0.0
    return windows or [(first, len(ms))]


class Steps:
    """The steps that one rank wrote."""

    def __init__(self, own: Sequence[Line]) -> None:
        self.ms: list[float] = []
        self.samples: list[int] = []
        self.ends_s: list[float] = []
        for line in of_kind(own, "steps"):
            if line["first"] != len(self.ms):
                raise IncompleteLines(f"steps {len(self.ms)} to {line['first']} are missing")
            self.ms += line["ms"]
            self.samples += line["samples"]
            self.ends_s += line["ends_s"]

    def block(self, begin: int, end: int, cell: Cell) -> Line:
        """Return some steps as a timed window of `benchmark=throughput`."""
        ms = self.ms[begin:end]
        lasted_ms = math.fsum(ms)
        stated = cell.benchmark["samples"]
        samples = sum(self.samples[begin:end])
        if stated:
            samples = stated * len(ms)
        return {
            "kind": Kind.BLOCK,
            "purpose": "timed",
            "ms": ms,
            "device_ms": lasted_ms,
            "host_ms": lasted_ms,
            "launch_ms": 0.0,
            "images": samples,
        }

    def clock_disagreement(self, first: int, count: int) -> float:
        """Return by which share the clocks of device and host differ over the timed steps."""
        host_ms = 1e3 * (self.ends_s[count - 1] - self.ends_s[first - 1])
        return statistics.clock_disagreement(math.fsum(self.ms[first:count]), host_ms)


def _printed(lines: RankLines, cell: Cell) -> list[tuple[float, float]]:
    """Return (time, samples/s) that the first rank with any printed after the warm-up."""
    for rank in sorted(lines):
        printed = of_kind(lines[rank], "printed")
        if printed:
            least_s = printed[0]["time"] + cell.benchmark["warmup_min_seconds"]
            late = [(line["time"], line["value"]) for line in printed if line["time"] >= least_s]
            return late or [(line["time"], line["value"]) for line in printed]
    return []


def _of_printed(lines: RankLines, cell: Cell) -> Derived:
    printed = _printed(lines, cell)
    if not printed:
        raise IncompleteLines("no step was seen and no rate was printed")
    images = seconds = 0.0
    for (before, _), (moment, value) in pairwise(printed):
        images += value * (moment - before)
        seconds += moment - before
    values = [value for _, value in printed]
    if not seconds:
        images, seconds = values[0], 1.0
    rate = images / seconds
    metrics = {
        RATE: rate,
        f"{RATE}_per_gpu": rate / cell.world_size,
        "throughput/images": images,
        "throughput/seconds": seconds,
        PRINTED: statistics.median(values),
    }
    series = {RATE: [[number, value] for number, value in enumerate(values, 1)]}
    return Derived(metrics, series, output=_note(lines))


def collectives_of_a_step(lines: RankLines) -> list[dict[str, str | float | None]]:
    """Return kind, bytes, calls, ms and busbw in GB/s of each collective in rank 0's steps.

    The first steps, which set up, are left out. `ms` is the shortest of all ranks, that of the last
    to begin; None: no GPU.
    """
    calls, call_ms = defaultdict(list), defaultdict(list)
    steps = 0
    for rank, line in ((rank, line) for rank, own in lines.items() for line in own):
        if not line.get("collectives") or line["step"] < SET_UP_STEPS:
            continue
        steps += rank == 0
        for kind, group, number, size, gpu_ms, _ in line["collectives"]:
            if rank == 0:
                calls[NAMES.get(kind, kind), size].append((group, number))
            if gpu_ms is not None:
                call_ms[group, number].append(gpu_ms)
    rows = []
    for (kind, size), names in calls.items():
        timed = [call_ms[name] for name in names if name in call_ms]
        row: dict[str, str | float | None] = {"kind": kind, "bytes": size, "ms": None}
        row |= {"calls": len(names) / steps, "busbw_gb_per_s": None}
        if timed:
            row["ms"] = ms = statistics.median([min(of_ranks) for of_ranks in timed])
            ranks = max(map(len, timed))  # of the group
            if kind in COLLECTIVES:
                shares = ranks if kind == "all_gather" else 1
                factor = COLLECTIVES[kind].factor(ranks)
                row["busbw_gb_per_s"] = size * shares / ms / 1e6 * factor
        rows.append(row)
    return rows
