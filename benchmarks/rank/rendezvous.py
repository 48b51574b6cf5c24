"""Where the ranks of a cell meet: torch's static rendezvous of one node, on the loopback interface.

torchrun's own rendezvous listens on every interface. This one binds a free port of the loopback interface and hands the
socket to torch's store: nothing outside reaches it, and two cells never want the same port.
"""

import datetime
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 600  # of a rank that waits in the store for another, while all import and connect


class LoopbackRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous of one node, on a socket that we bound."""

    def get_backend(self) -> str:
        """Return its name, as torch's log has it."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the ranks, which is made once."""
        if self._store is None:
            listening = socket.socket()
            listening.bind((LOOPBACK, 0))
            listening.listen()
            self.master_port = listening.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                self.master_port,
                1,
                True,
                datetime.timedelta(seconds=TIMEOUT_SECONDS),
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.master_port))


def of(run_id: str) -> LoopbackRendezvous:
    """Return the rendezvous of one agent's ranks."""
    return LoopbackRendezvous(LOOPBACK, 0, 0, 1, run_id, TIMEOUT_SECONDS)
