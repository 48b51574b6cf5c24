"""How the gradients of a strategy travel, for forecasts: how long the exchange of a bucket takes alone, by links and host memory.

The YAML of a strategy names an Exchange (`code: {exchange: …}`): one of those at the end of this module, or one that the user
made in a module of his own, without torch.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, about, best, exactly
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
from analysis.prediction.links.ring import TOGETHER
from benchmarks.collectives.busbw import COLLECTIVES
from conf.groups import choice, choices
from conf.options import Refused
from conf.targets import locate_without_torch

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


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a strategy travel."""

    times: Callable[[Question, float, Known], Sequence[Timed]]  # of a bucket of so many bytes: one part after the other
    # The collective of a bucket, such as reduce_scatter + all_gather; None: none that goes over one kind of wire alone.
    collective: Callable[[Question], str | None] = lambda question: None
    by_nccl: bool = False  # NCCL's settings reach it; its log says the wire
    gpu_servers: bool = False  # servers keep weights on a GPU
    occupies: bool = True  # the multiprocessors of the ranks' GPUs, and so slows compute by γ; copy engines do not
    waits: bool = True  # each step, for all other ranks
    during_backward: bool = True  # each bucket from when its gradients are there; else all of them after backward


def by_collective(kind: str | Callable[[Question], str], during_backward: bool = True) -> Exchange:
    """Return the Exchange of buckets that NCCL's collectives carry, such as `reduce_scatter + all_gather`.

    Raises:
        ValueError: a collective that Ringside does not know.
    """

    def of(question: Question) -> str:
        return kind if isinstance(kind, str) else kind(question)

    if isinstance(kind, str) and (unknown := [one for one in kind.split(TOGETHER) if one not in COLLECTIVES]):
        raise ValueError(f"{unknown[0]!r} is no collective; accepted are {', '.join(COLLECTIVES)}")
    return Exchange(
        lambda question, size, known: [_call(question, of(question), size, known)],
        of,
        by_nccl=True,
        during_backward=during_backward,
    )


def exchange_of(question: Question) -> Exchange:
    """Return how the gradients of a question travel; NOT_KNOWN where nothing says it."""
    found = _declared(question.strategy, question.exchange)
    return found if isinstance(found, Exchange) else NOT_KNOWN


def shares_gpu(question: Question, gpus_of_host: int) -> bool:
    """Tell whether servers of weights share the GPUs of ranks: a host has too few beside them."""
    servers = math.ceil(max(1, question.servers) / question.hosts)
    on_gpus = exchange_of(question).gpu_servers and question.unit == "GPU"
    return on_gpus and question.gpus + servers > gpus_of_host


def refuse_unknown(question: Question) -> None:
    """Refuse a question whose gradients travel in a way that nothing says. Raises ValueError."""
    if isinstance(found := _declared(question.strategy, question.exchange), str):
        raise ValueError(found)


def refuse_unknown_names(names: Sequence[str], study: Sequence[Question]) -> None:
    """Refuse names of --strategy that no forecast knows, beside those of a study. Raises ValueError."""
    of_study = {one.strategy: one for one in study}
    ours = []
    for name in choices("strategy"):
        with contextlib.suppress(Refused):  # a file that cannot be used says nothing
            ours += [name] if "exchange" in choice("strategy", name).code else []
    for name in names:
        if name in of_study:
            refuse_unknown(of_study[name])
        elif name not in ours:
            known = dict.fromkeys([*(one for one in of_study if exchange_of(of_study[one]) is not NOT_KNOWN), *ours])
            raise ValueError(f"--strategy {name!r}: no forecast knows it; accepted are {', '.join(known)}")


@functools.cache
def _declared(strategy: str, dotted: str) -> Exchange | str:
    """Return the Exchange that a strategy declares in its record, else in its YAML; else a sentence that says why there is none.

    Records of before there were such declarations name none.
    """
    with contextlib.suppress(Refused):  # a strategy that is not in this installation
        dotted = dotted or choice("strategy", strategy).code.get("exchange", "")
    if not dotted:
        return f"strategy {strategy!r}: no forecast knows how it sends gradients: its YAML has no code: {{exchange: …}}"
    try:
        found = locate_without_torch(dotted)
    except Refused as error:
        return f"strategy {strategy!r}: {error}"
    if not isinstance(found, Exchange):
        return f"strategy {strategy!r}: {dotted} is no analysis.prediction.strategies.Exchange"
    return found


def collective(question: Question) -> str | None:
    """Return the collective of a bucket; None where a strategy has none that goes over one kind of wire alone."""
    if question.low_rank:
        return None
    try:
        return exchange_of(question).collective(question)
    except Exception:  # the user's own: `bucket_times` says it of those cells that need it
        return None


def occupies(question: Question) -> bool:
    """Tell whether the exchange takes multiprocessors from backward: a server on a GPU of its own does not."""
    exchange = exchange_of(question)
    return exchange.occupies and exchange.during_backward and (question.shares_gpu or not exchange.gpu_servers)


def bucket_times(question: Question, buckets: tuple[float, ...], known: Known) -> tuple[list[Values], set[str]]:
    """Return the time of each bucket alone in ms, and where they come from.

    Raises NoLink, and ValueError whatever the user's own code raises.
    """
    refuse_unknown(question)
    if question.ranks < 2:
        return [exactly(0.0) for _ in buckets], {MEASURED}
    try:
        found = {size: exchange_of(question).times(question, size, known) for size in set(buckets)}
        times = [sum((one.ms for one in found[size]), exactly(0.0)) for size in buckets]
        sources = {one.source for several in found.values() for one in several}
    except ValueError:
        raise
    except Exception as error:
        said = f"its exchange raised {type(error).__name__}: {error}"
        raise ValueError(f"strategy {question.strategy!r}: {said}") from error
    if wrong := [ms for ms in map(best, times) if not 0 <= ms < math.inf]:
        raise ValueError(f"strategy {question.strategy!r}: by its exchange a bucket takes {wrong[0]:g} ms")
    return times, sources


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


def _of_reduce(question: Question) -> str:
    return "reduce + broadcast" if question.option("reduce", "sharded") == "owner" else "reduce_scatter + all_gather"


NOT_KNOWN = Exchange(_nothing, occupies=False)  # of a strategy that declares none: its cells say nothing of others

all_reduce = by_collective("all_reduce")
reduced_on_gpus = by_collective(_of_reduce)
hierarchical = Exchange(_hierarchical, by_nccl=True)
through_host = Exchange(_cpu_staged, occupies=False)
host_servers = Exchange(_host_servers, occupies=False)
host_servers_asynchronous = replace(host_servers, waits=False)
gpu_servers = Exchange(_device_servers, gpu_servers=True)
gpu_servers_asynchronous = replace(gpu_servers, waits=False)
nothing = Exchange(_nothing, occupies=False, waits=False)
