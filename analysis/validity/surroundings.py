"""Checks of what was around a measurement: inherited settings, clocks, throttling, other programs.

Each function returns None for a record that passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import (
    INHERITED,
    SAFETY,
    SET_BY_RINGSIDE,
    facts_of_hosts,
    inherited,
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
# The exchange alone and its references need buffers that steps do not: at most so many gradients.
GRADIENTS_BESIDE = 8

Samples = Mapping[str, Any]
Phases = Mapping[str, Mapping[str, Any]]


# Settings


def setting_not_asked(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Find settings that NCCL announced, nobody asked for and Ringside did not set.

    Those that keep a machine safe may be.
    """
    announced = record.effective.get("nccl", {}).get("settings", {})
    if not announced:
        around = []
        for name, value in inherited(record).items():
            if name.startswith("NCCL_") and SAFETY.get(name) != value:
                around.append(name)
        if not around:
            return None
        return unchecked(f"no NCCL log shows whether NCCL used {list_some(around)}")
    environment = variables(record)
    settings = []
    for name, value in announced.items():
        if name in record.cell.nccl or SAFETY.get(name) == value:
            continue
        if SET_BY_RINGSIDE.get(name, "") in (None, value) or _is_our_interface(record, name):
            continue
        source = "a configuration file of NCCL"
        if name in environment:
            source = "the environment"
        settings.append(f"{name}={value} from {source}")
    if not settings:
        return None
    return CheckResult(list_some(settings))


def _is_our_interface(record: Record, name: str) -> bool:
    """Tell whether a variable names the interface that Ringside found between hosts.

    Then no host had it around its agent.
    """
    if name not in BETWEEN_HOSTS or not record.cell.hosts:
        return False
    for facts in facts_of_hosts(record).values():
        if INHERITED not in facts or name in facts[INHERITED]:
            return False
    return True


# Clocks


