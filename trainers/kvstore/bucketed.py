"""A strategy that exchanges buckets while backward still runs: which gradients there are, when a bucket is complete."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import comm_hooks
from trainers.kvstore.buckets import Array, Bucket, Layout
from trainers.strategy import Alone, Strategy


class Bucketed(Strategy):
    """The part that all bucket-wise strategies share. The first exchange is not overlapped: it shows what there is.

    Arrays are the parameters, numbered as the optimizer has them. The gradients of the first step, in rank 0's order of
    arrival, are those that are exchanged in every step (torch's DDP calls that a static graph).
    """

    def __init__(self, bucket_cap_mb: float, comm_hook: str, only_gradients: bool = False) -> None:
        """`only_gradients`: in steps, too, the mean gradient comes back and every rank updates its own weights."""
        self.cap_bytes = bucket_cap_mb * (1 << 20)
        self.comm_hook = comm_hook
        self.rounding = comm_hooks.ROUNDING.get(comm_hook, 0.0)
        self.parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.SGD | None = None
        self._names: dict[int, str] = {}
        self._arrived: list[int] = []  # in the step in hand
        self._buckets_of: dict[int, list[int]] | None = None  # of each array, once they are set up
        self._missing: list[int] = []  # arrays that a bucket still waits for
        self._parts: list[int] = []  # … that it has
        self._next = 0  # the first bucket that was not started in this step
        self._exchanging = True
        self.only_gradients = self._usually = only_gradients

    # What a strategy has once it is set up, and does with a bucket.

    layout: Layout
    flat_sent: list[Tensor]  # of each bucket, where its gradients start from
    flat_means: list[Tensor]  # … where the mean gradient arrives, when that is asked for

    @abstractmethod
    def set_up(self, order: list[int]) -> None:
        """Make buckets of these arrays, in this order, and what else an exchange needs. Collective."""

    @abstractmethod
    def start_flat(self, bucket: int) -> None:
        """The gradients of a bucket lie in `flat_sent`: begin its exchange."""

    @abstractmethod
    def finish_flat(self) -> None:
        """Every bucket was started: end the exchange. The means are in `flat_means`, if they were asked for."""

    @abstractmethod
    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights of the next step."""

    def start(self, bucket: int) -> None:
        """All gradients of a bucket are in `.grad`: begin its exchange."""
        gather(self.layout.buckets[bucket], self.gradients(), self.flat_sent[bucket])
        self.start_flat(bucket)

    def finish(self) -> None:
        """End the exchange; mean gradients go to `.grad`."""
        self.finish_flat()
        if self.only_gradients:
            scatter(self.layout.buckets, self.flat_means, self.gradients())

    # The seam.

    def prepare(self, model: nn.Module, optimizer: torch.optim.SGD) -> nn.Module:
        """The model as it is; every parameter tells when its gradient is complete. Weights are rank 0's."""
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {number: named.get(id(parameter), "") for number, parameter in enumerate(self.parameters)}
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_arrived, number))
        with torch.no_grad():
            for tensor in [*self.parameters, *model.buffers()]:
                # Over the host: where gradients do not travel by NCCL, its log shall not say that anything did.
                told = tensor.detach().cpu()
                dist.broadcast(told, 0)
                tensor.copy_(told)
        return model

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Steps inside it update on each rank alone."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    @contextmanager
    def gradients_only(self) -> Iterator[None]:
        """Inside it the mean gradient comes back."""
        self.switch(only_gradients=True)
        try:
            yield
        finally:
            self.switch(only_gradients=self._usually)

    def gradients(self) -> list[Tensor]:
        """Every `.grad`, by number; an empty tensor where there is none."""
        return [parameter.new_empty(0) if parameter.grad is None else parameter.grad for parameter in self.parameters]

    def settings(self) -> tuple[float, float, float]:
        """Learning rate, momentum and weight decay; zeros where only gradients are exchanged."""
        group = self.optimizer.param_groups[0] if self.optimizer else {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}
        return group["lr"], group["momentum"], group["weight_decay"]

    def switch(self, only_gradients: bool) -> None:
        """Change what comes back. No exchange is under way: the device has been waited for."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.only_gradients = only_gradients

    def sent_bytes(self, gradient_bytes: float) -> float:
        """What a half-precision hook leaves of them."""
        return gradient_bytes * comm_hooks.share(self.parameters, self.comm_hook)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Alone:
        """Every bucket started, then ended; the mean gradient comes back."""
        if self._buckets_of is None:
            self.parameters = parameters
            self.agree(list(reversed(range(len(parameters)))))
        alone = _Alone(self)
        alone.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return alone

    def exchange(self) -> None:
        """End what backward began. Raises RuntimeError where other parameters have gradients than in the first step."""
        if not self._exchanging:
            return
        arrived, self._arrived = self._arrived, []
        if self._buckets_of is None:
            self.agree(arrived)
            for bucket in range(len(self._parts)):
                self.start(bucket)
        elif len(arrived) != len(self._buckets_of):
            absent = [self._names[number] for number in self._buckets_of if number not in arrived]
            raise RuntimeError(f"no gradient in this step, but in the first: {', '.join(absent[:5])}")
        self._missing, self._next = list(self._parts), 0
        self.finish()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The strategy's own update; the local one where nothing is exchanged."""
        if self._exchanging and not self.only_gradients:
            self.apply(optimizer)
        else:
            optimizer.step()

    def pipelined(self) -> Callable[[], None] | None:
        """See Alone.pipelined."""
        return None

    # What happens in backward.

    def _gradient_arrived(self, number: int, parameter: Tensor) -> None:
        if not self._exchanging:
            return
        self._arrived.append(number)
        if self._buckets_of is None:
            return
        if number not in self._buckets_of:
            raise RuntimeError(f"{self._names[number]} has a gradient in this step, but had none in the first")
        for bucket in self._buckets_of[number]:
            self._missing[bucket] -= 1
        # In order on every rank: collectives must match, whatever order gradients come in.
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self.start(self._next)
            self._next += 1

    def agree(self, arrived: Sequence[int]) -> None:
        """Set up the buckets of the arrays that have gradients, in rank 0's order. Collective."""
        told = [list(arrived)]
        dist.broadcast_object_list(told, 0)
        if odd := set(told[0]) ^ set(arrived):
            names = ", ".join(self._names[number] for number in sorted(odd)[:5])
            raise RuntimeError(f"rank {dist.get_rank()} and rank 0 have gradients for different parameters: {names}")
        self.set_up(told[0])
        self._buckets_of = self.layout.buckets_of()
        self._parts = [0] * (1 + max((b for found in self._buckets_of.values() for b in found), default=-1))
        for found in self._buckets_of.values():
            for bucket in found:
                self._parts[bucket] += 1


