"""Read the topology XML that NCCL writes to `NCCL_TOPO_DUMP_FILE` as a `Topology`.

    system > cpu(numaid, affinity) > pci(busid, link_speed, link_width)* > gpu(dev, sm) > nvlink(target, count, tclass)
                                                                         > nic > net(name)

It holds only the GPUs of the dumped communicator. Link classes are those of NCCL's own path search: two devices below
one PCI switch are PIX, below several PXB, at one cpu element (a NUMA node) PHB, else SYS. NVLinks to the class 0x068000
end in an NVSwitch. Source: src/graph/xml.cc and paths.cc of NVIDIA/nccl.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from xml.parsers import expat

from analysis.errors import UnreadableInput
from analysis.foreign import LARGEST_TOPOLOGY_BYTES, refuse_too_many
from analysis.topology.link_classes import nvlink_gb_per_s, pcie_gb_per_s
from analysis.topology.model import Device, Gpu, Pair, Topology

DEEPEST = 64
_NVSWITCH = "0x068000"  # PCI class: bridge, other


@dataclass
class _Element:
    name: str
    attributes: dict[str, str]
    line: int
    parents: tuple["_Element", ...]  # outermost first
    children: list["_Element"] = field(default_factory=list)

    def walk(self) -> Iterator["_Element"]:
        yield self
        for child in self.children:
            yield from child.walk()


def is_topology_xml(text: str) -> bool:
    """Tell whether the text is XML; a text table never starts with an angle bracket."""
    return text.lstrip("\ufeff \t\r\n").startswith("<")


def parse_topology_xml(text: str) -> Topology:
    """Read one dump. Raises UnreadableInput, with the line, for broken XML, entities, missing or contradictory values."""
    root = _parse(text)
    if root.name != "system":
        raise UnreadableInput(
            f"line {root.line}: the root element is {root.name!r}; accepted is NCCL's <system>"
        )
    gpus: dict[int, tuple[Gpu, _Element]] = {}
    nics: dict[str, _Element] = {}
    for element in root.walk():
        if element.name == "gpu":
            gpu = _gpu(element)
            if gpu.index in gpus:
                first = gpus[gpu.index][1].line
                raise UnreadableInput(
                    f"line {element.line}: a second <gpu dev={gpu.index}>, the first in line {first}; "
                    "accepted is the dump of one machine"
                )
            gpus[gpu.index] = (gpu, element)
        elif element.name == "net" and element.attributes.get("name"):
            nics.setdefault(element.attributes["name"], element)  # one NIC may have several ports
    if not gpus:
        raise UnreadableInput(
            "no <gpu dev=…> element; accepted is the file that NCCL_TOPO_DUMP_FILE names"
        )
    refuse_too_many(len(gpus))
    ordered = sorted(gpus.items())
    places: dict[Device, _Element] = {index: element for index, (_, element) in ordered} | dict(
        nics.items()
    )
    links: dict[Pair, str] = {
        frozenset((a, b)): _pci_class(places[a], places[b]) for a, b in combinations(places, 2)
    }
    nvlinks, nvswitch = _nvlinks(
        [gpu for _, (gpu, _) in ordered], {index: element for index, (_, element) in ordered}
    )
    devices = tuple(gpu for _, (gpu, _) in ordered)
    return Topology(devices, tuple(nics), links | nvlinks, nvswitch, "NCCL topology XML")


def _parse(text: str) -> _Element:
    """Parse elements with their line numbers. Refuse declarations of types and entities: NCCL writes none."""
    if len(text) > LARGEST_TOPOLOGY_BYTES:
        raise UnreadableInput(
            f"{len(text)} characters; accepted is a topology of at most {LARGEST_TOPOLOGY_BYTES}"
        )
    parser = expat.ParserCreate()
    open_elements: list[_Element] = []
    roots: list[_Element] = []

    def refuse(*_: object) -> None:
        raise UnreadableInput(
            f"line {parser.CurrentLineNumber}: a document type or entity declaration; NCCL writes none"
        )

    def start(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, attributes, parser.CurrentLineNumber, tuple(open_elements))
        if len(open_elements) >= DEEPEST:
            raise UnreadableInput(f"line {element.line}: elements nested deeper than {DEEPEST}")
        (open_elements[-1].children if open_elements else roots).append(element)
        open_elements.append(element)

    def end(_: str) -> None:
        open_elements.pop()

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise UnreadableInput(
            f"line {error.lineno}: {expat.ErrorString(error.code)}; accepted is whole XML"
        ) from None
    return roots[0]


def _integer(element: _Element, name: str, least: int) -> int:
    value = element.attributes.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,9}", value) or int(value) < least:
        raise UnreadableInput(
            f"line {element.line}: <{element.name}> has {name}={value!r}; accepted is a number from {least}"
        )
    return int(value)


def _ancestor(element: _Element, name: str) -> _Element | None:
    return next((parent for parent in reversed(element.parents) if parent.name == name), None)


def _gpu(element: _Element) -> Gpu:
    cpu, pci = _ancestor(element, "cpu"), _ancestor(element, "pci")
    if cpu is None:
        raise UnreadableInput(f"line {element.line}: <gpu> outside of any <cpu>")
    sm = element.attributes.get("sm", "")
    speed = re.match(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?) GT/s", pci.attributes.get("link_speed", "") if pci else ""
    )
    width = pci.attributes.get("link_width", "") if pci else ""
    numa = cpu.attributes.get("numaid", "")
    return Gpu(
        index=_integer(element, "dev", 0),
        cpu_affinity=cpu_list(_mask(cpu)),
        numa_affinity=numa if _digits(numa) else None,  # -1: the kernel does not know
        bus_id=_bus_id(pci.attributes.get("busid", "")) if pci else None,
        nvlink_gb_per_s=nvlink_gb_per_s(sm=int(sm)) if _digits(sm) else None,
        pcie_gb_per_s=pcie_gb_per_s(float(speed[1]), int(width))
        if speed and _digits(width)
        else None,
    )


def _digits(text: str) -> bool:
    """Tell whether a text is a number of a few digits. isdigit() takes ² for one."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _bus_id(text: str) -> str:
    return text.strip().lower()


