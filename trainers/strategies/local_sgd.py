"""Every rank updates alone, and every `period` steps the ranks' weights are averaged.

Local SGD: Stich 2019, arXiv:1805.09767; with synchronous steps before it, post-local SGD: Lin et
al. 2020, arXiv:1808.07217. `outer=nesterov` is DiLoCo (Douillard et al. 2023, arXiv:2311.08105),
with several fragments streaming DiLoCo without overlap (Douillard et al. 2025, arXiv:2501.18512).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from trainers import collectives
from trainers.strategies.ddp import DdpAlone, NcclAllreduce
from trainers.strategy import ExchangeAlone, trained

WARM_UP_CAP_MB = 1e6  # of DDP's buckets in synchronous steps: it splits none behind the first step


class Fragment:
    """Weights that are synchronised together: of one dtype, in one flat tensor."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], outer: tuple[float, float] | None
    ) -> None:
        """`outer` are rate and momentum of the outer step; None: weights become their mean."""
        self.parameters = parameters
        self.flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        views = self.flat.split([parameter.numel() for parameter in parameters])
        self._views = []
        for view, parameter in zip(views, parameters, strict=True):
            self._views.append(view.view_as(parameter))
        self._outer: torch.optim.Optimizer | None = None
        if outer is not None:
            rate, momentum = outer
            self._start = nn.Parameter(self.flat.clone())  # the weights that all ranks had last
            self._outer = torch.optim.SGD([self._start], rate, momentum, nesterov=True)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Replace the weights by their mean over the ranks, or by the outer step to it."""
        torch._foreach_copy_(self._views, [p.detach() for p in self.parameters])
        collectives.wait(dist.all_reduce(self.flat, async_op=True))
        self.flat.div_(dist.get_world_size())
        if self._outer is not None:
            self._start.grad = self._start - self.flat
            self._outer.step()
            self.flat.copy_(self._start)
        torch._foreach_copy_([p.detach() for p in self.parameters], self._views)


class LocalSgd(NcclAllreduce):
    """DDP whose gradients stay local, and an average of weights behind some updates."""

    def __init__(
        self,
        period: int,
        warmup_steps: int,
        outer: str,
        outer_learning_rate: float,
        outer_momentum: float,
        fragments: int,
    ) -> None:
        # The first step may be a local one, from which DDP could not learn a static graph.
        super().__init__(WARM_UP_CAP_MB, True, False, False, "none", 0)
        self.equal_every = period
        self._warmup_steps, self._count = warmup_steps, fragments
        self._outer = (outer_learning_rate, outer_momentum) if outer == "nesterov" else None
        self.averages_weights = outer == "average"
        self._fragments: list[list[Fragment]] = []
        self._steps = 0
        self._alone = False

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Wrap the model in DDP, which broadcasts rank 0's weights, and make the fragments."""
        prepared = super().prepare(model, optimizer)
        parameters = trained(model)
        for part in fragments_of(parameters, self._count):
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in part:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
            fragments = [Fragment(members, self._outer) for members in by_dtype.values()]
            self._fragments.append(fragments)
        self._choose_gradients(False)
        return prepared

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Let every rank update alone, without an end of the period."""
        self._alone = True
        try:
            with super().without_exchange():
                yield
        finally:
            self._alone = False

    @contextmanager
    def gradients_only(self) -> Iterator[None]:
        """Average gradients, as the synchronous steps do."""
        self._choose_gradients(True)
        try:
            yield
        finally:
            self._choose_gradients(False)

    def _choose_gradients(self, averaged: bool) -> None:
        """Let DDP average the gradients of the next step, or only where it is a synchronous one."""
        assert self._ddp is not None
        self._ddp.require_backward_grad_sync = averaged or self._steps < self._warmup_steps

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer; synchronise the fragments whose turn it is."""
        optimizer.step()
        if self._alone:
            return
        self._steps += 1
        local = self._steps - self._warmup_steps
        for number, fragments in enumerate(self._fragments):
            turn = number * self.equal_every // self._count
            if local > 0 and (local - turn) % self.equal_every == 0:
                for fragment in fragments:
                    fragment.synchronise()
        if self._steps <= self._warmup_steps:
            self._choose_gradients(False)

    def refuse(self, model: nn.Module) -> None:
        """Refuse more fragments than the model has parameters. Raises ValueError."""
        fragments_of(trained(model), self._count)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone:
        """All-reduce as many bytes as the weights have, in one piece of each dtype."""
        self._gradient_bytes = sum(parameter.nbytes for parameter in parameters)
        self._device = parameters[0].device
        return DdpAlone(parameters, [math.inf], None)


def fragments_of(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Return so many parts of the parameters, in order, of about as many elements each.

    Raises ValueError: there are fewer parameters.
    """
    if count > len(parameters):
        raise ValueError(
            f"strategy.fragments={count}: the model has {len(parameters)} parameters; expected at "
            "most as many"
        )
    whole = sum(parameter.numel() for parameter in parameters)
    parts: list[list[nn.Parameter]] = [[]]
    elements = 0
    for index, parameter in enumerate(parameters):
        missing = count - len(parts)
        is_full = elements >= whole * len(parts) / count
        if parts[-1] and missing and (is_full or len(parameters) - index == missing):
            parts.append([])
        parts[-1].append(parameter)
        elements += parameter.numel()
    return parts
