"""Link classes: the words `nvidia-smi topo -m` uses between two devices, their order and what they can carry.

A link class is NV# (# bonded NVLinks), PIX, PXB, PHB, NODE or SYS; between devices of different hosts it is NET, or where the
switches between these are known NET-leaf, NET-pod or NET-other (analysis.topology.fabric). Any other word is kept as it
stands and is *unknown*: it ranks after these and has no bandwidth. Bandwidths are GB/s (1e9 bytes) in ONE direction, before
protocol overhead.
Sources: the legend that nvidia-smi prints; NVIDIA's data sheets (NVLink 1 to 5); the PCI Express base specification.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import combinations

UNKNOWN = "N/A"  # what nvidia-smi prints where it does not know
PCIE_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")  # best first
NET = "NET"
NET_CLASSES = (f"{NET}-leaf", f"{NET}-pod", f"{NET}-other", NET)  # best first
_RENAMED = {"SOC": "SYS"}  # drivers before 2017 wrote SOC for a path between sockets
# Nominal GB/s of a class without known hardware, used to order rings only and never printed: a PCIe 3.0 x16 path is
# below one NVLink of the second generation, and each further hop is a little worse.
_ORDERING = {
    **{"PIX": 12.0, "PXB": 11.0, "PHB": 10.0, "NODE": 9.0, "SYS": 8.0},
    **{word: 5.0 - place for place, word in enumerate(NET_CLASSES)},
}
NVLINK_GB_PER_S = 25.0  # of one link per direction, where the GPU is not known
_ORDERING_UNKNOWN = 1.0

# GPU name -> GB/s per NVLink per direction, first match wins. GeForce and workstation boards of the Ampere generation
# clock the link at 14.0625 GB/s (112.5 GB/s over four links, both directions).
_NVLINK_BY_NAME = (
    (r"\bP100\b", 20.0),
    (r"\b(?:V100S?|GV100|TITAN V|TITAN RTX|RTX 2080|Quadro RTX)\b", 25.0),
    (r"\b(?:A40|A4500|A5000|A5500|A6000|RTX 3090)\b", 14.0625),
    (r"\b(?:A100|A800|A30)\b", 25.0),
    (r"\b(?:H100|H200|H800|H20|GH200)\b", 25.0),
    (r"\b(?:B100|B200|B300|GB200|GB300)\b", 50.0),
)
# CUDA compute capability x 10 (the `sm` of NCCL's XML) -> GB/s per NVLink; absent: no NVLink, or not known.
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


def current_word(word: str) -> str:
    """Return today's word for a class that older drivers named differently; every other word unchanged."""
    return _RENAMED.get(word, word)


def nvlink_count(word: str) -> int | None:
    """Return the number of bonded NVLinks of an NV# class; None for every other word (NV0 is not a class)."""
    match = re.fullmatch(r"NV([1-9][0-9]{0,3})", word)
    return int(match[1]) if match else None


def is_known(word: str) -> bool:
    """Tell whether the word is a link class."""
    return word in PCIE_CLASSES or word in NET_CLASSES or nvlink_count(word) is not None


def quality(word: str) -> float:
    """Return the ordering weight of a class: larger is better. It is not a measurement."""
    count = nvlink_count(word)
    return count * NVLINK_GB_PER_S if count is not None else _ORDERING.get(word, _ORDERING_UNKNOWN)


def best_first(words: Iterable[str]) -> list[str]:
    """Sort distinct link words: best class first, unknown words last in alphabetical order."""
    return sorted(set(words), key=lambda word: (-quality(word), word))


def distinct_classes(gpus: Iterable[int], links: Mapping[str, str]) -> str:
    """Join the distinct link classes inside a subset, best first: `NV18`, `NV2+SYS`; empty where none is known.

    `links` maps a pair of GPU ids, the smaller first, to its class: `{"0-1": "NV18"}`.
    """
    pairs = (f"{a}-{b}" for a, b in combinations(sorted(gpus), 2))
    return "+".join(best_first(links[pair] for pair in pairs if pair in links))


def describe_counts(counts: dict[str, int]) -> str:
    """Write counts of link classes as `3 x NV2 + 1 x NV1`, best class first."""
    return " + ".join(f"{counts[word]} x {word}" for word in best_first(counts))


def nvlink_gb_per_s(name: str | None = None, sm: int | None = None) -> float | None:
    """Return GB/s per NVLink and direction, by a GPU's product name or compute capability; None if not known."""
    for pattern, bandwidth in _NVLINK_BY_NAME:
        if name and re.search(pattern, name):
            return bandwidth
    return _NVLINK_BY_SM.get(sm) if sm is not None else None


def pcie_gb_per_s(gigatransfers: float, width: int) -> float | None:
    """Return GB/s per direction of a PCIe link of `width` lanes at `gigatransfers` GT/s a lane; None if it is off."""
    if gigatransfers <= 0 or width <= 0:
        return None
    if gigatransfers <= 5:  # generations 1 and 2 send 8 bits as 10
        code = 8 / 10
    elif gigatransfers <= 32:  # 3 to 5: 128 as 130
        code = 128 / 130
    else:  # 6: flits of 256 bytes with 242 of payload
        code = 242 / 256
    return gigatransfers * width * code / 8
