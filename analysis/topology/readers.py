"""Read a topology: text of `nvidia-smi topo -m`, NCCL's topology XML, or this machine (nvml.py).

NCCL writes its XML to `NCCL_TOPO_DUMP_FILE`; it holds only the GPUs of one communicator:

    system > cpu(numaid, affinity) > pci(busid)* > gpu(dev, sm) > nvlink(…)
                                                > nic > net(name)

Its link classes are those of NCCL's own path search: two devices below one PCI switch are PIX,
below several PXB, at one cpu element (a NUMA node) PHB, else SYS. Source: src/graph/xml.cc and
paths.cc of NVIDIA/nccl.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from analysis.input_files import (
    LARGEST_TOPOLOGY_BYTES,
    UnreadableInput,
    read_input,
    refuse_too_many,
)
from analysis.topology.model import (
    UNKNOWN,
    Device,
    Gpu,
    Pair,
    Topology,
    infer_nvswitch,
    nvlink_gb_per_s,
)
from analysis.topology.nvml import common_length, cpu_list, read_live_topology


def read_topology(file: str | Path | None, gpu_name: str | None = None) -> Topology:
    """Return the topology in a file (`-`: standard input), or of this machine if `file` is None.
    Raises OSError, and UnreadableInput: it holds no topology; NoDriver: this machine has no GPU.
    """
    if file is None:
        return read_live_topology()
    return read_input(file, lambda text: parse_topology(text, gpu_name), LARGEST_TOPOLOGY_BYTES)


def parse_topology(text: str, gpu_name: str | None = None) -> Topology:
    """Return the topology in the text of `nvidia-smi topo -m` or in NCCL's XML.

    `gpu_name` is the product name of every GPU, which the text does not say.
    """
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        return parse_topology_xml(text)
    return parse_topology_text(text, gpu_name)


ANSI_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the header is underlined even in a pipe
AFFINITY_COLUMN = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
GPU_LABEL = re.compile(r"GPU(\d{1,9})")
DEVICE_LABEL = re.compile(r"GPU\d+|NIC\d+|mlx\d\S*")
LINK_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_#/+-]*")
NUMBER_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")  # of CPUs or NUMA nodes
P2P_STATUS = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
RENAMED = {"SOC": "SYS"}  # drivers before 2017 wrote SOC for a path between sockets


class TopologyRow(NamedTuple):
    """The row of one device in the table of nvidia-smi."""

    line: int
    words: list[str]  # the link to each label
    affinity: dict[str, str]


def parse_topology_text(text: str, gpu_name: str | None = None) -> Topology:
    """Return the topology that `nvidia-smi topo -m` printed, of every driver generation.

    Accepted are tabs or spaces, ANSI codes, NIC columns named mlx5_0 or NIC0 with a "NIC Legend",
    affinity columns that are missing, empty, N/A or set off by doubled tabs, and other text around
    the table. Both rows of a pair must agree. Affinities appear once, so only their form is
    checked. An unknown link word is kept.

    Raises UnreadableInput: names the line of a missing, short or repeated row, an asymmetric pair,
    or a second table.
    """
    table = _TopologyTable(text)
    links = table.symmetric_links()
    gpus, nics, ids = [], [], []
    for label, device in table.devices.items():
        if isinstance(device, str):
            nics.append(device)
            continue
        affinity = table.rows[label].affinity
        gpu = Gpu(
            index=device,
            cpu_affinity=affinity.get("CPU Affinity"),
            numa_affinity=affinity.get("NUMA Affinity"),
            name=gpu_name,
            nvlink_gb_per_s=nvlink_gb_per_s(gpu_name),
        )
        gpus.append(gpu)
        ids.append(device)
    words = [links[frozenset(pair)] for pair in combinations(ids, 2)]
    if words and P2P_STATUS.issuperset(words):
        raise UnreadableInput(
            f"line {table.header}: a table of peer access, from `nvidia-smi topo -p2p`; "
            "expected the output of `nvidia-smi topo -m`"
        )
    nvswitch = infer_nvswitch(ids, links)
    return Topology(tuple(gpus), tuple(nics), links, nvswitch, "nvidia-smi topo -m")


class _TopologyTable:
    def __init__(self, text: str) -> None:
        self.lines = [ANSI_CODE.sub("", line).rstrip("\r") for line in text.split("\n")]
        self.header = 0  # its line, from 1
        self.devices: dict[str, Device] = {}  # by label: a GPU id, or a NIC's RDMA name
        self.columns: list[str] = []  # of affinities
        self.rows: dict[str, TopologyRow] = {}
        self.find_header()
        refuse_too_many(len(self.devices))
        for line_number, line in enumerate(self.lines[self.header :], start=self.header + 1):
            self.read_row(line_number, line)
        for label in self.devices:
            if label not in self.rows:
                raise UnreadableInput(
                    f"no row for {label}, which the header in line {self.header} names: the table "
                    "is cut"
                )

    def find_header(self) -> None:
        """Find the header; a device is the RDMA name of a NIC if a legend gives one."""
        headers = []
        for line_number, line in enumerate(self.lines, start=1):
            columns = AFFINITY_COLUMN.findall(line)
            labels = AFFINITY_COLUMN.split(line)[0].split()
            if not labels or not GPU_LABEL.fullmatch(labels[0]):
                continue
            if len(labels) > 1 and not DEVICE_LABEL.fullmatch(labels[1]):
                continue  # a row starts with a device as well, but its second cell is a link or X
            if len(labels) == 1 and not columns and line.lstrip() == line:
                continue  # a bare "GPU0" at the margin is a row whose cells were cut
            headers.append((line_number, labels, columns))
        if not headers:
            raise UnreadableInput(
                "no header line with GPU0, GPU1, …; expected the text of `nvidia-smi topo -m` or "
                "NCCL's topology XML"
            )
        self.header, labels, self.columns = headers[0]
        if len(headers) > 1:
            raise UnreadableInput(
                f"line {headers[1][0]}: a second table begins here, the first in line "
                f"{self.header}; expected one table"
            )
        if len(set(labels)) != len(labels):
            names = " ".join(labels)
            raise UnreadableInput(f"line {self.header}: the header names a device twice: {names}")
        legend = {}
        for line in self.lines[self.header :]:  # `NIC0: mlx5_0`
            match = re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line)
            if match:
                legend[match[1]] = match[2]
        if len({legend.get(label, label) for label in labels}) != len(labels):  # damaged
            legend = {}
        for label in labels:
            match = GPU_LABEL.fullmatch(label)
            self.devices[label] = int(match[1]) if match else legend.get(label, label)

    def read_row(self, line_number: int, line: str) -> None:
        """Read a line below the header. Raises UnreadableInput if it is a doubled or torn row."""
        labels = list(self.devices)
        cells = line.split()
        if "\t" in line:  # a cell may be empty
            cells = [cell.strip() for cell in line.strip(" ").split("\t")]
        if not cells:
            return
        label = cells[0]
        if label not in labels:
            if DEVICE_LABEL.fullmatch(label):
                raise UnreadableInput(
                    f"line {line_number}: a row for {label}, which has no column in the header, "
                    f"line {self.header}"
                )
            return
        if label in self.rows:
            first = f"the first is line {self.rows[label].line}"
            raise UnreadableInput(f"line {line_number}: a second row for {label}; {first}")
        words = cells[1 : 1 + len(labels)]
        if len(words) < len(labels):
            raise UnreadableInput(
                f"line {line_number}: {len(words)} links in the row of {label}; expected "
                f"{len(labels)}"
            )
        for at, peer in enumerate(labels):
            word = RENAMED.get(words[at], words[at])
            reading = f"line {line_number}: {label} to {peer} reads {word!r}"
            if (word == "X") != (peer == label):
                raise UnreadableInput(f"{reading}; expected X for a device and itself only")
            if word and not LINK_WORD.fullmatch(word):
                raise UnreadableInput(f"{reading}; expected a link class such as NV4 or SYS")
            words[at] = word or UNKNOWN
        affinity = self.read_affinity(cells[1 + len(labels) :], line_number)
        self.rows[label] = TopologyRow(line_number, words, affinity)

    def read_affinity(self, cells: Sequence[str], line_number: int) -> dict[str, str]:
        """Return the affinity columns of one row: only a full row is read by position, since
        doubled tabs leave empty cells.
        """
        may_be_cut = line_number == len(self.lines)  # no newline after it
        columns = self.columns
        filled = list(filter(None, cells))
        if len(filled) > len(columns):
            surplus = len(filled) - len(columns)
            raise UnreadableInput(
                f"line {line_number}: {surplus} more cells than the header has columns"
            )
        values: dict[str, str] = {}
        if len(filled) == len(columns):
            values = dict(zip(columns, filled, strict=True))
            if may_be_cut and columns:
                del values[columns[-1]]
        elif cells and not cells[0].isdigit() and not may_be_cut:
            # Next to the links; a single number could be a later column, moved up.
            values = {columns[0]: cells[0]}
        affinity = {}
        for column, text in values.items():
            if NUMBER_LIST.fullmatch(text):
                affinity[column] = text
        return affinity

    def symmetric_links(self) -> dict[Pair, str]:
        links: dict[Pair, str] = {}
        for (i, a), (j, b) in combinations(enumerate(self.devices), 2):
            there, back = self.rows[a].words[j], self.rows[b].words[i]
            if there != back:
                raise UnreadableInput(
                    f"line {self.rows[b].line}: {b} to {a} is {back}, but {a} to {b} is {there} "
                    f"(line {self.rows[a].line}); expected a symmetric table"
                )
            links[frozenset((self.devices[a], self.devices[b]))] = there
        return links


DEEPEST = 64
NVSWITCH_PCI_CLASS = "0x068000"  # bridge, other
SMALL_NUMBER = re.compile(r"[0-9]{1,9}")

Attributes = dict[str, str]


class Element(NamedTuple):
    """One XML element; the serial number tells equal ones apart."""

    serial: int
    name: str
    attributes: Attributes


class NvlinkElement(NamedTuple):
    """The NVLinks of a GPU to one far end."""

    gpu: int
    target: str  # bus id of the far end
    pci_class: str  # of the far end
    links: int
    line: int


def parse_topology_xml(text: str) -> Topology:
    """Return the topology of one dump.

    Raises UnreadableInput: broken XML, entities, missing or contradictory values; it names the
    line.
    """
    if len(text) > LARGEST_TOPOLOGY_BYTES:
        raise UnreadableInput(
            f"{len(text)} characters; expected a topology of at most {LARGEST_TOPOLOGY_BYTES}"
        )
    reader = _XmlReader()
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        raise UnreadableInput(f"line {error.lineno}: {reason}; expected whole XML") from None
    if not reader.gpus:
        raise UnreadableInput(
            "no <gpu dev=…> element; expected the file that NCCL_TOPO_DUMP_FILE names"
        )
    refuse_too_many(len(reader.gpus))
    ids = sorted(reader.gpus)
    links: dict[Pair, str] = {}
    everything: list[Device] = [*ids, *reader.nics]
    for a, b in combinations(everything, 2):
        path_a, path_b = reader.paths[a], reader.paths[b]
        shared = common_length(path_a, path_b)
        if not shared:
            word = "SYS"
        elif path_a[shared - 1].name == "cpu":
            word = "PHB"
        elif max(len(path_a), len(path_b)) - shared <= 1:
            word = "PIX"  # a path ends in the device's own pci element
        else:
            word = "PXB"  # what is before it is one more switch
        links[frozenset((a, b))] = word
    nvlinks, nvswitch = reader.nvlink_classes()
    devices = tuple(reader.gpus[index] for index in ids)
    return Topology(devices, tuple(reader.nics), links | nvlinks, nvswitch, "NCCL topology XML")


class _XmlReader:
    def __init__(self) -> None:
        self.gpus: dict[int, Gpu] = {}
        self.nics: list[str] = []
        self.paths: dict[Device, list[Element]] = {}  # the cpu and pci elements above
        self.lines: dict[int, int] = {}  # of the GPUs
        self.nvlinks: list[NvlinkElement] = []
        self._open: list[Element] = []
        self._count = 0
        self.parser = expat.ParserCreate()
        # NCCL writes none; they could be bombs.
        self.parser.StartDoctypeDeclHandler = self._refuse_declaration
        self.parser.EntityDeclHandler = self._refuse_declaration
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end

    def _refuse_declaration(self, *_: object) -> None:
        line = self.parser.CurrentLineNumber
        raise UnreadableInput(
            f"line {line}: a document type or entity declaration; NCCL writes none"
        )

    def _start(self, name: str, attributes: Attributes) -> None:
        line = self.parser.CurrentLineNumber
        if not self._open and name != "system":
            raise UnreadableInput(
                f"line {line}: the root element is {name!r}; expected NCCL's <system>"
            )
        if len(self._open) >= DEEPEST:
            raise UnreadableInput(f"line {line}: elements nested deeper than {DEEPEST}")
        path = [element for element in self._open if element.name in ("cpu", "pci")]
        if name == "gpu":
            index = _integer(name, attributes, "dev", 0, line)
            if index in self.gpus:
                raise UnreadableInput(
                    f"line {line}: a second <gpu dev={index}>, the first in line "
                    f"{self.lines[index]}; expected the dump of one machine"
                )
            self.gpus[index] = _gpu_at(index, attributes, path, line)
            self.paths[index], self.lines[index] = path, line
        elif name == "net" and attributes.get("name"):
            nic = attributes["name"]
            if nic not in self.paths:  # a NIC may have several ports
                self.nics.append(nic)
                self.paths[nic] = path
        elif name == "nvlink" and self._open[-1].name == "gpu":
            count = _integer(name, attributes, "count", 1, line)
            index = int(self._open[-1].attributes["dev"])
            target = attributes.get("target", "").strip().lower()
            pci_class = attributes.get("tclass", "")
            self.nvlinks.append(NvlinkElement(index, target, pci_class, count, line))
        self._count += 1
        self._open.append(Element(self._count, name, attributes))

    def _end(self, _: str) -> None:
        self._open.pop()

    def nvlink_classes(self) -> tuple[dict[Pair, str], bool]:
        """Return the NV# class of the pairs that NVLink joins, and whether links pass switches."""
        index_of_bus = {}
        for gpu in self.gpus.values():
            if gpu.bus_id:
                index_of_bus[gpu.bus_id] = gpu.index
        direct: Counter[tuple[int, int]] = Counter()
        lines: dict[tuple[int, int], int] = {}  # of the first element
        switched: Counter[int] = Counter()
        for nvlink in self.nvlinks:
            peer = index_of_bus.get(nvlink.target)
            if peer is not None and peer != nvlink.gpu:
                pair = nvlink.gpu, peer
                direct[pair] += nvlink.links
                lines.setdefault(pair, nvlink.line)
            elif nvlink.pci_class == NVSWITCH_PCI_CLASS:
                switched[nvlink.gpu] += nvlink.links
            # anything else ends in a CPU or in a GPU outside of the communicator
        links: dict[Pair, str] = {}
        for a, b in combinations(switched, 2):
            links[frozenset((a, b))] = f"NV{min(switched[a], switched[b])}"
        for (a, b), count in direct.items():
            back = direct[b, a]
            if back != count:
                raise UnreadableInput(
                    f"line {lines[a, b]}: {count} NVLinks from GPU {a} to GPU {b}, but {back} back "
                    f"(line {lines.get((b, a), lines[a, b])}); expected the same number both "
                    "ways"
                )
            links[frozenset((a, b))] = f"NV{count}"
        return links, bool(switched)


def _integer(element: str, attributes: Attributes, name: str, least: int, line: int) -> int:
    value = attributes.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,9}", value) or int(value) < least:
        raise UnreadableInput(
            f"line {line}: <{element}> has {name}={value!r}; expected a number from {least}"
        )
    return int(value)


def _gpu_at(index: int, attributes: Attributes, path: Sequence[Element], line: int) -> Gpu:
    parents = {element.name: element.attributes for element in path}  # the nearest of each name
    if "cpu" not in parents:
        raise UnreadableInput(f"line {line}: <gpu> outside of any <cpu>")
    cpu, sm = parents["cpu"], attributes.get("sm", "")
    numa, bus_id, gb_per_s = None, None, None
    mask = 0  # words of 32 bits, joined by commas, most significant first
    words = cpu.get("affinity", "")
    if re.fullmatch(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*", words):
        mask = int("".join(word.zfill(8) for word in words.split(",")), 16)
    if SMALL_NUMBER.fullmatch(cpu.get("numaid", "")):
        numa = cpu["numaid"]  # -1: not known
    if parents.get("pci"):
        bus_id = parents["pci"].get("busid", "").strip().lower()
    if SMALL_NUMBER.fullmatch(sm):
        gb_per_s = nvlink_gb_per_s(sm=int(sm))
    return Gpu(
        index=index,
        cpu_affinity=cpu_list(mask),
        numa_affinity=numa,
        bus_id=bus_id,
        nvlink_gb_per_s=gb_per_s,
    )
