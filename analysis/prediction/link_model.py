"""How long a collective or a copy takes: by the links that were measured, else by α–β scaling.

A curve is what was measured of one collective over one wire on one number of ranks. Between its
sizes the time is interpolated. On other numbers of ranks the part that does not depend on size (α)
grows by one hop a step, and the part that does (β) with the bytes that each rank sends, as
nccl-tests counts them.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from analysis.prediction.distributions import Draws, constant, scaled_normal
from benchmarks.collectives.request import COLLECTIVES
from benchmarks.timing.statistics import FEWEST_SIZES, fit

DIRECT, HOST_MEMORY, NETWORK = "direct", "host memory", "network"
WAYS = {
    DIRECT: "directly between GPUs",
    HOST_MEMORY: "over host memory",
    NETWORK: "over the network",
}
AND = " + "  # between the collectives of one exchange
# Standard deviations as shares.
BETWEEN_RUNS = 0.02  # of a collective that was measured once
FOR_TWICE_THE_RANKS = 0.08  # of α–β scaling: what is aimed at, no measurement
OF_HOST_MEMORY = 0.10  # from one number of GPUs to another
OF_NETWORK = 0.25  # how far a network is from its description
# NCCL's own latencies for small messages (protocol LL) of a ring: src/graph/tuning.cc of NCCL 2.28
# and 2.30.
BASE_US = 6.6
HOP_US = {DIRECT: 0.6, HOST_MEMORY: 1.0, NETWORK: 2.7}
TREE_SHARE = 0.92  # of the bandwidth, that NCCL's tree reaches (src/graph/tuning.cc)
NETWORK_FORM = "NICs per host x GB/s of each, then the latency: 8x50GB/s,5us (1 GB/s = 8 Gbit/s)"
# Distance by NCCL's levels; a link class of nvidia-smi is one of them: NV# is NVL.
LEVELS = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 5, "SYS": 6}
DEFAULT_LEVEL = "PXB"  # up to which GPUs copy to each other (src/graph/paths.cc)
# Settings that choose the transport, and those that change no time: no part of the wire.
NOT_OF_THE_WIRE = (
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_FILE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_RAS_ENABLE",
)


@dataclass(frozen=True)
class ExchangeWire:
    """What carries the exchange."""

    transport: str  # DIRECT, HOST_MEMORY or NETWORK
    settings: tuple[tuple[str, str], ...] = ()  # of NCCL, that choose what runs over it

    def __str__(self) -> str:
        return self.transport + self._typed(" ")

    @property
    def way(self) -> str:
        """The wire in a sentence: `directly between GPUs with ALGO=Ring`."""
        return WAYS[self.transport] + self._typed(" with ")

    def _typed(self, before: str) -> str:
        typed = [f"{name.removeprefix('NCCL_')}={value}" for name, value in self.settings]
        if not typed:
            return ""
        return before + " ".join(typed)


def requested_wire(nccl: Mapping[str, str], link_class: str | None, hosts: int = 1) -> ExchangeWire:
    """Return the wire that a cell should get; `link_class` is the farthest between its GPUs."""
    settings = tuple(
        (name, str(value)) for name, value in sorted(nccl.items()) if name not in NOT_OF_THE_WIRE
    )
    if hosts > 1:
        return ExchangeWire(NETWORK, settings)
    distance = "NVL"
    if link_class and not link_class.startswith("NV"):
        distance = link_class
    level = str(nccl.get("NCCL_P2P_LEVEL") or DEFAULT_LEVEL)
    reach = LEVELS.get(level, LEVELS[DEFAULT_LEVEL])
    has_peer_access = LEVELS.get(distance, LEVELS["SYS"]) <= reach
    if has_peer_access and str(nccl.get("NCCL_P2P_DISABLE", "0")) != "1":
        return ExchangeWire(DIRECT, settings)
    if str(nccl.get("NCCL_SHM_DISABLE", "0")) == "1":
        return ExchangeWire(NETWORK, settings)
    return ExchangeWire(HOST_MEMORY, settings)


def used_wire(transport: str | None, requested: ExchangeWire) -> ExchangeWire:
    """Return the wire by NCCL's log (`P2P/CUMEM over NV18`); as asked where it does not say."""
    for prefix, used in (("P2P", DIRECT), ("SHM", HOST_MEMORY), ("NET", NETWORK)):
        if transport and transport.startswith(prefix):
            return replace(requested, transport=used)
    return requested


@dataclass(frozen=True)
class HostNetwork:
    """The network between hosts as the user describes it; nothing of it was measured."""

    host_gb_per_s: float  # what a host sends with all its NICs
    latency_us: float  # from one host to another


