"""Read the topology of this machine from NVML (GPUs) and sysfs (NICs) as a `Topology`.

Known traps:
- nvidia-ml-py defines NVML_P2P_CAPS_INDEX_READ as the tuple (0,), so indices are numbers here.
- On NVSwitch machines the far end of an NVLink is a switch, which NVML cannot name in a virtual machine. There the
  class of a pair is the number of active links.
- Links may be off. Names are bytes in old releases.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from analysis.errors import UnreadableInput
from analysis.topology.link_classes import UNKNOWN, nvlink_gb_per_s, pcie_gb_per_s
from analysis.topology.model import Device, Gpu, Pair, Topology
from analysis.topology.nccl_xml import cpu_list

_ANCESTOR = {
    0: "PIX",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}  # 0: two GPUs on one board
_REMOTE_GPU, _REMOTE_CPU = (
    0x00,
    0x01,
)  # NVML_NVLINK_DEVICE_TYPE_*; the rest is a switch, or cannot be told
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0
_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # PCIe generation -> GT/s


class NoDriver(UnreadableInput):
    """This machine has no GPU that NVML can see."""


@dataclass
class _Ends:
    """Where the active NVLinks of one GPU end."""

    gpus: dict[str, int] = field(default_factory=dict)  # bus id -> links
    switches: int = 0


def read_live_topology(nvml: Any = None, sysfs: Path = Path("/sys")) -> Topology:
    """Ask NVML and sysfs. `nvml` is the pynvml module, or one that answers like it. Raises NoDriver without GPUs."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            raise NoDriver(
                "nvidia-ml-py is not installed, so the topology of this machine cannot be read"
            ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(f"NVML finds no NVIDIA driver on this machine ({error})") from None
    try:
        return _read(nvml, sysfs)
    except nvml.NVMLError as error:
        raise UnreadableInput(
            f"NVML stopped answering while the topology was read ({error})"
        ) from None
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, sysfs: Path) -> Topology:
    handles = {
        index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
    }
    if not handles:
        raise NoDriver("NVML sees no GPU on this machine")
    gpus = {index: _gpu(nvml, index, handle, sysfs) for index, handle in handles.items()}
    ends = {index: _nvlink_ends(nvml, handle) for index, handle in handles.items()}
    links: dict[Pair, str] = {}
    for a, b in combinations(handles, 2):
        links[frozenset((a, b))] = _gpu_link(
            nvml, (handles[a], handles[b]), (gpus[a], gpus[b]), (ends[a], ends[b])
        )
    nics = {
        path.name: path / "device"
        for path in sorted((sysfs / "class/infiniband").glob("*"), key=_natural)
    }
    places: dict[Device, Path] = {
        index: _pci_device(sysfs, gpu.bus_id or "") for index, gpu in gpus.items()
    }
    places |= dict(nics.items())
    for first, second in combinations(places, 2):
        if isinstance(second, str):  # NICs come last
            links[frozenset((first, second))] = pci_class(places[first], places[second])
    nvswitch = any(end.switches for end in ends.values())
    return Topology(tuple(gpus.values()), tuple(nics), links, nvswitch, "NVML")


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _answer(nvml: Any, call: str, *arguments: object) -> Any:
    """Return what `nvmlDevice<call>` says, or None if this GPU or driver does not have it."""
    try:
        value = getattr(nvml, f"nvmlDevice{call}")(*arguments)
    except (nvml.NVMLError, AttributeError):  # AttributeError: nvidia-ml-py without this call
        return None
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: Any, index: int, handle: Any, sysfs: Path) -> Gpu:
    name = _answer(nvml, "GetName", handle)
    bus_id = _normal_bus_id(_answer(nvml, "GetPciInfo", handle))
    words = ((os.cpu_count() or 1) + 63) // 64
    cpus = _mask(_answer(nvml, "GetCpuAffinity", handle, words))
    nodes = cpu_list(_mask(_answer(nvml, "GetMemoryAffinity", handle, 1, 0)))  # scope 0: NUMA node
    generation = _answer(nvml, "GetMaxPcieLinkGeneration", handle)
    width = _answer(nvml, "GetMaxPcieLinkWidth", handle)
    return Gpu(
        index=index,
        cpu_affinity=cpu_list(cpus),
        numa_affinity=nodes if nodes is not None else _numa_node(_pci_device(sysfs, bus_id or "")),
        name=name,
        uuid=_answer(nvml, "GetUUID", handle),
        bus_id=bus_id,
        nvlink_gb_per_s=nvlink_gb_per_s(name),
        pcie_gb_per_s=pcie_gb_per_s(_GIGATRANSFERS.get(generation, 0.0), width or 0),
    )


