"""Checks of what was around a measurement: inherited settings, wires, clocks, heat, other programs.

The NCCL settings that a cell asked for are judged by nccl_settings.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import (
    INHERITED,
    SAFETY,
    SET_BY_RINGSIDE,
    facts_of_hosts,
    gpus_of,
    inherited,
    variables,
)
from analysis.text import join_words
from analysis.topology.model import nvlink_count, nvlink_gb_per_s
from analysis.validity.check import (
    MOST_NAMED,
    CheckOutcome,
    Judgement,
    check,
    not_applicable,
    unchecked,
    unchecked_if_training,
    unchecked_on_gpus,
    unchecked_without_connections,
)
from analysis.validity.nccl_settings import CHANNEL_LIMITS
from benchmarks.record import Record
from conf.schema import ValidityLimits

GIB = 2**30
BETWEEN_HOSTS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
TIMED = "timed"
LAUNCH_BOUND = 0.9  # of a step: the host needs so long to launch it
MOSTLY = 0.5  # share of the samples from which on a GPU is at its power cap
STEPS = (TIMED, "exposed")  # phases in which every GPU trains
# The exchange alone and its references need buffers that steps do not: at most so many gradients.
GRADIENTS_BESIDE = 8
# Left alone, NCCL takes P2P over NVLink, and on every CPU over PIX and PXB (ncclTopoCheckP2p).
PCIE_OF_PEERS = ("PIX", "PXB")
WITHOUT_P2P = {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_IGNORE_DISABLED_P2P"}
# Every committed record of H200s over NV18 (NCCL 2.28, 2 to 4 GPUs) has 24 channels.
CHANNELS_OF_LINK = {"NV18": 24}
LEAST_CHANNELS = 0.5
# The ring of a reference reaches 54 to 75 % of its NVLinks in those records.
LEAST_OF_NVLINKS = 0.4

Samples = Mapping[str, Any]
Phases = Mapping[str, Mapping[str, Any]]


@check("suspect", "NCCL used a setting that was not asked for: {}")
def setting_not_asked(record: Record, _: ValidityLimits) -> Judgement:
    """NCCL's log shows a setting that came neither from the command line nor from Ringside. One
    that turns NVLink multicast off is allowed

    Unset the environment variable that the check names, or remove it from nccl.conf.
    """
    announced = record.effective.get("nccl", {}).get("settings", {})
    if not announced:
        around = []
        for name, value in inherited(record).items():
            if name.startswith("NCCL_") and SAFETY.get(name) != value:
                around.append(name)
        if not around:
            return unchecked_without_connections(record)
        return unchecked(f"no NCCL log shows whether NCCL used {join_words(around, MOST_NAMED)}")
    environment = variables(record)
    settings = []
    for name, value in announced.items():
        if name in record.cell.nccl or SAFETY.get(name) == value:
            continue
        if SET_BY_RINGSIDE.get(name, "") in (None, value):
            continue
        if name in BETWEEN_HOSTS and record.cell.hosts:
            # Ringside chose the interface where no host had it around its agent.
            around_agents = [
                facts.get(INHERITED, [name]) for facts in facts_of_hosts(record).values()
            ]
            if name not in itertools.chain(*around_agents):
                continue
        source = "a configuration file of NCCL"
        if name in environment:
            source = "the environment"
        settings.append(f"{name}={value} from {source}")
    return join_words(settings, MOST_NAMED)


@check("suspect", "NCCL used less than the wires offer, and no setting explains it: {}")
def transport_below_wires(record: Record, _: ValidityLimits) -> Judgement:
    """NCCL used a slower path than the links allow, and no setting asked for it. One of these was
    seen: (1) SHM or NET between GPUs that NVLink, PIX or PXB joins (only `finding` if NCCL's
    log says that peer access is missing); (2) over NV18 (18 NVLinks), at most half of NCCL's
    usual channels; (3) one large all-reduce below 40 % of the NVLink bandwidth

    Look for what forbids peer access: ACS, IOMMU, a container without /dev/shm.
    """
    nccl = record.effective.get("nccl", {})
    if not nccl.get("transports"):
        return unchecked_without_connections(record)
    settings = nccl.get("settings", {}).keys() | record.cell.nccl.keys()
    unused, link_classes = [], set()
    for pair, link_class, transport in _wire_uses(record):
        link_classes.add(link_class)
        has_peer_access = nvlink_count(link_class) or link_class in PCIE_OF_PEERS
        if has_peer_access and not transport.startswith("P2P/"):
            unused.append(f"{transport} on {pair}, which {link_class} joins")
    if unused and not settings & WITHOUT_P2P:
        named, refusals = join_words(unused, MOST_NAMED), nccl.get("no_peer_access")
        if refusals:
            return CheckOutcome("finding", f"{named}; its log says: {refusals[0]}")
        return named
    if unused or len(link_classes) != 1 or settings & set(CHANNEL_LIMITS):
        return None
    (link_class,) = link_classes
    channels, usual = nccl["channels"].get("collective"), CHANNELS_OF_LINK.get(link_class)
    if usual and channels and channels <= LEAST_CHANNELS * usual:
        return f"{channels} channels over {link_class}, usual are {usual}"
    return _slow_ring(record, link_class)


def _wire_uses(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield pair of ranks, link class and transport of each connection of two GPUs of one host."""
    facts, places = facts_of_hosts(record), record.cell.places
    for pair, transports in record.effective.get("nccl", {}).get("transports", {}).items():
        source, target = map(int, pair.split("->"))
        if max(source, target) >= len(places):
            continue
        host, first, second = places[source].host, places[source].gpu, places[target].gpu
        if places[target].host != host or first is None or second is None:
            continue
        gpus = f"{min(first, second)}-{max(first, second)}"
        link_class = facts.get(host, {}).get("links", {}).get(gpus, "")
        for transport in transports:
            yield pair, link_class, transport


