"""Read a topology: text of `nvidia-smi topo -m`, NCCL's topology XML, or this machine (nvml.py).

NCCL writes its XML to `NCCL_TOPO_DUMP_FILE`; it holds only the GPUs of one communicator:

    system > cpu(numaid, affinity) > pci(busid, link_speed, link_width)* > gpu(dev, sm) > nvlink(…)
                                                                         > nic > net(name)

Its link classes are those of NCCL's own path search: two devices below one PCI switch are PIX,
below several PXB, at one cpu element (a NUMA node) PHB, else SYS. Source: src/graph/xml.cc and
paths.cc of NVIDIA/nccl.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from analysis.errors import UnreadableInput
from analysis.input_files import LARGEST_TOPOLOGY_BYTES, read_input, refuse_too_many
from analysis.topology.model import (
    UNKNOWN,
    Device,
    Gpu,
    Pair,
    Topology,
    infer_nvswitch,
    nvlink_gb_per_s,
    pcie_gb_per_s,
)
from analysis.topology.nvml import common_length, cpu_list, read_live_topology


def read_topology(file: str | Path | None, gpu_name: str | None = None) -> Topology:
    """Return the topology in a file (`-`: standard input), or of this machine if `file` is None.

    Raises:
        OSError: the file cannot be opened.
        UnreadableInput: it holds no topology; NoDriver if this machine has no GPU.
    """
    if file is None:
        return read_live_topology()
    return read_input(file, lambda text: parse_topology(text, gpu_name), LARGEST_TOPOLOGY_BYTES)


def parse_topology(text: str, gpu_name: str | None = None) -> Topology:
    """Return the topology in the text of `nvidia-smi topo -m` or in NCCL's XML.

    `gpu_name` is the product name of every GPU, which the text does not say
    ("Tesla V100-SXM2-16GB").
    """
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        return parse_topology_xml(text)
    return parse_topology_text(text, gpu_name)


# --- the text of nvidia-smi topo -m ---------------------------------------------------------------

_ANSI_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the header is underlined even in a pipe
_AFFINITY_COLUMN = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_GPU_LABEL = re.compile(r"GPU(\d+)")
_DEVICE_LABEL = re.compile(r"GPU\d+|NIC\d+|mlx\d\S*")
_LINK_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_#/+-]*")
_NUMBER_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")  # of CPUs or NUMA nodes
_P2P_STATUS = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
_RENAMED = {"SOC": "SYS"}  # drivers before 2017 wrote SOC for a path between sockets


class _Header(NamedTuple):
    """The header of the table: its line (from 1), device labels and affinity columns."""

    line: int
    labels: list[str]
    columns: list[str]


class _DeviceRow(NamedTuple):
    """One device's row: its line, the link word to each label, its affinities."""

    line: int
    links: list[str]
    affinity: dict[str, str]


def parse_topology_text(text: str, gpu_name: str | None = None) -> Topology:
    """Return the topology that `nvidia-smi topo -m` printed, of every driver generation.

    Accepted are tabs or spaces, ANSI codes, NIC columns named mlx5_0 or NIC0 with a "NIC Legend",
    affinity columns that are missing, empty, N/A or set off by doubled tabs, and other text around
    the table. Both rows of a pair must agree. Affinities appear once, so only their form is
    checked. An unknown link word is kept.

    Raises:
        UnreadableInput: names the line of a missing, short or repeated row, an asymmetric pair, or
            a second table.
    """
    lines = [_ANSI_CODE.sub("", line).rstrip("\r") for line in text.split("\n")]
    header = _find_header(lines)
    refuse_too_many(len(header.labels))
    rows = _read_rows(lines, header)
    devices = _name_devices(header.labels, lines[header.line :])
    links = _symmetric_links(header.labels, devices, rows)
    gpus = []
    for label, device in devices.items():
        if isinstance(device, int):
            affinity = rows[label].affinity
            gpu = Gpu(
                index=device,
                cpu_affinity=affinity.get("CPU Affinity"),
                numa_affinity=affinity.get("NUMA Affinity"),
                name=gpu_name,
                nvlink_gb_per_s=nvlink_gb_per_s(gpu_name),
            )
            gpus.append(gpu)
    ids = [gpu.index for gpu in gpus]
    words = [links[frozenset(pair)] for pair in combinations(ids, 2)]
    if words and _P2P_STATUS.issuperset(words):
        raise UnreadableInput(
            f"line {header.line}: a table of peer access (`nvidia-smi topo -p2p`); "
            "accepted are link classes (`topo -m`)"
        )
    nics = tuple(device for device in devices.values() if isinstance(device, str))
    return Topology(tuple(gpus), nics, links, infer_nvswitch(ids, links), "nvidia-smi topo -m")


