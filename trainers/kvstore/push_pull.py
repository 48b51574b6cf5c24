"""Strategies whose workers push gradients to servers and pull weights: CPU staging and the parameter servers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import optimizers
from trainers.kvstore import cpu_sums, references, server_process, sharding
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.shared_regions import KvstoreConfig, needed_bytes
from trainers.kvstore.worker import Worker
from trainers.peers import net_probe
from trainers.peers.groups import HostGroups, Peers
from trainers.strategy import ReferenceProbe


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
        self.synchronous = self.exact = synchronous
        self._threads, self._servers, self._bigarray_bound = threads, servers, bigarray_bound
        self._max_staleness, self._server_gpu = max_staleness, server_gpus is not None
        self.worker: Worker | None = None
        self._host: HostGroups | None = None  # of workers that serve themselves, on several hosts

    def _config(self, parameters: Sequence[Tensor], order: Sequence[int], workers: int, on_gpu: bool) -> KvstoreConfig:
        # One reply serves all GPUs of a synchronous exchange. Otherwise each worker needs its own: CPU workers use it in
        # place, and an asynchronous update would tear one that is shared.
        copies = 1 if self.synchronous and on_gpu else workers
        return KvstoreConfig(
            arrays_of(parameters, self.comm_hook), tuple(order), self.cap_bytes, workers, self._servers,
            self._bigarray_bound, self.synchronous, self._max_staleness, self._server_gpu and on_gpu, on_gpu,
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
        self.layout, self.flat_sent, self.flat_means = self.worker.layout, self.worker.sent, self.worker.means
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
        """Return what goes out: every byte of the gradient once (and as many come back), and its share of the host's mean."""
        sent = self.sent_bytes(gradient_bytes)
        return sent if self._servers else sent + self._between_hosts(sent) / len(self.hosts.ranks[0])

    def _between_hosts(self, sent_bytes: float) -> float:
        """Return the bytes that each host sends to others, where every worker serves its share."""
        return sharding.ring_bytes(sent_bytes, len(self.hosts.ranks))

    def probes(self) -> list[ReferenceProbe]:
        """Return the references of workers and servers (trainers.kvstore.references)."""
        assert self.worker is not None
        found = references.probes(self.worker)
        if self._host:
            found += net_probe.probes(self.hosts, torch.device("cpu"), self._between_hosts(self.layout.push_bytes))
        return found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of a host's workers' gradients, of weights, of replies and of the control block."""
        workers = workers if self._servers else len(self.hosts.ranks[0])
        config = self._config(parameters, range(len(parameters)), workers, on_gpu)
        layout, hosts = config.layout(), range(len(self.hosts.ranks) if self._servers else 1)
        return max(needed_bytes(config, layout, host) for host in hosts)

    def facts(self) -> dict[str, float]:
        """Return the staleness of the updates so far, where they are asynchronous. Collective."""
        if self.synchronous or self.worker is None:
            return {}
        self.worker.peers.barrier()  # until every worker's updates are counted
        return self.worker.staleness()

    def summing_threads(self) -> int | None:
        """Return the threads of each server process, or of each worker whose threads are the servers."""
        if self.worker is None or self.worker.config.server_gpu:
            return None
        together = self.worker.config.servers_together
        return cpu_sums.thread_count(self._threads, together) if self._servers else self.worker.threads

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
            bucket_cap_mb, comm_hook, threads, servers, bigarray_bound, synchronous=True, server_gpus=server_gpus
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
