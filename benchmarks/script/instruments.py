"""Mark the steps of a script from inside its ranks, by torch's hooks for optimizers and modules.

A step ends when the script's optimizer has stepped. On a GPU a CUDA event is recorded there and
read later, without waiting for the device; on the CPU it is the host's clock. The first dimension
of the first tensor that the outermost trained module is called with counts as its samples.
Loaded by hooks/sitecustomize.py: nothing of ours is imported here.
"""

import atexit
import functools
import importlib.util
import os
import platform
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

CHUNK_SECONDS = 1.0
WATCHED = 5  # the step, of the warm-up, in which fast paths are looked for
OTHERS_IN_A_ROW = 3  # steps of another optimizer, after which that one is the script's
Write = Callable[..., None]


def attach(write: Write, settings: Mapping[str, Any]) -> None:
    """Say that torch is imported, and mark every step from now on; trace some if that is asked."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    is_free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    is_free = is_free and threading.current_thread() is threading.main_thread()
    if is_free:  # answer it with the stacks of this process
        _loaded("rank/stacks.py").register()
    write("attached", process=os.getpid(), versions=versions, stacks=is_free)
    tracer = None
    if "trace" in settings:
        tracer = _loaded("script/tracer.py").StepTracer(write, **settings["trace"])
    marks = StepMarks(write, tracer)
    register_optimizer_step_post_hook(marks.optimizer_stepped)
    marks.look_for_model()
    atexit.register(marks.finish)
    os.register_at_fork(after_in_child=marks.stop)  # a worker of a loader is not a rank


def _loaded(path: str) -> Any:
    """Load a file of this package by its path: the script may have a package of the same name."""
    file = Path(__file__).resolve().parent.parent / path
    spec = importlib.util.spec_from_file_location(f"_ringside_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that marks nothing more after an error: the script goes on."""

    @functools.wraps(method)
    def call(marks: "StepMarks", *arguments: Any) -> None:
        if not marks.is_stopped:
            try:
                method(marks, *arguments)
            except Exception as error:
                marks.is_stopped = True
                print(f"ringside: {type(error).__name__}: {error}", file=sys.stderr)

    return call


class StepMarks:
    """Marks the end of each step, counts its forward passes and samples, and writes them."""

    def __init__(self, write: Write, tracer: Any = None) -> None:
        self._write, self._tracer = write, tracer
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._others = 0
        self._handle: Any = None  # of the hook that counts
        self._samples = self._passes = 0
        self._ends: list[tuple[Any, float, int, int]] = []  # event, host s, samples, passes
        self._written = 0  # steps
        self._write_at = 0.0
        self.is_stopped = False
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._watched: Any = None  # path_facts.WatchedUpdate, in one step

    def stop(self) -> None:
        """Mark nothing more."""
        self.is_stopped = True

    def look_for_model(self) -> None:
        """Watch the calls of all modules until a trained one is called."""
        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._handle = register(self._module_called)

    @guarded
    def _module_called(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take the first trained module that is called: those inside it are called later."""
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if not (is_trained and module.training and torch.is_grad_enabled()):
            return  # a transform, a loss, an evaluation
        self._handle.remove()  # it would make every call of every module slower
        self._model = weakref.ref(module)
        self._handle = module.register_forward_pre_hook(self._forward, with_kwargs=True)
        self._forward(module, inputs, {})
        if not self._ends:
            self._write("script_device", **about_device(module))

    @guarded
    def _forward(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        if module.training and torch.is_grad_enabled():
            self._passes += 1
            self._samples += samples_of([*inputs, *named.values()])

    @guarded
    def optimizer_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """End a step, if this is the script's optimizer."""
        current = self._optimizer()
        if current is not optimizer:
            self._others += 1
            if current is not None and self._others < OTHERS_IN_A_ROW:
                return
            self._optimizer = weakref.ref(optimizer)
        self._others = 0
        self._end_step(optimizer)

    @guarded
    def finish(self) -> None:
        """Write the last steps of a script that ends by itself."""
        if self._ends:
            self._write_steps()

    def _end_step(self, optimizer: Optimizer) -> None:
        event = None
        parameters = optimizer.param_groups[0]["params"]
        if parameters and parameters[0].is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        moment = time.monotonic()
        self._ends.append((event, moment, self._samples, self._passes))
        if not self._passes:  # another model, or one around it, is called now
            self._handle.remove()
            self.look_for_model()
        self._samples = self._passes = 0
        try:
            self._watch(optimizer)
        except Exception as error:
            print(f"ringside: fast paths: {type(error).__name__}: {error}", file=sys.stderr)
        if self._tracer is not None:
            self._tracer.step_ended()
        if moment >= self._write_at:
            self._write_at = moment + CHUNK_SECONDS
            self._write_steps()

    def _watch(self, optimizer: Optimizer) -> None:
        model, watched = self._model(), self._watched
        self._watched = None
        if watched is not None:
            self._write("paths", **watched.end())
        elif model is not None and self._written + len(self._ends) == WATCHED:
            self._watched = _loaded("path_facts.py").WatchedUpdate(model, optimizer)

    def _write_steps(self) -> None:
        """Write the steps that have ended on the device; the last end stays for the next step."""
        ms, samples, passes, ends_s = [], [], [], []
        while len(self._ends) > 1:
            (before, before_s, _, _), (event, moment, counted, forwards) = self._ends[:2]
            if event is None:
                ms.append(round(1e3 * (moment - before_s), 4))
            elif event.query():
                ms.append(round(before.elapsed_time(event), 4))
            else:
                break
            samples.append(counted)
            passes.append(forwards)
            ends_s.append(round(moment, 6))
            del self._ends[0]
        self._written += len(ms)
        content = {"ms": ms, "samples": samples, "passes": passes, "ends_s": ends_s}
        first = self._written - len(ms)
        self._write("steps", first=first, iterations=self._written + 1, **content)


def samples_of(values: Iterable[Any]) -> int:
    """Return the first dimension of the first tensor in a batch, also within lists and mappings."""
    samples = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            samples = int(value.shape[0])
        elif isinstance(value, Mapping):
            samples = samples_of(value.values())
        elif isinstance(value, list | tuple):
            samples = samples_of(value)
        if samples:
            break
    return samples


def about_device(module: torch.nn.Module) -> dict[str, Any]:
    """Return the device of a module's first parameter, and what the script did to the choice."""
    parameter = next(module.parameters())
    facts: dict[str, Any] = {
        "device": str(parameter.device),
        "threads": torch.get_num_threads(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if parameter.is_cuda:
        properties: Any = torch.cuda.get_device_properties(parameter.device)
        facts |= {"uuid": f"GPU-{properties.uuid}", "name": properties.name}
    return facts
