"""Sample a machine around a running cell, in the launcher or beside a host's agent: GPUs and CPU.

The ranks take no part. Samples go to `<cell>/gpus.jsonl` and `<cell>/cpu.jsonl`; what they say goes
to the record (analysis.validity.gpu_samples).
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent.protocol import wait_readable
from benchmarks.agent.scratch import remove_left
from benchmarks.record import CellFolder, Kind, Lines
from benchmarks.record.lines import now
from conf.host import TOKEN

PERIOD_SECONDS = 0.5
CPU_EVERY = 2  # periods between two looks at the CPU: each reads every process of the machine
SETTLE_SECONDS = 3.0
SETTLE_POLL_SECONDS = 0.05  # no rank starts meanwhile
ENDING_BYTES = 1 << 30  # less memory of a process that cannot be looked at is not waited for
ROOT = Path(__file__).parent.parent.parent
READY_SECONDS = 15.0  # until the first sample: GPUs may take some to settle
END_SECONDS = 8.0  # for the last one
POLL_SECONDS = 1.0
END = b"end"  # from an agent that lives
GONE_SECONDS = 10.0  # for a killed agent and its ranks, which hold its lock, to be gone


class Sampler:
    """Samples the GPUs of a cell and the CPU in a thread while it is entered."""

    def __init__(
        self, folder: CellFolder, uuids: Sequence[str], token: str, root_pid: int | None = None
    ) -> None:
        """`token` marks the processes of the cell; CPU workers have no `uuids`.

        `root_pid` is the process whose tree is the cell's own; None: this one.
        """
        self._gpus = SampledGpus.of(uuids, token) if uuids else None
        self._gpu_lines = Lines(folder.gpu_samples) if self._gpus else None
        self._load, self._cpu_lines = CpuLoad(root_pid), Lines(folder.cpu_samples)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        """Take the first sample, before any rank of the cell works, and start the thread."""
        if self._gpus and self._gpu_lines:
            self._gpu_lines.write(Kind.BEFORE, now(), gpus=self._gpus.settled())
        self._sample_cpu()
        # Where no further thread may be started, the checks say that there are no samples.
        with contextlib.suppress(RuntimeError):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._sample_cpu()  # what the last phase used

    def _run(self) -> None:
        tick = 0
        # A full disk: later windows have no samples, and their checks say so.
        with contextlib.suppress(OSError):
            while not self._stop.wait(PERIOD_SECONDS):
                if self._gpus and self._gpu_lines:
                    self._gpu_lines.write(Kind.SAMPLE, now(), gpus=self._gpus.sample())
                tick += 1
                if tick % CPU_EVERY == 0:
                    self._sample_cpu()

    def _sample_cpu(self) -> None:
        load = self._load.read()
        if load:
            self._cpu_lines.write(Kind.SAMPLE, now(), **load)


class SampledGpus:
    """The GPUs of a cell as NVML sees them."""

    def __init__(self, nvml: Any, handles: Sequence[Any], token: str) -> None:
        self._nvml, self._handles = nvml, list(handles)
        self._variable = f"{TOKEN}={token}".encode()

    @staticmethod
    def of(uuids: Sequence[str], token: str) -> "SampledGpus | None":
        """Return the GPUs with these UUIDs; None if one is lost: it fails in its rank."""
        import pynvml

        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except pynvml.NVMLError:
            return None
        return SampledGpus(pynvml, handles, token)

    def settled(self) -> list[dict[str, Any]]:
        """Return a sample of each idle GPU.

        Wait up to SETTLE_SECONDS first: the driver's averages may still show the cell before, and
        a process of it may be ending (workers of a script's loader took half a second).
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        idle = self.sample()
        while any(map(_is_settling, idle)) and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_SECONDS)
            idle = self.sample()
        return idle

    def sample(self) -> list[dict[str, Any]]:
        """Return a sample of each GPU, in the order of the ranks; what the driver does not say is
        absent."""
        nvml = self._nvml
        temperature, memory = nvml.nvmlDeviceGetTemperature, nvml.nvmlDeviceGetMemoryInfo
        queries: dict[str, Callable[[Any], Any]] = {
            "sm_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "energy_j": lambda gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            "temperature_c": lambda gpu: temperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "reasons": lambda gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
            "memory_bytes": lambda gpu: int(memory(gpu, version=nvml.nvmlMemory_v2).used),
            "busy_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        }
        unsupported = nvml.NVMLError, AttributeError, TypeError
        samples = []
        for handle in self._handles:
            values: dict[str, Any] = {}
            for name, query in queries.items():
                with contextlib.suppress(*unsupported):
                    values[name] = query(handle)
            with contextlib.suppress(*unsupported):
                values |= self._processes(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            samples.append(values)
        return samples

    def _processes(self, running: Sequence[Any]) -> dict[str, Any]:
        """Return the processes on the GPU without our token, and the memory of those with it.

        A driver outside a container may name processes that do not exist inside it. They are
        counted in `processes` alone: their memory shows them too.
        """
        foreign_pids: list[int] = []
        own_bytes: list[int | None] = []
        for process in running:
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except PermissionError:
                foreign_pids.append(process.pid)  # somebody else's
            except OSError:
                continue
            else:
                if self._variable in environ.split(b"\0"):
                    own_bytes.append(process.usedGpuMemory)
                elif environ:  # empty: it is just ending
                    foreign_pids.append(process.pid)
        facts: dict[str, Any] = {"foreign_pids": foreign_pids, "processes": len(running)}
        if own_bytes and None not in own_bytes:
            facts["own_bytes"] = sum(size for size in own_bytes if size is not None)
        return facts


def _is_settling(gpu: Mapping[str, Any]) -> bool:
    if gpu.get("busy_percent"):
        return True
    ending: int = gpu.get("processes", 0) - len(gpu.get("foreign_pids", ()))
    memory_bytes: int = gpu.get("memory_bytes", 0)
    return ending > 0 and memory_bytes > ENDING_BYTES


class CpuLoad:
    """Counts CPU seconds of the cores that a cell may use, and of its own processes.

    The launcher, or a host's agent, and all that it started are own; the rest is others'.
    Interrupts are nobody's: those of the ranks' own messages are counted with others'. What a
    hypervisor took is others'.
    """

    def __init__(self, root_pid: int | None = None) -> None:
        """`root_pid` is the process whose tree is own; None: this one."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._root = psutil.Process(root_pid)
        # By each process, and by its children that were waited for.
        self._used_s: dict[psutil.Process, tuple[float, float]] = {}
        self._own_s = 0.0

    def read(self) -> dict[str, float]:
        """Return CPU seconds so far: `busy_s` of all on these `cores`, `own_s` of our processes.

        Ended ones count too. Empty where the kernel does not say. What an ended one used is counted
        a second time where its parent waited for it, and nowhere else where nobody did, as of
        torch's processes that compile: it was counted while they lived.
        """
        used_s = {}
        try:
            times = psutil.cpu_times(percpu=True)
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it is gone
                    own = process.cpu_times()
                    children_s = float(own.children_user + own.children_system)
                    used_s[process] = float(own.user + own.system), children_s
        except (psutil.Error, OSError, RuntimeError):
            return {}
        before, self._used_s = self._used_s, used_s
        more_s = waited_for_s = 0.0
        for process, (own_s, children_s) in used_s.items():
            own_before_s, children_before_s = before.get(process, (0.0, 0.0))
            more_s += own_s + children_s - (own_before_s + children_before_s)
            waited_for_s += children_s - children_before_s
        ended_s = sum(sum(used) for process, used in before.items() if process not in used_s)
        self._own_s += max(0.0, more_s - min(ended_s, waited_for_s))
        cores = [times[core] for core in self._cores if core < len(times)]
        busy_s = 0.0
        for core in cores:
            busy_s += core.user + core.nice + core.system + getattr(core, "steal", 0.0)
        return {"cores": len(cores), "busy_s": round(busy_s, 2), "own_s": round(self._own_s, 2)}


class SamplingProcess:
    """Samples this host in a process of its own, which the agent starts and ends.

    Without samples a cell is measured all the same.
    """

    def __init__(
        self, folder: CellFolder, token: str, uuids: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`token` marks the cell's processes; `environment` has the sweep's clock."""
        module = "benchmarks.agent.sampler"
        self._command = [sys.executable, "-m", module, str(folder.path), token, *uuids]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, meanwhile: Callable[[], None]) -> None:
        """Start it, and wait for the first sample. What this process has started is the cell's own.

        `meanwhile` is called now and then: GPUs may take seconds to settle, and a silent agent is
        lost.
        """
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            until = time.monotonic() + READY_SECONDS
            output = self._process.stdout
            while not wait_readable([output], POLL_SECONDS) and time.monotonic() < until:
                meanwhile()

    def let_go(self) -> None:
        """Close its pipes in a fork of this process, which would hide the end of this one."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()

    def end(self) -> None:
        """Have it take the last sample and leave."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(END)
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main(folder: str, token: str, *uuids: str) -> int:
    """Sample until the input ends or the agent that started this is gone. Returns the status."""
    agent, ended = os.getppid(), False
    try:
        with Sampler(CellFolder(Path(folder)), uuids, token, agent):
            print("ready", flush=True)
            while not ended and os.getppid() == agent:
                ended = bool(wait_readable([sys.stdin], POLL_SECONDS))
    except OSError:
        # The disk is full, or the folder is gone: the checks say that there are no samples.
        return 1
    finally:
        if os.getppid() != agent or (ended and not os.read(0, len(END))):
            # The agent was killed: remove what it left, once its processes are gone.
            until = time.monotonic() + GONE_SECONDS
            while Path(folder).exists() and time.monotonic() < until:
                remove_left()
                time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
