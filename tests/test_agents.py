"""The agent that serves a sweep: what it forks, what it hands on, what a launcher believes."""

import errno
import functools
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from build import make_cell
from faults_seen import until

from benchmarks.agent import processes, scratch
from benchmarks.agent.processes import write_proc_environ
from benchmarks.agent.protocol import Command, Event, RankEnd, Reader, Writer, read_event
from benchmarks.agent.scratch import Scratch
from benchmarks.rank import host_agent
from benchmarks.rank.host_agent import RunningCell
from benchmarks.record import CellFolder, read_lines
from benchmarks.record.encoding import encoded
from conf.host import NO_TOKEN, TOKEN
from conf.schema import Engine
from launch.engines import agent_channel as channel_module
from launch.engines.agent_channel import AgentGone, CommandChannel, RemoteHost
from launch.engines.engine import CellPass, rank_ends
from launch.engines.hosts import CellOnHost, HostsEngine, _HostsJob
from launch.engines.local import LocalEngine, _ServedJob
from launch.machine.devices import Machine
from launch.study.study_folder import prepare
from launch.supervision import supervise

HERE = Machine("cpu", (), (0, 1), 2)
AROUND = dict(os.environ)  # pytest changes a variable of its own for every test


@pytest.fixture(scope="module")
def engine():
    """An engine of this machine; its agent imports torch once for all tests."""
    local = LocalEngine(HERE, AROUND, Engine(stop_grace_s=1.0))
    local.open(make_cell())
    yield local
    local.close()


def run(engine, folder, stopping=lambda: False, added=None, **options):
    """Run a cell of one worker: (outcome, its folder)."""
    cell, token = make_cell(gpus=(0,), max_seconds=0.05, **options), uuid.uuid4().hex
    inside = prepare(CellFolder(folder), cell)
    start = functools.partial(engine.start, CellPass(cell, inside, token, added or {}))
    outcome = supervise.run(cell, inside, start, Engine(), stopping, lambda watch: None)
    assert processes.of(token) == []
    return outcome, inside


def started(folder):
    return next(read_lines(folder.rank_lines(0)))


def test_an_agent_that_is_gone_leaves_no_descriptor():
    before = psutil.Process().num_fds()
    gone = CommandChannel(["sh", "-c", "echo no such agent >&2; exit 3"], AROUND)
    assert gone.why_gone() == "it ended with status 3: no such agent"
    gone.close()
    assert gone.why_gone() == "it ended with status 3: no such agent"
    del gone
    until(lambda: psutil.Process().num_fds() == before, 10)


def test_one_agent_forks_the_ranks_of_every_cell_and_another_takes_its_place(engine, tmp_path):
    pids = []
    for number in range(2):
        outcome, folder = run(engine, tmp_path / str(number))
        assert outcome.state == "finished" and started(folder)["started"] == "fork"
        pids.append(engine._agent.pid)
    assert pids[0] == pids[1]

    def kill_when_there():
        if (tmp_path / "killed/ranks/0.jsonl").exists() and not engine._agent.ended():
            os.kill(engine._agent.pid, signal.SIGKILL)
        return False

    outcome, _ = run(engine, tmp_path / "killed", kill_when_there, min_seconds=20)
    assert (outcome.state, outcome.failure.cause) == ("failed", "killed")
    assert outcome.failure.message == "the agent ended by SIGKILL before any rank failed"
    os.kill(engine._begin(make_cell()).pid, signal.SIGSTOP)
    until(lambda: processes.state(engine._agent.pid) == "stopped", 10)
    with pytest.raises(AgentGone, match=r"was stopped \(SIGSTOP\) between two runs"):
        run(engine, tmp_path / "stopped")
    # The ranks start anew where torch has read a variable that a cell needs otherwise.
    added = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    outcome, folder = run(engine, tmp_path / "after", added=added)
    assert outcome.state == "finished" and engine._agent.pid != pids[0]
    assert started(folder)["started"] == "exec"
    assert "TORCH_CPP_LOG_LEVEL must be set before torch is" in folder.agent_log.read_text()


