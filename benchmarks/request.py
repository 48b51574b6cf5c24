"""Requests that only their benchmark can refuse, before any process starts.

If options constrain each other, or depend on the number of ranks or on how much memory there is, a
benchmark checks them in a function `refuse(cell, room)` that needs no torch. Its YAML names the
function: `code: {refuse: dotted.name}`.
"""

from dataclasses import dataclass

from conf import groups
from conf.cell import Cell
from conf.host import SHARED_MEMORY_FOLDER
from conf.options import Refused
from conf.targets import call_dotted, locate_without_torch


@dataclass(frozen=True)
class Room:
    """How many bytes of memory a cell finds: the least of its hosts. None: not known."""

    gpu_bytes: int | None = None  # that the smallest GPU has
    host_bytes: int | None = None  # that are free in the host's memory
    shared_bytes: int | None = None  # that are free in /dev/shm


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that its benchmark cannot measure.

    Raises Refused: names the field, the value and what is accepted.
    """
    choice = groups.choice("benchmark", cell.benchmark["name"])
    code = choice.code
    if "derive" in code and not choice.is_ours:
        locate_without_torch(
            code["derive"]
        )  # a file of the user is tried before its cell is measured, not after
    if "refuse" in code:
        call_dotted(code["refuse"], cell, room)


def refuse_too_little_shared(
    needed_bytes: int, free_bytes: int | None, who: str, instead: str
) -> None:
    """Refuse what needs more shared memory than is free on its host; `who` begins the sentence.

    Raises Refused: says how much is needed and what is free; `instead` needs less.
    """
    if free_bytes is not None and needed_bytes > free_bytes:
        raise Refused(
            f"{who} needs {needed_bytes / 2**20:.1f} MiB of shared memory in "
            f"{SHARED_MEMORY_FOLDER}, where {free_bytes / 2**20:.1f} MiB are free; expected "
            f"{instead}, or a larger {SHARED_MEMORY_FOLDER} (in a container: --shm-size)"
        )


def refuse_too_large(cell: Cell, needed_bytes: int, field: str, room: Room) -> None:
    """Refuse a cell whose ranks need more memory than there is; `field` causes it: 'name=value'.

    `needed_bytes` is what one rank needs. CPU workers share the free memory of their host equally.

    Raises Refused: names the field, what each rank needs and what there is.
    """
    available, ranks, limit = room.gpu_bytes, 1, "the smallest GPU has"
    if cell.device == "cpu":
        available, ranks = room.host_bytes, len(cell.gpus)  # on each host
        limit = f"a share of the host's free memory among {ranks} is"
    if available is None or needed_bytes <= available // ranks:
        return
    gib = 2**30
    raise Refused(
        f"{field}: each rank needs {needed_bytes / gib:.1f} GiB, "
        f"{limit} {available // ranks / gib:.1f} GiB; expected less"
    )
