"""`python -m trainers.needed_memory`: read a JSON list of cells, print what they ask of a host.

Of each cell a JSON list: its bytes in /dev/shm, and why its strategy refuses its model.

It is a process of its own because the launching process does not import torch.
"""

import contextlib
import json
import sys

import torch

from conf.cell import Cell
from trainers import models
from trainers.strategy import Hosts, load, trained


def needed(cell: Cell) -> tuple[int, str]:
    """Return the bytes that the cell takes in /dev/shm of the host with the most, and a refusal."""
    with torch.device("meta"):  # the model has no memory
        model = models.build(cell.model)
    if cell.precision == "bf16_weights":
        model = models.bf16_weights(model)
    parameters = trained(model)
    strategy = load(cell.strategy, cell.target("strategy"), Hosts.of(cell))
    try:
        strategy.refuse(model)
    except ValueError as error:
        return 0, str(error)
    return strategy.shared_bytes(parameters, cell.world_size, cell.device == "cuda"), ""


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # a model of the user's own may print
        answers = [needed(Cell.from_dict(plain)) for plain in json.load(sys.stdin)]
    print(json.dumps(answers))
