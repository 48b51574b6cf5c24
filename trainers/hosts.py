"""Where the ranks and the servers of a cell are: which of them share a host, and with it memory and links."""

from dataclasses import dataclass

from conf.cell import Cell


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cell by number. One host is the usual case."""

    ranks: tuple[
        tuple[int, ...], ...
    ]  # of each host; every host has as many, and their numbers are consecutive
    server_hosts: tuple[
        int, ...
    ] = ()  # the host of each server; a number behind those of `ranks` has servers only

    @staticmethod
    def of(cell: Cell) -> "Hosts":
        """Return the hosts of a cell."""
        here = len(cell.gpus)
        ranks = tuple(
            tuple(range(host * here, (host + 1) * here)) for host in range(max(1, len(cell.hosts)))
        )
        numbers = {host: number for number, host in enumerate(cell.every_host or ("",))}
        return Hosts(
            ranks, tuple(numbers[place.host] for place in cell.places if place.kind == "server")
        )

    @property
    def several(self) -> bool:
        """Whether ranks, or ranks and servers, are on different hosts."""
        return len(self.ranks) > 1 or any(self.server_hosts)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // len(self.ranks[0])