def read_network(text: str) -> HostNetwork:
    """Read the argument of --net. Raises ValueError."""
    form = r"(\d{1,3})x(\d{1,5}(?:\.\d+)?)GB/s,(\d{1,5}(?:\.\d+)?)us"
    match = re.fullmatch(form, text.replace(" ", ""), re.IGNORECASE | re.ASCII)
    if not match:
        raise ValueError(f"--net {text!r}: expected {NETWORK_FORM}")
    if int(match[1]) * float(match[2]) == 0:
        raise ValueError(f"--net {text!r}: expected NICs and GB/s above 0, such as 8x50GB/s,5us")
    return HostNetwork(int(match[1]) * float(match[2]), float(match[3]))


@dataclass(frozen=True)
class TimeCurve:
    """Times of one collective by size, ascending, on all ranks of `hosts` hosts."""

    kind: str  # all_reduce, or two: reduce_scatter + all_gather
    wire: ExchangeWire
    ranks: int
    hosts: int
    sizes_bytes: tuple[float, ...]
    times_us: tuple[float, ...]
    record_id: str
    of_gradients: bool = False  # an exchange of whole gradients: counts where nothing else is known


@dataclass(frozen=True)
class LinkModel:
    """The links of a machine as far as they were measured."""

    curves: tuple[TimeCurve, ...] = ()
    copies_gb_per_s: Mapping[str, float] = field(default_factory=dict)  # {transport: peer copy}
    # {GPUs: GB/s in sum} of copies between host memory and so many GPUs at once, both ways.
    host_gb_per_s: Mapping[int, float] = field(default_factory=dict)
    network: HostNetwork | None = None  # between hosts, in place of what was measured of it
    # The curves that were looked for, of thousands.
    _nearest: dict[Any, TimeCurve] = field(default_factory=dict, init=False, compare=False)

    def time(
        self, kind: str, size_bytes: float, ranks: int, wire: ExchangeWire, hosts: int = 1
    ) -> Draws:
        """Return the time of a collective in ms. Raises ValueError for a wire that is not known."""
        if ranks < 2:
            return constant(0.0)
        network = self.network
        if hosts > 1 and network is not None:  # the faster of a ring and a tree
            gpus = ranks // hosts
            gb_per_s, base_us, hop_us = network.host_gb_per_s, BASE_US, HOP_US[DIRECT]
            if gpus > 1:
                curve = self._nearest_curve(kind, gpus, ExchangeWire(DIRECT, wire.settings))
                fixed_us, growing_us = _alpha_beta(curve, size_bytes)
                base_us = max(base_us, fixed_us - hop_us * _ring_steps(kind, curve.ranks))
                if growing_us > 0:
                    inner_rate = size_bytes * _sent_share(kind, curve.ranks) / growing_us / 1e3
                    gb_per_s = min(gb_per_s, inner_rate)
            steps_between = _ring_steps(kind, hosts)
            steps_inside = _ring_steps(kind, ranks) - steps_between
            fastest_us = base_us + steps_inside * hop_us + steps_between * network.latency_us
            fastest_us += size_bytes * _sent_share(kind, ranks) / gb_per_s / 1e3
            if kind == "all_reduce":
                hops_us = (gpus - 1) * hop_us + math.log2(hosts) * network.latency_us
                sent_us = 2 * size_bytes / (gb_per_s * TREE_SHARE) / 1e3
                fastest_us = min(fastest_us, base_us + 2 * hops_us + sent_us)
            share = math.hypot(BETWEEN_RUNS, OF_NETWORK)
            return scaled_normal(fastest_us / 1e3, share, f"{kind} {network} {hosts}")
        parts = kind.split(AND)
        of_parts = {(part, wire.transport) for part in parts}
        if (kind, wire.transport) not in self._measured and of_parts <= self._measured:
            times = [self.time(part, size_bytes, ranks, wire, hosts) for part in parts]
            return np.asarray(sum(times))
        curve = self._nearest_curve(kind, ranks, wire, hosts > 1)
        fixed_us, growing_us = _alpha_beta(curve, size_bytes)
        share = BETWEEN_RUNS
        if (curve.ranks, curve.hosts) != (ranks, hosts):
            more_steps = _ring_steps(kind, ranks) - _ring_steps(kind, curve.ranks)
            fixed_us = max(fixed_us + HOP_US[wire.transport] * more_steps, 0.0)
            growing_us *= _sent_share(kind, ranks) / _sent_share(kind, curve.ranks)
            doublings = abs(math.log2(ranks / curve.ranks))
            share = math.hypot(share, FOR_TWICE_THE_RANKS * doublings)
        return scaled_normal((fixed_us + growing_us) / 1e3, share, f"{kind} {curve.record_id}")

    def host_copies(self, gpus: int, moved_bytes: float) -> Draws:
        """Return the ms in which all GPUs move bytes through host memory together.

        Between 1 and k GPUs the share s that each loses to every other is fitted:
        sum(n) = n · sum(1) ÷ (1 + s · (n − 1)). Raises ValueError.
        """
        rates = self.host_gb_per_s
        if not rates:
            raise ValueError("the host link was not measured; add a run of benchmark=host_link")
        if gpus in rates:
            return scaled_normal(moved_bytes / rates[gpus] / 1e6, BETWEEN_RUNS, "host ")
        most = max(rates)
        alone = rates.get(1, rates[min(rates)] / min(rates))
        lost = 0.0
        if most > 1:
            lost = max(0.0, (most * alone / rates[most] - 1) / (most - 1))
        rate = gpus * alone / (1 + lost * (gpus - 1))
        return scaled_normal(moved_bytes / rate / 1e6, OF_HOST_MEMORY, f"host {gpus}")

    @functools.cached_property
    def with_unit_copies(self) -> "LinkModel":
        """The same with 1 GB/s for copies that were not measured: only ratios of their times mean
        something. Host memory is taken as shared by all GPUs.
        """
        copies = {DIRECT: 1.0, HOST_MEMORY: 1.0, **self.copies_gb_per_s}
        host = self.host_gb_per_s or {1: 1.0, 2: 1.0}
        return replace(self, copies_gb_per_s=copies, host_gb_per_s=host)

    @functools.cached_property
    def _measured(self) -> set[tuple[str, str]]:
        """The collectives that were measured on each transport, apart from gradients."""
        return {
            (curve.kind, curve.wire.transport) for curve in self.curves if not curve.of_gradients
        }

    def _nearest_curve(
        self, kind: str, ranks: int, wire: ExchangeWire, across_hosts: bool = False
    ) -> TimeCurve:
        key = kind, ranks, wire, across_hosts
        if key in self._nearest:
            return self._nearest[key]

        def distance(curve: TimeCurve) -> tuple[float, ...]:
            return (
                curve.wire != wire,
                curve.of_gradients,
                abs(math.log(curve.ranks / ranks)),
                -len(curve.sizes_bytes),
            )

        alike = []
        for curve in self.curves:
            there = curve.kind, curve.wire.transport, curve.hosts > 1
            if there == (kind, wire.transport, across_hosts):
                alike.append(curve)
        if alike:
            self._nearest[key] = min(alike, key=distance)
            return self._nearest[key]
        what_to_add = "; add a training run on several GPUs, or one of benchmark=collectives"
        if across_hosts:
            what_to_add = (
                " between hosts; add a run with nodes=, or describe the network: --net 8x50GB/s,5us"
            )
        raise ValueError(f"no {kind} {wire.way} was measured{what_to_add}")


