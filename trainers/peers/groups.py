"""The groups of a cell's ranks: those of one host, which share its memory, and those that meet across hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainers.hosts import Hosts
from trainers.peers import told


@dataclass(frozen=True)
class Peers:
    """Ranks that share servers and memory: all ranks, those of one host, or one alone."""

    rank: int  # among them
    size: int
    group: dist.ProcessGroup | None = None  # None: all ranks

    def barrier(self) -> None:
        """Wait for all. Collective."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def from_rank_zero(self, text: str) -> str:
        """Return the first one's text. Collective.

        Raises:
            ValueError: what came is no text.
        """
        return told.by_first(text, self.group) if self.size > 1 else text


class HostGroups:
    """Two groups of a rank: `inside` has the ranks of its host, `rail` those with its place on every host.

    A group of one rank is None: it has nothing to do together. Every rank makes its own two only, in this order, so that making
    them takes as long on many hosts as on few.
    """

    def __init__(self, hosts: Hosts) -> None:
        """Make the groups. Collective."""
        rank = dist.get_rank()
        mine = hosts.ranks[hosts.host_of(rank)]
        self.place = mine.index(rank)  # on the host
        self.here, self.hosts = len(mine), len(hosts.ranks)
        self.inside = _group_of(mine)
        self.rail = _group_of([ranks[self.place] for ranks in hosts.ranks])

    def close(self) -> None:
        """Take the groups apart, after the last use on this rank."""
        for group in (self.inside, self.rail):
            if group is not None:
                dist.destroy_process_group(group)


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # else this rank would be none of them
    return group
