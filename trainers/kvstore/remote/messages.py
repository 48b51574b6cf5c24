"""The connection of one worker and one server on different hosts.

Each such pair has a group of its own over gloo: no pair waits for another, and one that breaks breaks no other. A bucket has
a tag of its own in each direction. A receiver names its memory before the data comes, so gloo writes it there at once, and
buckets are under way in both directions at the same time. gloo listens on the interfaces of GLOO_SOCKET_IFNAME only, and
opens a connection for each name in that list; tags take turns on them.
"""

import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from trainers.optimizers import SETTINGS

# The supervisor ends what hangs; this ends what has no supervisor any more.
TIMEOUT = datetime.timedelta(hours=2)
WORKER, SERVER = 0, 1  # ranks in a pair's group
IFNAME, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
NO_SETTINGS = (0.0,) * (1 + SETTINGS)  # a row of Control.settings
COUNTS = 3  # what a server answers to COUNT and STOP: its updates, sum and maximum of their staleness
# After a failure: the main thread has this long to say it in its own words.
LAST_WORDS_SECONDS = 2.0


class Demand(IntEnum):
    """What a worker asks a server to do."""

    PUSH = 0  # take the gradient of a bucket that follows, and answer with weights or the mean
    PROBE = 1  # send a bucket back as it came
    WEIGHTS = 2  # take the first weights of a bucket
    COUNT = 3  # tell the staleness
    STOP = 4  # this worker is done


@dataclass(frozen=True)
class Tags:
    """Tags of the messages of a pair, in both directions; that of a bucket's gradient and reply is the bucket's number."""

    buckets: int

    @property
    def request(self) -> int:
        """What a worker asks; a server's answer to COUNT and STOP."""
        return self.buckets

    @property
    def farewell(self) -> int:
        """What each says when it is done with the other."""
        return self.buckets + 1

    def weights(self, bucket: int) -> int:
        """First weights of a bucket."""
        return self.buckets + 2 + bucket


class Wire:
    """The messages of a worker and a server, as one of them sees them."""

    def __init__(self, store: Store, worker: int, server: int, me: int, buckets: int) -> None:
        """Meet the other one in the store. `me` is WORKER or SERVER; `buckets` are those of all servers.

        Raises:
            RuntimeError: it does not come.
        """
        self.tags = Tags(buckets)
        self.name = f"the connection of worker {worker} and server {server}"
        os.environ.setdefault(IFNAME, LOOPBACK)  # gloo alone would choose by the host's name
        self._group: Any = ProcessGroupGloo(PrefixStore(f"{worker}-{server}", store), me, 2, TIMEOUT)
        self._peer = 1 - me
        # gloo does not wake who waits for a message of which a part has come when the other side ends. This it often wakes; the
        # supervisor, which sees the end of every process, ends the cell in any case.
        self._watch = Guarded(self.name, self.receive(torch.zeros(1), self.tags.farewell).wait)
        self._watch.start()

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send a tensor (elements,), which stays as it is until the work is done. Waits for nothing."""
        work: Work = self._group.send([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Begin to receive into a tensor (elements,)."""
        work: Work = self._group.recv([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._watch.check()

    def part(self) -> None:
        """Say farewell, and wait for the other's."""
        self.send(torch.zeros(1), self.tags.farewell).wait()
        self._watch.join()


class Guarded:
    """A thread that waits for messages. What it raises, `check` raises again; without a check it ends the process."""

    def __init__(self, what: str, work: Callable[[], object]) -> None:
        """`what` is what failed if the thread raises: `the connection of …`."""
        self._what, self._work, self._error = what, work, ""
        self._thread = threading.Thread(target=self._guard, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def check(self) -> None:
        """Raises RuntimeError: the thread has failed."""
        if self._error:
            raise RuntimeError(self._error)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _guard(self) -> None:
        try:
            self._work()
        except BaseException as error:
            traceback.print_exc()  # to the rank's log
            self._error = f"{self._what} failed: {error}"
            time.sleep(LAST_WORDS_SECONDS)
            os._exit(1)  # the main thread waits for a GPU, which waits for us
