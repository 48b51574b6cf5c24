"""`benchmark=collectives`: one collective over message sizes, as nccl-tests measures. README.md."""

import contextlib
import gc
import itertools
import os
import socket
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.collectives.calls import Call, NcclCalls, TorchCalls, fill, wrong_elements
from benchmarks.collectives.request import ELEMENT_BYTES, largest_bytes, placements, sizes
from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.c_calls import made_by
from benchmarks.timing.clock import Clock, SpinBarrier
from conf.cell import Cell
from trainers import collectives
from trainers.process import bus_id

SETTLING = 20  # calls at most, just before the window: the first calls after a barrier are slow
# Of a CUDA graph in a window (nccl-tests -G 10): one alone would measure its launch, too.
GRAPH_LAUNCHES = 10


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank calls it with the same cell."""
    gc.collect()
    # For good, the ranks end with this cell: else every window looks at all of torch for garbage.
    gc.freeze()
    device: dict[str, Any] = {  # as nccl-tests prints it
        "pid": os.getpid(),
        "host": socket.gethostname().split(".")[0],
        "device": ranks.rank,
        "bus_id": "0000:00:00",
        "name": "CPU worker",
    }
    if ranks.device.type == "cuda":
        device["device"] = ranks.device.index
        device["bus_id"] = str(bus_id(ranks.device)).removesuffix(".0")  # without the function
        device["name"] = torch.cuda.get_device_properties(ranks.device).name
    reporter.line(Kind.DEVICE, **device)
    CollectiveBenchmark(cell, ranks, reporter).measure()
    checks = {"calls": cell.benchmark["calls"]}
    if cell.benchmark["calls"] == "nccl":
        checks["enqueued_by"] = made_by()
    return Result(checks=checks)


class CollectiveBenchmark:
    """One cell on this rank: buffers, calls and clocks are made once."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self._cell, self._ranks, self._reporter = cell, ranks, reporter
        self._options = options = cell.benchmark
        self._name, op, root = options["collective"], options["op"], options["root"]
        self._iterations, self._coalesced = int(options["iterations"]), int(options["coalesced"])
        reporter.phase("connect")
        self._barrier, self._clock = SpinBarrier(ranks), Clock(ranks)
        self._stream: torch.cuda.Stream | None = None
        if ranks.device.type == "cuda":
            self._stream = torch.cuda.Stream(ranks.device)
        self._calls: Any = TorchCalls(ranks, op, root)
        if options["calls"] == "nccl" and self._stream is not None:
            self._calls = NcclCalls(ranks, op, root, self._stream)
        elements = largest_bytes(cell) // ELEMENT_BYTES[options["dtype"]]
        dtype = getattr(torch, options["dtype"])
        with collectives.allocating(options.get("memory", collectives.PLAIN), ranks.device):
            self._into = self._out = torch.empty(elements, dtype=dtype, device=ranks.device)
            if "out_of_place" in placements(cell):
                self._out = torch.empty_like(self._into)
        fill(self._into, ranks.rank, op, ranks.world_size)
        self._out.copy_(self._into)

    def measure(self) -> None:
        """Measure every size in every placement, and write the samples. Collective."""
        self._reporter.phase("measure")
        options, reporter, coalesced = self._options, self._reporter, self._coalesced
        count = self._iterations * coalesced
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for size, placement in itertools.product(sizes(self._cell), placements(self._cell)):
                in_place = placement == "in_place"
                # A call for each iteration, on the part of the buffers where nccl-tests makes it:
                # one collective, or a group of several.
                calls = []
                for position in range(min(max(1, largest_bytes(self._cell) // size), count)):
                    send, receive = self._views(size, in_place, position)
                    calls.append(self._calls.prepare(self._name, send, receive))
                schedule = []
                for first in range(0, count, coalesced):
                    group = [calls[turn % len(calls)] for turn in range(first, first + coalesced)]
                    schedule.append(self._joined(group))
                for turn in range(int(options["warmup"]) + 1):  # one always, as nccl-tests does
                    schedule[turn % len(schedule)]()
                    reporter.beat()
                purpose = f"{self._name} {size} {placement}"
                facts = {"bytes": size, "placement": placement}
                us, window_ms = self._window(schedule)
                reporter.line(Kind.WINDOW, purpose=purpose, us=us, window_ms=window_ms, **facts)
                if options["verify"]:
                    wrong = self._wrong(size, in_place)
                    reporter.line(Kind.WRONG, purpose=purpose, elements=wrong, **facts)
                if options["percentiles"] and not options["cuda_graph"]:
                    turns = itertools.cycle(schedule)

                    def iterate(turns: Any = turns) -> None:
                        next(turns)()

                    block = self._clock.block(iterate, self._iterations, reporter.beat)
                    reporter.block(purpose, block, 0, **facts)

    def _views(self, size: int, in_place: bool, position: int) -> tuple[Tensor, Tensor]:
        ranks = self._ranks
        return message_views(
            self._name,
            size,
            in_place,
            self._out,
            self._into,
            position,
            ranks.rank,
            ranks.world_size,
        )

    def _joined(self, calls: list[Any]) -> Any:
        """Return one call: the only one of `calls`, or all of them as a group."""
        return calls[0] if self._coalesced == 1 else self._calls.together(calls)

    def _window(self, schedule: list[Any]) -> tuple[float, float]:
        """Return the µs of one collective, and the ms of the window.

        The window is the host's time until all iterations have ended.
        """
        launch = self._calls.in_order(schedule)
        settle = self._calls.in_order(schedule[:SETTLING])
        launches = 1
        if self._options["cuda_graph"]:
            launch = settle = self._graph(launch).replay  # the first launch uploads it
            launches = GRAPH_LAUNCHES

        def settled() -> None:
            settle()
            if self._stream is not None:
                self._stream.synchronize()
            self._reporter.beat(0)

        gc.disable()
        try:
            self._barrier.wait(settled)
            opened = time.perf_counter()
            for _ in range(launches):
                launch()
            if self._stream is not None:
                while not self._stream.query():
                    pass
            seconds = time.perf_counter() - opened
        finally:
            gc.enable()
            self._reporter.beat(launches * self._iterations)
        return seconds * 1e6 / (launches * self._iterations * self._coalesced), seconds * 1e3

    def _graph(self, launch: Call) -> torch.cuda.CUDAGraph:
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        # Torch's own threads query events meanwhile, which the mode `global` forbids.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph

    def _wrong(self, size: int, in_place: bool) -> int:
        """Return this rank's wrong elements of one collective of known inputs. Collective."""
        op, ranks = self._options["op"], self._ranks
        send, receive = self._views(size, in_place, 0)
        receive.zero_()
        fill(send, ranks.rank, op, ranks.world_size)
        call = self._joined([self._calls.prepare(self._name, send, receive)])
        if self._options["cuda_graph"]:
            call = self._graph(call).replay  # not launched before: that would change its input
        ranks.barrier()
        call()
        if self._stream is not None:
            self._stream.synchronize()
        wrong = wrong_elements(self._name, receive, op, self._options["root"], ranks)
        ranks.barrier()  # a rank that compares takes time from one that measures
        return wrong


def message_views(
    name: str,
    size_bytes: int,
    in_place: bool,
    out: Tensor,
    into: Tensor,
    position: int,
    rank: int,
    world_size: int,
) -> tuple[Tensor, Tensor]:
    """Return (send, receive) of a rank: parts of the buffers, at a position of the rotation."""
    elements = size_bytes // out.element_size()
    start, share = position * elements, elements // world_size
    own = slice(start + rank * share, start + (rank + 1) * share)
    first = slice(start, start + share)
    whole = slice(start, start + elements)
    part = first
    source = out
    if in_place:
        part, source = own, into
    if name in ("all_gather", "gather"):
        return source[part], into[whole]
    if name in ("reduce_scatter", "scatter"):
        return source[whole], into[part]
    return source[whole], into[whole]
