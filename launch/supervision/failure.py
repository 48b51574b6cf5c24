"""Why a cell failed, and which rank was the first: told from what the ranks said, how they ended, and what they last did."""

import contextlib
import json
import re
import signal

from benchmarks.record import CellFolder, Failure
from launch.engines import processes
from launch.supervision.progress import Rank, Watch

LOG_TAIL_LINES = 20
# What a rank says when a peer went away: the consequence of a failure, not its cause.
CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(closed|reset) by (remote )?peer|broken pipe|"
    r"remote (process|server)|socket timeout|pair closure|communicator was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory")
NCCL_ERROR = re.compile(r"NCCL|ncclInternal|ncclSystem|ncclInvalid|DistBackendError")


def hang(watch: Watch, what: str) -> Failure:
    """Name the process that the others wait for: one stopped or stuck in the kernel, else the rank furthest behind."""
    waiting = [rank for rank in watch.everyone if not rank.done] or watch.everyone
    states = {rank.number: processes.state(rank.pid) if rank.pid else "not started" for rank in waiting}
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
        return Failure(
            "hang", None, f"no rank is behind the others; each {what} in phase {waiting[0].phase or 'start'!r}"
        )
    rank = suspects[0]
    where = f"in phase {rank.phase or 'start'!r} after {counts[rank.number]} iterations; its process is {states[rank.number]}"
    return Failure("hang", rank.number, f"{rank.name} {what}, {where}")


def left_early(watch: Watch) -> Failure | None:
    """The agent is content: whether a rank left early all the same, with status 0."""
    early = [rank for rank in watch.everyone if not rank.done]
    return _untold(early[0], 0) if early else None


def first_cause(watch: Watch, folder: CellFolder, returncode: int) -> Failure:
    """The first failing rank: one that said why, one that died without a word, then one that lost a peer."""
    try:
        exits = {int(rank): int(code) for rank, code in json.loads(folder.failures.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        exits = {}
    spoke = sorted((rank for rank in watch.everyone if rank.error), key=lambda rank: float(rank.error["time"]))  # type: ignore[index]
    first = [rank for rank in spoke if not CONSEQUENCE.search(str(rank.error["message"]))]  # type: ignore[index]
    # In the order in which the agent noticed them. It ends the others with SIGTERM: those are not the first.
    unsaid = [(watch.everyone[number], code) for number, code in exits.items() if not watch.everyone[number].error]
    died = [(rank, code) for rank, code in unsaid if code != -signal.SIGTERM]
    left = [rank for rank in watch.everyone if not rank.done and not rank.error and rank.number not in exits]
    if first:
        return _told(first[0])
    if died:
        return _untold(*died[0])
    if spoke and left:  # with status 0, which the agent takes for success
        return _untold(left[0], 0)
    if spoke:
        return _told(spoke[0])
    if unsaid:
        return _untold(*unsaid[0])
    how = f"by {signal.Signals(-returncode).name}" if returncode < 0 else f"with status {returncode}"
    return Failure("killed" if returncode < 0 else "start", None, f"the agent ended {how} before any rank failed")


def _told(rank: Rank) -> Failure:
    assert rank.error is not None
    kind, message = str(rank.error["type"]), str(rank.error["message"]).strip()
    first = message.splitlines()[0] if message else kind
    text = f"{kind} {message}"
    cause = "oom" if OUT_OF_MEMORY.search(text) else "nccl" if NCCL_ERROR.search(text) else "exception"
    return Failure(cause, rank.number, f"{rank.name} raised {kind} in phase {rank.phase or 'start'!r}: {first}")


def _untold(rank: Rank, code: int) -> Failure:
    where = f"in phase {rank.phase or 'start'!r}" if rank.phase else "before it reported"
    if code < 0:
        name = signal.Signals(-code).name
        return Failure("killed", rank.number, f"{rank.name} was ended by {name} {where}")
    return Failure("exception", rank.number, f"{rank.name} exited with status {code} {where}, without a word")


def _tail(lines: list[str]) -> list[str]:
    """The last lines; where faulthandler wrote last, the top of the main thread's stack: the call that matters is there."""
    current = max((number for number, line in enumerate(lines) if line.startswith("Current thread")), default=None)
    if current is None or any(line.startswith("Traceback") for line in lines[current:]):
        return lines[-LOG_TAIL_LINES:]
    fatal = [line for line in lines[:current] if line.startswith("Fatal Python error")][-1:]
    return [*fatal, *lines[current:]][:LOG_TAIL_LINES]


def with_log(failure: Failure, folder: CellFolder) -> Failure:
    """The failure with the end of the log that tells most."""
    rank, agent = folder.rank_log(failure.rank or 0), folder.agent_log
    # The agent of a cell that we ended ourselves only says that we did.
    for path in [rank] if failure.cause == "hang" else [agent, rank] if failure.rank is None else [rank, agent]:
        with contextlib.suppress(OSError):
            if lines := _tail(path.read_text(encoding="utf-8", errors="replace").splitlines()):
                return Failure(failure.cause, failure.rank, failure.message, "\n".join(line[:500] for line in lines))
    return failure
