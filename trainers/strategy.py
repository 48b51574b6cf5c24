"""The seam of the strategies: how gradients become updated weights on all ranks.

A strategy is a subclass of Strategy and one YAML in conf/strategy/, whose `_target_` names the
class, or a function that returns an instance. It takes the YAML's options as keyword arguments. The
step, the clock and the checks are the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from conf.cell import Cell
from conf.targets import locate

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cell by number. One host is the usual case."""

    # Of each host; every host has as many, and their numbers are consecutive.
    ranks: tuple[tuple[int, ...], ...]
    # The host of each server; a number behind those of `ranks` has servers only.
    server_hosts: tuple[int, ...] = ()

    @staticmethod
    def of(cell: Cell) -> "Hosts":
        """Return the hosts of a cell."""
        here = len(cell.gpus)
        ranks = []
        for host in range(max(1, len(cell.hosts))):
            ranks.append(tuple(range(host * here, (host + 1) * here)))
        names = list(cell.every_host or ("",))
        servers = [names.index(own.host) for own in cell.places if own.kind == "server"]
        return Hosts(tuple(ranks), tuple(servers))

    @property
    def several(self) -> bool:
        """Whether ranks, or ranks and servers, are on different hosts."""
        return len(self.ranks) > 1 or any(self.server_hosts)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // len(self.ranks[0])


class ExchangeAlone(ABC):
    """One strategy's exchange without compute, in buffers of its own. Every rank calls it alike."""

    @abstractmethod
    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy this rank's gradients in, one of each parameter's shape, for later calls."""

    @abstractmethod
    def __call__(self) -> None:
        """Exchange once. Enqueued on the current stream, like the rest of a step."""

    @abstractmethod
    def result(self) -> list[Tensor]:
        """Return the means that the first call after `fill` left, in the parameters' shapes."""

    def pipelined(self) -> Callable[[], None] | None:
        """Return an exchange that need not wait for the one before it; None where there is none.

        An asynchronous strategy can have several under way, and an answer still is when the last
        call returns: wait for the device before anything else is exchanged.
        """
        return None


@dataclass(frozen=True)
class ReferenceProbe:
    """An operation whose time shows what the machine allows a strategy, or one stage of it.

    Every rank runs it at the same time, under the same clock as the exchange.
    """

    name: str  # 'ring', 'host_link', 'host_memory', … ; METHOD.md defines each
    run: Callable[[], None]  # enqueued on the current stream
    # Bytes of an exchange ÷ bytes of a run: the exchange needs at least this share of its time.
    share: float
    # Whether the exchange is compared with it; otherwise it is one stage of the exchange.
    reference: bool = True
    way: str = ""  # tells apart the samples of several probes with the same name


@dataclass(frozen=True)
class SentBucket:
    """Gradients that a strategy sends together."""

    parameters: tuple[Tensor, ...]  # that have a part in it
    gradient_bytes: int  # as backward leaves them
    sent_bytes: int | None  # on the wire, with padding; None: the compression does not say
    dtype: str  # on the wire: float32, float16, …


@dataclass(frozen=True)
class BucketExchange:
    """The collectives that exchange one bucket, in a buffer of their own."""

    operation: str  # their names, as torch has them: all_reduce, reduce_scatter + all_gather, …
    # Enqueued on the current stream; on CPU workers it ends before `run` returns.
    run: Callable[[], None]


