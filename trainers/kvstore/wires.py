"""How a worker and a server on different hosts are connected: by gloo, and their GPUs by NCCL.

Each such pair has a group of its own over gloo: no pair waits for another, and one that breaks
breaks no other. A receiver names its memory before the data comes, so gloo writes it there at once,
and buckets are under way in both directions at the same time. gloo listens on the interfaces of
GLOO_SOCKET_IFNAME only, and opens a connection for each name in that list; tags take turns on them.
"""

import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, Work  # type: ignore[attr-defined]

# The supervisor ends what hangs; this ends what has no supervisor any more.
TIMEOUT = datetime.timedelta(hours=2)
WORKER, SERVER = 0, 1  # ranks in a pair's group
IFNAME, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
# After a failure: the main thread has this long to say it in its own words.
LAST_WORDS_SECONDS = 2.0


def rendezvous_store() -> PrefixStore:
    """Return the store where the cell's processes met (torchrun's variables)."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("ringside/kvstore", TCPStore(address, port, is_master=False))


class Guarded(threading.Thread):
    """A thread whose error `check` raises again; without a check the error ends the process."""

    def __init__(self, what: str, work: Callable[[], object]) -> None:
        """`what` is what failed if the thread raises: `the connection of …`."""
        super().__init__(daemon=True)
        self._what, self._work, self._error = what, work, ""

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        except BaseException as error:
            traceback.print_exc()  # to the rank's log
            self._error = f"{self._what} failed: {error}"
            time.sleep(LAST_WORDS_SECONDS)
            os._exit(1)  # the main thread waits for a GPU, which waits for us

    def check(self) -> None:
        """Raises RuntimeError: the thread has failed."""
        if self._error:
            raise RuntimeError(self._error)


class Wire:
    """The messages of a worker and a server, as one of them sees them.

    The tag of a bucket's gradient and of the reply is the bucket's number.
    """

    def __init__(self, store: Store, worker: int, server: int, me: int, buckets: int) -> None:
        """Meet the peer in the store. `me` is WORKER or SERVER; `buckets` are those of all servers.

        Raises RuntimeError: it does not come.
        """
        self.request_tag = buckets  # requests; a server's answers to COUNT and STOP
        self._farewell_tag = buckets + 1
        self.weights_tag = buckets + 2  # of the first weights of bucket 0
        self.name = f"the connection of worker {worker} and server {server}"
        os.environ.setdefault(IFNAME, LOOPBACK)  # gloo alone would choose by the host's name
        own_store = PrefixStore(f"{worker}-{server}", store)
        self._group: Any = torch.distributed.ProcessGroupGloo(own_store, me, 2, TIMEOUT)
        self._peer = 1 - me
        # gloo does not wake who waits for a message of which a part has come when the peer ends.
        # This it often wakes; the supervisor, which sees the end of every process, ends the cell in
        # any case.
        farewell = self.receive(torch.zeros(1), self._farewell_tag)
        self.watch = Guarded(self.name, farewell.wait)
        self.watch.start()

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send a tensor (elements,), which stays as it is until the work is done."""
        work: Work = self._group.send([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Begin to receive into a tensor (elements,)."""
        work: Work = self._group.recv([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def part(self) -> None:
        """Say farewell, and wait for the peer's."""
        self.send(torch.zeros(1), self._farewell_tag).wait()
        self.watch.join()


class GpuWire:
    """NCCL's communicators of a worker and a server. Calls are ordered on the current stream."""

    def __init__(self, store: Store, worker: int, server: int, me: int) -> None:
        """Connect on the current GPU. `me` is WORKER or SERVER.

        Raises RuntimeError: NCCL cannot connect the two.
        """
        self._me, self._peer = me, 1 - me
        nccl: Any = torch.distributed.ProcessGroupNCCL
        self._groups = {}  # by who sends
        for sender in (WORKER, SERVER):
            own_store = PrefixStore(f"{worker}-{server}-from-{sender}", store)
            self._groups[sender] = nccl(own_store, me, 2, TIMEOUT)
        first = torch.zeros(1, device="cuda")
        for sender in (WORKER, SERVER):  # NCCL connects in the first call
            if sender == me:
                self.send(first)
            else:
                self.receive(first)
        torch.cuda.synchronize()

    def send(self, tensor: Tensor) -> None:
        """Enqueue the sending behind the current stream, which does not wait for its end."""
        self._groups[self._me].send([tensor.view(torch.uint8)], self._peer, 0)

    def receive(self, tensor: Tensor) -> None:
        """Make the current stream receive a tensor (elements,)."""
        self._groups[self._peer].recv([tensor.view(torch.uint8)], self._peer, 0).wait()

    def close(self) -> None:
        """Take the communicators apart. Nothing is under way."""
        torch.cuda.synchronize()
        for group in self._groups.values():
            group.abort()  # needs nothing from the peer
