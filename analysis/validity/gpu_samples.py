"""What the samples of the machine say of a cell, phase by phase: clocks, power, throttling, others.

They lie in `gpus.jsonl` and `cpu.jsonl`. Where several hosts were sampled, GPUs are in the order of
the ranks, host after host; what only a host has is in `hosts` too. The launching process puts it
into the record, and `python -m analysis verify` computes it again.
"""

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from benchmarks.record import CellFolder, Kind, read_lines
from benchmarks.record.shapes import required, rows

# nvml.h, nvmlClocksEventReason*: hardware slowdown, software thermal, hardware thermal, hardware
# power brake.
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
POWER_CAPPED = 0x04  # the software power cap: normal on large GPUs, recorded
IDLE = 0x01
# Phases that form the timed window. A benchmark with none of them: all phases except
# PREPARING_PHASES.
TIMED_PHASES = ("timed", "concurrent")
PREPARING_PHASES = ("imports", "connect", "build", "first step", "warm-up", "check", "verify")
NOT_MEASURED = (*PREPARING_PHASES, "compare")
# A phase that is shorter than the time between two samples has none inside: the next one, so many
# seconds later, counts.
PERIOD_SECONDS = 0.6
# Samples of a phase: the clock of one may still be on its way from the phase before.
FEWEST_OF_A_MEAN = 3
# The driver's busy share is a mean over up to so long: a sample this early in a window tells of the
# time before it too.
AVERAGED_SECONDS = 1.0
# The counter of energy moves ten times a second. Over less it was up to 8 % off on an H200, over
# this and more 2 %, against the counter read 20 times a second.
COUNTED_SECONDS = 3.0
# Shorter phases tell too little of the CPU: the kernel counts hundredths of a second.
LEAST_CPU_SECONDS = 1.0

# What a sample counts: bytes, seconds or anything else.
Whole = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Measured = Whole | Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
# Of a phase, in the order of the ranks.
OF_EACH_GPU = ("power_capped_share", "sm_mhz", "free_sm_mhz", "most_free_sm_mhz", "power_w")
# Metrics of the timed window that are means of a value of the samples.
MEANS = {"gpu/sm_mhz": "sm_mhz", "gpu/power_w": "power_w", "gpu/temperature_c": "temperature_c"}
CAPPED_SHARE = "gpu/power_capped_share"
# All metrics and facts that rest on the samples of GPUs.
OF_SAMPLES = {"metrics": (*MEANS, CAPPED_SHARE), "checks": ("gpu_samples", "gpu_windows")}

Sample = dict[str, Any]
# A line of `gpus.jsonl`: what the driver said of each GPU; what it does not say is absent.
GPU_LINE = required(
    gpus=rows(
        busy_percent=Measured,
        memory_bytes=Measured,
        own_bytes=Measured,
        power_w=Measured,
        energy_j=Measured,  # since the driver was loaded
        reasons=Whole,  # bits
        sm_mhz=Measured,
        temperature_c=Measured,
        foreign_pids=list[int],
        processes=Whole,  # that the driver lists, also those of other containers
    )
)
# A line of `cpu.jsonl`.
CPU_LINE = required(busy_s=Measured, own_s=Measured, cores=Whole)


class Phase(NamedTuple):
    """What rank 0 did from `opened` to `closed`, in seconds since 1970."""

    name: str
    opened: float
    closed: float

    def samples(self, lines: Sequence[Sample]) -> list[Sample]:
        """Return the lines inside the phase; of a short one without any the next."""
        inside, after = [], []
        for line in lines:
            if self.opened <= line["time"] <= self.closed:
                inside.append(line)
            elif self.closed < line["time"] <= self.closed + PERIOD_SECONDS:
                after.append(line)
        return inside or after[:1]


