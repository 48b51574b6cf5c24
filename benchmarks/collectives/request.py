"""The messages of `benchmark=collectives`: sizes, placements, and what it refuses. No torch.

Collectives are counted as nccl-tests does: doc/PERFORMANCE.md and its `*GetBw` functions.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.request import Room, refuse_too_large
from conf.cell import Cell
from conf.options import Refused


@dataclass(frozen=True)
class Collective:
    """One collective as nccl-tests counts it.

    algbw = S ÷ time, busbw = algbw × factor(n) over n ranks.
    """

    program: str  # of nccl-tests, without _perf
    trips: int = 0  # factor(n) is this many times (n − 1) ÷ n; 0: the factor is 1
    shares: bool = False  # S is n shares, one for each rank; else S is what every rank holds
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True  # whether its result can lie where its input was
    overwrites: bool = False  # torch.distributed has only the form in place

    def factor(self, ranks: int) -> float:
        """Return busbw ÷ algbw over a number of ranks."""
        if not self.trips:
            return 1.0
        return self.trips * (ranks - 1) / ranks


# The collectives that `benchmark=collectives` measures.
COLLECTIVES = {
    "all_reduce": Collective("all_reduce", trips=2, reduces=True, overwrites=True),
    "all_gather": Collective("all_gather", trips=1, shares=True),
    "reduce_scatter": Collective("reduce_scatter", trips=1, shares=True, reduces=True),
    "broadcast": Collective("broadcast", rooted=True, overwrites=True),
    "reduce": Collective("reduce", reduces=True, rooted=True, overwrites=True),
    "all_to_all": Collective("alltoall", trips=1, shares=True, in_place=False),
    "gather": Collective("gather", trips=1, shares=True, rooted=True),
    "scatter": Collective("scatter", trips=1, shares=True, rooted=True),
    "send_recv": Collective("sendrecv", in_place=False),  # to rank + 1, from rank − 1
}
# nccl-tests has two more.
NCCL_TESTS_COLLECTIVES = COLLECTIVES | {
    "all_to_all_v": Collective("alltoallv", trips=1, shares=True, in_place=False),
    "hypercube": Collective("hypercube", in_place=False),
}

# Bytes of an element, by the names of torch's dtypes that `benchmark=collectives` accepts.
ELEMENT_BYTES = (
    dict.fromkeys(("int8", "uint8"), 1)
    | dict.fromkeys(("float16", "bfloat16"), 2)
    | dict.fromkeys(("float32", "int32"), 4)
    | dict.fromkeys(("float64", "int64"), 8)
)
# The same by the names that nccl-tests prints.
_BYTE_TYPES = ("int8", "char", "uint8", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2")
NCCL_TESTS_ELEMENT_BYTES = (
    dict.fromkeys(_BYTE_TYPES, 1)
    | dict.fromkeys(("half", "bfloat16"), 2)
    | dict.fromkeys(("int32", "int", "uint32", "float"), 4)
    | dict.fromkeys(("int64", "uint64", "double"), 8)
)


# The collectives that torch.distributed can join into one call.
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")
# nccl-tests starts every rank's share on a multiple of this.
SHARE_BYTES = 16
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s?(?:([KMGkmg])(?:i?B)?|B)?")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_BYTES = 1 << 50
MOST_SIZES = 128
# Room for CUDA's and NCCL's own memory, and for the count of wrong elements.
OWN_BYTES = {"cuda": 3 << 30, "cpu": 1 << 28}
# How long a cell measures, by a rule of thumb.
BYTES_PER_SECOND = {"cpu": 0.5e9, "cuda": 100e9}
CALL_SECONDS = {"cpu": 2e-4, "cuda": 2e-5}


def size_bytes(field: str, value: Any) -> int:
    """Return a size as nccl-tests reads it: whole bytes, or with K, M, G, KiB, … (of 1024).

    Raises Refused: names the field, the value and what is accepted.
    """
    count = value
    if isinstance(value, str):
        match = SIZE.fullmatch(value.strip())
        if match:
            count = float(match[1]) * UNITS[(match[2] or "").upper()]
    fits = isinstance(count, int | float) and not isinstance(count, bool)
    if not fits or not 1 <= count <= MOST_BYTES or count != int(count):
        accepted = "a whole number of bytes, 1 or more; K, M or G may follow: 65536, 64K, 64KiB, 4G"
        raise Refused(f"{field}={value}: expected {accepted}")
    return int(count)


def resolve(options: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return the options with `auto` of `min_bytes` and `factor` resolved.

    Raises Refused: both a step and a factor were given.
    """
    resolved = dict(options)
    step, factor = options["step"], options["factor"]
    if options["min_bytes"] == "auto":
        # 8 bytes, or the smallest power of two that can be shared out.
        resolved["min_bytes"] = 1 << math.ceil(math.log2(max(8, unit_bytes(options, ranks))))
    if factor == "auto" and step is None:
        resolved["factor"] = 2
    elif factor == "auto":
        resolved["factor"] = None
    elif step is not None:
        raise Refused(f"benchmark.step={step}: use it alone, not with factor={factor}")
    return resolved


def placements(cell: Cell) -> tuple[str, ...]:
    """Return which of out_of_place and in_place the cell measures."""
    options = cell.benchmark
    collective, placement = COLLECTIVES[options["collective"]], options["placement"]
    measured = []
    if placement != "in" and not (collective.overwrites and options["calls"] == "torch"):
        measured.append("out_of_place")
    if placement != "out" and collective.in_place:
        measured.append("in_place")
    return tuple(measured)


