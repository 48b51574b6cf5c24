"""This machine as a plan sees it: its devices, and the facts that a record keeps. Without torch."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from analysis.errors import UnreadableInput
from analysis.topology.source import load_topology
from conf.gpus import BUS_ID, NUMBER, UUID
from conf.options import Refused

CPU_SLOTS = 8
# Variables of the surroundings that can change a result. Nothing else of the environment is kept: it holds secrets.
RECORDED = ("NCCL_", "CUDA_VISIBLE", "CUDA_DEVICE_ORDER", "OMP_", "MKL_", "KMP_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_",
            "GLOO_", "SHARP_", "NVSHMEM_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "SLURM_JOB_ID")  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A GPU, by its NVML index, or a CPU worker slot."""

    id: int
    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """The devices of one kind; `everyone` is what `gpus=all` means."""

    kind: str  # cuda or cpu
    devices: tuple[Device, ...]
    everyone: tuple[int, ...]
    cores: int
    why: str = ""  # of CPU workers: why no GPU is used

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the smallest GPU; None where there is none, or the driver does not say."""
        known = [device.memory_bytes for device in self.devices if device.memory_bytes is not None]
        return min(known, default=None)

    def device(self, text: str, typed: str) -> Device:
        """The device that a number, UUID or PCI bus id names. Raises Refused."""
        for device in self.devices:
            if text == str(device.id) or (device.uuid and device.uuid.lower().startswith(text.lower())):
                return device
            if BUS_ID.fullmatch(text) and device.bus_id and _bus(device.bus_id) == _bus(text):
                return device
        assert any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID))
        ids = ", ".join(str(device.id) for device in self.devices)
        what = "GPUs" if self.kind == "cuda" else "no GPU; CPU worker slots are"
        raise Refused(f"gpus={typed}: {text} is not here; this machine has {what} {ids}")


def look(asked: str, surrounding: Mapping[str, str]) -> Machine:
    """The devices that `device=auto|cpu|cuda` means here.

    Raises:
        Refused: `device=cuda` without a usable GPU, with the reason.
    """
    cores = len(os.sched_getaffinity(0))
    gpus, reason = _gpus(surrounding) if asked != "cpu" else ((), "")
    if asked == "cuda" and not gpus:
        raise Refused(f"device=cuda: {reason}; accepted here are auto and cpu")
    if gpus:
        return Machine("cuda", gpus, tuple(device.id for device in gpus), cores)
    slots = tuple(Device(number, name="CPU worker") for number in range(CPU_SLOTS))
    return Machine("cpu", slots, tuple(range(min(cores, CPU_SLOTS))), cores, reason or "device=cpu")


def _gpus(surrounding: Mapping[str, str]) -> tuple[tuple[Device, ...], str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, and the reason where there are none."""
    if not _torch_has_cuda():
        return (), "the installed torch is built without CUDA"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver answers ({error})"
    found, refused = [], ""
    for number in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
            bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
            found.append(Device(number, uuid, bus_id, name, _memory_bytes(handle)))
        except pynvml.NVMLError as error:  # lost, or not ours
            refused = f"the driver refuses GPU {number} ({error})"
    visible = surrounding.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        found = [d for d in found if any(str(d.id) == name or d.uuid.startswith(name) for name in names)]
        return tuple(found), f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU"
    return tuple(found), refused or "this machine has no NVIDIA GPU"


def _memory_bytes(handle: Any) -> int | None:
    """Memory of a GPU; one that shares the host's has none of its own."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None


def _torch_has_cuda() -> bool:
    """What torch says of its build, read without importing it: the name of a wheel does not tell."""
    spec = importlib.util.find_spec("torch")
    text = _read(str(Path(spec.origin).parent / "version.py")) if spec and spec.origin else None
    return not re.search(r"^cuda\b[^=]*= None", text or "", re.MULTILINE)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bus(text: str) -> tuple[int, ...]:
    """domain, bus, device, function: NVML writes the domain with eight digits, lspci with four or none."""
    head, function = text.rsplit(".", 1)
    *domain, bus, device = head.split(":")
    return (int(domain[0], 16) if domain else 0, int(bus, 16), int(device, 16), int(function))


@functools.lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """What a record keeps of machine and software; each part that cannot be read is absent."""
    memory = psutil.virtual_memory().total
    known: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "logical": os.cpu_count(),
            "memory_bytes": memory,
        },
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "packages": {
            name: _version(name) for name in ("torch", "torchvision", "timm", "hydra-core", "mlflow-skinny", "numpy")
        },
        "git": _git(),
        "nccl_conf": _read("/etc/nccl.conf"),
    }
    known["gpu"] = _gpu_facts()
    known["topology"] = _output(["nvidia-smi", "topo", "-m"])
    known["links"] = _links() if known["gpu"] else None
    return {name: value for name, value in known.items() if value not in (None, {}, "")}


def nccl_configuration(surrounding: Mapping[str, str]) -> list[str]:
    """The texts of NCCL's configuration files here, the user's first, as NCCL reads them."""
    user = surrounding.get("NCCL_CONF_FILE", "~/.nccl.conf")
    return [text for path in (user, "/etc/nccl.conf") if (text := _read(str(Path(path).expanduser()))) is not None]


def _links() -> dict[str, str] | None:
    """{"0-1": "NV18"} for every pair of GPUs of this machine, as the driver has it."""
    try:
        links: dict[str, str] = load_topology(None).to_json()["links"]
    except UnreadableInput:
        return None
    return links


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The recorded part of an environment."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED)}


def _gpu_facts() -> dict[str, Any]:
    """Driver and GPUs; what the driver does not tell is absent."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}

    def asked(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = question(*arguments)
        except pynvml.NVMLError:
            return None
        return _text(answer) if isinstance(answer, bytes) else answer

    gpus = []
    for number in range(asked(pynvml.nvmlDeviceGetCount) or 0):
        handle = asked(pynvml.nvmlDeviceGetHandleByIndex, number)
        if handle is None:
            continue
        memory, pci = asked(pynvml.nvmlDeviceGetMemoryInfo, handle), asked(pynvml.nvmlDeviceGetPciInfo, handle)
        answers = {
            "uuid": asked(pynvml.nvmlDeviceGetUUID, handle),
            "name": asked(pynvml.nvmlDeviceGetName, handle),
            "bus_id": _text(pci.busId).lower() if pci else None,
            "memory_bytes": int(memory.total) if memory else None,
            "max_sm_mhz": asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "max_memory_mhz": asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "nvlinks": _nvlinks(pynvml, handle),
        }
        gpus.append({"id": number, **{name: answer for name, answer in answers.items() if answer is not None}})
    return {"driver": asked(pynvml.nvmlSystemGetDriverVersion), "gpus": gpus}


def _nvlinks(pynvml: Any, handle: Any) -> int:
    """Number of active NVLinks; 0 where the GPU has none."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return active


def _cpu_model() -> str:
    text = _read("/proc/cpuinfo") or ""
    return next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.machine(),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _git() -> dict[str, Any] | None:
    root = str(Path(__file__).parent.parent.parent)
    commit = _output(["git", "-C", root, "rev-parse", "HEAD"])
    if not commit:
        return None
    return {"commit": commit.strip(), "modified": bool(_output(["git", "-C", root, "status", "--porcelain", "-uno"]))}


def _output(command: list[str]) -> str | None:
    """What a command prints, or None where it is missing, fails or takes 20 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout
