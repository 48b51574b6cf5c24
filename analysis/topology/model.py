"""The topology of one machine: its GPUs and NICs, and the link class between each two of them.

A link class is a word of `nvidia-smi topo -m`: NV# (# bonded NVLinks), PIX, PXB, PHB, NODE or SYS;
between devices of different hosts it is NET. Any other word is kept as it stands: it ranks after
these and has no bandwidth. GPU ids are NVML's (PCI bus order), a NIC is known by its RDMA device
name. What a source does not say is None. Bandwidths are GB/s (1e9 bytes) in one direction, before
protocol overhead. This module imports the standard library only.

Sources: the legend that nvidia-smi prints; NVIDIA's data sheets (NVLink 1 to 5); the PCI Express
base specification.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Device = int | str  # a GPU id, or the name of a NIC
Pair = frozenset[Device]

UNKNOWN = "N/A"  # what nvidia-smi prints where it does not know
NET = "NET"
PCIE_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")  # best first
NVLINK_GB_PER_S = 25.0  # of one link, where the GPU is not known
# Weights that order classes; they are not measured and never printed. A PCIe 3.0 x16 path is below
# one NVLink of the second generation, and each further hop is a little worse.
_WEIGHTS = {"PIX": 12.0, "PXB": 11.0, "PHB": 10.0, "NODE": 9.0, "SYS": 8.0, NET: 2.0}
_UNKNOWN_WEIGHT = 1.0
_MOST_NVLINKS = 36  # of one GPU (NVML_NVLINK_MAX_LINKS)

# GPU name -> GB/s of one NVLink; the first match counts. GeForce and workstation boards of the
# Ampere generation clock the link at 14.0625 GB/s (112.5 GB/s over four links, both directions).
_NVLINK_BY_NAME = (
    (r"\bP100\b", 20.0),
    (r"\b(?:V100S?|GV100|TITAN V|TITAN RTX|RTX 2080|Quadro RTX)\b", 25.0),
    (r"\b(?:A40|A4500|A5000|A5500|A6000|RTX 3090)\b", 14.0625),
    (r"\b(?:A100|A800|A30)\b", 25.0),
    (r"\b(?:H100|H200|H800|H20|GH200)\b", 25.0),
    (r"\b(?:B100|B200|B300|GB200|GB300)\b", 50.0),
)
# CUDA compute capability x 10 (the `sm` of NCCL's XML) -> GB/s of one NVLink
_NVLINK_BY_SM = {
    60: 20.0,
    70: 25.0,
    75: 25.0,
    80: 25.0,
    86: 14.0625,
    90: 25.0,
    100: 50.0,
    103: 50.0,
}


def nvlink_count(word: str) -> int | None:
    """Return the number of bonded NVLinks of an NV# class; None for every other word."""
    match = re.fullmatch(r"NV([1-9][0-9]{0,3})", word)
    return int(match[1]) if match else None


def is_known(word: str) -> bool:
    """Tell whether the word is a link class."""
    return word in PCIE_CLASSES or word == NET or nvlink_count(word) is not None


def quality(word: str) -> float:
    """Return the weight that orders a class: larger is better. It is not a measurement."""
    count = nvlink_count(word)
    if count is not None:
        return count * NVLINK_GB_PER_S
    return _WEIGHTS.get(word, _UNKNOWN_WEIGHT)


def best_first(words: Iterable[str]) -> list[str]:
    """Return the distinct words: best class first, unknown words last in alphabetical order."""
    return sorted(set(words), key=lambda word: (-quality(word), word))


def count_classes(words: Iterable[str]) -> dict[str, int]:
    """Return how often each link class occurs, best class first."""
    words = list(words)
    return {word: words.count(word) for word in best_first(words)}


def describe_counts(counts: Mapping[str, int]) -> str:
    """Write counts of link classes as `3 x NV2 + 1 x NV1`, best class first."""
    return " + ".join(f"{counts[word]} x {word}" for word in best_first(counts))


def distinct_classes(gpus: Iterable[int], links: Mapping[str, str]) -> str:
    """Join the distinct link classes inside a subset, best first: `NV18`, `NV2+SYS`.

    Empty where none is known. `links` maps a pair of GPU ids, the smaller first, to its class:
    `{"0-1": "NV18"}`.
    """
    words = []
    for a, b in combinations(sorted(gpus), 2):
        if f"{a}-{b}" in links:
            words.append(links[f"{a}-{b}"])
    return "+".join(best_first(words))


def nvlink_gb_per_s(name: str | None = None, sm: int | None = None) -> float | None:
    """Return GB/s of one NVLink by a GPU's product name or compute capability, None if unknown."""
    for pattern, bandwidth in _NVLINK_BY_NAME:
        if name and re.search(pattern, name):
            return bandwidth
    return None if sm is None else _NVLINK_BY_SM.get(sm)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Affinities are lists as printed ("0-19,40-59", "0"); bandwidths are GB/s."""

    index: int
    cpu_affinity: str | None = None
    numa_affinity: str | None = None
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    nvlink_gb_per_s: float | None = None  # of one link


@dataclass(frozen=True)
class Topology:
    """The devices of one machine and the link class of every unordered pair of them."""

    devices: tuple[Gpu, ...]
    nics: tuple[str, ...]
    links: Mapping[Pair, str]
    nvswitch: bool | None  # GPUs meet in NVSwitches; None where the source cannot tell
    source: str = field(compare=False)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return GPU ids in the order of the source."""
        return tuple(gpu.index for gpu in self.devices)

    def gpu(self, index: int) -> Gpu:
        """Return the GPU with this id. Raises ValueError if the machine has none."""
        for gpu in self.devices:
            if gpu.index == index:
                return gpu
        ids = ", ".join(map(str, self.gpus)) or "none"
        raise ValueError(f"no GPU {index} in this topology, which has {ids}")

    def link_between(self, a: Device, b: Device) -> str:
        """Return the link class of two different devices. Raises ValueError for an unknown pair."""
        try:
            return self.links[frozenset((a, b))]
        except KeyError:
            devices = ", ".join(map(str, (*self.gpus, *self.nics)))
            raise ValueError(
                f"no link between {a} and {b} in this topology, whose devices are {devices}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Return `{"gpus": [0, 1], "nics": ["nic0"], "links": {"0-1": "NV18"}}`, GPU pairs only."""
        links = {}
        for a, b in combinations(sorted(self.gpus), 2):
            links[f"{a}-{b}"] = self.link_between(a, b)
        return {"gpus": list(self.gpus), "nics": list(self.nics), "links": links}


def infer_nvswitch(gpus: Iterable[int], links: Mapping[Pair, str]) -> bool | None:
    """Tell from link counts alone whether NVLinks pass switches.

    True when the direct links of one GPU would exceed what any GPU has; False when NVLink joins
    only some pairs or with different counts, which a switch never does; None when a direct mesh and
    a switch would look the same, and for one GPU.
    """
    ids = list(gpus)
    counts = {nvlink_count(links[frozenset(pair)]) for pair in combinations(ids, 2)}
    if len(counts) > 1 or counts == {None}:
        return False
    for count in counts:
        if count and count * (len(ids) - 1) > _MOST_NVLINKS:
            return True
    return None
