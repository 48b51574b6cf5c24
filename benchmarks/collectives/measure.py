"""`benchmark=collectives`: latency, algbw and busbw of one collective over message sizes, as nccl-tests measures them.

README.md.
"""

import contextlib
import gc
import itertools
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.collectives.busbw import ELEMENT_BYTES
from benchmarks.collectives.calls import Call, Calls, NcclCalls, TorchCalls
from benchmarks.collectives.request import largest_bytes, placements, sizes
from benchmarks.collectives.wrong_elements import fill, wrong_elements
from benchmarks.rank.ranks import Block, Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.c_calls import made_by
from benchmarks.timing.clock import Clock, SpinBarrier
from conf.cell import Cell
from trainers.process import bus_id

SETTLING = 20  # calls at most, just before the window: the first calls after a barrier are slow
GRAPH_LAUNCHES = (
    10  # of a CUDA graph in a window (nccl-tests -G 10): one alone would measure its launch, too
)


@dataclass(frozen=True)
class Message:
    """One size in one placement. `views` gives its part of the buffers at each place of the rotation."""

    name: str
    size_bytes: int  # S
    in_place: bool

    def views(
        self, out: Tensor, into: Tensor, place: int, rank: int, world_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return (send, receive) of a rank at a place of the rotation; both are views of one dimension."""
        whole = self.size_bytes // out.element_size()
        start = place * whole
        share = whole // world_size
        mine = slice(start + rank * share, start + (rank + 1) * share)
        first = slice(start, start + share)
        everything = slice(start, start + whole)
        if self.name in ("all_gather", "gather"):
            return (into[mine] if self.in_place else out[first]), into[everything]
        if self.name in ("reduce_scatter", "scatter"):
            return (into if self.in_place else out)[everything], into[
                mine if self.in_place else first
            ]
        return (into if self.in_place else out)[everything], into[everything]


class CollectiveBenchmark:
    """One cell on this rank: buffers, calls and clocks are made once."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self._ranks, self._reporter = ranks, reporter
        self._asked = asked = cell.benchmark
        self._name = asked["collective"]
        self._iterations, self._warmup = (
            int(cell.benchmark["iterations"]),
            int(cell.benchmark["warmup"]),
        )
        self._placements, self._sizes, self._largest = (
            placements(cell),
            sizes(cell),
            largest_bytes(cell),
        )
        reporter.phase("connect")
        self._barrier, self._clock = SpinBarrier(ranks), Clock(ranks)
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self.calls = cell.benchmark["calls"]
        self._calls: Calls = (
            NcclCalls(ranks, asked["op"], asked["root"], self._stream)
            if self.calls == "nccl" and self._stream is not None
            else TorchCalls(ranks, asked["op"], asked["root"])
        )
        elements = self._largest // ELEMENT_BYTES[asked["dtype"]]
        self._into = torch.empty(
            elements, dtype=getattr(torch, asked["dtype"]), device=ranks.device
        )
        fill(self._into, ranks.rank, asked["op"], ranks.world_size)
        self._out = self._into.clone() if "out_of_place" in self._placements else self._into

    def measure(self) -> None:
        """Measure every size in every placement. Collective."""
        self._reporter.phase("measure")
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for size, placement in itertools.product(self._sizes, self._placements):
                self._measure(size, placement)

    def _measure(self, size: int, placement: str) -> None:
        """Measure one size in one placement, and write its samples."""
        message = Message(self._name, size, placement == "in_place")
        schedule = self._schedule(message)
        for number in range(self._warmup + 1):  # one always, as nccl-tests does
            schedule[number % len(schedule)]()
            self._reporter.beat()
        purpose, facts = f"{self._name} {size} {placement}", {"bytes": size, "placement": placement}
        us, window_ms = self._window(schedule)
        self._reporter.line(Kind.WINDOW, purpose=purpose, us=us, window_ms=window_ms, **facts)
        if self._asked["verify"]:
            self._reporter.line(Kind.WRONG, purpose=purpose, elements=self._wrong(message), **facts)
        if self._asked["percentiles"] and not self._asked["cuda_graph"]:
            self._reporter.block(purpose, self._single_iterations(schedule), 0, **facts)

    def _schedule(self, message: Message) -> list[Any]:
        """Return a call for every iteration, on the part of the buffers where nccl-tests would make it."""
        coalesced, places = (
            int(self._asked["coalesced"]),
            max(1, self._largest // message.size_bytes),
        )
        calls = [
            self._prepared(message, place)
            for place in range(min(places, self._iterations * coalesced))
        ]
        firsts = range(0, self._iterations * coalesced, coalesced)
        return [
            self._joined([calls[number % len(calls)] for number in range(first, first + coalesced)])
            for first in firsts
        ]

    def _prepared(self, message: Message, place: int) -> Any:
        send, receive = message.views(
            self._out, self._into, place, self._ranks.rank, self._ranks.world_size
        )
        return self._calls.prepare(self._name, send, receive)

    def _joined(self, calls: list[Any]) -> Any:
        """Return one call: the only one of `calls`, or all of them as a group."""
        return calls[0] if self._asked["coalesced"] == 1 else self._calls.together(calls)

    def _window(self, schedule: list[Any]) -> tuple[float, float]:
        """Return the µs of one collective, and the ms of the window: host time until all iterations have ended.

        The first is the second divided by the number of collectives.
        """
        launch, settle, launches = (
            self._calls.in_order(schedule),
            self._calls.in_order(schedule[:SETTLING]),
            1,
        )
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
            return seconds * 1e6 / (
                launches * self._iterations * int(self._asked["coalesced"])
            ), seconds * 1e3
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
        """Capture a call in a CUDA graph, which is not launched yet."""
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        # Torch's own threads query events meanwhile, which the mode `global` forbids.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph

    def _single_iterations(self, schedule: list[Any]) -> Block:
        """Time every iteration apart, in a second window."""
        calls = itertools.cycle(schedule)

        def one() -> None:
            next(calls)()

        return self._clock.block(one, self._iterations, self._reporter.beat)

    def _wrong(self, message: Message) -> int:
        """Return this rank's wrong elements of one collective of known inputs. Collective."""
        op, rank, size = self._asked["op"], self._ranks.rank, self._ranks.world_size
        send, receive = message.views(self._out, self._into, 0, rank, size)
        receive.zero_()
        fill(send, rank, op, size)
        call = self._joined([self._calls.prepare(self._name, send, receive)])
        if self._asked["cuda_graph"]:
            call = self._graph(call).replay  # not launched before: that would change its input
        self._ranks.barrier()
        call()
        if self._stream is not None:
            self._stream.synchronize()
        mine = wrong_elements(self._name, receive, op, self._asked["root"], self._ranks)
        self._ranks.barrier()  # a rank that compares takes time from one that measures
        return mine


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    gc.collect()
    gc.freeze()  # for good, the ranks end with this cell: else every window looks at all of torch for garbage before it opens
    reporter.line(Kind.DEVICE, **_device(ranks))
    benchmark = CollectiveBenchmark(cell, ranks, reporter)
    benchmark.measure()
    checks = {"calls": benchmark.calls}
    return Result(checks=checks | ({"enqueued_by": made_by()} if benchmark.calls == "nccl" else {}))


def _device(ranks: Ranks) -> dict[str, Any]:
    """Return what nccl-tests prints of this rank."""
    facts: dict[str, Any] = {
        "pid": os.getpid(), "host": socket.gethostname().split(".")[0], "device": ranks.rank, "bus_id": "0000:00:00",
        "name": "CPU worker",
    }  # fmt: skip
    if ranks.device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(ranks.device)
        bus = str(bus_id(ranks.device)).removesuffix(
            ".0"
        )  # without the function, as nccl-tests prints it
        facts |= {"device": ranks.device.index, "bus_id": bus, "name": properties.name}
    return facts
