"""Sample a machine around a running cell, from the launching process or beside a host's agent: GPUs by NVML, and the CPU.

The ranks take no part. Samples go to `<cell>/gpus.jsonl` and `<cell>/cpu.jsonl`; what they say goes to the record
(analysis.validity.gpu_samples).
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.agent.protocol import ready
from benchmarks.agent.scratch import remove_left
from benchmarks.record import CellFolder, Kind, Lines
from benchmarks.record.lines import now
from conf.process_env import TOKEN

PERIOD_SECONDS = 0.5
CPU_EVERY = 2  # periods between two looks at the CPU: these count up, and each reads every process of the machine
SETTLE_SECONDS = 3.0
SETTLE_POLL_SECONDS = 0.05  # no rank starts meanwhile


class Sampler:
    """Samples the GPUs of a cell and the CPU in a thread while it is entered."""

    def __init__(
        self, folder: CellFolder, uuids: Sequence[str], token: str, first: int | None = None
    ) -> None:
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
            return SampledGpus(
                pynvml, [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids], token
            )
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
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "memory_bytes": lambda: int(
                nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used
            ),
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


# How busy the cores are that a cell may use, and how much of it is the cell's own: what is left is the load of others.


class CpuLoad:
    """Counts CPU seconds. The launching process, or a host's agent, and all that it started are own; the rest is others'.

    Interrupts are nobody's: those of the ranks' own messages are counted with others'. What a hypervisor took is others'.
    """

    def __init__(self, first: int | None = None) -> None:
        """`first` is the id of the process whose tree is own; None: of this one."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._first = psutil.Process(first)
        self._used: dict[
            psutil.Process, tuple[float, float]
        ] = {}  # by each process, and by its children that were waited for
        self._own_s = 0.0

    def read(self) -> dict[str, float]:
        """Return seconds since some time: `busy_s` of all on these `cores`, `own_s` of our processes, ended ones too.

        Empty where the kernel does not say.
        """
        try:
            times = psutil.cpu_times(percpu=True)
            self._own_s += self._since_the_last_time()
        except (psutil.Error, OSError, RuntimeError):
            return {}
        mine = [times[core] for core in self._cores if core < len(times)]
        busy = sum(one.user + one.nice + one.system + getattr(one, "steal", 0.0) for one in mine)
        return {"cores": len(mine), "busy_s": round(busy, 2), "own_s": round(self._own_s, 2)}

    def _since_the_last_time(self) -> float:
        """Return the seconds that our processes used since then.

        What one used that has ended is told a second time where its parent waited for it, and nowhere else where nobody did, as
        of torch's processes that compile: it was counted while they lived.
        """
        now = {
            one: used
            for one in [self._first, *self._first.children(recursive=True)]
            if (used := _seconds(one))
        }
        before, self._used = self._used, now
        old = {one: before.get(one, (0.0, 0.0)) for one in now}
        more = sum(sum(used) - sum(old[one]) for one, used in now.items())
        waited_for = sum(used[1] - old[one][1] for one, used in now.items())
        told_before = sum(sum(used) for one, used in before.items() if one not in now)
        return max(0.0, more - min(told_before, waited_for))


def _seconds(process: psutil.Process) -> tuple[float, float] | None:
    """Return what a process used, and those of its children that it waited for; None for one that is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system), float(times.children_user + times.children_system)


# Sample a host around a cell in a process of its own, which the host's agent starts and ends.


ROOT = Path(__file__).parent.parent.parent
READY_SECONDS = 15.0  # until the first sample: GPUs may take some to settle
END_SECONDS = 8.0  # for the last one
POLL_SECONDS = 1.0
END = b"end"  # said by an agent that lives
GONE_SECONDS = 2.0  # for an agent that was killed to be gone: its lock may be free after its end of our input is closed


class SamplingProcess:
    """Samples this host in another process. Without samples a cell is measured all the same."""

    def __init__(
        self, folder: CellFolder, token: str, uuids: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`token` marks the processes of the cell; CPU workers have no `uuids`; `environment` has the sweep's clock."""
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.agent.sampler",
            str(folder.path),
            token,
            *uuids,
        ]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, meanwhile: Callable[[], None]) -> None:
        """Start it, and wait for the first sample. What the calling process has started is the cell's own.

        `meanwhile` is called now and then: GPUs may take seconds to settle, and a silent agent is lost.
        """
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            assert self._process.stdout is not None
            until = time.monotonic() + READY_SECONDS
            while not ready([self._process.stdout], POLL_SECONDS) and time.monotonic() < until:
                meanwhile()

    def let_go(self) -> None:
        """Close its pipes in a fork of the calling process: while a fork holds them, the end of that process is not seen."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                pipe.close()  # type: ignore[union-attr]

    def end(self) -> None:
        """Have it take the last sample and leave."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(END)
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process = None


def main(folder: str, token: str, *uuids: str) -> int:
    """Sample until the input ends or the process that started this one is gone. Returns the exit status."""
    agent, ended = os.getppid(), False
    try:
        with Sampler(CellFolder(Path(folder)), uuids, token, agent):
            print("ready", flush=True)
            while not ended and os.getppid() == agent:
                ended = bool(ready([sys.stdin], POLL_SECONDS))
    except OSError:
        return (
            1  # the disk is full, or the folder is gone: the checks say that there are no samples
        )
    finally:
        if os.getppid() != agent or (ended and not os.read(0, len(END))):
            _when_gone(agent)
    return 0


def _when_gone(agent: int) -> None:
    """Remove what an agent left that was killed, once it is gone."""
    until = time.monotonic() + GONE_SECONDS
    while os.getppid() == agent and time.monotonic() < until:
        time.sleep(0.01)
    remove_left()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
