"""Name the cause of a failed cell and its first failing rank, from the lines of the ranks and from how they ended."""

import contextlib
import json
import re
import signal
from collections.abc import Callable

from benchmarks.record import CellFolder, Failure
from launch.supervision.progress import Rank, Watch

LOG_TAIL_LINES = 20
# What the exception of a rank says if a peer went away: the consequence of a failure, not its cause.
CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(closed|reset) by (remote )?peer|broken pipe|"
    r"remote (process|server)|socket timeout|pair closure|communicator was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory")
NCCL_ERROR = re.compile(r"NCCL|ncclInternal|ncclSystem|ncclInvalid|DistBackendError")


def hang(watch: Watch, what: str, state: Callable[[int], str]) -> Failure:
    """Return a hang that names the process for which the others wait: one stopped or stuck in the kernel, else the last rank.

    `what` is what the process did, as the end of a sentence; `state` returns what a process does now.
    """
    waiting = [rank for rank in watch.everyone if not rank.done] or watch.everyone
    states = {rank.number: state(rank.pid) if rank.pid else "not started" for rank in waiting}
    odd = [
        rank
        for rank in waiting
        if states[rank.number] in ("stopped", "disk-sleep", "tracing-stop", "gone", "not started")
    ]
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    counts = {rank.number: watch.count(rank) for rank in waiting}
    least = min((counts[rank.number] for rank in stepping), default=0)
    behind = [rank for rank in stepping if counts[rank.number] == least]
    suspects = odd or (behind if len(behind) < len(stepping) or len(waiting) == 1 else [])
    if not suspects:
        phase = waiting[0].phase or "start"
        return Failure("hang", None, f"no rank is behind the others; each {what} in phase {phase!r}")
    rank = suspects[0]
    where = f"in phase {rank.phase or 'start'!r} after {counts[rank.number]} iterations; its process is {states[rank.number]}"
    return Failure("hang", rank.number, f"{rank.name} {what}, {where}")


def left_early(watch: Watch) -> Failure | None:
    """Return a failure if a rank ended before it was done although the agent ended with status 0."""
    early = [rank for rank in watch.everyone if not rank.done]
    return _ended(early[0], 0) if early else None


def first_cause(watch: Watch, folder: CellFolder, returncode: int) -> Failure:
    """Return the failure of the first failing rank: one that wrote why, else one that died, else one that lost a peer.

    `returncode` is the exit status of the agent.
    """
    try:
        exits = {int(rank): int(code) for rank, code in json.loads(folder.failures.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        exits = {}
    wrote = sorted((rank for rank in watch.everyone if rank.error), key=lambda rank: float(rank.error["time"]))  # type: ignore[index]
    first = [rank for rank in wrote if not CONSEQUENCE.search(str(rank.error["message"]))]  # type: ignore[index]
    # In the order in which the agent noticed them. It ends the others with SIGTERM: those are not the first.
    silent = [(watch.everyone[number], code) for number, code in exits.items() if not watch.everyone[number].error]
    died = [(rank, code) for rank, code in silent if code != -signal.SIGTERM]
    left = [rank for rank in watch.everyone if not rank.done and not rank.error and rank.number not in exits]
    if first:
        return _raised(first[0])
    if died:
        return _ended(*died[0])
    if wrote and left:  # with status 0, which the agent takes for success
        return _ended(left[0], 0)
    if wrote:
        return _raised(wrote[0])
    if silent:
        return _ended(*silent[0])
    how = f"by {signal.Signals(-returncode).name}" if returncode < 0 else f"with status {returncode}"
    return Failure("killed" if returncode < 0 else "start", None, f"the agent ended {how} before any rank failed")


def _raised(rank: Rank) -> Failure:
    """Return the failure of a rank that wrote its exception."""
    assert rank.error is not None
    kind, message = str(rank.error["type"]), str(rank.error["message"]).strip()
    first = message.splitlines()[0] if message else kind
    text = f"{kind} {message}"
    cause = "oom" if OUT_OF_MEMORY.search(text) else "nccl" if NCCL_ERROR.search(text) else "exception"
    return Failure(cause, rank.number, f"{rank.name} raised {kind} in phase {rank.phase or 'start'!r}: {first}")


def _ended(rank: Rank, code: int) -> Failure:
    """Return the failure of a rank that ended without writing why; `code` is its exit status, a signal if negative."""
    where = f"in phase {rank.phase or 'start'!r}" if rank.phase else "before it reported"
    if code < 0:
        name = signal.Signals(-code).name
        return Failure("killed", rank.number, f"{rank.name} was ended by {name} {where}")
    return Failure("exception", rank.number, f"{rank.name} exited with status {code} {where} and wrote no reason")


def _tail(lines: list[str]) -> list[str]:
    """Return the last lines; if faulthandler wrote last, the top of the main thread's stack, which has the call that matters."""
    current = max((number for number, line in enumerate(lines) if line.startswith("Current thread")), default=None)
    if current is None or any(line.startswith("Traceback") for line in lines[current:]):
        return lines[-LOG_TAIL_LINES:]
    fatal = [line for line in lines[:current] if line.startswith("Fatal Python error")][-1:]
    return [*fatal, *lines[current:]][:LOG_TAIL_LINES]


def with_log(failure: Failure, folder: CellFolder) -> Failure:
    """Return the failure with the end of the log that says most about it."""
    rank, agent = folder.rank_log(failure.rank or 0), folder.agent_log
    paths = [agent, rank] if failure.rank is None else [rank, agent]
    if failure.cause == "hang":  # we ended the cell, and the agent's log only says that
        paths = [rank]
    for path in paths:
        with contextlib.suppress(OSError):
            if lines := _tail(path.read_text(encoding="utf-8", errors="replace").splitlines()):
                return Failure(failure.cause, failure.rank, failure.message, "\n".join(line[:500] for line in lines))
    return failure
