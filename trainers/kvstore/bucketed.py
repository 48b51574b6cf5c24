"""A strategy that exchanges gradients in buckets while backward still runs.

What happens in a step, and what a subclass defines of it:
  in backward    a gradient arrives; once a bucket is complete: `start_bucket`
  in `exchange`  `finish_buckets`; in the first step also `set_up` and every `start_bucket`, since that step shows which
                 gradients there are
  in `update`    `apply_weights`
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import collectives as told
from trainers import comm_hooks, optimizers
from trainers.kvstore.buckets import Array, Bucket, BucketLayout
from trainers.kvstore.shared_memory import DTYPES
from trainers.optimizers import FlatSteps
from trainers.strategy import ExchangeAlone, SentBucket, Strategy

NAMED = 5  # parameters that an error names at most


class Bucketed(Strategy):
    """What all strategies with buckets share.

    Arrays are the parameters, numbered as the optimizer has them. The gradients of the first step, in rank 0's order of
    arrival, are those that are exchanged in every step (torch's DDP calls that a static graph).
    """

    layout: BucketLayout  # after `set_up`
    flat_sent: list[Tensor]  # for each bucket (at least elements,): the gradient that is exchanged
    flat_means: list[Tensor]  # … where the mean gradient arrives, if `only_gradients`

    def __init__(self, bucket_cap_mb: float, comm_hook: str, only_gradients: bool = False) -> None:
        """`only_gradients`: in steps, too, the mean gradient comes back and every rank updates its own weights."""
        self.cap_bytes = bucket_cap_mb * (1 << 20)
        self.comm_hook = comm_hook
        self.rounding = comm_hooks.ROUNDING.get(comm_hook, 0.0)
        self.smallest_step = comm_hooks.SMALLEST_STEP.get(comm_hook, 0.0)
        self.parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._names: dict[int, str] = {}
        self._arrived: list[int] = []  # arrays, in this step
        self._buckets_of: dict[int, list[int]] | None = None  # of each array, once they are set up
        self._missing: list[int] = []  # of each bucket: parts that have not arrived in this step
        self._parts: list[int] = []  # of each bucket
        self._next = 0  # the first bucket that was not started in this step
        self._exchanging = True
        self.only_gradients = self._usually = only_gradients

    # What a subclass defines.

    @abstractmethod
    def set_up(self, order: list[int]) -> None:
        """Make the buckets of these arrays, in this order, and what else an exchange needs. Once; collective."""

    @abstractmethod
    def start_bucket(self, bucket: int) -> None:
        """Begin to exchange `flat_sent[bucket]`. May be called inside backward: enqueues, and waits for nothing."""

    @abstractmethod
    def finish_buckets(self) -> None:
        """End the exchange. Every bucket was started; `flat_means` is filled if `only_gradients`. Never inside backward."""

    @abstractmethod
    def apply_weights(self) -> None:
        """Set the parameters to the weights of the next step. Never inside backward; `finish_buckets` was called."""

    # The seam (trainers.strategy).

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Broadcast rank 0's weights, and have every parameter report its gradient. Returns the model as it is."""
        self.optimizer = optimizer
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {
            number: named.get(id(parameter), "") for number, parameter in enumerate(self.parameters)
        }
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self._gradient_arrived, number)
            )
        with torch.no_grad():
            for tensor in [*self.parameters, *model.buffers()]:
                # Over the host: where gradients do not travel by NCCL, NCCL's log must not show any traffic.
                on_host = tensor.detach().cpu()
                dist.broadcast(on_host, 0)
                tensor.copy_(on_host)
        return model

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Let every rank update alone."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    @contextmanager
    def gradients_only(self) -> Iterator[None]:
        """Bring the mean gradient back."""
        self.set_gradients_only(True)
        try:
            yield
        finally:
            self.set_gradients_only(self._usually)

    def set_gradients_only(self, only_gradients: bool) -> None:
        """Choose what comes back: the mean gradient, or weights. Waits for the device, so that no exchange is under way."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.only_gradients = only_gradients

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone:
        """Start every bucket, then end the exchange."""
        if self._buckets_of is None:
            self.parameters = parameters
            self._agree(list(reversed(range(len(parameters)))))
        alone = _BucketsAlone(self)
        alone.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return alone

    def buckets(self) -> list[SentBucket] | None:
        """Return the buckets; None before the first step."""
        if self._buckets_of is None:
            return None
        found = []
        for bucket, flat in zip(self.layout.buckets, self.flat_sent, strict=True):
            parameters = tuple(self.parameters[part.array] for part in bucket.parts)
            gradient_bytes = bucket.elements * parameters[0].element_size()
            found.append(
                SentBucket(
                    parameters, gradient_bytes, flat.nbytes, str(flat.dtype).removeprefix("torch.")
                )
            )
        return found

    def exchange(self) -> None:
        """End the exchange that backward began. With `only_gradients`, the means go to `.grad`.

        Raises:
            RuntimeError: other parameters have gradients than in the first step, or than on rank 0.
        """
        if not self._exchanging:
            return
        arrived, self._arrived = self._arrived, []
        if self._buckets_of is None:
            self._agree(arrived)
            for bucket in range(len(self._parts)):
                self._gather_and_start(bucket)
        elif len(arrived) != len(self._buckets_of):
            absent = [self._names[number] for number in self._buckets_of if number not in arrived]
            raise RuntimeError(
                f"this step gave no gradient for {', '.join(absent[:NAMED])}, but the first step did"
            )
        self._missing, self._next = list(self._parts), 0
        self.finish_buckets()
        if self.only_gradients:
            scatter(self.layout.buckets, self.flat_means, self.gradients())

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the strategy's weights; step the optimizer where only gradients, or nothing, is exchanged."""
        if self._exchanging and not self.only_gradients:
            self.apply_weights()
        else:
            optimizer.step()

    # For subclasses.

    def gradients(self) -> list[Tensor]:
        """Return every `.grad`, by number of its array; an empty tensor where there is none."""
        return [
            parameter.new_empty(0) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]

    def settings(self) -> tuple[float, ...]:
        """Return what says how a step of the optimizer is taken (trainers.optimizers.settings)."""
        return optimizers.settings(self.optimizer)

    def steps_of(self, weights: Tensor) -> FlatSteps:
        """Return what takes the optimizer's steps on flat weights (elements,)."""
        return FlatSteps(optimizers.name_of(self.optimizer), weights)

    def sent_bytes(self, gradient_bytes: float) -> float:
        """Return the bytes that the communication hook leaves of `gradient_bytes`."""
        return gradient_bytes * comm_hooks.share(self.parameters, self.comm_hook)

    def pipelined(self) -> Callable[[], None] | None:
        """Return what ExchangeAlone.pipelined returns."""
        return None

    # Inside backward.

    def _gradient_arrived(self, number: int, parameter: Tensor) -> None:
        if not self._exchanging:
            return
        self._arrived.append(number)
        if self._buckets_of is None:
            return
        if number not in self._buckets_of:
            raise RuntimeError(
                f"{self._names[number]} has a gradient in this step, but had none in the first step"
            )
        for bucket in self._buckets_of[number]:
            self._missing[bucket] -= 1
        # In order on every rank: collectives must match, whatever order gradients come in.
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._gather_and_start(self._next)
            self._next += 1

    def _gather_and_start(self, bucket: int) -> None:
        gather(self.layout.buckets[bucket], self.gradients(), self.flat_sent[bucket])
        self.start_bucket(bucket)

    def _agree(self, arrived: Sequence[int]) -> None:
        """Set up the buckets of the arrays that have gradients, in rank 0's order. Collective."""
        order = told.by_first(list(arrived))
        odd = {number for number in order if isinstance(number, int)} ^ set(arrived)
        if odd or len(order) != len(arrived):
            names = ", ".join(
                self._names.get(number, str(number)) for number in sorted(odd)[:NAMED]
            )
            raise RuntimeError(
                f"rank {dist.get_rank()} and rank 0 have gradients for different parameters: {names}"
            )
        self.set_up(order)
        self._buckets_of = self.layout.buckets_of()
        self._parts = [0] * (
            1 + max((b for found in self._buckets_of.values() for b in found), default=-1)
        )
        for found in self._buckets_of.values():
            for bucket in found:
                self._parts[bucket] += 1


