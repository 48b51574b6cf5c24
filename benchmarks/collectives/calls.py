"""Prepared calls of collectives: all that a call needs is made before, so that it only enqueues.

`TorchCalls` go through torch.distributed, as training does. `NcclCalls` call libnccl's functions on
the communicator that torch made, as nccl-tests does: without torch's bookkeeping for every call,
which takes longer than a small message. Both have `prepare`, `in_order` and `together`.

Wrong elements are counted on the device, as every rank's input is known: small whole numbers, mixed
from the element's place and the rank, whose sums are exact in every dtype (what is too large for an
integer wraps alike). No element is 0, so that what was never written is wrong. Only of sums over
more than MOST_SUMMED ranks, which bfloat16 would round, each rank has a part and is 0 elsewhere.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank.ranks import Ranks
from benchmarks.timing.c_calls import CCall, InOrder, address

Call = Callable[[], object]
PointToPoint = tuple[str, Tensor, int]  # ncclSend or ncclRecv, what, the peer
LIBRARY = "libnccl.so.2"
# nccl.h: ncclDataType_t and ncclRedOp_t.
NCCL_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class TorchCalls:
    """Calls through torch.distributed, over the backend of the tensors' device."""

    def __init__(self, ranks: Ranks, op: str, root: int) -> None:
        self._ranks, self._root, self._op = ranks, root, TORCH_OPS[op]

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> Call:
        """Return a call of a collective; views of two buffers, or of one (in place).

        all_reduce, broadcast and reduce overwrite `receive` and read no `send`.
        """
        rank, size, root, op = self._ranks.rank, self._ranks.world_size, self._root, self._op
        function: Any
        arguments: tuple[Any, ...]
        if name == "all_reduce":
            function, arguments = dist.all_reduce, (receive, op)
        elif name == "broadcast":
            function, arguments = dist.broadcast, (receive, root)
        elif name == "reduce":
            function, arguments = dist.reduce, (receive, root, op)
        elif name == "all_gather":
            function, arguments = dist.all_gather_into_tensor, (receive, send)
        elif name == "reduce_scatter":
            function, arguments = dist.reduce_scatter_tensor, (receive, send, op)
        elif name == "all_to_all":
            function, arguments = dist.all_to_all_single, (receive, send)
        elif name == "gather":
            parts = list(receive.chunk(size)) if rank == root else None
            function, arguments = dist.gather, (send, parts, root)
        elif name == "scatter":
            parts = list(send.chunk(size)) if rank == root else None
            function, arguments = dist.scatter, (receive, parts, root)
        else:
            to_next = dist.P2POp(dist.isend, send, (rank + 1) % size)
            from_last = dist.P2POp(dist.irecv, receive, (rank - 1) % size)

            def send_receive() -> None:
                for work in dist.batch_isend_irecv([to_next, from_last]):
                    work.wait()

            return send_receive
        return functools.partial(function, *arguments)

    def in_order(self, calls: Sequence[Call]) -> Call:
        """Return one call that makes prepared calls in a loop of Python."""

        def make() -> None:
            for call in calls:
                call()

        return make

    def together(self, calls: Sequence[Call]) -> Call:
        """Return one call that makes calls as a group; only of request.COALESCED."""
        in_turn = self.in_order(calls)

        def make() -> None:
            with dist.distributed_c10d._coalescing_manager():
                in_turn()

        return make


def loaded_library() -> Any:
    """Return the libnccl that torch has loaded. Raises OSError where torch has NCCL built in."""
    return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)


