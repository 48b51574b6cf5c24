"""The switches between hosts, and the classes of placements that they tell apart.

Slurm knows the tree of switches where `topology.conf` describes it; `scontrol show topology` prints it:

    SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[01-04]
    SwitchName=pod1 Level=1 LinkSpeed=1 Nodes=node[01-08] Switches=leaf[1-2]
    BlockName=b1 BlockIndex=0 Nodes=node[01-18] BlockSize=18                    of topology/block instead of topology/tree

(Slurm's topology guide, and `_print_topo_record` in src/plugins/topology.) Hosts under one switch of level 0, or in one block,
are NET-leaf, under one of level 1 NET-pod, further apart NET-other; where a host is under no known switch the link is NET.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, prod

from analysis.topology.link_classes import NET, NET_CLASSES
from analysis.topology.model import Topology

MOST_HOSTS = 1 << 17  # that a list of hosts may name: of more a text is damaged
MOST_SETS = 100_000  # of hosts that are sorted into classes
_LEAF, _POD, _OTHER, _ = NET_CLASSES


@dataclass(frozen=True)
class Switches:
    """The switches above each host: {host: {level: names}}."""

    above: Mapping[str, Mapping[int, frozenset[str]]]

    @staticmethod
    def read(text: str) -> "Switches":
        """Read what `scontrol show topology` prints; a line that says something else is passed over."""
        above: dict[str, dict[int, set[str]]] = {}
        for line in text.splitlines():
            said = dict(re.findall(r"(\w+)=(\S+)", line))
            name = said.get("SwitchName") or said.get("BlockName")
            level = re.fullmatch(
                r"[0-9]{1,4}", said.get("Level", "0" if "BlockName" in said else "")
            )
            if name is None or level is None:
                continue
            for host in hosts_of(said.get("Nodes", "")):
                above.setdefault(host, {}).setdefault(int(level[0]), set()).add(name)
        return Switches(
            {
                host: {level: frozenset(names) for level, names in own.items()}
                for host, own in above.items()
            }
        )


def between_hosts(switches: Switches, one: str, other: str) -> str:
    """Return the link class between two different hosts, a word of NET_CLASSES."""
    first, second = switches.above.get(one), switches.above.get(other)
    if not first or not second:
        return NET
    shared = [level for level, names in first.items() if names & second.get(level, frozenset())]
    return {0: _LEAF, 1: _POD}.get(min(shared), _OTHER) if shared else _OTHER


def hosts_of(text: str) -> list[str]:
    """Return the hosts that Slurm's list names: `node[01-03,7],gpu1` is node01, node02, node03, node7, gpu1.

    A list that names more than MOST_HOSTS, or is damaged, names none.
    """
    found: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        return found
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = [
            [*_numbers(inside)] if inside else [plain]
            for plain, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part)
        ]
        if len(found) + prod(map(len, pieces)) > MOST_HOSTS:
            return []
        found += ("".join(one) for one in product(*pieces))
    return found


def _numbers(inside: str) -> Iterator[str]:
    """Yield the numbers of `01-03,7` with their zeros."""
    for one in inside.split(","):
        ends = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", one)
        if ends and (last := int(ends[2] or ends[1])) - int(ends[1]) < MOST_HOSTS:
            yield from (f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), last + 1))


def rails(topology: Topology) -> dict[int, tuple[str, ...]]:
    """Return {GPU: the NICs that it reaches through PCIe switches alone}: what the GPU sends to other hosts goes through them."""
    near = ("PIX", "PXB")
    best = {
        gpu: [nic for nic in topology.nics if topology.link_between(gpu, nic) in near]
        for gpu in topology.gpus
    }
    # Of several the nearest: one behind the same switch before those behind several.
    pix = {
        gpu: [nic for nic in nics if topology.link_between(gpu, nic) == near[0]]
        for gpu, nics in best.items()
    }
    return {gpu: tuple(pix[gpu] or nics) for gpu, nics in best.items()}


@dataclass(frozen=True)
class PlacementClass:
    """Sets of hosts that nothing known tells apart: one of them stands for all."""

    representative: tuple[str, ...]  # in the order in which the hosts were given
    members: int
    links: Mapping[str, int]  # pairs of hosts by link class, best first


def placement_classes(
    hosts: Sequence[str], size: int, switches: Switches, kinds: Mapping[str, Hashable] | None = None
) -> list[PlacementClass]:
    """Return the classes of sets of `size` hosts: equal ones have as many pairs of each link class, and hosts of equal kinds.

    `kinds` says what the subset of GPUs with its NICs is on each host (analysis.topology.subsets.classes); without it all
    hosts are of one kind. Best links first. Raises ValueError for a size that there is not, or too many sets to sort.
    """
    if not 1 <= size <= len(hosts):
        raise ValueError(
            f"classes of {size} hosts: there are {len(hosts)}; accepted are 1 to {len(hosts)}"
        )
    groups: dict[Hashable, list[str]] = {}  # hosts under the same switches, of one kind, are alike
    for host in hosts:
        above = frozenset(switches.above.get(host, {}).items())
        groups.setdefault((above, (kinds or {}).get(host)), []).append(host)
    if comb(size + len(groups) - 1, size) > MOST_SETS:
        raise ValueError(
            f"classes of {size} of {len(hosts)} hosts under {len(groups)} switches are too many; name hosts"
        )
    alike: dict[Hashable, list[tuple[tuple[str, ...], int]]] = {}
    for counts in _shares(size, [len(group) for group in groups.values()]):
        taken = zip(groups.values(), counts, strict=True)
        chosen = sorted((host for group, many in taken for host in group[:many]), key=hosts.index)
        sets = prod(
            comb(len(group), many) for group, many in zip(groups.values(), counts, strict=True)
        )
        of_kinds = Counter((kinds or {}).get(host) for host in chosen)
        key = frozenset(_links(chosen, switches).items()), frozenset(of_kinds.items())
        alike.setdefault(key, []).append((tuple(chosen), sets))
    found = [
        PlacementClass(first, sum(sets for _, sets in same), _links(first, switches))
        for same in alike.values()
        for first in [
            min((one for one, _ in same), key=lambda one: [hosts.index(host) for host in one])
        ]
    ]
    return sorted(found, key=lambda one: [-one.links.get(word, 0) for word in NET_CLASSES])


def _links(hosts: Sequence[str], switches: Switches) -> dict[str, int]:
    counts = Counter(between_hosts(switches, one, other) for one, other in combinations(hosts, 2))
    return {word: counts[word] for word in NET_CLASSES if counts[word]}


def _shares(size: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to take `size` from groups that have at most so many each."""
    if not most:
        yield from [()] * (size == 0)
        return
    for first in range(min(size, most[0]), -1, -1):
        yield from ((first, *rest) for rest in _shares(size - first, most[1:]))