def test_the_end_of_its_input_ends_an_agent_and_its_cell(engine, tmp_path):
    cell, token = make_cell(gpus=(0,), min_seconds=60), uuid.uuid4().hex
    folder = prepare(CellFolder(tmp_path), cell)
    engine.start(CellPass(cell, folder, token, {}))
    until(folder.rank_lines(0).exists, 60)
    before = time.monotonic()
    engine.close()
    assert processes.of(token) == [] and time.monotonic() - before < 5


def answers(program):
    return CommandChannel([sys.executable, "-c", program], os.environ)


DENIED = "import sys; print('Permission denied (publickey).', file=sys.stderr); sys.exit(255)"
SRUN = """
import sys
print('srun: error: failed on node n2\\nsrun: Job step aborted', file=sys.stderr)
sys.exit(233)
"""
BANNER = "its login printed 'Welcome to Ubuntu' and must print nothing"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (DENIED, "it ended with status 255: Permission denied (publickey)."),
        ("print('Welcome to Ubuntu')", BANNER),
        (SRUN, "it ended with status 233: srun: error: failed on node n2$"),
        ("", "it ended with status 0$"),
        ("import time; time.sleep(60)", "it gave no answer for 0.5 s"),
    ],
)
def test_a_command_that_starts_no_agent_is_a_sentence(program, why, monkeypatch):
    monkeypatch.setattr(channel_module, "LEAVE_S", 0.5)
    channel = answers(program)
    with pytest.raises(AgentGone, match=f"^{why[:40].replace('(', '.')}"):
        channel.answer(Event.READY, 0.5 if "no answer" in why else 20)
    if "status" in why:
        with pytest.raises(AgentGone):
            for _ in range(3):
                channel.send(Command.BEAT)
                time.sleep(0.1)
    before = time.monotonic()
    channel.close()
    assert time.monotonic() - before < 3


def test_an_agent_that_says_that_it_is_busy_is_not_silent_meanwhile():
    busy = """print('{"say": "busy", "for_s": 100}', flush=True); input()"""
    channel = answers(busy)
    host = RemoteHost("a", channel)
    until(lambda: channel.heard > time.monotonic() + 50, 20)
    assert host.answers(3.0)
    channel.close()
    assert not host.answers(3.0) and "its agent is gone" in host.lost.sentence


def test_lines_come_whole_whatever_the_pieces():
    reading, writing = os.pipe()
    reader, writer = Reader(reading, longest=100), Writer(writing)
    writer.send({"say": "beat", "text": "ä\n"})
    assert reader.receive() == ['{"say": "beat", "text": "ä\\n"}'.encode()]
    os.write(writing, b'{"say": "be')
    assert reader.receive() == []
    os.write(writing, b'at"}\n{"a": 1}\nx')
    assert reader.receive() == [b'{"say": "beat"}', b'{"a": 1}']
    os.write(writing, b"x" * 100)
    assert reader.receive() == [b"x" * 101], "what is too long is not a message"
    writer.send({"long": "y" * (1 << 18)})  # more than a pipe holds: nobody waits
    assert writer.waiting_bytes > 0
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        writer.flush()
    os.close(writing)


FORKS = """
import os, sys, time
from benchmarks.agent.processes import write_proc_environ
if os.fork() == 0:
    write_proc_environ(*sys.argv[1:])
    os.fork()
time.sleep(60)
"""


def test_what_the_kernel_shows_of_a_process_is_changed_in_its_fork_alone():
    token = uuid.uuid4().hex
    command = [sys.executable, "-c", FORKS, TOKEN, token]
    channel = CommandChannel(command, {**os.environ, TOKEN: NO_TOKEN})
    until(lambda: len(processes.of(token)) == 2, 20)
    assert channel.pid in [one.pid for one in processes.of(NO_TOKEN)]
    assert processes.end(token, 0.0) == []
    channel._process.kill()
    channel.close()
    with pytest.raises(ValueError, match="did not begin with 3 characters"):
        write_proc_environ("RINGSIDE_NOTHING", "abc")


