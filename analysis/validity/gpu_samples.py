"""What the samples of the machine (`gpus.jsonl`, `cpu.jsonl`) say of a cell, phase by phase: clocks, power, throttling, others.

Where several hosts were sampled, GPUs are in the order of the ranks, host after host; what only a host has is in `hosts` too.
The launching process puts it into the record, and `python -m analysis verify` computes it again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.record import CellFolder, Kind, read_lines

# nvml.h, nvmlClocksEventReason*: hardware slowdown, software thermal, hardware thermal, hardware power brake.
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
POWER_CAPPED = 0x04  # the software power cap: normal on large GPUs, recorded
IDLE = 0x01
# Phases that form the timed window. A benchmark with none of them: all phases except PREPARING_PHASES.
TIMED_PHASES = ("timed", "concurrent")
PREPARING_PHASES = ("imports", "connect", "build", "first step", "warm-up", "check", "verify")
NOT_MEASURED = (*PREPARING_PHASES, "compare")
# A phase that is shorter than the time between two samples has none inside: the next one, so many seconds later, counts.
PERIOD_SECONDS = 0.6
FEWEST_OF_A_MEAN = (
    3  # samples of a phase: the clock of one may still be on its way from the phase before
)
LEAST_CPU_SECONDS = (
    1.0  # shorter phases tell too little of the CPU: the kernel counts hundredths of a second
)

OF_CPU = ("busy_s", "own_s", "cores")  # the numbers of a sample
OF_GPU = {
    "busy_percent",
    "memory_bytes",
    "own_bytes",
    "power_w",
    "reasons",
    "sm_mhz",
    "temperature_c",
}
# Of a phase, in the order of the ranks.
OF_EACH_GPU = ("power_capped_share", "sm_mhz", "free_sm_mhz", "most_free_sm_mhz", "power_w")
MOST = 2**63  # of bytes or anything else that a sample counts

Sample = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """What rank 0 did from `opened` to `closed`, in seconds since 1970."""

    name: str
    opened: float
    closed: float

    @property
    def timed(self) -> bool:
        """Whether it is one of TIMED_PHASES."""
        return self.name in TIMED_PHASES

    def holds(self, line: Sample) -> bool:
        """Tell whether a line was written inside the phase."""
        return self.opened <= float(line["time"]) <= self.closed

    def samples(self, lines: Sequence[Sample]) -> list[Sample]:
        """Return the lines inside the phase; of a short one without any the next."""
        inside = [line for line in lines if self.holds(line)]
        near = (
            line for line in lines if self.closed < line["time"] <= self.closed + PERIOD_SECONDS
        )
        return inside or [line for line in (next(near, None),) if line is not None]


def summary(folder: CellFolder) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics of the timed window, facts for the validity checks) from the samples of a cell; empty without samples.

    A line that the sampler did not write so is passed over.
    """
    phases, hosts = _phases(folder), folder.sampled_hosts()
    metrics, facts = _gpus(
        [list(filter(is_of_gpus, read_lines(folder.gpu_samples_of(one)))) for one in hosts], phases
    )
    loads = [list(filter(is_of_cpu, read_lines(folder.cpu_samples_of(one)))) for one in hosts]
    if cpu := _cpus([_cpu(lines, phases) for lines in loads]):
        facts["cpu_samples"] = cpu
    return metrics, facts


def is_of_gpus(line: Sample) -> bool:
    """Tell whether a line is a sample of the GPUs, each value of its kind. What a driver does not say is absent."""
    gpus = line.get("gpus")
    return isinstance(gpus, list) and all(
        isinstance(gpu, dict)
        and has_numbers(gpu, OF_GPU & gpu.keys())
        and isinstance(pids := gpu.get("foreign_pids", []), list)
        and all(type(pid) is int for pid in pids)
        for gpu in gpus
    )


def is_of_cpu(line: Sample) -> bool:
    """Tell whether a line is a sample of the CPU."""
    return has_numbers(line, OF_CPU)


def has_numbers(sample: Sample, names: Iterable[str]) -> bool:
    """Tell whether a sample has a number of each of these names; bits and counts are whole."""
    kinds = {"reasons": int, "cores": int}
    return all(
        isinstance(sample.get(name), kinds.get(name, (int, float))) and abs(sample[name]) < MOST
        for name in names
    )


