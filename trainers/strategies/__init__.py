"""The seam of the strategies: how gradients become updated weights on all ranks.

A strategy is one file here and one YAML in conf/strategy/ of the same name. The file defines `STRATEGY`, a subclass of
Strategy that takes the YAML's options as keyword arguments. The step, the clock and the checks are the same for all.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


class Strategy(ABC):
    """One way to synchronise gradients. Collective calls are made by every rank in the same order."""

    # Whether all replicas are equal after every step.
    synchronous = True
    # Whether the exchanged gradient is the mean of the local ones up to rounding (a lossy compression is not).
    exact = True
    # Relative rounding that the exchange itself adds to the gradient (a half-precision compression does).
    rounding = 0.0

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Take the model over; returns what the step calls. Called once, on a model that is on its device."""

    @abstractmethod
    def without_exchange(self) -> AbstractContextManager[None]:
        """Steps inside it exchange nothing and are otherwise the same; replicas drift apart."""

    @abstractmethod
    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Bytes that each rank sends over its links in one exchange; busbw is this over the exchange's time."""

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Callable[[], None] | None:
        """One gradient synchronisation per call, without compute, on gradients of the model's shapes.

        Enqueued on the current stream like the rest of a step. None where the strategy exchanges nothing.
        """
        return None

    def exchange(self) -> None:
        """Called between backward and update. Nothing to do where the exchange is part of backward."""
        return

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn gradients into weights."""
        optimizer.step()


def load(options: Mapping[str, Any]) -> Strategy:
    """The strategy that `options["name"]` names, with its options. Raises ModuleNotFoundError, TypeError."""
    given = dict(options)
    module = importlib.import_module(f"trainers.strategies.{given.pop('name')}")
    strategy = module.STRATEGY(**given)
    assert isinstance(strategy, Strategy)
    return strategy
