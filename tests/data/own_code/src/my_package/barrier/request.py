"""What the benchmark refuses."""

from conf.options import Refused


def refuse(cell, room):
    if cell.world_size > 2:
        raise Refused(f"gpus={cell.gpus}: a barrier of three is too much for me")
