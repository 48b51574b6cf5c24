"""Name the cause of a failed cell: a deadline that passed, the first failing rank, what the machine
lacked; of a hang the rank at fault, by state, stack, collectives and iteration count."""

import dataclasses
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.agent import processes
from benchmarks.agent.processes import ENDED
from benchmarks.agent.protocol import RankEnd
from benchmarks.agent.scratch import is_full
from benchmarks.record import CellFolder, Failure
from conf import schema
from conf.host import SHARED_MEMORY_FOLDER, control_groups, kernel_count
from launch.engines.engine import Lost
from launch.supervision.watch import Rank, StackState, Watch, doubted_network

# What an exception says if a peer went away: the consequence of a failure, not its cause.
CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(closed|reset) by (remote )?peer|"
    r"broken pipe|remote (process|server)|socket timeout|pair closure|communicator was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory")
CUDA_ERROR = re.compile(r"CUDA error: ")
UNCAUGHT = re.compile(r"^ *what\(\): +(?=.)", re.M)
NCCL_ERROR = re.compile(r"NCCL|ncclInternal|ncclSystem|ncclInvalid|DistBackendError")
NCCL_LAST_ERROR = re.compile(r"Last error: *\n(?!Exception raised)(.*\S)")

MOST_LOG_BYTES = 1 << 20  # of a log's end that are read
TAIL_LINES = 20
TAIL_CHARACTERS = 500  # of a line
UNKNOWN = RankEnd(None, 0.0)
LIKELY_CONSEQUENCE = 2  # of the orders below, from this on
STACK_HEADS = ("Current thread", "Fatal Python error")  # how a tail begins that is faulthandler's


