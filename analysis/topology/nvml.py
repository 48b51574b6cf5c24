"""Read the topology of this machine: NVML tells the GPUs, sysfs the NICs.

Known traps: nvidia-ml-py defines NVML_P2P_CAPS_INDEX_READ as the tuple (0,), so indices are numbers
here; on NVSwitch machines the far end of an NVLink is a switch, which NVML cannot name in a virtual
machine; links may be off; names are bytes in old releases.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from analysis.input_files import UnreadableInput
from analysis.topology.model import UNKNOWN, Device, Gpu, Pair, Topology, nvlink_gb_per_s

SWITCH = "switch"
ANCESTOR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # 0: on one board
REMOTE_GPU, REMOTE_CPU = 0x00, 0x01  # NVML_NVLINK_DEVICE_TYPE_*; else a switch, or unknown
P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
P2P_OK = 0
PCI_PART = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-7]")


class NoDriver(UnreadableInput):
    """This machine has no GPU that NVML can see."""


def read_live_topology(nvml: Any = None, sysfs: Path = Path("/sys")) -> Topology:
    """Return the topology of this machine; `nvml` is pynvml, or a module that answers like it.

    Raises NoDriver: there is no driver, or no GPU; UnreadableInput: NVML stopped answering.
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            why = "nvidia-ml-py is not installed, so the topology of this machine cannot be read"
            raise NoDriver(why) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(f"NVML finds no NVIDIA driver on this machine ({error})") from None
    try:
        return _machine(nvml, sysfs)
    except nvml.NVMLError as error:
        why = f"NVML stopped answering while the topology was read ({error})"
        raise UnreadableInput(why) from None
    finally:
        nvml.nvmlShutdown()


def _machine(nvml: Any, sysfs: Path) -> Topology:
    handles, gpus, ends = [], [], []
    paths: dict[Device, Path] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _ask(nvml, "GetName", handle)
        bus_id = _normal_bus_id(_ask(nvml, "GetPciInfo", handle))
        words = ((os.cpu_count() or 1) + 63) // 64
        cpus = _ask(nvml, "GetCpuAffinity", handle, words)
        nodes = _ask(nvml, "GetMemoryAffinity", handle, 1, 0)  # 0: NUMA node
        paths[index] = sysfs / "bus/pci/devices" / (bus_id or "")
        gpu = Gpu(
            index=index,
            cpu_affinity=cpu_list(_word_mask(cpus)),
            numa_affinity=cpu_list(_word_mask(nodes)) or _numa_node(paths[index]),
            name=name,
            uuid=_ask(nvml, "GetUUID", handle),
            bus_id=bus_id,
            nvlink_gb_per_s=nvlink_gb_per_s(name),
        )
        handles.append(handle)
        gpus.append(gpu)
        ends.append(_nvlink_ends(nvml, handle))
    if not gpus:
        raise NoDriver("NVML sees no GPU on this machine")
    links: dict[Pair, str] = {}
    for a, b in combinations(range(len(gpus)), 2):
        direct = min(ends[a][gpus[b].bus_id or ""], ends[b][gpus[a].bus_id or ""])
        through_switch = min(ends[a][SWITCH], ends[b][SWITCH])
        # Switches may be partitioned between tenants: then NVML answers "not supported".
        status = _ask(nvml, "GetP2PStatus", handles[a], handles[b], P2P_NVLINK)
        if direct:
            word = f"NV{direct}"
        elif through_switch and status in (None, P2P_OK):
            word = f"NV{through_switch}"
        else:
            ancestor = _ask(nvml, "GetTopologyCommonAncestor", handles[a], handles[b])
            word = ANCESTOR.get(ancestor, UNKNOWN)
        links[frozenset((a, b))] = word
    nics = [path.name for path in (sysfs / "class/infiniband").glob("*")]
    nics.sort(key=lambda nic: [part.zfill(9) for part in re.split(r"(\d+)", nic)])
    for nic in nics:
        path = sysfs / "class/infiniband" / nic / "device"
        for earlier in paths:
            links[frozenset((earlier, nic))] = pci_class(paths[earlier], path)
        paths[nic] = path
    nvswitch = any(of_gpu[SWITCH] for of_gpu in ends)
    return Topology(tuple(gpus), tuple(nics), links, nvswitch, "NVML")


def _ask(nvml: Any, call: str, *arguments: object) -> Any:
    """Return the answer of `nvmlDevice<call>`, or None if this GPU or driver does not have it."""
    try:
        value = getattr(nvml, f"nvmlDevice{call}")(*arguments)
    except (nvml.NVMLError, AttributeError):  # AttributeError: nvidia-ml-py without this call
        return None
    return value.decode() if isinstance(value, bytes) else value


def _word_mask(words: Iterable[int] | None) -> int:
    mask = 0
    for at, word in enumerate(words or ()):
        mask |= int(word) << (64 * at)
    return mask


def _normal_bus_id(info: Any) -> str | None:
    """Return the bus id of an nvmlPciInfo_t, `00000000:1b:00.0`, as sysfs and NCCL write it."""
    text = getattr(info, "busId", None)
    text = text.decode() if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", str(text).lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _nvlink_ends(nvml: Any, handle: Any) -> Counter[str]:
    """Return {bus id of a GPU, or SWITCH: active NVLinks that end there}."""
    ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, "GetNvLinkState", handle, link):
            continue  # off, or this GPU has fewer links
        kind = _ask(nvml, "GetNvLinkRemoteDeviceType", handle, link)
        bus_id = _normal_bus_id(_ask(nvml, "GetNvLinkRemotePciInfo", handle, link))
        if kind == REMOTE_GPU and bus_id is not None:
            ends[bus_id] += 1
        elif kind != REMOTE_CPU:
            # NCCL, too, takes an active link to something without a name for a switch.
            ends[SWITCH] += 1
    return ends


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
    path_a = list(filter(PCI_PART.fullmatch, a.resolve().parts))
    path_b = list(filter(PCI_PART.fullmatch, b.resolve().parts))
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
    texts = []
    for ones in re.finditer("1+", f"{mask:b}"[::-1]):
        low, high = ones.start(), ones.end() - 1
        texts.append(str(low) if low == high else f"{low}-{high}")
    return ",".join(texts) or None


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many elements two paths share from their root."""
    for length, (first, second) in enumerate(zip(a, b, strict=False)):
        if first != second:
            return length
    return min(len(a), len(b))
