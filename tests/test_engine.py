"""Supervision without processes: an engine that only writes lines, so that ends, deadlines and causes take milliseconds."""

import json
import time

import pytest
from cells import make_cell

from benchmarks.record import CellFolder, Lines
from conf.schema import Engine
from launch.supervision import supervise

LONG = 1000.0


class FakeEngine:
    """Starts a job that follows a script: each poll takes the next step, a function of the job that may end it."""

    def __init__(self, *steps, states=None, survivors=()):
        self.steps, self.states, self.survivors = list(steps), states or {}, list(survivors)
        self.jobs = []

    def start(self, cell, folder, environment, profiler=()):
        self.jobs.append(FakeJob(self, folder, cell.world_size))
        return self.jobs[-1]


class FakeJob:
    """Two ranks that exist as lines in the cell's folder alone."""

    def __init__(self, engine, folder, ranks):
        self.engine, self.folder, self.status, self.asked, self.stopped = engine, folder, None, [], []
        self.lines = [Lines(folder.rank_lines(rank)) for rank in range(ranks)]

    def poll(self):
        if self.status is None and self.engine.steps:
            self.engine.steps.pop(0)(self)
        return self.status

    def process_state(self, pid):
        return self.engine.states.get(pid, "sleeping")

    def ask_for_stacks(self, pids):
        self.asked.append(pids)

    def stop(self, grace_s):
        self.stopped.append(grace_s)
        self.status = -9 if self.status is None else self.status
        return self.engine.survivors


def starts(job):
    for rank, lines in enumerate(job.lines):
        lines.write("start", time.time(), rank=rank, pid=100 + rank)


def begins(job, iterations=(5, 5)):
    for lines, count in zip(job.lines, iterations, strict=True):
        lines.write("beat", time.time(), phase="timed", iterations=count)


def is_done(job):
    for lines in job.lines:
        lines.write("done", time.time())


def ends(status):
    return lambda job: setattr(job, "status", status)


def one_hangs(job):
    begins(job, (9, 7))


def raises(job):
    job.lines[1].write("error", time.time(), type="RuntimeError", message="no such thing\nand more")


def is_killed(job):
    job.folder.failures.write_text(json.dumps({1: -9}))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Supervise a job of two ranks: run(engine, stopping=…, **limits) returns (outcome, job, seconds)."""
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(supervise, "STACKS_SECONDS", 0.0)
    folder = CellFolder(tmp_path / "cell").make()
    (tmp_path / "cell" / "logs").mkdir(exist_ok=True)
    seen = []

    def supervised(engine, stopping=lambda: False, **limits):
        whole = {
            "start_timeout_s": LONG,
            "silence_timeout_s": LONG,
            "cell_timeout_s": LONG,
            "stop_grace_s": 3.0,
        } | limits
        began = time.monotonic()
        outcome = supervise.run(make_cell(), folder, {}, engine, Engine(**whole), stopping, seen.append)
        return outcome, engine.jobs[0], time.monotonic() - began

    return supervised


def test_a_job_that_ends_well_is_finished_and_stopped_without_grace(run):
    outcome, job, seconds = run(FakeEngine(starts, begins, is_done, ends(0)))
    assert (outcome.state, outcome.failure, outcome.immortal) == ("finished", None, [])
    assert job.stopped == [0.0] and job.asked == [] and seconds < 1


@pytest.mark.parametrize(
    ("steps", "limits", "cause", "rank", "says"),
    [
        ((), {"start_timeout_s": 0.0}, "start", 0, "rank 0, rank 1 did not report within 0 s"),
        (
            (starts, one_hangs),
            {"silence_timeout_s": 0.01},
            "hang",
            1,
            "rank 1 gave no sign for 0.01 s, in phase 'timed'",
        ),
        ((starts, one_hangs), {"cell_timeout_s": 0.03}, "hang", 1, "was not done when the cell's 0.03 s were over"),
        ((starts, is_done), {"start_timeout_s": 0.02}, "hang", None, "what started them did not end within 0.02 s"),
        (
            (starts, begins, raises, ends(1)),
            {},
            "exception",
            1,
            "rank 1 raised RuntimeError in phase 'timed': no such thing",
        ),
        ((starts, begins, is_killed, ends(1)), {}, "killed", 1, "rank 1 was ended by SIGKILL in phase 'timed'"),
        ((starts, begins, ends(0)), {}, "exception", 0, "rank 0 exited with status 0"),
        ((starts, begins, ends(-9)), {}, "killed", None, "the agent ended by SIGKILL before any rank failed"),
    ],
    ids=["start", "silence", "cell", "agent stays", "exception", "killed", "left", "agent killed"],
)
def test_a_failure_has_its_cause_and_its_rank(run, steps, limits, cause, rank, says):
    outcome, job, seconds = run(FakeEngine(*steps), **limits)
    assert (outcome.state, outcome.failure.cause, outcome.failure.rank) == ("failed", cause, rank), outcome.failure
    assert says in outcome.failure.message
    assert len(job.stopped) == 1 and seconds < 1
    assert job.asked == ([[100, 101]] if cause == "hang" else [])


def test_a_rank_that_is_stopped_is_named_before_one_that_is_behind(run):
    outcome, _, _ = run(FakeEngine(starts, one_hangs, states={100: "stopped"}), silence_timeout_s=0.01)
    assert outcome.failure.rank == 0 and outcome.failure.message.endswith("its process is stopped")


def test_a_user_who_stops_gets_an_interrupted_cell_with_grace(run):
    engine = FakeEngine(starts, begins, survivors=[4711])
    outcome, job, _ = run(engine, stopping=lambda: not engine.steps)
    assert (outcome.state, outcome.failure.message, outcome.immortal) == ("interrupted", "stopped by the user", [4711])
    assert job.stopped == [3.0]


def test_a_job_is_stopped_also_after_an_exception_of_our_own(run):
    def fails(job):
        raise KeyError("ours")

    engine = FakeEngine(starts, fails)
    with pytest.raises(KeyError):
        run(engine)
    assert engine.jobs[0].stopped == [0.0]
