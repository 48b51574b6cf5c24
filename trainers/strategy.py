"""The seam of the strategies: how gradients become updated weights on all ranks.

A strategy is one file here and one YAML in conf/strategy/ of the same name. The file defines `STRATEGY`, a subclass of
Strategy that takes the YAML's options as keyword arguments. The step, the clock and the checks are the same for all.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Alone(ABC):
    """One strategy's exchange without compute, in buffers of its own. Collective: every rank makes and calls it alike."""

    @abstractmethod
    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy this rank's gradients in, one of each parameter's shape. Each later call exchanges what then lies there."""

    @abstractmethod
    def __call__(self) -> None:
        """One exchange, enqueued on the current stream like the rest of a step."""

    @abstractmethod
    def result(self) -> list[Tensor]:
        """The mean gradients that the first call after `fill` left on this rank, in the order of the parameters."""

    def pipelined(self) -> Callable[[], None] | None:
        """An exchange in a stream of exchanges, where an asynchronous strategy need not wait for one before the next."""
        return None


@dataclass(frozen=True)
class Probe:
    """An operation that tells what the machine allows a strategy, or what one stage of it takes alone.

    Every rank runs it at the same time, under the same clock as the exchange.
    """

    name: str  # 'ring', 'host_link', 'host_memory', … ; METHOD.md defines each
    run: Callable[[], None]  # enqueued on the current stream
    share: float  # of this operation's traffic, what one exchange moves
    limit: bool = True  # whether no exchange of this strategy can be faster; otherwise a stage of it
    way: str = ""  # which of several with the same name: its samples are told apart


class Strategy(ABC):
    """One way to synchronise gradients. Collective calls are made by every rank in the same order."""

    # Whether all replicas are equal after every step.
    synchronous = True
    # Whether the exchanged gradient is the mean of the local ones up to rounding (a lossy compression is not).
    exact = True
    # Relative rounding that the exchange itself adds to the gradient (a half-precision compression does).
    rounding = 0.0

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.SGD) -> nn.Module:
        """Take the model over; returns what the step calls. Called once, on a model that is on its device.

        `optimizer` holds the parameters and the settings; a strategy that updates weights elsewhere reads them there.
        """

    @abstractmethod
    def without_exchange(self) -> AbstractContextManager[None]:
        """Steps inside it exchange nothing and are otherwise the same; replicas drift apart."""

    def gradients_only(self) -> AbstractContextManager[None]:
        """Inside it, `exchange` leaves the mean gradient in every `.grad`, also where steps only bring weights back."""
        return nullcontext()

    @abstractmethod
    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Bytes that each rank sends over its links in one exchange; busbw is this over the exchange's time."""

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Alone | None:
        """One gradient synchronisation for each call, without compute, on gradients of these shapes; first random ones.

        It needs no `prepare`. None where the strategy exchanges nothing.
        """
        return None

    def probes(self) -> list[Probe]:
        """What an exchange is compared with; of probes with the same name the fastest. Called after `exchange_alone`."""
        return []

    def exchange(self) -> None:
        """Called between backward and update. Nothing to do where the exchange is part of backward."""
        return

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn gradients into weights."""
        optimizer.step()

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Bytes of shared memory that a cell takes in /dev/shm; the parameters may be on the meta device."""
        return 0

    def facts(self) -> dict[str, float]:
        """What only the strategy knows, as metrics (staleness of updates). Equal on every rank; collective."""
        return {}

    def close(self) -> None:
        """Measuring is over: release servers and shared memory."""
        return


def load(options: Mapping[str, Any]) -> Strategy:
    """The strategy that `options["name"]` names, with its options. Raises ModuleNotFoundError, TypeError."""
    given = dict(options)
    module = importlib.import_module(f"trainers.strategies.{given.pop('name')}")
    strategy = module.STRATEGY(**given)
    assert isinstance(strategy, Strategy)
    return strategy
