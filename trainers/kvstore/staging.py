"""Strategies whose workers push gradients to servers and pull weights: CPU staging and the parameter servers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import optimizers
from trainers import reference_probes as net_probe
from trainers import reference_probes as ring_probe
from trainers.collectives import HostGroups, Peers
from trainers.kvstore import bucketed as sharding
from trainers.kvstore import references, server_process
from trainers.kvstore import server as cpu_sums
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, ring_bytes, scatter
from trainers.kvstore.buckets import Array, BucketLayout
from trainers.kvstore.shared_memory import KvstoreConfig, needed_bytes, views
from trainers.kvstore.worker import Worker
from trainers.strategy import ReferenceProbe, Strategy


class PushPull(Bucketed):
    """All workers share servers, which are threads in every worker (`servers=0`) or processes of their own."""

    def __init__(
        self,
        bucket_cap_mb: float,
        comm_hook: str,
        threads: int | str,
        servers: int = 0,
        bigarray_bound: int = 0,
        synchronous: bool = True,
        max_staleness: int | None = None,
        server_gpus: Any = None,
        only_gradients: bool = False,
    ) -> None:
        """Take options of the YAML files. `server_gpus` other than None: servers keep weights on GPUs, if there are any."""
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self._synchronous = self.returns_mean = self.in_lockstep = self.exact = synchronous
        self.equal_every = int(synchronous)
        self._threads, self._servers, self._bigarray_bound = threads, servers, bigarray_bound
        self._max_staleness, self._server_gpu = max_staleness, server_gpus is not None
        self.worker: Worker | None = None
        self._host: HostGroups | None = None  # of workers that serve themselves, on several hosts

    def _config(
        self, parameters: Sequence[Tensor], order: Sequence[int], workers: int, on_gpu: bool
    ) -> KvstoreConfig:
        # One reply serves all GPUs of a synchronous exchange. Otherwise each worker needs its own: CPU workers use it in
        # place, and an asynchronous update would tear one that is shared.
        copies = 1 if self._synchronous and on_gpu else workers
        return KvstoreConfig(
            arrays_of(parameters, self.comm_hook), tuple(order), self.cap_bytes, workers, self._servers,
            self._bigarray_bound, self._synchronous, self._max_staleness, self._server_gpu and on_gpu, on_gpu,
            optimizers.name_of(self.optimizer), copies, 1 if self._servers else len(self.hosts.ranks),
            self.hosts if self._servers and self.hosts.several else None,
        )  # fmt: skip

    def set_up(self, order: list[int]) -> None:
        """Make shared memory, servers and first weights. Collective."""
        device = self.parameters[0].device
        self._host = None if self._servers else HostGroups.across(self.hosts)
        peers = self._host.peers() if self._host else Peers(dist.get_rank(), dist.get_world_size())
        config = self._config(self.parameters, order, peers.size, device.type == "cuda")
        self.worker = Worker(config, peers, device, self._threads, self._host)
        self.layout, self.flat_sent, self.flat_means = (
            self.worker.layout,
            self.worker.sent,
            self.worker.means,
        )
        self.worker.set_reply(self.only_gradients)
        self.worker.begin(self._flat_weights(), self.settings())

    def _flat_weights(self) -> list[Tensor]:
        found = []
        for bucket in self.layout.buckets:
            first = self.parameters[bucket.parts[0].array]
            found.append(torch.empty(bucket.elements, dtype=first.dtype, device=first.device))
            gather(bucket, self.parameters, found[-1])
        return found

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
        """Return an exchange in which each bucket leaves again as soon as its own reply is there.

        For asynchronous workers with GPUs; None for others.
        """
        worker = self.worker
        if self._synchronous or worker is None or not worker.on_gpu:
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
        """Return what goes out: every byte of the gradient once (and as many come back), and its share of the host's mean."""
        sent = self.sent_bytes(gradient_bytes)
        return (
            sent if self._servers else sent + self._between_hosts(sent) / len(self.hosts.ranks[0])
        )

    def _between_hosts(self, sent_bytes: float) -> float:
        """Return the bytes that each host sends to others, where every worker serves its share."""
        return sharding.ring_bytes(sent_bytes, len(self.hosts.ranks))

    def probes(self) -> list[ReferenceProbe]:
        """Return the references of workers and servers (trainers.kvstore.references)."""
        assert self.worker is not None
        found = references.probes(self.worker)
        if self._host:
            found += net_probe.net_probe_probes(
                self.hosts, torch.device("cpu"), self._between_hosts(self.layout.push_bytes)
            )
        return found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of a host's workers' gradients, of weights, of replies and of the control block."""
        workers = workers if self._servers else len(self.hosts.ranks[0])
        config = self._config(parameters, range(len(parameters)), workers, on_gpu)
        layout, hosts = config.layout(), range(len(self.hosts.ranks) if self._servers else 1)
        return max(needed_bytes(config, layout, host) for host in hosts)

    def facts(self) -> dict[str, float]:
        """Return the staleness of the updates so far, where they are asynchronous. Collective."""
        if self._synchronous or self.worker is None:
            return {}
        self.worker.peers.barrier()  # until every worker's updates are counted
        return self.worker.staleness()

    def summing_threads(self) -> int | None:
        """Return the threads of each server process, or of each worker whose threads are the servers."""
        if self.worker is None or self.worker.config.server_gpu:
            return None
        together = self.worker.config.servers_together
        return (
            cpu_sums.thread_count(self._threads, together) if self._servers else self.worker.threads
        )

    def close(self) -> None:
        """End the servers. Collective."""
        if self.worker:
            self.worker.close()
        elif self._servers and dist.get_rank() == 0:
            server_process.dismiss()
        if self._host:
            self._host.close()


class SynchronousServers(PushPull):
    """MXNet's kvstore=dist_sync and dist_sync_device: servers in processes of their own; an update waits for all workers."""

    def __init__(
        self,
        servers: int,
        bigarray_bound: int,
        bucket_cap_mb: float,
        comm_hook: str,
        threads: int | str = 1,
        server_gpus: Any = None,
    ) -> None:
        """Take the options of the YAML. `server_gpus` is given where servers keep weights on GPUs; they need one thread."""
        super().__init__(
            bucket_cap_mb,
            comm_hook,
            threads,
            servers,
            bigarray_bound,
            synchronous=True,
            server_gpus=server_gpus,
        )


