"""Where the processes of a cell meet: torch's static rendezvous, at one address of the first host.

torchrun's own rendezvous listens on every interface. This one binds a free port of one address and hands the socket to torch's
store: nothing else reaches it, and two cells never want the same port. On one machine the address is that of loopback.
"""

import datetime
import socket
from dataclasses import dataclass

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 600  # of a rank that waits in the store for another, while all import and connect


@dataclass(frozen=True)
class MeetingPlace:
    """Where the hosts of a cell meet, and which of them this one is."""

    address: str = LOOPBACK  # of the first host
    port: int = 0  # there; the first host itself binds a free one
    host: int = 0
    hosts: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this host is where they meet."""
        return self.host == 0


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of one address of this host. Raises OSError."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listening.bind((address, 0))
    listening.listen(socket.SOMAXCONN)
    return listening


class OneAddress(StaticTCPRendezvous):
    """torch's static rendezvous, on a socket that we bound."""

    def __init__(self, run_id: str, meeting: MeetingPlace, listening: socket.socket | None) -> None:
        """`listening` is the socket of the first host."""
        super().__init__(meeting.address, meeting.port, meeting.host, meeting.hosts, run_id, TIMEOUT_SECONDS)
        self._meeting, self._listening = meeting, listening

    def get_backend(self) -> str:
        """Return its name, as torch's log has it."""
        return "one address"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the ranks, which is made once."""
        if self._store is None:
            if self._listening:
                self.master_port = self._listening.getsockname()[1]
            self._store = TCPStore(
                self._meeting.address,
                self.master_port,
                self._meeting.hosts,
                self._meeting.is_first,
                datetime.timedelta(seconds=TIMEOUT_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=self._listening.detach() if self._listening else None,
            )
        store = PrefixStore(self.run_id, self._store)
        info = RendezvousStoreInfo(self._meeting.address, self.master_port)
        return RendezvousInfo(store, self._meeting.host, self._meeting.hosts, info)


def of(run_id: str, meeting: MeetingPlace, listening: socket.socket | None = None) -> OneAddress:
    """Return the rendezvous of one agent's ranks; the first host binds its socket here if it has none yet. Raises OSError."""
    return OneAddress(run_id, meeting, listening or (listen(meeting.address) if meeting.is_first else None))
