"""Which deadline of a cell has passed: of its start, of a rank's silence, of the whole cell."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.host.processes import ENDED
from benchmarks.record import Failure
from conf import schema
from launch.supervision.progress import Rank, Watch


@dataclass(frozen=True)
class Hang:
    """Ranks that live and do not go on; who is at fault is not known yet."""

    what: str  # what the rank at fault did, as the end of a sentence


def overdue(
    watch: Watch, opened: float, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> Failure | Hang | None:
    """Return what is to be said if a deadline has passed.

    `opened` and `now` are monotonic seconds, `opened` of the start; `state` returns what a process, by number and id, does.
    """
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing and now - opened > limits.start_timeout_s:
        names = ", ".join(rank.name for rank in missing)
        return Failure("start", missing[0].number, f"{names} did not report within {limits.start_timeout_s:g} s")
    passed = [] if missing else [_passed(watch, rank, now, limits, state) for rank in watch.everyone]
    if any(passed):
        return Hang(f"gave no sign for {min(filter(None, passed)):g} s")
    last_seen = max(rank.last_seen for rank in watch.everyone)
    if all(rank.done for rank in watch.everyone) and now - last_seen > limits.start_timeout_s:
        return Failure(
            "hang", None, f"all ranks are done, and what started them did not end within {limits.start_timeout_s:g} s"
        )
    if now - opened > limits.cell_timeout_s:
        return Hang(f"was not done when the cell's {limits.cell_timeout_s:g} s were over")
    return None


def _passed(
    watch: Watch, rank: Rank, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> float | None:
    """Return the deadline in seconds after which a process that still exists has written nothing; None if it has not passed.

    The first step compiles, tunes and connects without a sign: a rank has as long for it as for the start. A process that was
    stopped does none of that, and a server gives a sign every second from its start on.
    """
    silent_s, deadline_s = now - rank.last_seen, limits.silence_timeout_s
    if rank.pid is None or silent_s <= deadline_s:
        return None
    does = state(rank.number, rank.pid)
    if rank.done and does in ENDED:
        return None
    if rank in watch.ranks and rank.iterations == 0 and does != "stopped":
        deadline_s = max(deadline_s, limits.start_timeout_s)
    return deadline_s if silent_s > deadline_s else None