def summary(folder: CellFolder) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics of the timed window, facts for the validity checks) from a cell's samples.

    Both are empty without samples. A line that the sampler did not write so is passed over.
    """
    # The phases of rank 0 in order. The last ends when the rank has its result.
    phases: list[Phase] = []
    is_open = False
    for line in read_lines(folder.rank_lines(0)):
        if line["kind"] not in (Kind.PHASE, Kind.RESULT):
            continue
        if is_open:
            phases[-1] = phases[-1]._replace(closed=line["time"])
        is_open = line["kind"] == Kind.PHASE and "phase" in line
        if is_open:
            phases.append(Phase(str(line["phase"]), line["time"], math.inf))
    gpus, cpus = [], []
    for host in folder.sampled_hosts():
        gpus.append(samples_of(folder.samples_of("gpus", host), GPU_LINE))
        load = samples_of(folder.samples_of("cpu", host), CPU_LINE)
        cpus.append(_used_by_others(load, phases))
    metrics, facts = _gpu_facts(gpus, phases)
    windows = [_windows(lines, phases) for lines in gpus]
    if any(windows):
        facts["gpu_windows"] = windows
    cpu = cpus[0]
    sampled = list(filter(None, cpus))
    if len(cpus) > 1 and sampled:
        # In each phase the share of the host on which others used most.
        worst: dict[str, float] = {}
        cpu = {"cores": sampled[0]["cores"], "others_share": worst, "hosts": cpus}
        for host_cpu in sampled:
            for name, share in host_cpu["others_share"].items():
                worst[name] = max(share, worst.get(name, 0.0))
    if cpu:
        facts["cpu_samples"] = cpu
    return metrics, facts


def samples_of(path: Path, shape: Any) -> list[Sample]:
    """Return the lines of a file that are samples of a shape: GPU_LINE or CPU_LINE."""
    samples = []
    for line in read_lines(path):
        with contextlib.suppress(ValueError):
            msgspec.convert(line, shape)
            samples.append(line)
    return samples


def _measured(phases: Iterable[Phase]) -> dict[str, list[Phase]]:
    measured: dict[str, list[Phase]] = {}
    for phase in phases:
        if phase.name not in NOT_MEASURED:
            measured.setdefault(phase.name, []).append(phase)
    return measured


def _gpu_facts(
    hosts: Sequence[Sequence[Sample]], phases: Sequence[Phase]
) -> tuple[dict[str, float], dict[str, Any]]:
    lines = list(itertools.chain(*hosts))
    if not lines:
        return {}, {}
    # Steps without exchange may stand between the phases of the timed window.
    timed = [phase for phase in phases if phase.name in TIMED_PHASES]
    if not timed:
        timed = [phase for phase in phases if phase.name not in PREPARING_PHASES]
    inside: list[Sample] = []
    before: list[Sample] = []
    foreign_pids: set[int] = set()
    are_processes_known = False
    for line in lines:
        for phase in timed:
            if phase.opened <= line["time"] <= phase.closed:
                inside += line["gpus"]
                break
        if line["kind"] == Kind.BEFORE:
            before += line["gpus"]
        for gpu in line["gpus"]:
            are_processes_known |= "foreign_pids" in gpu
            foreign_pids.update(gpu.get("foreign_pids", ()))
    facts: dict[str, Any] = {
        "before_memory_bytes": max(_values(before, "memory_bytes"), default=None),
        "before_busy_percent": max(_values(before, "busy_percent"), default=None),
        "processes_known": are_processes_known,
        "foreign_pids": sorted(foreign_pids),
        "samples": len(inside),
        "phases": {},
    }
    for name, same_name in _measured(phases).items():
        facts["phases"][name] = _of_phase(same_name, hosts, phases)
    if len(hosts) > 1:
        facts["hosts"] = []
        for host in hosts:
            facts["hosts"].append(_gpu_facts([host], phases)[1].get("gpu_samples", {}))
    metrics: dict[str, float] = {}
    powers_w = list(itertools.chain(*(_counted_power_w(host, timed) for host in hosts)))
    if powers_w:
        facts["counted_power_w"] = math.fsum(powers_w)
    if inside:
        facts["throttle_reasons"] = _throttle_reasons(inside)
        facts["reasons_known"] = bool(_values(inside, "reasons"))
        means = {metric: _mean(inside, name) for metric, name in MEANS.items()}
        means[CAPPED_SHARE] = _capped_share(inside)
        for metric, mean in means.items():
            if mean is not None:
                metrics[metric] = mean
    return metrics, {"gpu_samples": facts}


def _counted_power_w(lines: Sequence[Sample], timed: Sequence[Phase]) -> list[float]:
    """Return the mean power of each GPU of a host in its timed phases, in W, by counters of energy.

    [] without them, and where the samples inside span too little. What the driver calls power is a
    mean over the last second, which is too low where a window begins.
    """
    seconds, joules = 0.0, [0.0] * max((len(line["gpus"]) for line in lines), default=0)
    for phase in timed:
        inside = []
        for line in lines:
            is_counted = all("energy_j" in gpu for gpu in line["gpus"])
            if is_counted and phase.opened <= line["time"] <= phase.closed:
                inside.append(line)
        if len(inside) < 2:
            continue
        seconds += inside[-1]["time"] - inside[0]["time"]
        ends = zip(inside[0]["gpus"], inside[-1]["gpus"], strict=False)
        for index, (first, last) in enumerate(ends):
            joules[index] += last["energy_j"] - first["energy_j"]
    return [each / seconds for each in joules] if seconds >= COUNTED_SECONDS else []


def _windows(lines: Sequence[Sample], phases: Sequence[Phase]) -> dict[str, Any]:
    """Return what the samples of a host tell of others in the timed windows of training.

    `grown_bytes` is how much more memory is in use than at most before them; `foreign_bytes` how
    much more of it is not the cell's than in the last sample before them, and `processes` how many
    more there are than at most since the warm-up: each of the GPU with most of it. `busy_percent`
    is the mean of the GPU that was least busy. {} without a sample in the windows, or between the
    warm-up and them.
    """
    timed = [phase for phase in phases if phase.name in TIMED_PHASES]
    warm_up = [phase.opened for phase in phases if phase.name == "warm-up"]
    if not timed or not warm_up:
        return {}
    before: list[list[Sample]] = []
    warm = 0  # samples since the warm-up
    inside: list[list[Sample]] = []
    averaged: list[list[Sample]] = []
    for line in lines:
        if line["time"] < timed[0].opened:
            before.append(line["gpus"])
            warm += line["time"] >= warm_up[0]
        for phase in timed:
            if phase.opened <= line["time"] <= phase.closed:
                inside.append(line["gpus"])
                if line["time"] >= phase.opened + AVERAGED_SECONDS:
                    averaged.append(line["gpus"])
    if not warm or not inside:
        return {}
    grown_bytes, foreign_bytes, processes = [], [], []
    for of_gpu, samples in zip(
        zip(*before, strict=False), zip(*inside, strict=False), strict=False
    ):
        most_bytes = max(_values(of_gpu, "memory_bytes"), default=None)
        last = of_gpu[-1]
        listed = max(_values(of_gpu[-warm:], "processes"), default=None)
        for gpu in samples:
            if "memory_bytes" in gpu and most_bytes is not None:
                grown_bytes.append(gpu["memory_bytes"] - most_bytes)
                if "own_bytes" in gpu and last.keys() >= {"own_bytes", "memory_bytes"}:
                    own_bytes = gpu["own_bytes"] - last["own_bytes"]
                    foreign_bytes.append(gpu["memory_bytes"] - last["memory_bytes"] - own_bytes)
            if "processes" in gpu and listed is not None:
                processes.append(gpu["processes"] - listed)
    means = [_mean(samples, "busy_percent") for samples in zip(*averaged, strict=False)]
    return {
        "samples": len(inside),
        "grown_bytes": max(grown_bytes, default=None),
        "foreign_bytes": max(foreign_bytes, default=None),
        "processes": max(processes, default=None),
        "busy_percent": min(filter(None, means), default=None),
    }


def _of_phase(
    same_name: Sequence[Phase], hosts: Sequence[Sequence[Sample]], phases: Sequence[Phase]
) -> dict[str, Any]:
    """Return what one measured phase shows; lists have an entry for each GPU, None without samples.

    `free_sm_mhz` is the mean clock of a GPU that nothing hinders in the phase, `most_free_sm_mhz`
    the highest of samples in which nothing does. `grown_bytes` is how much more memory was used
    than up to the timed window, `foreign_bytes` the same of what others hold, if the driver says
    whose memory it is.
    """
    gpus_of_hosts = []
    by_line: list[Sequence[Sample]] = []
    grown_bytes: list[int] = []
    foreign_bytes: list[int] = []
    for lines in hosts:
        inside = []
        for phase in same_name:
            inside += [line["gpus"] for line in phase.samples(lines)]
        by_line += inside
        gpus = list(zip(*inside, strict=False))
        gpus_of_hosts.append(gpus)
        grown_bytes += _grown(gpus, lines, phases)
        foreign_bytes += _grown(gpus, lines, phases, "own_bytes")
    facts: dict[str, Any] = {
        "samples": len(by_line),
        "throttle_reasons": _throttle_reasons(itertools.chain(*by_line)),
    }
    for name in OF_EACH_GPU:
        facts[name] = []
    most_gpus = max(map(len, gpus_of_hosts))
    for samples in itertools.chain(*(gpus or [()] * most_gpus for gpus in gpus_of_hosts)):
        free = []
        is_free = True
        for gpu in samples:
            if gpu.get("reasons") == 0 and "sm_mhz" in gpu:
                free.append(gpu)
            if gpu.get("reasons") not in (0, IDLE):
                is_free = False
        free_mhz = None
        if is_free and len(free) >= FEWEST_OF_A_MEAN:
            free_mhz = _mean(free, "sm_mhz")
        facts["power_capped_share"].append(_capped_share(samples))
        facts["sm_mhz"].append(_mean(samples, "sm_mhz"))
        facts["free_sm_mhz"].append(free_mhz)
        facts["most_free_sm_mhz"].append(max(_values(free, "sm_mhz"), default=None))
        facts["power_w"].append(_mean(samples, "power_w"))
    facts["grown_bytes"] = max(grown_bytes, default=None)
    facts["foreign_bytes"] = max(foreign_bytes, default=None)
    return facts


def _grown(
    of_gpus: Sequence[Sequence[Sample]],
    lines: Sequence[Sample],
    phases: Sequence[Phase],
    without: str = "",
) -> list[int]:
    """Return by how many bytes GPUs exceed their most up to the timed window.

    `without` is a value that is taken off the memory in use. [] without a warm-up, in which ranks
    reach the most that their steps need.
    """
    timed = [phase for phase in phases if phase.name in TIMED_PHASES]
    if not timed or "warm-up" not in [phase.name for phase in phases]:
        return []
    before = []
    for line in lines:  # up to the first of the timed window
        before.append(line["gpus"])
        if line["time"] >= timed[0].opened:
            break
    grown = []
    for of_gpu in zip(of_gpus, zip(*before, strict=False), strict=False):
        most = []
        for samples in of_gpu:
            used = []
            for gpu in samples:
                if "memory_bytes" in gpu and (not without or without in gpu):
                    used.append(gpu["memory_bytes"] - gpu.get(without, 0))
            most.append(max(used, default=None))
        if most[0] is not None and most[1] is not None:
            grown.append(int(most[0] - most[1]))
    return grown


def _values(samples: Iterable[Sample], name: str) -> list[Any]:
    values = []
    for sample in samples:
        if sample.get(name) is not None:
            values.append(sample[name])
    return values


def _throttle_reasons(samples: Iterable[Sample]) -> list[str]:
    reasons = {bits & THROTTLED for bits in _values(samples, "reasons")}
    return sorted(map(hex, reasons - {0}))


def _capped_share(samples: Iterable[Sample]) -> float | None:
    reasons = _values(samples, "reasons")
    if not reasons:
        return None
    capped = [bits for bits in reasons if bits & POWER_CAPPED]
    return len(capped) / len(reasons)


def _mean(samples: Iterable[Sample], name: str) -> float | None:
    values = _values(samples, name)
    if not values:
        return None
    return math.fsum(values) / len(values)


def _used_by_others(lines: Sequence[Sample], phases: Sequence[Phase]) -> dict[str, Any]:
    """Return the share of the cores that others used in each measured phase, samples joined by
    straight lines.

    {} without two samples of the CPU.
    """
    if len(lines) < 2:
        return {}
    others_s = sorted((line["time"], line["busy_s"] - line["own_s"]) for line in lines)
    times = [moment for moment, _ in others_s]

    def at(moment: float) -> float:
        index = max(1, bisect.bisect_left(times, moment))
        (t0, u0), (t1, u1) = others_s[index - 1 : index + 1]
        if t1 <= t0:
            return float(u1)
        return float(u0 + (u1 - u0) * (moment - t0) / (t1 - t0))

    cores = max(1, lines[0]["cores"])
    shares = {}
    for name, same_name in _measured(phases).items():
        used_s, duration_s = [], []
        for phase in same_name:
            if others_s[0][0] <= phase.opened <= phase.closed <= others_s[-1][0]:
                used_s.append(at(phase.closed) - at(phase.opened))
                duration_s.append(phase.closed - phase.opened)
        duration = math.fsum(duration_s)
        if duration >= LEAST_CPU_SECONDS:
            shares[name] = max(0.0, math.fsum(used_s) / (cores * duration))
    return {"cores": cores, "others_share": shares}
