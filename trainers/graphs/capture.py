"""CUDA graphs on one rank: a stream of their own, the capture of a call, and its replay.

All work of a graphed cell runs on one stream that is not the default one, from the first tensor on: only such a stream can be
captured, and a gradient is added up on the stream on which its place was made (torch's page "CUDA semantics", "CUDA Graphs").
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Other threads may ask about events meanwhile, as NCCL's watchdog does; what this thread may not do is an error all the same.
MODE = "thread_local"


class CudaCapture:
    """Captures calls. Its graphs share memory, so no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        """Leave the default stream of a GPU, before anything is built there."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture what `run` enqueues, without running it. Return what enqueues it all again, and the tensor that `run` gave.

        Raises:
            RuntimeError: `run` waits for the device, or does something else that no graph can hold.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=MODE):
            given = run()
        self._graphs.append(graph)
        return graph.replay, given

    def close(self) -> None:
        """Give the graphs back and return to the default stream. Before the process group ends: graphs hold its communicators."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))
