"""NCCL's own words: distances, algorithms, protocols, collectives, element types, and the busbw factor of each collective.

Sources: NCCL's release tags 2.4 to 2.30 (paths.cc, tuning.cc), nccl-tests' doc/PERFORMANCE.md and its `*GetBw` functions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Distances between two devices, near to far (2.30; earlier releases lack some words).
DISTANCES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
# The distances that NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL accept in every release.
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
# A level's legacy number is its place here; larger numbers mean SYS (paths.cc).
_LEGACY_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")

# In the order of their numbers in TUNING lines of 2.20 to 2.23.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
# The functions that NCCL_ALGO and NCCL_PROTO can name.
FUNCTIONS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
# The algorithms that NCCL has for a function (tuning.cc); where a value allows none of them, older releases take Ring.
AVAILABLE: Mapping[str, frozenset[str]] = {
    "Broadcast": frozenset({"Ring"}),
    "Reduce": frozenset({"Ring"}),
    "AllGather": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "ReduceScatter": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "AllReduce": frozenset({"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"}),
}


class UnknownWord(ValueError):
    """A word of NCCL_ALGO or NCCL_PROTO that NCCL does not know; `is_function` where it stands for a function."""

    def __init__(self, message: str, word: str, is_function: bool) -> None:
        super().__init__(message)
        self.word, self.is_function = word, is_function


def level_word(value: str) -> str:
    """Return NCCL's word for a level; a legacy number as NCCL translates it (0 LOC, 1 PIX, 2 PXB, 3 PHB, 4 and more SYS)."""
    number = re.match(r"[0-9]{1,9}", value)
    return _LEGACY_LEVELS[min(int(number[0]), len(_LEGACY_LEVELS) - 1)] if number else value


def legacy_number(word: str) -> int | None:
    """Return the number that older documents use for a level; None where it has none."""
    return _LEGACY_LEVELS.index(word) if word in _LEGACY_LEVELS else None


def allowed(value: str, names: tuple[str, ...]) -> dict[str, set[str]]:
    """Return what NCCL_ALGO or NCCL_PROTO leaves to each function: {function: words of `names`}.

    Reads NCCL's grammar, `[function:][^]word,word[;function:…]`, words in any case (per function from 2.24). Later parts
    overwrite earlier ones. A part without a function is for all.

    Raises:
        UnknownWord: NCCL does not know a word; it would ignore it silently.
    """
    known = {name.lower(): name for name in names}
    functions = {name.lower(): name for name in FUNCTIONS}
    result = {name: set(names) for name in FUNCTIONS}
    for part in filter(None, value.split(";")):
        prefix, colon, rest = part.rpartition(":")
        if colon and prefix.lower() not in functions:
            raise UnknownWord(f"{part!r}: {prefix!r} is none of {', '.join(FUNCTIONS)}", prefix, True)
        words = rest.removeprefix("^").split(",")
        if unknown := [word for word in words if word.lower() not in known]:
            raise UnknownWord(f"{part!r}: expected a list of {', '.join(names)}", unknown[0], False)
        chosen = {known[word.lower()] for word in words}
        chosen = set(names) - chosen if rest.startswith("^") else chosen
        for function in [functions[prefix.lower()]] if colon else FUNCTIONS:
            result[function] = set(chosen)
    return result


@dataclass(frozen=True)
class Collective:
    """One collective as nccl-tests counts it: algbw = S ÷ time, busbw = algbw × factor(n) over n ranks."""

    program: str  # of nccl-tests, without _perf
    trips: int = 0  # factor(n) is this many times (n − 1) ÷ n; 0: the factor is 1
    shares: bool = False  # S is n shares, one for each rank; else S is what every rank holds
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True  # whether its result can lie where its input was
    overwrites: bool = False  # torch.distributed has only the form in place

    def factor(self, ranks: int) -> float:
        """Return busbw ÷ algbw over a number of ranks."""
        return self.trips * (ranks - 1) / ranks if self.trips else 1.0


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
ELEMENT_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
# The same by the names that nccl-tests prints.
NCCL_TESTS_ELEMENT_BYTES = {
    "int8": 1, "char": 1, "uint8": 1, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "half": 2, "bfloat16": 2, "int32": 4, "int": 4, "uint32": 4, "float": 4,
    "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