class _BucketsAlone(ExchangeAlone):
    """The exchange of a strategy with buckets, inside its `gradients_only`."""

    def __init__(self, strategy: Bucketed) -> None:
        self._strategy = strategy

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy gradients into the flat buckets."""
        for bucket, flat in zip(
            self._strategy.layout.buckets, self._strategy.flat_sent, strict=True
        ):
            gather(bucket, gradients, flat)

    def __call__(self) -> None:
        """Start all buckets, then end the exchange."""
        for number in range(len(self._strategy.layout.buckets)):
            self._strategy.start_bucket(number)
        self._strategy.finish_buckets()

    def pipelined(self) -> Callable[[], None] | None:
        """Return the strategy's own, if it can have two exchanges under way."""
        return self._strategy.pipelined()

    def result(self) -> list[Tensor]:
        """Return copies in the parameters' shapes; zeros where a parameter is in no bucket."""
        found = [torch.zeros_like(parameter) for parameter in self._strategy.parameters]
        scatter(self._strategy.layout.buckets, self._strategy.flat_means, found)
        return found


def dense(tensor: Tensor) -> Tensor:
    """Return a view (elements,) of a tensor in the order of memory, channels-last or not. A gradient lies as its weight."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def arrays_of(parameters: Sequence[Tensor], comm_hook: str) -> tuple[Array, ...]:
    """Return the parameters as arrays of a layout."""
    dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
    return tuple(
        Array(parameter.numel(), dtype, comm_hooks.SENT.get(comm_hook, dtype))
        for parameter, dtype in zip(parameters, dtypes, strict=True)
    )


@torch.no_grad()
def gather(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a bucket's parts of `tensors`, one of any shape for each array, to `flat`, and cast them to its dtype.

    `flat` is (at least bucket.elements,); what is beyond that is padding and stays.
    """
    torch._foreach_copy_(_split(bucket, flat), _parts(bucket, tensors))


