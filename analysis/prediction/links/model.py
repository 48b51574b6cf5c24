"""How long a collective takes: c(bytes, ranks, wire), from measured sizes where there are any, else by NCCL's own structure.

A curve is what was measured of one collective over one wire with one number of ranks. Between its sizes the time is
interpolated. Other numbers of ranks follow from the structure of a ring: what does not depend on size gains one hop a step,
what does depends on the bytes that each rank sends (nccl-tests' factor). A wire without a curve gets that of another one, with
the bandwidth in proportion to that of the peer copies over both. Hosts that were not measured are joined by the network that
the user describes. Each answer says which of these it is.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from analysis.prediction.draws import Values, about, exactly
from analysis.prediction.links.nccl_constants import LL, RING, constants
from analysis.prediction.links.network import HostNetwork
from analysis.prediction.links.ring import TOGETHER, NvLinks, factor, is_ring, modelled_us, steps
from benchmarks.timing.alpha_beta import FEWEST_SIZES, Piece, fit

DIRECT, HOST_MEMORY, NETWORK = "direct", "host memory", "network"
WAYS = {
    DIRECT: "directly between ranks",
    HOST_MEMORY: "over host memory",
    NETWORK: "over the network",
}
MEASURED, SCALED, BY_COPIES, ASSUMED = (
    "measured",
    "other number of ranks",
    "by peer copies",
    "assumed network",
)
SOURCES = (MEASURED, SCALED, BY_COPIES, ASSUMED)  # from the best known to the least
SCATTER = 0.02  # of a collective between runs, where it was measured once
OF_STRUCTURE = 0.08  # error of NCCL's structure from one number of ranks to another: the goal for collectives, no measurement
OF_COPIES = 0.25  # how far wires differ in what a collective makes of them
OF_NETWORK = 0.25  # how far a network is from its description


class NoLink(ValueError):
    """Nothing is known of a wire that a forecast needs."""


@dataclass(frozen=True)
class ExchangeWire:
    """What carries the exchange."""

    transport: str  # DIRECT, HOST_MEMORY or NETWORK
    settings: tuple[
        tuple[str, str], ...
    ] = ()  # of NCCL, that choose what runs over it: ALGO, PROTO, channels

    def __str__(self) -> str:
        return " ".join([self.transport, *self._set()])

    @property
    def way(self) -> str:
        """The wire in a sentence: `directly between ranks with ALGO=Ring`."""
        return " with ".join(filter(None, [WAYS[self.transport], " ".join(self._set())]))

    def _set(self) -> list[str]:
        return [f"{name.removeprefix('NCCL_')}={value}" for name, value in self.settings]


@dataclass(frozen=True)
class TimeCurve:
    """Times of one collective by size, ascending, all ranks of `hosts` hosts."""

    kind: str
    wire: ExchangeWire
    ranks: int
    hosts: int
    sizes_bytes: tuple[float, ...]
    times_us: tuple[float, ...]
    source: str  # the record
    of_gradients: bool = (
        False  # of the exchange of whole gradients: it counts where nothing else is known
    )


@dataclass(frozen=True)
class Timed:
    """The time of one collective in ms, and where it comes from."""

    ms: Values
    source: str  # MEASURED, SCALED, BY_COPIES or ASSUMED
    record: str = ""


@dataclass(frozen=True)
class KnownLinks:
    """The links of a machine as far as they are known."""

    curves: tuple[TimeCurve, ...] = ()
    copies_gb_per_s: Mapping[str, float] = field(
        default_factory=dict
    )  # {transport: peer copy one way}
    nccl: str | None = None
    nvlinks: NvLinks | None = None  # None: not alike between every two GPUs, or not known

    def time(
        self,
        kind: str,
        size_bytes: float,
        ranks: int,
        wire: ExchangeWire,
        hosts: int = 1,
        network: HostNetwork | None = None,
    ) -> Timed:
        """Return the time of a collective. Raises NoLink."""
        if ranks < 2:
            return Timed(exactly(0.0), MEASURED)
        if hosts > 1 and network is not None:
            return self._over(network, kind, size_bytes, ranks, wire, hosts)
        if (
            TOGETHER in kind
            and not self.has(kind, wire)
            and all(self.has(one, wire) for one in kind.split(TOGETHER))
        ):
            parts = [self.time(one, size_bytes, ranks, wire, hosts) for one in kind.split(TOGETHER)]
            whole = sum((one.ms for one in parts), exactly(0.0))
            return Timed(
                whole, max((one.source for one in parts), key=SOURCES.index), parts[0].record
            )
        curve, source = self._nearest(kind, ranks, wire, hosts)
        share = SCATTER
        if (curve.ranks, curve.hosts) == (ranks, hosts):
            fixed, growing = self._split(curve, size_bytes)
        else:
            fixed, growing = self._on_other_ranks(curve, size_bytes, ranks)
            share = math.hypot(
                share, OF_STRUCTURE * math.log2(max(ranks, curve.ranks) / min(ranks, curve.ranks))
            )
        if source == BY_COPIES:
            growing *= (
                self.copies_gb_per_s[curve.wire.transport] / self.copies_gb_per_s[wire.transport]
            )
            share = math.hypot(share, OF_COPIES)
        return Timed(
            about((fixed + growing) / 1e3, share, f"{kind} {curve.source} {source}"),
            source,
            curve.source,
        )

    @functools.cached_property
    def joined(self) -> tuple[TimeCurve, ...]:
        """The curves, those of one collective, wire and number of ranks as one."""
        return joined(self.curves)

    def has(self, kind: str, wire: ExchangeWire) -> bool:
        """Tell whether a collective was measured on a wire, apart from gradients."""
        return any(
            one.kind == kind and one.wire.transport == wire.transport and not one.of_gradients
            for one in self.curves
        )

    def _nearest(
        self, kind: str, ranks: int, wire: ExchangeWire, hosts: int
    ) -> tuple[TimeCurve, str]:
        """Return the curve that is nearest to what is asked, and how it must be used."""
        alike = [one for one in self.joined if one.kind == kind and (one.hosts > 1) == (hosts > 1)]
        for found in (
            [one for one in alike if one.wire == wire],
            [one for one in alike if one.wire.transport == wire.transport],
        ):
            found = [one for one in found if not one.of_gradients] or found
            if found:
                curve = min(
                    found, key=lambda one: (abs(math.log(one.ranks / ranks)), -len(one.sizes_bytes))
                )
                same = (curve.ranks, curve.hosts) == (ranks, hosts) and curve.wire == wire
                return curve, MEASURED if same else SCALED
        if wire.transport in self.copies_gb_per_s:
            found = [one for one in alike if one.wire.transport in self.copies_gb_per_s]
            if found:
                return min(found, key=lambda one: abs(math.log(one.ranks / ranks))), BY_COPIES
        between = (
            " between hosts; say --net"
            if hosts > 1
            else "; add a training cell of several ranks, or one of benchmark=collectives"
        )
        raise NoLink(f"no {kind} {wire.way} was measured{between}")

    def _over(
        self,
        network: HostNetwork,
        kind: str,
        size_bytes: float,
        ranks: int,
        wire: ExchangeWire,
        hosts: int,
    ) -> Timed:
        """Return the time over hosts that nobody measured: the faster of a ring and a tree, by NCCL's model."""
        inside = ranks // hosts
        known = constants(self.nccl)[0]
        hop, bandwidth = known.hop_us[(DIRECT, RING, LL)], network.host_gb_per_s
        base, source = self._base_us(), ""
        if inside > 1:
            curve, _ = self._nearest(kind, inside, ExchangeWire(DIRECT, wire.settings), 1)
            hop, source = self._hop_us(curve.wire), curve.source
            fixed, growing = _split(curve, size_bytes, hop, base)
            base = max(fixed - hop * steps(kind, curve.ranks), base)
            if growing > 0:
                bandwidth = min(bandwidth, size_bytes * factor(kind, curve.ranks) / growing / 1e3)
        between = steps(kind, hosts)
        ring = base + (steps(kind, ranks) - between) * hop + between * network.latency_us
        ring += size_bytes * factor(kind, ranks) / bandwidth / 1e3
        times = [ring]
        if kind == "all_reduce":
            tree = base + 2 * ((inside - 1) * hop + math.log2(hosts) * network.latency_us)
            times.append(tree + 2 * size_bytes / (bandwidth * known.tree_share) / 1e3)
        share = math.hypot(SCATTER, OF_NETWORK)
        return Timed(about(min(times) / 1e3, share, f"{kind} {network} {hosts}"), ASSUMED, source)

    def _split(self, curve: TimeCurve, size_bytes: float) -> tuple[float, float]:
        """Return the time of a curve's collective at a size in parts, fixed and growing with the size, in µs."""
        return _split(curve, size_bytes, self._hop_us(curve.wire), self._base_us())

    def _on_other_ranks(
        self, curve: TimeCurve, size_bytes: float, ranks: int
    ) -> tuple[float, float]:
        """Return the parts of the time of a curve's collective on another number of ranks, in µs."""
        kind, there = curve.kind, curve.ranks
        if (
            self.nvlinks
            and is_ring(kind)
            and curve.wire == ExchangeWire(DIRECT)
            and curve.hosts == 1
        ):
            known = constants(self.nccl)[0]
            alike = size_bytes * there / ranks  # what gives every rank an equal share
            fixed, growing = self._split(curve, alike)
            more = modelled_us(kind, size_bytes, ranks, self.nvlinks, known)
            return fixed, max(
                growing + more - modelled_us(kind, alike, there, self.nvlinks, known), 0.0
            )
        fixed, growing = self._split(curve, size_bytes)
        more = self._hop_us(curve.wire) * (steps(kind, ranks) - steps(kind, there))
        return max(fixed + more, 0.0), growing * factor(kind, ranks) / factor(kind, there)

    def _base_us(self) -> float:
        """Return the µs that NCCL takes before the first step of a ring of small messages (protocol LL)."""
        return constants(self.nccl)[0].base_us[(RING, LL)]

    def _hop_us(self, wire: ExchangeWire) -> float:
        """Return the latency of a step: from the smallest messages of two numbers of ranks if there are, else NCCL's own."""
        least: dict[int, list[float]] = {}
        for one in self.curves:
            if (
                one.kind == "all_reduce"
                and one.hosts == 1
                and one.wire == wire
                and one.sizes_bytes[0] <= 4096
            ):
                least.setdefault(one.ranks, []).append(min(one.times_us))
        if len(least) > 1:
            few, many = min(least), max(least)
            found = (np.median(least[many]) - np.median(least[few])) / (2 * (many - few))
            if found > 0:
                return float(found)
        return constants(self.nccl)[0].hop_us[(wire.transport, RING, LL)]


