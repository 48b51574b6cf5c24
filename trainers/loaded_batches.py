"""Batches of a data loader of the user's own, and how long the host waits for each. OWN.md has an example."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from conf.cell import Cell
from conf.targets import locate
from trainers.batches import as_computed, checked
from trainers.own_model import Batch


class LoadedBatches:
    """The batches of `data.loader`, again and again, on the device, as an iterator.

    `waited_ms` has the host's ms for each that was drawn: until its copy to the device is enqueued.
    """

    def __init__(self, cell: Cell, device: torch.device, rank: int) -> None:
        """Call the user's function: `load(batch_size=…, rank=…, world_size=…, seed=…, **data.options)`."""
        self._cell, self._device = cell, device
        self._of = f"data.loader={cell.data['loader']}"
        place = {"batch_size": cell.batch_size, "rank": rank, "world_size": cell.world_size, "seed": cell.seed}
        loader: Iterable[Any] = locate(cell.data["loader"])(**place, **cell.data["options"])
        if not hasattr(loader, "__iter__"):
            raise TypeError(
                f"{self._of} returned {type(loader).__name__}; accepted is an iterable, such as torch's DataLoader"
            )
        # A DataLoader has batches ready in its workers.
        self.ready = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        self._source = self._for_ever(loader)
        self.waited_ms: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch, on the device. Raises ValueError where the loader gives none, or one of another form."""
        began = time.perf_counter()
        batch = checked(self._cell, self._of, next(self._source))
        on_device = as_computed(self._cell, tuple(one.to(self._device, non_blocking=True) for one in batch))
        self.waited_ms.append((time.perf_counter() - began) * 1e3)
        return on_device

    def _for_ever(self, loader: Iterable[Any]) -> Iterator[Any]:
        given = 0
        while True:
            before = given
            for batch in loader:
                given += 1
                yield batch
            if given == before:
                what = f"ended after {given} batches and did not begin again" if given else "gave no batch"
                raise ValueError(
                    f"{self._of} {what}; accepted is what can be read again and again, such as torch's DataLoader"
                )
