"""Name the cause of a failed cell and its first failing rank, from the lines of the ranks and from how they ended."""

import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.host import processes
from benchmarks.record import CellFolder, Failure, decoded
from launch.engines.engine import Lost
from launch.supervision.logs import end_of
from launch.supervision.progress import Rank, Watch

# What the exception of a rank says if a peer went away: the consequence of a failure, not its cause.
CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(closed|reset) by (remote )?peer|broken pipe|"
    r"remote (process|server)|socket timeout|pair closure|communicator was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory")
CUDA_ERROR = re.compile(r"CUDA error: ")
UNCAUGHT = re.compile(r"^ *what\(\): +(.{1,500})", re.M)
NCCL_ERROR = re.compile(r"NCCL|ncclInternal|ncclSystem|ncclInvalid|DistBackendError")


@dataclass(frozen=True)
class End:
    """How a process of a cell ended that should not have, and when."""

    status: int | None  # a signal if negative; None: nobody knows
    time: float  # seconds since 1970; of several that were found ended at one look, the same


def ends(folder: CellFolder) -> dict[int, End]:
    """Return how ranks ended by themselves, as the agent saw it before it ended the others; former agents gave no time."""
    try:
        found = decoded(folder.failures.read_bytes())
        return {int(rank): _end(one) for rank, one in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return {}


def _end(found: Any) -> End:
    if isinstance(found, dict):
        return End(None if found["status"] is None else int(found["status"]), float(found["time"]))
    return End(int(found), 0.0)


def first_cause(
    watch: Watch, folder: CellFolder, ended: Mapping[int, End], agent_status: int | None, lost: Lost | None = None
) -> Failure | None:
    """Return the failure of what ended first by itself, a rank or a host; None if every rank was done.

    `agent_status` is the exit status of the agent, None if it still ran; `lost` is a host that is lost.
    """
    wrote = {rank.number: float(rank.error["time"]) for rank in watch.everyone if rank.error}
    ended = {number: end for number, end in ended.items() if 0 <= number < len(watch.everyone)}
    first = min([end.time for end in ended.values()], default=math.inf)
    # A rank that wrote why was ending even if the agent had not seen it yet.
    candidates = {number for number, end in ended.items() if end.time <= first}
    candidates |= {number for number, time in wrote.items() if time <= first}
    if candidates:
        number = min(candidates, key=lambda number: _order(watch.everyone[number], ended.get(number), wrote))
        rank = watch.everyone[number]
        if not lost or _was_before(lost, rank, ended.get(number), wrote):
            return _raised(rank) if rank.error else _ended(rank, ended[number].status, folder)
    if lost:
        return Failure("node_lost", None, lost.said)
    left = [rank for rank in watch.everyone if not rank.done and not rank.error]
    if agent_status is None or agent_status == 0:
        return _ended(left[0], agent_status, folder) if left else None
    how = f"by {processes.signal_name(agent_status)}" if agent_status < 0 else f"with status {agent_status}"
    return Failure("killed" if agent_status < 0 else "start", None, f"the agent ended {how} before any rank failed")


def _order(rank: Rank, end: End | None, wrote: Mapping[int, float]) -> tuple[int, float, int]:
    """Return a key that sorts ranks found ended at one look: what may be another's consequence comes later.

    An exception of its own comes first, then an end without a word, then an exception that a lost peer would also raise, and
    last SIGTERM, with which agents end the others.
    """
    if rank.error:
        return (2 if CONSEQUENCE.search(str(rank.error["message"])) else 0), wrote[rank.number], rank.number
    terminated = end is not None and end.status == -signal.SIGTERM
    return (3 if terminated else 1), 0.0, rank.number


def _was_before(lost: Lost, rank: Rank, end: End | None, wrote: Mapping[int, float]) -> bool:
    """Return whether a rank ended before a host was lost: by itself, and when the host was still heard afterwards."""
    time = wrote.get(rank.number, end.time if end else math.inf)
    return _order(rank, end, wrote)[0] < 2 and time < lost.heard


def _raised(rank: Rank) -> Failure:
    """Return the failure of a rank that wrote its exception."""
    assert rank.error is not None
    kind, message = str(rank.error["type"]), str(rank.error["message"]).strip()
    first = message.splitlines()[0] if message else kind
    where = f"in phase {rank.phase or 'start'!r}"
    return Failure(_cause_of(f"{kind} {message}"), rank.number, f"{rank.name} raised {kind} {where}: {first}")


def _cause_of(text: str) -> str:
    """Return the cause that the text of an exception tells."""
    if OUT_OF_MEMORY.search(text):
        return "oom"
    # torch's watchdog of NCCL passes on what a kernel did.
    return "nccl" if NCCL_ERROR.search(text) and not CUDA_ERROR.search(text) else "exception"


def _ended(rank: Rank, status: int | None, folder: CellFolder) -> Failure:
    """Return the failure of a rank that ended without writing why; `status` is its exit status, a signal if negative."""
    where = f"in phase {rank.phase!r}" if rank.phase else "before it reported"
    if status is None:
        return Failure("killed", rank.number, f"{rank.name} ended {where}, and the agent did not say how")
    if status < 0:
        ended = f"{rank.name} was ended by {processes.signal_name(status)} {where}"
        # An exception in a thread of C++ ends the process without Python's knowledge.
        said = UNCAUGHT.findall(end_of(folder.rank_log(rank.number))) if status == -signal.SIGABRT else []
        if said:
            return Failure(_cause_of(said[-1]), rank.number, f"{ended}: {said[-1]}")
        return Failure("killed", rank.number, ended)
    early = ", before it was done," if status == 0 else ""
    return Failure(
        "exception", rank.number, f"{rank.name} left with status {status} {where}{early} and wrote no reason"
    )
