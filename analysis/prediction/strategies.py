"""How the gradients of a strategy travel: which collectives or copies carry a bucket.

Ringside's own strategies have a row in EXCHANGES. Another one is forecast as an all-reduce after
backward where its YAML declares `sends: ring`, and not at all where it declares anything else.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from analysis.prediction.distributions import Draws, constant, scaled_normal
from analysis.prediction.link_model import DIRECT, OF_HOST_MEMORY, WAYS, ExchangeWire, LinkModel
from analysis.prediction.query import CellQuery
from conf.cell import COMPILED

GATHERING = ("fsdp", "zero2", "hsdp")
# Why there is no forecast with a hook.
NO_FORECAST_HOOKS = {
    "powersgd": "sends matrices of a low rank, and no record says how large these are",
    "fp8": "rounds gradients twice, and no record says how long that takes",
}
# The time of a bucket with so many bytes to other ranks and so many back, in ms: from when its
# gradients are there, and once backward and all buckets have ended.
Times: TypeAlias = tuple[Draws, Draws]
BucketTime: TypeAlias = Callable[[CellQuery, float, float, LinkModel], Times]
BucketTimes: TypeAlias = tuple[list[Draws], Draws]  # of each bucket beside backward; after all


def _no_time(query: CellQuery, sent: float, returned: float, links: LinkModel) -> Times:
    return constant(0.0), constant(0.0)


def _by_collective(query: CellQuery, sent: float, returned: float, links: LinkModel) -> Times:
    """Return a collective; of two the second brings weights, once all gradients are there."""
    kind = collective(query)
    assert kind is not None
    there = links.time(kind, sent, query.ranks, query.wire, query.hosts)
    if not exchange_of(query).brings_weights:
        return there, constant(0.0)
    back = links.time(kind, returned, query.ranks, query.wire, query.hosts)
    return there / 2, back / 2


def _in_levels(query: CellQuery, sent: float, returned: float, links: LinkModel) -> Times:
    """Return a reduce-scatter inside each host and an all-reduce of each share between hosts, then
    an all-gather inside.
    """
    inside = ExchangeWire(DIRECT, query.wire.settings)
    scattered = links.time("reduce_scatter", sent, query.gpus, inside)
    share = sent / query.gpus
    reduced = links.time("all_reduce", share, query.hosts, query.wire, query.hosts)
    return scattered + reduced, links.time("all_gather", sent, query.gpus, inside)


def _through_host(query: CellQuery, sent: float, returned: float, links: LinkModel) -> Times:
    """Return copies through host memory, of each rank's share or of everything."""
    if query.hosts > 1:
        raise ValueError("forecasts do not cover exchanges through host memory between hosts")
    moved = sent + returned
    if query.option("staging", "full") == "full":
        return links.host_copies(query.gpus, query.gpus * moved), constant(0.0)
    scattered = links.time("reduce_scatter", sent, query.ranks, query.wire)
    gathered = links.time("all_gather", returned, query.ranks, query.wire)
    return scattered + links.host_copies(query.gpus, moved), gathered