class AsynchronousServers(PushPull):
    """MXNet's kvstore=dist_async and dist_async_device: the same servers; each push is applied when it arrives."""

    def __init__(
        self,
        servers: int,
        bigarray_bound: int,
        bucket_cap_mb: float,
        comm_hook: str,
        max_staleness: int | None,
        threads: int | str = 1,
        server_gpus: Any = None,
    ) -> None:
        """Take the options of the YAML, as SynchronousServers does. `max_staleness` is in updates; None: no bound."""
        super().__init__(
            bucket_cap_mb, comm_hook, threads, servers, bigarray_bound, synchronous=False,
            max_staleness=max_staleness, server_gpus=server_gpus,
        )  # fmt: skip


# CPU staging as it is usually written: copy to the host, gloo all-reduce, update, copy back. A reference without overlap.


class GlooStaging(Bucketed):
    """Every rank gets the whole mean gradient in host memory and updates all weights itself."""

    def set_up(self, order: list[int]) -> None:
        """Make buffers on the device and on the host; the host keeps the weights."""
        device = self.parameters[0].device
        self.layout = layout = BucketLayout.of(
            arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes
        )

        def buffer(size_bytes: int, where: torch.device) -> Tensor:
            pinned = where.type == "cpu" and device.type == "cuda"
            return torch.zeros(size_bytes, dtype=torch.uint8, device=where, pin_memory=pinned)

        host = torch.device("cpu")
        self.flat_sent = views(
            buffer(layout.push_bytes, device), layout, in_weight_dtype=False, push=True
        )
        self._staged = views(
            buffer(layout.push_bytes, host), layout, in_weight_dtype=False, push=True
        )
        self.flat_means = views(buffer(layout.pull_bytes, device), layout, in_weight_dtype=False)
        self._device_weights = views(
            buffer(layout.pull_bytes, device), layout, in_weight_dtype=True
        )
        self._weights = views(buffer(layout.pull_bytes, host), layout, in_weight_dtype=True)
        self._steps = [self.steps_of(flat) for flat in self._weights]
        for bucket, on_device, weights in zip(
            layout.buckets, self._device_weights, self._weights, strict=True
        ):
            gather(bucket, self.parameters, on_device)
            weights.copy_(on_device)

    def start_bucket(self, bucket: int) -> None:
        """Do nothing: all buckets are exchanged at the end."""

    def finish_buckets(self) -> None:
        """Copy to the host, all-reduce over gloo, update, copy back."""
        for sent, staged in zip(self.flat_sent, self._staged, strict=True):
            staged.copy_(sent)
        for work in [dist.all_reduce(staged, async_op=True) for staged in self._staged]:
            assert work is not None
            work.wait()
        for number, staged in enumerate(self._staged):
            staged.div_(dist.get_world_size())
            if self.only_gradients:
                self.flat_means[number].copy_(staged)
            else:
                gradient = staged.to(torch.float32)
                self._steps[number].begin()
                self._steps[number].take(gradient, self.settings())
                self._device_weights[number].copy_(self._weights[number])

    def apply_weights(self) -> None:
        """Take the host's weights."""
        scatter(self.layout.buckets, self._device_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 2(n−1)/n of the bytes, which a ring moves through the network stack."""
        return ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: gloo between neighbours, and between hosts."""
        sent, host = sum(flat.nbytes for flat in self.flat_sent), torch.device("cpu")
        in_ring = ring_bytes(
            sent, dist.get_world_size()
        )  # gloo has one of all ranks, which leaves each host once
        return [
            *ring_probe.probes(host, in_ring),
            *net_probe.net_probe_probes(self.hosts, host, in_ring),
        ]


# CPU staging in two levels, in the shape of BytePS (Jiang et al. 2020, OSDI).


class ShardedStaging(Bucketed):
    """Every rank is the only worker of its own server, for its share of each bucket."""

    def __init__(
        self, bucket_cap_mb: float, comm_hook: str, threads: int | str, only_gradients: bool
    ) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self._threads = threads
        self.worker: Worker | None = None
        self._host: HostGroups | None = None  # where there are several

    def set_up(self, order: list[int]) -> None:
        """Make flat buckets, this rank's server and first weights. Collective."""
        self._host = HostGroups.across(self.hosts)
        rank, sharers, device = (
            dist.get_rank(self._group),
            len(self.hosts.ranks[0]),
            self.parameters[0].device,
        )
        self.layout = BucketLayout.of(
            arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes
        )
        self._works: dict[int, dist.Work] = {}
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.flat_sent = sharding.padded(self.layout, sharers, in_weight_dtype=False, device=device)
        self.flat_means = sharding.padded(
            self.layout, sharers, in_weight_dtype=False, device=device
        )
        self.flat_weights = sharding.padded(
            self.layout, sharers, in_weight_dtype=True, device=device
        )
        for bucket, flat in zip(self.layout.buckets, self.flat_weights, strict=True):
            gather(bucket, self.parameters, flat)
        config = self._config(self.layout, device.type == "cuda")
        config = dataclasses.replace(config, optimizer=optimizers.name_of(self.optimizer))
        self.worker = Worker(config, Peers(0, 1), device, self._threads, self._host)
        self.worker.set_reply(self.only_gradients)
        self.worker.begin(sharding.shares(self.flat_weights, rank, sharers), self.settings())

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that share the buckets; None: all."""
        return self._host.inside if self._host else None

    def _config(self, layout: BucketLayout, on_gpu: bool) -> KvstoreConfig:
        """Make each of a rank's shares an array of its own, in a bucket of its own."""
        arrays, sharers = [], len(self.hosts.ranks[0])
        for bucket in layout.buckets:
            array = layout.arrays[bucket.parts[0].array]
            arrays.append(
                Array(sharding.share_of(bucket, sharers), array.weight_dtype, array.wire_dtype)
            )
        order = tuple(range(len(arrays)))
        return KvstoreConfig(
            tuple(arrays),
            order,
            cap_bytes=0,
            workers=1,
            servers=0,
            worker_gpu=on_gpu,
            hosts=len(self.hosts.ranks),
        )

    def summing_threads(self) -> int | None:
        """Return the threads of each rank."""
        return self.worker.threads if self.worker else None

    def set_gradients_only(self, only_gradients: bool) -> None:
        """Choose what comes back."""
        super().set_gradients_only(only_gradients)
        if self.worker:
            self.worker.set_reply(only_gradients)

    def start_bucket(self, bucket: int) -> None:
        """Reduce-scatter a flat bucket and stage this rank's share."""
        assert self.worker is not None
        share = self.worker.sent[bucket]
        work = sharding.start_mean(share, self.flat_sent[bucket], self._group)
        if self._stream is None:
            self._works[bucket] = work  # gloo would wait here
            return
        with torch.cuda.stream(self._stream):
            sharding.end_mean(work, share, self._group)
            self.worker.push(bucket)

    def finish_buckets(self) -> None:
        """Bring every rank's replies to the flat buckets of all ranks."""
        assert self.worker is not None
        for number, work in sorted(self._works.items()):
            sharding.end_mean(work, self.worker.sent[number], self._group)
            self.worker.push(number)
        self._works.clear()
        self.worker.wait_for_replies()
        if self.only_gradients:
            sharding.all_shares(self.flat_means, self.worker.means, self._group)
        else:
            sharding.all_shares(self.flat_weights, self.worker.weights, self._group)

    def apply_weights(self) -> None:
        """Take the servers' weights."""
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return what goes over the links between GPUs, as much in the all-gather as in the reduce-scatter, and between hosts."""
        sent, here = self.sent_bytes(gradient_bytes), len(self.hosts.ranks[0])
        return sharding.ring_bytes(sent, here) + sharding.ring_bytes(
            sent / here, len(self.hosts.ranks)
        )

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between GPUs, the wire between hosts, the host link with 1/n of all bytes."""
        worker = self.worker
        assert worker is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        found = ring_probe.probes(
            worker.device, sharding.ring_bytes(sent, len(self.hosts.ranks[0])), self._group
        )
        found += net_probe.net_probe_probes(
            self.hosts, torch.device("cpu"), sharding.ring_bytes(sent, len(self.hosts.ranks))
        )
        return [*found, references.host_link(worker)] if worker.on_gpu else found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of the mappings of a host's ranks: gradients, weights and replies of its shares."""
        layout = BucketLayout.of(
            arrays_of(parameters, self.comm_hook), range(len(parameters)), self.cap_bytes
        )
        config = self._config(layout, on_gpu)
        return len(self.hosts.ranks[0]) * needed_bytes(config, config.layout())

    def close(self) -> None:
        """End the server."""
        if self.worker:
            self.worker.close()
        if self._host:
            self._host.close()


# CPU staging, and MXNet's kvstore=local: gradients go to pinned host memory, the CPUs sum them, weights come back.


def staged(
    bucket_cap_mb: float,
    optimizer_on: str,
    staging: str,
    transport: str,
    comm_hook: str,
    threads: int | str,
) -> Strategy:
    """Make the strategy from the YAML's options."""
    given: dict[str, Any] = {
        "bucket_cap_mb": bucket_cap_mb,
        "only_gradients": optimizer_on == "gpu",
    }
    if transport == "gloo":
        return GlooStaging(**given, comm_hook=comm_hook)
    if staging == "sharded":
        return ShardedStaging(**given, comm_hook=comm_hook, threads=threads)
    return PushPull(**given, comm_hook=comm_hook, threads=threads)
