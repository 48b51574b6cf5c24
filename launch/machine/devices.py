"""The devices of this machine: GPUs by NVML, or slots for CPU workers. Without torch."""

import importlib.util
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.record.shapes import Count
from conf.host import usable_cores
from conf.options import Refused
from conf.subsets import BUS_ID, CPU_SLOTS

MIB = 1 << 20


class ResourceLimit(NamedTuple):
    """A limit of the kernel, and the least that a cell needs."""

    kind: int
    least: int
    unit: int  # bytes, or 1
    words: str  # what it limits, in that unit


# Limits of the kernel that the processes of a cell inherit; torch would wait for minutes under one
# that is too small, or die without a word. torch alone has 3.4 GB of addresses, the store of MLflow
# 1 MB.
LIMITS = {
    "ulimit -n": ResourceLimit(
        resource.RLIMIT_NOFILE, 128, 1, "files that a process may have open"
    ),
    "ulimit -v": ResourceLimit(
        resource.RLIMIT_AS, 4096 * MIB, 1024, "KiB of addresses that a process may have"
    ),
    "ulimit -f": ResourceLimit(resource.RLIMIT_FSIZE, 4 * MIB, 1024, "KiB that a file may have"),
}


@dataclass(frozen=True)
class Device:
    """A GPU, by its NVML index, or a slot for a CPU worker."""

    id: int
    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    memory_bytes: Count | None = None


@dataclass(frozen=True)
class Machine:
    """The devices of this machine, all of one kind."""

    kind: str  # cuda or cpu
    devices: tuple[Device, ...]
    all_gpus: tuple[int, ...]  # the ids that `gpus=all` means
    cores: Count
    why: str = ""  # for CPU workers: why no GPU is used
    present: int = 0  # of a rehearsal: the devices that are here, which the planned ones share

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory of the smallest GPU; None if the driver does not say."""
        sizes = [device.memory_bytes for device in self.devices if device.memory_bytes is not None]
        return min(sizes, default=None)

    @property
    def shares_gpus(self) -> bool:
        """Return whether several planned GPUs are one that is here."""
        return self.kind == "cuda" and 0 < self.present < len(self.all_gpus)

    @property
    def threads(self) -> int:
        """Return the threads of a CPU worker: its share of the cores, the same in every cell."""
        return max(1, self.cores // len(self.all_gpus))

    def uuids(self, gpus: Sequence[int]) -> list[str]:
        """Return the UUIDs of GPUs, by their ids, in order; one that is not known is left out."""
        by_id = {device.id: device.uuid for device in self.devices}
        return list(filter(None, map(by_id.get, gpus)))

    def device(self, text: str, typed: str) -> Device:
        """Return the device that a number, a UUID or a PCI bus id names. Raises Refused."""
        for device in self.devices:
            if text == str(device.id):
                return device
            if device.uuid and device.uuid.lower().startswith(text.lower()):
                return device
            if BUS_ID.fullmatch(text) and device.bus_id and _bus(device.bus_id) == _bus(text):
                return device
        ids = ", ".join([str(device.id) for device in self.devices])
        if self.kind == "cpu":
            why = f"there is no CPU worker {text}; expected {ids} (no GPU is used)"
        else:
            why = f"this machine has no GPU {text}; it has {ids}"
        raise Refused(f"gpus={typed}: {why}")


def look(wanted: str, surrounding: Mapping[str, str]) -> Machine:
    """Return the devices that `device=auto|cpu|cuda` means here.

    Raises Refused: `device=cuda`, and this machine has no usable GPU.
    """
    cores = usable_cores()
    reason = "device=cpu"
    if wanted != "cpu":
        gpus, reason = _gpus(surrounding)
        if gpus:
            return Machine("cuda", gpus, tuple(device.id for device in gpus), cores)
    if wanted == "cuda":
        raise Refused(f"device=cuda: {reason}; possible here: auto and cpu")
    slots = tuple(Device(index, name="CPU worker") for index in range(CPU_SLOTS))
    return Machine("cpu", slots, tuple(range(min(cores, CPU_SLOTS))), cores, reason)


def _gpus(surrounding: Mapping[str, str]) -> tuple[tuple[Device, ...], str]:
    if re.search(r"^cuda\b[^=]*= None", _torch_version_file(), re.MULTILINE):
        return (), "the installed torch is built without CUDA"
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver answers ({error})"
    gpus = []
    reason = "this machine has no NVIDIA GPU"
    for index in range(count):
        try:
            gpus.append(read_gpu(index))
        except pynvml.NVMLError as error:  # lost, or not ours
            reason = f"the driver refuses GPU {index} ({error})"
    visible = surrounding.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpus), reason
    names = visible.replace(",", " ").split()
    shown = []
    for gpu in gpus:
        if str(gpu.id) in names or gpu.uuid.startswith(tuple(names)):
            shown.append(gpu)
    return tuple(shown), f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU"


def read_gpu(index: int) -> Device:
    """Return a GPU by its index. Raises pynvml.NVMLError."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # it shares the host's memory
        memory_bytes = None
    return Device(
        index,
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetPciInfo(handle).busId.lower(),
        pynvml.nvmlDeviceGetName(handle),
        memory_bytes,
    )


def _bus(text: str) -> tuple[int, ...]:
    """Return (domain, bus, device, function); lspci may leave the domain out."""
    head, function = text.rsplit(".", 1)
    numbers = [int(part, 16) for part in head.split(":")]
    if len(numbers) == 2:
        numbers.insert(0, 0)
    return (*numbers, int(function))


def torch_version() -> str:
    """Return `torch.__version__` from torch's files; '' where it cannot be told."""
    match = re.search(r"^__version__ *= *['\"]([^'\"]+)['\"]", _torch_version_file(), re.MULTILINE)
    if match is None:
        return ""
    return match[1]


def _torch_version_file() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).with_name("version.py")
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def too_small() -> list[str]:
    """Return a sentence for each limit that is too small for any cell."""
    sentences = []
    for command, limit in LIMITS.items():
        value, _ = resource.getrlimit(limit.kind)
        if value != resource.RLIM_INFINITY and value < limit.least:
            sentences.append(
                f"{command} is {value // limit.unit} here ({limit.words}), too little for the "
                f"processes of a run; expected {limit.least // limit.unit} or more, or "
                "unlimited"
            )
    return sentences
