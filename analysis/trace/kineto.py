"""Read ranks from the Chrome trace JSON that torch.profiler (Kineto) exports, one file per rank.

Times are microseconds with a fraction, counted from `baseTimeNanoseconds` if the file has it, else
from the epoch. On one host they share a clock. GPU events carry device, stream and correlation in
`args`; NCCL's kernels also their process group. Without GPU events the rank runs on the host:
gloo's calls (`gloo:all_reduce`, made on gloo's own threads) communicate, operators compute.
Sources: Kineto's output_json.cpp, traces of torch 2.0 to 2.15.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
    unknown,
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
# Operators that only start, await or wrap others: c10d's calls return at once, engine and region
# frames include waits.
_NOT_WORK = (
    "c10d::",
    "_c10d_functional",
    "autograd::",
    "torch::autograd::",
    "torch.distributed",
    "Torch-Compiled",
    "CompiledF",
    "## ",
    "DistributedDataParallel",
)
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_LATEST = 2**61 / 1000  # µs; base, start and length together fit into 64 bits of ns

JsonEvent = dict[str, Any]


def read_kineto(file: str, text: str, names: Names) -> TraceFile:
    """Return the rank of one file; several, if one process drives several GPUs.

    Raises:
        UnreadableInput: the text is cut, is not a trace, or has neither GPU kernels nor operators.
    """
    with gc_paused():
        content = _parse(text)
        events, lost = _events_by_kind(content["traceEvents"])
        base_ns = content.get("baseTimeNanoseconds", 0)
        if not isinstance(base_ns, int) or not 0 <= base_ns < 2**61:
            base_ns = 0
        notes = [f"{file}: {lost} events without a usable time left out"] if lost else []
        ranges = _host_events(events["range"], base_ns, names)
        gloo = _gloo_calls(events["range"], ranges, names)
        if events["kernel"]:
            ranks = _gpu_ranks(file, events, base_ns, names, ranges, gloo, notes)
        elif events["operator"] or len(gloo):
            ranks = [_host_rank(events["operator"], base_ns, names, ranges, gloo)]
        else:
            raise UnreadableInput(
                "a Chrome trace without GPU kernels and operators: empty, or not from "
                "torch.profiler"
            )
    rank, world_size = _rank_and_world_size(file, content)
    if rank is None:
        notes.append(f"{file} does not say its rank")
    numbered = []
    for offset, rank_trace in enumerate(ranks):
        numbered.append(replace(rank_trace, rank=(rank or 0) + offset))
    host = content.get("host_name")
    clock = f"host {host}" if isinstance(host, str) else None
    is_numbered = rank is not None
    return TraceFile(
        file, "torch.profiler", tuple(numbered), clock, is_numbered, world_size, tuple(notes)
    )


def _parse(text: str) -> JsonEvent:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            f"cut or damaged JSON ({error}): did the profiler end before it had written?"
        ) from None
    if isinstance(content, list):  # the other form of the Chrome trace format
        return {"traceEvents": content}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UnreadableInput("JSON without a list `traceEvents`: not a trace of torch.profiler")
    return content


def _rank_and_world_size(file: str, content: JsonEvent) -> tuple[int | None, int | None]:
    """Return what the trace says of its rank; the rank else from the file's name."""
    info = content.get("distributedInfo")
    if not isinstance(info, dict):
        info = {}
    rank, world_size = info.get("rank"), info.get("world_size")
    name = _RANK_IN_NAME.search(file)
    if "rank" not in info and name:
        rank = int(name[1])
    return (
        rank if isinstance(rank, int) else None,
        world_size if isinstance(world_size, int) else None,
    )


def _events_by_kind(events: Sequence[Any]) -> tuple[dict[str, list[JsonEvent]], int]:
    """Return the complete events by kind, and the number of those without a usable time."""
    kinds: dict[str, list[JsonEvent]] = {kind: [] for kind in _CATEGORIES.values()}
    lost = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = _CATEGORIES.get(str(event.get("cat")).lower())
        if kind is None:
            continue
        usable = isinstance(event.get("name"), str)
        for time_us in (event.get("ts"), event.get("dur")):
            # NaN fails every comparison
            usable &= isinstance(time_us, int | float) and 0 <= time_us < _LATEST
        if usable:
            kinds[kind].append(event)
        else:
            lost += 1
    return kinds, lost


# --- ranks ----------------------------------------------------------------------------------------


def _gpu_ranks(
    file: str,
    events: Mapping[str, list[JsonEvent]],
    base_ns: int,
    names: Names,
    ranges: Events,
    gloo: Collectives,
    notes: list[str],
) -> list[RankTrace]:
    """Return one rank per device with NCCL kernels; without NCCL, one per device with kernels."""
    launches = _launch_times(events["launch"], base_ns)
    kernels, copied, memsets = (
        _gpu_events(events[kind], base_ns, names, launches)
        for kind in ("kernel", "memcpy", "memset")
    )
    kernel_devices, copy_devices, memset_devices = (
        column([_device(event) for event in events[kind]])
        for kind in ("kernel", "memcpy", "memset")
    )
    collectives = _nccl_calls(events["kernel"], kernels, names)
    copies = _copies(events["memcpy"], copied, names)
    is_nccl = collectives.label >= 0
    has_nccl = bool(is_nccl.any())
    devices = np.unique(kernel_devices[is_nccl] if has_nccl else kernel_devices).tolist()
    stray = int((~np.isin(kernel_devices, devices)).sum())
    if stray:
        notes.append(
            f"{file}: {stray} kernels on another device than the rank's, without NCCL: not counted"
        )
    if len(gloo):
        use = "counted as communication: no NCCL kernel"
        if has_nccl:
            use = "not counted: NCCL's kernels are"
        notes.append(f"{file}: {len(gloo)} calls of gloo on the host, {use}")
    ranks = []
    for device in devices:
        here = kernel_devices == device
        ranks.append(
            RankTrace(
                0,
                device,
                kernels.where(here & ~is_nccl),
                collectives.where(here & is_nccl) if has_nccl else gloo,
                copies.where(copy_devices == device),
                memsets.where(memset_devices == device),
                ranges,
            )
        )
    return ranks


