"""How long each bucket's exchange takes alone, for every strategy: its structure in terms of links and of host memory.

A strategy is one function (question, machine) -> time of each bucket, and one line of STRATEGIES. `occupies` says whether the
exchange runs on the GPU's multiprocessors, and so slows compute by γ, or on copy engines. `waits` says whether a step waits for
the other ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, about, exactly
from analysis.prediction.links.model import (
    ASSUMED,
    DIRECT,
    HOST_MEMORY,
    MEASURED,
    OF_NETWORK,
    SCALED,
    ExchangeWire,
    KnownLinks,
    NoLink,
    Timed,
)

BY_NCCL = ("nccl_allreduce", "kvstore_device", "hierarchical")  # NCCL's settings reach them; its log says their wire
GPU_SERVERS = ("kvstore_dist_sync_device", "kvstore_dist_async_device")  # servers that keep weights on a GPU
HOST_SCATTER = 0.10  # of host memory, from one number of GPUs to another


@dataclass(frozen=True)
class HostLink:
    """Copies between host memory and all GPUs at once, both ways: {GPUs: GB/s in sum}."""

    sums_gb_per_s: Mapping[int, float] = field(default_factory=dict)

    def at(self, gpus: int) -> tuple[float, str] | None:
        """Return the sum for a number of GPUs at once, and where it comes from; None where nothing was measured.

        Between 1 and k GPUs the share that each loses to every other is fitted: sum(n) = n · sum(1) ÷ (1 + s · (n − 1)).
        """
        known = self.sums_gb_per_s
        if gpus in known:
            return known[gpus], MEASURED
        if not known:
            return None
        most = max(known)
        one = known.get(1, known[min(known)] / min(known))
        shared = max(0.0, (most * one / known[most] - 1) / (most - 1)) if most > 1 else 0.0
        return gpus * one / (1 + shared * (gpus - 1)), SCALED


@dataclass(frozen=True)
class Known:
    """What the exchange of a strategy may rest on."""

    links: KnownLinks
    host: HostLink = field(default_factory=HostLink)

    def by_structure(self) -> "Known":
        """Return the same with units for copies that were not measured: only ratios of its times mean something.

        Host memory is then taken as shared by all GPUs.
        """
        copies = {transport: 1.0 for transport in (DIRECT, HOST_MEMORY)} | {**self.links.copies_gb_per_s}
        host = self.host if self.host.sums_gb_per_s else HostLink({1: 1.0, 2: 1.0})
        return Known(replace(self.links, copies_gb_per_s=copies), host)


def _all_reduce(question: Question, size: float, known: Known) -> list[Timed]:
    """Return one all-reduce."""
    return [_call(question, "all_reduce", size, known)]


def _kvstore_device(question: Question, size: float, known: Known) -> list[Timed]:
    """Return the collectives of `reduce`, one after the other."""
    kind = collective(question)
    assert kind
    return [_call(question, kind, size, known)]


def _hierarchical(question: Question, size: float, known: Known) -> list[Timed]:
    """Return reduce-scatter inside each host, all-reduce of each share between hosts, all-gather inside."""
    links, wire = known.links, ExchangeWire(DIRECT, question.wire.settings)
    inside = [
        links.time(kind, size, question.gpus, wire) for kind in ("reduce_scatter", "all_gather") if question.gpus > 1
    ]
    if question.hosts == 1:
        return inside
    share = size / question.gpus
    network = question.network
    if network is not None:  # each share has its part of the NICs
        rate = network.host_gb_per_s / question.gpus
        network = type(network)(1, rate, network.latency_us)
    return [*inside, links.time("all_reduce", share, question.hosts, question.wire, question.hosts, network)]


def _cpu_staged(question: Question, size: float, known: Known) -> list[Timed]:
    """Return every rank's gradient to host memory and the result back, and the sums of several hosts over the network.

    Sharded, each rank stages its share alone.
    """
    between = [_between_hosts(question, size)] if question.hosts > 1 else []
    if question.option("staging", "full") == "sharded":
        inside = [_call(question, kind, size, known) for kind in ("reduce_scatter", "all_gather")]
        return [*inside, _through_host(question, 2 * size, known), *between]
    return [_through_host(question, 2 * size * question.gpus, known), *between]


def _host_servers(question: Question, size: float, known: Known) -> list[Timed]:
    """Return n gradients into the servers' host memory and n times the weights back, over all servers."""
    moved = 2 * size * question.gpus
    if question.network is not None and question.hosts > 1:
        return [_over_network(question, size)]
    return [_through_host(question, moved, known)]


