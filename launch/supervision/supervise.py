"""Run one cell to its end: start its job, keep deadlines, name the cause, leave no process.

A user may ask to stop: by Ctrl-C, or by SIGTERM, with which Slurm ends a job.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.agent.processes import ENDED
from benchmarks.agent.protocol import RankEnd
from benchmarks.record import CellFolder, Failure
from benchmarks.record.safe_files import remove_unfinished
from benchmarks.record.safe_text import INTERRUPTED as INTERRUPTED
from conf import schema
from conf.cell import Cell
from launch.engines.engine import Job, Lost, rank_ends
from launch.supervision.failure import STUCK, explain_hang, first_cause, overdue, with_log
from launch.supervision.watch import Watch, locate, log_bytes

POLL_SECONDS = 0.1
STACKS_SECONDS = 2.0  # at most, for the ranks of a hang to write their stacks
REST_SECONDS = 0.5  # without another line: they have written all
# At most, between the end of an agent and the signal to this process that came with it.
SIGNAL_SECONDS = 2.0
# Signals that come together are one request, as of a program that forwards what a terminal sends.
SAME_REQUEST_SECONDS = 0.1
# At most, for the agent to say how a rank ended; it takes milliseconds, but for a GPU's memory.
AGENT_SECONDS = 3.0
STOPPED = Failure("interrupted", None, "stopped by the user")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    state: str  # finished, failed, interrupted
    failure: Failure | None
    unkillable_pids: list[int]  # of processes that survived SIGKILL


def run(
    cell: Cell,
    folder: CellFolder,
    start: Callable[[], Job],
    limits: schema.Engine,
    stopping: Callable[[], bool],
    progress: Callable[[Watch], None],
    clock: Any = time,
) -> Outcome:
    """Run the job of a cell in its prepared folder and return how it ended.

    `start` starts the job. `stopping` and `progress` are called often: true ends the cell as
    interrupted, and what the ranks have reported is shown. `clock` is the module `time` but in
    tests.

    Raises OSError: the job cannot be started.
    """
    watch = Watch(folder, cell.world_size, cell.servers, clock)
    for rank, place in zip(watch.everyone, cell.places, strict=True):
        if place.host:
            rank.host = place.host
            rank.name += f" on {place.host}"
    opened = clock.monotonic()
    job = start()
    failure: Failure | str | None = None  # a text: what the rank at fault in a hang did
    lost: Lost | None = None
    vanished: dict[int, RankEnd] = {}
    stopped_looks = 0  # at an agent that has not started its ranks yet
    try:
        while job.poll() is None and not (failure or lost or vanished):
            watch.update()
            progress(watch)
            lost = job.lost()
            if stopping():
                failure = STOPPED
            elif not lost:
                failure = overdue(watch, opened, clock.monotonic(), limits, job.process_state)
                if watch.ranks[0].pid is None and job.agent_state() == "stopped":
                    stopped_looks += 1
                if stopped_looks * POLL_SECONDS > limits.lost_after_s:
                    failure = "did not report"
            vanished = _vanished(watch, job, clock)
            job.wait(POLL_SECONDS)
        if vanished and not lost:
            _until(lambda: job.poll() is not None or folder.failures.exists(), AGENT_SECONDS, clock)
        if isinstance(failure, str):
            failure = _explained(failure, watch, folder, job, clock)
        status = job.poll()
        ended_s = clock.monotonic()
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        grace_s = 0.0
        if failure or lost:
            grace_s = limits.stop_grace_s
        unkillable_pids = job.stop(grace_s)
    watch.update()
    if status == 0:
        lost = None
    else:
        # What the others raise is heard at once; that a host is lost is known for sure when it did
        # not answer the stop.
        lost = lost or job.lost()
    if not failure and (lost or status == -signal.SIGTERM):
        # Slurm asks all processes of a job to end, this one perhaps last.
        _until(stopping, ended_s + SIGNAL_SECONDS - clock.monotonic(), clock)
        if stopping():
            failure = STOPPED
    if failure is STOPPED:
        return Outcome("interrupted", STOPPED, unkillable_pids)
    if failure is None:
        if status is not None and status < 0:
            vanished = {}  # its ranks die with a killed agent
        failure = first_cause(watch, folder, rank_ends(folder) or vanished, status, lost)
    if failure is None:
        return Outcome("finished", None, unkillable_pids)
    return Outcome("failed", with_log(failure, folder), unkillable_pids)


def _vanished(watch: Watch, job: Job, clock: Any) -> dict[int, RankEnd]:
    """Return the processes that are gone and were not done, by number, after their last lines."""
    gone = []
    for rank in watch.everyone:
        if rank.pid and not rank.done and job.process_state(rank.index, rank.pid) in ENDED:
            gone.append(rank)
    if gone:
        watch.update()
    return {rank.index: RankEnd(None, clock.time()) for rank in gone if not rank.done}


def _explained(what: str, watch: Watch, folder: CellFolder, job: Job, clock: Any) -> Failure:
    """Return a hang with the rank that is at fault, after asking every process where it stands."""
    agent_state = job.agent_state()
    if agent_state in STUCK:
        sentence = (
            "the agent, which starts the ranks and serves their store, is "
            f"{agent_state}; each rank waits"
        )
        return Failure("hang", None, sentence)
    pids = {}
    starts = {}  # the size of each log that a rank may write to
    for rank in watch.everyone:
        if rank.pid:
            # As it is now: a request for stacks may wake a process up.
            rank.state = job.process_state(rank.index, rank.pid)
            pids[rank.index] = rank.pid
            if rank.state not in STUCK:
                starts[rank.index] = log_bytes(folder.rank_log(rank.index))

    def sizes() -> list[int]:
        return [log_bytes(folder.rank_log(rank_number)) for rank_number in starts]

    def all_have_written() -> bool:
        return all(size > start for size, start in zip(sizes(), starts.values(), strict=True))

    job.ask_for_stacks(pids)
    _until(all_have_written, STACKS_SECONDS, clock)
    deadline = clock.monotonic() + STACKS_SECONDS
    before = list(starts.values())
    written = sizes()
    while written != before and clock.monotonic() < deadline:  # until nothing more comes
        clock.sleep(REST_SECONDS)
        before = written
        written = sizes()
    for rank_number, start in starts.items():
        watch.everyone[rank_number].location = locate(folder.rank_log(rank_number), start)
    return explain_hang(watch, what)


def _until(condition: Callable[[], bool], seconds: float, clock: Any) -> None:
    deadline = clock.monotonic() + seconds
    while not condition() and clock.monotonic() < deadline:
        clock.sleep(POLL_SECONDS)


class Stopping:
    """Remembers that the user asked to stop, by Ctrl-C or SIGTERM."""

    def __init__(self, console: Console) -> None:
        self._requested = False
        self._requested_s = 0.0  # of the monotonic clock
        self._console = console
        self._at_once = False  # what runs now loses nothing that was measured

    def __call__(self) -> bool:
        """Return whether the user asked."""
        return self._requested

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Have signals set the mark instead of ending this process. SIGHUP ends nothing."""
        handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._request),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._request),
            signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        }
        try:
            yield
        finally:
            # Asked once, a second Ctrl-C while this process leaves must not change its exit status.
            if not self._requested:
                for signum, handler in handlers.items():
                    signal.signal(signum, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Leave what is entered where the user asks to stop: it can be done again later."""
        self._at_once = True
        try:
            yield
        except KeyboardInterrupt:
            if not self._requested:
                raise
        finally:
            self._at_once = False

    def _request(self, signum: int, frame: Any) -> None:
        if self._requested:
            if time.monotonic() - self._requested_s > SAME_REQUEST_SECONDS:
                self._say(
                    "stopped at once: what was measured is kept; the same command measures the rest"
                )
                remove_unfinished()
                os._exit(INTERRUPTED)  # the agents end their ranks
            return
        self._requested = True
        self._requested_s = time.monotonic()
        self._say(
            "stopping: no further run is started; what was measured is kept "
            "(a second signal stops at once)"
        )
        if self._at_once:
            raise KeyboardInterrupt

    def _say(self, sentence: str) -> None:
        # While this thread prints something else, Python forbids a second.
        with contextlib.suppress(RuntimeError):
            self._console.show_cursor()
            self._console.print(sentence)