class NcclCalls:
    """Calls of libnccl's functions, on one stream."""

    def __init__(self, ranks: Ranks, op: str, root: int, stream: torch.cuda.Stream) -> None:
        """Have torch make its communicator. Collective.

        Raises RuntimeError: torch's NCCL is not in a library of its own.
        """
        try:
            self._library = loaded_library()
        except OSError:
            raise RuntimeError(
                f"benchmark.calls=nccl: torch has not loaded {LIBRARY}; possible here: torch"
            ) from None
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        dist.all_reduce(torch.zeros(1, device=ranks.device))
        torch.cuda.synchronize(ranks.device)
        backend: Any = dist.group.WORLD
        self._communicator = int(backend._get_backend(ranks.device)._comm_ptr())
        self._stream = int(stream.cuda_stream)
        self._ranks, self._root, self._op = ranks, root, NCCL_OPS[op]

    def prepare(self, name: str, send: Tensor, receive: Tensor) -> InOrder:
        """Return a call of a collective.

        Without that function in NCCL: a group of sends and receives, as in nccl-tests.
        """
        out, into = send.data_ptr(), receive.data_ptr()
        share, dtype = min(send.numel(), receive.numel()), NCCL_TYPES[send.dtype]
        op, root = self._op, self._root
        functions = {
            "all_reduce": ("ncclAllReduce", (out, into, share, dtype, op)),
            "broadcast": ("ncclBroadcast", (out, into, share, dtype, root)),
            "reduce": ("ncclReduce", (out, into, share, dtype, op, root)),
            "all_gather": ("ncclAllGather", (out, into, share, dtype)),
            "reduce_scatter": ("ncclReduceScatter", (out, into, share, dtype, op)),
            "all_to_all": ("ncclAlltoAll", (out, into, share // self._ranks.world_size, dtype)),
            "gather": ("ncclGather", (out, into, share, dtype, root)),
            "scatter": ("ncclScatter", (out, into, share, dtype, root)),
        }
        if name in functions:
            function, arguments = functions[name]
            if hasattr(self._library, function):
                return self._made(
                    self._call(function, *arguments, self._communicator, self._stream)
                )
        rank, size = self._ranks.rank, self._ranks.world_size
        messages: list[PointToPoint] = []
        if name == "send_recv":
            messages.append(("ncclSend", send, (rank + 1) % size))
            messages.append(("ncclRecv", receive, (rank - 1) % size))
        if name == "gather":
            messages.append(("ncclSend", send, root))
        if name == "scatter":
            messages.append(("ncclRecv", receive, root))
        if name == "all_to_all" or (name == "scatter" and rank == root):
            for peer, part in enumerate(send.chunk(size)):
                messages.append(("ncclSend", part, peer))
        if name == "all_to_all" or (name == "gather" and rank == root):
            for peer, part in enumerate(receive.chunk(size)):
                messages.append(("ncclRecv", part, peer))
        return self.exchange(messages)

    def exchange(self, messages: Sequence[PointToPoint]) -> InOrder:
        """Return a call that makes sends and receives as one group, matched in their order."""
        calls = []
        for name, tensor, peer in messages:
            arguments = (tensor.data_ptr(), tensor.numel(), NCCL_TYPES[tensor.dtype], peer)
            calls.append(self._call(name, *arguments, self._communicator, self._stream))
        return self._group(calls)

    def in_order(self, calls: Sequence[InOrder]) -> InOrder:
        """Return one call that makes prepared calls in one loop."""
        return self._made(*itertools.chain.from_iterable(call.calls for call in calls))

    def together(self, calls: Sequence[InOrder]) -> InOrder:
        """Return one call that makes prepared calls as one group; groups within are flattened."""
        return self._group(list(itertools.chain.from_iterable(call.calls for call in calls)))

    def _group(self, calls: list[CCall]) -> InOrder:
        return self._made(self._call("ncclGroupStart"), *calls, self._call("ncclGroupEnd"))

    def _call(self, name: str, *arguments: int) -> CCall:
        return CCall(name, address(self._library, name), arguments)

    def _made(self, *calls: CCall) -> InOrder:
        return InOrder(calls, self._message)

    def _message(self, status: int) -> str:
        return str(self._library.ncclGetErrorString(status).decode())


# Elements compared at once: bounds the memory that comparing takes.
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}
# Numbers of 1 to 4: their sum is at most 256, up to which bfloat16 has every whole number.
MOST_SUMMED = 62


def known_input(
    rank: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
    op: str,
    device: torch.device,
    size: int = 1,
) -> Tensor:
    """Return elements start to stop of the input of one of `size` ranks: 1 to 4.

    For products 1, and 2 at one in sixteen.
    """
    indices = torch.arange(start, stop, device=device)
    mixed = ((indices + (rank + 1) * 7919) * 2654435761).bitwise_right_shift_(16)
    if op == "prod":
        return (mixed.bitwise_and_(15) == 0).add(1).to(dtype)
    values = mixed.bitwise_and_(3).add_(1).to(dtype)
    turns = -(-size // MOST_SUMMED)
    if turns > 1 and op in ("sum", "avg"):
        values.mul_((indices + rank) % turns == 0)
    return values


def fill(tensor: Tensor, rank: int, op: str, size: int) -> None:
    """Fill a tensor with the known input of one of `size` ranks."""
    for start, stop in _chunks(tensor):
        tensor[start:stop] = known_input(rank, start, stop, tensor.dtype, op, tensor.device, size)


def wrong_elements(name: str, received: Tensor, op: str, root: int, ranks: Ranks) -> int:
    """Return how many elements of this rank's result are not what the known inputs make.

    `received` is the whole result. Of gather and reduce only the root has one: 0 elsewhere.
    """
    rank, size = ranks.rank, ranks.world_size
    if name in ("gather", "reduce") and rank != root:
        return 0
    share = received.numel()
    if name in ("all_gather", "all_to_all", "gather"):
        share //= size
    first = 0
    if name in ("reduce_scatter", "scatter", "all_to_all"):
        first = rank * share
    dtype, device = received.dtype, received.device
    if name in ("all_reduce", "reduce", "reduce_scatter"):

        def reduced(start: int, stop: int) -> Tensor:
            total = known_input(0, first + start, first + stop, dtype, op, device, size)
            for peer in range(1, size):
                part = known_input(peer, first + start, first + stop, dtype, op, device, size)
                if op == "prod":
                    total.mul_(part)
                elif op == "min":
                    torch.minimum(total, part, out=total)
                elif op == "max":
                    torch.maximum(total, part, out=total)
                else:
                    total.add_(part)
            return total.div_(size) if op == "avg" else total

        return _differing(received, reduced, op, size)
    sources = range(size)
    if name in ("broadcast", "scatter"):
        sources = range(root, root + 1)
    elif name == "send_recv":
        sources = range((rank - 1) % size, (rank - 1) % size + 1)
    wrong = 0
    for part, source in zip(received.split(share), sources, strict=True):

        def sent(start: int, stop: int, source: int = source) -> Tensor:
            return known_input(source, first + start, first + stop, dtype, op, device, size)

        wrong += _differing(part, sent, op, size)
    return wrong


def _differing(received: Tensor, expected: Callable[[int, int], Tensor], op: str, size: int) -> int:
    # How far a mean may be off, in units of the dtype's precision: each rank's part and each sum
    # is rounded by half of one.
    units = max(2, min(size, MOST_SUMMED) // 2 + 1)
    wrong = 0
    for start, stop in _chunks(received):
        own, right = received[start:stop], expected(start, stop)
        differs = own != right
        if op == "avg":
            limit = units * torch.finfo(own.dtype).eps * right.double()
            differs = ~((own.double() - right.double()).abs() <= limit)  # so is NaN
        wrong += int(differs.sum().item())
    return wrong


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    step = CHUNK[tensor.device.type]
    for start in range(0, tensor.numel(), step):
        yield start, min(start + step, tensor.numel())
