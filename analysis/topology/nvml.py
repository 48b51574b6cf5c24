"""Read the topology of this machine: NVML tells the GPUs, sysfs the NICs.

Known traps: nvidia-ml-py defines NVML_P2P_CAPS_INDEX_READ as the tuple (0,), so indices are numbers
here; on NVSwitch machines the far end of an NVLink is a switch, which NVML cannot name in a virtual
machine; links may be off; names are bytes in old releases.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from analysis.errors import UnreadableInput
from analysis.topology.model import UNKNOWN, Gpu, Pair, Topology, nvlink_gb_per_s, pcie_gb_per_s

_ANCESTOR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # 0: on one board
_REMOTE_GPU, _REMOTE_CPU = 0x00, 0x01  # NVML_NVLINK_DEVICE_TYPE_*; else a switch, or unknown
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0
_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # PCIe generation -> GT/s
_PCI_PART = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-7]")


class NoDriver(UnreadableInput):
    """This machine has no GPU that NVML can see."""


@dataclass
class _NvlinkEnds:
    """Where the active NVLinks of one GPU end."""

    gpus: dict[str, int] = field(default_factory=dict)  # bus id -> links
    switches: int = 0


def read_live_topology(nvml: Any = None, sysfs: Path = Path("/sys")) -> Topology:
    """Return the topology of this machine, by NVML and sysfs.

    `nvml` is the pynvml module, or one that answers like it.

    Raises:
        NoDriver: there is no driver, or no GPU.
        UnreadableInput: NVML stopped answering.
    """
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
        return _query_nvml(nvml, sysfs)
    except nvml.NVMLError as error:
        raise UnreadableInput(
            f"NVML stopped answering while the topology was read ({error})"
        ) from None
    finally:
        nvml.nvmlShutdown()


def _query_nvml(nvml: Any, sysfs: Path) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        raise NoDriver("NVML sees no GPU on this machine")
    gpus = [_query_gpu(nvml, index, handle, sysfs) for index, handle in enumerate(handles)]
    ends = [_query_nvlink_ends(nvml, handle) for handle in handles]
    links: dict[Pair, str] = {}
    for a, b in combinations(range(len(gpus)), 2):
        direct = min(
            ends[a].gpus.get(gpus[b].bus_id or "", 0), ends[b].gpus.get(gpus[a].bus_id or "", 0)
        )
        through_switch = min(ends[a].switches, ends[b].switches)
        # Switches may be partitioned between tenants: then NVML answers "not supported".
        status = _ask(nvml, "GetP2PStatus", handles[a], handles[b], _P2P_NVLINK)
        if direct:
            word = f"NV{direct}"
        elif through_switch and status in (None, _P2P_OK):
            word = f"NV{through_switch}"
        else:
            ancestor = _ask(nvml, "GetTopologyCommonAncestor", handles[a], handles[b])
            word = _ANCESTOR.get(ancestor, UNKNOWN)
        links[frozenset((a, b))] = word
    nics = sorted((sysfs / "class/infiniband").glob("*"), key=_natural_order)
    gpu_paths = [_pci_device(sysfs, gpu.bus_id) for gpu in gpus]
    for number, nic in enumerate(nics):
        for index, path in enumerate(gpu_paths):
            links[frozenset((index, nic.name))] = pci_class(path, nic / "device")
        for earlier in nics[:number]:
            links[frozenset((earlier.name, nic.name))] = pci_class(
                earlier / "device", nic / "device"
            )
    nvswitch = any(end.switches for end in ends)
    return Topology(tuple(gpus), tuple(nic.name for nic in nics), links, nvswitch, "NVML")


def _natural_order(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _ask(nvml: Any, call: str, *arguments: object) -> Any:
    """Return the answer of `nvmlDevice<call>`, or None if this GPU or driver does not have it."""
    try:
        value = getattr(nvml, f"nvmlDevice{call}")(*arguments)
    except (nvml.NVMLError, AttributeError):  # AttributeError: nvidia-ml-py without this call
        return None
    return value.decode() if isinstance(value, bytes) else value


def _query_gpu(nvml: Any, index: int, handle: Any, sysfs: Path) -> Gpu:
    name = _ask(nvml, "GetName", handle)
    bus_id = _normal_bus_id(_ask(nvml, "GetPciInfo", handle))
    words = ((os.cpu_count() or 1) + 63) // 64
    cpus = _ask(nvml, "GetCpuAffinity", handle, words)
    nodes = cpu_list(_word_mask(_ask(nvml, "GetMemoryAffinity", handle, 1, 0)))  # 0: NUMA node
    if nodes is None:
        nodes = _numa_node(_pci_device(sysfs, bus_id))
    generation = _ask(nvml, "GetMaxPcieLinkGeneration", handle)
    width = _ask(nvml, "GetMaxPcieLinkWidth", handle)
    return Gpu(
        index=index,
        cpu_affinity=cpu_list(_word_mask(cpus)),
        numa_affinity=nodes,
        name=name,
        uuid=_ask(nvml, "GetUUID", handle),
        bus_id=bus_id,
        nvlink_gb_per_s=nvlink_gb_per_s(name),
        pcie_gb_per_s=pcie_gb_per_s(_GIGATRANSFERS.get(generation, 0.0), width or 0),
    )


def _word_mask(words: Iterable[int] | None) -> int:
    return sum(int(word) << (64 * at) for at, word in enumerate(words or ()))


def _normal_bus_id(info: Any) -> str | None:
    """Return the bus id of an nvmlPciInfo_t as sysfs and NCCL write it, `0000:1b:00.0`.

    NVML itself writes eight digits of domain.
    """
    text = getattr(info, "busId", None)
    text = text.decode() if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", str(text).lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _query_nvlink_ends(nvml: Any, handle: Any) -> _NvlinkEnds:
    ends = _NvlinkEnds()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, "GetNvLinkState", handle, link):
            continue  # off, or this GPU has fewer links
        kind = _ask(nvml, "GetNvLinkRemoteDeviceType", handle, link)
        bus_id = _normal_bus_id(_ask(nvml, "GetNvLinkRemotePciInfo", handle, link))
        if kind == _REMOTE_GPU and bus_id is not None:
            ends.gpus[bus_id] = ends.gpus.get(bus_id, 0) + 1
        elif kind != _REMOTE_CPU:
            # NCCL, too, takes an active link to something without a name for a switch.
            ends.switches += 1
    return ends


def _pci_device(sysfs: Path, bus_id: str | None) -> Path:
    return sysfs / "bus/pci/devices" / (bus_id or "")


def _numa_node(device: Path) -> str | None:
    try:
        node = (device / "numa_node").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return node if node.isdigit() else None  # -1: the kernel does not know


def pci_class(a: Path, b: Path) -> str:
    """Return the class of the path between two PCI devices, given their sysfs entries.

    A sysfs path names every bridge: root/root port/switch port up/switch port down/device. Below
    one switch two devices part at the ports down, so at most one bridge and the device itself
    follow the shared part.
    """
    if not (a.exists() and b.exists()):
        return UNKNOWN
    path_a = [part for part in a.resolve().parts if _PCI_PART.fullmatch(part)]
    path_b = [part for part in b.resolve().parts if _PCI_PART.fullmatch(part)]
    if not path_a or not path_b:
        return UNKNOWN  # a NIC without hardware
    shared = common_length(path_a, path_b)
    if shared >= 2:
        return "PIX" if max(len(path_a), len(path_b)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    node_a, node_b = _numa_node(a), _numa_node(b)
    if node_a is None or node_b is None:
        return UNKNOWN
    return "NODE" if node_a == node_b else "SYS"


def cpu_list(mask: int) -> str | None:
    """Write the bits of a mask as the kernel lists CPUs, `0-19,40-59`; None for an empty mask."""
    ranges: list[list[int]] = []
    for number, bit in enumerate(reversed(f"{mask:b}")):
        if bit == "0":
            continue
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    return ",".join(texts) or None


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many elements two paths share from their root."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length