def _mask(words: Iterable[int] | None) -> int:
    return sum(int(word) << (64 * at) for at, word in enumerate(words or ()))


def _normal_bus_id(info: Any) -> str | None:
    """Return the bus id of an nvmlPciInfo_t as sysfs and NCCL write it, `0000:1b:00.0`.

    NVML itself writes eight digits of domain.
    """
    text = getattr(info, "busId", None)
    text = text.decode() if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", str(text).lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _nvlink_ends(nvml: Any, handle: Any) -> _Ends:
    ends = _Ends()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _answer(nvml, "GetNvLinkState", handle, link):
            continue  # off, or this GPU has fewer links
        kind = _answer(nvml, "GetNvLinkRemoteDeviceType", handle, link)
        bus_id = _normal_bus_id(_answer(nvml, "GetNvLinkRemotePciInfo", handle, link))
        if kind == _REMOTE_GPU and bus_id is not None:
            ends.gpus[bus_id] = ends.gpus.get(bus_id, 0) + 1
        elif kind != _REMOTE_CPU:
            ends.switches += (
                1  # NCCL, too, takes an active link to something without a name for a switch
            )
    return ends


def _gpu_link(
    nvml: Any, handles: tuple[Any, Any], gpus: tuple[Gpu, Gpu], ends: tuple[_Ends, _Ends]
) -> str:
    direct = min(
        ends[0].gpus.get(gpus[1].bus_id or "", 0), ends[1].gpus.get(gpus[0].bus_id or "", 0)
    )
    if direct:
        return f"NV{direct}"
    # Switches may be partitioned between tenants: then NVML answers "not supported" for the pair.
    joined = _answer(nvml, "GetP2PStatus", *handles, _P2P_NVLINK) in (None, _P2P_OK)
    through_switch = min(ends[0].switches, ends[1].switches)
    if through_switch and joined:
        return f"NV{through_switch}"
    return _ANCESTOR.get(_answer(nvml, "GetTopologyCommonAncestor", *handles), UNKNOWN)


def _pci_device(sysfs: Path, bus_id: str) -> Path:
    return sysfs / "bus/pci/devices" / bus_id


def _numa_node(device: Path) -> str | None:
    try:
        node = (device / "numa_node").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return node if node.isdigit() else None  # -1: the kernel does not know


def pci_class(a: Path, b: Path) -> str:
    """Return the class of the path between two PCI devices, given their sysfs entries.

    A sysfs path names every bridge: root/root port/switch port up/switch port down/device. Below one switch two devices
    part at the ports down, so at most one bridge and the device itself follow the shared part.
    """
    if not (a.exists() and b.exists()):
        return UNKNOWN
    chain_a, chain_b = _pci_chain(a), _pci_chain(b)
    if not chain_a or not chain_b:
        return UNKNOWN  # a NIC without hardware
    shared = 0
    while shared < min(len(chain_a), len(chain_b)) and chain_a[shared] == chain_b[shared]:
        shared += 1
    if shared >= 2:
        return "PIX" if max(len(chain_a), len(chain_b)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    node_a, node_b = _numa_node(a), _numa_node(b)
    if node_a is None or node_b is None:
        return UNKNOWN
    return "NODE" if node_a == node_b else "SYS"


def _pci_chain(device: Path) -> list[str]:
    """Return root complex, bridges and device: [`pci0000:16`, `0000:16:01.0`, …]."""
    parts = device.resolve().parts
    return [
        part
        for part in parts
        if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-7]", part)
    ]
