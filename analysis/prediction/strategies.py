"""How the gradients of a strategy travel: which collectives or copies carry a bucket.

The YAML of a strategy names an Exchange (`code: {exchange: …}`): one of those at the end of this
module, or one of the user's own, in a module without torch. Nothing else here knows a strategy.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from analysis.prediction.draws import Draws, constant, scaled_normal
from analysis.prediction.links import (
    AND,
    ASSUMED,
    DIRECT,
    MEASURED,
    OF_HOST_MEMORY,
    OF_NETWORK,
    WAYS,
    ExchangeWire,
    LinkModel,
    Timed,
    UnknownLink,
)
from analysis.prediction.query import CellQuery
from benchmarks.collectives.busbw import COLLECTIVES
from conf.groups import choice, choices
from conf.options import Refused
from conf.targets import locate_without_torch

LOW_RANK_HOOK = "powersgd"  # two matrices of low rank travel in place of each gradient


@dataclass(frozen=True)
class Transfer:
    """A bucket on its way: so many bytes out to other ranks, and so many back."""

    query: CellQuery
    sent_bytes: float
    returned_bytes: float
    links: LinkModel

    def collective(self, kind: str, size_bytes: float | None = None) -> Timed:
        """Return the time of a collective of all ranks. Raises UnknownLink."""
        size_bytes = self.sent_bytes if size_bytes is None else size_bytes
        query = self.query
        return self.links.time(
            kind, size_bytes, query.ranks, query.wire, query.hosts, query.network
        )

    def host_copies(self, shares: int = 1) -> Timed:
        """Return the time of gradients to host memory and the result back. Raises UnknownLink."""
        moved_bytes = shares * (self.sent_bytes + self.returned_bytes)
        return self.links.host_copies(self.query.gpus, moved_bytes)


Stages = Callable[[Transfer], Sequence[Timed]]  # one after the other


def no_stages(transfer: Transfer) -> Sequence[Timed]:
    """Return no stages."""
    return ()


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a strategy travel."""

    during: Stages  # of each bucket, from when its gradients are there
    after: Stages = no_stages  # of each bucket, once backward and all buckets have ended
    # The collective of a bucket; None: none that goes over one kind of wire alone.
    collective: Callable[[CellQuery], str] | None = None
    by_nccl: bool = False  # NCCL's settings reach it; its log says the wire
    gpu_servers: bool = False  # servers keep weights on a GPU
    occupies: bool = True  # multiprocessors of the ranks' GPUs; copy engines do not
    waits: bool = True  # each step, for all other ranks
    during_backward: bool = True  # else all buckets leave after backward
    splits_graphs: bool = False  # under optimize=compile too, as torch does for its own DDP
    # Whether weights come back in a step, in full precision; alone, gradients come back.
    brings_weights: Callable[[CellQuery], bool] = lambda query: False


@dataclass(frozen=True)
class BucketTimes:
    """How long each bucket takes alone, and what follows once all have ended, in ms."""

    during: list[Draws]
    after: Draws
    sources: frozenset[str]

    @property
    def whole_ms(self) -> Draws:
        """All of it, one after the other."""
        return sum(self.during, self.after)

    def scaled(self, ratio: Draws) -> "BucketTimes":
        """Return all times that many times as long."""
        return replace(self, during=[ms * ratio for ms in self.during], after=self.after * ratio)


def by_collective(
    kind: str | Callable[[CellQuery], str],
    during_backward: bool = True,
    brings_weights: bool = False,
) -> Exchange:
    """Return the Exchange of buckets that NCCL's collectives carry, such as `all_reduce`.

    `brings_weights`: the second of two collectives brings weights, once all gradients are there.

    Raises ValueError for a collective that Ringside does not know.
    """
    for name in kind.split(AND) if isinstance(kind, str) else ():
        if name not in COLLECTIVES:
            raise ValueError(f"{name!r} is no collective; accepted are {', '.join(COLLECTIVES)}")

    def collective(query: CellQuery) -> str:
        return kind if isinstance(kind, str) else kind(query)

    def whole(transfer: Transfer) -> list[Timed]:
        return [transfer.collective(collective(transfer.query))]

    def first(transfer: Transfer) -> list[Timed]:
        return [_half_of_two(transfer, collective(transfer.query), 0, transfer.sent_bytes)]

    def second(transfer: Transfer) -> list[Timed]:
        return [_half_of_two(transfer, collective(transfer.query), 1, transfer.returned_bytes)]

    return Exchange(
        during=first if brings_weights else whole,
        after=second if brings_weights else no_stages,
        collective=collective,
        by_nccl=True,
        during_backward=during_backward,
        brings_weights=lambda query: brings_weights,
    )


def _half_of_two(transfer: Transfer, kinds: str, index: int, size_bytes: float) -> Timed:
    """Return the time of one of two collectives; measured together only, each is half."""
    links, wire = transfer.links, transfer.query.wire
    both = kinds.split(AND)
    if not links.has(kinds, wire) and all(links.has(kind, wire) for kind in both):
        return transfer.collective(both[index], size_bytes)
    together = transfer.collective(kinds, size_bytes)
    return replace(together, ms=together.ms / 2)


