"""Read ranks from the Chrome trace JSON that torch.profiler (Kineto) exports, one file per rank.

Times are microseconds with a fraction, counted from `baseTimeNanoseconds` if the file has it, else from the epoch. On
one host they share a clock. GPU events carry device, stream and correlation in `args`; NCCL's kernels also their process
group. Without GPU events the rank runs on the host: gloo's calls (`gloo:all_reduce`, made on gloo's own threads)
communicate, operators compute. Sources: Kineto's output_json.cpp, traces of torch 2.0 to 2.15.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.errors import UnreadableInput
from analysis.gc_pause import gc_paused
from analysis.trace.intervals import Times, covers, union
from analysis.trace.model import (
    Collectives,
    Copies,
    Events,
    Names,
    RankTrace,
    TraceFile,
    column,
    no_copies,
    no_events,
)
from analysis.trace.names import copy_kind, gloo_collective, nccl_collective

_CATEGORIES = {  # category, by its newer name and the names of torch 1.8 to 1.11
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "runtime": "launch",
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "range",
}
# Operators that only start, await or wrap others: c10d's calls return at once, engine and region frames include waits.
_NOT_WORK: tuple[str, ...] = (
    "c10d::",
    "_c10d_functional",
    "autograd::",
    "torch::autograd::",
    "torch.distributed",
    "Torch-Compiled",
)
_NOT_WORK += ("CompiledF", "## ", "DistributedDataParallel")
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_LATEST = 2**61 / 1000  # µs; base, start and length together fit into 64 bits of ns
_ON_GPU = ("kernel", "memcpy", "memset")

JsonEvent = dict[str, Any]


def is_kineto(text: str) -> bool:
    """Tell whether JSON text looks like a Chrome trace."""
    return '"traceEvents"' in text


def read_kineto(file: str, text: str, names: Names) -> TraceFile:
    """Read the rank of one file; several, if one process drives several GPUs.

    Raises UnreadableInput for text that is cut, is not a trace, or has neither GPU kernels nor operators.
    """
    with gc_paused():
        return _read(file, _parse(text), names)


def _read(file: str, whole: JsonEvent, names: Names) -> TraceFile:
    found, lost = _sort(whole["traceEvents"])
    base = whole.get("baseTimeNanoseconds", 0)
    base = base if isinstance(base, int) and 0 <= base < 2**61 else 0
    notes = [f"{file}: {lost} events without a usable time left out"] if lost else []
    ranges = _events(found["range"], base, names, _thread)
    gloo = _gloo(found["range"], ranges, names)
    if found["kernel"]:
        ranks = _gpu_ranks(file, found, base, names, ranges, gloo, notes)
    elif found["operator"] or len(gloo):
        ranks = [_host_rank(found["operator"], base, names, ranges, gloo)]
    else:
        raise UnreadableInput(
            "a Chrome trace without GPU kernels and operators: empty, or not from torch.profiler"
        )
    info = whole.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    in_name = _RANK_IN_NAME.search(file)
    rank = info.get("rank", int(in_name[1]) if in_name else None)
    rank, size = (
        value if isinstance(value, int) else None for value in (rank, info.get("world_size"))
    )
    if rank is None:
        notes.append(f"{file} does not say its rank")
    host = whole.get("host_name")
    return TraceFile(
        file,
        "torch.profiler",
        tuple(replace(one, rank=(rank or 0) + at) for at, one in enumerate(ranks)),
        f"host {host}" if isinstance(host, str) else None,
        rank is not None,
        size,
        tuple(notes),
    )


def _parse(text: str) -> JsonEvent:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            f"cut or damaged JSON ({error}): did the profiler end before it had written?"
        ) from None
    if isinstance(whole, list):  # the other form of the Chrome trace format
        whole = {"traceEvents": whole}
    if not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list):
        raise UnreadableInput("JSON without a list `traceEvents`: not a trace of torch.profiler")
    return whole


def _sort(events: Iterable[Any]) -> tuple[dict[str, list[JsonEvent]], int]:
    """Sort complete events by kind; count those without a usable time."""
    found: dict[str, list[JsonEvent]] = {kind: [] for kind in _CATEGORIES.values()}
    lost = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = _CATEGORIES.get(str(event.get("cat")).lower())
        if kind is None:
            continue
        name, times = event.get("name"), (event.get("ts"), event.get("dur"))
        # NaN fails every comparison
        usable = all(isinstance(time, int | float) and 0 <= time < _LATEST for time in times)
        if usable and isinstance(name, str):
            found[kind].append(event)
        else:
            lost += 1
    return found, lost


def _gpu_ranks(
    file: str,
    found: dict[str, list[JsonEvent]],
    base: int,
    names: Names,
    ranges: Events,
    gloo: Collectives,
    notes: list[str],
) -> list[RankTrace]:
    """Make one rank per device with NCCL kernels; without NCCL, one per device with kernels."""
    launches = _launches(found["launch"], base)
    kernels, copied, sets = (
        replace(_events(found[kind], base, names, _stream), launch=_launched(found[kind], launches))
        for kind in _ON_GPU
    )
    labels = {
        name: _number(nccl_collective(names.table[name]), names)
        for name in set(kernels.name.tolist())
    }
    label = column([labels[name] for name in kernels.name.tolist()])
    group = column(
        [
            _number(_group(event), names) if said >= 0 else -1
            for event, said in _both(found["kernel"], label)
        ]
    )
    kinds = column([names.number(copy_kind(event["name"])) for event in found["memcpy"]])
    size = column([_whole(event, "bytes") for event in found["memcpy"]])
    peer = kinds == names.number("PtoP")
    devices, of_copies, of_sets = (
        column([_device(event) for event in found[kind]]) for kind in _ON_GPU
    )
    nccl = label >= 0
    chosen = np.unique(devices[nccl] if nccl.any() else devices).tolist()
    stray = int((~np.isin(devices, chosen)).sum())
    if stray:
        notes.append(
            f"{file}: {stray} kernels on another device than the rank's, without NCCL: not counted"
        )
    if len(gloo):
        both = (
            "not counted: NCCL's kernels are"
            if nccl.any()
            else "counted as communication: no NCCL kernel"
        )
        notes.append(f"{file}: {len(gloo)} calls of gloo on the host, {both}")
    ranks = []
    for device in chosen:
        here = devices == device
        calls = Collectives(
            **vars(kernels.where(here & nccl)),
            label=label[here & nccl],
            communicator=group[here & nccl],
        )
        copies = Copies(**vars(replace(copied, name=kinds)), bytes=size, peer=peer).where(
            of_copies == device
        )
        ranks.append(
            RankTrace(
                0,
                int(device),
                kernels.where(here & ~nccl),
                calls if nccl.any() else gloo,
                copies,
                sets.where(of_sets == device),
                ranges,
            )
        )
    return ranks


def _host_rank(
    operators: list[JsonEvent], base: int, names: Names, ranges: Events, gloo: Collectives
) -> RankTrace:
    """Make a rank whose operators compute, except those inside a call of gloo on its own thread."""
    work = _events(
        [one for one in operators if not one["name"].startswith(_NOT_WORK)], base, names, _thread
    )
    inside = np.zeros(len(work), dtype=np.bool_)
    for thread in np.unique(gloo.lane):
        inside |= (work.lane == thread) & covers(
            union(gloo.where(gloo.lane == thread).spans), work.start
        )
    return RankTrace(
        0, None, work.where(~inside), gloo, no_copies(), no_events(), ranges, on_host=True
    )


def _gloo(events: list[JsonEvent], ranges: Events, names: Names) -> Collectives:
    label = column([_number(gloo_collective(event["name"]), names) for event in events])
    whole = Collectives(**vars(ranges), label=label, communicator=np.full(len(label), -1))
    return whole.where(label >= 0)


def _events(
    events: list[JsonEvent], base: int, names: Names, lane: Callable[[JsonEvent], int]
) -> Events:
    start = np.array([event["ts"] for event in events], dtype=np.float64)
    length = np.array([event["dur"] for event in events], dtype=np.float64)
    begin = base + _ns(start)
    name = column([names.number(event["name"]) for event in events])
    unknown = np.full(len(events), -1)
    return Events(
        begin, begin + _ns(length), column([lane(event) for event in events]), name, unknown
    )


def _ns(microseconds: NDArray[np.float64]) -> Times:
    """Convert to ns. Whole microseconds are exact in a float; multiplied by 1000 they would not be."""
    whole = np.floor(microseconds)
    fraction: Times = np.rint((microseconds - whole) * 1000).astype(np.int64)
    return whole.astype(np.int64) * 1000 + fraction


def _launches(events: list[JsonEvent], base: int) -> dict[int, int]:
    """Map correlations to the host time of the call, ns; of several calls (runtime and driver) the first."""
    begin = base + _ns(np.array([event["ts"] for event in events], dtype=np.float64))
    found: dict[int, int] = {}
    for event, start in _both(events, begin):
        correlation = _whole(event, "correlation")
        if correlation > 0:
            found[correlation] = min(start, found.get(correlation, start))
    return found


def _launched(events: list[JsonEvent], launches: dict[int, int]) -> Times:
    return column([launches.get(_whole(event, "correlation"), -1) for event in events])


def _both(events: list[JsonEvent], numbers: Times) -> Iterable[tuple[JsonEvent, int]]:
    return zip(events, numbers.tolist(), strict=True)


def _number(name: str | None, names: Names) -> int:
    return -1 if name is None else names.number(name)


def _group(event: JsonEvent) -> str | None:
    """Return the process group of an NCCL kernel (from torch 2.3), with its ranks if the trace has them (2.4)."""
    args = event.get("args")
    if not isinstance(args, dict) or args.get("Process Group Name") in (None, ""):
        return None
    return " ".join(
        str(args[one]) for one in ("Process Group Name", "Process Group Ranks") if args.get(one)
    )


def _whole(event: JsonEvent, field: str) -> int:
    args = event.get("args")
    value = args.get(field) if isinstance(args, dict) else None
    return value if isinstance(value, int) and 0 <= value < 2**62 else -1


def _device(event: JsonEvent) -> int:
    said = _whole(event, "device")
    return said if said >= 0 else _lane(event.get("pid"))


def _stream(event: JsonEvent) -> int:
    said = _whole(event, "stream")
    return said if said >= 0 else _lane(event.get("tid"))


def _thread(event: JsonEvent) -> int:
    return _lane(event.get("tid"))


def _lane(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 2**62 else -1
