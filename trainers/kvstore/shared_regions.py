"""What workers and servers share: a control block of flags and settings, and regions for gradients and weights.

One file in /dev/shm, mapped by every process of the cell and unlinked as soon as all have it, so that nothing is left
behind however they end. Where GPUs take part the mapping is page-locked (cudaHostRegister), and their copy engines read
and write it; flags are written and awaited by the streams themselves.
"""

import errno
import mmap
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.kvstore.buckets import Array, Layout, Placement, aligned, mxnet, whole

FOLDER = Path("/dev/shm")
PREFIX = "ringside-"
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
# What a worker asks the servers to do with what it pushes.
UPDATE, REDUCE = 0.0, 1.0
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
STALENESS_BINS = 64


@dataclass(frozen=True)
class KvstoreConfig:
    """What workers and servers agree on; all else follows from it."""

    arrays: tuple[Array, ...]
    order: tuple[int, ...]  # arrays in the order of exchange
    cap_bytes: float  # of a bucket
    workers: int
    servers: int  # in processes of their own; 0: every worker serves its share in a thread
    bigarray_bound: int = 0  # elements from which MXNet splits an array over all servers
    synchronous: bool = True
    max_staleness: int | None = None  # updates
    server_gpu: bool = False  # gradients and weights of the servers lie on GPUs
    worker_gpu: bool = False  # workers' gradients lie on GPUs
    copies: int = 1  # of what is handed back: one that all GPUs read, or one for each worker

    @property
    def sharers(self) -> int:
        """Servers, wherever they run."""
        return self.servers or self.workers

    @property
    def echoes(self) -> bool:
        """Whether a mean gradient would be a worker's own, and a GPU can fetch it from where it sent it."""
        return self.worker_gpu and (not self.synchronous or self.workers == 1)

    def layout(self) -> Layout:
        """The buckets; the same for everybody."""
        if self.servers:
            place: Placement = mxnet(self.servers, self.bigarray_bound)
            return Layout.of(self.arrays, self.order, self.cap_bytes, place)
        return Layout.of(self.arrays, self.order, self.cap_bytes, whole, dealt=self.workers)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> "KvstoreConfig":
        """The inverse of to_dict."""
        arrays = tuple(Array(**array) for array in plain["arrays"])
        return KvstoreConfig(**{**plain, "arrays": arrays, "order": tuple(plain["order"])})


class Regions:
    """Views of one base (host memory, or a server's GPU): weights, what is handed back, and every worker's gradients."""

    def __init__(self, base: Tensor, terms: KvstoreConfig, layout: Layout) -> None:
        """`base` holds `Regions.size(terms, layout)` bytes, as uint8."""
        self._base, self._layout, self._terms = base, layout, terms
        self.weights = self._views(0, kept=True)
        self.out = [self._views(self.out_offset(copy), kept=True) for copy in range(terms.copies)]
        # The mean of gradients comes back in the dtype in which they were sent.
        self.out_sent = [self._views(self.out_offset(copy), kept=False) for copy in range(terms.copies)]
        self.pushed = [
            self._views(self.pushed_start(terms, layout, worker), kept=False, push=True)
            for worker in range(terms.workers)
        ]

    @staticmethod
    def size(terms: KvstoreConfig, layout: Layout) -> int:
        """Bytes of the base."""
        return layout.pull_bytes * (1 + terms.copies) + layout.push_bytes * terms.workers

    def out_offset(self, copy: int) -> int:
        """Bytes from the base to one copy of what is handed back."""
        return self._layout.pull_bytes * (1 + copy)

    @staticmethod
    def pushed_start(terms: KvstoreConfig, layout: Layout, worker: int) -> int:
        """Bytes from the base to a worker's gradients."""
        return layout.pull_bytes * (1 + terms.copies) + layout.push_bytes * worker

    def _views(self, start: int, kept: bool, push: bool = False) -> list[Tensor]:
        return views(self._base[start:], self._layout, kept, push)


def views(base: Tensor, layout: Layout, kept: bool, push: bool = False) -> list[Tensor]:
    """A flat tensor for each bucket in a region that starts at `base` (uint8), in the kept or the sent dtype."""
    found = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.kept if kept else array.sent]
        offset = bucket.push_offset if push else bucket.pull_offset
        found.append(base[offset : offset + bucket.elements * dtype.itemsize].view(dtype))
    return found