def _slow_ring(record: Record, link_class: str) -> Judgement:
    links = nvlink_count(link_class)
    gb_per_s = record.metrics.get("comm/busbw_gb_per_s")
    ratio = record.metrics.get("comm/ideal_ratio")
    if not links or not gb_per_s or not ratio or record.checks.get("reference") != "ring":
        return None
    ring_gb_per_s = gb_per_s / ratio
    for facts in facts_of_hosts(record).values():
        for gpu in gpus_of(facts):
            of_link = nvlink_gb_per_s(gpu.get("name"))
            if of_link is None:
                continue
            share = ring_gb_per_s / (links * of_link)
            if share < LEAST_OF_NVLINKS:
                offered = f"the {links * of_link:g} GB/s of {link_class}"
                return f"a ring reaches {ring_gb_per_s:.0f} GB/s, {100 * share:.0f} % of {offered}"
    return None


@check("suspect", "the clocks of the GPUs differ: {}")
def clocks_differ(record: Record, limits: ValidityLimits) -> Judgement:
    """SM clocks differ. Suspect: two GPUs of the run differ by more than {clock_spread_limit}
    (twice that at the power cap), or one GPU drops by that much from its own highest clock and the
    driver gives no reason. Only a finding: clocks differ by more than {clock_change_limit} from
    those of the run on one GPU

    Set equal clocks with nvidia-smi -lgc, or compare rates at equal clocks.
    """
    if record.cell.device != "cuda":
        return not_applicable("CPU workers have no SM clock")
    if record.cell.benchmark["name"] == "throughput":
        phases = record.checks.get("gpu_samples", {}).get("phases", {})
        differences = list(_clock_differences(record, phases, limits.clock_spread_limit))
        if differences:
            return join_words(differences, MOST_NAMED)
    clock_mhz = record.metrics.get(CLOCK)
    if clock_mhz is None:
        return unchecked("the clocks were not sampled in the timed window")
    # GPUs that share power run slower for good, and the efficiency at equal clocks is without it.
    share, at_equal = record.metrics.get(EFFICIENCY), record.metrics.get(AT_EQUAL_CLOCKS)
    if not share or not at_equal or abs(share / at_equal - 1) <= limits.clock_change_limit:
        return None
    baseline_mhz = clock_mhz * at_equal / share
    text = (
        f"this run had {clock_mhz:,.0f} MHz, its baseline {baseline_mhz:,.0f} MHz; "
        f"at equal clocks the efficiency is {100 * at_equal:.1f} %"
    )
    return CheckOutcome("finding", text)