def _mask(cpu: _Element) -> int:
    """Read the affinity attribute: hexadecimal words of 32 bits, most significant first, joined by commas."""
    text = cpu.attributes.get("affinity", "")
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*", text):
        return 0
    return int("".join(word.zfill(8) for word in text.split(",")), 16)


def cpu_list(mask: int) -> str | None:
    """Write the bits of a mask as the kernel lists CPUs, `0-19,40-59`; None for an empty mask."""
    bits = [number for number, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
    ranges: list[list[int]] = []
    for bit in bits:
        if ranges and ranges[-1][1] == bit - 1:
            ranges[-1][1] = bit
        else:
            ranges.append([bit, bit])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or None


def _pci_class(a: _Element, b: _Element) -> str:
    """Return the class of the path through PCI, counted in the switches (pci elements) between two devices."""
    chain_a = [parent for parent in a.parents if parent.name in ("cpu", "pci")]
    chain_b = [parent for parent in b.parents if parent.name in ("cpu", "pci")]
    shared = 0
    while shared < min(len(chain_a), len(chain_b)) and chain_a[shared] is chain_b[shared]:
        shared += 1
    if not shared:
        return "SYS"
    if chain_a[shared - 1].name == "cpu":
        return "PHB"
    if shared == len(chain_a) == len(chain_b):  # ports of one card
        return "PIX"
    # What is left of a chain ends in the device's own pci element; anything before it is a further switch.
    return "PIX" if max(len(chain_a), len(chain_b)) - shared <= 1 else "PXB"


def _nvlinks(gpus: list[Gpu], elements: dict[int, _Element]) -> tuple[dict[Pair, str], bool]:
    """Return the NV# class of the pairs that NVLink joins, and whether the links pass switches."""
    by_bus = {gpu.bus_id: gpu.index for gpu in gpus if gpu.bus_id}
    direct: dict[tuple[int, int], tuple[int, int]] = {}  # (from, to) -> (links, line)
    switched: dict[int, int] = {}
    for index, element in elements.items():
        for link in element.children:
            if link.name != "nvlink":
                continue
            count = _integer(link, "count", 1)
            peer = by_bus.get(_bus_id(link.attributes.get("target", "")))
            if peer is not None and peer != index:
                before = direct.get((index, peer), (0, link.line))
                direct[index, peer] = (before[0] + count, before[1])
            elif link.attributes.get("tclass") == _NVSWITCH:
                switched[index] = switched.get(index, 0) + count
            # anything else ends in a CPU or in a GPU outside of the communicator
    links: dict[Pair, str] = {
        frozenset((a, b)): f"NV{min(switched[a], switched[b])}"
        for a, b in combinations(switched, 2)
    }
    for (a, b), (count, line) in direct.items():
        back, back_line = direct.get((b, a), (0, line))
        if back != count:
            raise UnreadableInput(
                f"line {line}: {count} NVLinks from GPU {a} to GPU {b}, but {back} back (line {back_line}); "
                "accepted is the same number both ways"
            )
        links[frozenset((a, b))] = f"NV{count}"
    return links, bool(switched)