def _gpus(
    hosts: Sequence[Sequence[Sample]], phases: Sequence[Phase]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics and facts of the GPUs from the lines of each host."""
    lines = [line for own in hosts for line in own]
    if not lines:
        return {}, {}
    timed = _timed_window(phases)
    inside = [
        gpu for line in lines if any(one.holds(line) for one in timed) for gpu in line["gpus"]
    ]
    before = [gpu for line in lines if line["kind"] == Kind.BEFORE for gpu in line["gpus"]]
    facts: dict[str, Any] = {
        "before_memory_bytes": max(
            (gpu["memory_bytes"] for gpu in before if "memory_bytes" in gpu), default=None
        ),
        "before_busy_percent": max(
            (gpu["busy_percent"] for gpu in before if "busy_percent" in gpu), default=None
        ),
        "processes_known": any("foreign_pids" in gpu for line in lines for gpu in line["gpus"]),
        "foreign_pids": sorted(
            {pid for line in lines for gpu in line["gpus"] for pid in gpu.get("foreign_pids", [])}
        ),
        "samples": len(inside),
        "phases": {
            name: _joined(
                [
                    _of_phase([line for one in same for line in one.samples(own)], own, phases)
                    for own in hosts
                ]
            )
            for name, same in _measured(phases).items()
        },
    }
    if len(hosts) > 1:
        facts["hosts"] = [_gpus([own], phases)[1].get("gpu_samples", {}) for own in hosts]
    if not inside:
        return {}, {"gpu_samples": facts}
    reasons = [gpu["reasons"] for gpu in inside if "reasons" in gpu]
    facts["throttle_reasons"] = sorted(
        {hex(reason & THROTTLED) for reason in reasons if reason & THROTTLED}
    )
    facts["reasons_known"] = bool(reasons)
    metrics = {
        "gpu/sm_mhz": _mean(inside, "sm_mhz"),
        "gpu/power_w": _mean(inside, "power_w"),
        "gpu/temperature_c": _mean(inside, "temperature_c"),
        "gpu/power_capped_share": _capped_share(inside),
    }
    return {name: value for name, value in metrics.items() if value is not None}, {
        "gpu_samples": facts
    }


def _of_phase(
    inside: Sequence[Sample], lines: Sequence[Sample], phases: Sequence[Phase]
) -> dict[str, Any]:
    """Return what one measured phase shows; lists have an entry for each GPU, None where the samples do not say.

    `free_sm_mhz` is the mean clock of a GPU that nothing hinders in the phase, `most_free_sm_mhz` the highest of samples in
    which nothing does. `grown_bytes` is how much more memory was used than up to the timed window, `foreign_bytes` the same of
    what others hold, if the driver says whose memory it is.
    """
    of_gpus = list(zip(*(line["gpus"] for line in inside), strict=False))
    every = [gpu for line in inside for gpu in line["gpus"]]
    reasons = [gpu["reasons"] for gpu in every if "reasons" in gpu]
    free = [[one for one in own if one.get("reasons") == 0 and "sm_mhz" in one] for own in of_gpus]
    unhindered = [
        all(one.get("reasons", POWER_CAPPED) in (0, IDLE) for one in own) for own in of_gpus
    ]
    return {
        "samples": len(inside),
        "throttle_reasons": sorted(
            {hex(reason & THROTTLED) for reason in reasons if reason & THROTTLED}
        ),
        "power_capped_share": [_capped_share(own) for own in of_gpus],
        "sm_mhz": [_mean(own, "sm_mhz") for own in of_gpus],
        "free_sm_mhz": [
            _mean(own, "sm_mhz") if alone and len(own) >= FEWEST_OF_A_MEAN else None
            for own, alone in zip(free, unhindered, strict=True)
        ],
        "most_free_sm_mhz": [max((one["sm_mhz"] for one in own), default=None) for own in free],
        "power_w": [_mean(own, "power_w") for own in of_gpus],
        "grown_bytes": _grown(of_gpus, lines, phases, _used),
        "foreign_bytes": _grown(of_gpus, lines, phases, _of_others),
    }


def _joined(hosts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what one phase shows on all hosts, from what it shows on each. A host without samples has GPUs that say nothing."""
    if len(hosts) == 1:
        return hosts[0]
    gpus = max(len(own["sm_mhz"]) for own in hosts)

    def most(name: str) -> Any:
        return max((own[name] for own in hosts if own[name] is not None), default=None)

    return {
        "samples": sum(own["samples"] for own in hosts),
        "throttle_reasons": sorted({reason for own in hosts for reason in own["throttle_reasons"]}),
        **{
            name: [value for own in hosts for value in own[name] or [None] * gpus]
            for name in OF_EACH_GPU
        },
        "grown_bytes": most("grown_bytes"),
        "foreign_bytes": most("foreign_bytes"),
    }


def _capped_share(samples: Sequence[Sample]) -> float | None:
    reasons = [one["reasons"] for one in samples if "reasons" in one]
    return (
        sum(bool(reason & POWER_CAPPED) for reason in reasons) / len(reasons) if reasons else None
    )


def _used(sample: Sample) -> int | None:
    return sample.get("memory_bytes")


def _of_others(sample: Sample) -> int | None:
    """Return what is in use and not held by the cell's own processes; None where the driver does not say."""
    known = "memory_bytes" in sample and "own_bytes" in sample
    return sample["memory_bytes"] - sample["own_bytes"] if known else None


def _grown(
    of_gpus: Sequence[Sequence[Sample]],
    lines: Sequence[Sample],
    phases: Sequence[Phase],
    held: Callable[[Sample], int | None],
) -> int | None:
    """Return by how many bytes the most grown GPU exceeds the most that it held up to the first sample of the timed window.

    None without a warm-up, in which ranks reach the most that their steps need.
    """
    timed = [phase for phase in phases if phase.timed]
    if not timed or not any(phase.name == "warm-up" for phase in phases):
        return None
    first = next((line["time"] for line in lines if line["time"] >= timed[0].opened), math.inf)
    earlier = list(zip(*(line["gpus"] for line in lines if line["time"] <= first), strict=False))

    def most(samples: Sequence[Sample]) -> int | None:
        return max((value for one in samples if (value := held(one)) is not None), default=None)

    both = ((most(own), most(before)) for own, before in zip(of_gpus, earlier, strict=False))
    return max(
        (now - before for now, before in both if now is not None and before is not None),
        default=None,
    )


def _mean(samples: Iterable[Sample], name: str) -> float | None:
    values = [sample[name] for sample in samples if name in sample]
    return math.fsum(values) / len(values) if values else None


def _cpu(lines: Sequence[Sample], phases: Sequence[Phase]) -> dict[str, Any]:
    """Return the share of the cores that others used in each measured phase, {} without two samples of the CPU."""
    if len(lines) < 2:
        return {}
    others = sorted((line["time"], line["busy_s"] - line["own_s"]) for line in lines)
    known = {
        name: [(one, used) for one in same if (used := _between(others, one)) is not None]
        for name, same in _measured(phases).items()
    }
    seconds = {
        name: math.fsum(one.closed - one.opened for one, _ in parts)
        for name, parts in known.items()
    }
    cores = max(1, lines[0]["cores"])
    shares = {
        name: max(0.0, math.fsum(used for _, used in known[name]) / (cores * duration))
        for name, duration in seconds.items()
        if duration >= LEAST_CPU_SECONDS
    }
    return {"cores": cores, "others_share": shares}


def _cpus(hosts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all CPUs show: in each phase the share of that host on which others used most."""
    known = [own for own in hosts if own]
    if not known or len(hosts) == 1:
        return hosts[0]
    phases = dict.fromkeys(name for own in known for name in own["others_share"])
    worst = {name: max(own["others_share"].get(name, 0.0) for own in known) for name in phases}
    return {"cores": known[0]["cores"], "others_share": worst, "hosts": list(hosts)}


def _between(others: Sequence[tuple[float, float]], phase: Phase) -> float | None:
    """Return how many CPU seconds others used in a phase, samples joined by straight lines; None where it was not sampled."""
    if not others[0][0] <= phase.opened <= phase.closed <= others[-1][0]:
        return None

    def at(moment: float) -> float:
        (t0, u0), (t1, u1) = next(pair for pair in pairwise(others) if moment <= pair[1][0])
        return u0 + (u1 - u0) * (moment - t0) / (t1 - t0) if t1 > t0 else u1

    return at(phase.closed) - at(phase.opened)


def _phases(folder: CellFolder) -> list[Phase]:
    """Return the phases of rank 0 in order. The last ends when the rank has its result."""
    lines = [
        line
        for line in read_lines(folder.rank_lines(0))
        if line["kind"] in (Kind.PHASE, Kind.RESULT)
    ]
    ends = [line["time"] for line in lines[1:]] + [math.inf]
    return [
        Phase(str(line["phase"]), line["time"], end)
        for line, end in zip(lines, ends, strict=False)
        if line["kind"] == Kind.PHASE and "phase" in line
    ]


def _measured(phases: Iterable[Phase]) -> dict[str, list[Phase]]:
    """Return the phases in which something is measured, by name."""
    found: dict[str, list[Phase]] = {}
    for phase in phases:
        if phase.name not in NOT_MEASURED:
            found.setdefault(phase.name, []).append(phase)
    return found


def _timed_window(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases that form the timed window; steps without exchange may stand between them."""
    return [one for one in phases if one.timed] or [
        one for one in phases if one.name not in PREPARING_PHASES
    ]