def _clock_differences(record: Record, phases: Phases, most: float) -> Iterator[str]:
    """Yield a sentence for each phase of training in which one GPU runs slower than another, and
    for each GPU whose mean clock in a phase is below its highest unhindered.

    Where both are at their power cap, clocks of equal GPUs differ by themselves, and twice the
    limit is allowed.
    """
    gpus = record.cell.members
    for name in STEPS:
        phase = phases.get(name, {})
        clocks_mhz = {}
        for rank, mhz in enumerate(phase.get("sm_mhz", [])[: record.cell.world_size]):
            if mhz:
                clocks_mhz[rank] = mhz
        if len(clocks_mhz) < 2:
            continue
        slow = min(clocks_mhz, key=clocks_mhz.__getitem__)
        fast = max(clocks_mhz, key=clocks_mhz.__getitem__)
        allowed, capped_share = most, phase["power_capped_share"]
        if (capped_share[slow] or 0) > MOSTLY and (capped_share[fast] or 0) > MOSTLY:
            allowed *= 2
        if clocks_mhz[fast] / clocks_mhz[slow] - 1 > allowed:
            yield (
                f"GPU {gpus[slow]} {clocks_mhz[slow]:,.0f} MHz, "
                f"GPU {gpus[fast]} {clocks_mhz[fast]:,.0f} MHz in the {name} phase"
            )
    for rank, gpu in enumerate(gpus):
        highest_mhz, means_mhz = 0.0, {}
        for name, phase in phases.items():
            if rank >= len(phase["free_sm_mhz"]):
                continue
            highest_mhz = max(highest_mhz, phase["most_free_sm_mhz"][rank] or 0)
            if phase["free_sm_mhz"][rank]:
                means_mhz[name] = phase["free_sm_mhz"][rank]
        if not means_mhz:
            continue
        slow_phase = min(means_mhz, key=means_mhz.__getitem__)
        if highest_mhz / means_mhz[slow_phase] - 1 > most:
            yield (
                f"GPU {gpu} {means_mhz[slow_phase]:,.0f} MHz in the {slow_phase} phase, "
                f"up to {highest_mhz:,.0f} MHz, and the driver gives no reason"
            )


@check("invalid", "a GPU lowered its clocks because of heat or a power brake: {}")
def throttled(record: Record, _: ValidityLimits) -> Judgement:
    """a GPU lowered its clocks for heat or an external power brake while something was measured.
    Slowing down at its own power cap is recorded, and is no fault

    Improve the cooling or the power supply, then run again.
    """
    if "gpu_samples" not in record.checks:
        return unchecked_on_gpus(
            record, "clocks, power and memory of the GPUs were not read in the timed window"
        )

    def judge(samples: Samples, host: str) -> Judgement:
        if not samples.get("samples"):
            return unchecked(
                f"clocks, power and memory of the GPUs{host} were not read in the timed window"
            )
        if not samples["reasons_known"]:
            return unchecked(f"the driver{host} does not report why it lowers clocks")
        phases = []
        for name, phase in samples.get("phases", {}).items():
            if phase["throttle_reasons"]:
                phases.append(f"{' '.join(phase['throttle_reasons'])}{host} in the {name} phase")
        if not phases and samples["throttle_reasons"]:
            return f"{', '.join(samples['throttle_reasons'])}{host} in the timed window"
        return join_words(phases, MOST_NAMED)

    return _worst_host(record, "gpu_samples", record.cell.hosts, judge)