def clocks_differ(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether SM clocks differ: between GPUs, between phases, or from the baseline's.

    The last is a finding: GPUs that share power run slower for good, and the efficiency at equal
    clocks is without it.
    """
    if record.cell.device != "cuda":
        return not_applicable("CPU workers have no SM clock")
    if record.cell.benchmark["name"] == "throughput":
        phases = record.checks.get("gpu_samples", {}).get("phases", {})
        differences = [
            *_between_gpus(record, phases, limits),
            *_between_phases(record, phases, limits),
        ]
        if differences:
            return CheckResult(list_some(differences))
    clock_mhz = record.metrics.get(CLOCK)
    if clock_mhz is None:
        return unchecked("the clocks were not sampled in the timed window")
    share, at_equal = record.metrics.get(EFFICIENCY), record.metrics.get(AT_EQUAL_CLOCKS)
    if share and at_equal and abs(share / at_equal - 1) > limits.clock_change_limit:
        baseline_mhz = clock_mhz * at_equal / share
        return CheckResult(
            f"the cell ran at {clock_mhz:,.0f} MHz, its baseline {baseline_mhz:,.0f} MHz; "
            f"at equal clocks the efficiency is {100 * at_equal:.1f} %",
            severity="finding",
        )
    return None


def _between_gpus(record: Record, phases: Phases, limits: ValidityLimits) -> Iterator[str]:
    """Yield a sentence for each phase of training in which one GPU runs slower than another.

    Where both are at their power cap, clocks of equal GPUs differ by themselves, and twice the
    limit is allowed.
    """
    for name in STEPS:
        phase = phases.get(name, {})
        clocks_mhz = {}
        for rank, mhz in enumerate(phase.get("sm_mhz", [])[: record.cell.world_size]):
            if mhz:
                clocks_mhz[rank] = mhz
        if len(clocks_mhz) < 2:
            continue
        slow, fast = (
            min(clocks_mhz, key=clocks_mhz.__getitem__),
            max(clocks_mhz, key=clocks_mhz.__getitem__),
        )
        allowed = limits.clock_spread_limit
        if all((phase["power_capped_share"][rank] or 0) > MOSTLY for rank in (slow, fast)):
            allowed *= 2
        if clocks_mhz[fast] / clocks_mhz[slow] - 1 > allowed:
            gpus = record.cell.members
            yield (
                f"GPU {gpus[slow]} {clocks_mhz[slow]:,.0f} MHz, "
                f"GPU {gpus[fast]} {clocks_mhz[fast]:,.0f} MHz in the {name} phase"
            )


def _between_phases(record: Record, phases: Phases, limits: ValidityLimits) -> Iterator[str]:
    """Yield a sentence for each GPU whose mean clock in a phase is below its highest unhindered."""
    for rank, gpu in enumerate(record.cell.members):
        highest_mhz, means_mhz = 0.0, {}
        for name, phase in phases.items():
            if rank >= len(phase["free_sm_mhz"]):
                continue
            highest_mhz = max(highest_mhz, phase["most_free_sm_mhz"][rank] or 0)
            if phase["free_sm_mhz"][rank]:
                means_mhz[name] = phase["free_sm_mhz"][rank]
        if not means_mhz:
            continue
        slow = min(means_mhz, key=means_mhz.__getitem__)
        if highest_mhz / means_mhz[slow] - 1 > limits.clock_spread_limit:
            yield (
                f"GPU {gpu} {means_mhz[slow]:,.0f} MHz in the {slow} phase, "
                f"up to {highest_mhz:,.0f} MHz, and the driver gives no reason"
            )


# Heat and other programs


def throttled(record: Record, _: ValidityLimits) -> CheckResult | None:
    """Tell whether a GPU lowered its clocks for heat or a power brake in a measured phase."""
    if "gpu_samples" not in record.checks:
        return unless_cpu(record, "the GPUs were not sampled in the timed window")
    return _worst_host(record, "gpu_samples", record.cell.hosts, _throttled)


def _throttled(samples: Samples, host: str) -> CheckResult | None:
    if not samples.get("samples"):
        return unchecked(f"the GPUs{host} were not sampled in the timed window")
    if not samples["reasons_known"]:
        return unchecked(f"the driver{host} does not report why it lowers clocks")
    phases = []
    for name, phase in samples.get("phases", {}).items():
        if phase["throttle_reasons"]:
            phases.append(f"{' '.join(phase['throttle_reasons'])}{host} in the {name} phase")
    if phases:
        return CheckResult(list_some(phases))
    if samples["throttle_reasons"]:
        return CheckResult(f"{', '.join(samples['throttle_reasons'])}{host} in the timed window")
    return None


def foreign_load(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether other processes used the GPUs, before the cell or in a measured phase."""
    if "gpu_samples" not in record.checks:
        return unless_cpu(record, "the GPUs were not sampled")
    beside_bytes = record.model.get("gradient_bytes", 0.0) * GRADIENTS_BESIDE

    def judge(samples: Samples, host: str) -> CheckResult | None:
        return _foreign_load(samples, host, limits, beside_bytes)

    return _worst_host(record, "gpu_samples", record.cell.hosts, judge)


def _foreign_load(
    samples: Samples, host: str, limits: ValidityLimits, beside_bytes: float
) -> CheckResult | None:
    if not samples:
        return unchecked(f"the GPUs{host} were not sampled")
    if samples["foreign_pids"]:
        return CheckResult(f"processes {', '.join(map(str, samples['foreign_pids'][:5]))}{host}")
    memory_bytes, busy = samples["before_memory_bytes"], samples["before_busy_percent"]
    if memory_bytes is None and busy is None and not samples.get("processes_known", True):
        return unchecked(f"the driver{host} does not report which processes use the GPUs")
    allowed_bytes = limits.foreign_memory_gib * GIB
    if memory_bytes is not None and memory_bytes > allowed_bytes:
        gib = memory_bytes / GIB
        return CheckResult(f"{gib:.1f} GiB were in use before the ranks started{host}")
    if busy is not None and busy > limits.foreign_busy_percent:
        return CheckResult(f"{busy} % busy before the ranks started{host}")
    for name, phase in samples.get("phases", {}).items():
        when = f"after the warm-up, in the {name} phase{host}"
        foreign_bytes, grown_bytes = phase["foreign_bytes"], phase["grown_bytes"] or 0
        if foreign_bytes is not None:
            if foreign_bytes > allowed_bytes:
                gib = foreign_bytes / GIB
                return CheckResult(f"the memory of other programs grew by {gib:.1f} GiB {when}")
            continue
        allowed_growth = allowed_bytes
        if name != TIMED:
            allowed_growth += beside_bytes
        if grown_bytes > allowed_growth:
            return CheckResult(f"the memory in use grew by {grown_bytes / GIB:.1f} GiB {when}")
    return None


def foreign_cpu(record: Record, limits: ValidityLimits) -> CheckResult | None:
    """Tell whether other programs used the cell's cores while something was measured."""
    if "cpu_samples" not in record.checks:
        return unchecked("the load of the CPU was not sampled")

    def judge(samples: Samples, host: str) -> CheckResult | None:
        return _foreign_cpu(samples, host, limits)

    return _worst_host(record, "cpu_samples", record.cell.every_host, judge)


def _foreign_cpu(samples: Samples, host: str, limits: ValidityLimits) -> CheckResult | None:
    if not samples:
        return unchecked(f"the load of the CPU{host} was not sampled")
    shares = samples["others_share"]
    if not shares:
        return unchecked("nothing was measured for as long as a second")
    name = max(shares, key=shares.get)
    if shares[name] <= limits.foreign_cpu_limit:
        return None
    return CheckResult(
        f"{100 * shares[name]:.0f} % of {samples['cores']} cores{host} in the {name} phase, "
        f"allowed {100 * limits.foreign_cpu_limit:.0f} %"
    )


def _worst_host(
    record: Record,
    kind: str,
    hosts: Sequence[str],
    judge: Callable[[Samples, str], CheckResult | None],
) -> CheckResult | None:
    """Judge the samples of each host with its place in words; return a failed check before others."""
    samples = record.checks[kind]
    if not hosts:
        return judge(samples, "")
    of_hosts = samples.get("hosts", [samples])
    skipped = None
    for position, host in enumerate(hosts):
        result = judge(of_hosts[position] if position < len(of_hosts) else {}, f" on host {host}")
        if result is not None and result.checked:
            return result
        skipped = skipped or result
    return skipped
