"""How the gradients of a strategy travel, for forecasts: how long the exchange of a bucket takes alone, by links and host memory.

The YAML of a strategy names an Exchange (`code: {exchange: …}`): one of those at the end of this module, or one that the user
made in a module of his own, without torch.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, best, exactly
from analysis.prediction.links.host import Known
from analysis.prediction.links.model import MEASURED, Timed
from analysis.prediction.links.ring import TOGETHER
from analysis.prediction.links.travel import (
    by_gpu_servers,
    by_host_servers,
    gathered_in_hosts,
    gathered_shares,
    one_collective,
    one_of_two,
    reduced_in_hosts,
    staged,
)
from benchmarks.collectives.busbw import COLLECTIVES
from conf.groups import choice, choices
from conf.options import Refused
from conf.targets import locate_without_torch

Parts = Callable[
    [Question, float, Known], Sequence[Timed]
]  # of a bucket of so many bytes: one after the other


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a strategy travel. What comes back has `question.back` times the bytes that were sent."""

    times: Parts
    after: Parts = (
        lambda question, size, known: ()
    )  # what follows once backward and all buckets have ended
    # The collective of a bucket, such as reduce_scatter + all_gather; None: none that goes over one kind of wire alone.
    collective: Callable[[Question], str | None] = lambda question: None
    by_nccl: bool = False  # NCCL's settings reach it; its log says the wire
    gpu_servers: bool = False  # servers keep weights on a GPU
    occupies: bool = True  # the multiprocessors of the ranks' GPUs, and so slows compute by γ; copy engines do not
    waits: bool = True  # each step, for all other ranks
    during_backward: bool = (
        True  # each bucket from when its gradients are there; else all of them after backward
    )
    splits_graphs: bool = (
        False  # where backward is compiled to one graph too, as torch does for its own DDP
    )
    # Whether weights come back in a step, in full precision whatever a hook leaves of gradients. Alone, gradients come back.
    brings_weights: Callable[[Question], bool] = lambda question: False


@dataclass(frozen=True)
class BucketTimes:
    """How long the exchange of each bucket takes alone, and what follows once all have ended, in ms."""

    during: list[Values]
    after: Values
    sources: set[str]  # where they come from

    @property
    def whole_ms(self) -> Values:
        """All of it, one after the other."""
        return sum(self.during, self.after)

    @property
    def best(self) -> "BucketTimes":
        """The best values alone."""
        return replace(
            self,
            during=[exactly(best(one)) for one in self.during],
            after=exactly(best(self.after)),
        )

    def times(self, ratio: Values) -> "BucketTimes":
        """Return all times that many times as long."""
        return replace(self, during=[one * ratio for one in self.during], after=self.after * ratio)


