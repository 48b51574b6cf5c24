"""Compare two traces: what changed per rank and per collective, with the ratio of the second to the first."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from analysis.errors import UnreadableInput
from analysis.trace.summary import CollectiveCalls, MatchedCollective, RankSummary, TraceSummary

ChangeKey = tuple[int | None, str | None, str | None]  # rank, collective, communicator

# The quantities of a rank that are compared: name in JSON, and how to read it.
_OF_RANK: dict[str, Callable[[RankSummary], float | None]] = {
    "comm_ms": lambda one: one.comm_ms,
    "exposed_ms": lambda one: one.exposed_ms,
    "overlapped_ms": lambda one: one.overlapped_ms,
    "wait_ms": lambda one: one.wait_ms,
    "compute_ms": lambda one: one.compute_ms,
    "gpu_idle_share": lambda one: one.gpu_idle_share,
    "gap_us": lambda one: one.gap_us,
    "step_median_ms": lambda one: one.steps.median_ms if one.steps else None,
    "step_comm_ms": lambda one: one.steps.comm_ms if one.steps else None,
    "step_exposed_ms": lambda one: one.steps.exposed_ms if one.steps else None,
    "step_exposed_in_gaps_ms": lambda one: one.steps.exposed_in_gaps_ms if one.steps else None,
    "step_wait_ms": lambda one: one.steps.wait_ms if one.steps else None,
}


@dataclass(frozen=True)
class Change:
    """One quantity in both traces; `ratio` is b / a, None if either is unknown or a is 0.

    `rank` is None for all ranks together, `collective` None for all collectives together. `communicator` is None if
    the traces do not name it.
    """

    rank: int | None
    collective: str | None
    communicator: str | None
    quantity: str
    a: float | None
    b: float | None
    ratio: float | None


@dataclass(frozen=True)
class TraceDifference:
    """Every quantity that either trace has, and notes on what cannot be compared."""

    changes: list[Change]
    notes: list[str]

    def of(
        self, rank: int | None, collective: str | None = None, communicator: str | None = None
    ) -> list[Change]:
        """Return the changes of one rank or of all ranks together, of one collective or of all together."""
        wanted = (rank, collective, communicator)
        return [
            one for one in self.changes if (one.rank, one.collective, one.communicator) == wanted
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return asdict(self)


def compare_traces(a: TraceSummary, b: TraceSummary) -> TraceDifference:
    """Return what changed from `a` to `b`. Raises UnreadableInput for two traces without a common rank."""
    first, second = ({rank.rank: rank for rank in one.ranks} for one in (a, b))
    common = sorted(set(first) & set(second))
    if not common:
        raise UnreadableInput(
            f"the traces share no rank (ranks {_words(first)} against {_words(second)}): give the files of all ranks of "
            "a run as one trace, as a folder or joined by commas"
        )
    notes = []
    if set(first) != set(second):
        notes.append(f"ranks {_words(set(first) ^ set(second))} are in one trace only")
    changes, counts = [], set()
    for rank in common:
        one, other = first[rank], second[rank]
        changes += [
            _change((rank, None, None), what, of(one), of(other)) for what, of in _OF_RANK.items()
        ]
        calls, others = ({call.name: call for call in of.nccl} for of in (one, other))
        for name in dict.fromkeys((*calls, *others)):
            mine, theirs = calls.get(name), others.get(name)
            changes += _of_calls(rank, name, mine, theirs)
            if (mine and mine.calls) != (theirs and theirs.calls):
                counts.add(name)
    if counts:
        notes.append(
            f"the traces differ in the number of calls ({_words(counts)}): compare averages, not totals"
        )
    met, meeting = ({(one.name, one.communicator): one for one in of.collectives} for of in (a, b))
    for key in dict.fromkeys((*met, *meeting)):
        changes += _of_meetings((None, *key), met.get(key), meeting.get(key))
    return TraceDifference(
        [one for one in changes if one.a is not None or one.b is not None], notes
    )


def _of_calls(
    rank: int, name: str, a: CollectiveCalls | None, b: CollectiveCalls | None
) -> list[Change]:
    quantities = ("calls", "avg_us", "median_us", "total_ms")
    return [
        _change((rank, name, None), what, getattr(a, what, None), getattr(b, what, None))
        for what in quantities
    ]


def _of_meetings(
    key: ChangeKey, a: MatchedCollective | None, b: MatchedCollective | None
) -> list[Change]:
    quantities = ("matched", "transfer_avg_us", "transfer_median_us")
    found = [
        _change(key, what, getattr(a, what, None), getattr(b, what, None)) for what in quantities
    ]
    waits = (None if one is None else 1e3 * one.wait_ms / one.matched for one in (a, b))
    return [*found, _change(key, "wait_avg_us", *waits)]


def _change(key: ChangeKey, what: str, a: float | None, b: float | None) -> Change:
    return Change(*key, what, a, b, b / a if a and b is not None else None)


def _words(some: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(some)))
