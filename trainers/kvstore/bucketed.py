"""A strategy that exchanges gradients in buckets while backward still runs.

What happens in a step, and what a subclass defines of it:
  in backward    a gradient arrives; once a bucket is complete: `start_bucket`
  in `exchange`  `finish_buckets`; in the first step also `set_up` and every `start_bucket`, since
                 that step shows which gradients there are
  in `update`    `apply_weights`
"""

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import collectives, comm_hooks
from trainers.kvstore.buckets import Array, Bucket, BucketLayout
from trainers.kvstore.shared_memory import DTYPES
from trainers.strategy import ExchangeAlone, Hosts, SentBucket, Strategy

NAMED = 5  # parameters that an error names at most
# A share is a multiple of this many elements: 512 bytes of half precision, so that every share
# starts at an aligned address.
SHARE_ELEMENTS = 256


class Bucketed(Strategy, ExchangeAlone):
    """What all strategies with buckets share; each is its own exchange alone.

    Arrays are the parameters, numbered as the optimizer has them. The gradients of the first step,
    in rank 0's order of arrival, are those that are exchanged in every step (torch's DDP calls that
    a static graph).
    """

    layout: BucketLayout  # after `set_up`
    flat_sent: list[Tensor]  # for each bucket (at least elements,): the gradient to exchange
    flat_means: list[Tensor]  # … where the mean gradient arrives, if `only_gradients`
    flat_weights: list[Tensor]  # … the weights, where `make_flats` made them

    def __init__(self, bucket_cap_mb: float, comm_hook: str, only_gradients: bool = False) -> None:
        """`only_gradients`: in steps, too, means come back and every rank updates its weights."""
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
        self._next = 0  # the first bucket that was not started in this step
        self._exchanging = True
        self.only_gradients = self._usually = only_gradients

    # What a subclass defines.

    @abstractmethod
    def set_up(self, order: list[int]) -> None:
        """Make the buckets of these arrays, in this order, and all else. Once; collective."""

    @abstractmethod
    def start_bucket(self, bucket: int) -> None:
        """Begin to exchange `flat_sent[bucket]`. Inside backward: enqueues, waits for nothing."""

    @abstractmethod
    def finish_buckets(self) -> None:
        """End the exchange of all buckets; fill `flat_means` if `only_gradients`."""

    @abstractmethod
    def apply_weights(self) -> None:
        """Set the parameters to the weights of the next step, after `finish_buckets`."""

    # The seam (trainers.strategy).

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Broadcast rank 0's weights, and have every parameter report its gradient."""
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            self.parameters += group["params"]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for array, parameter in enumerate(self.parameters):
            self._names[array] = names.get(id(parameter), "")
            arrived = functools.partial(self._gradient_arrived, array)
            parameter.register_post_accumulate_grad_hook(arrived)
        with torch.no_grad():
            for tensor in [*self.parameters, *model.buffers()]:
                # Over the host: where gradients do not travel by NCCL, NCCL's log must not show
                # any traffic.
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
        """Choose what comes back: the mean gradient, or weights.

        Waits for the device, so that no exchange is under way.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.only_gradients = only_gradients

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone:
        """Start every bucket, then end the exchange."""
        if self._buckets_of is None:
            self.parameters = parameters
            self._agree(list(reversed(range(len(parameters)))))
        self.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return self

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy this rank's gradients into the buckets that are sent."""
        for bucket, flat in zip(self.layout.buckets, self.flat_sent, strict=True):
            gather(bucket, gradients, flat)

    def __call__(self) -> None:
        """Exchange once, inside `gradients_only`."""
        for bucket in range(len(self.layout.buckets)):
            self.start_bucket(bucket)
        self.finish_buckets()

    def result(self) -> list[Tensor]:
        """Return copies in the parameters' shapes; zeros where a parameter is in no bucket."""
        means = [torch.zeros_like(parameter) for parameter in self.parameters]
        scatter(self.layout.buckets, self.flat_means, means)
        return means

    def buckets(self) -> list[SentBucket] | None:
        """Return the buckets; None before the first step."""
        if self._buckets_of is None:
            return None
        buckets = []
        for bucket, flat in zip(self.layout.buckets, self.flat_sent, strict=True):
            parameters = tuple(self.parameters[part.array] for part in bucket.parts)
            gradient_bytes = bucket.elements * parameters[0].element_size()
            dtype = str(flat.dtype).removeprefix("torch.")
            buckets.append(SentBucket(parameters, gradient_bytes, flat.nbytes, dtype))
        return buckets

    def exchange(self) -> None:
        """End the exchange that backward began. With `only_gradients`, the means go to `.grad`.

        Raises RuntimeError: other parameters have gradients than in the first step, or on rank 0.
        """
        if not self._exchanging:
            return
        arrived, self._arrived = self._arrived, []
        if self._buckets_of is None:
            self._agree(arrived)
            for bucket in range(len(self.layout.buckets)):
                self._gather_and_start(bucket)
        elif len(arrived) != len(self._buckets_of):
            absent = [self._names[array] for array in self._buckets_of if array not in arrived]
            names = ", ".join(absent[:NAMED])
            raise RuntimeError(f"this step gave no gradient for {names}, but the first step did")
        self._missing = [len(bucket.parts) for bucket in self.layout.buckets]
        self._next = 0
        self.finish_buckets()
        if self.only_gradients:
            scatter(self.layout.buckets, self.flat_means, self._gradients())

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the strategy's weights; step the optimizer where only gradients are exchanged."""
        if self._exchanging and not self.only_gradients:
            self.apply_weights()
        else:
            optimizer.step()

    # For subclasses.

    def bucket_layout(self, parameters: Sequence[Tensor], order: Sequence[int]) -> BucketLayout:
        """Return buckets of `cap_bytes`, without servers."""
        return BucketLayout.of(arrays_of(parameters, self.comm_hook), order, self.cap_bytes)

    def make_flats(self, order: Sequence[int], ranks: int, weights: bool = True) -> None:
        """Make the buckets, and flat tensors of which each of some ranks has an equal share.

        `weights`: also `flat_weights`, with the parameters' values, and own `flat_means`.
        """
        device = self.parameters[0].device
        self.layout = self.bucket_layout(self.parameters, order)
        self.flat_sent = self.flat_means = padded(self.layout, ranks, False, device)
        if weights:
            self.flat_means = padded(self.layout, ranks, False, device)
            self.flat_weights = padded(self.layout, ranks, True, device)
            for bucket, flat in zip(self.layout.buckets, self.flat_weights, strict=True):
                gather(bucket, self.parameters, flat)

    def sent_bytes(self, gradient_bytes: float) -> float:
        """Return the bytes that the communication hook leaves of `gradient_bytes`."""
        return gradient_bytes * comm_hooks.share(self.parameters, self.comm_hook)

    # Inside backward.

    def _gradient_arrived(self, array: int, parameter: Tensor) -> None:
        if not self._exchanging:
            return
        self._arrived.append(array)
        if self._buckets_of is None:
            return
        if array not in self._buckets_of:
            name = self._names[array]
            raise RuntimeError(
                f"{name} has a gradient in this step, but had none in the first step"
            )
        for bucket in self._buckets_of[array]:
            self._missing[bucket] -= 1
        # In order on every rank: collectives must match, whatever order gradients come in.
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._gather_and_start(self._next)
            self._next += 1

    def _gather_and_start(self, bucket: int) -> None:
        gather(self.layout.buckets[bucket], self._gradients(), self.flat_sent[bucket])
        self.start_bucket(bucket)

    def _gradients(self) -> list[Tensor]:
        """Return every `.grad`, by number of its array; an empty tensor where there is none."""
        gradients = []
        for parameter in self.parameters:
            gradient = parameter.grad
            gradients.append(parameter.new_empty(0) if gradient is None else gradient)
        return gradients

    def _agree(self, arrived: Sequence[int]) -> None:
        """Set up the buckets of the arrays that have gradients, in rank 0's order. Collective."""
        order = collectives.broadcast_json(list(arrived))
        differing = {array for array in order if isinstance(array, int)} ^ set(arrived)
        if differing or len(order) != len(arrived):
            names = [self._names.get(array, str(array)) for array in sorted(differing)]
            raise RuntimeError(
                f"rank {dist.get_rank()} and rank 0 have gradients for different parameters: "
                f"{', '.join(names[:NAMED])}"
            )
        self.set_up(order)
        self._buckets_of = {}
        for index, bucket in enumerate(self.layout.buckets):
            for part in bucket.parts:
                self._buckets_of.setdefault(part.array, []).append(index)