class _Alone(Alone):
    """The exchange of a bucket-wise strategy, inside its `gradients_only`."""

    def __init__(self, strategy: Bucketed) -> None:
        self._strategy = strategy

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Into the flat buckets."""
        for bucket, flat in zip(self._strategy.layout.buckets, self._strategy.flat_sent, strict=True):
            gather(bucket, gradients, flat)

    def __call__(self) -> None:
        """Start all, end all."""
        for number in range(len(self._strategy.layout.buckets)):
            self._strategy.start_flat(number)
        self._strategy.finish_flat()

    def pipelined(self) -> Callable[[], None] | None:
        """Where the strategy can have two exchanges under way."""
        return self._strategy.pipelined()

    def result(self) -> list[Tensor]:
        """Copies, in the parameters' shapes; zeros where a parameter is in no bucket."""
        found = [torch.zeros_like(parameter) for parameter in self._strategy.parameters]
        scatter(self._strategy.layout.buckets, self._strategy.flat_means, found)
        return found


def dense(tensor: Tensor) -> Tensor:
    """A flat view of a tensor's elements as they lie in memory, channels-last or not. A gradient lies as its weight."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def arrays_of(parameters: Sequence[Tensor], comm_hook: str) -> tuple[Array, ...]:
    """The parameters as a layout has them."""
    kept = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
    return tuple(
        Array(parameter.numel(), name, comm_hooks.SENT.get(comm_hook, name))
        for parameter, name in zip(parameters, kept, strict=True)
    )


@torch.no_grad()
def gather(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the bucket's parts of tensors, one for each array, into its flat form, in the dtype of that."""
    torch._foreach_copy_(_split(bucket, flat), _parts(bucket, tensors))


@torch.no_grad()
def scatter(buckets: Sequence[Bucket], flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """The inverse, for several buckets."""
    targets = [part for bucket in buckets for part in _parts(bucket, tensors)]
    torch._foreach_copy_(targets, [part for b, flat in zip(buckets, flats, strict=True) for part in _split(b, flat)])


def _split(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    # A flat form may be longer than its bucket: padded, to be equally long on every rank.
    return list(flat[: bucket.elements].split([part.stop - part.start for part in bucket.parts]))


def _parts(bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [dense(tensors[part.array])[part.start : part.stop] for part in bucket.parts]
