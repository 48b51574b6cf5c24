"""Which ranks and servers of a cell share a host, and with it memory and links."""

from dataclasses import dataclass

from conf.cell import Cell


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cell by number. One host is the usual case."""

    # Of each host; every host has as many, and their numbers are consecutive.
    ranks: tuple[tuple[int, ...], ...]
    # The host of each server; a number behind those of `ranks` has servers only.
    server_hosts: tuple[int, ...] = ()

    @staticmethod
    def of(cell: Cell) -> "Hosts":
        """Return the hosts of a cell."""
        here = len(cell.gpus)
        ranks = []
        for host in range(max(1, len(cell.hosts))):
            ranks.append(tuple(range(host * here, (host + 1) * here)))
        names = list(cell.every_host or ("",))
        servers = [names.index(own.host) for own in cell.places if own.kind == "server"]
        return Hosts(tuple(ranks), tuple(servers))

    @property
    def several(self) -> bool:
        """Whether ranks, or ranks and servers, are on different hosts."""
        return len(self.ranks) > 1 or any(self.server_hosts)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // len(self.ranks[0])
