"""Prepared calls of collectives: all that a call needs is made before, so that the call only enqueues.

`TorchCalls` go through torch.distributed, as training does. `NcclCalls` call libnccl's functions on the communicator that torch
made, as nccl-tests calls them: without torch's bookkeeping for every call, which takes longer than a small message.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank.ranks import Ranks
from benchmarks.timing.c_calls import CCall, InOrder, address

Call = Callable[[], object]
PointToPoint = tuple[str, Tensor, int]  # ncclSend or ncclRecv, what, the peer


class Calls(Protocol):
    """Prepare calls of one collective; send and receive are views of two buffers, or of one (in place)."""

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Any:
        """Return a call of a collective on these tensors."""

    def in_order(self, calls: Sequence[Any]) -> Call:
        """Return one call that makes prepared calls one after the other."""

    def together(self, calls: Sequence[Any]) -> Any:
        """Return one call that makes prepared calls as one group."""


class TorchCalls:
    """Calls through torch.distributed, over the backend of the tensors' device."""

    def __init__(self, ranks: Ranks, op: str, root: int) -> None:
        self._ranks, self._root = ranks, root
        self._op = {
            "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
            "avg": dist.ReduceOp.AVG,
        }[op]  # fmt: skip

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Call:
        """Return a call of a collective; all_reduce, broadcast and reduce overwrite `receive` and read no `send`."""
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
            return partial(
                dist.gather, send, list(receive.chunk(size)) if rank == root else None, root
            )
        if name == "scatter":
            return partial(
                dist.scatter, receive, list(send.chunk(size)) if rank == root else None, root
            )
        to_next = dist.P2POp(dist.isend, send, (rank + 1) % size)
        from_last = dist.P2POp(dist.irecv, receive, (rank - 1) % size)

        def send_receive() -> None:
            for work in dist.batch_isend_irecv([to_next, from_last]):
                work.wait()

        return send_receive

    def in_order(self, calls: Sequence[Call]) -> Call:
        """Return one call that makes prepared calls in a loop of Python."""

        def make() -> None:
            for call in calls:
                call()

        return make

    def together(self, calls: Sequence[Call]) -> Call:
        """Return one call that makes calls as one group; only of all_reduce, all_gather and reduce_scatter."""
        one_by_one = self.in_order(calls)

        def make() -> None:
            with dist.distributed_c10d._coalescing_manager():
                one_by_one()

        return make


# nccl.h: ncclDataType_t and ncclRedOp_t.
NCCL_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9,
}  # fmt: skip
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
LIBRARY = "libnccl.so.2"


def loaded_library() -> Any:
    """Return the libnccl that torch has loaded. Raises OSError where torch has NCCL built in."""
    return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)


class NcclCalls:
    """Calls of libnccl's functions, on one stream."""

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
        self._communicator = int(backend._get_backend(ranks.device)._comm_ptr())
        self._stream = int(stream.cuda_stream)
        self._ranks, self._root, self._op = ranks, root, NCCL_OPS[op]

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> InOrder:
        """Return a call of a collective. Without that function in NCCL: a group of sends and receives, as in nccl-tests."""
        out, into = send.data_ptr(), receive.data_ptr()
        share, kind = min(send.numel(), receive.numel()), NCCL_TYPES[send.dtype]
        part = share // self._ranks.world_size
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
            return self._made(self._one(function, *arguments, self._communicator, self._stream))
        return self.exchange(self._messages(name, send, receive))

    def _messages(self, name: str, send: Tensor, receive: Tensor) -> list[PointToPoint]:
        """Return the sends and receives of this rank."""
        rank, size, root = self._ranks.rank, self._ranks.world_size, self._root
        everyone = range(size)
        if name == "send_recv":
            return [("ncclSend", send, (rank + 1) % size), ("ncclRecv", receive, (rank - 1) % size)]
        if name == "all_to_all":
            outward = [
                ("ncclSend", part, peer)
                for peer, part in zip(everyone, send.chunk(size), strict=True)
            ]
            return outward + [
                ("ncclRecv", part, peer)
                for peer, part in zip(everyone, receive.chunk(size), strict=True)
            ]
        whole, mine = (receive, send) if name == "gather" else (send, receive)
        at_root, elsewhere = (
            ("ncclRecv", "ncclSend") if name == "gather" else ("ncclSend", "ncclRecv")
        )
        messages = [(elsewhere, mine, root)]
        if rank == root:
            messages += [
                (at_root, part, peer)
                for peer, part in zip(everyone, whole.chunk(size), strict=True)
            ]
        return messages

    def exchange(self, messages: Sequence[PointToPoint]) -> InOrder:
        """Return a call that makes sends and receives as one group. Those of one peer match in their order."""
        return self._group([
            self._one(name, tensor.data_ptr(), tensor.numel(), NCCL_TYPES[tensor.dtype], peer, self._communicator, self._stream)
            for name, tensor, peer in messages
        ])  # fmt: skip

    def in_order(self, calls: Sequence[InOrder]) -> InOrder:
        """Return one call that makes prepared calls in one loop."""
        return self._made(*(one for call in calls for one in call.calls))

    def together(self, calls: Sequence[InOrder]) -> InOrder:
        """Return one call that makes prepared calls as one group; groups within it are flattened."""
        return self._group([one for call in calls for one in call.calls])

    def _group(self, calls: list[CCall]) -> InOrder:
        return self._made(self._one("ncclGroupStart"), *calls, self._one("ncclGroupEnd"))

    def _one(self, name: str, *arguments: int) -> CCall:
        return CCall(name, address(self._library, name), arguments)

    def _made(self, *calls: CCall) -> InOrder:
        return InOrder(calls, lambda status: str(self._library.ncclGetErrorString(status).decode()))
