"""An engine without processes: a script writes lines and states of ranks, and turns the clock.

A cell takes milliseconds: `supervised(tmp_path, FakeEngine(starts, begins, is_done, ends(0)))`.
"""

import dataclasses
import json
from pathlib import Path

from build import make_cell

from benchmarks.record import CellFolder, Lines
from conf.schema import Engine
from launch.engines.engine import CellPass, Lost
from launch.supervision import supervise

ROOT = Path(__file__).parent.parent
LIMITS = {
    "start_timeout_s": 300.0, "silence_timeout_s": 12.0, "cell_timeout_s": 1800.0,
    "stop_grace_s": 3.0,
}  # fmt: skip
LOST = "host n2 is lost: its agent gave no sign of life for 15 s"


class FakeClock:
    """A clock that stands still until somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return 1_700_000_000.0 + self.now

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeEngine:
    """Starts a job that follows a script: each poll takes the next step, a function of the job."""

    def __init__(self, *steps, survivors=(), pause_s=0.0):
        """`pause_s` passes before each step."""
        self.steps, self.survivors, self.pause_s = list(steps), list(survivors), pause_s
        self.clock, self.jobs = FakeClock(), []

    def start(self, cell_pass):
        self.jobs.append(FakeJob(self, cell_pass.folder, cell_pass.cell))
        return self.jobs[-1]


class FakeJob:
    """Ranks and servers that exist as lines in the cell's folder; a pid is 100 + the number."""

    def __init__(self, engine, folder, cell):
        self.engine, self.folder, self.cell, self.clock = engine, folder, cell, engine.clock
        self.status, self.asked, self.stopped = None, [], []
        self.states, self.stacks = {}, {}  # by number
        self.silent = None  # a host that is found to be lost when the job is stopped
        self.numbers = range(cell.world_size + cell.servers)
        self.lines = [Lines(folder.rank_lines(number)) for number in self.numbers]

    def write(self, number, kind, **content):
        self.lines[number].write(kind, self.clock.time(), **content)

    def poll(self):
        if self.status is None and self.engine.steps:
            self.clock.sleep(self.engine.pause_s)
            self.engine.steps.pop(0)(self)
        return self.status

    def wait(self, seconds):
        self.clock.sleep(seconds)

    def lost(self):
        return self.states.get("lost")

    def process_state(self, number, pid):
        assert pid == 100 + number
        return self.states.get(number, "sleeping")

    def agent_state(self):
        return self.states.get("agent", "sleeping")

    def ask_for_stacks(self, pids):
        self.asked.append([*pids.values()])
        for number, text in self.stacks.items():
            with self.folder.rank_log(number).open("a") as log:
                log.write(text)

    def stop(self, grace_s):
        self.stopped.append(grace_s)
        self.status = -9 if self.status is None else self.status
        self.states.setdefault("lost", self.silent)
        return self.engine.survivors


def supervised(tmp_path, engine, stopping=lambda: False, servers=0, ranks=2, hosts=(), **limits):
    """Supervise a job; returns (outcome, job, seconds on its clock)."""
    folder = CellFolder(tmp_path / "cell").make()
    strategy = None
    if servers:
        strategy = {"name": "kvstore_dist_sync", "bucket_cap_mb": 25, "servers": servers}
    cell = dataclasses.replace(make_cell(tuple(range(ranks)), strategy), hosts=hosts)
    began, asked = engine.clock.now, Engine(**LIMITS | limits)
    outcome = supervise.run(
        cell,
        folder,
        lambda: engine.start(CellPass(cell, folder, "t", {})),
        asked,
        stopping,
        lambda watch: None,
        clock=engine.clock,
    )
    return outcome, engine.jobs[0], engine.clock.now - began


# Steps of scripts.


def starts(job):
    for number in job.numbers:
        job.write(number, "start", rank=number, pid=100 + number)


def begins(job, iterations=(5, 5)):
    for number, count in enumerate(iterations):
        job.write(number, "beat", phase="timed", iterations=count)


def reaches(phase, *iterations):
    """Every process begins a phase; the first have begun so many iterations."""

    def step(job):
        for number in job.numbers:
            job.write(number, "phase", phase=phase)
            if number < len(iterations):
                job.write(number, "beat", phase=phase, iterations=iterations[number])

    return step


def is_done(job):
    for number in job.numbers:
        job.write(number, "done")


def ends(status):
    return lambda job: setattr(job, "status", status)


def raises(number, kind, message):
    return lambda job: job.write(number, "error", type=kind, message=message)


def is_seen_to_end(*several, agent=1):
    """The agent saw ranks end at once, (number, status) each; then it ends or goes on (None)."""

    def step(job):
        found = {number: {"status": status, "time": job.clock.time()} for number, status in several}
        job.folder.failures.write_text(json.dumps(found))
        job.states |= dict.fromkeys(found, "zombie")
        job.status = agent

    return step


def falls_silent(job):
    """A host is heard no more; that it is lost is known when it does not answer the stop."""
    job.silent = Lost(LOST, job.clock.time())


def is_lost(job):
    """A host is known to be lost before anything else is seen."""
    falls_silent(job)
    job.states["lost"] = job.silent


def becomes(state, *numbers):
    """Processes change their state in the kernel's words: stopped, zombie, gone."""
    return lambda job: job.states.update(dict.fromkeys(numbers, state))


def stands(**stacks):
    """Say where processes stand when asked: rank0=[…], server=[…], newest call first."""

    def step(job):
        for name, frames in stacks.items():
            number = job.cell.world_size if name == "server" else int(name.removeprefix("rank"))
            job.stacks[number] = dump(*frames)

    return step


def dump(*threads):
    """What faulthandler writes: threads of (file, line, function), the main thread last.

    A thread may be a word instead, for a test to replace.
    """
    texts = []
    for number, frames in enumerate(threads):
        if isinstance(frames, str):
            texts.append(frames)
            continue
        head = "Current thread" if number == len(threads) - 1 else "Thread"
        lines = [f"{head} 0x00007f00000{number:05x} (most recent call first):"]
        for file, line, function in frames:
            lines.append(f'  File "{file}", line {line} in {function}')
        texts.append("\n".join([*lines, ""]))
    return "\n".join(texts)