@torch.no_grad()
def scatter(buckets: Sequence[Bucket], flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy flat buckets, one for each of `buckets`, back to `tensors`, one for each array: the inverse of gather."""
    targets = [part for bucket in buckets for part in _parts(bucket, tensors)]
    torch._foreach_copy_(
        targets, [part for b, flat in zip(buckets, flats, strict=True) for part in _split(b, flat)]
    )


def _split(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    # A flat bucket may be padded, so that it can be shared equally among ranks.
    return list(flat[: bucket.elements].split([part.stop - part.start for part in bucket.parts]))


def _parts(bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [dense(tensors[part.array])[part.start : part.stop] for part in bucket.parts]


# Buckets that collectives move: flat tensors, padded so that every rank owns an equal share of each.


# A share is a multiple of this many elements: 512 bytes of half precision, so that every share starts at an aligned address.
SHARE_ELEMENTS = 256


def share_of(bucket: Bucket, world_size: int) -> int:
    """Return the elements of a bucket that each rank owns, with the padding of the last rank."""
    return -(-bucket.elements // (world_size * SHARE_ELEMENTS)) * SHARE_ELEMENTS


def padded(
    layout: BucketLayout, world_size: int, in_weight_dtype: bool, device: torch.device
) -> list[Tensor]:
    """Return zeros (world_size × share,) for each bucket, in the weights' dtype or the one that travels."""
    found = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.weight_dtype if in_weight_dtype else array.wire_dtype]
        found.append(
            torch.zeros(share_of(bucket, world_size) * world_size, dtype=dtype, device=device)
        )
    return found


def shares(flats: Sequence[Tensor], rank: int, world_size: int) -> list[Tensor]:
    """Return a view (share,) of a rank's share of each flat tensor."""
    return [flat.chunk(world_size)[rank] for flat in flats]


def start_mean(share: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Reduce-scatter `flat` (ranks × share,): `share` has the mean over a group once `end_mean` was called too.

    Without a group, here and below: over all ranks.
    """
    work = dist.reduce_scatter_tensor(share, flat, mean_operation(flat), group, async_op=True)
    assert work is not None
    return work


def end_mean(work: dist.Work, share: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Make the current stream wait for the mean."""
    work.wait()
    if not share.is_cuda:
        share.div_(dist.get_world_size(group))


def all_shares(
    flats: Sequence[Tensor], own: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """All-gather the shares (share,) of a group's ranks into the flat tensors (ranks × share,)."""
    if flats and flats[0].is_cuda:
        # NCCL sends them in one kernel, as fast as one tensor of all bytes: on its own a small one does not fill the links.
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as together:
            for flat, share in zip(flats, own, strict=True):
                dist.all_gather_into_tensor(flat, share, group)
        together.wait()
        return
    works = [
        dist.all_gather_into_tensor(flat, share, group, async_op=True)
        for flat, share in zip(flats, own, strict=True)
    ]
    for work in works:
        assert work is not None
        work.wait()


def ring_bytes(sent_bytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends when a ring reduce-scatters and gathers `sent_bytes`: 2(n−1)/n of them.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return sent_bytes * 2 * (world_size - 1) / world_size


def mean_operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """Return the mean on GPUs. Return the sum on CPUs, since gloo has no mean: the caller divides."""
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM
