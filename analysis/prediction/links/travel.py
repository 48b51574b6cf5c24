"""How long a bucket takes: by collectives, through host memory, to servers. What comes back is `question.back` times as large."""

from dataclasses import replace

from analysis.prediction.cells import Question
from analysis.prediction.draws import about
from analysis.prediction.links.host import HOST_SCATTER, Known
from analysis.prediction.links.model import (
    ASSUMED,
    DIRECT,
    MEASURED,
    OF_NETWORK,
    WAYS,
    ExchangeWire,
    NoLink,
    Timed,
)
from analysis.prediction.links.ring import TOGETHER


def reduced_in_hosts(question: Question, size: float, known: Known) -> list[Timed]:
    """Return a reduce-scatter inside each host, and an all-reduce of each share between hosts."""
    links, network = known.links, question.network
    inside = links.time("reduce_scatter", size, question.gpus, _wire_inside(question))
    if question.hosts == 1:
        return [inside]
    if network is not None:  # each share has its part of the NICs
        rate = network.host_gb_per_s / question.gpus
        network = type(network)(1, rate, network.latency_us)
    share = size / question.gpus
    return [
        inside,
        links.time("all_reduce", share, question.hosts, question.wire, question.hosts, network),
    ]


def gathered_in_hosts(question: Question, size: float, known: Known) -> list[Timed]:
    """Return the all-gather inside each host, which waits until all buckets are reduced."""
    return [known.links.time("all_gather", size, question.gpus, _wire_inside(question))]


def _wire_inside(question: Question) -> ExchangeWire:
    return ExchangeWire(DIRECT, question.wire.settings)


def staged(question: Question, size: float, known: Known) -> list[Timed]:
    """Return every rank's gradient to host memory and the result back, and the sums of several hosts over the network.

    Sharded, each rank stages its share alone.
    """
    between = [_between_hosts(question, size)] if question.hosts > 1 else []
    moved = (1 + question.back) * size
    if _sharded(question):
        return [
            one_collective(question, "reduce_scatter", size, known),
            _through_host(question, moved, known),
            *between,
        ]
    return [_through_host(question, moved * question.gpus, known), *between]


def gathered_shares(question: Question, size: float, known: Known) -> list[Timed]:
    """Return the all-gather of shares that were staged, which waits for all of them."""
    return (
        [one_collective(question, "all_gather", question.back * size, known)]
        if _sharded(question)
        else []
    )


def _sharded(question: Question) -> bool:
    return question.option("staging", "full") == "sharded"


def by_host_servers(question: Question, size: float, known: Known) -> list[Timed]:
    """Return n gradients into the servers' host memory and n times the weights back, over all servers."""
    if question.network is not None and question.hosts > 1:
        return [_over_network(question, size)]
    return [_through_host(question, (1 + question.back) * size * question.gpus, known)]


def by_gpu_servers(question: Question, size: float, known: Known) -> list[Timed]:
    """Return n gradients into each server's GPU, then n times the weights out of it, over its link."""
    if question.network is not None and question.hosts > 1:
        return [_over_network(question, size)]
    rate = known.links.copies_gb_per_s.get(question.wire.transport)
    if rate is None:
        raise NoLink(
            f"no peer copy {WAYS[question.wire.transport]} was measured; add a cell of benchmark=p2p"
        )
    into = question.ranks * size / max(1, question.servers) / rate / 1e6
    return [
        Timed(about(ms, HOST_SCATTER, "server"), MEASURED) for ms in (into, question.back * into)
    ]


def one_collective(question: Question, kind: str, size: float, known: Known) -> Timed:
    """Return the time of one collective over the wire of a question. Raises NoLink."""
    return known.links.time(
        kind, size, question.ranks, question.wire, question.hosts, question.network
    )


def one_of_two(question: Question, kinds: str, place: int, size: float, known: Known) -> Timed:
    """Return the time of one of two collectives. Measured together only, each is half: they send the same. Raises NoLink."""
    if not known.links.has(kinds, question.wire):
        two = kinds.split(TOGETHER)
        if all(known.links.has(one, question.wire) for one in two):
            return one_collective(question, two[place], size, known)
    whole = one_collective(question, kinds, size, known)
    return replace(whole, ms=whole.ms / 2)


def _through_host(question: Question, moved_bytes: float, known: Known) -> Timed:
    """Return the time of bytes that all GPUs move through host memory together. Raises NoLink."""
    found = known.host.at(question.gpus)
    if found is None:
        raise NoLink("the host link was not measured; add a cell of benchmark=host_link")
    rate, source = found
    name = f"host {question.gpus if source != MEASURED else ''}"
    return Timed(
        about(moved_bytes / rate / 1e6, HOST_SCATTER if source != MEASURED else 0.02, name), source
    )


def _between_hosts(question: Question, size: float) -> Timed:
    """Return an all-reduce of host memory over the network. Raises NoLink."""
    network = question.network
    if network is None:
        raise NoLink("what host memory sends between hosts was not measured; say --net")
    steps = 2 * (question.hosts - 1)
    ms = steps * (size / question.hosts / network.host_gb_per_s / 1e6 + network.latency_us / 1e3)
    return Timed(about(ms, OF_NETWORK, f"hosts {network}"), ASSUMED)


def _over_network(question: Question, size: float) -> Timed:
    """Return the time of servers on other hosts: all ranks' bytes into the servers' NICs, or out of them if that is more."""
    network = question.network
    assert network is not None
    most = question.back * size * question.ranks
    ms = most / max(1, question.servers) / network.host_gb_per_s / 1e6 + network.latency_us / 1e3
    return Timed(about(ms, OF_NETWORK, f"{network}"), ASSUMED)
