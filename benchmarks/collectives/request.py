"""The messages of `benchmark=collectives`: their sizes, their placements, and what it refuses. Without torch."""

import math
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.collectives.busbw import COLLECTIVES, ELEMENT_BYTES
from benchmarks.memory import refuse_too_large
from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused

# The collectives that torch.distributed can join into one call.
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")
# nccl-tests starts every rank's share on a multiple of this.
SHARE_BYTES = 16
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s?(?:([KMGkmg])(?:i?B)?|B)?")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_SIZES = 128
# Room for what is no message: CUDA's and NCCL's own memory, and the count of wrong elements; by kind of device.
OWN_BYTES = {"cuda": 3 << 30, "cpu": 1 << 28}


def size_bytes(field: str, value: Any) -> int:
    """Return the bytes of a size as nccl-tests reads it: a whole number, or one with K, M, G, KiB, MiB or GiB (powers of 1024).

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    found = SIZE.fullmatch(str(value).strip()) if isinstance(value, str) else None
    number = float(found[1]) * UNITS[(found[2] or "").upper()] if found else value
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if not fits or not 1 <= number <= 1 << 50 or number != int(number):
        raise Refused(
            f"{field}={value}: accepted are whole bytes of at least 1, as 65536, 64K, 64KiB, 1M or 4G"
        )
    return int(number)


def resolve(options: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return the options with `min_bytes` and `factor` resolved: what `auto` means for them depends on other options.

    Raises:
        Refused: both a step and a factor were given.
    """
    found = dict(options)
    if found["min_bytes"] == "auto":  # 8 bytes, or the smallest power of two that can be shared out
        found["min_bytes"] = 1 << math.ceil(math.log2(max(8, unit_bytes(found, ranks))))
    if found["factor"] == "auto":
        found["factor"] = 2 if found["step"] is None else None
    elif found["step"] is not None:
        raise Refused(
            f"benchmark.step={found['step']}: accepted without a factor, not together with factor={found['factor']}"
        )
    return found


def placements(cell: Cell) -> tuple[str, ...]:
    """Return which of out_of_place and in_place the cell measures."""
    collective, asked = COLLECTIVES[cell.benchmark["collective"]], cell.benchmark["placement"]
    separate = not (collective.overwrites and cell.benchmark["calls"] == "torch")
    wanted = (
        ("out_of_place", asked != "in" and separate),
        ("in_place", asked != "out" and collective.in_place),
    )
    return tuple(name for name, want in wanted if want)


def unit_bytes(options: Mapping[str, Any], ranks: int) -> int:
    """Return the bytes that every message is a multiple of: an element, or a share for every rank that starts on 16 bytes."""
    shares = COLLECTIVES[options["collective"]].shares
    return SHARE_BYTES * ranks if shares else ELEMENT_BYTES[options["dtype"]]


def largest_bytes(cell: Cell) -> int:
    """Return the bytes of the largest message, before it is rounded down."""
    return size_bytes("benchmark.max_bytes", cell.benchmark["max_bytes"])