def _split(
    curve: TimeCurve, size_bytes: float, hop_us: float, base_us: float
) -> tuple[float, float]:
    """Return what of a time does not depend on size, and what does, in µs.

    One or two sizes cannot tell them apart: then the first is NCCL's latency.
    """
    if len(curve.sizes_bytes) < FEWEST_SIZES:
        fixed = min(base_us + hop_us * steps(curve.kind, curve.ranks), curve.times_us[-1])
        return fixed, (curve.times_us[-1] - fixed) * size_bytes / curve.sizes_bytes[-1]
    pieces = _pieces(curve.sizes_bytes, curve.times_us)
    piece = next((one for one in pieces if size_bytes <= one.to_bytes), pieces[-1])
    whole = _interpolated(curve, size_bytes)
    fixed = min(piece.alpha_us, whole)
    return fixed, whole - fixed


@functools.lru_cache(maxsize=256)
def _pieces(sizes_bytes: tuple[float, ...], times_us: tuple[float, ...]) -> tuple[Piece, ...]:
    """Return the lines of a fit of times to sizes; kept, as every forecast asks for the same."""
    found = fit([int(one) for one in sizes_bytes], times_us)
    assert found is not None
    return found.pieces


def _interpolated(curve: TimeCurve, size_bytes: float) -> float:
    """Return the time at a size: on a line between two sizes, at the last bandwidth above, the first time below."""
    sizes, times = curve.sizes_bytes, curve.times_us
    if size_bytes <= sizes[0]:
        return times[0]
    if size_bytes >= sizes[-1]:
        return times[-1] * size_bytes / sizes[-1]
    return float(np.interp(size_bytes, sizes, times))


def joined(curves: Iterable[TimeCurve]) -> tuple[TimeCurve, ...]:
    """Return curves of one collective, wire and ranks as one each, with the median time of every size."""
    alike: dict[tuple[str, ExchangeWire, int, int, bool], list[TimeCurve]] = {}
    for one in curves:
        alike.setdefault((one.kind, one.wire, one.ranks, one.hosts, one.of_gradients), []).append(
            one
        )
    made = []
    for (kind, wire, ranks, hosts, of_gradients), several in alike.items():
        times: dict[float, list[float]] = {}
        for one in several:
            for size, time in zip(one.sizes_bytes, one.times_us, strict=True):
                times.setdefault(size, []).append(time)
        sizes = tuple(sorted(times))
        medians = tuple(float(np.median(times[size])) for size in sizes)
        made.append(
            TimeCurve(kind, wire, ranks, hosts, sizes, medians, several[0].source, of_gradients)
        )
    return tuple(made)
