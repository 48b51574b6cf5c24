"""Checks of what was around a measurement: inherited settings, clocks, throttling, and the load of others.

Each function returns None for a record that passes. Records of before phases were told apart have the timed window alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import (
    INHERITED,
    SAFETY,
    SET_BY_RINGSIDE,
    facts_of_hosts,
    inherited,
    mapping,
    variables,
)
from analysis.validity.check import CheckResult, not_applicable, unchecked, unless_cpu
from analysis.validity.nccl_settings import list_some
from benchmarks.record import Record
from conf.schema import ValidityLimits

GIB = 2**30
BETWEEN_HOSTS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
TIMED = "timed"
MOSTLY = 0.5  # share of the samples from which on a GPU is at its power cap
STEPS = (TIMED, "exposed")  # phases in which every GPU trains
# The exchange alone and what it is compared with need buffers that steps do not: at most so many times the gradients.
GRADIENTS_BESIDE = 8


# Settings


def setting_not_asked(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find settings that NCCL announced, nobody asked for and Ringside did not set; those that keep a machine safe may be."""
    announced = mapping(mapping(record.effective.get("nccl")).get("settings"))
    if not announced:
        around = [
            name
            for name, value in inherited(record).items()
            if name.startswith("NCCL_") and SAFETY.get(name) != value
        ]
        return (
            unchecked(f"no NCCL log shows whether NCCL used {list_some(around)}")
            if around
            else None
        )
    known = variables(record)
    found = [
        f"{name}={value} from {'the environment' if name in known else 'a configuration file of NCCL'}"
        for name, value in announced.items()
        if name not in record.cell.nccl
        and SAFETY.get(name) != value
        and SET_BY_RINGSIDE.get(name, "") not in (None, value)
        and not _is_our_interface(record, name)
    ]
    return CheckResult(list_some(found)) if found else None


def _is_our_interface(record: Record, name: str) -> bool:
    """Tell whether a variable names the interface that Ringside found between hosts: no host had it around its agent."""
    names = [facts.get(INHERITED) for facts in facts_of_hosts(record).values()]
    return (
        name in BETWEEN_HOSTS
        and bool(record.cell.hosts)
        and all(isinstance(own, list) and name not in own for own in names)
    )


# Clocks


def clocks_differ(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether SM clocks differ: between the GPUs of a cell, between its phases without a reason, or from the baseline's.

    The last is a finding: GPUs that share power run slower for good, and the efficiency at equal clocks is without it.
    """
    if record.cell.device != "cuda":
        return not_applicable("CPU workers have no SM clock")
    phases = _phases(record) if record.cell.benchmark["name"] == "throughput" else {}
    found = [*_between_gpus(record, phases, limits), *_between_phases(record, phases, limits)]
    if found:
        return CheckResult(list_some(found))
    own, share, equal = (record.metrics.get(name) for name in (CLOCK, EFFICIENCY, AT_EQUAL_CLOCKS))
    if own is None:
        return unchecked("the clocks were not sampled in the timed window")
    if share and equal and abs(share / equal - 1) > limits.clock_change_limit:
        alone = f"its baseline {own * equal / share:,.0f} MHz; at equal clocks the efficiency is {100 * equal:.1f} %"
        return CheckResult(f"the cell ran at {own:,.0f} MHz, {alone}", severity="finding")
    return None


def _between_gpus(
    record: Record, phases: Mapping[str, Mapping[str, Any]], limits: ValidityLimits
) -> Iterator[str]:
    """Yield a sentence for each phase of training in which one GPU runs slower than another.

    Where both are at their power cap, clocks of equal GPUs differ by themselves, and twice the limit is allowed.
    """
    for name in STEPS:
        phase = mapping(phases.get(name))
        means = phase.get("sm_mhz") or []
        clocks = {place: mhz for place, mhz in enumerate(means[: record.cell.world_size]) if mhz}
        if len(clocks) < 2:
            continue
        slow, fast = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
        capped = all((phase["power_capped_share"][place] or 0) > MOSTLY for place in (slow, fast))
        if clocks[fast] / clocks[slow] - 1 > limits.clock_spread_limit * (2 if capped else 1):
            one, other = (
                f"GPU {record.cell.members[place]} {clocks[place]:,.0f} MHz"
                for place in (slow, fast)
            )
            yield f"{one}, {other} in the {name} phase"


def _between_phases(
    record: Record, phases: Mapping[str, Mapping[str, Any]], limits: ValidityLimits
) -> Iterator[str]:
    """Yield a sentence for each GPU whose mean clock in a phase is below its highest although nothing lowers it."""
    for place, gpu in enumerate(record.cell.members):
        own = {name: phase for name, phase in phases.items() if place < len(phase["free_sm_mhz"])}
        most = max((phase["most_free_sm_mhz"][place] or 0 for phase in own.values()), default=0)
        means = {name: mhz for name, phase in own.items() if (mhz := phase["free_sm_mhz"][place])}
        slow = min(means, key=means.__getitem__, default=None)
        if slow is not None and most / means[slow] - 1 > limits.clock_spread_limit:
            yield f"GPU {gpu} {means[slow]:,.0f} MHz in the {slow} phase, up to {most:,.0f} MHz, and the driver gives no reason"


# Heat and the load of others


def throttled(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a GPU lowered its clocks for heat or a power brake while something was measured."""
    hosts = _of_hosts(record, "gpu_samples", record.cell.hosts)
    if not hosts:
        return unless_cpu(record, "the GPUs were not sampled in the timed window")
    return _first([_throttled(samples, on) for on, samples in hosts])


def _throttled(samples: Mapping[str, Any], on: str) -> CheckResult | None:
    if not samples.get("samples"):
        return unchecked(f"the GPUs{on} were not sampled in the timed window")
    if not samples["reasons_known"]:
        return unchecked(f"the driver{on} does not report why it lowers clocks")
    phases = mapping(samples.get("phases")).items()
    by_phase = {
        name: phase["throttle_reasons"] for name, phase in phases if phase["throttle_reasons"]
    }
    if by_phase:
        return CheckResult(
            list_some(
                [
                    f"{' '.join(reasons)}{on} in the {name} phase"
                    for name, reasons in by_phase.items()
                ]
            )
        )
    reasons = samples["throttle_reasons"]
    return CheckResult(f"{', '.join(reasons)}{on} in the timed window") if reasons else None


def foreign_load(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether other processes used the GPUs, before the cell or in a phase in which something was measured."""
    hosts = _of_hosts(record, "gpu_samples", record.cell.hosts)
    if not hosts:
        return unless_cpu(record, "the GPUs were not sampled")
    beside = record.model.get("gradient_bytes", 0.0) * GRADIENTS_BESIDE
    return _first([_foreign_load(samples, on, limits, beside) for on, samples in hosts])


def _foreign_load(
    samples: Mapping[str, Any], on: str, limits: ValidityLimits, beside_bytes: float
) -> CheckResult | None:
    if not samples:
        return unchecked(f"the GPUs{on} were not sampled")
    if samples["foreign_pids"]:
        return CheckResult(f"processes {', '.join(map(str, samples['foreign_pids'][:5]))}{on}")
    memory, busy = samples["before_memory_bytes"], samples["before_busy_percent"]
    if memory is None and busy is None and not samples.get("processes_known", True):
        return unchecked(f"the driver{on} does not report which processes use the GPUs")
    allowed = limits.foreign_memory_gib * GIB
    if memory is not None and memory > allowed:
        return CheckResult(f"{memory / GIB:.1f} GiB were in use before the ranks started{on}")
    if busy is not None and busy > limits.foreign_busy_percent:
        return CheckResult(f"{busy} % busy before the ranks started{on}")
    for name, phase in mapping(samples.get("phases")).items():
        others, grown = phase["foreign_bytes"], phase["grown_bytes"] or 0
        if others is not None and others > allowed:
            return CheckResult(
                f"the memory of other programs grew by {others / GIB:.1f} GiB after the warm-up, in the {name} phase{on}"
            )
        if others is None and grown > allowed + (0 if name == TIMED else beside_bytes):
            return CheckResult(
                f"the memory in use grew by {grown / GIB:.1f} GiB after the warm-up, in the {name} phase{on}"
            )
    return None


def foreign_cpu(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether others used the cell's cores while something was measured."""
    hosts = _of_hosts(record, "cpu_samples", record.cell.every_host)
    if not hosts:
        return unchecked("the load of the CPU was not sampled")
    return _first([_foreign_cpu(samples, on, limits) for on, samples in hosts])


def _foreign_cpu(samples: Mapping[str, Any], on: str, limits: ValidityLimits) -> CheckResult | None:
    if not samples:
        return unchecked(f"the load of the CPU{on} was not sampled")
    shares = samples["others_share"]
    if not shares:
        return unchecked("nothing was measured for as long as a second")
    name = max(shares, key=shares.__getitem__)
    if shares[name] <= limits.foreign_cpu_limit:
        return None
    cores = samples["cores"]
    return CheckResult(
        f"{100 * shares[name]:.0f} % of {cores} cores{on} in the {name} phase, allowed {100 * limits.foreign_cpu_limit:.0f} %"
    )


def _of_hosts(
    record: Record, kind: str, hosts: Sequence[str]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (" on host a", what its samples show) for each of these hosts; ("", …) for one machine; [] without any samples."""
    samples = record.checks.get(kind)
    if samples is None:
        return []
    if not hosts:
        return [("", samples)]
    several = [*samples.get("hosts", [samples]), *({} for _ in hosts)]
    return [(f" on host {host}", own) for host, own in zip(hosts, several, strict=False)]


def _first(results: Sequence[CheckResult | None]) -> CheckResult | None:
    """Return the first result that found something, or else the first that could not be checked."""
    found = [one for one in results if one is not None]
    return min(found, key=lambda one: not one.checked, default=None)


def _phases(record: Record) -> Mapping[str, Mapping[str, Any]]:
    """Return what the samples of the GPUs show of each measured phase."""
    return mapping(mapping(record.checks.get("gpu_samples")).get("phases"))