@pytest.fixture
def handed_on(tmp_path, monkeypatch):
    """A scratch folder, and a function that brings what is new in it into another folder."""
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    made = Scratch.make("t", {"cell.json": "{}"})
    here = CellFolder(tmp_path / "here").make()
    part = CellOnHost(None, 1, "t", here, [1])

    def bring():
        for chunk in made.changed_files():
            message = read_event(encoded({"say": "file", "cell": "t", **chunk}))
            part.take(Event.FILE, message)
        files = [path for path in here.path.rglob("*") if path.is_file()]
        return {path.relative_to(here.path).as_posix(): path.read_text() for path in files}

    yield made, part, bring
    made.remove()
    assert list(tmp_path.glob("ringside-*")) == []


def test_files_of_a_host_grow_here_as_they_grow_there(handed_on):
    made, _, bring = handed_on
    there = CellFolder(made.folder)
    assert bring() == {"nccl/nccl.conf": ""}
    there.rank_lines(1).write_text("one\n")
    there.rank_count(1).write_text("  7")
    there.agent_log.write_text("a")
    (there.path / "nccl/host.5.log").write_text("n")
    (there.path / ".output.txt.x").write_text("half")
    (there.path / "rank1.json").write_text("half")  # a trace, packed once it is whole
    assert bring() == {
        "nccl/nccl.conf": "", "nccl/1-host.5.log": "n", "ranks/1.jsonl": "one\n",
        "ranks/1.count": "  7", "logs/agent-1.log": "a",
    }  # fmt: skip
    with there.rank_lines(1).open("a") as file:
        file.write("two\n")
    there.rank_count(1).write_text("  8")
    files = bring()
    assert files["ranks/1.jsonl"] == "one\ntwo\n" and files["ranks/1.count"] == "  8"


STOPPED = {"cell": "t", "survivors": []}


def test_a_full_disk_of_a_host_is_told_without_a_file_there(handed_on, monkeypatch):
    made, part, _ = handed_on
    ended = SimpleNamespace(survivors=[], ranks={0: RankEnd(1, 3.0)}, folder=part.folder)
    part.host = ended.host = SimpleNamespace(
        channel=SimpleNamespace(send=lambda *_, **__: part.take(Event.STOPPED, STOPPED))
    )
    for status in (None, 7):
        if status:
            made.keep_ends({"1": {"status": status, "time": 2.0}})
        monkeypatch.setattr(host_agent, "is_full", lambda folder: True)
        cell = SimpleNamespace(_scratch=made, _status=1, _is_asked_to_end=False, _numbers=[1])
        ends = {"cell": "t", "status": 1, "ranks": RunningCell.rank_ends(cell)}
        part.take(Event.ENDED, read_event(encoded({"say": "ended", **ends})))
        _HostsJob(make_cell(), "t", [ended, part], 1.0).stop(0.0)
        first, second = rank_ends(part.folder)[0], rank_ends(part.folder)[1]
        assert (first.status, second.status) == (1, status) and part.error is None
        assert second.why == f"there is no space left in {made.folder.parent}"


ELSEWHERE = ["../cell.json", "/etc/x", "ranks/../x", ".lock", "ranks/.x", "other/x", "a/b/c", "",
             "a\n", "ranks/0.jsonl", "ranks/2.count", "output.txt", "cpu-2.jsonl"]  # fmt: skip


def test_an_agent_writes_nowhere_else_and_a_gap_in_a_file_is_no_sample(handed_on):
    _, part, _ = handed_on
    message = {"cell": "t", "name": "ranks/1.jsonl", "at": 0, "data": b"x\n"}
    for name in ELSEWHERE:
        with pytest.raises(ValueError, match="is not a file of this host's ranks"):
            part.take(Event.FILE, message | {"name": name})
    part.take(Event.FILE, message | {"cell": "the one before"})
    part.take(Event.FILE, message)
    for at in (9, 0):
        with pytest.raises(ValueError, match=f"2 bytes are here, the next are from {at}"):
            part.take(Event.FILE, message | {"at": at})


