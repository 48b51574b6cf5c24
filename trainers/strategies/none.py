"""No exchange: every rank trains alone. The control that communication is measured against."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from trainers.strategy import Strategy


class NoExchange(Strategy):
    """Independent replicas: N times the work of one rank. They only contend for the machine."""

    equal_every = 0
    returns_mean = False
    in_lockstep = False

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model as it is."""
        return model

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 0."""
        return 0.0
