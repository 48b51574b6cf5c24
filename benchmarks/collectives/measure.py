"""`benchmark=collectives`: latency, algbw and busbw of one collective over message sizes, as nccl-tests measures them.

METHOD.md, "Collectives".
"""

import contextlib
import gc
import itertools
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collectives import nccl_tests_table
from benchmarks.collectives.calls import Call, Calls, Nccl, Torch
from benchmarks.collectives.request import COLLECTIVES, ELEMENT_BYTES, largest_bytes, option, placements, sizes
from benchmarks.collectives.wrong_elements import fill, wrong_elements
from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import alpha_beta
from benchmarks.timing.c_calls import made_by
from benchmarks.timing.clock import Clock
from benchmarks.timing.spin_barrier import SpinBarrier
from conf.cell import Cell
from trainers.devices import bus_id

SETTLING = 20  # calls at most, just before the window: a host that comes from a barrier is slow at first
GRAPH_LAUNCHES = 10  # of a CUDA graph in a window (nccl-tests -G 10): one alone would measure its launch, too


@dataclass(frozen=True)
class Message:
    """One size in one placement: views of the buffers, and how often it can lie elsewhere in them."""

    name: str
    size_bytes: int  # S
    in_place: bool

    def views(self, out: Tensor, into: Tensor, place: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """(send, receive) of a rank at the given place of the rotation."""
        whole = self.size_bytes // out.element_size()
        start = place * whole
        share = whole // world_size
        mine = slice(start + rank * share, start + (rank + 1) * share)
        first = slice(start, start + share)
        everything = slice(start, start + whole)
        if self.name in ("all_gather", "gather"):
            return (into[mine] if self.in_place else out[first]), into[everything]
        if self.name in ("reduce_scatter", "scatter"):
            return (into if self.in_place else out)[everything], into[mine if self.in_place else first]
        return (into if self.in_place else out)[everything], into[everything]


class Measurement:
    """One cell: buffers, calls and clocks are made once."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self._ranks, self._reporter = ranks, reporter
        self._asked = asked = cell.benchmark
        self._name, self._kind = asked["collective"], COLLECTIVES[asked["collective"]]
        self._iterations, self._warmup = int(option(cell, "iterations")), int(option(cell, "warmup"))
        self._placements, self._sizes, self._largest = placements(cell), sizes(cell), largest_bytes(cell)
        reporter.phase("connect")
        self._barrier, self._clock = SpinBarrier(ranks), Clock(ranks)
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self.calls = option(cell, "calls")
        self._calls: Calls = (
            Nccl(ranks, asked["op"], asked["root"], self._stream)
            if self.calls == "nccl" and self._stream is not None
            else Torch(ranks, asked["op"], asked["root"])
        )
        elements = self._largest // ELEMENT_BYTES[asked["dtype"]]
        self._into = torch.empty(elements, dtype=getattr(torch, asked["dtype"]), device=ranks.device)
        fill(self._into, ranks.rank, asked["op"])
        self._out = self._into.clone() if "out_of_place" in self._placements else self._into

    def rows(self) -> list[dict[str, Any]]:
        """A row for every size. Collective."""
        self._reporter.phase("measure")
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            return [self._row(size) for size in self._sizes]

    def _row(self, size: int) -> dict[str, Any]:
        dtype = self._asked["dtype"]
        share = size // self._ranks.world_size if self._kind.shares else size
        return {
            "bytes": size,
            "count": share // ELEMENT_BYTES[dtype],
            "dtype": nccl_tests_table.TYPES[dtype],
            "redop": self._asked["op"] if self._kind.reduces else None,
            "root": self._asked["root"] if self._kind.rooted else None,
            "out_of_place": None,
            "in_place": None,
            **{placement: self._measured(size, placement) for placement in self._placements},
        }

    def _measured(self, size: int, placement: str) -> dict[str, Any]:
        """The figures of one size in one placement."""
        message = Message(self._name, size, placement == "in_place")
        schedule = self._schedule(message)
        for number in range(self._warmup + 1):  # one always, as nccl-tests does
            schedule[number % len(schedule)]()
            self._reporter.beat()
        mine = self._window(schedule)
        self._reporter.line("window", purpose=f"{self._name} {size} {placement}", us=mine)
        times = [one for (one,) in self._ranks.gather([mine])]
        mean = sum(times) / len(times)  # nccl-tests' default is the mean over ranks, too
        algbw = size / mean / 1e3
        found: dict[str, Any] = {
            "time_us": mean,
            "algbw": algbw,
            "busbw": algbw * self._kind.factor(self._ranks.world_size),
            "wrong": self._wrong(message) if self._asked["verify"] else None,
            "slowest_us": max(times),
        }
        if self._asked["percentiles"] and not self._asked["cuda_graph"]:
            found["per_iteration"] = self._per_iteration(schedule, f"{self._name} {size} {placement}")
        return found

    def _schedule(self, message: Message) -> list[Any]:
        """A call for every iteration, each of them where nccl-tests would put it."""
        coalesced, places = int(self._asked["coalesced"]), max(1, self._largest // message.size_bytes)
        calls = [self._prepared(message, place) for place in range(min(places, self._iterations * coalesced))]
        firsts = range(0, self._iterations * coalesced, coalesced)
        return [
            self._joined([calls[number % len(calls)] for number in range(first, first + coalesced)]) for first in firsts
        ]

    def _prepared(self, message: Message, place: int) -> Any:
        send, receive = message.views(self._out, self._into, place, self._ranks.rank, self._ranks.world_size)
        return self._calls.prepare(self._name, send, receive)

    def _joined(self, calls: list[Any]) -> Any:
        """One call of one collective, or of several in a group."""
        return calls[0] if self._asked["coalesced"] == 1 else self._calls.together(calls)

    def _window(self, schedule: list[Any]) -> float:
        """µs of one collective: the host's time of all iterations and the wait for their end, divided by their number."""
        launch, settle, launches = self._calls.in_order(schedule), self._calls.in_order(schedule[:SETTLING]), 1
        if self._asked["cuda_graph"]:
            launch = settle = self._graph(launch).replay  # the first launch uploads it
            launches = GRAPH_LAUNCHES
        gc.disable()
        try:
            self._barrier.wait(lambda: self._finished(settle))
            opened = time.perf_counter()
            for _ in range(launches):
                launch()
            if self._stream is not None:
                while not self._stream.query():
                    pass
            seconds = time.perf_counter() - opened
            return seconds * 1e6 / (launches * self._iterations * int(self._asked["coalesced"]))
        finally:
            gc.enable()
            self._reporter.beat(launches * self._iterations)

    def _finished(self, call: Call) -> None:
        """Make a call and wait for its end."""
        call()
        if self._stream is not None:
            self._stream.synchronize()
        self._reporter.beat(0)

    def _graph(self, launch: Call) -> torch.cuda.CUDAGraph:
        """The same as a CUDA graph, not launched yet."""
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        # Torch's own threads query events meanwhile, which the mode `global` forbids.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph

    def _per_iteration(self, schedule: list[Any], purpose: str) -> dict[str, float]:
        """Statistics of single iterations, each as long as its slowest rank's, in µs of one collective."""
        calls = itertools.cycle(schedule)

        def one() -> None:
            next(calls)()

        block = self._clock.block(one, self._iterations, self._reporter.beat)
        self._reporter.block(purpose, block, 0)
        us = np.asarray(self._ranks.slowest(block.ms)) * 1e3 / self._asked["coalesced"]
        p50, p95, p99 = (float(value) for value in np.percentile(us, (50, 95, 99)))
        spread = float(us.std())
        return {
            "min_us": float(us.min()), "max_us": float(us.max()), "avg_us": float(us.mean()), "p50_us": p50, "p95_us": p95,
            "p99_us": p99, "stdev_us": spread, "cv_pct": 100 * spread / float(us.mean()),
        }  # fmt: skip

    def _wrong(self, message: Message) -> int:
        """Wrong elements of all ranks, of one collective of known inputs. Collective."""
        op, rank, size = self._asked["op"], self._ranks.rank, self._ranks.world_size
        send, receive = message.views(self._out, self._into, 0, rank, size)
        receive.zero_()
        fill(send, rank, op)
        call = self._joined([self._calls.prepare(self._name, send, receive)])
        if self._asked["cuda_graph"]:
            call = self._graph(call).replay  # not launched before: that would change its input
        self._ranks.barrier()
        call()
        if self._stream is not None:
            self._stream.synchronize()
        mine = wrong_elements(self._name, receive, op, self._asked["root"], self._ranks)
        return int(sum(one for (one,) in self._ranks.gather([mine])))


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    gc.collect()
    gc.freeze()  # what is there stays: else every window looks at all of torch for garbage before it opens
    measurement = Measurement(cell, ranks, reporter)
    rows = measurement.rows()
    found = [(row["bytes"], row[placement]) for row in rows for placement in placements(cell)]
    average = sum(one["busbw"] for _, one in found) / len(found)
    headed = "out_of_place" if "out_of_place" in placements(cell) else "in_place"
    times = [row[headed]["time_us"] for row in rows]
    result = Result()
    result.metrics = {
        "collectives/busbw_gb_per_s": rows[-1][headed]["busbw"],
        "collectives/algbw_gb_per_s": rows[-1][headed]["algbw"],
        "collectives/avg_busbw_gb_per_s": average,
        "collectives/latency_us": times[0],
    }
    if line := alpha_beta.fit([row["bytes"] for row in rows], times):
        result.tables["alpha_beta"] = line.to_dict() | {"placement": headed}
        result.metrics |= {"collectives/alpha_us": line.pieces[0].alpha_us, "collectives/fit_rms_error": line.rms_error}
        if beta := line.pieces[-1].beta_gb_per_s:
            result.metrics["collectives/beta_gb_per_s"] = beta
    for placement in placements(cell):
        series = [[row["bytes"], row[placement]["busbw"]] for row in rows]
        result.series[f"collectives/{placement}_busbw_gb_per_s"] = series
    if cell.benchmark["verify"]:
        wrong = [(size, one["wrong"]) for size, one in found if one["wrong"]]
        result.checks |= {
            "wrong_elements": sum(count for _, count in wrong),
            "wrong_bytes": [size for size, _ in wrong],
        }
    result.checks["calls"] = measurement.calls
    if measurement.calls == "nccl":
        result.checks["enqueued_by"] = made_by()
    run = {"collective": cell.benchmark["collective"], "ranks": ranks.world_size, "rows": rows, "avg_busbw": average}
    result.tables["nccl-tests"] = {"runs": [run]}
    devices = _devices(ranks)
    if cell.benchmark["format"] == "nccl-tests" and ranks.rank == 0:
        reporter.output("\n".join(nccl_tests_table.lines(cell, run, devices)))
    return result


def _devices(ranks: Ranks) -> list[dict[str, Any]]:
    """What nccl-tests says of every rank. Collective."""
    mine: dict[str, Any] = {
        "pid": os.getpid(), "host": socket.gethostname().split(".")[0], "device": ranks.rank, "bus_id": "0000:00:00",
        "name": "CPU worker",
    }  # fmt: skip
    if ranks.device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(ranks.device)
        bus = str(bus_id(ranks.device)).removesuffix(".0")  # without the function, as nccl-tests prints it
        mine |= {"device": ranks.device.index, "bus_id": bus, "name": properties.name}
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, mine)
    return everyone