def sizes(cell: Cell) -> list[int]:
    """Return the sizes of the messages (S) in bytes, ascending, each once.

    Each is rounded down to what the collective can share out, as nccl-tests does.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    asked, unit, most = (
        cell.benchmark,
        unit_bytes(cell.benchmark, cell.world_size),
        largest_bytes(cell),
    )
    element = ELEMENT_BYTES[asked["dtype"]]
    least = size_bytes("benchmark.min_bytes", asked["min_bytes"])
    if least > most:
        raise Refused(
            f"benchmark.min_bytes={asked['min_bytes']}: accepted is at most max_bytes, {most}; it is {least}"
        )
    if least < unit:
        raise Refused(
            f"benchmark.min_bytes={asked['min_bytes']}: {asked['collective']} over {cell.world_size} ranks moves multiples "
            f"of {unit} bytes of {asked['dtype']}; accepted is at least that"
        )
    step = None if asked["step"] is None else size_bytes("benchmark.step", asked["step"])
    for field, value in (("min_bytes", least), ("step", step or 0)):
        if value % element:
            raise Refused(
                f"benchmark.{field}={asked[field]}: accepted is a multiple of {element}, the bytes of a {asked['dtype']}"
            )
    if step and (most - least) // step >= MOST_SIZES:
        raise Refused(
            f"benchmark.step={asked['step']}: gives {(most - least) // step + 1} sizes; accepted are at most {MOST_SIZES}"
        )
    found, size = [], least
    while size <= most:
        found.append(size // unit * unit)
        size = size + step if step else size * int(asked["factor"])
    return list(dict.fromkeys(found))


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    _refuse_operator(cell)
    _refuse_root(cell)
    _refuse_placement(cell)
    _refuse_calls(cell)
    sizes(cell)
    buffers = 1 if placements(cell) == ("in_place",) else 2
    needed = buffers * largest_bytes(cell) + OWN_BYTES[cell.device]
    refuse_too_large(cell, needed, f"benchmark.max_bytes={cell.benchmark['max_bytes']}", room)


RATE = {"cpu": 0.5e9, "cuda": 100e9}  # bytes a second
CALL_SECONDS = {"cpu": 2e-4, "cuda": 2e-5}


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    options = cell.benchmark
    windows = len(placements(cell)) * (1 + bool(options["percentiles"]))
    calls = (
        windows * (int(options["warmup"]) + int(options["iterations"])) * int(options["coalesced"])
    )
    return calls * sum(CALL_SECONDS[cell.device] + size / RATE[cell.device] for size in sizes(cell))


def _refuse_operator(cell: Cell) -> None:
    """Refuse an operator that the collective, the element type or the backend does not have."""
    name, op, dtype = (cell.benchmark[option] for option in ("collective", "op", "dtype"))
    if not COLLECTIVES[name].reduces and op != "sum":
        others = ", ".join(name for name, one in COLLECTIVES.items() if one.reduces)
        raise Refused(f"benchmark.op={op}: {name} reduces nothing; accepted with {others}")
    if op == "avg" and "int" in dtype:
        raise Refused(
            f"benchmark.op=avg: {dtype} cannot hold a mean; accepted with floating-point dtypes"
        )
    if op == "avg" and cell.device == "cpu":
        raise Refused("benchmark.op=avg: accepted on GPUs only, gloo has sum, prod, min and max")


def _refuse_root(cell: Cell) -> None:
    """Refuse a root that is no rank, or for a collective that has none."""
    name, root = cell.benchmark["collective"], cell.benchmark["root"]
    if root and not COLLECTIVES[name].rooted:
        raise Refused(f"benchmark.root={root}: {name} has no root; accepted is 0")
    if root >= cell.world_size:
        raise Refused(f"benchmark.root={root}: accepted is a rank, 0 to {cell.world_size - 1}")


def _refuse_placement(cell: Cell) -> None:
    """Refuse a placement that the collective does not have."""
    name, placement = cell.benchmark["collective"], cell.benchmark["placement"]
    if not placements(cell):
        why = (
            "has no form in place"
            if placement == "in"
            else "overwrites its input in torch.distributed"
        )
        raise Refused(
            f"benchmark.placement={placement}: {name} {why}; accepted is the other, or both"
        )


def _refuse_calls(cell: Cell) -> None:
    """Refuse what CPU workers or torch.distributed cannot call."""
    options = cell.benchmark
    name, calls = options["collective"], options["calls"]
    if cell.device == "cpu":
        for field, wrong in (("calls", "nccl"), ("cuda_graph", True)):
            if options[field] == wrong:
                raise Refused(
                    f"benchmark.{field}={str(wrong).lower()}: accepted on GPUs only, not on CPU workers"
                )
    if cell.world_size == 1 and name == "send_recv" and calls == "torch":
        raise Refused(
            "benchmark.collective=send_recv: one rank has no other to send to; accepted are two or more"
        )
    if options["coalesced"] > 1 and calls == "torch" and name not in COALESCED:
        raise Refused(
            f"benchmark.coalesced={options['coalesced']}: torch.distributed joins {', '.join(COALESCED)}; {name} is accepted "
            "with calls=nccl"
        )