def test_what_a_killed_agent_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    alive = Scratch.make("a", {})
    left = tmp_path / "ringside-dead-1"
    left.mkdir()
    (left / ".agent").write_text("")
    (tmp_path / "ringside-not-ours").mkdir()
    scratch.remove_left()
    assert not left.exists() and alive.folder.exists() and (tmp_path / "ringside-not-ours").exists()
    alive.remove()


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(CellFolder, "make", lambda self: Path("/proc/none").mkdir())
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="/proc/none"):
        Scratch.make("t", {"cell.json": "{}"})
    assert psutil.Process().num_fds() == before and list(tmp_path.iterdir()) == []


def test_a_launcher_hears_at_once_that_a_cell_has_ended():
    job, token = _ServedJob(NO_TOKEN), {"cell": NO_TOKEN}
    threading.Timer(0.05, job.take, (Event.STARTED, {**token, "pid": 1})).start()
    threading.Timer(0.2, job.take, (Event.ENDED, {**token, "status": 0})).start()
    began = time.monotonic()
    job.wait(10.0)
    assert 0.15 < time.monotonic() - began < 5 and job.poll() == 0


class ScriptedChannel:
    """The agent of a host that answers at once, or that is found to be gone when it is asked."""

    wrong, heard = "", float("inf")

    def __init__(self, gone=False):
        self._gone, self._status = gone, None

    def listen(self, take):
        self._take = take

    def send(self, what, **content):
        if what == Command.STOP and not self._gone:
            self._take(Event.STOPPED, {"cell": content["cell"], "survivors": []})

    def answer(self, expected, seconds):
        if self._gone:
            self._status = 137
            raise AgentGone(self.why_gone())
        return {"monotonic": time.monotonic()}

    def ended(self):
        return self._status

    def why_gone(self):
        return "it ended with status 137"


def test_a_host_that_is_lost_before_a_cell_has_begun_costs_no_other_host(tmp_path):
    hosts = {name: RemoteHost(name, ScriptedChannel(gone=name == "b")) for name in ("a", "b")}
    engine = HostsEngine(Engine(), {})
    engine._hosts = hosts
    cell = make_cell(gpus=(0,), hosts=("a", "b"))
    job = engine.start(CellPass(cell, CellFolder(tmp_path), "t", {}))
    before = time.monotonic()
    assert job.stop(0.0) == [] and time.monotonic() - before < 1
    assert job.lost().sentence == "host b is lost: its agent is gone, it ended with status 137"
    assert hosts["a"].lost is None


def test_hosts_have_some_time_to_tell_which_of_them_failed_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("launch.engines.hosts.time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = parts = [SimpleNamespace(error=None, why="", status=None) for _ in range(2)]
    job = _HostsJob(make_cell(), "t", parts, 1.0)
    assert job.poll() is None
    first.status = 1
    assert job.poll() is None
    second.status = -9
    assert job.poll() == 1
    second.status = None
    now[0] += 5.0
    assert job.poll() == 1


def test_an_agent_that_cannot_be_started_yet_is_told_by_a_cell(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("launch.engines.local.CommandChannel", full)
    local = LocalEngine(HERE, AROUND, Engine(stop_grace_s=1.0))
    local.open(make_cell())  # an error here ended the sweep
    with pytest.raises(OSError, match="Too many open files"):
        local.start(CellPass(make_cell(), CellFolder(tmp_path), "t", {}))


def test_no_beat_waits_for_a_lost_host(monkeypatch):
    monkeypatch.setattr("launch.engines.hosts.BEAT_S", 0.0)
    engine, told = HostsEngine(Engine(), {}), []
    engine._hosts = {name: RemoteHost(name, ScriptedChannel()) for name in ("frozen", "alive")}
    for name, host in engine._hosts.items():
        host.channel.send = lambda what, name=name: told.append(name) or engine._closed.set()
    engine._hosts["frozen"].is_lost("its agent gave no sign of life for 20 s", 20.0)
    engine._beat()
    assert told == ["alive"]
