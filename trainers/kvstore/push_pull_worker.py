"""A worker's side of the servers: gradients go out bucket by bucket, weights (or the mean) return.

On a GPU, copies and flags are enqueued on streams of their own, so that neither the host nor the
device waits inside backward. A CPU worker's buffers are the shared memory itself.
"""

import functools
import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainers import memory
from trainers.collectives import HostGroups, Peers, broadcast_json
from trainers.kvstore import server_process
from trainers.kvstore.remote import Demand, RemoteServer
from trainers.kvstore.server import (
    PAUSE_SECONDS,
    SPARE_CORES,
    Arithmetic,
    CpuArithmetic,
    HostMeans,
    Server,
    thread_count,
)
from trainers.kvstore.shared_memory import (
    FLAG_BYTES,
    MAPPED,
    READY,
    REDUCE,
    UPDATE,
    KvstoreConfig,
    SharedMapping,
    address_of,
    path_on,
    views,
)
from trainers.kvstore.wires import Guarded, rendezvous_store
from trainers.process import on_threads, sleep_precisely


class Worker:
    """One worker among its peers.

    `sent`, `weights` and `means` hold a flat tensor (elements,) for each bucket: the gradient
    before it is pushed, and the two kinds of reply.
    """

    def __init__(
        self,
        config: KvstoreConfig,
        peers: Peers,
        device: torch.device,
        threads: int | str,
        host: HostGroups | None = None,
    ) -> None:
        """Map the shared memory and meet the servers. Collective over the peers and over `host`.

        Raises OSError: not enough shared memory.
        """
        self.config, self.peers, self.device, self._host = config, peers, device, host
        self.layout, self.on_gpu = config.layout(), device.type == "cuda"
        # Where servers are processes, their threads sum; ours then only measure the memory.
        sharers = host.here if host else dist.get_world_size()
        self.threads = thread_count(threads, sharers, SPARE_CORES if self.on_gpu else 0)
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._number = 0  # of the last exchange that was waited for
        self._only_gradients = False
        self._host_number = config.places.host_of(peers.rank)
        first_rank = config.places.ranks[self._host_number][0]
        name = memory.new_path().name
        if peers.size > 1:
            name = broadcast_json(name, peers.group)
        announced = memory.named(name)
        path = path_on(announced, config, self._host_number)
        is_first = peers.rank == first_rank  # of this host
        if not is_first:
            peers.barrier()
        self.shared = SharedMapping(path, config, self.layout, is_first, self._host_number)
        if is_first:
            peers.barrier()
        self._control = self.shared.control
        if self.on_gpu:
            self._make_gpu_buffers()
        if config.servers and peers.rank == 0:
            server_process.announce(announced, config)
        self._meet(MAPPED)
        if is_first:
            path.unlink()
        self.remote_servers: list[RemoteServer] = []
        self.remote: dict[int, RemoteServer] = {}  # by bucket
        for index, server_host in enumerate(config.places.server_hosts):
            if server_host != self._host_number:
                store = rendezvous_store()
                server = RemoteServer(store, peers.rank, index, config, self.layout)
                self.remote_servers.append(server)
                self.remote |= dict.fromkeys(server.buckets, server)
        regions = self.shared.regions
        if regions is not None:
            self.sent_on_host = regions.pushed[peers.rank]
            replies = regions.replies_to(peers.rank, config, self.remote)
            self.means_on_host, self.weights_on_host = replies
        if self.on_gpu:
            self._find_addresses()
        else:
            self.sent = self.sent_on_host
            self.means, self.weights = replies
        # Buckets that a GPU copies to host memory, and that a thread then sends to another host.
        self._copied: queue.SimpleQueue[tuple[int, int, bool]] = queue.SimpleQueue()
        if self.on_gpu and self.remote and not config.server_gpu:
            Guarded("sending what a GPU has copied", self._send_copied).start()

    def begin(self, weights: Sequence[Tensor], settings: tuple[float, ...]) -> None:
        """Give the servers rank 0's weights, and start this worker's own server. Collective.

        `weights` are a flat tensor for each bucket, `settings` those of this worker's pushes
        (trainers.optimizers.settings).
        """
        self._control.settings[self.peers.rank, 1:] = settings
        if self.peers.rank == 0:
            for bucket, flat in enumerate(weights):
                if bucket in self.remote:
                    self.remote[bucket].give_weights(bucket, flat.cpu())
                elif self.on_gpu:
                    self.pushing.stream.wait_stream(torch.cuda.current_stream())
                    self.pushing.copy(self._weights_at[bucket], flat.data_ptr(), flat.nbytes)
                    self.pushing.stream.synchronize()
                else:
                    assert self.shared.regions is not None
                    self.shared.regions.weights[bucket].copy_(flat)
        self._remote_counts()  # the servers answer when they have the weights
        if not self.config.servers:
            self._start_own_server()
        self._meet(READY)
        if self.config.places.several:
            self.peers.barrier()  # until the servers on other hosts have the weights

    def set_reply(self, only_gradients: bool) -> None:
        """Choose the replies to later pushes: weights, or the mean. No exchange is under way."""
        self._only_gradients = only_gradients
        self._control.settings[self.peers.rank, 0] = REDUCE if only_gradients else UPDATE

    def _meet(self, stage: int) -> None:
        """Say that this worker has reached a stage; wait for all processes of this host."""
        self._control.attached[self.peers.rank] = stage
        everyone = self.config.processes_on(self._host_number)
        while (self._control.attached[everyone] < stage).any():
            time.sleep(PAUSE_SECONDS["cpu"])

    def _make_gpu_buffers(self) -> None:
        layout = self.layout
        memory.page_lock(self.shared.address, len(self.shared.bytes))
        self.staging = torch.zeros(layout.push_bytes, dtype=torch.uint8, device=self.device)
        if self.config.server_gpu:
            self._inbox = memory.GpuMemory(layout.pull_bytes, self.device)
            self._control.handles[self.peers.rank] = list(memory.exported(self._inbox))
            inbox = self._inbox.bytes
        else:
            inbox = torch.zeros(layout.pull_bytes, dtype=torch.uint8, device=self.device)
        self.sent = views(self.staging, layout, in_weight_dtype=False, push=True)
        self.means = views(inbox, layout, in_weight_dtype=False)
        self.weights = views(inbox, layout, in_weight_dtype=True)
        self.pushing = memory.CopyStream(torch.cuda.Stream())
        self.pulling = memory.CopyStream(torch.cuda.Stream())
        self._staged = [torch.cuda.Event() for _ in layout.buckets]
        self._fetched = [torch.cuda.Event() for _ in layout.buckets]
        # Of exchanges with even and odd numbers.
        self._all_fetched = [torch.cuda.Event(), torch.cuda.Event()]

    def _find_addresses(self) -> None:
        """Find the addresses, as this GPU sees them, of flags, of targets and of replies."""
        shared, rank, layout = self.shared, self.peers.rank, self.layout
        offset = memory.device_address(shared.address) - shared.address
        self._push_flag = address_of(self._control.pushed[rank]) + offset
        self._done_flag = address_of(self._control.done[rank]) + offset
        if not self.config.server_gpu:
            assert shared.regions is not None
            self.push_to = [view.data_ptr() + offset for view in self.sent_on_host]
            self._weights_at = [view.data_ptr() + offset for view in shared.regions.weights]
            self.means_from = [view.data_ptr() + offset for view in self.means_on_host]
            self._weights_from = [view.data_ptr() + offset for view in self.weights_on_host]
            return
        # Of a server's regions, which have gradients of every worker (Regions).
        pushed_start = layout.pull_bytes * (1 + self.config.reply_copies) + layout.push_bytes * rank
        bases: dict[int, int] = {}
        self.push_to, self._weights_at = [], []
        for index, bucket in enumerate(layout.buckets):
            if index in self.remote:  # nothing is copied to it
                self.push_to.append(0)
                self._weights_at.append(0)
                continue
            if bucket.server not in bases:
                handle = self._control.handles[self.config.workers + bucket.server]
                bases[bucket.server] = memory.imported(handle.tobytes())
            base = bases[bucket.server]
            self.push_to.append(base + pushed_start + bucket.push_offset)
            self._weights_at.append(base + bucket.pull_offset)

    def _start_own_server(self) -> None:
        """Start this worker's own server.

        Next to a GPU it is a thread that waits for pushes, with others that sum. A CPU worker
        serves while it waits for replies: a thread would take the core that computes.
        """
        shared, rank = self.shared, self.peers.rank
        arithmetic: Arithmetic
        if self._host and self._host.rail:
            arithmetic = HostMeans(shared, rank, self._host.rail)
        else:
            arithmetic = CpuArithmetic(shared, shared.regions, rank)
        self._server = Server(arithmetic, rank)
        if self.on_gpu:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        assert self._server is not None
        try:
            torch.set_num_threads(self.threads)  # of this thread; the process is near its GPU
            stop = self._control.stop
            self._server.run(lambda: bool(stop[0]), lambda served: None, PAUSE_SECONDS["cuda"])
        except BaseException:
            traceback.print_exc()  # to the rank's log
            os._exit(1)  # nothing else would notice, and every worker would wait

    # An exchange.

    def push(self, bucket: int, after_reply: bool = False) -> None:
        """Send `sent[bucket]`, and have the reply fetched once it is there. Inside backward, too.

        `after_reply` (on a GPU): not before the reply to the last push of the bucket is here.
        """
        exchange = self._number + 1
        if not self.on_gpu:
            if bucket in self.remote:
                self._push_remote(bucket, exchange, self._only_gradients)
            else:
                self._control.pushed[self.peers.rank, bucket] = exchange
            return
        sent, pushing, pulling = self.sent[bucket], self.pushing, self.pulling
        reply = (self.means if self._only_gradients else self.weights)[bucket]
        self._staged[bucket].record()
        pushing.stream.wait_event(self._staged[bucket])
        if after_reply:
            pushing.stream.wait_event(self._fetched[bucket])
        if bucket in self.remote and self.config.server_gpu:
            server, settings = self.remote[bucket], self._settings(self._only_gradients)
            received = server.exchange_on_gpu(
                Demand.PUSH, bucket, sent, reply, settings, pushing.stream
            )
            pulling.stream.wait_stream(received)
        else:
            pushing.copy(self.push_to[bucket], sent.data_ptr(), sent.nbytes)
            pushing.write_flag(self._push_flag + FLAG_BYTES * bucket, exchange)
            if bucket in self.remote:
                self._copied.put((bucket, exchange, self._only_gradients))
            pulling.wait_flag(self._done_flag + FLAG_BYTES * bucket, exchange)
            if not self.config.server_gpu:  # such a server writes into our memory itself
                sources = self.means_from if self._only_gradients else self._weights_from
                pulling.copy(reply.data_ptr(), sources[bucket], reply.nbytes)
        self._fetched[bucket].record(pulling.stream)

    def _send_copied(self) -> None:
        """Send buckets to other hosts once a GPU has copied them. A flag in host memory says when.

        This thread makes no call of CUDA's. Such a call waits while backward waits for room in a
        full queue of the GPU, and the room may only come after what is sent here: two H200s stood
        still so.
        """
        sleep_precisely()
        flags = self._control.pushed[self.peers.rank]
        while True:
            bucket, exchange, only_gradients = self._copied.get()
            while flags[bucket] < exchange:
                time.sleep(PAUSE_SECONDS["cuda"])
            self._push_remote(bucket, exchange, only_gradients)

    def _push_remote(self, bucket: int, exchange: int, only_gradients: bool) -> None:
        """Send a bucket in host memory to another host; a flag says when the reply is there."""
        reply = (self.means_on_host if only_gradients else self.weights_on_host)[bucket]
        arrived = functools.partial(
            self._control.done[self.peers.rank].__setitem__, bucket, exchange
        )
        sent, settings = self.sent_on_host[bucket], self._settings(only_gradients)
        self.remote[bucket].push(Demand.PUSH, bucket, sent, reply, arrived, settings)

    def _settings(self, only_gradients: bool) -> list[float]:
        mode = REDUCE if only_gradients else UPDATE
        return [mode, *self._control.settings[self.peers.rank, 1:]]

    def wait_for_replies(self, one_behind: bool = False) -> None:
        """Make the current stream (on a CPU: this thread) wait for all replies.

        Every bucket was pushed. `one_behind` (on a GPU): for the replies of the exchange before.
        """
        self._number += 1
        if self.on_gpu:
            last = self._all_fetched[self._number % 2]
            before = self._all_fetched[1 - self._number % 2]
            last.record(self.pulling.stream)
            torch.cuda.current_stream().wait_event(before if one_behind else last)
            if self.remote and self._number > 1:
                # Messages need room in the GPU's queue: at most two exchanges are under way.
                before.synchronize()
            return
        sleep_precisely()
        done = self._control.done[self.peers.rank]
        with on_threads(self.threads):
            while (done < self._number).any():
                self.check_remote_servers()
                if self._server is None or not self._server.turn():
                    time.sleep(PAUSE_SECONDS["cpu"])

    def check_remote_servers(self) -> None:
        """Raises RuntimeError: a connection to another host has failed."""
        for server in self.remote_servers:
            server.check()

    def close(self) -> None:
        """End the servers. Collective over the peers."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.peers.barrier()
        self._control.stop[0] = 1
        for server in self.remote_servers:
            server.close()
        if self._thread:
            self._thread.join()

    def staleness(self) -> dict[str, float]:
        """Return the number of updates so far and their staleness in updates, as metrics."""
        control = self._control
        updates = float(control.updates.sum())
        total = float(control.staleness_sum.sum())
        worst = float(control.staleness_max.max())
        for counts in self._remote_counts():
            updates, total, worst = updates + counts[0], total + counts[1], max(worst, counts[2])
        mean = total / updates if updates else float("nan")
        return {"staleness/mean": mean, "staleness/max": worst, "staleness/updates": updates}

    def _remote_counts(self) -> list[list[float]]:
        return [server.ask(Demand.COUNT) for server in self.remote_servers]
