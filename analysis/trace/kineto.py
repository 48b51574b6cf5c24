"""Read a rank from the Chrome trace JSON that torch.profiler (Kineto) exports, one file per rank.

Times are microseconds with a fraction, counted from `baseTimeNanoseconds` if the file has it, else
from the epoch. On one host they share a clock. GPU events carry device, stream and correlation in
`args`; NCCL's kernels also their process group. Without GPU events the rank runs on the host:
gloo's calls (`gloo:all_reduce`, made on gloo's own threads) communicate, operators compute.
Sources: Kineto's output_json.cpp, traces of torch 2.0 to 2.15.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.input_files import UnreadableInput, gc_paused
from analysis.trace.events import (
    Events,
    Names,
    RankTrace,
    Times,
    Trace,
    covers,
    make_events,
    number_of,
    spans,
    split_nccl,
    union,
)

_CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "cpu_op": "operator",
    "user_annotation": "range",
}
# Operators that only start, await or wrap others: c10d's calls return at once, engine and region
# frames include waits.
_NOT_WORK = (
    *("c10d::", "_c10d_functional", "autograd::", "torch::autograd::", "torch.distributed"),
    *("Torch-Compiled", "CompiledF", "## ", "DistributedDataParallel"),
)
_GLOO = "gloo:"
_COPY = re.compile(r"memcpy (\w+)", re.IGNORECASE)  # "HtoD" of `Memcpy HtoD (Pinned -> Device)`
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_LATEST = 2**61 / 1000  # µs; base, start and length together fit into 64 bits of ns

JsonEvent = dict[str, Any]  # of a category above, with name, times and a dict `args`


def read_kineto(file: str, text: str, names: Names) -> Trace:
    """Return the rank of one file.

    Raises UnreadableInput: the text is cut, is not a trace, or has neither GPU kernels nor
    operators.
    """
    with gc_paused():
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnreadableInput(
                f"cut or damaged JSON ({error}): did the profiler end before it had written?"
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
            raise UnreadableInput(
                "JSON without a list `traceEvents`: not a trace of torch.profiler"
            )
        reader = _KinetoReader(file, content, names)
        rank, world_size = reader.rank_and_world_size()
        if reader.events["kernel"]:
            rank_trace = reader.gpu_rank(rank or 0)
        elif reader.events["operator"] or len(reader.gloo):
            rank_trace = reader.host_rank(rank or 0)
        else:
            raise UnreadableInput(
                "a Chrome trace without GPU kernels and operators: empty, or not from "
                "torch.profiler"
            )
    clock = None
    if isinstance(content.get("host_name"), str):
        clock = f"host {content['host_name']}"
    return Trace(
        "torch.profiler",
        list(names),
        (rank_trace,),
        clock,
        numbered=rank is not None,
        world_size=world_size,
        notes=tuple(reader.notes),
    )


class _KinetoReader:
    def __init__(self, file: str, content: dict[str, Any], names: Names) -> None:
        self.file, self.content, self.names = file, content, names
        self.notes: list[str] = []
        self.base_ns = content.get("baseTimeNanoseconds", 0)
        if not isinstance(self.base_ns, int) or not 0 <= self.base_ns < 2**61:
            self.base_ns = 0
        self.events: dict[str, list[JsonEvent]] = {kind: [] for kind in _CATEGORIES.values()}
        lost = 0
        for event in content["traceEvents"]:
            if not isinstance(event, dict) or event.get("ph") != "X":
                continue
            kind = _CATEGORIES.get(str(event.get("cat")))
            if kind is None:
                continue
            usable = isinstance(event.get("name"), str)
            for time_us in (event.get("ts"), event.get("dur")):
                # NaN fails every comparison
                usable &= isinstance(time_us, int | float) and 0 <= time_us < _LATEST
            if not usable:
                lost += 1
                continue
            if not isinstance(event.get("args"), dict):
                event["args"] = {}
            self.events[kind].append(event)
        if lost:
            self.notes.append(f"{file}: {lost} events without a usable time left out")
        calls, labels = [], []
        for event in self.events["range"]:
            call = event["name"]
            if call.startswith(_GLOO):  # gloo:all_reduce is AllReduce
                calls.append(event)
                label = call.removeprefix(_GLOO).replace("_", " ").title()
                labels.append(label.replace(" ", ""))
        self.gloo = self.host_events(calls)
        self.gloo["name"] = [number_of(label, names) for label in labels]
        self.ranges = self.host_events(self.events["range"])

    def rank_and_world_size(self) -> tuple[int | None, int | None]:
        info = self.content.get("distributedInfo")
        if not isinstance(info, dict):
            info = {}
        rank, world_size = info.get("rank"), info.get("world_size")
        name = _RANK_IN_NAME.search(self.file)
        if "rank" not in info and name:
            rank = int(name[1])
        if not isinstance(rank, int):
            rank = None
            self.notes.append(f"{self.file} does not say its rank")
        if not isinstance(world_size, int):
            world_size = None
        return rank, world_size

    def host_rank(self, rank: int) -> RankTrace:
        """Return a rank on the host: its operators compute, but for those inside a call of gloo on
        its own thread.
        """
        work = []
        for event in self.events["operator"]:
            if not event["name"].startswith(_NOT_WORK):
                work.append(event)
        compute = self.host_events(work)
        inside = np.zeros(len(compute), dtype=np.bool_)
        for thread in np.unique(self.gloo["lane"]):
            calls = union(spans(self.gloo[self.gloo["lane"] == thread]))
            inside |= (compute["lane"] == thread) & covers(calls, compute["start"])
        none = make_events(0)
        tables = (compute[~inside], self.gloo, none, none, self.ranges)
        return RankTrace(rank, None, *tables, on_host=True, backend="gloo")

    def gpu_rank(self, rank: int) -> RankTrace:
        """Return the rank on the device of most of NCCL's kernels, without NCCL of most kernels."""
        launches = self.launch_times()
        tables = {}
        for kind in ("kernel", "memcpy", "memset"):
            streams, launch_times, devices = [], [], []
            for event in self.events[kind]:
                streams.append(_argument(event, "stream"))
                launch_times.append(launches.get(_argument(event, "correlation"), -1))
                devices.append(_argument(event, "device"))
            table = tables[kind] = self.host_events(self.events[kind])
            table["lane"], table["launch"], table["device"] = streams, launch_times, devices
        kernels, copies, memsets = tables["kernel"], tables["memcpy"], tables["memset"]
        collectives, is_nccl = split_nccl(kernels, self.names)
        collectives["communicator"] = list(map(self.process_group, self.events["kernel"]))
        for row, event in zip(copies, self.events["memcpy"], strict=True):
            match = _COPY.match(event["name"])
            kind = match[1] if match else event["name"]
            row["name"] = number_of(kind, self.names)
            row["bytes"] = _argument(event, "bytes")
            row["peer"] = kind == "PtoP"
        has_nccl = bool(is_nccl.any())
        candidates = kernels
        if has_nccl:
            candidates = kernels[is_nccl]
        numbers, counts = np.unique(candidates["device"], return_counts=True)
        device = int(numbers[counts.argmax()])
        mine = kernels["device"] == device
        if not mine.all():
            elsewhere = f"{(~mine).sum()} kernels on another device than {device}"
            self.notes.append(f"{self.file}: {elsewhere}: not counted")
        communication, backend = self.gloo, "gloo"
        use = "counted as communication: no NCCL kernel"
        if has_nccl:
            communication, backend = collectives[mine & is_nccl], "nccl"
            use = "not counted: NCCL's kernels are"
        if len(self.gloo):
            self.notes.append(f"{self.file}: {len(self.gloo)} calls of gloo on the host, {use}")
        return RankTrace(
            rank,
            device,
            kernels[mine & ~is_nccl],
            communication,
            copies[copies["device"] == device],
            memsets[memsets["device"] == device],
            self.ranges,
            backend=backend,
        )

    def launch_times(self) -> dict[int, int]:
        """Return {correlation: host ns of its first call}; the runtime calls the driver."""
        events = self.events["launch"]
        launches: dict[int, int] = {}
        for event, start in zip(events, (self.base_ns + _ns(events, "ts")).tolist(), strict=True):
            correlation = _argument(event, "correlation")
            if correlation > 0:
                launches[correlation] = min(start, launches.get(correlation, start))
        return launches

    def process_group(self, event: JsonEvent) -> int:
        """Return the process group of a kernel (from torch 2.3), with its ranks (from 2.4)."""
        group = event["args"].get("Process Group Name")
        if group in (None, ""):
            return -1
        ranks = event["args"].get("Process Group Ranks") or ""
        return number_of(f"{group} {ranks}".rstrip(), self.names)

    def host_events(self, events: Sequence[JsonEvent]) -> Events:
        rows = make_events(len(events))
        rows["start"] = self.base_ns + _ns(events, "ts")
        rows["end"] = rows["start"] + _ns(events, "dur")
        rows["name"] = [number_of(event["name"], self.names) for event in events]
        rows["lane"] = [_integer(event.get("tid")) for event in events]
        return rows


def _ns(events: Sequence[JsonEvent], key: str) -> Times:
    """Convert to ns. Whole µs are exact in a float; multiplied by 1000 they would not be."""
    exact: NDArray[np.float64] = np.array([event[key] for event in events], dtype=np.float64)
    whole = np.floor(exact)
    fraction_ns = np.rint((exact - whole) * 1000)
    ns: Times = whole.astype(np.int64) * 1000 + fraction_ns.astype(np.int64)
    return ns


def _argument(event: JsonEvent, key: str) -> int:
    return max(_integer(event["args"].get(key)), -1)


def _integer(value: Any) -> int:
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    return -1
