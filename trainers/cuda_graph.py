"""A training step captured once as a CUDA graph for each way of exchanging, and replayed since.

A graph holds kernels with the addresses that they had. So batches are copied into tensors that
stay, and gradients and loss lie where the capture left them. All work of a graphed cell runs on one
stream that is not the default one, from the first tensor on: only such a stream can be captured,
and a gradient is added up on the stream on which its place was made (torch's page "CUDA semantics",
"CUDA Graphs").
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainers.batches import Batch

# Uncaptured steps before each capture. torch's page "CUDA semantics" asks for 11 with DDP, whose
# logger reads clocks in the first 10; they also connect, compile, tune, and make what stays
# allocated.
WARM_UP = 11
# Other threads may ask about events meanwhile, as NCCL's watchdog does; what this thread may not do
# is an error all the same.
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
        """Capture what `run` enqueues, without running it.

        Returns what enqueues it all again, and the tensor that `run` gave.

        Raises RuntimeError: `run` waits for the device, or does something else that no graph can
        hold.
        """
        torch.cuda.reset_peak_memory_stats(self._device)  # replays allocate nothing: a capture does
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=MODE):
            result = run()
        self._graphs.append(graph)
        return graph.replay, result

    def close(self) -> None:
        """Give the graphs back and return to the default stream.

        Before the process group ends: graphs hold its communicators.
        """
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))


class GraphedStep:
    """The graphs of one training. A graph is captured when its way of exchanging is stepped in."""

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        parameters: Sequence[nn.Parameter],
        capture: CudaCapture,
    ) -> None:
        """`step` runs a step on a batch and returns its loss."""
        self._step, self._parameters, self._capture = step, parameters, capture
        self._batch: Batch = ()
        # By whether it exchanges: what replays the step, its loss, and the gradients that it fills.
        self._captured: dict[bool, tuple[Callable[[], None], Tensor, list[Tensor | None]]] = {}
        self.asked = 0  # replays that the host has asked for
        self._done = torch.zeros((), dtype=torch.int64, device=parameters[0].device)

    def __call__(self, batch: Batch, exchanges: bool) -> Tensor:
        """Replay a step on a batch. Return its loss, which the next replay overwrites.

        Raises RuntimeError: the step cannot be captured, or the batch has another shape than the
        first.
        """
        if exchanges not in self._captured:
            self._captured[exchanges] = self._capture_step(batch)
        replay, loss, gradients = self._captured[exchanges]
        self._load(batch)
        replay()
        self.asked += 1
        # Another step may have left other gradients than those that the replay fills.
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return loss

    @property
    def done(self) -> int:
        """The replays that the device has counted. Waits for it."""
        return int(self._done)

    def holds(self, batch: Batch) -> bool:
        """Tell whether this batch lies where the graphs read it. Waits for the device."""
        return all(torch.equal(own, tensor) for own, tensor in zip(self._batch, batch, strict=True))

    def close(self) -> None:
        """Give the graphs and their memory back."""
        self._captured.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._capture.close()

    def _capture_step(self, batch: Batch) -> tuple[Callable[[], None], Tensor, list[Tensor | None]]:
        for _ in range(WARM_UP):
            self._step(batch)
        if not self._batch:
            self._batch = tuple(tensor.clone() for tensor in batch)

        def run() -> Tensor:
            self._done.add_(1)
            return self._step(self._batch)

        try:
            replay, loss = self._capture(run)
        except RuntimeError as error:
            raise RuntimeError(
                f"this step cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); "
                "possible with it: optimize=eager and optimize=compile"
            ) from error
        return replay, loss, [parameter.grad for parameter in self._parameters]

    def _load(self, batch: Batch) -> None:
        for own, tensor in zip(self._batch, batch, strict=True):
            if tensor.shape != own.shape:  # copy_ would spread a smaller one
                raise RuntimeError(
                    f"a batch has a tensor {list(tensor.shape)} where the first had "
                    f"{list(own.shape)}; a CUDA graph needs batches of one shape"
                )
            own.copy_(tensor, non_blocking=True)
