"""Sample a machine around a running cell, from the launching process or beside a host's agent: GPUs by NVML, and the CPU.

The ranks take no part. Samples go to `<cell>/gpus.jsonl` and `<cell>/cpu.jsonl`; what they say goes to the record
(analysis.validity.gpu_samples).
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.host.cpu_load import CpuLoad
from benchmarks.record import CellFolder, Kind, Lines
from benchmarks.record.clock import now
from conf.variables import TOKEN

PERIOD_SECONDS = 0.5
CPU_EVERY = 2  # periods between two looks at the CPU: these count up, and each reads every process of the machine
SETTLE_SECONDS = 3.0
SETTLE_POLL_SECONDS = 0.05  # no rank starts meanwhile


class Sampler:
    """Samples the GPUs of a cell and the CPU in a thread while it is entered."""

    def __init__(self, folder: CellFolder, uuids: Sequence[str], token: str, first: int | None = None) -> None:
        """`token` marks the processes of the cell; CPU workers have no `uuids`.

        `first` is the id of the process whose tree is the cell's own; None: of this one.
        """
        self._gpus = SampledGpus.found(uuids, token) if uuids else None
        self._gpu_lines = Lines(folder.gpu_samples) if self._gpus else None
        self._load, self._cpu_lines = CpuLoad(first), Lines(folder.cpu_samples)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        """Take the first sample, before any rank of the cell works, and start the thread."""
        if self._gpus and self._gpu_lines:
            self._gpu_lines.write(Kind.BEFORE, now(), gpus=self._gpus.settled())
        self._look_at_cpu()
        # Where no further thread may be started, the checks say that there are no samples.
        with contextlib.suppress(RuntimeError):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._look_at_cpu()  # what the last phase used

    def _run(self) -> None:
        tick = 0
        try:
            while not self._stop.wait(PERIOD_SECONDS):
                if self._gpus and self._gpu_lines:
                    self._gpu_lines.write(Kind.SAMPLE, now(), gpus=self._gpus.sample())
                tick += 1
                if tick % CPU_EVERY == 0:
                    self._look_at_cpu()
        except OSError:
            return  # the disk is full: later windows have no samples, and their checks say so

    def _look_at_cpu(self) -> None:
        if load := self._load.read():
            self._cpu_lines.write(Kind.SAMPLE, now(), **load)


class SampledGpus:
    """The GPUs of a cell as NVML sees them."""

    def __init__(self, nvml: Any, handles: Sequence[Any], token: str) -> None:
        self._nvml, self._handles = nvml, list(handles)
        self._mark = f"{TOKEN}={token}".encode()

    @staticmethod
    def found(uuids: Sequence[str], token: str) -> "SampledGpus | None":
        """Return the GPUs with these UUIDs; None if one is lost: it fails in its rank, with the reason."""
        import pynvml

        try:
            pynvml.nvmlInit()
            return SampledGpus(pynvml, [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids], token)
        except pynvml.NVMLError:
            return None

    def settled(self) -> list[dict[str, Any]]:
        """Return a sample of each idle GPU.

        Wait up to SETTLE_SECONDS first: the driver's averages may still show the load of the cell before.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while (idle := self.sample()) and time.monotonic() < deadline:
            if all(gpu.get("busy_percent", 0) == 0 for gpu in idle):
                break
            time.sleep(SETTLE_POLL_SECONDS)
        return idle

    def sample(self) -> list[dict[str, Any]]:
        """Return a sample of each GPU, in the order of the ranks."""
        return [self._one(handle) for handle in self._handles]

    def _one(self, handle: Any) -> dict[str, Any]:
        """Return a sample of one GPU; what the driver does not say is absent."""
        nvml = self._nvml
        questions = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used),
            "busy_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        }
        answers: dict[str, Any] = {}
        for name, ask in questions.items():
            try:
                answers[name] = ask()  # type: ignore[no-untyped-call]
            except (nvml.NVMLError, AttributeError, TypeError):
                continue
        with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
            answers |= self._processes(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return answers

    def _processes(self, running: Sequence[Any]) -> dict[str, Any]:
        """Return the ids of processes on the GPU that do not carry our token, and what those that do hold.

        A driver outside a container may name processes that do not exist inside it. They are left out: memory that grows shows
        them too.
        """
        foreign: list[int] = []
        own: list[int | None] = []  # bytes
        for process in running:
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except PermissionError:
                foreign.append(process.pid)  # somebody else's
            except OSError:
                continue
            else:
                if self._mark in environ.split(b"\0"):
                    own.append(process.usedGpuMemory)
                elif environ:  # empty: it is just ending
                    foreign.append(process.pid)
        held = sum(one for one in own if one is not None)
        return {"foreign_pids": foreign} | ({"own_bytes": held} if own and None not in own else {})
