"""The batches of a training: synthetic ones on the device, or those of the user's own loader."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from conf.cell import IMAGES, SAMPLES, Cell
from conf.targets import locate

Batch = tuple[Tensor, ...]  # what forward takes, in its order, and last the targets
# Batches that take turns: more than one, so that no cache holds the input of the next step.
DISTINCT = 2
# Between the generators of neighbouring seeds: a prime above any number of ranks, so that no
# (seed, rank) has another's.
SEED_STRIDE = 1_000_003
IMAGE_DTYPES = {"bf16": torch.bfloat16, "bf16_weights": torch.bfloat16, "fp16": torch.float16}


class OwnModel(nn.Module, ABC):
    """A network, its batches and its loss. `forward` takes the tensors of a batch but the last."""

    @abstractmethod
    def batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return one batch: what forward takes, in its order, and last the targets of `loss`.

        The first dimension of the first tensor is `samples`. Draw random numbers from `generator`
        and make tensors on `generator.device`; each rank has a generator of its own. Called before
        the clock starts. Shapes and dtypes are yours; only `precision=bf16_weights` asks for inputs
        in the dtype of the weights.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of what forward returned, a scalar. Runs under autocast, like forward."""

    def tokens(self, *batch: Tensor) -> int:
        """Return how many tokens a batch has; 0: its samples have none.

        Called in every step: look at shapes only, because reading a value makes the host wait for
        the GPU.
        """
        return 0


def synthetic(
    cell: Cell, device: torch.device, rank: int, model: nn.Module | None = None
) -> Iterator[Batch]:
    """Yield batches for ever: (images, labels), or what a model of the user's own makes.

    Images are (batch, channels, pixels, pixels), normally distributed; labels are (batch,). They
    differ between ranks, or equal replicas would prove nothing; equal (seed, rank) gives equal
    batches.

    Raises ValueError: the user's own model makes batches of another form or size.
    """
    generator = torch.Generator(device=device).manual_seed(cell.seed * SEED_STRIDE + rank + 1)
    network, samples = cell.model, cell.batch_size
    shape = (samples, network.channels, network.image_size, network.image_size)
    batches: list[Batch] = []
    for _ in range(DISTINCT):
        if network.inputs == SAMPLES:
            assert isinstance(model, OwnModel)
            own = checked(cell, f"{network.builder}.batch", model.batch(samples, generator))
            batches.append(tuple(tensor.to(device) for tensor in own))
        else:
            images = torch.randn(shape, generator=generator, device=device)
            labels = torch.randint(network.classes, (samples,), generator=generator, device=device)
            batches.append(as_computed(cell, (images, labels)))
    return itertools.cycle(batches)


def as_computed(cell: Cell, batch: Batch) -> Batch:
    """Return images as the first layer computes, as a pipeline would; samples as they are."""
    if cell.model.inputs == SAMPLES:
        return batch
    images, labels = batch
    dtype = IMAGE_DTYPES.get(cell.precision, torch.float32)
    layout = torch.channels_last if cell.channels_last else torch.contiguous_format
    return images.to(dtype).contiguous(memory_format=layout), labels


def checked(cell: Cell, source: str, batch: object) -> Batch:
    """Return a batch of the user's own code if it has the form of one.

    Raises ValueError: it is not a tuple of tensors, or has another number of samples than asked.
    """
    parts: list[Any] = list(batch) if isinstance(batch, tuple | list) else []
    if len(parts) < 2 or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"{source} gave {_described(batch)}; expected a tuple of tensors: what forward "
            "takes, and last the targets"
        )
    first = parts[0]
    if not first.dim() or len(first) != cell.batch_size:
        raise ValueError(
            f"{source} gave a batch of {_described(first)}; expected "
            f"batch_size={cell.batch_size} samples, in the first dimension of the first tensor"
        )
    if any(not part.dim() or len(part) != len(first) for part in parts) and cell.accumulate > 1:
        raise ValueError(
            f"{source} gave {_described(batch)}; accumulate={cell.accumulate} needs the samples in "
            "the first dimension of every tensor"
        )
    network = cell.model
    size = (network.channels, network.image_size, network.image_size)
    if network.inputs == IMAGES and (len(parts) != 2 or tuple(first.shape[1:]) != size):
        raise ValueError(
            f"{source} gave {_described(batch)}; expected images {[cell.batch_size, *size]} "
            "and labels"
        )
    return tuple(parts)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_described, value)) or 'nothing'}"
    return type(value).__name__


class LoadedBatches:
    """The batches of `data.loader`, again and again, on the device (OWN.md has an example).

    `waited_ms` has the host's ms for each that was drawn: until its copy to the device is enqueued.
    """

    def __init__(self, cell: Cell, device: torch.device, rank: int) -> None:
        """Call `load(batch_size=…, rank=…, world_size=…, seed=…, **data.options)`."""
        self._cell, self._device = cell, device
        self._source = f"data.loader={cell.data['loader']}"
        loader: Iterable[Any] = locate(cell.data["loader"])(
            batch_size=cell.batch_size,
            rank=rank,
            world_size=cell.world_size,
            seed=cell.seed,
            **cell.data["options"],
        )
        if not hasattr(loader, "__iter__"):
            raise TypeError(
                f"{self._source} returned {type(loader).__name__}; expected an iterable, such "
                "as torch's DataLoader"
            )
        # A DataLoader has batches ready in its workers.
        prefetched = getattr(loader, "prefetch_factor", 0) or 0
        self.ready = getattr(loader, "num_workers", 0) * prefetched
        self._batches = self._for_ever(loader)
        self.waited_ms: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, on the device.

        Raises ValueError: the loader gives none, or one of another form.
        """
        began = time.perf_counter()
        batch = checked(self._cell, self._source, next(self._batches))
        on_device = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
        on_device = as_computed(self._cell, on_device)
        self.waited_ms.append((time.perf_counter() - began) * 1e3)
        return on_device

    def _for_ever(self, loader: Iterable[Any]) -> Iterator[Any]:
        count = 0
        while True:
            before = count
            for batch in loader:
                count += 1
                yield batch
            if count == before:
                failure = "gave no batch"
                if count:
                    failure = f"ended after {count} batches and did not begin again"
                raise ValueError(
                    f"{self._source} {failure}; expected what can be read again and again, such "
                    "as torch's DataLoader"
                )