def by_collective(
    kind: str | Callable[[Question], str],
    during_backward: bool = True,
    brings_weights: bool = False,
) -> Exchange:
    """Return the Exchange of buckets that NCCL's collectives carry, such as `reduce_scatter + all_gather`.

    `brings_weights`: the second of two brings weights, once all gradients are there and the weights are updated.

    Raises:
        ValueError: a collective that Ringside does not know.
    """

    def of(question: Question) -> str:
        return kind if isinstance(kind, str) else kind(question)

    if isinstance(kind, str) and (
        unknown := [one for one in kind.split(TOGETHER) if one not in COLLECTIVES]
    ):
        raise ValueError(f"{unknown[0]!r} is no collective; accepted are {', '.join(COLLECTIVES)}")
    if brings_weights and isinstance(kind, str) and kind.count(TOGETHER) != 1:
        raise ValueError(
            f"{kind!r} with brings_weights: accepted are two collectives, such as reduce_scatter + all_gather"
        )
    if brings_weights:
        return Exchange(
            lambda question, size, known: [one_of_two(question, of(question), 0, size, known)],
            lambda question, size, known: [
                one_of_two(question, of(question), 1, question.back * size, known)
            ],
            collective=of,
            by_nccl=True,
            during_backward=during_backward,
            brings_weights=lambda question: True,
        )
    return Exchange(
        lambda question, size, known: [one_collective(question, of(question), size, known)],
        collective=of,
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
            known = dict.fromkeys(
                [*(one for one in of_study if exchange_of(of_study[one]) is not NOT_KNOWN), *ours]
            )
            raise ValueError(
                f"--strategy {name!r}: no forecast knows it; accepted are {', '.join(known)}"
            )


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


def overlaps(question: Question) -> bool:
    """Tell whether buckets leave while backward still runs."""
    exchange = exchange_of(question)
    return exchange.during_backward and (exchange.splits_graphs or not question.compiled)


def occupies(question: Question) -> bool:
    """Tell whether the exchange takes multiprocessors from backward: a server on a GPU of its own does not."""
    exchange = exchange_of(question)
    return (
        exchange.occupies
        and overlaps(question)
        and (question.shares_gpu or not exchange.gpu_servers)
    )


@contextlib.contextmanager
def _told(question: Question) -> Iterator[None]:
    """Say in one sentence what the user's own exchange raises. Raises ValueError."""
    try:
        yield
    except ValueError:  # NoLink too
        raise
    except Exception as error:
        said = f"its exchange raised {type(error).__name__}: {error}"
        raise ValueError(f"strategy {question.strategy!r}: {said}") from error


def as_in_a_step(question: Question) -> Question:
    """Return a question with what comes back in a step: twice the bytes where weights answer halved gradients.

    Raises ValueError whatever the user's own code raises.
    """
    if not question.halves:
        return question
    with _told(question):
        return (
            replace(question, back=2.0)
            if exchange_of(question).brings_weights(question)
            else question
        )


def bucket_times(question: Question, buckets: tuple[float, ...], known: Known) -> BucketTimes:
    """Return the times of buckets of so many bytes: of gradients there and back, but for what `as_in_a_step` says.

    Raises NoLink, and ValueError whatever the user's own code raises.
    """
    refuse_unknown(question)
    if question.ranks < 2:
        return BucketTimes([exactly(0.0) for _ in buckets], exactly(0.0), {MEASURED})
    with _told(question):
        of = exchange_of(question)
        found = {
            size: (of.times(question, size, known), of.after(question, size, known))
            for size in set(buckets)
        }
        during = [sum((one.ms for one in found[size][0]), exactly(0.0)) for size in buckets]
        after = sum((one.ms for size in buckets for one in found[size][1]), exactly(0.0))
        sources = {one.source for both in found.values() for several in both for one in several}
    if wrong := [ms for ms in map(best, (*during, after)) if not 0 <= ms < math.inf]:
        raise ValueError(
            f"strategy {question.strategy!r}: by its exchange a bucket takes {wrong[0]:g} ms"
        )
    return BucketTimes(during, after, sources)


def _nothing(question: Question, size: float, known: Known) -> list[Timed]:
    """Return no time: there is no exchange."""
    return []


def _updated_on_host(question: Question) -> bool:
    return question.option("optimizer_on", "cpu") == "cpu"


def _of_reduce(question: Question) -> str:
    return (
        "reduce + broadcast"
        if question.option("reduce", "sharded") == "owner"
        else "reduce_scatter + all_gather"
    )


NOT_KNOWN = Exchange(
    _nothing, occupies=False
)  # of a strategy that declares none: its cells say nothing of others

all_reduce = replace(by_collective("all_reduce"), splits_graphs=True)
reduced_on_gpus = by_collective(_of_reduce, brings_weights=True)
hierarchical = Exchange(reduced_in_hosts, gathered_in_hosts, by_nccl=True)
through_host = Exchange(staged, gathered_shares, occupies=False, brings_weights=_updated_on_host)
host_servers = Exchange(by_host_servers, occupies=False, brings_weights=lambda question: True)
host_servers_asynchronous = replace(host_servers, waits=False)
gpu_servers = Exchange(by_gpu_servers, gpu_servers=True, brings_weights=lambda question: True)
gpu_servers_asynchronous = replace(gpu_servers, waits=False)
nothing = Exchange(_nothing, occupies=False, waits=False)
