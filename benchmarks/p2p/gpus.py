"""Copies between the GPUs of one process, held back until all are enqueued.

It is the method of p2pBandwidthLatencyTest: a kernel spins on the stream of the first copy; behind
it lie an event, every copy and an event. This process drives all GPUs, as in the tool. Peer access
is as it was when a measurement ends. README.md.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver, nvrtc, runtime

from benchmarks.p2p.copies import Copy, CopyMethod, differing, write_opposite, write_pattern
from benchmarks.timing.c_calls import CCall, InOrder, address, made_by
from trainers.memory import GpuMemory, checked
from trainers.process import bus_id

HOLD_CYCLES = 10_000_000  # of the GPU's clock, as in the tool: 5 ms at 2 GHz
HOLDS = (HOLD_CYCLES, 4 * HOLD_CYCLES, 16 * HOLD_CYCLES)
# Of a copy before the timed ones: the first between two GPUs after others takes 0.1 ms longer.
WARM_BYTES = 16
THREADS = 1024  # of a block of the copy kernel
# The copy kernel of `copy=sm`, compiled when it is needed.
KERNEL = """
extern "C" __global__ void copy(int4* target, const int4* source, unsigned long long count) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (; i < count; i += (unsigned long long)gridDim.x * blockDim.x)
        target[i] = source[i];
}
"""
Memories = tuple[GpuMemory, GpuMemory]


class TimedCopies(NamedTuple):
    """Copies that started together, behind a hold of the first one's stream."""

    each_ms: list[float]
    all_ms: float  # until all were done
    enqueue_seconds: float  # the host's, of the first copy's iterations
    is_held: bool  # all were enqueued before the hold ended


