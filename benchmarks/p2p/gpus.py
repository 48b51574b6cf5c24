"""Copies between the GPUs of one process, held back until all are enqueued: the method of p2pBandwidthLatencyTest.

A kernel spins on the stream of the first copy; behind it lie an event, every copy and an event. All GPUs are driven from
this process, as in the tool. Peer access is as it was when a measurement ends. README.md.
"""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from cuda.bindings import driver, nvrtc, runtime

from benchmarks.p2p.copies import (
    Copy,
    CopyMethod,
    CopyTimes,
    Latency,
    differing,
    write_opposite,
    write_pattern,
)
from benchmarks.timing.c_calls import CCall, InOrder, address, made_by
from trainers.memory import GpuMemory, checked
from trainers.process import bus_id

HOLD_CYCLES = 10_000_000  # of the GPU's clock, as in the tool: 5 ms at 2 GHz
LONGEST_HOLD_CYCLES = 16 * HOLD_CYCLES
WARM_BYTES = 16  # of a copy before the timed ones: the first between two GPUs after others takes 0.1 ms longer
THREADS = 1024  # of a block of the copy kernel


def copy_function() -> int | None:
    """Return the address of cudaMemcpyPeerAsync in torch's CUDA runtime; None where that is no library of its own."""
    try:
        library = ctypes.CDLL(
            f"libcudart.so.{str(torch.version.cuda).split('.')[0]}",
            mode=os.RTLD_NOW | os.RTLD_NOLOAD,
        )
    except OSError:
        return None
    return address(library, "cudaMemcpyPeerAsync")


def _words(status: int) -> str:
    try:
        return bytes(runtime.cudaGetErrorString(runtime.cudaError_t(status))[1]).decode()
    except ValueError:  # of a newer CUDA than the bindings know
        return f"CUDA error {status}"


def _one_by_one(
    call: Callable[..., tuple[Any, ...]], name: str, given: tuple[Any, ...], iterations: int
) -> None:
    for _ in range(iterations):
        answer = call(*given)
        if answer[0]:
            checked(name, answer)


