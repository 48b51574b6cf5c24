"""Have some steps of a script recorded, from inside its ranks: by torch.profiler or by nsys.

instruments.py loads this where a pass asks for it, and says when a step has ended. Nothing of ours
is imported here.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function


class StepTracer:
    """Has `steps` steps recorded after `warmup_steps`: by torch.profiler into the file `path`;
    without one by nsys."""

    def __init__(
        self, write: Callable[..., None], path: str | None, warmup_steps: int, steps: int
    ) -> None:
        self._write = write
        self._recorder: KinetoRecorder | NsysRecorder = NsysRecorder()
        if path is not None:
            self._recorder = KinetoRecorder(path)
        self._first = warmup_steps + 1  # profilers allocate in the step after their start
        self._last = self._first + steps
        self._ended = 0  # steps
        self._range: AbstractContextManager[Any] | None = None

    def step_ended(self) -> None:
        """Start, mark a step, or stop."""
        self._ended += 1
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._ended == self._first - 1:
            is_on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            self._recorder.start(is_on_gpu)
        elif self._first <= self._ended < self._last:
            self._range = self._recorder.step_range()
            self._range.__enter__()
        elif self._ended == self._last + self._recorder.steps_after:
            self._recorder.stop()
            self._write("traced")


class KinetoRecorder:
    """Records with torch.profiler, which writes a file."""

    steps_after = 0

    def __init__(self, path: str) -> None:
        self._path = path
        self._profiler: Any = None

    def start(self, is_on_gpu: bool) -> None:
        """Record from now on."""
        activities = [ProfilerActivity.CPU]
        if is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def step_range(self) -> AbstractContextManager[Any]:
        """Return the range of a step."""
        return record_function("step")

    def stop(self) -> None:
        """Write the file."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(self._path)


class NsysRecorder:
    """Opens and closes the capture range of nsys, which stands around all ranks.

    One rank does it for all: a second one waited 30 s to close what was closed.
    """

    steps_after = 1  # then no rank is still in the last traced step

    def start(self, is_on_gpu: bool) -> None:
        """Open the range; on the CPU there is none."""
        # Not LOCAL_RANK, which ranks that share a GPU have alike.
        self._has_range = is_on_gpu and os.environ["RANK"] == "0"
        if self._has_range:
            torch.cuda.profiler.start()

    def step_range(self) -> AbstractContextManager[Any]:
        """Return the range of a step, after a mark: a report does not number its processes."""
        torch.cuda.nvtx.mark(f"rank {os.environ['RANK']}")
        return torch.cuda.nvtx.range("step")

    def stop(self) -> None:
        """Close the range once the GPU has done all, and have the rank end orderly: else nsys loses
        its last events."""
        if self._has_range:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())
