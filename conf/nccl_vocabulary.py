"""NCCL's own words: distances, algorithms, protocols, and the functions that its settings name.

Source: NCCL's release tags 2.4 to 2.30 (paths.cc, tuning.cc). How nccl-tests counts collectives: benchmarks/collectives/busbw.py.
"""

import re
from collections.abc import Mapping

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
