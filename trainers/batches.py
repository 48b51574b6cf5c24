"""Synthetic batches that are on the device before the clock starts, and the form that every batch must have."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from conf.cell import IMAGES, SAMPLES, Cell
from trainers.own_model import Batch, OwnModel

# Batches that take turns: more than one, so that no cache holds the input of the next step.
DISTINCT = 2
# Between the generators of neighbouring seeds: a prime above any number of ranks, so that no (seed, rank) has another's.
SEED_STRIDE = 1_000_003


def synthetic(cell: Cell, device: torch.device, rank: int, model: nn.Module | None = None) -> Iterator[Batch]:
    """Yield batches for ever: (images, labels), or what a model of the user's own makes.

    Images are (batch, channels, pixels, pixels), normally distributed; labels are (batch,). They differ between ranks, or equal
    replicas would prove nothing; equal (seed, rank) gives equal batches.

    Raises:
        ValueError: the user's own model makes batches of another form or size.
    """
    generator = torch.Generator(device=device).manual_seed(cell.seed * SEED_STRIDE + rank + 1)
    if cell.model.inputs == SAMPLES:
        assert isinstance(model, OwnModel)
        batches = [
            checked(cell, f"{cell.model.builder}.batch", model.batch(cell.batch_size, generator))
            for _ in range(DISTINCT)
        ]
        return itertools.cycle([tuple(tensor.to(device) for tensor in batch) for batch in batches])
    network = cell.model
    shape = (cell.batch_size, network.channels, network.image_size, network.image_size)
    batches = []
    for _ in range(DISTINCT):
        images = torch.randn(shape, generator=generator, device=device)
        labels = torch.randint(network.classes, (cell.batch_size,), generator=generator, device=device)
        batches.append(as_computed(cell, (images, labels)))
    return itertools.cycle(batches)


def as_computed(cell: Cell, batch: Batch) -> Batch:
    """Return a batch as the first layer computes, as an input pipeline would deliver it; samples stay as they are."""
    if cell.model.inputs == SAMPLES:
        return batch
    images, labels = batch
    dtype = {"bf16": torch.bfloat16, "bf16_weights": torch.bfloat16, "fp16": torch.float16}.get(
        cell.precision, torch.float32
    )
    layout = torch.channels_last if cell.channels_last else torch.contiguous_format
    return images.to(dtype).contiguous(memory_format=layout), labels


def checked(cell: Cell, source: str, batch: object) -> Batch:
    """Return a batch of the user's own code if it has the form of one.

    Raises:
        ValueError: it is no tuple of tensors, or has another number of samples than the cell asks for.
    """
    form = "accepted is a tuple of tensors: what forward takes, and last the targets"
    if not isinstance(batch, tuple | list) or not all(isinstance(one, torch.Tensor) for one in batch) or len(batch) < 2:
        raise ValueError(f"{source} gave {_described(batch)}; {form}")
    first = batch[0]
    if not first.dim() or len(first) != cell.batch_size:
        raise ValueError(
            f"{source} gave a batch of {_described(first)}; accepted are batch_size={cell.batch_size} samples, in the first "
            "dimension of the first tensor"
        )
    network = cell.model
    size = (network.channels, network.image_size, network.image_size)
    if network.inputs == IMAGES and (len(batch) != 2 or tuple(first.shape[1:]) != size):
        raise ValueError(
            f"{source} gave {_described(batch)}; accepted are images {[cell.batch_size, *size]} and labels"
        )
    return tuple(batch)


def _described(value: object) -> str:
    """Return a few words about a value: its type, of a tensor its shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_described, value)) or 'nothing'}"
    return type(value).__name__
