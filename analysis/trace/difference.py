"""Compare two traces: what changed per rank and per collective, with ratios of second to first."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.errors import UnreadableInput
from analysis.trace.summary import Row, TraceSummary

# The quantities that are compared, as the summaries name them.
_OF_RANK = (
    *("comm_ms", "exposed_ms", "overlapped_ms", "wait_ms", "compute_ms", "gpu_idle_share"),
    "gap_us",
)
_OF_STEPS = ("median_ms", "comm_ms", "exposed_ms", "exposed_in_gaps_ms", "wait_ms")
_OF_CALLS = ("calls", "avg_us", "median_us", "total_ms")
_OF_MATCHED = ("matched", "transfer_avg_us", "transfer_median_us", "wait_avg_us")


def compare_traces(a: TraceSummary, b: TraceSummary) -> tuple[list[Row], list[str]]:
    """Return a row per quantity that either trace has, and notes on what cannot be compared.

    `ratio` is b / a, None if either is unknown or a is 0. `rank` is None for all ranks together,
    `collective` None for all collectives, `communicator` None if the traces do not name it.

    Raises:
        UnreadableInput: the traces have no common rank.
    """
    first = {rank["rank"]: rank for rank in a.to_json()["ranks"]}
    second = {rank["rank"]: rank for rank in b.to_json()["ranks"]}
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UnreadableInput(
            f"the traces share no rank (ranks {_listed(first)} against {_listed(second)}): give "
            "the files of all ranks of a run as one trace, as a folder or joined by commas"
        )
    notes = []
    if first.keys() != second.keys():
        notes.append(f"ranks {_listed(first.keys() ^ second.keys())} are in one trace only")
    rows: list[Row] = []
    for rank in common:
        before, after = first[rank], second[rank]
        rows += _changes((rank, None, None), _OF_RANK, before, after)
        rows += _changes((rank, None, None), _OF_STEPS, before["steps"], after["steps"], "step_")
        calls_before = {calls["name"]: calls for calls in before["nccl"]}
        calls_after = {calls["name"]: calls for calls in after["nccl"]}
        for name in calls_before | calls_after:
            key = (rank, name, None)
            rows += _changes(key, _OF_CALLS, calls_before.get(name), calls_after.get(name))
    counts = [row for row in rows if row["quantity"] == "calls" and row["a"] != row["b"]]
    if counts:
        names = _listed({row["collective"] for row in counts})
        notes.append(
            f"the traces differ in the number of calls ({names}): compare averages, not totals"
        )
    matched_before, matched_after = _matched(a), _matched(b)
    for name, group in matched_before | matched_after:
        before, after = matched_before.get((name, group)), matched_after.get((name, group))
        rows += _changes((None, name, group), _OF_MATCHED, before, after)
    return rows, notes


def _matched(summary: TraceSummary) -> dict[tuple[str, str | None], Row]:
    rows = {}
    for row in summary.collectives:
        wait_avg_us = 1e3 * row["wait_ms"] / row["matched"]
        rows[row["name"], row["communicator"]] = row | {"wait_avg_us": wait_avg_us}
    return rows


def _changes(
    key: tuple[int | None, str | None, str | None],
    quantities: Sequence[str],
    a: Mapping[str, Any] | None,
    b: Mapping[str, Any] | None,
    prefix: str = "",
) -> list[Row]:
    rows = []
    for quantity in quantities:
        before, after = (a or {}).get(quantity), (b or {}).get(quantity)
        if before is None and after is None:
            continue
        ratio = None
        if before and after is not None:
            ratio = after / before
        row = dict(zip(("rank", "collective", "communicator"), key, strict=True))
        rows.append(row | {"quantity": prefix + quantity, "a": before, "b": after, "ratio": ratio})
    return rows


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
