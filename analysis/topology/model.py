"""The topology of one machine: its GPUs and NICs and the link class between each two of them.

Every reader returns a `Topology`: `smi_text` for the text of `nvidia-smi topo -m`, `nccl_xml` for NCCL's dump, `nvml`
for this machine. What a source does not say is None. GPU ids are NVML's (PCI bus order). A NIC is known by its RDMA
device name. This module needs the standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from analysis.topology.link_classes import nvlink_count

Device = int | str  # a GPU id, or the name of a NIC
Pair = frozenset[Device]

_MOST_NVLINKS = (
    36  # of one GPU (NVML_NVLINK_MAX_LINKS); more than this in direct links is impossible
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Affinities are lists as printed ("0-19,40-59", "0"); bandwidths are GB/s per direction."""

    index: int
    cpu_affinity: str | None = None
    numa_affinity: str | None = None
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    nvlink_gb_per_s: float | None = None  # of one link
    pcie_gb_per_s: float | None = None


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
        raise ValueError(
            f"no GPU {index} in this topology, which has {', '.join(map(str, self.gpus)) or 'none'}"
        )

    def link_between(self, a: Device, b: Device) -> str:
        """Return the link class of two different devices; a word that is no class means the source does not know it.

        Raises ValueError for a pair that is not in the topology.
        """
        try:
            return self.links[frozenset((a, b))]
        except KeyError:
            known = ", ".join(map(str, (*self.gpus, *self.nics)))
            raise ValueError(
                f"no link between {a} and {b} in this topology, whose devices are {known}"
            ) from None

    def theoretical_gb_per_s(self, a: int, b: int) -> float | None:
        """Return the GB/s per direction that class and hardware allow between two GPUs; None if either is not known.

        NODE and SYS have none: the interconnect between host bridges and sockets is not part of the topology.
        """
        word, first, second = self.link_between(a, b), self.gpu(a), self.gpu(b)
        count = nvlink_count(word)
        if count is not None:
            if first.nvlink_gb_per_s is None or second.nvlink_gb_per_s is None:
                return None
            return count * min(first.nvlink_gb_per_s, second.nvlink_gb_per_s)
        if (
            word not in ("PIX", "PXB", "PHB")
            or first.pcie_gb_per_s is None
            or second.pcie_gb_per_s is None
        ):
            return None
        return min(first.pcie_gb_per_s, second.pcie_gb_per_s)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`: `{"gpus": [0, 1], "nics": ["mlx5_0"], "links": {"0-1": "NV18"}}`, GPU pairs only."""
        pairs = combinations(sorted(self.gpus), 2)
        return {
            "gpus": list(self.gpus),
            "nics": list(self.nics),
            "links": {f"{a}-{b}": self.link_between(a, b) for a, b in pairs},
        }


def infer_nvswitch(gpus: Iterable[int], links: Mapping[Pair, str]) -> bool | None:
    """Tell whether NVLinks must pass switches, from link counts alone.

    True when the direct links of one GPU would exceed what any GPU has; False when NVLink joins only some pairs or
    with different counts, which a switch never does; None when a direct mesh and a switch would look the same, and
    for one GPU.
    """
    ids = tuple(gpus)
    counts = {nvlink_count(links[frozenset(pair)]) for pair in combinations(ids, 2)}
    if len(counts) > 1 or counts == {None}:
        return False
    return (
        True if any(count and count * (len(ids) - 1) > _MOST_NVLINKS for count in counts) else None
    )
