"""The collectives as nccl-tests counts them: factor from algbw to busbw, bytes of an element.

Needs no torch: the readers of nccl-tests use it too. Source: nccl-tests, doc/PERFORMANCE.md and its
`*GetBw` functions.
"""

from dataclasses import dataclass


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