def _reduced_in_hosts(transfer: Transfer) -> list[Timed]:
    """Return a reduce-scatter inside each host, and an all-reduce of each share between hosts."""
    query, links, network = transfer.query, transfer.links, transfer.query.network
    inside = ExchangeWire(DIRECT, query.wire.settings)
    stages = [links.time("reduce_scatter", transfer.sent_bytes, query.gpus, inside)]
    if query.hosts > 1:
        if network is not None:  # each share has its part of the NICs
            rate = network.host_gb_per_s / query.gpus
            network = replace(network, nics=1, gb_per_s=rate)
        share = transfer.sent_bytes / query.gpus
        stages.append(
            links.time("all_reduce", share, query.hosts, query.wire, query.hosts, network)
        )
    return stages


def _gathered_in_hosts(transfer: Transfer) -> list[Timed]:
    query = transfer.query
    inside = ExchangeWire(DIRECT, query.wire.settings)
    return [transfer.links.time("all_gather", transfer.sent_bytes, query.gpus, inside)]


def _is_sharded(query: CellQuery) -> bool:
    return query.option("staging", "full") == "sharded"


def _staged(transfer: Transfer) -> list[Timed]:
    """Return copies through host memory, of each rank's share or of everything, and the network."""
    query = transfer.query
    if _is_sharded(query):
        stages = [transfer.collective("reduce_scatter"), transfer.host_copies()]
    else:
        stages = [transfer.host_copies(query.gpus)]
    if query.hosts > 1:
        network = query.network
        if network is None:
            raise UnknownLink("what host memory sends between hosts was not measured; say --net")
        hop_ms = transfer.sent_bytes / query.hosts / network.host_gb_per_s / 1e6
        ms = 2 * (query.hosts - 1) * (hop_ms + network.latency_us / 1e3)
        stages.append(Timed(scaled_normal(ms, OF_NETWORK, f"hosts {network}"), ASSUMED))
    return stages


def _gathered_shares(transfer: Transfer) -> list[Timed]:
    if not _is_sharded(transfer.query):
        return []
    return [transfer.collective("all_gather", transfer.returned_bytes)]


def _to_remote_servers(transfer: Transfer) -> list[Timed]:
    """Return the bytes of all ranks into the servers' NICs, or out of them if that is more."""
    query, network = transfer.query, transfer.query.network
    assert network is not None
    most_bytes = transfer.returned_bytes * query.ranks / max(1, query.servers)
    ms = most_bytes / network.host_gb_per_s / 1e6 + network.latency_us / 1e3
    return [Timed(scaled_normal(ms, OF_NETWORK, f"{network}"), ASSUMED)]


def _to_host_servers(transfer: Transfer) -> list[Timed]:
    """Return n gradients into the servers' host memory and n times the weights back."""
    query = transfer.query
    if query.network is not None and query.hosts > 1:
        return _to_remote_servers(transfer)
    return [transfer.host_copies(query.gpus)]


def _to_gpu_servers(transfer: Transfer) -> list[Timed]:
    """Return n gradients into each server's GPU, and n times the weights out of it."""
    query = transfer.query
    if query.network is not None and query.hosts > 1:
        return _to_remote_servers(transfer)
    transport = query.wire.transport
    rate = transfer.links.copies_gb_per_s.get(transport)
    if rate is None:
        raise UnknownLink(
            f"no peer copy {WAYS[transport]} was measured; add a cell of benchmark=p2p"
        )
    stages = []
    for size_bytes in (transfer.sent_bytes, transfer.returned_bytes):
        ms = query.ranks * size_bytes / max(1, query.servers) / rate / 1e6
        stages.append(Timed(scaled_normal(ms, OF_HOST_MEMORY, "server"), MEASURED))
    return stages


def _of_reduce(query: CellQuery) -> str:
    if query.option("reduce", "sharded") == "owner":
        return "reduce + broadcast"
    return "reduce_scatter + all_gather"


UNKNOWN = Exchange(no_stages, occupies=False)  # of a strategy that declares none

all_reduce = replace(by_collective("all_reduce"), splits_graphs=True)
reduced_on_gpus = by_collective(_of_reduce, brings_weights=True)
hierarchical = Exchange(_reduced_in_hosts, _gathered_in_hosts, by_nccl=True)
through_host = Exchange(
    _staged,
    _gathered_shares,
    occupies=False,
    brings_weights=lambda query: query.option("optimizer_on", "cpu") == "cpu",
)
host_servers = Exchange(_to_host_servers, occupies=False, brings_weights=lambda query: True)
host_servers_asynchronous = replace(host_servers, waits=False)
gpu_servers = Exchange(_to_gpu_servers, gpu_servers=True, brings_weights=lambda query: True)
gpu_servers_asynchronous = replace(gpu_servers, waits=False)
nothing = Exchange(no_stages, occupies=False, waits=False)


