"""Run one cell to its end: start its job, keep deadlines, name the cause, leave no process."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agent.processes import ENDED
from benchmarks.record import CellFolder, Failure
from conf import schema
from conf.cell import Cell
from launch.engines.engine import CellEngine, Job, Lost
from launch.supervision.failure import End, ends, first_cause, with_log
from launch.supervision.hang import STUCK, Hang, explain_hang, overdue
from launch.supervision.progress import Rank, WallClock, Watch
from launch.supervision.stacks import locate, log_bytes

POLL_SECONDS = 0.1
STACKS_SECONDS = 2.0  # at most, for the ranks of a hang to write their stacks
REST_SECONDS = 0.5  # without another line: they have written all
# At most, between the end of an agent and the signal to this process that came with it.
SIGNAL_SECONDS = 2.0
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
    environment: Mapping[str, str],
    engine: CellEngine,
    limits: schema.Engine,
    stopping: Callable[[], bool],
    progress: Callable[[Watch], None],
    profiler: Sequence[str] = (),
    sampled: bool = False,
    clock: WallClock = time,
) -> Outcome:
    """Run the job of a cell in its prepared folder and return how it ended.

    Args:
        cell: what the ranks are asked.
        folder: the folder of the cell.
        environment: the variables of every process.
        engine: what starts the job.
        limits: deadlines in seconds.
        stopping: called often; true ends the cell as interrupted.
        progress: called often with what the ranks have reported.
        profiler: the command of a profiler that starts the agent.
        sampled: whether the machine is sampled around the processes.
        clock: what time it is.

    Raises:
        OSError: the job cannot be started.
    """
    watch = Watch(folder, cell.world_size, cell.servers, clock)
    opened = clock.monotonic()
    job = engine.start(cell, folder, environment, profiler, sampled)
    ended: Failure | Hang | None = None
    lost: Lost | None = None
    vanished: dict[int, End] = {}
    try:
        while job.poll() is None and not (ended or lost or vanished):
            watch.update()
            progress(watch)
            lost = job.lost()
            if stopping():
                ended = STOPPED
            elif not lost:
                ended = overdue(watch, opened, clock.monotonic(), limits, job.process_state)
            vanished = {rank.number: End(None, clock.time()) for rank in _vanished(watch, job)}
            job.wait(POLL_SECONDS)
        if vanished and not lost:
            _until(lambda: job.poll() is not None or folder.failures.exists(), AGENT_SECONDS, clock)
        if isinstance(ended, Hang):
            ended = _explained(ended, watch, folder, job, clock)
        status = job.poll()
        ended_s = clock.monotonic()
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        grace_s = 0.0
        if ended or lost:
            grace_s = limits.stop_grace_s
        unkillable_pids = job.stop(grace_s)
    watch.update()
    if status == 0:
        lost = None
    else:
        # What the others raise is heard at once; that a host is lost is known for sure when it did
        # not answer the stop.
        lost = lost or job.lost()
    if not ended and (lost or status == -signal.SIGTERM):
        # Slurm asks all processes of a job to end, this one perhaps last.
        _until(stopping, ended_s + SIGNAL_SECONDS - clock.monotonic(), clock)
        if stopping():
            ended = STOPPED
    if ended is STOPPED:
        return Outcome("interrupted", STOPPED, unkillable_pids)
    failure = ended
    if failure is None:
        if status is not None and status < 0:
            vanished = {}  # its ranks die with a killed agent
        failure = first_cause(watch, folder, ends(folder) or vanished, status, lost)
    if failure is None:
        return Outcome("finished", None, unkillable_pids)
    return Outcome("failed", with_log(failure, folder), unkillable_pids)


def _vanished(watch: Watch, job: Job) -> list[Rank]:
    """Return the processes that are gone and were not done. Their last lines are read first."""

    def gone() -> list[Rank]:
        ranks = []
        for rank in watch.everyone:
            if rank.pid and not rank.done and job.process_state(rank.number, rank.pid) in ENDED:
                ranks.append(rank)
        return ranks

    if not gone():
        return []
    watch.update()
    return gone()


def _explained(hang: Hang, watch: Watch, folder: CellFolder, job: Job, clock: WallClock) -> Failure:
    """Return a hang with the rank that is at fault, after asking every process where it stands."""
    agent_state = job.agent_state()
    if agent_state in STUCK:
        sentence = (
            "the agent, which starts the ranks and serves their store, is "
            f"{agent_state}; each rank waits"
        )
        return Failure("hang", None, sentence)
    pids = {}
    states = {}
    logs = {}
    for rank in watch.everyone:
        if rank.pid:
            # As it is now: a request for stacks may wake a process up.
            state = job.process_state(rank.number, rank.pid)
            pids[rank.number] = rank.pid
            states[rank.number] = state
            if state not in STUCK:
                logs[rank.number] = folder.rank_log(rank.number)
    starts = _sizes(logs)
    job.ask_for_stacks(pids)
    _until(lambda: _all_grew(starts, _sizes(logs)), STACKS_SECONDS, clock)
    deadline = clock.monotonic() + STACKS_SECONDS
    before = starts
    written = _sizes(logs)
    while written != before and clock.monotonic() < deadline:  # until nothing more comes
        clock.sleep(REST_SECONDS)
        before = written
        written = _sizes(logs)
    locations = {}
    for rank_number, log in logs.items():
        location = locate(log, starts[rank_number])
        if location:
            locations[rank_number] = location
    return explain_hang(watch, hang.what, states, locations)


def _sizes(logs: Mapping[int, Path]) -> dict[int, int]:
    return {rank_number: log_bytes(log) for rank_number, log in logs.items()}


def _all_grew(before: Mapping[int, int], now: Mapping[int, int]) -> bool:
    return all(now[rank_number] > size for rank_number, size in before.items())


def _until(condition: Callable[[], bool], seconds: float, clock: WallClock) -> None:
    """Wait until a condition holds, or some seconds have passed."""
    deadline = clock.monotonic() + seconds
    while not condition() and clock.monotonic() < deadline:
        clock.sleep(POLL_SECONDS)
