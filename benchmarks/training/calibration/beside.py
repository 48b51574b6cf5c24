"""Collectives that run beside steps, and that nothing in a step waits for."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Beside:
    """A number of calls beside each step: on a stream of their own on a GPU, in a thread on a CPU worker."""

    def __init__(self, run: Callable[[], None], calls: int, device: torch.device) -> None:
        self._run, self._calls = run, calls
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1) if self._stream is None else None
        self._begun: Future[float] | None = None
        self._events: list[tuple[Any, Any]] = []
        self._ms: list[float] = []

    def start(self) -> None:
        """Begin the calls, not before the device has come to this place."""
        if self._stream is None:
            assert self._thread is not None
            self._begun = self._thread.submit(self._timed)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            first.record()
            for _ in range(self._calls):
                self._run()
            last.record()
        self._events.append((first, last))

    def end(self) -> None:
        """Let what comes next wait for the calls."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        elif self._begun is not None:
            self._ms.append(self._begun.result())

    def ms(self) -> list[float]:
        """Return how long the calls beside each step took, also those of lead-ins; the device has finished."""
        return self._ms if self._stream is None else [first.elapsed_time(last) for first, last in self._events]

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _timed(self) -> float:
        begun = time.perf_counter()
        for _ in range(self._calls):
            self._run()
        return (time.perf_counter() - begun) * 1e3