def _host_rank(
    operators: Sequence[JsonEvent], base_ns: int, names: Names, ranges: Events, gloo: Collectives
) -> RankTrace:
    """Return a rank whose operators compute, but those inside a call of gloo on its own thread."""
    work = [event for event in operators if not event["name"].startswith(_NOT_WORK)]
    compute = _host_events(work, base_ns, names)
    inside = np.zeros(len(compute), dtype=np.bool_)
    for thread in np.unique(gloo.lane):
        calls = union(gloo.where(gloo.lane == thread).spans)
        inside |= (compute.lane == thread) & covers(calls, compute.start)
    compute = compute.where(~inside)
    return RankTrace(0, None, compute, gloo, Copies.empty(), Events.empty(), ranges, on_host=True)


# --- columns --------------------------------------------------------------------------------------


def _gloo_calls(events: Sequence[JsonEvent], ranges: Events, names: Names) -> Collectives:
    labels = [names.number_or_none(gloo_collective(event["name"])) for event in events]
    calls = Collectives(**vars(ranges), label=column(labels), communicator=unknown(len(labels)))
    return calls.where(calls.label >= 0)


def _nccl_calls(events: Sequence[JsonEvent], kernels: Events, names: Names) -> Collectives:
    """Return all kernels as collectives, with label -1 for those that are not NCCL's."""
    label_of = {}
    for name in np.unique(kernels.name).tolist():
        label_of[name] = names.number_or_none(nccl_collective(names.table[name]))
    labels, communicators = [], []
    for event, name in zip(events, kernels.name.tolist(), strict=True):
        label = label_of[name]
        labels.append(label)
        communicators.append(-1 if label < 0 else names.number_or_none(_process_group(event)))
    return Collectives(**vars(kernels), label=column(labels), communicator=column(communicators))


def _copies(events: Sequence[JsonEvent], copied: Events, names: Names) -> Copies:
    kinds = column([names.number(copy_kind(event["name"])) for event in events])
    sizes = column([_argument(event, "bytes") for event in events])
    is_peer = kinds == names.number("PtoP")
    return Copies(**vars(replace(copied, name=kinds)), bytes=sizes, peer=is_peer)


def _host_events(events: Sequence[JsonEvent], base_ns: int, names: Names) -> Events:
    lanes = [_integer(event.get("tid")) for event in events]
    return _events(events, base_ns, names, lanes, unknown(len(events)))


def _gpu_events(
    events: Sequence[JsonEvent], base_ns: int, names: Names, launches: Mapping[int, int]
) -> Events:
    lanes, launched = [], []
    for event in events:
        stream = _argument(event, "stream")
        lanes.append(stream if stream >= 0 else _integer(event.get("tid")))
        launched.append(launches.get(_argument(event, "correlation"), -1))
    return _events(events, base_ns, names, lanes, column(launched))


def _events(
    events: Sequence[JsonEvent], base_ns: int, names: Names, lanes: Sequence[int], launched: Times
) -> Events:
    start = base_ns + _ns([event["ts"] for event in events])
    end = start + _ns([event["dur"] for event in events])
    numbers = column([names.number(event["name"]) for event in events])
    return Events(start, end, column(lanes), numbers, launched)


def _ns(times_us: Sequence[float]) -> Times:
    """Convert to ns. Whole µs are exact in a float; multiplied by 1000 they would not be."""
    exact: NDArray[np.float64] = np.array(times_us, dtype=np.float64)
    whole = np.floor(exact)
    fraction_ns = np.rint((exact - whole) * 1000)
    return column(whole.astype(np.int64) * 1000 + fraction_ns.astype(np.int64))


def _launch_times(events: Sequence[JsonEvent], base_ns: int) -> dict[int, int]:
    """Return {correlation: host time of the call in ns}; of several calls the first.

    A call into the runtime calls the driver.
    """
    starts = base_ns + _ns([event["ts"] for event in events])
    launches: dict[int, int] = {}
    for event, start in zip(events, starts.tolist(), strict=True):
        correlation = _argument(event, "correlation")
        if correlation > 0:
            launches[correlation] = min(start, launches.get(correlation, start))
    return launches


def _process_group(event: JsonEvent) -> str | None:
    """Return the process group of an NCCL kernel (from torch 2.3), with its ranks (from 2.4)."""
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return None
    name, ranks = arguments.get("Process Group Name"), arguments.get("Process Group Ranks")
    if name is None or name == "":
        return None
    return " ".join(str(value) for value in (name, ranks) if value)


def _device(event: JsonEvent) -> int:
    device = _argument(event, "device")
    return device if device >= 0 else _integer(event.get("pid"))


def _argument(event: JsonEvent, key: str) -> int:
    """Return an integer of the event's `args`, -1 if there is none."""
    arguments = event.get("args")
    value = arguments.get(key) if isinstance(arguments, dict) else None
    return value if isinstance(value, int) and 0 <= value < 2**62 else -1


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 2**62 else -1
