"""What workers and servers share: a control block of flags and settings, and regions for gradients and weights.

Both lie in one shared mapping (trainers.memory). Where GPUs take part the mapping is page-locked
(cudaHostRegister): their copy engines read and write it, and streams write flags and wait for them.
"""

import mmap
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers import memory as shared_memory
from trainers.hosts import Hosts
from trainers.kvstore.buckets import Array, BucketLayout, Placement, aligned, mxnet, whole
from trainers.optimizers import SETTINGS

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
# What a worker asks the servers to do with its gradients: update the weights, or only reduce.
UPDATE, REDUCE = 0.0, 1.0
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
STALENESS_BINS = (
    64  # more than any bound on staleness that anybody measures; the last bin takes what is above
)


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
    hosts: int = (
        1  # that have workers and servers like these, and reduce their means with each other
    )
    places: Hosts | None = (
        None  # where workers and server processes are on several hosts; None: on one
    )

    @property
    def server_count(self) -> int:
        """Return the number of servers, in processes of their own or in the workers."""
        return self.servers or self.workers

    @property
    def replies_own_gradient(self) -> bool:
        """Return whether a mean gradient would be the worker's own, which a GPU can fetch from where it pushed it."""
        return self.worker_gpu and self.hosts == 1 and (not self.synchronous or self.workers == 1)

    def layout(self) -> BucketLayout:
        """Return the buckets, which are the same in every process."""
        if self.servers:
            place: Placement = mxnet(self.servers, self.bigarray_bound)
            return BucketLayout.of(self.arrays, self.order, self.cap_bytes, place)
        return BucketLayout.of(self.arrays, self.order, self.cap_bytes, whole, dealt=self.workers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> "KvstoreConfig":
        """Make the config of a to_dict."""
        arrays = tuple(Array(**array) for array in plain["arrays"])
        places = plain["places"] and Hosts(
            tuple(map(tuple, plain["places"]["ranks"])), tuple(plain["places"]["server_hosts"])
        )
        return KvstoreConfig(
            **{**plain, "arrays": arrays, "order": tuple(plain["order"]), "places": places}
        )

    @property
    def servers_together(self) -> int:
        """Return the most servers that a host has: they share its cores."""
        placed = self.places.server_hosts if self.places else ()
        return max(map(placed.count, placed), default=self.servers)

    def processes_on(self, host: int) -> list[int]:
        """Return the rows in `Control.attached` of a host's workers and servers."""
        if self.places is None:
            return list(range(self.workers + self.servers))
        servers = [
            self.workers + number
            for number, place in enumerate(self.places.server_hosts)
            if place == host
        ]
        return [*self.places.ranks[host], *servers]

    def elsewhere(self, host: int) -> list[int]:
        """Return the workers that are not on a host."""
        return [
            worker
            for worker in range(self.workers)
            if self.places and self.places.host_of(worker) != host
        ]

    def rows(self, host: int) -> tuple[int, ...] | None:
        """Return the workers that have gradients and replies of their own in a host's memory; None: as `reply_copies` says."""
        if self.places is None:
            return None
        return self.places.ranks[host] if host < len(self.places.ranks) else ()


class Regions:
    """Views of one base (host memory, or a server's GPU), a flat tensor for each bucket.

    The base holds, one after the other: weights, `reply_copies` replies, and the pushed gradients of every worker. A reply
    is weights in their dtype or the mean gradient in the dtype in which gradients travel; both views start at the same byte.
    Of several hosts, the memory of one has a reply and gradients for some workers only, its `rows`.
    """

    def __init__(
        self,
        base: Tensor,
        config: KvstoreConfig,
        layout: BucketLayout,
        rows: Sequence[int] | None = None,
    ) -> None:
        """`base` is uint8 and holds `Regions.size(config, layout, rows)` bytes."""
        copies = range(config.reply_copies) if rows is None else rows
        replies = {copy: base[layout.pull_bytes * place :] for place, copy in enumerate(copies, 1)}
        pushed = base[layout.pull_bytes * (1 + len(copies)) :]
        self.weights = views(base, layout, in_weight_dtype=True)
        self.weight_replies = {
            copy: views(reply, layout, in_weight_dtype=True) for copy, reply in replies.items()
        }
        self.gradient_replies = {
            copy: views(reply, layout, in_weight_dtype=False) for copy, reply in replies.items()
        }
        self.pushed = {
            worker: views(
                pushed[layout.push_bytes * place :], layout, in_weight_dtype=False, push=True
            )
            for place, worker in enumerate(range(config.workers) if rows is None else rows)
        }

    def replies_to(
        self, worker: int, config: KvstoreConfig, far: Container[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return where the replies to a worker lie, for each bucket: mean gradients, and weights.

        `far` has the buckets whose server is on another host.
        """
        copy = worker if worker in self.gradient_replies else 0  # one that all GPUs read
        own = (self.gradient_replies[copy], self.weight_replies[copy])
        near = (
            self.pushed[worker] if config.replies_own_gradient else own[0],
            self.weights if config.synchronous else own[1],
        )
        chosen = [own if bucket in far else near for bucket in range(len(self.weights))]
        means, weights = (
            [one[kind][bucket] for bucket, one in enumerate(chosen)] for kind in (0, 1)
        )
        return means, weights

    def add(self, others: "Regions", synchronous: bool) -> None:
        """Have the rows of other memory, too. Synchronously one copy of the mean is enough for all of them."""
        self.pushed |= others.pushed
        for mine, more in (
            (self.weight_replies, others.weight_replies),
            (self.gradient_replies, others.gradient_replies),
        ):
            mine |= dict(list(more.items())[: 0 if mine else 1]) if synchronous else more

    @staticmethod
    def size(config: KvstoreConfig, layout: BucketLayout, rows: Sequence[int] | None = None) -> int:
        """Return the bytes of the base."""
        if rows is not None:
            return layout.pull_bytes * (1 + len(rows)) + layout.push_bytes * len(rows)
        return Regions.pushed_start(config, layout, config.workers)

    @staticmethod
    def pushed_start(config: KvstoreConfig, layout: BucketLayout, worker: int) -> int:
        """Return the bytes from the base to a worker's gradients, where every worker has some."""
        return layout.pull_bytes * (1 + config.reply_copies) + layout.push_bytes * worker


def views(
    region: Tensor, layout: BucketLayout, in_weight_dtype: bool, push: bool = False
) -> list[Tensor]:
    """Return a view (elements,) for each bucket of a region (uint8), in the weights' dtype or the one that travels.

    `push`: the region holds gradients only, at `push_offset`; otherwise buckets start at `pull_offset`.
    """
    found = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.weight_dtype if in_weight_dtype else array.wire_dtype]
        offset = bucket.push_offset if push else bucket.pull_offset
        found.append(region[offset : offset + bucket.elements * dtype.itemsize].view(dtype))
    return found


class Control:
    """Flags, settings and counts, as NumPy views of shared bytes. An entry has one writer.

    Whoever sees a flag also sees the data that was written before it: x86 keeps the order of stores. (Arm would need a
    barrier that Python does not have.)
    """

    pushed: "np.ndarray[Any, Any]"  # (workers, buckets) number of the last exchange whose gradients are there
    done: "np.ndarray[Any, Any]"  # (workers, buckets) number of the last exchange whose reply is there
    settings: "np.ndarray[Any, Any]"  # (workers, 1 + SETTINGS) UPDATE or REDUCE, then trainers.optimizers.settings
    attached: "np.ndarray[Any, Any]"  # (workers + servers) 1: has mapped the memory; 2: is ready
    stop: "np.ndarray[Any, Any]"  # (1)
    staleness_counts: "np.ndarray[Any, Any]"  # (servers, STALENESS_BINS) updates by their staleness
    staleness_sum: "np.ndarray[Any, Any]"  # (servers)
    staleness_max: "np.ndarray[Any, Any]"  # (servers)
    handles: "np.ndarray[Any, Any]"  # (workers + servers, HANDLE_BYTES) of exported GPU memory

    def __init__(
        self, raw: "np.ndarray[Any, np.dtype[np.uint8]]", config: KvstoreConfig, buckets: int
    ) -> None:
        """`raw` holds `Control.bytes(config, buckets)` bytes; without any, only `size` is set."""
        workers, servers = config.workers, config.server_count
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("pushed", np.int32, (workers, buckets)),
            ("done", np.int32, (workers, buckets)),
            ("settings", np.float64, (workers, 1 + SETTINGS)),
            ("attached", np.int32, (workers + servers,)),
            ("stop", np.int32, (1,)),
            ("staleness_counts", np.int64, (servers, STALENESS_BINS)),
            ("staleness_sum", np.int64, (servers,)),
            ("staleness_max", np.int64, (servers,)),
            ("handles", np.uint8, (workers + servers, HANDLE_BYTES)),
        ]
        offset = 0
        for name, dtype, shape in fields:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if len(raw):
                setattr(self, name, raw[offset : offset + size].view(dtype).reshape(shape))
            offset += aligned(size)
        self.size = offset

    @staticmethod
    def bytes(config: KvstoreConfig, buckets: int) -> int:
        """Return the size of the block."""
        return Control(np.empty(0, np.uint8), config, buckets).size


def path_on(path: Path, config: KvstoreConfig, host: int) -> Path:
    """Return the path of a host's mapping, from the one that rank 0 names."""
    return path.with_name(f"{path.name}-{host}") if config.places else path


def needed_bytes(config: KvstoreConfig, layout: BucketLayout, host: int = 0) -> int:
    """Return the bytes of shared memory that the mapping of a host takes."""
    control = Control.bytes(config, len(layout.buckets))
    return (
        control if config.server_gpu else control + Regions.size(config, layout, config.rows(host))
    )


class SharedMapping:
    """The mapping of a host as one process sees it."""

    regions: Regions | None  # None where servers keep them on their GPUs

    def __init__(
        self,
        path: Path | None,
        config: KvstoreConfig,
        layout: BucketLayout,
        create: bool = False,
        host: int = 0,
    ) -> None:
        """Map the file; one process of the host creates it. None: a server shares no memory, and has its own.

        Raises:
            OSError: not enough shared memory; says how much was needed.
        """
        self.path, self.config, self.layout = path, config, layout
        size_bytes = needed_bytes(config, layout, host)
        if path is None:
            mapping = mmap.mmap(-1, size_bytes)  # takes pages as they are written
        else:
            mapping = (shared_memory.create if create else shared_memory.attach)(path, size_bytes)
        raw = np.frombuffer(mapping, dtype=np.uint8)
        self.bytes = torch.from_numpy(raw)
        self.control = Control(raw, config, len(layout.buckets))
        on_host = not config.server_gpu
        self.regions = (
            Regions(self.bytes[self.control.size :], config, layout, config.rows(host))
            if on_host
            else None
        )

    @property
    def address(self) -> int:
        """Return the address of the mapping's first byte in this process."""
        return self.bytes.data_ptr()

    def address_of(self, view: "np.ndarray[Any, Any]") -> int:
        """Return the address of an array of the control block in this process."""
        return int(view.__array_interface__["data"][0])
