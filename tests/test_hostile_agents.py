"""What the agent of host b may say instead of its answer: b is named, and host a measures on.

Agents are threads behind pipes, so that a case takes milliseconds.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from build import described, interface, make_cell
from fake_engine import FakeClock

from benchmarks.agent import protocol
from benchmarks.record import CellFolder
from conf.options import Refused
from conf.schema import Engine
from launch.engines import agent_channel, hosts
from launch.engines.engine import CellPass
from launch.engines.hosts import HostsEngine
from launch.supervision import supervise

LONGEST = 1 << 20
LINES = b'{"kind": "start", "time": 1.0, "pid": 9}\n{"kind": "done", "time": 2.0}\n'


def line(say, **content):
    return json.dumps({"say": say, **content}).encode() + b"\n"


def file_line(token, name, data=LINES, at=0):
    return line("file", cell=token, name=name, at=at, data=base64.b64encode(data).decode())


class Agent:
    """Stands in for the command of an agent: answers as one does, and measures a cell at once."""

    phase, answer = "", None  # of host b: when it says something else, and what

    def __init__(self, command, **_):
        self.host, self.pid = command[0], os.getpid()
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "wb", 0), os.fdopen(read, "rb", 0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def poll(self):
        return None if self._thread.is_alive() else 0

    def wait(self, timeout=None):
        self._thread.join(timeout)
        return 0

    def _serve(self):
        with os.fdopen(self._read, "rb") as commands, contextlib.suppress(BrokenPipeError):
            self._say("login", line("ready", pid=7, torch="2"))
            for text in commands:
                command = json.loads(text)
                getattr(self, f"_{command['do']}")(command)
        os.close(self._write)

    def _say(self, phase, honest, token=""):
        answer = honest
        if (self.host, phase) == ("b", Agent.phase):
            answer = Agent.answer(honest, token)
        while answer:
            answer = answer[os.write(self._write, answer) :]

    def _beat(self, command):
        pass

    def _look(self, command):
        address = f"10.0.0.{1 + 'ab'.index(self.host)}/24"
        plain = described(interfaces=[interface("eth0", address)])
        self._say("look", line("looked", said=json.dumps(plain)))

    def _time(self, command):
        self._say("time", line("time", sent=command["sent"], monotonic=time.monotonic()))

    def _listen(self, command):
        ports = dict.fromkeys(command["addresses"], 1234)
        self._say("listen", line("listening", ports=ports, refused={}))

    def _reach(self, command):
        reached = {address: {"interface": "eth0"} for address in command["ports"]}
        self._say("reach", line("reached", found=reached))

    def _run(self, command):
        token, meeting = command["cell"], command["meeting"]
        self._say("start", line("started", cell=token, pid=8), token)
        if meeting["host"] == 0 and meeting["hosts"] > 1:
            self._say("meet", line("meeting", cell=token, port=4321), token)
        for number in command["numbers"]:
            self._say("file", file_line(token, f"ranks/{number}.jsonl"), token)
        self._say("end", line("ended", cell=token, status=0, ranks={}), token)

    def _stop(self, command):
        self._say("stop", line("stopped", cell=command["cell"], survivors=[]), command["cell"])


def with_number(text):
    return lambda honest, token: re.sub(rb": \d[\d.]*", b": " + text, honest, count=1)


def with_values(value):
    def changed(honest, token):
        content = json.loads(honest)
        return line(**dict.fromkeys(content, value) | {"say": content["say"], "cell": token})

    return changed


def always(answer):
    return lambda honest, token: answer


KINDS = {
    "a banner": always(b"Welcome to Ubuntu 22.04\n"),
    "a terminal's command": always(b"\x1b]0;title\x07\n"),
    "an empty line": always(b"\n"),
    "no object": always(b"[1]\n"),
    "no event": always(b"{}\n"),
    "another event": always(b'{"say": "hail"}\n'),
    "no fields": lambda honest, token: line(json.loads(honest)["say"]),
    "null": with_values(None),
    "tables": with_values({"a": {}}),
    "no UTF-8": always(b'{"say": "\xff\xfe"}\n'),
    "too deep": always(b'{"say": ' + b"[" * 100_000 + b"\n"),
    "no end": always(b"\0" * (LONGEST + 1)),
}
NUMBERS = {"NaN": with_number(b"NaN"), "infinity": with_number(b"1e999")}
OF_CELLS = {
    "a file of another rank": lambda honest, token: file_line(token, "ranks/1.jsonl"),
    "a log of another rank": lambda honest, token: file_line(token, "logs/rank1.log"),
    "a file of another host": lambda honest, token: file_line(token, "gpus-1.jsonl"),
    "a file elsewhere": lambda honest, token: file_line(token, "../cell.json"),
    "the record": lambda honest, token: file_line(token, "record.json"),
    "a gap": lambda honest, token: file_line(token, "ranks/0.jsonl", at=9),
    "a place before": lambda honest, token: file_line(token, "ranks/0.jsonl", at=-1),
    "no base64": lambda honest, token: line("file", cell=token, name="cpu.jsonl", at=0, data="*"),
    "many files": lambda honest, token: b"".join(
        file_line(token, f"nccl/{number}.log", b"") for number in range(30)
    ),
    "many answers": lambda honest, token: line("looked", said="") * 300,
    "the end of another rank": lambda honest, token: line(
        "ended", cell=token, status=1, ranks={"1": {"status": -9, "time": 1.0}}
    ),
    "an end at no time": lambda honest, token: line(
        "ended", cell=token, status=1, ranks={"0": {"status": -9, "time": "now"}}
    ),
}
PHASES = ("login", "look", "time", "listen", "reach", "start", "meet", "file", "end", "stop")
CASES = [(kind, phase) for kind in KINDS for phase in PHASES]
CASES += [(kind, phase) for kind in NUMBERS for phase in ("login", "time", "listen", "meet")]
CASES += [(kind, "file") for kind in OF_CELLS]
ANSWERS = KINDS | NUMBERS | OF_CELLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("agents")


@pytest.fixture
def errors(monkeypatch):
    """What threads raised; agents are threads of this process, and waits are short."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    command = SimpleNamespace(Popen=Agent, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(agent_channel, "subprocess", command)
    monkeypatch.setattr(protocol, "MOST_BYTES", LONGEST)
    monkeypatch.setattr(agent_channel, "MOST_BYTES", LONGEST)
    monkeypatch.setattr(hosts, "MOST_FILES", 20)
    quick = SimpleNamespace(sleep=lambda seconds: time.sleep(0.0005), monotonic=time.monotonic)
    monkeypatch.setattr(hosts, "time", quick)
    return raised


