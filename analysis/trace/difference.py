"""Compare two traces: what changed per rank and per collective, with ratios of second to first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from analysis.errors import UnreadableInput
from analysis.trace.summary import RankSummary, TraceSummary

ChangeKey = tuple[int | None, str | None, str | None]  # rank, collective, communicator

# The quantities that are compared, as the summaries name them.
_OF_RANK = (
    "comm_ms",
    "exposed_ms",
    "overlapped_ms",
    "wait_ms",
    "compute_ms",
    "gpu_idle_share",
    "gap_us",
)
_OF_STEPS = ("median_ms", "comm_ms", "exposed_ms", "exposed_in_gaps_ms", "wait_ms")
_OF_CALLS = ("calls", "avg_us", "median_us", "total_ms")
_OF_MATCHED = ("matched", "transfer_avg_us", "transfer_median_us", "wait_avg_us")


@dataclass(frozen=True)
class Change:
    """One quantity in both traces; `ratio` is b / a, None if either is unknown or a is 0.

    `rank` is None for all ranks together, `collective` None for all collectives together.
    `communicator` is None if the traces do not name it.
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
    ) -> dict[str, Change]:
        """Return by quantity the changes of a rank (None: all) and a collective (None: all)."""
        changes = {}
        for change in self.changes:
            key = (change.rank, change.collective, change.communicator)
            if key == (rank, collective, communicator):
                changes[change.quantity] = change
        return changes

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return asdict(self)


def compare_traces(a: TraceSummary, b: TraceSummary) -> TraceDifference:
    """Return what changed from `a` to `b`.

    Raises:
        UnreadableInput: the traces have no common rank.
    """
    first, second = ({rank.rank: rank for rank in summary.ranks} for summary in (a, b))
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UnreadableInput(
            f"the traces share no rank (ranks {_words(first)} against {_words(second)}): give the "
            "files of all ranks of a run as one trace, as a folder or joined by commas"
        )
    notes = []
    if first.keys() != second.keys():
        notes.append(f"ranks {_words(first.keys() ^ second.keys())} are in one trace only")
    changes: list[Change] = []
    other_counts: set[str] = set()
    for rank in common:
        of_rank = list(_rank_changes(first[rank], second[rank]))
        changes += of_rank
        for change in of_rank:
            if change.quantity == "calls" and change.a != change.b:
                other_counts.add(str(change.collective))
    if other_counts:
        notes.append(
            f"the traces differ in the number of calls ({_words(other_counts)}): compare averages, "
            "not totals"
        )
    before, after = (
        {(matched.name, matched.communicator): matched for matched in summary.collectives}
        for summary in (a, b)
    )
    for key in dict.fromkeys((*before, *after)):
        changes += _changes((None, *key), _OF_MATCHED, before.get(key), after.get(key))
    return TraceDifference(changes, notes)


def _rank_changes(a: RankSummary, b: RankSummary) -> Iterator[Change]:
    key = (a.rank, None, None)
    yield from _changes(key, _OF_RANK, a, b)
    yield from _changes(key, _OF_STEPS, a.steps, b.steps, prefix="step_")
    before, after = ({calls.name: calls for calls in rank.nccl} for rank in (a, b))
    for name in dict.fromkeys((*before, *after)):
        yield from _changes((a.rank, name, None), _OF_CALLS, before.get(name), after.get(name))


def _changes(
    key: ChangeKey, quantities: Sequence[str], a: object, b: object, prefix: str = ""
) -> Iterator[Change]:
    """Yield the changes of the quantities that either of two summaries has."""
    for quantity in quantities:
        before, after = getattr(a, quantity, None), getattr(b, quantity, None)
        if before is None and after is None:
            continue
        ratio = after / before if before and after is not None else None
        yield Change(*key, prefix + quantity, before, after, ratio)


def _words(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
