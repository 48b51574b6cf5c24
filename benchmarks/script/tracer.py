"""Record some steps of a script with torch.profiler, from inside its ranks.

instruments.py loads this where a pass asks for it, and says when a step has ended. Nothing of ours
is imported here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function


class StepTracer:
    """Records `steps` steps after `warmup_steps`, and writes them to `path`."""

    def __init__(
        self, write: Callable[..., None], path: str, warmup_steps: int, steps: int
    ) -> None:
        self._write, self._path = write, path
        self._first = warmup_steps + 1  # profilers allocate in the step after their start
        self._last = self._first + steps
        self._ended = 0  # steps
        self._profiler: Any = None
        self._range: Any = None

    def step_ended(self) -> None:
        """Start, mark a step, or stop and write the file."""
        self._ended += 1
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._ended == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self._first <= self._ended < self._last:
            self._range = record_function("step")
            self._range.__enter__()
        elif self._ended == self._last:
            self._profiler.stop()
            self._profiler.export_chrome_trace(self._path)
            self._profiler = None
            self._write("traced")
