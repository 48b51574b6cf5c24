"""Name the cause of a failed cell and its first failing rank, from the lines of the ranks and from how they ended."""

import contextlib
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from benchmarks.agent import processes
from benchmarks.agent.processes import ENDED
from benchmarks.record import CellFolder, Failure, decoded
from conf import schema
from launch.engines.engine import Lost
from launch.engines.environment import ROOT
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
    watch: Watch,
    folder: CellFolder,
    ended: Mapping[int, End],
    agent_status: int | None,
    lost: Lost | None = None,
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
        number = min(
            candidates, key=lambda number: _order(watch.everyone[number], ended.get(number), wrote)
        )
        rank = watch.everyone[number]
        if not lost or _was_before(lost, rank, ended.get(number), wrote):
            return _raised(rank) if rank.error else _ended(rank, ended[number].status, folder)
    if lost:
        return Failure("node_lost", None, lost.said)
    left = [rank for rank in watch.everyone if not rank.done and not rank.error]
    if agent_status is None or agent_status == 0:
        return _ended(left[0], agent_status, folder) if left else None
    how = (
        f"by {processes.signal_name(agent_status)}"
        if agent_status < 0
        else f"with status {agent_status}"
    )
    return Failure(
        "killed" if agent_status < 0 else "start",
        None,
        f"the agent ended {how} before any rank failed",
    )


def _order(rank: Rank, end: End | None, wrote: Mapping[int, float]) -> tuple[int, float, int]:
    """Return a key that sorts ranks found ended at one look: what may be another's consequence comes later.

    An exception of its own comes first, then an end without a word, then an exception that a lost peer would also raise, and
    last SIGTERM, with which agents end the others.
    """
    if rank.error:
        return (
            (2 if CONSEQUENCE.search(str(rank.error["message"])) else 0),
            wrote[rank.number],
            rank.number,
        )
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
    return Failure(
        _cause_of(f"{kind} {message}"), rank.number, f"{rank.name} raised {kind} {where}: {first}"
    )


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
        return Failure(
            "killed", rank.number, f"{rank.name} ended {where}, and the agent did not say how"
        )
    if status < 0:
        ended = f"{rank.name} was ended by {processes.signal_name(status)} {where}"
        # An exception in a thread of C++ ends the process without Python's knowledge.
        said = (
            UNCAUGHT.findall(end_of(folder.rank_log(rank.number)))
            if status == -signal.SIGABRT
            else []
        )
        if said:
            return Failure(_cause_of(said[-1]), rank.number, f"{ended}: {said[-1]}")
        return Failure("killed", rank.number, ended)
    early = ", before it was done," if status == 0 else ""
    return Failure(
        "exception",
        rank.number,
        f"{rank.name} left with status {status} {where}{early} and wrote no reason",
    )


