"""What torch.compile made for a cell stays in ranks that go on, for the next cell with an equal graph.

A model that is built anew finds the graphs of an equal one: torch's guards look at shapes, types and attributes, and weights are
inputs of a graph. But they do not see everything. DDP's buckets decide where torch splits a graph, and a second cell with other
buckets would silently run the graph of the first. A second batch size would make torch compile for any batch size, which no new
process does. So what was compiled is forgotten before a cell whose graph could be another one.
"""

import contextlib
import os
import sys
from typing import Any

from conf.cell import Cell


class KeptGraphs:
    """The graphs that this process has compiled, all for one key."""

    def __init__(self) -> None:
        self._key = ""

    def begin(self, cell: Cell) -> None:
        """Forget what was compiled for another graph than this cell's. Before the cell is built."""
        key = cell.graph
        if key and self._key and key != self._key:
            import torch

            torch.compiler.reset()
        self._key = key or self._key  # a cell that is not compiled uses no graph, and changes none

    @property
    def any(self) -> bool:
        """Whether a cell was compiled here."""
        return bool(self._key)


def has_compiled() -> bool:
    """Return whether torch's compiler has looked at any code of this process."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))


def end_compile_workers() -> None:
    """End the processes and threads that torch's compiler has started for kernels, and that wait for more of them."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None:
        return
    for pool in list(compiler._pool_set):
        close_ends_of_workers(pool)
    compiler.shutdown_compile_workers()
    threads = compiler.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown()
        threads.cache_clear()


def close_ends_of_workers(pool: Any) -> None:
    """Close this process's copies of the pipe ends that the workers of torch's compiler have: torch 2.11 leaves two open."""
    process = getattr(pool, "process", None)
    if process is None:  # another kind of pool has no pipes
        return
    own = {os.fstat(pipe.fileno()).st_ino for pipe in (pool.read_pipe, pool.write_pipe) if not pipe.closed}
    for option in process.args:
        name, _, number = str(option).partition("=")
        if name in ("--read-fd", "--write-fd"):
            with contextlib.suppress(OSError):
                if (
                    os.fstat(int(number)).st_ino in own
                ):  # else torch closed it, and the number names another file by now
                    os.close(int(number))
