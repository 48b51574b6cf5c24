"""The collectives that `benchmark=collectives` measures, the sizes of their messages, and requests that it cannot measure."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.memory import refuse_too_large
from conf.cell import Cell
from conf.options import Refused


@dataclass(frozen=True)
class Collective:
    """One collective as nccl-tests counts it: algbw = S ÷ time, busbw = algbw × factor(n) over n ranks."""

    program: str  # of nccl-tests, without _perf
    factor: Callable[[int], float]
    shares: bool = False  # S is n shares, one for each rank; else S is what every rank holds
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True  # whether its result can lie where its input was
    overwrites: bool = False  # torch.distributed has only the form in place


def _one(n: int) -> float:
    return 1.0


def _others_share(n: int) -> float:
    return (n - 1) / n


def _there_and_back(n: int) -> float:
    return 2 * (n - 1) / n


COLLECTIVES = {
    "all_reduce": Collective("all_reduce", _there_and_back, reduces=True, overwrites=True),
    "all_gather": Collective("all_gather", _others_share, shares=True),
    "reduce_scatter": Collective("reduce_scatter", _others_share, shares=True, reduces=True),
    "broadcast": Collective("broadcast", _one, rooted=True, overwrites=True),
    "reduce": Collective("reduce", _one, reduces=True, rooted=True, overwrites=True),
    "all_to_all": Collective("alltoall", _others_share, shares=True, in_place=False),
    "gather": Collective("gather", _others_share, shares=True, rooted=True),
    "scatter": Collective("scatter", _others_share, shares=True, rooted=True),
    "send_recv": Collective("sendrecv", _one, in_place=False),  # to rank + 1, from rank − 1
}
ELEMENT_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
# What torch.distributed can join into one call.
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")
# What `auto` means on (GPU, CPU worker).
AUTO = {
    "factor": (2, 2), "iterations": (20, 10), "warmup": (5, 2), "calls": ("nccl", "torch"), "max_bytes": (1 << 30, 1 << 20),
}  # fmt: skip
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


def option(cell: Cell, name: str) -> Any:
    """An option with `auto` resolved for the cell's device."""
    return cell.asked(AUTO)[name]


def placements(cell: Cell) -> tuple[str, ...]:
    """Of out_of_place and in_place, those that the cell measures."""
    collective, asked = COLLECTIVES[cell.benchmark["collective"]], cell.benchmark["placement"]
    separate = not (collective.overwrites and option(cell, "calls") == "torch")
    wanted = (("out_of_place", asked != "in" and separate), ("in_place", asked != "out" and collective.in_place))
    return tuple(name for name, want in wanted if want)


def unit_bytes(cell: Cell) -> int:
    """Every message is a multiple of these: an element, or a share for every rank that starts on 16 bytes."""
    shares = COLLECTIVES[cell.benchmark["collective"]].shares
    return SHARE_BYTES * cell.world_size if shares else ELEMENT_BYTES[cell.benchmark["dtype"]]


def largest_bytes(cell: Cell) -> int:
    """Bytes of the largest message, before it is rounded down."""
    return size_bytes("benchmark.max_bytes", option(cell, "max_bytes"))


def sizes(cell: Cell) -> list[int]:
    """The messages in bytes (S), ascending, each once: rounded down to what the collective can share out, as nccl-tests does.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    asked, unit, most = cell.benchmark, unit_bytes(cell), largest_bytes(cell)
    element = ELEMENT_BYTES[asked["dtype"]]
    if asked["min_bytes"] == "auto":
        least = 1 << math.ceil(math.log2(max(8, unit)))
    else:
        least = size_bytes("benchmark.min_bytes", asked["min_bytes"])
    if least > most:
        raise Refused(f"benchmark.min_bytes={asked['min_bytes']}: accepted is at most max_bytes, {most}; it is {least}")
    if least < unit:
        raise Refused(
            f"benchmark.min_bytes={asked['min_bytes']}: {asked['collective']} over {cell.world_size} ranks moves multiples "
            f"of {unit} bytes of {asked['dtype']}; accepted is at least that"
        )
    step = None if asked["step"] is None else size_bytes("benchmark.step", asked["step"])
    if step is not None and asked["factor"] != "auto":
        raise Refused(f"benchmark.step={asked['step']}: accepted without a factor, not beside factor={asked['factor']}")
    for field, value in (("min_bytes", least), ("step", step or 0)):
        if value % element:
            raise Refused(
                f"benchmark.{field}={asked[field]}: accepted is a multiple of {element}, the bytes of a {asked['dtype']}"
            )
    factor = int(option(cell, "factor"))
    if step and (most - least) // step >= MOST_SIZES:
        raise Refused(
            f"benchmark.step={asked['step']}: gives {(most - least) // step + 1} sizes; accepted are at most {MOST_SIZES}"
        )
    found, size = [], least
    while size <= most:
        found.append(size // unit * unit)
        size = size + step if step else size * factor
    return list(dict.fromkeys(found))


def refuse(cell: Cell, memory_bytes: int | None) -> None:
    """Refuse what cannot be measured. Raises Refused."""
    asked = cell.benchmark
    name, op, root = asked["collective"], asked["op"], asked["root"]
    collective, calls = COLLECTIVES[name], option(cell, "calls")
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