# Which deadline of a cell has passed: of its start, of a rank's silence, of the whole cell.


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
        return Failure(
            "start",
            missing[0].number,
            f"{names} did not report within {limits.start_timeout_s:g} s",
        )
    passed = (
        [] if missing else [_passed(watch, rank, now, limits, state) for rank in watch.everyone]
    )
    if any(passed):
        return Hang(f"gave no sign for {min(filter(None, passed)):g} s")
    last_seen = max(rank.last_seen for rank in watch.everyone)
    if all(rank.done for rank in watch.everyone) and now - last_seen > limits.start_timeout_s:
        return Failure(
            "hang",
            None,
            f"all ranks are done, and what started them did not end within {limits.start_timeout_s:g} s",
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


# The end of the log that says most about a failed cell.


MOST_BYTES = 1 << 20  # of a log's end that are read
TAIL_LINES = 20
TAIL_CHARACTERS = 500  # of a line
STACK = ("Current thread", "Fatal Python error")  # how a tail begins that is faulthandler's


def end_of(path: Path) -> str:
    """Return the end of a log as text, '' where there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
        return file.read().decode("utf-8", errors="replace")
    return ""


def with_log(failure: Failure, folder: CellFolder) -> Failure:
    """Return the failure with the end of the log that says most about it."""
    if failure.cause == "node_lost":  # no log says more
        return failure
    rank, agent = folder.rank_log(failure.rank or 0), folder.agent_log
    paths = [agent, rank] if failure.rank is None else [rank, agent]
    if failure.cause == "hang":  # we ended the cell, and the agent's log only says that
        paths = [rank]
    for path in paths:
        if lines := _tail(end_of(path).splitlines()):
            tail = "\n".join(line[:TAIL_CHARACTERS] for line in lines)
            return Failure(failure.cause, failure.rank, failure.message, tail)
    return failure


def few_lines(log_tail: str, most: int) -> list[str]:
    """Return the lines of a failure's log tail to show where all are too many: a stack has its newest call first."""
    lines = log_tail.splitlines()
    return lines[:most] if lines and lines[0].startswith(STACK) else lines[-most:]


def _tail(lines: list[str]) -> list[str]:
    """Return the last lines; if faulthandler wrote last, the top of the main thread's stack, which has the call that matters."""
    current = max(
        (number for number, line in enumerate(lines) if line.startswith("Current thread")),
        default=None,
    )
    if current is None or any(line.startswith("Traceback") for line in lines[current:]):
        return lines[-TAIL_LINES:]
    fatal = [line for line in lines[:current] if line.startswith("Fatal Python error")][-1:]
    return [*fatal, *lines[current:]][:TAIL_LINES]


# Read where a rank stands, from what it wrote to its log when the supervisor asked (benchmarks.rank.stacks).


STACKS_MOST_BYTES = 1 << 18  # of a log that are read
MOST_LINES = 100_000  # of a file of source
MOST_CHARACTERS = 60  # of a line of source in a sentence
THREAD = re.compile(r"^(?:Thread|Current thread) 0x[0-9a-f]+.*\(most recent call first\):$")
COLLECTIVE = re.compile(r"^Collective (\w+) \(most recent call first\):$")
RECORDED = re.compile(r'^Recorded (\S+) (\d+) (\S+) "(.*)", line (\d+) in (.*)$')
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
TORCH = re.compile(r"/(?:site|dist)-packages/torch/(.*)$")
STANDARD_LIBRARY = re.compile(r"^<frozen |/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
WAITING_CALL = re.compile(r"\.(?:wait|synchronize|item|cpu|tolist)\(")
SLEEP = re.compile(r"\b(?:u|nano)?sleep\(")
OWN = ("benchmarks", "trainers", "conf")  # packages that ranks run
# Loops of ours that wait: file and function, and for what.
LOOPS = {
    ("trainers/kvstore/worker.py", "_meet"): "waits for the workers and servers to begin",
    ("trainers/kvstore/worker.py", "wait_for_replies"): "waits for the servers",
    ("trainers/kvstore/references.py", "send_far"): "waits for the servers",
    ("trainers/kvstore/remote.py", "__init__"): "waits for the servers to begin",
    ("trainers/kvstore/remote.py", "ask"): "waits for the servers",
    ("trainers/kvstore/server.py", "run"): "waits for gradients",
    ("trainers/kvstore/server_process.py", "_wait_for_workers"): "waits for the workers to begin",
    ("trainers/kvstore/server_process.py", "_on_gpu"): "waits for the workers to begin",
    ("trainers/kvstore/server_process.py", "_while_beating"): "waits for the workers to begin",
    ("benchmarks/rank/ranks.py", "on_rank_zero"): "waits for rank 0",
    ("benchmarks/timing/clock.py", "wait"): "waits for the other ranks",
    ("benchmarks/jacobi/halo.py", "receive"): "waits for its neighbours",
}
WORKING = ("trainers/kvstore/server.py", "serve")  # inside such a loop


class Standing(IntEnum):
    """How much a rank looks as if it waited for others, the least first."""

    ASLEEP = 0
    FOREIGN = 1  # in code that is neither torch's nor ours
    BUSY = 2  # in torch or in our code: working, or blocked because a GPU's queue is full
    WAITING = 3


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    standing: Standing
    words: str  # 'waits in all_reduce', 'is in forward (my_model.py:12: `time.sleep(3)`)'
    called_from_foreign: bool = False  # code that is neither torch's nor ours began the wait
    collectives: Mapping[tuple[str, int], "Begun"] = field(
        default_factory=dict
    )  # by group and number in it


@dataclass(frozen=True)
class Begun:
    """A collective that a rank has begun."""

    name: str  # with its sizes, where every rank's are equal
    foreign: bool  # whether code that is neither torch's nor ours began it


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def torch(self) -> str | None:
        """Return the path inside torch's package; None for other files."""
        found = TORCH.search(self.file)
        return found[1] if found else None

    @property
    def own(self) -> str | None:
        """Return the path inside Ringside; None for other files."""
        path = Path(self.file)
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
        return inside.as_posix() if inside and inside.parts[0] in OWN else None

    def source(self) -> str:
        """Return the line of source, '' where there is none to read."""
        path = Path(self.file)
        try:
            if not path.is_file():
                return ""
            with path.open(encoding="utf-8", errors="replace") as file:
                return next(islice(file, self.line - 1, min(self.line, MOST_LINES)), "").strip()
        except (
            OSError,
            ValueError,
        ):  # the log names a file that cannot be one: the sentence is told without its line
            return ""


def size(log: Path) -> int:
    """Return the bytes of a log so far: what is asked for next comes behind them."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def place(log: Path, start: int) -> Place | None:
    """Return where the process of a log stood, from what it wrote after the first `start` bytes; None if that is no stack."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(STACKS_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    stacks, collective, begun_by = _read(text)
    if not stacks or not stacks[-1]:
        return None
    main = _standing(stacks[-1])
    # On GPUs backward runs in threads of torch's own, while the main one waits for them.
    helpers = [_standing(frames) for frames in stacks[:-1] if frames and _begun_by_torch(frames)]
    found = min([main, *helpers], key=lambda one: one.standing)
    if found.standing is Standing.WAITING and collective:
        words = (
            found.words
            if found.words.endswith(collective)
            else f"{found.words} (unfinished: {collective})"
        )
        foreign = found.called_from_foreign or any(_is_foreign(frame) for frame in begun_by)
        found = Place(found.standing, words, foreign)
    return replace(found, collectives=_recorded(text))


def _recorded(text: str) -> dict[tuple[str, int], Begun]:
    """Return the last collectives that a rank began."""
    found = {}
    for line in text.splitlines():
        if match := RECORDED.match(line):
            group, number, name, file, at, function = match.groups()
            found[group, int(number)] = Begun(
                name.replace(":", " of "),
                bool(file) and _is_foreign(Frame(file, int(at), function)),
            )
    return found


def _read(text: str) -> tuple[list[list[Frame]], str, list[Frame]]:
    """Return the stacks of all threads, the main one last, and the name and stack of the first unfinished collective.

    A stack has the newest call first.
    """
    threads: list[list[Frame]] = []
    collective = ""
    begun_by: list[Frame] = []
    current: list[Frame] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append(current := [])
        elif found := COLLECTIVE.match(line):
            collective, begun_by = found[1], (current := [])
        elif found := FRAME.match(line):
            current.append(Frame(found[1], int(found[2]), found[3]))
    return threads, collective, begun_by


def _begun_by_torch(frames: Sequence[Frame]) -> bool:
    """Return whether C++ began a thread: those of Python begin in threading.py."""
    return not frames[-1].function.startswith("_bootstrap")


def _standing(frames: Sequence[Frame]) -> Place:
    """Return what one thread does."""
    known = [frame for frame in frames if not STANDARD_LIBRARY.search(frame.file)] or list(frames)
    inside = list(
        takewhile(lambda frame: frame.torch or frame.own, known)
    )  # what torch and we called last
    called_from_foreign = any(_is_foreign(frame) for frame in known[len(inside) :])
    if words := _wait(inside):
        return Place(Standing.WAITING, words, called_from_foreign)
    top = known[0]
    source = top.source()
    standing = Standing.FOREIGN if not inside else Standing.BUSY
    if SLEEP.search(source):
        standing = Standing.ASLEEP
    elif not inside and WAITING_CALL.search(source):
        standing = Standing.BUSY
    shown = f": `{source[:MOST_CHARACTERS]}`" if source and top.torch is None else ""
    return Place(
        standing,
        f"is in {top.function} ({Path(top.file).name}:{top.line}{shown})",
        called_from_foreign,
    )


def _is_foreign(frame: Frame) -> bool:
    """Return whether a frame is neither torch's nor ours nor Python's own."""
    ours = (
        frame.torch
        or frame.own
        or STANDARD_LIBRARY.search(frame.file)
        or frame.function == "<module>"
    )
    return not ours


def _wait(inside: Sequence[Frame]) -> str | None:
    """Return for what a thread waits, from the frames of torch and of ours that it called last; None if it does not."""
    if not inside:
        return None
    top = inside[0]
    of_torch = takewhile(lambda frame: frame.torch, inside)  # what was called last
    distributed = [
        frame.function for frame in of_torch if str(frame.torch).startswith("distributed/")
    ]
    if distributed:
        named = [function for function in distributed if not function.endswith("wrapper")]
        return f"waits in {(named or distributed)[-1]}"
    if top.function == "_engine_run_backward":
        return "waits in backward"
    if (
        top.torch
        and top.torch.startswith("cuda/")
        and top.function in ("synchronize", "wait", "query")
    ):
        return "waits for its GPU"
    if top.torch == "nn/parallel/distributed.py":
        return "waits in DDP"
    for frame in inside:
        if (frame.own, frame.function) == WORKING:
            return None
        if words := LOOPS.get((str(frame.own), frame.function)):
            return words
    if top.own and WAITING_CALL.search(top.source()):
        return f"waits at {Path(top.file).name}:{top.line}"
    return None


# Name the rank for which the others wait, from what the kernel says of it, where it stands, and how far it came.


STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")


def hang(watch: Watch, what: str, found: Mapping[int, str], places: Mapping[int, Place]) -> Failure:
    """Return a hang that names the rank that is not where the others are.

    Args:
        watch: what the ranks have reported.
        what: what the rank did, as the end of a sentence.
        found: what each process did when the deadline had passed, by number; one that has not started is absent.
        places: where each rank stands, by number, as far as it said so.
    """
    states = {rank.number: found.get(rank.number, "not started") for rank in watch.everyone}
    waiting = [rank for rank in watch.everyone if not rank.done]
    waiting = (
        waiting
        or [rank for rank in watch.everyone if states[rank.number] not in ENDED]
        or watch.everyone
    )
    counts = {rank.number: watch.count(rank) for rank in waiting}
    rank, why = _suspect(watch, waiting, states, counts, places)
    each = _together(waiting, states, places)
    if rank is None:
        phase = waiting[0].phase or "start"
        return Failure(
            "hang", None, f"no rank is behind the others; each {what} in phase {phase!r}: {each}"
        )
    where = f"in phase {rank.phase or 'start'!r} after {counts[rank.number]} iterations"
    others = _together([one for one in waiting if one is not rank], states, places)
    does = _does(rank, states, places)
    message = (
        f"{rank.name} {what}, {where}: it {does}" + (f", while {others}" if others else "") + why
    )
    return Failure("hang", rank.number, message)


def _suspect(
    watch: Watch,
    waiting: Sequence[Rank],
    states: Mapping[int, str],
    counts: Mapping[int, int],
    places: Mapping[int, Place],
) -> tuple[Rank | None, str]:
    """Return the rank to name, and the end of the sentence where that needs a reason.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while another waits; one that wrote no
    stack though others did; one that began another collective than the others; the fewest iterations; one that works while
    others wait; one that waits elsewhere than most, or where foreign code began the wait; the last of those that wait in
    different places.
    """
    if stuck := [rank for rank in waiting if states[rank.number] in STUCK]:
        return stuck[0], ""
    if len(waiting) == 1:
        return waiting[0], ""
    standing = {
        rank.number: places[rank.number].standing for rank in waiting if rank.number in places
    }
    least = min(standing.values(), default=Standing.WAITING)
    away = [rank for rank in waiting if standing.get(rank.number) == least]
    apart = bool(standing) and least < max(standing.values())
    if apart and least <= Standing.FOREIGN:
        return away[0], ""
    if mute := [rank for rank in waiting if standing and rank.number not in standing]:
        return mute[0], ""
    if different := _different(waiting, places):
        return different
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    fewest = min((counts[rank.number] for rank in stepping), default=0)
    behind = [rank for rank in stepping if counts[rank.number] == fewest]
    if len(behind) < len(stepping):
        return behind[0], ""
    if apart:
        return away[0], ""
    return _elsewhere([rank for rank in stepping if rank.number in places], places)


def _different(ranks: Sequence[Rank], places: Mapping[int, Place]) -> tuple[Rank, str] | None:
    """Return the rank that was the first to begin another collective than the others, and the end of the sentence.

    It is the one whose collective the fewest ranks began, else the only one whose was begun by foreign code; else None.
    """
    recorded = {
        rank.number: places[rank.number].collectives for rank in ranks if rank.number in places
    }
    recorded = {number: one for number, one in recorded.items() if one}
    common = (
        set.intersection(*(set(one) for one in recorded.values())) if len(recorded) > 1 else set()
    )
    for key in sorted(common, key=lambda key: key[1]):
        begun = {number: one[key] for number, one in recorded.items()}
        names = Counter(one.name for one in begun.values())
        if len(names) < 2:
            continue
        odd = [number for number, one in begun.items() if names[one.name] < max(names.values())]
        odd = odd or [number for number, one in begun.items() if one.foreign]
        if len(odd) != 1:
            return None
        (rank,) = [rank for rank in ranks if rank.number == odd[0]]
        its = begun[odd[0]].name
        others = next(name for name in names if name != its)
        return rank, f"; its collective {key[1]} was {its} where that of the others was {others}"
    return None


def _elsewhere(ranks: Sequence[Rank], places: Mapping[int, Place]) -> tuple[Rank | None, str]:
    """Return the rank that waits elsewhere than the others; None if all wait in one place."""
    words = Counter(places[rank.number].words for rank in ranks)
    if len(words) < 2:
        return None, ""
    most = max(words.values())
    minority = [rank for rank in ranks if words[places[rank.number].words] < most]
    if minority:
        return minority[0], ""
    foreign = [rank for rank in ranks if places[rank.number].called_from_foreign]
    if foreign and len(foreign) < len(ranks):
        return foreign[0], "; it is named because code outside Ringside and torch began its wait"
    return ranks[-1], "; nothing tells which of them is wrong, and the last is named"


def _does(rank: Rank, states: Mapping[int, str], places: Mapping[int, Place]) -> str:
    """Return what a rank does, as the end of a sentence."""
    state = states[rank.number]
    if state not in STUCK and rank.number in places:
        return places[rank.number].words
    return f"is {state}" if state in STUCK else f"wrote no stack, and its process is {state}"


def _together(ranks: Sequence[Rank], states: Mapping[int, str], places: Mapping[int, Place]) -> str:
    """Return what several ranks do, those that do the same together: 'rank 0, rank 2 wait…'."""
    found: dict[str, list[str]] = {}
    for rank in ranks:
        found.setdefault(_does(rank, states, places), []).append(rank.name)
    return ", ".join(f"{_names(names)} {does}" for does, names in found.items())


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"
