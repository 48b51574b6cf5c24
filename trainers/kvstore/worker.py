"""A worker's side of the servers: its gradients go out bucket by bucket, weights (or the mean gradient) come back.

On a GPU, copies and flags are enqueued on streams of their own, so that neither the host nor the device waits inside
backward. A CPU worker's buffers are the shared memory itself.
"""

import functools
import os
import threading
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainers import memory as shared_memory
from trainers.collectives import HostGroups, Peers
from trainers.kvstore import server as cpu_sums
from trainers.kvstore import server_process
from trainers.kvstore.remote import AfterCopies, Demand, ServersElsewhere
from trainers.kvstore.server import (
    FLAG_BYTES,
    PAUSE_SECONDS,
    CpuArithmetic,
    Server,
    ServerAcrossHosts,
)
from trainers.kvstore.shared_memory import (
    REDUCE,
    UPDATE,
    KvstoreConfig,
    Regions,
    SharedMapping,
    path_on,
    views,
)
from trainers.process import on_threads, sleep_precisely

# Stages of the start (Control.attached).
MAPPED, READY = 1, 2


class Worker:
    """One worker among its peers.

    `sent`, `weights` and `means` hold a flat tensor (elements,) for each bucket: the gradient before it is pushed, and the
    two kinds of reply.
    """

    def __init__(
        self,
        config: KvstoreConfig,
        peers: Peers,
        device: torch.device,
        threads: int | str,
        host: HostGroups | None = None,
    ) -> None:
        """Map the shared memory and meet the servers. Collective over the peers, and over `host` where there are several.

        Raises:
            OSError: not enough shared memory.
        """
        self.config, self.peers, self.device, self._host = config, peers, device, host
        self.layout = config.layout()
        self.on_gpu = device.type == "cuda"
        # Where servers are processes, their threads sum; ours then only measure the memory (trainers.kvstore.references).
        ranks = host.here if host else dist.get_world_size() if dist.is_initialized() else 1
        self.threads = cpu_sums.thread_count(
            threads, ranks, cpu_sums.SPARE_CORES if self.on_gpu else 0
        )
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._number = 0  # of the last exchange that was waited for
        self._only_gradients = False
        self._place = config.places.host_of(peers.rank) if config.places else 0
        first = peers.rank == (
            config.places.ranks[self._place][0] if config.places else 0
        )  # of this host
        announced = shared_memory.named(peers.from_rank_zero(shared_memory.new_path().name))
        path = path_on(announced, config, self._place)
        if first:
            self.shared = SharedMapping(path, config, self.layout, create=True, host=self._place)
        peers.barrier()
        if not first:
            self.shared = SharedMapping(path, config, self.layout, host=self._place)
        self._control = self.shared.control
        if self.on_gpu:
            self._gpu_buffers()
        if config.servers and peers.rank == 0:
            server_process.announce(announced, config)
        self._meet(MAPPED)
        if first:
            path.unlink()
        self.elsewhere = ServersElsewhere(peers.rank, config, self.layout)
        self._far = self.elsewhere.by_bucket
        if not config.server_gpu:
            self._host_buffers()
        if self.on_gpu:
            self._connect()
            self._leaving = (
                AfterCopies(PAUSE_SECONDS["cuda"]) if self._far and not config.server_gpu else None
            )

    def begin(self, weights: Sequence[Tensor], settings: tuple[float, ...]) -> None:
        """Give the servers rank 0's weights, a flat tensor for each bucket, and start those of this worker. Collective.

        `settings` are those of this worker's pushes (trainers.optimizers.settings).
        """
        self._control.settings[self.peers.rank, 1:] = settings
        if self.peers.rank == 0:
            for number, flat in enumerate(weights):
                if number in self._far:
                    self._far[number].give_weights(number, flat.cpu())
                elif self.on_gpu:
                    self.pushing.stream.wait_stream(torch.cuda.current_stream())
                    self.pushing.copy(self._weights_at[number], flat.data_ptr(), flat.nbytes)
                    self.pushing.stream.synchronize()
                else:
                    assert self.shared.regions is not None
                    self.shared.regions.weights[number].copy_(flat)
        self.elsewhere.counts()  # they answer when they have the weights
        if not self.config.servers:
            self._start_own_server()
        self._meet(READY)
        if self.config.places:
            self.peers.barrier()  # until the servers on other hosts have the weights

    def set_reply(self, only_gradients: bool) -> None:
        """Choose the replies to later pushes: weights, or the mean gradient. No exchange may be under way."""
        self._only_gradients = only_gradients
        self._control.settings[self.peers.rank, 0] = REDUCE if only_gradients else UPDATE

    def _meet(self, stage: int) -> None:
        """Say that this worker has reached a stage, and wait for all workers and servers of this host."""
        self._control.attached[self.peers.rank] = stage
        everyone = self.config.processes_on(self._place)
        while (self._control.attached[everyone] < stage).any():
            time.sleep(PAUSE_SECONDS["cpu"])

    def _host_buffers(self) -> None:
        """Find this worker's buckets in the shared memory. A CPU worker has no others."""
        regions = self.shared.regions
        assert regions is not None
        self.sent_on_host = regions.pushed[self.peers.rank]
        self.means_on_host, self.weights_on_host = regions.replies_to(
            self.peers.rank, self.config, self._far
        )
        if not self.on_gpu:
            self.sent, self.means, self.weights = (
                self.sent_on_host,
                self.means_on_host,
                self.weights_on_host,
            )

    def _gpu_buffers(self) -> None:
        """Make buffers, streams and events on this worker's GPU, and page-lock the shared memory."""
        from trainers.kvstore import cuda_copies

        layout, rank = self.layout, self.peers.rank
        self._cuda = cuda_copies
        cuda_copies.page_lock(self.shared.address, len(self.shared.bytes))
        self.staging = torch.zeros(layout.push_bytes, dtype=torch.uint8, device=self.device)
        if self.config.server_gpu:
            self._exported = cuda_copies.Exported(layout.pull_bytes, self.device)
            self._control.handles[rank] = list(self._exported.handle())
            inbox = self._exported.bytes
        else:
            inbox = torch.zeros(layout.pull_bytes, dtype=torch.uint8, device=self.device)
        self.sent = views(self.staging, layout, in_weight_dtype=False, push=True)
        self.means = views(inbox, layout, in_weight_dtype=False)
        self.weights = views(inbox, layout, in_weight_dtype=True)
        self.pushing, self.pulling = (cuda_copies.CopyStream(torch.cuda.Stream()) for _ in range(2))
        self._staged, self._fetched = (
            [torch.cuda.Event() for _ in layout.buckets] for _ in range(2)
        )
        self._all_fetched = [
            torch.cuda.Event() for _ in range(2)
        ]  # of exchanges with even and odd numbers

    def _connect(self) -> None:
        """Find the addresses, as this GPU sees them, of flags, of where buckets are pushed and of where replies lie."""
        shared, regions, rank = self.shared, self.shared.regions, self.peers.rank
        offset = self._cuda.device_address(shared.address) - shared.address
        self._push_flag = shared.address_of(self._control.pushed[rank]) + offset
        self._done_flag = shared.address_of(self._control.done[rank]) + offset
        if self.config.server_gpu:
            start = Regions.pushed_start(self.config, self.layout, rank)
            handles = self._control.handles[self.config.workers :]
            near = {
                bucket.server
                for number, bucket in enumerate(self.layout.buckets)
                if number not in self._far
            }
            bases = {server: self._cuda.imported(handles[server].tobytes()) for server in near}
            # 0 where the server is on another host, and nothing is copied to it.
            self.push_to = [
                (a := bases.get(b.server, 0)) and a + start + b.push_offset
                for b in self.layout.buckets
            ]
            self._weights_at = [bases.get(b.server, 0) + b.pull_offset for b in self.layout.buckets]
            return
        assert regions is not None

        def addresses(region: list[Tensor]) -> list[int]:
            return [view.data_ptr() + offset for view in region]

        self.push_to, self._weights_at = addresses(self.sent_on_host), addresses(regions.weights)
        self.means_from, self._weights_from = (
            addresses(self.means_on_host),
            addresses(self.weights_on_host),
        )

    def _start_own_server(self) -> None:
        """Start this worker's own server.

        Next to a GPU it is a thread that waits for pushes, with others that sum. A CPU worker serves while it waits for
        replies: a thread would take the core that computes.
        """
        number, own = self.peers.rank, self.own_buckets()
        if self._host and self._host.rail:
            self._server = ServerAcrossHosts(self.config, self.shared, number, own, self._host.rail)
        else:
            arithmetic = CpuArithmetic(self.config, self.shared, own)
            self._server = Server(self.config, self._control, number, own, arithmetic)
        if self.on_gpu:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        assert self._server is not None
        try:
            torch.set_num_threads(
                self.threads
            )  # of this thread; the process is near its GPU already
            self._server.run(
                lambda: bool(self._control.stop[0]), lambda served: None, PAUSE_SECONDS["cuda"]
            )
        except BaseException:
            traceback.print_exc()  # to the rank's log
            os._exit(1)  # nothing else would notice, and every worker would wait

    def own_buckets(self) -> list[int]:
        """Return the buckets that this worker's own server serves."""
        buckets = enumerate(self.layout.buckets)
        return (
            []
            if self.config.servers
            else [number for number, b in buckets if b.server == self.peers.rank]
        )

    # An exchange.

    def push(self, bucket: int, after_reply: bool = False) -> None:
        """Send `sent[bucket]`, and have the reply fetched as soon as it is there. May be called inside backward.

        `after_reply` (on a GPU): not before the reply to the last push of the same bucket is here.
        """
        number = self._number + 1
        if not self.on_gpu and bucket in self._far:
            return self._push_far(bucket, number, self._only_gradients)
        if not self.on_gpu:
            self._control.pushed[self.peers.rank, bucket] = number
            return
        sent, copies = self.sent[bucket], self.pushing
        self._staged[bucket].record()
        copies.stream.wait_event(self._staged[bucket])
        if after_reply:
            copies.stream.wait_event(self._fetched[bucket])
        reply = (self.means if self._only_gradients else self.weights)[bucket]
        if bucket in self.elsewhere.on_gpus:
            far, settings = self.elsewhere.on_gpus[bucket], self._settings(self._only_gradients)
            self.pulling.stream.wait_stream(
                far.exchange(Demand.PUSH, bucket, sent, reply, settings, copies.stream)
            )
            self._fetched[bucket].record(self.pulling.stream)
            return
        copies.copy(self.push_to[bucket], sent.data_ptr(), sent.nbytes)
        copies.write_flag(self._push_flag + FLAG_BYTES * bucket, number)
        if self._leaving and bucket in self._far:
            flags, send = (
                self._control.pushed[self.peers.rank],
                functools.partial(self._push_far, bucket, number),
            )
            self._leaving.call(
                lambda: flags[bucket] >= number, functools.partial(send, self._only_gradients)
            )
        self.pulling.wait_flag(self._done_flag + FLAG_BYTES * bucket, number)
        if not self.config.server_gpu:  # such a server writes into our memory itself
            source = (self.means_from if self._only_gradients else self._weights_from)[bucket]
            self.pulling.copy(reply.data_ptr(), source, reply.nbytes)
        self._fetched[bucket].record(self.pulling.stream)

    def _push_far(self, bucket: int, number: int, only_gradients: bool) -> None:
        """Send a bucket in host memory to its server on another host; the flag says when the reply is in host memory."""
        reply = (self.means_on_host if only_gradients else self.weights_on_host)[bucket]
        arrived = functools.partial(self._control.done[self.peers.rank].__setitem__, bucket, number)
        settings = self._settings(only_gradients)
        self._far[bucket].push(
            Demand.PUSH, bucket, self.sent_on_host[bucket], reply, arrived, settings
        )

    def _settings(self, only_gradients: bool) -> list[float]:
        return [REDUCE if only_gradients else UPDATE, *self._control.settings[self.peers.rank, 1:]]

    def wait_for_replies(self, one_behind: bool = False) -> None:
        """Make the current stream (on a CPU: this thread) wait for all replies. Every bucket was pushed.

        `one_behind` (on a GPU): for the replies of the exchange before.
        """
        self._number += 1
        if self.on_gpu:
            last, before = (
                self._all_fetched[self._number % 2],
                self._all_fetched[1 - self._number % 2],
            )
            last.record(self.pulling.stream)
            torch.cuda.current_stream().wait_event(before if one_behind else last)
            if self._far and self._number > 1:
                before.synchronize()  # messages need room in the GPU's queue: at most two exchanges are under way
            return
        sleep_precisely()
        done = self._control.done[self.peers.rank]
        with on_threads(self.threads):
            while (done < self._number).any():
                self.elsewhere.check()
                if self._server is None or not self._server.turn():
                    time.sleep(PAUSE_SECONDS["cpu"])

    def close(self) -> None:
        """End the servers. Collective over the peers."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.peers.barrier()
        self._control.stop[0] = 1
        self.elsewhere.close()
        if self._thread:
            self._thread.join()

    def staleness(self) -> dict[str, float]:
        """Return the number of updates so far and their staleness in updates, as metrics. For asynchronous servers."""
        control = self._control
        here = [
            control.staleness_counts.sum(),
            control.staleness_sum.sum(),
            control.staleness_max.max(),
        ]
        updates, total, worst = zip(map(float, here), *self.elsewhere.counts(), strict=True)
        mean = sum(total) / sum(updates) if sum(updates) else float("nan")
        return {
            "staleness/mean": mean,
            "staleness/max": max(worst),
            "staleness/updates": sum(updates),
        }