def _to_gpu_servers(query: CellQuery, sent: float, returned: float, links: LinkModel) -> Times:
    """Return n gradients into each server's GPU, and n times the weights out of it."""
    rate = links.copies_gb_per_s.get(query.transport)
    if rate is None:
        raise ValueError(
            f"no GPU-to-GPU copy {WAYS[query.transport]} was measured; add a run of benchmark=p2p"
        )
    ms = query.ranks * (sent + returned) / query.servers / rate / 1e6
    return scaled_normal(ms, OF_HOST_MEMORY, "server"), constant(0.0)


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a strategy travel."""

    bucket_time: BucketTime
    collective: str = ""  # of a bucket; empty: none that goes over one kind of wire alone
    by_nccl: bool = False  # NCCL's settings reach it; its log says the wire
    gpu_servers: bool = False  # servers keep weights on a GPU
    occupies: bool = True  # multiprocessors of the ranks' GPUs; copy engines do not
    waits: bool = True  # each step, for all other ranks
    during_backward: bool = True  # else all buckets leave after backward
    splits_graphs: bool = False  # under optimize=compile too, as torch does for its own DDP
    brings_weights: bool = False  # back in a step, in full precision


_STAGED = Exchange(_through_host, occupies=False, brings_weights=True)
UNKNOWN = Exchange(_no_time, occupies=False)
OWN = Exchange(_by_collective, "all_reduce", by_nccl=True, during_backward=False)
_SHARDS = Exchange(_by_collective, "reduce_scatter + all_gather", by_nccl=True, brings_weights=True)
EXCHANGES = {
    "none": Exchange(_no_time, occupies=False, waits=False),
    "nccl_allreduce": Exchange(_by_collective, "all_reduce", by_nccl=True, splits_graphs=True),
    "kvstore_device": _SHARDS,
    "zero1": _SHARDS,
    "hierarchical": Exchange(_in_levels, by_nccl=True),
    "local_sgd": Exchange(_by_collective, "all_reduce", by_nccl=True, during_backward=False),
    "cpu_staged": _STAGED,
    "kvstore_local": _STAGED,
    "kvstore_dist_sync": _STAGED,
    "kvstore_dist_async": Exchange(_through_host, occupies=False, brings_weights=True, waits=False),
    "kvstore_dist_sync_device": Exchange(_to_gpu_servers, gpu_servers=True, brings_weights=True),
    "kvstore_dist_async_device": Exchange(
        _to_gpu_servers, gpu_servers=True, brings_weights=True, waits=False
    ),
}


def exchange_of(query: CellQuery) -> Exchange:
    """Return how the gradients of a query travel; UNKNOWN where nothing says it."""
    exchange = EXCHANGES.get(query.strategy)
    if exchange is not None:
        return exchange
    if query.sends == "ring":
        return OWN
    return UNKNOWN


def refuse_unknown(query: CellQuery) -> None:
    """Refuse a query whose gradients travel in a way that nothing says. Raises ValueError."""
    if query.strategy in GATHERING:
        raise ValueError(
            f"forecasts do not model when forward and backward of {query.strategy} wait for "
            "gathered weights"
        )
    if exchange_of(query) is UNKNOWN:
        raise ValueError(
            f"it is not known how {query.strategy} sends gradients: its YAML does not declare "
            "`sends: ring`"
        )
    hook = query.option("comm_hook")
    if hook in NO_FORECAST_HOOKS:
        raise ValueError(
            f"strategy {query.strategy} with comm_hook={hook} {NO_FORECAST_HOOKS[hook]}"
        )


def refuse_unknown_names(names: Iterable[str], study: Sequence[CellQuery]) -> None:
    """Refuse names of --strategy that no forecast knows, beside a study's. Raises ValueError."""
    of_study = {query.strategy: query for query in study}
    accepted = [name for name, query in of_study.items() if exchange_of(query) is not UNKNOWN]
    accepted = list(dict.fromkeys([*accepted, *sorted(EXCHANGES)]))
    for name in names:
        if name in of_study:
            refuse_unknown(of_study[name])
        elif name not in accepted:
            raise ValueError(
                f"--strategy {name!r}: unknown strategy; expected one of: {', '.join(accepted)}"
            )


def shares_gpu(query: CellQuery, gpus_of_host: int) -> bool:
    """Tell whether servers of weights share the GPUs of ranks: a host has too few beside them."""
    servers = math.ceil(query.servers / query.hosts)
    on_gpus = exchange_of(query).gpu_servers and query.unit == "GPU"
    return on_gpus and query.gpus + servers > gpus_of_host


def collective(query: CellQuery) -> str | None:
    """Return the collective of a bucket; None where a strategy has none over one wire alone."""
    if query.option("reduce") == "owner":
        return "reduce + broadcast"
    return exchange_of(query).collective or None


def overlaps(query: CellQuery) -> bool:
    """Tell whether buckets leave while backward still runs."""
    exchange = exchange_of(query)
    # A compiled backward pass is one graph, at whose end all gradients arrive.
    is_one_graph = query.workload.requested("optimize") in COMPILED and not exchange.splits_graphs
    return exchange.during_backward and not is_one_graph


def occupies(query: CellQuery) -> bool:
    """Tell whether the exchange takes multiprocessors from backward.

    A server on a GPU of its own takes none.
    """
    exchange = exchange_of(query)
    on_ranks = query.shares_gpu or not exchange.gpu_servers
    return exchange.occupies and on_ranks and overlaps(query)


def return_ratio(query: CellQuery) -> float:
    """Return the bytes that come back in a step, of those sent; weights are never halved."""
    weights = exchange_of(query).brings_weights and query.option("optimizer_on", "cpu") == "cpu"
    if query.halves and weights:
        return 2.0
    return 1.0


def bucket_times(
    query: CellQuery, sizes_bytes: Sequence[float], links: LinkModel, ratio: float = 1.0
) -> BucketTimes:
    """Return the times of buckets of which `ratio` times as many bytes come back; in a step that is
    return_ratio. Raises ValueError.
    """
    refuse_unknown(query)
    exchange = exchange_of(query)
    during: list[Draws] = []
    after = constant(0.0)
    for size in sizes_bytes:
        beside, behind = constant(0.0), constant(0.0)
        if query.ranks > 1:
            beside, behind = exchange.bucket_time(query, size, ratio * size, links)
        during.append(beside)
        after = after + behind
    return during, after
