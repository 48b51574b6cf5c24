"""What workers and servers share: a control block of flags and settings, gradients and weights.

It all lies in one shared mapping (trainers.memory) for each host. Where GPUs take part the mapping
is page-locked (cudaHostRegister): their copy engines read and write it, and streams write flags and
wait for them.
"""

import mmap
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers import memory
from trainers.kvstore.buckets import Array, BucketLayout, aligned, mxnet, whole
from trainers.optimizers import SETTINGS
from trainers.strategy import Hosts

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
# What a worker asks the servers to do with its gradients: update the weights, or only reduce.
UPDATE, REDUCE = 0.0, 1.0
MAPPED, READY = 1, 2  # stages of the start (Control.attached): has mapped the memory; is ready
FLAG_BYTES = 4  # int32
ONE_WORKER = Hosts(((0,),))


@dataclass(frozen=True)
class KvstoreConfig:
    """What workers and servers agree on. Buckets, regions and flags follow from it."""

    arrays: tuple[Array, ...]
    order: tuple[int, ...]  # arrays in the order of exchange
    cap_bytes: float  # of a bucket
    workers: int
    servers: int  # in processes of their own; 0: every worker serves its share in a thread
    bigarray_bound: int = 0  # elements from which MXNet splits an array over all servers
    synchronous: bool = True
    max_staleness: int | None = None  # updates
    server_gpu: bool = False  # whether the servers keep gradients and weights on GPUs
    worker_gpu: bool = False  # whether the workers' gradients lie on GPUs
    optimizer: str = "sgd"  # whose steps the servers take: sgd or adamw
    reply_copies: int = 1  # of each reply: one that all GPUs read, or one for each worker
    # That have workers and servers like these, and reduce their means with each other.
    hosts: int = 1
    places: Hosts = ONE_WORKER  # of the workers and of server processes

    @property
    def replies_own_gradient(self) -> bool:
        """Return whether a mean is the worker's own gradient: a GPU fetches what it pushed."""
        return self.worker_gpu and self.hosts == 1 and (not self.synchronous or self.workers == 1)

    @property
    def servers_together(self) -> int:
        """Return the most servers that a host has: they share its cores."""
        hosts = self.places.server_hosts
        return max(map(hosts.count, hosts), default=0)

    def layout(self) -> BucketLayout:
        """Return the buckets, which are the same in every process."""
        if self.servers:
            placement = mxnet(self.servers, self.bigarray_bound)
            return BucketLayout.of(self.arrays, self.order, self.cap_bytes, placement)
        return BucketLayout.of(self.arrays, self.order, self.cap_bytes, whole, dealt=self.workers)

    def processes_on(self, host: int) -> list[int]:
        """Return the rows in `Control.attached` of a host's workers and servers."""
        rows = list(self.places.ranks[host])
        for server, server_host in enumerate(self.places.server_hosts):
            if server_host == host:
                rows.append(self.workers + server)
        return rows

    def remote_workers(self, host: int) -> list[int]:
        """Return the workers that are not on a host."""
        return [worker for worker in range(self.workers) if self.places.host_of(worker) != host]

    def rows(self, host: int) -> tuple[int, ...] | None:
        """Return the workers with gradients and replies of their own in a host's memory.

        None: as `reply_copies` says.
        """
        if not self.places.several:
            return None
        return self.places.ranks[host] if host < len(self.places.ranks) else ()


