"""The training step: forward, backward, exchange, update. The same for every strategy."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from conf.cell import SAMPLES, Cell
from trainers import compile_passes, models
from trainers.batches import Batch, LoadedBatches, OwnModel, synthetic
from trainers.cuda_graph import CudaCapture, GraphedStep
from trainers.optimizers import optimizer_of
from trainers.strategy import Hosts, Strategy, load, trained, whole

REWRITTEN = ("max", "max_graph")  # ways to be fast that compile with our rewrites
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
Mark = Callable[[str], AbstractContextManager[Any]]
UNMARKED = nullcontext[None]()


def unmarked(stage: str) -> AbstractContextManager[None]:
    """Mark nothing, as in timed steps."""
    return UNMARKED


class Training:
    """A model, its batches, optimizer and strategy on one rank, ready to step."""

    def __init__(self, cell: Cell, device: torch.device, rank: int) -> None:
        """Build everything that a cell asks for. All ranks call it; the process group exists."""
        self.cell, self.device = cell, device
        set_arithmetic(cell.precision)
        capture = CudaCapture(device) if cell.graphed else None
        # The same weights on every rank; batches have their own generator.
        torch.manual_seed(cell.seed)
        with device:
            model = models.build(cell.model)
        if cell.precision == "bf16_weights":
            model = models.bf16_weights(model)
        if cell.channels_last:
            model = model.to(memory_format=torch.channels_last)
        rewritten = cell.optimize in REWRITTEN
        if rewritten:
            model = compile_passes.in_faster_forms(model)
        self.network = model  # what was built, without what the strategy wraps around it
        self._own = model if cell.model.inputs == SAMPLES and isinstance(model, OwnModel) else None
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer_of(cell.optimizer, self.parameters, cell.graphed)
        self.strategy: Strategy = load(cell.strategy, cell.target("strategy"), Hosts.of(cell))
        self.model: Callable[..., Tensor] = self.strategy.prepare(model, self.optimizer)
        # Outside DDP, so that torch splits the graph at bucket boundaries and communication can
        # overlap.
        if cell.compiled and rewritten:
            self.model = compile_passes.compiled(self.model)
        elif cell.compiled:
            self.model = torch.compile(self.model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cell.precision == "fp16")
        # Fused optimizers unscale on the device, without a synchronisation. Only strategies that
        # leave the update to every rank's optimizer can do it (their YAML's `accepts`).
        self._scaled_optimizer: Any = SimpleNamespace(
            step=lambda: self.scaler.step(self.optimizer), param_groups=self.optimizer.param_groups
        )
        self.batches: Iterator[Batch]
        if cell.data:
            self.batches = LoadedBatches(cell, device, rank)
        else:
            self.batches = synthetic(cell, device, rank, self.network)
        self.images = 0  # samples, counted where they enter the model, never computed
        self.tokens = 0
        self.updates = 0  # steps of the optimizer; a strategy may update weights without it
        self.optimizer.register_step_post_hook(self._count_update)
        self.loss: Tensor | None = None  # of the last step, on the device
        # Opens a profiler's range around each stage of a step: forward, backward, exchange,
        # optimizer.
        self.mark: Mark = unmarked
        self.exchanges = True  # not inside `without_exchange`
        self.graphs = None
        if capture:
            self.graphs = GraphedStep(self.uncaptured_step, self.parameters, capture)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in the order of `names`, as the model has it now: whole or sharded."""
        return trained(self.network)

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return parameters with the whole weights, for an exchange alone. Collective."""
        return [nn.Parameter(whole(weight.detach())) for weight in self.parameters]

    def step(self, batch: Batch | None = None) -> None:
        """Run one training step on the next batch, or on the one given.

        Where the cell asks for graphs, it is a replay of one.
        """
        batch = batch or next(self.batches)
        if self.graphs:
            self.loss = self.graphs(batch, self.exchanges)
            self._count(batch)
        else:
            self.uncaptured_step(batch)

    def uncaptured_step(self, batch: Batch) -> Tensor:
        """Run one training step, kernel by kernel. Return its loss."""
        loss = self.backward(batch)
        with self.mark("optimizer"):
            if self.scaler.is_enabled():
                self.strategy.update(self._scaled_optimizer)
                self.scaler.update()
            else:
                self.strategy.update(self.optimizer)
        return loss

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Exchange nothing inside the context (Strategy.without_exchange)."""
        self.exchanges = False
        try:
            with self.strategy.without_exchange():
                yield
        finally:
            self.exchanges = True

    @contextmanager
    def with_batches(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Step on other batches inside the context."""
        usual, self.batches = self.batches, batches
        try:
            yield
        finally:
            self.batches = usual

    def close(self) -> None:
        """Release graphs and servers, after the last measurement."""
        if self.graphs:
            self.graphs.close()
        self.strategy.close()

    def backward(self, batch: Batch) -> Tensor:
        """Run every forward and backward, and exchange; never a replay of a graph.

        Returns the loss and leaves the gradients in place.
        """
        self._count(batch)
        self.optimizer.zero_grad(set_to_none=True)
        *earlier, last = [batch]
        if self.cell.accumulate > 1:
            parts = [tensor.chunk(self.cell.accumulate) for tensor in batch]
            *earlier, last = zip(*parts, strict=True)
        losses = []
        for micro_batch in earlier:
            with self.strategy.accumulating() if self.exchanges else UNMARKED:
                losses.append(self._forward_and_backward(micro_batch))
        losses.append(self._forward_and_backward(last))
        with self.mark("exchange"):
            self.strategy.exchange()
        self.loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return self.loss

    def _forward_and_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a micro-step. Return its part of the loss of the step."""
        *inputs, targets = batch
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.cell.precision in AUTOCAST:
            autocast = torch.autocast(self.device.type, dtype=AUTOCAST[self.cell.precision])
        with self.mark("forward"), autocast:
            outputs: Any = self.model(*inputs)
            if self._own is not None:
                loss = self._own.loss(outputs, targets)
            else:
                loss = models.loss(outputs, targets, self.cell.model.auxiliary_weight)
            if self.cell.accumulate > 1:
                loss = loss / self.cell.accumulate
        with self.mark("backward"):
            self.scaler.scale(loss).backward()
        return loss.detach()

    def _count(self, batch: Batch) -> None:
        self.images += len(batch[0])
        if self._own is not None:
            self.tokens += self._own.tokens(*batch)

    def _count_update(self, *_: object) -> None:
        self.updates += 1


def set_arithmetic(precision: str) -> None:
    """Set the arithmetic of float32, and let cuDNN search its fastest kernels."""
    torch.backends.cudnn.benchmark = True  # shapes do not change
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
