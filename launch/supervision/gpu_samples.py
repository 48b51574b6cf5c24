"""Sample the GPUs of a running cell by NVML from the launching process: clocks, power, throttling, other processes.

The ranks take no part. Samples go to `<cell>/gpus.jsonl`; what they say goes to the record (analysis.validity.gpu_samples).
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.record import CellFolder, Kind, Lines
from conf.variables import TOKEN

PERIOD_SECONDS = 0.5
SETTLE_SECONDS = 3.0


class Sampler:
    """Samples GPUs in a thread while it is entered; does nothing without GPUs."""

    def __init__(self, folder: CellFolder, uuids: Sequence[str], token: str) -> None:
        self._uuids, self._token = list(uuids), token
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if uuids:
            import pynvml

            self._nvml: Any = pynvml
            try:
                pynvml.nvmlInit()
                self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            except pynvml.NVMLError:
                self._uuids = []  # a GPU that is lost fails in its rank, with the reason; the samples are missing
                return
            self._lines = Lines(folder.gpu_samples)

    def __enter__(self) -> "Sampler":
        """Take the first sample, before any rank of the cell exists, and start the thread.

        Wait up to SETTLE_SECONDS first: the driver's averages may still show the load of the cell before.
        """
        if self._uuids:
            deadline = time.monotonic() + SETTLE_SECONDS
            while (idle := [self._one(handle) for handle in self._handles]) and time.monotonic() < deadline:
                if all(gpu.get("busy_percent", 0) == 0 for gpu in idle):
                    break
                time.sleep(PERIOD_SECONDS / 2)
            self._lines.write(Kind.BEFORE, time.time(), gpus=idle)
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._stop.wait(PERIOD_SECONDS):
                self._lines.write(Kind.SAMPLE, time.time(), gpus=[self._one(handle) for handle in self._handles])
        except OSError:
            return  # the disk is full: later windows have no samples, and their checks say so

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
            "foreign_pids": lambda: self._foreign(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        }
        answers: dict[str, Any] = {}
        for name, ask in questions.items():
            try:
                answers[name] = ask()  # type: ignore[no-untyped-call]
            except (nvml.NVMLError, AttributeError, TypeError):
                continue
        return answers

    def _foreign(self, running: Sequence[Any]) -> list[int]:
        """Return the ids of processes on the GPU that do not carry our token.

        A driver outside a container may name processes that do not exist inside it. They are left out; memory that is in use
        before the start shows foreign load too.
        """
        mark = f"{TOKEN}={self._token}".encode()
        foreign = []
        for process in running:
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except PermissionError:
                foreign.append(process.pid)  # somebody else's
            except OSError:
                continue
            else:
                if environ and mark not in environ.split(b"\0"):  # empty: it is just ending
                    foreign.append(process.pid)
        return foreign
