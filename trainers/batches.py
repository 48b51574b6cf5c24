"""Synthetic batches that are on the device before the clock starts."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from conf.cell import Cell

# Batches that take turns: more than one, so that no cache holds the input of the next step.
DISTINCT = 2
# Between the generators of neighbouring seeds: a prime above any number of ranks, so that no (seed, rank) has another's.
SEED_STRIDE = 1_000_003


def synthetic(cell: Cell, device: torch.device, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (images, labels) for ever: images (batch, channels, pixels, pixels), normally distributed; labels (batch,).

    They differ between ranks, or equal replicas would prove nothing; equal (seed, rank) gives equal batches. The dtype is the
    one in which the first layer computes, as an input pipeline would deliver it.
    """
    generator = torch.Generator(device=device).manual_seed(cell.seed * SEED_STRIDE + rank + 1)
    dtype = {"bf16": torch.bfloat16, "bf16_weights": torch.bfloat16, "fp16": torch.float16}.get(
        cell.precision, torch.float32
    )
    network = cell.model
    shape = (cell.batch_size, network.channels, network.image_size, network.image_size)
    batches = []
    for _ in range(DISTINCT):
        images = torch.randn(shape, generator=generator, device=device).to(dtype)
        if cell.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(network.classes, (cell.batch_size,), generator=generator, device=device)
        batches.append((images, labels))
    return itertools.cycle(batches)
