"""What a process that measures several cells knows from its earlier ones: that steps like these do not get longer under load.

A cell's warm-up shows whether its steps get longer, as at a power cap, and brings the device to where it stays. In ranks that go
on, the device comes from the cell before, and a cell like one that was warmed up in full need not show it again.
"""

from conf.cell import Cell

SHARE = 0.25  # of the warm-up's least time, for a cell like one before


class LoadedDevice:
    """The cells whose full warm-up showed that their steps do not get longer, in this process."""

    def __init__(self) -> None:
        self._flat: list[Cell] = []

    def remember(self, cell: Cell) -> None:
        """Take a cell whose steps did not get longer in its full warm-up."""
        self._flat.append(cell)

    def knows(self, cell: Cell) -> bool:
        """Return whether a cell before computed the same; on a GPU also on batches at least as large, which draw more power."""
        same = (one for one in self._flat if _computes(one) == _computes(cell))
        return any(cell.device == "cpu" or one.batch_size >= cell.batch_size for one in same)


def _computes(cell: Cell) -> object:
    """Return what decides what the device computes for an image."""
    model = cell.model, cell.precision, cell.optimize, cell.channels_last, cell.optimizer
    return model, cell.data, cell.device, cell.places


HERE = LoadedDevice()  # of this process, as the device is