class PairStream:
    """A stream of a GPU for copies, with its events."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(torch.device("cuda", device))
        self.start = torch.cuda.Event(enable_timing=True)
        self.stop = torch.cuda.Event(enable_timing=True)
        self.all_done = torch.cuda.Event(enable_timing=True)


class Gpus:
    """Copies between the GPUs of a subset, by their place in it; `ids` are numbers for people."""

    words = {"enabled": "peer access", "disabled": "copies staged by the driver"}  # noqa: RUF012

    def __init__(self, ids: Sequence[int], size_bytes: int, copy: str) -> None:
        """Take two buffers of `size_bytes` on each GPU. `copy` is engine or sm.

        Raises RuntimeError: a CUDA call failed; names the call and the GPU.
        """
        self._names = [f"GPU {gpu}" for gpu in ids]
        self._own = torch.cuda.current_device()
        # For these the driver waits for room while it enqueues, and no hold is long enough.
        self._waits: set[CopyMethod] = set()
        self.late = 0
        self.devices: list[dict[str, str]] = []
        self._buffers: list[Memories] = []
        self._streams: dict[tuple[int, int], PairStream] = {}
        self._kernels: list[Any] = []
        self._copy_address = copy_function()
        self.enqueued_by: str | None = "Python"
        if copy != "sm" and self._copy_address is not None:
            self.enqueued_by = made_by()
        self._access: dict[tuple[int, int], bool] = {}
        for a, b in itertools.permutations(range(len(ids)), 2):
            call = f"cudaDeviceCanAccessPeer of {self._names[a]} to {self._names[b]}"
            self._access[a, b] = bool(checked(call, runtime.cudaDeviceCanAccessPeer(a, b)))
        for index, name in enumerate(self._names):
            self._select(index)
            device = torch.device("cuda", index)
            memories = GpuMemory(size_bytes, device, name), GpuMemory(size_bytes, device, name)
            self._buffers.append(memories)
            properties: Any = torch.cuda.get_device_properties(index)
            bus = str(bus_id(device)).removesuffix(".0")
            self.devices.append({"name": properties.name, "bus_id": bus})
            if copy == "sm":
                binary = compiled(f"sm_{properties.major}{properties.minor}")
                module = checked(f"cuModuleLoadData on {name}", driver.cuModuleLoadData(binary))
                kernel = driver.cuModuleGetFunction(module, b"copy")
                self._kernels.append(checked(f"cuModuleGetFunction on {name}", kernel))

    def can_access(self, a: int, b: int) -> bool:
        """Return whether one GPU can address another's memory, as CUDA says."""
        return self._access[a, b]

    def time(self, copies: Sequence[Copy], how: CopyMethod) -> tuple[list[float], float]:
        """Return (ms of each copy, until all are done) of copies that start together."""
        with self._peers(copies, how.enabled):
            timed = self._timed(copies, how)
        return timed.each_ms, timed.all_ms

    def latency(self, copy: Copy, how: CopyMethod) -> tuple[float | None, float]:
        """Time small copies: between events, and the host's time to enqueue them, ÷ iterations."""
        with self._peers([copy], how.enabled):
            timed = self._timed([copy], how)
        return timed.all_ms * 1e3 / how.iterations, timed.enqueue_seconds * 1e6 / how.iterations

    def wrong_elements(self, copy: Copy, how: CopyMethod) -> int:
        """Fill, copy once, and count on the target the elements that did not arrive."""
        seed = 1 + copy.source * len(self._names) + copy.target
        size = how.size_bytes // 4 * 4
        source = self._buffers[copy.source][0].bytes[:size].view(torch.int32)
        target = self._buffers[copy.target][1].bytes[:size].view(torch.int32)
        self._select(copy.source)
        write_pattern(source, seed)
        self._select(copy.target)
        write_opposite(target, seed)
        self._finish()
        with self._peers([copy], how.enabled):
            lane = self._stream(how.runner(copy), 0)
            self._select(lane.device)
            self._enqueuer(lane, copy, replace(how, iterations=1))()
            lane.stream.synchronize()
        self._select(copy.target)
        wrong = differing(target, seed)
        self._select(self._own)
        return wrong

    def close(self) -> None:
        """Free the buffers."""
        self._finish()
        for index, memories in enumerate(self._buffers):
            self._select(index)
            for memory in memories:
                memory.free()
        self._buffers = []
        self._select(self._own)

    def _timed(self, copies: Sequence[Copy], how: CopyMethod) -> TimedCopies:
        """Time copies that start together.

        Where the hold ended before everything was enqueued, it measures again behind a longer hold.
        Where none is long enough, the first try counts: behind a longer hold the host only waits
        longer for room.
        """
        tries = []
        for cycles in HOLDS[:1] if how in self._waits else HOLDS:
            timed = self._behind_a_hold(copies, how, cycles)
            if timed.is_held:
                return timed
            tries.append(timed)
        self._waits.add(how)
        self.late += 1
        return tries[0]

    def _behind_a_hold(
        self, copies: Sequence[Copy], how: CopyMethod, hold_cycles: int
    ) -> TimedCopies:
        used: dict[int, int] = {}  # streams of each GPU
        lanes = []
        for copy in copies:
            device = how.runner(copy)
            lanes.append(self._stream(device, used.setdefault(device, 0)))
            used[device] += 1
        first, rest = lanes[0], lanes[1:]
        warm = replace(how, size_bytes=WARM_BYTES, iterations=1)
        for lane, copy in zip(lanes, copies, strict=True):
            self._select(lane.device)
            self._enqueuer(lane, copy, warm)()
            lane.stream.synchronize()
        self._select(first.device)
        # Ready before the hold: making a list of calls takes longer than they do.
        enqueue = [
            self._enqueuer(lane, copy, how) for lane, copy in zip(lanes, copies, strict=True)
        ]
        with torch.cuda.stream(first.stream):
            torch.cuda._sleep(hold_cycles)
        first.start.record(first.stream)
        for lane, enqueue_copy in zip(rest, enqueue[1:], strict=True):
            self._select(lane.device)
            lane.stream.wait_event(first.start)
            lane.start.record(lane.stream)
            enqueue_copy()
            lane.stop.record(lane.stream)
        self._select(first.device)
        seconds = enqueue[0]()
        first.stop.record(first.stream)
        for lane in rest:
            first.stream.wait_event(lane.stop)
        if rest:
            first.all_done.record(first.stream)
        is_held = not first.start.query()
        for lane in lanes:
            lane.stream.synchronize()
        self._select(self._own)
        each_ms = [float(lane.start.elapsed_time(lane.stop)) for lane in lanes]
        all_ms = each_ms[0]
        if rest:
            all_ms = float(first.start.elapsed_time(first.all_done))
        return TimedCopies(each_ms, all_ms, seconds, is_held)

    def _enqueuer(self, lane: PairStream, copy: Copy, how: CopyMethod) -> Callable[[], float]:
        """Return a function that enqueues a copy's iterations and returns the host's seconds."""
        pair = f"of {self._names[copy.source]} to {self._names[copy.target]}"
        source = self._buffers[copy.source][0].address
        target = self._buffers[copy.target][1].address
        if copy.backwards:
            source, target = target, source
        target += copy.target_offset
        name = f"cudaMemcpyPeerAsync {pair}"
        handle = lane.stream.cuda_stream
        make: Callable[[], None]
        arguments: tuple[Any, ...]
        between = copy.source != copy.target and self._access[copy.source, copy.target]
        if self._kernels and how.enabled and between:
            properties: Any = torch.cuda.get_device_properties(lane.device)
            # As many threads as the GPU holds at once.
            per_unit = properties.max_threads_per_multi_processor // THREADS
            blocks = properties.multi_processor_count * per_unit
            values = (target, source, how.size_bytes // 16)
            types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
            launch = (self._kernels[lane.device], blocks, 1, 1, THREADS, 1, 1, 0)
            arguments = (*launch, driver.CUstream(handle), (values, types), 0)
            name, function = f"cuLaunchKernel {pair}", driver.cuLaunchKernel
            make = functools.partial(_from_python, function, name, arguments, how.iterations)
        elif self._copy_address is None:
            stream = runtime.cudaStream_t(handle)
            arguments = (target, copy.target, source, copy.source, how.size_bytes, stream)
            function = runtime.cudaMemcpyPeerAsync
            make = functools.partial(_from_python, function, name, arguments, how.iterations)
        else:
            given = (target, copy.target, source, copy.source, how.size_bytes, handle)
            call = CCall(name, self._copy_address, given)
            make = InOrder([call] * how.iterations, _message)

        def timed() -> float:
            opened = time.perf_counter()
            make()
            return time.perf_counter() - opened

        return timed

    @contextlib.contextmanager
    def _peers(self, copies: Sequence[Copy], wanted: bool) -> Iterator[None]:
        """Switch peer access of every pair on or off, both ways, and back at the end.

        Torch or NCCL may have enabled it.
        """
        pairs = set()
        for copy in copies:
            if copy.source != copy.target:
                pairs |= {(copy.source, copy.target), (copy.target, copy.source)}
        changed = []
        try:
            for a, b in sorted(pairs):
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

    def _stream(self, device: int, index: int) -> PairStream:
        if (device, index) not in self._streams:
            self._streams[device, index] = PairStream(device)
        return self._streams[device, index]

    def _select(self, index: int) -> None:
        """Make a GPU the current one, for torch and for the bindings, which have two runtimes."""
        torch.cuda.set_device(index)
        checked(f"cudaSetDevice to {self._names[index]}", runtime.cudaSetDevice(index))

    def _finish(self) -> None:
        for index in range(len(self._names)):
            torch.cuda.synchronize(index)


def copy_function() -> int | None:
    """Return cudaMemcpyPeerAsync's address in torch's CUDA runtime; None where that is built in."""
    release = str(torch.version.cuda).split(".")[0]
    try:
        library = ctypes.CDLL(f"libcudart.so.{release}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    return address(library, "cudaMemcpyPeerAsync")


def compiled(architecture: str) -> bytes:
    """Return the copy kernel for an architecture such as sm_90.

    Raises RuntimeError: with the compiler's log.
    """
    program = checked(
        "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(KERNEL.encode(), b"copy.cu", 0, [], [])
    )
    answer = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    if int(answer[0]) != 0:
        log = b" " * checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
        checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").strip(" \n\0")
        checked(f"nvrtcCompileProgram for {architecture} ({text})", answer)
    binary: bytes = b" " * checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
    checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def _from_python(
    call: Callable[..., tuple[Any, ...]], name: str, arguments: tuple[Any, ...], iterations: int
) -> None:
    for _ in range(iterations):
        answer = call(*arguments)
        if answer[0]:
            checked(name, answer)


def _message(status: int) -> str:
    try:
        return bytes(runtime.cudaGetErrorString(runtime.cudaError_t(status))[1]).decode()
    except ValueError:  # of a newer CUDA than the bindings know
        return f"CUDA error {status}"
