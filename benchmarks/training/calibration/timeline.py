"""When the moments inside a step come: the loss, the last gradient of each bucket, the end of backward, exchange and update.

On a GPU a moment is a CUDA event on the current stream of whoever passes it, backward's thread too; on a CPU worker it is the
host's clock. Hooks are there only while a window is observed, which is never one that is timed.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from benchmarks.timing.clock import Clock
from benchmarks.training.calibration.beside import Beside
from trainers.step import Training
from trainers.strategy import SentBucket

# What a stage of a step leaves when it ends (trainers.step marks the stages).
LEFT_BY = {"forward": "forward", "backward": "backward", "exchange": "exchange", "optimizer": "update"}
START = "start"
Moments = dict[str | int, Any]  # of one step: by name, or by number of a bucket


class Timeline:
    """Observes steps of one training."""

    def __init__(self, training: Training, buckets: Sequence[SentBucket] | None) -> None:
        """`buckets` are those whose gradients are awaited; None: there are none."""
        self._training, self._on_gpu = training, training.device.type == "cuda"
        numbers = {id(parameter): number for number, parameter in enumerate(training.parameters)}
        self._members = [{numbers[id(one)] for one in bucket.parameters} for bucket in buckets or ()]
        self._steps: list[Moments] = []
        self._hooks: list[RemovableHandle] = []

    def observe(
        self, clock: Clock, steps: int, beat: Callable[[], None], beside: Beside | None = None
    ) -> dict[str, Any]:
        """Step; return ms after each step's start, as lists [step]: {forward_ms, backward_ms, exchange_ms, update_ms, ready_ms}.

        `ready_ms` is [bucket][step]. `beside` works meanwhile, and the next step waits for it. The lead-in shows which gradient
        of a bucket comes last; a bucket that lacks one has no times. Collective.
        """
        arrived: list[int] = []
        self._steps = []
        everyone = range(len(self._training.parameters)) if self._members else ()
        self._hook_on({number: [arrived.append] for number in everyone})

        def step() -> None:
            if len(self._steps) == 1:
                self._hook_on(self._last_gradients(arrived))
            self._steps.append({})
            self._pass(START)
            if beside:
                beside.start()
            self._training.step()
            if beside:
                beside.end()

        usual, self._training.mark = self._training.mark, self._passed
        try:
            clock.block(step, steps, beat)
        finally:
            self._training.mark = usual
            self._hook_on({})
        return self._read(self._steps[1:])

    def _last_gradients(self, arrived: Sequence[int]) -> dict[int, list[Callable[[int], None]]]:
        """Return what to do when a parameter's gradient comes: pass the buckets of which it is the last."""
        place = {number: place for place, number in enumerate(arrived)}
        last: dict[int, list[Callable[[int], None]]] = {}
        for bucket, members in enumerate(self._members):
            if members and members <= place.keys():
                found = max(members, key=lambda number: place[number])
                last.setdefault(found, []).append(functools.partial(self._pass_bucket, bucket))
        return last

    def _hook_on(self, wanted: dict[int, list[Callable[[int], None]]]) -> None:
        """Replace every hook: call functions with the number of the parameter when its gradient has been added up."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self._training.parameters[number].register_post_accumulate_grad_hook(
                lambda _, call=call, number=number: call(number)
            )
            for number, calls in wanted.items()
            for call in calls
        ]

    @contextmanager
    def _passed(self, stage: str) -> Iterator[None]:
        yield
        self._pass(LEFT_BY[stage])

    def _pass_bucket(self, bucket: int, _: int) -> None:
        self._pass(bucket)

    def _pass(self, moment: str | int) -> None:
        """Note a moment of the step that runs."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1][moment] = event
        else:
            self._steps[-1][moment] = time.perf_counter()

    def _read(self, steps: Sequence[Moments]) -> dict[str, Any]:
        """Return the moments of some steps in ms; the device has finished."""

        def ms(moment: str | int) -> list[float]:
            if not all(moment in step for step in steps):
                return []
            if self._on_gpu:
                return [step[START].elapsed_time(step[moment]) for step in steps]
            return [(step[moment] - step[START]) * 1e3 for step in steps]

        found: dict[str, Any] = {f"{moment}_ms": ms(moment) for moment in LEFT_BY.values()}
        return found | {"ready_ms": [ms(bucket) for bucket in range(len(self._members))]}
