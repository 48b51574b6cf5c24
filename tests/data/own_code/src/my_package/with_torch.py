import torch  # noqa: F401


def refuse(cell, room): ...
