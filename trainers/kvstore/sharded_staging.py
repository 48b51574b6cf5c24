"""CPU staging in two levels, in the shape of BytePS (Jiang et al. 2020, OSDI).

GPUs reduce-scatter among themselves, each stages its share, its own threads update it, and an all-gather brings the weights
to all. Host traffic is 1/n of full staging. On several hosts the GPUs of each do that, and shares cross between hosts.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from trainers import optimizers
from trainers.kvstore import references, sharding
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.buckets import Array, BucketLayout
from trainers.kvstore.shared_regions import KvstoreConfig, needed_bytes
from trainers.kvstore.worker import Worker
from trainers.peers import net_probe, ring_probe
from trainers.peers.groups import HostGroups, Peers
from trainers.strategy import ReferenceProbe


class ShardedStaging(Bucketed):
    """Every rank is the only worker of its own server, for its share of each bucket."""

    def __init__(self, bucket_cap_mb: float, comm_hook: str, threads: int | str, only_gradients: bool) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self._threads = threads
        self.worker: Worker | None = None
        self._host: HostGroups | None = None  # where there are several

    def set_up(self, order: list[int]) -> None:
        """Make flat buckets, this rank's server and first weights. Collective."""
        self._host = HostGroups.across(self.hosts)
        rank, sharers, device = dist.get_rank(self._group), len(self.hosts.ranks[0]), self.parameters[0].device
        self.layout = BucketLayout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)
        self._works: dict[int, dist.Work] = {}
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.flat_sent = sharding.padded(self.layout, sharers, in_weight_dtype=False, device=device)
        self.flat_means = sharding.padded(self.layout, sharers, in_weight_dtype=False, device=device)
        self.flat_weights = sharding.padded(self.layout, sharers, in_weight_dtype=True, device=device)
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
            arrays.append(Array(sharding.share_of(bucket, sharers), array.weight_dtype, array.wire_dtype))
        order = tuple(range(len(arrays)))
        return KvstoreConfig(
            tuple(arrays), order, cap_bytes=0, workers=1, servers=0, worker_gpu=on_gpu, hosts=len(self.hosts.ranks)
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
        return sharding.ring_bytes(sent, here) + sharding.ring_bytes(sent / here, len(self.hosts.ranks))

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between GPUs, the wire between hosts, the host link with 1/n of all bytes."""
        worker = self.worker
        assert worker is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        found = ring_probe.probes(worker.device, sharding.ring_bytes(sent, len(self.hosts.ranks[0])), self._group)
        found += net_probe.probes(self.hosts, torch.device("cpu"), sharding.ring_bytes(sent, len(self.hosts.ranks)))
        return [*found, references.host_link(worker)] if worker.on_gpu else found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes of the mappings of a host's ranks: gradients, weights and replies of its shares."""
        layout = BucketLayout.of(arrays_of(parameters, self.comm_hook), range(len(parameters)), self.cap_bytes)
        config = self._config(layout, on_gpu)
        return len(self.hosts.ranks[0]) * needed_bytes(config, config.layout())

    def close(self) -> None:
        """End the server."""
        if self.worker:
            self.worker.close()
        if self._host:
            self._host.close()
