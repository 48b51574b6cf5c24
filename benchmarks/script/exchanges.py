"""Note the moments of a script's steps and its collectives, inside the rank.

Moments come from torch's hooks that hold for all modules and optimizers, collectives from torch's
flight recorder, waits for a core from the kernel. `analysis.findings.slow_rank` reads them. On a
GPU the moments are those of the host, which enqueues; a collective's duration is the device's.
Loaded by hooks/sitecustomize.py: nothing of ours is imported here.
"""

import atexit
import contextlib
import functools
import math
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.data import dataloader

RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # of NCCL, of gloo
DRAIN_SECONDS = 1.0
DRAIN_COST = 400  # reading the recorder, 25 µs an entry, takes at most 1/400 of the time
BUCKETS_AT = (3, 10, 30)  # steps; DDP orders its buckets in the second
LAYERS_EVERY = 4  # in one step of so many each layer says when its forward begins
MOST_MOMENTS = 1000  # of a step; a script without an optimizer has no steps
ALL_STEPS, THINNED = 5000, 10  # so many steps are written; of later ones one in ten
SCHEDSTAT = "/proc/thread-self/schedstat"
ELEMENT_BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}
# In Linux' struct tcp_info: bytes acknowledged; µs in which data was on its way, followed by those
# of them in which the receiver had no room.
TCP_INFO_BYTES = 184
SENT_BYTES, BUSY_US = 120, 168
Moment = tuple[str, int, int, int]  # name, time, waited for a core, ran: ns


def attach(write: Callable[..., None], _: Mapping[str, Any]) -> None:
    """Note the moments of this process from now on; `write(kind, **content)` appends a line."""
    moments = StepMoments(write)
    optimizer.register_optimizer_step_pre_hook(lambda *_: moments.mark("optimizer"))
    optimizer.register_optimizer_step_post_hook(lambda *_: moments.mark("optimizer_end"))
    torch.autograd.backward = moments.around("backward", torch.autograd.backward)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = moments.around("loader", iterator.__next__)  # type: ignore[method-assign]
    atexit.register(moments.drain)


class StepMoments:
    """Notes the moments of every step, and writes them with the step's collectives."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write, self._pid = write, os.getpid()
        self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self._step = 0
        self._moments: list[Moment] = []
        self._finished: list[dict[str, Any]] = []  # steps whose collectives were not read yet
        self._open: set[str] = set()  # what has begun and not ended
        self._hook: Any = None
        self._model: torch.nn.Module | None = None
        self._buckets: dict[int, int] = {}  # {id of a module: bucket of its gradients}
        self._bucket: int | None = None
        self._drain_at = time.monotonic() + DRAIN_SECONDS
        self.mark("begin")
        self._await_forward()

    def mark(self, name: str) -> None:
        """Note a moment."""
        if name == "backward":
            self._forward_ended()
        waited_ns = int(os.pread(self._schedstat, 64, 0).split()[1])
        self._moments.append((name, time.time_ns(), waited_ns, time.thread_time_ns()))
        del self._moments[:-MOST_MOMENTS]
        if name in ("backward_end", "optimizer_end"):
            self._await_forward()

    def around(self, name: str, call: Any) -> Any:
        """Return a function with a moment before and after it."""

        @functools.wraps(call)
        def marked(*arguments: Any, **named: Any) -> Any:
            if name in self._open:  # a checkpoint's backward inside the backward
                return call(*arguments, **named)
            self._open.add(name)
            self.mark(name)
            try:
                return call(*arguments, **named)
            finally:
                self._open.discard(name)
                self.mark(f"{name}_end")

        return marked

    def _await_forward(self) -> None:
        self._model = None
        if self._hook is None:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self._hook = register(self._module_begins)

    def _forward_ended(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _module_begins(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._model is None:  # the outermost
            self._model, self._bucket = module, None
            self._end_step()
            self.mark("forward")
            if not self._buckets or self._step % LAYERS_EVERY:
                self._forward_ended()
        bucket = self._buckets.get(id(module), self._bucket)
        if self._hook is not None and bucket != self._bucket:
            self._bucket = bucket
            self.mark(f"forward:{bucket}")

    def _end_step(self) -> None:
        ends = [index for index, moment in enumerate(self._moments) if moment[0] == "optimizer_end"]
        if not ends:
            return
        moments, self._moments = self._moments[: ends[-1] + 1], self._moments[ends[-1] :]
        self._finished.append({"step": self._step, "moments": moments})
        self._step += 1
        if self._step in BUCKETS_AT and not self._buckets:
            self._read_buckets(self._model)
        if time.monotonic() >= self._drain_at:
            try:
                self.drain()
            except Exception as error:  # the script goes on
                print(f"ringside: {type(error).__name__}: {error}", file=sys.stderr)
                self._drain_at = math.inf

    def drain(self) -> None:
        """Write the finished steps with their collectives, and the state of TCP connections."""
        if not self._finished or os.getpid() != self._pid:  # torchrun; a worker of the loader
            return
        begin_s = time.monotonic()
        collectives = recorded_collectives()
        for step in self._finished:
            if step["step"] < ALL_STEPS or step["step"] % THINNED == 0:
                self._write("moments", **written(step, collectives))
        self._finished = []
        self._write("connections", connections=connections())
        end_s = time.monotonic()
        self._drain_at = end_s + max(DRAIN_SECONDS, DRAIN_COST * (end_s - begin_s))

    def _read_buckets(self, model: Any) -> None:
        """Write which layers DDP's buckets hold, once it has ordered them."""
        facts = model._get_ddp_logging_data() if hasattr(model, "_get_ddp_logging_data") else {}
        if not facts.get("has_rebuilt_buckets"):
            return
        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        modules = dict(model.named_modules())
        buckets = []
        for bucket, indices in enumerate(facts["rebuilt_per_bucket_param_indices"].split(",")):
            layers: dict[str, None] = {}
            for index in map(int, indices.split()):
                name, parameter = trained[index]
                layer = name.rpartition(".")[0]
                self._buckets[id(modules[layer])] = bucket
                layers[layer.removeprefix("module.")] = None
            if not parameter.is_cuda:  # there a thread of the device runs the backward
                ready = functools.partial(lambda name, _: self.mark(name), f"ready:{bucket}")
                parameter.register_post_accumulate_grad_hook(ready)  # the last of the bucket
            buckets.append(list(layers))
        self._write("layers", buckets=buckets)