def _find_header(lines: list[str]) -> _Header:
    headers = []
    for number, line in enumerate(lines, start=1):
        columns = _AFFINITY_COLUMN.findall(line)
        labels = _AFFINITY_COLUMN.split(line)[0].split()
        if not labels or not _GPU_LABEL.fullmatch(labels[0]):
            continue
        if len(labels) > 1 and not _DEVICE_LABEL.fullmatch(labels[1]):
            continue  # a row starts with a device as well, but its second cell is a link or X
        if len(labels) == 1 and not columns and line.lstrip() == line:
            continue  # a bare "GPU0" at the margin is a row whose cells were cut
        headers.append(_Header(number, labels, columns))
    if not headers:
        raise UnreadableInput(
            "no header line with GPU0, GPU1, …; accepted is the text of `nvidia-smi topo -m`"
        )
    header = headers[0]
    if len(headers) > 1:
        raise UnreadableInput(
            f"line {headers[1].line}: a second table begins here, the first in line "
            f"{header.line}; accepted is one table"
        )
    if len(set(header.labels)) != len(header.labels):
        labels_text = " ".join(header.labels)
        raise UnreadableInput(f"line {header.line}: the header names a device twice: {labels_text}")
    return header


def _read_rows(lines: list[str], header: _Header) -> dict[str, _DeviceRow]:
    """Return the row of every label. Raises UnreadableInput if one is missing, doubled or torn."""
    labels = header.labels
    rows: dict[str, _DeviceRow] = {}
    for number, line in enumerate(lines[header.line :], start=header.line + 1):
        if "\t" in line:  # a cell may be empty
            cells = [cell.strip() for cell in line.strip(" ").split("\t")]
        else:
            cells = line.split()
        label = cells[0] if cells else ""
        if label not in labels:
            if _DEVICE_LABEL.fullmatch(label):
                raise UnreadableInput(
                    f"line {number}: a row for {label}, which has no column in the header, "
                    f"line {header.line}"
                )
            continue
        if label in rows:
            raise UnreadableInput(
                f"line {number}: a second row for {label}; the first is line {rows[label].line}"
            )
        links = _read_links(cells[1:], label, labels, number)
        last_line = number == len(lines)  # no newline after it: the last cell may be cut
        affinity = _read_affinity(cells[1 + len(labels) :], header.columns, number, last_line)
        rows[label] = _DeviceRow(number, links, affinity)
    for label in labels:
        if label not in rows:
            raise UnreadableInput(
                f"no row for {label}, which the header in line {header.line} names: the table is "
                "cut"
            )
    return rows


def _read_links(cells: list[str], label: str, labels: list[str], line: int) -> list[str]:
    words = [_RENAMED.get(cell, cell) for cell in cells[: len(labels)]]
    if len(words) < len(labels):
        raise UnreadableInput(
            f"line {line}: {len(words)} links in the row of {label}; accepted are {len(labels)}"
        )
    for peer, word in zip(labels, words, strict=True):
        cell = f"line {line}: {label} to {peer} reads {word!r}"
        if (word == "X") != (peer == label):
            raise UnreadableInput(f"{cell}; accepted is X for a device and itself only")
        if word and not _LINK_WORD.fullmatch(word):
            raise UnreadableInput(f"{cell}; accepted is a link class such as NV4 or SYS")
    return [word or UNKNOWN for word in words]


def _read_affinity(
    cells: list[str], columns: list[str], line: int, may_be_cut: bool
) -> dict[str, str]:
    """Return the affinity columns of one row.

    Doubled tabs leave empty cells, so only a full row is read by position.
    """
    filled = [cell for cell in cells if cell]
    if len(filled) > len(columns):
        surplus = len(filled) - len(columns)
        raise UnreadableInput(f"line {line}: {surplus} more cells than the header has columns")
    values: dict[str, str] = {}
    if len(filled) == len(columns):
        values = dict(zip(columns, filled, strict=True))
        if may_be_cut and columns:
            del values[columns[-1]]
    elif cells and not cells[0].isdigit() and not may_be_cut:
        # Next to the links; a single number could be a later column, moved up.
        values = {columns[0]: cells[0]}
    return {column: text for column, text in values.items() if _NUMBER_LIST.fullmatch(text)}