class Regions:
    """Views of one base (host memory, or a server's GPU), a flat tensor for each bucket.

    The base holds, one after the other: weights, replies, and the pushed gradients of workers. A
    reply is weights in their dtype, or the mean gradient in the dtype in which gradients travel;
    both views start at the same byte. Of several hosts, the memory of one has replies and gradients
    for some workers only, its `rows`.
    """

    def __init__(
        self,
        base: Tensor,
        config: KvstoreConfig,
        layout: BucketLayout,
        rows: Sequence[int] | None = None,
    ) -> None:
        """`base` is uint8 and holds `Regions.size(config, layout, rows)` bytes."""
        self.device = base.device
        self.weights = views(base, layout, in_weight_dtype=True)
        self.weight_replies: dict[int, list[Tensor]] = {}
        self.gradient_replies: dict[int, list[Tensor]] = {}
        self.pushed: dict[int, list[Tensor]] = {}  # by worker
        offset = layout.pull_bytes
        for copy in range(config.reply_copies) if rows is None else rows:
            self.weight_replies[copy] = views(base[offset:], layout, in_weight_dtype=True)
            self.gradient_replies[copy] = views(base[offset:], layout, in_weight_dtype=False)
            offset += layout.pull_bytes
        for worker in range(config.workers) if rows is None else rows:
            self.pushed[worker] = views(base[offset:], layout, in_weight_dtype=False, push=True)
            offset += layout.push_bytes

    def replies_to(
        self, worker: int, config: KvstoreConfig, remote: Container[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return where the replies to a worker lie, for each bucket: mean gradients, and weights.

        `remote` has the buckets whose server is on another host.
        """
        copy = worker if worker in self.gradient_replies else 0  # one that all GPUs read
        means, weights = [], []
        for bucket in range(len(self.weights)):
            mean, weight = self.gradient_replies[copy][bucket], self.weight_replies[copy][bucket]
            if bucket not in remote:
                if config.replies_own_gradient:
                    mean = self.pushed[worker][bucket]
                if config.synchronous:
                    weight = self.weights[bucket]
            means.append(mean)
            weights.append(weight)
        return means, weights

    def add(self, more: "Regions", synchronous: bool) -> None:
        """Have the rows of other memory, too. Synchronously one reply is enough for all of them."""
        self.pushed |= more.pushed
        copies = list(more.weight_replies)
        if synchronous:
            copies = [] if self.weight_replies else copies[:1]
        for copy in copies:
            self.weight_replies[copy] = more.weight_replies[copy]
            self.gradient_replies[copy] = more.gradient_replies[copy]

    @staticmethod
    def size(config: KvstoreConfig, layout: BucketLayout, rows: Sequence[int] | None = None) -> int:
        """Return the bytes of the base."""
        copies = config.reply_copies if rows is None else len(rows)
        workers = config.workers if rows is None else len(rows)
        return layout.pull_bytes * (1 + copies) + layout.push_bytes * workers


def views(
    region: Tensor, layout: BucketLayout, in_weight_dtype: bool, push: bool = False
) -> list[Tensor]:
    """Return a view (elements,) of a uint8 region for each bucket, in the weights' or sent dtype.

    `push`: the region holds gradients only, at `push_offset`; otherwise buckets start at
    `pull_offset`.
    """
    buckets = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.weight_dtype if in_weight_dtype else array.wire_dtype]
        offset = bucket.push_offset if push else bucket.pull_offset
        buckets.append(region[offset : offset + bucket.elements * dtype.itemsize].view(dtype))
    return buckets


class Control:
    """Flags, settings and counts, as NumPy views of shared bytes. An entry has one writer.

    Whoever sees a flag also sees the data that was written before it: x86 keeps the order of
    stores. (Arm would need a barrier that Python does not have.)
    """

    pushed: "np.ndarray[Any, Any]"  # (workers, buckets) last exchange whose gradients are there
    done: "np.ndarray[Any, Any]"  # (workers, buckets) last exchange whose reply is there
    # (workers, 1 + SETTINGS) UPDATE or REDUCE, then trainers.optimizers.settings
    settings: "np.ndarray[Any, Any]"
    attached: "np.ndarray[Any, Any]"  # (workers + servers) MAPPED, then READY
    stop: "np.ndarray[Any, Any]"  # (1)
    updates: "np.ndarray[Any, Any]"  # (servers)
    staleness_sum: "np.ndarray[Any, Any]"  # (servers) of the updates
    staleness_max: "np.ndarray[Any, Any]"  # (servers)
    handles: "np.ndarray[Any, Any]"  # (workers + servers, bytes of a handle) of exported GPU memory

    def __init__(self, raw: "np.ndarray[Any, Any]", config: KvstoreConfig, buckets: int) -> None:
        """`raw` holds `size` bytes, uint8; without any, only `size` is set."""
        workers, servers = config.workers, config.servers or config.workers
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("pushed", np.int32, (workers, buckets)),
            ("done", np.int32, (workers, buckets)),
            ("settings", np.float64, (workers, 1 + SETTINGS)),
            ("attached", np.int32, (workers + servers,)),
            ("stop", np.int32, (1,)),
            ("updates", np.int64, (servers,)),
            ("staleness_sum", np.int64, (servers,)),
            ("staleness_max", np.int64, (servers,)),
            ("handles", np.uint8, (workers + servers, memory.HANDLE_BYTES)),
        ]
        offset = 0
        for name, dtype, shape in fields:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if len(raw):
                setattr(self, name, raw[offset : offset + size].view(dtype).reshape(shape))
            offset += aligned(size)
        self.size = offset


def path_on(path: Path, config: KvstoreConfig, host: int) -> Path:
    """Return the path of a host's mapping, from the one that rank 0 names."""
    return path.with_name(f"{path.name}-{host}") if config.places.several else path


def needed_bytes(config: KvstoreConfig, layout: BucketLayout, host: int = 0) -> int:
    """Return the bytes of shared memory that the mapping of a host takes."""
    size = Control(np.empty(0, np.uint8), config, len(layout.buckets)).size
    if not config.server_gpu:
        size += Regions.size(config, layout, config.rows(host))
    return size


class SharedMapping:
    """The mapping of a host as one process sees it."""

    regions: Regions | None = None  # where servers keep them on their GPUs: none

    def __init__(
        self,
        path: Path | None,
        config: KvstoreConfig,
        layout: BucketLayout,
        create: bool = False,
        host: int = 0,
    ) -> None:
        """Map the file; one process of the host creates it. None: a server that shares no memory.

        Raises OSError: not enough shared memory; says how much was needed.
        """
        self.path, self.config, self.layout = path, config, layout
        size_bytes = needed_bytes(config, layout, host)
        if path is None:
            mapping = mmap.mmap(-1, size_bytes)  # takes pages as they are written
        elif create:
            mapping = memory.create(path, size_bytes)
        else:
            mapping = memory.attach(path, size_bytes)
        raw = np.frombuffer(mapping, dtype=np.uint8)
        self.bytes = torch.from_numpy(raw)
        self.address = self.bytes.data_ptr()  # of the first byte, in this process
        self.control = Control(raw, config, len(layout.buckets))
        if not config.server_gpu:
            base = self.bytes[self.control.size :]
            self.regions = Regions(base, config, layout, config.rows(host))


def address_of(view: "np.ndarray[Any, Any]") -> int:
    """Return the address of an array of a control block in this process."""
    return int(view.__array_interface__["data"][0])
