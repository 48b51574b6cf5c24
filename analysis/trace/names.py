"""The meaning of names in a trace: NCCL's kernels, gloo's calls, copies, step ranges, marks that name the rank.

A kernel is NCCL's if its name begins with `nccl`: the rule of NVIDIA's own report nccl_gpu_overlap_trace. The name
says the collective, but not the algorithm or protocol: its suffix is that of the inlined body, not of what ran. A group
of calls in one kernel carries the name of one of them.
"""

import re

# Longest first: AllReduce and ReduceScatter contain Reduce.
_COLLECTIVES: tuple[str, ...] = (
    "AllReduce",
    "ReduceScatter",
    "AllGather",
    "AllToAll",
    "Broadcast",
    "SendRecv",
)
_COLLECTIVES += ("Scatter", "Gather", "Reduce", "Generic")
_NCCL = re.compile(r"(?:void )?nccl\w*", re.IGNORECASE)
_COPY = re.compile(r"memcpy (\w+)", re.IGNORECASE)
_STEP = re.compile(r"step(?:[ _:#/-]?\d+)?", re.IGNORECASE)
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")  # torch.profiler's own, made by its step()
_RANK = re.compile(r"rank[ _:=]?(\d{1,6})", re.IGNORECASE)

# CUPTI's memcpy kinds, as nsys stores them in copyKind.
COPY_KINDS = {
    0: "Unknown",
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
    11: "UVM HtoD",
    12: "UVM DtoH",
    13: "UVM DtoD",
}


def nccl_collective(kernel: str) -> str | None:
    """Return the collective of an NCCL kernel, such as "AllReduce"; "other" if its name says none; None: not NCCL's."""
    head = _NCCL.match(kernel)
    if head is None:
        return None
    lowered = head[0].lower()
    return next((name for name in _COLLECTIVES if name.lower() in lowered), "other")


def gloo_collective(call: str) -> str | None:
    """Return "AllReduce" for `gloo:all_reduce`; None for names that are not gloo's."""
    prefix, colon, rest = call.partition(":")
    return (
        "".join(word.capitalize() for word in rest.split("_"))
        if colon and prefix == "gloo"
        else None
    )


def copy_kind(activity: str) -> str:
    """Return "HtoD" for Kineto's `Memcpy HtoD (Pinned -> Device)`; an unknown name is its own kind."""
    found = _COPY.match(activity)
    return found[1] if found else activity


def is_step(name: str) -> bool:
    """Tell whether a range is one training step: `step`, `step 7`, `step#7`."""
    return _STEP.fullmatch(name) is not None


def is_profiler_step(name: str) -> bool:
    """Tell whether torch.profiler's `step()` made a range: used if no range is named step."""
    return _PROFILER_STEP.fullmatch(name) is not None


def rank_mark(name: str) -> int | None:
    """Return the rank that a mark or range like `rank 3` announces for its process; None for other names."""
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None