def _name_devices(labels: list[str], lines: list[str]) -> dict[str, Device]:
    """Return the device of each label: a GPU id, or a NIC's RDMA name if a legend gives one."""
    legend = {}
    for line in lines:  # `NIC0: mlx5_0`
        match = re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line)
        if match:
            legend[match[1]] = match[2]
    names = {label: legend.get(label, label) for label in labels}
    if len(set(names.values())) != len(names):  # a damaged legend: keep the column labels
        names = {label: label for label in labels}
    devices: dict[str, Device] = {}
    for label in labels:
        match = _GPU_LABEL.fullmatch(label)
        devices[label] = int(match[1]) if match else names[label]
    return devices


def _symmetric_links(
    labels: list[str], devices: Mapping[str, Device], rows: Mapping[str, _DeviceRow]
) -> dict[Pair, str]:
    """Return the link of each unordered pair; both rows that state it must agree."""
    links: dict[Pair, str] = {}
    for (i, a), (j, b) in combinations(enumerate(labels), 2):
        forward = rows[a].links[j]
        back = rows[b].links[i]
        if forward != back:
            raise UnreadableInput(
                f"line {rows[b].line}: {b} to {a} is {back}, but {a} to {b} is {forward} "
                f"(line {rows[a].line}); accepted is a symmetric table"
            )
        links[frozenset((devices[a], devices[b]))] = forward
    return links


# --- NCCL's topology XML --------------------------------------------------------------------------

DEEPEST = 64
_NVSWITCH_PCI_CLASS = "0x068000"  # bridge, other
_SMALL_NUMBER = re.compile(r"[0-9]{1,9}")


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

    def integer(self, name: str, least: int) -> int:
        value = self.attributes.get(name, "")
        if not re.fullmatch(r"-?[0-9]{1,9}", value) or int(value) < least:
            raise UnreadableInput(
                f"line {self.line}: <{self.name}> has {name}={value!r}; accepted is a number from "
                f"{least}"
            )
        return int(value)

    def path(self) -> list["_Element"]:
        return [parent for parent in self.parents if parent.name in ("cpu", "pci")]


def parse_topology_xml(text: str) -> Topology:
    """Return the topology of one dump.

    Raises:
        UnreadableInput: broken XML, entities, missing or contradictory values; it names the line.
    """
    root = _parse_xml(text)
    if root.name != "system":
        raise UnreadableInput(
            f"line {root.line}: the root element is {root.name!r}; accepted is NCCL's <system>"
        )
    gpu_elements: dict[int, _Element] = {}
    gpus: dict[int, Gpu] = {}
    nic_elements: dict[Device, _Element] = {}
    for element in root.walk():
        if element.name == "gpu":
            gpu = _gpu_of_element(element)
            if gpu.index in gpus:
                raise UnreadableInput(
                    f"line {element.line}: a second <gpu dev={gpu.index}>, the first in line "
                    f"{gpu_elements[gpu.index].line}; accepted is the dump of one machine"
                )
            gpus[gpu.index] = gpu
            gpu_elements[gpu.index] = element
        elif element.name == "net" and element.attributes.get("name"):
            # One NIC may have several ports.
            nic_elements.setdefault(element.attributes["name"], element)
    if not gpus:
        raise UnreadableInput(
            "no <gpu dev=…> element; accepted is the file that NCCL_TOPO_DUMP_FILE names"
        )
    refuse_too_many(len(gpus))
    devices = [gpus[index] for index in sorted(gpus)]
    elements: dict[Device, _Element] = {gpu.index: gpu_elements[gpu.index] for gpu in devices}
    elements |= nic_elements
    links: dict[Pair, str] = {}
    for a, b in combinations(elements, 2):
        links[frozenset((a, b))] = _class_of_elements(elements[a], elements[b])
    nvlinks, nvswitch = _nvlinks_of_elements(devices, elements)
    nics = tuple(str(nic) for nic in nic_elements)
    return Topology(tuple(devices), nics, links | nvlinks, nvswitch, "NCCL topology XML")