@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_the_host_whose_agent_says_something_else_is_named(
    kind, phase, errors, folder, monkeypatch
):
    monkeypatch.setattr(Agent, "phase", phase)
    monkeypatch.setattr(Agent, "answer", ANSWERS[kind])
    names = ["b", "a"]
    if phase == "reach":
        names.reverse()
    engine = HostsEngine(Engine(name="command", prefix=["{host}"]), {})
    sentence = ""
    both, alone = (make_cell((0,), hosts=on) for on in (tuple(names), ("a",)))
    with contextlib.closing(engine):
        try:
            engine.open_on(names, "cpu")
            engine.meet([both])
        except Refused as refusal:
            sentence = str(refusal)
        else:
            outcome = measured(engine, both, folder / f"{kind} {phase}")
            sentence = engine.lost(both) or ""
            if phase == "stop":
                assert outcome.state == "finished", "what was measured before is kept"
            else:
                assert (outcome.state, outcome.failure.cause) == ("failed", "node_lost")
                assert outcome.failure.message == sentence
            assert measured(engine, alone, folder / f"{kind} {phase} alone").state == "finished"
    assert re.match("nodes=b: no agent runs there: |host b( is lost)?: ", sentence), sentence
    assert not errors and "host a" not in sentence and sentence.isprintable()
    assert len(sentence) < 400
    if (kind, phase) == ("a banner", "login"):
        assert "its login printed 'Welcome to Ubuntu 22.04' and must print nothing" in sentence


def measured(engine, cell, path):
    folder = CellFolder(path).make()
    folder.cell.write_text("{}")
    deadline = time.monotonic() + 20

    def start():
        return engine.start(CellPass(cell, folder, path.name, {}))

    return supervise.run(
        cell, folder, start, Engine(), lambda: time.monotonic() > deadline, lambda watch: None,
        clock=FakeClock(),
    )  # fmt: skip