def _device_servers(question: Question, size: float, known: Known) -> list[Timed]:
    """Return n gradients into each server's GPU, then n times the weights out of it, over its link."""
    if question.network is not None and question.hosts > 1:
        return [_over_network(question, size)]
    rate = known.links.copies_gb_per_s.get(question.wire.transport)
    if rate is None:
        raise NoLink(f"no peer copy over {question.wire.transport} was measured; add a cell of benchmark=p2p")
    into = question.ranks * size / max(1, question.servers) / rate / 1e6
    return [Timed(about(into, HOST_SCATTER, "server"), MEASURED)] * 2


def _nothing(question: Question, size: float, known: Known) -> list[Timed]:
    """Return no time: there is no exchange."""
    return []


def _call(question: Question, kind: str, size: float, known: Known) -> Timed:
    """Return the time of one collective over the wire of a question. Raises NoLink."""
    return known.links.time(kind, size, question.ranks, question.wire, question.hosts, question.network)


def _through_host(question: Question, moved_bytes: float, known: Known) -> Timed:
    """Return the time of bytes that all GPUs move through host memory together. Raises NoLink."""
    found = known.host.at(question.gpus)
    if found is None:
        raise NoLink("the host link was not measured; add a cell of benchmark=host_link")
    rate, source = found
    name = f"host {question.gpus if source != MEASURED else ''}"
    return Timed(about(moved_bytes / rate / 1e6, HOST_SCATTER if source != MEASURED else 0.02, name), source)


def _between_hosts(question: Question, size: float) -> Timed:
    """Return an all-reduce of host memory over the network. Raises NoLink."""
    network = question.network
    if network is None:
        raise NoLink("what host memory sends between hosts was not measured; say --net")
    steps = 2 * (question.hosts - 1)
    ms = steps * (size / question.hosts / network.host_gb_per_s / 1e6 + network.latency_us / 1e3)
    return Timed(about(ms, OF_NETWORK, f"hosts {network}"), ASSUMED)


def _over_network(question: Question, size: float) -> Timed:
    """Return the time of servers on other hosts: all ranks' bytes into the servers' NICs."""
    network = question.network
    assert network is not None
    ms = question.ranks * size / max(1, question.servers) / network.host_gb_per_s / 1e6 + network.latency_us / 1e3
    return Timed(about(ms, OF_NETWORK, f"{network}"), ASSUMED)


@dataclass(frozen=True)
class StrategyShape:
    """What a forecast must know of a strategy."""

    exchange: Callable[[Question, float, Known], list[Timed]]
    occupies: bool = True  # the multiprocessors of the ranks' GPUs
    waits: bool = True  # for all other ranks, in every step


STRATEGIES: Mapping[str, StrategyShape] = {
    "nccl_allreduce": StrategyShape(_all_reduce),
    "kvstore_device": StrategyShape(_kvstore_device),
    "hierarchical": StrategyShape(_hierarchical),
    "cpu_staged": StrategyShape(_cpu_staged, occupies=False),
    "kvstore_local": StrategyShape(_cpu_staged, occupies=False),
    "kvstore_dist_sync": StrategyShape(_host_servers, occupies=False),
    "kvstore_dist_async": StrategyShape(_host_servers, occupies=False, waits=False),
    "kvstore_dist_sync_device": StrategyShape(_device_servers),
    "kvstore_dist_async_device": StrategyShape(_device_servers, waits=False),
    "none": StrategyShape(_nothing, occupies=False, waits=False),
}


def strategy(name: str) -> StrategyShape:
    """Return what is known of a strategy. Raises ValueError for one of the user's own."""
    if name not in STRATEGIES:
        raise ValueError(
            f"strategy {name!r}: no forecast knows how it sends gradients; known are {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]


def collective(question: Question) -> str | None:
    """Return the collective of a bucket; None where a strategy has none that goes over one kind of wire alone."""
    if question.strategy == "kvstore_device":
        return (
            "reduce + broadcast" if question.option("reduce", "sharded") == "owner" else "reduce_scatter + all_gather"
        )
    return "all_reduce" if question.strategy == "nccl_allreduce" and not question.low_rank else None


def occupies(question: Question) -> bool:
    """Tell whether the exchange takes multiprocessors from the ranks: a server on a GPU of its own does not."""
    return strategy(question.strategy).occupies and (question.shares_gpu or question.strategy not in GPU_SERVERS)


def bucket_times(question: Question, buckets: tuple[float, ...], known: Known) -> tuple[list[Values], set[str]]:
    """Return the time of each bucket alone in ms, and where they come from. Raises NoLink, ValueError."""
    if question.ranks < 2:
        return [exactly(0.0) for _ in buckets], {MEASURED}
    found = {size: strategy(question.strategy).exchange(question, size, known) for size in set(buckets)}
    times = [sum((one.ms for one in found[size]), exactly(0.0)) for size in buckets]
    return times, {one.source for several in found.values() for one in several}