def written(step: Mapping[str, Any], collectives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a step with times in ms from its begin, and its collectives; None: not recorded.

    Of each collective kind, group, number in the group, bytes on this rank, ms on a GPU, begin.
    """
    _, begin_ns, first_waited_ns, first_ran_ns = step["moments"][0]
    end_ns = step["moments"][-1][1]
    rows = []
    for name, at_ns, waited_ns, ran_ns in step["moments"]:
        times = (at_ns - begin_ns, waited_ns - first_waited_ns, ran_ns - first_ran_ns)
        rows.append([name, *(round(value / 1e6, 3) for value in times)])
    inside = []
    for entry in collectives:
        if begin_ns <= entry["time_created_ns"] < end_ns:
            size = 0
            for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
                size += math.prod(shape) * ELEMENT_BYTES.get(dtype, 4)
            row = [entry["profiling_name"].rpartition(":")[2], entry["process_group"][0]]
            row += [entry["collective_seq_id"], size, entry.get("duration_ms")]
            inside.append([*row, round((entry["time_created_ns"] - begin_ns) / 1e6, 3)])
    # The recorder may have forgotten the begin of this step.
    is_whole = bool(collectives) and collectives[0]["time_created_ns"] <= begin_ns
    return {**step, "moments": rows, "collectives": inside if is_whole else None}


def recorded_collectives() -> list[dict[str, Any]]:
    """Return what torch's flight recorder holds, in order of time; [] before torch has one."""
    distributed = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in RECORDERS:
        dump = getattr(distributed, name, None)
        if dump is not None:
            entries += pickle.loads(dump(True, False, False)).get("entries", [])  # torch's own
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def connections() -> list[list[Any]]:
    """Return the TCP connections: both addresses, bytes sent, µs in which data was on its way."""
    rows = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError, struct.error):
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    info = connection.getsockopt(socket.SOL_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                    ends = connection.getsockname()[:2], connection.getpeername()[:2]
                [sent] = struct.unpack_from("=Q", info, SENT_BYTES)
                busy_us, receiver_us = struct.unpack_from("=2Q", info, BUSY_US)
                rows.append([*map("{0[0]}:{0[1]}".format, ends), sent, busy_us - receiver_us])
    return rows
