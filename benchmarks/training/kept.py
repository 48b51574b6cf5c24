"""What steps without exchange change on a rank, kept and brought back: timed steps then go on as if these had never been."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.rank.group import Ranks
from conf.variables import free_memory
from trainers.step import Training

ROOM = 2  # times its own size that must be free before a copy is made


class Kept:
    """Copies of a rank's weights, buffers and what its optimizer and loss scaler keep, on its device.

    Weights that a strategy keeps elsewhere (servers, flat buckets) need no copy: steps without exchange do not reach them.
    `whole`: they are kept too, where the strategy tells them.
    """

    def __init__(self, training: Training, whole: bool = False) -> None:
        """Make the copies now, so that later steps find the device's memory as the timed ones do."""
        self._training, self._whole = training, whole
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors()]

    @classmethod
    def of(cls, training: Training, ranks: Ranks, whole: bool = False) -> "Kept | None":
        """Make the copies on every rank, or None on every rank where one of them has no room. Collective."""
        needed = ROOM * sum(tensor.nbytes for tensor in _tensors(training, whole))
        free = _free_bytes(training.device) / (1 if training.device.type == "cuda" else ranks.world_size)
        return cls(training, whole) if all(fits for (fits,) in ranks.gather([free >= needed])) else None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Bring everything back at the end of the context. Waits for nothing, but with a loss scaler."""
        optimizer, scaler = self._training.optimizer, self._training.scaler
        before, of_scaler = list(optimizer.state), scaler.state_dict()
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._tensors())
        yield
        for parameter in optimizer.state.keys() - before:  # an optimizer that only steps without exchange has none yet
            del optimizer.state[parameter]
        scaler.load_state_dict(of_scaler)
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return _tensors(self._training, self._whole)


def _tensors(training: Training, whole: bool) -> list[Tensor]:
    """Return the tensors that a step changes on this rank, always in the same order."""
    state = [kept for own in training.optimizer.state.values() for kept in own.values() if isinstance(kept, Tensor)]
    elsewhere = training.strategy.state() if whole else []
    return [*training.network.parameters(), *training.network.buffers(), *state, *elsewhere]


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that nobody uses, on a GPU or in the host's memory; 0 where it is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() or 0