def arrays_of(parameters: Sequence[Tensor], comm_hook: str) -> tuple[Array, ...]:
    """Return the parameters as arrays of a layout."""
    arrays = []
    for parameter in parameters:
        dtype = str(parameter.dtype).removeprefix("torch.")
        arrays.append(Array(parameter.numel(), dtype, comm_hooks.SENT.get(comm_hook, dtype)))
    return tuple(arrays)


@torch.no_grad()
def gather(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a bucket's parts of `tensors`, one for each array, to `flat`, and cast them.

    `flat` is (at least bucket.elements,); what is beyond that is padding and stays.
    """
    torch._foreach_copy_(_split(bucket, flat), _parts(bucket, tensors))


@torch.no_grad()
def scatter(buckets: Sequence[Bucket], flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy flat buckets back to `tensors`, one for each array: the inverse of gather."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for bucket, flat in zip(buckets, flats, strict=True):
        targets += _parts(bucket, tensors)
        sources += _split(bucket, flat)
    torch._foreach_copy_(targets, sources)


def _split(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    # A flat bucket may be padded, so that it can be shared equally among ranks.
    return list(flat[: bucket.elements].split([part.stop - part.start for part in bucket.parts]))


def _parts(bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a bucket's parts in the order of memory, channels-last or not.

    A gradient lies as its weight.
    """
    parts = []
    for part in bucket.parts:
        tensor = tensors[part.array].detach()
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        parts.append(flat[part.start : part.stop])
    return parts


# Buckets that collectives move: flat tensors, padded so that every rank owns an equal share.
def share_of(bucket: Bucket, world_size: int) -> int:
    """Return the elements of a bucket that each rank owns, with the padding of the last rank."""
    return -(-bucket.elements // (world_size * SHARE_ELEMENTS)) * SHARE_ELEMENTS


def padded(
    layout: BucketLayout, world_size: int, in_weight_dtype: bool, device: torch.device
) -> list[Tensor]:
    """Return zeros (world_size × share,) for each bucket, in the weights' or sent dtype."""
    flats = []
    for bucket in layout.buckets:
        array = layout.arrays[bucket.parts[0].array]
        dtype = DTYPES[array.weight_dtype if in_weight_dtype else array.wire_dtype]
        elements = share_of(bucket, world_size) * world_size
        flats.append(torch.zeros(elements, dtype=dtype, device=device))
    return flats


def shares(flats: Sequence[Tensor], rank: int, world_size: int) -> list[Tensor]:
    """Return a view (share,) of a rank's share of each flat tensor."""
    return [flat.chunk(world_size)[rank] for flat in flats]


def start_mean(share: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Reduce-scatter `flat` (ranks × share,) over a group; None: over all ranks.

    `share` has the mean once `end_mean` was called too.
    """
    operation = collectives.mean_operation(flat)
    work = dist.reduce_scatter_tensor(share, flat, operation, group, async_op=True)
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
        # NCCL sends them in one kernel, as fast as one tensor of all bytes: on its own a small one
        # does not fill the links.
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as together:
            for flat, share in zip(flats, own, strict=True):
                dist.all_gather_into_tensor(flat, share, group)
        together.wait()
        return
    works = []
    for flat, share in zip(flats, own, strict=True):
        works.append(dist.all_gather_into_tensor(flat, share, group, async_op=True))
    for work in works:
        collectives.wait(work)


def ring_bytes(sent_bytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends when a ring reduce-scatters and gathers: 2(n−1)/n.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return sent_bytes * 2 * (world_size - 1) / world_size


def two_level_bytes(sent_bytes: float, hosts: Hosts) -> float:
    """Return 2(m−1)/m of the bytes inside a host of m ranks, and 2(h−1)/h of a share between h."""
    here = len(hosts.ranks[0])
    return ring_bytes(sent_bytes, here) + ring_bytes(sent_bytes / here, len(hosts.ranks))