def exchange_of(query: CellQuery) -> Exchange:
    """Return how the gradients of a query travel; UNKNOWN where nothing says it."""
    exchange = _declared(query.strategy, query.exchange)
    return exchange if isinstance(exchange, Exchange) else UNKNOWN


def refuse_unknown(query: CellQuery) -> None:
    """Refuse a query whose gradients travel in a way that nothing says. Raises ValueError."""
    reason = _declared(query.strategy, query.exchange)
    if isinstance(reason, str):
        raise ValueError(reason)
    if query.option("comm_hook") == LOW_RANK_HOOK:
        raise ValueError(
            f"strategy {query.strategy} with comm_hook=powersgd sends matrices of a low rank, and "
            "no record says how large these are"
        )


def refuse_unknown_names(names: Sequence[str], study: Sequence[CellQuery]) -> None:
    """Refuse names of --strategy that no forecast knows, beside a study's. Raises ValueError."""
    of_study = {query.strategy: query for query in study}
    accepted = [name for name, query in of_study.items() if exchange_of(query) is not UNKNOWN]
    for name in choices("strategy"):
        with contextlib.suppress(Refused):  # a file that cannot be used says nothing
            if name not in accepted and "exchange" in choice("strategy", name).code:
                accepted.append(name)
    for name in names:
        if name in of_study:
            refuse_unknown(of_study[name])
        elif name not in accepted:
            raise ValueError(
                f"--strategy {name!r}: no forecast knows it; accepted are {', '.join(accepted)}"
            )


@functools.cache
def _declared(strategy: str, dotted: str) -> Exchange | str:
    """Return the Exchange of a strategy's record, else of its YAML; else why there is none."""
    with contextlib.suppress(Refused):  # a strategy that is not in this installation
        dotted = dotted or choice("strategy", strategy).code.get("exchange", "")
    if not dotted:
        return f"strategy {strategy!r}: no forecast knows how it sends gradients: its YAML has no code: {{exchange: …}}"
    try:
        exchange = locate_without_torch(dotted)
    except Refused as error:
        return f"strategy {strategy!r}: {error}"
    if not isinstance(exchange, Exchange):
        return f"strategy {strategy!r}: {dotted} is no analysis.prediction.strategies.Exchange"
    return exchange


def shares_gpu(query: CellQuery, gpus_of_host: int) -> bool:
    """Tell whether servers of weights share the GPUs of ranks: a host has too few beside them."""
    servers = math.ceil(max(1, query.servers) / query.hosts)
    on_gpus = exchange_of(query).gpu_servers and query.unit == "GPU"
    return on_gpus and query.gpus + servers > gpus_of_host


def collective(query: CellQuery) -> str | None:
    """Return the collective of a bucket; None where a strategy has none over one wire alone."""
    exchange = exchange_of(query)
    if exchange.collective is None:
        return None
    return exchange.collective(query)


def overlaps(query: CellQuery) -> bool:
    """Tell whether buckets leave while backward still runs."""
    exchange = exchange_of(query)
    return exchange.during_backward and (exchange.splits_graphs or not query.compiled)


def occupies(query: CellQuery) -> bool:
    """Tell whether the exchange takes multiprocessors from backward.

    A server on a GPU of its own takes none.
    """
    exchange = exchange_of(query)
    on_ranks = query.shares_gpu or not exchange.gpu_servers
    return exchange.occupies and on_ranks and overlaps(query)


def return_ratio(query: CellQuery) -> float:
    """Return the bytes that come back in a step, of those sent; weights are never halved."""
    return 2.0 if query.halves and exchange_of(query).brings_weights(query) else 1.0


def bucket_times(
    query: CellQuery, sizes_bytes: Sequence[float], links: LinkModel, in_step: bool = True
) -> BucketTimes:
    """Return the times of buckets in a step, or (`in_step=False`) of the exchange alone.

    Raises UnknownLink, and ValueError for whatever the user's own exchange raises.
    """
    refuse_unknown(query)
    if query.ranks < 2:
        return BucketTimes([constant(0.0)] * len(sizes_bytes), constant(0.0), frozenset())
    exchange = exchange_of(query)
    during_ms: dict[float, Draws] = {}
    after_ms: dict[float, Draws] = {}
    sources: set[str] = set()
    try:
        ratio = return_ratio(query) if in_step else 1.0
        for size in set(sizes_bytes):
            transfer = Transfer(query, size, ratio * size, links)
            for stages, times in ((exchange.during, during_ms), (exchange.after, after_ms)):
                timed = stages(transfer)
                times[size] = sum((stage.ms for stage in timed), constant(0.0))
                sources |= {stage.source for stage in timed}
    except ValueError:  # UnknownLink too
        raise
    except Exception as error:
        raise ValueError(
            f"strategy {query.strategy!r}: its exchange raised {type(error).__name__}: {error}"
        ) from error
    during = [during_ms[size] for size in sizes_bytes]
    after = sum((after_ms[size] for size in sizes_bytes), constant(0.0))
    return BucketTimes(during, after, frozenset(sources))