@check("invalid", "another program used these GPUs: {}")
def foreign_load(record: Record, limits: ValidityLimits) -> Judgement:
    """other programs used the GPUs. One of these is enough: another process was seen at any time;
    before the run, more than {foreign_memory_gib} of memory was in use, or a GPU was busy for more
    than {foreign_busy_percent} of the time; memory that is not the run's grew while something
    was measured

    Ask for other GPUs, or wait until the programs that are named have ended.
    """
    if "gpu_samples" not in record.checks:
        return unchecked_on_gpus(record, "clocks, power and memory of the GPUs were not read")
    beside_bytes = record.model.get("gradient_bytes", 0.0) * GRADIENTS_BESIDE
    allowed_bytes = limits.foreign_memory_gib * GIB

    def judge(samples: Samples, host: str) -> Judgement:
        if not samples:
            return unchecked(f"clocks, power and memory of the GPUs{host} were not read")
        if samples["foreign_pids"]:
            return f"processes {', '.join(map(str, samples['foreign_pids'][:5]))}{host}"
        memory_bytes, busy = samples["before_memory_bytes"], samples["before_busy_percent"]
        if memory_bytes is None and busy is None and not samples.get("processes_known", True):
            return unchecked(f"the driver{host} does not report which processes use the GPUs")
        if memory_bytes is not None and memory_bytes > allowed_bytes:
            return f"{memory_bytes / GIB:.1f} GiB were in use before the ranks started{host}"
        if busy is not None and busy > limits.foreign_busy_percent:
            return f"{busy} % busy before the ranks started{host}"
        for name, phase in samples.get("phases", {}).items():
            whose, grown_bytes, more_bytes = "memory of other programs", phase["foreign_bytes"], 0.0
            if grown_bytes is None:
                whose, grown_bytes = "memory in use", phase["grown_bytes"] or 0
                if name != TIMED:
                    more_bytes = beside_bytes
            if grown_bytes > allowed_bytes + more_bytes:
                gib = grown_bytes / GIB
                when = f"after the warm-up, in the {name} phase{host}"
                return f"the {whose} grew by {gib:.1f} GiB {when}"
        return None

    return _worst_host(record, "gpu_samples", record.cell.hosts, judge)


@check("invalid", "another program began on these GPUs after the start: {}", since=7)
def foreign_load_timed(record: Record, limits: ValidityLimits) -> Judgement:
    """another program began while steps were timed. Invalid: the driver lists a new process, or
    memory that is not the run's grew by more than {foreign_growth_gib}. Suspect: memory grew by as
    much, but the driver does not say whose it is; or every GPU was busy longer than the timed steps
    explain, by more than {foreign_busy_share} plus the measuring error. The busy test is skipped
    where several ranks are CPU-bound and the driver reports the memory of each process

    Stop the other programs on these GPUs and run again.
    """
    windows = record.checks.get("gpu_windows")
    if windows is None:
        if record.cell.device != "cuda":
            return unchecked_on_gpus(record, "")
        return unchecked_if_training(
            record, "the GPUs were not sampled before and in the timed windows"
        )
    hosts = [f" on host {host}" for host in record.cell.hosts] or [""]
    windows = windows[: len(hosts)]  # others have servers alone
    doubt: Judgement = None
    for of_host, host in zip(windows, hosts, strict=False):
        judgement = _memory_of_others(of_host, host, limits.foreign_growth_gib)
        if isinstance(judgement, str):
            return judgement
        doubt = doubt or judgement
    return doubt or _busier_than_ahead(record, windows, limits.foreign_busy_share)


