"""The collectives that `benchmark=collectives` measures, the sizes of their messages, and requests that it cannot measure."""

import math
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.memory import refuse_too_large
from conf.cell import Cell
from conf.nccl_vocabulary import COLLECTIVES, ELEMENT_BYTES
from conf.options import Refused

# What torch.distributed can join into one call.
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")
# nccl-tests starts every rank's share on a multiple of these.
SHARE_BYTES = 16
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s?(?:([KMGkmg])(?:i?B)?|B)?")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_SIZES = 128
# Beside the messages: CUDA's and NCCL's own memory and what counts wrong elements; by kind of device.
OWN_BYTES = {"cuda": 3 << 30, "cpu": 1 << 28}


def size_bytes(field: str, value: Any) -> int:
    """A size as nccl-tests reads it: a whole number, or one with K, M or G (also KiB, MiB, GiB), which are binary.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    found = SIZE.fullmatch(str(value).strip()) if isinstance(value, str) else None
    number = float(found[1]) * UNITS[(found[2] or "").upper()] if found else value
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if not fits or not 1 <= number <= 1 << 50 or number != int(number):
        raise Refused(f"{field}={value}: accepted are whole bytes of at least 1, as 65536, 64K, 64KiB, 1M or 4G")
    return int(number)


def resolve(options: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return the options with `min_bytes` and `factor` resolved: what `auto` means for them depends on other options.

    Raises:
        Refused: both a step and a factor were given.
    """
    found = dict(options)
    if found["min_bytes"] == "auto":  # 8 bytes, or the smallest power of two that can be shared out
        found["min_bytes"] = 1 << math.ceil(math.log2(max(8, _unit_bytes(found, ranks))))
    if found["factor"] == "auto":
        found["factor"] = 2 if found["step"] is None else None
    elif found["step"] is not None:
        raise Refused(
            f"benchmark.step={found['step']}: accepted without a factor, not together with factor={found['factor']}"
        )
    return found


def placements(cell: Cell) -> tuple[str, ...]:
    """Of out_of_place and in_place, those that the cell measures."""
    collective, asked = COLLECTIVES[cell.benchmark["collective"]], cell.benchmark["placement"]
    separate = not (collective.overwrites and cell.benchmark["calls"] == "torch")
    wanted = (("out_of_place", asked != "in" and separate), ("in_place", asked != "out" and collective.in_place))
    return tuple(name for name, want in wanted if want)


def unit_bytes(cell: Cell) -> int:
    """Return the bytes that every message is a multiple of: an element, or a share for every rank that starts on 16 bytes."""
    return _unit_bytes(cell.benchmark, cell.world_size)


def _unit_bytes(options: Mapping[str, Any], ranks: int) -> int:
    shares = COLLECTIVES[options["collective"]].shares
    return SHARE_BYTES * ranks if shares else ELEMENT_BYTES[options["dtype"]]


def largest_bytes(cell: Cell) -> int:
    """Bytes of the largest message, before it is rounded down."""
    return size_bytes("benchmark.max_bytes", cell.benchmark["max_bytes"])


def sizes(cell: Cell) -> list[int]:
    """The messages in bytes (S), ascending, each once: rounded down to what the collective can share out, as nccl-tests does.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    asked, unit, most = cell.benchmark, unit_bytes(cell), largest_bytes(cell)
    element = ELEMENT_BYTES[asked["dtype"]]
    least = size_bytes("benchmark.min_bytes", asked["min_bytes"])
    if least > most:
        raise Refused(f"benchmark.min_bytes={asked['min_bytes']}: accepted is at most max_bytes, {most}; it is {least}")
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


def refuse(cell: Cell, memory_bytes: int | None) -> None:
    """Refuse what cannot be measured. Raises Refused."""
    asked = cell.benchmark
    name, op, root = asked["collective"], asked["op"], asked["root"]
    collective, calls = COLLECTIVES[name], cell.benchmark["calls"]
    if not collective.reduces and op != "sum":
        others = ", ".join(name for name, one in COLLECTIVES.items() if one.reduces)
        raise Refused(f"benchmark.op={op}: {name} reduces nothing; accepted with {others}")
    if op == "avg" and "int" in asked["dtype"]:
        raise Refused(f"benchmark.op=avg: a mean of {asked['dtype']} is none; accepted with floating-point dtypes")
    if op == "avg" and cell.device == "cpu":
        raise Refused("benchmark.op=avg: accepted on GPUs only, gloo has sum, prod, min and max")
    if root and not collective.rooted:
        raise Refused(f"benchmark.root={root}: {name} has no root; accepted is 0")
    if root >= cell.world_size:
        raise Refused(f"benchmark.root={root}: accepted is a rank, 0 to {cell.world_size - 1}")
    if not placements(cell):
        why = "has no form in place" if asked["placement"] == "in" else "overwrites its input in torch.distributed"
        raise Refused(f"benchmark.placement={asked['placement']}: {name} {why}; accepted is the other, or both")
    if cell.device == "cpu":
        for field, wrong in (("calls", "nccl"), ("cuda_graph", True)):
            if asked[field] == wrong:
                raise Refused(f"benchmark.{field}={str(wrong).lower()}: accepted on GPUs only, not on CPU workers")
    if cell.world_size == 1 and name == "send_recv" and calls == "torch":
        raise Refused("benchmark.collective=send_recv: one rank has no other to send to; accepted are two or more")
    if asked["coalesced"] > 1 and calls == "torch" and name not in COALESCED:
        raise Refused(
            f"benchmark.coalesced={asked['coalesced']}: torch.distributed joins {', '.join(COALESCED)}; {name} is accepted "
            "with calls=nccl"
        )
    sizes(cell)
    buffers = 1 if placements(cell) == ("in_place",) else 2
    needed = buffers * largest_bytes(cell) + OWN_BYTES[cell.device]
    refuse_too_large(cell, needed, f"benchmark.max_bytes={asked['max_bytes']}", memory_bytes)
