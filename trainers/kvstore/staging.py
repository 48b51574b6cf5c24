"""Strategies whose workers push gradients to servers and pull weights.

CPU staging, which is MXNet's kvstore=local: gradients go to pinned host memory, the CPUs sum them,
weights come back. And MXNet's parameter servers, in processes of their own. Last, what the machine
allows a worker with servers: its copies, its sums and the memory alone.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import collectives, optimizers, reference_probes
from trainers.collectives import HostGroups, Peers
from trainers.kvstore import bucketed, server, server_process
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, ring_bytes, scatter
from trainers.kvstore.buckets import Array, BucketLayout
from trainers.kvstore.push_pull_worker import Worker
from trainers.kvstore.remote import NO_SETTINGS, Demand
from trainers.kvstore.server import thread_count
from trainers.kvstore.shared_memory import KvstoreConfig, needed_bytes, views
from trainers.process import on_threads
from trainers.reference_probes import NET_LINK, TIMES
from trainers.strategy import Hosts, ReferenceProbe, Strategy

HOST = torch.device("cpu")


class PushPull(Bucketed):
    """All workers share servers: threads in every worker (`servers=0`), or processes."""

    synchronous = True

    def __init__(
        self,
        bucket_cap_mb: float,
        comm_hook: str,
        threads: int | str = 1,
        servers: int = 0,
        bigarray_bound: int = 0,
        max_staleness: int | None = None,
        server_gpus: Any = None,
        only_gradients: bool = False,
    ) -> None:
        """Take the options of a YAML.

        `server_gpus` other than None: servers keep weights on GPUs, if there are any, and need one
        thread. `max_staleness` is in updates; None: no bound.
        """
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self.returns_mean = self.in_lockstep = self.exact = self.synchronous
        self.equal_every = int(self.synchronous)
        self._threads, self._servers, self._bigarray_bound = threads, servers, bigarray_bound
        self._max_staleness, self._server_gpu = max_staleness, server_gpus is not None
        self.worker: Worker | None = None
        self._groups: HostGroups | None = None  # of workers that serve themselves, on several hosts

    def _config(
        self, parameters: Sequence[Tensor], order: Sequence[int], on_gpu: bool
    ) -> KvstoreConfig:
        hosts = self.hosts.ranks
        workers = len(hosts[0])
        if self._servers:
            workers *= len(hosts)
        places = Hosts((tuple(range(workers)),), (0,) * self._servers)
        if self._servers and self.hosts.several:
            places = self.hosts
        # One reply serves all GPUs of a synchronous exchange. Otherwise each worker needs its own:
        # CPU workers use it in place, and an asynchronous update would tear one that is shared.
        reply_copies = 1 if self.synchronous and on_gpu else workers
        return KvstoreConfig(
            arrays=arrays_of(parameters, self.comm_hook),
            order=tuple(order),
            cap_bytes=self.cap_bytes,
            workers=workers,
            servers=self._servers,
            bigarray_bound=self._bigarray_bound,
            synchronous=self.synchronous,
            max_staleness=self._max_staleness,
            server_gpu=self._server_gpu and on_gpu,
            worker_gpu=on_gpu,
            optimizer=optimizers.name_of(self.optimizer),
            reply_copies=reply_copies,
            hosts=1 if self._servers else len(hosts),
            places=places,
        )

    def set_up(self, order: list[int]) -> None:
        """Make shared memory, servers and first weights. Collective."""
        device = self.parameters[0].device
        if not self._servers:
            self._groups = HostGroups.across(self.hosts)
        config = self._config(self.parameters, order, device.type == "cuda")
        peers = Peers.of_host(self._groups)
        self.worker = Worker(config, peers, device, self._threads, self._groups)
        self.layout, self.flat_sent = self.worker.layout, self.worker.sent
        self.flat_means = self.worker.means
        weights = []
        for bucket in self.layout.buckets:
            dtype = self.parameters[bucket.parts[0].array].dtype
            weights.append(torch.empty(bucket.elements, dtype=dtype, device=device))
            gather(bucket, self.parameters, weights[-1])
        self.worker.set_reply(self.only_gradients)
        self.worker.begin(weights, optimizers.settings(self.optimizer))

    def set_gradients_only(self, only_gradients: bool) -> None:
        """Choose what comes back."""
        super().set_gradients_only(only_gradients)
        if self.worker:
            self.worker.set_reply(only_gradients)

    def start_bucket(self, bucket: int) -> None:
        """Push a bucket."""
        assert self.worker is not None
        self.worker.push(bucket)

    def finish_buckets(self) -> None:
        """Wait for every reply."""
        assert self.worker is not None
        self.worker.wait_for_replies()

    def pipelined(self) -> Callable[[], None] | None:
        """Return an exchange in which each bucket leaves again once its own reply is there.

        For asynchronous workers with GPUs; None for others.
        """
        worker = self.worker
        if self.synchronous or worker is None or not worker.on_gpu:
            return None

        def exchange() -> None:
            for bucket in range(len(self.layout.buckets)):
                worker.push(bucket, after_reply=True)
            worker.wait_for_replies(one_behind=True)

        return exchange

    def apply_weights(self) -> None:
        """Take the servers' weights."""
        assert self.worker is not None
        scatter(self.layout.buckets, self.worker.weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return the gradient's bytes, once, and this worker's share of the host's mean."""
        sent = self.sent_bytes(gradient_bytes)
        if self._servers:
            return sent
        hosts = self.hosts.ranks
        return sent + ring_bytes(sent, len(hosts)) / len(hosts[0])

    def probes(self) -> list[ReferenceProbe]:
        """Return the references of workers and servers."""
        assert self.worker is not None
        probes = worker_probes(self.worker)
        if self._groups:
            host_bytes = ring_bytes(self.layout.push_bytes, len(self.hosts.ranks))
            probes += reference_probes.between_hosts(self.hosts, HOST, host_bytes)
        return probes

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of gradients, weights, replies and control block of a host."""
        config = self._config(parameters, range(len(parameters)), on_gpu)
        layout = config.layout()
        hosts = len(self.hosts.ranks) if self._servers else 1
        return max(needed_bytes(config, layout, host) for host in range(hosts))

    def facts(self) -> dict[str, float]:
        """Return the staleness of the updates so far, where they are asynchronous. Collective."""
        if self.synchronous or self.worker is None:
            return {}
        self.worker.peers.barrier()  # until every worker's updates are counted
        return self.worker.staleness()

    def summing_threads(self) -> int | None:
        """Return the threads of each server process, or of each worker that serves itself."""
        if self.worker is None or self.worker.config.server_gpu:
            return None
        if self._servers:
            return thread_count(self._threads, self.worker.config.servers_together)
        return self.worker.threads

    def close(self) -> None:
        """End the servers. Collective."""
        if self.worker:
            self.worker.close()
        elif self._servers and dist.get_rank() == 0:
            server_process.dismiss()
        if self._groups:
            self._groups.close()


class SynchronousServers(PushPull):
    """MXNet's kvstore=dist_sync and dist_sync_device: an update waits for all workers."""


class AsynchronousServers(PushPull):
    """MXNet's kvstore=dist_async and dist_async_device: a push is applied when it arrives."""

    synchronous = False


class ShardedStaging(PushPull):
    """CPU staging in two levels, in the shape of BytePS (Jiang et al. 2020, OSDI).

    Every rank is the only worker of its own server, for its share of each bucket.
    """

    def set_up(self, order: list[int]) -> None:
        """Make flat buckets, this rank's server and first weights. Collective."""
        self._groups = HostGroups.across(self.hosts)
        self._group = self._groups.inside if self._groups else None  # that shares the buckets
        device, sharers = self.parameters[0].device, len(self.hosts.ranks[0])
        on_gpu = device.type == "cuda"
        self._works: dict[int, dist.Work] = {}
        self._stream = torch.cuda.Stream() if on_gpu else None
        self.make_flats(order, sharers)
        config = self._config_of_shares(self.layout, on_gpu)
        self.worker = Worker(config, Peers(0, 1), device, self._threads, self._groups)
        self.worker.set_reply(self.only_gradients)
        own = bucketed.shares(self.flat_weights, dist.get_rank(self._group), sharers)
        self.worker.begin(own, optimizers.settings(self.optimizer))

    def _config_of_shares(self, layout: BucketLayout, on_gpu: bool) -> KvstoreConfig:
        """Make each of a rank's shares an array of its own, in a bucket of its own."""
        arrays = []
        for bucket in layout.buckets:
            array = layout.arrays[bucket.parts[0].array]
            elements = bucketed.share_of(bucket, len(self.hosts.ranks[0]))
            arrays.append(Array(elements, array.weight_dtype, array.wire_dtype))
        return KvstoreConfig(
            tuple(arrays),
            tuple(range(len(arrays))),
            cap_bytes=0,
            workers=1,
            servers=0,
            worker_gpu=on_gpu,
            optimizer=optimizers.name_of(self.optimizer),
            hosts=len(self.hosts.ranks),
        )

    def start_bucket(self, bucket: int) -> None:
        """Reduce-scatter a flat bucket and stage this rank's share."""
        assert self.worker is not None
        share = self.worker.sent[bucket]
        work = bucketed.start_mean(share, self.flat_sent[bucket], self._group)
        if self._stream is None:
            self._works[bucket] = work  # gloo would wait here
            return
        with torch.cuda.stream(self._stream):
            bucketed.end_mean(work, share, self._group)
            self.worker.push(bucket)

    def finish_buckets(self) -> None:
        """Bring every rank's replies to the flat buckets of all ranks."""
        worker = self.worker
        assert worker is not None
        for index, work in sorted(self._works.items()):
            bucketed.end_mean(work, worker.sent[index], self._group)
            worker.push(index)
        self._works.clear()
        worker.wait_for_replies()
        if self.only_gradients:
            bucketed.all_shares(self.flat_means, worker.means, self._group)
        else:
            bucketed.all_shares(self.flat_weights, worker.weights, self._group)

    def apply_weights(self) -> None:
        """Take the servers' weights."""
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return what the reduce-scatter and the all-gather send, and a share between hosts."""
        return bucketed.two_level_bytes(self.sent_bytes(gradient_bytes), self.hosts)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: links, wire between hosts, and the host link with 1/n of all."""
        worker = self.worker
        assert worker is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        hosts = self.hosts.ranks
        probes = reference_probes.ring(worker.device, ring_bytes(sent, len(hosts[0])), self._group)
        probes += reference_probes.between_hosts(self.hosts, HOST, ring_bytes(sent, len(hosts)))
        if worker.on_gpu:
            probes.append(host_link(worker))
        return probes

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of the mappings of a host's ranks."""
        layout = self.bucket_layout(parameters, range(len(parameters)))
        config = self._config_of_shares(layout, on_gpu)
        return len(self.hosts.ranks[0]) * needed_bytes(config, config.layout())


class GlooStaging(Bucketed):
    """CPU staging as it is usually written: a reference without overlap.

    Copy to the host, gloo all-reduce, update, copy back: every rank gets the whole mean gradient in
    host memory and updates all weights itself.
    """

    def set_up(self, order: list[int]) -> None:
        """Make buffers on the device and on the host; the host keeps the weights."""
        device = self.parameters[0].device
        self.layout = layout = self.bucket_layout(self.parameters, order)

        def buffers(where: torch.device, push: bool, weights: bool) -> list[Tensor]:
            pinned = where == HOST and device.type == "cuda"
            size = layout.push_bytes if push else layout.pull_bytes
            base = torch.zeros(size, dtype=torch.uint8, device=where, pin_memory=pinned)
            return views(base, layout, in_weight_dtype=weights, push=push)

        self.flat_sent = buffers(device, push=True, weights=False)
        self._staged = buffers(HOST, push=True, weights=False)
        self.flat_means = buffers(device, push=False, weights=False)
        self._device_weights = buffers(device, push=False, weights=True)
        self._weights = buffers(HOST, push=False, weights=True)
        name = optimizers.name_of(self.optimizer)
        self._steps = [optimizers.FlatSteps(name, flat) for flat in self._weights]
        for index, bucket in enumerate(layout.buckets):
            gather(bucket, self.parameters, self._device_weights[index])
            self._weights[index].copy_(self._device_weights[index])

    def start_bucket(self, bucket: int) -> None:
        """Do nothing: all buckets are exchanged at the end."""

    def finish_buckets(self) -> None:
        """Copy to the host, all-reduce over gloo, update, copy back."""
        for sent, staged in zip(self.flat_sent, self._staged, strict=True):
            staged.copy_(sent)
        for work in [dist.all_reduce(staged, async_op=True) for staged in self._staged]:
            collectives.wait(work)
        for index, staged in enumerate(self._staged):
            staged.div_(dist.get_world_size())
            if self.only_gradients:
                self.flat_means[index].copy_(staged)
            else:
                gradient = staged.to(torch.float32)
                self._steps[index].begin()
                self._steps[index].take(gradient, optimizers.settings(self.optimizer))
                self._device_weights[index].copy_(self._weights[index])

    def apply_weights(self) -> None:
        """Take the host's weights."""
        scatter(self.layout.buckets, self._device_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 2(n−1)/n of the bytes, which a ring moves through the network stack."""
        return ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: gloo between neighbours, and between hosts."""
        sent = sum(flat.nbytes for flat in self.flat_sent)
        # gloo has one ring of all ranks, which leaves each host once.
        in_ring = ring_bytes(sent, dist.get_world_size())
        probes = reference_probes.ring(HOST, in_ring)
        return probes + reference_probes.between_hosts(self.hosts, HOST, in_ring)


def staged(
    bucket_cap_mb: float,
    optimizer_on: str,
    staging: str,
    transport: str,
    comm_hook: str,
    threads: int | str,
) -> Strategy:
    """Make CPU staging from the YAML's options."""
    only_gradients = optimizer_on == "gpu"
    if transport == "gloo":
        return GlooStaging(bucket_cap_mb, comm_hook, only_gradients)
    chosen = ShardedStaging if staging == "sharded" else PushPull
    return chosen(bucket_cap_mb, comm_hook, threads, only_gradients=only_gradients)


# STREAM's add (McCalpin 1995): two float32 read and one written for each element.
ADD_BYTES = 12
CHECK_SECONDS = 0.5  # between two looks whether a connection has failed


def worker_probes(worker: Worker) -> list[ReferenceProbe]:
    """Return the references of an exchange, then its stages.

    Each moves or sums as many bytes as one exchange, and waits for no flag of another worker.
    """
    references = []
    places = worker.config.places
    if places.several:
        run = functools.partial(send_remote, worker)
        references += [ReferenceProbe(NET_LINK, run, 1.0, way=time) for time in TIMES]
    out = functools.partial(copy_all, worker, back=False)
    if worker.config.server_gpu:
        if min(places.server_hosts) < len(places.ranks):  # some are beside workers
            references.append(ReferenceProbe("server_link", out, 1.0))
        return references
    if worker.on_gpu:
        back = functools.partial(copy_all, worker, out=False)
        references.append(host_link(worker))
        references.append(ReferenceProbe("device_to_host", out, 1.0, reference=False))
        references.append(ReferenceProbe("host_to_device", back, 1.0, reference=False))
    if summed_bytes(worker) and not places.several:  # the sums are on the servers' hosts
        memory = host_memory(worker)
        references.append(ReferenceProbe("host_memory", memory, 1.0))
        if worker.on_gpu:
            at_once = host_memory(worker, linked=True)
            references.append(ReferenceProbe("all_at_once", at_once, 1.0, reference=False))
    if not worker.config.servers:
        alone = functools.partial(sum_alone, worker)
        references.append(ReferenceProbe("sum", alone, 1.0, reference=False))
    return references


def host_link(worker: Worker) -> ReferenceProbe:
    """Return the reference of the link between GPU and host, both ways at once. GPUs only."""
    return ReferenceProbe("host_link", functools.partial(copy_all, worker), 1.0)


def send_remote(worker: Worker) -> None:
    """Send the buckets of servers on other hosts there as an exchange does; wait for them back."""
    if worker.config.server_gpu:
        current, sending = torch.cuda.current_stream(), worker.pushing.stream
        sending.wait_stream(current)
        for bucket, remote in sorted(worker.remote.items()):
            sent, reply = worker.sent[bucket], worker.means[bucket]
            received = remote.exchange_on_gpu(
                Demand.PROBE, bucket, sent, reply, NO_SETTINGS, sending
            )
            current.wait_stream(received)
        return
    back = threading.Semaphore(0)
    for bucket, remote in sorted(worker.remote.items()):
        sent, reply = worker.sent_on_host[bucket], worker.means_on_host[bucket]
        remote.push(Demand.PROBE, bucket, sent, reply, back.release)
    for _ in worker.remote:
        while not back.acquire(timeout=CHECK_SECONDS):
            worker.check_remote_servers()


def copy_all(worker: Worker, out: bool = True, back: bool = True) -> None:
    """Copy the bytes of an exchange in the largest possible copies: gradients out, means back."""
    current = torch.cuda.current_stream()
    streams = []
    if out:
        streams.append(worker.pushing.stream)
    if back:
        streams.append(worker.pulling.stream)
    for stream in streams:
        stream.wait_stream(current)
    if out and worker.config.server_gpu:
        for target, sent in zip(worker.push_to, worker.sent, strict=True):
            if target:
                worker.pushing.copy(target, sent.data_ptr(), sent.nbytes)
    elif out:
        worker.pushing.copy(worker.push_to[0], worker.staging.data_ptr(), len(worker.staging))
    if back:
        mean, size_bytes = worker.means[0], worker.layout.push_bytes
        worker.pulling.copy(mean.data_ptr(), worker.means_from[0], size_bytes)
    for stream in streams:
        current.wait_stream(stream)


def sum_alone(worker: Worker) -> None:
    """Compute this worker's share of the sums on whatever its regions hold."""
    regions = worker.shared.regions
    assert regions is not None
    space = torch.empty(max(bucket.elements for bucket in worker.layout.buckets))
    with on_threads(worker.threads):
        for bucket in worker.layout.of_server(worker.peers.rank):
            if not worker.config.replies_own_gradient:
                pushed = [buckets[bucket] for buckets in regions.pushed.values()]
                replies = [buckets[bucket] for buckets in regions.gradient_replies.values()]
                server.mean(pushed, replies, space)


def summed_bytes(worker: Worker) -> float:
    """Return the bytes that sums read and write in host memory, for each worker of an exchange."""
    config = worker.config
    if config.replies_own_gradient:
        return 0
    replies = config.reply_copies if config.synchronous else config.workers
    return worker.layout.push_bytes * (config.workers + replies) / config.workers


def host_memory(worker: Worker, linked: bool = False) -> Callable[[], None]:
    """Return what moves as many bytes of host memory as the sums of an exchange, of its own.

    `linked`: while the link between GPU and host copies both ways.
    """
    elements = int(summed_bytes(worker) // ADD_BYTES)
    first, second, total = (torch.ones(elements) for _ in range(3))

    def add() -> None:
        if linked:
            copy_all(worker)
        with on_threads(worker.threads):
            torch.add(first, second, out=total)

    return add