def unit_bytes(options: Mapping[str, Any], ranks: int) -> int:
    """Return what messages are multiples of: an element, or SHARE_BYTES for every rank."""
    if COLLECTIVES[options["collective"]].shares:
        return SHARE_BYTES * ranks
    return ELEMENT_BYTES[options["dtype"]]


def largest_bytes(cell: Cell) -> int:
    """Return the bytes of the largest message, before it is rounded down."""
    return size_bytes("benchmark.max_bytes", cell.benchmark["max_bytes"])


def sizes(cell: Cell) -> list[int]:
    """Return the sizes of the messages (S) in bytes, ascending, each once.

    Each is rounded down to what the collective can share out, as nccl-tests does.

    Raises Refused: names the field, the value and what is accepted.
    """
    options, ranks = cell.benchmark, cell.world_size
    dtype, unit, most = options["dtype"], unit_bytes(options, ranks), largest_bytes(cell)
    least = size_bytes("benchmark.min_bytes", options["min_bytes"])
    field = f"benchmark.min_bytes={options['min_bytes']}"
    if least > most:
        raise Refused(f"{field}: is above benchmark.max_bytes={options['max_bytes']}")
    if least < unit:
        raise Refused(
            f"{field}: {options['collective']} of {dtype} over {ranks} ranks needs "
            f"multiples of {unit} bytes"
        )
    step = 0
    if options["step"] is not None:
        step = size_bytes("benchmark.step", options["step"])
    for name, value in (("min_bytes", least), ("step", step)):
        if value % ELEMENT_BYTES[dtype]:
            accepted = f"a multiple of {ELEMENT_BYTES[dtype]} (bytes of a {dtype})"
            raise Refused(f"benchmark.{name}={options[name]}: expected {accepted}")
    if step and (most - least) // step >= MOST_SIZES:
        element = ELEMENT_BYTES[dtype]
        smallest = ((most - least) // MOST_SIZES // element + 1) * element
        raise Refused(
            f"benchmark.step={options['step']}: gives {(most - least) // step + 1:,} sizes, more "
            f"than {MOST_SIZES}; expected at least {smallest} bytes"
        )
    ascending: dict[int, None] = {}
    size = least
    while size <= most:
        ascending[size // unit * unit] = None
        if step:
            size += step
        else:
            size *= int(options["factor"])
    return list(ascending)


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    options = cell.benchmark
    windows = len(placements(cell)) * (1 + bool(options["percentiles"]))
    iterations = int(options["warmup"]) + int(options["iterations"])
    calls = windows * iterations * int(options["coalesced"])
    rate = BYTES_PER_SECOND[cell.device]
    return calls * sum(CALL_SECONDS[cell.device] + size / rate for size in sizes(cell))


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured. Raises Refused."""
    options = cell.benchmark
    name, root, placement = options["collective"], options["root"], options["placement"]
    op, dtype = options["op"], options["dtype"]
    if not COLLECTIVES[name].reduces and op != "sum":
        names = ", ".join(key for key, collective in COLLECTIVES.items() if collective.reduces)
        raise Refused(f"benchmark.op={op}: {name} reduces nothing; works only with {names}")
    if op == "avg" and "int" in dtype:
        accepted = "works only with floating-point dtypes"
        raise Refused(f"benchmark.op=avg: {dtype} cannot hold a mean; {accepted}")
    if op == "avg" and cell.device == "cpu":
        raise Refused("benchmark.op=avg: works on GPUs only, gloo has sum, prod, min and max")
    if root and not COLLECTIVES[name].rooted:
        raise Refused(f"benchmark.root={root}: {name} has no root; leave it out")
    if root >= cell.world_size:
        raise Refused(f"benchmark.root={root}: expected a rank, 0 to {cell.world_size - 1}")
    measured = placements(cell)
    if not measured:
        possible, where = "in", "in place"
        if placement == "in":
            possible, where = "out", "out of place"
        raise Refused(
            f"benchmark.placement={placement}: {name} with benchmark.calls={options['calls']} is "
            f"measured {where} only; expected {possible} (or both, which then means {possible})"
        )
    calls, coalesced = options["calls"], options["coalesced"]
    if cell.device == "cpu":
        where = "works on GPUs only; leave it out on CPU workers"
        if calls == "nccl":
            raise Refused(f"benchmark.calls=nccl: {where}")
        if options["cuda_graph"]:
            raise Refused(f"benchmark.cuda_graph=true: {where}")
        if "memory" in options:
            raise Refused(f"benchmark.memory={options['memory']}: {where}")
    if calls == "torch" and cell.world_size == 1 and name == "send_recv":
        why = "one rank has no other to send to; expected two or more"
        raise Refused(f"benchmark.collective=send_recv: {why}")
    if calls == "torch" and coalesced > 1 and name not in COALESCED:
        raise Refused(
            f"benchmark.coalesced={coalesced}: torch.distributed coalesces only "
            f"{', '.join(COALESCED)}; for {name} write benchmark.calls=nccl"
        )
    sizes(cell)
    buffers = 1 if measured == ("in_place",) else 2
    needed = buffers * largest_bytes(cell) + OWN_BYTES[cell.device]
    refuse_too_large(cell, needed, f"benchmark.max_bytes={cell.benchmark['max_bytes']}", room)