def overdue(
    watch: Watch, opened: float, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> Failure | str | None:
    """Return what is wrong if a deadline has passed: of the start, of a silence, of the cell.

    `opened` and `now` are monotonic seconds; `state` returns what a process does, by number and id.
    Of ranks that live and do not go on it is what the rank at fault did, as the end of a sentence
    (launch.supervision.failure finds the rank).
    """
    start_s = limits.start_timeout_s
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing and now - opened > start_s:
        names = ", ".join([rank.name for rank in missing])
        sentence = f"{names} did not report within {start_s:g} s (engine.start_timeout_s)"
        return Failure("start", missing[0].index, sentence)
    last_seen = 0.0
    all_done = True
    passed = []
    for rank in watch.everyone:
        last_seen = max(last_seen, rank.last_seen)
        all_done = all_done and rank.done
        silent_s = now - rank.last_seen
        deadline_s = limits.silence_timeout_s
        if missing or rank.pid is None or silent_s <= deadline_s:
            continue
        process_state = state(rank.index, rank.pid)
        if rank.done and process_state in ENDED:
            continue
        # The first step compiles, tunes and connects without a sign: a rank has as long for it as
        # for the start. A process that was stopped does none of that, and a server gives a sign
        # every second.
        if rank in watch.ranks and rank.iterations == 0 and process_state != "stopped":
            deadline_s = max(deadline_s, limits.start_timeout_s)
        if silent_s > deadline_s:
            passed.append(deadline_s)
    if passed:
        return f"gave no sign for {min(passed):g} s"
    if all_done and now - last_seen > start_s:
        sentence = f"all ranks are done, and what started them did not end within {start_s:g} s"
        return Failure("hang", None, sentence + doubted_network(watch.everyone))
    if now - opened > limits.cell_timeout_s:
        return f"was not done after {limits.cell_timeout_s:g} s (engine.cell_timeout_s)"
    return None


def first_cause(
    watch: Watch,
    folder: CellFolder,
    ended: Mapping[int, RankEnd],
    agent_status: int | None,
    lost: Lost | None = None,
) -> Failure | None:
    """Return the failure of the first rank or host that ended by itself; None without one.

    `agent_status` is the exit status of the agent, None if it still ran; `lost` is a lost host.
    """
    ended = {rank.index: ended[rank.index] for rank in watch.everyone if rank.index in ended}
    first_end_s = min([end.time for end in ended.values()], default=math.inf)
    candidates = []
    for rank in watch.everyone:
        end = ended.get(rank.index)
        times = [end.time] if end else []
        if rank.error:
            times.append(float(rank.error["time"]))
        # A rank that wrote why was ending even if the agent had not seen it yet.
        if times and min(times) <= first_end_s:
            candidates.append(_order(rank, end))
    if candidates:
        order, time_s, rank_number = min(candidates)
        rank = watch.everyone[rank_number]
        # A host that was still heard afterwards was not lost before.
        if not lost or (order < LIKELY_CONSEQUENCE and time_s < lost.heard):
            return _failure_of(rank, ended.get(rank_number, UNKNOWN), folder)
    if lost:
        return Failure("node_lost", None, lost.sentence)
    if agent_status and agent_status < 0:
        how = f"by {processes.signal_name(agent_status)}"
        return Failure("killed", None, f"the agent ended {how} before any rank failed")
    if agent_status:
        sentence = f"the agent ended with status {agent_status} before any rank failed"
        return Failure("start", None, sentence)
    for rank in watch.everyone:
        if not rank.done and not rank.error:
            return _failure_of(rank, RankEnd(agent_status, 0.0), folder)
    return None


def _order(rank: Rank, end: RankEnd | None) -> tuple[int, float, int]:
    """Return a key that sorts ranks found ended at one look: (order, time, rank).

    An exception of its own comes first, then an end without a word, then an exception that a lost
    peer would also raise, and last SIGTERM, with which agents end the others.
    """
    if rank.error:
        order = 0
        if CONSEQUENCE.search(str(rank.error["message"])):
            order = LIKELY_CONSEQUENCE
        return order, float(rank.error["time"]), rank.index
    assert end is not None
    order = 1
    if end.status == -signal.SIGTERM:
        order = LIKELY_CONSEQUENCE + 1
    return order, end.time, rank.index


def _cause_of(text: str) -> str:
    if OUT_OF_MEMORY.search(text):
        return "oom"
    # torch's watchdog of NCCL passes on what a kernel did.
    if NCCL_ERROR.search(text) and not CUDA_ERROR.search(text):
        return "nccl"
    return "exception"


def _reason(message: str) -> str:
    """Return the first line of a message, behind NCCL's own last error where it passes one on."""
    first_line, of_nccl = message.splitlines()[0][:TAIL_CHARACTERS], NCCL_LAST_ERROR.search(message)
    return f"{of_nccl[1].strip()} ({first_line})" if of_nccl else first_line


def _failure_of(rank: Rank, end: RankEnd, folder: CellFolder) -> Failure:
    """Return what a rank raised, or how it ended without a word: by its exit status."""
    if rank.error:
        kind, message = str(rank.error["type"]), str(rank.error["message"]).strip()
        where = f"in phase {rank.phase or 'start'!r}"
        sentence = f"{rank.name} raised {kind} {where}: {_reason(message or kind)}"
        return Failure(_cause_of(f"{kind} {message}"), rank.index, sentence)
    where = "before it reported"
    if rank.phase:
        where = f"in phase {rank.phase!r}"
    status = end.status
    if status is None:
        why = ", and the agent did not say how"
        if end.why:
            why = f": {end.why}"
        return Failure("killed", rank.index, f"{rank.name} ended {where}{why}")
    if status >= 0:
        if status == 0:
            where += ", before it was done,"
        why = " and wrote no reason"
        if end.why:
            why = f": {end.why}"
        sentence = f"{rank.name} ended with status {status} {where}{why}"
        return Failure("exception", rank.index, sentence)
    sentence = f"{rank.name} was ended by {processes.signal_name(status)} {where}"
    if status == -signal.SIGABRT:
        # An exception in a thread of C++ ends the process without Python's knowledge.
        *before, uncaught = UNCAUGHT.split(_log_end(folder.rank_log(rank.index)))
        if before:
            reason = _reason(uncaught)
            return Failure(_cause_of(reason), rank.index, f"{sentence}: {reason}")
    return Failure("killed", rank.index, sentence)


def _log_end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def with_log(failure: Failure, folder: CellFolder) -> Failure:
    """Return the failure with the end of the log that says most about it."""
    if failure.cause == "node_lost":  # no log says more
        return failure
    rank_log = folder.rank_log(failure.rank or 0)
    paths = [rank_log, folder.agent_log]
    if failure.cause == "hang":  # we ended the cell, and the agent's log only says that
        paths = [rank_log]
    elif failure.rank is None:
        paths = [folder.agent_log, rank_log]
    for path in paths:
        lines = _log_end(path).splitlines()
        stack_line = None  # where the stack of the main thread begins, if faulthandler wrote last
        error: list[str] = []
        fatal: list[str] = []  # the error before that stack
        for index, line in enumerate(lines):
            if line.startswith("Current thread"):
                stack_line, fatal = index, error
            elif line.startswith("Traceback"):
                stack_line = None
            elif line.startswith("Fatal Python error"):
                error = [line]
        if stack_line is None:
            lines = lines[-TAIL_LINES:]
        else:
            lines = [*fatal, *lines[stack_line:]][:TAIL_LINES]
        if lines:
            tail = "\n".join(line[:TAIL_CHARACTERS] for line in lines)
            return Failure(failure.cause, failure.rank, failure.message, tail)
    return failure


def few_lines(log_tail: str, most: int) -> list[str]:
    """Return a few lines of a log tail; a stack has its newest call first."""
    lines = log_tail.splitlines()
    if lines and lines[0].startswith(STACK_HEADS):
        return lines[:most]
    return lines[-most:]


# What the machine lacked: a rank without memory often dies silently.
@dataclass(frozen=True)
class ResourceSnapshot:
    """Counts of the kernel when a cell was started; `explain` compares them with those of now."""

    oom_kills: int
    pids_refused: int

    @staticmethod
    def take() -> "ResourceSnapshot":
        """Return the counts of now."""
        refused = 0
        for folder, _ in control_groups("pids"):
            refused = refused or kernel_count(folder / "pids.events", "max")
        return ResourceSnapshot(kernel_count(Path("/proc/vmstat"), "oom_kill"), refused)

    def explain(self, failure: Failure, folder: Path) -> Failure:
        """Return the failure with what the machine lacks; SIGKILL for memory makes an `oom`."""
        now = ResourceSnapshot.take()
        cause = failure.cause
        sentences = [failure.message]
        try:
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                sentences.append(f"the file system of {folder} is read-only")
            elif is_full(folder):
                sentences.append(f"there is no space left on the file system of {folder}")
        except OSError:
            sentences.append(f"{folder} is gone: removed, or no longer mounted")
        if is_full(SHARED_MEMORY_FOLDER):
            sentences.append("/dev/shm is full")
        if now.pids_refused > self.pids_refused:
            sentences.append(
                "no further process or thread may be started here (pids.max of the control group)"
            )
        if now.oom_kills > self.oom_kills and cause in ("killed", "start"):
            cause = "oom"
            sentences.append("the kernel killed a process meanwhile because memory was short")
        return dataclasses.replace(failure, cause=cause, message="; ".join(sentences))


STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")


class Suspect(NamedTuple):
    """The rank to name, and why where that needs a reason."""

    rank: Rank | None
    # Its collective of this number was another than that of the others.
    collective: int = 0
    began: str = ""
    usual: str = ""
    is_last: bool = False  # of those that wait in different places


def explain_hang(watch: Watch, what: str) -> Failure:
    """Return a hang that names the rank that is not where the others are.

    `what` is what the rank did, as the end of a sentence. The ranks have their states and
    locations.
    """
    running = []
    living = []
    for member in watch.everyone:
        if not member.done:
            running.append(member)
        if member.state not in ENDED:
            living.append(member)
    waiting = running or living or watch.everyone
    suspect = _suspect(watch, waiting)
    rank = suspect.rank
    between = ""
    all_wait = all(
        member.location and member.location.state is StackState.WAITING for member in waiting
    )
    if all_wait and not suspect.began:
        between = doubted_network(watch.everyone)
    if rank is None:
        phase = waiting[0].phase or "start"
        each = _activities(waiting)
        sentence = f"no rank is behind the others; each {what} in phase {phase!r}: {each}"
        return Failure("hang", None, f"{sentence}{between}")
    where = f"in phase {rank.phase or 'start'!r} after {watch.count(rank)} iterations"
    sentence = f"{rank.name} {what}, {where}: it {_activity(rank)}"
    rest = [peer for peer in waiting if peer is not rank]
    if rest:
        sentence += f", while {_activities(rest)}"
    if suspect.began:
        sentence += (
            f"; its collective {suspect.collective} was {suspect.began} where that of the others "
            f"was {suspect.usual}"
        )
    if suspect.is_last:
        sentence += "; nothing tells which of them is wrong, and the last is named"
    return Failure("hang", rank.index, f"{sentence}{between}")


def _suspect(watch: Watch, waiting: Sequence[Rank]) -> Suspect:
    """Return the rank to name.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while
    another waits; one that wrote no stack though others did; one that began another collective than
    the others; the fewest iterations; one that works while others wait; one that waits elsewhere
    than most; the last of those that wait in different places.
    """
    for rank in waiting:
        if rank.state in STUCK:
            return Suspect(rank)
    if len(waiting) == 1:
        return Suspect(waiting[0])
    by_state: dict[StackState, list[Rank]] = {}
    silent = []
    for rank in waiting:
        if rank.location:
            by_state.setdefault(rank.location.state, []).append(rank)
        else:
            silent.append(rank)
    least = min(by_state, default=StackState.WAITING)
    if len(by_state) > 1 and least <= StackState.FOREIGN:
        return Suspect(by_state[least][0])
    if by_state and silent:
        return Suspect(silent[0])
    suspect = _another_collective(waiting)
    if suspect.rank:
        return suspect
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    if len(set(map(watch.count, stepping))) > 1:
        return Suspect(min(stepping, key=watch.count))
    if len(by_state) > 1:
        return Suspect(by_state[least][0])
    by_words: dict[str, list[Rank]] = {}
    for rank in stepping:
        if rank.location:
            by_words.setdefault(rank.location.words, []).append(rank)
    most = max(map(len, by_words.values()), default=0)
    for group in by_words.values():
        if len(group) < most:
            return Suspect(group[0])
    if len(by_words) < 2:  # all wait in one place
        return Suspect(None)
    return Suspect(stepping[-1], is_last=True)


def _another_collective(ranks: Sequence[Rank]) -> Suspect:
    """Return the only rank that began another collective than most."""
    recorded = []
    for rank in ranks:
        if rank.location and rank.location.collectives:
            recorded.append((rank, rank.location.collectives))
    if len(recorded) < 2:
        return Suspect(None)
    common = set(recorded[0][1])
    for _, collectives in recorded:
        common &= set(collectives)
    for key in sorted(common, key=lambda key: key[1]):
        names = Counter([collectives[key] for _, collectives in recorded])
        usual, most = names.most_common(1)[0]
        odd = []
        for rank, collectives in recorded:
            if names[collectives[key]] < most:
                odd.append(Suspect(rank, key[1], collectives[key], usual))
        if len(odd) == 1:
            return odd[0]
        if len(names) > 1:
            break
    return Suspect(None)


def _activity(rank: Rank) -> str:
    if rank.state in STUCK:
        return f"is {rank.state}"
    if rank.location:
        return rank.location.words
    return f"wrote no stack, and its process is {rank.state}"


def _activities(ranks: Sequence[Rank]) -> str:
    """Return what several ranks do: 'each of rank 0, rank 2 waits…'."""
    names_by_activity: dict[str, list[str]] = {}
    for rank in ranks:
        names_by_activity.setdefault(_activity(rank), []).append(rank.name)
    parts = []
    for activity, names in names_by_activity.items():
        each = names[0]
        if len(names) > 1:
            each = f"each of {', '.join(names)}"
        parts.append(f"{each} {activity}")
    return ", ".join(parts)