def _memory_of_others(of_host: Samples, host: str, most_gib: float) -> Judgement:
    if (of_host.get("processes") or 0) > 0:
        return f"{of_host['processes']} more in the driver's list of processes{host}"
    if of_host.get("foreign_bytes") is not None:
        foreign_gib = of_host["foreign_bytes"] / GIB
        if foreign_gib > most_gib:
            return f"memory that is not the run's grew by {foreign_gib:.1f} GiB{host}"
        return None
    grown_gib = (of_host.get("grown_bytes") or 0) / GIB
    if grown_gib <= most_gib:
        return None
    text = f"memory in use grew by {grown_gib:.1f} GiB{host}, whose is not known"
    if of_host.get("processes") is not None:
        return unchecked(f"{text}; the driver lists no process more")
    return CheckOutcome("suspect", text)


def _busier_than_ahead(record: Record, windows: Sequence[Samples], most: float) -> Judgement:
    if record.cell.servers:
        return None  # steps wait for servers, and the GPU is busy meanwhile
    busy_percents = []
    for of_host in windows:
        if of_host.get("busy_percent") is not None:
            busy_percents.append(of_host["busy_percent"])
    ahead_ms, step_ms = record.metrics.get("gpu/busy_ms"), record.metrics.get("step/ms_median")
    is_memory_known = all(of_host.get("foreign_bytes") is not None for of_host in windows)
    if len(busy_percents) < len(windows) or not ahead_ms or not step_ms:
        if is_memory_known:
            return None  # a program there would hold memory
        return unchecked("no sample tells whose memory it is, nor how busy the GPUs were")
    is_launch_bound = record.metrics.get("step/launch_ms", 0.0) > LAUNCH_BOUND * step_ms
    if is_memory_known and is_launch_bound and record.cell.world_size > 1:
        return None  # a kernel of NCCL waits for what another rank launches late, and is busy
    busy, ahead = min(busy_percents) / 100, min(1.0, ahead_ms / step_ms)
    # Where steps vary, so does their share of the windows. NaN, of too few windows, counts as 0.
    if busy - ahead <= most + max(0.0, record.checks.get("half_width") or 0.0):
        return None
    text = (
        f"the GPUs were busy {100 * busy:.0f} % of the timed windows, in which the same steps, "
        f"launched ahead, need {100 * ahead:.0f} %"
    )
    return CheckOutcome("suspect", text)


@check("suspect", "other programs used the CPU: {}")
def foreign_cpu(record: Record, limits: ValidityLimits) -> Judgement:
    """while something was measured, other programs used more than {foreign_cpu_limit} of the CPU
    time of the run's cores

    Stop other programs on this machine and run again with resume=false.
    """
    if "cpu_samples" not in record.checks:
        return unchecked("the load of the CPU was not sampled")

    def judge(samples: Samples, host: str) -> Judgement:
        if not samples:
            return unchecked(f"the load of the CPU{host} was not sampled")
        shares = samples["others_share"]
        if not shares:
            return unchecked("nothing was measured for as long as a second")
        name = max(shares, key=shares.get)
        if shares[name] <= limits.foreign_cpu_limit:
            return None
        phase = name.replace("exposed", "exposed-communication")
        return (
            f"{100 * shares[name]:.1f} % of {samples['cores']} cores{host} in the {phase} phase, "
            f"allowed {100 * limits.foreign_cpu_limit:.0f} %"
        )

    return _worst_host(record, "cpu_samples", record.cell.every_host, judge)


def _worst_host(
    record: Record, kind: str, hosts: Sequence[str], judge: Callable[[Samples, str], Judgement]
) -> Judgement:
    """Judge the samples of each host, its place in words; return what failed before the rest."""
    samples = record.checks[kind]
    if not hosts:
        return judge(samples, "")
    of_hosts = samples.get("hosts", [samples])
    skipped: Judgement = None
    for position, host in enumerate(hosts):
        own: Samples = {}
        if position < len(of_hosts):
            own = of_hosts[position]
        judgement = judge(own, f" on host {host}")
        if isinstance(judgement, str) and judgement:
            return judgement
        skipped = skipped or judgement
    return skipped
