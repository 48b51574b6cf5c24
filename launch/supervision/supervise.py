"""Run one cell to its end, whatever happens in it: start its job, keep deadlines, name the cause, leave no process behind."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.agent.processes import ENDED
from benchmarks.record import CellFolder, Failure
from conf import schema
from conf.cell import Cell
from launch.engines.engine import CellEngine, Job, Lost
from launch.supervision import failure as stacks
from launch.supervision.failure import STUCK, End, Hang, ends, first_cause, hang, overdue, with_log
from launch.supervision.progress import Rank, WallClock, Watch

POLL_SECONDS = 0.1
STACKS_SECONDS = 2.0  # at most, for the ranks of a hang to write their stacks
REST_SECONDS = 0.5  # without another line: they have written all
SIGNAL_SECONDS = (
    2.0  # at most, between the end of an agent and the signal to this process that came with it
)
AGENT_SECONDS = 3.0  # at most, for the agent to say how a rank ended; it takes milliseconds, but for a GPU's memory


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    state: str  # finished, failed, interrupted
    failure: Failure | None
    immortal: list[int]  # ids of processes that survived SIGKILL


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
    """Run the job of a cell in its prepared folder and return how it ended; none of its processes is left then.

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
                ended = _stopped()
            elif not lost:
                ended = overdue(watch, opened, clock.monotonic(), limits, job.process_state)
            vanished = {rank.number: End(None, clock.time()) for rank in _vanished(watch, job)}
            job.wait(POLL_SECONDS)
        if vanished and not lost:
            _until(lambda: job.poll() is not None or folder.failures.exists(), AGENT_SECONDS, clock)
        if isinstance(ended, Hang):
            ended = _named(ended, watch, folder, job, clock)
        status, noticed = job.poll(), clock.monotonic()
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        immortal = job.stop(limits.stop_grace_s if ended or lost else 0.0)
    watch.update()
    # What the others raise is heard at once; that a host is lost is known for sure when it did not answer the stop.
    lost = None if status == 0 else lost or job.lost()
    if not ended and (lost or status == -signal.SIGTERM):
        # Slurm asks all processes of a job to end, this one perhaps last.
        _until(stopping, noticed + SIGNAL_SECONDS - clock.monotonic(), clock)
        ended = _stopped() if stopping() else None
    if ended is not None and ended.cause == "interrupted":
        return Outcome("interrupted", ended, immortal)
    failure = ended or _cause(watch, folder, status, vanished, lost)
    if failure is None:
        return Outcome("finished", None, immortal)
    return Outcome("failed", with_log(failure, folder), immortal)


def _stopped() -> Failure:
    return Failure("interrupted", None, "stopped by the user")


def _vanished(watch: Watch, job: Job) -> list[Rank]:
    """Return the processes that are gone and were not done. Their last lines are read first."""

    def found() -> list[Rank]:
        left = [rank for rank in watch.everyone if not rank.done]
        return [
            rank for rank in left if rank.pid and job.process_state(rank.number, rank.pid) in ENDED
        ]

    if not found():
        return []
    watch.update()
    return found()


def _named(found: Hang, watch: Watch, folder: CellFolder, job: Job, clock: WallClock) -> Failure:
    """Return a hang with the rank that is at fault, after asking every process where it stands."""
    if (does := job.agent_state()) in STUCK:
        return Failure(
            "hang",
            None,
            f"the agent, which starts the ranks and serves their store, is {does}; each rank waits",
        )
    # As they are now: what a process is asked may wake it up.
    pids = {rank.number: rank.pid for rank in watch.everyone if rank.pid}
    states = {number: job.process_state(number, pid) for number, pid in pids.items()}
    asked = [number for number in pids if states[number] not in STUCK]
    sizes = {number: stacks.size(folder.rank_log(number)) for number in asked}
    job.ask_for_stacks(pids)

    def written() -> dict[int, int]:
        return {number: stacks.size(folder.rank_log(number)) for number in asked}

    _until(
        lambda: all(written()[number] > sizes[number] for number in asked), STACKS_SECONDS, clock
    )
    deadline, before = clock.monotonic() + STACKS_SECONDS, sizes
    while written() != before and clock.monotonic() < deadline:  # until nothing more comes
        before = written()
        clock.sleep(REST_SECONDS)
    places = {number: stacks.place(folder.rank_log(number), sizes[number]) for number in asked}
    return hang(watch, found.what, states, {number: one for number, one in places.items() if one})


def _until(condition: Callable[[], bool], seconds: float, clock: WallClock) -> None:
    """Wait until a condition holds, or some seconds have passed."""
    deadline = clock.monotonic() + seconds
    while not condition() and clock.monotonic() < deadline:
        clock.sleep(POLL_SECONDS)


def _cause(
    watch: Watch,
    folder: CellFolder,
    status: int | None,
    vanished: Mapping[int, End],
    lost: Lost | None,
) -> Failure | None:
    """Return why a job failed that was not ended by a deadline; None if it did not fail.

    `status` is that of the agent; `vanished` are processes that were seen to be gone while it still ran; `lost` is a
    host that is lost.
    """
    if status is not None and status < 0:
        vanished = {}  # its ranks die with a killed agent
    return first_cause(watch, folder, ends(folder) or vanished, status, lost)
