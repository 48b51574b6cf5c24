"""The devices of this machine, as a plan sees them: GPUs by NVML, or slots for CPU workers. Without torch."""

import importlib.util
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.host_limits import usable_cores
from conf.options import Refused
from conf.subsets import BUS_ID, CPU_SLOTS, NUMBER, UUID


@dataclass(frozen=True)
class Device:
    """A GPU, by its NVML index, or a slot for a CPU worker."""

    id: int
    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """The devices of this machine, all of one kind."""

    kind: str  # cuda or cpu
    devices: tuple[Device, ...]
    all_gpus: tuple[int, ...]  # the ids that `gpus=all` means
    cores: int
    why: str = ""  # for CPU workers: why no GPU is used

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory of the smallest GPU; None if there is none or the driver does not say."""
        known = [device.memory_bytes for device in self.devices if device.memory_bytes is not None]
        return min(known, default=None)

    @property
    def threads(self) -> int:
        """Return the threads of a CPU worker: its share of the cores, the same in every cell."""
        return max(1, self.cores // len(self.all_gpus))

    def uuids(self, gpus: Sequence[int]) -> list[str]:
        """Return the UUIDs of GPUs, by their ids, in order; one that is not known is left out."""
        known = {device.id: device.uuid for device in self.devices}
        return [known[gpu] for gpu in gpus if known.get(gpu)]

    def device(self, text: str, typed: str) -> Device:
        """Return the device that a number, a UUID or a PCI bus id names. Raises Refused."""
        for device in self.devices:
            if text == str(device.id) or (
                device.uuid and device.uuid.lower().startswith(text.lower())
            ):
                return device
            if BUS_ID.fullmatch(text) and device.bus_id and _bus(device.bus_id) == _bus(text):
                return device
        assert any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID))
        ids = ", ".join(str(device.id) for device in self.devices)
        have = "has GPUs" if self.kind == "cuda" else "uses no GPU; the CPU worker slots are"
        raise Refused(f"gpus={typed}: {text} is not here; this machine {have} {ids}")


def look(asked: str, surrounding: Mapping[str, str]) -> Machine:
    """Return the devices that `device=auto|cpu|cuda` means here.

    Raises:
        Refused: `device=cuda`, and this machine has no usable GPU.
    """
    cores = usable_cores()
    gpus, reason = _gpus(surrounding) if asked != "cpu" else ((), "")
    if asked == "cuda" and not gpus:
        raise Refused(f"device=cuda: {reason}; accepted here are auto and cpu")
    if gpus:
        return Machine("cuda", gpus, tuple(device.id for device in gpus), cores)
    slots = tuple(Device(number, name="CPU worker") for number in range(CPU_SLOTS))
    return Machine("cpu", slots, tuple(range(min(cores, CPU_SLOTS))), cores, reason or "device=cpu")


def _gpus(surrounding: Mapping[str, str]) -> tuple[tuple[Device, ...], str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, and the reason if there are none."""
    if not _torch_has_cuda():
        return (), "the installed torch is built without CUDA"
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver answers ({error})"
    found, refused = [], ""
    for number in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            uuid, name = (
                nvml_text(pynvml.nvmlDeviceGetUUID(handle)),
                nvml_text(pynvml.nvmlDeviceGetName(handle)),
            )
            bus_id = nvml_text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
            found.append(Device(number, uuid, bus_id, name, _memory_bytes(handle)))
        except pynvml.NVMLError as error:  # lost, or not ours
            refused = f"the driver refuses GPU {number} ({error})"
    visible = surrounding.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        found = [
            d for d in found if any(str(d.id) == name or d.uuid.startswith(name) for name in names)
        ]
        return tuple(found), f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU"
    return tuple(found), refused or "this machine has no NVIDIA GPU"


def _memory_bytes(handle: Any) -> int | None:
    """Return the memory of a GPU; None for one that shares the host's memory."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None


def torch_version() -> str:
    """Return `torch.__version__`; '' where it cannot be told. Read from torch's files: importing it takes seconds."""
    found = re.search(r"^__version__ *= *['\"]([^'\"]+)['\"]", _torch_about_itself(), re.MULTILINE)
    return found[1] if found else ""


def _torch_has_cuda() -> bool:
    """Return whether torch was built for CUDA; True where it cannot be told."""
    return not re.search(r"^cuda\b[^=]*= None", _torch_about_itself(), re.MULTILINE)


def _torch_about_itself() -> str:
    """Return the text of torch/version.py; '' where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return (
            Path(spec.origin).with_name("version.py").read_text(encoding="utf-8", errors="replace")
        )
    except OSError:
        return ""


def nvml_text(value: str | bytes) -> str:
    """Return a text of NVML, which older versions of nvidia-ml-py return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _bus(text: str) -> tuple[int, ...]:
    """Return (domain, bus, device, function). NVML writes the domain with eight digits, lspci with four or none."""
    head, function = text.rsplit(".", 1)
    *domain, bus, device = head.split(":")
    return (int(domain[0], 16) if domain else 0, int(bus, 16), int(device, 16), int(function))


# Refuse cells where a limit of this process leaves no room for theirs: torch would wait for minutes, or die without a word.


MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """A limit of the kernel, which the processes of a cell inherit, and how little of it is too little."""

    kind: int  # RLIMIT_…
    fewest: int
    command: str  # that shows and sets it, in `unit`
    unit: int
    what: str


LIMITS = (
    Limit(resource.RLIMIT_NOFILE, 128, "ulimit -n", 1, "files that a process may have open"),
    Limit(
        resource.RLIMIT_AS,
        4096 * MIB,
        "ulimit -v",
        1024,
        "KiB of addresses that a process may have",
    ),  # torch alone: 3.4 GB
    Limit(
        resource.RLIMIT_FSIZE, 4 * MIB, "ulimit -f", 1024, "KiB that a file may have"
    ),  # the store of MLflow: 1 MB
)


def too_small() -> list[str]:
    """Return a sentence for each limit of this process that is too small for any cell: its value and what is accepted."""
    found = ((limit, resource.getrlimit(limit.kind)[0]) for limit in LIMITS)
    return [
        f"{limit.command} is {value // limit.unit} here ({limit.what}), too little for the processes of a cell; "
        f"accepted is {limit.fewest // limit.unit} or more, or unlimited"
        for limit, value in found
        if value != resource.RLIM_INFINITY and value < limit.fewest
    ]


def refuse_small_limits() -> None:
    """Refuse to start any cell under a limit that is too small for it.

    Raises:
        Refused: names the limit, its value and what is accepted.
    """
    for sentence in too_small():
        raise Refused(sentence)


# Who started this process: under torchrun, srun -n 8 or mpirun every rank would start the whole study.


# What of each program says which of several processes this is, how many there are, and what to write in its place.
_COUNTED = {
    # A batch script has no step, and one task of a step may launch.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "without srun, or with srun --ntasks=1"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "without mpirun"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "without mpiexec"),
}
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def refuse_several(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that one program started. Raises Refused.

    Launchers that people start one by one may share a study.
    """
    if all(name in environment for name in _TORCHRUN):
        _refuse("torchrun", _TORCHRUN, "without torchrun", environment)
    for program, (rank, size, instead) in _COUNTED.items():
        if _number(environment, rank) > 0 or _number(environment, size) > 1:
            _refuse(program, (rank, size), instead, environment)


def _refuse(
    program: str, names: tuple[str, ...], instead: str, environment: Mapping[str, str]
) -> None:
    said = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    raise Refused(
        f"{said}: launch.py was started by {program}, and starts the processes on the GPUs itself; write python launch.py gpus=… "
        f"{instead}"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