def _sent_share(kind: str, ranks: int) -> float:
    """Return the bytes that each rank sends, as a share of the message (busbw ÷ algbw)."""
    return sum(COLLECTIVES[part].factor(ranks) for part in kind.split(AND))


def _ring_steps(kind: str, ranks: int) -> int:
    trips = sum(max(1, COLLECTIVES[part].trips) for part in kind.split(AND))
    return trips * (ranks - 1)


_fit_once = functools.lru_cache(maxsize=256)(fit)  # every forecast asks for the same


def _alpha_beta(curve: TimeCurve, size_bytes: float) -> tuple[float, float]:
    """Return the part of a time that does not depend on size, and the part that does, in µs.

    One or two sizes cannot tell them apart: then the first is NCCL's latency.
    """
    sizes, times_us = curve.sizes_bytes, curve.times_us
    if len(sizes) < FEWEST_SIZES:
        latency_us = BASE_US + HOP_US[curve.wire.transport] * _ring_steps(curve.kind, curve.ranks)
        fixed_us = min(latency_us, times_us[-1])
        return fixed_us, (times_us[-1] - fixed_us) * size_bytes / sizes[-1]
    whole_us = float(np.interp(size_bytes, sizes, times_us))
    if size_bytes > sizes[-1]:
        whole_us = times_us[-1] * size_bytes / sizes[-1]
    fitted = _fit_once(tuple(map(int, sizes)), times_us)
    assert fitted is not None
    for piece in fitted.pieces:  # the last one counts beyond them too
        if size_bytes <= piece.to_bytes:
            break
    fixed_us = min(piece.alpha_us, whole_us)
    return fixed_us, whole_us - fixed_us
