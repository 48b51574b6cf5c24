"""The meaning of names in a trace: NCCL's kernels, gloo's calls, steps, rank marks.

A kernel is NCCL's if its name begins with `nccl`: the rule of NVIDIA's own report
nccl_gpu_overlap_trace. The name says the collective, but not the algorithm or protocol: its suffix
is that of the inlined body, not of what ran. A group of calls in one kernel carries the name of one
of them.
"""

import re

import numpy as np

from analysis.trace.events import Events, Names, number_of
from analysis.trace.time_sets import Flags

# Longest first: AllReduce and ReduceScatter contain Reduce.
_COLLECTIVES = (
    *("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "SendRecv", "Scatter"),
    *("Gather", "Reduce", "Generic"),
)
_NCCL = re.compile(r"(?:void )?nccl\w*", re.IGNORECASE)
_STEP = re.compile(r"step(?:[ _:#/-]?\d+)?", re.IGNORECASE)
_RANK = re.compile(r"rank[ _:=]?(\d{1,6})", re.IGNORECASE)


def nccl_collective(kernel: str) -> str | None:
    """Return the collective of an NCCL kernel, such as "AllReduce"; None: not NCCL's.

    It is "other" if the kernel's name says none.
    """
    head = _NCCL.match(kernel)
    if head is None:
        return None
    for name in _COLLECTIVES:
        if name.lower() in head[0].lower():
            return name
    return "other"


def gloo_collective(call: str) -> str | None:
    """Return "AllReduce" for `gloo:all_reduce`; None for names that are not gloo's."""
    if not call.startswith("gloo:"):
        return None
    return call.removeprefix("gloo:").replace("_", " ").title().replace(" ", "")


def is_step(name: str) -> bool:
    """Tell whether a range is one training step: `step`, `step 7`, `step#7`."""
    return _STEP.fullmatch(name) is not None


def rank_mark(name: str) -> int | None:
    """Return the rank that a mark or range like `rank 3` announces for its process, else None."""
    match = _RANK.fullmatch(name)
    if match is None:
        return None
    return int(match[1])


def split_nccl(kernels: Events, names: Names) -> tuple[Events, Flags]:
    """Return the kernels under the names of their collectives, and which are NCCL's."""
    collectives = kernels.copy()
    is_nccl: Flags = np.zeros(len(kernels), np.bool_)
    texts = list(names)
    for name_id in np.unique(kernels["name"]).tolist():
        collective = nccl_collective(texts[name_id])
        if collective is not None:
            mine = kernels["name"] == name_id
            is_nccl |= mine
            collectives["name"][mine] = number_of(collective, names)
    return collectives, is_nccl
