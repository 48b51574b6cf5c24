"""The meaning of names in a trace: NCCL's kernels, gloo's calls, copies, step ranges, rank marks.

A kernel is NCCL's if its name begins with `nccl`: the rule of NVIDIA's own report
nccl_gpu_overlap_trace. The name says the collective, but not the algorithm or protocol: its suffix
is that of the inlined body, not of what ran. A group of calls in one kernel carries the name of one
of them.
"""

import re

# Longest first: AllReduce and ReduceScatter contain Reduce.
_COLLECTIVES = (
    "AllReduce",
    "ReduceScatter",
    "AllGather",
    "AllToAll",
    "Broadcast",
    "SendRecv",
    "Scatter",
    "Gather",
    "Reduce",
    "Generic",
)
_NCCL = re.compile(r"(?:void )?nccl\w*", re.IGNORECASE)
_COPY = re.compile(r"memcpy (\w+)", re.IGNORECASE)
_STEP = re.compile(r"step(?:[ _:#/-]?\d+)?", re.IGNORECASE)
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")  # torch.profiler's own, made by its step()
_RANK = re.compile(r"rank[ _:=]?(\d{1,6})", re.IGNORECASE)

# CUPTI's memcpy kinds, as nsys stores them in copyKind, by their number.
COPY_KINDS = (
    "Unknown",
    "HtoD",
    "DtoH",
    "HtoA",
    "AtoH",
    "AtoA",
    "AtoD",
    "DtoA",
    "DtoD",
    "HtoH",
    "PtoP",
    "UVM HtoD",
    "UVM DtoH",
    "UVM DtoD",
)


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
    words = call.removeprefix("gloo:").split("_")
    return "".join(word.capitalize() for word in words)


def copy_kind(activity: str) -> str:
    """Return "HtoD" for Kineto's `Memcpy HtoD (Pinned -> Device)`, else the name itself."""
    match = _COPY.match(activity)
    return match[1] if match else activity


def is_step(name: str) -> bool:
    """Tell whether a range is one training step: `step`, `step 7`, `step#7`."""
    return _STEP.fullmatch(name) is not None


def is_profiler_step(name: str) -> bool:
    """Tell whether torch.profiler's `step()` made a range: used if no range is named step."""
    return _PROFILER_STEP.fullmatch(name) is not None


def rank_mark(name: str) -> int | None:
    """Return the rank that a mark or range like `rank 3` announces for its process, else None."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None
