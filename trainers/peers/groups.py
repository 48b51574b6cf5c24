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

    `rail` is None where there is one host. It is never torch's group of all ranks: a server's thread may use it while the rank
    uses that. Every rank makes its own groups only, so that this takes as long on many hosts as on few.
    """

    def __init__(self, hosts: Hosts) -> None:
        """Make the groups. Collective."""
        rank = dist.get_rank()
        mine = hosts.ranks[hosts.host_of(rank)]
        self.place = mine.index(rank)  # on the host
        self.here, self.hosts = len(mine), len(hosts.ranks)
        self._made: list[dist.ProcessGroup] = []
        self.inside = self._group_of(mine) if self.hosts > 1 else dist.group.WORLD
        self.rail = self._group_of([ranks[self.place] for ranks in hosts.ranks]) if self.hosts > 1 else None

    @staticmethod
    def across(hosts: Hosts) -> "HostGroups | None":
        """Return the groups of ranks on several hosts; None where all are on one. Collective."""
        return HostGroups(hosts) if len(hosts.ranks) > 1 else None

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # else this rank would be none of them
        self._made.append(group)
        return group

    def peers(self) -> Peers:
        """Return the ranks of this host as peers."""
        return Peers(self.place, self.here, self.inside)

    def close(self) -> None:
        """Take the groups apart, after the last use on this rank."""
        for group in self._made:
            dist.destroy_process_group(group)