class Strategy(ABC):
    """One way to synchronise gradients. Every rank makes collective calls in the same order.

    A step is: backward, `exchange`, `update`. Of a Strategy nothing is called inside backward. What
    it registers on the model in `prepare` may run there (DDP's hooks; Bucketed.start_bucket), on
    the thread of backward, and must not wait for others.
    """

    # Where ranks and servers are: set by `load`, before anything is called.
    hosts: Hosts
    # Steps in which every weight was equal on all replicas once: 1 for an exchange in every step, 0
    # for never. Where there are more, the YAML has them as an option `period`.
    equal_every = 1
    # Whether weights that a step made equal are the mean of what its local updates gave.
    averages_weights = False
    # Whether an exchange returns the mean over all ranks, or to each rank its own gradient.
    returns_mean = True
    # Whether every exchange waits for all ranks.
    in_lockstep = True
    # Whether the exchanged gradient is the mean of the local ones up to rounding (a lossy
    # compression's is not).
    exact = True
    # Whether one rank alone exchanges nothing: what the strategy costs it is then the strategy's
    # own work, no communication.
    own_work_alone = False
    # Relative rounding that the exchange itself adds to the gradient (a half-precision hook does).
    rounding = 0.0
    # The smallest step between two numbers of the format that is sent: what is smaller may be lost.
    smallest_step = 0.0
    # The same, as a share of the largest gradient of any rank.
    smallest_share = 0.0

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Take over a model that is on its device, once; collective. Returns what the step calls.

        Its parameters may become shards (torch's DTensor), as may those of the optimizer.

        `optimizer` holds the parameters and the settings; a strategy that updates weights elsewhere
        reads them there.

        Raises RuntimeError: the process group fails, or the ranks' models differ.
        """

    def refuse(self, model: nn.Module) -> None:
        """Raise ValueError for a model, on the meta device, that the strategy cannot train.

        Called before the cell starts, of strategies whose YAML says `some_models: true`.
        """
        return

    @abstractmethod
    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context in which steps exchange nothing and are otherwise the same.

        Replicas drift apart. What such steps change of parameters, buffers and the optimizer's
        state is brought back before a step that counts.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context of micro-steps whose gradients only add up; the step exchanges later."""
        return self.without_exchange()

    @abstractmethod
    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return the bytes that each rank sends in one exchange; NaN if unknown.

        busbw is these bytes ÷ the exchange's time.
        """

    def gradients_only(self) -> AbstractContextManager[None]:
        """Return a context in which `exchange` leaves the mean gradient in every `.grad`.

        It does so even if steps bring only weights.
        """
        return nullcontext()

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone | None:
        """Return the exchange without compute, on random gradients of these shapes. Collective.

        None where nothing is exchanged. Needs no `prepare`.

        Raises OSError: there is not enough shared memory.
        """
        return None

    def probes(self) -> list[ReferenceProbe]:
        """Return what an exchange is compared with, after `exchange_alone`.

        Of several with one name the fastest counts.
        """
        return []

    def buckets(self) -> list[SentBucket] | None:
        """Return what a step sends together, in that order, after some steps; None: no buckets."""
        return None

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange | None:
        """Return what exchanges a bucket of about these bytes on the wire; collective.

        It uses the communicators of a step. None where a step does not exchange by collectives of
        torch's process groups alone.
        """
        return None

    def exchange(self) -> None:
        """Exchange gradients, or end what backward began. Called between backward and update.

        Raises RuntimeError: the gradients are not those that the strategy was set up for.
        """
        return

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn gradients into weights.

        With precision=fp16 gradients carry the scale of the loss, which `optimizer.step` takes out.
        """
        optimizer.step()

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Return the bytes that a cell takes in /dev/shm of the host with the most.

        The parameters may be on the meta device.
        """
        return 0

    def state(self) -> list[Tensor]:
        """Return what this rank keeps on its device from step to step, in the same order.

        Beside the model and its optimizer, after the first step. Only of strategies whose YAML says
        `graph: true`.
        """
        return []

    def facts(self) -> dict[str, float]:
        """Return metrics that only the strategy knows, equal on every rank. Collective."""
        return {}

    def summing_threads(self) -> int | None:
        """Return the threads of each process that sums on the CPU; None: no CPU sums."""
        return None

    def close(self) -> None:
        """Release servers and shared memory, after the last measurement."""
        return


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that training changes, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def whole(tensor: AnyTensor) -> AnyTensor:
    """Return a tensor of which every rank has a shard as a whole one. Collective for such."""
    if hasattr(tensor, "full_tensor"):  # torch's DTensor
        return tensor.full_tensor()  # type: ignore[no-any-return]
    return tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory; the tensor if it is whole."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()  # type: ignore[no-any-return]
    return tensor


def load(options: Mapping[str, Any], target: str, hosts: Hosts) -> Strategy:
    """Call `target`, the dotted name in a strategy's YAML, with its options.

    Raises Whatever the import and the call raise; TypeError where no Strategy is returned.
    """
    arguments = {name: value for name, value in options.items() if name != "name"}
    strategy = locate(target)(**arguments)
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"{target} returned {type(strategy).__name__}; expected a trainers.strategy.Strategy"
        )
    strategy.hosts = hosts
    return strategy