class PairStream:
    """A stream of a GPU for copies, with its events."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(torch.device("cuda", device))
        self.handle = runtime.cudaStream_t(self.stream.cuda_stream)
        self.start, self.stop, self.all_done = (
            torch.cuda.Event(enable_timing=True) for _ in range(3)
        )


class Gpus:
    """Copies between the GPUs of a subset, numbered by their place in it; `ids` are their numbers for people."""

    words = {"enabled": "peer access", "disabled": "copies that the driver stages"}  # noqa: RUF012

    def __init__(self, ids: Sequence[int], size_bytes: int, copy: str) -> None:
        """Take two buffers of `size_bytes` on each GPU. `copy` is engine or sm.

        Raises:
            RuntimeError: a CUDA call failed; names the call and the GPU.
        """
        self._names = [f"GPU {one}" for one in ids]
        self._own = torch.cuda.current_device()
        # For these the driver waits for room while it enqueues, and no hold is long enough.
        self._waits: set[CopyMethod] = set()
        self.late = 0
        self._buffers: list[tuple[GpuMemory, GpuMemory]] = []
        self._lanes: dict[tuple[int, int], PairStream] = {}
        self._kernels: list[Any] = []
        self._copy = copy_function()
        self.enqueued_by: str | None = "Python" if copy == "sm" or self._copy is None else made_by()
        self.devices: list[dict[str, str]] = []
        self._access = {
            (a, b): bool(
                checked(
                    f"cudaDeviceCanAccessPeer of {self._names[a]} to {self._names[b]}",
                    runtime.cudaDeviceCanAccessPeer(a, b),
                )
            )
            for a in range(len(ids))
            for b in range(len(ids))
            if a != b
        }
        for number, name in enumerate(self._names):
            self._select(number)
            device = torch.device("cuda", number)
            self._buffers.append(
                (GpuMemory(size_bytes, device, name), GpuMemory(size_bytes, device, name))
            )
            found: Any = torch.cuda.get_device_properties(number)
            bus = str(bus_id(device)).removesuffix(".0")
            self.devices.append({"name": found.name, "bus_id": bus})
            if copy == "sm":
                self._kernels.append(loaded(name, f"sm_{found.major}{found.minor}"))

    def can_access(self, a: int, b: int) -> bool:
        """Return whether one GPU can address another's memory, as CUDA says."""
        return self._access[a, b]

    def time(self, copies: Sequence[Copy], how: CopyMethod) -> CopyTimes:
        """Time copies that start together, each on a stream of the GPU that makes it."""
        with self._peers(copies, how.enabled):
            return self._timed(copies, how)[0]

    def latency(self, copy: Copy, how: CopyMethod) -> Latency:
        """Time small copies. GPU: time between events ÷ iterations. CPU: host time to enqueue them ÷ iterations."""
        with self._peers([copy], how.enabled):
            timed, enqueue_seconds = self._timed([copy], how)
        return Latency(timed.all_ms * 1e3 / how.iterations, enqueue_seconds * 1e6 / how.iterations)

    def wrong_elements(self, copy: Copy, how: CopyMethod) -> int:
        """Fill, copy once, and count on the target the elements that did not arrive."""
        number = 1 + copy.source * len(self._names) + copy.target
        source, target = (
            self._buffers[member][side].bytes[: how.size_bytes // 4 * 4].view(torch.int32)
            for side, member in enumerate((copy.source, copy.target))
        )
        self._select(copy.source)
        write_pattern(source, number)
        self._select(copy.target)
        write_opposite(target, number)
        self._finish()
        with self._peers([copy], how.enabled):
            lane = self._lane(how.runner(copy), 0)
            self._select(lane.device)
            self._enqueuer(lane, copy, replace(how, iterations=1))()
            lane.stream.synchronize()
        self._select(copy.target)
        found = differing(target, number)
        self._select(self._own)
        return found

    def close(self) -> None:
        """Free the buffers."""
        self._finish()
        for number, pair in enumerate(self._buffers):
            self._select(number)
            for memory in pair:
                memory.free()
        self._buffers = []
        self._select(self._own)

    def _timed(self, copies: Sequence[Copy], how: CopyMethod) -> tuple[CopyTimes, float]:
        """Return the times, and the host's seconds to enqueue the first copy's iterations.

        Where the hold ended before everything was enqueued, it measures again behind a longer hold. Where none is long enough,
        the first try counts: behind a longer hold the host only waits longer for room.
        """
        tries = []
        for cycles in (
            (HOLD_CYCLES,)
            if how in self._waits
            else (HOLD_CYCLES, 4 * HOLD_CYCLES, LONGEST_HOLD_CYCLES)
        ):
            timed, seconds, held = self._held(copies, how, cycles)
            if held:
                return timed, seconds
            tries.append((timed, seconds))
        self._waits.add(how)
        self.late += 1
        return tries[0]

    def _held(
        self, copies: Sequence[Copy], how: CopyMethod, hold_cycles: int
    ) -> tuple[CopyTimes, float, bool]:
        used: dict[int, int] = {}
        lanes = []
        for copy in copies:
            device = how.runner(copy)
            lanes.append(self._lane(device, used.setdefault(device, 0)))
            used[device] += 1
        first, others = lanes[0], lanes[1:]
        for lane, copy in zip(lanes, copies, strict=True):
            self._select(lane.device)
            self._enqueuer(lane, copy, replace(how, size_bytes=WARM_BYTES, iterations=1))()
            lane.stream.synchronize()
        self._select(first.device)
        # Ready before the hold: making a list of calls takes longer than they do.
        enqueue, *enqueue_others = (
            self._enqueuer(lane, copy, how) for lane, copy in zip(lanes, copies, strict=True)
        )
        with torch.cuda.stream(first.stream):
            torch.cuda._sleep(hold_cycles)
        first.start.record(first.stream)
        for lane, enqueue_other in zip(others, enqueue_others, strict=True):
            self._select(lane.device)
            lane.stream.wait_event(first.start)
            lane.start.record(lane.stream)
            enqueue_other()
            lane.stop.record(lane.stream)
        self._select(first.device)
        seconds = enqueue()
        first.stop.record(first.stream)
        for lane in others:
            first.stream.wait_event(lane.stop)
        if others:
            first.all_done.record(first.stream)
        held = not first.start.query()
        for lane in lanes:
            lane.stream.synchronize()
        self._select(self._own)
        each_ms = [float(lane.start.elapsed_time(lane.stop)) for lane in lanes]
        all_ms = float(first.start.elapsed_time(first.all_done)) if others else each_ms[0]
        return CopyTimes(each_ms, all_ms), seconds, held

    def _enqueuer(self, lane: PairStream, copy: Copy, how: CopyMethod) -> Callable[[], float]:
        """Return a function that enqueues a copy `how.iterations` times on `lane` and returns the host's seconds."""
        what = f"of {self._names[copy.source]} to {self._names[copy.target]}"
        source, target = (
            self._buffers[copy.source][0].address,
            self._buffers[copy.target][1].address,
        )
        if copy.backwards:
            source, target = (memory.address for memory in reversed(self._buffers[copy.source]))
        target += copy.target_offset
        kernel = bool(self._kernels) and how.enabled and copy.source != copy.target
        make: Callable[[], None]
        if kernel and self._access[copy.source, copy.target]:
            launch = self._launch(lane, target, source, how.size_bytes)
            make = functools.partial(
                _one_by_one, driver.cuLaunchKernel, f"cuLaunchKernel {what}", launch, how.iterations
            )
        else:
            name = f"cudaMemcpyPeerAsync {what}"
            given = (target, copy.target, source, copy.source, how.size_bytes, lane.handle)
            if self._copy is None:
                make = functools.partial(
                    _one_by_one, runtime.cudaMemcpyPeerAsync, name, given, how.iterations
                )
            else:
                make = InOrder(
                    [CCall(name, self._copy, tuple(map(int, given)))] * how.iterations, _words
                )

        def timed() -> float:
            opened = time.perf_counter()
            make()
            return time.perf_counter() - opened

        return timed

    def _launch(
        self, lane: PairStream, target: int, source: int, size_bytes: int
    ) -> tuple[Any, ...]:
        """Return the arguments of cuLaunchKernel, for as many threads as the GPU holds at once."""
        found: Any = torch.cuda.get_device_properties(lane.device)
        blocks = found.multi_processor_count * (found.max_threads_per_multi_processor // THREADS)
        values = (
            (target, source, size_bytes // 16),
            (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong),
        )
        stream = driver.CUstream(lane.stream.cuda_stream)
        return (self._kernels[lane.device], blocks, 1, 1, THREADS, 1, 1, 0, stream, values, 0)

    @contextlib.contextmanager
    def _peers(self, copies: Sequence[Copy], wanted: bool) -> Iterator[None]:
        """Switch peer access of every pair on or off, both ways, and back at the end: torch or NCCL may have enabled it."""
        pairs = {(copy.source, copy.target) for copy in copies if copy.source != copy.target}
        changed = []
        try:
            for a, b in sorted(pairs | {(b, a) for a, b in pairs}):
                if self._access[a, b] and self._switch(a, b, wanted):
                    changed.append((a, b))
            yield
        finally:
            for a, b in changed:
                self._switch(a, b, not wanted)
            self._select(self._own)

    def _switch(self, a: int, b: int, on: bool) -> bool:
        """Let `a` address the memory of `b`, or no longer. Return whether that changed anything."""
        self._select(a)
        if on:
            call, answer = "cudaDeviceEnablePeerAccess", runtime.cudaDeviceEnablePeerAccess(b, 0)
            unchanged = runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
        else:
            call, answer = "cudaDeviceDisablePeerAccess", runtime.cudaDeviceDisablePeerAccess(b)
            unchanged = runtime.cudaError_t.cudaErrorPeerAccessNotEnabled
        if answer[0] == unchanged:
            runtime.cudaGetLastError()  # else the next check of an error finds it
            return False
        checked(f"{call} of {self._names[a]} to {self._names[b]}", answer)
        return True

    def _lane(self, device: int, number: int) -> PairStream:
        if (device, number) not in self._lanes:
            self._lanes[device, number] = PairStream(device)
        return self._lanes[device, number]

    def _select(self, number: int) -> None:
        """Make a GPU the current one, for torch and for the bindings: they have two copies of the CUDA runtime."""
        torch.cuda.set_device(number)
        checked(f"cudaSetDevice to {self._names[number]}", runtime.cudaSetDevice(number))

    def _finish(self) -> None:
        for number in range(len(self._names)):
            torch.cuda.synchronize(number)


# The copy kernel of `copy=sm`, compiled when it is needed.


KERNEL = """
extern "C" __global__ void copy(int4* target, const int4* source, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x)
        target[i] = source[i];
}
"""


def compiled(architecture: str) -> bytes:
    """The copy kernel for an architecture such as sm_90. Raises RuntimeError with the compiler's log."""
    program = checked(
        "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(KERNEL.encode(), b"copy.cu", 0, [], [])
    )
    answer = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    if int(answer[0]) != 0:
        log = b" " * checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
        checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip(" \n\0")
        checked(f"nvrtcCompileProgram for {architecture} ({said})", answer)
    binary: bytes = b" " * checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
    checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def loaded(name: str, architecture: str) -> Any:
    """The copy kernel in the current context."""
    module = checked(f"cuModuleLoadData on {name}", driver.cuModuleLoadData(compiled(architecture)))
    return checked(f"cuModuleGetFunction on {name}", driver.cuModuleGetFunction(module, b"copy"))