def _parse_xml(text: str) -> _Element:
    """Return the root. Refuses declarations of types and entities: NCCL writes none."""
    if len(text) > LARGEST_TOPOLOGY_BYTES:
        raise UnreadableInput(
            f"{len(text)} characters; accepted is a topology of at most {LARGEST_TOPOLOGY_BYTES}"
        )
    parser = expat.ParserCreate()
    open_elements: list[_Element] = []
    roots: list[_Element] = []

    def refuse(*_: object) -> None:
        line = parser.CurrentLineNumber
        raise UnreadableInput(
            f"line {line}: a document type or entity declaration; NCCL writes none"
        )

    def start(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, attributes, parser.CurrentLineNumber, tuple(open_elements))
        if len(open_elements) >= DEEPEST:
            raise UnreadableInput(f"line {element.line}: elements nested deeper than {DEEPEST}")
        siblings = open_elements[-1].children if open_elements else roots
        siblings.append(element)
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
        reason = expat.ErrorString(error.code)
        raise UnreadableInput(f"line {error.lineno}: {reason}; accepted is whole XML") from None
    return roots[0]


def _gpu_of_element(element: _Element) -> Gpu:
    path = element.path()
    cpus = [parent for parent in path if parent.name == "cpu"]
    if not cpus:
        raise UnreadableInput(f"line {element.line}: <gpu> outside of any <cpu>")
    bridges = [parent for parent in path if parent.name == "pci"]
    cpu = cpus[-1].attributes
    pci = bridges[-1].attributes if bridges else {}
    sm = element.attributes.get("sm", "")
    speed = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) GT/s", pci.get("link_speed", ""))
    width = pci.get("link_width", "")
    numa = cpu.get("numaid", "")
    pcie = None
    if speed and _SMALL_NUMBER.fullmatch(width):
        pcie = pcie_gb_per_s(float(speed[1]), int(width))
    return Gpu(
        index=element.integer("dev", 0),
        cpu_affinity=cpu_list(_hexadecimal_mask(cpu.get("affinity", ""))),
        numa_affinity=numa if _SMALL_NUMBER.fullmatch(numa) else None,  # -1: not known
        bus_id=pci.get("busid", "").strip().lower() if bridges else None,
        nvlink_gb_per_s=nvlink_gb_per_s(sm=int(sm)) if _SMALL_NUMBER.fullmatch(sm) else None,
        pcie_gb_per_s=pcie,
    )


def _hexadecimal_mask(text: str) -> int:
    """Return the number that words of 32 bits make, joined by commas, most significant first."""
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*", text):
        return 0
    return int("".join(word.zfill(8) for word in text.split(",")), 16)


def _class_of_elements(a: _Element, b: _Element) -> str:
    """Return the class of the path through PCI, counted in the switches between two devices."""
    path_a = [id(element) for element in a.path()]
    path_b = [id(element) for element in b.path()]
    shared = common_length(path_a, path_b)
    if not shared:
        return "SYS"
    if a.path()[shared - 1].name == "cpu":
        return "PHB"
    # The rest of a path ends in the device's own pci element; what is before it is one more switch.
    return "PIX" if max(len(path_a), len(path_b)) - shared <= 1 else "PXB"


def _nvlinks_of_elements(
    gpus: Sequence[Gpu], elements: Mapping[Device, _Element]
) -> tuple[dict[Pair, str], bool]:
    """Return the NV# class of the pairs that NVLink joins, and whether the links pass switches."""
    index_of_bus = {gpu.bus_id: gpu.index for gpu in gpus if gpu.bus_id}
    direct: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], int] = {}  # of the first element
    switched: dict[int, int] = {}
    for gpu in gpus:
        for link in elements[gpu.index].children:
            if link.name != "nvlink":
                continue
            count = link.integer("count", 1)
            peer = index_of_bus.get(link.attributes.get("target", "").strip().lower())
            if peer is not None and peer != gpu.index:
                ends = (gpu.index, peer)
                direct[ends] = direct.get(ends, 0) + count
                lines.setdefault(ends, link.line)
            elif link.attributes.get("tclass") == _NVSWITCH_PCI_CLASS:
                switched[gpu.index] = switched.get(gpu.index, 0) + count
            # anything else ends in a CPU or in a GPU outside of the communicator
    links: dict[Pair, str] = {}
    for a, b in combinations(switched, 2):
        links[frozenset((a, b))] = f"NV{min(switched[a], switched[b])}"
    for (a, b), count in direct.items():
        line = lines[a, b]
        back = direct.get((b, a), 0)
        if back != count:
            raise UnreadableInput(
                f"line {line}: {count} NVLinks from GPU {a} to GPU {b}, but {back} back "
                f"(line {lines.get((b, a), line)}); accepted is the same number both ways"
            )
        links[frozenset((a, b))] = f"NV{count}"
    return links, bool(switched)