class Control:
    """Flags, settings and counts, as NumPy views of shared bytes. An entry has one writer.

    Data that is written before a flag is there when the flag is seen: x86 keeps the order of stores. (On Arm a barrier would
    be needed that Python does not have.)
    """

    pushed: "np.ndarray[Any, Any]"  # (workers, buckets) number of the last exchange whose gradients are there
    done: "np.ndarray[Any, Any]"  # (workers, buckets) number of the last exchange whose answer is there
    settings: "np.ndarray[Any, Any]"  # (workers, 4) UPDATE or REDUCE, learning rate, momentum, weight decay
    attached: "np.ndarray[Any, Any]"  # (workers + servers) 1: has mapped the memory; 2: is ready
    stop: "np.ndarray[Any, Any]"  # (1)
    staleness: "np.ndarray[Any, Any]"  # (servers, bins) updates by their staleness; the last: and above
    stale: "np.ndarray[Any, Any]"  # (servers) sum of all staleness
    worst: "np.ndarray[Any, Any]"  # (servers) largest staleness
    handles: "np.ndarray[Any, Any]"  # (workers + servers, 64) of exported GPU memory

    def __init__(self, raw: "np.ndarray[Any, np.dtype[np.uint8]]", terms: KvstoreConfig, buckets: int) -> None:
        workers, sharers = terms.workers, terms.sharers
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("pushed", np.int32, (workers, buckets)),
            ("done", np.int32, (workers, buckets)),
            ("settings", np.float64, (workers, 4)),
            ("attached", np.int32, (workers + sharers,)),
            ("stop", np.int32, (1,)),
            ("staleness", np.int64, (sharers, STALENESS_BINS)),
            ("stale", np.int64, (sharers,)),
            ("worst", np.int64, (sharers,)),
            ("handles", np.uint8, (workers + sharers, HANDLE_BYTES)),
        ]
        offset = 0
        for name, dtype, shape in fields:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if len(raw):
                setattr(self, name, raw[offset : offset + size].view(dtype).reshape(shape))
            offset += aligned(size)
        self.size = offset

    @staticmethod
    def bytes(terms: KvstoreConfig, buckets: int) -> int:
        """Size of the block."""
        return Control(np.empty(0, np.uint8), terms, buckets).size


def needed_bytes(terms: KvstoreConfig, layout: Layout) -> int:
    """Bytes of shared memory that a cell takes."""
    control = Control.bytes(terms, len(layout.buckets))
    return control if terms.server_gpu else control + Regions.size(terms, layout)


class Shared:
    """The mapping of one process."""

    def __init__(self, path: Path, terms: KvstoreConfig, layout: Layout, create: bool = False) -> None:
        """Map the file; the one who creates it takes its pages at once.

        Raises:
            OSError: not enough shared memory; the message says how much was needed.
        """
        self.path, self.terms, self.layout = path, terms, layout
        size = needed_bytes(terms, layout)
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(file, 0, size)  # a page that cannot be had later is a SIGBUS
            self._mapping = mmap.mmap(file, size)
        except OSError as error:
            if create:
                path.unlink()
            reason = "there is not that much" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0)
            raise OSError(error.errno, f"{size / 2**20:.0f} MiB of shared memory in {FOLDER}: {reason}") from None
        finally:
            os.close(file)
        raw = np.frombuffer(self._mapping, dtype=np.uint8)
        self.bytes = torch.from_numpy(raw)
        self.control = Control(raw, terms, len(layout.buckets))
        self.regions = (
            None if terms.server_gpu else Regions(self.bytes[self.control.size :], terms, layout)
        )  # on the host

    @staticmethod
    def new_path() -> Path:
        """A name that no other cell has."""
        return FOLDER / f"{PREFIX}{os.environ.get('RINGSIDE_TOKEN', '')[:16]}-{secrets.token_hex(8)}"

    @property
    def address(self) -> int:
        """Of the mapping's first byte, in this process."""
        return self.bytes.data_ptr()

    def address_of(self, view: "np.ndarray[Any, Any]") -> int:
        """Of an array of the control block."""
        return int(view.__array_interface__["data"][0])
