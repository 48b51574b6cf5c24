"""Run one cell to its end, whatever happens in it: start the ranks, watch their lines, keep deadlines, find the cause."""

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import Failure, read_line
from conf.cell import Cell
from conf.schema import Engine
from launch import processes
from launch.environment import ROOT, arguments

POLL_SECONDS = 0.1
# For the ranks of a hang to write where they stand.
STACKS_SECONDS = 0.5
LOG_TAIL_LINES = 20
STARTING = ("build", "first step")
# What a rank says when a peer went away: the consequence of a failure, not its cause.
CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(closed|reset) by (remote )?peer|broken pipe|"
    r"remote (process|server)|socket timeout|pair closure|communicator was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory")
NCCL_ERROR = re.compile(r"NCCL|ncclInternal|ncclSystem|ncclInvalid|DistBackendError")


@dataclass
class Rank:
    """What is known of one rank from its lines."""

    number: int
    phase: str = ""
    iterations: int = 0
    pid: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    last_seen: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    state: str  # finished, failed, interrupted
    failure: Failure | None
    immortal: list[int]  # processes that survived SIGKILL


class Watch:
    """Follows the lines that ranks append, each from where it was last read."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.ranks = [Rank(number) for number in range(world_size)]
        self._folder = folder
        self._read = [0] * world_size

    def update(self) -> bool:
        """Read what is new; whether there was anything."""
        news = False
        for rank in self.ranks:
            with (
                contextlib.suppress(FileNotFoundError),
                (self._folder / "ranks" / f"{rank.number}.jsonl").open("rb") as file,
            ):
                file.seek(self._read[rank.number])
                whole, newline, _ = file.read().rpartition(b"\n")
                if newline:
                    self._read[rank.number] += len(whole) + 1
                    news = True
                    rank.last_seen = time.monotonic()
                    for text in whole.split(b"\n"):
                        line = read_line(text)  # a full disk tears lines
                        if line is not None:
                            self._take(rank, line)
        return news

    def count(self, rank: Rank) -> int:
        """Iterations that a rank has begun, also those since its last line."""
        try:
            return int((self._folder / "ranks" / f"{rank.number}.count").read_bytes())
        except (OSError, ValueError):
            return rank.iterations

    def _take(self, rank: Rank, line: dict[str, Any]) -> None:
        if rank.pid is None and "pid" in line:
            for other in self.ranks:  # those that reported earlier were waiting for this one
                other.last_seen = time.monotonic()
        rank.phase = line.get("phase", rank.phase)
        rank.iterations = line.get("iterations", rank.iterations)
        rank.pid = line.get("pid", rank.pid)
        if line["kind"] == "done":
            rank.done, rank.phase = True, "exit"
        if line["kind"] == "error":
            rank.error = rank.error or line


def run(
    cell: Cell,
    folder: Path,
    environment: Mapping[str, str],
    token: str,
    engine: Engine,
    stopping: Callable[[], bool],
    progress: Callable[[Watch], None],
) -> Outcome:
    """Run the ranks of a cell in its prepared folder; no process with its token is left when this returns.

    `stopping` is asked often and true means: close the cell as interrupted. `progress` is told of news and of time passing.
    """
    watch = Watch(folder, cell.world_size)
    opened = time.monotonic()
    with (folder / "logs" / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            arguments(folder, cell), cwd=ROOT, env=processes.started_by_me(environment), stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    ended: Failure | None = None
    try:
        while agent.poll() is None and ended is None:
            watch.update()
            progress(watch)
            ended = (
                Failure("interrupted", None, "stopped by the user") if stopping() else _overdue(watch, opened, engine)
            )
            time.sleep(POLL_SECONDS)
        if ended is not None and ended.cause == "hang":
            processes.ask_for_stacks(token, [rank.pid for rank in watch.ranks if rank.pid])
            time.sleep(STACKS_SECONDS)
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        grace_s = engine.stop_grace_s if ended else 0.0
        immortal = processes.end(token, grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=5)
    watch.update()
    if ended is not None and ended.cause == "interrupted":
        return Outcome("interrupted", ended, immortal)
    failure = ended or (_cause(watch, folder, agent.returncode) if agent.returncode != 0 else _left(watch))
    if failure is None:
        return Outcome("finished", None, immortal)
    return Outcome("failed", _with_log(failure, folder), immortal)


def _overdue(watch: Watch, opened: float, engine: Engine) -> Failure | None:
    """The deadline that has passed, if one has."""
    now = time.monotonic()
    missing = [rank for rank in watch.ranks if rank.pid is None]
    if missing and now - opened > engine.start_timeout_s:
        names = ", ".join(str(rank.number) for rank in missing)
        return Failure("start", missing[0].number, f"rank {names} did not report within {engine.start_timeout_s:g} s")
    if not missing and any(_silent(rank, now, engine) for rank in watch.ranks):
        return _hang(watch, f"gave no sign for {engine.silence_timeout_s:g} s")
    if now - opened > engine.cell_timeout_s:
        return _hang(watch, f"was not done when the cell's {engine.cell_timeout_s:g} s were over")
    return None


def _silent(rank: Rank, now: float, engine: Engine) -> bool:
    """Whether a rank that still exists, done or not, has written nothing for too long."""
    # The first step compiles, tunes and connects, all without a sign of life: it has as long as the start.
    first = rank.phase in STARTING
    if now - rank.last_seen <= (
        max(engine.silence_timeout_s, engine.start_timeout_s) if first else engine.silence_timeout_s
    ):
        return False
    return not rank.done or (rank.pid is not None and processes.state(rank.pid) not in ("gone", "zombie"))


def _hang(watch: Watch, what: str) -> Failure:
    """Name the rank that the others wait for: one stopped or stuck in the kernel, else the one furthest behind."""
    waiting = [rank for rank in watch.ranks if not rank.done] or watch.ranks
    states = {rank.number: processes.state(rank.pid) if rank.pid else "not started" for rank in waiting}
    counts = {rank.number: watch.count(rank) for rank in waiting}
    odd = [
        rank
        for rank in waiting
        if states[rank.number] in ("stopped", "disk-sleep", "tracing-stop", "gone", "not started")
    ]
    least = min(counts.values())
    behind = [rank for rank in waiting if counts[rank.number] == least]
    suspects = odd or (behind if len(behind) < len(waiting) or len(waiting) == 1 else [])
    if not suspects:
        return Failure("hang", None, f"no rank is behind the others; each {what} in phase {waiting[0].phase!r}")
    rank = suspects[0]
    where = f"in phase {rank.phase!r} after {counts[rank.number]} iterations; its process is {states[rank.number]}"
    return Failure("hang", rank.number, f"rank {rank.number} {what}, {where}")


def _left(watch: Watch) -> Failure | None:
    """The agent is content: whether a rank left early all the same, with status 0."""
    early = [rank for rank in watch.ranks if not rank.done]
    return _untold(early[0], 0) if early else None


def _cause(watch: Watch, folder: Path, returncode: int) -> Failure:
    """The first failing rank: one that said why, one that died without a word, then one that lost a peer."""
    try:
        exits = {int(rank): int(code) for rank, code in json.loads((folder / "failures.json").read_text()).items()}
    except (OSError, ValueError, AttributeError):
        exits = {}
    spoke = sorted((rank for rank in watch.ranks if rank.error), key=lambda rank: float(rank.error["time"]))  # type: ignore[index]
    first = [rank for rank in spoke if not CONSEQUENCE.search(str(rank.error["message"]))]  # type: ignore[index]
    # In the order in which the agent noticed them. It ends the others with SIGTERM: those are not the first.
    unsaid = [(watch.ranks[number], code) for number, code in exits.items() if not watch.ranks[number].error]
    died = [(rank, code) for rank, code in unsaid if code != -signal.SIGTERM]
    left = [rank for rank in watch.ranks if not rank.done and not rank.error and rank.number not in exits]
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
    return Failure(cause, rank.number, f"rank {rank.number} raised {kind} in phase {rank.phase!r}: {first}")


def _untold(rank: Rank, code: int) -> Failure:
    where = f"in phase {rank.phase!r}" if rank.phase else "before it reported"
    if code < 0:
        name = signal.Signals(-code).name
        return Failure("killed", rank.number, f"rank {rank.number} was ended by {name} {where}")
    return Failure("exception", rank.number, f"rank {rank.number} exited with status {code} {where}, without a word")


def _with_log(failure: Failure, folder: Path) -> Failure:
    """The failure with the end of the log that tells most."""
    name = "agent.log" if failure.rank is None else f"rank{failure.rank}.log"
    for path in (folder / "logs" / name, folder / "logs" / "agent.log"):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            if lines:
                return Failure(failure.cause, failure.rank, failure.message, "\n".join(line[:500] for line in lines))
    return failure
