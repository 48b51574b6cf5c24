"""Collectives as prepared calls: everything is made beforehand, so that a call enqueues and nothing else.

`Torch` goes through torch.distributed, as training does. `Nccl` calls libnccl's functions on the communicator that torch
made, as nccl-tests calls them: without torch's bookkeeping for every call, which small messages would be told by.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Ranks

Call = Callable[[], object]


class Calls(Protocol):
    """Makes calls of one collective; send and receive are views of equal or of one memory (in place)."""

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Call:
        """A call of a collective on these tensors."""

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Calls inside become one."""


class Torch:
    """torch.distributed over whatever backend the tensors' device has."""

    def __init__(self, ranks: Ranks, op: str, root: int) -> None:
        self._ranks, self._root = ranks, root
        self._op = {
            "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
            "avg": dist.ReduceOp.AVG,
        }[op]  # fmt: skip

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Call:
        """all_reduce, broadcast and reduce overwrite `receive`, and take no other input."""
        rank, size, root = self._ranks.rank, self._ranks.world_size, self._root
        partial = functools.partial
        if name == "all_reduce":
            return partial(dist.all_reduce, receive, self._op)
        if name == "broadcast":
            return partial(dist.broadcast, receive, root)
        if name == "reduce":
            return partial(dist.reduce, receive, root, self._op)
        if name == "all_gather":
            return partial(dist.all_gather_into_tensor, receive, send)
        if name == "reduce_scatter":
            return partial(dist.reduce_scatter_tensor, receive, send, self._op)
        if name == "all_to_all":
            return partial(dist.all_to_all_single, receive, send)
        if name == "gather":
            return partial(dist.gather, send, list(receive.chunk(size)) if rank == root else None, root)
        if name == "scatter":
            return partial(dist.scatter, receive, list(send.chunk(size)) if rank == root else None, root)
        to_next = dist.P2POp(dist.isend, send, (rank + 1) % size)
        from_last = dist.P2POp(dist.irecv, receive, (rank - 1) % size)

        def send_receive() -> None:
            for work in dist.batch_isend_irecv([to_next, from_last]):
                work.wait()

        return send_receive

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """all_reduce, all_gather and reduce_scatter only."""
        return dist.distributed_c10d._coalescing_manager()


# nccl.h: ncclDataType_t and ncclRedOp_t.
NCCL_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9,
}  # fmt: skip
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
LIBRARY = "libnccl.so.2"


def loaded_library() -> Any:
    """The libnccl that torch has loaded. Raises OSError where torch has NCCL built in."""
    return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)


class Nccl:
    """libnccl's functions, on one stream."""

    def __init__(self, ranks: Ranks, op: str, root: int, stream: torch.cuda.Stream) -> None:
        """Have torch make its communicator. Collective.

        Raises:
            RuntimeError: torch's NCCL is not in a library of its own.
        """
        try:
            self._library = loaded_library()
        except OSError:
            raise RuntimeError(
                f"benchmark.calls=nccl: torch has not loaded {LIBRARY}; accepted here is torch"
            ) from None
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        dist.all_reduce(torch.zeros(1, device=ranks.device))
        torch.cuda.synchronize(ranks.device)
        backend: Any = dist.group.WORLD
        self._communicator = ctypes.c_void_p(backend._get_backend(ranks.device)._comm_ptr())
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._ranks, self._root, self._op = ranks, ctypes.c_int(root), ctypes.c_int(NCCL_OPS[op])

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Call:
        """Where a version of NCCL lacks gather, scatter or all_to_all, a group of sends and receives as nccl-tests has it."""
        out, into = ctypes.c_void_p(send.data_ptr()), ctypes.c_void_p(receive.data_ptr())
        share = ctypes.c_size_t(min(send.numel(), receive.numel()))
        kind, tail = ctypes.c_int(NCCL_TYPES[send.dtype]), (self._communicator, self._stream)
        size = self._ranks.world_size
        part = ctypes.c_size_t(share.value // size)
        functions = {
            "all_reduce": ("ncclAllReduce", (out, into, share, kind, self._op)),
            "broadcast": ("ncclBroadcast", (out, into, share, kind, self._root)),
            "reduce": ("ncclReduce", (out, into, share, kind, self._op, self._root)),
            "all_gather": ("ncclAllGather", (out, into, share, kind)),
            "reduce_scatter": ("ncclReduceScatter", (out, into, share, kind, self._op)),
            "all_to_all": ("ncclAlltoAll", (out, into, part, kind)),
            "gather": ("ncclGather", (out, into, share, kind, self._root)),
            "scatter": ("ncclScatter", (out, into, share, kind, self._root)),
        }
        function, arguments = functions.get(name, ("", ()))
        if function and hasattr(self._library, function):
            return self._call(function, *arguments, *tail)
        return self._grouped(self._messages(name, send, receive))

    def _messages(self, name: str, send: Tensor, receive: Tensor) -> list[Call]:
        """The sends and receives of this rank."""
        rank, size, root = self._ranks.rank, self._ranks.world_size, self._root.value
        everyone = range(size)
        if name == "send_recv":
            return [self._one("ncclSend", send, (rank + 1) % size), self._one("ncclRecv", receive, (rank - 1) % size)]
        if name == "all_to_all":
            outward = [self._one("ncclSend", part, peer) for peer, part in zip(everyone, send.chunk(size), strict=True)]
            inward = zip(everyone, receive.chunk(size), strict=True)
            return outward + [self._one("ncclRecv", part, peer) for peer, part in inward]
        whole, mine = (receive, send) if name == "gather" else (send, receive)
        at_root, elsewhere = ("ncclRecv", "ncclSend") if name == "gather" else ("ncclSend", "ncclRecv")
        messages = [self._one(elsewhere, mine, root)]
        if rank == root:
            messages += [self._one(at_root, part, peer) for peer, part in zip(everyone, whole.chunk(size), strict=True)]
        return messages

    def exchange(self, messages: Sequence[tuple[str, Tensor, int]]) -> Call:
        """Sends and receives at once: ("ncclSend" or "ncclRecv", tensor, peer). To one peer they match in their order."""
        return self._grouped([self._one(*message) for message in messages])

    def _one(self, function: str, tensor: Tensor, peer: int) -> Call:
        address, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        kind = ctypes.c_int(NCCL_TYPES[tensor.dtype])
        return self._call(function, address, count, kind, ctypes.c_int(peer), self._communicator, self._stream)

    def _call(self, function: str, *arguments: Any) -> Call:
        enqueue, refused = getattr(self._library, function), self._refused

        def call() -> None:
            if status := enqueue(*arguments):
                refused(function, status)

        return call

    def _refused(self, function: str, status: int) -> None:
        raise RuntimeError(f"{function}: {self._library.ncclGetErrorString(status).decode()}")

    def _grouped(self, messages: list[Call]) -> Call:
        start, end = self._call("ncclGroupStart"), self._call("ncclGroupEnd")

        def call() -> None:
            start()
            for message in messages:
                message()
            end()

        return call

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls inside become one group."""
        self._call("ncclGroupStart")()
        yield
        self._call("ncclGroupEnd")()
